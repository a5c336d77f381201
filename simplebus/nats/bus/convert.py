r"""NATS messages as envelopes of a class, and the other way.

Rule 1: what a NATS publisher has said comes out again at a NATS subscriber, byte for byte but for
blanks around header values; a client of the binary protocol sees it as channel, headers, payload.
Rule 2: what cannot be an envelope is an error that says why; it is never left out in silence.

    NATS                            envelope
    subject orders.eu               channel orders.eu
    reply _INBOX.x.1                header Nats-Reply-To: _INBOX.x.1, the first one
    NATS/1.0                        nothing
    NATS/1.0 503 No Responders      header Nats-Status: 503 No Responders
    Name: value                     header Name: value
    a block that is none of this    header Nats-Header-Block: the whole block, a character a byte

A block is kept whole when it does not end with an empty line, a line has no colon or a name that
is none, something is not UTF-8, nothing stands in it, or it holds one of these three names itself.
What a client of the binary protocol puts into a header that NATS cannot carry (a colon, a blank, a
letter beyond ASCII in a name; a line break or a NUL in a value) goes out as % and two hexadecimal
digits for each byte. Where an answer is to go stays a header if it is no subject, or a very long
one. Times and keys are not seen.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from simplebus.core.channel.pattern import check_name
from simplebus.core.errors import LocalProtocolError, Reason, RemoteProtocolError
from simplebus.core.limits import DELIMITER_BYTES, HEADER_BYTES
from simplebus.core.protocol import frames
from simplebus.core.protocol.envelope import CHANNEL, STUFFED, decode_channel
from simplebus.core.protocol.envelope_batch import Envelope, decode, encode
from simplebus.core.protocol.frames import DELIMITER, HEADER, FrameBatch
from simplebus.nats import subjects
from simplebus.nats.limits import BATCHED_STORE_COST_BYTES, SINGLE_STORE_COST_BYTES
from simplebus.nats.protocol.events import Indexes, MixedBatch, Pub, UniformBatch, iter_messages

Headers = tuple[tuple[str, str], ...]

REPLY_HEADER = "Nats-Reply-To"
"""Where an answer is to go: who publishes on this channel answers."""
STATUS_HEADER = "Nats-Status"
"""What stands behind `NATS/1.0`."""
BLOCK_HEADER = "Nats-Header-Block"
"""A whole block of headers that is odd."""
_RESERVED_HEADERS = frozenset({REPLY_HEADER, STATUS_HEADER, BLOCK_HEADER})

_VERSION = b"NATS/1.0"
_LINE = re.compile(rb"([!-9;-~]+):[ \t]*([^\r\n\0]*)")
_STATUS_LINE = re.compile(rb"NATS/1\.0(?: ([^ \r\n\0][^\r\n\0]*))?")
_NOT_IN_NAME = re.compile(r"[^!-9;-~]")
_NOT_IN_VALUE = re.compile(r"[\r\n\0]")
_NOT_IN_SUBJECT = re.compile(rb"[\x00-\x20\x7f]")
_DELIMITER_START = DELIMITER[:-1]
# A longer reply subject would have to be answered in a line that is longer than is accepted: what
# a binary client has put there stays among the headers.
_REPLY_BYTES_MAX = 2048

# So many subjects are remembered, with what envelopes begin with that have nothing but a channel,
# if that is short.
_PREFIXES_MAX = 4096
_PREFIX_BYTES_MAX = 256
_prefixes: dict[bytes, bytes] = {}

# Few messages are put together one after the other: arrays have a price of their own.
_SINGLE_MESSAGES_MAX = 8


# Headers -----------------------------------------------------------------------------------------


def parse_header_block(block: bytes) -> Headers:
    """The headers of a message with this block of them, which may be odd, or empty."""
    if not block:
        return ()
    return _parse_regular_block(block) or ((BLOCK_HEADER, block.decode("latin-1")),)


def _parse_regular_block(block: bytes) -> Headers | None:
    """None for what is odd."""
    lines = block.split(b"\r\n")
    status = _STATUS_LINE.fullmatch(lines[0])
    if status is None or len(lines) < 3 or lines[-2:] != [b"", b""]:
        return None
    pairs = [(STATUS_HEADER.encode(), status[1])] if status[1] else []
    for line in lines[1:-2]:
        match = _LINE.fullmatch(line)
        if match is None:
            return None
        pairs.append((match[1], match[2].rstrip(b" \t")))
    try:
        read = tuple((name.decode(), value.decode()) for name, value in pairs)
    except UnicodeDecodeError:
        return None
    if any(name in _RESERVED_HEADERS for name, _ in read[bool(status[1]) :]):
        return None
    return read


def format_header_block(headers: Headers) -> bytes:
    """The block of headers of a message that has these; empty for none."""
    if not headers:
        return b""
    first, value = headers[0]
    if first == BLOCK_HEADER and len(headers) == 1:
        try:
            return value.encode("latin-1")
        except UnicodeEncodeError:  # Not from here: it is a header like any other.
            pass
    lines = [_VERSION.decode()]
    if first == STATUS_HEADER and value:
        lines[0] += " " + _NOT_IN_VALUE.sub(_percent_encode, value)
        headers = headers[1:]
    for name, value in headers:
        lines.append(
            f"{_NOT_IN_NAME.sub(_percent_encode, name) or '%'}: {_NOT_IN_VALUE.sub(_percent_encode, value)}"
        )
    return "\r\n".join([*lines, "", ""]).encode()


def _percent_encode(match: re.Match[str]) -> str:
    return "".join(f"%{byte:02X}" for byte in match[0].encode())


# Into a class ------------------------------------------------------------------------------------


@dataclass(slots=True)
class RefusedMessages:
    """Messages of one subject that cannot be kept."""

    reason: Reason
    sentence: str
    subject: bytes
    count: int


@dataclass(slots=True)
class MessageBatch:
    """Messages as a class takes them."""

    frames: FrameBatch | None
    """None when there is none."""
    refused: list[RefusedMessages] = field(default_factory=list)
    cost_bytes: int = 0
    """The work that it was, as bytes of output."""


class MessageConverter:
    """Packs messages for one class."""

    def __init__(self, class_id: int, *, frame_bytes_max: int) -> None:
        self._frame_header = HEADER.pack(frames.ENVELOPE, class_id, 0, 0)
        self._frame_bytes_max = frame_bytes_max

    def convert_message(self, message: Pub) -> MessageBatch:
        """A single message."""
        try:
            frame = self._encode_frame(message)
        except RemoteProtocolError as error:
            refused = RefusedMessages(error.reason, error.sentence, message.subject, 1)
            return MessageBatch(None, [refused])
        return MessageBatch(FrameBatch.from_frame(memoryview(frame)))

    def convert_batch(
        self, messages: UniformBatch | MixedBatch, rows: Indexes | None, names: list[bytes]
    ) -> MessageBatch:
        """Those of the messages that are in these rows; None for all. `names` are the subjects by
        their numbers."""
        if isinstance(messages, MixedBatch):
            return self._convert_mixed(messages, rows, names)
        if rows is not None:
            messages = UniformBatch(
                messages.first_message, messages.rows[rows], messages.body_column
            )
        return self._convert_uniform(messages)

    def _convert_uniform(self, messages: UniformBatch) -> MessageBatch:
        rows, head, begin = messages.rows, messages.first_message, messages.body_column
        end = begin + head.header_bytes
        block = rows[:, begin:end]
        if messages.count <= _SINGLE_MESSAGES_MAX or (block != block[0]).any():
            return self._convert_singly(iter_messages(messages, []))
        try:
            prefix = self._frame_header + encode(_to_envelope(head), b"")
            self._check_length(len(prefix) + rows.shape[1] - 2 - end + DELIMITER_BYTES)
        except (RemoteProtocolError, LocalProtocolError) as error:
            return MessageBatch(None, [_refuse(error, head.subject, messages.count)])
        payload = rows[:, end:-2]
        stride = len(prefix) + payload.shape[1] + DELIMITER_BYTES
        out = np.empty((messages.count, stride), np.uint8)
        out[:, : len(prefix)] = np.frombuffer(prefix, np.uint8)
        out[:, len(prefix) : -DELIMITER_BYTES] = payload
        out[:, -DELIMITER_BYTES:] = np.frombuffer(DELIMITER, np.uint8)
        whole = out.tobytes()
        if whole.count(_DELIMITER_START) != messages.count:  # Something is to be stuffed.
            return self._convert_singly(iter_messages(messages, []))
        bounds = np.arange(0, len(whole) + 1, stride, dtype=np.int64)
        return MessageBatch(FrameBatch(np.frombuffer(whole, np.uint8), bounds, stride))

    def _convert_mixed(
        self, messages: MixedBatch, rows: Indexes | None, names: list[bytes]
    ) -> MessageBatch:
        each = range(messages.count) if rows is None else rows.tolist()
        numbers, bodies = messages.subject_numbers.tolist(), messages.body_starts.tolist()
        ends, data = (messages.bounds[1:] - 2).tolist(), messages.data.data
        parts: list[bytes | memoryview] = []
        lengths: list[int] = []
        for at in each:
            try:
                prefix = _envelope_prefix(names[numbers[at]])
            except RemoteProtocolError:
                break
            payload = data[bodies[at] : ends[at]]
            length = HEADER_BYTES + len(prefix) + len(payload) + DELIMITER_BYTES
            if length > self._frame_bytes_max:
                break
            parts += (self._frame_header, prefix, payload, DELIMITER)
            lengths.append(length)
        else:
            whole = b"".join(parts)
            if whole.count(_DELIMITER_START) == len(lengths):
                batch = _frame_batch(whole, lengths) if lengths else None
                return MessageBatch(batch, cost_bytes=BATCHED_STORE_COST_BYTES * len(lengths))
        chosen = list(iter_messages(messages, names))
        return self._convert_singly([chosen[at] for at in each])

    def _convert_singly(self, messages: Iterable[Pub]) -> MessageBatch:
        """The same, one after the other."""
        whole: list[bytes] = []
        refused: dict[tuple[Reason, bytes], RefusedMessages] = {}
        for message in messages:
            try:
                whole.append(self._encode_frame(message))
            except RemoteProtocolError as error:
                about = RefusedMessages(error.reason, error.sentence, message.subject, 0)
                about = refused.setdefault((about.reason, about.subject), about)
                about.count += 1
        batch = _frame_batch(b"".join(whole), [len(frame) for frame in whole]) if whole else None
        count = len(whole) + sum(each.count for each in refused.values())
        return MessageBatch(batch, list(refused.values()), SINGLE_STORE_COST_BYTES * count)

    def _encode_frame(self, message: Pub) -> bytes:
        """One as a frame. Raises RemoteProtocolError: bad_channel, bad_envelope, frame_too_long."""
        if not message.header_bytes and not message.reply:
            prefix = _envelope_prefix(message.subject)
            frame = b"".join((self._frame_header, prefix, message.body, DELIMITER))
            self._check_length(len(frame))
            if frame.count(_DELIMITER_START) == 1:
                return frame
        try:
            content = encode(_to_envelope(message), bytes(message.body[message.header_bytes :]))
        except LocalProtocolError as error:
            raise RemoteProtocolError(Reason.BAD_ENVELOPE, str(error)) from None
        self._check_length(HEADER_BYTES + len(content) + DELIMITER_BYTES)
        return b"".join((self._frame_header, content, DELIMITER))

    def _check_length(self, length: int) -> None:
        if length > self._frame_bytes_max:
            raise RemoteProtocolError(
                Reason.FRAME_TOO_LONG,
                f"it is {length} bytes as a frame; at most {self._frame_bytes_max} are accepted",
            )


def _to_channel(subject: bytes) -> str:
    """A subject as a channel. Raises RemoteProtocolError (bad_channel)."""
    try:
        return check_name(subject.decode())
    except UnicodeDecodeError as error:
        sentence = f"it is not UTF-8: {error.reason} at byte {error.start}"
    except ValueError as error:
        sentence = str(error)
    raise RemoteProtocolError(Reason.BAD_CHANNEL, f"no class can keep it: {sentence}")


def _envelope_prefix(subject: bytes) -> bytes:
    """What an envelope begins with that has nothing but this channel. Raises RemoteProtocolError
    (bad_channel)."""
    prefix = _prefixes.get(subject)
    if prefix is None:
        prefix = encode(Envelope(_to_channel(subject)), b"")
        if len(_prefixes) >= _PREFIXES_MAX:
            _prefixes.clear()
        if len(prefix) <= _PREFIX_BYTES_MAX:
            _prefixes[subject] = prefix
    return prefix


def _to_envelope(message: Pub) -> Envelope:
    """Everything but the payload. Raises RemoteProtocolError (bad_channel, bad_envelope)."""
    headers = parse_header_block(bytes(message.body[: message.header_bytes]))
    if message.reply:
        try:
            headers = ((REPLY_HEADER, message.reply.decode()), *headers)
        except UnicodeDecodeError as error:
            raise RemoteProtocolError(
                Reason.BAD_ENVELOPE,
                f"the reply subject {message.reply!r} is not UTF-8: {error.reason} at byte "
                f"{error.start} of it",
            ) from None
    return Envelope(_to_channel(message.subject), headers=headers)


def _refuse(
    error: RemoteProtocolError | LocalProtocolError, subject: bytes, count: int
) -> RefusedMessages:
    if isinstance(error, RemoteProtocolError):
        return RefusedMessages(error.reason, error.sentence, subject, count)
    return RefusedMessages(Reason.BAD_ENVELOPE, str(error), subject, count)


def _frame_batch(whole: bytes, lengths: list[int]) -> FrameBatch:
    bounds = np.cumsum([0, *lengths], dtype=np.int64)
    stride = lengths[0] if len(set(lengths)) == 1 else 0
    return FrameBatch(np.frombuffer(whole, np.uint8), bounds, stride)


# Out of a class ----------------------------------------------------------------------------------


def message_from_frame(frame: bytes, class_subject: bytes, ack_subject: bytes = b"") -> Pub:
    """A stored frame as a message; one without a channel has the class's subject.

    With a subject for its acknowledgements that is the reply, and where an answer is to go is left
    among the headers.
    """
    content = frame[HEADER_BYTES:-DELIMITER_BYTES]
    if frame[0] != frames.ENVELOPE:
        return Pub(class_subject, ack_subject, b"%d" % len(content), b"", 0, memoryview(content))
    if content[0] == CHANNEL and STUFFED not in content:  # Nothing but a channel.
        at = 3 + (content[1] << 8) + content[2]
        size = b"%d" % (len(content) - at)
        return Pub(content[3:at], ack_subject, size, b"", 0, memoryview(content)[at:])
    envelope, payload = decode(content)
    subject = envelope.channel.encode() or class_subject
    headers, reply = envelope.headers, ack_subject
    if not ack_subject and headers and headers[0][0] == REPLY_HEADER:
        reply = headers[0][1].encode()
        is_subject = 0 < len(reply) <= _REPLY_BYTES_MAX and not _NOT_IN_SUBJECT.search(reply)
        if is_subject and not subjects.is_reserved_reply(reply):
            headers = headers[1:]
        else:
            reply = b""
    block = format_header_block(headers)
    body = block + payload
    size = b"%d" % len(body)
    header_size = b"%d" % len(block) if block else b""
    return Pub(subject, reply, size, header_size, len(block), memoryview(body))


def class_subject(class_id: int, name: str) -> bytes:
    """The subject on which a class's messages without a channel are seen."""
    try:
        return decode_channel(f"class.{name}".encode()).encode() if name else b"class.%d" % class_id
    except RemoteProtocolError:  # A name that is no channel.
        return b"class.%d" % class_id
