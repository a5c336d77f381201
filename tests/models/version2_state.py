"""State of the version 2 model: messages, positions, peers, publishers. See version2_model.py."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from simplebus.core.protocol.requests import SubscribeRequest
from tests.behaviour import wire_peer_v2
from tests.behaviour.wire_peer_v2 import Version2Peer

CLASSES = (1, 2)
ACK_TIMEOUT = 3


class ModelMessage(NamedTuple):
    """Message to publish, identified by its unique payload."""

    class_id: int
    payload: bytes
    channel: str = ""
    expires_ms: int | None = None
    delay_ms: int | None = None

    @property
    def is_plain(self) -> bool:
        return not self.channel and self.expires_ms is None and self.delay_ms is None

    def frame(self, number: int) -> bytes:
        if self.is_plain:
            return wire_peer_v2.publish(self.class_id, number, self.payload)
        fields = (self.expires_ms is not None) * 2 | (self.delay_ms is not None) * 4
        times = [ms.to_bytes(8, "big") for ms in (self.expires_ms, self.delay_ms) if ms is not None]
        name = self.channel.encode()
        if name:
            fields |= 8
            times.append(len(name).to_bytes(2, "big") + name)
        content = bytes([fields]) + b"".join(times) + self.payload
        return wire_peer_v2.publish_envelopes(self.class_id, number, content)


class StoredMessage(NamedTuple):
    """Message that a class has stored."""

    message: ModelMessage
    expires: float
    not_before: float


@dataclass(eq=False)
class ModelPosition:
    """Position of a subscription, durable or group in one class."""

    request: SubscribeRequest
    undelivered: set[int] = field(default_factory=set)
    """Sequences that it must receive and has not acknowledged."""
    inherited: set[int] = field(default_factory=set)
    """Sequences from a predecessor, which may have been sent already and may be delayed or given
    up.
    """
    delivery_counts: dict[int, int] = field(default_factory=dict)
    """Deliveries of each sequence."""
    in_flight: dict[int, tuple[tuple[Version2ModelPeer, int], int]] = field(default_factory=dict)
    """Peer, subscription number and tick of each delivery in flight."""
    redeliverable: set[int] = field(default_factory=set)
    """Sequences that may be redelivered at any time: rejected, or their consumer disconnected."""
    not_before: dict[int, float] = field(default_factory=dict)
    """Earliest redelivery time of sequences rejected with a delay."""
    not_before_tick: dict[int, int] = field(default_factory=dict)
    """Earliest redelivery tick of sequences rejected without a delay."""
    idle_seconds: float | None = None
    """Seconds that it is kept while idle, and the time when it became idle."""
    idle_since: float = 0.0

    @property
    def is_durable(self) -> bool:
        return self.request.durable is not None

    def backoff_seconds(self, sends: int) -> float | None:
        """Return the seconds until a rejected message is redelivered; None without a backoff."""
        backoff = self.request.backoff
        return backoff[min(sends, len(backoff)) - 1] if backoff else None

    def pause_ticks(self, sends: int) -> int:
        """Return the least ticks until a rejected message is redelivered without a backoff."""
        return min(ACK_TIMEOUT * 2 ** (sends - 1), 60)


class Version2ModelPeer:
    """One connection."""

    def __init__(self, peer: Version2Peer) -> None:
        self.peer = peer
        self.session_id = peer.session.session_id
        self.received_bytes = 0
        self.partial_frame = b""
        self.copied_until = 0
        """Stream offset before which received frames may be older copies."""
        self.subscriptions: dict[int, tuple[int, ModelPosition]] = {}
        """Class and position by number."""
        self.limits: dict[int, int | None] = {}
        """Maximum messages in flight by subscription number; None for no limit."""
        self.delivery_header: tuple[int, int, int] = (0, 0, 0)


class ModelPublisher:
    """One publishing program, over any number of connections."""

    def __init__(self, name: str, first: int) -> None:
        self.name = name
        self.confirmed = first
        self.unconfirmed: list[ModelMessage] = []
        self.peer: Version2ModelPeer | None = None
        self.is_displaced = False
        """True if another program has used the name since."""
        self.may_be_twice: set[bytes] = set()
        """Payloads that were unconfirmed at that time, so they may be stored twice."""
