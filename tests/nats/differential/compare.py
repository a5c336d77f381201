"""Plays the same dialogue to nats-server and to simplebus and compares the output.

Nothing is recorded: both servers run during the test. A step is complete when every open client's
PING is answered. Not compared: fields of INFO that identify the server, PINGs of the server, and
the order of copies of one message to one client.

    Step ─► Reference (process, sockets) ─► bytes ─► items ─┐
        └─► simplebus (in process)       ─► bytes ─► items ─┴─ equal?
"""

from __future__ import annotations

import contextlib
import json
import re
import select
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.support.requirements import nats_server_program

PATIENCE_SECONDS = 240.0
_PINGS = re.compile(rb"(?im)^ping")
_ANSWERED = ("MSG", "HMSG")
# Fields that identify the server and its build, and features of nats-server only: encrypted
# accounts and the interface for administrators.
_OWN = {"server_id", "server_name", "version", "go", "git_commit", "host", "port", "client_id"}
_OWN |= {"client_ip", "nonce", "xkey", "api_lvl", "remote_account"}


@dataclass(frozen=True, slots=True)
class Step:
    """Bytes that one client sends. A client connects with its first step."""

    client: str
    data: bytes | Callable[[str], bytes]
    """Bytes, or a function of the nonce in INFO."""
    pings: int = -1
    """Number of PONGs expected; below 0: as many as lines begin with PING."""
    settle: bool = True
    """True if PINGs follow. Otherwise the next step must be of the same client."""

    def encode(self, info: bytes) -> tuple[bytes, int]:
        """Return the bytes to send after this INFO, and the number of PONGs expected."""
        data = self.data
        if callable(data):
            data = data(json.loads(info.removeprefix(b"INFO ")).get("nonce", ""))
        return data, len(_PINGS.findall(data)) if self.pings < 0 else self.pings


Script = tuple[Step, ...]
Item = tuple[str, ...]
"""Words of one line from the server, then its payload."""


@dataclass(frozen=True, slots=True)
class ClientOutput:
    """Output that one client received."""

    items: tuple[Item, ...]
    closed: bool
    """True if the server closed the connection."""


def items(data: bytes) -> Iterator[Item]:
    """Yield the items of a server's output. Raises ValueError for invalid bytes."""
    offset = 0
    while offset < len(data):
        end = data.index(b"\r\n", offset)
        line = data[offset:end].decode("latin-1")
        offset = end + 2
        tokens = line.split(" ")
        if tokens[0] in _ANSWERED:
            size = int(tokens[-1])
            body = data[offset : offset + size].decode("latin-1")
            if data[offset + size : offset + size + 2] != b"\r\n":
                raise ValueError(f"{line!r} is not followed by {size} bytes and CR LF")
            offset += size + 2
            yield (*tokens, body)
        elif tokens[0] == "INFO":
            yield ("INFO", *_info_facts(line.removeprefix("INFO ")))
        elif tokens[0] != "PING":
            yield (line,)


def _info_facts(info: str) -> list[str]:
    fields = json.loads(info)
    return [f"{name}={json.dumps(fields[name])}" for name in sorted(fields.keys() - _OWN)]


def normal(items_: list[Item]) -> tuple[Item, ...]:
    """Sort adjacent copies of one message by sid."""
    result: list[Item] = []
    copies: list[Item] = []
    for item in [*items_, ("end",)]:
        if copies and (item[0] not in _ANSWERED or _but_sid(item) != _but_sid(copies[0])):
            result += sorted(copies)
            copies = []
        if item[0] in _ANSWERED:
            copies.append(item)
        else:
            result.append(item)
    return tuple(result[:-1])


def _but_sid(item: Item) -> Item:
    return item[:2] + item[3:]


class Reference:
    """Running server with sockets: nats-server, or simplebus for comparison."""

    def __init__(self, port: int, process: subprocess.Popen[bytes] | None = None) -> None:
        self.port = port
        self.process = process

    def play(self, script: Script, chunks: int = 0) -> dict[str, ClientOutput]:
        """Play a script, each step in chunks of this size; 0 for whole steps."""
        clients: dict[str, _Socket] = {}
        try:
            for step in script:
                client = clients.get(step.client)
                if client is None:
                    client = clients[step.client] = _Socket(self.port)
                data, pongs = step.encode(bytes(client.received.partition(b"\r\n")[0]))
                client.send(data, chunks)
                client.awaited += pongs
                if step.settle:
                    client.settle()
                    for other_client in clients.values():
                        if other_client is not client:
                            other_client.settle()
            return {name: client.end() for name, client in clients.items()}
        finally:
            for client in clients.values():
                client.socket.close()

    def listen(self, *data: bytes) -> list[bytes]:
        """Send each text on a separate connection. Returns the outputs between INFO and close."""
        with contextlib.ExitStack() as stack:
            clients = [_Socket(self.port) for _ in data]
            for client, output in zip(clients, data, strict=True):
                stack.enter_context(client.socket)
                client.send(output, 0)
            for client in clients:
                client.until(lambda: False)
            return [bytes(client.received).partition(b"\r\n")[2] for client in clients]


class _Socket:
    """Client with a socket."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), PATIENCE_SECONDS)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.received = bytearray()
        self.closed = False
        self.awaited = 0
        """Number of PONGs to wait for."""
        self._settles = True
        self.until(lambda: b"\r\n" in self.received)

    def send(self, data: bytes, chunks: int) -> None:
        for data_piece in pieces(data, chunks):
            with contextlib.suppress(OSError):  # The server may have closed the connection.
                self.socket.sendall(data_piece)

    def settle(self) -> None:
        if not self.closed:
            self.send(b"PING\r\n", 0)
            self.awaited += 1
            self.until(lambda: self.received.count(b"PONG\r\n") >= self.awaited)

    def end(self) -> ClientOutput:
        """Close the connection and return the rest of the output."""
        closed = self.closed
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_WR)
        self.until(lambda: False)
        return ClientOutput(normal(list(items(bytes(self.received)))), closed)

    def until(self, enough: Callable[[], bool]) -> None:
        """Read until the condition holds or the server closes the connection."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not self.closed and not enough():
            remaining_seconds = max(0.0, deadline - time.monotonic())
            ready = select.poll()  # Unlike `select`, `poll` accepts any descriptor.
            ready.register(self.socket, select.POLLIN)
            assert ready.poll(remaining_seconds * 1000), (
                f"the reference server sent only {bytes(self.received)!r}"
            )
            try:
                data = self.socket.recv(1 << 20)
            except ConnectionError:
                data = b""
            self.received += data
            self.closed = not data


def pieces(data: bytes, size: int) -> Iterator[bytes]:
    """Yield the data in pieces of this size; 0 for one piece."""
    for offset in range(0, len(data), size or len(data) or 1):
        yield data[offset : offset + (size or len(data))]


@contextlib.contextmanager
def reference(config: str = "") -> Iterator[Reference]:
    """Run nats-server on a free port with this configuration file."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "nats.conf"
        file.write_text(config)
        with subprocess.Popen(
            [
                nats_server_program(),
                "-c",
                file,
                "-a",
                "127.0.0.1",
                "-p",
                "-1",
                "--ports_file_dir",
                folder,
            ],
            stderr=subprocess.DEVNULL,
        ) as process:
            try:
                yield Reference(_port(process, Path(folder)), process)
            finally:
                process.kill()


def _port(process: subprocess.Popen[bytes], folder: Path) -> int:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < deadline:
        for path in folder.glob("*.ports"):
            with contextlib.suppress(ValueError):  # The file is not complete yet.
                url: str = json.loads(path.read_text())["nats"][0]
                return int(url.rpartition(":")[2])
        assert process.poll() is None, "nats-server did not start"
        time.sleep(0.005)
    raise AssertionError("nats-server did not report its ports")
