"""Estimate of the bytes that a position has in flight.

Acknowledged messages do not count. Messages are measured one by one only if acknowledged messages
lie between them, and again only after enough deliveries and acks. Between two measurements, new
messages count in full and older ones with their average size.
"""

from __future__ import annotations

from simplebus.core.limits import IN_FLIGHT_BYTES
from simplebus.core.redelivery.ack_window import AckWindow
from simplebus.core.ring.ring import Ring

# Measured again after a change by more than 1/8 of the messages in flight.
_REMEASURE_FRACTION = 8

# With more unacknowledged messages than this per message in flight, their average size is used.
_WAITING_RATIO_MAX = 4


class InFlightBytes:
    """Bytes in flight of one position."""

    def __init__(self, ring: Ring) -> None:
        self._ring = ring
        self._measured_cursor = 0
        """Cursor at the last measurement."""
        self._measured_count = 0
        """Messages in flight at the last measurement."""
        self._measured_bytes = 0
        """Bytes in flight at the last measurement."""

    def estimate(self, in_flight_count: int, window: AckWindow) -> int:
        """Return the bytes of the `in_flight_count` messages of `window` that are in flight.

        The result is never much too low, and not much too high once it reaches IN_FLIGHT_BYTES.
        """
        ring, floor = self._ring, window.floor
        # Messages above the head are not read back from disk yet.
        cursor = min(window.cursor, ring.head)
        if in_flight_count == cursor - floor:
            return ring.range_bytes(floor, cursor)
        measured_end = max(self._measured_cursor, floor)
        older_count = max(0, in_flight_count - (cursor - measured_end))
        size = ring.range_bytes(measured_end, cursor) + self._measured_bytes * older_count // max(
            1, self._measured_count
        )
        if size < IN_FLIGHT_BYTES:
            return size
        change = abs(in_flight_count - self._measured_count) + cursor - self._measured_cursor
        if change <= self._measured_count // _REMEASURE_FRACTION:
            return size
        self._measured_cursor, self._measured_count, self._measured_bytes = (
            cursor,
            in_flight_count,
            self._measure(in_flight_count, window),
        )
        return self._measured_bytes

    def _measure(self, in_flight_count: int, window: AckWindow) -> int:
        ring, floor, cursor = self._ring, window.floor, min(window.cursor, self._ring.head)
        unacked_count = window.in_flight_count
        if unacked_count > _WAITING_RATIO_MAX * in_flight_count:
            return ring.range_bytes(floor, cursor) * in_flight_count // (cursor - floor)
        gaps, behind = window.unacked_sequences()
        gaps = gaps[: gaps.searchsorted(cursor)]
        return (
            (ring.sequences_bytes(gaps) + ring.range_bytes(behind, cursor))
            * in_flight_count
            // unacked_count
        )
