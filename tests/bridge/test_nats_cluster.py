"""Bridges to and from a cluster of three real nats-servers, one of which is killed under load."""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio

import simplebus
from simplebus.bridge.nats_connection import BridgeNatsConnection, connect_nats
from simplebus.core.errors import BusConnectionError
from simplebus.nats.client import encode, jetstream_codec
from simplebus.nats.client.jetstream_codec import JetStreamError
from simplebus.testing.server import bus_server
from tests.bridge.memory_buses import numbered_payloads
from tests.bridge.nats_copiers import connect, wait_until
from tests.bridge.test_processes import RestartableProgram
from tests.jetstream.nats_servers import NatsServer, cluster

PATIENCE_SECONDS = 600.0
ENOUGH = 50
"""Messages that are copied before each event, and after it."""
UNDER_WAY_MAX, ONE_BY_ONE_MAX = 1000, 100
"""Limits of published messages that are not copied yet: a busy machine would never catch up."""
AHEAD_MAX = {"through": 2000, "said": 300}
"""Limits of published messages beyond the messages that the test waits for: some seconds. While one
stream has no leader or reader, the other stream would get tens of thousands of useless messages.
"""
STREAMS = "THROUGH", "SAID"
BRIDGES = """
[[bridges]]
name = "into"
from = "{near}"
to = "{servers}"
heartbeat = 2.0
[[bridges.copy]]
class = "through"
stream = "THROUGH"
{more}

[[bridges]]
name = "from"
from = "{servers}"
to = "{far}"
heartbeat = 2.0
[[bridges.copy]]
class = "through"
stream = "THROUGH"
start = "earliest"
[[bridges.copy]]
class = "said"
stream = "SAID"
start = "earliest"
"""


async def request_until_answered(
    connection: BridgeNatsConnection, subject: str, body: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Repeat an API request until it is answered. A stream without a leader does not answer."""
    while True:
        with suppress(BusConnectionError, JetStreamError):
            return await connection.nats.api_request(subject, body, seconds=5.0)
        connection.check()
        await trio.sleep(0.1)


async def create_replicated_stream(
    connection: BridgeNatsConnection, stream: str, *, allows_batches: bool
) -> None:
    """Create a stream with three replicas, once the servers have formed a cluster."""
    config = {
        "name": stream,
        "subjects": [f"class.{stream.lower()}"],
        "num_replicas": 3,
        "allow_batched": allows_batches,
    }
    await request_until_answered(connection, f"STREAM.CREATE.{stream}", config)


async def move_leader(connection: BridgeNatsConnection, stream: str, server: NatsServer) -> None:
    """Make `server` the leader of the stream."""
    move = {"placement": {"preferred": server.name}}
    while (await request_until_answered(connection, f"STREAM.INFO.{stream}"))["cluster"].get(
        "leader"
    ) != server.name:
        with suppress(
            BusConnectionError, JetStreamError
        ):  # It may lead by now, or the stream has no leader.
            await connection.nats.api_request(f"STREAM.LEADER.STEPDOWN.{stream}", move, seconds=5.0)
        connection.check()
        await trio.sleep(0.1)


class Traffic:
    """Published and received messages."""

    def __init__(self, source: str, target: str, servers: str, unconfirmed_max: int) -> None:
        self._source, self._target, self._servers, self._most = (
            source,
            target,
            servers,
            unconfirmed_max,
        )
        self.published = {"through": 0, "said": 0}
        self.received: dict[str, list[int]] = {"through": [], "said": []}
        self._goals = dict.fromkeys(self.received, ENOUGH)
        self.is_over = False

    async def publish(self) -> None:
        """Publish at the source bus."""
        async with simplebus.connect(self._source, name="till") as bus:
            while not self.is_over:
                first = self.published["through"]
                await bus.publish_many(numbered_payloads(first, first + 20), class_id="through")
                self.published["through"] += 20
                await trio.sleep(0.05)
                await wait_until(lambda: self.is_over or self._has_room())

    def _has_room(self) -> bool:
        return self._in_flight_count < self._most and not self._is_ahead("through")

    def _is_ahead(self, class_: str) -> bool:
        return self.published[class_] >= self._goals[class_] + AHEAD_MAX[class_]

    @property
    def _in_flight_count(self) -> int:
        return self.published["through"] - len(self.received["through"])

    async def publish_to_stream(self) -> None:
        """Publish into the stream, each message after the previous one is stored."""
        while not self.is_over:
            try:
                async with connect_nats(self._servers, "said", {}, heartbeat=2.0) as connection:
                    while not self.is_over:
                        await self._publish_number(connection, self.published["said"])
                        self.published["said"] += 1
                        await trio.sleep(0.01)
                        await wait_until(lambda: self.is_over or not self._is_ahead("said"))
            except (BusConnectionError, JetStreamError):
                await trio.sleep(0.1)

    async def _publish_number(self, connection: BridgeNatsConnection, number: int) -> None:
        headers = encode.encode_headers((jetstream_codec.MSG_ID, b"%d" % number))
        core = connection.core
        reply = core.reserve_numbers(1)
        core.publish(
            "class.said", b"%d" % number, headers=headers, reply=core.reply_subject(reply).decode()
        )
        connection.nats.flush()
        while not connection.replies:
            await connection.wait_expected("a PubAck")
        for error in jetstream_codec.parse_pub_acks(
            connection.replies.pop().messages
        ).errors.values():
            raise error

    async def read(self, class_: str) -> None:
        """Receive from the target bus."""
        async with (
            simplebus.connect(self._target) as bus,
            bus.subscribe(class_, durable="test", start="earliest") as messages,
        ):
            async for message in messages:
                self.received[class_].append(int(message.payload))

    async def wait_progress(self, extra_count: int = ENOUGH) -> None:
        """Wait until all messages published so far, and `more`, are received."""
        goals = {class_: count + extra_count for class_, count in self.published.items()}
        self._goals = goals
        await wait_until(
            lambda: all(
                len(self.received[each]) >= expected_count for each, expected_count in goals.items()
            )
        )


@pytest.mark.long
@pytest.mark.parametrize(
    ("allows_batches", "extra_count"), [(False, ""), (True, ""), (False, "under_way = 1000")]
)
async def test_survives_kill_of_one_nats_server(
    allows_batches: bool, extra_count: str, tmp_path: Path
) -> None:
    """The killed server leads the streams, and a copier is connected to it."""
    file, log = tmp_path / "bridges.toml", tmp_path / "bridges.log"
    with cluster(tmp_path) as servers, bus_server() as source, bus_server() as target:
        urls = ", ".join(server.url for server in servers)
        ends = {"near": source.address, "far": target.address, "servers": urls}
        file.write_text(BRIDGES.format(**ends, more=extra_count))
        is_one_by_one = not (allows_batches or extra_count)
        unconfirmed_max = ONE_BY_ONE_MAX if is_one_by_one else UNDER_WAY_MAX
        traffic, connected = (
            Traffic(source.address, target.address, urls, unconfirmed_max),
            partial(connect, urls),
        )
        with trio.fail_after(PATIENCE_SECONDS):
            async with connected() as connection:
                for stream in STREAMS:
                    await create_replicated_stream(
                        connection, stream, allows_batches=allows_batches
                    )
            bridges = RestartableProgram(log, "bridge", str(file))
            try:
                async with trio.open_nursery() as readers:
                    for class_ in traffic.received:
                        readers.start_soon(traffic.read, class_)
                    async with trio.open_nursery() as publishers:
                        publishers.start_soon(traffic.publish)
                        publishers.start_soon(traffic.publish_to_stream)
                        await traffic.wait_progress()
                        connected_url = log.read_text().split("connected to NATS at ")[1].split()[0]
                        (victim,) = (
                            server for server in servers if server.url.endswith(connected_url)
                        )
                        async with connected() as connection:
                            for stream in STREAMS:
                                await move_leader(connection, stream, victim)
                        await traffic.wait_progress()
                        victim.kill()
                        await traffic.wait_progress()
                        victim.start()
                        await traffic.wait_progress()
                        traffic.is_over = True
                    await traffic.wait_progress(0)
                    async with connected() as connection:
                        info = await request_until_answered(connection, "STREAM.INFO.THROUGH")
                    readers.cancel_scope.cancel()
            finally:
                bridges.kill()
    received, published = traffic.received, traffic.published
    assert received["said"] == list(range(published["said"])), bridges.describe()
    # With several messages in flight, those that were sent while the leader changed may be
    # stored after later ones.
    through = sorted(received["through"]) if extra_count else received["through"]
    assert through == list(range(published["through"])), bridges.describe()
    assert info["state"]["messages"] == published["through"]
