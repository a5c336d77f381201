"""Owners of durables and groups apply at every server."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

import pytest

import simplebus
from simplebus.core.errors import RefusedError
from simplebus.core.protocol import frames
from simplebus.core.users.passwords import PasswordVerifier
from simplebus.core.users.permissions import AdminRight
from simplebus.core.users.users import Users
from simplebus.server.run import RunningServer
from tests.behaviour.wire_peer_v2 import connect_request, subscribe
from tests.core.authorization.users import create_user
from tests.jetstream.nats_servers import NatsServer
from tests.jetstream.stateless_servers import address, cluster_of, options, stateless_server, until
from tests.support import running_server

USERS = Users(
    [
        create_user("ada"),
        create_user("bob"),
        create_user("eu", "1 eu.#"),
        create_user("keeper", admin=((AdminRight.CONFIGURE, "*"),)),
    ],
    PasswordVerifier(b"by chance"),
)


@contextlib.asynccontextmanager
async def two_servers_with_users(server: NatsServer) -> AsyncIterator[list[RunningServer]]:
    cluster = options(server.url)
    async with (
        stateless_server(cluster, users=USERS) as first_server,
        stateless_server(cluster, users=USERS) as second_server,
    ):
        yield [first_server, second_server]


async def subscribe_refusal(
    server: RunningServer, user: str, *, forget: bool = False, **subscribe_options: str
) -> str:
    """Subscribe and close again. Return the refusal, or "" if the subscription was accepted."""
    async with simplebus.connect(address(server), token=user) as bus:
        try:
            async with bus.subscribe(1, **subscribe_options) as messages:
                if forget:
                    messages.forget()
        except RefusedError as error:
            return str(error)
    await until(lambda: not cluster_of(server).is_busy)
    return ""


@pytest.mark.parametrize("first", [0, 1])
async def test_durable_belongs_to_its_creator_at_every_server(
    jetstream_server: NatsServer, first: int
) -> None:
    async with two_servers_with_users(jetstream_server) as stateless_servers:
        assert await subscribe_refusal(stateless_servers[first], "ada", durable="d") == ""
        for server in stateless_servers:
            refusal = await subscribe_refusal(server, "bob", durable="d")
            assert "the durable 'd': it belongs to another user" in refusal
            assert await subscribe_refusal(server, "ada", durable="d") == ""
            assert await subscribe_refusal(server, "keeper", durable="d") == ""
        assert await subscribe_refusal(stateless_servers[0], "ada", durable="d", forget=True) == ""
        assert await subscribe_refusal(stateless_servers[1], "bob", durable="d") == ""
        assert "it belongs to another user" in await subscribe_refusal(
            stateless_servers[0], "ada", durable="d"
        )


async def test_group_requires_the_visibility_of_its_creator(
    jetstream_server: NatsServer,
) -> None:
    async with two_servers_with_users(jetstream_server) as stateless_servers:
        assert await subscribe_refusal(stateless_servers[0], "ada", group="g") == ""
        assert await subscribe_refusal(stateless_servers[1], "bob", group="g") == ""
        assert "messages that this user may not see" in await subscribe_refusal(
            stateless_servers[1], "eu", group="g"
        )


async def test_refuses_seek_of_another_users_durable(jetstream_server: NatsServer) -> None:
    async with two_servers_with_users(jetstream_server) as stateless_servers:
        assert await subscribe_refusal(stateless_servers[0], "ada", durable="d") == ""
        for user in ("bob", "ada", "keeper"):
            peer = await running_server.connect(stateless_servers[1])
            await peer.send(connect_request(1, auth={"token": user}))
            assert (await peer.read_frame())[0] == frames.CONNECT
            await peer.send(subscribe(1, 1, durable="d", start="earliest", seek=True))
            reply = await peer.read_frame()
            assert (b"may not move or remove" in reply) == (user == "bob")
            assert (reply[0] == frames.SUBSCRIBE) == (user != "bob")
            await peer.stream.aclose()
            await until(
                lambda: (
                    not (
                        cluster_of(stateless_servers[1]).feeds
                        or cluster_of(stateless_servers[1]).is_busy
                    )
                )
            )
