"""Tests of hostile and broken binary clients: only that client is disconnected."""

from __future__ import annotations

import contextlib
import logging
import socket

import pytest
import trio

from simplebus.core.broker.broker import Settings
from simplebus.core.errors import Reason
from simplebus.core.limits import FRAME_BYTES_MIN, Limits
from simplebus.core.protocol import frames
from simplebus.server.run import RunningServer
from tests.support.running_server import (
    Peer,
    ack,
    class_statistics,
    connect,
    message,
    serving,
    subscribe,
    wait_until,
)

VIOLATIONS = {
    "garbage": (b"\x00\xff" * 3000 + frames.DELIMITER, Reason.UNKNOWN_TYPE),
    "a web browser": (
        b"GET / HTTP/1.1\r\nHost: localhost\r\nAccept: text/html,<\r\n>\r\n\r\n",
        Reason.UNKNOWN_TYPE,
    ),
    "a frame without end": (b"1" + bytes(300_000), Reason.FRAME_TOO_LONG),
    "a frame that ends too late": (
        b"1" + bytes(70_000) + frames.DELIMITER,
        Reason.FRAME_TOO_LONG,
    ),
    "an unknown type": (frames.encode(ord("5")), Reason.UNKNOWN_TYPE),
    "an ack that is no range": (frames.encode(frames.ACK, content=b"seven"), Reason.BAD_ACK),
    "a reversed ack": (frames.encode(frames.ACK, content=b"9-3"), Reason.BAD_ACK),
    "a negative ack": (frames.encode(frames.ACK, content=b"-4-3"), Reason.BAD_ACK),
    "an endless ack": (frames.encode(frames.ACK, content=b"0-" + b"9" * 50_000), Reason.BAD_ACK),
    "a message for no class": (message(b"x", class_id=99), Reason.UNKNOWN_CLASS),
    "a connect that is no JSON": (
        frames.encode(frames.CONNECT, content=b"{["),
        Reason.BAD_CONNECT,
    ),
    "a connect that is no list": (frames.encode(frames.CONNECT, content=b"7"), Reason.BAD_CONNECT),
    "a connect with -1": (frames.encode(frames.CONNECT, content=b"[-1]"), Reason.BAD_CONNECT),
    "a connect with 65536": (frames.encode(frames.CONNECT, content=b"[65536]"), Reason.BAD_CONNECT),
    "a connect with a string": (
        frames.encode(frames.CONNECT, content=b'["a"]'),
        Reason.BAD_CONNECT,
    ),
    "a connect nested deeply": (
        frames.encode(frames.CONNECT, content=b"[" * 30_000),
        Reason.BAD_CONNECT,
    ),
    "a connect with too many classes": (
        frames.encode(frames.CONNECT, content=str(list(range(5000))).encode()),
        Reason.TOO_MANY_CLASSES,
    ),
}


@contextlib.asynccontextmanager
async def bystanders(server: RunningServer):  # type: ignore[no-untyped-def]
    """Publisher and subscriber whose traffic must continue meanwhile."""
    publisher, subscriber = await connect(server, [1]), await connect(server, [1])
    await subscriber.send(subscribe())
    await wait_until(lambda: bool(class_statistics(server).subscriptions))
    sent = 0

    async def exchange() -> None:
        nonlocal sent
        await publisher.send(message(b"%d" % sent))
        assert await subscriber.read_messages(1) == [(sent, b"%d" % sent)]
        await subscriber.send(ack(sent, sent + 1))
        sent += 1

    await exchange()
    yield exchange
    await exchange()
    await wait_until(lambda: class_statistics(server).in_flight == 0)


@pytest.mark.parametrize("violation", VIOLATIONS)
async def test_protocol_violation_disconnects_with_a_reason(
    violation: str, caplog: pytest.LogCaptureFixture
) -> None:
    data, reason = VIOLATIONS[violation]
    caplog.set_level(logging.WARNING)
    async with serving(Settings(Limits(frame_bytes=64 * 1024))) as server:
        async with bystanders(server):
            violator = await connect(server, [7])
            with contextlib.suppress(trio.BrokenResourceError):
                await violator.send(message(b"kept", class_id=7) + data)
            assert await violator.wait_closed()
            await wait_until(lambda: server.server.disconnect_counts[reason] == 1)
        assert class_statistics(server, 7).published == 1
        (line,) = [r.getMessage() for r in caplog.records if str(reason) in r.getMessage()]
        assert "127.0.0.1:" in line
        await wait_until(lambda: len(server.server.connections) == 2)
        server.server.broker.check_invariants()


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (ack(0, 5, class_id=400), Reason.ACK_UNSUBSCRIBED),
        (ack(1000, 2000), Reason.ACK_UNSENT),
        (ack(0, 2**31), Reason.ACK_UNSENT),
    ],
)
async def test_counts_and_ignores_invalid_acks(data: bytes, reason: Reason) -> None:
    async with serving() as server, bystanders(server) as exchange:
        confused = await connect(server, [1])
        await confused.send(subscribe())
        await wait_until(lambda: len(class_statistics(server).subscriptions) == 2)
        await confused.send(data)
        await wait_until(lambda: server.server.broker.refusal_counts[reason] == 1)
        await exchange()
        assert await confused.read_messages(1)
        await confused.stream.aclose()


async def test_disconnects_silent_and_dribbling_clients() -> None:
    limits = Limits(hello_seconds=0.2, frame_seconds=0.2)
    async with serving(Settings(limits, tick_seconds=0.05)) as server, bystanders(server):
        silent, dribbling = await connect(server), await connect(server, [1])
        await dribbling.send(message(b"never ended")[:FRAME_BYTES_MIN])
        assert await silent.wait_closed()
        assert await dribbling.wait_closed()
        assert server.server.disconnect_counts == {Reason.HELLO_TIMEOUT: 1, Reason.FRAME_TIMEOUT: 1}


async def test_a_client_that_sends_byte_by_byte_is_served() -> None:
    async with serving() as server:
        peer = await connect(server, [1])
        for byte in subscribe() + message(b"slow"):
            await peer.send(bytes([byte]))
        assert await peer.read_messages(1) == [(0, b"slow")]


async def test_stalled_subscriber_that_blocks_others_is_disconnected() -> None:
    limits = Limits(class_bytes=4 << 20, stall_seconds=0.3)
    async with serving(Settings(limits, tick_seconds=0.05, ack_timeout=40)) as server:
        stalled, reading = await connect(server, [1]), await connect(server, [1])
        for peer in (stalled, reading):
            await peer.send(subscribe())
        await wait_until(lambda: len(class_statistics(server).subscriptions) == 2)
        publisher = await connect(server, [1])
        payload, count = bytes(100_000), 400
        async with trio.open_nursery() as nursery:

            async def publish() -> None:
                for _ in range(count):
                    await publisher.send(message(payload))

            nursery.start_soon(publish)
            for number in range(count):
                ((message_id, _),) = await reading.read_messages(1)
                assert message_id == number
                await reading.send(ack(number, number + 1))
        assert server.server.disconnect_counts == {Reason.STALLED: 1}
        await wait_until(lambda: class_statistics(server).ring.message_count == 0)


async def test_connection_over_the_limit_is_refused() -> None:
    async with serving(Settings(Limits(connections=2))) as server, bystanders(server):
        third = await connect(server)
        assert await third.wait_closed()
        assert server.server.disconnect_counts == {Reason.TOO_MANY_CONNECTIONS: 1}


async def test_three_thousand_reset_connections_leave_no_state() -> None:
    async with serving() as server, bystanders(server):
        host, _, port = server.addresses[0].rpartition(":")
        for _ in range(30):
            for _ in range(100):
                stream = await trio.open_tcp_stream(host, int(port))
                stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, bytes([1, *bytes(7)]))
                stream.socket.close()
            await wait_until(lambda: len(server.server.connections) == 2)
        await wait_until(lambda: server.server.accepted_count >= 3_000)
        await wait_until(lambda: len(server.server.connections) == 2)
        assert len(server.server.broker.sessions) == 2


async def test_connection_reset_affects_no_other_client() -> None:
    async with serving() as server, bystanders(server):
        client: Peer = await connect(server, [1])
        await client.send(subscribe() + message(b"x", class_id=1)[:-2])
        client.stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, bytes([1, *bytes(7)]))
        await client.stream.aclose()
        await wait_until(lambda: len(server.server.connections) == 2)


async def test_memory_is_freed_after_a_burst() -> None:
    async with serving(Settings(ack_timeout=1000, tick_seconds=0.01)) as server:
        publisher = await connect(server, [1])
        await publisher.send(message(bytes(1000)) * 20_000)
        await wait_until(lambda: class_statistics(server).published == 20_000)
        subscriber = await connect(server, [1])
        await subscriber.send(subscribe())
        await subscriber.read_messages(20_000)
        await subscriber.send(ack(0, 20_000))
        await wait_until(lambda: server.server.broker.statistics().memory_bytes == 0)
