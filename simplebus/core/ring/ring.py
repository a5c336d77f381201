"""One class's messages: whole wire frames back to back in one preallocated arena.

Rule 1: a ring knows sequences and bytes, never who wants them. It is told when to let go.
Rule 2: sequences only grow; the slot is `sequence & mask`. A frame never straddles the arena's end.
Rule 3: memory is taken from a budget before it is allocated, and given back when long unused.

    arena   │ wrapped, newer ───► │   free   │ older ───► │ unused end │
                                write      position[floor]         size

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
from simplebus.core.protocol.frames import DELIMITER, FrameBatch, Integers, stamp, unaligned
from simplebus.core.ring.columns import AT_ONCE, NEVER, Channels, Columns, MessageRow, MessageRows
from simplebus.core.ring.memory_budget import MemoryBudget, allocate, at_least

_HEADER_AT = 1
"""Where class, message id and timer index stand in a frame: eight bytes, written as one word."""
_TIMER_AT = 7
_BYTE: np.dtype[np.uint8] = np.dtype(np.uint8)
_POSITION: np.dtype[np.int64] = np.dtype(np.int64)
_WORD: np.dtype[np.uint64] = np.dtype(np.uint64)
_TIMER: np.dtype[np.uint16] = np.dtype(">u2")
_FOUR: np.dtype[np.uint32] = np.dtype(">u4")
_DELIMITER = int.from_bytes(DELIMITER, "big")
_PLAIN = MessageRow()
_NO_ID_OVERFLOW = np.uint64(~((MESSAGE_ID_MASK + 1) << 16) & 0xFFFFFFFFFFFFFFFF)


@dataclass(frozen=True, slots=True)
class RingStatistics:
    """A snapshot of one ring."""

    floor: int
    """Lowest sequence still kept."""
    head: int
    """Next sequence to be given out."""
    frame_bytes: int
    """Bytes of the frames kept."""
    memory_bytes: int
    """Memory held for frames and columns."""

    @property
    def messages(self) -> int:
        """Messages kept."""
        return self.head - self.floor


class Ring:
    """Frames of one class, from floor (kept for whoever needs it longest) to head (next one).

    `messages_max` and `bytes_max` bound what it may grow to; `budget` bounds all rings together.
    """

    def __init__(
        self, *, class_id: int, messages_max: int, bytes_max: int, budget: MemoryBudget
    ) -> None:
        self.class_id = class_id
        """What the frames that it is given carry already."""
        self.messages_max = messages_max
        self.bytes_max = bytes_max
        self.exceeds = False
        """Whether more may be held than limits and budget allow: it was there before a restart."""
        self.floor = self.head = 0
        self.columns = Columns()
        """What is known of messages beside their bytes."""
        self.envelopes_until = 0
        """No message at or above it has an envelope."""
        self.timed_until = 0
        """No message at or above it expires or opens later."""
        self.special_until = 0
        """The greater one of the two: from here on, messages are plain."""
        self.budget = budget
        """Of all rings together."""
        self._write = 0
        """Where the next frame goes, if it fits there."""
        self._wrap = 0
        """First sequence at the arena's beginning since it was last wrapped; <= floor if none."""
        self._wrap_end = 0
        """Where the frame before it ends."""
        self._peak_messages = self._peak_bytes = 0
        self._idle_ticks = 0
        self._stamped_from = 0
        """Sequences at or above it carry the timer index `_stamp`."""
        self._stamp = 0
        self._set_arrays(allocate(0, _BYTE), allocate(0, _POSITION))

    def __len__(self) -> int:
        return self.head - self.floor

    @property
    def frame_bytes(self) -> int:
        """Bytes of the frames kept."""
        if self.floor == self.head:
            return 0
        if self.floor < self._wrap:
            return self._wrap_end - self._begin(self.floor) + self._write
        return self._write - self._begin(self.floor)

    def statistics(self) -> RingStatistics:
        return RingStatistics(self.floor, self.head, self.frame_bytes, self._memory())

    def begin(self, sequence: int) -> None:
        """Have the next message be given this sequence. Nothing is stored."""
        assert self.floor == self.head <= sequence, (self.floor, self.head, sequence)
        self.floor = self.head = self._wrap = self._stamped_from = sequence

    # Filling -------------------------------------------------------------------------------------

    def append(self, batch: FrameBatch, timer_index: int, rows: MessageRows | None = None) -> int:
        """Copy in as many of the batch's frames as fit, numbered and stamped. Returns how many.

        `rows` describes frames with envelopes, one row each; plain frames have none.
        """
        if rows is not None and not self._widen(rows):
            return 0
        first = self.head
        taken = self._append(batch, timer_index)
        if taken and rows is not None:
            self.envelopes_until = self.special_until = self.head
            self._describe(first, rows if taken == rows.count else rows.slice(0, taken))
        elif taken and self.columns.row_bytes:
            self._describe(first, MessageRows(taken))
        return taken

    def _append(self, batch: FrameBatch, timer_index: int) -> int:
        self.stamp(self.head, self.head, timer_index)
        if self.head == self.floor:
            self._write = 0  # Nothing is kept: use the warm front of the arena again.
        taken = 0
        while taken < batch.count:
            rest = batch if taken == 0 else batch.slice(taken, batch.count)
            room = self._room(rest)
            if room == 0:
                if not self._grow(rest):
                    break
                continue
            self._put(rest if room == rest.count else rest.slice(0, room))
            taken += room
        if taken:
            self._note_peak()
        return taken

    def append_one(self, frame: memoryview, timer_index: int, row: MessageRow | None = None) -> bool:
        """Copy in one frame, numbered and stamped, where there is plainly room for it. `row`
        describes one with an envelope.

        False leaves the ring as it was: `append` then finds out what is to be done.
        """
        head, at, size = self.head, self._write, len(frame)
        held = head - self.floor
        if held == 0:
            at, end = 0, self._size
        else:
            tail = int(self._position[self.floor & self._mask])
            end = self._size if at > tail else tail
        if size > end - at or held >= self._slots or held >= self.messages_max:
            return False
        if row is not None and self.columns.lacks(row):
            return False
        if timer_index != self._stamp:
            self.stamp(head, head, timer_index)
        self._view[at : at + size] = frame
        stamp(self._view, at, head & MESSAGE_ID_MASK, timer_index)
        slot = head & self._mask
        self._position[slot] = at
        self._write = at + size
        self.head = head + 1
        if self.columns.row_bytes:
            self.columns.put_one(slot, row or _PLAIN)
            if row is not None:
                self.columns.use(row.channel, 1)
        if row is not None:
            self.envelopes_until = self.special_until = head + 1
            if row.expires != NEVER or row.not_before != AT_ONCE:
                self.timed_until = head + 1
        self._note_peak()
        return True

    def _describe(self, first: int, rows: MessageRows) -> None:
        """Note what is known of the messages from `first` on, which were just appended."""
        self.columns.put(self._pieces(first, first + rows.count), rows)
        self.columns.use(rows.channels, rows.count)
        if rows.is_timed:
            self.timed_until = first + rows.count

    def _widen(self, rows: MessageRows) -> bool:
        """Have the columns that rows need, if limits and budget allow."""
        missing = self.columns.missing_bytes(rows)
        if missing == 0:
            return True
        more = missing * self._slots
        if self.floor == self.head and self._memory() + more > self.bytes_max:
            self._resize(0, 0)
            more = 0
        if self._memory() + more > self.bytes_max or not self.budget.take(more):
            return False
        try:
            self.columns.add_for(rows, self._slots)
        except MemoryError:
            self.budget.give(more)
            return False
        return True

    def row(self, sequence: int) -> MessageRow:
        """What is known of one message."""
        return self.columns.get_one(sequence & self._mask)

    def rows(self, first: int, last: int) -> MessageRows:
        """What is known of messages first..last-1, copied."""
        return self.columns.get(self._pieces(first, last))

    def channels(self, first: int, last: int) -> Channels | int:
        """Their channels alone, valid until the ring changes; one number if all have the same."""
        return self.columns.channels_in(self._pieces(first, last))

    def rows_at(self, sequences: Integers) -> MessageRows:
        """The same of these messages."""
        return self.columns.get_at(self.slots(sequences))

    def _note_peak(self) -> None:
        self._peak_messages = max(self._peak_messages, self.head - self.floor)
        self._peak_bytes = max(self._peak_bytes, self.frame_bytes)

    def _room(self, batch: FrameBatch) -> int:
        """How many of the batch's frames fit in one piece, wrapping first when that gives more."""
        slots = min(self._slots - len(self), self.messages_max - len(self), batch.count)
        if slots <= 0:
            return 0
        if self.floor == self.head:
            return self._fitting(batch, slots, self._size - self._write)
        tail = self._begin(self.floor)
        if self._write <= tail:
            return self._fitting(batch, slots, tail - self._write)
        fits = self._fitting(batch, slots, self._size - self._write)
        if fits == 0:
            # The end is used up: go on at the front, below the oldest frame.
            fits = self._fitting(batch, slots, tail)
            if fits:
                self._wrap_end = self._write
                self._wrap = self.head
                self._write = 0
        return fits

    @staticmethod
    def _fitting(batch: FrameBatch, most: int, space: int) -> int:
        if batch.ends[most - 1] <= space:
            return most
        if batch.stride:
            return space // batch.stride
        return int(batch.ends.searchsorted(space, side="right"))

    def _put(self, batch: FrameBatch) -> None:
        """Copy a batch that fits to the write position, and describe it in the columns."""
        at, size, count, head = self._write, batch.data.size, batch.count, self.head
        self._arena[at : at + size] = batch.data
        if batch.stride:
            self._place(head, batch.starts, at)
            stride = (batch.stride,)
            headers = np.ndarray((count,), _WORD, self._arena, at + _HEADER_AT, stride)
            headers[:] = self._headers(head, count)
        elif count <= PLAIN_FRAMES_MAX:
            start = at
            for sequence, end in enumerate(batch.ends.tolist(), head):
                stamp(self._view, start, sequence & MESSAGE_ID_MASK, self._stamp)
                self._position[sequence & self._mask] = start
                start = at + end
        else:
            starts = self._place(head, batch.starts, at)
            headers = unaligned(self._arena[_HEADER_AT:], _WORD)
            headers[starts] = self._headers(head, count)
        self._write = at + size
        self.head = head + count

    def _headers(self, first: int, count: int) -> npt.NDArray[np.uint64]:
        """Class, message id and timer index of `count` frames, their bytes in the wire's order."""
        message_id = first & MESSAGE_ID_MASK
        word = self.class_id << 48 | message_id << 16 | self._stamp
        words = np.arange(word, word + (count << 16), 1 << 16, dtype=_WORD)
        if message_id + count > MESSAGE_ID_MASK + 1:
            words &= _NO_ID_OVERFLOW
        return words.byteswap(inplace=True)

    def _place(self, first: int, starts: Integers, at: int) -> Integers:
        """Note that the frames from sequence `first` on begin at `starts` behind `at`, around the
        column's end. Returns where that is."""
        start = first & self._mask
        column = self._position[start : start + starts.size]
        if column.size == starts.size:
            return np.add(starts, at, out=column)
        positions = starts + at
        column[:] = positions[: column.size]
        self._position[: starts.size - column.size] = positions[column.size :]
        return positions

    # Reading -------------------------------------------------------------------------------------

    def piece(self, first: int, last: int, bytes_max: int) -> tuple[memoryview, int]:
        """Frames from `first` on that lie in one piece: their bytes, and the sequence after them.

        Stops before `last`, at the arena's end, or at bytes_max; holds one frame at least. The view
        is valid until the ring changes.
        """
        assert self.floor <= first < last <= self.head, (self.floor, first, last, self.head)
        if first < self._wrap < last:
            last = self._wrap
        begin, end = self._begin(first), self._end(last - 1)
        if end - begin > bytes_max:
            last = max(first + 1, self._search(first, last, begin + bytes_max))
            end = self._end(last - 1)
        return self._view[begin:end], last

    def size(self, first: int, last: int) -> int:
        """Bytes of frames first..last-1."""
        if first >= last:
            return 0
        if first < self._wrap < last:
            return self._wrap_end - self._begin(first) + self._end(last - 1)
        return self._end(last - 1) - self._begin(first)

    def sizes(self, sequences: Integers) -> int:
        """Bytes of these frames."""
        begins, ends = self.places(sequences)
        return int((ends - begins).sum())

    def joined(self, sequences: Integers, timer_index: int) -> bytes:
        """Copies of these frames, one behind the other, which carry this timer index then."""
        begins, ends = self.places(sequences)
        self.stamp(self.head, self.head, timer_index)
        stale = begins[sequences < self._stamped_from] + _TIMER_AT
        unaligned(self._arena, _TIMER)[stale] = timer_index
        view = self._view
        return b"".join([view[a:b] for a, b in zip(begins.tolist(), ends.tolist(), strict=True)])

    def batch(self, first: int, last: int, bytes_max: int) -> tuple[FrameBatch, int]:
        """What `piece` shows, and where each frame begins in it."""
        piece, last = self.piece(first, last, bytes_max)
        starts = [self._position[a:b] for a, b in self._pieces(first, last)]
        bounds = np.concatenate([*starts, [self._end(last - 1)]])
        return FrameBatch(np.frombuffer(piece, np.uint8), bounds - bounds[0], 0), last

    def slots(self, sequences: Integers) -> Integers:
        """Where these messages stand in the columns."""
        return sequences & self._mask

    def places(self, sequences: Integers) -> tuple[Integers, Integers]:
        """Where these frames begin and end in the arena."""
        begins = self._position[sequences & self._mask]
        ends = self._position[(sequences + 1) & self._mask]
        ends[sequences == self._wrap - 1] = self._wrap_end
        ends[sequences == self.head - 1] = self._write
        return begins, ends

    def cut(self, first: int, last: int, count: int) -> tuple[int, int]:
        """Where piece first..last-1 is cut after `count` bytes, fewer than it has.

        Returns the frame at the cut, and how many of its bytes lie behind the cut: 0 when the cut
        is exactly in front of it.
        """
        begin = self._begin(first)
        sequence = self._search(first, last, begin + count)
        if self._begin(sequence) == begin + count:
            return sequence, 0
        return sequence, self._end(sequence) - begin - count

    def stamp(self, first: int, last: int, timer_index: int) -> None:
        """Have frames first..last-1 carry this timer index."""
        if timer_index != self._stamp:
            self._stamp = timer_index
            self._stamped_from = self.head
        last = min(last, self._stamped_from)
        if first >= last:
            return
        view = unaligned(self._arena, _TIMER)
        for start, stop in self._pieces(first, last):
            view[self._position[start:stop] + _TIMER_AT] = timer_index

    def frame(self, sequence: int) -> bytes:
        """A copy of one frame."""
        return bytes(self._view[self._begin(sequence) : self._end(sequence)])

    def _begin(self, sequence: int) -> int:
        return int(self._position[sequence & self._mask])

    def _end(self, sequence: int) -> int:
        after = sequence + 1
        if after == self.head:
            return self._write
        if after == self._wrap:
            return self._wrap_end
        return int(self._position[after & self._mask])

    def _search(self, first: int, last: int, position: int) -> int:
        """The frame in piece first..last-1 that holds the byte at this position, or last."""
        for start, stop in self._pieces(first, last):
            column = self._position[start:stop]
            after = int(column.searchsorted(position, side="right"))
            first += after
            if after < column.size:
                break
        return first - 1 if position < self._end(first - 1) else first

    def _pieces(self, first: int, last: int) -> list[tuple[int, int]]:
        """The slot ranges of first..last-1: one, or two around the end."""
        start = first & self._mask
        stop = start + last - first
        if stop <= self._slots:
            return [(start, stop)]
        return [(start, self._slots), (0, stop - self._slots)]

    # Letting go ----------------------------------------------------------------------------------

    def release(self, floor: int) -> None:
        """Nobody needs the sequences below floor any more."""
        if floor <= self.floor:
            return
        assert floor <= self.head, (floor, self.head)
        if self.columns.channels is not None:
            self.columns.let_go(self._pieces(self.floor, floor))
        self.floor = floor

    def after(self, size: int) -> int:
        """The first sequence with `size` bytes at least kept before it, or the head."""
        first, last = self.floor, self.head
        begin = self._begin(first)
        if first < self._wrap < last:
            before_wrap = self._wrap_end - begin
            if size <= before_wrap:
                last = self._wrap
            else:
                first, begin, size = self._wrap, 0, size - before_wrap
        return min(self._search(first, last, begin + size - 1) + 1, last)

    def reserve(self, messages: int, size: int) -> None:
        """About so many messages of so many bytes are to come: have room for them at once, if
        limits and budget allow."""
        slots = at_least(RING_SLOTS_MIN, min(messages, self.messages_max))
        size = min(max(size, RING_BYTES_MIN), self.bytes_max - slots * self._row_bytes)
        if slots > self._slots and size > self._size:
            self._resize(slots, size)

    def trim(self) -> None:
        """Give back what is held beyond the limits, as far as it is not needed and worth a move."""
        if self._memory() > self.bytes_max or self.budget.left < 0:
            slots = at_least(RING_SLOTS_MIN, len(self)) if len(self) else 0
            size = self.bytes_max - slots * self._row_bytes if self.budget.left >= 0 else 0
            size = max(self.frame_bytes, min(self._size, size))
            if 8 * (size + slots * self._row_bytes) <= 7 * self._memory():
                self._resize(slots, size)
        is_above = self._memory() > self.bytes_max or len(self) > self.messages_max
        self.exceeds = is_above or self.budget.left < 0

    def free(self) -> None:
        """Let go of everything, and of the memory: it is used no more, or `begin` follows."""
        self.release(self.head)
        self._resize(0, 0)

    def tick(self) -> bool:
        """Once per tick: give memory back that was long not needed. Returns whether all was."""
        if self.exceeds:
            self.trim()
        self._idle_ticks += 1
        if self._idle_ticks < RING_IDLE_TICKS or self._slots == 0:
            return self._slots == 0
        slots = at_least(RING_SLOTS_MIN, 2 * self._peak_messages)
        size = at_least(RING_BYTES_MIN, 2 * self._peak_bytes)
        if self._peak_messages == 0:
            slots = size = 0
        if 2 * slots <= self._slots or 2 * size <= self._size:
            self._resize(min(slots, self._slots), min(size, self._size))
        self._idle_ticks = 0
        self._peak_messages, self._peak_bytes = len(self), self.frame_bytes
        return self._slots == 0

    # Memory --------------------------------------------------------------------------------------

    def _memory(self) -> int:
        return self._size + self._slots * self._row_bytes

    @property
    def _row_bytes(self) -> int:
        """Memory that one slot takes in all columns."""
        return _POSITION.itemsize + self.columns.row_bytes

    def may_grow(self, batch: FrameBatch) -> bool:
        """Whether its own limits allow the memory for one more frame of the batch."""
        wish = self._wish(batch)
        return wish != (self._slots, self._size) and wish[1] - self.frame_bytes >= batch.ends[0]

    def _wish(self, batch: FrameBatch) -> tuple[int, int]:
        """Slots and bytes for one frame of the batch at least, as far as its own limits allow."""
        longest_next, row_bytes = int(batch.ends[0]), self._row_bytes
        slots, size = self._slots, self._size
        if len(self) >= self.messages_max:
            return slots, size
        slots = max(RING_SLOTS_MIN, 2 * slots) if len(self) == slots else slots
        if len(self) == 0 and self.bytes_max - slots * row_bytes < longest_next:
            slots = RING_SLOTS_MIN  # A column for very many small frames gives way.
        if self._room_bytes() < longest_next:
            size = max(RING_BYTES_MIN, 2 * size)
            while size - self.frame_bytes < longest_next:
                size *= 2
        return slots, min(size, self.bytes_max - slots * row_bytes)

    def _grow(self, batch: FrameBatch) -> bool:
        """Make room for one frame of the batch at least, if limits and budget allow."""
        slots, size = self._wish(batch)
        # Where the budget does not pay for twice as much, it may pay for enough to be worth a move.
        affordable = self._memory() + self.budget.left - slots * self._row_bytes
        if self._size + self._size // 8 < affordable < size:
            size = affordable
        if (slots, size) == (self._slots, self._size) or size - self.frame_bytes < batch.ends[0]:
            return False
        return self._resize(slots, size)

    def _room_bytes(self) -> int:
        """Longest frame that the arena would take now."""
        if self.floor == self.head:
            return self._size
        tail = self._begin(self.floor)
        return max(self._size - self._write, tail) if self._write > tail else tail - self._write

    def _resize(self, slots: int, size: int) -> bool:
        """Move everything kept into new arrays, oldest frame first."""
        memory = size + slots * self._row_bytes
        more = max(0, memory - self._memory())
        if not self.budget.take(more):
            return False
        try:
            arena, position = allocate(size, _BYTE), allocate(slots, _POSITION)
            blank = self.columns.blank(slots)
        except (OSError, MemoryError):  # The system has less than the budget promised.
            self.budget.give(more)
            return False
        old_arena, old_position = self._arena, self._position
        old_pieces = self._pieces(self.floor, self.head) if len(self) else []
        rows = self.columns.get(old_pieces) if old_pieces else MessageRows(0)
        segments = [(self.floor, self.head)]
        if self.floor < self._wrap < self.head:
            segments = [(self.floor, self._wrap), (self._wrap, self.head)]
        bounds = [(self._begin(a), self._end(b - 1)) for a, b in segments if a < b]
        positions = np.concatenate([old_position[:0]] + [old_position[a:b] for a, b in old_pieces])
        give = max(0, self._memory() - memory)
        self._set_arrays(arena, position)
        self.budget.give(give)
        at = done = 0
        for (first, last), (begin, end) in zip(segments, bounds, strict=False):
            self._arena[at : at + end - begin] = old_arena[begin:end]
            positions[done : done + last - first] += at - begin
            done += last - first
            at += end - begin
        if positions.size:
            self._place(self.floor, positions, 0)
        if self.columns.row_bytes:
            self.columns.resize(rows, blank, self._pieces(self.floor, self.head) if at else [])
        self._write = at
        self._wrap = self.floor
        return True

    def _set_arrays(self, arena: npt.NDArray[np.uint8], position: npt.NDArray[np.int64]) -> None:
        assert position.size == 0 or position.size.bit_count() == 1, position.size
        self._arena, self._position = arena, position
        self._view = arena.data
        self._slots, self._size, self._mask = position.size, arena.size, position.size - 1

    def check(self) -> None:
        """Raise AssertionError unless the invariants hold."""
        assert self.floor <= self.head <= self.floor + self._slots, vars(self)
        assert self.exceeds or len(self) <= self.messages_max
        assert self.exceeds or self._memory() <= self.bytes_max
        if len(self):
            sequences = np.arange(self.floor, self.head)
            begins, ends = self.places(sequences)
            lengths, fours = ends - begins, unaligned(self._arena, _FOUR)
            assert 0 <= begins.min() <= ends.max() <= self._size, (sequences, begins, ends)
            assert lengths.min() >= FRAME_BYTES_MIN, (sequences, begins, ends)
            assert not self.floor < self._wrap < self.head or self._begin(self._wrap) == 0
            assert (fours[ends - len(DELIMITER)] == _DELIMITER).all(), (sequences, begins, ends)
            ids = fours[begins + 3]
            assert (ids == sequences & MESSAGE_ID_MASK).all(), (ids, sequences)
            assert lengths.sum() == self.frame_bytes, (lengths, self.frame_bytes)
        if self.columns.channels is not None:
            carried = self.rows(self.floor, self.head).channels
            uses = np.bincount(carried, minlength=self.columns.uses.size)
            assert (uses[1:] == self.columns.uses[1:]).all()
