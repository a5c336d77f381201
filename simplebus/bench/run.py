"""One bench: a server unless there is one, the processes, the progress bar, the report.

Rule 1: the report is made of what verified subscribers said. Anything wrong raises WorkerError
instead, and no figure is printed.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import trio
from rich.progress import Progress

import simplebus
from simplebus.bench.traffic import PAYLOAD_BYTES_MIN, RUNS, payloads, quantiles
from simplebus.commands.pubsub import progress
from simplebus.console.stdin_lines import LineReader
from simplebus.console.workers import Worker, WorkerError, Workers, open_workers, error_texts

_SERVE = (
    *("serve", "--host", "127.0.0.1", "--port", "0", "--no-nats", "--no-http"),
    *("--log-level", "warning"),
)
_READY = "simplebus ready tcp="
_START_SECONDS = 30.0
_SILENCE_SECONDS = 30.0
_STOP_SECONDS = 15.0

_ROUND_TRIPS = 3_000  # Or as many as there are messages, if these are fewer.
_WARM_UP = 500


@dataclass(frozen=True, slots=True)
class Plan:
    """What to measure.

    Raises ValueError for payloads too short to be told apart.
    """

    messages: int
    size: int
    subscribers: int
    class_id: int
    """The class of the throughput phase; the next one is that of the latency phase."""

    def __post_init__(self) -> None:
        if self.size < PAYLOAD_BYTES_MIN:
            raise ValueError(
                f"--size must be at least {PAYLOAD_BYTES_MIN}, so that each message can be told "
                f"from all others; got {self.size}"
            )


@dataclass(frozen=True, slots=True)
class Result:
    """What a verified run measured."""

    seconds: float
    """From the first message's publication to the last one's arrival at the last subscriber."""
    redelivered: int
    leftovers: int
    latencies: dict[str, float]
    """Seconds from publication to arrival, one message at a time, by quantile."""


async def measure(plan: Plan, url: str | None) -> list[str]:
    """Measure and report. Raises BusError, WorkerError."""
    sentence = ""  # Raised where it is found, Python 3.11.2 would make a group of it again.
    try:
        with tempfile.TemporaryDirectory(prefix="simplebus-bench-") as folder, progress() as bar:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_until_told_to_stop)
                async with _bus(url) as at, open_workers(Path(folder)) as workers:
                    seconds, redelivered, leftovers = await _throughput(plan, at, workers, bar)
                    latencies = quantiles(await _latencies(plan, at, bar))
                nursery.cancel_scope.cancel()
    except* WorkerError as errors:
        sentence = error_texts(errors)[0]
    if sentence:
        raise WorkerError(sentence)
    return report(plan, Result(seconds, redelivered, leftovers, latencies))


async def _until_told_to_stop() -> None:
    """SIGTERM ends the bench as Ctrl-C does, with everything that it has started."""
    with trio.open_signal_receiver(signal.SIGTERM) as signals:
        async for _ in signals:
            raise KeyboardInterrupt


def report(plan: Plan, result: Result) -> list[str]:
    """The result in words."""
    rate = plan.messages / result.seconds
    receivers = "1 subscriber" if plan.subscribers == 1 else f"{plan.subscribers} subscribers"
    lines = [
        f"verified    {plan.messages:,} messages of {plan.size:,} bytes to {receivers}: each "
        "delivered in order and acknowledged, every id and byte as sent",
        f"throughput  {rate:,.0f} messages a second published, "
        f"{rate * plan.subscribers:,.0f} delivered, {rate * plan.size / 1e6:,.0f} MB/s in, "
        f"over {result.seconds:.2f} s",
        "latency     one message at a time: "
        + ", ".join(f"{name} {value * 1e6:,.0f} µs" for name, value in result.latencies.items()),
        f"machine     {os.cpu_count()} cores shared by the server, the publisher and {receivers}",
    ]
    if result.redelivered:
        lines.append(
            f"note        {result.redelivered:,} messages came again: a subscriber was slower than "
            "the ack timeout"
        )
    if result.leftovers:
        lines.append(
            f"note        {result.leftovers:,} messages lay in class {plan.class_id} from before; "
            "they were acknowledged and not counted"
        )
    return lines


# The server --------------------------------------------------------------------------------------


@asynccontextmanager
async def _bus(url: str | None) -> AsyncIterator[str]:
    """Where the bus listens; one of our own, ended with the block, when none is given."""
    if url is not None:
        yield url
        return
    process = await trio.lowlevel.open_process(
        [sys.executable, "-m", "simplebus", *_SERVE],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        yield f"simplebus://{await _address(process)}"
    finally:
        with trio.CancelScope(shield=True):
            process.terminate()
            with trio.move_on_after(_STOP_SECONDS):
                await process.wait()
            process.kill()
            await process.wait()
            assert process.stdout is not None
            await process.stdout.aclose()


async def _address(process: trio.Process) -> str:
    line = ""
    assert process.stdout is not None
    with trio.move_on_after(_START_SECONDS):
        line = await anext(LineReader(process.stdout.receive_some), "")
    if not line.startswith(_READY):
        raise WorkerError(f"the server did not say that it is ready; it said {line!r}")
    return line.removeprefix(_READY).split()[0]


# Throughput --------------------------------------------------------------------------------------


async def _throughput(
    plan: Plan, url: str, workers: Workers, bar: Progress
) -> tuple[float, int, int]:
    """Seconds, redeliveries and leftovers of a run that was verified."""
    task = bar.add_task("publishing and checking", total=plan.messages * plan.subscribers)
    run = random.randrange(RUNS)
    arguments = (url, plan.class_id, run, plan.messages, plan.size)
    watchers = [
        Watcher(
            await workers.start(f"subscriber {n + 1}", "simplebus.bench.subscriber", *arguments)
        )
        for n in range(plan.subscribers)
    ]
    for watcher in watchers:
        await watcher.until_ready()
    publisher = await workers.start("publisher", "simplebus.bench.publisher", *arguments)
    publisher.is_exit_expected = True
    async with trio.open_nursery() as nursery:
        for watcher in watchers:
            nursery.start_soon(watcher.until_done)
        while not all(watcher.is_done for watcher in watchers):
            await trio.sleep(0.1)
            bar.update(task, completed=sum(watcher.seen for watcher in watchers))
    began = float(await anext(publisher.lines))
    for watcher in watchers:
        await watcher.worker.end_input()
    bar.remove_task(task)
    return (
        max(watcher.ended for watcher in watchers) - began,
        sum(watcher.redelivered for watcher in watchers),
        # Whoever comes first takes what waits.
        sum(watcher.leftovers for watcher in watchers),
    )


class Watcher:
    """Hears what a subscriber's process says."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.seen = 0
        self.is_done = False
        self.ended = 0.0
        """When its last message was there, on the machine's clock."""
        self.redelivered = 0
        self.leftovers = 0

    async def until_ready(self) -> None:
        with trio.move_on_after(_START_SECONDS):
            if await anext(self.worker.lines, "") == "ready":
                return
        raise WorkerError(f"the {self.worker.name} did not come up")

    async def until_done(self) -> None:
        """Raises WorkerError when it found something wrong, or nothing came any more."""
        while not self.is_done:
            line = ""
            with trio.move_on_after(_SILENCE_SECONDS):
                line = await anext(self.worker.lines, "")
            match line.split(maxsplit=1):
                case ["seen", count]:
                    self.seen = int(count)
                case ["done", figures]:
                    ended, redelivered, leftovers = figures.split()
                    self.ended = float(ended)
                    self.redelivered, self.leftovers = int(redelivered), int(leftovers)
                    self.is_done = True
                case ["failed", why]:
                    raise WorkerError(f"no rate, because {self.worker.name} found a fault: {why}")
                case _:
                    raise WorkerError(
                        f"no rate, because {self.worker.name} saw nothing new for "
                        f"{_SILENCE_SECONDS:g} s after {self.seen:,} messages"
                    )


# Latency -----------------------------------------------------------------------------------------


async def _latencies(plan: Plan, url: str, bar: Progress) -> list[float]:
    """Seconds from the publication of a message to its arrival, each after the one before."""
    warm_up, count = min(_WARM_UP, plan.messages), min(_ROUND_TRIPS, plan.messages)
    task = bar.add_task("one at a time", total=warm_up + count)
    class_id = plan.class_id + 1
    run = random.randrange(RUNS)
    contents = payloads(run=run, first=0, count=warm_up + count, size=plan.size)
    latencies = []
    async with (
        simplebus.connect(url) as publisher,
        simplebus.connect(url) as subscriber,
        subscriber.subscribe(class_id) as messages,
    ):
        for number, content in enumerate(contents):
            began = time.perf_counter()
            await publisher.publish(content, class_id=class_id, confirm=False)
            with trio.move_on_after(_SILENCE_SECONDS) as patience:
                message = await anext(messages)
                while number == 0 and message.payload != content:  # Left from an earlier run.
                    message = await anext(messages)
            if patience.cancelled_caught:
                raise WorkerError(f"no latency, because message {number} never came")
            latencies.append(time.perf_counter() - began)
            if message.payload != content:
                raise WorkerError(
                    f"no latency, because {message.payload!r} came where {content!r} was sent"
                )
            if number % 100 == 0:
                bar.update(task, completed=number)
    bar.remove_task(task)
    return latencies[warm_up:]
