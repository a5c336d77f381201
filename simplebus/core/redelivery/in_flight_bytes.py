"""How many bytes a position has in flight.

Rule 1: what is acknowledged does not count, wherever it lies.
Rule 2: messages are looked at one by one only where some between them are acknowledged, and again
only when so many were sent or acknowledged since that it may be worth it. Until then what was sent
since counts in full, and each of the others as much as they did on average.
"""

from __future__ import annotations

from simplebus.core.limits import IN_FLIGHT_BYTES
from simplebus.core.redelivery.ack_window import AckWindow
from simplebus.core.ring.ring import Ring

# A part of those that were in flight: when so many more or fewer are, they are looked at again.
_CHANGED = 8

# Where so many wait for each one that is in flight, it counts as much as they all do on average.
_WAITING_MAX = 4


class Weight:
    """Of what one position has in flight."""

    def __init__(self, ring: Ring) -> None:
        self._ring = ring
        self._cursor = 0
        """Where the cursor was when the messages were looked at last."""
        self._held = 0
        """How many were in flight then."""
        self._bytes = 0
        """And how many bytes they had."""

    def of(self, held: int, window: AckWindow) -> int:
        """Bytes of the `held` messages of this window that are in flight. Never too few by much,
        and where they are too many for one position, not too many by much either."""
        ring, floor = self._ring, window.floor
        cursor = min(window.cursor, ring.head)  # Behind it lies what is not read back yet.
        if held == cursor - floor:
            return ring.size(floor, cursor)
        since = max(self._cursor, floor)
        older = max(0, held - (cursor - since))
        size = ring.size(since, cursor) + self._bytes * older // max(1, self._held)
        if size < IN_FLIGHT_BYTES:
            return size
        change = abs(held - self._held) + cursor - self._cursor
        if change <= self._held // _CHANGED:
            return size
        self._cursor, self._held, self._bytes = cursor, held, self._look(held, window)
        return self._bytes

    def _look(self, held: int, window: AckWindow) -> int:
        ring, floor, cursor = self._ring, window.floor, min(window.cursor, self._ring.head)
        there = window.in_flight
        if there > _WAITING_MAX * held:
            return ring.size(floor, cursor) * held // (cursor - floor)
        gaps, behind = window.gaps()
        gaps = gaps[: gaps.searchsorted(cursor)]
        return (ring.sizes(gaps) + ring.size(behind, cursor)) * held // there
