"""A NATS client's connection that goes over to TLS, before INFO or behind it.

Rule 1: between INFO and the end of the handshake nothing is sent in clear, nor is anything read.
Rule 2: the time in which it is to say who it is begins behind the handshake.
Rule 3: who makes no handshake is told nothing, as by the reference server: it waits for TLS, and
would not understand.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Mapping
from typing import TYPE_CHECKING

import trio

from simplebus.core.errors import Reason
from simplebus.nats.errors import NatsError
from simplebus.nats.server.server import Front
from simplebus.nats.server.session import NatsSession
from simplebus.nats.server.users import names, user_of
from simplebus.net.tls import TlsSocket
from simplebus.server.connection import Connection
from simplebus.server.tls.certificates import Certificates
from simplebus.server.tls.handshake import HandshakeError, shake_hands

if TYPE_CHECKING:
    from simplebus.server.nats_listener import NatsDoor

_CLOSED = "TLS Handshake Failure"
_HANDSHAKE = 0x16
"""The first byte of a TLS client."""


class TlsConnection(Connection[NatsSession]):
    """Of a client that uses TLS, or may."""

    def __init__(
        self,
        sock: socket.socket,
        session: NatsSession,
        door: NatsDoor,
        front: Front,
        *,
        certificates: Certificates,
        users: Mapping[str, str],
        seconds: float,
    ) -> None:
        """`users` are those who may be mapped to, see `certificates.by_spelling`."""
        super().__init__(sock, session, door)
        self._front = front
        self._options = certificates.options
        self._certificates = certificates
        self._users = users
        self._seconds = seconds
        self._holds = self._options.handshake_first
        """Whether nothing may be sent."""

    def flush(self) -> None:
        if not self._holds:
            super().flush()

    def _say_farewell(self) -> bool:
        return not self._holds and super()._say_farewell()

    async def begin(self) -> None:
        await self._secure()
        self._front.now = trio.current_time()
        self._front.start(self.session)

    async def _secure(self) -> None:
        """Make the handshake. Raises NatsError when there is none in time."""
        if not self._options.handshake_first:
            self.flush()  # INFO, in clear.
        if self._options.optional and not await self._starts_tls():
            return
        self._holds = True
        await self._finish_info()
        certificates = self._certificates
        try:
            tls = await shake_hands(
                lambda: TlsSocket(self.socket, certificates.context), self.guest, self._seconds
            )
        except HandshakeError as error:
            self.session.forget_all()
            raise NatsError(
                Reason.TLS_HANDSHAKE, f"the TLS handshake {error}", closed=_CLOSED
            ) from None
        certificate = tls.certificate() or {}
        self.session.certificate_names = names(certificate)
        if self._options.verify_and_map:
            self.session.certified = user_of(certificate, self._users)
        self.wire = self.tls = tls
        self._holds = False
        self.flush()

    async def _starts_tls(self) -> bool:
        """Whether a client that may use TLS does."""
        with contextlib.suppress(OSError, trio.TooSlowError):
            await self.guest.readable(trio.current_time() + self._seconds)
            first = self.socket.recv(1, socket.MSG_PEEK)
            return bool(first) and first[0] == _HANDSHAKE
        return False  # If it is gone, whoever reads on will notice.

    async def _finish_info(self) -> None:
        """What is still to be sent of INFO goes first."""
        with trio.move_on_after(self._seconds):
            while not self.session.outbox.idle and not self._options.handshake_first:
                await trio.lowlevel.wait_writable(self.socket)
                self._send()
