"""Backups of a journal in use are consistent at any time, even if they were interrupted."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from random import Random
from typing import BinaryIO

import pytest

from simplebus.storage import backup
from simplebus.storage.backup import CopyResult, back_up, restore
from simplebus.storage.directory import lock_directory
from simplebus.storage.errors import JournalError, JournalInUseError
from simplebus.storage.inspection import JournalInspection
from tests.behaviour.wire_peer import numbered
from tests.behaviour.wire_peer_v2 import Version2Peer, ack, connect_version2, publish, subscribe
from tests.storage.journaled_broker import KeptBus

SEGMENT_BYTES = 400
WORK_STEPS = 40
"""Steps during one backup. A backup repeats its last part until no file was removed."""


class BusyBus:
    """Journaled bus whose durable repeatedly acknowledges all messages up to a sequence."""

    def __init__(self, path: Path) -> None:
        self.bus = KeptBus(path, segment_bytes=SEGMENT_BYTES)
        self.reader = connect_version2(self.bus, subscribe(1, 5, durable="billing"))
        self.publisher = connect_version2(self.bus, name="till")
        self.published_count = 0
        self.acked_count = 0
        """Messages below this sequence are acknowledged."""

    def publish(self, count: int = 5) -> None:
        """Publish messages and sync them, so that they are confirmed."""
        payloads = numbered(count, start=self.published_count)
        self.publisher.send(publish(1, self.published_count, *payloads))
        self.published_count += count
        self.bus.sync()

    def ack_some(self, count: int = 4) -> None:
        """Acknowledge messages, and remove the segments that are no longer needed."""
        self.reader.receive_message_ids()
        last = min(self.acked_count + count, self.published_count)
        if last > self.acked_count:
            self.reader.send(ack(5, self.acked_count, last))
            self.acked_count = last
        self.bus.keeper.is_snapshot_due = True
        self.bus.sync()
        self.bus.remove()


@pytest.fixture
def busy(tmp_path: Path) -> Iterator[BusyBus]:
    busy = BusyBus(tmp_path / "journal")
    yield busy
    busy.bus.crash()


def recovered_messages(path: Path, folder: Path) -> list[bytes]:
    """Return the messages that "billing" receives after a restore of the backup."""
    restore(path, folder)
    bus = KeptBus(folder, segment_bytes=SEGMENT_BYTES)
    assert bus.found.problems == []
    reader: Version2Peer = connect_version2(bus, subscribe(1, 5, durable="billing"))
    payloads = [delivery.content for delivery in reader.receive_deliveries()]
    bus.crash()
    return payloads


def test_backup_has_messages_and_positions(busy: BusyBus, tmp_path: Path) -> None:
    busy.publish(20)
    busy.ack_some(8)
    result = back_up(busy.bus.directory.path, tmp_path / "copy")
    assert (result.bus_id, result.class_count) == ("here", 1)
    busy.publish(5)
    assert recovered_messages(tmp_path / "copy", tmp_path / "new") == numbered(12, start=8)


def test_unchanged_files_are_not_copied_again(busy: BusyBus, tmp_path: Path) -> None:
    source, target = busy.bus.directory.path, tmp_path / "copy"
    for _ in range(10):
        busy.publish()
    for path in source.rglob("*.log"):
        os.utime(path, (1e9, 1e9))
    assert back_up(source, target).copied_count == len([*source.rglob("*.log")]) > 5
    assert back_up(source, target).copied_count == 0
    busy.publish(1)
    changed = [path for path in source.rglob("*.log") if path.stat().st_mtime != 1e9]
    assert back_up(source, target).copied_count >= len(changed) > 0
    busy.ack_some(40)
    back_up(source, target)
    copied, unchanged = (
        sorted(each.name for each in (path / "classes").rglob("*.log")) for path in (target, source)
    )
    assert copied == unchanged


@pytest.mark.parametrize("seed", range(8))
def test_backup_under_load_fits_together(
    busy: BusyBus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    random, source, target = Random(seed), busy.bus.directory.path, tmp_path / "copy"
    busy.publish(random.randrange(10, 60))
    busy.ack_some(random.randrange(20))
    for number in range(3):
        confirmed, steps = busy.published_count, iter(range(WORK_STEPS))
        with monkeypatch.context() as patch:
            work_between_copies(patch, lambda steps=steps: work(busy, random, steps))  # type: ignore[misc]
            back_up(source, target)
        received = recovered_messages(target, tmp_path / f"new {number}")
        expected = numbered(confirmed, start=0)[busy.acked_count :]
        assert set(expected) <= set(received)
        numbers = [int(payload.strip(b".")) for payload in received]
        assert numbers == sorted(numbers)


def work(busy: BusyBus, random: Random, steps: Iterator[int]) -> None:
    """Change the journal as a server may do while a file is copied, until no steps are left."""
    if next(steps, None) is None:
        return
    if random.random() < 0.5:
        busy.publish(random.randrange(1, 12))
    if random.random() < 0.4:
        busy.ack_some(random.randrange(1, 12))


def work_between_copies(monkeypatch: pytest.MonkeyPatch, action: Callable[[], None]) -> None:
    """Call `action` before each copy of a file."""
    copy_file = backup._copy_file

    def work_and_copy(source: Path, target: Path) -> None:
        action()
        copy_file(source, target)

    monkeypatch.setattr(backup, "_copy_file", work_and_copy)


class InterruptionError(Exception):
    """End of the process that makes a backup."""


@pytest.mark.parametrize("copy_count", range(8))
def test_interrupted_backup_can_be_restored(
    busy: BusyBus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, copy_count: int
) -> None:
    source, target = busy.bus.directory.path, tmp_path / "copy"
    busy.publish(30)
    back_up(source, target)
    busy.publish(30)
    copies = iter(range(copy_count))

    def interrupt() -> None:
        if next(copies, None) is None:
            raise InterruptionError

    work_between_copies(monkeypatch, interrupt)
    with contextlib.suppress(InterruptionError):  # Fewer files may have changed.
        back_up(source, target)
    monkeypatch.undo()
    received = recovered_messages(target, tmp_path / "new")
    assert set(numbered(30, start=0)) <= set(received)


def test_half_written_record_is_cut(busy: BusyBus, tmp_path: Path) -> None:
    source = busy.bus.directory.path
    busy.publish(3)
    busy.publish(1)
    last = max((source / "classes").rglob("*.log"))
    written = last.read_bytes().rstrip(b"\0")
    last.write_bytes(written[:-3] + bytes(3))
    assert back_up(source, tmp_path / "copy").message_count == 3


def test_file_that_was_copied_during_a_write_is_copied_again(
    busy: BusyBus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first copy lacks a block, which the server wrote when the next one was copied."""
    busy.publish(20)
    copies = count()

    def copy_late(original: BinaryIO, copy: BinaryIO, length: int) -> None:
        data = original.read()
        is_first_segment = next(copies) == 0
        copy.write(bytes(80) + data[80:] if is_first_segment else data)

    monkeypatch.setattr(backup.shutil, "copyfileobj", copy_late)
    back_up(busy.bus.directory.path, tmp_path / "copy")
    assert recovered_messages(tmp_path / "copy", tmp_path / "new") == numbered(20)


def test_damaged_journal_is_reported(busy: BusyBus, tmp_path: Path) -> None:
    source = busy.bus.directory.path
    busy.publish(50)
    busy.publish(50)
    first = min((source / "classes").rglob("*.log"))
    first.write_bytes(first.read_bytes()[:60] + b"x" + first.read_bytes()[61:])
    with pytest.raises(JournalError, match=r"copy is damaged: .*missing messages 0-49"):
        back_up(source, tmp_path / "copy")
    with pytest.raises(JournalError, match="is damaged"):
        restore(tmp_path / "copy", tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_wrong_directories_are_refused_and_not_changed(busy: BusyBus, tmp_path: Path) -> None:
    source = busy.bus.directory.path
    busy.publish()
    lock_directory(tmp_path / "other", new_bus="there").close()
    full = tmp_path / "full"
    full.mkdir()
    (full / "note").write_text("x")
    with pytest.raises(JournalError, match="is a backup of the bus there"):
        back_up(source, tmp_path / "other")
    with pytest.raises(JournalError, match="contains other files"):
        back_up(source, full)
    with pytest.raises(JournalError, match="is not a journal"):
        back_up(full, tmp_path / "copy")
    back_up(source, tmp_path / "copy")
    with pytest.raises(JournalError, match="is not empty"):
        restore(tmp_path / "copy", full)
    with pytest.raises(JournalInUseError):
        back_up(tmp_path / "copy", source)
    assert [path.name for path in full.iterdir()] == ["note"]


def test_restored_copy_is_independent(busy: BusyBus, tmp_path: Path) -> None:
    busy.publish(20)
    back_up(busy.bus.directory.path, tmp_path / "copy")
    result = restore(tmp_path / "copy", tmp_path / "new")
    assert isinstance(result, CopyResult)
    assert result.message_count == 20
    shutil.rmtree(tmp_path / "copy")
    inspection = JournalInspection(tmp_path / "new")
    assert [summary.head for summary in inspection.summaries(verify=True)] == [20]
    assert inspection.problems == []
