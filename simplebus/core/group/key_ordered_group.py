"""A group in which messages of one key go to one member, one after the other.

Rule 1: of each lane (see `lanes`) one message at most is handed out. What was sent and comes back
is still first in its lane: it is sent again before those behind it are sent, whoever gets it.
Rule 2: who gets a lane follows from which members there are (see `key_owners`). A member that has
no room lets its lanes wait, and only those; one that takes nothing in time counts as gone until it
does.
Rule 3: a message is looked at once, when the cursor passes it. So many may wait behind the cursor
and no more: with them the group looks no further.

    ring      floor ─ in flight, or waiting in a lane ─ cursor ─ not looked at yet ─ head
    lanes     12 │ 15 19     13 │     first one │ those that wait for it
    members   ready to be handed out ┆ handed out ┆ sent
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import islice
from typing import Any, Final

import numpy as np

from simplebus.core.group import key_hash
from simplebus.core.group.group import MESSAGES_PER_TURN_MAX, Group, GroupMember
from simplebus.core.group.key_assignment import HASH_BUCKET_MASK, KeyAssignment
from simplebus.core.group.key_ordered_member import AssignedBatch, KeyOrderedMember
from simplebus.core.group.partition_queues import PartitionQueues
from simplebus.core.limits import (
    IN_FLIGHT_BYTES,
    LANES_MESSAGES_MAX,
    PLAIN_FRAMES_MAX,
    REDELIVERY_MESSAGES,
)
from simplebus.core.protocol.frames import Integers
from simplebus.core.redelivery.ack_timer import Span
from simplebus.core.redelivery.delivery_state import Standing
from simplebus.core.redelivery.handover import Left
from simplebus.core.session.outbox import Outbox
from simplebus.core.statistics import SubscriptionStatistics
from simplebus.core.subscription import selection
from simplebus.core.subscription.backlog import BacklogCounter

# So few are handled one after the other: arrays have a price of their own.
_SCALAR_MESSAGES_MAX = 4

# Looked at at once, at least, when somebody has room.
_SCAN_MIN = 16

# What is ready and dealt with is thrown away when it is the most, and not so little.
_STALE_READY_MAX = 64
_MISSING: Final = False


class KeyOrderedGroup(Group):
    """See the module's law."""

    is_key_ordered = True

    def __init__(self, **options: Any) -> None:
        self._partitions = PartitionQueues()
        """What the cursor has passed and is not dealt with, but for what opens later."""
        self.attempts_by_sequence: dict[int, int] = {}
        """How often each of these was sent, if it ever was."""
        self._unassigned_sequences: dict[int, None] = {}
        """Those of them that were never handed out."""
        self._assignment: KeyAssignment[KeyOrderedMember] = KeyAssignment()
        self._members_to_serve: dict[KeyOrderedMember, None] = {}
        """Members for whom something is ready, and who may have room."""
        self._keyless_ready: deque[int] = deque()
        """What has no key, and may be handed out."""
        self._unrouted_ready: list[int] = []
        """What may be handed out, to whom is to be found out."""
        self._joined_count = 0
        self._is_distribution_requested = False
        """Whether it is to be woken to hand out what may be ready."""
        self._stale_ready_count = 0
        """About how many of those that are ready are dealt with since."""
        super().__init__(**options)
        self._has_unsorted_redeliveries = bool(self._redelivery_queue)

    @property
    def can_suspend_reading(self) -> bool:
        return not len(self._partitions)

    # What members ask ----------------------------------------------------------------------------

    def build_spans(self, sequences: Iterable[int]) -> list[Span]:
        """These, ascending, and how often they were sent."""
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
        """Those that have expired."""
        ring = self.ring
        expires = ring.columns.expires
        if expires is None or min(sequences) >= ring.timed_until:
            return []
        numbers = np.array(sequences)
        late: list[int] = numbers[expires[ring.slots(numbers)] <= self._clock.now].tolist()
        return late

    def skip_expired(self, expired: list[int]) -> None:
        """These, ascending, have expired, and nobody holds them. Others may follow them."""
        ranges = _to_ranges(expired)
        self._skip_unsendable(
            selection.MessageSelection([], [], ranges, ranges), expired[-1] + 1, attempts=0
        )
        self._request_distribution()

    def copy_messages(self, sequences: list[int], attempts: int, tick: int) -> tuple[bytes, int]:
        """Copies of these, which were sent so often before, and when they are overdue."""
        ring, timer_index = self.ring, tick % self._timer_index_modulus
        if len(sequences) == 1:
            ring.stamp(sequences[0], sequences[0] + 1, timer_index)
            data = ring.frame(sequences[0])
        else:
            data = ring.joined(np.array(sequences), timer_index)
        often = max(attempts + 1, 1)
        self.attempts_by_sequence.update(dict.fromkeys(sequences, often))
        if attempts > 0:
            self.redelivered += len(sequences)
        else:
            self.delivered += len(sequences)
        return data, tick + self.delivery_policy.pause(often)

    # Members -------------------------------------------------------------------------------------

    def _create_member(
        self, outbox: Outbox, subscription_number: int, in_flight_max: int, name: str
    ) -> GroupMember:
        self._joined_count += 1
        identity = f"{name}/{subscription_number}" if name else f"{self._joined_count}"
        member = KeyOrderedMember(self, outbox, subscription_number, in_flight_max, identity)
        self._assign_partitions(member)
        return member

    def remove_member(self, member: GroupMember) -> None:
        assert isinstance(member, KeyOrderedMember)
        super().remove_member(member)
        self.update_availability(member)
        self._unassign_partitions(member)

    def _reclaim_unsent(self, member: GroupMember) -> None:
        assert isinstance(member, KeyOrderedMember)
        super()._reclaim_unsent(member)
        self._has_unsorted_redeliveries = True
        self._unassign_partitions(member)

    def _unassign_partitions(self, member: KeyOrderedMember) -> None:
        """It has no lanes any longer: what was ready for it is for others."""
        if member in self._assignment:
            self._assignment.remove_member(member)
        self._reclaim_ready(member)

    def restore_member(self, member: KeyOrderedMember) -> None:
        """One that was late takes something."""
        if member in self.members and member not in self._assignment:
            self._assign_partitions(member)
            self._request_distribution()

    def _iter_members(self) -> Iterator[KeyOrderedMember]:
        for member in self.members:
            assert isinstance(member, KeyOrderedMember)
            yield member

    def _assign_partitions(self, member: KeyOrderedMember) -> None:
        """It has lanes from now on: what was ready for who had them may be for it."""
        for former in self._assignment.add_member(member, member.identity):
            self._reclaim_ready(former)

    def _reclaim_ready(self, member: KeyOrderedMember) -> None:
        self._unrouted_ready += member.ready_sequences
        member.ready_sequences.clear()
        self._members_to_serve.pop(member, None)

    def update_availability(self, member: GroupMember) -> None:
        super().update_availability(member)
        assert isinstance(member, KeyOrderedMember)
        if member.ready_sequences and member.free_count and member in self.members:
            self._members_to_serve[member] = None
        else:
            self._members_to_serve.pop(member, None)

    # Handing out ---------------------------------------------------------------------------------

    def distribute_messages(self) -> list[GroupMember]:
        woken: dict[GroupMember, None] = {}
        if self._is_scan_unfinished or not self.members:
            return []
        self.scanned_count = 0
        self._distribute_ready(woken)
        while self.scanned_count < self.scan_limit:
            if self._can_requeue:
                self._enqueue_redeliveries()
            elif self._can_enqueue_new:
                self._enqueue_new()
            else:
                break
            self._distribute_ready(woken)
        self.scan_limit = type(self).scan_limit
        if self._can_requeue or self._can_enqueue_new:
            self._is_scan_unfinished = True
            self._schedule_wakeup(self._clock.now)
        return list(woken)

    def _request_distribution(self) -> None:
        """Something may be ready to be handed out, and nobody is about to do that."""
        if self.members:
            self._is_distribution_requested = True
            self._schedule_wakeup(self._clock.now)

    @property
    def next_wakeup(self) -> float:
        return self._clock.now if self._is_distribution_requested else super().next_wakeup

    @property
    def _queue_room(self) -> int:
        """How many messages more may wait behind the cursor; none while nobody takes any."""
        return (
            LANES_MESSAGES_MAX - len(self._unassigned_sequences) if self._available_members else 0
        )

    @property
    def _can_enqueue_new(self) -> bool:
        return (
            not self._redelivery_queue
            and self.window.cursor < self.ring.head
            and self._queue_room > 0
        )

    @property
    def _can_requeue(self) -> bool:
        if not self._redelivery_queue:
            return False
        if self._has_unsorted_redeliveries:
            self._redelivery_queue = deque(
                sorted(self._redelivery_queue, key=self._redelivery_order)
            )
            self._has_unsorted_redeliveries = False
        return self._is_enqueued(self._redelivery_queue[0]) or self._queue_room > 0

    def _is_enqueued(self, span: Span) -> bool:
        """Whether these messages are in their lanes already: all that are not done, or none."""
        at = max(span.first, self.window.floor)
        while at < span.last and at not in self._partitions:
            end = min(span.last, at + REDELIVERY_MESSAGES)
            unacked = self._unsettled_ranges(at, end)
            if unacked:
                return unacked[0][0] in self._partitions
            at = end
        return at < span.last

    def _redelivery_order(self, span: Span) -> tuple[bool, bool, int]:
        """Who is in a lane goes first; then who was sent, and so was first in his lane before."""
        return not self._is_enqueued(span), not span.attempts, span.first

    def _enqueue_redeliveries(self) -> None:
        """What comes back may be handed out; what is new behind the cursor goes into its lane."""
        found = self._select_redeliveries(min(max(self._queue_room, 1), REDELIVERY_MESSAGES))
        if found is None:
            return
        span, last, picked = found
        is_inside = picked.sendable[0][0] in self._partitions
        attempts = span.attempts
        self._consume_redeliveries(span, last, picked)
        for begin, end in picked.sendable:
            if is_inside:
                self._unassigned_sequences.update(dict.fromkeys(range(begin, end)))
                self._mark_ready(range(end - 1, begin - 1, -1), at_front=True)
            else:
                self._enqueue_range(begin, end, attempts)

    def _enqueue_new(self) -> None:
        """The cursor moves on, over as many as may be handed out soon."""
        room = self._available_members.least_loaded().free_count
        many = min(max(len(self.members) * room, _SCAN_MIN), REDELIVERY_MESSAGES)
        picked, last = self._select_new(many, self._queue_room)
        self._advance_cursor(last)
        self._skip_unsendable(picked, last, attempts=0)
        for begin, end in picked.sendable:
            self._enqueue_range(begin, end, 0)

    def _enqueue_range(self, first: int, last: int, attempts: int) -> None:
        """Messages first..last-1, which were sent so often, go into their lanes."""
        sequences = range(first, last)
        if attempts:
            self.attempts_by_sequence.update(dict.fromkeys(sequences, attempts))
        self._unassigned_sequences.update(dict.fromkeys(sequences))
        self._mark_ready(
            self._partitions.enqueue(sequences, key_hash.stored_partitions(self.ring, first, last))
        )

    def _mark_ready(self, sequences: Iterable[int], *, at_front: bool = False) -> None:
        """These, which wait, may be handed out."""
        table, mask = self._assignment.owner_by_bucket, HASH_BUCKET_MASK
        owners: dict[KeyOrderedMember, None] = {}
        ready: deque[int] | list[int]
        for sequence, lane in zip(
            sequences, self._partitions.partitions_of(sequences), strict=True
        ):
            owner = table[lane & mask]
            if not lane:
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

    def _distribute_ready(self, served_members: dict[GroupMember, None]) -> None:
        """Hand out what is ready, to whom has room."""
        if self._unrouted_ready and self._assignment:
            nobodys, self._unrouted_ready = self._unrouted_ready, []
            self._mark_ready(sorted(s for s in nobodys if s in self._unassigned_sequences))
        callers = self._members_to_serve
        while callers:
            caller = next(iter(callers))
            self._assign_ready(caller, caller.ready_sequences, caller.free_count, served_members)
        takers, anybodys = self._available_members, self._keyless_ready
        while anybodys and takers:
            member = takers.least_loaded()
            fair = -(-len(anybodys) // len(takers))
            assert isinstance(member, KeyOrderedMember)
            self._assign_ready(
                member,
                anybodys,
                min(member.free_count, MESSAGES_PER_TURN_MAX, fair),
                served_members,
            )

    def _assign_ready(
        self,
        member: KeyOrderedMember,
        ready: deque[int],
        max_count: int,
        served_members: dict[GroupMember, None],
    ) -> None:
        """Hand a member up to so many of these, one at least if there is any left."""
        sequences: list[int] = []
        take, is_gone = self._unassigned_sequences.pop, _MISSING
        while ready and len(sequences) < max_count:
            sequence = ready.popleft()
            if take(sequence, is_gone) is not is_gone:  # Else it was dropped, or has expired.
                sequences.append(sequence)
        handed = AssignedBatch(sequences, self._message_sizes(sequences), 0)
        space = IN_FLIGHT_BYTES - member.assigned_bytes
        if sum(handed.sizes) > space:
            handed, rest = handed.split_at(space)
            ready.extendleft(reversed(rest.sequences))
            self._unassigned_sequences.update(dict.fromkeys(rest.sequences))
        if not sequences:
            self.update_availability(member)
            return
        self.scanned_count -= len(handed.sequences)
        self._record_turn(member)
        for part in self._split_by_attempts(handed):
            member.assign_batch(part, self._clock.tick)
        served_members[member] = None

    def _split_by_attempts(self, batch: AssignedBatch) -> list[AssignedBatch]:
        """The same in parts that were sent as often, each ascending."""
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
        ring = self.ring
        if len(sequences) <= _SCALAR_MESSAGES_MAX:
            return [ring.size(sequence, sequence + 1) for sequence in sequences]
        begins, ends = ring.places(np.array(sequences))
        sizes: list[int] = (ends - begins).tolist()
        return sizes

    # What comes back -----------------------------------------------------------------------------

    def ack_member_range(self, member: GroupMember, first: int, last: int) -> bool:
        assert isinstance(member, KeyOrderedMember)
        lost = member.remove_in_flight_range(first, last)
        self._mark_acked(lost)
        return bool(lost)

    def ack_member_ranges(
        self, member: GroupMember, firsts: Integers, lasts: Integers
    ) -> list[tuple[int, int]]:
        assert isinstance(member, KeyOrderedMember)
        lost = member.remove_in_flight_ranges(firsts, lasts)
        self._mark_acked(lost)
        held = np.sort(np.array(lost, np.int64))
        missed = np.flatnonzero(held.searchsorted(lasts) <= held.searchsorted(firsts))
        return list(zip(firsts[missed].tolist(), lasts[missed].tolist(), strict=True))

    def _mark_acked(self, sequences: list[int]) -> None:
        """These are processed."""
        if len(sequences) > PLAIN_FRAMES_MAX:
            numbers = np.array(sequences)
            self.window.ack(numbers, numbers + 1)
        else:
            for sequence in sequences:
                self.window.ack_range(sequence, sequence + 1)
        self._dequeue(sequences)

    def nack_member_range(
        self,
        member: GroupMember,
        first: int,
        last: int,
        delay_seconds: float | None,
        tick: int,
        *,
        attempt: int = 0,
        error: str = "",
    ) -> None:
        super().nack_member_range(
            member, first, last, delay_seconds, tick, attempt=attempt, error=error
        )
        self._has_unsorted_redeliveries = True

    def extend_member_ack_timeout(
        self, member: GroupMember, first: int, last: int, tick: int, attempt: int = 0
    ) -> None:
        assert isinstance(member, KeyOrderedMember)
        member.extend_ack_timeouts(first, last, tick, attempt)

    def tick(self, tick: int) -> None:
        super().tick(tick)
        self._has_unsorted_redeliveries = True

    def handle_wakeup(self) -> bool:
        is_nudged, self._is_distribution_requested = self._is_distribution_requested, False
        self._has_unsorted_redeliveries = True
        return super().handle_wakeup() or is_nudged

    def ack(self, first: int, last: int) -> None:
        for span in self._find_sent_spans(first, last):
            self._mark_done(span.first, span.last)

    def terminate(self, first: int, last: int, *, attempt: int = 0, error: str = "") -> None:
        self._terminate_spans(self._find_sent_spans(first, last), error)
        self._has_unsorted_redeliveries = True

    def _find_sent_spans(self, first: int, last: int) -> list[Span]:
        """What of first..last-1 was sent to somebody and is not acknowledged."""
        return [
            Span(a, b, span.attempts)
            for span in list(self._iter_spans())
            if span.attempts > 0
            for a, b in self.window.unacked(max(first, span.first), min(last, span.last))
        ]

    def delay_redeliveries(self, delays: Iterable[tuple[int, int, float]]) -> None:
        """The same; each goes into its lane at once, so that those behind it wait for it. What is
        not in memory is not put off: its lane is not known, and it comes before them as well."""
        ring = self.ring
        there = [(max(a, ring.floor), min(b, ring.head), due) for a, b, due in delays]
        super().delay_redeliveries((a, b, due) for a, b, due in there if a < b)
        later, self._delayed_spans = sorted(self._delayed_spans), []
        for due, _, span in later:
            for begin, end in self.window.unacked(span.first, span.last):
                sequences = range(begin, end)
                self.attempts_by_sequence.update(dict.fromkeys(sequences, span.attempts))
                first = self._partitions.enqueue(
                    sequences, key_hash.stored_partitions(ring, begin, end)
                )
                self._unassigned_sequences.update(dict.fromkeys(set(sequences).difference(first)))
                for sequence in first:
                    self._delay_span(due, Span(sequence, sequence + 1, span.attempts))

    def apply_handover(self, handover: Left, tick_seconds: float) -> None:
        now = self._clock.now
        pauses = handover.pauses(self._clock, tick_seconds)
        self.delay_redeliveries((first, last, now + pause) for first, last, pause in pauses)

    def _mark_done(self, first: int, last: int) -> None:
        super()._mark_done(first, last)
        self._dequeue(self._enqueued_in_range(first, last))

    def _remove_from_waiting(self, ranges: selection.Ranges) -> None:
        super()._remove_from_waiting(ranges)
        for first, last in ranges:  # Those behind them in their lanes need not wait for a place.
            self._dequeue(self._enqueued_in_range(first, last))

    def _enqueued_in_range(self, first: int, last: int) -> list[int]:
        """What of first..last-1 is in a lane."""
        lanes = self._partitions
        if last - first <= len(lanes):
            return [sequence for sequence in range(first, last) if sequence in lanes]
        return [sequence for sequence in lanes if first <= sequence < last]

    def _dequeue(self, sequences: list[int]) -> None:
        """These are dealt with: those behind them may be handed out."""
        waiting, forget = self._unassigned_sequences, self.attempts_by_sequence.pop
        if not waiting.keys().isdisjoint(sequences):
            before = len(waiting)
            for sequence in sequences:
                waiting.pop(sequence, None)
            self._stale_ready_count += before - len(waiting)
        for sequence in sequences:
            forget(sequence, None)
        self._mark_ready(self._partitions.dequeue(sequences))
        if self._stale_ready_count > len(waiting) + _STALE_READY_MAX:
            self._discard_stale_ready()

    def _discard_stale_ready(self) -> None:
        """Of what was ready, much is dealt with: let go of it."""
        self._stale_ready_count = 0
        waiting = self._unassigned_sequences
        for ready in (self._keyless_ready, *(m.ready_sequences for m in self._iter_members())):
            left = [sequence for sequence in ready if sequence in waiting]
            ready.clear()
            ready.extend(left)
        self._unrouted_ready = [
            sequence for sequence in self._unrouted_ready if sequence in waiting
        ]

    # Giving up -----------------------------------------------------------------------------------

    def purge(self, first: int, last: int) -> None:
        super().purge(first, last)
        self._request_distribution()

    def _skip_below(self, floor: int) -> int:
        gone = self._enqueued_in_range(self.window.floor, floor)
        lost = super()._skip_below(floor)
        self._dequeue(gone)
        return lost

    def drop_expired(self, scan_max: int) -> bool:
        before = self.window.floor
        super().drop_expired(scan_max)
        waiting = self._unassigned_sequences
        if waiting and self.window.floor < self.ring.timed_until:
            self.scanned_count += len(waiting)
            late = self.find_expired(list(waiting))
            if late:
                self.skip_expired(sorted(late))
        return self.window.floor > before

    def _drop_oldest(self, count: int, backlog_counter: BacklogCounter) -> int:
        never_sent = (s for s in self._unassigned_sequences if s not in self.attempts_by_sequence)
        dropped = self._drop_unsent(list(islice(never_sent, count)))
        if dropped < count:
            dropped += super()._drop_oldest(count - dropped, backlog_counter)
        return dropped

    def _drop_newest(self, count: int, backlog_counter: BacklogCounter) -> int:
        dropped = super()._drop_newest(count, backlog_counter)
        if dropped < count and self.window.cursor == self.ring.head:
            never_sent = (
                s
                for s in reversed(self._unassigned_sequences)
                if s not in self.attempts_by_sequence
            )
            dropped += self._drop_unsent(list(islice(never_sent, count - dropped)))
        return dropped

    def _drop_unsent(self, sequences: list[int]) -> int:
        """Leave out these, which were never sent. Returns how many they are."""
        for sequence in sequences:
            self.window.ack_range(sequence, sequence + 1)
        self._skipped_count += len(sequences)
        self._dequeue(sequences)
        self._on_floor_moved()
        return len(sequences)

    # Looks ---------------------------------------------------------------------------------------

    def build_delivery_state(self) -> Standing:
        return super().build_delivery_state()._replace(behind=len(self._unassigned_sequences))

    def statistics(self) -> SubscriptionStatistics:
        found, waiting = super().statistics(), len(self._unassigned_sequences)
        return replace(found, in_flight=found.in_flight - waiting, waiting=found.waiting + waiting)

    def _iter_spans(self) -> Iterator[Span]:
        yield from super()._iter_spans()
        yield from self.build_spans(self._unassigned_sequences)

    def check_invariants(self) -> None:
        super().check_invariants()
        self._partitions.check_invariants()
        out: list[int] = []
        for member in self._iter_members():
            member.check_invariants()
            out += [s for span in member.iter_spans() for s in range(span.first, span.last)]
            ready = [
                sequence
                for sequence in member.ready_sequences
                if sequence in self._unassigned_sequences
            ]
            lanes = self._partitions.partitions_of(ready)
            assert all(self._assignment.owner_of(lane) is member for lane in lanes), "not its lane"
            assert (member in self._members_to_serve) == bool(
                member.ready_sequences and member.free_count
            )
            assert (member in self._assignment) == (not member.is_unresponsive)
        coming = [span for span in super()._iter_spans() if self._is_enqueued(span)]
        out += [s for span in coming for s in range(span.first, span.last) if s in self._partitions]
        assert sorted({*out, *self._unassigned_sequences}) == sorted(self._partitions), (
            "in a lane and nowhere else"
        )
        assert not set(out) & set(self._unassigned_sequences)
        assert all(self._partitions.is_at_front(sequence) for sequence in out), (
            "two of a lane are out"
        )
        queues = (
            self._keyless_ready,
            self._unrouted_ready,
            *(m.ready_sequences for m in self._iter_members()),
        )
        ready = sorted(s for queue in queues for s in queue if s in self._unassigned_sequences)
        assert ready == sorted(
            s for s in self._unassigned_sequences if self._partitions.is_at_front(s)
        )
        assert set(self.attempts_by_sequence) <= set(self._partitions)


def _to_ranges(sequences: list[int]) -> selection.Ranges:
    """Ascending sequences as ranges."""
    ranges: selection.Ranges = []
    for sequence in sequences:
        if ranges and ranges[-1][1] == sequence:
            ranges[-1] = (ranges[-1][0], sequence + 1)
        else:
            ranges.append((sequence, sequence + 1))
    return ranges
