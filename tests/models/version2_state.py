"""What the model of a version 2 bus remembers: of messages, positions, peers and publishers.

Rule 1: see version2_model.py, which says what becomes of it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from simplebus.core.protocol.requests import SubscribeRequest
from tests.behaviour import wire_peer_v2
from tests.behaviour.wire_peer_v2 import Version2Peer

CLASSES = (1, 2)
ACK_TIMEOUT = 3


class Message(NamedTuple):
    """One that somebody publishes. Its payload tells it from every other one."""

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


class Stored(NamedTuple):
    """One that a class has accepted."""

    message: Message
    expires: float
    opens: float


@dataclass(eq=False)
class Position:
    """A subscription's, a durable's or a group's part in one class."""

    asked: SubscribeRequest
    todo: set[int] = field(default_factory=set)
    """What it is to be sent and has not acknowledged."""
    left: set[int] = field(default_factory=set)
    """What somebody else left: it may have been sent, and then pauses; so often that it pauses
    long, or is given up."""
    sends: dict[int, int] = field(default_factory=dict)
    """How often each was heard."""
    out: dict[int, tuple[tuple[Talker, int], int]] = field(default_factory=dict)
    """In flight: which talker's subscription was sent it, in which tick."""
    free: set[int] = field(default_factory=set)
    """What may come again at any time: refused, or its consumer has gone."""
    waits: dict[int, float] = field(default_factory=dict)
    """Refused with a delay: not before."""
    pauses: dict[int, int] = field(default_factory=dict)
    """Refused without one: not before this tick."""
    idle_seconds: float | None = None
    """How long it stays while nobody is there, and since when nobody is."""
    idle_since: float = 0.0

    @property
    def outlives(self) -> bool:
        return self.asked.durable is not None

    def pause(self, sends: int) -> int:
        """Ticks until what was refused comes again, or more if it was sent more often."""
        if self.asked.backoff:
            return int(self.asked.backoff[min(sends, len(self.asked.backoff)) - 1])
        return min(ACK_TIMEOUT * 2 ** (sends - 1), 60)


class Talker:
    """One connection."""

    def __init__(self, peer: Version2Peer) -> None:
        self.peer = peer
        self.session_id = peer.session.session_id
        self.taken = 0
        self.begun = b""
        self.copied_until = 0
        """Up to here in its stream, what comes may have been copied a while ago."""
        self.subscriptions: dict[int, tuple[int, Position]] = {}
        """Class and position by number."""
        self.limits: dict[int, int | None] = {}
        """How much each may have in flight."""
        self.named: tuple[int, int, int] = (0, 0, 0)


class Author:
    """One program that publishes, over as many connections as it takes."""

    def __init__(self, name: str, first: int) -> None:
        self.name = name
        self.confirmed = first
        self.unconfirmed: list[Message] = []
        self.talker: Talker | None = None
        self.is_displaced = False
        """Whether another program had the name since."""
        self.may_be_twice: set[bytes] = set()
        """What was unconfirmed then."""
