"""A client without a user cannot use up all classes, with any protocol."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import msgspec
import pytest
import trio

from simplebus.core.limits import Limits
from simplebus.core.protocol import frames
from simplebus.core.settings import Settings
from simplebus.server.run import RunningServer
from tests.support.nats_peer import NatsPeer
from tests.support.running_server import Peer, serving, wait_until

CLASSES = 64
CULPRIT, INNOCENT = "127.0.0.1", "127.0.0.2"

Declare = Callable[[RunningServer, str, int], Awaitable[str]]
"""Declares a class on a new connection from an address. Returns the refusal, or an empty text."""


async def _open(address: str, listener: str) -> trio.SocketStream:
    host, _, port = listener.rpartition(":")
    return await trio.open_tcp_stream(host, int(port), local_address=address)


async def declare_version1(server: RunningServer, address: str, class_id: int) -> str:
    peer = Peer(await _open(address, server.addresses[0]))
    await peer.send(frames.encode(frames.CONNECT, content=b"[%d]" % class_id))
    reply = await peer.read_frame()
    await peer.stream.aclose()
    return "" if reply else "too_many_classes"  # Version 1 has no errors.


async def declare_version2(server: RunningServer, address: str, class_id: int) -> str:
    peer = Peer(await _open(address, server.addresses[0]))
    content = msgspec.json.encode({"version": 2, "classes": [f"class {class_id}"]})
    await peer.send(frames.encode(frames.CONNECT, content=content))
    reply = await peer.read_frame()
    await peer.stream.aclose()
    return "" if reply[0] == frames.CONNECT else reply.decode(errors="replace")


async def declare_nats(server: RunningServer, address: str, class_id: int) -> str:
    peer = NatsPeer(await _open(address, server.nats_addresses[0]))
    await peer.handshake()
    await peer.send(b"SUB $SB.SUB.%d 1\r\nPING\r\n" % class_id)
    line = await peer.read_line()
    await peer.stream.aclose()
    return "" if line == b"PONG" else line.decode()


@pytest.mark.parametrize("declare", [declare_version1, declare_version2, declare_nats])
async def test_innocent_client_gets_a_class(declare: Declare) -> None:
    async with serving(Settings(limits=Limits(classes=CLASSES)), nats_port=0) as server:
        refusals = [await declare(server, CULPRIT, n) for n in range(CLASSES)]
        refused = [refusal for refusal in refusals if refusal]
        assert len(refused) == CLASSES // 2
        assert all("too_many_classes" in each or "of at most 32" in each for each in refused)
        assert await declare(server, INNOCENT, 5000) == ""


@pytest.mark.parametrize("declare", [declare_version1, declare_version2, declare_nats])
async def test_classes_of_a_client_that_has_gone_are_removed(
    declare: Declare, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "simplebus.server")
    settings = Settings(
        limits=Limits(classes=4, classes_per_address=0, classes_per_connection=0),
        idle_class_seconds=0.05,
        tick_seconds=0.01,
    )
    async with serving(settings, nats_port=0) as server:
        for n in range(4):
            assert await declare(server, CULPRIT, n) == ""
        await wait_until(lambda: not server.server.broker.classes)
        assert await declare(server, INNOCENT, 5000) == ""
        await wait_until(lambda: "was removed, because it was unused" in caplog.text)
