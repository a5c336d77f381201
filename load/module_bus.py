"""Rate from one gateway module to another, against Python's own queues and trio's channels.

    python load/run.py modules

Each message is created when it is published and verified when received. Both sides hold the same
number of messages. Modules with threads are compared with queue.Queue, modules with tasks with a
trio channel, in one process, in turn. There is no peer for a thread and a task.
"""

from __future__ import annotations

import queue
import threading
import time

import trio

from load.measure import RunOptions
from load.processes import LoadError
from load.report import Row
from simplebus.gateway import ModuleBus, ModuleMessage

COUNT = 500_000
QUICK_PART = 5
PLACES = 1024
TIMEOUT_S = 120
RATE_AT_LEAST = 300_000


def run(run_options: RunOptions) -> list[Row]:
    """Return the rows of the scenario."""
    count = COUNT // (QUICK_PART if run_options.quick else 1)
    threads, queues, tasks, channels, to_task, to_thread = [list[float]() for _ in range(6)]
    for _ in range(run_options.rounds):
        threads.append(_between_threads(count))
        queues.append(_through_a_queue(count))
        tasks.append(trio.run(_between_tasks, count))
        channels.append(trio.run(_through_a_channel, count))
        to_task.append(trio.run(_from_thread_to_task, count))
        to_thread.append(trio.run(_from_task_to_thread, count))

    def row(title: str, values: list[float], target: float | None = None) -> Row:
        return Row("modules", title, values, "/s", target)

    def ratio(title: str, values: list[float], baselines: list[float]) -> Row:
        return Row("modules", title, [a / b for a, b in zip(values, baselines, strict=True)], "x")

    return [
        row("from module to module, threads", threads, RATE_AT_LEAST),
        row("queue.Queue between two threads", queues),
        ratio("modules against that", threads, queues),
        row("from module to module, tasks", tasks, RATE_AT_LEAST),
        row("trio's memory channel", channels),
        ratio("modules against that", tasks, channels),
        row("from a thread to a task", to_task, RATE_AT_LEAST),
        row("from a task to a thread", to_thread, RATE_AT_LEAST),
    ]


class _SequenceCheck:
    """Check that messages arrive in order."""

    def __init__(self, count: int) -> None:
        self.contents = [b"%016d" % number for number in range(count)]
        self._next = iter(self.contents)
        self._missing_count = count
        self.completed = threading.Event()

    def check(self, content: bytes) -> bool:
        """Return True for the last message. Raises LoadError for a wrong one."""
        if content != next(self._next, None):
            raise LoadError(
                f"{content!r} is not the next message; {self._missing_count:,} are missing"
            )
        self._missing_count -= 1
        if not self._missing_count:
            self.completed.set()
        return not self._missing_count

    def rate(self, started_at: float) -> float:
        """Return messages per second. Raises LoadError if messages are missing."""
        seconds = time.perf_counter() - started_at
        if self._missing_count:
            raise LoadError(f"{self._missing_count:,} messages are missing")
        return len(self.contents) / seconds


class _ModulePair:
    """Two modules of each kind: a publisher that starts on its first message, and a receiver."""

    def __init__(self, bus: ModuleBus, count: int) -> None:
        self.bus = bus
        self.sequence = _SequenceCheck(count)

    def publish(self, message: ModuleMessage) -> None:
        """Publish all messages in a thread."""
        for content in self.sequence.contents:
            self.bus.publish(ModuleMessage(content), source=self._source)

    async def publish_async(self, message: ModuleMessage) -> None:
        """Publish all messages in a task."""
        for content in self.sequence.contents:
            await self.bus.publish_async(ModuleMessage(content), source=self._source)

    def receive(self, message: ModuleMessage) -> None:
        """Verify a message in a thread."""
        self.sequence.check(message.content)

    async def receive_async(self, message: ModuleMessage) -> None:
        """Verify a message in a task."""
        self.sequence.check(message.content)

    def begin(self, source: object, sink: object) -> float:
        """Start the publisher. Returns the time of the start."""
        self._source = source
        self.bus.add_module(source)
        self.bus.add_module(sink, hears_all=False, places=PLACES)
        self.bus.link(source, sink)
        started_at = time.perf_counter()
        self.bus.publish(ModuleMessage(b"go"))
        return started_at


def _between_threads(count: int) -> float:
    with ModuleBus() as bus:
        pair = _ModulePair(bus, count)
        started_at = pair.begin(pair.publish, pair.receive)
        pair.sequence.completed.wait(TIMEOUT_S)
        return pair.sequence.rate(started_at)


async def _between_tasks(count: int) -> float:
    async with ModuleBus() as bus:
        pair = _ModulePair(bus, count)
        return await _wait_rate(pair, pair.begin(pair.publish_async, pair.receive_async))


async def _from_thread_to_task(count: int) -> float:
    async with ModuleBus() as bus:
        pair = _ModulePair(bus, count)
        return await _wait_rate(pair, pair.begin(pair.publish, pair.receive_async))


async def _from_task_to_thread(count: int) -> float:
    async with ModuleBus() as bus:
        pair = _ModulePair(bus, count)
        return await _wait_rate(pair, pair.begin(pair.publish_async, pair.receive))


async def _wait_rate(pair: _ModulePair, started_at: float) -> float:
    with trio.move_on_after(TIMEOUT_S):
        await pair.bus.wait_quiet_async()
    return pair.sequence.rate(started_at)


def _through_a_queue(count: int) -> float:
    sequence = _SequenceCheck(count)
    messages: queue.Queue[ModuleMessage] = queue.Queue(PLACES)

    def publish() -> None:
        for content in sequence.contents:
            messages.put(ModuleMessage(content))

    def receive() -> None:
        while not sequence.check(messages.get().content):
            pass

    threads = [threading.Thread(target=each, daemon=True) for each in (publish, receive)]
    started_at = time.perf_counter()
    for thread in threads:
        thread.start()
    sequence.completed.wait(TIMEOUT_S)
    return sequence.rate(started_at)


async def _through_a_channel(count: int) -> float:
    sequence = _SequenceCheck(count)
    send, receive = trio.open_memory_channel[ModuleMessage](PLACES)
    started_at = time.perf_counter()

    async def publish() -> None:
        async with send:
            for content in sequence.contents:
                await send.send(ModuleMessage(content))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(publish)
        async for message in receive:
            sequence.check(message.content)
    return sequence.rate(started_at)
