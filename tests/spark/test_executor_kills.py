"""An executor of a standalone cluster is killed while its task writes by the connector: each row is
stored once.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

import simplebus
from simplebus.core.limits import Limits
from simplebus.core.settings import Settings
from simplebus.spark.read.bus_reader import BusReader
from simplebus.testing.server import bus_server
from tests.spark.executor_program import ROWS
from tests.spark.processes import command, end_session, of_session
from tests.support.programs import ROOT, environment

pytestmark = [pytest.mark.long, pytest.mark.spark, pytest.mark.xdist_group("spark")]

CLASS_MESSAGES = 5_000
"""The class is full then, so the tasks wait in the middle of their rows."""
PATIENCE_SECONDS = 240.0


def stored_count(bus: BusReader) -> int:
    return bus.get_extent(["1"], make=True).classes["1"].head


def until(condition: Callable[[], bool], process: subprocess.Popen[bytes], log: Path) -> None:
    """Wait, as long as a busy machine may take to start several JVMs."""
    for _ in range(int(PATIENCE_SECONDS / 0.05)):
        if condition():
            return
        assert process.poll() is None, f"the driver ended: {log.read_text()[-3000:]}"
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.05)
    raise TimeoutError(f"the condition did not hold within {PATIENCE_SECONDS:g} s")


def test_killed_executor_stores_each_row_once(tmp_path: Path) -> None:
    log = tmp_path / "driver.log"
    program = [sys.executable, "-m", "tests.spark.executor_program"]
    with (
        bus_server(Settings(limits=Limits(class_messages=CLASS_MESSAGES))) as server,
        BusReader(server.address, timeout=60) as bus,
        log.open("wb") as errors,
        subprocess.Popen(
            [*program, server.address, str(tmp_path)],
            stdout=subprocess.PIPE,
            stderr=errors,
            env=environment(PYTHONPATH=str(ROOT)),
            cwd=tmp_path,
            start_new_session=True,
        ) as process,
    ):
        try:
            until(lambda: stored_count(bus) == CLASS_MESSAGES, process, log)
            executor, _ = [
                pid
                for pid in of_session(process.pid)
                if "CoarseGrainedExecutorBackend" in command(pid)
            ]
            os.kill(executor, signal.SIGKILL)
            until(lambda: not command(executor), process, log)
            found: Counter[bytes] = Counter()
            with (
                simplebus.connect_blocking(server.address) as client,
                client.subscribe(1) as messages,
            ):
                while found.total() < ROWS:
                    batch = messages.take(ROWS, timeout=PATIENCE_SECONDS)
                    assert batch, log.read_text()[-3000:]
                    found.update(message.payload for message in batch)
            assert process.stdout is not None
            assert process.stdout.read() == b"done\n"
        finally:
            end_session(process.pid)
        assert found == Counter(b"%d" % n for n in range(ROWS))
        assert stored_count(bus) == ROWS
