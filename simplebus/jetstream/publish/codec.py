"""Conversion between frames and JetStream messages.

The payload of a JetStream message is the content of the frame. A header marks a content that begins
with an envelope. Foreign messages in a stream are skipped if they cannot be encoded as a frame.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from simplebus.core.limits import (
    DELIMITER_BYTES,
    HEADER_BYTES,
    MESSAGE_ID_MASK,
    NAME_CHARACTERS_MAX,
    RECEIVE_PADDING_BYTES,
)
from simplebus.core.protocol import frames
from simplebus.core.protocol.frame_splitter import SplitterScratch, split_frames
from simplebus.core.protocol.frames import (
    DELIMITER,
    HEADER,
    Bytes,
    Flags,
    FrameBatch,
    Integers,
    unaligned,
)
from simplebus.nats.client import encode
from simplebus.nats.client.encode import Column
from simplebus.nats.client.events import ReceivedMessages
from simplebus.nats.client.jetstream_codec import MSG_ID

TYPE_HEADER = b"Simplebus-Type"
ENVELOPE_HEADER = b"\r\n" + TYPE_HEADER + b": 5"
"""Header line of a message with an envelope."""
_FEW_DIVISOR = 8
"""Part of the messages with headers up to which these are examined one by one."""
_ID_DIGITS = 10
_ESCAPED_BYTES_MAX = 12
"""Maximum bytes of a character in a message id: three for each of its UTF-8 bytes."""
MILESTONE_MESSAGES = 32
"""Messages of a fast batch of which one has an id, because an id costs a server nearly as much as
storing a message. Messages after the last stored milestone may be stored, too.
"""
HEADERS_BYTES_MAX = 128 + 2 * NAME_CHARACTERS_MAX * _ESCAPED_BYTES_MAX
"""Upper limit of a message's headers. Its id contains the publisher's name and instance."""

assert MESSAGE_ID_MASK < 10**_ID_DIGITS


def split_batches(pieces: Sequence[bytes]) -> list[FrameBatch]:
    """Split frames into batches of one frame type, in order. Long runs of frames with equal length
    form separate batches.
    """
    raw = bytearray().join((*pieces, bytes(RECEIVE_PADDING_BYTES)))
    last, offset = len(raw) - RECEIVE_PADDING_BYTES, 0
    scratch = SplitterScratch(len(raw))
    found: list[FrameBatch] = []
    while offset < last:
        batch = split_frames(raw, offset, last, scratch)
        assert batch is not None, "a commit_log holds whole frames"
        offset += batch.data.size
        types = batch.data[batch.starts]
        edges = [0, *(np.flatnonzero(types[1:] != types[:-1]) + 1).tolist(), batch.count]
        found += [batch.slice(a, b) for a, b in pairwise(edges)]
    return found


def encode_publications(
    subject: bytes, batch: FrameBatch, *, ids: tuple[bytes, Integers], replies: Sequence[Column]
) -> memoryview:
    """Encode frames of one type as messages for a stream.

    Args:
        ids: Common prefix of the message ids, and numbers below 10**10, shape (n,).
        replies: Columns of the reply subjects.
    """
    headers = _headers(batch, ids)
    if batch.stride:
        return encode.encode_equal_messages(
            subject, _payloads(batch), reply=replies, headers=headers
        )
    count = batch.count
    header_table = bytes(encode.build_rows(count, headers))
    reply_table = bytes(encode.build_rows(count, replies))
    header_bytes, reply_bytes = len(header_table) // count, len(reply_table) // count
    raw, bounds = batch.data.tobytes(), batch.bounds.tolist()
    parts: list[bytes] = []
    for row in range(count):
        begin, end = bounds[row] + HEADER_BYTES, bounds[row + 1] - DELIMITER_BYTES
        size = header_bytes + end - begin
        reply = reply_table[row * reply_bytes : (row + 1) * reply_bytes]
        parts.append(b"HPUB %b %b %d %d\r\n" % (subject, reply, header_bytes, size))
        parts += (
            header_table[row * header_bytes : (row + 1) * header_bytes],
            raw[begin:end],
            b"\r\n",
        )
    return memoryview(b"".join(parts))


def milestone_rows(count: int) -> Integers:
    """Return the rows of a fast batch of `count` messages that have an id."""
    found = np.arange(MILESTONE_MESSAGES - 1, count, MILESTONE_MESSAGES)
    return found if count % MILESTONE_MESSAGES == 0 else np.append(found, count - 1)


def encode_fast_batch(
    subject: bytes, batch: FrameBatch, *, ids: tuple[bytes, Integers], replies: Sequence[Column]
) -> memoryview:
    """Encode frames of one type as a fast batch in which only milestones have ids.

    The arguments are those of `encode_publications`.
    """
    whole = batch.count // MILESTONE_MESSAGES * MILESTONE_MESSAGES if batch.stride else 0
    parts: list[memoryview] = []
    if whole:
        front, (prefix, numbers) = batch.slice(0, whole), ids
        milestone_indexes = milestone_rows(whole)
        plain = encode.encode_equal_messages(
            subject,
            _payloads(front),
            reply=_select_rows(replies, slice(0, whole)),
            headers=_headers(front, None),
        )
        with_ids = encode.encode_equal_messages(
            subject,
            _payloads(front)[milestone_indexes],
            reply=_select_rows(replies, milestone_indexes),
            headers=_headers(front, (prefix, numbers[milestone_indexes])),
        )
        table = np.frombuffer(plain, np.uint8).reshape(milestone_indexes.size, -1)
        table = table[:, : table.shape[1] // MILESTONE_MESSAGES * (MILESTONE_MESSAGES - 1)]
        columns = [table, np.frombuffer(with_ids, np.uint8).reshape(milestone_indexes.size, -1)]
        parts.append(encode.build_rows(milestone_indexes.size, columns))
    if whole < batch.count:
        parts += _encode_fast_batch_rows(subject, batch, whole, ids, replies)
    return parts[0] if len(parts) == 1 else memoryview(b"".join(parts))


def _encode_fast_batch_rows(
    subject: bytes,
    batch: FrameBatch,
    first: int,
    ids: tuple[bytes, Integers],
    replies: Sequence[Column],
) -> list[memoryview]:
    """Encode the rows from `first` one by one."""
    raw, bounds = batch.data.tobytes(), batch.bounds.tolist()
    with_ids = set(milestone_rows(batch.count).tolist())
    plain = bytes(encode.build_rows(1, _headers(batch, None)))
    reply_table = bytes(encode.build_rows(batch.count, replies))
    reply_bytes = len(reply_table) // batch.count
    parts: list[bytes] = []
    for row in range(first, batch.count):
        headers = plain
        if row in with_ids:
            id_ = ids[0], ids[1][row : row + 1]
            headers = bytes(encode.build_rows(1, _headers(batch, id_)))
        payload = raw[bounds[row] + HEADER_BYTES : bounds[row + 1] - DELIMITER_BYTES]
        reply = reply_table[row * reply_bytes : (row + 1) * reply_bytes]
        parts.append(encode.encode_pub(subject, payload, reply=reply, headers=headers))
    return [memoryview(b"".join(parts))]


def message_id_columns(prefix: bytes, numbers: Integers) -> list[Column]:
    """Return the columns of message ids: prefix and digits."""
    return [prefix, encode.format_digits(numbers, _ID_DIGITS)]


def _headers(batch: FrameBatch, ids: tuple[bytes, Integers] | None) -> list[Column]:
    """Return the columns of the headers; empty if the messages have no headers."""
    kind = ENVELOPE_HEADER if batch.data[0] == frames.ENVELOPE else b""
    if ids is None:
        return [encode.HEADER_VERSION_LINE[:-2] + kind + b"\r\n\r\n"] if kind else []
    prefix, numbers = ids
    return [
        encode.HEADER_VERSION_LINE + MSG_ID + b": ",
        *message_id_columns(prefix, numbers),
        kind + b"\r\n\r\n",
    ]


def _payloads(batch: FrameBatch) -> Bytes:
    """Return the contents of frames of one length: shape (n, size)."""
    rows = batch.data.reshape(batch.count, batch.stride)
    return rows[:, HEADER_BYTES:-DELIMITER_BYTES]


def _select_rows(columns: Sequence[Column], offset: Integers | slice) -> list[Column]:
    return [column if isinstance(column, bytes) else column[offset] for column in columns]


def are_envelopes(messages: ReceivedMessages) -> Flags:
    """Return the flags of the messages with an envelope: shape (n,)."""
    found = np.zeros(messages.count, np.bool_)
    raw = messages.raw
    rows = np.flatnonzero(messages.bodies != messages.payloads)
    if rows.size * _FEW_DIVISOR <= messages.count:
        pairs = zip(messages.bodies[rows].tolist(), messages.payloads[rows].tolist(), strict=True)
        found[rows] = [raw.find(ENVELOPE_HEADER, begin, end) >= 0 for begin, end in pairs]
        return found
    if raw.find(ENVELOPE_HEADER, int(messages.bodies[0]), int(messages.ends[-1])) < 0:
        return found
    size = len(ENVELOPE_HEADER) + 4
    ends = messages.payloads
    likely = np.flatnonzero(ends - messages.bodies >= size)
    tail = np.frombuffer(ENVELOPE_HEADER + b"\r\n\r\n", np.uint8)
    windows = np.lib.stride_tricks.sliding_window_view(messages.data, size)
    found[likely] = (windows[ends[likely] - size] == tail).all(axis=1)
    for row in likely[~found[likely]].tolist():  # Foreign publishers may have appended headers.
        found[row] = raw.find(ENVELOPE_HEADER, int(messages.bodies[row]), int(ends[row])) >= 0
    return found


def _is_plain(messages: ReceivedMessages) -> bool:
    """Return True if no message contains the delimiter."""
    first, last = int(messages.payloads[0]), int(messages.ends[-1])
    return messages.raw.find(DELIMITER, first, last) < 0


def decode_frames(
    class_id: int, messages: ReceivedMessages, *, is_envelope: bool
) -> tuple[FrameBatch, Flags]:
    """Decode messages that all have, or all lack, an envelope.

    Returns:
        The valid frames, and the flags of the valid messages, shape (n,).
    """
    kind = frames.ENVELOPE if is_envelope else frames.MESSAGE
    head = HEADER.pack(kind, class_id, 0, 0)
    good = np.ones(messages.count, np.bool_)
    begins = messages.payloads
    lengths = messages.ends - begins
    size = int(lengths[0])
    if (lengths == size).all():
        items = unaligned(messages.data, np.dtype(f"V{size or 1}"))
        payloads = items[begins].view(np.uint8).reshape(-1, size or 1)[:, :size]
        # Searching one byte is cheaper than searching four, and the byte is rare.
        if not (payloads == DELIMITER[0]).any() or _is_plain(messages):
            data = encode.build_rows(messages.count, [head, payloads, DELIMITER])
            stride = HEADER_BYTES + size + DELIMITER_BYTES
            bounds = np.arange(0, len(data) + 1, stride, dtype=np.int64)
            return FrameBatch(np.frombuffer(data, np.uint8), bounds, stride), good
    has_delimiter = not _is_plain(messages)
    parts: list[bytes] = []
    ends: list[int] = [0]
    for row, payload in enumerate(messages.all_payloads()):
        if has_delimiter and DELIMITER in payload:
            good[row] = False
            continue
        parts += (head, payload, DELIMITER)
        ends.append(ends[-1] + HEADER_BYTES + len(payload) + DELIMITER_BYTES)
    data = memoryview(b"".join(parts))
    return FrameBatch(np.frombuffer(data, np.uint8), np.array(ends, np.int64), 0), good
