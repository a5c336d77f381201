"""Counters of the NATS server."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class NatsServerStatistics:
    """Counters at one moment. Traffic includes closed connections."""

    clients: int = 0
    """Open connections."""
    accepted: int = 0
    """Connections accepted since the start."""
    subscriptions: int = 0
    """Subscriptions of the open connections."""
    in_messages: int = 0
    """Messages published by clients."""
    in_bytes: int = 0
    """Bytes of the headers and payloads that clients published."""
    out_messages: int = 0
    """Messages sent to clients or pending."""
    out_bytes: int = 0
    """All bytes sent to clients."""
    pending_bytes: int = 0
    """Bytes pending for the open connections."""
    denied: int = 0
    """Operations that permissions did not allow."""
    slow_consumers: int = 0
    """Clients disconnected as slow consumers."""
