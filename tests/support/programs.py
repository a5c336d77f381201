"""Runs the command line in separate processes."""

from __future__ import annotations

import contextlib
import os
import re
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from subprocess import PIPE
from typing import IO

from tests.support.forked_programs import ForkedProgram, can_fork_with

File = int | IO[bytes]
ROOT = Path(__file__).parents[2]
PATIENCE_SECONDS = 240.0
READY = r"simplebus ready tcp=(\S+:\d+)(?: nats=(\S+:\d+))?(?: http=(\S+:\d+))?"


def environment(**extra: str) -> dict[str, str]:
    """Return this process's environment without settings of simplebus, plus `more`."""
    inherited = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("SIMPLEBUS_") and name != "NOTIFY_SOCKET"
    }
    terminal = {"COLUMNS": "200", "TERM": "dumb", "NO_COLOR": "1"}
    # Tests run in parallel, so the default ports cannot be used.
    free_ports = {"SIMPLEBUS_NATS_PORT": "0", "SIMPLEBUS_HTTP_PORT": "0"}
    return inherited | terminal | free_ports | extra


class Program:
    """A running `simplebus` command."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process
        self.nats_address = ""
        """HOST:PORT of a server's NATS listener; empty if it is disabled."""
        self.http_address = ""
        """HOST:PORT of a server's HTTP listener; empty if it is disabled."""
        self._unread = b""
        self._read_stderr = b""

    def read_line(self) -> str:
        """Return the next line of standard output."""
        assert self.process.stdout is not None
        deadline = time.monotonic() + PATIENCE_SECONDS
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._unread:
                seconds_left = deadline - time.monotonic()
                assert seconds_left > 0, f"no output for {PATIENCE_SECONDS:g} s"
                assert selector.select(seconds_left), f"no output for {PATIENCE_SECONDS:g} s"
                data = os.read(self.process.stdout.fileno(), 65536)
                assert data, f"the program ended: {self.wait()}"
                self._unread += data
        line, _, self._unread = self._unread.partition(b"\n")
        return line.decode()

    def wait_for_stderr(self, text: str, times: int = 1) -> None:
        """Wait until standard error contains `text` at least `times` times."""
        assert self.process.stderr is not None
        deadline = time.monotonic() + PATIENCE_SECONDS
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stderr, selectors.EVENT_READ)
            while self._read_stderr.count(text.encode()) < times:
                assert selector.select(max(0.0, deadline - time.monotonic())), (
                    f"standard error lacks {text!r}"
                )
                data = os.read(self.process.stderr.fileno(), 65536)
                assert data, f"the program ended: {self.wait()}"
                self._read_stderr += data

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def wait(self, stdin_data: bytes | None = None) -> tuple[int, str, str]:
        """Write `data` to standard input and wait for the end.

        Returns:
            Exit status, and the rest of standard output and standard error.
        """
        stdout, stderr = self.process.communicate(stdin_data, timeout=PATIENCE_SECONDS)
        stdout_bytes, self._unread = self._unread + stdout, b""
        stderr_bytes, self._read_stderr = self._read_stderr + stderr, b""
        return self.process.returncode, stdout_bytes.decode(), stderr_bytes.decode()


def start_program(
    *arguments: str, stdin: File, stdout: File, stderr: File, **variables: str
) -> subprocess.Popen[bytes]:
    """Start `simplebus`, as a fork if the environment allows it."""
    env = environment(**variables)
    if can_fork_with(env):
        return ForkedProgram(
            ("simplebus", *arguments), stdin=stdin, stdout=stdout, stderr=stderr, cwd=ROOT, env=env
        )
    command = [sys.executable, "-m", "simplebus", *arguments]
    return subprocess.Popen(command, stdin=stdin, stdout=stdout, stderr=stderr, cwd=ROOT, env=env)


@contextlib.contextmanager
def running_process(command: Sequence[str | Path], *, stdin: File = PIPE) -> Iterator[Program]:
    """Run a program of another language; it is killed at the end of the block."""
    with subprocess.Popen(command, stdin=stdin, stdout=PIPE, stderr=PIPE) as process:
        try:
            yield Program(process)
        finally:
            process.kill()


@contextlib.contextmanager
def running_program(*arguments: str, **variables: str) -> Iterator[Program]:
    """Start `simplebus`; at the end of the block it is killed if it still runs."""
    with start_program(*arguments, stdin=PIPE, stdout=PIPE, stderr=PIPE, **variables) as process:
        try:
            yield Program(process)
        finally:
            process.kill()


def run_program(
    *arguments: str, stdin_data: bytes | None = None, **variables: str
) -> tuple[int, str, str]:
    """Run `simplebus` to its end. Returns exit status, standard output and standard error."""
    with running_program(*arguments, **variables) as program:
        return program.wait(stdin_data)


@contextlib.contextmanager
def run_server(*arguments: str, **variables: str) -> Iterator[tuple[Program, str]]:
    """Start a server on free ports. Yields it and the URL of its binary listener."""
    with running_program("serve", "--port", "0", *arguments, **variables) as program:
        ready = re.fullmatch(READY, program.read_line())
        assert ready
        program.nats_address, program.http_address = ready[2] or "", ready[3] or ""
        yield program, f"simplebus://{ready[1]}"
