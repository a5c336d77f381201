"""Connections of the async client to a bus: endpoints and their transports.

To connect a client and a bus without a socket, implement `Endpoint` and `Transport`. An endpoint
opens a new transport for every connection. The client sends and receives on it until one side ends
the connection, and then closes it.

Within the async client, only this module uses sockets and resolves addresses. A transport raises
OSError when it is broken and RemoteProtocolError when the peer violates the protocol.
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
    """Byte stream of one connection, in both directions."""

    def send(self, data: memoryview) -> int:
        """Accept bytes without waiting. Returns their number, 0 if none can be accepted now."""

    def flush(self) -> bool:
        """Return True if all bytes that `send` accepted were passed on. Otherwise await
        `wait_sendable` and call it again.
        """

    async def wait_sendable(self) -> None:
        """Return when `send` may accept bytes again."""

    async def receive_into(self, space: memoryview) -> int:
        """Receive at least one byte into `space`. Returns the number of bytes, 0 at the end."""

    def send_eof(self) -> None:
        """End the sending side. The bus reads up to here and then ends its side."""

    def close(self) -> None:
        """Close both sides immediately."""


class Endpoint(Protocol):
    """Location of a bus. Its `str` is the name of the bus in error messages."""

    async def open(self) -> Transport:
        """Open a transport to the bus. Raises BusConnectionError. The caller cancels it after a
        timeout.
        """


class SocketEndpoint:
    """Bus that listens at a TCP address."""

    def __init__(self, address: Address, access: Access | None = None) -> None:
        """`access` contains the TLS context for a secure address."""
        self._address = address
        self._access = access

    async def open(self) -> SocketTransport:
        """Connect a socket, and do the TLS handshake if the address is secure."""
        address = self._address
        last_error: OSError | None = None
        try:
            infos = addresses.resolve_numeric(address) or await anyio.getaddrinfo(
                address.host, address.port, type=socket.SOCK_STREAM
            )
        except OSError as error:
            raise addresses.connect_error(address, error) from error
        for info in infos:
            try:
                sock = addresses.start_connect(info)
            except OSError as error:
                last_error = error
                continue
            try:
                await anyio.wait_writable(sock)
                addresses.finish_connect(sock)
            except BaseException as error:
                sock.close()
                if not isinstance(error, OSError):
                    raise
                last_error = error
            else:
                return await self._start_transport(sock)
        raise addresses.connect_error(address, last_error) from last_error

    async def _start_transport(self, sock: socket.socket) -> SocketTransport:
        address = self._address
        if not address.is_secure:
            return SocketTransport(sock)
        tls: TlsSocket | None = None
        try:
            tls = start_tls(sock, address, self._access)
            while not continue_handshake(tls):
                if tls.has_unsent:
                    await anyio.wait_writable(sock)
                    tls.flush()
                else:
                    await anyio.wait_readable(sock)
        except BaseException as error:
            sock.close()
            if not isinstance(error, OSError):
                raise
            first_bytes = tls.first_bytes if tls is not None else b""
            raise addresses.tls_error(address, error, first_bytes) from error
        return SocketTransport(sock, tls)

    def __str__(self) -> str:
        return str(self._address)


class SocketTransport:
    """Connected, non-blocking socket, with or without TLS."""

    def __init__(self, sock: socket.socket, tls: TlsSocket | None = None) -> None:
        self.socket = sock
        """The socket, below TLS if there is any."""
        self._tls = tls
        self._stream: socket.socket | TlsSocket = tls or sock
        fork_safety.register(self)

    def send(self, data: memoryview) -> int:
        try:
            return self._stream.send(data)
        except BlockingIOError:
            return 0

    def flush(self) -> bool:
        return self._tls is None or is_flushed(self._tls)

    async def wait_sendable(self) -> None:
        await anyio.wait_writable(self.socket)

    async def receive_into(self, space: memoryview) -> int:
        while True:
            if self.has_unread:
                await anyio.lowlevel.checkpoint()
            else:
                await anyio.wait_readable(self.socket)
            count = self.receive_now(space)
            if count is not None:
                return count

    def receive_now(self, space: memoryview) -> int | None:
        """Receive without waiting. Returns the number of bytes, 0 at the end, None if there are
        none yet.
        """
        try:
            return self._stream.recv_into(space)
        except BlockingIOError:
            return None

    @property
    def has_unread(self) -> bool:
        """True if data may be received although the socket is not readable."""
        return self._tls is not None and has_unread(self._tls)

    def send_eof(self) -> None:
        self._stream.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self._stream.close()

    def disown(self, end: BusConnectionError) -> None:
        """Close this process's copy of the socket after a fork. Otherwise the copy would keep the
        connection open after the parent has closed it.
        """
        self.socket.close()


async def open_transport(
    endpoint: Endpoint, core: ClientCore, buffer: ReceiveBuffer, seconds: float
) -> Transport:
    """Open a transport and complete the handshake with the bus. Raises BusConnectionError."""
    outgoing = core.send_queue
    transport: Transport | None = None
    is_greeted = False
    try:
        with anyio.move_on_after(seconds):
            transport = await endpoint.open()
            connect_request = core.connection_made(anyio.current_time())
            while not connect_request.is_done:
                while data := outgoing.peek():
                    sent_count = transport.send(data)
                    outgoing.mark_sent(sent_count)
                    if not sent_count:
                        await transport.wait_sendable()
                while not transport.flush():
                    await transport.wait_sendable()
                count = await transport.receive_into(buffer.writable)
                if not count:
                    raise addresses.connection_lost_error(endpoint, None)
                core.receive(buffer, count, anyio.current_time())
            if connect_request.error is not None:
                raise addresses.connection_lost_error(endpoint, connect_request.error)
            is_greeted = True
    except BusConnectionError:
        raise
    except (OSError, RemoteProtocolError) as error:
        raise addresses.connection_lost_error(endpoint, error) from error
    finally:
        if transport is not None and not is_greeted:
            core.connection_lost()
            transport.close()
    if transport is None or not is_greeted:
        raise addresses.connect_timeout_error(endpoint, seconds, is_connected=transport is not None)
    return transport
