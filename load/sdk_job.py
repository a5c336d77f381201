"""What a program that is timed is told, and how it answers.

Rule 1: a program says `ready` once it is subscribed, and at its end one line of JSON: moments of
the monotonic clock, which all processes share, or figures.
Rule 2: what comes is compared, whole, with what must come next; a difference ends the program.
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
    """One program's task."""

    role: str
    port: int
    count: int
    backend: str = "trio"
    size_bytes: int = 16
    block: str = ""
    """The file that holds the generator's payloads."""

    @classmethod
    def from_arguments(cls) -> Job:
        return cls(**json.loads(sys.argv[1]))

    def argument(self) -> str:
        return json.dumps(asdict(self))

    def payloads(self) -> Iterator[bytes]:
        """As many as there are messages."""
        data, size = Path(self.block).read_bytes(), self.size_bytes
        frames = [data[at : at + size] for at in range(0, len(data), size)]
        return itertools.islice(itertools.cycle(frames), self.count)


def now() -> float:
    return time.monotonic()


def say_ready() -> None:
    print("ready", flush=True)


def say(found: dict[str, Any]) -> None:
    print(json.dumps(found), flush=True)


def refuse(came: object, expected: object) -> NoReturn:
    sys.exit(f"{came!r} came, expected {expected!r}")


def half(values: list[float]) -> float:
    """The value that half of them do not exceed."""
    return sorted(values)[len(values) // 2]
