"""A real cluster, whose driver is killed in the middle of everything; and what is there then.

One driver, with executors in processes of their own, brings several queries each to its own point:

    hunted      Spark's file sink has written down its batch, Spark has not
    early       one task has written its file, the other one all its rows; nothing is committed
    torn        two tasks read, and publish what they have read; the network stands still
    published   our sink has published its batch, Spark has not written that down
    archived    a batch is in an archive of Parquet files, Spark has not written that down
    delta       the same, and the archive is a Delta table

Then it is killed. The queries are taken up from their checkpoints by the session of the other
tests. Rule 1: every message is counted: it is there once.
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
from client.false_bus import Proxy, proxy
from deltalake import DeltaTable
from programs import ROOT, environment
from pyarrow.dataset import dataset

import simplebus
from simplebus.core.settings import Settings
from simplebus.testing.server import BusServer, bus_server, until
from spark.driver import EXECUTORS, TORN, Place, queries
from spark.holding import hold, is_held, package
from spark.processes import (
    ancestors,
    command,
    end_session,
    go_on,
    holders,
    listening,
    of_session,
    stop,
)

pytestmark = [pytest.mark.spark, pytest.mark.xdist_group("spark")]

PATIENCE_SECONDS = 240.0
STALL_BYTES = 2_700_000
"""More than two answers of a bus, for Spark hands on the first one with the second; less than a
task reads."""
BIG = b"x" * 2000


def numbered(first: int, last: int, rest: bytes = b"") -> list[bytes]:
    return [b"%d %s" % (n, rest) for n in range(first, last)]


FIRST = {
    "job": numbered(0, 2000, BIG),
    "hunted": numbered(0, 200),
    "early": numbered(0, 200),
    "torn": numbered(0, 200),
    "kept": numbered(0, 200),
}
"""What lies there when the driver begins, by class."""
THEN = {
    "early": numbered(200, 600),
    "torn": numbered(200, 200 + TORN, BIG),
    "kept": numbered(200, 600),
}
"""What comes when everything has begun: one batch each."""
HUNTED = numbered(200, 3200)
"""What comes when all the others are held: many batches."""
QUERIES = {
    "hunted": "hunted",
    "early": "early",
    "torn": "torn",
    "published": "kept",
    "archived": "kept",
    "delta": "kept",
}
"""What each query reads."""


@dataclass
class Scene:
    """What was seen before the driver was killed, and what was there afterwards."""

    server: BusServer
    place: Place
    readers: set[int] = field(default_factory=set)
    """The JVMs whose tasks were reading at the same time."""
    jvm: int = 0
    addresses: set[str] = field(default_factory=set)
    """At which the cluster listened."""
    published: int = 0
    """What the torn query had published."""
    batches: dict[str, int] = field(default_factory=dict)
    """Which batch each query had last written down as done."""

    def publish(self, class_: str, payloads: list[bytes]) -> None:
        with simplebus.connect_blocking(self.server.address) as bus:
            bus.publish_many(payloads, class_id=class_)

    def stored(self, class_: str) -> list[bytes]:
        with simplebus.connect_blocking(self.server.address) as bus:
            return [message.payload for message in bus.fetch(class_)]


def batches(folder: Path) -> list[int]:
    """The batches that one of Spark's logs knows."""
    with contextlib.suppress(FileNotFoundError):
        return sorted(int(name) for name in os.listdir(folder) if name.isdecimal())
    return []


class Driver:
    """The driver's process, in a session of its own."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self.process, self._log = process, log
        self.session = process.pid

    def says(self, word: str) -> str:
        """Wait for its next line, which begins with this word. Returns the rest."""
        assert self.process.stdout is not None
        said, _, rest = self.process.stdout.readline().decode().partition(" ")
        assert said.strip() == word, self._ended()
        return rest

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
    """The driver, of which nothing is left behind."""
    log = place.folder / "driver.log"
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    with (
        log.open("wb") as errors,
        subprocess.Popen(
            [sys.executable, "-m", "spark.driver", place.bus, place.slow, str(place.folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            env=environment(PYTHONPATH=paths),
            cwd=place.folder,
            start_new_session=True,
        ) as process,
    ):
        try:
            yield Driver(process, log)
        finally:
            end_session(process.pid)


def stop_between(driver: Driver, jvm: int, first: Path, second: Path) -> None:
    """Have a driver stand still when one log knows a batch and the other does not yet."""
    seen = batches(first)

    def stands() -> bool:
        nonlocal seen
        if batches(first) == seen:
            return False
        stop(jvm)
        seen = batches(first)
        if seen[-1] not in batches(second):
            return True
        go_on(jvm)  # It was quicker. There will be another batch.
        return False

    driver.until(stands, pause=0.0005)


@pytest.fixture(scope="module")
def scene(spark: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    folder = tmp_path_factory.mktemp("cluster")
    # However long it takes: who hears nothing does not try another connection.
    settings = Settings(heartbeat_seconds=0)
    with bus_server(settings) as server, proxy(server.address) as way:
        place = Place(server.address.removeprefix("simplebus://"), way.address, folder)
        found = Scene(server, place)
        for class_, payloads in FIRST.items():
            found.publish(class_, payloads)
        hold(place.at("job"))
        with driving(place) as driver:
            found.jvm = int(driver.says("jvm"))
            driver.says("copied")
            driver.says("started")
            bring_to_their_places(found, driver, way)
            os.killpg(driver.session, signal.SIGKILL)
            until(lambda: not of_session(driver.session))
        way.stalls_after = None
        way.cut()
        for query in queries(spark, place, held=False).values():
            assert query.trigger(availableNow=True).start().awaitTermination(PATIENCE_SECONDS)
        yield found


def bring_to_their_places(found: Scene, driver: Driver, way: Proxy) -> None:
    place = found.place
    assert all(batches(place.checkpoint(name) / "commits") == [0] for name in QUERIES)
    way.stalls_after = STALL_BYTES
    held = [place.at(name) for name in ("early", "published", "archived", "delta")]
    for at in held:
        hold(at)
    for name, payloads in THEN.items():
        found.publish(name, payloads)
    driver.until(lambda: len(way.stalled) == 2)
    driver.until(lambda: all(map(is_held, held)))
    driver.until(lambda: len(found.stored("torn copied")) > 200)
    tasks = holders(driver.session, set(way.stalled))
    jvms = [next(p for p in ancestors(pid) if "java" in command(p)) for pid in tasks.values()]
    assert len(jvms) == 2
    found.readers = set(jvms)
    found.addresses = listening(driver.session)
    found.publish("hunted", HUNTED)
    table = Path(place.table("hunted"))
    commits = place.checkpoint("hunted") / "commits"
    stop_between(driver, found.jvm, table / "_spark_metadata", commits)
    assert batches(commits)[-1] == batches(table / "_spark_metadata")[-1] - 1
    found.published = len(found.stored("torn copied"))
    found.batches = {name: batches(place.checkpoint(name) / "commits")[-1] for name in QUERIES}


def expected(name: str) -> list[bytes]:
    """What a query has read in the end, in order."""
    class_ = QUERIES[name]
    return FIRST[class_] + THEN.get(class_, HUNTED)


def test_executors_read_at_the_same_time_from_processes_of_their_own(scene: Scene) -> None:
    assert len(scene.readers) == EXECUTORS
    assert scene.jvm not in scene.readers


def test_nothing_of_a_cluster_on_loopback_is_reached_from_elsewhere(scene: Scene) -> None:
    ipv4, ipv6 = "0100007F", "0000000000000000FFFF00000100007F"
    assert scene.addresses <= {ipv4, ipv6}


def test_a_job_whose_task_died_once_copies_every_message_once(scene: Scene) -> None:
    assert package(scene.place.at("job")).endswith(".zip/simplebus/__init__.py")  # It did die.
    assert Counter(scene.stored("job copied")) == Counter(FIRST["job"])


@pytest.mark.parametrize("name", ["published", "torn"])
def test_what_a_killed_driver_was_publishing_is_there_once(scene: Scene, name: str) -> None:
    assert Counter(scene.stored(f"{name} copied")) == Counter(expected(name))
    assert scene.batches[name] == 0
    if name == "torn":
        assert 200 < scene.published < len(expected(name))


@pytest.mark.parametrize("name", ["hunted", "early"])
def test_what_a_killed_driver_was_writing_to_files_is_there_once(
    spark: Any, scene: Scene, name: str
) -> None:
    rows = spark.read.parquet(scene.place.table(name)).select("offset", "value").collect()
    found = sorted((row.offset, bytes(row.value)) for row in rows)
    assert found == list(enumerate(expected(name)))
    if name != "hunted":
        assert scene.batches[name] == 0


@pytest.mark.parametrize("name", ["archived", "delta"])
def test_what_a_killed_driver_was_archiving_is_there_once_whoever_reads_it(
    scene: Scene, name: str
) -> None:
    table = scene.place.table(name)
    if name == "delta":
        rows = DeltaTable(table).to_pyarrow_table(columns=["offset", "value"])
    else:
        rows = dataset(table, partitioning="hive").to_table(columns=["offset", "value"])
    found = sorted(zip(*rows.to_pydict().values(), strict=True))
    assert found == list(enumerate(expected(name)))
    assert scene.batches[name] == 0
