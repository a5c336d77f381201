"""Key-ordered queue groups: messages with the same key go to one member, one after the other.

- At most one message of each partition (see `partition_queues`) is assigned at a time. A message
  that must be redelivered stays first in its partition, whichever member gets it.
- The present members decide which member serves a partition (see `key_assignment`). A member that
  cannot accept messages delays only its own partitions. A member that does not read in time loses
  its partitions until it reads again.
- All partitions share one position: a durable is stored with one ack window, and there are so many
  partitions that different keys rarely wait for each other.
- The cursor passes each message once. Two numbers are limited: the messages that wait behind the
  cursor, and these together with the messages in flight. At a limit the group stops scanning.

    ring         floor ─ in flight, or waiting in a partition ─ cursor ─ not scanned yet ─ head
    partitions   12 │ 15 19     13 │     first message │ messages waiting behind it
    members      ready to be assigned ┆ assigned ┆ sent
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import accumulate, islice
from typing import ClassVar, Final, NamedTuple

import numpy as np

from simplebus.core.clock import BrokerClock
from simplebus.core.group import key_hash
from simplebus.core.group.group import (
    FIRST_SCAN_MAX,
    MESSAGES_PER_TURN_MAX,
    SPAN_SCAN_COST,
    BaseGroup,
    GroupMember,
)
from simplebus.core.group.key_assignment import HASH_BUCKET_MASK, KeyAssignment
from simplebus.core.group.keys_in_flight import KeyOrderedInFlight
from simplebus.core.group.partition_queues import PartitionQueues
from simplebus.core.limits import (
    IN_FLIGHT_BYTES,
    INQUIRY_SPANS_MAX,
    KEY_ORDERED_MESSAGES_MAX,
    LONG_NACK_MESSAGES,
    MESSAGES_MAX,
    PLAIN_FRAMES_MAX,
    REDELIVERY_BYTES,
    REDELIVERY_MESSAGES,
    SEQUENCE_MAX,
)
from simplebus.core.outbox import Outbox
from simplebus.core.protocol.frames import Flags, Integers
from simplebus.core.redelivery.delivery_state import DeliveryState, ScheduledSets
from simplebus.core.redelivery.handover import PositionHandover
from simplebus.core.redelivery.redelivery_queue import SpanSet
from simplebus.core.redelivery.sequence_set import SequenceSet
from simplebus.core.redelivery.timer_wheel import Span
from simplebus.core.statistics import SubscriptionStatistics
from simplebus.core.subscription import selection
from simplebus.core.subscription.delayed_wakeups import DelayedWakeups
from simplebus.core.subscription.position import Position

# Up to this many messages a loop is faster than arrays.
_SCALAR_MESSAGES_MAX = 4

# Messages scanned at once, at least, when a member can accept messages.
_SCAN_MIN = 16

# Messages assigned before the group continues in a later turn: each takes 3 microseconds. The
# messages that a member gets at once count as at least _BATCH_COST_MESSAGES.
_ASSIGNED_PER_TURN_MAX = 512
_BATCH_COST_MESSAGES = 8

# Dropping so many messages costs as much as dropping those of one more member.
_DROPPED_PER_COST = 32

# If so many messages have finished without an ack, or so many redeliveries were sorted, other
# messages are assigned in a later turn.
_MOVED_PER_TURN_MAX = 1024

# Weights of members computed in one turn after members have left: each takes 10 nanoseconds.
_WEIGHTS_PER_TURN_MAX = 1 << 17

# Stale entries of the ready queues are dropped when they outnumber the current ones by this much.
_STALE_READY_MAX = 64
_MISSING: Final = False


class AssignedBatch(NamedTuple):
    """Messages that were assigned together, in ascending order."""

    sequences: list[int]
    sizes: list[int]
    """Bytes of each message."""
    attempts: int
    """Delivery attempts so far, the same for all messages."""

    def split_at(
        self, space_bytes: int, messages_max: int = MESSAGES_MAX
    ) -> tuple[AssignedBatch, AssignedBatch]:
        """Split off as many messages as fit into `space_bytes`, from one to `messages_max`."""
        count = 1 + sum(1 for end in accumulate(self.sizes) if end < space_bytes)
        count = min(count, messages_max)
        front = AssignedBatch(self.sequences[:count], self.sizes[:count], self.attempts)
        return front, AssignedBatch(self.sequences[count:], self.sizes[count:], self.attempts)


class KeyOrderedMember(GroupMember):
    """One session's membership in a key-ordered group."""

    def __init__(
        self,
        group: KeyOrderedGroup,
        outbox: Outbox,
        subscription_number: int,
        request_number: int,
        in_flight_max: int,
        identity: str,
    ) -> None:
        super().__init__(group, outbox, subscription_number, request_number, in_flight_max)
        self._group = group
        self.identity = identity
        """Name from which the partitions of this member are derived."""
        self.ready_sequences: deque[int] = deque()
        """Messages of its partitions that are assigned when this member can accept more."""
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
        yield from self._group.build_spans(
            sequence for batch in self._assigned_batches for sequence in batch.sequences
        )
        yield from self._group.build_spans(self._in_flight.held_messages)

    def has_in_flight(
        self, first: int, last: int, attempt: int, *, include_waiting: bool = False
    ) -> bool:
        return self._in_flight.has_in_flight(first, last, attempt)

    def find_part_end(self, first: int, last: int, attempt: int) -> int:
        held = sorted(each for each in self._in_flight.held_messages if first <= each < last)
        return held[LONG_NACK_MESSAGES] if len(held) > LONG_NACK_MESSAGES else last

    def assign_batch(self, batch: AssignedBatch, turn: int, tick: int) -> None:
        """Queue a batch for sending to this member, in the given turn of the group."""
        if not self._assigned_batches:
            self.assigned_tick = tick
        self.last_assigned_turn = turn
        self._assigned_batches.append(batch)
        self._adjust_counts(len(batch.sequences), sum(batch.sizes))
        self.outbox.enqueue(self)

    def _adjust_counts(self, count: int, size_bytes: int) -> None:
        """Add `count` messages with `size_bytes` bytes; both may be negative."""
        self.assigned_count += count
        self.assigned_bytes += size_bytes
        self._group.update_availability(self)

    def pop_unsent(self) -> list[SpanSet]:
        unsent = self._pop_assigned(0, SEQUENCE_MAX)
        return self._group.build_sets(unsent)

    def _pop_assigned(self, first: int, last: int) -> list[int]:
        """Remove and return the unsent messages of first..last-1."""
        removed: list[int] = []
        removed_bytes, remaining_batches = 0, deque[AssignedBatch]()
        for batch in self._assigned_batches:
            sequences, sizes, attempts = batch
            begin, end = bisect_left(sequences, first), bisect_left(sequences, last)
            removed += sequences[begin:end]
            removed_bytes += sum(sizes[begin:end])
            if end - begin < len(sequences):
                remaining_batches.append(
                    AssignedBatch(
                        sequences[:begin] + sequences[end:], sizes[:begin] + sizes[end:], attempts
                    )
                )
        self._assigned_batches = remaining_batches
        if removed:
            self._adjust_counts(-len(removed), -removed_bytes)
        return removed

    def iter_in_flight(self) -> Iterator[tuple[int, Span]]:
        by_due: dict[int, list[int]] = {}
        for sequence, (due, _) in self._in_flight.held_messages.items():
            by_due.setdefault(due, []).append(sequence)
        for due, sequences in by_due.items():
            yield from ((due, span) for span in self._group.build_spans(sequences))

    def pop_in_flight(self) -> ScheduledSets:
        by_due: dict[int, list[int]] = {}
        for sequence, (due, _) in self._in_flight.held_messages.items():
            by_due.setdefault(due, []).append(sequence)
        self.remove_in_flight_sequences(list(self._in_flight.held_messages))
        return [
            (due, attempts, messages)
            for due, sequences in by_due.items()
            for attempts, messages in self._group.build_sets(sequences)
        ]

    def remove_in_flight(self, first: int, last: int, attempt: int = 0) -> list[Span]:
        return self._group.build_spans(self.remove_in_flight_range(first, last, attempt))

    def remove_in_flight_range(self, first: int, last: int, attempt: int = 0) -> list[int]:
        """Remove first..last-1 from the messages in flight and return the removed sequences.

        With `attempt` other than 0 only messages of that delivery attempt are removed.
        """
        return self._record_removed(*self._in_flight.remove_range(first, last, attempt))

    def remove_in_flight_sequences(self, sequences: Iterable[int]) -> list[int]:
        """Remove `sequences` from the messages in flight and return the removed sequences."""
        return self._record_removed(*self._in_flight.remove_sequences(sequences))

    def _remove_in_flight_ranges(self, firsts: Integers, lasts: Integers) -> list[int]:
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

    def pop_overdue(self, tick: int) -> list[SpanSet]:
        if not self._in_flight.has_due(tick):
            return []
        return self._group.build_sets(
            self.remove_in_flight_sequences(self._in_flight.find_overdue(tick))
        )

    def discard_range(self, first: int, last: int) -> None:
        if not self.assigned_count:
            return
        self.remove_in_flight_sequences(
            [sequence for sequence in self._in_flight.held_messages if first <= sequence < last]
        )
        if self._assigned_batches:
            self._pop_assigned(first, last)

    def ack_range(self, first: int, last: int) -> bool:
        acked = self.remove_in_flight_range(first, last)
        self._group.mark_acked(acked)
        return bool(acked)

    def ack_ranges(self, firsts: Integers, lasts: Integers) -> Flags:
        acked = self._remove_in_flight_ranges(firsts, lasts)
        self._group.mark_acked(acked)
        sorted_acked = np.sort(np.array(acked, np.int64))
        return sorted_acked.searchsorted(lasts) > sorted_acked.searchsorted(firsts)

    def extend_ack_timeout(self, first: int, last: int, tick: int, attempt: int = 0) -> None:
        delay_ticks = self.position.delivery_policy.redelivery_delay_ticks
        self._in_flight.extend_timeouts(
            first, last, lambda attempts: tick + delay_ticks(attempts), attempt
        )

    @property
    def unsent_count(self) -> int:
        # Without a loop: there may be thousands of batches.
        return self.assigned_count - len(self._in_flight.held_messages)

    def in_flight_sets(self) -> ScheduledSets:
        sets: dict[tuple[int, int], SequenceSet] = {}
        for sequence, (due, _) in islice(self._in_flight.held_messages.items(), INQUIRY_SPANS_MAX):
            key = (due, self._group.attempts_by_sequence.get(sequence, 0))
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
        group, batch = self._group, self._assigned_batches.popleft()
        messages_max = self.outbox.piece_messages_max
        if sum(batch.sizes) > REDELIVERY_BYTES or len(batch.sequences) > messages_max:
            batch, remaining_batch = batch.split_at(REDELIVERY_BYTES, messages_max)
            if remaining_batch.sequences:
                self._assigned_batches.appendleft(remaining_batch)
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
        self._count_sent(len(sequences))
        return data

    def _mark_responsive(self) -> None:
        if self.is_unresponsive:
            super()._mark_responsive()
            self._group.restore_member(self)

    def check_invariants(self) -> None:
        super().check_invariants()
        self._in_flight.check_invariants()


class KeyOrderedGroup(BaseGroup[KeyOrderedMember]):
    """Queue group that keeps the order of messages with the same key.

    It is a `MessageHolder` of its position: it holds the messages that wait in partitions.
    """

    _continued_scan_max: ClassVar[int] = 640

    def __init__(
        self, position: Position, clock: BrokerClock, delayed_wakeups: DelayedWakeups
    ) -> None:
        self._partitions = PartitionQueues()
        """Unfinished messages behind the cursor, except delayed ones."""
        self.attempts_by_sequence: dict[int, int] = {}
        """Delivery attempts of each message that was sent at least once."""
        self._unassigned_sequences: dict[int, None] = {}
        """Messages in the partitions that are not assigned."""
        self._assignment: KeyAssignment[KeyOrderedMember] = KeyAssignment()
        self._members_to_serve: dict[KeyOrderedMember, None] = {}
        """Members that have ready messages and can accept them."""
        self._keyless_ready: deque[int] = deque()
        """Messages without a key that may be assigned."""
        self._unrouted_ready: list[int] = []
        """Messages that may be assigned, whose member is not determined yet."""
        self._joined_count = 0
        self._is_distribution_requested = False
        """True if a wakeup is scheduled to assign ready messages."""
        self._assignable_count = 0
        """Messages that may still be assigned in this turn."""
        self._stale_ready_count = 0
        """Approximate number of finished messages in the ready queues."""
        self._sorted_requeue_count = -1
        """The position's `requeue_count` when its redelivery queue was sorted last."""
        super().__init__(position, clock, delayed_wakeups)
        position.unacked.add_holder(self)
        position.unacked.collect_finished()

    # Messages that wait in partitions ------------------------------------------------------------

    @property
    def drop_cost(self) -> int:
        return len(self.members) + len(self._partitions) // _DROPPED_PER_COST

    @property
    def has_messages(self) -> bool:
        self._dequeue_finished()
        return bool(len(self._partitions))

    def iter_spans(self) -> Iterator[Span]:
        """Yield the spans of the messages in partitions that are not assigned."""
        self._dequeue_finished()
        yield from self.build_spans(self._unassigned_sequences)

    def iter_in_flight(self) -> Iterator[tuple[int, Span]]:
        """Yield nothing: only members have messages in flight."""
        yield from ()

    def pop_overdue(self, tick: int) -> list[SpanSet]:
        """Return nothing: only members have messages in flight."""
        return []

    def discard_range(self, first: int, last: int) -> None:
        """Assign the messages behind first..last-1 soon. `_dequeue_finished` removes the range."""
        self._request_distribution()

    def _dequeue_finished(self) -> int:
        """Remove messages that finished without an ack from their partitions. Returns how many."""
        count_before = len(self._partitions)
        for first, last in self.position.unacked.pop_finished():
            self._dequeue(self._enqueued_in_range(first, last))
        return count_before - len(self._partitions)

    # Called by members ---------------------------------------------------------------------------

    def build_sets(self, sequences: Iterable[int]) -> list[SpanSet]:
        """Return `sequences` as (attempts, messages)."""
        sets: dict[int, SequenceSet] = {}
        for span in self.build_spans(sequences):
            sets.setdefault(span.attempts, SequenceSet()).add(span.first, span.last)
        return list(sets.items())

    def build_spans(self, sequences: Iterable[int]) -> list[Span]:
        """Return `sequences` as ascending spans with their attempt counts."""
        spans: list[Span] = []
        attempts_of = self.attempts_by_sequence.get
        for sequence in sorted(sequences):
            attempts = attempts_of(sequence, 0)
            if spans and spans[-1].last == sequence and spans[-1].attempts == attempts:
                spans[-1].last = sequence + 1
            else:
                spans.append(Span(sequence, sequence + 1, attempts))
        return spans

    def find_expired(self, sequences: list[int]) -> list[int]:
        """Return the sequences of `sequences` whose messages have expired."""
        ring = self.position.ring
        if min(sequences) >= ring.timed_until:
            return []
        numbers = np.array(sequences)
        expires = ring.read_rows_at(numbers).expires
        if expires is None:
            return []
        expired: list[int] = numbers[expires <= self._clock.now].tolist()
        return expired

    def skip_expired(self, expired: list[int]) -> None:
        """Skip ascending, expired messages that no member holds, and schedule a wakeup, because
        messages behind them in their partitions may have become ready.
        """
        self.position.skip_expired(_to_ranges(expired))
        self._dequeue_finished()
        self._request_distribution()

    def copy_messages(self, sequences: list[int], attempts: int, tick: int) -> tuple[bytes, int]:
        """Return the frames of messages with `attempts` attempts, and their due tick."""
        ring, timer_index = self.position.ring, self.position.timer_index(tick)
        if len(sequences) == 1:
            ring.set_timer_index(sequences[0], sequences[0] + 1, timer_index)
            data = ring.copy_frame(sequences[0])
        else:
            data = ring.copy_frames(np.array(sequences), timer_index)
        attempt = max(attempts + 1, 1)
        self.attempts_by_sequence.update(dict.fromkeys(sequences, attempt))
        self.position.count_sent(len(sequences), attempts)
        return data, tick + self.position.delivery_policy.redelivery_delay_ticks(attempt)

    # Members -------------------------------------------------------------------------------------

    def _create_member(
        self,
        outbox: Outbox,
        subscription_number: int,
        request_number: int,
        in_flight_max: int,
        name: str,
    ) -> KeyOrderedMember:
        self._joined_count += 1
        identity = f"{name}/{subscription_number}" if name else f"{self._joined_count}"
        member = KeyOrderedMember(
            self, outbox, subscription_number, request_number, in_flight_max, identity
        )
        self._assign_partitions(member)
        return member

    def remove_member(self, member: KeyOrderedMember) -> None:
        super().remove_member(member)
        self._unassign_partitions(member)

    def _reclaim_unsent(self, member: KeyOrderedMember) -> None:
        super()._reclaim_unsent(member)
        self._unassign_partitions(member)

    def _unassign_partitions(self, member: KeyOrderedMember) -> None:
        """Remove a member from the assignment. Its ready messages go to the others."""
        if member in self._assignment:
            self._assignment.remove_member(member)
        self._reclaim_ready(member)

    def restore_member(self, member: KeyOrderedMember) -> None:
        """Assign partitions again to a member that reads again."""
        if member in self.members and member not in self._assignment:
            self._assign_partitions(member)
            self._request_distribution()

    def _assign_partitions(self, member: KeyOrderedMember) -> None:
        """Add a member to the assignment. Ready messages of former owners are routed again."""
        for former_owner in self._assignment.add_member(member, member.identity):
            self._reclaim_ready(former_owner)

    def _reclaim_ready(self, member: KeyOrderedMember) -> None:
        self._unrouted_ready += member.ready_sequences
        member.ready_sequences.clear()
        self._members_to_serve.pop(member, None)

    def update_availability(self, member: KeyOrderedMember) -> None:
        super().update_availability(member)
        if member.ready_sequences and member.free_count and member in self.members:
            self._members_to_serve[member] = None
        else:
            self._members_to_serve.pop(member, None)

    # Assigning messages --------------------------------------------------------------------------

    def distribute_messages(self) -> list[KeyOrderedMember]:
        assigned_members: dict[KeyOrderedMember, None] = {}
        if self._is_scan_unfinished or self._leaving_outboxes or not self.members:
            return []
        if not self._assignment.assign_orphans(_WEIGHTS_PER_TURN_MAX):
            self._continue_later()
            return []
        if self.position.unacked.is_discarding:
            return []
        if max(self._dequeue_finished(), self._sort_redeliveries()) > _MOVED_PER_TURN_MAX:
            self._continue_later()
            return []
        position = self.position
        position.begin_scan(self._scan_limit)
        self._scan_limit = FIRST_SCAN_MAX
        self._assignable_count = _ASSIGNED_PER_TURN_MAX
        self._distribute_ready(assigned_members)
        while True:
            if self._assignable_count <= 0:
                self._continue_later()
                break
            can_requeue = self._can_requeue()
            if not can_requeue and not self._can_enqueue_new():
                break
            if position.is_scan_limit_reached:
                self._continue_later()
                break
            if can_requeue:
                self._enqueue_redeliveries()
            else:
                self._enqueue_new()
            self._distribute_ready(assigned_members)
        return list(assigned_members)

    def _request_distribution(self) -> None:
        """Schedule a wakeup that assigns ready messages."""
        if self.members:
            self._is_distribution_requested = True
            self._delayed_wakeups.schedule_wakeup(self._clock.now, self)

    @property
    def next_wakeup(self) -> float:
        return self._clock.now if self._is_distribution_requested else super().next_wakeup

    def handle_wakeup(self) -> bool:
        self._is_distribution_requested = False
        return super().handle_wakeup()

    @property
    def _queue_space(self) -> int:
        """Messages that may still be added behind the cursor; 0 if no member accepts messages."""
        if not self._available_members:
            return 0
        return KEY_ORDERED_MESSAGES_MAX - len(self._partitions)

    def _can_enqueue_new(self) -> bool:
        """Return True if new messages can be added now, behind all redeliveries."""
        return self.position.has_new_messages and self._queue_space > 0

    def _can_requeue(self) -> bool:
        unacked = self.position.unacked
        if not unacked.queue:
            return False
        self._sort_redeliveries()
        return self._is_enqueued(unacked.queue.first) or self._queue_space > 0

    def _sort_redeliveries(self) -> int:
        """Sort redeliveries if some were added. Returns the number of moved spans."""
        unacked = self.position.unacked
        if unacked.requeue_count == self._sorted_requeue_count:
            return 0
        self._sorted_requeue_count = unacked.requeue_count
        return unacked.queue.sort(self._redelivery_order)

    def _is_enqueued(self, span: Span) -> bool:
        """Return True if the unfinished messages of a span are in their partitions."""
        sequence = max(span.first, self.window.floor)
        while sequence < span.last and sequence not in self._partitions:
            end = min(span.last, sequence + REDELIVERY_MESSAGES)
            unacked = self.position.unacked.unsettled_ranges(sequence, end)
            if unacked:
                return unacked[0][0] in self._partitions
            sequence = end
        return sequence < span.last

    def _redelivery_order(self, span: Span) -> tuple[bool, bool, int]:
        """Sort key: messages in a partition first, then messages that were sent before."""
        is_enqueued = span.first in self._partitions or self._is_enqueued(span)
        return not is_enqueued, not span.attempts, span.first

    def _enqueue_redeliveries(self) -> None:
        """Make redelivered messages ready, and add new ones behind the cursor to partitions."""
        redeliveries = self.position.select_redeliveries(
            min(max(self._queue_space, 1), self._continued_scan_max)
        )
        if redeliveries is None:
            self._dequeue_finished()
            return
        span, last, selected = redeliveries
        is_in_partition = selected.sendable[0][0] in self._partitions
        attempts = span.attempts
        self.position.consume_redeliveries(span, last, selected)
        self.position.adjust_scanned_count(SPAN_SCAN_COST)
        self._dequeue_finished()
        for begin, end in selected.sendable:
            if is_in_partition:
                self._unassigned_sequences.update(dict.fromkeys(range(begin, end)))
                self._mark_ready(range(end - 1, begin - 1, -1), at_front=True)
            else:
                self._enqueue_range(begin, end, attempts)

    def _enqueue_new(self) -> None:
        """Advance the cursor over as many messages as can be assigned soon."""
        free_count = self._available_members.least_loaded().free_count
        scan_count = min(max(len(self.members) * free_count, _SCAN_MIN), self._continued_scan_max)
        selected, last = self.position.select_new(scan_count, self._queue_space)
        self.position.pass_new(selected, last)
        for begin, end in selected.sendable:
            self._enqueue_range(begin, end, 0)

    def _enqueue_range(self, first: int, last: int, attempts: int) -> None:
        """Add messages first..last-1 with this attempt count to their partitions."""
        sequences = range(first, last)
        if attempts:
            self.attempts_by_sequence.update(dict.fromkeys(sequences, attempts))
        self._unassigned_sequences.update(dict.fromkeys(sequences))
        partitions = key_hash.stored_partitions(self.position.ring, first, last)
        self._mark_ready(self._partitions.enqueue(sequences, partitions))

    def _mark_ready(self, sequences: Iterable[int], *, at_front: bool = False) -> None:
        """Add waiting messages to the ready queues."""
        owner_by_bucket, mask = self._assignment.known_owner_by_bucket, HASH_BUCKET_MASK
        owners: dict[KeyOrderedMember, None] = {}
        ready: deque[int] | list[int]
        for sequence, partition in zip(
            sequences, self._partitions.partitions_of(sequences), strict=True
        ):
            owner = owner_by_bucket[partition & mask]
            if not partition:
                ready = self._keyless_ready
            elif owner is None:
                self._unrouted_ready.append(sequence)
                continue
            else:
                ready = owner.ready_sequences
                owners[owner] = None
            if at_front:
                ready.appendleft(sequence)
            else:
                ready.append(sequence)
        for owner in owners:
            self.update_availability(owner)

    def _distribute_ready(self, served_members: dict[KeyOrderedMember, None]) -> None:
        """Assign ready messages to members that can accept them."""
        if self._unrouted_ready and self._assignment:
            unrouted, self._unrouted_ready = self._unrouted_ready, []
            self._mark_ready(
                sorted(sequence for sequence in unrouted if sequence in self._unassigned_sequences)
            )
        members_to_serve = self._members_to_serve
        while members_to_serve and self._assignable_count > 0:
            keyed_member = next(iter(members_to_serve))
            self._assign_ready(
                keyed_member,
                keyed_member.ready_sequences,
                min(keyed_member.free_count, self._assignable_count),
                served_members,
            )
        available_members, keyless_ready = self._available_members, self._keyless_ready
        while keyless_ready and available_members and self._assignable_count > 0:
            member = available_members.least_loaded()
            fair_share = -(-len(keyless_ready) // len(available_members))
            self._assign_ready(
                member,
                keyless_ready,
                min(member.free_count, MESSAGES_PER_TURN_MAX, fair_share),
                served_members,
            )

    def _assign_ready(
        self,
        member: KeyOrderedMember,
        ready: deque[int],
        max_count: int,
        served_members: dict[KeyOrderedMember, None],
    ) -> None:
        """Assign up to `max_count` ready messages to a member, at least one if any is left."""
        sequences: list[int] = []
        pop_unassigned, missing = self._unassigned_sequences.pop, _MISSING
        while ready and len(sequences) < max_count:
            sequence = ready.popleft()
            is_unassigned = pop_unassigned(sequence, missing) is not missing
            if is_unassigned:  # Otherwise it was dropped or has expired.
                sequences.append(sequence)
        batch = AssignedBatch(sequences, self._message_sizes(sequences), 0)
        space_bytes = IN_FLIGHT_BYTES - member.assigned_bytes
        if sum(batch.sizes) > space_bytes:
            batch, remaining_batch = batch.split_at(space_bytes)
            ready.extendleft(reversed(remaining_batch.sequences))
            self._unassigned_sequences.update(dict.fromkeys(remaining_batch.sequences))
        if not sequences:
            self.update_availability(member)
            return
        self._assignable_count -= max(_BATCH_COST_MESSAGES, len(batch.sequences))
        self.position.adjust_scanned_count(-len(batch.sequences))
        self._turn_count += 1
        for part in self._split_by_attempts(batch):
            member.assign_batch(part, self._turn_count, self._clock.tick)
        served_members[member] = None

    def _split_by_attempts(self, batch: AssignedBatch) -> list[AssignedBatch]:
        """Split a batch into ascending parts with equal attempt counts."""
        attempts_of = self.attempts_by_sequence
        entries = sorted(zip(batch.sequences, batch.sizes, strict=True))
        if attempts_of.keys().isdisjoint(batch.sequences):
            sequences, sizes = zip(*entries, strict=True)
            return [AssignedBatch(list(sequences), list(sizes), 0)]
        parts: dict[int, AssignedBatch] = {}
        for sequence, size in entries:
            attempts = attempts_of.get(sequence, 0)
            part = parts.setdefault(attempts, AssignedBatch([], [], attempts))
            part.sequences.append(sequence)
            part.sizes.append(size)
        return sorted(parts.values(), key=lambda part: -part.attempts)

    def _message_sizes(self, sequences: list[int]) -> list[int]:
        ring = self.position.ring
        if len(sequences) <= _SCALAR_MESSAGES_MAX:
            return [ring.range_bytes(sequence, sequence + 1) for sequence in sequences]
        sizes: list[int] = ring.frame_sizes(np.array(sequences)).tolist()
        return sizes

    # Acknowledgements and redelivery -------------------------------------------------------------

    def mark_acked(self, sequences: list[int]) -> None:
        """Acknowledge messages and make the messages behind them in their partitions ready."""
        if len(sequences) > PLAIN_FRAMES_MAX:
            numbers = np.array(sequences)
            self.window.ack_ranges(numbers, numbers + 1)
        else:
            for sequence in sequences:
                self.window.ack_range(sequence, sequence + 1)
        self._dequeue(sequences)

    def delay_redeliveries(self, delays: Iterable[tuple[int, int, float]]) -> None:
        """Delay redeliveries.

        Each message enters its partition at once, so that later messages with its key wait for it.
        Messages that are not in memory are not delayed: their partition is unknown, and they are
        redelivered before all later messages anyway.
        """
        position, ring = self.position, self.position.ring
        in_memory = [
            (max(start, ring.floor), min(stop, ring.head), due) for start, stop, due in delays
        ]
        position.delay_redeliveries(
            (start, stop, due) for start, stop, due in in_memory if start < stop
        )
        for due, span in position.unacked.pop_delayed_spans():
            for begin, end in self.window.unacked_ranges(span.first, span.last):
                sequences = range(begin, end)
                self.attempts_by_sequence.update(dict.fromkeys(sequences, span.attempts))
                first = self._partitions.enqueue(
                    sequences, key_hash.stored_partitions(ring, begin, end)
                )
                self._unassigned_sequences.update(dict.fromkeys(set(sequences).difference(first)))
                for sequence in first:
                    position.delay_span(due, Span(sequence, sequence + 1, span.attempts))

    def apply_handover(self, handover: PositionHandover, tick_seconds: float) -> None:
        now = self._clock.now
        delays = handover.remaining_delays(self._clock, tick_seconds)
        self.delay_redeliveries((first, last, now + seconds) for first, last, seconds in delays)

    def _enqueued_in_range(self, first: int, last: int) -> list[int]:
        """Return the messages of first..last-1 that are in a partition."""
        partitions = self._partitions
        if last - first <= len(partitions):
            return [sequence for sequence in range(first, last) if sequence in partitions]
        return [sequence for sequence in partitions if first <= sequence < last]

    def _dequeue(self, sequences: list[int]) -> None:
        """Remove finished messages. The messages behind them in their partitions become ready."""
        unassigned, pop_attempts = self._unassigned_sequences, self.attempts_by_sequence.pop
        if not unassigned.keys().isdisjoint(sequences):
            count_before = len(unassigned)
            for sequence in sequences:
                unassigned.pop(sequence, None)
            self._stale_ready_count += count_before - len(unassigned)
        for sequence in sequences:
            pop_attempts(sequence, None)
        self._mark_ready(self._partitions.dequeue(sequences))
        if self._stale_ready_count > len(unassigned) + _STALE_READY_MAX:
            self._discard_stale_ready()

    def _discard_stale_ready(self) -> None:
        """Remove finished messages from the ready queues."""
        self._stale_ready_count = 0
        unassigned = self._unassigned_sequences
        for ready in (
            self._keyless_ready,
            *(member.ready_sequences for member in self.members),
        ):
            current = [sequence for sequence in ready if sequence in unassigned]
            ready.clear()
            ready.extend(current)
        self._unrouted_ready = [
            sequence for sequence in self._unrouted_ready if sequence in unassigned
        ]

    # Expiry and dropping -------------------------------------------------------------------------

    def drop_expired(self, scan_max: int) -> bool:
        position, floor_before = self.position, self.window.floor
        super().drop_expired(scan_max)
        self._dequeue_finished()
        unassigned = self._unassigned_sequences
        if unassigned and self.window.floor < position.ring.timed_until:
            position.adjust_scanned_count(len(unassigned))
            expired = self.find_expired(list(unassigned))
            if expired:
                self.skip_expired(sorted(expired))
        return self.window.floor > floor_before

    def enforce_pending_limit(self) -> int:
        position, dropped = self.position, 0
        excess = position.count_excess()
        if excess and position.delivery_policy.slow_policy == "drop_oldest":
            dropped = self._drop_unassigned(excess)
            if dropped < excess:
                dropped += position.drop_oldest(excess - dropped)
        elif excess and position.delivery_policy.slow_policy == "drop_newest":
            dropped = position.drop_newest(excess)
            if dropped < excess and not position.has_new_messages:
                dropped += self._drop_unassigned(excess - dropped, are_newest_first=True)
        position.count_dropped(dropped)
        return dropped

    def _drop_unassigned(self, count_max: int, *, are_newest_first: bool = False) -> int:
        """Drop messages in partitions that were never sent. Returns their number."""
        self._dequeue_finished()
        waiting = (
            reversed(self._unassigned_sequences)
            if are_newest_first
            else iter(self._unassigned_sequences)
        )
        never_sent = (s for s in waiting if s not in self.attempts_by_sequence)
        sequences = list(islice(never_sent, count_max))
        if sequences:
            self.position.skip_unsent(sequences)
            self._dequeue(sequences)
        return len(sequences)

    # Statistics and checks -----------------------------------------------------------------------

    def build_delivery_state(self) -> DeliveryState:
        self._dequeue_finished()
        return (
            super()
            .build_delivery_state()
            ._replace(blocked_by_key_count=len(self._unassigned_sequences))
        )

    def statistics(self) -> SubscriptionStatistics:
        self._dequeue_finished()
        result, waiting = super().statistics(), len(self._unassigned_sequences)
        return replace(
            result, in_flight=result.in_flight - waiting, waiting=result.waiting + waiting
        )

    def check_invariants(self) -> None:
        self._dequeue_finished()
        super().check_invariants()
        self._partitions.check_invariants()
        assigned: list[int] = []
        for member in self.members:
            assigned += [s for span in member.iter_spans() for s in range(span.first, span.last)]
            ready = [
                sequence
                for sequence in member.ready_sequences
                if sequence in self._unassigned_sequences
            ]
            partitions = self._partitions.partitions_of(ready)
            assert all(
                self._assignment.owner_of(partition) is member for partition in partitions
            ), "a message is ready for a member that does not own its partition"
            assert (member in self._members_to_serve) == bool(
                member.ready_sequences and member.free_count
            )
            assert (member in self._assignment) == (not member.is_unresponsive)
        redelivery_spans = [
            span for span in self.position.unacked.iter_own_spans() if self._is_enqueued(span)
        ]
        assigned += [
            s
            for span in redelivery_spans
            for s in range(span.first, span.last)
            if s in self._partitions
        ]
        left_out = set(self._partitions) - {*assigned, *self._unassigned_sequences}
        assert not left_out or self.position.unacked.is_discarding, (
            f"messages in partitions are neither assigned nor unassigned: {left_out}"
        )
        assert all(sequence in self._partitions for sequence in assigned)
        assert all(sequence in self._partitions for sequence in self._unassigned_sequences)
        assert not set(assigned) & set(self._unassigned_sequences)
        assert all(self._partitions.is_at_front(sequence) for sequence in assigned), (
            "two messages of one partition are assigned"
        )
        queues = (
            self._keyless_ready,
            self._unrouted_ready,
            *(m.ready_sequences for m in self.members),
        )
        ready = sorted(s for queue in queues for s in queue if s in self._unassigned_sequences)
        assert ready == sorted(
            s for s in self._unassigned_sequences if self._partitions.is_at_front(s)
        )
        assert set(self.attempts_by_sequence) <= set(self._partitions)


def _to_ranges(sequences: list[int]) -> selection.Ranges:
    """Return ascending sequences as half-open ranges."""
    ranges: selection.Ranges = []
    for sequence in sequences:
        if ranges and ranges[-1][1] == sequence:
            ranges[-1] = (ranges[-1][0], sequence + 1)
        else:
            ranges.append((sequence, sequence + 1))
    return ranges
