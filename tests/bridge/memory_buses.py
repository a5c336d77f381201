"""In-process buses and copiers between them, under an autojump clock."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import trio
from trio.testing import MockClock

from simplebus.bridge.build import bus_to_bus
from simplebus.bridge.copier import Copier
from simplebus.bridge.target.bus import TargetSettings
from simplebus.client.aio.bus import Bus
from simplebus.client.aio.transport import Endpoint
from simplebus.client.core.messages import Message
from simplebus.memory.bus import MemoryBus


def run(main: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        with trio.fail_after(3600):
            await main()

    trio.run(bounded, clock=MockClock(autojump_threshold=0))


def endpoint_of(memory: MemoryBus) -> Endpoint:
    """Return the endpoint to which clients of the bus connect."""
    return memory.place


def bus_clock(memory: MemoryBus) -> Callable[[], float]:
    """Return a function that reads the clock of the bus."""
    return lambda: trio.current_time() + memory._server._clock_offset


def create_copier(
    source: MemoryBus, target: MemoryBus, name: str = "lane", **options: Any
) -> Copier:
    class_ = options.pop("class_", "orders")
    start = options.pop("start", "earliest")
    places = (
        options.pop("source_endpoint", endpoint_of(source)),
        options.pop("target_endpoint", endpoint_of(target)),
    )
    target_settings = TargetSettings(
        name=name, record_channel=name, class_=options.pop("to", class_), **options
    )
    return Copier(name, bus_to_bus(*places, target_settings, class_=class_, start=start))


@asynccontextmanager
async def running(*copiers: Copier) -> AsyncIterator[None]:
    async with trio.open_nursery() as nursery:
        for copier in copiers:
            nursery.start_soon(copier.run)
        yield
        nursery.cancel_scope.cancel()


async def wait_until_up(*copiers: Copier) -> None:
    """Wait until the copiers have connected, so that the sources keep new messages for them."""
    while not all(copier.statistics().is_up for copier in copiers):  # noqa: ASYNC110
        await trio.sleep(0.01)


async def create_test_durable(*buses: Bus) -> None:
    """Create the durable `test` on each bus, so that the buses keep messages for it."""
    for bus in buses:
        async with bus.subscribe("orders", durable="test"):
            pass


async def read(bus: Bus, class_: int | str, count: int) -> list[Message[bytes]]:
    """Return the next messages of the durable `test`."""
    async with bus.subscribe(class_, durable="test") as messages:
        received = []
        while len(received) < count:
            received += await messages.take(count - len(received))
        return received


async def payloads(bus: Bus, class_: int | str, count: int) -> list[bytes]:
    return [message.payload for message in await read(bus, class_, count)]


def numbered_payloads(first: int, last: int) -> list[bytes]:
    return [b"%d" % n for n in range(first, last)]


class BreakingEndpoint:
    """Endpoint of a bus whose connections break, each after a random number of bytes in one
    direction.
    """

    def __init__(self, memory: MemoryBus, rng: random.Random, bytes_max: int) -> None:
        self._endpoint, self._rng, self._bytes_max = endpoint_of(memory), rng, bytes_max
        self.is_reliable = False
        self.opened = 0

    async def open(self) -> Any:
        transport = await self._endpoint.open()
        self.opened += 1
        if self.is_reliable:
            return transport
        return _BreakingTransport(
            transport, self._rng.randrange(self._bytes_max), self._rng.random() < 0.5
        )

    def __str__(self) -> str:
        return "a bad line"


class _BreakingTransport:
    def __init__(self, transport: Any, bytes_left: int, breaks_sending: bool) -> None:
        self._transport, self._bytes_left, self._breaks_sending = (
            transport,
            bytes_left,
            breaks_sending,
        )
        self._is_broken = False

    def send(self, data: memoryview) -> int:
        if self._breaks_sending:
            data = data[: self._bytes_left]
            self._bytes_left -= len(data)
            if not self._bytes_left:
                if data:
                    self._transport.send(data)
                self._break()
        if self._is_broken:
            raise OSError("broken")
        return int(self._transport.send(data))

    def flush(self) -> bool:
        return bool(self._transport.flush())

    async def wait_sendable(self) -> None:
        await self._transport.wait_sendable()

    async def receive_into(self, space: memoryview) -> int:
        count = int(await self._transport.receive_into(space))
        if not self._breaks_sending:
            self._bytes_left -= count
            if self._bytes_left < 0:
                self._break()
        if self._is_broken:
            raise OSError("broken")
        return count

    def _break(self) -> None:
        self._is_broken = True
        self._transport.close()

    def send_eof(self) -> None:
        self._transport.send_eof()

    def close(self) -> None:
        self._transport.close()


class SilentEndpoint:
    """Endpoint of a bus that can be cut: neither side is notified, and no more bytes pass."""

    def __init__(self, memory: MemoryBus, *, read_bytes_max: int = 1 << 30) -> None:
        """Create the endpoint. A read returns at most `read_bytes_max` bytes."""
        self.read_bytes_max = read_bytes_max
        self._endpoint = endpoint_of(memory)
        self.cut_at = 0
        """Number of the call at which the endpoint is cut; 0 for never."""
        self._calls = 0
        self.is_cut = False
        self._transports: list[_SilentTransport] = []

    async def open(self) -> Any:
        self.count_call()
        while self.is_cut:  # noqa: ASYNC110 - a client retries all the time.
            await trio.sleep(1)
        transport = _SilentTransport(self, await self._endpoint.open())
        self._transports.append(transport)
        return transport

    def count_call(self) -> bool:
        """Count a call. Returns True if the endpoint is cut."""
        self._calls += 1
        if self._calls == self.cut_at:
            self.cut()
        return self.is_cut

    def cut(self) -> None:
        self.is_cut = True
        for transport in self._transports:
            transport.is_dead = True

    def restore(self) -> None:
        """Let new connections through again."""
        self.is_cut, self.cut_at = False, 0

    def __str__(self) -> str:
        return "a line"


class _SilentTransport:
    """Transport that stays dead once its endpoint was cut. The bus does not notice."""

    _BUFFER_BYTES = 64 * 1024

    def __init__(self, line: SilentEndpoint, transport: Any) -> None:
        self.is_dead = False
        self._line, self._transport = line, transport
        self._buffered = 0

    def _is_cut(self) -> bool:
        return self._line.count_call() or self.is_dead

    def send(self, data: memoryview) -> int:
        if self._is_cut():
            accepted_bytes = min(len(data), self._BUFFER_BYTES - self._buffered)
            self._buffered += accepted_bytes
            return accepted_bytes
        return int(self._transport.send(data))

    def flush(self) -> bool:
        return self._is_cut() or bool(self._transport.flush())

    async def wait_sendable(self) -> None:
        if self._is_cut():
            await trio.sleep_forever()
        await self._transport.wait_sendable()

    async def receive_into(self, space: memoryview) -> int:
        space = space[: self._line.read_bytes_max]
        count = 0 if self._is_cut() else int(await self._transport.receive_into(space))
        if self._is_cut():
            await trio.sleep_forever()
        return count

    def send_eof(self) -> None:
        if not self._is_cut():
            self._transport.send_eof()

    def close(self) -> None:
        if not self._is_cut():
            self._transport.close()
