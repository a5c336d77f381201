"""Tests of the journal's writer thread: batching, retries and the end."""

from __future__ import annotations

import errno
import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from simplebus.core.commit_log import CommitLog
from simplebus.core.errors import Reason
from simplebus.core.protocol.durability import Durability
from simplebus.core.snapshot import StateChanges
from simplebus.server.journal import writer as module
from simplebus.server.journal.writer import JournalWriter, SegmentFloors, WriteFailure
from simplebus.storage.directory import take
from simplebus.storage.disk_reserve import Reserve
from simplebus.storage.journal import Journal

PATIENCE_SECONDS = 60.0


class GatedJournal(Journal):
    """Syncs only when it may, and fails as it is told."""

    may_sync = threading.Semaphore(0)
    sync_count = 0
    on_sync: Callable[[], None] = staticmethod(lambda: None)

    def sync(self) -> None:
        assert self.may_sync.acquire(timeout=PATIENCE_SECONDS)
        self.on_sync()
        super().sync()
        self.sync_count += 1


class WriterHarness:
    """A writer, and what it has said."""

    def __init__(self, path: Path) -> None:
        self.directory = take(path, new_bus="here")
        self.journal = GatedJournal(self.directory, level=Durability.DISK)
        self.journal.may_sync = threading.Semaphore(0)
        self.events: list[object] = []
        self.event_count = threading.Semaphore(0)
        self.commit_log = CommitLog()
        self.reserve = Reserve(path, 4096)
        self.writer = JournalWriter(
            self.journal,
            on_durable=lambda lot, has_space: self.record_event(lot if has_space else -lot),
            on_failure=self.record_event,
            on_snapshot_needed=lambda: self.record_event("snapshot"),
            reserve=self.reserve,
        )
        self.writer.start()

    def record_event(self, what: int | WriteFailure | str) -> None:
        self.events.append(what)
        self.event_count.release()

    def wait_events(self, count: int) -> list[object]:
        for _ in range(count):
            assert self.event_count.acquire(timeout=PATIENCE_SECONDS)
        return self.events

    def put_batch(self, first: int) -> None:
        self.commit_log.append_messages(1, first, 1, b"0" * 13, "", 1.0)
        snapshot = b"" if self.commit_log.last_batch_number else StateChanges().encode()
        lot = self.commit_log.pop_write_batch(snapshot=snapshot)
        assert lot is not None
        self.writer.put(lot)


@pytest.fixture
def running(tmp_path: Path) -> Iterator[WriterHarness]:
    running = WriterHarness(tmp_path)
    try:
        yield running
    finally:
        running.journal.on_sync = lambda: None
        running.journal.may_sync.release(100)
        running.writer.stop()
        running.directory.close()


def fill_disk(running: WriterHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let writes fail until the reserve is released, and leave no space to reserve again."""

    def fail() -> None:
        if running.reserve.is_there:
            raise OSError(errno.ENOSPC, "No space")

    running.journal.on_sync = fail
    monkeypatch.setattr(running.reserve, "take", lambda: running.reserve.is_there)


def test_batches_during_a_sync_share_the_next_one(running: WriterHarness) -> None:
    running.put_batch(0)
    running.journal.may_sync.release()
    assert running.wait_events(1) == [1]
    running.put_batch(1)
    for first in range(2, 6):
        running.put_batch(first)
    running.journal.may_sync.release(2)
    assert running.wait_events(1)[-1] in (2, 3, 4, 5, 6)
    while running.events[-1] != 6:
        running.wait_events(1)
    assert running.journal.sync_count <= 3


def test_failed_writes_are_retried(running: WriterHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_RETRY_SECONDS", 0.0)
    errors = [OSError(errno.ENOSPC, "No space"), OSError(errno.EIO, "I/O error")]

    def fail() -> None:
        if errors:
            raise errors.pop(0)

    running.journal.on_sync = fail
    running.put_batch(0)
    running.journal.may_sync.release(3)
    said = running.wait_events(4)
    assert [each[0] for each in said[:2] if isinstance(each, tuple)] == [
        Reason.DISK_FULL,
        Reason.DISK_FAILED,
    ]
    assert said[2:] == [-1, 1]  # With the reserve, which is there again then.


def test_full_disk_writes_queued_batches_from_the_reserve_then_refuses(
    running: WriterHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    running.put_batch(0)
    running.journal.may_sync.release()
    assert running.wait_events(1) == [1]
    assert running.reserve.is_there
    fill_disk(running, monkeypatch)
    running.put_batch(1)
    running.journal.may_sync.release(2)
    said = running.wait_events(2)
    assert isinstance(said[1], tuple)
    assert said[1][0] is Reason.DISK_FULL
    assert said[2:] == [-2]
    running.journal.on_sync = lambda: None
    running.writer.put(SegmentFloors({1: 0}, ()))  # As at each tick: with it, segments may go.
    running.put_batch(2)
    running.journal.may_sync.release()
    assert running.wait_events(1)[-1] == -3
    monkeypatch.undo()
    running.writer.put(SegmentFloors({1: 0}, ()))
    assert running.wait_events(1)[-1] == 3
    assert running.reserve.is_there


def test_only_segment_removal_runs_on_a_disk_that_is_full_at_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_RETRY_SECONDS", 0.0)
    honest, asked = Reserve.take, list[str]()

    def take_(self: Reserve) -> bool:
        self.finds_no_room = not asked
        return bool(asked) and honest(self)

    monkeypatch.setattr(Reserve, "take", take_)
    monkeypatch.setattr(Journal, "remove", lambda *given: asked.append(str(given[1:])))
    running = WriterHarness(tmp_path)
    try:
        running.writer.put(SegmentFloors({1: 7}, {1}))
        failure, has_space = running.wait_events(2)
        assert isinstance(failure, tuple)
        assert failure[0] is Reason.DISK_FULL
        assert "cannot reserve disk space" in failure[1]
        assert has_space == 0  # Nothing was written since.
        assert asked[0] in ("({}, ())", "({1: 7}, {1})")
    finally:
        running.journal.may_sync.release(100)
        running.writer.stop()
        running.directory.close()


def test_free_space_is_noticed_without_a_write(
    running: WriterHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_RETRY_SECONDS", 0.0)
    fill_disk(running, monkeypatch)
    running.put_batch(0)
    running.journal.may_sync.release(2)
    assert running.wait_events(2)[-1] == -1
    running.journal.on_sync = lambda: None
    monkeypatch.undo()
    assert running.wait_events(1)[-1] == 1
    assert running.reserve.is_there


def test_stop_with_failing_writes_logs_the_lost_messages(
    running: WriterHarness, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise OSError(errno.ENOSPC, "No space")

    running.journal.on_sync = fail
    running.put_batch(0)
    running.journal.may_sync.release(100)
    running.wait_events(1)
    with caplog.at_level(logging.ERROR):
        running.writer.stop()
    assert "lost 1 messages: cannot write the journal: No space" in caplog.text


def test_internal_writer_error_refuses_publishers_and_is_logged(
    running: WriterHarness, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise ZeroDivisionError

    running.journal.on_sync = fail
    running.put_batch(0)
    running.journal.may_sync.release()
    assert running.wait_events(1) == [(Reason.DISK_FAILED, "the journal failed; see the server's log")]
    running.writer.stop()
    assert "ZeroDivisionError" in caplog.text
