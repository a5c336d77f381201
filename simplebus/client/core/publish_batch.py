"""Numbered frame batches, built from the messages of a publisher.

Messages are first joined to whole frames without numbers (`UnnumberedFrames`). Frames are numbered
when they are sent, and kept until they are confirmed (`PublishBatch`). Frames are located by their
bounds and never by searching for a delimiter, because a frame header may contain one.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from itertools import accumulate, chain

import numpy as np

from simplebus.core.limits import (
    DELIMITER_BYTES,
    FRAME_BYTES_MIN,
    MESSAGE_ID_MASK,
    PLAIN_FRAMES_MAX,
)
from simplebus.core.protocol import frames
from simplebus.core.protocol.frames import DELIMITER, Integers

FrameBounds = Sequence[int] | Integers
"""Offsets of the frames and the end of the last one: a list for few frames, an array for many."""

_NUMBER_STRUCT = struct.Struct(">i")
_NUMBER_AND_TIMER_STRUCT = struct.Struct(">iH")
_NUMBER_DTYPE: np.dtype[np.int32] = np.dtype(">i4")
_NUMBER_OFFSET = 3
_TIMER_OFFSET = 7
_DIRECT_SEARCH_BYTES_MAX = 4096


def encode_frame_prefix(frame_type: int, class_id: int) -> bytes:
    """Return the previous frame's delimiter and a frame header, to be put before a content."""
    return DELIMITER + frames.HEADER.pack(frame_type, class_id, 0, 0)


class UnnumberedFrames:
    """Published messages as whole frames back to back, without message numbers."""

    __slots__ = ("_data", "_popped_count", "bounds", "count", "size_bytes", "skipped_count")

    def __init__(
        self,
        data: bytearray | memoryview,
        bounds: FrameBounds,
        count: int,
        *,
        skipped_count: int = 0,
    ) -> None:
        """Take frames from `data`, which begins with an extra delimiter.

        The numbers of the frames follow after `skipped_count` unused numbers.
        """
        self._data = memoryview(data)[DELIMITER_BYTES:]
        self._popped_count = 0
        self.bounds = bounds
        self.count = count
        self.skipped_count = skipped_count
        self.size_bytes = len(data) - DELIMITER_BYTES

    @classmethod
    def from_uniform(
        cls, prefix: bytes, contents: list[bytes], marker: bytes
    ) -> UnnumberedFrames | None:
        """Join contents that have the same prefix; return None if a content contains `marker`."""
        bounds = _compute_bounds(map(len, contents), len(contents))
        data = bytearray(prefix).join([b"", *contents[:-1], contents[-1] + DELIMITER])
        if not _occurs_exactly(marker, len(contents) + 1, data):
            return None
        return cls(data, bounds, len(contents))

    @classmethod
    def from_mixed(cls, prefixes: list[bytes], contents: list[bytes]) -> UnnumberedFrames:
        """Join contents that have a prefix each. No content may contain a delimiter."""
        bounds = _compute_bounds(map(len, contents), len(contents))
        data = bytearray().join(chain.from_iterable(zip(prefixes, contents, strict=True)))
        data += DELIMITER
        return cls(data, bounds, len(contents))

    @property
    def is_empty(self) -> bool:
        return self._popped_count == self.count

    @property
    def next_frame_bytes(self) -> int:
        """Bytes of the next frame."""
        return int(self.bounds[self._popped_count + 1] - self.bounds[self._popped_count])

    def pop_batch(
        self,
        *,
        max_bytes: int,
        available_bytes: int,
        first_position: int,
        first_number: int,
        allows_late_confirm: bool = False,
    ) -> PublishBatch | None:
        """Remove and number as many frames as `count_fitting` allows; None if none fits."""
        begin = self._popped_count
        count = count_fitting(
            self.bounds, begin, max_bytes=max_bytes, available_bytes=available_bytes
        )
        if not count:
            return None
        end = self._popped_count = begin + count
        data = self._data[int(self.bounds[begin]) : int(self.bounds[end])]
        batch = PublishBatch(
            data, slice_bounds(self.bounds, begin, end), first_position=first_position
        )
        batch.assign_numbers(first_number)
        if allows_late_confirm and batch.count <= PLAIN_FRAMES_MAX:
            batch.set_late_confirm(True)
        return batch


def _compute_bounds(lengths: Iterable[int], count: int) -> FrameBounds:
    """Return the bounds of frames with contents of these lengths."""
    if count <= PLAIN_FRAMES_MAX:
        sizes = (length + FRAME_BYTES_MIN for length in lengths)
        return list(accumulate(sizes, initial=0))
    bounds = np.empty(count + 1, np.int64)
    bounds[0] = 0
    frame_bytes = np.fromiter(lengths, np.int64, count)
    frame_bytes += FRAME_BYTES_MIN
    np.cumsum(frame_bytes, out=bounds[1:])
    return bounds


def _occurs_exactly(marker: bytes, count: int, data: bytearray) -> bool:
    """Return True if `marker` occurs `count` times in the data.

    For most data, counting one byte of the marker answers this several times faster.
    """
    view = np.frombuffer(data, np.uint8)
    if len(data) > _DIRECT_SEARCH_BYTES_MAX and np.count_nonzero(view == marker[1]) == count:
        return True
    return data.count(marker) == count


class PublishBatch:
    """Whole frames with consecutive message numbers."""

    __slots__ = ("bounds", "count", "data", "first_position", "has_late_confirm", "size_bytes")

    def __init__(
        self,
        data: memoryview,
        bounds: FrameBounds,
        *,
        first_position: int,
        has_late_confirm: bool = False,
    ) -> None:
        self.data = data
        """The frames back to back. Writable, so that they can be renumbered."""
        self.bounds = bounds
        self.first_position = first_position
        """Position of the first message."""
        self.count = len(bounds) - 1
        self.size_bytes = len(data)
        self.has_late_confirm = has_late_confirm
        """True if the frames let the server delay their Confirm. Many frames never do."""

    @classmethod
    def from_message(
        cls,
        prefix: bytes,
        content: bytes,
        *,
        position: int,
        number: int,
        has_late_confirm: bool = False,
    ) -> PublishBatch:
        """Create the frame of one message."""
        data = bytearray(prefix)
        data += content
        data += DELIMITER
        _NUMBER_AND_TIMER_STRUCT.pack_into(
            data,
            DELIMITER_BYTES + _NUMBER_OFFSET,
            number,
            frames.CONFIRM_MAY_WAIT if has_late_confirm else 0,
        )
        return cls(
            memoryview(data)[DELIMITER_BYTES:],
            [0, len(data) - DELIMITER_BYTES],
            first_position=position,
            has_late_confirm=has_late_confirm,
        )

    @property
    def end_position(self) -> int:
        """Position after the last message."""
        return self.first_position + self.count

    def bytes_below(self, position: int) -> int:
        """Return the bytes of the messages below `position <= end_position`."""
        return int(self.bounds[max(0, position - self.first_position)])

    def frame_end_offset(self, offset: int) -> int:
        """Return the end of the frame that contains the byte before `offset`."""
        return int(self.bounds[int(np.searchsorted(self.bounds, offset))])

    def split(self, count: int) -> tuple[PublishBatch, PublishBatch]:
        """Return the first `count` frames and the remaining ones."""
        split_offset = int(self.bounds[count])
        front = PublishBatch(
            self.data[:split_offset],
            slice_bounds(self.bounds, 0, count),
            first_position=self.first_position,
            has_late_confirm=self.has_late_confirm,
        )
        rest_bounds = slice_bounds(self.bounds, count, self.count)
        return front, PublishBatch(
            self.data[split_offset:],
            rest_bounds,
            first_position=self.first_position + count,
            has_late_confirm=self.has_late_confirm,
        )

    def assign_numbers(self, first_number: int) -> None:
        """Write consecutive message numbers into the frames."""
        if self.count <= PLAIN_FRAMES_MAX:
            for index in range(self.count):
                offset = int(self.bounds[index]) + _NUMBER_OFFSET
                _NUMBER_STRUCT.pack_into(
                    self.data, offset, (first_number + index) & MESSAGE_ID_MASK
                )
            return
        numbers = np.arange(first_number, first_number + self.count) & MESSAGE_ID_MASK
        offsets = np.asarray(self.bounds)[:-1] + _NUMBER_OFFSET
        frames.unaligned(np.frombuffer(self.data, np.uint8), _NUMBER_DTYPE)[offsets] = numbers

    def set_late_confirm(self, allowed: bool) -> None:
        """Set or clear the flag that lets the server delay the Confirm of these messages."""
        if allowed != self.has_late_confirm:
            self.has_late_confirm = allowed
            timer_index = (frames.CONFIRM_MAY_WAIT if allowed else 0).to_bytes(2, "big")
            for index in range(self.count):
                offset = int(self.bounds[index]) + _TIMER_OFFSET
                self.data[offset : offset + 2] = timer_index


def count_fitting(bounds: FrameBounds, first: int, *, max_bytes: int, available_bytes: int) -> int:
    """Return the number of frames after `first` that fit into `max_bytes` and `available_bytes`.

    One frame may exceed `max_bytes`, but not `available_bytes`.
    """
    start = int(bounds[first])
    count = len(bounds) - 1
    if int(bounds[count]) - start <= min(max_bytes, available_bytes):
        return count - first
    limit = start + min(max_bytes, available_bytes)
    fitting_count = int(np.searchsorted(bounds, limit, side="right")) - 1 - first
    if fitting_count <= 0:
        fitting_count = int(int(bounds[first + 1]) - start <= available_bytes)
    return fitting_count


def slice_bounds(bounds: FrameBounds, begin: int, end: int) -> FrameBounds:
    """Return the bounds of the frames begin..end-1, relative to the first of them."""
    if begin == 0 and end == len(bounds) - 1:
        return bounds
    part = np.asarray(bounds)[begin : end + 1]
    shifted: Integers = part - part[0]
    return shifted


def longest_frame_bytes(bounds: FrameBounds) -> int:
    """Return the bytes of the longest frame; 0 without frames."""
    return int(np.diff(bounds).max(initial=0))
