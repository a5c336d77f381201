"""How a value becomes a payload and back: a codec per type, made once.

Rule 1: pydantic, protobuf and attrs are recognised by what their types can do, never imported.
Rule 2: making a codec looks at the type, not at its fields: they may name types that do not exist
        yet. What decoding needs of them is built on first use, or by `prepare`.
Rule 3: whatever a payload makes a codec raise is a DecodeError. What is wrong with the type, not
        with the payload, is raised as it is.

    type                                                        its codecs, the default first
    ──────────────────────────────────────────────────────────────────────────────────────────
    msgspec.Struct, dataclass, attrs, TypedDict, NamedTuple     json, msgpack
    pydantic model or dataclass                                 pydantic (JSON, by alias)
    protobuf message                                            protobuf
    bytes                                                       bytes, json, msgpack
    what else msgspec knows (an enum, a datetime, list[int])    json, msgpack; no default

The first row is checked when it is decoded, not when it is encoded: a Struct whose field holds a
value of another type is encoded as it is, and refused by who reads it.
"""

from __future__ import annotations

import dataclasses
import sys
import types
from collections.abc import Callable
from typing import Annotated, Any, Generic, Literal, Protocol, TypeVar, cast, get_args, get_origin

import msgspec
import msgspec.inspect

from simplebus.core.errors import BusError

T = TypeVar("T")

CodecName = Literal["json", "msgpack", "pydantic", "protobuf"]
"""The codecs that can be asked for by name."""

_NAMES: tuple[CodecName, ...] = get_args(CodecName)
_MSGSPEC: tuple[CodecName, ...] = ("json", "msgpack")
_SHOWN_BYTES = 40
_SHOWN_REASON = 300

_OWN_CODEC = "give codec= an object with name, encode(value) and decode(payload)"


class Codec(Protocol[T]):
    """What turns values of a type into payloads and back. Anything with these three is one."""

    @property
    def name(self) -> str:
        """What errors call it."""

    def encode(self, value: T) -> bytes:
        """The value as a payload. Raises TypeError for a value of another type."""

    def decode(self, payload: bytes) -> T:
        """The payload as a value. Whatever it raises says that the payload is none."""


class DecodeError(BusError):
    """A payload is no value of the type that its class is bound to."""

    def __init__(
        self,
        sentence: str,
        *,
        payload: bytes = b"",
        type_: object = None,
        codec: str = "",
        class_id: int | None = None,
        class_name: str | None = None,
    ) -> None:
        super().__init__(sentence)
        self.payload = payload
        """What came, whole."""
        self.type = type_
        """What was expected."""
        self.codec = codec
        """The name of the codec that could not read it."""
        self.class_id = class_id
        """None when the codec was used by itself, or the class is bound by name alone."""
        self.class_name = class_name
        """None when the codec was used by itself, or the class is bound by id alone."""
        self.message: object = None
        """The message that held it, when it came from a subscription, or is a reply."""

    def of_reply(self, reply: Any) -> DecodeError:
        """The same about a reply, whose class is not the one that its type is bound to."""
        found = DecodeError(
            f"a reply is{str(self).partition(' is')[2]}",
            payload=self.payload,
            type_=self.type,
            codec=self.codec,
            class_id=reply.class_id,
        )
        found.message = reply
        return found


class LibraryCodec(Generic[T]):
    """A codec for values of exactly one type, whose work a library does."""

    __slots__ = ("_build_decoder", "_built", "_runtime_type", "decode", "encode_exact", "name", "type")

    def __init__(
        self,
        type_: type[T],
        *,
        name: CodecName,
        encode_exact: Callable[[T], bytes],
        build: Callable[[], Callable[[bytes], T]],
    ) -> None:
        self.type = type_
        self.name: CodecName = name
        self.encode_exact = encode_exact
        """`encode` without its look at the value's type: for who has looked already."""
        self.decode: Callable[[bytes], T] = make_decoder(self)
        """The payload as a value. Raises DecodeError."""
        self._runtime_type = runtime_type(type_)
        self._build_decoder = build
        self._library_decoder: Callable[[bytes], T] | None = None
        """The library's decoder; None until it is needed."""

    def encode(self, value: T) -> bytes:
        """The value as a payload. Raises TypeError for a value of another type, or a subclass."""
        if type(value) is not self._runtime_type:
            raise TypeError(
                f"the {self.name} codec of {format_type(self.type)} takes values of exactly type "
                f"{format_type(self._runtime_type)}, got one of type {format_type(type(value))}"
            )
        return self.encode_exact(value)

    def prepare(self) -> Callable[[bytes], T]:
        """Build the library's decoder, once. Raises what is wrong with the type's fields."""
        if self._library_decoder is None:
            try:
                self._library_decoder = self._build_decoder()
            except Exception as error:
                error.add_note(
                    f"This is about the fields of {format_type(self.type)}, which the {self.name} "
                    "codec reads on first use: their types must be found in the type's module."
                )
                raise
        return self._library_decoder

    def __repr__(self) -> str:
        return f"<{self.name} codec of {format_type(self.type)}>"


class _BytesCodec:
    """Payloads as they are."""

    __slots__ = ()
    name = "bytes"

    def encode(self, value: bytes | bytearray | memoryview) -> bytes:
        if type(value) is bytes:
            return value
        if isinstance(value, bytes | bytearray | memoryview):
            return bytes(value)
        raise TypeError(
            "the bytes codec takes values of type bytes, bytearray or memoryview, got one of type "
            f"{format_type(type(value))}"
        )

    def decode(self, payload: bytes) -> bytes:
        return payload

    def __repr__(self) -> str:
        return "<bytes codec>"


BYTES_CODEC: Codec[bytes] = _BytesCodec()
"""The codec of those who want the payload as it is."""


def find_codec(type_: type[T], name: CodecName | None = None) -> Codec[T]:
    """A codec for a type: the one asked for, or the type's default.

    Raises TypeError when there is none, ValueError for a name that is no codec's.
    """
    if name is not None and name not in _NAMES:
        raise ValueError(f"there is no codec {name!r}; expected one of {_listed(_NAMES)}")
    runtime_type(type_)  # Anything that is no class is refused here.
    if name is None and type_ is bytes:
        return cast(Codec[T], BYTES_CODEC)
    default = find_default_codec_name(type_)
    choices = _MSGSPEC if default in (None, "json") else (default,)
    if name is not None and name not in choices:
        raise TypeError(
            f"the {name} codec does not take {shown_type(type_)}; expected {_listed(choices)}, "
            f"or {_OWN_CODEC}"
        )
    if default is None and not _is_known_to_msgspec(type_):
        raise TypeError(
            f"no codec takes {format_type(type_)}: json and msgpack take msgspec.Struct, dataclass, "
            "attrs, TypedDict and NamedTuple types, pydantic and protobuf their own; for another, "
            f"{_OWN_CODEC}; where a decorator makes the class one of these, the binding decorator "
            "stands above it"
        )
    chosen = name or default
    if chosen is None:
        raise TypeError(
            f"{shown_type(type_)} has no codec of its own; ask for {_listed(_MSGSPEC)} by codec=, "
            f"or {_OWN_CODEC}"
        )
    encode, build = _MAKERS[chosen](type_)
    return LibraryCodec(type_, name=chosen, encode_exact=encode, build=build)


def find_default_codec_name(type_: object) -> CodecName | None:
    """The codec that a type gets when none is asked for. None when it has to be."""
    if hasattr(type_, "SerializeToString") and hasattr(type_, "FromString"):
        return "protobuf"
    if hasattr(type_, "model_validate_json") or hasattr(type_, "__pydantic_validator__"):
        return "pydantic"
    own = get_origin(type_) or type_
    if not isinstance(own, type):
        return None
    is_record = (
        issubclass(own, msgspec.Struct)
        or dataclasses.is_dataclass(own)
        or hasattr(own, "__attrs_attrs__")
        or is_typed_dict(own)
        or (issubclass(own, tuple) and hasattr(own, "_fields"))
    )
    return "json" if is_record else None


def make_decoder(
    codec: Codec[T],
    *,
    type_: object = None,
    class_id: int | None = None,
    class_name: str | None = None,
) -> Callable[[bytes], T]:
    """The codec's `decode`, where whatever a payload makes it raise is a DecodeError."""
    decode: Callable[[bytes], T] | None = None

    def decode_or_explain(payload: bytes) -> T:
        nonlocal decode
        if decode is None:
            decode = codec.prepare() if isinstance(codec, LibraryCodec) else codec.decode
        try:
            return decode(payload)
        except Exception as error:
            expected = codec.type if isinstance(codec, LibraryCodec) else type_
            raise DecodeError(
                f"a message{_of_class(class_id, class_name)} is no {shown_type(expected)} by the "
                f"{codec.name} codec: {_reason(error)}; its payload is {_shown_payload(payload)}",
                payload=payload,
                type_=expected,
                codec=codec.name,
                class_id=class_id,
                class_name=class_name,
            ) from error

    return decode_or_explain


def runtime_type(type_: object) -> type:
    """What `type(value)` is for this type's values. Raises TypeError for what is no class."""
    own = get_origin(type_) or type_
    if not isinstance(own, type) or own in (types.UnionType, Annotated):
        raise TypeError(
            f"a message's type is a class, got {type_!r}; of a union bind each member, or a class "
            "with a field for it"
        )
    return dict if is_typed_dict(own) else own


def is_typed_dict(type_: object) -> bool:
    """Whether this is a TypedDict of typing or of typing_extensions."""
    return isinstance(type_, type) and dict in type_.__bases__ and hasattr(type_, "__total__")


def format_type(type_: object) -> str:
    """A type as errors name it: as it is imported, builtins without their module."""
    if not isinstance(type_, type):
        return repr(type_)
    if type_.__module__ == "builtins":
        return type_.__qualname__
    return f"{type_.__module__}.{type_.__qualname__}"


# How each library encodes a value, and how it builds a decoder for a type once that is needed.
_Maker = Callable[[Any], tuple[Callable[[Any], bytes], Callable[[], Callable[[bytes], Any]]]]

_JSON = msgspec.json.Encoder()
_MSGPACK = msgspec.msgpack.Encoder()


def _pydantic(
    type_: Any,
) -> tuple[Callable[[Any], bytes], Callable[[], Callable[[bytes], Any]]]:
    """By alias and without computed fields: what is written is what validation reads."""
    if hasattr(type_, "model_validate_json"):
        return (
            lambda value: value.model_dump_json(by_alias=True, round_trip=True).encode(),
            lambda: type_.model_validate_json,
        )
    adapter: Any = None

    def adapted() -> Any:
        nonlocal adapter
        if adapter is None:
            adapter = sys.modules["pydantic"].TypeAdapter(type_)
        return adapter

    return (
        lambda value: adapted().dump_json(value, by_alias=True, round_trip=True),
        lambda: adapted().validate_json,
    )


_MAKERS: dict[str, _Maker] = {
    "json": lambda type_: (_JSON.encode, lambda: msgspec.json.Decoder(type_).decode),
    "msgpack": lambda type_: (_MSGPACK.encode, lambda: msgspec.msgpack.Decoder(type_).decode),
    "pydantic": _pydantic,
    "protobuf": lambda type_: (type_.SerializeToString, lambda: type_.FromString),
}


def _is_known_to_msgspec(type_: object) -> bool:
    own = get_origin(type_) or type_
    return not isinstance(msgspec.inspect.type_info(own), msgspec.inspect.CustomType)


def _of_class(class_id: int | None, class_name: str | None) -> str:
    words = [str(class_id)] if class_id is not None else []
    words += [repr(class_name)] if class_name is not None else []
    return f" of class {' '.join(words)}" if words else ""


def _reason(error: Exception) -> str:
    """What a library said, on one line, without what it says every time."""
    lines = (line.strip() for line in str(error).splitlines())
    text = " ".join(line for line in lines if line and not line.startswith("For further"))
    if len(text) > _SHOWN_REASON:
        text = f"{text[:_SHOWN_REASON]}…"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _shown_payload(payload: bytes) -> str:
    if len(payload) <= _SHOWN_BYTES:
        return repr(bytes(payload))
    return f"{len(payload)} bytes, the first {_SHOWN_BYTES} {bytes(payload[:_SHOWN_BYTES])!r}"


def _listed(names: tuple[str, ...]) -> str:
    *most, last = map(repr, names)
    return f"{', '.join(most)} or {last}" if most else last
