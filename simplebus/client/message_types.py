"""Which class a type's messages are of: bindings, and where they are looked up.

Rule 1: a binding is found by a value's exact type. A subclass is another type with a binding of
        its own, or none.
Rule 2: a class has one type, and a type one class. What would make it two is refused when it is
        bound, with both named.

    type ──bindings──► Binding ◄──by_class── class id
                       encode  ◄──by_name─── name
                       decode

Publishing is `registry.bindings[type(value)].encode(value)`: one look-up in a dict, and the
library's encoder. A type that another type of the same name replaces, as when a notebook's cell
runs again or a module is reloaded, gives its binding up to it.
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
    make_decoder,
    find_default_codec_name,
    runtime_type,
    format_type,
)
from simplebus.client.core.client import check_class_id
from simplebus.core.errors import BusError

T = TypeVar("T")


class UnboundTypeError(BusError, TypeError):
    """A value's type is bound to no class. Nothing was sent."""


@dataclass(frozen=True, slots=True, eq=False)
class Binding(Generic[T]):
    """Which class a type's messages are of, and how they become payloads."""

    type: builtins.type[T]
    class_id: int | None
    """None when the class is known by its name alone: the bus gives an id to it."""
    name: str | None
    """None when the class is known by its id alone."""
    codec: Codec[T]
    encode: Callable[[T], bytes] = field(repr=False)
    """A value's payload, without a look at the value's type: look the binding up by it."""
    decode: Callable[[bytes], T] = field(repr=False)
    """A payload's value. Raises DecodeError, which names the class."""

    def prepare(self) -> None:
        """Build what decoding needs now, so that a type's fault shows before the first message.

        Raises what is wrong with the type's fields, NameError for one whose type does not exist.
        """
        if isinstance(self.codec, LibraryCodec):
            self.codec.prepare()


class Registry:
    """Types and the classes that they are bound to."""

    def __init__(self) -> None:
        self.bindings: dict[Any, Binding[Any]] = _Bindings(self)
        """Every binding by its type: `bindings[type(value)]`. Only to be read.

        A missing type raises UnboundTypeError; `get` gives None.
        """
        self._by_id: dict[int, Binding[Any]] = {}
        self._by_name: dict[str, Binding[Any]] = {}

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

        Args: a class, or a generic one with its arguments; the class's id; its name, which is
        the type's `module.qualname` when neither is given; "json", "msgpack", "pydantic" or
        "protobuf", an object with name, encode and decode, or nothing for the type's default.
        Raises ValueError when the id, the name or the type is bound otherwise already, and
        TypeError for a type without a codec or without a meaning: int, str, dict and the other
        builtins. Binding the same again changes nothing.
        """
        _check_meaning(type_)
        if class_id is not None:
            check_class_id(class_id)
        name = _checked_name(type_, name) if name is not None or class_id is None else None
        used = _checked_codec(type_, codec)
        binding = Binding(
            type_,
            class_id,
            name,
            used,
            encode=used.encode_exact if isinstance(used, LibraryCodec) else used.encode,
            decode=make_decoder(used, type_=type_, class_id=class_id, class_name=name),
        )
        in_the_way = list(self._in_the_way_of(binding))
        for old in in_the_way:
            if _is_same(old, binding):
                return old
            if not _is_redefined(old.type, by=type_):
                raise ValueError(_conflict(old, binding))
        for old in in_the_way:
            self._forget(old)
        self.bindings.update(dict.fromkeys(_keys(type_), binding))
        if class_id is not None:
            self._by_id[class_id] = binding
        if name is not None:
            self._by_name[name] = binding
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
        """`bind` as a decorator: `@simplebus.message(class_id=7)` above a class.

        It stands above decorators that make the class a dataclass or an attrs class.
        """
        if type_ is None:
            return partial(_bound, self, class_id=class_id, name=name, codec=codec)
        return _bound(self, type_)

    def binding_of(self, type_: type[T]) -> Binding[T]:
        """The binding of exactly this type.

        Raises UnboundTypeError, which says how to bind it.
        """
        return self.bindings[type_]

    def by_class(self, class_id: int) -> Binding[Any] | None:
        """The binding of a class id. None when no type is bound to it by its id."""
        return self._by_id.get(class_id)

    def by_name(self, name: str) -> Binding[Any] | None:
        """The binding of a class's name. None when no type is bound to it by its name."""
        return self._by_name.get(name)

    def _in_the_way_of(self, new: Binding[Any]) -> Iterator[Binding[Any]]:
        """The bindings that cannot stand beside a new one: those of its type come first."""
        found = [self.bindings.get(key) for key in _keys(new.type)]
        found.append(None if new.class_id is None else self._by_id.get(new.class_id))
        found.append(None if new.name is None else self._by_name.get(new.name))
        found += [old for old in self.bindings.values() if _is_redefined(old.type, by=new.type)]
        yield from dict.fromkeys(old for old in found if old is not None)

    def _forget(self, old: Binding[Any]) -> None:
        for key in _keys(old.type):
            self.bindings.pop(key, None)
        if old.class_id is not None:
            self._by_id.pop(old.class_id, None)
        if old.name is not None:
            self._by_name.pop(old.name, None)

    def unbound(self, type_: object) -> UnboundTypeError:
        """What is said about a type without a binding."""
        try:
            _check_meaning(type_)
        except TypeError as error:
            return UnboundTypeError(str(error))
        own = get_origin(type_) or type_
        assert isinstance(own, type)
        if own in self.bindings:
            return UnboundTypeError(_beside(type_, self.bindings[own].type))
        line = f'{own.__qualname__.split(">.")[-1]}, name="{_suggested_name(own)}"'
        if find_default_codec_name(type_) is None:
            line += ", codec=…"
        base = next((base for base in own.__mro__[1:] if base in self.bindings), None)
        other = "" if base is None else f" ({format_type(base)} is, but for its exact type alone)"
        return UnboundTypeError(
            f"{format_type(type_)} is bound to no class{other}; bind it once, before its first use: "
            f"{'simplebus' if self is DEFAULT_REGISTRY else 'registry'}.bind({line})"
        )

    def __repr__(self) -> str:
        return f"<Registry of {len(set(self.bindings.values()))} types>"


class _Bindings(dict[Any, Binding[Any]]):
    """A dict whose missing keys are explained."""

    __slots__ = ("_registry",)

    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    def __missing__(self, type_: object) -> Binding[Any]:
        raise self._registry.unbound(type_)


def _bound(registry: Registry, type_: type[T], /, **how: Any) -> type[T]:
    registry.bind(type_, **how)
    return type_


def _keys(type_: Any) -> tuple[Any, ...]:
    """The type itself, and for a generic one with arguments the class that its values have."""
    origin = get_origin(type_)
    return (type_,) if origin is None else (type_, origin)


def _check_meaning(type_: object) -> None:
    """Raise TypeError for what cannot be a message's type, whatever the codec."""
    if type_ in (bytes, bytearray, memoryview):
        raise TypeError(
            f"{format_type(type_)} needs no binding: publish it raw, with the class beside it: "
            "publish(payload, class_id=…)"
        )
    runtime_type(type_)  # Anything that is no class is refused here.
    own = get_origin(type_) or type_
    assert isinstance(own, type)
    if issubclass(own, type):
        raise TypeError("a class is no message; publish a value of it")
    if own.__module__ != "builtins":
        return
    hint = " (a TypedDict's values are dicts: name their type)" if own is dict else ""
    raise TypeError(
        f"{format_type(own)} says what a value is, not what it means, and is bound to no class"
        f"{hint}; give it a type of its own, for example class Temperature(msgspec.Struct): "
        "celsius: float, or publish bytes with class_id=…"
    )


def _checked_name(type_: Any, name: str | None) -> str:
    if name is None:
        own = get_origin(type_) or type_
        if own.__module__ == "__main__":
            raise ValueError(
                f"{format_type(type_)} is called otherwise by a program that imports it; give "
                f'class_id=, or a name for all programs, for example name="{_suggested_name(own)}"'
            )
        return format_type(own)
    if not isinstance(name, str) or not name.isprintable() or not name or " " in name:
        raise ValueError(f"a class's name is printable text without spaces, got {name!r}")
    return name


def _checked_codec(type_: type[T], codec: CodecName | Codec[T] | None) -> Codec[T]:
    if codec is None or isinstance(codec, str):
        return find_codec(type_, codec)
    is_codec = isinstance(getattr(codec, "name", None), str) and all(
        callable(getattr(codec, verb, None)) for verb in ("encode", "decode")
    )
    if isinstance(codec, type) or not is_codec:
        raise TypeError(
            "codec= is the name of a codec, or an object with name, encode(value) and "
            f"decode(payload), got {codec!r}"
        )
    return codec


def _is_same(old: Binding[Any], new: Binding[Any]) -> bool:
    if (old.type, old.class_id, old.name) != (new.type, new.class_id, new.name):
        return False
    if isinstance(old.codec, LibraryCodec) and isinstance(new.codec, LibraryCodec):
        return old.codec.name == new.codec.name
    return bool(old.codec == new.codec)


def _is_redefined(old: Any, *, by: Any) -> bool:
    """Whether `by` takes the place that `old` has, or had, in its module."""
    old, by = get_origin(old) or old, get_origin(by) or by
    if old is by or (old.__module__, old.__qualname__) != (by.__module__, by.__qualname__):
        return False
    try:
        held = attrgetter(by.__qualname__)(sys.modules[by.__module__])
    except (AttributeError, KeyError):
        return False
    return held is old or held is by


def _conflict(old: Binding[Any], new: Binding[Any]) -> str:
    if old.type == new.type:
        return (
            f"{shown_type(old.type)} is bound as {_how(old)} already, and cannot be bound as "
            f"{_how(new)} too"
        )
    if set(_keys(old.type)) & set(_keys(new.type)):
        return _beside(new.type, old.type)
    shared = (
        f"class id {new.class_id}"
        if new.class_id is not None and new.class_id == old.class_id
        else f"class name {new.name!r}"
    )
    return (
        f"{shared} is bound to {format_type(old.type)} already, and cannot be bound to "
        f"{format_type(new.type)} too"
    )


def _beside(new: object, old: object) -> str:
    return (
        f"{format_type(new)} cannot be bound beside {format_type(old)}: at run time their values "
        "have one type; make a class of each, as in class Orders(Page[Order]): pass"
    )


def _how(binding: Binding[Any]) -> str:
    return f"class_id={binding.class_id}, name={binding.name!r}, codec={binding.codec.name!r}"


def _suggested_name(own: type) -> str:
    """ShopCreated is shop-created, HTTPError http-error."""
    word = re.sub(r"\W+.*", "", own.__name__)
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "-", word).lower()


DEFAULT_REGISTRY = Registry()
"""The registry of a program that names none."""

bind = DEFAULT_REGISTRY.bind
message = DEFAULT_REGISTRY.message
