"""Backlogs in the directory of an uplink, found by the statistics of its bus."""

from __future__ import annotations

import simplebus
from simplebus.bridge.settings import copier_name
from simplebus.gateway.modules.uplink import UplinkBacklog, find_backlogs

LONG = "x" * 190
"""With this name, the copier name is too long and shortened."""


async def durable(bus: simplebus.Bus, name: str, class_: int | str) -> None:
    called = copier_name(name, class_, back=False)
    async with bus.subscribe(class_, durable=called, start="earliest"):
        pass


async def test_each_class_keeps_its_uplink_name() -> None:
    memory = simplebus.MemoryBus()
    async with memory as bus:
        assert find_backlogs(memory.statistics(), 7, "up") == [UplinkBacklog(7, "up", 0, {})]
        for class_ in (7, LONG, "new", "done"):
            await bus.publish(b"", class_id=class_)
        await durable(bus, "was", 7)
        await durable(bus, "was", LONG)
        async with bus.subscribe("done", durable="bridge was there done") as messages:
            (await messages.get()).ack()
        await bus.publish(b"", class_id="dead.7")
        assert find_backlogs(memory.statistics(), 7, "up") == [
            UplinkBacklog(7, "was", 1, {}),
            UplinkBacklog(LONG, "was", 1, {}),
            UplinkBacklog("new", "up", 1, {}),
        ]
        assert find_backlogs(memory.statistics(), "new", "up")[0] == UplinkBacklog(
            "new", "up", 1, {}
        )
        assert find_backlogs(memory.statistics(), "done", "up")[0] == UplinkBacklog(
            "done", "was", 0, {}
        )


async def test_own_backlog_is_sent_and_others_are_reported() -> None:
    memory = simplebus.MemoryBus()
    async with memory as bus:
        for name in ("was", "up"):
            await durable(bus, name, "x")
            await bus.publish(b"", class_id="x")
        assert find_backlogs(memory.statistics(), "x", "up") == [
            UplinkBacklog("x", "up", 2, {"was": 2})
        ]
        assert find_backlogs(memory.statistics(), "x", "new") == [
            UplinkBacklog("x", "was", 2, {"up": 2})
        ]
