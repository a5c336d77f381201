"""The verdict of the demo: what it accepts, and above all what it does not."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simplebus.demo.records import CORRUPT, receipts
from simplebus.demo.verdict import SubscriberRun, DemoVerdict, evaluate_runs, format_verdict

SENT = 20


def notes(numbers: Iterable[int], *, class_id: int = 1, again: bool = False) -> list[tuple]:
    """Receipts as a subscriber would write them down."""
    return [(class_id, again, number, number) for number in numbers]


def life(
    rows: list[tuple], *, name: str = "first", killed: bool = False, **due: int
) -> SubscriberRun:
    """A life of a subscriber that is due class 1 from message 0 on, or what `c1=…` says."""
    first_due = {int(key.removeprefix("c")): first for key, first in due.items()} or {1: 0}
    return SubscriberRun(name, first_due, receipts(rows), was_killed=killed)


def verdict_of(
    *runs: SubscriberRun,
    redelivered_by_server: int = SENT,
    withholding: tuple[str, ...] = (),
    sent: int = SENT,
) -> DemoVerdict:
    classes = {class_id: sent for one in runs for class_id in one.first_due}
    return evaluate_runs(
        sent=classes,
        runs=runs,
        redelivered_by_server=dict.fromkeys(classes, redelivered_by_server),
        withholding=withholding,
    )


def test_everything_once_and_in_order_passes() -> None:
    verdict = verdict_of(life(notes(range(SENT))))
    assert verdict.has_passed
    assert (verdict.lost, verdict.duplicates) == (0, 0)
    assert "PASSED" in format_verdict(verdict)[-1]


def test_marked_redeliveries_pass_and_are_counted() -> None:
    rows = notes(range(10)) + notes([3, 4], again=True) + notes(range(10, SENT))
    verdict = verdict_of(life(rows), withholding=("first",))
    assert verdict.has_passed
    assert verdict.duplicates == 2


def test_what_a_killed_process_left_may_come_again_to_the_next() -> None:
    killed = life(notes(range(12)), was_killed=True)
    verdict = verdict_of(killed, life(notes(range(8, SENT)), c1=8))
    assert verdict.has_passed
    assert verdict.duplicates == 4


def test_what_others_hold_is_not_due_to_somebody_who_was_away() -> None:
    second = [
        life(notes(range(6)), name="second", was_killed=True),
        life(notes(range(15, SENT)), name="second", c1=15),
    ]
    verdict = verdict_of(life(notes(range(SENT))), *second)
    assert verdict.has_passed
    assert [account.due for account in verdict.accounts] == [SENT, 6 + SENT - 15]


@given(st.integers(0, SENT), st.integers(0, SENT), st.data())
def test_any_honest_history_passes(killed_at: int, acked: int, data: st.DataObject) -> None:
    """Whatever is acknowledged at the kill, and whatever comes again between other messages."""
    acked = min(acked, killed_at)
    rows = notes(range(acked, SENT))
    places = st.integers(min_value=1, max_value=max(1, len(rows)))
    for at in data.draw(st.lists(places, max_size=5 if rows else 0)):
        seen = data.draw(st.sampled_from(rows[:at]))
        rows.insert(at, (seen[0], True, *seen[2:]))
    assert verdict_of(
        life(notes(range(killed_at)), was_killed=True), life(rows, c1=acked)
    ).has_passed


LOST = [*range(7), *range(8, SENT)]
REORDERED = [0, 1, 2, 4, 3, *range(5, SENT)]


@pytest.mark.parametrize(
    ("lives", "says"),
    [
        ([life(notes(LOST))], "message 7 of class 1 never came to first"),
        ([life(notes(range(SENT - 3)))], "message 17 of class 1 never came to first (and 2 more"),
        ([life([])], "message 0 of class 1 never came to first (and 19 more"),
        ([life(notes(REORDERED))], "message 3 of class 1 to first came after message 4"),
        (
            [life(notes(range(5)) + notes([4]) + notes(range(5, SENT)))],
            "message 4 of class 1 to first came twice, not marked",
        ),
        (
            [life(notes([0, 1, 3]) + notes([2], again=True) + notes(range(4, SENT)))],
            "message 2 of class 1 to first came after message 3, out of order",
        ),
        (
            [life([*notes(range(SENT)), (1, False, CORRUPT, 5)])],
            "first got 1 messages with a content",
        ),
        (
            [life([*notes(range(SENT - 1)), (1, False, 19, 18)])],
            "message 19 of class 1 under the id 18",
        ),
        ([life(notes(range(SENT + 1)))], "message 20 of class 1 to first came, but was never sent"),
        ([life(notes(range(SENT)), c1=4)], "came although its subscription began at 4"),
        ([life(notes(range(SENT)) + notes([0], class_id=9))], "class 9, which it never asked for"),
        ([life(notes(range(SENT)), was_killed=True)], "first was killed and did not come back"),
        (
            [life(notes(range(6)), was_killed=True), life(notes(range(9, SENT)), c1=9)],
            "message 6 of class 1 never came to first (and 2 more",
        ),
        (
            [life(notes([0, 2]), was_killed=True), life(notes(range(3, SENT)), c1=3)],
            "message 1 of class 1 never came to first",
        ),
    ],
)
def test_what_is_wrong_fails_and_is_said(runs: list[SubscriberRun], says: str) -> None:
    verdict = verdict_of(*runs)
    assert not verdict.has_passed
    assert says in "\n".join(verdict.faults)
    assert format_verdict(verdict)[-1] == "FAILED."


def test_a_mark_that_the_bus_knows_nothing_of_excuses_nothing() -> None:
    rows = notes(range(SENT)) + notes([3, 4], again=True)
    verdict = verdict_of(life(rows), redelivered_by_server=1)
    assert verdict.faults == ("2 messages of class 1 came again, but the bus sent only 1 again",)


def test_a_subscriber_that_withheld_must_have_been_sent_something_again() -> None:
    verdict = verdict_of(life(notes(range(SENT))), withholding=("first",))
    assert verdict.faults == ("first left messages unacknowledged and was sent none of them again",)


def test_lost_messages_are_counted_per_subscriber() -> None:
    verdict = verdict_of(life(notes(LOST)), life(notes(LOST[:-1]), name="second"))
    assert [account.lost for account in verdict.accounts] == [1, 2]
    assert verdict.lost == 3
