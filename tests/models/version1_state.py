"""State of the version 1 model: classes, peers and messages in flight. See version1_model.py."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from dataclasses import dataclass, field
from typing import NamedTuple

from simplebus.core.errors import Reason
from tests.behaviour.wire_peer import WirePeer

FRAME_BYTES = 100_000


class PublishMeaning(NamedTuple):
    class_id: int
    payload: bytes


class AckMeaning(NamedTuple):
    class_id: int
    first: int
    last: int


class ConnectMeaning(NamedTuple):
    class_ids: tuple[int, ...]


class SubscribeMeaning(NamedTuple):
    class_id: int


Meaning = PublishMeaning | AckMeaning | ConnectMeaning | SubscribeMeaning | None
"""Effect of one frame; None if it has none."""


@dataclass
class InFlightMessage:
    """One message in flight to one subscriber."""

    sent_tick: int
    """Tick of its last delivery, plus the ticks by which its redelivery was postponed."""
    attempts: int
    is_free: bool = False
    """True if a former subscription left it after one delivery: it is sent at once."""

    def postpone(self, ticks: int, now: int, ack_timeout: int) -> None:
        """Postpone the redelivery, unless it was due before `now`."""
        if not self.is_free and self.due_tick(ack_timeout) >= now:
            self.sent_tick += ticks

    def due_tick(self, ack_timeout: int) -> int:
        """Return the tick of its redelivery."""
        if self.is_free:
            return self.sent_tick
        return self.sent_tick + max(ack_timeout, min(60, ack_timeout << (self.attempts - 1)))


@dataclass
class ModelSubscriber:
    """Subscription of one session to one class."""

    start: int
    """First sequence that it receives for the first time."""
    cursor: int
    """Next sequence that it receives for the first time."""
    flights: dict[int, InFlightMessage]
    """Messages in flight, including those of a former subscription."""
    delivery_count: int = 0
    """Deliveries to it, first ones and redeliveries."""
    dropped: int = 0
    start_tick: int = 0
    """Tick of its first delivery: the inherited delay ends then."""
    inherited: dict[int, InFlightMessage] = field(default_factory=dict)
    """State inherited from a former subscription."""

    @property
    def floor(self) -> int:
        return min(self.flights, default=self.cursor)


@dataclass
class ModelClass:
    """One class."""

    floor: int
    head: int
    payloads: dict[int, bytes] = field(default_factory=dict)
    """Payload of every sequence ever stored."""
    subscribers: dict[int, ModelSubscriber] = field(default_factory=dict)
    """Subscribers by session id, in order of subscription."""
    unacked_backlog: dict[int, InFlightMessage] = field(default_factory=dict)
    """Without subscribers: messages that the last one had not acknowledged."""
    cursor: int = 0
    """Without subscribers: first sequence that the next one receives as new."""
    dropped: Counter[Reason] = field(default_factory=Counter)


class ModelPeer:
    """One peer: its sent and received bytes."""

    def __init__(self, peer: WirePeer) -> None:
        self.peer = peer
        self.session_id = peer.session.session_id
        self.unstored: defaultdict[int, deque[bytes]] = defaultdict(deque)
        """Published and not stored yet: payloads by class."""
        self.unsent: list[tuple[bytes, Meaning]] = []
        """Frames of which the bus has received nothing or only the beginning."""
        self.sent_prefix_bytes = 0
        """Bytes of the first unsent frame that the bus has received."""
        self.early_subscriptions: list[int] = []
        """Subscribed classes that no peer has named."""
        self.replies_due = 0
        self.unread_bytes = b""
        """Bytes of frames that count as sent; they must be received next."""

    @property
    def unstored_bytes(self) -> int:
        """Bytes of the frames that are not stored yet."""
        return sum(13 * len(queue) + sum(map(len, queue)) for queue in self.unstored.values())
