"""A source that was restored from an old copy, and a target stream with message ids."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from simplebus.bridge.copier import Copier
from simplebus.bridge.nats_connection import BridgeNatsConnection
from simplebus.bridge.runner import create_copiers
from simplebus.bridge.settings import BridgeSettings, CopiedClass
from simplebus.client.aio.transport import Endpoint
from simplebus.memory.bus import MemoryBus
from tests.bridge import memory_buses
from tests.bridge.memory_buses import numbered_payloads
from tests.bridge.nats_copiers import (
    NatsServer,
    connect,
    copying,
    count_stored,
    create_stream,
    wait_until,
)


class SwitchableEndpoint:
    """Endpoint that can lead to another bus than before."""

    def __init__(self) -> None:
        self.now: Endpoint | None = None

    async def open(self) -> Any:
        if self.now is None:
            raise OSError("nobody is there")
        return await self.now.open()


async def read_stream(connection: BridgeNatsConnection, name: str, count: int) -> list[bytes]:
    """Return the payloads of the stream once it has `count` messages."""
    connection.messages.clear()
    sid = connection.core.subscribe("heard")
    config = {"deliver_subject": "heard", "ack_policy": "none", "deliver_policy": "all"}
    await connection.nats.api_request(
        f"CONSUMER.CREATE.{name}", {"stream_name": name, "config": config}
    )
    while sum(batch.count for batch in connection.messages) < count:
        await connection.wait_event()
    connection.core.unsubscribe(sid)
    await connection.round_trip()
    return [batch.payload(row) for batch in connection.messages for row in range(batch.count)]


@pytest.mark.parametrize("bridge", ["goes on", "is started anew"])
@pytest.mark.parametrize("lengths", ["are one", "differ"])
async def test_restored_source_messages_are_stored(
    bridge: str,
    lengths: str,
    nats: NatsServer,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """More new messages follow than were lost, so the sequences alone do not show the loss."""
    name = f"OLD-{bridge[0]}{lengths[0]}"
    max_in_flight = 4 if lengths == "are one" else 0
    first, lost_texts, new_texts = (
        [text.rjust(max_in_flight, b"0") for text in numbered_payloads(*bounds)]
        for bounds in ((0, 20), (90, 110), (990, 1020))
    )
    endpoint, source, copy = SwitchableEndpoint(), tmp_path / "source", tmp_path / "copy"
    copied = CopiedClass("orders", stream=name, rewrite=(("#", f"{name}.#"),), start="earliest")

    def create_replicated_stream() -> Copier:
        return create_copiers(
            [BridgeSettings("old", "", nats.url, (copied,))], local_server=endpoint
        )[0]

    async with connect(nats) as connection:
        await create_stream(connection, name, f"{name}.>")
        copier, count = create_replicated_stream(), 0
        for folder, texts, end_count in (
            (source, first, 20),
            (source, lost_texts, 40),
            (copy, new_texts, 50),
        ):
            memory = MemoryBus(data_dir=folder)
            async with memory as bus:
                endpoint.now = memory_buses.endpoint_of(memory)
                await bus.publish_many(texts, class_id="orders", channel="x")
                async with copying(copier):
                    await wait_until(
                        lambda copier=copier, end_count=end_count: (
                            copier.statistics().position >= end_count
                        )
                    )
            count += len(texts)
            assert await count_stored(connection, name) == count
            if not copy.exists():
                shutil.copytree(source, copy)
            if bridge == "is started anew":
                copier = create_replicated_stream()
        assert await read_stream(connection, name, count) == first + lost_texts + new_texts
    if bridge == "goes on":
        assert copier.statistics().discarded_records == 1
        assert "was restored from an old copy" in caplog.text
