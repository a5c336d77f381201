"""Last values that are stored anew, and what becomes of them in a full class.

Rule 1: whatever a class stores anew, it must not show in what anybody is sent.
"""

from __future__ import annotations

import pytest

from simplebus.core.errors import Reason
from simplebus.core.limits import Limits
from simplebus.core.message_class import last_values
from simplebus.core.protocol import envelope_batch
from simplebus.core.settings import ClassSettings, FullPolicy, Settings
from simplebus.core.store import compaction
from tests.behaviour.wire_peer import BrokerHarness
from tests.behaviour.wire_peer_v2 import ack, connect_version2, subscribe
from tests.models.last_value_model import (
    Writer,
    drained,
    glance,
    late,
    payload,
    payloads,
)


@pytest.fixture
def low(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values are stored anew as soon as 300 bytes between them are nobody's."""
    monkeypatch.setattr(last_values, "COMPACTION_BYTES_MIN", 300)


# Storing them anew -------------------------------------------------------------------------------


@pytest.mark.usefixtures("low")
def test_old_values_are_stored_anew_and_nobody_is_sent_them_again() -> None:
    bus = BrokerHarness()
    writer = Writer(bus)
    reader = connect_version2(bus, subscribe(1, 4))
    writer.put("cold", b"old")
    for number in range(200):
        writer.put("hot", b"%d" % number)
        got = reader.receive_deliveries()
        assert [payload(each.content, each.kind) for each in got][-1:] == [b"%d" % number]
        assert len(got) == 1 + (number == 0)
        reader.send(ack(4, got[0].message_id, got[-1].message_id + 1))
    statistics = bus.statistics(1)
    assert statistics.ring.frame_bytes < 1000
    assert statistics.carried >= 5
    assert statistics.published == statistics.acknowledged == statistics.delivered == 201
    assert payloads(late(bus)) in ([b"old", b"199"], [b"199", b"old"])


@pytest.mark.usefixtures("low")
def test_who_is_behind_goes_on_in_order_without_what_was_stored_anew() -> None:
    bus = BrokerHarness()
    writer = Writer(bus)
    quick = connect_version2(
        bus, subscribe(1, 4), subscribe(1, 5, group="g"), subscribe(1, 6, durable="d")
    )
    slow = connect_version2(bus, subscribe(1, 4, channels=["hot", "warm"], max_in_flight=1))
    writer.put("cold", b"old")
    expected = []
    for number in range(60):
        channel = ("hot", "warm", "other")[number % 3]
        writer.put(channel, b"%d" % number)
        expected += [b"%d" % number] * (channel != "other")
        for got in quick.receive_deliveries():
            quick.send(ack(got.number, got.message_id, got.message_id + 1))
    seen = []
    while got := slow.receive_deliveries():
        (one,) = got
        seen.append(payload(one.content, one.kind))
        slow.send(ack(4, one.message_id, one.message_id + 1))
        assert quick.receive_deliveries() == []
    assert seen == expected
    assert bus.statistics(1).carried >= 1


@pytest.mark.usefixtures("low")
def test_what_is_stored_anew_expires_when_it_would_have() -> None:
    bus = BrokerHarness()
    writer = Writer(bus)
    bus.broker.clock.now = 100.0
    writer.put("cold", b"old", expires_ms=50_000)
    for number in range(40):
        bus.broker.clock.now += 1
        writer.put("hot", b"%d" % number)
        drained(bus)
    assert bus.statistics(1).carried >= 1
    (got, _) = sorted(
        late(bus).receive_deliveries(), key=lambda each: payload(each.content, each.kind)
    )[::-1]
    about, text = envelope_batch.decode(got.content)
    assert text == b"old"
    assert about.channel == "cold"
    assert about.expires_ms is not None
    assert 10_000 <= about.expires_ms < 50_000, "it is accepted later, and expires at the same time"
    bus.broker.clock.now = 150.0
    assert payloads(late(bus)) == [b"39"]


@pytest.mark.usefixtures("low")
def test_what_is_mostly_values_stays_where_it_is() -> None:
    bus = BrokerHarness()
    writer = Writer(bus)
    for number in range(40):
        writer.put(f"c{number}", b"x" * 20)
        drained(bus)
    assert bus.statistics(1).carried == 0
    assert len(glance(bus)) == 40


@pytest.mark.usefixtures("low")
def test_what_is_stored_anew_while_nobody_is_there_waits_for_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(compaction, "COMPACTION_BATCH_BYTES", 1)  # One value at a time.
    bus = BrokerHarness()
    writer = Writer(bus)
    for channel in "abcdefgh":
        writer.put(channel, channel.encode())
    for number in range(60):
        writer.put("hot", b"%d" % number)
    drained(bus)
    before = bus.statistics(1).carried
    bus.tick(9)
    assert bus.statistics(1).carried > before > 0
    assert payloads(connect_version2(bus, subscribe(1, 4))) == []
    assert len(glance(bus)) == 9


IN_MEMORY = [policy for policy in FullPolicy if policy is not FullPolicy.SPILL]

# A full class ------------------------------------------------------------------------------------


def full(policy: FullPolicy = FullPolicy.BLOCK, **more: int) -> BrokerHarness:
    """A bus whose class 1 holds 16 messages."""
    limits = Limits(class_messages=16, **more)
    return BrokerHarness(Settings(limits=limits, full_policy=policy))


def test_a_full_class_lets_go_of_its_oldest_values_when_nothing_else_is_in_the_way() -> None:
    for policy in IN_MEMORY:
        bus = full(policy)
        writer = Writer(bus)
        for number in range(40):
            writer.put(f"c{number}", b"%d" % number)
            drained(bus)
        dropped = bus.statistics(1).dropped
        assert dropped == {Reason.LAST_VALUE_DROPPED: 40 - len(bus.broker.classes[1].ring)}
        left = glance(bus)
        assert 8 <= len(left) <= 16
        assert left == [b"%d" % number for number in range(40 - len(left), 40)]


def test_a_full_class_finds_room_between_its_values_first() -> None:
    bus = full()
    writer = Writer(bus)
    for channel in "abcdefgh":
        writer.put(channel, channel.encode())
    for number in range(40):
        writer.put("hot", b"%d" % number)
        drained(bus)
    assert set(glance(bus)) == {*(each.encode() for each in "abcdefgh"), b"39"}
    assert not bus.statistics(1).dropped
    assert bus.statistics(1).carried >= 8


def test_values_stay_while_somebody_else_can_make_room() -> None:
    bus = full()
    writer = Writer(bus)
    for channel in "abcd":
        writer.put(channel, channel.encode())
    drained(bus)
    reader = connect_version2(bus, subscribe(1, 4))
    for number in range(20):
        writer.put(f"n{number}", b"%d" % number)
    assert writer.peer.session.parked_messages
    assert len(reader.receive_deliveries()) == 12
    assert not bus.statistics(1).dropped
    while got := reader.receive_deliveries() or writer.peer.session.parked_messages:
        last = bus.broker.classes[1].ring.head
        reader.send(ack(4, last - 16, last))
        assert got is not None
    assert not writer.peer.session.parked_messages
    assert set(bus.statistics(1).dropped) == {Reason.LAST_VALUE_DROPPED}


def test_who_drops_the_oldest_keeps_the_values_among_them() -> None:
    bus = full(FullPolicy.DROP_OLDEST)
    writer = Writer(bus)
    for channel in "abcd":
        writer.put(channel, channel.encode())
    for number in range(200):
        writer.put("hot", b"%d" % number)
    dropped = bus.statistics(1).dropped
    assert dropped == {Reason.DROP_OLDEST: 204 - 16}, "what is stored anew is not lost"
    got = payloads(late(bus))
    assert set(got) == {b"a", b"b", b"c", b"d", b"199"}
    assert len(got) == 5


def test_what_is_dropped_takes_no_values_with_it() -> None:
    bus = full(FullPolicy.DROP_OLDEST)
    writer = Writer(bus)
    reader = connect_version2(bus, subscribe(1, 4))
    for channel in ("hot", "a", "b", "c"):
        writer.put(channel, channel.encode())
    assert len(reader.receive_deliveries()) == 4
    reader.send(ack(4, 1, 4))
    for number in range(13):
        writer.put("hot", b"%d" % number)
    assert bus.statistics(1).dropped == {Reason.DROP_OLDEST: 1}
    assert set(payloads(late(bus))) == {b"a", b"b", b"c", b"12"}


def test_who_holds_back_a_class_that_holds_values_too_is_found() -> None:
    bus = full(stall_seconds=3)
    writer = Writer(bus)
    for channel in "abcdefghijklm":
        writer.put(channel, channel.encode())
    drained(bus)
    reader = connect_version2(bus, subscribe(1, 4))
    for number in range(20):
        writer.put("hot", b"%d" % number)
    assert writer.peer.session.parked_messages
    overdue = bus.tick(5)
    assert {(session, error.reason) for session, error in overdue} == {
        (reader.session, Reason.STALLED)
    }


def test_a_message_that_can_never_fit_drops_what_it_dropped_before() -> None:
    own = {1: ClassSettings(last_values=True, bytes_max=256 * 1024)}
    for policy in (FullPolicy.DROP_OLDEST, FullPolicy.DROP_NEWEST):
        bus = BrokerHarness(Settings(classes=own, full_policy=policy))
        writer = Writer(bus)
        for channel in "abc":
            writer.put(channel, channel.encode())
            writer.put("hot", bytes(1000))
            drained(bus)
        writer.put("big", bytes(300 * 1024))
        assert writer.peer.receive_error_codes() == ["drop_newest"]
        writer.put("d", b"d")
        assert b"d" in glance(bus)
