"""How fast something has grown lately.

Rule 1: pure. The clock's reading is an argument; nothing runs in between, so who asks seldom is
told about a longer while.
"""

from __future__ import annotations

from collections import deque

WINDOW_S = 10.0
"""What lately is, for who asks often."""
STEP_S = 1.0
"""Samples are at least so far from each other."""


class Rate:
    """Of one counter."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, int]] = deque()

    def at(self, now: float, count: int) -> float:
        """How much it has grown in a second, since the oldest sample that is not too old; 0.0 when
        it is asked for the first time."""
        samples = self._samples
        while len(samples) > 1 and samples[1][0] <= now - WINDOW_S:
            samples.popleft()
        rate = 0.0
        if samples and now > samples[0][0]:
            rate = (count - samples[0][1]) / (now - samples[0][0])
        if not samples or now - samples[-1][0] >= STEP_S:
            samples.append((now, count))
        return rate
