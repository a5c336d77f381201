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
    all_of,
    contents,
    fetched,
    fill,
    hear,
    later,
    small,
)


def again(bus: SpilledBus, path: Path, **more: object) -> SpilledBus:
    """After a crash."""
    bus.crash()
    return SpilledBus(path, **more)  # type: ignore[arg-type]


# Recovery ----------------------------------------------------------------------------------------


def test_recovers_spilled_class_without_reading_it(tmp_path: Path) -> None:
    bus = SpilledBus(tmp_path, segment_bytes=1000)
    reader = connect_version2(bus, subscribe(1, 5, durable="d", max_in_flight=30), name="reader")
    reader.send(ack(5, 0, 0))
    fill(bus, connect_version2(bus, name="till"), 1000)
    assert len(hear(bus, reader)) == 30
    reader.send(ack(5, 0, 10), ack(5, 12, 15))
    bus.close()
    first = tmp_path / "classes" / "00001" / f"{0:020}.log"
    data = first.read_bytes()
    bus = SpilledBus(tmp_path, segment_bytes=1000)
    here = bus.statistics(1)
    assert here.ring.message_count <= 64
    assert here.spilled + here.ring.message_count == 990
    assert bus.found.message_count == 990
    assert first.read_bytes() == data
    reader = connect_version2(bus, subscribe(1, 5, durable="d"))
    got = all_of(bus, reader)
    assert sorted(each.message_id for each in got) == [10, 11, *range(15, 1000)]
    assert contents(sorted(got, key=lambda each: each.message_id)) == [
        text for number, text in enumerate(numbered(1000)) if number in {10, 11} or number >= 15
    ]


def test_spilled_class_keeps_producer_states(tmp_path: Path) -> None:
    bus = SpilledBus(tmp_path, segment_bytes=500)
    fill(bus, connect_version2(bus, name="till"), 500)
    bus = again(bus, tmp_path, segment_bytes=500)
    peer = Version2Peer(bus, bus.broker.open_session())
    peer.send(json_request(ord("4"), request=1, version=2, classes=[1], name="till"))
    (answer,) = peer.receive_replies()
    assert answer.content["next"] == 500
    assert contents(all_of(bus, connect_version2(bus, subscribe(1, 5)))) == numbered(500)


def test_crash_while_catching_up_loses_nothing(tmp_path: Path) -> None:
    bus = SpilledBus(tmp_path, segment_bytes=700)
    connect_version2(bus, subscribe(1, 5, durable="d")).disconnect()
    fill(bus, connect_version2(bus, name="till"), 500)
    seen: set[int] = set()
    for _ in range(6):
        reader = connect_version2(bus, subscribe(1, 5, durable="d", max_in_flight=100))
        for message in hear(bus, reader):
            seen.add(message.message_id)
            reader.send(ack(5, message.message_id, message.message_id + 1))
        bus.broker.clock.now += 1
        bus.sync()
        bus = again(bus, tmp_path, segment_bytes=700, now=bus.broker.clock.now)
    reader = connect_version2(bus, subscribe(1, 5, durable="d"))
    assert seen | {each.message_id for each in all_of(bus, reader)} == set(range(500))


def test_spilled_class_opens_without_spill_policy(tmp_path: Path) -> None:
    bus = SpilledBus(tmp_path)
    fill(bus, connect_version2(bus), 300)
    bus.crash()
    wide = KeptBus(tmp_path, settings=Settings(limits=Limits()))
    assert len(wide.broker.classes[1].ring) == 300


# A disk that fails -------------------------------------------------------------------------------


def test_retries_failed_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bus = SpilledBus(tmp_path)
    fill(bus, connect_version2(bus), 300)
    reader = connect_version2(bus, subscribe(1, 5))

    def fail(read: object) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patched:
        patched.setattr(bus.reader, "read", fail)
        for _ in range(3):
            assert hear(bus, reader) == []
            later(bus, 1)
    assert bus.statistics(1).acknowledged == 0
    later(bus, 1)
    assert contents(all_of(bus, reader)) == numbered(300)


def corrupt(path: Path, content: bytes, *, header: bool) -> None:
    """Damage the record that this message is in."""
    data = bytearray(path.read_bytes())
    at = data.index(content)
    if header:
        at = data.rindex(records.MAGIC, 0, at) + 8
    data[at] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("header", [False, True])
def test_counts_damage_and_delivers_the_rest(tmp_path: Path, header: bool) -> None:
    bus = SpilledBus(tmp_path)
    fill(bus, connect_version2(bus), 320)
    segment = tmp_path / "classes" / "00001" / f"{0:020}.log"
    corrupt(segment, b"100.", header=header)
    reader = connect_version2(bus, subscribe(1, 5))
    lost = set(range(96, 112))
    assert [each.message_id for each in all_of(bus, reader)] == [
        number for number in range(320) if number not in lost
    ]
    assert bus.statistics(1).dropped[Reason.DAMAGED] == 16
    (problem,) = bus.reader.problems
    assert "skipped messages 96-111" in problem
    got, reply = fetched(bus, connect_version2(bus), first=320)
    assert got == []
    assert reply["head"] == 320


def test_fetch_skips_damage(tmp_path: Path) -> None:
    bus = SpilledBus(tmp_path)
    fill(bus, connect_version2(bus), 320)
    corrupt(tmp_path / "classes" / "00001" / f"{0:020}.log", b"100.", header=False)
    peer, at = connect_version2(bus), 90
    found: list[int] = []
    for _ in range(4):
        got, reply = fetched(bus, peer, first=at, count=20)
        found += [each.message_id for each in got]
        at = reply["next"]
    assert found == [*range(90, 96), *range(112, at)]
    assert at > 140


def test_reports_missing_segment(tmp_path: Path) -> None:
    bus = SpilledBus(tmp_path, segment_bytes=400)
    fill(bus, connect_version2(bus), 320)
    folder = tmp_path / "classes" / "00001"
    segments = sorted(folder.iterdir())
    gone = int(segments[3].stem), int(segments[4].stem)
    segments[3].unlink()
    reader = connect_version2(bus, subscribe(1, 5))
    assert [each.message_id for each in all_of(bus, reader)] == [
        number for number in range(320) if not gone[0] <= number < gone[1]
    ]
    assert bus.statistics(1).dropped[Reason.DAMAGED] == gone[1] - gone[0]


@pytest.mark.parametrize("read_bytes", [60, 500])
def test_small_reads_keep_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read_bytes: int
) -> None:
    monkeypatch.setattr(spill, "SPILL_READ_BYTES", read_bytes)
    bus = SpilledBus(tmp_path, segment_bytes=900)
    connect_version2(bus, subscribe(1, 5, durable="d")).disconnect()
    fill(bus, connect_version2(bus), 200)
    reader = connect_version2(bus, subscribe(1, 5, durable="d", max_in_flight=20))
    got = hear(bus, reader)
    while len(got) < 20:
        got += hear(bus, reader)
    reader.disconnect()
    reader = connect_version2(bus, subscribe(1, 5, durable="d", max_in_flight=20))
    got = all_of(bus, reader)
    assert contents(got) == numbered(200)
    assert {each.attempt for each in got[:20]} == {2}


def test_clock_set_back_does_not_delay_spilled_messages(tmp_path: Path) -> None:
    bus = SpilledBus(tmp_path)
    sender = connect_version2(bus)
    for at in range(0, 200, 20):
        contents_ = [
            timed_envelope(b"%d" % number, not_before_ms=1) for number in range(at, at + 20)
        ]
        sender.send(publish_envelopes(1, at, *contents_))
        bus.sync()
    spilled = bus.statistics(1).spilled
    bus.broker.clock.now -= 3600
    reader = connect_version2(bus, subscribe(1, 5))
    bus.bring()
    reader.receive_deliveries()
    later(bus, 1)
    assert len(all_of(bus, reader)) >= spilled > 100


def test_keeps_messages_after_damage(tmp_path: Path) -> None:
    bus = SpilledBus(tmp_path, segment_bytes=600)
    fill(bus, connect_version2(bus), 320)
    bus.close()
    segments = sorted((tmp_path / "classes" / "00001").iterdir())
    data = bytearray(segments[2].read_bytes())
    data[100] ^= 1
    segments[2].write_bytes(data)
    lost = range(int(segments[2].stem), int(segments[2].stem) + 16)
    bus = SpilledBus(tmp_path)
    reader = connect_version2(bus, subscribe(1, 5))
    assert [each.message_id for each in all_of(bus, reader)] == [
        number for number in range(320) if number not in lost
    ]


def test_keeps_messages_after_several_damaged_segments(tmp_path: Path) -> None:
    """A power cut may leave zeros, parts, or nothing of those that were not synced."""
    bus = SpilledBus(tmp_path, segment_bytes=600)
    fill(bus, connect_version2(bus), 320)
    bus.close()
    segments = sorted((tmp_path / "classes" / "00001").iterdir())
    segments[2].write_bytes(b"")
    segments[3].write_bytes(bytes(600))
    segments[4].write_bytes(b"x" * 600)
    segments[5].unlink()
    lost = range(int(segments[2].stem), int(segments[6].stem))
    roomy = Settings(full_policy=FullPolicy.SPILL)  # Then all is read when it comes back.
    for settings in (small(), roomy):
        bus = SpilledBus(tmp_path, settings=settings)
        reader = connect_version2(bus, subscribe(1, 5))
        assert [each.message_id for each in all_of(bus, reader)] == [
            number for number in range(320) if number not in lost
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
    fill(bus, connect_version2(bus), 96)
    bus.crash()
    unseen, end = sorted((tmp_path / "classes" / "00001").iterdir())[19:21]
    unseen.write_bytes(bytes(600))
    data = bytearray(end.read_bytes())
    data[100] ^= 1
    end.write_bytes(data)
    bus = SpilledBus(tmp_path, segment_bytes=600)
    head = bus.broker.classes[1].ring.head
    assert head == int(end.stem)
    bus.sync()  # What is known beside messages is written before there are others.
    fill(bus, connect_version2(bus), 16)
    bus.crash()
    for settings in (small(), Settings(full_policy=FullPolicy.SPILL)):
        bus = SpilledBus(tmp_path, settings=settings)
        reader = connect_version2(bus, subscribe(1, 5))
        found = [each.message_id for each in all_of(bus, reader)]
        assert found == [*range(int(unseen.stem)), *range(head, head + 16)]
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
    """A power cut undoes what was not synced, names included."""
    before = SpilledBus(tmp_path / "before", segment_bytes=1)
    till = connect_version2(before)
    for at in range(0, 96, 32):
        till.send(publish(1, at, *[b"old"] * 32))
        before.sync()
    before.crash()
    (tmp_path / "now").mkdir()
    shutil.copy(tmp_path / "before" / STAMP, tmp_path / "now")  # The same journal.
    bus = SpilledBus(tmp_path / "now", segment_bytes=600)
    connect_version2(bus, subscribe(1, 5, durable="billing"))
    fill(bus, connect_version2(bus), 320, step=5)
    bus.close()  # What is known beside messages is written as a whole: few are read again.
    folder = Path("classes", "00001")
    old = tmp_path / "now" / folder / f"{64:020}.log"
    assert not old.exists()
    (tmp_path / "before" / folder / old.name).rename(old)
    for is_back in (True, False):
        bus = SpilledBus(tmp_path / "now", segment_bytes=600)
        assert [str(old) in each for each in bus.found.problems] == [True] * is_back
        assert not old.exists()
        reader = connect_version2(bus, subscribe(1, 5, durable="billing"))
        assert contents(all_of(bus, reader)) == numbered(320)
        bus.crash()
