"""How fast one module hears another, beside what Python has for the same.

Rule 1: each message is a new one, made as it is published, and is compared with what must come next
before a rate is printed. Both sides hold as many messages at most.
Rule 2: a module with a thread is compared with a queue between two threads, one with a task with a
channel between two tasks of trio; in one process, one after the other, in every round.
"""

from __future__ import annotations

import queue
import threading
import time

import trio

from load.measure import Manner
from load.processes import LoadError
from load.report import Row
from simplebus.gateway import ModuleBus, ModuleMessage

COUNT = 500_000
QUICK_PART = 5
PLACES = 1024
TIMEOUT_S = 120
RATE_AT_LEAST = 300_000


def run(manner: Manner) -> list[Row]:
    """The rows of the scenario."""
    count = COUNT // (QUICK_PART if manner.quick else 1)
    threads, queues, tasks, channels = [list[float]() for _ in range(4)]
    for _ in range(manner.rounds):
        threads.append(_between_threads(count))
        queues.append(_through_a_queue(count))
        tasks.append(trio.run(_between_tasks, count))
        channels.append(trio.run(_through_a_channel, count))

    def row(title: str, values: list[float], wish: float | None = None) -> Row:
        return Row("modules", title, values, "/s", wish)

    def ratio(title: str, of: list[float], to: list[float]) -> Row:
        return Row("modules", title, [a / b for a, b in zip(of, to, strict=True)], "x")

    return [
        row("from module to module, threads", threads, RATE_AT_LEAST),
        row("queue.Queue between two threads", queues),
        ratio("modules against that", threads, queues),
        row("from module to module, tasks", tasks, RATE_AT_LEAST),
        row("trio's memory channel", channels),
        ratio("modules against that", tasks, channels),
    ]


class _Checked:
    """What must come, and how far that is."""

    def __init__(self, count: int) -> None:
        self.contents = [b"%016d" % number for number in range(count)]
        self._next = iter(self.contents)
        self._left = count
        self.done = threading.Event()

    def came(self, content: bytes) -> bool:
        """Whether that was the last one. Raises LoadError for one that must not come now."""
        if content != next(self._next, None):
            raise LoadError(f"{content!r} is not what comes next; {self._left:,} are missing")
        self._left -= 1
        if not self._left:
            self.done.set()
        return not self._left

    def rate(self, begun: float) -> float:
        """Messages a second. Raises LoadError if not all have come."""
        took = time.perf_counter() - begun
        if self._left:
            raise LoadError(f"{self._left:,} messages did not come")
        return len(self.contents) / took


def _between_threads(count: int) -> float:
    checked = _Checked(count)

    def publish(message: ModuleMessage) -> None:
        for content in checked.contents:
            bus.publish(ModuleMessage(content), source=publish)

    def receive(message: ModuleMessage) -> None:
        checked.came(message.content)

    with ModuleBus() as bus:
        bus.add_module(publish)
        bus.add_module(receive, hears_all=False, places=PLACES)
        bus.link(publish, receive)
        begun = time.perf_counter()
        bus.publish(ModuleMessage(b"go"))
        checked.done.wait(TIMEOUT_S)
        return checked.rate(begun)


def _through_a_queue(count: int) -> float:
    checked = _Checked(count)
    between: queue.Queue[ModuleMessage] = queue.Queue(PLACES)

    def publish() -> None:
        for content in checked.contents:
            between.put(ModuleMessage(content))

    def receive() -> None:
        while not checked.came(between.get().content):
            pass

    threads = [threading.Thread(target=each, daemon=True) for each in (publish, receive)]
    begun = time.perf_counter()
    for each in threads:
        each.start()
    checked.done.wait(TIMEOUT_S)
    return checked.rate(begun)


async def _between_tasks(count: int) -> float:
    checked, done = _Checked(count), trio.Event()

    async def publish(message: ModuleMessage) -> None:
        for content in checked.contents:
            await bus.publish_async(ModuleMessage(content), source=publish)

    async def receive(message: ModuleMessage) -> None:
        if checked.came(message.content):
            done.set()

    async with ModuleBus() as bus:
        bus.add_module(publish)
        bus.add_module(receive, hears_all=False, places=PLACES)
        bus.link(publish, receive)
        begun = time.perf_counter()
        bus.publish(ModuleMessage(b"go"))
        with trio.move_on_after(TIMEOUT_S):
            await done.wait()
        return checked.rate(begun)


async def _through_a_channel(count: int) -> float:
    checked = _Checked(count)
    send, receive = trio.open_memory_channel[ModuleMessage](PLACES)
    begun = time.perf_counter()

    async def publish() -> None:
        async with send:
            for content in checked.contents:
                await send.send(ModuleMessage(content))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(publish)
        async for message in receive:
            checked.came(message.content)
    return checked.rate(begun)
