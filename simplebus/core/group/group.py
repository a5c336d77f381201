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

from simplebus.core.group.least_loaded import Takers
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
from simplebus.core.subscription.selection import Picked, Ranges
from simplebus.core.subscription.subscription import Subscription

# Handed out to one member at once, if it has room for as many.
SHARE_MAX = 64

# Looked at before a group puts off looking further: it has no outbox whose turn it were, and others
# wait for it. When it is its turn it looks at REDELIVERY_MESSAGES.
_LOOKED_FIRST_MAX = 512


class Member:
    """One session's part in a group. A feed: see `Outbox`."""

    def __init__(self, group: Group, outbox: Outbox, number: int, in_flight_max: int) -> None:
        self.group = group
        self.outbox = outbox
        self.number = number
        self.class_id = group.class_id
        self.in_flight_max = in_flight_max
        self.request = group.request
        """The number of the Subscribe that asked for it."""
        self.queued = False
        self.attempt = 1
        self.looked = 0
        self.held = 0
        """Messages handed out to it and not acknowledged."""
        self.held_bytes = 0
        """And how long they are."""
        self.turn = 0
        """When it was handed something last; the order counts."""
        self.wheel = Wheel()
        """What it was sent and has not acknowledged, no more and no less, by when it is overdue."""
        self.spans: deque[Span] = deque()
        """What it was handed out and is not sent yet."""
        self.handed_tick = 0
        """When the first of it was handed out."""
        self.is_late = False
        """Whether it did not take in time what it was handed out last."""

    @property
    def copies(self) -> bool:
        return bool(self.spans)

    @property
    def has_work(self) -> bool:
        return bool(self.spans)

    @property
    def window(self) -> AckWindow:
        """Its group's."""
        return self.group.window

    @property
    def room(self) -> int:
        """How many messages more it may have."""
        if self.is_late or self.held_bytes >= IN_FLIGHT_BYTES:
            return 0
        return max(0, self.in_flight_max - self.held)

    def parts(self) -> Iterator[Span]:
        """All that it has."""
        yield from self.spans
        yield from self.wheel

    @property
    def unsent(self) -> int:
        """How many messages it was handed out that are not sent yet."""
        return sum(span.last - span.first for span in self.spans)

    def sets(self) -> Sets:
        """What it was sent and has not acknowledged; a part of it, if it is much."""
        return self.wheel.sets()

    def hand(self, spans: list[Span], tick: int) -> None:
        """These are to be sent to it."""
        if not self.spans:
            self.handed_tick = tick
        self.spans += spans
        self._hold(spans, 1)
        self.outbox.wake(self)

    def give_back(self) -> list[Span]:
        """What it was handed out and not sent."""
        spans = list(self.spans)
        self.spans.clear()
        self._hold(spans, -1)
        return spans

    def give_up(self) -> list[tuple[int, Span]]:
        """It is gone. Returns what it was sent and has not acknowledged, and by which tick it was
        to do that."""
        spans = self.wheel.clear()
        self._hold([span for _, span in spans], -1)
        return spans

    def pass_over(self, first: int, last: int) -> None:
        """It is not to be sent first..last-1, of what it was handed out."""
        self._hold([Span(first, last, 0)], -1)

    def _hold(self, spans: Iterable[Span], sign: int) -> None:
        """It has these messages, or no longer. They must still be stored."""
        for span in spans:
            self.held += sign * (span.last - span.first)
            self.held_bytes += sign * self.group.ring.size(span.first, span.last)
        self.group.offer(self)

    def holds(self, first: int, last: int, attempt: int, *, waiting: bool = False) -> bool:
        """Whether any of first..last-1 is in flight to it; with this attempt, if it is not 0. What
        waits is nobody's."""
        return self.wheel.holds(first, last, attempt)

    def in_flight(self) -> Iterator[tuple[int, Span]]:
        """What it was sent and has not acknowledged, and by which tick it is to be."""
        for due, attempts, held in self.wheel.sets():
            for first, last in held:
                yield due, Span(first, last, attempts)

    def lose(self, first: int, last: int, attempt: int = 0) -> list[Span]:
        """It has none of first..last-1 any longer, or none with this attempt. Returns what of them
        it was sent."""
        spans = self.wheel.cut(first, last, attempt)
        if spans:
            self._hold(spans, -1)
        return spans

    def purge(self, first: int, last: int) -> None:
        """It has none of first..last-1 any longer, sent or not."""
        self.lose(first, last)
        kept: list[Span] = []
        for span in self.spans:
            begin, end = max(span.first, first), min(span.last, last)
            if begin < end:
                self.pass_over(begin, end)
            else:
                begin = end = span.last
            for a, b in ((span.first, begin), (end, span.last)):
                if a < b:
                    kept.append(Span(a, b, span.attempts))
        self.spans = deque(kept)

    def overdue(self, tick: int) -> list[Span]:
        """What it should have acknowledged by this tick; it has it no longer."""
        spans = self.wheel.pop(tick)
        if spans:
            self._hold(spans, -1)
        return spans

    def skip_to(self, floor: int) -> None:
        """It has nothing below floor any longer."""
        self.lose(0, floor)
        for span in [span for span in self.spans if span.first < floor]:
            self.pass_over(span.first, min(floor, span.last))
            span.first = min(floor, span.last)

    def _is_here(self) -> None:
        """It takes something: it is no longer late."""
        if self.is_late:
            self.is_late = False
            self.group.offer(self)

    def take(self, tick: int) -> bytes:
        """See `Feed`."""
        self._is_here()
        pieces = Pieces(REDELIVERY_BYTES)
        self.looked = 0
        while self.spans and not pieces.count and self.looked < LOOKED_MESSAGES_MAX:
            self.looked += self.spans[0].last - self.spans[0].first
            self.group.send(self, self.spans[0], pieces, tick)
            if self.spans[0].first >= self.spans[0].last:
                self.spans.popleft()
        self.handed_tick = tick
        return b"".join(pieces.parts)

    def peek(self, tick: int) -> memoryview:
        self._is_here()
        return memoryview(b"")

    def sent(self, piece: memoryview, count: int, tick: int) -> bytes:
        raise AssertionError("a member shows nothing, so nothing can be taken")


class Group(Subscription):
    """The shared position. It sends nothing itself: its outbox is nowhere."""

    looked_max = _LOOKED_FIRST_MAX

    def __init__(self, **arguments: Any) -> None:
        """Takes what Subscription does, but for the outbox and the number."""
        super().__init__(**arguments)
        self.members: dict[Member, None] = {}
        self._takers = Takers()
        self._turns = 0
        self._has_come_back = False
        """Whether what is to be sent again is to be put in order first."""
        self._looks_on = False
        """Whether it goes on looking for what is for it in another turn."""

    @property
    def is_served(self) -> bool:
        return bool(self.members)

    def standing(self) -> Standing:
        """What is in flight its members have."""
        stands = super().standing()
        in_flight = sum(member.held for member in self.members)
        return stands._replace(in_flight=in_flight, sent=[], waiting=[])

    # Members -------------------------------------------------------------------------------------

    def join(
        self, outbox: Outbox, number: int, in_flight_max: int | None, name: str = ""
    ) -> Member:
        """One more member. Its session is called `name`; empty for one without a name."""
        most = GROUP_IN_FLIGHT_MESSAGES if in_flight_max is None else in_flight_max
        member = self._member(outbox, number, most, name)
        self.members[member] = None
        self._next_turn(member)
        self.offer(member)
        return member

    def _member(self, outbox: Outbox, number: int, in_flight_max: int, name: str) -> Member:
        return Member(self, outbox, number, in_flight_max)

    def offer(self, member: Member) -> None:
        """What a member has, or may have, has changed."""
        if member in self.members and member.room:
            self._takers.put(member)
        else:
            self._takers.remove(member)

    def _next_turn(self, member: Member) -> None:
        self._turns += 1
        member.turn = self._turns

    def leave(self, member: Member) -> None:
        """A member is gone. What it had is to be handed out again."""
        del self.members[member]
        member.outbox.forget(member)
        self._again += member.give_back()
        for due, span in member.give_up():
            self._return(span, due)
        self._has_come_back = True

    # Handing out ---------------------------------------------------------------------------------

    def share(self) -> list[Member]:
        """Hand out what can be. Returns who got something."""
        woken: dict[Member, None] = {}
        if self._looks_on:
            return []
        if self._has_come_back:
            self._again = deque(sorted(self._again, key=_first))
            self._has_come_back = False
        self.looked = 0
        takers = self._takers
        while takers:
            member = takers.first()
            fair = -(-self._waiting() // len(takers))
            space = IN_FLIGHT_BYTES - member.held_bytes
            spans = self._next(min(member.room, SHARE_MAX, max(1, fair)), space)
            if not spans:
                break
            self.looked -= _total(spans)
            self._next_turn(member)
            member.hand(spans, self._clock.tick)
            woken[member] = None
        is_tired, self.looked_max = self.looked >= self.looked_max, _LOOKED_FIRST_MAX
        if takers and is_tired and self.has_work:
            self._looks_on = True
            self._put_off(self._clock.now)
        return list(woken)

    @property
    def due(self) -> float:
        return self._clock.now if self._looks_on else super().due

    def wake_due(self) -> bool:
        looks_on, self._looks_on = self._looks_on, False
        if looks_on:
            self.looked_max = REDELIVERY_MESSAGES
        return super().wake_due() or looks_on

    def _waiting(self) -> int:
        """About how many messages are to be handed out, if they are few."""
        count = self.ring.head - self.window.cursor
        return count + _total(islice(self._again, SHARE_MAX))

    def _next(self, most: int, space: int) -> list[Span]:
        """Up to `most` messages that nobody has, one or as many as have space: again first, then
        new ones."""
        found = self._look_again(most)
        if found is not None:
            span, last, picked = found
            picked, last = self._cut(picked, last, space)
            self._settle(span, last, picked)
            return [Span(a, b, span.attempts) for a, b in picked.send]
        window, many = self.window, max(most, self.looked_max // 8)
        while window.cursor < self.ring.head and not self._again:
            if self.looked >= self.looked_max:
                break
            picked, last = self._cut(*self._look(many, most), space)
            many = min(4 * many, REDELIVERY_MESSAGES)  # None of these is for it: look further.
            self._reach(last)
            self._leave_out(picked, last, attempts=0)
            if picked.send:
                return [Span(a, b, 0) for a, b in picked.send]
        return []

    def _cut(self, picked: Picked, last: int, space: int) -> tuple[Picked, int]:
        """As much of what is to be sent as has space, one message at least; and where it ends."""
        kept: Ranges = []
        for first, end in picked.send:
            size = self.ring.size(first, end)
            if size > space:
                if space > 0:
                    kept.append((first, self.ring.piece(first, end, space)[1]))
                return replace(picked, send=kept), kept[-1][1]
            kept.append((first, end))
            space -= size
        return picked, last

    def send(self, member: Member, span: Span, pieces: Pieces, tick: int) -> None:
        """Copy the front of a span that a member was handed out. What has come to be too late
        meanwhile is left out."""
        before, window = pieces.count, self.window
        ranges = window.unacked(span.first, span.last)
        picked = selection.pick_of(self.ring, ranges, self.wanted, self._clock.now)
        member.attempt = span.next_attempt
        first, last = span.first, self._copy(picked.send, span.last, pieces, tick)
        self._leave_out(picked, last, attempts=span.attempts)
        attempts = max(span.next_attempt, 1)
        for begin, end in selection.before(picked.send, last):
            if first < begin:
                member.pass_over(first, begin)
            member.wheel.put(tick + self.terms.pause(attempts), begin, end, attempts)
            first = end
        if first < last:
            member.pass_over(first, last)
        span.first = last
        sent = pieces.count - before
        if span.attempts > 0:
            self.redelivered += sent
        else:
            self.delivered += sent

    # What comes back -----------------------------------------------------------------------------

    def acknowledge(self, member: Member, first: int, last: int) -> bool:
        """A member has processed what it holds of first..last-1. Returns whether that is any."""
        spans = member.lose(first, last)
        for span in spans:
            self.window.ack_range(span.first, span.last)
        return bool(spans)

    def acknowledge_all(
        self, member: Member, firsts: Integers, lasts: Integers
    ) -> list[tuple[int, int]]:
        """The same for many ranges. Returns those of which it holds nothing."""
        ranges = zip(firsts.tolist(), lasts.tolist(), strict=True)
        return [(a, b) for a, b in ranges if not self.acknowledge(member, a, b)]

    def refuse(
        self,
        member: Member,
        first: int,
        last: int,
        delay: float | None,
        tick: int,
        *,
        attempt: int = 0,
        error: str = "",
    ) -> None:
        """A member could not process what it holds of first..last-1: see `nack`."""
        for span in member.lose(first, last, attempt):
            self._refuse(span, delay, tick, error)

    def terminate_held(
        self, member: Member, first: int, last: int, *, attempt: int = 0, error: str = ""
    ) -> None:
        """A member can never process what it holds of first..last-1: see `terminate`."""
        self._terminate(member.lose(first, last, attempt), error)
        self._has_come_back |= bool(self._again)

    def extend(self, member: Member, first: int, last: int, tick: int, attempt: int = 0) -> None:
        """A member is at what it holds of first..last-1: see `working`."""
        self._postpone(member.wheel, first, last, tick, attempt)

    def tick(self, tick: int) -> None:
        for member in self.members:
            for span in member.overdue(tick):
                self._wheel.put(tick, span.first, span.last, span.attempts)
        super().tick(tick)
        for member in self.members:
            if member.has_work and member.handed_tick + self.terms.ack_ticks <= tick:
                self._is_late(member)

    def _is_late(self, member: Member) -> None:
        """A member does not take what it was handed out: that is for others."""
        member.is_late = True
        self._again += member.give_back()

    def purge(self, first: int, last: int) -> None:
        for member in self.members:
            member.purge(first, last)
        super().purge(first, last)

    def _skip(self, floor: int) -> int:
        for member in self.members:
            member.skip_to(floor)
        return super()._skip(floor)

    def bring_back(self) -> None:
        self._has_come_back = self._has_come_back or bool(self._away)
        super().bring_back()

    def _wait(self, span: Span) -> None:
        pass  # Only what somebody holds can be acknowledged.

    def _sent_again(self) -> Iterator[tuple[int, Span]]:
        for member in self.members:
            yield from ((due, span) for due, span in member.in_flight() if span.attempts > 1)

    def _spans(self) -> Iterator[Span]:
        yield from super()._spans()
        for member in self.members:
            yield from member.parts()

    def check(self) -> None:
        super().check()
        for member in self.members:
            spans = list(member.parts())
            held = _total(spans)
            assert member.held == held, (member.held, held)
            assert member.held_bytes == sum(self.ring.size(s.first, s.last) for s in spans)
            assert member.held <= member.in_flight_max
            for span in spans:
                there = self.window.unacked(span.first, span.last)
                assert there == [(span.first, span.last)], "held and acknowledged"
        self._takers.check()
        assert len(self._takers) == sum(member.room > 0 for member in self.members)

    def _check_waiting(self) -> None:
        assert not self._unsent
        assert not self._resend


def _total(spans: Iterable[Span]) -> int:
    """How many messages lie in spans."""
    return sum(span.last - span.first for span in spans)


def _first(span: Span) -> int:
    return span.first
