"""Buses in this process, and lanes between them, under a clock that jumps."""

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


def place(memory: MemoryBus) -> Endpoint:
    """Where its clients find it."""
    return memory._server


def clock(memory: MemoryBus) -> Callable[[], float]:
    """The time by its clock."""
    return lambda: trio.current_time() + memory._server._clock_offset


def lane(near: MemoryBus, far: MemoryBus, name: str = "lane", **more: Any) -> Copier:
    class_ = more.pop("class_", "orders")
    start = more.pop("start", "earliest")
    places = more.pop("near_place", place(near)), more.pop("far_place", place(far))
    terms = TargetSettings(name=name, record_channel=name, class_=more.pop("to", class_), **more)
    return Copier(name, bus_to_bus(*places, terms, class_=class_, start=start))


@asynccontextmanager
async def running(*lanes: Copier) -> AsyncIterator[None]:
    async with trio.open_nursery() as nursery:
        for each in lanes:
            nursery.start_soon(each.run)
        yield
        nursery.cancel_scope.cancel()


async def up(*lanes: Copier) -> None:
    """Return when they have their ends, and the near ones keep what comes for them."""
    while not all(each.statistics().is_up for each in lanes):  # noqa: ASYNC110
        await trio.sleep(0.01)


async def hold(*buses: Bus) -> None:
    """Have these keep what comes for the durable of the test."""
    for bus in buses:
        async with bus.subscribe("orders", durable="test"):
            pass


async def read(bus: Bus, class_: int | str, count: int) -> list[Message[bytes]]:
    """The next messages that a durable of the test gets."""
    async with bus.subscribe(class_, durable="test") as messages:
        got = []
        while len(got) < count:
            got += await messages.take(count - len(got))
        return got


async def payloads(bus: Bus, class_: int | str, count: int) -> list[bytes]:
    return [message.payload for message in await read(bus, class_, count)]


def numbered(first: int, last: int) -> list[bytes]:
    return [b"%d" % n for n in range(first, last)]


class Breaking:
    """A way to a bus on which connections break, each after so many bytes in one direction."""

    def __init__(self, memory: MemoryBus, chance: random.Random, most: int) -> None:
        self._place, self._chance, self._most = place(memory), chance, most
        self.is_sound = False
        self.opened = 0

    async def open(self) -> Any:
        link = await self._place.open()
        self.opened += 1
        if self.is_sound:
            return link
        return _BreakingLink(link, self._chance.randrange(self._most), self._chance.random() < 0.5)

    def __str__(self) -> str:
        return "a bad line"


class _BreakingLink:
    def __init__(self, link: Any, left: int, breaks_sending: bool) -> None:
        self._link, self._left, self._breaks_sending = link, left, breaks_sending
        self._is_broken = False

    def send(self, data: memoryview) -> int:
        if self._breaks_sending:
            data = data[: self._left]
            self._left -= len(data)
            if not self._left:
                if data:
                    self._link.send(data)
                self._break()
        if self._is_broken:
            raise OSError("broken")
        return int(self._link.send(data))

    def flush(self) -> bool:
        return bool(self._link.flush())

    async def wait_sendable(self) -> None:
        await self._link.wait_sendable()

    async def receive_into(self, space: memoryview) -> int:
        count = int(await self._link.receive_into(space))
        if not self._breaks_sending:
            self._left -= count
            if self._left < 0:
                self._break()
        if self._is_broken:
            raise OSError("broken")
        return count

    def _break(self) -> None:
        self._is_broken = True
        self._link.close()

    def send_eof(self) -> None:
        self._link.send_eof()

    def close(self) -> None:
        self._link.close()


class Silent:
    """A way to a bus that is cut without a word: nobody is told, nothing comes through any more."""

    def __init__(self, memory: MemoryBus, *, piece_bytes: int = 1 << 30) -> None:
        """So much comes through at once."""
        self.piece_bytes = piece_bytes
        self._place = place(memory)
        self.cut_at = 0
        """It is cut at so many-th call of anybody who uses it; 0 for never."""
        self._calls = 0
        self.is_cut = False
        self._links: list[_SilentLink] = []

    async def open(self) -> Any:
        self.counted()
        while self.is_cut:  # noqa: ASYNC110 - who connects asks again and again.
            await trio.sleep(1)
        link = _SilentLink(self, await self._place.open())
        self._links.append(link)
        return link

    def counted(self) -> bool:
        """One more call. Whether nothing comes through."""
        self._calls += 1
        if self._calls == self.cut_at:
            self.cut()
        return self.is_cut

    def cut(self) -> None:
        self.is_cut = True
        for link in self._links:
            link.is_dead = True

    def mend(self) -> None:
        """From now on those who connect get through."""
        self.is_cut, self.cut_at = False, 0

    def __str__(self) -> str:
        return "a line"


class _SilentLink:
    """What was under way when the line was cut stays dead: the bus does not learn of it."""

    _BUFFER_BYTES = 64 * 1024

    def __init__(self, line: Silent, link: Any) -> None:
        self.is_dead = False
        self._line, self._link = line, link
        self._buffered = 0

    def _is_cut(self) -> bool:
        return self._line.counted() or self.is_dead

    def send(self, data: memoryview) -> int:
        if self._is_cut():
            taken = min(len(data), self._BUFFER_BYTES - self._buffered)
            self._buffered += taken
            return taken
        return int(self._link.send(data))

    def flush(self) -> bool:
        return self._is_cut() or bool(self._link.flush())

    async def wait_sendable(self) -> None:
        if self._is_cut():
            await trio.sleep_forever()
        await self._link.wait_sendable()

    async def receive_into(self, space: memoryview) -> int:
        space = space[: self._line.piece_bytes]
        count = 0 if self._is_cut() else int(await self._link.receive_into(space))
        if self._is_cut():
            await trio.sleep_forever()
        return count

    def send_eof(self) -> None:
        if not self._is_cut():
            self._link.send_eof()

    def close(self) -> None:
        if not self._is_cut():
            self._link.close()
