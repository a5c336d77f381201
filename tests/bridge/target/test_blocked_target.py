"""Status of a copier whose target is connected and accepts nothing: down, with the reason."""

from __future__ import annotations

import pytest
import trio

import simplebus
from simplebus.bridge.copier import STALLED_SECONDS, Copier
from simplebus.bridge.metrics import bridge_snapshot
from simplebus.bridge.runner import create_copiers
from simplebus.bridge.settings import BridgeSettings, CopiedClass
from simplebus.core.limits import Limits
from simplebus.core.settings import ClassSettings, FullPolicy, Settings
from simplebus.memory.bus import MemoryBus
from simplebus.testing.server import BusServer
from tests.bridge import memory_buses
from tests.bridge.memory_buses import (
    create_test_durable,
    numbered_payloads,
    payloads,
    read,
    running,
)
from tests.bridge.nats_copiers import connect, copying, create_stream, wait_until
from tests.jetstream.nats_servers import NatsServer

ROOM = 10
LONG_SECONDS = STALLED_SECONDS + 5.0


def full_target(policy: FullPolicy) -> Settings:
    classes = {"orders": ClassSettings(full_policy=policy)}
    return Settings(limits=Limits(class_messages=ROOM), classes=classes)


def read_up_metric(copying: Copier) -> bool:
    """Return the `up` metric, after checking that the health agrees."""
    snapshot = bridge_snapshot([copying])
    (up_metric,) = (metric for metric in snapshot.metrics if metric.name == "bridge_up")
    ((_, value),) = up_metric.values
    assert snapshot.health.ready == bool(value)
    return bool(value)


@pytest.mark.parametrize("policy", [FullPolicy.BLOCK, FullPolicy.DROP_NEWEST])
def test_reports_stalled_bus_until_it_accepts_messages(
    policy: FullPolicy, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        source, target = MemoryBus(), MemoryBus(full_target(policy))
        async with source as source_bus, target as target_bus:
            await create_test_durable(target_bus)
            await source_bus.publish_many(numbered_payloads(0, ROOM), class_id="orders")
            copying = memory_buses.create_copier(source, target)
            async with running(copying):
                await trio.sleep(LONG_SECONDS)
                assert read_up_metric(copying)  # The target is full, but there is nothing to copy.
                await source_bus.publish_many(numbered_payloads(ROOM, 3 * ROOM), class_id="orders")
                await trio.sleep(STALLED_SECONDS / 2)
                assert read_up_metric(copying)
                await trio.sleep(LONG_SECONDS)
                assert not read_up_metric(copying)
                problem = copying.statistics().problem
                assert problem.startswith("the target accepted no message for 10 s")
                assert (": " in problem) == (policy is FullPolicy.DROP_NEWEST)
                assert caplog.text.count("the target accepted no message") == 1
                await read(target_bus, "orders", 1)
                await trio.sleep(3)
                assert read_up_metric(copying)
                assert caplog.text.count("the target accepts messages again") == 1
                await payloads(target_bus, "orders", 3 * ROOM - 1)
                await trio.sleep(LONG_SECONDS)
                assert read_up_metric(copying)

    memory_buses.run(main)


def test_slow_target_is_not_stalled() -> None:
    async def main() -> None:
        source, target = MemoryBus(), MemoryBus(full_target(FullPolicy.BLOCK))
        async with source as source_bus, target as target_bus:
            await create_test_durable(target_bus)
            await source_bus.publish_many(numbered_payloads(0, 5 * ROOM), class_id="orders")
            copying = memory_buses.create_copier(source, target)
            async with running(copying):
                for _ in range(20):
                    await read(target_bus, "orders", 1)
                    await trio.sleep(STALLED_SECONDS / 2)
                    assert read_up_metric(copying)

    memory_buses.run(main)


async def test_reports_full_stream_until_it_has_room(
    server: BusServer, nats: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("simplebus.bridge.copier.STALLED_SECONDS", 2.0)
    async with connect(nats) as connection, simplebus.connect(server.address) as bus:
        await create_stream(connection, "HELD", "class.held", max_msgs=ROOM, discard="new")
        await bus.publish_many(numbered_payloads(0, 25), class_id="held")
        copied = CopiedClass("held", start="earliest", stream="HELD")
        bridge = BridgeSettings("b", server.address, nats.url, (copied,))
        (copier,) = create_copiers([bridge])
        async with copying(copier):
            await wait_until(lambda: copier.statistics().copied == ROOM)
            await wait_until(lambda: not read_up_metric(copier))
            problem = copier.statistics().problem
            assert problem == "the target accepted no message for 2 s: maximum messages exceeded"
            await connection.nats.api_request("STREAM.PURGE.HELD")
            await wait_until(lambda: read_up_metric(copier))
            while copier.statistics().lag:
                await connection.nats.api_request("STREAM.PURGE.HELD")
                await trio.sleep(0.05)
            await wait_until(lambda: read_up_metric(copier))
