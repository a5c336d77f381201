"""Calls from a thread that does not own the bus."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial

import anyio
import anyio.to_thread
import pytest

import simplebus
from simplebus import LocalProtocolError
from tests.client.bus_server import BusServer, until
from tests.client.conftest import Run


def refused_in_a_thread(call: Callable[[], object]) -> bool:
    with pytest.raises(LocalProtocolError, match="another thread"):
        call()
    return True


def test_calls_from_another_thread_raise(run: Run, server: BusServer) -> None:
    async def main() -> None:
        async with simplebus.connect(server.address) as bus, bus.subscribe(1) as messages:
            await bus.publish(b"0", class_id=1)
            message = await messages.get()
            publish = partial(bus.publish, b"x", class_id=1)
            for call in (
                partial(anyio.run, publish),
                partial(anyio.run, partial(publish, confirm=False)),
                partial(bus.publish_nowait, b"x", class_id=1),
                partial(anyio.run, partial(bus.publish_many, [b"x"], class_id=1)),
                partial(anyio.run, partial(bus.request, b"x", class_id=1)),
                partial(anyio.run, bus.flush),
                partial(anyio.run, bus.drain),
                partial(anyio.run, bus.fetch, 1),
                partial(anyio.run, messages.get),
                partial(anyio.run, messages.take, 1),
                partial(bus.handle, 1, print),
                message.working,
            ):
                await anyio.sleep(0.01)  # The writer becomes idle.
                assert await anyio.to_thread.run_sync(refused_in_a_thread, call)
            await bus.publish(b"1", class_id=1)
            assert (await messages.get()).payload == b"1"
            assert bus.statistics().reconnections == 0

    run(main)
    assert server.statistics().published == 2


def test_concurrent_use_of_a_blocking_bus_raises(server: BusServer) -> None:
    received: list[bytes] = []

    def consume() -> None:
        with bus.subscribe(1) as messages:
            for message in messages:
                received.append(message.payload)
                if len(received) == 2:
                    break

    with simplebus.connect_blocking(server.address) as bus:
        bus.publish(b"0", class_id=1)
        thread = threading.Thread(target=consume)
        thread.start()
        until(lambda: len(received) == 1)
        for call in (
            lambda: bus.publish(b"x", class_id=1),
            lambda: bus.publish(b"x", class_id=1, confirm=False),
            lambda: bus.publish_nowait(b"x", class_id=1),
            lambda: bus.publish_many([b"x"], class_id=1),
            lambda: bus.run(0.1),
            lambda: bus.fetch(1),
            bus.flush,
        ):
            refused_in_a_thread(call)
        with simplebus.connect_blocking(server.address) as publisher:
            publisher.publish(b"1", class_id=1)
        thread.join()
        bus.publish(b"2", class_id=2)
    assert received == [b"0", b"1"]
    assert server.statistics().published == 2
