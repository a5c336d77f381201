"""What modules say to each other: properties and content, and both as bytes.

Rule 1: a message never changes. All modules are given the same object, and none can tell.
Rule 2: whatever bytes come, they are a message or MalformedError; nothing else escapes.

    A1 60 | 01 | total size | count | name NUL value NUL … | size | content
           └── version, which older writers leave out     sizes and count: 4 bytes, high one first

The total size is that of all the bytes. As it is below 2**24, its first byte is 0 and never 1: so
the version byte is seen to be there or not. protocol/modules.md says it for other languages.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec.structs import force_setattr

from simplebus.gateway.errors import MalformedError, invalid

MESSAGE_BYTES_MAX = (1 << 24) - 1
"""The longest message, in its byte form."""

PLACE_BYTES = 64 << 10
"""What one place of a queue is for: a longer message takes several."""

_MAGIC = b"\xa1\x60"
_VERSION = 1
_SIZE = struct.Struct(">I")
_TWO_SIZES = struct.Struct(">II")
_LEAST = len(_MAGIC) + 3 * _SIZE.size
_PLAIN_BYTES_MAX = PLACE_BYTES - _LEAST - 1
_NOTHING: Mapping[str, str] = MappingProxyType({})


class ModuleMessage(msgspec.Struct, frozen=True, gc=False, eq=False):
    """Properties, texts by their names, and content, bytes that only modules understand.

        ModuleMessage(b"21.5", {"sensor": "roof"})

    Raises ModuleBusError with INVALIDARG for a property that is no text or holds a NUL, for
    content that is no bytes, and for more than MESSAGE_BYTES_MAX.
    """

    # Made for each message, so as fast as can be: half of what a class of our own takes. It cannot
    # be part of a cycle, so the collector need not know it.

    content: bytes = b""
    properties: Mapping[str, str] = _NOTHING
    """They can be read, not changed."""
    places: int = 1
    """How many places it takes in a queue. Whatever is given is not believed."""

    if TYPE_CHECKING:

        def __init__(
            self,
            content: bytes | bytearray | memoryview = b"",
            properties: Mapping[str, str] | None = None,
        ) -> None: ...

    def __post_init__(self) -> None:
        content = self.content
        if (
            self.properties is _NOTHING
            and type(content) is bytes
            and len(content) <= _PLAIN_BYTES_MAX
            and self.places == 1
        ):
            return  # Whatever is checked below holds, as most messages are like that.
        if type(content) is not bytes:
            if not isinstance(content, bytes | bytearray | memoryview):
                raise invalid(f"content must be bytes, got {content!r}")
            content = bytes(content)
        properties, size = self.properties, _LEAST + 1 + len(content)
        if properties is None or properties is _NOTHING:
            properties = _NOTHING
        elif not isinstance(properties, Mapping):
            raise invalid(f"properties are texts by their names, got {properties!r}")
        elif properties := MappingProxyType(dict(properties)):
            size += sum(_checked(name, value) for name, value in properties.items())
        if size > MESSAGE_BYTES_MAX:
            raise invalid(f"a message has at most {MESSAGE_BYTES_MAX:,} bytes, got {size:,}")
        force_setattr(self, "content", content)
        force_setattr(self, "properties", properties or _NOTHING)
        force_setattr(self, "places", 1 if size <= PLACE_BYTES else -(-size // PLACE_BYTES))

    @property
    def size(self) -> int:
        """Bytes of the byte form."""
        texts = [text for pair in self.properties.items() for text in pair]
        return _LEAST + 1 + len(self.content) + sum(len(text.encode()) + 1 for text in texts)

    def replace(
        self, content: bytes | None = None, properties: Mapping[str, str] | None = None
    ) -> ModuleMessage:
        """A message with other content, or other properties, or both."""
        return ModuleMessage(
            self.content if content is None else content,
            self.properties if properties is None else properties,
        )

    def to_bytes(self, *, version: int | None = _VERSION) -> bytes:
        """The byte form; with `version=None` as older writers have it, without a version byte."""
        if version not in (None, _VERSION):
            raise invalid(f"version must be {_VERSION} or None, got {version!r}")
        mark = b"" if version is None else bytes([version])
        words = [text for pair in self.properties.items() for text in pair]
        texts = b"".join(text.encode() + b"\0" for text in words)
        total = self.size - 1 + len(mark)
        return b"".join(
            (
                _MAGIC,
                mark,
                _TWO_SIZES.pack(total, len(self.properties)),
                texts,
                _SIZE.pack(len(self.content)),
                self.content,
            )
        )

    @classmethod
    def from_bytes(cls, data: bytes | bytearray | memoryview) -> ModuleMessage:
        """The message of a byte form, with or without its version byte. Raises MalformedError."""
        if not isinstance(data, bytes | bytearray | memoryview):
            raise invalid(f"a byte form must be bytes, got {data!r}")
        return _read(bytes(data))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ModuleMessage):
            return NotImplemented
        return self.content == other.content and self.properties == other.properties

    def __hash__(self) -> int:
        return hash((self.content, frozenset(self.properties.items())))

    def __repr__(self) -> str:
        shown = self.content if len(self.content) <= 64 else self.content[:64] + b"..."
        return f"ModuleMessage({shown!r}, {dict(self.properties)!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return ModuleMessage, (self.content, dict(self.properties))


def _checked(name: object, value: object) -> int:
    """How many bytes a property takes."""
    for text in name, value:
        if not isinstance(text, str):
            raise invalid(f"properties are texts by their names, got {name!r}: {value!r}")
        if "\0" in text:
            raise invalid(f"property {name!r}: neither name nor value may hold a NUL")
    assert isinstance(name, str)
    assert isinstance(value, str)
    try:
        return len(name.encode()) + len(value.encode()) + 2
    except UnicodeEncodeError as error:
        raise invalid(f"property {name!r} cannot be written as UTF-8: {error.reason}") from None


def _read(data: bytes) -> ModuleMessage:
    if data[:2] != _MAGIC:
        raise MalformedError(f"a message begins with a1 60, got {data[:2].hex(' ') or 'no bytes'}")
    at = 3 if data[2:3] == b"\x01" else 2
    if len(data) < at + 12:
        raise MalformedError(f"a message has at least {at + 12} bytes, got {len(data)}")
    total, count = _TWO_SIZES.unpack_from(data, at)
    if total != len(data):
        raise MalformedError(f"bytes 2 on say that there are {total:,} bytes, got {len(data):,}")
    at += _TWO_SIZES.size
    if count > (len(data) - at - _SIZE.size) // 2:
        raise MalformedError(f"byte {at - 4}: {count:,} properties do not fit into {len(data):,}")
    texts: list[str] = []
    for _ in range(2 * count):
        end = data.find(b"\0", at)
        if end < 0:
            raise MalformedError(f"byte {at}: expected {count} properties that end with a NUL")
        try:
            texts.append(data[at:end].decode())
        except UnicodeDecodeError as error:
            raise MalformedError(f"byte {at}: a property is no UTF-8: {error.reason}") from None
        at = end + 1
    properties = dict(zip(texts[::2], texts[1::2], strict=True))
    if len(properties) < count:
        raise MalformedError("a property is there twice")
    if len(data) < at + _SIZE.size:
        raise MalformedError(f"byte {at}: expected the size of the content, got the end")
    (size,) = _SIZE.unpack_from(data, at)
    at += _SIZE.size
    if len(data) - at != size:
        raise MalformedError(f"byte {at - 4}: expected {len(data) - at:,} for the content's size")
    if len(data) > MESSAGE_BYTES_MAX:
        raise MalformedError(f"a message has at most {MESSAGE_BYTES_MAX:,} bytes")
    return ModuleMessage(data[at:], properties)
