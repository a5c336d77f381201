"""What a NATS client is told when something is wrong, word for word as the reference server does.

Rule 1: what closes a connection is an exception, raised after everything before the offence was
applied. What does not close it is a line that is sent.
"""

from __future__ import annotations

from simplebus.core.errors import Reason, RemoteProtocolError


class NatsError(RemoteProtocolError):
    """The connection is to be closed for this."""

    def __init__(
        self, reason: Reason, sentence: str, *, error_text: str = "", closed_reason: str = ""
    ) -> None:
        """`says` is between the quotes of the `-ERR` line that goes first; nothing for none."""
        super().__init__(reason, sentence)
        self.error_text = error_text
        self.closed_reason = closed_reason
        """In the words of the reference server's monitoring: `Parse Error`, `Slow Consumer …`."""

    @property
    def line(self) -> bytes:
        """What is sent before the connection is closed."""
        return error_line(self.error_text) if self.error_text else b""


def error_line(text: str) -> bytes:
    """A line that tells of an error."""
    return f"-ERR '{text}'\r\n".encode("latin-1", "replace")


def too_many_connections(max_connections: int) -> NatsError:
    """There are as many connections as there may be."""
    return NatsError(
        Reason.TOO_MANY_CONNECTIONS,
        f"{max_connections} connections are open",
        error_text="maximum connections exceeded",
        closed_reason="Maximum Connections Exceeded",
    )


def stale_connection(ping_count: int) -> NatsError:
    """A client has answered none of its last PINGs, so many."""
    return NatsError(
        Reason.HEARTBEAT_TIMEOUT,
        f"it did not answer {ping_count} PINGs",
        error_text="Stale Connection",
        closed_reason="Stale Connection",
    )
