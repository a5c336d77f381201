"""A real nats-server, a bus, and copiers that run for the length of a block."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any

import pytest
import trio

from simplebus.bridge.copier import Copier
from simplebus.bridge.nats_connection import BridgeNatsConnection, connect_nats
from simplebus.bridge.runner import create_copiers, run_copiers
from simplebus.bridge.settings import BridgeSettings
from simplebus.core.errors import BusConnectionError
from simplebus.testing.server import BusServer, bus_server
from tests.jetstream.nats_servers import NatsServer, nats_server

PATIENCE_SECONDS = 240.0


@pytest.fixture(scope="module", name="nats")
def shared_nats_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    with nats_server(tmp_path_factory.mktemp("nats")) as server:
        yield server


@pytest.fixture(name="server")
def fresh_bus_server() -> Iterator[BusServer]:
    with bus_server() as running:
        yield running


@asynccontextmanager
async def connect(
    server: NatsServer | str, credentials: dict[str, str] | None = None, **options: Any
) -> AsyncIterator[BridgeNatsConnection]:
    """Connect to a NATS server, with long timeouts.

    A busy machine may be slow. Copiers retry after a timeout, but tests do not.
    """
    url = server if isinstance(server, str) else server.url
    sent_credentials = credentials or {}
    end = trio.current_time() + PATIENCE_SECONDS
    async with AsyncExitStack() as stack:
        while True:
            try:
                connection = await stack.enter_async_context(
                    connect_nats(url, "test", sent_credentials, **options)
                )
                break
            except BusConnectionError:
                if trio.current_time() > end:
                    raise
        for name in "api_request", "request":
            setattr(
                connection.nats,
                name,
                partial(getattr(connection.nats, name), seconds=PATIENCE_SECONDS),
            )
        yield connection


async def create_stream(
    connection: BridgeNatsConnection, name: str, subject: str, **options: object
) -> None:
    """Create a stream."""
    config = {"name": name, "subjects": [subject], **options}
    await connection.nats.api_request(f"STREAM.CREATE.{name}", config)


async def count_stored(connection: BridgeNatsConnection, name: str) -> int:
    """Return the number of messages in the stream."""
    return int((await connection.nats.api_request(f"STREAM.INFO.{name}"))["state"]["messages"])


async def wait_until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 - the condition has no event.
        await trio.sleep(0.01)


@asynccontextmanager
async def copying(*copiers: Copier, until_connected: bool = False) -> AsyncIterator[None]:
    """Run copiers during the block. With `up`, the block begins when all of them are connected."""
    with trio.fail_after(PATIENCE_SECONDS):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(run_copiers, copiers)
            if until_connected:
                await wait_until(lambda: all(copier.statistics().is_up for copier in copiers))
            yield
            nursery.cancel_scope.cancel()


@asynccontextmanager
async def running_bridges(
    *bridges: BridgeSettings, until_connected: bool = False
) -> AsyncIterator[list[Copier]]:
    """Run the copiers of some bridges during the block, like `copying`."""
    copiers = create_copiers(bridges)
    async with copying(*copiers, until_connected=until_connected):
        yield copiers
