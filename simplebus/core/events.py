"""What a session understood from a peer's bytes.

Rule 1: events carry batches, never one object per message. At low load a batch is a single frame;
for that there are events without arrays, which say the same.
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


@dataclass(slots=True)
class PublishedOne:
    """The peer handed over a single message: what `Published` says of a batch."""

    class_id: int
    frame: memoryview


@dataclass(slots=True)
class AckedOne:
    """The peer acknowledged a single range: what `Acked` says of several."""

    class_id: int
    first: int
    last: int


Event = PublishedOne | AckedOne | Connected | Subscribed | Published | Acked
