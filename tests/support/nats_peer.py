"""Raw NATS client for a running server."""

from __future__ import annotations

import json
import ssl
from typing import Any

import trio

from simplebus.server.run import RunningServer
from tests.support.running_server import PATIENCE_SECONDS, _streams


class NatsPeer:
    """Raw NATS client that sends bytes and reads lines."""

    def __init__(self, stream: trio.SocketStream) -> None:
        _streams.append(stream)
        self.socket = stream
        self.stream: trio.abc.Stream = stream
        self.received = bytearray()

    async def send(self, data: bytes) -> None:
        with trio.fail_after(PATIENCE_SECONDS):
            await self.stream.send_all(data)

    async def read_line(self) -> bytes:
        """Return the next line without CRLF, or b"" at the end. PINGs are answered."""
        while (line := await self._read_any_line()) == b"PING":
            await self.send(b"PONG\r\n")
        return line

    async def _read_any_line(self) -> bytes:
        with trio.fail_after(PATIENCE_SECONDS):
            while (end := self.received.find(b"\r\n")) < 0:
                try:
                    data = await self.stream.receive_some(1 << 20)
                except trio.BrokenResourceError:
                    return b""
                if not data:
                    return b""
                self.received += data
        line = bytes(self.received[:end])
        del self.received[: end + 2]
        return line

    async def read_info(self) -> dict[str, Any]:
        """Read INFO and return its content."""
        verb, _, text = (await self.read_line()).partition(b" ")
        assert verb == b"INFO"
        info = json.loads(text)
        assert isinstance(info, dict)
        return info

    async def handshake(self, **options: Any) -> dict[str, Any]:
        """Read INFO, send CONNECT and PING, and read PONG. Returns the content of INFO."""
        info = await self.read_info()
        await self.send_connect(**options)
        return info

    async def send_connect(self, **options: Any) -> None:
        connect_options = {"verbose": False, "pedantic": False, **options}
        await self.send(b"CONNECT " + json.dumps(connect_options).encode() + b"\r\nPING\r\n")
        assert await self.read_line() == b"PONG"

    async def flush(self) -> None:
        """Wait until the server has processed everything sent so far."""
        await self.send(b"PING\r\n")
        assert await self.read_line() == b"PONG"

    async def use_tls(self, context: ssl.SSLContext) -> None:
        """Run the TLS handshake. Raises trio.BrokenResourceError if the server refuses it."""
        self.stream = trio.SSLStream(
            self.stream, context, server_hostname="localhost", https_compatible=True
        )
        with trio.fail_after(PATIENCE_SECONDS):
            await self.stream.do_handshake()

    async def read_until_closed(self) -> bytes:
        """Return everything that the server sends until it closes the connection."""
        with trio.fail_after(PATIENCE_SECONDS):
            try:
                while data := await self.stream.receive_some(1 << 20):
                    self.received += data
            except trio.BrokenResourceError:
                pass
        remaining, self.received = bytes(self.received), bytearray()
        return remaining


async def open_nats_peer(server: RunningServer) -> NatsPeer:
    """Connect to the NATS listener without a handshake."""
    host, _, port = server.nats_addresses[0].rpartition(":")
    return NatsPeer(await trio.open_tcp_stream(host, int(port)))


async def connect_nats_peer(server: RunningServer, **options: Any) -> NatsPeer:
    """Connect to the NATS listener and send CONNECT."""
    peer = await open_nats_peer(server)
    await peer.handshake(**options)
    return peer
