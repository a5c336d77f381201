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


class ServerRoute:
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

    def reconnect(self) -> None:
        self._is_cut = False

    async def relay(self, stream: trio.SocketStream) -> None:
        """Relay one connection."""
        with trio.CancelScope() as scope, suppress(OSError, trio.BrokenResourceError):
            if self._is_cut:
                return
            self._scopes.add(scope)
            try:
                async with (
                    await trio.open_tcp_stream(HOST, self._target) as target_stream,
                    trio.open_nursery() as nursery,
                ):
                    nursery.start_soon(_copy_bytes, stream, target_stream, nursery.cancel_scope)
                    await _copy_bytes(target_stream, stream, nursery.cancel_scope)
            finally:
                self._scopes.discard(scope)


async def _copy_bytes(
    source: trio.SocketStream, target: trio.SocketStream, scope: trio.CancelScope
) -> None:
    with suppress(OSError, trio.BrokenResourceError, trio.ClosedResourceError):
        while data := await source.receive_some(_READ_BYTES):
            await target.send_all(data)
    scope.cancel()


class PartitionedCluster:
    """Cluster of nats-servers whose connections to each other can be cut."""

    def __init__(
        self, servers: list[NatsServer], routes_by_ends: dict[tuple[int, int], ServerRoute]
    ) -> None:
        self.servers = servers
        self._routes = routes_by_ends

    def cut_off(self, number: int) -> None:
        """Cut the connections between this server and the others."""
        for ends, route in self._routes.items():
            if number in ends:
                route.cut()

    def reconnect(self) -> None:
        for route in self._routes.values():
            route.reconnect()


@asynccontextmanager
async def partitioned_cluster(folder: Path, size: int = 3) -> AsyncIterator[PartitionedCluster]:
    """Run a cluster for the duration of a block."""
    clients, routes = free_ports(size), free_ports(size)
    ends = list(permutations(range(size), 2))
    proxy_ports = dict(zip(ends, free_ports(len(ends)), strict=True))
    routes_by_ends = {(start, end): ServerRoute(routes[end]) for start, end in ends}
    servers = []
    for number in range(size):
        route_urls = ", ".join(
            f'"nats://{HOST}:{proxy_ports[end]}"' for end in ends if end[0] == number
        )
        # Peers cannot connect directly: the advertised port is closed.
        extra_config = (
            f'listen: "{HOST}:{routes[number]}", advertise: "{HOST}:1", no_advertise: true'
        )
        extra_config = f"cluster {{ name: c, {extra_config}, routes: [{route_urls}] }}"
        servers.append(NatsServer(folder, f"n{number}", clients[number], extra_config))
    async with trio.open_nursery() as nursery:
        for end, route in routes_by_ends.items():
            await nursery.start(_listen, route, proxy_ports[end])
        try:
            for server in servers:
                server.start()
            yield PartitionedCluster(servers, routes_by_ends)
        finally:
            for server in servers:
                server.kill()
        nursery.cancel_scope.cancel()


async def _listen(route: ServerRoute, port: int, *, task_status: trio.TaskStatus[object]) -> None:
    await trio.serve_tcp(route.relay, port, host=HOST, task_status=task_status)
