"""The thread that reads messages back from disk.

Rule 1: what cannot be read is said once, and tried again for as long as somebody wants it.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Sequence

from simplebus.core.message_class.spill import SpilledRange, SpillRead
from simplebus.storage.segment_reader import JournalReader

log = logging.getLogger("simplebus.server")


class Reader:
    """Of one journal. `start`, then `put`; `stop` ends it."""

    def __init__(
        self,
        journal: JournalReader,
        *,
        given: Callable[[SpillRead, Sequence[SpilledRange]], None],
        failed: Callable[[SpillRead], None],
    ) -> None:
        """These are called in the thread, one of them for each read."""
        self._journal = journal
        self._given = given
        self._failed = failed
        self._queue: queue.SimpleQueue[SpillRead | None] = queue.SimpleQueue()
        self._has_failed = False
        self.failures = 0
        """How often something could not be read."""
        self.read_bytes = 0
        """Bytes of frames that were read."""
        self._thread = threading.Thread(target=self._run, name="simplebus reader", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def put(self, read: SpillRead) -> None:
        """Have this read."""
        self._queue.put(read)

    def stop(self) -> None:
        """Blocks until the thread has ended."""
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (read := self._queue.get()) is not None:
            try:
                found = self._journal.read(read)
            except OSError as error:
                self._fail(read, f"{error.strerror or error}: {error.filename or 'a segment'}")
            except Exception:
                log.exception("reading class %d back failed", read.class_id)
                self._fail(read, "the journal's reader has failed")
            else:
                if self._has_failed:
                    self._has_failed = False
                    log.warning("the journal is read again")
                for problem in self._journal.problems:
                    log.error("%s", problem)
                self._journal.problems.clear()
                self.read_bytes += sum(len(stretch.frames) for stretch in found)
                self._given(read, found)

    def _fail(self, read: SpillRead, why: str) -> None:
        self.failures += 1
        if not self._has_failed:
            self._has_failed = True
            log.error(
                "messages of class %d from %d on cannot be read back: %s; it is tried again",
                read.class_id,
                read.first,
                why,
            )
        self._failed(read)
