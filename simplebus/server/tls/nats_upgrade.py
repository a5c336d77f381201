"""NATS connections that start TLS, before or after INFO.

Between INFO and the end of the handshake nothing is sent or read in plain text. The time limit for
authentication starts after the handshake. As in nats-server, a client without a handshake gets no
error.
"""

from __future__ import annotations

import contextlib
import socket

import trio

from simplebus.core.errors import Reason
from simplebus.core.users.certificate_names import certificate_names
from simplebus.nats.errors import NatsError
from simplebus.nats.nats_server import NatsServer
from simplebus.nats.server.session import NatsSession
from simplebus.net.tls import TlsSocket
from simplebus.server.connection import Connection, Listener
from simplebus.server.tls.certificates import ReloadableCertificate
from simplebus.server.tls.handshake import HandshakeError, accept_tls

_CLOSE_REASON = "TLS Handshake Failure"
_HANDSHAKE_RECORD_TYPE = 0x16
"""First byte of a TLS client."""


class NatsTlsConnection(Connection[NatsSession]):
    """Connection of a NATS client that must or may use TLS."""

    def __init__(
        self,
        sock: socket.socket,
        session: NatsSession,
        listener: Listener[NatsSession],
        nats_server: NatsServer,
        *,
        certificate: ReloadableCertificate,
        handshake_seconds: float,
    ) -> None:
        super().__init__(sock, session, listener)
        self._nats_server = nats_server
        self._options = certificate.options
        self._certificate = certificate
        self._handshake_seconds = handshake_seconds
        self._is_sending_blocked = self._options.handshake_first
        """True while nothing may be sent."""

    def flush(self) -> None:
        if not self._is_sending_blocked:
            super().flush()

    def _send_final_bytes(self) -> bool:
        return not self._is_sending_blocked and super()._send_final_bytes()

    async def open_transport(self) -> None:
        await self._run_handshake()
        self._nats_server.now = trio.current_time()
        self._nats_server.start_idle_timer(self.session)

    async def _run_handshake(self) -> None:
        """Run the handshake. Raises NatsError if it fails or takes too long."""
        if not self._options.handshake_first:
            self.flush()  # INFO, in plain text.
        if self._options.optional and not await self._client_starts_tls():
            return
        self._is_sending_blocked = True
        await self._flush_info()
        certificates = self._certificate
        try:
            tls = await accept_tls(
                lambda: TlsSocket(self.socket, certificates.context),
                self.preauth,
                self._handshake_seconds,
            )
        except HandshakeError as error:
            self.session.discard_output()
            wrong_port = self._listener.find_wrong_port(error.first_bytes, has_tls=True)
            reason = f"the TLS handshake {error}" if wrong_port is None else wrong_port.sentence
            raise NatsError(Reason.TLS_HANDSHAKE, reason, closed_reason=_CLOSE_REASON) from None
        self.session.certificate_names = certificate_names(tls.certificate() or {})
        self.transport = self.tls = tls
        self._is_sending_blocked = False
        self.flush()

    async def _client_starts_tls(self) -> bool:
        """Return True if a client that may use TLS starts it."""
        with contextlib.suppress(OSError, trio.TooSlowError):
            await self.preauth.wait_readable(trio.current_time() + self._handshake_seconds)
            first = self.socket.recv(1, socket.MSG_PEEK)
            return bool(first) and first[0] == _HANDSHAKE_RECORD_TYPE
        return False  # If the client has closed the connection, the next read detects that.

    async def _flush_info(self) -> None:
        """Send the rest of INFO before the handshake."""
        with trio.move_on_after(self._handshake_seconds):
            while not self.session.outbox.is_idle and not self._options.handshake_first:
                await trio.lowlevel.wait_writable(self.socket)
                self._send()
