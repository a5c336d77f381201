"""A peer of the HTTP door, as bytes: in clear or over TLS, as a guest until it is known.

Rule 1: until it is known, it hears and is heard in its turn.
Rule 2: what is sent last arrives: bytes that are unread would take it back.
"""

from __future__ import annotations

import socket
import ssl
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import trio

from simplebus.net.tls import TlsSocket, has_unread, is_flushed
from simplebus.server.preauth.queue import Guest
from simplebus.server.tls.handshake import accept_tls

_READ_BYTES = 8 * 1024


class HttpStream:
    """Resources: owns the socket. Errors: every verb raises OSError, and trio.TooSlowError for a
    peer that is too slow."""

    def __init__(
        self, sock: socket.socket, guest: Guest, tls: Callable[[], ssl.SSLContext] | None
    ) -> None:
        """`tls` gives what the socket is wrapped with; None for HTTP in clear."""
        self.guest = guest
        self.is_known = False
        """Whether it has shown who it is, where it has to."""
        self._wire: socket.socket | TlsSocket = sock
        self._socket = sock
        self._context = tls
        self._space = memoryview(bytearray(_READ_BYTES))

    async def begin(self, seconds: float) -> None:
        """Make the handshake, if there is to be one. Raises HandshakeError."""
        made = self._context
        if made is not None:
            self._wire = await accept_tls(
                lambda: TlsSocket(self._socket, made()), self.guest, seconds
            )

    def certificate(self) -> dict[str, Any]:
        """That the peer has shown, as `ssl.SSLSocket.getpeercert`; empty for none."""
        found = self._wire.certificate() if isinstance(self._wire, TlsSocket) else None
        return found or {}

    async def turn(self) -> None:
        """What comes next takes long: until it is known, it waits for its turn."""
        if not self.is_known:
            await self.guest.turn()

    async def receive(self, deadline: float) -> bytes:
        """Some bytes; empty at the end."""
        while True:
            await self._readable(deadline)
            with suppress(BlockingIOError):
                return bytes(self._space[: self._wire.recv_into(self._space)])

    async def _readable(self, deadline: float) -> None:
        if not self.is_known:
            is_here = has_unread(self._wire)
            await (self.guest.turn() if is_here else self.guest.readable(deadline))
        elif has_unread(self._wire):
            await trio.lowlevel.checkpoint()
        else:
            with trio.fail_at(deadline):
                await trio.lowlevel.wait_readable(self._socket)

    async def send(self, data: bytes, seconds: float) -> None:
        """Send it all, in so many seconds."""
        rest = memoryview(data)
        with trio.fail_after(seconds):
            await trio.lowlevel.checkpoint()
            while True:
                with suppress(BlockingIOError):
                    while rest:
                        rest = rest[self._wire.send(rest) :]
                    if is_flushed(self._wire):
                        return
                await trio.lowlevel.wait_writable(self._socket)

    async def end(self) -> None:
        """Say that nothing more is sent, and let go of what still comes."""
        self._wire.shutdown(socket.SHUT_WR)
        while True:
            await trio.lowlevel.wait_readable(self._socket)
            if not self._socket.recv(_READ_BYTES):
                return

    def close(self) -> None:
        """Close the socket, whatever is under way."""
        self.guest.leave()
        trio.lowlevel.notify_closing(self._socket)
        with suppress(OSError):
            self._wire.close()
