"""NATS servers that are lost, or stop answering."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio

import simplebus
from simplebus.bridge.copier import Copier
from simplebus.bridge.interfaces import SourceBatch
from simplebus.bridge.settings import BridgeSettings, CopiedClass, copier_name
from simplebus.bridge.source.core_nats import CoreNatsSource
from simplebus.bridge.source.stream import StreamSource, consumer_name
from simplebus.core.errors import BusConnectionError
from simplebus.testing.server import BusServer
from tests.bridge.memory_buses import numbered_payloads, payloads
from tests.bridge.nats_copiers import connect, running_bridges, wait_until
from tests.jetstream.nats_servers import NatsServer, nats_server

PATIENCE_SECONDS = 120.0
HEARTBEAT_SECONDS = 1.0
"""A copier waits three times as long for an expected answer."""


@asynccontextmanager
async def copying(
    source: str, target: str, class_: str, heartbeat: float = 10.0, **options: Any
) -> AsyncIterator[Copier]:
    copied = CopiedClass(class_, start="earliest", **options)
    bridge = BridgeSettings(class_, source, target, (copied,), heartbeat_seconds=heartbeat)
    async with running_bridges(bridge) as (copier,):
        yield copier


async def create_stream(nats: NatsServer, name: str, **options: object) -> None:
    async with connect(nats) as connection:
        config = {"name": name, "subjects": [f"{name.lower()}.>"], **options}
        await connection.nats.api_request(f"STREAM.CREATE.{name}", config)


async def test_stream_with_no_ack_is_fatal(server: BusServer, nats: NatsServer) -> None:
    """The copier would resend the messages, and the stream would store them again each time."""
    await create_stream(nats, "MUTE", no_ack=True)
    class_options: Any = {"rewrite": (("#", "mute.x.#"),), "stream": "MUTE", "heartbeat": 2.0}
    async with simplebus.connect(server.address) as bus:
        await bus.publish(b"hello", class_id="mute")
        async with copying(server.address, nats.url, "mute", **class_options) as copier:
            await wait_until(
                lambda: "remove 'no_ack' from the stream" in copier.statistics().problem
            )
            assert copier.statistics().losses == 1


async def test_answering_server_does_not_extend_timeout(
    nats: NatsServer,
) -> None:
    """The server still answers PINGs."""
    async with connect(nats, heartbeat=2.0) as connection:
        with trio.fail_after(PATIENCE_SECONDS), pytest.raises(BusConnectionError) as refused:
            await connection.wait_expected("an answer")
        assert str(refused.value).endswith("did not send an answer within 6 s")


async def test_recreates_silent_consumer(
    server: BusServer, nats: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pull request is lost if it reaches a leader that fails."""
    await create_stream(nats, "QUIET")
    class_options_: Any = {
        "channels": ("quiet.>",),
        "stream": "QUIET",
        "heartbeat": HEARTBEAT_SECONDS,
    }
    async with (
        simplebus.connect(server.address) as bus,
        copying(nats.url, server.address, "quiet", **class_options_) as copier,
    ):
        await wait_until(lambda: copier.statistics().is_up)
        losses = -1
        with trio.fail_after(PATIENCE_SECONDS):  # A busy machine may be late a few times.
            while losses < copier.statistics().losses:
                losses = copier.statistics().losses
                await trio.sleep(5 * HEARTBEAT_SECONDS)  # The consumer sends heartbeats.

        monkeypatch.setattr(StreamSource, "_request_more", lambda _: None)
        async with connect(nats) as connection:
            for number in range(20_000):  # More than were requested.
                connection.core.publish("quiet.x", b"%d" % number)
            await connection.round_trip()
        expected_warning = "of stream 'QUIET' within"
        await wait_until(lambda: expected_warning in copier.statistics().problem)
        assert copier.statistics().losses > losses
        monkeypatch.undo()
        assert await payloads(bus, "quiet", 20_000) == numbered_payloads(0, 20_000)


async def test_detects_lost_server_while_idle(server: BusServer, tmp_path: Path) -> None:
    with nats_server(tmp_path) as going:
        async with copying(server.address, going.url, "idle") as copier:
            await wait_until(lambda: copier.statistics().is_up)
            await trio.sleep(0.1)
            going.kill()
            await wait_until(lambda: not copier.statistics().is_up)
            assert copier.statistics().losses > 0


async def test_counts_messages_dropped_by_stream(
    server: BusServer, nats: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    await create_stream(nats, "SHORT", max_msgs=10)
    asking: list[StreamSource] = []
    pull = StreamSource._request_more
    monkeypatch.setattr(StreamSource, "_request_more", lambda source: asking.append(source))
    async with (
        simplebus.connect(server.address) as bus,
        connect(nats) as connection,
        copying(nats.url, server.address, "short", stream="SHORT") as copier,
    ):
        await wait_until(lambda: len(asking) > 1)  # The copier waits for the first message.
        for number in range(100):
            connection.core.publish("short.x", b"%d" % number)
        info = await connection.nats.api_request("STREAM.INFO.SHORT")
        while info["state"]["last_seq"] < 100:  # Stored after the answer.
            info = await connection.nats.api_request("STREAM.INFO.SHORT")
        monkeypatch.undo()
        pull(asking[-1])
        assert await payloads(bus, "short", 10) == numbered_payloads(90, 100)
        await wait_until(lambda: copier.statistics().copied == 10)
        assert (copier.statistics().missed, copier.statistics().losses) == (90, 0)


def refuse_dead_letters() -> Any:
    raise AssertionError("nothing is refused")


async def test_does_not_wait_for_purged_messages(
    nats: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("simplebus.bridge.source.pull_consumer.PULL_MESSAGES", 8)
    await create_stream(nats, "PURGED")
    async with connect(nats) as connection, connect(nats) as test_connection:
        for number in range(20):
            connection.core.publish("purged.x", b"%d" % number)
        await connection.round_trip()
        source = StreamSource(
            test_connection,
            "PURGED",
            target_id="there",
            durable="bridge b there c",
            subjects=(),
            start="earliest",
            heartbeat=0.2,
            open_dead_letters=refuse_dead_letters,
        )
        with trio.fail_after(PATIENCE_SECONDS):
            position = await source.open()
            while position < 9:
                position = (await source.read(position)).next_sequence
                await (
                    connection.round_trip()
                )  # Otherwise nothing would be received after an empty read.
            await connection.nats.api_request("STREAM.PURGE.PURGED")
            # Some may have been received, and some may be in flight.
            while position < 21 and (found := await source.read(position)).runs:
                position = found.next_sequence
            connection.core.publish("purged.x", b"late")
            connection.nats.flush()
            await source.wait_for_message(position)
            assert (await source.read(position)).next_sequence == 22


async def test_counts_core_nats_messages_lost_with_connection(
    server: BusServer, nats: NatsServer, caplog: pytest.LogCaptureFixture
) -> None:
    ends: list[CoreNatsSource] = []
    with pytest.MonkeyPatch.context() as patch:
        find = CoreNatsSource.read

        async def lose_reply(source: CoreNatsSource, position: int) -> SourceBatch:
            found = await find(source, position)
            ends.append(source)
            if found.runs:
                raise BusConnectionError("the far end is gone")
            return found

        patch.setattr(CoreNatsSource, "read", lose_reply)
        async with (
            connect(nats) as connection,
            copying(nats.url, server.address, "held", channels=("held.>",)) as copier,
        ):
            await wait_until(lambda: bool(ends))
            for number in range(100):
                connection.core.publish("held.x", b"%d" % number)
            await connection.round_trip()
            await wait_until(lambda: copier.statistics().missed > 0)
            assert copier.statistics().copied == 0
    assert ": missed " in caplog.text


def test_unusual_class_names_get_own_consumers() -> None:
    classes = ["orders.eu", "orders-eu", "orders eu", "日本", "中国", "--"]
    names = [consumer_name(copier_name("b", cls, back=False)) for cls in classes]
    assert len(set(names)) == len(classes)
    assert names[1] == "bridge-b-there-orders-eu"
    assert all(name.replace("-", "").isalnum() and name.isascii() for name in names)
