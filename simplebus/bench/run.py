"""Benchmark run: a server unless a URL is given, the processes, the progress bar and the report.

The report uses figures of verified subscribers only. A fault raises WorkerError, and no figure is
printed.
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
from simplebus.console.workers import Worker, WorkerError, Workers, error_texts, open_workers
from simplebus.core.broker.wait_reasons import format_count

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
class BenchPlan:
    """Parameters of a benchmark.

    Raises ValueError for payloads too short to be unique.
    """

    messages: int
    size: int
    subscribers: int
    class_id: int
    """Class of the throughput phase; the latency phase uses the next one."""

    def __post_init__(self) -> None:
        if self.size < PAYLOAD_BYTES_MIN:
            raise ValueError(
                f"--size must be at least {PAYLOAD_BYTES_MIN}, so that each message is "
                f"unique; got {self.size}"
            )


@dataclass(frozen=True, slots=True)
class BenchResult:
    """Figures of a verified run."""

    seconds: float
    """Time from the first publication to the last message's arrival at the last subscriber."""
    redelivered_count: int
    leftover_count: int
    latencies: dict[str, float]
    """Seconds from publication to arrival, one message in flight, by quantile."""


async def run_bench(plan: BenchPlan, url: str | None) -> list[str]:
    """Run the benchmark and return the report. Raises BusError, WorkerError."""
    sentence = ""  # Raised after the block: Python 3.11.2 would wrap it in a group again.
    try:
        with tempfile.TemporaryDirectory(prefix="simplebus-bench-") as folder, progress() as bar:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_raise_on_sigterm)
                async with _bus(url) as address, open_workers(Path(folder)) as workers:
                    seconds, redelivered, leftover_count = await _throughput(
                        plan, address, workers, bar
                    )
                    latencies = quantiles(await _latencies(plan, address, bar))
                nursery.cancel_scope.cancel()
    except* WorkerError as errors:
        sentence = error_texts(errors)[0]
    if sentence:
        raise WorkerError(sentence)
    return format_report(plan, BenchResult(seconds, redelivered, leftover_count, latencies))


async def _raise_on_sigterm() -> None:
    """End the benchmark on SIGTERM as on Ctrl-C, with all processes."""
    with trio.open_signal_receiver(signal.SIGTERM) as signals:
        async for _ in signals:
            raise KeyboardInterrupt


def format_report(plan: BenchPlan, result: BenchResult) -> list[str]:
    """Return the lines of the report."""
    rate = plan.messages / result.seconds
    receivers = format_count(plan.subscribers, "subscriber")
    messages, size = format_count(plan.messages, "message"), format_count(plan.size, "byte")
    cores = format_count(os.cpu_count() or 1, "core")
    lines = [
        f"verified    {messages} of {size} to {receivers}: each delivered in order and "
        "acknowledged, every id and byte as sent",
        f"throughput  {rate:,.0f} messages a second published, "
        f"{rate * plan.subscribers:,.0f} delivered, {rate * plan.size / 1e6:,.0f} MB/s in, "
        f"over {result.seconds:.2f} s",
        "latency     one message at a time: "
        + ", ".join(f"{name} {value * 1e6:,.0f} µs" for name, value in result.latencies.items()),
        f"machine     {cores} shared by the server, the publisher and {receivers}",
    ]
    if result.redelivered_count:
        redelivered = format_count(result.redelivered_count, "redelivery", "redeliveries")
        lines.append(f"note        {redelivered}: a subscriber was slower than the ack timeout")
    if result.leftover_count:
        leftover = format_count(result.leftover_count, "earlier message")
        lines.append(
            f"note        class {plan.class_id} contained {leftover}, acknowledged and not counted"
        )
    return lines


# The server --------------------------------------------------------------------------------------


@asynccontextmanager
async def _bus(url: str | None) -> AsyncIterator[str]:
    """Yield the URL of the bus; start a server for the block if none is given."""
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
        raise WorkerError(f"expected {_READY!r} from the server, got {line!r}")
    return line.removeprefix(_READY).split()[0]


# Throughput --------------------------------------------------------------------------------------


async def _throughput(
    plan: BenchPlan, url: str, workers: Workers, bar: Progress
) -> tuple[float, int, int]:
    """Return seconds, redelivered messages and leftovers of a verified run."""
    task = bar.add_task("publishing and checking", total=plan.messages * plan.subscribers)
    run = random.randrange(RUNS)
    arguments = (url, plan.class_id, run, plan.messages, plan.size)
    monitors = [
        SubscriberMonitor(
            await workers.start(f"subscriber {n + 1}", "simplebus.bench.subscriber", *arguments)
        )
        for n in range(plan.subscribers)
    ]
    for monitor in monitors:
        await monitor.wait_ready()
    publisher = await workers.start("publisher", "simplebus.bench.publisher", *arguments)
    publisher.is_exit_expected = True
    async with trio.open_nursery() as nursery:
        for monitor in monitors:
            nursery.start_soon(monitor.wait_done)
        while not all(monitor.is_done for monitor in monitors):
            await trio.sleep(0.1)
            bar.update(task, completed=sum(monitor.seen_count for monitor in monitors))
    began = float(await anext(publisher.lines))
    for monitor in monitors:
        await monitor.worker.end_input()
    bar.remove_task(task)
    return (
        max(monitor.ended for monitor in monitors) - began,
        sum(monitor.redelivered_count for monitor in monitors),
        # The first subscriber gets the messages that waited.
        sum(monitor.leftover_count for monitor in monitors),
    )


class SubscriberMonitor:
    """Progress and result of a subscriber process."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.seen_count = 0
        self.is_done = False
        self.ended = 0.0
        """Monotonic time at which the last message had arrived."""
        self.redelivered_count = 0
        self.leftover_count = 0

    async def wait_ready(self) -> None:
        with trio.move_on_after(_START_SECONDS):
            if await anext(self.worker.lines, "") == "ready":
                return
        raise WorkerError(f"the {self.worker.name} was not ready within {_START_SECONDS:g} s")

    async def wait_done(self) -> None:
        """Wait for the end. Raises WorkerError for a fault, or if messages stop arriving."""
        while not self.is_done:
            line = ""
            with trio.move_on_after(_SILENCE_SECONDS):
                line = await anext(self.worker.lines, "")
            match line.split(maxsplit=1):
                case ["seen", count]:
                    self.seen_count = int(count)
                case ["done", figures]:
                    ended, redelivered, leftover_count = figures.split()
                    self.ended = float(ended)
                    self.redelivered_count, self.leftover_count = (
                        int(redelivered),
                        int(leftover_count),
                    )
                    self.is_done = True
                case ["failed", reason]:
                    raise WorkerError(
                        f"no rate, because {self.worker.name} found a fault: {reason}"
                    )
                case _:
                    raise WorkerError(
                        f"no rate, because {self.worker.name} received nothing for "
                        f"{_SILENCE_SECONDS:g} s after {format_count(self.seen_count, 'message')}"
                    )


# Latency -----------------------------------------------------------------------------------------


async def _latencies(plan: BenchPlan, url: str, bar: Progress) -> list[float]:
    """Return seconds from publication to arrival, one message in flight."""
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
                raise WorkerError(
                    f"no latency, because message {number} did not arrive within "
                    f"{_SILENCE_SECONDS:g} s"
                )
            latencies.append(time.perf_counter() - began)
            if message.payload != content:
                raise WorkerError(
                    f"no latency, because {message.payload!r} was received, expected {content!r}"
                )
            if number % 100 == 0:
                bar.update(task, completed=number)
    bar.remove_task(task)
    return latencies[warm_up:]
