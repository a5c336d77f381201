"""Order of messages within the partitions of a key-ordered group.

At most one message of each partition may be assigned at a time. The first message of a partition
stays first until it is removed; later ones wait in the order of their sequences. Messages in
partition 0 have no key and wait for nothing. All operations are O(1) in the number of partitions.

    partition 7    12 │ 15 19        12 may be assigned, 15 and 19 wait
    partition 9    13 │
    partition 0    14 16 17          no key
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, Iterator

NO_PARTITION = 0
"""Partition of messages without a key."""


class PartitionQueues:
    """Queues of one position's messages, by partition."""

    def __init__(self) -> None:
        self._partition_by_sequence: dict[int, int] = {}
        """Partition of each message."""
        self._queue_by_partition: dict[int, list[int]] = {}
        """Messages of each partition: the first one, then the waiting ones in ascending order."""

    def __len__(self) -> int:
        """Return the number of messages in all queues."""
        return len(self._partition_by_sequence)

    def __contains__(self, sequence: int) -> bool:
        return sequence in self._partition_by_sequence

    def __iter__(self) -> Iterator[int]:
        """Yield all sequences in the order in which they were added."""
        return iter(self._partition_by_sequence)

    def partitions_of(self, sequences: Iterable[int]) -> Iterator[int]:
        """Return the partitions of `sequences`, which must be queued."""
        return map(self._partition_by_sequence.__getitem__, sequences)

    def enqueue(self, sequences: Iterable[int], partitions: Iterable[int]) -> list[int]:
        """Add messages to their partitions. Returns the sequences that may be assigned now."""
        partition_by_sequence, queues = self._partition_by_sequence, self._queue_by_partition
        assignable: list[int] = []
        for sequence, partition in zip(sequences, partitions, strict=True):
            partition_by_sequence[sequence] = partition
            if not partition:
                assignable.append(sequence)
                continue
            queue = queues.get(partition)
            if queue is None:
                queues[partition] = [sequence]
                assignable.append(sequence)
            elif len(queue) == 1 or sequence > queue[-1]:
                queue.append(sequence)
            else:
                insort(queue, sequence, lo=1)
        return assignable

    def dequeue(self, sequences: Iterable[int]) -> list[int]:
        """Remove finished messages. Returns the sequences that may be assigned in their place."""
        partition_by_sequence, queues = self._partition_by_sequence, self._queue_by_partition
        following: list[int] = []
        for sequence in sequences:
            partition = partition_by_sequence.pop(sequence)
            if not partition:
                continue
            queue = queues[partition]
            if len(queue) == 1:
                del queues[partition]
            elif queue[0] == sequence:
                del queue[0]
                following.append(queue[0])
            else:
                queue.remove(sequence)
        return [sequence for sequence in following if sequence in partition_by_sequence]

    def is_at_front(self, sequence: int) -> bool:
        """Return True if a queued message may be assigned."""
        partition = self._partition_by_sequence[sequence]
        return not partition or self._queue_by_partition[partition][0] == sequence

    def count_and_longest(self) -> tuple[int, int]:
        """Return the number of partitions and the length of the longest queue."""
        return len(self._queue_by_partition), max(
            map(len, self._queue_by_partition.values()), default=0
        )

    def check_invariants(self) -> None:
        """Raise AssertionError unless every message is in one queue, in order."""
        queued = {
            s: partition for partition, queue in self._queue_by_partition.items() for s in queue
        }
        assert queued == {
            s: partition for s, partition in self._partition_by_sequence.items() if partition
        }
        for queue in self._queue_by_partition.values():
            assert queue, "an empty queue"
            assert queue[1:] == sorted(set(queue[1:])), queue
