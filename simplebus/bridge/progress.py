"""Where a lane is, kept by the far bus itself: which of its numbers are which sequences here.

The far bus stores every number once. So that a bridge that was killed goes on with the same message
under the same number, it writes down beforehand what the next numbers will be: a *record*, itself a
message of the numbered row, in a class there that keeps last values.

Rule 1: the messages of a batch are sent when the record that tells them is confirmed, not before.
Rule 2: a record tells the batch before it as well: that may be under way while the record is.
Rule 3: what comes back is never guessed. Where the record and the far bus's `next` do not fit
together, the lane begins with numbers of which nobody knows anything.

    number    7         8 … 107     108              109 … 208     209
    row       record    batch       record           batch         record
    tells     8-107                 8-107, 109-208                 109-208, 210-…
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import msgspec
import numpy as np

from simplebus.core.errors import BusError
from simplebus.core.frames import Integers
from simplebus.core.limits import MESSAGE_ID_BITS, MESSAGE_ID_MASK

BATCH_MESSAGES_MAX = 1 << 18
"""No batch has more."""
_HALF = 1 << (MESSAGE_ID_BITS - 1)

Range = tuple[int, int]
"""Half-open."""


class RecordError(BusError):
    """What stands in the class of records is none."""


class Batch(msgspec.Struct, frozen=True):
    """Messages that are sent together."""

    number: int
    """The first one's number at the far bus."""
    ranges: list[Range]
    """Their sequences, in order."""
    next: int
    """The sequence at which the lane goes on behind them."""

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
    """One or two, in order."""

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
        if not 1 <= len(self.batches) <= 2:
            return f"it tells {len(self.batches)} batches, expected 1 or 2"
        last = self.batches[-1]
        if (
            not 0 <= self.number <= MESSAGE_ID_MASK
            or last.number != (self.number + 1) & MESSAGE_ID_MASK
        ):
            return f"its number is {self.number}, and what it announces has {last.number}"
        before = self.batches[0]
        if before is not last:
            gap = (self.number - before.number - before.count) & MESSAGE_ID_MASK
            if not 0 <= before.number <= MESSAGE_ID_MASK or gap > BATCH_MESSAGES_MAX:
                return f"the batch before it has number {before.number}, and it has {self.number}"
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
        batch = self.batches[0]
        return batch.number if len(self.batches) > 1 else self.number

    @property
    def next(self) -> int:
        """The sequence at which the lane goes on behind all that it tells."""
        return self.batches[-1].next

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
    before: Batch | None = None
    """The batch that was sent last."""

    def record(self, sequences: Integers, next: int) -> tuple[Record, Batch]:
        """The record that is to be handed over now, and the batch that it announces."""
        number = self.next
        self.next = (number + 1) & MESSAGE_ID_MASK
        batch = Batch(self.next, ranges(sequences), next)
        batches = [batch] if self.before is None else [self.before, batch]
        return Record(self.source, number, batches), batch

    def sent(self, batch: Batch) -> None:
        """Messages of it are handed over."""
        assert batch.number == self.next, (batch.number, self.next)
        self.next = batch.end
        self.before = batch


def ranges(sequences: Integers) -> list[Range]:
    """Ascending sequences as ranges."""
    if not sequences.size:
        return []
    breaks = np.flatnonzero(np.diff(sequences) != 1)
    firsts = sequences[np.r_[0, breaks + 1]].tolist()
    lasts = (sequences[np.r_[breaks, sequences.size - 1]] + 1).tolist()
    return list(zip(firsts, lasts, strict=True))
