"""Turns of connections that need much time together: slow requests, and many receivers."""

from __future__ import annotations

import math
import time
from collections.abc import Awaitable, Callable
from itertools import islice
from typing import Protocol

import trio

from simplebus.logs.event_logger import EventLogger

log = EventLogger("simplebus.server")

SEND_SECONDS_MAX = 0.0015
"""Time for which one turn of the event loop sends. A message may have thousands of receivers."""
_CONNECTIONS_MAX = 64
"""Connections that one turn sends to."""


class SlowRequestTurns:
    """Schedules slow requests: a small portion of one connection in every other loop pass.

    So other clients are served between two portions. Connections with slow requests take turns.
    """

    def __init__(self) -> None:
        self._lock = trio.Lock()

    async def wait_turn(self) -> None:
        """Wait until the caller may process one portion, which must follow without a checkpoint."""
        async with self._lock:  # Acquiring the lock lets other tasks run once, the next line again.
            await trio.lowlevel.checkpoint()


class _Session(Protocol):
    @property
    def is_closed(self) -> bool: ...


class _Sender(Protocol):
    """Interface of a connection."""

    @property
    def session(self) -> _Session: ...
    def flush(self) -> object:
        """Send what the client accepts now."""


class SendTurns:
    """Sends to connections at once while the turn has time, and to the others in later turns."""

    def __init__(
        self,
        start_soon: Callable[[Callable[[], Awaitable[object]]], None],
        end_turn: Callable[[], None],
        *,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Create without waiting connections.

        Args:
            start_soon: starts a task of the server.
            end_turn: called at the end of each later turn, because sending changes the broker.
            clock: time in seconds.
        """
        self._start_soon = start_soon
        self._end_turn = end_turn
        self._clock = clock
        self._deadline: float | None = None
        """Time at which the current turn stops sending; None before it sends."""
        self._waiting: dict[_Sender, None] = {}
        """Connections of later turns, in order."""
        self._is_running = False
        """True if the task of the later turns runs."""

    def begin_turn(self, *, can_send: bool = True) -> None:
        """Begin a turn, which may send for `SEND_SECONDS_MAX` from its first connection on.

        With `can_send=False`, for example if the turn has taken long already, sending to all
        connections is left to later turns.
        """
        self._deadline = None if can_send else -math.inf

    @property
    def has_waiting(self) -> bool:
        """True if connections wait for a later turn."""
        return bool(self._waiting)

    def flush(self, connection: _Sender) -> None:
        """Send to a connection in this turn or, if the time of the turn is over, in a later one."""
        if self._has_time():
            connection.flush()
            return
        self._waiting[connection] = None
        if not self._is_running:
            self._is_running = True
            self._start_soon(self._send_waiting)

    def _has_time(self) -> bool:
        """Return True if the current turn may send to another connection."""
        now = self._clock()
        if self._deadline is None:
            self._deadline = now + SEND_SECONDS_MAX
            return True
        return now < self._deadline

    async def _send_waiting(self) -> None:
        try:
            while self._waiting:
                await trio.lowlevel.checkpoint()  # Other clients are served between two turns.
                try:
                    self._send_in_turn()
                except Exception:
                    log.exception("sending.failed", "sending to waiting clients failed")
        finally:
            self._is_running = False

    def _send_in_turn(self) -> None:
        """Send to the connections that have waited longest, until the time of the turn is over."""
        self.begin_turn()
        for connection in list(islice(self._waiting, _CONNECTIONS_MAX)):
            if not self._has_time():
                break
            del self._waiting[connection]
            if not connection.session.is_closed:
                connection.flush()
        self._end_turn()
