"""Snapshots of the NATS door.

Rule 1: a snapshot never changes; counters in it only grow from one to the next.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FrontStatistics:
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
