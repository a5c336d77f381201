"""Tests of small requests that are expensive to process, on each listener."""

from __future__ import annotations

import contextlib

import pytest
import trio

import simplebus
from simplebus.core.protocol import frames
from simplebus.core.protocol.requests import ConnectRequest
from simplebus.server.run import RunningServer
from tests.support.http_peer import open_http_peer
from tests.support.nats_peer import connect_nats_peer, open_nats_peer
from tests.support.running_server import Peer, connect, serving

DEEP = b"[" * 60_000
WIDE = b'{"version":2,' + b",".join(b'"k%d":[]' % n for n in range(5000)) + b"}"


async def assert_serving(server: RunningServer) -> None:
    """Assert that another client is served."""
    async with (
        simplebus.connect(server.addresses[0]) as bus,
        bus.subscribe(1) as messages,
    ):
        await bus.publish(b"x", class_id=1)
        assert (await messages.get(timeout=60)).payload == b"x"


async def connect_version2(server: RunningServer) -> Peer:
    peer = await connect(server)
    await peer.send(frames.encode(frames.CONNECT, content=ConnectRequest(2).encode()))
    assert (await peer.read_frame())[0] == frames.CONNECT
    return peer


@pytest.mark.parametrize(
    "content",
    [
        b'{"version":2,"auth":' + DEEP,
        b'{"version":2,"x":' + DEEP,
        b'{"version":2,"classes":[' + b"{}," * 20_000 + b"{}]}",
        b'{"version":2,"classes":[' + b"{}," * 100_000 + b"{}]}",
        b'{"version":2,"name":"' + b"x" * 60_000 + b'"}',
        b'{"version":1e999}',
        b"[" + b"1," * 200_000 + b"1]",
    ],
    ids=[
        "deep",
        "deep and unknown",
        "many classes",
        "too long",
        "long name",
        "huge number",
        "version 1",
    ],
)
async def test_expensive_connect_ends_only_its_connection(content: bytes) -> None:
    async with serving() as server:
        peer = await connect(server)
        with contextlib.suppress(trio.BrokenResourceError):
            await peer.send(frames.encode(frames.CONNECT, content=content))
        assert await peer.wait_closed()
        await assert_serving(server)


async def test_skips_any_number_of_unknown_keys() -> None:
    async with serving() as server:
        peer = await connect(server)
        await peer.send(frames.encode(frames.CONNECT, content=WIDE))
        assert (await peer.read_frame())[0] == frames.CONNECT
        await assert_serving(server)


@pytest.mark.parametrize(
    "kind", [frames.SUBSCRIBE, frames.FETCH, frames.INQUIRE, frames.PURGE, frames.UNSUBSCRIBE]
)
async def test_expensive_request_is_refused_and_the_next_is_answered(kind: int) -> None:
    async with serving() as server:
        peer = await connect_version2(server)
        for content in (b'{"x":' + DEEP, b'{"channels":[' + b'"a",' * 15_000 + b'"a"]}', DEEP):
            data = frames.encode(kind, class_id=1, message_id=7, timer_index=1, content=content)
            await peer.send(data)
            assert (await peer.read_frame())[0] == frames.ERROR
        await peer.send(frames.encode(frames.INQUIRE, message_id=8, content=b'{"about":"bus"}'))
        assert (await peer.read_frame())[0] == frames.INQUIRE


@pytest.mark.parametrize(
    "data",
    [
        b"CONNECT " + b'{"x":' * 600 + b"\r\n",
        b"CONNECT " + b"[" * 4000 + b"\r\n",
        b"CONNECT " + b"x" * 100_000,
        b"PUB a 99999999999999999999\r\n",
        b"HPUB a 4000000 4000001\r\n",
        b"x" * 100_000,
    ],
    ids=["deep", "list", "no end", "size", "headers", "no word"],
)
async def test_expensive_nats_line_ends_only_its_client(data: bytes) -> None:
    async with serving(nats_port=0) as server:
        bystander = await connect_nats_peer(server)
        peer = await open_nats_peer(server)
        await peer.read_info()
        with contextlib.suppress(trio.BrokenResourceError):
            await peer.send(data)
        answer = await peer.read_until_closed()
        assert answer == b"" or answer.startswith(b"-ERR")
        await bystander.flush()


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"GET / HTTP/1.1\r\nX: " + b"x" * 100_000 + b"\r\n\r\n", 431),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\n" + b"X: y\r\n" * 100 + b"\r\n", 431),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999999999\r\n\r\n", 413),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n", 413),
    ],
    ids=["long head", "many headers", "body", "endless body"],
)
async def test_expensive_http_request_is_refused(data: bytes, status: int) -> None:
    async with serving(http_port=0) as server:
        peer = await open_http_peer(server)
        with contextlib.suppress(trio.BrokenResourceError):
            await peer.send(data)
        assert (await peer.read_response()).status == status
        assert (await (await open_http_peer(server)).request("/healthz")).status == 200
