"""Records of what a simulated bus received and sent.

The checks of these records are in `promises` and its base classes.
"""

from __future__ import annotations

import re
from collections import deque
from dataclasses import dataclass, field
from math import inf
from typing import Any

from simplebus.core.message_class.message_class import MessageClass
from simplebus.core.session.session import Session
from simplebus.core.subscription.position import Position
from tests.support.oracles import parse_frame

_TOKEN = re.compile(rb"\{([a-z0-9]+)\.(\d+)\.([a-z]*)\}")
"""Part of every payload: publisher, number, traits."""


def message_token(content: bytes) -> bytes:
    """Return the part of a payload that identifies its message."""
    found = _TOKEN.search(content)
    assert found is not None, f"whose message is {content!r}?"
    return found[0]


def message_traits(content: bytes) -> bytes:
    """Return the traits of a message; empty if its content is unknown."""
    return message_token(content)[:-1].rsplit(b".", 1)[1] if content else b""


def is_timed(token: bytes) -> bool:
    """Return True if the message may be delivered late, or never."""
    return b"t" in token.rsplit(b".", 1)[1]


@dataclass(slots=True)
class Delivery:
    """Last delivery of a message."""

    holder: tuple[int, int]
    """Session and subscription."""
    tick: int
    """Tick at which its ack timeout started, or an earlier one."""
    is_open: bool = True
    """True if only an ack or its timeout ends it: it was not nacked."""


@dataclass(eq=False)
class PositionHistory:
    """Records about one position."""

    class_id: int
    key: tuple[str, str]
    """Durable and group; a position without names has a generated name."""
    channels: tuple[str, ...]
    since: int
    """The position must receive messages from this sequence on."""
    by_key: bool = False
    granted: int = 0
    """Head of the class when the position was created."""
    first: int = 0
    """The next sequence to be delivered for the first time."""
    ticks: int = 1
    """The shortest delay before a redelivery."""
    acked: set[int] = field(default_factory=set)
    """Messages acked in this process; they must not be delivered again."""
    ever_acked: set[int] = field(default_factory=set)
    """Messages that were acked, or perhaps were."""
    ever_sent: set[int] = field(default_factory=set)
    sent: dict[int, Delivery] = field(default_factory=dict)
    """Last delivery of each message by this process."""
    excused: set[int] = field(default_factory=set)
    """Messages that were being sent when their ack arrived."""
    rejected: set[int] = field(default_factory=set)
    """Messages that were being sent when their nack arrived."""
    attempts: dict[int, int] = field(default_factory=dict)
    """Number of deliveries of each message, as far as the bus must count them."""
    dropped: set[int] = field(default_factory=set)
    """Messages that the bus dropped because the class was full."""
    values: dict[bytes, int] = field(default_factory=dict)
    """By channel: the position must receive this message, or a later one of the channel."""
    delivered: int = 0
    redelivered: int = 0
    lost: int = 0
    """Deliveries that the bus counted but did not send, because the connection was closed."""

    @property
    def label(self) -> str:
        return f"{self.key} of class {self.class_id}"

    @property
    def is_group(self) -> bool:
        return bool(self.key[1])

    @property
    def durable(self) -> str:
        return self.key[0]


@dataclass
class SessionHistory:
    """Records about one session."""

    session: Session
    publisher: str = ""
    """Publisher name, or a generated name."""
    is_named: bool = False
    version: int = 0
    partial_received: bytes = b""
    partial_sent: bytes = b""
    delivery: tuple[int, int, int] = (0, 0, 0)
    """Class, attempt, subscription of the last Deliver frame."""
    pending_subscribes: deque[tuple[int, int, dict[str, Any]]] = field(default_factory=deque)
    """Unanswered Subscribe requests, in order: class, number, options."""
    position_histories: dict[int, PositionHistory] = field(default_factory=dict)
    ended_subscriptions: set[int] = field(default_factory=set)
    """Subscriptions whose acks have no effect any more."""
    limits: dict[int, int] = field(default_factory=dict)
    sent: dict[int, dict[int, Delivery]] = field(default_factory=dict)
    last: dict[int, int] = field(default_factory=dict)
    """By subscription: the last message that was delivered for the first time."""
    next: int = 0
    unconfirmed: int = 0
    """The first unconfirmed number that the client named in its Connect."""
    bus: str = ""
    clean_tick: int = 0
    """The last tick without bytes between ring and wire."""
    clean_clock: float = 0.0
    """The bus's clock at that time."""
    overtaken: set[tuple[int, int]] = field(default_factory=set)
    """Unsent messages (class, sequence) that another member received meanwhile."""
    pending_purges: deque[tuple[int, range]] = field(default_factory=deque)
    """Unanswered Purge requests, in order: class, sequences."""
    late_acks: list[tuple[PositionHistory, int]] = field(default_factory=list)
    """Messages acked by the bytes received last."""


def channel_from_traits(traits: bytes) -> bytes:
    """Return the channel of a message with these traits; empty for none."""
    return b"a.b" if b"c" in traits else b"b" if traits else b""


def expiry_from_traits(traits: bytes) -> float:
    """Return the seconds until such a message expires."""
    return inf if b"t" not in traits or b"c" not in traits else 0.3 if b"y" in traits else 5.0


def delay_from_traits(traits: bytes) -> float:
    """Return the delay of such a message in seconds."""
    return 0.0 if b"t" not in traits or b"c" in traits else 0.1 if b"y" in traits else 3.0


def stored_content(cls: MessageClass, sequence: int) -> bytes:
    """Return the content of a stored message."""
    return parse_frame(bytes(cls.ring.copy_frame(sequence)))[4]


def pending_sequences(position: Position, head: int) -> set[int]:
    """Return the sequences that a position has not sent, or that are not acked."""
    window = position.window
    pending = set(range(window.cursor, head))
    for first, last in window.unacked_ranges(window.floor, window.cursor):
        pending.update(range(first, last))
    return pending
