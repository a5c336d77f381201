"""Dead letters: their headers and class, their limits, and their effect on other messages."""

from __future__ import annotations

import zlib
from typing import Any

import pytest

from simplebus.core import dead_letters
from simplebus.core.errors import Reason
from simplebus.core.limits import DEAD_LETTER_BATCH_MESSAGES, Limits
from simplebus.core.protocol.envelope_batch import Envelope, decode, encode
from tests.behaviour.wire_peer import BrokerHarness, numbered
from tests.behaviour.wire_peer import ack as ack1
from tests.behaviour.wire_peer import connect as connect1
from tests.behaviour.wire_peer import publish as publish1
from tests.behaviour.wire_peer import subscribe as subscribe1
from tests.behaviour.wire_peer_v2 import (
    ENVELOPE,
    FETCH,
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
    timed_envelope,
)

DEAD_1 = 0x8000 + zlib.crc32(b"dead.1") % 0x8000
"""Id of the dead-letter class of class 1."""


def fetch_dead_letters(bus: BrokerHarness, name: str = "dead.1") -> list[tuple[Envelope, bytes]]:
    """Return the stored dead letters."""
    peer = connect_version2(bus, classes=[name])
    class_id = bus.broker.store.class_id_by_name[name]
    peer.send(json_request(FETCH, class_id, 5))
    messages, _ = peer.receive_all()
    assert {(m.kind, m.number, m.class_id) for m in messages} <= {(ENVELOPE, 0, class_id)}
    return [decode(m.content) for m in messages]


def dead_headers(letter: Envelope, *names: str) -> Any:
    """Return the values of these headers, without their prefix."""
    headers = dict(letter.headers)
    found = [headers[f"dead-{name}"] for name in names]
    return found[0] if len(found) == 1 else tuple(found)


def give_up(bus: BrokerHarness, *frames: bytes, count: int, **options: object) -> Version2Peer:
    """Nack every delivery until the messages are dead letters."""
    options = {"max_deliveries": 2, **options}
    peer = connect_version2(bus, subscribe(1, 5, **options), *frames)
    for _ in range(int(options["max_deliveries"])):  # type: ignore[call-overload]
        assert len(peer.receive_message_ids()) == count
        peer.send(nack(5, 0, count, 0))
    while not peer.session.outbox.is_idle:
        assert peer.receive_message_ids() == []
    bus.broker.end_turn()
    return peer


def test_dead_letter_headers() -> None:
    bus = BrokerHarness()
    bus.broker.clock.now = 1763700000.25
    original = Envelope("a.b", b"key", (("trace", "7"), ("trace", "8")), 1234, 9_000_000, 0)
    give_up(
        bus, publish_envelopes(1, 0, encode(original, b"<\r\n>")), publish(1, 1, b"plain"), count=2
    )
    assert bus.statistics(1).dropped == {Reason.MAX_DELIVERIES: 2}
    assert bus.statistics(1).ring.message_count == 0
    (first, payload), (second, plain) = fetch_dead_letters(bus)
    assert (payload, plain) == (b"<\r\n>", b"plain")
    reasons = (
        ("dead-reason", "max_deliveries"),
        ("dead-class", "1"),
        ("dead-attempts", "2"),
        ("dead-subscription", ""),
        ("dead-session", "0"),
        ("dead-since", "1763700000.250000"),
        ("dead-sequence", "0"),
        ("dead-accepted", "1763700000.250000"),
    )
    assert first == Envelope("a.b", b"key", original.headers + reasons, 1234)
    assert second[:2] == ("", b"")
    assert second.published is None
    assert dead_headers(second, "sequence", "attempts") == ("1", "2")


def test_dead_letter_class_is_named_after_the_class() -> None:
    bus = BrokerHarness()
    connect_version2(bus, classes=[{"id": 1, "name": "orders"}])
    give_up(bus, publish(1, 0, b"a"), count=1, durable="billing")
    [(letter, _)] = fetch_dead_letters(bus, "dead.orders")
    assert dead_headers(letter, "class", "subscription") == ("orders", "billing")


def test_each_position_gives_up_separately() -> None:
    bus = BrokerHarness()
    peer = connect_version2(
        bus,
        subscribe(1, 1, max_deliveries=1),
        subscribe(1, 2, max_deliveries=3, durable="d"),
        subscribe(1, 3, max_deliveries=2, group="g"),
        subscribe(1, 4),
        publish(1, 0, b"a", b"b"),
    )
    for _ in range(5):
        peer.receive_deliveries()
        peer.send(*[nack(number, 0, 2, 0) for number in (1, 2, 3)])
    assert [
        dead_headers(e, "subscription", "session", "attempts", "sequence")
        for e, _ in fetch_dead_letters(bus)
    ] == [
        ("", "0", "1", "0"),
        ("", "0", "1", "1"),
        ("g", "", "2", "0"),
        ("g", "", "2", "1"),
        ("d", "0", "3", "0"),
        ("d", "0", "3", "1"),
    ]
    assert bus.statistics(1).dropped == {Reason.MAX_DELIVERIES: 6}
    assert bus.statistics(1).ring.message_count == 2


def test_acked_and_expired_messages_have_no_dead_letter() -> None:
    bus = BrokerHarness()
    bus.broker.clock.now = 50.0
    peer = connect_version2(bus, subscribe(1, 5, max_deliveries=2))
    peer.send(
        publish(1, 0, b"a", b"b"), publish_envelopes(1, 2, timed_envelope(b"c", expires_ms=1000))
    )
    assert peer.receive_message_ids() == [0, 1, 2]
    peer.send(ack(5, 0, 1), nack(5, 1, 3, 0))
    bus.broker.clock.now = 51.0
    assert peer.receive_message_ids() == [1]
    peer.send(nack(5, 1, 2, 0))
    assert peer.receive_message_ids() == []
    assert bus.statistics(1).dropped == {Reason.MAX_DELIVERIES: 1, Reason.EXPIRED: 1}
    assert [dead_headers(letter, "sequence") for letter, _ in fetch_dead_letters(bus)] == ["1"]


def test_uncarriable_message_is_given_up_by_version_1_only() -> None:
    bus = BrokerHarness()
    old = bus.peer(connect1(1), subscribe1(1))
    new = connect_version2(bus, subscribe(1, 5))
    contents = [b"\0fine", b"\0<\r\n\0>", channel_envelope("a", b"<\r\n\0>"), b"\0fine too"]
    connect_version2(bus, publish_envelopes(1, 0, *contents))
    assert [m.payload for m in old.receive_messages()] == [b"fine", b"fine too"]
    assert new.receive_message_ids() == [0, 1, 2, 3]
    assert bus.statistics(1).dropped == {Reason.UNCARRIABLE: 2}
    found = fetch_dead_letters(bus)
    assert [(e.channel, payload) for e, payload in found] == [("", b"<\r\n>"), ("a", b"<\r\n>")]
    assert dead_headers(
        found[0][0], "reason", "sequence", "attempts", "subscription", "session"
    ) == (
        "uncarriable",
        "1",
        "0",
        "",
        "0",
    )


def test_dead_letters_have_no_dead_letters() -> None:
    bus = BrokerHarness()
    reader = connect_version2(
        bus, subscribe(DEAD_1, 9, durable="d", max_deliveries=1), classes=["dead.1"]
    )
    reader.receive_all()
    give_up(bus, publish(1, 0, b"a"), count=1)
    [message] = reader.receive_deliveries()
    assert (message.class_id, message.number, message.attempt) == (DEAD_1, 9, 1)
    reader.send(nack(9, 0, 1, 0))
    assert reader.receive_message_ids() == []
    assert bus.statistics(DEAD_1).dropped == {Reason.MAX_DELIVERIES: 1}
    assert set(bus.broker.store.class_id_by_name) == {"dead.1"}


def test_dead_letters_are_redelivered_without_limit_by_default() -> None:
    bus = BrokerHarness()
    give_up(bus, publish(1, 0, b"a"), count=1)
    reader = connect_version2(bus, subscribe(DEAD_1, 9, durable="d"), classes=["dead.1"])
    for _ in range(40):
        assert reader.receive_message_ids() == [0]
        reader.send(nack(9, 0, 1, 0))
    assert bus.statistics(DEAD_1).dropped == {}


def test_version_1_can_subscribe_before_the_dead_letter_class_exists() -> None:
    bus = BrokerHarness()
    old = bus.peer(connect1(1), subscribe1(DEAD_1))
    give_up(bus, publish(1, 0, b"a"), count=1)
    assert [m.payload for m in old.receive_messages()] == [b"a"]


def test_oldest_dead_letters_are_dropped_at_the_limit() -> None:
    bus = BrokerHarness(dead_letter_bytes=1 << 18)
    payloads = numbered(100, size=5000)
    give_up(bus, publish(1, 0, *payloads), count=100)
    dead = bus.statistics(DEAD_1)
    assert dead.ring.memory_bytes <= 1 << 18
    assert dead.published == 100
    assert dead.dropped == {Reason.DROP_OLDEST: 100 - dead.ring.message_count}
    found = fetch_dead_letters(bus)
    assert [payload for _, payload in found] == payloads[-len(found) :]
    assert 20 < len(found) < 100


@pytest.mark.parametrize("is_made_by_id", [False, True])
def test_publishing_to_a_full_dead_letter_class_does_not_block(is_made_by_id: bool) -> None:
    bus = BrokerHarness(dead_letter_bytes=1 << 18)
    connect_version2(bus, classes=[DEAD_1] if is_made_by_id else [])
    writer = connect_version2(bus, classes=[{"id": DEAD_1, "name": "dead.1"}])
    writer.send(publish(DEAD_1, 0, *numbered(200, size=5000)))
    assert not writer.session.parked_messages
    dead = bus.statistics(DEAD_1)
    assert dead.dropped == {Reason.DROP_OLDEST: 200 - dead.ring.message_count}
    assert dead.ring.memory_bytes <= 1 << 18


def test_memory_is_reserved_for_dead_letters() -> None:
    bus = BrokerHarness(class_bytes=1 << 20, total_bytes=1 << 20, frame_bytes=10_000)
    peer = connect_version2(bus, subscribe(1, 5), publish(1, 0, *numbered(200, size=9000)))
    count = len(peer.receive_message_ids())
    assert count < 200
    assert peer.session.parked_messages
    peer.send(nack(5, 0, 4, "terminate"))
    assert bus.statistics(1).dropped == {Reason.TERMINATED: 4}
    assert len(fetch_dead_letters(bus)) == 4


def test_orphaned_messages_are_dropped_when_dead_letters_hold_the_memory() -> None:
    """Otherwise the class would stay blocked forever."""
    bus = BrokerHarness(
        class_messages=4, frame_bytes=100_000, class_bytes=1 << 18, total_bytes=1 << 19
    )
    dying = connect_version2(
        bus, subscribe(2, 5, max_deliveries=1), publish(2, 0, b"a"), classes=[2]
    )
    dying.receive_deliveries()
    dying.send(nack(5, 0, 1, 0))
    dying.receive_deliveries()
    bus.broker.end_turn()
    bus.tick(70)
    peer = bus.peer(connect1(1), subscribe1(1), publish1(1, *numbered(4)))
    bus.peer(publish1(1, *numbered(4, size=99_000))).disconnect()
    assert peer.receive_ids(1) == [0, 1, 2, 3]
    peer.send(ack1(1, 0, 4))
    bus.tick(100)
    assert len(fetch_dead_letters(bus, "dead.2")) == 1
    assert bus.statistics(1).dropped == {Reason.UNDELIVERED_AT_CLOSE: 4}
    peer.send(publish1(1, b"next"))
    assert [message.payload for message in peer.receive_messages()] == [b"next"]


def test_message_too_long_with_its_headers_has_no_dead_letter() -> None:
    bus = BrokerHarness(frame_bytes=100_000)
    headers = Envelope(headers=(("h", "x" * 65_500),))
    contents = [encode(headers, b"a"), b"\0" + b"x" * 99_900, b"\0fits"]
    give_up(bus, publish_envelopes(1, 0, *contents), count=3)
    assert bus.statistics(1).dropped == {Reason.MAX_DELIVERIES: 3, Reason.NO_DEAD_LETTER: 2}
    assert [payload for _, payload in fetch_dead_letters(bus)] == [b"fits"]


def test_dead_letter_class_is_created_above_the_class_limit() -> None:
    bus = BrokerHarness(classes=1)
    give_up(bus, publish(1, 0, b"a"), count=1)
    assert bus.statistics(1).dropped == {Reason.MAX_DELIVERIES: 1}
    assert list(bus.broker.classes) == [1, DEAD_1]
    assert bus.peer().send_refused(connect_request(2)) is Reason.TOO_MANY_CLASSES
    assert len(fetch_dead_letters(bus)) == 1


@pytest.mark.parametrize("options", [{}, {"group": "g"}])
def test_many_dead_letters_are_written_in_several_turns(options: dict[str, object]) -> None:
    bus = BrokerHarness()
    bus.skips_checks = True  # Checks are slow with so many messages; checked at the end.
    count = 3 * DEAD_LETTER_BATCH_MESSAGES
    peer = connect_version2(bus, subscribe(1, 5, max_deliveries=1, max_in_flight=count, **options))
    peer.send(publish(1, 0, *numbered(count)))
    while peer.receive_deliveries():
        bus.broker.run_due_wakeups()
    subscriber = connect_version2(bus, classes=[1, 2])
    subscriber.send(subscribe(2, 1))
    subscriber.receive_all()
    peer.send(nack(5, 0, count, 0))
    turns = 0
    ring = bus.broker.classes[1].ring
    while len(ring):
        floor = ring.floor
        turns += 1
        subscriber.send(publish(2, turns - 1, b"x"))
        peer.session.outbox.peek(bus.broker.tick_number)
        bus.broker.run_due_wakeups()
        bus.broker.end_turn()
        assert subscriber.receive_message_ids() == [turns - 1]
        assert ring.floor - floor <= 2 * DEAD_LETTER_BATCH_MESSAGES
    assert turns >= 2
    bus.skips_checks = False
    bus.check_invariants()
    assert bus.statistics(DEAD_1).published == count
    sequences = [dead_headers(letter, "sequence") for letter, _ in fetch_dead_letters(bus)[:100]]
    assert sequences == [str(n) for n in range(100)]


def test_dead_letter_class_names() -> None:
    assert dead_letters.dead_letter_class_name("orders") == "dead.orders"
    assert len(dead_letters.dead_letter_class_name("x" * 200)) == 200
    assert dead_letters.is_dead_letter_class("dead.7")
    assert not dead_letters.is_dead_letter_class("deadlines")


def test_dead_letter_limit_below_a_ring_is_rejected() -> None:
    with pytest.raises(ValueError, match="dead_letter_bytes must be from 262144 "):
        Limits(dead_letter_bytes=1000)
