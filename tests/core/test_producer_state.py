"""Producer states: claiming names, expiry, and stored numbers."""

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


def add_disconnected(
    states: ProducerStates, name: str, ahead: NumberBitmap | None, now: float = 0.0
) -> ProducerState:
    """Add the state of a producer that stored number 7 and disconnected."""
    producer = states.claim_name(name, "", 1).producer
    states.set_progress(producer, 8, ahead)
    states.mark_disconnected(producer, now)
    return producer


def test_name_is_taken_over_by_the_same_instance_only() -> None:
    states = ProducerStates()
    producer, *other_results = states.claim_name("a", "i", 1)
    assert other_results == [None, False, False]
    assert states.claim_name("a", "i", 2) == (producer, 1, True, False)
    for instance in ("j", ""):
        with pytest.raises(RemoteProtocolError) as caught:
            states.claim_name("a", instance, 3)
        assert caught.value.reason is Reason.NAME_IN_USE
    states.mark_disconnected(producer, 0.0)
    assert states.claim_name("a", "j", 4) == (producer, None, True, True)


def test_connected_publisher_does_not_expire() -> None:
    states = ProducerStates()
    states.claim_name("there", "", 1)
    disconnected = states.claim_name("gone", "", 2).producer
    states.mark_disconnected(disconnected, 0.0)
    states.expire(PRODUCER_STATE_SECONDS - 1)
    assert len(states) == 2
    states.expire(PRODUCER_STATE_SECONDS)
    assert states.claim_name("gone", "", 2).producer is not disconnected
    assert len(states) == 2


def test_excess_states_expire_oldest_first() -> None:
    states = ProducerStates()
    for number in range(PRODUCER_STATES_MAX + 3):
        producer = states.claim_name(f"{number}", "", number).producer
        producer.next_number = 7
        states.mark_disconnected(producer, 0.0)
    states.expire(1.0)
    assert len(states) == PRODUCER_STATES_MAX
    assert [states.claim_name(f"{n}", "", 1).producer.next_number for n in (0, 2, 3)] == [
        0,
        0,
        7,
    ]


def test_excess_states_expire_of_the_user_with_most_names() -> None:
    states = ProducerStates()
    for user, count in (("ann", 3), ("bob", PRODUCER_STATES_MAX - 1), ("cid", 3)):
        for number in range(count):
            claim = states.claim_name(f"{number}", "", number, user=user)
            states.mark_disconnected(claim.producer, 0.0)
    states.expire(1.0)
    names_by_user = Counter(state.user for state in states)
    assert names_by_user == {"ann": 3, "bob": PRODUCER_STATES_MAX - 6, "cid": 3}
    assert not states.claim_name("4", "", 1, user="bob").is_known
    states.expire(PRODUCER_STATE_SECONDS)
    assert [state.user for state in states] == ["bob"]
    assert not states._disconnected_by_owner


def test_excess_states_expire_of_the_address_with_most_names() -> None:
    states = ProducerStates()
    for address, count in (("10.0.0.1", 3), ("10.0.0.2", PRODUCER_STATES_MAX)):
        for number in range(count):
            claim = states.claim_name(f"{address} {number}", "", number, address=address)
            states.mark_disconnected(claim.producer, 0.0)
    states.expire(1.0)
    assert Counter(state.address for state in states) == {
        "10.0.0.1": 3,
        "10.0.0.2": PRODUCER_STATES_MAX - 3,
    }


def test_users_have_separate_names() -> None:
    states = ProducerStates()
    contained = [
        states.claim_name(name, "", 1, user=user).producer
        for user, name in (("ann", "a"), ("bob", "a"), ("", "a"), ("", "ann\0a"), ("", "\0a"))
    ]
    assert len(states) == len({each.key for each in contained}) == 5
    assert [each.user for each in contained] == ["ann", "bob", "", "", ""]
    for each in contained:
        restored = ProducerStates()
        restored.restore(each.key, 7, None, 0.0)
        assert restored.claim_name(each.name, "", 1, user=each.user).producer.next_number == 7
        assert next(iter(restored)).name == each.name


def test_expiry_counts_from_the_last_disconnect() -> None:
    states = ProducerStates()
    add_disconnected(states, "first", None, 0.0)
    add_disconnected(states, "second", None, 1.0)
    add_disconnected(states, "first", None, 2.0)
    states.expire(PRODUCER_STATE_SECONDS + 1)
    assert len(states) == 1
    assert states.claim_name("first", "", 1).producer.next_number == 8


def test_excess_bitmaps_are_dropped_without_their_states() -> None:
    quarter = NumberBitmap(8, np.ones(8 * PRODUCER_BITMAPS_BYTES_MAX // 4, np.bool_))
    states = ProducerStates()
    all_states = [add_disconnected(states, "plain", None)]
    all_states += [add_disconnected(states, f"{number}", quarter) for number in range(6)]
    states.expire(1.0)
    assert [producer.next_number for producer in all_states] == [8] * 7
    assert [producer.stored_ahead for producer in all_states] == [None] * 3 + [quarter] * 4
    add_disconnected(states, "3", None)
    add_disconnected(states, "6", quarter)
    assert [producer.stored_ahead for producer in all_states[3:]] == [
        quarter,
        None,
        quarter,
        quarter,
    ]


def test_expired_states_release_their_bitmaps() -> None:
    states = ProducerStates()
    for number in range(100):
        add_disconnected(states, f"{number}", NumberBitmap(8, np.ones(80, np.bool_)), float(number))
        states.expire(number + PRODUCER_STATE_SECONDS)
    assert (len(states), states._bitmap_bytes, states._total_bitmap_bytes) == (0, {}, 0)


@given(
    st.lists(st.booleans(), max_size=40),
    st.sampled_from([0, 5, ID_COUNT - 20, ID_COUNT - 1]),
    st.lists(st.integers(0, ID_COUNT - 1) | st.integers(0, 70), max_size=40),
)
def test_bitmap_contains_the_same_numbers_as_a_set(
    flags: list[bool], first: int, numbers: list[int]
) -> None:
    flags.append(True)
    expected = {(first + k) % ID_COUNT for k, is_stored in enumerate(flags) if is_stored}
    ahead = NumberBitmap(first, np.array(flags))
    numbers += [(first + k - 3) % ID_COUNT for k in range(50)]
    contained = ahead.contains(np.array(numbers, np.int64))
    assert contained.tolist() == [number in expected for number in numbers]
    assert ahead.end == (first + len(flags)) % ID_COUNT
    assert ahead.size_bytes == (len(flags) + 7) // 8
