"""A near bus that comes back from an old copy, before a stream that knows messages by their ids."""

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
from tests.bridge.memory_buses import numbered
from tests.bridge.nats_copiers import (
    NatsServer,
    connect,
    copying,
    stored,
    stream,
    until,
)


class Moving:
    """A place where there is another bus than before."""

    def __init__(self) -> None:
        self.now: Endpoint | None = None

    async def open(self) -> Any:
        if self.now is None:
            raise OSError("nobody is there")
        return await self.now.open()


async def said(connection: BridgeNatsConnection, name: str, count: int) -> list[bytes]:
    """All that the stream has, once it is so many."""
    connection.messages.clear()
    sid = connection.core.subscribe("heard")
    config = {"deliver_subject": "heard", "ack_policy": "none", "deliver_policy": "all"}
    await connection.nats.api_request(
        f"CONSUMER.CREATE.{name}", {"stream_name": name, "config": config}
    )
    while sum(each.count for each in connection.messages) < count:
        await connection.wait_event()
    connection.core.unsubscribe(sid)
    await connection.round_trip()
    return [each.payload(row) for each in connection.messages for row in range(each.count)]


@pytest.mark.parametrize("bridge", ["goes on", "is started anew"])
@pytest.mark.parametrize("lengths", ["are one", "differ"])
async def test_restored_source_messages_are_stored(
    bridge: str,
    lengths: str,
    nats: NatsServer,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """More of it than was lost, so that the sequences say nothing."""
    name = f"OLD-{bridge[0]}{lengths[0]}"
    most = 4 if lengths == "are one" else 0
    first, lost, new = (
        [text.rjust(most, b"0") for text in numbered(*those)]
        for those in ((0, 20), (90, 110), (990, 1020))
    )
    place, near, copy = Moving(), tmp_path / "near", tmp_path / "copy"
    copied = CopiedClass("orders", stream=name, rewrite=(("#", f"{name}.#"),), start="earliest")

    def made() -> Copier:
        return create_copiers([BridgeSettings("old", "", nats.url, (copied,))], local_server=place)[
            0
        ]

    async with connect(nats) as connection:
        await stream(connection, name, f"{name}.>")
        lane, count = made(), 0
        for folder, texts, at in (near, first, 20), (near, lost, 40), (copy, new, 50):
            memory = MemoryBus(data_dir=folder)
            async with memory as bus:
                place.now = memory_buses.place(memory)
                await bus.publish_many(texts, class_id="orders", channel="x")
                async with copying(lane):
                    await until(lambda lane=lane, at=at: lane.statistics().position >= at)
            count += len(texts)
            assert await stored(connection, name) == count
            if not copy.exists():
                shutil.copytree(near, copy)
            if bridge == "is started anew":
                lane = made()
        assert await said(connection, name, count) == first + lost + new
    if bridge == "goes on":
        assert lane.statistics().discarded_records == 1
        assert "was restored from an old copy" in caplog.text
