r"""A publisher's messages on their way into numbered frames.

Rule 1: handing one message over makes no frame: it leaves an opening and a content behind. They are
joined for as many messages at once as there are, and numbered for as many as may be written.
Rule 2: a frame's place is found by the bounds, never by searching: headers may look like anything.

    pieces    <\r\n> header, content, <\r\n> header, content …     each delimiter ends a frame
    segment   header content <\r\n> header content <\r\n> header content <\r\n>
    chunk     header content <\r\n> header content <\r\n>         numbered, kept until confirmed
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
"""Where each frame begins and the last one ends. A list for few frames, an array for many."""

_NUMBER_STRUCT = struct.Struct(">i")
_NUMBER_DTYPE: np.dtype[np.int32] = np.dtype(">i4")
_NUMBER_OFFSET = 3
_DIRECT_SEARCH_BYTES_MAX = 4096


def encode_frame_prefix(frame_type: int, class_id: int) -> bytes:
    """What goes before a message's content. It ends the frame before, whichever that is."""
    return DELIMITER + frames.HEADER.pack(frame_type, class_id, 0, 0)


class UnnumberedFrames:
    """Messages that were handed over: whole frames back to back, without numbers yet."""

    __slots__ = ("_data", "_popped_count", "bounds", "count", "size_bytes", "skipped_count")

    def __init__(
        self,
        data: bytearray | memoryview,
        bounds: FrameBounds,
        count: int,
        *,
        skipped_count: int = 0,
    ) -> None:
        """The data holds an opening for every content, and a delimiter behind the last one. So many
        numbers in front of them are left out."""
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
        """Messages with one opening; None if what only delimiters may hold is in a content."""
        bounds = _compute_bounds(map(len, contents), len(contents))
        data = bytearray(prefix).join([b"", *contents[:-1], contents[-1] + DELIMITER])
        if not _occurs_exactly(marker, len(contents) + 1, data):
            return None
        return cls(data, bounds, len(contents))

    @classmethod
    def from_mixed(cls, prefixes: list[bytes], contents: list[bytes]) -> UnnumberedFrames:
        """Messages with an opening each; no content holds a delimiter."""
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
        self, *, max_bytes: int, available_bytes: int, first_position: int, first_number: int
    ) -> PublishBatch | None:
        """The next frames, as `fitting` says. The first has this position and this number."""
        begin = self._popped_count
        count = count_fitting(self.bounds, begin, max_bytes=max_bytes, available_bytes=available_bytes)
        if not count:
            return None
        end = self._popped_count = begin + count
        data = self._data[int(self.bounds[begin]) : int(self.bounds[end])]
        chunk = PublishBatch(
            data, slice_bounds(self.bounds, begin, end), first_position=first_position
        )
        chunk.assign_numbers(first_number)
        return chunk


def _compute_bounds(lengths: Iterable[int], count: int) -> FrameBounds:
    """Where frames with contents of these lengths begin, and the last one ends."""
    if count <= PLAIN_FRAMES_MAX:
        sizes = (length + FRAME_BYTES_MIN for length in lengths)
        return list(accumulate(sizes, initial=0))
    bounds = np.empty(count + 1, np.int64)
    bounds[0] = 0
    found = np.fromiter(lengths, np.int64, count)
    found += FRAME_BYTES_MIN
    np.cumsum(found, out=bounds[1:])
    return bounds


def _occurs_exactly(marker: bytes, count: int, data: bytearray) -> bool:
    """Whether what only delimiters hold is nowhere in the data but where it was put, so many times.
    Most data are done with one of its bytes, which is found several times faster."""
    view = np.frombuffer(data, np.uint8)
    if len(data) > _DIRECT_SEARCH_BYTES_MAX and np.count_nonzero(view == marker[1]) == count:
        return True
    return data.count(marker) == count


class PublishBatch:
    """Whole frames with numbers that follow one another."""

    __slots__ = ("bounds", "count", "data", "first_position", "size_bytes")

    def __init__(self, data: memoryview, bounds: FrameBounds, *, first_position: int) -> None:
        self.data = data
        """The frames back to back. Writable: they can be numbered anew."""
        self.bounds = bounds
        self.first_position = first_position
        """The first message's position."""
        self.count = len(bounds) - 1
        self.size_bytes = len(data)

    @classmethod
    def from_message(
        cls, prefix: bytes, content: bytes, *, position: int, number: int
    ) -> PublishBatch:
        """One message's frame."""
        data = bytearray(prefix)
        data += content
        data += DELIMITER
        _NUMBER_STRUCT.pack_into(data, DELIMITER_BYTES + _NUMBER_OFFSET, number)
        return cls(
            memoryview(data)[DELIMITER_BYTES:],
            [0, len(data) - DELIMITER_BYTES],
            first_position=position,
        )

    @property
    def end_position(self) -> int:
        """The position behind the last message."""
        return self.first_position + self.count

    def bytes_below(self, position: int) -> int:
        """Bytes of the frames of messages below the position, which is in the chunk, its end, or in
        what is left out in front of it."""
        return int(self.bounds[max(0, position - self.first_position)])

    def frame_end_offset(self, offset: int) -> int:
        """Where the frame ends that the byte before `at` belongs to."""
        return int(self.bounds[int(np.searchsorted(self.bounds, offset))])

    def split(self, count: int) -> tuple[PublishBatch, PublishBatch]:
        """The first so many frames, and the rest, which may be empty of neither."""
        cut = int(self.bounds[count])
        front = PublishBatch(
            self.data[:cut], slice_bounds(self.bounds, 0, count), first_position=self.first_position
        )
        rest = slice_bounds(self.bounds, count, self.count)
        return front, PublishBatch(
            self.data[cut:], rest, first_position=self.first_position + count
        )

    def assign_numbers(self, first_number: int) -> None:
        """Number the frames from here on."""
        if self.count <= PLAIN_FRAMES_MAX:
            for index in range(self.count):
                at = int(self.bounds[index]) + _NUMBER_OFFSET
                _NUMBER_STRUCT.pack_into(self.data, at, (first_number + index) & MESSAGE_ID_MASK)
            return
        numbers = np.arange(first_number, first_number + self.count) & MESSAGE_ID_MASK
        places = np.asarray(self.bounds)[:-1] + _NUMBER_OFFSET
        frames.unaligned(np.frombuffer(self.data, np.uint8), _NUMBER_DTYPE)[places] = numbers


def count_fitting(bounds: FrameBounds, first: int, *, max_bytes: int, available_bytes: int) -> int:
    """How many frames from `begin` on are to be taken: as many as `most` bytes hold, and one in
    any case if there is room for it."""
    start = int(bounds[first])
    count = len(bounds) - 1
    if int(bounds[count]) - start <= min(max_bytes, available_bytes):
        return count - first
    limit = start + min(max_bytes, available_bytes)
    fits = int(np.searchsorted(bounds, limit, side="right")) - 1 - first
    if fits <= 0:
        fits = int(int(bounds[first + 1]) - start <= room_bytes)
    return fits


def slice_bounds(bounds: FrameBounds, begin: int, end: int) -> FrameBounds:
    """The bounds of frames begin..end-1 for themselves."""
    if begin == 0 and end == len(bounds) - 1:
        return bounds
    part = np.asarray(bounds)[begin : end + 1]
    shifted: Integers = part - part[0]
    return shifted


def longest_frame_bytes(bounds: FrameBounds) -> int:
    """Bytes of the longest frame; 0 of none."""
    return int(np.diff(bounds).max(initial=0))
