"""What a session understood from a peer's bytes.

Rule 1: events carry batches, never one object per message. At low load a batch is a single frame;
for that there are events without arrays, which say the same.
Rule 2: events are facts; what follows from them is the broker's business.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from simplebus.core.errors import Reason
from simplebus.core.limits import MESSAGE_ID_MASK, PUBLISHER_RESENT_MAX
from simplebus.core.protocol.frames import FrameBatch, Integers
from simplebus.core.protocol.inquiry import Question
from simplebus.core.protocol.requests import (
    ConnectRequest,
    FetchRequest,
    PurgeRequest,
    SubscribeRequest,
    UnsubscribeRequest,
)

_CLASSES_PER_HEAVY = 64
"""So many classes take as long to be named as a subscription to be made."""


@dataclass(frozen=True, slots=True)
class Connected:
    """The peer named classes, and awaits its session id."""

    class_ids: tuple[int, ...]

    @property
    def heavy(self) -> int:
        """As how many events it counts that take long."""
        return len(self.class_ids) // _CLASSES_PER_HEAVY


@dataclass(frozen=True, slots=True)
class Subscribed:
    """The peer wants a class's messages."""

    class_id: int


@dataclass(frozen=True, slots=True)
class Published:
    """The peer handed over a run of messages of one class and one frame type."""

    class_id: int
    frames: FrameBatch
    """Valid until the receive buffer is filled again."""


@dataclass(frozen=True, slots=True)
class Acked:
    """The peer acknowledged ranges of message ids."""

    key: int
    """Whose: in version 1 the class, in version 2 the subscription's number."""
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

    key: int
    first: int
    last: int


# Version 2.


@dataclass(frozen=True, slots=True)
class Greeted:
    """The peer said who it is, or named more classes, or wants to know that it was heard."""

    request: int
    asked: ConnectRequest

    @property
    def heavy(self) -> int:
        """As how many events it counts that take long."""
        return len(self.asked.classes) // _CLASSES_PER_HEAVY


@dataclass(frozen=True, slots=True)
class SubscriptionAsked:
    """The peer wants a class's messages under a number of its choice."""

    request: int
    class_id: int
    number: int
    asked: SubscribeRequest

    heavy = 1


@dataclass(frozen=True, slots=True)
class UnsubscriptionAsked:
    """The peer wants no more of a subscription."""

    request: int
    number: int
    asked: UnsubscribeRequest


@dataclass(frozen=True, slots=True)
class FetchAsked:
    """The peer wants to see stored messages."""

    request: int
    class_id: int
    asked: FetchRequest


@dataclass(frozen=True, slots=True)
class InquiryAsked:
    """The peer wants to know what waits for what."""

    request: int
    asked: Question


@dataclass(frozen=True, slots=True)
class PurgeAsked:
    """The peer wants stored messages to be nobody's any more."""

    request: int
    class_id: int
    asked: PurgeRequest


@dataclass(frozen=True, slots=True)
class Nacked:
    """The peer could not process message ids first..last-1."""

    number: int
    first: int
    last: int
    delay: float | None
    """Seconds until they are to come again; None for the pause that their attempts have earned."""
    error: str = ""
    """What went wrong; empty when nothing is said."""
    attempt: int = 0
    """Which sending of them is meant; 0 for whichever it was."""


@dataclass(frozen=True, slots=True)
class StillWorking:
    """The peer needs more time for message ids first..last-1."""

    number: int
    first: int
    last: int
    attempt: int = 0
    """As of `Nacked`."""


@dataclass(frozen=True, slots=True)
class Terminated:
    """Message ids first..last-1 are not to be sent again: the peer can never process them."""

    number: int
    first: int
    last: int
    error: str = ""
    attempt: int = 0
    """Both as of `Nacked`."""


@dataclass(frozen=True, slots=True)
class Refused:
    """A frame had no effect. What it published, if anything, is not stored."""

    reason: Reason
    sentence: str
    frame_type: int
    class_id: int = 0
    refers_to: int = 0
    """The request's number, or the first number of the messages."""
    count: int = 1
    published: int = 0
    """How many messages are refused by this."""
    again: bool = False
    """Whether it was said before, to somebody who may not have heard it."""

    def joined(self, after: Refused) -> Refused | None:
        """The same said of this one's messages and of those behind them in one; None where that
        cannot be."""
        follows = (self.refers_to + self.count) & MESSAGE_ID_MASK == after.refers_to
        if (
            not follows
            or self.count > PUBLISHER_RESENT_MAX
            or self.class_id != after.class_id
            or self.frame_type != after.frame_type
            or self.sentence != after.sentence
            or self.reason is not after.reason
        ):
            return None
        return replace(self, count=self.count + after.count)


Event = (
    PublishedOne
    | AckedOne
    | Connected
    | Subscribed
    | Published
    | Acked
    | Greeted
    | SubscriptionAsked
    | UnsubscriptionAsked
    | FetchAsked
    | PurgeAsked
    | InquiryAsked
    | Nacked
    | StillWorking
    | Terminated
    | Refused
)
