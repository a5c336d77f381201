"""Feeds a parser and converts its events to the tuples of the oracle."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from simplebus.core.protocol.receive_buffer import ReceiveBuffer
from simplebus.nats.errors import NatsError
from simplebus.nats.limits import NatsLimits
from simplebus.nats.protocol.events import (
    ClientEvent,
    Connect,
    MixedBatch,
    Ping,
    Pub,
    Sub,
    UniformBatch,
    Unsub,
    iter_messages,
)
from simplebus.nats.protocol.parser import NatsParser
from simplebus.nats.protocol.subject_table import SubjectTable
from tests.nats.protocol.parser_oracle import Oracle

LIMITS = NatsLimits(max_payload=300, max_control_line=64)
BUFFER = ReceiveBuffer(1 << 20)


class Reading:
    """Bytes of one client and the events in them."""

    def __init__(
        self,
        limits: NatsLimits = LIMITS,
        *,
        headers: bool = True,
        table: SubjectTable | None = None,
        buffer: ReceiveBuffer = BUFFER,
    ) -> None:
        self.table = table or SubjectTable()
        self.parser = NatsParser(limits, self.table)
        self.parser.accepts_headers = headers
        self.found: list[tuple[object, ...]] = []
        self.kinds: Counter[str] = Counter()
        """Number of events of each kind."""
        self.batched: Counter[str] = Counter()
        """Number of messages in the batches of each kind."""
        self.is_closed = False
        self.error_text = ""
        """Reason for which the parser closed the connection."""
        self._buffer = buffer

    def feed(self, data: bytes) -> None:
        if self.is_closed or not data:
            return
        try:
            for event in self.parser.receive(self._buffer, self._buffer.fill(data)):
                self._record(event)
        except NatsError as error:
            self.found.append(("CLOSE", error.error_text, error.closed_reason))
            self.error_text, self.is_closed = error.sentence, True

    def feed_in_parts(self, data: bytes, event_count: int) -> None:
        """Feed data, but stop after every `event_count` events and feed the rest again."""
        while data and not self.is_closed:
            unread = b""
            try:
                events = self.parser.receive(self._buffer, self._buffer.fill(data))
                for number, event in enumerate(events, 1):
                    self._record(event)
                    if number == event_count:
                        unread = bytes(self.parser.unread(self._buffer, len(data)))
                        break
            except NatsError as error:
                self.found.append(("CLOSE", error.error_text, error.closed_reason))
                self.error_text, self.is_closed = error.sentence, True
            data = unread

    def _record(self, event: ClientEvent) -> None:
        kind = type(event).__name__
        self.kinds[kind] += 1
        if isinstance(event, UniformBatch | MixedBatch):
            self.batched[kind] += event.count
            check(event)
            self.found += [to_tuple(message) for message in iter_messages(event, self.table.names)]
        else:
            self.found.append(to_tuple(event))


def to_tuple(event: ClientEvent) -> tuple[object, ...]:
    match event:
        case Pub(subject, reply, size, b"", 0, body):
            return ("PUB", subject, reply, size, bytes(body))
        case Pub(subject, reply, size, header_size, header_bytes, body):
            assert header_bytes == int(header_size)
            return ("HPUB", subject, reply, header_size, size, bytes(body))
        case Sub(subject, queue, sid):
            return ("SUB", subject, queue, sid)
        case Unsub(sid, max_count):
            return ("UNSUB", sid, max_count)
        case Connect(options):
            return ("CONNECT", options)
        case Ping():
            return ("PING",)
        case _:
            return ("PONG",)


def check(event: UniformBatch | MixedBatch) -> None:
    """Check the fields of a batch against its messages."""
    if isinstance(event, UniformBatch):
        assert event.rows.ndim == 2
        assert bytes(event.rows[0, event.body_column : -2]) == bytes(event.first_message.body)
        return
    assert event.bounds[0] == 0
    assert event.bounds[-1] == event.data.size
    assert event.bounds.shape == (event.count + 1,)
    assert event.subject_ends.shape == event.subject_numbers.shape == (event.count,)
    data = bytes(event.data)
    for start, end in zip(event.bounds.tolist(), event.subject_ends.tolist(), strict=False):
        assert data[start : start + 4] == b"PUB "
        assert data[end : end + 1] == b" "


def read(chunks: Iterable[bytes], **options: object) -> Reading:
    """Feed these chunks, one read each."""
    reading = Reading(**options)  # type: ignore[arg-type]
    for chunk in chunks:
        reading.feed(chunk)
    return reading


def parse_with_oracle(
    data: bytes, *, limits: NatsLimits = LIMITS, headers: bool = True
) -> list[tuple[object, ...]]:
    """Return the tuples of the oracle for these bytes."""
    oracle = Oracle(
        max_payload=limits.max_payload, max_control_line=limits.max_control_line, headers=headers
    )
    oracle.feed(data)
    return oracle.found
