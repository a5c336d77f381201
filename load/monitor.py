"""Cost of monitoring: a metrics scrape every second, and the live page.

    python load/run.py monitor

Targets apply to CPU time, which is counted exactly: of an idle server, the whole cost of a request;
of one at full speed, the event loop's time for answers. The effect on the rate is shown as well:
each turn splits one flow into slices of a second, without requests, with scrapes and with the page,
in changing order. Only slices of one turn are compared. The table has the median over all turns
with its 95 % confidence interval, since slices differ by 10 % at random. Every flow is verified.
"""

from __future__ import annotations

import http.client
import json
import random
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import simplebus
from load.brokers import HOST, REPOSITORY, SERVE, START_S, RunningBroker
from load.measure import Flow, RunOptions, Sample, measure
from load.processes import LoadError, Process
from load.report import Row

COUNT = 3_000_000
QUICK_PART = 3
CLASSES = 50  # Classes with a durable each, which a scrape reports.
POLLS, QUICK_POLLS = 20, 4
BUSY_POLLS = 8
FLOW = Flow(size_bytes=128)
SCRAPE_PERCENT, PAGE_PERCENT = 1.0, 2.0
METRICS, FACTS = "/metrics", "/facts?since={next}"
SPENT = re.compile(r"^simplebus_http_answers_seconds_total (\S+)$", re.MULTILINE)
SLICE_S = 1.0
POLL_INTERVAL_S = 0.55  # Between two polls: longer than the server caches a result.
TURNS, QUICK_TURNS = 12, 4  # Per round.
SPARE = 1.7  # Factor by which the flow is longer than its slices.


def run(run_options: RunOptions) -> list[Row]:
    """Return the rows of the scenario."""
    count = COUNT // (QUICK_PART if run_options.quick else 1)
    samples: dict[str, list[Sample]] = {"closed": [], "open": []}
    with (
        _server_with_http("--no-http", *run_options.server_args) as (closed, _),
        _server_with_http("--http-port", "0", *run_options.server_args) as (opened, address),
    ):
        _fill(opened.port)
        for _ in range(run_options.rounds):
            samples["closed"].append(measure(closed, "simplebus", FLOW, count=count))
            samples["open"].append(measure(opened, "simplebus", FLOW, count=count))
        rate = max(sample.rate for sample in samples["open"])
        per_round, polls = (QUICK_TURNS, QUICK_POLLS) if run_options.quick else (TURNS, POLLS)
        turns = _slices(opened, address, per_round * run_options.rounds, rate)
        scrape = [
            _poll_share_idle(opened, address, METRICS, polls) for _ in range(run_options.rounds)
        ]
        page = [_poll_share_idle(opened, address, FACTS, polls) for _ in range(run_options.rounds)]
        busy_polls = min(polls, BUSY_POLLS)
        scrape_busy = [
            _poll_share_under_load(opened, address, METRICS, busy_polls, rate)
            for _ in range(run_options.rounds)
        ]
        page_busy = [
            _poll_share_under_load(opened, address, FACTS, busy_polls, rate)
            for _ in range(run_options.rounds)
        ]

    def rows_of_slices(title: str, kind: str) -> list[Row]:
        cpu = [turn[kind].cpu_us / turn["none"].cpu_us for turn in turns]
        rate = [turn[kind].rate / turn["none"].rate for turn in turns]
        return [
            Row(
                *("monitor", f"processor time a message, {title}", cpu, "x"),
                less_is_better=True,
                note=_range_of_median(cpu),
            ),
            Row("monitor", f"rate, {title}", rate, "x", note=_range_of_median(rate)),
        ]

    def cost(title: str, values: list[float], target: float) -> Row:
        return Row("monitor", title, values, "%", target, less_is_better=True)

    pairs = list(zip(samples["open"], samples["closed"], strict=True))
    return [
        Row(
            "monitor",
            "rate, HTTP listener open, against closed",
            [a.rate / b.rate for a, b in pairs],
            "x",
        ),
        *rows_of_slices("a scrape every second, against none", METRICS),
        *rows_of_slices("the live page open, against none", FACTS),
        cost("of a processor, a scrape every second, idle", scrape, SCRAPE_PERCENT),
        cost("of a processor, the live page open, idle", page, PAGE_PERCENT),
        cost("of the loop's, a scrape every second, at full speed", scrape_busy, SCRAPE_PERCENT),
        cost("of the loop's, the live page open, at full speed", page_busy, PAGE_PERCENT),
    ]


@dataclass(frozen=True)
class FlowSlice:
    """Measurements of one slice."""

    rate: float
    cpu_us: float
    """CPU time of the server per message."""


def _slices(
    broker: RunningBroker, address: str, count: int, rate: float
) -> list[dict[str, FlowSlice]]:
    """Return turns of slices by requested path."""
    pollers = {METRICS: _HttpPoller(address, METRICS), FACTS: _HttpPoller(address, FACTS)}
    order: list[str] = ["none", *pollers]
    turns: list[dict[str, FlowSlice]] = []
    with simplebus.connect_blocking(f"simplebus://{HOST}:{broker.port}", name="load") as bus:

        def accepted() -> int:
            """Return the number of accepted messages, read over a separate connection."""
            return bus.explain(FLOW.classes[0]).head

        for _ in range(2 * count):
            random.shuffle(order)
            before = accepted()
            with _running_flow(broker, int(len(order) * SLICE_S * rate * SPARE)) as flow:
                while flow.is_running() and accepted() - before < rate / 10:
                    time.sleep(0.02)  # Until the flow has its full speed.
                turn = {kind: _slice(broker, accepted, pollers.get(kind)) for kind in order}
                is_whole = flow.is_running()
            rate = flow.rate
            if is_whole:
                turns.append(turn)
            if len(turns) == count:
                return turns
    raise LoadError(f"{2 * count - len(turns)} of {2 * count} flows were over before their slices")


class _BackgroundFlow:
    """Flow that runs in a thread."""

    rate = 0.0
    """Rate at the end."""

    def __init__(self, broker: RunningBroker, count: int) -> None:
        self.failed: Exception | None = None
        self.thread = threading.Thread(target=self._run, args=(broker, count))
        self.thread.start()

    def _run(self, broker: RunningBroker, count: int) -> None:
        try:
            self.rate = measure(broker, "simplebus", FLOW, count=count).rate
        except Exception as error:
            self.failed = error

    def is_running(self) -> bool:
        return self.thread.is_alive()


@contextmanager
def _running_flow(broker: RunningBroker, count: int) -> Iterator[_BackgroundFlow]:
    """Run a flow during the block. At its end the flow is complete and verified."""
    flow = _BackgroundFlow(broker, count)
    try:
        yield flow
    finally:
        flow.thread.join()
    if flow.failed is not None:
        raise flow.failed


def _slice(
    broker: RunningBroker, accepted: Callable[[], int], poller: _HttpPoller | None
) -> FlowSlice:
    first, began, cpu = accepted(), time.perf_counter(), _cpu_ns(broker.process.pid)
    if poller is not None:
        poller.poll()
    time.sleep(max(0.0, began + SLICE_S - time.perf_counter()))
    message_count, passed = accepted() - first, time.perf_counter() - began
    spent = _cpu_ns(broker.process.pid) - cpu
    return FlowSlice(message_count / passed, spent / max(message_count, 1) / 1000)


def _cpu_ns(pid: int) -> int:
    """Return the CPU time of a process's live threads."""
    tasks = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(task.read_text().split()[0]) for task in tasks)


def _range_of_median(values: list[float]) -> str:
    """Return the 95 % confidence interval of the median, by the binomial distribution."""
    ordered, count = sorted(values), len(values)
    offset = max(0, int((count - 1.96 * count**0.5) / 2))
    return f"median {ordered[offset]:.3f} to {ordered[-1 - offset]:.3f}"


@contextmanager
def _server_with_http(*arguments: str) -> Iterator[tuple[RunningBroker, str]]:
    """Run a server. Yield it with the address of its HTTP listener."""
    command = [*SERVE, "--host", HOST, "--port", "0", "--no-nats", *arguments]
    with Process("simplebus", command, directory=REPOSITORY) as process:
        ready = process.wait_for_line("simplebus ready", timeout_s=START_S)
        tcp = re.search(r"tcp=\S+:(\d+)", ready)
        http = re.search(r"http=(\S+)", ready)
        assert tcp is not None
        yield RunningBroker("simplebus", int(tcp[1]), process), http[1] if http else ""


def _fill(port: int) -> None:
    """Create classes with messages and durables."""
    with simplebus.connect_blocking(f"simplebus://{HOST}:{port}", name="load") as bus:
        for number in range(CLASSES):
            with bus.subscribe(f"watched-{number}", durable="load"):
                bus.publish(b"x" * 128, class_id=f"watched-{number}")
        bus.flush()


class _HttpPoller:
    """Keep-alive HTTP connection, like Prometheus and the page."""

    def __init__(self, address: str, path: str) -> None:
        self._connection = http.client.HTTPConnection(address, timeout=20)
        self._path = path
        self._next = 0

    def poll(self) -> str:
        self._connection.request("GET", self._path.format(next=self._next))
        response = self._connection.getresponse()
        body = response.read()
        if response.status != 200 or not body:
            raise LoadError(f"{self._path} was answered with the status {response.status}")
        if self._path == FACTS:
            rates = json.loads(body)["rates"]
            self._next = rates["first"] + len(rates["seconds"])
        return body.decode()


def _poll_share_idle(broker: RunningBroker, address: str, path: str, polls: int) -> float:
    """Return the percentage of a CPU that one request per second costs an idle server."""
    poller, passed = _HttpPoller(address, path), polls * POLL_INTERVAL_S
    poller.poll()  # The first request of a connection costs more.
    before = _cpu_ns(broker.process.pid)
    time.sleep(passed)
    idle = _cpu_ns(broker.process.pid) - before
    before = _cpu_ns(broker.process.pid)
    for _ in range(polls):
        began = time.perf_counter()
        poller.poll()
        time.sleep(max(0.0, began + POLL_INTERVAL_S - time.perf_counter()))
    spent = _cpu_ns(broker.process.pid) - before
    return 100e-9 * (spent - idle) / polls


def _poll_share_under_load(
    broker: RunningBroker, address: str, path: str, polls: int, rate: float
) -> float:
    """Return the percentage of the event loop's time for one request per second at full speed."""
    scrape, poller = _HttpPoller(address, METRICS), _HttpPoller(address, path)

    def spent() -> float:
        """Return the time spent on answers so far, excluding the answer to this request."""
        found = SPENT.search(scrape.poll())
        if found is None:
            raise LoadError(f"{METRICS} does not have the time spent on answers")
        return float(found[1])

    def passed(count: int, *, is_polling: bool) -> float:
        began = spent()
        for _ in range(count):
            time.sleep(POLL_INTERVAL_S)
            if is_polling:
                poller.poll()
        time.sleep(POLL_INTERVAL_S)
        return spent() - began

    for spare in (SPARE, 2 * SPARE, 4 * SPARE):  # The flow may be faster than before.
        with _running_flow(broker, int((2 * polls + 4) * POLL_INTERVAL_S * rate * spare)) as flow:
            idle = passed(polls, is_polling=False)
            busy = passed(polls, is_polling=True)
            is_whole = flow.is_running()
        if is_whole:
            return 100 * (busy - idle) / polls
    raise LoadError("the flow was over before its polls")
