"""What is noted lies in the next lot, and nobody waits for a lot that never comes."""

from __future__ import annotations

import pytest

from simplebus.core import commit_log as module
from simplebus.core.commit_log import CommitLog, Durability
from simplebus.core.errors import Reason
from simplebus.core.limits import TIMES_STEP_SECONDS
from simplebus.core.protocol.events import Refused
from simplebus.core.protocol.frames import MESSAGE


def note(ledger: CommitLog, first: int, count: int = 1, publisher: str = "", **more: float) -> None:
    ledger.note(1, first, count, b"frame" * count, publisher, more.get("now", 5.0))


def test_what_is_noted_in_a_row_is_one_entry() -> None:
    ledger = CommitLog()
    note(ledger, 10, 2, "till")
    note(ledger, 12, 1, "till")
    note(ledger, 13, 1, "shop")
    lot = ledger.take()
    assert lot is not None
    (entry,) = lot.entries
    assert (entry.first, entry.count, b"".join(entry.frames)) == (10, 4, b"frame" * 4)
    assert entry.publishers == [(3, "till"), (1, "shop")]


def test_another_time_or_class_is_another_entry() -> None:
    ledger = CommitLog()
    note(ledger, 0)
    note(ledger, 1, now=5.0 + 2 * TIMES_STEP_SECONDS)
    ledger.note(2, 0, 1, b"frame", "", 5.0)
    lot = ledger.take()
    assert lot is not None
    assert [(each.class_id, each.first) for each in lot.entries] == [(1, 0), (1, 1), (2, 0)]


def test_the_mark_is_the_lot_that_holds_all_that_was_noted() -> None:
    ledger = CommitLog()
    assert (ledger.mark, ledger.is_awaited) == (0, False)
    note(ledger, 0)
    assert (ledger.mark, ledger.is_awaited) == (1, True)
    assert ledger.take() is not None
    assert (ledger.mark, ledger.is_awaited) == (1, True)
    ledger.reach(1)
    assert (ledger.mark, ledger.is_awaited) == (1, False)
    assert ledger.take() is None


def test_a_mark_that_was_given_out_gets_its_lot() -> None:
    ledger = CommitLog()
    refused = Refused(Reason.DROP_NEWEST, "no room", MESSAGE, 1, 3, 2)
    ledger.refuse("till", refused)
    assert ledger.mark == 1
    assert ledger.take_refused() == [("till", refused)]
    lot = ledger.take(is_owed=True)
    assert lot is not None
    assert (lot.number, lot.entries) == (1, [])


def test_what_is_safe_ends_where_the_first_lot_that_is_not_begins() -> None:
    ledger = CommitLog()
    note(ledger, 10)
    ledger.take()
    note(ledger, 11)
    ledger.take()
    note(ledger, 12)
    assert ledger.safe(1, 13) == 10
    ledger.reach(1)
    assert ledger.safe(1, 13) == 11
    ledger.reach(2)
    assert ledger.safe(1, 13) == 12
    assert ledger.safe(2, 7) == 7
    ledger.take()
    ledger.reach(3)
    assert ledger.safe(1, 13) == 13


def test_memory_elsewhere_is_waited_for_and_ones_own_is_not() -> None:
    for elsewhere in False, True:
        ledger = CommitLog(Durability.MEMORY, elsewhere=elsewhere)
        note(ledger, 3)
        assert (ledger.is_awaited, ledger.owes(ledger.mark)) == (elsewhere, elsewhere)
        assert ledger.safe(1, 4) == (3 if elsewhere else 4)
        assert ledger.take() is not None
        ledger.reach(1)
        assert (ledger.is_awaited, ledger.owes(1), ledger.safe(1, 4)) == (False, False, 4)


def test_too_much_that_is_held_is_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LEDGER_BYTES_MAX", 10)
    ledger = CommitLog(Durability.MEMORY)
    note(ledger, 0, 2)
    assert not ledger.is_behind
    ledger.take()
    note(ledger, 2)
    assert ledger.is_behind
    assert ledger.is_awaited, "not even memory is promised at will"
    ledger.reach(1)
    assert (ledger.held_bytes, ledger.is_behind) == (5, False)


def test_a_failure_is_over_when_something_is_reached() -> None:
    ledger = CommitLog()
    note(ledger, 0)
    ledger.take()
    ledger.failure = (Reason.DISK_FULL, "no space")
    assert ledger.is_behind
    ledger.reach(1)
    assert (ledger.failure, ledger.is_behind) == (None, False)


def test_elsewhere_a_class_waits_for_no_other() -> None:
    ledger = CommitLog(elsewhere=True)
    ledger.note(1, 0, 1, b"frame", "", 5.0)
    assert ledger.take() is not None
    ledger.note(2, 0, 1, b"frame", "", 5.0)
    assert ledger.take() is not None
    ledger.note(1, 1, 1, b"frame", "", 5.0)
    assert ledger.take() is not None
    ledger.reach_in(2, 3)
    assert (ledger.reached, ledger.held_bytes) == (0, 10)
    owed = {1: 3, 2: 2}
    assert not ledger.has_reached(3, owed)
    assert owed == {1: 3, 2: 2}  # It was not asked for further than it takes.
    assert ledger.has_reached(3, {2: 2})
    ledger.reach_in(1, 1)
    assert ledger.has_reached(2, owed)
    assert not ledger.has_reached(3, owed)
    ledger.reach(3)
    assert ledger.has_reached(3, owed)
    assert (ledger.safe(1, 2), ledger.safe(2, 1), ledger.held_bytes) == (2, 1, 0)


def test_elsewhere_no_durable_is_kept_so_none_is_waited_for() -> None:
    ledger = CommitLog(elsewhere=True)
    assert ledger.change(1, "d", "") == 0
    assert ledger.is_empty


def test_a_journal_is_one_way_for_all_classes() -> None:
    ledger = CommitLog()
    note(ledger, 0)
    assert not ledger.has_reached(1, {})
