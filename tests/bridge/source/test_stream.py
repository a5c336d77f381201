"""Streams with unusual settings, and streams that are deleted or drop messages."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trio
import trio.lowlevel

import simplebus
from simplebus.bridge.copier import Copier
from simplebus.bridge.dead_letters import dead_letter_opener
from simplebus.bridge.nats_connection import BridgeNatsConnection
from simplebus.bridge.runner import create_copiers
from simplebus.bridge.settings import BridgeSettings, CopiedClass
from simplebus.bridge.source.pull_consumer import PullConsumer
from simplebus.bridge.source.stream import StreamSource
from simplebus.core.errors import BusConnectionError
from simplebus.nats.client.client import NatsClientCore
from simplebus.nats.client.events import ReceivedMessages
from simplebus.nats.client.parser import ClientParser
from tests.bridge.memory_buses import numbered_payloads, payloads
from tests.bridge.nats_copiers import (
    PATIENCE_SECONDS,
    BusServer,
    NatsServer,
    connect,
    copying,
    create_stream,
    wait_until,
)
from tests.jetstream.nats_servers import nats_server


def create_stream_copier(nats: NatsServer, server: BusServer, name: str, **more: Any) -> Copier:
    copied = CopiedClass(name, stream=name, **more)
    return create_copiers([BridgeSettings(name, nats.url, server.address, (copied,))])[0]


def create_source(connection: BridgeNatsConnection, name: str, **settings_: Any) -> StreamSource:
    options: dict[str, Any] = {
        "durable": f"a lane of {name}",
        "target_id": "target",
        "subjects": (),
        "start": "waiting",
        "heartbeat": 10.0,
        "open_dead_letters": dead_letter_opener(None, 7, "l", heartbeat=9, auth=None),  # type: ignore[arg-type]
    }
    return StreamSource(connection, name, **(options | settings_))


async def publish_numbered(
    connection: BridgeNatsConnection, subject: str, first: int, last: int
) -> None:
    """Publish numbered messages, and wait until they are stored."""
    for number in range(first, last):
        headers, ack = await connection.nats.request(subject, b"%d" % number)
        assert b'"seq"' in ack, (headers, ack)


@asynccontextmanager
async def two_connections(
    nats: NatsServer,
) -> AsyncIterator[tuple[BridgeNatsConnection, BridgeNatsConnection]]:
    """Yield a connection for the test, and one for a source."""
    with trio.fail_after(PATIENCE_SECONDS):
        async with connect(nats) as connection, connect(nats) as test_connection:
            yield connection, test_connection


async def count_read(source: StreamSource, position: int, end: int) -> int:
    """Read messages up to sequence `end`. Returns their number."""
    count = 0
    while position < end:
        batch = await source.read(position)
        await trio.lowlevel.checkpoint()  # Otherwise nothing would be received after an empty read.
        count += sum(run.count for run in batch.runs)
        position = batch.next_sequence
    return count


# Asking ------------------------------------------------------------------------------------------


async def test_requested_bytes_stay_below_server_buffer(
    nats: NatsServer,
) -> None:
    """Otherwise the server would close the connection, and the copier would start again forever."""
    count, size = 40, 1_000_000
    async with two_connections(nats) as (connection, test_connection):
        await create_stream(connection, "LONG", "long")
        for _ in range(count):
            connection.core.publish("long", bytes(size))
            connection.nats.flush()
            await connection.nats.wait_for_output_space()
        await connection.round_trip()
        source = create_source(test_connection, "LONG")
        await source.read(await source.open())  # Nothing is read from now on.
        info = await source._info(source._consumer)
        while info["num_waiting"] and info["num_pending"]:
            info = await source._info(source._consumer)
        assert info["delivered"]["stream_seq"] * size < 16 * 1024 * 1024
        assert await count_read(source, source._next_unread, count + 1) > 0


async def test_receives_message_longer_than_requested_bytes(
    nats: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("simplebus.bridge.source.pull_consumer.PULL_BYTES", 1000)
    async with two_connections(nats) as (connection, test_connection):
        await create_stream(connection, "LONGER", "longer")
        for size in (300, 400, 20_000, 5, 900, 30_000, 10):
            connection.core.publish("longer", bytes(size))
        await connection.round_trip()
        source = create_source(test_connection, "LONGER")
        assert await count_read(source, await source.open(), 8) == 7


async def test_small_batch_limit_sends_more_requests(server: BusServer, tmp_path: Path) -> None:
    limits = "limits { max_request_batch: 7 }"
    more = f'jetstream {{ store_dir: "{tmp_path}/limited", {limits} }}'
    with nats_server(tmp_path, more) as limited:
        async with connect(limited) as connection, simplebus.connect(server.address) as bus:
            await create_stream(connection, "LITTLE", "little")
            await publish_numbered(connection, "little", 0, 300)
            copier = create_stream_copier(limited, server, "LITTLE")
            async with copying(copier):
                assert await payloads(bus, "LITTLE", 300) == numbered_payloads(0, 300)
            assert copier.statistics().losses == 0


async def test_rereads_with_short_inactive_threshold(
    nats: NatsServer,
) -> None:
    limits = {"consumer_limits": {"inactive_threshold": 30 * 10**9}}
    async with two_connections(nats) as (connection, test_connection):
        await create_stream(connection, "SHORT", "short", retention="interest", **limits)
        source = create_source(test_connection, "SHORT")
        position = await source.open()
        await publish_numbered(connection, "short", 0, 20)
        assert await count_read(source, position, 21) == 20
        assert await count_read(source, position, 21) == 20


# Going on ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("was_there", [False, True])
async def test_resumes_after_kill_while_consumer_is_recreated(
    was_there: bool, nats: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stateless server as target knows no position, and `start` is "new"."""

    async def lose_reply(source: StreamSource, *_: Any, **more: Any) -> Any:
        raise BusConnectionError("lost")

    name = f"BETWEEN-{was_there}"
    async with two_connections(nats) as (connection, test_connection):
        await create_stream(connection, name, name)
        await publish_numbered(connection, name, 0, 5)
        source = create_source(test_connection, name, start="new")
        assert await source.open() == 6
        if was_there:
            await publish_numbered(connection, name, 5, 15)
            assert await count_read(source, 6, 16) == 10
            await source.commit_position(11, now=True)
        await publish_numbered(connection, name, 15, 20)
        source, position = create_source(test_connection, name, start="new"), 11 if was_there else 6
        assert await source.open() == position
        with monkeypatch.context() as patch:
            patch.setattr(StreamSource, "_create", lose_reply)
            with pytest.raises(BusConnectionError, match="lost"):
                await source.read(position)
        assert await source._find_consumer(source._consumer) is None
        for _ in range(2):
            source = create_source(test_connection, name, start="new")
            assert await source.open() == position
        assert not source.is_new
        assert await count_read(source, position, source.head) == source.head - position
        names = (await connection.nats.api_request(f"CONSUMER.NAMES.{name}"))["consumers"]
        assert names == [source._consumer]


async def test_continues_without_bookmark_if_one_consumer_allowed(
    nats: NatsServer,
) -> None:
    async with two_connections(nats) as (connection, test_connection):
        await create_stream(connection, "LONE", "lone", max_consumers=1)
        await publish_numbered(connection, "lone", 0, 10)
        for _ in range(3):
            source = create_source(test_connection, "LONE")
            assert await count_read(source, await source.open(), 11) == 10


async def test_reads_recreated_stream_from_first_message(
    nats: NatsServer,
) -> None:
    """Sequences of the new stream belong to other messages, so none of them counts as copied."""
    async with two_connections(nats) as (connection, test_connection):
        await create_stream(connection, "REBORN", "reborn")
        await publish_numbered(connection, "reborn", 0, 10)
        source = create_source(test_connection, "REBORN")
        await source.open()
        await connection.nats.api_request("STREAM.DELETE.REBORN")
        await create_stream(connection, "REBORN", "reborn")
        await publish_numbered(connection, "reborn", 0, 5)
        for read_call in source.refresh_stream_info(), source.read(8):
            with pytest.raises(BusConnectionError, match="created again"):
                await read_call
        second_source = create_source(test_connection, "REBORN")
        position = await second_source.open()
        assert second_source.storage_id != source.storage_id
        assert await count_read(second_source, position, second_source.head) == 5 - (position - 1)


@pytest.mark.parametrize("kind", ["workqueue", "interest", "limits"])
async def test_acks_redelivery_after_lost_ack(
    kind: str, nats: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Acks are lost when the leader of the consumer fails. The copier continues meanwhile."""
    config, name = StreamSource._config, f"UNHEARD-{kind}"

    def shorten_ack_wait(source: StreamSource, *of: Any) -> dict[str, Any]:
        return config(source, *of) | {"ack_wait": 10**8}

    def lose_reply(source: StreamSource, *of: Any) -> bytes:
        return b""

    monkeypatch.setattr(StreamSource, "_config", shorten_ack_wait)
    async with two_connections(nats) as (connection, test_connection):
        await create_stream(connection, name, name, retention=kind)
        source = create_source(test_connection, name)
        position = await source.open()
        await publish_numbered(connection, name, 0, 20)
        await source.commit_position(position, now=True)
        assert await count_read(source, position, 21) == 20
        with monkeypatch.context() as patch:
            patch.setattr(StreamSource, "_encode_acks", lose_reply)
            await source.commit_position(21, now=True)
            info = await source._info(source._consumer)  # Acks of redeliveries are lost, too.
            assert info["num_ack_pending"] == 20
        while (await source._info(source._consumer))["num_ack_pending"]:
            source._check_alive()
            source._request_more()
        await publish_numbered(connection, name, 20, 30)
        assert await count_read(source, 21, 31) == 10


def test_redelivery_mixed_with_first_delivery_is_read_once() -> None:
    """This happens if a bridge was suspended for longer than the ack wait of its consumer."""
    nats: Any = SimpleNamespace(flush=lambda: None)
    connection: Any = SimpleNamespace(core=NatsClientCore(inbox="_INBOX.me"), nats=nats)
    source = create_source(connection, "STILL")
    source._pull_consumer = pull_consumer = PullConsumer(
        connection, "STILL", "c", delivered_count=0, pending=9, heartbeat_seconds=1.0
    )
    source._cursor = source._read_from = source._consumer_start = 1
    log = ""
    for count, sequence in enumerate([1, 2, 3, 1, 2, 4, 3, 5], 1):
        log += f"MSG s {pull_consumer._sid} $JS.ACK.STILL.c.1.{sequence}.{count}.0.0 0\r\n\r\n"
    (messages,) = ClientParser().receive(log.encode())
    assert isinstance(messages, ReceivedMessages)
    source._on_messages(messages)
    ((_, sequences),) = source._queue
    assert sequences.tolist() == [1, 2, 3, 4, 5]
    assert (source._cursor, source._missed) == (6, 0)


# Missing -----------------------------------------------------------------------------------------


async def test_filtered_copier_counts_drops_during_absence(
    nats: NatsServer,
) -> None:
    async with two_connections(nats) as (connection, test_connection):
        await create_stream(connection, "DROPS", "drops.>", max_msgs=10)
        await publish_numbered(connection, "drops.a", 0, 5)
        source = create_source(test_connection, "DROPS", subjects=["drops.a"])
        assert await count_read(source, await source.open(), 6) == 5
        source._close_pull_consumer()
        await source.commit_position(6, now=True)
        await publish_numbered(connection, "drops.a", 5, 30)
        source = create_source(test_connection, "DROPS", subjects=["drops.a"])
        batch = await source.read(await source.open())
        assert (batch.first_sequence, batch.missed_count) == (6, 15)


async def test_filtered_mirror_counts_nothing_as_missed(nats: NatsServer) -> None:
    async with two_connections(nats) as (connection, test_connection):
        await create_stream(connection, "ORIGIN", "origin.>")
        mirror = {"name": "ORIGIN", "filter_subject": "origin.a"}
        await connection.nats.api_request("STREAM.CREATE.PART", {"name": "PART", "mirror": mirror})
        for number in range(10):
            await publish_numbered(connection, "origin.a", number, number + 1)
            await publish_numbered(connection, "origin.b", number, number + 1)
        source = create_source(test_connection, "PART", subjects=())
        while await source.open() and source.head < 20:
            await connection.round_trip()
        count, missed, position = 0, 0, 1
        while position < 20:
            batch = await source.read(position)
            count += sum(run.count for run in batch.runs)
            missed, position = missed + batch.missed_count, batch.next_sequence
        assert (count, missed) == (10, 0)


async def test_counts_removed_stream_messages_as_missed(
    server: BusServer, nats: NatsServer
) -> None:
    async with connect(nats) as connection, simplebus.connect(server.address) as bus:
        await create_stream(connection, "HOLES", "holes")
        await publish_numbered(connection, "holes", 0, 10)
        for sequence in 1, 4, 5:
            await connection.nats.api_request("STREAM.MSG.DELETE.HOLES", {"seq": sequence})
        copier = create_stream_copier(nats, server, "HOLES")
        async with copying(copier):
            assert len(await payloads(bus, "HOLES", 7)) == 7
            await wait_until(lambda: copier.statistics().position == 11)
        assert (
            copier.statistics().missed == 2
        )  # The first one was deleted before the copier started.
