"""Lag of a copier: messages of the source that the target has not confirmed.

A copier that reads reports the lag itself. If it does not read, because the target is slow, full or
away, the lag is requested from the source at most once a second, over the connection of the copier
or a separate one. The last value remains while the source is away.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

import trio

from simplebus.bridge.interfaces import MessageSource, MessageTarget
from simplebus.core.errors import BusError
from simplebus.logs.event_logger import EventLogger
from simplebus.logs.sampling import is_logged

log = EventLogger("simplebus.bridge")

POLL_SECONDS = 1.0
_POLL_TIMEOUT_SECONDS = 5.0

OpenSource = Callable[[], AbstractAsyncContextManager[tuple[MessageSource, int]]]
"""Connects to the source alone, and returns it with its stored position."""


class Lag:
    """Lag of one copier."""

    def __init__(self, open_source: OpenSource | None) -> None:
        """Create the lag of a copier that is not connected yet.

        `open_source` opens the source to count unread messages while the copier is down; None for a
        source that does not store messages for a copier that is down.
        """
        self._open_source = open_source
        self.target: MessageTarget | None = None
        self.unsettled_count = 0
        """Messages that were read, are to be copied, and are not settled."""
        self.is_idle = False
        """True while the copier waits for a new message of the source."""
        self.oldest_accepted_at: float | None = None
        """Monotonic time at which the source accepted the oldest message; None without lag."""
        self._unread_count: int | None = None
        """Messages of the source that the copier has not read; None if unknown."""
        self._source: MessageSource | None = None
        self._cursor = 0
        """Sequence of the first unread message."""
        self._read_count = 0
        """Number of reads of the copier."""
        self._failure_count = 0
        self._polled_at = -math.inf
        """Time at which the source was last opened alone."""

    @property
    def count(self) -> int | None:
        """Number of messages, or None if unknown."""
        if self._unread_count is None:
            return None
        confirmed = self.target.confirmed_count if self.target is not None else 0
        return max(0, self.unsettled_count - confirmed) + self._unread_count

    @property
    def seconds(self) -> float:
        """Age of the oldest message; 0 without lag."""
        return (
            0.0
            if self.oldest_accepted_at is None
            else max(0.0, time.monotonic() - self.oldest_accepted_at)
        )

    def set_source(self, source: MessageSource, sequence: int) -> None:
        """Record that the source is connected, and the sequence at which copying continues."""
        self._source, self._cursor = source, sequence

    def note_read(self, next: int, head: int) -> None:
        """Record a read of the copier: the next sequence to read, and the head of the source."""
        self._read_count += 1
        self._cursor, self._unread_count = next, max(0, head - next)

    def connection_lost(self) -> None:
        """Record that source or target is lost: unsettled messages count as unread again."""
        self._unread_count = self.count
        if self._open_source is None:
            self._unread_count, self.oldest_accepted_at = 0, None
        self.target, self._source, self.unsettled_count, self.is_idle = None, None, 0, False

    def clear(self) -> None:
        """Make the lag unknown, after a fatal error."""
        self._unread_count = self.oldest_accepted_at = None

    async def poll_while_connected(self) -> None:
        """Ask the source once a second, unless the copier reads or is idle."""
        while True:
            read_count = self._read_count
            await trio.sleep(POLL_SECONDS)
            source, cursor = self._source, self._cursor
            if source is None or self.is_idle or read_count != self._read_count:
                continue
            try:
                count, age = await source.measure_backlog(cursor)
            except (BusError, OSError):
                continue  # The copier handles the loss.
            except Exception:  # As in `Copier.run`; the last value remains.
                self._log_failure()
                return
            if source is self._source and read_count == self._read_count and not self.is_idle:
                self._update(count, age)

    async def poll_source(self, storage_id: str, sequence: int) -> None:
        """Ask the source for the lag while the copier is not connected.

        Args:
            storage_id: Storage to which `sequence` belongs.
            sequence: Position of the copier.
        """
        if self._open_source is None or trio.current_time() - self._polled_at < POLL_SECONDS:
            return
        self._polled_at = trio.current_time()
        with trio.move_on_after(_POLL_TIMEOUT_SECONDS):
            try:
                async with self._open_source() as (source, committed):
                    is_same = (
                        source.storage_id == storage_id and committed <= sequence <= source.head
                    )
                    self._update(*await source.measure_backlog(sequence if is_same else committed))
            except (BusError, OSError):
                return
            except Exception:  # As in `poll_while_connected`.
                self._log_failure()

    def _log_failure(self) -> None:
        self._failure_count += 1
        if is_logged(self._failure_count):
            log.exception("lag.unmeasured", "cannot measure the lag of a copier")

    def _update(self, count: int, age: float) -> None:
        self._unread_count = count
        if not (self.unsettled_count or count):
            self.oldest_accepted_at = None
        elif self.oldest_accepted_at is None:
            self.oldest_accepted_at = time.monotonic() - age
