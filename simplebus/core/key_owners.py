"""Which member of a group has which lanes, by rendezvous hashing.

Rule 1: who has a lane follows from who is there, not from who came or went before: a lane moves
when its member goes, and to a member that comes.
Rule 2: lanes are dealt out in shares of equal size, so that finding a lane's member costs the same
however many there are; coming and going costs a look at each share.
"""

from __future__ import annotations

from typing import Generic, TypeVar

import numpy as np

from simplebus.core.frames import Words
from simplebus.core.key_hash import hash_of

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
        self._seeds: dict[T, np.uint64] = {}
        self._best: Words = np.zeros(SHARES, np.uint64)
        """By share, the weight of who has it."""
        self.table: list[T | None] = [None] * SHARES
        """By share, who has it."""

    def __bool__(self) -> bool:
        return bool(self._seeds)

    def __contains__(self, member: T) -> bool:
        return member in self._seeds

    def of(self, lane: int) -> T | None:
        """Whose a lane is; None while nobody is there."""
        return self.table[lane & OWNERS_MASK]

    def add(self, member: T, identity: str) -> None:
        """One more, who is not there. `identity` tells it from the others: the same one has the
        same lanes when it comes again."""
        seed = np.uint64(hash_of(identity.encode()))
        self._seeds[member] = seed
        weights = _weights(_NUMBERS, seed)
        mine = np.flatnonzero(weights > self._best)
        self._best[mine] = weights[mine]
        for share in mine.tolist():
            self.table[share] = member

    def remove(self, member: T) -> None:
        """One less, who is there."""
        del self._seeds[member]
        shares = [share for share, owner in enumerate(self.table) if owner is member]
        if not self._seeds:
            self._best[:] = 0
            self.table = [None] * SHARES
            return
        others = list(self._seeds)
        seeds = np.fromiter(self._seeds.values(), np.uint64, len(others))
        weights = _weights(_NUMBERS[shares][:, None], seeds[None, :])
        chosen = weights.argmax(axis=1)
        self._best[shares] = weights[np.arange(len(shares)), chosen]
        for share, index in zip(shares, chosen.tolist(), strict=True):
            self.table[share] = others[index]

    def check(self) -> None:
        """Raise AssertionError unless everybody has the shares for which his weight is greatest."""
        for share, owner in enumerate(self.table):
            number = _NUMBERS[share : share + 1]
            weights = {m: int(_weights(number, seed)[0]) for m, seed in self._seeds.items()}
            if not weights:
                assert owner is None
            else:
                assert owner is not None
                assert weights[owner] == max(weights.values())


def _weights(numbers: Words, seeds: Words | np.uint64) -> Words:
    """How much each member wants each share: numbers that look like chance. Above 0 but for one of
    2^64."""
    words: Words = numbers ^ seeds
    words = (words ^ (words >> np.uint64(30))) * _FIRST
    words = (words ^ (words >> np.uint64(27))) * _SECOND
    return words ^ (words >> np.uint64(31))
