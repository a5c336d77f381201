"""Position of one consumer in a class: cursor, ack window and redeliveries.

A position holds sequences of its class's ring, never messages. A tick touches only spans that are
due and queues each of them once, with a longer pause each time. Messages that wait to be sent
(again) are not in flight, and a message that was never sent cannot be acknowledged.

    ring                   floor ─ in flight ─ cursor ─ not sent yet ─ head
    _ack_timer             tick 17: (4, 9)  tick 18: (9, 30) …     in flight, by tick when overdue
    _nack_timer            tick 19: (2, 3)                         rejected, by tick of redelivery
    _delayed_spans         12.5 s: (30, 31)                        delayed until a time
    _redelivery_queue      (4, 6) (8, 9)                           to be sent now, or given up
    pending_dead_letters   (3, 4)                                  given up, not dead-lettered yet

The redelivery queue also holds spans that were never sent (attempts 0), after a delay or a
predecessor, and spans at their delivery limit. The latter become dead letters when they are next
selected for sending, so not while a durable has no session.
"""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import chain, islice

from simplebus.core.clock import BrokerClock
from simplebus.core.errors import Reason
from simplebus.core.limits import IN_FLIGHT_BYTES, MESSAGES_MAX, SCAN_SPANS_MAX
from simplebus.core.outbox import NullOutbox, Outbox
from simplebus.core.redelivery.ack_window import AckWindow
from simplebus.core.redelivery.delivery_policy import DeliveryPolicy
from simplebus.core.redelivery.delivery_state import DeliveryState
from simplebus.core.redelivery.failure_reasons import FailureReasons
from simplebus.core.redelivery.handover import PositionHandover
from simplebus.core.redelivery.in_flight_bytes import InFlightBytes
from simplebus.core.redelivery.sequence_set import SequenceSet
from simplebus.core.redelivery.timer_wheel import Span, TimerWheel, check_covered_once, split_spans
from simplebus.core.ring.ring import Ring
from simplebus.core.statistics import SubscriptionStatistics
from simplebus.core.subscription.backlog import BacklogCounter
from simplebus.core.subscription.channel_filter import ChannelFilter
from simplebus.core.subscription.pending_dead_letters import PendingDeadLetters
from simplebus.core.subscription.selection import Ranges

NEVER = float("inf")
"""Time of a wakeup that is not scheduled."""


class Position(ABC):
    """Cursor, ack window and redelivery state of one consumer. Implements `SendSource`."""

    is_key_ordered = False
    """True for a group whose members each get the messages of some keys."""

    def __init__(
        self,
        *,
        ring: Ring,
        window: AckWindow,
        outbox: Outbox | None = None,
        delivery_policy: DeliveryPolicy,
        timer_index_modulus: int = 0,
        subscription_number: int = 0,
        clock: BrokerClock | None = None,
        channel_filter: ChannelFilter | None = None,
        on_floor_moved: Callable[[], None] = lambda: None,
        dead_letter: Callable[
            [Ranges, Reason, int], int | None
        ] = lambda ranges, reason, attempts: None,
        schedule_wakeup: Callable[[float], None] = lambda due: None,
        failure_reasons: FailureReasons | None = None,
        redeliveries: Iterable[Span] = (),
    ) -> None:
        """Create a position. `redeliveries` are the spans that its window has in flight."""
        self.class_id = ring.class_id
        self.class_ring = ring
        """Messages of the class that are in memory."""
        self.ring = ring
        """Ring to send from: the class's, or a spill reader's while spilled messages are read."""
        self.window = window
        self.outbox = outbox or NullOutbox()
        self.delivery_policy = delivery_policy
        self.subscription_number = subscription_number
        self.channel_filter = channel_filter
        """Channels it receives; None for all."""
        self.durable = ""
        """Name of the durable; empty if the position ends with its session."""
        self.owner = ""
        """User that created it; empty if unknown."""
        self.log_position = 0
        """Log position of the entry that created or removed it; 0 if it is not journaled."""
        self.idle_seconds: float | None = None
        """Seconds it is kept while no session is attached; None for unlimited."""
        self.group = ""
        self.request_number = 0
        """Number of the last Subscribe request for it."""
        self.unattended_since = 0.0
        """Time since when no session is attached."""
        self.delivered_count = 0
        self.redelivered_count = 0
        self.nack_count = 0
        """Number of rejections."""
        self.dropped_count = 0
        self.is_queued = False
        self.attempt = 1
        self.scanned_count = 0
        self.is_too_slow = False
        """True if the consumer must be disconnected because its backlog is too long."""
        self._slow_check_tick = -1
        """Tick in which `is_over_pending_limit` inspected messages last."""
        self.undelivered_counts: Counter[Reason] = Counter()
        """Messages that it was never sent, or not again, by reason."""
        self._timer_index_modulus = timer_index_modulus or delivery_policy.ack_timeout_ticks
        """Modulus of timer indexes, the same for the whole class."""
        self._clock = clock or BrokerClock()
        self._on_floor_moved = on_floor_moved
        """Called when the floor may have moved without an ack."""
        self._dead_letter = dead_letter
        """Dead-letters ranges, given the reason and their attempts.

        Returns the first sequence for which there is no space, or None.
        """
        self._schedule_wakeup = schedule_wakeup
        """Called with the time at which `handle_wakeup` is to be called."""
        self._failure_reasons = FailureReasons() if failure_reasons is None else failure_reasons
        self._in_flight_bytes = InFlightBytes(ring)
        """Bytes of the messages in flight."""
        self._peeked_end = window.cursor
        self._zero_copy_end = 0
        """Messages from the cursor up to here can be sent without inspection."""
        self._backlog_counter: BacklogCounter | None = None
        """Counter of matching messages ahead of the cursor; created when first needed."""
        self._passed_count = window.in_flight_count
        """Messages that the cursor has passed, or that waited behind it from the start."""
        self._skipped_count = 0
        """The part of `_passed_count` that was finished without an ack."""
        self._ack_timer = TimerWheel()
        self._nack_timer = TimerWheel()
        self._delayed_spans: list[tuple[float, int, Span]] = []
        self._redelivery_queue: deque[Span] = deque()
        self._spilled_redeliveries: list[Span] = []
        """Redeliveries that are not read back from disk yet."""
        self._unsent_sequences = SequenceSet()
        """Messages behind the cursor that were never sent."""
        self._resend_sequences = SequenceSet()
        """Messages that wait to be redelivered; kept only if messages in flight are limited."""
        self.pending_dead_letters = PendingDeadLetters()
        """Messages given up that wait for space in the dead letters."""
        self.inherited_delays: list[tuple[int, int, int]] = []
        """Delays of single messages while the whole position is delayed.

        The rows are those of `PositionHandover.not_before_ticks`.
        """
        self.outbox_after_delay: Outbox | None = None
        """Outbox to attach when that delay ends."""
        for span in redeliveries:
            self._redelivery_queue.append(span)
            self._mark_waiting(span)

    @property
    def acknowledged_count(self) -> int:
        """Number of acknowledged messages."""
        return self._passed_count - self._skipped_count - self.window.in_flight_count

    @property
    def is_connected(self) -> bool:
        return not isinstance(self.outbox, NullOutbox)

    @property
    def has_frames_to_copy(self) -> bool:
        if self._redelivery_queue:
            return True
        if self.is_filtered:
            return self.window.cursor >= self._zero_copy_end
        return self.window.cursor < self.ring.special_until and self.has_to_inspect

    @property
    def is_filtered(self) -> bool:
        """True if some messages of the class may not match its filter."""
        return self.channel_filter is not None and not self.channel_filter.is_match_all

    @property
    def has_to_inspect(self) -> bool:
        """True if new messages must be inspected one by one."""
        ring, cursor = self.ring, self.window.cursor
        return (
            self.is_filtered
            or cursor < ring.timed_until
            or (cursor < ring.envelopes_until and not self.delivery_policy.accepts_envelopes)
        )

    @property
    def has_consumer(self) -> bool:
        """True if a session is attached that messages can be sent to."""
        return self.is_connected

    @property
    def has_work(self) -> bool:
        if not self._redelivery_queue and self.window.cursor >= self.ring.head:
            return False
        return self.delivery_policy.in_flight_max is None or self._in_flight_capacity() > 0

    def build_delivery_state(self) -> DeliveryState:
        """Return where the messages behind the cursor are, for inquiries."""
        waiting = (
            [self._unsent_sequences, self._resend_sequences]
            if self.delivery_policy.in_flight_max is not None
            else []
        )
        in_flight, pauses = self._ack_timer.scheduled_sets(), self._nack_timer.scheduled_sets()
        return DeliveryState(
            self._in_flight_count(),
            in_flight,
            pauses,
            self._delayed_spans,
            self._redelivery_queue,
            waiting,
            pending_dead_letter_count=len(self.pending_dead_letters),
        )

    def statistics(self) -> SubscriptionStatistics:
        return SubscriptionStatistics(
            class_id=self.class_id,
            session_id=(self.outbox_after_delay or self.outbox).session_id,
            number=self.subscription_number,
            durable=self.durable,
            group=self.group,
            floor=self.window.floor,
            cursor=self.window.cursor,
            in_flight=self.window.in_flight_count,
            waiting=self.class_ring.head - self.window.cursor,
            delivered=self.delivered_count,
            redelivered=self.redelivered_count,
            acknowledged=self.acknowledged_count,
            dropped=self.dropped_count,
            undelivered=dict(self.undelivered_counts),
        )

    def _in_flight_capacity(self) -> int:
        """Return how many more messages may be in flight."""
        window, limit = self.window, self.delivery_policy.in_flight_max
        if limit is None:
            return MESSAGES_MAX
        count = self._in_flight_count()
        if 0 < count < limit and self._in_flight_bytes.estimate(count, window) >= IN_FLIGHT_BYTES:
            return 0
        return max(0, limit - count)

    def _in_flight_count(self) -> int:
        """Return the number of messages in flight, without those that wait for redelivery."""
        waiting = (
            len(self._unsent_sequences)
            + len(self._resend_sequences)
            + len(self.pending_dead_letters)
        )
        return self.window.in_flight_count - waiting

    def _unsettled_ranges(self, first: int, last: int) -> Ranges:
        """Return the ranges of first..last-1 that are neither acknowledged nor given up."""
        ranges = self.window.unacked_ranges(first, last)
        return (
            self.pending_dead_letters.subtract_from(ranges) if self.pending_dead_letters else ranges
        )

    @property
    def delayed_count(self) -> int:
        """Approximate number of messages that wait for the end of a delay."""
        delayed = sum(span.last - span.first for _, _, span in self._delayed_spans)
        return delayed + sum(span.last - span.first for span in self._nack_timer)

    def limit_in_flight(self, count: int) -> None:
        """Allow at most `count` more messages in flight from now on. Only lowers the limit."""
        limit = self.delivery_policy.in_flight_max
        if limit is not None and self._in_flight_count() + count < limit:
            self.delivery_policy = replace(
                self.delivery_policy, in_flight_max=self._in_flight_count() + count
            )

    @abstractmethod
    def copy_frames(self, tick: int) -> bytes:
        """Return copies of the next frames, joined so that one write sends them."""

    @abstractmethod
    def peek_frames(self, tick: int) -> memoryview: ...

    @abstractmethod
    def mark_sent(self, piece: memoryview, sent_bytes: int, tick: int) -> bytes:
        """Record that part of a piece was sent. Returns a copy of the rest of a cut frame."""

    # Acknowledgements and redelivery -------------------------------------------------------------

    @property
    def has_waiting_redeliveries(self) -> bool:
        """True if messages behind the cursor may wait to be sent."""
        return bool(
            self._redelivery_queue
            or self._delayed_spans
            or self._nack_timer
            or self._spilled_redeliveries
            or self.pending_dead_letters
        )

    def ack(self, first: int, last: int) -> None:
        """Acknowledge the messages of first..last-1 that were sent."""
        if not self.has_waiting_redeliveries:
            self.window.ack_range(first, last)
            return
        for begin, end in self._unsent_sequences.missing_ranges(
            max(first, self.window.floor), last
        ):
            self._resend_sequences.remove(begin, end)
            self.pending_dead_letters.remove(begin, end)
            self.window.ack_range(begin, end)

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
        return is_in_flight or (
            include_waiting and bool(self._find_waiting_redeliveries(first, last, attempt))
        )

    def _find_waiting_redeliveries(self, first: int, last: int, attempt: int) -> Ranges:
        """Return the ranges of first..last-1 that wait for redelivery.

        For an attempt other than 0 the search is limited, so the result may be incomplete.
        """
        waiting = self._resend_sequences
        if not attempt:
            return waiting.ranges_within(first, last)
        ranges = [
            r
            for _, _, sequences in self._nack_timer.scheduled_sets(attempt)
            for r in sequences.ranges_within(first, last)
        ]
        delayed = (span for _, _, span in self._delayed_spans)
        for span in islice(
            chain(self._redelivery_queue, self._spilled_redeliveries, delayed), SCAN_SPANS_MAX
        ):
            if span.attempts == attempt:
                ranges += waiting.ranges_within(max(first, span.first), min(last, span.last))
        return [r for begin, end in ranges for r in waiting.ranges_within(begin, end)]

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
        """Reject messages of first..last-1 that are in flight; they are redelivered later.

        Args:
            delay_seconds: Delay before redelivery; None for the backoff of their attempts.
            attempt: Only messages of this delivery attempt; 0 for any.
            error: Reason given by the consumer, kept for dead letters.
        """
        for span in self._ack_timer.remove(first, last, attempt):
            self._mark_waiting(span)
            self._schedule_redelivery(span, delay_seconds, tick, error)
        if self._redelivery_queue:
            self.outbox.enqueue(self)

    def _schedule_redelivery(
        self, span: Span, delay_seconds: float | None, tick: int, error: str
    ) -> None:
        """Schedule the redelivery of a rejected span after its backoff or after `delay_seconds`."""
        self._failure_reasons.record(self, span.first, span.last, error)
        self.nack_count += 1
        if delay_seconds is None:
            due = tick + self.delivery_policy.nack_delay_ticks(span.attempts)
            self._nack_timer.schedule(due, span.first, span.last, span.attempts)
        elif delay_seconds <= 0:
            self._redelivery_queue.append(span)
        else:
            self._delay_span(self._clock.now + delay_seconds, span)

    def extend_ack_timeout(self, first: int, last: int, tick: int, attempt: int = 0) -> None:
        """Restart the ack timeout of first..last-1."""
        self._postpone_timeouts(self._ack_timer, first, last, tick, attempt)

    def _postpone_timeouts(
        self, ack_timer: TimerWheel, first: int, last: int, tick: int, attempt: int
    ) -> None:
        ack_timer.reschedule(
            first,
            last,
            lambda attempts: tick + self.delivery_policy.redelivery_delay_ticks(attempts),
            attempt,
        )

    def tick(self, tick: int) -> None:
        """Queue the redelivery of everything that is overdue at `tick`."""
        due = [span for span in self._ack_timer.pop_due(tick) if span.last > self.window.floor]
        for span in due:
            self._mark_waiting(span)
        if self._nack_timer and (rejected := self._nack_timer.pop_due(tick)):
            due = sorted(due + rejected, key=lambda span: span.first)
        self._redelivery_queue += due
        if self._redelivery_queue:
            self.outbox.enqueue(self)
        self.window.release_memory()

    @property
    def next_wakeup(self) -> float:
        """Time at which `handle_wakeup` is to be called next."""
        return self._delayed_spans[0][0] if self._delayed_spans else NEVER

    def handle_wakeup(self) -> bool:
        """Queue delayed messages whose time has come. Returns True if there is work to do."""
        while self._delayed_spans and self._delayed_spans[0][0] <= self._clock.now:
            self._redelivery_queue.append(heapq.heappop(self._delayed_spans)[2])
        if self._redelivery_queue:
            self.outbox.enqueue(self)
        return bool(self._redelivery_queue)

    def _delay_span(self, due_time: float, span: Span) -> None:
        heapq.heappush(self._delayed_spans, (due_time, span.first, span))
        self._schedule_wakeup(due_time)

    def _mark_waiting(self, span: Span) -> None:
        """Record that a span waits to be sent, for the first time or again."""
        waiting = self._unsent_sequences if self._is_unsent(span) else self._resend_sequences
        if waiting is self._unsent_sequences or self.delivery_policy.in_flight_max is not None:
            for first, last in self._unsettled_ranges(span.first, span.last):
                waiting.add(first, last)

    def _is_unsent(self, span: Span) -> bool:
        """Return True if a span was never sent, by this position or by its predecessor."""
        return span.attempts == 0

    # Attaching and detaching sessions ------------------------------------------------------------

    def detach(self) -> None:
        """Detach the session; the position stays and its messages in flight are redelivered.

        Messages sent once are redelivered as soon as a session attaches, the others after their
        backoff, so that a consumer that keeps crashing does not use up a message's deliveries.
        """
        self.outbox.remove(self)
        self.outbox = NullOutbox()
        for due, span in self._ack_timer.pop_all():
            self._mark_waiting(span)
            self._requeue_unacked(span, due)
        redeliveries = sorted(
            (*self._redelivery_queue, *self._spilled_redeliveries), key=lambda span: span.first
        )
        self._redelivery_queue = deque(redeliveries)
        self._spilled_redeliveries.clear()

    def _requeue_unacked(self, span: Span, due_tick: int) -> None:
        """Queue the redelivery of a span whose consumer is gone. It was due at `due_tick`."""
        if span.attempts < 2:
            self._redelivery_queue.append(span)
        else:
            self._nack_timer.schedule(due_tick, span.first, span.last, span.attempts)

    def mark_removed(self) -> None:
        """Cancel wakeups and forget the failure reasons of a removed position."""
        self._schedule_wakeup(NEVER)
        self._failure_reasons.forget_position(self)

    def attach(self, outbox: Outbox, number: int) -> None:
        """Attach a session's outbox."""
        self.outbox, self.subscription_number = outbox, number

    # Spilled messages ----------------------------------------------------------------------------

    @property
    def is_reading_spilled(self) -> bool:
        """True if it needs messages that are no longer in memory."""
        return self.ring is not self.class_ring

    @property
    def can_suspend_reading(self) -> bool:
        """True if its ring may be empty while no session is attached."""
        return True

    def switch_ring(self, ring: Ring) -> None:
        """Send from `ring` from now on."""
        self.ring = ring
        self._in_flight_bytes = InFlightBytes(ring)
        self._backlog_counter = None
        self._zero_copy_end = 0

    def set_channel_filter(self, channel_filter: ChannelFilter | None) -> None:
        """Set the filter for a new consumer."""
        self.channel_filter = channel_filter
        self._backlog_counter = None
        self._zero_copy_end = 0

    def requeue_spilled(self) -> None:
        """Queue the redeliveries that were read back from disk, before all others."""
        self._redelivery_queue.extendleft(reversed(self._spilled_redeliveries))
        self._spilled_redeliveries.clear()
        if self._redelivery_queue:
            self.outbox.enqueue(self)

    def list_attempts(self) -> list[tuple[int, int, int]]:
        """Return ascending (first, last, attempts) of unacknowledged messages, unless sent once."""
        floor = self.window.floor
        return sorted(
            (max(span.first, floor), span.last, span.attempts)
            for span in chain(self._iter_spans(), self.pending_dead_letters)
            if span.attempts != 1 and span.last > floor and span.first < span.last
        )

    def build_handover(self) -> PositionHandover:
        """Return the redelivery state that a successor takes over."""
        floor = self.window.floor
        ticks = [(span.first, span.last, due) for due, span in self._iter_redelivered()]
        ticks += self.inherited_delays
        for due, _, sequences in self._nack_timer.scheduled_sets():
            ticks += [(first, last, due) for first, last in sequences]
        times = [
            (span.first, span.last, due)
            for due, _, span in self._delayed_spans
            if span.attempts > 0
        ]
        sent = [
            (span.first, span.last, span.attempts)
            for span in chain(self._iter_spans(), self.pending_dead_letters)
            if span.attempts > 0
        ]
        return PositionHandover(sorted(sent), sorted(ticks), sorted(times)).restrict_to(
            floor, self.window.cursor
        )

    def _iter_redelivered(self) -> Iterator[tuple[int, Span]]:
        """Yield the spans in flight that were sent more than once, each with its due tick."""
        for due, attempts, sequences in self._ack_timer.scheduled_sets():
            if attempts > 1:
                for first, last in sequences:
                    yield due, Span(first, last, attempts)

    def delay_redeliveries(self, delays: Iterable[tuple[int, int, float]]) -> None:
        """Delay redeliveries: rows (first, last, due) with `due` in seconds since 1970."""
        future_delays = [row for row in sorted(delays) if row[2] > self._clock.now]
        self._redelivery_queue, spans = deque(), self._redelivery_queue
        for span, due in split_spans(spans, future_delays):
            if due is None:
                self._redelivery_queue.append(span)
            else:
                self._delay_span(due, span)

    def apply_handover(self, handover: PositionHandover, tick_seconds: float) -> None:
        """Continue the delays of a predecessor."""
        self.delay_redeliveries(handover.not_before_times)
        future_delays = sorted(
            row for row in handover.not_before_ticks if row[2] > self._clock.tick
        )
        self._redelivery_queue, spans = deque(), self._redelivery_queue
        for span, due in split_spans(spans, future_delays):
            if due is None:
                self._redelivery_queue.append(span)
            else:
                self._nack_timer.schedule(int(due), span.first, span.last, span.attempts)

    def _iter_spans(self) -> Iterator[Span]:
        """Yield all unacknowledged spans."""
        yield from self._redelivery_queue
        yield from self._spilled_redeliveries
        yield from self._ack_timer
        yield from self._nack_timer
        for _, _, span in self._delayed_spans:
            yield span

    def check_invariants(self) -> None:
        """Raise AssertionError unless the invariants hold."""
        window = self.window
        window.check()
        assert self.ring.floor <= window.floor <= window.cursor <= self.class_ring.head
        assert window.cursor <= self.ring.head or self.is_reading_spilled
        assert self.acknowledged_count >= 0
        if self.has_work and self.is_connected:
            assert self.is_queued, "a position with messages to send is not queued"
        spans, given_up = list(self._iter_spans()), SequenceSet()
        for span in spans:
            if span.give_up_reason:
                given_up.add(span.first, span.last)
        unsettled = self._unsettled_ranges(window.floor, window.cursor)
        remaining = [
            part for first, last in unsettled for part in given_up.missing_ranges(first, last)
        ]
        check_covered_once((span for span in spans if not span.give_up_reason), remaining)
        self.pending_dead_letters.check_invariants()
        for span in self.pending_dead_letters:
            assert window.unacked_ranges(span.first, span.last) == [(span.first, span.last)]
        self._check_waiting_sequences()

    def _check_waiting_sequences(self) -> None:
        """Raise AssertionError unless the waiting sequences match the waiting spans."""
        unsent, resend = SequenceSet(), SequenceSet()
        delayed = (span for _, _, span in self._delayed_spans)
        for span in (
            *self._redelivery_queue,
            *self._spilled_redeliveries,
            *self._nack_timer,
            *delayed,
        ):
            for first, last in self._unsettled_ranges(span.first, span.last):
                (unsent if self._is_unsent(span) else resend).add(first, last)
        assert list(self._unsent_sequences) == list(unsent), (
            list(self._unsent_sequences),
            list(unsent),
        )
        if self.delivery_policy.in_flight_max is not None:
            assert list(self._resend_sequences) == list(resend), (
                list(self._resend_sequences),
                list(resend),
            )
