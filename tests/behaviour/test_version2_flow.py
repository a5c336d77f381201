"""Version 2 at the broker: flow control, fetch, slow consumers, and retention."""

from __future__ import annotations

import pytest

from simplebus.core.broker.broker import FullPolicy, Settings
from simplebus.core.errors import Reason
from simplebus.core.limits import IN_FLIGHT_BYTES, RECEIVE_BYTES, Limits
from simplebus.core.settings import Retention
from tests.behaviour.wire_peer import BrokerHarness, numbered
from tests.behaviour.wire_peer_v2 import (
    FETCH,
    SUBSCRIBE,
    ack,
    channel_envelope,
    connect_version2,
    json_request,
    nack,
    publish,
    publish_envelopes,
    subscribe,
    working,
)
from tests.support.oracles import ID_COUNT, parse_frame, split_frames

# Messages in flight -------------------------------------------------------------------------------


@pytest.mark.parametrize("most", [1, 3])
def test_max_in_flight_is_respected(most: int) -> None:
    bus = BrokerHarness()
    reader = connect_version2(bus, subscribe(1, 5, max_in_flight=most))
    connect_version2(bus, publish(1, 0, *numbered(10)))
    assert reader.receive_message_ids() == list(range(most))
    reader.send(ack(5, 0, 1))
    assert reader.receive_message_ids() == [most]
    reader.send(nack(5, 1, 2, 0))
    assert reader.receive_message_ids() == [1]


def test_delayed_nack_frees_in_flight_capacity() -> None:
    bus = BrokerHarness()
    reader = connect_version2(bus, subscribe(1, 5, max_in_flight=2))
    connect_version2(bus, publish(1, 0, *numbered(10)))
    assert reader.receive_message_ids() == [0, 1]
    reader.send(nack(5, 0, 2, 60_000))
    assert bus.broker.end_turn().flush
    assert reader.receive_message_ids() == [2, 3]
    bus.broker.clock.now += 61
    bus.broker.run_due_wakeups()
    assert reader.receive_message_ids() == []  # They must not be sent before more may be in flight.
    reader.send(ack(5, 2, 3))
    assert reader.receive_message_ids() == [0]
    reader.send(ack(5, 0, 1))
    assert [(m.message_id, m.attempt) for m in reader.receive_deliveries()] == [(1, 2)]
    reader.send(ack(5, 1, 2), ack(5, 3, 4))
    assert reader.receive_message_ids() == [4, 5]


def test_inherited_messages_respect_max_in_flight() -> None:
    bus = BrokerHarness()
    first_reader = connect_version2(bus, subscribe(1, 5), publish(1, 0, *numbered(9)))
    assert len(first_reader.receive_message_ids()) == 9
    first_reader.disconnect()
    reader = connect_version2(bus, subscribe(1, 5, max_in_flight=2))
    for first in range(0, 8, 2):
        assert [(m.message_id, m.attempt) for m in reader.receive_deliveries()] == [
            (first, 2),
            (first + 1, 2),
        ]
        reader.send(ack(5, first, first + 2))


def test_in_flight_bytes_limit_ignores_delayed_messages() -> None:
    bus = BrokerHarness()
    bus.skips_checks = True
    reader = connect_version2(bus, subscribe(1, 5))
    writer = connect_version2(bus)
    size, count = 900_000, 0
    for _ in range(3 * IN_FLIGHT_BYTES // size):
        writer.send(publish(1, count, b"x" * size))
        count += 1
    received = reader.receive_message_ids()
    assert len(received) * size < IN_FLIGHT_BYTES + 3 * size
    reader.send(nack(5, 0, 1, 3_600_000))
    total = len(received)
    received.remove(0)
    while received:
        reader.send(ack(5, received[0], received[-1] + 1))
        received = reader.receive_message_ids()
        total += len(received)
    assert total == count


@pytest.mark.parametrize("slow", ["drop_oldest", "drop_newest"])
def test_slow_subscription_drops_excess_messages(slow: str) -> None:
    bus = BrokerHarness()
    reader = connect_version2(bus, subscribe(1, 5, slow=slow, max_pending=4, max_in_flight=2))
    writer = connect_version2(bus, publish(1, 0, b"0", b"1", b"2"))
    assert reader.receive_message_ids() == [0, 1]
    writer.send(publish(1, 3, *numbered(5, start=3)))
    received: list[int] = []
    reader.send(ack(5, 0, 1), ack(5, 1, 2))
    while ids := reader.receive_message_ids():
        received += ids
        reader.send(ack(5, ids[0], ids[-1] + 1))
    assert received == ([6, 7] if slow == "drop_oldest" else [2, 3])
    [subscription] = bus.statistics(1).subscriptions
    assert subscription.dropped == 4
    assert subscription.undelivered == {Reason.SLOW_CONSUMER: 4}
    writer.send(publish(1, 8, b"8"))
    assert reader.receive_message_ids() == [8]


@pytest.mark.parametrize("slow", ["drop_oldest", "drop_newest", "disconnect"])
def test_unmatched_messages_do_not_count_towards_pending_limit(slow: str) -> None:
    bus = BrokerHarness()
    reader = connect_version2(bus, subscribe(1, 5, slow=slow, max_pending=2, channels=["a"]))
    contents = [channel_envelope("ba"[n % 10 == 0], b"%d" % n) for n in range(20)]
    writer = connect_version2(bus, publish_envelopes(1, 0, *contents))
    assert reader.receive_message_ids() == [0, 10]
    writer.send(publish_envelopes(1, 20, *contents[:10]))
    bus.broker.end_turn()
    if slow == "disconnect":
        assert reader.receive_error_codes() == ["slow_consumer"]
        return
    reader.send(ack(5, 0, 20))
    assert reader.receive_message_ids() == []
    assert bus.statistics(1).dropped == {Reason.SLOW_CONSUMER: 1}
    writer.send(publish_envelopes(1, 30, *contents[:10]))
    assert reader.receive_message_ids() == [30]


def test_disconnect_error_names_subscribe_request() -> None:
    bus = BrokerHarness()
    reader = connect_version2(bus, subscribe(1, 5, 77, slow="disconnect", max_pending=4))
    writer = connect_version2(bus, publish(1, 0, *numbered(4)))
    assert len(reader.receive_deliveries()) == 4
    writer.send(publish(1, 4, b"x"))
    bus.broker.end_turn()
    [error] = reader.receive_replies()
    assert (error.class_id, error.message_id, error.last_field) == (1, 77, SUBSCRIBE)
    assert (error.content["code"], error.content["fatal"]) == ("slow_consumer", False)
    assert bus.statistics(1).subscriptions == ()
    assert reader.session.subscriptions == {}


@pytest.mark.parametrize("options", [{}, {"group": "g"}])
def test_disconnected_slow_consumer_drops_its_messages(
    options: dict[str, object],
) -> None:
    for other_count in (0, 1):
        bus = BrokerHarness()
        terms = options | {"slow": "disconnect", "max_pending": 3}
        reader, other_peer = connect_version2(bus, subscribe(1, 5, **terms)), connect_version2(bus)
        other_peer.send(*[subscribe(1, 6)] * other_count)
        connect_version2(bus, publish(1, 0, *numbered(6)))
        bus.broker.end_turn()
        assert reader.receive_error_codes() == ["slow_consumer"]
        assert bus.statistics(1).dropped == ({Reason.SLOW_CONSUMER: 6} if other_count else {})
        assert connect_version2(bus, subscribe(1, 5)).receive_message_ids() == (
            [] if other_count else list(range(6))
        )


def test_two_slow_consumers_are_disconnected_while_publisher_is_blocked() -> None:
    bus = BrokerHarness(class_messages=6)
    slow = [
        connect_version2(bus, subscribe(1, 5, slow="disconnect", max_pending=5)) for _ in range(2)
    ]
    reader = connect_version2(bus, subscribe(1, 5))
    writer = connect_version2(
        bus, publish(1, 0, *numbered(5)), publish(1, 5, *numbered(7, start=5))
    )
    bus.broker.end_turn()
    assert [peer.receive_error_codes() for peer in slow] == [["slow_consumer"]] * 2
    received: list[bytes] = []
    while messages := reader.receive_deliveries():
        received += [message.content for message in messages]
        reader.send(ack(5, messages[0].message_id, messages[-1].message_id + 1))
        bus.broker.end_turn()
    assert received == numbered(12)
    assert not writer.session.parked_messages


# Acks of unsent messages --------------------------------------------------------------------------


def test_huge_ranges_are_cheap_and_apply_to_sent_messages() -> None:
    bus = BrokerHarness()
    reader = connect_version2(bus, subscribe(1, 5), subscribe(1, 6, group="g"))
    connect_version2(bus, publish(1, 0, *numbered(3)))
    assert len(reader.receive_deliveries()) == 6
    for number in (5, 6):
        reader.send(working(number, 0, ID_COUNT), nack(number, 0, ID_COUNT, 0))
    assert len(reader.receive_deliveries()) == 6
    for number in (5, 6):
        reader.send(ack(number, 0, ID_COUNT))
    assert bus.statistics(1).ring.message_count == 0
    assert bus.broker.refusal_counts == {Reason.ACK_UNSENT: 6}


# Fetch and Deliver -------------------------------------------------------------------------------


def test_fetch_does_not_affect_subscriptions() -> None:
    bus = BrokerHarness()
    reader = connect_version2(bus, subscribe(1, 5), publish(1, 0, *numbered(4)))
    first_bytes = reader.read_bytes(150)
    reader.send(json_request(FETCH, 1, 3, first=1, count=2), json_request(FETCH, 1, 4, first=9))
    reader.partial = first_bytes + reader.partial
    messages, replies = reader.receive_all()
    assert [m.message_id for m in messages if m.number == 5] == [0, 1, 2, 3]
    assert [(m.message_id, m.attempt) for m in messages if m.number == 0] == [(1, 0), (2, 0)]
    answers = [reply.content for reply in replies if reply.kind == "fetch"]
    assert answers == [
        {"first": 1, "next": 3, "floor": 0, "head": 4},
        {"first": 4, "next": 4, "floor": 0, "head": 4},
    ]


def test_concurrent_fetches_use_memory_of_one() -> None:
    bus = BrokerHarness(frame_bytes=100_000, pending_bytes=100_000 + RECEIVE_BYTES)
    bus.skips_checks = True
    peer = connect_version2(bus)
    peer.send(publish(1, 0, *[b"x" * 90_000] * 15))
    peer.receive_replies()
    peer.send(b"".join(json_request(FETCH, 1, n) for n in range(100)))
    bus.broker.end_turn()
    outbox, at, most = peer.session.outbox, bytearray(), 0
    while piece := outbox.peek(0):
        most = max(most, outbox.pending_bytes)
        at += piece[:50_000]
        outbox.mark_sent(min(len(piece), 50_000), 0)
    answered = [frame for frame in split_frames(bytes(at))[0] if frame[:1] == b"F"]
    assert [parse_frame(frame)[2] for frame in answered] == list(range(100))
    assert most < 2 * 1024 * 1024


def test_too_many_concurrent_fetches_close_session() -> None:
    bus = BrokerHarness(frame_bytes=100_000, pending_bytes=100_000 + RECEIVE_BYTES)
    bus.skips_checks = True
    assert (
        connect_version2(bus).send_refused(json_request(FETCH, 1, 3) * 10_000)
        is Reason.PENDING_LIMIT
    )


def test_largest_sessions_are_closed_at_total_pending_limit() -> None:
    most = 100_000 + RECEIVE_BYTES
    limits = Limits(frame_bytes=100_000, pending_bytes=most, total_pending_bytes=most)
    bus = BrokerHarness(Settings(limits=limits))
    bus.skips_checks = True
    peers = [connect_version2(bus) for _ in range(3)]
    halves = [50_000, 90_000, 70_000]
    for peer, size in zip(peers, halves, strict=True):
        peer.send(json_request(FETCH, 1, 3) * 2000, b"1" * size)
    assert bus.broker.tick() == []
    heavy = connect_version2(bus, json_request(FETCH, 1, 3) * 4000)
    ((cut, error),) = bus.broker.tick()
    assert cut is heavy.session
    assert error.reason is Reason.PENDING_LIMIT
    assert "has the most" in error.sentence


def test_total_pending_limit_is_checked_before_next_tick() -> None:
    most = 500_000 + RECEIVE_BYTES
    limits = Limits(frame_bytes=500_000, pending_bytes=most, total_pending_bytes=most)
    bus = BrokerHarness(Settings(limits=limits))
    bus.skips_checks = True
    peers = [connect_version2(bus) for _ in range(6)]
    for peer in peers:
        peer.send(b"1" * 400_000)
    assert bus.broker.end_turn().close == []
    for peer in peers:
        peer.send(b"1" * 90_000)
    cut = bus.broker.end_turn().close
    assert {error.reason for _, error in cut} == {Reason.PENDING_LIMIT}
    assert {session for session, _ in cut} <= {peer.session for peer in peers}


@pytest.mark.parametrize("most", [1, 5, 13, 14, 40])
def test_deliver_frames_are_correct_after_cut_at_any_byte(most: int) -> None:
    bus = BrokerHarness()
    writer = connect_version2(bus, classes=(1, 2))
    reader = connect_version2(
        bus,
        subscribe(1, 1, channels=["a.*"]),
        subscribe(1, 2),
        subscribe(2, 3, group="g"),
        subscribe(2, 4, max_in_flight=2),
    )
    replies = reader.receive_replies()
    assert len(replies) == 4
    channels = ["a.x", "b", "a.y"]
    number = 0
    data = b""
    for turn in range(6):
        contents = [channel_envelope(channels[n % 3], b"%d" % n) for n in range(turn + 1)]
        writer.send(publish_envelopes(1, number, *contents), publish(2, number + turn + 1, b"p"))
        number += turn + 2
        data += reader.read_bytes(most)
        reader.send(json_request(FETCH, 2, 3, count=1), nack(2, 0, 2, 0))
        bus.tick(turn)
    for _ in range(2):  # A member that was unresponsive receives messages after it has caught up.
        while piece := reader.read_bytes(most):
            data += piece
        bus.tick()
    reader.partial = data
    messages, _ = reader.receive_all()
    first_time = [m for m in messages if m.attempt == 1]
    first_ids = [m.message_id for m in first_time if m.number == 1]
    second_ids = [m.message_id for m in first_time if m.number == 2]
    assert second_ids == list(range(21))
    assert first_ids == sorted(first_ids)
    assert {m.class_id for m in messages if m.number in (1, 2)} == {1}
    assert {m.class_id for m in messages if m.number in (0, 3, 4)} == {2}
    assert [m.message_id for m in first_time if m.number == 3] == list(range(6))
    assert [m.message_id for m in first_time if m.number == 4] == [0, 1]


def test_filtered_subscription_yields_to_others_of_its_session() -> None:
    bus = BrokerHarness()
    reader = connect_version2(bus, subscribe(1, 1, channels=["a"]), subscribe(2, 2), classes=(1, 2))
    reader.receive_replies()
    contents = [channel_envelope("ab"[n % 2], b"x" * 20_000) for n in range(60)]
    writer = connect_version2(bus, publish_envelopes(1, 0, *contents), classes=(1, 2))
    writer.send(publish(2, 60, b"x"))
    numbers = [m.number for m in reader.receive_deliveries()]
    assert numbers.index(2) < len(numbers) - 1
    assert sorted(set(numbers)) == [1, 2]


# Retention ----------------------------------------------------------------------------------------


def create_retaining_bus(
    full_policy: FullPolicy = FullPolicy.BLOCK, **keep: float
) -> BrokerHarness:
    limits = Limits(class_messages=100)
    return BrokerHarness(Settings(limits=limits, keep=Retention(**keep), full_policy=full_policy))  # type: ignore[arg-type]


def test_retention_by_count() -> None:
    bus = create_retaining_bus(messages=5)
    reader = connect_version2(bus, subscribe(1, 5), publish(1, 0, *numbered(20)))
    assert len(reader.receive_message_ids()) == 20
    reader.send(ack(5, 0, 20))
    assert connect_version2(bus, subscribe(1, 5, start="earliest")).receive_message_ids() == list(
        range(15, 20)
    )
    peer = connect_version2(bus, json_request(FETCH, 1, 3, first=17))
    assert [m.message_id for m in peer.receive_deliveries()] == [17, 18, 19]


def test_retention_by_size() -> None:
    bus = create_retaining_bus(bytes=5 * 113)
    reader = connect_version2(bus, subscribe(1, 5), publish(1, 0, *numbered(20, size=100)))
    assert len(reader.receive_message_ids()) == 20
    reader.send(ack(5, 0, 20))
    assert bus.statistics(1).ring.message_count == 5


def test_retention_by_age() -> None:
    bus = create_retaining_bus(seconds=60)
    reader = connect_version2(bus, subscribe(1, 5))
    writer = connect_version2(bus)
    for n in range(5):
        writer.send(publish(1, n, b"x"))
        bus.broker.clock.now += 30
    assert len(reader.receive_message_ids()) == 5
    reader.send(ack(5, 0, 5))
    assert bus.statistics(1).ring.floor == 3
    bus.broker.clock.now += 31
    bus.tick()
    assert bus.statistics(1).ring.floor == 5


def test_full_class_drops_retained_messages_first() -> None:
    bus = create_retaining_bus(messages=1000)
    reader = connect_version2(bus, subscribe(1, 5))
    writer = connect_version2(bus, publish(1, 0, *numbered(90, size=9)))
    assert len(reader.receive_message_ids()) == 90
    reader.send(ack(5, 0, 80))
    writer.send(publish(1, 90, *numbered(85, size=9)))
    assert not writer.session.parked_messages
    assert bus.statistics(1).ring.floor == 75
    writer.send(publish(1, 175, *numbered(50, size=9)))
    assert bus.statistics(1).ring.floor == 80
    assert writer.session.parked_messages
    assert len(reader.receive_message_ids()) == 90
