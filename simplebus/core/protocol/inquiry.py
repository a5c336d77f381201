"""What a bus says of itself when it is asked what waits for what: shapes only.

Rule 1: every field has a default, so that a bus and a program of different age understand each
other. Spans of time are seconds before or after the moment of the answer.
Rule 2: every list is bounded; what was left out is counted beside it.
"""

from __future__ import annotations

from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta

from simplebus.core.errors import Reason, RemoteProtocolError
from simplebus.core.limits import CHANNEL_BYTES_MAX
from simplebus.core.protocol.requests import ClassId, Name


class InquireRequest(msgspec.Struct, frozen=True, omit_defaults=True, tag_field="about"):
    """What is asked about."""


class BusQuestion(InquireRequest, frozen=True, tag="bus"):
    """Everything, in short."""


class ClassQuestion(InquireRequest, frozen=True, tag="class"):
    """A class."""

    class_: ClassId | Name = msgspec.field(name="class")


class ChannelQuestion(InquireRequest, frozen=True, tag="channel"):
    """A channel: who gets what is published there."""

    channel: Annotated[str, Meta(min_length=1, max_length=CHANNEL_BYTES_MAX)]
    class_: ClassId | Name | None = msgspec.field(name="class", default=None)
    """In this class only."""


class SessionQuestion(InquireRequest, frozen=True, tag="session"):
    """A session."""

    session: int


Question = BusQuestion | ClassQuestion | ChannelQuestion | SessionQuestion


class _Said(msgspec.Struct, frozen=True):
    pass


class Flight(_Said, frozen=True):
    """A message that was sent and is not acknowledged."""

    sequence: int = 0
    attempt: int = 0
    sent_seconds: float = 0.0
    """How long ago it was sent, or its consumer has said that it is at it."""
    first_seconds: float = 0.0
    """About how long ago it was sent for the first time."""
    due_seconds: float = 0.0
    """In how long it is sent again."""


class Member(_Said, frozen=True):
    """One subscription of a group."""

    session: int = -1
    number: int = 0
    """What its session calls it."""
    name: str = ""
    """What its program calls itself; empty where it does not."""
    peer: str = ""
    in_flight: int = 0
    """Messages that it has."""
    in_flight_max: int = 0
    in_flight_bytes: int = 0
    oldest: Flight | None = None
    waits: str = "nothing"
    waits_for: str = ""


class Position(_Said, frozen=True):
    """One subscription, or what several share."""

    class_id: int = 0
    session: int = -1
    """-1 while nobody is connected, and of a group."""
    number: int = 0
    name: str = ""
    peer: str = ""
    durable: str = ""
    group: str = ""
    owner: str = ""
    """The user that made it; empty where that is nobody, or not known."""
    patterns: list[str] = []
    """None: every message."""
    patterns_left_out: int = 0
    cursor: int = 0
    floor: int = 0
    lag: int = 0
    """Stored messages from its floor on, whether they are for it or not."""
    unsent: int = 0
    """And from its cursor on."""
    again: int = 0
    """Messages that are to be sent again now."""
    behind: int = 0
    """Messages that wait for others of their key: of a group by key."""
    in_flight: int = 0
    in_flight_max: int = 0
    """0 for any number."""
    in_flight_bytes: int = 0
    oldest: Flight | None = None
    put_off: int = 0
    """Messages that are to be sent at a later time."""
    put_off_seconds: float = 0.0
    """In how long the first of them is."""
    delivered: int = 0
    redelivered: int = 0
    acknowledged: int = 0
    dropped: int = 0
    undelivered: dict[str, int] = {}
    """Messages that it was not sent, or not again, by reason."""
    dead_letters: int = 0
    """Those of them that lie in the dead letters, but for what was lost there."""
    alone_seconds: float = 0.0
    """How long nobody has been connected to it."""
    members: list[Member] = []
    members_left_out: int = 0
    waits: str = "nothing"
    """One word for what it waits for."""
    waits_for: str = ""
    """And a sentence."""
    unburied: int = 0
    """Messages that are given up, and wait for room among the dead letters."""


class Publisher(_Said, frozen=True):
    """A session some of whose messages wait for room in a class."""

    session: int = -1
    name: str = ""
    peer: str = ""
    messages: int = 0
    """Of this class and of others behind them."""
    bytes: int = 0
    seconds: float = 0.0
    """How long it has waited, about."""
    is_gone: bool = False


class BusSaid(_Said, frozen=True, tag_field="about", tag="bus"):
    """Everything, in short."""

    bus: str = ""
    now: float = 0.0
    """Seconds since 1970 by the bus's clock."""
    memory_bytes: int = 0
    memory_max: int = 0
    level: str = "memory"
    """How safe what is confirmed is."""
    failure: str = ""
    """Why nothing can be kept now; empty while all is well."""
    refused: dict[str, int] = {}
    """What peers did wrong, by reason."""
    classes: list[ClassLine] = []
    """First those in which publishers wait, then those that store most."""
    classes_left_out: int = 0
    sessions: list[SessionLine] = []
    sessions_left_out: int = 0


class ClassLine(_Said, frozen=True):
    """One class, in short."""

    class_id: int = 0
    name: str = ""
    stored: int = 0
    positions: int = 0
    publishers: int = 0
    """Sessions that wait for room."""
    dropped: int = 0
    is_elsewhere: bool = False
    """Whether a cluster keeps it: what is stored there is told of one class at a time."""


class SessionLine(_Said, frozen=True):
    """One session, in short."""

    session: int = -1
    name: str = ""
    peer: str = ""
    version: int = 0
    user: str = ""


class ClassSaid(_Said, frozen=True, tag_field="about", tag="class"):
    """One class."""

    class_id: int = 0
    name: str = ""
    now: float = 0.0
    floor: int = 0
    """The lowest sequence that is stored."""
    head: int = 0
    """The next one to be given out."""
    stored: int = 0
    stored_max: int = 0
    """0 for any number."""
    stored_bytes: int = 0
    """Of frames."""
    memory_bytes: int = 0
    memory_max: int = 0
    newest_seconds: float | None = None
    """How long ago the newest stored message was accepted, about; None without one."""
    oldest_seconds: float | None = None
    policy: str = ""
    """What happens when it is full."""
    keeps: str = ""
    """What it keeps of what nobody needs; empty for nothing."""
    subjects: list[str] = []
    """Bound at the NATS door."""
    level: str = "memory"
    safe: int = 0
    """All below this sequence has reached the level."""
    backlog: int = 0
    """Messages that wait for a first subscription."""
    purged: int = 0
    """Stored messages that nobody is to have."""
    channels: int = 0
    delivered: int = 0
    redelivered: int = 0
    acknowledged: int = 0
    dropped: dict[str, int] = {}
    """Messages not kept, or not delivered to some position, by reason."""
    dead_class: int | None = None
    """The class of its dead letters, if there is one."""
    dead_letters: int = 0
    """And how many lie there."""
    positions: list[Position] = []
    """Those that are furthest behind."""
    positions_left_out: int = 0
    publishers: list[Publisher] = []
    """Who waits for room longest comes first."""
    publishers_left_out: int = 0
    waits_for: str = ""
    """What holds its floor, and who waits for that."""
    unknown: str = ""
    """Of a class that a cluster keeps, why it is not known what is stored there; then its figures
    are 0. Empty where it is known."""
    on_way: int = 0
    """Messages that were accepted here, and are not known to be in that cluster yet."""


class Match(_Said, frozen=True):
    """Somebody who gets what is published on a channel, or nearly."""

    class_id: int = 0
    who: str = ""
    """Such as: durable 'billing', session 4 (127.0.0.1:5001)."""
    session: int = -1
    number: int = 0
    durable: str = ""
    group: str = ""
    pattern: str = ""
    """Which one; empty for who gets every message, and where it was not looked for."""
    why_not: str = ""
    """Empty for who gets it."""


class ChannelClass(_Said, frozen=True):
    """What one class has to do with a channel."""

    class_id: int = 0
    name: str = ""
    stored: int = 0
    """Messages on this channel."""
    subjects: list[str] = []
    """Bound ones that match: what NATS clients publish there is stored in this class."""
    matches: list[Match] = []
    near: list[Match] = []
    left_out: int = 0
    """Positions that are in neither list, though they may match."""


class Listener(_Said, frozen=True):
    """Who hears what is published on a channel at another door."""

    pattern: str = ""
    queue: str = ""
    """The group that shares it; empty for one that gets every message."""
    members: int = 1
    peer: str = ""
    """Of one of them."""


class ChannelSaid(_Said, frozen=True, tag_field="about", tag="channel"):
    """One channel."""

    channel: str = ""
    now: float = 0.0
    classes: list[ChannelClass] = []
    """Those that have something to do with it."""
    classes_left_out: int = 0
    listeners: list[Listener] = []
    listeners_left_out: int = 0


class SessionSaid(_Said, frozen=True, tag_field="about", tag="session"):
    """One session."""

    session: int = -1
    now: float = 0.0
    version: int = 0
    """0 while it has not shown which; -1 at another door."""
    name: str = ""
    peer: str = ""
    user: str = ""
    """Who it is; empty where nobody is asked."""
    level: str = "memory"
    unconfirmed: int = 0
    """Messages that it was not told are stored."""
    leaves_out: bool = False
    """Whether these are that many at most: it may leave out numbers, and they are counted."""
    parked: int = 0
    """Those of them that wait for room."""
    parked_bytes: int = 0
    parked_class: int | None = None
    """Where the first of them waits."""
    parked_seconds: float = 0.0
    pending_bytes: int = 0
    """Kept for it beside what classes store."""
    full_seconds: float = 0.0
    """How long it has taken none of the bytes that wait for it."""
    heartbeat: float = 0.0
    refused: dict[str, int] = {}
    """What it was told had no effect, by reason."""
    positions: list[Position] = []
    positions_left_out: int = 0
    is_read: bool = True
    """Whether what it sends is read."""
    waits_for: str = ""
    """Why not, or what its messages wait for."""


Explained = BusSaid | ClassSaid | ChannelSaid | SessionSaid

_questions: msgspec.json.Decoder[Question] = msgspec.json.Decoder(Question)
_explained: msgspec.json.Decoder[Explained] = msgspec.json.Decoder(Explained)


def question(content: bytes) -> Question:
    """What a frame asks. Raises RemoteProtocolError (bad_request)."""
    return _decode(_questions, content or b'{"about":"bus"}', "an Inquire")


def explained(content: bytes) -> Explained:
    """What a bus has answered. Raises RemoteProtocolError (bad_request)."""
    return _decode(_explained, content, "the answer to an Inquire")


T = TypeVar("T")


def _decode(decoder: msgspec.json.Decoder[T], content: bytes, what: str) -> T:
    try:
        return decoder.decode(content)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        shown = content[:60].decode("utf-8", "backslashreplace")
        raise RemoteProtocolError(Reason.BAD_REQUEST, f"{what} held {shown!r}: {error}") from None
