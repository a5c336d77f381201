"""What the model of a bus remembers: of classes, of peers, of messages on their way.

Rule 1: see model.py, which says what becomes of it.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from dataclasses import dataclass, field
from typing import NamedTuple

from simplebus.core.errors import Reason
from tests.behaviour.wire_peer import WirePeer

FRAME_BYTES = 100_000


class Published(NamedTuple):
    class_id: int
    payload: bytes


class Acked(NamedTuple):
    class_id: int
    first: int
    last: int


class Connected(NamedTuple):
    class_ids: tuple[int, ...]


class Subscribed(NamedTuple):
    class_id: int


Meaning = Published | Acked | Connected | Subscribed | None
"""Of one frame that a peer says. None: it means nothing."""


@dataclass
class Flight:
    """One message on its way to one subscriber."""

    earliest: int
    """The first tick in which it may have been sent the last time."""
    latest: int
    """The last such tick: another one only where a timer index fits both."""
    attempts: int
    is_free: bool = False
    """Whether a former subscription left it, which was sent it once: it comes at once."""

    def pause(self, ack_timeout: int) -> int:
        """Ticks until it is sent again."""
        if self.is_free:
            return 0
        return max(ack_timeout, min(60, ack_timeout << (self.attempts - 1)))


@dataclass
class Subscriber:
    """One session's part in one class."""

    start: int
    """The first sequence that it is sent new."""
    cursor: int
    """The next sequence that it is sent new."""
    flights: dict[int, Flight]
    """Sent, or left by a former subscription, and not acknowledged."""
    acked: dict[int, int] = field(default_factory=dict)
    """Acknowledged: up to where in the stream it may still come, in copies made before the ack."""
    heard: int = 0
    """Messages sent to it, the first time and again."""
    dropped: int = 0
    begins: tuple[int, int] = (0, 0)
    """The ticks between which it is sent something for the first time: a pause of what a former
    subscription left is over then."""
    former: dict[int, Flight] = field(default_factory=dict)
    """What that left."""

    @property
    def floor(self) -> int:
        return min(self.flights, default=self.cursor)


@dataclass
class Kind:
    """One class."""

    floor: int
    head: int
    payloads: dict[int, bytes] = field(default_factory=dict)
    """Of every sequence that ever was."""
    subscribers: dict[int, Subscriber] = field(default_factory=dict)
    """By session id, in the order in which they came."""
    left: dict[int, Flight] = field(default_factory=dict)
    """While there is no subscriber: what the last one had not acknowledged."""
    cursor: int = 0
    """While there is no subscriber: where the next one is sent new messages from."""
    dropped: Counter[Reason] = field(default_factory=Counter)


class Talker:
    """One peer: what it has said and what it was sent."""

    def __init__(self, peer: WirePeer) -> None:
        self.peer = peer
        self.session_id = peer.session.session_id
        self.unstored: defaultdict[int, deque[bytes]] = defaultdict(deque)
        """Published and not stored yet: payloads by class."""
        self.unsaid: list[tuple[bytes, Meaning]] = []
        """Frames that the bus has only the beginning of."""
        self.begun = 0
        """How much of the first of them it has."""
        self.early: list[int] = []
        """Classes subscribed to that nobody has named."""
        self.replies_due = 0
        self.taken = 0
        """Bytes heard."""
        self.rest = b""
        """What must come next: the rest of a frame that was cut."""

    @property
    def waits(self) -> int:
        """Bytes of the frames that are not stored yet."""
        return sum(13 * len(queue) + sum(map(len, queue)) for queue in self.unstored.values())
