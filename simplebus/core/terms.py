"""How a subscription is served, by which clock, and what it gathers to be sent.

Rule 1: plain values; what follows from them is the subscription's business.
"""

from __future__ import annotations

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
class Terms:
    """How a subscription is served."""

    ack_ticks: int
    """Ticks until what was sent counts as lost, the first time."""
    in_flight_max: int | None = None
    """Messages that may be in flight; None for as many as there are."""
    deliveries_max: int = 0
    """How often a message is sent before it is given up; 0 for without end."""
    pending_max: int | None = None
    """Messages that may wait for it or be in flight before `slow` decides."""
    slow: str = "block"
    takes_envelopes: bool = False
    """Whether the peer knows envelopes; else it gets payloads."""

    def pause(self, attempts: int) -> int:
        """Ticks between a sending and the next."""
        doubled = self.ack_ticks << min(attempts - 1, 16)
        return max(min(doubled, REDELIVERY_PAUSE_TICKS_MAX), self.ack_ticks)


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
