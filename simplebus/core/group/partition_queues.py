"""Messages of one position by their key's lane: of each lane one at most may be out.

Rule 1: who comes first in a lane may be handed out; those behind it wait until it has left, in the
order of their sequences. Whoever is first stays first, whoever enters later.
Rule 2: a lane exists while something is in it. What is in lane 0 waits for nobody.
Rule 3: entering and leaving cost the same however many lanes there are.

    lane 7    12 │ 15 19        12 may be out, 15 and 19 wait
    lane 9    13 │
    lane 0    14 16 17          without a key
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, Iterator

NO_PARTITION = 0
"""Of what has no key."""


class PartitionQueues:
    """Of one position."""

    def __init__(self) -> None:
        self._partition_by_sequence: dict[int, int] = {}
        """By sequence, the lane that it is in."""
        self._queue_by_partition: dict[int, list[int]] = {}
        """By lane, who is in it: the first one, and ascending those that wait."""

    def __len__(self) -> int:
        """How many messages there are."""
        return len(self._partition_by_sequence)

    def __contains__(self, sequence: int) -> bool:
        return sequence in self._partition_by_sequence

    def __iter__(self) -> Iterator[int]:
        """All that are in here, in the order in which they came."""
        return iter(self._partition_by_sequence)

    def partitions_of(self, sequences: Iterable[int]) -> Iterator[int]:
        """Where these are; they must be in here."""
        return map(self._partition_by_sequence.__getitem__, sequences)

    def enqueue(self, sequences: Iterable[int], partitions: Iterable[int]) -> list[int]:
        """These come in, each into its lane. Returns those that may be handed out."""
        of, rows = self._partition_by_sequence, self._queue_by_partition
        free: list[int] = []
        for sequence, lane in zip(sequences, partitions, strict=True):
            of[sequence] = lane
            if not lane:
                free.append(sequence)
                continue
            row = rows.get(lane)
            if row is None:
                rows[lane] = [sequence]
                free.append(sequence)
            elif len(row) == 1 or sequence > row[-1]:
                row.append(sequence)
            else:
                insort(row, sequence, lo=1)
        return free

    def dequeue(self, sequences: Iterable[int]) -> list[int]:
        """These, which are in here, are dealt with. Returns who may be handed out instead."""
        of, rows = self._partition_by_sequence, self._queue_by_partition
        following: list[int] = []
        for sequence in sequences:
            lane = of.pop(sequence)
            if not lane:
                continue
            row = rows[lane]
            if len(row) == 1:
                del rows[lane]
            elif row[0] == sequence:
                del row[0]
                following.append(row[0])
            else:
                row.remove(sequence)
        return [sequence for sequence in following if sequence in of]

    def is_at_front(self, sequence: int) -> bool:
        """Whether it may be handed out; it must be in here."""
        lane = self._partition_by_sequence[sequence]
        return not lane or self._queue_by_partition[lane][0] == sequence

    def count_and_longest(self) -> tuple[int, int]:
        """How many lanes there are, and how many messages are in the longest one."""
        return len(self._queue_by_partition), max(
            map(len, self._queue_by_partition.values()), default=0
        )

    def check_invariants(self) -> None:
        """Raise AssertionError unless everybody is in one lane, and in order."""
        inside = {s: lane for lane, row in self._queue_by_partition.items() for s in row}
        assert inside == {s: lane for s, lane in self._partition_by_sequence.items() if lane}
        for row in self._queue_by_partition.values():
            assert row, "an empty lane"
            assert row[1:] == sorted(set(row[1:])), row
