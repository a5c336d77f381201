"""Who is to be woken when, because something was put off until then.

Rule 1: whoever waits says himself when he is due next; here stands only who has to be asked.
Rule 2: one turn wakes only as many as take so long. Who is still not done comes behind all others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from simplebus.core.limits import LOOKED_MESSAGES_MAX
from simplebus.core.redelivery.delivery_policy import Clock
from simplebus.core.subscription.position import NEVER


class WakeupTarget(Protocol):
    """Something that has put off a part of what it has to do."""

    scanned_count: int
    """How many messages the last `wake_due` looked at, if it did not leave that to another turn."""

    @property
    def next_wakeup(self) -> float:
        """When `wake_due` is to be called next; infinite for not at all."""

    def handle_wakeup(self) -> bool:
        """Do, or have ready, what was put off until now. Returns whether there is something to
        send."""


class DelayedWakeups:
    """Of one broker."""

    def __init__(self, clock: Clock, on_wakeup: Callable[[WakeupTarget], int]) -> None:
        """`woken` is called with each that has something to send, and says how many messages were
        looked at for that."""
        self.next_wakeup = NEVER
        """When `wake_due` is to be called."""
        self._clock = clock
        self._on_wakeup = on_wakeup
        self._targets: dict[WakeupTarget, None] = {}

    def __len__(self) -> int:
        """How many wait."""
        return len(self._targets)

    def schedule_wakeup(self, due_time: float, target: WakeupTarget) -> None:
        """Something is to be done then; or, when that is never, nothing is put off any more."""
        if due_time == NEVER:
            self._targets.pop(target, None)
        else:
            self._targets[target] = None
            self.next_wakeup = min(self.next_wakeup, due_time)

    def run_due_wakeups(self) -> None:
        """Wake who is due."""
        if self.next_wakeup > self._clock.now:
            return
        looked = 0
        for waiter in list(self._targets):
            if waiter.next_wakeup > self._clock.now:
                continue
            del self._targets[waiter]
            if waiter.handle_wakeup():
                looked += self._on_wakeup(waiter)
            if waiter.next_wakeup < NEVER:
                self._targets[waiter] = None
            if looked >= LOOKED_MESSAGES_MAX:
                break
        self.next_wakeup = min([waiter.next_wakeup for waiter in self._targets], default=NEVER)
