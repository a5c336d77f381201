"""Buses and clients of every kind for the conformance suite, behind the interface `Host`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    asynccontextmanager,
    nullcontext,
)
from typing import Any, Protocol

import anyio

from simplebus.client.aio.connect import connect
from simplebus.client.blocking.connect import connect_blocking
from simplebus.client.message_types import Registry
from simplebus.core.settings import Settings
from simplebus.memory.bus import MemoryBus
from simplebus.testing.blocking_adapter import AwaitableBus, connect_awaitable
from simplebus.testing.server import BusServer, bus_server

_POLL_SECONDS = 0.005


class Host(Protocol):
    """A new bus. Its clients have the methods of `simplebus.Bus`."""

    def connect(
        self, *, name: str | None = None, registry: Registry | None = None
    ) -> AbstractAsyncContextManager[Any]:
        """Connect one more client.

        Args:
            name: Publisher name of the client. None makes a random name.
            registry: Bindings of types to classes. None is the default registry.

        Returns:
            An async context manager that gives the client.
        """

    def tick(self, times: int = 1) -> None:
        """Run this number of ticks of the ack timer."""

    def hang_up(self) -> None:
        """Break every connection."""

    async def until(self, bus: Any, condition: Callable[[], bool]) -> None:
        """Return when the condition holds; run the handlers of `bus` meanwhile."""

    def serving(self, bus: Any) -> AbstractContextManager[None]:
        """Return a block in which the handlers of `bus` run."""


class AsyncHost:
    """Base of the hosts of async clients."""

    async def until(self, bus: Any, condition: Callable[[], bool]) -> None:
        while not condition():  # noqa: ASYNC110 - the condition has no event.
            await anyio.sleep(_POLL_SECONDS)

    def serving(self, bus: Any) -> AbstractContextManager[None]:
        return nullcontext()


class MemoryHost(AsyncHost):
    """Host of a `MemoryBus`."""

    def __init__(self, settings: Settings) -> None:
        memory = self._memory = MemoryBus(settings)
        self.connect = memory.connect
        self.tick = memory.tick
        self.hang_up = memory.hang_up


class ServerHost(AsyncHost):
    """Host of a server with clients under trio or asyncio."""

    def __init__(self, server: BusServer) -> None:
        self._server = server
        self.tick = server.tick
        self.hang_up = server.hang_up

    def connect(
        self, *, name: str | None = None, registry: Registry | None = None
    ) -> AbstractAsyncContextManager[Any]:
        more: dict[str, Any] = {} if registry is None else {"registry": registry}
        return connect(self._server.address, name=name, **more)


class BlockingHost:
    """Host of a server with blocking clients."""

    def __init__(self, server: BusServer) -> None:
        self._server = server
        self.tick = server.tick
        self.hang_up = server.hang_up

    def connect(
        self, *, name: str | None = None, registry: Registry | None = None
    ) -> AbstractAsyncContextManager[Any]:
        more: dict[str, Any] = {} if registry is None else {"registry": registry}
        return connect_awaitable(connect_blocking(self._server.address, name=name, **more))

    async def until(self, bus: AwaitableBus, condition: Callable[[], bool]) -> None:
        await bus.until(condition)

    def serving(self, bus: AwaitableBus) -> AbstractContextManager[None]:
        return bus.serving()


@asynccontextmanager
async def memory_host(settings: Settings) -> AsyncIterator[Host]:
    """Give a host of a `MemoryBus` with these settings."""
    yield MemoryHost(settings)


@asynccontextmanager
async def server_host(settings: Settings) -> AsyncIterator[Host]:
    """Give a host of a server with these settings, and async clients."""
    with bus_server(settings) as server:
        yield ServerHost(server)


@asynccontextmanager
async def blocking_host(settings: Settings) -> AsyncIterator[Host]:
    """Give a host of a server with these settings, and blocking clients."""
    with bus_server(settings) as server:
        yield BlockingHost(server)
