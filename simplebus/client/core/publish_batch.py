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

Bounds = Sequence[int] | Integers
"""Where each frame begins and the last one ends. A list for few frames, an array for many."""

_NUMBER = struct.Struct(">i")
_NUMBERS: np.dtype[np.int32] = np.dtype(">i4")
_NUMBER_OFFSET = 3
_COUNTED_BYTES_MAX = 4096


def opening_of(frame_type: int, class_id: int) -> bytes:
    """What goes before a message's content. It ends the frame before, whichever that is."""
    return DELIMITER + frames.HEADER.pack(frame_type, class_id, 0, 0)


class Segment:
    """Messages that were handed over: whole frames back to back, without numbers yet."""

    __slots__ = ("_data", "_taken", "bounds", "count", "left_out", "size")

    def __init__(
        self, data: bytearray | memoryview, bounds: Bounds, count: int, *, left_out: int = 0
    ) -> None:
        """The data holds an opening for every content, and a delimiter behind the last one. So many
        numbers in front of them are left out."""
        self._data = memoryview(data)[DELIMITER_BYTES:]
        self._taken = 0
        self.bounds = bounds
        self.count = count
        self.left_out = left_out
        self.size = len(data) - DELIMITER_BYTES

    @classmethod
    def of_alike(cls, opening: bytes, contents: list[bytes], foreign: bytes) -> Segment | None:
        """Messages with one opening; None if what only delimiters may hold is in a content."""
        bounds = _bounds(map(len, contents), len(contents))
        data = bytearray(opening).join([b"", *contents[:-1], contents[-1] + DELIMITER])
        if not _holds_only(foreign, len(contents) + 1, data):
            return None
        return cls(data, bounds, len(contents))

    @classmethod
    def of_various(cls, openings: list[bytes], contents: list[bytes]) -> Segment:
        """Messages with an opening each; no content holds a delimiter."""
        bounds = _bounds(map(len, contents), len(contents))
        data = bytearray().join(chain.from_iterable(zip(openings, contents, strict=True)))
        data += DELIMITER
        return cls(data, bounds, len(contents))

    @property
    def is_empty(self) -> bool:
        return self._taken == self.count

    @property
    def next_size(self) -> int:
        """Bytes of the next frame."""
        return int(self.bounds[self._taken + 1] - self.bounds[self._taken])

    def take(self, *, most: int, room: int, first: int, number: int) -> Chunk | None:
        """The next frames, as `fitting` says. The first has this position and this number."""
        begin = self._taken
        count = fitting(self.bounds, begin, most=most, room=room)
        if not count:
            return None
        end = self._taken = begin + count
        data = self._data[int(self.bounds[begin]) : int(self.bounds[end])]
        chunk = Chunk(data, part_of(self.bounds, begin, end), first=first)
        chunk.stamp(number)
        return chunk


def _bounds(lengths: Iterable[int], count: int) -> Bounds:
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


def _holds_only(marker: bytes, times: int, data: bytearray) -> bool:
    """Whether what only delimiters hold is nowhere in the data but where it was put, so many times.
    Most data are done with one of its bytes, which is found several times faster."""
    view = np.frombuffer(data, np.uint8)
    if len(data) > _COUNTED_BYTES_MAX and np.count_nonzero(view == marker[1]) == times:
        return True
    return data.count(marker) == times


class Chunk:
    """Whole frames with numbers that follow one another."""

    __slots__ = ("bounds", "count", "data", "first", "size")

    def __init__(self, data: memoryview, bounds: Bounds, *, first: int) -> None:
        self.data = data
        """The frames back to back. Writable: they can be numbered anew."""
        self.bounds = bounds
        self.first = first
        """The first message's position."""
        self.count = len(bounds) - 1
        self.size = len(data)

    @classmethod
    def of_one(cls, opening: bytes, content: bytes, *, first: int, number: int) -> Chunk:
        """One message's frame."""
        data = bytearray(opening)
        data += content
        data += DELIMITER
        _NUMBER.pack_into(data, DELIMITER_BYTES + _NUMBER_OFFSET, number)
        return cls(
            memoryview(data)[DELIMITER_BYTES:], [0, len(data) - DELIMITER_BYTES], first=first
        )

    @property
    def end(self) -> int:
        """The position behind the last message."""
        return self.first + self.count

    def size_below(self, position: int) -> int:
        """Bytes of the frames of messages below the position, which is in the chunk, its end, or in
        what is left out in front of it."""
        return int(self.bounds[max(0, position - self.first)])

    def frame_end(self, at: int) -> int:
        """Where the frame ends that the byte before `at` belongs to."""
        return int(self.bounds[int(np.searchsorted(self.bounds, at))])

    def split(self, count: int) -> tuple[Chunk, Chunk]:
        """The first so many frames, and the rest, which may be empty of neither."""
        cut = int(self.bounds[count])
        front = Chunk(self.data[:cut], part_of(self.bounds, 0, count), first=self.first)
        rest = part_of(self.bounds, count, self.count)
        return front, Chunk(self.data[cut:], rest, first=self.first + count)

    def stamp(self, number: int) -> None:
        """Number the frames from here on."""
        if self.count <= PLAIN_FRAMES_MAX:
            for index in range(self.count):
                at = int(self.bounds[index]) + _NUMBER_OFFSET
                _NUMBER.pack_into(self.data, at, (number + index) & MESSAGE_ID_MASK)
            return
        numbers = np.arange(number, number + self.count) & MESSAGE_ID_MASK
        places = np.asarray(self.bounds)[:-1] + _NUMBER_OFFSET
        frames.unaligned(np.frombuffer(self.data, np.uint8), _NUMBERS)[places] = numbers


def fitting(bounds: Bounds, begin: int, *, most: int, room: int) -> int:
    """How many frames from `begin` on are to be taken: as many as `most` bytes hold, and one in
    any case if there is room for it."""
    start = int(bounds[begin])
    count = len(bounds) - 1
    if int(bounds[count]) - start <= min(most, room):
        return count - begin
    limit = start + min(most, room)
    fits = int(np.searchsorted(bounds, limit, side="right")) - 1 - begin
    if fits <= 0:
        fits = int(int(bounds[begin + 1]) - start <= room)
    return fits


def part_of(bounds: Bounds, begin: int, end: int) -> Bounds:
    """The bounds of frames begin..end-1 for themselves."""
    if begin == 0 and end == len(bounds) - 1:
        return bounds
    part = np.asarray(bounds)[begin : end + 1]
    shifted: Integers = part - part[0]
    return shifted


def longest_of(bounds: Bounds) -> int:
    """Bytes of the longest frame; 0 of none."""
    return int(np.diff(bounds).max(initial=0))
