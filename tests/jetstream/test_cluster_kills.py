"""Real servers that are killed or restarted under load never lose confirmed messages."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trio

import simplebus
from load.ports import HOST, free_port
from simplebus.core.errors import BusConnectionError
from simplebus.nats.client.jetstream_codec import JetStreamError
from simplebus.net.nats_connection import NatsConnection
from tests.jetstream.nats_servers import cluster
from tests.jetstream.stateless_servers import address, options, stateless_server
from tests.net.test_nats_connection import linked
from tests.support.programs import Program, running_program

PATIENCE_SECONDS = 120.0
CLASS = 7
STREAM = "simplebus_7"


class FakeServer:
    """Stateless server in its own process, on a fixed port."""

    def __init__(self, urls: list[str], *arguments: str) -> None:
        self.port = free_port()
        self.address = f"simplebus://{HOST}:{self.port}"
        self._arguments = (
            *("--engine", ",".join(urls), "--engine-replicas", "3", "--engine-ack-wait", "3"),
            *("--port", str(self.port), "--host", HOST, "--no-nats", "--log-level", "error"),
            *arguments,
        )
        self._stack = contextlib.ExitStack()
        self.program: Program | None = None

    def start(self) -> None:
        self._stack = contextlib.ExitStack()
        self.program = self._stack.enter_context(running_program("serve", *self._arguments))
        assert self.program.read_line().startswith("simplebus ready")

    def kill(self) -> None:
        self._stack.close()


@contextlib.contextmanager
def stateless_servers(urls: list[str], count: int) -> Iterator[list[FakeServer]]:
    servers = [FakeServer(urls) for _ in range(count)]
    try:
        for server in servers:
            server.start()
        yield servers
    finally:
        for server in servers:
            server.kill()


class Traffic:
    """A publisher and the members of a durable group; each has the addresses of all servers."""

    def __init__(self, addresses: list[str]) -> None:
        self.addresses = addresses
        self.confirmed = 0
        self.received: Counter[int] = Counter()
        self.first_seen: list[int] = []
        self.sent = 0
        self.goes_on = True

    async def publish(self) -> None:
        async with simplebus.connect(self.addresses, name="source", reconnect=50) as bus:
            while self.goes_on:
                batch = [b"%d" % n for n in range(self.sent, self.sent + 20)]
                self.sent += len(batch)
                await bus.publish_many(batch, class_id=CLASS)
                self.confirmed = self.sent
                await trio.sleep(0.01)

    async def consume(self, *, task_status: Any = trio.TASK_STATUS_IGNORED) -> None:
        async with (
            simplebus.connect(self.addresses[::-1], reconnect=50) as bus,
            bus.subscribe(CLASS, durable="all", group="g") as messages,
        ):
            task_status.started()
            async for message in messages:
                number = int(message.payload)
                if not self.received[number]:
                    self.first_seen.append(number)
                self.received[number] += 1

    async def until(self, count: int) -> None:
        """Wait until `count` more messages are confirmed."""
        target = self.confirmed + count
        while self.confirmed < target:  # noqa: ASYNC110 - no event exists to wait for.
            await trio.sleep(0.02)

    async def wait_all_received(self) -> None:
        """Return when every message was confirmed and received."""
        while min(len(self.received), self.confirmed) < self.sent:  # noqa: ASYNC110
            await trio.sleep(0.05)

    def check_nothing_lost(self) -> None:
        assert self.confirmed == self.sent
        assert sorted(self.received) == list(range(self.sent))


@pytest.mark.long
async def test_kills_never_lose_confirmed_messages(
    tmp_path: Path,
) -> None:
    with cluster(tmp_path) as servers, stateless_servers([s.url for s in servers], 2) as pair:
        traffic = Traffic([stateless_server.address for stateless_server in pair])
        with trio.fail_after(PATIENCE_SECONDS):
            async with trio.open_nursery() as nursery:
                await nursery.start(traffic.consume)
                nursery.start_soon(traffic.publish)
                await traffic.until(200)
                servers[0].kill()
                await traffic.until(200)
                pair[0].kill()
                await traffic.until(200)
                servers[0].start()
                pair[0].start()
                pair[1].kill()
                await traffic.until(200)
                traffic.goes_on = False
                await traffic.wait_all_received()
                nursery.cancel_scope.cancel()
    traffic.check_nothing_lost()


async def info(link: NatsConnection, subject: str) -> dict[str, Any]:
    """Return the info of a stream or consumer; {} if it is missing or has no leader."""
    try:
        return await link.api_request(subject, seconds=1.0)
    except (BusConnectionError, JetStreamError):
        return {}


async def replicated_info(link: NatsConnection, subject: str) -> dict[str, Any]:
    """Return the info as soon as all three servers are up to date."""
    while True:
        found = await info(link, subject)
        replicas = found.get("cluster", {}).get("replicas", [])
        if found.get("cluster", {}).get("leader") and sum(o["current"] for o in replicas) == 2:
            return found
        await trio.sleep(0.1)


@pytest.mark.long
async def test_rolling_restart_never_loses_confirmed_messages(
    tmp_path: Path,
) -> None:
    """Each server catches up before the next restart, so two are never behind at once."""
    with (
        cluster(tmp_path) as servers,
        stateless_servers([s.url for s in servers], 1) as (stateless_server,),
    ):
        traffic, urls = Traffic([stateless_server.address]), [s.url for s in servers]
        with trio.fail_after(PATIENCE_SECONDS):
            async with linked(*urls) as (link, _), trio.open_nursery() as nursery:
                await nursery.start(traffic.consume)
                async with trio.open_nursery() as publishers:
                    publishers.start_soon(traffic.publish)
                    for server in servers:
                        await traffic.until(200)
                        await trio.to_thread.run_sync(server.stop)
                        await traffic.until(200)
                        await trio.to_thread.run_sync(server.start)
                        for subject in f"STREAM.INFO.{STREAM}", f"CONSUMER.INFO.{STREAM}.g-g-d-all":
                            await replicated_info(link, subject)
                    traffic.goes_on = False
                await traffic.wait_all_received()
                nursery.cancel_scope.cancel()
    traffic.check_nothing_lost()


async def test_streams_and_consumers_have_configured_replicas(
    tmp_path: Path,
) -> None:
    with cluster(tmp_path) as servers, trio.fail_after(PATIENCE_SECONDS):
        urls = [server.url for server in servers]
        engine = options(*urls, replicas=3)
        stream = engine.names.stream_name(CLASS)
        async with (
            stateless_server(engine) as up,
            simplebus.connect(address(up)) as bus,
            bus.subscribe(CLASS, durable="d"),
            linked(*urls) as (link, _),
        ):
            await bus.publish(b"", class_id=CLASS)
            for subject in engine.names.identity_stream_name, stream:
                found = await replicated_info(link, f"STREAM.INFO.{subject}")
                assert found["config"]["num_replicas"] == 3
            found = await replicated_info(link, f"CONSUMER.INFO.{stream}.d-d")
            # A consumer without a setting has the replicas of its stream, listed beside the leader.
            assert found["config"]["num_replicas"] in (0, 3)
            assert len(found["cluster"]["replicas"]) == 2
