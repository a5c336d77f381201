"""Bridge records: the state that a copier stores at its target.

The target stores each message number once. Before the copier sends a batch, it stores a *bridge
record* there that assigns the next numbers to sequences of the source. A restarted copier reads
the record and sends the same messages again under the same numbers.

- The copier sends a batch after the record that announces it is confirmed. Each record also
  announces later batches, so that these need not wait for another record.
- A record repeats the batches in flight, because they may be lost.
- The copier discards a record that does not match the target's next number, or whose
fingerprints do not match the source (which was then restored from an old copy). It continues
with new numbers.

    number      7                8 … 107    108                       109 … 208    209
    content     record           batch      record                    batch        record
    announces   8-107, 109-208              8-107, 109-208, 210-…                  109-208, 210-…
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import msgspec
import numpy as np

from simplebus.core.errors import BusError
from simplebus.core.limits import HEADER_BYTES, MESSAGE_ID_BITS, MESSAGE_ID_MASK
from simplebus.core.protocol.frames import Integers

BATCH_MESSAGES_MAX = 1 << 18
"""Largest number of messages in a batch."""
BATCHES_MAX = 16
"""Largest number of batches in a record."""
_HALF = 1 << (MESSAGE_ID_BITS - 1)
_CLOCK_TOLERANCE_SECONDS = 300.0
"""Largest difference between the accept times that a bus reports for one message, even after a
restart.
"""

SequenceRange = tuple[int, int]
"""Half-open range of sequences."""


class BridgeRecordError(BusError):
    """A message in the class of bridge records is not a valid record."""


class MessageFingerprint(msgspec.Struct, frozen=True):
    """Checksum and accept time, which identify a message."""

    checksum: int = msgspec.field(name="check")
    """CRC-32 of the frame type and the content."""
    accepted: float = 0.0
    """Unix time in seconds at which the source accepted the message; 0 if unknown."""

    @classmethod
    def from_frame(cls, frame: bytes, accepted: float) -> MessageFingerprint:
        return cls(zlib.crc32(frame[:1] + frame[HEADER_BYTES:]), accepted)

    def may_match(self, current: MessageFingerprint) -> bool:
        """Return True if `current` can be the same message: equal and not accepted later."""
        is_later = self.accepted and current.accepted > self.accepted + _CLOCK_TOLERANCE_SECONDS
        return self.checksum == current.checksum and not is_later


class AnnouncedBatch(msgspec.Struct, frozen=True):
    """Messages that are sent together under consecutive numbers."""

    number: int
    """Number of the first message at the target."""
    ranges: list[SequenceRange]
    """Sequences of the messages, ascending."""
    next: int
    """Sequence at which the copier continues after this batch."""
    fingerprint: MessageFingerprint | None = msgspec.field(name="mark", default=None)
    """Fingerprint of the last message; None in records of older versions."""

    @property
    def last_sequence(self) -> int:
        """Sequence of the last message; -1 for an empty batch."""
        return self.ranges[-1][1] - 1 if self.ranges else -1

    @property
    def count(self) -> int:
        return sum(last - first for first, last in self.ranges)

    @property
    def end_number(self) -> int:
        """Number after the last message."""
        return (self.number + self.count) & MESSAGE_ID_MASK

    def ranges_after(self, count: int) -> list[SequenceRange]:
        """Return the sequences without the first `count` messages."""
        remaining = []
        for first, last in self.ranges:
            skipped = min(count, last - first)
            count -= skipped
            if first + skipped < last:
                remaining.append((first + skipped, last))
        return remaining

    def sequence_at(self, index: int) -> int:
        """Return the sequence of the message at `index`."""
        return self.ranges_after(index)[0][0]


class BridgeRecord(msgspec.Struct, frozen=True):
    """Batches that a copier has in flight and sends next."""

    source: str
    """Storage id of the source that assigned the sequences."""
    number: int
    """Number of the record itself."""
    batches: list[AnnouncedBatch]
    """Batches in flight, the batch after this record, and later batches, in this order."""

    def encode(self) -> bytes:
        return msgspec.json.encode(self)

    @classmethod
    def decode(cls, payload: bytes) -> BridgeRecord:
        """Return the record in `payload`. Raises BridgeRecordError."""
        try:
            record = msgspec.json.decode(payload, type=cls)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise BridgeRecordError(f"{payload[:60]!r} is not a bridge record: {error}") from None
        if problem := record._find_error():
            raise BridgeRecordError(f"{payload[:60]!r} is not a bridge record: {problem}")
        return record

    def _find_error(self) -> str:
        """Return the reason why no copier could have written this record; empty if it is valid.

        Every user who may publish in the class of bridge records can store one there.
        """
        if not 1 <= len(self.batches) <= BATCHES_MAX:
            return f"it has {len(self.batches)} batches, expected 1 to {BATCHES_MAX}"
        if not 0 <= self.number <= MESSAGE_ID_MASK:
            return f"its number is {self.number}"
        numbers = [batch.number for batch in self.batches]
        if (self.number + 1) & MESSAGE_ID_MASK not in numbers:
            return f"its number is {self.number}, and its batches begin at {numbers}"
        for before, batch in pairwise(self.batches):
            gap = (batch.number - before.number - before.count) & MESSAGE_ID_MASK
            if not 0 <= before.number <= MESSAGE_ID_MASK or not 0 < gap <= BATCH_MESSAGES_MAX:
                return (
                    f"a batch begins at number {before.number}, and the next one at {batch.number}"
                )
        for batch in self.batches:
            edges = [edge for part in batch.ranges for edge in part]
            if any(a > b for a, b in pairwise([0, *edges, batch.next])):
                return f"its sequences do not ascend to {batch.next}"
            if any(first == end for first, end in batch.ranges):
                return "it has an empty range"
            if batch.count > BATCH_MESSAGES_MAX:
                return f"a batch has {batch.count} messages, expected at most {BATCH_MESSAGES_MAX}"
        return ""

    @property
    def first_number(self) -> int:
        """Lowest number that the record describes."""
        number = self.batches[0].number
        return self.number if number == (self.number + 1) & MESSAGE_ID_MASK else number

    @property
    def next(self) -> int:
        """Sequence at which the copier continues after all batches of the record."""
        return self.batches[-1].next

    @property
    def end_number(self) -> int:
        """Number after the highest number that the record describes."""
        return self.batches[-1].end_number

    def matches_next_number(self, number: int) -> bool:
        """Return True if `number` can be the next number of the target.

        It is at most `end_number`: a later record would have announced every higher number.
        """
        is_beyond = _distance(number, self.end_number) > 0
        return not is_beyond and _distance(number, self.first_number) >= -BATCH_MESSAGES_MAX

    def iter_missing(self, number: int) -> Iterator[tuple[int, list[SequenceRange]]]:
        """Yield the first number and the sequences of each part that the target lacks.

        `number` is the next number of the target. The sequences are empty for the number of a
        record.
        """
        for batch in self.batches:
            while _distance(number, batch.number) < 0:
                yield number, []
                number = (number + 1) & MESSAGE_ID_MASK
            if remaining := batch.ranges_after(_distance(number, batch.number)):
                yield number, remaining
                number = batch.end_number


def _distance(number: int, reference: int) -> int:
    """Return `number - reference` in circular message numbers, from -2**30 to 2**30 - 1."""
    return ((number - reference + _HALF) & MESSAGE_ID_MASK) - _HALF


@dataclass(slots=True)
class TargetNumbering:
    """Message numbers of a copier at the target, for one connection."""

    source: str
    next_number: int
    """Number of the next message that is published."""
    in_flight: list[AnnouncedBatch] = field(default_factory=list)
    """Batches that were sent and can still be lost."""

    def create_record(
        self, planned: Sequence[tuple[list[SequenceRange], int, MessageFingerprint | None]]
    ) -> tuple[BridgeRecord, list[AnnouncedBatch]]:
        """Create the record that announces the planned batches.

        Args:
            planned: Sequence ranges, next sequence and fingerprint of the last message of each
                batch.

        Returns:
            The record to publish now, and the numbered batches that it announces.
        """
        number = self.next_number
        batches, next_number = list[AnnouncedBatch](), number
        for ranges, next, fingerprint in planned:  # A record precedes each batch.
            batches.append(
                AnnouncedBatch((next_number + 1) & MESSAGE_ID_MASK, ranges, next, fingerprint)
            )
            next_number = batches[-1].end_number
        self.next_number = (number + 1) & MESSAGE_ID_MASK
        return BridgeRecord(self.source, number, [*self.in_flight, *batches]), batches

    def note_sent(self, batch: AnnouncedBatch) -> None:
        """Note that the messages of `batch` were published."""
        assert batch.number == self.next_number, (batch.number, self.next_number)
        self.next_number = batch.end_number
        self.in_flight.append(batch)

    def note_settled(self) -> None:
        """Note that the oldest batch in flight was stored or refused."""
        self.in_flight.pop(0)


def ranges(sequences: Integers) -> list[SequenceRange]:
    """Return ascending sequences as half-open ranges."""
    if not sequences.size:
        return []
    breaks = np.flatnonzero(np.diff(sequences) != 1)
    firsts = sequences[np.r_[0, breaks + 1]].tolist()
    lasts = (sequences[np.r_[breaks, sequences.size - 1]] + 1).tolist()
    return list(zip(firsts, lasts, strict=True))
