"""Streams with retention `interest` or `workqueue`, which drop acked messages."""

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
from tests.bridge.memory_buses import numbered_payloads, payloads, read
from tests.bridge.nats_copiers import (
    BusServer,
    NatsServer,
    copying,
    count_stored,
    create_stream,
    wait_until,
)
from tests.bridge.nats_copiers import connect as wired_to
from tests.jetstream.nats_servers import nats_server
from tests.support.running_server import serving

KINDS = ["interest", "workqueue", "limits"]


def create_copier(nats: NatsServer, server: BusServer, name: str, **options: object) -> Copier:
    copied = CopiedClass(name, stream=name, **options)  # type: ignore[arg-type]
    return create_copiers([BridgeSettings(name, nats.url, server.address, (copied,))])[0]


async def publish_numbered(
    connection: BridgeNatsConnection, name: str, first: int, last: int
) -> None:
    for number in range(first, last):
        connection.core.publish(f"{name}.x", b"%d" % number)
    await connection.round_trip()


async def count_consumers(connection: BridgeNatsConnection, name: str) -> int:
    return len((await connection.nats.api_request(f"CONSUMER.NAMES.{name}"))["consumers"])


async def wait_consumer_created(connection: BridgeNatsConnection, name: str) -> None:
    """Wait until the copier has its consumer; the stream does not keep earlier messages."""
    while not await count_consumers(connection, name):
        await connection.round_trip()


async def wait_stream_empty(connection: BridgeNatsConnection, name: str) -> None:
    """Wait until the copier's consumer has no messages left."""
    while await count_stored(connection, name):
        await connection.round_trip()


async def wait_single_consumer(connection: BridgeNatsConnection, name: str) -> None:
    """Wait until the reader is deleted. It delivers messages that were sent to a lost
    connection.
    """
    while await count_consumers(connection, name) != 1:
        await connection.round_trip()


async def wait_consumer_idle(connection: BridgeNatsConnection, name: str) -> None:
    """Wait until no pull request waits at the copier's consumer.

    A server may detect a lost connection late, and send messages there meanwhile.
    """
    while (await consumer_info(connection, name))["num_waiting"]:
        await connection.round_trip()


async def consumer_info(connection: BridgeNatsConnection, name: str) -> dict[str, Any]:
    """Return the info of the copier's consumer."""
    return await connection.nats.api_request(f"CONSUMER.INFO.{name}.{consumer_name_of(name)}")


def consumer_name_of(name: str) -> str:
    """Return the name of the copier's consumer."""
    return consumer_name(f"bridge {name} there {name}")


async def skip_commit(source: StreamSource, position: int, *, now: bool) -> None:
    """Commit nothing, as if the connection were lost first."""


async def copy_300(connection: BridgeNatsConnection, copier: Copier, name: str) -> None:
    """Publish 300 messages while the copier runs, and wait until they are copied."""
    async with copying(copier):
        await wait_consumer_created(connection, name)
        await publish_numbered(connection, name, 0, 300)
        await wait_until(lambda: copier.statistics().copied == 300)


@pytest.mark.parametrize("kind", KINDS)
async def test_backlog_survives_bridge_restart(
    kind: str, server: BusServer, nats: NatsServer
) -> None:
    """There are more restarts than consumer names."""
    name = f"AWAY-{kind}"
    async with wired_to(nats) as connection, simplebus.connect(server.address) as bus:
        await create_stream(connection, name, f"{name}.>", retention=kind)
        copier = create_copier(nats, server, name)
        async with copying(copier):
            await wait_consumer_created(connection, name)
            await publish_numbered(connection, name, 0, 10)
            assert await payloads(bus, name, 10) == numbered_payloads(0, 10)
        for first in range(10, 50, 10):
            await publish_numbered(connection, name, first, first + 10)  # No copier runs.
            copier = create_copier(nats, server, name)
            async with copying(copier):
                assert await payloads(bus, name, 10) == numbered_payloads(first, first + 10)
                await wait_until(
                    lambda position=first + 11, copier=copier: (
                        copier.statistics().position >= position
                    )
                )
                if kind != "limits":
                    await wait_stream_empty(connection, name)
                await wait_single_consumer(connection, name)
            assert copier.statistics().missed == 0


@pytest.mark.parametrize("added_subjects", [("MORE.>",), (), ("MORE.x", "MORE.y")])
async def test_work_queue_rejects_more_subjects(
    added_subjects: tuple[str, ...], server: BusServer, nats: NatsServer
) -> None:
    """Older messages of the added subjects would be acked without being copied."""
    name = f"MORE-{len(added_subjects)}-{''.join(added_subjects)[-1:]}".replace(">", "all")
    async with wired_to(nats) as connection, simplebus.connect(server.address) as bus:
        subjects = [added_subject.replace("MORE", name) for added_subject in added_subjects]
        await create_stream(connection, name, f"{name}.>", retention="workqueue")
        connection.core.publish(f"{name}.y", b"waits")
        await publish_numbered(connection, name, 0, 10)
        async with copying(create_copier(nats, server, name, channels=(f"{name}.x",))):
            assert await payloads(bus, name, 10) == numbered_payloads(0, 10)
        await wait_consumer_idle(connection, name)
        copier = create_copier(nats, server, name, channels=tuple(subjects))
        await copier.run()
        assert "to read more, delete that consumer and give the bridge another name" in (
            copier.statistics().problem
        )
        assert await count_stored(connection, name) == 1
        await connection.nats.api_request(f"CONSUMER.DELETE.{name}.{consumer_name_of(name)}")
        copied = CopiedClass(name, stream=name, channels=tuple(subjects))
        (other_copier,) = create_copiers(
            [BridgeSettings("other", nats.url, server.address, (copied,))]
        )
        async with copying(other_copier):
            assert await payloads(bus, name, 1) == [b"waits"]
            await wait_stream_empty(connection, name)


@pytest.mark.parametrize("kind", KINDS[:2])
async def test_copied_but_unacked_messages_are_acked_not_copied(
    kind: str, server: BusServer, nats: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"TWICE-{kind}"
    async with wired_to(nats) as connection, simplebus.connect(server.address) as bus:
        await create_stream(connection, name, f"{name}.>", retention=kind)
        with monkeypatch.context() as patch:
            patch.setattr(StreamSource, "commit_position", skip_commit)
            await copy_300(connection, create_copier(nats, server, name), name)
        assert await count_stored(connection, name) == 300
        copier = create_copier(nats, server, name)
        async with copying(copier, until_connected=True):
            await wait_stream_empty(connection, name)
            await publish_numbered(connection, name, 300, 310)
            assert await payloads(bus, name, 310) == numbered_payloads(0, 310)
            await wait_until(lambda: copier.statistics().position == 311)
        statistics = copier.statistics()
        assert (statistics.copied, statistics.missed) == (10, 0)


@asynccontextmanager
async def create_consumer_while_target_is_away(
    connection: BridgeNatsConnection, nats: NatsServer, name: str
) -> AsyncIterator[None]:
    """Run a bridge whose target is away until it has created its consumer."""
    copied = CopiedClass(name, stream=name, start="new")
    nowhere = f"127.0.0.1:{free_port()}"
    async with copying(*create_copiers([BridgeSettings(name, nats.url, nowhere, (copied,))])):
        await wait_consumer_created(connection, name)
        yield


@pytest.mark.parametrize("kind", KINDS)
async def test_copies_messages_from_before_target_existed(
    kind: str, server: BusServer, nats: NatsServer
) -> None:
    name = f"FIRST-{kind}"
    async with wired_to(nats) as connection, simplebus.connect(server.address) as bus:
        await create_stream(connection, name, f"{name}.>", retention=kind)
        async with create_consumer_while_target_is_away(connection, nats, name):
            await publish_numbered(connection, name, 0, 10)
        copier = create_copier(nats, server, name, start="new")
        async with copying(copier):
            assert await payloads(bus, name, 10) == numbered_payloads(0, 10)
        assert copier.statistics().missed == 0
        assert await count_consumers(connection, name) == 1


async def test_new_consumer_does_not_replace_target_position(
    server: BusServer, nats: NatsServer
) -> None:
    """The target knows the position once it is available."""
    async with wired_to(nats) as connection, simplebus.connect(server.address) as bus:
        await create_stream(connection, "AGAIN", "AGAIN.>")
        copier = create_copier(nats, server, "AGAIN")
        async with copying(copier):
            await publish_numbered(connection, "AGAIN", 0, 10)
            assert await payloads(bus, "AGAIN", 10) == numbered_payloads(0, 10)
            await wait_until(lambda: copier.statistics().position == 11)
        await connection.nats.api_request(f"CONSUMER.DELETE.AGAIN.{consumer_name_of('AGAIN')}")
        await publish_numbered(connection, "AGAIN", 10, 20)
        async with create_consumer_while_target_is_away(connection, nats, "AGAIN"):
            await publish_numbered(connection, "AGAIN", 20, 30)
        async with copying(create_copier(nats, server, "AGAIN", start="new")):
            assert await payloads(bus, "AGAIN", 20) == numbered_payloads(10, 30)


async def test_interest_stream_always_has_consumer(
    server: BusServer, nats: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that processes the deletion of a consumer before the creation of the next one drops
    its messages. So a second consumer, which a killed bridge leaves behind, delivers them
    again.
    """
    name = "STAYS"

    async def leave_consumer(source: StreamSource, name: str) -> None:
        """Delete nothing, like a bridge that is killed."""

    async with wired_to(nats) as connection, simplebus.connect(server.address) as bus:
        await create_stream(connection, name, f"{name}.>", retention="interest")
        async with copying(create_copier(nats, server, name)):
            await wait_consumer_created(connection, name)
            created_at = (await consumer_info(connection, name))["created"]
            await publish_numbered(connection, name, 0, 10)
            assert await payloads(bus, name, 10) == numbered_payloads(0, 10)
        await wait_consumer_idle(connection, name)  # Messages sent there would need another reader.
        with monkeypatch.context() as patch:
            patch.setattr(StreamSource, "commit_position", skip_commit)
            async with copying(create_copier(nats, server, name)):
                await publish_numbered(connection, name, 10, 20)
                assert await payloads(bus, name, 10) == numbered_payloads(10, 20)
        await wait_consumer_idle(connection, name)
        with monkeypatch.context() as patch:
            patch.setattr(StreamSource, "_delete", leave_consumer)
            patch.setattr(StreamSource, "commit_position", skip_commit)
            async with copying(create_copier(nats, server, name)):
                await publish_numbered(connection, name, 20, 30)
                assert await payloads(bus, name, 10) == numbered_payloads(20, 30)
        assert await count_consumers(connection, name) == 2
        await publish_numbered(connection, name, 30, 40)
        copier = create_copier(nats, server, name)
        async with copying(copier, until_connected=True):
            assert await payloads(bus, name, 10) == numbered_payloads(30, 40)
            await wait_stream_empty(connection, name)
            await wait_single_consumer(connection, name)
        assert copier.statistics().missed == 0
        assert (await consumer_info(connection, name))["created"] == created_at


@pytest.mark.parametrize("variant", [1, 2], ids=["the reader", "the consumer"])
async def test_copies_after_connection_loss_during_reread(
    variant: int, server: BusServer, nats: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that has not detected a lost connection sends new messages there. So the consumer
    of the copier continues after them, while the reader still delivers, or when it takes over.
    """
    name, resume, resume_count = f"LATE-{variant}", StreamSource._resume, 0

    async with (
        wired_to(nats) as connection,
        wired_to(nats) as lost_connection,
        simplebus.connect(server.address) as bus,
    ):
        await create_stream(connection, name, f"{name}.>", retention="interest")
        with monkeypatch.context() as patch:
            patch.setattr(StreamSource, "commit_position", skip_commit)
            await copy_300(connection, create_copier(nats, server, name), name)
        await wait_consumer_idle(connection, name)
        lost_connection.core.subscribe("lost")
        pull_request = jetstream_codec.pull_request(batch=5, expires_seconds=60.0)
        lost_connection.core.publish(
            f"{jetstream_codec.API}CONSUMER.MSG.NEXT.{name}.{consumer_name_of(name)}",
            pull_request,
            reply="lost",
        )
        await lost_connection.round_trip()

        async def meanwhile(source: StreamSource, position: int) -> None:
            nonlocal resume_count
            resume_count += 1
            await resume(source, position)
            if resume_count == variant:
                await publish_numbered(connection, name, 300, 310)

        monkeypatch.setattr(StreamSource, "_resume", meanwhile)
        copier = create_copier(nats, server, name)
        async with copying(copier):
            assert await payloads(bus, name, 310) == numbered_payloads(0, 310)
            await wait_stream_empty(connection, name)
            await wait_single_consumer(connection, name)
        assert copier.statistics().missed == 0
        assert sum(batch.count for batch in lost_connection.messages) == 5


async def test_waits_for_reader_that_is_behind_stream(
    server: BusServer, nats: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The leader of the reader may be behind the leader of the stream, and report no more
    messages.
    """
    name = "LESS"
    pending: Any = StreamSource.__dict__["_pending"]

    async with wired_to(nats) as connection, simplebus.connect(server.address) as bus:
        await create_stream(connection, name, f"{name}.>", retention="interest")
        with monkeypatch.context() as patch:
            patch.setattr(StreamSource, "commit_position", skip_commit)
            await copy_300(connection, create_copier(nats, server, name), name)
        less = property(lambda source: 0 if source._is_rereading else pending.fget(source))
        monkeypatch.setattr(StreamSource, "_pending", less)
        copier = create_copier(nats, server, name)
        async with copying(copier, until_connected=True):
            await publish_numbered(connection, name, 300, 310)
            assert await payloads(bus, name, 310) == numbered_payloads(0, 310)
            await wait_stream_empty(connection, name)
        assert copier.statistics().missed == 0


async def test_does_not_wait_for_delivered_and_removed_messages(
    server: BusServer, nats: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "PURGED"
    async with wired_to(nats) as connection, simplebus.connect(server.address) as bus:
        await create_stream(connection, name, f"{name}.>", retention="interest")
        with monkeypatch.context() as patch:
            patch.setattr(StreamSource, "commit_position", skip_commit)
            await copy_300(connection, create_copier(nats, server, name), name)
        await connection.nats.api_request(f"STREAM.PURGE.{name}")
        copier = create_copier(nats, server, name)
        async with copying(copier, until_connected=True):
            await publish_numbered(connection, name, 300, 310)
            assert await payloads(bus, name, 310) == numbered_payloads(0, 310)
            await wait_stream_empty(connection, name)


async def test_interest_stream_accepts_changed_subjects(
    server: BusServer, nats: NatsServer
) -> None:
    name = "OTHER"

    def create_letter_copier(letter: str) -> Copier:
        copied = CopiedClass(name, stream=name, channels=(f"{name}.{letter}",))
        return create_copiers([BridgeSettings(name, nats.url, server.address, (copied,))])[0]

    async with wired_to(nats) as connection, simplebus.connect(server.address) as bus:
        await create_stream(connection, name, f"{name}.>", retention="interest")
        for first, letter in enumerate("abab"):
            async with copying(create_letter_copier(letter), until_connected=True):
                for each in "ab":
                    connection.core.publish(f"{name}.{each}", f"{each}{first}".encode())
                await connection.round_trip()
                assert await payloads(bus, name, 1) == [f"{letter}{first}".encode()]
                await wait_stream_empty(connection, name)


async def test_work_queue_is_copied_from_first_message(server: BusServer, nats: NatsServer) -> None:
    """A work queue would keep skipped messages forever."""
    async with wired_to(nats) as connection, simplebus.connect(server.address) as bus:
        await create_stream(connection, "ALL", "ALL.>", retention="workqueue")
        await publish_numbered(connection, "ALL", 0, 10)
        async with copying(create_copier(nats, server, "ALL", start="new")):
            assert await payloads(bus, "ALL", 10) == numbered_payloads(0, 10)
            await wait_stream_empty(connection, "ALL")


@pytest.mark.parametrize("kind", [*KINDS, ""])
async def test_long_nats_message_becomes_complete_dead_letters(kind: str, tmp_path: Path) -> None:
    """The stream drops the message only after that. An empty `kind` stands for core NATS."""
    name = f"LONG-{kind}"
    long_message = bytes(range(256)) * 40
    small_settings = Settings(limits=Limits(frame_bytes=4096))
    with nats_server(tmp_path) as nats, bus_server(small_settings) as server:
        async with wired_to(nats) as connection, simplebus.connect(server.address) as bus:
            if kind:
                await create_stream(connection, name, f"{name}.>", retention=kind)
            source_options = {"stream": name} if kind else {"channels": (f"{name}.>",)}
            copier = create_copiers(
                [
                    BridgeSettings(
                        "b", nats.url, server.address, (CopiedClass(name, **source_options),)
                    )
                ]
            )[0]  # type: ignore[arg-type]
            async with copying(copier, until_connected=True):
                if kind:
                    await wait_consumer_created(connection, name)
                headers = b"NATS/1.0\r\ntenant: 7\r\n\r\n"
                for payload in (b"one", long_message, b"three"):
                    connection.core.write(
                        encode.encode_pub(f"{name}.x".encode(), payload, headers=headers)
                    )
                await connection.round_trip()
                assert await payloads(bus, name, 2) == [b"one", b"three"]
                letters: list[Message[bytes]] = []
                while b"".join(letter.payload for letter in letters) != long_message:
                    letters += await read(bus, f"dead.{name}", 1)
                await wait_until(lambda: copier.statistics().position == (4 if kind else 3))
                if kind in KINDS[:2]:
                    await wait_stream_empty(connection, name)
            assert len(letters) > 2
            for number, letter in enumerate(letters, 1):
                letter_headers = dict(letter.headers)
                assert (letter.channel, letter_headers["tenant"]) == (f"{name}.x", "7")
                assert letter_headers["dead-error"].startswith(
                    f"part {number} of {len(letters)}; unfit: "
                )
                assert (letter_headers["dead-class"], letter_headers["dead-sequence"]) == (
                    name,
                    "2" if kind else "1",
                )
            statistics = copier.statistics()
            assert (statistics.copied, statistics.refused, statistics.missed) == (2, 1, 0)


@pytest.mark.parametrize("kind", KINDS)
async def test_stream_keeps_message_without_room_for_dead_letter(
    kind: str, nats: NatsServer
) -> None:
    """The message stays in the stream until the bridge gets the permissions that it lacks."""
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
        await create_stream(connection, name, f"{name}.>", retention=kind)
        copier = create_copiers(
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
        async with copying(copier):
            await wait_consumer_created(connection, name)
            await publish_numbered(connection, name, 0, 100)
            await wait_until(lambda: copier.statistics().losses > 2)
            assert "has no permissions in class 'dead." in copier.statistics().problem
            assert await count_stored(connection, name) == 100
            server.server.replace_users(users(name, f"dead.{name}"))
            await wait_until(lambda: copier.statistics().position == 101)
            statistics = copier.statistics()
            assert (statistics.copied, statistics.missed) == (100 - statistics.refused, 0)
            async with simplebus.connect(address, token="all") as bus:
                # A refused message stays refused under its number.
                received = await payloads(bus, f"dead.{name}", statistics.refused)
                assert received + await payloads(bus, name, statistics.copied) == numbered_payloads(
                    0, 100
                )
