"""Lag of a copier: messages of the source that the target has not confirmed."""

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
from simplebus.bridge.source.lag import Lag
from simplebus.core.limits import Limits
from simplebus.core.settings import ClassSettings, FullPolicy, Settings
from simplebus.memory.bus import MemoryBus
from simplebus.testing.server import BusServer
from tests.bridge import memory_buses
from tests.bridge.memory_buses import (
    SilentEndpoint,
    create_test_durable,
    numbered_payloads,
    payloads,
    running,
)
from tests.bridge.nats_copiers import connect, copying, create_stream, wait_until
from tests.jetstream.nats_servers import NatsServer
from tests.jetstream.stateless_servers import address, options, stateless_server
from tests.support.running_server import serving

ROOM = 10
FULL = Settings(limits=Limits(class_messages=ROOM))
POLL_SECONDS = 15.0
"""Time after which a silent target counts as lost, and the lag is polled at the source."""


def read_lag(copier: Copier) -> int | None:
    return copier.statistics().lag


async def wait_copied(copier: Copier, copied: int) -> None:
    """Wait until the copier has copied `copied` messages, or more by copies, and has no lag."""
    await wait_until(lambda: copier.statistics().copied >= copied)
    await wait_until(lambda: read_lag(copier) == 0)


# From bus to bus ----------------------------------------------------------------------------------


@pytest.mark.parametrize("was_there", [False, True])
def test_lag_grows_while_target_is_away(was_there: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        monkeypatch.setattr("time.monotonic", trio.current_time)
        source, target = MemoryBus(), MemoryBus()
        line = SilentEndpoint(target)
        async with source as source_bus, target as target_bus:
            await create_test_durable(target_bus)
            await source_bus.publish_many(numbered_payloads(0, 5), class_id="orders")
            copying = memory_buses.create_copier(source, target, target_endpoint=line)
            if not was_there:
                line.cut()
            async with running(copying):
                if was_there:
                    assert await payloads(target_bus, "orders", 5) == numbered_payloads(0, 5)
                    await trio.sleep(1)
                    assert read_lag(copying) == 0
                    line.cut()
                await trio.sleep(60)
                expected_lag = 0 if was_there else 5
                assert read_lag(copying) == expected_lag
                for end in 12, 20:
                    await source_bus.publish_many(
                        numbered_payloads(5 if end == 12 else 12, end), class_id="orders"
                    )
                    await trio.sleep(POLL_SECONDS)
                    statistics = copying.statistics()
                    assert (statistics.is_up, statistics.lag) == (False, expected_lag + end - 5)
                    assert statistics.lag_seconds >= POLL_SECONDS - 2
                    assert f"lag {expected_lag + end - 5}" in format_status(statistics)
                line.restore()
                first = 5 if was_there else 0
                assert await payloads(target_bus, "orders", 20 - first) == numbered_payloads(
                    first, 20
                )
                await trio.sleep(1)
                assert (read_lag(copying), copying.statistics().lag_seconds) == (0, 0.0)

    memory_buses.run(main)


def test_reports_lag_while_target_is_full_and_after_restart() -> None:
    async def main() -> None:
        source, target = MemoryBus(), MemoryBus(FULL)
        async with source as source_bus, target as target_bus:
            await create_test_durable(target_bus)
            await source_bus.publish_many(numbered_payloads(0, 100), class_id="orders")
            copying = memory_buses.create_copier(source, target)
            async with running(copying):
                await trio.sleep(60)
                assert read_lag(copying) == 100 - ROOM
                await source_bus.publish_many(numbered_payloads(100, 200), class_id="orders")
                await trio.sleep(2)
                assert read_lag(copying) == 200 - ROOM
            next_copier = memory_buses.create_copier(source, target)
            async with running(next_copier):
                await source_bus.publish_many(numbered_payloads(200, 300), class_id="orders")
                await trio.sleep(60)
                assert not next_copier.statistics().is_up  # It resends the messages in flight.
                assert 300 - ROOM <= (read_lag(next_copier) or 0) <= 300
                assert await payloads(target_bus, "orders", 300) == numbered_payloads(0, 300)
                await trio.sleep(1)
                assert read_lag(next_copier) == 0

    memory_buses.run(main)


def test_lag_counts_messages_to_resend() -> None:
    async def main() -> None:
        class_ = ClassSettings(full_policy=FullPolicy.DROP_NEWEST)
        source = MemoryBus()
        target = MemoryBus(Settings(limits=FULL.limits, classes={"orders": class_}))
        async with source as source_bus, target as target_bus:
            await create_test_durable(target_bus)
            await source_bus.publish_many(numbered_payloads(0, 30), class_id="orders")
            copying = memory_buses.create_copier(source, target)
            async with running(copying):
                await trio.sleep(20)
                assert (copying.statistics().copied, read_lag(copying)) == (ROOM, 20)
                await source_bus.publish_many(numbered_payloads(30, 34), class_id="orders")
                await trio.sleep(2)
                assert read_lag(copying) == 24
                received = await payloads(target_bus, "orders", 34)
                assert sorted(received) == sorted(numbered_payloads(0, 34))
                await trio.sleep(2)
                assert read_lag(copying) == 0

    memory_buses.run(main)


def test_keeps_last_lag_while_source_is_away() -> None:
    async def main() -> None:
        source, target = MemoryBus(), MemoryBus()
        lines = {"source": SilentEndpoint(source), "target": SilentEndpoint(target)}
        async with source as source_bus, target as target_bus:
            await create_test_durable(target_bus)
            await source_bus.publish_many(numbered_payloads(0, 5), class_id="orders")
            ends: Any = {"source_endpoint": lines["source"], "target_endpoint": lines["target"]}
            lines["target"].cut()
            copying = memory_buses.create_copier(source, target, **ends)
            async with running(copying):
                await trio.sleep(30)
                assert read_lag(copying) == 5
                lines["source"].cut()
                await source_bus.publish(b"5", class_id="orders")
                await trio.sleep(60)
                assert read_lag(copying) == 5
                unmeasured = memory_buses.create_copier(source, target, "other", **ends)
                async with running(unmeasured):
                    await trio.sleep(30)
                    assert read_lag(unmeasured) is None
                    assert "lag unknown" in format_status(unmeasured.statistics())
                    snapshot = bridge_snapshot([unmeasured, copying])
                    (metric,) = (m for m in snapshot.metrics if m.name == "bridge_lag_messages")
                    assert metric.values == [((("copier", "lane"),), 5)]
                for line in lines.values():
                    line.restore()
                assert await payloads(target_bus, "orders", 6) == numbered_payloads(0, 6)
                await trio.sleep(1)
                assert read_lag(copying) == 0

    memory_buses.run(main)


def test_idle_source_is_not_polled() -> None:
    """An idle source reports new messages by itself."""

    async def main() -> None:
        source, target = MemoryBus(), MemoryBus()
        async with source as source_bus, target:
            await source_bus.publish(b"0", class_id="orders", channel="b")
            copying = memory_buses.create_copier(source, target, channels=("a",))
            async with running(copying):
                await trio.sleep(60)
                await source_bus.publish(b"1", class_id="orders", channel="b")
                await trio.sleep(60)
                assert read_lag(copying) == 0

    memory_buses.run(main)


# To NATS ------------------------------------------------------------------------------------------


def create_copier(name: str, source: str, target: str, class_: str, **settings: Any) -> Copier:
    copied = CopiedClass(class_, start=settings.pop("start", "earliest"), **settings)
    (copier,) = create_copiers([BridgeSettings(name, source, target, (copied,))])
    return copier


@pytest.mark.parametrize("name", ["", "AWAY"])
async def test_lag_grows_while_nats_is_away(name: str, server: BusServer, nats: NatsServer) -> None:
    class_ = f"away{name}"
    async with simplebus.connect(server.address) as bus:
        async with connect(nats) as connection:
            if name:
                await create_stream(connection, name, f"class.{class_}")
        await bus.publish_many(numbered_payloads(0, 20), class_id=class_)
        copier = create_copier("away", server.address, nats.url, class_, stream=name)
        nats.stop()
        try:
            async with copying(copier):
                await wait_until(lambda: read_lag(copier) == 20)
                await bus.publish_many(numbered_payloads(20, 50), class_id=class_)
                await wait_until(lambda: read_lag(copier) == 50)
                nats.start()
                await wait_copied(copier, 50)
                nats.stop()
                await bus.publish_many(numbered_payloads(50, 57), class_id=class_)
                await wait_until(lambda: read_lag(copier) == 7)
                nats.start()
                await wait_until(lambda: read_lag(copier) == 0)
        finally:
            nats.stop()
            nats.start()


async def test_reports_lag_while_stream_is_full(server: BusServer, nats: NatsServer) -> None:
    async with connect(nats) as connection, simplebus.connect(server.address) as bus:
        await create_stream(connection, "LAGS", "class.lags", max_msgs=ROOM, discard="new")
        await bus.publish_many(numbered_payloads(0, 25), class_id="lags")
        copier = create_copier("full", server.address, nats.url, "lags", stream="LAGS")
        async with copying(copier):
            await wait_until(lambda: copier.statistics().copied == ROOM and read_lag(copier) == 15)
            await bus.publish_many(numbered_payloads(25, 28), class_id="lags")
            await wait_until(lambda: read_lag(copier) == 18)
            while read_lag(copier):
                await connection.nats.api_request("STREAM.PURGE.LAGS")
                await trio.sleep(0.05)
            await wait_copied(copier, 28)


# From NATS ----------------------------------------------------------------------------------------


async def publish(connection: Any, subject: str, first: int, last: int) -> None:
    for number in range(first, last):
        connection.core.publish(subject, b"%d" % number)
    await connection.round_trip()


async def test_reports_stream_lag_while_bus_is_away(nats: NatsServer) -> None:
    port = free_port()
    async with connect(nats) as connection:
        await create_stream(connection, "WAITS", "waits.*")
        await publish(connection, "waits.a", 0, 5)
        more: Any = {"stream": "WAITS", "channels": ("waits.a",)}
        copier = create_copier("w", nats.url, f"simplebus://{HOST}:{port}", "w", **more)
        async with copying(copier):
            await wait_until(lambda: read_lag(copier) == 5)  # The consumer did not exist before.
            async with serving(port=port):
                await wait_copied(copier, 5)
            # Before, it could read new messages for the bus that it believes to be there.
            await wait_until(lambda: not copier.statistics().is_up)
            await publish(connection, "waits.a", 5, 20)
            await publish(connection, "waits.b", 0, 7)  # Not copied.
            await wait_until(lambda: read_lag(copier) == 15)
            await publish(connection, "waits.a", 20, 30)
            await wait_until(lambda: read_lag(copier) == 25)
            async with serving(port=port):
                await wait_copied(copier, 30)


async def test_reports_stream_lag_while_bus_is_full(nats: NatsServer) -> None:
    async with (
        connect(nats) as connection,
        serving(FULL) as server,
        simplebus.connect(address(server)) as bus,
    ):
        await create_durable(bus, "slow")
        await create_stream(connection, "SLOW", "slow")
        copier = create_copier("slow", nats.url, address(server), "slow", stream="SLOW")
        async with copying(copier, until_connected=True):
            await publish(connection, "slow", 0, 30)
            await wait_until(lambda: read_lag(copier) == 30 - ROOM)
            await publish(connection, "slow", 30, 20_000)
            await wait_until(lambda: read_lag(copier) == 20_000 - ROOM)


async def test_reports_lag_of_full_target(nats: NatsServer) -> None:
    async with (
        connect(nats) as connection,
        serving(FULL) as server,
        simplebus.connect(address(server)) as bus,
    ):
        await create_durable(bus, "held")
        copier = create_copier("held", nats.url, address(server), "held", channels=("held",))
        async with copying(copier, until_connected=True):
            await publish(connection, "held", 0, 30)
            await wait_until(lambda: read_lag(copier) == 30 - ROOM)
            await publish(connection, "held", 30, 45)
            await wait_until(lambda: read_lag(copier) == 45 - ROOM)
            assert await payloads(bus, "held", 45) == numbered_payloads(0, 45)
            await wait_until(lambda: read_lag(copier) == 0)


async def create_durable(bus: simplebus.Bus, class_: str) -> None:
    async with bus.subscribe(class_, durable="test"):
        pass


async def test_copies_to_and_from_stateless_servers(nats: NatsServer) -> None:
    """A stateless server queries the lag from the cluster."""
    port = free_port()
    cluster = options(nats.url)
    async with serving() as server, simplebus.connect(address(server)) as bus:
        await bus.publish_many(numbered_payloads(0, 10), class_id="a")
        target_bus = create_copier("to", address(server), f"simplebus://{HOST}:{port}", "a")
        async with copying(target_bus):
            await wait_until(lambda: read_lag(target_bus) == 10)
            async with stateless_server(cluster, port=port):
                await wait_copied(target_bus, 10)
            await bus.publish_many(numbered_payloads(10, 14), class_id="a")
            await wait_until(lambda: read_lag(target_bus) == 4)
    async with stateless_server(cluster) as source, simplebus.connect(address(source)) as bus:
        return_copier = create_copier("from", address(source), f"simplebus://{HOST}:{port}", "a")
        async with copying(return_copier):
            await wait_until(lambda: read_lag(return_copier) == 10)
            await bus.publish_many(numbered_payloads(10, 13), class_id="a")
            await wait_until(lambda: read_lag(return_copier) == 13)
            async with serving(port=port):
                await wait_until(lambda: read_lag(return_copier) == 0)


def test_log_of_failing_measurements_is_limited(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        lag = Lag(fail)
        for _ in range(100):
            await lag.poll_source("m", 0)
            await trio.sleep(POLL_SECONDS)

    def fail() -> Any:
        raise ValueError("a fault of ours")

    memory_buses.run(main)
    assert [vars(record)["event"] for record in caplog.records] == ["lag.unmeasured"] * 8
