"""Exits of the block of a bus: lost connections, errors and program ends."""

from __future__ import annotations

from collections.abc import AsyncIterator

import anyio
import pytest

import simplebus
from simplebus import BusConnectionError, Message
from tests.client.bus_server import BusServer
from tests.client.conftest import Run


@pytest.mark.parametrize("reconnect", [0.3, 0])
def test_block_with_handlers_is_cancelled_when_the_bus_is_lost(
    run: Run, server: BusServer, reconnect: float
) -> None:
    async def main() -> None:
        async with simplebus.connect(server.address, reconnect=reconnect) as bus:
            bus.handle(1, print)
            bus.handle("tests.by_name", print, concurrency=3)
            await bus.drain()
            await anyio.to_thread.run_sync(server.stop)
            await anyio.sleep_forever()

    with pytest.raises(BusConnectionError, match="closed the connection"):
        run(main)


def test_error_of_the_block_replaces_the_lost_connection_error(run: Run, server: BusServer) -> None:
    async def main() -> None:
        async with simplebus.connect(server.address, reconnect=0) as bus:
            bus.handle(1, print)
            await bus.drain()
            await anyio.to_thread.run_sync(server.stop)
            try:
                await anyio.sleep_forever()
            finally:
                raise LookupError("of the block")

    with pytest.raises(LookupError, match="of the block"):
        run(main)


def test_next_call_raises_when_the_bus_is_lost(run: Run, server: BusServer) -> None:
    async def main() -> None:
        async with simplebus.connect(server.address, reconnect=0) as bus:
            await bus.publish(b"x", class_id=1)
            await anyio.to_thread.run_sync(server.stop)
            await anyio.sleep(0.05)
            with pytest.raises(BusConnectionError):
                await bus.publish(b"x", class_id=1)

    run(main)


@pytest.mark.parametrize("end", [SystemExit(3), KeyboardInterrupt()])
@pytest.mark.parametrize("kind", ["server", "memory"])
def test_system_exit_of_a_handler_is_raised_unwrapped(
    run: Run, shared_server: BusServer, end: BaseException, kind: str
) -> None:
    async def main() -> None:
        def handler(message: Message[bytes]) -> None:
            raise end

        connect = (
            simplebus.MemoryBus() if kind == "memory" else simplebus.connect(shared_server.address)
        )
        async with connect as bus:
            bus.handle(80, handler)
            await bus.publish(b"x", class_id=80)
            await anyio.sleep_forever()

    with pytest.raises(type(end)) as caught:
        run(main)
    assert caught.value is end


def test_a_generator_around_a_bus_can_be_closed(run: Run, shared_server: BusServer) -> None:
    async def main() -> None:
        async def payloads() -> AsyncIterator[bytes]:
            async with (
                simplebus.connect(shared_server.address) as bus,
                bus.subscribe(81) as messages,
            ):
                await bus.publish(b"x", class_id=81)
                async for message in messages:
                    yield message.payload

        found = payloads()
        assert await anext(found) == b"x"
        await found.aclose()

    run(main)
