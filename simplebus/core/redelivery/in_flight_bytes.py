"""Estimate of the bytes that a position has in flight.

Acknowledged messages do not count. Messages are measured one by one only if acknowledged messages
lie between them, and again only after enough deliveries and acks. Between two measurements, new
messages count in full and older ones with their average size. A measurement of very many messages
is done in portions.
"""

from __future__ import annotations

import numpy as np

from simplebus.core.limits import IN_FLIGHT_BYTES, MEASURED_MESSAGES_PER_TURN
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
        self._measurement: _Measurement | None = None
        """The measurement that is not complete; see `continue_measuring`."""

    @property
    def is_measuring(self) -> bool:
        """True if `continue_measuring` has work to do. Until then, `estimate` may be too high."""
        return self._measurement is not None

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
        if self._measurement is not None:
            return size
        unacked_count = window.in_flight_count
        if unacked_count > _WAITING_RATIO_MAX * in_flight_count:
            waiting_bytes = ring.range_bytes(floor, cursor) * in_flight_count // (cursor - floor)
            self._record(cursor, in_flight_count, waiting_bytes)
            return waiting_bytes
        self._measurement = _Measurement(ring, in_flight_count, window)
        self.continue_measuring()
        return size if self.is_measuring else self._measured_bytes

    def continue_measuring(self) -> int:
        """Measure up to MEASURED_MESSAGES_PER_TURN messages. Returns this number, or 0 if no
        measurement is in progress.
        """
        measurement = self._measurement
        if measurement is None:
            return 0
        if measurement.measure_some():
            self._measurement = None
            self._record(measurement.cursor, measurement.in_flight_count, measurement.bytes)
        return MEASURED_MESSAGES_PER_TURN

    def _record(self, cursor: int, in_flight_count: int, size_bytes: int) -> None:
        self._measured_cursor, self._measured_count = cursor, in_flight_count
        self._measured_bytes = size_bytes


class _Measurement:
    """Measurement of the unacknowledged messages of one moment, from the newest to the oldest.

    A message that is released before it is measured counts with the average size of the others.
    """

    def __init__(self, ring: Ring, in_flight_count: int, window: AckWindow) -> None:
        self.cursor, self.in_flight_count = min(window.cursor, ring.head), in_flight_count
        self._ring = ring
        self._unacked_count = window.in_flight_count
        self._floor = window.floor
        self._is_unacked = window.unacked_flags()
        """Flags of the messages from the floor on. All later messages are unacknowledged."""
        flags_end = self._floor + self._is_unacked.size
        self._is_unacked = self._is_unacked[: max(0, self.cursor - self._floor)]
        self._gap_count = int(np.count_nonzero(self._is_unacked))
        self._behind_bytes = ring.range_bytes(flags_end, self.cursor)
        self._measured_bytes = self._measured_count = 0

    def measure_some(self) -> bool:
        """Measure some messages. Returns True if that were the last ones."""
        begin = max(0, self._is_unacked.size - MEASURED_MESSAGES_PER_TURN)
        part = np.flatnonzero(self._is_unacked[begin:]) + (self._floor + begin)
        self._is_unacked = self._is_unacked[:begin]
        stored = part[part.searchsorted(self._ring.floor) :]
        self._measured_bytes += self._ring.sequences_bytes(stored)
        self._measured_count += stored.size
        return not begin

    @property
    def bytes(self) -> int:
        """Bytes of the messages in flight."""
        gap_bytes = self._measured_bytes * self._gap_count // max(1, self._measured_count)
        return (gap_bytes + self._behind_bytes) * self.in_flight_count // self._unacked_count
