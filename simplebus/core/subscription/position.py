"""Where one subscription stands in its class: what it was sent, what came back, what waits.

Rule 1: a position never holds a message; it holds sequences of its class's ring.
Rule 2: a tick touches only what is due; what is due is queued once, with a longer pause each time.
Rule 3: what waits to be sent, be it again, is not in flight; and what was never sent cannot be
acknowledged, though the cursor has passed it.

    ring    floor ─ in flight ─ cursor ─ not sent yet ─ head
    wheel   tick 17: (4, 9)  tick 18: (9, 30) …      in flight: what to look at again, by tick
    refused tick 19: (2, 3)                          what pauses, by tick
    later   12.5 s: (30, 31)                         put off to a time
    again   (4, 6) (8, 9)                            what is to be sent again now
    unburied (3, 4)                                  given up, and not a dead letter yet
"""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import chain, islice

from simplebus.core.errors import Reason
from simplebus.core.limits import IN_FLIGHT_BYTES, LOOKED_FOR_SPANS, MESSAGES_MAX
from simplebus.core.redelivery.ack_timer import SequenceSet, Span, Wheel, check_once, parted
from simplebus.core.redelivery.ack_window import AckWindow
from simplebus.core.redelivery.delivery_policy import Clock, Terms
from simplebus.core.redelivery.delivery_state import Standing
from simplebus.core.redelivery.failure_reasons import LastErrors
from simplebus.core.redelivery.handover import Left
from simplebus.core.redelivery.in_flight_bytes import Weight
from simplebus.core.ring.ring import Ring
from simplebus.core.session.outbox import Nowhere, Outbox
from simplebus.core.statistics import SubscriptionStatistics
from simplebus.core.subscription.backlog import BacklogCounter
from simplebus.core.subscription.channel_filter import ChannelFilter
from simplebus.core.subscription.pending_dead_letters import PendingDeadLetters
from simplebus.core.subscription.selection import Ranges

NEVER = float("inf")


class Position(ABC):
    """See the module's law. A feed, but what it is sent is a subscription's business."""

    is_key_ordered = False
    """Whether it is a group whose members each get the messages of some keys."""

    def __init__(
        self,
        *,
        ring: Ring,
        window: AckWindow,
        outbox: Outbox | None = None,
        delivery_policy: Terms,
        timer_index_modulus: int = 0,
        subscription_number: int = 0,
        clock: Clock | None = None,
        channel_filter: ChannelFilter | None = None,
        on_floor_moved: Callable[[], None] = lambda: None,
        dead_letter: Callable[
            [Ranges, Reason, int], int | None
        ] = lambda ranges, reason, attempts: None,
        schedule_wakeup: Callable[[float], None] = lambda due: None,
        failure_reasons: LastErrors | None = None,
        redeliveries: Iterable[Span] = (),
    ) -> None:
        """What the window has in flight is to be sent again: it lies in `spans`."""
        self.class_id = ring.class_id
        self.class_ring = ring
        """What the class has in memory."""
        self.ring = ring
        """What the position is sent is in there: the same, or a ring of its own while it is
        behind."""
        self.window = window
        self.outbox = outbox or Nowhere()
        self.delivery_policy = delivery_policy
        self.subscription_number = subscription_number
        self.channel_filter = channel_filter
        """Which channels; None for everything."""
        self.durable = ""
        """The name under which it outlives its session; empty for none."""
        self.owner = ""
        """The user that made it; empty where that is nobody, or not known."""
        self.log_position = 0
        """The mark in the ledger with which it is known that it has come, or is gone; 0 for what is
        not kept past the process."""
        self.idle_seconds: float | None = None
        """How long it is kept while nobody is connected to it; None for ever."""
        self.group = ""
        self.request_number = 0
        """The number of the Subscribe that asked for it last."""
        self.unattended_since = 0.0
        """Since when nobody is connected to it, while that is so."""
        self.delivered = 0
        self.redelivered = 0
        self.nack_count = 0
        """How often it was said that some messages are to come again later."""
        self.dropped = 0
        self.is_queued = False
        self.attempt = 1
        self.scanned_count = 0
        self.is_too_slow = False
        """Whether it is to be cut off for what waits for it."""
        self._slow_check_tick = -1
        """When it was looked last whether it is, but for what came too late."""
        self.undelivered: Counter[Reason] = Counter()
        """Messages for it that it was never sent, or not again, by reason."""
        self._timer_index_modulus = timer_index_modulus or delivery_policy.ack_ticks
        """What timer indexes count up to, in the whole class."""
        self._clock = clock or Clock()
        self._on_floor_moved = on_floor_moved
        """Called when the floor may have moved by itself."""
        self._dead_letter = dead_letter
        """Called with messages that it is giving up, why, and how often it was sent them. Returns
        from which one on there is no room for them; None when all are dealt with."""
        self._schedule_wakeup = schedule_wakeup
        """Called with the time at which `wake_due` is to be called."""
        self._failure_reasons = LastErrors() if failure_reasons is None else failure_reasons
        self._in_flight_bytes = Weight(ring)
        """Of what is in flight."""
        self._peeked_end = window.cursor
        self._zero_copy_end = 0
        """Messages from the cursor to here are for it, and nothing is special about them."""
        self._backlog_counter: BacklogCounter | None = None
        """What waits ahead of the cursor; counted from when it matters first."""
        self._passed_count = window.in_flight
        """Messages that the cursor has passed, or that waited behind it from the start."""
        self._skipped_count = 0
        """Those of them that are done with, and that nobody has acknowledged."""
        self._ack_timer = Wheel()
        self._nack_timer = Wheel()
        self._delayed_spans: list[tuple[float, int, Span]] = []
        self._redelivery_queue: deque[Span] = deque()
        self._spilled_redeliveries: list[Span] = []
        """What is to be sent again and is not read back from disk yet."""
        self._unsent_sequences = SequenceSet()
        """What waits and was never sent, though the cursor has passed it."""
        self._resend_sequences = SequenceSet()
        """What waits to be sent again; kept where it matters how much is in flight."""
        self.pending_dead_letters = PendingDeadLetters()
        """What is given up and waits for room among the dead letters."""
        self.inherited_delays: list[tuple[int, int, int]] = []
        """Until when some of it pauses, while everything waits for that: see `Left.ticks`."""
        self.outbox_after_delay: Outbox | None = None
        """Where it is sent afterwards."""
        for span in redeliveries:
            self._redelivery_queue.append(span)
            self._mark_waiting(span)

    @property
    def acknowledged(self) -> int:
        """Messages acknowledged."""
        return self._passed_count - self._skipped_count - self.window.in_flight

    @property
    def is_connected(self) -> bool:
        return not isinstance(self.outbox, Nowhere)

    @property
    def has_frames_to_copy(self) -> bool:
        if self._redelivery_queue:
            return True
        if self.is_filtered:
            return self.window.cursor >= self._zero_copy_end
        return self.window.cursor < self.ring.special_until and self.has_to_inspect

    @property
    def is_filtered(self) -> bool:
        """Whether some messages may not be for it."""
        return self.channel_filter is not None and not self.channel_filter.is_match_all

    @property
    def has_to_inspect(self) -> bool:
        """Whether new messages must be looked at one by one."""
        ring, cursor = self.ring, self.window.cursor
        return (
            self.is_filtered
            or cursor < ring.timed_until
            or (cursor < ring.envelopes_until and not self.delivery_policy.takes_envelopes)
        )

    @property
    def has_consumer(self) -> bool:
        """Whether somebody is there to be sent messages."""
        return self.is_connected

    @property
    def has_work(self) -> bool:
        if not self._redelivery_queue and self.window.cursor >= self.ring.head:
            return False
        return self.delivery_policy.in_flight_max is None or self._in_flight_room() > 0

    def build_delivery_state(self) -> Standing:
        """Where that is which the cursor has passed, for who asks what it waits for."""
        waiting = (
            [self._unsent_sequences, self._resend_sequences]
            if self.delivery_policy.in_flight_max is not None
            else []
        )
        sent, pauses = self._ack_timer.sets(), self._nack_timer.sets()
        return Standing(
            self._in_flight_count(),
            sent,
            pauses,
            self._delayed_spans,
            self._redelivery_queue,
            waiting,
            unburied=len(self.pending_dead_letters),
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
            in_flight=self.window.in_flight,
            waiting=self.class_ring.head - self.window.cursor,
            delivered=self.delivered,
            redelivered=self.redelivered,
            acknowledged=self.acknowledged,
            dropped=self.dropped,
            undelivered=dict(self.undelivered),
        )

    def _in_flight_room(self) -> int:
        """How many messages more may be in flight."""
        window, most = self.window, self.delivery_policy.in_flight_max
        if most is None:
            return MESSAGES_MAX
        held = self._in_flight_count()
        if 0 < held < most and self._in_flight_bytes.of(held, window) >= IN_FLIGHT_BYTES:
            return 0
        return max(0, most - held)

    def _in_flight_count(self) -> int:
        """Messages that are sent and not acknowledged, and do not wait to be sent again."""
        waiting = (
            len(self._unsent_sequences)
            + len(self._resend_sequences)
            + len(self.pending_dead_letters)
        )
        return self.window.in_flight - waiting

    def _unsettled_ranges(self, first: int, last: int) -> Ranges:
        """What of first..last-1 was passed by the cursor and is neither done nor given up."""
        ranges = self.window.unacked(first, last)
        return (
            self.pending_dead_letters.subtract_from(ranges) if self.pending_dead_letters else ranges
        )

    @property
    def delayed_count(self) -> int:
        """About how many messages are not to be sent before their pause is over."""
        put_off = sum(span.last - span.first for _, _, span in self._delayed_spans)
        return put_off + sum(span.last - span.first for span in self._nack_timer)

    def limit_in_flight(self, count: int) -> None:
        """Send no more than so many from now on. It is to be said again when some are acknowledged,
        and only for fewer."""
        most = self.delivery_policy.in_flight_max
        if most is not None and self._in_flight_count() + count < most:
            self.delivery_policy = replace(
                self.delivery_policy, in_flight_max=self._in_flight_count() + count
            )

    @abstractmethod
    def copy_frames(self, tick: int) -> bytes:
        """See `Feed`. Copies, because they are often many small pieces: one write sends them."""

    @abstractmethod
    def peek_frames(self, tick: int) -> memoryview:
        """See `Feed`."""

    @abstractmethod
    def mark_sent(self, piece: memoryview, sent_bytes: int, tick: int) -> bytes:
        """See `Feed`. The rest of a cut frame is a copy: its ring may let go of it."""

    # What comes back -----------------------------------------------------------------------------

    @property
    def has_waiting_redeliveries(self) -> bool:
        """Whether some of what the cursor has passed may wait to be sent."""
        return bool(
            self._redelivery_queue
            or self._delayed_spans
            or self._nack_timer
            or self._spilled_redeliveries
            or self.pending_dead_letters
        )

    def ack(self, first: int, last: int) -> None:
        """The consumer has processed what it was sent of first..last-1."""
        if not self.has_waiting_redeliveries:
            self.window.ack_range(first, last)
            return
        for begin, end in self._unsent_sequences.without(max(first, self.window.floor), last):
            self._resend_sequences.remove(begin, end)
            self.pending_dead_letters.remove(begin, end)
            self.window.ack_range(begin, end)

    def has_in_flight(
        self, first: int, last: int, attempt: int, *, include_waiting: bool = False
    ) -> bool:
        """Whether any of first..last-1 is in flight, with this attempt if it is not 0; or, if that
        is to count, waits to be sent again."""
        is_there = self._ack_timer.holds(first, last, attempt)
        return is_there or (
            include_waiting and bool(self._find_waiting_redeliveries(first, last, attempt))
        )

    def _find_waiting_redeliveries(self, first: int, last: int, attempt: int) -> Ranges:
        """What of first..last-1 waits to be sent again; for an attempt that is not 0, as far as it
        was sent so often and that is soon found."""
        waiting = self._resend_sequences
        if not attempt:
            return waiting.within(first, last)
        found = [
            r for _, _, held in self._nack_timer.sets(attempt) for r in held.within(first, last)
        ]
        put_off = (span for _, _, span in self._delayed_spans)
        for span in islice(
            chain(self._redelivery_queue, self._spilled_redeliveries, put_off), LOOKED_FOR_SPANS
        ):
            if span.attempts == attempt:
                found += waiting.within(max(first, span.first), min(last, span.last))
        return [r for a, b in found for r in waiting.within(a, b)]

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
        """The consumer could not process first..last-1, and says why. What of them is in flight,
        with this attempt if it is not 0, comes again after the pause that its attempts have earned,
        or after `delay` seconds."""
        for span in self._ack_timer.cut(first, last, attempt):
            self._mark_waiting(span)
            self._schedule_redelivery(span, delay_seconds, tick, error)
        if self._redelivery_queue:
            self.outbox.wake(self)

    def _schedule_redelivery(
        self, span: Span, delay_seconds: float | None, tick: int, error: str
    ) -> None:
        """Have these come again after a pause, or after so many seconds."""
        self._failure_reasons.note(self, span.first, span.last, error)
        self.nack_count += 1
        if delay_seconds is None:
            due = tick + self.delivery_policy.refused_pause(span.attempts)
            self._nack_timer.put(due, span.first, span.last, span.attempts)
        elif delay_seconds <= 0:
            self._redelivery_queue.append(span)
        else:
            self._delay_span(self._clock.now + delay_seconds, span)

    def extend_ack_timeout(self, first: int, last: int, tick: int, attempt: int = 0) -> None:
        """The consumer is at it: the ack timeout of first..last-1 begins again."""
        self._postpone_timeouts(self._ack_timer, first, last, tick, attempt)

    def _postpone_timeouts(
        self, ack_timer: Wheel, first: int, last: int, tick: int, attempt: int
    ) -> None:
        ack_timer.postpone(
            first, last, lambda attempts: tick + self.delivery_policy.pause(attempts), attempt
        )

    def tick(self, tick: int) -> None:
        """Queue what is due at this tick and not acknowledged."""
        due = [span for span in self._ack_timer.pop(tick) if span.last > self.window.floor]
        for span in due:
            self._mark_waiting(span)
        if self._nack_timer and (refused := self._nack_timer.pop(tick)):
            due = sorted(due + refused, key=lambda span: span.first)
        self._redelivery_queue += due
        if self._redelivery_queue:
            self.outbox.wake(self)
        self.window.release_memory()

    @property
    def next_wakeup(self) -> float:
        """When `wake_due` is to be called next."""
        return self._delayed_spans[0][0] if self._delayed_spans else NEVER

    def handle_wakeup(self) -> bool:
        """Queue what was put off until now. Returns whether there is something to send."""
        while self._delayed_spans and self._delayed_spans[0][0] <= self._clock.now:
            self._redelivery_queue.append(heapq.heappop(self._delayed_spans)[2])
        if self._redelivery_queue:
            self.outbox.wake(self)
        return bool(self._redelivery_queue)

    def _delay_span(self, due_time: float, span: Span) -> None:
        heapq.heappush(self._delayed_spans, (due_time, span.first, span))
        self._schedule_wakeup(due_time)

    def _mark_waiting(self, span: Span) -> None:
        """A span waits to be sent, for the first time or again."""
        waiting = self._unsent_sequences if self._is_unsent(span) else self._resend_sequences
        if waiting is self._unsent_sequences or self.delivery_policy.in_flight_max is not None:
            for first, last in self._unsettled_ranges(span.first, span.last):
                waiting.add(first, last)

    def _is_unsent(self, span: Span) -> bool:
        """What somebody else was sent whose place this one has taken counts as sent."""
        return span.attempts == 0

    # Coming and going ----------------------------------------------------------------------------

    def detach(self) -> None:
        """The session is gone; the position stays. What was in flight is to be sent again: what was
        sent once as soon as somebody is there, the rest after its pause, so that one who goes on
        coming and falling does not use up a message's deliveries."""
        self.outbox.forget(self)
        self.outbox = Nowhere()
        for due, span in self._ack_timer.clear():
            self._mark_waiting(span)
            self._requeue_unacked(span, due)
        back = sorted(
            (*self._redelivery_queue, *self._spilled_redeliveries), key=lambda span: span.first
        )
        self._redelivery_queue = deque(back)
        self._spilled_redeliveries.clear()

    def _requeue_unacked(self, span: Span, due_tick: int) -> None:
        """Who was sent these, and was to acknowledge them by then, is gone."""
        if span.attempts < 2:
            self._redelivery_queue.append(span)
        else:
            self._nack_timer.put(due_tick, span.first, span.last, span.attempts)

    def mark_removed(self) -> None:
        """The position is gone: nothing is to be woken for it any more."""
        self._schedule_wakeup(NEVER)
        self._failure_reasons.forget(self)

    def attach(self, outbox: Outbox, number: int) -> None:
        """A session takes the position up."""
        self.outbox, self.subscription_number = outbox, number

    # Behind -------------------------------------------------------------------------------------

    @property
    def is_reading_spilled(self) -> bool:
        """Whether it needs what its class has no longer in memory."""
        return self.ring is not self.class_ring

    @property
    def can_suspend_reading(self) -> bool:
        """Whether nothing needs to be in the ring while nobody is there to be sent it."""
        return True

    def switch_ring(self, ring: Ring) -> None:
        """From now on what it is sent is in there, from its floor on, as far as it is there."""
        self.ring = ring
        self._in_flight_bytes = Weight(ring)
        self._backlog_counter = None
        self._zero_copy_end = 0

    def set_channel_filter(self, channel_filter: ChannelFilter | None) -> None:
        """Somebody else is to be sent it, who may see other messages."""
        self.channel_filter = channel_filter
        self._backlog_counter = None
        self._zero_copy_end = 0

    def requeue_spilled(self) -> None:
        """More is in the ring than there was. What was away goes on in front of the rest."""
        self._redelivery_queue.extendleft(reversed(self._spilled_redeliveries))
        self._spilled_redeliveries.clear()
        if self._redelivery_queue:
            self.outbox.wake(self)

    def list_attempts(self) -> list[tuple[int, int, int]]:
        """How often what is in flight, or waits behind the cursor, was sent, where that is not
        once: messages first..last-1 of which it is said, ascending."""
        floor = self.window.floor
        return sorted(
            (max(span.first, floor), span.last, span.attempts)
            for span in chain(self._iter_spans(), self.pending_dead_letters)
            if span.attempts != 1 and span.last > floor and span.first < span.last
        )

    def build_handover(self) -> Left:
        """What it would leave to another one if every session ended now."""
        floor = self.window.floor
        ticks = [(span.first, span.last, due) for due, span in self._iter_redelivered()]
        ticks += self.inherited_delays
        for due, _, held in self._nack_timer.sets():
            ticks += [(first, last, due) for first, last in held]
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
        return Left(sorted(sent), sorted(ticks), sorted(times)).within(floor, self.window.cursor)

    def _iter_redelivered(self) -> Iterator[tuple[int, Span]]:
        """What was sent more than once and is not acknowledged, and by which tick it is to be."""
        for due, attempts, held in self._ack_timer.sets():
            if attempts > 1:
                for first, last in held:
                    yield due, Span(first, last, attempts)

    def delay_redeliveries(self, delays: Iterable[tuple[int, int, float]]) -> None:
        """Of what is to be sent again, messages first..last-1 are not before a time, in seconds
        since 1970."""
        ahead = [row for row in sorted(delays) if row[2] > self._clock.now]
        self._redelivery_queue, spans = deque(), self._redelivery_queue
        for span, due in parted(spans, ahead):
            if due is None:
                self._redelivery_queue.append(span)
            else:
                self._delay_span(due, span)

    def apply_handover(self, handover: Left, tick_seconds: float) -> None:
        """What is to be sent again pauses as it would have without a change of hands."""
        self.delay_redeliveries(handover.times)
        ahead = sorted(row for row in handover.ticks if row[2] > self._clock.tick)
        self._redelivery_queue, spans = deque(), self._redelivery_queue
        for span, due in parted(spans, ahead):
            if due is None:
                self._redelivery_queue.append(span)
            else:
                self._nack_timer.put(int(due), span.first, span.last, span.attempts)

    def _iter_spans(self) -> Iterator[Span]:
        """Wherever they are kept."""
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
        assert self.acknowledged >= 0
        if self.has_work and self.is_connected:
            assert self.is_queued, "work that nobody was told about"
        spans, given_up = list(self._iter_spans()), SequenceSet()
        for span in spans:
            if span.given_up:
                given_up.add(span.first, span.last)
        opened = self._unsettled_ranges(window.floor, window.cursor)
        left = [part for first, last in opened for part in given_up.without(first, last)]
        check_once((span for span in spans if not span.given_up), left)
        self.pending_dead_letters.check_invariants()
        for span in self.pending_dead_letters:
            assert window.unacked(span.first, span.last) == [(span.first, span.last)]
        self._check_waiting_sequences()

    def _check_waiting_sequences(self) -> None:
        """What is said to wait is what lies in the spans that wait."""
        unsent, resend = SequenceSet(), SequenceSet()
        put_off = (span for _, _, span in self._delayed_spans)
        for span in (
            *self._redelivery_queue,
            *self._spilled_redeliveries,
            *self._nack_timer,
            *put_off,
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
