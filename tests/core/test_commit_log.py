"""Commit log: batches, log positions, durability, and write errors."""

from __future__ import annotations

import pytest

from simplebus.core import commit_log as module
from simplebus.core.commit_log import CommitLog
from simplebus.core.errors import Reason
from simplebus.core.limits import TIME_INDEX_STEP_SECONDS
from simplebus.core.protocol.durability import Durability
from simplebus.core.protocol.events import FrameRefused
from simplebus.core.protocol.frames import MESSAGE


def append(
    commit_log: CommitLog, first: int, count: int = 1, producer: str = "", **more: float
) -> None:
    commit_log.append_messages(1, first, count, b"frame" * count, producer, more.get("now", 5.0))


def test_consecutive_messages_share_an_entry() -> None:
    commit_log = CommitLog()
    append(commit_log, 10, 2, "till")
    append(commit_log, 12, 1, "till")
    append(commit_log, 13, 1, "shop")
    batch = commit_log.pop_write_batch()
    assert batch is not None
    (entry,) = batch.entries
    assert (entry.first_sequence, entry.message_count, b"".join(entry.frames)) == (
        10,
        4,
        b"frame" * 4,
    )
    assert entry.producer_runs == [(3, "till"), (1, "shop")]


def test_later_messages_and_other_classes_get_entries_of_their_own() -> None:
    commit_log = CommitLog()
    append(commit_log, 0)
    append(commit_log, 1, now=5.0 + 2 * TIME_INDEX_STEP_SECONDS)
    commit_log.append_messages(2, 0, 1, b"frame", "", 5.0)
    batch = commit_log.pop_write_batch()
    assert batch is not None
    assert [(entry.class_id, entry.first_sequence) for entry in batch.entries] == [
        (1, 0),
        (1, 1),
        (2, 0),
    ]


def test_log_position_is_the_batch_of_the_newest_change() -> None:
    commit_log = CommitLog()
    assert (commit_log.log_position, commit_log.must_defer_confirms) == (0, False)
    append(commit_log, 0)
    assert (commit_log.log_position, commit_log.must_defer_confirms) == (1, True)
    assert commit_log.pop_write_batch() is not None
    assert (commit_log.log_position, commit_log.must_defer_confirms) == (1, True)
    commit_log.mark_durable(1)
    assert (commit_log.log_position, commit_log.must_defer_confirms) == (1, False)
    assert commit_log.pop_write_batch() is None


def test_used_log_position_gets_an_empty_batch() -> None:
    commit_log = CommitLog()
    refused = FrameRefused(Reason.DROP_NEWEST, "no space", MESSAGE, 1, 3, 2)
    commit_log.append_refusal("till", refused)
    assert commit_log.log_position == 1
    assert commit_log.pop_refusals() == [("till", refused)]
    batch = commit_log.pop_write_batch(allow_empty=True)
    assert batch is not None
    assert (batch.number, batch.entries) == (1, [])


def test_durable_head_is_the_first_message_of_the_first_pending_batch() -> None:
    commit_log = CommitLog()
    append(commit_log, 10)
    commit_log.pop_write_batch()
    append(commit_log, 11)
    commit_log.pop_write_batch()
    append(commit_log, 12)
    assert commit_log.durable_head(1, 13) == 10
    commit_log.mark_durable(1)
    assert commit_log.durable_head(1, 13) == 11
    commit_log.mark_durable(2)
    assert commit_log.durable_head(1, 13) == 12
    assert commit_log.durable_head(2, 7) == 7
    commit_log.pop_write_batch()
    commit_log.mark_durable(3)
    assert commit_log.durable_head(1, 13) == 13


def test_durability_memory_waits_only_for_remote_storage() -> None:
    for is_remote in False, True:
        commit_log = CommitLog(Durability.MEMORY, is_remote=is_remote)
        append(commit_log, 3)
        assert commit_log.must_defer_confirms == is_remote
        assert commit_log.is_durable(commit_log.log_position) != is_remote
        assert commit_log.durable_head(1, 4) == (3 if is_remote else 4)
        assert commit_log.pop_write_batch() is not None
        commit_log.mark_durable(1)
        assert not commit_log.must_defer_confirms
        assert commit_log.is_durable(1)
        assert commit_log.durable_head(1, 4) == 4


def test_too_many_unwritten_bytes_are_a_backlog(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "COMMIT_LOG_BYTES_MAX", 10)
    commit_log = CommitLog(Durability.MEMORY)
    append(commit_log, 0, 2)
    assert not commit_log.is_backlogged
    commit_log.pop_write_batch()
    append(commit_log, 2)
    assert commit_log.is_backlogged
    assert commit_log.must_defer_confirms, (
        "confirms with durability memory wait while the log is backlogged"
    )
    commit_log.mark_durable(1)
    assert (commit_log.unwritten_bytes, commit_log.is_backlogged) == (5, False)


def test_mark_durable_clears_the_write_error() -> None:
    commit_log = CommitLog()
    append(commit_log, 0)
    commit_log.pop_write_batch()
    commit_log.write_error = (Reason.DISK_FULL, "no space")
    assert commit_log.is_backlogged
    commit_log.mark_durable(1)
    assert (commit_log.write_error, commit_log.is_backlogged) == (None, False)


def test_remote_classes_become_durable_independently() -> None:
    commit_log = CommitLog(is_remote=True)
    commit_log.append_messages(1, 0, 1, b"frame", "", 5.0)
    assert commit_log.pop_write_batch() is not None
    commit_log.append_messages(2, 0, 1, b"frame", "", 5.0)
    assert commit_log.pop_write_batch() is not None
    commit_log.append_messages(1, 1, 1, b"frame", "", 5.0)
    assert commit_log.pop_write_batch() is not None
    commit_log.mark_class_durable(2, 3)
    assert (commit_log.durable_position, commit_log.unwritten_bytes) == (0, 10)
    positions = {1: 3, 2: 2}
    assert not commit_log.is_producer_durable(3, positions)
    assert positions == {1: 3, 2: 2}  # The first pending class ends the check.
    assert commit_log.is_producer_durable(3, {2: 2})
    commit_log.mark_class_durable(1, 1)
    assert commit_log.is_producer_durable(2, positions)
    assert not commit_log.is_producer_durable(3, positions)
    commit_log.mark_durable(3)
    assert commit_log.is_producer_durable(3, positions)
    assert (commit_log.durable_head(1, 2), commit_log.durable_head(2, 1)) == (2, 1)
    assert commit_log.unwritten_bytes == 0


def test_remote_storage_has_no_durable_changes() -> None:
    commit_log = CommitLog(is_remote=True)
    assert commit_log.append_durable_change(1, "d", "") == 0
    assert commit_log.is_empty


def test_journal_writes_all_classes_together() -> None:
    commit_log = CommitLog()
    append(commit_log, 0)
    assert not commit_log.is_producer_durable(1, {})


def test_late_report_of_an_earlier_batch_changes_nothing() -> None:
    commit_log = CommitLog(Durability.OS)
    for sequence in range(2):
        commit_log.append_messages(1, sequence, 1, b"frame", "", 1.0)
        assert commit_log.pop_write_batch() is not None
    commit_log.mark_durable(2)
    commit_log.mark_durable(1)
    assert commit_log.durable_position == 2
