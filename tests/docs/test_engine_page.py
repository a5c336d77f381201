"""Test that the example of the JetStream page works as typed."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import Queue

from load.ports import free_ports
from tests.support.programs import ROOT
from tests.support.requirements import nats_server_program

PATIENCE_SECONDS = 240.0
PAGE = (ROOT / "protocol" / "engine.md").read_text()


@contextmanager
def run_shell(folder: Path) -> Iterator[tuple[subprocess.Popen[str], Queue[str]]]:
    """Start a shell in `folder`. Yields it and the lines of its output.

    At the end of the block, every process that the shell started is killed.
    """
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("SIMPLEBUS_")
    }
    process = subprocess.Popen(
        ["bash"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=folder,
        env=environment | {"PYTHONPATH": str(ROOT), "TMPDIR": str(folder)},
        start_new_session=True,
    )
    lines = Queue[str]()

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            lines.put(line.rstrip())

    reading = threading.Thread(target=read)
    reading.start()
    try:
        yield process, lines
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        reading.join()
        process.communicate()


def wait_for_lines(lines: Queue[str], prefix: str, times: int = 1) -> None:
    """Wait for `times` lines that start with `prefix`."""
    seen: list[str] = []
    while sum(line.startswith(prefix) for line in seen) < times:
        try:
            seen.append(lines.get(timeout=PATIENCE_SECONDS))
        except Exception:
            raise AssertionError(f"no {prefix!r}, only {seen}") from None


def test_example_of_the_engine_page_runs(tmp_path: Path) -> None:
    section = PAGE.split("## Try it", 1)[1].split("\n## ", 1)[0]
    servers, clients = re.findall(r"^```sh\n(.*?)^```", section, re.MULTILINE | re.DOTALL)
    ports = dict(zip(("4333", "8888", "8889"), map(str, free_ports(3)), strict=True))
    definitions = f'simplebus() {{ "{sys.executable}" -m simplebus "$@"; }}\n'
    definitions += f'nats-server() {{ "{nats_server_program()}" "$@"; }}\n'
    with run_shell(tmp_path) as (process, lines):
        assert process.stdin is not None
        for text, prefix, times in ((servers, "simplebus ready", 2), (clients, "hello", 1)):
            commands = re.sub("|".join(ports), lambda found: ports[found[0]], text)
            process.stdin.write(definitions + commands)
            process.stdin.flush()
            wait_for_lines(lines, prefix, times)
