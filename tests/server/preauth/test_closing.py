"""Tests of refused connections that wait for the client to close."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import simplebus
from simplebus.core.settings import Settings
from simplebus.core.users.passwords import PasswordVerifier, hash_token
from simplebus.core.users.users import User, Users
from simplebus.nats.settings import NatsLimits, NatsSettings
from simplebus.server import connection, process
from simplebus.server.connection import Connection
from simplebus.server.preauth import closing
from simplebus.server.preauth.closing import ClosingConnections
from simplebus.server.run import RunningServer
from tests.support.nats_peer import NatsPeer, open_nats_peer
from tests.support.running_server import serving, wait_until


class FakeSocket:
    """Socket that must be closed at most once."""

    def __init__(self) -> None:
        self.is_closed = False

    def close(self) -> None:
        assert not self.is_closed
        self.is_closed = True


@given(st.lists(st.sampled_from(["add", "remove", "evict"])), st.integers(1, 4))
def test_oldest_closing_connection_is_closed_first(actions: list[str], closing_max: int) -> None:
    """The oracle is a list."""
    closing_connections, waiting, sockets = (
        ClosingConnections(),
        list[FakeSocket](),
        list[FakeSocket](),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(closing, "CLOSING_CONNECTIONS_MAX", closing_max)
        for action in actions:
            if action == "add":
                sockets.append(FakeSocket())
                waiting.append(sockets[-1])
                closing_connections.add(sockets[-1].close)
                waiting = waiting[-closing_max:]
            elif action == "evict":
                assert closing_connections.close_oldest() == bool(waiting)
                waiting = waiting[1:]
            elif waiting:
                closed = waiting.pop()
                closing_connections.discard(closed.close)
                closing_connections.discard(closed.close)
                sockets.remove(closed)
            assert len(closing_connections) == len(waiting)
            assert [socket for socket in sockets if not socket.is_closed] == waiting


@pytest.fixture
def slow_close(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep up to two closing connections for a long time."""
    monkeypatch.setattr(connection, "CLOSE_FLUSH_SECONDS", 900.0)
    monkeypatch.setattr(closing, "CLOSING_CONNECTIONS_MAX", 2)


USERS = Users((User("ada", token=hash_token("t")),), PasswordVerifier(b"by chance"))


@contextlib.asynccontextmanager
async def server_with_refused_clients(
    places: int,
) -> AsyncIterator[tuple[RunningServer, list[Connection[Any]], list[NatsPeer]]]:
    """Server whose NATS listener accepts `places` connections, and five more clients than that.

    Yields the server, all its connections and their peers. The refused peers have read the error.
    """
    limits = NatsLimits(connections=places, auth_seconds=900)
    settings = NatsSettings(limits, users=USERS)
    async with serving(Settings(), users=USERS, nats_port=0, nats=settings) as server:
        assert server.nats_listener is not None
        connections: dict[Connection[Any], None] = {}
        peers = []
        for _ in range(places + 5):
            peers.append(await open_nats_peer(server))
            await peers[-1].read_info()
            connections |= dict.fromkeys(server.nats_listener.connections.values())
        for peer in peers[:5]:
            assert await peer.read_line() == b"-ERR 'maximum connections exceeded'"
            assert await peer.read_line() == b""
        yield server, list(connections), peers


def open_flags(connections: list[Connection[Any]]) -> list[bool]:
    return [each.socket.fileno() >= 0 for each in connections]


@pytest.mark.usefixtures("slow_close")
async def test_refused_connections_free_their_descriptors() -> None:
    async with server_with_refused_clients(3) as (server, connections, peers):
        await wait_until(lambda: len(server.server.closing_connections) == 2)
        assert open_flags(connections) == [False] * 3 + [True] * 5
        await peers[4].stream.aclose()
        await wait_until(lambda: len(server.server.closing_connections) == 1)
        assert open_flags(connections) == [False] * 3 + [True, False] + [True] * 3


@pytest.mark.usefixtures("slow_close")
async def test_refused_connections_are_closed_first_without_free_descriptors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with server_with_refused_clients(3) as (server, connections, _):
        await wait_until(lambda: len(server.server.closing_connections) == 2)

        def descriptors(more: int = 0) -> int:
            return 0 if sum(open_flags(connections)) >= 5 else 1 << 20

        monkeypatch.setattr(process, "peer_descriptor_limit", descriptors)
        async with simplebus.connect(server.addresses[0], token="t"):
            assert open_flags(connections) == [False] * 4 + [True] * 4


async def test_closed_and_expired_connections_are_removed() -> None:
    async with server_with_refused_clients(1) as (server, connections, peers):
        await peers[0].stream.aclose()
        await wait_until(lambda: not len(server.server.closing_connections))
        assert open_flags(connections) == [False] * 5 + [True]
