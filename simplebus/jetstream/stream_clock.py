"""When the messages of a stream were accepted, by the door's own clock.

Rule 1: a stream says when it took a message by the clock of its server, and doors have clocks of
their own: how old a message is, the server's clock alone can tell, which may be set meanwhile.
Rule 2: what came as young as a message is that was just stored needs no question: both clocks say
the same. Anything else waits until the stream was asked what time it is: after it came, or so
shortly before that what comes behind a long wait is not asked for again and again.
Rule 3: what was stored before a server's clock was set is older or younger by as much, as it is to
the server.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any

from simplebus.core.ring.columns import Times

RECENT_SECONDS = 0.5
"""What seems to have been on its way for so long, or to come so much before its time, needs no
question."""


ANSWER_VALID_SECONDS = 0.1
"""For so long it is known what time it is to the stream, once it has server_time so."""


class StreamClock:
    """What is known of the clock of a class's stream."""

    def __init__(self) -> None:
        self._is_query_needed = False
        """Whether the stream is to be asked what time it is,"""
        self._is_query_pending = False
        """or is being asked."""
        self._offset_seconds = 0.0
        """So many seconds it is ahead of the door's clock, as far as is known."""
        self._answered_query_at = -float("inf")
        """When it was asked that last, of those times at which it answered."""

    @property
    def needs_answer(self) -> bool:
        """Whether something waits until it is known what time it is."""
        return self._is_query_needed or self._is_query_pending

    def to_local_times(self, stored: Times, received_at: float) -> Times | None:
        """When messages were stored, by the door's clock, which came at a time by that clock; None
        if the stream is to be asked first."""
        local_times: Times = stored - self._offset_seconds
        ages = received_at - local_times
        is_young = ages.min() >= -RECENT_SECONDS and ages.max() <= RECENT_SECONDS
        if not (is_young or self._answered_query_at >= received_at - ANSWER_VALID_SECONDS):
            self._is_query_needed = not self._is_query_pending
            return None
        return local_times

    def begin_query(self) -> bool:
        """Whether the stream is to be asked. Who hears so asks, and says `heard`."""
        wanted, self._is_query_needed = self._is_query_needed, False
        self._is_query_pending = self._is_query_pending or wanted
        return wanted

    def finish_query(
        self, asked_at: float, answered_at: float, info: dict[str, Any] | None
    ) -> None:
        """The stream was asked, and told this between these two times; None for nothing, so that it
        is asked again. What was known before is moved as little as that allows."""
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
    """When this was server_time of a stream, by its server's clock: seconds since 1970; None where it is
    not server_time, as by servers older than 2.10."""
    try:
        return datetime.fromisoformat(info["ts"]).timestamp()
    except (KeyError, TypeError, ValueError, OverflowError):
        return None
