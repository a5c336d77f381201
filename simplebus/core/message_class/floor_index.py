"""Lowest floor of a class's positions, without scanning all of them.

A floor only grows, so a heap entry is never higher than the floor it stands for. Only the top entry
is corrected, when the lowest floor is requested.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from simplebus.core.subscription.position import Position

# The heap is rebuilt if it has more entries than this and most belong to removed positions.
_STALE_ENTRIES_MIN = 64
# Entries that are corrected one by one.
_CORRECTIONS_MAX = 64


class FloorIndex:
    """Heap of positions by floor, with entries that are corrected lazily."""

    def __init__(self) -> None:
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
            self._rebuild()

    def lowest_floor(self) -> int:
        """Return the lowest floor. There must be at least one position."""
        heap = self._heap
        for _ in range(_CORRECTIONS_MAX):
            entry_floor, number = heap[0]
            position = self._position_by_number.get(number)
            if position is None:
                heapq.heappop(heap)
                continue
            floor = position.window.floor
            if floor == entry_floor:
                return floor
            heapq.heapreplace(heap, (floor, number))
        self._rebuild()  # Corrects many entries in less time.
        return self._heap[0][0]

    def _rebuild(self) -> None:
        self._heap = [
            (position.window.floor, number) for number, position in self._position_by_number.items()
        ]
        heapq.heapify(self._heap)
