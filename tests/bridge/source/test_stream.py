"""Streams that are set up in odd ways, or that somebody else deletes or lets drop messages."""

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
from tests.bridge.memory_buses import numbered, payloads
from tests.bridge.nats_copiers import (
    PATIENCE_SECONDS,
    BusServer,
    NatsServer,
    connect,
    copying,
    stream,
    until,
)
from tests.jetstream.nats_servers import nats_server


def from_stream(nats: NatsServer, server: BusServer, name: str, **more: Any) -> Copier:
    copied = CopiedClass(name, stream=name, **more)
    return create_copiers([BridgeSettings(name, nats.url, server.address, (copied,))])[0]


def near_end(connection: BridgeNatsConnection, name: str, **more: Any) -> StreamSource:
    options: dict[str, Any] = {
        "durable": f"a lane of {name}",
        "target_id": "far",
        "subjects": (),
        "start": "waiting",
        "heartbeat": 10.0,
        "open_dead_letters": dead_letter_opener(None, 7, "l", heartbeat=9, auth=None),  # type: ignore[arg-type]
    }
    return StreamSource(connection, name, **(options | more))


async def say(connection: BridgeNatsConnection, subject: str, first: int, last: int) -> None:
    """Returns when they are stored."""
    for number in range(first, last):
        headers, ack = await connection.nats.request(subject, b"%d" % number)
        assert b'"seq"' in ack, (headers, ack)


@asynccontextmanager
async def both(
    nats: NatsServer,
) -> AsyncIterator[tuple[BridgeNatsConnection, BridgeNatsConnection]]:
    """A connection of the test's own, and one for a near end."""
    with trio.fail_after(PATIENCE_SECONDS):
        async with connect(nats) as connection, connect(nats) as own:
            yield connection, own


async def found(near: StreamSource, at: int, end: int) -> int:
    """Have it find messages up to one. Returns how many."""
    count = 0
    while at < end:
        some = await near.read(at)
        await trio.lowlevel.checkpoint()  # Else nothing would come where nothing was found.
        count += sum(piece.count for piece in some.runs)
        at = some.next_sequence
    return count


# Asking ------------------------------------------------------------------------------------------


async def test_requested_bytes_stay_below_server_buffer(
    nats: NatsServer,
) -> None:
    """It would end that, and the lane would begin anew for ever."""
    count, size = 40, 1_000_000
    async with both(nats) as (connection, own):
        await stream(connection, "LONG", "long")
        for _ in range(count):
            connection.core.publish("long", bytes(size))
            connection.nats.flush()
            await connection.nats.wait_for_output_space()
        await connection.round_trip()
        near = near_end(own, "LONG")
        await near.read(await near.open())  # From then on nobody takes anything.
        info = await near._info(near._consumer)
        while info["num_waiting"] and info["num_pending"]:
            info = await near._info(near._consumer)
        assert info["delivered"]["stream_seq"] * size < 16 * 1024 * 1024
        assert await found(near, near._next_unread, count + 1) > 0


async def test_receives_message_longer_than_requested_bytes(
    nats: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("simplebus.bridge.source.pull_consumer.PULL_BYTES", 1000)
    async with both(nats) as (connection, own):
        await stream(connection, "LONGER", "longer")
        for size in (300, 400, 20_000, 5, 900, 30_000, 10):
            connection.core.publish("longer", bytes(size))
        await connection.round_trip()
        near = near_end(own, "LONGER")
        assert await found(near, await near.open(), 8) == 7


async def test_small_batch_limit_sends_more_requests(server: BusServer, tmp_path: Path) -> None:
    limits = "limits { max_request_batch: 7 }"
    more = f'jetstream {{ store_dir: "{tmp_path}/limited", {limits} }}'
    with nats_server(tmp_path, more) as limited:
        async with connect(limited) as connection, simplebus.connect(server.address) as bus:
            await stream(connection, "LITTLE", "little")
            await say(connection, "little", 0, 300)
            lane = from_stream(limited, server, "LITTLE")
            async with copying(lane):
                assert await payloads(bus, "LITTLE", 300) == numbered(0, 300)
            assert lane.statistics().losses == 0


async def test_rereads_with_short_inactive_threshold(
    nats: NatsServer,
) -> None:
    limits = {"consumer_limits": {"inactive_threshold": 30 * 10**9}}
    async with both(nats) as (connection, own):
        await stream(connection, "SHORT", "short", retention="interest", **limits)
        near = near_end(own, "SHORT")
        at = await near.open()
        await say(connection, "short", 0, 20)
        assert await found(near, at, 21) == 20
        assert await found(near, at, 21) == 20


# Going on ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("was_there", [False, True])
async def test_resumes_after_kill_while_consumer_is_recreated(
    was_there: bool, nats: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though a far end that is a door remembers nothing, and the lane was to begin with what is
    new."""

    async def lost(near: StreamSource, *_: Any, **more: Any) -> Any:
        raise BusConnectionError("lost")

    name = f"BETWEEN-{was_there}"
    async with both(nats) as (connection, own):
        await stream(connection, name, name)
        await say(connection, name, 0, 5)
        near = near_end(own, name, start="new")
        assert await near.open() == 6
        if was_there:
            await say(connection, name, 5, 15)
            assert await found(near, 6, 16) == 10
            await near.commit_position(11, now=True)
        await say(connection, name, 15, 20)
        near, at = near_end(own, name, start="new"), 11 if was_there else 6
        assert await near.open() == at
        with monkeypatch.context() as patch:
            patch.setattr(StreamSource, "_create", lost)
            with pytest.raises(BusConnectionError, match="lost"):
                await near.read(at)
        assert await near._find_consumer(near._consumer) is None
        for _ in range(2):
            near = near_end(own, name, start="new")
            assert await near.open() == at
        assert not near.is_new
        assert await found(near, at, near.head) == near.head - at
        names = (await connection.nats.api_request(f"CONSUMER.NAMES.{name}"))["consumers"]
        assert names == [near._consumer]


async def test_continues_without_bookmark_if_one_consumer_allowed(
    nats: NatsServer,
) -> None:
    async with both(nats) as (connection, own):
        await stream(connection, "LONE", "lone", max_consumers=1)
        await say(connection, "lone", 0, 10)
        for _ in range(3):
            near = near_end(own, "LONE")
            assert await found(near, await near.open(), 11) == 10


async def test_reads_recreated_stream_from_first_message(
    nats: NatsServer,
) -> None:
    """Its sequences mean other messages: none is taken for copied."""
    async with both(nats) as (connection, own):
        await stream(connection, "REBORN", "reborn")
        await say(connection, "reborn", 0, 10)
        near = near_end(own, "REBORN")
        await near.open()
        await connection.nats.api_request("STREAM.DELETE.REBORN")
        await stream(connection, "REBORN", "reborn")
        await say(connection, "reborn", 0, 5)
        for begin in near.refresh_stream_info(), near.read(8):
            with pytest.raises(BusConnectionError, match="created again"):
                await begin
        again = near_end(own, "REBORN")
        at = await again.open()
        assert again.storage_id != near.storage_id
        assert await found(again, at, again.head) == 5 - (at - 1)


@pytest.mark.parametrize("kind", ["workqueue", "interest", "limits"])
async def test_acks_redelivery_after_lost_ack(
    kind: str, nats: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where the leader of the consumer dies with it. The lane goes on meanwhile."""
    config, name = StreamSource._config, f"UNHEARD-{kind}"

    def soon(near: StreamSource, *of: Any) -> dict[str, Any]:
        return config(near, *of) | {"ack_wait": 10**8}

    def lost(near: StreamSource, *of: Any) -> bytes:
        return b""

    monkeypatch.setattr(StreamSource, "_config", soon)
    async with both(nats) as (connection, own):
        await stream(connection, name, name, retention=kind)
        near = near_end(own, name)
        at = await near.open()
        await say(connection, name, 0, 20)
        await near.commit_position(at, now=True)
        assert await found(near, at, 21) == 20
        with monkeypatch.context() as patch:
            patch.setattr(StreamSource, "_encode_acks", lost)
            await near.commit_position(21, now=True)
            info = await near._info(near._consumer)  # What comes again meanwhile is not heard, too.
            assert info["num_ack_pending"] == 20
        while (await near._info(near._consumer))["num_ack_pending"]:
            near._check_alive()
            near._request_more()
        await say(connection, name, 20, 30)
        assert await found(near, 21, 31) == 10


def test_redelivery_mixed_with_first_delivery_is_read_once() -> None:
    """As of a bridge that stood still for longer than its consumer waits for acks."""
    nats: Any = SimpleNamespace(flush=lambda: None)
    connection: Any = SimpleNamespace(core=NatsClientCore(inbox="_INBOX.me"), nats=nats)
    near = near_end(connection, "STILL")
    near._pull_consumer = source = PullConsumer(
        connection, "STILL", "c", sent=0, pending=9, beat=1.0
    )
    near._cursor = near._began = near._own_publish_cache = 1
    said = ""
    for count, sequence in enumerate([1, 2, 3, 1, 2, 4, 3, 5], 1):
        said += f"MSG s {source._sid} $JS.ACK.STILL.c.1.{sequence}.{count}.0.0 0\r\n\r\n"
    (messages,) = ClientParser().receive(said.encode())
    assert isinstance(messages, ReceivedMessages)
    near._take(messages)
    ((_, sequences),) = near._queue
    assert sequences.tolist() == [1, 2, 3, 4, 5]
    assert (near._cursor, near._missed) == (6, 0)


# Missing -----------------------------------------------------------------------------------------


async def test_filtered_copier_counts_drops_during_absence(
    nats: NatsServer,
) -> None:
    async with both(nats) as (connection, own):
        await stream(connection, "DROPS", "drops.>", max_msgs=10)
        await say(connection, "drops.a", 0, 5)
        near = near_end(own, "DROPS", subjects=["drops.a"])
        assert await found(near, await near.open(), 6) == 5
        near._close_pull_consumer()
        await near.commit_position(6, now=True)
        await say(connection, "drops.a", 5, 30)
        near = near_end(own, "DROPS", subjects=["drops.a"])
        some = await near.read(await near.open())
        assert (some.first_sequence, some.missed_count) == (6, 15)


async def test_filtered_mirror_counts_nothing_as_missed(nats: NatsServer) -> None:
    async with both(nats) as (connection, own):
        await stream(connection, "ORIGIN", "origin.>")
        mirror = {"name": "ORIGIN", "filter_subject": "origin.a"}
        await connection.nats.api_request("STREAM.CREATE.PART", {"name": "PART", "mirror": mirror})
        for number in range(10):
            await say(connection, "origin.a", number, number + 1)
            await say(connection, "origin.b", number, number + 1)
        near = near_end(own, "PART", subjects=())
        while await near.open() and near.head < 20:
            await connection.round_trip()
        count, missed, at = 0, 0, 1
        while at < 20:
            some = await near.read(at)
            count += sum(piece.count for piece in some.runs)
            missed, at = missed + some.missed_count, some.next_sequence
        assert (count, missed) == (10, 0)


async def test_counts_removed_stream_messages_as_missed(
    server: BusServer, nats: NatsServer
) -> None:
    async with connect(nats) as connection, simplebus.connect(server.address) as bus:
        await stream(connection, "HOLES", "holes")
        await say(connection, "holes", 0, 10)
        for sequence in 1, 4, 5:
            await connection.nats.api_request("STREAM.MSG.DELETE.HOLES", {"seq": sequence})
        lane = from_stream(nats, server, "HOLES")
        async with copying(lane):
            assert len(await payloads(bus, "HOLES", 7)) == 7
            await until(lambda: lane.statistics().position == 11)
        assert lane.statistics().missed == 2  # The first one was gone before the lane was there.
