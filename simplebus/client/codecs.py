"""Codecs: conversion of values to payloads and back.

    type                                                        its codecs, the default first
    ──────────────────────────────────────────────────────────────────────────────────────────
    msgspec.Struct, dataclass, attrs, TypedDict, NamedTuple     json, msgpack
    pydantic model or dataclass                                 pydantic (JSON, by alias)
    protobuf message                                            protobuf
    bytes                                                       bytes, json, msgpack
    other types that msgspec supports (enum, list[int], …)      json, msgpack; no default

pydantic, protobuf and attrs types are recognized by their methods; the libraries are never
imported.
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
"""Names of the built-in codecs."""

_CODEC_NAMES: tuple[CodecName, ...] = get_args(CodecName)
_MSGSPEC_CODECS: tuple[CodecName, ...] = ("json", "msgpack")
_PAYLOAD_BYTES_SHOWN = 40
_REASON_CHARACTERS_SHOWN = 300

_CUSTOM_CODEC_HINT = "give codec= an object with name, encode(value) and decode(payload)"


class Codec(Protocol[T]):
    """Protocol of a codec. Any object with these three members is one.

    Example:
        class CsvCodec:
            name = "csv"

            def encode(self, value: list[str]) -> bytes:
                return ",".join(value).encode()

            def decode(self, payload: bytes) -> list[str]:
                return payload.decode().split(",")
    """

    @property
    def name(self) -> str:
        """Name of the codec in error messages."""

    def encode(self, value: T) -> bytes:
        """Return the payload of a value.

        Args:
            value: A value of the codec's type.

        Raises:
            TypeError: If `value` has another type.
        """

    def decode(self, payload: bytes) -> T:
        """Return the value of a payload.

        Args:
            payload: The bytes that a publisher wrote.

        Raises:
            Exception: Any exception means that the payload is invalid. The program receives it as a
                DecodeError.
        """


class DecodeError(BusError):
    """A payload is not a value of the type that its class is bound to."""

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
        """The complete payload."""
        self.type = type_
        """The expected type."""
        self.codec = codec
        """Name of the codec."""
        self.class_id = class_id
        """Class id; None if the class is bound by name only, or the codec was called directly."""
        self.class_name = class_name
        """Class name; None if the class is bound by id only, or the codec was called directly."""
        self.message: object = None
        """The received Message; None if the codec was called directly."""

    def of_reply(self, reply: Any) -> DecodeError:
        """Return a copy of this error for a reply. A reply is not in the class of its type."""
        error = DecodeError(
            f"a reply cannot{str(self).partition(' cannot')[2]}",
            payload=self.payload,
            type_=self.type,
            codec=self.codec,
            class_id=reply.class_id,
        )
        error.message = reply
        return error


class LibraryCodec(Generic[T]):
    """Codec for values of exactly one type, implemented by a library.

    Creating it inspects the type, but not its fields, because field types may be defined later. The
    library's decoder is built on first use or by `prepare`.

    The json and msgpack codecs check types when they decode, not when they encode. A Struct with a
    field value of a wrong type is encoded, and the receiver rejects it.
    """

    __slots__ = (
        "_build_decoder",
        "_library_decoder",
        "_runtime_type",
        "decode",
        "encode_exact",
        "name",
        "type",
    )

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
        """`encode` without its type check, for callers that have checked the type."""
        self.decode: Callable[[bytes], T] = make_decoder(self)
        """Return the value of a payload. Raises DecodeError."""
        self._runtime_type = runtime_type(type_)
        self._build_decoder = build
        self._library_decoder: Callable[[bytes], T] | None = None
        """The library's decoder; None until it is built."""

    def encode(self, value: T) -> bytes:
        """Return the payload of `value`.

        Raises:
            TypeError: If the type of `value` is another one or a subclass.
        """
        if type(value) is not self._runtime_type:
            raise TypeError(
                f"the {self.name} codec of {format_type(self.type)} takes values of exactly type "
                f"{format_type(self._runtime_type)}, got one of type {format_type(type(value))}"
            )
        return self.encode_exact(value)

    def prepare(self) -> Callable[[bytes], T]:
        """Build the library's decoder. Raises the library's error if a field's type is invalid."""
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
    """Codec that returns payloads unchanged."""

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
"""The default codec of bytes."""


def find_codec(type_: type[T], name: CodecName | None = None) -> Codec[T]:
    """Return the codec `name` for a type, or the default codec of the type.

    Raises:
        TypeError: If the type has no such codec.
        ValueError: If `name` is not the name of a codec.
    """
    if name is not None and name not in _CODEC_NAMES:
        raise ValueError(
            f"there is no codec {name!r}; expected one of {_format_choices(_CODEC_NAMES)}"
        )
    runtime_type(type_)  # Raises for anything that is not a class.
    if name is None and type_ is bytes:
        return cast(Codec[T], BYTES_CODEC)
    default_name = find_default_codec_name(type_)
    choices = _MSGSPEC_CODECS if default_name in (None, "json") else (default_name,)
    if name is not None and name not in choices:
        raise TypeError(
            f"the {name} codec does not take {format_type(type_)}; "
            f"expected {_format_choices(choices)}, or {_CUSTOM_CODEC_HINT}"
        )
    if default_name is None and not _is_supported_by_msgspec(type_):
        raise TypeError(
            f"no codec takes {format_type(type_)}: json and msgpack take msgspec.Struct, "
            "dataclass, attrs, TypedDict and NamedTuple types, pydantic and protobuf their own; "
            "for another, "
            f"{_CUSTOM_CODEC_HINT}; if a decorator makes the class one of these, put the binding "
            "decorator above it"
        )
    codec_name = name or default_name
    if codec_name is None:
        raise TypeError(
            f"{format_type(type_)} has no default codec; "
            f"select {_format_choices(_MSGSPEC_CODECS)} by codec=, or {_CUSTOM_CODEC_HINT}"
        )
    encode, build_decoder = _CODEC_FACTORIES[codec_name](type_)
    return LibraryCodec(type_, name=codec_name, encode_exact=encode, build=build_decoder)


def find_default_codec_name(type_: object) -> CodecName | None:
    """Return the name of a type's default codec; None if there is no default."""
    if hasattr(type_, "SerializeToString") and hasattr(type_, "FromString"):
        return "protobuf"
    if hasattr(type_, "model_validate_json") or hasattr(type_, "__pydantic_validator__"):
        return "pydantic"
    class_ = get_origin(type_) or type_
    if not isinstance(class_, type):
        return None
    is_record = (
        issubclass(class_, msgspec.Struct)
        or dataclasses.is_dataclass(class_)
        or hasattr(class_, "__attrs_attrs__")
        or is_typed_dict(class_)
        or (issubclass(class_, tuple) and hasattr(class_, "_fields"))
    )
    return "json" if is_record else None


def make_decoder(
    codec: Codec[T],
    *,
    type_: object = None,
    class_id: int | None = None,
    class_name: str | None = None,
) -> Callable[[bytes], T]:
    """Return a function that calls the codec's `decode` and raises any error as DecodeError."""
    decode: Callable[[bytes], T] | None = None

    def decode_or_explain(payload: bytes) -> T:
        nonlocal decode
        if decode is None:
            decode = codec.prepare() if isinstance(codec, LibraryCodec) else codec.decode
        try:
            return decode(payload)
        except Exception as error:
            expected_type = codec.type if isinstance(codec, LibraryCodec) else type_
            raise DecodeError(
                f"a message{_format_class(class_id, class_name)} cannot be decoded as "
                f"{format_type(expected_type)} by the {codec.name} codec: {_format_error(error)}; "
                f"its payload is {_format_payload(payload)}",
                payload=payload,
                type_=expected_type,
                codec=codec.name,
                class_id=class_id,
                class_name=class_name,
            ) from error

    return decode_or_explain


def runtime_type(type_: object) -> type:
    """Return `type(value)` of the values of a type, which differs for generics and TypedDicts.

    Raises:
        TypeError: If `type_` is not a class.
    """
    class_ = get_origin(type_) or type_
    if not isinstance(class_, type) or class_ in (types.UnionType, Annotated):
        raise TypeError(
            f"a message's type is a class, got {type_!r}; for a union, bind each member, or a "
            "class with a field for it"
        )
    return dict if is_typed_dict(class_) else class_


def is_typed_dict(type_: object) -> bool:
    """Return True for a TypedDict of typing or typing_extensions."""
    return isinstance(type_, type) and dict in type_.__bases__ and hasattr(type_, "__total__")


def format_type(type_: object) -> str:
    """Return the name of a type for messages: with its module, except for builtins."""
    if not isinstance(type_, type):
        return repr(type_)
    if type_.__module__ == "builtins":
        return type_.__qualname__
    return f"{type_.__module__}.{type_.__qualname__}"


# Returns the encoder of a type, and a function that builds its decoder on first use.
_CodecFactory = Callable[[Any], tuple[Callable[[Any], bytes], Callable[[], Callable[[bytes], Any]]]]

_JSON_ENCODER = msgspec.json.Encoder()
_MSGPACK_ENCODER = msgspec.msgpack.Encoder()


def _create_pydantic_codec(
    type_: Any,
) -> tuple[Callable[[Any], bytes], Callable[[], Callable[[bytes], Any]]]:
    """Encode by alias and without computed fields, so that validation accepts the result."""
    if hasattr(type_, "model_validate_json"):
        return (
            lambda value: value.model_dump_json(by_alias=True, round_trip=True).encode(),
            lambda: type_.model_validate_json,
        )
    adapter: Any = None

    def get_adapter() -> Any:
        nonlocal adapter
        if adapter is None:
            adapter = sys.modules["pydantic"].TypeAdapter(type_)
        return adapter

    return (
        lambda value: get_adapter().dump_json(value, by_alias=True, round_trip=True),
        lambda: get_adapter().validate_json,
    )


_CODEC_FACTORIES: dict[str, _CodecFactory] = {
    "json": lambda type_: (_JSON_ENCODER.encode, lambda: msgspec.json.Decoder(type_).decode),
    "msgpack": lambda type_: (
        _MSGPACK_ENCODER.encode,
        lambda: msgspec.msgpack.Decoder(type_).decode,
    ),
    "pydantic": _create_pydantic_codec,
    "protobuf": lambda type_: (type_.SerializeToString, lambda: type_.FromString),
}


def _is_supported_by_msgspec(type_: object) -> bool:
    class_ = get_origin(type_) or type_
    return not isinstance(msgspec.inspect.type_info(class_), msgspec.inspect.CustomType)


def _format_class(class_id: int | None, class_name: str | None) -> str:
    words = [str(class_id)] if class_id is not None else []
    words += [repr(class_name)] if class_name is not None else []
    return f" of class {' '.join(words)}" if words else ""


def _format_error(error: Exception) -> str:
    """Return a library's error on one line, without the links that pydantic adds."""
    lines = (line.strip() for line in str(error).splitlines())
    text = " ".join(line for line in lines if line and not line.startswith("For further"))
    if len(text) > _REASON_CHARACTERS_SHOWN:
        text = f"{text[:_REASON_CHARACTERS_SHOWN]}…"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _format_payload(payload: bytes) -> str:
    if len(payload) <= _PAYLOAD_BYTES_SHOWN:
        return repr(bytes(payload))
    shown = bytes(payload[:_PAYLOAD_BYTES_SHOWN])
    return f"{len(payload)} bytes, the first {_PAYLOAD_BYTES_SHOWN} {shown!r}"


def _format_choices(names: tuple[str, ...]) -> str:
    *most, last = map(repr, names)
    return f"{', '.join(most)} or {last}" if most else last
