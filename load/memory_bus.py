"""How fast the bus without a server is: one process, one event loop, one publisher, one consumer.

    python -m load.memory_bus [--messages 400000] [--bytes 128] [--runs 7]

Rule 1: every message is compared with what must come next before a rate is printed.
Rule 2: per run both clocks are read: the wall's, and the processor's of this process alone. Where
other programs run, the second one is steadier; it counts no waiting.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import anyio
import anyio.lowlevel

from simplebus.client.aio.bus import Bus
from simplebus.client.message_builder import BusFullError
from simplebus.memory.bus import MemoryBus

CLASS = 1

Way = Callable[[Bus, list[bytes]], Awaitable[None]]


@dataclass(frozen=True)
class Timed:
    """One run."""

    wall_seconds: float
    processor_seconds: float


async def publish_nowait(bus: Bus, payloads: list[bytes]) -> None:
    """One call per message that never waits; when the bus is behind, others get their turn."""
    for payload in payloads:
        while True:
            try:
                bus.publish_nowait(payload, class_id=CLASS)
                break
            except BusFullError:
                await anyio.lowlevel.checkpoint()


async def publish_unconfirmed(bus: Bus, payloads: list[bytes]) -> None:
    """One await per message."""
    for payload in payloads:
        await bus.publish(payload, class_id=CLASS, confirm=False)


async def publish_many(bus: Bus, payloads: list[bytes]) -> None:
    """A thousand messages per call."""
    for at in range(0, len(payloads), 1000):
        await bus.publish_many(payloads[at : at + 1000], class_id=CLASS, confirm=False)


async def publish_confirmed(bus: Bus, payloads: list[bytes]) -> None:
    """One await per message, which takes until the bus has it."""
    for payload in payloads:
        await bus.publish(payload, class_id=CLASS)


WAYS: dict[str, Way] = {
    "publish_nowait": publish_nowait,
    "publish(confirm=False)": publish_unconfirmed,
    "publish_many, batches()": publish_many,
    "publish": publish_confirmed,
}


async def consume(bus: Bus, payloads: list[bytes], way: Way) -> Timed:
    """Have them published in this way, and take them all, compared with what they must be."""
    async with bus.subscribe(CLASS) as messages, anyio.create_task_group() as tasks:
        wall, processor = time.perf_counter(), time.process_time()
        tasks.start_soon(way, bus, payloads)
        got = 0
        if way is publish_many:
            async for batch in messages.batches():
                if batch.payloads != payloads[got : got + len(batch)]:
                    raise AssertionError(f"message {got} or one behind it is not what was sent")
                got += len(batch)
                if got == len(payloads):
                    break
        else:
            expected = iter(payloads)
            async for message in messages:
                if message.payload != next(expected):
                    raise AssertionError(f"message {got} is not what was sent")
                got += 1
                if got == len(payloads):
                    break
        return Timed(time.perf_counter() - wall, time.process_time() - processor)


async def measure(payloads: list[bytes], way: Way, runs: int) -> list[Timed]:
    """So many runs on a fresh bus each; a first one, which is not counted, warms up."""
    timed = []
    for _ in range(runs + 1):
        async with MemoryBus() as bus:
            timed.append(await consume(bus, payloads, way))
    return timed[1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--messages", type=int, default=400_000)
    parser.add_argument("--bytes", type=int, default=128)
    parser.add_argument("--runs", type=int, default=7)
    options = parser.parse_args()
    block = [b"%0*d" % (options.bytes, number) for number in range(options.messages)]
    print(f"{options.messages:,} messages of {options.bytes} bytes, {options.runs} runs each")
    for backend in "trio", "asyncio":
        for name, way in WAYS.items():
            payloads = block[: len(block) // 20] if way is publish_confirmed else block
            timed = anyio.run(measure, payloads, way, options.runs, backend=backend)
            wall = sorted(len(payloads) / run.wall_seconds for run in timed)
            processor = statistics.median(len(payloads) / run.processor_seconds for run in timed)
            print(
                f"{backend:8} {name:24} {statistics.median(wall):>10,.0f} msg/s "
                f"({wall[0]:,.0f} to {wall[-1]:,.0f}); {processor:>10,.0f} per second of processor"
            )


if __name__ == "__main__":
    main()
