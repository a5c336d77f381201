"""Least-loaded selection of queue group members."""

from __future__ import annotations

import heapq
from typing import Generic, Protocol, TypeVar

# A heap has at most this many members, because dropping its stale entries takes time for each.
_HEAP_MEMBERS_MAX = 512

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

    Ordered by assigned messages, then by least recently served. Up to 512 members are in one heap:
    methods take O(log n) on average, and O(n) when stale entries are dropped. More members are in
    several heaps, whose first entries `least_loaded` compares.
    """

    def __init__(self) -> None:
        self._heaps: list[_LoadHeap[MemberT]] = []
        """None is empty."""
        self._heap_by_member: dict[MemberT, _LoadHeap[MemberT]] = {}

    def __len__(self) -> int:
        """Return the number of members that can accept messages."""
        return len(self._heap_by_member)

    def update(self, member: MemberT) -> None:
        """Add `member`, or move it after its load has changed."""
        heap = self._heap_by_member.get(member)
        if heap is None:
            heap = self._heap_by_member[member] = self._find_heap_with_space()
        heap.update(member)

    def _find_heap_with_space(self) -> _LoadHeap[MemberT]:
        for heap in self._heaps:
            if len(heap) < _HEAP_MEMBERS_MAX:
                return heap
        heap = _LoadHeap[MemberT]()
        self._heaps.append(heap)
        return heap

    def remove(self, member: MemberT) -> None:
        """Remove `member`, which cannot accept messages or has left."""
        heap = self._heap_by_member.pop(member, None)
        if heap is not None:
            heap.remove(member)
            if not heap:
                self._heaps.remove(heap)

    def least_loaded(self) -> MemberT:
        """Return the next member to serve. Raises IndexError if no member can accept messages."""
        heaps = self._heaps
        if len(heaps) > 1:
            return min(heap.find_first() for heap in heaps)[2]
        return heaps[0].find_first()[2]

    def check_invariants(self) -> None:
        """Raise AssertionError unless the entries match the loads of the members."""
        assert sum(map(len, self._heaps)) == len(self._heap_by_member)
        for heap in self._heaps:
            assert 0 < len(heap) <= _HEAP_MEMBERS_MAX
            heap.check_invariants()


class _LoadHeap(Generic[MemberT]):
    """Heap of members by load.

    Entries are replaced lazily: `update` pushes a new entry and `find_first` skips stale ones.
    """

    def __init__(self) -> None:
        self._load_by_member: dict[MemberT, tuple[int, int]] = {}
        """Assigned messages and last turn of each member."""
        self._entries: list[tuple[int, int, MemberT]] = []
        """Heap of (assigned messages, last turn, member), with stale entries of earlier loads."""

    def __len__(self) -> int:
        """Return the number of members."""
        return len(self._load_by_member)

    def update(self, member: MemberT) -> None:
        """Add `member`, or move it after its load has changed."""
        load = (member.assigned_count, member.last_assigned_turn)
        if self._load_by_member.get(member) != load:
            self._load_by_member[member] = load
            heapq.heappush(self._entries, (*load, member))
            self._drop_stale_entries()

    def remove(self, member: MemberT) -> None:
        """Remove a member."""
        del self._load_by_member[member]
        self._drop_stale_entries()

    def find_first(self) -> tuple[int, int, MemberT]:
        """Return (assigned messages, last turn, member) of the least loaded member. There must be
        one.
        """
        entries = self._entries
        while True:
            count, turn, member = first = entries[0]
            if self._load_by_member.get(member) == (count, turn):
                return first
            heapq.heappop(entries)

    def _drop_stale_entries(self) -> None:
        if len(self._entries) > max(2 * len(self._load_by_member), _STALE_ENTRIES_MIN):
            self._entries = [(*load, member) for member, load in self._load_by_member.items()]
            heapq.heapify(self._entries)

    def check_invariants(self) -> None:
        """Raise AssertionError unless the entries match the loads of the members."""
        for member, load in self._load_by_member.items():
            assert load == (member.assigned_count, member.last_assigned_turn), (
                load,
                member.assigned_count,
                member.last_assigned_turn,
            )
            assert (*load, member) in self._entries
        assert self._load_by_member[self.find_first()[2]] == min(self._load_by_member.values())
