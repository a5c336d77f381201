"""Event loops for tests of `MemoryBus`; under trio no real time passes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import anyio
import pytest
import trio
from trio.testing import MockClock

Main = Callable[[], Awaitable[None]]
Run = Callable[[Main], None]


async def bounded(main: Main) -> None:
    with anyio.fail_after(240):
        await main()


@pytest.fixture(params=["trio", "asyncio"])
def run(request: pytest.FixtureRequest) -> Run:
    """Run an async function on trio or asyncio, with a timeout."""

    def under_trio(main: Main) -> None:
        trio.run(bounded, main, clock=MockClock(autojump_threshold=0))

    def under_asyncio(main: Main) -> None:
        anyio.run(bounded, main, backend="asyncio")

    return under_trio if request.param == "trio" else under_asyncio
