"""Delivery policy of a position: ack timeout, backoff and limits."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypeVar

from simplebus.core.limits import BACKOFF_TICKS_MAX

N = TypeVar("N", int, float)


@dataclass(frozen=True, slots=True)
class DeliveryPolicy:
    """Limits and delays of the deliveries to one position."""

    ack_timeout_ticks: int
    """Ticks that a message may be in flight before its first redelivery."""
    in_flight_max: int | None = None
    """Messages that may be in flight; None for unlimited."""
    deliveries_max: int = 0
    """Deliveries of one message before it becomes a dead letter; 0 for unlimited.

    A message at the limit becomes a dead letter when it is next selected for sending
    (`Position._give_up_leading`). While a durable has no session, nothing is selected.
    """
    pending_max: int | None = None
    """Messages that may be unsent or in flight before `slow_policy` applies."""
    slow_policy: str = "block"
    accepts_envelopes: bool = False
    """True if the peer understands envelopes; else it gets payloads."""
    backoff_ticks: tuple[int, ...] = ()
    """Ticks before each redelivery after an ack timeout; the last value repeats. If empty, the ack
    timeout doubles each time.
    """
    backoff_seconds: tuple[float, ...] = ()
    """Seconds before each redelivery after a nack; the last value repeats. If empty, the delay is
    `nack_delay_ticks`.
    """

    def redelivery_delay_ticks(self, attempts: int) -> int:
        """Return the ticks between a delivery and the next one if no ack arrives."""
        if self.backoff_ticks:
            return max(_select_step(self.backoff_ticks, attempts), self.ack_timeout_ticks)
        doubled = self.ack_timeout_ticks << min(max(attempts - 1, 0), 16)
        return max(min(doubled, BACKOFF_TICKS_MAX), self.ack_timeout_ticks)

    def nack_delay_ticks(self, attempts: int) -> int:
        """Return the ticks between a nack and the next delivery."""
        if self.backoff_ticks:
            return _select_step(self.backoff_ticks, attempts)
        return self.redelivery_delay_ticks(attempts)

    def nack_delay_seconds(self, attempts: int) -> float | None:
        """Return the seconds between a nack and the next delivery; None if only ticks are known."""
        return _select_step(self.backoff_seconds, attempts) if self.backoff_seconds else None


def _select_step(steps: tuple[N, ...], attempts: int) -> N:
    """Return the step of an attempt; the last one repeats."""
    return steps[min(max(attempts, 1), len(steps)) - 1]


def seconds_to_ticks(seconds: float, tick_seconds: float) -> int:
    """Convert seconds to ticks, rounded up, at least 1."""
    return max(1, math.ceil(seconds / tick_seconds))
