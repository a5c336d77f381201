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

PATIENCE_SECONDS = 240.0
_prefixes = count()


def options(*urls: str, prefix: str = "", **serve_options: Any) -> JetStreamOptions:
    """Build JetStream options with a prefix that no other test uses, unless `prefix` is given."""
    prefix = prefix or f"t{next(_prefixes)}"
    servers = tuple(NatsAddress.parse(url) for url in urls)
    return JetStreamOptions(servers, JetStreamNames(prefix), storage="memory", **serve_options)


@asynccontextmanager
async def stateless_server(
    cluster: JetStreamOptions, settings: Settings | None = None, **serve_options: Any
) -> AsyncIterator[RunningServer]:
    async with serving(settings, cluster=cluster, **serve_options) as server:
        yield server


def address(server: RunningServer) -> str:
    return f"simplebus://{server.addresses[0]}"


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


def cluster_of(server: RunningServer) -> JetStreamBackend:
    assert server.server.jetstream is not None
    return server.server.jetstream


async def until(condition: Callable[[], bool]) -> None:
    with trio.fail_after(PATIENCE_SECONDS):
        while not condition():  # noqa: ASYNC110 - no event exists to wait for.
            await trio.sleep(0.01)


async def wait_until_idle(server: RunningServer) -> None:
    """Return when the server has no feeds and no jobs."""
    await until(lambda: not (cluster_of(server).feeds or cluster_of(server).is_busy))
