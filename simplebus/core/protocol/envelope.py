r"""Content of an Envelope frame: channel, key, headers and times (binary.md, "Envelope format").

    0        1                                                                        n
    ├ fields ┼ published ┼ expires ┼ not before ┼ channel ──┼ key ─────┼ headers ─────┼ payload … ┤
      u8       i64         u64       u64          u16 + text  u16 + any  u16 + pairs
      bit      0           1         2            3           4          5

Numbers are big-endian. Every `<\r\n` in the content is followed by a NUL on the wire, so that the
delimiter `<\r\n>` never occurs in it. Only `decode` decides if an envelope is well-formed.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Sequence
from typing import NamedTuple

from simplebus.core.channel.pattern import WILDCARDS, check_name
from simplebus.core.errors import LocalProtocolError, Reason, RemoteProtocolError
from simplebus.core.limits import CHANNEL_BYTES_MAX, HEADERS_MAX
from simplebus.core.protocol.frames import DELIMITER

PUBLISHED, EXPIRES, NOT_BEFORE, CHANNEL, KEY, HEADERS = (1 << bit for bit in range(6))
"""Bits of the fields byte, in the order of the fields."""

TIMES = PUBLISHED | EXPIRES | NOT_BEFORE
RESERVED = 0b11000000

TEXT_BYTES_MAX = 0xFFFF
"""Longest key, and longest headers with their length prefixes."""

_DELIMITER_START = DELIMITER[:-1]
STUFFED = _DELIMITER_START + b"\0"
_SIGNED = struct.Struct(">q")
_UNSIGNED = struct.Struct(">Q")
_SIGNED_MAX = (1 << 63) - 1
_UNSIGNED_MAX = (1 << 64) - 1
TIMES_BYTES = tuple(8 * fields.bit_count() for fields in range(TIMES + 1))
"""Total length of the times, by their bits in the fields byte."""

# Limits of the caches: prefixes of envelopes with only a channel, and decoded channels.
_CACHE_ENTRIES_MAX = 4096
_CACHED_BYTES_MAX = 256
_PLAIN_SEGMENT = rb"[!\"$-)+,\-/-=?-~]+"
_PLAIN_CHANNEL = re.compile(_PLAIN_SEGMENT + rb"(?:\." + _PLAIN_SEGMENT + rb")*")
"""Legal names without wildcard characters and in ASCII, which nearly all names are."""
_NAME_BYTES = bytes([*range(0x21, 0x7F), *range(0x80, 0x100)])
"""Bytes that legal names consist of, in UTF-8."""
_WILDCARD_SEGMENTS = tuple(b".%b." % wildcard.encode() for wildcard in sorted(WILDCARDS))
_prefix_cache: dict[str, bytes] = {}
_channel_cache: dict[bytes, str] = {}


class Envelope(NamedTuple):
    """Metadata of a message. Empty and None mean that a field is absent."""

    channel: str = ""
    key: bytes = b""
    headers: tuple[tuple[str, str], ...] = ()
    """Names and values, in order. Names may repeat."""
    published: int | None = None
    """Microseconds since 1970, by the publisher's clock."""
    expires_ms: int | None = None
    """Milliseconds from acceptance to expiry; 0 expires at once."""
    not_before_ms: int | None = None
    """Milliseconds from acceptance to the earliest delivery."""


_EMPTY = Envelope()
_NO_FIELDS = b"\0"
_EMPTY_BUT_CHANNEL = _EMPTY[1:]


# Stuffing ----------------------------------------------------------------------------------------


def stuff(data: bytes) -> bytes:
    r"""Insert a NUL after every `<\r\n`, so that `data` contains no delimiter ("Byte stuffing")."""
    return data.replace(_DELIMITER_START, STUFFED)


def unstuff(content: bytes) -> bytes:
    """Reverse `stuff`. Content that was not stuffed is returned unchanged."""
    return content.replace(STUFFED, _DELIMITER_START)


# Writing -----------------------------------------------------------------------------------------


def encode(envelope: Envelope, payload: bytes) -> bytes:
    """Encode the content of an Envelope frame (binary.md, "Envelope format").

    Args:
        envelope: Metadata of the message.
        payload: Any bytes.

    Returns:
        The stuffed content.

    Raises:
        ValueError: The channel is not legal, or a number is out of range.
        LocalProtocolError: The key or the headers are too long.
    """
    if envelope[1:] == _EMPTY_BUT_CHANNEL:
        prefix = _prefix_cache.get(envelope.channel) or _encode_cached_prefix(envelope)
    else:
        prefix = _encode_prefix(envelope)
    return (prefix + payload).replace(_DELIMITER_START, STUFFED)


def _encode_cached_prefix(envelope: Envelope) -> bytes:
    prefix = _encode_prefix(envelope)
    if len(_prefix_cache) >= _CACHE_ENTRIES_MAX:
        _prefix_cache.clear()
    if len(prefix) <= _CACHED_BYTES_MAX:
        _prefix_cache[envelope.channel] = prefix
    return prefix


def _encode_prefix(envelope: Envelope) -> bytes:
    """Return everything in front of the payload, before stuffing."""
    channel, key, headers, published, expires_ms, not_before_ms = envelope
    fields = 0
    parts = [b""]
    if published is not None:
        fields |= PUBLISHED
        _check_number("published", published, -_SIGNED_MAX - 1, _SIGNED_MAX)
        parts.append(_SIGNED.pack(published))
    if expires_ms is not None:
        fields |= EXPIRES
        _check_number("expires_ms", expires_ms, 0, _UNSIGNED_MAX)
        parts.append(_UNSIGNED.pack(expires_ms))
    if not_before_ms is not None:
        fields |= NOT_BEFORE
        _check_number("not_before_ms", not_before_ms, 0, _UNSIGNED_MAX)
        parts.append(_UNSIGNED.pack(not_before_ms))
    if channel:
        fields |= CHANNEL
        parts.append(with_length_prefix(check_name(channel).encode()))
    if key:
        fields |= KEY
        if len(key) > TEXT_BYTES_MAX:
            raise LocalProtocolError(
                f"a key has at most {TEXT_BYTES_MAX} bytes, got one of {len(key)}"
            )
        parts.append(with_length_prefix(key))
    if headers:
        fields |= HEADERS
        check_header_count(len(headers))
        parts.append(encode_headers(headers))
    parts[0] = bytes((fields,))
    return b"".join(parts)


def check_header_count(count: int) -> None:
    """Raise LocalProtocolError if a message has more headers than a server accepts."""
    if count > HEADERS_MAX:
        raise LocalProtocolError(f"a message has at most {HEADERS_MAX} headers, got {count}")


def encode_headers(headers: tuple[tuple[str, str], ...]) -> bytes:
    """Encode headers with the length prefix of all of them.

    Raises:
        ValueError: A name or value is not text that UTF-8 can encode.
        LocalProtocolError: The headers are too long.
    """
    texts = []
    for pair in headers:
        try:
            texts += [text.encode() for text in pair]
        except UnicodeEncodeError as error:
            raise ValueError(f"header {pair!r} cannot be encoded as UTF-8: {error}") from None
    return encode_header_texts(texts)


def encode_header_texts(texts: Sequence[bytes]) -> bytes:
    """Encode headers like `encode_headers`.

    Args:
        texts: Names and values in turn, as UTF-8.

    Raises:
        LocalProtocolError: The headers are too long.
    """
    size = sum(map(len, texts)) + 2 * len(texts)
    if size > TEXT_BYTES_MAX:
        raise LocalProtocolError(
            f"headers have at most {TEXT_BYTES_MAX} bytes together, with 4 bytes more for each; "
            f"got {len(texts) // 2} headers of {size} bytes"
        )
    parts = [size.to_bytes(2, "big")] * (2 * len(texts) + 1)
    parts[1::2] = [length.to_bytes(2, "big") for length in map(len, texts)]
    parts[2::2] = texts
    return b"".join(parts)


def add_headers(prefix: bytes, headers: bytes) -> bytes:
    """Return the start of an envelope that has headers.

    Args:
        prefix: Start of an envelope without headers, before stuffing.
        headers: Result of `encode_headers`.
    """
    return b"".join((bytes((prefix[0] | HEADERS,)), prefix[1:], headers))


def encode_header_pairs(pairs: tuple[tuple[str, str], ...]) -> bytes:
    """Encode headers without the common length prefix, for `encode_with_headers`."""
    return encode_headers(pairs)[2:] if pairs else b""


def encode_with_headers(envelope: Envelope, more_headers: bytes, payload: bytes) -> bytes:
    """Encode like `encode`, with encoded headers appended to those of the envelope.

    Args:
        envelope: Metadata of the message.
        more_headers: Result of `encode_header_pairs`.
        payload: Any bytes.

    Raises:
        ValueError: As `encode`.
        LocalProtocolError: As `encode`.
    """
    headers = (
        encode_header_pairs(envelope.headers) + more_headers if envelope.headers else more_headers
    )
    if len(headers) > TEXT_BYTES_MAX:
        raise LocalProtocolError(
            f"headers have at most {TEXT_BYTES_MAX} bytes together, with 4 bytes more for each; "
            f"got {len(headers)}"
        )
    prefix = _NO_FIELDS if envelope == _EMPTY else _encode_prefix(envelope._replace(headers=()))
    prefix = add_headers(prefix, with_length_prefix(headers))
    return (prefix + payload).replace(_DELIMITER_START, STUFFED)


def with_length_prefix(text: bytes) -> bytes:
    """Return `text` behind its length, 16 bits big-endian."""
    return len(text).to_bytes(2, "big") + text


def _check_number(name: str, value: object, lowest: int, highest: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not lowest <= value <= highest:
        raise ValueError(f"{name} is a whole number from {lowest} to {highest}, got {value!r}")


# Reading -----------------------------------------------------------------------------------------


def decode(content: bytes) -> tuple[Envelope, bytes]:
    """Decode the stuffed content of an Envelope frame (binary.md, "Envelope format").

    Returns:
        The metadata and the payload.

    Raises:
        RemoteProtocolError: bad_channel if the channel is not legal, bad_envelope for other errors.
    """
    data, fields, channel, offset = _decode_channel_field(content)
    key = b""
    headers: tuple[tuple[str, str], ...] = ()
    if fields & KEY:
        key = _read_sized(data, offset, "key")
        offset += 2 + len(key)
    if fields & HEADERS:
        text = _read_sized(data, offset, "headers")
        headers = decode_headers(text, offset + 2)
        offset += 2 + len(text)
    return Envelope(channel, key, headers, *decode_times(data, fields)), data[offset:]


def decode_stored_fields(
    content: bytes, *, headers_max: int = HEADERS_MAX
) -> tuple[str, bytes, int | None, int | None]:
    """Check an envelope like `decode`, and return the fields that a ring stores separately.

    Returns:
        Channel, encoded headers without their common length prefix, `expires_ms` and
        `not_before_ms`.

    Raises:
        RemoteProtocolError: As `decode`, and bad_envelope with more than `headers_max` headers.
    """
    data, fields, channel, offset = _decode_channel_field(content)
    headers = b""
    if fields & KEY:
        offset += 2 + len(_read_sized(data, offset, "key"))
    if fields & HEADERS:
        headers = _read_sized(data, offset, "headers")
        check_headers(headers, offset + 2, headers_max=headers_max)
    _, expires_ms, not_before_ms = decode_times(data, fields)
    return channel, headers, expires_ms, not_before_ms


def _decode_channel_field(content: bytes) -> tuple[bytes, int, str, int]:
    """Decode the leading fields of a stuffed content.

    Returns:
        The content without stuffing, its fields byte, the channel, and the offset of the next
        field. The times are complete.
    """
    data = content.replace(STUFFED, _DELIMITER_START)
    if not data:
        raise RemoteProtocolError(
            Reason.BAD_ENVELOPE, "an Envelope has no content; expected at least the fields byte"
        )
    fields = data[0]
    if fields & RESERVED:
        raise RemoteProtocolError(
            Reason.BAD_ENVELOPE,
            f"an Envelope's fields byte is 0x{fields:02x}; expected bits 6 and 7 to be 0",
        )
    offset = 1 + TIMES_BYTES[fields & TIMES]
    if offset > len(data):
        raise _build_too_short_error(data, offset, "its times end")
    channel = ""
    if fields & CHANNEL:
        text = _read_sized(data, offset, "channel")
        channel = decode_channel(text)
        offset += 2 + len(text)
    return data, fields, channel, offset


def extract_payload(content: bytes) -> bytes:
    """Return the payload of a stuffed content that was validated before.

    Raises:
        RemoteProtocolError: bad_envelope if no payload can be found. Nothing else is checked.
    """
    data = content.replace(STUFFED, _DELIMITER_START)
    try:
        fields = data[0]
        if fields == CHANNEL:
            offset = 3 + (data[1] << 8) + data[2]
        else:
            offset = 1 + TIMES_BYTES[fields & TIMES]
            for text in (CHANNEL, KEY, HEADERS):
                if fields & text:
                    offset += 2 + (data[offset] << 8) + data[offset + 1]
    except IndexError:
        offset = -1
    if not 0 < offset <= len(data) or fields & RESERVED:
        decode(content)
        raise AssertionError("decode accepted an envelope without a payload offset")
    return data[offset:]


def extract_key(content: bytes) -> bytes:
    """Return the key of a stuffed content that was validated before; empty if it has none."""
    fields = content[0]
    if not fields & KEY:
        return b""
    offset = 1 + TIMES_BYTES[fields & TIMES]
    if fields & CHANNEL:
        offset += 2 + int.from_bytes(content[offset : offset + 2], "big")
    end = offset + 2 + int.from_bytes(content[offset : offset + 2], "big")
    if content.find(STUFFED, 0, end) >= 0:
        return decode(content)[0].key
    return content[offset + 2 : end]


def decode_times(
    data: bytes, fields: int, offset: int = 1
) -> tuple[int | None, int | None, int | None]:
    """Decode (published, expires_ms, not_before_ms), which begin at `offset`; None for each time
    that the fields byte does not announce.
    """
    published = expires_ms = not_before_ms = None
    if fields & PUBLISHED:
        (published,) = _SIGNED.unpack_from(data, offset)
        offset += 8
    if fields & EXPIRES:
        (expires_ms,) = _UNSIGNED.unpack_from(data, offset)
        offset += 8
    if fields & NOT_BEFORE:
        (not_before_ms,) = _UNSIGNED.unpack_from(data, offset)
    return published, expires_ms, not_before_ms


def _read_sized(data: bytes, offset: int, field_name: str) -> bytes:
    """Return the bytes behind the length prefix at `offset`."""
    if offset + 2 > len(data):
        raise _build_too_short_error(data, offset + 2, f"the length of its {field_name} ends")
    end = offset + 2 + (data[offset] << 8) + data[offset + 1]
    if end > len(data):
        raise _build_too_short_error(
            data, end, f"its {field_name} of {end - offset - 2} bytes ends"
        )
    return data[offset + 2 : end]


def _build_too_short_error(data: bytes, end: int, place: str) -> RemoteProtocolError:
    return RemoteProtocolError(
        Reason.BAD_ENVELOPE,
        f"an Envelope of {len(data)} bytes is too short; expected {end} at least, where {place}",
    )


def decode_channel(text: bytes) -> str:
    """Decode a channel name. Raises RemoteProtocolError (bad_channel)."""
    name = _channel_cache.get(text)
    if name is None:
        name = _check_channel(text)
        if len(_channel_cache) >= _CACHE_ENTRIES_MAX:
            _channel_cache.clear()
        if len(text) <= _CACHED_BYTES_MAX:
            _channel_cache[text] = name
    return name


def decode_channels(texts: Sequence[bytes]) -> list[str] | None:
    """Return several channel names, or None if `decode_channel` would refuse any of them."""
    joined = b"\n".join(texts)
    segments = b".%b." % joined.replace(b"\n", b".")
    if (
        b".." in segments
        or joined.translate(None, _NAME_BYTES) != b"\n" * (len(texts) - 1)
        or max(map(len, texts)) > CHANNEL_BYTES_MAX
        or any(wildcard in segments for wildcard in _WILDCARD_SEGMENTS)
    ):
        return None
    try:
        return joined.decode().split("\n")
    except UnicodeDecodeError:
        return None


def _check_channel(text: bytes) -> str:
    if _PLAIN_CHANNEL.fullmatch(text) and len(text) <= CHANNEL_BYTES_MAX:
        return text.decode("ascii")
    try:
        return check_name(text.decode())
    except UnicodeDecodeError as error:
        raise RemoteProtocolError(
            Reason.BAD_CHANNEL,
            f"an Envelope's channel {_shorten(text)} is not UTF-8: {error.reason} at byte "
            f"{error.start} of it",
        ) from None
    except ValueError as error:
        raise RemoteProtocolError(Reason.BAD_CHANNEL, f"in an Envelope: {error}") from None


def decode_headers(text: bytes, begin: int = 0) -> tuple[tuple[str, str], ...]:
    """Decode headers without their common length prefix.

    Args:
        text: Encoded headers.
        begin: Their offset in the envelope, for error messages.

    Raises:
        RemoteProtocolError: bad_envelope if they are malformed.
    """
    texts: list[str] = []
    offset, length = 0, len(text)
    try:
        while offset < length:
            end = offset + 2 + (text[offset] << 8) + text[offset + 1]
            texts.append(text[offset + 2 : end].decode())
            offset = end
    except (IndexError, UnicodeDecodeError):
        offset = -1
    if offset != length or len(texts) % 2:
        _check_header_texts(text, begin)
    return tuple(zip(texts[::2], texts[1::2], strict=True))


def check_headers(text: bytes, begin: int = 0, *, headers_max: int) -> None:
    """Raise RemoteProtocolError if `decode_headers` would raise it, or if there are more than
    `headers_max` headers. Other parameters as there.
    """
    offset, text_count, length = 0, 0, len(text)
    if not text.isascii():
        text_count = 2 * len(decode_headers(text, begin))
        offset = length
    try:
        while offset < length:
            offset += 2 + (text[offset] << 8) + text[offset + 1]
            text_count += 1
    except IndexError:
        offset = -1
    if offset != length or text_count % 2:
        _check_header_texts(text, begin)
    if text_count > 2 * headers_max:
        raise RemoteProtocolError(
            Reason.BAD_ENVELOPE,
            f"an Envelope has {text_count // 2} headers; expected at most {headers_max}",
        )


def _check_header_texts(text: bytes, begin: int) -> None:
    """Raise RemoteProtocolError with the first fault of malformed headers."""
    texts: list[bytes] = []
    offset = 0
    while offset < len(text):
        end = offset + 2 + int.from_bytes(text[offset : offset + 2], "big")
        if offset + 2 > len(text) or end > len(text):
            raise RemoteProtocolError(
                Reason.BAD_ENVELOPE,
                f"an Envelope's headers end at byte {begin + len(text)}, within the name or value "
                f"that begins at byte {begin + offset}",
            )
        texts.append(text[offset + 2 : end])
        try:
            texts[-1].decode()
        except UnicodeDecodeError as error:
            raise RemoteProtocolError(
                Reason.BAD_ENVELOPE,
                f"an Envelope's header at byte {begin + offset}, {_shorten(texts[-1])}, is not "
                f"UTF-8: {error.reason} at byte {error.start} of it",
            ) from None
        offset = end
    if len(texts) % 2:
        raise RemoteProtocolError(
            Reason.BAD_ENVELOPE,
            f"an Envelope's headers are {len(texts)} texts; expected a value behind the name "
            f"{_shorten(texts[-1])}",
        )


def _shorten(text: bytes) -> str:
    return repr(text if len(text) <= 40 else text[:40] + b"...")
