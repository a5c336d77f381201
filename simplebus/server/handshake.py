"""TLS handshakes, and a binary client's connection that begins with one.

Rule 1: who makes no handshake in time is closed without a word: it waits for TLS, or does not speak
it, and would not understand. Only who begins as a client of version 2 does is told, in clear, what
is spoken here.
Rule 2: a step of a handshake takes long, as other things go, and so does its end. One is taken at a
time, and others have their turn between any two: a thousand that come, or go, at once hold up
nobody who is inside.
"""

from __future__ import annotations

import re
import socket

import trio

from simplebus.core import frames
from simplebus.core.errors import Reason, RemoteProtocolError
from simplebus.core.limits import HEADER_BYTES
from simplebus.core.requests import ErrorReply
from simplebus.core.session import Session
from simplebus.nats.certificates import names
from simplebus.server.connection import Connection, Door
from simplebus.server.tls import Certificates
from simplebus.tls import TlsSocket

_CONNECT = re.compile(rb"%c.{%d}\s*\{" % (frames.CONNECT, HEADER_BYTES - 1), re.DOTALL)
"""How a client of version 2 begins."""
_IN_CLEAR = "this port speaks TLS, and the peer began in clear: expected simplebuss://"
_TOLD = frames.encode(
    frames.ERROR,
    content=ErrorReply(code=Reason.TLS_HANDSHAKE, message=_IN_CLEAR, fatal=True).encode(),
)


async def shake_hands(tls: TlsSocket, seconds: float, turn: trio.Lock) -> str:
    """Make a handshake as a server; each of its steps needs the lock. Returns why there is none, in
    words behind "the TLS handshake"; empty when it is made."""
    try:
        with trio.move_on_after(seconds):
            while not await _is_done(tls, turn):
                if tls.unsent:
                    await trio.lowlevel.wait_writable(tls.socket)
                    tls.flush()
                else:
                    await trio.lowlevel.wait_readable(tls.socket)
            return ""
        why = f"took longer than {seconds:g} s"
    except OSError as error:
        why = f"failed: {getattr(error, 'reason', None) or error.strerror or error}"
    async with turn:  # Whoever is told closes the connection at once: the next one waits for that.
        return why


async def _is_done(tls: TlsSocket, turn: trio.Lock) -> bool:
    async with turn:
        try:
            tls.handshake()
        except BlockingIOError:
            return False
        return True


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
        tls = TlsSocket(self.socket, self._certificates.context)
        why = await shake_hands(tls, self._certificates.options.seconds, self._certificates.turn)
        if why:
            self._is_in_clear = _CONNECT.match(tls.opening) is not None
            if self._is_in_clear:
                raise RemoteProtocolError(Reason.TLS_HANDSHAKE, _IN_CLEAR)
            raise RemoteProtocolError(Reason.TLS_HANDSHAKE, f"the TLS handshake {why}")
        self.session.certified = names(tls.certificate() or {})
        self.wire = self.tls = tls
