"""Last values and retention after a restart."""

from __future__ import annotations

from pathlib import Path

import pytest

from simplebus.core.message_class import last_values
from simplebus.core.protocol import envelope_batch
from simplebus.core.settings import ClassSettings, Retention, Settings
from simplebus.core.snapshot import decode_changes
from tests.behaviour.wire_peer_v2 import ack, connect_version2, publish, subscribe
from tests.models.last_value_model import (
    LastValueWriter,
    drain_class,
    open_late_reader,
    payload,
    read_last_values,
)
from tests.storage.journaled_broker import START, KeptBus
from tests.storage.test_missing_files import damage_record
from tests.storage.test_recovery import segments


@pytest.fixture
def low(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compact as soon as 300 bytes between values are released."""
    monkeypatch.setattr(last_values, "COMPACTION_BYTES_MIN", 300)


def test_damage_deletes_no_other_value(tmp_path: Path) -> None:
    """Missing messages have no channel, but are no deletion of the value without a channel."""
    bus = KeptBus(tmp_path)
    writer = LastValueWriter(bus)
    for channel, value in (("", b"0"), ("a", b"1"), ("b", b"2"), ("c", b"3")):
        writer.publish_value(channel, value)
        bus.sync()
    drain_class(bus)
    bus.close()
    damage_record(segments(tmp_path)[0], 2)
    for _ in range(2):
        bus = KeptBus(tmp_path)
        assert read_last_values(bus) == [b"0", b"1", b"3"]
        bus.close()


def test_last_values_survive_restart(tmp_path: Path) -> None:
    bus = KeptBus(tmp_path)
    writer = LastValueWriter(bus)
    for number in range(20):
        writer.publish_value("abcd"[number % 4], b"%d" % number)
    writer.publish_value("b", b"")
    writer.publish_value("a", b"soon", expires_ms=60_000)
    drain_class(bus)
    bus.sync()
    bus.crash()

    bus = KeptBus(tmp_path, now=START + 30)
    cls = bus.broker.classes[1]
    assert cls.has_last_values, "the subscription that requested it is closed"
    assert (cls.name, cls.last_values.count_values(START + 30)) == ("state", 3)
    assert read_last_values(bus) == [b"18", b"19", b"soon"]
    bus.sync()
    bus.crash()

    bus = KeptBus(tmp_path, now=START + 61)
    assert read_last_values(bus) == [b"18", b"19"]
    LastValueWriter(bus).publish_value("c", b"new")
    drain_class(bus)
    assert read_last_values(bus) == [b"19", b"new"]
    bus.close()


def test_durable_started_at_last_values_resumes(tmp_path: Path) -> None:
    bus = KeptBus(tmp_path)
    writer = LastValueWriter(bus)
    for number in range(9):
        writer.publish_value("abc"[number % 3], b"%d" % number)
    drain_class(bus)
    reader = open_late_reader(bus, durable="d", max_in_flight=2)
    bus.sync()
    assert [delivery.message_id for delivery in reader.receive_deliveries()] == [6, 7]
    reader.send(ack(9, 6, 7))
    bus.broker.clock.now += 1
    bus.sync()
    bus.crash()

    bus = KeptBus(tmp_path)
    deliveries = open_late_reader(bus, durable="d").receive_deliveries()
    assert [(delivery.message_id, delivery.attempt) for delivery in deliveries] == [(7, 2), (8, 1)]
    bus.close()


@pytest.mark.usefixtures("low")
def test_compacted_copy_is_durable_before_original_is_removed(tmp_path: Path) -> None:
    bus = KeptBus(tmp_path, segment_bytes=200)
    writer = LastValueWriter(bus)
    writer.publish_value("cold", b"old", expires_ms=90_000)
    drain_class(bus)
    bus.sync()
    cls = bus.broker.classes[1]
    while not cls.compacted_count:
        writer.publish_value("hot", b"x" * 40)
        drain_class(bus)
        if not cls.compacted_count:
            bus.sync()
    bus.keeper.is_snapshot_due = True
    assert (cls.ring.floor > 0, cls.compute_durable_floor(bus.commit_log.durable_position)) == (
        True,
        0,
    )
    write_batch = bus.keeper.build_write_batch()
    assert write_batch is not None
    assert decode_changes(write_batch.snapshot).classes[0].floor == 0, (
        "a crash could separate the copy from the removal"
    )
    bus.remove()
    bus.crash()  # Taken before the copy was written.

    bus = KeptBus(tmp_path, segment_bytes=200, now=START + 10)
    assert b"old" in read_last_values(bus)
    writer, cls = LastValueWriter(bus), bus.broker.classes[1]
    while not cls.compacted_count:
        writer.publish_value("hot", b"x" * 40)
        drain_class(bus)
    bus.sync()
    bus.keeper.is_snapshot_due = True
    bus.sync()
    bus.remove()
    assert cls.compute_durable_floor(bus.commit_log.durable_position) == cls.ring.floor > 0
    assert min(int(path.stem) for path in (tmp_path / "classes" / "00001").iterdir()) > 0
    bus.crash()

    bus = KeptBus(tmp_path, now=START + 89)
    cls = bus.broker.classes[1]
    assert cls.ring.floor > 0
    old_segments = [
        delivery
        for delivery in open_late_reader(bus).receive_deliveries()
        if payload(delivery.content, delivery.kind) == b"old"
    ]
    assert envelope_batch.decode(old_segments[0].content)[0].expires_ms == 80_000
    assert cls.ring.read_row(old_segments[0].message_id).expires == pytest.approx(
        START + 90, abs=0.02
    )
    bus.close()


@pytest.mark.parametrize(
    ("retention", "expected_count"),
    [(Retention(messages=3), 3), (Retention(bytes=100), 7), (Retention(seconds=25), 3)],
)
def test_last_values_setting_survives_restart(
    tmp_path: Path, retention: Retention, expected_count: int
) -> None:
    settings = Settings(classes={1: ClassSettings(keep=retention)})
    bus = KeptBus(tmp_path, settings=settings)
    writer = connect_version2(bus, classes=[1, 2])
    reader = connect_version2(bus, subscribe(1, 4), subscribe(2, 5), classes=[1, 2])
    for number in range(10):
        bus.broker.clock.now = START + 10 * number
        writer.send(publish(1, 2 * number, b"x"), publish(2, 2 * number + 1, b"y"))
        reader.receive_deliveries()
        reader.send(ack(4, number, number + 1), ack(5, number, number + 1))
    bus.tick()
    assert [len(bus.broker.classes[each].ring) for each in (1, 2)] == [expected_count, 0]
    bus.sync()
    bus.crash()

    bus = KeptBus(tmp_path, settings=settings, now=START + 90)
    ring = bus.broker.classes[1].ring
    assert (ring.floor, ring.head) == (10 - expected_count, 10)
    reader = connect_version2(bus, subscribe(1, 4, start="earliest"))
    assert len(reader.receive_deliveries()) == expected_count
    reader.send(ack(4, 10 - expected_count, 10))
    bus.close()

    bus = KeptBus(tmp_path, settings=settings, now=START + 1000)
    bus.tick()
    assert len(bus.broker.classes[1].ring) == (0 if retention.seconds else expected_count), (
        "without traffic"
    )
    bus.close()
