"""Where the promises are tried: buses of every kind, and clients of every kind.

Rule 1: a promise sees a bus through `Host` alone. What a kind of bus cannot do, its host does not
pretend to.
"""

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
from simplebus.client.blocking.bus import connect_blocking
from simplebus.client.message_types import Registry
from simplebus.core.settings import Settings
from simplebus.memory.bus import MemoryBus
from simplebus.testing.blocking_adapter import AwaitedBus, awaited
from simplebus.testing.server import BusServer, bus_server

_LOOK_SECONDS = 0.005


class Host(Protocol):
    """One fresh bus. Its clients have the verbs of `simplebus.Bus`, awaited."""

    def connect(
        self, *, name: str | None = None, registry: Registry | None = None
    ) -> AbstractAsyncContextManager[Any]:
        """One more client."""

    def tick(self, times: int = 1) -> None:
        """So many beats of the ack timer pass."""

    def hang_up(self) -> None:
        """Every connection breaks."""

    async def until(self, bus: Any, condition: Callable[[], bool]) -> None:
        """Return when it holds; this client's handlers are called meanwhile."""

    def serving(self, bus: Any) -> AbstractContextManager[None]:
        """A block in which this client's handlers are called, whatever others do."""


class AsyncHost:
    """What hosts of async clients share."""

    async def until(self, bus: Any, condition: Callable[[], bool]) -> None:
        while not condition():  # noqa: ASYNC110 - what is looked at has no event.
            await anyio.sleep(_LOOK_SECONDS)

    def serving(self, bus: Any) -> AbstractContextManager[None]:
        return nullcontext()


class MemoryHost(AsyncHost):
    """A `MemoryBus`."""

    def __init__(self, settings: Settings) -> None:
        memory = self._memory = MemoryBus(settings)
        self.connect = memory.connect
        self.tick = memory.tick
        self.hang_up = memory.hang_up


class ServerHost(AsyncHost):
    """A server, and clients under trio or asyncio."""

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
    """A server, and clients without an event loop."""

    def __init__(self, server: BusServer) -> None:
        self._server = server
        self.tick = server.tick
        self.hang_up = server.hang_up

    def connect(
        self, *, name: str | None = None, registry: Registry | None = None
    ) -> AbstractAsyncContextManager[Any]:
        more: dict[str, Any] = {} if registry is None else {"registry": registry}
        return awaited(connect_blocking(self._server.address, name=name, **more))

    async def until(self, bus: AwaitedBus, condition: Callable[[], bool]) -> None:
        await bus.until(condition)

    def serving(self, bus: AwaitedBus) -> AbstractContextManager[None]:
        return bus.serving()


@asynccontextmanager
async def memory_host(settings: Settings) -> AsyncIterator[Host]:
    """A bus in this process."""
    yield MemoryHost(settings)


@asynccontextmanager
async def server_host(settings: Settings) -> AsyncIterator[Host]:
    """A server, and async clients."""
    with bus_server(settings) as server:
        yield ServerHost(server)


@asynccontextmanager
async def blocking_host(settings: Settings) -> AsyncIterator[Host]:
    """A server, and blocking clients."""
    with bus_server(settings) as server:
        yield BlockingHost(server)
