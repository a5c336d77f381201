"""Tests of permissions on all listeners, and of changes of users."""

from __future__ import annotations

from dataclasses import replace

import pytest
import trio

import simplebus
from simplebus.core.broker.broker import Settings
from simplebus.core.protocol import frames
from simplebus.core.protocol.requests import Auth, ConnectRequest, NamedClass
from simplebus.core.users.passwords import PasswordVerifier, hash_token
from simplebus.core.users.permissions import REPLIES_CLASS, AdminRight, Permissions
from simplebus.core.users.rate_limit import UNLIMITED, RateLimit
from simplebus.core.users.users import User, Users
from simplebus.nats.settings import NatsSettings
from simplebus.server.run import ServeOptions, reload
from tests.server.test_users import (
    ADA,
    ADA_LOGIN,
    BOB,
    BOB_LOGIN,
    nats_user,
    rules,
    server_with_users,
)
from tests.support.nats_peer import open_nats_peer
from tests.support.running_server import connect, message, wait_until


async def test_rate_limited_publishers_wait_without_loss() -> None:
    limited_user = User("hasty", token=hash_token("t"), rate=RateLimit(400))
    old = User("old", addresses=("127.0.0.0/8",), rate=RateLimit(bytes=20_000))
    async with (
        server_with_users(ADA, limited_user, old) as server,
        simplebus.connect(server.addresses[0], user="ada", password="secret") as ada,
        ada.subscribe("orders") as messages,
        simplebus.connect(server.addresses[0], token="t") as bus,
    ):
        client = await nats_user(server, '"auth_token":"t"')
        peer = await connect(server, [5])
        for n in range(250):
            await bus.publish(b"2 %d" % n, class_id="orders", confirm=False)
        await client.send(b"PUB us.paid 5\r\nn 123\r\n" * 250)
        await peer.send(b"".join(message((b"1 %d" % n).ljust(100), 5) for n in range(250)))
        received = [(await messages.get(timeout=60)).payload.split() for _ in range(750)]
        for version in (b"1", b"2"):
            assert [int(n) for w, n in received if w == version] == list(range(250))
        await bus.flush()
        assert not server.server.disconnect_counts


async def test_changed_limits_apply_to_open_connections() -> None:
    before = User("bob", token=hash_token("t"), rate=RateLimit(0.001))
    async with (
        server_with_users(before) as server,
        simplebus.connect(server.addresses[0], token="t") as bus,
    ):
        client = await nats_user(server, '"auth_token":"t"')
        await client.send(b"PUB us.paid 1\r\nx\r\n" * 20)
        for _ in range(20):
            await bus.publish(b"x", class_id="orders", confirm=False)
        after = Users(
            [replace(before, rate=UNLIMITED, connections=1)], PasswordVerifier(b"by chance")
        )
        server.server.replace_users(after)
        server.server.apply_rate_limits(UNLIMITED)
        assert server.nats_listener is not None
        for _ in server.nats_listener.apply_settings_in_parts(NatsSettings(users=after)):
            pass
        for _ in server.nats_listener.apply_rate_limits_in_parts():
            pass
        server.server.flush_ready()
        await bus.flush()
        await wait_until(lambda: server.server.broker.classes[5].ring.head == 40)
        with pytest.raises(simplebus.BusConnectionError, match="1 are allowed"):
            async with simplebus.connect(server.addresses[0], token="t"):
                pass


async def test_empty_user_table_admits_no_client() -> None:
    async with server_with_users() as server:
        with pytest.raises(simplebus.BusConnectionError, match="this bus requires authentication"):
            async with simplebus.connect(server.addresses[0]):
                pass
        client = await open_nats_peer(server)
        assert (await client.read_info())["auth_required"] is True
        await client.send(b"PUB a 1\r\nx\r\nPING\r\n")
        assert await client.read_until_closed() == b"-ERR 'Authorization Violation'\r\n"


async def test_reload_without_users_keeps_authentication(caplog: pytest.LogCaptureFixture) -> None:
    async with server_with_users(ADA) as server:
        options = ServeOptions(users=None)
        await reload(server, ServeOptions(reload=lambda: (Settings(), options, lambda: None)))
        assert "the new settings have no users, so every client could connect" in caplog.text
        assert server.server.broker.users is not None


async def test_whole_channel_rule_applies_to_all_listeners() -> None:
    user = User("few", token=hash_token("f"), permissions=Permissions(wildcards=False, admin=()))
    async with (
        server_with_users(ADA, user) as server,
        simplebus.connect(server.addresses[0], token="f") as bus,
    ):
        client = await nats_user(server, '"auth_token":"f"')
        for subject in (b">", b"*.paid", b"eu.>", b"_INBOX.>", b"_INBOX.*"):
            await client.send(b"SUB %b 1\r\n" % subject)
            denied = b"-ERR 'Permissions Violation for Subscription to \"%b\"'" % subject
            assert await client.read_line() == denied
        await client.send(b"SUB eu.paid 1\r\nSUB _INBOX.mine.* 2\r\n")
        await client.flush()
        await bus.publish(b"x", class_id="orders", channel="eu.paid")
        with pytest.raises(simplebus.RefusedError, match="right 'fetch'"):
            await bus.fetch("orders", 0, 10)


async def test_denied_channels_are_denied_as_dead_letters() -> None:
    restricted_user = User(
        "some",
        token=hash_token("s"),
        permissions=Permissions(subscribe=rules(deny=("orders *.secret",))),
    )
    denied_user = User(
        "none", token=hash_token("n"), permissions=Permissions(subscribe=rules(deny=("orders",)))
    )
    async with (
        server_with_users(ADA, restricted_user, denied_user) as server,
        simplebus.connect(server.addresses[0], user="ada", password="secret") as ada,
        simplebus.connect(server.addresses[0], token="s") as bus,
        simplebus.connect(server.addresses[0], token="n") as denied_bus,
    ):
        for channel in ("us.secret", "us.paid"):
            await ada.publish(b"x", class_id="dead.orders", channel=channel)
        async with bus.subscribe("dead.orders") as messages:
            assert (await messages.get(timeout=60)).channel == "us.paid"
        for request in (denied_bus.fetch("dead.orders", 0, 10), bus.fetch("dead.orders", 0, 10)):
            with pytest.raises(simplebus.RefusedError, match="unauthorized"):
                await request
        client = await nats_user(server, '"auth_token":"n"')
        await client.send(b"SUB $SB.SUB.dead%2Eorders 1\r\n")
        assert b"may not subscribe" in await client.read_line()


async def test_no_user_can_impersonate_a_class() -> None:
    async with server_with_users(ADA, BOB) as server:
        ada, bob = await nats_user(server, ADA_LOGIN), await nats_user(server, BOB_LOGIN)
        await ada.send(b"SUB class.> 1\r\n")
        await ada.flush()
        async with simplebus.connect(server.addresses[0], user="ada", password="secret") as bus:
            await bus.publish(b"x", class_id="hidden")
        assert await ada.read_line() == b"MSG class.hidden 1 1"
        assert await ada.read_line() == b"x"
        for subject in (b"class.hidden", b"class.orders", b"class.5", b"class.other"):
            await bob.send(b"PUB %b 1\r\nx\r\n" % subject)
            denied = b"-ERR 'Permissions Violation for Publish to \"%b\"'" % subject
            assert await bob.read_line() == denied
        await bob.send(b"PUB class.7 1\r\ny\r\n")  # To which it may publish.
        await bob.flush()
        assert await ada.read_line() == b"MSG class.7 1 1"


async def test_naming_a_class_requires_permission_for_its_id() -> None:
    user = User(
        "mine",
        token=hash_token("m"),
        permissions=Permissions(
            rules("mine.*", "8"), rules("mine.*"), ((AdminRight.CONFIGURE, "mine.*"),)
        ),
    )
    async with server_with_users(ADA, user) as server:
        for named, reason in (
            (NamedClass(id=9, name="mine.nine"), "has no permissions in class 9"),
            (NamedClass(name="mine.x", subjects=["eu.>"]), "may not bind subjects"),
        ):
            peer = await connect(server)
            hello = ConnectRequest(2, auth=Auth(token="m"), classes=[named])
            await peer.send(frames.encode(frames.CONNECT, content=hello.encode()))
            assert reason.encode() in await peer.read_frame()
        peer = await connect(server)
        may = [NamedClass(id=8, name="mine.eight"), NamedClass(name="mine.y", last_values=True)]
        hello = ConnectRequest(2, auth=Auth(token="m"), classes=may)
        await peer.send(frames.encode(frames.CONNECT, content=hello.encode()))
        assert b'"mine.eight":8' in await peer.read_frame()


def test_bus_wide_rights_accept_no_class() -> None:
    for text in ("inquire orders", "monitor dead.*"):
        with pytest.raises(ValueError, match="cannot be limited to a class"):
            Permissions.parse_right(text)


async def test_publishing_to_nats_clients_requires_channel_permission() -> None:
    small = User("small", token=hash_token("s"), permissions=Permissions(rules("mine")))
    async with (
        server_with_users(ADA, small) as server,
        simplebus.connect(server.addresses[0], token="s") as bus,
    ):
        ada = await nats_user(server, ADA_LOGIN)
        await ada.send(b"SUB > 1\r\n")
        await ada.flush()
        for channel in ("eu.paid", "free", "class.orders"):
            await bus.publish(b"spoof", class_id="mine", channel=channel)
            await bus.publish(b"spoof", class_id="mine", channel=channel, delay=0.01)
            for _ in range(20):
                await bus.publish(b"spoof", class_id="mine", channel=channel, confirm=False)
        await bus.flush()
        await bus.publish(b"its own", class_id="mine")
        assert await ada.read_line() == b"MSG class.mine 1 7"
        assert await ada.read_line() == b"its own"


async def test_denied_subscription_creates_no_class() -> None:
    async with server_with_users(ADA, BOB) as server:
        bob = await nats_user(server, BOB_LOGIN)
        before = len(server.server.broker.classes)
        for n in range(5):
            await bob.send(b"SUB $SB.SUB.zz%d 1\r\n" % n)
            assert b"may not subscribe" in await bob.read_line()
        assert len(server.server.broker.classes) == before


async def test_restricted_user_sees_only_its_own_replies() -> None:
    def user(name: str, publish: str, subscribe: str) -> User:
        may = Permissions(rules(publish), rules(subscribe))
        return User(name, token=hash_token(name), permissions=may)

    requesting_user, replying_user = (
        user("a", "orders", REPLIES_CLASS),
        user("b", REPLIES_CLASS, "orders"),
    )
    async with (
        server_with_users(requesting_user, replying_user) as server,
        simplebus.connect(server.addresses[0], token="b") as replier,
        replier.subscribe("orders") as questions,
        simplebus.connect(server.addresses[0], token="a") as requester,
    ):

        async def answer() -> None:
            question = await questions.get(timeout=60)
            await replier.reply(question, b"yes")

        async with trio.open_nursery() as nursery:
            nursery.start_soon(answer)
            reply = await requester.request(b"well?", class_id="orders", timeout=60)
        assert reply.payload == b"yes"
        with pytest.raises(simplebus.BusError, match="only subscribe to single channels"):
            async with requester.subscribe(REPLIES_CLASS, f"{REPLIES_CLASS}.#"):
                pass
