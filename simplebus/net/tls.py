"""A socket that speaks TLS with the verbs of a plain one, as a server or as a client.

Rule 1: never wait. What cannot go on raises BlockingIOError, as a plain socket does; what was taken
from the caller and is not on the wire yet is `unsent`, what came and was not asked for `unread`.
Rule 2: nothing here decides whom to trust: that is the context's business.
Rule 3: what a peer may have of TLS itself, behind the handshake, is bounded: who asks for new keys
again and again, or sends records with nothing in them, costs time and is nobody's user.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import weakref
from typing import Any

# What is read from the wire at once, and encrypted at once for few: many records of 16 KiB.
PIECE_BYTES = 512 * 1024
# What is looked at in one turn, however much comes: what goes out is to keep up with it, or it
# grows cold meanwhile; and others have their turn. So have they where records are small.
_TURN_BYTES = 1024 * 1024
_TURN_RECORDS = 256
# How TLS begins; and as much of what comes first as tells what else it may be.
_HANDSHAKE = b"\x16"
_OPENING_BYTES = 16
# A record, and a little more.
_RECORD_BYTES = 17 * 1024
# What came from the wire is looked at so much at a time, and so much is encrypted at once. TLS
# keeps room for it as long as the connection is there.
SLICE_BYTES = 32 * 1024
# And so much behind such as was data, and PIECE_BYTES encrypted: smaller ones take a tenth longer.
# That is for those through which much goes, and for few of them: all others keep little.
TRUSTED_SLICE_BYTES = 256 * 1024
WIDE_BEHIND_BYTES = 4 * 1024 * 1024
WIDE_MAX = 64
# Of so much that came, one part in so many is data: a whole record fits into it, and of a record
# with a single byte that is one part in 85 or more.
_JUDGED_BYTES = 32 * 1024
_DATA_PART = 128
# What TLS itself has to answer may wait for the wire up to here: 600 answers.
_ANSWERS_BYTES_MAX = 16 * 1024


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


_NOTHING = memoryview(b"")
_wide: weakref.WeakSet[TlsSocket] = weakref.WeakSet()
"""Through which much went. No more than WIDE_MAX."""


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
        self._unsent = _NOTHING
        self.opening = b""
        """What the peer said first of all: a few bytes."""
        self._rest = _NOTHING
        """What came from the wire and was not looked at."""
        self._looked = self._found = 0
        """Bytes that were looked at, and how much data was in them, since that was judged last."""
        self._is_dense = False
        """Whether most of what was looked at last was data."""
        self._is_wide = False
        """Whether pieces are large."""
        self._carried = 0
        """Bytes of data that went or came while they were not."""
        self._full = False
        """Whether there may be more of what came from the wire."""
        self._is_more = False
        """Whether the wire had all that was asked for when it was read last."""

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
                if self._receive():
                    self._look()
            except ssl.SSLError:
                if self.opening.startswith(_HANDSHAKE):  # Others would not understand.
                    self._last_words()
                raise
            else:
                self.flush()
                self._full = True  # What the peer said right behind it may have come with it.
                self._looked = 0
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
        count, looked, records = 0, 0, 0
        self._full = False
        while count < len(space) and records < _TURN_RECORDS:
            try:
                read = self._tls.read(len(space) - count, space[count:])
            except ssl.SSLWantReadError:
                self._judge()
                if not self._rest:
                    if count and not (self._is_more and looked < _TURN_BYTES):
                        return count
                    if looked and not count:  # Others have their turn before more is looked at.
                        raise BlockingIOError from None
                    if not self._more_came(count, len(space)):
                        return count
                elif count < looked // _DATA_PART:
                    self._full = True
                    if count:
                        return count
                    raise BlockingIOError from None
                looked += self._look()
                continue
            except (ssl.SSLZeroReturnError, ssl.SSLEOFError):
                return count
            if not read:
                return count
            records += 1
            count += int(read)
            self._found += int(read)
        self._full = True
        return count

    def _more_came(self, count: int, wanted: int) -> bool:
        """Take more from the wire, behind what was read in this turn. False at the end, and where
        something was read and nothing more is there: an error is for the next turn then."""
        if not count:
            return self._receive(wanted)
        with contextlib.suppress(OSError):
            return self._receive(wanted - count)
        return False

    def _look(self) -> int:
        """Have the next part of what came looked at. Returns its bytes."""
        size = TRUSTED_SLICE_BYTES if self._is_dense and self._is_wide else SLICE_BYTES
        piece = self._rest[:size]
        self._rest = self._rest[size:] if size < len(self._rest) else _NOTHING
        taken = self._came.write(piece)
        self._looked += taken
        return taken

    def _judge(self) -> None:
        """All that was looked at is understood. Raises OSError where it was for nothing."""
        if self._goes.pending:
            self.flush()
            if self._goes.pending > _ANSWERS_BYTES_MAX:
                raise ConnectionAbortedError(0, "it asked for new TLS keys and took no answer")
        if self._looked >= _JUDGED_BYTES:
            if self._found * _DATA_PART < self._looked:
                raise ConnectionAbortedError(0, "its TLS records had next to nothing in them")
            self._is_dense = self._found * 2 > self._looked
            self._carry(self._found)
            self._looked = self._found = 0

    def send(self, piece: memoryview | bytes) -> int:
        """Take a beginning of the piece: what the wire takes, and less than SLICE_BYTES more, or,
        where much goes, than PIECE_BYTES. Raises BlockingIOError while what was taken before is not
        sent."""
        self.flush()
        if self._unsent:
            raise BlockingIOError
        piece, taken = memoryview(piece), 0
        size = PIECE_BYTES if self._is_wide else SLICE_BYTES
        while taken < len(piece) and not self._unsent:
            taken += self._tls.write(piece[taken : taken + size])
            self.flush()
        self._carry(taken)
        return taken

    def _carry(self, count: int) -> None:
        """So much data went or came."""
        if not self._is_wide:
            self._carried += count
            if self._carried >= WIDE_BEHIND_BYTES:
                if len(_wide) >= WIDE_MAX:  # Who was cut off has not closed itself.
                    _wide.difference_update([each for each in _wide if each.socket.fileno() < 0])
                if len(_wide) < WIDE_MAX:
                    self._is_wide = True
                    _wide.add(self)

    def flush(self) -> None:
        """Send what was taken, as far as the wire takes it."""
        if self._goes.pending and not self._unsent:
            self._unsent = memoryview(self._goes.read())
        while self._unsent:
            try:
                count = self.socket.send(self._unsent)
            except BlockingIOError:
                return
            # A view of nothing would keep all that was below it.
            self._unsent = self._unsent[count:] if count < len(self._unsent) else _NOTHING
            if not self._unsent and self._goes.pending:
                self._unsent = memoryview(self._goes.read())

    def shutdown(self, how: int) -> None:
        """Say that nothing more comes, and shut the socket down."""
        self._last_words()
        self.socket.shutdown(how)

    def close(self) -> None:
        """Say that nothing more comes, if there is still somebody to hear it, and close."""
        _wide.discard(self)
        self._last_words()
        self.socket.close()

    def _receive(self, wanted: int = _RECORD_BYTES) -> bool:
        """Take from the wire what is there, about so much of it. Returns whether there was anything
        but its end."""
        most = min(PIECE_BYTES, max(wanted, _RECORD_BYTES))
        self._is_more = False
        data = self.socket.recv(most)
        self._is_more = len(data) == most
        self._rest = memoryview(data)
        self.opening = self.opening or data[:_OPENING_BYTES]
        if not data:
            self._came.write_eof()
        return bool(data)

    def _last_words(self) -> None:
        """An alert, or that it is over: sent as far as the wire takes it."""
        with contextlib.suppress(ssl.SSLError, ValueError):
            self._tls.unwrap()
        with contextlib.suppress(OSError):
            self.flush()
