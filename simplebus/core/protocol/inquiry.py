"""JSON bodies of Inquire requests and replies (binary.md, "Inquire").

Every field has a default, so that peers of different versions understand each other. Durations are
seconds relative to the time of the reply. Lists are bounded; a field beside each list counts the
entries that were left out.
"""

from __future__ import annotations

from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta

from simplebus.core.errors import Reason, RemoteProtocolError
from simplebus.core.limits import CHANNEL_BYTES_MAX
from simplebus.core.protocol.requests import ClassId, Name, check_request_size


class InquireRequest(msgspec.Struct, frozen=True, omit_defaults=True, tag_field="about"):
    """Body of an Inquire request, tagged with its subject in the field `about`."""


class BusInquiry(InquireRequest, frozen=True, tag="bus"):
    """Inquiry about the whole bus."""


class ClassInquiry(InquireRequest, frozen=True, tag="class"):
    """Inquiry about one class."""

    class_: ClassId | Name = msgspec.field(name="class")


class ChannelInquiry(InquireRequest, frozen=True, tag="channel"):
    """Inquiry about the subscribers of one channel."""

    channel: Annotated[str, Meta(min_length=1, max_length=CHANNEL_BYTES_MAX)]
    class_: ClassId | Name | None = msgspec.field(name="class", default=None)
    """Restricts the inquiry to one class."""


class SessionInquiry(InquireRequest, frozen=True, tag="session"):
    """Inquiry about one session."""

    session: int


class AcksInquiry(InquireRequest, frozen=True, tag="acks"):
    """Question whether the acks of the session are stored; the reply waits until they are."""


Inquiry = BusInquiry | ClassInquiry | ChannelInquiry | SessionInquiry


class _Info(msgspec.Struct, frozen=True):
    pass


class InFlightInfo(_Info, frozen=True):
    """Message in flight."""

    sequence: int = 0
    attempt: int = 0
    sent_seconds: float = 0.0
    """Seconds since its last delivery or the consumer's last Working frame."""
    first_seconds: float = 0.0
    """Approximate seconds since its first delivery."""
    due_seconds: float = 0.0
    """Seconds until its redelivery."""


class MemberInfo(_Info, frozen=True):
    """Member of a group."""

    session: int = -1
    number: int = 0
    """Subscription number in its session."""
    name: str = ""
    """Client name; empty if none was given."""
    peer: str = ""
    in_flight: int = 0
    """Messages in flight to this member."""
    in_flight_max: int = 0
    in_flight_bytes: int = 0
    oldest: InFlightInfo | None = None
    waits: str = "nothing"
    waits_for: str = ""


class PositionInfo(_Info, frozen=True):
    """Position of a subscription or group."""

    class_id: int = 0
    session: int = -1
    """-1 if no session is attached, and for groups."""
    number: int = 0
    name: str = ""
    peer: str = ""
    durable: str = ""
    group: str = ""
    owner: str = ""
    """User that created the position; empty if unknown."""
    patterns: list[str] = []
    """Empty for all messages."""
    patterns_left_out: int = 0
    cursor: int = 0
    floor: int = 0
    lag: int = 0
    """Stored messages from the floor on, matching or not."""
    unsent: int = 0
    """Stored messages from the cursor on, matching or not."""
    to_redeliver: int = 0
    """Messages to be sent again now."""
    blocked_by_key: int = 0
    """Messages of a key-ordered group that wait for an earlier message of their key."""
    in_flight: int = 0
    in_flight_max: int = 0
    """0 for unlimited."""
    in_flight_bytes: int = 0
    oldest: InFlightInfo | None = None
    delayed: int = 0
    """Messages that are delayed."""
    delayed_seconds: float = 0.0
    """Seconds until the first delayed message is due."""
    delivered: int = 0
    redelivered: int = 0
    acknowledged: int = 0
    dropped: int = 0
    undelivered: dict[str, int] = {}
    """Messages that were never sent, or not sent again, by reason."""
    dead_letters: int = 0
    """Number of the undelivered messages that became dead letters and were not lost."""
    idle_seconds: float = 0.0
    """Seconds without an attached session."""
    members: list[MemberInfo] = []
    members_left_out: int = 0
    waits: str = "nothing"
    """Keyword for the event that the position waits for."""
    waits_for: str = ""
    """Sentence about the event that the position waits for."""
    waiting_dead_letters: int = 0
    """Messages that wait for space in the class of dead letters."""


class PublisherInfo(_Info, frozen=True):
    """Session with messages that wait for space in a class."""

    session: int = -1
    name: str = ""
    peer: str = ""
    messages: int = 0
    """Messages of this class, and messages of other classes queued behind them."""
    bytes: int = 0
    seconds: float = 0.0
    """Approximate seconds for which the session has waited."""
    is_gone: bool = False


class BusInfo(_Info, frozen=True, tag_field="about", tag="bus"):
    """State of the bus."""

    bus: str = ""
    now: float = 0.0
    """Time of the bus in seconds since 1970."""
    memory_bytes: int = 0
    memory_max: int = 0
    level: str = "memory"
    """Durability of confirmed messages."""
    failure: str = ""
    """Reason that the journal cannot be written now; empty if it can."""
    refused: dict[str, int] = {}
    """Protocol errors of peers, by reason."""
    classes: list[ClassOverview] = []
    """Classes that grow without a subscription first, then classes with waiting publishers, then
    classes with most messages.
    """
    classes_left_out: int = 0
    sessions: list[SessionOverview] = []
    sessions_left_out: int = 0


class ClassOverview(_Info, frozen=True):
    """Short description of a class."""

    class_id: int = 0
    name: str = ""
    stored: int = 0
    positions: int = 0
    publishers: int = 0
    """Sessions that wait for space."""
    dropped: int = 0
    """Messages dropped without becoming dead letters."""
    is_remote: bool = False
    """True if a cluster stores the class; then its messages are only counted in `ClassInfo`."""
    warning: str = ""
    """Sentence about a class that has only publishers or only subscribers."""


class SessionOverview(_Info, frozen=True):
    """Short description of a session."""

    session: int = -1
    name: str = ""
    peer: str = ""
    version: int = 0
    user: str = ""


class ClassInfo(_Info, frozen=True, tag_field="about", tag="class"):
    """State of a class."""

    class_id: int = 0
    name: str = ""
    now: float = 0.0
    floor: int = 0
    """Lowest stored sequence."""
    head: int = 0
    """Next sequence to be assigned."""
    stored: int = 0
    stored_max: int = 0
    """0 for unlimited."""
    stored_bytes: int = 0
    """Bytes of stored frames."""
    memory_bytes: int = 0
    memory_max: int = 0
    newest_seconds: float | None = None
    """Approximate seconds since the newest stored message was accepted; None without messages."""
    oldest_seconds: float | None = None
    policy: str = ""
    """Full-class policy."""
    retention: str = ""
    """Retention; empty for none."""
    subjects: list[str] = []
    """Bound NATS subjects."""
    level: str = "memory"
    durable_before: int = 0
    """All sequences below it have reached the durability `level`."""
    backlog: int = 0
    """Messages that wait for a first subscription."""
    purged: int = 0
    """Stored messages that are purged."""
    channels: int = 0
    delivered: int = 0
    redelivered: int = 0
    acknowledged: int = 0
    dropped: dict[str, int] = {}
    """Messages that were not stored, or not delivered to a position, by reason."""
    dead_class: int | None = None
    """Class of its dead letters, if it exists."""
    dead_letters: int = 0
    """Messages stored in that class."""
    positions: list[PositionInfo] = []
    """Positions with the largest lag."""
    positions_left_out: int = 0
    publishers: list[PublisherInfo] = []
    """Publishers that wait for space, longest wait first."""
    publishers_left_out: int = 0
    waits_for: str = ""
    """Position that holds the floor, and publishers that wait for it."""
    unknown: str = ""
    """Reason that the counts of stored messages in the cluster are unknown; empty if they are
    known. If they are unknown, they are 0.
    """
    on_way: int = 0
    """Messages that were accepted here and are not known to be stored in the cluster."""


class MatchInfo(_Info, frozen=True):
    """Subscriber that matches a channel, or nearly matches."""

    class_id: int = 0
    who: str = ""
    """Description, such as: durable 'billing', session 4 (127.0.0.1:5001)."""
    session: int = -1
    number: int = 0
    durable: str = ""
    group: str = ""
    pattern: str = ""
    """Matching pattern; empty for subscribers of all messages or if it was not determined."""
    why_not: str = ""
    """Reason that it does not match; empty if it does."""


class ChannelClassInfo(_Info, frozen=True):
    """Messages and subscribers of a channel in one class."""

    class_id: int = 0
    name: str = ""
    stored: int = 0
    """Stored messages of this channel."""
    subjects: list[str] = []
    """Matching bound subjects: messages that NATS clients publish there are stored in this class.
    """
    matches: list[MatchInfo] = []
    near: list[MatchInfo] = []
    left_out: int = 0
    """Positions in neither list that may match."""


class ListenerInfo(_Info, frozen=True):
    """NATS subscribers of a channel."""

    pattern: str = ""
    queue: str = ""
    """Queue group; empty for a single subscription."""
    members: int = 1
    peer: str = ""
    """Address of one member."""


class ChannelInfo(_Info, frozen=True, tag_field="about", tag="channel"):
    """Subscribers of a channel."""

    channel: str = ""
    now: float = 0.0
    classes: list[ChannelClassInfo] = []
    """Classes with messages or subscribers of this channel."""
    classes_left_out: int = 0
    listeners: list[ListenerInfo] = []
    listeners_left_out: int = 0


class SessionInfo(_Info, frozen=True, tag_field="about", tag="session"):
    """State of a session."""

    session: int = -1
    now: float = 0.0
    version: int = 0
    """0 if not known yet; -1 for a session of another listener."""
    name: str = ""
    peer: str = ""
    user: str = ""
    """Authenticated user; empty without authentication."""
    level: str = "memory"
    unconfirmed: int = 0
    """Published messages that are not confirmed."""
    leaves_out: bool = False
    """True if `unconfirmed` is an upper bound because the client may leave out numbers."""
    parked: int = 0
    """Unconfirmed messages that wait for space in a class."""
    parked_bytes: int = 0
    parked_class: int | None = None
    """Class that the first parked message waits for."""
    parked_seconds: float = 0.0
    pending_bytes: int = 0
    """Memory held for the session outside the rings."""
    full_seconds: float = 0.0
    """Seconds for which the peer has read none of the bytes that wait for it."""
    heartbeat: float = 0.0
    refused: dict[str, int] = {}
    """Refused requests and messages, by reason."""
    positions: list[PositionInfo] = []
    positions_left_out: int = 0
    is_read: bool = True
    """True if the server reads from the connection."""
    waits_for: str = ""
    """Reasons why the server does not read from the connection, or why messages wait."""


class AcksInfo(_Info, frozen=True, tag="acks", tag_field="about"):
    """Statement that the acks that the session sent before are stored."""


InquireReply = BusInfo | ClassInfo | ChannelInfo | SessionInfo

_inquiry_decoder: msgspec.json.Decoder[Inquiry | AcksInquiry] = msgspec.json.Decoder(
    Inquiry | AcksInquiry
)
_reply_decoder: msgspec.json.Decoder[InquireReply | AcksInfo] = msgspec.json.Decoder(
    InquireReply | AcksInfo
)


def decode_inquiry(content: bytes) -> Inquiry | AcksInquiry:
    """Decode the body of an Inquire request; empty content asks about the bus.

    Raises:
        RemoteProtocolError: bad_request if the body is not valid, or too long.
    """
    check_request_size("question", content)
    return _decode(_inquiry_decoder, content or b'{"about":"bus"}', "an Inquire")


def decode_reply(content: bytes) -> InquireReply | AcksInfo:
    """Decode the body of a reply to an Inquire request.

    Raises:
        RemoteProtocolError: bad_request if the body is not valid.
    """
    return _decode(_reply_decoder, content, "the answer to an Inquire")


T = TypeVar("T")


def _decode(decoder: msgspec.json.Decoder[T], content: bytes, description: str) -> T:
    try:
        return decoder.decode(content)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        shown = content[:60].decode("utf-8", "backslashreplace")
        raise RemoteProtocolError(
            Reason.BAD_REQUEST, f"{description} held {shown!r}: {error}"
        ) from None
