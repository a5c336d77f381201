"""What one subscription is sent, when, and what it is not.

Rule 1: messages that are not for it count as acknowledged when its cursor passes them. Only where
some may not be for it are messages looked at one by one, and copied; else they leave as they lie.
Rule 2: one turn looks at so many messages and no more, whether any of them is for it or not.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import islice

from simplebus.core.errors import Reason
from simplebus.core.limits import (
    BURIED_AT_ONCE,
    DEAD_LETTERS_MAX,
    EXPIRED_FIRST,
    LOOK_AHEAD_MESSAGES,
    LOOKED_FOR_ONE,
    LOOKED_FOR_SPANS,
    LOOKED_MESSAGES_MAX,
    PLAIN_FRAMES_MAX,
    REDELIVERY_BYTES,
    REDELIVERY_MESSAGES,
    REDELIVERY_PIECES,
    REDELIVERY_PLAIN_BYTES,
    REDELIVERY_PLAIN_MESSAGES,
    SEND_BYTES,
)
from simplebus.core.redelivery.ack_timer import Span
from simplebus.core.redelivery.delivery_policy import Pieces
from simplebus.core.subscription import selection
from simplebus.core.subscription.backlog import Ahead
from simplebus.core.subscription.position import Position
from simplebus.core.subscription.selection import Picked, Ranges


class Subscription(Position):
    """One position in one class, and what is sent from it. A feed: see `Outbox`."""

    looked_max = LOOKED_MESSAGES_MAX
    """About how many messages are looked at in one turn, if none of them is for it."""

    # Sending -------------------------------------------------------------------------------------

    def take(self, tick: int) -> bytes:
        self.looked = 0
        data = self._take_again(tick) if self._again else b""
        while not data and not self._again and self.picks and self.has_work:
            if self.looked >= self.looked_max or self._look_ahead():
                break
            data = self._take_new(tick)
        return data

    def _look_ahead(self) -> bool:
        """Whether the next messages are all for this subscription, so that they may leave as they
        lie; few of them only when there are no more."""
        first, head = self.window.cursor, self.ring.head
        if self.wanted is None or first < self.ring.timed_until:
            return False
        if first < self.ring.envelopes_until and not self.terms.takes_envelopes:
            return False
        last = min(head, first + LOOK_AHEAD_MESSAGES)
        until = selection.wanted_from(self.ring, first, last, self.wanted)
        if until < last and until - first < PLAIN_FRAMES_MAX:
            return False
        self._all_wanted_until = until
        return True

    def _take_again(self, tick: int) -> bytes:
        pieces = Pieces(REDELIVERY_PLAIN_BYTES if self._is_plain() else REDELIVERY_BYTES)
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
                later = selection.before(picked.later, last)
                self._expect_without(later, first, last, max(attempts + 1, 1), tick)
                if attempts > 0:
                    self.redelivered += pieces.count
                else:
                    self.delivered += pieces.count
        return b"".join(pieces.parts)

    def _look_again(self, most: int) -> tuple[Span, int, Picked] | None:
        """The front of what is to be sent again: its span, where it ends, and what is to become of
        its messages, up to `most` of which are to be sent, one at least. `_settle` is to follow.
        None when nothing is left that is to be sent, or so much was looked at in vain that the rest
        is for another turn.
        """
        while self._again and self.looked < self.looked_max:
            span = self._again[0]
            first = max(span.first, self.window.floor)
            if first >= self.ring.head:
                self._away.append(self._again.popleft())
                continue
            is_plain = self._is_plain()
            many = REDELIVERY_PLAIN_MESSAGES if is_plain else REDELIVERY_MESSAGES
            last = min(span.last, first + many, self.ring.head)
            ranges = self._open(first, last)
            if len(ranges) > REDELIVERY_PIECES:
                last = ranges[REDELIVERY_PIECES][0]
                del ranges[REDELIVERY_PIECES:]
            self.looked += max(0, last - first)
            most_sent = self.terms.deliveries_max
            if span.given_up or (most_sent and span.attempts >= most_sent):
                reason = span.given_up or Reason.MAX_DELIVERIES
                last = self._give_up_front(ranges, last, span.attempts, reason)
                ranges = []
            else:
                ranges = selection.front(ranges, most)
                if selection.total(ranges) == most:
                    last = ranges[-1][1]
            picked = selection.pick_of(self.ring, ranges, self.wanted, self._clock.now)
            if picked.send:
                return span, last, picked
            self._settle(span, last, picked)
        return None

    def _is_plain(self) -> bool:
        """Whether nothing is special about what waits to be sent again, and all is wanted."""
        return self.wanted is None and self._again[0].first >= self.ring.special_until

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
        pieces = Pieces(REDELIVERY_BYTES)
        first = self.window.cursor
        self.attempt = 1
        picked, last = self._look(REDELIVERY_MESSAGES, self._room())
        last = self._copy(picked.send, last, pieces, tick)
        self._reach(last)
        later = selection.before(picked.later, last)
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
        picked = selection.pick(self.ring, first, last, self.wanted, self._clock.now)
        send = selection.front(picked.send, most)
        if send != picked.send:
            picked, last = replace(picked, send=send), send[-1][1]
        self.looked += last - first
        return picked, last

    def _leave_out(self, picked: Picked, last: int, *, attempts: int) -> None:
        """Of messages before `last`: pass over those that are not for it, or came too late, and put
        off those that open later, which were sent so often."""
        others = selection.before(picked.others, last)
        self._forgo(others)
        if others:
            self._released()
        self._count(Reason.EXPIRED, selection.total(selection.before(picked.expired, last)))
        for begin, end in selection.before(picked.later, last):
            self._wait(Span(begin, end, attempts))
            for due, a, b in selection.opens(self.ring, begin, end):
                self.looked += LOOKED_FOR_ONE
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
                    self.looked += LOOKED_FOR_ONE * (after - begin)
                    plain, uncarriable = selection.without_envelopes(self.ring, begin, after)
                    self._give_up([(s, s + 1) for s in uncarriable], Reason.UNCARRIABLE, 0)
                    pieces.add(plain, after - begin - len(uncarriable))
                    if uncarriable:
                        return after
                else:
                    pieces.add(piece, after - begin)
                begin = after
        return last

    def peek(self, tick: int) -> memoryview:
        first = self.window.cursor
        last = self.ring.head
        if self.terms.in_flight_max is not None:
            last = min(last, first + self._room())
        if self.filters:
            last = min(last, self._all_wanted_until)
        if first >= last or (self.copies and self.picks):
            return memoryview(b"")
        piece, last = self.ring.piece(first, last, SEND_BYTES)
        self.ring.stamp(first, last, tick % self._timer_ticks)
        self._peeked = last
        self.attempt = 1
        return piece

    def sent(self, piece: memoryview, count: int, tick: int) -> bytes:
        first, last = self.window.cursor, self._peeked
        rest = b""
        if count < len(piece):
            last, missing = self.ring.cut(first, last, count)
            if missing:
                rest = bytes(piece[count : count + missing])
                last += 1
        if first < last:
            self._reach(last)
            self.delivered += last - first
            self._expect(first, last, 1, tick)
        return rest

    def _reach(self, cursor: int) -> None:
        """The cursor moves on."""
        if self._ahead is not None:
            self._ahead.reach(cursor)
        self._passed += cursor - self.window.cursor
        self.window.cursor = cursor

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

    # Giving up -----------------------------------------------------------------------------------

    def skip_to(self, floor: int) -> None:
        """The class's policy took away everything below floor."""
        wanted = None if self.is_behind else self.wanted
        if self.is_behind:
            self._ahead = None
        unsent = selection.count(self.ring, self.window.cursor, floor, wanted)
        self.dropped += self._skip(floor) + unsent

    def let_go(self, reason: Reason) -> None:
        """Nobody is to be sent anything of what it has kept so far."""
        before = self.dropped
        self.skip_to(self.class_ring.head)
        self._count(reason, self.dropped - before)

    def purge(self, first: int, last: int) -> None:
        """Nobody is to have the stored messages first..last-1: have nothing to do with them."""
        window = self.window
        first, cursor, before = max(first, window.floor), window.cursor, window.in_flight
        if first < min(last, cursor):
            self._done(first, min(last, cursor))
            lost = before - window.in_flight
            self._left_out += lost
            self.dropped += lost
        if cursor < last:
            wanted = None if self.is_behind else self.wanted  # It is looked at when it is read.
            kept = selection.wanted_ranges(self.ring, cursor, first, wanted)
            self.dropped += selection.count(self.ring, max(first, cursor), last, wanted)
            self._pass_over(kept, last)

    def _pass_over(self, kept: Ranges, end: int) -> None:
        """Have the cursor pass what comes before `end`. These of it are still to be sent, as if put
        off until now; the others are not."""
        at = self.window.cursor
        self._reach(end)
        self._left_out += end - at - selection.total(kept)
        for begin, last in kept:
            if at < begin:
                self.window.ack_range(at, begin)
            self._again.append(Span(begin, last, 0))
            self._wait(self._again[-1])
            at = last
        self.window.ack_range(at, end)

    def arrive_again(self, first: int, attempts: int) -> None:
        """What lies in the ring from `first` on was sent so often, by somebody else."""
        at, head = self.window.cursor, self.ring.head
        self._reach(head)
        for begin, last, count in ((at, first, 0), (max(at, first), head, attempts)):
            if begin < last:
                self._again.append(Span(begin, last, count))
                self._wait(self._again[-1])

    def _skip(self, floor: int) -> int:
        """Have nothing to do with what is below floor. Returns how many of them were in flight, or
        waited behind the cursor."""
        unsent = max(0, floor - self.window.cursor)
        if unsent:
            self._reach(floor)
        lost = self.window.skip_to(floor)
        self._left_out += lost
        for waiting in (self._unsent, self._resend, self.unburied):
            waiting.remove(0, floor)
        if self._again:
            self.outbox.wake(self)
        return lost - unsent

    def pending(self) -> int:
        """Messages stored for it and not acknowledged, as far as they are counted."""
        return self.window.in_flight + (self._ahead.count if self._ahead is not None else 0)

    def count_on(self, part: int) -> None:
        """Count what is new and, of what has piled up, a part; `looked` says how much of that."""
        self.looked = 0
        most = self.terms.pending_max
        if most is not None and self.ring.head - self.window.floor > most:
            if self._ahead is None:
                self._ahead = Ahead(self.ring, self.window, self.wanted)
            self.looked = self._ahead.look(part)

    def excess(self) -> int:
        """How many more are pending than its own terms allow."""
        most = self.terms.pending_max
        if most is None or self.ring.head - self.window.floor <= most:
            return 0
        return max(0, self.pending() - most)

    def has_excess(self) -> bool:
        """Whether that are any when what came too late is left out. Where that is in doubt it is
        looked at once a tick."""
        excess, tick = self.excess(), self._clock.tick
        if not excess or self.window.floor >= self.ring.timed_until:
            return excess > 0
        if tick == self._judged_tick:
            return False
        self._judged_tick = tick
        first, cursor = self.window.floor, self.window.cursor
        last = min(self.ring.timed_until, first + LOOKED_MESSAGES_MAX)
        ranges = self.window.unacked(first, last) + [(max(first, cursor), last)] * (cursor < last)
        picked = selection.pick_of(self.ring, ranges, self.wanted, self._clock.now)
        return excess > selection.total(picked.expired)

    def make_way(self) -> int:
        """Obey the own policy about what waits. Returns how many messages were dropped."""
        excess, dropped = self.excess(), 0
        if excess and self._ahead is not None:
            if self.terms.slow == "drop_oldest":
                dropped = self._drop_oldest(excess, self._ahead)
            elif self.terms.slow == "drop_newest":
                dropped = self._drop_newest(excess, self._ahead)
        self.dropped += dropped
        self._count(Reason.SLOW_CONSUMER, dropped)
        return dropped

    def _drop_oldest(self, count: int, ahead: Ahead) -> int:
        """Leave out the oldest that were never sent: what is in flight is the consumer's."""
        first = self.window.cursor
        last = min(ahead.until, first + ahead.most)
        self.looked += min(ahead.part, last - first)
        number, last = selection.first_wanted(self.ring, first, last, self.wanted, count)
        self._reach(last)
        self.window.ack_range(first, last)
        self._left_out += last - first
        self._released()
        return number

    def _drop_newest(self, count: int, ahead: Ahead) -> int:
        """Leave out the newest, as far as they were not sent."""
        first, head = self.window.cursor, ahead.until
        if head - first > ahead.most:
            if not ahead.part:
                return 0  # Others have had so much that it is for another turn.
            self.looked += head - first
        new = selection.wanted_ranges(self.ring, first, head, self.wanted)
        kept = selection.front(new, selection.total(new) - count)
        self._pass_over(kept, head)
        self._released()
        return selection.total(new) - selection.total(kept)

    def pass_by(self, first: int, head: int) -> bool:
        """It has had messages first..head-1, the newest ones, under other sequences, and is not to
        be sent them again. Returns whether it is not: so much may wait for it that they are only
        some more."""
        cursor = self.window.cursor
        if first - cursor > LOOKED_MESSAGES_MAX:
            return False
        self._pass_over(selection.wanted_ranges(self.ring, cursor, first, self.wanted), head)
        return True

    def pass_over(self, first: int, last: int, reason: Reason) -> None:
        """Messages first..last-1 cannot be had: it is not sent them, now or ever. What is before
        them, and was not sent, still is."""
        cursor = self.window.cursor
        ranges = self.window.unacked(first, last)
        self._forgo(ranges)
        lost = selection.total(ranges)
        if cursor < last:
            self._pass_over([(cursor, first)] * (cursor < first), last)
            lost += last - max(cursor, first)
        self._count(reason, lost)
        self._released()

    def expire(self, most: int) -> bool:
        """Drop those in front that come too late, up to `most`, but for what is in flight. Returns
        whether the floor has moved; `looked` says at how many messages it looked."""
        before, self.looked = self.window.floor, 0
        if self.is_served and self._again:
            self._look_again(1)  # It settles what is not to be sent.
        leave_late = self._pass_late if self.is_served else self._skip_late
        many = EXPIRED_FIRST
        while self.looked < most and leave_late(min(many, most - self.looked)):
            many = min(4 * many, REDELIVERY_MESSAGES)
        return self.window.floor > before

    def _skip_late(self, many: int) -> bool:
        """The same where nobody is there to have anything in flight. Returns whether all of so many
        are dropped."""
        window, ring = self.window, self.ring
        first, cursor = window.floor, window.cursor
        last = min(ring.timed_until, first + many)
        ranges = window.unacked(first, last) + ([(max(first, cursor), last)] * (cursor < last))
        picked = selection.pick_of(ring, ranges, self.wanted, self._clock.now)
        floor = _first_kept(picked, last)
        if self.unburied:
            floor = min(floor, self.unburied.first)
        self.looked += max(0, last - first)
        if floor <= first:
            return False
        self._count(Reason.EXPIRED, selection.total(selection.before(picked.expired, floor)))
        self._skip(floor)
        return floor == last

    def _pass_late(self, many: int) -> bool:
        """The same from the cursor on, whether there is room for more in flight or not."""
        first = self.window.cursor
        last = min(self.ring.timed_until, first + many)
        if first >= last:
            return False
        picked = selection.pick(self.ring, first, last, self.wanted, self._clock.now)
        self.looked += last - first
        end = _first_kept(picked, last)
        self._reach(end)
        self._leave_out(picked, end, attempts=0)
        return end == last

    def terminate(self, first: int, last: int, *, attempt: int = 0, error: str = "") -> None:
        """The consumer can never process first..last-1, and says why: give up what of them is in
        flight, with this attempt if it is not 0, or waits to be sent again."""
        spans = self._wheel.cut(first, last, attempt)
        if self.is_served:
            for a, b in self._resent(first, last, attempt):
                self._resend.remove(a, b)
                spans.append(Span(a, b, attempt or self._attempts_of(a)))
        else:
            spans += [
                Span(max(first, span.first), min(last, span.last), span.attempts)
                for span in self._spans()
                if span.first < last and first < span.last and not self._is_unsent(span)
            ]
        self._terminate(spans, error)

    def _attempts_of(self, sequence: int) -> int:
        """How often a message that waits was sent, if that is soon found; else once."""
        for span in islice(self._spans(), LOOKED_FOR_SPANS):
            if span.first <= sequence < span.last:
                return span.attempts
        return 1

    def _terminate(self, spans: list[Span], error: str) -> None:
        """Give these up: some now, further ones in turns."""
        left = DEAD_LETTERS_MAX
        for span in spans:
            self._errors.note(self, span.first, span.last, error)
            if left > 0:
                ranges = self._open(span.first, span.last)
                left -= selection.total(ranges)
                span.first = self._give_up_front(
                    ranges, span.last, span.attempts, Reason.TERMINATED
                )
            if span.first < span.last:
                rest = Span(span.first, span.last, span.attempts, Reason.TERMINATED)
                self._wait(rest)
                self._again.append(rest)
                self.outbox.wake(self)

    def _give_up_front(self, ranges: Ranges, last: int, attempts: int, reason: Reason) -> int:
        """Give up what lies in front of these, before `last`, which was sent so often: so much that
        nobody else waits for long. Returns where it ends."""
        some = selection.front(ranges, DEAD_LETTERS_MAX)
        if some:
            first, end = some[0][0], some[-1][1]
            end = self.ring.piece(first, end, REDELIVERY_BYTES)[1]
            some = selection.before(some, end)
            last = end if selection.total(some) < selection.total(ranges) else last
        self._give_up(some, reason, attempts)
        return last

    def _give_up(self, ranges: Ranges, reason: Reason, attempts: int) -> None:
        """These are not sent, or not again. The rest of this turn is others'."""
        if not ranges:
            return
        self.looked += self.looked_max
        self._count(reason, selection.total(ranges))
        self._reach(max(self.window.cursor, ranges[-1][1]))
        # Behind what waits for room, everything does.
        until = ranges[0][0] if self.unburied else self._bury(ranges, reason, attempts)
        if until is not None:
            left = selection.behind(ranges, until)
            self._set_aside(left)
            self.unburied.add(left, reason, attempts)
            ranges = selection.before(ranges, until)
        self._forgo(ranges)
        self._released()

    def _set_aside(self, ranges: Ranges) -> None:
        """These wait for nothing but a dead letter's place."""
        for first, last in ranges:
            for waiting in (self._unsent, self._resend):
                waiting.remove(first, last)

    def give_up_again(self, rows: Iterable[tuple[int, int, int, str]]) -> None:
        """These were given up before a restart, and found no room; as many of them as are not
        acknowledged: see `Unburied.rows`."""
        for first, last, attempts, reason in rows:
            ranges = self._open(first, last)
            self._set_aside(ranges)
            self.unburied.add(ranges, Reason(reason), attempts)

    def bury_on(self) -> bool:
        """Some of what is given up, the oldest of it: there may be room for it now. Returns whether
        all that could be tried found room."""
        ring = self.ring
        for _ in range(BURIED_AT_ONCE):
            found = self.unburied.front(ring.floor, ring.head)
            if found is None:
                return True
            ranges, reason, attempts = found
            ranges = selection.front(ranges, DEAD_LETTERS_MAX)
            end = ring.piece(ranges[0][0], ranges[-1][1], REDELIVERY_BYTES)[1]
            ranges = selection.before(ranges, end)
            until = self._bury(ranges, reason, attempts)
            self._forgo(ranges if until is None else selection.before(ranges, until))
            self._released()
            if until is not None:
                return False
        return True

    def _forgo(self, ranges: Ranges) -> None:
        """The cursor has passed these, and nobody will acknowledge them."""
        self._left_out += selection.total(ranges)
        for first, last in ranges:
            self._done(first, last)

    def _done(self, first: int, last: int) -> None:
        """Nothing is left to be done about first..last-1."""
        self.window.ack_range(first, last)
        self.unburied.remove(first, last)
        for waiting in (self._unsent, self._resend):
            waiting.remove(first, last)

    def _count(self, reason: Reason, count: int) -> None:
        if count:
            self.undelivered[reason] += count


def _first_kept(picked: Picked, last: int) -> int:
    """The first message that is still to be sent, now or later, or `last`."""
    return min([first for first, _ in picked.send + picked.later], default=last)
