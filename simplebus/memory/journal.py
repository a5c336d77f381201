"""What a bus in this process holds, kept in a directory: the journal of a server, under MemoryBus.

Rule 1: the directory is the bus's from when the first client enters until the last one has left.
What is there then is what the next one finds, in this process or in another.
Rule 2: under a clock that jumps no time passes while a disk is waited for: else a test's seconds
would be over before the first message is safe.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
from collections.abc import Callable
from pathlib import Path

import sniffio
import trio

from simplebus.core.broker.broker import Broker
from simplebus.core.commit_log import CommitLog, Durability
from simplebus.core.settings import Settings
from simplebus.server.journal.pump import JournalPump, Soon, load, soon_in_trio
from simplebus.server.server import new_bus_id
from simplebus.storage.directory import take


class MemoryJournal:
    """Of one bus. Raises JournalError for a directory that cannot be used."""

    def __init__(self, path: Path, level: Durability, settings: Settings, *, now: float) -> None:
        """`now` is in seconds since 1970."""
        self._told = threading.Semaphore(0)
        """Released when something that was asked of another thread has been answered."""
        self._is_in_trio = sniffio.current_async_library() == "trio"
        self._give = soon_in_trio() if self._is_in_trio else _soon_in_asyncio()
        self._is_unsaved = True
        """Whether something may have changed since positions were looked at."""
        self._directory = take(path, new_bus=new_bus_id())
        try:
            self.broker = Broker(
                settings,
                identity=self._directory.bus,
                run_id=new_bus_id(),
                commit_log=CommitLog(level),
            )
            self.broker.clock.now = now
            load(self.broker, self._directory)
        except BaseException:
            self._directory.close()
            raise
        self._keeping: JournalPump | None = None

    def start(self, settle: Callable[[], None]) -> None:
        """Within the event loop. `settle` is called when confirms have become due."""
        self._keeping = JournalPump(self.broker, self._directory, settle)
        self._keeping.start(self._soon)

    def _soon(self, what: Callable[..., None], *given: object) -> None:
        self._give(what, *given)
        self._told.release()

    @property
    def due(self) -> float:
        """When `hand_over` is to be called, by the broker's clock, if nobody does before."""
        if self._keeping is None or not self._is_unsaved:
            return math.inf
        due = self._keeping.due
        # What is overdue waits for the disk, which says when it is through.
        return due if due > self.broker.clock.now else math.inf

    def hand_over(self) -> None:
        """At the end of a turn: have written what has come."""
        keeping = self._keeping
        if keeping is None:
            return
        due = keeping.due
        asked = keeping.hand_over()
        self._is_unsaved = keeping.due == due
        if asked and self._is_in_trio and _time_jumps():
            for _ in range(asked):
                self._told.acquire()

    def tick(self) -> None:
        """Let go of segments that nobody needs."""
        if self._keeping is not None:
            self._keeping.tick()

    def close(self) -> None:
        """Write all there is, and let others have the directory. Blocks until it is done."""
        try:
            if self._keeping is not None:
                self._keeping.close()
        finally:
            self._directory.close()


def _soon_in_asyncio() -> Soon:
    """How another thread has something done in the loop of asyncio that runs here."""
    loop = asyncio.get_running_loop()

    def soon(what: Callable[..., None], *given: object) -> None:
        with contextlib.suppress(RuntimeError):  # It is closed: nobody is there to be told.
            loop.call_soon_threadsafe(what, *given)

    return soon


def _time_jumps() -> bool:
    """Whether trio's clock goes on by itself when all tasks wait."""
    return getattr(trio.lowlevel.current_clock(), "autojump_threshold", math.inf) < math.inf
