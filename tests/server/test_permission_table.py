"""The permission table (security.md) in version 1, at the NATS port and at the HTTP port."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

import pytest

import simplebus
from simplebus.core.errors import Reason
from simplebus.core.protocol import frames
from simplebus.core.protocol.requests import NamedClass
from simplebus.core.users.passwords import hash_token
from simplebus.core.users.permissions import (
    AdminRight,
    PermissionRule,
    PermissionRules,
    Permissions,
)
from simplebus.core.users.users import User, Users
from simplebus.nats.settings import NatsSettings
from simplebus.server.run import RunningServer
from tests.support.http_peer import open_http_peer
from tests.support.nats_peer import NatsPeer, connect_nats_peer
from tests.support.running_server import connect, message, serving, subscribe, wait_until

DENIED = (PermissionRule("secret"),)
NO_CLASS = PermissionRules(())
ALL_RIGHTS = tuple((right, "*") for right in AdminRight)
CLASSES = tuple(
    NamedClass(id=class_id, name=name, subjects=[f"{name}.>"])
    for class_id, name in ((6, "free"), (7, "secret"), (8, "dead.secret"))
)
TABLE = {
    "all rights": (Permissions(admin=ALL_RIGHTS), {"publish", "subscribe", "monitor"}),
    "nothing": (Permissions(NO_CLASS, NO_CLASS), set()),
    "admin rights": (
        Permissions(NO_CLASS, NO_CLASS, tuple((r, "*") for r in AdminRight)),
        {"monitor"},
    ),
    "publish": (Permissions(subscribe=NO_CLASS), {"publish"}),
    "subscribe": (Permissions(publish=NO_CLASS), {"subscribe"}),
    "denied": (
        Permissions(PermissionRules(None, DENIED), PermissionRules(None, DENIED), ALL_RIGHTS),
        set(),
    ),
    "subscribe denied": (
        Permissions(subscribe=PermissionRules(None, DENIED), admin=ALL_RIGHTS),
        {"publish"},
    ),
    "publish denied": (
        Permissions(publish=PermissionRules(None, DENIED), admin=ALL_RIGHTS),
        {"subscribe", "monitor"},
    ),
}


@pytest.fixture(params=TABLE)
def row(request: pytest.FixtureRequest) -> tuple[Permissions, set[str]]:
    return TABLE[request.param]


@contextlib.asynccontextmanager
async def serving_user(permissions: Permissions) -> AsyncIterator[RunningServer]:
    """Run a server for one restricted user, whom version 1 clients are too, and for "boss"."""
    till = User("till", token=hash_token("t"), addresses=("127.0.0.0/8",), permissions=permissions)
    users = Users((till, User("boss", token=hash_token("b"))))
    async with serving(
        users=users, classes=CLASSES, nats_port=0, nats=NatsSettings(users=users), http_port=0
    ) as server:
        yield server


@pytest.mark.parametrize("class_id", [7, 8])
async def test_version_1(row: tuple[Permissions, set[str]], class_id: int) -> None:
    permissions, expected = row
    greeting = frames.encode(frames.CONNECT, content=b"[%d]" % class_id)
    async with serving_user(permissions) as server:
        cls = server.server.broker.classes[class_id]
        for action, request, is_done in (
            ("publish", message(b"x", class_id), lambda: cls.ring.head == 1),
            ("subscribe", subscribe(class_id), lambda: cls.positions),
        ):
            peer = await connect(server)
            await peer.send(greeting + request)
            if action in expected:
                await wait_until(is_done)
            else:
                assert await peer.wait_closed()
                assert not is_done()
                assert server.server.disconnect_counts[Reason.UNAUTHORIZED]


async def read_lines(client: NatsPeer) -> bytes:
    """Return everything that the client has received until now."""
    await client.send(b"PING\r\n")
    lines = b""
    while (line := await client.read_line()) != b"PONG":
        lines += line + b"\n"
    return lines


@pytest.mark.parametrize("name", ["secret", "dead.secret"])
async def test_nats_subjects_of_a_class(row: tuple[Permissions, set[str]], name: str) -> None:
    permissions, expected = row
    subject = name.encode() + b".plans"
    async with serving_user(permissions) as server:
        client = await connect_nats_peer(server, auth_token="t")
        await client.send(b"SUB > 1\r\nSUB %b 2\r\n" % subject)
        await client.send(b"PUB %b 1\r\nx\r\n" % subject)
        lines = await read_lines(client)
        assert (b"Violation for Publish" in lines) == ("publish" not in expected)
        boss = await connect_nats_peer(server, auth_token="b")
        await boss.send(b"PUB %b 1\r\ny\r\n" % subject)
        await read_lines(boss)
        received = (await read_lines(client)).count(b"MSG " + subject)
        assert received == (2 if "subscribe" in expected else 0)
        await client.send(b"SUB $SB.SUB.%b 3\r\n" % name.replace(".", "%2e").encode())
        refused = b"Violation for Subscription" in await read_lines(client)
        assert refused == ("subscribe" not in expected)


async def test_http_port(row: tuple[Permissions, set[str]]) -> None:
    permissions, expected = row
    async with serving_user(permissions) as server:
        for path in ("/metrics", "/", "/varz", "/connz", "/subsz"):
            peer = await open_http_peer(server)
            status = (await peer.request(path, "Authorization: Bearer t")).status
            assert (status == 200) == ("monitor" in expected), (path, status)
            assert status in (200, 403)


async def test_dead_letter_commands_respect_denials() -> None:
    permissions, _ = TABLE["denied"]
    async with (
        serving_user(permissions) as server,
        simplebus.connect(server.addresses[0], token="t") as bus,
    ):
        for name in ("secret", "dead.secret"):
            with pytest.raises(simplebus.BusError):
                await bus.explain(name)
