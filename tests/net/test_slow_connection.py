"""Request timeouts on a slow connection."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest
import trio

from load.ports import HOST
from simplebus.core.errors import BusConnectionError
from simplebus.net.nats_connection import REQUEST_SECONDS_MAX
from tests.jetstream.nats_servers import NatsServer
from tests.net.test_nats_connection import linked

_PIECE_BYTES = 4096


class Line:
    """Proxy to a server that forwards a limited number of bytes per second, or none."""

    def __init__(self, port: int) -> None:
        self._port = port
        self.rate = 0.0
        """Bytes per second; 0 for no limit."""
        self.is_cut = False
        self.url = ""

    async def run(self, *, task_status: trio.TaskStatus[None]) -> None:
        listeners = await trio.open_tcp_listeners(0, host=HOST)
        self.url = f"nats://{HOST}:{listeners[0].socket.getsockname()[1]}"
        task_status.started()
        await trio.serve_listeners(self._carry, listeners)

    async def _carry(self, stream: trio.SocketStream) -> None:
        async with (
            await trio.open_tcp_stream(HOST, self._port) as server,
            trio.open_nursery() as nursery,
        ):
            nursery.start_soon(self._pass_on, server, stream, nursery)
            await self._pass_on(stream, server, nursery, is_slow=True)

    async def _pass_on(
        self,
        source: trio.SocketStream,
        to: trio.SocketStream,
        nursery: trio.Nursery,
        *,
        is_slow: bool = False,
    ) -> None:
        with suppress(OSError, trio.BrokenResourceError):
            while data := await source.receive_some(_PIECE_BYTES):
                if self.is_cut:
                    await trio.sleep_forever()
                if is_slow and self.rate:
                    await trio.sleep(len(data) / self.rate)
                await to.send_all(data)
        nursery.cancel_scope.cancel()


@asynccontextmanager
async def slow(server: NatsServer) -> AsyncIterator[Line]:
    line = Line(server.port)
    async with trio.open_nursery() as nursery:
        await nursery.start(line.run)
        yield line
        nursery.cancel_scope.cancel()


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("simplebus.net.nats_connection._TICK_SECONDS", 0.05)


async def test_request_behind_much_output_waits_longer(
    jetstream_server: NatsServer,
) -> None:
    async with slow(jetstream_server) as line, linked(line.url) as (link, _):
        link.core.subscribe("said")  # So that the connection is never silent.
        line.rate = 250_000.0
        started_at = trio.current_time()
        for _ in range(100):
            link.core.publish("said", b"x" * 10_000)
        assert (await link.api_request("INFO", seconds=3.0))["streams"] >= 0
        assert trio.current_time() - started_at > 3.0  # Independent of the speed of the machine.


async def test_request_to_a_silent_server_times_out(
    jetstream_server: NatsServer,
) -> None:
    async with slow(jetstream_server) as line, linked(line.url) as (link, _):
        line.is_cut = True
        started_at = trio.current_time()
        with pytest.raises(BusConnectionError, match=r"within 0\.5 s"):
            await link.api_request("INFO", seconds=0.5)
        assert trio.current_time() - started_at < REQUEST_SECONDS_MAX / 2


async def test_received_request_without_reply_times_out(
    jetstream_server: NatsServer,
) -> None:
    async with slow(jetstream_server) as line, linked(line.url) as (link, _):
        link.core.subscribe("nobody.answers")
        with pytest.raises(BusConnectionError, match="no reply to"):
            await link.request("nobody.answers", seconds=0.5)
