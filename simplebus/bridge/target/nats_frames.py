"""NATS messages as frames of a bus.

Rule 1: a subject becomes the channel, or a header if it can be none; headers stay headers but for
the server's own (`nats_words`), and the one that says a key.
Rule 2: what is known of subjects and headers is bounded, in bytes, too: each message may have
others.
"""

from __future__ import annotations

import numpy as np

from simplebus.bridge.loop_header import Headers
from simplebus.bridge.reserved_headers import SUBJECT, heard, without_key
from simplebus.bridge.transform import Piece
from simplebus.core.channel.pattern import check_name
from simplebus.core.errors import LocalProtocolError
from simplebus.core.protocol import frames
from simplebus.core.protocol.envelope_batch import Envelope, encode, stuff, unstuff
from simplebus.core.protocol.frames import DELIMITER, Integers
from simplebus.nats.bus.convert import parse_header_block
from simplebus.nats.client.events import Messages

_KNOWN_MAX = 4096
_KNOWN_BYTES_MAX = 4 * 1024 * 1024
_HEADER = frames.HEADER.pack(frames.ENVELOPE, 0, 0, 0)


class Framer:
    """Makes a bus's frames of NATS messages."""

    def __init__(self) -> None:
        self._known: dict[tuple[bytes, bytes], tuple[bytes, str]] = {}
        self._known_bytes = 0
        self._odd = 0
        self._oddity = ""

    def odd(self) -> tuple[int, str]:
        """How many of the messages since the last call a bus has otherwise, and what of the
        first one."""
        odd, self._odd = self._odd, 0
        return odd, self._oddity

    def piece(self, messages: Messages, sequences: Integers) -> Piece:
        """Messages with these sequences. A subject that can be no channel becomes a header, and
        headers for which there is no room stay behind."""
        made = [self._frame(messages, row) for row in range(messages.count)]
        bounds = np.zeros(len(made) + 1, np.int64)
        np.cumsum(np.fromiter(map(len, made), np.int64, len(made)), out=bounds[1:])
        return Piece(b"".join(made), bounds, sequences)

    def _frame(self, messages: Messages, row: int) -> bytes:
        about = messages.subject(row), messages.headers(row)
        known = self._known.get(about)
        if known is None:
            if len(self._known) >= _KNOWN_MAX or self._known_bytes >= _KNOWN_BYTES_MAX:
                self._known.clear()
                self._known_bytes = 0
            known = self._known[about] = _front(*about)
            self._known_bytes += sum(map(len, (*about, *known)))
        front, oddity = known
        if oddity:
            self._oddity = self._oddity if self._odd else oddity
            self._odd += 1
        return _HEADER + stuff(front + messages.payload(row)) + DELIMITER


def _front(subject: bytes, block: bytes) -> tuple[bytes, str]:
    """What stands in front of the payload of a message, as it is before stuffing; and what of it is
    odd, empty for nothing."""
    headers, key = without_key(heard(headers_of(block)))
    channel = shown = subject.decode("utf-8", "backslashreplace")
    instead: Headers = ()
    oddity = ""
    try:
        check_name(subject.decode())
    except ValueError:
        oddity = f"the subject {shown!r} is no channel of a bus, but the header {SUBJECT}"
        channel, instead = "", ((SUBJECT, shown),)
    whole = Envelope(channel, key, (*instead, *headers))
    for envelope in (whole, whole._replace(headers=instead), Envelope(channel, b"", instead)):
        try:
            return unstuff(encode(envelope, b"")), oddity
        except LocalProtocolError as error:
            oddity = f"of a message on {shown!r}, what has no room stays behind: {error}"
    raise AssertionError("a channel alone is always good")
