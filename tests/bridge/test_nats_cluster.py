"""Bridges to and from a cluster of three real nats-servers, of which one is killed under load."""

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
from tests.bridge.memory_buses import numbered
from tests.bridge.nats_copiers import connect, until
from tests.bridge.test_processes import Killed
from tests.jetstream.nats_servers import NatsServer, cluster

PATIENCE_SECONDS = 600.0
ENOUGH = 100
"""Messages that come over before something happens, and behind it."""
UNDER_WAY_MAX, ONE_BY_ONE_MAX = 1000, 100
"""More is not published before some has come: a busy machine would never be through with it."""
AHEAD_MAX = {"through": 2000, "said": 300}
"""So many more than are waited for, some seconds of them. While one stream has no leader, or its
reader is not there again, the other one would take tens of thousands that prove no more."""
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


async def asked(
    connection: BridgeNatsConnection, subject: str, body: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Ask until it is answered: while nobody leads what it is about, nobody does."""
    while True:
        with suppress(BusConnectionError, JetStreamError):
            return await connection.nats.api_request(subject, body, seconds=5.0)
        connection.check()
        await trio.sleep(0.1)


async def made(connection: BridgeNatsConnection, stream: str, *, takes_chains: bool) -> None:
    """Kept by all three, as soon as these have found each other."""
    config = {
        "name": stream,
        "subjects": [f"class.{stream.lower()}"],
        "num_replicas": 3,
        "allow_batched": takes_chains,
    }
    await asked(connection, f"STREAM.CREATE.{stream}", config)


async def led_by(connection: BridgeNatsConnection, stream: str, server: NatsServer) -> None:
    """Return when this server leads the stream."""
    move = {"placement": {"preferred": server.name}}
    while (await asked(connection, f"STREAM.INFO.{stream}"))["cluster"].get(
        "leader"
    ) != server.name:
        with suppress(BusConnectionError, JetStreamError):  # It may lead by now, or nobody does.
            await connection.nats.api_request(f"STREAM.LEADER.STEPDOWN.{stream}", move, seconds=5.0)
        connection.check()
        await trio.sleep(0.1)


class Flow:
    """What is published, and what has come."""

    def __init__(self, near: str, far: str, servers: str, most: int) -> None:
        self._near, self._far, self._servers, self._most = near, far, servers, most
        self.published = {"through": 0, "said": 0}
        self.got: dict[str, list[int]] = {"through": [], "said": []}
        self._goals = dict.fromkeys(self.got, ENOUGH)
        self.is_over = False

    async def publish(self) -> None:
        """At the near bus."""
        async with simplebus.connect(self._near, name="till") as bus:
            while not self.is_over:
                first = self.published["through"]
                await bus.publish_many(numbered(first, first + 20), class_id="through")
                self.published["through"] += 20
                await trio.sleep(0.05)
                await until(lambda: self.is_over or self._has_room())

    def _has_room(self) -> bool:
        return self._under_way < self._most and not self._is_ahead("through")

    def _is_ahead(self, class_: str) -> bool:
        return self.published[class_] >= self._goals[class_] + AHEAD_MAX[class_]

    @property
    def _under_way(self) -> int:
        return self.published["through"] - len(self.got["through"])

    async def say(self) -> None:
        """Into the stream itself, one behind the other, each until the cluster has it."""
        while not self.is_over:
            try:
                async with connect_nats(self._servers, "said", {}, heartbeat=2.0) as connection:
                    while not self.is_over:
                        await self._say(connection, self.published["said"])
                        self.published["said"] += 1
                        await trio.sleep(0.01)
                        await until(lambda: self.is_over or not self._is_ahead("said"))
            except (BusConnectionError, JetStreamError):
                await trio.sleep(0.1)

    async def _say(self, connection: BridgeNatsConnection, number: int) -> None:
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
        """At the far bus."""
        async with (
            simplebus.connect(self._far) as bus,
            bus.subscribe(class_, durable="test", start="earliest") as messages,
        ):
            async for message in messages:
                self.got[class_].append(int(message.payload))

    async def goes_on(self, more: int = ENOUGH) -> None:
        """Return when all that is published now has come, and so many more."""
        goals = {class_: count + more for class_, count in self.published.items()}
        self._goals = goals
        await until(lambda: all(len(self.got[each]) >= goal for each, goal in goals.items()))


@pytest.mark.long
@pytest.mark.parametrize(
    ("takes_chains", "more"), [(False, ""), (True, ""), (False, "under_way = 1000")]
)
async def test_survives_kill_of_one_nats_server(
    takes_chains: bool, more: str, tmp_path: Path
) -> None:
    """The one that leads the streams, and to which a lane is connected."""
    file, log = tmp_path / "bridges.toml", tmp_path / "bridges.log"
    with cluster(tmp_path) as servers, bus_server() as near, bus_server() as far:
        urls = ", ".join(each.url for each in servers)
        ends = {"near": near.address, "far": far.address, "servers": urls}
        file.write_text(BRIDGES.format(**ends, more=more))
        is_one_by_one = not (takes_chains or more)
        most = ONE_BY_ONE_MAX if is_one_by_one else UNDER_WAY_MAX
        flow, connected = Flow(near.address, far.address, urls, most), partial(connect, urls)
        with trio.fail_after(PATIENCE_SECONDS):
            async with connected() as connection:
                for stream in STREAMS:
                    await made(connection, stream, takes_chains=takes_chains)
            bridges = Killed(log, "bridge", str(file))
            try:
                async with trio.open_nursery() as readers:
                    for class_ in flow.got:
                        readers.start_soon(flow.read, class_)
                    async with trio.open_nursery() as publishers:
                        publishers.start_soon(flow.publish)
                        publishers.start_soon(flow.say)
                        await flow.goes_on()
                        place = log.read_text().split("connected to NATS at ")[1].split()[0]
                        (victim,) = (each for each in servers if each.url.endswith(place))
                        async with connected() as connection:
                            for stream in STREAMS:
                                await led_by(connection, stream, victim)
                        await flow.goes_on()
                        victim.kill()
                        await flow.goes_on()
                        victim.start()
                        await flow.goes_on()
                        flow.is_over = True
                    await flow.goes_on(0)
                    async with connected() as connection:
                        info = await asked(connection, "STREAM.INFO.THROUGH")
                    readers.cancel_scope.cancel()
            finally:
                bridges.kill()
    got, published = flow.got, flow.published
    assert got["said"] == list(range(published["said"])), bridges.commands()
    # What was on its way into a stream when that got another leader may be behind later ones,
    # where several messages are, each by itself.
    through = sorted(got["through"]) if more else got["through"]
    assert through == list(range(published["through"])), bridges.commands()
    assert info["state"]["messages"] == published["through"]
