"""Keepalive timer of a connection."""

from __future__ import annotations

import math

from simplebus.core.errors import Reason, RemoteProtocolError
from simplebus.core.limits import HEARTBEATS_MISSED_MAX


class Heartbeat:
    """Heartbeat that both sides of a connection have agreed on, seen from one side.

    Times are in seconds of a monotonic clock.
    """

    def __init__(self) -> None:
        self._interval_seconds = 0.0
        """The longest silence that either side allows; 0 for no heartbeat."""
        self._received_at = 0.0
        self._next_check_at = 0.0
        self._sent_bytes = 0
        """Bytes sent up to the previous check."""

    def start(self, interval_seconds: float, now: float) -> None:
        """Start with the agreed interval in seconds; 0 disables the heartbeat."""
        self._interval_seconds = interval_seconds
        self._received_at = self._next_check_at = now

    def mark_received(self, now: float) -> None:
        """Note that the peer has sent bytes."""
        self._received_at = now

    def is_due(self, now: float, sent_bytes: int) -> bool:
        """Return True if a heartbeat must be sent, because nothing was sent lately.

        Args:
            now: Current time in seconds.
            sent_bytes: Bytes sent by this client so far.

        Raises:
            RemoteProtocolError: If the peer was silent for too long.
        """
        if not self._interval_seconds:
            return False
        silent_seconds = now - self._received_at
        if silent_seconds >= self._interval_seconds * HEARTBEATS_MISSED_MAX:
            raise RemoteProtocolError(
                Reason.HEARTBEAT_TIMEOUT,
                f"the server was silent for {silent_seconds:.1f} s; expected at least a heartbeat "
                f"every {self._interval_seconds:g} s",
            )
        if now < self._next_check_at:
            return False
        # Two checks per interval, so that no silence is longer than the interval.
        self._next_check_at = now + self._interval_seconds / 2
        is_silent = sent_bytes == self._sent_bytes
        self._sent_bytes = sent_bytes
        return is_silent

    @property
    def next_check(self) -> float:
        """Time of the next `is_due` call; `math.inf` without a heartbeat."""
        if not self._interval_seconds:
            return math.inf
        return min(
            self._next_check_at, self._received_at + self._interval_seconds * HEARTBEATS_MISSED_MAX
        )
