"""Delayed wakeups of positions and queues.

Each target has a time at which it is due, and `DelayedWakeups` keeps the set of targets. One turn
wakes a bounded number of targets. A target that is not finished is woken again after all others.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from simplebus.core.clock import BrokerClock
from simplebus.core.limits import SCAN_MESSAGES_MAX

NEVER = float("inf")
"""Time of a wakeup that is not scheduled."""


class WakeupTarget(Protocol):
    """Object that delayed part of its work until a time, in seconds since 1970."""

    @property
    def scanned_count(self) -> int:
        """Cost of the work since `handle_wakeup` was called, in scanned messages."""

    @property
    def next_wakeup(self) -> float:
        """Time at which `handle_wakeup` is to be called next; infinite for never."""

    def handle_wakeup(self) -> bool:
        """Do the work that is due. Returns True if there is something to send."""


class DelayedWakeups:
    """Wakeup targets of one broker. Times are in seconds since 1970."""

    def __init__(self, clock: BrokerClock) -> None:
        """Create an empty set. The driver sets the clock."""
        self.next_wakeup = NEVER
        """Time at which `run_due_wakeups` is to be called."""
        self._clock = clock
        self._targets: dict[WakeupTarget, None] = {}

    def __len__(self) -> int:
        """Return the number of targets."""
        return len(self._targets)

    def schedule_wakeup(self, due_time: float, target: WakeupTarget) -> None:
        """Wake `target` at `due_time`; NEVER removes it."""
        if due_time == NEVER:
            self._targets.pop(target, None)
        else:
            self._targets[target] = None
            self.next_wakeup = min(self.next_wakeup, due_time)

    def run_due_wakeups(self) -> Iterator[WakeupTarget]:
        """Wake the targets that are due, and yield the targets that have something to send.

        A yielded target must be resumed before the next one is requested.
        """
        if self.next_wakeup > self._clock.now:
            return
        scanned_count = 0
        for target in list(self._targets):
            if target.next_wakeup > self._clock.now:
                continue
            del self._targets[target]
            if target.handle_wakeup():
                yield target
            scanned_count += target.scanned_count
            if target.next_wakeup < NEVER:
                self._targets[target] = None
            if scanned_count >= SCAN_MESSAGES_MAX:
                break
        self.next_wakeup = min([target.next_wakeup for target in self._targets], default=NEVER)
