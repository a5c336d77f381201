"""Fake servers and a faulty proxy, each with its own threads.

A test gives the unusual replies; everything else is answered as a server would.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterable, Iterator

from simplebus.core.limits import HEADER_BYTES
from simplebus.core.protocol import frames
from simplebus.core.protocol.frames import DELIMITER, HEADER
from simplebus.core.protocol.requests import ConnectReply, ErrorReply, SubscribeReply
from tests.client.bus_server import PATIENCE_SECONDS

CREDIT_BYTES = 1 << 20
"""Granted credit. A publisher with this many unconfirmed bytes, plus WRITE_BYTES, waits."""

Answer = Callable[[int, int, int, int, bytes], bytes | None]
"""Returns the reply to a frame, given its type, class id, message id, timer index and content.

b"" sends the usual reply, None closes the connection.
"""


class FakeServer:
    """Listener that sends the replies of a test, and the replies of a server for all other
    frames.
    """

    def __init__(self, answer: Answer | None = None, *, credit: int = CREDIT_BYTES) -> None:
        self.connection_count = 0
        """Accepted connections."""
        self.received_frames: list[tuple[int, int, int, int, bytes]] = []
        self.peers: list[socket.socket] = []
        self.is_silent = False
        """True to read and answer nothing."""
        self._answer = answer
        self._credit = credit
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._threads: list[threading.Thread] = []
        self._start(self._accept)

    def _start(self, work: Callable[..., None], *arguments: object) -> None:
        thread = threading.Thread(target=work, args=arguments)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                peer, _ = self._listener.accept()
                self.connection_count += 1
                self.peers.append(peer)
                if not self.is_silent:
                    self._start(self._serve, peer)

    def _serve(self, peer: socket.socket) -> None:
        received = b""
        with contextlib.suppress(OSError), peer:
            while data := peer.recv(1 << 16):
                received += data
                while (end := received.find(DELIMITER, HEADER_BYTES)) >= 0:
                    frame, received = received[:end], received[end + len(DELIMITER) :]
                    frame_fields = (*HEADER.unpack(frame[:HEADER_BYTES]), frame[HEADER_BYTES:])
                    self.received_frames.append(frame_fields)
                    reply = self._answer(*frame_fields) if self._answer else b""
                    if reply is None:
                        return
                    peer.sendall(reply or self.default_reply(*frame_fields))

    def default_reply(
        self, kind: int, class_id: int, number: int, timer: int, content: bytes
    ) -> bytes:
        """Return the reply of a server."""
        if kind == frames.CONNECT:
            reply = ConnectReply(session=0, credit=self._credit, bus="false").encode()
            return frames.encode(frames.CONNECT, message_id=number, content=reply)
        if kind == frames.SUBSCRIBE:
            reply = SubscribeReply(cursor=0, floor=0).encode()
            return frames.encode(
                kind, class_id=class_id, message_id=number, timer_index=timer, content=reply
            )
        if kind in (frames.MESSAGE, frames.ENVELOPE):
            return confirm(number + 1)
        if kind == frames.UNSUBSCRIBE:
            return frames.encode(kind, class_id=class_id, message_id=number)
        return b""

    def hang_up(self) -> None:
        """Close all connections. New ones are accepted."""
        for peer in list(self.peers):
            with contextlib.suppress(OSError):
                peer.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        if self._listener.fileno() >= 0:
            self._listener.shutdown(socket.SHUT_RDWR)
            join_threads(self._threads[:1])  # After this, no further peer is added.
            self._listener.close()
        self.hang_up()
        join_threads(self._threads)
        for peer in self.peers:
            peer.close()


def join_threads(threads: Iterable[threading.Thread]) -> None:
    """Wait for threads before their sockets are closed, because file descriptors are reused."""
    for thread in threads:
        thread.join(PATIENCE_SECONDS)
        assert not thread.is_alive()


def confirm(next_number: int) -> bytes:
    return frames.encode(frames.CONFIRM, message_id=next_number)


def refuse(
    kind: int, number: int, code: str, *, count: int = 1, fatal: bool = False, class_id: int = 0
) -> bytes:
    """Return an Error frame for a frame of this type and number."""
    content = ErrorReply(code=code, message="not today", fatal=fatal, count=count).encode()
    return frames.encode(
        frames.ERROR, class_id=class_id, message_id=number, timer_index=kind, content=content
    )


@contextlib.contextmanager
def fake_server(
    answer: Answer | None = None, *, credit: int = CREDIT_BYTES
) -> Iterator[FakeServer]:
    server = FakeServer(answer, credit=credit)
    try:
        yield server
    finally:
        server.close()


@contextlib.contextmanager
def silent_listener() -> Iterator[FakeServer]:
    """Listener that accepts connections, reads nothing and sends nothing."""
    with fake_server() as server:
        server.is_silent = True
        yield server


class FaultyProxy:
    """Proxy that can drop bytes, stall, refuse and close connections, and change its target."""

    def __init__(self, address: str) -> None:
        self.dropped_direction = ""
        """Direction whose bytes are dropped until the next disconnect: `to_client` or `to_server`.
        """
        self.dropped_bytes = 0
        """Bytes dropped so far."""
        self.is_refusing = False
        """True to close new connections at once."""
        self.refused_count = 0
        """Connections that were closed at once."""
        self.stall_after_bytes: int | None = None
        """Bytes per connection that are passed to the client; later ones are held back."""
        self.stalled_ports: list[int] = []
        """Ports of the clients whose bytes are held back."""
        self.set_target(address)
        self._lock = threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._sockets: list[socket.socket] = []
        self._relays: list[threading.Thread] = []
        self._accepting = threading.Thread(target=self._accept, daemon=True)
        self._accepting.start()

    def set_target(self, address: str) -> None:
        """Connect later clients to this address."""
        self._target = address.removeprefix("simplebus://").rsplit(":", 1)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                try:
                    if self.is_refusing:
                        raise ConnectionRefusedError
                    server = socket.create_connection((self._target[0], int(self._target[1])))
                except OSError:
                    client.close()
                    self.refused_count += 1
                    continue
                with self._lock:
                    self._sockets += [client, server]
                    for arguments in ((client, server, "to_server"), (server, client, "to_client")):
                        relay = threading.Thread(target=self._relay, args=arguments, daemon=True)
                        relay.start()
                        self._relays.append(relay)

    def _relay(self, source: socket.socket, target: socket.socket, direction: str) -> None:
        relayed, is_dropping = 0, False
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                relayed += len(data)
                stall_after = self.stall_after_bytes if direction == "to_client" else None
                if stall_after is not None and relayed > stall_after:
                    self.stalled_ports.append(target.getpeername()[1])
                    while source.recv(1 << 16):  # Until the connection is closed.
                        pass
                elif is_dropping or self.dropped_direction == direction:
                    is_dropping = True  # Later bytes would not continue the earlier ones.
                    self.dropped_bytes += len(data)
                else:
                    target.sendall(data)
            target.shutdown(socket.SHUT_WR)

    def disconnect_all(self) -> None:
        """Close all connections."""
        self.dropped_direction = ""
        with self._lock:
            broken, self._sockets = self._sockets, []
            relays, self._relays = self._relays, []
        for sock in broken:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        join_threads(relays)
        for sock in broken:
            sock.close()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        join_threads([self._accepting])
        self._listener.close()
        self.disconnect_all()


@contextlib.contextmanager
def faulty_proxy(address: str) -> Iterator[FaultyProxy]:
    proxy = FaultyProxy(address)
    try:
        yield proxy
    finally:
        proxy.close()
