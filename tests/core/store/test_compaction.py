"""Compaction: last values are copied to the head, and subscribers do not notice."""

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
    LastValueWriter,
    drain_class,
    open_late_reader,
    payload,
    payloads,
    read_last_values,
)


@pytest.fixture
def low_compaction_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compact as soon as 300 bytes between the values belong to other messages."""
    monkeypatch.setattr(last_values, "COMPACTION_BYTES_MIN", 300)


# Copying values --------------------------------------------------------------------------------


@pytest.mark.usefixtures("low_compaction_limit")
def test_copied_values_are_not_delivered_again() -> None:
    bus = BrokerHarness()
    writer = LastValueWriter(bus)
    reader = connect_version2(bus, subscribe(1, 4))
    writer.publish_value("cold", b"old")
    for number in range(200):
        writer.publish_value("hot", b"%d" % number)
        got = reader.receive_deliveries()
        assert [payload(each.content, each.kind) for each in got][-1:] == [b"%d" % number]
        assert len(got) == 1 + (number == 0)
        reader.send(ack(4, got[0].message_id, got[-1].message_id + 1))
    statistics = bus.statistics(1)
    assert statistics.ring.frame_bytes < 1000
    assert statistics.carried >= 5
    assert statistics.published == statistics.acknowledged == statistics.delivered == 201
    assert payloads(open_late_reader(bus)) in ([b"old", b"199"], [b"199", b"old"])


@pytest.mark.usefixtures("low_compaction_limit")
def test_slow_subscriber_gets_messages_in_order_without_copies() -> None:
    bus = BrokerHarness()
    writer = LastValueWriter(bus)
    quick = connect_version2(
        bus, subscribe(1, 4), subscribe(1, 5, group="g"), subscribe(1, 6, durable="d")
    )
    slow = connect_version2(bus, subscribe(1, 4, channels=["hot", "warm"], max_in_flight=1))
    writer.publish_value("cold", b"old")
    expected = []
    for number in range(60):
        channel = ("hot", "warm", "other")[number % 3]
        writer.publish_value(channel, b"%d" % number)
        expected += [b"%d" % number] * (channel != "other")
        for got in quick.receive_deliveries():
            quick.send(ack(got.number, got.message_id, got.message_id + 1))
    seen = []
    while got := slow.receive_deliveries():
        (message,) = got
        seen.append(payload(message.content, message.kind))
        slow.send(ack(4, message.message_id, message.message_id + 1))
        assert quick.receive_deliveries() == []
    assert seen == expected
    assert bus.statistics(1).carried >= 1


@pytest.mark.usefixtures("low_compaction_limit")
def test_copy_expires_with_the_original() -> None:
    bus = BrokerHarness()
    writer = LastValueWriter(bus)
    bus.broker.clock.now = 100.0
    writer.publish_value("cold", b"old", expires_ms=50_000)
    for number in range(40):
        bus.broker.clock.now += 1
        writer.publish_value("hot", b"%d" % number)
        drain_class(bus)
    assert bus.statistics(1).carried >= 1
    (got, _) = sorted(
        open_late_reader(bus).receive_deliveries(),
        key=lambda each: payload(each.content, each.kind),
    )[::-1]
    about, text = envelope_batch.decode(got.content)
    assert text == b"old"
    assert about.channel == "cold"
    assert about.expires_ms is not None
    assert 10_000 <= about.expires_ms < 50_000, (
        "the copy is accepted later and expires at the same time"
    )
    bus.broker.clock.now = 150.0
    assert payloads(open_late_reader(bus)) == [b"39"]


@pytest.mark.usefixtures("low_compaction_limit")
def test_class_of_mostly_values_is_not_compacted() -> None:
    bus = BrokerHarness()
    writer = LastValueWriter(bus)
    for number in range(40):
        writer.publish_value(f"c{number}", b"x" * 20)
        drain_class(bus)
    assert bus.statistics(1).carried == 0
    assert len(read_last_values(bus)) == 40


@pytest.mark.usefixtures("low_compaction_limit")
def test_copies_are_not_added_to_the_backlog(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(compaction, "COMPACTION_BATCH_BYTES", 1)  # One value at a time.
    bus = BrokerHarness()
    writer = LastValueWriter(bus)
    for channel in "abcdefgh":
        writer.publish_value(channel, channel.encode())
    for number in range(60):
        writer.publish_value("hot", b"%d" % number)
    drain_class(bus)
    before = bus.statistics(1).carried
    bus.tick(9)
    assert bus.statistics(1).carried > before > 0
    assert payloads(connect_version2(bus, subscribe(1, 4))) == []
    assert len(read_last_values(bus)) == 9


IN_MEMORY = [policy for policy in FullPolicy if policy is not FullPolicy.SPILL]

# A full class ------------------------------------------------------------------------------------


def full_bus(policy: FullPolicy = FullPolicy.BLOCK, **more: int) -> BrokerHarness:
    """Return a bus whose classes hold 16 messages."""
    limits = Limits(class_messages=16, **more)
    return BrokerHarness(Settings(limits=limits, full_policy=policy))


def test_full_class_of_values_drops_the_oldest_values() -> None:
    for policy in IN_MEMORY:
        bus = full_bus(policy)
        writer = LastValueWriter(bus)
        for number in range(40):
            writer.publish_value(f"c{number}", b"%d" % number)
            drain_class(bus)
        dropped = bus.statistics(1).dropped
        assert dropped == {Reason.LAST_VALUE_DROPPED: 40 - len(bus.broker.classes[1].ring)}
        values = read_last_values(bus)
        assert 8 <= len(values) <= 16
        assert values == [b"%d" % number for number in range(40 - len(values), 40)]


def test_full_class_compacts_before_it_drops_values() -> None:
    bus = full_bus()
    writer = LastValueWriter(bus)
    for channel in "abcdefgh":
        writer.publish_value(channel, channel.encode())
    for number in range(40):
        writer.publish_value("hot", b"%d" % number)
        drain_class(bus)
    assert set(read_last_values(bus)) == {*(each.encode() for each in "abcdefgh"), b"39"}
    assert not bus.statistics(1).dropped
    assert bus.statistics(1).carried >= 8


def test_values_stay_while_acks_can_make_space() -> None:
    bus = full_bus()
    writer = LastValueWriter(bus)
    for channel in "abcd":
        writer.publish_value(channel, channel.encode())
    drain_class(bus)
    reader = connect_version2(bus, subscribe(1, 4))
    for number in range(20):
        writer.publish_value(f"n{number}", b"%d" % number)
    assert writer.peer.session.parked_messages
    assert len(reader.receive_deliveries()) == 12
    assert not bus.statistics(1).dropped
    while got := reader.receive_deliveries() or writer.peer.session.parked_messages:
        last = bus.broker.classes[1].ring.head
        reader.send(ack(4, last - 16, last))
        assert got is not None
    assert not writer.peer.session.parked_messages
    assert set(bus.statistics(1).dropped) == {Reason.LAST_VALUE_DROPPED}


def test_drop_oldest_copies_last_values() -> None:
    bus = full_bus(FullPolicy.DROP_OLDEST)
    writer = LastValueWriter(bus)
    for channel in "abcd":
        writer.publish_value(channel, channel.encode())
    for number in range(200):
        writer.publish_value("hot", b"%d" % number)
    dropped = bus.statistics(1).dropped
    assert dropped == {Reason.DROP_OLDEST: 204 - 16}, "copied values are not lost"
    got = payloads(open_late_reader(bus))
    assert set(got) == {b"a", b"b", b"c", b"d", b"199"}
    assert len(got) == 5


def test_drop_oldest_keeps_acked_last_values() -> None:
    bus = full_bus(FullPolicy.DROP_OLDEST)
    writer = LastValueWriter(bus)
    reader = connect_version2(bus, subscribe(1, 4))
    for channel in ("hot", "a", "b", "c"):
        writer.publish_value(channel, channel.encode())
    assert len(reader.receive_deliveries()) == 4
    reader.send(ack(4, 1, 4))
    for number in range(13):
        writer.publish_value("hot", b"%d" % number)
    assert bus.statistics(1).dropped == {Reason.DROP_OLDEST: 1}
    assert set(payloads(open_late_reader(bus))) == {b"a", b"b", b"c", b"12"}


def test_stalled_subscriber_of_a_class_with_values_is_found() -> None:
    bus = full_bus(stall_seconds=3)
    writer = LastValueWriter(bus)
    for channel in "abcdefghijklm":
        writer.publish_value(channel, channel.encode())
    drain_class(bus)
    reader = connect_version2(bus, subscribe(1, 4))
    for number in range(20):
        writer.publish_value("hot", b"%d" % number)
    assert writer.peer.session.parked_messages
    overdue = bus.tick(5)
    assert {(session, error.reason) for session, error in overdue} == {
        (reader.session, Reason.STALLED)
    }


def test_message_that_never_fits_is_dropped() -> None:
    class_settings = {1: ClassSettings(last_values=True, bytes_max=256 * 1024)}
    for policy in (FullPolicy.DROP_OLDEST, FullPolicy.DROP_NEWEST):
        bus = BrokerHarness(Settings(classes=class_settings, full_policy=policy))
        writer = LastValueWriter(bus)
        for channel in "abc":
            writer.publish_value(channel, channel.encode())
            writer.publish_value("hot", bytes(1000))
            drain_class(bus)
        writer.publish_value("big", bytes(300 * 1024))
        assert writer.peer.receive_error_codes() == ["drop_newest"]
        writer.publish_value("d", b"d")
        assert b"d" in read_last_values(bus)
