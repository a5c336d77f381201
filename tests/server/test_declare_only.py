"""Tests of classes that clients create by accident: `--declare-only`, log lines and warnings."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import trio

import simplebus
from simplebus import RefusedError
from simplebus.core.protocol import frames
from simplebus.core.protocol.requests import NamedClass
from simplebus.core.settings import Settings
from simplebus.core.users.passwords import PasswordVerifier, hash_token
from simplebus.core.users.permissions import AdminRight, Permissions
from simplebus.core.users.users import User, Users
from simplebus.nats.settings import NatsSettings
from simplebus.server.run import RunningServer
from tests.support.nats_peer import connect_nats_peer
from tests.support.programs import run_program, run_server
from tests.support.running_server import Peer, connect, serving, wait_until

CLASSES = (NamedClass(id=7, name="orders", subjects=["orders.>"]),)
UNKNOWN = (
    "there is no class 'ordres'; expected one that the server's file declares, because of "
    "--declare-only; did you mean 'orders'?"
)


@contextlib.asynccontextmanager
async def declared_server(**options: object) -> AsyncIterator[RunningServer]:
    settings = Settings(declare_only=True, ack_timeout=600)
    async with serving(settings, classes=CLASSES, nats_port=0, **options) as server:
        yield server


def class_names(server: RunningServer) -> list[str]:
    return [cls.name for cls in server.server.broker.classes.values()]


async def test_undeclared_class_is_refused() -> None:
    async with declared_server() as server, simplebus.connect(server.addresses[0]) as bus:
        await bus.publish(b"x", class_id="orders")
        await bus.publish(b"x", class_id=7)
        with pytest.raises(RefusedError) as published:
            await bus.publish(b"x", class_id="ordres")
        assert (published.value.code, published.value.sentence) == ("unknown_class", UNKNOWN)
        with pytest.raises(
            RefusedError, match="no Connect has named class 8, and --declare-only is on"
        ):
            async with bus.subscribe(8):
                pass
        async with bus.subscribe("orders") as messages:
            assert [(await messages.get()).payload for _ in range(2)] == [b"x", b"x"]
        assert class_names(server) == ["orders"]


async def test_message_of_an_undeclared_id_is_refused_with_the_reason() -> None:
    async with declared_server() as server, simplebus.connect(server.addresses[0]) as bus:
        with pytest.raises(RefusedError, match="named class 9, and --declare-only is on"):
            await bus.publish(b"x", class_id=9)


async def test_version1_client_with_an_undeclared_class_is_disconnected(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with declared_server() as server:
        await connect(server, [7])
        host, _, port = server.addresses[0].rpartition(":")
        peer = Peer(await trio.open_tcp_stream(host, int(port)))
        await peer.send(frames.encode(frames.CONNECT, content=b"[7,8]"))
        assert await peer.read_frame() == b""
        assert "disconnected (unknown_class): there is no class '8'" in caplog.text


async def test_nats_clients_use_declared_classes_only() -> None:
    async with declared_server() as server:
        client = await connect_nats_peer(server)
        await client.send(b"SUB $SB.SUB.ordres 1\r\nPING\r\n")
        assert b"there is no class" in await client.read_line()
        assert await client.read_line() == b"PONG"
        await client.send(b"PUB orders.paid 1\r\nx\r\n")
        await client.flush()
        assert class_names(server) == ["orders"]
        assert server.server.broker.statistics().published == 1


async def test_replies_and_dead_letters_need_no_declaration() -> None:
    async with declared_server() as server, simplebus.connect(server.addresses[0]) as bus:

        async def reply() -> None:
            async with bus.subscribe("orders") as requests:
                request = await requests.get()
                await bus.reply(request, b"pong")
                request.ack()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(reply)
            assert (await bus.request(b"ping", class_id="orders")).payload == b"pong"
        async with bus.subscribe("dead.orders"):
            pass
        with pytest.raises(RefusedError, match=r"there is no class 'dead\.ordres'"):
            async with bus.subscribe("dead.ordres"):
                pass


async def test_only_authorized_users_declare_classes() -> None:
    boss = User("boss", token=hash_token("boss"))
    maker = User(
        "maker",
        token=hash_token("maker"),
        permissions=Permissions(admin=((AdminRight.CONFIGURE, "*"),)),
    )
    unauthorized_user = User("other", token=hash_token("other"), permissions=Permissions())
    users = Users([boss, maker, unauthorized_user], PasswordVerifier(b"any"))
    async with declared_server(users=users) as server:
        for number, user in enumerate((boss, maker)):
            async with simplebus.connect(server.addresses[0], token=user.name) as bus:
                await bus.publish(b"x", class_id=f"made {number}")
        async with simplebus.connect(server.addresses[0], token="other") as bus:
            with pytest.raises(RefusedError, match="there is no class 'ordres'") as refused:
                await bus.publish(b"x", class_id="ordres")
            assert "did you mean" not in refused.value.sentence  # The user may not know the names.
        assert class_names(server) == ["orders", "made 0", "made 1"]


async def test_creation_of_a_class_names_the_user(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "simplebus.server")
    users = Users([User("ada", token=hash_token("t"))], PasswordVerifier(b"any"))
    nats, settings = NatsSettings(users=users), Settings(tick_seconds=0.01)
    async with serving(settings, users=users, nats=nats, nats_port=0) as server:
        async with simplebus.connect(server.addresses[0], name="shop", token="t") as bus:
            await bus.publish(b"x", class_id="ordres")
        client = await connect_nats_peer(server, auth_token="t")
        await client.send(b"SUB $SB.SUB.lamps 1\r\n")
        await wait_until(lambda: "class lamps was created" in caplog.text)
    assert "class ordres was created by session 0 'shop' of user 'ada' (127.0.0.1:" in caplog.text
    assert "class lamps was created by NATS client 1 of user 'ada' (127.0.0.1:" in caplog.text
    created = [vars(record) for record in caplog.records if "was created by" in record.getMessage()]
    assert {each["user"] for each in created} == {"ada"}


def test_option_refuses_undeclared_classes(tmp_path: Path) -> None:
    file = tmp_path / "bus.toml"
    file.write_text("[classes.orders]\n")
    options = ("--declare-only", "--no-nats", "--no-http", "--config", str(file))
    with run_server(*options) as (_, url):
        assert run_program("pub", "orders", "x", "--url", url)[0] == 0
        status, _, errors = run_program("pub", "ordres", "x", "--url", url)
        assert (status, errors) == (1, f"simplebus: unknown_class: {UNKNOWN}\n")


async def test_creation_of_a_class_by_a_client_is_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", "simplebus.server")
    async with (
        serving(Settings(tick_seconds=0.01), classes=CLASSES) as server,
        simplebus.connect(server.addresses[0], name="shop") as bus,
    ):
        await bus.publish(b"x", class_id="ordres")
        await wait_until(lambda: "class ordres was created" in caplog.text)
        await bus.publish(b"x", class_id="ordres")
        await bus.publish(b"x", class_id="lamps")
        await wait_until(lambda: "class lamps was created" in caplog.text)
    assert caplog.text.count("class ordres was created by session 0 'shop' (127.0.0.1:") == 1
    assert "class orders was created" not in caplog.text
