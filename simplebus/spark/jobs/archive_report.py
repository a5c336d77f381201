"""From the rows of an archive to figures, by way of digests that are small.

Rule 1: pure numpy. `digest` is taken of every piece of the archive where it lies, `figures_of`
works out what all digests of one place say; a place is a class in one memory of one bus.
Rule 2: numbers are kept as ranges and exactly. Latencies are kept to three digits: a percentile may
be half a percent off.

    kind       step       first            last
    NUMBERS    0          first number     number behind the last one
    TIMES      0          earliest time    latest time            both in us since 1970
    LATENCY    its index  a latency, us    how many messages had it
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from simplebus.spark.jobs.report.figures import SHARES
from simplebus.spark.jobs.report.ranges import (
    Integers,
    Ranges,
    edges_of,
    quantiles,
    runs_of,
    times_covered,
)

NUMBERS, TIMES, LATENCY = range(3)
_DIGITS = 3


@dataclass(frozen=True, slots=True)
class Digest:
    """Four int64 arrays of one length."""

    kind: Integers
    step: Integers
    first: Integers
    last: Integers

    def of(self, kind: int) -> tuple[Integers, Integers, Integers]:
        """step, first and last of one kind."""
        which = self.kind == kind
        return self.step[which], self.first[which], self.last[which]


def digest(numbers: Integers, at_us: Integers, after_us: Integers, *, step_us: int) -> Digest:
    """Of rows of one place: their numbers, times and latencies, in any order; at least one."""
    begins, ends = runs_of(np.sort(numbers))
    steps, rounded = at_us // step_us, _rounded(after_us)
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
    return Digest(kinds, *(np.concatenate([part[i] for part in parts]) for i in (1, 2, 3)))


def _rounded(values: Integers) -> Integers:
    """To three digits."""
    sizes = np.abs(values).astype(np.float64)
    exponents = np.floor(np.log10(np.maximum(sizes, 1))).astype(np.int64)
    scale = 10 ** np.maximum(exponents - (_DIGITS - 1), 0)
    rounded: Integers = np.round(values / scale).astype(np.int64) * scale
    return rounded


def figures_of(found: Digest, *, step_us: int) -> Iterator[dict[str, Any]]:
    """The row of the whole, and one for each step in which there was anything. Names as a report
    has them; latencies in us, by SHARES."""
    _, first, last = found.of(NUMBERS)
    given = Ranges.of(np.zeros_like(first), first, last)
    edges = edges_of(given)
    cells, covered = np.diff(edges), times_covered(given, edges)
    there, sent = int(cells[covered > 0].sum()), int(edges[-1] - edges[0])
    _, earliest, latest = found.of(TIMES)
    begin, end = int(earliest.min()), int(latest.max())
    steps, after, counts = found.of(LATENCY)
    _, of_all = quantiles(np.zeros_like(steps), after, counts, SHARES)
    yield {
        "span": "run",
        "begin_s": begin / 1e6,
        "seconds": (end - begin) / 1e6,
        "sent": sent,
        "delivered": there,
        "duplicates": given.total - there,
        "lost": sent - there,
        "rate": there / (end - begin) * 1e6 if end > begin else 0.0,
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
