"""Errors that NATS clients receive, in the words of nats-server.

An error that closes the connection is an exception, raised after all commands before it were
applied. Other errors are lines that are sent.
"""

from __future__ import annotations

from simplebus.core.errors import Reason, RemoteProtocolError
from simplebus.nats.subjects import quote


class NatsError(RemoteProtocolError):
    """Protocol error that closes the connection."""

    def __init__(
        self, reason: Reason, sentence: str, *, error_text: str = "", closed_reason: str = ""
    ) -> None:
        """`error_text` is quoted in the `-ERR` line; without it, no line is sent."""
        super().__init__(reason, sentence)
        self.error_text = error_text
        self.closed_reason = closed_reason
        """Reason in the monitoring of nats-server, for example `Slow Consumer (Pending Bytes)`."""

    @property
    def line(self) -> bytes:
        """The `-ERR` line to send before closing; empty for none."""
        return error_line(self.error_text) if self.error_text else b""


def error_line(text: str) -> bytes:
    """Return an `-ERR` line."""
    return f"-ERR '{text}'\r\n".encode("latin-1", "replace")


def refusal_line(action: str, subject: bytes, reason: str) -> bytes:
    """Return the error for a refused operation. NATS client libraries stay connected only after
    this error.
    """
    reason = reason.replace("'", "`").replace("\r", " ").replace("\n", " ")
    return error_line(f"Permissions Violation for {action} to {quote(subject)} ({reason})")


def unknown_operation(sentence: str) -> NatsError:
    """Return the error for bytes that are no command."""
    return NatsError(
        Reason.UNKNOWN_TYPE,
        sentence,
        error_text="Unknown Protocol Operation",
        closed_reason="Protocol Violation",
    )


def too_many_connections(max_connections: int) -> NatsError:
    """Return the error for a connection above the limit."""
    return NatsError(
        Reason.TOO_MANY_CONNECTIONS,
        f"{max_connections} connections are open",
        error_text="maximum connections exceeded",
        closed_reason="Maximum Connections Exceeded",
    )


def stale_connection(ping_count: int) -> NatsError:
    """Return the error for a client that did not answer `ping_count` PINGs."""
    return NatsError(
        Reason.HEARTBEAT_TIMEOUT,
        f"the client did not answer {ping_count} PINGs",
        error_text="Stale Connection",
        closed_reason="Stale Connection",
    )
