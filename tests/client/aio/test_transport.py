"""Custom endpoints and transports of the async client."""

from __future__ import annotations

import anyio
import anyio.lowlevel

from simplebus.client.aio.connect import open_bus
from simplebus.client.aio.transport import Endpoint, Transport
from simplebus.core.limits import HEADER_BYTES
from simplebus.core.protocol.frames import DELIMITER, HEADER
from tests.client.conftest import Run
from tests.client.faulty_server import FakeServer, fake_server


class InProcess:
    """In-process transport to a fake server that accepts a few bytes at a time."""

    def __init__(self, bus: FakeServer) -> None:
        self._bus = bus
        self._received = b""
        self._answers = b""
        self._answered = anyio.Event()
        self._room = 40
        self._is_over = False

    def send(self, data: memoryview) -> int:
        sent_count = min(self._room, len(data))
        self._room -= sent_count
        self._received += bytes(data[:sent_count])
        while (end := self._received.find(DELIMITER, HEADER_BYTES)) >= 0:
            frame, self._received = self._received[:end], self._received[end + len(DELIMITER) :]
            header = HEADER.unpack(frame[:HEADER_BYTES])
            self._answers += self._bus.default_reply(*header, frame[HEADER_BYTES:])
        if self._answers:
            self._answered.set()
        return sent_count

    def flush(self) -> bool:
        return True

    async def wait_sendable(self) -> None:
        await anyio.lowlevel.checkpoint()
        self._room = 40

    async def receive_into(self, space: memoryview) -> int:
        while not self._answers and not self._is_over:
            self._answered = anyio.Event()
            await self._answered.wait()
        await anyio.lowlevel.checkpoint()
        count = min(7, len(self._answers))
        space[:count] = self._answers[:count]
        self._answers = self._answers[count:]
        return count

    def send_eof(self) -> None:
        self._is_over = True
        self._answered.set()

    def close(self) -> None:
        self.send_eof()


class BreakableEndpoint:
    """Endpoint whose connections a test can break."""

    def __init__(self, bus: FakeServer) -> None:
        self._bus = bus
        self.links: list[InProcess] = []

    async def open(self) -> Transport:
        await anyio.lowlevel.checkpoint()
        link = InProcess(self._bus)
        self.links.append(link)
        return link

    def break_one(self) -> None:
        self.links[-1].send_eof()

    def __str__(self) -> str:
        return "the bus in this process"


def test_connects_over_a_custom_endpoint(run: Run) -> None:
    async def main() -> None:
        with fake_server() as false:
            endpoint = BreakableEndpoint(false)
            places: list[Endpoint] = [endpoint]
            async with open_bus(places, name="in process") as bus, bus.subscribe(1):
                await bus.publish_many([b"x" * 100] * 20, class_id=1)
                endpoint.break_one()
                await bus.publish(b"y", class_id=1)
                await bus.drain()
                assert bus.statistics().confirmed == 21
                assert bus.statistics().reconnections == 1
            assert len(endpoint.links) == 2
            assert not false.received_frames, "bytes were sent through a socket"

    run(main)
