"""Copying into a replicated stream: once, and in order unless several messages may be in flight.

The tests use the stream model of `test_batched_stream`, and real servers.
"""

from __future__ import annotations

import random
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing
from hypothesis import given, settings
from hypothesis import strategies as st

import simplebus
from simplebus.bridge.build import select_target
from simplebus.bridge.copier import Copier
from simplebus.bridge.nats_connection import connect_nats
from simplebus.bridge.runner import create_copiers
from simplebus.bridge.settings import BridgeSettings, CopiedClass
from simplebus.bridge.source.identity import SourceIdentity
from simplebus.bridge.target.batched_stream import BatchedStreamTarget
from simplebus.bridge.target.nats import NatsTarget, TargetStreamState, nats_batch
from simplebus.bridge.target.ordered_stream import OrderedStreamTarget
from simplebus.core.errors import BusConnectionError
from simplebus.nats.client.jetstream_codec import JetStreamError
from tests.bridge.memory_buses import numbered_payloads
from tests.bridge.nats_copiers import (
    BusServer,
    NatsServer,
    connect,
    copying,
    create_stream,
    wait_until,
)
from tests.bridge.target.test_batched_stream import (
    COUNT,
    StreamModel,
    connect_target,
    copy_all,
    create_copier_into,
    source_batch,
    stream_payloads,
)
from tests.bridge.test_nats_cluster import create_replicated_stream
from tests.jetstream.nats_servers import cluster, nats_server

LEADERS = 4
"""Number of leaders that the stream has, one after the other."""
PATIENCE_SECONDS = 240.0


def create_ordered_target(model: StreamModel, in_flight_max: int) -> NatsTarget:
    return connect_target(model, OrderedStreamTarget, under_way=in_flight_max)


def stored_sequences(seed: int, in_flight_max: int) -> list[int]:
    """Return the sequences that the stream has stored in the end."""
    model = StreamModel(random.Random(seed))
    trio.run(copy_all, model, partial(create_ordered_target, in_flight_max=in_flight_max))
    return model.log


@pytest.mark.long
@settings(max_examples=3 * settings().max_examples)
@given(st.integers(0, 2**32), st.sampled_from([1, 1, 2, 7, 30]))
def test_one_by_one_keeps_order_across_leader_changes(seed: int, in_flight_max: int) -> None:
    log = stored_sequences(seed, in_flight_max)
    assert (log if in_flight_max == 1 else sorted(log)) == list(range(COUNT))


def test_canary_many_in_flight_can_be_reordered() -> None:
    assert any(stored_sequences(seed, COUNT) != list(range(COUNT)) for seed in range(60))


async def test_unanswered_and_denied_message_is_refused() -> None:
    """The permissions of the user change between two messages."""
    model = StreamModel(random.Random(1))
    target = connect_target(model, NatsTarget)
    batch = target.prepare(source_batch(0, 3))
    target.send(batch)
    body = nats_batch(batch)
    body.pending[0] = False
    body.unanswered.append(0)
    target._connection.server_errors.append('Permissions Violation for Publish to "class.7"')
    target._handle_server_errors()
    assert [(refusal.sequence, refusal.code) for refusal in body.refusals] == [
        (n, "permissions") for n in range(3)
    ]
    assert not body.unanswered


@pytest.mark.parametrize(
    ("kind", "options"),
    [(NatsTarget, {}), (OrderedStreamTarget, {"under_way": 2}), (BatchedStreamTarget, {})],
)
async def test_detects_changed_stream_config_while_waiting(
    kind: type[NatsTarget], options: dict[str, Any], autojump_clock: trio.testing.MockClock
) -> None:
    model = StreamModel(random.Random(1))
    model.failure_rate = 0.0
    requests = list[object]()

    def fits(config: object) -> bool:
        requests.append(config)
        return len(requests) < 3

    target = connect_target(model, kind, config_fits=fits, **options)
    for at in range(0, 6 * 4, 4):
        target.send(target.prepare(source_batch(at, at + 4)))
        await trio.sleep(6)  # The configuration is checked at every second one.
        if at < 5 * 4:
            assert await target.settle_oldest() == []
    with pytest.raises(BusConnectionError, match="stream 'S' has a new configuration"):
        await target.settle_oldest()
    assert requests == [{"subjects": ["class.>"]}] * 3
    assert model.log == list(range(len(model.log)))


@pytest.mark.parametrize(
    ("version", "fewest", "max_in_flight"),
    [("2.13.9", 4096, 10_000), ("", 4096, 10_000), ("2.14.0-RC.1", 24_576, 100_000)],
)
async def test_in_flight_messages_stay_below_stream_buffer(
    version: str, fewest: int, max_in_flight: int
) -> None:
    """The limits are the defaults of the server versions."""
    model = StreamModel(random.Random(1))
    model.version = version
    target = connect_target(model, NatsTarget)
    at, batches = 0, 0
    while target.has_room([]) and batches < 100:
        batch = target.prepare(source_batch(at, at + 10_000))
        target.send(batch)
        at, batches = batch.next_sequence, batches + 1
    assert fewest <= at < max_in_flight


async def test_halves_batch_limit_after_too_many_requests(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """Two batches that were prepared with the same limit halve it only once."""
    model = StreamModel(random.Random(1))
    model.failure_rate, model.capacity = 0.0, 10
    target = connect_target(model, NatsTarget)
    target._stream_state.batch_limit = 100
    batches_made = [target.prepare(source_batch(at, at + 100)) for at in (0, 100)]
    for each in batches_made:
        target.send(each)
    refused = [refusal.sequence for _ in batches_made for refusal in await target.settle_oldest()]
    assert target._stream_state.batch_limit == 64
    assert refused == list(range(10, 200))
    assert target.prepare(source_batch(10, 200)).count == 64


@pytest.mark.parametrize(
    ("kind", "options"),
    [(NatsTarget, {}), (OrderedStreamTarget, {"under_way": 2}), (BatchedStreamTarget, {})],
)
async def test_mapped_subject_is_not_refused_without_leader(
    kind: type[NatsTarget], options: dict[str, Any]
) -> None:
    """A NATS account can map subjects. A subject that the stream never stored is refused."""
    model = StreamModel(random.Random(1))
    model.failure_rate = 0.0
    model.rng.random = lambda: 1.0  # type: ignore[method-assign]  # It gets no leader by itself.
    config = {"subjects": ["orders"]}

    async def answer_request(*args: object) -> dict[str, Any]:
        return {"config": config}

    def create_target() -> NatsTarget:
        target = connect_target(
            model,
            kind,
            source_identity=source_identity,
            stream_state=stream_state,
            config=config,
            **options,
        )
        target._connection.nats.api_request = answer_request  # type: ignore[assignment, method-assign]
        return target

    async def refused(target: NatsTarget, at: int) -> list[tuple[int, str]]:
        """Return the refusals of four messages that are sent while the stream has no leader."""
        model.has_leader = False
        target.send(target.prepare(source_batch(at, at + 4)))
        return [(each.sequence, each.code) for each in await target.settle_oldest()]

    source_identity, stream_state = SourceIdentity(), TargetStreamState()
    assert await refused(create_target(), 0) == [(n, "no_stream") for n in range(4)]
    model.has_leader = True
    target = create_target()
    target.send(target.prepare(source_batch(4, 8)))
    assert await target.settle_oldest() == []
    for end in target, create_target():
        with pytest.raises(BusConnectionError, match="stream 'S' did not answer"):
            await refused(end, 8)
    assert model.log[:4] == list(range(4, 8))


@pytest.mark.parametrize(
    ("config", "in_flight_max", "kind", "options"),
    [
        (None, None, OrderedStreamTarget, {"under_way": 1}),
        (None, 7, OrderedStreamTarget, {"under_way": 7}),
        ({}, None, NatsTarget, {}),
        ({"num_replicas": 1}, None, NatsTarget, {}),
        ({"num_replicas": 1, "allow_batched": False}, 7, OrderedStreamTarget, {"under_way": 7}),
        ({"discard": "new", "max_msgs": -1, "max_bytes": -1}, None, NatsTarget, {}),
        ({"discard": "old", "max_msgs": 7}, None, NatsTarget, {}),
        ({"discard": "new", "max_msgs": 7}, None, OrderedStreamTarget, {"under_way": 1}),
        ({"discard": "new", "max_bytes": 7}, None, OrderedStreamTarget, {"under_way": 1}),
        (
            {"discard": "new", "max_msgs": 7, "allow_batched": True},
            None,
            BatchedStreamTarget,
            {},
        ),
        ({"num_replicas": 3}, None, OrderedStreamTarget, {"under_way": 1}),
        ({"num_replicas": 3}, 7, OrderedStreamTarget, {"under_way": 7}),
        ({"num_replicas": 3, "allow_batched": True}, None, BatchedStreamTarget, {}),
        ({"subjects": ["a"], "allow_batched": True}, 7, BatchedStreamTarget, {}),
    ],
)
def test_selects_order_preserving_target_by_default(
    config: dict[str, Any] | None, in_flight_max: int | None, kind: type, options: dict[str, Any]
) -> None:
    assert select_target(config, CopiedClass(7, stream="S", under_way=in_flight_max)) == (
        kind,
        options,
    )


# Real servers ------------------------------------------------------------------------------------


@pytest.mark.parametrize("in_flight_max", [1, 3])
async def test_refused_message_does_not_block_rest_of_stream(
    in_flight_max: int, nats: NatsServer, server: BusServer
) -> None:
    """Messages are refused because they are too long, or because their subject belongs to no
    stream or to another one.
    """
    name = f"FEW{in_flight_max}"
    options = name.lower()
    async with connect(nats) as connection, simplebus.connect(server.address) as bus:
        await create_stream(
            connection, name, "", subjects=[f"class.{options}", f"{options}.>"], max_msg_size=300
        )
        await create_stream(connection, f"BESIDE-{name}", f"beside-{options}.>")
        sizes = [1, 2, 1000, 4, 1000, 1000, 7, 1000]
        await bus.publish_many([b"x" * size for size in sizes], class_id=options)
        channels = [
            "no.where",
            f"{options}.a",
            f"beside-{options}.b",
            f"{options}.c",
            "no.where",
            f"{options}.d",
        ]
        for channel in channels:
            await bus.publish(channel.encode(), class_id=options, channel=channel)
        copier = create_copier_into(nats, server, name, under_way=in_flight_max)
        async with copying(copier):
            await wait_until(lambda: copier.statistics().position == len(sizes) + len(channels))
        statistics = copier.statistics()
        assert (statistics.copied, statistics.refused, statistics.losses) == (7, 7, 0)
        accepted = [b"x" * size for size in sizes if size < 300]
        accepted += [channel.encode() for channel in channels if channel.startswith(f"{options}.")]
        assert await stream_payloads(connection, name) == accepted


@pytest.mark.parametrize(
    ("in_flight_max", "allows_batches"), [(None, False), (1, False), (700, False), (None, True)]
)
async def test_resends_messages_beyond_server_buffer(
    in_flight_max: int | None, allows_batches: bool, tmp_path: Path, server: BusServer
) -> None:
    """The server refuses messages that arrive faster than the stream stores them. Messages of an
    atomic batch are refused as well.
    """
    count = 1000
    options = "max_buffered_msgs: 100, sync_interval: always"
    jetstream_config = f'jetstream {{ store_dir: "{tmp_path}/few", {options} }}'
    with nats_server(tmp_path, jetstream_config) as nats:
        async with connect(nats) as connection, simplebus.connect(server.address) as bus:
            await create_stream(connection, "FAST", "class.fast", allow_batched=allows_batches)
            await bus.publish_many(numbered_payloads(0, count), class_id="fast")
            copier = create_copier_into(nats, server, "FAST", under_way=in_flight_max)
            async with copying(copier):
                await wait_until(lambda: copier.statistics().position == count)
            statistics = copier.statistics()
            skipped_count = statistics.skipped.get("known_there", 0)
            assert (statistics.copied + skipped_count, statistics.refused) == (count, 0)
            received = await stream_payloads(connection, "FAST")
            is_in_order = allows_batches or in_flight_max == 1
            assert (received if is_in_order else sorted(received, key=int)) == numbered_payloads(
                0, count
            )


async def test_new_stream_gets_one_message_at_a_time(nats: NatsServer, server: BusServer) -> None:
    """Its number of replicas is not known yet."""
    async with connect(nats) as connection, simplebus.connect(server.address) as bus:
        connection.core.subscribe("class.late")
        await connection.round_trip()
        await bus.publish_many(numbered_payloads(0, 20), class_id="late")
        async with copying(create_copier_into(nats, server, "LATE")):
            while not connection.messages:
                await connection.round_trip()
            await connection.round_trip()
        assert [
            payload for in_flight_ in connection.messages for payload in in_flight_.all_payloads()
        ] == [b"0"]


async def test_selects_target_again_when_stream_is_created_or_changed(
    nats: NatsServer,
    server: BusServer,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    caplog.set_level("INFO", "simplebus.bridge")
    monkeypatch.setattr("simplebus.bridge.target.nats._STREAM_CHECK_SECONDS", 0.05)
    ends = dict[str, None]()
    monkeypatch.setattr(
        "simplebus.bridge.build.select_target",
        lambda *skipped_count: (
            ends.setdefault((found := select_target(*skipped_count))[0].__name__) or found
        ),
    )
    async with connect(nats) as connection, simplebus.connect(server.address) as bus:
        copier, published = create_copier_into(nats, server, "GROWN"), 0

        async def publish_some() -> None:
            nonlocal published
            await bus.publish_many(numbered_payloads(published, published + 20), class_id="grown")
            published += 20

        async def publish_until_target_is(kind: type) -> None:
            """Publish messages until the copier uses this type of target, and has copied them."""
            while kind.__name__ not in ends:
                await publish_some()
                await wait_copied(copier, published)
            await publish_some()
            await wait_copied(copier, published)

        async with copying(copier):
            await publish_some()
            await wait_until(
                lambda: "messages are stored in stream 'GROWN' one at a time" in caplog.text
            )
            await create_stream(connection, "GROWN", "class.grown")
            await publish_until_target_is(NatsTarget)
            config = {"name": "GROWN", "subjects": ["class.grown"], "allow_batched": True}
            await connection.nats.api_request("STREAM.UPDATE.GROWN", config)
            await publish_until_target_is(BatchedStreamTarget)
        assert list(ends) == ["OrderedStreamTarget", "NatsTarget", "BatchedStreamTarget"]
        assert "stream 'GROWN' has a new configuration" in caplog.text
        assert await stream_payloads(connection, "GROWN") == numbered_payloads(0, published)


@pytest.mark.long
@pytest.mark.parametrize("in_flight_max", [None, 300])
async def test_replicated_stream_has_each_message_once_across_leader_changes(
    in_flight_max: int | None,
    tmp_path: Path,
    server: BusServer,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The messages are in order, unless several may be in flight."""
    caplog.set_level("INFO", "simplebus.bridge")
    with cluster(tmp_path) as servers, trio.fail_after(PATIENCE_SECONDS):
        urls = ", ".join(each.url for each in servers)
        copied = CopiedClass("led", stream="LED", start="earliest", under_way=in_flight_max)
        (copier,) = create_copiers(
            [BridgeSettings("into", server.address, urls, (copied,), heartbeat_seconds=1.0)]
        )
        async with connect_nats(urls, "test", {}) as connection:
            await create_replicated_stream(connection, "LED", allows_batches=False)
        published, leader_count, in_flight_ = 0, 0, in_flight_max or 100
        async with simplebus.connect(server.address) as bus, copying(copier):
            while leader_count < LEADERS:
                await bus.publish_many(
                    numbered_payloads(published, published + in_flight_), class_id="led"
                )
                published += in_flight_
                await wait_copied(copier, published - in_flight_ // 2)
                leader_count += await change_leader(urls)
            await wait_copied(copier, published)
        received = list[bytes]()
        while len(received) < published:  # A new leader may not report all messages at once.
            with suppress(BusConnectionError, JetStreamError):
                async with connect_nats(urls, "test", {}) as connection:
                    received = await stream_payloads(connection, "LED")
        assert ("messages are stored in stream 'LED' one at a time" in caplog.text) == (
            in_flight_max is None
        )
        assert (sorted(received, key=int) if in_flight_max else received) == numbered_payloads(
            0, published
        )


async def wait_copied(copier: Copier, at: int) -> None:
    await wait_until(lambda: copier.statistics().position >= at)


async def change_leader(urls: str) -> bool:
    """Make the leader of the stream step down. Returns False if the servers cannot be asked."""
    with suppress(BusConnectionError, JetStreamError):
        async with connect_nats(urls, "test", {}) as connection:
            await connection.nats.api_request("STREAM.LEADER.STEPDOWN.LED")
            return True
    return False
