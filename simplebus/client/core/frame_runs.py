"""Splits received frames into runs.

A run is a sequence of message frames of one type and class with ascending ids; any other frame is a
run of one. A run owns its bytes and never refers to the receive buffer. Few frames are split by a
Python loop, many with numpy; a property test checks that both find the same runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from simplebus.core.limits import DELIMITER_BYTES, FRAME_BYTES_MIN, HEADER_BYTES, PLAIN_FRAMES_MAX
from simplebus.core.protocol import frames
from simplebus.core.protocol.frames import FrameBatch, Integers

MessageIds = range | Integers
"""Ascending message ids or sequences: a range if they are contiguous, otherwise an int64 array."""

FrameHeader = tuple[int, int, int, int]
"""Frame type, class id, message id and timer index."""

_MESSAGE_TYPES = (frames.MESSAGE, frames.ENVELOPE)
_ID_DTYPE: np.dtype[np.int32] = np.dtype(">i4")
_ID_OFFSET = 3
# With fewer frames than this per stretch of one type and class, the Python loop is faster.
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
        """Decode the header of the first frame, which determines type and class of all frames."""
        fields: tuple[int, int, int, int] = frames.HEADER.unpack_from(raw)
        self.frame_type, self.class_id, self.first_id, self.timer_index = fields
        self.raw = raw
        """The frames back to back, delimiters included."""
        self.count = count
        self.stride = stride
        """Bytes of each frame if all have the same length."""
        self.bounds = bounds
        """Offsets of the frames and the end of the last one; None if all have `stride` bytes."""
        self.ids: MessageIds = range(self.first_id, self.first_id + count) if ids is None else ids
        """Ids from the frame headers. They are signed; a negative id is a protocol error."""

    @property
    def has_messages(self) -> bool:
        return self.frame_type in _MESSAGE_TYPES

    @property
    def content(self) -> bytes:
        """Content of the only frame."""
        return self.raw[HEADER_BYTES:-DELIMITER_BYTES]

    def slice(self, first: int, last: int) -> FrameRun:
        """Return the frames first..last-1 as a separate run with a copy of their bytes."""
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
        """Return the contents of frames first..last-1, without the first `skip` bytes of each."""
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
            return [raw[offset : offset + length] for offset in range(start, last * stride, stride)]
        return [
            raw[begin + skip : end - DELIMITER_BYTES]
            for begin, end in pairwise(self.bounds[first : last + 1].tolist())
        ]


def split_into_runs(batch: FrameBatch) -> Iterator[FrameRun]:
    """Split a batch of frames into runs."""
    if batch.count > PLAIN_FRAMES_MAX:
        breaks = batch.key_changes()
        if breaks.size * _STRETCH_FRAMES_MIN <= batch.count:
            first = 0
            for last in (*breaks.tolist(), batch.count):
                yield from _split_uniform(batch.slice(first, last))
                first = last
            return
    yield from split_few_frames(batch.data.tobytes(), batch.bounds.tolist())


def split_few_frames(raw: bytes, bounds: list[int]) -> Iterator[FrameRun]:
    """Split frames into runs in a loop. `bounds` are their offsets, and the end of the last one."""
    if len(bounds) == 2:
        yield FrameRun(raw, count=1, stride=len(raw))
        return
    headers = [frames.HEADER.unpack_from(raw, offset) for offset in bounds[:-1]]
    first = 0
    while first < len(headers):
        last = find_run_end(headers, first)
        yield build_run(raw, bounds, headers, first, last)
        first = last


def find_run_end(headers: list[FrameHeader], first: int) -> int:
    """Return the end of the run that begins with the frame `first`."""
    frame_type, class_id, message_id, _ = headers[first]
    last = first + 1
    if frame_type in _MESSAGE_TYPES:
        while last < len(headers):
            header = headers[last]
            if header[0] != frame_type or header[1] != class_id or header[2] <= message_id:
                break
            message_id = header[2]
            last += 1
    return last


def build_run(
    raw: bytes, bounds: list[int], headers: list[FrameHeader], first: int, last: int
) -> FrameRun:
    """Return the frames first..last-1 as a run."""
    begin = bounds[first]
    if last - first == 1:
        frame = raw[begin : bounds[last]]
        return FrameRun(frame, count=1, stride=len(frame))
    count, stride = last - first, bounds[first + 1] - begin
    first_id, last_id = headers[first][2], headers[last - 1][2]
    ids: MessageIds = range(first_id, first_id + count)
    if last_id - first_id != count - 1:
        ids = np.array([header[2] for header in headers[first:last]], np.int64)
    run_bounds, frames_of_run = bounds[first : last + 1], raw[begin : bounds[last]]
    if all(end - start == stride for start, end in pairwise(run_bounds)):
        return FrameRun(frames_of_run, count=count, stride=stride, ids=ids)
    return FrameRun(
        frames_of_run,
        count=count,
        stride=0,
        bounds=np.array(run_bounds, np.int64) - begin,
        ids=ids,
    )


def _split_uniform(frames_of_type: FrameBatch) -> Iterator[FrameRun]:
    """Split frames of one type and class into runs."""
    if int(frames_of_type.data[0]) not in _MESSAGE_TYPES:
        for index in range(frames_of_type.count):
            raw = frames_of_type.slice(index, index + 1).data.tobytes()
            yield FrameRun(raw, count=1, stride=len(raw))
        return
    if frames_of_type.stride:
        id_words = frames.strided(
            frames_of_type.data, _ID_DTYPE, _ID_OFFSET, frames_of_type.stride, frames_of_type.count
        )
    else:
        id_words = frames.unaligned(frames_of_type.data, _ID_DTYPE)[
            frames_of_type.starts + _ID_OFFSET
        ]
    ids = id_words.astype(np.int64)
    first = 0
    for last in (*(np.flatnonzero(ids[1:] <= ids[:-1]) + 1).tolist(), frames_of_type.count):
        part, part_ids, count = frames_of_type.slice(first, last), ids[first:last], last - first
        is_contiguous = int(part_ids[-1]) - int(part_ids[0]) == count - 1
        stride = part.stride
        if not stride and int((lengths := part.lengths).min()) == int(lengths.max()):
            stride = int(lengths[0])
        yield FrameRun(
            part.data.tobytes(),
            count=count,
            stride=stride,
            bounds=None if stride else part.bounds,
            ids=None if is_contiguous else part_ids,
        )
        first = last


assert FRAME_BYTES_MIN == HEADER_BYTES + DELIMITER_BYTES
