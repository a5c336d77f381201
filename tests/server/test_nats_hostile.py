"""Tests of hostile and broken NATS clients: only that client is disconnected."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
import trio

from simplebus.core.errors import Reason
from simplebus.nats.limits import NatsLimits
from simplebus.nats.nats_server import NatsServer
from simplebus.nats.server.session import PublisherStall
from simplebus.nats.server.slow_consumers import StallablePublisher
from simplebus.nats.settings import NatsSettings
from simplebus.server.nats_listener import NatsListener
from simplebus.server.run import RunningServer
from tests.server.injected_faults import raise_on_received
from tests.support.nats_peer import connect_nats_peer, open_nats_peer
from tests.support.running_server import connect, message, serving, wait_until

MIB = 1 << 20


@contextlib.asynccontextmanager
async def nats_server(**limits: float) -> AsyncIterator[tuple[RunningServer, NatsListener]]:
    settings = NatsSettings(NatsLimits(**limits))  # type: ignore[arg-type]
    async with serving(nats_port=0, nats=settings) as server:
        assert server.nats_listener is not None
        yield server, server.nats_listener


@contextlib.asynccontextmanager
async def bystanders(server: RunningServer) -> AsyncIterator[Callable[[], Awaitable[None]]]:
    """Publisher and subscriber whose traffic must continue meanwhile."""
    publisher, subscriber = await connect_nats_peer(server), await connect_nats_peer(server)
    await subscriber.send(b"SUB by.stander 7\r\n")
    await subscriber.flush()
    sent = 0

    async def exchange() -> None:
        nonlocal sent
        text = b"%d" % sent
        await publisher.send(b"PUB by.stander %d\r\n%b\r\n" % (len(text), text))
        assert await subscriber.read_line() == b"MSG by.stander 7 %d" % len(text)
        assert await subscriber.read_line() == text
        sent += 1

    await exchange()
    yield exchange
    await exchange()


NESTED = b'CONNECT {"name":' + b"[" * 3000
VIOLATIONS = {
    "garbage": (b"\x00\xff" * 3000 + b"\r\n", b"-ERR 'Unknown Protocol Operation'\r\n"),
    "a web browser": (
        b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"-ERR 'Unknown Protocol Operation'\r\n",
    ),
    "a line without end": (b"PUB " + b"x" * 5000, b"-ERR 'maximum control line exceeded'\r\n"),
    "a gigabyte announced": (b"PUB a 999999999\r\n", b"-ERR 'Maximum Payload Violation'\r\n"),
    "a number with no end": (b"PUB a " + b"9" * 4000 + b"\r\n", b""),
    "a nesting bomb": (NESTED + b"\r\n", b""),
    "a nesting bomb that ends": (NESTED + b"]" * 1000 + b"}\r\n", b""),
    "JSON that is no object": (b"CONNECT 7\r\n", b""),
}


@pytest.mark.parametrize("violation", VIOLATIONS)
async def test_disconnects_only_the_offender(
    violation: str, caplog: pytest.LogCaptureFixture
) -> None:
    commands, expected = VIOLATIONS[violation]
    caplog.set_level(logging.WARNING)
    async with nats_server() as (server, listener), bystanders(server) as exchange:
        violator = await open_nats_peer(server)
        await violator.read_info()
        with contextlib.suppress(trio.BrokenResourceError):
            await violator.send(commands)
        assert await violator.read_until_closed() == expected
        await wait_until(lambda: len(listener.connections) == 2)
        await exchange()
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("127.0.0.1:")
    assert "internal error" not in line


async def test_deep_nesting_in_a_long_line_is_refused() -> None:
    async with nats_server(max_control_line=8 * MIB) as (server, listener), bystanders(server):
        violator = await open_nats_peer(server)
        await violator.read_info()
        with contextlib.suppress(trio.BrokenResourceError):
            await violator.send(b'CONNECT {"name":' + b"[" * 4_000_000 + b"\r\n")
        assert await violator.read_until_closed() == b""
        await wait_until(lambda: len(listener.connections) == 2)


async def test_announced_payload_that_never_arrives_costs_no_memory() -> None:
    payload_max = 999_999_999
    server_context = nats_server(max_payload=payload_max, max_pending=1 << 30)
    async with server_context as (server, listener), bystanders(server) as exchange:
        clients = [await connect_nats_peer(server) for _ in range(20)]
        for client in clients:
            await client.send(b"PUB a %d\r\n" % payload_max + bytes(10_000))
        await wait_until(lambda: sum(buffered_bytes(listener)) >= 20 * 10_000)
        assert sum(buffered_bytes(listener)) < 20 * 11_000
        await exchange()
        for client in clients:
            await client.stream.aclose()
        await wait_until(lambda: len(listener.connections) == 2)
        assert sum(buffered_bytes(listener)) == 0


def buffered_bytes(listener: NatsListener) -> list[int]:
    """Return the bytes of each client's incomplete command."""
    return [session.parser.tail_bytes for session in listener.nats_server.sessions.values()]


async def test_internal_error_ends_only_one_client(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    raise_on_received(monkeypatch, NatsServer, b"trip", AssertionError("a fault of ours"))
    async with nats_server() as (server, listener), bystanders(server) as exchange:
        unlucky = await connect_nats_peer(server)
        await unlucky.send(b"PUB trip 0\r\n\r\n")
        assert await unlucky.read_until_closed() == b""
        await wait_until(lambda: len(listener.connections) == 2)
        await exchange()
    assert "disconnected by an internal error" in caplog.text


async def test_a_client_that_sends_byte_by_byte_is_served() -> None:
    async with nats_server() as (server, _):
        peer = await open_nats_peer(server)
        await peer.read_info()
        for byte in b'CONNECT {"verbose":false}\r\nSUB a 1\r\nPUB a 4\r\nslow\r\n':
            await peer.send(bytes([byte]))
        assert await peer.read_line() == b"MSG a 1 4"
        assert await peer.read_line() == b"slow"


async def test_client_that_dribbles_a_line_gets_pings() -> None:
    async with nats_server(ping_seconds=0.1) as (server, _):
        silent, dribbling = await open_nats_peer(server), await connect_nats_peer(server)
        await dribbling.send(b"PUB a 5\r\nhal")
        for peer in (silent, dribbling):
            received = await peer.read_until_closed()
            assert received.count(b"PING\r\n") == 2
            assert received.endswith(b"-ERR 'Stale Connection'\r\n")
        assert server.server.disconnect_counts == {Reason.HEARTBEAT_TIMEOUT: 2}


async def test_removing_many_subscriptions_does_not_block_others() -> None:
    count = 30_000
    async with nats_server() as (server, listener), bystanders(server) as exchange:
        greedy = await connect_nats_peer(server)
        before = len(listener.nats_server.routes)
        commands = b"".join(b"SUB a.%d %d\r\n" % (n, n) for n in range(count)) + b"PING\r\n"
        exchanges_while_adding = exchanges_while_removing = 0
        async with trio.open_nursery() as nursery:
            nursery.start_soon(greedy.send, commands)
            while len(listener.nats_server.routes) < before + count:
                await exchange()
                exchanges_while_adding += 1
        assert await greedy.read_line() == b"PONG"
        await greedy.stream.aclose()
        while len(listener.nats_server.routes) > before:
            await exchange()
            exchanges_while_removing += 1
        assert exchanges_while_adding > 20
        assert exchanges_while_removing > 5
        assert not listener.nats_server.routes.has_abandoned


async def test_subscriptions_of_one_client_can_be_limited() -> None:
    async with nats_server(max_subs=3) as (server, _), bystanders(server):
        greedy = await connect_nats_peer(server)
        await greedy.send(b"".join(b"SUB a %d\r\n" % n for n in range(4)))
        assert await greedy.read_line() == b"-ERR 'maximum subscriptions exceeded'"
        await greedy.flush()


async def test_subjects_of_thousands_of_tokens_are_delivered() -> None:
    subject = b".".join([b"a"] * 2000)
    async with nats_server() as (server, _), bystanders(server) as exchange:
        peer = await connect_nats_peer(server)
        await peer.send(b"SUB %b 1\r\nSUB a.> 2\r\nPUB %b 0\r\n\r\n" % (subject, subject))
        assert {await peer.read_line(), await peer.read_line(), await peer.read_line()} == {
            b"MSG %b 1 0" % subject,
            b"",
            b"MSG %b 2 0" % subject,
        }
        assert await peer.read_line() == b""
        await exchange()


async def test_subscriber_that_stops_reading_is_disconnected_under_load(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING)
    async with (
        nats_server(max_pending=8 * MIB) as (server, listener),
        bystanders(server) as exchange,
    ):
        stuck = await connect_nats_peer(server, name="stuck\n")
        await stuck.send(b"SUB flood 1\r\n")
        await stuck.flush()
        commands = b'CONNECT {"verbose":false}\r\n' + b"PUB flood 1000\r\n%b\r\n" % bytes(1000) * 20
        host, _, port = server.nats_addresses[0].rpartition(":")
        crowd = []
        for number in range(1000):
            crowd.append(socket.create_connection((host, int(port))))
            crowd[-1].sendall(commands)
            if number % 50 == 0:
                await exchange()
        while not server.server.disconnect_counts:
            await exchange()
        assert server.server.disconnect_counts == {Reason.SLOW_CONSUMER: 1}
        assert b"-ERR" not in await stuck.read_until_closed()
        await wait_until(
            lambda: sum(s.pending_bytes for s in listener.nats_server.sessions.values()) == 0
        )
        await wait_until(lambda: len(listener.connections) == 1002)
        for sock in crowd:
            sock.close()
        await wait_until(lambda: len(listener.connections) == 2)
    (line,) = [record.getMessage() for record in caplog.records]
    assert "('stuck\\n'): disconnected (slow_consumer)" in line
    assert line.endswith("its subscriptions: flood")


def resident_bytes() -> int:
    """Return the resident memory of this process, which runs the server too."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def test_memory_of_a_client_that_never_reads_is_freed() -> None:
    async with nats_server() as (server, listener), bystanders(server) as exchange:
        publisher = await connect_nats_peer(server)
        block = b"PUB tick 0\r\n\r\n" + b"PUB flood 1000\r\n%b\r\n" % bytes(1000) * 2000
        before, pending_bytes_max = resident_bytes(), 0
        stuck, reader = await connect_nats_peer(server), await connect_nats_peer(server)
        await stuck.send(b"SUB flood 1\r\n")
        await stuck.flush()
        await reader.send(b"SUB tick 1\r\n")  # The publisher does not wait for one alone, then.
        await reader.flush()
        while not server.server.disconnect_counts:
            await publisher.send(block)
            await exchange()
            pending_bytes_max = max(
                pending_bytes_max, listener.nats_server.statistics().pending_bytes
            )
        assert pending_bytes_max > 40 * MIB
        await wait_until(lambda: resident_bytes() - before < 24 * MIB)
        assert len(listener.connections) == 4


async def test_publisher_is_slowed_to_the_speed_of_its_subscriber() -> None:
    count = 20_000
    async with nats_server(max_pending=4 * MIB) as (server, _):
        slow, publisher = await connect_nats_peer(server), await connect_nats_peer(server)
        await slow.send(b"SUB a 1\r\n")
        await slow.flush()
        total_bytes = len(b"MSG a 1 1000\r\n%b\r\n" % bytes(1000)) * count
        async with trio.open_nursery() as nursery:
            nursery.start_soon(publisher.send, b"PUB a 1000\r\n%b\r\n" % bytes(1000) * count)
            received = 0
            while received < total_bytes:  # Reads are smaller than the publisher's writes.
                more = await slow.stream.receive_some(20_000)
                assert more, server.server.disconnect_counts
                received += len(more)
        assert not server.server.disconnect_counts


async def test_binary_publishers_wait_for_slow_nats_subscribers() -> None:
    count = 20_000
    async with nats_server(max_pending=4 * MIB) as (server, _):
        slow, publisher = await connect_nats_peer(server), await connect(server, [1])
        await slow.send(b"SUB class.1 1\r\n")
        await slow.flush()
        total_bytes = len(b"MSG class.1 1 1000\r\n%b\r\n" % bytes(1000)) * count
        async with trio.open_nursery() as nursery:
            nursery.start_soon(publisher.send, message(bytes(1000)) * count)
            received = 0
            while received < total_bytes:
                more = await slow.stream.receive_some(20_000)
                assert more, server.server.disconnect_counts
                received += len(more)
        assert not server.server.disconnect_counts


async def test_binary_publishers_do_not_wait_if_other_consumers_keep_up() -> None:
    async with nats_server(max_pending=4 * MIB) as (server, listener):
        stuck, reading, publisher = (
            await connect_nats_peer(server),
            await connect_nats_peer(server),
            await connect(server, [1]),
        )
        for peer in (stuck, reading):
            await peer.send(b"SUB class.1 1\r\n")
            await peer.flush()
        waits = 0
        wait = listener.nats_server.slow_consumer_monitor.stall_timed_out

        def count(stall: PublisherStall, waiting: StallablePublisher) -> None:
            nonlocal waits
            waits += not stall.has_fast_receivers
            wait(stall, waiting)

        listener.nats_server.slow_consumer_monitor.stall_timed_out = count  # type: ignore[method-assign]
        while not server.server.disconnect_counts:
            await publisher.send(message(bytes(1000)) * 100)
            remaining_bytes = 100 * len(b"MSG class.1 1 1000\r\n%b\r\n" % bytes(1000))
            while remaining_bytes:
                remaining_bytes -= len(await reading.stream.receive_some(remaining_bytes))
        assert server.server.disconnect_counts == {Reason.SLOW_CONSUMER: 1}
        assert waits == 0


async def test_connection_over_the_limit_gets_an_error() -> None:
    async with nats_server(connections=2) as (server, listener), bystanders(server):
        third = await open_nats_peer(server)
        await third.read_info()
        assert await third.read_until_closed() == b"-ERR 'maximum connections exceeded'\r\n"
        await wait_until(lambda: len(listener.connections) == 2)
        assert server.server.disconnect_counts == {Reason.TOO_MANY_CONNECTIONS: 1}


async def test_flood_of_connections_leaves_no_state() -> None:
    async with nats_server() as (server, listener), bystanders(server) as exchange:
        host, _, port = server.nats_addresses[0].rpartition(":")
        for round_ in range(10):
            flood = []
            for _ in range(100):
                sock = socket.create_connection((host, int(port)))
                if round_ % 2:
                    sock.send(b"CONNECT {}\r\nSUB a.> 1\r\nPUB a.b 9\r\n")
                flood.append(sock)
            await exchange()
            for sock in flood:
                sock.close()
        await wait_until(lambda: len(listener.connections) == 2)
        assert len(listener.nats_server.sessions) == 2
        assert listener.nats_server.routes.match(b"a.b") == ()


async def test_closing_during_deliveries_affects_no_other_client() -> None:
    async with nats_server() as (server, listener), bystanders(server) as exchange:
        publisher = await connect_nats_peer(server)
        for _ in range(20):
            closed_peer = await connect_nats_peer(server)
            await closed_peer.send(b"SUB flood 1\r\n")
            await closed_peer.flush()
            await publisher.send(b"PUB flood 1000\r\n%b\r\n" % bytes(1000) * 1000)
            await closed_peer.stream.aclose()
            await exchange()
        await publisher.flush()
        await wait_until(lambda: len(listener.connections) == 3)
        assert listener.nats_server.routes.match(b"flood") == ()
