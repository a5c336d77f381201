"""Counters of the NATS server."""

from __future__ import annotations

from dataclasses import dataclass


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
