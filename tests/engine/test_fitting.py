"""No message is too long for a cluster that its door has accepted; what no cluster may have."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio

import simplebus
from simplebus.core.limits import FRAME_BYTES_MIN, NAME_CHARACTERS_MAX
from simplebus.core.settings import Settings
from simplebus.engine.fitting import EngineError, fitted
from simplebus.engine.link import Link

from .doors import PATIENCE_SECONDS, address, door, options
from .nats_servers import NatsServer, nats_server
from .test_doors import cluster_of

LONGEST_NAME = "\U0001f680" * NAME_CHARACTERS_MAX


async def test_the_longest_frame_under_the_longest_name_is_stored(tmp_path: Path) -> None:
    with nats_server(tmp_path, "max_payload: 65536") as server:
        async with (
            door(options(server.url)) as up,
            simplebus.connect(address(up), name=LONGEST_NAME) as bus,
        ):
            longest = bus.wire.core.frame_bytes - FRAME_BYTES_MIN
            assert 60_000 - 13 < longest < 65_536
            with trio.fail_after(PATIENCE_SECONDS):
                async with bus.subscribe(1) as messages:
                    await bus.publish(b"x" * longest, class_id=1)
                    assert len((await messages.get()).payload) == longest
                with pytest.raises(simplebus.BusError, match=r"\d+"):
                    await bus.publish(b"x" * (longest + 1), class_id=1)
                await bus.publish(b"", class_id=1)


async def test_who_takes_next_to_nothing_is_no_cluster(tmp_path: Path) -> None:
    with (
        nats_server(tmp_path, "max_payload: 4096") as server,
        pytest.raises(EngineError, match=r"4096 bytes .* at least"),
    ):
        await fitted(Settings(), options(server.url))


async def test_what_is_longer_than_any_frame_stands_in_nobodys_way(tmp_path: Path) -> None:
    with nats_server(tmp_path, "max_payload: 16MB") as server:
        cluster = options(server.url)
        async with (
            door(cluster) as up,
            simplebus.connect(address(up)) as bus,
            bus.subscribe(1, durable="d") as messages,
        ):
            link = cluster_of(up).link
            link.core.publish(cluster.names.subject(1), bytes(12 << 20))
            link.flush()
            await bus.publish(b"ours", class_id=1)
            assert (await messages.get(PATIENCE_SECONDS)).payload == b"ours"


async def test_where_another_stream_takes_what_classes_are_sent_no_door_can_stand(
    jetstream_server: NatsServer,
) -> None:
    cluster = options(jetstream_server.url)
    other = f"other_{cluster.names.prefix}"
    link = Link(list(cluster.servers), lambda event: None)
    async with trio.open_nursery() as nursery:
        await nursery.start(link.run)
        await link.wait_ready()
        body = {"name": other, "subjects": [f"{cluster.names.prefix}.>"], "storage": "memory"}
        await link.ask(f"STREAM.CREATE.{other}", body)
        with pytest.raises(EngineError, match=f"the stream {other} takes what"):
            await fitted(Settings(), cluster)
        await link.ask(f"STREAM.DELETE.{other}")
        await fitted(Settings(), cluster)
        nursery.cancel_scope.cancel()
