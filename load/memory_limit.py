"""A server whose control group reaches its memory limit: are all confirmed messages kept?

    python load/run.py memory-limit [--quick]

The server may use more memory than the group has, so the kernel kills it while a publisher fills a
class. A server without the limit then starts from the same directory, and must have every message
that was confirmed. Needs permission to create a control group, for example as root.
"""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import simplebus
from load.brokers import REPOSITORY, SERVE, START_S, disabled_listeners
from load.measure import RunOptions
from load.ports import HOST, free_port
from load.processes import LoadError, Process
from load.report import Row

ROUNDS, QUICK_ROUNDS = 5, 1
LIMIT_BYTES = 160 << 20
PAYLOAD_BYTES = 1000
BATCH = 500
KILL_TIMEOUT_S = 60.0
_GROUPS = Path("/sys/fs/cgroup")
_NAME = "simplebus-load"


def run(run_options: RunOptions) -> list[Row]:
    """Return the rows of the scenario. Raises LoadError if a confirmed message was lost."""
    rounds = QUICK_ROUNDS if run_options.quick else ROUNDS
    rows = []
    for durability in ("os", "disk"):
        counts = [_count_after_kill(durability, run_options.server_args) for _ in range(rounds)]
        confirmed, stored = map(sum, zip(*counts, strict=True))
        title = f"{durability}: confirmed before the kernel killed the server"
        rows.append(Row("memory-limit", title, [confirmed], ""))
        lost = Row("memory-limit", "of these lost", [confirmed - stored], "", 0)
        rows.append(lost)
        if stored < confirmed:
            raise LoadError(f"{confirmed - stored} of {confirmed} confirmed messages are lost")
    return rows


def _count_after_kill(durability: str, server_args: tuple[str, ...]) -> tuple[int, int]:
    """Return the number of confirmed messages, and how many of them the next server has."""
    with tempfile.TemporaryDirectory(prefix="simplebus-memory-") as directory:
        port = free_port()
        command = [
            *(*SERVE, *disabled_listeners(), "--port", str(port), "--durability", durability),
            *("--data-dir", directory, "--max-memory", "4GiB", *server_args),
        ]
        url = f"simplebus://{HOST}:{port}"
        with Process("the limited server", command, directory=REPOSITORY) as server:
            server.wait_for_line("ready", timeout_s=START_S)
            with _memory_group(server.pid):
                confirmed = _publish_until_killed(url, server)
        with Process("the server", command, directory=REPOSITORY) as server:
            server.wait_for_line("ready", timeout_s=START_S)
            with simplebus.connect_blocking(url) as bus:
                numbers = set()
                first = 0
                while messages := bus.fetch(1, first, 5000):
                    numbers |= {int(message.payload[:10]) for message in messages}
                    first = messages[-1].sequence + 1
        return confirmed, len(numbers & set(range(confirmed)))


def _publish_until_killed(url: str, server: Process) -> int:
    """Publish until the kernel kills the server. Returns the number of confirmed messages."""
    confirmed, deadline = 0, time.monotonic() + KILL_TIMEOUT_S
    with (
        contextlib.suppress(simplebus.BusError),
        simplebus.connect_blocking(url, reconnect=None) as bus,
    ):
        while time.monotonic() < deadline:
            payloads = [b"%010d" % (confirmed + n) + bytes(PAYLOAD_BYTES) for n in range(BATCH)]
            bus.publish_many(payloads, class_id=1)
            confirmed += BATCH
    while server.is_running():
        if time.monotonic() > deadline:
            raise LoadError(f"the kernel did not kill the server within {KILL_TIMEOUT_S:g} s")
        time.sleep(0.05)
    return confirmed


@contextlib.contextmanager
def _memory_group(pid: int) -> Iterator[None]:
    """Move a process to a control group with LIMIT_BYTES of memory."""
    folder, limit = _GROUPS / _NAME, "memory.max"
    if (_GROUPS / "memory").is_dir():  # Version 1 of control groups.
        folder, limit = _GROUPS / "memory" / _NAME, "memory.limit_in_bytes"
    try:
        folder.mkdir()
        (folder / limit).write_text(str(LIMIT_BYTES))
        (folder / "cgroup.procs").write_text(str(pid))
    except OSError as error:
        raise LoadError(f"cannot create a control group with a memory limit: {error}") from None
    try:
        yield
    finally:
        for _ in range(100):  # The group is in use until the kernel has removed the process.
            with contextlib.suppress(OSError):
                folder.rmdir()
                break
            time.sleep(0.05)
