"""Least-loaded selection of queue group members."""

from __future__ import annotations

import heapq
from typing import Generic, Protocol, TypeVar

# Stale heap entries are dropped when they outnumber the current ones, and these are this many.
_STALE_ENTRIES_MIN = 64


class LoadedMember(Protocol):
    """Member whose load decides when it is served next."""

    @property
    def assigned_count(self) -> int: ...

    @property
    def last_assigned_turn(self) -> int: ...


MemberT = TypeVar("MemberT", bound=LoadedMember)


class LeastLoadedMembers(Generic[MemberT]):
    """Priority queue of the members of a queue group that can accept messages.

    Ordered by assigned messages, then by least recently served. Entries are replaced lazily:
    `update` pushes a new entry and `least_loaded` skips stale ones, so both are O(log n).
    """

    def __init__(self) -> None:
        self._load_by_member: dict[MemberT, tuple[int, int]] = {}
        """Assigned messages and last turn of each member."""
        self._heap: list[tuple[int, int, MemberT]] = []
        """Heap of (assigned messages, last turn, member), with stale entries of earlier loads."""

    def __len__(self) -> int:
        """Return the number of members that can accept messages."""
        return len(self._load_by_member)

    def update(self, member: MemberT) -> None:
        """Add `member`, or move it after its load has changed."""
        load = (member.assigned_count, member.last_assigned_turn)
        if self._load_by_member.get(member) != load:
            self._load_by_member[member] = load
            heapq.heappush(self._heap, (*load, member))
            self._drop_stale_entries()

    def remove(self, member: MemberT) -> None:
        """Remove `member`, which cannot accept messages or has left."""
        if self._load_by_member.pop(member, None) is not None:
            self._drop_stale_entries()

    def least_loaded(self) -> MemberT:
        """Return the next member to serve. Raises IndexError if no member can accept messages."""
        heap = self._heap
        while True:
            count, turn, member = heap[0]
            if self._load_by_member.get(member) == (count, turn):
                return member
            heapq.heappop(heap)

    def _drop_stale_entries(self) -> None:
        if len(self._heap) > max(2 * len(self._load_by_member), _STALE_ENTRIES_MIN):
            self._heap = [(*load, member) for member, load in self._load_by_member.items()]
            heapq.heapify(self._heap)

    def check_invariants(self) -> None:
        """Raise AssertionError unless the entries match the loads of the members."""
        for member, load in self._load_by_member.items():
            assert load == (member.assigned_count, member.last_assigned_turn), (
                load,
                member.assigned_count,
                member.last_assigned_turn,
            )
            assert (*load, member) in self._heap
        if self._load_by_member:
            assert self._load_by_member[self.least_loaded()] == min(self._load_by_member.values())
