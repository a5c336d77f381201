"""Acked delivery of class messages to NATS clients.

The broker does the delivery: the frames in the outbox of the client's local session are written as
MSG and HMSG, and acks are passed to the broker. A message is encoded only when the client can
receive it; until then it stays in the class. Only the client that received a message can ack or
terminate it. A client that unsubscribes from a durable, for example to drain, can still ack or
terminate what it received until another client joins the durable.

    SUB $SB.SUB.<class>[.<durable>[.<option>=<value>]…][.filter.<subject>] [group] sid
    MSG <channel> sid $JS.ACK.<class>.<consumer>.<delivery>.<sequence>.<count>.<time>.<pending> size
    PUB $JS.ACK.… size          empty, +ACK, -NAK, -NAK {"delay": nanoseconds}, +WPI or +TERM

A class is named by id or name and created if it does not exist; `-` means no durable. Options are
start (earliest, new, last, last_values, waiting, a sequence, or @ and a time), in_flight, by_key,
ack_seconds, backoff and max_deliveries. Dots, blanks, % and so on are percent-encoded in tokens.
`pending` is the number of later messages in the class, matching the filter or not.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from itertools import pairwise, takewhile
from urllib.parse import unquote

import msgspec

from simplebus.core.broker.broker import Broker
from simplebus.core.errors import Reason, RemoteProtocolError
from simplebus.core.limits import (
    CLASS_ID_MAX,
    FAILURE_REASON_BYTES_MAX,
    HEADER_BYTES,
    IN_FLIGHT_MAX,
    NAME_CHARACTERS_MAX,
)
from simplebus.core.message_class.message_class import MessageClass
from simplebus.core.protocol import frames
from simplebus.core.protocol.requests import ErrorReply, SubscribeRequest, decode
from simplebus.core.redelivery.ack_window import nearest_sequence
from simplebus.core.session.session import Session
from simplebus.core.subscription.position import Position
from simplebus.nats.bus.convert import message_from_frame
from simplebus.nats.class_requests import (
    FILTER_TOKEN,
    SUBSCRIBE_PREFIX,
    encode_token,
    normalize_options,
)
from simplebus.nats.errors import refusal_line
from simplebus.nats.limits import (
    ACKED_IN_FLIGHT_MESSAGES,
    SCAN_COST_OF_ENCODING,
)
from simplebus.nats.protocol import encode
from simplebus.nats.server.session import NatsSession, NatsSubscription
from simplebus.nats.subjects import ACK_PREFIX, class_subject

ACK_SUBJECT_PATTERN = ACK_PREFIX + b">"
"""Pattern of the subjects that acks are published on."""

_STARTS = ("earliest", "new", "last", "last_values", "waiting")
_OPTIONS = {
    "start": ("start", f"{', '.join(_STARTS)}, a sequence, or @ and seconds since 1970"),
    "in_flight": ("max_in_flight", f"a whole number from 1 to {IN_FLIGHT_MAX}"),
    "ack_seconds": ("ack_seconds", "a number above 0 and up to 86400"),
    "max_deliveries": ("max_deliveries", "a whole number up to 65535, 0 for no limit"),
    "backoff": ("backoff", "1 to 64 numbers above 0 and up to 86400, separated by commas"),
    "by_key": ("by_key", "true or false"),
}
"""Options: name at the broker, and the expected value for error messages."""
# Positions that a client left while it may still ack their messages.
_RELEASED_POSITIONS_MAX = 64
# Two tokens of this length fit into the control line of common clients.
_TOKEN_CHARACTERS_MAX = 1000
_DIGITS = re.compile(r"[0-9]{1,18}")
_TIMESTAMP = re.compile(r"@[0-9]{1,18}(\.[0-9]{1,18})?")


# Requests ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AckedSubscribeRequest:
    """Request for an acked subscription."""

    class_ref: int | str
    """Id or name of the class."""
    request: SubscribeRequest
    option_tokens: tuple[str, ...]
    """Tokens behind the class in canonical form; see `subjects`."""


def parse_subscribe(subject: bytes, queue: bytes) -> AckedSubscribeRequest:
    """Parse the subject and queue group of an acked subscription.

    Raises:
        RemoteProtocolError: bad_request: the subject does not have the form above.
    """
    try:
        tokens = subject[len(SUBSCRIBE_PREFIX) :].decode().split(".")
        group = queue.decode()
    except UnicodeDecodeError as error:
        raise _bad_request(f"it is not UTF-8: {error.reason}") from None
    channels: list[str] = []
    option_tokens = tuple(normalize_options(tokens[1:]))
    if FILTER_TOKEN in tokens[2:]:
        filter_index = tokens.index(FILTER_TOKEN, 2)
        if filter_index + 1 == len(tokens):
            raise _bad_request("expected a subject after filter")
        channels = [".".join(tokens[filter_index + 1 :])]
        tokens = tokens[:filter_index]
        if channels[0].rpartition(".")[2] == "#":
            raise _bad_request(
                f"the filter {channels[0]!r} ends with #, expected > for one or more tokens"
            )
    for token in tokens:
        if token in ("*", ">"):
            raise _bad_request(
                f"the wildcard {token} is not a class or option; expected it in a filter only"
            )
    class_, durable, *options = map(_unquote, [*tokens, "-"] if len(tokens) == 1 else tokens)
    fields: dict[str, object] = {"channels": channels, "max_in_flight": ACKED_IN_FLIGHT_MESSAGES}
    values: dict[str, str] = {}
    for option in options:
        name, equals, value = option.partition("=")
        if name not in _OPTIONS or not equals:
            raise _bad_request(
                f"unknown option {option!r}, expected one of {', '.join(_OPTIONS)}, = and a value"
            )
        if name in values:
            raise _bad_request(f"duplicate option {name}: {values[name]!r} and {value!r}")
        values[name] = value
        fields[_OPTIONS[name][0]] = value.split(",") if name == "backoff" else value
    start = values.get("start", "waiting")
    if _DIGITS.fullmatch(start):
        fields["start"] = {"sequence": start}
    elif _TIMESTAMP.fullmatch(start):
        fields["start"] = {"time": start[1:]}
    elif start not in _STARTS:
        raise _bad_request(f"start is {start!r}, expected {_OPTIONS['start'][1]}")
    if durable != "-":
        fields["durable"] = _check_name("durable", durable)
    if group:
        fields["group"] = _check_name("group", group)
    try:
        request = msgspec.convert(fields, SubscribeRequest, strict=False)
    except msgspec.ValidationError as error:
        field = str(error).rpartition("`$.")[2].rstrip("`").partition(".")[0]
        field = field.partition("[")[0]
        for option, value in values.items():
            name, expected = _OPTIONS[option]
            if name == field:
                raise _bad_request(f"{option} is {value!r}, expected {expected}") from None
        raise _bad_request(str(error)) from None
    return AckedSubscribeRequest(_parse_class(class_), request, option_tokens)


def _unquote(text: str) -> str:
    try:
        return unquote(text, errors="strict")
    except UnicodeDecodeError as error:
        raise _bad_request(f"{text[:80]!r} is not UTF-8: {error.reason}") from None


def _parse_class(text: str) -> int | str:
    if text.isascii() and text.isdigit():
        if len(text) > 5 or int(text) > CLASS_ID_MAX:
            raise _bad_request(f"class id {text[:20]}: expected 0 to {CLASS_ID_MAX}")
        return int(text)
    return _check_name("class", text)


def _check_name(kind: str, text: str) -> str:
    """Return the name of a class, durable or group, or raise RemoteProtocolError (bad_request)."""
    if not 0 < len(text) <= NAME_CHARACTERS_MAX:
        raise _bad_request(
            f"the {kind} name has {len(text)} characters, expected 1 to {NAME_CHARACTERS_MAX}"
        )
    if not text.isprintable():
        raise _bad_request(f"the {kind} name {text!r} has unprintable characters")
    return text


def _bad_request(sentence: str) -> RemoteProtocolError:
    return RemoteProtocolError(Reason.BAD_REQUEST, sentence)


def _short_token(text: str, fallback: str) -> str:
    """Return the name as a token; `fallback` if the token would be empty or too long."""
    token = encode_token(text)
    return token if 0 < len(token) <= _TOKEN_CHARACTERS_MAX else fallback


# Deliveries --------------------------------------------------------------------------------------


class AckedSubscription(NatsSubscription):
    """Subscription of a NATS client to a class."""

    __slots__ = ("ack_name", "class_id", "number")

    def __init__(
        self,
        session: NatsSession,
        subject: bytes,
        queue: bytes,
        sid: bytes,
        *,
        number: int,
        cls: MessageClass,
        request: SubscribeRequest,
    ) -> None:
        super().__init__(session, subject, queue, sid)
        self.number = number
        """Subscription number at the broker."""
        self.class_id = cls.class_id
        self.ack_name = (
            _short_token(cls.name, str(cls.class_id)),
            _short_token(request.durable or request.group or "", f"_{number}"),
        )
        """Tokens of ack subjects for stream and consumer. `AckedDeliveries.add` makes them unique
        for the client.
        """

    def count_delivered_message(self) -> None:
        """Count a delivered message; the subscription ends after `max_messages`."""
        self._count_delivered(1)


class AckedDeliveries:
    """Acked subscriptions of one client. Their messages are sent after all other output."""

    def __init__(self, session: NatsSession, local_session: Session, broker: Broker) -> None:
        self.session = session
        self.local_session = local_session
        self.by_number: dict[int, AckedSubscription] = {}
        self._by_ack_name: dict[tuple[str, str], AckedSubscription] = {}
        self._released_positions: dict[tuple[str, str], Position] = {}
        """Durables and groups that the client left while it may still ack their messages."""
        self._broker = broker
        self._next_delivery: tuple[int, int] = (0, 0)
        """Subscription number and attempt of the next messages in the outbox."""
        self._next_number = 1
        self.scanned_count = 0
        """Messages that the last call of `encode_next` scanned. Each encoded message adds
        SCAN_COST_OF_ENCODING.
        """

    @property
    def is_idle(self) -> bool:
        """True if nothing is pending."""
        return self.local_session.outbox.is_idle

    def add(self, subscription: AckedSubscription) -> None:
        """Add a subscription and make its ack name unique."""
        position, (stream, consumer) = self._position(subscription), subscription.ack_name
        while self._is_name_in_use(subscription.ack_name, position):
            consumer = f"{consumer}_{subscription.number}"
            subscription.ack_name = (stream, consumer)
        self.by_number[subscription.number] = subscription
        self._by_ack_name[subscription.ack_name] = subscription

    def remove(self, subscription: AckedSubscription) -> bool:
        """Remove a subscription. Returns False if it was not there, or the broker has ended it."""
        if self.by_number.pop(subscription.number, None) is None:
            return False
        del self._by_ack_name[subscription.ack_name]
        if subscription.number not in self.local_session.subscriptions:
            return False
        position = self._position(subscription)
        if position.durable:
            while len(self._released_positions) >= _RELEASED_POSITIONS_MAX:
                del self._released_positions[next(iter(self._released_positions))]
            self._released_positions[subscription.ack_name] = position
        return True

    def remove_ended(self) -> list[AckedSubscription]:
        """Remove and return the subscriptions that the broker has ended.

        The broker ends them in the order of their creation.
        """
        ended = list(
            takewhile(
                lambda subscription: subscription.number not in self.local_session.subscriptions,
                self.by_number.values(),
            )
        )
        for subscription in ended:
            del self.by_number[subscription.number]
            del self._by_ack_name[subscription.ack_name]
        return ended

    def _is_name_in_use(self, name: tuple[str, str], position: Position) -> bool:
        """Return True if the ack name belongs to another subscription, or was that of another
        position.
        """
        if name in self._by_ack_name:
            return True
        released = self._released_positions.get(name, position)
        return (
            released is not position
            and released in self._broker.classes[released.class_id].positions
        )

    def _position(self, subscription: AckedSubscription) -> Position:
        return self.local_session.subscriptions[subscription.number].position

    def find_released_position(self, ack: AckSubject) -> Position | None:
        """Return the position that the client left after it received the acked message.

        None if the message was not sent or another client has joined the position.
        """
        position = self._released_positions.get((ack.stream, ack.consumer))
        if position is None or position.has_consumer:
            return None
        positions = self._broker.classes[position.class_id].positions
        if position not in positions or ack.sequence >= position.window.cursor:
            return None
        return position

    def limit_messages(self, subscription: AckedSubscription) -> None:
        """Apply the `max_messages` of a subscription: messages beyond it would count as sent."""
        local_subscription = self.local_session.subscriptions.get(subscription.number)
        if local_subscription is not None:  # Else the broker has just ended it.
            remaining = subscription.max_messages - subscription.delivered_count
            local_subscription.limit_messages(max(0, remaining))

    def find_subscription(self, ack: AckSubject) -> AckedSubscription | None:
        """Return the subscription that may have received a message; None if it has ended."""
        subscription = self._by_ack_name.get((ack.stream, ack.consumer))
        if subscription is None or subscription.number not in self.local_session.subscriptions:
            return None
        return subscription

    def next_number(self) -> int:
        """Return an unused subscription number."""
        while self._next_number in self.by_number:
            self._next_number = self._next_number % 0xFFFF + 1
        number, self._next_number = self._next_number, self._next_number % 0xFFFF + 1
        return number

    def encode_next(self, tick: int) -> bytes:
        """Encode and return the next messages, a limited number, and mark them as sent.

        The result is empty if no messages wait, or if the scan has found none yet.
        """
        outbox = self.local_session.outbox
        encoded: list[bytes] = []
        self.scanned_count = 0
        while not encoded:
            piece = outbox.peek(tick)
            self.scanned_count += outbox.scanned_count
            if not piece:
                break
            data = bytes(piece)
            outbox.mark_sent(len(data), tick)
            self._encode_frames(data, encoded)
            self.scanned_count += len(encoded) * SCAN_COST_OF_ENCODING
        return b"".join(encoded)

    def _encode_frames(self, data: bytes, encoded: list[bytes]) -> None:
        """Append the MSG and HMSG of complete version 2 frames to `encoded`, and an error for each
        subscription that the broker has ended.
        """
        for offset, end in pairwise([0, *_find_frame_ends(data)]):
            kind, _, message_id, last_field = frames.HEADER.unpack_from(data, offset)
            if kind == frames.DELIVER:
                self._next_delivery = (last_field, message_id)
            elif kind in (frames.MESSAGE, frames.ENVELOPE):
                subscription = self.by_number.get(self._next_delivery[0])
                if subscription is not None:
                    encoded.append(self._encode_message(subscription, data[offset:end], message_id))
                    subscription.count_delivered_message()
            elif kind == frames.ERROR and last_field == frames.SUBSCRIBE:
                content = data[offset + HEADER_BYTES : end - len(frames.DELIMITER)]
                encoded += self._remove_dropped(decode(ErrorReply, content).message)

    def _remove_dropped(self, reason: str) -> list[bytes]:
        """Remove the subscriptions that the broker has ended. Returns an error line for each."""
        dropped = [
            subscription
            for number, subscription in self.by_number.items()
            if number not in self.local_session.subscriptions
        ]
        for subscription in dropped:
            self.remove(subscription)
            subscription.remove_from_session()
        return [refusal_line("Subscription", each.subject, reason) for each in dropped]

    def _encode_message(
        self, subscription: AckedSubscription, frame: bytes, message_id: int
    ) -> bytes:
        cls = self._broker.classes[subscription.class_id]
        window = self.local_session.subscriptions[subscription.number].window
        sequence = nearest_sequence(message_id, window.floor)
        attempt = self._next_delivery[1]
        next_sequence = sequence + 1 if attempt == 1 else window.cursor
        ack_subject = (
            f"$JS.ACK.{'.'.join(subscription.ack_name)}.{attempt or 1}.{sequence}"
            f".{subscription.delivered_count + 1}.{int(cls.time_index.time_of(sequence) * 1e9)}"
            f".{max(0, cls.ring.head - next_sequence)}"
        )
        subject = class_subject(cls.class_id, cls.name)
        message = message_from_frame(frame, subject, ack_subject.encode())
        if self.session.open_replies is not None:
            self.session.open_replies.add(message.reply)
        return encode.encode_message(
            message, subscription.sid, headers=self.session.accepts_headers
        )


def _find_frame_ends(data: bytes) -> list[int]:
    """Return the ends of complete frames."""
    ends: list[int] = []
    end = 0
    while end < len(data):
        end = data.index(frames.DELIMITER, end + HEADER_BYTES) + len(frames.DELIMITER)
        ends.append(end)
    return ends


# Acks --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AckCommand:
    """Command in the payload of an ack."""

    kind: str
    """`ack`, `nack`, `working` or `terminate`."""
    delay_seconds: float | None = 0.0
    """Delay of a nack until redelivery; None if it is not given."""
    error: str = ""
    """Reason of a `+TERM`."""


_COMMANDS = {
    b"": AckCommand("ack"),
    b"+ACK": AckCommand("ack"),
    b"+NXT": AckCommand("ack"),
    b"-NAK": AckCommand("nack", None),
    b"+WPI": AckCommand("working"),
    b"+TERM": AckCommand("terminate"),
}
_DURATION = re.compile(r"(?:[0-9]{1,12}(?:\.[0-9]{1,9})?(?:ns|us|µs|ms|s|m|h))+")
_PART = re.compile(r"([0-9.]+)([a-zµ]+)")
_UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_DELAY_SECONDS_MAX = 1e9
_DELAY_CHARACTERS_MAX = 1000


def parse_ack_payload(payload: bytes) -> AckCommand | None:
    """Return the command of an ack; None if it is unknown. An invalid delay counts as 0, as in
    nats-server.
    """
    command = _COMMANDS.get(payload)
    if command is not None:
        return command
    if payload.startswith(b"-NAK"):
        return AckCommand("nack", _parse_delay(payload[4:].strip()))
    if payload.startswith(b"+TERM"):
        reason = payload[5:].strip()[:FAILURE_REASON_BYTES_MAX]
        return AckCommand(
            "terminate", error=reason.decode(errors="replace")[:FAILURE_REASON_BYTES_MAX]
        )
    if payload.startswith(b"+NXT"):  # Followed by a pull request, which is ignored.
        return _COMMANDS[b"+NXT"]
    return None


def _parse_delay(text: bytes) -> float:
    seconds = 0.0
    if len(text) > _DELAY_CHARACTERS_MAX:
        return seconds
    try:
        if text.startswith(b"{"):
            options = json.loads(text)
            delay = options.get("delay", 0) if isinstance(options, dict) else 0
            if isinstance(delay, int) and abs(delay) < 10**20:
                seconds = delay / 1e9
        else:
            words = text.decode()
            if _DURATION.fullmatch(words):
                seconds = sum(float(n) * _UNITS[unit] for n, unit in _PART.findall(words))
    except (ValueError, RecursionError):
        pass
    return min(max(0.0, seconds), _DELAY_SECONDS_MAX)


@dataclass(frozen=True, slots=True)
class AckSubject:
    """Message that an ack refers to."""

    stream: str
    consumer: str
    sequence: int
    attempt: int


def parse_ack_subject(subject: bytes) -> AckSubject | None:
    """Return the message that an ack subject names; None if the subject is invalid."""
    tokens = subject.decode("utf-8", "replace").split(".")
    if len(tokens) != 9 or not all(map(_DIGITS.fullmatch, tokens[4:6])):
        return None
    return AckSubject(tokens[2], tokens[3], int(tokens[5]), int(tokens[4]))
