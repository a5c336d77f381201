"""Sets of sequences, stored as ranges."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from itertools import chain, pairwise

import numpy as np

from simplebus.core.protocol.frames import Flags, Integers

# Up to this many ranges are inserted one by one; more are merged in one pass.
_INSERT_ONE_BY_ONE_MAX = 16

# With this many times fewer ranges, a loop over them is faster than arrays of all ranges.
_ARRAY_COST_FACTOR = 8


class SequenceSet:
    """Set of sequences, stored as half-open ranges.

    The ranges ascend; none is empty, and none touches the next.
    """

    def __init__(self) -> None:
        self._firsts: list[int] = []
        self._lasts: list[int] = []
        self._count = 0

    @classmethod
    def from_bounds(cls, firsts: list[int], lasts: list[int]) -> SequenceSet:
        """Return a set of the ranges firsts[i]..lasts[i]-1, which ascend and do not touch. The
        lists belong to the set.
        """
        result = cls()
        result._firsts, result._lasts, result._count = firsts, lasts, sum(lasts) - sum(firsts)
        return result

    @classmethod
    def from_arrays(cls, firsts: Integers, lasts: Integers) -> SequenceSet:
        """Return the same set from arrays."""
        result = cls()
        result._set_bounds(firsts, lasts)
        return result

    @classmethod
    def from_ranges(cls, firsts: Integers, lasts: Integers) -> SequenceSet:
        """Return a set of ranges in any order, which may overlap, or be empty."""
        is_filled = firsts < lasts
        result = cls()
        if is_filled.any():
            result._set_union(firsts[is_filled], lasts[is_filled])
        return result

    @classmethod
    def union(cls, sets: list[SequenceSet]) -> SequenceSet:
        """Return the union of sets, which are not empty: the only one of them, or a new set."""
        if len(sets) == 1:
            return sets[0]
        result = cls()
        firsts, lasts = (
            np.array(list(chain.from_iterable(each.bounds[index] for each in sets)))
            for index in (0, 1)
        )
        result._set_union(firsts, lasts)
        return result

    def _set_bounds(self, firsts: Integers, lasts: Integers) -> None:
        self._firsts, self._lasts = firsts.tolist(), lasts.tolist()
        self._count = int((lasts - firsts).sum())

    def __len__(self) -> int:
        """Return the number of sequences."""
        return self._count

    def __iter__(self) -> Iterator[tuple[int, int]]:
        """Iterate over the ranges."""
        return zip(self._firsts, self._lasts, strict=True)

    def add(self, first: int, last: int) -> None:
        """Add first..last-1."""
        if first >= last:
            return
        if self._lasts and self._lasts[-1] == first:
            self._lasts[-1] = last
            self._count += last - first
            return
        begin, end = bisect_left(self._lasts, first), bisect_right(self._firsts, last)
        if begin < end:
            first = min(first, self._firsts[begin])
            last = max(last, self._lasts[end - 1])
        self._replace(begin, end, [(first, last)])

    def remove(self, first: int, last: int) -> None:
        """Remove first..last-1."""
        if first >= last:
            return
        begin, end = bisect_right(self._lasts, first), bisect_left(self._firsts, last)
        if begin >= end:
            return
        ends = [(self._firsts[begin], first), (last, self._lasts[end - 1])]
        self._replace(begin, end, [(a, b) for a, b in ends if a < b])

    def ranges_within(
        self, first: int, last: int, range_count_max: int | None = None
    ) -> list[tuple[int, int]]:
        """Return the ranges of first..last-1 that are in the set; at most the lowest
        `range_count_max`.
        """
        begin, end = bisect_right(self._lasts, first), bisect_left(self._firsts, last)
        if range_count_max is not None:
            end = min(end, begin + range_count_max)
        if begin >= end or first >= last:
            return []
        ranges = list(zip(self._firsts[begin:end], self._lasts[begin:end], strict=True))
        ranges[0] = (max(first, ranges[0][0]), ranges[0][1])
        ranges[-1] = (ranges[-1][0], min(last, ranges[-1][1]))
        return ranges

    def pop_ranges(self, first: int, last: int) -> list[tuple[int, int]]:
        """Remove first..last-1. Returns the ranges of them that were in the set."""
        ranges = self.ranges_within(first, last)
        if ranges:
            self.remove(first, last)
        return ranges

    def pop(self, first: int, last: int) -> SequenceSet:
        """Remove first..last-1. Returns the set of the removed sequences."""
        if self.is_within(first, last):
            removed = SequenceSet()
            removed._firsts, removed._lasts, removed._count = self._firsts, self._lasts, self._count
            self._firsts, self._lasts, self._count = [], [], 0
            return removed
        begin, end = bisect_right(self._lasts, first), bisect_left(self._firsts, last)
        if begin >= end or first >= last:
            return SequenceSet()
        firsts, lasts = self._firsts[begin:end], self._lasts[begin:end]
        firsts[0], lasts[-1] = max(first, firsts[0]), min(last, lasts[-1])
        self.remove(first, last)
        return SequenceSet.from_bounds(firsts, lasts)

    def is_within(self, first: int, last: int) -> bool:
        """Return True if the set contains nothing but some of first..last-1."""
        return not self._firsts or (first <= self._firsts[0] and self._lasts[-1] <= last)

    def find_range_after(self, first: int, range_count: int) -> int | None:
        """Return the first sequence behind the next `range_count` ranges with messages from `first`
        on; None if there are no more ranges.
        """
        index = bisect_right(self._lasts, first) + range_count
        return self._firsts[index] if index < len(self._firsts) else None

    @property
    def bounds(self) -> tuple[list[int], list[int]]:
        """First sequences of the ranges, and their exclusive ends. They must not be changed."""
        return self._firsts, self._lasts

    @property
    def range_count(self) -> int:
        """Number of ranges."""
        return len(self._firsts)

    def update(self, ranges: list[tuple[int, int]]) -> None:
        """Add ascending ranges. Many ranges are merged in one pass, which is faster than adding
        each.
        """
        if len(ranges) <= _INSERT_ONE_BY_ONE_MAX:
            for first, last in ranges:
                self.add(first, last)
            return
        self._unite([first for first, _ in ranges], [last for _, last in ranges])

    def unite(self, other: SequenceSet) -> None:
        """Add all sequences of another set."""
        if not self._lasts or (other._firsts and self._lasts[-1] < other._firsts[0]):
            self._firsts += other._firsts
            self._lasts += other._lasts
            self._count += other._count
        elif other.range_count <= _INSERT_ONE_BY_ONE_MAX:
            self.update(list(other))
        else:
            self._unite(other._firsts, other._lasts)

    def _unite(self, more_firsts: list[int], more_lasts: list[int]) -> None:
        """Add many ascending ranges, which are not empty. Only those between the first and the last
        of them are examined.
        """
        begin = bisect_left(self._lasts, more_firsts[0])
        end = bisect_right(self._firsts, more_lasts[-1])
        firsts, lasts = self._firsts[begin:end], self._lasts[begin:end]
        merged = SequenceSet()
        merged._set_union(np.array(firsts + more_firsts), np.array(lasts + more_lasts))
        self._count += len(merged) - (sum(lasts) - sum(firsts))
        self._firsts[begin:end], self._lasts[begin:end] = merged.bounds

    def _set_union(self, firsts: Integers, lasts: Integers) -> None:
        """Replace all ranges by the union of others, which are not empty."""
        order = firsts.argsort(kind="stable")
        firsts, lasts = firsts[order], np.maximum.accumulate(lasts[order])
        begins = np.flatnonzero(np.r_[True, firsts[1:] > lasts[:-1]])
        self._set_bounds(firsts[begins], lasts[np.r_[begins[1:] - 1, lasts.size - 1]])

    def missing_ranges(self, first: int, last: int) -> list[tuple[int, int]]:
        """Return the ranges of first..last-1 that are not in the set."""
        begin, end = bisect_right(self._lasts, first), bisect_left(self._firsts, last)
        outside = []
        for index in range(begin, end):
            if first < self._firsts[index]:
                outside.append((first, self._firsts[index]))
            first = self._lasts[index]
        if first < last:
            outside.append((first, last))
        return outside

    def complement(self, first: int, last: int) -> SequenceSet:
        """Return the set of first..last-1 without this set's sequences."""
        begin, end = bisect_right(self._lasts, first), bisect_left(self._firsts, last)
        bounds = [first, *self._lasts[begin:end]], [*self._firsts[begin:end], last]
        if bounds[0][0] >= bounds[1][0]:
            bounds = bounds[0][1:], bounds[1][1:]
        if bounds[0] and bounds[0][-1] >= bounds[1][-1]:
            bounds = bounds[0][:-1], bounds[1][:-1]
        return SequenceSet.from_bounds(*bounds)

    def difference(self, other: SequenceSet) -> SequenceSet:
        """Return a set of the sequences that are not in `other`."""
        if not (self._firsts and other._firsts):
            return SequenceSet.from_bounds(list(self._firsts), list(self._lasts))
        return self._split(other)[1]

    def pop_set(self, other: SequenceSet) -> SequenceSet:
        """Remove the sequences of `other`. Returns the set of the removed ones."""
        if not other._firsts:
            return SequenceSet()
        begin = bisect_right(self._lasts, other._firsts[0])
        end = bisect_left(self._firsts, other._lasts[-1])
        if begin >= end:
            return SequenceSet()
        has_few = end - begin > _ARRAY_COST_FACTOR * other.range_count
        if has_few:
            found = [bounds for bounds in other if self.overlaps(*bounds)]
            if len(found) <= _INSERT_ONE_BY_ONE_MAX:
                removed = SequenceSet()
                for bounds in found:
                    removed.update(self.pop_ranges(*bounds))
                return removed
        part = SequenceSet.from_bounds(self._firsts[begin:end], self._lasts[begin:end])
        removed, remaining = part._split_at(other) if has_few else part._split(other)
        self._firsts[begin:end], self._lasts[begin:end] = remaining.bounds
        self._count -= len(removed)
        return removed

    def _split(self, other: SequenceSet) -> tuple[SequenceSet, SequenceSet]:
        """Return the sets of the sequences that are in `other`, and of those that are not. Neither
        this set nor `other` may be empty.
        """
        bounds = np.array(self._firsts + self._lasts + other._firsts + other._lasts)
        sizes = [len(self._firsts)] * 2 + [len(other._firsts)] * 2
        order = bounds.argsort(kind="stable")
        bounds = bounds[order]
        # Behind each bound: 1 in a range of this set, 2 in one of the other set, 3 in both.
        begun = np.repeat([1, -1, 2, -2], sizes)[order].cumsum()[:-1]
        is_filled = bounds[1:] > bounds[:-1]
        in_both, in_this = (_find_runs(bounds, is_filled & (begun == each)) for each in (3, 1))
        return in_both, in_this

    def _split_at(self, other: SequenceSet) -> tuple[SequenceSet, SequenceSet]:
        """Return the same as `_split`, faster if `other` has few ranges."""
        own_firsts, own_lasts, own_count = self._firsts, self._lasts, len(self._firsts)
        removed, firsts, lasts = SequenceSet(), list[int](), list[int]()
        # Own ranges before `index` are divided, and that range up to `front`.
        index, front = 0, own_firsts[0]
        for first, last in other:
            begin = bisect_right(own_lasts, first, index)
            if index < begin:
                firsts.append(front)
                firsts += own_firsts[index + 1 : begin]
                lasts += own_lasts[index:begin]
                index, front = begin, own_firsts[begin] if begin < own_count else last
            while index < own_count and front < last:
                begin, end = max(front, first), min(own_lasts[index], last)
                removed.add(begin, end)
                if front < begin:
                    firsts.append(front)
                    lasts.append(begin)
                front = end
                if front == own_lasts[index]:
                    index += 1
                    front = own_firsts[index] if index < own_count else last
        if index < own_count:
            firsts += [front, *own_firsts[index + 1 :]]
            lasts += own_lasts[index:]
        return removed, SequenceSet.from_bounds(firsts, lasts)

    def find_overlapping(self, firsts: Integers, lasts: Integers) -> Flags:
        """Return True for each of the ranges firsts[i]..lasts[i]-1 with a sequence of the set."""
        if not self._firsts:
            return np.zeros(firsts.size, np.bool_)
        own_firsts, own_lasts = np.array(self._firsts), np.array(self._lasts)
        indexes = own_lasts.searchsorted(firsts, side="right")
        is_below_end = indexes < own_lasts.size
        own_first = own_firsts[np.minimum(indexes, own_lasts.size - 1)]
        is_found: Flags = is_below_end & (np.maximum(own_first, firsts) < lasts)
        return is_found

    def overlaps(self, first: int, last: int) -> bool:
        """Return True if any of first..last-1 is in the set."""
        index = bisect_right(self._lasts, first)
        return first < last and index < len(self._firsts) and self._firsts[index] < last

    def clear(self) -> None:
        self._firsts.clear()
        self._lasts.clear()
        self._count = 0

    def _replace(self, begin: int, end: int, ranges: list[tuple[int, int]]) -> None:
        """Replace the ranges with indexes begin..end-1."""
        self._count += sum(b - a for a, b in ranges)
        self._count -= sum(self._lasts[begin:end]) - sum(self._firsts[begin:end])
        self._firsts[begin:end] = [a for a, _ in ranges]
        self._lasts[begin:end] = [b for _, b in ranges]

    def check(self) -> None:
        """Raise AssertionError unless the invariants hold."""
        bounds = [bound for pair in self for bound in pair]
        assert all(a < b for a, b in pairwise(bounds)), bounds
        assert self._count == sum(b - a for a, b in self), (self._count, bounds)


def find_part_end(sets: list[SequenceSet], first: int, last: int, range_count: int) -> int:
    """Return where to end a part of first..last-1 that begins at `first`, so that it overlaps about
    `range_count` ranges of all sets together, but at least one of each; `last` if there are fewer.
    """
    count_of_each = max(1, range_count // max(1, len(sets)))
    ends = [sequences.find_range_after(first, count_of_each) for sequences in sets]
    return min([last, *(end for end in ends if end is not None)])


def _find_runs(bounds: Integers, is_inside: Flags) -> SequenceSet:
    """Return the ranges between neighbouring ascending `bounds` for which `is_inside` is True.

    Neighbouring ranges are joined.
    """
    is_first = is_inside & ~np.r_[False, is_inside[:-1]]
    is_last = is_inside & ~np.r_[is_inside[1:], False]
    return SequenceSet.from_arrays(bounds[:-1][is_first], bounds[1:][is_last])
