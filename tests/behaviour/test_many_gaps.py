"""Positions with many gaps in the messages in flight, after Nacks and acks of single messages."""

from __future__ import annotations

from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simplebus.core.broker import acknowledge
from simplebus.core.group import group as group_module
from simplebus.core.limits import GROUP_IN_FLIGHT_MAX, LONG_NACK_MESSAGES, PLAIN_FRAMES_MAX
from simplebus.core.subscription import unacked_messages
from tests.behaviour.wire_peer import BrokerHarness, run_turn
from tests.behaviour.wire_peer_v2 import (
    PURGE,
    Version2Peer,
    ack,
    connect_version2,
    json_request,
    nack,
    publish,
    subscribe,
    working,
)
from tests.support.call_counter import count_calls

ACK_TIMEOUT_TICKS = 10
GAP_COUNTS = (1500, 6000)
"""Numbers of gaps that must cost the same. Smaller sets are handled in another way."""


def connect_subscriber(
    bus: BrokerHarness, *, is_durable: bool = True, **options: object
) -> Version2Peer:
    options |= {"durable": "d"} if is_durable else {}
    options |= {"max_in_flight": 100_000, "ack_seconds": ACK_TIMEOUT_TICKS}
    return connect_version2(bus, subscribe(1, 1, **options))


def start_with_gaps(
    gap_count: int, *, is_durable: bool = True, **options: object
) -> tuple[BrokerHarness, Version2Peer]:
    """Return a bus, and a subscriber that has rejected every other one of its messages."""
    bus = BrokerHarness()
    bus.skips_checks = True
    connect_version2(bus, publish(1, 0, *[b"x"] * (2 * gap_count)), classes=[1])
    peer = connect_subscriber(bus, is_durable=is_durable, **options)
    peer.receive_deliveries()
    peer.send(b"".join(nack(1, n, n + 1, 60_000) for n in range(0, 2 * gap_count, 2)))
    return bus, peer


def test_ending_a_subscription_costs_the_same_for_any_number_of_gaps() -> None:
    counts = [count_calls(start_with_gaps(gap_count)[1].disconnect) for gap_count in GAP_COUNTS]
    assert counts[0] == counts[1]


def test_the_end_of_a_subscription_keeps_no_range_for_each_acknowledged_message() -> None:
    counts = []
    for gap_count in GAP_COUNTS:
        bus = BrokerHarness()
        connect_version2(bus, publish(1, 0, *[b"x"] * (2 * gap_count)), classes=[1])
        peer = connect_subscriber(bus)
        peer.receive_deliveries()
        peer.send(b"".join(ack(1, n, n + 1) for n in range(0, 2 * gap_count, 2)))
        peer.disconnect()
        (position,) = bus.broker.classes[1].positions
        waiting = position.build_delivery_state().waiting_sequences
        counts.append(sum(each.range_count for each in waiting))
        assert position.unacked.count_in_flight() == 0
        assert len(connect_subscriber(bus).receive_deliveries()) == gap_count
    assert counts == [1, 1]


def test_an_ack_timeout_costs_the_same_for_any_number_of_gaps() -> None:
    counts = []
    for gap_count in GAP_COUNTS:
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


# Handing over to the next subscription -----------------------------------------------------------


def test_the_next_subscription_costs_the_same_for_any_number_of_gaps() -> None:
    counts = []
    for gap_count in GAP_COUNTS:
        bus, peer = start_with_gaps(gap_count, is_durable=False)
        end_count = count_calls(peer.disconnect)
        counts.append((end_count, count_calls(lambda bus=bus: connect_subscriber(bus))))
    assert counts[0] == counts[1]


def test_ending_costs_the_same_if_other_messages_wait_for_the_next_subscription() -> None:
    counts = []
    for gap_count in GAP_COUNTS:
        _, peer = start_with_gaps(gap_count, is_durable=False, start="earliest")
        peer.send(ack(1, 1, 2))
        counts.append(count_calls(peer.disconnect))
    assert counts[0] == counts[1]


def hand_over_ranges(bus: BrokerHarness) -> None:
    """Convert the backlog's delivery state into ranges, as if it were from a snapshot."""
    cls = bus.broker.classes[1]
    cls.backlog_state = cls.backlog_handover


Step = tuple[str, int, int]
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["ack", "nack", "delay", "backoff", "terminate", "tick", "read"]),
        st.integers(0, 24),
        st.integers(1, 5),
    ),
    max_size=20,
)


def perform(bus: BrokerHarness, peer: Version2Peer, steps: list[Step]) -> list[tuple[int, ...]]:
    """Let a subscriber perform steps. Returns its received deliveries, by step."""
    received: list[tuple[int, ...]] = []
    for number, (action, first, count) in enumerate(steps):
        last = first + count
        if action == "ack":
            peer.send(ack(1, first, last))
        elif action in ("nack", "delay", "backoff", "terminate"):
            delay = {"nack": 0, "delay": 1000 * count, "terminate": "terminate"}.get(action)
            peer.send(nack(1, first, last, delay))
        elif action == "tick":
            for _ in range(count):
                bus.broker.clock.now += 1
                bus.tick()
                bus.broker.run_due_wakeups()
        else:
            received += [(number, m.message_id, m.attempt) for m in peer.receive_deliveries()]
    return received


@given(
    rounds=st.lists(STEPS, min_size=2, max_size=4),
    idle_ticks=st.integers(0, 12),
    group=st.sampled_from(["", "g"]),
    start=st.sampled_from(["waiting", "earliest"]),
    limits=st.lists(st.sampled_from([4, 100]), min_size=4, max_size=4),
    purges=st.lists(st.tuples(st.integers(0, 24), st.integers(0, 12)), min_size=4, max_size=4),
    has_backoff=st.booleans(),
    has_other=st.booleans(),
)
def test_a_subscription_continues_a_former_one_as_from_ranges(
    rounds: list[list[Step]],
    idle_ticks: int,
    group: str,
    start: str,
    limits: list[int],
    purges: list[tuple[int, int]],
    has_backoff: bool,
    has_other: bool,
) -> None:
    buses = [BrokerHarness(), BrokerHarness()]
    received: list[list[object]] = [[], []]
    for bus, log in zip(buses, received, strict=True):
        connect_version2(bus, publish(1, 0, *[b"%d" % n for n in range(25)]), classes=[1])
        for steps, limit, (first, count) in zip(rounds, limits, purges, strict=False):
            options: dict[str, object] = {"ack_seconds": 3, "max_in_flight": limit, "start": start}
            options |= {"group": group} if group else {}
            options |= {"backoff": [2, 3]} if has_backoff else {}
            peer = connect_version2(bus, subscribe(1, 1, **options))
            log.append(perform(bus, peer, [("read", 0, 1), *steps, ("read", 0, 1)]))
            peer.disconnect()
            bus.broker.check_invariants()
            # What another subscription receives does not wait for the next one.
            if has_other:
                connect_version2(bus, subscribe(1, 1, start="new"))
            connect_version2(bus, publish(1, 0, b"new", b"new"))
            bus.broker.clock.now += idle_ticks
            bus.tick(idle_ticks)
            request = json_request(PURGE, 1, first=first, last=first + count)
            connect_version2(bus, request).receive_replies()
            if bus is buses[1]:
                hand_over_ranges(bus)
        peer = connect_version2(bus, subscribe(1, 1, ack_seconds=3))
        log.append(perform(bus, peer, [("read", 0, 1), *[("tick", 0, 1), ("read", 0, 1)] * 20]))
        bus.broker.check_invariants()
    assert received[0] == received[1]


# Rejecting many messages -------------------------------------------------------------------------


@given(steps=STEPS, group=st.sampled_from(["", "g"]), part=st.integers(1, 3))
def test_rejecting_in_parts_has_the_same_effect_as_at_once(
    steps: list[Step], group: str, part: int
) -> None:
    received: list[list[tuple[int, ...]]] = []
    read: Step = ("read", 0, 1)
    steps = [read, *[(action, at, 4 * n) for action, at, n in steps], read, ("tick", 0, 9), read]
    for limit in (LONG_NACK_MESSAGES, part):
        bus = BrokerHarness()
        connect_version2(bus, publish(1, 0, *[b"%d" % n for n in range(25)]), classes=[1])
        options: dict[str, object] = {"ack_seconds": 3, "max_in_flight": 100}
        options |= {"group": group} if group else {}
        peer = connect_version2(bus, subscribe(1, 1, **options))
        with (
            patch.object(unacked_messages, "LONG_NACK_MESSAGES", limit),
            patch.object(group_module, "LONG_NACK_MESSAGES", limit),
            patch.object(acknowledge, "LONG_NACK_MESSAGES", limit),
        ):
            received.append(perform(bus, peer, steps))
        bus.check_invariants()
    assert received[0] == received[1]


@pytest.mark.parametrize("group", [None, "g"])
@pytest.mark.parametrize("content", [60_000, "terminate", None, "working"])
def test_rejecting_many_ranges_takes_several_turns(group: str | None, content: object) -> None:
    count = 8 * LONG_NACK_MESSAGES
    bus = BrokerHarness()
    bus.skips_checks = True
    connect_version2(bus, publish(1, 0, *[b"x"] * count), classes=[1])
    peer = connect_version2(bus, subscribe(1, 1, group=group, max_in_flight=count))
    peer.receive_deliveries()
    peer.send(b"".join(nack(1, n, n + 1, 0) for n in range(0, count, 2)))
    assert len(peer.receive_deliveries()) == count // 2
    peer.session.allow_split_reads()
    writer = connect_version2(bus, classes=[2])
    delay = content if isinstance(content, int | str) else None
    reject = working(1, 0, count) if content == "working" else nack(1, 0, count, delay)
    bus.tick()
    peer.send(reject + publish(2, 0, b"y"))
    turn_count = 1
    while peer.session.is_request_pending or peer.session.unprocessed:
        assert not len(writer.bus.broker.classes[2].ring)
        run_turn(peer)
        turn_count += 1
    assert turn_count >= 4
    assert len(bus.broker.classes[2].ring) == 1
    bus.check_invariants()
    (position,) = bus.broker.classes[1].positions
    if content == "working":
        assert position.unacked.delayed_count == 0
    elif content == "terminate":
        assert position.undelivered_counts
    else:
        assert position.unacked.delayed_count == count


@given(
    acks=st.lists(st.tuples(st.integers(0, 25), st.integers(1, 4)), min_size=1, max_size=12),
    before=STEPS,
    group=st.sampled_from(["", "g", "by key"]),
)
def test_acks_of_one_read_have_the_same_effect_as_single_ones(
    acks: list[tuple[int, int]], before: list[Step], group: str
) -> None:
    results = []
    for is_at_once in (True, False):
        bus = BrokerHarness()
        connect_version2(bus, publish(1, 0, *[b"%d" % n for n in range(25)]), classes=[1])
        options: dict[str, object] = {"group": group, "by_key": group == "by key"} if group else {}
        peer = connect_version2(bus, subscribe(1, 1, ack_seconds=3, **options))
        perform(bus, peer, [("read", 0, 1), *before])
        frames = [ack(1, first, first + count) for first, count in acks]
        # Nothing happens at the many acks of message 0, but they make the read long.
        frames += [ack(1, 0, 1)] * (2 * PLAIN_FRAMES_MAX)
        for part in [b"".join(frames)] if is_at_once else frames:
            peer.send(part)
        bus.check_invariants()
        received = perform(bus, peer, [("read", 0, 1), ("tick", 0, 9), ("read", 0, 1)])
        results.append((received, bus.statistics(1)))
    assert results[0] == results[1]


def test_member_of_a_group_has_a_limited_number_of_messages_in_flight() -> None:
    bus = BrokerHarness()
    bus.skips_checks = True
    count = GROUP_IN_FLIGHT_MAX + 100
    connect_version2(bus, publish(1, 0, *[b"x"] * count), classes=[1])
    peer = connect_version2(bus, subscribe(1, 1, group="g", max_in_flight=count))
    received = []
    while deliveries := peer.receive_deliveries():
        received += deliveries
        bus.broker.run_due_wakeups()
    assert len(received) == GROUP_IN_FLIGHT_MAX
    peer.send(ack(1, 0, 50))
    assert len(peer.receive_deliveries()) == 50
