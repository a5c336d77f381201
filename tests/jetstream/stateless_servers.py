"""Stateless servers in this process, and their clients."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from itertools import count
from typing import Any

import trio

from simplebus import Bus, connect
from simplebus.core.broker.broker import Settings
from simplebus.jetstream.backend import JetStreamBackend
from simplebus.jetstream.names import JetStreamNames
from simplebus.jetstream.settings import JetStreamOptions
from simplebus.net.nats_connection import NatsAddress
from simplebus.server.run import RunningServer
from tests.support.running_server import serving

PATIENCE_SECONDS = 60.0
_prefixes = count()


def options(*urls: str, prefix: str = "", **more: Any) -> JetStreamOptions:
    """Build JetStream options with a prefix that no other test uses, unless `prefix` is given."""
    prefix = prefix or f"t{next(_prefixes)}"
    servers = tuple(NatsAddress.parse(url) for url in urls)
    return JetStreamOptions(servers, JetStreamNames(prefix), storage="memory", **more)


@asynccontextmanager
async def stateless_server(
    cluster: JetStreamOptions, settings: Settings | None = None, **more: Any
) -> AsyncIterator[RunningServer]:
    async with serving(settings, cluster=cluster, **more) as up:
        yield up


def address(up: RunningServer) -> str:
    return f"simplebus://{up.addresses[0]}"


@asynccontextmanager
async def two_servers(
    cluster: JetStreamOptions,
) -> AsyncIterator[tuple[RunningServer, RunningServer, Bus, Bus]]:
    """Run two servers with one JetStream cluster, and a client of each."""
    async with (
        stateless_server(cluster) as first,
        stateless_server(cluster) as second,
        connect(address(first)) as first_bus,
        connect(address(second)) as second_bus,
    ):
        yield first, second, first_bus, second_bus


def cluster_of(up: RunningServer) -> JetStreamBackend:
    assert up.server.jetstream is not None
    return up.server.jetstream


async def until(condition: Callable[[], bool]) -> None:
    with trio.fail_after(PATIENCE_SECONDS):
        while not condition():  # noqa: ASYNC110 - what is looked at has no event.
            await trio.sleep(0.01)


async def wait_until_idle(up: RunningServer) -> None:
    """Return when the server has no feeds and no jobs."""
    await until(lambda: not (cluster_of(up).feeds or cluster_of(up).is_busy))
