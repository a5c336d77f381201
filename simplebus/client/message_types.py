"""Bindings of Python types to message classes.

    type ──bindings──► Binding ◄──by_class── class id
                       encode  ◄──by_name─── name
                       decode

A binding is looked up by the exact type of a value, so publishing needs one dict lookup. A type has
one class and a class has one type; a second binding is rejected. Redefining a type under the same
name, as in a notebook or by reloading a module, replaces its binding.
"""

from __future__ import annotations

import builtins
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from typing import Any, Generic, TypeVar, get_origin, overload

from simplebus.client.codecs import (
    Codec,
    CodecName,
    LibraryCodec,
    find_codec,
    find_default_codec_name,
    format_type,
    make_decoder,
    runtime_type,
)
from simplebus.client.core.client import check_class_id
from simplebus.core.errors import BusError

T = TypeVar("T")


class UnboundTypeError(BusError, TypeError):
    """The type of a value is not bound to a class. Nothing was sent."""


@dataclass(frozen=True, slots=True, eq=False)
class Binding(Generic[T]):
    """Binding of a type to a message class, with its encoder and decoder.

    Created by `simplebus.bind` or `Registry.bind`.
    """

    type: builtins.type[T]
    """The bound type."""
    class_id: int | None
    """Id of the class, 0 to 65535; None if it is bound by name only and the server assigns the
    id.
    """
    name: str | None
    """Name of the class; None if it is bound by id only."""
    codec: Codec[T]
    """Codec of the payloads."""
    encode: Callable[[T], bytes] = field(repr=False)
    """Return the payload of a value. The type of the value is not checked."""
    decode: Callable[[bytes], T] = field(repr=False)
    """Return the value of a payload. Raises a DecodeError that names the class."""

    def prepare(self) -> None:
        """Build the decoder now, so that an invalid type fails before the first message.

        Raises:
            NameError: If the type of a field is not defined.
            Exception: Any other error of the codec's library about the fields of the type.
        """
        if isinstance(self.codec, LibraryCodec):
            self.codec.prepare()


class Registry:
    """Bindings of a program. `simplebus.bind` and `simplebus.message` use a default registry.

    Example:
        registry = simplebus.Registry()

        @registry.message(name="orders")
        class Order(msgspec.Struct):
            number: int

        async with simplebus.connect(url, registry=registry) as bus:
            await bus.publish(Order(17))
    """

    def __init__(self) -> None:
        self.bindings: dict[Any, Binding[Any]] = _BindingByType(self)
        """Every binding by its type. Read-only. A missing type raises UnboundTypeError; `get`
        returns None.
        """
        self._binding_by_id: dict[int, Binding[Any]] = {}
        self._binding_by_name: dict[str, Binding[Any]] = {}

    def bind(
        self,
        type_: type[T],
        /,
        *,
        class_id: int | None = None,
        name: str | None = None,
        codec: CodecName | Codec[T] | None = None,
    ) -> Binding[T]:
        """Bind a type to a class, by the class's id, its name or both.

        Binding a type again in the same way returns the existing binding.

        Args:
            type_: The type; a generic one may have arguments, for example `Page[Order]`.
            class_id: Id of the class, 0 to 65535.
            name: Name of the class. Without id and name it is `module.qualname` of the type.
            codec: "json", "msgpack", "pydantic" or "protobuf", or an object with name, encode
                and decode.
                None selects the default codec of the type.

        Returns:
            The binding.

        Raises:
            ValueError: If the id, the name or the type is bound otherwise.
            TypeError: If the type has no codec, or is a builtin such as int, str or dict.

        Example:
            simplebus.bind(Order, name="orders", codec="msgpack")
        """
        _check_bindable(type_)
        if class_id is not None:
            check_class_id(class_id)
        name = _resolve_name(type_, name) if name is not None or class_id is None else None
        resolved_codec = _resolve_codec(type_, codec)
        binding = Binding(
            type_,
            class_id,
            name,
            resolved_codec,
            encode=resolved_codec.encode_exact
            if isinstance(resolved_codec, LibraryCodec)
            else resolved_codec.encode,
            decode=make_decoder(resolved_codec, type_=type_, class_id=class_id, class_name=name),
        )
        conflicts = list(self._find_conflicts(binding))
        for old in conflicts:
            if _is_equivalent(old, binding):
                return old
            if not _is_redefined(old.type, new=type_):
                raise ValueError(_format_conflict(old, binding))
        for old in conflicts:
            self._remove(old)
        self.bindings.update(dict.fromkeys(_lookup_keys(type_), binding))
        if class_id is not None:
            self._binding_by_id[class_id] = binding
        if name is not None:
            self._binding_by_name[name] = binding
        return binding

    @overload
    def message(self, type_: type[T], /) -> type[T]: ...

    @overload
    def message(
        self,
        type_: None = None,
        /,
        *,
        class_id: int | None = None,
        name: str | None = None,
        codec: Codec[T],
    ) -> Callable[[type[T]], type[T]]: ...

    @overload
    def message(
        self,
        type_: None = None,
        /,
        *,
        class_id: int | None = None,
        name: str | None = None,
        codec: CodecName | None = None,
    ) -> Callable[[type[T]], type[T]]: ...

    def message(
        self,
        type_: type[Any] | None = None,
        /,
        *,
        class_id: int | None = None,
        name: str | None = None,
        codec: CodecName | Codec[Any] | None = None,
    ) -> Any:
        """Bind the decorated class to a message class; the decorator form of `bind`.

        Put it above a decorator that makes the class a dataclass or an attrs class.

        Args:
            type_: The class, if the decorator is used without arguments.
            class_id: Id of the class, 0 to 65535.
            name: Name of the class. Without id and name it is `module.qualname` of the type.
            codec: Codec, as for `bind`.

        Returns:
            The decorated class itself.

        Raises:
            ValueError: As for `bind`.
            TypeError: As for `bind`.

        Example:
            @simplebus.message(name="orders")
            @dataclass
            class Order:
                number: int
        """
        if type_ is None:
            return partial(_bind_and_return, self, class_id=class_id, name=name, codec=codec)
        return _bind_and_return(self, type_)

    def binding_of(self, type_: type[T]) -> Binding[T]:
        """Return the binding of exactly this type.

        Args:
            type_: The type of a value.

        Raises:
            UnboundTypeError: If the type is not bound. The message shows how to bind it.
        """
        return self.bindings[type_]

    def by_class(self, class_id: int) -> Binding[Any] | None:
        """Return the binding of a class id; None if no type is bound by this id.

        Args:
            class_id: Id of the class, 0 to 65535.
        """
        return self._binding_by_id.get(class_id)

    def by_name(self, name: str) -> Binding[Any] | None:
        """Return the binding of a class name; None if no type is bound by this name.

        Args:
            name: Name of the class.
        """
        return self._binding_by_name.get(name)

    def _find_conflicts(self, new: Binding[Any]) -> Iterator[Binding[Any]]:
        """Yield the bindings that `new` replaces or conflicts with, those of its type first."""
        candidates = [self.bindings.get(key) for key in _lookup_keys(new.type)]
        candidates.append(None if new.class_id is None else self._binding_by_id.get(new.class_id))
        candidates.append(None if new.name is None else self._binding_by_name.get(new.name))
        candidates += [
            old for old in self.bindings.values() if _is_redefined(old.type, new=new.type)
        ]
        yield from dict.fromkeys(old for old in candidates if old is not None)

    def _remove(self, old: Binding[Any]) -> None:
        for key in _lookup_keys(old.type):
            self.bindings.pop(key, None)
        if old.class_id is not None:
            self._binding_by_id.pop(old.class_id, None)
        if old.name is not None:
            self._binding_by_name.pop(old.name, None)

    def unbound(self, type_: object) -> UnboundTypeError:
        """Return the error for a type without a binding."""
        try:
            _check_bindable(type_)
        except TypeError as error:
            return UnboundTypeError(str(error))
        class_ = get_origin(type_) or type_
        assert isinstance(class_, type)
        if class_ in self.bindings:
            return UnboundTypeError(_format_shared_runtime_type(type_, self.bindings[class_].type))
        bind_arguments = f'{class_.__qualname__.split(">.")[-1]}, name="{_suggested_name(class_)}"'
        if find_default_codec_name(type_) is None:
            bind_arguments += ", codec=…"
        base = next((base for base in class_.__mro__[1:] if base in self.bindings), None)
        hint = ""
        if base is not None:
            hint = f" (its base class {format_type(base)} is, but a binding is not inherited)"
        return UnboundTypeError(
            f"{format_type(type_)} is bound to no class{hint}; bind it once, before its first "
            f"use: {'simplebus' if self is DEFAULT_REGISTRY else 'registry'}.bind({bind_arguments})"
        )

    def __repr__(self) -> str:
        return f"<Registry of {len(set(self.bindings.values()))} types>"


class _BindingByType(dict[Any, Binding[Any]]):
    """Dict that raises UnboundTypeError for a missing type."""

    __slots__ = ("_registry",)

    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    def __missing__(self, type_: object) -> Binding[Any]:
        raise self._registry.unbound(type_)


def _bind_and_return(registry: Registry, type_: type[T], /, **options: Any) -> type[T]:
    registry.bind(type_, **options)
    return type_


def _lookup_keys(type_: Any) -> tuple[Any, ...]:
    """Return the keys of a type: itself, and the runtime type of a generic one with arguments."""
    origin = get_origin(type_)
    return (type_,) if origin is None else (type_, origin)


def _check_bindable(type_: object) -> None:
    """Raise TypeError if the type cannot be bound, with any codec."""
    if type_ in (bytes, bytearray, memoryview):
        raise TypeError(
            f"{format_type(type_)} needs no binding: publish it with its class, as in "
            "publish(payload, class_id=…)"
        )
    runtime_type(type_)  # Raises for anything that is not a class.
    class_ = get_origin(type_) or type_
    assert isinstance(class_, type)
    if issubclass(class_, type):
        raise TypeError("got a class, expected a value; publish an instance of the class")
    if class_.__module__ != "builtins":
        return
    hint = " (a TypedDict's values are dicts: name their type)" if class_ is dict else ""
    raise TypeError(
        f"{format_type(class_)} is a builtin type and cannot be bound to a class{hint}; define a "
        "type for the message, for example class Temperature(msgspec.Struct): celsius: float, "
        "or publish bytes with class_id=…"
    )


def _resolve_name(type_: Any, name: str | None) -> str:
    if name is None:
        class_ = get_origin(type_) or type_
        if class_.__module__ == "__main__":
            raise ValueError(
                f"{format_type(type_)} has another name in a program that imports it; give "
                "class_id=, or a name for all programs, "
                f'for example name="{_suggested_name(class_)}"'
            )
        return format_type(class_)
    if not isinstance(name, str) or not name.isprintable() or not name or " " in name:
        raise ValueError(f"a class's name is printable text without spaces, got {name!r}")
    return name


def _resolve_codec(type_: type[T], codec: CodecName | Codec[T] | None) -> Codec[T]:
    if codec is None or isinstance(codec, str):
        return find_codec(type_, codec)
    is_codec = isinstance(getattr(codec, "name", None), str) and all(
        callable(getattr(codec, method, None)) for method in ("encode", "decode")
    )
    if isinstance(codec, type) or not is_codec:
        raise TypeError(
            "codec= is the name of a codec, or an object with name, encode(value) and "
            f"decode(payload), got {codec!r}"
        )
    return codec


def _is_equivalent(old: Binding[Any], new: Binding[Any]) -> bool:
    if (old.type, old.class_id, old.name) != (new.type, new.class_id, new.name):
        return False
    if isinstance(old.codec, LibraryCodec) and isinstance(new.codec, LibraryCodec):
        return old.codec.name == new.codec.name
    return bool(old.codec == new.codec)


def _is_redefined(old: Any, *, new: Any) -> bool:
    """Return True if `new` replaces `old` under the same name in its module."""
    old, new = get_origin(old) or old, get_origin(new) or new
    if old is new or (old.__module__, old.__qualname__) != (new.__module__, new.__qualname__):
        return False
    try:
        current = attrgetter(new.__qualname__)(sys.modules[new.__module__])
    except (AttributeError, KeyError):
        return False
    return current is old or current is new


def _format_conflict(old: Binding[Any], new: Binding[Any]) -> str:
    if old.type == new.type:
        return (
            f"{format_type(old.type)} is bound as {_format_binding(old)} already, and cannot be "
            f"bound as {_format_binding(new)} too"
        )
    if set(_lookup_keys(old.type)) & set(_lookup_keys(new.type)):
        return _format_shared_runtime_type(new.type, old.type)
    shared = (
        f"class id {new.class_id}"
        if new.class_id is not None and new.class_id == old.class_id
        else f"class name {new.name!r}"
    )
    return (
        f"{shared} is bound to {format_type(old.type)} already, and cannot be bound to "
        f"{format_type(new.type)} too"
    )


def _format_shared_runtime_type(new: object, old: object) -> str:
    return (
        f"{format_type(new)} cannot be bound beside {format_type(old)}: at run time their values "
        "have one type; make a class of each, as in class Orders(Page[Order]): pass"
    )


def _format_binding(binding: Binding[Any]) -> str:
    return f"class_id={binding.class_id}, name={binding.name!r}, codec={binding.codec.name!r}"


def _suggested_name(class_: type) -> str:
    """Return a class name: `shop-created` for ShopCreated, `http-error` for HTTPError."""
    word = re.sub(r"\W+.*", "", class_.__name__)
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "-", word).lower()


DEFAULT_REGISTRY = Registry()
"""The registry of `simplebus.bind`, `simplebus.message` and of a bus without `registry=`."""

bind = DEFAULT_REGISTRY.bind
message = DEFAULT_REGISTRY.message
