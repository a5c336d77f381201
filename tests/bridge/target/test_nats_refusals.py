"""Messages that a NATS server refuses become dead letters, and the others are copied."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import simplebus
from simplebus.bridge.runner import create_copiers
from simplebus.bridge.settings import BridgeSettings, CopiedClass
from simplebus.nats.client import jetstream_codec
from simplebus.nats.client.events import ReceivedMessages
from simplebus.nats.client.jetstream_codec import JetStreamError, PubAcks
from simplebus.net.nats_connection import NatsConnection
from tests.bridge.memory_buses import numbered_payloads
from tests.bridge.nats_copiers import (
    BusServer,
    NatsServer,
    connect,
    copying,
    count_stored,
    create_stream,
    wait_until,
)
from tests.bridge.target.test_batched_stream import stream_payloads
from tests.jetstream.nats_servers import nats_server

MAY_NOT = """authorization { users = [
    { user: lane, password: p, permissions: { publish: { deny: ["no.>"] } } }
] }"""


@pytest.mark.parametrize(("name", "max_subject_bytes"), [("", 4094), ("LINES", 3968)])
async def test_dead_letters_message_whose_subject_is_too_long(
    name: str, max_subject_bytes: int, server: BusServer, nats: NatsServer
) -> None:
    """The server would close the connection each time the message is sent."""
    class_ = f"{name}l"
    sizes = [9, *[max_subject_bytes] * 20, *[4095] * 20, 4096, 10]
    async with connect(nats) as connection, simplebus.connect(server.address) as bus:
        if name:
            await create_stream(connection, name, f"{class_}.>")
        for size in sizes:
            channel = f"{class_}.".ljust(size, "x")
            await bus.publish(b"", class_id=class_, channel=channel)
        copied = CopiedClass(class_, stream=name, start="earliest")
        (copier,) = create_copiers(
            [BridgeSettings("lines", server.address, nats.url, (copied,), has_path=False)]
        )
        async with copying(copier):
            await wait_until(lambda: copier.statistics().position == len(sizes))
        statistics = copier.statistics()
        assert (statistics.copied, statistics.refused, statistics.losses) == (22, 21, 0)
        if name:
            assert await count_stored(connection, name) == 22
        letters = await bus.fetch(f"dead.{class_}")
        assert len(letters) == 21
        assert dict(letters[0].headers)["dead-error"].startswith("unfit: its command line has 4")


@pytest.mark.parametrize(
    ("name", "allows_batches"), [("", False), ("DENIED", False), ("CHAIN", True)]
)
async def test_refuses_denied_subjects_with_escapes(
    name: str, allows_batches: bool, server: BusServer, tmp_path: Path
) -> None:
    channels = ["no.a", 'no."q"', "no.back\\slash", "no.zero\u200bwidth", "no.a'b'", "no.ö", "yes"]
    class_ = f"{name}d"
    with nats_server(tmp_path, MAY_NOT) as nats:
        url = nats.url.replace("//", "//lane:p@")
        async with (
            connect(url) as connection,
            simplebus.connect(server.address) as bus,
        ):
            if name:
                stream_options = {"subjects": ["no.>", "yes"], "allow_batched": allows_batches}
                await create_stream(connection, name, "", **stream_options)
            for channel in channels:
                await bus.publish(b"", class_id=class_, channel=channel)
            copied = CopiedClass(class_, stream=name, start="earliest")
            (copier,) = create_copiers([BridgeSettings("denied", server.address, url, (copied,))])
            async with copying(copier):
                await wait_until(lambda: copier.statistics().position == len(channels))
            statistics = copier.statistics()
            assert (statistics.copied, statistics.refused, statistics.losses) == (1, 6, 0)
            letters = await bus.fetch(f"dead.{class_}")
            assert [letter.channel for letter in letters] == channels[:-1]


async def test_full_subject_does_not_block_others(server: BusServer, nats: NatsServer) -> None:
    per_subject = {"discard": "new", "discard_new_per_subject": True, "max_msgs_per_subject": 2}
    async with connect(nats) as connection, simplebus.connect(server.address) as bus:
        await create_stream(connection, "EACH", "each.>", **per_subject)
        for channel in "each.a", "each.a", "each.a", "each.b":
            await bus.publish(b"", class_id="each", channel=channel)
        copied = CopiedClass("each", stream="EACH", start="earliest")
        (copier,) = create_copiers([BridgeSettings("each", server.address, nats.url, (copied,))])
        async with copying(copier):
            await wait_until(lambda: copier.statistics().position == 4)
        assert (copier.statistics().copied, copier.statistics().refused) == (3, 1)
        (letter,) = await bus.fetch("dead.each")
        assert "maximum messages per subject" in dict(letter.headers)["dead-error"]


NEEDS = """
authorization {
  users = [
    {user: whole, password: p}
    {user: mute, password: p, permissions: {publish: "odd", subscribe: ["_INBOX.>", "heard.*"]}}
    {user: half, password: p, permissions: {publish: "_INBOX.>", subscribe: ["_INBOX.>"]}}
    {user: deaf, password: p, permissions: {publish: ">", subscribe: "heard.*"}}
    {user: few, password: p, permissions: {publish: {deny: "$JS.ACK.>"}, subscribe: ">"}}
  ]
}"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("user", "copied", "problem"),
    [
        ("half", CopiedClass("a", channels=("heard.x", "not.x")), 'Subscription to "not.x"'),
        ("deaf", CopiedClass("b", channels=("heard.x",)), 'Subscription to "_INBOX.>"'),
        ("mute", CopiedClass("e", channels=("heard.x",)), 'Publish to "_INBOX.>"'),
        ("mute", CopiedClass("c", stream="S"), 'Publish to "$JS.API.STREAM.INFO.S"'),
        ("few", CopiedClass("d", stream="S"), 'Publish to "$JS.ACK.>"'),
    ],
)
async def test_logs_missing_permission_once(
    user: str,
    copied: CopiedClass,
    problem: str,
    server: BusServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Without the log line, the copier would be connected and copy nothing."""
    monkeypatch.setattr("simplebus.bridge.copier.RETRY_DELAY_MAX_SECONDS", 0.05)
    monkeypatch.setitem(NatsConnection.api_request.__kwdefaults__, "seconds", 3.0)
    caplog.set_level("WARNING")
    with nats_server(tmp_path, NEEDS) as nats:

        def url(user: str) -> str:
            return nats.url.replace("//", f"//{user}:p@")

        async with connect(url("whole")) as connection:
            await create_stream(connection, "S", "s")
            connection.core.publish("s", b"1")
            await connection.round_trip()
            (copier,) = create_copiers(
                [BridgeSettings("needs", url(user), server.address, (copied,))]
            )
            async with copying(copier):
                await wait_until(lambda: copier.statistics().losses >= 3)
                await wait_until(lambda: problem in copier.statistics().problem)
    denials = [message for message in caplog.messages if "Permissions Violation" in message]
    assert len(set(denials)) == 1
    assert len(denials) == 1 or user == "few"  # Copies before the refusal arrives.


@pytest.mark.parametrize(
    "refusal",
    [
        JetStreamError(10158, "duplicate message id is in process"),
        JetStreamError(10077, "no space left on device"),
    ],
    ids=["in process", "disk"],
)
async def test_retryable_refusal_is_not_dead_lettered(
    refusal: JetStreamError, server: BusServer, nats: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new leader refuses a resent message until it has determined whether it has stored the
    message. A server with a failed disk refuses every message.
    """
    pub_acks, refusals = jetstream_codec.parse_pub_acks, list[JetStreamError]()

    def doubtful(messages: ReceivedMessages) -> PubAcks:
        acks = pub_acks(messages)
        if not refusals:
            refusals.append(refusal)
            acks.errors[0] = refusal
        return acks

    async with connect(nats) as connection, simplebus.connect(server.address) as bus:
        name = f"DOUBTFUL{refusal.code}"
        await create_stream(connection, name, f"class.{name}")
        await bus.publish_many(numbered_payloads(0, 10), class_id=name)
        copied = CopiedClass(name, stream=name, start="earliest")
        (copier,) = create_copiers(
            [BridgeSettings("doubtful", server.address, nats.url, (copied,))]
        )
        monkeypatch.setattr(jetstream_codec, "parse_pub_acks", doubtful)
        async with copying(copier):
            await wait_until(lambda: copier.statistics().position == 10)
        statistics = copier.statistics()
        assert (len(refusals), statistics.refused, statistics.losses) == (1, 0, 0)
        assert await count_stored(connection, name) == 10


ONLY = """authorization { users = [
    { user: lane, password: p, permissions: { publish: "only.>", subscribe: "_INBOX.>" } }
] }"""


async def test_core_nats_target_needs_only_publish_permission(
    server: BusServer, tmp_path: Path
) -> None:
    """The PONG of the server confirms the messages, so no message to the own inbox is needed."""
    with nats_server(tmp_path, ONLY) as nats:
        url = nats.url.replace("//", "//lane:p@")
        async with simplebus.connect(server.address) as bus:
            for number in range(3):
                await bus.publish(b"", class_id="only", channel=f"only.{number}")
            await bus.publish(b"", class_id="only", channel="else")
            (copier,) = create_copiers(
                [BridgeSettings("only", server.address, url, (CopiedClass("only"),))]
            )
            async with copying(copier):
                await wait_until(lambda: copier.statistics().position == 4)
            statistics = copier.statistics()
            assert (statistics.copied, statistics.refused, statistics.losses) == (3, 1, 0)


@pytest.mark.parametrize(
    ("name", "target_options"),
    [
        ("FOREIGN", {}),
        ("FOREIGN-FEW", {"under_way": 2}),
        ("FOREIGN-BATCHES", {"allow_batched": True}),
    ],
)
@pytest.mark.parametrize("is_first", [True, False])
async def test_message_for_other_subscriber_is_refused(
    name: str, target_options: dict[str, Any], is_first: bool, server: BusServer, nats: NatsServer
) -> None:
    """If any other client has subscribed to the subject, the server does not report "no
    responders", and nothing answers. The copier once resent such a message forever.
    """
    name += "-1" if is_first else "-2"
    prefix = name.lower()
    channels = [
        f"{prefix}.a",
        "elsewhere.a",
        f"{prefix}.b",
        "elsewhere.b",
        "elsewhere.a",
        f"{prefix}.c",
    ]
    if is_first:
        channels.insert(0, "elsewhere.c")
    batched = {"allow_batched": True} if "allow_batched" in target_options else {}
    in_flight_options = {} if batched else target_options
    async with (
        connect(nats) as connection,
        simplebus.connect(server.address) as bus,
    ):
        await create_stream(connection, name, f"{prefix}.>", **batched)
        connection.core.subscribe("elsewhere.>")
        await connection.round_trip()
        for channel in channels:
            await bus.publish(channel.encode(), class_id=prefix, channel=channel)
        copied = CopiedClass(prefix, stream=name, start="earliest", **in_flight_options)
        (copier,) = create_copiers(
            [BridgeSettings(name, server.address, nats.url, (copied,), heartbeat_seconds=1.0)]
        )
        async with copying(copier):
            await wait_until(lambda: copier.statistics().position == len(channels))
        found, expected = (
            copier.statistics(),
            [channel for channel in channels if channel.startswith(prefix)],
        )
        assert (found.copied, found.refused) == (3, len(channels) - 3)
        assert await stream_payloads(connection, name) == [each.encode() for each in expected]
        letters = await bus.fetch(f"dead.{prefix}")
        assert {dict(letter.headers)["dead-error"] for letter in letters} == {
            f"no_stream: stream {name!r} does not accept the subject 'elsewhere.{end}'"
            for end in ("abc" if is_first else "ab")
        }
