"""TLS for a door: what it is given, and a socket that speaks it with the verbs of a plain one.

Rule 1: never wait. What cannot go on raises BlockingIOError, as a plain socket does; what was taken
from the caller and is not on the wire yet is `unsent`, what came and was not asked for `unread`.
Rule 2: a certificate or key that cannot be used is a sentence that names the file.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

# What is encrypted at once, and read from the wire at once: a few records.
_PIECE_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class TlsOptions:
    """How a door speaks TLS."""

    cert: Path
    """Its certificate, and those between it and a root, as PEM."""
    key: Path
    """The certificate's private key, as PEM, without a password."""
    ca: Path | None = None
    """Who may have signed clients' certificates, as PEM; None for whom the system trusts."""
    verify: bool = False
    """Whether clients must have a certificate."""
    verify_and_map: bool = False
    """Whether that certificate also says which user they are."""
    handshake_first: bool = False
    """Whether TLS begins with the first byte, not behind INFO."""
    optional: bool = False
    """Whether clients may also go on without."""

    @property
    def wants_certificate(self) -> bool:
        return self.verify or self.verify_and_map


def context(options: TlsOptions) -> ssl.SSLContext:
    """What sockets are wrapped with. Raises OSError, naming the file that is no good."""
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    made.minimum_version = ssl.TLSVersion.TLSv1_2
    made.options |= ssl.OP_NO_RENEGOTIATION
    for path, what in (
        (options.cert, "certificate"),
        (options.key, "key"),
        (options.ca, "CA certificate"),
    ):
        if path is not None:
            _check_readable(path, what)
    try:
        made.load_cert_chain(options.cert, options.key, password=_no_password)
    except ssl.SSLError as error:
        raise OSError(
            f"{options.cert} and {options.key} are no certificate and its key, as PEM: "
            f"{_reason(error)}"
        ) from None
    except _PasswordWantedError:
        raise OSError(f"the key {options.key} has a password; write it without one") from None
    if options.wants_certificate:
        made.verify_mode = ssl.CERT_REQUIRED
        if options.ca is None:
            made.load_default_certs(ssl.Purpose.CLIENT_AUTH)
    if options.ca is not None:
        try:
            made.load_verify_locations(options.ca)
        except ssl.SSLError as error:
            raise OSError(f"{options.ca} holds no certificates as PEM: {_reason(error)}") from None
    return made


class _PasswordWantedError(Exception):
    """A key is encrypted. Without a way to say so, OpenSSL would ask on the terminal."""


def _no_password() -> NoReturn:
    raise _PasswordWantedError


def _check_readable(path: Path, what: str) -> None:
    try:
        with open(path, "rb"):
            pass
    except OSError as error:
        raise OSError(error.errno, f"the {what} {path} cannot be read: {error.strerror}") from None


def _reason(error: ssl.SSLError) -> str:
    """What OpenSSL has against it, in words."""
    words = (error.reason or str(error)).replace("_", " ").lower()
    return {"pem lib": "no such part in the file", "no start line": "it is no PEM"}.get(
        words, words
    )


class TlsSocket:
    """A connected, non-blocking socket that speaks TLS as a server.

    Resources: owns the socket. Errors: every verb raises OSError, ssl.SSLError among them.
    """

    def __init__(self, sock: socket.socket, made: ssl.SSLContext) -> None:
        self.socket = sock
        self._came = ssl.MemoryBIO()
        self._goes = ssl.MemoryBIO()
        self._tls = made.wrap_bio(self._came, self._goes, server_side=True)
        self._unsent = memoryview(b"")
        self._full = False
        """Whether there may be more of what came from the wire."""

    def fileno(self) -> int:
        return self.socket.fileno()

    @property
    def unsent(self) -> bool:
        """Whether bytes that `send` took still wait for the wire: call `flush` when it has room."""
        return bool(self._unsent or self._goes.pending)

    @property
    def unread(self) -> bool:
        """Whether there may be more to read though nothing comes from the wire."""
        return self._full

    def handshake(self) -> None:
        """Go on with it. Returns when it is done; raises BlockingIOError when the client is to say
        more, `ssl.SSLError` when it cannot be done."""
        while True:
            try:
                self._tls.do_handshake()
            except ssl.SSLWantReadError:
                self.flush()
                self._receive()
            except ssl.SSLError:
                self._last_words()
                raise
            else:
                self.flush()
                self._full = True  # What the client said right behind it may have come with it.
                return

    def certificate(self) -> dict[str, Any] | None:
        """The client's, in the form of `ssl.SSLSocket.getpeercert`; None if it has shown none."""
        return self._tls.getpeercert() or None

    def recv_into(self, space: memoryview) -> int:
        """Read up to as many bytes as there is space for; 0 at the end."""
        count = 0
        self._full = False
        while count < len(space):
            try:
                read = self._tls.read(len(space) - count, space[count:])
            except ssl.SSLWantReadError:
                if count:
                    return count
                if self._goes.pending:
                    self.flush()
                if not self._receive():
                    return 0
                continue
            except (ssl.SSLZeroReturnError, ssl.SSLEOFError):
                return count
            if not read:
                return count
            count += int(read)
        self._full = True
        return count

    def send(self, piece: memoryview | bytes) -> int:
        """Take a beginning of the piece. Raises BlockingIOError while what was taken before is not
        sent."""
        self.flush()
        if self._unsent:
            raise BlockingIOError
        taken = self._tls.write(memoryview(piece)[:_PIECE_BYTES])
        self.flush()
        return taken

    def flush(self) -> None:
        """Send what was taken, as far as the wire takes it."""
        if self._goes.pending and not self._unsent:
            self._unsent = memoryview(self._goes.read())
        while self._unsent:
            try:
                count = self.socket.send(self._unsent)
            except BlockingIOError:
                return
            self._unsent = self._unsent[count:]
            if not self._unsent and self._goes.pending:
                self._unsent = memoryview(self._goes.read())

    def shutdown(self, how: int) -> None:
        """Say that nothing more comes, and shut the socket down."""
        self._last_words()
        self.socket.shutdown(how)

    def close(self) -> None:
        """Say that nothing more comes, if there is still somebody to hear it, and close."""
        self._last_words()
        self.socket.close()

    def _receive(self) -> bool:
        """Take from the wire what is there. Returns whether there was anything but its end."""
        data = self.socket.recv(_PIECE_BYTES)
        if data:
            self._came.write(data)
        else:
            self._came.write_eof()
        return bool(data)

    def _last_words(self) -> None:
        """An alert, or that it is over: sent as far as the wire takes it."""
        with contextlib.suppress(ssl.SSLError, ValueError):
            self._tls.unwrap()
        with contextlib.suppress(OSError):
            self.flush()
