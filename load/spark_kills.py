"""Kills the processes of Spark queries and the bus in turn, and checks that no message is lost or
stored twice.

    python load/run.py spark-kills [--quick]

A driver archives a class and copies it to another one, both with the connector, while a publisher
continues. Rows of the archive pass through a Python worker. TLS and passwords are on. Each round
kills by SIGKILL: the Python process of the driver, the JVM, a Python worker and the bus. An ended
driver or bus is restarted. At the end, archive and copy must have each message once.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from random import Random
from typing import Any

import simplebus
from load.brokers import REPOSITORY, SERVE, disabled_listeners
from load.certificates import make_certificate
from load.measure import RunOptions
from load.ports import HOST, free_port
from load.processes import LoadError, Process
from load.report import Row

ROUNDS, QUICK_ROUNDS = 20, 1
TARGETS = ("driver", "jvm", "worker", "bus")
CLASS, COPIES = "numbers", "copies"
CHECKPOINTS = ("archive/_checkpoint", "copy")
BATCH = 50
PAUSE_S = 0.1
KEPT_MESSAGES = 5_000_000
PASSWORD = "password of the load test"
PATIENCE_S = 600.0
DELAY_MAX_S = 2.0
"""Longest time between progress and the next kill."""


# The driver -------------------------------------------------------------------------------------


def drive(servers: str, folder: str) -> None:
    """Run the two queries until one ends. It is the main function of the driver process."""
    from simplebus.spark.jobs.archive import archive, messages
    from simplebus.spark.jobs.session import session

    def copy_batches(batches: Iterable[Any]) -> Iterable[Any]:
        return batches

    place = Path(folder)
    # A task may fail: its Python worker is killed.
    spark = session("kills", master="local[2,4]", settings={"spark.driver.memory": "1g"})
    rows = messages(spark, servers=servers, subscribe=CLASS, timeout=120)
    archive(rows.mapInArrow(copy_batches, rows.schema), str(place / "archive"), every=1)
    copied = rows.selectExpr("value", f"'{COPIES}' class").writeStream.format("simplebus")
    copied = copied.options(servers=servers, timeout=120, checkpointLocation=str(place / "copy"))
    copied.trigger(processingTime="1 second").start()
    spark.streams.awaitAnyTermination()


class Driver:
    """Driver process, its JVM and its Python workers: one session of processes."""

    def __init__(self, servers: str, folder: Path, environment: dict[str, str]) -> None:
        self._log = (folder / "driver.log").open("ab")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "load.spark_kills", servers, str(folder)],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            env=os.environ | environment,
            cwd=REPOSITORY,
            start_new_session=True,
        )

    def is_running(self) -> bool:
        return self._process.poll() is None

    def find(self, target: str) -> int | None:
        """Return the process to kill; None if it has not started."""
        if target == "driver":
            return self._process.pid
        word = {"jvm": "org.apache.spark.deploy.SparkSubmit", "worker": "pyspark"}[target]
        found = [
            pid
            for pid, command in self._commands()
            if word in command and ("java" in command) == (target == "jvm")
        ]
        found = [pid for pid in found if pid != self._process.pid]
        return found[-1] if found else None  # The daemon of the workers is the first one.

    def _commands(self) -> list[tuple[int, str]]:
        found = []
        for entry in sorted(Path("/proc").iterdir()):
            if entry.name.isdecimal():
                with contextlib.suppress(OSError, ValueError):
                    if os.getsid(int(entry.name)) == self._process.pid:
                        words = (entry / "cmdline").read_bytes().replace(b"\0", b" ")
                        found.append((int(entry.name), words.decode(errors="replace")))
        return sorted(found)

    def stop(self) -> None:
        """Kill all processes of the session."""
        for pid, _ in self._commands():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.wait()
        _wait_until(lambda: not any(command for _, command in self._commands()), "the driver ended")
        self._log.close()


# The run ----------------------------------------------------------------------------------------


def run(run_options: RunOptions) -> list[Row]:
    """Return the rows of the scenario. Raises LoadError if a message was lost or stored twice."""
    seed = run_options.seed or Random().getrandbits(32)
    rounds = QUICK_ROUNDS if run_options.quick else ROUNDS
    with (
        tempfile.TemporaryDirectory(prefix="simplebus-spark-kills-") as folder,
        _KillRun(Path(folder), Random(seed)) as kill_run,
    ):
        kill_run.run(rounds)
        published, seconds = kill_run.finish()
        problems = kill_run.check(published)
    if problems:
        raise LoadError(f"(--seed {seed}): {problems}")
    return [
        Row("spark-kills", "kills of each process", [rounds], "", note=f"seed {seed}"),
        Row("spark-kills", "messages archived and copied once", [published], "", 1),
        *(
            Row("spark-kills", f"{target}: time until the next batch", seconds[target], "s")
            for target in TARGETS
        ),
    ]


class _KillRun:
    """The bus, its publisher and the driver."""

    def __init__(self, folder: Path, random: Random) -> None:
        self._folder, self._random = folder, random
        self._stack = contextlib.ExitStack()
        self._port = free_port()
        self._server = f"simplebuss://{HOST}:{self._port}"
        self._published = 0
        self._is_publishing = True
        self._error: BaseException | None = None
        self._seconds: dict[str, list[float]] = {target: [] for target in TARGETS}

    def __enter__(self) -> _KillRun:
        certificate = make_certificate(self._folder)
        users = self._folder / "users.toml"
        subprocess.run(
            [*SERVE[:-1], "user", "add", "ada", "--users", str(users)],
            input=PASSWORD.encode(),
            check=True,
            capture_output=True,
            cwd=REPOSITORY,
        )
        self._environment = {
            "SIMPLEBUS_USER": "ada",
            "SIMPLEBUS_PASSWORD": PASSWORD,
            "SIMPLEBUS_TLS_CA": str(certificate.cert),
        }
        self._access = simplebus.Access(user="ada", password=PASSWORD, ca=str(certificate.cert))
        self._command = [
            *(*SERVE, "--port", str(self._port), *disabled_listeners(), "--users", users),
            *("--data-dir", self._folder / "data", "--keep-messages", KEPT_MESSAGES),
            *("--tls-cert", certificate.cert, "--tls-key", certificate.key),
        ]
        self._bus = self._start_bus()
        self._thread = threading.Thread(target=self._publish)
        self._thread.start()
        self._driver = self._start_driver()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_publishing = False
        self._driver.stop()
        self._thread.join()
        self._bus.stop()

    def _start_bus(self) -> Process:
        command = [word if isinstance(word, Path) else str(word) for word in self._command]
        bus = Process("simplebus", command, directory=REPOSITORY)
        bus.wait_for_line("simplebus ready", timeout_s=PATIENCE_S)
        return bus

    def _start_driver(self) -> Driver:
        return Driver(self._server, self._folder, self._environment)

    def _connect(self) -> Any:
        return simplebus.connect_blocking(
            self._server, name="numbers", access=self._access, timeout=60, reconnect=PATIENCE_S
        )

    def _publish(self) -> None:
        try:
            with self._connect() as bus:
                while self._is_publishing:
                    first = self._published
                    bus.publish_many([b"%d" % (first + n) for n in range(BATCH)], class_id=CLASS)
                    self._published += BATCH
                    time.sleep(PAUSE_S)
        except BaseException as error:
            self._error = error

    def run(self, rounds: int) -> None:
        """Kill each process `rounds` times."""
        for _ in range(rounds):
            for target in TARGETS:
                self._wait_for_batch()
                time.sleep(self._random.random() * DELAY_MAX_S)
                self._kill(target)
                began = time.monotonic()
                self._wait_for_batch()
                self._seconds[target].append(time.monotonic() - began)

    def _kill(self, target: str) -> None:
        if target == "bus":
            self._bus.kill()
            self._bus.stop()
            self._bus = self._start_bus()
            return
        _wait_until(lambda: self._driver.find(target) is not None, f"there was a {target}")
        found = self._driver.find(target)
        assert found is not None
        os.kill(found, signal.SIGKILL)

    def _wait_for_batch(self) -> None:
        """Wait for a batch in each query, and restart an ended driver."""
        counts = self._batch_counts()
        _wait_until(
            lambda: all(a > b for a, b in zip(self._batch_counts(), counts, strict=True)),
            "a batch was finished",
            self._check_and_restart_driver,
            self._driver_log,
        )

    def _driver_log(self) -> str:
        return (self._folder / "driver.log").read_text(errors="replace")[-2000:]

    def _check_and_restart_driver(self) -> None:
        if self._error is not None:
            raise LoadError(f"the publisher ended: {self._error!r}")
        if not self._driver.is_running():
            self._driver.stop()
            self._driver = self._start_driver()

    def _batch_counts(self) -> list[int]:
        """Return the number of the last finished batch of each query."""
        found = []
        for name in CHECKPOINTS:
            folder = self._folder / name / "commits"
            names = os.listdir(folder) if folder.is_dir() else []
            found.append(max((int(name) for name in names if name.isdecimal()), default=-1))
        return found

    def finish(self) -> tuple[int, dict[str, list[float]]]:
        """Stop the publisher, and wait until everything is archived and copied."""
        self._is_publishing = False
        self._thread.join()
        if self._error is not None:
            raise LoadError(f"the publisher ended: {self._error!r}")
        _wait_until(
            lambda: all(position >= self._published for position in self._positions()),
            "all messages were in finished batches",
            self._check_and_restart_driver,
            self._driver_log,
        )
        return self._published, self._seconds

    def _positions(self) -> list[int]:
        """Return the end of the last finished batch of each query."""
        found = []
        for name, batch in zip(CHECKPOINTS, self._batch_counts(), strict=True):
            file = self._folder / name / "offsets" / str(batch)
            lines = file.read_text().splitlines() if batch >= 0 else ["{}"]
            classes = json.loads(lines[-1]).get(self._server, {})
            found.append(classes.get(CLASS, 0))
        return found

    def check(self, published: int) -> str:
        """Return a description of missing and duplicate messages; empty if all are stored once."""
        import pyarrow.dataset as ds

        files = list((self._folder / "archive").glob("class=*/date=*/*.parquet"))
        table = ds.dataset([str(file) for file in files]).to_table(columns=["value"])
        archived = Counter(int(value) for value in table["value"].to_pylist())
        copied: Counter[int] = Counter()
        with self._connect() as bus, bus.subscribe(COPIES, start="earliest") as rows:
            while copied.total() < published:
                batch = rows.take(10_000, timeout=30.0)
                if not batch:
                    break
                copied.update(int(message.payload) for message in batch)
            extra = rows.take(1, timeout=1.0)
            copied.update(int(message.payload) for message in extra)
        expected = Counter(range(published))
        found = {"archive": archived, "copy": copied}
        return "; ".join(
            f"{name}: lost {_describe(expected - numbers)}, stored twice "
            f"{_describe(numbers - expected)}"
            for name, numbers in found.items()
            if numbers != expected
        )


def _describe(numbers: Counter[int]) -> str:
    """Return the count of messages, and the first ones."""
    return f"{numbers.total()} messages {sorted(numbers)[:5]}"


def _wait_until(
    condition: Callable[[], bool],
    expected: str,
    meanwhile: Callable[[], None] = lambda: None,
    read_log: Callable[[], str] = str,
) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        meanwhile()
        if time.monotonic() > deadline:
            raise LoadError(f"not within {PATIENCE_S:g} s: {expected}; {read_log()}")
        time.sleep(0.05)


if __name__ == "__main__":
    drive(*sys.argv[1:])
