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
from simplebus.nats.server.users import certificate_names
from simplebus.net.tls import TlsSocket
from simplebus.server.connection import Connection, Door
from simplebus.server.preauth.queue import Guest
from simplebus.server.tls.certificates import ReloadableCertificate

_PLAINTEXT_CONNECT = re.compile(rb"%c.{%d}\s*\{" % (frames.CONNECT, HEADER_BYTES - 1), re.DOTALL)
"""How a client of version 2 begins."""
_PLAINTEXT_MESSAGE = "this port speaks TLS, and the peer began in clear: expected simplebuss://"
_PLAINTEXT_ERROR_FRAME = frames.encode(
    frames.ERROR,
    content=ErrorReply(code=Reason.TLS_HANDSHAKE, message=_PLAINTEXT_MESSAGE, fatal=True).encode(),
)


class HandshakeError(Exception):
    """There is none; says why in words behind "the TLS handshake"."""

    def __init__(self, why: str, opening: bytes) -> None:
        super().__init__(why)
        self.first_bytes = opening
        """What the peer has said first, as far as it was read."""


async def accept_tls(create_tls: Callable[[], TlsSocket], preauth: Guest, timeout_seconds: float) -> TlsSocket:
    """Make TLS of a guest's socket, and a handshake as a server. Raises HandshakeError."""
    deadline = trio.current_time() + timeout_seconds
    tls: TlsSocket | None = None
    try:
        while True:
            await preauth.readable(deadline)
            tls = tls or create_tls()  # Nobody who says nothing is worth it.
            with contextlib.suppress(BlockingIOError):
                tls.handshake()
                return tls
            with trio.fail_at(deadline):
                while tls.unsent:
                    await trio.lowlevel.wait_writable(tls.socket)
                    tls.flush()
    except trio.TooSlowError:
        why = f"took longer than {timeout_seconds:g} s"
    except OSError as error:
        why = f"failed: {getattr(error, 'reason', None) or error.strerror or error}"
    raise HandshakeError(why, tls.opening if tls is not None else b"")


class TlsConnection(Connection[Session]):
    """Of a binary client, of version 1 or 2, where TLS begins with the first byte."""

    def __init__(
        self,
        sock: socket.socket,
        session: Session,
        listener: Door[Session],
        certificate: ReloadableCertificate,
    ) -> None:
        super().__init__(sock, session, listener)
        self._certificate = certificate
        self._is_plaintext_client = False
        """Whether the peer speaks version 2, and no TLS."""

    def _say_farewell(self) -> bool:
        if not self._is_plaintext_client:
            return super()._say_farewell()
        try:
            self.socket.send(_PLAINTEXT_ERROR_FRAME)
            self.socket.shutdown(socket.SHUT_WR)
        except OSError:
            return False
        return True

    def flush(self) -> None:
        if self.tls is not None:  # Nothing is sent in clear.
            super().flush()

    async def begin(self) -> None:
        certificates = self._certificate
        try:
            tls = await accept_tls(
                lambda: TlsSocket(self.socket, certificates.context),
                self.guest,
                certificates.options.handshake_seconds,
            )
        except HandshakeError as error:
            self._is_plaintext_client = _PLAINTEXT_CONNECT.match(error.first_bytes) is not None
            why = _PLAINTEXT_MESSAGE if self._is_plaintext_client else f"the TLS handshake {error}"
            raise RemoteProtocolError(Reason.TLS_HANDSHAKE, why) from None
        self.session.certificate_names = certificate_names(tls.certificate() or {})
        self.wire = self.tls = tls
