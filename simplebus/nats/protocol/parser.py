"""Incremental parser of a NATS client's bytes.

Any chunking of the same bytes yields the same commands. The only error raised is NatsError, after
the events before the violation. Three ways of searching (single lines, uniform batches, arrays) are
held to one oracle by a property test. Only an incomplete command is kept: a short tail is copied in
front of the next read, a long one grows until it is complete, and neither is searched twice.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator

import numpy as np

from simplebus.core.limits import HEADROOM_BYTES
from simplebus.core.protocol.frames import Bytes, strided
from simplebus.core.protocol.receive_buffer import ReceiveBuffer
from simplebus.nats.limits import (
    BULK_PARSE_BYTES_MIN,
    BULK_PARSE_MESSAGE_BYTES_MAX,
    BULK_PARSE_MESSAGES_MIN,
    SINGLE_MESSAGES_MAX,
    UNIFORM_BATCH_MESSAGES_MIN,
    UNIFORM_BLOCK_MESSAGES,
    UNIFORM_BLOCK_MESSAGES_MAX,
    NatsLimits,
)
from simplebus.nats.protocol.bulk_parser import BulkParser
from simplebus.nats.protocol.events import ClientEvent, MixedBatch, Pub, UniformBatch
from simplebus.nats.protocol.line_parser import LineParser
from simplebus.nats.protocol.subject_table import SubjectTable
from simplebus.nats.subjects import ACK_PREFIX

_CR_LF = b"\r\n"
_CR_LF_WORD = np.uint16(int.from_bytes(_CR_LF, "little"))
_WORD: np.dtype[np.uint64] = np.dtype("<u8")
_HALF: np.dtype[np.uint16] = np.dtype("<u2")
_SIZE = _WORD.itemsize  # The shortest PUB line, `PUB a 1` and LF, has eight bytes.


class NatsParser:
    """Parser of one client's bytes."""

    __slots__ = (
        "_has_unread_messages",
        "_limits",
        "_line_parser",
        "_parsed_end",
        "_searched_bytes",
        "_table",
        "_tail",
    )

    def __init__(self, limits: NatsLimits, table: SubjectTable) -> None:
        self._limits = limits
        self._table = table
        self._line_parser = LineParser(limits)
        self._tail = bytearray()
        self._parsed_end = 0
        """Offset in the buffer behind the latest event."""
        self._has_unread_messages = False
        self._searched_bytes = 0
        """Bytes of the tail known to contain no LF behind the verb."""

    @property
    def accepts_headers(self) -> bool:
        """True if the client may send HPUB."""
        return self._line_parser.accepts_headers

    @accepts_headers.setter
    def accepts_headers(self, value: bool) -> None:
        self._line_parser.accepts_headers = value

    @property
    def tail_bytes(self) -> int:
        """Bytes of the incomplete command."""
        return len(self._tail)

    def receive(self, buffer: ReceiveBuffer, count: int) -> Iterable[ClientEvent]:
        """Return the events completed by `count` new bytes in the buffer, which may be an iterator.

        Apply each event before requesting the next one. Events refer to the buffer and are valid
        until it is filled again. Exhaust the iterator, call `unread`, or drop the connection.

        Raises:
            NatsError: The client violated the protocol; events before the violation were yielded.
        """
        last = HEADROOM_BYTES + count
        end = -1
        if not self._tail:
            end = self._line_parser.parse_command(buffer.raw, HEADROOM_BYTES, last)
            if end == last:  # One command, the usual case at low load.
                self._parsed_end = last
                event = self._line_parser.pop_event()
                return () if event is None else (event,)
        return self._iter_events(buffer, last, end)

    def unread(self, buffer: ReceiveBuffer, count: int) -> memoryview:
        """Return a view of the bytes behind the latest event, as if they had not been received.
        The caller then drops the iterator of `receive`.
        """
        self._has_unread_messages = False
        return buffer.view[self._parsed_end : HEADROOM_BYTES + count]

    @property
    def has_unread_messages(self) -> bool:
        """True if messages of the latest event were given back by `unread_messages`."""
        return self._has_unread_messages

    def unread_messages(self, batch: MixedBatch, first: int) -> None:
        """Give back the messages of the latest event from number `first` on: the caller calls
        `unread` next.
        """
        self._parsed_end -= int(batch.bounds[-1] - batch.bounds[first])
        self._has_unread_messages = True

    def _iter_events(self, buffer: ReceiveBuffer, last: int, end: int) -> Iterator[ClientEvent]:
        """Yield the events of `receive`. Without a tail, the first command ends at `end`."""
        first = HEADROOM_BYTES
        if self._tail:
            count = last - first
            need = self._line_parser.required_bytes
            if len(self._tail) + count < need:
                self._tail += buffer.view[first:last]
                return
            if len(self._tail) <= HEADROOM_BYTES:
                first = buffer.prepend(self._tail)
            else:
                first = self._extend_tail(buffer, first, last)
                if self._tail:
                    return
                if (event := self._line_parser.pop_event()) is not None:
                    self._parsed_end = first
                    yield event
                    event = None
                if first == last:
                    return
            end = self._line_parser.parse_command(buffer.raw, first, last)
        reader = self._line_parser
        offset = yield from self._parse_complete(buffer.raw, first, end, last)
        if offset < last:
            self._searched_bytes = 0
            self._tail += reader.shortened_tail or buffer.view[offset:last]

    def _extend_tail(self, buffer: ReceiveBuffer, first: int, last: int) -> int:
        """Extend the long tail from buffer[first:last] until its command is complete or the bytes
        end.

        Returns the offset of the next command. The tail is empty if the command is complete.
        """
        tail, reader = self._tail, self._line_parser
        while first < last:
            needed = reader.required_bytes - len(tail) if reader.required_bytes else last
            stop = min(last, first + needed)
            tail += buffer.view[first:stop]
            first = stop
            end = reader.parse_command(tail, 0, len(tail), self._searched_bytes)
            if end >= 0:
                self._tail = bytearray()  # The event refers to the old one.
                return first - (len(tail) - end)
            self._searched_bytes = 0 if reader.required_bytes else len(tail)
        return first

    def _parse_complete(
        self, raw: bytearray, offset: int, end: int, last: int
    ) -> Generator[ClientEvent, None, int]:
        """Yield the events of complete commands in raw[offset:last]; the first was just parsed and
        ends at `end`.

        `end` is -1 if that command is incomplete. Returns the offset after the last complete
        command.
        """
        reader = self._line_parser
        bulk_parser: BulkParser | None = None
        # Messages to parse singly before the next attempt, and after the next failed attempt.
        single_count = next_single_count = 0
        while end >= 0:
            event = reader.pop_event()
            if type(event) is Pub:
                if single_count:
                    single_count -= 1
                elif not event.subject.startswith(ACK_PREFIX):  # Each has its own subject.
                    max_count = (last - offset) // (end - offset)
                    batch: UniformBatch | MixedBatch | None = None
                    if max_count >= UNIFORM_BATCH_MESSAGES_MIN:
                        batch = _find_uniform_batch(raw, offset, end, max_count, event)
                    if batch is None and (
                        bulk_parser is not None or _can_bulk_parse(end - offset, last - offset)
                    ):
                        if bulk_parser is None:
                            bulk_parser = BulkParser(raw, offset, last, self._limits, self._table)
                        batch = bulk_parser.parse_batch(offset)
                        if batch is None:
                            single_count, next_single_count = (
                                next_single_count,
                                min(2 * next_single_count + 1, SINGLE_MESSAGES_MAX),
                            )
                    if batch is not None:
                        event, next_single_count = batch, 0
                        end = offset + (
                            batch.rows.size if isinstance(batch, UniformBatch) else batch.data.size
                        )
            offset = end
            if event is not None:
                self._parsed_end = end
                yield event
            if offset == last:
                break
            end = reader.parse_command(raw, offset, last)
        return offset


def _can_bulk_parse(size: int, remaining_bytes: int) -> bool:
    """Return True if arrays are faster for messages of this size in the remaining bytes."""
    return size <= BULK_PARSE_MESSAGE_BYTES_MAX and (
        remaining_bytes >= BULK_PARSE_MESSAGES_MIN * size or remaining_bytes >= BULK_PARSE_BYTES_MIN
    )


def _find_uniform_batch(
    raw: bytearray, offset: int, end: int, max_count: int, head: Pub
) -> UniformBatch | None:
    """Return up to `max_count` messages from `at` on with the line of the one in raw[at:end]."""
    stride = end - offset
    body_column = stride - len(head.body) - len(_CR_LF)
    line = raw[offset : offset + body_column]
    if not (
        raw.startswith(line, end)
        and raw.startswith(line, offset + (UNIFORM_BATCH_MESSAGES_MIN - 1) * stride)
    ):
        return None
    data = np.frombuffer(raw, np.uint8, max_count * stride, offset)
    count, block = 0, UNIFORM_BLOCK_MESSAGES
    while count < max_count:
        checked_count = min(block, max_count - count)
        equal_count = _count_matching(data[count * stride :], line, stride, checked_count)
        count += equal_count
        if equal_count < checked_count:
            break
        block = min(4 * block, UNIFORM_BLOCK_MESSAGES_MAX)
    if count < UNIFORM_BATCH_MESSAGES_MIN:
        return None
    return UniformBatch(head, data[: count * stride].reshape(count, stride), body_column)


def _count_matching(data: Bytes, line: bytearray, stride: int, count: int) -> int:
    """Count the messages of this stride that begin with the line and end with CR LF, from the
    first one.
    """
    good = strided(data, _HALF, stride - _HALF.itemsize, stride, count) == _CR_LF_WORD
    offsets = [*range(0, len(line) - _SIZE, _SIZE), len(line) - _SIZE]
    for offset in offsets:
        word = np.uint64(int.from_bytes(line[offset : offset + _SIZE], "little"))
        good &= strided(data, _WORD, offset, stride, count) == word
    return count if good.all() else int(good.argmin())
