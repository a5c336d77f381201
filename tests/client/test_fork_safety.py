"""Tests of forked processes with a connected bus."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.client.bus_server import BusServer

ROOT = Path(__file__).parents[2]

# A single-threaded program, because a process that forks should have no threads. It prints the
# errors of its child process.
FORKING = '''
import os
import sys

import anyio
import simplebus

ADDRESS = sys.argv[1]


def error_of(call):
    try:
        call()
    except simplebus.BusError as error:
        return f"{type(error).__name__}: {'forked process' in str(error)}"
    return "nothing"


def run_in_child(*calls):
    """Return the error of each call in a forked child."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.write(writing, repr([error_of(call) for call in calls]).encode())
        finally:
            os._exit(0)
    os.close(writing)
    os.waitpid(child, 0)
    return os.read(reading, 10_000).decode()


def test_blocking_bus():
    with simplebus.connect_blocking(ADDRESS) as bus, bus.subscribe(2) as messages:
        bus.publish(b"before", class_id=1)
        bus.publish(b"held", class_id=2)
        message = messages.get(60)
        print(run_in_child(
            lambda: bus.publish(b"of the child", class_id=1),
            lambda: bus.publish(b"of the child", class_id=1, confirm=False),
            lambda: bus.publish_nowait(b"of the child", class_id=1),
            lambda: bus.publish_many([b"of the child"] * 500, class_id=1),
            lambda: bus.subscribe(1).__enter__(),
            lambda: messages.get(),
            lambda: bus.fetch(1),
            lambda: bus.flush(),
        ))
        print(run_in_child(
            lambda: messages.ack(message),
            lambda: messages.__exit__(None, None, None),
            lambda: bus.connection.close(1.0),
        ))
        bus.publish(b"of the parent", class_id=1)
        print([message.payload for message in bus.fetch(1)], bus.statistics().reconnections)


async def test_async_bus(connect):
    async with connect as bus:
        await bus.publish(b"before", class_id=3)

        def alone(call):
            """Run async code in an event loop of the child."""
            def run():
                import asyncio
                asyncio.events._set_running_loop(None)
                asyncio.run(call())
            return run

        print(run_in_child(
            alone(lambda: bus.publish(b"of the child", class_id=3)),
            alone(lambda: bus.publish(b"of the child", class_id=3, confirm=False)),
            lambda: bus.publish_nowait(b"of the child", class_id=3),
            alone(lambda: bus.publish_many([b"of the child"] * 500, class_id=3)),
            alone(lambda: bus.subscribe(3).__aenter__()),
            alone(lambda: bus.fetch(3)),
            alone(lambda: bus.flush()),
        ))
        await bus.publish(b"of the parent", class_id=3)
        print([message.payload for message in await bus.fetch(3)], bus.statistics().reconnections)


{
    "blocking": test_blocking_bus,
    "async": lambda: anyio.run(test_async_bus, simplebus.connect(ADDRESS)),
    "memory": lambda: anyio.run(test_async_bus, simplebus.MemoryBus()),
}[sys.argv[2]]()
'''


def run_program(server: BusServer, kind: str) -> list[str]:
    ran = subprocess.run(
        [sys.executable, "-c", FORKING, server.address, kind],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.splitlines()


REFUSED = "BusConnectionError: True"


def test_forked_child_cannot_use_the_blocking_bus_of_its_parent(server: BusServer) -> None:
    calls, leaving, parent = run_program(server, "blocking")
    assert calls == repr([REFUSED] * 8)
    assert leaving == repr(["nothing"] * 3)
    assert parent == "[b'before', b'of the parent'] 0"


@pytest.mark.parametrize("kind", ["async", "memory"])
def test_forked_child_cannot_use_the_async_bus_of_its_parent(server: BusServer, kind: str) -> None:
    calls, parent = run_program(server, kind)
    assert calls == repr([REFUSED] * 7)
    assert parent == "[b'before', b'of the parent'] 0"
