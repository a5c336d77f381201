"""Tests of a server with a data directory: recovery and failing disks."""

from __future__ import annotations

import contextlib
import errno
import os
import queue
import threading
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import trio
import trio.lowlevel

import simplebus
from simplebus.core import checkpoint
from simplebus.core import commit_log as commit_log_module
from simplebus.core.commit_log import CommitLog, WriteBatch
from simplebus.core.errors import RefusedError
from simplebus.core.limits import CHANGES_PER_WRITE_BATCH, Limits
from simplebus.core.protocol.durability import Durability
from simplebus.core.settings import ClassSettings, FullPolicy, Settings
from simplebus.core.snapshot import decode_changes
from simplebus.server.journal import writer
from simplebus.server.journal.pump import JournalPump, load
from simplebus.server.journal.writer import DIRECT_WRITE_BYTES_MAX
from simplebus.storage.append_file import AppendFile
from simplebus.storage.directory import lock_directory
from simplebus.storage.journal import Journal
from simplebus.testing.server import bus_server
from tests.behaviour.wire_peer import BrokerHarness
from tests.behaviour.wire_peer_v2 import (
    INQUIRE,
    ack,
    connect_request,
    connect_version2,
    json_request,
    publish,
    subscribe,
    unsubscribe,
)
from tests.support.running_server import class_statistics, connect, message, serving, wait_until

PATIENCE_SECONDS = 60.0
PAYLOADS = [b"%06d" % number for number in range(3000)]


def blocking_durability(url: str) -> str:
    with simplebus.connect_blocking(url) as bus:
        return bus.durability


@pytest.mark.parametrize("level", Durability)
async def test_messages_survive_a_restart(tmp_path: Path, level: Durability) -> None:
    async with serving(data_dir=tmp_path, durability=level) as server:
        peer = await connect(server, [1])
        await peer.send(message(b"a") + message(b"b"))
        await wait_until(lambda: class_statistics(server).published == 2)
        identity = server.server.broker.subscription_manager.identity
        url = f"simplebus://{server.addresses[0]}"
        async with simplebus.connect(url) as bus:
            assert bus.durability == level.name.lower()
        assert await trio.to_thread.run_sync(blocking_durability, url) == level.name.lower()
    async with serving(data_dir=tmp_path) as server:
        assert class_statistics(server).ring.message_count == 2
        assert server.server.broker.subscription_manager.identity == identity


async def test_a_full_disk_refuses_publishers_until_there_is_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    is_full = trio.Event()
    append = AppendFile.append

    def full(file: AppendFile, pieces: list[bytes], *, end_mark: int) -> None:
        if is_full.is_set():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        append(file, pieces, end_mark=end_mark)

    monkeypatch.setattr(AppendFile, "append", full)
    monkeypatch.setattr(writer, "_RETRY_SECONDS", 0.01)
    async with serving(data_dir=tmp_path) as server:
        commit_log = server.server.broker.commit_log
        assert commit_log is not None
        async with simplebus.connect(f"simplebus://{server.addresses[0]}") as bus:
            await bus.publish(b"before", class_id=1)
            is_full.set()
            await bus.publish(b"accepted", class_id=1, confirm=False)
            await wait_until(lambda: commit_log.write_error is not None)
            await wait_until(lambda: "disk_full: cannot write the journal" in caplog.text)
            await bus.publish(b"refused", class_id=1, confirm=False)
            await wait_until(lambda: class_statistics(server).dropped != {})
            is_full = trio.Event()
            await wait_until(lambda: commit_log.write_error is None)
            with pytest.raises(ExceptionGroup) as caught:
                await bus.flush()
            assert caught.group_contains(RefusedError, match=r"disk_full: .*[Nn]o space")
            await bus.publish(b"after", class_id=1)
    async with serving(data_dir=tmp_path) as server:
        async with simplebus.connect(f"simplebus://{server.addresses[0]}") as bus:
            found = [each.payload for each in await bus.fetch(1)]
        assert found == [b"before", b"accepted", b"after"]


def test_spilled_messages_are_served_after_a_restart(
    tmp_path: Path,
) -> None:
    settings = Settings(limits=Limits(class_messages=500), full_policy=FullPolicy.SPILL)
    with (
        bus_server(settings, data_dir=tmp_path) as server,
        simplebus.connect_blocking(server.address) as bus,
    ):
        with bus.subscribe(1, durable="away"):
            pass
        with bus.subscribe(1, start="new") as live:
            for at in range(0, len(PAYLOADS), 100):
                bus.publish_many(PAYLOADS[at : at + 100], class_id=1)
                bus.flush()
                assert [live.get(timeout=60).payload for _ in range(100)] == PAYLOADS[at : at + 100]
        assert server.statistics().spilled > 1000
        journal = server.ask(
            lambda up: up.server.journal_pump and up.server.journal_pump.statistics()
        )
        assert journal is not None
        assert (journal.held_bytes, journal.failure_count, journal.failure) == (0, 0, "")
        assert journal.written_bytes > len(PAYLOADS) * 19
    with (
        bus_server(settings, data_dir=tmp_path) as server,
        simplebus.connect_blocking(server.address) as bus,
        bus.subscribe(1, durable="away") as reader,
    ):
        assert server.statistics().spilled > 1000
        assert [each.payload for each in bus.fetch(1, first=7, count=3)] == PAYLOADS[7:10]
        assert [reader.get(timeout=60).payload for _ in PAYLOADS] == PAYLOADS


@pytest.mark.parametrize("policy", FullPolicy)
def test_spilling_class_refuses_last_values(tmp_path: Path, policy: FullPolicy) -> None:
    """A class that is configured without last values ignores the request without an error."""
    classes = {"b": ClassSettings(last_values=False)}
    settings = Settings(full_policy=policy, classes=classes)
    with (
        bus_server(settings, data_dir=tmp_path) as server,
        simplebus.connect_blocking(server.address) as bus,
    ):
        if policy is FullPolicy.SPILL:
            with pytest.raises(RefusedError, match="class a spills"):
                bus.keep_last_values("a")
        else:
            bus.keep_last_values("a")
        bus.keep_last_values("b")
        bus.publish(b"goes on", class_id="a")
        assert [each.payload for each in bus.fetch("a")] == [b"goes on"]


def test_late_report_of_the_thread_does_not_stop_the_journal(tmp_path: Path) -> None:
    commit_log = CommitLog(Durability.OS)
    bus = BrokerHarness(commit_log=commit_log)
    bus.skips_checks = True
    reports: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
    with contextlib.closing(lock_directory(tmp_path, new_bus="here")) as directory:
        pump = JournalPump(bus.broker, directory, lambda: None)
        load(bus.broker, directory)
        pump.start(lambda function, *arguments: reports.put(partial(function, *arguments)))
        peer = connect_version2(bus, name="till")
        pump.submit_pending()
        reports.get(timeout=PATIENCE_SECONDS)()
        peer.send(publish(1, 0, bytes(2 * DIRECT_WRITE_BYTES_MAX)))
        assert pump.submit_pending() == 1, "a long message is written by the thread"
        late_report = reports.get(timeout=PATIENCE_SECONDS)
        number = 1
        while True:  # The thread needs a moment to become idle after its report.
            peer.send(publish(1, number, b"small"))
            number += 1
            if pump.submit_pending() == 0:
                break
            reports.get(timeout=PATIENCE_SECONDS)()
        late_report()
        assert commit_log.durable_position == commit_log.log_position
        assert pump.statistics().pending_batch_count == 0
        pump.close()


def test_new_durables_are_written_in_bounded_batches_while_the_disk_is_slow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    can_sync = threading.Event()
    batches: list[WriteBatch] = []
    sync, write = Journal.sync, Journal.write

    def wait_and_sync(journal: Journal) -> None:
        assert can_sync.wait(PATIENCE_SECONDS)
        sync(journal)

    def record_and_write(journal: Journal, batch: WriteBatch) -> None:
        batches.append(batch)
        write(journal, batch)

    monkeypatch.setattr(Journal, "sync", wait_and_sync)
    monkeypatch.setattr(Journal, "write", record_and_write)
    commit_log = CommitLog(Durability.DISK)
    bus = BrokerHarness(commit_log=commit_log)
    reports: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
    with contextlib.closing(lock_directory(tmp_path, new_bus="here")) as directory:
        pump = JournalPump(bus.broker, directory, lambda: None)
        load(bus.broker, directory)
        pump.start(lambda function, *arguments: reports.put(partial(function, *arguments)))
        peer = connect_version2(bus)
        for number in range(1, 301):
            peer.send(subscribe(1, number, durable=f"d{number}"))
            pump.submit_pending()
        for number in range(1, 101):
            peer.send(unsubscribe(number, forget=True))
            pump.submit_pending()
        assert peer.receive_replies() == []
        can_sync.set()
        kinds: Counter[str] = Counter()
        while commit_log.durable_position < commit_log.log_position:
            reports.get(timeout=PATIENCE_SECONDS)()
            pump.submit_pending()
            replies = peer.receive_replies()
            assert len(replies) <= 2 * CHANGES_PER_WRITE_BATCH
            kinds.update(reply.kind for reply in replies)
        assert kinds == {"subscribe": 300, "unsubscribe": 100}
        pump.close()
    changes = [decode_changes(each.changes) for each in batches if each.changes]
    assert sum(len(change.positions) for change in changes) >= 250
    assert max(len(change.positions) for change in changes) <= CHANGES_PER_WRITE_BATCH
    recovered = BrokerHarness(commit_log=CommitLog(Durability.DISK))
    with contextlib.closing(lock_directory(tmp_path, new_bus="here")) as directory:
        load(recovered.broker, directory)
    durables = {position.durable for position in recovered.broker.classes[1].positions}
    assert durables == {f"d{number}" for number in range(101, 301)}


def test_failure_between_the_turns_of_a_report_keeps_publishers_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_syncing, can_sync, is_broken = (threading.Event() for _ in range(3))
    sync = Journal.sync

    def wait_and_sync(journal: Journal) -> None:
        is_syncing.set()
        assert can_sync.wait(PATIENCE_SECONDS)
        if is_broken.is_set():
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        sync(journal)

    monkeypatch.setattr(Journal, "sync", wait_and_sync)
    monkeypatch.setattr(writer, "_RETRY_SECONDS", 0.01)
    commit_log = CommitLog(Durability.DISK)
    bus = BrokerHarness(commit_log=commit_log)
    bus.skips_checks = True
    reports: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
    with contextlib.closing(lock_directory(tmp_path, new_bus="here")) as directory:
        pump = JournalPump(bus.broker, directory, lambda: None)
        load(bus.broker, directory)
        pump.start(lambda function, *arguments: reports.put(partial(function, *arguments)))
        peer = connect_version2(bus)
        pump.submit_pending()
        assert is_syncing.wait(PATIENCE_SECONDS)
        for number in range(1, 6 * CHANGES_PER_WRITE_BATCH):
            peer.send(subscribe(1, number, durable=f"d{number}"))
            pump.submit_pending()
        can_sync.set()
        for _ in range(2):  # The report of the first batch, and that of all others.
            reports.get(timeout=PATIENCE_SECONDS)()
        next_turn = reports.get_nowait()
        is_broken.set()
        peer.send(publish(1, 0, b"not written"))
        assert pump.submit_pending() == 1
        failure_report = reports.get(timeout=PATIENCE_SECONDS)
        failure_report()
        assert commit_log.write_error is not None
        durable_before = commit_log.durable_position
        next_turn()
        assert commit_log.durable_position > durable_before
        assert commit_log.write_error is not None, "publishers would be accepted"
        is_broken.clear()
        while commit_log.durable_position < commit_log.log_position:
            reports.get(timeout=PATIENCE_SECONDS)()
        assert commit_log.write_error is None
        pump.close()


@pytest.mark.parametrize("level", [Durability.OS, Durability.DISK])
async def test_requested_progress_is_written_in_several_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, level: Durability
) -> None:
    for module in (checkpoint, commit_log_module):
        monkeypatch.setattr(module, "PROGRESS_POSITIONS_PER_TURN", 2)
    async with serving(data_dir=tmp_path, durability=level) as server:
        peer = await connect(server)
        await peer.send(connect_request(1))
        numbers = range(1, 10)
        await peer.send(b"".join(subscribe(1, n, durable=f"d{n}") for n in numbers))
        await peer.send(publish(1, 0, b"x"))
        received = [await peer.read_frame() for _ in range(3 * len(numbers) + 2)]
        assert all(received)
        await peer.send(b"".join(ack(n, 0, 1) for n in numbers))
        await peer.send(json_request(INQUIRE, 0, 5, about="acks"))
        while (await peer.read_frame())[0] != INQUIRE:
            pass
        assert server.server.journal_pump is not None
        assert server.server.journal_pump.statistics().written_batch_count >= 5
