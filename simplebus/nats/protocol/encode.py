"""Encoding of messages as MSG and HMSG lines.

Encoded bytes never share memory with the receive buffer. A batch is encoded exactly as its messages
one by one would be, with arrays where there are many.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np

from simplebus.core.protocol.frames import unaligned
from simplebus.nats.limits import MIXED_BATCH_MESSAGES_MIN
from simplebus.nats.protocol.events import Indexes, MixedBatch, Octets, Pub, UniformBatch

PONG = b"PONG\r\n"

_CR_LF = b"\r\n"
_VERB = b"MSG "
_VERB_WORD = np.uint32(int.from_bytes(_VERB, "little"))
# Byte values that are tried as marker, in this order: the first one that does not occur in a batch
# is used to mark places in it. Values that never occur in UTF-8 are first.
_MARKERS = [bytes([n]) for n in (0xFF, 0xFE, 0xC0, 0xC1, *range(0xF5, 0xFE), *range(0xF5))]

# If every byte value occurs in a batch, messages up to this mean length are moved byte by byte;
# longer ones are sliced.
_SHORT_BYTES = 384
# Rows are few if they are less than 1/16 of the batch.
_SPARSE_DIVISOR = 16

SubscriptionRows: TypeAlias = tuple[bytes, Indexes | None]
"""Subscription id and the rows for it; None for all rows."""


def encode_message(message: Pub, sid: bytes, *, headers: bool) -> bytes:
    """Return a message for a subscription. Without `headers`, the headers are left out."""
    if message.header_size:
        line, skipped = _message_line(message, sid, headers=headers)
        return b"".join((line, message.body[skipped:], _CR_LF))
    reply = message.reply and message.reply + b" "
    fields = (_VERB, message.subject, b" ", sid, b" ", reply, message.size, _CR_LF)
    return b"".join((*fields, message.body, _CR_LF))


def encode_shared(message: Pub, sid: bytes, *, headers: bool) -> tuple[bytes, memoryview]:
    """Return the line in front of a message with a `shared_end`, and the rest of the message."""
    assert message.shared_end is not None
    line, skipped = _message_line(message, sid, headers=headers)
    return line, message.shared_end[skipped:]


def no_responders_message(message: Pub) -> Pub:
    """Return the 503 status message for a requester without responders."""
    status = b"NATS/1.0 503\r\nNats-Subject: " + message.subject + b"\r\n\r\n"
    size = b"%d" % len(status)
    return Pub(message.reply, b"", size, size, len(status), memoryview(status))


def _message_line(message: Pub, sid: bytes, *, headers: bool) -> tuple[bytes, int]:
    """Return the line in front of a message, and the bytes of its body to leave out."""
    fields, skipped = [message.subject, sid], 0
    if message.reply:
        fields.append(message.reply)
    verb = _VERB
    if message.header_bytes and headers:
        verb = b"HMSG "
        fields += [message.header_size, message.size]
    elif message.header_bytes:
        skipped = message.header_bytes
        fields.append(b"%d" % (len(message.body) - skipped))
    else:
        fields.append(message.size)
    return verb + b" ".join(fields) + _CR_LF, skipped


def encode_uniform(
    messages: UniformBatch, sid: bytes, rows: Indexes | None, *, headers: bool
) -> memoryview:
    """Return these rows of a uniform batch for a subscription; None for all rows."""
    if rows is not None:
        messages = UniformBatch(messages.first_message, messages.rows[rows], messages.body_column)
    return _encode_uniform_for_sids(messages, [sid], headers=headers)


def encode_mixed(
    messages: MixedBatch, sid: bytes, rows: Indexes | None
) -> bytes | bytearray | memoryview:
    """Return these rows of a mixed batch for a subscription; None for all rows. There are no
    headers.
    """
    if rows is not None and len(rows) < MIXED_BATCH_MESSAGES_MIN:
        return _encode_rows(messages, rows, [b" " + sid] * len(rows))
    text, begins, subject_ends = _copy_rows(messages, rows)
    data = np.frombuffer(text, np.uint8)
    unaligned(data, _VERB_WORD.dtype)[begins] = _VERB_WORD
    for marker in _MARKERS:
        if text.find(marker) < 0:
            data[subject_ends] = marker[0]
            return text.replace(marker, b" " + sid + b" ")
    if len(text) > _SHORT_BYTES * len(subject_ends):
        whole, ends = bytes(text), subject_ends.tolist()
        pieces = [
            whole[begin:end] for begin, end in zip([0, *ends], [*ends, len(text)], strict=True)
        ]
        return (b" " + sid).join(pieces)
    return _insert_at(data, subject_ends, np.frombuffer(b" " + sid, np.uint8))


def _insert_at(data: Octets, places: Indexes, word: Octets) -> memoryview:
    """Return the data with the word inserted at each of these places."""
    written = np.empty(data.size + places.size * word.size, np.uint8)
    seams = places + np.arange(places.size) * word.size
    is_data = np.ones(written.size, np.bool_)
    for at, byte in enumerate(word):
        is_data[seams + at] = False
        written[seams + at] = byte
    written[is_data] = data
    return written.data


def encode_for_subscriptions(
    messages: UniformBatch | MixedBatch, parts: list[SubscriptionRows], *, headers: bool
) -> bytes | memoryview:
    """Return a batch for several subscriptions of one client, in publication order."""
    if isinstance(messages, UniformBatch) and all(rows is None for _, rows in parts):
        return _encode_uniform_for_sids(messages, [sid for sid, _ in parts], headers=headers)
    chosen = [np.arange(messages.count) if rows is None else rows for _, rows in parts]
    rows = np.concatenate(chosen)
    numbers = np.repeat(np.arange(len(parts)), [len(part_rows) for part_rows in chosen])
    order = np.argsort(rows, kind="stable")
    rows, numbers = rows[order], numbers[order]
    if isinstance(messages, UniformBatch):
        lines = [_message_line(messages.first_message, sid, headers=headers) for sid, _ in parts]
        begin, data = (
            messages.body_column + lines[0][1],
            _sliceable(messages.rows, rows, messages.count),
        )
        size = messages.rows.shape[1]
        return b"".join(
            [
                piece
                for at, number in zip((rows * size).tolist(), numbers.tolist(), strict=True)
                for piece in (lines[number][0], data[at + begin : at + size])
            ]
        )
    sids = [b" " + sid for sid, _ in parts]
    return _encode_rows(messages, rows, [sids[number] for number in numbers.tolist()])


def _encode_rows(messages: MixedBatch, rows: Indexes, sids: list[bytes]) -> bytes:
    """Return these rows, each with its own sid behind the subject."""
    data, size = _sliceable(messages.data, rows, messages.count), len(_VERB)
    begins = messages.bounds[rows].tolist()
    lines = messages.subject_ends[rows].tolist()
    ends = messages.bounds[rows + 1].tolist()
    return b"".join(
        [
            piece
            for begin, line, end, sid in zip(begins, lines, ends, sids, strict=True)
            for piece in (_VERB, data[begin + size : line], sid, data[line:end])
        ]
    )


def _sliceable(data: Octets, rows: Indexes, count: int) -> bytes | memoryview:
    """Return the data for slicing `rows` of `count` messages.

    Slices of bytes are cheap and not tracked by the garbage collector, so a copy pays unless
    rows are few.
    """
    return data.tobytes() if len(rows) * _SPARSE_DIVISOR >= count else data.reshape(-1).data


def _encode_uniform_for_sids(
    messages: UniformBatch, sids: list[bytes], *, headers: bool
) -> memoryview:
    """Return each message for each of the subscription ids."""
    lines = [_message_line(messages.first_message, sid, headers=headers) for sid in sids]
    bodies = messages.rows[:, messages.body_column + lines[0][1] :]
    size = bodies.shape[1]
    width = sum(len(line) for line, _ in lines) + len(lines) * size
    written = np.empty((len(bodies), width), np.uint8)
    at = 0
    for line, _ in lines:
        written[:, at : at + len(line)] = np.frombuffer(line, np.uint8)
        at += len(line)
        written[:, at : at + size] = bodies
        at += size
    return written.reshape(-1).data


def _copy_rows(messages: MixedBatch, rows: Indexes | None) -> tuple[bytearray, Indexes, Indexes]:
    """Return a copy of these rows, the offset of each message, and the end of each subject."""
    bounds, subject_ends = messages.bounds, messages.subject_ends
    if rows is None:
        return bytearray(messages.data.data), bounds[:-1], subject_ends
    begins, ends = bounds[rows], bounds[rows + 1]
    lengths = ends - begins
    moved = np.cumsum(lengths)
    moved -= lengths
    # Adjacent messages are copied together.
    gaps = np.flatnonzero(rows[1:] != rows[:-1] + 1)
    first = [int(begins[0]), *begins[gaps + 1].tolist()]
    last = [*ends[gaps].tolist(), int(ends[-1])]
    data = messages.data.data
    text = bytearray().join([data[begin:end] for begin, end in zip(first, last, strict=True)])
    return text, moved, subject_ends[rows] - begins + moved
