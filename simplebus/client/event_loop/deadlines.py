"""Deadlines of many waits, with one timer.

A cancel scope per wait costs more than the wait of a request. Most waits end long before their
deadline, so a removed deadline stays in the heap until it is due or most of the heap is removed.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable

import anyio

from simplebus.client.event_loop.wakeup_event import WakeupEvent

# Removed deadlines stay in the heap until they are more than this, and more than half of the heap.
_REMOVED_MAX = 64


class Deadline:
    """Deadline of one wait."""

    __slots__ = ("on_expired", "time")

    def __init__(self, time: float, on_expired: Callable[[], None]) -> None:
        self.time = time
        self.on_expired: Callable[[], None] | None = on_expired
        """Called when the deadline has passed; None once it was called or removed."""

    def __lt__(self, other: Deadline) -> bool:
        return self.time < other.time


class Deadlines:
    """Deadlines of the waits of one bus. `run` calls their functions.

    Times are in seconds by the clock of the event loop.
    """

    def __init__(self) -> None:
        self._heap: list[Deadline] = []
        self._removed_count = 0
        self._is_closed = False
        self._next_wakeup_at = math.inf
        """Time at which `run` checks for expired deadlines next."""
        self._is_earlier = WakeupEvent()
        """Set when a deadline is added before `_next_wakeup_at`, and by `close`."""

    def add(self, time: float, on_expired: Callable[[], None]) -> Deadline:
        """Call `on_expired` at `time`, unless the deadline is removed before."""
        deadline = Deadline(time, on_expired)
        heapq.heappush(self._heap, deadline)
        if time < self._next_wakeup_at:
            self._is_earlier.set()
        return deadline

    def remove(self, deadline: Deadline) -> None:
        """Do not call the function of this deadline."""
        if deadline.on_expired is not None:
            deadline.on_expired = None
            self._removed_count += 1
            if self._removed_count > max(_REMOVED_MAX, len(self._heap) // 2):
                self._heap = [
                    deadline for deadline in self._heap if deadline.on_expired is not None
                ]
                heapq.heapify(self._heap)
                self._removed_count = 0

    def call_expired(self, now: float) -> float:
        """Call the functions of all deadlines up to `now`. Returns the time of the next
        deadline.
        """
        while self._heap:
            earliest = self._heap[0]
            if earliest.on_expired is None:
                self._removed_count -= 1
            elif earliest.time <= now:
                on_expired, earliest.on_expired = earliest.on_expired, None
                on_expired()
            else:
                return earliest.time
            heapq.heappop(self._heap)
        return math.inf

    def close(self) -> None:
        """Call the functions of all deadlines and end `run`, because every wait is over."""
        self._is_closed = True
        self.call_expired(math.inf)
        self._is_earlier.set()

    async def run(self) -> None:
        """Call the functions of deadlines when they have passed, until `close`."""
        while not self._is_closed:
            self._next_wakeup_at = self.call_expired(anyio.current_time())
            with anyio.CancelScope(deadline=self._next_wakeup_at):
                await self._is_earlier.wait()
