"""Streams and consumers that are deleted in the cluster are recreated."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import trio

import simplebus
from simplebus.jetstream.consume.feed import REFUSALS_MAX
from simplebus.nats.client.jetstream_codec import JetStreamError
from tests.jetstream.nats_servers import NatsServer
from tests.jetstream.stateless_servers import (
    PATIENCE_SECONDS,
    address,
    cluster_of,
    options,
    stateless_server,
    until,
)

KINDS: list[dict[str, Any]] = [{}, {"durable": "d"}, {"group": "g"}, {"durable": "d", "group": "g"}]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("what", ["CONSUMER", "STREAM"])
async def test_recreates_deleted_streams_and_consumers(
    jetstream_server: NatsServer, caplog: pytest.LogCaptureFixture, what: str, kind: dict[str, Any]
) -> None:
    async with (
        stateless_server(options(jetstream_server.url)) as up,
        simplebus.connect(address(up)) as bus,
        bus.subscribe(1, **kind) as messages,
    ):
        cluster = cluster_of(up)
        stream = cluster.options.names.stream_name(1)
        with trio.fail_after(PATIENCE_SECONDS):
            for number in range(3):
                await bus.publish(b"%d" % number, class_id=1)
            held = [await messages.get() for _ in range(3)]
            assert [message.payload for message in held] == [b"0", b"1", b"2"]
            (consumer,) = cluster.inboxes.consumer_names.values()
            name = f"CONSUMER.DELETE.{stream}.{consumer}"
            await cluster.link.api_request(
                name if what == "CONSUMER" else f"STREAM.DELETE.{stream}"
            )
            got: list[bytes] = []
            for number in range(3, 6):
                await bus.publish(b"%d" % number, class_id=1)
            while len(got) < 3:
                payload = (await messages.get()).payload
                if int(payload) > 2:  # What was held may come again.
                    got.append(payload)
            assert got == [b"3", b"4", b"5"]
    assert f"recreating the consumer {consumer} of class 1" in caplog.text
    assert ("the stream of class 1 was recreated" in caplog.text) == (what == "STREAM")


@pytest.mark.parametrize("kind", KINDS)
async def test_delivers_messages_confirmed_while_consumer_was_missing(
    jetstream_server: NatsServer, monkeypatch: pytest.MonkeyPatch, kind: dict[str, Any]
) -> None:
    async with (
        stateless_server(options(jetstream_server.url)) as up,
        simplebus.connect(address(up)) as bus,
    ):
        cluster = cluster_of(up)
        stream = cluster.options.names.stream_name(1)
        async with bus.subscribe(1) as messages:  # So that nothing waits for whoever is first.
            await bus.publish(b"before", class_id=1)
            await messages.get()
        begins: dict[str, Any] = {**kind, "start": "new"}
        renew, is_published = cluster.consumers.replace, trio.Event()

        async def late(*given: Any) -> Any:
            await is_published.wait()
            return await renew(*given)

        monkeypatch.setattr(cluster.consumers, "replace", late)
        with trio.fail_after(PATIENCE_SECONDS):
            async with bus.subscribe(1, **begins) as messages:
                await until(lambda: bool(cluster.inboxes.consumer_names))
                for is_last in (False, True):
                    (name,) = cluster.inboxes.consumer_names.values()
                    is_published = trio.Event()
                    (feed,) = cluster.feeds.values()
                    await cluster.link.api_request(f"CONSUMER.DELETE.{stream}.{name}")
                    await until(lambda feed=feed: feed.is_replacing)  # type: ignore[misc]
                    if is_last:
                        await bus.publish_many([b"0", b"1", b"2"], class_id=1)
                    is_published.set()
                    await until(lambda feed=feed: not feed.is_replacing)  # type: ignore[misc]
                got = [(await messages.get()).payload for _ in range(3)]
                while got[0] == b"before":  # A group has all again that is stored.
                    got = [*got[1:], (await messages.get()).payload]
                assert got == [b"0", b"1", b"2"]


async def test_recreated_consumer_delivers_delayed_messages(
    jetstream_server: NatsServer,
) -> None:
    """The message was returned with a delay: no subscriber of the stateless server has it."""
    durable = {"durable": "d"}
    async with (
        stateless_server(options(jetstream_server.url)) as up,
        simplebus.connect(address(up)) as bus,
    ):
        cluster = cluster_of(up)
        with trio.fail_after(PATIENCE_SECONDS):
            async with bus.subscribe(1, auto_ack=False, **durable) as messages:
                await bus.publish_many([b"%d" % number for number in range(3)], class_id=1)
                (await messages.get()).nack(delay=3600.0)
                for _ in range(2):
                    (await messages.get()).ack()
            async with bus.subscribe(1, **durable) as messages:
                await until(lambda: bool(cluster.inboxes.consumer_names))
                await cluster.link.api_request(
                    f"CONSUMER.DELETE.{cluster.options.names.stream_name(1)}.d-d"
                )
                again = await messages.get()
                assert (again.payload, again.attempt) == (b"0", 2)
                await bus.publish(b"3", class_id=1)
                while (await messages.get()).payload != b"3":
                    """What was acknowledged in the other session may come again."""


async def test_missing_consumer_causes_no_load_if_stream_cannot_be_created(
    jetstream_server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The consumer is requested a few times per second, and recreated when possible."""
    async with (
        stateless_server(options(jetstream_server.url)) as up,
        simplebus.connect(address(up)) as bus,
        bus.subscribe(1, durable="d") as messages,
    ):
        cluster = cluster_of(up)
        asked = 0
        ask = cluster.link.api_request

        async def refuses(subject: str, *given: Any, **more: Any) -> Any:
            nonlocal asked
            if subject.startswith("STREAM.CREATE"):
                asked += 1
                if asked < 3:
                    raise JetStreamError(10028, "no room")
            return await ask(subject, *given, **more)

        with trio.fail_after(PATIENCE_SECONDS):
            await until(lambda: bool(cluster.inboxes.consumer_names))
            monkeypatch.setattr(cluster.link, "api_request", refuses)
            await ask(f"STREAM.DELETE.{cluster.options.names.stream_name(1)}")
            await bus.publish(b"late", class_id=1)
            assert (await messages.get()).payload == b"late"
        assert asked < 6


async def test_retries_refusing_consumer_with_delay(
    jetstream_server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with (
        stateless_server(options(jetstream_server.url)) as up,
        simplebus.connect(address(up)) as bus,
        bus.subscribe(1, durable="d") as messages,
    ):
        cluster = cluster_of(up)
        name = f"{cluster.options.names.stream_name(1)}.d-d"
        counts = Counter[str]()
        publish, beat = cluster.link.core.publish, cluster._tick

        def asking(subject: str, payload: bytes, **more: Any) -> None:
            counts["asked"] += "MSG.NEXT" in subject
            publish(subject, payload, **more)

        def beating() -> None:
            counts["beats"] += 1
            beat()

        monkeypatch.setattr(cluster.link.core, "publish", asking)
        monkeypatch.setattr(cluster, "_tick", beating)
        with trio.fail_after(PATIENCE_SECONDS):
            info = await cluster.link.api_request(f"CONSUMER.INFO.{name}")
            for longest in (
                1_000_000_000,
                0,
            ):  # Of a request; one of a stateless server takes longer.
                body = {
                    "stream_name": info["stream_name"],
                    "config": {**info["config"], "max_expires": longest},
                    "action": "update",
                }
                await cluster.link.api_request(f"CONSUMER.CREATE.{name}", body)
                for feed in cluster.feeds.values():
                    feed.requested_count = 0  # As when what was asked for has come.
                if longest:
                    await until(lambda: counts["beats"] > 8)
                    assert 0 < counts["asked"] <= counts["beats"] + REFUSALS_MAX + 1
            await bus.publish(b"late", class_id=1)
            assert (await messages.get()).payload == b"late"
