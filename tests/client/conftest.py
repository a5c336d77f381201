"""Servers and event loops for tests of both drivers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator

import anyio
import pytest

from simplebus.core.settings import Settings
from tests.client.bus_server import PATIENCE_SECONDS, BusServer, bus_server

Main = Callable[[], Awaitable[None]]
Run = Callable[[Main], None]


PATIENT = Settings(ack_timeout=600)
"""Prevents redeliveries on a slow machine."""


@pytest.fixture(scope="session")
def shared_server() -> Iterator[BusServer]:
    """Server for tests that each use different classes."""
    with bus_server(PATIENT) as server:
        yield server


@pytest.fixture
def server() -> Iterator[BusServer]:
    with bus_server(PATIENT) as server:
        yield server


@pytest.fixture
def clockless_server() -> Iterator[BusServer]:
    """Server whose ack timer only advances when the test calls `tick`."""
    with bus_server(Settings(ack_timeout=1, tick_seconds=86_400.0)) as server:
        yield server


@pytest.fixture(params=["trio", "asyncio"])
def run(request: pytest.FixtureRequest) -> Callable[[Main], None]:
    """Run an async function to its end, with a timeout, under trio and asyncio."""

    async def bounded(main: Main) -> None:
        with anyio.fail_after(PATIENCE_SECONDS):
            await main()

    return lambda main: anyio.run(bounded, main, backend=request.param)
