"""Publishers that reconnect: a number means one message, and refusals are repeated."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from simplebus.core.broker.broker import Broker, FullPolicy, Settings
from simplebus.core.errors import Reason
from simplebus.core.limits import PRODUCER_REFUSALS_MAX, PRODUCER_TAKEOVER_STEP, Limits
from simplebus.core.producer_state import NumberBitmap, ProducerState, ProducerStates
from simplebus.core.protocol.events import FrameRefused
from simplebus.core.protocol.frames import MESSAGE
from tests.behaviour.wire_peer import BrokerHarness
from tests.behaviour.wire_peer_v2 import (
    Version2Peer,
    channel_envelope,
    connect_request,
    connect_version2,
    publish,
    publish_envelopes,
)
from tests.client.core.client_and_broker import ClientAndBroker


def refusal(first: int, count: int = 1, sentence: str = "no") -> FrameRefused:
    return FrameRefused(Reason.DROP_NEWEST, sentence, MESSAGE, 1, first, count)


def create_bus_without_message_1(instance: str) -> Broker:
    """Return a broker that has stored the publisher's messages 0 and 2, but not 1."""
    broker = Broker(identity="one")
    ahead = NumberBitmap.from_flags(1, np.array([False, True]))
    broker.subscription_manager.producer_states.restore("tester", 1, ahead, 0.0, instance=instance)
    return broker


def test_numbers_of_confirmed_messages_are_not_reused() -> None:
    pair = ClientAndBroker(broker=Broker(identity="one"))
    pair.core.publish_many([b"0", b"1", b"2"], 1)
    pair.exchange()
    pair.disconnect()
    pair.broker = create_bus_without_message_1("one")
    pair.connect()
    pair.core.publish_many([b"new 1", b"new 2", b"new 3"], 1)
    pair.exchange()
    assert pair.statistics().published == 3
    assert pair.core.confirmed_position == 6
    assert pair.core.statistics().forgotten == 1


def test_next_instance_continues_after_used_numbers() -> None:
    pair = ClientAndBroker(broker=create_bus_without_message_1("another"))
    pair.core.publish_many([b"new 1", b"new 2", b"new 3"], 1)
    pair.exchange()
    assert pair.statistics().published == 3


@pytest.mark.parametrize(
    ("instance", "following"), [("one", 3 + PRODUCER_TAKEOVER_STEP), ("two", 3)]
)
def test_publisher_from_another_bus_gets_new_numbers(instance: str, following: int) -> None:
    """Message 1 is missing: the same instance must not take it for stored if it comes again."""
    bus = BrokerHarness()
    bus.broker = create_bus_without_message_1("one")
    peer = Version2Peer(bus, bus.broker.open_session())
    peer.send(connect_request(1, name="tester", instance=instance, unconfirmed=2, bus="two"))
    assert peer.receive_replies()[0].content["next"] == following


def test_late_connect_with_another_bus_hides_no_refusal() -> None:
    """A Connect of an earlier session arrives after a later session has published."""
    bus = BrokerHarness()
    late = Version2Peer(bus, bus.broker.open_session())
    peer = Version2Peer(bus, bus.broker.open_session())
    identity: dict[str, object] = {"name": "tester", "instance": "one", "unconfirmed": 0}
    peer.send(connect_request(1, bus="before", **identity))
    bus_id = peer.receive_replies()[0].content["bus"]
    valid_envelope = channel_envelope("orders", b"valid")
    peer.send(publish_envelopes(1, 0, valid_envelope, b"\xff", valid_envelope))
    late.send(connect_request(1, bus="before", **identity))
    assert late.receive_replies()[0].content["next"] == 3
    peer = Version2Peer(bus, bus.broker.open_session())
    peer.send(connect_request(1, bus=bus_id, **identity))
    assert peer.receive_replies()[0].content["next"] == 1


@pytest.mark.parametrize("unconfirmed", [5, 1 << 29, 1 << 30, (1 << 31) - 1])
@pytest.mark.parametrize("name", ["new here", "tester"])
def test_remote_storage_lets_publisher_continue_its_numbers(name: str, unconfirmed: int) -> None:
    """The stateless server has no state of the publisher, or the state of another instance."""
    bus = BrokerHarness()
    bus.broker = create_bus_without_message_1("another")
    bus.broker.store.class_registry.dedup_window_seconds = 120.0
    bus.broker.store.class_registry.choose_first_number = lambda now: 77
    peer = Version2Peer(bus, bus.broker.open_session())
    peer.send(connect_request(name=name, instance="one", unconfirmed=unconfirmed, bus="one"))
    assert peer.receive_replies()[0].content["next"] == unconfirmed
    bus.broker.close_session(peer.session)
    successor = Version2Peer(bus, bus.broker.open_session())
    successor.send(connect_request(name=name, instance="one", unconfirmed=unconfirmed, bus="one"))
    assert successor.receive_replies()[0].content["next"] == unconfirmed


@pytest.mark.parametrize(("instance", "following"), [("one", 1), (None, 3)])
def test_next_is_first_unstored_number_without_unconfirmed_field(
    instance: str | None, following: int
) -> None:
    """A program without an instance counts as another program."""
    bus = BrokerHarness()
    bus.broker = create_bus_without_message_1("one")
    peer = Version2Peer(bus, bus.broker.open_session())
    peer.send(connect_request(1, name="tester", instance=instance))
    assert peer.receive_replies()[0].content["next"] == following


@given(
    st.integers(0, 6),
    st.lists(st.booleans(), max_size=8),
    st.lists(st.tuples(st.integers(0, 20), st.integers(1, 3)), max_size=3),
    st.integers(0, 20),
)
def test_next_skips_used_and_confirmed_numbers(
    following: int, flags: list[bool], refusals: list[tuple[int, int]], unconfirmed: int
) -> None:
    used = set(range(following)) | {following + k for k, is_used in enumerate(flags) if is_used}
    refused_ranges = [
        (first, count) for first, count in refusals if set(range(first, first + count)) <= used
    ]
    publishers = ProducerStates()
    ahead = NumberBitmap.from_flags(following, np.array(flags, np.bool_))
    publishers.restore(
        "a",
        following,
        ahead,
        0.0,
        refusals=[refusal(*refused_range) for refused_range in refused_ranges],
    )
    publisher = publishers.claim_name("a", "", 1).producer
    lost = publishers.resume_at(publisher, unconfirmed)
    assert lost == len(set(range(unconfirmed)) - used)
    unheard = {
        n
        for first, count in refused_ranges
        for n in range(first, first + count)
        if n >= unconfirmed
    }
    assert publisher.next_number >= unconfirmed
    assert all(publisher.next_number <= n for n in unheard)
    numbers = np.arange(publisher.next_number, 40)
    is_stored = (
        publisher.stored_ahead.contains(numbers).tolist()
        if publisher.stored_ahead
        else [False] * numbers.size
    )
    assert is_stored == [n in used for n in numbers.tolist()]
    reported = {
        n for each in publisher.refusals for n in range(each.refers_to, each.refers_to + each.count)
    }
    assert unheard <= reported


def drop_newest_settings() -> Settings:
    return Settings(full_policy=FullPolicy.DROP_NEWEST, limits=Limits(class_messages=16))


def test_lost_error_is_repeated_after_reconnect() -> None:
    pair = ClientAndBroker(drop_newest_settings())
    pair.core.publish_many([b"%d" % n for n in range(15)], 1)
    pair.exchange()
    pair.core.publish_many([b"15", b"too much", b"and this"], 1)
    pair.core.publish(b"of another class", 2)
    while pair.send_chunk():
        pass
    counted = dict(pair.broker.refusal_counts)
    pair.disconnect()
    pair.connect()
    pair.exchange()
    assert pair.core.confirmed_position == 19
    assert sorted(pair.core.pop_refusals()) == [16, 17]
    assert (pair.statistics(1).published, pair.statistics(2).published) == (16, 1)
    assert pair.broker.refusal_counts[Reason.DROP_NEWEST] == counted[Reason.DROP_NEWEST] == 2


def test_received_error_is_not_repeated() -> None:
    pair = ClientAndBroker(drop_newest_settings())
    pair.core.publish_many([b"%d" % n for n in range(18)], 1)
    pair.exchange()
    assert sorted(pair.core.pop_refusals()) == [16, 17]
    pair.disconnect()
    pair.connect()
    pair.exchange()
    assert pair.core.pop_refusals() == {}
    assert pair.broker.subscription_manager.producer_states.last_instance("tester") == "one"
    (publisher,) = pair.broker.subscription_manager.producer_states
    assert publisher.refusals == []


def test_errors_are_not_repeated_without_unconfirmed_field() -> None:
    bus = BrokerHarness(drop_newest_settings())
    connect_version2(bus, publish(1, 0, *[b"x"] * 18), name="a", instance="one").disconnect()
    peer = Version2Peer(bus, bus.broker.open_session())
    peer.send(connect_request(1, name="a", instance="one"))
    assert peer.receive_replies()[0].content["next"] == 18
    peer.send(publish(1, 15, *[b"x"] * 3))
    error, confirm = peer.receive_replies()
    assert (error.kind, error.message_id, error.content["count"]) == ("error", 16, 2)
    assert (confirm.kind, confirm.message_id) == ("confirm", 18)


def test_remembered_refusals_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("simplebus.core.producer_state.TOTAL_PRODUCER_REFUSALS_MAX", 600)
    publishers = ProducerStates()
    states: list[ProducerState] = []
    for session in range(3):
        publisher = publishers.claim_name(f"{session}", "", session).producer
        states.append(publisher)
        for number in range(PRODUCER_REFUSALS_MAX + 10):
            publishers.add_refusal(publisher, refusal(2 * number))
    assert [len(state.refusals) for state in states] == [0, *[PRODUCER_REFUSALS_MAX] * 2]
    for number in range(1000, 100_000):
        publishers.add_refusal(states[0], refusal(number))
    assert [(each.refers_to, each.count) for each in states[0].refusals] == [(1000, 99_000)]
    publishers.mark_disconnected(states[1], 0.0)
    publishers.expire(1e9)
    assert publishers._total_refusal_count == 1 + PRODUCER_REFUSALS_MAX
