"""Messages of the module bus and their byte form.

A message is immutable: all modules receive the same object. Bytes that are not a valid byte
form raise MalformedError.

    A1 60 | 01 | total size | count | name NUL value NUL … | size | content
           └── version, omitted by older writers            sizes and count: 4 bytes, big-endian

The total size counts all bytes. It is below 2**24, so its first byte is 0 and cannot be
mistaken for the version byte. protocol/modules.md describes the byte form for other languages.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec.structs import force_setattr

from simplebus.gateway.errors import MalformedError, invalid_argument

MESSAGE_BYTES_MAX = (1 << 24) - 1
"""Largest message, in its byte form."""

QUEUE_UNIT_BYTES = 64 << 10
"""Size of a queue unit. A longer message uses several."""

_MAGIC = b"\xa1\x60"
_VERSION = 1
_SIZE = struct.Struct(">I")
_TWO_SIZES = struct.Struct(">II")
_HEADER_BYTES = len(_MAGIC) + 3 * _SIZE.size
_SMALL_BYTES_MAX = QUEUE_UNIT_BYTES - _HEADER_BYTES - 1
_NO_PROPERTIES: Mapping[str, str] = MappingProxyType({})


class ModuleMessage(msgspec.Struct, frozen=True, gc=False, eq=False):
    """Message with content and properties.

        ModuleMessage(b"21.5", {"sensor": "roof"})

    Args:
        content: Bytes, whose meaning is up to the modules.
        properties: Text values by name.

    Raises:
        ModuleBusError: With INVALIDARG if a property is not text or contains NUL, if the content is
            not bytes, or if the message exceeds MESSAGE_BYTES_MAX.
    """

    # A Struct is created in half the time of a plain class, and there is one per message. It cannot
    # be part of a reference cycle, so the garbage collector need not track it.

    content: bytes = b""
    properties: Mapping[str, str] = _NO_PROPERTIES
    """Read-only mapping."""
    places: int = 1
    """Number of queue units that the message uses. It is computed; an argument is ignored."""

    if TYPE_CHECKING:

        def __init__(
            self,
            content: bytes | bytearray | memoryview = b"",
            properties: Mapping[str, str] | None = None,
        ) -> None: ...

    def __post_init__(self) -> None:
        content = self.content
        if (
            self.properties is _NO_PROPERTIES
            and type(content) is bytes
            and len(content) <= _SMALL_BYTES_MAX
            and self.places == 1
        ):
            return  # Fast path for most messages: all checks below would pass.
        if type(content) is not bytes:
            if not isinstance(content, bytes | bytearray | memoryview):
                raise invalid_argument(f"content must be bytes, got {content!r}")
            content = bytes(content)
        properties, size = self.properties, _HEADER_BYTES + 1 + len(content)
        if properties is None or properties is _NO_PROPERTIES:
            properties = _NO_PROPERTIES
        elif not isinstance(properties, Mapping):
            raise invalid_argument(f"properties are texts by their names, got {properties!r}")
        elif properties := MappingProxyType(dict(properties)):
            size += sum(_check_property(name, value) for name, value in properties.items())
        if size > MESSAGE_BYTES_MAX:
            raise invalid_argument(
                f"a message has at most {MESSAGE_BYTES_MAX:,} bytes, got {size:,}"
            )
        force_setattr(self, "content", content)
        force_setattr(self, "properties", properties or _NO_PROPERTIES)
        force_setattr(
            self, "places", 1 if size <= QUEUE_UNIT_BYTES else -(-size // QUEUE_UNIT_BYTES)
        )

    @property
    def size(self) -> int:
        """Number of bytes in the byte form."""
        texts = [text for pair in self.properties.items() for text in pair]
        return _HEADER_BYTES + 1 + len(self.content) + sum(len(text.encode()) + 1 for text in texts)

    def replace(
        self, content: bytes | None = None, properties: Mapping[str, str] | None = None
    ) -> ModuleMessage:
        """Return a copy of the message with other content or other properties.

        Args:
            content: New content; None to keep it.
            properties: New properties; None to keep them.

        Returns:
            The new message.

        Raises:
            ModuleBusError: The arguments are invalid.
        """
        return ModuleMessage(
            self.content if content is None else content,
            self.properties if properties is None else properties,
        )

    def to_bytes(self, *, version: int | None = _VERSION) -> bytes:
        """Return the byte form.

        Args:
            version: Version byte to write; None for the form of older writers, without a
                version byte.

        Returns:
            At most MESSAGE_BYTES_MAX bytes.

        Raises:
            ModuleBusError: The version is unknown.
        """
        if version not in (None, _VERSION):
            raise invalid_argument(f"version must be {_VERSION} or None, got {version!r}")
        version_byte = b"" if version is None else bytes([version])
        words = [text for pair in self.properties.items() for text in pair]
        texts = b"".join(text.encode() + b"\0" for text in words)
        total = self.size - 1 + len(version_byte)
        return b"".join(
            (
                _MAGIC,
                version_byte,
                _TWO_SIZES.pack(total, len(self.properties)),
                texts,
                _SIZE.pack(len(self.content)),
                self.content,
            )
        )

    @classmethod
    def from_bytes(cls, data: bytes | bytearray | memoryview) -> ModuleMessage:
        """Parse a byte form, with or without a version byte.

        Args:
            data: The bytes of one message.

        Returns:
            The message.

        Raises:
            MalformedError: The bytes are not a message.
            ModuleBusError: With INVALIDARG if `data` is not bytes.
        """
        if not isinstance(data, bytes | bytearray | memoryview):
            raise invalid_argument(f"a byte form must be bytes, got {data!r}")
        return _parse(bytes(data))

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


def _check_property(name: object, value: object) -> int:
    """Return the number of bytes of a property."""
    for text in name, value:
        if not isinstance(text, str):
            raise invalid_argument(f"properties are texts by their names, got {name!r}: {value!r}")
        if "\0" in text:
            raise invalid_argument(f"property {name!r}: neither name nor value may hold a NUL")
    assert isinstance(name, str)
    assert isinstance(value, str)
    try:
        return len(name.encode()) + len(value.encode()) + 2
    except UnicodeEncodeError as error:
        raise invalid_argument(
            f"property {name!r} cannot be written as UTF-8: {error.reason}"
        ) from None


def _parse(data: bytes) -> ModuleMessage:
    if data[:2] != _MAGIC:
        raise MalformedError(f"a message begins with a1 60, got {data[:2].hex(' ') or 'no bytes'}")
    offset = 3 if data[2:3] == b"\x01" else 2
    if len(data) < offset + 12:
        raise MalformedError(f"a message has at least {offset + 12} bytes, got {len(data)}")
    total, count = _TWO_SIZES.unpack_from(data, offset)
    if total != len(data):
        raise MalformedError(f"the total size is {total:,} bytes, but there are {len(data):,}")
    offset += _TWO_SIZES.size
    if count > (len(data) - offset - _SIZE.size) // 2:
        raise MalformedError(
            f"byte {offset - 4}: {count:,} properties do not fit into {len(data):,}"
        )
    texts: list[str] = []
    for _ in range(2 * count):
        end = data.find(b"\0", offset)
        if end < 0:
            raise MalformedError(f"byte {offset}: expected {count} properties that end with a NUL")
        try:
            texts.append(data[offset:end].decode())
        except UnicodeDecodeError as error:
            raise MalformedError(
                f"byte {offset}: a property is not valid UTF-8: {error.reason}"
            ) from None
        offset = end + 1
    properties = dict(zip(texts[::2], texts[1::2], strict=True))
    if len(properties) < count:
        raise MalformedError("two properties have the same name")
    if len(data) < offset + _SIZE.size:
        raise MalformedError(f"byte {offset}: expected the size of the content, got the end")
    (size,) = _SIZE.unpack_from(data, offset)
    offset += _SIZE.size
    if len(data) - offset != size:
        raise MalformedError(
            f"byte {offset - 4}: expected {len(data) - offset:,} for the content's size"
        )
    if len(data) > MESSAGE_BYTES_MAX:
        raise MalformedError(f"a message has at most {MESSAGE_BYTES_MAX:,} bytes")
    return ModuleMessage(data[offset:], properties)
