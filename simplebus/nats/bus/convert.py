"""Conversion between NATS messages and envelopes.

A NATS message that was stored in a class is delivered to NATS clients byte for byte as published,
except for blanks around header values and malformed header blocks. Binary clients receive channel,
headers and payload. A message that cannot be converted to an envelope is refused with a reason.

    NATS                            envelope
    subject orders.eu               channel orders.eu
    reply _INBOX.x.1                header Nats-Reply-To: _INBOX.x.1, the first one
    NATS/1.0                        nothing
    NATS/1.0 503 No Responders      header Nats-Status: 503 No Responders
    Name: value                     header Name: value
    any other header block          header Nats-Header-Block: the whole block as Latin-1

"Any other header block" is a block that is malformed, is empty, or contains one of the three names
Nats-Reply-To, Nats-Status and Nats-Header-Block. A block is malformed if it does not end with an
empty line, has a line without a colon or with an invalid name, has a status that does not begin
with three digits, or is not UTF-8. A malformed block is delivered as the header Nats-Header-Block,
because client libraries stop reading at such a block.

Characters in headers of binary clients that NATS does not allow (colon, blank or non-ASCII in a
name; line break or NUL in a value) are percent-encoded. A reply subject that is invalid or very
long remains a header. Times and keys are not visible to NATS clients.

Frames for a class are returned with their channels, so that the store need not decode them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from simplebus.core.channel.pattern import check_name
from simplebus.core.errors import LocalProtocolError, Reason, RemoteProtocolError
from simplebus.core.limits import DELIMITER_BYTES, HEADER_BYTES
from simplebus.core.protocol import frames
from simplebus.core.protocol.envelope import (
    CHANNEL,
    STUFFED,
    TEXT_BYTES_MAX,
    add_headers,
    check_header_count,
    encode_header_texts,
    stuff,
)
from simplebus.core.protocol.envelope_batch import Envelope, EnvelopeColumns, decode, encode
from simplebus.core.protocol.frames import DELIMITER, HEADER, FrameBatch, Integers
from simplebus.nats import subjects
from simplebus.nats.limits import (
    BATCHED_STORE_COST_BYTES,
    HEADER_COST_FACTOR,
    SINGLE_STORE_COST_BYTES,
)
from simplebus.nats.protocol.events import Indexes, MixedBatch, Pub, UniformBatch, iter_messages

Headers = tuple[tuple[str, str], ...]

REPLY_HEADER = "Nats-Reply-To"
"""Header with the channel that replies are published on."""
STATUS_HEADER = "Nats-Status"
"""Header with the status behind `NATS/1.0`."""
BLOCK_HEADER = "Nats-Header-Block"
"""Header with a whole irregular header block."""
_RESERVED_HEADERS = frozenset(map(str.encode, (REPLY_HEADER, STATUS_HEADER, BLOCK_HEADER)))
_NO_HEADERS: frozenset[bytes] = frozenset()

_VERSION = b"NATS/1.0"
_LINE = re.compile(rb"([!-9;-~]+):[ \t]*([^\r\n\0]*)\r\n")
_STATUS = r"[1-9][0-9]{2}(?: [^\r\n\0]*)?"
_STATUS_VALUE = re.compile(_STATUS)
_BLOCK = re.compile(
    rf"NATS/1\.0(?: (?P<status>{_STATUS}))?\r\n".encode()
    + rb"(?P<lines>(?:[!-9;-~]++:[^\r\n\0]*+\r\n)*+)\r\n"
)
_NOT_IN_NAME = re.compile(r"[^!-9;-~]")
_NOT_IN_VALUE = re.compile(r"[\r\n\0]")
_BLOCK_BYTES_MAX = TEXT_BYTES_MAX + len(_VERSION) + 4
"""Longest header block: the headers of a longer one are too long for an envelope."""
_NOT_IN_SUBJECT = re.compile(rb"[\x00-\x20\x7f]")
_DELIMITER_START = DELIMITER[:-1]
# A reply to a longer subject would exceed the control line, so such a subject of a binary client
# stays a header.
_REPLY_BYTES_MAX = 2048

# Cached channels, and starts of envelopes that have only this channel, by subject.
_SUBJECTS_MAX = 4096
_SUBJECT_BYTES_MAX = 256
_subjects: dict[bytes, tuple[str, bytes]] = {}

# Up to this many messages are converted one by one: arrays cost more.
_SINGLE_MESSAGES_MAX = 4


# Headers -----------------------------------------------------------------------------------------


def parse_header_block(block: bytes) -> Headers:
    """Return the headers of a NATS header block, which may be irregular or empty."""
    if not block:
        return ()
    return _parse_regular_block(block) or ((BLOCK_HEADER, block.decode("latin-1")),)


def _parse_regular_block(block: bytes) -> Headers | None:
    """Return the headers; None if the block is irregular."""
    texts = _split_block(block, _RESERVED_HEADERS)
    if texts is None:
        return None
    names, values = texts[::2], texts[1::2]
    return tuple((name.decode(), value.decode()) for name, value in zip(names, values, strict=True))


def _split_block(block: bytes, reserved: frozenset[bytes]) -> list[bytes] | None:
    """Return names and values in turn, as UTF-8; None if the block is malformed or contains one of
    the reserved names.
    """
    match = _BLOCK.fullmatch(block)
    if match is None:
        return None
    pairs = _LINE.findall(block, match.start("lines"))
    if not reserved.isdisjoint([name for name, _ in pairs]):
        return None
    try:
        block.decode()  # All separators are ASCII: the texts are UTF-8 if the block is.
    except UnicodeDecodeError:
        return None
    status = match["status"]
    texts = [STATUS_HEADER.encode(), status] if status else []
    for name, value in pairs:
        texts += (name, value.rstrip(b" \t"))
    return texts


def format_header_block(headers: Headers) -> bytes:
    """Return the NATS header block of these headers; empty for none."""
    if not headers:
        return b""
    first, value = headers[0]
    if first == BLOCK_HEADER and len(headers) == 1:
        try:
            block = value.encode("latin-1")
        except UnicodeEncodeError:  # Set by a client of the bus: treated like other headers.
            block = b""
        if _split_block(block, _NO_HEADERS) is not None:
            return block
    lines = [_VERSION.decode()]
    if first == STATUS_HEADER and _STATUS_VALUE.fullmatch(value):
        lines[0] += " " + value
        headers = headers[1:]
    for name, value in headers:
        encoded_name = _NOT_IN_NAME.sub(_percent_encode, name) or "%"
        lines.append(f"{encoded_name}: {_NOT_IN_VALUE.sub(_percent_encode, value)}")
    return "\r\n".join([*lines, "", ""]).encode()


def _percent_encode(match: re.Match[str]) -> str:
    return "".join(f"%{byte:02X}" for byte in match[0].encode())


# Into a class ------------------------------------------------------------------------------------


@dataclass(slots=True)
class RefusedMessages:
    """Messages of one subject that cannot be stored."""

    reason: Reason
    sentence: str
    subject: bytes
    count: int


@dataclass(slots=True)
class MessageBatch:
    """Messages converted for a class."""

    frames: FrameBatch | None
    """Frames to store; None if no message is stored."""
    columns: EnvelopeColumns | None = None
    """Columns of the frames."""
    refused: list[RefusedMessages] = field(default_factory=list)
    cost_bytes: int = 0
    """Cost of the conversion, as bytes of output."""


class MessageConverter:
    """Converts NATS messages to frames of one class."""

    def __init__(self, class_id: int, *, frame_bytes_max: int) -> None:
        self._frame_header = HEADER.pack(frames.ENVELOPE, class_id, 0, 0)
        self._frame_bytes_max = frame_bytes_max

    def convert_message(self, message: Pub) -> tuple[str, bytes]:
        """Return channel and frame of a single message.

        Raises:
            RemoteProtocolError: bad_channel, bad_envelope or frame_too_long.
        """
        channel, prefix = _encode_prefix(message)
        payload = message.body[message.header_bytes :]
        frame = b"".join((self._frame_header, prefix, payload, DELIMITER))
        if frame.count(_DELIMITER_START) != 1:
            content = stuff(frame[HEADER_BYTES:-DELIMITER_BYTES])
            frame = b"".join((self._frame_header, content, DELIMITER))
        if len(frame) > self._frame_bytes_max:
            raise self._build_too_long_error(len(frame))
        return channel, frame

    def convert_batch(
        self, messages: UniformBatch | MixedBatch, rows: Indexes | None, names: Sequence[bytes]
    ) -> MessageBatch:
        """Convert these rows of a batch; None for all. `names` are the subjects by number."""
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
            channel, prefix = _encode_prefix(head)
            prefix = self._frame_header + prefix
            payload = rows[:, end:-2]
            stride = len(prefix) + payload.shape[1] + DELIMITER_BYTES
            if stride > self._frame_bytes_max:
                raise self._build_too_long_error(stride)
        except RemoteProtocolError as error:
            refused = RefusedMessages(error.reason, error.sentence, head.subject, messages.count)
            return MessageBatch(None, refused=[refused])
        out = np.empty((messages.count, stride), np.uint8)
        out[:, : len(prefix)] = np.frombuffer(prefix, np.uint8)
        out[:, len(prefix) : -DELIMITER_BYTES] = payload
        out[:, -DELIMITER_BYTES:] = np.frombuffer(DELIMITER, np.uint8)
        whole = out.tobytes()
        if whole.count(_DELIMITER_START) != messages.count:  # A message needs byte stuffing.
            return self._convert_singly(iter_messages(messages, []))
        bounds = np.arange(0, len(whole) + 1, stride, dtype=np.int64)
        columns = EnvelopeColumns(messages.count, [channel], 0)
        return MessageBatch(FrameBatch(np.frombuffer(whole, np.uint8), bounds, stride), columns)

    def _convert_mixed(
        self, messages: MixedBatch, rows: Indexes | None, names: Sequence[bytes]
    ) -> MessageBatch:
        numbers, begins = messages.subject_numbers, messages.body_starts
        ends = messages.bounds[1:] - 2
        if rows is not None:
            numbers, begins, ends = numbers[rows], begins[rows], ends[rows]
        count = numbers.size
        if not count:
            return MessageBatch(None)
        used, channels = np.unique(numbers, return_inverse=True)
        try:
            subjects = [
                _subjects.get(names[number]) or _encode_subject(names[number])
                for number in used.tolist()
            ]
        except RemoteProtocolError:
            return self._convert_rows_singly(messages, rows, names)
        starts = [self._frame_header + prefix for _, prefix in subjects]
        start_bytes = np.array([len(start) for start in starts], np.int64)
        lengths = start_bytes[channels] + (ends - begins) + DELIMITER_BYTES
        if lengths.max() > self._frame_bytes_max:
            return self._convert_rows_singly(messages, rows, names)
        data, parts = messages.data.data, list[bytes | memoryview]()
        for channel, begin, end in zip(
            channels.tolist(), begins.tolist(), ends.tolist(), strict=True
        ):
            parts += (starts[channel], data[begin:end], DELIMITER)
        whole = b"".join(parts)
        if whole.count(_DELIMITER_START) != count:  # A message needs byte stuffing.
            return self._convert_rows_singly(messages, rows, names)
        columns = EnvelopeColumns(
            count,
            [channel for channel, _ in subjects],
            channels.astype(np.uint32) if len(subjects) > 1 else 0,
        )
        batch = _frame_batch(whole, lengths)
        return MessageBatch(batch, columns, cost_bytes=BATCHED_STORE_COST_BYTES * count)

    def _convert_rows_singly(
        self, messages: MixedBatch, rows: Indexes | None, names: Sequence[bytes]
    ) -> MessageBatch:
        all_messages = list(iter_messages(messages, names))
        if rows is None:
            return self._convert_singly(all_messages)
        return self._convert_singly([all_messages[row] for row in rows.tolist()])

    def _convert_singly(self, messages: Iterable[Pub]) -> MessageBatch:
        """Convert messages one by one."""
        encoded: list[bytes] = []
        number_by_channel: dict[str, int] = {}
        numbers: list[int] = []
        refused: dict[tuple[Reason, bytes], RefusedMessages] = {}
        header_bytes = 0
        for message in messages:
            header_bytes += message.header_bytes
            try:
                channel, frame = self.convert_message(message)
            except RemoteProtocolError as error:
                key = error.reason, message.subject
                if key not in refused:
                    refused[key] = RefusedMessages(error.reason, error.sentence, message.subject, 0)
                refused[key].count += 1
                continue
            encoded.append(frame)
            numbers.append(number_by_channel.setdefault(channel, len(number_by_channel)))
        cost_bytes = SINGLE_STORE_COST_BYTES * len(encoded) + HEADER_COST_FACTOR * header_bytes
        cost_bytes += SINGLE_STORE_COST_BYTES * sum(refusal.count for refusal in refused.values())
        if not encoded:
            return MessageBatch(None, None, list(refused.values()), cost_bytes)
        channels = np.array(numbers, np.uint32) if len(number_by_channel) > 1 else 0
        columns = EnvelopeColumns(len(encoded), list(number_by_channel), channels)
        lengths = np.array([len(frame) for frame in encoded], np.int64)
        batch = _frame_batch(b"".join(encoded), lengths)
        return MessageBatch(batch, columns, list(refused.values()), cost_bytes)

    def _build_too_long_error(self, length: int) -> RemoteProtocolError:
        return RemoteProtocolError(
            Reason.FRAME_TOO_LONG,
            f"the message has {length} bytes as a frame, at most {self._frame_bytes_max} "
            "are accepted",
        )


def _to_channel(subject: bytes) -> str:
    """Return a subject as a channel. Raises RemoteProtocolError (bad_channel)."""
    try:
        return check_name(subject.decode())
    except UnicodeDecodeError as error:
        sentence = f"not UTF-8: {error.reason} at byte {error.start}"
    except ValueError as error:
        sentence = str(error)
    raise RemoteProtocolError(Reason.BAD_CHANNEL, f"the subject is not a channel: {sentence}")


def _encode_subject(subject: bytes) -> tuple[str, bytes]:
    """Return a subject as a channel, and the start of an envelope that has only this channel.

    Raises:
        RemoteProtocolError: bad_channel.
    """
    channel = _to_channel(subject)
    prefix = encode(Envelope(channel), b"")
    if len(_subjects) >= _SUBJECTS_MAX:
        _subjects.clear()
    if len(prefix) <= _SUBJECT_BYTES_MAX:
        _subjects[subject] = channel, prefix
    return channel, prefix


def _encode_prefix(message: Pub) -> tuple[str, bytes]:
    """Return the channel of a message, and the start of its envelope before stuffing.

    Raises:
        RemoteProtocolError: bad_channel or bad_envelope.
    """
    channel, prefix = _subjects.get(message.subject) or _encode_subject(message.subject)
    if message.reply or message.header_bytes:
        prefix = add_headers(prefix, _encode_headers(message))
    return channel, prefix


def _encode_headers(message: Pub) -> bytes:
    """Return the headers of an envelope with their length. Raises RemoteProtocolError
    (bad_envelope).
    """
    texts: list[bytes] = []
    if message.header_bytes > _BLOCK_BYTES_MAX:
        raise RemoteProtocolError(
            Reason.BAD_ENVELOPE,
            f"headers have at most {TEXT_BYTES_MAX} bytes together; got a header block of "
            f"{message.header_bytes} bytes",
        )
    if message.header_bytes:
        block = bytes(message.body[: message.header_bytes])
        texts = _split_block(block, _RESERVED_HEADERS) or [
            BLOCK_HEADER.encode(),
            block.decode("latin-1").encode(),
        ]
    try:
        if message.reply:
            message.reply.decode()
            texts = [REPLY_HEADER.encode(), message.reply, *texts]
        check_header_count(len(texts) // 2)
        return encode_header_texts(texts)
    except UnicodeDecodeError as error:
        sentence = (
            f"the reply subject {message.reply!r} is not UTF-8: {error.reason} at byte "
            f"{error.start}"
        )
    except LocalProtocolError as error:
        sentence = str(error)
    raise RemoteProtocolError(Reason.BAD_ENVELOPE, sentence)


def _frame_batch(whole: bytes, lengths: Integers) -> FrameBatch:
    bounds = np.zeros(lengths.size + 1, np.int64)
    np.cumsum(lengths, out=bounds[1:])
    stride = int(lengths[0]) if (lengths == lengths[0]).all() else 0
    return FrameBatch(np.frombuffer(whole, np.uint8), bounds, stride)


# From frames -------------------------------------------------------------------------------------


def message_from_frame(frame: bytes, class_subject: bytes, ack_subject: bytes = b"") -> Pub:
    """Return a stored frame as a NATS message.

    Args:
        frame: Stored frame.
        class_subject: Subject of a message without a channel.
        ack_subject: Reply subject of an acked delivery; the publisher's reply subject then
            stays a header.
    """
    content = frame[HEADER_BYTES:-DELIMITER_BYTES]
    if frame[0] != frames.ENVELOPE:
        return Pub(class_subject, ack_subject, b"%d" % len(content), b"", 0, memoryview(content))
    if content[0] == CHANNEL and STUFFED not in content:  # The envelope has only a channel.
        start = 3 + (content[1] << 8) + content[2]
        size = b"%d" % (len(content) - start)
        return Pub(content[3:start], ack_subject, size, b"", 0, memoryview(content)[start:])
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
