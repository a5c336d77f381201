"""Real nats-servers whose connections to each other, but not to clients, can be cut."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from itertools import permutations
from pathlib import Path

import trio

from load.ports import HOST, free_ports
from tests.jetstream.nats_servers import NatsServer

_READ_BYTES = 65_536


class Way:
    """Proxy of the connections from one server to another."""

    def __init__(self, target: int) -> None:
        self._target = target
        self._is_cut = False
        self._scopes: set[trio.CancelScope] = set()

    def cut(self) -> None:
        """Close all connections and refuse new ones."""
        self._is_cut = True
        for scope in self._scopes:
            scope.cancel()

    def mend(self) -> None:
        self._is_cut = False

    async def carry(self, stream: trio.SocketStream) -> None:
        """Relay one connection."""
        with trio.CancelScope() as scope, suppress(OSError, trio.BrokenResourceError):
            if self._is_cut:
                return
            self._scopes.add(scope)
            try:
                async with (
                    await trio.open_tcp_stream(HOST, self._target) as other,
                    trio.open_nursery() as nursery,
                ):
                    nursery.start_soon(_pass_on, stream, other, nursery.cancel_scope)
                    await _pass_on(other, stream, nursery.cancel_scope)
            finally:
                self._scopes.discard(scope)


async def _pass_on(here: trio.SocketStream, to: trio.SocketStream, scope: trio.CancelScope) -> None:
    with suppress(OSError, trio.BrokenResourceError, trio.ClosedResourceError):
        while data := await here.receive_some(_READ_BYTES):
            await to.send_all(data)
    scope.cancel()


class PartitionedCluster:
    """Cluster of nats-servers whose connections to each other can be cut."""

    def __init__(self, servers: list[NatsServer], ways: dict[tuple[int, int], Way]) -> None:
        self.servers = servers
        self._ways = ways

    def cut_off(self, number: int) -> None:
        """Cut the connections between this server and the others."""
        for ends, way in self._ways.items():
            if number in ends:
                way.cut()

    def mend(self) -> None:
        for way in self._ways.values():
            way.mend()


@asynccontextmanager
async def partitioned_cluster(folder: Path, size: int = 3) -> AsyncIterator[PartitionedCluster]:
    """Run a cluster for the duration of a block."""
    clients, routes = free_ports(size), free_ports(size)
    ends = list(permutations(range(size), 2))
    stateless_servers = dict(zip(ends, free_ports(len(ends)), strict=True))
    ways = {(one, other): Way(routes[other]) for one, other in ends}
    servers = []
    for number in range(size):
        known = ", ".join(
            f'"nats://{HOST}:{stateless_servers[end]}"' for end in ends if end[0] == number
        )
        # Where others could find it directly, nobody listens.
        more = f'listen: "{HOST}:{routes[number]}", advertise: "{HOST}:1", no_advertise: true'
        more = f"cluster {{ name: c, {more}, routes: [{known}] }}"
        servers.append(NatsServer(folder, f"n{number}", clients[number], more))
    async with trio.open_nursery() as nursery:
        for end, way in ways.items():
            await nursery.start(_listen, way, stateless_servers[end])
        try:
            for server in servers:
                server.start()
            yield PartitionedCluster(servers, ways)
        finally:
            for server in servers:
                server.kill()
        nursery.cancel_scope.cancel()


async def _listen(way: Way, port: int, *, task_status: trio.TaskStatus[object]) -> None:
    await trio.serve_tcp(way.carry, port, host=HOST, task_status=task_status)
