"""What a lane says of a far end that is there and takes nothing: that it is not up, and why."""

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
    hold,
    numbered,
    payloads,
    read,
    running,
)
from tests.bridge.nats_copiers import (
    connect,
    copying,
    stream,
    until,
)
from tests.jetstream.nats_servers import NatsServer

ROOM = 10
LONG_SECONDS = STALLED_SECONDS + 5.0


def full(policy: FullPolicy) -> Settings:
    classes = {"orders": ClassSettings(full_policy=policy)}
    return Settings(limits=Limits(class_messages=ROOM), classes=classes)


def is_told_up(copying: Copier) -> bool:
    """What the metric says; health says the same."""
    facts = bridge_snapshot([copying])
    (up,) = (each for each in facts.metrics if each.name == "bridge_up")
    ((_, value),) = up.values
    assert facts.health.ready == bool(value)
    return bool(value)


@pytest.mark.parametrize("policy", [FullPolicy.BLOCK, FullPolicy.DROP_NEWEST])
def test_reports_stalled_bus_until_it_accepts_messages(
    policy: FullPolicy, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        near, far = MemoryBus(), MemoryBus(full(policy))
        async with near as here, far as there:
            await hold(there)
            await here.publish_many(numbered(0, ROOM), class_id="orders")
            copying = memory_buses.lane(near, far)
            async with running(copying):
                await trio.sleep(LONG_SECONDS)
                assert is_told_up(copying)  # It is full, and nothing is to be copied.
                await here.publish_many(numbered(ROOM, 3 * ROOM), class_id="orders")
                await trio.sleep(STALLED_SECONDS / 2)
                assert is_told_up(copying)
                await trio.sleep(LONG_SECONDS)
                assert not is_told_up(copying)
                said = copying.statistics().problem
                assert said.startswith("the target accepted no message for 10 s")
                assert (": " in said) == (policy is FullPolicy.DROP_NEWEST)
                assert caplog.text.count("the target accepted no message") == 1
                await read(there, "orders", 1)
                await trio.sleep(3)
                assert is_told_up(copying)
                assert caplog.text.count("the target accepts messages again") == 1
                await payloads(there, "orders", 3 * ROOM - 1)
                await trio.sleep(LONG_SECONDS)
                assert is_told_up(copying)

    memory_buses.run(main)


def test_slow_target_is_not_stalled() -> None:
    async def main() -> None:
        near, far = MemoryBus(), MemoryBus(full(FullPolicy.BLOCK))
        async with near as here, far as there:
            await hold(there)
            await here.publish_many(numbered(0, 5 * ROOM), class_id="orders")
            copying = memory_buses.lane(near, far)
            async with running(copying):
                for _ in range(20):
                    await read(there, "orders", 1)
                    await trio.sleep(STALLED_SECONDS / 2)
                    assert is_told_up(copying)

    memory_buses.run(main)


async def test_reports_full_stream_until_it_has_room(
    server: BusServer, nats: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("simplebus.bridge.copier.STALLED_SECONDS", 2.0)
    async with connect(nats) as connection, simplebus.connect(server.address) as bus:
        await stream(connection, "HELD", "class.held", max_msgs=ROOM, discard="new")
        await bus.publish_many(numbered(0, 25), class_id="held")
        copied = CopiedClass("held", start="earliest", stream="HELD")
        bridge = BridgeSettings("b", server.address, nats.url, (copied,))
        (made,) = create_copiers([bridge])
        async with copying(made):
            await until(lambda: made.statistics().copied == ROOM)
            await until(lambda: not is_told_up(made))
            said = made.statistics().problem
            assert said == "the target accepted no message for 2 s: maximum messages exceeded"
            await connection.nats.api_request("STREAM.PURGE.HELD")
            await until(lambda: is_told_up(made))
            while made.statistics().lag:
                await connection.nats.api_request("STREAM.PURGE.HELD")
                await trio.sleep(0.05)
            await until(lambda: is_told_up(made))
