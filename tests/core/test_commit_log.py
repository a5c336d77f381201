"""What is noted lies in the next lot, and nobody waits for a lot that never comes."""

from __future__ import annotations

import pytest

from simplebus.core import commit_log as module
from simplebus.core.commit_log import CommitLog
from simplebus.core.errors import Reason
from simplebus.core.limits import TIME_INDEX_STEP_SECONDS
from simplebus.core.protocol.durability import Durability
from simplebus.core.protocol.events import FrameRefused
from simplebus.core.protocol.frames import MESSAGE


def note(
    commit_log: CommitLog, first: int, count: int = 1, publisher: str = "", **more: float
) -> None:
    commit_log.append_messages(1, first, count, b"frame" * count, publisher, more.get("now", 5.0))


def test_what_is_noted_in_a_row_is_one_entry() -> None:
    commit_log = CommitLog()
    note(commit_log, 10, 2, "till")
    note(commit_log, 12, 1, "till")
    note(commit_log, 13, 1, "shop")
    lot = commit_log.pop_write_batch()
    assert lot is not None
    (entry,) = lot.entries
    assert (entry.first, entry.count, b"".join(entry.frames)) == (10, 4, b"frame" * 4)
    assert entry.publishers == [(3, "till"), (1, "shop")]


def test_another_time_or_class_is_another_entry() -> None:
    commit_log = CommitLog()
    note(commit_log, 0)
    note(commit_log, 1, now=5.0 + 2 * TIME_INDEX_STEP_SECONDS)
    commit_log.append_messages(2, 0, 1, b"frame", "", 5.0)
    lot = commit_log.pop_write_batch()
    assert lot is not None
    assert [(each.class_id, each.first) for each in lot.entries] == [(1, 0), (1, 1), (2, 0)]


def test_the_mark_is_the_lot_that_holds_all_that_was_noted() -> None:
    commit_log = CommitLog()
    assert (commit_log.log_position, commit_log.must_defer_confirms) == (0, False)
    note(commit_log, 0)
    assert (commit_log.log_position, commit_log.must_defer_confirms) == (1, True)
    assert commit_log.pop_write_batch() is not None
    assert (commit_log.log_position, commit_log.must_defer_confirms) == (1, True)
    commit_log.mark_durable(1)
    assert (commit_log.log_position, commit_log.must_defer_confirms) == (1, False)
    assert commit_log.pop_write_batch() is None


def test_a_mark_that_was_given_out_gets_its_lot() -> None:
    commit_log = CommitLog()
    refused = FrameRefused(Reason.DROP_NEWEST, "no room", MESSAGE, 1, 3, 2)
    commit_log.append_refusal("till", refused)
    assert commit_log.log_position == 1
    assert commit_log.pop_refusals() == [("till", refused)]
    lot = commit_log.pop_write_batch(allow_empty=True)
    assert lot is not None
    assert (lot.number, lot.entries) == (1, [])


def test_what_is_safe_ends_where_the_first_lot_that_is_not_begins() -> None:
    commit_log = CommitLog()
    note(commit_log, 10)
    commit_log.pop_write_batch()
    note(commit_log, 11)
    commit_log.pop_write_batch()
    note(commit_log, 12)
    assert commit_log.durable_head(1, 13) == 10
    commit_log.mark_durable(1)
    assert commit_log.durable_head(1, 13) == 11
    commit_log.mark_durable(2)
    assert commit_log.durable_head(1, 13) == 12
    assert commit_log.durable_head(2, 7) == 7
    commit_log.pop_write_batch()
    commit_log.mark_durable(3)
    assert commit_log.durable_head(1, 13) == 13


def test_memory_elsewhere_is_waited_for_and_ones_own_is_not() -> None:
    for elsewhere in False, True:
        commit_log = CommitLog(Durability.MEMORY, is_remote=elsewhere)
        note(commit_log, 3)
        assert (commit_log.must_defer_confirms, commit_log.is_pending(commit_log.log_position)) == (
            elsewhere,
            elsewhere,
        )
        assert commit_log.durable_head(1, 4) == (3 if elsewhere else 4)
        assert commit_log.pop_write_batch() is not None
        commit_log.mark_durable(1)
        assert (
            commit_log.must_defer_confirms,
            commit_log.is_pending(1),
            commit_log.durable_head(1, 4),
        ) == (
            False,
            False,
            4,
        )


def test_too_much_that_is_held_is_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "COMMIT_LOG_BYTES_MAX", 10)
    commit_log = CommitLog(Durability.MEMORY)
    note(commit_log, 0, 2)
    assert not commit_log.is_backlogged
    commit_log.pop_write_batch()
    note(commit_log, 2)
    assert commit_log.is_backlogged
    assert commit_log.must_defer_confirms, "not even memory is promised at will"
    commit_log.mark_durable(1)
    assert (commit_log.unwritten_bytes, commit_log.is_backlogged) == (5, False)


def test_a_failure_is_over_when_something_is_reached() -> None:
    commit_log = CommitLog()
    note(commit_log, 0)
    commit_log.pop_write_batch()
    commit_log.write_error = (Reason.DISK_FULL, "no space")
    assert commit_log.is_backlogged
    commit_log.mark_durable(1)
    assert (commit_log.write_error, commit_log.is_backlogged) == (None, False)


def test_elsewhere_a_class_waits_for_no_other() -> None:
    commit_log = CommitLog(is_remote=True)
    commit_log.append_messages(1, 0, 1, b"frame", "", 5.0)
    assert commit_log.pop_write_batch() is not None
    commit_log.append_messages(2, 0, 1, b"frame", "", 5.0)
    assert commit_log.pop_write_batch() is not None
    commit_log.append_messages(1, 1, 1, b"frame", "", 5.0)
    assert commit_log.pop_write_batch() is not None
    commit_log.mark_class_durable(2, 3)
    assert (commit_log.durable_position, commit_log.unwritten_bytes) == (0, 10)
    owed = {1: 3, 2: 2}
    assert not commit_log.is_producer_durable(3, owed)
    assert owed == {1: 3, 2: 2}  # It was not asked for further than it takes.
    assert commit_log.is_producer_durable(3, {2: 2})
    commit_log.mark_class_durable(1, 1)
    assert commit_log.is_producer_durable(2, owed)
    assert not commit_log.is_producer_durable(3, owed)
    commit_log.mark_durable(3)
    assert commit_log.is_producer_durable(3, owed)
    assert (
        commit_log.durable_head(1, 2),
        commit_log.durable_head(2, 1),
        commit_log.unwritten_bytes,
    ) == (
        2,
        1,
        0,
    )


def test_elsewhere_no_durable_is_kept_so_none_is_waited_for() -> None:
    commit_log = CommitLog(is_remote=True)
    assert commit_log.append_durable_change(1, "d", "") == 0
    assert commit_log.is_empty


def test_a_journal_is_one_way_for_all_classes() -> None:
    commit_log = CommitLog()
    note(commit_log, 0)
    assert not commit_log.is_producer_durable(1, {})
