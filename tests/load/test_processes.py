"""Processes of a measurement end with its program and not earlier."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from load.processes import LoadError, Process

ROOT = Path(__file__).resolve().parents[2]


PATIENCE_SECONDS = 60.0


def test_process_outlives_starting_thread(tmp_path: Path) -> None:
    processes: list[Process] = []
    marker_file = tmp_path / "asked"
    command = ["sh", "-c", f"until [ -e {marker_file} ]; do sleep 0.05; done; echo alive"]
    asking = threading.Thread(target=lambda: processes.append(Process("waiter", command)))
    asking.start()
    asking.join()
    task = Path(f"/proc/self/task/{asking.native_id}")
    end = time.monotonic() + PATIENCE_SECONDS
    while task.exists():  # The kernel removes the thread a little later.
        assert time.monotonic() < end
        time.sleep(0.01)
    with processes[0] as process:
        marker_file.touch()
        process.wait_for_line("alive", timeout_s=PATIENCE_SECONDS)


def test_cpu_time_is_that_of_the_child() -> None:
    counting = "i=0; while [ $i -lt 9999 ]; do i=$((i+1)); done; echo done; exec sleep 600"
    with Process("counter", ["sh", "-c", counting]) as child:
        child.wait_for_line("done", timeout_s=PATIENCE_SECONDS)
        assert child.cpu_s() > 0
    with pytest.raises(LoadError, match="has ended"):
        child.cpu_s()
