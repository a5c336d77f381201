"""Server-side TLS handshakes, and binary connections over TLS.

A client without a handshake in time is closed without an error, which it could not understand.
Only a version 2 client that starts in plain text gets an error frame. Handshake steps are slow, so
each one waits for a turn in the pre-authentication queue.
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
from simplebus.core.protocol.opening import WrongProtocolError
from simplebus.core.protocol.requests import ErrorReply
from simplebus.core.session.session import Session
from simplebus.core.users.certificate_names import certificate_names
from simplebus.net.tls import TlsSocket
from simplebus.server.connection import Connection, Listener
from simplebus.server.preauth.queue import PreAuthConnection
from simplebus.server.tls.certificates import ReloadableCertificate

_PLAINTEXT_CONNECT = re.compile(rb"%c.{%d}\s*\{" % (frames.CONNECT, HEADER_BYTES - 1), re.DOTALL)
"""First bytes of a version 2 client without TLS."""
_PLAINTEXT_MESSAGE = (
    "this port requires TLS, but the client sent plain text: expected simplebuss://"
)
_PLAINTEXT_ERROR_FRAME = frames.encode(
    frames.ERROR,
    content=ErrorReply(code=Reason.TLS_HANDSHAKE, message=_PLAINTEXT_MESSAGE, fatal=True).encode(),
)


class HandshakeError(Exception):
    """The handshake failed; the message continues "the TLS handshake"."""

    def __init__(self, reason: str, opening: bytes) -> None:
        super().__init__(reason)
        self.first_bytes = opening
        """First bytes from the client, as far as read."""


async def accept_tls(
    create_tls: Callable[[], TlsSocket], preauth: PreAuthConnection, timeout_seconds: float
) -> TlsSocket:
    """Run the server side of a handshake and return the TLS socket.

    Args:
        create_tls: Wraps the connection's socket. Called when the client has sent data.
        preauth: Queue entry of the connection.
        timeout_seconds: Time limit.

    Raises:
        HandshakeError: The handshake failed or took too long.
    """
    deadline = trio.current_time() + timeout_seconds
    tls: TlsSocket | None = None
    try:
        while True:
            await preauth.wait_readable(deadline)
            tls = tls or create_tls()  # Created only for clients that have sent data.
            with contextlib.suppress(BlockingIOError):
                tls.handshake()
                return tls
            with trio.fail_at(deadline):
                while tls.has_unsent:
                    await trio.lowlevel.wait_writable(tls.socket)
                    tls.flush()
    except trio.TooSlowError:
        reason = f"took longer than {timeout_seconds:g} s"
    except OSError as error:
        reason = f"failed: {getattr(error, 'reason', None) or error.strerror or error}"
    raise HandshakeError(reason, tls.first_bytes if tls is not None else b"")


class TlsConnection(Connection[Session]):
    """A binary client's connection that starts with a TLS handshake."""

    def __init__(
        self,
        sock: socket.socket,
        session: Session,
        listener: Listener[Session],
        certificate: ReloadableCertificate,
    ) -> None:
        super().__init__(sock, session, listener)
        self._certificate = certificate
        self._is_plaintext_client = False
        """True if the client speaks version 2 without TLS."""

    def _send_final_bytes(self) -> bool:
        if not self._is_plaintext_client:
            return super()._send_final_bytes()
        try:
            self.socket.send(_PLAINTEXT_ERROR_FRAME)
            self.socket.shutdown(socket.SHUT_WR)
        except OSError:
            return False
        return True

    def flush(self) -> None:
        if self.tls is not None:  # Nothing is sent in plain text.
            super().flush()

    async def open_transport(self) -> None:
        certificates = self._certificate
        try:
            tls = await accept_tls(
                lambda: TlsSocket(self.socket, certificates.context),
                self.preauth,
                certificates.options.handshake_seconds,
            )
        except HandshakeError as error:
            wrong_port = self._listener.find_wrong_port(error.first_bytes, has_tls=True)
            if isinstance(wrong_port, WrongProtocolError) and wrong_port.reply:
                raise wrong_port from None
            self._is_plaintext_client = _PLAINTEXT_CONNECT.match(error.first_bytes) is not None
            reason = (
                _PLAINTEXT_MESSAGE if self._is_plaintext_client else f"the TLS handshake {error}"
            )
            raise RemoteProtocolError(Reason.TLS_HANDSHAKE, reason) from None
        self.session.set_certificate_names(certificate_names(tls.certificate() or {}))
        self.transport = self.tls = tls
