"""A socket that speaks TLS with the verbs of a plain one, as a server or as a client.

Rule 1: never wait. What cannot go on raises BlockingIOError, as a plain socket does; what was taken
from the caller and is not on the wire yet is `unsent`, what came and was not asked for `unread`.
Rule 2: nothing here decides whom to trust: that is the context's business.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
from typing import Any

# What is encrypted at once, and read from the wire at once: many records of 16 KiB.
PIECE_BYTES = 256 * 1024
# A record, and a little more.
_RECORD_BYTES = 17 * 1024


def socket_of(wire: socket.socket | TlsSocket) -> socket.socket:
    """The plain socket below, to be closed without a word."""
    return wire.socket if isinstance(wire, TlsSocket) else wire


def is_flushed(wire: socket.socket | TlsSocket) -> bool:
    """Send what was taken, as far as that goes; whether nothing of it waits. Raises OSError."""
    if not isinstance(wire, TlsSocket):
        return True
    wire.flush()
    return not wire.unsent


def has_unread(wire: socket.socket | TlsSocket) -> bool:
    """Whether there may be more to read though nothing comes from the network."""
    return isinstance(wire, TlsSocket) and wire.unread


class TlsSocket:
    """A connected, non-blocking socket that speaks TLS.

    Resources: owns the socket. Errors: every verb raises OSError, ssl.SSLError among them.
    """

    def __init__(
        self, sock: socket.socket, made: ssl.SSLContext, *, server_name: str | None = None
    ) -> None:
        """As a client of the server with this name; as a server, without one."""
        self.socket = sock
        self._came = ssl.MemoryBIO()
        self._goes = ssl.MemoryBIO()
        self._tls = made.wrap_bio(
            self._came,
            self._goes,
            server_side=server_name is None,
            server_hostname=server_name,
        )
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
        """Go on with it. Returns when it is done; raises BlockingIOError when the peer is to say
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
                self._full = True  # What the peer said right behind it may have come with it.
                return

    def certificate(self) -> dict[str, Any] | None:
        """The peer's, in the form of `ssl.SSLSocket.getpeercert`; None if it has shown none."""
        return self._tls.getpeercert() or None

    def spoken(self) -> tuple[str, str] | None:
        """Which version, as "1.3", and which cipher; None before the handshake."""
        version, cipher = self._tls.version(), self._tls.cipher()
        if version is None or cipher is None:
            return None
        return version.removeprefix("TLSv"), cipher[0]

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
                if not self._receive(len(space)):
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
        taken = self._tls.write(memoryview(piece)[:PIECE_BYTES])
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

    def _receive(self, wanted: int = _RECORD_BYTES) -> bool:
        """Take from the wire what is there, about so much of it. Returns whether there was anything
        but its end."""
        data = self.socket.recv(min(PIECE_BYTES, max(wanted, _RECORD_BYTES)))
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
