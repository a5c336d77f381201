"""A class that is full: who waits, what is dropped, and what is counted of it."""

from __future__ import annotations

import pytest

from simplebus.core.broker.broker import FullPolicy, Settings
from simplebus.core.errors import Reason
from simplebus.core.limits import RECEIVE_BYTES, RING_BYTES_MIN, RING_IDLE_TICKS, Limits
from tests.behaviour import wire_peer_v2
from tests.behaviour.wire_peer import (
    BrokerHarness,
    ack,
    connect,
    numbered,
    publish,
    subscribe,
)

CLASS_BYTES_MIN = 4 * RING_BYTES_MIN


def full(policy: FullPolicy, **limits: int) -> BrokerHarness:
    return BrokerHarness(
        Settings(limits=Limits(**{"class_messages": 10, **limits}), full_policy=policy)
    )


def test_block_keeps_what_does_not_fit_until_it_does() -> None:
    bus = full(FullPolicy.BLOCK)
    peer = bus.peer(connect(1), subscribe(1))
    publisher = bus.peer(publish(1, *numbered(14)))
    assert bus.statistics(1).blocked_sessions == 1
    assert bus.broker.statistics().parked_bytes == sum(13 + len(p) for p in numbered(4, start=10))
    assert peer.receive_ids(1) == list(range(10))
    peer.send(ack(1, 0, 3))
    assert peer.receive_ids(1) == [10, 11, 12]
    assert bus.broker.drain_resumed() == []
    peer.send(ack(1, 3, 4))
    assert bus.broker.drain_resumed() == [publisher.session]
    assert bus.broker.drain_resumed() == []
    assert peer.receive_ids(1) == [13]
    assert bus.broker.statistics().parked_bytes == 0


def test_who_waits_longest_goes_first_and_everybody_keeps_its_order() -> None:
    bus = full(FullPolicy.BLOCK)
    peer = bus.peer(connect(1), subscribe(1))
    bus.peer(publish(1, *numbered(12)))
    bus.peer(publish(1, b"second"))
    bus.peer(publish(1, b"third", b"third too"))
    heard: list[bytes] = []
    while messages := peer.receive_messages():
        heard += [message.payload for message in messages]
        peer.send(ack(1, messages[0].message_id, messages[0].message_id + 1))
        if len(messages) > 1:
            peer.send(ack(1, messages[1].message_id, messages[-1].message_id + 1))
    assert heard == [*numbered(12), b"second", b"third", b"third too"]


def test_what_a_blocked_publisher_says_to_other_classes_waits_its_turn() -> None:
    bus = full(FullPolicy.BLOCK)
    peer = bus.peer(connect(1, 2), subscribe(1), subscribe(2))
    blocked = bus.peer(publish(1, *numbered(11)) + publish(2, b"behind"))
    other = bus.peer(publish(2, b"not behind"))
    heard = peer.receive_messages()
    assert [m.payload for m in heard if m.class_id == 2] == [b"not behind"]
    peer.send(ack(1, 0, 1))
    assert {(m.class_id, m.payload) for m in peer.receive_messages()} == {
        (1, b"10."),
        (2, b"behind"),
    }
    assert bus.broker.drain_resumed() == [blocked.session]
    assert not other.session.parked_messages


def test_two_full_classes_let_go_one_after_the_other() -> None:
    bus = full(FullPolicy.BLOCK)
    peer = bus.peer(connect(1, 2), subscribe(1), subscribe(2))
    bus.peer(publish(1, *numbered(10)), publish(2, *numbered(10)))
    both = bus.peer(publish(1, b"one"), publish(2, b"two"), publish(1, b"three"))
    peer.receive_messages()
    peer.send(ack(2, 0, 10))
    assert peer.receive_messages() == []
    peer.send(ack(1, 0, 1))
    assert [m.payload for m in peer.receive_messages()] == [b"one", b"two"]
    assert [c.blocked_sessions for c in bus.broker.statistics().classes] == [1, 0]
    peer.send(ack(1, 1, 2))
    assert [m.payload for m in peer.receive_messages()] == [b"three"]
    assert bus.broker.drain_resumed() == [both.session]


def test_acks_behind_a_blocked_publishers_messages_are_applied_at_once() -> None:
    # A client that publishes and subscribes on one connection cannot block itself.
    bus = full(FullPolicy.BLOCK)
    peer = bus.peer(connect(1), subscribe(1), publish(1, *numbered(10)))
    assert len(peer.receive_messages()) == 10
    peer.send(publish(1, *numbered(5, start=10)) + ack(1, 0, 10))
    assert peer.receive_ids(1) == [10, 11, 12, 13, 14]
    assert not peer.session.parked_messages


def test_who_is_blocked_again_in_the_same_read_is_not_unblocked() -> None:
    bus = full(FullPolicy.BLOCK)
    peer = bus.peer(connect(1), subscribe(1), publish(1, *numbered(10)))
    assert len(peer.receive_messages()) == 10
    again = publish(1, b"a") + ack(1, 0, 1) + publish(1, b"b") + ack(1, 1, 2) + publish(1, b"c")
    peer.send(again)
    assert peer.session.parked_messages
    assert bus.broker.drain_resumed() == []
    peer.send(ack(1, 2, 3))
    assert bus.broker.drain_resumed() == [peer.session]


def test_more_parked_bytes_than_allowed_end_the_session_but_not_its_messages() -> None:
    bus = full(FullPolicy.BLOCK, frame_bytes=100_000, pending_bytes=100_000 + RECEIVE_BYTES)
    peer = bus.peer(connect(1), subscribe(1))
    publisher = bus.peer()
    sent = numbered(15 + 2 * RECEIVE_BYTES // 90_000, size=90_000)
    assert publisher.send_refused(publish(1, *sent)) is Reason.PENDING_LIMIT
    received = publisher.session.receiver.frame_count
    heard: list[bytes] = []
    while messages := peer.receive_messages():
        heard += [message.payload for message in messages]
        peer.send(ack(1, messages[0].message_id, messages[-1].message_id + 1))
    assert heard == sent[:received]


def test_messages_parked_by_a_peer_that_left_are_stored_when_there_is_room() -> None:
    bus = full(FullPolicy.BLOCK)
    peer = bus.peer(connect(1), subscribe(1))
    publisher = bus.peer(publish(1, *numbered(13)))
    publisher.disconnect()
    used = bus.broker.budget.used_bytes
    assert peer.receive_ids(1) == list(range(10))
    peer.send(ack(1, 0, 10))
    assert peer.receive_ids(1) == [10, 11, 12]
    assert bus.broker.drain_resumed() == []
    assert bus.broker.budget.used_bytes < used


def test_parked_messages_without_memory_to_keep_them_are_counted() -> None:
    bus = full(
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
@pytest.mark.parametrize("somebody_waits", [False, True])
def test_what_is_kept_for_those_who_left_gives_way_before_it_blocks_a_class_for_good(
    somebody_waits: bool, patterns: list[str]
) -> None:
    # Two messages are kept that would leave too little memory for the ring to take either of them,
    # or the long message in front of them.
    bus = full(
        FullPolicy.BLOCK,
        class_messages=4,
        frame_bytes=100_000,
        class_bytes=CLASS_BYTES_MIN,
        total_bytes=CLASS_BYTES_MIN,
    )
    durable = wire_peer_v2.subscribe(2, 5, durable="d", channels=patterns)
    wire_peer_v2.connect_version2(bus, durable, classes=(2,)).disconnect()
    peer = bus.peer(connect(1), subscribe(1), publish(1, *numbered(4)))
    if somebody_waits:
        bus.peer(publish(1, b"y" * 90_000))
    bus.peer(publish(1, *numbered(2, size=95_000))).disconnect()
    assert peer.receive_ids(1) == [0, 1, 2, 3]
    peer.send(ack(1, 0, 4))
    assert bus.statistics(1).dropped == {}
    bus.tick(2 * RING_IDLE_TICKS)
    assert bus.statistics(1).dropped == {Reason.UNDELIVERED_AT_CLOSE: 2}
    peer.send(publish(1, b"next"))
    heard = peer.receive_payloads()
    assert heard == [b"y" * 90_000, b"next"][1 - somebody_waits :]


def test_a_peer_that_leaves_may_make_the_room_for_its_own_messages() -> None:
    # It subscribes, acknowledges nothing, and has messages parked for the class it holds back.
    bus = full(FullPolicy.BLOCK)
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


def test_a_peer_that_left_is_neither_ready_nor_unblocked() -> None:
    # Its leaving makes room in one class, for messages of another class that it subscribes to.
    bus = full(FullPolicy.BLOCK)
    other = bus.peer(connect(1, 2), subscribe(1))
    leaving = bus.peer(subscribe(1), subscribe(2), publish(1, *numbered(11)) + publish(2, b"two"))
    assert len(other.receive_messages()) == 10
    other.send(ack(1, 0, 10))
    bus.broker.drain_writable()
    leaving.disconnect()
    assert bus.broker.drain_writable() == [other.session.session_id]
    assert bus.broker.drain_resumed() == []
    assert other.receive_ids(1) == [10]
    assert bus.peer(subscribe(2)).receive_payloads() == [b"two"]


def test_drop_newest_counts_what_it_does_not_store() -> None:
    bus = full(FullPolicy.DROP_NEWEST)
    peer = bus.peer(connect(1), subscribe(1), publish(1, *numbered(14)))
    assert bus.statistics(1).dropped == {Reason.DROP_NEWEST: 4}
    assert peer.receive_payloads() == numbered(10)
    peer.send(ack(1, 0, 10), publish(1, b"next"))
    assert peer.receive_ids(1) == [10]


def test_drop_oldest_counts_what_it_takes_away() -> None:
    bus = full(FullPolicy.DROP_OLDEST)
    peer = bus.peer(connect(1), subscribe(1), publish(1, *numbered(10)))
    peer.send(publish(1, *numbered(4, start=10)))
    assert bus.statistics(1).dropped == {Reason.DROP_OLDEST: 4}
    assert [(m.message_id, m.payload) for m in peer.receive_messages()] == list(
        zip(range(4, 14), numbered(10, start=4), strict=True)
    )
    [subscription] = bus.statistics(1).subscriptions
    assert (subscription.dropped, subscription.delivered) == (4, 10)


def test_drop_oldest_takes_away_what_is_in_flight_and_does_not_send_it_again() -> None:
    bus = full(FullPolicy.DROP_OLDEST)
    peer = bus.peer(connect(1), subscribe(1), publish(1, *numbered(10)))
    assert len(peer.receive_messages()) == 10
    peer.send(publish(1, b"x", b"y"))
    assert peer.receive_ids(1) == [10, 11]
    bus.tick(6)
    assert peer.receive_ids(1) == list(range(2, 12))
    peer.send(ack(1, 0, 12))
    [subscription] = bus.statistics(1).subscriptions
    assert (subscription.dropped, subscription.acknowledged, subscription.in_flight) == (2, 10, 0)


def test_drop_oldest_drops_for_nobody_too() -> None:
    bus = full(FullPolicy.DROP_OLDEST)
    bus.peer(connect(1), publish(1, *numbered(25)))
    assert bus.statistics(1).dropped == {Reason.DROP_OLDEST: 15}
    assert bus.peer(subscribe(1)).receive_ids(1) == list(range(15, 25))


def test_drop_oldest_releases_what_it_reaches_that_is_acknowledged() -> None:
    # The oldest are in flight, those behind them acknowledged: room is made up to the next gap.
    bus = full(FullPolicy.DROP_OLDEST)
    peer = bus.peer(connect(1), subscribe(1), publish(1, *numbered(10)))
    assert len(peer.receive_messages()) == 10
    peer.send(ack(1, 2, 6))
    peer.send(publish(1, b"x", b"y"))
    assert bus.statistics(1).ring.floor == 6
    assert bus.statistics(1).dropped == {Reason.DROP_OLDEST: 2}
    peer.send(publish(1, *numbered(4)))
    assert bus.statistics(1).dropped == {Reason.DROP_OLDEST: 2}


def test_drop_oldest_drops_no_more_than_it_must() -> None:
    # One long message makes the room that many short ones need.
    bus = full(
        FullPolicy.DROP_OLDEST,
        class_messages=10_000,
        frame_bytes=100_000,
        class_bytes=CLASS_BYTES_MIN,
    )
    bus.peer(connect(1), publish(1, *numbered(4, size=60_000)))
    bus.peer(publish(1, *numbered(60, size=900)))
    assert bus.statistics(1).dropped == {Reason.DROP_OLDEST: 1}
    assert bus.statistics(1).ring.message_count == 63


def test_drop_oldest_drops_the_new_ones_when_other_classes_hold_the_memory() -> None:
    bus = full(
        FullPolicy.DROP_OLDEST,
        frame_bytes=100_000,
        class_bytes=CLASS_BYTES_MIN,
        total_bytes=CLASS_BYTES_MIN,
    )
    bus.peer(connect(1, 2), publish(1, *numbered(3, size=60_000)))
    assert bus.statistics(1).dropped == {}
    bus.peer(publish(2, b"a", b"b"))
    assert bus.statistics(2).dropped == {Reason.DROP_NEWEST: 2}


def test_a_class_blocked_by_the_memory_of_others_goes_on_when_they_give_it_back() -> None:
    bus = full(
        FullPolicy.BLOCK,
        frame_bytes=100_000,
        class_bytes=CLASS_BYTES_MIN,
        total_bytes=CLASS_BYTES_MIN,
    )
    peer = bus.peer(connect(1, 2), subscribe(1), publish(1, *numbered(3, size=60_000)))
    publisher = bus.peer(publish(2, b"a"))
    assert publisher.session.parked_messages
    peer.receive_messages()
    peer.send(ack(1, 0, 3))
    bus.tick(2 * RING_IDLE_TICKS)
    assert not publisher.session.parked_messages
    assert bus.peer(subscribe(2)).receive_payloads() == [b"a"]


def test_who_holds_back_a_full_class_and_takes_nothing_is_named() -> None:
    bus = full(FullPolicy.BLOCK, stall_seconds=10)
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
