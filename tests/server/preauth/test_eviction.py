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
from simplebus.nats.users import NatsAuth
from simplebus.server import process
from simplebus.server.preauth import eviction as module
from simplebus.server.preauth.eviction import EvictableConnections
from simplebus.server.run import RunningServer
from tests.support.nats_peer import open_nats_peer
from tests.support.running_server import connect, serving, wait_until

FULL = RemoteProtocolError(Reason.TOO_MANY_CONNECTIONS, "full")
USERS = Users((User("ada", token=hash_token("t")),), PasswordVerifier(b"by chance"))
DOORS = ("bus", "nats")


def server_with_limit(most: int) -> contextlib.AbstractAsyncContextManager[RunningServer]:
    """A server that knows a user, and lets in so many at each door."""
    return serving(
        Settings(Limits(connections=most, hello_seconds=900)),
        users=USERS,
        nats_port=0,
        nats=NatsSettings(
            NatsLimits(connections=most, auth_seconds=900), auth=NatsAuth(shared_users=USERS)
        ),
    )


async def open_connection(server: RunningServer, door: str) -> trio.SocketStream:
    """A stranger."""
    address = (server.addresses if door == "bus" else server.nats_addresses)[0]
    host, _, port = address.rpartition(":")
    return await trio.open_tcp_stream(host, int(port))


async def connect_authenticated(
    server: RunningServer, door: str, stack: contextlib.AsyncExitStack
) -> None:
    """One who has a token, and is let in."""
    if door == "bus":
        bus = simplebus.connect(server.addresses[0], token="t")
        await stack.enter_async_context(bus)
    else:
        peer = await open_nats_peer(server)
        stack.push_async_callback(peer.stream.aclose)
        await peer.send(b'CONNECT {"verbose":false,"auth_token":"t"}\r\nPING\r\n')
        await peer.read_info()
        assert await peer.read_line() == b"PONG"


async def is_cut(stream: trio.SocketStream) -> bool:
    with contextlib.suppress(trio.BrokenResourceError):
        while await stream.receive_some():
            pass
    return True


@pytest.mark.parametrize("door", DOORS)
async def test_authenticated_client_replaces_unauthenticated_ones(door: str) -> None:
    async with server_with_limit(3) as server, contextlib.AsyncExitStack() as stack:
        evictable_connections = [
            await stack.enter_async_context(await open_connection(server, door)) for _ in range(3)
        ]
        for stranger in evictable_connections:  # The one that is there longest goes first.
            await connect_authenticated(server, door, stack)
            assert await is_cut(stranger)
        assert server.server.disconnect_counts == {Reason.TOO_MANY_CONNECTIONS: 3}
        late = await stack.enter_async_context(await open_connection(server, door))
        assert await is_cut(late)  # Those inside stay.
        assert server.nats_listener is not None
        assert len(server.server.connections) + len(server.nats_listener.connections) == 3


@pytest.mark.parametrize("users", [USERS, None], ids=["users", "nobody"])
async def test_refused_connection_evicts_no_other(users: Users | None) -> None:
    """Many that come in one turn of the loop."""
    auth = NatsAuth(shared_users=users) if users is not None else NatsAuth()
    settings = NatsSettings(NatsLimits(connections=3, auth_seconds=900), auth=auth)
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


@pytest.mark.parametrize("door", DOORS)
async def test_authenticated_client_evicts_one_without_free_descriptors(
    door: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with server_with_limit(1000) as server, contextlib.AsyncExitStack() as stack:
        evictable_connections = [
            await stack.enter_async_context(await open_connection(server, "bus")) for _ in range(20)
        ]
        await wait_until(lambda: len(server.server.evictable_connections) == 20)
        sockets = [each.socket for each in server.server.connections.values()]

        def descriptors(more: int = 0) -> int:
            return 0 if all(each.fileno() >= 0 for each in sockets) else 1 << 20

        monkeypatch.setattr(process, "peer_descriptor_limit", descriptors)
        await connect_authenticated(server, door, stack)
        assert await is_cut(evictable_connections[0])


async def test_authenticated_and_closed_connections_are_not_evictable() -> None:
    async with server_with_limit(9) as server, contextlib.AsyncExitStack() as stack:
        for door in DOORS:
            await connect_authenticated(server, door, stack)
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
    """One of many; told apart by which it is."""

    def __init__(self, place: str) -> None:
        self.network = place
        self.is_disconnected = False

    def disconnect(self, error: RemoteProtocolError) -> None:
        assert error is FULL
        assert not self.is_disconnected
        self.is_disconnected = True


@given(
    st.lists(st.tuples(st.sampled_from("abcdefgh"), st.sampled_from(["come", "go", "room"]))),
    st.sampled_from([2, 4]),
)
def test_evicts_the_oldest_of_a_large_network_or_of_all(
    done: list[tuple[str, str]], part: int
) -> None:
    """The same with a list that is looked through."""
    evictable_connections, there = EvictableConnections(), list[FakeConnection]()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "LARGE_NETWORK_FRACTION", part)
        for place, what in done:
            own = [each for each in there if each.network == place]
            if what == "come":
                there.append(FakeConnection(place))
                evictable_connections.add(place, there[-1].disconnect)
            elif what == "go" and own:
                there.remove(own[-1])
                evictable_connections.discard(own[-1].disconnect)
                evictable_connections.discard(own[-1].disconnect)
            elif what == "room":
                assert evictable_connections.evict_one(FULL) == bool(there)
                if not there:
                    continue
                (gone,) = (each for each in there if each.is_disconnected)
                counts = Counter(each.network for each in there)
                most = max(counts.values())
                if most * part > len(there):
                    assert counts[gone.network] == most
                    assert gone is next(each for each in there if each.network == gone.network)
                else:
                    assert gone is there[0]
                there.remove(gone)
                evictable_connections.discard(gone.disconnect)
            assert len(evictable_connections) == len(there)
        while there:
            assert evictable_connections.evict_one(FULL)
            there = [each for each in there if not each.is_disconnected]
        assert not evictable_connections.evict_one(FULL)
