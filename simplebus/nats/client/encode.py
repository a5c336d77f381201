"""Encoding of SUB, UNSUB, PUB and HPUB, single and in batches.

Subjects and headers are not checked or escaped. Numbers in batches may have leading zeros. Messages
of equal length are encoded without per-message Python code.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from simplebus.core.protocol.frames import Bytes, Integers, view_byte_columns

PING = b"PING\r\n"
PONG = b"PONG\r\n"
HEADER_VERSION_LINE = b"NATS/1.0\r\n"
"""First line of a header block, which ends with an empty line."""

_FOUR = np.frombuffer(b"".join(b"%04d" % number for number in range(10_000)), np.uint32)
"""The digits of each number."""


def encode_sub(subject: bytes, sid: int, queue: bytes = b"") -> bytes:
    """Return a SUB, with a queue group if it is not empty."""
    return (
        b"SUB %b %b %d\r\n" % (subject, queue, sid)
        if queue
        else b"SUB %b %d\r\n"
        % (
            subject,
            sid,
        )
    )


def encode_unsub(sid: int, most: int = 0) -> bytes:
    """Return an UNSUB; with `most`, the subscription ends after that many messages."""
    return b"UNSUB %d %d\r\n" % (sid, most) if most else b"UNSUB %d\r\n" % sid


def encode_headers(*headers: tuple[bytes, bytes]) -> bytes:
    """Return a header block."""
    return HEADER_VERSION_LINE + b"".join([b"%b: %b\r\n" % pair for pair in headers]) + b"\r\n"


def encode_pub(
    subject: bytes, payload: bytes, *, reply: bytes = b"", headers: bytes = b""
) -> bytes:
    """Return a PUB, or an HPUB if there is a header block."""
    to = b"%b %b" % (subject, reply) if reply else subject
    if headers:
        size = len(headers) + len(payload)
        return b"HPUB %b %d %d\r\n%b%b\r\n" % (to, len(headers), size, headers, payload)
    return b"PUB %b %d\r\n%b\r\n" % (to, len(payload), payload)


def encode_pubs(subject: bytes, payloads: Sequence[bytes | memoryview]) -> bytes:
    """Return PUBs of one subject without reply subject and headers."""
    head = b"PUB " + subject
    return b"".join(
        [
            part
            for payload in payloads
            for part in (b"%b %d\r\n" % (head, len(payload)), payload, b"\r\n")
        ]
    )


def format_digits(numbers: Integers, width: int) -> Bytes:
    """Return numbers below 10**width as digits with leading zeros, shape (n, width)."""
    padded = -(-width // 4) * 4
    words = np.empty((numbers.size, padded // 4), np.uint32)
    quotients = numbers
    for column in range(padded // 4 - 1, 0, -1):
        next_quotients = quotients // 10_000
        words[:, column] = _FOUR.take(quotients - next_quotients * 10_000)
        quotients = next_quotients
    words[:, 0] = _FOUR.take(quotients)
    return words.view(np.uint8)[:, padded - width :]


Column = bytes | Bytes
"""Part of each row: the same bytes for all rows, or an array of shape (n, width)."""


def build_rows(count: int, columns: Sequence[Column]) -> memoryview:
    """Return `count` rows made of these columns, back to back."""
    widths = [len(c) if isinstance(c, bytes) else c.shape[1] for c in columns]
    rows = np.empty((count, sum(widths)), np.uint8)
    start = 0
    for column, width in zip(columns, widths, strict=True):
        if width:
            source = np.frombuffer(column, np.uint8)[None] if isinstance(column, bytes) else column
            view_byte_columns(rows, start, width)[:] = view_byte_columns(source, 0, width)
            start += width
    return rows.reshape(-1).data


def encode_equal_messages(
    subject: bytes,
    payloads: Bytes,
    *,
    reply: Sequence[Column] = (),
    headers: Sequence[Column] = (),
) -> memoryview:
    """Return messages of one subject and one length.

    Args:
        subject: Subject of all messages.
        payloads: Payloads, shape (n, size).
        reply: Columns of the reply subjects; empty for none.
        headers: Columns of the header blocks; empty for none.
    """
    count, size = payloads.shape
    block_bytes = sum(len(c) if isinstance(c, bytes) else c.shape[1] for c in headers)
    verb = b"HPUB " if headers else b"PUB "
    sizes = b"%d %d" % (block_bytes, block_bytes + size) if headers else b"%d" % size
    to: list[Column] = [b" ", *reply] if reply else []
    parts: list[Column] = [
        verb + subject, *to, b" " + sizes + b"\r\n", *headers, payloads, b"\r\n"
    ]  # fmt: skip
    return build_rows(count, parts)
