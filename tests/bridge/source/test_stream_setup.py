"""Streams that other tools created: a bridge uses them as they are, or reports a problem."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest

import simplebus
from simplebus.bridge.copier import Copier
from simplebus.bridge.dead_letters import dead_letter_opener
from simplebus.bridge.loop_header import PATH_HEADER
from simplebus.bridge.nats_connection import BridgeNatsConnection
from simplebus.bridge.nats_frames import NatsFramer
from simplebus.bridge.runner import create_copiers
from simplebus.bridge.settings import BridgeSettings, CopiedClass
from simplebus.bridge.source.core_nats import CoreNatsSource
from simplebus.bridge.source.stream import StreamSource
from simplebus.core.errors import BusConnectionError
from simplebus.nats.client import encode
from tests.bridge.memory_buses import numbered_payloads, payloads
from tests.bridge.nats_copiers import (
    BusServer,
    NatsServer,
    connect,
    copying,
    create_stream,
    wait_until,
)

FEW = {"consumer_limits": {"max_ack_pending": 10}}


def create_stream_copier(nats: NatsServer, server: BusServer, name: str, **options: Any) -> Copier:
    return create_copiers(
        [
            BridgeSettings(
                name, nats.url, server.address, (CopiedClass(name, stream=name),), **options
            )
        ]
    )[0]


def publish(connection: BridgeNatsConnection, subject: str, count: int, path: str = "") -> None:
    block = b"NATS/1.0\r\n%b: %b\r\n\r\n" % (PATH_HEADER.encode(), path.encode()) if path else b""
    for number in range(count):
        connection.core.write(encode.encode_pub(subject.encode(), b"%d" % number, headers=block))


async def test_copies_stream_with_few_unacked_messages_allowed(
    server: BusServer, nats: NatsServer
) -> None:
    async with connect(nats) as connection, simplebus.connect(server.address) as bus:
        await create_stream(connection, "FEW", "few.>", **FEW)
        publish(connection, "few.x", 300)
        await connection.round_trip()
        copies = create_stream_copier(nats, server, "FEW", heartbeat_seconds=60.0)
        async with copying(copies):
            assert await payloads(bus, "FEW", 300) == numbered_payloads(0, 300)
            await wait_until(lambda: copies.statistics().position == 301)
        statistics = copies.statistics()
        assert (statistics.copied, statistics.missed, statistics.losses) == (300, 0, 0)


async def test_ack_limit_below_redeliveries_raises(
    nats: NatsServer,
) -> None:
    async with connect(nats) as test_connection, connect(nats) as connection:
        await create_stream(connection, "FEWER", "fewer.>", **FEW)
        publish(connection, "fewer.x", 30)
        await connection.round_trip()
        source = StreamSource(
            test_connection,
            "FEWER",
            durable="a lane of FEWER",
            target_id="target",
            subjects=(),
            start="waiting",
            heartbeat=60.0,
            open_dead_letters=dead_letter_opener(None, 7, "l", heartbeat=9, auth=None),  # type: ignore[arg-type]
        )
        position = await source.open()
        while position < 11:
            position = (await source.read(position)).next_sequence
            await (
                connection.round_trip()
            )  # Otherwise nothing would be received after an empty read.
        with pytest.raises(BusConnectionError, match="allows 10 unacked messages"):
            await source.read(position)
        await source.commit_position(6, now=True)  # Settles all messages in flight.
        while position < 16:
            position = (await source.read(position)).next_sequence
            await connection.round_trip()
        assert (await source.read(position)).next_sequence == position == 16


async def test_skipped_stream_messages_are_acked(server: BusServer, nats: NatsServer) -> None:
    """Unacked messages would reach the consumer's limit and block later ones."""
    async with connect(nats) as connection, simplebus.connect(server.address) as bus:
        await create_stream(connection, "LOOPS", "loops.>", **FEW)
        publish(connection, "loops.x", 95, path=bus.connection.core.bus_id)
        publish(connection, "loops.x", 5)
        await connection.round_trip()
        copies = create_stream_copier(nats, server, "LOOPS", heartbeat_seconds=60.0)
        async with copying(copies):
            assert await payloads(bus, "LOOPS", 5) == numbered_payloads(0, 5)
            await wait_until(lambda: copies.statistics().position == 101)
        assert copies.statistics().skipped == {"looped": 95}


async def test_skipped_core_nats_messages_are_released(server: BusServer, nats: NatsServer) -> None:
    """A bridge that receives only its own messages would otherwise keep all of them."""
    async with connect(nats) as test_connection, connect(nats) as connection:
        endpoint: Any = None
        source = CoreNatsSource(
            test_connection,
            ["echo.>"],
            open_dead_letters=dead_letter_opener(endpoint, 7, "l", heartbeat=9, auth=None),
        )
        position = await source.open()
        for _ in range(3):
            publish(connection, "echo.x", 10)
            await connection.round_trip()
            await source.wait_for_message(position)
            assert source._unacked.count == 0
            position = (await source.read(position)).next_sequence
            assert source._unacked.count > 0


async def test_starts_with_single_allowed_consumer(server: BusServer, nats: NatsServer) -> None:
    async with connect(nats) as connection, simplebus.connect(server.address) as bus:
        await create_stream(connection, "ONE", "one.>", retention="interest", max_consumers=1)
        copies = create_stream_copier(nats, server, "ONE")
        async with copying(copies, until_connected=True):
            publish(connection, "one.x", 10)
            await connection.round_trip()
            assert await payloads(bus, "ONE", 10) == numbered_payloads(0, 10)
        assert copies.statistics().losses == 0


async def test_metadata_cache_is_bounded(nats: NatsServer) -> None:
    framer, count = NatsFramer(), 400
    async with connect(nats) as test_connection, connect(nats) as connection:
        test_connection.core.subscribe("long")
        await test_connection.round_trip()
        for number in range(count):
            block = b"NATS/1.0\r\na: %b\r\n\r\n" % (b"%d" % number).ljust(30_000)
            connection.core.write(encode.encode_pub(b"long", b"", headers=block))
        await connection.round_trip()
        await test_connection.round_trip()
        assert sum(batch.count for batch in test_connection.messages) == count
        tracemalloc.start()
        for messages in test_connection.messages:
            for row in range(messages.count):
                framer.to_run(messages.pick(np.arange(messages.count) == row), np.array([row]))
        size, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert size < 8 * 1024 * 1024
