"""Full-class policies: which messages wait or are dropped, and how they are counted."""

from __future__ import annotations

import pytest

from simplebus.core.broker.broker import FullPolicy
from simplebus.core.errors import Reason
from simplebus.core.limits import RECEIVE_BYTES, RING_BYTES_MIN, RING_IDLE_TICKS
from tests.behaviour import wire_peer_v2
from tests.behaviour.wire_peer import ack, connect, create_small_bus, numbered, publish, subscribe

CLASS_BYTES_MIN = 4 * RING_BYTES_MIN


def test_block_queues_messages_until_there_is_space() -> None:
    bus = create_small_bus(FullPolicy.BLOCK)
    peer = bus.peer(connect(1), subscribe(1))
    publisher = bus.peer(publish(1, *numbered(14)))
    assert bus.statistics(1).blocked_sessions == 1
    assert bus.broker.statistics().parked_bytes == sum(13 + len(p) for p in numbered(4, start=10))
    assert peer.receive_ids(1) == list(range(10))
    peer.send(ack(1, 0, 3))
    assert peer.receive_ids(1) == [10, 11, 12]
    assert bus.broker.end_turn().resume == []
    peer.send(ack(1, 3, 4))
    assert bus.broker.end_turn().resume == [publisher.session]
    assert bus.broker.end_turn().resume == []
    assert peer.receive_ids(1) == [13]
    assert bus.broker.statistics().parked_bytes == 0


def test_longest_waiting_publisher_is_served_first() -> None:
    bus = create_small_bus(FullPolicy.BLOCK)
    peer = bus.peer(connect(1), subscribe(1))
    bus.peer(publish(1, *numbered(12)))
    bus.peer(publish(1, b"second"))
    bus.peer(publish(1, b"third", b"third too"))
    received: list[bytes] = []
    while messages := peer.receive_messages():
        received += [message.payload for message in messages]
        peer.send(ack(1, messages[0].message_id, messages[0].message_id + 1))
        if len(messages) > 1:
            peer.send(ack(1, messages[1].message_id, messages[-1].message_id + 1))
    assert received == [*numbered(12), b"second", b"third", b"third too"]


def test_blocked_publisher_waits_with_messages_for_other_classes() -> None:
    bus = create_small_bus(FullPolicy.BLOCK)
    peer = bus.peer(connect(1, 2), subscribe(1), subscribe(2))
    blocked = bus.peer(publish(1, *numbered(11)) + publish(2, b"behind"))
    second = bus.peer(publish(2, b"not behind"))
    received = peer.receive_messages()
    assert [m.payload for m in received if m.class_id == 2] == [b"not behind"]
    peer.send(ack(1, 0, 1))
    assert {(m.class_id, m.payload) for m in peer.receive_messages()} == {
        (1, b"10."),
        (2, b"behind"),
    }
    assert bus.broker.end_turn().resume == [blocked.session]
    assert not second.session.parked_messages


def test_session_waits_for_two_full_classes_in_order() -> None:
    bus = create_small_bus(FullPolicy.BLOCK)
    peer = bus.peer(connect(1, 2), subscribe(1), subscribe(2))
    bus.peer(publish(1, *numbered(10)), publish(2, *numbered(10)))
    writer = bus.peer(publish(1, b"one"), publish(2, b"two"), publish(1, b"three"))
    peer.receive_messages()
    peer.send(ack(2, 0, 10))
    assert peer.receive_messages() == []
    peer.send(ack(1, 0, 1))
    assert [m.payload for m in peer.receive_messages()] == [b"one", b"two"]
    assert [c.blocked_sessions for c in bus.broker.statistics().classes] == [1, 0]
    peer.send(ack(1, 1, 2))
    assert [m.payload for m in peer.receive_messages()] == [b"three"]
    assert bus.broker.end_turn().resume == [writer.session]


def test_acks_behind_blocked_messages_are_applied_at_once() -> None:
    # A client that publishes and subscribes on one connection cannot block itself.
    bus = create_small_bus(FullPolicy.BLOCK)
    peer = bus.peer(connect(1), subscribe(1), publish(1, *numbered(10)))
    assert len(peer.receive_messages()) == 10
    peer.send(publish(1, *numbered(5, start=10)) + ack(1, 0, 10))
    assert peer.receive_ids(1) == [10, 11, 12, 13, 14]
    assert not peer.session.parked_messages


def test_session_blocked_again_in_the_same_read_is_not_resumed() -> None:
    bus = create_small_bus(FullPolicy.BLOCK)
    peer = bus.peer(connect(1), subscribe(1), publish(1, *numbered(10)))
    assert len(peer.receive_messages()) == 10
    mixed_frames = (
        publish(1, b"a") + ack(1, 0, 1) + publish(1, b"b") + ack(1, 1, 2) + publish(1, b"c")
    )
    peer.send(mixed_frames)
    assert peer.session.parked_messages
    assert bus.broker.end_turn().resume == []
    peer.send(ack(1, 2, 3))
    assert bus.broker.end_turn().resume == [peer.session]


def test_pending_limit_ends_the_session_but_keeps_its_messages() -> None:
    bus = create_small_bus(
        FullPolicy.BLOCK, frame_bytes=100_000, pending_bytes=100_000 + RECEIVE_BYTES
    )
    peer = bus.peer(connect(1), subscribe(1))
    publisher = bus.peer()
    sent = numbered(15 + 2 * RECEIVE_BYTES // 90_000, size=90_000)
    assert publisher.send_refused(publish(1, *sent)) is Reason.PENDING_LIMIT
    frame_count = publisher.session.receiver.frame_count
    received: list[bytes] = []
    while messages := peer.receive_messages():
        received += [message.payload for message in messages]
        peer.send(ack(1, messages[0].message_id, messages[-1].message_id + 1))
    assert received == sent[:frame_count]


def test_messages_of_a_closed_session_are_stored_when_there_is_space() -> None:
    bus = create_small_bus(FullPolicy.BLOCK)
    peer = bus.peer(connect(1), subscribe(1))
    publisher = bus.peer(publish(1, *numbered(13)))
    publisher.disconnect()
    used = bus.broker.budget.used_bytes
    assert peer.receive_ids(1) == list(range(10))
    peer.send(ack(1, 0, 10))
    assert peer.receive_ids(1) == [10, 11, 12]
    assert bus.broker.end_turn().resume == []
    assert bus.broker.budget.used_bytes < used


def test_messages_of_a_closed_session_without_memory_are_counted() -> None:
    bus = create_small_bus(
        FullPolicy.BLOCK,
        frame_bytes=100_000,
        class_bytes=CLASS_BYTES_MIN,
        total_bytes=CLASS_BYTES_MIN,
    )
    publisher = bus.peer(connect(1), publish(1, *numbered(6, size=50_000)))
    stored = bus.statistics(1).published
    assert stored < 6
    publisher.disconnect()
    assert bus.statistics(1).dropped == {Reason.UNDELIVERED_AT_CLOSE: 6 - stored}
    assert bus.statistics(1).blocked_sessions == 0
    peer = bus.peer(subscribe(1))
    assert peer.receive_ids(1) == list(range(stored))


@pytest.mark.parametrize("patterns", [[], ["a.*"]])
@pytest.mark.parametrize("has_waiting_publisher", [False, True])
def test_messages_of_closed_sessions_do_not_block_a_class_for_ever(
    has_waiting_publisher: bool, patterns: list[str]
) -> None:
    # Two kept messages leave too little memory for the ring to store them, or the long message in
    # front of them.
    bus = create_small_bus(
        FullPolicy.BLOCK,
        class_messages=4,
        frame_bytes=100_000,
        class_bytes=CLASS_BYTES_MIN,
        total_bytes=CLASS_BYTES_MIN,
    )
    durable = wire_peer_v2.subscribe(2, 5, durable="d", channels=patterns)
    wire_peer_v2.connect_version2(bus, durable, classes=(2,)).disconnect()
    peer = bus.peer(connect(1), subscribe(1), publish(1, *numbered(4)))
    if has_waiting_publisher:
        bus.peer(publish(1, b"y" * 90_000))
    bus.peer(publish(1, *numbered(2, size=95_000))).disconnect()
    assert peer.receive_ids(1) == [0, 1, 2, 3]
    peer.send(ack(1, 0, 4))
    assert bus.statistics(1).dropped == {Reason.UNDELIVERED_AT_CLOSE: 2}
    peer.send(publish(1, b"next"))
    received = peer.receive_payloads()
    assert received == [b"y" * 90_000, b"next"][1 - has_waiting_publisher :]


def test_closing_a_subscriber_makes_space_for_its_own_messages() -> None:
    # The session acknowledges nothing, and its parked messages wait for the class that it blocks.
    bus = create_small_bus(FullPolicy.BLOCK)
    peer = bus.peer(connect(1), subscribe(1))
    selfish = bus.peer(subscribe(1), publish(1, *numbered(14)))
    assert peer.receive_ids(1) == list(range(10))
    peer.send(ack(1, 0, 10))
    assert peer.receive_ids(1) == []
    selfish.disconnect()
    assert peer.receive_ids(1) == [10, 11, 12, 13]
    peer.send(ack(1, 10, 14))
    bus.tick(2 * RING_IDLE_TICKS)
    assert bus.broker.budget.used_bytes == 0


def test_closed_session_is_neither_writable_nor_resumed() -> None:
    # Its leaving makes room in one class, for messages of another class that it subscribes to.
    bus = create_small_bus(FullPolicy.BLOCK)
    staying = bus.peer(connect(1, 2), subscribe(1))
    leaving = bus.peer(subscribe(1), subscribe(2), publish(1, *numbered(11)) + publish(2, b"two"))
    assert len(staying.receive_messages()) == 10
    staying.send(ack(1, 0, 10))
    bus.broker.end_turn()
    leaving.disconnect()
    assert bus.broker.end_turn().flush == [staying.session.session_id]
    assert bus.broker.end_turn().resume == []
    assert staying.receive_ids(1) == [10]
    assert bus.peer(subscribe(2)).receive_payloads() == [b"two"]


def test_drop_newest_counts_dropped_messages() -> None:
    bus = create_small_bus(FullPolicy.DROP_NEWEST)
    peer = bus.peer(connect(1), subscribe(1), publish(1, *numbered(14)))
    assert bus.statistics(1).dropped == {Reason.DROP_NEWEST: 4}
    assert peer.receive_payloads() == numbered(10)
    peer.send(ack(1, 0, 10), publish(1, b"next"))
    assert peer.receive_ids(1) == [10]


def test_drop_oldest_counts_dropped_messages() -> None:
    bus = create_small_bus(FullPolicy.DROP_OLDEST)
    peer = bus.peer(connect(1), subscribe(1), publish(1, *numbered(10)))
    peer.send(publish(1, *numbered(4, start=10)))
    assert bus.statistics(1).dropped == {Reason.DROP_OLDEST: 4}
    assert [(m.message_id, m.payload) for m in peer.receive_messages()] == list(
        zip(range(4, 14), numbered(10, start=4), strict=True)
    )
    [subscription] = bus.statistics(1).subscriptions
    assert (subscription.dropped, subscription.delivered) == (4, 10)


def test_drop_oldest_drops_messages_in_flight() -> None:
    bus = create_small_bus(FullPolicy.DROP_OLDEST)
    peer = bus.peer(connect(1), subscribe(1), publish(1, *numbered(10)))
    assert len(peer.receive_messages()) == 10
    peer.send(publish(1, b"x", b"y"))
    assert peer.receive_ids(1) == [10, 11]
    bus.tick(6)
    assert peer.receive_ids(1) == list(range(2, 12))
    peer.send(ack(1, 0, 12))
    [subscription] = bus.statistics(1).subscriptions
    assert (subscription.dropped, subscription.acknowledged, subscription.in_flight) == (2, 10, 0)


def test_drop_oldest_applies_without_subscriptions() -> None:
    bus = create_small_bus(FullPolicy.DROP_OLDEST)
    bus.peer(connect(1), publish(1, *numbered(25)))
    assert bus.statistics(1).dropped == {Reason.DROP_OLDEST: 15}
    assert bus.peer(subscribe(1)).receive_ids(1) == list(range(15, 25))


def test_drop_oldest_releases_acked_messages() -> None:
    # The oldest messages are in flight, the next ones acknowledged: both are dropped.
    bus = create_small_bus(FullPolicy.DROP_OLDEST)
    peer = bus.peer(connect(1), subscribe(1), publish(1, *numbered(10)))
    assert len(peer.receive_messages()) == 10
    peer.send(ack(1, 2, 6))
    peer.send(publish(1, b"x", b"y"))
    assert bus.statistics(1).ring.floor == 6
    assert bus.statistics(1).dropped == {Reason.DROP_OLDEST: 2}
    peer.send(publish(1, *numbered(4)))
    assert bus.statistics(1).dropped == {Reason.DROP_OLDEST: 2}


def test_drop_oldest_drops_no_more_than_needed() -> None:
    # One long message makes the room that many short ones need.
    bus = create_small_bus(
        FullPolicy.DROP_OLDEST,
        class_messages=10_000,
        frame_bytes=100_000,
        class_bytes=CLASS_BYTES_MIN,
    )
    bus.peer(connect(1), publish(1, *numbered(4, size=60_000)))
    bus.peer(publish(1, *numbered(60, size=900)))
    assert bus.statistics(1).dropped == {Reason.DROP_OLDEST: 1}
    assert bus.statistics(1).ring.message_count == 63


def test_drop_oldest_drops_new_messages_if_other_classes_hold_the_memory() -> None:
    bus = create_small_bus(
        FullPolicy.DROP_OLDEST,
        frame_bytes=100_000,
        class_bytes=CLASS_BYTES_MIN,
        total_bytes=CLASS_BYTES_MIN,
    )
    bus.peer(connect(1, 2), publish(1, *numbered(4, size=64_000)))
    assert bus.statistics(1).dropped == {}
    bus.peer(publish(2, b"a", b"b"))
    assert bus.statistics(2).dropped == {Reason.DROP_NEWEST: 2}


def test_class_blocked_by_other_classes_continues_when_memory_is_released() -> None:
    bus = create_small_bus(
        FullPolicy.BLOCK,
        frame_bytes=100_000,
        class_bytes=CLASS_BYTES_MIN,
        total_bytes=CLASS_BYTES_MIN,
    )
    peer = bus.peer(connect(1, 2), subscribe(1), publish(1, *numbered(4, size=64_000)))
    publisher = bus.peer(publish(2, b"a"))
    assert publisher.session.parked_messages
    peer.receive_messages()
    peer.send(ack(1, 0, 4))
    bus.tick(2 * RING_IDLE_TICKS)
    assert not publisher.session.parked_messages
    assert bus.peer(subscribe(2)).receive_payloads() == [b"a"]


def test_stalled_subscriber_of_a_full_class_is_closed() -> None:
    bus = create_small_bus(FullPolicy.BLOCK, stall_seconds=10)
    slow, fast = (bus.peer(connect(1), subscribe(1)) for _ in range(2))
    bus.peer(publish(1, *numbered(11)))
    assert len(fast.receive_messages()) == 10
    fast.send(ack(1, 0, 10))
    overdue = bus.tick(12)
    assert {(session, error.reason) for session, error in overdue} == {
        (slow.session, Reason.STALLED)
    }
    slow.disconnect()
    assert fast.receive_ids(1) == [10]
