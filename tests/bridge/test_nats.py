"""Copiers between a bus and a real nats-server, with and without JetStream."""

from __future__ import annotations

from typing import Any

import pytest
import trio

import simplebus
from simplebus.bridge.copier import Copier
from simplebus.bridge.loop_header import PATH_HEADER
from simplebus.bridge.nats_connection import BridgeNatsConnection
from simplebus.bridge.reserved_headers import KEY_HEADER, SUBJECT_HEADER
from simplebus.bridge.runner import create_copiers
from simplebus.bridge.settings import BridgeSettings, CopiedClass
from simplebus.core.protocol.requests import SubscribeRequest
from simplebus.nats.client import encode
from simplebus.testing.server import BusServer, bus_server
from tests.bridge.memory_buses import numbered_payloads, payloads
from tests.bridge.nats_copiers import (
    PATIENCE_SECONDS,
    connect,
    copying,
    count_stored,
    create_stream,
    wait_until,
)
from tests.jetstream.nats_servers import NatsServer

NAMES = iter(range(1000))


def create_copier(
    source: str, target: str, class_: str, *, has_path: bool = True, **more: Any
) -> Copier:
    options = {"start": more.pop("start", "earliest"), **more}
    bridge = BridgeSettings(
        f"b{next(NAMES)}", source, target, (CopiedClass(class_, **options),), has_path=has_path
    )
    (copier,) = create_copiers([bridge])
    return copier


async def received_messages(
    connection: BridgeNatsConnection, count: int
) -> list[tuple[bytes, bytes, bytes]]:
    """Return subject, headers and payload of received messages."""
    while sum(batch.count for batch in connection.messages) < count:
        await connection.wait_event()
    return [
        (batch.subject(row), batch.headers(row), batch.payload(row))
        for batch in connection.messages
        for row in range(batch.count)
    ]


async def test_copies_class_to_core_nats(server: BusServer, nats: NatsServer) -> None:
    async with connect(nats) as connection, simplebus.connect(server.address) as bus:
        for subject in "class.tills", "eu.>":
            connection.core.subscribe(subject)
        await connection.round_trip()
        await bus.publish_many([b"%03d" % n for n in range(100)], class_id="tills")
        more: Any = {"channel": "orders.eu", "key": b"k", "headers": {"h": "1"}}
        await bus.publish(b"one", class_id="tills", **more)
        await bus.publish(b"gone", class_id="tills", expires=0.001)
        await trio.sleep(0.01)
        copied = create_copier(
            server.address, nats.url, "tills", rewrite=(("orders.*", "*.orders"),)
        )
        async with copying(copied):
            received = await received_messages(connection, 101)
            await wait_until(lambda: copied.statistics().copied == 101)
        path = f"{PATH_HEADER}: {bus.connection.core.bus_id}\r\n".encode()
        assert received[:100] == [
            (b"class.tills", b"NATS/1.0\r\n" + path + b"\r\n", b"%03d" % n) for n in range(100)
        ]
        headers = b"NATS/1.0\r\nh: 1\r\n" + path + f"{KEY_HEADER}: k\r\n\r\n".encode()
        assert received[100:] == [(b"eu.orders", headers, b"one")]


async def test_path_can_be_disabled_without_loops(server: BusServer, nats: NatsServer) -> None:
    async with connect(nats) as connection, simplebus.connect(server.address) as bus:
        connection.core.subscribe("class.bare")
        await connection.round_trip()
        await bus.publish_many([b"%03d" % n for n in range(100)], class_id="bare")
        own_identity = bus.connection.core.bus_id
        for path in (
            "a",
            f"a {own_identity}",
        ):  # Messages of other bridges have a path, which prevents loops.
            await bus.publish(path.encode(), class_id="bare", headers={PATH_HEADER: path})
        await bus.publish(b"last", class_id="bare")
        copied = create_copier(server.address, nats.url, "bare", has_path=False)
        async with copying(copied):
            received = await received_messages(connection, 102)
            await wait_until(lambda: copied.statistics().skipped == {"looped": 1})
        assert received[:100] == [(b"class.bare", b"", b"%03d" % n) for n in range(100)]
        headers = f"NATS/1.0\r\n{PATH_HEADER}: a\r\n\r\n".encode()
        assert received[100:] == [(b"class.bare", headers, b"a"), (b"class.bare", b"", b"last")]


async def test_stream_drops_duplicates(server: BusServer, nats: NatsServer) -> None:
    async with connect(nats) as connection, simplebus.connect(server.address) as bus:
        await create_stream(connection, "TILLS", "once.>")
        copied = CopiedClass("once", stream="TILLS", rewrite=(("#", "once.x.#"),), start="earliest")
        bridge = BridgeSettings("once", server.address, nats.url, (copied,))
        async with bus.subscribe("once", durable="holds them"):
            await bus.publish_many(numbered_payloads(0, 200), class_id="once")
        await bus.publish(b"one", class_id="once", key=b"k")
        for run_number in range(2):
            (copier,) = create_copiers([bridge])
            async with copying(copier):
                await wait_until(lambda copier=copier: copier.statistics().position == 201)
            statistics = copier.statistics()
            assert (statistics.copied, statistics.skipped) == (
                (0, {"known_there": 201}) if run_number else (201, {})
            )
            assert await count_stored(connection, "TILLS") == 201
            # A bridge that is killed before it commits its position sends everything again.
            core = bus.connection.core
            subscribe_request = SubscribeRequest(durable=copier.name, start="earliest", seek=True)
            inbox = core.subscribe(await bus.resolve_class_id("once"), subscribe_request)
            await bus.connection.wait_answered(inbox.subscribe_request)
            await bus.connection.wait_answered(core.unsubscribe(inbox, is_processed=False))


async def test_reserved_headers_and_subjects_are_not_copied(
    server: BusServer, nats: NatsServer
) -> None:
    """They would make the server drop messages, or delete streams, on behalf of the bridge."""
    async with connect(nats) as connection, simplebus.connect(server.address) as bus:
        await create_stream(connection, "OWN", "own.>")
        await create_stream(connection, "VICTIM", "victim.>")
        for header in "Nats-Msg-Id", "nats-msg-id", "Nats-Expected-Last-Sequence", "NATS-TTL":
            for _ in range(2):
                await bus.publish(b"", class_id="own", headers={header: "7", "h": "1"})
        copied = create_copier(
            server.address, nats.url, "own", stream="OWN", rewrite=(("#", "own.x.#"),)
        )
        async with copying(copied):
            await wait_until(lambda: copied.statistics().position == 8)
        assert (copied.statistics().copied, await count_stored(connection, "OWN")) == (8, 8)

        inbox = "_INBOX.somebody"
        connection.core.subscribe(inbox)
        connection.core.subscribe("$SAID.>")
        await connection.round_trip()
        await bus.publish(b"", class_id="free", channel="$JS.API.STREAM.DELETE.VICTIM")
        await bus.publish(b"x", class_id="free", channel=inbox)
        await bus.publish(b"said", class_id="free", channel="said.so")
        await bus.publish(b"", class_id="free", channel="x.$JS.API.STREAM.DELETE.VICTIM")
        rules = (("said.*", "$SAID.*"), ("x.#", "#"))
        copied = create_copier(server.address, nats.url, "free", rewrite=rules)
        async with copying(copied):
            await wait_until(lambda: copied.statistics().position == 4)
        assert [(subject, body) for subject, _, body in await received_messages(connection, 1)] == [
            (b"$SAID.so", b"said")
        ]
        assert await count_stored(connection, "VICTIM") == 0
        statistics = copied.statistics()
        assert (statistics.copied, statistics.skipped, statistics.refused) == (1, {"refused": 3}, 3)
        letters = await payloads(bus, "dead.free", 3)
        assert letters == [b"", b"x", b""]


async def test_copies_stream_to_stream(server: BusServer, nats: NatsServer) -> None:
    async with connect(nats) as connection:
        await create_stream(connection, "FIRST", "first.>")
        await create_stream(connection, "SECOND", "second.>")
        for number in range(20):
            connection.core.publish("first.a", b"%d" % number)
        await connection.round_trip()
        copiers = [
            create_copier(nats.url, server.address, "chain", stream="FIRST"),
            create_copier(
                server.address,
                nats.url,
                "chain",
                stream="SECOND",
                rewrite=(("first.#", "second.#"),),
            ),
        ]
        async with copying(copiers[0]), copying(copiers[1]):
            await wait_until(lambda: copiers[1].statistics().position == 20)
        assert (copiers[1].statistics().copied, await count_stored(connection, "SECOND")) == (
            20,
            20,
        )


async def test_recreates_deleted_consumer(server: BusServer, nats: NatsServer) -> None:
    async with connect(nats) as connection, simplebus.connect(server.address) as bus:
        await create_stream(connection, "ENDS", "ends.>")
        copied = create_copier(nats.url, server.address, "ends", stream="ENDS", start="new")
        async with copying(copied):
            await wait_until(lambda: copied.statistics().is_up)
            for round_ in range(3):
                for number in range(10 * round_, 10 * round_ + 10):
                    connection.core.publish("ends.a", b"%d" % number)
                await connection.round_trip()
                await wait_until(
                    lambda round_=round_: copied.statistics().copied == 10 * round_ + 10
                )
                (name,) = (await connection.nats.api_request("CONSUMER.NAMES.ENDS"))["consumers"]
                await connection.nats.api_request(f"CONSUMER.DELETE.ENDS.{name}")
                # Core NATS publishes it without any subscriber.
            await wait_until(lambda: copied.statistics().losses == 3)
            assert await payloads(bus, "ends", 30) == numbered_payloads(0, 30)


async def test_wildcard_skips_reserved_subjects(server: BusServer, nats: NatsServer) -> None:
    """A copier back to the same server would copy its own echoes forever."""
    async with connect(nats) as connection, simplebus.connect(server.address) as bus:
        copiers = [
            create_copier(nats.url, server.address, "wide"),
            create_copier(server.address, nats.url, "wide", rewrite=(("x", "$OWN"),)),
        ]
        async with bus.subscribe("wide", durable="test"):
            pass
        intended = create_copier(nats.url, server.address, "meant", channels=("_INBOX.meant.*",))
        async with copying(copiers[0]), copying(copiers[1]), copying(intended):
            await wait_until(lambda: all(each.statistics().is_up for each in (*copiers, intended)))
            for subject in "one", "_INBOX.x.1", "$x", "_INBOX.meant.1", "_two", "three":
                connection.core.publish(subject, subject.encode())
            await connection.round_trip()
            assert await payloads(bus, "wide", 3) == [b"one", b"_two", b"three"]
            assert await payloads(bus, "meant", 1) == [b"_INBOX.meant.1"]
            await wait_until(lambda: copiers[1].statistics().position == 3)
            await bus.publish(b"last", class_id="wide", channel="x")
            await wait_until(lambda: copiers[1].statistics().position == 4)
            await connection.round_trip()
            assert await payloads(bus, "wide", 1) == [b"last"]
            await wait_until(lambda: copiers[0].statistics().copied == 3)


async def test_waits_for_full_stream(
    server: BusServer, nats: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("simplebus.bridge.copier._RESEND_DELAY_SECONDS", 0.02)
    async with connect(nats) as connection, simplebus.connect(server.address) as bus:
        config = {"name": "FULL", "subjects": ["class.full"], "max_msgs": 10, "discard": "new"}
        await connection.nats.api_request("STREAM.CREATE.FULL", config)
        await bus.publish_many(numbered_payloads(0, 25), class_id="full")
        copied = create_copier(server.address, nats.url, "full", stream="FULL")
        async with copying(copied):
            for count in 10, 20:
                await wait_until(lambda count=count: copied.statistics().copied == count)
                await connection.nats.api_request("STREAM.PURGE.FULL")
            await wait_until(lambda: copied.statistics().position == 25)
        statistics = copied.statistics()
        assert (statistics.copied, statistics.refused, await count_stored(connection, "FULL")) == (
            25,
            0,
            5,
        )


async def test_logs_missing_stream_once_and_waits(
    server: BusServer, nats: NatsServer, caplog: pytest.LogCaptureFixture
) -> None:
    async with connect(nats) as connection, simplebus.connect(server.address) as bus:
        await bus.publish(b"1", class_id="late")
        copied = create_copier(server.address, nats.url, "late", stream="LATE")
        async with copying(copied):
            await wait_until(lambda: copied.statistics().losses >= 4)
            assert (
                "stream 'LATE' did not answer" in copied.statistics().problem
                or copied.statistics().is_up
            )
            await create_stream(connection, "LATE", "class.late")
            await wait_until(lambda: copied.statistics().copied == 1)
        assert await count_stored(connection, "LATE") == 1
        assert caplog.text.count("stream 'LATE' did not answer: JetStream: stream not found") == 1
        assert caplog.text.count(": copying again") == 1


async def test_waits_for_stream_while_another_has_its_subject(
    server: BusServer, nats: NatsServer
) -> None:
    """The name of the stream may be misspelt. The messages are then stored in the other stream
    only.
    """
    async with connect(nats) as connection, simplebus.connect(server.address) as bus:
        await create_stream(connection, "OTHER", "other.>")
        await bus.publish(b"1", class_id="another", channel="other.x")
        copied = create_copier(server.address, nats.url, "another", stream="ANOTHER")
        async with copying(copied):
            await wait_until(
                lambda: "stream 'ANOTHER' did not answer" in copied.statistics().problem
            )
            await create_stream(connection, "ANOTHER", "class.another")
            await wait_until(lambda: copied.statistics().position == 1)
        assert (copied.statistics().copied, copied.statistics().refused) == (0, 1)
        (letter,) = await bus.fetch("dead.another")
        assert "does not accept the subject 'other.x'" in dict(letter.headers)["dead-error"]


async def test_subject_outside_stream_is_refused(server: BusServer, nats: NatsServer) -> None:
    async with connect(nats) as connection, simplebus.connect(server.address) as bus:
        await create_stream(connection, "SOME", "some.*")
        for number in range(60):
            more: Any = {"channel": "stray"} if number == 30 else {"channel": "some.x"}
            await bus.publish(b"%d" % number, class_id="some", **({} if number == 40 else more))
        copied = create_copier(server.address, nats.url, "some", stream="SOME")
        async with copying(copied):
            await wait_until(lambda: copied.statistics().position == 60)
        statistics = copied.statistics()
        assert (statistics.copied, statistics.refused, statistics.losses) == (58, 2, 0)
        assert await count_stored(connection, "SOME") == 58
        letters = await bus.fetch("dead.some")
        assert [letter.payload for letter in letters] == [b"30", b"40"]
        assert [dict(letter.headers)["dead-error"] for letter in letters] == [
            f"no_stream: stream 'SOME' does not accept the subject {subject!r}"
            for subject in ("stray", "class.some")
        ]


async def test_copies_core_nats_to_class(server: BusServer, nats: NatsServer) -> None:
    async with connect(nats) as connection, simplebus.connect(server.address) as bus:
        copied = create_copier(nats.url, server.address, "heard", channels=("in.>",))
        async with copying(copied):
            await wait_until(lambda: copied.statistics().is_up)
            for number in range(100):
                connection.core.publish("in.a", b"%d" % number)
            headers = encode.encode_headers((b"h", b"1"), (KEY_HEADER.encode(), b"k"))
            connection.core.publish("in.b", b"<\r\n>", headers=headers)
            connection.nats.flush()
            async with bus.subscribe("heard") as messages:
                received = [await messages.get(PATIENCE_SECONDS) for _ in range(101)]
        assert [m.payload for m in received[:100]] == numbered_payloads(0, 100)
        assert received[0].channel == "in.a"
        assert (received[100].channel, received[100].payload, received[100].key) == (
            "in.b",
            b"<\r\n>",
            b"k",
        )
        assert connection.core.info is not None
        own_identity = f"nats.{connection.core.info.server_id[:16]}"
        assert received[100].headers == (("h", "1"), (PATH_HEADER, own_identity))


async def test_altered_nats_messages_are_counted_and_logged(
    server: BusServer, nats: NatsServer, caplog: pytest.LogCaptureFixture
) -> None:
    headers = encode.encode_headers((b"tenant", b"7"), (KEY_HEADER.encode(), b"k"))
    long_headers = encode.encode_headers((b"long", b"x" * 70_000), (KEY_HEADER.encode(), b"k"))
    async with connect(nats) as connection, simplebus.connect(server.address) as bus:
        copied = create_copier(nats.url, server.address, "odd", channels=("odd.>",))
        async with copying(copied, until_connected=True):
            for subject, block in (
                (b"odd.#", headers),
                (b"odd.a#", headers),
                (b"odd.caf\xe9", headers),
                (b"odd.b", long_headers),
                (b"odd.#", b""),
            ):
                connection.core.write(encode.encode_pub(subject, b"", headers=block))
            connection.nats.flush()
            async with bus.subscribe("odd") as messages:
                received = [await messages.get(PATIENCE_SECONDS) for _ in range(5)]
            await wait_until(lambda: copied.statistics().copied == 5)
    tenant_header = ("tenant", "7")
    assert [(m.channel, m.key, m.headers[:-1]) for m in received] == [
        ("", b"k", ((SUBJECT_HEADER, "odd.#"), tenant_header)),
        ("odd.a#", b"k", (tenant_header,)),
        ("", b"k", ((SUBJECT_HEADER, "odd.caf\\xe9"), tenant_header)),
        ("odd.b", b"k", ()),
        ("", b"", ((SUBJECT_HEADER, "odd.#"),)),
    ]
    assert copied.statistics().altered == 4
    assert caplog.text.count("subject 'odd.#' is not a valid channel") == 1
    assert caplog.text.count("counted, not logged") == 1


async def test_copies_between_two_nats_servers(server: BusServer, nats: NatsServer) -> None:
    async with connect(nats) as connection, simplebus.connect(server.address) as bus:
        assert connection.core.info is not None
        own_identity = f"nats.{connection.core.info.server_id[:16]}"
        copied = create_copier(nats.url, server.address, "circle", channels=("circle",))
        async with copying(copied):
            await wait_until(lambda: copied.statistics().is_up)
            for path in "nats.ANOTHER a", f"{own_identity} a":
                headers = encode.encode_headers((PATH_HEADER.encode(), path.encode()))
                connection.core.publish("circle", path.encode(), headers=headers)
            connection.core.publish("circle", b"last")
            await connection.round_trip()
            assert await payloads(bus, "circle", 2) == [b"nats.ANOTHER a", b"last"]
            await wait_until(lambda: copied.statistics().skipped == {"looped": 1})


async def test_copies_stream_once(server: BusServer, nats: NatsServer) -> None:
    async with connect(nats) as connection, simplebus.connect(server.address) as bus:
        await create_stream(connection, "WORDS", "words.*")
        for number in range(300):
            connection.core.publish(f"words.{number % 3}", b"%d" % number)
        await connection.round_trip()
        bridge = BridgeSettings(
            "words", nats.url, server.address, (CopiedClass("words", stream="WORDS"),)
        )
        for first, last in ((0, 300), (300, 310)):
            (copied,) = create_copiers([bridge])
            for number in range(max(300, first), last):
                connection.core.publish("words.0", b"%d" % number)
            connection.nats.flush()
            async with copying(copied):
                assert await payloads(bus, "words", last - first) == numbered_payloads(first, last)
                await wait_until(lambda copier=copied, end=last: copier.statistics().position > end)
        info_subject = "CONSUMER.INFO.WORDS.bridge-words-there-words"
        state = await connection.nats.api_request(info_subject)
        assert state["ack_floor"]["stream_seq"] == 310


async def test_same_name_from_stream_to_two_buses_is_rejected(
    server: BusServer, nats: NatsServer
) -> None:
    """The two bridges would take the consumer from each other forever."""
    async with connect(nats) as connection, simplebus.connect(server.address) as bus:
        await create_stream(connection, "SHARED", "shared")
        with bus_server() as second_server:
            copied = (CopiedClass("shared", stream="SHARED"),)
            first, second = (
                create_copiers([BridgeSettings("same", nats.url, each.address, copied)])[0]
                for each in (server, second_server)
            )
            async with copying(first):
                await wait_until(lambda: first.statistics().is_up)
                connection.core.publish("shared", b"0")
                connection.nats.flush()
                assert await payloads(bus, "shared", 1) == [b"0"]
                async with copying(second):
                    await wait_until(lambda: "its own name" in second.statistics().problem)
                    connection.core.publish("shared", b"1")
                    connection.nats.flush()
                    assert await payloads(bus, "shared", 1) == [b"1"]
                await wait_until(lambda: first.statistics().position == 3)
            assert first.statistics().losses == 0
            async with copying(second), simplebus.connect(second_server.address) as second_bus:
                connection.core.publish(
                    "shared", b"2"
                )  # A bridge whose target was moved continues there.
                connection.nats.flush()
                assert await payloads(second_bus, "shared", 1) == [b"2"]
