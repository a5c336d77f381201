"""Tests of the journal's writer thread: batching, retries and the end."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import queue
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from simplebus.core.broker.broker import Broker, Settings
from simplebus.core.commit_log import CommitLog, WriteBatch
from simplebus.core.errors import Reason
from simplebus.core.protocol.durability import Durability
from simplebus.core.protocol.frames import MESSAGE
from simplebus.core.snapshot import StateChanges
from simplebus.server.journal import writer as module
from simplebus.server.journal.writer import JournalWriter, SegmentFloors, WriteFailure
from simplebus.storage.directory import lock_directory
from simplebus.storage.disk_reserve import DiskReserve
from simplebus.storage.journal import Journal
from simplebus.storage.recovery import recover
from tests.support.oracles import build_frame

PATIENCE_SECONDS = 60.0


class GatedJournal(Journal):
    """Journal whose `sync` waits for a semaphore and fails on demand."""

    may_sync = threading.Semaphore(0)
    sync_count = 0
    on_sync: Callable[[], None] = staticmethod(lambda: None)

    def sync(self) -> None:
        assert self.may_sync.acquire(timeout=PATIENCE_SECONDS)
        self.on_sync()
        super().sync()
        self.sync_count += 1


class WriterHarness:
    """Journal writer and the events that it reports."""

    def __init__(self, path: Path) -> None:
        self.directory = lock_directory(path, new_bus="here")
        self.journal = GatedJournal(self.directory, durability=Durability.DISK)
        self.journal.may_sync = threading.Semaphore(0)
        self.events: list[object] = []
        self.event_count = threading.Semaphore(0)
        self.commit_log = CommitLog()
        self.reserve = DiskReserve(path, 4096)
        self.writer = JournalWriter(
            self.journal,
            on_durable=lambda batch, has_space: self.record_event(batch if has_space else -batch),
            on_failure=self.record_event,
            on_snapshot_needed=lambda: self.record_event("snapshot"),
            reserve=self.reserve,
        )
        self.writer.start()

    def record_event(self, event: int | WriteFailure | str) -> None:
        self.events.append(event)
        self.event_count.release()

    def wait_events(self, count: int) -> list[object]:
        for _ in range(count):
            assert self.event_count.acquire(timeout=PATIENCE_SECONDS)
        return self.events

    def put_batch(self, first: int) -> None:
        self.commit_log.append_messages(1, first, 1, b"0" * 13, "", 1.0)
        snapshot = b"" if self.commit_log.last_batch_number else StateChanges().encode()
        batch = self.commit_log.pop_write_batch(snapshot=snapshot)
        assert batch is not None
        self.writer.put(batch)


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[WriterHarness]:
    harness = WriterHarness(tmp_path)
    try:
        yield harness
    finally:
        harness.journal.on_sync = lambda: None
        harness.journal.may_sync.release(100)
        harness.writer.stop()
        harness.directory.close()


def fill_disk(harness: WriterHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let writes fail until the reserve is released, and leave no space to reserve again."""

    def fail() -> None:
        if harness.reserve.is_reserved:
            raise OSError(errno.ENOSPC, "No space")

    harness.journal.on_sync = fail
    monkeypatch.setattr(harness.reserve, "reserve", lambda: harness.reserve.is_reserved)


def test_batches_during_a_sync_share_the_next_one(harness: WriterHarness) -> None:
    harness.put_batch(0)
    harness.journal.may_sync.release()
    assert harness.wait_events(1) == [1]
    harness.put_batch(1)
    for first in range(2, 6):
        harness.put_batch(first)
    harness.journal.may_sync.release(2)
    assert harness.wait_events(1)[-1] in (2, 3, 4, 5, 6)
    while harness.events[-1] != 6:
        harness.wait_events(1)
    assert harness.journal.sync_count <= 3


def test_failed_writes_are_retried(harness: WriterHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_RETRY_SECONDS", 0.0)
    errors = [OSError(errno.ENOSPC, "No space"), OSError(errno.EIO, "I/O error")]

    def fail() -> None:
        if errors:
            raise errors.pop(0)

    harness.journal.on_sync = fail
    harness.put_batch(0)
    harness.journal.may_sync.release(3)
    events = harness.wait_events(4)
    assert [event[0] for event in events[:2] if isinstance(event, tuple)] == [
        Reason.DISK_FULL,
        Reason.DISK_FAILED,
    ]
    assert events[2:] == [-1, 1]  # -1: written without the reserve; 1: the reserve exists again.


def test_full_disk_writes_queued_batches_from_the_reserve_then_refuses(
    harness: WriterHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness.put_batch(0)
    harness.journal.may_sync.release()
    assert harness.wait_events(1) == [1]
    assert harness.reserve.is_reserved
    fill_disk(harness, monkeypatch)
    harness.put_batch(1)
    harness.journal.may_sync.release(2)
    events = harness.wait_events(2)
    assert isinstance(events[1], tuple)
    assert events[1][0] is Reason.DISK_FULL
    assert events[2:] == [-2]
    harness.journal.on_sync = lambda: None
    # Sent at each tick; allows the writer to remove segments.
    harness.writer.put(SegmentFloors({1: 0}, ()))
    harness.put_batch(2)
    harness.journal.may_sync.release()
    assert harness.wait_events(1)[-1] == -3
    monkeypatch.undo()
    harness.writer.put(SegmentFloors({1: 0}, ()))
    assert harness.wait_events(1)[-1] == 3
    assert harness.reserve.is_reserved


def test_only_segment_removal_runs_on_a_disk_that_is_full_at_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_RETRY_SECONDS", 0.0)
    take_reserve, removals = DiskReserve.reserve, list[str]()

    def take_(self: DiskReserve) -> bool:
        self.is_disk_full = not removals
        return bool(removals) and take_reserve(self)

    monkeypatch.setattr(DiskReserve, "reserve", take_)
    monkeypatch.setattr(Journal, "remove", lambda *arguments: removals.append(str(arguments[1:])))
    harness = WriterHarness(tmp_path)
    try:
        harness.writer.put(SegmentFloors({1: 7}, {1}))
        failure, has_space = harness.wait_events(2)
        assert isinstance(failure, tuple)
        assert failure[0] is Reason.DISK_FULL
        assert "cannot reserve disk space" in failure[1]
        assert has_space == 0  # No batch was written.
        assert removals[0] in ("({}, ())", "({1: 7}, {1})")
    finally:
        harness.journal.may_sync.release(100)
        harness.writer.stop()
        harness.directory.close()


def test_free_space_is_noticed_without_a_write(
    harness: WriterHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_RETRY_SECONDS", 0.0)
    fill_disk(harness, monkeypatch)
    harness.put_batch(0)
    harness.journal.may_sync.release(2)
    assert harness.wait_events(2)[-1] == -1
    harness.journal.on_sync = lambda: None
    monkeypatch.undo()
    assert harness.wait_events(1)[-1] == 1
    assert harness.reserve.is_reserved


def test_stop_with_failing_writes_logs_the_lost_messages(
    harness: WriterHarness, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise OSError(errno.ENOSPC, "No space")

    harness.journal.on_sync = fail
    harness.put_batch(0)
    harness.journal.may_sync.release(100)
    harness.wait_events(1)
    with caplog.at_level(logging.ERROR):
        harness.writer.stop()
    assert "lost 1 message: cannot write the journal: No space" in caplog.text


def test_internal_writer_error_refuses_publishers_and_is_logged(
    harness: WriterHarness, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise ZeroDivisionError

    harness.journal.on_sync = fail
    harness.put_batch(0)
    harness.journal.may_sync.release()
    assert harness.wait_events(1) == [
        (Reason.DISK_FAILED, "the journal failed; see the server's log")
    ]
    harness.writer.stop()
    assert "ZeroDivisionError" in caplog.text


class DirectWriteHarness:
    """Journal writer with durability `os`, whose thread is ready."""

    def __init__(self, path: Path) -> None:
        self.directory = lock_directory(path, new_bus="here")
        self.journal = Journal(self.directory, durability=Durability.OS)
        self.durable_batches: queue.SimpleQueue[int] = queue.SimpleQueue()
        self.failures: list[WriteFailure] = []
        self.commit_log = CommitLog(Durability.OS)
        self.writer = JournalWriter(
            self.journal,
            on_durable=lambda number, has_space: self.durable_batches.put(number),
            on_failure=self.failures.append,
            on_snapshot_needed=lambda: None,
        )
        self.writer.start()
        self.writer.put(self.next_batch(snapshot=StateChanges().encode()))
        assert self.durable_batches.get(timeout=PATIENCE_SECONDS) == 1
        self.wait_until_idle()

    def next_batch(self, snapshot: bytes = b"") -> WriteBatch:
        """Return a batch with one message."""
        sequence = self.commit_log.last_batch_number
        frame = build_frame(MESSAGE, class_id=1, content=b"%04d" % sequence)
        self.commit_log.append_messages(1, sequence, 1, frame, "", 1.0)
        batch = self.commit_log.pop_write_batch(snapshot=snapshot)
        assert batch is not None
        return batch

    def wait_until_idle(self) -> None:
        """Wait for the thread to finish its last item, which it reports a moment earlier."""
        self.writer.put(SegmentFloors({}, ()))
        while not self.writer.is_idle:
            os.sched_yield()

    def stop(self) -> int:
        """Stop, and return the number of messages in the journal."""
        self.writer.stop()
        self.directory.close()
        broker = Broker(Settings(), commit_log=CommitLog(Durability.OS))
        with contextlib.closing(lock_directory(self.directory.path, new_bus="")) as directory:
            found = recover(directory, broker)
        assert found.problems == []
        ring = broker.classes[1].ring
        frames = [ring.copy_frame(n)[-8:-4] for n in range(ring.floor, ring.head)]
        assert frames == [b"%04d" % n for n in range(len(frames))], frames
        return len(frames)


def test_small_batch_is_written_directly_while_the_thread_is_idle(tmp_path: Path) -> None:
    harness = DirectWriteHarness(tmp_path)
    assert harness.writer.write_directly(harness.next_batch())
    assert harness.writer.write_directly(harness.next_batch())
    assert harness.stop() == 3
    assert harness.durable_batches.empty()


def test_no_batch_is_written_directly_before_queued_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = DirectWriteHarness(tmp_path)
    may_write = threading.Semaphore(0)
    write = Journal.write

    def wait_and_write(journal: Journal, batch: WriteBatch) -> None:
        assert may_write.acquire(timeout=PATIENCE_SECONDS)
        write(journal, batch)

    monkeypatch.setattr(Journal, "write", wait_and_write)
    harness.writer.put(harness.next_batch())
    second = harness.next_batch()
    assert not harness.writer.write_directly(second)
    harness.writer.put(second)
    may_write.release(2)
    assert harness.stop() == 3


def test_thread_repeats_a_failed_direct_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = DirectWriteHarness(tmp_path)
    monkeypatch.setattr(module, "_RETRY_SECONDS", 0.0)
    write = Journal.write

    def write_and_fail(journal: Journal, batch: WriteBatch) -> None:
        write(journal, batch)
        raise OSError(errno.EIO, "I/O error")

    batch = harness.next_batch()
    monkeypatch.setattr(Journal, "write", write_and_fail)
    assert not harness.writer.write_directly(batch)
    monkeypatch.setattr(Journal, "write", write)
    harness.writer.put(batch)
    assert harness.durable_batches.get(timeout=PATIENCE_SECONDS) == 2
    harness.wait_until_idle()
    later = harness.next_batch()
    assert not harness.writer.write_directly(later), "a failed write does not pause direct writes"
    harness.writer.put(later)
    assert harness.stop() == 3


def test_slow_direct_write_is_the_last_one_for_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = DirectWriteHarness(tmp_path)
    times = iter([0.0, 0.5, 49.9, 50.1, 50.1])
    monkeypatch.setattr(module.time, "monotonic", lambda: next(times))
    assert harness.writer.write_directly(harness.next_batch())
    later = harness.next_batch()
    assert not harness.writer.write_directly(later)
    assert harness.writer.write_directly(later)
    monkeypatch.undo()
    assert harness.stop() == 3
