"""The conformance suite, run against every kind of bus and client."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager

import anyio
import trio
from trio.testing import MockClock

from simplebus.core.settings import Settings
from simplebus.testing.conformance import (
    BlockingBusConformance,
    BusConformance,
    Host,
    blocking_host,
    memory_host,
    server_host,
)

Main = Callable[[], Awaitable[None]]


class TestMemoryBusUnderTrio(BusConformance):
    """Run on trio with a mock clock, so that no real time passes."""

    def host(self, settings: Settings) -> AbstractAsyncContextManager[Host]:
        return memory_host(settings)

    def run(self, main: Main) -> None:
        trio.run(main, clock=MockClock(autojump_threshold=0))


class TestMemoryBusUnderAsyncio(BusConformance):
    def host(self, settings: Settings) -> AbstractAsyncContextManager[Host]:
        return memory_host(settings)

    def run(self, main: Main) -> None:
        anyio.run(main, backend="asyncio")


class TestServerUnderTrio(BusConformance):
    def host(self, settings: Settings) -> AbstractAsyncContextManager[Host]:
        return server_host(settings)


class TestServerUnderAsyncio(BusConformance):
    def host(self, settings: Settings) -> AbstractAsyncContextManager[Host]:
        return server_host(settings)

    def run(self, main: Main) -> None:
        anyio.run(main, backend="asyncio")


class TestBlockingClients(BlockingBusConformance):
    def host(self, settings: Settings) -> AbstractAsyncContextManager[Host]:
        return blocking_host(settings)
