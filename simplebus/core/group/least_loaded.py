"""Who of a group may be handed more: the member with the fewest messages first, and of those with
as many the one that was handed something longest ago.

Rule 1: whoever changes what a member has says so. Asking who is first then costs the same however
many members there are.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from simplebus.core.group.group import GroupMember

# Places that are no longer right are thrown away when they are the most, and not so few.
_STALE_ENTRIES_MIN = 64


class LeastLoadedMembers:
    """Of one group."""

    def __init__(self) -> None:
        self._load_by_member: dict[GroupMember, tuple[int, int]] = {}
        """By how much each one has, and when it was handed something last."""
        self._heap: list[tuple[int, int, GroupMember]] = []
        """The same, and places that somebody had before."""

    def __len__(self) -> int:
        """How many there are."""
        return len(self._load_by_member)

    def update(self, member: GroupMember) -> None:
        """This one has room, and so much."""
        place = (member.assigned_count, member.last_assigned_turn)
        if self._load_by_member.get(member) != place:
            self._load_by_member[member] = place
            heapq.heappush(self._heap, (*place, member))
            self._drop_stale_entries()

    def remove(self, member: GroupMember) -> None:
        """This one has none, or is gone."""
        if self._load_by_member.pop(member, None) is not None:
            self._drop_stale_entries()

    def least_loaded(self) -> GroupMember:
        """The one that is to be handed something; there must be one."""
        heap = self._heap
        while True:
            held, turn, member = heap[0]
            if self._load_by_member.get(member) == (held, turn):
                return member
            heapq.heappop(heap)

    def _drop_stale_entries(self) -> None:
        if len(self._heap) > max(2 * len(self._load_by_member), _STALE_ENTRIES_MIN):
            self._heap = [(*place, member) for member, place in self._load_by_member.items()]
            heapq.heapify(self._heap)

    def check_invariants(self) -> None:
        """Raise AssertionError unless everybody's place is the right one."""
        for member, place in self._load_by_member.items():
            assert place == (member.assigned_count, member.last_assigned_turn), (
                place,
                member.assigned_count,
                member.last_assigned_turn,
            )
            assert (*place, member) in self._heap
        if self._load_by_member:
            assert self._load_by_member[self.least_loaded()] == min(self._load_by_member.values())
