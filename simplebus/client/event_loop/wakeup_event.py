"""Event that wakes the tasks that wait for a change."""

from __future__ import annotations

from simplebus.client.event_loop.find import find_event_loop
from simplebus.client.event_loop.services import EventLoop, Waiter


class WakeupEvent:
    """Wakes every task that waits at this moment. A waiting task checks its condition in a loop.

    Setting it costs nothing when no task waits.
    """

    __slots__ = ("_event_loop", "_waiters")

    def __init__(self) -> None:
        self._event_loop: EventLoop | None = None
        """None before the first wait."""
        self._waiters: list[Waiter] = []

    def set(self) -> None:
        if self._waiters:
            waiters, self._waiters = self._waiters, []
            for waiter in waiters:
                waiter.wake()

    async def wait(self) -> None:
        """Wait for the next `set`."""
        if self._event_loop is None:
            self._event_loop = find_event_loop()
        waiter = self._event_loop.create_waiter()
        self._waiters.append(waiter)
        try:
            await waiter
        except BaseException:  # Cancelled, perhaps after it was woken.
            if waiter in self._waiters:
                self._waiters.remove(waiter)
            raise
