"""Figures of an archive, computed from small digests. Numpy only.

`digest` summarizes a piece of the archive where it is stored; `summarize_digest` combines the
digests of one place, which is a class in one memory of one bus. Numbers are exact. Latencies have
three digits, so a percentile may be half a percent off.

    kind       step       first            last
    NUMBERS    0          first number     number after the last one
    TIMES      0          earliest time    latest time            both in us since 1970
    LATENCY    its index  a latency, us    number of messages with it
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from simplebus.spark.jobs.report.figures import SHARES
from simplebus.spark.jobs.report.ranges import (
    Integers,
    TimedRanges,
    consecutive_ranges,
    coverage_counts,
    find_edges,
    quantiles,
)

NUMBERS, TIMES, LATENCY = range(3)
_DIGITS = 3


@dataclass(frozen=True, slots=True)
class ArchiveDigest:
    """Digest of archive rows: four int64 arrays of equal length."""

    kind: Integers
    step: Integers
    first: Integers
    last: Integers

    def select_kind(self, kind: int) -> tuple[Integers, Integers, Integers]:
        """Return step, first and last of the entries of one kind."""
        is_selected = self.kind == kind
        return self.step[is_selected], self.first[is_selected], self.last[is_selected]


def digest(
    numbers: Integers, at_us: Integers, after_us: Integers, *, step_us: int
) -> ArchiveDigest:
    """Summarize rows of one place.

    Args:
        numbers: Sequences, int64[n], n >= 1, in any order.
        at_us: Times, in microseconds since 1970, int64[n].
        after_us: Latencies in microseconds, int64[n].
        step_us: Length of a step in microseconds.
    """
    begins, ends = consecutive_ranges(np.sort(numbers))
    steps, rounded = at_us // step_us, _round_to_digits(after_us)
    order = np.lexsort((rounded, steps))
    steps, rounded = steps[order], rounded[order]
    new = np.r_[True, (np.diff(steps) != 0) | (np.diff(rounded) != 0)]
    starts = np.flatnonzero(new)
    counts = np.diff(np.r_[starts, steps.size])
    parts = [
        (NUMBERS, np.zeros_like(begins), begins, ends),
        (TIMES, np.zeros(1, np.int64), at_us.min(keepdims=True), at_us.max(keepdims=True)),
        (LATENCY, steps[starts], rounded[starts], counts),
    ]
    kinds = np.concatenate([np.full(part[1].size, part[0], np.int64) for part in parts])
    return ArchiveDigest(kinds, *(np.concatenate([part[i] for part in parts]) for i in (1, 2, 3)))


def _round_to_digits(values: Integers) -> Integers:
    """Round to three digits."""
    sizes = np.abs(values).astype(np.float64)
    exponents = np.floor(np.log10(np.maximum(sizes, 1))).astype(np.int64)
    scale = 10 ** np.maximum(exponents - (_DIGITS - 1), 0)
    rounded: Integers = np.round(values / scale).astype(np.int64) * scale
    return rounded


def summarize_digest(found: ArchiveDigest, *, step_us: int) -> Iterator[dict[str, Any]]:
    """Yield the report row of the whole, and one for each step with messages.

    Column names are those of a report; latencies are in microseconds, by SHARES.
    """
    _, first, last = found.select_kind(NUMBERS)
    ranges = TimedRanges.of(np.zeros_like(first), first, last)
    edges = find_edges(ranges)
    cells, covered = np.diff(edges), coverage_counts(ranges, edges)
    present_count, sent = int(cells[covered > 0].sum()), int(edges[-1] - edges[0])
    _, earliest, latest = found.select_kind(TIMES)
    begin, end = int(earliest.min()), int(latest.max())
    steps, after, counts = found.select_kind(LATENCY)
    _, of_all = quantiles(np.zeros_like(steps), after, counts, SHARES)
    yield {
        "span": "run",
        "begin_s": begin / 1e6,
        "seconds": (end - begin) / 1e6,
        "sent": sent,
        "delivered": present_count,
        "duplicates": ranges.total - present_count,
        "lost": sent - present_count,
        "rate": present_count / (end - begin) * 1e6 if end > begin else 0.0,
        "latencies_us": of_all[0].tolist(),
    }
    names, of_steps = quantiles(steps, after, counts, SHARES)
    totals = np.zeros(names.size, np.int64)
    np.add.at(totals, np.searchsorted(names, steps), counts)
    for step, total, latencies in zip(
        names.tolist(), totals.tolist(), of_steps.tolist(), strict=True
    ):
        yield {
            "span": "step",
            "begin_s": step * step_us / 1e6,
            "seconds": step_us / 1e6,
            "delivered": total,
            "rate": total / step_us * 1e6,
            "latencies_us": latencies,
        }
