"""Turns of connections whose requests take long to process."""

from __future__ import annotations

import trio


class SlowRequestTurns:
    """Schedules slow requests: a small portion of one connection in every other loop pass.

    A client that waits while a portion is processed is served before the next one. Waiting
    connections take turns.
    """

    def __init__(self) -> None:
        self._lock = trio.Lock()

    async def wait_turn(self) -> None:
        """Wait until the caller may process one portion, without another checkpoint before it."""
        async with self._lock:  # Acquiring it is the first pass for others.
            await trio.lowlevel.checkpoint()
