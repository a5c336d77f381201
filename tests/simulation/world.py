"""Simulated time: what happens when, and everything that chance decides.

Rule 1: nothing happens but in events, one at a time, in the order of their times; of two at the
same time the one that was asked for first. Nobody waits.
Rule 2: chance is this `random` alone, so a seed is a life, over and over.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from typing import Any

Action = Callable[..., object]


class World:
    """One run's clock, dice and diary."""

    def __init__(self, seed: int, *, tells: bool = False) -> None:
        self.seed = seed
        self.random = random.Random(seed)
        self.now = 0.0
        """Seconds since the run began."""
        self.calm = False
        """Whether nothing fails any more."""
        self.diary: list[str] = []
        self.tells = tells
        """Whether the diary is printed as it is written."""
        self._events: list[tuple[float, int, Action, tuple[Any, ...]]] = []
        self._asked = 0

    def after(self, seconds: float, action: Action, *given: Any) -> None:
        """Have this happen so much later."""
        self._asked += 1
        heapq.heappush(self._events, (self.now + seconds, self._asked, action, given))

    def soon(self, action: Action, *given: Any) -> None:
        """Have it happen after a moment: sooner or later than other things asked for now."""
        self.after(self.random.random() * 0.01, action, *given)

    def run(self, until: float) -> None:
        """Let happen what happens up to this time."""
        events = self._events
        while events and events[0][0] <= until:
            self.now, _, action, given = heapq.heappop(events)
            action(*given)
        self.now = until

    def chance(self, probability: float) -> bool:
        """Whether it happens this time. Never when all is calm."""
        return self.random.random() < probability and not self.calm

    def say(self, *what: object) -> None:
        """A line in the diary."""
        if self.tells:
            self.diary.append(f"{self.now:9.4f}  " + " ".join(map(str, what)))
            print(self.diary[-1])
