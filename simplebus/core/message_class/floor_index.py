"""Lowest floor of a class's positions, without scanning all of them.

A floor only grows, so a heap entry is never higher than the floor it stands for. Only the top
entries are corrected, when the lowest floor is requested.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

from simplebus.core.limits import FLOOR_CORRECTIONS_MAX

if TYPE_CHECKING:
    from simplebus.core.subscription.position import Position

# The heap is rebuilt if it has more entries than this and most belong to removed positions.
_STALE_ENTRIES_MIN = 64


class FloorIndex:
    """Heap of positions by floor, with entries that are corrected lazily."""

    def __init__(self) -> None:
        self.is_exact = True
        """False if the last `lowest_floor` reached its limit."""
        self._number_by_position: dict[Position, int] = {}
        """A unique number per position, which orders entries with equal floors."""
        self._position_by_number: dict[int, Position] = {}
        self._next_number = 0
        self._heap: list[tuple[int, int]] = []
        """Entries (floor, number). The floor is the one at the last correction. Entries do not hold
        the positions, so that each of them is freed when it is removed.
        """

    def __len__(self) -> int:
        """Return the number of heap entries."""
        return len(self._heap)

    def add(self, position: Position) -> None:
        number, self._next_number = self._next_number, self._next_number + 1
        self._number_by_position[position] = number
        self._position_by_number[number] = position
        heapq.heappush(self._heap, (position.window.floor, number))

    def remove(self, position: Position) -> None:
        del self._position_by_number[self._number_by_position.pop(position)]
        if len(self._heap) > max(2 * len(self._number_by_position), _STALE_ENTRIES_MIN):
            self._heap = [entry for entry in self._heap if entry[1] in self._position_by_number]
            heapq.heapify(self._heap)

    def lowest_floor(self) -> int:
        """Return the lowest floor. There must be at least one position.

        One call corrects at most FLOOR_CORRECTIONS_MAX entries. If that is not enough, the result
        may be too low, `is_exact` is False, and the next call continues.
        """
        heap = self._heap
        for _ in range(FLOOR_CORRECTIONS_MAX):
            entry_floor, number = heap[0]
            position = self._position_by_number.get(number)
            if position is None:
                heapq.heappop(heap)
                continue
            floor = position.window.floor
            if floor == entry_floor:
                self.is_exact = True
                return floor
            heapq.heapreplace(heap, (floor, number))
        self.is_exact = False
        return heap[0][0]
