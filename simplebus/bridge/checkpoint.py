"""Where a lane is, kept by the far bus itself: which of its numbers are which sequences here.

The far bus stores every number once. So that a bridge that was killed goes on with the same message
under the same number, it writes down beforehand what the next numbers will be: a *record*, itself a
message of the numbered row, in a class there that keeps last values.

Rule 1: the messages of a batch are sent when a record that tells them is confirmed, not before.
Rule 2: one record is sent before each batch, and tells the batches ahead, too: so the next one can
be sent while this one is under way. It tells what is under way already, as that may be lost.
Rule 3: what comes back is never guessed. Where the record and the far bus's `next` do not fit
together, the lane begins with numbers of which nobody knows anything.
Rule 4: a sequence may be another message's by now, where the near end came back from an old copy:
a record has a mark of what it tells, and does not count where the near end has another there.

    number    7                8 … 107    108                       109 … 208    209
    row       record           batch      record                    batch        record
    tells     8-107, 109-208              8-107, 109-208, 210-…                  109-208, 210-…
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
"""No batch has more."""
BATCHES_MAX = 16
"""No record tells more."""
_HALF = 1 << (MESSAGE_ID_BITS - 1)
_SAME_SECONDS = 300.0
"""A bus knows when it accepted a message to within less, in one life and in the next."""

Range = tuple[int, int]
"""Half-open."""


class RecordError(BusError):
    """What stands in the class of records is none."""


class Mark(msgspec.Struct, frozen=True):
    """What a message is known by."""

    check: int
    """Checksum of its type and its content."""
    accepted: float = 0.0
    """When the near end accepted it, in seconds since 1970; 0 where that is not known."""

    @classmethod
    def of(cls, frame: bytes, accepted: float) -> Mark:
        return cls(zlib.crc32(frame[:1] + frame[HEADER_BYTES:]), accepted)

    def may_be(self, there: Mark) -> bool:
        """Whether what is `there` now may be the message of this mark: one that says the same, and
        did not come later."""
        is_later = self.accepted and there.accepted > self.accepted + _SAME_SECONDS
        return self.check == there.check and not is_later


class Batch(msgspec.Struct, frozen=True):
    """Messages that are sent together."""

    number: int
    """The first one's number at the far bus."""
    ranges: list[Range]
    """Their sequences, in order."""
    next: int
    """The sequence at which the lane goes on behind them."""
    mark: Mark | None = None
    """That of the last one; None of lanes that knew no marks."""

    @property
    def last(self) -> int:
        """The last one's sequence; -1 for none."""
        return self.ranges[-1][1] - 1 if self.ranges else -1

    @property
    def count(self) -> int:
        return sum(last - first for first, last in self.ranges)

    @property
    def end(self) -> int:
        """The number behind the last one."""
        return (self.number + self.count) & MESSAGE_ID_MASK

    def behind(self, count: int) -> list[Range]:
        """The sequences without the first so many."""
        left = []
        for first, last in self.ranges:
            skipped = min(count, last - first)
            count -= skipped
            if first + skipped < last:
                left.append((first + skipped, last))
        return left

    def sequence(self, index: int) -> int:
        """That of a message by its place in the batch."""
        return self.behind(index)[0][0]


class Record(msgspec.Struct, frozen=True):
    """What a lane has sent last, and sends next."""

    source: str
    """Identity of the bus whose sequences these are."""
    number: int
    """The record's own."""
    batches: list[Batch]
    """In order: those under way, the one that follows the record, and those ahead."""

    def encode(self) -> bytes:
        return msgspec.json.encode(self)

    @classmethod
    def decode(cls, payload: bytes) -> Record:
        """Raises RecordError."""
        try:
            found = msgspec.json.decode(payload, type=cls)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise RecordError(f"{payload[:60]!r} is no record of a bridge: {error}") from None
        if problem := found._problem():
            raise RecordError(f"{payload[:60]!r} is no record of a bridge: {problem}")
        return found

    def _problem(self) -> str:
        """What no lane would write; empty for nothing. Whoever may publish can write into the class
        of records."""
        if not 1 <= len(self.batches) <= BATCHES_MAX:
            return f"it tells {len(self.batches)} batches, expected 1 to {BATCHES_MAX}"
        if not 0 <= self.number <= MESSAGE_ID_MASK:
            return f"its number is {self.number}"
        numbers = [batch.number for batch in self.batches]
        if (self.number + 1) & MESSAGE_ID_MASK not in numbers:
            return f"its number is {self.number}, and what it announces has {numbers}"
        for before, batch in pairwise(self.batches):
            gap = (batch.number - before.number - before.count) & MESSAGE_ID_MASK
            if not 0 <= before.number <= MESSAGE_ID_MASK or not 0 < gap <= BATCH_MESSAGES_MAX:
                return f"a batch has number {before.number}, and the one behind it {batch.number}"
        for batch in self.batches:
            edges = [edge for part in batch.ranges for edge in part]
            if any(a > b for a, b in pairwise([0, *edges, batch.next])):
                return f"its sequences do not ascend to {batch.next}"
            if any(first == end for first, end in batch.ranges):
                return "it has a range of nothing"
            if batch.count > BATCH_MESSAGES_MAX:
                return f"it tells {batch.count} messages, expected {BATCH_MESSAGES_MAX} at most"
        return ""

    @property
    def first(self) -> int:
        """The lowest number of which it tells something."""
        number = self.batches[0].number
        return self.number if number == (self.number + 1) & MESSAGE_ID_MASK else number

    @property
    def next(self) -> int:
        """The sequence at which the lane goes on behind all that it tells."""
        return self.batches[-1].next

    @property
    def end(self) -> int:
        """The number behind the highest one of which it tells something."""
        return self.batches[-1].end

    def fits(self, number: int) -> bool:
        """Whether the far bus's next number may be this one: it is at most behind all that was
        announced, for what comes then is announced by another record."""
        is_behind = _ahead(number, self.end) > 0
        return not is_behind and _ahead(number, self.first) >= -BATCH_MESSAGES_MAX

    def owed(self, number: int) -> Iterator[tuple[int, list[Range]]]:
        """What the far bus is still to be sent when `number` is its next one: first numbers, and
        sequences; no sequences where a record stood."""
        for batch in self.batches:
            while _ahead(number, batch.number) < 0:
                yield number, []
                number = (number + 1) & MESSAGE_ID_MASK
            if left := batch.behind(_ahead(number, batch.number)):
                yield number, left
                number = batch.end


def _ahead(number: int, of: int) -> int:
    """How far a number is ahead of another one, by the nearest-id rule."""
    return ((number - of + _HALF) & MESSAGE_ID_MASK) - _HALF


@dataclass(slots=True)
class Numbering:
    """A lane's numbers at the far bus, as long as one connection to it lasts."""

    source: str
    next: int
    """The number of the next message that is handed over."""
    under_way: list[Batch] = field(default_factory=list)
    """What is sent and may be lost."""

    def record(
        self, planned: Sequence[tuple[list[Range], int, Mark | None]]
    ) -> tuple[Record, list[Batch]]:
        """The record that is to be handed over now, and the batches that it announces: of each its
        sequences, where to go on behind it, and its mark."""
        number = self.next
        batches, at = list[Batch](), number
        for ranges, next, mark in planned:  # In front of each is a record.
            batches.append(Batch((at + 1) & MESSAGE_ID_MASK, ranges, next, mark))
            at = batches[-1].end
        self.next = (number + 1) & MESSAGE_ID_MASK
        return Record(self.source, number, [*self.under_way, *batches]), batches

    def sent(self, batch: Batch) -> None:
        """Messages of it are handed over."""
        assert batch.number == self.next, (batch.number, self.next)
        self.next = batch.end
        self.under_way.append(batch)

    def settled(self) -> None:
        """The first one under way is stored or refused."""
        self.under_way.pop(0)


def ranges(sequences: Integers) -> list[Range]:
    """Ascending sequences as ranges."""
    if not sequences.size:
        return []
    breaks = np.flatnonzero(np.diff(sequences) != 1)
    firsts = sequences[np.r_[0, breaks + 1]].tolist()
    lasts = (sequences[np.r_[breaks, sequences.size - 1]] + 1).tolist()
    return list(zip(firsts, lasts, strict=True))
