"""How a promise is written and kept: what every suite of promises begins with.

Rule 1: a promise is one async test, written once, and kept by every kind of bus and client.
Rule 2: no promise depends on how fast anything is. Time passes when a promise says so: beats of the
ack timer by `tick`, seconds by `pass_seconds`, which is real time where nothing else would do.
"""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, TypeVar

import anyio

from simplebus.core.settings import Settings
from simplebus.testing.hosts import Host

S = TypeVar("S", bound="Suite")

NUMBERED = [b"message %d" % number for number in range(10)]

CLOCKLESS = Settings(ack_timeout=1, tick_seconds=86_400.0)
"""What is not acknowledged comes again when the promise says `tick`, and never by itself."""

PATIENCE_SECONDS = 180.0
QUIET_SECONDS = 0.05
"""What has not come after so long will not come."""


def promise(test: Callable[[S], Awaitable[None]]) -> Callable[[S], None]:
    """Make a test of an async one: its suite knows how to run it."""

    @functools.wraps(test)
    def keep(self: S) -> None:
        async def main() -> None:
            with anyio.fail_after(PATIENCE_SECONDS):
                await test(self)

        self.run(main)

    del keep.__wrapped__  # So that nobody takes it for async.
    return keep


class Suite:
    """Promises, and the hooks by which a kind of bus shows that it keeps them."""

    def host(self, settings: Settings) -> AbstractAsyncContextManager[Host]:
        """Hook: a fresh bus that behaves like this."""
        raise NotImplementedError("a suite needs a bus: return one of simplebus.testing.hosts")

    def run(self, main: Callable[[], Awaitable[None]]) -> None:
        """Hook: run an async function. Under trio unless you say otherwise."""
        anyio.run(main, backend="trio")

    async def pass_seconds(self, seconds: float) -> None:
        """Hook: time passes."""
        await anyio.sleep(seconds)

    @asynccontextmanager
    async def open_bus(self, settings: Settings = CLOCKLESS) -> AsyncIterator[Any]:
        """The only client of a fresh bus."""
        async with self.host(settings) as host, host.connect() as bus:
            yield bus


async def payloads(subscription: Any, count: int) -> list[bytes]:
    """So many messages, as they come."""
    return [(await subscription.get(PATIENCE_SECONDS)).payload for _ in range(count)]


async def all_payloads(subscription: Any, least: int) -> list[bytes]:
    """All that comes: so many, however long that takes, and what else comes soon."""
    got = await payloads(subscription, least)
    while some := await subscription.take(1000, QUIET_SECONDS):
        got += [message.payload for message in some]
    return got


async def nothing_comes(subscription: Any) -> bool:
    """Whether that is so."""
    return not await subscription.take(1, QUIET_SECONDS)
