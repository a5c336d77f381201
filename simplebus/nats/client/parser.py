"""Incremental parser of a NATS server's bytes.

Any chunking of the same bytes yields the same messages, possibly in other batches. The only error
raised is RemoteProtocolError, after the events before the violation. A property test compares the
line parser and the bulk parser.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from simplebus.core.errors import RemoteProtocolError
from simplebus.nats.client.bulk_parser import ClientBulkParser
from simplebus.nats.client.events import ReceivedMessages, ServerEvent
from simplebus.nats.client.line_parser import ClientLineParser, MessageRow
from simplebus.nats.numbers import PADDING_BYTES

PADDING = bytes(PADDING_BYTES)
"""Bytes in front of and behind the parsed buffer."""
MESSAGE_BYTES_MAX = 64 * 1024 * 1024
"""Default for the longest accepted message with headers: the most that nats-server can be
configured to.
"""
_SCAN_BYTES_MIN = 4 * 1024
_SCAN_MEAN_BYTES_MAX = 2 * 1024
_PLAIN_MESSAGES = 16
_LONG_MESSAGES = 256


class ClientParser:
    """Parser of one connection."""

    __slots__ = ("_line_parser", "_max_message_bytes", "_required_bytes", "_tail", "_tail_bytes")

    def __init__(self, max_message: int = MESSAGE_BYTES_MAX) -> None:
        self._max_message_bytes = max_message
        self._line_parser = ClientLineParser(max_message)
        self._tail: list[bytes] = []
        """Pieces of the incomplete command."""
        self._tail_bytes = 0
        self._required_bytes = 0
        """Bytes that the incomplete command needs at least."""

    @property
    def tail_bytes(self) -> int:
        """Bytes of the incomplete command."""
        return self._tail_bytes

    def receive(self, data: bytes | bytearray | memoryview) -> Iterator[ServerEvent]:
        """Yield the events that these bytes complete. `data` may be overwritten after the first
        event.

        Exhaust the iterator, or drop the connection. Raises RemoteProtocolError after the events
        before the violation.
        """
        if self._tail_bytes + len(data) < self._required_bytes:
            self._tail.append(bytes(data))
            self._tail_bytes += len(data)
            return
        raw = b"".join((PADDING, *self._tail, data, PADDING))
        self._tail, self._tail_bytes, self._required_bytes = [], 0, 0
        yield from self._parse(raw, len(PADDING), len(raw) - len(PADDING))

    def _parse(self, raw: bytes, offset: int, last: int) -> Iterator[ServerEvent]:
        reader = self._line_parser
        bulk_parser: ClientBulkParser | None = None
        rows: list[MessageRow] = []
        rows_start, single_count = offset, 0
        error: RemoteProtocolError | None = None
        reader.required_bytes = 0
        while offset < last:
            if single_count <= 0 and last - offset >= _SCAN_BYTES_MIN:
                if bulk_parser is None:
                    bulk_parser = ClientBulkParser(raw, offset, last, self._max_message_bytes)
                batch = bulk_parser.parse_batch(offset)
                single_count = _PLAIN_MESSAGES
                if batch is not None:
                    if rows:
                        yield _build_messages(raw, rows)
                        rows = []
                    yield batch[0]
                    offset = rows_start = batch[1]
                    continue
            try:
                end = reader.read(raw, offset, last)
            except RemoteProtocolError as caught:
                error = caught
                break
            if end < 0:
                break
            offset = end
            single_count -= 1
            if reader.row is not None:
                rows.append(reader.row)
                if (
                    len(rows) == _PLAIN_MESSAGES
                    and offset - rows_start > len(rows) * _SCAN_MEAN_BYTES_MAX
                ):
                    single_count = _LONG_MESSAGES  # These are long: arrays gain nothing.
            elif reader.event is not None:
                if rows:
                    yield _build_messages(raw, rows)
                    rows = []
                event, reader.event = reader.event, None
                rows_start = offset
                yield event
        tail = raw[offset:last]
        self._tail, self._tail_bytes, self._required_bytes = (
            [tail],
            len(tail),
            reader.required_bytes,
        )
        if rows:
            yield _build_messages(raw, rows)
        if error is not None:
            raise error


def _build_messages(raw: bytes, rows: list[MessageRow]) -> ReceivedMessages:
    """Return messages that were parsed singly."""
    return ReceivedMessages(raw, *np.array(rows, np.int64).T)
