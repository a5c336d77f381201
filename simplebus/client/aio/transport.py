"""Where a bus is, and the bytes that go there and come back: all that the async wire needs.

This is the seam for who wants to join a client and a bus without a socket. A `Place` gives a fresh
`Link` on every call; the wire sends and receives on it until one of them ends, and closes it.

Rule 1: this file alone knows of sockets and of addresses that are looked up.
Rule 2: whatever a link raises but OSError is a fault of ours. OSError says that the link is gone,
and RemoteProtocolError that the peer is to blame.
"""

from __future__ import annotations

import socket
from typing import Protocol

import anyio
import anyio.lowlevel

from simplebus.client import addresses, fork_safety
from simplebus.client.addresses import Address
from simplebus.client.core.client import ClientCore
from simplebus.client.credentials import Access, continue_handshake, start_tls
from simplebus.core.errors import BusConnectionError, RemoteProtocolError
from simplebus.core.protocol.receive_buffer import ReceiveBuffer
from simplebus.net.tls import TlsSocket, has_unread, is_flushed


class Transport(Protocol):
    """The bytes of one connection, both ways."""

    def send(self, data: memoryview) -> int:
        """Take what can be taken now, without waiting; 0 when nothing can."""

    def flush(self) -> bool:
        """Whether all that `send` took is on its way; else `wait_sendable` and ask again."""

    async def wait_sendable(self) -> None:
        """Return when `send` may take something again."""

    async def receive_into(self, space: memoryview) -> int:
        """Put what came there, waiting for at least one byte; 0 at the end."""

    def send_eof(self) -> None:
        """Nothing more will be sent: the bus reads up to here, and ends its side."""

    def close(self) -> None:
        """Let go of it, now."""


class Endpoint(Protocol):
    """Where a bus is. `str` of it is what errors call the bus."""

    async def open(self) -> Transport:
        """A link to the bus. Raises BusConnectionError. It is cancelled when it takes too long."""


class SocketEndpoint:
    """A bus that listens at an address."""

    def __init__(self, address: Address, access: Access | None = None) -> None:
        """`access` says whom it trusts that comes there over TLS."""
        self._address = address
        self._access = access

    async def open(self) -> SocketTransport:
        """A connected socket."""
        where = self._address
        problem: OSError | None = None
        try:
            infos = addresses.resolve_numeric(where) or await anyio.getaddrinfo(
                where.host, where.port, type=socket.SOCK_STREAM
            )
        except OSError as error:
            raise addresses.connect_error(where, error) from error
        for info in infos:
            try:
                sock = addresses.start_connect(info)
            except OSError as error:
                problem = error
                continue
            try:
                await anyio.wait_writable(sock)
                addresses.finish_connect(sock)
            except BaseException as error:
                sock.close()
                if not isinstance(error, OSError):
                    raise
                problem = error
            else:
                return await self._start_transport(sock)
        raise addresses.connect_error(where, problem) from problem

    async def _start_transport(self, sock: socket.socket) -> SocketTransport:
        """A link on a connected socket, over TLS where the address says so."""
        where = self._address
        if not where.is_secure:
            return SocketTransport(sock)
        try:
            tls = start_tls(sock, where, self._access)
            while not continue_handshake(tls):
                if tls.unsent:
                    await anyio.wait_writable(sock)
                    tls.flush()
                else:
                    await anyio.wait_readable(sock)
        except BaseException as error:
            sock.close()
            if not isinstance(error, OSError):
                raise
            raise addresses.tls_error(where, error) from error
        return SocketTransport(sock, tls)

    def __str__(self) -> str:
        return str(self._address)


class SocketTransport:
    """A connected, non-blocking socket, or TLS on it."""

    def __init__(self, sock: socket.socket, tls: TlsSocket | None = None) -> None:
        self._socket = sock
        self._stream: socket.socket | TlsSocket = tls or sock
        fork_safety.register(self)

    def send(self, data: memoryview) -> int:
        try:
            return self._stream.send(data)
        except BlockingIOError:
            return 0

    def flush(self) -> bool:
        return is_flushed(self._stream)

    async def wait_sendable(self) -> None:
        await anyio.wait_writable(self._socket)

    async def receive_into(self, space: memoryview) -> int:
        while True:
            if has_unread(self._stream):
                await anyio.lowlevel.checkpoint()
            else:
                await anyio.wait_readable(self._socket)
            try:
                return self._stream.recv_into(space)
            except BlockingIOError:
                continue

    def end(self) -> None:
        self._stream.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self._stream.close()

    def disown(self, end: BusConnectionError) -> None:
        """A child's copy would keep the connection open when this process has ended it."""
        self._socket.close()


async def open_transport(place: Endpoint, core: ClientCore, buffer: ReceiveBuffer, seconds: float) -> Transport:
    """A link on which the bus has answered the Connect. Raises BusConnectionError."""
    outgoing = core.send_queue
    link: Transport | None = None
    is_greeted = False
    try:
        with anyio.move_on_after(seconds):
            link = await place.open()
            asked = core.connection_made(anyio.current_time())
            while not asked.is_done:
                while data := outgoing.peek():
                    taken = link.send(data)
                    outgoing.mark_sent(taken)
                    if not taken:
                        await link.wait_sendable()
                while not link.flush():
                    await link.wait_sendable()
                count = await link.receive_into(buffer.writable)
                if not count:
                    raise addresses.connection_lost_error(place, None)
                core.receive(buffer, count, anyio.current_time())
            if asked.error is not None:
                raise addresses.connection_lost_error(place, asked.error)
            is_greeted = True
    except BusConnectionError:
        raise
    except (OSError, RemoteProtocolError) as error:
        raise addresses.connection_lost_error(place, error) from error
    finally:
        if link is not None and not is_greeted:
            core.connection_lost()
            link.close()
    if link is None or not is_greeted:
        raise addresses.connect_timeout_error(place, seconds, is_connected=link is not None)
    return link
