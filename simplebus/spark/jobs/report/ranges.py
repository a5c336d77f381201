"""Ranges of numbers with times: coverage, counts and earliest times. Numpy only.

Functions of n ranges take O(n log n), regardless of their lengths and overlaps. Cells lie between
neighbouring edges of ranges, and all numbers of a cell have the same coverage.

    ranges   |-------- a --------|
                     |------ b ------|
    edges    0       7           15  19
    cells    |   0   |     1     | 2 |
    coverage_counts      1     2     1
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Integers = npt.NDArray[np.int64]
NEVER = np.iinfo(np.int64).max
"""Time of an event that did not happen."""


@dataclass(frozen=True, slots=True)
class TimedRanges:
    """Half-open ranges of numbers with a time each: three int64 arrays of equal length."""

    at: Integers
    first: Integers
    last: Integers

    def __len__(self) -> int:
        return self.at.size

    @property
    def lengths(self) -> Integers:
        return self.last - self.first

    @property
    def total(self) -> int:
        """Sum of all lengths."""
        return int(self.lengths.sum())

    def __getitem__(self, index: Any) -> TimedRanges:
        return TimedRanges(self.at[index], self.first[index], self.last[index])

    @classmethod
    def of(cls, at: Any, first: Any, last: Any) -> TimedRanges:
        return cls(*(np.asarray(column, np.int64) for column in (at, first, last)))

    @classmethod
    def joined(cls, *parts: TimedRanges) -> TimedRanges:
        return cls(
            *(
                np.concatenate([getattr(part, name) for part in parts])
                for name in ("at", "first", "last")
            )
        )


def find_edges(*parts: TimedRanges) -> Integers:
    """Return the distinct starts and ends of ranges, sorted."""
    ends = np.concatenate([end for part in parts for end in (part.first, part.last)])
    # The parts are mostly sorted, which a stable sort exploits; np.unique would not.
    ends.sort(kind="stable")
    return ends[np.r_[True, ends[1:] != ends[:-1]]] if ends.size else ends


def coverage_counts(ranges: TimedRanges, edges: Integers) -> Integers:
    """Return how many ranges cover each cell. `edges` contains all their ends."""
    steps = np.zeros(max(edges.size, 1), np.int64)
    np.add.at(steps, np.searchsorted(edges, ranges.first), 1)
    np.add.at(steps, np.searchsorted(edges, ranges.last), -1)
    return np.cumsum(steps)[:-1]


def earliest_times(ranges: TimedRanges, edges: Integers) -> Integers:
    """Return the earliest time of the ranges covering each cell; NEVER for a cell without ranges.

    A range of cells is the union of two ranges of 2**k cells. Its time is recorded for both, and
    then propagated from each length to its halves.
    """
    cells = max(edges.size - 1, 0)
    begins, ends = np.searchsorted(edges, ranges.first), np.searchsorted(edges, ranges.last)
    is_covering = ends > begins
    begins, ends, at = begins[is_covering], ends[is_covering], ranges.at[is_covering]
    if at.size == 0:
        return np.full(cells, NEVER, np.int64)
    power = np.frexp((ends - begins).astype(np.float64))[1] - 1  # 2**power cells fit, twice do not.
    found = np.full((int(power.max()) + 1, cells), NEVER, np.int64)
    np.minimum.at(found, (power, begins), at)
    np.minimum.at(found, (power, ends - (1 << power.astype(np.int64))), at)
    for level in range(found.shape[0] - 1, 0, -1):
        half = 1 << (level - 1)
        below, above = found[level - 1], found[level]
        np.minimum(below, above, out=below)
        np.minimum(below[half:], above[:-half], out=below[half:])
    earliest: Integers = found[0]
    return earliest


def quantiles(
    groups: Integers, values: Integers, weights: Integers, shares: npt.ArrayLike
) -> tuple[Integers, Integers]:
    """Return weighted quantiles by group.

    Args:
        groups: Group of each value, int64[n].
        values: Values, int64[n].
        weights: Weights >= 1, int64[n].
        shares: Quantiles from 0 to 1, float[q].

    Returns:
        The distinct groups, int64[g], and their quantiles, int64[g, q].
    """
    order = np.lexsort((values, groups))
    groups, values = groups[order], values[order]
    counted = np.cumsum(weights[order])
    names, begins = np.unique(groups, return_index=True)
    if names.size == 0:
        return names, np.empty((0, np.size(shares)), np.int64)
    before = np.r_[0, counted][begins]
    totals = np.r_[before[1:], counted[-1]] - before
    ranks = np.ceil(np.multiply.outer(totals, np.asarray(shares))).astype(np.int64)
    ranks = np.clip(ranks, 1, totals[:, None]) + before[:, None]
    return names, values[np.searchsorted(counted, ranks)]


def consecutive_ranges(numbers: Integers) -> tuple[Integers, Integers]:
    """Return sorted numbers as half-open ranges of neighbours: their starts and ends.

    A repeated number starts a new range, so that it is covered twice.
    """
    if numbers.size == 0:
        return numbers, numbers
    breaks = np.flatnonzero(np.diff(numbers) != 1)
    return numbers[np.r_[0, breaks + 1]], numbers[np.r_[breaks, numbers.size - 1]] + 1
