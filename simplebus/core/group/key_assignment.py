"""Assignment of partitions to the members of a key-ordered group, by rendezvous hashing.

The assignment depends only on which members are present, not on the order in which they joined.
Partitions are grouped into buckets, so that a lookup costs the same for any number of partitions.
Adding a member examines each bucket once. Removing a member examines, for each of its buckets, all
remaining members.
"""

from __future__ import annotations

from typing import Generic, TypeVar

import numpy as np

from simplebus.core.group.key_hash import hash_bytes
from simplebus.core.protocol.frames import Words

HASH_BUCKET_COUNT = 4096
"""Buckets of partitions. The low bits of a partition select its bucket."""
HASH_BUCKET_MASK = HASH_BUCKET_COUNT - 1
"""Mask of the low bits that select the bucket of a partition."""

MemberT = TypeVar("MemberT")

# Buckets whose weights are computed at once: those of 500 members fit into a processor's cache.
_BUCKETS_WEIGHED = 64

_MIX_FACTOR_1, _MIX_FACTOR_2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_GOLDEN_RATIO = np.uint64(0x9E3779B97F4A7C15)
_BUCKET_HASHES: Words = np.arange(1, HASH_BUCKET_COUNT + 1, dtype=np.uint64) * _GOLDEN_RATIO


class KeyAssignment(Generic[MemberT]):
    """Owner of every partition bucket of one group."""

    def __init__(self) -> None:
        self._members: list[MemberT] = []
        self._index_by_member: dict[MemberT, int] = {}
        """Index of each member in the list."""
        self._seeds: Words = np.zeros(16, np.uint64)
        """Hash seed of each member in the list, with spare room."""
        self._buckets_by_member: dict[MemberT, set[int]] = {}
        """Buckets that each member owns."""
        self._best_weights: Words = np.zeros(HASH_BUCKET_COUNT, np.uint64)
        """Weight of each bucket's owner."""
        self._owner_by_bucket: list[MemberT | None] = [None] * HASH_BUCKET_COUNT
        """Owner of each bucket; None also for orphans."""
        self._orphans: list[int] = []
        """Buckets of removed members, which get an owner when `assign_orphans` is called, or when
        the owner is needed.
        """

    def __bool__(self) -> bool:
        return bool(self._members)

    def __contains__(self, member: MemberT) -> bool:
        return member in self._index_by_member

    @property
    def known_owner_by_bucket(self) -> list[MemberT | None]:
        """Owner of each bucket, or None before `assign_orphans` has determined it.

        The list must not be changed, and not be kept.
        """
        return self._owner_by_bucket

    @property
    def owner_by_bucket(self) -> list[MemberT | None]:
        """Owner of each bucket. The list must not be changed, and not be kept."""
        self.assign_orphans()
        return self._owner_by_bucket

    def owner_of(self, partition: int) -> MemberT | None:
        """Return the member that serves a partition, or None if there are no members."""
        return self.owner_by_bucket[partition & HASH_BUCKET_MASK]

    def add_member(self, member: MemberT, identity: str) -> set[MemberT]:
        """Add a new member and return the members that lost buckets to it.

        The same `identity` gets the same partitions when the member joins again.
        """
        self.assign_orphans()
        seed = np.uint64(hash_bytes(identity.encode()))
        index = self._index_by_member[member] = len(self._members)
        self._members.append(member)
        if index == len(self._seeds):
            self._seeds = np.concatenate([self._seeds, self._seeds])
        self._seeds[index] = seed
        weights = _rendezvous_weights(_BUCKET_HASHES, seed)
        won_buckets = np.flatnonzero(weights > self._best_weights)
        self._best_weights[won_buckets] = weights[won_buckets]
        buckets, owners = won_buckets.tolist(), self._owner_by_bucket
        former_owners = {owner for bucket in buckets if (owner := owners[bucket]) is not None}
        won = self._buckets_by_member[member] = set(buckets)
        for owner in former_owners:
            self._buckets_by_member[owner] -= won
        for bucket in buckets:
            owners[bucket] = member
        return former_owners

    def remove_member(self, member: MemberT) -> None:
        """Remove a member. Its buckets are assigned to the others by `assign_orphans`, or when an
        owner is asked for, so that many members can leave at once.
        """
        index, last = self._index_by_member.pop(member), self._members.pop()
        if last is not member:
            self._members[index], self._index_by_member[last] = last, index
            self._seeds[index] = self._seeds[len(self._members)]
        buckets = self._buckets_by_member.pop(member)
        for bucket in buckets:
            self._owner_by_bucket[bucket] = None
        self._orphans += buckets
        if not self._members:
            self._best_weights[:] = 0
            self._orphans.clear()

    def assign_orphans(self, weights_max: int | None = None) -> bool:
        """Assign buckets of removed members to the remaining ones.

        Args:
            weights_max: Approximate number of weights to compute; None for unlimited.

        Returns:
            False if some buckets are left.
        """
        members, count = self._members, len(self._orphans)
        if not count:
            return True
        if weights_max is not None:
            count = min(count, max(1, weights_max // len(members)))
        buckets, self._orphans = sorted(self._orphans[:count]), self._orphans[count:]
        seeds = self._seeds[: len(members)]
        for start in range(0, len(buckets), _BUCKETS_WEIGHED):
            weighed_buckets = buckets[start : start + _BUCKETS_WEIGHED]
            weights = _rendezvous_weights(_BUCKET_HASHES[weighed_buckets][:, None], seeds[None, :])
            chosen = weights.argmax(axis=1)
            self._best_weights[weighed_buckets] = weights[np.arange(len(weighed_buckets)), chosen]
            for bucket, index in zip(weighed_buckets, chosen.tolist(), strict=True):
                owner = members[index]
                self._owner_by_bucket[bucket] = owner
                self._buckets_by_member[owner].add(bucket)
        return not self._orphans

    def check_invariants(self) -> None:
        """Raise AssertionError unless each bucket's owner has the greatest weight."""
        assert self._index_by_member == {
            member: index for index, member in enumerate(self._members)
        }
        buckets_by_member: dict[MemberT, set[int]] = {member: set() for member in self._members}
        owner_indexes: list[int] = []
        for bucket, owner in enumerate(self.owner_by_bucket):
            if owner is not None:
                buckets_by_member[owner].add(bucket)
                owner_indexes.append(self._index_by_member[owner])
        assert self._buckets_by_member == buckets_by_member
        assert len(owner_indexes) == (HASH_BUCKET_COUNT if self._members else 0)
        if owner_indexes:
            weights = _rendezvous_weights(
                _BUCKET_HASHES[:, None], self._seeds[None, : len(self._members)]
            )
            assert (weights.max(axis=1) == self._best_weights).all()
            assert (
                weights[np.arange(HASH_BUCKET_COUNT), owner_indexes] == self._best_weights
            ).all()


def _rendezvous_weights(bucket_hashes: Words, seeds: Words | np.uint64) -> Words:
    """Return the weight of each member for each bucket: pseudo-random 64-bit numbers."""
    words: Words = bucket_hashes ^ seeds
    words = (words ^ (words >> np.uint64(30))) * _MIX_FACTOR_1
    words = (words ^ (words >> np.uint64(27))) * _MIX_FACTOR_2
    return words ^ (words >> np.uint64(31))
