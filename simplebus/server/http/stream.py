"""Bytes of one HTTP connection, with or without TLS.

Until the client is authenticated, reads wait for a turn in the pre-authentication queue.
"""

from __future__ import annotations

import socket
import ssl
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import trio

from simplebus.net.tls import TlsSocket, has_unread, is_flushed
from simplebus.server.preauth.queue import PreAuthConnection
from simplebus.server.tls.handshake import accept_tls

_READ_BYTES = 8 * 1024


class HttpStream:
    """The transport of an HTTP connection. Owns the socket.

    All methods raise OSError, or trio.TooSlowError for a client that is too slow.
    """

    def __init__(
        self,
        sock: socket.socket,
        preauth: PreAuthConnection,
        tls: Callable[[], ssl.SSLContext] | None,
    ) -> None:
        """`tls` returns the SSL context for the socket; None for plain HTTP."""
        self.preauth = preauth
        self.is_authenticated = False
        """True if the client is authenticated, or authentication is off."""
        self._wire: socket.socket | TlsSocket = sock
        self._socket = sock
        self._create_context = tls
        self._space = memoryview(bytearray(_READ_BYTES))

    async def open_transport(self, timeout_seconds: float) -> None:
        """Run the TLS handshake, if any. Raises HandshakeError."""
        create_context = self._create_context
        if create_context is not None:
            self._wire = await accept_tls(
                lambda: TlsSocket(self._socket, create_context()), self.preauth, timeout_seconds
            )

    def peer_certificate(self) -> dict[str, Any]:
        """Return the client certificate as `ssl.SSLSocket.getpeercert` does; empty if there is
        none.
        """
        peer_certificate = self._wire.certificate() if isinstance(self._wire, TlsSocket) else None
        return peer_certificate or {}

    async def wait_turn(self) -> None:
        """Wait for a turn before a step that takes long, unless the client is authenticated."""
        if not self.is_authenticated:
            await self.preauth.wait_turn()

    async def receive(self, deadline: float) -> bytes:
        """Return received bytes; empty at the end of the stream."""
        while True:
            await self._readable(deadline)
            with suppress(BlockingIOError):
                return bytes(self._space[: self._wire.recv_into(self._space)])

    async def _readable(self, deadline: float) -> None:
        if not self.is_authenticated:
            is_here = has_unread(self._wire)
            await (self.preauth.wait_turn() if is_here else self.preauth.wait_readable(deadline))
        elif has_unread(self._wire):
            await trio.lowlevel.checkpoint()
        else:
            with trio.fail_at(deadline):
                await trio.lowlevel.wait_readable(self._socket)

    async def send(self, data: bytes, timeout_seconds: float) -> None:
        """Send all of `data` within the time limit."""
        remaining = memoryview(data)
        with trio.fail_after(timeout_seconds):
            await trio.lowlevel.checkpoint()
            while True:
                with suppress(BlockingIOError):
                    while remaining:
                        remaining = remaining[self._wire.send(remaining) :]
                    if is_flushed(self._wire):
                        return
                await trio.lowlevel.wait_writable(self._socket)

    def send_plaintext(self, data: bytes) -> None:
        """Send a short text as far as the socket accepts it, below TLS if there is any."""
        with suppress(OSError):
            self._socket.send(data)

    async def finish(self) -> None:
        """Shut down the sending side and discard input until the client closes.

        Closing with unread input would reset the connection, and the response would be lost.
        """
        self._wire.shutdown(socket.SHUT_WR)
        while True:
            await trio.lowlevel.wait_readable(self._socket)
            if not self._socket.recv(_READ_BYTES):
                return

    def close(self) -> None:
        """Close the socket at once."""
        self.preauth.leave()
        trio.lowlevel.notify_closing(self._socket)
        with suppress(OSError):
            self._wire.close()
