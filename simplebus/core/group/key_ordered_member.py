"""Member of a key-ordered group.

It holds single messages in any order, so that removing one is O(1). To the group it reports them as
spans, like any other member.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate, islice
from typing import TYPE_CHECKING, NamedTuple

from simplebus.core.group.group import GroupMember
from simplebus.core.group.keys_in_flight import KeyOrderedInFlight
from simplebus.core.limits import INQUIRY_SPANS_MAX, REDELIVERY_BYTES
from simplebus.core.protocol.frames import Integers
from simplebus.core.redelivery.ack_timer import Span
from simplebus.core.redelivery.delivery_state import ScheduledSets
from simplebus.core.redelivery.sequence_set import SequenceSet
from simplebus.core.session.outbox import Outbox

if TYPE_CHECKING:
    from simplebus.core.group.key_ordered_group import KeyOrderedGroup


class AssignedBatch(NamedTuple):
    """Messages that were assigned together, in ascending order."""

    sequences: list[int]
    sizes: list[int]
    """Bytes of each message."""
    attempts: int
    """Delivery attempts so far, the same for all messages."""

    def split_at(self, space_bytes: int) -> tuple[AssignedBatch, AssignedBatch]:
        """Split off as many messages as fit into `space_bytes`, at least one."""
        count = 1 + sum(1 for end in accumulate(self.sizes) if end < space_bytes)
        front = AssignedBatch(self.sequences[:count], self.sizes[:count], self.attempts)
        return front, AssignedBatch(self.sequences[count:], self.sizes[count:], self.attempts)


class KeyOrderedMember(GroupMember):
    """One session's membership in a key-ordered group."""

    group: KeyOrderedGroup

    def __init__(
        self,
        group: KeyOrderedGroup,
        outbox: Outbox,
        subscription_number: int,
        in_flight_max: int,
        identity: str,
    ) -> None:
        super().__init__(group, outbox, subscription_number, in_flight_max)
        self.identity = identity
        """Name from which its partitions are derived."""
        self.ready_sequences: deque[int] = deque()
        """Messages that may be assigned to it when it can accept more."""
        self._assigned_batches: deque[AssignedBatch] = deque()
        """Messages assigned and not sent yet."""
        self._in_flight = KeyOrderedInFlight(group.attempts_by_sequence)

    @property
    def has_frames_to_copy(self) -> bool:
        return bool(self._assigned_batches)

    @property
    def has_work(self) -> bool:
        return bool(self._assigned_batches)

    def iter_spans(self) -> Iterator[Span]:
        yield from self.group.build_spans(
            sequence for batch in self._assigned_batches for sequence in batch.sequences
        )
        yield from self.group.build_spans(self._in_flight.held_messages)

    def has_in_flight(
        self, first: int, last: int, attempt: int, *, include_waiting: bool = False
    ) -> bool:
        return self._in_flight.has_in_flight(first, last, attempt)

    def assign_batch(self, batch: AssignedBatch, tick: int) -> None:
        """Queue a batch for sending to this member."""
        if not self._assigned_batches:
            self.assigned_tick = tick
        self._assigned_batches.append(batch)
        self._adjust_counts(len(batch.sequences), sum(batch.sizes))
        self.outbox.enqueue(self)

    def _adjust_counts(self, count: int, size_bytes: int) -> None:
        """Add `count` messages with `size_bytes` bytes; both may be negative."""
        self.assigned_count += count
        self.assigned_bytes += size_bytes
        self.group.update_availability(self)

    def pop_unsent(self) -> list[Span]:
        unsent = self._pop_assigned(lambda sequence: True)
        return self.group.build_spans(unsent)

    def _pop_assigned(self, predicate: Callable[[int], bool]) -> list[int]:
        """Remove and return the unsent messages for which `predicate` is true."""
        removed: list[int] = []
        removed_bytes, remaining = 0, deque[AssignedBatch]()
        for batch in self._assigned_batches:
            kept = AssignedBatch([], [], batch.attempts)
            for sequence, message_bytes in zip(batch.sequences, batch.sizes, strict=True):
                if predicate(sequence):
                    removed.append(sequence)
                    removed_bytes += message_bytes
                else:
                    kept.sequences.append(sequence)
                    kept.sizes.append(message_bytes)
            if kept.sequences:
                remaining.append(kept)
        self._assigned_batches = remaining
        if removed:
            self._adjust_counts(-len(removed), -removed_bytes)
        return removed

    def iter_in_flight(self) -> Iterator[tuple[int, Span]]:
        by_due: dict[int, list[int]] = {}
        for sequence, (due, _) in self._in_flight.held_messages.items():
            by_due.setdefault(due, []).append(sequence)
        for due, sequences in by_due.items():
            yield from ((due, span) for span in self.group.build_spans(sequences))

    def pop_in_flight(self) -> list[tuple[int, Span]]:
        spans = list(self.iter_in_flight())
        self.remove_in_flight_sequences(list(self._in_flight.held_messages))
        return spans

    def remove_in_flight(self, first: int, last: int, attempt: int = 0) -> list[Span]:
        return self.group.build_spans(self.remove_in_flight_range(first, last, attempt))

    def remove_in_flight_range(self, first: int, last: int, attempt: int = 0) -> list[int]:
        """Remove first..last-1 from the messages in flight and return the removed sequences.

        With `attempt` other than 0 only messages of that delivery attempt are removed.
        """
        return self._record_removed(*self._in_flight.remove_range(first, last, attempt))

    def remove_in_flight_sequences(self, sequences: Iterable[int]) -> list[int]:
        """Remove `sequences` from the messages in flight and return those that were."""
        return self._record_removed(*self._in_flight.remove_sequences(sequences))

    def remove_in_flight_ranges(self, firsts: Integers, lasts: Integers) -> list[int]:
        """Remove many ranges from the messages in flight and return the removed sequences."""
        if ((lasts - firsts) == 1).all():
            return self.remove_in_flight_sequences(firsts.tolist())
        removed: list[int] = []
        removed_bytes = 0
        for first, last in zip(firsts.tolist(), lasts.tolist(), strict=True):
            removed_part, part_bytes = self._in_flight.remove_range(first, last)
            removed += removed_part
            removed_bytes += part_bytes
        return self._record_removed(removed, removed_bytes)

    def _record_removed(self, sequences: list[int], size_bytes: int) -> list[int]:
        if sequences:
            self._adjust_counts(-len(sequences), -size_bytes)
        return sequences

    def pop_overdue(self, tick: int) -> list[Span]:
        return self.group.build_spans(
            self.remove_in_flight_sequences(self._in_flight.find_overdue(tick))
        )

    def extend_ack_timeouts(self, first: int, last: int, tick: int, attempt: int) -> None:
        """Restart the ack timeout of the messages in flight of first..last-1."""
        pause = self.group.delivery_policy.redelivery_delay_ticks
        self._in_flight.extend_timeouts(
            first, last, lambda attempts: tick + pause(attempts), attempt
        )

    def skip_to(self, floor: int) -> None:
        self.purge(0, floor)

    def purge(self, first: int, last: int) -> None:
        self.remove_in_flight_range(first, last)
        self._pop_assigned(lambda sequence: first <= sequence < last)

    @property
    def unsent_count(self) -> int:
        return sum(len(batch.sequences) for batch in self._assigned_batches)

    def in_flight_sets(self) -> ScheduledSets:
        sets: dict[tuple[int, int], SequenceSet] = {}
        for sequence, (due, _) in islice(self._in_flight.held_messages.items(), INQUIRY_SPANS_MAX):
            key = (due, self.group.attempts_by_sequence.get(sequence, 0))
            sets.setdefault(key, SequenceSet()).add(sequence, sequence + 1)
        return [(*key, sequences) for key, sequences in sets.items()]

    def copy_frames(self, tick: int) -> bytes:
        self._mark_responsive()
        self.scanned_count = 0
        data = b""
        while self._assigned_batches and not data:
            data = self._copy_next_batch(tick)
        self.assigned_tick = tick
        return data

    def _copy_next_batch(self, tick: int) -> bytes:
        """Return the frames of the oldest assigned batch, or of its front if the batch is large."""
        group, batch = self.group, self._assigned_batches.popleft()
        if sum(batch.sizes) > REDELIVERY_BYTES:
            batch, rest = batch.split_at(REDELIVERY_BYTES)
            if rest.sequences:
                self._assigned_batches.appendleft(rest)
        sequences, sizes = batch.sequences, batch.sizes
        self.scanned_count += len(sequences)
        expired = group.find_expired(sequences)
        if expired:
            size_of = dict(zip(sequences, sizes, strict=True))
            self._adjust_counts(-len(expired), -sum(map(size_of.pop, expired)))
            group.skip_expired(expired)
            sequences, sizes = list(size_of), list(size_of.values())
        if not sequences:
            return b""
        self.attempt = batch.attempts + 1
        data, due = group.copy_messages(sequences, batch.attempts, tick)
        self._in_flight.add_sent(
            sequences, sizes, attempts=max(batch.attempts + 1, 1), due_tick=due
        )
        return data

    def _mark_responsive(self) -> None:
        if self.is_unresponsive:
            super()._mark_responsive()
            self.group.restore_member(self)

    def check_invariants(self) -> None:
        """Raise AssertionError unless the messages in flight are indexed correctly."""
        self._in_flight.check_invariants()
