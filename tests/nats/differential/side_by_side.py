"""Running servers of both kinds with equal configuration, and raw clients of them.

The result of a client does not depend on the clock: its received words and the end of the
connection. A client reads only when a method is called; until then it is slow.
"""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.nats.differential.compare import Item, items, normal, reference
from tests.nats.running_server import HOST
from tests.support.programs import run_server

GREETING = b'CONNECT {"verbose":false}\r\nPING\r\n'
PATIENCE_SECONDS = 240.0
_PIECE_BYTES = 1 << 16
_PING = b"PING\r\n"


class Peer:
    """Client. Receives INFO first, unless TLS comes first or INFO is not awaited."""

    def __init__(
        self, port: int, *, tls_context: ssl.SSLContext | None, awaits_info: bool, kept_bytes: int
    ) -> None:
        """See `Side.peer`."""
        self.socket = socket.socket()
        if kept_bytes:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, kept_bytes)
        self.socket.settimeout(PATIENCE_SECONDS)
        try:
            self.socket.connect((HOST, port))
        except OSError:
            self.socket.close()
            raise
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.received = bytearray()
        self.ending = ""
        """End of the connection; empty while it is open."""
        self._pongs = 0
        if tls_context is not None:
            self.use_tls(tls_context)
        if awaits_info:
            self.until(b"\r\n")

    def use_tls(self, context: ssl.SSLContext) -> Peer:
        """Make the TLS handshake if possible."""
        try:
            self.socket = context.wrap_socket(
                self.socket, server_hostname="localhost", suppress_ragged_eofs=False
            )
        except OSError as error:
            self._end(error)
        return self

    def send(self, data: bytes) -> Peer:
        # Output that was sent before the end must still be read.
        with contextlib.suppress(OSError):
            self.socket.sendall(data)
        return self

    def greet(self, greeting: bytes = GREETING) -> Peer:
        """Send CONNECT and PING and wait for PONG."""
        self.send(greeting)
        self._pongs += 1
        return self.until(b"PONG\r\n", self._pongs)

    def settle(self) -> Peer:
        """Wait until all sent commands are processed or the connection is closed."""
        return self.greet(b"PING\r\n")

    def until(self, text: bytes, count: int = 1) -> Peer:
        """Read until `text` was received `count` times, or the connection is closed."""
        while not self.ending and self.received.count(text) < count:
            self._receive()
        return self

    @property
    def text(self) -> bytes:
        """Received bytes without the server's PINGs, which depend on the clock."""
        return bytes(self.received).replace(_PING, b"")

    def until_bytes(self, count: int) -> Peer:
        """Read until this many bytes besides PINGs were received, or the connection is closed."""
        while (
            not self.ending and len(self.received) - self.received.count(_PING) * len(_PING) < count
        ):
            self._receive()
        return self

    def read_until_closed(self) -> Peer:
        """Read until the connection is closed."""
        while not self.ending:
            self._receive()
        return self

    def _receive(self) -> None:
        try:
            data = self.socket.recv(_PIECE_BYTES)
        except OSError as error:
            self._end(error)
            return
        self.received += data
        if not data:
            self.ending = "ended"

    def _end(self, error: OSError) -> None:
        assert not isinstance(error, TimeoutError), (
            f"the client received only {bytes(self.received[-300:])!r}"
        )
        # A plain socket is reset instead if the server had not read all data.
        self.ending = (isinstance(error, ssl.SSLError) and error.reason) or "ended"

    @property
    def story(self) -> tuple[Item, ...]:
        """Received items and the end of the connection."""
        return (*normal(list(items(bytes(self.received)))), (self.ending or "open",))


@dataclass(slots=True)
class Side:
    """Server of one kind."""

    port: int
    process: subprocess.Popen[bytes]
    peers: list[Peer] = field(default_factory=list)

    def peer(
        self,
        *,
        tls_context: ssl.SSLContext | None = None,
        awaits_info: bool = True,
        kept_bytes: int = 0,
    ) -> Peer:
        """Connect a client.

        Args:
            first: Context of a TLS handshake before INFO; None for a connection in plain text.
            awaits_info: True to wait for INFO.
            kept_bytes: Size of the receive buffer; 0 for the default.

        Raises:
            OSError: The connection is refused.
        """
        connected = Peer(
            self.port, tls_context=tls_context, awaits_info=awaits_info, kept_bytes=kept_bytes
        )
        self.peers.append(connected)
        return connected


Dialogue = Callable[[Side], Any]
"""Runs a dialogue with one server. Returns the result to compare."""


@dataclass(slots=True)
class Pair:
    """One server of each kind."""

    reference_side: Side
    own_side: Side

    def run(self, dialogue: Dialogue) -> tuple[Any, Any]:
        """Run a dialogue with both servers at once and return both results."""
        with ThreadPoolExecutor(2) as pool:
            reference_side, own_side = pool.map(
                lambda server: _run_dialogue(server, dialogue), (self.reference_side, self.own_side)
            )
            return reference_side, own_side


def _run_dialogue(server: Side, dialogue: Dialogue) -> Any:
    try:
        return dialogue(server)
    finally:
        for peer in server.peers:
            peer.socket.close()
        server.peers.clear()


@contextlib.contextmanager
def side_by_side(folder: Path, conf: str, toml: str) -> Iterator[Pair]:
    """Run nats-server and simplebus, each with its configuration."""
    path = folder / "simplebus.toml"
    with open(os.open(path, os.O_CREAT | os.O_WRONLY, 0o600), "w") as file:
        file.write(toml)
    with reference(conf) as reference_side, run_server("--config", str(path)) as (own_side, _):
        assert reference_side.process is not None
        port = int(own_side.nats_address.rpartition(":")[2])
        yield Pair(Side(reference_side.port, reference_side.process), Side(port, own_side.process))
