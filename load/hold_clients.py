"""Server that `load.holds` measures, and clients that send it requests."""

from __future__ import annotations

import contextlib
import json
import selectors
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, cast

from load.brokers import HOST, REPOSITORY, START_S
from load.connection_attack import listener_ports
from load.processes import Process
from simplebus.core.protocol import frames

PATIENCE_S = 120.0
SETTLE_S = 1.2
"""Time for a tick, a snapshot and the removal of ended connections."""
QUIET_S = 1.0
"""Silence of the server after which a client has received everything."""
MEMBERS = 1000
SUBSCRIBERS = 5000
HELD_MESSAGES = 200_000
"""Messages for the members of a group."""
SEPARATE_MESSAGES = 60_000
"""Messages that are rejected, or acknowledged, apart from their neighbours."""

SERVER = (
    *("--port", "0", "--nats-port", "0", "--http-port", "0", "--log-level", "error"),
    *("--max-memory", "8GiB", "--max-connections", "16000", "--hello-timeout", "2"),
    *("--max-classes-per-connection", "0", "--max-classes-per-address", "0"),
    *("--max-durables-per-address", "0", "--ack-timeout", "600", "--durability", "os"),
)


Kinds = dict[str, Callable[["HeldServer"], object]]
"""Functions that send one kind of request, by the title of its row."""


class Hold(NamedTuple):
    """A step of a task, or a garbage collection between steps."""

    at: float
    seconds: float
    gc_seconds: float
    faults: int
    task: str
    stack: str


@dataclass
class HeldServer:
    """A running server, and the ports of its listeners."""

    process: Process
    tcp: int
    nats: int
    http: int

    def holds(self) -> list[Hold]:
        """Return the holds that the server has reported so far."""
        found = [
            json.loads(line[5:])
            for line in self.process.output().splitlines()
            if line.startswith("hold ")
        ]
        names = ("at", "seconds", "gc", "faults", "task", "stack")
        return [Hold(*(each[name] for name in names)) for each in found]


@contextlib.contextmanager
def serving(*options: str) -> Iterator[HeldServer]:
    """Run a server with the instrument."""
    command = [sys.executable, "-m", "load.hold_server", "serve", *SERVER, *options]
    with Process("simplebus", command, directory=REPOSITORY) as process:
        process.wait_for_line("simplebus ready", timeout_s=START_S)
        yield HeldServer(process, *map(int, listener_ports(process.output()).split(",")))


class Client:
    """Binary client of version 2 that waits for replies."""

    def __init__(
        self, server: HeldServer, *classes: object, user: str = "", **more: object
    ) -> None:
        """Connect, and declare classes. A `user` has the password "p"."""
        if user:
            more["auth"] = {"user": user, "password": "p"}
        self.socket = socket.create_connection((HOST, server.tcp), timeout=PATIENCE_S)
        self._received = bytearray()
        body = {"version": 2, "classes": list(classes), **more}
        self.send(frames.CONNECT, body)
        self.wait(frames.CONNECT)

    def send(self, kind: int, body: object, *, class_id: int = 0, number: int = 0) -> None:
        """Send a request."""
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.socket.sendall(
            frames.encode(
                kind,
                class_id=class_id,
                message_id=1,
                timer_index=number,
                content=content,
            )
        )

    def wait(self, kind: int, count: int = 1) -> None:
        """Wait for `count` replies of a kind or errors, and discard all other frames."""
        marks = [frames.DELIMITER + bytes([each]) for each in (kind, frames.ERROR)]
        if not self._received:
            self._received += frames.DELIMITER
        while sum(self._received.count(mark) for mark in marks) < count:
            data = self.socket.recv(1 << 20)
            assert data, "the server closed the connection"
            self._received += data
        self._received.clear()

    def subscribe(self, class_id: int, number: int = 1, **options: object) -> None:
        """Subscribe, and wait for the reply."""
        self.send(frames.SUBSCRIBE, options, class_id=class_id, number=number)
        self.wait(frames.SUBSCRIBE)

    def read_for(self, seconds: float) -> None:
        """Read and discard data until none has arrived for `seconds`."""
        self.socket.settimeout(seconds)
        with contextlib.suppress(TimeoutError):
            while self.socket.recv(1 << 20):
                pass
        self.socket.settimeout(PATIENCE_S)
        self._received.clear()

    def close(self) -> None:
        self.socket.close()


def publish(
    server: HeldServer, class_id: int, contents: Iterator[bytes], *, kind: int, user: str = ""
) -> None:
    """Publish messages as fast as the server accepts them, without reading confirms."""
    client = Client(server, class_id, user=user)
    pieces: list[bytes] = []
    size = 0
    reader = threading.Thread(target=client.wait, args=(frames.CONNECT,), daemon=True)
    reader.start()
    for number, content in enumerate(contents):
        frame = frames.encode(kind, class_id=class_id, message_id=number, content=content)
        pieces.append(frame)
        size += len(frame)
        if size > 1 << 20:
            client.socket.sendall(b"".join(pieces))
            pieces, size = [], 0
    client.socket.sendall(b"".join(pieces))
    client.send(frames.CONNECT, {})
    reader.join()
    client.close()


def encode_envelope(channel: str, payload: bytes) -> bytes:
    """Return the content of an Envelope with a channel."""
    name = channel.encode()
    return b"\x08" + len(name).to_bytes(2, "big") + name + payload


def publish_to_members(server: HeldServer, class_id: int) -> None:
    """Publish HELD_MESSAGES messages with 5,000 keys."""
    contents = (encode_envelope(f"key.{n % 5000}", b"%d" % n) for n in range(HELD_MESSAGES))
    publish(server, class_id, contents, kind=frames.ENVELOPE)
    time.sleep(QUIET_S)


@contextlib.contextmanager
def discarding(sockets: list[socket.socket]) -> Iterator[None]:
    """Discard what these connections receive, and close them at the end."""
    reader = threading.Thread(target=discard_all, args=(sockets,), daemon=True)
    reader.start()
    yield
    for sock in sockets:
        sock.shutdown(socket.SHUT_RDWR)
    reader.join()


def discard_all(sockets: list[socket.socket]) -> None:
    """Read and discard data until every connection has ended."""
    with selectors.DefaultSelector() as selector:
        for sock in sockets:
            selector.register(sock, selectors.EVENT_READ)
        while selector.get_map():
            for key, _ in selector.select():
                sock, data = cast(socket.socket, key.fileobj), b""
                with contextlib.suppress(ConnectionResetError):
                    data = sock.recv(1 << 20)
                if not data:
                    selector.unregister(sock)
                    sock.close()
