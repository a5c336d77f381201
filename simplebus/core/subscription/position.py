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
from simplebus.core.subscription.backlog import Ahead
from simplebus.core.subscription.channel_filter import Wanted
from simplebus.core.subscription.pending_dead_letters import Unburied
from simplebus.core.subscription.selection import Ranges

NEVER = float("inf")


class Position(ABC):
    """See the module's law. A feed, but what it is sent is a subscription's business."""

    by_key = False
    """Whether it is a group whose members each get the messages of some keys."""

    def __init__(
        self,
        *,
        ring: Ring,
        window: AckWindow,
        outbox: Outbox | None = None,
        terms: Terms,
        timer_ticks: int = 0,
        number: int = 0,
        clock: Clock | None = None,
        wanted: Wanted | None = None,
        released: Callable[[], None] = lambda: None,
        bury: Callable[[Ranges, Reason, int], int | None] = lambda ranges, reason, attempts: None,
        put_off: Callable[[float], None] = lambda due: None,
        errors: LastErrors | None = None,
        spans: Iterable[Span] = (),
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
        self.terms = terms
        self.number = number
        self.wanted = wanted
        """Which channels; None for everything."""
        self.durable = ""
        """The name under which it outlives its session; empty for none."""
        self.owner = ""
        """The user that made it; empty where that is nobody, or not known."""
        self.kept_mark = 0
        """The mark in the ledger with which it is known that it has come, or is gone; 0 for what is
        not kept past the process."""
        self.idle_seconds: float | None = None
        """How long it is kept while nobody is connected to it; None for ever."""
        self.group = ""
        self.request = 0
        """The number of the Subscribe that asked for it last."""
        self.alone_since = 0.0
        """Since when nobody is connected to it, while that is so."""
        self.delivered = 0
        self.redelivered = 0
        self.refused = 0
        """How often it was said that some messages are to come again later."""
        self.dropped = 0
        self.queued = False
        self.attempt = 1
        self.looked = 0
        self.is_too_slow = False
        """Whether it is to be cut off for what waits for it."""
        self._judged_tick = -1
        """When it was looked last whether it is, but for what came too late."""
        self.undelivered: Counter[Reason] = Counter()
        """Messages for it that it was never sent, or not again, by reason."""
        self._timer_ticks = timer_ticks or terms.ack_ticks
        """What timer indexes count up to, in the whole class."""
        self._clock = clock or Clock()
        self._released = released
        """Called when the floor may have moved by itself."""
        self._bury = bury
        """Called with messages that it is giving up, why, and how often it was sent them. Returns
        from which one on there is no room for them; None when all are dealt with."""
        self._put_off = put_off
        """Called with the time at which `wake_due` is to be called."""
        self._errors = LastErrors() if errors is None else errors
        self._weight = Weight(ring)
        """Of what is in flight."""
        self._peeked = window.cursor
        self._all_wanted_until = 0
        """Messages from the cursor to here are for it, and nothing is special about them."""
        self._ahead: Ahead | None = None
        """What waits ahead of the cursor; counted from when it matters first."""
        self._passed = window.in_flight
        """Messages that the cursor has passed, or that waited behind it from the start."""
        self._left_out = 0
        """Those of them that are done with, and that nobody has acknowledged."""
        self._wheel = Wheel()
        self._refused = Wheel()
        self._later: list[tuple[float, int, Span]] = []
        self._again: deque[Span] = deque()
        self._away: list[Span] = []
        """What is to be sent again and is not read back from disk yet."""
        self._unsent = SequenceSet()
        """What waits and was never sent, though the cursor has passed it."""
        self._resend = SequenceSet()
        """What waits to be sent again; kept where it matters how much is in flight."""
        self.unburied = Unburied()
        """What is given up and waits for room among the dead letters."""
        self.held_back: list[tuple[int, int, int]] = []
        """Until when some of it pauses, while everything waits for that: see `Left.ticks`."""
        self.promised: Outbox | None = None
        """Where it is sent afterwards."""
        for span in spans:
            self._again.append(span)
            self._wait(span)

    @property
    def acknowledged(self) -> int:
        """Messages acknowledged."""
        return self._passed - self._left_out - self.window.in_flight

    @property
    def is_connected(self) -> bool:
        return not isinstance(self.outbox, Nowhere)

    @property
    def copies(self) -> bool:
        if self._again:
            return True
        if self.filters:
            return self.window.cursor >= self._all_wanted_until
        return self.window.cursor < self.ring.special_until and self.picks

    @property
    def filters(self) -> bool:
        """Whether some messages may not be for it."""
        return self.wanted is not None and not self.wanted.is_all

    @property
    def picks(self) -> bool:
        """Whether new messages must be looked at one by one."""
        ring, cursor = self.ring, self.window.cursor
        return (
            self.filters
            or cursor < ring.timed_until
            or (cursor < ring.envelopes_until and not self.terms.takes_envelopes)
        )

    @property
    def is_served(self) -> bool:
        """Whether somebody is there to be sent messages."""
        return self.is_connected

    @property
    def has_work(self) -> bool:
        if not self._again and self.window.cursor >= self.ring.head:
            return False
        return self.terms.in_flight_max is None or self._room() > 0

    def standing(self) -> Standing:
        """Where that is which the cursor has passed, for who asks what it waits for."""
        waiting = [self._unsent, self._resend] if self.terms.in_flight_max is not None else []
        sent, pauses = self._wheel.sets(), self._refused.sets()
        return Standing(
            self._held(),
            sent,
            pauses,
            self._later,
            self._again,
            waiting,
            unburied=len(self.unburied),
        )

    def statistics(self) -> SubscriptionStatistics:
        return SubscriptionStatistics(
            class_id=self.class_id,
            session_id=(self.promised or self.outbox).session_id,
            number=self.number,
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

    def _room(self) -> int:
        """How many messages more may be in flight."""
        window, most = self.window, self.terms.in_flight_max
        if most is None:
            return MESSAGES_MAX
        held = self._held()
        if 0 < held < most and self._weight.of(held, window) >= IN_FLIGHT_BYTES:
            return 0
        return max(0, most - held)

    def _held(self) -> int:
        """Messages that are sent and not acknowledged, and do not wait to be sent again."""
        waiting = len(self._unsent) + len(self._resend) + len(self.unburied)
        return self.window.in_flight - waiting

    def _open(self, first: int, last: int) -> Ranges:
        """What of first..last-1 was passed by the cursor and is neither done nor given up."""
        ranges = self.window.unacked(first, last)
        return self.unburied.left_out(ranges) if self.unburied else ranges

    @property
    def paused(self) -> int:
        """About how many messages are not to be sent before their pause is over."""
        put_off = sum(span.last - span.first for _, _, span in self._later)
        return put_off + sum(span.last - span.first for span in self._refused)

    def allow(self, count: int) -> None:
        """Send no more than so many from now on. It is to be said again when some are acknowledged,
        and only for fewer."""
        most = self.terms.in_flight_max
        if most is not None and self._held() + count < most:
            self.terms = replace(self.terms, in_flight_max=self._held() + count)

    @abstractmethod
    def take(self, tick: int) -> bytes:
        """See `Feed`. Copies, because they are often many small pieces: one write sends them."""

    @abstractmethod
    def peek(self, tick: int) -> memoryview:
        """See `Feed`."""

    @abstractmethod
    def sent(self, piece: memoryview, count: int, tick: int) -> bytes:
        """See `Feed`. The rest of a cut frame is a copy: its ring may let go of it."""

    # What comes back -----------------------------------------------------------------------------

    @property
    def has_waiting(self) -> bool:
        """Whether some of what the cursor has passed may wait to be sent."""
        return bool(self._again or self._later or self._refused or self._away or self.unburied)

    def ack(self, first: int, last: int) -> None:
        """The consumer has processed what it was sent of first..last-1."""
        if not self.has_waiting:
            self.window.ack_range(first, last)
            return
        for begin, end in self._unsent.without(max(first, self.window.floor), last):
            self._resend.remove(begin, end)
            self.unburied.remove(begin, end)
            self.window.ack_range(begin, end)

    def holds(self, first: int, last: int, attempt: int, *, waiting: bool = False) -> bool:
        """Whether any of first..last-1 is in flight, with this attempt if it is not 0; or, if that
        is to count, waits to be sent again."""
        is_there = self._wheel.holds(first, last, attempt)
        return is_there or (waiting and bool(self._resent(first, last, attempt)))

    def _resent(self, first: int, last: int, attempt: int) -> Ranges:
        """What of first..last-1 waits to be sent again; for an attempt that is not 0, as far as it
        was sent so often and that is soon found."""
        waiting = self._resend
        if not attempt:
            return waiting.within(first, last)
        found = [r for _, _, held in self._refused.sets(attempt) for r in held.within(first, last)]
        put_off = (span for _, _, span in self._later)
        for span in islice(chain(self._again, self._away, put_off), LOOKED_FOR_SPANS):
            if span.attempts == attempt:
                found += waiting.within(max(first, span.first), min(last, span.last))
        return [r for a, b in found for r in waiting.within(a, b)]

    def nack(
        self,
        first: int,
        last: int,
        delay: float | None,
        tick: int,
        *,
        attempt: int = 0,
        error: str = "",
    ) -> None:
        """The consumer could not process first..last-1, and says why. What of them is in flight,
        with this attempt if it is not 0, comes again after the pause that its attempts have earned,
        or after `delay` seconds."""
        for span in self._wheel.cut(first, last, attempt):
            self._wait(span)
            self._refuse(span, delay, tick, error)
        if self._again:
            self.outbox.wake(self)

    def _refuse(self, span: Span, delay: float | None, tick: int, error: str) -> None:
        """Have these come again after a pause, or after so many seconds."""
        self._errors.note(self, span.first, span.last, error)
        self.refused += 1
        if delay is None:
            due = tick + self.terms.refused_pause(span.attempts)
            self._refused.put(due, span.first, span.last, span.attempts)
        elif delay <= 0:
            self._again.append(span)
        else:
            self._delay(self._clock.now + delay, span)

    def working(self, first: int, last: int, tick: int, attempt: int = 0) -> None:
        """The consumer is at it: the ack timeout of first..last-1 begins again."""
        self._postpone(self._wheel, first, last, tick, attempt)

    def _postpone(self, wheel: Wheel, first: int, last: int, tick: int, attempt: int) -> None:
        wheel.postpone(first, last, lambda attempts: tick + self.terms.pause(attempts), attempt)

    def tick(self, tick: int) -> None:
        """Queue what is due at this tick and not acknowledged."""
        due = [span for span in self._wheel.pop(tick) if span.last > self.window.floor]
        for span in due:
            self._wait(span)
        if self._refused and (refused := self._refused.pop(tick)):
            due = sorted(due + refused, key=lambda span: span.first)
        self._again += due
        if self._again:
            self.outbox.wake(self)
        self.window.release_memory()

    @property
    def due(self) -> float:
        """When `wake_due` is to be called next."""
        return self._later[0][0] if self._later else NEVER

    def wake_due(self) -> bool:
        """Queue what was put off until now. Returns whether there is something to send."""
        while self._later and self._later[0][0] <= self._clock.now:
            self._again.append(heapq.heappop(self._later)[2])
        if self._again:
            self.outbox.wake(self)
        return bool(self._again)

    def _delay(self, due: float, span: Span) -> None:
        heapq.heappush(self._later, (due, span.first, span))
        self._put_off(due)

    def _wait(self, span: Span) -> None:
        """A span waits to be sent, for the first time or again."""
        waiting = self._unsent if self._is_unsent(span) else self._resend
        if waiting is self._unsent or self.terms.in_flight_max is not None:
            for first, last in self._open(span.first, span.last):
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
        for due, span in self._wheel.clear():
            self._wait(span)
            self._return(span, due)
        back = sorted((*self._again, *self._away), key=lambda span: span.first)
        self._again = deque(back)
        self._away.clear()

    def _return(self, span: Span, due: int) -> None:
        """Who was sent these, and was to acknowledge them by then, is gone."""
        if span.attempts < 2:
            self._again.append(span)
        else:
            self._refused.put(due, span.first, span.last, span.attempts)

    def give_up_waiting(self) -> None:
        """The position is gone: nothing is to be woken for it any more."""
        self._put_off(NEVER)
        self._errors.forget(self)

    def attach(self, outbox: Outbox, number: int) -> None:
        """A session takes the position up."""
        self.outbox, self.number = outbox, number

    # Behind -------------------------------------------------------------------------------------

    @property
    def is_behind(self) -> bool:
        """Whether it needs what its class has no longer in memory."""
        return self.ring is not self.class_ring

    @property
    def may_rest(self) -> bool:
        """Whether nothing needs to be in the ring while nobody is there to be sent it."""
        return True

    def move_to(self, ring: Ring) -> None:
        """From now on what it is sent is in there, from its floor on, as far as it is there."""
        self.ring = ring
        self._weight = Weight(ring)
        self._ahead = None
        self._all_wanted_until = 0

    def wants(self, wanted: Wanted | None) -> None:
        """Somebody else is to be sent it, who may see other messages."""
        self.wanted = wanted
        self._ahead = None
        self._all_wanted_until = 0

    def bring_back(self) -> None:
        """More is in the ring than there was. What was away goes on in front of the rest."""
        self._again.extendleft(reversed(self._away))
        self._away.clear()
        if self._again:
            self.outbox.wake(self)

    def attempts(self) -> list[tuple[int, int, int]]:
        """How often what is in flight, or waits behind the cursor, was sent, where that is not
        once: messages first..last-1 of which it is said, ascending."""
        floor = self.window.floor
        return sorted(
            (max(span.first, floor), span.last, span.attempts)
            for span in chain(self._spans(), self.unburied)
            if span.attempts != 1 and span.last > floor and span.first < span.last
        )

    def left(self) -> Left:
        """What it would leave to another one if every session ended now."""
        floor = self.window.floor
        ticks = [(span.first, span.last, due) for due, span in self._sent_again()]
        ticks += self.held_back
        for due, _, held in self._refused.sets():
            ticks += [(first, last, due) for first, last in held]
        times = [(span.first, span.last, due) for due, _, span in self._later if span.attempts > 0]
        sent = [
            (span.first, span.last, span.attempts)
            for span in chain(self._spans(), self.unburied)
            if span.attempts > 0
        ]
        return Left(sorted(sent), sorted(ticks), sorted(times)).within(floor, self.window.cursor)

    def _sent_again(self) -> Iterator[tuple[int, Span]]:
        """What was sent more than once and is not acknowledged, and by which tick it is to be."""
        for due, attempts, held in self._wheel.sets():
            if attempts > 1:
                for first, last in held:
                    yield due, Span(first, last, attempts)

    def put_off(self, pauses: Iterable[tuple[int, int, float]]) -> None:
        """Of what is to be sent again, messages first..last-1 are not before a time, in seconds
        since 1970."""
        ahead = [row for row in sorted(pauses) if row[2] > self._clock.now]
        self._again, spans = deque(), self._again
        for span, due in parted(spans, ahead):
            if due is None:
                self._again.append(span)
            else:
                self._delay(due, span)

    def take_over(self, left: Left, tick_seconds: float) -> None:
        """What is to be sent again pauses as it would have without a change of hands."""
        self.put_off(left.times)
        ahead = sorted(row for row in left.ticks if row[2] > self._clock.tick)
        self._again, spans = deque(), self._again
        for span, due in parted(spans, ahead):
            if due is None:
                self._again.append(span)
            else:
                self._refused.put(int(due), span.first, span.last, span.attempts)

    def _spans(self) -> Iterator[Span]:
        """Wherever they are kept."""
        yield from self._again
        yield from self._away
        yield from self._wheel
        yield from self._refused
        for _, _, span in self._later:
            yield span

    def check(self) -> None:
        """Raise AssertionError unless the invariants hold."""
        window = self.window
        window.check()
        assert self.ring.floor <= window.floor <= window.cursor <= self.class_ring.head
        assert window.cursor <= self.ring.head or self.is_behind
        assert self.acknowledged >= 0
        if self.has_work and self.is_connected:
            assert self.queued, "work that nobody was told about"
        spans, given_up = list(self._spans()), SequenceSet()
        for span in spans:
            if span.given_up:
                given_up.add(span.first, span.last)
        opened = self._open(window.floor, window.cursor)
        left = [part for first, last in opened for part in given_up.without(first, last)]
        check_once((span for span in spans if not span.given_up), left)
        self.unburied.check()
        for span in self.unburied:
            assert window.unacked(span.first, span.last) == [(span.first, span.last)]
        self._check_waiting()

    def _check_waiting(self) -> None:
        """What is said to wait is what lies in the spans that wait."""
        unsent, resend = SequenceSet(), SequenceSet()
        put_off = (span for _, _, span in self._later)
        for span in (*self._again, *self._away, *self._refused, *put_off):
            for first, last in self._open(span.first, span.last):
                (unsent if self._is_unsent(span) else resend).add(first, last)
        assert list(self._unsent) == list(unsent), (list(self._unsent), list(unsent))
        if self.terms.in_flight_max is not None:
            assert list(self._resend) == list(resend), (list(self._resend), list(resend))
