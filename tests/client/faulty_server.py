"""Peers that behave as no bus does, or that stand between a client and one, each in a thread.

Rule 1: a test says what is odd; everything else is as a bus would do it.
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
"""What it grants. Who has published so much and WRITE_BYTES, and heard of no confirm, waits."""

Answer = Callable[[int, int, int, int, bytes], bytes | None]
"""From a frame's type, class, message id, timer index and content to what is sent; None for the
end of the connection."""


class FalseBus:
    """A listener that answers as its test says, and as a bus would where that returns b""."""

    def __init__(self, answer: Answer | None = None, *, credit: int = CREDIT_BYTES) -> None:
        self.connects = 0
        """Connections that were made."""
        self.heard: list[tuple[int, int, int, int, bytes]] = []
        self.peers: list[socket.socket] = []
        self.says_nothing = False
        """Whether it reads and answers nothing at all."""
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
                self.connects += 1
                self.peers.append(peer)
                if not self.says_nothing:
                    self._start(self._serve, peer)

    def _serve(self, peer: socket.socket) -> None:
        waiting = b""
        with contextlib.suppress(OSError), peer:
            while data := peer.recv(1 << 16):
                waiting += data
                while (end := waiting.find(DELIMITER, HEADER_BYTES)) >= 0:
                    frame, waiting = waiting[:end], waiting[end + len(DELIMITER) :]
                    heard = (*HEADER.unpack(frame[:HEADER_BYTES]), frame[HEADER_BYTES:])
                    self.heard.append(heard)
                    reply = self._answer(*heard) if self._answer else b""
                    if reply is None:
                        return
                    peer.sendall(reply or self.as_usual(*heard))

    def as_usual(self, kind: int, class_id: int, number: int, timer: int, content: bytes) -> bytes:
        """What a bus would say."""
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
        """Break every connection. More may come."""
        for peer in list(self.peers):
            with contextlib.suppress(OSError):
                peer.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        if self._listener.fileno() >= 0:
            self._listener.shutdown(socket.SHUT_RDWR)
            ended(self._threads[:1])  # Who is accepted meanwhile is among the peers then.
            self._listener.close()
        self.hang_up()
        ended(self._threads)
        for peer in self.peers:
            peer.close()


def ended(threads: Iterable[threading.Thread]) -> None:
    """Wait until they are, before what they use is closed: its number may be another's then."""
    for thread in threads:
        thread.join(PATIENCE_SECONDS)
        assert not thread.is_alive()


def confirm(next_number: int) -> bytes:
    return frames.encode(frames.CONFIRM, message_id=next_number)


def refuse(
    kind: int, number: int, code: str, *, count: int = 1, fatal: bool = False, class_id: int = 0
) -> bytes:
    """An Error frame about a frame of this type and number."""
    content = ErrorReply(code=code, message="not today", fatal=fatal, count=count).encode()
    return frames.encode(
        frames.ERROR, class_id=class_id, message_id=number, timer_index=kind, content=content
    )


@contextlib.contextmanager
def false_bus(answer: Answer | None = None, *, credit: int = CREDIT_BYTES) -> Iterator[FalseBus]:
    bus = FalseBus(answer, credit=credit)
    try:
        yield bus
    finally:
        bus.close()


@contextlib.contextmanager
def deaf_listener() -> Iterator[FalseBus]:
    """A listener that accepts, reads nothing and says nothing."""
    with false_bus() as bus:
        bus.says_nothing = True
        yield bus


class Proxy:
    """A way to a bus that can lose what is said, stall, be cut, and lead to another bus."""

    def __init__(self, address: str) -> None:
        self.loses = ""
        """"what the bus says" or "what it hears" is lost from now on, until it is cut."""
        self.lost = 0
        """Bytes that were lost."""
        self.is_shut = False
        """Whether nobody gets through."""
        self.turned_away = 0
        """How many did not get through."""
        self.stalls_after: int | None = None
        """Bytes of the bus that a connection lets through; it keeps the others to itself."""
        self.stalled: list[int] = []
        """The ports of the clients that wait for such bytes."""
        self.lead_to(address)
        self._lock = threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._sockets: list[socket.socket] = []
        self._relays: list[threading.Thread] = []
        self._accepting = threading.Thread(target=self._accept, daemon=True)
        self._accepting.start()

    def lead_to(self, address: str) -> None:
        """From now on who comes gets to this bus."""
        self._bus = address.removeprefix("simplebus://").rsplit(":", 1)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                try:
                    if self.is_shut:
                        raise ConnectionRefusedError
                    bus = socket.create_connection((self._bus[0], int(self._bus[1])))
                except OSError:
                    client.close()
                    self.turned_away += 1
                    continue
                with self._lock:
                    self._sockets += [client, bus]
                    for way in ((client, bus, "what it hears"), (bus, client, "what the bus says")):
                        relay = threading.Thread(target=self._relay, args=way, daemon=True)
                        relay.start()
                        self._relays.append(relay)

    def _relay(self, source: socket.socket, target: socket.socket, what: str) -> None:
        relayed = 0
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                relayed += len(data)
                most = self.stalls_after if what == "what the bus says" else None
                if most is not None and relayed > most:
                    self.stalled.append(target.getpeername()[1])
                    while source.recv(1 << 16):  # Until it is cut.
                        pass
                elif self.loses == what:
                    self.lost += len(data)
                else:
                    target.sendall(data)
            target.shutdown(socket.SHUT_WR)

    def cut(self) -> None:
        """Break every connection."""
        self.loses = ""
        with self._lock:
            broken, self._sockets = self._sockets, []
            relays, self._relays = self._relays, []
        for sock in broken:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        ended(relays)
        for sock in broken:
            sock.close()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        ended([self._accepting])
        self._listener.close()
        self.cut()


@contextlib.contextmanager
def proxy(address: str) -> Iterator[Proxy]:
    way = Proxy(address)
    try:
        yield way
    finally:
        way.close()
