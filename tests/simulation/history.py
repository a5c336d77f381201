"""What is known of a bus from what it was told and has said.

Rule 1: records only; what must be true of them stands in `promises` and `outliving`.
"""

from __future__ import annotations

import re
from collections import deque
from dataclasses import dataclass, field
from math import inf
from typing import Any

from simplebus.core.message_class.message_class import MessageClass
from simplebus.core.session.session import Session
from simplebus.core.subscription.subscription import BrokerSubscription
from tests.support.oracles import parse_frame

_TOKEN = re.compile(rb"\{([a-z0-9]+)\.(\d+)\.([a-z]*)\}")
"""Stands in every payload: whose it is, which one, and what may become of it."""


def token_of(content: bytes) -> bytes:
    """What tells a message from all others."""
    found = _TOKEN.search(content)
    assert found is not None, f"whose message is {content!r}?"
    return found[0]


def what_of(content: bytes) -> bytes:
    """What may become of a message, by its content; nothing of one that is not known."""
    return token_of(content)[:-1].rsplit(b".", 1)[1] if content else b""


def is_timed(token: bytes) -> bool:
    """Whether it may come later than its place, or never."""
    return b"t" in token.rsplit(b".", 1)[1]


@dataclass(slots=True)
class Sent:
    """The last time that a message was sent to somebody."""

    holder: tuple[int, int]
    """Session and subscription."""
    tick: int
    """No later than when its time began to run."""
    is_open: bool = True
    """Whether nothing but its time and an ack ends it: it was not nacked."""


@dataclass
class Place:
    """What is known of one position."""

    class_id: int
    key: tuple[str, str]
    """Durable and group; a plain one has a name of its own."""
    channels: tuple[str, ...]
    since: int
    """Messages from this one on are for it."""
    by_key: bool = False
    granted: int = 0
    """The head of the class when it came to be."""
    first: int = 0
    """The next one that it is to be sent for the first time."""
    ticks: int = 1
    """The shortest pause before it is sent something again."""
    acked: set[int] = field(default_factory=set)
    """Of this process: these must not be sent again."""
    ever_acked: set[int] = field(default_factory=set)
    """What was acknowledged, or perhaps was."""
    ever_sent: set[int] = field(default_factory=set)
    sent: dict[int, Sent] = field(default_factory=dict)
    """By this process, and how the last time."""
    excused: set[int] = field(default_factory=set)
    """What was under way when its ack came."""
    attempts: dict[int, int] = field(default_factory=dict)
    """How often it was sent messages, as far as the bus must know."""
    dropped: set[int] = field(default_factory=set)
    """What the bus let go of for want of room."""
    values: dict[bytes, int] = field(default_factory=dict)
    """By channel: it is to be sent this message, or one that came later there."""
    delivered: int = 0
    redelivered: int = 0
    lost: int = 0
    """Counted as sent by the bus, and never left it: the connection had gone."""

    @property
    def is_group(self) -> bool:
        return bool(self.key[1])

    @property
    def durable(self) -> str:
        return self.key[0]


@dataclass
class Talk:
    """What is known of one session."""

    session: Session
    who: str = ""
    """The publisher's name, or a name for this session alone."""
    is_named: bool = False
    version: int = 0
    heard: bytes = b""
    told: bytes = b""
    delivery: tuple[int, int, int] = (0, 0, 0)
    """Class, attempt, subscription."""
    asked: deque[tuple[int, int, dict[str, Any]]] = field(default_factory=deque)
    """Subscribes that are not answered, in order: class, number, wish."""
    places: dict[int, Place] = field(default_factory=dict)
    left: set[int] = field(default_factory=set)
    """Subscriptions that it has ended: what it says of them is of no effect."""
    limits: dict[int, int] = field(default_factory=dict)
    sent: dict[int, dict[int, Sent]] = field(default_factory=dict)
    last: dict[int, int] = field(default_factory=dict)
    """By subscription: what it was sent last for the first time."""
    next: int = 0
    unconfirmed: int = 0
    """What it has said to be the first number that was not confirmed, and by which bus."""
    bus: str = ""
    clean_tick: int = 0
    """When nothing waited between the ring and the wire."""
    clean_clock: float = 0.0
    """And the bus's clock then."""
    overtaken: set[tuple[int, int]] = field(default_factory=set)
    """Class and sequence of what waits for its wire, and was sent to another member meanwhile."""
    purges: deque[tuple[int, range]] = field(default_factory=deque)
    """Purges that are not answered, in order: class, messages."""
    late_acks: list[tuple[Place, int]] = field(default_factory=list)
    """What the last bytes acknowledged."""


def channel_of(what: bytes) -> bytes:
    """The channel of such a message; empty for none."""
    return b"a.b" if b"c" in what else b"b" if what else b""


def expires_of(what: bytes) -> float:
    """After how many seconds such a message expires."""
    return inf if b"t" not in what or b"c" not in what else 0.3 if b"y" in what else 5.0


def opens_of(what: bytes) -> float:
    """Before how many seconds are over such a message is not sent."""
    return 0.0 if b"t" not in what or b"c" in what else 0.1 if b"y" in what else 3.0


def content_of(cls: MessageClass, sequence: int) -> bytes:
    """What a stored message holds."""
    return parse_frame(bytes(cls.ring.copy_frame(sequence)))[4]


def pending_of(position: BrokerSubscription, head: int) -> set[int]:
    """What a position has to be sent, or to have acknowledged."""
    window = position.window
    pending = set(range(window.cursor, head))
    for first, last in window.unacked_ranges(window.floor, window.cursor):
        pending.update(range(first, last))
    return pending
