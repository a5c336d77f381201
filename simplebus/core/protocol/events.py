"""Events that a decoder returns for the frames of a peer.

Events carry batches, never one object per message. At low load a batch is often a single frame, for
which `PublishedFrame` and `AckedRange` avoid arrays.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from simplebus.core.errors import Reason
from simplebus.core.limits import MESSAGE_ID_MASK, PRODUCER_RESENT_NUMBERS_MAX
from simplebus.core.protocol.envelope_batch import EnvelopeColumns
from simplebus.core.protocol.frames import FrameBatch, Integers
from simplebus.core.protocol.inquiry import AcksInquiry, Inquiry
from simplebus.core.protocol.requests import (
    ConnectRequest,
    FetchRequest,
    PurgeRequest,
    SubscribeRequest,
    UnsubscribeRequest,
)

# What takes as long as creating one subscription, a slow event.
_CLASSES_PER_SLOW_EVENT = 64
_ACKS_PER_SLOW_EVENT = 1024
_NACKS_PER_SLOW_EVENT = 2


@dataclass(frozen=True, slots=True)
class Version1Connected:
    """The peer sent a version 1 Connect and expects its session id (binary.md, "Version 1")."""

    class_ids: tuple[int, ...]

    @property
    def slow_event_count(self) -> float:
        """Number of slow events that it counts as."""
        return len(self.class_ids) / _CLASSES_PER_SLOW_EVENT


@dataclass(frozen=True, slots=True)
class Version1Subscribed:
    """The peer subscribed to a class with version 1 (binary.md, "Version 1")."""

    class_id: int


@dataclass(frozen=True, slots=True)
class PublishedBatch:
    """The peer published consecutive messages of one class and one frame type."""

    class_id: int
    frames: FrameBatch
    """Valid until the receive buffer is filled again."""
    columns: EnvelopeColumns | None = None
    """Columns of the envelopes, if the publisher's listener has encoded them; else None."""


@dataclass(frozen=True, slots=True)
class AckedRanges:
    """The peer acknowledged ranges of message ids."""

    subscription_number: int
    """Number in version 2; the class id in version 1, which has one subscription per class."""
    firsts: Integers
    """Message ids, shape (n,)."""
    lasts: Integers
    """Exclusive ends, shape (n,)."""

    @property
    def slow_event_count(self) -> float:
        """Number of slow events that it counts as."""
        return self.firsts.size / _ACKS_PER_SLOW_EVENT


@dataclass(slots=True)
class PublishedFrame:
    """The peer published a single message. See `PublishedBatch`."""

    class_id: int
    frame: memoryview


@dataclass(slots=True)
class AckedRange:
    """The peer acknowledged a single range of message ids. See `AckedRanges`."""

    subscription_number: int
    first: int
    last: int


# Version 2.


@dataclass(frozen=True, slots=True)
class ConnectRequested:
    """The peer authenticated, opened further classes, or checked the connection ("Connect")."""

    request_number: int
    body: ConnectRequest

    @property
    def slow_event_count(self) -> float:
        """Number of slow events that it counts as."""
        return len(self.body.classes) / _CLASSES_PER_SLOW_EVENT


@dataclass(frozen=True, slots=True)
class SubscribeRequested:
    """The peer subscribed to a class under a number of its choice ("Subscribe")."""

    request_number: int
    class_id: int
    subscription_number: int
    body: SubscribeRequest

    slow_event_count = 1.0


@dataclass(frozen=True, slots=True)
class UnsubscribeRequested:
    """The peer ended a subscription ("Unsubscribe")."""

    request_number: int
    subscription_number: int
    body: UnsubscribeRequest


@dataclass(frozen=True, slots=True)
class FetchRequested:
    """The peer asked for stored messages ("Fetch")."""

    request_number: int
    class_id: int
    body: FetchRequest


@dataclass(frozen=True, slots=True)
class InquireRequested:
    """The peer asked for the state of the bus ("Inquire")."""

    request_number: int
    body: Inquiry | AcksInquiry


@dataclass(frozen=True, slots=True)
class PurgeRequested:
    """The peer asked to discard stored messages ("Purge")."""

    request_number: int
    class_id: int
    body: PurgeRequest


@dataclass(frozen=True, slots=True)
class NackReceived:
    """The peer could not process message ids first..last-1 ("Nack")."""

    subscription_number: int
    first: int
    last: int
    delay: float | None
    """Seconds until redelivery; None for the backoff of their attempts."""
    error: str = ""
    """Failure reason; empty if none was given."""
    attempt: int = 0
    """Attempt of the delivery that is rejected; 0 for any."""

    slow_event_count = 1 / _NACKS_PER_SLOW_EVENT


@dataclass(frozen=True, slots=True)
class WorkingReceived:
    """The peer is still processing message ids first..last-1; their ack timeout restarts."""

    subscription_number: int
    first: int
    last: int
    attempt: int = 0
    """See `NackReceived.attempt`."""

    slow_event_count = 1 / _NACKS_PER_SLOW_EVENT


@dataclass(frozen=True, slots=True)
class TerminateReceived:
    """The peer rejected message ids first..last-1 for good; they become dead letters."""

    subscription_number: int
    first: int
    last: int
    error: str = ""
    attempt: int = 0
    """See `NackReceived.attempt`."""

    slow_event_count = 1 / _NACKS_PER_SLOW_EVENT


@dataclass(frozen=True, slots=True)
class FrameRefused:
    """A frame had no effect. Messages in it are not stored."""

    reason: Reason
    message: str
    frame_type: int
    class_id: int = 0
    refers_to: int = 0
    """Request number, or first number of the refused messages."""
    count: int = 1
    published_count: int = 0
    """Number of refused messages."""
    is_repeated: bool = False
    """True if the refusal was sent before, to a connection that may have lost it."""

    def merge(self, after: FrameRefused) -> FrameRefused | None:
        """Return one refusal for the messages of this one and of `after`; None if they cannot be
        merged.
        """
        follows = (self.refers_to + self.count) & MESSAGE_ID_MASK == after.refers_to
        if (
            not follows
            or self.count > PRODUCER_RESENT_NUMBERS_MAX
            or self.class_id != after.class_id
            or self.frame_type != after.frame_type
            or self.message != after.message
            or self.reason is not after.reason
        ):
            return None
        return replace(self, count=self.count + after.count)


Event = (
    PublishedFrame
    | AckedRange
    | Version1Connected
    | Version1Subscribed
    | PublishedBatch
    | AckedRanges
    | ConnectRequested
    | SubscribeRequested
    | UnsubscribeRequested
    | FetchRequested
    | PurgeRequested
    | InquireRequested
    | NackReceived
    | WorkingReceived
    | TerminateReceived
    | FrameRefused
)
