"""What one subscription is sent, when, and when again.

Rule 1: a subscription never holds a message; it holds positions in its class's ring.
Rule 2: a tick touches only what is due; what is due is queued once, with a longer pause each time.
Rule 3: messages that are not for it count as acknowledged when its cursor passes them. Only where
some may not be for it are messages looked at one by one, and copied; else they leave as they lie.
Rule 4: what waits to be sent, be it again, is not in flight; and what was never sent cannot be
acknowledged, though the cursor has passed it.

    ring    floor ─ in flight ─ cursor ─ not sent yet ─ head
    wheel   tick 17: (4, 9)  tick 18: (9, 30) …      spans to look at again, by tick
    later   12.5 s: (30, 31)                         put off to a time
    again   (4, 6) (8, 9)                            what is to be sent again now
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np

from simplebus.core import picking
from simplebus.core.acks import AckWindow
from simplebus.core.channel_table import Wanted
from simplebus.core.errors import Reason
from simplebus.core.limits import (
    IN_FLIGHT_BYTES,
    LOOK_AHEAD_MESSAGES,
    MESSAGES_MAX,
    PLAIN_FRAMES_MAX,
    REDELIVERY_BYTES,
    REDELIVERY_MESSAGES,
    SEND_BYTES,
)
from simplebus.core.outbox import Nowhere, Outbox
from simplebus.core.picking import Picked, Ranges
from simplebus.core.ring import Ring
from simplebus.core.runs import ranges_of
from simplebus.core.spans import INHERITED, SequenceSet, Span, Wheel, check_once
from simplebus.core.statistics import SubscriptionStatistics
from simplebus.core.terms import Clock, Pieces, Terms

NEVER = float("inf")


class Subscription:
    """One position in one class. A feed: see `Outbox`."""

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
        put_off: Callable[[float], None] = lambda due: None,
    ) -> None:
        self.class_id = ring.class_id
        self.ring = ring
        self.window = window
        self.outbox = outbox or Nowhere()
        self.terms = terms
        self.number = number
        self.wanted = wanted
        """Which channels; None for everything."""
        self.durable = ""
        """The name under which it outlives its session; empty for none."""
        self.group = ""
        self.request = 0
        """The number of the Subscribe that asked for it last."""
        self.delivered = 0
        self.redelivered = 0
        self.dropped = 0
        self.queued = False
        self.attempt = 1
        self.is_too_slow = False
        """Whether it is to be cut off for what waits for it."""
        self.undelivered: Counter[Reason] = Counter()
        """Messages for it that it was never sent, or not again, by reason."""
        self._timer_ticks = timer_ticks or terms.ack_ticks
        """What timer indexes count up to, in the whole class."""
        self._clock = clock or Clock()
        self._released = released
        """Called when the floor may have moved by itself."""
        self._put_off = put_off
        """Called with the time at which `wake_due` is to be called."""
        self._peeked = window.cursor
        self._all_wanted_until = 0
        """Messages from the cursor to here are for it, and nothing is special about them."""
        self._entered = window.in_flight
        self._dropped_in_flight = 0
        self._wheel = Wheel()
        self._later: list[tuple[float, int, Span]] = []
        self._again: deque[Span] = deque()
        self._unsent = SequenceSet()
        """What waits and was never sent, though the cursor has passed it."""
        self._resend = SequenceSet()
        """What waits to be sent again; kept where it matters how much is in flight."""
        if window.floor < window.cursor:
            span = Span(window.floor, window.cursor, INHERITED)
            self._again.append(span)
            self._wait(span)

    @property
    def acknowledged(self) -> int:
        """Messages acknowledged."""
        return self._entered - self._dropped_in_flight - self.window.in_flight

    @property
    def is_connected(self) -> bool:
        return not isinstance(self.outbox, Nowhere)

    @property
    def copies(self) -> bool:
        if self._again:
            return True
        if self.wanted is not None:
            return self.window.cursor >= self._all_wanted_until
        return self.window.cursor < self.ring.special_until and self.picks

    @property
    def picks(self) -> bool:
        """Whether new messages must be looked at one by one."""
        ring, cursor = self.ring, self.window.cursor
        return (
            self.wanted is not None
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

    def statistics(self) -> SubscriptionStatistics:
        return SubscriptionStatistics(
            class_id=self.class_id,
            session_id=self.outbox.session_id,
            number=self.number,
            durable=self.durable,
            group=self.group,
            floor=self.window.floor,
            cursor=self.window.cursor,
            in_flight=self.window.in_flight,
            waiting=self.ring.head - self.window.cursor,
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
        held = window.in_flight - len(self._unsent) - len(self._resend)
        if 0 < held < most:  # Take it that they are as long as those between them.
            size = self.ring.size(window.floor, window.cursor)
            if size * held >= IN_FLIGHT_BYTES * (window.cursor - window.floor):
                return 0
        return max(0, most - held)

    # Sending -------------------------------------------------------------------------------------

    def take(self, tick: int) -> bytes:
        """See `Feed`. Copies, because they are often many small pieces: one write sends them."""
        data = self._take_again(tick) if self._again else b""
        while not data and not self._again and self.picks and self.has_work:
            if self._look_ahead():
                break
            data = self._take_new(tick)
        return data

    def _look_ahead(self) -> bool:
        """Whether the next messages are all for this subscription, so that they may leave as they
        lie; few of them only when there are no more."""
        first, head = self.window.cursor, self.ring.head
        if self.wanted is None or first < self.ring.timed_until:
            return False
        last = min(head, first + LOOK_AHEAD_MESSAGES)
        until = picking.wanted_from(self.ring, first, last, self.wanted)
        if until < last and until - first < PLAIN_FRAMES_MAX:
            return False
        self._all_wanted_until = until
        return True

    def _take_again(self, tick: int) -> bytes:
        pieces = Pieces(REDELIVERY_BYTES)
        while not pieces.count and (room := self._room()):
            found = self._look_again(room)
            if found is None:
                break
            span, last, picked = found
            first, attempts = picked.send[0][0], span.attempts
            self.attempt = span.next_attempt
            last = self._copy(picked.send, last, pieces, tick)
            self._settle(span, last, picked)
            if pieces.count:
                # One span for all: what is acknowledged within it is left out when due.
                later = picking.before(picked.later, last)
                self._expect_without(later, first, last, max(attempts + 1, 1), tick)
                if attempts > 0:
                    self.redelivered += pieces.count
                else:
                    self.delivered += pieces.count
        return b"".join(pieces.parts)

    def _look_again(self, most: int) -> tuple[Span, int, Picked] | None:
        """The front of what is to be sent again: its span, where it ends, and what is to become of
        its messages, up to `most` of which are to be sent, one at least. `_settle` is to follow.
        None when nothing is left that is to be sent.
        """
        while self._again:
            span = self._again[0]
            first = max(span.first, self.window.floor)
            last = min(span.last, first + REDELIVERY_MESSAGES)
            ranges = picking.front(self.window.unacked(first, last), most)
            if picking.total(ranges) == most:
                last = ranges[-1][1]
            if self.terms.deliveries_max and span.attempts >= self.terms.deliveries_max:
                self._give_up(ranges, Reason.MAX_DELIVERIES)
                ranges = []
            picked = picking.pick_of(self.ring, ranges, self.wanted, self._clock.now)
            if picked.send:
                return span, last, picked
            self._settle(span, last, picked)
        return None

    def _settle(self, span: Span, last: int, picked: Picked) -> None:
        """The front of what is to be sent again, up to `last`, is dealt with; or sent, if it is."""
        for waiting in (self._unsent, self._resend):
            waiting.remove(span.first, last)
        span.first = last
        if span.first >= span.last:
            self._again.popleft()
        self._leave_out(picked, last, attempts=span.attempts)

    def _take_new(self, tick: int) -> bytes:
        """New messages that are for this subscription, out of the next ones."""
        window, pieces = self.window, Pieces(REDELIVERY_BYTES)
        first = window.cursor
        self.attempt = 1
        picked, last = self._look(REDELIVERY_MESSAGES, self._room())
        last = self._copy(picked.send, last, pieces, tick)
        window.cursor = last
        later = picking.before(picked.later, last)
        self._entered += pieces.count + picking.total(later)
        self.delivered += pieces.count
        self._leave_out(picked, last, attempts=0)
        if pieces.count:
            self._expect_without(later, first, last, 1, tick)
        return b"".join(pieces.parts)

    def _look(self, many: int, most: int) -> tuple[Picked, int]:
        """What is to become of the next new messages, up to so many, up to `most` of which are to
        be sent; and where they end."""
        first = self.window.cursor
        last = min(self.ring.head, first + many)
        picked = picking.pick(self.ring, first, last, self.wanted, self._clock.now)
        send = picking.front(picked.send, most)
        if send != picked.send:
            picked, last = replace(picked, send=send), send[-1][1]
        return picked, last

    def _leave_out(self, picked: Picked, last: int, *, attempts: int) -> None:
        """Of messages before `last`: pass over those that are not for it, or came too late, and put
        off those that open later, which were sent so often."""
        others = picking.before(picked.others, last)
        for begin, end in others:
            self._done(begin, end)
        if others:
            self._released()
        self._count(Reason.EXPIRED, picking.total(picking.before(picked.expired, last)))
        for begin, end in picking.before(picked.later, last):
            self._wait(Span(begin, end, attempts))
            for due, a, b in picking.opens(self.ring, begin, end):
                self._delay(due, Span(a, b, attempts))

    def _copy(self, ranges: Ranges, last: int, pieces: Pieces, tick: int) -> int:
        """Copy frames, as far as pieces have space. Returns `last`, or where it stopped."""
        if not ranges:
            return last
        self.ring.stamp(ranges[0][0], ranges[-1][1], tick % self._timer_ticks)
        plain_only = not self.terms.takes_envelopes
        for begin, end in ranges:
            while begin < end:
                if pieces.space <= 0:
                    return begin
                piece, after = self.ring.piece(begin, end, pieces.space)
                if plain_only and begin < self.ring.envelopes_until:
                    plain, uncarriable = picking.without_envelopes(self.ring, begin, after)
                    self._give_up([(s, s + 1) for s in uncarriable], Reason.UNCARRIABLE)
                    if plain:
                        pieces.add(plain, after - begin - len(uncarriable))
                else:
                    pieces.add(piece, after - begin)
                begin = after
        return last

    def peek(self, tick: int) -> memoryview:
        """See `Feed`."""
        first = self.window.cursor
        last = self.ring.head
        if self.terms.in_flight_max is not None:
            last = min(last, first + self._room())
        if self.wanted is not None:
            last = min(last, self._all_wanted_until)
        if first >= last or (self.copies and self.picks):
            return memoryview(b"")
        piece, last = self.ring.piece(first, last, SEND_BYTES)
        self.ring.stamp(first, last, tick % self._timer_ticks)
        self._peeked = last
        self.attempt = 1
        return piece

    def sent(self, piece: memoryview, count: int, tick: int) -> bytes:
        """See `Feed`. The rest of a cut frame is a copy: its ring may let go of it."""
        first, last = self.window.cursor, self._peeked
        rest = b""
        if count < len(piece):
            last, missing = self.ring.cut(first, last, count)
            if missing:
                rest = bytes(piece[count : count + missing])
                last += 1
        if first < last:
            self.window.cursor = last
            self._entered += last - first
            self.delivered += last - first
            self._expect(first, last, 1, tick)
        return rest

    def _expect(self, first: int, last: int, attempts: int, tick: int) -> None:
        """Look at first..last-1 again when their acknowledgement is overdue."""
        self._wheel.put(tick + self.terms.pause(attempts), first, last, attempts)

    def _expect_without(
        self, left_out: Ranges, first: int, last: int, attempts: int, tick: int
    ) -> None:
        """The same, but for some ranges."""
        for begin, end in left_out:
            if first < begin:
                self._expect(first, begin, attempts, tick)
            first = max(first, end)
        if first < last:
            self._expect(first, last, attempts, tick)

    # What comes back -----------------------------------------------------------------------------

    @property
    def has_waiting(self) -> bool:
        """Whether some of what the cursor has passed may wait to be sent."""
        return bool(self._again or self._later)

    def ack(self, first: int, last: int) -> None:
        """The consumer has processed what it was sent of first..last-1."""
        if not self.has_waiting:
            self.window.ack_range(first, last)
            return
        for begin, end in self._unsent.without(max(first, self.window.floor), last):
            self._resend.remove(begin, end)
            self.window.ack_range(begin, end)

    def nack(self, first: int, last: int, delay: float | None, tick: int) -> None:
        """The consumer could not process first..last-1. They come again after the pause that their
        attempts have earned, or after `delay` seconds."""
        for span in self._wheel.cut(first, last):
            if delay is None:
                self._expect(span.first, span.last, span.attempts, tick)
                continue
            self._wait(span)
            if delay <= 0:
                self._again.append(span)
            else:
                self._delay(self._clock.now + delay, span)
        if self._again:
            self.outbox.wake(self)

    def working(self, first: int, last: int, tick: int) -> None:
        """The consumer is at it: the ack timeout of first..last-1 begins again."""
        for span in self._wheel.cut(first, last):
            self._expect(span.first, span.last, span.attempts, tick)

    def tick(self, tick: int) -> None:
        """Queue what is due at this tick and not acknowledged."""
        for span in self._wheel.pop(tick):
            if span.last > self.window.floor:
                self._again.append(span)
                self._wait(span)
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
            for first, last in self.window.unacked(span.first, span.last):
                waiting.add(first, last)

    def _is_unsent(self, span: Span) -> bool:
        """In version 1, what somebody else was sent counts as sent."""
        return span.attempts == 0 or (span.attempts == INHERITED and self.terms.takes_envelopes)

    # Giving up -----------------------------------------------------------------------------------

    def skip_to(self, floor: int) -> None:
        """The class's policy took away everything below floor."""
        unsent = picking.total(self._new_ranges(floor))
        self.dropped += self._skip(floor) + unsent

    def _skip(self, floor: int) -> int:
        """Have nothing to do with what is below floor. Returns how many of them were in flight, or
        waited behind the cursor."""
        unsent = max(0, floor - self.window.cursor)
        lost = self.window.skip_to(floor) - unsent
        self._dropped_in_flight += lost
        for waiting in (self._unsent, self._resend):
            waiting.remove(0, floor)
        if self._again:
            self.outbox.wake(self)
        return lost

    def _new_ranges(self, last: int) -> Ranges:
        """What is for it of the messages from the cursor to last-1."""
        first = self.window.cursor
        if first >= last:
            return []
        if self.wanted is None:
            return [(first, last)]
        flags = np.broadcast_to(self.wanted.of(self.ring.rows(first, last).channels), last - first)
        flags = np.ascontiguousarray(flags)
        return [(first + a, first + b) for a, b in ranges_of(flags)]

    def pending(self) -> int:
        """Messages stored for it and not acknowledged."""
        return self.window.in_flight + picking.total(self._new_ranges(self.ring.head))

    def excess(self) -> int:
        """How many more are pending than its own terms allow."""
        most = self.terms.pending_max
        if most is None or self.ring.head - self.window.floor <= most:
            return 0
        return max(0, self.pending() - most)

    def make_way(self) -> int:
        """Obey the own policy about what waits. Returns how many messages were dropped."""
        excess, dropped = self.excess(), 0
        if excess and self.terms.slow == "drop_oldest":
            dropped = self._drop_oldest(excess)
        elif excess and self.terms.slow == "drop_newest":
            dropped = self._drop_newest(excess)
        self.dropped += dropped
        self._count(Reason.SLOW_CONSUMER, dropped)
        return dropped

    def _drop_oldest(self, count: int) -> int:
        """Leave out the oldest that were never sent: what is in flight is the consumer's."""
        window = self.window
        dropped = picking.front(self._new_ranges(self.ring.head), count)
        if dropped:
            first, window.cursor = window.cursor, dropped[-1][1]
            window.ack_range(first, window.cursor)
            self._released()
        return picking.total(dropped)

    def _drop_newest(self, count: int) -> int:
        """Leave out the newest, as far as they were not sent."""
        window, head = self.window, self.ring.head
        new = self._new_ranges(head)
        kept = picking.front(new, picking.total(new) - count)
        first = window.cursor
        window.cursor = head
        for begin, end in kept:  # They are still to be sent, as if put off until now.
            if first < begin:
                window.ack_range(first, begin)
            self._again.append(Span(begin, end, 0))
            self._wait(self._again[-1])
            first = end
        window.ack_range(first, head)
        self._entered += picking.total(kept)
        self._released()
        return picking.total(new) - picking.total(kept)

    def expire(self) -> bool:
        """Nobody is there to be sent messages: drop those in front that come too late for whoever
        comes. Returns whether there were any."""
        window, ring = self.window, self.ring
        first, cursor = window.floor, window.cursor
        last = min(ring.head, ring.timed_until, first + REDELIVERY_MESSAGES)
        ranges = window.unacked(first, last) + ([(max(first, cursor), last)] * (cursor < last))
        picked = picking.pick_of(ring, ranges, self.wanted, self._clock.now)
        floor = min([a for a, _ in picked.send + picked.later], default=max(first, last))
        if floor <= first:
            return False
        self._count(Reason.EXPIRED, picking.total(picking.before(picked.expired, floor)))
        self._skip(floor)
        return True

    def _give_up(self, ranges: Ranges, reason: Reason) -> None:
        """These are not sent, or not again."""
        count = picking.total(ranges)
        if count:
            for first, last in ranges:
                self.window.cursor = max(self.window.cursor, last)
                self._done(first, last)
            self._count(reason, count)
            self._released()

    def _done(self, first: int, last: int) -> None:
        """Nothing is left to be done about first..last-1."""
        self.window.ack_range(first, last)
        for waiting in (self._unsent, self._resend):
            waiting.remove(first, last)

    def _count(self, reason: Reason, count: int) -> None:
        if count:
            self.undelivered[reason] += count

    # Coming and going ----------------------------------------------------------------------------

    def detach(self) -> None:
        """The session is gone; the position stays. What was in flight is to be sent again."""
        self.outbox.forget(self)
        self.outbox = Nowhere()
        for span in self._wheel:
            self._wait(span)
        self._again = deque(sorted(self._spans(), key=lambda span: span.first))
        self._wheel.clear()
        self._later.clear()
        self._put_off(NEVER)

    def give_up_waiting(self) -> None:
        """The position is gone: nothing is to be woken for it any more."""
        self._put_off(NEVER)

    def attach(self, outbox: Outbox, number: int) -> None:
        """A session takes the position up."""
        self.outbox, self.number = outbox, number

    def _spans(self) -> Iterator[Span]:
        """Wherever they are kept."""
        yield from self._again
        yield from self._wheel
        for _, _, span in self._later:
            yield span

    def check(self) -> None:
        """Raise AssertionError unless the invariants hold."""
        window = self.window
        window.check()
        assert self.ring.floor <= window.floor <= window.cursor <= self.ring.head
        assert self.acknowledged >= 0
        if self.has_work and self.is_connected:
            assert self.queued, "work that nobody was told about"
        check_once(self._spans(), window.unacked(window.floor, window.cursor))
        self._check_waiting()

    def _check_waiting(self) -> None:
        """What is said to wait is what lies in the spans that wait."""
        unsent, resend = SequenceSet(), SequenceSet()
        for span in (*self._again, *(span for _, _, span in self._later)):
            for first, last in self.window.unacked(span.first, span.last):
                (unsent if self._is_unsent(span) else resend).add(first, last)
        assert list(self._unsent) == list(unsent), (list(self._unsent), list(unsent))
        if self.terms.in_flight_max is not None:
            assert list(self._resend) == list(resend), (list(self._resend), list(resend))
