"""Subscriptions that share one position: each message goes to one of them.

Rule 1: a group hands messages out to its members before they are sent, a few at a time, to whoever
has the fewest: how fast a member takes them decides how many it gets.
Rule 2: only the member that was sent a message holds it: it alone can acknowledge it, refuse it or
ask for time.
Rule 3: nothing here walks over all members or all that is in flight for a message, but for a beat.
Rule 4: what a member had when it goes, did not take or did not acknowledge in time, goes to another
one.

    group     floor ─ handed out ─ cursor ─ head
    members   a: 4 5 ┆ 9     b: 6 7 ┆ 8      sent ┆ not sent yet; each of them has a feed
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
    LOOKED_MESSAGES_MAX,
    REDELIVERY_BYTES,
    REDELIVERY_MESSAGES,
)
from simplebus.core.protocol.frames import Integers
from simplebus.core.redelivery.ack_timer import Span, Wheel
from simplebus.core.redelivery.ack_window import AckWindow
from simplebus.core.redelivery.delivery_policy import Pieces
from simplebus.core.redelivery.delivery_state import Sets, Standing
from simplebus.core.session.outbox import Outbox
from simplebus.core.subscription import selection
from simplebus.core.subscription.selection import MessageSelection, Ranges
from simplebus.core.subscription.subscription import BrokerSubscription

# Handed out to one member at once, if it has room for as many.
MESSAGES_PER_TURN_MAX = 64

# Looked at before a group puts off looking further: it has no outbox whose turn it were, and others
# wait for it. When it is its turn it looks at REDELIVERY_MESSAGES.
_FIRST_SCAN_MAX = 512


class GroupMember:
    """One session's part in a group. A feed: see `Outbox`."""

    def __init__(
        self, group: Group, outbox: Outbox, subscription_number: int, in_flight_max: int
    ) -> None:
        self.group = group
        self.outbox = outbox
        self.subscription_number = subscription_number
        self.class_id = group.class_id
        self.in_flight_max = in_flight_max
        self.request_number = group.request_number
        """The number of the Subscribe that asked for it."""
        self.is_queued = False
        self.attempt = 1
        self.scanned_count = 0
        self.assigned_count = 0
        """Messages handed out to it and not acknowledged."""
        self.assigned_bytes = 0
        """And how long they are."""
        self.last_assigned_turn = 0
        """When it was handed something last; the order counts."""
        self.ack_timer = Wheel()
        """What it was sent and has not acknowledged, no more and no less, by when it is overdue."""
        self.unsent_spans: deque[Span] = deque()
        """What it was handed out and is not sent yet."""
        self.assigned_tick = 0
        """When the first of it was handed out."""
        self.is_unresponsive = False
        """Whether it did not take in time what it was handed out last."""

    @property
    def has_frames_to_copy(self) -> bool:
        return bool(self.unsent_spans)

    @property
    def has_work(self) -> bool:
        return bool(self.unsent_spans)

    @property
    def window(self) -> AckWindow:
        """Its group's."""
        return self.group.window

    @property
    def free_count(self) -> int:
        """How many messages more it may have."""
        if self.is_unresponsive or self.assigned_bytes >= IN_FLIGHT_BYTES:
            return 0
        return max(0, self.in_flight_max - self.assigned_count)

    def iter_spans(self) -> Iterator[Span]:
        """All that it has."""
        yield from self.unsent_spans
        yield from self.ack_timer

    @property
    def unsent_count(self) -> int:
        """How many messages it was handed out that are not sent yet."""
        return sum(span.last - span.first for span in self.unsent_spans)

    def in_flight_sets(self) -> Sets:
        """What it was sent and has not acknowledged; a part of it, if it is much."""
        return self.ack_timer.sets()

    def assign(self, spans: list[Span], tick: int) -> None:
        """These are to be sent to it."""
        if not self.unsent_spans:
            self.assigned_tick = tick
        self.unsent_spans += spans
        self._adjust_load(spans, 1)
        self.outbox.wake(self)

    def pop_unsent(self) -> list[Span]:
        """What it was handed out and not sent."""
        spans = list(self.unsent_spans)
        self.unsent_spans.clear()
        self._adjust_load(spans, -1)
        return spans

    def pop_in_flight(self) -> list[tuple[int, Span]]:
        """It is gone. Returns what it was sent and has not acknowledged, and by which tick it was
        to do that."""
        spans = self.ack_timer.clear()
        self._adjust_load([span for _, span in spans], -1)
        return spans

    def unassign_range(self, first: int, last: int) -> None:
        """It is not to be sent first..last-1, of what it was handed out."""
        self._adjust_load([Span(first, last, 0)], -1)

    def _adjust_load(self, spans: Iterable[Span], sign: int) -> None:
        """It has these messages, or no longer. They must still be stored."""
        for span in spans:
            self.assigned_count += sign * (span.last - span.first)
            self.assigned_bytes += sign * self.group.ring.size(span.first, span.last)
        self.group.update_availability(self)

    def has_in_flight(
        self, first: int, last: int, attempt: int, *, include_waiting: bool = False
    ) -> bool:
        """Whether any of first..last-1 is in flight to it; with this attempt, if it is not 0. What
        waits is nobody's."""
        return self.ack_timer.holds(first, last, attempt)

    def iter_in_flight(self) -> Iterator[tuple[int, Span]]:
        """What it was sent and has not acknowledged, and by which tick it is to be."""
        for due, attempts, held in self.ack_timer.sets():
            for first, last in held:
                yield due, Span(first, last, attempts)

    def remove_in_flight(self, first: int, last: int, attempt: int = 0) -> list[Span]:
        """It has none of first..last-1 any longer, or none with this attempt. Returns what of them
        it was sent."""
        spans = self.ack_timer.cut(first, last, attempt)
        if spans:
            self._adjust_load(spans, -1)
        return spans

    def purge(self, first: int, last: int) -> None:
        """It has none of first..last-1 any longer, sent or not."""
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
        """What it should have acknowledged by this tick; it has it no longer."""
        spans = self.ack_timer.pop(tick)
        if spans:
            self._adjust_load(spans, -1)
        return spans

    def skip_to(self, floor: int) -> None:
        """It has nothing below floor any longer."""
        self.remove_in_flight(0, floor)
        for span in [span for span in self.unsent_spans if span.first < floor]:
            self.unassign_range(span.first, min(floor, span.last))
            span.first = min(floor, span.last)

    def _mark_responsive(self) -> None:
        """It takes something: it is no longer late."""
        if self.is_unresponsive:
            self.is_unresponsive = False
            self.group.update_availability(self)

    def copy_frames(self, tick: int) -> bytes:
        """See `Feed`."""
        self._mark_responsive()
        pieces = Pieces(REDELIVERY_BYTES)
        self.scanned_count = 0
        while self.unsent_spans and not pieces.count and self.scanned_count < LOOKED_MESSAGES_MAX:
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
        raise AssertionError("a member shows nothing, so nothing can be taken")


class Group(BrokerSubscription):
    """The shared position. It sends nothing itself: its outbox is nowhere."""

    scan_limit = _FIRST_SCAN_MAX

    def __init__(self, **options: Any) -> None:
        """Takes what Subscription does, but for the outbox and the number."""
        super().__init__(**options)
        self.members: dict[GroupMember, None] = {}
        self._available_members = LeastLoadedMembers()
        self._turn_count = 0
        self._has_unsorted_redeliveries = False
        """Whether what is to be sent again is to be put in order first."""
        self._is_scan_unfinished = False
        """Whether it goes on looking for what is for it in another turn."""

    @property
    def has_consumer(self) -> bool:
        return bool(self.members)

    def build_delivery_state(self) -> Standing:
        """What is in flight its members have."""
        stands = super().build_delivery_state()
        in_flight = sum(member.assigned_count for member in self.members)
        return stands._replace(in_flight=in_flight, sent=[], waiting=[])

    # Members -------------------------------------------------------------------------------------

    def add_member(
        self, outbox: Outbox, subscription_number: int, in_flight_max: int | None, name: str = ""
    ) -> GroupMember:
        """One more member. Its session is called `name`; empty for one without a name."""
        most = GROUP_IN_FLIGHT_MESSAGES if in_flight_max is None else in_flight_max
        member = self._create_member(outbox, subscription_number, most, name)
        self.members[member] = None
        self._record_turn(member)
        self.update_availability(member)
        return member

    def _create_member(
        self, outbox: Outbox, subscription_number: int, in_flight_max: int, name: str
    ) -> GroupMember:
        return GroupMember(self, outbox, subscription_number, in_flight_max)

    def update_availability(self, member: GroupMember) -> None:
        """What a member has, or may have, has changed."""
        if member in self.members and member.free_count:
            self._available_members.update(member)
        else:
            self._available_members.remove(member)

    def _record_turn(self, member: GroupMember) -> None:
        self._turn_count += 1
        member.last_assigned_turn = self._turn_count

    def remove_member(self, member: GroupMember) -> None:
        """A member is gone. What it had is to be handed out again."""
        del self.members[member]
        member.outbox.forget(member)
        self._redelivery_queue += member.pop_unsent()
        for due, span in member.pop_in_flight():
            self._requeue_unacked(span, due)
        self._has_unsorted_redeliveries = True

    # Handing out ---------------------------------------------------------------------------------

    def distribute_messages(self) -> list[GroupMember]:
        """Hand out what can be. Returns who got something."""
        woken: dict[GroupMember, None] = {}
        if self._is_scan_unfinished:
            return []
        if self._has_unsorted_redeliveries:
            self._redelivery_queue = deque(sorted(self._redelivery_queue, key=_span_start))
            self._has_unsorted_redeliveries = False
        self.scanned_count = 0
        takers = self._available_members
        while takers:
            member = takers.least_loaded()
            fair = -(-self._estimate_undistributed() // len(takers))
            space = IN_FLIGHT_BYTES - member.assigned_bytes
            spans = self._next_spans(
                min(member.free_count, MESSAGES_PER_TURN_MAX, max(1, fair)), space
            )
            if not spans:
                break
            self.scanned_count -= _count_messages(spans)
            self._record_turn(member)
            member.assign(spans, self._clock.tick)
            woken[member] = None
        is_tired, self.scan_limit = self.scanned_count >= self.scan_limit, _FIRST_SCAN_MAX
        if takers and is_tired and self.has_work:
            self._is_scan_unfinished = True
            self._schedule_wakeup(self._clock.now)
        return list(woken)

    @property
    def next_wakeup(self) -> float:
        return self._clock.now if self._is_scan_unfinished else super().next_wakeup

    def handle_wakeup(self) -> bool:
        looks_on, self._is_scan_unfinished = self._is_scan_unfinished, False
        if looks_on:
            self.scan_limit = REDELIVERY_MESSAGES
        return super().handle_wakeup() or looks_on

    def _estimate_undistributed(self) -> int:
        """About how many messages are to be handed out, if they are few."""
        count = self.ring.head - self.window.cursor
        return count + _count_messages(islice(self._redelivery_queue, MESSAGES_PER_TURN_MAX))

    def _next_spans(self, max_count: int, space_bytes: int) -> list[Span]:
        """Up to `most` messages that nobody has, one or as many as have space: again first, then
        new ones."""
        found = self._select_redeliveries(max_count)
        if found is not None:
            span, last, picked = found
            picked, last = self._fit_selection(picked, last, space_bytes)
            self._consume_redeliveries(span, last, picked)
            return [Span(a, b, span.attempts) for a, b in picked.sendable]
        window, many = self.window, max(max_count, self.scan_limit // 8)
        while window.cursor < self.ring.head and not self._redelivery_queue:
            if self.scanned_count >= self.scan_limit:
                break
            picked, last = self._fit_selection(*self._select_new(many, max_count), space_bytes)
            many = min(4 * many, REDELIVERY_MESSAGES)  # None of these is for it: look further.
            self._advance_cursor(last)
            self._skip_unsendable(picked, last, attempts=0)
            if picked.sendable:
                return [Span(a, b, 0) for a, b in picked.sendable]
        return []

    def _fit_selection(
        self, selection: MessageSelection, end_sequence: int, space_bytes: int
    ) -> tuple[MessageSelection, int]:
        """As much of what is to be sent as has space, one message at least; and where it ends."""
        kept: Ranges = []
        for first, end in selection.sendable:
            size = self.ring.size(first, end)
            if size > space_bytes:
                if space_bytes > 0:
                    kept.append((first, self.ring.piece(first, end, space_bytes)[1]))
                return replace(selection, sendable=kept), kept[-1][1]
            kept.append((first, end))
            space_bytes -= size
        return selection, end_sequence

    def copy_member_span(self, member: GroupMember, span: Span, pieces: Pieces, tick: int) -> None:
        """Copy the front of a span that a member was handed out. What has come to be too late
        meanwhile is left out."""
        before, window = pieces.count, self.window
        ranges = window.unacked(span.first, span.last)
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
            member.ack_timer.put(tick + self.delivery_policy.pause(attempts), begin, end, attempts)
            first = end
        if first < last:
            member.unassign_range(first, last)
        span.first = last
        sent = pieces.count - before
        if span.attempts > 0:
            self.redelivered += sent
        else:
            self.delivered += sent

    # What comes back -----------------------------------------------------------------------------

    def ack_member_range(self, member: GroupMember, first: int, last: int) -> bool:
        """A member has processed what it holds of first..last-1. Returns whether that is any."""
        spans = member.remove_in_flight(first, last)
        for span in spans:
            self.window.ack_range(span.first, span.last)
        return bool(spans)

    def ack_member_ranges(
        self, member: GroupMember, firsts: Integers, lasts: Integers
    ) -> list[tuple[int, int]]:
        """The same for many ranges. Returns those of which it holds nothing."""
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
        """A member could not process what it holds of first..last-1: see `nack`."""
        for span in member.remove_in_flight(first, last, attempt):
            self._schedule_redelivery(span, delay_seconds, tick, error)

    def terminate_member_range(
        self, member: GroupMember, first: int, last: int, *, attempt: int = 0, error: str = ""
    ) -> None:
        """A member can never process what it holds of first..last-1: see `terminate`."""
        self._terminate_spans(member.remove_in_flight(first, last, attempt), error)
        self._has_unsorted_redeliveries |= bool(self._redelivery_queue)

    def extend_member_ack_timeout(
        self, member: GroupMember, first: int, last: int, tick: int, attempt: int = 0
    ) -> None:
        """A member is at what it holds of first..last-1: see `working`."""
        self._postpone_timeouts(member.ack_timer, first, last, tick, attempt)

    def tick(self, tick: int) -> None:
        for member in self.members:
            for span in member.pop_overdue(tick):
                self._ack_timer.put(tick, span.first, span.last, span.attempts)
        super().tick(tick)
        for member in self.members:
            if member.has_work and member.assigned_tick + self.delivery_policy.ack_ticks <= tick:
                self._reclaim_unsent(member)

    def _reclaim_unsent(self, member: GroupMember) -> None:
        """A member does not take what it was handed out: that is for others."""
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
        pass  # Only what somebody holds can be acknowledged.

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
            held = _count_messages(spans)
            assert member.assigned_count == held, (member.assigned_count, held)
            assert member.assigned_bytes == sum(self.ring.size(s.first, s.last) for s in spans)
            assert member.assigned_count <= member.in_flight_max
            for span in spans:
                there = self.window.unacked(span.first, span.last)
                assert there == [(span.first, span.last)], "held and acknowledged"
        self._available_members.check_invariants()
        assert len(self._available_members) == sum(member.free_count > 0 for member in self.members)

    def _check_waiting_sequences(self) -> None:
        assert not self._unsent_sequences
        assert not self._resend_sequences


def _count_messages(spans: Iterable[Span]) -> int:
    """How many messages lie in spans."""
    return sum(span.last - span.first for span in spans)


def _span_start(span: Span) -> int:
    return span.first
