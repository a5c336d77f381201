"""A class whose messages cannot be stored does not affect other classes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import pytest
import trio

import simplebus
from simplebus.jetstream.backend import JetStreamBackend
from simplebus.jetstream.publish import class_queue
from simplebus.server.run import RunningServer
from tests.jetstream.nats_servers import NatsServer
from tests.jetstream.stateless_servers import (
    PATIENCE_SECONDS,
    address,
    cluster_of,
    options,
    stateless_server,
    until,
)

FULL, FREE = 8, 7


@asynccontextmanager
async def two_clients(server: RunningServer) -> AsyncIterator[tuple[simplebus.Bus, simplebus.Bus]]:
    """Connect two named clients to a server."""
    async with (
        simplebus.connect(address(server), name="one") as first_bus,
        simplebus.connect(address(server), name="two") as second_bus,
    ):
        yield first_bus, second_bus


async def test_foreign_stream_on_subject_blocks_only_its_class(
    jetstream_server: NatsServer,
) -> None:
    cluster = options(jetstream_server.url)
    async with stateless_server(cluster) as server:
        link, publisher = cluster_of(server).link, cluster_of(server).publisher
        foreign_stream = f"other_{cluster.names.prefix}"
        body = {
            "name": foreign_stream,
            "subjects": [cluster.names.class_subject(FULL)],
            "storage": "memory",
        }
        async with (
            two_clients(server) as (first_bus, second_bus),
            trio.open_nursery() as nursery,
        ):
            with trio.fail_after(PATIENCE_SECONDS):
                await link.api_request(f"STREAM.CREATE.{foreign_stream}", body)
                nursery.start_soon(partial(first_bus.publish, b"taken", class_id=FULL))
                await until(lambda: FULL in cluster_of(server)._jobs.busy_classes)
                await second_bus.publish(b"free", class_id=FREE)
                assert publisher.unstored_batch_count
                await link.api_request(f"STREAM.DELETE.{foreign_stream}")


async def test_full_stream_blocks_only_its_class(
    jetstream_server: NatsServer,
) -> None:
    cluster = options(jetstream_server.url, max_bytes=100 * 1024)
    async with stateless_server(cluster) as server:
        publisher = cluster_of(server).publisher
        async with (
            two_clients(server) as (first_bus, second_bus),
            trio.open_nursery() as nursery,
        ):
            with trio.fail_after(PATIENCE_SECONDS):
                publish = partial(first_bus.publish_many, [bytes(1000)] * 160, class_id=FULL)
                nursery.start_soon(publish)
                await until(lambda: publisher.refused > 0)
                await second_bus.publish(b"free", class_id=FREE)
                async with second_bus.subscribe(FREE, durable="d") as messages:
                    assert (await messages.get()).payload == b"free"
                assert publisher.unstored_batch_count  # It is still waiting.
                async with second_bus.subscribe(FULL) as messages:  # Acknowledging frees space.
                    for _ in range(160):
                        (await messages.get()).ack()


async def test_pauses_publishers_of_full_class(
    jetstream_server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(class_queue, "PENDING_BYTES_MAX", 50_000)
    cluster = options(jetstream_server.url, max_bytes=100 * 1024)
    payloads = [b"%d" % number + bytes(1000) for number in range(240)]
    async with stateless_server(cluster) as server:
        ring_of = cluster_of(server)._broker.classes
        async with (
            two_clients(server) as (first_bus, second_bus),
            trio.open_nursery() as nursery,
        ):
            with trio.fail_after(PATIENCE_SECONDS):
                for batch in payloads[:120], payloads[120:]:
                    nursery.start_soon(partial(first_bus.publish_many, batch, class_id=FULL))
                    await until(lambda: cluster_of(server).publisher.full == {FULL})
                await until(lambda: bool(ring_of[FULL].blocked_sessions))
                assert len(ring_of[FULL].ring) == 0
                await second_bus.publish(b"free", class_id=FREE)
                async with second_bus.subscribe(FULL) as messages:
                    found: list[bytes] = []
                    while len(found) < len(payloads):
                        message = await messages.get()
                        found.append(message.payload)
                        message.ack()
                assert sorted(found) == sorted(payloads)
        assert not ring_of[FULL].blocked_sessions


async def test_full_class_can_be_fetched_and_purged(
    jetstream_server: NatsServer,
) -> None:
    cluster = options(jetstream_server.url, max_bytes=48 * 1024)
    payloads = [b"%03d" % number + bytes(1200) for number in range(60)]
    async with stateless_server(cluster) as server:
        publisher = cluster_of(server).publisher
        async with (
            two_clients(server) as (first_bus, second_bus),
            trio.open_nursery() as nursery,
        ):
            with trio.fail_after(PATIENCE_SECONDS):
                nursery.start_soon(partial(first_bus.publish_many, payloads, class_id=FULL))
                await until(lambda: publisher.refusal(FULL) is not None)
                received: list[bytes] = []
                while len(received) < len(payloads):
                    found = await second_bus.fetch(FULL)
                    received += [message.payload for message in found]
                    purged = (
                        await second_bus.purge(FULL, last=found[-1].sequence + 1) if found else 0
                    )
                    assert purged == len(found)
                assert sorted(received) == payloads


async def test_full_dead_letter_class_blocks_only_its_messages(
    jetstream_server: NatsServer,
) -> None:
    cluster = options(jetstream_server.url, max_bytes=48 * 1024)
    async with stateless_server(cluster) as server:
        backend = cluster_of(server)
        async with simplebus.connect(address(server), name="one") as bus:
            with trio.fail_after(PATIENCE_SECONDS):
                async with (
                    bus.subscribe(FULL, group="g") as full_messages,
                    bus.subscribe(FREE, group="g") as free_messages,
                ):
                    for _ in range(3):
                        await bus.publish_many([bytes(1000)] * 20, class_id=FULL)
                        for _ in range(20):
                            (await full_messages.get()).terminate()
                    dead = backend._broker.store.class_id_by_name[f"dead.{FULL}"]
                    await until(lambda: backend.publisher.refusal(dead) is not None)
                    await bus.publish_many([b"free"] * 5, class_id=FREE)
                    for _ in range(5):
                        (await free_messages.get()).ack()
                    await until_acked(backend, FREE, 5)
                    assert await acked_of(backend, FULL) < 60
                    await bus.purge(dead)
                    await until_acked(backend, FULL, 60)
                    assert backend.publisher.is_empty


async def acked_of(cluster: JetStreamBackend, class_id: int) -> int:
    """Return the ack floor of the group of a class."""
    stream = cluster.options.names.stream_name(class_id)
    info = await cluster.link.api_request(f"CONSUMER.INFO.{stream}.g-g")
    floor: int = info["ack_floor"]["stream_seq"]
    return floor


async def until_acked(cluster: JetStreamBackend, class_id: int, last: int) -> None:
    while await acked_of(cluster, class_id) < last:  # noqa: ASYNC110 - no event exists.
        await trio.sleep(0.05)
