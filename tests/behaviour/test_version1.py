"""Version 1 at the broker, driven by bytes and ticks."""

from __future__ import annotations

import pytest

from simplebus.core.broker.broker import Settings
from simplebus.core.errors import Reason
from simplebus.core.limits import (
    CLASS_ID_MAX,
    MESSAGES_MAX,
    RECEIVE_BYTES,
    RING_BYTES_MIN,
    RING_IDLE_TICKS,
    Limits,
)
from simplebus.core.redelivery.ack_window import AckWindow
from tests.behaviour.wire_peer import (
    LARGE_BATCH_COUNT,
    BrokerHarness,
    WirePeer,
    ack,
    connect,
    heartbeat,
    numbered,
    publish,
    subscribe,
)
from tests.support.oracles import ID_COUNT, build_frame, parse_frame
from tests.support.strategies import CONNECT, ack_frame

CLASS_BYTES_MIN = 4 * RING_BYTES_MIN


# Settings ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("ack_timeout", [0, -1, 65536])
def test_ack_timeout_beyond_wire_limit_is_refused(ack_timeout: int) -> None:
    with pytest.raises(ValueError, match="from 1 to 65535"):
        Settings(ack_timeout=ack_timeout)


def test_tick_seconds_must_be_positive() -> None:
    with pytest.raises(ValueError, match="tick_seconds"):
        Settings(tick_seconds=0)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("frame_bytes", 12),
        ("frame_bytes", 0),
        ("class_messages", 0),
        ("class_messages", MESSAGES_MAX + 1),
        ("class_bytes", CLASS_BYTES_MIN - 1),
        ("total_bytes", CLASS_BYTES_MIN),
        ("pending_bytes", 1000),
        ("classes", 65537),
        ("hello_seconds", -1),
        ("stall_seconds", float("nan")),
    ],
)
def test_contradicting_limits_are_refused_by_name(name: str, value: float) -> None:
    small = {} if name == "frame_bytes" else {"frame_bytes": 1000}
    blamed = "class_bytes" if name == "total_bytes" else name
    with pytest.raises(ValueError, match=f"limit {blamed} must be"):
        Limits(**{**small, name: value})  # type: ignore[arg-type]


def test_smallest_limits_are_consistent() -> None:
    limits = Limits(
        frame_bytes=CLASS_BYTES_MIN // 2,
        class_bytes=CLASS_BYTES_MIN,
        total_bytes=CLASS_BYTES_MIN,
        class_messages=1,
        classes=1,
    )
    bus = BrokerHarness(Settings(limits=limits))
    peer = bus.peer(connect(1), subscribe(1), publish(1, b"x" * (CLASS_BYTES_MIN // 2 - 13)))
    assert peer.receive_ids(1) == [0]


# Sessions and Connect ----------------------------------------------------------------------------


def test_session_ids_count_from_zero() -> None:
    bus = BrokerHarness()
    assert [bus.peer().session.session_id for _ in range(3)] == [0, 1, 2]
    bus.peer().disconnect()
    assert bus.peer().session.session_id == 4


def test_connect_reply_has_little_endian_session_id() -> None:
    bus = BrokerHarness()
    bus.peer()
    assert bus.peer(connect(1)).read_bytes(100) == bytes.fromhex(
        "34" + "00" * 8 + "010000003c0d0a3e"
    )


def test_connects_are_answered_in_order() -> None:
    bus = BrokerHarness()
    peer = bus.peer(connect(1) + connect(1) + connect())
    assert peer.receive_frames() == [build_frame(CONNECT, content=bytes(4))] * 3


def test_session_id_equal_to_delimiter_is_skipped() -> None:
    bus = BrokerHarness()
    bus.broker._next_session_id = 1040846139
    peers = [bus.peer(connect()) for _ in range(3)]
    assert [peer.session.session_id for peer in peers] == [1040846139, 1040846141, 1040846142]
    for peer in peers:
        [reply] = peer.receive_frames()
        assert parse_frame(reply)[4] == peer.session.session_id.to_bytes(4, "little")


def test_classes_outlive_their_creator() -> None:
    bus = BrokerHarness()
    bus.peer(connect(1)).disconnect()
    bus.peer(publish(1, b"a"))
    assert bus.peer(subscribe(1)).receive_payloads() == [b"a"]


def test_connect_is_atomic() -> None:
    bus = BrokerHarness(classes=3)
    bus.peer(connect(1))
    assert bus.peer().send_refused(connect(2, 3, 4)) is Reason.TOO_MANY_CLASSES
    assert list(bus.broker.classes) == [1]
    bus.peer(connect(1, 3, 2, 3, 1))
    assert bus.peer().send_refused(publish(4, b"x")) is Reason.UNKNOWN_CLASS


def test_connect_names_at_most_all_classes() -> None:
    bus = BrokerHarness(classes=CLASS_ID_MAX + 1)
    bus.skips_checks = True
    bus.peer(connect(*range(CLASS_ID_MAX + 1)))
    assert len(bus.broker.classes) == CLASS_ID_MAX + 1
    too_many = connect(*[1] * (CLASS_ID_MAX + 2))
    assert bus.peer().send_refused(too_many) is Reason.BAD_CONNECT


def test_refused_connect_starts_no_early_subscription() -> None:
    bus = BrokerHarness(classes=1)
    early = bus.peer(subscribe(5))
    assert bus.peer().send_refused(connect(5, 6)) is Reason.TOO_MANY_CLASSES
    bus.peer(connect(5))
    bus.peer(publish(5, b"x"))
    assert early.receive_ids(5) == [0]


def test_early_subscribers_are_served_in_order() -> None:
    bus = BrokerHarness()
    early = [bus.peer(subscribe(1)) for _ in range(3)]
    early[1].disconnect()
    bus.peer(connect(1), publish(1, b"x"))
    assert early[0].receive_ids(1) == early[2].receive_ids(1) == [0]
    assert [s.session_id for s in bus.statistics(1).subscriptions] == [0, 2]


def test_too_many_pending_replies_close_session() -> None:
    # Each Connect has 15 bytes, and its reply 17.
    bus = BrokerHarness(frame_bytes=1000, pending_bytes=1000 + RECEIVE_BYTES)
    peer = bus.peer(connect() * (RECEIVE_BYTES // 17))
    assert peer.send_refused(connect() * 100) is Reason.PENDING_LIMIT


# Messages ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, LARGE_BATCH_COUNT])
def test_messages_arrive_in_order_unchanged(count: int) -> None:
    bus = BrokerHarness()
    subscriber = bus.peer(connect(1), subscribe(1))
    bus.peer(publish(1, *numbered(count)))
    received = subscriber.receive_messages()
    assert [message.message_id for message in received] == list(range(count))
    assert [message.payload for message in received] == numbered(count)


def test_publisher_receives_its_own_messages() -> None:
    bus = BrokerHarness()
    assert bus.peer(connect(1), subscribe(1), publish(1, b"a")).receive_payloads() == [b"a"]


def test_message_ids_are_per_class() -> None:
    bus = BrokerHarness()
    peer = bus.peer(connect(1, 2), subscribe(1), subscribe(2))
    peer.send(publish(1, b"a") + publish(2, b"b") + publish(1, b"c"))
    received = sorted(peer.receive_messages())
    assert [(m.class_id, m.message_id, m.payload) for m in received] == [
        (1, 0, b"a"),
        (1, 1, b"c"),
        (2, 0, b"b"),
    ]


def test_messages_before_an_error_are_stored() -> None:
    bus = BrokerHarness()
    peer = bus.peer(connect(1))
    assert peer.send_refused(publish(1, b"a") + b"9" * 9 + b"<\r\n>") is Reason.UNKNOWN_TYPE
    assert bus.peer(subscribe(1)).receive_payloads() == [b"a"]


def test_partial_frame_at_disconnect_is_discarded() -> None:
    bus = BrokerHarness()
    peer = bus.peer(connect(1), publish(1, b"a") + publish(1, b"b")[:-1])
    peer.disconnect()
    assert bus.peer(subscribe(1)).receive_payloads() == [b"a"]


def test_slow_subscriber_does_not_delay_others() -> None:
    bus = BrokerHarness()
    slow, fast = (bus.peer(connect(1), subscribe(1)) for _ in range(2))
    for number in range(5):
        bus.peer(publish(1, b"%d" % number))
        assert fast.receive_ids(1) == [number]
        fast.send(ack(1, number, number + 1))
    assert slow.receive_ids(1) == [0, 1, 2, 3, 4]


def test_later_subscription_receives_only_new_messages() -> None:
    bus = BrokerHarness()
    first = bus.peer(connect(1), subscribe(1), publish(1, b"a", b"b"))
    later = bus.peer(subscribe(1))
    assert later.receive_ids(1) == []
    assert first.receive_ids(1) == [0, 1]
    first.send(ack(1, 0, 2))
    assert bus.statistics(1).ring.message_count == 0


def test_backlog_is_that_of_the_last_subscription() -> None:
    bus = BrokerHarness()
    first, second = (bus.peer(connect(1), subscribe(1)) for _ in range(2))
    bus.peer(publish(1, *numbered(9)))
    assert first.receive_ids(1) == second.receive_ids(1) == list(range(9))
    first.send(ack(1, 0, 5))
    second.send(ack(1, 3, 9))
    second.disconnect()
    first.disconnect()
    assert bus.peer(subscribe(1)).receive_ids(1) == [5, 6, 7, 8]


def test_partially_sent_message_goes_to_next_subscription() -> None:
    bus = BrokerHarness()
    peer = bus.peer(connect(1), subscribe(1), publish(1, b"a", b"b"))
    peer.read_bytes(17 + 13 + 3)
    peer.disconnect()
    assert bus.peer(subscribe(1)).receive_ids(1) == [0, 1]


# Acks --------------------------------------------------------------------------------------------


def deliver_ten() -> tuple[BrokerHarness, WirePeer]:
    bus = BrokerHarness()
    peer = bus.peer(connect(1), subscribe(1), publish(1, *numbered(10)))
    assert peer.receive_ids(1) == list(range(10))
    return bus, peer


def encode_acks(*ranges: tuple[int, int], times: int = 1) -> bytes:
    return b"".join(ack(1, first, last) for first, last in ranges) * times


@pytest.mark.parametrize("times", [1, 2, LARGE_BATCH_COUNT])
def test_acks_of_unsent_messages_are_counted_and_ignored(times: int) -> None:
    # As a single frame, in the loop, and with arrays.
    bus, peer = deliver_ten()
    peer.send(encode_acks((10, 12), times=times))
    assert bus.broker.refusal_counts == {Reason.ACK_UNSENT: times}
    peer.send(encode_acks((8, 12), times=times))
    assert bus.broker.refusal_counts == {Reason.ACK_UNSENT: 2 * times}
    peer.send(publish(1, b"10", b"11"))
    assert peer.receive_ids(1) == [10, 11]
    bus.tick(6)
    assert peer.receive_ids(1) == [*range(8), 10, 11]


@pytest.mark.parametrize("times", [1, 2, LARGE_BATCH_COUNT])
def test_acks_without_subscription_are_counted_and_ignored(times: int) -> None:
    bus, peer = deliver_ten()
    unsubscribed_peer = bus.peer(encode_acks((0, 10), times=times))
    peer.send(ack_frame(9, b"0-1") * times)
    assert bus.broker.refusal_counts == {Reason.ACK_UNSUBSCRIBED: 2 * times}
    unsubscribed_peer.send(connect(2))
    assert len(unsubscribed_peer.receive_frames()) == 1
    assert bus.statistics(1).in_flight == 10


@pytest.mark.parametrize("times", [1, 2, LARGE_BATCH_COUNT])
def test_acks_below_floor_are_not_counted(times: int) -> None:
    bus, peer = deliver_ten()
    peer.send(encode_acks((0, 5), times=times))
    peer.send(encode_acks((0, 3), (ID_COUNT - 4, ID_COUNT), times=times))
    assert bus.broker.refusal_counts == {}
    assert bus.statistics(1).ring.floor == 5
    assert bus.statistics(1).acknowledged == 5


def test_timer_index_of_ack_is_ignored() -> None:
    bus, peer = deliver_ten()
    peer.send(build_frame(ord("3"), class_id=1, timer_index=999, message_id=5, content=b"0-10"))
    assert bus.statistics(1).ring.message_count == 0


def test_ack_of_partially_sent_frame_counts() -> None:
    bus = BrokerHarness()
    peer = bus.peer(connect(1), subscribe(1), publish(1, b"a", b"b"))
    first_bytes = peer.read_bytes(17 + 3)
    peer.send(ack(1, 0, 2))
    assert bus.broker.refusal_counts == {Reason.ACK_UNSENT: 1}
    remaining_bytes = peer.read_bytes(1 << 30)
    assert parse_frame((first_bytes + remaining_bytes)[17:31])[4] == b"a"


def set_first_sequence(bus: BrokerHarness, class_id: int, sequence: int) -> None:
    """Start class 1 as if this many messages had been published and acknowledged."""
    cls = bus.broker.classes[class_id]
    cls.ring.floor = cls.ring.head = sequence
    cls.backlog_window = AckWindow(floor=sequence)
    bus.broker.check_invariants()


@pytest.mark.parametrize("times", [1, LARGE_BATCH_COUNT])
def test_ids_wrap_from_publish_to_ack(times: int) -> None:
    bus = BrokerHarness()
    publisher = bus.peer(connect(1))
    set_first_sequence(bus, 1, ID_COUNT - 3)
    publisher.send(publish(1, *numbered(6)))
    peer = bus.peer(subscribe(1))
    assert peer.receive_ids(1) == [ID_COUNT - 3, ID_COUNT - 2, ID_COUNT - 1, 0, 1, 2]
    peer.send(encode_acks((0, 2), times=times))
    bus.tick(6)
    assert peer.receive_ids(1) == [ID_COUNT - 3, ID_COUNT - 2, ID_COUNT - 1, 2]
    peer.send(encode_acks((ID_COUNT - 3, ID_COUNT), times=times))
    assert bus.statistics(1).ring.floor == ID_COUNT + 2
    peer.send(encode_acks((2, 3), (ID_COUNT - 1, ID_COUNT), times=times))
    assert bus.statistics(1).ring.message_count == 0
    assert bus.broker.refusal_counts == {}


def test_last_id_can_be_acked_in_original_form() -> None:
    bus = BrokerHarness()
    bus.peer(connect(1))
    set_first_sequence(bus, 1, ID_COUNT - 1)
    peer = bus.peer(subscribe(1), publish(1, b"a"))
    assert peer.receive_ids(1) == [ID_COUNT - 1]
    peer.send(ack_frame(1, b"2147483647--2147483648"))
    assert bus.statistics(1).ring.message_count == 0


# Ticks, readiness, statistics ---------------------------------------------------------------------


def test_session_is_reported_ready_once() -> None:
    bus = BrokerHarness()
    first, second = (bus.peer(connect(1), subscribe(1)) for _ in range(2))
    ids = [first.session.session_id, second.session.session_id]
    assert bus.broker.end_turn().flush == ids
    assert bus.broker.end_turn().flush == []
    bus.peer(publish(1, b"a"), publish(1, b"b"))
    assert bus.broker.end_turn().flush == ids
    assert first.receive_ids(1) == second.receive_ids(1) == [0, 1]
    second.send(ack(1, 0, 2))
    bus.tick(5)
    assert bus.broker.end_turn().flush == []
    bus.tick()
    assert bus.broker.end_turn().flush == ids[:1]


def test_silent_session_is_reported_by_tick() -> None:
    bus = BrokerHarness(hello_seconds=5)
    silent, polite = bus.peer(), bus.peer(heartbeat())
    assert bus.tick(5) == []
    [(session, error)] = bus.tick()
    assert (session, error.reason) == (silent.session, Reason.HELLO_TIMEOUT)
    assert polite.session.session_id in bus.broker.sessions


def test_close_session_is_idempotent() -> None:
    bus = BrokerHarness()
    peer = bus.peer(connect(1), subscribe(1), subscribe(9))
    peer.disconnect()
    peer.disconnect()
    assert bus.broker.statistics().sessions == 0
    bus.peer(connect(9), publish(9, b"x"))
    assert bus.broker.end_turn().flush == [1]


def test_ack_timeouts_stop_while_the_client_reads_nothing() -> None:
    bus, peer = deliver_ten()
    peer.send(publish(1, b"unread"))
    bus.tick(20)
    assert peer.receive_ids(1) == [10]
    for _ in range(4):  # The original client acks within 1.5 seconds.
        bus.tick()
        assert peer.receive_ids(1) == []
    bus.tick(3)
    assert peer.receive_ids(1) == list(range(11))


def test_ack_timeouts_of_a_slow_reader_continue() -> None:
    bus, peer = deliver_ten()
    peer.send(publish(1, *numbered(100, size=100)))
    for _ in range(6):
        bus.tick()
        peer.partial += peer.read_bytes(1)
    ids = peer.receive_ids(1)
    assert ids[:11] == [10, *range(10)]
    assert ids[11:] == list(range(11, 110))


def test_statistics_include_removed_subscriptions() -> None:
    bus, peer = deliver_ten()
    peer.send(ack(1, 0, 4))
    bus.tick(6)
    assert peer.receive_ids(1) == [4, 5, 6, 7, 8, 9]
    peer.disconnect()
    successor = bus.peer(subscribe(1))
    assert successor.receive_messages() == []
    bus.tick(12)
    assert len(successor.receive_messages()) == 6
    successor.send(ack(1, 4, 6))
    statistics = bus.broker.statistics()
    assert (statistics.published, statistics.delivered, statistics.redelivered) == (10, 10, 12)
    assert (statistics.acknowledged, statistics.in_flight) == (6, 4)
    assert statistics.sessions == 1
    assert statistics.memory_bytes == bus.broker.budget.used_bytes > 0
    [cls] = statistics.classes
    assert (cls.class_id, cls.ring.message_count, len(cls.subscriptions)) == (1, 4, 1)


def test_memory_is_returned_after_all_acks() -> None:
    bus = BrokerHarness()
    peer = bus.peer(connect(1, 2), subscribe(1), subscribe(2))
    for class_id in (1, 2):
        peer.send(publish(class_id, *numbered(1000, size=300)))
    assert len(peer.receive_messages()) == 2000
    for class_id in (1, 2):
        peer.send(b"".join(ack(class_id, i, i + 1) for i in range(500, 1000)))
        peer.send(ack(class_id, 0, 500))
    bus.tick(2 * RING_IDLE_TICKS)
    assert bus.broker.statistics().memory_bytes == 0
    assert [cls.backlog_window.flags_bytes for cls in bus.broker.classes.values()] == [0, 0]
