"""Job of a timed program, and its output.

A program prints `ready` when it is subscribed, and at its end one line of JSON: times of the
monotonic clock, which all processes share, or figures. A wrong message ends the program.
"""

from __future__ import annotations

import itertools
import json
import struct
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

CLASS = 1
TYPED_CLASS = 2
STAMP = struct.Struct("<Qq")
"""Payload of a paced message: its number, and when it was sent, in ns of the monotonic clock."""


@dataclass(frozen=True)
class Job:
    """Job of one program."""

    role: str
    port: int
    count: int
    backend: str = "trio"
    size_bytes: int = 16
    block: str = ""
    """File with the generator's payloads."""
    in_flight: int = 1
    """Number of tasks that publish, each with one unconfirmed message."""
    pace: int = 0
    """Messages per second of a paced publisher."""

    @classmethod
    def from_arguments(cls) -> Job:
        return cls(**json.loads(sys.argv[1]))

    def argument(self) -> str:
        return json.dumps(asdict(self))

    def payloads(self) -> Iterator[bytes]:
        """Yield the payload of each message."""
        data, size = Path(self.block).read_bytes(), self.size_bytes
        frames = [data[at : at + size] for at in range(0, len(data), size)]
        return itertools.islice(itertools.cycle(frames), self.count)

    def seconds_until(self, number: int, started: float) -> float:
        """Return the time until a paced publisher sends this message; 0.0 if it is late."""
        return max(0.0, started + number / self.pace - now())


class OneWayTimes:
    """Times of stamped messages from publisher to subscriber."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._seconds = list[float]()

    @property
    def is_complete(self) -> bool:
        return len(self._seconds) == self._count

    def add(self, payload: bytes) -> None:
        """Record a received message, which must be the next one."""
        received = time.monotonic_ns()
        number, sent = STAMP.unpack(payload)
        if number != len(self._seconds):
            fail_mismatch(f"message {number}", f"message {len(self._seconds)}")
        self._seconds.append((received - sent) * 1e-9)

    def compute_percentiles(self) -> dict[str, float]:
        return latency_figures(self._seconds)


def stamped(number: int) -> bytes:
    """Return the payload of a message that is sent now."""
    return STAMP.pack(number, time.monotonic_ns())


def now() -> float:
    return time.monotonic()


def print_ready() -> None:
    print("ready", flush=True)


def print_result(found: dict[str, Any]) -> None:
    print(json.dumps(found), flush=True)


def fail_mismatch(received: object, expected: object) -> NoReturn:
    """End the program with an error."""
    sys.exit(f"received {received!r}, expected {expected!r}")


def latency_figures(seconds: list[float]) -> dict[str, float]:
    """Return the median, the 99th percentile and the maximum in microseconds."""
    ordered = sorted(seconds)
    places = {"p50_us": len(ordered) // 2, "p99_us": len(ordered) * 99 // 100, "max_us": -1}
    return {name: ordered[place] * 1e6 for name, place in places.items()}
