"""Tests of the eviction of unauthenticated connections, on every listener."""

from __future__ import annotations

import contextlib
import socket
from collections import Counter

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

import simplebus
from simplebus.core.errors import Reason, RemoteProtocolError
from simplebus.core.limits import Limits
from simplebus.core.settings import Settings
from simplebus.core.users.passwords import PasswordVerifier, hash_token
from simplebus.core.users.users import User, Users
from simplebus.nats.settings import NatsLimits, NatsSettings
from simplebus.server import process
from simplebus.server.preauth import eviction as module
from simplebus.server.preauth.eviction import EvictableConnections
from simplebus.server.run import RunningServer
from tests.support.nats_peer import open_nats_peer
from tests.support.running_server import connect, serving, wait_until

FULL = RemoteProtocolError(Reason.TOO_MANY_CONNECTIONS, "full")
USERS = Users((User("ada", token=hash_token("t")),), PasswordVerifier(b"by chance"))
LISTENERS = ("bus", "nats")


def server_with_limit(
    connections_max: int,
) -> contextlib.AbstractAsyncContextManager[RunningServer]:
    """Return a server with one user and a connection limit per listener."""
    return serving(
        Settings(Limits(connections=connections_max, hello_seconds=900)),
        users=USERS,
        nats_port=0,
        nats=NatsSettings(
            NatsLimits(connections=connections_max, auth_seconds=900),
            users=USERS,
        ),
    )


async def open_connection(server: RunningServer, listener: str) -> trio.SocketStream:
    """Open a connection that does not authenticate."""
    address = (server.addresses if listener == "bus" else server.nats_addresses)[0]
    host, _, port = address.rpartition(":")
    return await trio.open_tcp_stream(host, int(port))


async def connect_authenticated(
    server: RunningServer, listener: str, stack: contextlib.AsyncExitStack
) -> None:
    """Connect a client with a valid token."""
    if listener == "bus":
        bus = simplebus.connect(server.addresses[0], token="t")
        await stack.enter_async_context(bus)
    else:
        peer = await open_nats_peer(server)
        stack.push_async_callback(peer.stream.aclose)
        await peer.send(b'CONNECT {"verbose":false,"auth_token":"t"}\r\nPING\r\n')
        await peer.read_info()
        assert await peer.read_line() == b"PONG"


async def wait_closed(stream: trio.SocketStream) -> bool:
    with contextlib.suppress(trio.BrokenResourceError):
        while await stream.receive_some():
            pass
    return True


@pytest.mark.parametrize("listener", LISTENERS)
async def test_authenticated_client_replaces_unauthenticated_ones(listener: str) -> None:
    async with server_with_limit(3) as server, contextlib.AsyncExitStack() as stack:
        connections = [
            await stack.enter_async_context(await open_connection(server, listener))
            for _ in range(3)
        ]
        for connection in connections:  # The oldest is evicted first.
            await connect_authenticated(server, listener, stack)
            assert await wait_closed(connection)
        assert server.server.disconnect_counts == {Reason.TOO_MANY_CONNECTIONS: 3}
        late = await stack.enter_async_context(await open_connection(server, listener))
        assert await wait_closed(late)  # Authenticated clients stay.
        assert server.nats_listener is not None
        assert len(server.server.connections) + len(server.nats_listener.connections) == 3


@pytest.mark.parametrize("users", [USERS, None], ids=["users", "nobody"])
async def test_refused_connection_evicts_no_other(users: Users | None) -> None:
    """Many connections arrive in one turn of the event loop."""
    settings = NatsSettings(NatsLimits(connections=3, auth_seconds=900), users=users)
    async with (
        serving(users=users, nats_port=0, nats=settings) as server,
        contextlib.AsyncExitStack() as stack,
    ):
        for _ in range(3):
            await connect_authenticated(server, "nats", stack)
        host, _, port = server.nats_addresses[0].rpartition(":")
        crowd = [
            stack.enter_context(socket.create_connection((host, int(port)))) for _ in range(12)
        ]
        assert server.nats_listener is not None
        await wait_until(lambda: server.server.disconnect_counts[Reason.TOO_MANY_CONNECTIONS] == 12)
        assert len(server.nats_listener.connections) == 3
        for each in crowd:
            each.close()


@pytest.mark.parametrize("listener", LISTENERS)
async def test_authenticated_client_evicts_one_without_free_descriptors(
    listener: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with server_with_limit(1000) as server, contextlib.AsyncExitStack() as stack:
        connections = [
            await stack.enter_async_context(await open_connection(server, "bus")) for _ in range(20)
        ]
        await wait_until(lambda: len(server.server.evictable_connections) == 20)
        sockets = [connection.socket for connection in server.server.connections.values()]

        def descriptors(more: int = 0) -> int:
            return 0 if all(each.fileno() >= 0 for each in sockets) else 1 << 20

        monkeypatch.setattr(process, "peer_descriptor_limit", descriptors)
        await connect_authenticated(server, listener, stack)
        assert await wait_closed(connections[0])


async def test_authenticated_and_closed_connections_are_not_evictable() -> None:
    async with server_with_limit(9) as server, contextlib.AsyncExitStack() as stack:
        for listener in LISTENERS:
            await connect_authenticated(server, listener, stack)
        async with await open_connection(server, "bus"):
            await wait_until(lambda: len(server.server.evictable_connections) == 1)
        await wait_until(lambda: not len(server.server.evictable_connections))
        assert server.nats_listener is not None
        assert not len(server.nats_listener.evictable_connections)
    async with serving() as open_to_all:
        peer = await connect(open_to_all, [1])
        assert not len(open_to_all.server.evictable_connections)
        await peer.stream.aclose()


class FakeConnection:
    """Connection of a network that may be evicted once."""

    def __init__(self, network: str) -> None:
        self.network = network
        self.is_disconnected = False

    def disconnect(self, error: RemoteProtocolError) -> None:
        assert error is FULL
        assert not self.is_disconnected
        self.is_disconnected = True


@given(
    st.lists(st.tuples(st.sampled_from("abcdefgh"), st.sampled_from(["add", "remove", "evict"]))),
    st.sampled_from([2, 4]),
)
def test_evicts_the_oldest_of_a_large_network_or_of_all(
    actions: list[tuple[str, str]], fraction: int
) -> None:
    """The oracle is a list that is searched."""
    connections, open_connections = EvictableConnections(), list[FakeConnection]()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "LARGE_NETWORK_FRACTION", fraction)
        for network, action in actions:
            same_network = [each for each in open_connections if each.network == network]
            if action == "add":
                open_connections.append(FakeConnection(network))
                connections.add(network, open_connections[-1].disconnect)
            elif action == "remove" and same_network:
                open_connections.remove(same_network[-1])
                connections.discard(same_network[-1].disconnect)
                connections.discard(same_network[-1].disconnect)
            elif action == "evict":
                assert connections.evict_one(FULL) == bool(open_connections)
                if not open_connections:
                    continue
                (evicted,) = (each for each in open_connections if each.is_disconnected)
                counts = Counter(each.network for each in open_connections)
                largest = max(counts.values())
                if largest * fraction > len(open_connections):
                    assert counts[evicted.network] == largest
                    assert evicted is next(
                        each for each in open_connections if each.network == evicted.network
                    )
                else:
                    assert evicted is open_connections[0]
                open_connections.remove(evicted)
                connections.discard(evicted.disconnect)
            assert len(connections) == len(open_connections)
        while open_connections:
            assert connections.evict_one(FULL)
            open_connections = [each for each in open_connections if not each.is_disconnected]
        assert not connections.evict_one(FULL)
