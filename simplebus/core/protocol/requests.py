"""JSON bodies of requests and replies of protocol version 2, with defaults and bounds.

Unknown keys are ignored, so that peers of different versions understand each other. A known key
with a wrong value is refused. Only the form is checked here: the broker checks if classes and
durables exist.
"""

from __future__ import annotations

from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta

from simplebus.core.errors import Reason, RemoteProtocolError
from simplebus.core.limits import (
    BACKOFF_SECONDS_MAX,
    BACKOFF_STEPS_MAX,
    BINDINGS_MAX,
    DELIVERIES_MAX,
    FETCH_MESSAGES_MAX,
    HEARTBEAT_SECONDS_MAX,
    IDLE_SECONDS_MAX,
    IN_FLIGHT_MAX,
    MESSAGE_ID_MASK,
    NAME_CHARACTERS_MAX,
    REQUEST_BYTES_MAX,
    SECRET_CHARACTERS_MAX,
    SEQUENCE_MAX,
)

VERSION = 2

Name = Annotated[str, Meta(min_length=1, max_length=NAME_CHARACTERS_MAX)]
ClassId = Annotated[int, Meta(ge=0, le=0xFFFF)]
Sequence = Annotated[int, Meta(ge=0, le=SEQUENCE_MAX)]
Seconds = Annotated[float, Meta(gt=0, le=BACKOFF_SECONDS_MAX)]


START_KEYWORDS = ("waiting", "new", "earliest", "last", "last_values")
"""Start positions other than a sequence or a time."""


class _JsonBody(msgspec.Struct, frozen=True):
    def encode(self) -> bytes:
        """Return the content of the frame."""
        return msgspec.json.encode(self)


class _Request(_JsonBody, frozen=True, omit_defaults=True):
    """Body of a request. Fields with default values are omitted."""


class NamedClass(_Request, frozen=True):
    """Class by id, name or both. If only the name is given, the server assigns the id."""

    id: ClassId | None = None
    name: Name | None = None
    subjects: Annotated[list[str], Meta(max_length=BINDINGS_MAX)] = []
    """NATS subjects whose messages are stored in this class from now on."""
    last_values: bool = False
    """True to retain the last value of each channel from now on."""


Secret = Annotated[str, Meta(max_length=SECRET_CHARACTERS_MAX)]


class Auth(_Request, frozen=True):
    """Credentials: user and password, or token."""

    user: Secret = ""
    password: Secret = ""
    token: Secret = ""

    def __repr__(self) -> str:
        return f"Auth(user={self.user!r})"  # Without secrets, because it may be logged.


class ConnectRequest(_Request, frozen=True):
    """Body of a Connect request (binary.md, "Connect")."""

    version: Annotated[int, Meta(ge=2)] = VERSION
    """Highest protocol version of the client."""
    name: Name | None = None
    """Publisher name; None for a publisher without deduplication."""
    instance: Name | None = None
    """Identity of this run of the program that uses the publisher name."""
    classes: list[ClassId | Name | NamedClass] = []
    heartbeat: Annotated[float, Meta(ge=0, le=HEARTBEAT_SECONDS_MAX)] = 0.0
    """Longest silence in seconds that the client accepts; 0 for any."""
    client: Annotated[str, Meta(max_length=NAME_CHARACTERS_MAX)] = ""
    """Description of the client for logs."""
    unconfirmed: Annotated[int, Meta(ge=0, le=MESSAGE_ID_MASK)] | None = None
    """Lowest message number that was not confirmed to this instance; None if it has none."""
    bus: Annotated[str, Meta(max_length=NAME_CHARACTERS_MAX)] = ""
    """Identity of the bus that these numbers belong to, from its reply."""
    first: Annotated[int, Meta(ge=0, le=MESSAGE_ID_MASK)] | None = None
    """First message number of a client that numbers messages itself and may leave out numbers.

    Only for buses that report `duplicates` in their reply.
    """
    auth: Auth | None = None
    """Credentials, if the bus requires them."""


class ConnectReply(_JsonBody, frozen=True):
    """Body of the reply to a Connect request (binary.md, "Connect")."""

    session: int
    version: int = VERSION
    server: str = ""
    bus: str = ""
    """Identity of the stored state. It changes when the bus lost its state."""
    classes: dict[str, int] = {}
    """Class id of each class that the request gave by name."""
    next: int = 0
    """Number of the publisher's next message; all before it are stored."""
    credit: int = 0
    """Bytes of frames that may be unconfirmed."""
    heartbeat: float = 0.0
    """Seconds of silence after which a side sends a Heartbeat; 0 for never."""
    frame_bytes: int = 0
    """Longest accepted frame."""
    ack_seconds: float = 0.0
    """Ack timeout of the first delivery."""
    run: str = ""
    """Identity of the server process. After a change, sequences of lost messages may be reused."""
    level: int = 0
    """Durability of confirmed messages: 0 memory, 1 os, 2 disk."""
    lost: int = 0
    """Number of messages below `unconfirmed` that are neither stored nor refused."""
    duplicates: float = 0.0
    """Seconds for which any server of a cluster detects duplicates by publisher name, instance and
    number; 0 if this bus detects them as long as it remembers the name.
    """
    replies: str = ""
    """Prefix of the channels of replies that the client may use; empty for any."""


class Start(_Request, frozen=True):
    """Start position: a sequence, or the first message accepted at or after a time."""

    sequence: Sequence | None = None
    time: float | None = None
    """Seconds since 1970."""


class SubscribeRequest(_Request, frozen=True):
    """Body of a Subscribe request (binary.md, "Subscribe")."""

    channels: Annotated[list[str], Meta(max_length=BINDINGS_MAX)] = []
    """Patterns, one of which must match the channel of a message; empty for all messages."""
    durable: Name | None = None
    """Name of a durable, whose position outlives the session."""
    idle_seconds: Annotated[float, Meta(gt=0, le=IDLE_SECONDS_MAX)] | None = None
    """Seconds that the idle durable is kept; None for unlimited or its earlier value."""
    group: Name | None = None
    """Name of a group, whose members share one position: each message goes to one member."""
    start: str | Start = "waiting"
    """Start position: "waiting" (the class's backlog on its first subscription, else new messages),
    "new", "earliest", "last", "last_values" (the last value of each channel, then new messages) or
    a `Start`. Ignored if the durable or the group exists, except with `seek`.
    """
    seek: bool = False
    """True to move an existing idle durable to `start`."""
    max_in_flight: Annotated[int, Meta(ge=1, le=IN_FLIGHT_MAX)] | None = None
    """Messages in flight; None for the default of the bus."""
    max_pending: Annotated[int, Meta(ge=1, le=SEQUENCE_MAX)] | None = None
    """Unacknowledged messages, sent or not, at which `slow` applies; None for the limits of the
    class.
    """
    slow: str = "block"
    """Policy for a slow subscription: "block", "drop_oldest", "drop_newest" or "disconnect"."""
    ack_seconds: Seconds | None = None
    """Ack timeout in seconds, rounded up to whole ticks; None for the timeout of the class."""
    max_deliveries: Annotated[int, Meta(ge=0, le=DELIVERIES_MAX)] | None = None
    """Deliveries before a message becomes a dead letter; 0 for unlimited, None for the class's
    value.
    """
    backoff: Annotated[list[Seconds], Meta(min_length=1, max_length=BACKOFF_STEPS_MAX)] | None = (
        None
    )
    """Delays before each redelivery, in whole ticks; the last one repeats. None for the class's
    value.
    """
    by_key: bool = False
    """True for a key-ordered group: messages of one key go to one member, one after the other."""


class SubscribeReply(_JsonBody, frozen=True):
    """Body of the reply to a Subscribe request (binary.md, "Subscribe")."""

    cursor: int
    """Sequence of the next message that may be sent for the first time."""
    floor: int
    """Lowest sequence that is not acknowledged."""
    resumed: bool = False
    """True if the durable or the group existed."""


class UnsubscribeRequest(_Request, frozen=True):
    """Body of an Unsubscribe request (binary.md, "Unsubscribe")."""

    forget: bool = False
    """True to delete the durable, too."""


class FetchRequest(_Request, frozen=True):
    """Body of a Fetch request (binary.md, "Fetch"). Positions do not change."""

    first: Sequence = 0
    count: Annotated[int, Meta(ge=1, le=FETCH_MESSAGES_MAX)] = FETCH_MESSAGES_MAX
    time: float | None = None
    """Instead of `first`: begin with messages accepted at or after it, in seconds since 1970."""
    times: bool = False
    """True to include acceptance times in the reply."""


class FetchReply(_JsonBody, frozen=True, omit_defaults=True):
    """Body of the reply to a Fetch request (binary.md, "Fetch")."""

    first: int
    """Sequence of the first message sent; `next` if no message is sent."""
    next: int
    """Sequence to continue with: the reply may be shorter than the requested range."""
    floor: int
    """Lowest stored sequence."""
    head: int
    """Next sequence that the class will assign."""
    times: list[tuple[int, float]] = []
    """Tuples (first sequence, acceptance time in seconds since 1970), if requested. The first entry
    is at or before `first`, the last one before `next`.
    """
    now: float = 0
    """Time of the reply by the same clock if times were requested, else 0."""
    purged: list[tuple[int, int]] = []
    """Ranges first..last-1 of purged messages, within the range of the reply."""


class PurgeRequest(_Request, frozen=True):
    """Body of a Purge request: discard stored messages first..last-1 (binary.md, "Purge")."""

    first: Sequence = 0
    last: Sequence | None = None
    """None for the head."""


class PurgeReply(_JsonBody, frozen=True):
    """Body of the reply to a Purge request (binary.md, "Purge")."""

    purged: int
    """Messages that were stored and not purged before."""


class ErrorReply(_JsonBody, frozen=True):
    """Body of an Error frame: why a request had no effect or the server disconnects ("Error")."""

    code: str
    message: str
    fatal: bool = False
    count: int = 0
    """Number of refused messages, from the number in the frame header on; 0 if the error concerns
    no message.
    """


T = TypeVar("T", bound=_JsonBody)

_decoders: dict[type[_JsonBody], msgspec.json.Decoder[_JsonBody]] = {}


def decode_request(kind: type[T], content: bytes, *, reason: Reason = Reason.BAD_REQUEST) -> T:
    """Decode the JSON body of a request. Parameters and errors as `decode`.

    Raises:
        RemoteProtocolError: Also if the content has more than REQUEST_BYTES_MAX bytes.
    """
    check_request_size(kind.__name__, content, reason)
    return decode(kind, content, reason=reason)


def check_request_size(
    description: str, content: bytes, reason: Reason = Reason.BAD_REQUEST
) -> None:
    """Raise RemoteProtocolError if the JSON of a request is too long to be decoded at once."""
    if len(content) > REQUEST_BYTES_MAX:
        hint = ": name classes in several Connects" if reason is Reason.BAD_CONNECT else ""
        raise RemoteProtocolError(
            reason,
            f"a {description} has {len(content)} bytes of JSON, expected at most "
            f"{REQUEST_BYTES_MAX}{hint}",
        )


def decode(kind: type[T], content: bytes, *, reason: Reason = Reason.BAD_REQUEST) -> T:
    """Decode the JSON body of a frame. Empty content counts as `{}`.

    Args:
        kind: Type of the body.
        content: Content of the frame.
        reason: Reason code of the error.

    Raises:
        RemoteProtocolError: The content is not a valid body of this type.
    """
    decoder = _decoders.get(kind)
    if decoder is None:
        decoder = _decoders[kind] = msgspec.json.Decoder(kind)
    try:
        found = decoder.decode(content or b"{}")
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        shown = repr(content[:60].decode("utf-8", "backslashreplace"))
        if kind is ConnectRequest:  # It may contain a password.
            shown = f"{len(content)} bytes of JSON, or of none"
        raise RemoteProtocolError(reason, f"a {kind.__name__} held {shown}: {error}") from None
    assert isinstance(found, kind)
    return found
