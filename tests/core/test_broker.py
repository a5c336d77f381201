"""The bus itself, driven by bytes and beats: who is sent what, what is kept, what is counted."""

from __future__ import annotations

import pytest
from oracles import ID_COUNT, build_frame, parse_frame
from strategies import CONNECT, ack_frame

from core import talk2
from core.talk import Bus, Peer, ack, connect, heartbeat, numbered, publish, subscribe
from simplebus.core.acks import AckWindow
from simplebus.core.broker import FullPolicy, Settings
from simplebus.core.errors import Reason
from simplebus.core.limits import (
    MESSAGES_MAX,
    PLAIN_FRAMES_MAX,
    RECEIVE_BYTES,
    RING_BYTES_MIN,
    RING_IDLE_TICKS,
    Limits,
)

MANY = 4 * PLAIN_FRAMES_MAX
CLASS_BYTES_MIN = 4 * RING_BYTES_MIN


def payloads(peer: Peer) -> list[bytes]:
    return [message.payload for message in peer.hear()]


# Settings ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("ack_timeout", [0, -1, 65536])
def test_an_ack_timeout_that_the_wire_cannot_carry_is_refused(ack_timeout: int) -> None:
    with pytest.raises(ValueError, match="from 1 to 65535"):
        Settings(ack_timeout=ack_timeout)


def test_a_tick_takes_time() -> None:
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
def test_limits_that_contradict_each_other_are_refused_by_name(name: str, value: float) -> None:
    small = {} if name == "frame_bytes" else {"frame_bytes": 1000}
    blamed = "class_bytes" if name == "total_bytes" else name
    with pytest.raises(ValueError, match=f"limit {blamed} must be"):
        Limits(**{**small, name: value})  # type: ignore[arg-type]


def test_the_smallest_limits_fit_together() -> None:
    limits = Limits(
        frame_bytes=CLASS_BYTES_MIN // 2,
        class_bytes=CLASS_BYTES_MIN,
        total_bytes=CLASS_BYTES_MIN,
        class_messages=1,
        classes=1,
    )
    bus = Bus(Settings(limits=limits))
    peer = bus.peer(connect(1), subscribe(1), publish(1, b"x" * (CLASS_BYTES_MIN // 2 - 13)))
    assert peer.hear_ids(1) == [0]


# Sessions and Connect ----------------------------------------------------------------------------


def test_session_ids_count_from_zero_whether_or_not_a_connect_comes() -> None:
    bus = Bus()
    assert [bus.peer().session.session_id for _ in range(3)] == [0, 1, 2]
    bus.peer().leave()
    assert bus.peer().session.session_id == 4


def test_a_connect_is_answered_with_the_session_id_in_little_endian() -> None:
    bus = Bus()
    bus.peer()
    assert bus.peer(connect(1)).take(100) == bytes.fromhex("34" + "00" * 8 + "010000003c0d0a3e")


def test_every_connect_is_answered_in_order() -> None:
    bus = Bus()
    peer = bus.peer(connect(1) + connect(1) + connect())
    assert peer.hear_frames() == [build_frame(CONNECT, content=bytes(4))] * 3


def test_the_session_id_that_looks_like_the_delimiter_is_passed_over() -> None:
    bus = Bus()
    bus.broker._next_session_id = 1040846139
    peers = [bus.peer(connect()) for _ in range(3)]
    assert [peer.session.session_id for peer in peers] == [1040846139, 1040846141, 1040846142]
    for peer in peers:
        [reply] = peer.hear_frames()
        assert parse_frame(reply)[4] == peer.session.session_id.to_bytes(4, "little")


def test_classes_belong_to_everybody_and_outlive_who_named_them() -> None:
    bus = Bus()
    bus.peer(connect(1)).leave()
    bus.peer(publish(1, b"a"))
    assert payloads(bus.peer(subscribe(1))) == [b"a"]


def test_a_connect_counts_whole_or_not_at_all() -> None:
    bus = Bus(classes=3)
    bus.peer(connect(1))
    assert bus.peer().is_refused(connect(2, 3, 4)) is Reason.TOO_MANY_CLASSES
    assert list(bus.broker.classes) == [1]
    bus.peer(connect(1, 3, 2, 3, 1))
    assert bus.peer().is_refused(publish(4, b"x")) is Reason.UNKNOWN_CLASS


def test_a_refused_connect_wakes_no_early_subscriber() -> None:
    bus = Bus(classes=1)
    early = bus.peer(subscribe(5))
    assert bus.peer().is_refused(connect(5, 6)) is Reason.TOO_MANY_CLASSES
    bus.peer(connect(5))
    bus.peer(publish(5, b"x"))
    assert early.hear_ids(5) == [0]


def test_early_subscribers_are_served_in_the_order_they_came() -> None:
    bus = Bus()
    early = [bus.peer(subscribe(1)) for _ in range(3)]
    early[1].leave()
    bus.peer(connect(1), publish(1, b"x"))
    assert early[0].hear_ids(1) == early[2].hear_ids(1) == [0]
    assert [s.session_id for s in bus.statistics(1).subscriptions] == [0, 2]


def test_more_replies_than_may_be_pending_end_the_session() -> None:
    # Each Connect has 15 bytes, and its reply 17.
    bus = Bus(frame_bytes=1000, pending_bytes=1000 + RECEIVE_BYTES)
    peer = bus.peer(connect() * (RECEIVE_BYTES // 17))
    assert peer.is_refused(connect() * 100) is Reason.PENDING_LIMIT


# Messages ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, MANY])
def test_messages_arrive_in_order_with_consecutive_ids_and_the_same_bytes(count: int) -> None:
    bus = Bus()
    subscriber = bus.peer(connect(1), subscribe(1))
    bus.peer(publish(1, *numbered(count)))
    heard = subscriber.hear()
    assert [message.message_id for message in heard] == list(range(count))
    assert [message.payload for message in heard] == numbered(count)


def test_a_publisher_that_subscribes_hears_itself() -> None:
    bus = Bus()
    assert payloads(bus.peer(connect(1), subscribe(1), publish(1, b"a"))) == [b"a"]


def test_classes_number_their_messages_apart() -> None:
    bus = Bus()
    peer = bus.peer(connect(1, 2), subscribe(1), subscribe(2))
    peer.say(publish(1, b"a") + publish(2, b"b") + publish(1, b"c"))
    heard = sorted(peer.hear())
    assert [(m.class_id, m.message_id, m.payload) for m in heard] == [
        (1, 0, b"a"),
        (1, 1, b"c"),
        (2, 0, b"b"),
    ]


def test_messages_of_a_refused_stream_before_the_offence_are_stored() -> None:
    bus = Bus()
    peer = bus.peer(connect(1))
    assert peer.is_refused(publish(1, b"a") + b"9" * 9 + b"<\r\n>") is Reason.UNKNOWN_TYPE
    assert payloads(bus.peer(subscribe(1))) == [b"a"]


def test_a_partial_frame_at_the_end_is_discarded() -> None:
    bus = Bus()
    peer = bus.peer(connect(1), publish(1, b"a") + publish(1, b"b")[:-1])
    peer.leave()
    assert payloads(bus.peer(subscribe(1))) == [b"a"]


def test_a_slow_subscriber_does_not_slow_another() -> None:
    bus = Bus()
    slow, fast = (bus.peer(connect(1), subscribe(1)) for _ in range(2))
    for number in range(5):
        bus.peer(publish(1, b"%d" % number))
        assert fast.hear_ids(1) == [number]
        fast.say(ack(1, number, number + 1))
    assert slow.hear_ids(1) == [0, 1, 2, 3, 4]


def test_a_later_subscription_has_no_part_in_what_came_before() -> None:
    bus = Bus()
    first = bus.peer(connect(1), subscribe(1), publish(1, b"a", b"b"))
    later = bus.peer(subscribe(1))
    assert later.hear_ids(1) == []
    assert first.hear_ids(1) == [0, 1]
    first.say(ack(1, 0, 2))
    assert bus.statistics(1).ring.messages == 0


def test_the_one_that_stays_is_the_one_whose_leftovers_wait() -> None:
    bus = Bus()
    one, two = (bus.peer(connect(1), subscribe(1)) for _ in range(2))
    bus.peer(publish(1, *numbered(9)))
    assert one.hear_ids(1) == two.hear_ids(1) == list(range(9))
    one.say(ack(1, 0, 5))
    two.say(ack(1, 3, 9))
    two.leave()
    one.leave()
    assert bus.peer(subscribe(1)).hear_ids(1) == [5, 6, 7, 8]


def test_a_message_cut_off_in_the_middle_goes_to_the_next_subscription() -> None:
    bus = Bus()
    peer = bus.peer(connect(1), subscribe(1), publish(1, b"a", b"b"))
    peer.take(17 + 13 + 3)
    peer.leave()
    assert bus.peer(subscribe(1)).hear_ids(1) == [0, 1]


# Acks --------------------------------------------------------------------------------------------


def heard_ten() -> tuple[Bus, Peer]:
    bus = Bus()
    peer = bus.peer(connect(1), subscribe(1), publish(1, *numbered(10)))
    assert peer.hear_ids(1) == list(range(10))
    return bus, peer


def acks(*ranges: tuple[int, int], times: int = 1) -> bytes:
    return b"".join(ack(1, first, last) for first, last in ranges) * times


@pytest.mark.parametrize("times", [1, 2, MANY])
def test_acks_of_what_was_never_sent_are_counted_and_of_no_effect(times: int) -> None:
    # Alone, in the plain loop, and by arrays.
    bus, peer = heard_ten()
    peer.say(acks((10, 12), times=times))
    assert bus.broker.refused == {Reason.ACK_UNSENT: times}
    peer.say(acks((8, 12), times=times))
    assert bus.broker.refused == {Reason.ACK_UNSENT: 2 * times}
    peer.say(publish(1, b"10", b"11"))
    assert peer.hear_ids(1) == [10, 11]
    bus.tick(6)
    assert peer.hear_ids(1) == [*range(8), 10, 11]


@pytest.mark.parametrize("times", [1, 2, MANY])
def test_acks_without_a_subscription_are_counted_and_of_no_effect(times: int) -> None:
    bus, peer = heard_ten()
    other = bus.peer(acks((0, 10), times=times))
    peer.say(ack_frame(9, b"0-1") * times)
    assert bus.broker.refused == {Reason.ACK_UNSUBSCRIBED: 2 * times}
    other.say(connect(2))
    assert len(other.hear_frames()) == 1
    assert bus.statistics(1).in_flight == 10


@pytest.mark.parametrize("times", [1, 2, MANY])
def test_acks_behind_the_floor_are_not_counted(times: int) -> None:
    bus, peer = heard_ten()
    peer.say(acks((0, 5), times=times))
    peer.say(acks((0, 3), (ID_COUNT - 4, ID_COUNT), times=times))
    assert bus.broker.refused == {}
    assert bus.statistics(1).ring.floor == 5
    assert bus.statistics(1).acknowledged == 5


def test_the_timer_index_of_an_ack_is_not_looked_at() -> None:
    bus, peer = heard_ten()
    peer.say(build_frame(ord("3"), class_id=1, timer_index=999, message_id=5, content=b"0-10"))
    assert bus.statistics(1).ring.messages == 0


def test_an_ack_of_a_frame_begun_and_not_ended_counts() -> None:
    bus = Bus()
    peer = bus.peer(connect(1), subscribe(1), publish(1, b"a", b"b"))
    begun = peer.take(17 + 3)
    peer.say(ack(1, 0, 2))
    assert bus.broker.refused == {Reason.ACK_UNSENT: 1}
    rest = peer.take(1 << 30)
    assert parse_frame((begun + rest)[17:31])[4] == b"a"


def start_at(bus: Bus, class_id: int, sequence: int) -> None:
    """As if so many messages of the class had been published and acknowledged."""
    cls = bus.broker.classes[class_id]
    cls.ring.floor = cls.ring.head = sequence
    cls.waiting = AckWindow(floor=sequence)
    bus.broker.check()


@pytest.mark.parametrize("times", [1, MANY])
def test_ids_go_over_the_wrap_from_publisher_to_ack(times: int) -> None:
    bus = Bus()
    publisher = bus.peer(connect(1))
    start_at(bus, 1, ID_COUNT - 3)
    publisher.say(publish(1, *numbered(6)))
    peer = bus.peer(subscribe(1))
    assert peer.hear_ids(1) == [ID_COUNT - 3, ID_COUNT - 2, ID_COUNT - 1, 0, 1, 2]
    peer.say(acks((0, 2), times=times))
    bus.tick(6)
    assert peer.hear_ids(1) == [ID_COUNT - 3, ID_COUNT - 2, ID_COUNT - 1, 2]
    peer.say(acks((ID_COUNT - 3, ID_COUNT), times=times))
    assert bus.statistics(1).ring.floor == ID_COUNT + 2
    peer.say(acks((2, 3), (ID_COUNT - 1, ID_COUNT), times=times))
    assert bus.statistics(1).ring.messages == 0
    assert bus.broker.refused == {}


def test_the_last_id_may_be_acknowledged_as_the_original_writes_it() -> None:
    bus = Bus()
    bus.peer(connect(1))
    start_at(bus, 1, ID_COUNT - 1)
    peer = bus.peer(subscribe(1), publish(1, b"a"))
    assert peer.hear_ids(1) == [ID_COUNT - 1]
    peer.say(ack_frame(1, b"2147483647--2147483648"))
    assert bus.statistics(1).ring.messages == 0


# A full class ------------------------------------------------------------------------------------


def full(policy: FullPolicy, **limits: int) -> Bus:
    return Bus(Settings(limits=Limits(**{"class_messages": 10, **limits}), full_policy=policy))


def test_block_keeps_what_does_not_fit_until_it_does() -> None:
    bus = full(FullPolicy.BLOCK)
    peer = bus.peer(connect(1), subscribe(1))
    publisher = bus.peer(publish(1, *numbered(14)))
    assert bus.statistics(1).blocked_sessions == 1
    assert bus.broker.statistics().parked_bytes == sum(13 + len(p) for p in numbered(4, start=10))
    assert peer.hear_ids(1) == list(range(10))
    peer.say(ack(1, 0, 3))
    assert peer.hear_ids(1) == [10, 11, 12]
    assert bus.broker.take_unblocked() == []
    peer.say(ack(1, 3, 4))
    assert bus.broker.take_unblocked() == [publisher.session]
    assert bus.broker.take_unblocked() == []
    assert peer.hear_ids(1) == [13]
    assert bus.broker.statistics().parked_bytes == 0


def test_who_waits_longest_goes_first_and_everybody_keeps_its_order() -> None:
    bus = full(FullPolicy.BLOCK)
    peer = bus.peer(connect(1), subscribe(1))
    bus.peer(publish(1, *numbered(12)))
    bus.peer(publish(1, b"second"))
    bus.peer(publish(1, b"third", b"third too"))
    heard: list[bytes] = []
    while messages := peer.hear():
        heard += [message.payload for message in messages]
        peer.say(ack(1, messages[0].message_id, messages[0].message_id + 1))
        if len(messages) > 1:
            peer.say(ack(1, messages[1].message_id, messages[-1].message_id + 1))
    assert heard == [*numbered(12), b"second", b"third", b"third too"]


def test_what_a_blocked_publisher_says_to_other_classes_waits_its_turn() -> None:
    bus = full(FullPolicy.BLOCK)
    peer = bus.peer(connect(1, 2), subscribe(1), subscribe(2))
    blocked = bus.peer(publish(1, *numbered(11)) + publish(2, b"behind"))
    other = bus.peer(publish(2, b"not behind"))
    heard = peer.hear()
    assert [m.payload for m in heard if m.class_id == 2] == [b"not behind"]
    peer.say(ack(1, 0, 1))
    assert {(m.class_id, m.payload) for m in peer.hear()} == {(1, b"10."), (2, b"behind")}
    assert bus.broker.take_unblocked() == [blocked.session]
    assert not other.session.parked


def test_two_full_classes_let_go_one_after_the_other() -> None:
    bus = full(FullPolicy.BLOCK)
    peer = bus.peer(connect(1, 2), subscribe(1), subscribe(2))
    bus.peer(publish(1, *numbered(10)), publish(2, *numbered(10)))
    both = bus.peer(publish(1, b"one"), publish(2, b"two"), publish(1, b"three"))
    peer.hear()
    peer.say(ack(2, 0, 10))
    assert peer.hear() == []
    peer.say(ack(1, 0, 1))
    assert [m.payload for m in peer.hear()] == [b"one", b"two"]
    assert [c.blocked_sessions for c in bus.broker.statistics().classes] == [1, 0]
    peer.say(ack(1, 1, 2))
    assert [m.payload for m in peer.hear()] == [b"three"]
    assert bus.broker.take_unblocked() == [both.session]


def test_acks_behind_a_blocked_publishers_messages_are_applied_at_once() -> None:
    # A client that publishes and subscribes on one connection cannot block itself.
    bus = full(FullPolicy.BLOCK)
    peer = bus.peer(connect(1), subscribe(1), publish(1, *numbered(10)))
    assert len(peer.hear()) == 10
    peer.say(publish(1, *numbered(5, start=10)) + ack(1, 0, 10))
    assert peer.hear_ids(1) == [10, 11, 12, 13, 14]
    assert not peer.session.parked


def test_who_is_blocked_again_in_the_same_read_is_not_unblocked() -> None:
    bus = full(FullPolicy.BLOCK)
    peer = bus.peer(connect(1), subscribe(1), publish(1, *numbered(10)))
    assert len(peer.hear()) == 10
    again = publish(1, b"a") + ack(1, 0, 1) + publish(1, b"b") + ack(1, 1, 2) + publish(1, b"c")
    peer.say(again)
    assert peer.session.parked
    assert bus.broker.take_unblocked() == []
    peer.say(ack(1, 2, 3))
    assert bus.broker.take_unblocked() == [peer.session]


def test_more_parked_bytes_than_allowed_end_the_session_but_not_its_messages() -> None:
    bus = full(FullPolicy.BLOCK, frame_bytes=100_000, pending_bytes=100_000 + RECEIVE_BYTES)
    peer = bus.peer(connect(1), subscribe(1))
    publisher = bus.peer()
    sent = numbered(15 + 2 * RECEIVE_BYTES // 90_000, size=90_000)
    assert publisher.is_refused(publish(1, *sent)) is Reason.PENDING_LIMIT
    received = publisher.session.receiver.frames
    heard: list[bytes] = []
    while messages := peer.hear():
        heard += [message.payload for message in messages]
        peer.say(ack(1, messages[0].message_id, messages[-1].message_id + 1))
    assert heard == sent[:received]


def test_messages_parked_by_a_peer_that_left_are_stored_when_there_is_room() -> None:
    bus = full(FullPolicy.BLOCK)
    peer = bus.peer(connect(1), subscribe(1))
    publisher = bus.peer(publish(1, *numbered(13)))
    publisher.leave()
    used = bus.broker.budget.used
    assert peer.hear_ids(1) == list(range(10))
    peer.say(ack(1, 0, 10))
    assert peer.hear_ids(1) == [10, 11, 12]
    assert bus.broker.take_unblocked() == []
    assert bus.broker.budget.used < used


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
    publisher.leave()
    assert bus.statistics(1).dropped == {Reason.UNDELIVERED_AT_CLOSE: 6 - stored}
    assert bus.statistics(1).blocked_sessions == 0
    peer = bus.peer(subscribe(1))
    assert peer.hear_ids(1) == list(range(stored))


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
    durable = talk2.subscribe(2, 5, durable="d", channels=patterns)
    talk2.peer2(bus, durable, classes=(2,)).leave()
    peer = bus.peer(connect(1), subscribe(1), publish(1, *numbered(4)))
    if somebody_waits:
        bus.peer(publish(1, b"y" * 90_000))
    bus.peer(publish(1, *numbered(2, size=95_000))).leave()
    assert peer.hear_ids(1) == [0, 1, 2, 3]
    peer.say(ack(1, 0, 4))
    assert bus.statistics(1).dropped == {}
    bus.tick(2 * RING_IDLE_TICKS)
    assert bus.statistics(1).dropped == {Reason.UNDELIVERED_AT_CLOSE: 2}
    peer.say(publish(1, b"next"))
    heard = payloads(peer)
    assert heard == [b"y" * 90_000, b"next"][1 - somebody_waits :]


def test_a_peer_that_leaves_may_make_the_room_for_its_own_messages() -> None:
    # It subscribes, acknowledges nothing, and has messages parked for the class it holds back.
    bus = full(FullPolicy.BLOCK)
    peer = bus.peer(connect(1), subscribe(1))
    selfish = bus.peer(subscribe(1), publish(1, *numbered(14)))
    assert peer.hear_ids(1) == list(range(10))
    peer.say(ack(1, 0, 10))
    assert peer.hear_ids(1) == []
    selfish.leave()
    assert peer.hear_ids(1) == [10, 11, 12, 13]
    peer.say(ack(1, 10, 14))
    bus.tick(2 * RING_IDLE_TICKS)
    assert bus.broker.budget.used == 0


def test_a_peer_that_left_is_neither_ready_nor_unblocked() -> None:
    # Its leaving makes room in one class, for messages of another class that it subscribes to.
    bus = full(FullPolicy.BLOCK)
    other = bus.peer(connect(1, 2), subscribe(1))
    leaving = bus.peer(subscribe(1), subscribe(2), publish(1, *numbered(11)) + publish(2, b"two"))
    assert len(other.hear()) == 10
    other.say(ack(1, 0, 10))
    bus.broker.take_ready()
    leaving.leave()
    assert bus.broker.take_ready() == [other.session.session_id]
    assert bus.broker.take_unblocked() == []
    assert other.hear_ids(1) == [10]
    assert payloads(bus.peer(subscribe(2))) == [b"two"]


def test_drop_newest_counts_what_it_does_not_store() -> None:
    bus = full(FullPolicy.DROP_NEWEST)
    peer = bus.peer(connect(1), subscribe(1), publish(1, *numbered(14)))
    assert bus.statistics(1).dropped == {Reason.DROP_NEWEST: 4}
    assert payloads(peer) == numbered(10)
    peer.say(ack(1, 0, 10), publish(1, b"next"))
    assert peer.hear_ids(1) == [10]


def test_drop_oldest_counts_what_it_takes_away() -> None:
    bus = full(FullPolicy.DROP_OLDEST)
    peer = bus.peer(connect(1), subscribe(1), publish(1, *numbered(10)))
    peer.say(publish(1, *numbered(4, start=10)))
    assert bus.statistics(1).dropped == {Reason.DROP_OLDEST: 4}
    assert [(m.message_id, m.payload) for m in peer.hear()] == list(
        zip(range(4, 14), numbered(10, start=4), strict=True)
    )
    [subscription] = bus.statistics(1).subscriptions
    assert (subscription.dropped, subscription.delivered) == (4, 10)


def test_drop_oldest_takes_away_what_is_in_flight_and_does_not_send_it_again() -> None:
    bus = full(FullPolicy.DROP_OLDEST)
    peer = bus.peer(connect(1), subscribe(1), publish(1, *numbered(10)))
    assert len(peer.hear()) == 10
    peer.say(publish(1, b"x", b"y"))
    assert peer.hear_ids(1) == [10, 11]
    bus.tick(6)
    assert peer.hear_ids(1) == list(range(2, 12))
    peer.say(ack(1, 0, 12))
    [subscription] = bus.statistics(1).subscriptions
    assert (subscription.dropped, subscription.acknowledged, subscription.in_flight) == (2, 10, 0)


def test_drop_oldest_drops_for_nobody_too() -> None:
    bus = full(FullPolicy.DROP_OLDEST)
    bus.peer(connect(1), publish(1, *numbered(25)))
    assert bus.statistics(1).dropped == {Reason.DROP_OLDEST: 15}
    assert bus.peer(subscribe(1)).hear_ids(1) == list(range(15, 25))


def test_drop_oldest_releases_what_it_reaches_that_is_acknowledged() -> None:
    # The oldest are in flight, those behind them acknowledged: room is made up to the next gap.
    bus = full(FullPolicy.DROP_OLDEST)
    peer = bus.peer(connect(1), subscribe(1), publish(1, *numbered(10)))
    assert len(peer.hear()) == 10
    peer.say(ack(1, 2, 6))
    peer.say(publish(1, b"x", b"y"))
    assert bus.statistics(1).ring.floor == 6
    assert bus.statistics(1).dropped == {Reason.DROP_OLDEST: 2}
    peer.say(publish(1, *numbered(4)))
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
    assert bus.statistics(1).ring.messages == 63


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
    assert publisher.session.parked
    peer.hear()
    peer.say(ack(1, 0, 3))
    bus.tick(2 * RING_IDLE_TICKS)
    assert not publisher.session.parked
    assert payloads(bus.peer(subscribe(2))) == [b"a"]


def test_who_holds_back_a_full_class_and_takes_nothing_is_named() -> None:
    bus = full(FullPolicy.BLOCK, stall_seconds=10)
    slow, fast = (bus.peer(connect(1), subscribe(1)) for _ in range(2))
    bus.peer(publish(1, *numbered(11)))
    assert len(fast.hear()) == 10
    fast.say(ack(1, 0, 10))
    overdue = bus.tick(12)
    assert {(session, error.reason) for session, error in overdue} == {
        (slow.session, Reason.STALLED)
    }
    slow.leave()
    assert fast.hear_ids(1) == [10]


# Beats, readiness, statistics --------------------------------------------------------------------


def test_a_session_is_ready_once_when_there_is_something_to_send() -> None:
    bus = Bus()
    one, two = (bus.peer(connect(1), subscribe(1)) for _ in range(2))
    ids = [one.session.session_id, two.session.session_id]
    assert bus.broker.take_ready() == ids
    assert bus.broker.take_ready() == []
    bus.peer(publish(1, b"a"), publish(1, b"b"))
    assert bus.broker.take_ready() == ids
    assert one.hear_ids(1) == two.hear_ids(1) == [0, 1]
    two.say(ack(1, 0, 2))
    bus.tick(5)
    assert bus.broker.take_ready() == []
    bus.tick()
    assert bus.broker.take_ready() == ids[:1]


def test_who_said_nothing_is_overdue() -> None:
    bus = Bus(hello_seconds=5)
    silent, polite = bus.peer(), bus.peer(heartbeat())
    assert bus.tick(5) == []
    [(session, error)] = bus.tick()
    assert (session, error.reason) == (silent.session, Reason.HELLO_TIMEOUT)
    assert polite.session.session_id in bus.broker.sessions


def test_closing_twice_is_closing_once() -> None:
    bus = Bus()
    peer = bus.peer(connect(1), subscribe(1), subscribe(9))
    peer.leave()
    peer.leave()
    assert bus.broker.statistics().sessions == 0
    bus.peer(connect(9), publish(9, b"x"))
    assert bus.broker.take_ready() == [1]


def test_statistics_add_up_over_subscriptions_that_are_gone() -> None:
    bus, peer = heard_ten()
    peer.say(ack(1, 0, 4))
    bus.tick(6)
    assert peer.hear_ids(1) == [4, 5, 6, 7, 8, 9]
    peer.leave()
    other = bus.peer(subscribe(1))
    assert other.hear() == []
    bus.tick(12)
    assert len(other.hear()) == 6
    other.say(ack(1, 4, 6))
    statistics = bus.broker.statistics()
    assert (statistics.published, statistics.delivered, statistics.redelivered) == (10, 10, 12)
    assert (statistics.acknowledged, statistics.in_flight) == (6, 4)
    assert statistics.sessions == 1
    assert statistics.memory_bytes == bus.broker.budget.used > 0
    [cls] = statistics.classes
    assert (cls.class_id, cls.ring.messages, len(cls.subscriptions)) == (1, 4, 1)


def test_memory_goes_back_when_everything_is_acknowledged() -> None:
    bus = Bus()
    peer = bus.peer(connect(1, 2), subscribe(1), subscribe(2))
    for class_id in (1, 2):
        peer.say(publish(class_id, *numbered(1000, size=300)))
    assert len(peer.hear()) == 2000
    for class_id in (1, 2):
        peer.say(b"".join(ack(class_id, i, i + 1) for i in range(500, 1000)))
        peer.say(ack(class_id, 0, 500))
    bus.tick(2 * RING_IDLE_TICKS)
    assert bus.broker.statistics().memory_bytes == 0
    assert [cls.waiting.marks_bytes for cls in bus.broker.classes.values()] == [0, 0]
