"""Journal of a `MemoryBus`: keeps its messages and durables in a directory, as a server does.

The directory belongs to the bus from the first client's entry until the last one has left. Under a
clock that jumps (trio's MockClock), no time passes during a wait for the disk; otherwise the
timeouts of a test would expire before the first message is durable.
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
from simplebus.core.commit_log import CommitLog
from simplebus.core.protocol.durability import Durability
from simplebus.core.settings import Settings
from simplebus.server.journal.pump import JournalPump, RunInLoop, load, trio_loop_caller
from simplebus.server.server import new_bus_id
from simplebus.storage.directory import lock_directory


class MemoryJournal:
    """Journal of one `MemoryBus`. Raises JournalError if the directory cannot be used."""

    def __init__(self, path: Path, level: Durability, settings: Settings, *, now: float) -> None:
        """`now` is in seconds since 1970."""
        self._callbacks_run = threading.Semaphore(0)
        """Released when a callback of the writing thread has run in the event loop."""
        self._is_in_trio = sniffio.current_async_library() == "trio"
        self._call_in_loop = trio_loop_caller() if self._is_in_trio else _asyncio_loop_caller()
        self._has_unsaved_positions = True
        """True if positions may have changed since the last scan."""
        self._directory = lock_directory(path, new_bus=new_bus_id())
        try:
            self.broker = Broker(
                settings,
                identity=self._directory.bus_id,
                run_id=new_bus_id(),
                commit_log=CommitLog(level),
            )
            self.broker.clock.now = now
            load(self.broker, self._directory)
        except BaseException:
            self._directory.close()
            raise
        self._journal_pump: JournalPump | None = None

    def start(self, on_progress: Callable[[], None]) -> None:
        """Start writing. Call this inside the event loop.

        `on_progress` is called when confirms have become due.
        """
        self._journal_pump = JournalPump(self.broker, self._directory, on_progress)
        self._journal_pump.start(self._run_in_loop)

    def _run_in_loop(self, callback: Callable[..., None], *arguments: object) -> None:
        self._call_in_loop(callback, *arguments)
        self._callbacks_run.release()

    @property
    def next_scan_at(self) -> float:
        """Time by the broker's clock at which `submit_pending` must be called at the latest."""
        if self._journal_pump is None or not self._has_unsaved_positions:
            return math.inf
        next_scan_at = self._journal_pump.next_scan_at
        # An overdue scan waits for the disk, whose callback runs it.
        return next_scan_at if next_scan_at > self.broker.clock.now else math.inf

    def submit_pending(self) -> None:
        """Submit new entries for writing, at the end of a turn."""
        journal_pump = self._journal_pump
        if journal_pump is None:
            return
        next_scan_at = journal_pump.next_scan_at
        pending_count = journal_pump.submit_pending()
        self._has_unsaved_positions = journal_pump.next_scan_at == next_scan_at
        if pending_count and self._is_in_trio and _is_clock_autojumping():
            for _ in range(pending_count):
                self._callbacks_run.acquire()

    def tick(self) -> None:
        """Delete segments that are no longer needed."""
        if self._journal_pump is not None:
            self._journal_pump.tick()

    def close(self) -> None:
        """Write all pending entries and release the directory. Blocks until it is done."""
        try:
            if self._journal_pump is not None:
                self._journal_pump.close()
        finally:
            self._directory.close()


def _asyncio_loop_caller() -> RunInLoop:
    """Return a function by which another thread calls functions in the current asyncio loop."""
    loop = asyncio.get_running_loop()

    def run_in_loop(callback: Callable[..., None], *arguments: object) -> None:
        with contextlib.suppress(RuntimeError):  # The loop is closed.
            loop.call_soon_threadsafe(callback, *arguments)

    return run_in_loop


def _is_clock_autojumping() -> bool:
    """Return True if trio's clock jumps ahead when all tasks wait."""
    return getattr(trio.lowlevel.current_clock(), "autojump_threshold", math.inf) < math.inf
