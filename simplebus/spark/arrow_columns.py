"""From frames as they came to Arrow columns, without a step of the interpreter per message.

Rule 1: nothing of Spark and no I/O here: bytes and bounds in, arrays out.
Rule 2: a column's values are cut out of the frames all at once: Arrow is shown the frames as one
array of alternating pieces, and takes every second one. Only headers, which are many in one text,
are read one by one, and each text that differs only once.
Rule 3: what a column holds is what `envelope.decode` says; a property test says so.

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
    headers_of,
)
from simplebus.core.protocol.frames import Integers, unaligned

DDL = (
    "key binary, value binary not null, topic string not null, partition int not null, "
    "offset bigint not null, timestamp timestamp_ltz not null, timestampType int not null, "
    "channel string, server string not null"
)
"""What Spark calls the columns; named as a Kafka source does, and two more. What is always there
says so: a fifth of Spark's work on a row was to ask for nulls. What Spark takes `timestamp` for is
a setting."""
HEADERS_DDL = "headers array<struct<key: string, value: binary>>"
MEMORY_DDL = "memory string not null"

_HEADER = pa.struct([("key", pa.string()), ("value", pa.binary())])


def _always(name: str, kind: pa.DataType) -> pa.Field:
    return pa.field(name, kind, nullable=False)


_SCHEMA = pa.schema(
    [
        pa.field("key", pa.binary()),
        _always("value", pa.binary()),
        _always("topic", pa.string()),
        _always("partition", pa.int32()),
        _always("offset", pa.int64()),
        _always("timestamp", pa.timestamp("us", tz="UTC")),
        _always("timestampType", pa.int32()),
        pa.field("channel", pa.string()),
        _always("server", pa.string()),
    ]
)
_HEADERS_FIELD = pa.field("headers", pa.list_(_HEADER))
_MEMORY_FIELD = _always("memory", pa.string())
CREATE_TIME, ACCEPT_TIME = 0, 1
"""timestampType: when the publisher says that it published; or, if it says nothing, when the bus
accepted the message. The numbers are those of a Kafka source."""

_WORD: np.dtype[np.uint32] = np.dtype("<u4")
_LENGTH: np.dtype[np.uint16] = np.dtype(">u2")
_MICROSECONDS: np.dtype[np.int64] = np.dtype(">i8")
_STUFFED_WORD = np.uint32(int.from_bytes(STUFFED, "little"))
_TIMES_BYTES = np.array(TIMES_BYTES, np.int64)

Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Frames:
    """Messages of one class that follow one another."""

    raw: bytes | bytearray
    """Their frames back to back; more may follow."""
    bounds: Integers
    """Where each frame begins in raw, and the last one ends."""
    first: int
    """The first one's sequence."""
    steps: Integers
    """With which message each step of acceptance begins; the first one does not begin later."""
    times: Integers
    """When each step was, in microseconds since 1970."""

    @property
    def count(self) -> int:
        return self.bounds.size - 1

    def between(self, first: int, last: int) -> Frames:
        """Those whose sequences are first..last-1."""
        begin = min(max(0, first - self.first), self.count)
        end = max(begin, min(last - self.first, self.count))
        if (begin, end) == (0, self.count):
            return self
        bounds = self.bounds[begin : end + 1]
        raw = self.raw[int(bounds[0]) : int(bounds[-1])]
        return Frames(raw, bounds - bounds[0], self.first + begin, self.steps, self.times)

    @classmethod
    def joined(
        cls,
        pieces: Iterable[tuple[memoryview, Integers]],
        first: int,
        times: Sequence[tuple[int, float]],
    ) -> Frames:
        """Several pieces as one; times as a Fetch tells them, in seconds."""
        raws, bounds, size = [], [np.zeros(1, np.int64)], 0
        for raw, ends in pieces:
            raws.append(raw)
            bounds.append(ends[1:] + size)
            size += len(raw)
        steps = np.array([step for step, _ in times], np.int64)
        seconds = np.array([time for _, time in times], np.float64)
        micros = np.round(seconds * 1e6).astype(np.int64)
        return cls(b"".join(raws), np.concatenate(bounds), first, steps, micros)

    def accepted(self) -> Integers:
        """When each message was accepted, in microseconds since 1970.

        Raises ValueError when nothing is said of the first one.
        """
        if not self.count:
            return np.empty(0, np.int64)
        if not self.steps.size or self.steps[0] > self.first:
            raise ValueError(f"the bus did not say when it accepted message {self.first}")
        bounds = np.append(self.steps, self.first + self.count)
        counts = np.diff(np.clip(bounds, self.first, self.first + self.count))
        return np.repeat(self.times, counts)


@dataclass(frozen=True, slots=True)
class Shape:
    """What the columns say of every message, and which messages there are."""

    server: str
    topic: str
    """The class, as the query names it."""
    class_id: int
    channels: tuple[str, ...] = ()
    """Patterns; a message is there if one of them matches its channel. None: every message."""
    include_headers: bool = False
    memory: str | None = None
    """The identity of the memory that the sequences are of; None if no column is to say it."""


def ddl(*, include_headers: bool, include_memory: bool) -> str:
    """What Spark calls the columns of messages."""
    more = [HEADERS_DDL] * include_headers + [MEMORY_DDL] * include_memory
    return ", ".join([DDL, *more])


def record_batch(given: Frames, shape: Shape) -> pa.RecordBatch:
    """The messages as Spark takes them.

    Raises ValueError for what no bus sends: an envelope whose fields reach beyond its frame, or
    messages of which it is not said when they were accepted.
    """
    count = given.count
    fields = _Fields(given)
    stamps, stamp_types = fields.stamps(given)
    channels = fields.texts(CHANNEL, pa.string())
    keys = fields.texts(KEY, pa.binary())
    headers = fields.texts(HEADERS, pa.binary())
    columns = [
        keys,
        fields.payloads(),
        pa.repeat(pa.scalar(shape.topic), count),
        pa.repeat(pa.scalar(shape.class_id, pa.int32()), count),
        pa.array(np.arange(given.first, given.first + count, dtype=np.int64)),
        stamps,
        stamp_types,
        channels,
        pa.repeat(pa.scalar(shape.server), count),
    ]
    schema = _SCHEMA
    if shape.include_headers:
        columns.append(_header_lists(headers))
        schema = schema.append(_HEADERS_FIELD)
    if shape.memory is not None:
        columns.append(pa.repeat(pa.scalar(shape.memory), count))
        schema = schema.append(_MEMORY_FIELD)
    batch = pa.RecordBatch.from_arrays(columns, schema=schema)
    if shape.channels:
        batch = batch.filter(wanted(channels, shape.channels))
    return batch


def wanted(channels: pa.Array, patterns: tuple[str, ...]) -> pa.Array:
    """Which messages' channels match one of the patterns. Each channel is looked at once."""
    found = channels.dictionary_encode()
    names = found.dictionary.to_pylist()
    verdicts = [any(matches(one, name) for one in patterns) for name in names]
    verdicts.append("#" in patterns)  # Of those without a channel.
    indexes = found.indices.fill_null(len(names))
    return pa.array(verdicts, pa.bool_()).take(indexes)


class _Fields:
    """Reads the fields of all messages, one field after the other."""

    def __init__(self, given: Frames) -> None:
        self._first = given.first
        self._raw, self._bounds = given.raw, given.bounds
        data = np.frombuffer(given.raw, np.uint8)
        starts = self._bounds[:-1]
        envelopes: Flags = data[starts] == frames.ENVELOPE
        if (has_envelopes := bool(envelopes.any())) and STUFFED in given.raw:
            self._unstuff(data, envelopes)
            data, starts = np.frombuffer(self._raw, np.uint8), self._bounds[:-1]
        self._data = data
        self._count = starts.size
        self._ends = self._bounds[1:] - DELIMITER_BYTES
        self._at: Integers = starts + HEADER_BYTES
        self._fields: npt.NDArray[np.uint8] | None = None
        """None when no message has any."""
        self._times_at = self._at
        if has_envelopes:
            self._fields = np.where(envelopes, data[self._at], 0).astype(np.uint8)
            if (self._fields & RESERVED).any():
                raise self._bad(self._fields & RESERVED != 0)
            self._times_at = self._at + 1
            times = _TIMES_BYTES[self._fields & TIMES]
            self._at = self._at + envelopes + times
            self._check_ends()

    def _unstuff(self, data: npt.NDArray[np.uint8], envelopes: Flags) -> None:
        """Take the byte out that keeps the delimiter out of contents."""
        places = np.flatnonzero(unaligned(data, _WORD) == _STUFFED_WORD)
        indexes = np.searchsorted(self._bounds, places, "right") - 1
        nuls = places + len(STUFFED) - 1
        stuffed = envelopes[indexes] & (places >= self._bounds[indexes] + HEADER_BYTES)
        stuffed &= nuls < self._bounds[indexes + 1] - DELIMITER_BYTES
        nuls = nuls[stuffed]
        self._raw = np.delete(data, nuls).tobytes()
        self._bounds = self._bounds - np.searchsorted(nuls, self._bounds)

    def stamps(self, given: Frames) -> tuple[pa.Array, pa.Array]:
        """A time of each message, and what kind of time it is."""
        has = self._which(PUBLISHED)
        if has is None:
            stamps, types = given.accepted(), np.full(self._count, ACCEPT_TIME, np.int32)
        else:
            stamps = self._numbers(_MICROSECONDS, np.where(has, self._times_at, 0)).astype(np.int64)
            types = np.where(has, CREATE_TIME, ACCEPT_TIME).astype(np.int32)
            if not has.all():
                stamps = np.where(has, stamps, given.accepted())
        return pa.array(stamps).view(pa.timestamp("us", tz="UTC")), pa.array(types)

    def texts(self, which: int, kind: pa.DataType) -> pa.Array:
        """The next field, a text with its length in front; null where there is none, or nothing."""
        has = self._which(which)
        if has is None:
            return pa.nulls(self._count, kind)
        lengths = self._numbers(_LENGTH, np.where(has, self._at, 0)).astype(np.int64)
        begins = np.where(has, self._at + 2, self._at)
        self._at = np.where(has, begins + lengths, self._at)
        self._check_ends()
        return self._cut(begins, self._at, kind, where=begins < self._at)

    def payloads(self) -> pa.Array:
        return self._cut(self._at, self._ends, pa.binary())

    def _which(self, field: int) -> Flags | None:
        """Which messages have a field; None for none of them."""
        if self._fields is None:
            return None
        has: Flags = (self._fields & field) != 0
        return has if has.any() else None

    def _numbers(self, kind: np.dtype[np.generic], places: Integers) -> npt.NDArray[np.generic]:
        found: npt.NDArray[np.generic] = unaligned(self._data, kind)[places]
        return found

    def _check_ends(self) -> None:
        out: Flags = self._at > self._ends
        if out.any():
            raise self._bad(out)

    def _bad(self, which: Flags) -> ValueError:
        sequence = self._first + int(np.flatnonzero(which)[0])
        return ValueError(f"the bus sent a bad envelope with message {sequence}")

    def _cut(
        self, begins: Integers, ends: Integers, kind: pa.DataType, *, where: Flags | None = None
    ) -> pa.Array:
        """One piece of each frame; null where it is not to be."""
        if where is None or where.all():
            where = None
            if (pieces := self._cut_alike(begins, ends, kind)) is not None:
                return pieces
        count = self._count
        offsets = np.empty(2 * count, np.int32)
        offsets[::2], offsets[1::2] = begins, ends
        pieces = pa.Array.from_buffers(
            kind, 2 * count - 1, [None, pa.py_buffer(offsets), pa.py_buffer(self._raw)]
        )
        indexes = np.arange(0, 2 * count, 2, dtype=np.int32)
        return pieces.take(pa.array(indexes, mask=None if where is None else ~where))

    def _cut_alike(self, begins: Integers, ends: Integers, kind: pa.DataType) -> pa.Array | None:
        """One piece of each frame where all lie at the same distance and are of one length, copied
        at once; None where they do not."""
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
    """Headers, each text that differs read once; null where there is none."""
    kind = _HEADERS_FIELD.type
    if texts.null_count == len(texts):
        return pa.nulls(len(texts), kind)
    found = texts.dictionary_encode()
    lists = [
        [{"key": name, "value": value.encode()} for name, value in headers_of(text)]
        for text in found.dictionary.to_pylist()
    ]
    return pa.array(lists, kind).take(found.indices)
