"""Tests of waiters for confirms, and of the refusals that they claim."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simplebus.client.pending_confirms import PendingConfirms, group_refusals
from simplebus.core.errors import RefusedError


def refusal(position: int) -> RefusedError:
    return RefusedError("unknown_class", f"of {position}")


def error_texts(errors: list[RefusedError]) -> list[str]:
    return [error.sentence for error in errors]


def test_confirm_finishes_covered_waiters_in_order() -> None:
    confirms, finished = PendingConfirms(), []
    for position in range(5):
        confirms.add_waiter(position, position, lambda position=position: finished.append(position))
    confirms.update(3, {})
    assert finished == [0, 1, 2]
    assert confirms.has_waiters
    confirms.update(5, {})
    assert finished == [0, 1, 2, 3, 4]
    assert not confirms.has_waiters


def test_waiter_of_many_positions_is_done_after_the_last() -> None:
    confirms = PendingConfirms()
    waiter = confirms.add_waiter(10, 19, lambda: None)
    confirms.update(19, {})
    assert not waiter.is_done
    confirms.update(20, {})
    assert waiter.is_done


def test_refusal_goes_to_the_waiter_of_its_position() -> None:
    confirms = PendingConfirms()
    first_waiter = confirms.add_waiter(0, 0, lambda: None)
    second_waiter = confirms.add_waiter(1, 9, lambda: None)
    confirms.update(1, {0: refusal(0), 7: refusal(7), 4: refusal(4)})
    confirms.update(10, {9: refusal(9)})
    assert error_texts(first_waiter.refusals) == ["of 0"]
    assert error_texts(second_waiter.refusals) == ["of 4", "of 7", "of 9"]
    assert confirms.pop_unclaimed() is None


def test_refusal_without_waiter_is_kept() -> None:
    confirms = PendingConfirms()
    flush = confirms.add_waiter(5, 4, lambda: None)
    confirms.update(5, {3: refusal(3)})
    assert flush.is_done
    assert not flush.refusals
    with pytest.raises(ExceptionGroup, match="the server refused 1 message") as caught:
        raise confirms.pop_unclaimed() or AssertionError
    assert error_texts(list(caught.value.exceptions)) == ["of 3"]
    assert confirms.pop_unclaimed() is None


def test_cancelled_waiter_claims_no_refusals() -> None:
    confirms = PendingConfirms()
    first = confirms.add_waiter(0, 0, lambda: None)
    second = confirms.add_waiter(1, 1, lambda: None)
    confirms.cancel(first)
    confirms.update(2, {0: refusal(0), 1: refusal(1)})
    assert not first.refusals
    confirms.cancel(second)  # Cancelled at the moment of its completion.
    found = confirms.pop_unclaimed()
    assert found is not None
    assert error_texts(list(found.exceptions)) == ["of 0", "of 1"]


def test_unclaimed_refusals_are_bounded_and_counted() -> None:
    confirms = PendingConfirms()
    confirms.update(1000, {position: refusal(position) for position in range(1000)})
    found = confirms.pop_unclaimed()
    assert found is not None
    assert str(found).startswith("the server refused 1000 messages")
    assert error_texts(list(found.exceptions)) == [f"of {position}" for position in range(100)]
    assert str(group_refusals([refusal(1)])).startswith("the server refused 1 message ")


def test_wake_all_calls_every_waiter() -> None:
    confirms, finished = PendingConfirms(), []
    waiters = [confirms.add_waiter(n, n, lambda: finished.append(1)) for n in range(3)]
    confirms.wake_all()
    assert len(finished) == 3
    assert not any(waiter.is_done for waiter in waiters)


@given(
    st.lists(st.integers(1, 4), max_size=12),
    st.lists(st.integers(1, 6), max_size=12),
    st.sets(st.integers(0, 40)),
    st.data(),
)
def test_every_refusal_is_reported_once(
    sizes: list[int], steps: list[int], refused: set[int], data: st.DataObject
) -> None:
    """A refusal is reported to the waiter of its position, or else by the next flush."""
    confirms = PendingConfirms()
    total = sum(sizes)
    waiters, next_position = [], 0
    for size in sizes:
        if data.draw(st.booleans()):
            waiters.append(
                confirms.add_waiter(next_position, next_position + size - 1, lambda: None)
            )
        next_position += size
    refused = {position for position in refused if position < total}
    confirmed = 0
    while confirmed < total:
        confirmed_before = confirmed
        confirmed = min(confirmed + (steps.pop() if steps else total), total)
        new_refusals = {p: refusal(p) for p in refused if confirmed_before <= p < confirmed}
        confirms.update(confirmed, new_refusals)
    reported = [error_text for waiter in waiters for error_text in error_texts(waiter.refusals)]
    for waiter in waiters:
        expected = sorted(p for p in refused if waiter.first <= p <= waiter.last)
        assert error_texts(waiter.refusals) == [f"of {p}" for p in expected]
    unclaimed = confirms.pop_unclaimed()
    reported += error_texts(list(unclaimed.exceptions)) if unclaimed else []
    assert sorted(reported) == sorted(f"of {p}" for p in refused)
