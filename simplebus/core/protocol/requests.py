"""What peers ask and answer in JSON (protocol/binary.md, version 2): shapes, defaults, bounds.

Rule 1: this file knows what is well formed, never what exists: whether a class or a durable is
there is the broker's business.
Rule 2: keys that are not known are ignored, so that peers of different age understand each other;
a known key with a wrong value is refused, with the place and what was expected.
"""

from __future__ import annotations

from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta

from simplebus.core.errors import Reason, RemoteProtocolError
from simplebus.core.limits import (
    BACKOFF_MAX,
    BINDINGS_MAX,
    DELIVERIES_MAX,
    FETCH_MESSAGES_MAX,
    HEARTBEAT_SECONDS_MAX,
    IDLE_SECONDS_MAX,
    IN_FLIGHT_MAX,
    MESSAGE_ID_MASK,
    NAME_CHARACTERS_MAX,
    PAUSE_SECONDS_MAX,
    SECRET_CHARACTERS_MAX,
    SEQUENCE_MAX,
)

VERSION = 2

Name = Annotated[str, Meta(min_length=1, max_length=NAME_CHARACTERS_MAX)]
ClassId = Annotated[int, Meta(ge=0, le=0xFFFF)]
Sequence = Annotated[int, Meta(ge=0, le=SEQUENCE_MAX)]
Seconds = Annotated[float, Meta(gt=0, le=PAUSE_SECONDS_MAX)]


STARTS = ("waiting", "new", "earliest", "last", "last_values")
"""Where a position may begin, beside a sequence and a time."""


class _Object(msgspec.Struct, frozen=True):
    def encode(self) -> bytes:
        """The content of its frame."""
        return msgspec.json.encode(self)


class _Request(_Object, frozen=True, omit_defaults=True):
    """Says what is asked for, and leaves out the rest."""


class NamedClass(_Request, frozen=True):
    """A class by id, name or both. With a name alone the bus gives the id."""

    id: ClassId | None = None
    name: Name | None = None
    subjects: Annotated[list[str], Meta(max_length=BINDINGS_MAX)] = []
    """What NATS clients publish on them is this class's, too, from now on."""
    last_values: bool = False
    """Whether it is to keep the last message of each channel, besides everything else, from now on.
    """


Secret = Annotated[str, Meta(max_length=SECRET_CHARACTERS_MAX)]


class Auth(_Request, frozen=True):
    """Who a client says it is: a user with a password, or a token."""

    user: Secret = ""
    password: Secret = ""
    token: Secret = ""

    def __repr__(self) -> str:
        return f"Auth(user={self.user!r})"  # Never the secrets: this may be logged.


class ConnectRequest(_Request, frozen=True):
    """Who is there, and which classes it will use."""

    version: Annotated[int, Meta(ge=2)] = VERSION
    """The highest version that the client speaks."""
    name: Name | None = None
    """Whose numbers its messages carry; None for a publisher that is not remembered."""
    instance: Name | None = None
    """Distinguishes this running program from another one with its name."""
    classes: Annotated[list[ClassId | Name | NamedClass], Meta(max_length=65_536)] = []
    heartbeat: Annotated[float, Meta(ge=0, le=HEARTBEAT_SECONDS_MAX)] = 0.0
    """Seconds of silence that the client would allow; 0 for any."""
    client: Annotated[str, Meta(max_length=NAME_CHARACTERS_MAX)] = ""
    """What it is, for logs."""
    unconfirmed: Annotated[int, Meta(ge=0, le=MESSAGE_ID_MASK)] | None = None
    """The lowest number that was not confirmed to this running program under its name; None when it
    has none yet."""
    bus: Annotated[str, Meta(max_length=NAME_CHARACTERS_MAX)] = ""
    """Which bus's numbers these are, as its reply named it."""
    first: Annotated[int, Meta(ge=0, le=MESSAGE_ID_MASK)] | None = None
    """Of a program that gives its messages numbers of its own, of which it may leave some out: the
    first one. Only where messages are known by them elsewhere: see the reply's `duplicates`."""
    auth: Auth | None = None
    """Who it is, where the bus asks."""


class ConnectReply(_Object, frozen=True):
    """What was granted."""

    session: int
    version: int = VERSION
    server: str = ""
    bus: str = ""
    """Identity of the bus's memory: another one knows nothing of what was said before."""
    classes: dict[str, int] = {}
    """Id of each class that the request named by name."""
    next: int = 0
    """The number that the publisher's next message is to carry: all before it are stored."""
    credit: int = 0
    """Bytes of frames that may be unconfirmed."""
    heartbeat: float = 0.0
    """Seconds after which a silent side sends a Heartbeat; 0 for never."""
    frame_bytes: int = 0
    """The longest frame accepted."""
    ack_seconds: float = 0.0
    """How long a message may be unacknowledged before it is sent again, the first time."""
    run: str = ""
    """Identity of the bus's process: another one may have given sequences that were sent, and whose
    messages it has lost, to other messages."""
    level: int = 0
    """What a Confirm promises: 0 memory, 1 os, 2 disk."""
    lost: int = 0
    """Messages below `unconfirmed` that the bus does not have, and has not refused."""
    duplicates: float = 0.0
    """Seconds for which a message is known by its publisher's name, instance and number, at
    whichever door before a cluster; 0 for as long as this bus knows the name."""


class Start(_Request, frozen=True):
    """A position: a sequence, or the first message accepted at or after a time."""

    sequence: Sequence | None = None
    time: float | None = None
    """Seconds since 1970."""


class SubscribeRequest(_Request, frozen=True):
    """One more subscription to the class in the header."""

    channels: Annotated[list[str], Meta(max_length=BINDINGS_MAX)] = []
    """Patterns; a message comes when one of them matches its channel. None: every message."""
    durable: Name | None = None
    """A name under which the position outlives the session."""
    idle_seconds: Annotated[float, Meta(gt=0, le=IDLE_SECONDS_MAX)] | None = None
    """How long a durable is kept while nobody is connected to it; None for ever, or as long as who
    used it last has said."""
    group: Name | None = None
    """Subscriptions of one group share one position: each message goes to one of them."""
    start: str | Start = "waiting"
    """"waiting" (what waits for a first subscription, else new), "new", "earliest", "last",
    "last_values" (the last message of each channel, then what is new), or a position. Ignored when
    the durable or the group exists, unless it is to `seek`."""
    seek: bool = False
    """Whether a durable that exists, and that nobody holds, is moved to `start`."""
    max_in_flight: Annotated[int, Meta(ge=1, le=IN_FLIGHT_MAX)] | None = None
    """Messages sent to this subscription and not acknowledged; None for the bus's default."""
    max_pending: Annotated[int, Meta(ge=1, le=SEQUENCE_MAX)] | None = None
    """Messages stored for it and not acknowledged, at which `slow` decides; None for the class's
    own limits."""
    slow: str = "block"
    """"block", "drop_oldest", "drop_newest" or "disconnect"."""
    ack_seconds: Seconds | None = None
    """Instead of the class's ack timeout; counted in whole ticks, at least one."""
    max_deliveries: Annotated[int, Meta(ge=0, le=DELIVERIES_MAX)] | None = None
    """How often a message is sent before it is given up; 0 for without end, None for what the class
    says."""
    backoff: Annotated[list[Seconds], Meta(min_length=1, max_length=BACKOFF_MAX)] | None = None
    """Pauses before the second sending, the third and so on, the last one for all further ones, in
    whole ticks; None for what the class says."""
    by_key: bool = False
    """Of a group: whether messages of one key go to one member, one after the other."""


class SubscribeReply(_Object, frozen=True):
    """Where the subscription stands."""

    cursor: int
    """Sequence of the next message that it is sent for the first time, if it is for it."""
    floor: int
    """Lowest sequence that it has not acknowledged."""
    resumed: bool = False
    """Whether the durable or the group was there before."""


class UnsubscribeRequest(_Request, frozen=True):
    """One subscription less."""

    forget: bool = False
    """Whether a durable's position goes too."""


class FetchRequest(_Request, frozen=True):
    """Messages of a class by sequence, with no effect on anybody's position."""

    first: Sequence = 0
    count: Annotated[int, Meta(ge=1, le=FETCH_MESSAGES_MAX)] = FETCH_MESSAGES_MAX
    time: float | None = None
    """Instead of `first`: begin with what was accepted at or after it, in seconds since 1970."""
    times: bool = False
    """Whether the reply is to say when they were accepted."""


class FetchReply(_Object, frozen=True, omit_defaults=True):
    """What was found."""

    first: int
    """Sequence of the first message sent; `next` if there is none."""
    next: int
    """Ask from here for more: the answer may be shorter than the range."""
    floor: int
    """Lowest sequence that the class still holds."""
    head: int
    """Sequence of the next message that will be accepted."""
    times: list[tuple[int, float]] = []
    """If asked for, when they were accepted: from which sequence on, and seconds since 1970. The
    first entry is at or before `first`, the last one before `next`."""
    now: float = 0
    """If times were asked for, when this was answered, by the same clock; 0 where they were not."""
    purged: list[tuple[int, int]] = []
    """Messages first..last-1 among them are purged: nobody is to have them any more."""


class PurgeRequest(_Request, frozen=True):
    """Messages of a class that nobody is to have any more: first..last-1 of what is stored."""

    first: Sequence = 0
    last: Sequence | None = None
    """None for the head."""


class PurgeReply(_Object, frozen=True):
    """What was purged."""

    purged: int
    """Messages that were stored, and not purged before."""


class ErrorReply(_Object, frozen=True):
    """Why a frame had no effect, or why the server closes."""

    code: str
    message: str
    fatal: bool = False
    count: int = 1
    """Of refused messages: how many numbers, from the one in the header on."""


T = TypeVar("T", bound=_Object)

_decoders: dict[type[_Object], msgspec.json.Decoder[_Object]] = {}


def decode(kind: type[T], content: bytes, *, reason: Reason = Reason.BAD_REQUEST) -> T:
    """The object in a frame's content; no content counts as `{}`.

    Raises RemoteProtocolError with this reason for what is no such object.
    """
    decoder = _decoders.get(kind)
    if decoder is None:
        decoder = _decoders[kind] = msgspec.json.Decoder(kind)
    try:
        found = decoder.decode(content or b"{}")
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        shown = repr(content[:60].decode("utf-8", "backslashreplace"))
        if kind is ConnectRequest:  # There may be a password in it.
            shown = f"{len(content)} bytes of JSON, or of none"
        raise RemoteProtocolError(reason, f"a {kind.__name__} held {shown}: {error}") from None
    assert isinstance(found, kind)
    return found
