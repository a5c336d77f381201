"""Snapshots of the NATS door.

Rule 1: a snapshot never changes; counters in it only grow from one to the next.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from simplebus.nats.server.server import NatsServer


@dataclass(frozen=True, slots=True)
class NatsServerStatistics:
    """A snapshot of one front."""

    clients: int
    """Connected now."""
    accepted: int
    """Since it began."""
    subscriptions: int
    """Of these clients."""
    in_messages: int
    """Published by clients, also those that are gone; as all that follow."""
    in_bytes: int
    """Their headers and payloads."""
    out_messages: int
    """Sent to clients, or waiting for them to take them."""
    out_bytes: int
    """All that was sent to clients."""
    pending_bytes: int
    """Waiting to be taken, of all clients that are connected."""
    denied: int
    """How often something was asked for that permissions do not allow."""
    slow_consumers: int
    """Clients cut off because they took too little."""


def collect_statistics(server: NatsServer) -> NatsServerStatistics:
    """Of now."""
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
