"""Client programs in other languages, in the folders js/ and c/."""

from __future__ import annotations

import contextlib
import json
import subprocess
from pathlib import Path
from typing import Any

from tests.support.programs import Program, running_process
from tests.support.requirements import require_program, skip_or_fail

HERE = Path(__file__).parent


def javascript() -> list[str]:
    """Return the command of the nats.js program."""
    node = require_program("node", "nodejs")
    if not (HERE / "js" / "node_modules" / "@nats-io").exists():
        skip_or_fail("this test needs nats.js: npm ci --prefix tests/nats/clients/js")
    return [node, str(HERE / "js" / "check.js")]


def compiled(folder: Path) -> list[str]:
    """Compile the nats.c program into `folder` and return its command."""
    compiler = require_program("cc", "gcc", "clang")
    source, target = HERE / "c" / "check.c", folder / "check"
    probe = [compiler, "-E", "-include", "nats/nats.h", "-x", "c", "/dev/null"]
    if subprocess.run(probe, capture_output=True).returncode != 0:
        skip_or_fail("this test needs nats.c, which is libnats-dev of Debian")
    flags = ("-O1", "-Wall", "-Wextra", "-Werror")
    command = [compiler, *flags, "-o", str(target), str(source), "-lnats", "-lpthread"]
    completed = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert completed.returncode == 0, completed.stderr
    return [str(target)]


def running(command: list[str], *arguments: str) -> contextlib.AbstractContextManager[Program]:
    """Run a client program without input; it is killed at the end of the block."""
    return running_process([*command, *arguments], stdin=subprocess.DEVNULL)


def outcomes(command: list[str], *arguments: str) -> dict[str, Any]:
    """Run a program and return the JSON that it prints."""
    with running(command, *arguments) as program:
        return read_final_output(program)


def read_final_output(program: Program) -> dict[str, Any]:
    status, stdout, stderr = program.wait()
    assert (status, stderr) == (0, ""), stdout + stderr
    found: dict[str, Any] = json.loads(stdout)
    return found
