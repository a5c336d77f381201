"""Histograms of durations.

One thread observes; any thread may take a snapshot, which may lack values observed meanwhile.

    bounds   0.001   0.01   0.1            seconds; a value equal to a bound is in its bucket
    counts   7       3      0      1       one bucket per bound, and one for larger values
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from itertools import pairwise

LATENCY_BOUNDS_SECONDS = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05),
    *(0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0),
)
"""Bounds from one turn of the event loop up to the ack of a consumer that was disconnected for a
minute.
"""


@dataclass(frozen=True, slots=True)
class HistogramSnapshot:
    """Counts of a histogram at one time."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    """Values per bucket; one more than bounds."""
    total: float
    """Sum of all values."""

    @property
    def count(self) -> int:
        """Number of values."""
        return sum(self.counts)

    def quantile(self, fraction: float) -> float:
        """Estimate the value that `fraction` of all values do not exceed; 0 without values.

        Values are assumed to be evenly distributed within a bucket. Values above the last bound
        count as that bound.
        """
        target_count, before = fraction * self.count, 0
        for low, high, count in zip((0.0, *self.bounds), self.bounds, self.counts, strict=False):
            if count and before + count >= target_count:
                return low + (high - low) * (target_count - before) / count
            before += count
        return self.bounds[-1] if before < self.count else 0.0

    def difference(self, before: HistogramSnapshot) -> HistogramSnapshot:
        """Return the counts since an earlier snapshot."""
        counts = tuple(a - b for a, b in zip(self.counts, before.counts, strict=True))
        return HistogramSnapshot(self.bounds, counts, self.total - before.total)


class Histogram:
    """Counter of values by bucket."""

    def __init__(self, bounds: tuple[float, ...] = LATENCY_BOUNDS_SECONDS) -> None:
        """Raises ValueError unless the bounds ascend."""
        if not bounds or any(low >= high for low, high in pairwise(bounds)):
            raise ValueError(f"bounds must ascend, got {bounds}")
        self.bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._total = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self.bounds, value)] += 1
        self._total += value

    def snapshot(self) -> HistogramSnapshot:
        return HistogramSnapshot(self.bounds, tuple(self._counts), self._total)
