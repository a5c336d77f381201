"""TLS socket with the interface of a non-blocking plain socket, as server or client.

Nothing waits: an operation that cannot proceed raises BlockingIOError. Trust is decided by the SSL
context. Work that a peer causes without data is bounded: key updates and empty records are limited.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import weakref
from typing import Any

# Largest read from the network, and largest piece encrypted at once by a wide socket.
PIECE_BYTES = 512 * 1024
# Maximum bytes and records decrypted in one `recv_into`, so that output keeps up with input and
# other connections get their turn. The record limit matters where records are small.
_TURN_BYTES = 1024 * 1024
_TURN_RECORDS = 256
# First byte of a TLS handshake, and the bytes kept to recognize another protocol.
_HANDSHAKE = b"\x16"
_OPENING_BYTES = 16
# A little more than a TLS record of 16 KiB.
_RECORD_BYTES = 17 * 1024
# Bytes decrypted or encrypted at once. OpenSSL keeps buffers of this size until the connection is
# closed.
SLICE_BYTES = 32 * 1024
# Bytes decrypted at once by a wide socket that receives mostly data; smaller slices are 10 %
# slower. A socket becomes wide after WIDE_AFTER_BYTES. At most WIDE_MAX are: they need memory.
TRUSTED_SLICE_BYTES = 256 * 1024
WIDE_AFTER_BYTES = 4 * 1024 * 1024
WIDE_MAX = 64
# Of every _DENSITY_CHECK_BYTES received, at least 1/_MIN_DATA_DIVISOR must be data. A whole record
# fits into the check, and a record with one byte of data is at most 85 bytes long.
_DENSITY_CHECK_BYTES = 32 * 1024
_MIN_DATA_DIVISOR = 128
# Maximum pending bytes of TLS's own replies to the peer, about 600 replies.
_PENDING_TLS_REPLIES_BYTES_MAX = 16 * 1024


def plain_socket(wire: socket.socket | TlsSocket) -> socket.socket:
    """Return the plain socket below, to close it without a TLS alert."""
    return wire.socket if isinstance(wire, TlsSocket) else wire


def is_flushed(wire: socket.socket | TlsSocket) -> bool:
    """Send pending bytes. Returns True if none are left. Raises OSError."""
    if not isinstance(wire, TlsSocket):
        return True
    wire.flush()
    return not wire.has_unsent


def has_unread(wire: socket.socket | TlsSocket) -> bool:
    """Return True if data may be readable without new bytes from the network."""
    return isinstance(wire, TlsSocket) and wire.has_unread


_NOTHING = memoryview(b"")
_wide_sockets: weakref.WeakSet[TlsSocket] = weakref.WeakSet()
"""Sockets with much traffic, which use large buffers; at most WIDE_MAX."""


class TlsSocket:
    """Connected non-blocking socket with TLS. Owns the plain socket; all methods raise OSError."""

    def __init__(
        self, sock: socket.socket, context: ssl.SSLContext, *, server_name: str | None = None
    ) -> None:
        """Create a client of the server with this name, or a server without a name."""
        self.socket = sock
        self._incoming = ssl.MemoryBIO()
        self._outgoing = ssl.MemoryBIO()
        self._tls = context.wrap_bio(
            self._incoming,
            self._outgoing,
            server_side=server_name is None,
            server_hostname=server_name,
        )
        self._unsent = _NOTHING
        self.first_bytes = b""
        """First bytes from the peer."""
        self._undecrypted = _NOTHING
        """Received bytes that are not decrypted yet."""
        self._decrypted_bytes = self._data_bytes = 0
        """Bytes decrypted since the last density check, and the data in them."""
        self._is_dense = False
        """True if most of the bytes at the last density check were data."""
        self._is_wide = False
        """True if large buffers are used."""
        self._transferred_bytes = 0
        """Data bytes transferred with small buffers."""
        self._may_have_unread = False
        """True if received bytes may contain more data."""
        self._was_read_full = False
        """True if the last read from the network filled its buffer."""

    def fileno(self) -> int:
        return self.socket.fileno()

    @property
    def has_unsent(self) -> bool:
        """True if accepted bytes are pending: call `flush` when the socket is writable."""
        return bool(self._unsent or self._outgoing.pending)

    @property
    def has_unread(self) -> bool:
        """True if data may be readable without new bytes from the network."""
        return self._may_have_unread

    def handshake(self) -> None:
        """Continue the handshake and return when it is complete.

        Raises:
            BlockingIOError: More bytes from the peer are needed. ssl.SSLError: The handshake
            failed.
        """
        while True:
            try:
                self._tls.do_handshake()
            except ssl.SSLWantReadError:
                self.flush()
                if self._receive():
                    self._decrypt_next()
            except ssl.SSLError:
                if self.first_bytes.startswith(_HANDSHAKE):  # Only TLS peers understand an alert.
                    self._send_close_notify()
                raise
            else:
                self.flush()
                self._may_have_unread = True  # Data may have arrived together with the handshake.
                self._decrypted_bytes = 0
                return

    def certificate(self) -> dict[str, Any] | None:
        """Return the peer's certificate as `ssl.SSLSocket.getpeercert` does; None for none."""
        return self._tls.getpeercert() or None

    def negotiated_version(self) -> tuple[str, str] | None:
        """Return TLS version, such as "1.3", and cipher; None before the handshake."""
        version, cipher = self._tls.version(), self._tls.cipher()
        if version is None or cipher is None:
            return None
        return version.removeprefix("TLSv"), cipher[0]

    def recv_into(self, space: memoryview) -> int:
        """Read data into `space`. Returns the number of bytes; 0 at the end."""
        count, decrypted_bytes, record_count = 0, 0, 0
        self._may_have_unread = False
        while count < len(space) and record_count < _TURN_RECORDS:
            try:
                read = self._tls.read(len(space) - count, space[count:])
            except ssl.SSLWantReadError:
                self._check_density()
                if not self._undecrypted:
                    if count and not (self._was_read_full and decrypted_bytes < _TURN_BYTES):
                        return count
                    if decrypted_bytes and not count:  # Other connections get their turn first.
                        raise BlockingIOError from None
                    if not self._receive_more(count, len(space)):
                        return count
                elif count < decrypted_bytes // _MIN_DATA_DIVISOR:
                    self._may_have_unread = True
                    if count:
                        return count
                    raise BlockingIOError from None
                decrypted_bytes += self._decrypt_next()
                continue
            except (ssl.SSLZeroReturnError, ssl.SSLEOFError):
                return count
            if not read:
                return count
            record_count += 1
            count += int(read)
            self._data_bytes += int(read)
        self._may_have_unread = True
        return count

    def _receive_more(self, count: int, requested_bytes: int) -> bool:
        """Receive more bytes. Returns False at the end, or if nothing came after data was read in
        this call.
        """
        if not count:
            return self._receive(requested_bytes)
        with contextlib.suppress(OSError):
            return self._receive(requested_bytes - count)
        return False

    def _decrypt_next(self) -> int:
        """Pass the next part of the received bytes to TLS. Returns its size."""
        size = TRUSTED_SLICE_BYTES if self._is_dense and self._is_wide else SLICE_BYTES
        piece = self._undecrypted[:size]
        self._undecrypted = self._undecrypted[size:] if size < len(self._undecrypted) else _NOTHING
        written = self._incoming.write(piece)
        self._decrypted_bytes += written
        return written

    def _check_density(self) -> None:
        """Check how much data the decrypted bytes contained. Raises OSError for almost none."""
        if self._outgoing.pending:
            self.flush()
            if self._outgoing.pending > _PENDING_TLS_REPLIES_BYTES_MAX:
                raise ConnectionAbortedError(
                    0, "the peer requested TLS key updates without reading the replies"
                )
        if self._decrypted_bytes >= _DENSITY_CHECK_BYTES:
            if self._data_bytes * _MIN_DATA_DIVISOR < self._decrypted_bytes:
                raise ConnectionAbortedError(0, "the peer's TLS records contained almost no data")
            self._is_dense = self._data_bytes * 2 > self._decrypted_bytes
            self._count_transferred(self._data_bytes)
            self._decrypted_bytes = self._data_bytes = 0

    def send(self, piece: memoryview | bytes) -> int:
        """Accept the beginning of `piece` and return its size.

        Accepts as much as the network, plus one encrypted slice. Raises BlockingIOError while
        earlier bytes are pending.
        """
        self.flush()
        if self._unsent:
            raise BlockingIOError
        piece, accepted = memoryview(piece), 0
        size = PIECE_BYTES if self._is_wide else SLICE_BYTES
        while accepted < len(piece) and not self._unsent:
            accepted += self._tls.write(piece[accepted : accepted + size])
            self.flush()
        self._count_transferred(accepted)
        return accepted

    def _count_transferred(self, count: int) -> None:
        """Count data bytes; after WIDE_AFTER_BYTES the socket uses large buffers."""
        if not self._is_wide:
            self._transferred_bytes += count
            if self._transferred_bytes >= WIDE_AFTER_BYTES:
                if len(_wide_sockets) >= WIDE_MAX:  # Aborted sockets have not removed themselves.
                    _wide_sockets.difference_update(
                        [
                            wide_socket
                            for wide_socket in _wide_sockets
                            if wide_socket.socket.fileno() < 0
                        ]
                    )
                if len(_wide_sockets) < WIDE_MAX:
                    self._is_wide = True
                    _wide_sockets.add(self)

    def flush(self) -> None:
        """Send pending bytes as far as the network accepts them."""
        if self._outgoing.pending and not self._unsent:
            self._unsent = memoryview(self._outgoing.read())
        while self._unsent:
            try:
                count = self.socket.send(self._unsent)
            except BlockingIOError:
                return
            # An empty view would keep the whole buffer in memory.
            self._unsent = self._unsent[count:] if count < len(self._unsent) else _NOTHING
            if not self._unsent and self._outgoing.pending:
                self._unsent = memoryview(self._outgoing.read())

    def shutdown(self, how: int) -> None:
        """Send a TLS close notification and shut the socket down."""
        self._send_close_notify()
        self.socket.shutdown(how)

    def close(self) -> None:
        """Send a TLS close notification if possible and close the socket."""
        _wide_sockets.discard(self)
        self._send_close_notify()
        self.socket.close()

    def _receive(self, requested_bytes: int = _RECORD_BYTES) -> bool:
        """Receive about `requested_bytes` bytes. Returns False at the end."""
        max_bytes = min(PIECE_BYTES, max(requested_bytes, _RECORD_BYTES))
        self._was_read_full = False
        data = self.socket.recv(max_bytes)
        self._was_read_full = len(data) == max_bytes
        self._undecrypted = memoryview(data)
        self.first_bytes = self.first_bytes or data[:_OPENING_BYTES]
        if not data:
            self._incoming.write_eof()
        return bool(data)

    def _send_close_notify(self) -> None:
        """Send an alert or close notification, as far as the network accepts it."""
        with contextlib.suppress(ssl.SSLError, ValueError):
            self._tls.unwrap()
        with contextlib.suppress(OSError):
            self.flush()
