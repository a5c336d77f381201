"""Who of a group may be handed more: the member with the fewest messages first, and of those with
as many the one that was handed something longest ago.

Rule 1: whoever changes what a member has says so. Asking who is first then costs the same however
many members there are.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from simplebus.core.group.group import Member

# Places that are no longer right are thrown away when they are the most, and not so few.
_PLACES_MIN = 64


class Takers:
    """Of one group."""

    def __init__(self) -> None:
        self._places: dict[Member, tuple[int, int]] = {}
        """By how much each one has, and when it was handed something last."""
        self._heap: list[tuple[int, int, Member]] = []
        """The same, and places that somebody had before."""

    def __len__(self) -> int:
        """How many there are."""
        return len(self._places)

    def put(self, member: Member) -> None:
        """This one has room, and so much."""
        place = (member.held, member.turn)
        if self._places.get(member) != place:
            self._places[member] = place
            heapq.heappush(self._heap, (*place, member))
            self._tidy()

    def remove(self, member: Member) -> None:
        """This one has none, or is gone."""
        if self._places.pop(member, None) is not None:
            self._tidy()

    def first(self) -> Member:
        """The one that is to be handed something; there must be one."""
        heap = self._heap
        while True:
            held, turn, member = heap[0]
            if self._places.get(member) == (held, turn):
                return member
            heapq.heappop(heap)

    def _tidy(self) -> None:
        if len(self._heap) > max(2 * len(self._places), _PLACES_MIN):
            self._heap = [(*place, member) for member, place in self._places.items()]
            heapq.heapify(self._heap)

    def check(self) -> None:
        """Raise AssertionError unless everybody's place is the right one."""
        for member, place in self._places.items():
            assert place == (member.held, member.turn), (place, member.held, member.turn)
            assert (*place, member) in self._heap
        if self._places:
            assert self._places[self.first()] == min(self._places.values())
