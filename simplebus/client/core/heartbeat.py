"""When to say something although there is nothing to say, and when to give the peer up."""

from __future__ import annotations

import math

from simplebus.core.errors import Reason, RemoteProtocolError
from simplebus.core.limits import HEARTBEATS_MISSED_MAX


class Heartbeat:
    """The beat that both sides of a connection have agreed on, from one side."""

    def __init__(self) -> None:
        self._interval_seconds = 0.0
        """Silence that neither side lets come about; 0 while there is none agreed."""
        self._received_at = 0.0
        self._next_check_at = 0.0
        self._sent_bytes = 0
        """As they were at the last look."""

    def start(self, interval_seconds: float, now: float) -> None:
        """This is agreed; 0 for none."""
        self._interval_seconds = interval_seconds
        self._received_at = self._next_check_at = now

    def mark_received(self, now: float) -> None:
        """The peer has sent something."""
        self._received_at = now

    def is_due(self, now: float, sent_bytes: int) -> bool:
        """Whether to send one, when so many bytes were sent so far.

        Raises RemoteProtocolError when the peer was silent for too long.
        """
        if not self._interval_seconds:
            return False
        silent_seconds = now - self._received_at
        if silent_seconds >= self._interval_seconds * HEARTBEATS_MISSED_MAX:
            raise RemoteProtocolError(
                Reason.HEARTBEAT_TIMEOUT,
                f"the bus was silent for {silent_seconds:.1f} s; it was to send something every "
                f"{self._interval_seconds:g} s",
            )
        if now < self._next_check_at:
            return False
        self._next_check_at = (
            now + self._interval_seconds / 2
        )  # So that no silence is longer than the whole.
        is_silent = sent_bytes == self._sent_bytes
        self._sent_bytes = sent_bytes
        return is_silent

    @property
    def next_check(self) -> float:
        """When `is_due` is to be asked again; math.inf for never."""
        if not self._interval_seconds:
            return math.inf
        return min(
            self._next_check_at, self._received_at + self._interval_seconds * HEARTBEATS_MISSED_MAX
        )
