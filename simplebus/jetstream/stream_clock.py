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

YOUNG_SECONDS = 0.5
"""What seems to have been on its way for so long, or to come so much before its time, needs no
question."""


TRUST_SECONDS = 0.1
"""For so long it is known what time it is to the stream, once it has said so."""


class StreamClock:
    """What is known of the clock of a class's stream."""

    def __init__(self) -> None:
        self._is_wanted = False
        """Whether the stream is to be asked what time it is,"""
        self._is_asked = False
        """or is being asked."""
        self._ahead = 0.0
        """So many seconds it is ahead of the door's clock, as far as is known."""
        self._asked_at = -float("inf")
        """When it was asked that last, of those times at which it answered."""

    @property
    def is_unsure(self) -> bool:
        """Whether something waits until it is known what time it is."""
        return self._is_wanted or self._is_asked

    def dates(self, stored: Times, came_at: float) -> Times | None:
        """When messages were stored, by the door's clock, which came at a time by that clock; None
        if the stream is to be asked first."""
        found: Times = stored - self._ahead
        ages = came_at - found
        is_young = ages.min() >= -YOUNG_SECONDS and ages.max() <= YOUNG_SECONDS
        if not (is_young or self._asked_at >= came_at - TRUST_SECONDS):
            self._is_wanted = not self._is_asked
            return None
        return found

    def take_wanted(self) -> bool:
        """Whether the stream is to be asked. Who hears so asks, and says `heard`."""
        wanted, self._is_wanted = self._is_wanted, False
        self._is_asked = self._is_asked or wanted
        return wanted

    def heard(self, asked_at: float, answered_at: float, info: dict[str, Any] | None) -> None:
        """The stream was asked, and told this between these two times; None for nothing, so that it
        is asked again. What was known before is moved as little as that allows."""
        self._is_asked = False
        if info is None:
            return
        said = _time_of(info)
        if said is not None:
            self._ahead = min(max(self._ahead, said - answered_at), said - asked_at)
        self._asked_at = max(self._asked_at, asked_at)


def _time_of(info: dict[str, Any]) -> float | None:
    """When this was said of a stream, by its server's clock: seconds since 1970; None where it is
    not said, as by servers older than 2.10."""
    try:
        return datetime.fromisoformat(info["ts"]).timestamp()
    except (KeyError, TypeError, ValueError, OverflowError):
        return None
