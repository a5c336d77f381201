"""Conversion of a stream's storage times to the server's own clock.

Storage times come from the clock of a NATS server, which may differ from this server's clock and
may be changed. A message that appears to be as young as a new one shows that both clocks agree.
Otherwise the stream is asked for its time, after the message arrived or shortly before.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any

from simplebus.core.ring.columns import Times

RECENT_SECONDS = 0.5
"""Largest apparent age, and smallest apparent age below zero, that needs no query."""


ANSWER_VALID_SECONDS = 0.1
"""Time for which an answer of the stream is used."""


class StreamClock:
    """Offset between the clock of a class's stream and the server's clock."""

    def __init__(self) -> None:
        self._is_query_needed = False
        self._is_query_pending = False
        self._offset_seconds = 0.0
        """Stream time minus server time, as far as known."""
        self._answered_query_at = -float("inf")
        """Time of the last query that was answered."""

    @property
    def needs_answer(self) -> bool:
        """True while messages wait for the stream's time."""
        return self._is_query_needed or self._is_query_pending

    def to_local_times(self, stored: Times, received_at: float) -> Times | None:
        """Convert storage times of messages that arrived at `received_at`.

        Returns:
            Times by the server's clock, shape (n,); None if the stream must be asked for its
            time first.
        """
        local_times: Times = stored - self._offset_seconds
        ages = received_at - local_times
        is_young = ages.min() >= -RECENT_SECONDS and ages.max() <= RECENT_SECONDS
        if not (is_young or self._answered_query_at >= received_at - ANSWER_VALID_SECONDS):
            self._is_query_needed = not self._is_query_pending
            return None
        return local_times

    def begin_query(self) -> bool:
        """Return True if the caller must query the stream and then call `finish_query`."""
        is_needed, self._is_query_needed = self._is_query_needed, False
        self._is_query_pending = self._is_query_pending or is_needed
        return is_needed

    def finish_query(
        self, asked_at: float, answered_at: float, info: dict[str, Any] | None
    ) -> None:
        """Update the offset from the stream info, received between two local times in Unix seconds.

        `info` is None if the query failed; it is repeated then. The offset changes as little as the
        answer allows.
        """
        self._is_query_pending = False
        if info is None:
            return
        server_time = _server_time(info)
        if server_time is not None:
            self._offset_seconds = min(
                max(self._offset_seconds, server_time - answered_at), server_time - asked_at
            )
        self._answered_query_at = max(self._answered_query_at, asked_at)


def _server_time(info: dict[str, Any]) -> float | None:
    """Return the server time of a stream info: seconds since 1970; None before nats-server 2.10."""
    try:
        return datetime.fromisoformat(info["ts"]).timestamp()
    except (KeyError, TypeError, ValueError, OverflowError):
        return None
