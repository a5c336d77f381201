"""What it costs to be watched: a scrape every second, and the live page.

Rule 1: the same flow goes through the same server in every round, watched and not, one after the
other; and through one whose door is closed.
Rule 2: what a look costs is told of the server's processor time, too: differences of rates below a
few per cent are the machine's.
"""

from __future__ import annotations

import http.client
import json
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import simplebus
from load.brokers import HOST, REPOSITORY, SERVE, START_S, Broker
from load.measure import Flow, Manner, Sample, measure
from load.processes import LoadError, Process
from load.report import Row

COUNT = 3_000_000
QUICK_PART = 3
CLASSES = 50  # Of their own, each with a durable: what a scrape has to tell.
LOOKS = 100
FLOW = Flow(size_bytes=128)
SCRAPE_AT_LEAST, PAGE_AT_LEAST = 0.99, 0.98
SCRAPE_PERCENT, PAGE_PERCENT = 1.0, 2.0
METRICS, FACTS = "/metrics", "/facts?since={next}"


def run(manner: Manner) -> list[Row]:
    """The rows of the scenario."""
    count = COUNT // (QUICK_PART if manner.quick else 1)
    samples: dict[str, list[Sample]] = {name: [] for name in ("closed", "open", "scrape", "page")}
    with (
        _served("--no-http", *manner.server_args) as (closed, _),
        _served("--http-port", "0", *manner.server_args) as (opened, at),
    ):
        _fill(opened.port)
        for _ in range(manner.rounds):
            samples["closed"].append(measure(closed, "simplebus", FLOW, count=count))
            samples["open"].append(measure(opened, "simplebus", FLOW, count=count))
            with _looking(at, METRICS):
                samples["scrape"].append(measure(opened, "simplebus", FLOW, count=count))
            with _looking(at, FACTS):
                samples["page"].append(measure(opened, "simplebus", FLOW, count=count))
        scrape = [_cost(opened, at, METRICS) for _ in range(manner.rounds)]
        page = [_cost(opened, at, FACTS) for _ in range(manner.rounds)]

    def ratio(title: str, of: str, to: str, wish: float | None) -> Row:
        pairs = zip(samples[of], samples[to], strict=True)
        return Row("monitor", title, [a.rate / b.rate for a, b in pairs], "x", wish)

    def cpu(title: str, of: str, to: str) -> Row:
        pairs = zip(samples[of], samples[to], strict=True)
        values = [a.cpu_us / b.cpu_us for a, b in pairs]
        return Row("monitor", title, values, "x", less_is_better=True)

    def cost(title: str, values: list[float], wish: float) -> Row:
        return Row("monitor", title, values, "%", wish, less_is_better=True)

    return [
        ratio("the door open, against closed", "open", "closed", None),
        ratio("a scrape every second, against none", "scrape", "open", SCRAPE_AT_LEAST),
        ratio("the live page open, against none", "page", "open", PAGE_AT_LEAST),
        cpu("processor time a message, the door open against closed", "open", "closed"),
        cpu("processor time a message, scraped against not", "scrape", "open"),
        cpu("processor time a message, the page open against not", "page", "open"),
        cost("of a processor, a scrape every second", scrape, SCRAPE_PERCENT),
        cost("of a processor, the live page open", page, PAGE_PERCENT),
    ]


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
        self.looks = 0

    def look(self) -> None:
        self._connection.request("GET", self._path.format(next=self._next))
        answer = self._connection.getresponse()
        body = answer.read()
        if answer.status != 200 or not body:
            raise LoadError(f"{self._path} was answered with {answer.status}")
        if self._path != METRICS:
            rates = json.loads(body)["rates"]
            self._next = rates["first"] + len(rates["seconds"])
        self.looks += 1


@contextmanager
def _looking(at: str, path: str) -> Iterator[None]:
    """Somebody looks once a second, as long as the block lasts."""
    looker, over = _Looker(at, path), threading.Event()
    failed: list[Exception] = []

    def look() -> None:
        try:
            while True:
                looker.look()
                if over.wait(1):
                    return
        except Exception as error:
            failed.append(error)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
    if failed or not looker.looks:
        raise LoadError(f"nobody could look at {path}: {failed}")


def _cost(broker: Broker, at: str, path: str) -> float:
    """How much of a processor one look every second takes of an idle server, in per cent: what it
    takes while somebody looks, without what it takes by itself."""
    looker = _Looker(at, path)
    seconds = LOOKS / 20
    before = broker.process.cpu_s()
    time.sleep(seconds)
    idle = (broker.process.cpu_s() - before) / seconds
    before = broker.process.cpu_s()
    for _ in range(LOOKS // 10):
        looker.look()
        time.sleep(0.55)  # Longer than a look is as good as new.
    spent = broker.process.cpu_s() - before
    passed = LOOKS // 10 * 0.55
    return 100 * (spent - idle * passed) / (LOOKS // 10)
