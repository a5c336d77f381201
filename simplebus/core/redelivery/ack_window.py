"""Sliding window of the sequences that a position has acknowledged.

Acknowledging is idempotent: acking twice, or acking sequences below the floor, changes nothing.

          floor          flags_end          cursor
    ────────┼──■──■■■────■───┼────────────────┼───────
    acked   │  acked out of order: one flag   │ not sent
"""

from __future__ import annotations

import numpy as np

from simplebus.core.limits import MESSAGE_ID_BITS, MESSAGE_ID_MASK, PLAIN_FRAMES_MAX
from simplebus.core.protocol.frames import Flags, Integers
from simplebus.core.redelivery.sequence_set import SequenceSet

_HALF_ID_SPACE = 1 << (MESSAGE_ID_BITS - 1)
_FLAGS_MIN = 1024

# Longer ranges, on average, are flagged one by one: an index per message would cost memory.
_RANGE_MEAN_MAX = 64
# The messages of up to this many ranges are counted range by range, of more with one array.
_COUNTED_ONE_BY_ONE_MAX = 16


def nearest_sequence(message_id: int, floor: int) -> int:
    """Return the sequence with this message id nearest to `floor` (binary.md, "Message ids")."""
    return floor + ((message_id - floor + _HALF_ID_SPACE) & MESSAGE_ID_MASK) - _HALF_ID_SPACE


class AckWindow:
    """Acknowledged sequences between the floor and the cursor of a position.

    Invariant: floor <= flags_end <= cursor, or flags_end <= floor and no flag is set.
    """

    def __init__(self, *, floor: int) -> None:
        self.floor = floor
        """Lowest sequence that is not acknowledged."""
        self.cursor = floor
        """Next sequence to send."""
        self._flags_end = floor
        """End of the flags: no sequence at or above `_flags_end` has a flag."""
        self._flag_bytes = bytearray()
        """1 for each sequence acknowledged out of order, at index `sequence & mask`; else 0."""
        self._flags: Flags = np.empty(0, np.bool_)
        self._mask = -1
        self._flag_count: int | None = 0
        """Number of flags that are set; None if they must be counted."""

    @property
    def in_flight_count(self) -> int:
        """Number of messages behind the cursor that are not acknowledged.

        It includes messages that wait for redelivery, which `Position` does not count as in flight.
        """
        if self._flags_end <= self.floor:
            return self.cursor - self.floor
        if self._flag_count is None:
            self._flag_count = self._count_flags(self.floor, self._flags_end)
        return self.cursor - self.floor - self._flag_count

    @property
    def flagged_span(self) -> int:
        """Number of messages that `encode_flags` describes."""
        return max(0, self._flags_end - self.floor)

    @property
    def flags_bytes(self) -> int:
        """Memory of the flags."""
        return len(self._flag_bytes)

    def ids_to_sequences(self, firsts: Integers, lasts: Integers) -> tuple[Integers, Integers]:
        """Convert ack ranges of message ids to ranges of sequences, by the nearest-id rule.

        Args:
            firsts: First message ids, shape (n,).
            lasts: Exclusive ends, shape (n,).
        """
        lowest = self.floor - _HALF_ID_SPACE
        begins = firsts - lowest
        begins &= MESSAGE_ID_MASK
        begins += lowest
        ends = lasts - firsts
        ends += begins
        return begins, ends

    def ack_ranges(self, firsts: Integers, lasts: Integers) -> bool:
        """Acknowledge the ranges firsts[i]..lasts[i]-1.

        The messages of a range must be below the cursor. Ranges may be empty.

        Returns:
            True if the floor moved.
        """
        before = self.floor
        if firsts.size <= PLAIN_FRAMES_MAX:
            for first, last in zip(firsts.tolist(), lasts.tolist(), strict=True):
                if first < last:
                    self.ack_range(first, last)
            return self.floor != before
        if firsts[0] <= self.floor and (firsts[1:] == lasts[:-1]).all():
            self.ack_range(int(firsts[0]), int(lasts[-1]))
            return self.floor != before
        assert lasts.max() <= self.cursor, (lasts.max(), self.cursor)
        if (lasts - firsts != 1).any():
            firsts, lasts = _merge_ranges(firsts, lasts)
            firsts = np.maximum(firsts, self.floor)
            counts = np.maximum(lasts - firsts, 0)
            ends = np.cumsum(counts)
            if ends[-1] > _RANGE_MEAN_MAX * ends.size:
                # An index for each message would cost memory.
                for first, last in zip(firsts.tolist(), lasts.tolist(), strict=True):
                    if first < last:
                        self.ack_range(first, last)
                return self.floor != before
            firsts = np.repeat(firsts - (ends - counts), counts) + np.arange(ends[-1])
        else:
            firsts = firsts[firsts >= self.floor]
        if firsts.size:
            self._grow_flags()
            self._flags_end = max(self._flags_end, int(firsts.max()) + 1)
            self._flags[firsts & self._mask] = True
            self._flag_count = None
            self._advance_floor()
        return self.floor != before

    def ack_range(self, first: int, last: int) -> None:
        """Acknowledge first..last-1. O(1) if in order; sequences below the floor are ignored."""
        assert last <= self.cursor, (first, last, self.cursor)
        if last <= self.floor:
            return
        if first <= self.floor:
            if self._flags_end <= self.floor:
                self.floor = last
                return
            first = self.floor
        self._grow_flags()
        if self._flag_count is not None:
            self._flag_count += last - first - self._count_flags(first, last)
        self._set_flags(first, last, 1)
        self._flags_end = max(self._flags_end, last)
        self._advance_floor()

    def skip_to(self, floor: int) -> int:
        """Move the floor to `floor`. Returns the number of skipped messages that were not
        acknowledged.
        """
        if floor <= self.floor:
            return 0
        skipped_count = floor - self.floor
        if self._flags_end > self.floor:
            end = min(floor, self._flags_end)
            flag_count = self._count_flags(self.floor, end)
            skipped_count -= flag_count
            if self._flag_count is not None:
                self._flag_count -= flag_count
            self._set_flags(self.floor, end, 0)
        self.floor = floor
        self.cursor = max(self.cursor, floor)
        self._advance_floor()
        return skipped_count

    def unacked_ranges(self, first: int, last: int) -> list[tuple[int, int]]:
        """Return the half-open ranges within first..last-1 that were sent and not acknowledged."""
        first, last = max(first, self.floor), min(last, self.cursor)
        if first >= last:
            return []
        if self._flags_end <= first:
            return [(first, last)]
        is_wanted = np.ones(last - first + 2, np.bool_)
        is_wanted[0] = is_wanted[-1] = False
        firsts, lasts = self._find_unacked(first, is_wanted)
        return list(zip(firsts.tolist(), lasts.tolist(), strict=True))

    def unacked_set(self, sequences: SequenceSet) -> SequenceSet:
        """Return the messages of a set that were sent and not acknowledged."""
        firsts, lasts = sequences.bounds
        if not firsts:
            return SequenceSet()
        first, last = max(firsts[0], self.floor), min(lasts[-1], self.cursor)
        if first >= last:
            return SequenceSet()
        if len(firsts) == 1:
            is_wanted = np.ones(last - first + 2, np.bool_)
            is_wanted[0] = is_wanted[-1] = False
            return SequenceSet.from_arrays(*self._find_unacked(first, is_wanted))
        is_wanted = _flag_members(sequences, first, last)
        return SequenceSet.from_arrays(*self._find_unacked(first, is_wanted))

    def find_first_unacked(self, first: int, last: int) -> int | None:
        """Return the first of first..last-1 that was sent and not acknowledged, or None."""
        first, last = max(first, self.floor), min(last, self.cursor)
        for start, stop in self._index_ranges(first, min(last, self._flags_end)):
            index = int(self._flags[start:stop].argmin())
            if not self._flags[start + index]:
                return first + index
            first += stop - start
        return first if first < last else None

    def count_unacked(self, first: int, last: int) -> int:
        """Return how many of first..last-1 were sent and not acknowledged."""
        first, last = max(first, self.floor), min(last, self.cursor)
        if first >= last:
            return 0
        return last - first - self._count_flags(first, min(last, self._flags_end))

    def are_unacked(self, sequences: Integers) -> Flags:
        """Return True for each of `sequences` that was sent and not acknowledged."""
        is_unacked: Flags = (sequences >= self.floor) & (sequences < self.cursor)
        has_flag = is_unacked & (sequences < self._flags_end)
        is_unacked[has_flag] = ~self._flags[sequences[has_flag] & self._mask]
        return is_unacked

    def count_unacked_set(self, sequences: SequenceSet) -> int:
        """Return how many messages of a set were sent and not acknowledged."""
        if sequences.range_count <= _COUNTED_ONE_BY_ONE_MAX:
            return sum(self.count_unacked(first, last) for first, last in sequences)
        firsts, lasts = sequences.bounds
        first, last = max(firsts[0], self.floor), min(lasts[-1], self.cursor)
        if first >= last:
            return 0
        is_wanted = _flag_members(sequences, first, last)
        self._clear_acked(first, is_wanted[1:-1])
        return int(np.count_nonzero(is_wanted))

    def _find_unacked(self, first: int, is_wanted: Flags) -> tuple[Integers, Integers]:
        """Return the bounds of the ranges of flagged messages that are not acknowledged.

        Args:
            first: First message, at or above the floor.
            is_wanted: Flags of the messages from `first` on, enclosed by two False flags. The array
                is changed.
        """
        self._clear_acked(first, is_wanted[1:-1])
        edges = np.flatnonzero(is_wanted[1:] != is_wanted[:-1]) + first
        return edges[::2], edges[1::2]

    def _clear_acked(self, first: int, is_wanted: Flags) -> None:
        """Clear the flags of acknowledged messages from `first` on."""
        cleared_count = 0
        for start, stop in self._index_ranges(first, min(first + is_wanted.size, self._flags_end)):
            part = is_wanted[cleared_count : cleared_count + stop - start]
            np.greater(part, self._flags[start:stop], out=part)
            cleared_count += stop - start

    def unacked_flags(self) -> Flags:
        """Return flags of the unacknowledged messages from the floor to the last acknowledged."""
        acked = [self._flags[a:b] for a, b in self._index_ranges(self.floor, self._flags_end)]
        return ~np.concatenate(acked) if acked else np.zeros(0, np.bool_)

    def unacked_sequences(self) -> tuple[Integers, int]:
        """Return the unacknowledged sequences below `_flags_end`, and the sequence from which on
        all are unacknowledged.
        """
        found = [np.zeros(0, np.int64)]
        sequence = self.floor
        for start, stop in self._index_ranges(self.floor, self._flags_end):
            found.append(np.flatnonzero(~self._flags[start:stop]) + sequence)
            sequence += stop - start
        return np.concatenate(found), max(self.floor, self._flags_end)

    def merge_unacked(self, other: AckWindow) -> AckWindow:
        """Return a window with the unacknowledged messages of both windows.

        Messages that only `other` was sent count as unacknowledged, too.
        """
        first, cursor = min(self.floor, other.floor), max(self.cursor, other.cursor)
        acked: Flags = np.ones(cursor - first, np.bool_)
        for window in (self, other):
            acked[window.floor - first : window.cursor - first] &= window._acked_flags()
        acked[self.cursor - first :] = False
        floor = first + (int(acked.argmin()) if not acked.all() else acked.size)
        joined = AckWindow(floor=floor)
        joined.cursor = cursor
        joined.restore_acked(acked[floor - first :])
        return joined

    def _acked_flags(self) -> Flags:
        """Return flags of the acknowledged messages from the floor to the cursor."""
        acked: Flags = np.zeros(self.cursor - self.floor, np.bool_)
        copied_count = 0
        for start, stop in self._index_ranges(self.floor, self._flags_end):
            acked[copied_count : copied_count + stop - start] = self._flags[start:stop]
            copied_count += stop - start
        return acked

    def encode_flags(self) -> bytes:
        """Return the flags from the floor on as a bitmap, most significant bit first."""
        if self._flags_end <= self.floor:
            return b""
        pieces = self._index_ranges(self.floor, self._flags_end)
        flags = [self._flags[start:stop] for start, stop in pieces]
        return np.packbits(np.concatenate(flags)).tobytes() if flags else b""

    def restore_flags(self, bitmap: bytes) -> None:
        """Set the flags of a bitmap from `encode_flags`, up to the cursor. The window has no flags
        yet.
        """
        acked = np.unpackbits(np.frombuffer(bitmap, np.uint8))[: self.cursor - self.floor]
        self.restore_acked(acked.view(np.bool_))

    def restore_acked(self, acked: Flags) -> None:
        """Set the flags of the messages from the floor on, up to the cursor. The window has no
        flags yet.
        """
        count, restored_count = int(np.count_nonzero(acked)), 0
        if count:
            self._grow_flags()
            self._flags_end = self.floor + acked.size - int(acked[::-1].argmax())
            for start, stop in self._index_ranges(self.floor, self._flags_end):
                self._flags[start:stop] = acked[restored_count : restored_count + stop - start]
                restored_count += stop - start
            self._flag_count = count
            self._advance_floor()

    def release_memory(self) -> None:
        """Free the memory of the flags if none is set."""
        if self._flags_end <= self.floor and self._flag_bytes:
            self._flags = np.empty(0, np.bool_)
            self._flag_bytes = bytearray()
            self._mask = -1

    def check(self) -> None:
        """Raise AssertionError unless the invariant holds."""
        assert self.floor <= self.cursor, vars(self)
        assert self._flags_end <= max(self.cursor, self.floor), vars(self)
        if self._flags_end > self.floor:
            assert len(self._flag_bytes) >= self._flags_end - self.floor
            assert not self._flag_bytes[self.floor & self._mask], "the floor has a flag"
            flag_count = self._count_flags(self.floor, self._flags_end)
            assert flag_count == self._flags.sum(), "a flag outside of floor and flags_end is set"
            assert self._flag_count in (None, flag_count), (self._flag_count, flag_count)
        else:
            assert not self._flags.any(), "a flag below the floor is set"
            assert not self._flag_count, self._flag_count

    def _count_flags(self, first: int, last: int) -> int:
        return sum(
            int(np.count_nonzero(self._flags[a:b])) for a, b in self._index_ranges(first, last)
        )

    def _index_ranges(self, first: int, last: int) -> list[tuple[int, int]]:
        """Return the index ranges of first..last-1 in the flags: none, one, or two."""
        if first >= last:
            return []
        flag_count = len(self._flag_bytes)
        start = first & self._mask
        stop = start + last - first
        if stop <= flag_count:
            return [(start, stop)]
        return [(start, flag_count), (0, stop - flag_count)]

    def _set_flags(self, first: int, last: int, value: int) -> None:
        for start, stop in self._index_ranges(first, last):
            self._flags[start:stop] = value

    def _grow_flags(self) -> None:
        """Make room for a flag for every message sent."""
        size = self.cursor - self.floor
        if size <= len(self._flag_bytes):
            return
        grown = AckWindow(floor=self.floor)
        grown._flag_bytes = bytearray(max(_FLAGS_MIN, 1 << (size - 1).bit_length()))
        grown._flags = np.frombuffer(grown._flag_bytes, np.bool_)
        grown._mask = len(grown._flag_bytes) - 1
        sequence = self.floor
        for start, stop in self._index_ranges(self.floor, self._flags_end):
            for new_start, new_stop in grown._index_ranges(sequence, sequence + stop - start):
                length = new_stop - new_start
                grown._flags[new_start:new_stop] = self._flags[start : start + length]
                start += length
                sequence += length
        self._flag_bytes, self._flags, self._mask = grown._flag_bytes, grown._flags, grown._mask

    def _advance_floor(self) -> None:
        """Move the floor to the first gap and clear the flags behind it."""
        floor = self.floor
        if floor >= self._flags_end:
            return
        for start, stop in self._index_ranges(floor, self._flags_end):
            gap = self._flag_bytes.find(0, start, stop)
            end = stop if gap < 0 else gap
            self._flags[start:end] = False
            floor += end - start
            if gap >= 0:
                break
        if self._flag_count is not None:
            self._flag_count -= floor - self.floor
        self.floor = floor


def _flag_members(sequences: SequenceSet, first: int, last: int) -> Flags:
    """Return flags of first..last-1 that are True for members of the set, enclosed by two False
    flags.
    """
    steps = np.zeros(last - first + 2, np.int8)
    begins, ends = (np.array(bounds).clip(first, last) for bounds in sequences.bounds)
    np.add.at(steps, begins - first + 1, 1)
    np.subtract.at(steps, ends - first + 1, 1)
    flags: Flags = np.cumsum(steps, dtype=np.int8).view(np.bool_)
    return flags


def _merge_ranges(firsts: Integers, lasts: Integers) -> tuple[Integers, Integers]:
    """Return the same sequences as disjoint ranges in ascending order."""
    order = np.argsort(firsts, kind="stable")
    firsts, lasts = firsts[order], np.maximum.accumulate(lasts[order])
    begins = np.flatnonzero(np.r_[True, firsts[1:] > lasts[:-1]])
    return firsts[begins], lasts[np.r_[begins[1:] - 1, lasts.size - 1]]
