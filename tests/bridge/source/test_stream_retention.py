"""Streams that keep a message only as long as somebody is to have it still."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

import simplebus
from load.ports import free_port
from simplebus.bridge.copier import Copier
from simplebus.bridge.nats_connection import BridgeNatsConnection
from simplebus.bridge.runner import create_copiers
from simplebus.bridge.settings import BridgeSettings, CopiedClass
from simplebus.bridge.source.stream import StreamSource, consumer_name
from simplebus.client.core.messages import Message
from simplebus.client.credentials import Access
from simplebus.core.limits import Limits
from simplebus.core.settings import Settings
from simplebus.core.users.passwords import PasswordVerifier, hash_token
from simplebus.core.users.permissions import (
    AdminRight,
    PermissionRule,
    PermissionRules,
    Permissions,
)
from simplebus.core.users.users import User, Users
from simplebus.nats.client import encode, jetstream_codec
from simplebus.testing.server import bus_server
from tests.bridge.memory_buses import numbered, payloads, read
from tests.bridge.nats_copiers import (
    BusServer,
    NatsServer,
    copying,
    stored,
    stream,
    until,
)
from tests.bridge.nats_copiers import connect as wired_to
from tests.jetstream.nats_servers import nats_server
from tests.support.running_server import serving

KINDS = ["interest", "workqueue", "limits"]


def lane(nats: NatsServer, server: BusServer, name: str, **more: object) -> Copier:
    copied = CopiedClass(name, stream=name, **more)  # type: ignore[arg-type]
    return create_copiers([BridgeSettings(name, nats.url, server.address, (copied,))])[0]


async def say(connection: BridgeNatsConnection, name: str, first: int, last: int) -> None:
    for number in range(first, last):
        connection.core.publish(f"{name}.x", b"%d" % number)
    await connection.round_trip()


async def consumers(connection: BridgeNatsConnection, name: str) -> int:
    return len((await connection.nats.api_request(f"CONSUMER.NAMES.{name}"))["consumers"])


async def interested(connection: BridgeNatsConnection, name: str) -> None:
    """Wait until the lane has its consumer: what is said before is kept for nobody."""
    while not await consumers(connection, name):
        await connection.round_trip()


async def is_empty(connection: BridgeNatsConnection, name: str) -> None:
    """Wait until nothing is there any more for the lane."""
    while await stored(connection, name):
        await connection.round_trip()


async def reads_by_one(connection: BridgeNatsConnection, name: str) -> None:
    """Wait until the lane has one consumer: what a line that was lost late was still sent, another
    one reads, and goes when it is through."""
    while await consumers(connection, name) != 1:
        await connection.round_trip()


async def is_gone(connection: BridgeNatsConnection, name: str) -> None:
    """Wait until nobody asks the lane's consumer any more: a server may notice late that a line is
    lost, and send what comes meanwhile there."""
    while (await of_consumer(connection, name))["num_waiting"]:
        await connection.round_trip()


async def of_consumer(connection: BridgeNatsConnection, name: str) -> dict[str, Any]:
    """What is said of the lane's."""
    return await connection.nats.api_request(f"CONSUMER.INFO.{name}.{of_lane(name)}")


def of_lane(name: str) -> str:
    """What its consumer is called."""
    return consumer_name(f"bridge {name} there {name}")


async def not_kept(near: StreamSource, at: int, *, now: bool) -> None:
    """As where the line is lost first."""


async def copied_300(connection: BridgeNatsConnection, begun: Copier, name: str) -> None:
    """Have a lane copy what is said once it listens."""
    async with copying(begun):
        await interested(connection, name)
        await say(connection, name, 0, 300)
        await until(lambda: begun.statistics().copied == 300)


@pytest.mark.parametrize("kind", KINDS)
async def test_backlog_survives_bridge_restart(
    kind: str, server: BusServer, nats: NatsServer
) -> None:
    """More often than it has names for its consumer."""
    name = f"AWAY-{kind}"
    async with wired_to(nats) as connection, simplebus.connect(server.address) as bus:
        await stream(connection, name, f"{name}.>", retention=kind)
        begun = lane(nats, server, name)
        async with copying(begun):
            await interested(connection, name)
            await say(connection, name, 0, 10)
            assert await payloads(bus, name, 10) == numbered(0, 10)
        for first in range(10, 50, 10):
            await say(connection, name, first, first + 10)  # Nobody is there.
            begun = lane(nats, server, name)
            async with copying(begun):
                assert await payloads(bus, name, 10) == numbered(first, first + 10)
                await until(lambda at=first + 11, begun=begun: begun.statistics().position >= at)
                if kind != "limits":
                    await is_empty(connection, name)
                await reads_by_one(connection, name)
            assert begun.statistics().missed == 0


@pytest.mark.parametrize("more", [("MORE.>",), (), ("MORE.x", "MORE.y")])
async def test_work_queue_rejects_more_subjects(
    more: tuple[str, ...], server: BusServer, nats: NatsServer
) -> None:
    """What waits in front of where it is was acknowledged, and copied nowhere."""
    name = f"MORE-{len(more)}-{''.join(more)[-1:]}".replace(">", "all")
    async with wired_to(nats) as connection, simplebus.connect(server.address) as bus:
        subjects = [each.replace("MORE", name) for each in more]
        await stream(connection, name, f"{name}.>", retention="workqueue")
        connection.core.publish(f"{name}.y", b"waits")
        await say(connection, name, 0, 10)
        async with copying(lane(nats, server, name, channels=(f"{name}.x",))):
            assert await payloads(bus, name, 10) == numbered(0, 10)
        await is_gone(connection, name)
        begun = lane(nats, server, name, channels=tuple(subjects))
        await begun.run()
        assert "to read more, delete it and give the bridge another name" in (
            begun.statistics().problem
        )
        assert await stored(connection, name) == 1
        await connection.nats.api_request(f"CONSUMER.DELETE.{name}.{of_lane(name)}")
        copied = CopiedClass(name, stream=name, channels=tuple(subjects))
        (other,) = create_copiers([BridgeSettings("other", nats.url, server.address, (copied,))])
        async with copying(other):
            assert await payloads(bus, name, 1) == [b"waits"]
            await is_empty(connection, name)


@pytest.mark.parametrize("kind", KINDS[:2])
async def test_copied_but_unacked_messages_are_acked_not_copied(
    kind: str, server: BusServer, nats: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"TWICE-{kind}"
    async with wired_to(nats) as connection, simplebus.connect(server.address) as bus:
        await stream(connection, name, f"{name}.>", retention=kind)
        with monkeypatch.context() as patch:
            patch.setattr(StreamSource, "commit_position", not_kept)
            await copied_300(connection, lane(nats, server, name), name)
        assert await stored(connection, name) == 300
        begun = lane(nats, server, name)
        async with copying(begun, up=True):
            await is_empty(connection, name)
            await say(connection, name, 300, 310)
            assert await payloads(bus, name, 310) == numbered(0, 310)
            await until(lambda: begun.statistics().position == 311)
        found = begun.statistics()
        assert (found.copied, found.missed) == (10, 0)


@asynccontextmanager
async def waiting(
    connection: BridgeNatsConnection, nats: NatsServer, name: str
) -> AsyncIterator[None]:
    """A bridge whose far end is away has its consumer, and waits."""
    copied = CopiedClass(name, stream=name, start="new")
    nowhere = f"127.0.0.1:{free_port()}"
    async with copying(*create_copiers([BridgeSettings(name, nats.url, nowhere, (copied,))])):
        await interested(connection, name)
        yield


@pytest.mark.parametrize("kind", KINDS)
async def test_copies_messages_from_before_target_existed(
    kind: str, server: BusServer, nats: NatsServer
) -> None:
    name = f"FIRST-{kind}"
    async with wired_to(nats) as connection, simplebus.connect(server.address) as bus:
        await stream(connection, name, f"{name}.>", retention=kind)
        async with waiting(connection, nats, name):
            await say(connection, name, 0, 10)
        begun = lane(nats, server, name, start="new")
        async with copying(begun):
            assert await payloads(bus, name, 10) == numbered(0, 10)
        assert begun.statistics().missed == 0
        assert await consumers(connection, name) == 1


async def test_new_consumer_does_not_replace_target_position(
    server: BusServer, nats: NatsServer
) -> None:
    """That the far bus knows, once it is there."""
    async with wired_to(nats) as connection, simplebus.connect(server.address) as bus:
        await stream(connection, "AGAIN", "AGAIN.>")
        begun = lane(nats, server, "AGAIN")
        async with copying(begun):
            await say(connection, "AGAIN", 0, 10)
            assert await payloads(bus, "AGAIN", 10) == numbered(0, 10)
            await until(lambda: begun.statistics().position == 11)
        await connection.nats.api_request(f"CONSUMER.DELETE.AGAIN.{of_lane('AGAIN')}")
        await say(connection, "AGAIN", 10, 20)
        async with waiting(connection, nats, "AGAIN"):
            await say(connection, "AGAIN", 20, 30)
        async with copying(lane(nats, server, "AGAIN", start="new")):
            assert await payloads(bus, "AGAIN", 20) == numbered(10, 30)


async def test_interest_stream_always_has_consumer(
    server: BusServer, nats: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Servers that heard that it is gone before they heard of the next one dropped what they had.
    What it has sent before is read by another one, which a bridge that is killed leaves behind."""
    name = "STAYS"

    async def left(near: StreamSource, name: str) -> None:
        """As by one that is killed."""

    async with wired_to(nats) as connection, simplebus.connect(server.address) as bus:
        await stream(connection, name, f"{name}.>", retention="interest")
        async with copying(lane(nats, server, name)):
            await interested(connection, name)
            made = (await of_consumer(connection, name))["created"]
            await say(connection, name, 0, 10)
            assert await payloads(bus, name, 10) == numbered(0, 10)
        await is_gone(connection, name)  # What would go there would be read by one more.
        with monkeypatch.context() as patch:
            patch.setattr(StreamSource, "commit_position", not_kept)
            async with copying(lane(nats, server, name)):
                await say(connection, name, 10, 20)
                assert await payloads(bus, name, 10) == numbered(10, 20)
        await is_gone(connection, name)
        with monkeypatch.context() as patch:
            patch.setattr(StreamSource, "_delete", left)
            patch.setattr(StreamSource, "commit_position", not_kept)
            async with copying(lane(nats, server, name)):
                await say(connection, name, 20, 30)
                assert await payloads(bus, name, 10) == numbered(20, 30)
        assert await consumers(connection, name) == 2
        await say(connection, name, 30, 40)
        begun = lane(nats, server, name)
        async with copying(begun, up=True):
            assert await payloads(bus, name, 10) == numbered(30, 40)
            await is_empty(connection, name)
            await reads_by_one(connection, name)
        assert begun.statistics().missed == 0
        assert (await of_consumer(connection, name))["created"] == made


@pytest.mark.parametrize("turn", [1, 2], ids=["the reader", "the consumer"])
async def test_copies_after_connection_loss_during_reread(
    turn: int, server: BusServer, nats: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that does not know yet that it is lost sends some there of what comes meanwhile,
    and the lane begins behind that: while the reader reads, or the consumer is about to."""
    name, go_on, turns = f"LATE-{turn}", StreamSource._go_on, 0

    async with (
        wired_to(nats) as connection,
        wired_to(nats) as lost,
        simplebus.connect(server.address) as bus,
    ):
        await stream(connection, name, f"{name}.>", retention="interest")
        with monkeypatch.context() as patch:
            patch.setattr(StreamSource, "commit_position", not_kept)
            await copied_300(connection, lane(nats, server, name), name)
        await is_gone(connection, name)
        lost.core.subscribe("lost")
        asks = jetstream_codec.pull_request(batch=5, expires_seconds=60.0)
        lost.core.publish(
            f"{jetstream_codec.API}CONSUMER.MSG.NEXT.{name}.{of_lane(name)}", asks, reply="lost"
        )
        await lost.round_trip()

        async def meanwhile(near: StreamSource, at: int) -> None:
            nonlocal turns
            turns += 1
            await go_on(near, at)
            if turns == turn:
                await say(connection, name, 300, 310)

        monkeypatch.setattr(StreamSource, "_resume", meanwhile)
        begun = lane(nats, server, name)
        async with copying(begun):
            assert await payloads(bus, name, 310) == numbered(0, 310)
            await is_empty(connection, name)
            await reads_by_one(connection, name)
        assert begun.statistics().missed == 0
        assert sum(each.count for each in lost.messages) == 5


async def test_waits_for_reader_that_is_behind_stream(
    server: BusServer, nats: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where its leader is behind that of the stream, and says that there is nothing more."""
    name = "LESS"
    pending = StreamSource._pending

    async with wired_to(nats) as connection, simplebus.connect(server.address) as bus:
        await stream(connection, name, f"{name}.>", retention="interest")
        with monkeypatch.context() as patch:
            patch.setattr(StreamSource, "commit_position", not_kept)
            await copied_300(connection, lane(nats, server, name), name)
        less = property(lambda near: 0 if near._is_rereading else pending.fget(near))
        monkeypatch.setattr(StreamSource, "_pending", less)
        begun = lane(nats, server, name)
        async with copying(begun, up=True):
            await say(connection, name, 300, 310)
            assert await payloads(bus, name, 310) == numbered(0, 310)
            await is_empty(connection, name)
        assert begun.statistics().missed == 0


async def test_does_not_wait_for_delivered_and_removed_messages(
    server: BusServer, nats: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "PURGED"
    async with wired_to(nats) as connection, simplebus.connect(server.address) as bus:
        await stream(connection, name, f"{name}.>", retention="interest")
        with monkeypatch.context() as patch:
            patch.setattr(StreamSource, "commit_position", not_kept)
            await copied_300(connection, lane(nats, server, name), name)
        await connection.nats.api_request(f"STREAM.PURGE.{name}")
        begun = lane(nats, server, name)
        async with copying(begun, up=True):
            await say(connection, name, 300, 310)
            assert await payloads(bus, name, 310) == numbered(0, 310)
            await is_empty(connection, name)


async def test_interest_stream_accepts_changed_subjects(
    server: BusServer, nats: NatsServer
) -> None:
    name = "OTHER"

    def some(letter: str) -> Copier:
        copied = CopiedClass(name, stream=name, channels=(f"{name}.{letter}",))
        return create_copiers([BridgeSettings(name, nats.url, server.address, (copied,))])[0]

    async with wired_to(nats) as connection, simplebus.connect(server.address) as bus:
        await stream(connection, name, f"{name}.>", retention="interest")
        for first, letter in enumerate("abab"):
            async with copying(some(letter), up=True):
                for each in "ab":
                    connection.core.publish(f"{name}.{each}", f"{each}{first}".encode())
                await connection.round_trip()
                assert await payloads(bus, name, 1) == [f"{letter}{first}".encode()]
                await is_empty(connection, name)


async def test_work_queue_is_copied_from_first_message(server: BusServer, nats: NatsServer) -> None:
    """What it left there would stay for ever."""
    async with wired_to(nats) as connection, simplebus.connect(server.address) as bus:
        await stream(connection, "ALL", "ALL.>", retention="workqueue")
        await say(connection, "ALL", 0, 10)
        async with copying(lane(nats, server, "ALL", start="new")):
            assert await payloads(bus, "ALL", 10) == numbered(0, 10)
            await is_empty(connection, "ALL")


@pytest.mark.parametrize("kind", [*KINDS, ""])
async def test_long_nats_message_becomes_complete_dead_letters(kind: str, tmp_path: Path) -> None:
    """And only then the stream lets go of it. Without a kind there is no stream."""
    name = f"LONG-{kind}"
    long = bytes(range(256)) * 40
    small = Settings(limits=Limits(frame_bytes=4096))
    with nats_server(tmp_path) as nats, bus_server(small) as server:
        async with wired_to(nats) as connection, simplebus.connect(server.address) as bus:
            if kind:
                await stream(connection, name, f"{name}.>", retention=kind)
            source = {"stream": name} if kind else {"channels": (f"{name}.>",)}
            begun = create_copiers(
                [BridgeSettings("b", nats.url, server.address, (CopiedClass(name, **source),))]
            )[0]  # type: ignore[arg-type]
            async with copying(begun, up=True):
                if kind:
                    await interested(connection, name)
                headers = b"NATS/1.0\r\ntenant: 7\r\n\r\n"
                for payload in (b"one", long, b"three"):
                    connection.core.write(
                        encode.encode_pub(f"{name}.x".encode(), payload, headers=headers)
                    )
                await connection.round_trip()
                assert await payloads(bus, name, 2) == [b"one", b"three"]
                letters: list[Message[bytes]] = []
                while b"".join(each.payload for each in letters) != long:
                    letters += await read(bus, f"dead.{name}", 1)
                await until(lambda: begun.statistics().position == (4 if kind else 3))
                if kind in KINDS[:2]:
                    await is_empty(connection, name)
            assert len(letters) > 2
            for number, letter in enumerate(letters, 1):
                told = dict(letter.headers)
                assert (letter.channel, told["tenant"]) == (f"{name}.x", "7")
                assert told["dead-error"].startswith(f"part {number} of {len(letters)}; unfit: ")
                assert (told["dead-class"], told["dead-sequence"]) == (name, "2" if kind else "1")
            found = begun.statistics()
            assert (found.copied, found.refused, found.missed) == (2, 1, 0)


@pytest.mark.parametrize("kind", KINDS)
async def test_stream_keeps_message_without_room_for_dead_letter(
    kind: str, nats: NatsServer
) -> None:
    """Until somebody gives the bridge the rights that it lacks."""
    name = f"DENIED-{kind}"

    def users(*classes: str) -> Users:
        bridge = User(
            "bridge",
            token=hash_token("token"),
            permissions=Permissions(
                publish=PermissionRules(tuple(map(PermissionRule.parse, ("bridges", *classes)))),
                subscribe=PermissionRules((PermissionRule.parse("bridges"),)),
                admin=((AdminRight.CONFIGURE, "bridges"),),
            ),
        )
        return Users((User("all", token=hash_token("all")), bridge), PasswordVerifier(b"by chance"))

    async with serving(users=users(f"{name} other.#")) as server, wired_to(nats) as connection:
        address = server.addresses[0]
        await stream(connection, name, f"{name}.>", retention=kind)
        begun = create_copiers(
            [
                BridgeSettings(
                    name,
                    nats.url,
                    str(address),
                    (CopiedClass(name, stream=name),),
                    target_access=Access(token="token"),
                )
            ]
        )[0]
        async with copying(begun):
            await interested(connection, name)
            await say(connection, name, 0, 100)
            await until(lambda: begun.statistics().losses > 2)
            assert "has no permissions in class 'dead." in begun.statistics().problem
            assert await stored(connection, name) == 100
            server.server.replace_users(users(name, f"dead.{name}"))
            await until(lambda: begun.statistics().position == 101)
            found = begun.statistics()
            assert (found.copied, found.missed) == (100 - found.refused, 0)
            async with simplebus.connect(address, token="all") as bus:
                # What was refused once is refused under its number.
                got = await payloads(bus, f"dead.{name}", found.refused)
                assert got + await payloads(bus, name, found.copied) == numbered(0, 100)
