"""Conversion of NATS messages to frames of a bus.

The subject becomes the channel, or a header if it is not a valid channel. Headers are kept, except
those of the NATS server and the key headers. Encoded metadata is cached, bounded in entries and
bytes.
"""

from __future__ import annotations

import numpy as np

from simplebus.bridge.loop_header import Headers
from simplebus.bridge.reserved_headers import SUBJECT_HEADER, split_key, strip_received_headers
from simplebus.bridge.transform import MessageRun
from simplebus.core.channel.pattern import check_name
from simplebus.core.errors import LocalProtocolError
from simplebus.core.protocol import frames
from simplebus.core.protocol.envelope_batch import Envelope, encode, stuff, unstuff
from simplebus.core.protocol.frames import DELIMITER, Integers
from simplebus.nats.bus.convert import parse_header_block
from simplebus.nats.client.events import ReceivedMessages

_CACHE_ENTRIES_MAX = 4096
_CACHE_BYTES_MAX = 4 * 1024 * 1024
_HEADER = frames.HEADER.pack(frames.ENVELOPE, 0, 0, 0)


class NatsFramer:
    """Converts NATS messages to frames."""

    def __init__(self) -> None:
        self._cache: dict[tuple[bytes, bytes], tuple[bytes, str]] = {}
        self._cache_bytes = 0
        self._altered_count = 0
        self._alteration = ""

    def pop_altered(self) -> tuple[int, str]:
        """Return how many messages were altered since the last call, and how the first one was."""
        altered_count, self._altered_count = self._altered_count, 0
        return altered_count, self._alteration

    def to_run(self, messages: ReceivedMessages, sequences: Integers) -> MessageRun:
        """Return messages with these sequences as frames. Headers that do not fit are dropped."""
        prepared = [self._frame(messages, row) for row in range(messages.count)]
        bounds = np.zeros(len(prepared) + 1, np.int64)
        np.cumsum(np.fromiter(map(len, prepared), np.int64, len(prepared)), out=bounds[1:])
        return MessageRun(b"".join(prepared), bounds, sequences)

    def _frame(self, messages: ReceivedMessages, row: int) -> bytes:
        key = messages.subject(row), messages.headers(row)
        entry = self._cache.get(key)
        if entry is None:
            if len(self._cache) >= _CACHE_ENTRIES_MAX or self._cache_bytes >= _CACHE_BYTES_MAX:
                self._cache.clear()
                self._cache_bytes = 0
            entry = self._cache[key] = _encode_metadata(*key)
            self._cache_bytes += sum(map(len, (*key, *entry)))
        metadata, alteration = entry
        if alteration:
            self._alteration = self._alteration if self._altered_count else alteration
            self._altered_count += 1
        return _HEADER + stuff(metadata + messages.payload(row)) + DELIMITER


def _encode_metadata(subject: bytes, block: bytes) -> tuple[bytes, str]:
    """Return the unstuffed bytes before the payload, and a description of the altered parts; empty
    if nothing was altered.
    """
    headers, key = split_key(strip_received_headers(parse_header_block(block)))
    channel = subject_text = subject.decode("utf-8", "backslashreplace")
    subject_headers: Headers = ()
    alteration = ""
    try:
        check_name(subject.decode())
    except ValueError:
        alteration = (
            f"subject {subject_text!r} is not a valid channel; copied as header {SUBJECT_HEADER}"
        )
        channel, subject_headers = "", ((SUBJECT_HEADER, subject_text),)
    envelope_with_headers = Envelope(channel, key, (*subject_headers, *headers))
    for envelope in (
        envelope_with_headers,
        envelope_with_headers._replace(headers=subject_headers),
        Envelope(channel, b"", subject_headers),
    ):
        try:
            return unstuff(encode(envelope, b"")), alteration
        except LocalProtocolError as error:
            alteration = (
                f"headers of a message on {subject_text!r} do not fit and were dropped: {error}"
            )
    raise AssertionError("a channel without a payload exceeds the limit of a NATS message")
