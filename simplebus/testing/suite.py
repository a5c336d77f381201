"""Base class and helpers of the conformance suite.

A conformance test is written once as an async function and runs against every kind of bus and
client. It does not depend on speed: it runs ticks of the ack timer by `tick`, and lets seconds pass
by `pass_seconds`, in real time only where nothing else works.
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

MANUAL_TICKS = Settings(ack_timeout=1, tick_seconds=86_400.0)
"""Unacknowledged messages are redelivered when the test calls `tick`, and never by the clock."""

PATIENCE_SECONDS = 180.0
QUIET_SECONDS = 0.05
"""A message that has not arrived after this time is assumed not to arrive."""


def conformance_test(test: Callable[[S], Awaitable[None]]) -> Callable[[S], None]:
    """Make a plain test function of an async test method; `Suite.run` runs it."""

    @functools.wraps(test)
    def run_test(self: S) -> None:
        async def main() -> None:
            with anyio.fail_after(PATIENCE_SECONDS):
                await test(self)

        self.run(main)

    del run_test.__wrapped__  # Otherwise pytest plugins would treat the test as async.
    return run_test


class Suite:
    """Conformance tests, and the hooks that a kind of bus overrides."""

    def host(self, settings: Settings) -> AbstractAsyncContextManager[Host]:
        """Hook: return a context manager that gives a new bus with these settings."""
        raise NotImplementedError("a suite needs a bus: return one of simplebus.testing.hosts")

    def run(self, main: Callable[[], Awaitable[None]]) -> None:
        """Hook: run an async function. The default is trio."""
        anyio.run(main, backend="trio")

    async def pass_seconds(self, seconds: float) -> None:
        """Hook: let this time pass."""
        await anyio.sleep(seconds)

    @asynccontextmanager
    async def open_bus(self, settings: Settings = MANUAL_TICKS) -> AsyncIterator[Any]:
        """Give the only client of a new bus."""
        async with self.host(settings) as host, host.connect() as bus:
            yield bus


async def get_payloads(subscription: Any, count: int) -> list[bytes]:
    """Return the payloads of the next `count` messages."""
    return [(await subscription.get(PATIENCE_SECONDS)).payload for _ in range(count)]


async def get_all_payloads(subscription: Any, count_min: int) -> list[bytes]:
    """Return the payloads of at least `count_min` messages, and of all that follow within
    QUIET_SECONDS.
    """
    received = await get_payloads(subscription, count_min)
    while more := await subscription.take(1000, QUIET_SECONDS):
        received += [message.payload for message in more]
    return received


async def is_silent(subscription: Any) -> bool:
    """Return True if no message arrives within QUIET_SECONDS."""
    return not await subscription.take(1, QUIET_SECONDS)
