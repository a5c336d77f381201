"""Payloads of the benchmark, and the check of received frames.

    payload   run, 4 digits │ number, 12 digits │ filler      0042000000000017abcdefgh…

A subscriber that has its last message has received all: once each except for marked redeliveries,
in order, byte for byte, with consecutive message ids.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from simplebus.core.broker.wait_reasons import format_count
from simplebus.core.limits import DELIMITER_BYTES, HEADER_BYTES, MESSAGE_ID_MASK

_RUN_DIGITS, _NUMBER_DIGITS = 4, 12
PAYLOAD_BYTES_MIN = _RUN_DIGITS + _NUMBER_DIGITS
RUNS = 10**_RUN_DIGITS

_ALPHABET = np.frombuffer(b"abcdefghijklmnopqrstuvwxyz", np.uint8)
_ZERO = ord("0")

Rows = npt.NDArray[np.uint8]
"""Payloads of equal length, uint8[count, bytes]."""


class TrafficError(Exception):
    """A received message differs from the published one. The text is one sentence."""


def payload_rows(*, run: int, first: int, count: int, size: int) -> Rows:
    """Return payloads first..first+count-1 of a run as rows of an array."""
    payload_array = np.empty((count, size), np.uint8)
    payload_array[:, PAYLOAD_BYTES_MIN:] = np.resize(_ALPHABET, size - PAYLOAD_BYTES_MIN)
    payload_array[:, :_RUN_DIGITS] = _run_digits(run)
    remaining = np.arange(first, first + count)
    for column in range(PAYLOAD_BYTES_MIN - 1, _RUN_DIGITS - 1, -1):
        remaining, digit = np.divmod(remaining, 10)
        payload_array[:, column] = digit + _ZERO
    return payload_array


def payloads(*, run: int, first: int, count: int, size: int) -> list[bytes]:
    """Return payloads first..first+count-1 of a run as bytes objects."""
    payload_array = payload_rows(run=run, first=first, count=count, size=size)
    contents: list[bytes] = payload_array.view(f"V{size}").ravel().tolist()
    return contents


def _run_digits(run: int) -> Rows:
    return np.frombuffer(b"%0*d" % (_RUN_DIGITS, run), np.uint8)


class TrafficCheck:
    """Check of one subscriber's messages."""

    def __init__(self, *, run: int, count: int, size: int) -> None:
        self.seen_count = 0
        """Messages received for the first time, in order."""
        self.redelivered_count = 0
        self.leftover_count = 0
        """Messages of earlier runs in the class."""
        self._run = run
        self._count = count
        self._size = size
        self._first_message_id = 0

    @property
    def is_done(self) -> bool:
        return self.seen_count == self._count

    def check_frames(
        self, frames: memoryview, *, first_id: int, count: int, redelivered: bool
    ) -> None:
        """Check received frames with consecutive ids. Raises TrafficError."""
        received = self._payloads(frames, count)
        if received is None:
            if self.seen_count:
                raise TrafficError(f"message {self.seen_count} has a wrong length")
            self.leftover_count += count
            return
        if not self.seen_count:
            is_of_run = (received[:, :_RUN_DIGITS] == _run_digits(self._run)).all(axis=1)
            skipped = int(is_of_run.argmax()) if is_of_run.any() else count
            self.leftover_count += skipped
            received, first_id, count = received[skipped:], first_id + skipped, count - skipped
            if not count:
                return
            self._first_message_id = first_id
        number = (first_id - self._first_message_id) & MESSAGE_ID_MASK
        if redelivered:
            if number + count > self.seen_count:
                raise TrafficError(f"message {number} was redelivered before it was delivered")
            self.redelivered_count += count
        elif number != self.seen_count:
            raise TrafficError(f"received message number {number}, expected {self.seen_count}")
        else:
            self.seen_count += count
        if self.seen_count > self._count:
            raise TrafficError(
                f"received {format_count(self.seen_count, 'message')}, expected {self._count:,}"
            )
        expected = payload_rows(run=self._run, first=number, count=count, size=self._size)
        if not np.array_equal(received, expected):
            at = int((received != expected).any(axis=1).argmax())
            raise TrafficError(
                f"message {number + at} is {received[at].tobytes()!r}, "
                f"expected {expected[at].tobytes()!r}"
            )

    def _payloads(self, frames: memoryview, count: int) -> Rows | None:
        """Return the payloads of frames; None if they have another length than the run's."""
        length = HEADER_BYTES + self._size + DELIMITER_BYTES
        if len(frames) != count * length:
            return None
        whole = np.frombuffer(frames, np.uint8).reshape(count, length)
        return whole[:, HEADER_BYTES:-DELIMITER_BYTES]


def quantiles(seconds: list[float]) -> dict[str, float]:
    """Return the median, 90 %, 99 %, 99.9 % and maximum of latencies."""
    points = {"median": 50.0, "90 %": 90.0, "99 %": 99.0, "99.9 %": 99.9, "worst": 100.0}
    values = np.percentile(np.array(seconds), list(points.values()), method="higher")
    return dict(zip(points, values.tolist(), strict=True))
