"""How a subscription is served, by which clock, and what it gathers to be sent.

Rule 1: plain values; what follows from them is the subscription's business.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from simplebus.core.limits import REDELIVERY_PAUSE_TICKS_MAX


class Clock:
    """The reading that a driver brought last."""

    __slots__ = ("now", "tick")

    def __init__(self, now: float = 0.0) -> None:
        self.now = now
        """Seconds since 1970, by a steady clock."""
        self.tick = 0
        """Beats of the ack timer."""


@dataclass(frozen=True, slots=True)
class DeliveryPolicy:
    """How a subscription is served."""

    ack_timeout_ticks: int
    """Ticks until what was sent counts as lost, the first time."""
    in_flight_max: int | None = None
    """Messages that may be in flight; None for as many as there are."""
    deliveries_max: int = 0
    """How often a message is sent before it is given up; 0 for without end."""
    pending_max: int | None = None
    """Messages that may wait for it or be in flight before `slow` decides."""
    slow_policy: str = "block"
    accepts_envelopes: bool = False
    """Whether the peer knows envelopes; else it gets payloads."""
    backoff_ticks: tuple[int, ...] = ()
    """Ticks before the second sending, the third and so on, the last one for all further ones;
    none for the ack timeout, doubled each time."""

    def redelivery_delay_ticks(self, attempts: int) -> int:
        """Ticks between a sending and the next, for what is not acknowledged in time."""
        return max(self.nack_delay_ticks(attempts), self.ack_timeout_ticks)

    def nack_delay_ticks(self, attempts: int) -> int:
        """Ticks from a refusal to the next sending."""
        if self.backoff_ticks:
            return self.backoff_ticks[min(max(attempts, 1), len(self.backoff_ticks)) - 1]
        doubled = self.ack_timeout_ticks << min(max(attempts - 1, 0), 16)
        return max(min(doubled, REDELIVERY_PAUSE_TICKS_MAX), self.ack_timeout_ticks)


def seconds_to_ticks(seconds: float, tick_seconds: float) -> int:
    """A time in ticks, rounded up, one at least."""
    return max(1, math.ceil(seconds / tick_seconds))


@dataclass(slots=True)
class Pieces:
    """Copies to be sent together."""

    space: int
    count: int = 0
    parts: list[memoryview | bytes] = field(default_factory=list)

    def add(self, part: memoryview | bytes, count: int) -> None:
        self.parts.append(part)
        self.space -= len(part)
        self.count += count
