"""What a position has given up, and what finds no room among the dead letters yet.

Rule 1: it is sent to nobody any more, and is not done: it stays stored until it is a dead letter,
or somebody acknowledges it after all.
Rule 2: ranges, never messages: however much waits, it costs what its pieces cost.

    terminated  sent once    (4, 9) (12, 14)
    exhausted   sent twice   (9, 10)
"""

from __future__ import annotations

from collections.abc import Iterator

from simplebus.core.errors import Reason
from simplebus.core.limits import DEAD_LETTERS_MAX
from simplebus.core.redelivery.ack_timer import SequenceSet, Span
from simplebus.core.subscription.selection import Ranges


class PendingDeadLetters:
    """Of one position. Invariant: no message is in two of the sets, and all are in `_all`."""

    def __init__(self) -> None:
        self._sequences_by_reason: dict[tuple[Reason, int], SequenceSet] = {}
        """By why they were given up, and how often they were sent. None of them is empty."""
        self._all_sequences = SequenceSet()

    def __len__(self) -> int:
        """How many messages there are."""
        return len(self._all_sequences)

    def __iter__(self) -> Iterator[Span]:
        """All of them, in no order; each says why it was given up."""
        for (reason, attempts), held in self._sequences_by_reason.items():
            for first, last in held:
                yield Span(first, last, attempts, reason)

    def to_rows(self) -> list[tuple[int, int, int, str]]:
        """All of them, to be kept: messages first..last-1, how often they were sent, and why they
        were given up."""
        return sorted(
            (first, last, attempts, reason.value)
            for (reason, attempts), held in self._sequences_by_reason.items()
            for first, last in held
        )

    @property
    def first_sequence(self) -> int:
        """The lowest one. There is one."""
        return next(iter(self._all_sequences))[0]

    def add(self, ranges: Ranges, reason: Reason, attempts: int) -> None:
        """These are given up. What is in here already stays as it is."""
        new = self.subtract_from(ranges)
        if new:
            self._sequences_by_reason.setdefault((reason, attempts), SequenceSet()).update(new)
            self._all_sequences.update(new)

    def remove(self, first: int, last: int) -> None:
        """Have none of first..last-1."""
        if not self._all_sequences.overlaps(first, last):
            return
        self._all_sequences.remove(first, last)
        for key, held in list(self._sequences_by_reason.items()):
            held.remove(first, last)
            if not held:
                del self._sequences_by_reason[key]

    def subtract_from(self, ranges: Ranges) -> Ranges:
        """What of these is not in here."""
        return [part for first, last in ranges for part in self._all_sequences.without(first, last)]

    def next_batch(self, first: int, last: int) -> tuple[Ranges, Reason, int] | None:
        """Some of first..last-1, the lowest ones, as many as are tried at once: which, why they
        were given up, and how often they were sent. None for none."""
        most = DEAD_LETTERS_MAX
        found = [
            (held.within(first, last, most), *key)
            for key, held in self._sequences_by_reason.items()
        ]
        some = [each for each in found if each[0]]
        return min(some, key=lambda each: each[0][0]) if some else None

    def check_invariants(self) -> None:
        """Raise AssertionError unless the invariant holds."""
        self._all_sequences.check()
        assert all(self._sequences_by_reason.values())
        assert sum(map(len, self._sequences_by_reason.values())) == len(self._all_sequences)
        both = SequenceSet()
        for held in self._sequences_by_reason.values():
            both.update(list(held))
        assert list(both) == list(self._all_sequences)
