"""Writing to a full bus: messages are sent again until there is room."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
import trio.testing

from simplebus.client.aio.bus import Bus
from simplebus.core.errors import LocalProtocolError, Reason, RefusedError
from simplebus.core.limits import Limits
from simplebus.core.settings import FullPolicy, Settings
from simplebus.gateway.modules import bus_writer as module
from simplebus.gateway.modules.bus_writer import BusWriter
from simplebus.logs.event_logger import EventLogger
from simplebus.memory.bus import MemoryBus

log = EventLogger("test")
SMALL = Settings(
    limits=Limits(class_bytes=1 << 20, frame_bytes=1 << 17, dead_letter_bytes=1 << 20),
    full_policy=FullPolicy.DROP_NEWEST,
)
PATIENCE_S = 60


@asynccontextmanager
async def running_writer(bus: Bus, **options: Any) -> AsyncIterator[BusWriter]:
    writer = BusWriter(bus, "kept", **{"bytes_max": 1 << 17, "log": log, **options})
    with trio.fail_after(PATIENCE_S):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(writer.run)
            yield writer
            nursery.cancel_scope.cancel()


async def test_full_bus_stores_messages_later_in_order(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "RETRY_SECONDS", 0.001)
    caplog.set_level("INFO")
    numbers, received = range(600), list[int]()
    async with (
        MemoryBus(SMALL) as bus,
        bus.subscribe("kept", max_in_flight=8) as messages,
        running_writer(bus) as writer,
        trio.open_nursery() as nursery,
    ):

        async def write_all() -> None:
            for number in numbers:
                await writer.put(b"%d" % number + bytes(10_000), {})

        nursery.start_soon(write_all)
        while not writer.problem:  # noqa: ASYNC110 - nothing has been acked yet.
            await trio.sleep(0.001)
        assert writer.problem.startswith("drop_newest")
        assert writer.stored_count < len(numbers)
        async for message in messages:
            received.append(int(message.payload[:-10_000]))
            if len(received) == len(numbers):
                break
        await writer.flush()
        assert (writer.stored_count, writer.problem) == (len(numbers), "")
    assert received == list(numbers)
    assert "received messages wait for space (drop_newest" in caplog.text
    assert "received messages are stored again" in caplog.text


async def test_writer_bounds_messages_in_flight(
    autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MESSAGES_MAX", 3)
    settings = Settings(limits=SMALL.limits, full_policy=FullPolicy.BLOCK)
    written_count = 0
    async with (
        MemoryBus(settings) as bus,
        bus.subscribe("kept", max_in_flight=1) as messages,
        running_writer(bus) as writer,
    ):
        with trio.move_on_after(PATIENCE_S / 2):
            while True:
                await writer.put(bytes(100_000), {})
                written_count += 1
        assert written_count <= writer.stored_count + 3
        for _ in range(written_count):
            await messages.get(PATIENCE_S)
        await writer.flush()
        assert writer.stored_count == written_count


async def test_reports_message_that_cannot_be_stored() -> None:
    async with MemoryBus(SMALL) as bus, running_writer(bus) as writer:
        with pytest.raises(LocalProtocolError):
            await writer.put(bytes(1 << 20), {})
        await writer.put(b"fine", {})
        await writer.flush()
        assert writer.stored_count == 1


async def test_permanent_refusal_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_RETRYABLE_REASONS", {Reason.DISK_FULL})
    with trio.fail_after(PATIENCE_S):
        async with MemoryBus(SMALL) as bus, trio.open_nursery() as nursery:
            writer = BusWriter(bus, "kept", bytes_max=1 << 17, log=log)

            async def write_all() -> None:
                while True:
                    await writer.put(bytes(10_000), {})

            nursery.start_soon(write_all)
            with pytest.raises(RefusedError, match="drop_newest"):
                await writer.run()
            nursery.cancel_scope.cancel()
