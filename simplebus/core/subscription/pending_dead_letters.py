"""Messages that a position gave up and whose dead letters are not stored yet.

The store appends dead letters in later turns, when there is space.

They are not sent any more but stay stored until they are dead-lettered or acknowledged after all.
They are kept as ranges, so memory depends on the number of ranges, not of messages.

    terminated       attempt 1    (4, 9) (12, 14)
    max_deliveries   attempt 2    (9, 10)
"""

from __future__ import annotations

from collections.abc import Iterator

from simplebus.core.errors import Reason
from simplebus.core.limits import DEAD_LETTER_BATCH_MESSAGES
from simplebus.core.redelivery.sequence_set import SequenceSet
from simplebus.core.redelivery.timer_wheel import Span
from simplebus.core.subscription.selection import Ranges


class PendingDeadLetters:
    """Pending dead letters of one position.

    Invariant: each message is in exactly one set of `_sequences_by_reason`, and in
    `_all_sequences`.
    """

    def __init__(self) -> None:
        self._sequences_by_reason: dict[tuple[Reason, int], SequenceSet] = {}
        """Sequences by reason and attempt count. No set is empty."""
        self._all_sequences = SequenceSet()

    def __len__(self) -> int:
        """Return the number of messages."""
        return len(self._all_sequences)

    def __iter__(self) -> Iterator[Span]:
        """Yield all spans with their reasons, in no order."""
        for (reason, attempts), sequences in self._sequences_by_reason.items():
            for first, last in sequences:
                yield Span(first, last, attempts, reason)

    @property
    def sequences(self) -> SequenceSet:
        """All messages. The set must not be changed."""
        return self._all_sequences

    def to_rows(self) -> list[tuple[int, int, int, str]]:
        """Return all messages as rows (first, last, attempts, reason), sorted, for the snapshot."""
        return sorted(
            (first, last, attempts, reason.value)
            for (reason, attempts), sequences in self._sequences_by_reason.items()
            for first, last in sequences
        )

    @property
    def first_sequence(self) -> int:
        """Lowest sequence. At least one message must be pending."""
        return next(iter(self._all_sequences))[0]

    def add(self, ranges: Ranges, reason: Reason, attempts: int) -> None:
        """Add ranges. Messages that are pending already keep their reason."""
        added = self.subtract_from(ranges)
        if added:
            self._sequences_by_reason.setdefault((reason, attempts), SequenceSet()).update(added)
            self._all_sequences.update(added)

    def remove(self, first: int, last: int) -> None:
        """Remove first..last-1."""
        if not self._all_sequences.overlaps(first, last):
            return
        self._all_sequences.remove(first, last)
        for key, sequences in list(self._sequences_by_reason.items()):
            sequences.remove(first, last)
            if not sequences:
                del self._sequences_by_reason[key]

    def remove_set(self, messages: SequenceSet) -> None:
        """Remove the messages of a set."""
        if not self._all_sequences.pop_set(messages):
            return
        for key, sequences in list(self._sequences_by_reason.items()):
            sequences.pop_set(messages)
            if not sequences:
                del self._sequences_by_reason[key]

    def subtract_from(self, ranges: Ranges) -> Ranges:
        """Return the parts of `ranges` that are not pending."""
        return [
            part
            for first, last in ranges
            for part in self._all_sequences.missing_ranges(first, last)
        ]

    def next_batch(self, first: int, last: int) -> tuple[Ranges, Reason, int] | None:
        """Return the lowest ranges of first..last-1 with one reason and attempt count, or None."""
        limit = DEAD_LETTER_BATCH_MESSAGES
        candidates = [
            (sequences.ranges_within(first, last, limit), *key)
            for key, sequences in self._sequences_by_reason.items()
        ]
        batches = [batch for batch in candidates if batch[0]]
        return min(batches, key=lambda batch: batch[0][0]) if batches else None

    def check_invariants(self) -> None:
        """Raise AssertionError unless the invariant holds."""
        self._all_sequences.check()
        assert all(self._sequences_by_reason.values())
        assert sum(map(len, self._sequences_by_reason.values())) == len(self._all_sequences)
        union = SequenceSet()
        for sequences in self._sequences_by_reason.values():
            union.update(list(sequences))
        assert list(union) == list(self._all_sequences)
