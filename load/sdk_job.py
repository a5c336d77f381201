"""Job of a timed program, and its output.

A program prints `ready` when it is subscribed, and at its end one line of JSON: times of the
monotonic clock, which all processes share, or figures. A wrong message ends the program.
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

CLASS = 1
TYPED_CLASS = 2


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


def now() -> float:
    return time.monotonic()


def print_ready() -> None:
    print("ready", flush=True)


def print_result(found: dict[str, Any]) -> None:
    print(json.dumps(found), flush=True)


def fail_mismatch(came: object, expected: object) -> NoReturn:
    sys.exit(f"{came!r} came, expected {expected!r}")


def half(values: list[float]) -> float:
    """The value that half of them do not exceed."""
    return sorted(values)[len(values) // 2]
