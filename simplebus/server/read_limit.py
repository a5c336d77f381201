"""Size limit of a connection's reads, adapted to the time that their processing takes."""

from __future__ import annotations

from simplebus.core.limits import RECEIVE_BYTES

READ_SECONDS_MAX = 0.002
"""CPU time that processing a read should not exceed, so that other clients are served soon."""
MEASURED_READ_BYTES_MIN = 32 * 1024
"""Shorter reads are not measured: the session limits the number of their slow requests."""
_INITIAL_BYTES = 256 * 1024
_TARGET_SECONDS = 0.8 * READ_SECONDS_MAX
_GROWTH_MAX = 2.0


class ReadLimit:
    """Largest size of the next read of one connection, in bytes.

    The size grows while full reads are fast, up to `RECEIVE_BYTES`, because larger batches need
    less time per message. It shrinks after a read that took longer than `READ_SECONDS_MAX`.
    """

    def __init__(self) -> None:
        self.size_bytes = _INITIAL_BYTES

    def record(self, received_bytes: int, seconds: float) -> None:
        """Record the processing of a read.

        Args:
            received_bytes: size of the read.
            seconds: CPU time of its processing, including the messages sent to subscribers.
        """
        is_slow = seconds > READ_SECONDS_MAX
        is_fast = seconds < _TARGET_SECONDS and received_bytes >= self.size_bytes
        if is_slow or is_fast:
            factor = _TARGET_SECONDS / seconds if seconds > 0 else _GROWTH_MAX
            fitting_bytes = int(received_bytes * min(factor, _GROWTH_MAX))
            self.size_bytes = min(max(MEASURED_READ_BYTES_MIN, fitting_bytes), RECEIVE_BYTES)
