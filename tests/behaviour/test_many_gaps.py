"""Positions with many gaps in the messages in flight, after Nacks and acks of single messages."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.behaviour.wire_peer import BrokerHarness
from tests.behaviour.wire_peer_v2 import (
    Version2Peer,
    ack,
    connect_version2,
    nack,
    publish,
    subscribe,
)
from tests.support.call_counter import count_calls

ACK_TIMEOUT_TICKS = 10


def connect_subscriber(bus: BrokerHarness, *, is_durable: bool = True) -> Version2Peer:
    options: dict[str, object] = {"durable": "d"} if is_durable else {}
    options |= {"max_in_flight": 100_000, "ack_seconds": ACK_TIMEOUT_TICKS}
    return connect_version2(bus, subscribe(1, 1, **options))


def start_with_gaps(gap_count: int) -> tuple[BrokerHarness, Version2Peer]:
    """Return a bus, and a subscriber that has rejected every other one of its messages."""
    bus = BrokerHarness()
    bus.skips_checks = True
    connect_version2(bus, publish(1, 0, *[b"x"] * (2 * gap_count)), classes=[1])
    peer = connect_subscriber(bus)
    peer.receive_deliveries()
    peer.send(b"".join(nack(1, n, n + 1, 60_000) for n in range(0, 2 * gap_count, 2)))
    return bus, peer


def test_ending_a_subscription_costs_the_same_for_any_number_of_gaps() -> None:
    counts = [count_calls(start_with_gaps(gap_count)[1].disconnect) for gap_count in (100, 2000)]
    assert counts[0] == counts[1]


def test_an_ack_timeout_costs_the_same_for_any_number_of_gaps() -> None:
    counts = []
    for gap_count in (100, 2000):
        bus, peer = start_with_gaps(gap_count)
        bus.tick(ACK_TIMEOUT_TICKS - 1)
        assert not peer.receive_deliveries()
        counts.append(count_calls(bus.broker.tick))
        assert len(peer.receive_deliveries()) == gap_count
    assert counts[0] == counts[1]


def test_delayed_messages_are_queued_in_portions() -> None:
    bus, _ = start_with_gaps(5000)
    bus.broker.clock.now += 61
    counts = []
    while bus.broker.next_wakeup <= bus.broker.clock.now:
        counts.append(count_calls(bus.broker.run_due_wakeups))
    assert len(counts) >= 4
    assert max(counts) <= 1.1 * counts[0]
    bus.broker.check_invariants()


@settings(max_examples=60, deadline=None)
@given(
    actions=st.lists(
        st.sampled_from(["nothing", "ack", "nack", "delayed nack", "terminate"]),
        min_size=40,
        max_size=120,
    ),
    has_timeout=st.booleans(),
    is_durable=st.booleans(),
)
def test_the_next_subscriber_receives_what_was_not_acknowledged(
    actions: list[str], has_timeout: bool, is_durable: bool
) -> None:
    bus = BrokerHarness()
    bus.skips_checks = True
    connect_version2(bus, publish(1, 0, *[b"%d" % n for n in range(len(actions))]), classes=[1])
    peer = connect_subscriber(bus, is_durable=is_durable)
    assert len(peer.receive_deliveries()) == len(actions)
    for number, action in enumerate(actions):
        if action == "ack":
            peer.send(ack(1, number, number + 1))
        elif action == "nack":
            peer.send(nack(1, number, number + 1, 0))
        elif action == "delayed nack":
            peer.send(nack(1, number, number + 1, 30_000))
        elif action == "terminate":
            peer.send(nack(1, number, number + 1, "terminate"))
    if has_timeout:
        bus.tick(ACK_TIMEOUT_TICKS)
    peer.disconnect()
    bus.broker.check_invariants()
    peer = connect_subscriber(bus, is_durable=is_durable)
    received = [int(delivery.content) for delivery in peer.receive_deliveries()]
    at_once = [n for n, action in enumerate(actions) if action in ("nothing", "nack")]
    assert received == at_once
    bus.broker.clock.now += 31
    bus.broker.run_due_wakeups()
    received = [int(delivery.content) for delivery in peer.receive_deliveries()]
    assert received == [n for n, action in enumerate(actions) if action == "delayed nack"]
    bus.broker.check_invariants()
