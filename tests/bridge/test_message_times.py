"""Ages of copied messages, which only the clock of the source bus determines."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import trio

from simplebus.bridge.bus_connection import connect_source
from simplebus.bridge.source.bus import BusSource
from simplebus.bridge.target.bus import BusTarget
from simplebus.core.limits import FETCH_BYTES_MAX
from simplebus.memory.bus import MemoryBus
from tests.bridge.memory_buses import (
    bus_clock,
    create_copier,
    create_test_durable,
    endpoint_of,
    numbered_payloads,
    payloads,
    read,
    run,
    running,
)

APART = [-3600.0, 0.0, 3600.0]
"""Seconds by which the clock of the source bus is ahead of the others."""


def shift_clock(source: MemoryBus, seconds: float) -> None:
    """Shift all clocks except the clock of the source bus."""
    source._server._clock_offset += seconds


@pytest.mark.parametrize("seconds", APART)
def test_remaining_expiry_ignores_other_clocks(seconds: float) -> None:
    async def main() -> None:
        source, target = MemoryBus(), MemoryBus()
        async with source as source_bus, target as target_bus:
            shift_clock(source, seconds)
            await create_test_durable(target_bus)
            await source_bus.publish(b"over", class_id="orders", expires=50)
            await source_bus.publish(b"fresh", class_id="orders", expires=600)
            await source_bus.publish(b"late", class_id="orders", delay=300)
            await trio.sleep(100)
            copying = create_copier(source, target)
            async with running(copying):
                (first_message,) = await read(target_bus, "orders", 1)
                assert first_message.payload == b"fresh"
                assert first_message.expires_ms is not None
                assert 498_000 < first_message.expires_ms <= 500_100
                await trio.sleep(190)
                with trio.move_on_after(5):
                    await read(target_bus, "orders", 1)
                    raise AssertionError("it came early")
                (second_message,) = await read(target_bus, "orders", 1)
                assert second_message.payload == b"late"
            assert copying.statistics().copied == 2

    run(main)


@pytest.mark.parametrize("seconds", APART)
def test_in_flight_messages_arrive_once_despite_other_clocks(
    seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bridge is killed after the target stored everything, and restarts much later."""

    async def main() -> None:
        source, target = MemoryBus(), MemoryBus()
        async with source as source_bus, target as target_bus:
            shift_clock(source, seconds)
            await create_test_durable(target_bus)
            await source_bus.publish_many(numbered_payloads(0, 10), class_id="orders")

            async def die(*_: Any) -> list[Any]:
                await trio.sleep_forever()
                return []

            async def say_nothing(*_: Any, **__: Any) -> None: ...

            with monkeypatch.context() as killed:
                killed.setattr(BusTarget, "settle_oldest", die)
                async with running(create_copier(source, target)):
                    await trio.sleep(5)
                    killed.setattr(BusSource, "commit_position", say_nothing)
            await trio.sleep(400)
            next_copier = create_copier(source, target)
            async with running(next_copier):
                await source_bus.publish_many(numbered_payloads(10, 20), class_id="orders")
                assert await payloads(target_bus, "orders", 20) == numbered_payloads(0, 20)
                await trio.sleep(60)
            assert next_copier.statistics().discarded_records == 0
            (orders,) = [cls for cls in target.statistics().classes if cls.name == "orders"]
            assert orders.published == 20

    run(main)


def test_prefetched_messages_keep_aging() -> None:
    async def main() -> None:
        source = MemoryBus()
        async with source as source_bus:
            shift_clock(source, -3600)
            payload = bytes(FETCH_BYTES_MAX // 4)
            await source_bus.publish_many([payload] * 40, class_id="orders")
            published = bus_clock(source)()
            async with connect_source(
                endpoint_of(source), "a", target_id="x", heartbeat=10, auth=None
            ) as connection:
                end = BusSource(connection, class_="orders", durable="a", start="earliest")
                position = await end.open()
                while position < 40:
                    found = await end.read(position)
                    for piece in found.runs:
                        assert np.allclose(piece.ages, bus_clock(source)() - published, atol=0.1)
                    assert found.next_sequence > position
                    position = found.next_sequence
                    await trio.sleep(50)

    run(main)
