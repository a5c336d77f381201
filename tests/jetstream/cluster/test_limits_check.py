"""Checks of the cluster at start: message size, foreign streams, storage, identity."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import trio

import simplebus
from simplebus.core.limits import FRAME_BYTES_MIN, NAME_CHARACTERS_MAX
from simplebus.core.settings import Settings
from simplebus.jetstream.cluster import cluster_id
from simplebus.jetstream.cluster.cluster_id import UnusableClusterError
from simplebus.jetstream.cluster.limits_check import check_cluster
from simplebus.jetstream.cluster.stream_update import required_changes
from simplebus.jetstream.names import JetStreamNames
from simplebus.nats.client.jetstream_codec import JetStreamError
from simplebus.net.nats_connection import NatsConnection
from tests.jetstream.nats_servers import NatsServer, nats_server
from tests.jetstream.stateless_servers import (
    PATIENCE_SECONDS,
    address,
    cluster_of,
    options,
    stateless_server,
    until,
)

LONGEST_NAME = "\U0001f680" * NAME_CHARACTERS_MAX


async def test_stores_longest_frame_with_longest_name(tmp_path: Path) -> None:
    with nats_server(tmp_path, "max_payload: 65536") as server:
        async with (
            stateless_server(options(server.url)) as stateless,
            simplebus.connect(address(stateless), name=LONGEST_NAME) as bus,
        ):
            longest = bus.connection.core.accepted_frame_bytes_max - FRAME_BYTES_MIN
            assert 60_000 - 13 < longest < 65_536
            with trio.fail_after(PATIENCE_SECONDS):
                async with bus.subscribe(1) as messages:
                    await bus.publish(b"x" * longest, class_id=1)
                    assert len((await messages.get()).payload) == longest
                with pytest.raises(simplebus.BusError, match=r"\d+"):
                    await bus.publish(b"x" * (longest + 1), class_id=1)
                await bus.publish(b"", class_id=1)


async def test_skips_nats_server_with_smaller_payload(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Each long message would end the connection and block all classes."""
    with nats_server(tmp_path, "max_payload: 65536") as server:
        config = tmp_path / "alone.conf"
        old_text = config.read_text()
        cluster = replace(options(server.url), storage="file")
        async with (
            stateless_server(cluster) as stateless,
            simplebus.connect(address(stateless), name="one") as bus,
            trio.open_nursery() as nursery,
        ):
            link = cluster_of(stateless).link
            with trio.fail_after(PATIENCE_SECONDS):
                await bus.publish(b"short", class_id=1)
                server.stop()
                config.write_text(old_text.replace("65536", "32768"))
                server.start()
                nursery.start_soon(partial(bus.publish, bytes(40_000), class_id=1))
                await until(lambda: "32768" in link.problem)
                assert not link.is_ready
                server.stop()
                config.write_text(old_text)
                server.start()
                async with bus.subscribe(1, start="earliest") as messages:
                    lengths = [len((await messages.get()).payload) for _ in range(2)]
                assert lengths == [5, 40_000]
    assert (
        "the server accepts messages of 32768 bytes (max_payload), expected at least 65536"
        in caplog.text
    )


async def test_refuses_cluster_with_tiny_max_payload(tmp_path: Path) -> None:
    with (
        nats_server(tmp_path, "max_payload: 4096") as server,
        pytest.raises(UnusableClusterError, match=r"4096 bytes .* at least"),
    ):
        await check_cluster(Settings(), options(server.url))


async def test_oversized_foreign_message_blocks_nothing(tmp_path: Path) -> None:
    with nats_server(tmp_path, "max_payload: 16MB") as server:
        cluster = options(server.url)
        async with (
            stateless_server(cluster) as stateless,
            simplebus.connect(address(stateless)) as bus,
            bus.subscribe(1, durable="d") as messages,
        ):
            link = cluster_of(stateless).link
            link.core.publish(cluster.names.class_subject(1), bytes(12 << 20))
            link.flush()
            await bus.publish(b"ours", class_id=1)
            assert (await messages.get(PATIENCE_SECONDS)).payload == b"ours"


async def test_refuses_foreign_stream_on_class_subjects(
    jetstream_server: NatsServer,
) -> None:
    cluster = options(jetstream_server.url)
    other_options = f"other_{cluster.names.prefix}"
    link = NatsConnection(list(cluster.servers), lambda event: None)
    async with trio.open_nursery() as nursery:
        await nursery.start(link.run)
        await link.wait_ready()
        body = {
            "name": other_options,
            "subjects": [f"{cluster.names.prefix}.>"],
            "storage": "memory",
        }
        await link.api_request(f"STREAM.CREATE.{other_options}", body)
        with pytest.raises(UnusableClusterError, match=f"the stream {other_options} also stores"):
            await check_cluster(Settings(), cluster)
        await link.api_request(f"STREAM.DELETE.{other_options}")
        await check_cluster(Settings(), cluster)
        nursery.cancel_scope.cancel()


async def test_refuses_memory_stream_with_file_storage(
    jetstream_server: NatsServer, caplog: pytest.LogCaptureFixture
) -> None:
    cluster = options(jetstream_server.url)
    other_options = replace(cluster, storage="file")
    stream = cluster.names.stream_name(1)
    expected_error = rf"the stream {stream} stores messages in memory, but --engine-storage is file"
    async with (
        stateless_server(other_options) as first_server,
        simplebus.connect(address(first_server)) as bus,
    ):
        async with (
            stateless_server(cluster) as stateless,
            simplebus.connect(address(stateless)) as second_bus,
        ):
            await second_bus.publish(b"kept", class_id=1)
        with pytest.raises(UnusableClusterError, match=expected_error):
            await check_cluster(Settings(), other_options)
        await check_cluster(Settings(), cluster)
        # The server that started earlier does not confirm either.
        async with trio.open_nursery() as nursery:
            nursery.start_soon(partial(bus.publish, b"not kept", class_id=1))
            with trio.fail_after(PATIENCE_SECONDS):
                while not re.search(expected_error, caplog.text):  # noqa: ASYNC110 - the log has no event.
                    await trio.sleep(0.01)
                link = cluster_of(first_server).link
                await link.api_request(f"STREAM.DELETE.{cluster.names.stream_name(1)}")


async def test_upgrades_streams_and_never_downgrades(
    jetstream_server: NatsServer, caplog: pytest.LogCaptureFixture
) -> None:
    cluster = options(jetstream_server.url, duplicate_seconds=100.0, max_bytes=1 << 20)
    names, found = cluster.names, list[tuple[int, int]]()
    requested_settings = [(100.0, 0), (600.0, 0), (300.0, 1 << 20)]
    for seconds, bytes_max in requested_settings:
        requested = replace(cluster, duplicate_seconds=seconds, max_bytes=bytes_max)
        await check_cluster(Settings(), requested)
        async with (
            stateless_server(requested) as stateless,
            simplebus.connect(address(stateless)) as bus,
        ):
            await bus.publish(b"x", class_id=1)
            configs = [
                (await cluster_of(stateless).link.api_request(f"STREAM.INFO.{name}"))["config"]
                for name in (names.stream_name(1), names.identity_stream_name)
            ]
            found += [(c["duplicate_window"] // 10**9, c["max_bytes"]) for c in configs]
    assert found == [(100, -1)] * 2 + [(600, -1)] * 4
    assert (
        "has the size limit unlimited, which stays in force; --engine-max-bytes is" in caplog.text
    )
    caplog.clear()
    requested = replace(cluster, replicas=3)
    async with (
        stateless_server(requested) as stateless,
        simplebus.connect(address(stateless)) as bus,
    ):
        await bus.publish(b"x", class_id=1)
    assert "(num_replicas from 1 to 3)" in caplog.text


@pytest.mark.parametrize(
    ("existing", "requested_limits", "grown"),
    [
        ((1, 120), (3, 120), {"num_replicas": 3}),
        ((3, 120), (1, 60), {}),
        ((1, 120), (2, 120.5), {"num_replicas": 2, "duplicate_window": 120_500_000_000}),
    ],
)
def test_computes_required_stream_changes(
    existing: tuple[int, float], requested_limits: tuple[int, float], grown: dict[str, int]
) -> None:
    config = {"num_replicas": existing[0], "duplicate_window": round(existing[1] * 1e9)}
    cluster = options(
        "nats://127.0.0.1:4222", replicas=requested_limits[0], duplicate_seconds=requested_limits[1]
    )
    assert required_changes(config, cluster) == grown


async def test_servers_of_one_prefix_share_the_bus_id(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    with nats_server(tmp_path) as first_server, nats_server(tmp_path / "other") as second_server:
        found: list[str] = []

        async def load_id(url: str, prefix: str = "q") -> None:
            cluster = replace(options(url), names=JetStreamNames(prefix))
            found.append((await check_cluster(Settings(), cluster)).cluster_id)

        async with trio.open_nursery() as nursery:
            for _ in range(4):
                nursery.start_soon(load_id, first_server.url)
        assert len(set(found)) == 1
        assert re.fullmatch(r"cluster\.q\.[0-9a-f]{16}", found[0])
        for url, prefix in ((first_server.url, "r"), (second_server.url, "q")):
            await load_id(url, prefix)
        assert len(set(found)) == 3


async def test_refuses_foreign_identity_stream(
    jetstream_server: NatsServer,
) -> None:
    cluster = options(jetstream_server.url)
    name = cluster.names.identity_stream_name
    link = NatsConnection(list(cluster.servers), lambda event: None)
    async with trio.open_nursery() as nursery:
        await nursery.start(link.run)
        await link.wait_ready()
        body = {"name": name, "subjects": [f"theirs_{name}"], "storage": "memory"}
        await link.api_request(f"STREAM.CREATE.{name}", body)
        with pytest.raises(
            UnusableClusterError, match=f"the stream {name} was not created by simplebus"
        ):
            await check_cluster(Settings(), cluster)
        nursery.cancel_scope.cancel()


async def test_running_server_restores_identity(
    jetstream_server: NatsServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(cluster_id, "_CHECK_SECONDS", 0.01)
    cluster = options(jetstream_server.url)
    name = cluster.names.identity_stream_name
    async with stateless_server(cluster) as stateless:
        link = cluster_of(stateless).link
        first_server = stateless.server.broker.subscription_manager.identity
        with trio.fail_after(PATIENCE_SECONDS):
            await link.api_request(f"STREAM.DELETE.{name}")
            while (
                await check_cluster(Settings(), cluster)
            ).cluster_id != first_server:  # The other one was first.
                await link.api_request(f"STREAM.DELETE.{name}")
            body = cluster_id.api.identity_stream_config(cluster, "another")
            while f"the stream {name} was deleted" not in caplog.text:
                try:
                    await link.api_request(f"STREAM.DELETE.{name}")
                    await link.api_request(f"STREAM.CREATE.{name}", body)
                except JetStreamError:  # The stateless server was first.
                    continue
                await trio.sleep(0.05)
