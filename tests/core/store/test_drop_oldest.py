"""Dropping of the oldest messages in several turns, for very many subscriptions."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from simplebus.core.errors import Reason
from simplebus.core.limits import Limits
from simplebus.core.settings import FullPolicy, Settings
from tests.behaviour import wire_peer
from tests.behaviour.wire_peer import BrokerHarness, WirePeer
from tests.behaviour.wire_peer_v2 import (
    Version2Peer,
    ack,
    connect_version2,
    publish,
    publish_envelopes,
    subscribe,
    unsubscribe,
)

PEERS = 4
CLASS_MESSAGES = 5
OPTIONS: list[dict[str, object]] = [{}, {"group": "g"}, {"durable": "d"}, {"max_in_flight": 2}]
"""Options of the subscription of each peer."""
ACTIONS = ["publish", "receive", "ack", "subscribe", "unsubscribe", "close", "continue"]
STEPS = st.lists(
    st.tuples(st.sampled_from(ACTIONS), st.integers(0, PEERS - 1), st.integers(1, 8)),
    max_size=24,
)


def create_bus(positions_per_turn: int | None = None) -> BrokerHarness:
    limits = Limits(class_messages=CLASS_MESSAGES)
    bus = BrokerHarness(Settings(limits=limits, full_policy=FullPolicy.DROP_OLDEST))
    if positions_per_turn is not None:
        bus.broker.store.limit_turns(positions_per_turn)
    return bus


def finish_deferred_work(bus: BrokerHarness) -> None:
    while bus.broker.store.has_deferred_work:
        bus.broker.store.continue_deferred_work()
        bus.check_invariants()
    bus.broker.end_turn()


@dataclass
class Outcome:
    """Result of a run, as far as clients can observe it."""

    received: list[list[tuple[int, bytes]]]
    dropped_count: int
    stored_count: int


def run_steps(
    steps: list[tuple[str, int, int]], bus: BrokerHarness, *, finishes_each: bool
) -> Outcome:
    """Run the steps. With `finishes_each`, deferred work is finished after each of them."""
    publisher = connect_version2(bus)
    peers = [connect_version2(bus) for _ in range(PEERS)]
    received: list[list[tuple[int, bytes]]] = [[] for _ in peers]
    published_count = 0

    def receive(index: int) -> None:
        messages = peers[index].receive_deliveries()
        received[index] += [(message.message_id, message.content) for message in messages]

    for action, index, count in [*(("subscribe", index, 0) for index in range(PEERS)), *steps]:
        peer = peers[index]
        if action == "publish":
            contents = [b"%d" % (published_count + n) for n in range(count)]
            publisher.send(publish(1, published_count, *contents))
            published_count += count
        elif action == "continue" and bus.broker.store.has_deferred_work:
            bus.broker.store.continue_deferred_work()
        elif peer.session.is_closed:
            continue
        elif action == "receive":
            receive(index)
        elif action == "ack" and received[index]:
            sequence = received[index][-1][0]
            peer.send(ack(1, max(0, sequence - count), sequence + 1))
        elif action == "close":
            peer.disconnect()
        elif action == "subscribe" and not peer.session.subscriptions:
            peer.send(subscribe(1, 1, **OPTIONS[index]))
            receive(index)
        elif action == "unsubscribe" and peer.session.subscriptions:
            peer.send(unsubscribe(1))
        if finishes_each:
            finish_deferred_work(bus)
    finish_deferred_work(bus)
    for index, peer in enumerate(peers):
        if not peer.session.is_closed:
            receive(index)
    assert not bus.broker.classes[1].blocked_sessions
    statistics = bus.statistics(1)
    assert statistics.published == published_count
    return Outcome(
        received, statistics.dropped.get(Reason.DROP_OLDEST, 0), len(bus.broker.classes[1].ring)
    )


@given(STEPS, st.integers(1, 2))
def test_several_turns_drop_the_same_messages_as_one(
    steps: list[tuple[str, int, int]], per_turn: int
) -> None:
    divided = run_steps(steps, create_bus(per_turn), finishes_each=True)
    assert divided == run_steps(steps, create_bus(), finishes_each=False)


@given(STEPS, st.integers(1, 2))
def test_subscription_receives_messages_in_order_while_others_are_dropped(
    steps: list[tuple[str, int, int]], per_turn: int
) -> None:
    steps = [s for s in steps if s[1] != 0 or s[0] not in ("unsubscribe", "close")]
    outcome = run_steps(steps, create_bus(per_turn), finishes_each=False)
    published_count = sum(count for action, _, count in steps if action == "publish")
    sequences = [sequence for sequence, _ in outcome.received[0]]
    assert sequences == sorted(set(sequences))
    assert not published_count or sequences[-1] == published_count - 1
    for messages in outcome.received:
        assert all(content == b"%d" % sequence for sequence, content in messages)


def create_full_class() -> tuple[BrokerHarness, Version2Peer, list[Version2Peer]]:
    """Return a bus that drops for one subscription in each turn, a publisher and subscribers."""
    bus = create_bus(1)
    peers = [connect_version2(bus) for _ in range(PEERS)]
    for peer in peers:
        peer.send(subscribe(1, 1))
        assert not peer.receive_deliveries()
    publisher = connect_version2(bus)
    publisher.send(publish(1, 0, *[b"old"] * CLASS_MESSAGES))
    finish_deferred_work(bus)
    return bus, publisher, peers


def test_publisher_waits_and_is_confirmed_when_the_drop_is_complete() -> None:
    bus, publisher, peers = create_full_class()
    publisher.receive_replies()
    publisher.send(publish(1, CLASS_MESSAGES, b"new"))
    assert publisher.session.parked_messages
    assert publisher.receive_replies() == []
    turn_count = 0
    while publisher.session.parked_messages:
        bus.broker.store.continue_deferred_work()
        turn_count += 1
    assert turn_count >= len(peers)
    bus.broker.end_turn()
    (confirm,) = publisher.receive_replies()
    assert confirm.kind == "confirm"
    finish_deferred_work(bus)
    for peer in peers:
        assert [message.content for message in peer.receive_deliveries()][-1] == b"new"


def test_new_subscription_from_the_earliest_message_does_not_keep_dropped_ones() -> None:
    bus, publisher, _ = create_full_class()
    publisher.send(publish(1, CLASS_MESSAGES, b"new"))
    late = connect_version2(bus)
    late.send(subscribe(1, 1, start="earliest"))
    finish_deferred_work(bus)
    assert not publisher.session.parked_messages
    assert bus.broker.classes[1].ring.floor == 1
    assert late.receive_deliveries()[-1].content == b"new"


def test_version1_subscription_does_not_keep_dropped_messages() -> None:
    """It takes over the backlog while the oldest messages are dropped."""
    bus = create_bus(1)
    publisher = connect_version2(bus, publish(1, 0, b"waiting"))
    for _ in range(PEERS):
        connect_version2(bus, subscribe(1, 1, start="earliest"))
    publisher.send(publish(1, 1, *[b"old"] * (CLASS_MESSAGES - 1)))
    finish_deferred_work(bus)
    publisher.send(publish(1, CLASS_MESSAGES, b"new"))
    assert bus.broker.store.oldest_dropper.has_waiting
    late = WirePeer(bus, bus.broker.open_session())
    late.send(wire_peer.connect(1), wire_peer.subscribe(1))
    finish_deferred_work(bus)
    assert [message.payload for message in late.receive_messages()] == [b"new"]


def test_message_that_must_not_wait_completes_the_drop() -> None:
    bus, publisher, peers = create_full_class()
    publisher.send(publish(1, CLASS_MESSAGES, b"parked"))
    local = bus.broker.open_local_session("local")
    frame = memoryview(publish_envelopes(1, 0, b"\x08\x00\x01aat once"))
    result = bus.broker.publish_or_refuse(local, 1, "a", frame)
    assert result.sequence == CLASS_MESSAGES + 1
    assert not publisher.session.parked_messages
    finish_deferred_work(bus)
    for peer in peers:
        contents = [message.content for message in peer.receive_deliveries()]
        assert contents[-2:] == [b"parked", b"\x08\x00\x01aat once"]


def test_last_values_are_dropped_at_once() -> None:
    bus = create_bus(1)
    for _ in range(PEERS):
        connect_version2(bus, subscribe(1, 1), classes=[{"id": 1, "last_values": True}])
    publisher = connect_version2(bus)
    for number in range(2 * CLASS_MESSAGES):
        publisher.send(publish_envelopes(1, number, b"\x08\x00\x01%d" % (number % 2)))
        assert not publisher.session.parked_messages
