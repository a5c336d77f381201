"""What a client says to a NATS server: SUB, UNSUB, PUB and HPUB, one or many at a time.

Rule 1: subjects and headers are the caller's to check: nothing is escaped here.
Rule 2: a batch is written as its messages would be, one by one, but that numbers in it may have
zeros in front; where all are of one length nothing per message is done in the interpreter.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from simplebus.core.protocol.frames import Bytes, Integers, view_byte_columns

PING = b"PING\r\n"
PONG = b"PONG\r\n"
HEADERS = b"NATS/1.0\r\n"
"""What a block of headers begins with; an empty line ends it."""

_FOUR = np.frombuffer(b"".join(b"%04d" % number for number in range(10_000)), np.uint32)
"""The digits of each number."""


def sub(subject: bytes, sid: int, queue: bytes = b"") -> bytes:
    """A subscription; one of a queue group, if that is not empty."""
    return (
        b"SUB %b %b %d\r\n" % (subject, queue, sid)
        if queue
        else b"SUB %b %d\r\n"
        % (
            subject,
            sid,
        )
    )


def unsub(sid: int, most: int = 0) -> bytes:
    """Its end: at once, or when it has been sent so many messages."""
    return b"UNSUB %d %d\r\n" % (sid, most) if most else b"UNSUB %d\r\n" % sid


def block(*headers: tuple[bytes, bytes]) -> bytes:
    """A block of headers."""
    return HEADERS + b"".join([b"%b: %b\r\n" % pair for pair in headers]) + b"\r\n"


def pub(subject: bytes, payload: bytes, *, reply: bytes = b"", headers: bytes = b"") -> bytes:
    """One message, whose headers are a whole block; empty for none."""
    to = b"%b %b" % (subject, reply) if reply else subject
    if headers:
        size = len(headers) + len(payload)
        return b"HPUB %b %d %d\r\n%b%b\r\n" % (to, len(headers), size, headers, payload)
    return b"PUB %b %d\r\n%b\r\n" % (to, len(payload), payload)


def pubs(subject: bytes, payloads: Sequence[bytes | memoryview]) -> bytes:
    """Messages of one subject without anything else."""
    head = b"PUB " + subject
    return b"".join(
        [
            part
            for payload in payloads
            for part in (b"%b %d\r\n" % (head, len(payload)), payload, b"\r\n")
        ]
    )


def digits(numbers: Integers, width: int) -> Bytes:
    """Numbers below 10**width as text: shape (n, width), zeros in front. Four digits at a time are
    looked up."""
    padded = -(-width // 4) * 4
    words = np.empty((numbers.size, padded // 4), np.uint32)
    left = numbers
    for column in range(padded // 4 - 1, 0, -1):
        above = left // 10_000
        words[:, column] = _FOUR.take(left - above * 10_000)
        left = above
    words[:, 0] = _FOUR.take(left)
    return words.view(np.uint8)[:, padded - width :]


Column = bytes | Bytes
"""A part of each row: the same for all, or of shape (n, width)."""


def table(count: int, columns: Sequence[Column]) -> memoryview:
    """`count` rows of these parts, back to back: what is written of many messages alike."""
    widths = [len(c) if isinstance(c, bytes) else c.shape[1] for c in columns]
    rows = np.empty((count, sum(widths)), np.uint8)
    at = 0
    for column, width in zip(columns, widths, strict=True):
        if width:
            given = np.frombuffer(column, np.uint8)[None] if isinstance(column, bytes) else column
            view_byte_columns(rows, at, width)[:] = view_byte_columns(given, 0, width)
            at += width
    return rows.reshape(-1).data


def alike(
    subject: bytes,
    payloads: Bytes,
    *,
    reply: Sequence[Column] = (),
    headers: Sequence[Column] = (),
) -> memoryview:
    """Messages of one subject and one length: payloads has the shape (n, size).

    Reply subjects and blocks of headers are put together of columns, which are the same for all or
    of shape (n, width); empty for none.
    """
    count, size = payloads.shape
    block_bytes = sum(len(c) if isinstance(c, bytes) else c.shape[1] for c in headers)
    verb = b"HPUB " if headers else b"PUB "
    sizes = b"%d %d" % (block_bytes, block_bytes + size) if headers else b"%d" % size
    to: list[Column] = [b" ", *reply] if reply else []
    parts: list[Column] = [
        verb + subject, *to, b" " + sizes + b"\r\n", *headers, payloads, b"\r\n"
    ]  # fmt: skip
    return table(count, parts)
