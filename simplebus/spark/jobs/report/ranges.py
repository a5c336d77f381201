"""Ranges of numbers with times: what is covered, how often, and when for the first time.

Rule 1: pure numpy; no loop over messages and none over ranges. A function of n ranges takes
O(n log n), however many messages they hold and however they overlap.
Rule 2: what holds of all numbers between two neighbouring ends of ranges is said once, of the cell
between them.

    ranges   |-------- a --------|
                     |------ b ------|
    edges    0       7           15  19
    cells    |   0   |     1     | 2 |
    times_covered        1     2     1
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Integers = npt.NDArray[np.int64]
NEVER = np.iinfo(np.int64).max
"""The time of what did not happen."""


@dataclass(frozen=True, slots=True)
class Ranges:
    """Half-open ranges of numbers, each with a time. Three int64 arrays of one length."""

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
        """Numbers in all of them, each counted as often as it is there."""
        return int(self.lengths.sum())

    def __getitem__(self, which: Any) -> Ranges:
        return Ranges(self.at[which], self.first[which], self.last[which])

    @classmethod
    def of(cls, at: Any, first: Any, last: Any) -> Ranges:
        return cls(*(np.asarray(one, np.int64) for one in (at, first, last)))

    @classmethod
    def joined(cls, *some: Ranges) -> Ranges:
        return cls(
            *(
                np.concatenate([getattr(one, name) for one in some])
                for name in ("at", "first", "last")
            )
        )


def edges_of(*some: Ranges) -> Integers:
    """Where a range begins or ends, each place once, in order. Cells lie between neighbours."""
    ends = np.concatenate([end for one in some for end in (one.first, one.last)])
    # Each part is mostly in order, which this sort makes use of; np.unique would not.
    ends.sort(kind="stable")
    return ends[np.r_[True, ends[1:] != ends[:-1]]] if ends.size else ends


def times_covered(given: Ranges, edges: Integers) -> Integers:
    """How many of the ranges hold the numbers of each cell. `edges` has all their ends."""
    steps = np.zeros(max(edges.size, 1), np.int64)
    np.add.at(steps, np.searchsorted(edges, given.first), 1)
    np.add.at(steps, np.searchsorted(edges, given.last), -1)
    return np.cumsum(steps)[:-1]


def earliest(given: Ranges, edges: Integers) -> Integers:
    """The least time of the ranges that hold the numbers of each cell; NEVER where there is none.

    A range of cells is the union of two of 2**k cells each. Its time is noted with both, and then
    handed down from each length to its half.
    """
    cells = max(edges.size - 1, 0)
    begins, ends = np.searchsorted(edges, given.first), np.searchsorted(edges, given.last)
    some = ends > begins
    begins, ends, at = begins[some], ends[some], given.at[some]
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
    least: Integers = found[0]
    return least


def quantiles(
    groups: Integers, values: Integers, weights: Integers, shares: npt.ArrayLike
) -> tuple[Integers, Integers]:
    """The groups there are, in order, and for each a row with one value a share: the least that so
    many of its numbers are not above. A value counts as often as its weight says, 1 or more."""
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


def runs_of(numbers: Integers) -> tuple[Integers, Integers]:
    """Sorted numbers as half-open ranges of neighbours: their begins and ends. A number that is
    there twice begins a range anew, so that the ranges hold it twice."""
    if numbers.size == 0:
        return numbers, numbers
    breaks = np.flatnonzero(np.diff(numbers) != 1)
    return numbers[np.r_[0, breaks + 1]], numbers[np.r_[breaks, numbers.size - 1]] + 1
