"""What a session understood from a peer's bytes.

Rule 1: events carry batches, never one object per message.
Rule 2: events are facts; what follows from them is the broker's business.
"""

from __future__ import annotations

from dataclasses import dataclass

from simplebus.core.frames import FrameBatch, Integers


@dataclass(frozen=True, slots=True)
class Connected:
    """The peer named classes, and awaits its session id."""

    class_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Subscribed:
    """The peer wants a class's messages."""

    class_id: int


@dataclass(frozen=True, slots=True)
class Published:
    """The peer handed over a run of messages of one class."""

    class_id: int
    frames: FrameBatch
    """Valid until the receive buffer is filled again."""


@dataclass(frozen=True, slots=True)
class Acked:
    """The peer acknowledged ranges of message ids of one class."""

    class_id: int
    firsts: Integers
    """Message ids, shape (n,)."""
    lasts: Integers
    """Exclusive ends, shape (n,)."""


Event = Connected | Subscribed | Published | Acked
