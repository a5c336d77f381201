"""Bridges in a ring: each bus receives a message once, also under faults."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import trio

import simplebus
from simplebus.bridge.runner import create_copiers
from simplebus.bridge.settings import BridgeSettings, CopiedClass
from simplebus.memory.bus import MemoryBus
from simplebus.testing.server import bus_server
from tests.bridge.memory_buses import create_copier, create_test_durable, payloads, read, run
from tests.bridge.nats_copiers import connect
from tests.jetstream.nats_servers import nats_server

PATIENCE_SECONDS = 120.0


class RestartableCopier:
    """Copier that can be killed and replaced by another one with the same name."""

    def __init__(
        self, nursery: trio.Nursery, source: MemoryBus, target: MemoryBus, name: str
    ) -> None:
        self._nursery, self._way = nursery, (source, target, name)
        self.start()

    def start(self) -> None:
        self._scope = scope = trio.CancelScope()

        async def live() -> None:
            with scope:
                await create_copier(*self._way).run()

        self._nursery.start_soon(live)

    def kill(self) -> None:
        self._scope.cancel()
        self.start()


@pytest.mark.parametrize("seed", range(2))
def test_a_ring_of_three_neither_loops_nor_loses_whatever_breaks(seed: int) -> None:
    rng = random.Random(seed)
    count = 45

    async def main() -> None:
        buses = [MemoryBus() for _ in range(3)]
        async with buses[0] as a, buses[1] as b, buses[2] as c, trio.open_nursery() as nursery:
            clients = [a, b, c]
            await create_test_durable(*clients)
            ring = [
                RestartableCopier(nursery, source, buses[(index + 1) % 3], f"ring-{index}")
                for index, source in enumerate(buses)
            ]
            for number in range(count):
                await clients[number % 3].publish(b"%d" % number, class_id="orders")
                match rng.randrange(8):
                    case 0:
                        rng.choice(ring).kill()
                    case 1:
                        rng.choice(buses).hang_up()
                await trio.sleep(rng.random() / 5)
            for client_number, client in enumerate(clients):
                received = list(map(int, await payloads(client, "orders", count)))
                assert sorted(received) == list(range(count))
                by_origin = [[n for n in received if n % 3 == origin] for origin in range(3)]
                assert by_origin == [sorted(each) for each in by_origin], (
                    f"out of order at {client_number}"
                )
            await trio.sleep(120)  # Wait for messages that circulate.
            for memory in buses:
                (orders,) = [k for k in memory.statistics().classes if k.ring.head >= count]
                assert orders.ring.head == count
            nursery.cancel_scope.cancel()

    run(main)


async def test_a_ring_through_a_nats_server_neither_loops_nor_loses(tmp_path: Path) -> None:
    """Messages go from a bus to a stream, to another bus, and back. The NATS server is killed
    meanwhile.
    """
    count = 200
    with bus_server() as first_server, bus_server() as second_server, nats_server(tmp_path) as nats:
        async with connect(nats) as connection:
            config = {"name": "RING", "subjects": ["ring.>"]}
            await connection.nats.api_request("STREAM.CREATE.RING", config)
        to_nats = CopiedClass("a", rewrite=(("#", "ring.x.#"),), stream="RING", start="earliest")
        from_nats = CopiedClass(
            "a", channels=("ring.>",), rewrite=(("ring.x.#", "#"),), stream="RING"
        )
        ring = create_copiers(
            [
                BridgeSettings(
                    "out", first_server.address, nats.url, (to_nats,), heartbeat_seconds=1.0
                ),
                BridgeSettings(
                    "over", nats.url, second_server.address, (from_nats,), heartbeat_seconds=1.0
                ),
                BridgeSettings(
                    "back",
                    second_server.address,
                    first_server.address,
                    (CopiedClass("a", start="earliest"),),
                ),
            ]
        )
        with trio.fail_after(PATIENCE_SECONDS):
            async with (
                simplebus.connect(first_server.address) as source_bus,
                simplebus.connect(second_server.address) as target_bus,
                trio.open_nursery() as nursery,
            ):
                for bus in source_bus, target_bus:
                    async with bus.subscribe("a", durable="test"):
                        pass
                for each in ring:
                    nursery.start_soon(each.run)
                for number in range(count):
                    await (source_bus, target_bus)[number % 2].publish(b"%d" % number, class_id="a")
                    if number == count // 2:
                        await trio.to_thread.run_sync(nats.kill)
                        await trio.to_thread.run_sync(nats.start)
                for bus in source_bus, target_bus:
                    received = list(map(int, await payloads(bus, "a", count)))
                    assert sorted(received) == list(range(count))
                    for half in 0, 1:
                        by_origin = [n for n in received if n % 2 == half]
                        assert by_origin == sorted(by_origin)
                while not all(each.statistics().position >= count for each in ring):  # noqa: ASYNC110
                    await trio.sleep(0.01)
                async with connect(nats) as connection:
                    info = await connection.nats.api_request("STREAM.INFO.RING")
                    assert info["state"]["messages"] == count
                await source_bus.publish(b"last", class_id="a")
                for bus in source_bus, target_bus:  # Neither bus has received more messages.
                    (last,) = await read(bus, "a", 1)
                    assert (last.payload, last.sequence) == (b"last", count)
                nursery.cancel_scope.cancel()
