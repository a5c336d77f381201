"""A class that cannot be stored, and what that is to others: nothing."""

from __future__ import annotations

from functools import partial

import trio

import simplebus

from .doors import PATIENCE_SECONDS, address, door, options
from .nats_servers import NatsServer
from .test_doors import cluster_of, until

FULL, FREE = 8, 7


async def test_a_class_whose_subject_is_another_streams_holds_up_no_other(
    jetstream_server: NatsServer,
) -> None:
    cluster = options(jetstream_server.url)
    async with door(cluster) as up:
        link, uplink = cluster_of(up).link, cluster_of(up).uplink
        other = f"other_{cluster.names.prefix}"
        body = {"name": other, "subjects": [cluster.names.subject(FULL)], "storage": "memory"}
        async with (
            simplebus.connect(address(up), name="one") as one,
            simplebus.connect(address(up), name="two") as two,
            trio.open_nursery() as nursery,
        ):
            with trio.fail_after(PATIENCE_SECONDS):
                await link.ask(f"STREAM.CREATE.{other}", body)
                nursery.start_soon(partial(one.publish, b"taken", class_id=FULL))
                await until(lambda: FULL in cluster_of(up)._jobs.classes)
                await two.publish(b"free", class_id=FREE)
                assert uplink.lots
                await link.ask(f"STREAM.DELETE.{other}")


async def test_a_class_whose_stream_is_full_holds_up_no_other(
    jetstream_server: NatsServer,
) -> None:
    cluster = options(jetstream_server.url, max_bytes=100 * 1024)
    async with door(cluster) as up:
        uplink = cluster_of(up).uplink
        async with (
            simplebus.connect(address(up), name="one") as one,
            simplebus.connect(address(up), name="two") as two,
            trio.open_nursery() as nursery,
        ):
            with trio.fail_after(PATIENCE_SECONDS):
                publish = partial(one.publish_many, [bytes(1000)] * 400, class_id=FULL)
                nursery.start_soon(publish)
                await until(lambda: uplink.refused > 0)
                await two.publish(b"free", class_id=FREE)
                async with two.subscribe(FREE, durable="d") as messages:
                    assert (await messages.get()).payload == b"free"
                assert uplink.lots  # It waits still.
                async with two.subscribe(FULL) as messages:  # Which makes room.
                    for _ in range(400):
                        (await messages.get()).ack()
