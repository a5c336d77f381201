"""Event that wakes the tasks that wait for a change."""

from __future__ import annotations

import anyio


class WakeupEvent:
    """Wakes every task that waits at this moment. A waiting task checks its condition in a loop.

    Setting it costs nothing when no task waits.
    """

    __slots__ = ("_event",)

    def __init__(self) -> None:
        self._event: anyio.Event | None = None

    def set(self) -> None:
        if self._event is not None:
            self._event.set()
            self._event = None

    async def wait(self) -> None:
        """Wait for the next `set`."""
        if self._event is None:
            self._event = anyio.Event()
        await self._event.wait()
