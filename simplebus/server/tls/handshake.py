"""TLS handshakes, and a binary client's connection that begins with one.

Rule 1: who makes no handshake in time is closed without a word: it waits for TLS, or does not speak
it, and would not understand. Only who begins as a client of version 2 does is told, in clear, what
is spoken here.
Rule 2: a step of a handshake takes long, as other things go: its peer is a guest of the anteroom.
"""

from __future__ import annotations

import contextlib
import re
import socket
from collections.abc import Callable

import trio

from simplebus.core.errors import Reason, RemoteProtocolError
from simplebus.core.limits import HEADER_BYTES
from simplebus.core.protocol import frames
from simplebus.core.protocol.requests import ErrorReply
from simplebus.core.session.session import Session
from simplebus.nats.server.users import names
from simplebus.net.tls import TlsSocket
from simplebus.server.connection import Connection, Door
from simplebus.server.preauth.queue import Guest
from simplebus.server.tls.certificates import Certificates

_CONNECT = re.compile(rb"%c.{%d}\s*\{" % (frames.CONNECT, HEADER_BYTES - 1), re.DOTALL)
"""How a client of version 2 begins."""
_IN_CLEAR = "this port speaks TLS, and the peer began in clear: expected simplebuss://"
_TOLD = frames.encode(
    frames.ERROR,
    content=ErrorReply(code=Reason.TLS_HANDSHAKE, message=_IN_CLEAR, fatal=True).encode(),
)


class HandshakeError(Exception):
    """There is none; says why in words behind "the TLS handshake"."""

    def __init__(self, why: str, opening: bytes) -> None:
        super().__init__(why)
        self.opening = opening
        """What the peer has said first, as far as it was read."""


async def shake_hands(made: Callable[[], TlsSocket], guest: Guest, seconds: float) -> TlsSocket:
    """Make TLS of a guest's socket, and a handshake as a server. Raises HandshakeError."""
    deadline = trio.current_time() + seconds
    tls: TlsSocket | None = None
    try:
        while True:
            await guest.readable(deadline)
            tls = tls or made()  # Nobody who says nothing is worth it.
            with contextlib.suppress(BlockingIOError):
                tls.handshake()
                return tls
            with trio.fail_at(deadline):
                while tls.unsent:
                    await trio.lowlevel.wait_writable(tls.socket)
                    tls.flush()
    except trio.TooSlowError:
        why = f"took longer than {seconds:g} s"
    except OSError as error:
        why = f"failed: {getattr(error, 'reason', None) or error.strerror or error}"
    raise HandshakeError(why, tls.opening if tls is not None else b"")


class SecureConnection(Connection[Session]):
    """Of a binary client, of version 1 or 2, where TLS begins with the first byte."""

    def __init__(
        self,
        sock: socket.socket,
        session: Session,
        door: Door[Session],
        certificates: Certificates,
    ) -> None:
        super().__init__(sock, session, door)
        self._certificates = certificates
        self._is_in_clear = False
        """Whether the peer speaks version 2, and no TLS."""

    def _say_farewell(self) -> bool:
        if not self._is_in_clear:
            return super()._say_farewell()
        try:
            self.socket.send(_TOLD)
            self.socket.shutdown(socket.SHUT_WR)
        except OSError:
            return False
        return True

    def flush(self) -> None:
        if self.tls is not None:  # Nothing is sent in clear.
            super().flush()

    async def begin(self) -> None:
        certificates = self._certificates
        try:
            tls = await shake_hands(
                lambda: TlsSocket(self.socket, certificates.context),
                self.guest,
                certificates.options.seconds,
            )
        except HandshakeError as error:
            self._is_in_clear = _CONNECT.match(error.opening) is not None
            why = _IN_CLEAR if self._is_in_clear else f"the TLS handshake {error}"
            raise RemoteProtocolError(Reason.TLS_HANDSHAKE, why) from None
        self.session.certificate_names = names(tls.certificate() or {})
        self.wire = self.tls = tls
