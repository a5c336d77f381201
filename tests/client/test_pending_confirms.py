"""Who is woken by a confirm, and who is told of a refusal."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simplebus.client.pending_confirms import PendingConfirms, group_refusals
from simplebus.core.errors import RefusedError


def no(position: int) -> RefusedError:
    return RefusedError("unknown_class", f"of {position}")


def sentences(errors: list[RefusedError]) -> list[str]:
    return [error.sentence for error in errors]


def test_a_confirm_wakes_those_whom_it_covers_in_order() -> None:
    confirms, woken = PendingConfirms(), []
    for position in range(5):
        confirms.add_waiter(position, position, lambda position=position: woken.append(position))
    confirms.update(3, {})
    assert woken == [0, 1, 2]
    assert confirms.has_waiters
    confirms.update(5, {})
    assert woken == [0, 1, 2, 3, 4]
    assert not confirms.has_waiters


def test_many_are_through_when_the_last_of_them_is() -> None:
    confirms = PendingConfirms()
    waiter = confirms.add_waiter(10, 19, lambda: None)
    confirms.update(19, {})
    assert not waiter.is_done
    confirms.update(20, {})
    assert waiter.is_done


def test_a_refusal_goes_to_who_waits_for_it() -> None:
    confirms = PendingConfirms()
    alone = confirms.add_waiter(0, 0, lambda: None)
    many = confirms.add_waiter(1, 9, lambda: None)
    confirms.update(1, {0: no(0), 7: no(7), 4: no(4)})
    confirms.update(10, {9: no(9)})
    assert sentences(alone.refusals) == ["of 0"]
    assert sentences(many.refusals) == ["of 4", "of 7", "of 9"]
    assert confirms.pop_unclaimed() is None


def test_a_refusal_that_is_nobody_s_is_kept_for_the_next_who_asks() -> None:
    confirms = PendingConfirms()
    flush = confirms.add_waiter(5, 4, lambda: None)
    confirms.update(5, {3: no(3)})
    assert flush.is_done
    assert not flush.refusals
    with pytest.raises(ExceptionGroup, match="the bus refused 1 message") as caught:
        raise confirms.pop_unclaimed() or AssertionError
    assert sentences(list(caught.value.exceptions)) == ["of 3"]
    assert confirms.pop_unclaimed() is None


def test_who_has_left_claims_nothing() -> None:
    confirms = PendingConfirms()
    first = confirms.add_waiter(0, 0, lambda: None)
    second = confirms.add_waiter(1, 1, lambda: None)
    confirms.cancel(first)
    confirms.update(2, {0: no(0), 1: no(1)})
    assert not first.refusals
    confirms.cancel(second)  # Cancelled in the moment in which it was woken.
    found = confirms.pop_unclaimed()
    assert found is not None
    assert sentences(list(found.exceptions)) == ["of 0", "of 1"]


def test_unclaimed_refusals_are_bounded_and_counted() -> None:
    confirms = PendingConfirms()
    confirms.update(1000, {position: no(position) for position in range(1000)})
    found = confirms.pop_unclaimed()
    assert found is not None
    assert str(found).startswith("the bus refused 1000 messages")
    assert sentences(list(found.exceptions)) == [f"of {position}" for position in range(100)]
    assert str(group_refusals([no(1)])).startswith("the bus refused 1 message ")


def test_all_are_woken_when_the_bus_is_gone() -> None:
    confirms, woken = PendingConfirms(), []
    waiters = [confirms.add_waiter(n, n, lambda: woken.append(1)) for n in range(3)]
    confirms.wake_all()
    assert len(woken) == 3
    assert not any(waiter.is_done for waiter in waiters)


@given(
    st.lists(st.integers(1, 4), max_size=12),
    st.lists(st.integers(1, 6), max_size=12),
    st.sets(st.integers(0, 40)),
    st.data(),
)
def test_every_refusal_is_told_once(
    sizes: list[int], steps: list[int], refused: set[int], data: st.DataObject
) -> None:
    """Whoever waits for it, or, when nobody does, whoever flushes."""
    confirms = PendingConfirms()
    total = sum(sizes)
    waiters, at = [], 0
    for size in sizes:
        if data.draw(st.booleans()):
            waiters.append(confirms.add_waiter(at, at + size - 1, lambda: None))
        at += size
    refused = {position for position in refused if position < total}
    confirmed = 0
    while confirmed < total:
        before = confirmed
        confirmed = min(confirmed + (steps.pop() if steps else total), total)
        fresh = {p: no(p) for p in refused if before <= p < confirmed}
        confirms.update(confirmed, fresh)
    told = [sentence for waiter in waiters for sentence in sentences(waiter.refused)]
    for waiter in waiters:
        expected = sorted(p for p in refused if waiter.first <= p <= waiter.last)
        assert sentences(waiter.refused) == [f"of {p}" for p in expected]
    left = confirms.pop_unclaimed()
    told += sentences(list(left.exceptions)) if left else []
    assert sorted(told) == sorted(f"of {p}" for p in refused)
