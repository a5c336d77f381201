"""Queue groups: subscriptions that share one position, so that each message goes to one member.

A group assigns messages to the member with the fewest in flight, a few at a time. Only the member
that was sent a message can acknowledge it, reject it or extend its ack timeout. Messages that a
member leaves behind, does not read or does not acknowledge in time are assigned to another member.

    group     floor ─ assigned ─ cursor ─ head
    members   a: 4 5 ┆ 9     b: 6 7 ┆ 8      sent ┆ assigned but not sent
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import islice
from typing import Any

from simplebus.core.group.least_loaded import LeastLoadedMembers
from simplebus.core.limits import (
    GROUP_IN_FLIGHT_MESSAGES,
    IN_FLIGHT_BYTES,
    REDELIVERY_BYTES,
    REDELIVERY_MESSAGES,
    SCAN_MESSAGES_MAX,
)
from simplebus.core.outbox import Outbox
from simplebus.core.protocol.frames import Integers
from simplebus.core.redelivery.delivery_state import DeliveryState, ScheduledSets
from simplebus.core.redelivery.timer_wheel import Span, TimerWheel
from simplebus.core.subscription import selection
from simplebus.core.subscription.copied_frames import CopiedFrames
from simplebus.core.subscription.position import Position
from simplebus.core.subscription.selection import MessageSelection, Ranges

# Messages assigned to one member at once, at most.
MESSAGES_PER_TURN_MAX = 64

# Messages scanned before the group continues in a later turn, so that a long scan does not delay
# other sessions. A continued scan covers REDELIVERY_MESSAGES.
_FIRST_SCAN_MAX = 512


class GroupMember:
    """Membership of one session in a group, as a `SendSource` of the session's outbox."""

    def __init__(
        self,
        group: Group,
        outbox: Outbox,
        subscription_number: int,
        request_number: int,
        in_flight_max: int,
    ) -> None:
        self.group = group
        self.outbox = outbox
        self.subscription_number = subscription_number
        self.class_id = group.class_id
        self.window = group.window
        """Ack window of the group."""
        self.in_flight_max = in_flight_max
        self.request_number = request_number
        """Number of the Subscribe request that created it."""
        self.is_queued = False
        self.attempt = 1
        self.scanned_count = 0
        self.assigned_count = 0
        """Messages assigned and not acknowledged."""
        self.assigned_bytes = 0
        """Bytes of those messages."""
        self.last_assigned_turn = 0
        """Turn of the group in which it was last assigned messages."""
        self.ack_timer = TimerWheel()
        """Messages in flight, by the tick at which they are overdue."""
        self.unsent_spans: deque[Span] = deque()
        """Messages assigned and not sent yet."""
        self.assigned_tick = 0
        """Tick at which the oldest unsent message was assigned."""
        self.is_unresponsive = False
        """True if it did not read its last assignment within the ack timeout."""

    @property
    def has_frames_to_copy(self) -> bool:
        return bool(self.unsent_spans)

    @property
    def has_work(self) -> bool:
        return bool(self.unsent_spans)

    @property
    def position(self) -> Position:
        """Position of the group."""
        return self.group

    @property
    def free_count(self) -> int:
        """Messages that may still be assigned to it."""
        if self.is_unresponsive or self.assigned_bytes >= IN_FLIGHT_BYTES:
            return 0
        return max(0, self.in_flight_max - self.assigned_count)

    def iter_spans(self) -> Iterator[Span]:
        """Yield the spans of all assigned messages, sent or not."""
        yield from self.unsent_spans
        yield from self.ack_timer

    @property
    def unsent_count(self) -> int:
        """Messages assigned and not sent yet."""
        return sum(span.last - span.first for span in self.unsent_spans)

    def in_flight_sets(self) -> ScheduledSets:
        """Return the messages in flight; only some of them if there are many."""
        return self.ack_timer.scheduled_sets()

    def assign(self, spans: list[Span], tick: int) -> None:
        """Queue `spans` for sending to this member."""
        if not self.unsent_spans:
            self.assigned_tick = tick
        self.unsent_spans += spans
        self._adjust_load(spans, 1)
        self.outbox.enqueue(self)

    def pop_unsent(self) -> list[Span]:
        """Remove and return the spans that were assigned and not sent."""
        spans = list(self.unsent_spans)
        self.unsent_spans.clear()
        self._adjust_load(spans, -1)
        return spans

    def pop_in_flight(self) -> list[tuple[int, Span]]:
        """Remove and return the spans in flight, each with the tick at which it is overdue."""
        spans = self.ack_timer.pop_all()
        self._adjust_load([span for _, span in spans], -1)
        return spans

    def unassign_range(self, first: int, last: int) -> None:
        """Remove messages first..last-1 from the counts. They were assigned and are not sent."""
        self._adjust_load([Span(first, last, 0)], -1)

    def _adjust_load(self, spans: Iterable[Span], sign: int) -> None:
        """Add stored `spans` to the counts, or subtract them if `sign` is -1."""
        for span in spans:
            self.assigned_count += sign * (span.last - span.first)
            self.assigned_bytes += sign * self.group.ring.range_bytes(span.first, span.last)
        self.group.update_availability(self)

    def has_in_flight(
        self, first: int, last: int, attempt: int, *, include_waiting: bool = False
    ) -> bool:
        """Return True if any of first..last-1 is in flight to this member.

        With `attempt` other than 0 only messages of that delivery attempt count.
        """
        return self.ack_timer.overlaps(first, last, attempt)

    def iter_in_flight(self) -> Iterator[tuple[int, Span]]:
        """Yield the spans in flight, each with the tick at which it is overdue."""
        for due, attempts, held in self.ack_timer.scheduled_sets():
            for first, last in held:
                yield due, Span(first, last, attempts)

    def remove_in_flight(self, first: int, last: int, attempt: int = 0) -> list[Span]:
        """Remove first..last-1 from the messages in flight and return the removed spans.

        With `attempt` other than 0 only messages of that delivery attempt are removed.
        """
        spans = self.ack_timer.remove(first, last, attempt)
        if spans:
            self._adjust_load(spans, -1)
        return spans

    def purge(self, first: int, last: int) -> None:
        """Remove first..last-1, sent or not."""
        self.remove_in_flight(first, last)
        kept: list[Span] = []
        for span in self.unsent_spans:
            begin, end = max(span.first, first), min(span.last, last)
            if begin < end:
                self.unassign_range(begin, end)
            else:
                begin = end = span.last
            for a, b in ((span.first, begin), (end, span.last)):
                if a < b:
                    kept.append(Span(a, b, span.attempts))
        self.unsent_spans = deque(kept)

    def pop_overdue(self, tick: int) -> list[Span]:
        """Remove and return the spans that are overdue at `tick`."""
        spans = self.ack_timer.pop_due(tick)
        if spans:
            self._adjust_load(spans, -1)
        return spans

    def skip_to(self, floor: int) -> None:
        """Remove all messages below `floor`."""
        self.remove_in_flight(0, floor)
        for span in [span for span in self.unsent_spans if span.first < floor]:
            self.unassign_range(span.first, min(floor, span.last))
            span.first = min(floor, span.last)

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
        while self.unsent_spans and not pieces.count and self.scanned_count < SCAN_MESSAGES_MAX:
            self.scanned_count += self.unsent_spans[0].last - self.unsent_spans[0].first
            self.group.copy_member_span(self, self.unsent_spans[0], pieces, tick)
            if self.unsent_spans[0].first >= self.unsent_spans[0].last:
                self.unsent_spans.popleft()
        self.assigned_tick = tick
        return b"".join(pieces.parts)

    def peek_frames(self, tick: int) -> memoryview:
        self._mark_responsive()
        return memoryview(b"")

    def mark_sent(self, piece: memoryview, sent_bytes: int, tick: int) -> bytes:
        raise AssertionError("peek_frames of a member returns nothing that could be sent")


class Group(Position):
    """Shared position of a queue group, whose members send the messages."""

    scan_limit = _FIRST_SCAN_MAX

    def __init__(self, **options: Any) -> None:
        """Create a group with the options of `Position`."""
        super().__init__(**options)
        self.members: dict[GroupMember, None] = {}
        self._available_members: LeastLoadedMembers[GroupMember] = LeastLoadedMembers()
        self._turn_count = 0
        self._has_unsorted_redeliveries = False
        """True if the redelivery queue must be sorted before use."""
        self._is_scan_unfinished = False
        """True if the search for messages continues in a later turn."""

    def build_delivery_state(self) -> DeliveryState:
        """Return the delivery state. Messages in flight are counted over all members."""
        state = super().build_delivery_state()
        in_flight = sum(member.assigned_count for member in self.members)
        return state._replace(in_flight_count=in_flight, ack_timer_sets=[], waiting_sequences=[])

    # Members -------------------------------------------------------------------------------------

    def add_member(
        self,
        outbox: Outbox,
        subscription_number: int,
        request_number: int,
        in_flight_max: int | None,
        name: str = "",
    ) -> GroupMember:
        """Add a member and return it. `name` is the client's name, or empty."""
        limit = GROUP_IN_FLIGHT_MESSAGES if in_flight_max is None else in_flight_max
        member = self._create_member(outbox, subscription_number, request_number, limit, name)
        self.members[member] = None
        self.has_consumer = True
        self._record_turn(member)
        self.update_availability(member)
        return member

    def _create_member(
        self,
        outbox: Outbox,
        subscription_number: int,
        request_number: int,
        in_flight_max: int,
        name: str,
    ) -> GroupMember:
        return GroupMember(self, outbox, subscription_number, request_number, in_flight_max)

    def update_availability(self, member: GroupMember) -> None:
        """Update whether `member` can be assigned messages, after its counts have changed."""
        if member in self.members and member.free_count:
            self._available_members.update(member)
        else:
            self._available_members.remove(member)

    def _record_turn(self, member: GroupMember) -> None:
        self._turn_count += 1
        member.last_assigned_turn = self._turn_count

    def remove_member(self, member: GroupMember) -> None:
        """Remove a member and queue its messages for the others."""
        del self.members[member]
        self.has_consumer = bool(self.members)
        member.outbox.remove(member)
        self._redelivery_queue += member.pop_unsent()
        for due, span in member.pop_in_flight():
            self._requeue_unacked(span, due)
        self._has_unsorted_redeliveries = True

    # Assigning messages --------------------------------------------------------------------------

    def distribute_messages(self) -> list[GroupMember]:
        """Assign messages to members that can accept them.

        Returns:
            The members that received some.
        """
        assigned_members: dict[GroupMember, None] = {}
        if self._is_scan_unfinished:
            return []
        if self._has_unsorted_redeliveries:
            self._redelivery_queue = deque(sorted(self._redelivery_queue, key=_span_start))
            self._has_unsorted_redeliveries = False
        self.scanned_count = 0
        available_members = self._available_members
        while available_members:
            member = available_members.least_loaded()
            fair_share = -(-self._estimate_undistributed() // len(available_members))
            space_bytes = IN_FLIGHT_BYTES - member.assigned_bytes
            spans = self._next_spans(
                min(member.free_count, MESSAGES_PER_TURN_MAX, max(1, fair_share)), space_bytes
            )
            if not spans:
                break
            self.scanned_count -= _count_messages(spans)
            self._record_turn(member)
            member.assign(spans, self._clock.tick)
            assigned_members[member] = None
        is_limit_reached, self.scan_limit = self.scanned_count >= self.scan_limit, _FIRST_SCAN_MAX
        if available_members and is_limit_reached and self.has_work:
            self._is_scan_unfinished = True
            self._delayed_wakeups.schedule_wakeup(self._clock.now, self)
        return list(assigned_members)

    @property
    def next_wakeup(self) -> float:
        return self._clock.now if self._is_scan_unfinished else super().next_wakeup

    def handle_wakeup(self) -> bool:
        continues_scan, self._is_scan_unfinished = self._is_scan_unfinished, False
        if continues_scan:
            self.scan_limit = REDELIVERY_MESSAGES
        return super().handle_wakeup() or continues_scan

    def _estimate_undistributed(self) -> int:
        """Return about how many messages wait for a member. Only small results are exact."""
        count = self.ring.head - self.window.cursor
        return count + _count_messages(islice(self._redelivery_queue, MESSAGES_PER_TURN_MAX))

    def _next_spans(self, max_count: int, space_bytes: int) -> list[Span]:
        """Return up to `max_count` unassigned messages: redeliveries first, then new ones.

        The result has at most `space_bytes` bytes, but at least one message if there is any.
        """
        redeliveries = self._select_redeliveries(max_count)
        if redeliveries is not None:
            span, last, selection = redeliveries
            selection, last = self._fit_selection(selection, last, space_bytes)
            self._consume_redeliveries(span, last, selection)
            return [Span(begin, end, span.attempts) for begin, end in selection.sendable]
        window, scan_count = self.window, max(max_count, self.scan_limit // 8)
        while window.cursor < self.ring.head and not self._redelivery_queue:
            if self.scanned_count >= self.scan_limit:
                break
            selection, last = self._fit_selection(
                *self._select_new(scan_count, max_count), space_bytes
            )
            scan_count = min(
                4 * scan_count, REDELIVERY_MESSAGES
            )  # No match yet: scan further each time.
            self._advance_cursor(last)
            self._skip_unsendable(selection, last, attempts=0)
            if selection.sendable:
                return [Span(begin, end, 0) for begin, end in selection.sendable]
        return []

    def _fit_selection(
        self, selection: MessageSelection, end_sequence: int, space_bytes: int
    ) -> tuple[MessageSelection, int]:
        """Return the part of a selection that fits into `space_bytes`, and its end.

        The result has at least one message, unless `space_bytes` is used up before the first range.
        """
        kept: Ranges = []
        for first, end in selection.sendable:
            size = self.ring.range_bytes(first, end)
            if size > space_bytes:
                if space_bytes > 0:
                    kept.append((first, self.ring.view_frames(first, end, space_bytes)[1]))
                return replace(selection, sendable=kept), kept[-1][1]
            kept.append((first, end))
            space_bytes -= size
        return selection, end_sequence

    def copy_member_span(
        self, member: GroupMember, span: Span, pieces: CopiedFrames, tick: int
    ) -> None:
        """Copy the front of an assigned span into `pieces`, without expired messages."""
        before, window = pieces.count, self.window
        ranges = window.unacked_ranges(span.first, span.last)
        picked = selection.select_from_ranges(
            self.ring, ranges, self.channel_filter, self._clock.now
        )
        member.attempt = span.next_attempt
        first, last = span.first, self._copy_ranges(picked.sendable, span.last, pieces, tick)
        self._skip_unsendable(picked, last, attempts=span.attempts)
        attempts = max(span.next_attempt, 1)
        for begin, end in selection.ranges_before(picked.sendable, last):
            if first < begin:
                member.unassign_range(first, begin)
            member.ack_timer.schedule(
                tick + self.delivery_policy.redelivery_delay_ticks(attempts), begin, end, attempts
            )
            first = end
        if first < last:
            member.unassign_range(first, last)
        span.first = last
        sent_count = pieces.count - before
        if span.attempts > 0:
            self.redelivered_count += sent_count
        else:
            self.delivered_count += sent_count

    # Acknowledgements and redelivery -------------------------------------------------------------

    def ack_member_range(self, member: GroupMember, first: int, last: int) -> bool:
        """Acknowledge the messages of first..last-1 that `member` holds.

        Returns:
            True if there are any.
        """
        spans = member.remove_in_flight(first, last)
        for span in spans:
            self.window.ack_range(span.first, span.last)
        return bool(spans)

    def ack_member_ranges(
        self, member: GroupMember, firsts: Integers, lasts: Integers
    ) -> list[tuple[int, int]]:
        """Acknowledge many ranges. Returns the ranges of which `member` holds nothing."""
        ranges = zip(firsts.tolist(), lasts.tolist(), strict=True)
        return [(a, b) for a, b in ranges if not self.ack_member_range(member, a, b)]

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
        """Reject the messages of first..last-1 that `member` holds. See `nack`."""
        for span in member.remove_in_flight(first, last, attempt):
            self._schedule_redelivery(span, delay_seconds, tick, error)

    def terminate_member_range(
        self, member: GroupMember, first: int, last: int, *, attempt: int = 0, error: str = ""
    ) -> None:
        """Give up the messages of first..last-1 that `member` holds. See `terminate`."""
        self._terminate_spans(member.remove_in_flight(first, last, attempt), error)
        self._has_unsorted_redeliveries |= bool(self._redelivery_queue)

    def extend_member_ack_timeout(
        self, member: GroupMember, first: int, last: int, tick: int, attempt: int = 0
    ) -> None:
        """Restart the ack timeout of the messages of first..last-1 that `member` holds."""
        self._postpone_timeouts(member.ack_timer, first, last, tick, attempt)

    def tick(self, tick: int) -> None:
        for member in self.members:
            for span in member.pop_overdue(tick):
                # `Position.tick` pops the spans again in this tick. The timer merges and sorts the
                # spans of all members, so the group redelivers them in the order of sequences.
                self._ack_timer.schedule(tick, span.first, span.last, span.attempts)
        super().tick(tick)
        for member in self.members:
            if (
                member.has_work
                and member.assigned_tick + self.delivery_policy.ack_timeout_ticks <= tick
            ):
                self._reclaim_unsent(member)

    def _reclaim_unsent(self, member: GroupMember) -> None:
        """Reassign the messages that an unresponsive member does not read."""
        member.is_unresponsive = True
        self._redelivery_queue += member.pop_unsent()

    def purge(self, first: int, last: int) -> None:
        for member in self.members:
            member.purge(first, last)
        super().purge(first, last)

    def _skip_below(self, floor: int) -> int:
        for member in self.members:
            member.skip_to(floor)
        return super()._skip_below(floor)

    def requeue_spilled(self) -> None:
        self._has_unsorted_redeliveries = self._has_unsorted_redeliveries or bool(
            self._spilled_redeliveries
        )
        super().requeue_spilled()

    def _mark_waiting(self, span: Span) -> None:
        pass  # Only messages that a member holds can be acknowledged.

    def _iter_redelivered(self) -> Iterator[tuple[int, Span]]:
        for member in self.members:
            yield from ((due, span) for due, span in member.iter_in_flight() if span.attempts > 1)

    def _iter_spans(self) -> Iterator[Span]:
        yield from super()._iter_spans()
        for member in self.members:
            yield from member.iter_spans()

    def check_invariants(self) -> None:
        super().check_invariants()
        for member in self.members:
            spans = list(member.iter_spans())
            message_count = _count_messages(spans)
            assert member.assigned_count == message_count, (member.assigned_count, message_count)
            assert member.assigned_bytes == sum(
                self.ring.range_bytes(s.first, s.last) for s in spans
            )
            assert member.assigned_count <= member.in_flight_max
            for span in spans:
                unacked = self.window.unacked_ranges(span.first, span.last)
                assert unacked == [(span.first, span.last)], "assigned and acknowledged"
        self._available_members.check_invariants()
        assert len(self._available_members) == sum(member.free_count > 0 for member in self.members)

    def _check_waiting_sequences(self) -> None:
        assert not self._unsent_sequences
        assert not self._resend_sequences


def _count_messages(spans: Iterable[Span]) -> int:
    """Return the number of messages in `spans`."""
    return sum(span.last - span.first for span in spans)


def _span_start(span: Span) -> int:
    return span.first
