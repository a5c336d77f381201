"""Segment of a ring: a fixed block of memory that holds frames with consecutive sequences.

Frames are back to back from the start of the block. `offsets[i]` is the start of frame `first + i`
and `offsets[i + 1]` its end, so every frame has both bounds in one array.

    arena     │ frame first │ frame first+1 │ … │  free  │
    offsets   0             o1              o2  used_bytes
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from simplebus.core.limits import FRAME_BYTES_MIN, MESSAGE_ID_MASK, PLAIN_FRAMES_MAX
from simplebus.core.protocol.frames import (
    DELIMITER,
    ID_AND_TIMER,
    ID_OFFSET,
    FrameBatch,
    Integers,
    unaligned,
)
from simplebus.core.ring.columns import MessageRows, SegmentColumns
from simplebus.core.ring.memory_budget import allocate_array, discard_pages, round_up_to_page

_HEADER_OFFSET = 1
"""Offset of class id, message id and timer index in a frame: eight bytes, written as one word."""
_TIMER_OFFSET = 7
_UINT8: np.dtype[np.uint8] = np.dtype(np.uint8)
_UINT32: np.dtype[np.uint32] = np.dtype(np.uint32)
_UINT64: np.dtype[np.uint64] = np.dtype(np.uint64)
_TIMER_UINT16: np.dtype[np.uint16] = np.dtype(">u2")
_BIG_ENDIAN_UINT32: np.dtype[np.uint32] = np.dtype(">u4")
_DELIMITER = int.from_bytes(DELIMITER, "big")
_NO_ID_OVERFLOW = np.uint64(~((MESSAGE_ID_MASK + 1) << 16) & 0xFFFFFFFFFFFFFFFF)

OFFSET_BYTES = _UINT32.itemsize
"""Memory of one entry of `offsets`."""


class Segment:
    """Block of memory with room for `slot_count` frames of `capacity` bytes together.

    Invariant: 0 <= count <= slot_count, and offsets[count] == used_bytes <= capacity.
    """

    __slots__ = (
        "arena",
        "capacity",
        "columns",
        "count",
        "first",
        "memory_bytes",
        "offsets",
        "slot_count",
        "start_position",
        "used_bytes",
        "view",
    )

    def __init__(self, capacity: int, slot_count: int) -> None:
        """Allocate the memory. Raises OSError or MemoryError if the system has too little."""
        self.arena: npt.NDArray[np.uint8] = allocate_array(capacity, _UINT8)
        self.offsets: npt.NDArray[np.uint32] = allocate_array(slot_count + 1, _UINT32)
        self.view = self.arena.data
        self.columns = SegmentColumns()
        """Channel, expiry and delay of each message."""
        self.capacity = capacity
        self.slot_count = slot_count
        self.memory_bytes = memory_bytes_of(capacity, slot_count)
        """Memory that the ring has acquired for this segment."""
        self.restart(0, 0)

    def restart(self, first: int, start_position: int) -> None:
        """Remove all frames. The next frame gets the sequence `first`."""
        self.first = first
        self.start_position = start_position
        """Bytes of all frames that the ring has stored before this segment."""
        self.count = self.used_bytes = 0
        self.offsets[0] = 0

    @property
    def end(self) -> int:
        """Sequence after the last frame."""
        return self.first + self.count

    @property
    def full_memory_bytes(self) -> int:
        """Memory of the segment with all its pages."""
        return memory_bytes_of(self.arena.size, self.offsets.size - 1, self.columns.row_bytes)

    # Filling -------------------------------------------------------------------------------------

    def count_fitting(self, batch: FrameBatch, count_max: int) -> int:
        """Return how many of the first `count_max` frames of the batch fit."""
        count_max = min(count_max, self.slot_count - self.count)
        space = self.capacity - self.used_bytes
        if count_max <= 0:
            return 0
        if batch.bounds[count_max] <= space:
            return count_max
        if batch.stride:
            return space // batch.stride
        return int(batch.ends.searchsorted(space, side="right"))

    def append(self, batch: FrameBatch, class_id: int, timer_index: int) -> None:
        """Copy in a batch that fits, and write the ids and timer indexes of its frames."""
        arena, offset, size, count = self.arena, self.used_bytes, batch.data.size, batch.count
        batch_ends, head = batch.bounds[1:], self.first + self.count
        arena[offset : offset + size] = batch.data
        ends = self.offsets[self.count + 1 : self.count + 1 + count]
        if count <= PLAIN_FRAMES_MAX and not batch.stride:
            start, view = offset, self.view
            for index, end in enumerate(batch_ends.tolist()):
                message_id = (head + index) & MESSAGE_ID_MASK
                ID_AND_TIMER.pack_into(view, start + ID_OFFSET, message_id, timer_index)
                ends[index] = start = offset + end
        else:
            np.add(batch_ends, offset, out=ends, casting="unsafe")
            words = _header_words(class_id, head, timer_index, count)
            if batch.stride:
                strides = (batch.stride,)
                np.ndarray((count,), _UINT64, arena, offset + _HEADER_OFFSET, strides)[:] = words
            else:
                unaligned(arena[offset + _HEADER_OFFSET :], _UINT64)[batch.starts] = words
        self.used_bytes = offset + size
        self.count += count

    def append_one(self, frame: memoryview, timer_index: int) -> int:
        """Copy in a frame that fits. Returns its slot."""
        slot, offset = self.count, self.used_bytes
        end = offset + len(frame)
        self.view[offset:end] = frame
        message_id = (self.first + slot) & MESSAGE_ID_MASK
        ID_AND_TIMER.pack_into(self.view, offset + ID_OFFSET, message_id, timer_index)
        self.offsets[slot + 1] = self.used_bytes = end
        self.count = slot + 1
        return slot

    def add_columns(self, rows: MessageRows) -> None:
        """Add the columns that `rows` need. Raises MemoryError without adding any."""
        self.memory_bytes += self.columns.add_missing(rows, self.offsets.size - 1)

    # Reading -------------------------------------------------------------------------------------

    def start_of(self, sequence: int) -> int:
        """Return where the frame starts in the arena; `used_bytes` for the sequence after the last
        one.
        """
        return int(self.offsets[sequence - self.first])

    def find_frame(self, offset: int) -> int:
        """Return the sequence of the frame that contains this offset, at most `end`."""
        ends = self.offsets[1 : self.count + 1]
        return self.first + int(ends.searchsorted(offset, side="right"))

    def view_frames(self, first: int, last: int, bytes_max: int) -> tuple[memoryview, int]:
        """Return the frames of this segment from `first` on, and the sequence after them.

        Stops before `last`, or at `bytes_max`, but returns at least one frame.
        """
        last = min(last, self.first + self.count)
        begin = int(self.offsets[first - self.first])
        end = int(self.offsets[last - self.first])
        if end - begin > bytes_max:
            last = max(first + 1, self.find_frame(begin + bytes_max))
            end = int(self.offsets[last - self.first])
        return self.view[begin:end], last

    def frame_view(self, sequence: int) -> memoryview:
        """Return a view of one frame."""
        index = sequence - self.first
        return self.view[int(self.offsets[index]) : int(self.offsets[index + 1])]

    def sizes_at(self, slots: Integers) -> Integers:
        """Return the frame lengths of these slots."""
        return self.offsets[slots + 1].astype(np.int64) - self.offsets[slots]

    def frame_views(self, slots: Integers) -> list[memoryview]:
        """Return views of the frames of these slots."""
        begins, ends, view = self.offsets[slots], self.offsets[slots + 1], self.view
        return [view[a:b] for a, b in zip(begins.tolist(), ends.tolist(), strict=True)]

    def set_timer_index(self, slots: slice | Integers, timer_index: int) -> None:
        """Write `timer_index` into the frames of these slots."""
        starts = self.offsets[:-1][slots].astype(np.int64)
        unaligned(self.arena, _TIMER_UINT16)[starts + _TIMER_OFFSET] = timer_index

    # Memory --------------------------------------------------------------------------------------

    def trim(self) -> int:
        """Return the pages behind the last frame to the system, and accept no more frames.

        Returns:
            The number of freed bytes.
        """
        before = self.memory_bytes
        kept_bytes = min(round_up_to_page(self.used_bytes), self.arena.size)
        discard_pages(self.arena, kept_bytes)
        discard_pages(self.offsets, (self.count + 1) * OFFSET_BYTES)
        self.capacity, self.slot_count = self.used_bytes, self.count
        self.memory_bytes = memory_bytes_of(kept_bytes, self.count, self.columns.row_bytes)
        return before - self.memory_bytes

    def untrim(self) -> None:
        """Use all memory again. The ring has acquired `full_memory_bytes`."""
        self.capacity, self.slot_count = self.arena.size, self.offsets.size - 1
        self.memory_bytes = self.full_memory_bytes

    def check(self) -> None:
        """Raise AssertionError unless the invariants hold."""
        assert 0 <= self.count <= self.slot_count <= self.offsets.size - 1, self.count
        assert self.offsets[self.count] == self.used_bytes <= self.capacity <= self.arena.size
        offsets = self.offsets[: self.count + 1].astype(np.int64)
        assert (np.diff(offsets) >= FRAME_BYTES_MIN).all(), offsets
        if self.count:
            words = unaligned(self.arena, _BIG_ENDIAN_UINT32)
            assert (words[offsets[1:] - len(DELIMITER)] == _DELIMITER).all(), offsets
            sequences = np.arange(self.first, self.end)
            assert (words[offsets[:-1] + 3] == sequences & MESSAGE_ID_MASK).all(), sequences


def memory_bytes_of(capacity: int, slot_count: int, row_bytes: int = 0) -> int:
    """Return the memory of a segment; `row_bytes` is the memory of one row of its columns."""
    return capacity + (slot_count + 1) * OFFSET_BYTES + slot_count * row_bytes


def _header_words(
    class_id: int, first: int, timer_index: int, count: int
) -> npt.NDArray[np.uint64]:
    """Return class id, message id and timer index of `count` frames as words in wire byte order."""
    message_id = first & MESSAGE_ID_MASK
    word = class_id << 48 | message_id << 16 | timer_index
    words = np.arange(word, word + (count << 16), 1 << 16, dtype=_UINT64)
    if message_id + count > MESSAGE_ID_MASK + 1:
        words &= _NO_ID_OVERFLOW
    return words.byteswap(inplace=True)
