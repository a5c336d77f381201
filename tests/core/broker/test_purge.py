"""Purge: purged messages are delivered to no position, and release their space."""

from __future__ import annotations

from itertools import islice
from unittest import mock

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from simplebus.core.errors import Reason
from simplebus.core.message_class import purge as message_class_purge
from simplebus.core.settings import Retention, Settings
from simplebus.core.subscription import unacked_messages
from tests.behaviour import wire_peer
from tests.behaviour.wire_peer import BrokerHarness
from tests.behaviour.wire_peer_v2 import (
    FETCH,
    PURGE,
    Version2Peer,
    ack,
    channel_envelope,
    connect_version2,
    json_request,
    nack,
    publish,
    publish_envelopes,
    subscribe,
    timed_envelope,
    unsubscribe,
)


def purge(first: int | None = None, last: int | None = None, class_id: int = 1) -> bytes:
    fields = {name: at for name, at in (("first", first), ("last", last)) if at is not None}
    return json_request(PURGE, class_id, 4, **fields)


def send_and_expect_purge(peer: Version2Peer, *requests: bytes) -> None:
    """Send frames and expect a Purge reply."""
    peer.send(*requests)
    peer.receive_replies()


def purged_count(peer: Version2Peer) -> int:
    """Return the count in the Purge reply."""
    [answer] = [reply for reply in peer.receive_replies() if reply.kind == "purge"]
    assert (answer.class_id, answer.message_id, answer.last_field) == (1, 4, 0)
    count = answer.content.pop("purged")
    assert answer.content == {}
    assert isinstance(count, int)
    return count


def fill(bus: BrokerHarness, count: int = 10) -> Version2Peer:
    """Publish `count` messages."""
    return connect_version2(bus, publish(1, 0, *[b"%d" % n for n in range(count)]))


def fetch_reply(peer: Version2Peer) -> dict[str, object]:
    peer.send(json_request(FETCH, 1, 3))
    [answer] = [reply for reply in peer.receive_replies() if reply.kind == "fetch"]
    found: dict[str, object] = answer.content
    return found


def test_purge_of_a_whole_class() -> None:
    bus = BrokerHarness()
    peer = fill(bus)
    peer.send(purge())
    assert purged_count(peer) == 10
    assert len(bus.broker.classes[1].ring) == 0
    assert bus.statistics(1).dropped == {Reason.PURGED: 10}
    peer.send(purge())
    assert purged_count(peer) == 0


def test_purged_messages_are_released_from_the_floor_on() -> None:
    bus = BrokerHarness()
    peer = fill(bus)
    peer.send(purge(3, 5))
    assert purged_count(peer) == 2
    assert bus.broker.classes[1].ring.floor == 0
    assert fetch_reply(peer)["purged"] == [[3, 5]]
    peer.send(purge(last=3))
    assert purged_count(peer) == 3
    assert bus.broker.classes[1].ring.floor == 5
    assert "purged" not in fetch_reply(peer)
    bus.tick()
    assert not bus.broker.classes[1].purged_sequences


def test_purge_releases_retained_messages() -> None:
    bus = BrokerHarness(Settings(keep=Retention(messages=100)))
    peer = fill(bus)
    reader = connect_version2(bus, subscribe(1, 5))
    reader.receive_message_ids()
    reader.send(ack(5, 0, 10))
    assert len(bus.broker.classes[1].ring) == 10
    send_and_expect_purge(peer, purge(last=4), purge(6, 8))
    assert bus.broker.classes[1].ring.floor == 4
    send_and_expect_purge(peer, purge(4, 6))
    assert bus.broker.classes[1].ring.floor == 8


def test_later_subscription_does_not_get_purged_messages() -> None:
    bus = BrokerHarness()
    send_and_expect_purge(fill(bus), purge(2, 4))
    waiting = connect_version2(bus, subscribe(1, 5))
    assert waiting.receive_message_ids() == [0, 1, 4, 5, 6, 7, 8, 9]
    assert connect_version2(bus, subscribe(1, 5, start="earliest")).receive_message_ids() == [
        0,
        1,
        4,
        5,
        6,
        7,
        8,
        9,
    ]
    assert connect_version2(
        bus, subscribe(1, 5, start={"sequence": 3}, group="g")
    ).receive_message_ids() == [4, *range(5, 10)]


def test_version_1_does_not_get_purged_messages() -> None:
    bus = BrokerHarness()
    send_and_expect_purge(fill(bus), purge(2, 4))
    reader = bus.peer(wire_peer.connect(1), wire_peer.subscribe(1))
    assert reader.receive_ids(1) == [0, 1, 4, 5, 6, 7, 8, 9]


def test_unsent_purged_messages_are_not_sent() -> None:
    bus = BrokerHarness()
    peer = fill(bus)
    reader = connect_version2(bus, subscribe(1, 5, max_in_flight=2))
    assert reader.receive_message_ids() == [0, 1]
    send_and_expect_purge(peer, purge(4, 6), purge(8, 10))
    reader.send(ack(5, 0, 2))
    got = reader.receive_deliveries()
    assert [(message.message_id, message.attempt) for message in got] == [(2, 1), (3, 1)]
    reader.send(ack(5, 2, 4))
    assert reader.receive_message_ids() == [6, 7]
    reader.send(ack(5, 6, 8))
    assert len(bus.broker.classes[1].ring) == 0


def test_purged_messages_in_flight_need_no_ack() -> None:
    bus = BrokerHarness()
    peer = fill(bus)
    reader = connect_version2(bus, subscribe(1, 5, max_in_flight=2))
    assert reader.receive_message_ids() == [0, 1]
    send_and_expect_purge(peer, purge(last=2))
    assert reader.receive_message_ids() == [2, 3]
    bus.tick(6)
    assert reader.receive_message_ids() == [2, 3]
    [position] = bus.statistics(1).subscriptions
    assert (position.acknowledged, position.dropped, position.in_flight) == (0, 2, 2)


def test_group_member_loses_purged_messages() -> None:
    bus = BrokerHarness()
    member = connect_version2(bus, subscribe(1, 5, group="g", max_in_flight=4))
    peer = fill(bus)
    assert member.session.outbox.peek(0)  # A Deliver frame waits; nothing is read yet.
    send_and_expect_purge(peer, purge(1, 3))
    assert member.receive_message_ids() == [0, 3, 4, 5]
    member.send(ack(5, 0, 4))
    assert member.receive_message_ids() == [6, 7]
    send_and_expect_purge(peer, purge(5, 9))
    assert member.receive_message_ids() == [9]
    member.send(ack(5, 4, 10))
    assert len(bus.broker.classes[1].ring) == 0


def test_key_ordered_member_loses_purged_messages() -> None:
    bus = BrokerHarness()
    member = connect_version2(bus, subscribe(1, 5, group="g", by_key=True))
    peer = connect_version2(
        bus, publish_envelopes(1, 0, *[b"\x10\0\1%dx" % (n % 3) for n in range(6)])
    )
    assert member.session.outbox.peek(0)
    send_and_expect_purge(peer, purge(1, 2), purge(3, 4))
    assert member.receive_message_ids() == [0, 2, 4]
    send_and_expect_purge(peer, purge(0, 1))
    member.send(ack(5, 2, 3))
    assert member.receive_message_ids() == [5]
    member.send(ack(5, 0, 6))
    assert len(bus.broker.classes[1].ring) == 0


def test_idle_durable_does_not_get_purged_messages() -> None:
    bus = BrokerHarness()
    reader = connect_version2(bus, subscribe(1, 5, durable="d"))
    peer = fill(bus, 4)
    assert reader.receive_message_ids() == [0, 1, 2, 3]
    reader.disconnect()
    send_and_expect_purge(peer, publish(1, 4, b"4", b"5", b"6"), purge(1, 3), purge(5, 6))
    successor = connect_version2(bus, subscribe(1, 5, durable="d"))
    assert sorted(successor.receive_message_ids()) == [0, 3, 4, 6]


def test_delayed_purged_messages_are_not_sent() -> None:
    bus = BrokerHarness()
    peer = connect_version2(
        bus,
        publish_envelopes(1, 0, timed_envelope(b"later", not_before_ms=1000)),
        publish(1, 1, b"now"),
    )
    reader = connect_version2(bus, subscribe(1, 5))
    assert reader.receive_message_ids() == [1]
    reader.send(nack(5, 1, 2, 2000))
    send_and_expect_purge(peer, purge())
    bus.broker.clock.now += 5
    bus.broker.run_due_wakeups()
    bus.tick(10)
    assert reader.receive_message_ids() == []
    assert len(bus.broker.classes[1].ring) == 0


def test_messages_outside_the_patterns_are_not_counted() -> None:
    bus = BrokerHarness()
    peer = connect_version2(
        bus, *[publish_envelopes(1, n, channel_envelope("ab"[n % 2], b"x")) for n in range(10)]
    )
    reader = connect_version2(bus, subscribe(1, 5, channels=["a"], max_in_flight=1))
    assert reader.receive_message_ids() == [0]
    send_and_expect_purge(peer, purge(3, 7))
    [position] = bus.statistics(1).subscriptions
    assert position.dropped == 2
    reader.send(ack(5, 0, 1))
    assert reader.receive_message_ids() == [2]
    reader.send(ack(5, 2, 3))
    assert reader.receive_message_ids() == [8]


def test_purge_resumes_a_blocked_publisher() -> None:
    bus = BrokerHarness(class_messages=3)
    peer = fill(bus, 5)
    assert [reply.message_id for reply in peer.receive_replies() if reply.kind == "confirm"] == [3]
    peer.send(purge())
    replies = peer.receive_replies()
    while bus.broker.end_turn().flush:
        pass
    replies += peer.receive_replies()
    assert [(reply.kind, reply.message_id) for reply in replies] == [("purge", 4), ("confirm", 5)]


def test_version1_subscription_during_a_purge_receives_no_purged_messages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(message_class_purge, "PURGED_POSITIONS_PER_TURN", 1)
    bus = BrokerHarness()
    peer = fill(bus, 4)
    for _ in range(3):
        connect_version2(bus, subscribe(1, 1, start="earliest"))
    parts = message_class_purge.purge_in_parts(bus.broker.classes[1], 0, 3, None)
    next(parts)
    late = wire_peer.WirePeer(bus, bus.broker.open_session())
    late.send(wire_peer.connect(1), wire_peer.subscribe(1))
    assert len(list(parts)) > 0
    assert [message.message_id for message in late.receive_messages()] == [3]
    assert not peer.session.is_closed


def test_purge_is_refused_with_too_many_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(message_class_purge, "PURGED_RANGES_MAX", 2)
    bus = BrokerHarness()
    peer = fill(bus)
    send_and_expect_purge(peer, purge(2, 3), purge(4, 5))
    peer.send(purge(6, 7))
    [reply] = peer.receive_replies()
    assert reply.content["code"] == "memory_limit"
    assert "2 purged ranges" in reply.content["message"]
    peer.send(purge(last=2))
    assert purged_count(peer) == 2


def test_fetch_reply_limits_purged_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("simplebus.core.broker.fetch.FETCH_PURGED_MAX", 2)
    bus = BrokerHarness()
    peer = fill(bus)
    send_and_expect_purge(peer, purge(1, 2), purge(3, 4), purge(5, 6), purge(7, 8))
    found = fetch_reply(peer)
    assert (found["next"], found["purged"]) == (5, [[1, 2], [3, 4]])


def test_invalid_purge_is_refused() -> None:
    bus = BrokerHarness()
    peer = fill(bus)
    for request, code in (
        (purge(class_id=9), "unknown_class"),
        (json_request(PURGE, 1, 4, first=-1), "bad_request"),
        (json_request(PURGE, 1, 4, last="x"), "bad_request"),
    ):
        peer.send(request)
        [answer] = [reply for reply in peer.receive_replies() if reply.kind == "error"]
        assert (answer.content["code"], answer.message_id, answer.last_field) == (code, 4, PURGE)
    peer.send(purge(7, 3), purge(50, 60))
    assert [reply.content for reply in peer.receive_replies()] == [{"purged": 0}, {"purged": 0}]


# Everything together -----------------------------------------------------------------------------

wishes = st.sampled_from(
    [
        {},
        {"max_in_flight": 2},
        {"channels": ["a"]},
        {"channels": ["a"], "max_in_flight": 3},
        {"durable": "d", "max_in_flight": 2},
        {"group": "g", "max_in_flight": 2},
        {"group": "k", "max_in_flight": 2, "by_key": True},
        {"start": "earliest"},
        {"max_pending": 3, "slow": "drop_newest"},
    ]
)
numbers = st.integers(0, 30)
steps = st.lists(
    st.one_of(
        st.tuples(st.just("publish"), st.lists(st.sampled_from("abtkk"), min_size=1, max_size=5)),
        st.tuples(st.just("subscribe"), wishes),
        st.tuples(st.just("purge"), numbers, numbers),
        st.tuples(st.just("ack"), st.integers(0, 3), numbers, numbers),
        st.tuples(st.just("nack"), st.integers(0, 3), numbers, st.sampled_from([None, 0, 1500])),
        st.tuples(st.just("hear"), st.integers(0, 3)),
        st.tuples(st.just("leave"), st.integers(0, 3)),
        st.tuples(st.just("tick")),
    ),
    max_size=30,
)
CONTENTS = {
    "a": channel_envelope("a", b"x"),
    "b": channel_envelope("b", b"x"),
    "t": timed_envelope(b"x", not_before_ms=1500),
    "k": b"\x10\0\1kx",
}


@settings(max_examples=120)
@example(
    [("subscribe", {"group": "g", "max_in_flight": 2}), ("publish", ["a"]), ("purge", 0, 1)], []
)
@example(
    [("publish", ["a"]), ("subscribe", {"group": "k", "by_key": True}), ("purge", 0, 1)], [(0, {})]
)
@given(steps, st.none() | st.lists(st.tuples(st.integers(0, 3), wishes), max_size=3))
def test_exactly_the_purged_messages_are_not_delivered(
    actions: list[tuple],  # type: ignore[type-arg]
    subscribed_between: list[tuple[int, dict[str, object]]] | None,
) -> None:
    """A list of subscriptions divides each purge into parts, between which they begin."""
    portion = 128 if subscribed_between is None else 1
    with (
        mock.patch.object(message_class_purge, "PURGED_POSITIONS_PER_TURN", portion),
        mock.patch.object(unacked_messages, "RECLAIMED_MEMBERS_PER_TURN", portion),
    ):
        compare_deliveries(actions, subscribed_between)


def purge_in_portions(
    bus: BrokerHarness,
    readers: list[Version2Peer],
    request: bytes,
    subscribed_between: list[tuple[int, dict[str, object]]],
) -> int:
    """Purge in parts, between which readers receive messages and subscribe again."""
    peer = connect_version2(bus)
    peer.receive_replies()
    peer.session.allow_split_reads()
    peer.send(request)
    remaining = iter(subscribed_between)
    while not (replies := peer.receive_replies()):
        for reader in readers:
            reader.receive_message_ids()
        for number, options in islice(remaining, 1):
            readers[number].send(unsubscribe(5), subscribe(1, 5, **options))
        bus.broker.run_due_wakeups()
    peer.disconnect()
    [reply] = replies
    count: int = reply.content["purged"]
    return count


def compare_deliveries(
    actions: list[tuple],  # type: ignore[type-arg]
    subscribed_between: list[tuple[int, dict[str, object]]] | None,
) -> None:
    bus = BrokerHarness()
    writer, readers = connect_version2(bus), [connect_version2(bus) for _ in range(4)]
    purged: set[int] = set()
    published: list[str] = []
    purged_count = 0

    def hear(reader: Version2Peer) -> list[int]:
        ids = reader.receive_message_ids()
        assert not purged.intersection(ids)
        return ids

    for at, (verb, *arguments) in enumerate(actions):
        if verb == "publish":
            writer.send(
                publish_envelopes(1, len(published), *[CONTENTS[kind] for kind in arguments[0]])
            )
            published += arguments[0]
        elif verb == "subscribe":
            readers[at % 4].send(unsubscribe(5), subscribe(1, 5, **arguments[0]))
        elif verb == "purge":
            first, last = sorted(arguments)
            if subscribed_between is not None and published:
                purged_count += purge_in_portions(
                    bus, readers, purge(first, last), subscribed_between
                )
            else:
                writer.send(purge(first, last))
                purged_count += sum(
                    reply.content["purged"]
                    for reply in writer.receive_replies()
                    if reply.kind == "purge"
                )
            stored = range(max(first, bus.broker.classes[1].ring.floor), last)
            purged.update(n for n in (*stored, *range(first, last)) if n < len(published))
        elif verb == "ack":
            first, last = sorted(arguments[1:])
            readers[arguments[0]].send(ack(5, first, last + 1))
        elif verb == "nack":
            readers[arguments[0]].send(nack(5, arguments[1], arguments[1] + 3, arguments[2]))
        elif verb == "hear":
            hear(readers[arguments[0]])
        elif verb == "leave":
            readers[arguments[0]].send(unsubscribe(5))
        else:
            bus.broker.clock.now += 1
            bus.broker.run_due_wakeups()
            bus.tick()
        while bus.broker.end_turn().flush:
            pass
    last_one = connect_version2(bus, subscribe(1, 5, start="earliest"))
    floor = bus.broker.classes[1].ring.floor
    bus.broker.clock.now += 100
    bus.broker.run_due_wakeups()
    assert set(hear(last_one)) == set(range(floor, len(published))) - purged
    assert purged_count == bus.statistics(1).dropped.get(Reason.PURGED, 0)
    ack_all = ack(5, 0, max(1, len(published)))
    all_readers = [*readers, last_one]
    is_new = True
    while is_new:  # Deliver and acknowledge all remaining messages.
        for reader in all_readers:
            reader.send(ack_all)
        is_new = any(hear(reader) for reader in all_readers)
    bus.check_invariants()  # Checks the released messages.
    cls = bus.broker.classes[1]
    is_left = any(not position.has_consumer for position in cls.positions)
    assert is_left or cls.backlog_window.in_flight_count or len(cls.ring) == 0


def test_purges_alternate_with_other_sessions() -> None:
    bus = BrokerHarness()
    peer = fill(bus, 30)
    peer.receive_replies()
    peer.send(b"".join(purge(n, n + 1) for n in range(1, 21)))
    reader, turn_count = connect_version2(bus, subscribe(1, 5)), 0
    while peer.session.outbox.peek(0):
        bus.check_invariants()
        assert bus.statistics(1).dropped[Reason.PURGED] == turn_count + 1, "one a turn"
        turn_count += 1
        peer.session.outbox.mark_sent(len(peer.session.outbox.peek(0)), 0)
    assert turn_count == 20
    assert reader.receive_message_ids() == [0, *range(21, 30)]


def test_purge_changes_a_bounded_number_of_positions_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(message_class_purge, "PURGED_POSITIONS_PER_TURN", 3)
    bus = BrokerHarness()
    durables = connect_version2(bus, *[subscribe(1, n, durable=f"d {n}") for n in range(1, 11)])
    peer = fill(bus)
    peer.receive_replies()
    peer.session.allow_split_reads()
    peer.send(purge())
    purged_counts = []
    while not peer.session.outbox.peek(0):
        floors = [position.window.floor for position in bus.broker.classes[1].positions]
        purged_counts.append(floors.count(10))
        bus.broker.run_due_wakeups()
        bus.check_invariants()
    assert purged_counts == [3, 6, 9]
    assert purged_count(peer) == 10
    assert durables.receive_message_ids() == []


def test_purge_that_has_begun_is_completed_without_its_session(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(message_class_purge, "PURGED_POSITIONS_PER_TURN", 1)
    bus = BrokerHarness()
    durables = connect_version2(bus, *[subscribe(1, n, durable=f"d {n}") for n in range(1, 6)])
    peer = fill(bus)
    peer.receive_replies()
    peer.session.allow_split_reads()
    peer.send(purge())
    assert peer.receive_replies() == []
    peer.disconnect()
    while bus.broker.next_wakeup <= bus.broker.clock.now:
        bus.broker.run_due_wakeups()
    assert len(bus.broker.classes[1].ring) == 0
    assert durables.receive_message_ids() == []


def test_requests_of_an_ended_session_are_dropped() -> None:
    bus = BrokerHarness()
    peer = fill(bus)
    peer.receive_replies()
    peer.send(purge(0, 1), purge(1, 2))
    bus.broker.close_session(peer.session)
    while piece := peer.session.outbox.peek(0):
        peer.session.outbox.mark_sent(len(piece), 0)
    assert bus.statistics(1).dropped == {}
