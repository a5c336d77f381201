"""What a client receives, cut into runs: frames that one sentence can describe.

Rule 1: a run of messages has one frame type, one class, and ids that ascend, mostly by one.
Every other frame is a run of its own.
Rule 2: a run owns its bytes; nothing here is a view of a receive buffer.
Rule 3: few frames take the plain loop, many take arrays; both find the same runs, and a property
test says so.

    run   │ frame │ frame │ frame │ …      ids   3 4 5   or   3 7 12
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from simplebus.core.limits import DELIMITER_BYTES, FRAME_BYTES_MIN, HEADER_BYTES, PLAIN_FRAMES_MAX
from simplebus.core.protocol import frames
from simplebus.core.protocol.frames import FrameBatch, Integers

MessageIds = range | Integers
"""Numbers of messages: ascending, as a range where they follow one another."""

_MESSAGE_TYPES = (frames.MESSAGE, frames.ENVELOPE)
_ID_DTYPE: np.dtype[np.int32] = np.dtype(">i4")
_ID_OFFSET = 3
# With fewer frames than this per stretch of one type and class, the plain loop is faster.
_STRETCH_FRAMES_MIN = 16


class FrameRun:
    """Frames of one type and class with ascending ids, and their bytes."""

    __slots__ = (
        "bounds",
        "class_id",
        "count",
        "first_id",
        "frame_type",
        "ids",
        "raw",
        "stride",
        "timer_index",
    )

    def __init__(
        self,
        raw: bytes,
        *,
        count: int,
        stride: int,
        bounds: Integers | None = None,
        ids: MessageIds | None = None,
    ) -> None:
        """Reads the first frame's header; the caller knows that the others follow from it."""
        fields: tuple[int, int, int, int] = frames.HEADER.unpack_from(raw)
        self.frame_type, self.class_id, self.first_id, self.timer_index = fields
        self.raw = raw
        """The frames back to back, delimiters included."""
        self.count = count
        self.stride = stride
        """How long each frame is, when all are equal."""
        self.bounds = bounds
        """Where each frame begins in raw and the last one ends; None when all are as long as the
        stride."""
        self.ids: MessageIds = range(self.first_id, self.first_id + count) if ids is None else ids
        """The frames' numbers. The wire's are signed: below 0 is what no peer should send."""

    @property
    def has_messages(self) -> bool:
        return self.frame_type in _MESSAGE_TYPES

    @property
    def content(self) -> bytes:
        """What the only frame holds."""
        return self.raw[HEADER_BYTES:-DELIMITER_BYTES]

    def slice(self, first: int, last: int) -> FrameRun:
        """Frames first..last-1, with bytes of their own."""
        if first == 0 and last == self.count:
            return self
        bounds = None
        if self.bounds is None:
            begin, end = first * self.stride, last * self.stride
        else:
            begin, end = int(self.bounds[first]), int(self.bounds[last])
            bounds = self.bounds[first : last + 1] - begin
        return FrameRun(
            self.raw[begin:end],
            count=last - first,
            stride=self.stride,
            bounds=bounds,
            ids=self.ids[first:last],
        )

    def contents(self, first: int, last: int, *, skip: int = 0) -> list[bytes]:
        """What stands between header and delimiter of frames first..last-1, without the first
        `skip` bytes of each."""
        raw, stride, skip = self.raw, self.stride, skip + HEADER_BYTES
        if self.bounds is None:
            length = stride - skip - DELIMITER_BYTES
            start = first * stride + skip
            if last - first > PLAIN_FRAMES_MAX and length:
                void = np.dtype(f"V{length}")
                contents: list[bytes] = np.ndarray(
                    (last - first,), void, raw, start, (stride,)
                ).tolist()
                return contents
            return [raw[at : at + length] for at in range(start, last * stride, stride)]
        return [
            raw[begin + skip : end - DELIMITER_BYTES]
            for begin, end in pairwise(self.bounds[first : last + 1].tolist())
        ]


def split_into_runs(batch: FrameBatch) -> Iterator[FrameRun]:
    """Cut a batch into its runs."""
    if batch.count > PLAIN_FRAMES_MAX:
        breaks = np.flatnonzero(batch.changes()) + 1
        if breaks.size * _STRETCH_FRAMES_MIN <= batch.count:
            first = 0
            for last in (*breaks.tolist(), batch.count):
                yield from _split_uniform(batch.slice(first, last))
                first = last
            return
    yield from _split_few(batch)


def _split_few(batch: FrameBatch) -> Iterator[FrameRun]:
    """The runs of a few frames."""
    raw, bounds = batch.data.tobytes(), batch.bounds.tolist()
    if len(bounds) == 2:
        yield FrameRun(raw, count=1, stride=len(raw))
        return
    headers = [frames.HEADER.unpack_from(raw, at) for at in bounds[:-1]]
    first = 0
    for last in range(1, len(headers) + 1):
        if last < len(headers):
            kind, class_id, message_id, _ = headers[last]
            before = headers[last - 1]
            if (
                kind == before[0]
                and class_id == before[1]
                and message_id > before[2]
                and kind in _MESSAGE_TYPES
            ):
                continue
        ids = [header[2] for header in headers[first:last]]
        yield _build_run(raw[bounds[first] : bounds[last]], bounds[first : last + 1], ids)
        first = last


def _build_run(raw: bytes, bounds: list[int], ids: list[int]) -> FrameRun:
    count, begin = len(ids), bounds[0]
    stride = bounds[1] - begin
    found: MessageIds = range(ids[0], ids[0] + count)
    if ids[-1] - ids[0] != count - 1:
        found = np.array(ids, np.int64)
    if all(end - start == stride for start, end in pairwise(bounds)):
        return FrameRun(raw, count=count, stride=stride, ids=found)
    return FrameRun(
        raw, count=count, stride=0, bounds=np.array(bounds, np.int64) - begin, ids=found
    )


def _split_uniform(frames_of_type: FrameBatch) -> Iterator[FrameRun]:
    """The runs of frames that have one type and class."""
    if int(frames_of_type.data[0]) not in _MESSAGE_TYPES:
        for at in range(frames_of_type.count):
            raw = frames_of_type.slice(at, at + 1).data.tobytes()
            yield FrameRun(raw, count=1, stride=len(raw))
        return
    if frames_of_type.stride:
        words = frames.strided(
            frames_of_type.data, _ID_DTYPE, _ID_OFFSET, frames_of_type.stride, frames_of_type.count
        )
    else:
        words = frames.unaligned(frames_of_type.data, _ID_DTYPE)[frames_of_type.starts + _ID_OFFSET]
    ids = words.astype(np.int64)
    first = 0
    for last in (*(np.flatnonzero(ids[1:] <= ids[:-1]) + 1).tolist(), frames_of_type.count):
        part, numbers, count = frames_of_type.slice(first, last), ids[first:last], last - first
        follow = int(numbers[-1]) - int(numbers[0]) == count - 1
        stride = part.stride
        if not stride and int((lengths := part.lengths).min()) == int(lengths.max()):
            stride = int(lengths[0])
        yield FrameRun(
            part.data.tobytes(),
            count=count,
            stride=stride,
            bounds=None if stride else part.bounds,
            ids=None if follow else numbers,
        )
        first = last


assert FRAME_BYTES_MIN == HEADER_BYTES + DELIMITER_BYTES
