"""Ring of one class: whole wire frames back to back in one preallocated arena.

Sequences only grow, and the slot of a message is `sequence & mask`. A frame never straddles the end
of the arena. A ring knows nothing of subscriptions; the class calls `release`. Memory is acquired
from a budget before it is allocated, and released when it was not needed for a while.

    arena   │ wrapped, newer ───► │   free   │ older ───► │ unused end │
                             write_offset   offsets[floor]            size

Invariant: floor <= head <= floor + slots.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from simplebus.core.limits import (
    FRAME_BYTES_MIN,
    MESSAGE_ID_MASK,
    PLAIN_FRAMES_MAX,
    RING_BYTES_MIN,
    RING_IDLE_TICKS,
    RING_SLOTS_MIN,
)
from simplebus.core.protocol.frames import (
    DELIMITER,
    FrameBatch,
    Integers,
    unaligned,
    write_id_and_timer,
)
from simplebus.core.ring.columns import (
    NEVER,
    NO_DELAY,
    Channels,
    MessageRow,
    MessageRows,
    RingColumns,
)
from simplebus.core.ring.memory_budget import MemoryBudget, allocate_array, power_of_two_at_least

_HEADER_OFFSET = 1
"""Offset of class id, message id and timer index in a frame: eight bytes, written as one word."""
_TIMER_OFFSET = 7
_UINT8: np.dtype[np.uint8] = np.dtype(np.uint8)
_INT64: np.dtype[np.int64] = np.dtype(np.int64)
_UINT64: np.dtype[np.uint64] = np.dtype(np.uint64)
_TIMER_UINT16: np.dtype[np.uint16] = np.dtype(">u2")
_UINT32: np.dtype[np.uint32] = np.dtype(">u4")
_DELIMITER = int.from_bytes(DELIMITER, "big")
_PLAIN_ROW = MessageRow()
_NO_ID_OVERFLOW = np.uint64(~((MESSAGE_ID_MASK + 1) << 16) & 0xFFFFFFFFFFFFFFFF)


@dataclass(frozen=True, slots=True)
class RingStatistics:
    """Statistics of one ring."""

    floor: int
    """Lowest stored sequence."""
    head: int
    """Next sequence to be assigned."""
    frame_bytes: int
    """Bytes of the stored frames."""
    memory_bytes: int
    """Memory of the arena and the columns."""

    @property
    def message_count(self) -> int:
        """Number of stored messages."""
        return self.head - self.floor

    @property
    def messages(self) -> int:
        """Deprecated alias of `message_count`."""
        return self.message_count


class Ring:
    """Frames of one class from `floor`, the lowest stored sequence, to `head`, the next one.

    `messages_max` and `bytes_max` limit this ring; `budget` limits all rings together.
    """

    def __init__(
        self, *, class_id: int, messages_max: int, bytes_max: int, budget: MemoryBudget
    ) -> None:
        self.class_id = class_id
        """Class id that appended frames already carry."""
        self.messages_max = messages_max
        self.bytes_max = bytes_max
        self.is_over_limit = False
        """True if the ring may exceed its limits and the budget because of messages restored after
        a restart.
        """
        self.floor = self.head = 0
        self.columns = RingColumns()
        """Channel, expiry and delay of each message."""
        self.envelopes_until = 0
        """No message at or above it has an envelope."""
        self.timed_until = 0
        """No message at or above it has an expiry or a delay."""
        self.special_until = 0
        """The maximum of both: messages at or above it are plain."""
        self.budget = budget
        """Budget of all rings together."""
        self._write_offset = 0
        """Offset of the next frame, if it fits there."""
        self._wrap_sequence = 0
        """First sequence at the start of the arena since the last wrap; <= floor if there is none.
        """
        self._wrap_end_offset = 0
        """End of the frame before it."""
        self._peak_messages = self._peak_bytes = 0
        self._idle_ticks = 0
        self._stamped_from = 0
        """Sequences at or above it carry the timer index `_timer_index`."""
        self._timer_index = 0
        self._set_arrays(allocate_array(0, _UINT8), allocate_array(0, _INT64))

    def __len__(self) -> int:
        return self.head - self.floor

    @property
    def frame_bytes(self) -> int:
        """Bytes of the stored frames."""
        if self.floor == self.head:
            return 0
        if self.floor < self._wrap_sequence:
            return self._wrap_end_offset - self._frame_start(self.floor) + self._write_offset
        return self._write_offset - self._frame_start(self.floor)

    def statistics(self) -> RingStatistics:
        return RingStatistics(self.floor, self.head, self.frame_bytes, self._memory_bytes())

    def set_next_sequence(self, sequence: int) -> None:
        """Set the sequence of the next message. The ring is empty."""
        assert self.floor == self.head <= sequence, (self.floor, self.head, sequence)
        self.floor = self.head = self._wrap_sequence = self._stamped_from = sequence

    # Filling -------------------------------------------------------------------------------------

    def append(self, batch: FrameBatch, timer_index: int, rows: MessageRows | None = None) -> int:
        """Copy in as many frames of the batch as fit, and write their ids and timer indexes.

        Args:
            batch: Frames of this class.
            timer_index: Timer index that the frames carry from now on.
            rows: One row for each frame if the frames have envelopes; None for plain frames.

        Returns:
            Number of frames appended.
        """
        if rows is not None and not self._ensure_columns(rows):
            return 0
        first = self.head
        appended_count = self._append(batch, timer_index)
        if appended_count and rows is not None:
            self.envelopes_until = self.special_until = self.head
            self._write_rows(
                first, rows if appended_count == rows.count else rows.slice(0, appended_count)
            )
        elif appended_count and self.columns.row_bytes:
            self._write_rows(first, MessageRows(appended_count))
        return appended_count

    def _append(self, batch: FrameBatch, timer_index: int) -> int:
        self.set_timer_index(self.head, self.head, timer_index)
        if self.head == self.floor:
            self._write_offset = 0  # The ring is empty: reuse the front, which is in the cache.
        appended_count = 0
        while appended_count < batch.count:
            remaining = batch if appended_count == 0 else batch.slice(appended_count, batch.count)
            fitting_count = self._count_appendable(remaining)
            if fitting_count == 0:
                if not self._grow(remaining):
                    break
                continue
            self._copy_in(
                remaining if fitting_count == remaining.count else remaining.slice(0, fitting_count)
            )
            appended_count += fitting_count
        if appended_count:
            self._update_peak()
        return appended_count

    def append_one(
        self, frame: memoryview, timer_index: int, row: MessageRow | None = None
    ) -> bool:
        """Copy in one frame if it fits without growing or wrapping. `row` describes one with an
        envelope.

        Returns:
            False if it does not; the ring is unchanged, and `append` must be called.
        """
        head, offset, size = self.head, self._write_offset, len(frame)
        stored_count = head - self.floor
        if stored_count == 0:
            offset, end = 0, self._size
        else:
            tail = int(self._offsets[self.floor & self._mask])
            end = self._size if offset > tail else tail
        if size > end - offset or stored_count >= self._slots or stored_count >= self.messages_max:
            return False
        if row is not None and self.columns.is_missing_column_for(row):
            return False
        if timer_index != self._timer_index:
            self.set_timer_index(head, head, timer_index)
        self._view[offset : offset + size] = frame
        write_id_and_timer(self._view, offset, head & MESSAGE_ID_MASK, timer_index)
        slot = head & self._mask
        self._offsets[slot] = offset
        self._write_offset = offset + size
        self.head = head + 1
        if self.columns.row_bytes:
            self.columns.write_row(slot, row or _PLAIN_ROW)
            if row is not None:
                self.columns.add_channels(row.channel, 1)
        if row is not None:
            self.envelopes_until = self.special_until = head + 1
            if row.expires != NEVER or row.not_before != NO_DELAY:
                self.timed_until = head + 1
        self._update_peak()
        return True

    def _write_rows(self, first: int, rows: MessageRows) -> None:
        """Write the columns of the messages just appended from `first` on."""
        self.columns.write_rows(self._slot_ranges(first, first + rows.count), rows)
        self.columns.add_channels(rows.channels, rows.count)
        if rows.is_timed:
            self.timed_until = first + rows.count

    def _ensure_columns(self, rows: MessageRows) -> bool:
        """Allocate the columns that `rows` need. Returns False if limits or budget forbid it."""
        missing = self.columns.missing_row_bytes(rows)
        if missing == 0:
            return True
        additional_bytes = missing * self._slots
        if self.floor == self.head and self._memory_bytes() + additional_bytes > self.bytes_max:
            self._resize(0, 0)
            additional_bytes = 0
        if self._memory_bytes() + additional_bytes > self.bytes_max or not self.budget.acquire(
            additional_bytes
        ):
            return False
        try:
            self.columns.add_missing_columns(rows, self._slots)
        except MemoryError:
            self.budget.release(additional_bytes)
            return False
        return True

    def read_row(self, sequence: int) -> MessageRow:
        """Return the columns of one message."""
        return self.columns.read_row(sequence & self._mask)

    def read_rows(self, first: int, last: int) -> MessageRows:
        """Return a copy of the columns of messages first..last-1."""
        return self.columns.read_rows(self._slot_ranges(first, last))

    def read_channels(self, first: int, last: int) -> Channels | int:
        """Return the channels of messages first..last-1, valid until the ring changes; one number
        if all share it.
        """
        return self.columns.read_channels(self._slot_ranges(first, last))

    def read_rows_at(self, sequences: Integers) -> MessageRows:
        """Return a copy of the columns of these messages."""
        return self.columns.read_rows_at(self.slots_of(sequences))

    def _update_peak(self) -> None:
        self._peak_messages = max(self._peak_messages, self.head - self.floor)
        self._peak_bytes = max(self._peak_bytes, self.frame_bytes)

    def _count_appendable(self, batch: FrameBatch) -> int:
        """Return how many frames of the batch fit contiguously, wrapping first if more fit then."""
        slots = min(self._slots - len(self), self.messages_max - len(self), batch.count)
        if slots <= 0:
            return 0
        if self.floor == self.head:
            return self._count_fitting(batch, slots, self._size - self._write_offset)
        tail = self._frame_start(self.floor)
        if self._write_offset <= tail:
            return self._count_fitting(batch, slots, tail - self._write_offset)
        count = self._count_fitting(batch, slots, self._size - self._write_offset)
        if count == 0:
            # The end of the arena is full: wrap to the front, below the oldest frame.
            count = self._count_fitting(batch, slots, tail)
            if count:
                self._wrap_end_offset = self._write_offset
                self._wrap_sequence = self.head
                self._write_offset = 0
        return count

    @staticmethod
    def _count_fitting(batch: FrameBatch, count_max: int, space: int) -> int:
        if batch.ends[count_max - 1] <= space:
            return count_max
        if batch.stride:
            return space // batch.stride
        return int(batch.ends.searchsorted(space, side="right"))

    def _copy_in(self, batch: FrameBatch) -> None:
        """Copy a batch that fits to the write offset and record its offsets."""
        offset, size, count, head = self._write_offset, batch.data.size, batch.count, self.head
        self._arena[offset : offset + size] = batch.data
        if batch.stride:
            self._write_offsets(head, batch.starts, offset)
            stride = (batch.stride,)
            headers = np.ndarray((count,), _UINT64, self._arena, offset + _HEADER_OFFSET, stride)
            headers[:] = self._header_words(head, count)
        elif count <= PLAIN_FRAMES_MAX:
            start = offset
            for sequence, end in enumerate(batch.ends.tolist(), head):
                write_id_and_timer(self._view, start, sequence & MESSAGE_ID_MASK, self._timer_index)
                self._offsets[sequence & self._mask] = start
                start = offset + end
        else:
            starts = self._write_offsets(head, batch.starts, offset)
            headers = unaligned(self._arena[_HEADER_OFFSET:], _UINT64)
            headers[starts] = self._header_words(head, count)
        self._write_offset = offset + size
        self.head = head + count

    def _header_words(self, first: int, count: int) -> npt.NDArray[np.uint64]:
        """Return class id, message id and timer index of `count` frames as words in wire byte
        order.
        """
        message_id = first & MESSAGE_ID_MASK
        word = self.class_id << 48 | message_id << 16 | self._timer_index
        words = np.arange(word, word + (count << 16), 1 << 16, dtype=_UINT64)
        if message_id + count > MESSAGE_ID_MASK + 1:
            words &= _NO_ID_OVERFLOW
        return words.byteswap(inplace=True)

    def _write_offsets(self, first: int, starts: Integers, base_offset: int) -> Integers:
        """Note that the frames from sequence `first` on begin at `starts` behind `at`, around the
        column's end. Returns where that is.
        """
        start = first & self._mask
        column = self._offsets[start : start + starts.size]
        if column.size == starts.size:
            return np.add(starts, base_offset, out=column)
        offsets = starts + base_offset
        column[:] = offsets[: column.size]
        self._offsets[: starts.size - column.size] = offsets[column.size :]
        return offsets

    # Reading -------------------------------------------------------------------------------------

    def view_frames(self, first: int, last: int, bytes_max: int) -> tuple[memoryview, int]:
        """Return contiguous frames from `first` on: a view of their bytes, and the sequence after
        them.

        Stops before `last`, at the end of the arena, or at `bytes_max`, but returns at least one
        frame. The view is valid until the ring changes.
        """
        assert self.floor <= first < last <= self.head, (self.floor, first, last, self.head)
        if first < self._wrap_sequence < last:
            last = self._wrap_sequence
        begin, end = self._frame_start(first), self._frame_end(last - 1)
        if end - begin > bytes_max:
            last = max(first + 1, self._find_frame(first, last, begin + bytes_max))
            end = self._frame_end(last - 1)
        return self._view[begin:end], last

    def range_bytes(self, first: int, last: int) -> int:
        """Return the bytes of frames first..last-1."""
        if first >= last:
            return 0
        if first < self._wrap_sequence < last:
            return self._wrap_end_offset - self._frame_start(first) + self._frame_end(last - 1)
        return self._frame_end(last - 1) - self._frame_start(first)

    def sequences_bytes(self, sequences: Integers) -> int:
        """Return the total bytes of these frames."""
        begins, ends = self.frame_bounds(sequences)
        return int((ends - begins).sum())

    def copy_frames(self, sequences: Integers, timer_index: int) -> bytes:
        """Return copies of these frames, back to back, with `timer_index` written into them."""
        begins, ends = self.frame_bounds(sequences)
        self.set_timer_index(self.head, self.head, timer_index)
        stale = begins[sequences < self._stamped_from] + _TIMER_OFFSET
        unaligned(self._arena, _TIMER_UINT16)[stale] = timer_index
        view = self._view
        return b"".join([view[a:b] for a, b in zip(begins.tolist(), ends.tolist(), strict=True)])

    def view_batch(self, first: int, last: int, bytes_max: int) -> tuple[FrameBatch, int]:
        """Return the frames of `view_frames` as a batch, and the sequence after them."""
        frames_view, last = self.view_frames(first, last, bytes_max)
        starts = [self._offsets[a:b] for a, b in self._slot_ranges(first, last)]
        bounds = np.concatenate([*starts, [self._frame_end(last - 1)]])
        return FrameBatch(np.frombuffer(frames_view, np.uint8), bounds - bounds[0], 0), last

    def slots_of(self, sequences: Integers) -> Integers:
        """Return the slots of these messages."""
        return sequences & self._mask

    def frame_bounds(self, sequences: Integers) -> tuple[Integers, Integers]:
        """Return the start and end offsets of these frames in the arena."""
        begins = self._offsets[sequences & self._mask]
        ends = self._offsets[(sequences + 1) & self._mask]
        ends[sequences == self._wrap_sequence - 1] = self._wrap_end_offset
        ends[sequences == self.head - 1] = self._write_offset
        return begins, ends

    def locate_cut(self, first: int, last: int, count: int) -> tuple[int, int]:
        """Locate the frame at offset `count` of the view of frames first..last-1.

        Returns:
            Its sequence, and how many of its bytes lie behind the cut; 0 if the cut is in front of
            it.
        """
        begin = self._frame_start(first)
        sequence = self._find_frame(first, last, begin + count)
        if self._frame_start(sequence) == begin + count:
            return sequence, 0
        return sequence, self._frame_end(sequence) - begin - count

    def set_timer_index(self, first: int, last: int, timer_index: int) -> None:
        """Write `timer_index` into frames first..last-1."""
        if timer_index != self._timer_index:
            self._timer_index = timer_index
            self._stamped_from = self.head
        last = min(last, self._stamped_from)
        if first >= last:
            return
        view = unaligned(self._arena, _TIMER_UINT16)
        for start, stop in self._slot_ranges(first, last):
            view[self._offsets[start:stop] + _TIMER_OFFSET] = timer_index

    def copy_frame(self, sequence: int) -> bytes:
        """Return a copy of one frame."""
        return bytes(self._view[self._frame_start(sequence) : self._frame_end(sequence)])

    def _frame_start(self, sequence: int) -> int:
        return int(self._offsets[sequence & self._mask])

    def _frame_end(self, sequence: int) -> int:
        after = sequence + 1
        if after == self.head:
            return self._write_offset
        if after == self._wrap_sequence:
            return self._wrap_end_offset
        return int(self._offsets[after & self._mask])

    def _find_frame(self, first: int, last: int, offset: int) -> int:
        """Return the frame of contiguous frames first..last-1 that contains this arena offset, or
        `last`.
        """
        for start, stop in self._slot_ranges(first, last):
            column = self._offsets[start:stop]
            after = int(column.searchsorted(offset, side="right"))
            first += after
            if after < column.size:
                break
        return first - 1 if offset < self._frame_end(first - 1) else first

    def _slot_ranges(self, first: int, last: int) -> list[tuple[int, int]]:
        """Return the slot ranges of first..last-1: one, or two around the end."""
        start = first & self._mask
        stop = start + last - first
        if stop <= self._slots:
            return [(start, stop)]
        return [(start, self._slots), (0, stop - self._slots)]

    # Releasing -----------------------------------------------------------------------------------

    def release(self, floor: int) -> None:
        """Release the messages below `floor`."""
        if floor <= self.floor:
            return
        assert floor <= self.head, (floor, self.head)
        if self.columns.channels is not None:
            self.columns.subtract_channels(self._slot_ranges(self.floor, floor))
        self.floor = floor

    def sequence_after_bytes(self, size: int) -> int:
        """Return the first sequence with at least `size` stored bytes before it, or the head."""
        first, last = self.floor, self.head
        begin = self._frame_start(first)
        if first < self._wrap_sequence < last:
            before_wrap = self._wrap_end_offset - begin
            if size <= before_wrap:
                last = self._wrap_sequence
            else:
                first, begin, size = self._wrap_sequence, 0, size - before_wrap
        return min(self._find_frame(first, last, begin + size - 1) + 1, last)

    def reserve_memory(self, messages: int, size: int) -> None:
        """Allocate memory for about this many messages and bytes, if limits and budget allow."""
        slots = power_of_two_at_least(RING_SLOTS_MIN, min(messages, self.messages_max))
        size = min(max(size, RING_BYTES_MIN), self.bytes_max - slots * self._row_bytes)
        if slots > self._slots and size > self._size:
            self._resize(slots, size)

    def trim_to_limits(self) -> None:
        """Free memory beyond the limits if it is unused and at least 1/8 of all."""
        if self._memory_bytes() > self.bytes_max or self.budget.available_bytes < 0:
            slots = power_of_two_at_least(RING_SLOTS_MIN, len(self)) if len(self) else 0
            size = (
                self.bytes_max - slots * self._row_bytes if self.budget.available_bytes >= 0 else 0
            )
            size = max(self.frame_bytes, min(self._size, size))
            if 8 * (size + slots * self._row_bytes) <= 7 * self._memory_bytes():
                self._resize(slots, size)
        is_above = self._memory_bytes() > self.bytes_max or len(self) > self.messages_max
        self.is_over_limit = is_above or self.budget.available_bytes < 0

    def free(self) -> None:
        """Release all messages and all memory."""
        self.release(self.head)
        self._resize(0, 0)

    def tick(self) -> bool:
        """Free memory that was not needed for a while. Returns True if the ring has none left."""
        if self.is_over_limit:
            self.trim_to_limits()
        self._idle_ticks += 1
        if self._idle_ticks < RING_IDLE_TICKS or self._slots == 0:
            return self._slots == 0
        slots = power_of_two_at_least(RING_SLOTS_MIN, 2 * self._peak_messages)
        size = power_of_two_at_least(RING_BYTES_MIN, 2 * self._peak_bytes)
        if self._peak_messages == 0:
            slots = size = 0
        if 2 * slots <= self._slots or 2 * size <= self._size:
            self._resize(min(slots, self._slots), min(size, self._size))
        self._idle_ticks = 0
        self._peak_messages, self._peak_bytes = len(self), self.frame_bytes
        return self._slots == 0

    # Memory --------------------------------------------------------------------------------------

    def _memory_bytes(self) -> int:
        return self._size + self._slots * self._row_bytes

    @property
    def _row_bytes(self) -> int:
        """Memory of one slot in all columns."""
        return _INT64.itemsize + self.columns.row_bytes

    def can_grow(self, batch: FrameBatch) -> bool:
        """Return True if the ring's own limits allow memory for one more frame of the batch."""
        capacity = self._wanted_capacity(batch)
        return (
            capacity != (self._slots, self._size)
            and capacity[1] - self.frame_bytes >= batch.ends[0]
        )

    def _wanted_capacity(self, batch: FrameBatch) -> tuple[int, int]:
        """Return (slots, bytes) for at least one more frame of the batch, within the ring's own
        limits.
        """
        longest_next, row_bytes = int(batch.ends[0]), self._row_bytes
        slots, size = self._slots, self._size
        if len(self) >= self.messages_max:
            return slots, size
        slots = max(RING_SLOTS_MIN, 2 * slots) if len(self) == slots else slots
        if len(self) == 0 and self.bytes_max - slots * row_bytes < longest_next:
            slots = RING_SLOTS_MIN  # Too many slots for small frames would leave no room.
        if self._longest_fitting_bytes() < longest_next:
            size = max(RING_BYTES_MIN, 2 * size)
            while size - self.frame_bytes < longest_next:
                size *= 2
        return slots, min(size, self.bytes_max - slots * row_bytes)

    def _grow(self, batch: FrameBatch) -> bool:
        """Grow for at least one frame of the batch. Returns False if limits or budget do not allow
        it.
        """
        slots, size = self._wanted_capacity(batch)
        # If the budget does not allow doubling, growing by 1/8 is still worth the copy.
        affordable = self._memory_bytes() + self.budget.available_bytes - slots * self._row_bytes
        if self._size + self._size // 8 < affordable < size:
            size = affordable
        if (slots, size) == (self._slots, self._size) or size - self.frame_bytes < batch.ends[0]:
            return False
        return self._resize(slots, size)

    def _longest_fitting_bytes(self) -> int:
        """Return the length of the longest frame that fits now."""
        if self.floor == self.head:
            return self._size
        tail = self._frame_start(self.floor)
        return (
            max(self._size - self._write_offset, tail)
            if self._write_offset > tail
            else tail - self._write_offset
        )

    def _resize(self, slots: int, size: int) -> bool:
        """Copy all frames into new arrays, oldest first. Returns False if there is not enough
        memory.
        """
        new_bytes = size + slots * self._row_bytes
        additional_bytes = max(0, new_bytes - self._memory_bytes())
        if not self.budget.acquire(additional_bytes):
            return False
        try:
            arena, offsets = allocate_array(size, _UINT8), allocate_array(slots, _INT64)
            column_arrays = self.columns.allocate_arrays(slots)
        except (OSError, MemoryError):  # The system has less memory than the budget allows.
            self.budget.release(additional_bytes)
            return False
        old_arena, old_offsets = self._arena, self._offsets
        old_slot_ranges = self._slot_ranges(self.floor, self.head) if len(self) else []
        rows = self.columns.read_rows(old_slot_ranges) if old_slot_ranges else MessageRows(0)
        segments = [(self.floor, self.head)]
        if self.floor < self._wrap_sequence < self.head:
            segments = [(self.floor, self._wrap_sequence), (self._wrap_sequence, self.head)]
        bounds = [(self._frame_start(a), self._frame_end(b - 1)) for a, b in segments if a < b]
        kept_offsets = np.concatenate(
            [old_offsets[:0]] + [old_offsets[a:b] for a, b in old_slot_ranges]
        )
        surplus_bytes = max(0, self._memory_bytes() - new_bytes)
        self._set_arrays(arena, offsets)
        self.budget.release(surplus_bytes)
        write_offset = copied_count = 0
        for (first, last), (begin, end) in zip(segments, bounds, strict=False):
            self._arena[write_offset : write_offset + end - begin] = old_arena[begin:end]
            kept_offsets[copied_count : copied_count + last - first] += write_offset - begin
            copied_count += last - first
            write_offset += end - begin
        if kept_offsets.size:
            self._write_offsets(self.floor, kept_offsets, 0)
        if self.columns.row_bytes:
            self.columns.replace_arrays(
                rows,
                column_arrays,
                self._slot_ranges(self.floor, self.head) if write_offset else [],
            )
        self._write_offset = write_offset
        self._wrap_sequence = self.floor
        return True

    def _set_arrays(self, arena: npt.NDArray[np.uint8], offsets: npt.NDArray[np.int64]) -> None:
        assert offsets.size == 0 or offsets.size.bit_count() == 1, offsets.size
        self._arena, self._offsets = arena, offsets
        self._view = arena.data
        self._slots, self._size, self._mask = offsets.size, arena.size, offsets.size - 1

    def check(self) -> None:
        """Raise AssertionError unless the invariants hold."""
        assert self.floor <= self.head <= self.floor + self._slots, vars(self)
        assert self.is_over_limit or len(self) <= self.messages_max
        assert self.is_over_limit or self._memory_bytes() <= self.bytes_max
        if len(self):
            sequences = np.arange(self.floor, self.head)
            begins, ends = self.frame_bounds(sequences)
            lengths, fours = ends - begins, unaligned(self._arena, _UINT32)
            assert 0 <= begins.min() <= ends.max() <= self._size, (sequences, begins, ends)
            assert lengths.min() >= FRAME_BYTES_MIN, (sequences, begins, ends)
            assert (
                not self.floor < self._wrap_sequence < self.head
                or self._frame_start(self._wrap_sequence) == 0
            )
            assert (fours[ends - len(DELIMITER)] == _DELIMITER).all(), (sequences, begins, ends)
            ids = fours[begins + 3]
            assert (ids == sequences & MESSAGE_ID_MASK).all(), (ids, sequences)
            assert lengths.sum() == self.frame_bytes, (lengths, self.frame_bytes)
        if self.columns.channels is not None:
            carried = self.read_rows(self.floor, self.head).channels
            uses = np.bincount(carried, minlength=self.columns.channel_counts.size)
            assert (uses[1:] == self.columns.channel_counts[1:]).all()
