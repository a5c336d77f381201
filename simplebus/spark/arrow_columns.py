"""Conversion of frames to Arrow columns, vectorized over all messages.

A column's values are cut out of the frames at once: Arrow gets the frames as one array of
alternating pieces and takes every second one. Headers are decoded once for each distinct text. A
property test compares every column with `envelope.decode`.

    frames   │ header │ fields │ times │ channel │ key │ headers │ payload │ delimiter │ …
    pieces            begin of a field ─┴─ its end          begin ─┴─ end
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from simplebus.core.channel.pattern import matches
from simplebus.core.limits import DELIMITER_BYTES, HEADER_BYTES
from simplebus.core.protocol import frames
from simplebus.core.protocol.envelope import (
    CHANNEL,
    HEADERS,
    KEY,
    PUBLISHED,
    RESERVED,
    STUFFED,
    TIMES,
    TIMES_BYTES,
    decode_headers,
)
from simplebus.core.protocol.frames import Integers, unaligned

DDL = (
    "key binary, value binary not null, topic string not null, partition int not null, "
    "offset bigint not null, timestamp timestamp_ltz not null, timestampType int not null, "
    "channel string, server string not null"
)
"""Spark schema of the columns. They are named as in Spark's Kafka source, plus channel and server.

Columns without nulls are declared `not null`: checking for nulls took a fifth of Spark's time per
row.
"""
HEADERS_DDL = "headers array<struct<key: string, value: binary>>"
MEMORY_DDL = "memory string not null"

_HEADER = pa.struct([("key", pa.string()), ("value", pa.binary())])


def _required(name: str, kind: pa.DataType) -> pa.Field:
    return pa.field(name, kind, nullable=False)


_SCHEMA = pa.schema(
    [
        pa.field("key", pa.binary()),
        _required("value", pa.binary()),
        _required("topic", pa.string()),
        _required("partition", pa.int32()),
        _required("offset", pa.int64()),
        _required("timestamp", pa.timestamp("us", tz="UTC")),
        _required("timestampType", pa.int32()),
        pa.field("channel", pa.string()),
        _required("server", pa.string()),
    ]
)
_HEADERS_FIELD = pa.field("headers", pa.list_(_HEADER))
_MEMORY_FIELD = _required("memory", pa.string())
CREATE_TIME, ACCEPT_TIME = 0, 1
"""Values of timestampType, as in Spark's Kafka source: set by the publisher, or accepted by the
bus.
"""

_UINT32: np.dtype[np.uint32] = np.dtype("<u4")
_UINT16: np.dtype[np.uint16] = np.dtype(">u2")
_INT64: np.dtype[np.int64] = np.dtype(">i8")
_STUFFED_WORD = np.uint32(int.from_bytes(STUFFED, "little"))
_TIMES_BYTES = np.array(TIMES_BYTES, np.int64)

Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class FetchedFrames:
    """Consecutive messages of one class."""

    raw: bytes | bytearray
    """The frames back to back; more bytes may follow."""
    bounds: Integers
    """Start of each frame in raw, and the end of the last one."""
    first: int
    """Sequence of the first message."""
    time_sequences: Integers
    """First sequence of each acceptance time; `time_sequences[0] <= first`."""
    times: Integers
    """Acceptance times, in microseconds since 1970."""

    @property
    def count(self) -> int:
        return self.bounds.size - 1

    def slice_sequences(self, first: int, last: int) -> FetchedFrames:
        """Return the messages first..last-1."""
        begin = min(max(0, first - self.first), self.count)
        end = max(begin, min(last - self.first, self.count))
        if (begin, end) == (0, self.count):
            return self
        bounds = self.bounds[begin : end + 1]
        raw = self.raw[int(bounds[0]) : int(bounds[-1])]
        return FetchedFrames(
            raw, bounds - bounds[0], self.first + begin, self.time_sequences, self.times
        )

    @classmethod
    def concatenate(
        cls,
        pieces: Iterable[tuple[memoryview, Integers]],
        first: int,
        times: Sequence[tuple[int, float]],
    ) -> FetchedFrames:
        """Join pieces of frames.

        Args:
            pieces: Frames back to back, with their bounds.
            first: Sequence of the first message.
            times: Acceptance times as in a FetchReply: first sequence, and seconds since 1970.
        """
        raws, bounds, size = [], [np.zeros(1, np.int64)], 0
        for raw, ends in pieces:
            raws.append(raw)
            bounds.append(ends[1:] + size)
            size += len(raw)
        steps = np.array([step for step, _ in times], np.int64)
        seconds = np.array([time for _, time in times], np.float64)
        microseconds = np.round(seconds * 1e6).astype(np.int64)
        return cls(b"".join(raws), np.concatenate(bounds), first, steps, microseconds)

    def acceptance_times(self) -> Integers:
        """Return the acceptance time of each message, in microseconds since 1970.

        Raises ValueError if the time of the first message is unknown.
        """
        if not self.count:
            return np.empty(0, np.int64)
        if not self.time_sequences.size or self.time_sequences[0] > self.first:
            raise ValueError(f"the bus sent no acceptance time for message {self.first}")
        bounds = np.append(self.time_sequences, self.first + self.count)
        counts = np.diff(np.clip(bounds, self.first, self.first + self.count))
        return np.repeat(self.times, counts)


@dataclass(frozen=True, slots=True)
class ColumnOptions:
    """Constant columns, optional columns and the channel filter."""

    server: str
    topic: str
    """The class, as the query names it."""
    class_id: int
    channels: tuple[str, ...] = ()
    """Patterns; messages on other channels are left out. Empty: every message."""
    include_headers: bool = False
    memory: str | None = None
    """Memory id for the column memory; None omits the column."""


def schema_ddl(*, include_headers: bool, include_memory: bool) -> str:
    """Return the Spark schema of the columns."""
    more = [HEADERS_DDL] * include_headers + [MEMORY_DDL] * include_memory
    return ", ".join([DDL, *more])


def arrow_schema(*, include_headers: bool, include_memory: bool) -> pa.Schema:
    """Return the Arrow schema of the columns."""
    schema = _SCHEMA
    if include_headers:
        schema = schema.append(_HEADERS_FIELD)
    return schema.append(_MEMORY_FIELD) if include_memory else schema


def to_record_batch(fetched: FetchedFrames, shape: ColumnOptions) -> pa.RecordBatch:
    """Convert messages to an Arrow batch.

    Raises ValueError for an envelope that exceeds its frame, or an unknown acceptance time.
    """
    count = fetched.count
    fields = _FieldReader(fetched)
    stamps, stamp_types = fields.read_timestamps(fetched)
    channels = fields.read_texts(CHANNEL, pa.string())
    keys = fields.read_texts(KEY, pa.binary())
    headers = fields.read_texts(HEADERS, pa.binary())
    columns = [
        keys,
        fields.read_payloads(),
        pa.repeat(pa.scalar(shape.topic), count),
        pa.repeat(pa.scalar(shape.class_id, pa.int32()), count),
        pa.array(np.arange(fetched.first, fetched.first + count, dtype=np.int64)),
        stamps,
        stamp_types,
        channels,
        pa.repeat(pa.scalar(shape.server), count),
    ]
    if shape.include_headers:
        columns.append(_header_lists(headers))
    if shape.memory is not None:
        columns.append(pa.repeat(pa.scalar(shape.memory), count))
    schema = arrow_schema(
        include_headers=shape.include_headers, include_memory=shape.memory is not None
    )
    batch = pa.RecordBatch.from_arrays(columns, schema=schema)
    if shape.channels:
        batch = batch.filter(match_channels(channels, shape.channels))
    return batch


def match_channels(channels: pa.Array, patterns: tuple[str, ...]) -> pa.Array:
    """Return a mask of the channels that match a pattern. Each distinct channel is matched once."""
    found = channels.dictionary_encode()
    names = found.dictionary.to_pylist()
    is_matching = [any(matches(pattern, name) for pattern in patterns) for name in names]
    is_matching.append("#" in patterns)  # For messages without a channel.
    indexes = found.indices.fill_null(len(names))
    return pa.array(is_matching, pa.bool_()).take(indexes)


class _FieldReader:
    """Reader of the envelope fields of all messages, one field after the other."""

    def __init__(self, fetched: FetchedFrames) -> None:
        self._first = fetched.first
        self._raw, self._bounds = fetched.raw, fetched.bounds
        data = np.frombuffer(fetched.raw, np.uint8)
        starts = self._bounds[:-1]
        envelopes: Flags = data[starts] == frames.ENVELOPE
        if (has_envelopes := bool(envelopes.any())) and STUFFED in fetched.raw:
            self._unstuff(data, envelopes)
            data, starts = np.frombuffer(self._raw, np.uint8), self._bounds[:-1]
        self._data = data
        self._count = starts.size
        self._ends = self._bounds[1:] - DELIMITER_BYTES
        self._cursors: Integers = starts + HEADER_BYTES
        self._fields: npt.NDArray[np.uint8] | None = None
        """Field bits of each message; None if no message has an envelope."""
        self._time_offsets = self._cursors
        if has_envelopes:
            self._fields = np.where(envelopes, data[self._cursors], 0).astype(np.uint8)
            if (self._fields & RESERVED).any():
                raise self._envelope_error(self._fields & RESERVED != 0)
            self._time_offsets = self._cursors + 1
            times = _TIMES_BYTES[self._fields & TIMES]
            self._cursors = self._cursors + envelopes + times
            self._check_ends()

    def _unstuff(self, data: npt.NDArray[np.uint8], envelopes: Flags) -> None:
        """Remove byte stuffing from envelopes."""
        places = np.flatnonzero(unaligned(data, _UINT32) == _STUFFED_WORD)
        indexes = np.searchsorted(self._bounds, places, "right") - 1
        nuls = places + len(STUFFED) - 1
        stuffed = envelopes[indexes] & (places >= self._bounds[indexes] + HEADER_BYTES)
        stuffed &= nuls < self._bounds[indexes + 1] - DELIMITER_BYTES
        nuls = nuls[stuffed]
        self._raw = np.delete(data, nuls).tobytes()
        self._bounds = self._bounds - np.searchsorted(nuls, self._bounds)

    def read_timestamps(self, fetched: FetchedFrames) -> tuple[pa.Array, pa.Array]:
        """Return the columns timestamp and timestampType."""
        has_field = self._has_field(PUBLISHED)
        if has_field is None:
            stamps, types = fetched.acceptance_times(), np.full(self._count, ACCEPT_TIME, np.int32)
        else:
            stamps = self._read_numbers(_INT64, np.where(has_field, self._time_offsets, 0)).astype(
                np.int64
            )
            types = np.where(has_field, CREATE_TIME, ACCEPT_TIME).astype(np.int32)
            if not has_field.all():
                stamps = np.where(has_field, stamps, fetched.acceptance_times())
        return pa.array(stamps).view(pa.timestamp("us", tz="UTC")), pa.array(types)

    def read_texts(self, field: int, kind: pa.DataType) -> pa.Array:
        """Read the next length-prefixed field of each message; null if it is absent or empty."""
        has_field = self._has_field(field)
        if has_field is None:
            return pa.nulls(self._count, kind)
        lengths = self._read_numbers(_UINT16, np.where(has_field, self._cursors, 0)).astype(
            np.int64
        )
        begins = np.where(has_field, self._cursors + 2, self._cursors)
        self._cursors = np.where(has_field, begins + lengths, self._cursors)
        self._check_ends()
        return self._slice_frames(begins, self._cursors, kind, where=begins < self._cursors)

    def read_payloads(self) -> pa.Array:
        return self._slice_frames(self._cursors, self._ends, pa.binary())

    def _has_field(self, field: int) -> Flags | None:
        """Return a mask of the messages that have a field; None if no message has it."""
        if self._fields is None:
            return None
        has_field: Flags = (self._fields & field) != 0
        return has_field if has_field.any() else None

    def _read_numbers(
        self, kind: np.dtype[np.generic], places: Integers
    ) -> npt.NDArray[np.generic]:
        found: npt.NDArray[np.generic] = unaligned(self._data, kind)[places]
        return found

    def _check_ends(self) -> None:
        out: Flags = self._cursors > self._ends
        if out.any():
            raise self._envelope_error(out)

    def _envelope_error(self, is_invalid: Flags) -> ValueError:
        sequence = self._first + int(np.flatnonzero(is_invalid)[0])
        return ValueError(f"the bus sent a bad envelope with message {sequence}")

    def _slice_frames(
        self, begins: Integers, ends: Integers, kind: pa.DataType, *, where: Flags | None = None
    ) -> pa.Array:
        """Return one piece of each frame; null where the mask is False."""
        if where is None or where.all():
            where = None
            if (pieces := self._slice_uniform(begins, ends, kind)) is not None:
                return pieces
        count = self._count
        offsets = np.empty(2 * count, np.int32)
        offsets[::2], offsets[1::2] = begins, ends
        pieces = pa.Array.from_buffers(
            kind, 2 * count - 1, [None, pa.py_buffer(offsets), pa.py_buffer(self._raw)]
        )
        indexes = np.arange(0, 2 * count, 2, dtype=np.int32)
        return pieces.take(pa.array(indexes, mask=None if where is None else ~where))

    def _slice_uniform(
        self, begins: Integers, ends: Integers, kind: pa.DataType
    ) -> pa.Array | None:
        """Return equally long pieces at equal distances by one copy; None if they are not."""
        if begins.size < 2:
            return None
        step, size = int(begins[1] - begins[0]), int(ends[0] - begins[0])
        if not ((np.diff(begins) == step).all() and (ends - begins == size).all()):
            return None
        shape, strides = (begins.size, size), (step, 1)
        alike = np.ndarray(shape, np.uint8, self._raw, offset=int(begins[0]), strides=strides)
        offsets = np.arange(begins.size + 1, dtype=np.int32) * np.int32(size)
        buffers = [None, pa.py_buffer(offsets), pa.py_buffer(alike.tobytes())]
        return pa.Array.from_buffers(kind, begins.size, buffers)


def _header_lists(texts: pa.Array) -> pa.Array:
    """Decode headers, each distinct text once; null for messages without headers."""
    kind = _HEADERS_FIELD.type
    if texts.null_count == len(texts):
        return pa.nulls(len(texts), kind)
    found = texts.dictionary_encode()
    lists = [
        [{"key": name, "value": value.encode()} for name, value in decode_headers(text)]
        for text in found.dictionary.to_pylist()
    ]
    return pa.array(lists, kind).take(found.indices)
