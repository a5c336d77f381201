"""Recovery from damaged files: intact messages return, damage is reported."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from random import Random

import pytest

from simplebus.core import restore
from simplebus.core.commit_log import JournalEntry
from simplebus.core.errors import Reason
from simplebus.core.limits import Limits
from simplebus.core.protocol.durability import Durability
from simplebus.core.protocol.envelope import stuff
from simplebus.core.settings import Settings
from simplebus.storage import records
from simplebus.storage.directory import open_directory
from simplebus.storage.errors import JournalError
from simplebus.storage.file_names import STAMP, dropped_name
from simplebus.storage.inspection import JournalInspection
from simplebus.storage.records import HEADER_BYTES, Record
from tests.behaviour.wire_peer import numbered
from tests.behaviour.wire_peer_v2 import (
    Version2Peer,
    ack,
    channel_envelope,
    connect_version2,
    json_request,
    publish,
    publish_envelopes,
    subscribe,
)
from tests.models.key_order_model import encode_with_key
from tests.storage.journaled_broker import KeptBus
from tests.storage.spilling_broker import (
    SpilledBus,
    contents,
    fill,
    receive_and_ack_all,
    spill_settings,
)
from tests.storage.test_journal import next_number, payloads

BATCHES, BATCH_SIZE = 6, 3


def write_journal(path: Path, *, segment_bytes: int = 1 << 20) -> list[bytes]:
    """Write a journal of a few batches and crash. Returns the published payloads."""
    bus = KeptBus(path, segment_bytes=segment_bytes)
    reader = connect_version2(bus, subscribe(1, 5, durable="billing"))
    peer = connect_version2(bus, name="till")
    sent = []
    for batch in range(BATCHES):
        sent += (payloads_of_batch := numbered(BATCH_SIZE, start=BATCH_SIZE * batch))
        peer.send(publish(1, BATCH_SIZE * batch, *payloads_of_batch))
        bus.sync()
    reader.receive_message_ids()
    reader.send(ack(5, 0, 1))
    bus.broker.clock.now += 1
    bus.sync()
    bus.crash()
    return sent


def segments(path: Path) -> list[Path]:
    return sorted((path / "classes" / "00001").glob("*.log"))


def ends(path: Path) -> list[int]:
    """Return the end offset of each record in a file, beginning with 0."""
    found, data = [0], memoryview(path.read_bytes())
    salt = open_directory(next(parent for parent in path.parents if (parent / STAMP).exists())).salt
    while isinstance(record := records.read_record(data, found[-1], salt=salt), Record):
        found.append(record.end)
    return found


def recover_and_crash(path: Path) -> tuple[list[bytes], int, list[str]]:
    """Recover a bus. Return its payloads, the publisher's next number and the reported problems."""
    bus = KeptBus(path)
    payloads_found = payloads(bus), next_number(bus), bus.found.problems
    bus.crash()
    return payloads_found


def test_recovers_intact_records_of_truncated_file(tmp_path: Path) -> None:
    sent = write_journal(tmp_path)
    (path,) = segments(tmp_path)
    data = path.read_bytes()
    bounds = ends(path)
    for size in range(bounds[-2] - 1, bounds[-1] + 1):
        path.write_bytes(data[:size])
        intact_count = BATCH_SIZE * sum(bound <= size for bound in bounds[1:])
        payloads_found, next_number_found, dropped = recover_and_crash(tmp_path)
        assert payloads_found == sent[1:intact_count], size
        assert next_number_found == intact_count
        assert bool(dropped) == (size < bounds[-1]), dropped


def test_damage_at_the_end_ends_the_class(tmp_path: Path) -> None:
    sent = write_journal(tmp_path)
    (path,) = segments(tmp_path)
    data = path.read_bytes()
    bounds = ends(path)
    for number, offset in enumerate(range(bounds[-2], bounds[-2] + HEADER_BYTES), 1):
        damaged = bytearray(data)
        damaged[offset] ^= 1 << offset % 8
        path.write_bytes(damaged)
        payloads_found, next_number_found, dropped = recover_and_crash(tmp_path)
        assert payloads_found == sent[1:-BATCH_SIZE], offset
        assert next_number_found == len(sent) - BATCH_SIZE
        assert len(dropped) == 1
        assert str(path) in dropped[0]
        assert path.read_bytes() == data[: bounds[-2]]
        moved = path.with_name(dropped_name(0, number)).read_bytes()
        assert moved == damaged[bounds[-2] : bounds[-1]]


@pytest.mark.parametrize("is_header", [True, False])
def test_skips_a_damaged_record_and_keeps_the_rest(tmp_path: Path, is_header: bool) -> None:
    sent = write_journal(tmp_path / "whole")
    (path,) = segments(tmp_path / "whole")
    start, end = ends(path)[1:3]
    expected = sent[1:BATCH_SIZE] + sent[2 * BATCH_SIZE :]
    places = range(start, start + HEADER_BYTES) if is_header else range(start + HEADER_BYTES, end)
    for offset in places[::5]:
        copy = tmp_path / str(offset)
        shutil.copytree(tmp_path / "whole", copy)
        (path,) = segments(copy)
        damaged = bytearray(path.read_bytes())
        damaged[offset] ^= 1 << offset % 8
        path.write_bytes(damaged)
        bus = KeptBus(copy)
        (problem,) = bus.found.problems
        assert f"at byte {start}; skipped messages 3-5 of class 1 (3 messages)" in problem
        assert bus.statistics(1).dropped == {Reason.DAMAGED: BATCH_SIZE}
        durable = bus.broker.classes[1].named_positions["billing", ""]
        assert durable.undelivered_counts == {Reason.DAMAGED: BATCH_SIZE}
        reader = connect_version2(bus, subscribe(1, 5, durable="billing"))
        assert [message.content for message in reader.receive_deliveries()] == expected
        dropped = path.with_name(path.name + ".dropped")
        assert dropped.read_bytes() == damaged[start:end]
        bus.sync()
        bus.crash()
        bus = KeptBus(copy)  # The first recovery recorded the gap.
        assert bus.found.problems == []
        assert bus.statistics(1).dropped == {}
        reader = connect_version2(bus, subscribe(1, 5, start="earliest"))
        assert [message.content for message in reader.receive_deliveries()] == expected
        bus.crash()


@pytest.mark.parametrize("segment_bytes", [400, 1 << 20])
def test_skips_zeros_and_keeps_the_rest(tmp_path: Path, segment_bytes: int) -> None:
    """A lost block reads as zeros, like the unused end of a file."""
    sent = write_journal(tmp_path, segment_bytes=segment_bytes)
    path, *later_paths = segments(tmp_path)
    assert bool(later_paths) == (segment_bytes == 400)
    data = bytearray(path.read_bytes())
    start, end = ends(path)[1:3]
    data[start:end] = bytes(end - start)
    path.write_bytes(data)
    payloads_found, _, (problem,) = recover_and_crash(tmp_path)
    assert f"no data before later data at byte {start}; skipped messages 3-5" in problem
    assert payloads_found == [*sent[1:BATCH_SIZE], b"", b"", b"", *sent[2 * BATCH_SIZE :]]
    assert recover_and_crash(tmp_path)[::2] == (payloads_found, [])


def write_single_batches(path: Path, *, segment_bytes: int) -> list[bytes]:
    """Write one message per batch in a boot of the machine, and crash. Returns the payloads."""
    bus = KeptBus(path, segment_bytes=segment_bytes, boot="first")
    connect_version2(bus, subscribe(1, 5, durable="billing"))
    peer = connect_version2(bus)
    sent = numbered(20)
    for number, payload in enumerate(sent):
        peer.send(publish(1, number, payload))
        bus.sync()
    bus.crash()
    assert len(segments(path)) > 2
    return sent


def test_damage_at_the_end_of_a_segment_keeps_later_ones_after_a_power_cut(tmp_path: Path) -> None:
    sent = write_single_batches(tmp_path, segment_bytes=400)
    path = segments(tmp_path)[0]
    bounds = ends(path)
    data = bytearray(path.read_bytes())
    data[bounds[-2] + HEADER_BYTES] ^= 1
    path.write_bytes(data)
    lost = len(bounds) - 2
    bus = KeptBus(tmp_path, boot="second")
    assert payloads(bus) == [*sent[:lost], b"", *sent[lost + 1 :]]
    assert bus.statistics(1).dropped == {Reason.DAMAGED: 1}
    bus.crash()


@pytest.mark.parametrize("is_header", [False, True])
def test_stored_record_before_batches_in_doubt_is_skipped_alone(
    tmp_path: Path, is_header: bool
) -> None:
    """After a power cut, the last three batches are in doubt, and the damage is before them."""
    bus = KeptBus(tmp_path, boot="first")
    bus.sync()
    for number in range(6):
        connect_version2(bus, publish(1, 0, b"%d" % number))
        bus.sync()
    bus.crash()
    path = segments(tmp_path)[0]
    data = bytearray(path.read_bytes())
    data[ends(path)[2] + (0 if is_header else HEADER_BYTES)] ^= 1
    path.write_bytes(data)
    bus = KeptBus(tmp_path, boot="second")
    reader = connect_version2(bus, subscribe(1, 5, start="earliest"))
    received = [message.content for message in reader.receive_deliveries()]
    assert received == [b"0", b"1", b"3", b"4", b"5"]
    bus.crash()


def test_gap_is_recorded_when_the_disk_has_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = write_journal(tmp_path)
    (path,) = segments(tmp_path)
    data = bytearray(path.read_bytes())
    data[ends(path)[1]] ^= 1
    path.write_bytes(data)

    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as full_disk:
        full_disk.setattr(os, "fsync", fail)
        found = recover_and_crash(tmp_path)
    assert found[0] == [*sent[1:BATCH_SIZE], b"", b"", b"", *sent[2 * BATCH_SIZE :]]
    assert (path.read_bytes(), [*path.parent.iterdir()]) == (data, [path])
    assert recover_and_crash(tmp_path) == found
    assert recover_and_crash(tmp_path)[2] == []


def test_later_batches_of_other_classes_show_that_messages_were_stored(tmp_path: Path) -> None:
    """The last three batches of the journal are in doubt after a power cut, not of each class."""
    bus = KeptBus(tmp_path, boot="first")
    peer = connect_version2(bus, classes=(1, 2))
    for number, class_id in enumerate([1, 1, 2, 2, 2]):
        peer.send(publish(class_id, number, b"%d" % number))
        bus.sync()
    bus.crash()
    path = segments(tmp_path)[0]
    data = bytearray(path.read_bytes())
    data[HEADER_BYTES] ^= 1
    path.write_bytes(data)
    for state in (tmp_path / "state").iterdir():
        os.truncate(state, ends(state)[1])  # The later batches changed no durable.
    bus = KeptBus(tmp_path, boot="second")
    reader = connect_version2(bus, subscribe(1, 5, start="earliest"))
    assert [message.content for message in reader.receive_deliveries()] == [b"1"]
    bus.crash()


def test_damage_at_the_start_of_the_last_segment_keeps_its_rest(tmp_path: Path) -> None:
    sent = write_single_batches(tmp_path, segment_bytes=400)
    *_, previous, last = segments(tmp_path)
    last_bounds = ends(last)
    lost = len(sent) - (len(last_bounds) - 1)
    for path, offset in ((previous, ends(previous)[-2]), (last, 0)):
        data = bytearray(path.read_bytes())
        data[offset + HEADER_BYTES // 2] ^= 1
        path.write_bytes(data)
    bus = KeptBus(tmp_path, boot="first")
    assert payloads(bus) == [*sent[: lost - 1], b"", b"", *sent[lost + 1 :]]
    bus.crash()


def test_record_with_a_lost_header_is_reported(tmp_path: Path) -> None:
    """The last record of a file, whose first block reads as zeros."""
    bus = KeptBus(tmp_path)
    peer = connect_version2(bus, publish(1, 0, b"first"))
    bus.sync()
    peer.send(publish(1, 1, b"x" * 3000))
    bus.sync()
    bus.crash()
    (path,) = segments(tmp_path)
    start = ends(path)[1]
    data = bytearray(path.read_bytes())
    data[start : start + 512] = bytes(512)
    path.write_bytes(data)
    inspection = JournalInspection(tmp_path, reads_past_damage=False)
    assert [summary.head for summary in inspection.summaries(verify=True)] == [1]
    assert f"no data before later data at byte {start}" in inspection.problems[0]
    bus = KeptBus(tmp_path)
    assert payloads(bus) == [b"first"]
    assert f"no data before later data at byte {start}" in bus.found.problems[0]
    bus.crash()


@pytest.mark.parametrize("segment_bytes", [1, 400, 1 << 20])
def test_damage_in_many_places_keeps_every_intact_record(
    tmp_path: Path, segment_bytes: int
) -> None:
    """A payload that holds a copy of a whole segment is never taken for records."""
    random = Random(segment_bytes)
    bus = KeptBus(tmp_path, segment_bytes=segment_bytes)
    connect_version2(bus, subscribe(1, 5, durable="billing"))
    peer = connect_version2(bus, name="till")
    for number in range(40):
        copies = b"".join(path.read_bytes().rstrip(b"\0") for path in segments(tmp_path)[-1:])
        forged = [_forged_record(number, salt=0), _forged_record(number + 1, salt=1)]
        payload = b"%d " % number + copies[-2000:] + b"".join(forged)
        peer.send(publish_envelopes(1, number, channel_envelope("copies", stuff(payload))))
        bus.sync()
    bus.close()
    segment = _delivered(tmp_path)
    assert segment == [b"%d" % number for number in range(40)]
    lost_payloads = set()
    first = 0
    for path in segments(tmp_path):
        data = bytearray(path.read_bytes())
        bounds = ends(path)
        for start, end in pairwise(bounds):
            if random.random() < 0.3 and first < 39:
                lost_payloads.add(first)
                data[random.randrange(start, start + HEADER_BYTES)] ^= 4
                data[random.randrange(start, end)] ^= 8
            first += 1
        path.write_bytes(data)
    expected = [b"%d" % number for number in range(40) if number not in lost_payloads]
    for _ in range(2):
        assert _delivered(tmp_path) == expected
    assert {
        number
        for path in tmp_path.glob("classes/00001/*.dropped*")
        for number in range(40)
        if b"%d " % number in path.read_bytes()
    } >= {number for number in lost_payloads if number > 9}


def _forged_record(number: int, salt: int) -> bytes:
    """Return a record as the journal would contain it under another salt."""
    entry = JournalEntry(1, number, 1.0)
    entry.append_frames(1, b"forged", "till")
    return b"".join(records.encode_entry(entry, number + 1, salt=salt))


def _delivered(path: Path) -> list[bytes]:
    """Recover a bus, and return what a new subscription receives."""
    bus = KeptBus(path)
    reader = connect_version2(bus, subscribe(1, 6, start="earliest"))
    found = [message.content for message in reader.receive_deliveries()]
    bus.crash()
    return [
        content.removeprefix(channel_envelope("copies", b"")).split(b" ")[0] for content in found
    ]


@pytest.mark.parametrize(
    ("boot", "expected"), [("first", [b"0", b"2"]), ("second", [b"0"])], ids=["killed", "power cut"]
)
def test_last_batches_are_kept_unless_the_power_failed(
    tmp_path: Path, boot: str, expected: list[bytes]
) -> None:
    """After a power failure, an intact record may follow a torn one; neither was confirmed."""
    bus = KeptBus(tmp_path, boot="first")
    for number in range(3):
        connect_version2(bus, publish(1, 0, b"%d" % number))
        bus.sync()
    bus.crash()
    (path,) = segments(tmp_path)
    data = bytearray(path.read_bytes())
    data[ends(path)[1] + 5] ^= 1
    path.write_bytes(data)
    bus = KeptBus(tmp_path, boot=boot)
    reader = connect_version2(bus, subscribe(1, 5, start="earliest"))
    assert [message.content for message in reader.receive_deliveries()] == expected
    bus.crash()


def test_skipped_messages_are_not_stored_twice(tmp_path: Path) -> None:
    """A publisher learns how many confirmed messages are lost, and continues."""
    bus = KeptBus(tmp_path)
    peer = connect_version2(bus, name="till")
    for number in range(6):
        peer.send(publish(1, number, b"%d" % number))
        bus.sync()
    bus.crash()
    (path,) = segments(tmp_path)
    data = bytearray(path.read_bytes())
    data[ends(path)[1] + HEADER_BYTES + 1] ^= 1
    path.write_bytes(data)
    bus = KeptBus(tmp_path)
    peer = Version2Peer(bus, bus.broker.open_session())
    peer.send(json_request(ord("4"), request=1, version=2, name="till", unconfirmed=6))
    (reply,) = peer.receive_replies()
    assert (reply.content["next"], reply.content["lost"]) == (6, 1)
    bus.crash()


@pytest.mark.parametrize("messages", [3, 64])
def test_groups_and_idle_durables_pass_a_gap(tmp_path: Path, messages: int) -> None:
    settings = spill_settings(messages)
    bus = SpilledBus(tmp_path, settings=settings, level=Durability.DISK)
    group = subscribe(1, 5, durable="keyed", group="workers", by_key=True)
    connect_version2(bus, group, subscribe(1, 6, durable="late"))
    peer = connect_version2(bus, name="till")
    for number in range(12):
        envelope = encode_with_key(b"%d" % (number % 3), b"%d" % number)
        peer.send(publish_envelopes(1, number, envelope))
        bus.sync()
    bus.crash()
    (path,) = segments(tmp_path)
    data = bytearray(path.read_bytes())
    data[ends(path)[4] + 2] ^= 1
    path.write_bytes(data)
    bus = SpilledBus(tmp_path, settings=settings, level=Durability.DISK)
    for request in (group, subscribe(1, 5, durable="late")):
        received = receive_and_ack_all(bus, connect_version2(bus, request))
        assert sorted(each.message_id for each in received) == [*range(4), *range(5, 12)]
    bus.crash()


@pytest.mark.parametrize("is_lost", [False, True])
def test_damaged_state_change_is_skipped(tmp_path: Path, is_lost: bool) -> None:
    bus = KeptBus(tmp_path, boot="first")
    reader = connect_version2(bus, subscribe(1, 5, durable="billing"))
    bus.sync()
    peer = connect_version2(bus, name="till")
    for number in range(6):
        peer.send(publish(1, number, b"%d" % number))
        reader.receive_message_ids()
        reader.send(ack(5, number, number + 1))
        bus.broker.clock.now += 1
        bus.sync()
    bus.crash()
    (path,) = (tmp_path / "state").iterdir()
    data = bytearray(path.read_bytes())
    bounds = ends(path)
    data[bounds[2] + HEADER_BYTES + 1] ^= 1
    if is_lost:  # A lost block reads as zeros.
        data[bounds[2] : bounds[3]] = bytes(bounds[3] - bounds[2])
    path.write_bytes(data)
    bus = KeptBus(tmp_path, boot="first")
    assert bus.broker.classes[1].named_positions["billing", ""].window.floor == 6
    (problem,) = bus.found.problems
    assert f"at byte {bounds[2]}; skipped {bounds[3] - bounds[2]} bytes of changes" in problem
    dropped = path.with_name(path.name + ".dropped")
    assert is_lost or dropped.read_bytes() == data[bounds[2] : bounds[3]]
    bus.crash()


def test_damaged_state_keeps_messages(tmp_path: Path) -> None:
    sent = write_journal(tmp_path)
    (path,) = (tmp_path / "state").iterdir()
    data = path.read_bytes()
    end = ends(path)[-1]

    def cut(offset: int) -> bytes:
        return data[:offset]

    def flip_byte(offset: int) -> bytes:
        return data[:offset] + bytes([data[offset] ^ 0x10]) + data[offset + 1 :]

    damages: list[Callable[[int], bytes]] = [cut, flip_byte]
    for damage in damages:
        for offset in range(0, end, 23):
            path.write_bytes(damage(offset))
            bus = KeptBus(tmp_path)
            assert payloads(bus) in (sent, sent[1:])
            assert next_number(bus) == len(sent)
            bus.crash()


def test_continues_in_new_file_after_truncation(tmp_path: Path) -> None:
    sent = write_journal(tmp_path)
    (path,) = segments(tmp_path)
    data = path.read_bytes()
    path.write_bytes(data[: ends(path)[-1] - 1])
    bus = KeptBus(tmp_path)
    connect_version2(bus, publish(1, next_number(bus), b"new"), name="till")
    bus.sync()
    bus.crash()
    payloads_found, next_number_found, dropped = recover_and_crash(tmp_path)
    assert payloads_found == [*sent[1:-BATCH_SIZE], b"new"]
    assert next_number_found == len(sent) - BATCH_SIZE + 1
    assert dropped == []
    assert len(segments(tmp_path)) == 2


def test_damaged_segment_is_a_gap(tmp_path: Path) -> None:
    sent = write_journal(tmp_path, segment_bytes=1)
    files = segments(tmp_path)
    assert len(files) == BATCHES
    damaged = bytearray(files[2].read_bytes())
    damaged[HEADER_BYTES + 3] ^= 1
    files[2].write_bytes(damaged)
    payloads_found, _, dropped = recover_and_crash(tmp_path)
    assert payloads_found == [*sent[1 : 2 * BATCH_SIZE], b"", b"", b"", *sent[3 * BATCH_SIZE :]]
    assert len(dropped) == 2
    assert dropped[1].endswith("missing messages 6-8 of class 1 (3 messages)")
    assert len(segments(tmp_path)) == BATCHES
    (moved,) = files[0].parent.glob("*.dropped")
    assert moved.read_bytes() == damaged


def test_reports_messages_after_damage(tmp_path: Path) -> None:
    sent = write_journal(tmp_path)
    (path,) = segments(tmp_path)
    data = bytearray(path.read_bytes())
    data[ends(path)[2] + HEADER_BYTES + 3] ^= 1
    path.write_bytes(data)
    inspection = JournalInspection(tmp_path)
    found = [message.payload for message in inspection.messages(1, count=99)]
    assert found == sent[: 2 * BATCH_SIZE] + sent[3 * BATCH_SIZE :]
    (problem,) = inspection.problems
    assert problem.endswith("skipped messages 6-8 of class 1 (3 messages)")
    bus = KeptBus(tmp_path)
    assert payloads(bus) == [*sent[1 : 2 * BATCH_SIZE], b"", b"", b"", *sent[3 * BATCH_SIZE :]]
    assert bus.found.problems == [problem]
    assert bus.statistics(1).dropped[Reason.DAMAGED] == 3
    bus.crash()


def publish_four_and_ack_two(path: Path, *, boot: str = "", level: Durability) -> Path:
    """Publish four messages in batches of their own, and acknowledge two of them before the others
    are published. Returns the path of the file.
    """
    bus = KeptBus(path, level=level, boot=boot)
    reader = connect_version2(bus, subscribe(1, 5, durable="billing"))
    for number in range(4):
        connect_version2(bus, publish(1, 0, b"%d" % number))
        bus.sync()
        if number == 1:  # No other file records the other two messages.
            reader.receive_message_ids()
            reader.send(ack(5, 0, 2))
            bus.broker.clock.now += 1
            bus.sync()
    bus.crash()
    (segment,) = segments(path)
    return segment


@pytest.mark.parametrize("is_header", [False, True])
@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("boot", ["first", "second"])
@pytest.mark.parametrize("level", [Durability.DISK, Durability.OS])
def test_damage_of_an_unneeded_record_is_recorded_once(
    tmp_path: Path, number: int, is_header: bool, boot: str, level: Durability
) -> None:
    path = publish_four_and_ack_two(tmp_path, boot="first", level=level)
    data = bytearray(path.read_bytes())
    bounds = ends(path)
    data[bounds[number] if is_header else bounds[number + 1] - 1] ^= 1
    path.write_bytes(data)
    bus = KeptBus(tmp_path, level=level, boot=boot)
    (problem,) = bus.found.problems
    assert (
        f"checksum mismatch at byte {bounds[number]}; skipped message {number} of class 1"
        in problem
    )
    assert (payloads(bus), bus.statistics(1).dropped) == ([b"2", b"3"], {})
    assert path.with_name(path.name + ".dropped").read_bytes() in data
    bus.crash()
    bus = KeptBus(tmp_path, level=level, boot=boot)
    assert (payloads(bus), bus.found.problems) == ([b"2", b"3"], [])
    bus.crash()


@pytest.mark.parametrize("intact_count", [0, 1])
def test_zeros_after_unneeded_damage_are_reported(tmp_path: Path, intact_count: int) -> None:
    """A power cut may leave pages of zeros in the middle of a file."""
    path = publish_four_and_ack_two(tmp_path, level=Durability.DISK)
    data = bytearray(path.read_bytes())
    bounds = ends(path)
    torn, intact_end = bounds[2] - 1, bounds[4 - intact_count]
    data[torn:intact_end] = bytes(intact_end - torn)
    path.write_bytes(data)
    inspection = JournalInspection(tmp_path)
    assert [message.payload for message in inspection.messages(1, first=2, count=9)] == [b"3"][
        :intact_count
    ]
    bus = KeptBus(tmp_path)
    assert (payloads(bus), bus.broker.classes[1].ring.head) == ([], 2)
    unneeded, *zeros = bus.found.problems
    assert f"checksum mismatch at byte {bounds[1]}; skipped message 1 of class 1" in unneeded
    assert [
        problem.endswith(
            f"no data before later data at byte {bounds[2]}; skipped messages 2-3 of class 1 "
            "(2 messages)"
        )
        for problem in zeros
    ] == [True] * intact_count
    assert bus.statistics(1).dropped.get(Reason.DAMAGED, 0) == 2 * intact_count
    bus.sync()
    bus.crash()
    bus = KeptBus(tmp_path)
    assert (payloads(bus), bus.found.problems) == ([], [])
    bus.crash()


def test_missing_segment_is_a_gap(tmp_path: Path) -> None:
    sent = write_journal(tmp_path, segment_bytes=1)
    segments(tmp_path)[3].unlink()
    payloads_found, _, dropped = recover_and_crash(tmp_path)
    gap = [b""] * BATCH_SIZE
    assert payloads_found == sent[1 : 3 * BATCH_SIZE] + gap + sent[4 * BATCH_SIZE :]
    assert "missing messages 9-11 of class 1 (3 messages)" in dropped[0]
    inspection = JournalInspection(tmp_path)  # Recovery renames its files.
    assert inspection.problems == []


def test_sequences_continue_without_messages(tmp_path: Path) -> None:
    write_journal(tmp_path)
    for _ in range(3):
        for path in segments(tmp_path):
            path.unlink()
        bus = KeptBus(tmp_path)
        assert bus.broker.classes[1].ring.head == 1
        bus.sync()
        bus.crash()


def test_keeps_unknown_files(tmp_path: Path) -> None:
    sent = write_journal(tmp_path)
    for name in ("classes/notes.txt", "classes/00001/00000000000000000000.log.bak", "state/x.log"):
        (tmp_path / name).write_text("not ours")
    payloads_found, _, dropped = recover_and_crash(tmp_path)
    assert (payloads_found, dropped) == (sent[1:], [])


def test_state_file_that_begins_with_zeros_is_kept(tmp_path: Path) -> None:
    """Its first block is lost; the rest may help the operator."""
    write_journal(tmp_path)
    (path,) = (tmp_path / "state").iterdir()
    data = bytearray(path.read_bytes())
    data[:HEADER_BYTES] = bytes(HEADER_BYTES)
    path.write_bytes(data)
    bus = KeptBus(tmp_path)
    assert f"{path}: no intact snapshot at the start; ignored the file" in bus.found.problems
    bus.sync()
    bus.crash()
    assert path.with_name(path.name + ".dropped").read_bytes() == data


def test_incomplete_state_falls_back_to_previous(tmp_path: Path) -> None:
    sent = write_journal(tmp_path)
    (path,) = (tmp_path / "state").iterdir()
    newer_state = path.with_name("00000000000000000002.log")
    newer_state.write_bytes(path.read_bytes()[:40])
    payloads_found, next_number_found, dropped = recover_and_crash(tmp_path)
    assert (payloads_found, next_number_found) == (sent[1:], len(sent))
    assert "no intact snapshot at the start" in dropped[0]


def test_too_little_memory_raises_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restore, "RESTORE_HEADROOM_BYTES", 0)
    bus = KeptBus(tmp_path)
    connect_version2(bus, publish(1, 0, *numbered(400, size=4000)))
    bus.sync()
    bus.crash()
    small_limits = Settings(limits=Limits(frame_bytes=10_000, class_bytes=1 << 20))
    with pytest.raises(JournalError, match="class 1 holds more than fits"):
        KeptBus(tmp_path, settings=small_limits)
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
    (path,) = segments(tmp_path)  # Of the last batch, only the acknowledgements reached the disk.
    data = path.read_bytes()
    path.write_bytes(data[: ends(path)[-2]])
    bus = KeptBus(tmp_path)
    connect_version2(bus, publish(1, 1, b"b"), name="till")
    bus.write()
    bus.crash()
    newer_state = tmp_path / "state" / "00000000000000000002.log"
    newer_state.write_bytes(b"")  # Of this batch, only the messages.
    bus = KeptBus(tmp_path)
    assert next_number(bus) == 2
    assert payloads(bus) == [b"b"]
    reader = connect_version2(bus, subscribe(1, 5, durable="billing"))
    assert [message.content for message in reader.receive_deliveries()] == [b"b"]
    bus.crash()


def test_floor_of_lost_messages_does_not_apply_to_spilled_messages(tmp_path: Path) -> None:
    bus = SpilledBus(tmp_path)
    peer = connect_version2(bus, publish(1, 0, b"a"), name="till")
    reader = connect_version2(bus, subscribe(1, 5, durable="billing"))
    bus.sync()
    peer.send(publish(1, 1, *numbered(50)))
    reader.receive_message_ids()
    reader.send(ack(5, 0, 51))
    bus.keeper.is_snapshot_due = True
    bus.write()
    bus.crash()
    (path,) = segments(tmp_path)  # Of the last batch, only the snapshot reached the disk.
    path.write_bytes(path.read_bytes()[: ends(path)[-2]])
    state = tmp_path / "state" / "00000000000000000002.log"
    snapshot = state.read_bytes()
    bus = SpilledBus(tmp_path)
    fill(bus, connect_version2(bus), 200)
    bus.crash()
    state.write_bytes(snapshot)  # Of these batches, only the messages.
    state.with_name("00000000000000000003.log").unlink()
    bus = SpilledBus(tmp_path)
    assert bus.broker.classes[1].first_sequence == 1
    reader = connect_version2(bus, subscribe(1, 5, durable="billing"))
    assert contents(receive_and_ack_all(bus, reader)) == numbered(200)


def test_snapshot_is_written_after_its_messages(tmp_path: Path) -> None:
    bus = KeptBus(tmp_path)
    connect_version2(bus, publish(1, 0, b"a"), name="till")
    bus.write()  # The first batch is a snapshot with the publisher's numbers.
    (path,) = segments(tmp_path)
    (file,) = (cls.file for cls in bus.journal._classes.values())
    assert file is not None
    assert (file.path, file.synced_bytes) == (path, file.written_bytes)
    bus.crash()


def test_state_that_contradicts_itself_is_a_journal_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_journal(tmp_path)

    def find_unknown_class(*args: object) -> None:
        raise KeyError(-3)

    monkeypatch.setattr(restore.BrokerRestorer, "open_class", find_unknown_class)
    with pytest.raises(JournalError, match=r"the state contradicts itself \(KeyError\(-3\)\)"):
        KeptBus(tmp_path)
