"""Spilled classes after crashes and disk errors."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from simplebus.core.broker.broker import Settings
from simplebus.core.errors import Reason
from simplebus.core.limits import Limits
from simplebus.core.message_class import spill
from simplebus.core.message_class.spill import SpillRead
from simplebus.core.settings import FullPolicy
from simplebus.storage import records
from simplebus.storage.file_names import STAMP
from tests.behaviour.wire_peer import numbered
from tests.behaviour.wire_peer_v2 import (
    Version2Peer,
    ack,
    connect_version2,
    json_request,
    publish,
    publish_envelopes,
    subscribe,
    timed_envelope,
)
from tests.storage.journaled_broker import KeptBus
from tests.storage.spilling_broker import (
    SpilledBus,
    advance_clock,
    contents,
    fetch,
    fill,
    receive_and_ack_all,
    receive_available,
    spill_settings,
)


def crash_and_recover(bus: SpilledBus, path: Path, **options: object) -> SpilledBus:
    """Crash the bus and recover it from its directory."""
    bus.crash()
    return SpilledBus(path, **options)  # type: ignore[arg-type]


# Recovery ----------------------------------------------------------------------------------------


def test_recovers_spilled_class_without_reading_it(tmp_path: Path) -> None:
    bus = SpilledBus(tmp_path, segment_bytes=1000)
    reader = connect_version2(bus, subscribe(1, 5, durable="d", max_in_flight=30), name="reader")
    reader.send(ack(5, 0, 0))
    fill(bus, connect_version2(bus, name="till"), 1000)
    assert len(receive_available(bus, reader)) == 30
    reader.send(ack(5, 0, 10), ack(5, 12, 15))
    bus.close()
    first = tmp_path / "classes" / "00001" / f"{0:020}.log"
    data = first.read_bytes()
    bus = SpilledBus(tmp_path, segment_bytes=1000)
    statistics = bus.statistics(1)
    assert statistics.ring.message_count <= 64
    assert statistics.spilled + statistics.ring.message_count == 990
    assert bus.found.message_count == 990
    assert first.read_bytes() == data
    reader = connect_version2(bus, subscribe(1, 5, durable="d"))
    received = receive_and_ack_all(bus, reader)
    assert sorted(each.message_id for each in received) == [10, 11, *range(15, 1000)]
    assert contents(sorted(received, key=lambda each: each.message_id)) == [
        text for number, text in enumerate(numbered(1000)) if number in {10, 11} or number >= 15
    ]


def test_spilled_class_keeps_producer_states(tmp_path: Path) -> None:
    bus = SpilledBus(tmp_path, segment_bytes=500)
    fill(bus, connect_version2(bus, name="till"), 500)
    bus = crash_and_recover(bus, tmp_path, segment_bytes=500)
    peer = Version2Peer(bus, bus.broker.open_session())
    peer.send(json_request(ord("4"), request=1, version=2, classes=[1], name="till"))
    (answer,) = peer.receive_replies()
    assert answer.content["next"] == 500
    assert contents(receive_and_ack_all(bus, connect_version2(bus, subscribe(1, 5)))) == numbered(
        500
    )


def test_crash_while_catching_up_loses_nothing(tmp_path: Path) -> None:
    bus = SpilledBus(tmp_path, segment_bytes=700)
    connect_version2(bus, subscribe(1, 5, durable="d")).disconnect()
    fill(bus, connect_version2(bus, name="till"), 500)
    received_ids: set[int] = set()
    for _ in range(6):
        reader = connect_version2(bus, subscribe(1, 5, durable="d", max_in_flight=100))
        for message in receive_available(bus, reader):
            received_ids.add(message.message_id)
            reader.send(ack(5, message.message_id, message.message_id + 1))
        bus.broker.clock.now += 1
        bus.sync()
        bus = crash_and_recover(bus, tmp_path, segment_bytes=700, now=bus.broker.clock.now)
    reader = connect_version2(bus, subscribe(1, 5, durable="d"))
    assert received_ids | {each.message_id for each in receive_and_ack_all(bus, reader)} == set(
        range(500)
    )


def test_spilled_class_opens_without_spill_policy(tmp_path: Path) -> None:
    bus = SpilledBus(tmp_path)
    fill(bus, connect_version2(bus), 300)
    bus.crash()
    reopened_bus = KeptBus(tmp_path, settings=Settings(limits=Limits()))
    assert len(reopened_bus.broker.classes[1].ring) == 300


# Disk failures -----------------------------------------------------------------------------------


def test_retries_failed_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bus = SpilledBus(tmp_path)
    fill(bus, connect_version2(bus), 300)
    reader = connect_version2(bus, subscribe(1, 5))

    def fail(read: object) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patched:
        patched.setattr(bus.reader, "read", fail)
        for _ in range(3):
            assert receive_available(bus, reader) == []
            advance_clock(bus, 1)
    assert bus.statistics(1).acknowledged == 0
    advance_clock(bus, 1)
    assert contents(receive_and_ack_all(bus, reader)) == numbered(300)


def corrupt(path: Path, content: bytes, *, header: bool) -> None:
    """Damage the record that contains this message."""
    data = bytearray(path.read_bytes())
    offset = data.index(content)
    if header:
        offset = data.rindex(records.MAGIC, 0, offset) + 8
    data[offset] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("header", [False, True])
def test_counts_damage_and_delivers_the_rest(tmp_path: Path, header: bool) -> None:
    bus = SpilledBus(tmp_path)
    fill(bus, connect_version2(bus), 320)
    segment = tmp_path / "classes" / "00001" / f"{0:020}.log"
    corrupt(segment, b"100.", header=header)
    reader = connect_version2(bus, subscribe(1, 5))
    lost_sequences = set(range(96, 112))
    assert [each.message_id for each in receive_and_ack_all(bus, reader)] == [
        number for number in range(320) if number not in lost_sequences
    ]
    assert bus.statistics(1).dropped[Reason.DAMAGED] == 16
    (problem,) = bus.reader.problems
    assert "skipped messages 96-111" in problem
    received, reply = fetch(bus, connect_version2(bus), first=320)
    assert received == []
    assert reply["head"] == 320


def test_fetch_skips_damage(tmp_path: Path) -> None:
    bus = SpilledBus(tmp_path)
    fill(bus, connect_version2(bus), 320)
    corrupt(tmp_path / "classes" / "00001" / f"{0:020}.log", b"100.", header=False)
    peer, first = connect_version2(bus), 90
    found: list[int] = []
    for _ in range(4):
        received, reply = fetch(bus, peer, first=first, count=20)
        found += [each.message_id for each in received]
        first = reply["next"]
    assert found == [*range(90, 96), *range(112, first)]
    assert first > 140


def test_reports_missing_segment(tmp_path: Path) -> None:
    bus = SpilledBus(tmp_path, segment_bytes=400)
    fill(bus, connect_version2(bus), 320)
    folder = tmp_path / "classes" / "00001"
    segments = sorted(folder.iterdir())
    missing_sequences = int(segments[3].stem), int(segments[4].stem)
    segments[3].unlink()
    reader = connect_version2(bus, subscribe(1, 5))
    assert [each.message_id for each in receive_and_ack_all(bus, reader)] == [
        number for number in range(320) if not missing_sequences[0] <= number < missing_sequences[1]
    ]
    assert bus.statistics(1).dropped[Reason.DAMAGED] == missing_sequences[1] - missing_sequences[0]


@pytest.mark.parametrize("read_bytes", [60, 500])
def test_small_reads_keep_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read_bytes: int
) -> None:
    monkeypatch.setattr(spill, "SPILL_READ_BYTES", read_bytes)
    bus = SpilledBus(tmp_path, segment_bytes=900)
    connect_version2(bus, subscribe(1, 5, durable="d")).disconnect()
    fill(bus, connect_version2(bus), 200)
    reader = connect_version2(bus, subscribe(1, 5, durable="d", max_in_flight=20))
    received = receive_available(bus, reader)
    while len(received) < 20:
        received += receive_available(bus, reader)
    reader.disconnect()
    reader = connect_version2(bus, subscribe(1, 5, durable="d", max_in_flight=20))
    received = receive_and_ack_all(bus, reader)
    assert contents(received) == numbered(200)
    assert {each.attempt for each in received[:20]} == {2}


def test_clock_set_back_does_not_delay_spilled_messages(tmp_path: Path) -> None:
    bus = SpilledBus(tmp_path)
    sender = connect_version2(bus)
    for first in range(0, 200, 20):
        contents_ = [
            timed_envelope(b"%d" % number, not_before_ms=1) for number in range(first, first + 20)
        ]
        sender.send(publish_envelopes(1, first, *contents_))
        bus.sync()
    spilled = bus.statistics(1).spilled
    bus.broker.clock.now -= 3600
    reader = connect_version2(bus, subscribe(1, 5))
    bus.serve_reads()
    reader.receive_deliveries()
    advance_clock(bus, 1)
    assert len(receive_and_ack_all(bus, reader)) >= spilled > 100


def test_keeps_messages_after_damage(tmp_path: Path) -> None:
    bus = SpilledBus(tmp_path, segment_bytes=600)
    fill(bus, connect_version2(bus), 320)
    bus.close()
    segments = sorted((tmp_path / "classes" / "00001").iterdir())
    data = bytearray(segments[2].read_bytes())
    data[100] ^= 1
    segments[2].write_bytes(data)
    lost_sequences = range(int(segments[2].stem), int(segments[2].stem) + 16)
    bus = SpilledBus(tmp_path)
    reader = connect_version2(bus, subscribe(1, 5))
    assert [each.message_id for each in receive_and_ack_all(bus, reader)] == [
        number for number in range(320) if number not in lost_sequences
    ]


def test_keeps_messages_after_several_damaged_segments(tmp_path: Path) -> None:
    """A power cut may leave zeros, parts, or nothing of segments that were not synced."""
    bus = SpilledBus(tmp_path, segment_bytes=600)
    fill(bus, connect_version2(bus), 320)
    bus.close()
    segments = sorted((tmp_path / "classes" / "00001").iterdir())
    segments[2].write_bytes(b"")
    segments[3].write_bytes(bytes(600))
    segments[4].write_bytes(b"x" * 600)
    segments[5].unlink()
    lost_sequences = range(int(segments[2].stem), int(segments[6].stem))
    roomy = Settings(full_policy=FullPolicy.SPILL)  # Recovery then reads everything.
    for settings in (spill_settings(), roomy):
        bus = SpilledBus(tmp_path, settings=settings)
        reader = connect_version2(bus, subscribe(1, 5))
        assert [each.message_id for each in receive_and_ack_all(bus, reader)] == [
            number for number in range(320) if number not in lost_sequences
        ]
        bus.crash()


def test_messages_after_unseen_damage_survive_restart(
    tmp_path: Path,
) -> None:
    """A power cut damages the end and a part that recovery does not read."""
    bus = SpilledBus(tmp_path, segment_bytes=600)
    fill(bus, connect_version2(bus), 320)
    bus.close()
    bus = SpilledBus(tmp_path, segment_bytes=1200)
    bus.sync()  # The snapshot does not mention the following messages; later changes do.
    fill(bus, connect_version2(bus), 96)
    bus.broker.clock.now += 1
    bus.sync()
    bus.crash()
    paths = sorted((tmp_path / "classes" / "00001").iterdir())
    unread_segment, after_unread, end = paths[15], paths[16], paths[20]
    unread_segment.write_bytes(bytes(600))
    data = bytearray(end.read_bytes())
    data[100] ^= 1
    end.write_bytes(data)
    bus = SpilledBus(tmp_path, segment_bytes=600)
    head = bus.broker.classes[1].ring.head
    assert head == int(end.stem)
    bus.sync()  # State is written before further messages.
    fill(bus, connect_version2(bus), 16)
    bus.crash()
    for settings in (spill_settings(), Settings(full_policy=FullPolicy.SPILL)):
        bus = SpilledBus(tmp_path, settings=settings)
        reader = connect_version2(bus, subscribe(1, 5))
        found = [each.message_id for each in receive_and_ack_all(bus, reader)]
        kept = [*range(int(unread_segment.stem)), *range(int(after_unread.stem), head + 16)]
        assert found == kept
        bus.crash()


def test_truncated_record_is_skipped_once(tmp_path: Path) -> None:
    """The header is intact; the record continues beyond the end of the file."""
    bus = SpilledBus(tmp_path)
    connect_version2(bus, subscribe(1, 5, durable="d"))
    fill(bus, connect_version2(bus, name="till"), 200)
    [segment] = (tmp_path / "classes" / "00001").iterdir()
    data = segment.read_bytes()
    second = data.find(data[:4], 1)
    with segment.open("r+b") as file:
        file.truncate(second - 1)
    found = bus.reader.read(SpillRead(1, "1", 20, 100, 1000, lambda stretches: None))
    assert [(each.first, each.message_count, each.frames) for each in found] == [(20, 80, b"")]
    assert "skipped messages 20-99" in bus.reader.problems[0]


def test_ignored_files_stay_ignored(tmp_path: Path) -> None:
    """Records after damage were never confirmed: their sequences are reused."""
    bus = SpilledBus(tmp_path)
    fill(bus, connect_version2(bus), 320)
    bus.crash()
    segment = tmp_path / "classes" / "00001" / f"{0:020}.log"
    corrupt(segment, b"100.", header=False)
    heads = []
    for _ in range(3):
        bus = SpilledBus(tmp_path)
        heads.append(bus.statistics(1).ring.head)
        bus.close()
    assert heads == [96, 96, 96]


def test_reappeared_file_does_not_replace_another(
    tmp_path: Path,
) -> None:
    """A power cut undoes changes that were not synced, including renames."""
    old_bus = SpilledBus(tmp_path / "before", segment_bytes=1)
    publisher = connect_version2(old_bus)
    for first in range(0, 96, 32):
        publisher.send(publish(1, first, *[b"old"] * 32))
        old_bus.sync()
    old_bus.crash()
    (tmp_path / "now").mkdir()
    shutil.copy(tmp_path / "before" / STAMP, tmp_path / "now")  # The same journal.
    bus = SpilledBus(tmp_path / "now", segment_bytes=600)
    connect_version2(bus, subscribe(1, 5, durable="billing"))
    fill(bus, connect_version2(bus), 320, step=5)
    bus.close()  # State is written as a snapshot, so few messages are read again.
    folder = Path("classes", "00001")
    old_file = tmp_path / "now" / folder / f"{64:020}.log"
    assert not old_file.exists()
    (tmp_path / "before" / folder / old_file.name).rename(old_file)
    for is_back in (True, False):
        bus = SpilledBus(tmp_path / "now", segment_bytes=600)
        assert [str(old_file) in problem for problem in bus.found.problems] == [True] * is_back
        assert not old_file.exists()
        reader = connect_version2(bus, subscribe(1, 5, durable="billing"))
        assert contents(receive_and_ack_all(bus, reader)) == numbered(320)
        bus.crash()
