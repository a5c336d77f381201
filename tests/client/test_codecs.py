"""Tests of codecs: encoding, decoding and their errors."""

from __future__ import annotations

import dataclasses
import datetime
import enum
import pickle
import subprocess
import sys
from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypedDict, TypeVar

import attrs
import msgspec
import pydantic
import pydantic.dataclasses
import pytest
import typing_extensions
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from hypothesis import given
from hypothesis import strategies as st

from simplebus.client.codecs import (
    BYTES_CODEC,
    CodecName,
    DecodeError,
    LibraryCodec,
    find_codec,
    find_default_codec_name,
    make_decoder,
)
from simplebus.core.errors import BusError

Item = TypeVar("Item")


class Struct(msgspec.Struct):
    id: int
    name: str


class StructSubclass(Struct):
    pass


@dataclasses.dataclass
class Data:
    id: int
    name: str


@attrs.define
class Attrs:
    id: int
    name: str


class Tuple(NamedTuple):
    id: int
    name: str


class Dict(TypedDict):
    id: int
    name: str


class ExtendedDict(typing_extensions.TypedDict):
    id: int
    name: str


class Model(pydantic.BaseModel):
    id: int
    name: str


@pydantic.dataclasses.dataclass
class PydanticData:
    id: int
    name: str


def protobuf_type(name: str) -> Any:
    """Return a message class with an int64 `id` and a string `name`, created without protoc."""
    file = descriptor_pb2.FileDescriptorProto(
        name=f"{name}.proto", package="shops", syntax="proto3"
    )
    message_type = file.message_type.add(name=name)
    field = descriptor_pb2.FieldDescriptorProto
    message_type.field.add(name="id", number=1, type=field.TYPE_INT64, label=field.LABEL_OPTIONAL)
    message_type.field.add(
        name="name", number=2, type=field.TYPE_STRING, label=field.LABEL_OPTIONAL
    )
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(f"shops.{name}"))


Proto = protobuf_type("Proto")

MSGSPEC_TYPES = [Struct, Data, Attrs, Tuple, Dict, ExtendedDict]
KINDS: list[tuple[Any, CodecName]] = [
    *((type_, "json") for type_ in MSGSPEC_TYPES),
    *((type_, "msgpack") for type_ in MSGSPEC_TYPES),
    (Model, "pydantic"),
    (PydanticData, "pydantic"),
    (Proto, "protobuf"),
]
every_kind = pytest.mark.parametrize(
    ("type_", "name"), KINDS, ids=[f"{type_.__name__}-{name}" for type_, name in KINDS]
)
ids = st.integers(-(2**63), 2**63 - 1)


def create_value(type_: Any, id: int, name: str) -> Any:
    return type_(id=id, name=name)


@every_kind
@given(id=ids, text=st.text())
def test_decodes_encoded_value(type_: Any, name: CodecName, id: int, text: str) -> None:
    codec, value = find_codec(type_, name), create_value(type_, id, text)
    payload = codec.encode(value)
    decoded = codec.decode(payload)
    assert type(payload) is bytes
    assert type(decoded) is type(value)
    assert decoded == value


def decode_or_error(codec: Any, payload: bytes) -> Any:
    """Return the value or the DecodeError. No other exception is allowed."""
    try:
        return codec.decode(payload)
    except DecodeError as error:
        return error


@every_kind
@given(payload=st.binary(max_size=60))
def test_any_bytes_decode_to_a_value_or_raise_decode_error(
    type_: Any, name: CodecName, payload: bytes
) -> None:
    outcome = decode_or_error(find_codec(type_, name), payload)
    if isinstance(outcome, DecodeError):
        assert outcome.payload == payload
    else:
        assert type(outcome) is type(create_value(type_, 0, ""))


@every_kind
def test_truncated_payload_raises_decode_error(type_: Any, name: CodecName) -> None:
    codec, value = find_codec(type_, name), create_value(type_, 2**40, "a name")
    payload = codec.encode(value)
    for length in range(len(payload)):
        outcome = decode_or_error(codec, payload[:length])
        assert outcome != value
        assert isinstance(outcome, DecodeError) or name == "protobuf"


@pytest.mark.parametrize("payload", [b"", b"shop", bytearray(b"shop"), memoryview(b"shop")])
def test_bytes_codec_keeps_payload(payload: Any) -> None:
    encoded = BYTES_CODEC.encode(payload)
    assert type(encoded) is bytes
    assert encoded == payload
    assert BYTES_CODEC.decode(encoded) is encoded
    assert find_codec(bytes) is BYTES_CODEC


def test_bytes_codec_does_not_copy() -> None:
    payload = b"shop"
    assert BYTES_CODEC.encode(payload) is payload


# Types that each codec supports.


@pytest.mark.parametrize(
    ("type_", "expected"),
    [
        *((type_, "json") for type_ in MSGSPEC_TYPES),
        (Model, "pydantic"),
        (PydanticData, "pydantic"),
        (Proto, "protobuf"),
        (int, None),
        ("Struct", None),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_default_codec_of_types(type_: Any, expected: CodecName | None) -> None:
    assert find_default_codec_name(type_) == expected
    if expected is not None:
        assert find_codec(type_).name == expected


class Color(enum.Enum):
    RED = "red"


@pytest.mark.parametrize("name", ["json", "msgpack"])
@pytest.mark.parametrize(
    "value",
    [
        3,
        "text",
        b"bytes",
        [1],
        {"one": [1]},
        Color.RED,
        datetime.datetime(2024, 2, 29, tzinfo=datetime.UTC),
    ],
)
def test_named_codec_encodes_other_msgspec_types(value: Any, name: CodecName) -> None:
    codec: Any = find_codec(type(value), name)
    assert codec.decode(codec.encode(value)) == value


def test_decoding_checks_arguments_of_a_builtin_type() -> None:
    codec = find_codec(list[int], "json")
    assert codec.decode(codec.encode([1, 2])) == [1, 2]
    with pytest.raises(
        DecodeError, match=r"cannot be decoded as list\[int\] by the json codec.*`\$\[1\]`"
    ):
        codec.decode(b'[1,"2"]')


class Opened(msgspec.Struct, tag=True):
    at: int


class Closed(msgspec.Struct, tag=True):
    at: int


class Change(msgspec.Struct):
    of: Opened | Closed


@pytest.mark.parametrize("name", ["json", "msgpack"])
def test_tagged_union_field_keeps_its_type(name: CodecName) -> None:
    codec = find_codec(Change, name)
    for value in (Change(Opened(1)), Change(Closed(1))):
        assert codec.decode(codec.encode(value)) == value


class Page(msgspec.Struct, Generic[Item]):
    items: list[Item]


class Names(Page[str]):
    pass


@pytest.mark.parametrize("type_", [Page[str], Names])
def test_generic_type_is_decoded_with_its_arguments(type_: Any) -> None:
    codec = find_codec(type_)
    value = type_(items=["a"])
    assert codec.decode(codec.encode(value)) == value
    with pytest.raises(DecodeError, match="Expected `str`, got `int`"):
        codec.decode(b'{"items":[1]}')


class ModelPage(pydantic.BaseModel, Generic[Item]):
    items: list[Item]


class Aliased(pydantic.BaseModel):
    shop_id: int = pydantic.Field(alias="shopId")

    @pydantic.computed_field  # type: ignore[prop-decorator]
    @property
    def doubled(self) -> int:
        return 2 * self.shop_id

    model_config = pydantic.ConfigDict(extra="forbid")


def test_generic_pydantic_model_is_decoded_with_its_arguments() -> None:
    codec = find_codec(ModelPage[int])
    assert codec.decode(codec.encode(ModelPage[int](items=[1]))) == ModelPage[int](items=[1])
    with pytest.raises(DecodeError, match=r"items\.0 Input should be a valid integer"):
        codec.decode(b'{"items":["x"]}')


def test_pydantic_model_is_encoded_by_alias() -> None:
    codec = find_codec(Aliased)
    assert codec.encode(Aliased(shopId=7)) == b'{"shopId":7}'
    assert codec.decode(b'{"shopId":7}').shop_id == 7


# Types that are not complete yet.


class Parent(msgspec.Struct):
    child: Child | None = None
    parent: Parent | None = None


class Child(msgspec.Struct):
    id: int


def test_field_type_may_be_defined_later() -> None:
    class_codec = find_codec(Parent)
    value = Parent(Child(7), Parent())
    assert class_codec.decode(class_codec.encode(value)) == value


class Unfinished(msgspec.Struct):
    missing: Never_defined  # type: ignore[name-defined]  # noqa: F821


def test_undefined_field_type_raises_name_error() -> None:
    codec = find_codec(Unfinished)
    assert isinstance(codec, LibraryCodec)
    for attempt in (codec.prepare, lambda: codec.decode(b"{}")):
        with pytest.raises(NameError, match="Never_defined") as caught:
            attempt()
        (note,) = caught.value.__notes__
        assert "test_codecs.Unfinished" in note
        assert "json codec" in note


def test_decoder_is_built_once() -> None:
    codec = find_codec(Struct)
    assert isinstance(codec, LibraryCodec)
    assert codec.prepare() is codec.prepare()


# Refusals.


@every_kind
def test_rejects_value_of_another_type(type_: Any, name: CodecName) -> None:
    codec = find_codec(type_, name)
    expected = type(create_value(type_, 0, "")).__name__
    with pytest.raises(TypeError, match=f"the {name} codec .* exactly type .*{expected}, got") as e:
        codec.encode(3.5)
    assert str(e.value).endswith("got one of type float")


def test_rejects_value_of_a_subclass() -> None:
    with pytest.raises(TypeError, match=r"exactly type .*\.Struct, got .*\.StructSubclass"):
        find_codec(Struct).encode(StructSubclass(id=1, name=""))


def test_bytes_codec_rejects_text() -> None:
    with pytest.raises(TypeError, match="bytes, bytearray or memoryview, got one of type str"):
        BYTES_CODEC.encode("shop")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("type_", "name", "payload", "reason"),
    [
        (Struct, "json", b'{"id":"x","name":""}', "Expected `int`, got `str` - at `$.id`"),
        (Struct, "json", b'{"id":1}', "Object missing required field `name`"),
        (Struct, "json", b"[]", "Expected `object`, got `array`"),
        # msgspec raises UnicodeDecodeError before version 0.23, its own DecodeError since.
        (Struct, "json", b'{"id":1,"name":"\xff"}', "DecodeError: "),
        (Struct, "json", b'{"more":' + b"[" * 100_000, "RecursionError"),
        (Struct, "json", b"", "Input data was truncated"),
        (Data, "msgpack", b"\x82\xa2id\x01", "Input data was truncated"),
        (Tuple, "json", b"[1]", "Expected `array` of length 2"),
        (Model, "pydantic", b'{"id":"x","name":""}', "id Input should be a valid integer"),
        (PydanticData, "pydantic", b"{", "Invalid JSON"),
        (Proto, "protobuf", b"\xff\xff\xff", "DecodeError: "),
    ],
)
def test_decode_error_contains_the_reason(
    type_: Any, name: CodecName, payload: bytes, reason: str
) -> None:
    with pytest.raises(DecodeError) as caught:
        find_codec(type_, name).decode(payload)
    error = caught.value
    text = str(error)
    assert isinstance(error, BusError)
    assert text.startswith(
        f"a message cannot be decoded as {type_.__module__}.{type_.__qualname__} by the {name}"
    )
    assert reason in text
    assert "\n" not in text
    assert "For further information" not in text
    assert (error.type, error.codec, error.payload) == (type_, name, payload)
    assert error.__cause__ is not None


def test_decode_error_truncates_long_payloads() -> None:
    codec = find_codec(Struct)
    with pytest.raises(DecodeError, match=rf"its payload is b'{'x' * 40}'$"):
        codec.decode(b"x" * 40)
    with pytest.raises(DecodeError, match=rf"payload is 41 bytes, the first 40 b'{'x' * 40}'$"):
        codec.decode(b"x" * 41)


def test_decode_error_truncates_long_reasons() -> None:
    codec = find_codec(ModelPage[int])
    with pytest.raises(DecodeError) as caught:
        codec.decode(b'{"items":[' + b",".join([b'"x"'] * 500) + b"]}")
    assert "500 validation errors" in str(caught.value)
    assert len(str(caught.value)) < 600


def test_decode_error_names_the_class() -> None:
    codec = find_codec(Struct)
    for class_id, class_name, expected_name in (
        (7, "shop-created", "a message of class 7 'shop-created' cannot be decoded as "),
        (7, None, "a message of class 7 cannot be decoded as "),
        (None, "shop-created", "a message of class 'shop-created' cannot be decoded as "),
    ):
        with pytest.raises(DecodeError) as caught:
            make_decoder(codec, class_id=class_id, class_name=class_name)(b"")
        assert str(caught.value).startswith(expected_name)
        assert (caught.value.class_id, caught.value.class_name) == (class_id, class_name)


def test_decode_error_can_be_pickled() -> None:
    with pytest.raises(DecodeError) as caught:
        make_decoder(find_codec(Struct), class_id=7)(b"{}")
    decoded = pickle.loads(pickle.dumps(caught.value))
    assert str(decoded) == str(caught.value)
    assert (decoded.class_id, decoded.type, decoded.payload) == (7, Struct, b"{}")


class ReversedCodec:
    """Custom codec."""

    name = "reversed"

    def encode(self, value: str) -> bytes:
        return value[::-1].encode()

    def decode(self, payload: bytes) -> str:
        return payload.decode()[::-1]


def test_any_error_of_a_custom_codec_becomes_a_decode_error() -> None:
    decode = make_decoder(ReversedCodec(), type_=str, class_id=7)
    assert decode(b"pohs") == "shop"
    with pytest.raises(
        DecodeError, match="cannot be decoded as str by the reversed codec: UnicodeDecodeError: "
    ):
        decode(b"\xff")


class Plain:
    pass


@pytest.mark.parametrize(
    ("attempt", "raised", "text"),
    [
        (
            lambda: find_codec(Struct, "yaml"),
            ValueError,
            "there is no codec 'yaml'; expected one of",
        ),  # type: ignore[arg-type]
        (
            lambda: find_codec(Struct, "pydantic"),
            TypeError,
            "expected 'json' or 'msgpack', or give",
        ),
        (
            lambda: find_codec(Model, "msgpack"),
            TypeError,
            "Model; expected 'pydantic', or give codec=",
        ),
        (lambda: find_codec(PydanticData, "json"), TypeError, "Data; expected 'pydantic', or give"),
        (
            lambda: find_codec(Proto, "json"),
            TypeError,
            "Proto; expected 'protobuf', or give codec=",
        ),
        (lambda: find_codec(Plain), TypeError, "no codec takes .*Plain: json and msgpack take"),
        (
            lambda: find_codec(Plain, "json"),
            TypeError,
            "no codec takes .*give codec= an object with",
        ),
        (lambda: find_codec(int), TypeError, "int has no default codec; select 'json' or"),
        (
            lambda: find_codec(Opened | Closed),
            TypeError,
            "a class, got .*Closed; for a union, bind",
        ),  # type: ignore[arg-type]
        (lambda: find_codec("Struct"), TypeError, "a message's type is a class, got 'Struct'"),  # type: ignore[arg-type]
    ],
)
def test_rejects_unsuitable_codec_with_suitable_ones(
    attempt: Callable[[], object], raised: type[Exception], text: str
) -> None:
    with pytest.raises(raised, match=text):
        attempt()


def test_repr_of_a_codec_shows_its_type() -> None:
    assert repr(find_codec(Struct)) == f"<json codec of {__name__}.Struct>"
    assert repr(BYTES_CODEC) == "<bytes codec>"


def test_import_does_not_load_pydantic_or_protobuf() -> None:
    code = (
        "import sys\n"
        "import simplebus.client.codecs, simplebus.client.message_types\n"
        "print(*sorted({'pydantic', 'google.protobuf'} & set(sys.modules)))"
    )
    completed = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert completed.stdout.split() == []
