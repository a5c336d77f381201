"""Which member of a group has which lanes, by rendezvous hashing.

Rule 1: who has a lane follows from who is there, not from who came or went before: a lane moves
when its member goes, and to a member that comes.
Rule 2: lanes are dealt out in shares of equal size, so that finding a lane's member costs the same
however many there are; coming costs a look at each share, going one at each member for the shares
that it had. Members that come or go one after the other cost as much each.
"""

from __future__ import annotations

from typing import Generic, TypeVar

import numpy as np

from simplebus.core.group.key_hash import hash_of
from simplebus.core.protocol.frames import Words

SHARES = 4096
"""As many as low bits of a lane are looked at."""
OWNERS_MASK = SHARES - 1
"""These bits."""

T = TypeVar("T")

_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_NUMBERS: Words = np.arange(1, SHARES + 1, dtype=np.uint64) * _GOLDEN


class Owners(Generic[T]):
    """Of one group."""

    def __init__(self) -> None:
        self._members: list[T] = []
        self._places: dict[T, int] = {}
        """By member, where in that list it is."""
        self._seeds: Words = np.zeros(16, np.uint64)
        """Of those in the list, and room for more."""
        self._shares: dict[T, set[int]] = {}
        """By member, what it has."""
        self._best: Words = np.zeros(SHARES, np.uint64)
        """By share, the weight of who has it."""
        self.table: list[T | None] = [None] * SHARES
        """By share, who has it."""

    def __bool__(self) -> bool:
        return bool(self._members)

    def __contains__(self, member: T) -> bool:
        return member in self._places

    def of(self, lane: int) -> T | None:
        """Whose a lane is; None while nobody is there."""
        return self.table[lane & OWNERS_MASK]

    def add(self, member: T, identity: str) -> set[T]:
        """One more, who is not there. `identity` tells it from the others: the same one has the
        same lanes when it comes again. Returns who had before what it has now."""
        seed = np.uint64(hash_of(identity.encode()))
        place = self._places[member] = len(self._members)
        self._members.append(member)
        if place == len(self._seeds):
            self._seeds = np.concatenate([self._seeds, self._seeds])
        self._seeds[place] = seed
        weights = _weights(_NUMBERS, seed)
        mine = np.flatnonzero(weights > self._best)
        self._best[mine] = weights[mine]
        shares, table, former = mine.tolist(), self.table, set[T]()
        for share in shares:
            owner = table[share]
            if owner is not None:
                self._shares[owner].discard(share)
                former.add(owner)
            table[share] = member
        self._shares[member] = set(shares)
        return former

    def remove(self, member: T) -> None:
        """One less, who is there."""
        place, last = self._places.pop(member), self._members.pop()
        if last is not member:
            self._members[place], self._places[last] = last, place
            self._seeds[place] = self._seeds[len(self._members)]
        shares = sorted(self._shares.pop(member))
        if not self._members:
            self._best[:] = 0
            self.table = [None] * SHARES
        elif shares:
            self._deal(shares)

    def _deal(self, shares: list[int]) -> None:
        """These are to be had by somebody else."""
        others = self._members
        seeds = self._seeds[: len(others)]
        weights = _weights(_NUMBERS[shares][:, None], seeds[None, :])
        chosen = weights.argmax(axis=1)
        self._best[shares] = weights[np.arange(len(shares)), chosen]
        for share, index in zip(shares, chosen.tolist(), strict=True):
            owner = others[index]
            self.table[share] = owner
            self._shares[owner].add(share)

    def check(self) -> None:
        """Raise AssertionError unless everybody has the shares for which his weight is greatest."""
        assert self._places == {member: at for at, member in enumerate(self._members)}
        found: dict[T, set[int]] = {member: set() for member in self._members}
        places: list[int] = []
        for share, owner in enumerate(self.table):
            if owner is not None:
                found[owner].add(share)
                places.append(self._places[owner])
        assert self._shares == found
        assert len(places) == (SHARES if self._members else 0)
        if places:
            weights = _weights(_NUMBERS[:, None], self._seeds[None, : len(self._members)])
            assert (weights.max(axis=1) == self._best).all()
            assert (weights[np.arange(SHARES), places] == self._best).all()


def _weights(numbers: Words, seeds: Words | np.uint64) -> Words:
    """How much each member wants each share: numbers that look like chance. Above 0 but for one of
    2^64."""
    words: Words = numbers ^ seeds
    words = (words ^ (words >> np.uint64(30))) * _FIRST
    words = (words ^ (words >> np.uint64(27))) * _SECOND
    return words ^ (words >> np.uint64(31))
