"""Figures of one subscriber, class and run, computed from trace rows. Numpy only.

Work is per range, not per message; a property test compares with a count message by message. A
latency runs from the first sending of a message to its first delivery, and percentiles count
messages, not ranges. Per message:

    sent         it was sent
    delivered    it was delivered at least once
    acked        this subscriber acked it
    redelivered  deliveries marked as redelivered, as an acknowledging bus makes
    duplicates   unmarked deliveries after the first one, which no bus should make
    lost         it was sent but never delivered
    unsent       it was delivered but never sent
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from simplebus.spark.jobs.report.ranges import (
    NEVER,
    Integers,
    TimedRanges,
    coverage_counts,
    earliest_times,
    find_edges,
    quantiles,
)
from simplebus.spark.jobs.report.traces import TraceError, TraceRows

SHARES = (0.5, 0.9, 0.99, 0.999, 1.0)
LATENCIES = ("p50_ns", "p90_ns", "p99_ns", "p999_ns", "max_ns")
"""Columns of SHARES."""
_ONLY_GROUP = 0
NS_PER_S = 1_000_000_000
STEPS_MAX = 1_000_000


@dataclass(frozen=True, slots=True)
class RunFigures:
    """Figures of one subscriber, class and run."""

    sent: int
    delivered: int
    acked: int
    redelivered: int
    duplicates: int
    lost: int
    unsent: int
    seconds: float
    """Time from the first sending to the last event."""
    latencies_ns: tuple[int, ...] | None
    """One value per SHARES; None if no sent message was delivered."""

    @property
    def rate(self) -> float:
        """Messages delivered per second; 0 if no time passed."""
        return self.delivered / self.seconds if self.seconds > 0 else 0.0


@dataclass(frozen=True, slots=True)
class RunSteps:
    """Figures by step, from step 0 on; arrays of equal length."""

    sent: Integers
    """Messages sent in the step, repetitions included."""
    delivered: Integers
    """Messages delivered, redeliveries included."""
    acked: Integers
    """Messages acked."""
    latencies_ns: Integers
    """Latencies of first deliveries, int64[steps, shares]; NEVER for a step without deliveries."""


@dataclass(frozen=True, slots=True)
class _FirstDeliveries:
    """First deliveries of sent messages: time, latency and message count of each cell."""

    delivered_at: Integers
    latencies: Integers
    weights: Integers


def run_figures(rows: TraceRows, subscriber: int) -> RunFigures:
    """Return the figures of one subscriber, an index into `rows.subscribers`."""
    sent, marked, unmarked, acked = _ranges_by_kind(rows, subscriber)
    edges = find_edges(sent, marked, unmarked, acked)
    cells = np.diff(edges)
    sent_counts, redelivered_counts, delivered_counts, acked_counts = (
        coverage_counts(ranges, edges) for ranges in (sent, marked, unmarked, acked)
    )
    is_delivered = (delivered_counts + redelivered_counts) > 0
    first_deliveries = _first_deliveries(sent, TimedRanges.joined(marked, unmarked), edges)
    found = None
    if first_deliveries.delivered_at.size:
        _, rows_of = quantiles(
            np.zeros_like(first_deliveries.delivered_at),
            first_deliveries.latencies,
            first_deliveries.weights,
            SHARES,
        )
        found = tuple(int(latency) for latency in rows_of[_ONLY_GROUP])
    return RunFigures(
        sent=int(cells[sent_counts > 0].sum()),
        delivered=int(cells[is_delivered].sum()),
        acked=int(cells[acked_counts > 0].sum()),
        redelivered=marked.total,
        duplicates=int((cells * np.maximum(delivered_counts - 1, 0)).sum()),
        lost=int(cells[(sent_counts > 0) & ~is_delivered].sum()),
        unsent=int(cells[is_delivered & (sent_counts == 0)].sum()),
        seconds=_run_seconds(sent, marked, unmarked, acked, _confirmed(rows, subscriber)),
        latencies_ns=found,
    )


def run_steps(rows: TraceRows, subscriber: int, *, step_ns: int) -> RunSteps:
    """Return figures by steps of `step_ns`. Raises TraceError if there are too many."""
    sent, marked, unmarked, acked = _ranges_by_kind(rows, subscriber)
    delivered = TimedRanges.joined(marked, unmarked)
    first_deliveries = _first_deliveries(sent, delivered, find_edges(sent, delivered))
    last = max(
        (int(ranges.at.max()) for ranges in (sent, delivered, acked) if len(ranges)), default=-1
    )
    steps = last // step_ns + 1
    if steps > STEPS_MAX:
        raise TraceError(
            f"a run of {last / NS_PER_S:,.0f} s has {steps:,} steps of {step_ns / NS_PER_S:g} s; "
            f"at most {STEPS_MAX:,} are possible: choose longer ones"
        )
    latencies = np.full((steps, len(SHARES)), NEVER, np.int64)
    names, rows_of = quantiles(
        first_deliveries.delivered_at // step_ns,
        first_deliveries.latencies,
        first_deliveries.weights,
        SHARES,
    )
    latencies[names] = rows_of
    counts = [_per_step(ranges, step_ns, steps) for ranges in (sent, delivered, acked)]
    return RunSteps(counts[0], counts[1], counts[2], latencies)


def _ranges_by_kind(
    rows: TraceRows, subscriber: int
) -> tuple[TimedRanges, TimedRanges, TimedRanges, TimedRanges]:
    marked, unmarked = rows.of("redelivered", subscriber), rows.of("delivered", subscriber)
    return rows.of("sent"), marked, unmarked, rows.of("acked", subscriber)


def _confirmed(rows: TraceRows, subscriber: int) -> TimedRanges:
    """Return the publishers' confirms and this subscriber's confirmed acks."""
    return TimedRanges.joined(rows.of("confirmed", -1), rows.of("confirmed", subscriber))


def _first_deliveries(
    sent: TimedRanges, delivered: TimedRanges, edges: Integers
) -> _FirstDeliveries:
    sent_at, delivered_at = earliest_times(sent, edges), earliest_times(delivered, edges)
    has_latency = (sent_at != NEVER) & (delivered_at != NEVER)
    latencies = delivered_at[has_latency] - sent_at[has_latency]
    return _FirstDeliveries(delivered_at[has_latency], latencies, np.diff(edges)[has_latency])


def _run_seconds(sent: TimedRanges, *later_ranges: TimedRanges) -> float:
    if not len(sent):
        return 0.0
    last = max(int(ranges.at.max()) for ranges in (sent, *later_ranges) if len(ranges))
    return (last - int(sent.at.min())) / NS_PER_S


def _per_step(ranges: TimedRanges, step_ns: int, steps: int) -> Integers:
    found = np.zeros(steps, np.int64)
    np.add.at(found, ranges.at // step_ns, ranges.lengths)
    return found
