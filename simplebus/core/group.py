"""Subscriptions that share one position: each message goes to one of them.

Rule 1: a group hands messages out to its members before they are sent, a few at a time, to whoever
has the fewest: how fast a member takes them decides how many it gets.
Rule 2: only the member that was sent a message holds it: it alone can acknowledge it, refuse it or
ask for time.
Rule 3: what a member had when it goes, did not take or did not acknowledge in time, goes to another
one.

    group     floor ─ handed out ─ cursor ─ head
    members   a: 4 5 ┆ 9     b: 6 7 ┆ 8      sent ┆ not sent yet; each of them has a feed
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

from simplebus.core import picking
from simplebus.core.acks import AckWindow
from simplebus.core.limits import (
    GROUP_IN_FLIGHT_MESSAGES,
    REDELIVERY_BYTES,
    REDELIVERY_MESSAGES,
)
from simplebus.core.outbox import Outbox
from simplebus.core.picking import Ranges
from simplebus.core.spans import Span
from simplebus.core.subscription import Subscription
from simplebus.core.terms import Pieces

# Handed out to one member at once, if it has room for as many.
_SHARE_MAX = 64


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
        self.held = 0
        """Messages handed out to it and not acknowledged."""
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
        if self.is_late and not self.outbox.idle:
            return 0
        return max(0, self.in_flight_max - self.held)

    def hand(self, spans: list[Span], tick: int) -> None:
        """These are to be sent to it."""
        if not self.spans:
            self.handed_tick = tick
        self.spans += spans
        self.held += _total(spans)
        self.outbox.wake(self)

    def give_back(self) -> list[Span]:
        """What it was handed out and not sent."""
        spans = list(self.spans)
        self.spans.clear()
        self.held -= _total(spans)
        return spans

    def skip_to(self, floor: int) -> None:
        """Nothing below floor is to be sent."""
        for span in [span for span in self.spans if span.first < floor]:
            self.held -= min(floor, span.last) - span.first
            span.first = min(floor, span.last)

    def take(self, tick: int) -> bytes:
        """See `Feed`."""
        self.is_late = False
        pieces = Pieces(REDELIVERY_BYTES)
        while self.spans and not pieces.count:
            self.group.send(self, self.spans[0], pieces, tick)
            if self.spans[0].first >= self.spans[0].last:
                self.spans.popleft()
        self.handed_tick = tick
        return b"".join(pieces.parts)

    def peek(self, tick: int) -> memoryview:
        self.is_late = False
        return memoryview(b"")

    def sent(self, piece: memoryview, count: int, tick: int) -> bytes:
        raise AssertionError("a member shows nothing, so nothing can be taken")


class Group(Subscription):
    """The shared position. It sends nothing itself: its outbox is nowhere."""

    def __init__(self, **arguments: Any) -> None:
        """Takes what Subscription does, but for the outbox and the number."""
        super().__init__(**arguments)
        self.members: list[Member] = []
        self._holders: dict[int, Member] = {}
        """Who was sent each message that is not acknowledged and not to be sent again."""

    @property
    def is_served(self) -> bool:
        return bool(self.members)

    # Members -------------------------------------------------------------------------------------

    def join(self, outbox: Outbox, number: int, in_flight_max: int | None) -> Member:
        """One more member."""
        most = GROUP_IN_FLIGHT_MESSAGES if in_flight_max is None else in_flight_max
        member = Member(self, outbox, number, most)
        self.members.append(member)
        return member

    def leave(self, member: Member) -> None:
        """A member is gone. What it had is to be handed out again."""
        self.members.remove(member)
        member.outbox.forget(member)
        self._again += member.give_back()
        for first, last in self._held(member, self.window.floor, self.window.cursor):
            self._again += self._wheel.cut(first, last)
            self._let_go(first, last)
        self._in_order()

    # Handing out ---------------------------------------------------------------------------------

    def share(self) -> list[Member]:
        """Hand out what can be. Returns who got something."""
        woken: dict[Member, None] = {}
        while takers := [member for member in self.members if member.room]:
            member = min(takers, key=_load)
            fair = -(-self._waiting(_SHARE_MAX * len(takers)) // len(takers))
            spans = self._next(min(member.room, _SHARE_MAX, max(1, fair)))
            if not spans:
                break
            member.hand(spans, self._clock.tick)
            woken[member] = None
            self.members.remove(member)
            self.members.append(member)
        return list(woken)

    def _waiting(self, most: int) -> int:
        """How many messages are to be handed out; at least `most` is as good as any number."""
        count = self.ring.head - self.window.cursor
        for span in self._again:
            if count >= most:
                break
            count += span.last - span.first
        return count

    def _next(self, most: int) -> list[Span]:
        """Up to `most` messages that nobody has: again first, then new ones."""
        found = self._look_again(most)
        if found is not None:
            span, last, picked = found
            self._settle(span, last, picked)
            return [Span(a, b, span.attempts) for a, b in picked.send]
        window = self.window
        while window.cursor < self.ring.head:
            picked, last = self._look(REDELIVERY_MESSAGES if self.picks else most, most)
            window.cursor = last
            self._entered += picking.total(picked.send)
            self._entered += picking.total(picking.before(picked.later, last))
            self._leave_out(picked, last, attempts=0)
            if picked.send:
                return [Span(a, b, 0) for a, b in picked.send]
        return []

    def send(self, member: Member, span: Span, pieces: Pieces, tick: int) -> None:
        """Copy the front of a span that a member was handed out. What has come to be too late
        meanwhile is left out."""
        before, window = pieces.count, self.window
        ranges = window.unacked(span.first, span.last)
        picked = picking.pick_of(self.ring, ranges, self.wanted, self._clock.now)
        member.attempt = span.next_attempt
        first, last = span.first, self._copy(picked.send, span.last, pieces, tick)
        self._leave_out(picked, last, attempts=span.attempts)
        for begin, end in picking.before(picked.send, last):
            self._expect(begin, end, max(span.next_attempt, 1), tick)
            for sequence in range(begin, end):
                self._holders[sequence] = member
        span.first = last
        sent = pieces.count - before
        member.held -= last - first - sent
        if span.attempts > 0:
            self.redelivered += sent
        else:
            self.delivered += sent

    # What comes back -----------------------------------------------------------------------------

    def acknowledge(self, member: Member, first: int, last: int) -> None:
        """A member has processed what it holds of first..last-1."""
        for begin, end in self._held(member, first, last):
            self.window.ack_range(begin, end)
            self._let_go(begin, end)

    def refuse(self, member: Member, first: int, last: int, delay: float | None, tick: int) -> None:
        """A member could not process what it holds of first..last-1: see `nack`."""
        for begin, end in self._held(member, first, last):
            self.nack(begin, end, delay, tick)
            self._let_go(begin, end)

    def extend(self, member: Member, first: int, last: int, tick: int) -> None:
        """A member is at what it holds of first..last-1: see `working`."""
        for begin, end in self._held(member, first, last):
            self.working(begin, end, tick)

    def tick(self, tick: int) -> None:
        before = len(self._again)
        super().tick(tick)
        for span in list(self._again)[before:]:
            for begin, end in self.window.unacked(span.first, span.last):
                self._let_go(begin, end)
        for member in self.members:
            if member.spans and member.handed_tick + self.terms.ack_ticks <= tick:
                member.is_late = True
                self._again += member.give_back()

    def _skip(self, floor: int) -> int:
        for sequence in [s for s in self._holders if s < floor]:
            self._let_go(sequence, sequence + 1)
        for member in self.members:
            member.skip_to(floor)
        return super()._skip(floor)

    def _wait(self, span: Span) -> None:
        pass  # Only what somebody holds can be acknowledged.

    def _spans(self) -> Iterator[Span]:
        yield from super()._spans()
        for member in self.members:
            yield from member.spans

    def _held(self, member: Member, first: int, last: int) -> Ranges:
        """What of first..last-1 a member was sent and has not acknowledged."""
        holders = self._holders
        if last - first > len(holders):
            mine = sorted(s for s, who in holders.items() if who is member and first <= s < last)
        else:
            mine = [s for s in range(first, last) if holders.get(s) is member]
        return runs_of(mine)

    def _let_go(self, first: int, last: int) -> None:
        """Nobody holds these any longer."""
        for sequence in range(first, last):
            member = self._holders.pop(sequence, None)
            if member is not None:
                member.held -= 1

    def _in_order(self) -> None:
        self._again = deque(sorted(self._again, key=_first))

    def check(self) -> None:
        super().check()
        for member in self.members:
            sent = sum(who is member for who in self._holders.values())
            assert member.held == sent + _total(member.spans), (member.held, sent)
            assert member.held <= member.in_flight_max
        assert set(self._holders.values()) <= set(self.members)
        for sequence in self._holders:
            assert self.window.unacked(sequence, sequence + 1), "held and acknowledged"
            assert any(span.first <= sequence < span.last for span in self._wheel)

    def _check_waiting(self) -> None:
        assert not self._unsent
        assert not self._resend


def runs_of(sequences: list[int]) -> Ranges:
    """Ascending numbers as half-open ranges."""
    ranges: Ranges = []
    for sequence in sequences:
        if ranges and ranges[-1][1] == sequence:
            ranges[-1] = (ranges[-1][0], sequence + 1)
        else:
            ranges.append((sequence, sequence + 1))
    return ranges


def _total(spans: Iterable[Span]) -> int:
    """How many messages lie in spans."""
    return sum(span.last - span.first for span in spans)


def _load(member: Member) -> int:
    return member.held


def _first(span: Span) -> int:
    return span.first
