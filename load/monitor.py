"""What it costs to be watched: a scrape every second, and the live page.

Rule 1: what is wanted is judged by processor time, which is counted and not compared: of an idle
server everything that a look costs, and of one at full speed what its event loop spends on answers.
Rule 2: that nothing else is slower is looked at, too. Each turn is a flow through one server at
full speed, in slices of a second: in one nobody looks, in the next Prometheus does, then the page,
in another order each time. Slices of one turn are compared with each other only, and the median
over all turns is told, with the range in which it is for 19 of 20 runs. Slices differ by a tenth
for no reason: it would take an hour of them to see one part in a hundred.
Rule 3: every flow is verified as every other one before anything is told.
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
from load.brokers import HOST, REPOSITORY, SERVE, START_S, Broker
from load.measure import Flow, Manner, Sample, measure
from load.processes import LoadError, Process
from load.report import Row

COUNT = 3_000_000
QUICK_PART = 3
CLASSES = 50  # Of their own, each with a durable: what a scrape has to tell.
LOOKS, QUICK_LOOKS = 20, 4
BUSY_LOOKS = 8
FLOW = Flow(size_bytes=128)
SCRAPE_PERCENT, PAGE_PERCENT = 1.0, 2.0
METRICS, FACTS = "/metrics", "/facts?since={next}"
SPENT = re.compile(r"^simplebus_http_answers_seconds_total (\S+)$", re.MULTILINE)
SLICE_S = 1.0
PAUSE_S = 0.55  # Between two looks: longer than one is as good as new.
TURNS, QUICK_TURNS = 12, 4  # Of a round.
SPARE = 1.7  # The flow is to last longer than its slices.


def run(manner: Manner) -> list[Row]:
    """The rows of the scenario."""
    count = COUNT // (QUICK_PART if manner.quick else 1)
    doors: dict[str, list[Sample]] = {"closed": [], "open": []}
    with (
        _served("--no-http", *manner.server_args) as (closed, _),
        _served("--http-port", "0", *manner.server_args) as (opened, at),
    ):
        _fill(opened.port)
        for _ in range(manner.rounds):
            doors["closed"].append(measure(closed, "simplebus", FLOW, count=count))
            doors["open"].append(measure(opened, "simplebus", FLOW, count=count))
        rate = max(sample.rate for sample in doors["open"])
        per_round, looks = (QUICK_TURNS, QUICK_LOOKS) if manner.quick else (TURNS, LOOKS)
        turns = _slices(opened, at, per_round * manner.rounds, rate)
        scrape = [_cost(opened, at, METRICS, looks) for _ in range(manner.rounds)]
        page = [_cost(opened, at, FACTS, looks) for _ in range(manner.rounds)]
        few = min(looks, BUSY_LOOKS)
        scrape_busy = [_spent(opened, at, METRICS, few, rate) for _ in range(manner.rounds)]
        page_busy = [_spent(opened, at, FACTS, few, rate) for _ in range(manner.rounds)]

    def watched(title: str, kind: str) -> list[Row]:
        cpu = [turn[kind].cpu_us / turn["nobody"].cpu_us for turn in turns]
        rate = [turn[kind].rate / turn["nobody"].rate for turn in turns]
        return [
            Row(
                *("monitor", f"processor time a message, {title}", cpu, "x"),
                less_is_better=True,
                note=_range_of_median(cpu),
            ),
            Row("monitor", f"rate, {title}", rate, "x", note=_range_of_median(rate)),
        ]

    def cost(title: str, values: list[float], wish: float) -> Row:
        return Row("monitor", title, values, "%", wish, less_is_better=True)

    pairs = list(zip(doors["open"], doors["closed"], strict=True))
    return [
        Row(
            "monitor",
            "rate, the door open, against closed",
            [a.rate / b.rate for a, b in pairs],
            "x",
        ),
        *watched("a scrape every second, against none", METRICS),
        *watched("the live page open, against none", FACTS),
        cost("of a processor, a scrape every second, idle", scrape, SCRAPE_PERCENT),
        cost("of a processor, the live page open, idle", page, PAGE_PERCENT),
        cost("of the loop's, a scrape every second, at full speed", scrape_busy, SCRAPE_PERCENT),
        cost("of the loop's, the live page open, at full speed", page_busy, PAGE_PERCENT),
    ]


@dataclass(frozen=True)
class Slice:
    """What happened in one."""

    rate: float
    cpu_us: float
    """Of the server, per message."""


def _slices(broker: Broker, at: str, count: int, rate: float) -> list[dict[str, Slice]]:
    """So many turns of slices, each with nobody, a scrape and the page, by what is asked for."""
    lookers = {METRICS: _Looker(at, METRICS), FACTS: _Looker(at, FACTS)}
    order: list[str] = ["nobody", *lookers]
    turns: list[dict[str, Slice]] = []
    with simplebus.connect_blocking(f"simplebus://{HOST}:{broker.port}", name="load") as bus:

        def accepted() -> int:
            """How many messages of the flow; by a door that looks do not slow."""
            return bus.explain(FLOW.classes[0]).head

        for _ in range(2 * count):
            random.shuffle(order)
            before = accepted()
            with _flowing(broker, int(len(order) * SLICE_S * rate * SPARE)) as flow:
                while flow.lasts() and accepted() - before < rate / 10:
                    time.sleep(0.02)  # Until it is at its speed.
                turn = {kind: _slice(broker, accepted, lookers.get(kind)) for kind in order}
                is_whole = flow.lasts()
            rate = flow.rate
            if is_whole:
                turns.append(turn)
            if len(turns) == count:
                return turns
    raise LoadError(f"{2 * count - len(turns)} of {2 * count} flows were over before their slices")


class _Flow:
    """A flow that is under way, in a thread."""

    rate = 0.0
    """In the end."""

    def __init__(self, broker: Broker, count: int) -> None:
        self.failed: Exception | None = None
        self.thread = threading.Thread(target=self._run, args=(broker, count))
        self.thread.start()

    def _run(self, broker: Broker, count: int) -> None:
        try:
            self.rate = measure(broker, "simplebus", FLOW, count=count).rate
        except Exception as error:
            self.failed = error

    def lasts(self) -> bool:
        return self.thread.is_alive()


@contextmanager
def _flowing(broker: Broker, count: int) -> Iterator[_Flow]:
    """A flow that has ended, and was verified, behind the block."""
    flow = _Flow(broker, count)
    try:
        yield flow
    finally:
        flow.thread.join()
    if flow.failed is not None:
        raise flow.failed


def _slice(broker: Broker, accepted: Callable[[], int], looker: _Looker | None) -> Slice:
    first, began, cpu = accepted(), time.perf_counter(), _cpu_ns(broker.process.pid)
    if looker is not None:
        looker.look()
    time.sleep(max(0.0, began + SLICE_S - time.perf_counter()))
    done, passed = accepted() - first, time.perf_counter() - began
    spent = _cpu_ns(broker.process.pid) - cpu
    return Slice(done / passed, spent / max(done, 1) / 1000)


def _cpu_ns(pid: int) -> int:
    """What a process has taken of processors, of all its threads that live."""
    tasks = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(task.read_text().split()[0]) for task in tasks)


def _range_of_median(values: list[float]) -> str:
    """Where the median of all such values is, at 95 %: by how many of so many coins fall so."""
    ordered, count = sorted(values), len(values)
    out = max(0, int((count - 1.96 * count**0.5) / 2))
    return f"median {ordered[out]:.3f} to {ordered[-1 - out]:.3f}"


@contextmanager
def _served(*arguments: str) -> Iterator[tuple[Broker, str]]:
    """A server, and where its HTTP door is."""
    command = [*SERVE, "--host", HOST, "--port", "0", "--no-nats", *arguments]
    with Process("simplebus", command, directory=REPOSITORY) as process:
        ready = process.wait_for_line("simplebus ready", timeout_s=START_S)
        tcp = re.search(r"tcp=\S+:(\d+)", ready)
        http = re.search(r"http=(\S+)", ready)
        assert tcp is not None
        yield Broker("simplebus", int(tcp[1]), process), http[1] if http else ""


def _fill(port: int) -> None:
    """Have classes with something in each."""
    with simplebus.connect_blocking(f"simplebus://{HOST}:{port}", name="load") as bus:
        for number in range(CLASSES):
            with bus.subscribe(f"watched-{number}", durable="load"):
                bus.publish(b"x" * 128, class_id=f"watched-{number}")
        bus.flush()


class _Looker:
    """Asks, on one connection, as Prometheus and the page do."""

    def __init__(self, at: str, path: str) -> None:
        self._connection = http.client.HTTPConnection(at, timeout=20)
        self._path = path
        self._next = 0

    def look(self) -> str:
        self._connection.request("GET", self._path.format(next=self._next))
        answer = self._connection.getresponse()
        body = answer.read()
        if answer.status != 200 or not body:
            raise LoadError(f"{self._path} was answered with {answer.status}")
        if self._path == FACTS:
            rates = json.loads(body)["rates"]
            self._next = rates["first"] + len(rates["seconds"])
        return body.decode()


def _cost(broker: Broker, at: str, path: str, looks: int) -> float:
    """How much of a processor one look every second takes of an idle server, in per cent: what it
    takes while somebody looks, without what it takes by itself."""
    looker, passed = _Looker(at, path), looks * PAUSE_S
    looker.look()  # The first one on a connection.
    before = _cpu_ns(broker.process.pid)
    time.sleep(passed)
    idle = _cpu_ns(broker.process.pid) - before
    before = _cpu_ns(broker.process.pid)
    for _ in range(looks):
        began = time.perf_counter()
        looker.look()
        time.sleep(max(0.0, began + PAUSE_S - time.perf_counter()))
    spent = _cpu_ns(broker.process.pid) - before
    return 100e-9 * (spent - idle) / looks


def _spent(broker: Broker, at: str, path: str, looks: int, rate: float) -> float:
    """How much of a processor the event loop spends on answering one look every second, in per
    cent, while messages flow at full speed."""
    scrape, looker = _Looker(at, METRICS), _Looker(at, path)

    def spent() -> float:
        """So far; of itself, what it was before."""
        found = SPENT.search(scrape.look())
        if found is None:
            raise LoadError(f"{METRICS} says nothing of what answers cost")
        return float(found[1])

    def passed(count: int, *, is_looking: bool) -> float:
        began = spent()
        for _ in range(count):
            time.sleep(PAUSE_S)
            if is_looking:
                looker.look()
        time.sleep(PAUSE_S)
        return spent() - began

    for spare in (SPARE, 2 * SPARE, 4 * SPARE):  # It may be faster than it was.
        with _flowing(broker, int((2 * looks + 4) * PAUSE_S * rate * spare)) as flow:
            idle = passed(looks, is_looking=False)
            busy = passed(looks, is_looking=True)
            is_whole = flow.lasts()
        if is_whole:
            return 100 * (busy - idle) / looks
    raise LoadError("the flow was over before its looks")
