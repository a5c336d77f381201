"""What a NATS client is told when something is wrong, word for word as the reference server does.

Rule 1: what closes a connection is an exception, raised after everything before the offence was
applied. What does not close it is a line that is sent.
"""

from __future__ import annotations

from simplebus.core.errors import Reason, RemoteProtocolError


class NatsError(RemoteProtocolError):
    """The connection is to be closed for this."""

    def __init__(self, reason: Reason, sentence: str, *, says: str = "", closed: str = "") -> None:
        """`says` is between the quotes of the `-ERR` line that goes first; nothing for none."""
        super().__init__(reason, sentence)
        self.says = says
        self.closed = closed
        """In the words of the reference server's monitoring: `Parse Error`, `Slow Consumer …`."""

    @property
    def line(self) -> bytes:
        """What is sent before the connection is closed."""
        return error_line(self.says) if self.says else b""


def error_line(says: str) -> bytes:
    """A line that tells of an error."""
    return f"-ERR '{says}'\r\n".encode("latin-1", "replace")


def too_many(most: int) -> NatsError:
    """There are as many connections as there may be."""
    return NatsError(
        Reason.TOO_MANY_CONNECTIONS,
        f"{most} connections are open",
        says="maximum connections exceeded",
        closed="Maximum Connections Exceeded",
    )


def stale(pings: int) -> NatsError:
    """A client has answered none of its last PINGs, so many."""
    return NatsError(
        Reason.HEARTBEAT_TIMEOUT,
        f"it did not answer {pings} PINGs",
        says="Stale Connection",
        closed="Stale Connection",
    )
