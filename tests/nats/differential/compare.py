"""The same words said to the reference server and to ours, and what each of them answers.

Rule 1: nothing is recorded: both servers are asked in the same run.
Rule 2: a step is said by one client, and has settled when every open client's PING is answered:
what the step caused was sent before. Only then the next one is said.
Rule 3: what is left out of a comparison is named here: fields of INFO that tell who the server is;
a server's own PINGs, which come by the clock; the order of one message's copies to one client.

    Say ──► Reference (a process, sockets) ──► bytes ──► items ─┐
        └─► Ours (in process)              ──► bytes ──► items ─┴─ equal?
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

PATIENCE_SECONDS = 60.0
_PINGS = re.compile(rb"(?im)^ping")
_ANSWERED = ("MSG", "HMSG")
# Who the server is, where it is and what it is made of; and what only the reference can do:
# encrypted exchanges with accounts and its interface for administrators.
_OWN = {"server_id", "server_name", "version", "go", "git_commit", "host", "port", "client_id"}
_OWN |= {"client_ip", "nonce", "xkey", "api_lvl", "remote_account"}


@dataclass(frozen=True, slots=True)
class Say:
    """One step: a client says something; who was not there yet comes first."""

    client: str
    data: bytes | Callable[[str], bytes]
    """A function makes it of the nonce in the server's INFO."""
    pings: int = -1
    """How many PONGs answer it; below 0: as many as lines begin with ping."""
    settle: bool = True
    """Whether PINGs follow. Without, the next step must be the same client's."""

    def words(self, info: bytes) -> tuple[bytes, int]:
        """What is said to a server that greeted like this, and how many PONGs answer it."""
        data = self.data
        if callable(data):
            data = data(json.loads(info.removeprefix(b"INFO ")).get("nonce", ""))
        return data, len(_PINGS.findall(data)) if self.pings < 0 else self.pings


Script = tuple[Say, ...]
Item = tuple[str, ...]
"""One thing that a server said: its line's words, then what came with it."""


@dataclass(frozen=True, slots=True)
class Heard:
    """What one client heard."""

    items: tuple[Item, ...]
    closed: bool
    """Whether the server ended the conversation."""


def items(data: bytes) -> Iterator[Item]:
    """What a server said, one thing after the other. Raises ValueError where it is no protocol."""
    at = 0
    while at < len(data):
        end = data.index(b"\r\n", at)
        line = data[at:end].decode("latin-1")
        at = end + 2
        words = line.split(" ")
        if words[0] in _ANSWERED:
            size = int(words[-1])
            body = data[at : at + size].decode("latin-1")
            if data[at + size : at + size + 2] != b"\r\n":
                raise ValueError(f"{line!r} is not followed by {size} bytes and CR LF")
            at += size + 2
            yield (*words, body)
        elif words[0] == "INFO":
            yield ("INFO", *_told(line.removeprefix("INFO ")))
        elif words[0] != "PING":
            yield (line,)


def _told(info: str) -> list[str]:
    fields = json.loads(info)
    return [f"{name}={json.dumps(fields[name])}" for name in sorted(fields.keys() - _OWN)]


def normal(heard: list[Item]) -> tuple[Item, ...]:
    """Copies of one message in a row, which differ by sid, in the order of their sids."""
    result: list[Item] = []
    copies: list[Item] = []
    for item in [*heard, ("end",)]:
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
    """A running server, spoken to through sockets: nats-server, or ours to compare with it."""

    def __init__(self, port: int, process: subprocess.Popen[bytes] | None = None) -> None:
        self.port = port
        self.process = process

    def play(self, script: Script, chunks: int = 0) -> dict[str, Heard]:
        """Say all of it, each step in pieces of so many bytes (0: whole)."""
        clients: dict[str, _Socket] = {}
        try:
            for say in script:
                client = clients.get(say.client)
                if client is None:
                    client = clients[say.client] = _Socket(self.port)
                data, pongs = say.words(bytes(client.heard.partition(b"\r\n")[0]))
                client.say(data, chunks)
                client.awaited += pongs
                if say.settle:
                    client.settle()
                    for other in clients.values():
                        if other is not client:
                            other.settle()
            return {name: client.end() for name, client in clients.items()}
        finally:
            for client in clients.values():
                client.socket.close()

    def listen(self, *data: bytes) -> list[bytes]:
        """Have a client say each of these, and hear what comes behind INFO until the server hangs
        up."""
        with contextlib.ExitStack() as stack:
            clients = [_Socket(self.port) for _ in data]
            for client, said in zip(clients, data, strict=True):
                stack.enter_context(client.socket)
                client.say(said, 0)
            for client in clients:
                client.until(lambda: False)
            return [bytes(client.heard).partition(b"\r\n")[2] for client in clients]


class _Socket:
    """A client of the reference server."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), PATIENCE_SECONDS)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.heard = bytearray()
        self.closed = False
        self.awaited = 0
        """PONGs that must come before all is settled."""
        self._settles = True
        self.until(lambda: b"\r\n" in self.heard)

    def say(self, data: bytes, chunks: int) -> None:
        for piece in pieces(data, chunks):
            with contextlib.suppress(OSError):  # It may have hung up before it heard all.
                self.socket.sendall(piece)

    def settle(self) -> None:
        if not self.closed:
            self.say(b"PING\r\n", 0)
            self.awaited += 1
            self.until(lambda: self.heard.count(b"PONG\r\n") >= self.awaited)

    def end(self) -> Heard:
        """Hang up, and hear the rest."""
        closed = self.closed
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_WR)
        self.until(lambda: False)
        return Heard(normal(list(items(bytes(self.heard)))), closed)

    def until(self, enough: Callable[[], bool]) -> None:
        """Hear more until it is enough, or the server has hung up."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not self.closed and not enough():
            left = max(0.0, deadline - time.monotonic())
            ready = select.poll()  # Whatever number its descriptor has.
            ready.register(self.socket, select.POLLIN)
            assert ready.poll(left * 1000), f"the reference server said only {bytes(self.heard)!r}"
            try:
                data = self.socket.recv(1 << 20)
            except ConnectionError:
                data = b""
            self.heard += data
            self.closed = not data


def pieces(data: bytes, size: int) -> Iterator[bytes]:
    """The data in pieces of so many bytes (0: whole)."""
    for at in range(0, len(data), size or len(data) or 1):
        yield data[at : at + (size or len(data))]


@contextlib.contextmanager
def reference(config: str = "") -> Iterator[Reference]:
    """A nats-server on a free port, with this configuration file."""
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
            with contextlib.suppress(ValueError):  # It is being written.
                url: str = json.loads(path.read_text())["nats"][0]
                return int(url.rpartition(":")[2])
        assert process.poll() is None, "nats-server did not start"
        time.sleep(0.005)
    raise AssertionError("nats-server did not say where it listens")
