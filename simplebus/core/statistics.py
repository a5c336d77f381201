"""Statistics of a broker, its classes and its subscriptions, as immutable snapshots.

Counters only grow from one snapshot to the next.
"""

from __future__ import annotations

from dataclasses import dataclass

from simplebus.core.errors import Reason
from simplebus.core.ring.ring import RingStatistics


@dataclass(frozen=True, slots=True)
class SubscriptionStatistics:
    """Statistics of one subscription."""

    class_id: int
    session_id: int
    """-1 for a group, and for a durable without a connected subscription."""
    number: int
    """Subscription number within the session; 0 in version 1."""
    durable: str
    group: str
    floor: int
    """Every sequence below it is acknowledged."""
    cursor: int
    """The next sequence to send for the first time."""
    in_flight: int
    """Messages delivered, or taken over from an earlier subscription, and not acknowledged."""
    waiting: int
    """Messages stored and not sent yet."""
    delivered: int
    """First deliveries."""
    redelivered: int
    """Repeated deliveries."""
    acknowledged: int
    """Messages acknowledged."""
    dropped: int
    """Messages dropped by a policy before they were acknowledged."""
    undelivered: dict[Reason, int]
    """Messages that were not delivered, or not redelivered, by reason."""


@dataclass(frozen=True, slots=True)
class ClassStatistics:
    """Statistics of one class."""

    class_id: int
    name: str
    """Empty if the class has only an id."""
    ring: RingStatistics
    spilled: int
    """Messages that are on disk only."""
    spilled_bytes: int
    """Approximate frame bytes of the messages that are on disk only."""
    published: int
    """Messages accepted since the class was created."""
    delivered: int
    """First deliveries to all subscriptions, including ended subscriptions."""
    redelivered: int
    """Repeated deliveries to all subscriptions, including ended subscriptions."""
    acknowledged: int
    """Acknowledgements of all subscriptions, including ended subscriptions."""
    in_flight: int
    """Messages delivered and not acknowledged, over all subscriptions."""
    dropped: dict[Reason, int]
    """Messages dropped, by reason."""
    blocked_sessions: int
    """Sessions with messages that wait for space in this class."""
    parked: int
    """Messages that wait for space in this class, as far as they were read from their sessions."""
    channels: int
    """Channels of stored messages, and of some that were released."""
    subscriptions: tuple[SubscriptionStatistics, ...]
    last_values: int = 0
    """Last values, if the class keeps them."""
    carried: int = 0
    """Last values that compaction copied."""


@dataclass(frozen=True, slots=True)
class BrokerStatistics:
    """Statistics of a broker."""

    sessions: int
    """Open sessions."""
    memory_bytes: int
    """Memory of all rings."""
    parked_bytes: int
    """Memory of messages that wait for space."""
    refused: dict[Reason, int]
    """Refusals and protocol errors, by reason."""
    classes: tuple[ClassStatistics, ...]

    @property
    def published(self) -> int:
        return sum(c.published for c in self.classes)

    @property
    def delivered(self) -> int:
        return sum(c.delivered for c in self.classes)

    @property
    def redelivered(self) -> int:
        return sum(c.redelivered for c in self.classes)

    @property
    def acknowledged(self) -> int:
        return sum(c.acknowledged for c in self.classes)

    @property
    def in_flight(self) -> int:
        return sum(c.in_flight for c in self.classes)

    @property
    def dropped(self) -> int:
        return sum(sum(c.dropped.values()) for c in self.classes)
