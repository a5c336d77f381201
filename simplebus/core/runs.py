"""What a client receives, cut into runs: frames that one sentence can describe.

Rule 1: a run has one frame type, one class, one timer index, and ids that follow one another.
Rule 2: a run owns its bytes; nothing here is a view of a receive buffer.

    run   │ frame │ frame │ frame │ …
          first_id  +1      +2
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from simplebus.core import frames
from simplebus.core.frames import Flags, FrameBatch, Integers
from simplebus.core.limits import (
    DELIMITER_BYTES,
    FRAME_BYTES_MIN,
    HEADER_BYTES,
    MESSAGE_ID_MASK,
    PLAIN_FRAMES_MAX,
)

# Class, message id and timer index of a frame are its bytes 1 to 8: one number, whose step from
# one message of a run to the next is 1 in the message id.
_STAMP = np.dtype(">u8")
_STAMP_OFFSET = 1
_STAMP_STEP = np.uint64(1 << 16)


class Run:
    """Frames of one type and class, with consecutive ids and one timer index, and their bytes."""

    __slots__ = (
        "bounds",
        "class_id",
        "count",
        "first_id",
        "frame_type",
        "raw",
        "stride",
        "timer_index",
    )

    def __init__(self, raw: bytes, *, count: int, stride: int, bounds: Integers | None) -> None:
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

    @property
    def is_deliverable(self) -> bool:
        """Whether these are messages with ids that a bus gives."""
        return (
            self.frame_type == frames.MESSAGE
            and 0 <= self.first_id <= MESSAGE_ID_MASK + 1 - self.count
        )

    @property
    def ids(self) -> range:
        return range(self.first_id, self.first_id + self.count)

    def part(self, first: int, last: int) -> Run:
        """Frames first..last-1, with bytes of their own."""
        if first == 0 and last == self.count:
            return self
        bounds = None
        if self.bounds is None:
            begin, end = first * self.stride, last * self.stride
        else:
            begin, end = int(self.bounds[first]), int(self.bounds[last])
            bounds = self.bounds[first : last + 1] - begin
        return Run(self.raw[begin:end], count=last - first, stride=self.stride, bounds=bounds)

    def contents(self, first: int, last: int) -> list[bytes]:
        """What stands between header and delimiter of frames first..last-1."""
        raw, stride = self.raw, self.stride
        if self.bounds is None:
            length = stride - FRAME_BYTES_MIN
            start = first * stride + HEADER_BYTES
            if last - first > PLAIN_FRAMES_MAX and length:
                void = np.dtype(f"V{length}")
                contents: list[bytes] = np.ndarray(
                    (last - first,), void, raw, start, (stride,)
                ).tolist()
                return contents
            return [raw[at : at + length] for at in range(start, last * stride, stride)]
        return [
            raw[begin + HEADER_BYTES : end - DELIMITER_BYTES]
            for begin, end in pairwise(self.bounds[first : last + 1].tolist())
        ]


def runs(batch: FrameBatch) -> Iterator[Run]:
    """Cut a batch into its runs."""
    if batch.count == 1:
        yield _run(batch)
        return
    if batch.stride:
        stamps = np.ndarray((batch.count,), _STAMP, batch.data, _STAMP_OFFSET, (batch.stride,))
        types = batch.data[:: batch.stride]
    else:
        starts = batch.starts
        stamps = frames.unaligned(batch.data, _STAMP)[starts + _STAMP_OFFSET]
        types = batch.data[starts]
    breaks = (np.diff(stamps) != _STAMP_STEP) | (types[1:] != types[:-1])
    first = 0
    for last in (*(np.flatnonzero(breaks) + 1).tolist(), batch.count):
        yield _run(batch.slice(first, last))
        first = last


def _run(batch: FrameBatch) -> Run:
    bounds = None if batch.stride else batch.bounds
    return Run(batch.data.tobytes(), count=batch.count, stride=batch.stride, bounds=bounds)


def ranges_of(flags: Flags) -> list[tuple[int, int]]:
    """The half-open index ranges in which flags are set."""
    steps = np.diff(np.concatenate(([0], flags.view(np.int8), [0])))
    begins, ends = np.flatnonzero(steps == 1), np.flatnonzero(steps == -1)
    return list(zip(begins.tolist(), ends.tolist(), strict=True))
