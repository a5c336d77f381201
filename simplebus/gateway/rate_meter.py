"""Rate of a counter over the last seconds."""

from __future__ import annotations

from collections import deque

WINDOW_S = 10.0
"""Length of the window if the rate is read often."""
STEP_S = 1.0
"""Shortest distance of two samples."""


class RateMeter:
    """Rate of one counter. The window is longer if the rate is read seldom."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, int]] = deque()

    def update(self, now: float, count: int) -> float:
        """Add a sample, and return the rate per second since the oldest sample; 0.0 for the first
        one.
        """
        samples = self._samples
        while len(samples) > 1 and samples[1][0] <= now - WINDOW_S:
            samples.popleft()
        rate = 0.0
        if samples and now > samples[0][0]:
            rate = (count - samples[0][1]) / (now - samples[0][0])
        if not samples or now - samples[-1][0] >= STEP_S:
            samples.append((now, count))
        return rate
