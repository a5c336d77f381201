"""Rate of MemoryBus: one process, one event loop, one publisher, one consumer.

    python -m load.memory_bus [--messages 400000] [--bytes 128] [--runs 7]

Every message is verified before a rate is printed. Rates use wall time and CPU time of the process;
CPU time is steadier on a busy machine but ignores waiting.
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

PublishMethod = Callable[[Bus, list[bytes]], Awaitable[None]]


@dataclass(frozen=True)
class RunTimes:
    """Times of one run."""

    wall_seconds: float
    processor_seconds: float


async def publish_nowait(bus: Bus, payloads: list[bytes]) -> None:
    """Publish by one call per message that never waits, and yield if the bus is behind."""
    for payload in payloads:
        while True:
            try:
                bus.publish_nowait(payload, class_id=CLASS)
                break
            except BusFullError:
                await anyio.lowlevel.checkpoint()


async def publish_unconfirmed(bus: Bus, payloads: list[bytes]) -> None:
    """Await once per message."""
    for payload in payloads:
        await bus.publish(payload, class_id=CLASS, confirm=False)


async def publish_many(bus: Bus, payloads: list[bytes]) -> None:
    """Publish a thousand messages per call."""
    for at in range(0, len(payloads), 1000):
        await bus.publish_many(payloads[at : at + 1000], class_id=CLASS, confirm=False)


async def publish_confirmed(bus: Bus, payloads: list[bytes]) -> None:
    """Await the confirm of each message."""
    for payload in payloads:
        await bus.publish(payload, class_id=CLASS)


WAYS: dict[str, PublishMethod] = {
    "publish_nowait": publish_nowait,
    "publish(confirm=False)": publish_unconfirmed,
    "publish_many, batches()": publish_many,
    "publish": publish_confirmed,
}


async def consume(bus: Bus, payloads: list[bytes], method: PublishMethod) -> RunTimes:
    """Publish by this method, and verify every received message."""
    async with bus.subscribe(CLASS) as messages, anyio.create_task_group() as tasks:
        wall, processor = time.perf_counter(), time.process_time()
        tasks.start_soon(method, bus, payloads)
        received_count = 0
        if method is publish_many:
            async for batch in messages.batches():
                if batch.payloads != payloads[received_count : received_count + len(batch)]:
                    raise AssertionError(
                        f"message {received_count} or a later one differs from the published one"
                    )
                received_count += len(batch)
                if received_count == len(payloads):
                    break
        else:
            expected = iter(payloads)
            async for message in messages:
                if message.payload != next(expected):
                    raise AssertionError(f"message {received_count} differs from the published one")
                received_count += 1
                if received_count == len(payloads):
                    break
        return RunTimes(time.perf_counter() - wall, time.process_time() - processor)


async def measure(payloads: list[bytes], method: PublishMethod, runs: int) -> list[RunTimes]:
    """Run `runs` times, each on a new bus, after a warm-up run."""
    timed = []
    for _ in range(runs + 1):
        async with MemoryBus() as bus:
            timed.append(await consume(bus, payloads, method))
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
        for name, method in WAYS.items():
            payloads = block[: len(block) // 20] if method is publish_confirmed else block
            timed = anyio.run(measure, payloads, method, options.runs, backend=backend)
            wall = sorted(len(payloads) / run.wall_seconds for run in timed)
            processor = statistics.median(len(payloads) / run.processor_seconds for run in timed)
            print(
                f"{backend:8} {name:24} {statistics.median(wall):>10,.0f} msg/s "
                f"({wall[0]:,.0f} to {wall[-1]:,.0f}); {processor:>10,.0f} per second of processor"
            )


if __name__ == "__main__":
    main()
