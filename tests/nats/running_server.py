"""A NATS server for the tests of real clients: simplebus, or the reference server in its place.

Rule 1: with SIMPLEBUS_NATS_REFERENCE=1 every test here runs against nats-server. What fails there
expects too much.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import re
import socket
import subprocess
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

from nats.aio.client import Client

from tests.support.programs import PATIENCE_SECONDS, Program, running_program
from tests.support.requirements import nats_server_program

HOST = "127.0.0.1"
IS_REFERENCE = os.environ.get("SIMPLEBUS_NATS_REFERENCE") == "1"
PATIENT = {"connect_timeout": PATIENCE_SECONDS}
"""What every client of nats-py is told: it gives up after two seconds otherwise."""


class Door:
    """Where a running server takes NATS clients."""

    def __init__(self, port: int, process: subprocess.Popen[bytes]) -> None:
        self.port = port
        self.url = f"nats://{HOST}:{port}"
        self.process = process


@contextlib.contextmanager
def door(*arguments: str, port: int = 0, conf: str = "", toml: str = "") -> Iterator[Door]:
    """A server, until the block ends. `arguments` and the file `toml` are those of simplebus;
    `conf` is the file for the reference server, which has to say the same."""
    with contextlib.ExitStack() as stack:
        if IS_REFERENCE:
            yield stack.enter_context(_reference(port, conf))
            return
        if toml:
            arguments = (*arguments, "--config", str(_kept(stack, "simplebus.toml", toml)))
        flags = ("--port", "0", "--nats-port", str(port), *arguments)
        served = stack.enter_context(running_program("serve", *flags))
        ready = served.read_line()
        match = re.search(rf"^simplebus ready .*nats={re.escape(HOST)}:(\d+)", ready)
        assert match, ready
        yield Door(int(match[1]), served.process)


def _kept(stack: contextlib.ExitStack, name: str, text: str) -> Path:
    path = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="simplebus-nats-"))) / name
    path.touch(0o600)
    path.write_text(text)
    return path


@contextlib.contextmanager
def _reference(port: int, conf: str) -> Iterator[Door]:
    with contextlib.ExitStack() as stack:
        command = [nats_server_program(), "-a", HOST, "-p", str(port or -1)]
        if conf:
            command += ["-c", str(_kept(stack, "nats.conf", conf))]
        process = stack.enter_context(subprocess.Popen(command, stderr=subprocess.PIPE))
        try:
            reading = Program(process)
            process.stdout = process.stderr  # Where it says what it does.
            for line in iter(reading.read_line, None):
                if match := re.search(r"Listening for client connections on [^ ]*:(\d+)", line):
                    break
            yield Door(int(match[1]), process)
        finally:
            process.terminate()
            process.wait(PATIENCE_SECONDS)


def on_asyncio(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """A test of a client that knows asyncio only, bounded in time."""

    @functools.wraps(test)
    def run(*args: Any, **named: Any) -> None:
        asyncio.run(asyncio.wait_for(test(*args, **named), PATIENCE_SECONDS))

    return run


async def settle(client: Client) -> None:
    """Everything that a client of nats-py has said is obeyed. Its first PING may go before what
    waits to be written."""
    await client.flush(PATIENCE_SECONDS)
    await client.flush(PATIENCE_SECONDS)


async def until(condition: Callable[[], bool]) -> None:
    """Wait for what has no event. Each look is a turn of the loop, bounded in time."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, "it did not come to that"
        await asyncio.sleep(0.005)


class Raw:
    """A client by hand."""

    def __init__(self, door: Door, *lines: str, buffer_bytes: int = 1 << 16) -> None:
        """`buffer_bytes` is about what may come before it is read."""
        self.socket = socket.socket()
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)
        self.socket.settimeout(PATIENCE_SECONDS)
        self.socket.connect((HOST, door.port))
        self.received = b""
        self.say(*lines)

    def say(self, *lines: str) -> None:
        self.socket.sendall("".join(f"{line}\r\n" for line in lines).encode())

    def until(self, words: bytes) -> bytes:
        """What came up to these words, with them."""
        while words not in self.received:
            some = self.socket.recv(1 << 16)
            assert some, f"it hung up, it had said {self.received[-300:]!r}"
            self.received += some
        before, found, self.received = self.received.partition(words)
        return before + found

    def rest(self) -> bytes:
        """What comes until it hangs up."""
        with contextlib.suppress(ConnectionResetError):
            while some := self.socket.recv(1 << 20):
                self.received += some
        return self.received

    def __enter__(self) -> Raw:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()
