"""Version 2 at the broker: greetings, subscriptions, positions, limits, and everything wrong."""

from __future__ import annotations

import zlib

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracles import ID_COUNT, build_frame, parse_frame, split_frames

from core import talk2
from core.talk import Bus, connect, heartbeat, numbered
from core.talk2 import (
    ACK,
    CONNECT,
    FETCH,
    NACK,
    SUBSCRIBE,
    UNSUBSCRIBE,
    WORKING,
    Peer2,
    ack,
    asked,
    enveloped,
    hello,
    nack,
    on_channel,
    peer2,
    publish,
    subscribe,
    unsubscribe,
    working,
)
from simplebus.core.broker import FullPolicy, Settings
from simplebus.core.errors import Reason, RemoteProtocolError
from simplebus.core.limits import (
    DENSE_READ_BYTES,
    IN_FLIGHT_BYTES,
    RECEIVE_BYTES,
    TRICKLE_BYTES,
    Limits,
)
from simplebus.core.requests import SubscribeRequest
from simplebus.core.settings import Keep


def newcomer(bus: Bus) -> Peer2:
    return Peer2(bus, bus.broker.open())


# Greetings ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "content",
    [
        b'{"version":1}',
        b'{"version":"2"}',
        b'{"classes":[65536]}',
        b'{"classes":[-1]}',
        b'{"classes":[{}]}',
        b'{"classes":[{"name":""}]}',
        b'{"classes":7}',
        b'{"name":""}',
        b'{"name":"' + b"x" * 201 + b'"}',
        b'{"name":"\xff"}',
        b'{"name":"\\ud800"}',
        b'{"heartbeat":-1}',
        b'{"heartbeat":1e999}',
        b'{"a":' * 100_000,
        b'{"classes":' + b"[" * 100_000,
        b'{"version":' + b"9" * 5000 + b"}",
        b"{",
        b'{"version":2}x',
    ],
)
def test_a_greeting_that_is_none_is_answered_by_a_fatal_error(content: bytes) -> None:
    bus = Bus()
    peer = newcomer(bus)
    with pytest.raises(RemoteProtocolError) as caught:
        peer.say(build_frame(CONNECT, content=content))
    assert caught.value.reason is Reason.BAD_CONNECT
    bus.broker.fail(peer.session, caught.value)
    assert peer.session.outbox.names_feeds  # A driver sees that this peer can be told.
    [error] = peer.told()
    assert (error.content["code"], error.content["fatal"]) == ("bad_connect", True)
    assert bus.broker.classes == {}


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (b"[1]", "bad_connect"),
        (b"", ""),
        (b"7", "bad_connect"),
        (b'{"classes":[{}]}', "bad_connect"),
        (b'{"classes":[{"id":2,"name":"orders"}]}', "class_name_conflict"),
        (b'{"classes":[{"id":1,"name":"others"}]}', "class_name_conflict"),
        (b'{"classes":[5,6,7,"orders"]}', "too_many_classes"),
    ],
)
def test_a_later_connect_that_is_refused_changes_nothing(content: bytes, code: str) -> None:
    bus = Bus(classes=2)
    peer = peer2(bus, classes=({"id": 1, "name": "orders"},))
    peer.say(build_frame(CONNECT, message_id=4, content=content))
    [answer] = peer.told()
    if code:
        assert (answer.content["code"], answer.content["fatal"]) == (code, False)
        assert (answer.message_id, answer.last_field) == (4, CONNECT)
    else:
        assert (answer.kind, answer.message_id) == ("connect", 4)
    assert list(bus.broker.classes) == [1]
    assert bus.broker.store.names == {"orders": 1}


def test_classes_are_named_by_id_by_name_and_by_both() -> None:
    bus = Bus()
    peer = newcomer(bus)
    peer.say(hello(5, "a", {"id": 65535, "name": "b"}, {"name": "c"}, "a", {"id": 5, "name": "d"}))
    [answer] = peer.told()
    a, c = id_given("a"), id_given("c")
    assert answer.content["classes"] == {"a": a, "b": 65535, "c": c, "d": 5}
    other = peer2(bus, classes=("a", "d"))
    other.say(hello("c", {"id": a}))
    assert other.told()[0].content["classes"] == {"c": c}


def id_given(name: str, behind: int = 0) -> int:
    """The id that follows from a name, or one that is looked at behind it."""
    return 32768 + (zlib.crc32(name.encode()) - behind) % 32768


def test_buses_that_know_nothing_of_one_another_give_a_name_the_same_id() -> None:
    names = [f"class {n}" for n in range(50)]
    buses = Bus(), Bus()
    peer2(buses[0], classes=names)
    peer2(buses[1], classes=names[::-1])
    assert buses[0].broker.store.names == buses[1].broker.store.names


def test_an_id_that_is_taken_is_passed_over_for_the_one_below() -> None:
    bus = Bus()
    peer2(bus, classes=[id_given("ä"), id_given("ä", 1)])
    peer2(bus, classes=["ä"])
    assert bus.broker.store.names == {"ä": id_given("ä", 2)}
    taken = [id_given("b", n) for n in range(64)]
    peer2(bus, classes=[*taken, "b"])
    assert bus.broker.store.names["b"] == 65535 not in taken


def test_many_names_are_given_ids_at_once() -> None:
    bus = Bus()
    names = [f"n{n}" for n in range(4096)]
    peer2(bus, classes=names)
    assert len(bus.broker.store.names) == len(set(bus.broker.store.names.values())) == 4096


def test_heartbeats_may_come_before_the_greeting_and_nothing_else() -> None:
    bus = Bus()
    peer = newcomer(bus)
    peer.say(heartbeat() * 2 + hello(1) + publish(1, 0, b"x"))
    assert [said.kind for said in peer.told()] == ["connect", "confirm"]
    late = newcomer(bus)
    late.say(connect(1))
    assert late.is_refused(hello(1)) is Reason.BAD_CONNECT


def test_what_a_peer_calls_itself_stays_on_one_line() -> None:
    peer = peer2(Bus(), client="evil\nline")
    assert "\n" not in peer.session.peer


def test_the_shorter_heartbeat_counts_and_silence_ends_the_session() -> None:
    bus = Bus()
    peer = newcomer(bus)
    peer.say(hello(1, heartbeat=5))
    assert peer.told()[0].content["heartbeat"] == 5
    assert bus.tick(16) == []
    assert "heartbeat" in {said.kind for said in peer.told()}
    [(session, error)] = bus.tick()
    assert (session, error.reason) == (peer.session, Reason.HEARTBEAT_TIMEOUT)


# Subscriptions -----------------------------------------------------------------------------------


def test_several_subscriptions_of_one_session_are_told_apart() -> None:
    bus = Bus()
    reader = peer2(
        bus, subscribe(1, 7, channels=["a.*"]), subscribe(1, 9), subscribe(2, 3), classes=(1, 2)
    )
    writer = peer2(bus, enveloped(1, 0, on_channel("a.x", b"1"), on_channel("b", b"2")))
    writer.say(publish(2, 2, b"3"))
    heard = [(m.class_id, m.number, m.message_id) for m in reader.got()]
    assert sorted(heard) == [(1, 7, 0), (1, 9, 0), (1, 9, 1), (2, 3, 0)]
    reader.say(ack(7, 0, 2), ack(3, 0, 1))
    assert bus.statistics(2).ring.messages == 0
    assert bus.statistics(1).ring.messages == 2
    reader.say(ack(9, 0, 2))
    assert bus.statistics(1).ring.messages == 0


def test_a_number_may_be_used_again_after_an_unsubscribe() -> None:
    bus = Bus()
    reader = peer2(bus, subscribe(1, 5))
    writer = peer2(bus, publish(1, 0, b"a"))
    assert reader.ids() == [0]
    reader.say(subscribe(1, 5))
    reader.say(unsubscribe(5), unsubscribe(5), subscribe(1, 5, start="new"))
    told = reader.told()
    kinds = [said.content["code"] if said.kind == "error" else said.kind for said in told]
    assert kinds[-4:] == ["subscription_in_use", "unsubscribe", "unknown_subscription", "subscribe"]
    writer.say(publish(1, 1, b"b"))
    assert reader.ids() == [1]  # And the peer was told anew whose it is: see Peer2.


def test_after_an_unsubscribe_messages_are_announced_again() -> None:
    bus = Bus()
    reader = peer2(bus, subscribe(1, 5))
    writer = peer2(bus, publish(1, 0, b"a"))
    reader.got()
    reader.say(unsubscribe(5), subscribe(1, 5, start="new"))
    reader.told()
    writer.say(publish(1, 1, b"b"))
    assert parse_frame(reader.hear_frames()[0])[0] == talk2.DELIVER


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ({"slow": "sometimes"}, "bad_request"),
        ({"slow": "drop_oldest"}, "bad_request"),
        ({"start": "yesterday"}, "bad_request"),
        ({"start": {}}, "bad_request"),
        ({"start": {"sequence": 1, "time": 2.0}}, "bad_request"),
        ({"start": {"sequence": -1}}, "bad_request"),
        ({"max_in_flight": 0}, "bad_request"),
        ({"max_pending": 0, "slow": "drop_oldest"}, "bad_request"),
        ({"max_pending": 1 << 63}, "bad_request"),
        ({"ack_seconds": 0}, "bad_request"),
        ({"max_deliveries": -1}, "bad_request"),
        ({"durable": ""}, "bad_request"),
        ({"channels": ["a..b"]}, "bad_channel"),
        ({"channels": ["a.#.b"]}, "bad_channel"),
        ({"channels": [""]}, "bad_channel"),
        ({"channels": ["a"] * 1025}, "bad_request"),
    ],
)
def test_a_subscription_that_cannot_be_granted_is_none(
    options: dict[str, object], code: str
) -> None:
    bus = Bus()
    peer = peer2(bus, publish(1, 0, b"waits"))
    peer.say(subscribe(1, 5, 3, **options))
    error = peer.told()[-1]
    assert (error.content["code"], error.content["fatal"]) == (code, False)
    assert (error.class_id, error.message_id, error.last_field) == (1, 3, SUBSCRIBE)
    assert bus.statistics(1).subscriptions == ()
    peer.say(subscribe(1, 5))
    assert peer.ids() == [0]


def test_requests_about_what_is_not_there_are_refused() -> None:
    bus = Bus()
    peer = peer2(bus, subscribe(9, 5), subscribe(1, 0), unsubscribe(4), asked(FETCH, 9, 8))
    codes = ["unknown_class", "bad_request", "unknown_subscription", "unknown_class"]
    assert peer.errors() == codes
    peer.say(ack(4, 0, 1), nack(4, 0, 1), working(4, 0, 1))
    assert peer.told() == []
    assert bus.broker.refused[Reason.ACK_UNSUBSCRIBED] == 3


def test_a_session_has_no_more_subscriptions_than_allowed() -> None:
    bus = Bus(subscriptions=2)
    peer = peer2(bus, *[subscribe(1, number) for number in (1, 2, 3)])
    assert peer.errors() == ["too_many_subscriptions"]


@pytest.mark.parametrize(
    ("start", "expected"),
    [
        ("new", []),
        ("earliest", [0, 1, 2, 3, 4, 5]),
        ("last", [5]),
        ({"sequence": 0}, [0, 1, 2, 3, 4, 5]),
        ({"sequence": 4}, [4, 5]),
        ({"sequence": 6}, []),
        ({"sequence": (1 << 63) - 1}, []),
        ({"time": -1e9}, [0, 1, 2, 3, 4, 5]),
        ({"time": 102.0}, [2, 3, 4, 5]),
        ({"time": 102.5}, [3, 4, 5]),
        ({"time": 1e9}, []),
    ],
)
def test_a_subscription_begins_where_it_asks_to(start: object, expected: list[int]) -> None:
    bus = Bus()
    writer = peer2(bus)
    for number in range(6):
        bus.broker.clock.now = 100.0 + number
        writer.say(publish(1, number, b"x"))
    bus.broker.clock.now = 200.0
    assert peer2(bus, subscribe(1, 5, start=start)).ids() == expected
    # What nobody was there for waits all the same.
    assert peer2(bus, subscribe(1, 5)).ids() == [0, 1, 2, 3, 4, 5]
    writer.say(publish(1, 6, b"x"))
    assert peer2(bus, subscribe(1, 5)).ids() == []


def test_what_waits_is_for_the_first_that_asks_for_it_and_no_more() -> None:
    bus = Bus()
    writer = peer2(bus, publish(1, 0, b"a", b"b"))
    new = peer2(bus, subscribe(1, 5, start="new"))
    writer.say(publish(1, 2, b"c"))
    assert new.ids() == [2]
    new.say(ack(5, 2, 3), unsubscribe(5))
    first, second = peer2(bus, subscribe(1, 5)), peer2(bus, subscribe(1, 5))
    assert first.ids() == [0, 1]
    assert second.ids() == []
    first.say(ack(5, 0, 2))
    assert bus.statistics(1).ring.messages == 0


def test_who_had_less_leaves_the_rest_to_the_next_one() -> None:
    # One that comes for the earliest has not seen what a former one has acknowledged.
    bus = Bus()
    writer = peer2(bus, subscribe(1, 5), publish(1, 0, *numbered(6)))
    assert writer.ids() == [0, 1, 2, 3, 4, 5]
    writer.say(ack(5, 4, 6), unsubscribe(5))
    late = peer2(bus, subscribe(1, 5, start="earliest", max_in_flight=1))
    assert late.ids() == [0]
    late.leave()
    heard, reader = [], peer2(bus, subscribe(1, 5))
    while ids := reader.ids():
        heard += ids
        reader.say(ack(5, ids[0], ids[-1] + 1))
    assert heard == [0, 1, 2, 3, 4, 5]


# In flight ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("most", [1, 3])
def test_no_more_is_in_flight_than_asked_for(most: int) -> None:
    bus = Bus()
    reader = peer2(bus, subscribe(1, 5, max_in_flight=most))
    peer2(bus, publish(1, 0, *numbered(10)))
    assert reader.ids() == list(range(most))
    reader.say(ack(5, 0, 1))
    assert reader.ids() == [most]
    reader.say(nack(5, 1, 2, 0))
    assert reader.ids() == [1]


def test_what_is_refused_with_a_delay_makes_room_at_once() -> None:
    bus = Bus()
    reader = peer2(bus, subscribe(1, 5, max_in_flight=2))
    peer2(bus, publish(1, 0, *numbered(10)))
    assert reader.ids() == [0, 1]
    reader.say(nack(5, 0, 2, 60_000))
    assert bus.broker.take_ready()
    assert reader.ids() == [2, 3]
    bus.broker.clock.now += 61
    bus.broker.wake_due()
    assert reader.ids() == []  # Nor may they come before there is room for them.
    reader.say(ack(5, 2, 3))
    assert reader.ids() == [0]
    reader.say(ack(5, 0, 1))
    assert [(m.message_id, m.attempt) for m in reader.got()] == [(1, 2)]
    reader.say(ack(5, 1, 2), ack(5, 3, 4))
    assert reader.ids() == [4, 5]


def test_what_another_one_left_is_sent_no_faster() -> None:
    bus = Bus()
    former = peer2(bus, subscribe(1, 5), publish(1, 0, *numbered(9)))
    assert len(former.ids()) == 9
    former.leave()
    reader = peer2(bus, subscribe(1, 5, max_in_flight=2))
    for first in range(0, 8, 2):
        assert [(m.message_id, m.attempt) for m in reader.got()] == [(first, 2), (first + 1, 2)]
        reader.say(ack(5, first, first + 2))


def test_many_bytes_in_flight_wait_for_acks_and_one_that_is_put_off_holds_up_nothing() -> None:
    bus = Bus()
    bus.trusting = True
    reader = peer2(bus, subscribe(1, 5))
    writer = peer2(bus)
    size, count = 900_000, 0
    for _ in range(3 * IN_FLIGHT_BYTES // size):
        writer.say(publish(1, count, b"x" * size))
        count += 1
    heard = reader.ids()
    assert len(heard) * size < IN_FLIGHT_BYTES + 3 * size
    reader.say(nack(5, 0, 1, 3_600_000))
    total = len(heard)
    heard.remove(0)
    while heard:
        reader.say(ack(5, heard[0], heard[-1] + 1))
        heard = reader.ids()
        total += len(heard)
    assert total == count


@pytest.mark.parametrize("slow", ["drop_oldest", "drop_newest"])
def test_a_slow_subscription_drops_what_is_too_much_for_it(slow: str) -> None:
    bus = Bus()
    reader = peer2(bus, subscribe(1, 5, slow=slow, max_pending=4, max_in_flight=2))
    writer = peer2(bus, publish(1, 0, b"0", b"1", b"2"))
    assert reader.ids() == [0, 1]
    writer.say(publish(1, 3, *numbered(5, start=3)))
    heard: list[int] = []
    reader.say(ack(5, 0, 1), ack(5, 1, 2))
    while ids := reader.ids():
        heard += ids
        reader.say(ack(5, ids[0], ids[-1] + 1))
    assert heard == ([6, 7] if slow == "drop_oldest" else [2, 3])
    [subscription] = bus.statistics(1).subscriptions
    assert subscription.dropped == 4
    assert subscription.undelivered == {Reason.SLOW_CONSUMER: 4}
    writer.say(publish(1, 8, b"8"))
    assert reader.ids() == [8]


@pytest.mark.parametrize("slow", ["drop_oldest", "drop_newest", "disconnect"])
def test_what_is_not_for_a_subscription_does_not_make_it_slow(slow: str) -> None:
    bus = Bus()
    reader = peer2(bus, subscribe(1, 5, slow=slow, max_pending=2, channels=["a"]))
    contents = [on_channel("ba"[n % 10 == 0], b"%d" % n) for n in range(20)]
    writer = peer2(bus, enveloped(1, 0, *contents))
    assert reader.ids() == [0, 10]
    writer.say(enveloped(1, 20, *contents[:10]))
    bus.broker.take_ready()
    if slow == "disconnect":
        assert reader.errors() == ["slow_consumer"]
        return
    reader.say(ack(5, 0, 20))
    assert reader.ids() == []
    assert bus.statistics(1).dropped == {Reason.SLOW_CONSUMER: 1}
    writer.say(enveloped(1, 30, *contents[:10]))
    assert reader.ids() == [30]


def test_a_subscription_that_is_cut_off_is_named_by_its_request() -> None:
    bus = Bus()
    reader = peer2(bus, subscribe(1, 5, 77, slow="disconnect", max_pending=4))
    writer = peer2(bus, publish(1, 0, *numbered(4)))
    assert len(reader.got()) == 4
    writer.say(publish(1, 4, b"x"))
    bus.broker.take_ready()
    [error] = reader.told()
    assert (error.class_id, error.message_id, error.last_field) == (1, 77, SUBSCRIBE)
    assert (error.content["code"], error.content["fatal"]) == ("slow_consumer", False)
    assert bus.statistics(1).subscriptions == ()
    assert reader.session.subscriptions == {}


@pytest.mark.parametrize("options", [{}, {"group": "g"}])
def test_what_waited_for_one_that_is_cut_off_is_dropped_unless_it_waits_for_the_next(
    options: dict[str, object],
) -> None:
    for others in (0, 1):
        bus = Bus()
        terms = options | {"slow": "disconnect", "max_pending": 3}
        reader, other = peer2(bus, subscribe(1, 5, **terms)), peer2(bus)
        other.say(*[subscribe(1, 6)] * others)
        peer2(bus, publish(1, 0, *numbered(6)))
        bus.broker.take_ready()
        assert reader.errors() == ["slow_consumer"]
        assert bus.statistics(1).dropped == ({Reason.SLOW_CONSUMER: 6} if others else {})
        assert peer2(bus, subscribe(1, 5)).ids() == ([] if others else list(range(6)))


def test_two_that_are_too_slow_go_while_a_publisher_waits_for_room() -> None:
    bus = Bus(class_messages=6)
    slow = [peer2(bus, subscribe(1, 5, slow="disconnect", max_pending=5)) for _ in range(2)]
    other = peer2(bus, subscribe(1, 5))
    writer = peer2(bus, publish(1, 0, *numbered(5)), publish(1, 5, *numbered(7, start=5)))
    bus.broker.take_ready()
    assert [peer.errors() for peer in slow] == [["slow_consumer"]] * 2
    heard: list[bytes] = []
    while messages := other.got():
        heard += [message.content for message in messages]
        other.say(ack(5, messages[0].message_id, messages[-1].message_id + 1))
        bus.broker.take_ready()
    assert heard == numbered(12)
    assert not writer.session.parked


# Acks of what was not sent -----------------------------------------------------------------------


def test_huge_ranges_cost_nothing_and_reach_what_was_sent() -> None:
    bus = Bus()
    reader = peer2(bus, subscribe(1, 5), subscribe(1, 6, group="g"))
    peer2(bus, publish(1, 0, *numbered(3)))
    assert len(reader.got()) == 6
    for number in (5, 6):
        reader.say(working(number, 0, ID_COUNT), nack(number, 0, ID_COUNT, 0))
    assert len(reader.got()) == 6
    for number in (5, 6):
        reader.say(ack(number, 0, ID_COUNT))
    assert bus.statistics(1).ring.messages == 0
    assert bus.broker.refused == {Reason.ACK_UNSENT: 6}


# Fetch and Deliver -------------------------------------------------------------------------------


def test_a_fetch_changes_nobodys_position_and_interrupts_nobodys_messages() -> None:
    bus = Bus()
    reader = peer2(bus, subscribe(1, 5), publish(1, 0, *numbered(4)))
    begun = reader.take(150)
    reader.say(asked(FETCH, 1, 3, first=1, count=2), asked(FETCH, 1, 4, first=9))
    reader.partial = begun + reader.partial
    messages, rest = reader.listen()
    assert [m.message_id for m in messages if m.number == 5] == [0, 1, 2, 3]
    assert [(m.message_id, m.attempt) for m in messages if m.number == 0] == [(1, 0), (2, 0)]
    answers = [said.content for said in rest if said.kind == "fetch"]
    assert answers == [
        {"first": 1, "next": 3, "floor": 0, "head": 4},
        {"first": 4, "next": 4, "floor": 0, "head": 4},
    ]


def test_many_fetches_at_once_take_the_memory_of_one() -> None:
    bus = Bus(frame_bytes=100_000, pending_bytes=100_000 + RECEIVE_BYTES)
    bus.trusting = True
    peer = peer2(bus)
    peer.say(publish(1, 0, *[b"x" * 90_000] * 15))
    peer.told()
    peer.say(b"".join(asked(FETCH, 1, n) for n in range(100)))
    bus.broker.take_ready()
    outbox, at, most = peer.session.outbox, bytearray(), 0
    while piece := outbox.peek(0):
        most = max(most, outbox.pending_bytes)
        at += piece[:50_000]
        outbox.sent(min(len(piece), 50_000), 0)
    answered = [frame for frame in split_frames(bytes(at))[0] if frame[:1] == b"F"]
    assert [parse_frame(frame)[2] for frame in answered] == list(range(100))
    assert most < 2 * 1024 * 1024


def test_too_many_fetches_at_once_end_the_session() -> None:
    bus = Bus(frame_bytes=100_000, pending_bytes=100_000 + RECEIVE_BYTES)
    bus.trusting = True
    assert peer2(bus).is_refused(asked(FETCH, 1, 3) * 10_000) is Reason.PENDING_LIMIT


def test_those_who_need_the_most_are_cut_off_when_all_together_need_too_much() -> None:
    most = 100_000 + RECEIVE_BYTES
    limits = Limits(frame_bytes=100_000, pending_bytes=most, total_pending_bytes=most)
    bus = Bus(Settings(limits=limits))
    bus.trusting = True
    peers = [peer2(bus) for _ in range(3)]
    halves = [50_000, 90_000, 70_000]
    for peer, size in zip(peers, halves, strict=True):
        peer.say(asked(FETCH, 1, 3) * 2000, b"1" * size)
    assert bus.broker.tick() == []
    heavy = peer2(bus, asked(FETCH, 1, 3) * 4000)
    ((cut, error),) = bus.broker.tick()
    assert cut is heavy.session
    assert error.reason is Reason.PENDING_LIMIT
    assert "has the most" in error.sentence


@pytest.mark.parametrize("most", [1, 5, 13, 14, 40])
def test_messages_of_many_feeds_are_announced_however_the_stream_is_cut(most: int) -> None:
    bus = Bus()
    writer = peer2(bus, classes=(1, 2))
    reader = peer2(
        bus,
        subscribe(1, 1, channels=["a.*"]),
        subscribe(1, 2),
        subscribe(2, 3, group="g"),
        subscribe(2, 4, max_in_flight=2),
    )
    told = reader.told()
    assert len(told) == 4
    channels = ["a.x", "b", "a.y"]
    number = 0
    data = b""
    for turn in range(6):
        contents = [on_channel(channels[n % 3], b"%d" % n) for n in range(turn + 1)]
        writer.say(enveloped(1, number, *contents), publish(2, number + turn + 1, b"p"))
        number += turn + 2
        data += reader.take(most)
        reader.say(asked(FETCH, 2, 3, count=1), nack(2, 0, 2, 0))
        bus.tick(turn)
    for _ in range(2):  # Who took nothing for long is handed messages when it has caught up.
        while piece := reader.take(most):
            data += piece
        bus.tick()
    reader.partial = data
    messages, _ = reader.listen()
    first_time = [m for m in messages if m.attempt == 1]
    one = [m.message_id for m in first_time if m.number == 1]
    two = [m.message_id for m in first_time if m.number == 2]
    assert two == list(range(21))
    assert one == sorted(one)
    assert {m.class_id for m in messages if m.number in (1, 2)} == {1}
    assert {m.class_id for m in messages if m.number in (0, 3, 4)} == {2}
    assert [m.message_id for m in first_time if m.number == 3] == list(range(6))
    assert [m.message_id for m in first_time if m.number == 4] == [0, 1]


def test_a_filtered_subscription_lets_the_others_of_its_session_have_their_turn() -> None:
    bus = Bus()
    reader = peer2(bus, subscribe(1, 1, channels=["a"]), subscribe(2, 2), classes=(1, 2))
    reader.told()
    contents = [on_channel("ab"[n % 2], b"x" * 20_000) for n in range(60)]
    writer = peer2(bus, enveloped(1, 0, *contents), classes=(1, 2))
    writer.say(publish(2, 60, b"x"))
    numbers = [m.number for m in reader.got()]
    assert numbers.index(2) < len(numbers) - 1
    assert sorted(set(numbers)) == [1, 2]


# Keeping -----------------------------------------------------------------------------------------


def keeping(full_policy: FullPolicy = FullPolicy.BLOCK, **keep: float) -> Bus:
    limits = Limits(class_messages=100)
    return Bus(Settings(limits=limits, keep=Keep(**keep), full_policy=full_policy))  # type: ignore[arg-type]


def test_messages_are_kept_by_count_after_everybody_has_them() -> None:
    bus = keeping(messages=5)
    reader = peer2(bus, subscribe(1, 5), publish(1, 0, *numbered(20)))
    assert len(reader.ids()) == 20
    reader.say(ack(5, 0, 20))
    assert peer2(bus, subscribe(1, 5, start="earliest")).ids() == list(range(15, 20))
    peer = peer2(bus, asked(FETCH, 1, 3, first=17))
    assert [m.message_id for m in peer.got()] == [17, 18, 19]


def test_messages_are_kept_by_size() -> None:
    bus = keeping(bytes=5 * 113)
    reader = peer2(bus, subscribe(1, 5), publish(1, 0, *numbered(20, size=100)))
    assert len(reader.ids()) == 20
    reader.say(ack(5, 0, 20))
    assert bus.statistics(1).ring.messages == 5


def test_messages_are_kept_by_age() -> None:
    bus = keeping(seconds=60)
    reader = peer2(bus, subscribe(1, 5))
    writer = peer2(bus)
    for n in range(5):
        writer.say(publish(1, n, b"x"))
        bus.broker.clock.now += 30
    assert len(reader.ids()) == 5
    reader.say(ack(5, 0, 5))
    assert bus.statistics(1).ring.floor == 3
    bus.broker.clock.now += 31
    bus.tick()
    assert bus.statistics(1).ring.floor == 5


def test_a_full_class_gives_up_first_what_it_merely_keeps() -> None:
    bus = keeping(messages=1000)
    reader = peer2(bus, subscribe(1, 5))
    writer = peer2(bus, publish(1, 0, *numbered(90, size=9)))
    assert len(reader.ids()) == 90
    reader.say(ack(5, 0, 80))
    writer.say(publish(1, 90, *numbered(85, size=9)))
    assert not writer.session.parked
    assert bus.statistics(1).ring.floor == 75
    writer.say(publish(1, 175, *numbered(50, size=9)))
    assert bus.statistics(1).ring.floor == 80
    assert writer.session.parked
    assert len(reader.ids()) == 90


# Hostile -----------------------------------------------------------------------------------------

REQUESTS = [
    asked(SUBSCRIBE, 1, 2, 3, channels=["a.*"], durable="d", start={"sequence": 1}),
    asked(UNSUBSCRIBE, 3, 2, forget=True),
    asked(FETCH, 1, 2, first=0, count=3),
    asked(CONNECT, 0, 2, classes=[1, "n"]),
    ack(3, 0, 2),
    nack(3, 0, 1, 5),
    working(3, 0, 1),
    publish(1, 0, b"x"),
    enveloped(1, 1, on_channel("a.b", b"x")),
]
SERVER_ONLY = [build_frame(kind) for kind in b"678E"]


@pytest.mark.parametrize("frame", SERVER_ONLY)
def test_what_only_a_server_says_is_not_understood(frame: bytes) -> None:
    peer = peer2(Bus())
    if frame[0] == NACK:
        peer.say(frame)
        assert peer.errors() == ["bad_ack"]
    else:
        assert peer.is_refused(frame) is Reason.UNKNOWN_TYPE


@pytest.mark.parametrize("kind", [ACK, NACK, WORKING])
@pytest.mark.parametrize(
    "content",
    [b"", b"-", b"5", b"5-5", b"6-5", b"0-2147483649", b"a-b", b"1-2 x", b"1-2 ", b"1-2-3"],
)
def test_a_range_that_is_none_is_refused_and_the_session_goes_on(kind: int, content: bytes) -> None:
    bus = Bus()
    peer = peer2(bus, subscribe(1, 5), publish(1, 0, *numbered(9)))
    peer.listen()
    peer.say(build_frame(kind, class_id=5, content=content))
    [error] = peer.told()
    assert (error.content["code"], error.last_field, error.class_id) == ("bad_ack", kind, 0)
    assert bus.statistics(1).in_flight == 9


@given(data=st.data())
def test_bytes_changed_anywhere_harm_nobody_else(data: st.DataObject) -> None:
    bus = Bus()
    other = peer2(bus, subscribe(1, 5, start="new"), classes=(1,))
    other.told()
    peer = peer2(bus)
    wrong = bytearray(b"".join(data.draw(st.lists(st.sampled_from(REQUESTS), max_size=12))))
    for at, value in data.draw(
        st.lists(st.tuples(st.integers(0, max(0, len(wrong) - 1)), st.integers(0, 255)), max_size=6)
    ):
        if at < len(wrong):
            wrong[at] = value
    try:
        peer.say(bytes(wrong))
        peer.take(1 << 30)
        bus.tick(2)
        bus.broker.clock.now += 10
        bus.broker.wake_due()
    except RemoteProtocolError as error:
        bus.broker.fail(peer.session, error)
        peer.take(1 << 30)
        peer.leave()
    other.take(1 << 30)
    other.say(asked(FETCH, 1, 3))
    assert other.told()[-1].kind == "fetch"
    bus.check()


values = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=9)
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=3), inner)
    ),
    max_leaves=6,
)


@given(
    kind=st.sampled_from([SUBSCRIBE, UNSUBSCRIBE, FETCH, CONNECT]),
    key=st.sampled_from([0, 1, 3, 65535]),
    request=st.sampled_from([0, 7, ID_COUNT - 1]),
    number=st.sampled_from([0, 3, 65535]),
    field=st.sampled_from(
        [*SubscribeRequest.__struct_fields__, "first", "count", "classes", "forget"]
    ),
    value=values,
)
def test_any_value_in_any_field_is_granted_or_refused(
    kind: int, key: int, request: int, number: int, field: str, value: object
) -> None:
    bus = Bus()
    peer = peer2(bus, subscribe(1, 3), publish(1, 0, *numbered(3)))
    peer.listen()
    content = msgspec.json.encode({field: value})
    peer.say(
        build_frame(kind, class_id=key, message_id=request, timer_index=number, content=content)
    )
    answers = [said for said in peer.told() if said.kind != "confirm"]
    assert len(answers) == 1
    assert answers[0].message_id == request
    assert answers[0].kind != "error" or not answers[0].content["fatal"]


def test_a_request_number_comes_back_as_it_was() -> None:
    peer = peer2(Bus())
    for content in (b"{}", b"no"):
        frame = build_frame(FETCH, class_id=1, message_id=0xFFFFFFFE, content=content)
        peer.say(frame)
        answers, _ = split_frames(peer.take(1000))
        assert parse_frame(answers[-1])[2] == 0xFFFFFFFE


def test_very_many_patterns_and_channels_cost_what_they_weigh() -> None:
    bus = Bus()
    bus.trusting = True
    writer = peer2(bus)
    for first in range(0, 60_000, 10_000):
        contents = [on_channel(f"c.{n}", b"") for n in range(first, first + 10_000)]
        writer.say(enveloped(1, first, *contents))
    peer = peer2(bus)
    for number in range(1, 50):
        patterns = [f"c.{n * number}" for n in range(1000)] + ["x.*.y"]
        peer.say(subscribe(1, number, start="new", channels=patterns))
    peer.told()
    writer.say(enveloped(1, 60_000, on_channel("c.49", b"")))
    assert [message.number for message in peer.got()] == [1, 7, 49]


def test_bulk_is_read_in_ever_larger_pieces_and_what_costs_much_in_short_ones() -> None:
    bus = Bus()
    bus.trusting = True
    peer = peer2(bus)
    frame_of_100 = publish(1, 0, b"x" * 87)
    number = 0
    while peer.session.read_bytes < RECEIVE_BYTES:
        count = peer.session.read_bytes // len(frame_of_100) + 1
        peer.say(publish(1, number, *[b"x" * 87] * count))
        number += count
    assert number < 10 * RECEIVE_BYTES / 100
    peer.say(publish(9, number, b"unknown") + publish(1, number + 1, b"x"))
    assert peer.session.read_bytes == RECEIVE_BYTES, "a few are no matter"
    bad = build_frame(talk2.ACK, class_id=5, content=b"bad")
    peer.say(bad * 1000)
    assert peer.session.read_bytes == DENSE_READ_BYTES < TRICKLE_BYTES
    peer.say(bad * 10)
    assert peer.session.read_bytes == DENSE_READ_BYTES
