r"""What a message may carry besides its payload: channel, key, headers, times.

Rule 1: this file knows one content of an Envelope frame, stuffed as on the wire; header and
delimiter are frames' business, what a time means is the broker's.
Rule 2: `decode` alone says what is a good envelope, and why another one is not.

    0        1                                                                        n
    ├ fields ┼ published ┼ expires ┼ not before ┼ channel ──┼ key ─────┼ headers ─────┼ payload … ┤
      u8       i64         u64       u64          u16 + text  u16 + any  u16 + pairs
      bit      0           1         2            3           4          5

All numbers are big-endian. Every `<\r\n` of the content is followed by a NUL on the wire, so that
the delimiter `<\r\n>` never occurs in it.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from simplebus.core.channel.pattern import check_name
from simplebus.core.errors import LocalProtocolError, Reason, RemoteProtocolError
from simplebus.core.protocol.frames import DELIMITER

PUBLISHED, EXPIRES, NOT_BEFORE, CHANNEL, KEY, HEADERS = (1 << bit for bit in range(6))
"""Bits of the fields byte, in the order in which what they announce follows."""

TIMES = PUBLISHED | EXPIRES | NOT_BEFORE
RESERVED = 0b11000000

TEXT_BYTES_MAX = 0xFFFF
"""Of a key, and of all headers together with their lengths."""

_OPEN = DELIMITER[:-1]
STUFFED = _OPEN + b"\0"
_SIGNED = struct.Struct(">q")
_UNSIGNED = struct.Struct(">Q")
_SIGNED_MAX = (1 << 63) - 1
_UNSIGNED_MAX = (1 << 64) - 1
TIMES_BYTES = tuple(8 * fields.bit_count() for fields in range(TIMES + 1))
"""How long the times are, by the bits that announce them."""

# So much is remembered of envelopes with nothing but a channel, and of channels that were read.
_REMEMBERED_MAX = 4096
_REMEMBERED_BYTES_MAX = 256
_prefixes: dict[str, bytes] = {}
_names: dict[bytes, str] = {}


class Envelope(NamedTuple):
    """Everything about a message but its payload. Empty and None stand for what is not said."""

    channel: str = ""
    key: bytes = b""
    headers: tuple[tuple[str, str], ...] = ()
    """Names and values, in order. A name may repeat."""
    published: int | None = None
    """Microseconds since 1970, by the publisher's clock."""
    expires_ms: int | None = None
    """Milliseconds after the bus accepted it; 0: at once."""
    not_before_ms: int | None = None
    """Milliseconds after the bus accepted it."""


_EMPTY = Envelope()
_NO_FIELDS = b"\0"
_NOTHING_ELSE = _EMPTY[1:]


# Stuffing ----------------------------------------------------------------------------------------


def stuff(data: bytes) -> bytes:
    """The same bytes as a content that the delimiter cannot occur in."""
    return data.replace(_OPEN, STUFFED)


def unstuff(content: bytes) -> bytes:
    """What was stuffed. Bytes that nobody stuffed stand for themselves."""
    return content.replace(STUFFED, _OPEN)


# Writing -----------------------------------------------------------------------------------------


def encode(envelope: Envelope, payload: bytes) -> bytes:
    """The content of an Envelope frame, stuffed.

    Raises ValueError for a channel that is not legal or a number out of bounds, LocalProtocolError
    for a key or headers that are too long.
    """
    if envelope[1:] == _NOTHING_ELSE:
        prefix = _prefixes.get(envelope.channel) or _remember(envelope)
    else:
        prefix = _prefix(envelope)
    return (prefix + payload).replace(_OPEN, STUFFED)


def _remember(envelope: Envelope) -> bytes:
    prefix = _prefix(envelope)
    if len(_prefixes) >= _REMEMBERED_MAX:
        _prefixes.clear()
    if len(prefix) <= _REMEMBERED_BYTES_MAX:
        _prefixes[envelope.channel] = prefix
    return prefix


def _prefix(envelope: Envelope) -> bytes:
    """All that comes before the payload, as it is before stuffing."""
    channel, key, headers, published, expires_ms, not_before_ms = envelope
    fields = 0
    pieces = [b""]
    if published is not None:
        fields |= PUBLISHED
        _check_number("published", published, -_SIGNED_MAX - 1, _SIGNED_MAX)
        pieces.append(_SIGNED.pack(published))
    if expires_ms is not None:
        fields |= EXPIRES
        _check_number("expires_ms", expires_ms, 0, _UNSIGNED_MAX)
        pieces.append(_UNSIGNED.pack(expires_ms))
    if not_before_ms is not None:
        fields |= NOT_BEFORE
        _check_number("not_before_ms", not_before_ms, 0, _UNSIGNED_MAX)
        pieces.append(_UNSIGNED.pack(not_before_ms))
    if channel:
        fields |= CHANNEL
        pieces.append(with_length(check_name(channel).encode()))
    if key:
        fields |= KEY
        if len(key) > TEXT_BYTES_MAX:
            raise LocalProtocolError(
                f"a key has at most {TEXT_BYTES_MAX} bytes, got one of {len(key)}"
            )
        pieces.append(with_length(key))
    if headers:
        fields |= HEADERS
        pieces.append(encode_headers(headers))
    pieces[0] = bytes((fields,))
    return b"".join(pieces)


def encode_headers(headers: tuple[tuple[str, str], ...]) -> bytes:
    texts = []
    for pair in headers:
        try:
            texts += [text.encode() for text in pair]
        except UnicodeEncodeError as error:
            raise ValueError(f"the header {pair!r} is no text: {error}") from None
    size = sum(map(len, texts)) + 2 * len(texts)
    if size > TEXT_BYTES_MAX:
        raise LocalProtocolError(
            f"headers have at most {TEXT_BYTES_MAX} bytes together, with 4 bytes more for each; "
            f"got {len(headers)} headers of {size} bytes"
        )
    return size.to_bytes(2, "big") + b"".join(map(with_length, texts))


def encode_pairs(pairs: tuple[tuple[str, str], ...]) -> bytes:
    """Headers as `encode_with` takes them."""
    return encode_headers(pairs)[2:] if pairs else b""


def encode_with(envelope: Envelope, more: bytes, payload: bytes) -> bytes:
    """What `encode` does, with further headers behind the envelope's own. Raises the same."""
    headers = encode_pairs(envelope.headers) + more if envelope.headers else more
    if len(headers) > TEXT_BYTES_MAX:
        raise LocalProtocolError(
            f"headers have at most {TEXT_BYTES_MAX} bytes together, with 4 bytes more for each; "
            f"got {len(headers)}"
        )
    prefix = _NO_FIELDS if envelope == _EMPTY else _prefix(envelope._replace(headers=()))
    fields = bytes((prefix[0] | HEADERS,))
    length = len(headers).to_bytes(2, "big")
    return b"".join((fields, prefix[1:], length, headers, payload)).replace(_OPEN, STUFFED)


def with_length(text: bytes) -> bytes:
    return len(text).to_bytes(2, "big") + text


def _check_number(name: str, value: object, lowest: int, highest: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not lowest <= value <= highest:
        raise ValueError(f"{name} is a whole number from {lowest} to {highest}, got {value!r}")


# Reading -----------------------------------------------------------------------------------------


def decode(content: bytes) -> tuple[Envelope, bytes]:
    """What stands in a stuffed content, and the payload.

    Raises RemoteProtocolError: bad_channel for a channel that is not legal, bad_envelope for
    everything else that is wrong.
    """
    data = content.replace(STUFFED, _OPEN)
    if not data:
        raise RemoteProtocolError(
            Reason.BAD_ENVELOPE, "an Envelope has no content; expected its fields byte at least"
        )
    fields = data[0]
    if fields & RESERVED:
        raise RemoteProtocolError(
            Reason.BAD_ENVELOPE,
            f"an Envelope's fields byte is 0x{fields:02x}; expected bits 6 and 7 to be 0",
        )
    at = 1 + TIMES_BYTES[fields & TIMES]
    if at > len(data):
        raise _too_short(data, at, "its times end")
    published, expires_ms, not_before_ms = times(data, fields)
    channel, key = "", b""
    headers: tuple[tuple[str, str], ...] = ()
    if fields & CHANNEL:
        text = _sized(data, at, "channel")
        channel = channel_of(text)
        at += 2 + len(text)
    if fields & KEY:
        key = _sized(data, at, "key")
        at += 2 + len(key)
    if fields & HEADERS:
        text = _sized(data, at, "headers")
        headers = headers_of(text, at + 2)
        at += 2 + len(text)
    return Envelope(channel, key, headers, published, expires_ms, not_before_ms), data[at:]


def payload_of(content: bytes) -> bytes:
    """The payload of a stuffed content that is known to be good.

    Raises RemoteProtocolError (bad_envelope) for one in which no payload can be found; whatever
    else may be wrong with it is not looked at.
    """
    data = content.replace(STUFFED, _OPEN)
    try:
        fields = data[0]
        if fields == CHANNEL:
            at = 3 + (data[1] << 8) + data[2]
        else:
            at = 1 + TIMES_BYTES[fields & TIMES]
            for text in (CHANNEL, KEY, HEADERS):
                if fields & text:
                    at += 2 + (data[at] << 8) + data[at + 1]
    except IndexError:
        at = -1
    if not 0 < at <= len(data) or fields & RESERVED:
        decode(content)
        raise AssertionError("an envelope without an end of its own was taken")
    return data[at:]


def key_of(content: bytes) -> bytes:
    """The key in a stuffed content that is known to be good; empty for none."""
    fields = content[0]
    if not fields & KEY:
        return b""
    at = 1 + TIMES_BYTES[fields & TIMES]
    if fields & CHANNEL:
        at += 2 + int.from_bytes(content[at : at + 2], "big")
    end = at + 2 + int.from_bytes(content[at : at + 2], "big")
    if content.find(STUFFED, 0, end) >= 0:
        return decode(content)[0].key
    return content[at + 2 : end]


def times(data: bytes, fields: int, at: int = 1) -> tuple[int | None, int | None, int | None]:
    """The three times of which the fields byte speaks, that begin at `at`."""
    published = expires_ms = not_before_ms = None
    if fields & PUBLISHED:
        (published,) = _SIGNED.unpack_from(data, at)
        at += 8
    if fields & EXPIRES:
        (expires_ms,) = _UNSIGNED.unpack_from(data, at)
        at += 8
    if fields & NOT_BEFORE:
        (not_before_ms,) = _UNSIGNED.unpack_from(data, at)
    return published, expires_ms, not_before_ms


def _sized(data: bytes, at: int, what: str) -> bytes:
    """The bytes that a length at `at` announces."""
    if at + 2 > len(data):
        raise _too_short(data, at + 2, f"the length of its {what} ends")
    end = at + 2 + (data[at] << 8) + data[at + 1]
    if end > len(data):
        raise _too_short(data, end, f"its {what} of {end - at - 2} bytes ends")
    return data[at + 2 : end]


def _too_short(data: bytes, end: int, what: str) -> RemoteProtocolError:
    return RemoteProtocolError(
        Reason.BAD_ENVELOPE,
        f"an Envelope of {len(data)} bytes is too short; expected {end} at least, where {what}",
    )


def channel_of(text: bytes) -> str:
    """The channel that these bytes name. Raises RemoteProtocolError (bad_channel)."""
    name = _names.get(text)
    if name is None:
        name = _check_channel(text)
        if len(_names) >= _REMEMBERED_MAX:
            _names.clear()
        if len(text) <= _REMEMBERED_BYTES_MAX:
            _names[text] = name
    return name


def _check_channel(text: bytes) -> str:
    try:
        return check_name(text.decode())
    except UnicodeDecodeError as error:
        raise RemoteProtocolError(
            Reason.BAD_CHANNEL,
            f"an Envelope's channel {_shown(text)} is not UTF-8: {error.reason} at byte "
            f"{error.start} of it",
        ) from None
    except ValueError as error:
        raise RemoteProtocolError(Reason.BAD_CHANNEL, f"in an Envelope: {error}") from None


def headers_of(text: bytes, begin: int = 0) -> tuple[tuple[str, str], ...]:
    """The headers in these bytes, which begin at `begin` of an envelope.

    Raises RemoteProtocolError (bad_envelope).
    """
    texts: list[str] = []
    at = 0
    while at < len(text):
        end = at + 2 + int.from_bytes(text[at : at + 2], "big")
        if at + 2 > len(text) or end > len(text):
            raise RemoteProtocolError(
                Reason.BAD_ENVELOPE,
                f"an Envelope's headers end at byte {begin + len(text)}, within the name or value "
                f"that begins at byte {begin + at}",
            )
        try:
            texts.append(text[at + 2 : end].decode())
        except UnicodeDecodeError as error:
            raise RemoteProtocolError(
                Reason.BAD_ENVELOPE,
                f"an Envelope's header at byte {begin + at}, {_shown(text[at + 2 : end])}, is not "
                f"UTF-8: {error.reason} at byte {error.start} of it",
            ) from None
        at = end
    if len(texts) % 2:
        raise RemoteProtocolError(
            Reason.BAD_ENVELOPE,
            f"an Envelope's headers are {len(texts)} texts; expected a value behind the name "
            f"{_shown(texts[-1].encode())}",
        )
    return tuple(zip(texts[::2], texts[1::2], strict=True))


def _shown(text: bytes) -> str:
    return repr(text if len(text) <= 40 else text[:40] + b"...")
