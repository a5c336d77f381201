"""Publishers that come again: a number means one message, and what was refused is told."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from simplebus.core.broker.broker import Broker, FullPolicy, Settings
from simplebus.core.errors import Reason
from simplebus.core.limits import PUBLISHER_REFUSALS_MAX, Limits
from simplebus.core.producer_state import NumberBitmap, ProducerState, ProducerStates
from simplebus.core.protocol.events import Refused
from simplebus.core.protocol.frames import MESSAGE
from tests.behaviour.wire_peer import BrokerHarness
from tests.behaviour.wire_peer_v2 import (
    Version2Peer,
    connect,
    connect_version2,
    publish,
)
from tests.client.core.client_and_broker import Pair


def refused(first: int, count: int = 1, sentence: str = "no") -> Refused:
    return Refused(Reason.DROP_NEWEST, sentence, MESSAGE, 1, first, count)


def bus_that_lost(instance: str) -> Broker:
    """It had confirmed 0, 1 and 2 to this program, has 0 and 2 still, and is asked to go on."""
    broker = Broker(identity="one")
    ahead = NumberBitmap.of(1, np.array([False, True]))
    broker.connection_requests.producer_states.restore("tester", 1, ahead, 0.0, instance=instance)
    return broker


def test_numbers_of_confirmed_messages_that_are_gone_are_not_used_again() -> None:
    pair = Pair(broker=Broker(identity="one"))
    pair.core.publish_many([b"0", b"1", b"2"], 1)
    pair.exchange()
    pair.lose()
    pair.broker = bus_that_lost("one")
    pair.connect()
    pair.core.publish_many([b"new 1", b"new 2", b"new 3"], 1)
    pair.exchange()
    assert pair.statistics().published == 3
    assert pair.core.confirmed_position == 6
    assert pair.core.statistics().forgotten == 1


def test_another_program_goes_on_behind_all_that_the_former_one_has_used() -> None:
    pair = Pair(broker=bus_that_lost("another"))
    pair.core.publish_many([b"new 1", b"new 2", b"new 3"], 1)
    pair.exchange()
    assert pair.statistics().published == 3


def test_who_comes_back_from_another_bus_has_new_numbers() -> None:
    bus = BrokerHarness()
    bus.broker = bus_that_lost("one")
    peer = Version2Peer(bus, bus.broker.open_session())
    peer.send(connect(1, name="tester", instance="one", unconfirmed=2, bus="two"))
    assert peer.receive_replies()[0].content["next"] == 3


@pytest.mark.parametrize("unconfirmed", [5, 1 << 29, 1 << 30, (1 << 31) - 1])
@pytest.mark.parametrize("name", ["new here", "tester"])
def test_where_messages_are_kept_elsewhere_a_program_goes_on_with_its_own_numbers(
    name: str, unconfirmed: int
) -> None:
    """This door knows nothing of it, or that another program had its name."""
    bus = BrokerHarness()
    bus.broker = bus_that_lost("another")
    bus.broker.store.class_registry.dedup_window_seconds = 120.0
    bus.broker.store.class_registry.choose_first_number = lambda now: 77
    peer = Version2Peer(bus, bus.broker.open_session())
    peer.send(connect(name=name, instance="one", unconfirmed=unconfirmed, bus="one"))
    assert peer.receive_replies()[0].content["next"] == unconfirmed
    bus.broker.close_session(peer.session)
    again = Version2Peer(bus, bus.broker.open_session())
    again.send(connect(name=name, instance="one", unconfirmed=unconfirmed, bus="one"))
    assert again.receive_replies()[0].content["next"] == unconfirmed


@pytest.mark.parametrize(("instance", "following"), [("one", 1), (None, 3)])
def test_who_does_not_say_what_was_confirmed_is_told_the_first_that_is_not_stored(
    instance: str | None, following: int
) -> None:
    """Unless it is another program; and one that says nothing of itself is."""
    bus = BrokerHarness()
    bus.broker = bus_that_lost("one")
    peer = Version2Peer(bus, bus.broker.open_session())
    peer.send(connect(1, name="tester", instance=instance))
    assert peer.receive_replies()[0].content["next"] == following


@given(
    st.integers(0, 6),
    st.lists(st.booleans(), max_size=8),
    st.lists(st.tuples(st.integers(0, 20), st.integers(1, 3)), max_size=3),
    st.integers(0, 20),
)
def test_a_number_is_waited_for_unless_it_is_used_up_or_confirmed(
    following: int, flags: list[bool], refusals: list[tuple[int, int]], unconfirmed: int
) -> None:
    used = set(range(following)) | {following + k for k, is_used in enumerate(flags) if is_used}
    known = [
        (first, count) for first, count in refusals if set(range(first, first + count)) <= used
    ]
    publishers = ProducerStates()
    ahead = NumberBitmap.of(following, np.array(flags, np.bool_))
    publishers.restore("a", following, ahead, 0.0, refusals=[refused(*each) for each in known])
    publisher = publishers.claim("a", "", 1).publisher
    lost = publishers.go_on(publisher, unconfirmed)
    assert lost == len(set(range(unconfirmed)) - used)
    unheard = {n for first, count in known for n in range(first, first + count) if n >= unconfirmed}
    assert publisher.next >= unconfirmed
    assert all(publisher.next <= n for n in unheard)
    numbers = np.arange(publisher.next, 40)
    held = publisher.ahead.holds(numbers).tolist() if publisher.ahead else [False] * numbers.size
    assert held == [n in used for n in numbers.tolist()]
    told = {
        n for each in publisher.refusals for n in range(each.refers_to, each.refers_to + each.count)
    }
    assert unheard <= told


def full() -> Settings:
    return Settings(full_policy=FullPolicy.DROP_NEWEST, limits=Limits(class_messages=16))


def test_an_error_that_was_lost_with_its_connection_is_said_again() -> None:
    pair = Pair(full())
    pair.core.publish_many([b"%d" % n for n in range(15)], 1)
    pair.exchange()
    pair.core.publish_many([b"15", b"too much", b"and this"], 1)
    pair.core.publish(b"of another class", 2)
    while pair.say():
        pass
    counted = dict(pair.broker.refusal_counts)
    pair.lose()
    pair.connect()
    pair.exchange()
    assert pair.core.confirmed_position == 19
    assert sorted(pair.core.pop_refusals()) == [16, 17]
    assert (pair.statistics(1).published, pair.statistics(2).published) == (16, 1)
    assert pair.broker.refusal_counts[Reason.DROP_NEWEST] == counted[Reason.DROP_NEWEST] == 2


def test_an_error_that_was_heard_is_not_said_again() -> None:
    pair = Pair(full())
    pair.core.publish_many([b"%d" % n for n in range(18)], 1)
    pair.exchange()
    assert sorted(pair.core.pop_refusals()) == [16, 17]
    pair.lose()
    pair.connect()
    pair.exchange()
    assert pair.core.pop_refusals() == {}
    assert pair.broker.connection_requests.producer_states.program("tester") == "one"
    (publisher,) = pair.broker.connection_requests.producer_states
    assert publisher.refusals == []


def test_who_does_not_say_what_was_confirmed_is_not_told_again() -> None:
    bus = BrokerHarness(full())
    connect_version2(bus, publish(1, 0, *[b"x"] * 18), name="a").disconnect()
    peer = Version2Peer(bus, bus.broker.open_session())
    peer.send(connect(1, name="a"))
    assert peer.receive_replies()[0].content["next"] == 18
    peer.send(publish(1, 15, *[b"x"] * 3))
    error, confirm = peer.receive_replies()
    assert (error.kind, error.message_id, error.content["count"]) == ("error", 16, 2)
    assert (confirm.kind, confirm.message_id) == ("confirm", 18)


def test_refusals_that_are_remembered_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("simplebus.core.producer_state.PUBLISHERS_REFUSALS_MAX", 600)
    publishers = ProducerStates()
    everybody: list[ProducerState] = []
    for session in range(3):
        publisher = publishers.claim(f"{session}", "", session).publisher
        everybody.append(publisher)
        for number in range(PUBLISHER_REFUSALS_MAX + 10):
            publishers.refuse(publisher, refused(2 * number))
    assert [len(each.refusals) for each in everybody] == [0, *[PUBLISHER_REFUSALS_MAX] * 2]
    for number in range(1000, 100_000):
        publishers.refuse(everybody[0], refused(number))
    assert [(each.refers_to, each.count) for each in everybody[0].refusals] == [(1000, 99_000)]
    publishers.leave(everybody[1], 0.0)
    publishers.forget(1e9)
    assert publishers._refusals_count == 1 + PUBLISHER_REFUSALS_MAX
