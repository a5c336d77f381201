"""TLS handshakes, and a binary client's connection that begins with one.

Rule 1: who makes no handshake in time is closed without a word: it waits for TLS, or does not speak
it, and would not understand.
"""

from __future__ import annotations

import socket

import trio

from simplebus.core.errors import Reason, RemoteProtocolError
from simplebus.core.session import Session
from simplebus.nats.certificates import names
from simplebus.server.connection import Connection, Door
from simplebus.server.tls import Certificates
from simplebus.tls import TlsSocket


async def shake_hands(tls: TlsSocket, seconds: float) -> str:
    """Make a handshake as a server. Returns why there is none, in words behind "the TLS handshake";
    empty when it is made."""
    try:
        with trio.move_on_after(seconds):
            while not _is_done(tls):
                if tls.unsent:
                    await trio.lowlevel.wait_writable(tls.socket)
                    tls.flush()
                else:
                    await trio.lowlevel.wait_readable(tls.socket)
            return ""
    except OSError as error:
        return f"failed: {getattr(error, 'reason', None) or error.strerror or error}"
    return f"took longer than {seconds:g} s"


def _is_done(tls: TlsSocket) -> bool:
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

    def flush(self) -> None:
        if self.tls is not None:  # Nothing is sent in clear.
            super().flush()

    async def begin(self) -> None:
        tls = TlsSocket(self.socket, self._certificates.context)
        why = await shake_hands(tls, self._certificates.options.seconds)
        if why:
            raise RemoteProtocolError(Reason.TLS_HANDSHAKE, f"the TLS handshake {why}")
        self.session.certified = names(tls.certificate() or {})
        self.wire = self.tls = tls
