"""The lowest floor of a class's positions, found without looking at all of them.

Rule 1: a floor only grows. What was noted of a position is never too high, so the lowest note is
the lowest floor as soon as it is right; a note is put right once for each move, not at each look.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from simplebus.core.subscription.subscription import Subscription

# Notes about positions that are gone are thrown away when they are the most, and not so few.
_NOTES_MIN = 64


class Floors:
    """See the module's law."""

    def __init__(self) -> None:
        self._numbers: dict[Subscription, int] = {}
        """Each position's, so that notes of equal floors have an order."""
        self._next = 0
        self._notes: list[tuple[int, int, Subscription]] = []
        """A heap of floors, as they were when they were looked at last, and whose they are."""

    def __len__(self) -> int:
        """How many notes are kept."""
        return len(self._notes)

    def add(self, position: Subscription) -> None:
        self._numbers[position] = self._next
        heapq.heappush(self._notes, (position.window.floor, self._next, position))
        self._next += 1

    def remove(self, position: Subscription) -> None:
        del self._numbers[position]
        if len(self._notes) > max(2 * len(self._numbers), _NOTES_MIN):
            self._notes = [(p.window.floor, number, p) for p, number in self._numbers.items()]
            heapq.heapify(self._notes)

    def lowest(self) -> int:
        """The lowest floor of all; there must be one."""
        notes = self._notes
        while True:
            noted, number, position = notes[0]
            if position not in self._numbers:
                heapq.heappop(notes)
                continue
            floor = position.window.floor
            if floor == noted:
                return floor
            heapq.heapreplace(notes, (floor, number, position))
