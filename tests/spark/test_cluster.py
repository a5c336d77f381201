"""Tests of a real cluster whose driver is killed while several queries run.

The driver, with one executor in a separate process, brings the first batch of each query to a
different point:

    early       one task has written its file, the other one all its rows; nothing is committed
    published   a task has failed and was retried; our sink has published the batch, Spark has not
                recorded it
    delta       the batch is in an archive that is a Delta table, Spark has not recorded it
    torn        two tasks read and publish; the network has stalled

Then the driver is killed. The session of the other tests continues the queries from their
checkpoints. Each message must arrive exactly once.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable

import simplebus
from simplebus.core.settings import Settings
from simplebus.testing.server import BusServer, bus_server, until
from tests.client.faulty_server import FaultyProxy, faulty_proxy
from tests.spark.driver_program import Place, queries
from tests.spark.paused_queries import hold, is_held, package
from tests.spark.processes import (
    ancestors,
    command,
    end_session,
    find_connected,
    listening,
    of_session,
)
from tests.support.programs import ROOT, environment

pytestmark = [pytest.mark.long, pytest.mark.spark, pytest.mark.xdist_group("spark")]

PATIENCE_SECONDS = 240.0
STALL_BYTES = 2_700_000
"""More than two answers of a bus, for Spark hands on the first one with the second; less than a
task reads."""
BIG = b"x" * 2000


def numbered(count: int, suffix: bytes = b"") -> list[bytes]:
    return [b"%d %s" % (n, suffix) for n in range(count)]


HELD = {"early": numbered(400), "kept": numbered(1200, BIG), "torn": numbered(3600, BIG)}
"""What lies there, by class."""
QUERIES = {"early": "early", "published": "kept", "delta": "kept", "torn": "torn"}
"""What each query reads."""
HOLDS = ("early", "published", "delta", "dying")
"""Where something is to happen."""


@dataclass
class Scene:
    """State observed before the driver was killed, and the bus to inspect afterwards."""

    server: BusServer
    place: Place
    readers: set[int] = field(default_factory=set)
    """JVMs with tasks that read at the same time, each task in its own process."""
    jvm: int = 0
    addresses: set[str] = field(default_factory=set)
    """Addresses on which the cluster listened."""
    copied: dict[str, list[bytes]] = field(default_factory=dict)
    """Messages published by each publishing query."""
    started: dict[str, list[int]] = field(default_factory=dict)
    """Batches that each query had logged as started."""
    finished: dict[str, list[int]] = field(default_factory=dict)
    """Batches that each query had logged as done."""

    def publish(self, class_: str, payloads: list[bytes]) -> None:
        with simplebus.connect_blocking(self.server.address) as bus:
            bus.publish_many(payloads, class_id=class_)

    def stored(self, class_: str) -> list[bytes]:
        with simplebus.connect_blocking(self.server.address) as bus:
            return [message.payload for message in bus.fetch(class_)]


def batches(folder: Path) -> list[int]:
    """Return the batches in a log of Spark."""
    with contextlib.suppress(FileNotFoundError):
        return sorted(int(name) for name in os.listdir(folder) if name.isdecimal())
    return []


class Driver:
    """Driver process in its own session."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self.process, self._log = process, log
        self.session = process.pid

    def read_line(self, word: str) -> str:
        """Wait for its next line, which begins with this word. Returns the rest."""
        assert self.process.stdout is not None
        first_word, _, remainder = self.process.stdout.readline().decode().partition(" ")
        assert first_word.strip() == word, self._ended()
        return remainder

    def until(self, condition: Callable[[], bool], pause: float = 0.02) -> None:
        """Wait, as long as a busy machine may take to start several JVMs."""
        for _ in range(int(PATIENCE_SECONDS / pause)):
            if condition():
                return
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(pause)
                raise AssertionError(self._ended())
        raise TimeoutError(f"it did not come to that within {PATIENCE_SECONDS:g} s")

    def _ended(self) -> str:
        return f"the driver ended: {self._log.read_text()[-3000:]}"


@contextlib.contextmanager
def driving(place: Place) -> Iterator[Driver]:
    """Run the driver; all its processes are killed at the end."""
    log = place.folder / "driver.log"
    with (
        log.open("wb") as errors,
        subprocess.Popen(
            [
                sys.executable,
                "-m",
                "tests.spark.driver_program",
                place.bus,
                place.slow,
                str(place.folder),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            env=environment(PYTHONPATH=str(ROOT)),
            cwd=place.folder,
            start_new_session=True,
        ) as process,
    ):
        try:
            yield Driver(process, log)
        finally:
            end_session(process.pid)


@pytest.fixture(scope="module")
def scene(spark: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    folder = tmp_path_factory.mktemp("cluster")
    # Without heartbeats, a stalled connection is not replaced however long the test takes.
    settings = Settings(heartbeat_seconds=0)
    with bus_server(settings) as server, faulty_proxy(server.address) as way:
        place = Place(server.address.removeprefix("simplebus://"), way.address, folder)
        found = Scene(server, place)
        for class_, payloads in HELD.items():
            found.publish(class_, payloads)
        way.stall_after_bytes = STALL_BYTES
        for at in HOLDS:
            hold(place.at(at))
        with driving(place) as driver:
            found.jvm = int(driver.read_line("jvm"))
            look_at(found, driver, way)
            os.killpg(driver.session, signal.SIGKILL)
            until(lambda: not of_session(driver.session))
        way.stall_after_bytes = None
        way.disconnect_all()
        for query in queries(spark, place, has_holds=False).values():
            assert query.trigger(availableNow=True).start().awaitTermination(PATIENCE_SECONDS)
        yield found


def look_at(found: Scene, driver: Driver, way: FaultyProxy) -> None:
    """Record the state once every query has reached its point."""
    place = found.place
    driver.until(lambda: all(is_held(place.at(at)) for at in HOLDS))
    driver.until(lambda: len(way.stalled_ports) == 2)
    driver.until(lambda: bool(found.stored("torn copied")))
    proxy_port = int(way.address.rpartition(":")[2])
    tasks = find_connected(driver.session, set(way.stalled_ports), proxy_port)
    jvms = [next(p for p in ancestors(pid) if "java" in command(p)) for pid in tasks]
    assert len(tasks) == 2
    found.readers = set(jvms)
    found.addresses = listening(driver.session)
    found.copied = {name: found.stored(f"{name} copied") for name in ("published", "torn")}
    found.started = {name: batches(place.checkpoint(name) / "offsets") for name in QUERIES}
    found.finished = {name: batches(place.checkpoint(name) / "commits") for name in QUERIES}


def expected(name: str) -> list[bytes]:
    """Return the messages that a query must have read in the end, in order."""
    return HELD[QUERIES[name]]


def test_tasks_read_concurrently_in_executors(scene: Scene) -> None:
    assert len(scene.readers) == 1
    assert scene.jvm not in scene.readers


def test_loopback_cluster_listens_on_loopback_only(scene: Scene) -> None:
    ipv4, ipv6 = "0100007F", "0000000000000000FFFF00000100007F"
    assert scene.addresses <= {ipv4, ipv6}


def test_queries_are_killed_in_their_first_batch(scene: Scene) -> None:
    assert scene.started == {name: [0] for name in QUERIES}
    assert scene.finished == {name: [] for name in QUERIES}


def test_failed_task_copies_every_message_once(scene: Scene) -> None:
    assert package(scene.place.at("dying")).endswith(".zip/simplebus/__init__.pyc")
    assert Counter(scene.copied["published"]) == Counter(expected("published"))


@pytest.mark.parametrize("name", ["published", "torn"])
def test_killed_driver_publishes_each_message_once(scene: Scene, name: str) -> None:
    assert Counter(scene.stored(f"{name} copied")) == Counter(expected(name))
    if name == "torn":
        assert 0 < len(scene.copied[name]) < len(expected(name))


def test_killed_driver_writes_each_message_once(spark: Any, scene: Scene) -> None:
    rows = spark.read.parquet(scene.place.table("early")).select("offset", "value").collect()
    found = sorted((row.offset, bytes(row.value)) for row in rows)
    assert found == list(enumerate(expected("early")))


def test_killed_driver_archives_each_message_once(scene: Scene) -> None:
    rows = DeltaTable(scene.place.table("delta")).to_pyarrow_table(columns=["offset", "value"])
    found = sorted(zip(*rows.to_pydict().values(), strict=True))
    assert found == list(enumerate(expected("delta")))
