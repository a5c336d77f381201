"""Recovery from damaged files: intact messages return, damage is reported."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from simplebus.core import restore
from simplebus.core.errors import Reason
from simplebus.core.limits import Limits
from simplebus.core.settings import Settings
from simplebus.storage import records
from simplebus.storage.errors import JournalError
from simplebus.storage.inspection import JournalInspection
from simplebus.storage.records import HEADER_BYTES, Record
from tests.behaviour.wire_peer import numbered
from tests.behaviour.wire_peer_v2 import ack, connect_version2, publish, subscribe
from tests.storage.journaled_broker import KeptBus
from tests.storage.test_journal import next_number, payloads

LOTS, EACH = 6, 3


def made(path: Path, *, segment_bytes: int = 1 << 20) -> list[bytes]:
    """A journal of a few lots, as a crash leaves it; returns what was published."""
    bus = KeptBus(path, segment_bytes=segment_bytes)
    reader = connect_version2(bus, subscribe(1, 5, durable="billing"))
    peer = connect_version2(bus, name="till")
    sent = []
    for lot in range(LOTS):
        sent += (more := numbered(EACH, start=EACH * lot))
        peer.send(publish(1, EACH * lot, *more))
        bus.sync()
    reader.receive_message_ids()
    reader.send(ack(5, 0, 1))
    bus.broker.clock.now += 1
    bus.sync()
    bus.crash()
    return sent


def segments(path: Path) -> list[Path]:
    return sorted((path / "classes" / "00001").glob("*.log"))


def ends(data: bytes) -> list[int]:
    """Return the end offset of each record in a file, beginning with 0."""
    found = [0]
    while isinstance(record := records.read_record(memoryview(data), found[-1]), Record):
        found.append(record.end)
    return found


def come_back(path: Path) -> tuple[list[bytes], int, list[str]]:
    """Recover a bus. Return its payloads, the publisher's next number and the reported problems."""
    bus = KeptBus(path)
    there = payloads(bus), next_number(bus), bus.found.problems
    bus.crash()
    return there


def test_recovers_intact_records_of_truncated_file(tmp_path: Path) -> None:
    sent = made(tmp_path)
    (path,) = segments(tmp_path)
    data = path.read_bytes()
    bounds = ends(data)
    for size in range(bounds[-2] - 1, bounds[-1] + 1):
        path.write_bytes(data[:size])
        whole = EACH * sum(bound <= size for bound in bounds[1:])
        there, following, dropped = come_back(tmp_path)
        assert there == sent[1:whole], size
        assert following == whole
        assert bool(dropped) == (size < bounds[-1]), dropped


def test_recovers_messages_before_damaged_header(
    tmp_path: Path,
) -> None:
    sent = made(tmp_path)
    (path,) = segments(tmp_path)
    data = path.read_bytes()
    bounds = ends(data)
    for record, step in ((1, 5), (LOTS - 1, 1)):
        for at in range(bounds[record], bounds[record] + HEADER_BYTES, step):
            bad = bytearray(data)
            bad[at] ^= 1 << at % 8
            path.write_bytes(bad)
            there, following, dropped = come_back(tmp_path)
            assert there == sent[1 : EACH * record], at
            assert following == EACH * record
            assert len(dropped) == 1
            assert str(path) in dropped[0]


def test_damaged_state_keeps_messages(tmp_path: Path) -> None:
    sent = made(tmp_path)
    (path,) = (tmp_path / "state").iterdir()
    data = path.read_bytes()
    end = ends(data)[-1]

    def cut(at: int) -> bytes:
        return data[:at]

    def spoil(at: int) -> bytes:
        return data[:at] + bytes([data[at] ^ 0x10]) + data[at + 1 :]

    ways: list[Callable[[int], bytes]] = [cut, spoil]
    for way in ways:
        for at in range(0, end, 23):
            path.write_bytes(way(at))
            bus = KeptBus(tmp_path)
            assert payloads(bus) in (sent, sent[1:])
            assert next_number(bus) == len(sent)
            bus.crash()


def test_continues_in_new_file_after_truncation(tmp_path: Path) -> None:
    sent = made(tmp_path)
    (path,) = segments(tmp_path)
    data = path.read_bytes()
    path.write_bytes(data[: ends(data)[-1] - 1])
    bus = KeptBus(tmp_path)
    connect_version2(bus, publish(1, next_number(bus), b"new"), name="till")
    bus.sync()
    bus.crash()
    there, following, dropped = come_back(tmp_path)
    assert there == [*sent[1:-EACH], b"new"]
    assert following == len(sent) - EACH + 1
    assert dropped == []
    assert len(segments(tmp_path)) == 2


def test_ignores_and_reports_files_after_gap(tmp_path: Path) -> None:
    sent = made(tmp_path, segment_bytes=1)
    files = segments(tmp_path)
    assert len(files) == LOTS
    bad = bytearray(files[2].read_bytes())
    bad[HEADER_BYTES + 3] ^= 1
    files[2].write_bytes(bad)
    there, _, dropped = come_back(tmp_path)
    assert there == sent[1 : 2 * EACH]
    assert len(dropped) == 2
    assert "messages 6-8 of class 1 (3 messages) missing before" in dropped[1]
    assert "skipped messages 6-17 of class 1" in dropped[1]
    assert len(segments(tmp_path)) == 2
    assert len(list(files[0].parent.glob("*.dropped"))) == LOTS - 2


def test_reports_messages_after_damage(tmp_path: Path) -> None:
    sent = made(tmp_path)
    (path,) = segments(tmp_path)
    data = bytearray(path.read_bytes())
    data[ends(data)[2] + HEADER_BYTES + 3] ^= 1
    path.write_bytes(data)
    inspection = JournalInspection(tmp_path)
    found = [each.payload for each in inspection.messages(1, count=99)]
    assert found == sent[: 2 * EACH] + sent[3 * EACH :]
    (problem,) = inspection.problems
    assert problem.endswith("skipped messages 6-8 of class 1 (3 messages)")
    bus = KeptBus(tmp_path)
    assert payloads(bus) == sent[1 : 2 * EACH]
    (sentence,) = bus.found.problems
    assert sentence.endswith("skipped messages 6-17 of class 1 (12 messages)")
    assert bus.statistics(1).dropped[Reason.DAMAGED] == 12
    bus.crash()


@pytest.mark.parametrize("left", [0, 1])
def test_zeros_after_unneeded_damage_are_reported(tmp_path: Path, left: int) -> None:
    """A power cut may leave pages of zeros in the middle of a file."""
    bus = KeptBus(tmp_path)
    reader = connect_version2(bus, subscribe(1, 5, durable="billing"))
    for number in range(4):
        connect_version2(bus, publish(1, 0, b"%d" % number))
        bus.sync()
        if number == 1:  # The other two are known to no file but theirs.
            reader.receive_message_ids()
            reader.send(ack(5, 0, 2))
            bus.broker.clock.now += 1
            bus.sync()
    bus.crash()
    (path,) = segments(tmp_path)
    data = bytearray(path.read_bytes())
    bounds = ends(data)
    torn, whole = bounds[2] - 1, bounds[4 - left]
    data[torn:whole] = bytes(whole - torn)
    path.write_bytes(data)
    inspection = JournalInspection(tmp_path)
    assert [each.payload for each in inspection.messages(1, first=2, count=9)] == [b"3"][:left]
    bus = KeptBus(tmp_path)
    assert (payloads(bus), bus.broker.classes[1].ring.head) == ([], 2)
    for (sentence,) in inspection.problems, bus.found.problems:
        assert f"no data after a damaged record at byte {bounds[2]}" in sentence
    assert sentence.endswith("skipped messages 2-3 of class 1 (2 messages)") == bool(left)
    assert bus.statistics(1).dropped.get(Reason.DAMAGED, 0) == 2 * left
    connect_version2(bus, publish(1, 0, b"more"))
    bus.sync()
    bus.crash()
    bus = KeptBus(tmp_path)
    assert (payloads(bus), bus.found.problems) == ([b"more"], [])
    bus.crash()


def test_missing_segment_is_a_gap(tmp_path: Path) -> None:
    sent = made(tmp_path, segment_bytes=1)
    segments(tmp_path)[3].unlink()
    there, _, dropped = come_back(tmp_path)
    assert there == sent[1 : 3 * EACH]
    assert "messages 9-11 of class 1 (3 messages) missing before" in dropped[0]
    inspection = JournalInspection(tmp_path)  # Its files are set aside.
    assert inspection.problems == []


def test_sequences_continue_without_messages(tmp_path: Path) -> None:
    made(tmp_path)
    for _ in range(3):
        for path in segments(tmp_path):
            path.unlink()
        bus = KeptBus(tmp_path)
        assert bus.broker.classes[1].ring.head == 1
        bus.sync()
        bus.crash()


def test_keeps_unknown_files(tmp_path: Path) -> None:
    sent = made(tmp_path)
    for name in ("classes/notes.txt", "classes/00001/00000000000000000000.log.bak", "state/x.log"):
        (tmp_path / name).write_text("not ours")
    there, _, dropped = come_back(tmp_path)
    assert (there, dropped) == (sent[1:], [])


def test_incomplete_state_falls_back_to_previous(tmp_path: Path) -> None:
    sent = made(tmp_path)
    (path,) = (tmp_path / "state").iterdir()
    later = path.with_name("00000000000000000002.log")
    later.write_bytes(path.read_bytes()[:40])
    there, following, dropped = come_back(tmp_path)
    assert (there, following) == (sent[1:], len(sent))
    assert "no intact snapshot at the start" in dropped[0]


def test_too_little_memory_raises_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restore, "RESTORE_HEADROOM_BYTES", 0)
    bus = KeptBus(tmp_path)
    connect_version2(bus, publish(1, 0, *numbered(400, size=4000)))
    bus.sync()
    bus.crash()
    small = Settings(limits=Limits(frame_bytes=10_000, class_bytes=1 << 20))
    with pytest.raises(JournalError, match="class 1 holds more than fits"):
        KeptBus(tmp_path, settings=small)
    KeptBus(tmp_path).crash()


def test_state_of_lost_messages_does_not_apply_to_reused_sequences(
    tmp_path: Path,
) -> None:
    bus = KeptBus(tmp_path)
    peer = connect_version2(bus, publish(1, 0, b"a"), name="till")
    reader = connect_version2(bus, subscribe(1, 5, durable="billing"))
    bus.sync()
    peer.send(publish(1, 1, b"lost"))
    reader.receive_message_ids()
    reader.send(ack(5, 0, 2))
    bus.broker.clock.now += 1
    bus.write()
    bus.crash()
    (path,) = segments(tmp_path)  # Of the last lot, the acknowledgements reached the disk alone.
    data = path.read_bytes()
    path.write_bytes(data[: ends(data)[-2]])
    bus = KeptBus(tmp_path)
    connect_version2(bus, publish(1, 1, b"b"), name="till")
    bus.write()
    bus.crash()
    later = tmp_path / "state" / "00000000000000000002.log"
    later.write_bytes(b"")  # And of this one, the messages.
    bus = KeptBus(tmp_path)
    assert next_number(bus) == 2
    assert payloads(bus) == [b"b"]
    reader = connect_version2(bus, subscribe(1, 5, durable="billing"))
    assert [message.content for message in reader.receive_deliveries()] == [b"b"]
    bus.crash()


def test_snapshot_is_written_after_its_messages(tmp_path: Path) -> None:
    bus = KeptBus(tmp_path)
    connect_version2(bus, publish(1, 0, b"a"), name="till")
    bus.write()  # The first lot is a snapshot: it knows the publisher's numbers.
    (path,) = segments(tmp_path)
    (file,) = (cls.file for cls in bus.journal._classes.values())
    assert file is not None
    assert (file.path, file.synced_bytes) == (path, file.written_bytes)
    bus.crash()
