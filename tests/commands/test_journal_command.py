"""Listing, display and export of a journal from the command line."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from simplebus.commands.journal import app
from simplebus.core.errors import Reason
from simplebus.core.protocol.durability import Durability
from simplebus.storage.errors import JournalError, JournalInUseError
from tests.behaviour.wire_peer_v2 import (
    ack,
    channel_envelope,
    connect_version2,
    publish,
    publish_envelopes,
    subscribe,
)
from tests.storage.journaled_broker import KeptBus
from tests.storage.test_recovery import ends, segments


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    """Create the data directory of a bus that was killed."""
    bus = KeptBus(tmp_path)
    reader = connect_version2(bus, classes=[{"id": 1, "name": "orders"}, 2])
    reader.send(subscribe(1, 5, durable="billing"))
    bus.sync()
    peer = connect_version2(bus, publish(1, 0, b"plain", b"\xff\n"), name="till")
    peer.send(publish_envelopes(1, 2, channel_envelope("orders.eu", b"with a channel")))
    reader.receive_message_ids()
    reader.send(ack(5, 0, 1))
    bus.broker.clock.now += 1
    bus.sync()
    bus.crash()
    return tmp_path


def run(*arguments: object) -> Result:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def test_ls_lists_classes_and_durables(journal: Path) -> None:
    lines = run("ls", journal).stdout.splitlines()
    assert lines[0] == "bus here"
    assert lines[1].startswith(
        "class 1 orders: 3 messages, 0 to 2, of which 2 are still needed; 1 segments, 64KiB; "
        "2023-11-14T22:13:20"
    )
    assert lines[2] == "  durable billing: all below 1 acknowledged, 0 not sent yet"
    assert lines[3] == "class 2: 0 messages, of which 0 are still needed; 0 segments, 0"


def test_show_prints_messages(journal: Path) -> None:
    lines = run("dump", journal, "orders").stdout.splitlines()
    assert [line.split("  ", 2)[2] for line in lines] == [
        "till#0  plain",
        "till#1  \\xff\\n",
        "till#2  orders.eu  with a channel",
    ]
    assert len(run("dump", journal, 1, "--first", 1, "--count", 1).stdout.splitlines()) == 1


def test_export_writes_messages(journal: Path) -> None:
    found = [json.loads(line) for line in run("export", journal, "orders").stdout.splitlines()]
    assert [each["sequence"] for each in found] == [0, 1, 2]
    assert [each.get("payload") for each in found] == ["plain", None, "with a channel"]
    assert found[1]["payload_base64"] == "/wo="
    assert found[2]["channel"] == "orders.eu"


def test_damaged_records_are_reported(journal: Path) -> None:
    result = run("verify", journal)
    assert (result.exit_code, result.stdout) == (0, "intact: 3 messages in 65,536 bytes\n")
    segment = journal / "classes" / "00001" / "00000000000000000000.log"
    data = bytearray(segment.read_bytes())
    data[70] ^= 1
    segment.write_bytes(data)
    result = run("verify", journal)
    assert result.exit_code == 1
    assert "00000000000000000000.log: checksum mismatch at byte 0" in result.output


@pytest.mark.parametrize("place", ["middle", "end", "state", "first of two files"])
def test_repair_leaves_an_intact_journal(tmp_path: Path, place: str) -> None:
    bus = KeptBus(tmp_path, segment_bytes=300 if place == "first of two files" else 1 << 20)
    connect_version2(bus, subscribe(1, 5, durable="billing"))
    bus.sync()
    peer = connect_version2(bus, name="till")
    for number in range(8):
        peer.send(publish(1, number, b"%d" % number))
        bus.broker.clock.now += 1
        bus.sync()
    bus.crash()
    folder = tmp_path / ("state" if place == "state" else "classes/00001")
    damaged = min(folder.glob("*.log"))
    bounds, data = ends(damaged), bytearray(damaged.read_bytes())
    record = {"middle": 2, "end": len(bounds) - 2, "state": 1, "first of two files": 0}[place]
    data[bounds[record] + 60] ^= 1
    damaged.write_bytes(data)
    before = sorted(tmp_path.rglob("*"))
    planned = run("repair", tmp_path, "--dry-run")
    assert sorted(tmp_path.rglob("*")) == before
    assert f"{damaged}: move bytes {bounds[record]} to" in planned.stdout
    assert run("verify", tmp_path).exit_code == 1
    repaired = run("repair", tmp_path)
    assert (repaired.exit_code, "intact: " in repaired.stdout) == (0, True)
    assert set(planned.stdout.splitlines()) <= set(repaired.stdout.splitlines())
    (dropped,) = folder.glob("*.dropped")
    assert bytes(data[bounds[record] : bounds[record + 1]]) in dropped.read_bytes()
    assert run("repair", tmp_path).stdout.startswith("nothing to repair\n")
    if place != "state":
        assert f"gap: message {record} of class 1" in run("verify", tmp_path).stdout
        assert "intact: 7 messages in" in run("verify", tmp_path).stdout
    bus = KeptBus(tmp_path)
    assert bus.found.problems == []
    reader = connect_version2(bus, subscribe(1, 5, durable="billing"))
    lost = set() if place == "state" else {record}
    assert set(reader.receive_message_ids()) == set(range(8)) - lost
    bus.crash()


def remove_first_file(path: Path) -> None:
    segments(path)[0].unlink()


def remove_last_file(path: Path) -> None:
    segments(path)[-1].unlink()


def remove_last_file_after_damage(path: Path) -> None:
    flip_bit(segments(path)[0], 60)
    segments(path)[-1].unlink()


def remove_folder(path: Path) -> None:
    shutil.rmtree(path / "classes" / "00001")


def damage_last_two_files(path: Path) -> None:
    """After a power cut, the last file is dropped, because the file before it is damaged."""
    for segment in segments(path)[-2:]:
        flip_bit(segment, 5)


def flip_bit(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("level", [Durability.DISK, Durability.OS])
@pytest.mark.parametrize(
    ("damage", "missing_count"),
    [
        (remove_first_file, 1),
        (remove_last_file, 1),
        (remove_last_file_after_damage, 2),
        (remove_folder, 6),
        (damage_last_two_files, 2),
    ],
)
def test_repair_records_missing_messages(
    tmp_path: Path, damage: Callable[[Path], None], missing_count: int, level: Durability
) -> None:
    bus = KeptBus(tmp_path, segment_bytes=1, level=level, boot="first")
    connect_version2(bus, subscribe(1, 5, durable="billing"))
    peer = connect_version2(bus, name="till")
    for number in range(6):
        peer.send(publish(1, number, b"%d" % number))
        bus.broker.clock.now += 1
        bus.sync()
    bus.crash()
    damage(tmp_path)
    content = {path: path.read_bytes() for path in tmp_path.rglob("*.log*")}
    planned = run("repair", tmp_path, "--dry-run")
    assert planned.exit_code == 1
    assert content == {path: path.read_bytes() for path in tmp_path.rglob("*.log*")}
    repaired = run("repair", tmp_path)
    assert repaired.exit_code == 0
    assert set(planned.stdout.splitlines()) <= set(repaired.stdout.splitlines())
    assert run("repair", tmp_path).stdout.startswith("nothing to repair\n")
    verified = run("verify", tmp_path).stdout
    assert f"intact: {6 - missing_count} messages in" in verified
    bus = KeptBus(tmp_path, level=level, boot="second")
    assert (bus.found.problems, bus.broker.classes[1].ring.head) == ([], 6)
    reader = connect_version2(bus, subscribe(1, 5, durable="billing"))
    assert len(reader.receive_message_ids()) == 6 - missing_count
    bus.crash()


def test_repair_keeps_the_owner_and_counts_the_gap_once(tmp_path: Path) -> None:
    bus = KeptBus(tmp_path)
    connect_version2(bus, subscribe(1, 5, durable="billing"))
    for number in range(8):
        connect_version2(bus, publish(1, 0, b"%d" % number))
        bus.sync()
    bus.crash()
    (segment,) = segments(tmp_path)
    if os.geteuid() == 0:  # The server may be another user.
        os.chown(segment.parent, 65534, 65534)
    flip_bit(segment, ends(segment)[1] + 60)
    assert run("repair", tmp_path).exit_code == 0
    owner = segment.parent.stat().st_uid
    assert [path.stat().st_uid for path in segment.parent.iterdir()] == [owner, owner]
    for expected_count in (1, 0):
        bus = KeptBus(tmp_path)
        durable = bus.broker.classes[1].named_positions["billing", ""]
        assert durable.undelivered_counts[Reason.DAMAGED] == expected_count
        bus.close()


def test_repair_needs_a_stopped_server(journal: Path) -> None:
    bus = KeptBus(journal)
    with pytest.raises(JournalInUseError, match="is used by another server"):
        run("repair", journal)
    bus.crash()


def test_repair_creates_no_journal(tmp_path: Path) -> None:
    with pytest.raises(JournalError, match="is not a journal"):
        run("repair", tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_dropped_files_are_listed_and_exported(tmp_path: Path) -> None:
    """Two files have the same sequences, and each follows a missing file."""
    for letter in b"ab":
        bus = KeptBus(tmp_path, segment_bytes=1, level=Durability.OS)
        bus.sync()  # A snapshot does not mention the following messages.
        at = bus.broker.classes[1].ring.head if 1 in bus.broker.classes else 0
        peer = connect_version2(bus, name=f"till {letter}")
        for number in range(4 - at):
            peer.send(publish(1, number, b"%c%d" % (letter, at + number)))
            bus.sync()
        bus.crash()
        (tmp_path / "classes" / "00001" / "00000000000000000001.log").unlink()
    KeptBus(tmp_path, level=Durability.OS).close()
    assert run("verify", tmp_path).exit_code == 0
    assert "4 damaged files were dropped" in run("verify", tmp_path).stdout
    listed = run("ls", tmp_path).stdout.splitlines()[-1]
    assert "00000000000000000002.log.dropped, 00000000000000000002.log.dropped-2" in listed
    lines = run("export", tmp_path, 1, "--dropped").stdout.splitlines()
    assert [json.loads(line)["payload"] for line in lines] == ["a2", "b2", "a3", "b3"]
    (line,) = run("dump", tmp_path, 1, "--dropped", "--first", 3, "--count", 1).stdout.splitlines()
    assert line.endswith("a3")


def test_directory_without_journal_is_rejected(journal: Path, tmp_path: Path) -> None:
    with pytest.raises(JournalError, match="contains no class 'invoices'"):
        run("dump", journal, "invoices")
    with pytest.raises(JournalError, match="is not a journal"):
        run("ls", journal / "classes")
