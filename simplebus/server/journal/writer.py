"""The thread that writes and syncs: the event loop never waits for a disk.

Rule 1: lots are written in their order. What comes during a sync shares the next one: the slower a
disk, the more goes into each.
Rule 2: on a full disk there is a reserve. With it is written what is under way and what lets go of
segments, the last ones of classes too; nothing more is accepted until it is there again, nor when a
disk is found that has no space for it.
Rule 3: what could not be written is written again, every second, until it is: nothing that was
accepted is left out.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Collection
from typing import NamedTuple

from simplebus.core.commit_log import WriteBatch
from simplebus.core.errors import Reason
from simplebus.core.histogram import Histogram
from simplebus.storage.append_file import FULL
from simplebus.storage.disk_reserve import Reserve
from simplebus.storage.journal import Journal

log = logging.getLogger("simplebus.server")

_RETRY_SECONDS = 1.0

Failure = tuple[Reason, str]


class Needed(NamedTuple):
    """How far segments are not needed any more."""

    floors: dict[int, int]
    """By class, the lowest sequence that is."""
    empty: Collection[int]
    """Classes of which nothing is."""


class Writer:
    """Of one journal. `start`, then `put`; `stop` ends it when all is written."""

    def __init__(
        self,
        journal: Journal,
        *,
        reached: Callable[[int, bool], None],
        failed: Callable[[Failure], None],
        snapshot: Callable[[], None],
        reserve: Reserve | None = None,
    ) -> None:
        """These are called in the thread: with the number of a lot up to which all have reached the
        journal's level, and whether there is space for more; with why nothing can be written now;
        and when segments wait for a snapshot to be removed."""
        self._journal = journal
        self._reached = reached
        self._failed = failed
        self._snapshot = snapshot
        self._reserve = reserve
        self._is_short = False
        """Whether the reserve is given up, or was never there for want of space."""
        self._needed = Needed({}, ())
        self._written = 0
        """The last lot that is written."""
        self._queue: queue.SimpleQueue[WriteBatch | Needed | None] = queue.SimpleQueue()
        self.failures = 0
        """How often something could not be written."""
        self.lots_written = 0
        """How many lots were."""
        self.synced_after = Histogram()
        """How long writing and syncing took, of what was written at once."""
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="simplebus journal", daemon=True)

    def start(self, written: int = 0) -> None:
        """`written` is the last lot that is there already."""
        self._written = written
        self._thread.start()

    def put(self, work: WriteBatch | Needed) -> None:
        """A lot to be written, or how far segments are not needed any more."""
        self._queue.put(work)

    def stop(self) -> None:
        """Write what there is, and end; blocks until then. What cannot be written now is lost, and
        the log says so."""
        self._stopping.set()
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        if self._reserve is not None and not self._reserve.take() and self._reserve.finds_no_room:
            self._is_short = True
            self._failed((Reason.DISK_FULL, "the journal's disk has no space to be kept back"))
        try:
            while self._turn():
                pass
        except Exception:
            log.exception("the journal's thread failed")
            self._failed((Reason.DISK_FAILED, "the journal has failed; the server's log says why"))
        finally:
            self._journal.close()

    def _turn(self) -> bool:
        """Write what waits. Returns whether there may be more. Without the reserve nothing is
        accepted, so nothing may come that would be waited for: it looks by itself."""
        work: list[WriteBatch | Needed | None] = []
        with contextlib.suppress(queue.Empty):
            work.append(self._queue.get(timeout=_RETRY_SECONDS if self._is_short else None))
            while True:
                work.append(self._queue.get_nowait())
        lots = [each for each in work if isinstance(each, WriteBatch)]
        if lots and not self._write(lots):
            return False
        for each in work:
            if isinstance(each, Needed):
                self._needed = each
        if self._is_short or self._needed in work:
            self._remove()
        if self._is_short and self._has_space():
            self._reached(self._written, True)
        return None not in work

    def _has_space(self) -> bool:
        """Whether the reserve is there, or there again."""
        self._is_short = self._reserve is not None and not self._reserve.take()
        return not self._is_short

    def _write(self, lots: list[WriteBatch]) -> bool:
        """Write and sync lots, however long it takes. Returns False when it was stopped before."""
        is_withdrawn = True
        while True:
            try:
                if not is_withdrawn:
                    self._journal.withdraw()
                    is_withdrawn = True
                began = time.perf_counter()
                for lot in lots:
                    self._journal.write(lot)
                self._journal.sync()
            except OSError as error:
                is_withdrawn = False
                self.failures += 1
                self._failed(_failure(error))
                if error.errno in FULL and self._reserve is not None and self._reserve.give_up():
                    self._is_short = True
                    continue
                if self._stopping.wait(_RETRY_SECONDS):
                    count = sum(entry.count for lot in lots for entry in lot.entries)
                    log.error("%d messages are lost: %s", count, _failure(error)[1])
                    return False
            else:
                self.synced_after.observe(time.perf_counter() - began)
                self.lots_written += len(lots)
                self._written = lots[-1].number
                self._reached(self._written, not self._is_short)
                return True

    def _remove(self) -> None:
        floors, empty = self._needed
        try:
            if self._journal.remove(floors, empty if self._is_short else ()):
                self._snapshot()
        except OSError as error:
            log.warning("a segment could not be removed: %s", error)


def _failure(error: OSError) -> Failure:
    reason = Reason.DISK_FULL if error.errno in FULL else Reason.DISK_FAILED
    where = f": {error.filename}" if error.filename else ""
    return reason, f"the journal cannot be written: {error.strerror or error}{where}"
