"""Simulated time and randomness.

Nothing happens outside of events, which run one at a time, ordered by time and then by request. All
randomness comes from `World.random`, so a seed determines a run.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from typing import Any

Action = Callable[..., object]


class World:
    """Clock, event queue and random generator of one run."""

    def __init__(self, seed: int, *, is_verbose: bool = False) -> None:
        self.seed = seed
        self.random = random.Random(seed)
        self.now = 0.0
        """Seconds since the run began."""
        self.is_calm = False
        """True after the last fault of the run."""
        self.trace_lines: list[str] = []
        self.is_verbose = is_verbose
        """True to print the trace."""
        self._events: list[tuple[float, int, Action, tuple[Any, ...]]] = []
        self._event_count = 0

    def call_later(self, seconds: float, action: Action, *args: Any) -> None:
        """Schedule `action` in `seconds`."""
        self._event_count += 1
        heapq.heappush(self._events, (self.now + seconds, self._event_count, action, args))

    def call_soon(self, action: Action, *args: Any) -> None:
        """Schedule `action` within 10 ms, in random order with others."""
        self.call_later(self.random.random() * 0.01, action, *args)

    def run(self, end_time: float) -> None:
        """Run the events up to this time."""
        events = self._events
        while events and events[0][0] <= end_time:
            self.now, _, action, args = heapq.heappop(events)
            action(*args)
        self.now = end_time

    def is_fault_due(self, probability: float) -> bool:
        """Return True with this probability, but never after the last fault."""
        return self.random.random() < probability and not self.is_calm

    def trace(self, *details: object) -> None:
        """Add a line to the trace."""
        if self.is_verbose:
            self.trace_lines.append(f"{self.now:9.4f}  " + " ".join(map(str, details)))
            print(self.trace_lines[-1])
