"""Size limit of a connection's reads, adapted to the time that their processing takes."""

from __future__ import annotations

from simplebus.core.limits import RECEIVE_BYTES

READ_SECONDS_MAX = 0.002
"""CPU time that processing a read should not exceed, so that other clients are served soon."""
MEASURED_READ_BYTES_MIN = 32 * 1024
"""Shorter reads are not measured: the session limits the number of their slow requests."""
_INITIAL_BYTES = 256 * 1024


class ReadLimit:
    """Largest size of the next read of one connection, in bytes.

    The size doubles while full reads take less than half of `READ_SECONDS_MAX`, up to
    `RECEIVE_BYTES`, because larger batches need less time per message. It shrinks after a read that
    took longer, in proportion.
    """

    def __init__(self) -> None:
        self.size_bytes = _INITIAL_BYTES

    def record(self, received_bytes: int, seconds: float) -> None:
        """Record the processing of a read.

        Args:
            received_bytes: size of the read.
            seconds: CPU time of its processing, including the messages sent to subscribers.
        """
        if seconds > READ_SECONDS_MAX:
            fitting_bytes = int(received_bytes * READ_SECONDS_MAX / seconds)
            self.size_bytes = max(MEASURED_READ_BYTES_MIN, fitting_bytes)
        elif received_bytes >= self.size_bytes and seconds <= READ_SECONDS_MAX / 2:
            self.size_bytes = min(2 * self.size_bytes, RECEIVE_BYTES)
