"""How far behind a lane is: what lies at its near end and is not confirmed by the far one."""

from __future__ import annotations

from typing import Any

import pytest
import trio

import simplebus
from load.ports import HOST, free_port
from simplebus.bridge.copier import Copier
from simplebus.bridge.metrics import bridge_snapshot
from simplebus.bridge.runner import create_copiers, format_status
from simplebus.bridge.settings import BridgeSettings, CopiedClass
from simplebus.core.limits import Limits
from simplebus.core.settings import ClassSettings, FullPolicy, Settings
from simplebus.memory.bus import MemoryBus
from simplebus.testing.server import BusServer
from tests.bridge import memory_buses
from tests.bridge.memory_buses import (
    Silent,
    hold,
    numbered,
    payloads,
    running,
)
from tests.bridge.nats_copiers import (
    connect,
    copying,
    stream,
    until,
)
from tests.jetstream.nats_servers import NatsServer
from tests.jetstream.stateless_servers import address, door, options
from tests.support.running_server import serving

ROOM = 10
FULL = Settings(limits=Limits(class_messages=ROOM))
POLL_SECONDS = 15.0
"""An end that is silent is noticed, and the other one asked."""


def lag(lane: Copier) -> int | None:
    return lane.statistics().lag


async def through(lane: Copier, copied: int) -> None:
    """Return when it has copied so many, and has none before it."""
    await until(lambda: lane.statistics().copied == copied)
    await until(lambda: lag(lane) == 0)


# From bus to bus ----------------------------------------------------------------------------------


@pytest.mark.parametrize("was_there", [False, True])
def test_lag_grows_while_target_is_away(was_there: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        monkeypatch.setattr("time.monotonic", trio.current_time)
        near, far = MemoryBus(), MemoryBus()
        line = Silent(far)
        async with near as here, far as there:
            await hold(there)
            await here.publish_many(numbered(0, 5), class_id="orders")
            copying = memory_buses.lane(near, far, far_place=line)
            if not was_there:
                line.slice_frames()
            async with running(copying):
                if was_there:
                    assert await payloads(there, "orders", 5) == numbered(0, 5)
                    await trio.sleep(1)
                    assert lag(copying) == 0
                    line.slice_frames()
                await trio.sleep(60)
                left = 0 if was_there else 5
                assert lag(copying) == left
                for end in 12, 20:
                    await here.publish_many(
                        numbered(5 if end == 12 else 12, end), class_id="orders"
                    )
                    await trio.sleep(POLL_SECONDS)
                    found = copying.statistics()
                    assert (found.is_up, found.lag) == (False, left + end - 5)
                    assert found.lag_seconds >= POLL_SECONDS - 2
                    assert f"lag {left + end - 5}" in format_status(found)
                line.mend()
                first = 5 if was_there else 0
                assert await payloads(there, "orders", 20 - first) == numbered(first, 20)
                await trio.sleep(1)
                assert (lag(copying), copying.statistics().lag_seconds) == (0, 0.0)

    memory_buses.run(main)


def test_reports_lag_while_target_is_full_and_after_restart() -> None:
    async def main() -> None:
        near, far = MemoryBus(), MemoryBus(FULL)
        async with near as here, far as there:
            await hold(there)
            await here.publish_many(numbered(0, 100), class_id="orders")
            copying = memory_buses.lane(near, far)
            async with running(copying):
                await trio.sleep(60)
                assert lag(copying) == 100 - ROOM
                await here.publish_many(numbered(100, 200), class_id="orders")
                await trio.sleep(2)
                assert lag(copying) == 200 - ROOM
            again = memory_buses.lane(near, far)
            async with running(again):
                await here.publish_many(numbered(200, 300), class_id="orders")
                await trio.sleep(60)
                assert not again.statistics().is_up  # It sends what was under way.
                assert 300 - ROOM <= (lag(again) or 0) <= 300
                assert await payloads(there, "orders", 300) == numbered(0, 300)
                await trio.sleep(1)
                assert lag(again) == 0

    memory_buses.run(main)


def test_lag_counts_messages_to_resend() -> None:
    async def main() -> None:
        class_ = ClassSettings(full_policy=FullPolicy.DROP_NEWEST)
        near = MemoryBus()
        far = MemoryBus(Settings(limits=FULL.limits, classes={"orders": class_}))
        async with near as here, far as there:
            await hold(there)
            await here.publish_many(numbered(0, 30), class_id="orders")
            copying = memory_buses.lane(near, far)
            async with running(copying):
                await trio.sleep(20)
                assert (copying.statistics().copied, lag(copying)) == (ROOM, 20)
                await here.publish_many(numbered(30, 34), class_id="orders")
                await trio.sleep(2)
                assert lag(copying) == 24
                got = await payloads(there, "orders", 34)
                assert sorted(got) == sorted(numbered(0, 34))
                await trio.sleep(2)
                assert lag(copying) == 0

    memory_buses.run(main)


def test_keeps_last_lag_while_source_is_away() -> None:
    async def main() -> None:
        near, far = MemoryBus(), MemoryBus()
        lines = {"near": Silent(near), "far": Silent(far)}
        async with near as here, far as there:
            await hold(there)
            await here.publish_many(numbered(0, 5), class_id="orders")
            ends: Any = {"near_place": lines["near"], "far_place": lines["far"]}
            lines["far"].slice_frames()
            copying = memory_buses.lane(near, far, **ends)
            async with running(copying):
                await trio.sleep(30)
                assert lag(copying) == 5
                lines["near"].slice_frames()
                await here.publish(b"5", class_id="orders")
                await trio.sleep(60)
                assert lag(copying) == 5
                unknown = memory_buses.lane(near, far, "other", **ends)
                async with running(unknown):
                    await trio.sleep(30)
                    assert lag(unknown) is None
                    assert "lag unknown" in format_status(unknown.statistics())
                    facts = bridge_snapshot([unknown, copying])
                    (metric,) = (m for m in facts.metrics if m.name == "bridge_lag_messages")
                    assert metric.values == [((("lane", "lane"),), 5)]
                for line in lines.values():
                    line.mend()
                assert await payloads(there, "orders", 6) == numbered(0, 6)
                await trio.sleep(1)
                assert lag(copying) == 0

    memory_buses.run(main)


def test_idle_source_is_not_polled() -> None:
    """It says when it has something."""

    async def main() -> None:
        near, far = MemoryBus(), MemoryBus()
        async with near as here, far:
            await here.publish(b"0", class_id="orders", channel="b")
            copying = memory_buses.lane(near, far, channels=("a",))
            async with running(copying):
                await trio.sleep(60)
                await here.publish(b"1", class_id="orders", channel="b")
                await trio.sleep(60)
                assert lag(copying) == 0

    memory_buses.run(main)


# To NATS ------------------------------------------------------------------------------------------


def lane(name: str, near: str, far: str, class_: str, **more: Any) -> Copier:
    copied = CopiedClass(class_, start=more.pop("start", "earliest"), **more)
    (made,) = create_copiers([BridgeSettings(name, near, far, (copied,))])
    return made


@pytest.mark.parametrize("name", ["", "AWAY"])
async def test_lag_grows_while_nats_is_away(name: str, server: BusServer, nats: NatsServer) -> None:
    class_ = f"away{name}"
    async with simplebus.connect(server.address) as bus:
        async with connect(nats) as connection:
            if name:
                await stream(connection, name, f"class.{class_}")
        await bus.publish_many(numbered(0, 20), class_id=class_)
        made = lane("away", server.address, nats.url, class_, stream=name)
        nats.stop()
        try:
            async with copying(made):
                await until(lambda: lag(made) == 20)
                await bus.publish_many(numbered(20, 50), class_id=class_)
                await until(lambda: lag(made) == 50)
                nats.start()
                await through(made, 50)
                nats.stop()
                await bus.publish_many(numbered(50, 57), class_id=class_)
                await until(lambda: lag(made) == 7)
                nats.start()
                await until(lambda: lag(made) == 0)
        finally:
            nats.stop()
            nats.start()


async def test_reports_lag_while_stream_is_full(server: BusServer, nats: NatsServer) -> None:
    async with connect(nats) as connection, simplebus.connect(server.address) as bus:
        await stream(connection, "LAGS", "class.lags", max_msgs=ROOM, discard="new")
        await bus.publish_many(numbered(0, 25), class_id="lags")
        made = lane("full", server.address, nats.url, "lags", stream="LAGS")
        async with copying(made):
            await until(lambda: made.statistics().copied == ROOM and lag(made) == 15)
            await bus.publish_many(numbered(25, 28), class_id="lags")
            await until(lambda: lag(made) == 18)
            while lag(made):
                await connection.nats.api_request("STREAM.PURGE.LAGS")
                await trio.sleep(0.05)
            await through(made, 28)


# From NATS ----------------------------------------------------------------------------------------


async def publish(connection: Any, subject: str, first: int, last: int) -> None:
    for number in range(first, last):
        connection.core.publish(subject, b"%d" % number)
    await connection.round_trip()


async def test_reports_stream_lag_while_bus_is_away(nats: NatsServer) -> None:
    port = free_port()
    async with connect(nats) as connection:
        await stream(connection, "WAITS", "waits.*")
        await publish(connection, "waits.a", 0, 5)
        more: Any = {"stream": "WAITS", "channels": ("waits.a",)}
        made = lane("w", nats.url, f"simplebus://{HOST}:{port}", "w", **more)
        async with copying(made):
            await until(lambda: lag(made) == 5)  # It was never there.
            async with serving(port=port):
                await through(made, 5)
            await publish(connection, "waits.a", 5, 20)
            await publish(connection, "waits.b", 0, 7)  # Not for this lane.
            await until(lambda: lag(made) == 15)
            assert not made.statistics().is_up
            await publish(connection, "waits.a", 20, 30)
            await until(lambda: lag(made) == 25)
            async with serving(port=port):
                await through(made, 30)


async def test_reports_stream_lag_while_bus_is_full(nats: NatsServer) -> None:
    async with (
        connect(nats) as connection,
        serving(FULL) as up,
        simplebus.connect(address(up)) as bus,
    ):
        await hold_there(bus, "slow")
        await stream(connection, "SLOW", "slow")
        made = lane("slow", nats.url, address(up), "slow", stream="SLOW")
        async with copying(made, up=True):
            await publish(connection, "slow", 0, 30)
            await until(lambda: lag(made) == 30 - ROOM)
            await publish(connection, "slow", 30, 20_000)
            await until(lambda: lag(made) == 20_000 - ROOM)


async def test_reports_lag_of_full_target(nats: NatsServer) -> None:
    async with (
        connect(nats) as connection,
        serving(FULL) as up,
        simplebus.connect(address(up)) as bus,
    ):
        await hold_there(bus, "held")
        made = lane("held", nats.url, address(up), "held", channels=("held",))
        async with copying(made, up=True):
            await publish(connection, "held", 0, 30)
            await until(lambda: lag(made) == 30 - ROOM)
            await publish(connection, "held", 30, 45)
            await until(lambda: lag(made) == 45 - ROOM)
            assert await payloads(bus, "held", 45) == numbered(0, 45)
            await until(lambda: lag(made) == 0)


async def hold_there(bus: simplebus.Bus, class_: str) -> None:
    async with bus.subscribe(class_, durable="test"):
        pass


async def test_copies_to_and_from_stateless_servers(nats: NatsServer) -> None:
    """From a door it is asked of the cluster."""
    port = free_port()
    cluster = options(nats.url)
    async with serving() as up, simplebus.connect(address(up)) as bus:
        await bus.publish_many(numbered(0, 10), class_id="a")
        there = lane("to", address(up), f"simplebus://{HOST}:{port}", "a")
        async with copying(there):
            await until(lambda: lag(there) == 10)
            async with door(cluster, port=port):
                await through(there, 10)
            await bus.publish_many(numbered(10, 14), class_id="a")
            await until(lambda: lag(there) == 4)
    async with door(cluster) as near, simplebus.connect(address(near)) as bus:
        back = lane("from", address(near), f"simplebus://{HOST}:{port}", "a")
        async with copying(back):
            await until(lambda: lag(back) == 10)
            await bus.publish_many(numbered(10, 13), class_id="a")
            await until(lambda: lag(back) == 13)
            async with serving(port=port):
                await until(lambda: lag(back) == 0)
