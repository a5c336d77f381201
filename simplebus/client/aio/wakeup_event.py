"""Waking tasks that wait for a change.

Rule 1: a signal says "look again", never what happened; setting it costs nothing when nobody waits.
"""

from __future__ import annotations

import anyio


class WakeupEvent:
    """Wakes everybody who waits at that moment. Waiters check their condition in a loop."""

    __slots__ = ("_event",)

    def __init__(self) -> None:
        self._event: anyio.Event | None = None

    def set(self) -> None:
        if self._event is not None:
            self._event.set()
            self._event = None

    async def wait(self) -> None:
        """Wait until it is set next."""
        if self._event is None:
            self._event = anyio.Event()
        await self._event.wait()
