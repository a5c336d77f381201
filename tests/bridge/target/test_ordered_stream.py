"""Into a stream that several servers keep each message comes once, whatever becomes of its leader,
and in its order, unless more than one is to be under way: against the stream in this process of
which `test_far_chains` says how it changes its leader, and against real ones.
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
from tests.bridge.memory_buses import numbered
from tests.bridge.nats_copiers import (
    BusServer,
    NatsServer,
    connect,
    copying,
    stored,
    stream,
    until,
)
from tests.bridge.target.test_batched_stream import (
    COUNT,
    Led,
    all_copied,
    far_of,
    found_from,
    into,
    payloads_of,
)
from tests.bridge.test_nats_cluster import made
from tests.jetstream.nats_servers import cluster, nats_server

LEADERS = 8
"""How many a stream has, one after the other."""
PATIENCE_SECONDS = 240.0


def far_few(led: Led, under_way: int) -> NatsTarget:
    return far_of(led, OrderedStreamTarget, under_way=under_way)


def logged(seed: int, under_way: int) -> list[int]:
    """What a stream has in the end."""
    led = Led(random.Random(seed))
    trio.run(all_copied, led, partial(far_few, under_way=under_way))
    return led.log


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([1, 1, 2, 7, 30]))
def test_one_by_one_keeps_order_across_leader_changes(seed: int, under_way: int) -> None:
    log = logged(seed, under_way)
    assert (log if under_way == 1 else sorted(log)) == list(range(COUNT))


def test_canary_many_in_flight_can_be_reordered() -> None:
    assert any(logged(seed, COUNT) != list(range(COUNT)) for seed in range(60))


async def test_unanswered_and_denied_message_is_refused() -> None:
    """Its user's rights were changed between two messages."""
    led = Led(random.Random(1))
    far = far_of(led, NatsTarget)
    made = far.prepare(found_from(0, 3))
    far.send(made)
    body = nats_batch(made)
    body.pending[0] = False
    body.unanswered.append(0)
    far._connection.complaints.append('Permissions Violation for Publish to "class.7"')
    far._handle_complaints()
    assert [(each.sequence, each.code) for each in body.refusals] == [
        (n, "permissions") for n in range(3)
    ]
    assert not body.unanswered


@pytest.mark.parametrize(
    ("kind", "own"),
    [(NatsTarget, {}), (OrderedStreamTarget, {"under_way": 2}), (BatchedStreamTarget, {})],
)
async def test_detects_changed_stream_config_while_waiting(
    kind: type[NatsTarget], own: dict[str, Any], autojump_clock: trio.testing.MockClock
) -> None:
    led = Led(random.Random(1))
    led.trouble = 0.0
    asked = list[object]()

    def fits(config: object) -> bool:
        asked.append(config)
        return len(asked) < 3

    far = far_of(led, kind, config_fits=fits, **own)
    for at in range(0, 6 * 4, 4):
        far.send(far.prepare(found_from(at, at + 4)))
        await trio.sleep(6)  # It is looked after at every second one.
        if at < 5 * 4:
            assert await far.settle_oldest() == []
    with pytest.raises(
        BusConnectionError, match="stream 'S' has another configuration than before"
    ):
        await far.settle_oldest()
    assert asked == [{"subjects": ["class.>"]}] * 3
    assert led.log == list(range(len(led.log)))


@pytest.mark.parametrize(
    ("version", "fewest", "most"),
    [("2.13.9", 4096, 10_000), ("", 4096, 10_000), ("2.14.0-RC.1", 24_576, 100_000)],
)
async def test_in_flight_messages_stay_below_stream_buffer(
    version: str, fewest: int, most: int
) -> None:
    """So many unless its server is told otherwise."""
    led = Led(random.Random(1))
    led.version = version
    far = far_of(led, NatsTarget)
    at, batches = 0, 0
    while far.has_room([]) and batches < 100:
        made = far.prepare(found_from(at, at + 10_000))
        far.send(made)
        at, batches = made.next_sequence, batches + 1
    assert fewest <= at < most


async def test_halves_batch_limit_after_too_many_requests(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """Whatever of it had none: what was made before it was known counts once."""
    led = Led(random.Random(1))
    led.trouble, led.room = 0.0, 10
    far = far_of(led, NatsTarget)
    far._stream_state.batch_limit = 100
    made = [far.prepare(found_from(at, at + 100)) for at in (0, 100)]
    for each in made:
        far.send(each)
    refused = [refusal.sequence for _ in made for refusal in await far.settle_oldest()]
    assert far._stream_state.batch_limit == 64
    assert refused == list(range(10, 200))
    assert far.prepare(found_from(10, 200)).count == 64


@pytest.mark.parametrize(
    ("kind", "own"),
    [(NatsTarget, {}), (OrderedStreamTarget, {"under_way": 2}), (BatchedStreamTarget, {})],
)
async def test_mapped_subject_is_not_refused_without_leader(
    kind: type[NatsTarget], own: dict[str, Any]
) -> None:
    """Servers may be told to give messages another subject; what a stream never took it does not
    take."""
    led = Led(random.Random(1))
    led.trouble = 0.0
    led.chance.random = lambda: 1.0  # type: ignore[method-assign]  # It gets none by itself.
    config = {"subjects": ["orders"]}

    async def ask(*said: object) -> dict[str, Any]:
        return {"config": config}

    def far_end() -> NatsTarget:
        far = far_of(
            led,
            kind,
            source_identity=source_identity,
            stream_state=stream_state,
            config=config,
            **own,
        )
        far._connection.nats.api_request = ask  # type: ignore[assignment, method-assign]
        return far

    async def refused(far: NatsTarget, at: int) -> list[tuple[int, str]]:
        """Of some messages, while it has no leader."""
        led.is_led = False
        far.send(far.prepare(found_from(at, at + 4)))
        return [(each.sequence, each.code) for each in await far.settle_oldest()]

    source_identity, stream_state = SourceIdentity(), TargetStreamState()
    assert await refused(far_end(), 0) == [(n, "no_stream") for n in range(4)]
    led.is_led = True
    far = far_end()
    far.send(far.prepare(found_from(4, 8)))
    assert await far.settle_oldest() == []
    for end in far, far_end():
        with pytest.raises(BusConnectionError, match="stream 'S' did not answer"):
            await refused(end, 8)
    assert led.log[:4] == list(range(4, 8))


@pytest.mark.parametrize(
    ("config", "under_way", "kind", "own"),
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
    config: dict[str, Any] | None, under_way: int | None, kind: type, own: dict[str, Any]
) -> None:
    assert select_target(config, CopiedClass(7, stream="S", under_way=under_way)) == (kind, own)


# Real servers ------------------------------------------------------------------------------------


@pytest.mark.parametrize("under_way", [1, 3])
async def test_refused_message_does_not_block_rest_of_stream(
    under_way: int, nats: NatsServer, server: BusServer
) -> None:
    """What is too long, and what goes to a subject of no stream, or of another one."""
    name = f"FEW{under_way}"
    own = name.lower()
    async with connect(nats) as connection, simplebus.connect(server.address) as bus:
        await stream(connection, name, "", subjects=[f"class.{own}", f"{own}.>"], max_msg_size=300)
        await stream(connection, f"BESIDE-{name}", f"beside-{own}.>")
        sizes = [1, 2, 1000, 4, 1000, 1000, 7, 1000]
        await bus.publish_many([b"x" * size for size in sizes], class_id=own)
        channels = ["no.where", f"{own}.a", f"beside-{own}.b", f"{own}.c", "no.where", f"{own}.d"]
        for channel in channels:
            await bus.publish(channel.encode(), class_id=own, channel=channel)
        lane = into(nats, server, name, under_way=under_way)
        async with copying(lane):
            await until(lambda: lane.statistics().position == len(sizes) + len(channels))
        found = lane.statistics()
        assert (found.copied, found.refused, found.losses) == (7, 7, 0)
        good = [b"x" * size for size in sizes if size < 300]
        good += [each.encode() for each in channels if each.startswith(f"{own}.")]
        assert await payloads_of(connection, name) == good


async def test_full_stream_keeps_order_one_by_one(nats: NatsServer, server: BusServer) -> None:
    async with connect(nats) as connection, simplebus.connect(server.address) as bus:
        await stream(connection, "TIGHT", "class.tight", max_msgs=7, discard="new")
        await bus.publish_many(numbered(0, 20), class_id="tight")
        lane, got = into(nats, server, "TIGHT"), list[bytes]()
        async with copying(lane):
            while len(got) < 20:
                while await stored(connection, "TIGHT") < min(7, 20 - len(got)):
                    await connection.round_trip()
                got += await payloads_of(connection, "TIGHT")
                await connection.nats.api_request("STREAM.PURGE.TIGHT")
        assert got == numbered(0, 20)
        assert lane.statistics().refused == 0


@pytest.mark.parametrize(
    ("under_way", "takes_chains"), [(None, False), (1, False), (700, False), (None, True)]
)
async def test_resends_messages_beyond_server_buffer(
    under_way: int | None, takes_chains: bool, tmp_path: Path, server: BusServer
) -> None:
    """It says so of what comes faster than its stream stores it. A batch that keeps its order does
    so here, too."""
    count = 1000
    own = "max_buffered_msgs: 100, sync_interval: always"
    room = f'jetstream {{ store_dir: "{tmp_path}/few", {own} }}'
    with nats_server(tmp_path, room) as nats:
        async with connect(nats) as connection, simplebus.connect(server.address) as bus:
            await stream(connection, "FAST", "class.fast", allow_batched=takes_chains)
            await bus.publish_many(numbered(0, count), class_id="fast")
            lane = into(nats, server, "FAST", under_way=under_way)
            async with copying(lane):
                await until(lambda: lane.statistics().position == count)
            found = lane.statistics()
            known = found.skipped.get("known_there", 0)
            assert (found.copied + known, found.refused) == (count, 0)
            got = await payloads_of(connection, "FAST")
            is_in_order = takes_chains or under_way == 1
            assert (got if is_in_order else sorted(got, key=int)) == numbered(0, count)


async def test_new_stream_gets_one_message_at_a_time(nats: NatsServer, server: BusServer) -> None:
    """How many servers will keep it, nobody knows."""
    async with connect(nats) as connection, simplebus.connect(server.address) as bus:
        connection.core.subscribe("class.late")
        await connection.round_trip()
        await bus.publish_many(numbered(0, 20), class_id="late")
        async with copying(into(nats, server, "LATE")):
            while not connection.messages:
                await connection.round_trip()
            await connection.round_trip()
        assert [each for some in connection.messages for each in some.all_payloads()] == [b"0"]


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
        "simplebus.bridge.build.end_for",
        lambda *known: ends.setdefault((found := select_target(*known))[0].__name__) or found,
    )
    async with connect(nats) as connection, simplebus.connect(server.address) as bus:
        lane, published = into(nats, server, "GROWN"), 0

        async def publish_some() -> None:
            nonlocal published
            await bus.publish_many(numbered(published, published + 20), class_id="grown")
            published += 20

        async def goes_on_as(kind: type) -> None:
            """Some at a time are published until this is how they go, and come."""
            while kind.__name__ not in ends:
                await publish_some()
                await come_to(lane, published)
            await publish_some()
            await come_to(lane, published)

        async with copying(lane):
            await publish_some()
            await until(
                lambda: "messages are stored in stream 'GROWN' one at a time" in caplog.text
            )
            await stream(connection, "GROWN", "class.grown")
            await goes_on_as(NatsTarget)
            config = {"name": "GROWN", "subjects": ["class.grown"], "allow_batched": True}
            await connection.nats.api_request("STREAM.UPDATE.GROWN", config)
            await goes_on_as(BatchedStreamTarget)
        assert list(ends) == ["FarFew", "FarNats", "FarChains"]
        assert "stream 'GROWN' has another configuration than before" in caplog.text
        assert await payloads_of(connection, "GROWN") == numbered(0, published)


@pytest.mark.long
@pytest.mark.parametrize("under_way", [None, 1000])
async def test_replicated_stream_has_each_message_once_across_leader_changes(
    under_way: int | None,
    tmp_path: Path,
    server: BusServer,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """They are in their order, as the log says, unless more are to be under way."""
    caplog.set_level("INFO", "simplebus.bridge")
    with cluster(tmp_path) as servers, trio.fail_after(PATIENCE_SECONDS):
        urls = ", ".join(each.url for each in servers)
        copied = CopiedClass("led", stream="LED", start="earliest", under_way=under_way)
        (lane,) = create_copiers(
            [BridgeSettings("into", server.address, urls, (copied,), heartbeat_seconds=1.0)]
        )
        async with connect_nats(urls, "test", {}) as connection:
            await made(connection, "LED", takes_chains=False)
        published, led, some = 0, 0, under_way or 100
        async with simplebus.connect(server.address) as bus, copying(lane):
            while led < LEADERS:
                await bus.publish_many(numbered(published, published + some), class_id="led")
                published += some
                await come_to(lane, published - some // 2)
                led += await has_gone(urls)
            await come_to(lane, published)
        got = list[bytes]()
        while len(got) < published:  # The leader may have changed, and not have told all it has.
            with suppress(BusConnectionError, JetStreamError):
                async with connect_nats(urls, "test", {}) as connection:
                    got = await payloads_of(connection, "LED")
        assert ("messages are stored in stream 'LED' one at a time" in caplog.text) == (
            under_way is None
        )
        assert (sorted(got, key=int) if under_way else got) == numbered(0, published)


async def come_to(lane: Copier, at: int) -> None:
    await until(lambda: lane.statistics().position >= at)


async def has_gone(urls: str) -> bool:
    """Whether the stream's leader gave up, for another one."""
    with suppress(BusConnectionError, JetStreamError):
        async with connect_nats(urls, "test", {}) as connection:
            await connection.nats.api_request("STREAM.LEADER.STEPDOWN.LED")
            return True
    return False
