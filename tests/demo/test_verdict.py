"""Verdict of the demo: accepted and rejected histories."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simplebus.demo.records import CORRUPT, receipts
from simplebus.demo.verdict import DemoVerdict, SubscriberRun, evaluate_runs, format_verdict

SENT = 20


def receipt_rows(
    numbers: Iterable[int], *, class_id: int = 1, is_redelivered: bool = False
) -> list[tuple]:
    """Return receipt rows as a subscriber writes them."""
    return [(class_id, is_redelivered, number, number) for number in numbers]


def subscriber_run(
    rows: list[tuple], *, name: str = "first", was_killed: bool = False, **due: int
) -> SubscriberRun:
    """Return a run; class 1 is due from message 0 unless `c1=N` is given."""
    first_due = {int(key.removeprefix("c")): first for key, first in due.items()} or {1: 0}
    return SubscriberRun(name, first_due, receipts(rows), was_killed=was_killed)


def verdict_of(
    *runs: SubscriberRun,
    redelivered_by_server: int = SENT,
    withholding: tuple[str, ...] = (),
    sent: int = SENT,
) -> DemoVerdict:
    classes = {class_id: sent for run in runs for class_id in run.first_due}
    return evaluate_runs(
        sent=classes,
        runs=runs,
        redelivered_by_server=dict.fromkeys(classes, redelivered_by_server),
        withholding=withholding,
    )


def test_everything_once_and_in_order_passes() -> None:
    verdict = verdict_of(subscriber_run(receipt_rows(range(SENT))))
    assert verdict.has_passed
    assert (verdict.lost, verdict.duplicates) == (0, 0)
    assert "PASSED" in format_verdict(verdict)[-1]


def test_marked_redeliveries_pass_and_are_counted() -> None:
    rows = (
        receipt_rows(range(10))
        + receipt_rows([3, 4], is_redelivered=True)
        + receipt_rows(range(10, SENT))
    )
    verdict = verdict_of(subscriber_run(rows), withholding=("first",))
    assert verdict.has_passed
    assert verdict.duplicates == 2


def test_unacked_messages_of_killed_process_may_repeat() -> None:
    killed = subscriber_run(receipt_rows(range(12)), was_killed=True)
    verdict = verdict_of(killed, subscriber_run(receipt_rows(range(8, SENT)), c1=8))
    assert verdict.has_passed
    assert verdict.duplicates == 4


def test_shared_class_is_not_due_while_absent() -> None:
    second = [
        subscriber_run(receipt_rows(range(6)), name="second", was_killed=True),
        subscriber_run(receipt_rows(range(15, SENT)), name="second", c1=15),
    ]
    verdict = verdict_of(subscriber_run(receipt_rows(range(SENT))), *second)
    assert verdict.has_passed
    assert [account.due for account in verdict.accounts] == [SENT, 6 + SENT - 15]


@given(st.integers(0, SENT), st.integers(0, SENT), st.data())
def test_any_correct_history_passes(killed_at: int, acked: int, data: st.DataObject) -> None:
    """Any number of messages is acknowledged at the kill, and any message is redelivered."""
    acked = min(acked, killed_at)
    rows = receipt_rows(range(acked, SENT))
    places = st.integers(min_value=1, max_value=max(1, len(rows)))
    for at in data.draw(st.lists(places, max_size=5 if rows else 0)):
        seen = data.draw(st.sampled_from(rows[:at]))
        rows.insert(at, (seen[0], True, *seen[2:]))
    assert verdict_of(
        subscriber_run(receipt_rows(range(killed_at)), was_killed=True),
        subscriber_run(rows, c1=acked),
    ).has_passed


LOST = [*range(7), *range(8, SENT)]
REORDERED = [0, 1, 2, 4, 3, *range(5, SENT)]


@pytest.mark.parametrize(
    ("runs", "expected"),
    [
        ([subscriber_run(receipt_rows(LOST))], "message 7 of class 1 never arrived at first"),
        (
            [subscriber_run(receipt_rows(range(SENT - 3)))],
            "message 17 of class 1 never arrived at first (and 2 more",
        ),
        ([subscriber_run([])], "message 0 of class 1 never arrived at first (and 19 more"),
        (
            [subscriber_run(receipt_rows(REORDERED))],
            "message 3 of class 1 to first arrived after message 4",
        ),
        (
            [
                subscriber_run(
                    receipt_rows(range(5)) + receipt_rows([4]) + receipt_rows(range(5, SENT))
                )
            ],
            "message 4 of class 1 to first arrived twice, not marked",
        ),
        (
            [
                subscriber_run(
                    receipt_rows([0, 1, 3])
                    + receipt_rows([2], is_redelivered=True)
                    + receipt_rows(range(4, SENT))
                )
            ],
            "message 2 of class 1 to first arrived after message 3, out of order",
        ),
        (
            [subscriber_run([*receipt_rows(range(SENT)), (1, False, CORRUPT, 5)])],
            "1 message to first: the payload was not published",
        ),
        (
            [subscriber_run([*receipt_rows(range(SENT - 1)), (1, False, 19, 18)])],
            "message 19 of class 1 to first has the wrong id 18",
        ),
        (
            [subscriber_run(receipt_rows(range(SENT + 1)))],
            "message 20 of class 1 to first arrived, but was not published",
        ),
        (
            [subscriber_run(receipt_rows(range(SENT)), c1=4)],
            "arrived, but the subscription starts at 4",
        ),
        (
            [subscriber_run(receipt_rows(range(SENT)) + receipt_rows([0], class_id=9))],
            "class 9 without subscribing to it",
        ),
        (
            [subscriber_run(receipt_rows(range(SENT)), was_killed=True)],
            "first was killed and not restarted",
        ),
        (
            [
                subscriber_run(receipt_rows(range(6)), was_killed=True),
                subscriber_run(receipt_rows(range(9, SENT)), c1=9),
            ],
            "message 6 of class 1 never arrived at first (and 2 more",
        ),
        (
            [
                subscriber_run(receipt_rows([0, 2]), was_killed=True),
                subscriber_run(receipt_rows(range(3, SENT)), c1=3),
            ],
            "message 1 of class 1 never arrived at first",
        ),
    ],
)
def test_faults_are_reported(runs: list[SubscriberRun], expected: str) -> None:
    verdict = verdict_of(*runs)
    assert not verdict.has_passed
    assert expected in "\n".join(verdict.faults)
    assert format_verdict(verdict)[-1] == "FAILED."


def test_redelivery_mark_needs_server_redelivery() -> None:
    rows = receipt_rows(range(SENT)) + receipt_rows([3, 4], is_redelivered=True)
    verdict = verdict_of(subscriber_run(rows), redelivered_by_server=1)
    assert verdict.faults == ("2 redeliveries of class 1 arrived, but the server counted only 1",)


def test_withholding_subscriber_needs_redelivery() -> None:
    verdict = verdict_of(subscriber_run(receipt_rows(range(SENT))), withholding=("first",))
    assert verdict.faults == ("first left messages unacknowledged and got no redelivery",)


def test_lost_messages_are_counted_per_subscriber() -> None:
    verdict = verdict_of(
        subscriber_run(receipt_rows(LOST)), subscriber_run(receipt_rows(LOST[:-1]), name="second")
    )
    assert [account.lost for account in verdict.accounts] == [1, 2]
    assert verdict.lost == 3
