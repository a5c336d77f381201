"""Version 2 at the broker: Connect, subscriptions, positions, limits and errors."""

from __future__ import annotations

import zlib

import pytest

from simplebus.core.errors import Reason, RemoteProtocolError
from simplebus.core.limits import REQUEST_BYTES_MAX
from tests.behaviour import wire_peer_v2
from tests.behaviour.wire_peer import BrokerHarness, connect, heartbeat, numbered
from tests.behaviour.wire_peer_v2 import (
    CONNECT,
    FETCH,
    INQUIRE,
    PURGE,
    SUBSCRIBE,
    UNSUBSCRIBE,
    Version2Peer,
    ack,
    channel_envelope,
    connect_request,
    connect_version2,
    json_request,
    nack,
    publish,
    publish_envelopes,
    subscribe,
    unsubscribe,
    working,
)
from tests.support.oracles import build_frame, parse_frame


def open_peer(bus: BrokerHarness) -> Version2Peer:
    return Version2Peer(bus, bus.broker.open_session())


# Connect ------------------------------------------------------------------------------------------


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
def test_invalid_connect_gets_fatal_error(content: bytes) -> None:
    bus = BrokerHarness()
    peer = open_peer(bus)
    with pytest.raises(RemoteProtocolError) as caught:
        peer.send(build_frame(CONNECT, content=content))
    assert caught.value.reason is Reason.BAD_CONNECT
    bus.broker.send_fatal_error(peer.session, caught.value)
    # The driver can send an Error frame to this peer.
    assert peer.session.outbox.has_deliver_frames
    [error] = peer.receive_replies()
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
def test_refused_later_connect_changes_nothing(content: bytes, code: str) -> None:
    bus = BrokerHarness(classes=2)
    peer = connect_version2(bus, classes=({"id": 1, "name": "orders"},))
    peer.send(build_frame(CONNECT, message_id=4, content=content))
    [answer] = peer.receive_replies()
    if code:
        assert (answer.content["code"], answer.content["fatal"]) == (code, False)
        assert (answer.message_id, answer.last_field) == (4, CONNECT)
    else:
        assert (answer.kind, answer.message_id) == ("connect", 4)
    assert list(bus.broker.classes) == [1]
    assert bus.broker.store.class_id_by_name == {"orders": 1}


@pytest.mark.parametrize("kind", [CONNECT, SUBSCRIBE, UNSUBSCRIBE, FETCH, PURGE, INQUIRE])
def test_request_has_at_most_64_kib_of_json(kind: int) -> None:
    bus = BrokerHarness()
    peer = connect_version2(bus, classes=(1,))
    content = b'{"about":"bus"}'.ljust(REQUEST_BYTES_MAX + 1)
    peer.send(build_frame(kind, class_id=1, message_id=4, timer_index=1, content=content))
    [error] = peer.receive_replies()
    assert error.content["code"] == ("bad_connect" if kind == CONNECT else "bad_request")
    assert f"expected at most {REQUEST_BYTES_MAX}" in error.content["message"]
    peer.send(build_frame(CONNECT, message_id=5, content=b"{}".ljust(REQUEST_BYTES_MAX)))
    assert [reply.kind for reply in peer.receive_replies()] == ["connect"]


def test_classes_are_referenced_by_id_name_or_both() -> None:
    bus = BrokerHarness()
    peer = open_peer(bus)
    peer.send(
        connect_request(
            5, "a", {"id": 65535, "name": "b"}, {"name": "c"}, "a", {"id": 5, "name": "d"}
        )
    )
    [answer] = peer.receive_replies()
    a, c = expected_id("a"), expected_id("c")
    assert answer.content["classes"] == {"a": a, "b": 65535, "c": c, "d": 5}
    second = connect_version2(bus, classes=("a", "d"))
    second.send(connect_request("c", {"id": a}))
    assert second.receive_replies()[0].content["classes"] == {"c": c}


def expected_id(name: str, offset: int = 0) -> int:
    """Return the id that is derived from a name, or the n-th candidate after it."""
    return 32768 + (zlib.crc32(name.encode()) - offset) % 32768


def test_independent_buses_choose_same_id_for_name() -> None:
    names = [f"class {n}" for n in range(50)]
    buses = BrokerHarness(), BrokerHarness()
    connect_version2(buses[0], classes=names)
    connect_version2(buses[1], classes=names[::-1])
    assert buses[0].broker.store.class_id_by_name == buses[1].broker.store.class_id_by_name


def test_used_id_is_skipped_for_next_lower() -> None:
    bus = BrokerHarness()
    connect_version2(bus, classes=[expected_id("ä"), expected_id("ä", 1)])
    connect_version2(bus, classes=["ä"])
    assert bus.broker.store.class_id_by_name == {"ä": expected_id("ä", 2)}
    used_ids = [expected_id("b", n) for n in range(64)]
    connect_version2(bus, classes=[*used_ids, "b"])
    assert bus.broker.store.class_id_by_name["b"] == 65535 not in used_ids


def test_many_names_get_ids_in_one_connect() -> None:
    bus = BrokerHarness()
    names = [f"n{n}" for n in range(4096)]
    connect_version2(bus, classes=names)
    assert (
        len(bus.broker.store.class_id_by_name)
        == len(set(bus.broker.store.class_id_by_name.values()))
        == 4096
    )


def test_only_heartbeats_may_precede_connect() -> None:
    bus = BrokerHarness()
    peer = open_peer(bus)
    peer.send(heartbeat() * 2 + connect_request(1) + publish(1, 0, b"x"))
    assert [reply.kind for reply in peer.receive_replies()] == ["connect", "confirm"]
    late = open_peer(bus)
    late.send(connect(1))
    assert late.send_refused(connect_request(1)) is Reason.BAD_CONNECT


def test_client_name_is_logged_on_one_line() -> None:
    peer = connect_version2(BrokerHarness(), client="evil\nline")
    assert "\n" not in peer.session.peer


def test_shorter_heartbeat_applies_and_silence_closes_session() -> None:
    bus = BrokerHarness()
    peer = open_peer(bus)
    peer.send(connect_request(1, heartbeat=5))
    assert peer.receive_replies()[0].content["heartbeat"] == 5
    assert bus.tick(16) == []
    assert "heartbeat" in {reply.kind for reply in peer.receive_replies()}
    [(session, error)] = bus.tick()
    assert (session, error.reason) == (peer.session, Reason.HEARTBEAT_TIMEOUT)


def test_session_that_the_server_does_not_read_is_not_closed_for_silence() -> None:
    bus = BrokerHarness()
    peer = connect_version2(bus, publish(1, 0, b"x")[:5], heartbeat=5)
    for _ in range(100):
        peer.session.excuse_silence()
        assert bus.tick() == []


def test_heartbeat_is_sent_while_reply_is_pending() -> None:
    """A reply may wait for a cluster. Without a heartbeat the client would disconnect."""
    bus = BrokerHarness()
    peer = open_peer(bus)
    peer.send(connect_request(1, heartbeat=5))
    peer.session.outbox.defer_reply(lambda: False)
    peer.receive_replies()
    for _ in range(3):
        bus.tick(5)
        peer.send(heartbeat())
        assert {reply.kind for reply in peer.receive_replies()} == {"heartbeat"}


# Subscriptions -----------------------------------------------------------------------------------


def test_subscriptions_of_one_session_are_distinguished() -> None:
    bus = BrokerHarness()
    reader = connect_version2(
        bus, subscribe(1, 7, channels=["a.*"]), subscribe(1, 9), subscribe(2, 3), classes=(1, 2)
    )
    writer = connect_version2(
        bus, publish_envelopes(1, 0, channel_envelope("a.x", b"1"), channel_envelope("b", b"2"))
    )
    writer.send(publish(2, 2, b"3"))
    received = [(m.class_id, m.number, m.message_id) for m in reader.receive_deliveries()]
    assert sorted(received) == [(1, 7, 0), (1, 9, 0), (1, 9, 1), (2, 3, 0)]
    reader.send(ack(7, 0, 2), ack(3, 0, 1))
    assert bus.statistics(2).ring.message_count == 0
    assert bus.statistics(1).ring.message_count == 2
    reader.send(ack(9, 0, 2))
    assert bus.statistics(1).ring.message_count == 0


def test_subscription_number_can_be_reused_after_unsubscribe() -> None:
    bus = BrokerHarness()
    reader = connect_version2(bus, subscribe(1, 5))
    writer = connect_version2(bus, publish(1, 0, b"a"))
    assert reader.receive_message_ids() == [0]
    reader.send(subscribe(1, 5))
    reader.send(unsubscribe(5), unsubscribe(5), subscribe(1, 5, start="new"))
    replies = reader.receive_replies()
    kinds = [reply.content["code"] if reply.kind == "error" else reply.kind for reply in replies]
    assert kinds[-4:] == ["subscription_in_use", "unsubscribe", "unknown_subscription", "subscribe"]
    writer.send(publish(1, 1, b"b"))
    # `Version2Peer` checks that a Deliver frame precedes it.
    assert reader.receive_message_ids() == [1]


def test_deliver_frame_is_sent_again_after_unsubscribe() -> None:
    bus = BrokerHarness()
    reader = connect_version2(bus, subscribe(1, 5))
    writer = connect_version2(bus, publish(1, 0, b"a"))
    reader.receive_deliveries()
    reader.send(unsubscribe(5), subscribe(1, 5, start="new"))
    reader.receive_replies()
    writer.send(publish(1, 1, b"b"))
    assert parse_frame(reader.receive_frames()[0])[0] == wire_peer_v2.DELIVER


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
def test_refused_subscribe_creates_nothing(options: dict[str, object], code: str) -> None:
    bus = BrokerHarness()
    peer = connect_version2(bus, publish(1, 0, b"waits"))
    peer.send(subscribe(1, 5, 3, **options))
    error = peer.receive_replies()[-1]
    assert (error.content["code"], error.content["fatal"]) == (code, False)
    assert (error.class_id, error.message_id, error.last_field) == (1, 3, SUBSCRIBE)
    assert bus.statistics(1).subscriptions == ()
    peer.send(subscribe(1, 5))
    assert peer.receive_message_ids() == [0]


def test_requests_for_missing_objects_are_refused() -> None:
    bus = BrokerHarness()
    peer = connect_version2(
        bus, subscribe(9, 5), subscribe(1, 0), unsubscribe(4), json_request(FETCH, 9, 8)
    )
    codes = ["unknown_class", "bad_request", "unknown_subscription", "unknown_class"]
    assert peer.receive_error_codes() == codes
    peer.send(ack(4, 0, 1), nack(4, 0, 1), working(4, 0, 1))
    assert peer.receive_replies() == []
    assert bus.broker.refusal_counts[Reason.ACK_UNSUBSCRIBED] == 3


def test_subscriptions_per_session_are_limited() -> None:
    bus = BrokerHarness(subscriptions=2)
    peer = connect_version2(bus, *[subscribe(1, number) for number in (1, 2, 3)])
    assert peer.receive_error_codes() == ["too_many_subscriptions"]


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
def test_subscription_begins_at_requested_start(start: object, expected: list[int]) -> None:
    bus = BrokerHarness()
    writer = connect_version2(bus)
    for number in range(6):
        bus.broker.clock.now = 100.0 + number
        writer.send(publish(1, number, b"x"))
    bus.broker.clock.now = 200.0
    assert connect_version2(bus, subscribe(1, 5, start=start)).receive_message_ids() == expected
    # The backlog waits nevertheless.
    assert connect_version2(bus, subscribe(1, 5)).receive_message_ids() == [0, 1, 2, 3, 4, 5]
    writer.send(publish(1, 6, b"x"))
    assert connect_version2(bus, subscribe(1, 5)).receive_message_ids() == []


def test_backlog_goes_to_first_waiting_subscription_only() -> None:
    bus = BrokerHarness()
    writer = connect_version2(bus, publish(1, 0, b"a", b"b"))
    new = connect_version2(bus, subscribe(1, 5, start="new"))
    writer.send(publish(1, 2, b"c"))
    assert new.receive_message_ids() == [2]
    new.send(ack(5, 2, 3), unsubscribe(5))
    first, second = connect_version2(bus, subscribe(1, 5)), connect_version2(bus, subscribe(1, 5))
    assert first.receive_message_ids() == [0, 1]
    assert second.receive_message_ids() == []
    first.send(ack(5, 0, 2))
    assert bus.statistics(1).ring.message_count == 0


def test_unacked_messages_pass_to_next_subscription() -> None:
    # Released messages are not sent to a start at the earliest.
    bus = BrokerHarness()
    writer = connect_version2(bus, subscribe(1, 5), publish(1, 0, *numbered(6)))
    assert writer.receive_message_ids() == [0, 1, 2, 3, 4, 5]
    writer.send(ack(5, 4, 6), unsubscribe(5))
    late = connect_version2(bus, subscribe(1, 5, start="earliest", max_in_flight=1))
    assert late.receive_message_ids() == [0]
    late.disconnect()
    received, reader = [], connect_version2(bus, subscribe(1, 5))
    while ids := reader.receive_message_ids():
        received += ids
        reader.send(ack(5, ids[0], ids[-1] + 1))
    assert received == [0, 1, 2, 3, 4, 5]
