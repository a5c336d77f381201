"""Raw NATS peers of a real server."""

from __future__ import annotations

import json
import ssl
from typing import Any

import trio

from simplebus.server.run import RunningServer
from tests.support.running_server import PATIENCE_SECONDS, _streams


class NatsPeer:
    """A raw client: sends bytes, reads lines."""

    def __init__(self, stream: trio.SocketStream) -> None:
        _streams.append(stream)
        self.socket = stream
        self.stream: trio.abc.Stream = stream
        self.received = bytearray()

    async def send(self, data: bytes) -> None:
        with trio.fail_after(PATIENCE_SECONDS):
            await self.stream.send_all(data)

    async def read_line(self) -> bytes:
        """The next line, without its end; b"" at the end of the stream. A PING is answered."""
        while (line := await self._line()) == b"PING":
            await self.send(b"PONG\r\n")
        return line

    async def _line(self) -> bytes:
        with trio.fail_after(PATIENCE_SECONDS):
            while (end := self.received.find(b"\r\n")) < 0:
                try:
                    more = await self.stream.receive_some(1 << 20)
                except trio.BrokenResourceError:
                    return b""
                if not more:
                    return b""
                self.received += more
        line = bytes(self.received[:end])
        del self.received[: end + 2]
        return line

    async def read_info(self) -> dict[str, Any]:
        """What INFO says."""
        verb, _, text = (await self.read_line()).partition(b" ")
        assert verb == b"INFO"
        found = json.loads(text)
        assert isinstance(found, dict)
        return found

    async def handshake(self, **options: Any) -> dict[str, Any]:
        """Take INFO, say CONNECT and PING, take PONG. Returns what INFO said."""
        info = await self.read_info()
        await self.send_connect(**options)
        return info

    async def send_connect(self, **options: Any) -> None:
        quiet = {"verbose": False, "pedantic": False, **options}
        await self.send(b"CONNECT " + json.dumps(quiet).encode() + b"\r\nPING\r\n")
        assert await self.read_line() == b"PONG"

    async def flush(self) -> None:
        """What was sent is dealt with."""
        await self.send(b"PING\r\n")
        assert await self.read_line() == b"PONG"

    async def use_tls(self, context: ssl.SSLContext) -> None:
        """Go over to TLS. Raises trio.BrokenResourceError when the server does not want to."""
        self.stream = trio.SSLStream(
            self.stream, context, server_hostname="localhost", https_compatible=True
        )
        with trio.fail_after(PATIENCE_SECONDS):
            await self.stream.do_handshake()

    async def read_until_closed(self) -> bytes:
        """What comes until the server hangs up, which it is given time for."""
        with trio.fail_after(PATIENCE_SECONDS):
            try:
                while more := await self.stream.receive_some(1 << 20):
                    self.received += more
            except trio.BrokenResourceError:
                pass
        rest, self.received = bytes(self.received), bytearray()
        return rest


async def open_nats_peer(server: RunningServer) -> NatsPeer:
    """A peer that is connected, and has been told nothing yet."""
    host, _, port = server.nats_addresses[0].rpartition(":")
    return NatsPeer(await trio.open_tcp_stream(host, int(port)))


async def connect_nats_peer(server: RunningServer, **options: Any) -> NatsPeer:
    """A peer that has said CONNECT."""
    peer = await open_nats_peer(server)
    await peer.handshake(**options)
    return peer
