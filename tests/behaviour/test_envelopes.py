"""Envelopes: channels, expiry, delayed messages, and delivery to version 1."""

from __future__ import annotations

from itertools import pairwise

import pytest

from simplebus.core.broker.broker import FullPolicy, Settings
from simplebus.core.errors import Reason
from simplebus.core.limits import PLAIN_FRAMES_MAX, REDELIVERY_MESSAGES, RING_IDLE_TICKS, Limits
from tests.behaviour import wire_peer
from tests.behaviour.wire_peer import BrokerHarness, numbered
from tests.behaviour.wire_peer_v2 import (
    ENVELOPE,
    MESSAGE,
    ack,
    channel_envelope,
    connect_version2,
    nack,
    publish,
    publish_envelopes,
    subscribe,
    timed_envelope,
    unsubscribe,
)

INFINITE = float("inf")


def advance_clock(bus: BrokerHarness, now: float) -> None:
    """Set the clock and run the wakeups that are due."""
    bus.broker.clock.now = now
    if bus.broker.next_wakeup <= now:
        bus.broker.run_due_wakeups()


def test_messages_are_filtered_by_channel() -> None:
    bus = BrokerHarness()
    bindings = {1: ["a.*"], 2: ["#"], 3: ["b", "a.x"], 4: [], 5: ["c"], 6: [">"]}
    peer = connect_version2(bus, *[subscribe(1, n, channels=b) for n, b in bindings.items()])
    writer = connect_version2(
        bus, publish_envelopes(1, 0, *[channel_envelope(n, b"") for n in ("a.x", "b", "a.y")])
    )
    writer.send(publish(1, 3, b"plain"))
    received: dict[int, list[int]] = {n: [] for n in bindings}
    for message in peer.receive_deliveries():
        received[message.number].append(message.message_id)
    all_of_them = [0, 1, 2, 3]
    assert received == {1: [0, 2], 2: all_of_them, 3: [0, 1], 4: all_of_them, 5: [], 6: [0, 1, 2]}


def test_unmatched_messages_are_released() -> None:
    bus = BrokerHarness(class_messages=10)
    reader = connect_version2(bus, subscribe(1, 5, channels=["a"]))
    writer = connect_version2(bus)
    number = 0
    for _ in range(8):  # Skipped messages free space as the reader reads, without an ack.
        writer.send(publish_envelopes(1, number, *[channel_envelope("b", b"x")] * 7))
        number += 7
        assert reader.receive_message_ids() == []
        bus.broker.end_turn()
        assert not writer.session.parked_messages
    assert bus.statistics(1).ring.message_count == 0


def test_ack_range_may_include_unmatched_messages() -> None:
    bus = BrokerHarness()
    reader = connect_version2(bus, subscribe(1, 5, channels=["a"]))
    connect_version2(
        bus, publish_envelopes(1, 0, *[channel_envelope("ab"[n % 2], b"") for n in range(99)])
    )
    assert reader.receive_message_ids() == list(range(0, 99, 2))
    reader.send(ack(5, 0, 99))
    assert bus.statistics(1).ring.message_count == 0
    assert bus.broker.refusal_counts == {}


@pytest.mark.parametrize("count", [1, 3, 4 * PLAIN_FRAMES_MAX])
def test_expired_message_is_not_delivered(count: int) -> None:
    bus = BrokerHarness()
    advance_clock(bus, 50.0)
    in_time, late = (connect_version2(bus, subscribe(1, 5)) for _ in range(2))
    connect_version2(
        bus,
        publish_envelopes(
            1, 0, *[timed_envelope(b"x", expires_ms=1500)] * count, timed_envelope(b"y")
        ),
    )
    advance_clock(bus, 51.4)
    assert in_time.receive_message_ids() == list(range(count + 1))
    advance_clock(bus, 51.5)
    assert late.receive_message_ids() == [count]
    bus.tick(6)
    assert in_time.receive_message_ids() == [count]
    assert [s.undelivered for s in bus.statistics(1).subscriptions] == [{Reason.EXPIRED: count}] * 2
    for reader in (in_time, late):
        reader.send(ack(5, count, count + 1))
    bus.broker.end_turn()
    assert bus.statistics(1).ring.message_count == 0


def test_message_with_zero_expiry_is_confirmed_but_not_delivered() -> None:
    bus = BrokerHarness()
    reader = connect_version2(bus, subscribe(1, 5))
    connect_version2(bus, publish_envelopes(1, 0, timed_envelope(b"x", expires_ms=0)))
    assert reader.receive_message_ids() == []


def test_backlog_messages_expire() -> None:
    bus = BrokerHarness(class_messages=5)
    advance_clock(bus, 50.0)
    writer = connect_version2(
        bus,
        publish_envelopes(1, 0, *[timed_envelope(b"x", expires_ms=1000)] * 5, timed_envelope(b"y")),
    )
    assert writer.session.parked_messages
    advance_clock(bus, 51.0)
    bus.tick()
    assert not writer.session.parked_messages
    assert bus.statistics(1).dropped == {Reason.EXPIRED: 5}
    assert connect_version2(bus, subscribe(1, 5)).receive_message_ids() == [5]


def test_backlog_messages_expire_beside_other_positions() -> None:
    bus = BrokerHarness()
    advance_clock(bus, 50.0)
    connect_version2(bus, publish_envelopes(1, 0, *[timed_envelope(b"x", expires_ms=1000)] * 5))
    new = connect_version2(bus, subscribe(1, 5, start="new"))
    advance_clock(bus, 51.0)
    bus.tick()
    assert bus.statistics(1).ring.message_count == 0
    assert new.receive_message_ids() == []


@pytest.mark.parametrize("durable", [None, "d"])
def test_expired_backlog_is_released_at_next_tick(
    durable: str | None,
) -> None:
    bus = BrokerHarness(class_messages=20_000)
    advance_clock(bus, 50.0)
    if durable:
        connect_version2(bus, subscribe(1, 5, durable=durable)).disconnect()
    writer = connect_version2(
        bus, publish_envelopes(1, 0, *[timed_envelope(b"", expires_ms=1000)] * 20_000)
    )
    writer.send(publish(1, 20_000, *[b""] * 20_000))
    assert writer.session.parked_messages
    advance_clock(bus, 51.0)
    bus.tick()
    assert not writer.session.parked_messages
    assert bus.statistics(1).dropped == {Reason.EXPIRED: 20_000}


@pytest.mark.parametrize("options", [{}, {"group": "g"}])
def test_expiry_before_delivery_frees_space(options: dict[str, object]) -> None:
    bus = BrokerHarness(class_messages=10)
    advance_clock(bus, 50.0)
    reader = connect_version2(bus, subscribe(1, 5, max_in_flight=2, **options))
    writer = connect_version2(
        bus,
        publish_envelopes(
            1, 0, *[timed_envelope(b"x", expires_ms=1000)] * 10, timed_envelope(b"y")
        ),
    )
    assert reader.receive_message_ids() == [0, 1]
    # One message is redelivered, and one more may be in flight.
    reader.send(ack(5, 0, 1), nack(5, 1, 2, 0))
    advance_clock(bus, 51.0)
    bus.tick(bus.broker.settings.ack_timeout)  # Then the member's unread messages are reclaimed.
    assert not writer.session.parked_messages
    assert bus.statistics(1).ring.message_count == 1
    assert bus.statistics(1).dropped == {Reason.EXPIRED: 9}
    received = reader.receive_message_ids()
    bus.tick()
    assert received + reader.receive_message_ids() == [10]


def test_expired_message_in_flight_can_be_acked() -> None:
    bus = BrokerHarness()
    advance_clock(bus, 50.0)
    reader = connect_version2(bus, subscribe(1, 5, max_in_flight=1))
    connect_version2(bus, publish_envelopes(1, 0, *[timed_envelope(b"x", expires_ms=1000)] * 3))
    assert reader.receive_message_ids() == [0]
    advance_clock(bus, 51.0)
    bus.tick()
    [position] = bus.statistics(1).subscriptions
    assert (position.in_flight, position.undelivered) == (1, {Reason.EXPIRED: 2})
    reader.send(ack(5, 0, 1))
    [position] = bus.statistics(1).subscriptions
    assert (position.acknowledged, position.undelivered) == (1, {Reason.EXPIRED: 2})
    assert bus.statistics(1).ring.message_count == 0


@pytest.mark.parametrize(
    "kind",
    [{}, {"max_in_flight": 5}, {"durable": "d"}, {"group": "g"}, {"group": "g", "by_key": True}],
    ids=str,
)
def test_message_expired_before_redelivery_is_not_counted_as_acked(kind: dict[str, object]) -> None:
    bus = BrokerHarness()
    advance_clock(bus, 50.0)
    reader = connect_version2(bus, subscribe(1, 5, **kind))
    connect_version2(bus, publish_envelopes(1, 0, *[timed_envelope(b"x", expires_ms=1000)] * 5))
    assert reader.receive_message_ids() == [0, 1, 2, 3, 4]
    reader.send(ack(5, 1, 3), nack(5, 3, 4, 2000), nack(5, 0, 1), nack(5, 4, 5, 500))
    advance_clock(bus, 50.6)
    bus.broker.run_due_wakeups()
    assert reader.receive_message_ids() == [4]
    reader.send(ack(5, 4, 5))
    advance_clock(bus, 53.0)
    bus.tick(bus.broker.settings.ack_timeout)
    bus.broker.run_due_wakeups()
    assert reader.receive_message_ids() == []
    statistics = bus.statistics(1)
    assert (statistics.in_flight, statistics.ring.message_count) == (0, 0)
    assert statistics.dropped == {Reason.EXPIRED: 2}
    assert statistics.acknowledged == 3


def test_expired_messages_do_not_count_towards_pending_limit() -> None:
    bus = BrokerHarness()
    advance_clock(bus, 50.0)
    reader = connect_version2(
        bus, subscribe(1, 5, max_in_flight=1, max_pending=5, slow="disconnect")
    )
    contents = [timed_envelope(b"x", expires_ms=1000 if n % 2 else None) for n in range(5)]
    writer = connect_version2(bus, publish_envelopes(1, 0, *contents))
    assert reader.receive_message_ids() == [0]
    advance_clock(bus, 51.0)
    writer.send(publish(1, 5, b"y", b"y"))  # Five pending messages, and two expired ones.
    bus.broker.end_turn()
    assert reader.receive_error_codes() == []
    writer.send(publish(1, 7, b"z"))
    bus.tick()
    bus.broker.end_turn()
    assert reader.receive_error_codes() == ["slow_consumer"]


@pytest.mark.parametrize("count", [1, 4 * PLAIN_FRAMES_MAX])
def test_delayed_message_is_not_delivered_early(count: int) -> None:
    bus = BrokerHarness()
    advance_clock(bus, 50.0)
    reader = connect_version2(bus, subscribe(1, 5))
    connect_version2(
        bus,
        publish_envelopes(
            1,
            0,
            timed_envelope(b"a"),
            *[timed_envelope(b"b", not_before_ms=2000)] * count,
            timed_envelope(b"c"),
        ),
    )
    assert reader.receive_message_ids() == [0, count + 1]
    reader.send(ack(5, 0, count + 2))  # Clients ack ranges without knowing the unmatched messages.
    assert bus.broker.next_wakeup == 52.0
    advance_clock(bus, 51.9)
    assert reader.receive_message_ids() == []
    advance_clock(bus, 52.0)
    assert [(m.message_id, m.attempt) for m in reader.receive_deliveries()] == [
        (n + 1, 1) for n in range(count)
    ]
    reader.send(ack(5, 0, count + 2))
    assert bus.statistics(1).ring.message_count == 0
    assert bus.broker.next_wakeup == INFINITE


def test_delayed_backlog_message_is_not_delivered_early() -> None:
    bus = BrokerHarness()
    advance_clock(bus, 50.0)
    connect_version2(
        bus, publish_envelopes(1, 0, timed_envelope(b"a", not_before_ms=2000), timed_envelope(b"b"))
    )
    first_reader = connect_version2(bus, subscribe(1, 5))
    assert first_reader.receive_message_ids() == [1]
    first_reader.disconnect()
    assert len(bus.broker.delayed_wakeups) == 0
    reader = connect_version2(bus, subscribe(1, 5))
    assert reader.receive_message_ids() == [1]
    advance_clock(bus, 52.0)
    assert reader.receive_message_ids() == [0]


@pytest.mark.parametrize("count", [1, PLAIN_FRAMES_MAX])
def test_clock_set_back_does_not_delay_other_messages(count: int) -> None:
    bus = BrokerHarness()
    advance_clock(bus, 100.0)
    delayed = [timed_envelope(b"b", not_before_ms=1000)] * count
    connect_version2(
        bus,
        publish_envelopes(
            1, 0, timed_envelope(b"a", not_before_ms=0), *delayed, timed_envelope(b"c")
        ),
    )
    advance_clock(bus, 90.0)
    assert connect_version2(bus, subscribe(1, 5, start="earliest")).receive_message_ids() == [
        0,
        count + 1,
    ]


def test_removed_subscriptions_leave_no_wakeup() -> None:
    bus = BrokerHarness()
    advance_clock(bus, 50.0)
    latest_time = (1 << 64) - 1
    writer = connect_version2(
        bus, publish_envelopes(1, 0, timed_envelope(b"x", not_before_ms=latest_time))
    )
    for _ in range(20):
        writer.send(subscribe(1, 5, start="earliest"))
        writer.read_bytes(1 << 20)
        assert bus.broker.next_wakeup < INFINITE
        writer.send(unsubscribe(5))
        assert len(bus.broker.delayed_wakeups) == 0
    advance_clock(bus, 51.0)
    bus.broker.run_due_wakeups()


def test_times_survive_ring_growth_wrap_and_shrink() -> None:
    bus = BrokerHarness()
    advance_clock(bus, 50.0)
    late = connect_version2(bus, subscribe(1, 5))
    writer = connect_version2(bus)
    number = 0
    for _ in range(40):
        contents = [
            timed_envelope(b"x" * 500, expires_ms=60_000),
            timed_envelope(b"y" * 500),
            channel_envelope("c", b"z"),
        ]
        writer.send(publish_envelopes(1, number, *contents), publish(1, number + 3, b"p"))
        number += 4
        bus.tick(RING_IDLE_TICKS // 3)
        if number % 3 == 0:
            received = late.receive_message_ids()
            late.send(ack(5, received[0], received[-1] + 1))
    advance_clock(bus, 111.0)
    assert not any(i % 4 == 0 for i in late.receive_message_ids())


# Version 1 subscribers ----------------------------------------------------------------------------


def test_version_1_receives_payloads_in_order() -> None:
    bus = BrokerHarness()
    old = bus.peer(wire_peer.connect(1), wire_peer.subscribe(1))
    new = connect_version2(bus, subscribe(1, 5))
    writer = connect_version2(bus)
    number, expected = 0, []
    for turn in range(1, 6):
        payloads = numbered(turn, start=number)
        writer.send(publish(1, number, *payloads))
        number += turn
        expected += payloads
        writer.send(
            publish_envelopes(
                1, number, *[channel_envelope("a", p) for p in numbered(turn, start=number)]
            )
        )
        expected += numbered(turn, start=number)
        number += turn
    bus.peer(wire_peer.publish(1, b"old"))
    received = old.receive_messages()
    assert [m.payload for m in received] == [*expected, b"old"]
    assert [m.message_id for m in received] == list(range(31))
    assert [m.kind for m in new.receive_deliveries()[:4]] == [MESSAGE, ENVELOPE, MESSAGE, MESSAGE]
    old.send(wire_peer.ack(1, 0, 31))
    new.send(ack(5, 0, 31))
    assert bus.statistics(1).ring.message_count == 0


@pytest.mark.parametrize("count", [0, 3, 200])
def test_uncarriable_payload_is_counted_and_skipped(count: int) -> None:
    bus = BrokerHarness(class_messages=2 * count + 1)
    old = bus.peer(wire_peer.connect(1), wire_peer.subscribe(1))
    bad = b"\0with <\r\n\0> in it"
    contents = [b"\0a"] * count + [bad] + [b"\0b"] * count
    writer = connect_version2(bus, publish_envelopes(1, 0, *contents))
    received = old.receive_messages()
    assert [m.payload for m in received] == [b"a"] * count + [b"b"] * count
    assert bus.statistics(1).dropped == {Reason.UNCARRIABLE: 1}
    if received:
        old.send(wire_peer.ack(1, 0, count), wire_peer.ack(1, count + 1, 2 * count + 1))
    bus.broker.end_turn()
    assert bus.statistics(1).ring.message_count == 0
    writer.send(publish_envelopes(1, 2 * count + 1, bad, b"\0next"))
    received = old.receive_messages()
    bus.broker.end_turn()
    assert [m.payload for m in received + old.receive_messages()] == [b"next"]


def test_uncarriable_payloads_do_not_stop_redeliveries() -> None:
    bus = BrokerHarness()
    writer = connect_version2(bus, publish_envelopes(1, 0, *[b"\0<\r\n\0>"] * 30, b"\0good"))
    first_reader = connect_version2(bus, subscribe(1, 5))
    assert len(first_reader.receive_message_ids()) == 31
    first_reader.disconnect()
    old = bus.peer(wire_peer.subscribe(1))
    assert [m.payload for m in old.receive_messages()] == [b"good"]
    assert not writer.session.parked_messages


def test_version_1_ack_ignores_delayed_messages() -> None:
    bus = BrokerHarness()
    advance_clock(bus, 50.0)
    old = bus.peer(wire_peer.connect(1), wire_peer.subscribe(1))
    connect_version2(
        bus,
        publish_envelopes(
            1,
            0,
            timed_envelope(b"a"),
            timed_envelope(b"b", not_before_ms=1000),
            timed_envelope(b"c"),
        ),
    )
    assert [m.payload for m in old.receive_messages()] == [b"a", b"c"]
    old.send(wire_peer.ack(1, 0, 3))
    advance_clock(bus, 51.0)
    assert [m.payload for m in old.receive_messages()] == [b"b"]
    old.send(wire_peer.ack(1, 1, 2))
    assert bus.statistics(1).ring.message_count == 0


def test_drop_oldest_drops_delayed_messages() -> None:
    limits = Limits(class_messages=4)
    bus = BrokerHarness(Settings(limits=limits, full_policy=FullPolicy.DROP_OLDEST))
    advance_clock(bus, 50.0)
    reader = connect_version2(bus, subscribe(1, 5, max_in_flight=3), subscribe(1, 6, group="g"))
    writer = connect_version2(
        bus, publish_envelopes(1, 0, *[timed_envelope(b"x", not_before_ms=1000)] * 4)
    )
    assert reader.receive_message_ids() == []
    writer.send(publish(1, 4, b"a", b"b", b"c", b"d"))
    assert sorted(reader.receive_message_ids()) == [4, 4, 5, 5, 6, 6, 7]
    advance_clock(bus, 52.0)
    assert reader.receive_message_ids() == []
    reader.send(ack(5, 4, 8), ack(6, 4, 8))
    assert reader.receive_message_ids() == [7]
    reader.send(ack(5, 7, 8))
    assert bus.statistics(1).ring.message_count == 0


def test_plain_message_in_class_with_channels_has_no_channel() -> None:
    bus = BrokerHarness()
    reader = connect_version2(bus, subscribe(1, 5, channels=["a"]), subscribe(1, 6, channels=["#"]))
    writer = connect_version2(bus, publish_envelopes(1, 0, channel_envelope("a", b"")))
    for number in range(1, 600):  # Slots of earlier messages are reused.
        writer.send(publish(1, number, b"x"))
        received = sorted(m.number for m in reader.receive_deliveries())
        assert received == ([6] if number > 1 else [5, 6, 6])
        reader.send(ack(5, 0, number + 1), ack(6, 0, number + 1))


# Memory for channels ------------------------------------------------------------------------------

MEMORY_BYTES = 1 << 20
"""Total memory of the bus."""


def create_small_bus(policy: FullPolicy = FullPolicy.BLOCK) -> BrokerHarness:
    limits = Limits(class_bytes=MEMORY_BYTES, total_bytes=MEMORY_BYTES, frame_bytes=1 << 16)
    return BrokerHarness(Settings(limits=limits, full_policy=policy))


def messages_on_new_channels(first: int, count: int, class_id: int = 1) -> bytes:
    """Return messages with different channels."""
    names = [f"n{number}" for number in range(first, first + count)]
    return publish_envelopes(class_id, first, *[channel_envelope(name, b"") for name in names])


@pytest.mark.parametrize("step", [1, 7, PLAIN_FRAMES_MAX * 8])
def test_messages_wait_without_memory_for_channels(step: int) -> None:
    bus = create_small_bus()
    bus.skips_checks = step < PLAIN_FRAMES_MAX
    reader = connect_version2(bus, subscribe(1, 5, channels=["#"]))
    writer = connect_version2(bus)
    total, received = 9000, 0
    for first in range(0, total, step):
        writer.send(messages_on_new_channels(first, min(step, total - first)))
    assert writer.session.parked_messages
    while ids := reader.receive_message_ids():
        assert ids == list(range(received, received + len(ids)))
        assert received > 0 or len(ids) > 1000
        received += len(ids)
        reader.send(ack(5, ids[0], received))
        bus.broker.end_turn()
        bus.check_invariants()
    assert received == total
    assert writer.receive_replies()[-1].message_id == total


@pytest.mark.parametrize("policy", [FullPolicy.DROP_NEWEST, FullPolicy.DROP_OLDEST])
def test_full_policy_applies_without_memory_for_channels(policy: FullPolicy) -> None:
    bus = create_small_bus(policy)
    writer = connect_version2(bus)
    for first in range(0, 9000, 300):
        writer.send(messages_on_new_channels(first, 300))
    ring = bus.broker.classes[1].ring
    dropped = bus.statistics(1).dropped
    assert set(dropped) == {Reason(policy.value)}
    assert sum(dropped.values()) + len(ring) == 9000
    assert len(ring) > 1000
    assert writer.receive_replies()[-1].message_id == 9000


def test_unused_channels_do_not_block_other_classes() -> None:
    bus = create_small_bus()
    reader = connect_version2(bus, subscribe(1, 5), classes=(1, 2))
    writer = connect_version2(bus, messages_on_new_channels(0, 2500), classes=(1, 2))
    assert len(reader.receive_message_ids()) == 2500
    reader.send(ack(5, 0, 2500))
    bus.broker.end_turn()
    assert len(bus.broker.classes[1].channels) > 2000
    writer.send(messages_on_new_channels(2500, 2500, class_id=2))
    assert writer.session.parked_messages
    bus.tick(RING_IDLE_TICKS * 2)
    bus.broker.end_turn()
    assert not writer.session.parked_messages
    assert len(bus.broker.classes[1].channels) == 0
    assert bus.statistics(2).published == 2500


@pytest.mark.parametrize("kind", ["uncarriable", "put off"])
def test_slow_path_delivery_yields_to_others(kind: str) -> None:
    bus = BrokerHarness()
    bus.skips_checks = True
    count = 3 * REDELIVERY_MESSAGES
    if kind == "uncarriable":
        connect_version2(bus, publish_envelopes(1, 0, *[b"\0<\r\n\0>"] * count))
        reader = bus.peer(wire_peer.connect(1), wire_peer.subscribe(1))
    else:
        waits = [timed_envelope(b"", not_before_ms=3_600_000 + n) for n in range(count)]
        reader = connect_version2(bus, publish_envelopes(1, 0, *waits), subscribe(1, 5))
    outbox, reached = reader.session.outbox, [0]
    while not outbox.is_idle:
        if piece := outbox.peek(0):
            outbox.mark_sent(len(piece), 0)
        [position] = bus.statistics(1).subscriptions
        reached.append(position.cursor)
    assert reached[-1] == count
    assert max(b - a for a, b in pairwise(reached)) <= REDELIVERY_MESSAGES
