"""A full or failing disk: publishers are warned, and nothing accepted is lost."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from simplebus.core import commit_log
from simplebus.core.errors import Reason
from simplebus.core.protocol.durability import Durability
from simplebus.storage.append_file import AppendFile
from tests.behaviour.wire_peer import connect, numbered
from tests.behaviour.wire_peer import publish as publish_frame
from tests.behaviour.wire_peer_v2 import (
    FETCH,
    ack,
    connect_version2,
    json_request,
    publish,
    subscribe,
)
from tests.storage.journaled_broker import KeptBus
from tests.storage.test_journal import confirms, next_number, payloads


class Disk:
    """Disk that fails at given calls."""

    def __init__(self) -> None:
        self.calls = 0
        self.fails_at: set[int] = set()
        self.writes_half = False
        """True if a failing write writes half of its data."""

    def next_call_succeeds(self) -> bool:
        self.calls += 1
        return self.calls not in self.fails_at


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    disk = Disk()
    append, sync = AppendFile.append, AppendFile.sync

    def failing_append(file: AppendFile, data: list[bytes], *, end_mark: int) -> None:
        if not disk.next_call_succeeds():
            if disk.writes_half:
                content = b"".join(data)
                append(file, [content[: len(content) // 2]], end_mark=file.end_mark)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(file.path))
        append(file, data, end_mark=end_mark)

    def failing_sync(file: AppendFile) -> None:
        if not disk.next_call_succeeds():
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        sync(file)

    monkeypatch.setattr(AppendFile, "append", failing_append)
    monkeypatch.setattr(AppendFile, "sync", failing_sync)
    return disk


def write_until_it_succeeds(bus: KeptBus) -> int:
    """Write and sync the next batch, retrying as the writer does. Return the number of failures."""
    failed = 0
    write_batch = bus.keeper.build_write_batch()
    while True:
        try:
            if failed:
                bus.journal.discard_unsynced()
            assert write_batch is not None
            bus.journal.write(write_batch)
            bus.journal.sync()
        except OSError:
            failed += 1
            continue
        bus.broker.mark_durable(bus.commit_log.last_batch_number)
        return failed


@pytest.mark.parametrize(("half", "is_rolling"), [(False, True), (True, False)])
def test_failures_never_lose_or_duplicate_messages(
    tmp_path: Path, disk: Disk, half: bool, is_rolling: bool
) -> None:
    disk.writes_half = half
    for failing_call in range(1, 13):
        disk.fails_at.clear()
        path = tmp_path / str(failing_call)
        bus = KeptBus(path, segment_bytes=1 if is_rolling else 1 << 20)
        peer = connect_version2(
            bus, publish(1, 0, b"0"), publish(2, 1, b"0"), classes=(1, 2), name="till"
        )
        write_until_it_succeeds(bus)
        connect_version2(bus, subscribe(1, 5, durable="billing", start="new"))
        disk.calls, disk.fails_at = 0, {failing_call, failing_call + 1}
        number = 2
        for content in (b"1", b"2"):  # Two entries of each class, at different times.
            for class_id in (1, 2):
                peer.send(publish(class_id, number, content))
                number += 1
            bus.broker.clock.now += 1
        bus.keeper.is_snapshot_due = failing_call % 2 == 0
        write_until_it_succeeds(bus)
        disk.fails_at.clear()
        bus.crash()
        bus = KeptBus(path)
        assert bus.found.problems == []
        assert payloads(bus, 1) == payloads(bus, 2) == [b"0", b"1", b"2"], failing_call
        assert next_number(bus) == number
        assert len(bus.broker.classes[1].named_positions) == 1
        bus.crash()


def test_write_error_warns_publishers_and_accepts_acks(tmp_path: Path) -> None:
    bus = KeptBus(tmp_path)
    reader = connect_version2(bus, subscribe(1, 5))
    peer = connect_version2(bus, publish(1, 0, b"a"), name="till")
    bus.sync()
    peer.receive_replies()
    bus.commit_log.write_error = (Reason.DISK_FULL, "the journal cannot be written: no space")
    peer.send(publish(1, 1, b"b"), publish(1, 2, b"c", b"d"))
    replies = peer.receive_replies()
    errors = [reply.content for reply in replies if reply.kind == "error"]
    assert {error["code"] for error in errors} == {"disk_full"}
    assert sum(error["count"] for error in errors) == 3
    assert confirms(replies)[-1] == (4, 2)
    assert bus.broker.classes[1].dropped_counts == {Reason.DISK_FULL: 3}
    assert reader.receive_message_ids() == [0]
    reader.send(ack(5, 0, 1))
    assert payloads(bus) == []
    bus.commit_log.write_error = None
    peer.send(publish(1, 4, b"e"))
    bus.sync()
    assert confirms(peer.receive_replies()) == [(5, 2)]
    bus.crash()
    bus = KeptBus(tmp_path)
    assert next_number(bus) == 5


def test_accepted_messages_are_confirmed_after_recovery_from_error(tmp_path: Path) -> None:
    bus = KeptBus(tmp_path)
    peer = connect_version2(bus, publish(1, 0, *numbered(3)), name="till")
    bus.commit_log.write_error = (Reason.DISK_FAILED, "the journal cannot be written: an error")
    peer.send(publish(1, 3, b"refused"))
    assert confirms(peer.receive_replies()) == []
    bus.commit_log.write_error = None
    bus.sync()
    assert confirms(peer.receive_replies()) == [(4, 2)]


def test_repeated_message_is_confirmed_only_when_written(tmp_path: Path) -> None:
    bus = KeptBus(tmp_path)
    sent = publish(1, 0, *numbered(3))
    connect_version2(bus, sent, name="till", instance="one")
    bus.commit_log.write_error = (Reason.DISK_FAILED, "the journal cannot be written: an error")
    peer = connect_version2(bus, sent, publish(1, 3, b"refused"), name="till", instance="one")
    assert confirms(peer.receive_replies()) == []
    bus.commit_log.write_error = None
    bus.sync()
    assert confirms(peer.receive_replies()) == [(4, 2)]


def test_version_1_reads_pause_during_write_error(tmp_path: Path) -> None:
    bus = KeptBus(tmp_path)
    plain = bus.peer(connect(1))
    bus.commit_log.write_error = (Reason.DISK_FULL, "the journal cannot be written: no space")
    plain.send(publish_frame(1, b"a"))
    assert plain.session.is_reading_paused
    assert payloads(bus) == [b"a"]
    assert bus.broker.end_turn().resume == []
    bus.sync()
    assert bus.broker.end_turn().resume == [plain.session]
    assert not plain.session.is_reading_paused


def test_publisher_faster_than_disk_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commit_log, "COMMIT_LOG_BYTES_MAX", 1000)
    bus = KeptBus(tmp_path, level=Durability.MEMORY)
    plain = bus.peer(connect(1))
    publisher = connect_version2(bus, publish(1, 0, b"a"))
    assert confirms(publisher.receive_replies()) == [(1, 0)]
    plain.send(publish_frame(1, bytes(900)))
    assert not plain.session.is_reading_paused
    plain.send(publish_frame(1, bytes(900)))
    assert plain.session.is_reading_paused
    publisher.send(publish(1, 1, b"b"))
    assert confirms(publisher.receive_replies()) == []
    bus.sync()
    assert not plain.session.is_reading_paused
    assert confirms(publisher.receive_replies()) == [(2, 0)]


def test_fetch_excludes_undurable_messages(tmp_path: Path) -> None:
    bus = KeptBus(tmp_path)
    peer = connect_version2(bus, publish(1, 0, b"a"))
    bus.sync()
    peer.receive_replies()
    for number in (1, 2):
        peer.send(publish(1, number, b"b"), json_request(FETCH, 1, 3))
        bus.write()
        messages, replies = peer.receive_all()
        assert [message.content for message in messages] == [b"a"]
        assert (replies[-1].content["next"], replies[-1].content["head"]) == (1, 1)
    bus.sync()
    peer.send(json_request(FETCH, 1, 3))
    assert len(peer.receive_deliveries()) == 3


def test_waiting_publisher_is_warned_of_delay(tmp_path: Path) -> None:
    bus = KeptBus(tmp_path)
    waits, idle = (
        connect_version2(bus, publish(1, 0, b"accepted"), name="till"),
        connect_version2(bus, name="other"),
    )
    bus.broker.journal_failed(Reason.DISK_FULL, "no space")
    bus.broker.journal_failed(Reason.DISK_FULL, "no space")
    (warning,) = waits.receive_replies()
    assert (warning.kind, warning.class_id, warning.message_id, warning.last_field) == (
        "error",
        0,
        0,
        0,
    )
    assert (warning.content["code"], warning.content["count"]) == ("disk_full", 0)
    assert "confirmed when they are written" in warning.content["message"]
    assert idle.receive_replies() == []
    bus.sync()
    assert confirms(waits.receive_replies()) == [(1, 2)]
