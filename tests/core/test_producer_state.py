"""Who publishes under a name, and what is remembered of it."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from simplebus.core.errors import Reason, RemoteProtocolError
from simplebus.core.limits import (
    PRODUCER_BITMAPS_BYTES_MAX,
    PRODUCER_STATE_SECONDS,
    PRODUCER_STATES_MAX,
)
from simplebus.core.producer_state import NumberBitmap, ProducerState, ProducerStates
from tests.support.oracles import ID_COUNT


def left(
    publishers: ProducerStates, name: str, ahead: NumberBitmap | None, now: float = 0.0
) -> ProducerState:
    """One that came, had number 7 stored, and went."""
    publisher = publishers.claim_name(name, "", 1).producer
    publishers.set_progress(publisher, 8, ahead)
    publishers.mark_disconnected(publisher, now)
    return publisher


def test_a_name_is_taken_over_by_the_same_program_alone() -> None:
    publishers = ProducerStates()
    publisher, *rest = publishers.claim_name("a", "i", 1)
    assert rest == [None, False, False]
    assert publishers.claim_name("a", "i", 2) == (publisher, 1, True, False)
    for instance in ("j", ""):
        with pytest.raises(RemoteProtocolError) as caught:
            publishers.claim_name("a", instance, 3)
        assert caught.value.reason is Reason.NAME_IN_USE
    publishers.mark_disconnected(publisher, 0.0)
    assert publishers.claim_name("a", "j", 4) == (publisher, None, True, True)


def test_who_is_there_is_not_forgotten() -> None:
    publishers = ProducerStates()
    publishers.claim_name("there", "", 1)
    gone = publishers.claim_name("gone", "", 2).producer
    publishers.mark_disconnected(gone, 0.0)
    publishers.expire(PRODUCER_STATE_SECONDS - 1)
    assert len(publishers) == 2
    publishers.expire(PRODUCER_STATE_SECONDS)
    assert publishers.claim_name("gone", "", 2).producer is not gone
    assert len(publishers) == 2


def test_of_too_many_the_one_that_is_gone_longest_is_forgotten() -> None:
    publishers = ProducerStates()
    for number in range(PRODUCER_STATES_MAX + 3):
        publisher = publishers.claim_name(f"{number}", "", number).producer
        publisher.next_number = 7
        publishers.mark_disconnected(publisher, 0.0)
    publishers.expire(1.0)
    assert len(publishers) == PRODUCER_STATES_MAX
    assert [publishers.claim_name(f"{n}", "", 1).producer.next_number for n in (0, 2, 3)] == [
        0,
        0,
        7,
    ]


def test_of_too_many_those_are_forgotten_of_whom_there_are_most() -> None:
    """Who makes up names has nobody else's forgotten."""
    publishers = ProducerStates()
    for user, count in (("ann", 3), ("bob", PRODUCER_STATES_MAX - 1), ("cid", 3)):
        for number in range(count):
            claim = publishers.claim_name(f"{number}", "", number, user=user)
            publishers.mark_disconnected(claim.producer, 0.0)
    publishers.expire(1.0)
    left = Counter(each.user for each in publishers)
    assert left == {"ann": 3, "bob": PRODUCER_STATES_MAX - 6, "cid": 3}
    assert not publishers.claim_name("4", "", 1, user="bob").is_known
    publishers.expire(PRODUCER_STATE_SECONDS)
    assert [each.user for each in publishers] == ["bob"]
    assert not publishers._gone_of


def test_a_name_is_its_user_s() -> None:
    publishers = ProducerStates()
    found = [
        publishers.claim_name(name, "", 1, user=user).producer
        for user, name in (("ann", "a"), ("bob", "a"), ("", "a"), ("", "ann\0a"), ("", "\0a"))
    ]
    assert len(publishers) == len({each.key for each in found}) == 5
    assert [each.user for each in found] == ["ann", "bob", "", "", ""]
    for each in found:
        again = ProducerStates()
        again.restore(each.key, 7, None, 0.0)
        assert again.claim_name(each.name, "", 1, user=each.user).producer.next_number == 7
        assert next(iter(again)).name == each.name


def test_who_has_left_and_come_again_is_gone_from_then_on() -> None:
    publishers = ProducerStates()
    left(publishers, "first", None, 0.0)
    left(publishers, "second", None, 1.0)
    left(publishers, "first", None, 2.0)
    publishers.expire(PRODUCER_STATE_SECONDS + 1)
    assert len(publishers) == 1
    assert publishers.claim_name("first", "", 1).producer.next_number == 8


def test_numbers_that_are_ahead_are_forgotten_alone_when_they_are_too_many() -> None:
    quarter = NumberBitmap(8, np.ones(8 * PRODUCER_BITMAPS_BYTES_MAX // 4, np.bool_))
    publishers = ProducerStates()
    there = [left(publishers, "plain", None)]
    there += [left(publishers, f"{number}", quarter) for number in range(6)]
    publishers.expire(1.0)
    assert [publisher.next_number for publisher in there] == [8] * 7
    assert [publisher.stored_ahead for publisher in there] == [None] * 3 + [quarter] * 4
    left(publishers, "3", None)
    left(publishers, "6", quarter)
    assert [publisher.stored_ahead for publisher in there[3:]] == [quarter, None, quarter, quarter]


def test_who_is_forgotten_leaves_no_numbers_that_count() -> None:
    publishers = ProducerStates()
    for number in range(100):
        left(publishers, f"{number}", NumberBitmap(8, np.ones(80, np.bool_)), float(number))
        publishers.expire(number + PRODUCER_STATE_SECONDS)
    assert (len(publishers), publishers._ahead, publishers._ahead_bytes) == (0, {}, 0)


@given(
    st.lists(st.booleans(), max_size=40),
    st.sampled_from([0, 5, ID_COUNT - 20, ID_COUNT - 1]),
    st.lists(st.integers(0, ID_COUNT - 1) | st.integers(0, 70), max_size=40),
)
def test_numbers_that_are_ahead_are_found_like_in_a_set(
    flags: list[bool], first: int, asked: list[int]
) -> None:
    flags.append(True)
    expected = {(first + k) % ID_COUNT for k, is_stored in enumerate(flags) if is_stored}
    ahead = NumberBitmap(first, np.array(flags))
    asked += [(first + k - 3) % ID_COUNT for k in range(50)]
    found = ahead.contains(np.array(asked, np.int64))
    assert found.tolist() == [number in expected for number in asked]
    assert ahead.end == (first + len(flags)) % ID_COUNT
    assert ahead.size == (len(flags) + 7) // 8
