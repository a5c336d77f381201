"""Which messages of a class one subscription has acknowledged.

Rule 1: this file knows sequences, never messages. It holds no payloads and no subscribers.
Rule 2: acknowledging is idempotent. Acking twice, or acking what was never sent, changes nothing.

        floor             furthest         cursor
    ──────┼──■──■■■────■─────┼────────────────┼──────
     acked│ acked out of order: one mark each │ not sent
"""

from __future__ import annotations

import numpy as np

from simplebus.core.limits import MESSAGE_ID_BITS, MESSAGE_ID_MASK, PLAIN_FRAMES_MAX
from simplebus.core.protocol.frames import Flags, Integers

_HALF = 1 << (MESSAGE_ID_BITS - 1)
_MARKS_MIN = 1024

# Ranges of more messages than this, on average, are marked one range after the other.
_LONG_RANGE = 64


def nearest_sequence(message_id: int, floor: int) -> int:
    """The sequence with this message id that is nearest to the floor: protocol section "Acks"."""
    return floor + ((message_id - floor + _HALF) & MESSAGE_ID_MASK) - _HALF


class AckWindow:
    """The window between what is acknowledged for good and what was sent.

    Invariant: floor <= furthest <= cursor, or furthest <= floor and nothing is marked.
    """

    def __init__(self, *, floor: int) -> None:
        self.floor = floor
        """Every sequence below it is acknowledged."""
        self.cursor = floor
        """The next sequence to send."""
        self._furthest = floor
        """No sequence at or above it is marked."""
        self._marks = bytearray()
        """1 for each sequence acknowledged out of order, at sequence & mask; 0 elsewhere."""
        self._view: Flags = np.empty(0, np.bool_)
        self._mask = -1

    @property
    def in_flight(self) -> int:
        """Messages sent and not acknowledged."""
        return self.cursor - self.floor - self._marked()

    @property
    def marks_bytes(self) -> int:
        """Memory that acks out of order hold."""
        return len(self._marks)

    def sequences(self, firsts: Integers, lasts: Integers) -> tuple[Integers, Integers]:
        """Ack ranges of wire ids as ranges of sequences, by the nearest-id rule."""
        lowest = self.floor - _HALF
        begins = firsts - lowest
        begins &= MESSAGE_ID_MASK
        begins += lowest
        ends = lasts - firsts
        ends += begins
        return begins, ends

    def ack(self, firsts: Integers, lasts: Integers) -> bool:
        """Acknowledge the ranges firsts[i]..lasts[i]-1: sent, below the floor, or empty.

        Returns whether the floor moved.
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
            firsts, lasts = _merged(firsts, lasts)
            firsts = np.maximum(firsts, self.floor)
            counts = np.maximum(lasts - firsts, 0)
            ends = np.cumsum(counts)
            if ends[-1] > _LONG_RANGE * ends.size:  # An index for each message would cost memory.
                for first, last in zip(firsts.tolist(), lasts.tolist(), strict=True):
                    if first < last:
                        self.ack_range(first, last)
                return self.floor != before
            firsts = np.repeat(firsts - (ends - counts), counts) + np.arange(ends[-1])
        else:
            firsts = firsts[firsts >= self.floor]
        if firsts.size:
            self._reserve()
            self._furthest = max(self._furthest, int(firsts.max()) + 1)
            self._view[firsts & self._mask] = True
            self._advance()
        return self.floor != before

    def ack_range(self, first: int, last: int) -> None:
        """Acknowledge first..last-1. In order it is O(1); what is below the floor is ignored."""
        assert last <= self.cursor, (first, last, self.cursor)
        if last <= self.floor:
            return
        if first <= self.floor:
            if self._furthest <= self.floor:
                self.floor = last
                return
            first = self.floor
        self._reserve()
        self._mark(first, last, 1)
        self._furthest = max(self._furthest, last)
        self._advance()

    def skip_to(self, floor: int) -> int:
        """Give up everything below floor. Returns how many that were not acknowledged."""
        if floor <= self.floor:
            return 0
        lost = floor - self.floor
        if self._furthest > self.floor:
            end = min(floor, self._furthest)
            lost -= self._count(self.floor, end)
            self._mark(self.floor, end, 0)
        self.floor = floor
        self.cursor = max(self.cursor, floor)
        self._advance()
        return lost

    def unacked(self, first: int, last: int) -> list[tuple[int, int]]:
        """The half-open ranges within first..last-1 that were sent and not acknowledged."""
        first, last = max(first, self.floor), min(last, self.cursor)
        if first >= last:
            return []
        if self._furthest <= first:
            return [(first, last)]
        marked = np.zeros(last - first + 2, np.int8)
        marked[0] = marked[-1] = 1
        body = marked[1:-1]
        end = min(last, self._furthest)
        done = 0
        for start, stop in self._pieces(first, end):
            body[done : done + stop - start] = self._view[start:stop]
            done += stop - start
        steps = np.diff(marked)
        begins = np.flatnonzero(steps == -1) + first
        ends = np.flatnonzero(steps == 1) + first
        return list(zip(begins.tolist(), ends.tolist(), strict=True))

    def gaps(self) -> tuple[Integers, int]:
        """What was sent and is not acknowledged: these sequences, and all from this one on."""
        found = [np.zeros(0, np.int64)]
        at = self.floor
        for start, stop in self._pieces(self.floor, self._furthest):
            found.append(np.flatnonzero(~self._view[start:stop]) + at)
            at += stop - start
        return np.concatenate(found), max(self.floor, self._furthest)

    def union(self, other: AckWindow) -> AckWindow:
        """A window in which what either of the two was sent and has not acknowledged is not
        acknowledged; nor what the other one was sent, and this one not yet."""
        cursor = max(self.cursor, other.cursor)
        open_ranges = [
            r for window in (self, other) for r in window.unacked(window.floor, window.cursor)
        ]
        if self.cursor < cursor:
            open_ranges.append((self.cursor, cursor))
        joined = AckWindow(floor=min([first for first, _ in open_ranges], default=cursor))
        joined.cursor = cursor
        reached = joined.floor
        for first, last in [*sorted(open_ranges), (cursor, cursor)]:
            if reached < first:
                joined.ack_range(reached, first)
            reached = max(reached, last)
        return joined

    def marks(self) -> bytes:
        """What is acknowledged from the floor on: a bit each, the first one highest."""
        pieces = self._pieces(self.floor, self._furthest)
        flags = [self._view[start:stop] for start, stop in pieces]
        return np.packbits(np.concatenate(flags)).tobytes() if flags else b""

    def set_marks(self, marks: bytes) -> None:
        """Acknowledge what these say, in a window in which nothing is; up to the cursor."""
        flags = np.unpackbits(np.frombuffer(marks, np.uint8))[: self.cursor - self.floor]
        acked = np.flatnonzero(flags)
        if acked.size:
            self._reserve()
            self._furthest = self.floor + int(acked[-1]) + 1
            self._view[(acked + self.floor) & self._mask] = True
            self._advance()

    def release_memory(self) -> None:
        """Give the marks' memory back when nothing is marked."""
        if self._furthest <= self.floor and self._marks:
            self._view = np.empty(0, np.bool_)
            self._marks = bytearray()
            self._mask = -1

    def check(self) -> None:
        """Raise AssertionError unless the invariant holds."""
        assert self.floor <= self.cursor, vars(self)
        assert self._furthest <= max(self.cursor, self.floor), vars(self)
        if self._furthest > self.floor:
            assert len(self._marks) >= self._furthest - self.floor
            assert not self._marks[self.floor & self._mask], "the floor itself is marked"
            assert self._marked() == self._view.sum(), "a mark outlived the floor"
        else:
            assert not self._view.any(), "a mark outlived the floor"

    def _marked(self) -> int:
        return self._count(self.floor, self._furthest)

    def _count(self, first: int, last: int) -> int:
        return sum(int(np.count_nonzero(self._view[a:b])) for a, b in self._pieces(first, last))

    def _pieces(self, first: int, last: int) -> list[tuple[int, int]]:
        """The index ranges of first..last-1 in the marks: none, one, or two around the end."""
        if first >= last:
            return []
        size = len(self._marks)
        start = first & self._mask
        stop = start + last - first
        if stop <= size:
            return [(start, stop)]
        return [(start, size), (0, stop - size)]

    def _mark(self, first: int, last: int, value: int) -> None:
        for start, stop in self._pieces(first, last):
            self._view[start:stop] = value

    def _reserve(self) -> None:
        """Room for a mark on every message sent."""
        size = self.cursor - self.floor
        if size <= len(self._marks):
            return
        grown = AckWindow(floor=self.floor)
        grown._marks = bytearray(max(_MARKS_MIN, 1 << (size - 1).bit_length()))
        grown._view = np.frombuffer(grown._marks, np.bool_)
        grown._mask = len(grown._marks) - 1
        at = self.floor
        for start, stop in self._pieces(self.floor, self._furthest):
            for new_start, new_stop in grown._pieces(at, at + stop - start):
                length = new_stop - new_start
                grown._view[new_start:new_stop] = self._view[start : start + length]
                start += length
                at += length
        self._marks, self._view, self._mask = grown._marks, grown._view, grown._mask

    def _advance(self) -> None:
        """Move the floor over what is marked, clearing the marks behind it."""
        floor = self.floor
        if floor >= self._furthest:
            return
        for start, stop in self._pieces(floor, self._furthest):
            gap = self._marks.find(0, start, stop)
            end = stop if gap < 0 else gap
            self._view[start:end] = False
            floor += end - start
            if gap >= 0:
                break
        self.floor = floor


def _merged(firsts: Integers, lasts: Integers) -> tuple[Integers, Integers]:
    """The same sequences as disjoint ranges in ascending order."""
    order = np.argsort(firsts, kind="stable")
    firsts, lasts = firsts[order], np.maximum.accumulate(lasts[order])
    begins = np.flatnonzero(np.r_[True, firsts[1:] > lasts[:-1]])
    return firsts[begins], lasts[np.r_[begins[1:] - 1, lasts.size - 1]]
