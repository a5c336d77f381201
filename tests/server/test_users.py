"""Tests of authentication and permissions of binary and NATS clients."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

import nats as nats_py
import pytest
import trio
from argon2 import PasswordHasher

import simplebus
from simplebus.core.errors import Reason
from simplebus.core.limits import Limits
from simplebus.core.protocol import frames
from simplebus.core.protocol.requests import NamedClass
from simplebus.core.users.passwords import PasswordVerifier, hash_token
from simplebus.core.users.permissions import (
    AdminRight,
    PermissionRule,
    PermissionRules,
    Permissions,
)
from simplebus.core.users.users import User, Users
from simplebus.nats.settings import NatsSettings
from simplebus.server.preauth import auth_worker
from simplebus.server.run import RunningServer
from tests.support.nats_peer import NatsPeer, open_nats_peer
from tests.support.running_server import Peer, connect, message, serving, subscribe, wait_until

HASH = PasswordHasher(time_cost=1, memory_cost=8, parallelism=1).hash("secret")


def rules(*allow: str, deny: tuple[str, ...] = ()) -> PermissionRules:
    return PermissionRules(
        tuple(map(PermissionRule.parse, allow)) or None, tuple(map(PermissionRule.parse, deny))
    )


ADA = User("ada", password=HASH)
BOB = User(
    "bob",
    token=hash_token("bob's token"),
    permissions=Permissions(
        publish=rules("orders eu.#", "7", deny=("orders eu.test",)),
        subscribe=rules("orders", deny=("orders *.secret",)),
        admin=((AdminRight.PURGE, "orders"),),
    ),
)
OLD = User("old", addresses=("127.0.0.0/8",), permissions=Permissions(publish=rules("9")))


@contextlib.asynccontextmanager
async def server_with_users(*users: User, **more: object) -> AsyncIterator[RunningServer]:
    user_table = Users(users, PasswordVerifier(b"by chance"))
    settings = NatsSettings(users=user_table)
    classes = (NamedClass(id=5, name="orders", subjects=["*.paid", "*.secret", "eu.test"]),)
    async with serving(
        users=user_table, nats_port=0, nats=settings, classes=classes, **more
    ) as server:
        yield server


@contextlib.asynccontextmanager
async def connected_users() -> AsyncIterator[tuple[RunningServer, simplebus.Bus, simplebus.Bus]]:
    """Run a server with the users Ada and Bob, and a connection of each of them."""
    async with (
        server_with_users(ADA, BOB) as server,
        simplebus.connect(server.addresses[0], token="bob's token") as bob,
        simplebus.connect(server.addresses[0], user="ada", password="secret") as ada,
    ):
        yield server, bob, ada


async def test_slow_password_hash_is_checked_once(caplog: pytest.LogCaptureFixture) -> None:
    async with server_with_users(ADA) as server:
        for _ in range(2):
            async with simplebus.connect(server.addresses[0], user="ada", password="secret") as bus:
                await bus.publish(b"x", class_id=1)
        assert server.server.auth_worker is not None
        assert server.server.auth_worker.check_count == 1  # The second result is cached.
        assert "secret" not in caplog.text


@pytest.mark.parametrize(
    "shown",
    [
        {"user": "ada", "password": "wrong"},
        {"user": "nobody", "password": "secret"},
        {"user": "ada"},
        {"user": "bob"},
        {"token": "wrong"},
    ],
)
async def test_wrong_credentials_get_one_error(shown: dict[str, str]) -> None:
    async with server_with_users(ADA, BOB) as server:
        with pytest.raises(simplebus.BusConnectionError) as caught:
            async with simplebus.connect(server.addresses[0], **shown):  # type: ignore[arg-type]
                pass
        assert "wrong user, password or token" in str(caught.value)
        assert server.server.broker.refusal_counts == {Reason.UNAUTHORIZED: 1}
        assert server.server.disconnect_counts == {Reason.UNAUTHORIZED: 1}


async def test_missing_credentials_get_a_helpful_error() -> None:
    async with server_with_users(ADA) as server:
        with pytest.raises(simplebus.BusConnectionError, match="this bus requires authentication"):
            async with simplebus.connect(server.addresses[0]):
                pass
        old = await connect(server)
        await old.send(frames.encode(frames.CONNECT, content=b"[1]"))
        assert await old.wait_closed()
        await wait_until(lambda: server.server.disconnect_counts == {Reason.UNAUTHORIZED: 2})


async def test_blocking_client_authenticates() -> None:
    async with server_with_users(BOB) as server:
        address = server.addresses[0]

        def run_client() -> None:
            with simplebus.connect_blocking(address, token="bob's token") as bus:
                bus.publish(b"x", class_id="orders", channel="eu.paid")
                with pytest.raises(simplebus.RefusedError, match=r"unauthorized.*'us.paid'"):
                    bus.publish(b"x", class_id="orders", channel="us.paid")

        await trio.to_thread.run_sync(run_client)


async def test_version1_client_is_authenticated_by_address() -> None:
    async with server_with_users(ADA, OLD) as server:
        old = await connect(server, [9])
        await old.send(message(b"x", 9))
        await wait_until(lambda: bool(server.server.broker.classes[9].ring.head))
        await old.send(frames.encode(frames.CONNECT, content=b"[8]"))
        await old.send(message(b"x", 8))
        await wait_until(lambda: 8 in server.server.broker.classes)
        assert await old.wait_closed()
        assert server.server.broker.classes[8].ring.head == 0
        assert server.server.disconnect_counts == {Reason.UNAUTHORIZED: 1}


async def test_forbidden_publishes_are_refused_and_others_stored() -> None:
    async with (
        connected_users() as (server, bus, ada),
        ada.subscribe("orders") as messages,
    ):
        for channel in ("eu.paid", "eu.test", "us.paid", "eu.paid.late", None):
            with contextlib.suppress(simplebus.RefusedError):
                arguments = {} if channel is None else {"channel": channel}
                await bus.publish(b"x", class_id="orders", **arguments)  # type: ignore[arg-type]
        await bus.publish(b"x", class_id=7)
        for class_id in (8, "other"):
            with pytest.raises(simplebus.RefusedError, match="unauthorized"):
                await bus.publish(b"x", class_id=class_id)
        received = [(await messages.get(timeout=60)).channel for _ in range(2)]
        assert received == ["eu.paid", "eu.paid.late"]
        assert server.server.broker.refusal_counts[Reason.UNAUTHORIZED] == 6


async def test_batch_of_mixed_channels_is_filtered_by_permission() -> None:
    async with (
        connected_users() as (server, bus, ada),
        ada.subscribe("orders") as messages,
    ):
        channels = [("eu.a", "us.b", "us.b", "eu.test", "eu.c", "us.d")[n % 6] for n in range(1800)]
        for n, channel in enumerate(channels):
            await bus.publish(b"%d" % n, class_id="orders", channel=channel, confirm=False)
        with pytest.raises(ExceptionGroup):
            await bus.flush()
        expected = [n for n, channel in enumerate(channels) if channel in ("eu.a", "eu.c")]
        received = [int((await messages.get(timeout=60)).payload) for _ in expected]
        assert received == expected
        assert server.server.broker.refusal_counts[Reason.UNAUTHORIZED] == 1200


async def test_subscription_receives_only_permitted_channels() -> None:
    async with connected_users() as (_, bus, ada):
        async with (
            bus.subscribe("orders") as unfiltered,
            bus.subscribe("orders", "us.*") as filtered,
            bus.subscribe("orders", durable="kept") as durable_messages,
        ):
            for channel in ("us.secret", "eu.paid", "us.paid", None, "us.secret", "us.last"):
                arguments = {} if channel is None else {"channel": channel}
                await ada.publish(b"x", class_id="orders", **arguments)  # type: ignore[arg-type]
            for messages, expected in (
                (unfiltered, ["eu.paid", "us.paid", "", "us.last"]),
                (durable_messages, ["eu.paid", "us.paid", "", "us.last"]),
                (filtered, ["us.paid", "us.last"]),
            ):
                received = [(await messages.get(timeout=60)).channel or "" for _ in expected]
                assert received == expected
        for class_name, *channels in (("orders", "us.secret"), ("other",)):
            with pytest.raises(simplebus.RefusedError, match="unauthorized"):
                async with bus.subscribe(class_name, *channels):
                    pass


async def test_durable_delivers_only_channels_permitted_to_its_user() -> None:
    async with connected_users() as (_, bus, ada):
        async with bus.subscribe("orders", durable="bob's"):
            pass
        for channel in ("us.secret", "us.paid"):
            await ada.publish(b"x", class_id="orders", channel=channel)
        async with bus.subscribe("orders", durable="bob's") as messages:
            assert (await messages.get(timeout=60)).channel == "us.paid"
        await bus.publish(b"everything before is processed", class_id=7)
        async with ada.subscribe("orders", durable="bob's") as messages:
            await ada.publish(b"x", class_id="orders", channel="eu.secret")
            assert (await messages.get(timeout=60)).channel == "eu.secret"
        async with ada.subscribe("orders", durable="ada's"):
            pass
        await ada.publish(b"the end of the subscription is processed", class_id=7)
        expected = 'the durable "ada\'s": it belongs to another user'
        with pytest.raises(simplebus.RefusedError, match=expected):
            async with bus.subscribe("orders", durable="ada's"):
                pass


async def test_inspection_requires_permission() -> None:
    async with connected_users() as (_, bus, ada):
        await ada.publish(b"x", class_id="orders", channel="eu.paid")
        for call in (
            bus.explain(),
            bus.fetch("orders", 0, 10),
            bus.keep_last_values("orders"),
            bus.purge("orders"),  # Channels of the class are denied.
        ):
            with pytest.raises(simplebus.RefusedError, match="unauthorized"):
                await call
        assert len(await ada.fetch("orders", 0, 10)) == 1
        await ada.explain()


async def test_connections_of_a_user_are_limited() -> None:
    user = User("few", token=hash_token("t"), connections=1)
    async with (
        server_with_users(user) as server,
        simplebus.connect(server.addresses[0], token="t"),
    ):
        with pytest.raises(simplebus.BusConnectionError, match="1 are allowed"):
            async with simplebus.connect(server.addresses[0], token="t"):
                pass


async def test_connection_limit_of_a_user_spans_listeners() -> None:
    user = User("few", token=hash_token("t"), connections=2)
    async with server_with_users(user) as server:
        first = await nats_user(server, '"auth_token":"t"')
        second = await nats_user(server, '"auth_token":"t"')
        await second.send(b'CONNECT {"verbose":false,"auth_token":"t"}\r\nPING\r\n')
        assert await second.read_line() == b"PONG"  # It is the same connection.
        third = await open_nats_peer(server)
        await third.read_info()
        await third.send(b'CONNECT {"auth_token":"t"}\r\n')
        assert (
            await third.read_until_closed() == b"-ERR 'maximum connections for user exceeded'\r\n"
        )
        with pytest.raises(simplebus.BusConnectionError, match="2 are allowed"):
            async with simplebus.connect(server.addresses[0], token="t"):
                pass
        await first.stream.aclose()
        await wait_until(lambda: len(server.nats_listener.connections) == 1)
        async with simplebus.connect(server.addresses[0], token="t"):
            pass


async def test_bytes_before_authentication_are_bounded() -> None:
    async with server_with_users(ADA) as server:
        for data in (
            b"4" + bytes(8) + b"{" + b" " * 100_000,
            frames.encode(frames.HEARTBEAT) * 20_000,
            frames.encode(frames.CONNECT, content=b'{"auth":' + b"[" * 60_000),
        ):
            peer = await connect(server)
            with contextlib.suppress(trio.BrokenResourceError):
                await peer.send(data)
            assert await peer.wait_closed()
        await wait_until(lambda: not server.server.connections)


async def test_password_guessing_is_limited_without_delaying_others() -> None:
    async with server_with_users(ADA, BOB) as server:
        address = server.addresses[0]
        async with simplebus.connect(address, user="ada", password="secret"):
            pass
        is_limited = []
        for password in ("wrong",) * 12 + ("secret",):
            with pytest.raises(simplebus.BusConnectionError) as caught:
                async with simplebus.connect(address, user="ada", password=password):
                    pass
            is_limited.append("too many wrong passwords" in str(caught.value))
        assert is_limited[:5] == [False] * 5
        assert is_limited[-1]
        client = await open_nats_peer(server)
        await client.read_info()
        await client.send(b"CONNECT {%b}\r\nPING\r\n" % ADA_LOGIN.encode())
        assert await client.read_until_closed() == b"-ERR 'Too Many Authentication Attempts'\r\n"
        async with simplebus.connect(address, token="bob's token"):
            pass


async def test_authenticating_client_is_not_timed_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The authentication timeout is paused while the server checks credentials."""
    checks, released = [], trio.Event()

    async def verify(password_hash: str, password: str) -> bool:
        checks.append(password)
        await released.wait()
        return True

    monkeypatch.setattr(auth_worker, "_verify_in_thread", verify)
    async with server_with_users(ADA) as server:
        peer, client = await connect(server), await open_nats_peer(server)
        await client.read_info()
        await client.send(b"CONNECT {%b}\r\nPING\r\n" % ADA_LOGIN.encode())
        content = b'{"classes":[],"auth":{"user":"ada","password":"secret"}}'
        await peer.send(frames.encode(frames.CONNECT, content=content))
        (session,) = server.server.broker.sessions.values()
        front = server.nats_listener.nats_server
        (nats_session,) = front.sessions.values()
        await wait_until(
            lambda: checks and session.is_authenticating and nats_session.is_authenticating
        )
        for _ in range(1000):
            assert session.tick(Limits(), 1.0, is_blocking_publishers=False) is None
        front.now += 1000
        front.tick()
        released.set()
        assert await client.read_line() == b"+OK"
        assert (await peer.read_frame())[:1] == b"4"


async def test_authenticated_client_cannot_guess_faster() -> None:
    async with server_with_users(ADA, User("quick", password="right")) as server:
        responses = []
        for password in (b"wrong",) * 7 + (b"right",):
            client = await nats_user(server, ADA_LOGIN)
            await client.send(b'CONNECT {"user":"quick","pass":"%b"}\r\nPING\r\n' % password)
            responses.append(await client.read_until_closed())
        assert responses[:5] == [b"-ERR 'Authorization Violation'\r\n"] * 5
        assert responses[-1] == b"-ERR 'Too Many Authentication Attempts'\r\n"
        client = await nats_user(server, ADA_LOGIN)
        await client.send(b'CONNECT {"verbose":true,%b}\r\nPING\r\n' % ADA_LOGIN.encode())
        assert await client.read_line() == b"+OK"


async def test_guessing_nats_users_is_limited() -> None:
    auth = Users((User("ada", password="secret"),))
    async with serving(nats_port=0, nats=NatsSettings(users=auth)) as server:
        responses = set()
        for password in ("wrong",) * 12 + ("secret",):
            client = await open_nats_peer(server)
            await client.read_info()
            await client.send(b'CONNECT {"user":"ada","pass":"%b"}\r\n' % password.encode())
            responses.add(answer := await client.read_until_closed())
        assert responses == {
            b"-ERR 'Authorization Violation'\r\n",
            b"-ERR 'Too Many Authentication Attempts'\r\n",
        }
        assert b"Too Many" in answer


async def test_address_limit_spans_listeners() -> None:
    async with serving(nats_port=0, per_address=2) as server:
        first = await connect(server, [1])
        second = await open_nats_peer(server)
        await second.read_info()
        third = await connect(server)
        assert await third.wait_closed()
        assert server.server.disconnect_counts == {Reason.TOO_MANY_CONNECTIONS: 1}
        await first.stream.aclose()
        await wait_until(lambda: not server.server.connections)
        await connect(server, [1])


async def nats_user(server: RunningServer, credentials: str) -> NatsPeer:
    peer = await open_nats_peer(server)
    assert (await peer.read_info())["auth_required"] is True
    await peer.send(
        b'CONNECT {"verbose":false,"headers":true,%b}\r\nPING\r\n' % credentials.encode()
    )
    assert await peer.read_line() == b"PONG"
    return peer


ADA_LOGIN = '"user":"ada","pass":"secret"'
BOB_LOGIN = '"auth_token":"bob\'s token"'


async def test_users_can_connect_to_the_nats_listener() -> None:
    async with server_with_users(ADA, BOB) as server:
        ada, bob = await nats_user(server, ADA_LOGIN), await nats_user(server, BOB_LOGIN)
        await ada.send(b"SUB > 1\r\n")
        await ada.flush()
        for subject in (b"eu.paid", b"us.paid", b"eu.test", b"free"):
            await bob.send(b"PUB %b 1\r\nx\r\n" % subject)
        for subject in (b"us.paid", b"eu.test", b"free"):
            response = await bob.read_line()
            assert response == b"-ERR 'Permissions Violation for Publish to \"%b\"'" % subject
        assert await ada.read_line() == b"MSG eu.paid 1 1"
        assert server.server.broker.classes[5].ring.head == 1
        wrong = await open_nats_peer(server)
        await wrong.read_info()
        await wrong.send(b'CONNECT {"user":"ada","pass":"wrong"}\r\nPING\r\n')
        assert await wrong.read_until_closed() == b"-ERR 'Authorization Violation'\r\n"


async def test_class_messages_reach_only_permitted_nats_clients() -> None:
    async with server_with_users(ADA, BOB) as server:
        bob = await nats_user(server, BOB_LOGIN)
        publisher = await nats_user(server, ADA_LOGIN)
        await bob.send(b"SUB > 1\r\n")
        await bob.flush()
        async with simplebus.connect(server.addresses[0], user="ada", password="secret") as ada:
            await ada.publish(b"1", class_id="orders", channel="eu.secret")
            await ada.publish(b"2", class_id="hidden", channel="eu.paid")
            await ada.publish(b"3", class_id="orders", channel="eu.paid")
        await publisher.send(b"PUB us.secret 1\r\n4\r\nPUB free 1\r\n5\r\nPUB us.paid 1\r\n6\r\n")
        await publisher.flush()
        assert await bob.read_line() == b"MSG eu.paid 1 1"
        assert await bob.read_line() == b"3"
        assert await bob.read_line() == b"MSG us.paid 1 1"
        assert await bob.read_line() == b"6"


async def test_acked_nats_subscription_requires_permission() -> None:
    async with server_with_users(ADA, BOB) as server:
        bob, ada = await nats_user(server, BOB_LOGIN), await nats_user(server, ADA_LOGIN)
        await bob.send(b"SUB $SB.SUB.hidden 1\r\n")
        assert b"may not subscribe" in await bob.read_line()
        await bob.send(b"SUB $SB.SUB.orders 2\r\n")
        await bob.flush()
        await ada.send(b"PUB us.secret 1\r\n1\r\nPUB us.paid 1\r\n2\r\n")
        line = await bob.read_line()
        assert line.startswith(b"MSG us.paid 2 $JS.ACK.")
        assert await bob.read_line() == b"2"
        await bob.send(b"PUB %b 4\r\n+ACK\r\n" % line.split()[3])
        await bob.flush()


def test_nats_client_authenticates_with_slow_hash() -> None:
    async def run_client(url: str) -> None:
        client = await nats_py.connect(
            url, user="ada", password="secret", allow_reconnect=False, connect_timeout=60
        )
        await client.publish("eu.paid", b"x")
        await client.flush()
        await client.close()

    async def main() -> None:
        import asyncio

        async with server_with_users(ADA) as server:
            url = f"nats://{server.nats_addresses[0]}"
            await trio.to_thread.run_sync(lambda: asyncio.run(run_client(url)))

    trio.run(main)


async def test_version1_subscriber_receives_only_permitted_channels() -> None:
    reader = User(
        "reader",
        addresses=("127.0.0.1",),
        permissions=Permissions(subscribe=rules("orders", deny=("orders *.secret",))),
    )
    async with server_with_users(ADA, reader) as server:
        old: Peer = await connect(server, [5])
        await old.send(subscribe(5))
        async with simplebus.connect(server.addresses[0], user="ada", password="secret") as ada:
            await ada.publish(b"1", class_id="orders", channel="us.secret")
            await ada.publish(b"2", class_id="orders", channel="us.paid")
        assert await old.read_messages(1) == [(1, b"2")]
