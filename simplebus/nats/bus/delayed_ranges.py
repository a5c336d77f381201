"""Ranges of delayed messages, ordered by the time at which they are due."""

from __future__ import annotations

import heapq
import itertools
from typing import NamedTuple

from simplebus.core.message_class.message_class import MessageClass
from simplebus.core.subscription.delayed_wakeups import NEVER

_EXAMINED_PER_PUSH = 2
_EXAMINED_ENTRIES_MIN = 1024


class DelayedRange(NamedTuple):
    """Consecutive messages of a class that are due at the same time."""

    due_at: float
    order: int
    """Number that orders entries of the same time; unique."""
    cls: MessageClass
    first: int
    last: int
    """The sequence after the last message."""


class DelayedRanges:
    """Priority queue of delayed messages.

    Messages may be released before they are due, for example by a purge. Whenever the number of
    entries has doubled, the following calls of `push` examine all of them, a few at a time, and
    remove the released ones. So the stored messages bound the number of entries.
    """

    def __init__(self) -> None:
        self._heap: list[DelayedRange] = []
        self._unexamined: list[DelayedRange] = []
        """Heap of the entries that are still to be examined."""
        self._entries_max = _EXAMINED_ENTRIES_MIN
        self._order = itertools.count()

    def __len__(self) -> int:
        return len(self._heap) + len(self._unexamined)

    @property
    def next_due_time(self) -> float:
        """Time of the next due message; NEVER if there is none."""
        return min(heap[0].due_at if heap else NEVER for heap in (self._heap, self._unexamined))

    def push(self, due_at: float, cls: MessageClass, first: int, last: int) -> None:
        """Add messages `first` to `last` - 1 of a class."""
        heapq.heappush(self._heap, DelayedRange(due_at, next(self._order), cls, first, last))
        if not self._unexamined and len(self._heap) > self._entries_max:
            self._heap, self._unexamined = [], self._heap
        if self._unexamined:
            self._examine_some()

    def pop(self) -> DelayedRange:
        """Remove and return the messages that are due first. There must be some."""
        heaps = [heap for heap in (self._heap, self._unexamined) if heap]
        return heapq.heappop(min(heaps, key=lambda heap: heap[0]))

    def put_back(self, entry: DelayedRange, first: int) -> None:
        """Add the rest of a removed entry, from message `first` on, at its former place."""
        heapq.heappush(self._heap, entry._replace(first=first))

    def _examine_some(self) -> None:
        for _ in range(min(_EXAMINED_PER_PUSH, len(self._unexamined))):
            entry = self._unexamined.pop()  # Without its last entry, a heap is still a heap.
            if entry.last > entry.cls.ring.floor:
                heapq.heappush(self._heap, entry)
        if not self._unexamined:
            self._entries_max = max(_EXAMINED_ENTRIES_MIN, 2 * len(self._heap))
