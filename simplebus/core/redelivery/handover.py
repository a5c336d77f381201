"""Attempts and delays that a position passes on to its successor.

Stored as ranges, so the cost depends on the number of ranges, not of messages. Entries for acked
messages are ignored. A message without an entry was never sent.

    attempts            (4, 9) twice  (12, 14) once
    not_before_ticks    (4, 6) not before tick 19
    not_before_times    (7, 8) not before 12.5 s
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TypeVar

from simplebus.core.clock import BrokerClock
from simplebus.core.limits import HANDOVER_RANGES_MAX
from simplebus.core.redelivery.ack_window import AckWindow
from simplebus.core.redelivery.delivery_policy import DeliveryPolicy
from simplebus.core.redelivery.sequence_set import SequenceSet
from simplebus.core.redelivery.timer_wheel import Span, spans_by_attempts

N = TypeVar("N", int, float)

AttemptRanges = list[tuple[int, int, int]]
"""Tuples (first, last, attempts) of messages first..last-1, ascending."""
DelayRanges = list[tuple[int, int, float]]
"""Tuples (first, last, time): messages first..last-1 are not sent before that time."""


@dataclass(frozen=True, slots=True)
class PositionHandover:
    """Attempts and delays of the messages behind the cursor of a position."""

    attempts: AttemptRanges = field(default_factory=list)
    not_before_ticks: list[tuple[int, int, int]] = field(default_factory=list)
    """Tuples (first, last, tick): messages first..last-1 are not sent before that tick."""
    not_before_times: DelayRanges = field(default_factory=list)
    """Delays until a time, in seconds since 1970."""
    backoff_ticks: list[tuple[int, int, int]] = field(default_factory=list)
    """Ticks of the entries of `not_before_times` that are backoffs, for a version 1 successor."""

    def restrict_to(self, first: int, last: int) -> PositionHandover:
        """Return the entries of messages first..last-1."""
        if not (self.attempts or self.not_before_ticks or self.not_before_times):
            return self
        return PositionHandover(
            restrict_rows(self.attempts, first, last),
            restrict_rows(self.not_before_ticks, first, last),
            restrict_rows(self.not_before_times, first, last),
            restrict_rows(self.backoff_ticks, first, last),
        )

    def merge(self, other: PositionHandover) -> PositionHandover:
        """Return the entries of both: for each message the higher attempts and the longer delay.

        With more than HANDOVER_RANGES_MAX ranges, all messages count as sent once, without delays.
        """
        if not other.attempts:
            return self
        if not self.attempts:
            return other
        attempts = highest_values(self.attempts + other.attempts)
        if len(attempts) > HANDOVER_RANGES_MAX:
            return PositionHandover([(attempts[0][0], attempts[-1][1], 1)])
        return PositionHandover(
            attempts,
            highest_values(self.not_before_ticks + other.not_before_ticks),
            highest_values(self.not_before_times + other.not_before_times),
            highest_values(self.backoff_ticks + other.backoff_ticks),
        )

    def passed_spans(self, window: AckWindow) -> list[Span]:
        """Return the messages between floor and cursor of `window` as spans, by attempts."""
        return spans_by_attempts(window.floor, window.cursor, self.attempts, default=0)

    def requested_delays(self) -> DelayRanges:
        """Return the rows of `not_before_times` that are not backoffs."""
        backoffs = SequenceSet()
        for first, last, _ in self.backoff_ticks:
            backoffs.add(first, last)
        return [
            (begin, end, due)
            for first, last, due in self.not_before_times
            for begin, end in backoffs.missing_ranges(first, last)
        ]

    def unacked_delays(
        self, window: AckWindow, tick: int, policy: DeliveryPolicy
    ) -> list[tuple[int, int, int]]:
        """Return the delays of unacknowledged messages for a version 1 successor: tuples (first,
        last, tick).

        `policy` is that of the successor. Its backoff may be shorter, so each delay is limited to
        the delay that it has for the highest attempt count.
        """
        tick_max = tick + policy.redelivery_delay_ticks(
            max((attempts for _, _, attempts in self.attempts), default=1)
        )
        return [
            (first, last, min(due, tick_max))
            for first, last, due in self.not_before_ticks + self.backoff_ticks
            if window.find_first_unacked(first, last) is not None
        ]

    def remaining_delays(self, clock: BrokerClock, tick_seconds: float) -> DelayRanges:
        """Return (first, last, seconds from now) of all delays, ascending."""
        delays = [
            (a, b, (tick - clock.tick) * tick_seconds) for a, b, tick in self.not_before_ticks
        ]
        return sorted(delays + [(a, b, time - clock.now) for a, b, time in self.not_before_times])


def restrict_rows(
    rows: list[tuple[int, int, N]], first: int, last: int
) -> list[tuple[int, int, N]]:
    """Return the parts of ascending, disjoint (first, last, value) rows in first..last-1."""
    if not rows or (first <= rows[0][0] and rows[-1][1] <= last):
        return rows
    return [(max(a, first), min(b, last), n) for a, b, n in rows if a < last and first < b]


def merge_adjacent(rows: Iterable[tuple[int, int, N]], tolerance: N) -> list[tuple[int, int, N]]:
    """Merge adjacent ranges whose values differ by at most `tolerance`. A merged range gets the
    highest value.

    Args:
        rows: Ascending (first, last, value) tuples.
    """
    merged: list[tuple[int, int, N]] = []
    lowest, previous_end = tolerance, -1
    for row in rows:
        first, last, value = row
        if first == previous_end:
            begin, _, highest = merged[-1]
            if max(highest, value) - min(lowest, value) <= tolerance:
                merged[-1] = begin, last, max(highest, value)
                lowest, previous_end = min(lowest, value), last
                continue
        merged.append(row)  # The tuple itself, because many rows are not adjacent to others.
        lowest, previous_end = value, last
    return merged


def highest_values(rows: Iterable[tuple[int, int, N]]) -> list[tuple[int, int, N]]:
    """Return the highest value of each message as ascending, disjoint (first, last, value) ranges.

    O(n log n) in the number of rows, which may overlap and may be in any order.
    """
    pending = sorted(rows)
    merged: list[tuple[int, int, N]] = []
    covering: list[tuple[N, int]] = []  # Heap, highest value first.
    sequence = index = 0
    while index < len(pending) or covering:
        if not covering:
            sequence = max(sequence, pending[index][0])
        while index < len(pending) and pending[index][0] <= sequence:
            _, last, value = pending[index]
            heapq.heappush(covering, (-value, last))
            index += 1
        while covering and covering[0][1] <= sequence:
            heapq.heappop(covering)
        if not covering:
            continue
        value, last = -covering[0][0], covering[0][1]
        if index < len(pending):
            last = min(last, pending[index][0])
        if merged and merged[-1][1:] == (sequence, value):
            sequence = merged.pop()[0]
        merged.append((sequence, last, value))
        sequence = last
    return merged
