"""Ring of one class: whole wire frames in a chain of memory segments.

Sequences only grow. Frames are appended to the last segment, and a segment is reused or freed when
its last frame was released. The ring grows by another segment, so stored frames are never copied.
A ring does not refer to subscriptions; the class calls `release`. Memory is acquired from a budget
before it is allocated.

    first segment             …             last segment         spare segments
    │ released │ stored frames │  …  │ stored frames │ free │    │ free │ free │
              floor                                head

Invariant: floor <= head, and each stored frame lies in exactly one segment.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from simplebus.core.limits import (
    FRAME_BYTES_MIN,
    RING_BYTES_MIN,
    RING_FREED_SEGMENTS_MAX,
    RING_IDLE_TICKS,
    RING_RESTART_BYTES,
    RING_SEGMENT_BYTES_MAX,
    RING_SLOTS_MIN,
    SEQUENCE_MAX,
)
from simplebus.core.protocol.frames import FrameBatch, Integers
from simplebus.core.ring.columns import (
    NEVER,
    NO_DELAY,
    ChannelCounts,
    Channels,
    MessageRow,
    MessageRows,
    concatenate_rows,
)
from simplebus.core.ring.memory_budget import MemoryBudget, check_free_address_space
from simplebus.core.ring.segment import OFFSET_BYTES, Segment, memory_bytes_of

_PLAIN_ROW = MessageRow()
_SEGMENTS_IN_LIMIT = 8
"""Minimum number of segments of a full ring, so that each released segment frees a small part."""


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
    """Memory of the segments."""

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
        self.channel_counts = ChannelCounts()
        """Number of stored messages of each channel."""
        self.envelopes_until = 0
        """No message at or above this sequence has an envelope."""
        self.timed_until = 0
        """No message at or above this sequence has an expiry or a delay."""
        self.special_until = 0
        """Maximum of `envelopes_until` and `timed_until`: messages at or above it are plain."""
        self.budget = budget
        """Budget of all rings together."""
        self._segments: list[Segment] = []
        self._firsts: list[int] = []
        """First sequence of each segment."""
        self._last: Segment | None = None
        """Segment that frames are appended to."""
        self._first_end = SEQUENCE_MAX
        """End of the first segment if another one follows it."""
        self._spares: list[Segment] = []
        """Segments without frames, for the next growth."""
        self._unused_spare_count = 0
        """Spares that were not used since the last check for unused memory."""
        self._freed_spare_count = 0
        """Spares that the next ticks free."""
        self._memory_bytes = 0
        """Memory acquired from the budget, for `_segments` and `_spares`."""
        self._appended_bytes = 0
        """Bytes of all frames ever appended: the position of the next frame."""
        self._checked_head = 0
        """Head at the last check for unused memory."""
        self._checked_position = 0
        """Position of the floor at the last check for unused memory."""
        self._idle_ticks = 0
        self._stamped_from = 0
        """Messages at or above this sequence carry the timer index `_timer_index`."""
        self._timer_index = 0

    def __len__(self) -> int:
        return self.head - self.floor

    @property
    def frame_bytes(self) -> int:
        """Bytes of the stored frames."""
        if self.floor == self.head:
            return 0
        return self._appended_bytes - self._position(self.floor)

    @property
    def has_channels(self) -> bool:
        """True if a stored message may have a channel."""
        return self.channel_counts.by_number.size > 1

    def statistics(self) -> RingStatistics:
        return RingStatistics(self.floor, self.head, self.frame_bytes, self._memory_bytes)

    def set_next_sequence(self, sequence: int) -> None:
        """Set the sequence of the next message. The ring is empty."""
        assert self.floor == self.head <= sequence, (self.floor, self.head, sequence)
        self.floor = self.head = self._stamped_from = self._checked_head = sequence
        if self._last is not None:
            self._restart_last()

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
        if timer_index != self._timer_index:
            self.set_timer_index(self.head, self.head, timer_index)
        if self.head == self.floor and self._last is not None:
            self._restart_last()
        appended_count, is_segment_new = 0, False
        while appended_count < batch.count:
            remaining, remaining_rows = batch, rows
            if appended_count:
                remaining = batch.slice(appended_count, batch.count)
                remaining_rows = None if rows is None else rows.slice(appended_count, rows.count)
            fitting_count = self._count_fitting(remaining, remaining_rows)
            if fitting_count == 0:
                if is_segment_new or not self._add_segment(remaining, remaining_rows):
                    break
                is_segment_new = True
                continue
            is_segment_new = False
            if fitting_count < remaining.count:
                remaining = remaining.slice(0, fitting_count)
                if remaining_rows is not None:
                    remaining_rows = remaining_rows.slice(0, fitting_count)
            self._append_to_last(remaining, remaining_rows)
            appended_count += fitting_count
        return appended_count

    def _append_to_last(self, batch: FrameBatch, rows: MessageRows | None) -> None:
        segment, count = self._last, batch.count
        assert segment is not None
        slot = segment.count
        segment.append(batch, self.class_id, self._timer_index)
        self.head += count
        self._appended_bytes += batch.data.size
        if segment.columns.row_bytes:
            segment.columns.write_rows(slot, rows or MessageRows(count))
        if rows is not None:
            self.envelopes_until = self.special_until = self.head
            self.channel_counts.add(rows.channels, count)
            if rows.is_timed:
                self.timed_until = self.head

    def append_one(
        self, frame: memoryview, timer_index: int, row: MessageRow | None = None
    ) -> bool:
        """Copy in one frame if the last segment has room.

        Args:
            frame: Frame of this class.
            timer_index: Timer index that the frame carries from now on.
            row: Columns of the message if the frame has an envelope; None for a plain frame.

        Returns:
            False if there is no room: the ring is unchanged, and `append` must be called.
        """
        head, segment, size = self.head, self._last, len(frame)
        if segment is None:
            return False
        free_bytes = segment.capacity - segment.used_bytes
        if (
            head == self.floor
            and (segment.used_bytes >= RING_RESTART_BYTES or size > free_bytes)
            and size <= segment.capacity
        ):
            self._restart_last()
            free_bytes = segment.capacity
        if (
            size > free_bytes
            or segment.count >= segment.slot_count
            or head - self.floor >= self.messages_max
            or (row is not None and segment.columns.is_missing_column_for(row))
        ):
            return False
        if timer_index != self._timer_index:
            self.set_timer_index(head, head, timer_index)
        slot = segment.append_one(frame, timer_index)
        self.head = head + 1
        self._appended_bytes += size
        if segment.columns.row_bytes:
            segment.columns.write_row(slot, row or _PLAIN_ROW)
        if row is not None:
            self.channel_counts.add(row.channel, 1)
            self.envelopes_until = self.special_until = head + 1
            if row.expires != NEVER or row.not_before != NO_DELAY:
                self.timed_until = head + 1
        return True

    def _count_fitting(self, batch: FrameBatch, rows: MessageRows | None) -> int:
        """Return how many frames fit into the last segment, and add the columns that they need."""
        segment = self._last
        if segment is None:
            return 0
        free_count = self.messages_max - (self.head - self.floor)
        count = segment.count_fitting(batch, min(batch.count, free_count))
        if count and rows is not None and not self._add_columns(segment, rows):
            return 0
        return count

    def _add_columns(self, segment: Segment, rows: MessageRows) -> bool:
        """Add the columns that `rows` need. Returns False if limits or budget forbid it."""
        added_bytes = segment.columns.missing_row_bytes(rows) * segment.slot_count
        if added_bytes == 0:
            return True
        if added_bytes > self._available_bytes() or not self._acquire(added_bytes):
            return False
        try:
            segment.add_columns(rows)
        except MemoryError:
            self._release_memory(added_bytes)
            return False
        return True

    # Reading -------------------------------------------------------------------------------------

    def _segment_of(self, sequence: int) -> Segment:
        """Return the segment of a stored message."""
        last = self._last
        assert last is not None
        if sequence >= last.first:
            return last
        if sequence < self._first_end:
            return self._segments[0]
        return self._segments[bisect_right(self._firsts, sequence) - 1]

    def _segments_of(self, first: int, last: int) -> Iterator[tuple[Segment, int, int]]:
        """Split messages first..last-1 by segment into (segment, first slot, end slot)."""
        while first < last:
            segment = self._segment_of(first)
            end = min(last, segment.end)
            yield segment, first - segment.first, end - segment.first
            first = end

    def _slots_by_segment(
        self, sequences: Integers
    ) -> Iterator[tuple[Segment, Integers, Integers | None]]:
        """Split stored messages by segment into (segment, slots, indexes into `sequences`).

        The indexes are None if all messages are in one segment.
        """
        lowest, highest = int(sequences.min()), int(sequences.max())
        segment = self._segment_of(lowest)
        if highest < segment.end:
            yield segment, sequences - segment.first, None
            return
        numbers = np.array(self._firsts).searchsorted(sequences, side="right") - 1
        order = np.argsort(numbers, kind="stable")
        numbers = numbers[order]
        starts = np.flatnonzero(np.r_[True, numbers[1:] != numbers[:-1]]).tolist()
        for start, stop in zip(starts, [*starts[1:], numbers.size], strict=True):
            segment = self._segments[int(numbers[start])]
            indexes = order[start:stop]
            yield segment, sequences[indexes] - segment.first, indexes

    def _position(self, sequence: int) -> int:
        """Return the number of bytes that were appended before this message."""
        if sequence == self.head:
            return self._appended_bytes
        segment = self._segment_of(sequence)
        return segment.start_position + segment.start_of(sequence)

    def view_frames(self, first: int, last: int, bytes_max: int) -> tuple[memoryview, int]:
        """Return contiguous frames from `first` on: a view of their bytes, and the sequence after
        them.

        Stops before `last`, at the end of a segment, or at `bytes_max`, but returns at least one
        frame. The view is valid until the frames are released.
        """
        assert self.floor <= first < last <= self.head, (self.floor, first, last, self.head)
        return self._segment_of(first).view_frames(first, last, bytes_max)

    def view_batch(self, first: int, last: int, bytes_max: int) -> tuple[FrameBatch, int]:
        """Return the frames of `view_frames` as a batch, and the sequence after them."""
        frames_view, last = self.view_frames(first, last, bytes_max)
        segment = self._segment_of(first)
        offsets = segment.offsets[first - segment.first : last - segment.first + 1]
        bounds = offsets.astype(np.int64)
        return FrameBatch(np.frombuffer(frames_view, np.uint8), bounds - bounds[0], 0), last

    def copy_frame(self, sequence: int) -> bytes:
        """Return a copy of one frame."""
        return bytes(self._segment_of(sequence).frame_view(sequence))

    def copy_frames(self, sequences: Integers, timer_index: int) -> bytes:
        """Return copies of these ascending frames, back to back, with `timer_index` written into
        them.
        """
        self.set_timer_index(self.head, self.head, timer_index)
        stale = sequences[sequences < self._stamped_from]
        if stale.size:
            for segment, slots, _ in self._slots_by_segment(stale):
                segment.set_timer_index(slots, timer_index)
        frames: list[memoryview] = []
        if sequences.size:
            for segment, slots, _ in self._slots_by_segment(sequences):
                frames += segment.frame_views(slots)
        return b"".join(frames)

    def range_bytes(self, first: int, last: int) -> int:
        """Return the bytes of frames first..last-1."""
        return self._position(last) - self._position(first) if first < last else 0

    def frame_sizes(self, sequences: Integers) -> Integers:
        """Return the lengths of these frames."""
        sizes = np.empty(sequences.size, np.int64)
        if sequences.size:
            for segment, slots, indexes in self._slots_by_segment(sequences):
                sizes[slice(None) if indexes is None else indexes] = segment.sizes_at(slots)
        return sizes

    def sequences_bytes(self, sequences: Integers) -> int:
        """Return the total bytes of these frames."""
        return int(self.frame_sizes(sequences).sum())

    def read_row(self, sequence: int) -> MessageRow:
        """Return the columns of one message."""
        segment = self._segment_of(sequence)
        return segment.columns.read_row(sequence - segment.first)

    def read_rows(self, first: int, last: int) -> MessageRows:
        """Return a copy of the columns of messages first..last-1."""
        parts = [
            segment.columns.view_rows(start, stop)
            for segment, start, stop in self._segments_of(first, last)
        ]
        return concatenate_rows(parts) if parts else MessageRows(0)

    def read_channels(self, first: int, last: int) -> Channels | int:
        """Return the channels of messages first..last-1, valid until they are released; one number
        if all share it.
        """
        parts = [
            segment.columns.view_rows(start, stop)
            for segment, start, stop in self._segments_of(first, last)
        ]
        return parts[0].channels if len(parts) == 1 else concatenate_rows(parts).channels

    def read_rows_at(self, sequences: Integers) -> MessageRows:
        """Return a copy of the columns of these messages."""
        if not sequences.size:
            return MessageRows(0)
        parts = list(self._slots_by_segment(sequences))
        rows = [segment.columns.read_rows_at(slots) for segment, slots, _ in parts]
        indexes = [indexes for _, _, indexes in parts if indexes is not None]
        if not indexes:
            return rows[0]
        return concatenate_rows(rows).take(np.argsort(np.concatenate(indexes)))

    def locate_cut(self, first: int, last: int, count: int) -> tuple[int, int]:
        """Locate the frame that contains byte `count` of the view of frames first..last-1.

        Returns:
            The sequence of the frame, and the number of its bytes from byte `count` on; 0 if the
            frame begins there.
        """
        segment = self._segment_of(first)
        cut = segment.start_of(first) + count
        sequence = segment.find_frame(cut)
        if segment.start_of(sequence) == cut:
            return sequence, 0
        return sequence, segment.start_of(sequence + 1) - cut

    def sequence_after_bytes(self, size: int) -> int:
        """Return the first sequence with at least `size` stored bytes before it, or the head."""
        if self.floor == self.head:
            return self.head
        position = self._position(self.floor) + size - 1
        if position >= self._appended_bytes:
            return self.head
        low, high = 0, len(self._segments)
        while high - low > 1:
            middle = (low + high) // 2
            if self._segments[middle].start_position <= position:
                low = middle
            else:
                high = middle
        segment = self._segments[low]
        return segment.find_frame(position - segment.start_position) + 1

    def has_timer_index(self, first: int, timer_index: int) -> bool:
        """Return True if the frames from `first` on carry this timer index."""
        return timer_index == self._timer_index and first >= self._stamped_from

    def set_timer_index(self, first: int, last: int, timer_index: int) -> None:
        """Write `timer_index` into frames first..last-1."""
        if timer_index != self._timer_index:
            self._timer_index = timer_index
            self._stamped_from = self.head
        if first < self._stamped_from:
            for segment, start, stop in self._segments_of(first, min(last, self._stamped_from)):
                segment.set_timer_index(slice(start, stop), timer_index)

    # Releasing -----------------------------------------------------------------------------------

    def release(self, floor: int) -> None:
        """Release the messages below `floor`."""
        if floor <= self.floor:
            return
        assert floor <= self.head, (floor, self.head)
        if self.floor < self.envelopes_until:
            counts, first, last = self.channel_counts, self.floor, floor
            is_recount = floor - first > self.head - floor + len(counts.by_number)
            if is_recount:  # Counting the messages that stay takes less time.
                counts.clear()
                first, last = floor, self.head
            for segment, start, stop in self._segments_of(first, last):
                channels = segment.columns.channels
                if channels is None:
                    continue
                if is_recount:
                    counts.add(channels[start:stop], stop - start)
                else:
                    counts.subtract(channels[start:stop])
        self.floor = floor
        if floor >= self._first_end:
            self._recycle_drained()

    def _restart_last(self) -> None:
        """Reuse the front of the last segment, which is in the cache. The ring is empty."""
        if len(self._segments) > 1:
            self._recycle_drained()
        self._segments[0].restart(self.head, self._appended_bytes)
        self._firsts[0] = self.head

    def _on_segments_changed(self) -> None:
        segments = self._segments
        self._firsts = [segment.first for segment in segments]
        self._last = segments[-1] if segments else None
        self._first_end = segments[1].first if len(segments) > 1 else SEQUENCE_MAX

    def free(self) -> None:
        """Release all messages and all memory."""
        self.release(self.head)
        self._segments.clear()
        self._spares.clear()
        self._unused_spare_count = self._freed_spare_count = 0
        self._on_segments_changed()
        self._release_memory(self._memory_bytes)

    # Memory --------------------------------------------------------------------------------------

    def _available_bytes(self) -> int:
        """Return the bytes that limit and budget leave to this ring."""
        return min(self.bytes_max - self._memory_bytes, self.budget.available_bytes)

    def _acquire(self, size: int) -> bool:
        if not self.budget.acquire(size):
            return False
        self._memory_bytes += size
        return True

    def _release_memory(self, size: int) -> None:
        self._memory_bytes -= size
        self.budget.release(size)

    def can_grow(self, batch: FrameBatch) -> bool:
        """Return True if the ring's own limits allow memory for one more frame of the batch."""
        spare_bytes = sum(segment.memory_bytes for segment in self._spares)
        room = self.bytes_max - self._memory_bytes + spare_bytes
        return len(self) < self.messages_max and self._segment_size(batch, None, room) is not None

    def _segment_size(
        self, batch: FrameBatch, rows: MessageRows | None, room: int
    ) -> tuple[int, int] | None:
        """Return capacity and slots of the next segment, or None if `room` is too little memory.

        A segment is as large as the batch or twice the stored frames, within a minimum and a
        maximum, so that few segments hold many messages. The first frame of the batch fits.
        """
        smallest = min(RING_BYTES_MIN, self.bytes_max // _SEGMENTS_IN_LIMIT)
        largest = min(RING_SEGMENT_BYTES_MAX, self.bytes_max // _SEGMENTS_IN_LIMIT)
        first_frame_bytes = int(batch.ends[0])
        preferred = max(2 * self.frame_bytes, batch.data.size)
        capacity = max(smallest, min(preferred, largest), first_frame_bytes)
        if capacity < _SEGMENTS_IN_LIMIT * first_frame_bytes:
            capacity = -(-capacity // first_frame_bytes) * first_frame_bytes
        frame_bytes = max(FRAME_BYTES_MIN, batch.data.size // batch.count)
        row_bytes = 0 if rows is None else rows.row_bytes
        slot_count = capacity // frame_bytes
        if capacity == smallest:  # Most classes hold few messages.
            slot_count = min(slot_count, 4 * max(len(self), batch.count))
        slot_count = max(RING_SLOTS_MIN, slot_count)
        if memory_bytes_of(capacity, slot_count, row_bytes) > room:
            per_frame = frame_bytes + OFFSET_BYTES + row_bytes
            slot_count = max(RING_SLOTS_MIN, room // per_frame)
            capacity = room - memory_bytes_of(0, slot_count, row_bytes)
            if capacity < max(first_frame_bytes, smallest // _SEGMENTS_IN_LIMIT):
                return None
        return capacity, slot_count

    def _add_segment(self, batch: FrameBatch, rows: MessageRows | None) -> bool:
        """Add a segment for at least one frame of the batch.

        Returns:
            False if limits, the budget or the system do not allow it.
        """
        if len(self) >= self.messages_max:
            return False
        if len(self):
            self._trim_last()
        else:
            self._recycle_all()
        if self._add_spare(batch) or self._allocate(batch, rows):
            return True
        if not self._spares:
            return False
        self._free_spares(len(self._spares))
        return self._allocate(batch, rows)

    def _add_spare(self, batch: FrameBatch) -> bool:
        """Append the spare that was used last if it suits the batch."""
        if not self._spares:
            return False
        spare = self._spares[-1]
        needed_slots = min(batch.count, spare.capacity * batch.count // batch.data.size)
        if spare.capacity < batch.ends[0] or 2 * spare.slot_count < needed_slots:
            return False
        self._spares.pop()
        self._unused_spare_count = min(self._unused_spare_count, len(self._spares))
        self._append_segment(spare)
        return True

    def _allocate(self, batch: FrameBatch, rows: MessageRows | None) -> bool:
        """Allocate and append a segment. Returns False if that is not possible."""
        size = self._segment_size(batch, rows, self._available_bytes())
        if size is None:
            return False
        smaller = max(RING_BYTES_MIN, int(batch.ends[0])), RING_SLOTS_MIN
        for capacity, slot_count in (size, smaller) if smaller < size else (size,):
            memory_bytes = memory_bytes_of(capacity, slot_count)
            if not self._acquire(memory_bytes):
                return False
            try:
                # Only a small first segment may use the reserve of address space.
                if len(self) or capacity > RING_BYTES_MIN:
                    check_free_address_space(memory_bytes)
                segment = Segment(capacity, slot_count)
            except (OSError, MemoryError):  # The system has less memory than the budget allows.
                self._release_memory(memory_bytes)
            else:
                self._append_segment(segment)
                return True
        return False

    def _append_segment(self, segment: Segment) -> None:
        segment.restart(self.head, self._appended_bytes)
        self._segments.append(segment)
        self._on_segments_changed()

    def _trim_last(self) -> None:
        """Free the unused end of the last segment if it is large."""
        segment = self._last
        if segment is not None and 8 * segment.used_bytes < 7 * segment.capacity:
            self._release_memory(segment.trim())

    def _recycle_drained(self) -> None:
        """Turn the segments whose frames were all released into spares, but for the last one."""
        count = 0
        while count < len(self._segments) - 1 and self._segments[count].end <= self.floor:
            self._recycle(self._segments[count])
            count += 1
        del self._segments[:count]
        self._on_segments_changed()

    def _recycle_all(self) -> None:
        """Turn all segments into spares. The ring is empty."""
        for segment in self._segments:
            self._recycle(segment)
        self._segments.clear()
        self._on_segments_changed()

    def _recycle(self, segment: Segment) -> None:
        """Keep a segment as a spare, or free a trimmed one if its memory is no longer available."""
        missing_bytes = segment.full_memory_bytes - segment.memory_bytes
        if missing_bytes == 0 or (
            missing_bytes <= self._available_bytes() and self._acquire(missing_bytes)
        ):
            segment.untrim()
            self._spares.append(segment)
        else:
            self._release_memory(segment.memory_bytes)

    def _free_spares(self, count: int) -> None:
        """Free the `count` spares that were not used for the longest time."""
        self._release_memory(sum(spare.memory_bytes for spare in self._spares[:count]))
        del self._spares[:count]
        self._unused_spare_count = max(0, self._unused_spare_count - count)

    def trim_to_limits(self) -> None:
        """Free unused memory beyond the limits."""
        if self._available_bytes() < 0:
            if len(self):
                self._trim_last()
            else:
                self._recycle_all()
            self._free_spares(len(self._spares))
        self.is_over_limit = self._available_bytes() < 0 or len(self) > self.messages_max

    def tick(self) -> bool:
        """Free memory that was not needed for a while. Returns True if the ring has none left.

        A tick frees a limited number of segments, because returning their pages takes time.
        """
        if self.is_over_limit:
            self.trim_to_limits()
        if self._freed_spare_count:
            self._free_unused_spares()
        self._idle_ticks += 1
        if self._idle_ticks >= RING_IDLE_TICKS:
            self._idle_ticks = 0
            self._find_unused_memory()
        return self._memory_bytes == 0

    def _find_unused_memory(self) -> None:
        """Mark memory for freeing that was not needed since the last call."""
        last, used_bytes = self._last, self._appended_bytes - self._checked_position
        if not len(self) and self.head == self._checked_head:
            self._recycle_all()
            self._unused_spare_count = len(self._spares)
        elif last is not None and last.memory_bytes > 4 * max(used_bytes, RING_BYTES_MIN):
            if len(self):
                self._trim_last()
            else:
                self._recycle_all()
                self._unused_spare_count = len(self._spares)
        self._freed_spare_count = self._unused_spare_count
        self._free_unused_spares()
        self._unused_spare_count = len(self._spares)
        self._checked_head = self.head
        self._checked_position = self._appended_bytes - self.frame_bytes

    def _free_unused_spares(self) -> None:
        count = min(self._freed_spare_count, RING_FREED_SEGMENTS_MAX, len(self._spares))
        self._free_spares(count)
        self._freed_spare_count = min(self._freed_spare_count - count, len(self._spares))

    def check(self) -> None:
        """Raise AssertionError unless the invariants hold."""
        segments = [*self._segments, *self._spares]
        assert self._memory_bytes == sum(segment.memory_bytes for segment in segments)
        assert self.floor <= self.head, vars(self)
        assert self.is_over_limit or len(self) <= self.messages_max
        assert self.is_over_limit or self._memory_bytes <= self.bytes_max
        assert [segment.first for segment in self._segments] == self._firsts
        expected, position = self.floor, self._appended_bytes
        if self._segments:
            assert self._segments[0].first <= self.floor
            assert self._segments[-1].end == self.head or not len(self)
            expected, position = self._segments[0].first, self._segments[0].start_position
        for segment in self._segments:
            assert (segment.first, segment.start_position) == (expected, position), vars(self)
            segment.check()
            expected, position = segment.end, position + segment.used_bytes
        if len(self):
            sizes = self.frame_sizes(np.arange(self.floor, self.head))
            assert sizes.sum() == self.frame_bytes, (sizes, self.frame_bytes)
        stored_channels = np.asarray(self.read_rows(self.floor, self.head).channels, np.uint32)
        counts = np.bincount(
            np.broadcast_to(stored_channels, len(self)),
            minlength=self.channel_counts.by_number.size,
        )
        assert (counts[1:] == self.channel_counts.by_number[1:]).all()
