"""JetStream messages: API requests and replies, PubAcks, ack subjects, acks and fast batches.

API requests and replies are the JSON of nats-server; unknown fields are ignored. Batches of
messages are parsed with arrays, unusual messages one by one.

    $JS.ACK.<stream>.<consumer>.<deliveries>.<sequence>.<count>.<nanoseconds>.<pending>
    $JS.ACK.<domain>.<account>.<stream>.<consumer>.…the same…[.<random>]

A fast batch (mode `fail`) is a series of messages that a stream stores in order, each only if all
messages before it are stored. The stream replies to many messages at once, with their stored count.
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
"""Header by which a stream detects duplicates."""
ACK, NAK, WORKING, TERMINATE = b"+ACK", b"-NAK", b"+WPI", b"+TERM"
NOT_FOUND = frozenset({404, 10014, 10059})
"""Error codes for a missing object: any object, a consumer, a stream."""
NO_RESPONDERS = 503
_BAD_REQUEST = 400
UNKNOWN_FIELD = 10025
"""Error code of a server that is too old for a field of the request."""
NO_ROLLUP = 10111

FAST_BATCH_DIGITS = 4
FAST_BATCH_ACK_MESSAGES = 500
"""Messages between two progress replies of a fast batch; the maximum that servers accept."""

_SENTENCE_CHARACTERS_MAX = 500
_SAFE = "".join(chr(code) for code in range(0x21, 0x7F) if chr(code) != "%")
_ACK_TOKENS, _LONG_ACK_TOKENS = 9, 11
_DOT, _NINE = np.uint8(ord(".")), np.uint8(9)
_SIMILAR_MESSAGES_MIN = 32
"""Minimum number of messages for which `_parse_similar_ack_subjects` is faster."""
_LAYOUTS_MAX = 8
"""Maximum number of different lengths of ack subjects that are parsed with arrays."""
_WORD: np.dtype[np.uint64] = np.dtype("<u8")
_ACK_BEGINS = np.uint64(int.from_bytes(b"$JS.ACK.", "little"))
_STATUS = re.compile(rb"NATS/1\.0[ \t]+([0-9]{3})(?:[ \t]+([^\r\n]*))?\r\n")
_PUB_ACK = re.compile(rb'(\{"stream":"[^"\\]*", ?"seq": ?)[0-9]+\}')


class JetStreamError(BusError):
    """JetStream returned an error, or there are no responders."""

    def __init__(self, code: int, sentence: str, *, is_final: bool = False) -> None:
        super().__init__(f"JetStream: {sentence} ({code})")
        self.code = code
        """`err_code` if there is one, otherwise `code`."""
        self.is_final = is_final
        """True if the request itself is invalid, so that a retry fails as well."""
        self.sentence = sentence


def encode_api_request(subject: str, body: dict[str, Any] | None = None) -> tuple[str, bytes]:
    """Return subject and payload of an API request."""
    return API + subject, msgspec.json.encode(body) if body is not None else b""


def parse_status(headers: bytes) -> tuple[int, str]:
    """Return status code and description of a header block; code 0 for none."""
    match = _STATUS.match(headers)
    return (int(match[1]), (match[2] or b"").decode("latin-1")) if match else (0, "")


def parse_api_reply(headers: bytes, payload: bytes, subject: str = "") -> dict[str, Any]:
    """Return the checked JSON of an API reply; see `jetstream_types`. Raises JetStreamError."""
    code, description = parse_status(headers)
    if code >= 400:
        if code == NO_RESPONDERS:
            description = "no responders: JetStream is not enabled, or has no leader now"
        raise JetStreamError(code, description)
    try:
        reply = msgspec.json.decode(payload, type=dict[str, Any])
    except (msgspec.MsgspecError, RecursionError):
        raise JetStreamError(0, f"received {payload[:60]!r}, expected a JSON object") from None
    error = reply.get("error")
    if isinstance(error, dict):
        raise _parse_error(error)
    try:
        jetstream_types.check_reply(subject, reply)
    except ValueError as problem:
        raise JetStreamError(0, f"invalid reply to {subject}: {problem}") from None
    return reply


def _parse_error(error: dict[str, Any]) -> JetStreamError:
    value = error.get("err_code") or error.get("code")
    code = value if type(value) is int else 0
    sentence = str(error.get("description", ""))[:_SENTENCE_CHARACTERS_MAX]
    return JetStreamError(code, sentence, is_final=error.get("code") == _BAD_REQUEST)


def percent_encode(text: str) -> str:
    """Return the text for use in a header: all but printable ASCII, and `%`, is percent-encoded."""
    return quote(text, safe=_SAFE)


# Publishing --------------------------------------------------------------------------------------


@dataclass(slots=True)
class PubAcks:
    """Results of publications. All columns have shape (n,)."""

    sequences: Integers
    """Stream sequences; 0 if the message was not stored."""
    duplicates: Flags
    """True if the stream had the message already."""
    errors: dict[int, JetStreamError]
    """Errors by row."""


def parse_pub_acks(messages: ReceivedMessages) -> PubAcks:
    """Parse replies to publications."""
    count = messages.count
    sequences = np.zeros(count, np.int64)
    duplicates = np.zeros(count, np.bool_)
    errors: dict[int, JetStreamError] = {}
    plain = _parse_plain_acks(messages, sequences)
    for row in np.flatnonzero(~plain).tolist():
        try:
            reply = parse_api_reply(messages.headers(row), messages.payload(row))
            sequence, duplicate = reply.get("seq"), reply.get("duplicate", False)
            if type(sequence) is not int or not 0 < sequence < 1 << 63:
                raise JetStreamError(
                    0, f"received {messages.payload(row)[:60]!r}, expected a PubAck"
                )
            sequences[row], duplicates[row] = sequence, duplicate is True
        except JetStreamError as error:
            errors[row] = error
    return PubAcks(sequences, duplicates, errors)


class _FastBatchReplyJson(msgspec.Struct):
    """Reply to a fast batch: progress ("ack"), missing messages ("gap"), an error ("err"), or its
    end (no type).
    """

    type: str = ""
    seq: Annotated[int, msgspec.Meta(ge=0)] = 0
    count: Annotated[int, msgspec.Meta(ge=0)] | None = None
    error: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class FastBatchReply:
    """Progress or end of a fast batch."""

    stored: int
    """Messages stored, from the first on; -1 if unknown."""
    is_last: bool
    """True if the batch has ended; further messages of it are not stored."""
    error: JetStreamError | None = None
    """Reason of the end."""
    sequence: int = 0
    """Stream sequence of the last stored message, after the end."""


def parse_fast_batch_reply(headers: bytes, payload: bytes) -> FastBatchReply:
    """Parse a reply to a fast batch."""
    code, description = parse_status(headers)
    if code >= 400:
        return FastBatchReply(-1, True, JetStreamError(code, description or "no responders"))
    try:
        reply = msgspec.json.decode(payload, type=_FastBatchReplyJson)
    except (msgspec.MsgspecError, RecursionError):
        sentence = f"received {payload[:60]!r}, expected a reply to a fast batch"
        return FastBatchReply(-1, False, JetStreamError(0, sentence))
    error = None if reply.error is None else _parse_error(reply.error)
    if reply.type:
        return FastBatchReply(reply.seq if reply.type == "ack" else -1, False, error)
    if error is not None or reply.count is None:
        sentence = f"received {payload[:60]!r}, expected the end of a fast batch"
        return FastBatchReply(-1, True, error or JetStreamError(0, sentence))
    # Without a sequence, the last message has the id of a message that may not be stored yet.
    if reply.count and not reply.seq:
        sentence = "the reply to a fast batch has no sequence, so the stored count is unknown"
        return FastBatchReply(-1, True, JetStreamError(0, sentence))
    return FastBatchReply(reply.count, True, sequence=reply.seq)


def fast_batch_reply_subjects(inbox: bytes, name: bytes, count: int) -> Sequence[Column]:
    """Return the reply subjects of a fast batch, as columns for `encode_equal_messages`.

    `count` is below 10**FAST_BATCH_DIGITS; `name` must be unique within the stream.
    """
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
    """Return messages that a stream does not store, but checks for these message ids.

    They have an invalid rollup header. The stream replies that a message is a duplicate of a stored
    one, or NO_ROLLUP. Any other reply means unknown. Columns are as for `encode_equal_messages`.
    """
    headers: list[Column] = [
        HEADER_VERSION_LINE + MSG_ID + b": ", *message_ids, b"\r\nNats-Rollup: none\r\n\r\n"
    ]  # fmt: skip
    empty_payloads = np.empty((count, 0), np.uint8)
    return encode_equal_messages(subject, empty_payloads, reply=replies, headers=headers)


def _parse_plain_acks(messages: ReceivedMessages, sequences: Integers) -> Flags:
    """Fill in the sequences of replies that differ in nothing but the sequence.

    Returns True for each such reply.
    """
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
        is_pub_ack = (heads == prefix).all(axis=1) & (data[last[likely]] == ord("}"))
        likely = likely[is_pub_ack]
        numbers, good = parse_numbers(data, begins[likely] + prefix.size, last[likely])
        good &= numbers > 0
        sequences[likely[good]] = numbers[good]
        plain[likely[good]] = True
    return plain


# Consuming ---------------------------------------------------------------------------------------


@dataclass(slots=True)
class JetStreamDeliveries:
    """Contents of the ack subjects of messages. All columns have shape (n,)."""

    good: Flags
    """True for a valid ack subject; otherwise the other columns are 0."""
    attempts: Integers
    """Deliveries of the message, including this one."""
    sequences: Integers
    """Stream sequences, from 1."""
    counts: Integers
    """Messages sent by the consumer, including this one."""
    messages: ReceivedMessages
    _times_and_pending: tuple[Integers, Integers] | None = None
    """Times and pending counts, parsed on demand."""

    @property
    def times(self) -> Integers:
        """Times of storing, in nanoseconds since 1970."""
        return self._parse_times_and_pending()[0]

    @property
    def pending(self) -> Integers:
        """Number of messages for the consumer that follow each message."""
        return self._parse_times_and_pending()[1]

    def _parse_times_and_pending(self) -> tuple[Integers, Integers]:
        if self._times_and_pending is None:
            _, columns = _parse_ack_subjects(self.messages)
            self._times_and_pending = columns[3], columns[4]
        return self._times_and_pending

    def pick(self, rows: Integers | Flags) -> JetStreamDeliveries:
        """Return the selected rows."""
        columns = self.attempts[rows], self.sequences[rows], self.counts[rows]
        return JetStreamDeliveries(self.good[rows], *columns, self.messages.pick(rows))


def parse_deliveries(messages: ReceivedMessages) -> JetStreamDeliveries:
    """Parse the reply subjects of messages from a consumer."""
    if messages.count >= _SIMILAR_MESSAGES_MIN:
        columns = _parse_similar_ack_subjects(messages)
        if columns is not None:
            return JetStreamDeliveries(np.ones(messages.count, np.bool_), *columns, messages)
    good, (attempts, sequences, counts, *times_and_pending) = _parse_ack_subjects(messages)
    return JetStreamDeliveries(
        good, attempts, sequences, counts, messages, (times_and_pending[0], times_and_pending[1])
    )


def parse_stored_time(messages: ReceivedMessages, row: int) -> float:
    """Return the time of storing of a delivery, in seconds since 1970."""
    tokens = messages.reply(row).split(b".")
    return int(tokens[7 if len(tokens) == _ACK_TOKENS else 9]) / 1e9


def _parse_ack_subjects(messages: ReceivedMessages) -> tuple[Flags, list[Integers]]:
    """Return a flag for each valid ack subject, and the five numbers of each ack subject."""
    data, begins, ends = messages.data, messages.replies, messages.reply_ends
    first = int(begins.min(initial=len(data)))
    last = int(ends.max(initial=first))
    dots = np.flatnonzero(data[first:last] == _DOT)
    dots += first
    dot_indexes = dots.searchsorted(begins)
    tokens = dots.searchsorted(ends) - dot_indexes + 1
    good: Flags = (tokens == _ACK_TOKENS) | (tokens == _LONG_ACK_TOKENS)
    good |= tokens == _LONG_ACK_TOKENS + 1  # With the random token at the end.
    for row in _find_other_prefixes(messages, good):
        good[row] = False
    padded = np.concatenate([dots, np.full(_LONG_ACK_TOKENS + 2, last)])
    dot_indexes = np.where(good, dot_indexes, dots.size)
    dot_indexes += np.where(tokens > _ACK_TOKENS, 5, 3)
    firsts: list[Integers] = []
    lasts: list[Integers] = []
    for token in range(5):
        firsts.append(padded[np.minimum(dot_indexes + token, padded.size - 1)] + 1)
        lasts.append(padded[np.minimum(dot_indexes + token + 1, padded.size - 1)])
    lasts[-1] = np.where(tokens != _LONG_ACK_TOKENS + 1, ends, lasts[-1])
    numbers, are_numbers = parse_numbers(data, np.concatenate(firsts), np.concatenate(lasts))
    good &= are_numbers.reshape(5, -1).all(axis=0)
    columns: list[Integers] = list(numbers.reshape(5, -1))
    if not good.all():
        columns = [np.where(good, column, 0) for column in columns]
    return good, columns


def _parse_similar_ack_subjects(
    messages: ReceivedMessages,
) -> tuple[Integers, Integers, Integers] | None:
    """Return attempts, sequences and counts of short ack subjects of one consumer.

    Subjects of one length must have their dots in the same places; None if any subject differs.
    """
    begins = messages.replies
    lengths = messages.reply_ends - begins
    shortest, longest = int(lengths.min()), int(lengths.max())
    if shortest == longest:
        return _parse_equal_layout(messages, begins, shortest)
    if longest - shortest >= _LAYOUTS_MAX:
        return None
    attempts, sequences, counts = np.empty((3, messages.count), np.int64)
    for length in range(shortest, longest + 1):
        rows = np.flatnonzero(lengths == length)
        if rows.size:
            columns = _parse_equal_layout(messages, begins[rows], length)
            if columns is None:
                return None
            attempts[rows], sequences[rows], counts[rows] = columns
    return attempts, sequences, counts


def _parse_equal_layout(
    messages: ReceivedMessages, begins: Integers, length: int
) -> tuple[Integers, Integers, Integers] | None:
    """Return the columns of `_parse_similar_ack_subjects` for subjects of one length."""
    first = messages.raw[begins[0] : begins[0] + length]
    tokens = first.split(b".")
    if len(tokens) != _ACK_TOKENS or not first.startswith(b"$JS.ACK."):
        return None
    number_tokens = tokens[4:]
    if not all(token.isdigit() and len(token) <= DIGITS_MAX for token in number_tokens):
        return None
    items = unaligned(messages.data, np.dtype(f"V{length}"))[begins]
    rows = items.view(np.uint8).reshape(-1, length)
    head = length - sum(map(len, number_tokens)) - 4
    if (rows[:, :head] != np.frombuffer(first, np.uint8, head)).any():
        return None
    # After XOR with this layout a digit is its value and a dot is 0.
    layout = b".".join([b"0" * len(token) for token in number_tokens])
    values = np.ascontiguousarray(rows[:, head:].T)
    values ^= np.frombuffer(layout, np.uint8)[:, None]
    max_values = np.frombuffer(layout.replace(b"0", b"\x09").replace(b".", b"\0"), np.uint8)
    if (values > max_values[:, None]).any():
        return None
    columns: list[Integers] = []
    start = 0
    for token in number_tokens:
        if len(token) == DIGITS_MAX and (values[start] == _NINE).any():
            return None  # The number may not fit into 63 bits.
        if len(columns) < 3:
            columns.append(_digits_to_numbers(values[start : start + len(token)]))
        start += len(token) + 1
    attempts, sequences, counts = columns
    return attempts, sequences, counts


def _digits_to_numbers(digits: Bytes) -> Integers:
    """Return the numbers of equally many digits, shape (width, n)."""
    numbers: Integers = digits[0].astype(np.int64)
    for digit in digits[1:]:
        numbers *= 10
        numbers += digit
    return numbers


def _find_other_prefixes(messages: ReceivedMessages, good: Flags) -> list[int]:
    """Return the rows whose reply subject does not begin with `$JS.ACK.`."""
    rows = np.flatnonzero(good)
    if not rows.size:
        return []
    differs = unaligned(messages.data, _WORD)[messages.replies[rows]] != _ACK_BEGINS
    other_rows: list[int] = rows[differs].tolist()
    return other_rows


def encode_acks(messages: ReceivedMessages, word: bytes = ACK) -> bytes:
    """Return acks with the same payload for these messages, in any order."""
    data, begins = messages.data, messages.replies
    lengths = messages.reply_ends - begins
    tail = b" %d\r\n%b\r\n" % (len(word), word)
    pieces: list[memoryview] = []
    for length in np.unique(lengths).tolist():
        items = unaligned(data, np.dtype(f"V{length}"))[begins[lengths == length]]
        ack_subjects = items.view(np.uint8).reshape(-1, length)
        columns: list[Column] = [b"PUB ", ack_subjects, tail]
        pieces.append(build_rows(len(ack_subjects), columns))
    return b"".join(pieces)


def encode_acks_in_order(messages: ReceivedMessages, word: bytes) -> bytes:
    """Return acks in the order of the messages: naks are redelivered in the order in which they
    are sent.
    """
    raw, tail = messages.raw, b" %d\r\n%b\r\n" % (len(word), word)
    pairs = zip(messages.replies.tolist(), messages.reply_ends.tolist(), strict=True)
    return b"".join([part for a, b in pairs for part in (b"PUB ", raw[a:b], tail)])


def ack_subject_of_consumer(reply: bytes, consumer: bytes) -> bytes:
    """Return the ack subject with another consumer and delivery count 0."""
    tokens = reply.split(b".")
    index = 3 if len(tokens) == _ACK_TOKENS else 5
    tokens[index], tokens[index + 3] = consumer, b"0"
    return b".".join(tokens)


def nak_payload(delay_seconds: float) -> bytes:
    """Return the payload that requests redelivery after a delay."""
    return b'-NAK {"delay":%d}' % round(delay_seconds * 1e9) if delay_seconds > 0 else NAK


def pull_request(
    *, batch: int, expires_seconds: float = 0.0, idle_seconds: float = 0.0, max_bytes: int = 0
) -> bytes:
    """Return the payload of a pull request.

    Args:
        batch: Maximum number of messages.
        expires_seconds: Lifetime of the request; 0 to return at once.
        idle_seconds: Interval of idle heartbeats; 0 for none.
        max_bytes: Maximum number of bytes; 0 for no limit.
    """
    request: dict[str, Any] = {"batch": batch}
    if expires_seconds:
        request["expires"] = round(expires_seconds * 1e9)
    else:
        request["no_wait"] = True
    if idle_seconds:
        request["idle_heartbeat"] = round(idle_seconds * 1e9)
    if max_bytes:
        request["max_bytes"] = max_bytes
    return msgspec.json.encode(request)


def is_consumer_missing(code: int, description: str) -> bool:
    """Return True if the status means that the consumer is deleted or has no leader."""
    return code == NO_RESPONDERS or (code == 409 and description.lower() == "consumer deleted")


def is_normal_end(code: int, description: str) -> bool:
    """Return True if the status ends a pull request normally: complete, no messages, or expired."""
    return code in (404, 408) or description.lower() == "batch completed"


def parse_pending_messages(headers: bytes) -> int:
    """Return the count of undelivered messages from the status that ends a pull request."""
    return _parse_number_header(headers, b"Nats-Pending-Messages")


def parse_pending_bytes(headers: bytes) -> int:
    """Return the count of undelivered bytes from the status that ends a pull request."""
    return _parse_number_header(headers, b"Nats-Pending-Bytes")


def _parse_number_header(headers: bytes, name: bytes) -> int:
    """Return the number in a header; 1 << 31 if it is missing."""
    for line in headers.split(b"\r\n"):
        header, _, value = line.partition(b":")
        if header == name:
            return parse_number(value.strip(), 1 << 31)
    return 1 << 31


def parse_number(text: bytes, default: int) -> int:
    """Return the value of a decimal number; `default` if it is invalid or too long."""
    return int(text) if text.isdigit() and len(text) <= DIGITS_MAX else default
