"""Copiers to stateless servers of a JetStream cluster: each message is stored once, in order."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path
from typing import Any

import pytest
import trio

import simplebus
from load.ports import HOST, free_ports
from simplebus.bridge.build import bus_to_bus
from simplebus.bridge.copier import Copier
from simplebus.bridge.runner import create_copiers, run_copiers
from simplebus.bridge.settings import BridgeSettings, CopiedClass
from simplebus.bridge.target.bus import TargetSettings
from simplebus.client.addresses import Address
from simplebus.client.aio.bus import Bus
from simplebus.client.aio.transport import SocketEndpoint
from simplebus.client.credentials import Access
from simplebus.core.users.passwords import PasswordVerifier, hash_token
from simplebus.core.users.permissions import PermissionRule, PermissionRules, Permissions
from simplebus.core.users.users import User, Users
from simplebus.memory.bus import MemoryBus
from tests.bridge.memory_buses import endpoint_of, numbered_payloads
from tests.bridge.nats_copiers import connect, running_bridges
from tests.bridge.test_processes import RestartableProgram, wait_listening
from tests.jetstream.nats_servers import NatsServer, nats_server
from tests.jetstream.stateless_servers import address, options, stateless_server
from tests.support.running_server import serving

PATIENCE_SECONDS = 120.0


async def read_all(bus: Bus) -> list[bytes]:
    """Return all messages of the class."""
    await bus.publish(b"last", class_id="a")
    received: list[bytes] = []
    async with bus.subscribe("a", start="earliest") as messages:
        while not received or received[-1] != b"last":
            received += [each.payload for each in await messages.take(1000)]
    return received[:-1]


async def test_copies_to_stateless_server_once_in_order(nats: NatsServer) -> None:
    """Filtered messages leave gaps in the numbers, and the copier reconnects to another server."""
    cluster = options(nats.url)
    with trio.fail_after(PATIENCE_SECONDS):
        async with (
            serving() as bus_server,
            stateless_server(cluster) as first_stateless,
            stateless_server(cluster) as second_stateless,
            simplebus.connect(f"simplebus://{bus_server.addresses[0]}") as source_address,
            simplebus.connect(address(second_stateless)) as target_address,
        ):
            source = f"simplebus://{bus_server.addresses[0]}"
            copied = CopiedClass("a", start="earliest", channels=("x.#",))
            for at, target in (
                (0, first_stateless),
                (1000, second_stateless),
                (2000, first_stateless),
            ):
                async with running_bridges(
                    BridgeSettings("b", source, address(target), (copied,))
                ) as (copier,):
                    for first in range(at, at + 1000, 100):
                        payloads = numbered_payloads(first, first + 100)
                        await source_address.publish_many(
                            payloads[:60], class_id="a", channel="x.y"
                        )
                        for payload in payloads[60:]:
                            await source_address.publish(
                                payload, class_id="a", channel="x", confirm=False
                            )
                            await source_address.publish(
                                b"not", class_id="a", channel="y", confirm=False
                            )
                        await source_address.flush()
                    while copier.statistics().position < 1400 * (at // 1000 + 1):  # noqa: ASYNC110
                        await trio.sleep(0.01)
                assert copier.statistics().skipped == {"not_for_it": 400}
                assert copier.statistics().copied == 1000
            assert await read_all(target_address) == numbered_payloads(0, 3000)


async def test_stateless_server_refusal_becomes_dead_letter_at_source(nats: NatsServer) -> None:
    """The dead letter has the message's own sequence, although others were filtered out."""
    allowed = PermissionRules((PermissionRule.parse("a x.#"),))
    writer = User("writer", token=hash_token("writes"), permissions=Permissions(publish=allowed))
    unrestricted = User("all", token=hash_token("all"))
    users = Users((unrestricted, writer), PasswordVerifier(b"by chance"))
    with trio.fail_after(PATIENCE_SECONDS):
        async with (
            serving() as bus_server,
            stateless_server(options(nats.url), users=users) as first_stateless,
            simplebus.connect(f"simplebus://{bus_server.addresses[0]}") as source_address,
            simplebus.connect(
                address(first_stateless), access=Access(token="all")
            ) as target_address,
        ):
            for number in range(300):
                channel = ("x.y", "y", "z")[number % 3]
                await source_address.publish(
                    b"%d" % number, class_id="a", channel=channel, confirm=False
                )
            await source_address.flush()
            far_access = Access(token="writes")
            copied = CopiedClass("a", start="earliest", channels=("x.#", "z"))
            source = f"simplebus://{bus_server.addresses[0]}"
            bridge = BridgeSettings(
                "b", source, address(first_stateless), (copied,), target_access=far_access
            )
            async with running_bridges(bridge) as (copier,):
                while copier.statistics().position < 300:  # noqa: ASYNC110 - there is no event.
                    await trio.sleep(0.01)
            assert (copier.statistics().copied, copier.statistics().refused) == (100, 100)
            assert await read_all(target_address) == [b"%d" % number for number in range(0, 300, 3)]
            async with source_address.subscribe("dead.a") as letters:
                received = [(await letters.get()).payload for _ in range(100)]
            assert received == [b"%d" % number for number in range(2, 300, 3)]


async def test_cluster_messages_do_not_return(nats: NatsServer) -> None:
    """Two buses have a bidirectional bridge each, to different stateless servers of the cluster."""
    cluster = options(nats.url)
    with trio.fail_after(PATIENCE_SECONDS):
        async with (
            serving() as a,
            serving() as b,
            stateless_server(cluster) as first_stateless,
            stateless_server(cluster) as second_stateless,
            contextlib.AsyncExitStack() as stack,
        ):
            urls = [address(bus_server) for bus_server in (a, b, first_stateless, second_stateless)]
            buses = [await stack.enter_async_context(simplebus.connect(url)) for url in urls]
            copied = (CopiedClass("a", start="earliest"),)
            copiers = create_copiers(
                [
                    BridgeSettings("a", urls[0], urls[2], copied, is_bidirectional=True),
                    BridgeSettings("b", urls[1], urls[3], copied, is_bidirectional=True),
                ]
            )
            received: list[set[bytes]] = [set() for _ in buses]

            async def receive(number: int) -> None:
                async with buses[number].subscribe("a") as messages:
                    async for message in messages:
                        assert message.payload not in received[number], "it came twice"
                        received[number].add(message.payload)

            async with trio.open_nursery() as nursery:
                for number in range(4):
                    nursery.start_soon(receive, number)
                nursery.start_soon(run_copiers, copiers)
                while not all(copier.statistics().is_up for copier in copiers):  # noqa: ASYNC110
                    await trio.sleep(0.01)
                for number, bus in enumerate(buses):
                    for each in range(10):
                        await bus.publish(b"%d %d" % (number, each), class_id="a")
                while not all(len(each) == 40 for each in received):  # noqa: ASYNC110
                    await trio.sleep(0.01)
                # Wait for messages that would be copied back.
                while sum(copier.statistics().position for copier in copiers) < 4 * 40:  # noqa: ASYNC110
                    await trio.sleep(0.01)
                nursery.cancel_scope.cancel()
            statistics = [copier.statistics() for copier in copiers]
            assert sum(each.copied for each in statistics) == 10 + 10 + 30 + 30
            assert sum(each.skipped.get("looped", 0) for each in statistics) == 30 + 30 + 10 + 10


class RotatingEndpoint:
    """Endpoint that leads to another bus with each connection."""

    now: MemoryBus

    async def open(self) -> Any:
        return await endpoint_of(self.now).open()


async def test_detects_restored_source(nats: NatsServer, tmp_path: Path) -> None:
    """A message that has the sequence of a lost message is copied."""
    endpoint = RotatingEndpoint()
    parts = [(0, 10), (10, 20), (1000, 1015)]
    with trio.fail_after(PATIENCE_SECONDS):
        async with (
            stateless_server(options(nats.url)) as first_stateless,
            simplebus.connect(address(first_stateless)) as target_address,
        ):
            target_settings = TargetSettings(name="b", record_channel="b", class_="a")
            target = SocketEndpoint(Address.parse(address(first_stateless)))
            copier = Copier(
                "b", bus_to_bus(endpoint, target, target_settings, class_="a", start="earliest")
            )
            for (first, last), folder in zip(parts, ("source", "source", "copy"), strict=True):
                endpoint.now = MemoryBus(data_dir=tmp_path / folder)
                async with endpoint.now as source_address, trio.open_nursery() as nursery:
                    nursery.start_soon(copier.run)
                    copied_before = copier.statistics().copied
                    await source_address.publish_many(numbered_payloads(first, last), class_id="a")
                    while copier.statistics().copied < copied_before + last - first:  # noqa: ASYNC110
                        await trio.sleep(0.01)
                    nursery.cancel_scope.cancel()
                if not first:
                    shutil.copytree(tmp_path / "source", tmp_path / "copy")
            assert copier.statistics().discarded_records == 1
            received = list(dict.fromkeys(await read_all(target_address)))
            assert received == [
                payload for bounds in parts for payload in numbered_payloads(*bounds)
            ]


@pytest.mark.parametrize("stream", ["", "WORDS"])
async def test_copies_nats_to_stateless_server(nats: NatsServer, stream: str) -> None:
    """Messages of a stream are copied once. Core NATS messages are copied while the copier is
    connected, and none of them is dropped as a duplicate of an earlier one.
    """
    subject = f"words{stream}"
    async with connect(nats) as connection, stateless_server(options(nats.url)) as first_stateless:
        if stream:
            config = {"name": stream, "subjects": [subject], "storage": "memory"}
            await connection.nats.api_request(f"STREAM.CREATE.{stream}", config)
        with trio.fail_after(PATIENCE_SECONDS):
            copied = CopiedClass("a", stream=stream, channels=(subject,))
            for first in range(0, 600, 200):
                async with running_bridges(
                    BridgeSettings("b", nats.url, address(first_stateless), (copied,))
                ) as (copier,):
                    while not copier.statistics().is_up:  # noqa: ASYNC110 - there is no event.
                        await trio.sleep(0.01)
                    for number in range(first, first + 200):
                        connection.core.publish(subject, b"%d" % number)
                    connection.nats.flush()
                    while copier.statistics().copied < 200:  # noqa: ASYNC110
                        await trio.sleep(0.01)
            async with simplebus.connect(address(first_stateless)) as bus:
                assert await read_all(bus) == numbered_payloads(0, 600)


@pytest.mark.long
async def test_kills_store_messages_once_in_order(tmp_path: Path) -> None:
    """Kills the bridge, the stateless server, the NATS server and the source bus under load."""
    source_address, target_address = (f"{HOST}:{port}" for port in free_ports(2))
    published, finished = 0, trio.Event()

    async def publish() -> None:
        nonlocal published
        await wait_listening(source_address)
        async with simplebus.connect(
            source_address, name="till", reconnect=PATIENCE_SECONDS
        ) as bus:
            while not finished.is_set():
                payloads = numbered_payloads(published, published + 20)
                await bus.publish_many(payloads, class_id="a")
                published += 20
                await trio.sleep(0.005)

    def serve_arguments(address: str) -> tuple[str, ...]:
        return "serve", "--host", HOST, "--port", address.split(":")[1], "--no-nats", "--no-http"

    with nats_server(tmp_path) as nats, trio.fail_after(PATIENCE_SECONDS):
        arguments = {
            "n": (*serve_arguments(source_address), "--data-dir", str(tmp_path / "source")),
            "d": (*serve_arguments(target_address), "--engine", nats.url),
            "b": ("bridge", "--from", source_address, "--to", target_address, "a"),
        }
        programs = {
            name: RestartableProgram(tmp_path / f"{name}.log", *arguments[name])
            for name in arguments
        }
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(publish)
                for victim in "bdsn":
                    await wait_listening(target_address)
                    published_goal = published + 1000
                    while published < published_goal:  # noqa: ASYNC110 - there is no event.
                        await trio.sleep(0.01)
                    if victim == "s":
                        nats.kill()
                        nats.start()
                    else:
                        programs[victim].kill()
                        programs[victim].restart()
                finished.set()
            await wait_listening(target_address)
            received: list[bytes] = []
            async with simplebus.connect(target_address) as bus, bus.subscribe("a") as messages:
                while len(received) < published:
                    received += [each.payload for each in await messages.take(1000)]
                await bus.publish(b"last", class_id="a")
                received.append((await messages.get()).payload)
            log_text = "\n".join(program.describe() for program in programs.values())
            assert received == [*numbered_payloads(0, published), b"last"], log_text
        finally:
            for program in programs.values():
                program.kill()
