"""The lowest floor of a class's positions, found without looking at all of them.

Rule 1: a floor only grows. What was noted of a position is never too high, so the lowest note is
the lowest floor as soon as it is right; a note is put right once for each move, not at each look.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from simplebus.core.subscription.subscription import BrokerSubscription

# Notes about positions that are gone are thrown away when they are the most, and not so few.
_STALE_ENTRIES_MIN = 64


class FloorIndex:
    """See the module's law."""

    def __init__(self) -> None:
        self._number_by_position: dict[BrokerSubscription, int] = {}
        """Each position's, so that notes of equal floors have an order."""
        self._next_number = 0
        self._heap: list[tuple[int, int, BrokerSubscription]] = []
        """A heap of floors, as they were when they were looked at last, and whose they are."""

    def __len__(self) -> int:
        """How many notes are kept."""
        return len(self._heap)

    def add(self, position: BrokerSubscription) -> None:
        self._number_by_position[position] = self._next_number
        heapq.heappush(self._heap, (position.window.floor, self._next_number, position))
        self._next_number += 1

    def remove(self, position: BrokerSubscription) -> None:
        del self._number_by_position[position]
        if len(self._heap) > max(2 * len(self._number_by_position), _STALE_ENTRIES_MIN):
            self._heap = [
                (p.window.floor, number, p) for p, number in self._number_by_position.items()
            ]
            heapq.heapify(self._heap)

    def lowest_floor(self) -> int:
        """The lowest floor of all; there must be one."""
        notes = self._heap
        while True:
            noted, number, position = notes[0]
            if position not in self._number_by_position:
                heapq.heappop(notes)
                continue
            floor = position.window.floor
            if floor == noted:
                return floor
            heapq.heapreplace(notes, (floor, number, position))
