"""Behaviour of the original program, right and wrong, as tests by message ids.

Ranges are half-open. A message is released if no subscription needs it. From outside, a message
counts as released if it is not redelivered when all messages are overdue.
"""

from __future__ import annotations

from simplebus.core.broker.broker import FullPolicy, Settings
from simplebus.core.errors import Reason
from simplebus.core.limits import Limits
from tests.behaviour.wire_peer import (
    BrokerHarness,
    WirePeer,
    ack,
    connect,
    numbered,
    publish,
    subscribe,
)
from tests.support.oracles import DELIMITER, build_frame, group_ids, parse_frame
from tests.support.strategies import MESSAGE

ACK_TIMEOUT = 6

Ranges = list[tuple[int, int]]


def deliver_nine_messages(count: int) -> tuple[BrokerHarness, list[WirePeer]]:
    """Return a bus and `count` subscribers that have received messages 0 to 8 of class 1."""
    bus = BrokerHarness()
    peers = [bus.peer(connect(1), subscribe(1)) for _ in range(count)]
    bus.peer(publish(1, *numbered(9)))
    for peer in peers:
        assert peer.receive_ids(1) == list(range(9))
    return bus, peers


def receive_redelivered(bus: BrokerHarness, peers: list[WirePeer]) -> list[Ranges]:
    """Return the ids that each subscriber receives again when they are overdue."""
    bus.tick(ACK_TIMEOUT)
    return [group_ids(peer.receive_ids(1)) for peer in peers]


def find_released(undelivered: list[Ranges]) -> Ranges:
    """Return the ids that no subscriber receives again."""
    needed = {number for ranges in undelivered for a, b in ranges for number in range(a, b)}
    return group_ids([number for number in range(9) if number not in needed])


# Release of messages ------------------------------------------------------------------------------


def test_message_acked_by_one_of_two_is_not_released() -> None:
    bus, peers = deliver_nine_messages(2)
    peers[0].send(ack(1, 0, 9))
    unacked_ranges = receive_redelivered(bus, peers)
    assert unacked_ranges == [[], [(0, 9)]]
    assert find_released(unacked_ranges) == []
    assert bus.statistics(1).ring.message_count == 9


def test_messages_acked_alternately_are_not_released() -> None:
    bus, peers = deliver_nine_messages(2)
    peers[0].send(ack(1, 0, 2))
    peers[1].send(ack(1, 3, 9))
    unacked_ranges = receive_redelivered(bus, peers)
    assert unacked_ranges == [[(2, 9)], [(0, 3)]]
    assert find_released(unacked_ranges) == []
    assert bus.statistics(1).ring.message_count == 9


def test_message_acked_by_all_is_released() -> None:
    bus, peers = deliver_nine_messages(3)
    peers[0].send(ack(1, 0, 3), ack(1, 4, 8))
    peers[1].send(ack(1, 1, 5))
    peers[2].send(ack(1, 0, 9))
    unacked_ranges = receive_redelivered(bus, peers)
    assert unacked_ranges == [[(3, 4), (8, 9)], [(0, 1), (5, 9)], []]
    assert find_released(unacked_ranges) == [(1, 3), (4, 5)]


def test_ack_after_timeout_counts() -> None:
    bus, peers = deliver_nine_messages(2)
    peers[0].send(ack(1, 0, 3))
    assert receive_redelivered(bus, peers) == [[(3, 9)], [(0, 9)]]
    peers[0].send(ack(1, 6, 7))
    peers[1].send(ack(1, 1, 3))
    bus.tick(2 * ACK_TIMEOUT - ACK_TIMEOUT)
    unacked_ranges = receive_redelivered(bus, peers)
    assert unacked_ranges == [[(3, 6), (7, 9)], [(0, 1), (3, 9)]]
    assert find_released(unacked_ranges) == [(1, 3)]


# Correct behaviour of the original ----------------------------------------------------------------


def test_subscribe_before_connect_is_remembered() -> None:
    bus = BrokerHarness()
    early = bus.peer(subscribe(1))
    publisher = bus.peer(connect(1), publish(1, b"a"))
    assert [message.payload for message in early.receive_messages()] == [b"a"]
    assert publisher.send_refused(publish(2, b"b")) is Reason.UNKNOWN_CLASS


def test_first_subscriber_receives_backlog_second_only_new_messages() -> None:
    bus = BrokerHarness()
    publisher = bus.peer(connect(1), publish(1, b"a", b"b"))
    first = bus.peer(subscribe(1))
    second = bus.peer(subscribe(1))
    assert first.receive_ids(1) == [0, 1]
    publisher.send(publish(1, b"c"))
    assert first.receive_ids(1) == [2]
    assert second.receive_ids(1) == [2]


def test_every_subscriber_receives_and_must_ack_each_message() -> None:
    bus = BrokerHarness()
    peers = [bus.peer(connect(1), subscribe(1)) for _ in range(3)]
    peers[0].send(publish(1, *numbered(5)))
    for peer in peers:
        assert peer.receive_ids(1) == [0, 1, 2, 3, 4]
    for peer in peers[:2]:
        peer.send(ack(1, 0, 5))
        assert bus.statistics(1).ring.message_count == 5
    peers[2].send(ack(1, 0, 5))
    assert bus.statistics(1).ring.message_count == 0


def test_out_of_order_acks_apply_when_gap_closes() -> None:
    bus, [peer] = deliver_nine_messages(1)
    peer.send(ack(1, 5, 9), ack(1, 1, 3))
    assert bus.statistics(1).ring.floor == 0
    peer.send(ack(1, 0, 1))
    assert bus.statistics(1).ring.floor == 3
    peer.send(ack(1, 3, 5))
    assert bus.statistics(1).ring.message_count == 0


def test_message_is_overdue_after_ack_timeout() -> None:
    # A message sent right after a tick has six ticks, right before one a little more than five.
    bus, [peer] = deliver_nine_messages(1)
    bus.tick(ACK_TIMEOUT - 1)
    assert peer.receive_ids(1) == []
    bus.tick()
    assert peer.receive_ids(1) == list(range(9))


# Defects of the original --------------------------------------------------------------------------


def test_incomplete_header_waits_for_more_bytes() -> None:
    # The original found the delimiter in the header and failed.
    bus = BrokerHarness()
    peer = bus.peer(connect(0x3C0D))
    frame = build_frame(
        MESSAGE, class_id=0x3C0D, message_id=0x0A3E3C0D, timer_index=0x0A3E, content=b"hi"
    )
    for length in range(9):
        peer.send(frame[:length], frame[length:])
    peer.send(subscribe(0x3C0D))
    assert [message.payload for message in peer.receive_messages()] == [b"hi"] * 9


def test_full_class_does_not_drop_silently() -> None:
    # The original blocked the publisher for a second and then lost the message.
    for policy in FullPolicy:
        if policy is FullPolicy.SPILL:  # Spilling needs a journal.
            continue
        bus = BrokerHarness(Settings(limits=Limits(class_messages=10), full_policy=policy))
        publisher = bus.peer(connect(1), publish(1, *numbered(25)))
        bus.tick(20)
        subscriber = bus.peer(subscribe(1))
        received: list[bytes] = []
        while messages := subscriber.receive_messages():
            received += [message.payload for message in messages]
            subscriber.send(ack(1, messages[0].message_id, messages[-1].message_id + 1))
        dropped = sum(bus.statistics(1).dropped.values())
        assert len(received) + dropped == 25
        assert (dropped == 0) == (policy is FullPolicy.BLOCK)
        assert not publisher.session.parked_messages


def test_overdue_message_is_sent_once_per_backoff() -> None:
    bus, [peer] = deliver_nine_messages(1)
    bus.tick(ACK_TIMEOUT)
    assert peer.receive_ids(1) == list(range(9))
    for _ in range(100):
        assert peer.read_bytes(1 << 30) == b""
    bus.tick(2 * ACK_TIMEOUT - 1)
    assert peer.read_bytes(1 << 30) == b""
    assert bus.statistics(1).redelivered == 9


def test_redelivered_frame_has_current_tick() -> None:
    # The original kept the first timer index. A backoff that is a multiple of the timeout
    # hides this.
    bus, [peer] = deliver_nine_messages(1)
    bus.tick(ACK_TIMEOUT + 2)
    assert {message.timer_index for message in peer.receive_messages()} == {2}


def test_ack_may_span_many_writes_and_ticks() -> None:
    # The original accepted a range only within one range that it had recorded.
    bus = BrokerHarness()
    peer = bus.peer(connect(1), subscribe(1))
    for number in range(6):
        peer.send(publish(1, b"%d" % number))
        peer.receive_messages()
        bus.tick()
    peer.send(ack(1, 2, 3))
    peer.send(ack(1, 1, 5))
    assert bus.statistics(1).acknowledged == 4
    peer.send(ack(1, 0, 6))
    assert bus.statistics(1).ring.message_count == 0


def test_ack_works_after_another_session_closed() -> None:
    bus, [first, second] = deliver_nine_messages(2)
    first.disconnect()
    second.send(ack(1, 0, 9))
    assert bus.statistics(1).ring.message_count == 0


def test_unacked_messages_of_closed_session_are_released() -> None:
    bus, [first, second] = deliver_nine_messages(2)
    second.send(ack(1, 0, 9))
    first.disconnect()
    assert bus.statistics(1).ring.message_count == 0


def test_unacked_messages_of_last_session_go_to_next() -> None:
    bus, [peer] = deliver_nine_messages(1)
    peer.send(ack(1, 0, 3), ack(1, 5, 7))
    peer.disconnect()
    bus.peer(publish(1, b"new"))
    assert bus.peer(subscribe(1)).receive_ids(1) == [3, 4, 7, 8, 9]


def test_duplicate_subscribe_delivers_once() -> None:
    bus = BrokerHarness()
    peer = bus.peer(subscribe(1), subscribe(1), connect(1), subscribe(1) + subscribe(1))
    peer.send(publish(1, b"a"))
    assert peer.receive_ids(1) == [0]
    bus.tick(ACK_TIMEOUT)
    assert peer.receive_ids(1) == [0]


def test_delimiter_in_payload_truncates_it() -> None:
    # A known limit of version 1: the rest is decoded as the next header.
    bus = BrokerHarness()
    subscriber = bus.peer(connect(1), subscribe(1))
    publisher = bus.peer()
    payload = b"one" + DELIMITER + b"two two two"
    assert publisher.send_refused(publish(1, payload)) is Reason.UNKNOWN_TYPE
    assert [message.payload for message in subscriber.receive_messages()] == [b"one"]


def test_payload_may_end_with_line_end() -> None:
    bus = BrokerHarness()
    peer = bus.peer(connect(1), subscribe(1), publish(1, b"Smith\r\n", b"<\r\n", b"\r\n>"))
    frames = [parse_frame(frame) for frame in peer.receive_frames()]
    assert [content for *_, content in frames[1:]] == [b"Smith\r\n", b"<\r\n", b"\r\n>"]
