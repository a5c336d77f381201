"""Tests of the graceful shutdown."""

from __future__ import annotations

import errno
import json
import logging
import signal
import threading
from collections.abc import AsyncIterator, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio

from simplebus.core.outbox import Outbox
from simplebus.core.protocol import frames
from simplebus.server import nats_listener, shutdown
from simplebus.server.connection import Connection
from simplebus.server.journal import writer
from simplebus.server.run import RunningServer, _cancel_on_stop_signal
from simplebus.server.shutdown import drain
from simplebus.storage.append_file import AppendFile
from tests.server.task_steps import counting_steps
from tests.support.nats_peer import connect_nats_peer
from tests.support.running_server import (
    Peer,
    ack,
    class_statistics,
    connect,
    message,
    serving,
    subscribe,
    wait_until,
)


async def connect_unnamed(server: RunningServer) -> Peer:
    """Return a client of version 2 without a name."""
    peer = await connect(server)
    await peer.send(frames.encode(frames.CONNECT, content=b'{"version":2}'))
    await peer.read_frame()
    return peer


async def no_signals() -> AsyncIterator[int]:
    """Yield no signal."""
    await trio.sleep_forever()
    yield 0


async def test_announces_the_shutdown_to_version2_and_nats_clients() -> None:
    async with serving(nats_port=0) as server:
        peer = await connect_unnamed(server)
        nats = await connect_nats_peer(server, protocol=1)
        with trio.fail_after(240):
            await drain(server.server, server.nats_listener, 5, no_signals())
        reply = await peer.read_frame()
        assert reply[0] == frames.ERROR
        content = json.loads(reply[frames.HEADER_BYTES : -len(frames.DELIMITER)])
        assert (content["code"], content["count"]) == ("draining", 0)
        assert not content.get("fatal")
        assert await peer.read_frame() == b""
        assert b'"ldm":true' in await nats.read_until_closed()


async def test_announces_the_shutdown_to_few_clients_in_a_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shutdown, "CHANGED_SESSIONS_PER_TURN", 1)
    noticed_steps: list[int] = []
    queue_reply = Outbox.queue_reply

    def queue_notice(outbox: Outbox, frame: bytes) -> None:
        if b"draining" in frame:
            noticed_steps.append(steps.count)
        queue_reply(outbox, frame)

    monkeypatch.setattr(Outbox, "queue_reply", queue_notice)
    async with serving() as server:
        peers = [await connect_unnamed(server) for _ in range(5)]
        with counting_steps() as steps:
            await drain(server.server, None, 5, no_signals())
        assert [(await read_json(peer))["code"] for peer in peers] == ["draining"] * 5
    assert len(set(noticed_steps)) == 5


@pytest.mark.parametrize("is_nats", [False, True])
async def test_disconnects_few_publishers_in_a_turn(
    monkeypatch: pytest.MonkeyPatch, is_nats: bool
) -> None:
    for module in (shutdown, nats_listener):
        monkeypatch.setattr(module, "STOPPED_CONNECTIONS_PER_TURN", 1)
    disconnect_steps: list[int] = []
    disconnect = Connection.disconnect_after_input

    def disconnect_counted(connection: Connection[Any]) -> None:
        disconnect_steps.append(steps.count)
        disconnect(connection)

    monkeypatch.setattr(Connection, "disconnect_after_input", disconnect_counted)
    async with serving(nats_port=0) as server:
        for _ in range(5):
            await (connect_nats_peer(server) if is_nats else connect_unnamed(server))
        with counting_steps() as steps:
            await drain(server.server, server.nats_listener, 5, no_signals())
    assert len(set(disconnect_steps)) == len(disconnect_steps) >= 5


async def test_drain_reads_sent_messages_before_disconnecting_publishers() -> None:
    async with serving() as server:
        publishers = [await connect(server, [1]) for _ in range(3)]
        subscriber = await connect(server, [1])
        await subscriber.send(subscribe())
        await wait_until(lambda: len(class_statistics(server).subscriptions) == 1)
        for publisher in publishers:
            await publisher.send(message(b"x" * 100) * 5000)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(drain, server.server, None, 60, no_signals())
            assert len(await subscriber.read_messages(15_000)) == 15_000
            await subscriber.send(ack(0, 15_000))
        assert class_statistics(server).ring.message_count == 0


async def test_drain_ends_at_its_timeout(caplog: pytest.LogCaptureFixture) -> None:
    async with serving() as server:
        peer = await connect(server, [1])
        await peer.send(subscribe() + message(b"never acknowledged"))
        await peer.read_messages(1)
        with trio.fail_after(240):
            await drain(server.server, None, 0.2, no_signals())
        assert "drain timeout of 0.2 s exceeded: stopping" in caplog.text
        assert class_statistics(server).ring.message_count == 1


@pytest.fixture
def broken_disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Let every write of messages fail until the event is set."""
    works = threading.Event()
    append = AppendFile.append

    def append_if_possible(file: AppendFile, pieces: list[bytes], *, end_mark: int) -> None:
        if not works.is_set() and file.path.parent.parent.name == "classes":
            raise OSError(errno.EFBIG, "File too large")
        append(file, pieces, end_mark=end_mark)

    monkeypatch.setattr(AppendFile, "append", append_if_possible)
    monkeypatch.setattr(writer, "_RETRY_SECONDS", 0.01)
    yield works
    works.set()


async def test_drain_waits_for_accepted_messages_while_the_disk_refuses_writes(
    tmp_path: Path, broken_disk: threading.Event, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(data_dir=tmp_path) as server:
        publisher = await connect_version2(server)
        await publisher.send(frames.encode(frames.MESSAGE, class_id=1, content=b"accepted"))
        assert (await read_json(publisher))["code"] == "disk_failed"
        async with trio.open_nursery() as nursery:
            nursery.start_soon(drain, server.server, None, 60, no_signals())
            await wait_until(lambda: "waiting for the disk with 1 message accepted" in caplog.text)
            await publisher.send(
                frames.encode(frames.MESSAGE, class_id=1, message_id=1, content=b"refused")
            )
            assert (await read_json(publisher))["code"] == "draining"
            refused = await read_json(publisher)
            assert (refused["code"], refused["count"]) == ("disk_failed", 1)
            broken_disk.set()
            confirm = await publisher.read_frame()
            assert confirm[0] == frames.CONFIRM
    async with serving(data_dir=tmp_path) as server:
        assert class_statistics(server).ring.message_count == 1


async def test_drain_logs_what_is_lost_at_its_timeout(
    tmp_path: Path, broken_disk: threading.Event, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(data_dir=tmp_path) as server:
        publisher = await connect_version2(server)
        await publisher.send(frames.encode(frames.MESSAGE, class_id=1, content=b"accepted"))
        assert (await read_json(publisher))["code"] == "disk_failed"
        with trio.fail_after(240):
            await drain(server.server, None, 0.05, no_signals())
    assert "drain timeout of 0.05 s exceeded" in caplog.text
    assert "lost 1 message: cannot write the journal: File too large" in caplog.text


async def read_json(peer: Peer) -> dict[str, object]:
    """Return the JSON content of the next frame."""
    frame = await peer.read_frame()
    content: dict[str, object] = json.loads(frame[frames.HEADER_BYTES : -len(frames.DELIMITER)])
    return content


async def connect_version2(server: RunningServer) -> Peer:
    """Connect a named version 2 client."""
    peer = await connect(server)
    content = b'{"version":2,"name":"till","classes":[1]}'
    await peer.send(frames.encode(frames.CONNECT, content=content))
    await peer.read_frame()
    return peer


async def test_first_signal_during_a_drain_without_signal_does_not_stop(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    send, signals = trio.open_memory_channel[int](9)
    async with serving() as server, trio.open_nursery() as nursery:
        peer = await connect(server, [1])
        await peer.send(subscribe() + message(b"waits"))
        await peer.read_messages(1)
        for number in (signal.SIGHUP, signal.SIGTERM):
            send.send_nowait(number)
        draining = partial(drain, is_signaled=False)
        nursery.start_soon(draining, server.server, None, 60, signals)
        await wait_until(lambda: "SIGTERM: already draining" in caplog.text)
        assert "SIGHUP: settings not reloaded, because the server shuts down" in caplog.text
        await peer.send(ack(0, 1))
        await wait_until(lambda: class_statistics(server).ring.message_count == 0)
    assert "stopping" not in caplog.text


async def test_second_stop_signal_stops_at_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    send, signals = trio.open_memory_channel[int](9)
    async with serving() as server:
        peer = await connect(server, [1])
        await peer.send(subscribe() + message(b"never acknowledged"))
        await peer.read_messages(1)
        for number in (signal.SIGTERM, signal.SIGINT):
            send.send_nowait(number)
        with trio.fail_after(240):
            await drain(server.server, None, 1e9, signals, is_signaled=False)
    assert "SIGINT: stopping at once" in caplog.text


async def test_stop_signal_during_the_start_ends_the_server(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    send, signals = trio.open_memory_channel[int](9)
    for number in (signal.SIGHUP, signal.SIGTERM):
        send.send_nowait(number)
    send.close()
    with trio.CancelScope() as scope:
        await _cancel_on_stop_signal(signals, scope)
    assert scope.cancel_called
    assert "SIGTERM: stopping during the start" in caplog.text
