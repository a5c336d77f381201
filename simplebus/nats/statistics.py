"""Counters of the NATS server."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from simplebus.nats.server.server import NatsServer


@dataclass(frozen=True, slots=True)
class NatsServerStatistics:
    """Counters at one moment. Traffic includes closed connections."""

    clients: int
    """Open connections."""
    accepted: int
    """Connections accepted since the start."""
    subscriptions: int
    """Subscriptions of the open connections."""
    in_messages: int
    """Messages published by clients."""
    in_bytes: int
    """Headers and payloads of these messages."""
    out_messages: int
    """Messages sent to clients or pending."""
    out_bytes: int
    """All bytes sent to clients."""
    pending_bytes: int
    """Bytes pending for the open connections."""
    denied: int
    """Operations that permissions did not allow."""
    slow_consumers: int
    """Clients disconnected as slow consumers."""


def collect_statistics(server: NatsServer) -> NatsServerStatistics:
    """Return the current counters of a server."""
    sessions = server.sessions.values()
    return NatsServerStatistics(
        clients=len(sessions),
        accepted=server.next_client_id - 1,
        subscriptions=sum(len(session.subscriptions) for session in sessions),
        in_messages=server.closed_in_messages + sum(session.in_messages for session in sessions),
        in_bytes=server.closed_in_bytes + sum(session.in_bytes for session in sessions),
        out_messages=server.closed_out_messages + sum(session.out_messages for session in sessions),
        out_bytes=server.closed_out_bytes + sum(session.outbox.sent_bytes for session in sessions),
        pending_bytes=sum(session.outbox.pending_bytes for session in sessions),
        denied=server.denied_count,
        slow_consumers=server.slow_consumer_count,
    )
