"""Raw HTTP client for a running server."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import trio

from simplebus.server.run import RunningServer
from tests.support.running_server import PATIENCE_SECONDS, _streams


@dataclass(frozen=True)
class HttpResponse:
    """A response."""

    status: int
    headers: dict[str, str]
    """Headers by lower-case name."""
    body: bytes

    @property
    def json(self) -> Any:
        assert self.headers["content-type"] == "application/json"
        return json.loads(self.body)


class HttpPeer:
    """Raw HTTP client that sends bytes and reads responses."""

    def __init__(self, stream: trio.SocketStream) -> None:
        _streams.append(stream)
        self.stream: trio.abc.Stream = stream
        self.received = b""

    async def send(self, data: bytes) -> None:
        with trio.fail_after(PATIENCE_SECONDS):
            await self.stream.send_all(data)

    async def request(self, target: str, *headers: str, method: str = "GET") -> HttpResponse:
        lines = [f"{method} {target} HTTP/1.1", "Host: localhost", *headers, "", ""]
        await self.send("\r\n".join(lines).encode())
        return await self.read_response(without_body=method == "HEAD")

    async def post(self, target: str, body: bytes, *headers: str) -> HttpResponse:
        """Send a request with a body."""
        lines = [f"POST {target} HTTP/1.1", "Host: localhost", f"Content-Length: {len(body)}"]
        await self.send("\r\n".join([*lines, *headers, "", ""]).encode() + body)
        return await self.read_response()

    async def read_response(self, *, without_body: bool = False) -> HttpResponse:
        with trio.fail_after(PATIENCE_SECONDS):
            while b"\r\n\r\n" not in self.received:
                await self._receive_more()
            head, _, self.received = self.received.partition(b"\r\n\r\n")
            first, *lines = head.decode("latin-1").split("\r\n")
            headers = {k.lower(): v for k, v in (line.split(": ", 1) for line in lines)}
            length = 0 if without_body else int(headers["content-length"])
            while len(self.received) < length:
                await self._receive_more()
        body, self.received = self.received[:length], self.received[length:]
        return HttpResponse(int(first.split()[1]), headers, body)

    async def _receive_more(self) -> None:
        data = await self.stream.receive_some(1 << 16)
        assert data, f"the server closed the connection after {self.received[-200:]!r}"
        self.received += data

    async def wait_closed(self) -> bool:
        """Wait until the server closes the connection. Returns True; fails after a timeout."""
        with trio.fail_after(PATIENCE_SECONDS):
            try:
                while await self.stream.receive_some(1 << 16):
                    pass
            except trio.BrokenResourceError:
                pass
        return True


async def open_http_peer(server: RunningServer) -> HttpPeer:
    """Connect to the HTTP listener."""
    host, _, port = server.http_addresses[0].rpartition(":")
    return HttpPeer(await trio.open_tcp_stream(host, int(port)))
