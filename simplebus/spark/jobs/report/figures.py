"""From the rows of a trace to figures: what one subscriber got of one class in one run.

Rule 1: pure numpy, no Spark; no walk over messages. A slow count, message by message, agrees.
Rule 2: every message counts once, whatever range it came in: a percentile is one of messages.
Rule 3: a latency is from the first time that a message was sent to the first time it was delivered.

For each message that a publisher or this subscriber has a row of:

    sent         it was sent
    delivered    it came, at least once
    acked        this subscriber acknowledged it
    redelivered  how often it came marked as coming again: what an acknowledging bus does
    duplicates   how often it came unmarked, but for the first time: what no bus should do
    lost         it was sent and never came
    unsent       it came and was never sent
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from simplebus.spark.jobs.report.ranges import (
    NEVER,
    Integers,
    Ranges,
    earliest,
    edges_of,
    quantiles,
    times_covered,
)
from simplebus.spark.jobs.report.traces import Rows, TraceError

SHARES = (0.5, 0.9, 0.99, 0.999, 1.0)
LATENCIES = ("p50_ns", "p90_ns", "p99_ns", "p999_ns", "max_ns")
"""Columns of the shares."""
_ALL_ONE = 0
NS_PER_S = 1_000_000_000
STEPS_MAX = 1_000_000


@dataclass(frozen=True, slots=True)
class Figures:
    """The figures of one subscriber of one class in one run."""

    sent: int
    delivered: int
    acked: int
    redelivered: int
    duplicates: int
    lost: int
    unsent: int
    seconds: float
    """From the first message sent to the last thing that happened to one."""
    latencies_ns: tuple[int, ...] | None
    """One of each of SHARES; None when nothing that was sent came."""

    @property
    def rate(self) -> float:
        """Messages delivered per second; 0 when no time went by."""
        return self.delivered / self.seconds if self.seconds > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Course:
    """The same run, step by step; arrays of one length, one entry a step from 0 on."""

    sent: Integers
    """Messages within the step, as often as each was sent,"""
    delivered: Integers
    """came, marked as coming again or not,"""
    acked: Integers
    """were acknowledged."""
    latencies_ns: Integers
    """A row for each step, a column for each of SHARES: of the messages that came first in it;
    NEVER when there was none."""


@dataclass(frozen=True, slots=True)
class _First:
    """The cells of messages that were sent and came: when they came first, after how long."""

    came: Integers
    after: Integers
    weights: Integers


def figures(rows: Rows, subscriber: int) -> Figures:
    """What became of the messages of one class for one subscriber (an index into rows)."""
    sent, marked, unmarked, acked = _parts(rows, subscriber)
    edges = edges_of(sent, marked, unmarked, acked)
    cells = np.diff(edges)
    was_sent, came_again, came, was_acked = (
        times_covered(one, edges) for one in (sent, marked, unmarked, acked)
    )
    got = (came + came_again) > 0
    first = _first(sent, Ranges.joined(marked, unmarked), edges)
    found = None
    if first.came.size:
        _, rows_of = quantiles(np.zeros_like(first.came), first.after, first.weights, SHARES)
        found = tuple(int(one) for one in rows_of[_ALL_ONE])
    return Figures(
        sent=int(cells[was_sent > 0].sum()),
        delivered=int(cells[got].sum()),
        acked=int(cells[was_acked > 0].sum()),
        redelivered=marked.total,
        duplicates=int((cells * np.maximum(came - 1, 0)).sum()),
        lost=int(cells[(was_sent > 0) & ~got].sum()),
        unsent=int(cells[got & (was_sent == 0)].sum()),
        seconds=_seconds(sent, marked, unmarked, acked, _confirmed(rows, subscriber)),
        latencies_ns=found,
    )


def course(rows: Rows, subscriber: int, *, step_ns: int) -> Course:
    """The run in steps of so many nanoseconds. Raises TraceError when they are too many."""
    sent, marked, unmarked, acked = _parts(rows, subscriber)
    delivered = Ranges.joined(marked, unmarked)
    first = _first(sent, delivered, edges_of(sent, delivered))
    last = max((int(one.at.max()) for one in (sent, delivered, acked) if len(one)), default=-1)
    steps = last // step_ns + 1
    if steps > STEPS_MAX:
        raise TraceError(
            f"a run of {last / NS_PER_S:,.0f} s has {steps:,} steps of {step_ns / NS_PER_S:g} s; "
            f"at most {STEPS_MAX:,} are possible: choose longer ones"
        )
    latencies = np.full((steps, len(SHARES)), NEVER, np.int64)
    names, rows_of = quantiles(first.came // step_ns, first.after, first.weights, SHARES)
    latencies[names] = rows_of
    counts = [_per_step(one, step_ns, steps) for one in (sent, delivered, acked)]
    return Course(counts[0], counts[1], counts[2], latencies)


def _parts(rows: Rows, subscriber: int) -> tuple[Ranges, Ranges, Ranges, Ranges]:
    marked, unmarked = rows.of("redelivered", subscriber), rows.of("delivered", subscriber)
    return rows.of("sent"), marked, unmarked, rows.of("acked", subscriber)


def _confirmed(rows: Rows, subscriber: int) -> Ranges:
    """Publishers' messages, and this subscriber's acks."""
    return Ranges.joined(rows.of("confirmed", -1), rows.of("confirmed", subscriber))


def _first(sent: Ranges, delivered: Ranges, edges: Integers) -> _First:
    begun, came = earliest(sent, edges), earliest(delivered, edges)
    both = (begun != NEVER) & (came != NEVER)
    return _First(came[both], came[both] - begun[both], np.diff(edges)[both])


def _seconds(sent: Ranges, *others: Ranges) -> float:
    if not len(sent):
        return 0.0
    last = max(int(one.at.max()) for one in (sent, *others) if len(one))
    return (last - int(sent.at.min())) / NS_PER_S


def _per_step(given: Ranges, step_ns: int, steps: int) -> Integers:
    found = np.zeros(steps, np.int64)
    np.add.at(found, given.at // step_ns, given.lengths)
    return found
