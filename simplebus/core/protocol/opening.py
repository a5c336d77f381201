"""Recognizes the protocol of a peer by its first bytes, to explain a connection to a wrong port.

The first read from a connection is enough: a protocol that is not recognized is handled as before.
"""

from __future__ import annotations

import enum
import re

from simplebus.core.errors import Reason, RemoteProtocolError
from simplebus.core.limits import HEADER_BYTES
from simplebus.core.protocol import frames

OPENING_BYTES = 64
"""First bytes that are examined."""


class Opening(enum.StrEnum):
    """Protocol of the first bytes from a peer."""

    BUS_CONNECT = "the Connect frame of a bus client"
    NATS_COMMAND = "a NATS command"
    NATS_INFO = "the INFO of a NATS server"
    HTTP_REQUEST = "an HTTP request"
    HTTP_RESPONSE = "an HTTP response"
    TLS = "a TLS record"


_PATTERNS = (
    (Opening.BUS_CONNECT, rb"%c.{%d}\s*[\[{]" % (frames.CONNECT, HEADER_BYTES - 1)),
    (Opening.NATS_COMMAND, rb"(?i:CONNECT[ \t]*\{|PING\r?\n|(?:H?PUB|SUB|UNSUB)[ \t])"),
    (Opening.NATS_INFO, rb"INFO[ \t]*\{"),
    (Opening.HTTP_REQUEST, rb"(?:GET|HEAD|POST|PUT|DELETE|OPTIONS|PATCH|TRACE|PRI) [/*h]"),
    (Opening.HTTP_RESPONSE, rb"HTTP/\d"),
    (Opening.TLS, rb"[\x14-\x17]\x03[\x00-\x04]"),
)
_EACH = b"|".join(b"(%b)" % pattern for _, pattern in _PATTERNS)
_OPENING = re.compile(_EACH, re.DOTALL)


def recognize_opening(data: bytes) -> Opening | None:
    """Return the protocol that data from the beginning of a connection belongs to, or None."""
    match = _OPENING.match(data)
    return None if match is None else _PATTERNS[(match.lastindex or 1) - 1][0]


class WrongProtocolError(RemoteProtocolError):
    """The peer uses another protocol, because it connected to a wrong port."""

    def __init__(self, sentence: str, reply: bytes = b"") -> None:
        super().__init__(Reason.UNKNOWN_TYPE, sentence)
        self.reply = reply
        """Explanation in the protocol of the peer; empty if that protocol has no form for it."""


_SERVER_KINDS = {
    Opening.NATS_INFO: "a port for NATS clients",
    Opening.NATS_COMMAND: "a port for NATS clients",
    Opening.HTTP_RESPONSE: "an HTTP port",
    Opening.TLS: "a port with TLS: its address begins with simplebuss://",
}


def check_server_opening(data: bytes) -> None:
    """Check the first data from a server to which a bus client has connected.

    Raises:
        WrongProtocolError: The data is that of another port.
    """
    opening = recognize_opening(data)
    kind = _SERVER_KINDS.get(opening) if opening is not None else None
    if kind is not None:
        raise WrongProtocolError(
            f"it sent {opening}, so it is {kind}; expected the port for bus clients "
            "(`simplebus serve --port`, 8888 by default)"
        )
