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


class Waiter(Protocol):
    """Something that has put off a part of what it has to do."""

    looked: int
    """How many messages the last `wake_due` looked at, if it did not leave that to another turn."""

    @property
    def due(self) -> float:
        """When `wake_due` is to be called next; infinite for not at all."""

    def wake_due(self) -> bool:
        """Do, or have ready, what was put off until now. Returns whether there is something to
        send."""


class Alarms:
    """Of one broker."""

    def __init__(self, clock: Clock, woken: Callable[[Waiter], int]) -> None:
        """`woken` is called with each that has something to send, and says how many messages were
        looked at for that."""
        self.due = NEVER
        """When `wake_due` is to be called."""
        self._clock = clock
        self._woken = woken
        self._waits: dict[Waiter, None] = {}

    def __len__(self) -> int:
        """How many wait."""
        return len(self._waits)

    def put_off(self, due: float, waiter: Waiter) -> None:
        """Something is to be done then; or, when that is never, nothing is put off any more."""
        if due == NEVER:
            self._waits.pop(waiter, None)
        else:
            self._waits[waiter] = None
            self.due = min(self.due, due)

    def wake_due(self) -> None:
        """Wake who is due."""
        if self.due > self._clock.now:
            return
        looked = 0
        for waiter in list(self._waits):
            if waiter.due > self._clock.now:
                continue
            del self._waits[waiter]
            if waiter.wake_due():
                looked += self._woken(waiter)
            if waiter.due < NEVER:
                self._waits[waiter] = None
            if looked >= LOOKED_MESSAGES_MAX:
                break
        self.due = min([waiter.due for waiter in self._waits], default=NEVER)
