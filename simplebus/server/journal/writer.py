"""Thread that writes and syncs the journal, so that the event loop never waits for a disk.

While the thread has nothing to do, the event loop writes small batches itself if no sync is needed:
waking a thread takes longer than copying some bytes to the system. A slow or failed write returns
the work to the thread.

Write batches are written in order; batches that arrive during a sync share the next one. A failed
write is retried every second, so no accepted entry is skipped.

On a full disk, the reserved space is used for batches in flight and for records that let segments
be removed. New messages are refused until the reserve can be allocated again.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Collection
from typing import NamedTuple

from simplebus.core.broker.wait_reasons import format_message_count
from simplebus.core.commit_log import WriteBatch
from simplebus.core.errors import Reason
from simplebus.core.histogram import Histogram
from simplebus.core.protocol.durability import Durability
from simplebus.logs.event_logger import EventLogger
from simplebus.storage.append_file import DISK_FULL_ERRORS
from simplebus.storage.disk_reserve import DiskReserve
from simplebus.storage.journal import Journal

log = EventLogger("simplebus.server")

_RETRY_SECONDS = 1.0
DIRECT_WRITE_BYTES_MAX = 16 * 1024
"""Size of the largest batch that the event loop writes itself."""
# After a write in the event loop that takes longer, or fails, the thread writes for a while: slow
# writes may take a hundredth of the event loop's time.
_DIRECT_WRITE_SECONDS_MAX = 0.005
_DIRECT_WRITE_PAUSE_FACTOR = 100
_DIRECT_WRITE_PAUSE_AFTER_ERROR_SECONDS = 10.0

WriteFailure = tuple[Reason, str]


class SegmentFloors(NamedTuple):
    """Sequences below which segments can be removed."""

    floors: dict[int, int]
    """Lowest needed sequence, by class id."""
    empty_classes: Collection[int]
    """Ids of classes without stored messages."""


class JournalWriter:
    """Writes one journal in a thread. Call `start`, then `put`; `stop` ends it after the last
    write.
    """

    def __init__(
        self,
        journal: Journal,
        *,
        on_durable: Callable[[int, bool], None],
        on_failure: Callable[[WriteFailure], None],
        on_snapshot_needed: Callable[[], None],
        reserve: DiskReserve | None = None,
    ) -> None:
        """Create the writer; the callbacks are called in its thread.

        Args:
            journal: Files to write to.
            on_durable: Called with the number of the last durable write batch, and whether new
                messages can be accepted.
            on_failure: Called with the reason when a write fails.
            on_snapshot_needed: Called when segments can be removed only after a snapshot.
            reserve: Disk space kept for a full disk.
        """
        self._journal = journal
        self._on_durable = on_durable
        self._on_failure = on_failure
        self._on_snapshot_needed = on_snapshot_needed
        self._reserve = reserve
        self._is_space_low = False
        """True if the reserve is in use, or could not be allocated."""
        self._segment_floors = SegmentFloors({}, ())
        self._last_written = 0
        """Number of the last written batch."""
        self._queue: queue.SimpleQueue[WriteBatch | SegmentFloors | None] = queue.SimpleQueue()
        self.failure_count = 0
        """Failed writes."""
        self.written_batch_count = 0
        """Write batches written so far."""
        self.write_seconds = Histogram()
        """Time to write and sync the batches that were written together."""
        self._put_count = 0
        """Items that were queued."""
        self._done_count = -1
        """Items that the thread has finished; -1 until the thread is ready."""
        self._has_unsynced = False
        """True if a failed write must be discarded before the next one."""
        self._direct_write_at = 0.0
        """Time of the monotonic clock from which on the event loop may write."""
        self._is_stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="simplebus journal", daemon=True)

    def start(self, last_written: int = 0) -> None:
        """Start the thread. `last_written` is the last batch that the journal already contains."""
        self._last_written = last_written
        self._thread.start()

    def put(self, item: WriteBatch | SegmentFloors) -> None:
        """Queue a write batch, or new floors for the removal of segments."""
        self._put_count += 1
        self._queue.put(item)

    @property
    def is_idle(self) -> bool:
        """True if the thread has finished everything that was queued."""
        return self._done_count == self._put_count

    def write_directly(self, batch: WriteBatch) -> bool:
        """Write a small batch in the calling thread, which must be the thread that calls `put`.

        Returns:
            True if the batch has the durability that a confirm promises. False if it was not
            written: pass it to `put`.
        """
        started_at = time.monotonic()
        if (
            self._journal.durability is not Durability.OS
            or batch.snapshot
            or len(batch.changes) > DIRECT_WRITE_BYTES_MAX
            or not self.is_idle
            or self._is_space_low
            or started_at < self._direct_write_at
        ):
            return False
        try:
            self._journal.write(batch)
            self._journal.sync()
        except OSError:
            self._has_unsynced = True  # The thread repeats the write and reports the error.
            self._direct_write_at = started_at + _DIRECT_WRITE_PAUSE_AFTER_ERROR_SECONDS
            return False
        seconds = time.monotonic() - started_at
        if seconds > _DIRECT_WRITE_SECONDS_MAX:
            self._direct_write_at = started_at + _DIRECT_WRITE_PAUSE_FACTOR * seconds
        self.write_seconds.observe(seconds)
        self.written_batch_count += 1
        self._last_written = batch.number
        return True

    def stop(self) -> None:
        """Write all queued batches and end the thread; blocks. Messages that cannot be written are
        logged.
        """
        self._is_stopping.set()
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        if self._reserve is not None and not self._reserve.reserve() and self._reserve.is_disk_full:
            self._is_space_low = True
            self._on_failure((Reason.DISK_FULL, "cannot reserve disk space for the journal"))
        self._done_count = 0
        try:
            while self._write_pending():
                pass
        except Exception:
            log.exception("journal.thread_failed", "the journal thread failed")
            self._on_failure((Reason.DISK_FAILED, "the journal failed; see the server's log"))
        finally:
            self._journal.close()

    def _write_pending(self) -> bool:
        """Process the queue once. Returns False after the last item.

        While space is low, no messages are accepted and so the queue may stay empty. The wait
        then has a timeout, to try the reserve again.
        """
        items: list[WriteBatch | SegmentFloors | None] = []
        with contextlib.suppress(queue.Empty):
            items.append(self._queue.get(timeout=_RETRY_SECONDS if self._is_space_low else None))
            while True:
                items.append(self._queue.get_nowait())
        batches = [item for item in items if isinstance(item, WriteBatch)]
        if batches and not self._write_batches(batches):
            return False
        for item in items:
            if isinstance(item, SegmentFloors):
                self._segment_floors = item
        if self._is_space_low or self._segment_floors in items:
            self._remove_segments()
        if self._is_space_low and self._refill_reserve():
            self._on_durable(self._last_written, True)
        self._done_count += len(items)
        return None not in items

    def _refill_reserve(self) -> bool:
        """Allocate the reserve if it is in use. Returns True if it is allocated."""
        self._is_space_low = self._reserve is not None and not self._reserve.reserve()
        return not self._is_space_low

    def _write_batches(self, batches: list[WriteBatch]) -> bool:
        """Write and sync batches, with retries. Returns False if stopped before it succeeded."""
        while True:
            try:
                if self._has_unsynced:
                    self._journal.discard_unsynced()
                    self._has_unsynced = False
                started_at = time.perf_counter()
                for batch in batches:
                    self._journal.write(batch)
                self._journal.sync()
            except OSError as error:
                self._has_unsynced = True
                self.failure_count += 1
                self._on_failure(_describe_failure(error))
                if (
                    error.errno in DISK_FULL_ERRORS
                    and self._reserve is not None
                    and self._reserve.release()
                ):
                    self._is_space_low = True
                    continue
                if self._is_stopping.wait(_RETRY_SECONDS):
                    count = sum(entry.message_count for batch in batches for entry in batch.entries)
                    lost = format_message_count(count)
                    log.error(
                        "journal.messages_lost",
                        "lost {messages}: {error}",
                        messages=lost,
                        count=count,
                        error=_describe_failure(error)[1],
                    )
                    return False
            else:
                self.write_seconds.observe(time.perf_counter() - started_at)
                self.written_batch_count += len(batches)
                self._last_written = batches[-1].number
                self._on_durable(self._last_written, not self._is_space_low)
                return True

    def _remove_segments(self) -> None:
        floors, empty_classes = self._segment_floors
        try:
            if self._journal.remove(floors, empty_classes if self._is_space_low else ()):
                self._on_snapshot_needed()
        except OSError as error:
            log.warning("segment.removal_failed", "cannot remove a segment: {error}", error=error)


def _describe_failure(error: OSError) -> WriteFailure:
    reason = Reason.DISK_FULL if error.errno in DISK_FULL_ERRORS else Reason.DISK_FAILED
    file_text = f": {error.filename}" if error.filename else ""
    return reason, f"cannot write the journal: {error.strerror or error}{file_text}"
