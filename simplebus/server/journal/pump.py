"""Moves commit log entries to the journal's writer thread, and recovers a broker at the start.

`load` recovers the broker by `storage.recovery`, before the pump starts.

The writer has at most two write batches: it writes one, and the other waits. Later entries form the
next batch, so a slow disk gets larger batches. If there are many new classes or durables, further
batches are queued, because one batch with all of them would occupy the event loop.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import trio

from simplebus.core.broker.broker import Broker
from simplebus.core.broker.wait_reasons import format_message_count
from simplebus.core.checkpoint import Checkpointer
from simplebus.core.commit_log import CommitLog
from simplebus.core.histogram import HistogramSnapshot
from simplebus.core.message_class.spill import SpilledRange, SpillRead
from simplebus.core.protocol.durability import Durability
from simplebus.logs.event_logger import EventLogger
from simplebus.server.journal.spill_read_thread import SpillReadThread
from simplebus.server.journal.writer import (
    DIRECT_WRITE_BYTES_MAX,
    JournalWriter,
    SegmentFloors,
    WriteFailure,
)
from simplebus.storage.directory import JournalDirectory
from simplebus.storage.disk_reserve import DiskReserve
from simplebus.storage.errors import JournalError
from simplebus.storage.journal import Journal
from simplebus.storage.recovery import finish_recovery, recover
from simplebus.storage.segment_reader import SegmentReader

log = EventLogger("simplebus.server")

_BATCHES_IN_FLIGHT_MAX = 2
_BATCHES_WITH_CHANGES_MAX = 256
"""Maximum number of batches in flight while the next batch would contain many changes."""

RunInLoop = Callable[..., None]
"""Schedules a function with its arguments in the event loop; may be called from any thread."""


@dataclass(frozen=True, slots=True)
class JournalStatistics:
    """Snapshot of the counters of a journal."""

    level: Durability
    pending_batch_count: int
    """Write batches that are not durable yet."""
    held_bytes: int
    """Frame bytes that have not reached the promised durability."""
    written_bytes: int
    """Bytes of message records written by this process."""
    written_batch_count: int
    """Write batches written by this process."""
    sync_count: int
    """File syncs by this process."""
    write_seconds: HistogramSnapshot
    """Time to write and sync the batches that were written together."""
    failure_count: int
    """Failed writes."""
    failure: str
    """Current write error; empty if writing works."""
    lagging_session_count: int
    """Sessions that are not read from until the journal has caught up."""
    spill_reader_count: int
    """Subscriptions whose messages are read back from disk."""
    read_bytes: int
    """Frame bytes that were read back."""
    read_failure_count: int
    """Failed reads."""
    disk_bytes: int
    """Size of the file system of the data directory; 0 if it cannot be read."""
    disk_free_bytes: int
    """Bytes of this file system that the server may still use."""


def measure_disk(directory: Path) -> tuple[int, int]:
    """Return size and free bytes of the file system of a directory; zeros if unknown."""
    try:
        status = os.statvfs(directory)
    except OSError:
        return 0, 0
    return status.f_blocks * status.f_frsize, status.f_bavail * status.f_frsize


class JournalPump:
    """Connects the commit log of one broker with the journal in one directory."""

    def __init__(
        self, broker: Broker, directory: JournalDirectory, flush_ready: Callable[[], None]
    ) -> None:
        """`flush_ready` is called when confirms have become due."""
        assert broker.commit_log is not None
        self._broker = broker
        self._commit_log: CommitLog = broker.commit_log
        self._flush_ready = flush_ready
        self._checkpointer = Checkpointer(broker)
        self._call_soon: RunInLoop = _not_started
        self._path = directory.path
        self._journal = Journal(directory, durability=broker.commit_log.durability)
        self._writer = JournalWriter(
            self._journal,
            on_durable=lambda batch, has_space: self._call_in_loop(
                self._on_durable, batch, has_space
            ),
            on_failure=lambda failure: self._call_in_loop(self._on_failure, failure),
            on_snapshot_needed=lambda: self._call_in_loop(self._request_snapshot),
            reserve=DiskReserve(directory.path),
        )
        self._spill_manager = broker.spill_manager
        self._reader = SpillReadThread(
            SegmentReader(directory.path, directory.salt),
            on_read=lambda read, found: self._call_in_loop(self._on_read, read, found),
            on_failure=lambda read: self._call_in_loop(self._on_read_failure, read),
        )
        self._segment_floors = SegmentFloors({}, ())
        self._last_written = 0
        """Number of the last write batch that is durable."""
        self._is_space_low = False
        """True if the disk is full and the reserved space is in use."""
        self._has_failed = False
        """True if the writer's latest report is a failure."""

    def _call_in_loop(self, function: Callable[..., None], *arguments: object) -> None:
        """Schedule `function` in the event loop."""
        self._call_soon(function, *arguments)

    def start(self, call_in_loop: RunInLoop | None = None) -> None:
        """Start the threads, from within the event loop.

        `call_in_loop` schedules functions in the event loop and is called from other threads; None
        selects trio's.
        """
        self._last_written = self._commit_log.last_batch_number
        self._call_soon = call_in_loop or trio_loop_caller()
        self._writer.start(self._last_written)
        if self._spill_manager is not None:
            self._reader.start()

    def statistics(self) -> JournalStatistics:
        commit_log, failure = self._commit_log, self._commit_log.write_error
        disk_bytes, disk_free_bytes = measure_disk(self._path)
        return JournalStatistics(
            level=commit_log.durability,
            pending_batch_count=commit_log.last_batch_number - self._last_written,
            held_bytes=commit_log.unwritten_bytes,
            written_bytes=self._journal.written_bytes,
            written_batch_count=self._writer.written_batch_count,
            sync_count=self._journal.files_synced,
            write_seconds=self._writer.write_seconds.snapshot(),
            failure_count=self._writer.failure_count,
            failure=failure[1] if failure is not None else "",
            lagging_session_count=len(commit_log.paused_sessions),
            spill_reader_count=len(self._spill_manager.readers)
            if self._spill_manager is not None
            else 0,
            read_bytes=self._reader.read_bytes,
            read_failure_count=self._reader.failure_count,
            disk_bytes=disk_bytes,
            disk_free_bytes=disk_free_bytes,
        )

    @property
    def next_scan_at(self) -> float:
        """Time of the next full scan of positions, by the broker's clock."""
        return self._checkpointer.next_full_scan

    @property
    def has_deferred_progress(self) -> bool:
        """True if `submit_pending` must be called again after PROGRESS_SECONDS."""
        checkpointer = self._checkpointer
        has_more = checkpointer.has_unrecorded_progress or checkpointer.is_snapshot_begun
        return has_more and not self._is_busy

    @property
    def _is_busy(self) -> bool:
        """True if the writer has enough batches. After each one it calls `submit_pending`."""
        commit_log = self._commit_log
        in_flight_count = commit_log.last_batch_number - self._last_written
        if in_flight_count < _BATCHES_IN_FLIGHT_MAX:
            return False
        return not commit_log.has_many_changes or in_flight_count >= _BATCHES_WITH_CHANGES_MAX

    def submit_pending(self) -> int:
        """Write new entries, or pass entries and reads to the threads, unless they have enough.

        Returns:
            The number of batches and reads that were passed to the threads.
        """
        submitted_count = 0
        if not self._is_busy:
            is_small = self._commit_log.next_batch_bytes <= DIRECT_WRITE_BYTES_MAX
            batch = self._checkpointer.build_write_batch()
            # The log is not empty if requested progress needs further batches: they follow in later
            # turns.
            can_write_directly = is_small and self._commit_log.is_empty
            if batch is not None and can_write_directly and self._writer.write_directly(batch):
                self._on_durable(batch.number, has_space=True)
            elif batch is not None:
                self._writer.put(batch)
                submitted_count += 1
        if self._spill_manager is not None:
            for read in self._spill_manager.drain_reads():
                self._reader.put(read)
                submitted_count += 1
        return submitted_count

    def tick(self) -> None:
        """Request the removal of segments that no position needs. Called once per tick."""
        segment_floors = SegmentFloors(
            self._checkpointer.class_floors(), self._checkpointer.empty_class_ids()
        )
        if segment_floors != self._segment_floors and (
            self._commit_log.write_error is None or self._is_space_low
        ):
            self._segment_floors = segment_floors
            self._writer.put(segment_floors)

    def close(self) -> None:
        """Write all entries and stop the threads. Blocks until this is done."""
        batch = self._checkpointer.build_write_batch(is_last=True)
        if batch is not None:
            self._writer.put(batch)
        self._writer.stop()
        if self._spill_manager is not None:
            self._reader.stop()

    def _on_durable(self, batch: int, has_space: bool) -> None:
        if self._commit_log.write_error is not None and has_space:
            log.warning("journal.write_recovered", "writing the journal works again")
        # The event loop may have written a later batch before the thread's report arrived.
        batch = max(batch, self._last_written)
        self._last_written = batch
        self._is_space_low, self._has_failed = not has_space, False
        self._mark_durable()

    def _mark_durable(self) -> None:
        """Report the written batches to the broker: many of them in several turns, because a reply
        may be sent for each of their changes.
        """
        batch = min(self._last_written, self._commit_log.durable_position + _BATCHES_IN_FLIGHT_MAX)
        # A failure may have been reported between two turns; only a later batch ends that state.
        has_space = not (self._is_space_low or self._has_failed)
        self._broker.mark_durable(batch, has_space=has_space)
        self._flush_ready()
        if batch < self._last_written:
            self._call_in_loop(self._mark_durable)

    def _on_failure(self, failure: WriteFailure) -> None:
        if self._commit_log.write_error is None:
            log.error(
                "journal.write_failed",
                "{error}; publishers are refused until writing works again",
                error=failure[1],
                reason=failure[0],
            )
        self._has_failed = True
        self._broker.journal_failed(*failure)
        self._flush_ready()

    def _on_read(self, read: SpillRead, found: Sequence[SpilledRange]) -> None:
        assert self._spill_manager is not None
        self._spill_manager.complete_read(read, found)
        self._flush_ready()

    def _on_read_failure(self, read: SpillRead) -> None:
        assert self._spill_manager is not None
        self._spill_manager.fail_read(read)

    def _request_snapshot(self) -> None:
        self._checkpointer.is_snapshot_due = True


def trio_loop_caller() -> RunInLoop:
    """Return a function that schedules calls in the current trio event loop from other threads."""
    token = trio.lowlevel.current_trio_token()

    def call_in_loop(function: Callable[..., None], *arguments: object) -> None:
        with contextlib.suppress(trio.RunFinishedError):  # The event loop has ended.
            token.run_sync_soon(function, *arguments)

    return call_in_loop


def _not_started(function: Callable[..., None], *arguments: object) -> None:
    raise AssertionError("not started")


def load(broker: Broker, directory: JournalDirectory) -> None:
    """Recover a new broker's state from a data directory. Raises JournalError."""
    assert broker.commit_log is not None
    found = recover(directory, broker)
    broker.commit_log.last_batch_number = broker.commit_log.durable_position = (
        found.last_batch_number
    )
    for problem in found.problems:
        log.warning("journal.repaired", "journal {problem}", problem=problem)
    try:
        problems = finish_recovery(
            directory, found, to_disk=broker.commit_log.durability is Durability.DISK
        )
    except OSError as error:
        raise JournalError(f"cannot use {directory.path} as a journal: {error.strerror}") from None
    for problem in problems:
        log.warning("journal.not_repaired", "journal {problem}", problem=problem)
    if found.last_batch_number:
        recovered = format_message_count(found.message_count)
        log.info(
            "journal.recovered",
            "recovered {messages} from {path}",
            messages=recovered,
            count=found.message_count,
            path=directory.path,
        )
