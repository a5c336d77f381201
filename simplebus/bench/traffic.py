"""What the bench publishes, and the check of what arrives. Arrays in, verdict out.

    payload   run, 4 digits │ number, 12 digits │ filler      0042000000000017abcdefgh…

Rule 1: a subscriber that has seen its last message has seen all of them: once each but for marked
redeliveries, in order, byte for byte, under consecutive ids.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from simplebus.core.limits import DELIMITER_BYTES, HEADER_BYTES, MESSAGE_ID_MASK

_RUN_DIGITS, _NUMBER_DIGITS = 4, 12
PAYLOAD_BYTES_MIN = _RUN_DIGITS + _NUMBER_DIGITS
RUNS = 10**_RUN_DIGITS

_ALPHABET = np.frombuffer(b"abcdefghijklmnopqrstuvwxyz", np.uint8)
_ZERO = ord("0")

Rows = npt.NDArray[np.uint8]
"""Payloads of one length, shape (count, bytes)."""


class TrafficError(Exception):
    """What arrived is not what was sent. The text is one sentence."""


def rows(*, run: int, first: int, count: int, size: int) -> Rows:
    """Payloads first..first+count-1 of a run."""
    made = np.empty((count, size), np.uint8)
    made[:, PAYLOAD_BYTES_MIN:] = np.resize(_ALPHABET, size - PAYLOAD_BYTES_MIN)
    made[:, :_RUN_DIGITS] = _run_digits(run)
    left = np.arange(first, first + count)
    for column in range(PAYLOAD_BYTES_MIN - 1, _RUN_DIGITS - 1, -1):
        left, digit = np.divmod(left, 10)
        made[:, column] = digit + _ZERO
    return made


def payloads(*, run: int, first: int, count: int, size: int) -> list[bytes]:
    """The same as bytes objects."""
    made = rows(run=run, first=first, count=count, size=size)
    contents: list[bytes] = made.view(f"V{size}").ravel().tolist()
    return contents


def _run_digits(run: int) -> Rows:
    return np.frombuffer(b"%0*d" % (_RUN_DIGITS, run), np.uint8)


class Check:
    """What one subscriber has seen of a run."""

    def __init__(self, *, run: int, count: int, size: int) -> None:
        self.seen = 0
        """Messages that came for the first time; all of them in order."""
        self.redelivered = 0
        self.leftovers = 0
        """Messages that lay in the class from before the run."""
        self._run = run
        self._count = count
        self._size = size
        self._id_of_first = 0

    @property
    def is_done(self) -> bool:
        return self.seen == self._count

    def take(self, frames: memoryview, *, first_id: int, count: int, redelivered: bool) -> None:
        """Check frames with consecutive ids, as the wire brought them. Raises TrafficError."""
        arrived = self._payloads(frames, count)
        if arrived is None:
            if self.seen:
                raise TrafficError(f"message {self.seen} came with a wrong length")
            self.leftovers += count
            return
        if not self.seen:
            ours = (arrived[:, :_RUN_DIGITS] == _run_digits(self._run)).all(axis=1)
            skipped = int(ours.argmax()) if ours.any() else count
            self.leftovers += skipped
            arrived, first_id, count = arrived[skipped:], first_id + skipped, count - skipped
            if not count:
                return
            self._id_of_first = first_id
        number = (first_id - self._id_of_first) & MESSAGE_ID_MASK
        if redelivered:
            if number + count > self.seen:
                raise TrafficError(f"message {number} came as a redelivery before it was delivered")
            self.redelivered += count
        elif number != self.seen:
            raise TrafficError(f"the message with number {number} came where {self.seen} was due")
        else:
            self.seen += count
        if self.seen > self._count:
            raise TrafficError(f"{self.seen} messages came, {self._count} were sent")
        expected = rows(run=self._run, first=number, count=count, size=self._size)
        if not np.array_equal(arrived, expected):
            at = int((arrived != expected).any(axis=1).argmax())
            raise TrafficError(
                f"message {number + at} came as {arrived[at].tobytes()!r}, "
                f"sent was {expected[at].tobytes()!r}"
            )

    def _payloads(self, frames: memoryview, count: int) -> Rows | None:
        """The payloads in the frames; None when they have not the run's length."""
        length = HEADER_BYTES + self._size + DELIMITER_BYTES
        if len(frames) != count * length:
            return None
        whole = np.frombuffer(frames, np.uint8).reshape(count, length)
        return whole[:, HEADER_BYTES:-DELIMITER_BYTES]


def quantiles(seconds: list[float]) -> dict[str, float]:
    """The usual points of a distribution of latencies."""
    points = {"median": 50.0, "90 %": 90.0, "99 %": 99.0, "99.9 %": 99.9, "worst": 100.0}
    values = np.percentile(np.array(seconds), list(points.values()), method="higher")
    return dict(zip(points, values.tolist(), strict=True))
