"""Copied frames that are sent with one write."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class CopiedFrames:
    """Copies of frames, up to a number of bytes."""

    free_bytes: int
    """Bytes that may still be added."""
    count: int = 0
    """Number of messages in `parts`."""
    attempt: int = 1
    """Delivery attempt of the messages."""
    parts: list[memoryview | bytes] = field(default_factory=list)

    def add(self, part: memoryview | bytes, count: int) -> None:
        """Append `count` frames, encoded in `part`."""
        self.parts.append(part)
        self.free_bytes -= len(part)
        self.count += count
