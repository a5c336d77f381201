"""Columns of many envelopes: channel, expiry and delay of each.

`scan_envelopes` accepts exactly the frames that `decode` accepts; frames that a shortcut cannot
handle are passed to `decode`. Many frames with the same fields are read with arrays, few or mixed
ones in a loop. A property test checks that both return the same columns.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from simplebus.core.errors import RemoteProtocolError
from simplebus.core.limits import DELIMITER_BYTES, HEADER_BYTES, HEADERS_MAX, PLAIN_FRAMES_MAX
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
    decode_stored_fields,
    decode_times,
    encode,
    encode_header_pairs,
    encode_with_headers,
    extract_payload,
    stuff,
    unstuff,
    with_length_prefix,
)
from simplebus.core.protocol.envelope_reader import NEVER, Numbers, Seconds, UniformEnvelopeReader
from simplebus.core.protocol.frames import FrameBatch

__all__ = [
    "Envelope",
    "EnvelopeColumns",
    "decode",
    "decode_stored_fields",
    "encode",
    "encode_header_pairs",
    "encode_with_headers",
    "extract_payload",
    "scan_envelopes",
    "stuff",
    "unstuff",
    "with_length_prefix",
]

# Of very large batches, the first frames are scanned alone. Otherwise a peer that sends a bad frame
# every few frames would have the whole rest scanned again after each of them.
_PROBE_ABOVE_FRAMES = 4096
_PROBE_FRAMES = 1024


@dataclass(frozen=True, slots=True)
class EnvelopeColumns:
    """Columns of envelopes, in the order of their frames."""

    count: int
    """Number of well-formed envelopes at the front; `decode` rejects the next one, if there is one.
    """
    names: list[str]
    """Distinct channels; "" for none."""
    channels: int | Numbers
    """Index into `names` for each envelope, shape (count,); one number if all have the same."""
    expires: Seconds | None = None
    """Seconds from acceptance, inf for never, shape (count,); None if no envelope expires."""
    not_before: Seconds | None = None
    """Seconds from acceptance, 0 for no delay, shape (count,); None if no envelope is delayed."""

    def slice(self, first: int, last: int) -> EnvelopeColumns:
        """Return the columns of envelopes first..last-1, with the names that they use."""
        if first == 0 and last == self.count:
            return self
        names, channels = self.names, self.channels
        if not isinstance(channels, int):
            used, numbers = np.unique(channels[first:last], return_inverse=True)
            names = [names[index] for index in used.tolist()]
            channels = numbers.astype(np.uint32) if len(names) > 1 else 0
        return EnvelopeColumns(
            last - first,
            names,
            channels,
            None if self.expires is None else self.expires[first:last],
            None if self.not_before is None else self.not_before[first:last],
        )


def scan_envelopes(batch: FrameBatch, *, headers_max: int = HEADERS_MAX) -> EnvelopeColumns:
    """Return the columns of whole Envelope frames, up to the first malformed envelope.

    An envelope with more than `headers_max` headers counts as malformed.
    """
    if batch.count > _PROBE_ABOVE_FRAMES:
        columns = _scan_uniform(batch.slice(0, _PROBE_FRAMES), headers_max)
        if columns is not None and columns.count < _PROBE_FRAMES:
            return columns
    if batch.count > PLAIN_FRAMES_MAX:
        columns = _scan_uniform(batch, headers_max)
        if columns is not None:
            return columns
    return _scan_one_by_one(batch, headers_max)


# Loop --------------------------------------------------------------------------------------------


def _scan_one_by_one(batch: FrameBatch, headers_max: int) -> EnvelopeColumns:
    raw = batch.data.tobytes()
    if batch.count == 1:
        return _scan_single(raw[HEADER_BYTES:-DELIMITER_BYTES], headers_max)
    reader = _CachingEnvelopeReader(raw, headers_max)
    channels: list[int] = []
    expires: list[float] = []
    not_before: list[float] = []
    try:
        for start, end in pairwise(batch.bounds.tolist()):
            channel, expiry, delay = reader.read(start + HEADER_BYTES, end - DELIMITER_BYTES)
            channels.append(channel)
            expires.append(expiry)
            not_before.append(delay)
    except RemoteProtocolError:
        pass
    return EnvelopeColumns(
        len(channels),
        list(reader.names),
        np.array(channels, np.uint32) if len(reader.names) > 1 else 0,
        np.array(expires) if min(expires, default=NEVER) < NEVER else None,
        np.array(not_before) if max(not_before, default=0.0) else None,
    )


def _scan_single(content: bytes, headers_max: int) -> EnvelopeColumns:
    try:
        channel, _, expires_ms, not_before_ms = decode_stored_fields(
            content, headers_max=headers_max
        )
    except RemoteProtocolError:
        return EnvelopeColumns(0, [], 0)
    return EnvelopeColumns(
        1,
        [channel],
        0,
        None if expires_ms is None else np.array([_to_seconds(expires_ms, NEVER)]),
        np.array([_to_seconds(not_before_ms, 0.0)]) if not_before_ms else None,
    )


class _CachingEnvelopeReader:
    """Reads one envelope after the other and caches validated channels and headers."""

    def __init__(self, raw: bytes, headers_max: int) -> None:
        self._raw = raw
        self._headers_max = headers_max
        self.names: dict[str, int] = {}
        """Number of each channel that was read."""
        self._channels: dict[bytes, int] = {}
        """Channel numbers by the encoded channel, with its length prefix."""
        self._headers: set[bytes] = set()
        """Encoded headers that are valid, with their length prefix."""
        self._may_be_stuffed = STUFFED[1:] in raw

    def read(self, begin: int, end: int) -> tuple[int, float, float]:
        """Return channel number, expiry and delay of the envelope at raw[begin:end]. Raises as
        `decode`.
        """
        try:
            values = self._read_known(begin, end)
        except IndexError:  # A length prefix that reaches beyond the received bytes.
            values = None
        return values or self._read_new(self._raw[begin:end])

    def _read_known(self, begin: int, end: int) -> tuple[int, float, float] | None:
        """Return the result of `read` if channel and headers are cached and nothing needs `decode`,
        else None.

        Bytes behind `end` may be read, but never change the result.
        """
        raw = self._raw
        fields = raw[begin]
        offset = begin + 1 + TIMES_BYTES[fields & TIMES]
        channel_offset = offset
        if fields & CHANNEL:
            offset += 2 + (raw[offset] << 8) + raw[offset + 1]
        channel = self._channels.get(raw[channel_offset:offset])
        if channel is None:
            return None
        if fields & KEY:
            offset += 2 + (raw[offset] << 8) + raw[offset + 1]
        if fields & HEADERS:
            headers_offset = offset
            offset += 2 + (raw[offset] << 8) + raw[offset + 1]
            if raw[headers_offset:offset] not in self._headers:
                return None
        if offset > end or fields & RESERVED:
            return None
        if self._may_be_stuffed and raw.find(STUFFED, begin, end) >= 0:
            return None
        if fields & (EXPIRES | NOT_BEFORE):
            _, expires_ms, not_before_ms = decode_times(raw, fields, begin + 1)
            return channel, _to_seconds(expires_ms, NEVER), _to_seconds(not_before_ms, 0.0)
        return channel, NEVER, 0.0

    def _read_new(self, content: bytes) -> tuple[int, float, float]:
        name, headers, expires_ms, not_before_ms = decode_stored_fields(
            content, headers_max=self._headers_max
        )
        channel = self.names.setdefault(name, len(self.names))
        self._channels[with_length_prefix(name.encode()) if name else b""] = channel
        if headers:
            self._headers.add(with_length_prefix(headers))
        return channel, _to_seconds(expires_ms, NEVER), _to_seconds(not_before_ms, 0.0)


def _to_seconds(milliseconds: int | None, default: float) -> float:
    return default if milliseconds is None else float(milliseconds) / 1000.0


# Arrays ------------------------------------------------------------------------------------------


def _scan_uniform(batch: FrameBatch, headers_max: int) -> EnvelopeColumns | None:
    """Return the columns if nearly all frames have the same fields as the first one, else None."""
    reader = UniformEnvelopeReader.for_batch(batch)
    if reader is None:
        return None
    expires, not_before = reader.read_times()
    names, channels = reader.read_channels()
    reader.skip_key()
    reader.skip_headers(headers_max)
    irregular = reader.irregular_indexes()
    if irregular is None:
        return None
    if not irregular:
        return _build_columns(list(names), channels, expires, not_before)
    raw, bounds, count = batch.data.tobytes(), batch.bounds.tolist(), batch.count
    for index in irregular:
        begin, end = bounds[index] + HEADER_BYTES, bounds[index + 1] - DELIMITER_BYTES
        try:
            name, _, expires_ms, not_before_ms = decode_stored_fields(
                raw[begin:end], headers_max=headers_max
            )
        except RemoteProtocolError:
            count = index
            break
        channels[index] = names.setdefault(name, len(names))
        expires[index] = _to_seconds(expires_ms, NEVER)
        not_before[index] = _to_seconds(not_before_ms, 0.0)
    # Drop names that occur only in malformed envelopes.
    used, numbers = np.unique(channels[:count], return_inverse=True)
    every = list(names)
    return _build_columns(
        [every[number] for number in used.tolist()],
        numbers.astype(np.uint32),
        expires[:count],
        not_before[:count],
    )


def _build_columns(
    names: list[str], channels: Numbers, expires: Seconds, not_before: Seconds
) -> EnvelopeColumns:
    return EnvelopeColumns(
        expires.size,
        names,
        channels if len(names) > 1 else 0,
        expires if expires.min(initial=NEVER) < NEVER else None,
        not_before if not_before.max(initial=0.0) else None,
    )
