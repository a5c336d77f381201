"""Queue groups: subscriptions that share one position, so that each message goes to one member.

A group assigns messages to the member with the fewest in flight, a few at a time. Only the member
that was sent a message can acknowledge it, reject it or extend its ack timeout. Messages that a
member leaves behind, does not read or does not acknowledge in time are assigned to another member.

    position  floor ─ assigned ─ cursor ─ head
    members   a: 4 5 ┆ 9     b: 6 7 ┆ 8      sent ┆ assigned but not sent
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Iterable, Iterator
from dataclasses import replace
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np

from simplebus.core.clock import BrokerClock
from simplebus.core.group.least_loaded import LeastLoadedMembers
from simplebus.core.limits import (
    GROUP_IN_FLIGHT_MAX,
    GROUP_IN_FLIGHT_MESSAGES,
    IN_FLIGHT_BYTES,
    LONG_NACK_MESSAGES,
    PLAIN_FRAMES_MAX,
    RECLAIMED_MEMBERS_PER_TURN,
    RECLAIMED_RANGES_PER_TURN,
    REDELIVERY_BYTES,
    REDELIVERY_MESSAGES,
    SCAN_MESSAGES_MAX,
)
from simplebus.core.outbox import Outbox
from simplebus.core.protocol.frames import Flags, Integers
from simplebus.core.redelivery.delivery_state import DeliveryState, ScheduledSets
from simplebus.core.redelivery.handover import PositionHandover
from simplebus.core.redelivery.redelivery_queue import SpanSet
from simplebus.core.redelivery.sequence_set import SequenceSet, find_part_end
from simplebus.core.redelivery.timer_wheel import Span, TimerWheel
from simplebus.core.ring.ring import Ring
from simplebus.core.statistics import SubscriptionStatistics
from simplebus.core.subscription.copied_frames import CopiedFrames
from simplebus.core.subscription.delayed_wakeups import NEVER, DelayedWakeups
from simplebus.core.subscription.position import Position
from simplebus.core.subscription.selection import MessageSelection, Ranges

# Messages assigned to one member at once, at most.
MESSAGES_PER_TURN_MAX = 64

# Messages scanned before the group continues in a later turn, so that a long scan does not delay
# other sessions.
FIRST_SCAN_MAX = 512

# Assignments to members before the group continues in a later turn: each takes 20 microseconds.
ASSIGNMENTS_PER_TURN_MAX = 48

# The bytes of this many ranges or more are measured with arrays, unless the ranges are long.
_ARRAY_RANGES_MIN = 16
_ARRAY_MESSAGES_PER_RANGE_MAX = 8

# Redelivered spans whose messages are counted to divide them between the members.
_COUNTED_SPANS_MAX = 16

# A redelivered span costs as much as scanning this many messages, even if it is assigned.
SPAN_SCAN_COST = 32


class GroupMember:
    """Membership of one session in a group, as a `SendSource` of the session's outbox.

    It is a `MessageHolder` of the group's position.
    """

    def __init__(
        self,
        group: AnyGroup,
        outbox: Outbox,
        subscription_number: int,
        request_number: int,
        in_flight_max: int,
    ) -> None:
        self.group = group
        self.position = group.position
        """Position of the group."""
        self.outbox = outbox
        self.subscription_number = subscription_number
        self.class_id = group.position.class_id
        self.window = group.position.window
        """Ack window of the group."""
        self.in_flight_max = in_flight_max
        self.request_number = request_number
        """Number of the Subscribe request that created this member."""
        self.is_queued = False
        self.attempt = 1
        self.scanned_count = 0
        self.assigned_count = 0
        """Messages assigned and not acknowledged."""
        self.assigned_bytes = 0
        """Bytes of the messages assigned and not acknowledged."""
        self.last_assigned_turn = 0
        """Turn of the group in which this member was last assigned messages."""
        self.assigned_tick = 0
        """Tick at which the oldest unsent message was assigned."""
        self.is_unresponsive = False
        """True if the member did not read its last assignment within the ack timeout."""
        self._sendable_count: int | None = None
        """Messages that may still be sent, assigned or not; None for no limit."""
        self._ack_timer = TimerWheel()
        """Messages in flight, by the tick at which they are overdue."""
        self._unsent: dict[int, SequenceSet] = {}
        """Messages assigned and not sent yet, by attempts. No set is empty."""

    @property
    def has_frames_to_copy(self) -> bool:
        return bool(self._unsent)

    @property
    def has_work(self) -> bool:
        return bool(self._unsent)

    @property
    def has_messages(self) -> bool:
        return self.assigned_count > 0

    @property
    def free_count(self) -> int:
        """Number of messages that may still be assigned to the member."""
        if self.is_unresponsive or self.assigned_bytes >= IN_FLIGHT_BYTES:
            return 0
        free_count = self.in_flight_max - self.assigned_count
        if self._sendable_count is not None:
            free_count = min(free_count, self._sendable_count - self.unsent_count)
        return max(0, free_count)

    def iter_spans(self) -> Iterator[Span]:
        """Yield the spans of all assigned messages, sent or not."""
        for attempts, sequences in self._unsent.items():
            yield from (Span(first, last, attempts) for first, last in sequences)
        yield from self._ack_timer

    @property
    def unsent_count(self) -> int:
        """Messages assigned and not sent yet."""
        return sum(map(len, self._unsent.values()))

    def in_flight_sets(self) -> ScheduledSets:
        """Return the messages in flight; only some of them if there are many."""
        return self._ack_timer.scheduled_sets()

    def assign(self, spans: list[Span], turn: int, tick: int) -> None:
        """Queue `spans` for sending to this member, in the given turn of the group."""
        if not self._unsent:
            self.assigned_tick = tick
        self.last_assigned_turn = turn
        for span in spans:
            unsent = self._unsent.setdefault(span.attempts, SequenceSet())
            unsent.add(span.first, span.last)
            self.assigned_count += span.last - span.first
            self.assigned_bytes += self.position.ring.range_bytes(span.first, span.last)
        self.group.update_availability(self)
        self.outbox.enqueue(self)

    def pop_unsent(self) -> list[SpanSet]:
        """Remove the messages that were assigned and not sent. Returns them as (attempts,
        messages).
        """
        sets = list(self._unsent.items())
        self._unsent.clear()
        self._subtract_sets(sequences for _, sequences in sets)
        return sets

    def pop_in_flight(self) -> ScheduledSets:
        """Remove the messages in flight of a member that leaves and has no unsent messages.

        Returns them as (tick at which they are overdue, attempts, messages).
        """
        self.assigned_count = self.assigned_bytes = 0
        return self._ack_timer.pop_all_sets()

    def _subtract_sets(self, sets: Iterable[SequenceSet]) -> None:
        """Subtract the stored messages of sets from the counts."""
        ring = self.position.ring
        for sequences in sets:
            self._subtract(len(sequences), _measure_bytes(ring, sequences))

    def _subtract(self, count: int, size_bytes: int) -> None:
        """Subtract `count` messages of `size_bytes` bytes from the counts."""
        self.assigned_count -= count
        self.assigned_bytes -= size_bytes
        self.group.update_availability(self)

    def has_in_flight(
        self, first: int, last: int, attempt: int, *, include_waiting: bool = False
    ) -> bool:
        """Return True if any of first..last-1 is in flight to this member.

        With `attempt` other than 0 only messages of that delivery attempt count.
        """
        return self._ack_timer.overlaps(first, last, attempt)

    @property
    def has_other_members(self) -> bool:
        """True if the group has other members."""
        return len(self.group.members) > 1

    def find_part_end(self, first: int, last: int, attempt: int) -> int:
        """Return the end of the front of first..last-1 that one turn can process."""
        sets = [sequences for _, _, sequences in self._ack_timer.scheduled_sets(attempt)]
        return find_part_end(sets, first, last, LONG_NACK_MESSAGES)

    def iter_in_flight(self) -> Iterator[tuple[int, Span]]:
        """Yield the spans in flight, each with the tick at which it is overdue."""
        for due, attempts, sequences in self._ack_timer.scheduled_sets():
            for first, last in sequences:
                yield due, Span(first, last, attempts)

    def remove_in_flight(self, first: int, last: int, attempt: int = 0) -> list[Span]:
        """Remove first..last-1 from the messages in flight and return the removed spans.

        With `attempt` other than 0 only messages of that delivery attempt are removed.
        """
        spans = self._ack_timer.remove(first, last, attempt)
        if spans:
            ring = self.position.ring
            size_bytes = sum(ring.range_bytes(span.first, span.last) for span in spans)
            self._subtract(_count_messages(spans), size_bytes)
        return spans

    def discard_range(self, first: int, last: int) -> None:
        """Remove first..last-1, sent or not."""
        if not self.assigned_count:
            return
        removed = self._ack_timer.pop_range(first, last)
        for attempts, sequences in list(self._unsent.items()):
            removed.append(sequences.pop(first, last))
            if not sequences:
                del self._unsent[attempts]
        self._subtract_sets(filter(None, removed))

    def pop_overdue(self, tick: int) -> list[SpanSet]:
        """Remove the messages that are overdue at `tick`. Returns them as (attempts, messages)."""
        if not self._ack_timer:
            return []
        sets = self._ack_timer.pop_due_sets(tick)
        self._subtract_sets(sequences for _, sequences in sets)
        return sets

    # Acknowledgements ----------------------------------------------------------------------------

    def ack_range(self, first: int, last: int) -> bool:
        """Acknowledge the messages of first..last-1 that this member holds.

        Returns True if it holds any of them.
        """
        acked = self._ack_timer.pop_range(first, last)
        for sequences in acked:
            self._ack_set(sequences)
        return bool(acked)

    def ack_ranges(self, firsts: Integers, lasts: Integers) -> Flags:
        """Acknowledge many ranges. Returns True for each of which the member holds messages."""
        if firsts.size <= PLAIN_FRAMES_MAX:
            ranges = zip(firsts.tolist(), lasts.tolist(), strict=True)
            return np.array([self.ack_range(*each) for each in ranges], np.bool_)
        acked = self._ack_timer.pop_set(SequenceSet.from_ranges(firsts, lasts))
        if not acked:
            return np.zeros(firsts.size, np.bool_)
        for sequences in acked:
            self._ack_set(sequences)
        return SequenceSet.union(acked).find_overlapping(firsts, lasts)

    def _ack_set(self, sequences: SequenceSet) -> None:
        """Acknowledge messages that were in flight."""
        if sequences.range_count > PLAIN_FRAMES_MAX:
            firsts, lasts = map(np.array, sequences.bounds)
            size_bytes = _measure_ranges(self.position.ring, firsts, lasts)
            self._subtract(len(sequences), size_bytes)
            self.window.ack_ranges(firsts, lasts)
        else:
            self._subtract_sets([sequences])
            for begin, end in sequences:
                self.window.ack_range(begin, end)

    def nack(
        self,
        first: int,
        last: int,
        delay_seconds: float | None,
        tick: int,
        *,
        attempt: int = 0,
        error: str = "",
    ) -> None:
        """Reject the messages of first..last-1 that this member holds. See `Position.nack`."""
        for span in self.remove_in_flight(first, last, attempt):
            self.position.reject_span(span, delay_seconds, tick, error)

    def terminate(self, first: int, last: int, *, attempt: int = 0, error: str = "") -> None:
        """Give up the messages of first..last-1 that this member holds.

        See `Position.terminate`.
        """
        self.position.terminate_spans(self.remove_in_flight(first, last, attempt), error)
        self.group.mark_unsorted()

    def extend_ack_timeout(self, first: int, last: int, tick: int, attempt: int = 0) -> None:
        """Restart the ack timeout of the messages of first..last-1 that this member holds."""
        delay_ticks = self.position.delivery_policy.redelivery_delay_ticks
        self._ack_timer.reschedule(
            first, last, lambda attempts: tick + delay_ticks(attempts), attempt
        )

    def resume_delivery(self) -> None:
        """Assign messages to members that can accept more, after messages were settled."""
        self.group.distribute_messages()

    def limit_messages(self, count: int) -> None:
        """Send at most `count` more messages to this member.

        If more messages are assigned and not sent, all of these are assigned again.
        """
        self._sendable_count = count
        if self.unsent_count > count:
            self.position.unacked.requeue_sets(self.pop_unsent())
            self.group.mark_unsorted()
        self.group.update_availability(self)
        self.resume_delivery()

    # Sending -------------------------------------------------------------------------------------

    def mark_unresponsive(self) -> None:
        """Record that the member does not read."""
        self.is_unresponsive = True

    def _mark_responsive(self) -> None:
        """Record that the member reads again."""
        if self.is_unresponsive:
            self.is_unresponsive = False
            self.group.update_availability(self)

    def copy_frames(self, tick: int) -> bytes:
        """Return the next assigned messages as frames."""
        self._mark_responsive()
        pieces = CopiedFrames(REDELIVERY_BYTES)
        self.scanned_count = 0
        while self._unsent and not pieces.count and self.scanned_count < SCAN_MESSAGES_MAX:
            self._copy_lowest(pieces, tick)
        self.attempt, self.assigned_tick = pieces.attempt, tick
        self._count_sent(pieces.count)
        return b"".join(pieces.parts)

    def _count_sent(self, count: int) -> None:
        """Subtract sent messages from those that may still be sent."""
        if self._sendable_count is not None:
            self._sendable_count -= count
            self.group.update_availability(self)

    def _copy_lowest(self, pieces: CopiedFrames, tick: int) -> None:
        """Copy the lowest unsent messages into `pieces`, without expired ones."""
        (first, last), before = min(
            (next(iter(sequences)), attempts) for attempts, sequences in self._unsent.items()
        )
        span = Span(first, min(last, first + self.outbox.piece_messages_max), before)
        self.scanned_count += span.last - first
        self._copy_span(span, pieces, tick)
        sequences = self._unsent[before]
        sequences.remove(first, span.first)
        if not sequences:
            del self._unsent[before]

    def _copy_span(self, span: Span, pieces: CopiedFrames, tick: int) -> None:
        """Copy the front of an assigned span into `pieces`, without expired messages."""
        position, first = self.position, span.first
        attempts = max(span.next_attempt, 1)
        due_tick = tick + position.delivery_policy.redelivery_delay_ticks(attempts)
        for begin, end in position.copy_assigned(span, pieces, tick):
            if first < begin:
                self._subtract(begin - first, position.ring.range_bytes(first, begin))
            self._ack_timer.schedule(due_tick, begin, end, attempts)
            first = end
        if first < span.first:
            self._subtract(span.first - first, position.ring.range_bytes(first, span.first))

    def peek_frames(self, tick: int) -> memoryview:
        self._mark_responsive()
        return memoryview(b"")

    def mark_sent(self, piece: memoryview, sent_bytes: int, tick: int) -> bytes:
        raise AssertionError("peek_frames of a member returns nothing that could be sent")

    def check_invariants(self) -> None:
        """Raise AssertionError unless the counts and the assigned messages are correct."""
        spans, ring = list(self.iter_spans()), self.position.ring
        assert self.assigned_count == _count_messages(spans), (self.assigned_count, spans)
        assert self.assigned_bytes == sum(ring.range_bytes(s.first, s.last) for s in spans)
        assert self.assigned_count <= self.in_flight_max
        assert self._sendable_count is None or self.unsent_count <= self._sendable_count
        for span in spans:
            unacked = self.window.unacked_ranges(span.first, span.last)
            assert unacked == [(span.first, span.last)], "an assigned message is acknowledged"


M = TypeVar("M", bound=GroupMember)


class BaseGroup(Generic[M]):
    """Members that share a position, of any kind of group. A `WakeupTarget`."""

    _continued_scan_max: ClassVar[int] = REDELIVERY_MESSAGES
    """Messages that a continued scan covers in one turn."""

    def __init__(
        self, position: Position, clock: BrokerClock, delayed_wakeups: DelayedWakeups
    ) -> None:
        self.position = position
        self.class_id = position.class_id
        self.window = position.window
        self.members: dict[M, None] = {}
        self._member_counts: Counter[Outbox] = Counter()
        """Number of members of each session, by the session's outbox."""
        self._leaving_outboxes: set[Outbox] = set()
        """Outboxes whose members are removed soon. Until then the group assigns no messages."""
        self._clock = clock
        self._delayed_wakeups = delayed_wakeups
        self._available_members: LeastLoadedMembers[M] = LeastLoadedMembers()
        self._turn_count = 0
        self._is_scan_unfinished = False
        """True if the search for messages continues in a later turn."""
        self._scan_limit = FIRST_SCAN_MAX
        """Messages scanned in the next turn."""

    @property
    def scanned_count(self) -> int:
        """Messages scanned in the last turn, without assigned ones."""
        return self.position.scanned_count

    # Members -------------------------------------------------------------------------------------

    def add_member(
        self,
        outbox: Outbox,
        subscription_number: int,
        request_number: int,
        in_flight_max: int | None,
        name: str = "",
    ) -> M:
        """Add a member and return it. `name` is the client's name, or empty."""
        limit = GROUP_IN_FLIGHT_MESSAGES if in_flight_max is None else in_flight_max
        limit = min(limit, GROUP_IN_FLIGHT_MAX)
        member = self._create_member(outbox, subscription_number, request_number, limit, name)
        self.members[member] = None
        self._member_counts[outbox] += 1
        self.position.unacked.add_holder(member)
        self.position.set_has_consumer(True)
        self._turn_count += 1
        member.last_assigned_turn = self._turn_count
        self.update_availability(member)
        return member

    def _create_member(
        self,
        outbox: Outbox,
        subscription_number: int,
        request_number: int,
        in_flight_max: int,
        name: str,
    ) -> M:
        raise NotImplementedError

    @property
    def drop_cost(self) -> int:
        """Cost of dropping the messages that members hold; that of one position is 1."""
        return len(self.members)

    def update_availability(self, member: M) -> None:
        """Update whether `member` can be assigned messages, after its counts have changed."""
        if member in self.members and member.free_count:
            self._available_members.update(member)
        else:
            self._available_members.remove(member)

    @property
    def has_leaving_members(self) -> bool:
        """True if members were announced to leave and are not removed yet."""
        return bool(self._leaving_outboxes)

    def announce_leaving(self, outbox: Outbox) -> None:
        """Assign no messages until all members with this outbox are removed. There must be one.

        The caller can then remove many members in portions, and their messages are assigned
        together at the end.
        """
        self._leaving_outboxes.add(outbox)

    def remove_member(self, member: M) -> None:
        """Remove a member and queue its messages for the others."""
        del self.members[member]
        self._member_counts[member.outbox] -= 1
        if not self._member_counts[member.outbox]:
            del self._member_counts[member.outbox]
            self._leaving_outboxes.discard(member.outbox)
        self.position.unacked.remove_holder(member)
        self.position.set_has_consumer(bool(self.members))
        member.outbox.remove(member)
        self.position.unacked.requeue_sets(member.pop_unsent())
        self.position.unacked.requeue_unacked(member.pop_in_flight())
        self.update_availability(member)
        self.mark_unsorted()

    def mark_unsorted(self) -> None:
        """Record that redeliveries may have to be sorted."""

    # Assigning messages --------------------------------------------------------------------------

    def distribute_messages(self) -> list[M]:
        """Assign messages to members that can accept them.

        Returns:
            The members that received some.
        """
        raise NotImplementedError

    def _continue_later(self) -> None:
        """Schedule a wakeup that continues the search for messages."""
        self._is_scan_unfinished = True
        self._delayed_wakeups.schedule_wakeup(self._clock.now, self)

    @property
    def next_wakeup(self) -> float:
        return self._clock.now if self._is_scan_unfinished else NEVER

    def handle_wakeup(self) -> bool:
        if self._is_scan_unfinished:
            self._scan_limit = self._continued_scan_max
        self._is_scan_unfinished = False
        return True

    def cancel_wakeups(self) -> None:
        """Cancel the wakeups of a group that has ended."""
        self._delayed_wakeups.schedule_wakeup(NEVER, self)

    def tick_in_parts(self, tick: int) -> Generator[None, None, None]:
        """Reassign the messages that unresponsive members do not read, in parts of bounded work."""
        last_tick = tick - self.position.delivery_policy.ack_timeout_ticks
        cost = 0
        for member in list(self.members):
            cost += 1
            if member.has_work and member.assigned_tick <= last_tick and member in self.members:
                self._reclaim_unsent(member)
                cost += RECLAIMED_RANGES_PER_TURN // RECLAIMED_MEMBERS_PER_TURN
            if cost >= RECLAIMED_RANGES_PER_TURN:
                cost = 0
                yield

    def _reclaim_unsent(self, member: M) -> None:
        """Take back the messages that an unresponsive member does not read."""
        member.mark_unresponsive()
        self.position.unacked.requeue_sets(member.pop_unsent())

    # Delegated to the position -------------------------------------------------------------------

    def drop_expired(self, scan_max: int) -> bool:
        """See `Position.drop_expired`."""
        return self.position.drop_expired(scan_max)

    def enforce_pending_limit(self) -> int:
        """See `Position.enforce_pending_limit`."""
        return self.position.enforce_pending_limit()

    def delay_redeliveries(self, delays: Iterable[tuple[int, int, float]]) -> None:
        """See `Position.delay_redeliveries`."""
        self.position.delay_redeliveries(delays)

    def apply_handover(self, handover: PositionHandover, tick_seconds: float) -> None:
        """See `Position.apply_handover`."""
        self.position.apply_handover(handover, tick_seconds)

    def statistics(self) -> SubscriptionStatistics:
        """Return the statistics of the position."""
        return self.position.statistics()

    def build_delivery_state(self) -> DeliveryState:
        """Return the delivery state. Messages in flight are counted over all members."""
        state = self.position.unacked.build_delivery_state()
        in_flight = sum(member.assigned_count for member in self.members)
        return state._replace(in_flight_count=in_flight, ack_timer_sets=[], waiting_sequences=[])

    def check_invariants(self) -> None:
        """Raise AssertionError unless the invariants hold."""
        for member in self.members:
            member.check_invariants()
        self._available_members.check_invariants()
        assert len(self._available_members) == sum(member.free_count > 0 for member in self.members)


AnyGroup = BaseGroup[Any]
"""Group of any kind."""


class Group(BaseGroup[GroupMember]):
    """Queue group: each message goes to the member with the fewest messages in flight."""

    def __init__(
        self, position: Position, clock: BrokerClock, delayed_wakeups: DelayedWakeups
    ) -> None:
        super().__init__(position, clock, delayed_wakeups)
        self._has_unsorted_redeliveries = False
        """True if the redelivery queue must be sorted before use."""

    def _create_member(
        self,
        outbox: Outbox,
        subscription_number: int,
        request_number: int,
        in_flight_max: int,
        name: str,
    ) -> GroupMember:
        return GroupMember(self, outbox, subscription_number, request_number, in_flight_max)

    def mark_unsorted(self) -> None:
        self._has_unsorted_redeliveries = True

    def distribute_messages(self) -> list[GroupMember]:
        assigned_members: dict[GroupMember, None] = {}
        if self._is_scan_unfinished or self._leaving_outboxes or not self.members:
            return []
        if self.position.unacked.is_discarding:
            return []
        position, available_members = self.position, self._available_members
        if self._has_unsorted_redeliveries:
            position.unacked.queue.sort_with([], ())
            self._has_unsorted_redeliveries = False
        position.begin_scan(self._scan_limit)
        last_turn = self._turn_count + ASSIGNMENTS_PER_TURN_MAX
        while available_members and self._turn_count < last_turn:
            member = available_members.least_loaded()
            waiting_count = position.count_unassigned(_COUNTED_SPANS_MAX)
            fair_share = max(1, -(-waiting_count // len(available_members)))
            spans = self._next_spans(
                min(member.free_count, MESSAGES_PER_TURN_MAX, fair_share),
                IN_FLIGHT_BYTES - member.assigned_bytes,
            )
            if not spans:
                break
            position.adjust_scanned_count(-_count_messages(spans))
            self._turn_count += 1
            member.assign(spans, self._turn_count, self._clock.tick)
            assigned_members[member] = None
        self._scan_limit = FIRST_SCAN_MAX
        is_limit_reached = position.is_scan_limit_reached or self._turn_count >= last_turn
        if available_members and is_limit_reached and position.has_work:
            self._continue_later()
        return list(assigned_members)

    def _next_spans(self, max_count: int, space_bytes: int) -> list[Span]:
        """Return up to `max_count` unassigned messages: redeliveries first, then new ones.

        The result has at most `space_bytes` bytes, but at least one message if there is any.
        """
        position = self.position
        redeliveries = position.select_redeliveries(max_count)
        if redeliveries is not None:
            span, last, selected = redeliveries
            selected, last = self._fit_selection(selected, last, space_bytes)
            position.consume_redeliveries(span, last, selected)
            position.adjust_scanned_count(SPAN_SCAN_COST)
            return [Span(begin, end, span.attempts) for begin, end in selected.sendable]
        scan_count = max(max_count, self._scan_limit // 8)
        while position.can_select_new:
            selected, last = self._fit_selection(
                *position.select_new(scan_count, max_count), space_bytes
            )
            # No match yet: scan further each time.
            scan_count = min(4 * scan_count, REDELIVERY_MESSAGES)
            position.pass_new(selected, last)
            if selected.sendable:
                return [Span(begin, end, 0) for begin, end in selected.sendable]
        return []

    def _fit_selection(
        self, selected: MessageSelection, end_sequence: int, space_bytes: int
    ) -> tuple[MessageSelection, int]:
        """Return the part of a selection that fits into `space_bytes`, and its end.

        The result has at least one message, unless `space_bytes` is used up before the first range.
        """
        ring = self.position.ring
        fitting_ranges: Ranges = []
        for first, end in selected.sendable:
            size = ring.range_bytes(first, end)
            if size > space_bytes:
                if space_bytes > 0:
                    fitting_ranges.append((first, ring.view_frames(first, end, space_bytes)[1]))
                return replace(selected, sendable=fitting_ranges), fitting_ranges[-1][1]
            fitting_ranges.append((first, end))
            space_bytes -= size
        return selected, end_sequence


def _measure_bytes(ring: Ring, sequences: SequenceSet) -> int:
    """Return the bytes of the stored messages of a set."""
    firsts, lasts = sequences.bounds
    range_count = len(firsts)
    if (
        range_count < _ARRAY_RANGES_MIN
        or len(sequences) > _ARRAY_MESSAGES_PER_RANGE_MAX * range_count
    ):
        return sum(ring.range_bytes(first, last) for first, last in sequences)
    return _measure_ranges(ring, np.array(firsts), np.array(lasts))


def _measure_ranges(ring: Ring, firsts: Integers, lasts: Integers) -> int:
    """Return the bytes of the stored messages of short ranges."""
    counts = lasts - firsts
    ends = np.cumsum(counts)
    return ring.sequences_bytes(np.arange(ends[-1]) + np.repeat(lasts - ends, counts))


def _count_messages(spans: Iterable[Span]) -> int:
    """Return the number of messages in `spans`."""
    return sum(span.last - span.first for span in spans)
