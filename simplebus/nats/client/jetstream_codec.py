"""JetStream's words: what its API is asked and answers, PubAcks, ack subjects, and acks.

Rule 1: requests and answers are JSON as the reference server has it; what stands in an answer
beyond what is needed is passed over.
Rule 2: what comes in batches is read by arrays; what does not look as it always does is read one
by one.

    a stream        keeps messages of its subjects; who publishes there with a reply subject is
                    sent a PubAck when they are stored
    a consumer      a position in a stream; asked for messages (`next`), it sends them with a reply
                    subject that names stream, consumer, delivery and sequences
    a chain         messages of which each is stored only behind all before it: servers call it a
                    fast batch, in the mode `fail`. Its PubAcks are few, and say how far it has come
    $JS.ACK.<stream>.<consumer>.<deliveries>.<sequence>.<count>.<nanoseconds>.<pending>
    $JS.ACK.<domain>.<account>.<stream>.<consumer>.…the same…[.<random>]
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any
from urllib.parse import quote

import msgspec
import numpy as np

from simplebus.core.errors import BusError
from simplebus.core.protocol.frames import Bytes, Flags, Integers, unaligned
from simplebus.nats.client import jetstream_types
from simplebus.nats.client.encode import (
    HEADER_VERSION_LINE,
    Column,
    build_rows,
    encode_equal_messages,
    format_digits,
)
from simplebus.nats.client.events import ReceivedMessages
from simplebus.nats.numbers import DIGITS_MAX, parse_numbers

API = "$JS.API."
MSG_ID = b"Nats-Msg-Id"
"""The header by which a stream knows a message that it has."""
ACK, NAK, WORKING, TERMINATE = b"+ACK", b"-NAK", b"+WPI", b"+TERM"
NOT_FOUND = frozenset({404, 10014, 10059})
"""What is asked for is not there: as such, a consumer, a stream."""
NO_RESPONDERS = 503
_BAD_REQUEST = 400
UNKNOWN_FIELD = 10025
"""A server is older than what it was asked for."""
NO_ROLLUP = 10111

FAST_BATCH_DIGITS = 4
FAST_BATCH_ACK_MESSAGES = 500
"""How often it may be said how far a chain has come: servers take no more for it."""

_SENTENCE_CHARACTERS_MAX = 500
_SAFE = "".join(chr(code) for code in range(0x21, 0x7F) if chr(code) != "%")
_ACK_TOKENS, _LONG_ACK_TOKENS = 9, 11
_DOT, _NINE = np.uint8(ord(".")), np.uint8(9)
_ALIKE_MESSAGES_MIN = 32
"""Fewer are read one way."""
_LAYOUTS_MAX = 8
"""How many lengths of ack subjects are looked at one by one."""
_WORD: np.dtype[np.uint64] = np.dtype("<u8")
_ACK_BEGINS = np.uint64(int.from_bytes(b"$JS.ACK.", "little"))
_STATUS = re.compile(rb"NATS/1\.0[ \t]+([0-9]{3})(?:[ \t]+([^\r\n]*))?\r\n")
_PUB_ACK = re.compile(rb'(\{"stream":"[^"\\]*", ?"seq": ?)[0-9]+\}')


class JetStreamError(BusError):
    """JetStream refused something, or nobody was there to be asked."""

    def __init__(self, code: int, sentence: str, *, is_final: bool = False) -> None:
        super().__init__(f"JetStream: {sentence} ({code})")
        self.code = code
        """Its `err_code` where there is one, else its `code`."""
        self.is_final = is_final
        """Whether what was asked for is refused for what it is: whoever asks again hears that
        again."""
        self.sentence = sentence


def encode_api_request(subject: str, body: dict[str, Any] | None = None) -> tuple[str, bytes]:
    """A request of the API: its subject, and what it says."""
    return API + subject, msgspec.json.encode(body) if body is not None else b""


def parse_status(headers: bytes) -> tuple[int, str]:
    """What the first line of a block of headers says: a code and words; 0 for none."""
    match = _STATUS.match(headers)
    return (int(match[1]), (match[2] or b"").decode("latin-1")) if match else (0, "")


def parse_api_reply(headers: bytes, payload: bytes, subject: str = "") -> dict[str, Any]:
    """What the API answered, to a request to this subject: see `shapes`. Raises JetStreamError."""
    code, words = parse_status(headers)
    if code >= 400:
        if code == NO_RESPONDERS:
            words = "nobody answers: JetStream is not enabled, or has no leader now"
        raise JetStreamError(code, words)
    try:
        said = msgspec.json.decode(payload, type=dict[str, Any])
    except (msgspec.MsgspecError, RecursionError):
        raise JetStreamError(0, f"{payload[:60]!r} came, expected a JSON object") from None
    error = said.get("error")
    if isinstance(error, dict):
        raise _parse_error(error)
    try:
        jetstream_types.check_reply(subject, said)
    except ValueError as wrong:
        raise JetStreamError(0, f"an odd answer to {subject}: {wrong}") from None
    return said


def _parse_error(error: dict[str, Any]) -> JetStreamError:
    told = error.get("err_code") or error.get("code")
    code = told if type(told) is int else 0
    sentence = str(error.get("description", ""))[:_SENTENCE_CHARACTERS_MAX]
    return JetStreamError(code, sentence, is_final=error.get("code") == _BAD_REQUEST)


def percent_encode(text: str) -> str:
    """A text as a header's value, or a part of it: what is no letter of ASCII that can be seen, and
    %, as % and two hexadecimal digits for each byte."""
    return quote(text, safe=_SAFE)


# Publishing --------------------------------------------------------------------------------------


@dataclass(slots=True)
class PubAcks:
    """What became of messages that were published. All columns have shape (n,)."""

    sequences: Integers
    """In the stream; 0 where it is not stored."""
    duplicates: Flags
    """Whether the stream had it already."""
    errors: dict[int, JetStreamError]
    """By row: why it is not stored."""


def parse_pub_acks(messages: ReceivedMessages) -> PubAcks:
    """Read answers to publications."""
    count = messages.count
    sequences = np.zeros(count, np.int64)
    duplicates = np.zeros(count, np.bool_)
    errors: dict[int, JetStreamError] = {}
    plain = _parse_plain_acks(messages, sequences)
    for row in np.flatnonzero(~plain).tolist():
        try:
            said = parse_api_reply(messages.headers(row), messages.payload(row))
            sequence, duplicate = said.get("seq"), said.get("duplicate", False)
            if type(sequence) is not int or not 0 < sequence < 1 << 63:
                raise JetStreamError(0, f"{messages.payload(row)[:60]!r} came, expected a PubAck")
            sequences[row], duplicates[row] = sequence, duplicate is True
        except JetStreamError as error:
            errors[row] = error
    return PubAcks(sequences, duplicates, errors)


class _FastBatchReplyJson(msgspec.Struct):
    """What is said of a chain: how far it has come ("ack"), that something is missing in it
    ("gap"), why something was not stored ("err"); without a type, that it has ended."""

    type: str = ""
    seq: Annotated[int, msgspec.Meta(ge=0)] = 0
    count: Annotated[int, msgspec.Meta(ge=0)] | None = None
    error: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class FastBatchReply:
    """What became of a chain so far."""

    stored: int
    """So many of its messages are, from the first one on; -1 where that is not said."""
    is_last: bool
    """Whether it has ended: what else is sent of it is not stored."""
    error: JetStreamError | None = None
    """Why it ends."""
    sequence: int = 0
    """That of the last message that is stored, once it has ended."""


def parse_fast_batch_reply(headers: bytes, payload: bytes) -> FastBatchReply:
    """Read an answer to a chain."""
    code, words = parse_status(headers)
    if code >= 400:
        return FastBatchReply(-1, True, JetStreamError(code, words or "nobody answers"))
    try:
        said = msgspec.json.decode(payload, type=_FastBatchReplyJson)
    except (msgspec.MsgspecError, RecursionError):
        wrong = JetStreamError(0, f"{payload[:60]!r} came, expected what became of a chain")
        return FastBatchReply(-1, False, wrong)
    error = None if said.error is None else _parse_error(said.error)
    if said.type:
        return FastBatchReply(said.seq if said.type == "ack" else -1, False, error)
    if error is not None or said.count is None:
        return FastBatchReply(
            -1, True, error or JetStreamError(0, f"{payload[:60]!r} came of a chain")
        )
    if (
        said.count and not said.seq
    ):  # The last message has the id of one that may be on its way still.
        return FastBatchReply(-1, True, JetStreamError(0, "what of a chain is stored is not said"))
    return FastBatchReply(said.count, True, sequence=said.seq)


def fast_batch_reply_subjects(inbox: bytes, name: bytes, count: int) -> Sequence[Column]:
    """Where answers to a chain of so many messages, less than 10**CHAIN_DIGITS, are to go, as
    `writing.alike` takes it. Of its `name` no other chain of the stream may be."""
    steps = np.full((count, 1), ord("1"), np.uint8)
    steps[0], steps[-1] = ord("0"), ord("2")
    numbers = format_digits(np.arange(1, count + 1), FAST_BATCH_DIGITS)
    return [
        b"%b.%b.%d.fail." % (inbox, name, FAST_BATCH_ACK_MESSAGES),
        numbers,
        b".",
        steps,
        b".$FI",
    ]


def encode_stored_check(
    subject: bytes, count: int, message_ids: Sequence[Column], replies: Sequence[Column]
) -> memoryview:
    """What asks a stream whether it knows so many message ids, and stores nothing: messages that
    would have to roll up others, in a way that no stream knows. It answers that a message is a
    duplicate, or NO_ROLLUP; anything else says nothing. Columns are as `writing.alike` takes
    them."""
    headers: list[Column] = [
        HEADER_VERSION_LINE + MSG_ID + b": ", *message_ids, b"\r\nNats-Rollup: none\r\n\r\n"
    ]  # fmt: skip
    nothing = np.empty((count, 0), np.uint8)
    return encode_equal_messages(subject, nothing, reply=replies, headers=headers)


def _parse_plain_acks(messages: ReceivedMessages, sequences: Integers) -> Flags:
    """Which say no more than the first plain one but for their sequences, which are filled in."""
    plain: Flags = np.zeros(messages.count, np.bool_)
    first = next((m for m in map(messages.payload, range(min(4, messages.count)))
                  if _PUB_ACK.fullmatch(m)), b"")  # fmt: skip
    match = _PUB_ACK.fullmatch(first)
    if match is None:
        return plain
    prefix = np.frombuffer(match[1], np.uint8)
    data, begins, last = messages.data, messages.payloads, messages.ends - 1
    likely = np.flatnonzero((messages.bodies == begins) & (last - begins > prefix.size))
    if likely.size:
        heads = np.lib.stride_tricks.sliding_window_view(data, prefix.size)[begins[likely]]
        same = (heads == prefix).all(axis=1) & (data[last[likely]] == ord("}"))
        likely = likely[same]
        found, good = parse_numbers(data, begins[likely] + prefix.size, last[likely])
        good &= found > 0
        sequences[likely[good]] = found[good]
        plain[likely[good]] = True
    return plain


# Consuming ---------------------------------------------------------------------------------------


@dataclass(slots=True)
class JetStreamDeliveries:
    """What ack subjects say of messages. All columns have shape (n,)."""

    good: Flags
    """Whether it is one; else the other columns are 0."""
    attempts: Integers
    """How often the message was sent, this time included."""
    sequences: Integers
    """In the stream, from 1."""
    counts: Integers
    """How many the consumer has sent, this one included."""
    messages: ReceivedMessages
    _rest: tuple[Integers, Integers] | None = None
    """Times and pending, once somebody has asked for them."""

    @property
    def times(self) -> Integers:
        """When it was stored: nanoseconds since 1970."""
        return self._parse_times_and_pending()[0]

    @property
    def pending(self) -> Integers:
        """How many are behind it."""
        return self._parse_times_and_pending()[1]

    def _parse_times_and_pending(self) -> tuple[Integers, Integers]:
        if self._rest is None:
            _, columns = _parse_ack_subjects(self.messages)
            self._rest = columns[3], columns[4]
        return self._rest

    def pick(self, rows: Integers | Flags) -> JetStreamDeliveries:
        """Some of them."""
        columns = self.attempts[rows], self.sequences[rows], self.counts[rows]
        return JetStreamDeliveries(self.good[rows], *columns, self.messages.pick(rows))


def parse_deliveries(messages: ReceivedMessages) -> JetStreamDeliveries:
    """Read the reply subjects of messages that a consumer has sent."""
    alike = _parse_similar_ack_subjects(messages) if messages.count >= _ALIKE_MESSAGES_MIN else None
    if alike is not None:
        return JetStreamDeliveries(np.ones(messages.count, np.bool_), *alike, messages)
    good, (attempts, sequences, counts, *rest) = _parse_ack_subjects(messages)
    return JetStreamDeliveries(good, attempts, sequences, counts, messages, (rest[0], rest[1]))


def parse_stored_time(messages: ReceivedMessages, row: int) -> float:
    """When one that is a delivery was stored: seconds since 1970."""
    tokens = messages.reply(row).split(b".")
    return int(tokens[7 if len(tokens) == _ACK_TOKENS else 9]) / 1e9


def _parse_ack_subjects(messages: ReceivedMessages) -> tuple[Flags, list[Integers]]:
    """Which are ack subjects, and their five numbers, whatever they look like."""
    data, begins, ends = messages.data, messages.replies, messages.reply_ends
    first = int(begins.min(initial=len(data)))
    last = int(ends.max(initial=first))
    dots = np.flatnonzero(data[first:last] == _DOT)
    dots += first
    at = dots.searchsorted(begins)
    tokens = dots.searchsorted(ends) - at + 1
    good: Flags = (tokens == _ACK_TOKENS) | (tokens == _LONG_ACK_TOKENS)
    good |= tokens == _LONG_ACK_TOKENS + 1
    for row in _find_other_prefixes(messages, good):
        good[row] = False
    padded = np.concatenate([dots, np.full(_LONG_ACK_TOKENS + 2, last)])
    at = np.where(good, at, dots.size)
    at += np.where(tokens > _ACK_TOKENS, 5, 3)
    firsts: list[Integers] = []
    lasts: list[Integers] = []
    for token in range(5):
        firsts.append(padded[np.minimum(at + token, padded.size - 1)] + 1)
        lasts.append(padded[np.minimum(at + token + 1, padded.size - 1)])
    lasts[-1] = np.where(tokens != _LONG_ACK_TOKENS + 1, ends, lasts[-1])
    found, are_numbers = parse_numbers(data, np.concatenate(firsts), np.concatenate(lasts))
    good &= are_numbers.reshape(5, -1).all(axis=0)
    columns: list[Integers] = list(found.reshape(5, -1))
    if not good.all():
        columns = [np.where(good, column, 0) for column in columns]
    return good, columns


def _parse_similar_ack_subjects(
    messages: ReceivedMessages,
) -> tuple[Integers, Integers, Integers] | None:
    """Attempts, sequences and counts of short ack subjects of one consumer, of which all that are
    of one length have their dots in the same places; None where any is another one."""
    begins = messages.replies
    lengths = messages.reply_ends - begins
    least, most = int(lengths.min()), int(lengths.max())
    if least == most:
        return _parse_equal_layout(messages, begins, least)
    if most - least >= _LAYOUTS_MAX:
        return None
    attempts, sequences, counts = np.empty((3, messages.count), np.int64)
    for length in range(least, most + 1):
        rows = np.flatnonzero(lengths == length)
        if rows.size:
            found = _parse_equal_layout(messages, begins[rows], length)
            if found is None:
                return None
            attempts[rows], sequences[rows], counts[rows] = found
    return attempts, sequences, counts


def _parse_equal_layout(
    messages: ReceivedMessages, begins: Integers, length: int
) -> tuple[Integers, Integers, Integers] | None:
    """The same of those that begin here and are of one length."""
    first = messages.raw[begins[0] : begins[0] + length]
    tokens = first.split(b".")
    if len(tokens) != _ACK_TOKENS or not first.startswith(b"$JS.ACK."):
        return None
    told = tokens[4:]
    if not all(token.isdigit() and len(token) <= DIGITS_MAX for token in told):
        return None
    items = unaligned(messages.data, np.dtype(f"V{length}"))[begins]
    table_ = items.view(np.uint8).reshape(-1, length)
    head = length - sum(map(len, told)) - 4
    if (table_[:, :head] != np.frombuffer(first, np.uint8, head)).any():
        return None
    # What is left of a digit is its value, and of a dot nothing.
    shape = b".".join([b"0" * len(token) for token in told])
    values = np.ascontiguousarray(table_[:, head:].T)
    values ^= np.frombuffer(shape, np.uint8)[:, None]
    most = np.frombuffer(shape.replace(b"0", b"\x09").replace(b".", b"\0"), np.uint8)
    if (values > most[:, None]).any():
        return None
    columns: list[Integers] = []
    at = 0
    for token in told:
        if len(token) == DIGITS_MAX and (values[at] == _NINE).any():
            return None  # It may be more than any number of 63 bits.
        if len(columns) < 3:
            columns.append(_digits_to_numbers(values[at : at + len(token)]))
        at += len(token) + 1
    attempts, sequences, counts = columns
    return attempts, sequences, counts


def _digits_to_numbers(digits_: Bytes) -> Integers:
    """Numbers of as many digits each: shape (width, n)."""
    found: Integers = digits_[0].astype(np.int64)
    for each in digits_[1:]:
        found *= 10
        found += each
    return found


def _find_other_prefixes(messages: ReceivedMessages, good: Flags) -> list[int]:
    """The rows whose reply subject does not begin as an ack subject does."""
    rows = np.flatnonzero(good)
    if not rows.size:
        return []
    odd = unaligned(messages.data, _WORD)[messages.replies[rows]] != _ACK_BEGINS
    found: list[int] = rows[odd].tolist()
    return found


def encode_acks(messages: ReceivedMessages, word: bytes = ACK) -> bytes:
    """Say the same about each of these messages, which have ack subjects. The order is not kept."""
    data, begins = messages.data, messages.replies
    lengths = messages.reply_ends - begins
    tail = b" %d\r\n%b\r\n" % (len(word), word)
    pieces: list[memoryview] = []
    for length in np.unique(lengths).tolist():
        items = unaligned(data, np.dtype(f"V{length}"))[begins[lengths == length]]
        whom = items.view(np.uint8).reshape(-1, length)
        columns: list[Column] = [b"PUB ", whom, tail]
        pieces.append(build_rows(len(columns[1]), columns))
    return b"".join(pieces)


def encode_acks_in_order(messages: ReceivedMessages, word: bytes) -> bytes:
    """The same, one after the other: what is to come again comes again in the order in which that
    was said."""
    raw, tail = messages.raw, b" %d\r\n%b\r\n" % (len(word), word)
    pairs = zip(messages.replies.tolist(), messages.reply_ends.tolist(), strict=True)
    return b"".join([part for a, b in pairs for part in (b"PUB ", raw[a:b], tail)])


def ack_subject_of_consumer(reply: bytes, consumer: bytes) -> bytes:
    """The ack subject of a message that has this one, as if another consumer had sent it, nobody
    knows as which one."""
    tokens = reply.split(b".")
    at = 3 if len(tokens) == _ACK_TOKENS else 5
    tokens[at], tokens[at + 3] = consumer, b"0"
    return b".".join(tokens)


def nak_payload(delay_seconds: float) -> bytes:
    """What asks for a message again, after so long."""
    return b'-NAK {"delay":%d}' % round(delay_seconds * 1e9) if delay_seconds > 0 else NAK


def pull_request(
    *, batch: int, expires_seconds: float = 0.0, idle_seconds: float = 0.0, max_bytes: int = 0
) -> bytes:
    """What a consumer is asked for: up to so many messages, and bytes, for so long; with
    `idle_seconds` it says so often that it is there. 0 for no wait, no bound."""
    said: dict[str, Any] = {"batch": batch}
    if expires_seconds:
        said["expires"] = round(expires_seconds * 1e9)
    else:
        said["no_wait"] = True
    if idle_seconds:
        said["idle_heartbeat"] = round(idle_seconds * 1e9)
    if max_bytes:
        said["max_bytes"] = max_bytes
    return msgspec.json.encode(said)


def is_consumer_missing(code: int, words: str) -> bool:
    """Whether a status says that who was asked for messages is not there: or has no leader now."""
    return code == NO_RESPONDERS or (code == 409 and words.lower() == "consumer deleted")


def is_normal_end(code: int, words: str) -> bool:
    """Whether a status ends a request for messages as it may: all were sent, or there are no more,
    or none came in time."""
    return code in (404, 408) or words.lower() == "batch completed"


def parse_pending_messages(headers: bytes) -> int:
    """How many messages of a request will not come, as the status that ends it says;"""
    return _parse_number_header(headers, b"Nats-Pending-Messages")


def parse_pending_bytes(headers: bytes) -> int:
    """and how many bytes, where that was bounded."""
    return _parse_number_header(headers, b"Nats-Pending-Bytes")


def _parse_number_header(headers: bytes, name: bytes) -> int:
    """A number in a block of headers; more than anybody asks for where it is not said."""
    for line in headers.split(b"\r\n"):
        found, _, value = line.partition(b":")
        if found == name:
            return parse_number(value.strip(), 1 << 31)
    return 1 << 31


def parse_number(text: bytes, otherwise: int) -> int:
    """What these digits say; `otherwise` where they are none, or more than any number has here."""
    return int(text) if text.isdigit() and len(text) <= DIGITS_MAX else otherwise
