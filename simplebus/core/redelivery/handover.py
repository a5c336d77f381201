"""What a position leaves to the one that takes over: how often messages were sent, and which pause.

Rule 1: plain values, in ranges: it costs what its pieces cost, however many messages lie in them.
Rule 2: what is said of a message that is acknowledged means nothing; of which nothing is said, that
was never sent.

    sent    (4, 9) twice  (12, 14) once
    ticks   (4, 6) not before tick 19
    times   (7, 8) not before 12.5 s
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TypeVar

from simplebus.core.redelivery.ack_timer import Span, covering
from simplebus.core.redelivery.ack_window import AckWindow
from simplebus.core.redelivery.delivery_policy import Clock, Terms

N = TypeVar("N", int, float)

Attempts = list[tuple[int, int, int]]
"""Messages first..last-1, and how often they were sent; ascending."""
Pauses = list[tuple[int, int, float]]
"""Messages first..last-1, and until when they are not to be sent."""


@dataclass(frozen=True, slots=True)
class Left:
    """See the module's law."""

    sent: Attempts = field(default_factory=list)
    ticks: list[tuple[int, int, int]] = field(default_factory=list)
    """Not before this tick."""
    times: Pauses = field(default_factory=list)
    """Not before this time, in seconds since 1970."""

    def within(self, first: int, last: int) -> Left:
        """What is said of messages first..last-1."""
        return Left(
            [(max(a, first), min(b, last), n) for a, b, n in self.sent if a < last and first < b],
            [(max(a, first), min(b, last), n) for a, b, n in self.ticks if a < last and first < b],
            [(max(a, first), min(b, last), n) for a, b, n in self.times if a < last and first < b],
        )

    def joined(self, other: Left) -> Left:
        """What both say: of what both speak of, the one that was sent more often, and the longest
        pause. However often the same is said, it is kept once."""
        if not other.sent:
            return self
        if not self.sent:
            return other
        return Left(
            highest(self.sent + other.sent),
            highest(self.ticks + other.ticks),
            highest(self.times + other.times),
        )

    def spans(self, window: AckWindow) -> list[Span]:
        """What a window has passed, by how often it was sent."""
        return covering(window.floor, window.cursor, self.sent, otherwise=0)

    def held_back(self, window: AckWindow, tick: int, terms: DeliveryPolicy) -> list[tuple[int, int, int]]:
        """`ticks` of what is not acknowledged. No pause is longer, from this tick on, than whoever
        takes over would have it: it may not know what another one asked for."""
        most = tick + terms.redelivery_delay_ticks(max((often for _, _, often in self.sent), default=1))
        return [
            (first, last, min(due, most))
            for first, last, due in self.ticks
            if window.unacked(first, last)
        ]

    def pauses(self, clock: BrokerClock, tick_seconds: float) -> Pauses:
        """For how many seconds from now on messages first..last-1 are not to be sent, ascending."""
        pauses = [(a, b, (tick - clock.tick) * tick_seconds) for a, b, tick in self.ticks]
        return sorted(pauses + [(a, b, time - clock.now) for a, b, time in self.times])


def merged(rows: Iterable[tuple[int, int, N]], slack: N) -> list[tuple[int, int, N]]:
    """Rows that follow on one another with values at most `slack` apart are one row, which has the
    highest of them. The rows ascend."""
    found: list[tuple[int, int, N]] = []
    least = slack
    for first, last, value in rows:
        if found and found[-1][1] == first:
            begin, _, most = found[-1]
            if max(most, value) - min(least, value) <= slack:
                found[-1] = begin, last, max(most, value)
                least = min(least, value)
                continue
        found.append((first, last, value))
        least = value
    return found


def highest(rows: Iterable[tuple[int, int, N]]) -> list[tuple[int, int, N]]:
    """What rows say of messages first..last-1: of each message the highest value alone. Ascending
    and disjoint; as many steps as there are rows."""
    ahead = sorted(rows)
    found: list[tuple[int, int, N]] = []
    here: list[tuple[N, int]] = []  # A heap of what is said of message `at`, the highest first.
    at = index = 0
    while index < len(ahead) or here:
        if not here:
            at = max(at, ahead[index][0])
        while index < len(ahead) and ahead[index][0] <= at:
            _, last, value = ahead[index]
            heapq.heappush(here, (-value, last))
            index += 1
        while here and here[0][1] <= at:
            heapq.heappop(here)
        if not here:
            continue
        value, last = -here[0][0], here[0][1]
        if index < len(ahead):
            last = min(last, ahead[index][0])
        if found and found[-1][1:] == (at, value):
            at = found.pop()[0]
        found.append((at, last, value))
        at = last
    return found
