"""Thread that reads spilled messages back from disk.

A failed read is logged once and retried for as long as a subscription needs the messages.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence

from simplebus.core.message_class.spill import SpilledRange, SpillRead
from simplebus.logs.event_logger import EventLogger
from simplebus.storage.segment_reader import SegmentReader

log = EventLogger("simplebus.server")


class SpillReadThread:
    """Reads spilled messages in a thread. Call `start`, then `put` for each read, then `stop`."""

    def __init__(
        self,
        journal: SegmentReader,
        *,
        on_read: Callable[[SpillRead, Sequence[SpilledRange]], None],
        on_failure: Callable[[SpillRead], None],
    ) -> None:
        """The callbacks are called in the thread, one of them for each read."""
        self._journal = journal
        self._on_read = on_read
        self._on_failure = on_failure
        self._queue: queue.SimpleQueue[SpillRead | None] = queue.SimpleQueue()
        self._has_failed = False
        self.failure_count = 0
        """Failed reads."""
        self.read_bytes = 0
        """Frame bytes read so far."""
        self._thread = threading.Thread(target=self._run, name="simplebus reader", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def put(self, read: SpillRead) -> None:
        """Queue a read."""
        self._queue.put(read)

    def stop(self) -> None:
        """End the thread and wait for it."""
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (read := self._queue.get()) is not None:
            try:
                ranges = self._journal.read(read)
            except OSError as error:
                self._fail(read, f"{error.strerror or error}: {error.filename or 'a segment'}")
            except Exception:
                log.exception(
                    "spill_reader.failed",
                    "reading spilled messages of class {class_name} failed",
                    class_name=read.class_name,
                )
                self._fail(read, "internal error, see the log")
            else:
                if self._has_failed:
                    self._has_failed = False
                    log.warning("spilled_read.recovered", "reading the journal works again")
                for problem in self._journal.problems:
                    log.error("journal.damaged", "{problem}", problem=problem)
                self._journal.problems.clear()
                self.read_bytes += sum(len(range_.frames) for range_ in ranges)
                self._on_read(read, ranges)

    def _fail(self, read: SpillRead, reason: str) -> None:
        self.failure_count += 1
        if not self._has_failed:
            self._has_failed = True
            log.error(
                "spilled_read.failed",
                "cannot read spilled messages of class {class_name} from sequence "
                "{sequence} on: {error}; retrying",
                class_name=read.class_name,
                sequence=read.first,
                error=reason,
            )
        self._on_failure(read)
