"""Clock of a broker."""

from __future__ import annotations


class BrokerClock:
    """Time and ack timer tick of a broker, as last set by its owner.

    The core never reads a system clock: the server passes the time with each call.
    """

    __slots__ = ("now", "tick")

    def __init__(self, now: float = 0.0) -> None:
        self.now = now
        """Seconds since 1970, by a steady clock."""
        self.tick = 0
        """Ticks of the ack timer so far."""
