"""From a NATS server's bytes to events.

Rule 1: any chunking of the same bytes says the same, though it may part messages otherwise.
Rule 2: the only error that escapes is RemoteProtocolError, after the events before the offence.
Rule 3: how bytes are searched depends on how they look, what they say never does: a property test
holds the plain way and the arrays together.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from simplebus.core.errors import RemoteProtocolError
from simplebus.nats.client.bulk_parser import Scan
from simplebus.nats.client.events import Event, Messages
from simplebus.nats.client.line_parser import Reader, Row
from simplebus.nats.numbers import PADDING_BYTES

PADDING = bytes(PADDING_BYTES)
"""Lies in front of what is searched, and behind it."""
MESSAGE_BYTES_MAX = 64 * 1024 * 1024
"""Longest message accepted unless told otherwise, headers included: the most that a reference
server can be set to."""
_SCAN_BYTES_MIN = 4 * 1024
_SCAN_MEAN_BYTES_MAX = 2 * 1024
_PLAIN_MESSAGES = 16
_LONG_MESSAGES = 256


class Parser:
    """Of one connection."""

    __slots__ = ("_most", "_need", "_reader", "_tail", "_tail_bytes")

    def __init__(self, max_message: int = MESSAGE_BYTES_MAX) -> None:
        self._most = max_message
        self._reader = Reader(max_message)
        self._tail: list[bytes] = []
        """What is not whole yet, in the pieces in which it came."""
        self._tail_bytes = 0
        self._need = 0
        """With fewer bytes than this it is not whole."""

    @property
    def tail_bytes(self) -> int:
        """Bytes of what is not whole yet."""
        return self._tail_bytes

    def receive(self, data: bytes | bytearray | memoryview) -> Iterator[Event]:
        """Yield what these bytes complete. They may be written to when the first event is there.

        Exhaust the iterator, or drop the connection. Raises RemoteProtocolError after the events
        before the offence.
        """
        if self._tail_bytes + len(data) < self._need:
            self._tail.append(bytes(data))
            self._tail_bytes += len(data)
            return
        raw = b"".join((PADDING, *self._tail, data, PADDING))
        self._tail, self._tail_bytes, self._need = [], 0, 0
        yield from self._read(raw, len(PADDING), len(raw) - len(PADDING))

    def _read(self, raw: bytes, at: int, last: int) -> Iterator[Event]:
        reader = self._reader
        scan: Scan | None = None
        rows: list[Row] = []
        begun, patience = at, 0
        error: RemoteProtocolError | None = None
        reader.need = 0
        while at < last:
            if patience <= 0 and last - at >= _SCAN_BYTES_MIN:
                if scan is None:
                    scan = Scan(raw, at, last, self._most)
                found = scan.stretch(at)
                patience = _PLAIN_MESSAGES
                if found is not None:
                    if rows:
                        yield _gathered(raw, rows)
                        rows = []
                    yield found[0]
                    at = begun = found[1]
                    continue
            try:
                end = reader.read(raw, at, last)
            except RemoteProtocolError as caught:
                error = caught
                break
            if end < 0:
                break
            at = end
            patience -= 1
            if reader.row is not None:
                rows.append(reader.row)
                if len(rows) == _PLAIN_MESSAGES and at - begun > len(rows) * _SCAN_MEAN_BYTES_MAX:
                    patience = _LONG_MESSAGES  # These are long: arrays gain nothing.
            elif reader.event is not None:
                if rows:
                    yield _gathered(raw, rows)
                    rows = []
                event, reader.event = reader.event, None
                begun = at
                yield event
        left = raw[at:last]
        self._tail, self._tail_bytes, self._need = [left], len(left), reader.need
        if rows:
            yield _gathered(raw, rows)
        if error is not None:
            raise error


def _gathered(raw: bytes, rows: list[Row]) -> Messages:
    """Messages that were read one by one."""
    return Messages(raw, *np.array(rows, np.int64).T)
