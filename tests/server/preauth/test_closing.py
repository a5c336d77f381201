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
from simplebus.nats.users import NatsAuth
from simplebus.server import connection, process
from simplebus.server.connection import Connection
from simplebus.server.preauth import closing
from simplebus.server.preauth.closing import ClosingConnections
from simplebus.server.run import RunningServer
from tests.support.nats_peer import NatsPeer, open_nats_peer
from tests.support.running_server import serving, wait_until


class FakeSocket:
    """A socket that is to be closed once."""

    def __init__(self) -> None:
        self.is_closed = False

    def close(self) -> None:
        assert not self.is_closed
        self.is_closed = True


@given(st.lists(st.sampled_from(["come", "go", "room"])), st.integers(1, 4))
def test_oldest_closing_connection_is_closed_first(done: list[str], most: int) -> None:
    """The same with a list."""
    closing_connections, waiting, there = (
        ClosingConnections(),
        list[FakeSocket](),
        list[FakeSocket](),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(closing, "CLOSING_CONNECTIONS_MAX", most)
        for what in done:
            if what == "come":
                there.append(FakeSocket())
                waiting.append(there[-1])
                closing_connections.add(there[-1].close)
                waiting = waiting[-most:]
            elif what == "room":
                assert closing_connections.close_oldest() == bool(waiting)
                waiting = waiting[1:]
            elif waiting:
                gone = waiting.pop()
                closing_connections.discard(gone.close)
                closing_connections.discard(gone.close)
                there.remove(gone)
            assert len(closing_connections) == len(waiting)
            assert [each for each in there if not each.is_closed] == waiting


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two are waited for, and long."""
    monkeypatch.setattr(connection, "CLOSE_FLUSH_SECONDS", 900.0)
    monkeypatch.setattr(closing, "CLOSING_CONNECTIONS_MAX", 2)


USERS = Users((User("ada", token=hash_token("t")),), PasswordVerifier(b"by chance"))


@contextlib.asynccontextmanager
async def server_with_refused_clients(
    places: int,
) -> AsyncIterator[tuple[RunningServer, list[Connection[Any]], list[NatsPeer]]]:
    """A server whose NATS door has so many places, and five more that came than it has: all
    connections there were, and the peers, that know why they go and stay."""
    limits = NatsLimits(connections=places, auth_seconds=900)
    settings = NatsSettings(limits, auth=NatsAuth(shared_users=USERS))
    async with serving(Settings(), users=USERS, nats_port=0, nats=settings) as server:
        assert server.nats_listener is not None
        connections: dict[Connection[Any], None] = {}
        peers = []
        for _ in range(places + 5):
            peers.append(await open_nats_peer(server))
            await peers[-1].info()
            connections |= dict.fromkeys(server.nats_listener.connections.values())
        for peer in peers[:5]:
            assert await peer.line() == b"-ERR 'maximum connections exceeded'"
            assert await peer.line() == b""
        yield server, list(connections), peers


def are_open(connections: list[Connection[Any]]) -> list[bool]:
    return [each.socket.fileno() >= 0 for each in connections]


@pytest.mark.usefixtures("patient")
async def test_refused_connections_free_their_descriptors() -> None:
    async with server_with_refused_clients(3) as (server, connections, peers):
        await wait_until(lambda: len(server.server.closing_connections) == 2)
        assert are_open(connections) == [False] * 3 + [True] * 5
        await peers[4].stream.aclose()
        await wait_until(lambda: len(server.server.closing_connections) == 1)
        assert are_open(connections) == [False] * 3 + [True, False] + [True] * 3


@pytest.mark.usefixtures("patient")
async def test_refused_connections_are_closed_first_without_free_descriptors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with server_with_refused_clients(3) as (server, connections, _):
        await wait_until(lambda: len(server.server.closing_connections) == 2)

        def descriptors(more: int = 0) -> int:
            return 0 if sum(are_open(connections)) >= 5 else 1 << 20

        monkeypatch.setattr(process, "peer_descriptor_limit", descriptors)
        async with simplebus.connect(server.addresses[0], token="t"):
            assert are_open(connections) == [False] * 4 + [True] * 4


async def test_closed_and_expired_connections_are_removed() -> None:
    async with server_with_refused_clients(1) as (server, connections, peers):
        await peers[0].stream.aclose()
        await wait_until(lambda: not len(server.server.closing_connections))
        assert are_open(connections) == [False] * 5 + [True]
