"""Missing files are reported and their messages counted."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from simplebus.core.errors import Reason
from simplebus.core.protocol.durability import Durability
from simplebus.storage import repair
from simplebus.storage.inspection import JournalInspection
from simplebus.storage.records import HEADER_BYTES
from tests.behaviour.wire_peer import numbered
from tests.behaviour.wire_peer_v2 import ack, connect_version2, publish, subscribe
from tests.storage.journaled_broker import KeptBus
from tests.storage.test_journal import payloads
from tests.storage.test_recovery import ends, segments


def write_three_segments(path: Path) -> list[bytes]:
    """Write three segments of three messages, none of which is acknowledged."""
    bus = KeptBus(path, segment_bytes=1)
    connect_version2(bus, subscribe(1, 5, durable="billing"))
    peer = connect_version2(bus, name="till")
    for first in (0, 3, 6):
        peer.send(publish(1, first, *numbered(3, start=first)))
        bus.broker.clock.now += 1
        bus.sync()
    bus.crash()
    return numbered(9)


def remove_first(path: Path) -> None:
    segments(path)[0].unlink()


def remove_last(path: Path) -> None:
    segments(path)[-1].unlink()


def remove_all(path: Path) -> None:
    for segment in segments(path):
        segment.unlink()


def remove_folder(path: Path) -> None:
    shutil.rmtree(path / "classes" / "00001")


@pytest.mark.parametrize(
    ("remove", "remaining", "expected_problem"),
    [
        (remove_first, slice(3, 9), "no file for messages 0-2 of class 1"),
        (remove_last, slice(0, 6), "lost messages 6-8 of class 1"),
        (remove_all, slice(0, 0), "lost messages 0-8 of class 1"),
        (remove_folder, slice(0, 0), "lost messages 0-8 of class 1"),
    ],
)
def test_reports_messages_of_missing_files(
    tmp_path: Path, remove: Callable[[Path], None], remaining: slice, expected_problem: str
) -> None:
    sent = write_three_segments(tmp_path)
    remove(tmp_path)
    inspection = JournalInspection(tmp_path)
    list(inspection.summaries(verify=True))
    bus = KeptBus(tmp_path)
    for (problem,) in inspection.problems, bus.found.problems:
        assert expected_problem in problem
    cls = bus.broker.classes[1]
    assert cls.dropped_counts == {Reason.DAMAGED: 9 - len(sent[remaining])}
    assert payloads(bus) == sent[remaining]
    assert cls.ring.head == remaining.stop
    connect_version2(bus, publish(1, 0, b"more"))
    bus.sync()
    bus.crash()
    recovered_bus = KeptBus(tmp_path)
    assert recovered_bus.found.problems == []
    recovered_bus.crash()


def test_reports_a_missing_middle_and_last_file(tmp_path: Path) -> None:
    bus = KeptBus(tmp_path, segment_bytes=1, boot="first")
    connect_version2(bus, subscribe(1, 5, durable="billing"))
    for number in range(4):
        connect_version2(bus, publish(1, 0, b"%d" % number))
        bus.broker.clock.now += 1
        bus.sync()
    bus.crash()
    for segment in segments(tmp_path)[1::2]:
        segment.unlink()
    bus = KeptBus(tmp_path, boot="first")
    middle, end = bus.found.problems
    assert ("missing message 1 of" in middle, "lost message 3 of" in end) == (True, True)
    durable = bus.broker.classes[1].named_positions["billing", ""]
    assert durable.undelivered_counts == {Reason.DAMAGED: 1}
    assert bus.broker.classes[1].dropped_counts == {Reason.DAMAGED: 1}
    bus.crash()


def test_sequences_continue_without_the_folder_of_a_class(tmp_path: Path) -> None:
    write_three_segments(tmp_path)
    bus = KeptBus(tmp_path)
    reader = connect_version2(bus, subscribe(1, 5, durable="billing"))
    reader.receive_message_ids()
    reader.send(ack(5, 0, 9))
    bus.broker.clock.now += 1
    bus.close()
    remove_folder(tmp_path)
    bus = KeptBus(tmp_path)
    assert (bus.broker.classes[1].ring.head, bus.found.problems) == (9, [])
    bus.crash()


def test_reports_missing_state(tmp_path: Path) -> None:
    sent = write_three_segments(tmp_path)
    for segment in (tmp_path / "state").iterdir():
        segment.unlink()
    inspection = JournalInspection(tmp_path)
    list(inspection.summaries(verify=True))
    bus = KeptBus(tmp_path)
    for (problem,) in inspection.problems, bus.found.problems:
        assert "no state file" in problem
    assert payloads(bus) == sent
    bus.crash()


def test_acked_messages_need_no_file(tmp_path: Path) -> None:
    bus = KeptBus(tmp_path, segment_bytes=1)
    reader = connect_version2(bus, subscribe(1, 5, durable="billing"))
    peer = connect_version2(bus, name="till")
    for number in range(20):
        peer.send(publish(1, number, b"%d" % number))
        bus.broker.clock.now += 0.03
        bus.keeper.is_snapshot_due = number % 3 == 0
        bus.sync()
        reader.receive_message_ids()
        reader.send(ack(5, 0, number + 1))
        bus.remove()
    assert len(segments(tmp_path)) < 20
    bus.crash()
    bus = KeptBus(tmp_path)
    assert bus.found.problems == []
    bus.crash()


def test_reports_damage_despite_reappeared_file(tmp_path: Path) -> None:
    bus = KeptBus(tmp_path)
    for number in range(2):
        connect_version2(bus, publish(1, 0, b"%d" % number))
        bus.sync()
    bus.crash()
    (segment,) = segments(tmp_path)
    data = bytearray(segment.read_bytes())
    data[data.find(data[:4], 1) + 60] ^= 1
    segment.write_bytes(data)
    segment.with_name(f"{1:020}.log").write_bytes(bytes(100))
    bus = KeptBus(tmp_path)
    assert payloads(bus) == [b"0"]
    assert any("checksum" in problem for problem in bus.found.problems)
    bus.crash()


def write_torn_segment(path: Path, message_count: int) -> Path:
    """Write one message per batch, and damage message 2. Returns the path of the file."""
    bus = KeptBus(path, level=Durability.OS, boot="first")
    for number in range(message_count):
        connect_version2(bus, publish(1, 0, b"old %d" % number))
        bus.sync()
    bus.crash()
    (segment,) = segments(path)
    damage_record(segment, 2)
    return segment


def test_damaged_start_of_a_file_after_a_torn_end_is_skipped(tmp_path: Path) -> None:
    write_torn_segment(tmp_path, 3)
    bus = KeptBus(tmp_path, level=Durability.OS, boot="second")
    for number in range(3):
        connect_version2(bus, publish(1, 0, b"new %d" % number))
        bus.sync()
    bus.crash()
    _, later_segment = segments(tmp_path)
    damage_record(later_segment, 0)
    for is_repaired in (False, True):
        bus = KeptBus(tmp_path, level=Durability.OS, boot="second")
        assert payloads(bus) == [b"old 0", b"old 1", b"", b"new 1", b"new 2"]
        assert bool(bus.found.problems) is not is_repaired
        bus.crash()


def test_data_after_a_torn_end_stays_dropped_without_later_file(tmp_path: Path) -> None:
    """The first recovery moves the data away, so its sequences can be used again."""
    torn_segment = write_torn_segment(tmp_path, 4)
    bus = KeptBus(tmp_path, level=Durability.OS, boot="second")
    connect_version2(bus, publish(1, 0, b"new"))
    bus.sync()
    bus.close()
    segments(tmp_path)[1].unlink()
    for _ in range(2):
        bus = KeptBus(tmp_path, level=Durability.OS, boot="second")
        assert payloads(bus) == [b"old 0", b"old 1"]
        bus.crash()
    (dropped,) = torn_segment.parent.glob("*.dropped*")
    assert b"old 3" in dropped.read_bytes()


def damage_record(path: Path, number: int) -> None:
    """Flip a bit in the header of a record."""
    data = bytearray(path.read_bytes())
    data[ends(path)[number] + HEADER_BYTES - 1] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("sizes", [(3, 1), (1, 1, 2)])
def test_reappeared_file_hides_nothing(tmp_path: Path, sizes: tuple[int, ...]) -> None:
    """A power cut undoes changes that were not synced, including renames."""
    bus = KeptBus(tmp_path, level=Durability.OS, boot="first", segment_bytes=1)
    for number in range(6):
        connect_version2(bus, publish(1, 0, b"old %d" % number))
        bus.broker.clock.now += 1
        bus.sync()
    bus.crash()
    lost_segment, old_segment, *other_segments = segments(tmp_path)[1:]
    for segment in lost_segment, *other_segments, *(tmp_path / "state").iterdir():
        segment.unlink()
    bus = KeptBus(tmp_path, level=Durability.OS, boot="second")
    assert not old_segment.exists()
    for size in sizes:
        connect_version2(bus, publish(1, 0, *numbered(size)))
        bus.broker.clock.now += 1
        bus.sync()
    bus.crash()
    (given_up,) = old_segment.parent.glob("*.dropped*")
    given_up.rename(old_segment)
    for _ in range(2):
        bus = KeptBus(tmp_path, level=Durability.OS, boot="third")
        assert payloads(bus) == [b"old 0", *(n for size in sizes for n in numbered(size))]
        bus.crash()


def test_renames_of_useless_files_are_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a power cut undoes them, and old messages return under sequences in use."""
    write_three_segments(tmp_path)
    (state,) = (tmp_path / "state").iterdir()
    damage_record(state, 0)
    names_when_synced: dict[Path, list[str]] = {}

    def sync(folder: Path) -> None:
        names_when_synced[folder] = [path.name for path in folder.iterdir()]

    monkeypatch.setattr(repair, "sync_directory", sync)
    KeptBus(tmp_path, level=Durability.OS).crash()
    assert names_when_synced == {state.parent: [state.name + ".dropped"]}


def test_replaced_messages_stay_skipped_without_later_file(tmp_path: Path) -> None:
    """A power cut undoes the truncation of a file and tears the file that continues it."""
    bus = KeptBus(tmp_path, level=Durability.OS, boot="first")
    for number in range(3):
        connect_version2(bus, publish(1, 0, b"old %d" % number))
        bus.sync()
    bus.crash()
    (old_segment,) = segments(tmp_path)
    content = old_segment.read_bytes()
    old_segment.write_bytes(content[: content.find(content[:4], 1)])
    for segment in (tmp_path / "state").iterdir():
        segment.unlink()
    bus = KeptBus(tmp_path, level=Durability.OS, boot="second")
    connect_version2(bus, publish(1, 0, *numbered(3)))
    bus.sync()
    bus.crash()
    old_segment.write_bytes(content)
    later_segment = segments(tmp_path)[1]
    later_segment.write_bytes(later_segment.read_bytes().rstrip(b"\0")[:-1])
    for _ in range(2):
        bus = KeptBus(tmp_path, level=Durability.OS, boot="third")
        assert payloads(bus) == [b"old 0"]
        bus.crash()
