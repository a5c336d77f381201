"""What the doors page says to type does what it says."""

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

PATIENCE_SECONDS = 60.0
PAGE = (ROOT / "protocol" / "engine.md").read_text()


@contextmanager
def shell(folder: Path) -> Iterator[tuple[subprocess.Popen[str], Queue[str]]]:
    """One to type into, in a folder of its own, and the lines that it shows. All that was begun in
    it is gone with the block."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SIMPLEBUS_")}
    process = subprocess.Popen(
        ["bash"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=folder,
        env=kept | {"PYTHONPATH": str(ROOT), "TMPDIR": str(folder)},
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


def until(lines: Queue[str], wanted: str, times: int = 1) -> None:
    """Return when this many lines began so."""
    shown: list[str] = []
    while sum(line.startswith(wanted) for line in shown) < times:
        try:
            shown.append(lines.get(timeout=PATIENCE_SECONDS))
        except Exception:
            raise AssertionError(f"no {wanted!r}, only {shown}") from None


def test_example_of_the_engine_page_runs(tmp_path: Path) -> None:
    section = PAGE.split("## Try it", 1)[1].split("\n## ", 1)[0]
    doors, clients = re.findall(r"^```sh\n(.*?)^```", section, re.MULTILINE | re.DOTALL)
    ports = dict(zip(("4333", "8888", "8889"), map(str, free_ports(3)), strict=True))
    words = f'simplebus() {{ "{sys.executable}" -m simplebus "$@"; }}\n'
    words += f'nats-server() {{ "{nats_server_program()}" "$@"; }}\n'
    with shell(tmp_path) as (process, lines):
        assert process.stdin is not None
        for text, wanted, times in ((doors, "simplebus ready", 2), (clients, "hello", 1)):
            typed = re.sub("|".join(ports), lambda found: ports[found[0]], text)
            process.stdin.write(words + typed)
            process.stdin.flush()
            until(lines, wanted, times)
