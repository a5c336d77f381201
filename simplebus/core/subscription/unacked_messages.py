"""Unacknowledged messages of a position: in flight, delayed, to be sent (again), or given up.

Messages are kept as ranges of sequences behind the cursor, and moved between the parts below. A
tick examines only the spans that are due, and queues them. Messages that wait to be sent (again)
are not in flight, and a message that was never sent cannot be acknowledged.

    _ack_timer             tick 17: (4, 9)  tick 18: (9, 30) …     in flight, by tick when overdue
    _nack_timer            tick 19: (2, 3)                         rejected, by tick of redelivery
    _delayed_spans         12.5 s: (30, 31)                        delayed until a time
    queue                  (4, 6) (8, 9)                           to be sent now, or given up
    pending_dead_letters   (3, 4)                                  given up, not dead-lettered yet

The queue also holds spans that were never sent (attempts 0), after a delay or a predecessor, and
spans at their delivery limit. The latter become dead letters when they are next selected for
sending, so not while a durable has no session.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Generator, Iterable, Iterator
from itertools import chain, islice
from typing import Protocol

import numpy as np

from simplebus.core.clock import BrokerClock
from simplebus.core.errors import Reason
from simplebus.core.limits import (
    LONG_NACK_MESSAGES,
    PLAIN_FRAMES_MAX,
    RECLAIMED_MEMBERS_PER_TURN,
    RECLAIMED_RANGES_PER_TURN,
    RELEASED_SEARCH_SPANS_MAX,
    SCAN_COST_OF_DELAY,
    SCAN_MESSAGES_MAX,
    WAITING_SEARCH_SPANS_MAX,
)
from simplebus.core.protocol.frames import Integers
from simplebus.core.redelivery.ack_window import AckWindow
from simplebus.core.redelivery.delivery_policy import DeliveryPolicy
from simplebus.core.redelivery.delivery_state import DeliveryState, ScheduledSets
from simplebus.core.redelivery.handover import DelayRanges, PositionHandover
from simplebus.core.redelivery.redelivery_queue import RedeliveryQueue, SpanSet
from simplebus.core.redelivery.sequence_set import SequenceSet, find_part_end
from simplebus.core.redelivery.timer_wheel import Span, TimerWheel, check_covered_once, split_spans
from simplebus.core.steps import run_to_end
from simplebus.core.subscription.delayed_wakeups import NEVER
from simplebus.core.subscription.pending_dead_letters import PendingDeadLetters
from simplebus.core.subscription.selection import Ranges

# Up to this many ranges, a loop is faster than arrays.
_MARKED_ONE_BY_ONE_MAX = 16

# Delayed spans that are queued in one turn, at the cost of a copied message each: about 1,000.
_WAKEUP_SCAN_MAX = SCAN_MESSAGES_MAX // 4


class MessageHolder(Protocol):
    """Part of a group that holds messages of the group's position, for example a member."""

    @property
    def has_messages(self) -> bool:
        """True if this part holds messages."""

    def iter_spans(self) -> Iterator[Span]:
        """Yield the spans of all messages that this part holds."""

    def iter_in_flight(self) -> Iterator[tuple[int, Span]]:
        """Yield the spans in flight, each with the tick at which it is overdue."""

    def pop_overdue(self, tick: int) -> list[SpanSet]:
        """Remove the messages that are overdue at `tick`. Returns them as (attempts, messages)."""

    def discard_range(self, first: int, last: int) -> None:
        """Remove first..last-1, which are skipped or purged. They are still stored."""


class UnackedMessages:
    """Unacknowledged messages of one position.

    Messages that the members of a group hold stay with the members; see `add_holder`.
    """

    def __init__(
        self,
        window: AckWindow,
        delivery_policy: DeliveryPolicy,
        clock: BrokerClock,
        *,
        is_shared: bool,
        spans: list[Span],
    ) -> None:
        """Create the state of a new position.

        Args:
            window: Ack window of the position.
            delivery_policy: Limits and delays.
            clock: Current time and tick.
            is_shared: True for the position of a group.
            spans: Messages that the window has in flight. They are queued.
        """
        self._window = window
        self._delivery_policy = delivery_policy
        self._clock = clock
        self._is_shared = is_shared
        self._holders: dict[MessageHolder, None] = {}
        """Parts of a group that hold messages."""
        self._held_floor = 0
        """Messages below this sequence were removed from all holders. No holder gets any of them
        later, because the floor of the window is not lower.
        """
        self._discarding_count = 0
        """Number of unfinished calls of `discard_held_in_parts`."""
        self._ack_timer = TimerWheel()
        self._nack_timer = TimerWheel()
        self._delayed_spans: list[tuple[float, int, Span]] = []
        self.queue = RedeliveryQueue()
        """Spans to be sent now, or to be given up."""
        self.requeue_count = 0
        """Incremented whenever spans are added to the queue."""
        self._spilled_spans: list[Span] = []
        """Spans to be sent that are not read back from disk yet."""
        self._unsent_sequences = SequenceSet()
        """Messages behind the cursor that were never sent."""
        self._resend_sequences = SequenceSet()
        """Messages that wait to be redelivered; may include settled ones. Empty unless the number
        of messages in flight is limited.
        """
        self._resend_count = 0
        """Number of messages in `_resend_sequences` that are not settled."""
        self.pending_dead_letters = PendingDeadLetters()
        """Messages given up that wait for space in the dead letters."""
        self._finished_sequences: SequenceSet | None = None
        """Messages that finished without an ack; None unless a key-ordered group collects them."""
        self._ended_at = 0
        """Cursor when the position ended."""
        self._queue_inherited(spans)

    def set_delivery_policy(self, delivery_policy: DeliveryPolicy) -> None:
        """Set the limits and delays."""
        self._delivery_policy = delivery_policy

    # State ---------------------------------------------------------------------------------------

    @property
    def has_waiting(self) -> bool:
        """True if messages behind the cursor may wait to be sent."""
        return bool(
            self.queue
            or self._delayed_spans
            or self._nack_timer
            or self._spilled_spans
            or self.pending_dead_letters
        )

    @property
    def delayed_count(self) -> int:
        """Approximate number of messages that wait for the end of a delay."""
        delayed = sum(span.last - span.first for _, _, span in self._delayed_spans)
        return delayed + sum(span.last - span.first for span in self._nack_timer)

    @property
    def next_due_time(self) -> float:
        """Time at which the next delay ends; infinite for none."""
        return self._delayed_spans[0][0] if self._delayed_spans else NEVER

    def count_in_flight(self) -> int:
        """Return the number of messages in flight, excluding messages that wait for redelivery."""
        if not self.has_waiting:
            return self._window.in_flight_count
        waiting = len(self._unsent_sequences) + self._resend_count + len(self.pending_dead_letters)
        return self._window.in_flight_count - waiting

    def unsettled_ranges(self, first: int, last: int) -> Ranges:
        """Return the ranges of first..last-1 that are neither acknowledged nor given up."""
        ranges = self._window.unacked_ranges(first, last)
        return (
            self.pending_dead_letters.subtract_from(ranges) if self.pending_dead_letters else ranges
        )

    def has_in_flight(
        self, first: int, last: int, attempt: int, *, include_waiting: bool = False
    ) -> bool:
        """Return True if any of first..last-1 is in flight.

        Args:
            first: First sequence.
            last: End of the range.
            attempt: Only messages of this delivery attempt; 0 for any.
            include_waiting: True to include messages that wait for redelivery.
        """
        is_in_flight = self._ack_timer.overlaps(first, last, attempt)
        return is_in_flight or (include_waiting and bool(self._find_waiting(first, last, attempt)))

    def find_part_end(self, first: int, last: int, attempt: int) -> int:
        """Return the end of the front of first..last-1 that one turn can process.

        `attempt` as for `has_in_flight`.
        """
        sets = [sequences for _, _, sequences in self._ack_timer.scheduled_sets(attempt)]
        return find_part_end([*sets, self._resend_sequences], first, last, LONG_NACK_MESSAGES)

    def build_delivery_state(self) -> DeliveryState:
        """Return the state of all messages, for inquiries."""
        waiting = (
            [self._unsent_sequences, self._resend_sequences]
            if self._delivery_policy.in_flight_max is not None
            else []
        )
        return DeliveryState(
            self.count_in_flight(),
            self._ack_timer.scheduled_sets(),
            self._nack_timer.scheduled_sets(),
            self._delayed_spans,
            self.queue,
            waiting,
            pending_dead_letter_count=len(self.pending_dead_letters),
        )

    def list_attempts(self, range_max: int | None = None) -> list[tuple[int, int, int]]:
        """Return ascending (first, last, attempts) of all messages, except those sent once.

        With `range_max`, at most so many spans and so many ranges of sets are examined.
        """
        floor, delayed = self._window.floor, (span for _, _, span in self._delayed_spans)
        member_spans = chain.from_iterable(holder.iter_spans() for holder in self._holders)
        spans = chain(
            self.queue, self._spilled_spans, delayed, member_spans, self.pending_dead_letters
        )
        rows = [
            (span.first, span.last, span.attempts)
            for span in islice(spans, range_max)
            if span.attempts != 1
        ]
        sets = chain(self._ack_timer.scheduled_sets(), self._nack_timer.scheduled_sets())
        ranges = (
            (first, last, attempts)
            for _, attempts, sequences in sets
            if attempts != 1  # Most sets have one attempt.
            for first, last in sequences
        )
        rows += islice(ranges, range_max)
        return sorted(
            (max(first, floor), last, attempts)
            for first, last, attempts in rows
            if last > floor and first < last
        )

    def list_delays(self, tick_seconds: float, range_max: int | None = None) -> DelayRanges:
        """Return (first, last, seconds from now) of all delayed redeliveries, in any order.

        With `range_max`, at most so many of each kind are examined.
        """
        now, tick = self._clock.now, self._clock.tick
        delays = [
            (span.first, span.last, due - now)
            for due, _, span in islice(self._delayed_spans, range_max)
            if span.attempts > 0
        ]
        rejected = (
            (first, last, (due - tick) * tick_seconds)
            for due, _, sequences in self._nack_timer.scheduled_sets()
            for first, last in sequences
        )
        delays += islice(rejected, range_max)
        delays += [
            (span.first, span.last, (due - tick) * tick_seconds)
            for due, span in self._iter_redelivered(range_max)
        ]
        return delays

    def has_more_spans(self, count: int) -> bool:
        """Return True if there are more than `count` spans."""
        return len(list(islice(self.iter_spans(), count + 1))) > count

    def iter_spans(self) -> Iterator[Span]:
        """Yield all spans except pending dead letters. They may include acknowledged messages."""
        yield from self.iter_own_spans()
        for holder in self._holders:
            yield from holder.iter_spans()

    def iter_own_spans(self) -> Iterator[Span]:
        """Yield the spans that no part of a group holds."""
        yield from self.queue.iter_unordered()
        yield from self._spilled_spans
        yield from self._ack_timer
        yield from self._nack_timer
        for _, _, span in self._delayed_spans:
            yield span

    # Groups --------------------------------------------------------------------------------------

    @property
    def has_held_messages(self) -> bool:
        """True if a part of a group holds messages."""
        return any(holder.has_messages for holder in self._holders)

    def add_holder(self, holder: MessageHolder) -> None:
        """Add a part of a group that holds messages."""
        self._holders[holder] = None

    def remove_holder(self, holder: MessageHolder) -> None:
        """Remove a holder. Its messages must be queued again."""
        del self._holders[holder]

    @property
    def is_discarding(self) -> bool:
        """True during `discard_held_in_parts`. No messages may be given to holders then."""
        return self._discarding_count > 0

    def discard_held_in_parts(self, first: int, last: int) -> Generator[None, None, None]:
        """Remove first..last-1 from all holders, in parts of bounded work.

        All parts must be processed, whatever happens between them. Until then, the group assigns no
        messages. The caller must have messages assigned afterwards.
        """
        self._discarding_count += 1
        try:
            for number, holder in enumerate(list(self._holders), 1):
                if holder in self._holders:  # It may have been removed between the parts.
                    holder.discard_range(first, last)
                if number % RECLAIMED_MEMBERS_PER_TURN == 0:
                    yield
        finally:
            self._discarding_count -= 1
        if first == 0:
            self._held_floor = max(self._held_floor, last)

    def discard_held_below(self, floor: int) -> None:
        """Remove the messages below `floor` from all holders."""
        if self._holders and self._held_floor < floor:
            run_to_end(self.discard_held_in_parts(0, floor))

    def collect_finished(self) -> None:
        """Collect the messages that finish without an ack from now on, for `pop_finished`."""
        self._finished_sequences = SequenceSet()

    def add_finished(self, first: int, last: int) -> None:
        """Record that first..last-1 finished without an ack."""
        if self._finished_sequences is not None:
            self._finished_sequences.add(first, last)

    def pop_finished(self) -> Ranges:
        """Return the messages that finished without an ack since the last call."""
        if not self._finished_sequences:
            return []
        finished, self._finished_sequences = self._finished_sequences, SequenceSet()
        return list(finished)

    # Deliveries and acknowledgements -------------------------------------------------------------

    def start_ack_timeout(self, first: int, last: int, attempts: int, tick: int) -> None:
        """Start the ack timeout of first..last-1, which are sent now."""
        self._ack_timer.schedule(
            tick + self._delivery_policy.redelivery_delay_ticks(attempts), first, last, attempts
        )

    def extend_ack_timeout(self, first: int, last: int, tick: int, attempt: int = 0) -> None:
        """Restart the ack timeout of first..last-1."""
        self._ack_timer.reschedule(
            first,
            last,
            lambda attempts: tick + self._delivery_policy.redelivery_delay_ticks(attempts),
            attempt,
        )

    def postpone_ack_timeouts(self, ticks: int) -> None:
        """Make all messages in flight overdue this number of ticks later."""
        self._ack_timer.postpone(ticks)

    def ack(self, first: int, last: int) -> None:
        """Acknowledge the messages of first..last-1 that were sent."""
        if self._is_shared:
            for begin, end in self._find_sent_ranges(first, last):
                self.mark_done(begin, end)
            return
        if not self.has_waiting:
            self._window.ack_range(first, last)
            return
        for begin, end in self._unsent_sequences.missing_ranges(
            max(first, self._window.floor), last
        ):
            self._remove_resend(begin, end)
            self.pending_dead_letters.remove(begin, end)
            self._window.ack_range(begin, end)

    def ack_released(self, sequence: int) -> bool:
        """Acknowledge a message that a former consumer received.

        Returns:
            False if there are too many spans to search for the message.
        """
        if not self._is_shared:
            self.ack(sequence, sequence + 1)
            return True
        if not self._window.unacked_ranges(sequence, sequence + 1):
            return True
        found = self.find_sent_message(sequence)
        if found:
            self.mark_done(sequence, sequence + 1)
        return found is not None

    def ack_ranges(self, firsts: Integers, lasts: Integers) -> None:
        """Acknowledge the messages of many ranges that were sent."""
        window = self._window
        if not self.has_waiting:
            window.ack_ranges(firsts, lasts)
        elif self._is_shared or firsts.size <= PLAIN_FRAMES_MAX:
            for first, last in zip(firsts.tolist(), lasts.tolist(), strict=True):
                self.ack(first, last)
        else:
            named = SequenceSet.from_ranges(np.maximum(firsts, window.floor), lasts)
            acked = named.difference(self._unsent_sequences)
            removed = self._resend_sequences.pop_set(acked)
            self._resend_count -= window.count_unacked_set(removed)
            self.pending_dead_letters.remove_set(acked)
            acked_firsts, acked_lasts = map(np.array, acked.bounds)
            window.ack_ranges(acked_firsts, acked_lasts)

    def mark_done(self, first: int, last: int) -> None:
        """Acknowledge first..last-1, and remove them from everything that waits."""
        self.remove_waiting(first, last)
        self._window.ack_range(first, last)
        self.pending_dead_letters.remove(first, last)
        self.add_finished(first, last)

    def discard_below(self, floor: int) -> None:
        """Remove everything below `floor`, which is skipped next, from everything that waits."""
        self.remove_waiting(0, floor)
        self.pending_dead_letters.remove(0, floor)

    def remove_in_flight(self, first: int, last: int, attempt: int) -> list[Span]:
        """Remove and return the messages of first..last-1 that are in flight.

        Only those of delivery attempt `attempt`, unless it is 0.
        """
        return self._ack_timer.remove(first, last, attempt)

    def pop_waiting(self, first: int, last: int, attempt: int) -> list[Span]:
        """Remove and return the messages of first..last-1 that wait for redelivery.

        Only those of delivery attempt `attempt`, unless it is 0. The caller must acknowledge them
        or give them up: the queue and the timers may still contain them, and skip messages that are
        settled.
        """
        found = self._find_waiting(first, last, attempt)
        if not found:
            return []
        attempts = [attempt] * len(found) if attempt else self._find_attempts(found)
        for begin, end in found:
            self._remove_resend(begin, end)
        return [Span(*bounds, count) for bounds, count in zip(found, attempts, strict=True)]

    def find_sent_message(self, sequence: int) -> list[Span] | None:
        """Find a message that was sent, by a search through the spans.

        Returns:
            The span of the message; empty if the message was not sent; None if the search ended at
            RELEASED_SEARCH_SPANS_MAX spans.
        """
        for count, span in enumerate(self.iter_spans()):
            if count == RELEASED_SEARCH_SPANS_MAX:
                return None
            if span.first <= sequence < span.last and not _is_unsent(span):
                return [Span(sequence, sequence + 1, span.attempts)]
        return []

    def add_pending_dead_letters(self, ranges: Ranges, reason: Reason, attempts: int) -> None:
        """Keep `ranges`, which are given up, until they are dead-lettered."""
        for first, last in ranges:
            self.remove_waiting(first, last)
            self.add_finished(first, last)
        self.pending_dead_letters.add(ranges, reason, attempts)

    # Redelivery ----------------------------------------------------------------------------------

    def requeue(self, spans: Iterable[Span]) -> None:
        """Append spans to the queue."""
        self.queue.extend(spans)
        self.requeue_count += 1

    def requeue_sets(self, sets: list[SpanSet]) -> None:
        """Append the messages of sets to the queue."""
        self.queue.append_sets(sets)
        self.requeue_count += 1

    def requeue_waiting(self, span: Span) -> None:
        """Append a span that is not in flight to the queue, and record that it waits."""
        self.requeue([span])
        self.mark_waiting(span)

    def consume_front(self, span: Span, end: int) -> None:
        """Remove the front of the queue, which is `span`, up to `end`."""
        self.remove_waiting(span.first, end)
        span.first = end
        if span.first >= span.last:
            self.queue.pop_first()

    def skip_spilled_front(self) -> None:
        """Move the front of the queue, which is not read back from disk yet, out of the queue."""
        self._spilled_spans.append(self.queue.pop_first())

    def requeue_spilled(self) -> None:
        """Queue the spans that were read back from disk, before all others."""
        if not self._spilled_spans:
            return
        self.queue.extend_front(self._spilled_spans)
        self._spilled_spans.clear()
        self.requeue_count += 1
        if self._is_shared:
            self.queue.sort(_span_start)

    def reject(self, span: Span, delay_seconds: float | None, tick: int) -> bool:
        """Schedule the redelivery of a rejected span, which is not in flight any more.

        Args:
            span: The messages.
            delay_seconds: Delay before redelivery; None for the backoff of their attempts.
            tick: Current tick.

        Returns:
            True if the span is delayed until a time, so that `next_due_time` may have changed.
        """
        if delay_seconds is None:
            due = tick + self._delivery_policy.nack_delay_ticks(span.attempts)
            backoff_seconds = self._delivery_policy.nack_delay_seconds(span.attempts)
            if backoff_seconds is None:
                self._nack_timer.schedule(due, span.first, span.last, span.attempts)
                return False
            span.backoff_tick = due
            self.delay(self._clock.now + backoff_seconds, span)
            return True
        if delay_seconds <= 0:
            self.requeue([span])
            return False
        self.delay(self._clock.now + delay_seconds, span)
        return True

    def delay(self, due_time: float, span: Span) -> None:
        """Queue a span at `due_time`, in seconds since 1970."""
        heapq.heappush(self._delayed_spans, (due_time, span.first, span))

    def queue_due_delays(self) -> int:
        """Queue a limited number of delayed spans that are due. Returns how many were queued."""
        count = 0
        while (
            self._delayed_spans
            and self._delayed_spans[0][0] <= self._clock.now
            and count * SCAN_COST_OF_DELAY < _WAKEUP_SCAN_MAX  # `next_due_time` stays in the past.
        ):
            self.requeue([heapq.heappop(self._delayed_spans)[2]])
            count += 1
        return count

    def tick_in_parts(self, tick: int) -> Generator[None, None, None]:
        """Queue everything that is overdue at `tick`, in parts of bounded work for many holders."""
        self._resend_sequences.remove(0, self._window.floor)
        overdue = self._ack_timer.pop_due_sets(tick)
        cost, is_divided = 0, False
        for holder in list(self._holders):
            if holder in self._holders:  # It may have been removed between the parts.
                sets = holder.pop_overdue(tick)
                overdue += sets
                cost += sum(sequences.range_count for _, sequences in sets)
            cost += RECLAIMED_RANGES_PER_TURN // RECLAIMED_MEMBERS_PER_TURN
            if cost >= RECLAIMED_RANGES_PER_TURN:
                self._queue_overdue(overdue, [])
                overdue, cost, is_divided = [], 0, True
                yield
        self._queue_overdue(overdue, self._nack_timer.pop_due_sets(tick))
        if is_divided:
            yield
            self.queue.sort_with([], ())
            self.requeue_count += 1  # A key-ordered group sorts the queue again.
            yield

    def _queue_overdue(self, overdue: list[SpanSet], rejected: list[SpanSet]) -> None:
        """Queue messages that were in flight, and rejected ones, in their order."""
        for _, sequences in overdue:
            sequences.remove(0, self._window.floor)
        due = [(attempts, sequences) for attempts, sequences in overdue if sequences]
        self._mark_sets_waiting(due)
        if due or rejected:
            self.requeue_sets(due + rejected)

    def requeue_unacked(self, sets: ScheduledSets) -> None:
        """Queue the redelivery of messages whose consumer is gone.

        Messages sent once are queued at once, the others at the tick at which they are overdue.
        """
        self.requeue_sets([(attempts, messages) for _, attempts, messages in sets if attempts < 2])
        for due_tick, attempts, messages in sets:
            if attempts >= 2:
                self._nack_timer.schedule_set(due_tick, attempts, messages)

    def requeue_all_in_flight(self) -> None:
        """Queue the redelivery of everything in flight, because the consumer is gone.

        Messages sent once are queued at once, the others after their backoff, so that a consumer
        that keeps crashing does not use up a message's deliveries.
        """
        self._mark_all_waiting()
        self._requeue_in_flight([])
        self.requeue_count += 1

    def _requeue_in_flight(self, added: list[SpanSet]) -> None:
        """Queue the redelivery of everything in flight, and the sets in `added`, in order."""
        due = added
        for due_tick, attempts, sequences in self._ack_timer.pop_all_sets():
            if attempts < 2:
                due.append((attempts, sequences))
            else:
                self._nack_timer.schedule_set(due_tick, attempts, sequences)
        self.queue.sort_with(due, self._spilled_spans)
        self._spilled_spans.clear()

    # Predecessor and successor -------------------------------------------------------------------

    def build_handover(self) -> PositionHandover:
        """Return the state that a successor continues, without the limits of floor and cursor."""
        ticks = [(span.first, span.last, due) for due, span in self._iter_redelivered()]
        for due, _, sequences in self._nack_timer.scheduled_sets():
            ticks += [(first, last, due) for first, last in sequences]
        times = [
            (span.first, span.last, due)
            for due, _, span in self._delayed_spans
            if span.attempts > 0
        ]
        sent = [
            (span.first, span.last, span.attempts)
            for span in chain(self.iter_spans(), self.pending_dead_letters)
            if span.attempts > 0
        ]
        backoff_ticks = [
            (span.first, span.last, span.backoff_tick)
            for _, _, span in self._delayed_spans
            if span.backoff_tick
        ]
        return PositionHandover(sorted(sent), ticks, sorted(times), sorted(backoff_ticks))

    def end(self) -> None:
        """Record that the position ended; a successor may call `take_over`."""
        self._ended_at = self._window.cursor

    def can_be_taken_over(self, window: AckWindow, *, is_shared: bool) -> bool:
        """Return True if a successor with this window may call `take_over`.

        `is_shared` is True if the successor is the position of a group.
        """
        return (
            self._window is window
            and self._is_shared == is_shared
            and not self.pending_dead_letters
            and not self.has_held_messages
        )

    def take_over(self, predecessor: UnackedMessages) -> None:
        """Continue the state of an ended position with the same window.

        The sets of `predecessor` are moved, so that the cost does not depend on the number of
        ranges. The result is the same as with `build_handover`, `PositionHandover.passed_spans` and
        `Position.apply_handover`.
        """
        window, clock = self._window, self._clock
        self._ack_timer, self._nack_timer = predecessor._ack_timer, predecessor._nack_timer
        self._delayed_spans = predecessor._delayed_spans
        self.queue = predecessor.queue
        self._spilled_spans = predecessor._spilled_spans
        # Since the predecessor ended, messages may have been purged, or acknowledged by others.
        self._unsent_sequences = window.unacked_set(predecessor._unsent_sequences)
        self.queue_due_delays()
        added = SequenceSet()
        added.add(max(predecessor._ended_at, window.floor), window.cursor)
        new = window.unacked_set(added)
        if not self._is_shared:
            self._unsent_sequences.update(list(new))
        self._requeue_in_flight([(0, new)])
        due = self._nack_timer.pop_sets_until(clock.tick)
        self.queue.sort_with(due, [])
        self._mark_all_waiting()

    def delay_until(self, delays: Iterable[tuple[int, int, float]]) -> bool:
        """Delay queued messages: rows (first, last, due) with `due` in seconds since 1970.

        Returns True if any row is in the future, so that `next_due_time` may have changed.
        """
        future_delays = [row for row in sorted(delays) if row[2] > self._clock.now]
        if not future_delays:
            return False
        for span, due in split_spans(self.queue.pop_all(), future_delays):
            if due is None:
                self.queue.append(span)
            else:
                self._delayed_spans.append((due, span.first, span))
        heapq.heapify(self._delayed_spans)
        return True

    def delay_until_ticks(self, delays: Iterable[tuple[int, int, int]]) -> None:
        """Delay queued messages: rows (first, last, tick)."""
        future_delays = sorted(row for row in delays if row[2] > self._clock.tick)
        if not future_delays:
            return
        for span, due in split_spans(self.queue.pop_all(), future_delays):
            if due is None:
                self.queue.append(span)
            else:
                self._nack_timer.schedule(int(due), span.first, span.last, span.attempts)

    def pop_delayed_spans(self) -> list[tuple[float, Span]]:
        """Remove and return the delayed spans, each with the time when it is due, by time."""
        delayed = [(due, span) for due, _, span in sorted(self._delayed_spans)]
        self._delayed_spans = []
        return delayed

    def pop_unordered_delayed_spans(self) -> list[tuple[float, int, Span]]:
        """Remove and return the delayed spans, in no order."""
        delayed, self._delayed_spans = self._delayed_spans, []
        return delayed

    def _iter_redelivered(self, range_max: int | None = None) -> Iterator[tuple[int, Span]]:
        """Yield the spans in flight that were sent more than once, each with its due tick.

        With `range_max`, at most so many ranges and so many spans of holders are examined.
        """
        ranges = (
            (due, Span(first, last, attempts))
            for due, attempts, sequences in self._ack_timer.scheduled_sets()
            if attempts > 1
            for first, last in sequences
        )
        yield from islice(ranges, range_max)
        member_spans = chain.from_iterable(holder.iter_in_flight() for holder in self._holders)
        yield from (
            (due, span) for due, span in islice(member_spans, range_max) if span.attempts > 1
        )

    # Waiting messages ----------------------------------------------------------------------------

    def mark_waiting(self, span: Span) -> None:
        """Record that a span waits to be sent, for the first time or again.

        The position of a group needs no such record: only messages that a member holds can be
        acknowledged.
        """
        if self._is_shared:
            return
        if _is_unsent(span):
            for first, last in self.unsettled_ranges(span.first, span.last):
                self._unsent_sequences.add(first, last)
        else:
            self.mark_sent_spans_waiting([span])

    def mark_sent_spans_waiting(self, spans: list[Span]) -> None:
        """Record that spans, which were in flight, wait to be sent again."""
        resent = SequenceSet()
        resent.update(sorted((span.first, span.last) for span in spans))
        self._mark_sets_waiting([(1, resent)])

    def remove_waiting(self, first: int, last: int) -> None:
        """Record that first..last-1 no longer wait to be sent.

        Must be called before they are settled, because only unsettled messages are counted.
        """
        self._unsent_sequences.remove(first, last)
        self._remove_resend(first, last)

    def _remove_resend(self, first: int, last: int) -> None:
        """Record that first..last-1 no longer wait to be redelivered. See `remove_waiting`."""
        sequences = self._resend_sequences
        if sequences.is_within(first, last):
            sequences.clear()
            self._resend_count = 0
        else:
            removed = sequences.pop(first, last)
            self._resend_count -= self._window.count_unacked_set(removed)

    def _queue_inherited(self, spans: list[Span]) -> None:
        """Queue the spans of a predecessor."""
        self.queue.extend(spans)
        if len(spans) <= _MARKED_ONE_BY_ONE_MAX:
            for span in spans:
                self.mark_waiting(span)
            return
        unsent, sent = SequenceSet(), SequenceSet()
        unsent.update([(span.first, span.last) for span in spans if _is_unsent(span)])
        sent.update([(span.first, span.last) for span in spans if not _is_unsent(span)])
        if not self._is_shared:
            self._unsent_sequences = self._window.unacked_set(unsent)
        self._mark_sets_waiting([(1, sent)])

    def _mark_sets_waiting(self, sets: list[SpanSet]) -> None:
        """Record that messages in flight wait to be sent again, in one pass for each set."""
        if self._is_shared or self._delivery_policy.in_flight_max is None:
            return
        for _, sequences in sets:
            if self.pending_dead_letters:
                sequences = sequences.difference(self.pending_dead_letters.sequences)
            self._resend_sequences.unite(sequences)
            self._resend_count += self._window.count_unacked_set(sequences)

    def _mark_all_waiting(self) -> None:
        """Record that nothing is in flight: all unsettled messages wait to be sent."""
        if self._is_shared or self._delivery_policy.in_flight_max is None:
            return
        window = self._window
        sent = self._unsent_sequences.complement(window.floor, window.cursor)
        self._resend_sequences = sent.difference(self.pending_dead_letters.sequences)
        self._resend_count = (
            window.in_flight_count - len(self._unsent_sequences) - len(self.pending_dead_letters)
        )

    def _find_sent_ranges(self, first: int, last: int) -> Ranges:
        """Return the messages of first..last-1 that were sent and are not acknowledged."""
        return [
            part
            for span in list(self.iter_spans())
            if not _is_unsent(span)
            for part in self._window.unacked_ranges(max(first, span.first), min(last, span.last))
        ]

    def _find_waiting(self, first: int, last: int, attempt: int) -> Ranges:
        """Return the ranges of first..last-1 that wait for redelivery.

        For an attempt other than 0 the search is limited, so the result may be incomplete.
        """
        waiting = self._resend_sequences
        waiting_ranges = self._waiting_ranges(first, last)
        if not attempt or not waiting_ranges:
            return waiting_ranges
        ranges = [
            r
            for _, _, sequences in self._nack_timer.scheduled_sets(attempt)
            for r in sequences.ranges_within(first, last)
        ]
        delayed = (span for _, _, span in self._delayed_spans)
        for span in islice(
            chain(self.queue, self._spilled_spans, delayed), WAITING_SEARCH_SPANS_MAX
        ):
            if span.attempts == attempt:
                ranges += waiting.ranges_within(max(first, span.first), min(last, span.last))
        return [r for begin, end in ranges for r in self._waiting_ranges(begin, end)]

    def _waiting_ranges(self, first: int, last: int) -> Ranges:
        """Return the ranges of first..last-1 that wait for redelivery and are not settled."""
        waiting = self._resend_sequences.ranges_within(first, last)
        return [part for each in waiting for part in self._window.unacked_ranges(*each)]

    def _find_attempts(self, ranges: Ranges) -> list[int]:
        """Return the attempts of the first message of each of some waiting ranges, or 1 if a
        limited search does not find it.
        """
        spans = sorted(islice(self.iter_spans(), WAITING_SEARCH_SPANS_MAX), key=_span_start)
        found = []
        for first, _ in ranges:
            index = bisect_right(spans, first, key=_span_start) - 1
            is_found = index >= 0 and first < spans[index].last
            found.append(spans[index].attempts if is_found else 1)
        return found

    # Checks --------------------------------------------------------------------------------------

    def check_invariants(self) -> None:
        """Raise AssertionError unless the invariants hold."""
        window = self._window
        if not self.is_discarding:  # Else some messages are skipped soon, and in no span.
            unsettled = self.unsettled_ranges(window.floor, window.cursor)
            check_covered_once(self.iter_spans(), unsettled)
        self.pending_dead_letters.check_invariants()
        for span in self.pending_dead_letters:
            assert window.unacked_ranges(span.first, span.last) == [(span.first, span.last)]
        self._check_waiting_sequences()

    def _check_waiting_sequences(self) -> None:
        """Raise AssertionError unless the waiting sequences match the waiting spans."""
        if self._is_shared:
            assert not self._unsent_sequences
            assert not self._resend_sequences
            return
        unsent, resend = SequenceSet(), SequenceSet()
        delayed = (span for _, _, span in self._delayed_spans)
        for span in (*self.queue, *self._spilled_spans, *self._nack_timer, *delayed):
            for first, last in self.unsettled_ranges(span.first, span.last):
                (unsent if _is_unsent(span) else resend).add(first, last)
        assert list(self._unsent_sequences) == list(unsent), (
            list(self._unsent_sequences),
            list(unsent),
        )
        if self._delivery_policy.in_flight_max is not None:
            waiting = self._waiting_ranges(self._window.floor, self._window.cursor)
            assert waiting == list(resend), (waiting, list(resend))
            assert self._resend_count == len(resend), (self._resend_count, len(resend))


def _is_unsent(span: Span) -> bool:
    """Return True if a span was never sent, by this position or by its predecessor."""
    return span.attempts == 0


def _span_start(span: Span) -> int:
    return span.first
