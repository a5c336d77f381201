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
@pytest.mark.parametrize("deleted", ["CONSUMER", "STREAM"])
async def test_recreates_deleted_streams_and_consumers(
    jetstream_server: NatsServer,
    caplog: pytest.LogCaptureFixture,
    deleted: str,
    kind: dict[str, Any],
) -> None:
    async with (
        stateless_server(options(jetstream_server.url)) as server,
        simplebus.connect(address(server)) as bus,
        bus.subscribe(1, **kind) as messages,
    ):
        cluster = cluster_of(server)
        stream = cluster.options.names.stream_name(1)
        with trio.fail_after(PATIENCE_SECONDS):
            for number in range(3):
                await bus.publish(b"%d" % number, class_id=1)
            unacked = [await messages.get() for _ in range(3)]
            assert [message.payload for message in unacked] == [b"0", b"1", b"2"]
            (consumer,) = cluster.inboxes.consumer_names.values()
            name = f"CONSUMER.DELETE.{stream}.{consumer}"
            await cluster.link.api_request(
                name if deleted == "CONSUMER" else f"STREAM.DELETE.{stream}"
            )
            received: list[bytes] = []
            for number in range(3, 6):
                await bus.publish(b"%d" % number, class_id=1)
            while len(received) < 3:
                payload = (await messages.get()).payload
                if int(payload) > 2:  # Unacknowledged messages may be redelivered.
                    received.append(payload)
            assert received == [b"3", b"4", b"5"]
    assert f"recreating the consumer {consumer} of class 1" in caplog.text
    assert ("the stream of class 1 was recreated" in caplog.text) == (deleted == "STREAM")


@pytest.mark.parametrize("kind", KINDS)
async def test_delivers_messages_confirmed_while_consumer_was_missing(
    jetstream_server: NatsServer, monkeypatch: pytest.MonkeyPatch, kind: dict[str, Any]
) -> None:
    async with (
        stateless_server(options(jetstream_server.url)) as server,
        simplebus.connect(address(server)) as bus,
    ):
        cluster = cluster_of(server)
        stream = cluster.options.names.stream_name(1)
        async with bus.subscribe(1) as messages:  # No backlog waits for the first subscriber.
            await bus.publish(b"before", class_id=1)
            await messages.get()
        start_options: dict[str, Any] = {**kind, "start": "new"}
        renew, is_published = cluster.consumers.replace, trio.Event()

        async def open_late(*args: Any) -> Any:
            await is_published.wait()
            return await renew(*args)

        monkeypatch.setattr(cluster.consumers, "replace", open_late)
        with trio.fail_after(PATIENCE_SECONDS):
            async with bus.subscribe(1, **start_options) as messages:
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
                received = [(await messages.get()).payload for _ in range(3)]
                while received[0] == b"before":  # A group receives all stored messages again.
                    received = [*received[1:], (await messages.get()).payload]
                assert received == [b"0", b"1", b"2"]


async def test_recreated_consumer_delivers_delayed_messages(
    jetstream_server: NatsServer,
) -> None:
    """The message was returned with a delay: no subscriber of the stateless server has it."""
    durable = {"durable": "d"}
    async with (
        stateless_server(options(jetstream_server.url)) as server,
        simplebus.connect(address(server)) as bus,
    ):
        cluster = cluster_of(server)
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
                redelivered = await messages.get()
                assert (redelivered.payload, redelivered.attempt) == (b"0", 2)
                await bus.publish(b"3", class_id=1)
                while (await messages.get()).payload != b"3":
                    """Messages that another session has acknowledged may be redelivered."""


async def test_missing_consumer_causes_no_load_if_stream_cannot_be_created(
    jetstream_server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The consumer is requested a few times per second, and recreated when possible."""
    async with (
        stateless_server(options(jetstream_server.url)) as server,
        simplebus.connect(address(server)) as bus,
        bus.subscribe(1, durable="d") as messages,
    ):
        cluster = cluster_of(server)
        request_count = 0
        api_request = cluster.link.api_request

        async def refuses(subject: str, *args: Any, **kwargs: Any) -> Any:
            nonlocal request_count
            if subject.startswith("STREAM.CREATE"):
                request_count += 1
                if request_count < 3:
                    raise JetStreamError(10028, "no room")
            return await api_request(subject, *args, **kwargs)

        with trio.fail_after(PATIENCE_SECONDS):
            await until(lambda: bool(cluster.inboxes.consumer_names))
            monkeypatch.setattr(cluster.link, "api_request", refuses)
            await api_request(f"STREAM.DELETE.{cluster.options.names.stream_name(1)}")
            await bus.publish(b"late", class_id=1)
            assert (await messages.get()).payload == b"late"
        assert request_count < 6


async def test_retries_refusing_consumer_with_delay(
    jetstream_server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with (
        stateless_server(options(jetstream_server.url)) as server,
        simplebus.connect(address(server)) as bus,
        bus.subscribe(1, durable="d") as messages,
    ):
        cluster = cluster_of(server)
        name = f"{cluster.options.names.stream_name(1)}.d-d"
        counts = Counter[str]()
        publish, tick = cluster.link.core.publish, cluster._tick

        def asking(subject: str, payload: bytes, **kwargs: Any) -> None:
            counts["asked"] += "MSG.NEXT" in subject
            publish(subject, payload, **kwargs)

        def beating() -> None:
            counts["beats"] += 1
            tick()

        monkeypatch.setattr(cluster.link.core, "publish", asking)
        monkeypatch.setattr(cluster, "_tick", beating)
        with trio.fail_after(PATIENCE_SECONDS):
            info = await cluster.link.api_request(f"CONSUMER.INFO.{name}")
            # Timeout of a request; those of a stateless server take longer.
            for longest in (
                1_000_000_000,
                0,
            ):
                body = {
                    "stream_name": info["stream_name"],
                    "config": {**info["config"], "max_expires": longest},
                    "action": "update",
                }
                await cluster.link.api_request(f"CONSUMER.CREATE.{name}", body)
                for feed in cluster.feeds.values():
                    feed.requested_count = 0  # As after the requested messages have arrived.
                if longest:
                    await until(lambda: counts["beats"] > 8)
                    assert 0 < counts["asked"] <= counts["beats"] + REFUSALS_MAX + 1
            await bus.publish(b"late", class_id=1)
            assert (await messages.get()).payload == b"late"
