"""Real NATS server for the tests of client libraries.

With SIMPLEBUS_NATS_REFERENCE=1 the tests run against nats-server instead of simplebus, which shows
tests that expect too much.
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
"""Options of every nats-py client, whose default timeout is two seconds."""


class NatsTestServer:
    """Address and process of a running server."""

    def __init__(self, port: int, process: subprocess.Popen[bytes]) -> None:
        self.port = port
        self.url = f"nats://{HOST}:{port}"
        self.process = process


@contextlib.contextmanager
def start_server(
    *arguments: str, port: int = 0, conf: str = "", toml: str = ""
) -> Iterator[NatsTestServer]:
    """Run a server until the block ends.

    `arguments` and the file `toml` configure simplebus, the file `conf` configures nats-server
    alike.
    """
    with contextlib.ExitStack() as stack:
        if IS_REFERENCE:
            yield stack.enter_context(_reference(port, conf))
            return
        if toml:
            arguments = (
                *arguments,
                "--config",
                str(_write_temporary_file(stack, "simplebus.toml", toml)),
            )
        flags = ("--port", "0", "--nats-port", str(port), *arguments)
        served = stack.enter_context(running_program("serve", *flags))
        ready = served.read_line()
        match = re.search(rf"^simplebus ready .*nats={re.escape(HOST)}:(\d+)", ready)
        assert match, ready
        yield NatsTestServer(int(match[1]), served.process)


def _write_temporary_file(stack: contextlib.ExitStack, name: str, text: str) -> Path:
    path = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="simplebus-nats-"))) / name
    path.touch(0o600)
    path.write_text(text)
    return path


@contextlib.contextmanager
def _reference(port: int, conf: str) -> Iterator[NatsTestServer]:
    with contextlib.ExitStack() as stack:
        command = [nats_server_program(), "-a", HOST, "-p", str(port or -1)]
        if conf:
            command += ["-c", str(_write_temporary_file(stack, "nats.conf", conf))]
        process = stack.enter_context(subprocess.Popen(command, stderr=subprocess.PIPE))
        try:
            reading = Program(process)
            process.stdout = process.stderr  # Its log.
            for line in iter(reading.read_line, None):
                if match := re.search(r"Listening for client connections on [^ ]*:(\d+)", line):
                    break
            yield NatsTestServer(int(match[1]), process)
        finally:
            process.terminate()
            process.wait(PATIENCE_SECONDS)


def on_asyncio(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Run a test on asyncio with a time limit."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        asyncio.run(asyncio.wait_for(test(*args, **kwargs), PATIENCE_SECONDS))

    return run


async def settle(client: Client) -> None:
    """Wait until the server has processed everything that a nats-py client sent.

    The first PING may precede pending output.
    """
    await client.flush(PATIENCE_SECONDS)
    await client.flush(PATIENCE_SECONDS)


async def wait_for(condition: Callable[[], bool]) -> None:
    """Poll the condition on the event loop, with a time limit."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, f"condition not met after {PATIENCE_SECONDS:g} s"
        await asyncio.sleep(0.005)


class RawClient:
    """Client with a plain socket."""

    def __init__(self, server: NatsTestServer, *lines: str, buffer_bytes: int = 1 << 16) -> None:
        """`buffer_bytes` is about the size of the receive buffer."""
        self.socket = socket.socket()
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)
        self.socket.settimeout(PATIENCE_SECONDS)
        self.socket.connect((HOST, server.port))
        self.received = b""
        self.send(*lines)

    def send(self, *lines: str) -> None:
        self.socket.sendall("".join(f"{line}\r\n" for line in lines).encode())

    def read_until(self, text: bytes) -> bytes:
        """Return the output up to and including these bytes."""
        while text not in self.received:
            data = self.socket.recv(1 << 16)
            assert data, f"the server closed the connection after {self.received[-300:]!r}"
            self.received += data
        head, found, self.received = self.received.partition(text)
        return head + found

    def read_until_closed(self) -> bytes:
        """Return the output until the server closes the connection."""
        with contextlib.suppress(ConnectionResetError):
            while data := self.socket.recv(1 << 20):
                self.received += data
        return self.received

    def __enter__(self) -> RawClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()
