"""Snapshots of the bus: what operators, tests and the demo look at.

Rule 1: a snapshot never changes; counters in it only grow from one to the next.
"""

from __future__ import annotations

from dataclasses import dataclass

from simplebus.core.errors import Reason
from simplebus.core.ring.ring import RingStatistics


@dataclass(frozen=True, slots=True)
class SubscriptionStatistics:
    """A snapshot of one subscription."""

    class_id: int
    session_id: int
    """-1 while nobody is connected to it, and of a group, which several may be."""
    number: int
    """What its session calls it; 0 in version 1."""
    durable: str
    group: str
    floor: int
    """Every sequence below it is acknowledged."""
    cursor: int
    """Next sequence to be sent."""
    in_flight: int
    """Messages sent, or left by a former subscription, and not acknowledged."""
    waiting: int
    """Messages stored and not sent yet."""
    delivered: int
    """Messages sent for the first time."""
    redelivered: int
    """Messages sent again."""
    acknowledged: int
    """Messages acknowledged."""
    dropped: int
    """Messages that a policy took away before they were acknowledged."""
    undelivered: dict[Reason, int]
    """Messages for it that it was not sent, or not again, by reason."""


@dataclass(frozen=True, slots=True)
class ClassStatistics:
    """A snapshot of one class."""

    class_id: int
    name: str
    """Empty for a class that has only its id."""
    ring: RingStatistics
    spilled: int
    """Messages that are on disk only."""
    spilled_bytes: int
    """About how many bytes of frames these have."""
    published: int
    """Messages accepted since the class exists."""
    delivered: int
    """First deliveries, over all subscriptions there ever were."""
    redelivered: int
    """Repeated deliveries, over all subscriptions there ever were."""
    acknowledged: int
    """Acknowledgements, over all subscriptions there ever were."""
    in_flight: int
    """Sent and not acknowledged, over all subscriptions."""
    dropped: dict[Reason, int]
    """Messages not kept, by reason."""
    blocked_sessions: int
    """Sessions with messages that wait for room."""
    parked: int
    """Messages that wait for room here, as far as those sessions were read."""
    channels: int
    """Channels of stored messages, and of some that are gone."""
    subscriptions: tuple[SubscriptionStatistics, ...]
    last_values: int = 0
    """Messages that are the last one of their channel, of a class that keeps these."""
    carried: int = 0
    """Times that one of them was stored anew."""


@dataclass(frozen=True, slots=True)
class BrokerStatistics:
    """A snapshot of everything. Counters only grow."""

    sessions: int
    """Sessions open."""
    memory_bytes: int
    """Memory of all rings."""
    parked_bytes: int
    """Memory of messages that wait for room."""
    refused: dict[Reason, int]
    """What peers did wrong and what was dropped, by reason."""
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
