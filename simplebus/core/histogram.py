"""How often something took how long.

Rule 1: one thread observes; any may look. A snapshot may lack what is observed while it is taken.

    bounds   0.001   0.01   0.1            in seconds; a value equal to a bound is at or below it
    counts   7       3      0      1       of each stretch, the last one without an end
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from itertools import pairwise

LATENCIES = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05),
    *(0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0),
)
"""Seconds: from a turn of the event loop to a consumer that is away."""


@dataclass(frozen=True, slots=True)
class HistogramSnapshot:
    """A histogram at one time."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    """One more than there are bounds."""
    total: float
    """Of all values."""

    @property
    def count(self) -> int:
        """How many values there were."""
        return sum(self.counts)

    def quantile(self, part: float) -> float:
        """About the value that this part of all is at or below; 0 without any. Within a stretch
        values are taken to lie evenly; of those above the last bound that bound is said."""
        wanted, before = part * self.count, 0
        for low, high, count in zip((0.0, *self.bounds), self.bounds, self.counts, strict=False):
            if count and before + count >= wanted:
                return low + (high - low) * (wanted - before) / count
            before += count
        return self.bounds[-1] if before < self.count else 0.0

    def since(self, before: HistogramSnapshot) -> HistogramSnapshot:
        """What has come since an earlier one."""
        counts = tuple(a - b for a, b in zip(self.counts, before.counts, strict=True))
        return HistogramSnapshot(self.bounds, counts, self.total - before.total)


class Histogram:
    """See the module's law."""

    def __init__(self, bounds: tuple[float, ...] = LATENCIES) -> None:
        """Raises ValueError unless the bounds ascend."""
        if not bounds or any(low >= high for low, high in pairwise(bounds)):
            raise ValueError(f"bounds must ascend, got {bounds}")
        self.bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._total = 0.0

    def observe(self, value: float) -> None:
        """It took so long."""
        self._counts[bisect_left(self.bounds, value)] += 1
        self._total += value

    def snapshot(self) -> HistogramSnapshot:
        """What was observed so far."""
        return HistogramSnapshot(self.bounds, tuple(self._counts), self._total)
