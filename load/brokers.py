"""Start and stop of simplebus and its peers, each on a free loopback port.

Brokers have their default configuration; the report has their versions. A peer that is not
installed is skipped with a note.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache, partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from load.generators import disk
from load.ports import HOST, free_port
from load.processes import LoadError, Process

START_S = 30.0
REPOSITORY = Path(__file__).resolve().parent.parent
SERVE = (sys.executable, "-m", "simplebus", "serve")
OTHER_LISTENERS = ("--no-http", "--no-nats")
"""Flags that close the listeners that are not measured."""


@dataclass(frozen=True)
class RunningBroker:
    """Running broker."""

    kind: str
    port: int
    process: Process


def find_program(name: str) -> Path | None:
    """Return a program on PATH or beside this interpreter, where pip installs `nats-server`."""
    in_venv = Path(sys.executable).parent / name
    found = shutil.which(name)
    return Path(found) if found else in_venv if in_venv.exists() else None


def is_available(kind: str) -> bool:
    return kind in SIMPLEBUS_KINDS or find_program(PROGRAMS[kind]) is not None


SIMPLEBUS_KINDS = (
    "simplebus",
    "simplebus-nats",
    "simplebus-os",
    "simplebus-disk",
    "simplebus-engine",
)
"""Kinds of simplebus servers: binary or NATS listener, durability, or stateless before JetStream.
"""
PROGRAMS = {"nats": "nats-server", "nats-always": "nats-server", "redis": "redis-server"}
"""`nats-always` syncs JetStream's files before each PubAck."""


@contextmanager
def running(
    kind: str, *, server_args: Sequence[str] = (), sync_us: int = 0
) -> Iterator[RunningBroker]:
    """Run a broker for the duration of a block; `sync_us` delays each of its file syncs."""
    with tempfile.TemporaryDirectory(prefix="simplebus-load-") as directory:
        with environment(_slow_disk(sync_us)):
            process, port = STARTERS[kind](Path(directory), server_args)
        try:
            yield RunningBroker(kind, port, process)
        finally:
            process.stop()


@contextmanager
def environment(variables: dict[str, str]) -> Iterator[None]:
    """Set environment variables for processes that are started in the block."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _slow_disk(sync_us: int) -> dict[str, str]:
    """Return the environment that delays file syncs."""
    return {"LD_PRELOAD": str(disk()), "SLOW_SYNC_US": str(sync_us)} if sync_us else {}


@cache
def disabled_listeners() -> tuple[str, ...]:
    """Return the flags of OTHER_LISTENERS that this version of the server has."""
    help_text = _output_of([*SERVE, "--help"])
    return tuple(flag for flag in OTHER_LISTENERS if flag in help_text)


def _start_simplebus(directory: Path, server_args: Sequence[str]) -> tuple[Process, int]:
    command = [*SERVE, "--port", "0", *disabled_listeners(), *server_args]
    process = Process("simplebus", command, directory=REPOSITORY)
    return process, _port_of(process, "simplebus ready", rf"tcp={re.escape(HOST)}:(\d+)")


def _start_with_journal(
    durability: str, directory: Path, server_args: Sequence[str]
) -> tuple[Process, int]:
    journal_args = ("--data-dir", str(directory / "data"), "--durability", durability)
    return _start_simplebus(directory, [*journal_args, *server_args])


def _start_simplebus_nats(directory: Path, server_args: Sequence[str]) -> tuple[Process, int]:
    closed = [flag for flag in disabled_listeners() if flag != "--no-nats"]
    command = [*SERVE, "--port", "0", "--nats-port", "0", *closed, *server_args]
    process = Process("simplebus", command, directory=REPOSITORY)
    return process, _port_of(process, "simplebus ready", rf"nats={re.escape(HOST)}:(\d+)")


def _start_with_all_listeners(directory: Path, server_args: Sequence[str]) -> tuple[Process, int]:
    listeners = ("--port", "0", "--nats-port", "0", "--http-port", "0")
    process = Process("simplebus", [*SERVE, *listeners, *server_args], directory=REPOSITORY)
    return process, _port_of(process, "simplebus ready", rf"tcp={re.escape(HOST)}:(\d+)")


def _start_nats(directory: Path, server_args: Sequence[str]) -> tuple[Process, int]:
    program = find_program("nats-server")
    command = [program, "-a", HOST, "-p", "-1", "-js", "-sd", directory]
    process = Process("nats-server", [str(word) for word in command])
    port = _port_of(process, "Listening for client connections", rf"{re.escape(HOST)}:(\d+)")
    return process, port


def _start_nats_always(directory: Path, server_args: Sequence[str]) -> tuple[Process, int]:
    config = directory / "nats.conf"
    store = json.dumps(str(directory / "store"))
    config.write_text(f"jetstream {{ store_dir: {store}, sync_interval: always }}")
    command = [find_program("nats-server"), "-a", HOST, "-p", "-1", "-c", config]
    process = Process("nats-server", [str(word) for word in command])
    port = _port_of(process, "Listening for client connections", rf"{re.escape(HOST)}:(\d+)")
    return process, port


class _StatelessServer(Process):
    """Stateless server together with its nats-server."""

    def __init__(self, command: Sequence[str], nats_server: Process) -> None:
        super().__init__("simplebus", command, directory=REPOSITORY)
        self._nats_server = nats_server

    def cpu_s(self) -> float:
        return super().cpu_s() + self._nats_server.cpu_s()

    def stop(self) -> None:
        super().stop()
        self._nats_server.stop()


def _start_engine(directory: Path, server_args: Sequence[str]) -> tuple[Process, int]:
    nats_server, port = _start_nats(directory, ())
    engine = ("--engine", f"nats://{HOST}:{port}")
    process = _StatelessServer(
        [*SERVE, "--port", "0", *disabled_listeners(), *engine, *server_args], nats_server
    )
    return process, _port_of(process, "simplebus ready", rf"tcp={re.escape(HOST)}:(\d+)")


def _start_redis(directory: Path, server_args: Sequence[str]) -> tuple[Process, int]:
    port = free_port()
    program = str(find_program("redis-server"))
    command = [program, "--bind", HOST, "--port", str(port), "--save", "", "--dir", str(directory)]
    process = Process("redis-server", command)
    _wait_or_stop(process, "Ready to accept connections")
    return process, port


STARTERS = {
    "simplebus": _start_simplebus,
    "simplebus-all": _start_with_all_listeners,
    "simplebus-nats": _start_simplebus_nats,
    "simplebus-os": partial(_start_with_journal, "os"),
    "simplebus-disk": partial(_start_with_journal, "disk"),
    "simplebus-engine": _start_engine,
    "nats": _start_nats,
    "nats-always": _start_nats_always,
    "redis": _start_redis,
}


def _wait_or_stop(process: Process, words: str) -> str:
    try:
        return process.wait_for_line(words, timeout_s=START_S)
    except BaseException:
        process.stop()
        raise


def _port_of(process: Process, words: str, pattern: str) -> int:
    line = _wait_or_stop(process, words)
    match = re.search(pattern, line)
    if match is None:
        process.stop()
        raise LoadError(f"{process.name} printed {line!r}, expected an address on {HOST}")
    return int(match[1])


def _output_of(command: Sequence[str]) -> str:
    process = subprocess.run(
        command, capture_output=True, text=True, timeout=START_S, cwd=REPOSITORY
    )
    return process.stdout


def versions(kinds: Sequence[str]) -> dict[str, str]:
    """Return each broker's version, as a number if possible."""
    found = {"python": sys.version.split()[0]}
    with suppress(PackageNotFoundError):
        found["nats-py"] = version("nats-py")
    for kind in kinds:
        if kind == "simplebus":
            version_text = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"][
                "version"
            ]
        elif program := find_program(PROGRAMS[kind]):
            version_text = _output_of([str(program), "--version"])
        else:
            continue
        number = re.search(r"\d+\.\d+(\.\d+)?", version_text)
        found[kind] = number[0] if number else "unknown"
    return found
