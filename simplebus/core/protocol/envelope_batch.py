"""Envelopes by the batch: what the bus needs to know of each, in columns.

Rule 1: `scan` takes a frame exactly when `decode` does. It takes shortcuts only where a shortcut
cannot be wrong: whatever is odd about a frame is left to `decode`.
Rule 2: many frames with the same fields go through arrays, few or mixed ones through a plain loop;
both give the same columns, and a property test says so.

    content   │ fields │ times │ channel │ key │ headers │ payload
    arrays      same     any     one slice and one look into a dict each, unless it is all the same
    loop        any      any     the same
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from simplebus.core.errors import RemoteProtocolError
from simplebus.core.limits import DELIMITER_BYTES, HEADER_BYTES, PLAIN_FRAMES_MAX
from simplebus.core.protocol.envelope import (
    CHANNEL,
    EXPIRES,
    HEADERS,
    KEY,
    NOT_BEFORE,
    RESERVED,
    STUFFED,
    TIMES,
    TIMES_BYTES,
    Envelope,
    decode,
    encode,
    encode_headers,
    encode_pairs,
    encode_with,
    payload_of,
    stuff,
    times,
    unstuff,
    with_length,
)
from simplebus.core.protocol.envelope_reader import NEVER, EnvelopeReader, Numbers, Seconds
from simplebus.core.protocol.frames import FrameBatch

__all__ = [
    "Envelope",
    "EnvelopeColumns",
    "decode",
    "encode",
    "encode_pairs",
    "encode_with",
    "payload_of",
    "scan",
    "stuff",
    "unstuff",
    "with_length",
]

# Of more frames than many, some are looked at first: a peer that sends one bad frame among few good
# ones has then not had all of them looked at for each.
_MANY = 4096
_SOME = 1024


@dataclass(frozen=True, slots=True)
class EnvelopeColumns:
    """What the bus needs to know of envelopes, in the order of their frames."""

    count: int
    """How many are good, from the front; the next one is what `decode` refuses, if there is one."""
    names: list[str]
    """The channels that occur, each once; "" for none."""
    channels: int | Numbers
    """Index into names of each; one number when it is the same for all."""
    expires: Seconds | None = None
    """Seconds after accepting, inf for never; None when that is so for all."""
    not_before: Seconds | None = None
    """Seconds after accepting, 0 for at once; None when that is so for all."""


def scan(batch: FrameBatch) -> EnvelopeColumns:
    """The columns of whole Envelope frames, up to the first that is no good envelope."""
    if batch.count > _MANY:
        found = _scan_alike(batch.slice(0, _SOME))
        if found is not None and found.count < _SOME:
            return found
    if batch.count > PLAIN_FRAMES_MAX:
        found = _scan_alike(batch)
        if found is not None:
            return found
    return _scan_each(batch)


# One after the other -----------------------------------------------------------------------------


def _scan_each(batch: FrameBatch) -> EnvelopeColumns:
    raw = batch.data.tobytes()
    if batch.count == 1:
        return _scan_one(raw[HEADER_BYTES:-DELIMITER_BYTES])
    rows = _Rows(raw)
    channels: list[int] = []
    expires: list[float] = []
    not_before: list[float] = []
    try:
        for start, end in pairwise(batch.bounds.tolist()):
            channel, late, early = rows.read(start + HEADER_BYTES, end - DELIMITER_BYTES)
            channels.append(channel)
            expires.append(late)
            not_before.append(early)
    except RemoteProtocolError:
        pass
    return EnvelopeColumns(
        len(channels),
        list(rows.names),
        np.array(channels, np.uint32) if len(rows.names) > 1 else 0,
        np.array(expires) if min(expires, default=NEVER) < NEVER else None,
        np.array(not_before) if max(not_before, default=0.0) else None,
    )


def _scan_one(content: bytes) -> EnvelopeColumns:
    try:
        envelope, _ = decode(content)
    except RemoteProtocolError:
        return EnvelopeColumns(0, [], 0)
    expires_ms, not_before_ms = envelope.expires_ms, envelope.not_before_ms
    return EnvelopeColumns(
        1,
        [envelope.channel],
        0,
        None if expires_ms is None else np.array([_seconds(expires_ms, NEVER)]),
        np.array([_seconds(not_before_ms, 0.0)]) if not_before_ms else None,
    )


class _Rows:
    """Reads one envelope after the other, and remembers what it has found to be good."""

    def __init__(self, raw: bytes) -> None:
        self._raw = raw
        self.names: dict[str, int] = {}
        """The channels read, and their numbers."""
        self._channels: dict[bytes, int] = {}
        """The numbers by the channel's length and name, as on the wire."""
        self._headers: set[bytes] = set()
        """Headers read, with their length."""
        self._may_be_stuffed = STUFFED[1:] in raw

    def read(self, begin: int, end: int) -> tuple[int, float, float]:
        """Channel, expiry and opening of the envelope at raw[begin:end]. Raises what `decode`
        does."""
        try:
            found = self._read_known(begin, end)
        except IndexError:  # A length that leads far out of the frame.
            found = None
        return found or self._read_new(self._raw[begin:end])

    def _read_known(self, begin: int, end: int) -> tuple[int, float, float] | None:
        """The same, if there is nothing new or odd about it. Bytes behind the end may be read, but
        never count."""
        raw = self._raw
        fields = raw[begin]
        at = begin + 1 + TIMES_BYTES[fields & TIMES]
        channel_at = at
        if fields & CHANNEL:
            at += 2 + (raw[at] << 8) + raw[at + 1]
        channel = self._channels.get(raw[channel_at:at])
        if channel is None:
            return None
        if fields & KEY:
            at += 2 + (raw[at] << 8) + raw[at + 1]
        if fields & HEADERS:
            headers_at = at
            at += 2 + (raw[at] << 8) + raw[at + 1]
            if raw[headers_at:at] not in self._headers:
                return None
        if at > end or fields & RESERVED:
            return None
        if self._may_be_stuffed and raw.find(STUFFED, begin, end) >= 0:
            return None
        if fields & (EXPIRES | NOT_BEFORE):
            _, expires_ms, not_before_ms = times(raw, fields, begin + 1)
            return channel, _seconds(expires_ms, NEVER), _seconds(not_before_ms, 0.0)
        return channel, NEVER, 0.0

    def _read_new(self, content: bytes) -> tuple[int, float, float]:
        envelope, _ = decode(content)
        names = self.names
        channel = names.setdefault(envelope.channel, len(names))
        name = envelope.channel
        self._channels[with_length(name.encode()) if name else b""] = channel
        if envelope.headers:
            self._headers.add(encode_headers(envelope.headers))
        return (
            channel,
            _seconds(envelope.expires_ms, NEVER),
            _seconds(envelope.not_before_ms, 0.0),
        )


def _seconds(milliseconds: int | None, otherwise: float) -> float:
    return otherwise if milliseconds is None else float(milliseconds) / 1000.0


# All at once -------------------------------------------------------------------------------------


def _scan_alike(batch: FrameBatch) -> EnvelopeColumns | None:
    """The same, when nearly all frames have the first one's fields; else None."""
    reader = EnvelopeReader.of(batch)
    if reader is None:
        return None
    expires, not_before = reader.times()
    names, channels = reader.channels()
    reader.skip_key()
    reader.skip_headers()
    odd = reader.odd_ones()
    if odd is None:
        return None
    if not odd:
        return _columns(list(names), channels, expires, not_before)
    raw, bounds, count = batch.data.tobytes(), batch.bounds.tolist(), batch.count
    for index in odd:
        begin, end = bounds[index] + HEADER_BYTES, bounds[index + 1] - DELIMITER_BYTES
        try:
            envelope, _ = decode(raw[begin:end])
        except RemoteProtocolError:
            count = index
            break
        channels[index] = names.setdefault(envelope.channel, len(names))
        expires[index] = _seconds(envelope.expires_ms, NEVER)
        not_before[index] = _seconds(envelope.not_before_ms, 0.0)
    # Names that stood in no good envelope are left out.
    used, numbers = np.unique(channels[:count], return_inverse=True)
    every = list(names)
    return _columns(
        [every[number] for number in used.tolist()],
        numbers.astype(np.uint32),
        expires[:count],
        not_before[:count],
    )


def _columns(
    names: list[str], channels: Numbers, expires: Seconds, not_before: Seconds
) -> EnvelopeColumns:
    return EnvelopeColumns(
        expires.size,
        names,
        channels if len(names) > 1 else 0,
        expires if expires.min(initial=NEVER) < NEVER else None,
        not_before if not_before.max(initial=0.0) else None,
    )
