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

from simplebus.core.group.key_hash import hash_bytes
from simplebus.core.protocol.frames import Words

HASH_BUCKET_COUNT = 4096
"""As many as low bits of a lane are looked at."""
HASH_BUCKET_MASK = HASH_BUCKET_COUNT - 1
"""These bits."""

MemberT = TypeVar("MemberT")

_MIX_FACTOR_1, _MIX_FACTOR_2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_GOLDEN_RATIO = np.uint64(0x9E3779B97F4A7C15)
_BUCKET_HASHES: Words = np.arange(1, HASH_BUCKET_COUNT + 1, dtype=np.uint64) * _GOLDEN_RATIO


class KeyAssignment(Generic[MemberT]):
    """Of one group."""

    def __init__(self) -> None:
        self._members: list[MemberT] = []
        self._index_by_member: dict[MemberT, int] = {}
        """By member, where in that list it is."""
        self._seeds: Words = np.zeros(16, np.uint64)
        """Of those in the list, and room for more."""
        self._buckets_by_member: dict[MemberT, set[int]] = {}
        """By member, what it has."""
        self._best_weights: Words = np.zeros(HASH_BUCKET_COUNT, np.uint64)
        """By share, the weight of who has it."""
        self.owner_by_bucket: list[MemberT | None] = [None] * HASH_BUCKET_COUNT
        """By share, who has it."""

    def __bool__(self) -> bool:
        return bool(self._members)

    def __contains__(self, member: MemberT) -> bool:
        return member in self._index_by_member

    def owner_of(self, partition: int) -> MemberT | None:
        """Whose a lane is; None while nobody is there."""
        return self.owner_by_bucket[partition & HASH_BUCKET_MASK]

    def add_member(self, member: MemberT, identity: str) -> set[MemberT]:
        """One more, who is not there. `identity` tells it from the others: the same one has the
        same lanes when it comes again. Returns who had before what it has now."""
        seed = np.uint64(hash_bytes(identity.encode()))
        place = self._index_by_member[member] = len(self._members)
        self._members.append(member)
        if place == len(self._seeds):
            self._seeds = np.concatenate([self._seeds, self._seeds])
        self._seeds[place] = seed
        weights = _rendezvous_weights(_BUCKET_HASHES, seed)
        mine = np.flatnonzero(weights > self._best_weights)
        self._best_weights[mine] = weights[mine]
        shares, table, former = mine.tolist(), self.owner_by_bucket, set[MemberT]()
        for share in shares:
            owner = table[share]
            if owner is not None:
                self._buckets_by_member[owner].discard(share)
                former.add(owner)
            table[share] = member
        self._buckets_by_member[member] = set(shares)
        return former

    def remove_member(self, member: MemberT) -> None:
        """One less, who is there."""
        place, last = self._index_by_member.pop(member), self._members.pop()
        if last is not member:
            self._members[place], self._index_by_member[last] = last, place
            self._seeds[place] = self._seeds[len(self._members)]
        shares = sorted(self._buckets_by_member.pop(member))
        if not self._members:
            self._best_weights[:] = 0
            self.owner_by_bucket = [None] * HASH_BUCKET_COUNT
        elif shares:
            self._reassign_buckets(shares)

    def _reassign_buckets(self, buckets: list[int]) -> None:
        """These are to be had by somebody else."""
        others = self._members
        seeds = self._seeds[: len(others)]
        weights = _rendezvous_weights(_BUCKET_HASHES[buckets][:, None], seeds[None, :])
        chosen = weights.argmax(axis=1)
        self._best_weights[buckets] = weights[np.arange(len(buckets)), chosen]
        for share, index in zip(buckets, chosen.tolist(), strict=True):
            owner = others[index]
            self.owner_by_bucket[share] = owner
            self._buckets_by_member[owner].add(share)

    def check_invariants(self) -> None:
        """Raise AssertionError unless everybody has the shares for which his weight is greatest."""
        assert self._index_by_member == {member: at for at, member in enumerate(self._members)}
        found: dict[MemberT, set[int]] = {member: set() for member in self._members}
        places: list[int] = []
        for share, owner in enumerate(self.owner_by_bucket):
            if owner is not None:
                found[owner].add(share)
                places.append(self._index_by_member[owner])
        assert self._buckets_by_member == found
        assert len(places) == (HASH_BUCKET_COUNT if self._members else 0)
        if places:
            weights = _rendezvous_weights(
                _BUCKET_HASHES[:, None], self._seeds[None, : len(self._members)]
            )
            assert (weights.max(axis=1) == self._best_weights).all()
            assert (weights[np.arange(HASH_BUCKET_COUNT), places] == self._best_weights).all()


def _rendezvous_weights(bucket_hashes: Words, seeds: Words | np.uint64) -> Words:
    """How much each member wants each share: numbers that look like chance. Above 0 but for one of
    2^64."""
    words: Words = bucket_hashes ^ seeds
    words = (words ^ (words >> np.uint64(30))) * _MIX_FACTOR_1
    words = (words ^ (words >> np.uint64(27))) * _MIX_FACTOR_2
    return words ^ (words >> np.uint64(31))
