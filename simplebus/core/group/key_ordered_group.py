"""A group in which messages of one key go to one member, one after the other.

Rule 1: of each lane (see `lanes`) one message at most is handed out. What was sent and comes back
is still first in its lane: it is sent again before those behind it are sent, whoever gets it.
Rule 2: who gets a lane follows from which members there are (see `key_owners`). A member that has
no room lets its lanes wait, and only those; one that takes nothing in time counts as gone until it
does.
Rule 3: a message is looked at once, when the cursor passes it. So many may wait behind the cursor
and no more: with them the group looks no further.

    ring      floor ─ in flight, or waiting in a lane ─ cursor ─ not looked at yet ─ head
    lanes     12 │ 15 19     13 │     first one │ those that wait for it
    members   ready to be handed out ┆ handed out ┆ sent
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import islice
from typing import Any, Final

import numpy as np

from simplebus.core.group import key_hash
from simplebus.core.group.group import SHARE_MAX, Group, Member
from simplebus.core.group.key_assignment import OWNERS_MASK, Owners
from simplebus.core.group.key_ordered_member import Handed, KeyMember
from simplebus.core.group.partition_queues import Lanes
from simplebus.core.limits import (
    IN_FLIGHT_BYTES,
    LANES_MESSAGES_MAX,
    PLAIN_FRAMES_MAX,
    REDELIVERY_MESSAGES,
)
from simplebus.core.protocol.frames import Integers
from simplebus.core.redelivery.ack_timer import Span
from simplebus.core.redelivery.delivery_state import Standing
from simplebus.core.redelivery.handover import Left
from simplebus.core.session.outbox import Outbox
from simplebus.core.statistics import SubscriptionStatistics
from simplebus.core.subscription import selection
from simplebus.core.subscription.backlog import Ahead

# So few are handled one after the other: arrays have a price of their own.
_FEW = 4

# Looked at at once, at least, when somebody has room.
_LOOKED_MIN = 16

# What is ready and dealt with is thrown away when it is the most, and not so little.
_GONE_MAX = 64
_GONE: Final = False


class KeyGroup(Group):
    """See the module's law."""

    by_key = True

    def __init__(self, **arguments: Any) -> None:
        self._lanes = Lanes()
        """What the cursor has passed and is not dealt with, but for what opens later."""
        self.attempts_of: dict[int, int] = {}
        """How often each of these was sent, if it ever was."""
        self._in_wait: dict[int, None] = {}
        """Those of them that were never handed out."""
        self._owners: Owners[KeyMember] = Owners()
        self._callers: dict[KeyMember, None] = {}
        """Members for whom something is ready, and who may have room."""
        self._anybodys: deque[int] = deque()
        """What has no key, and may be handed out."""
        self._nobodys: list[int] = []
        """What may be handed out, to whom is to be found out."""
        self._joined = 0
        self._is_nudged = False
        """Whether it is to be woken to hand out what may be ready."""
        self._gone_ready = 0
        """About how many of those that are ready are dealt with since."""
        super().__init__(**arguments)
        self._has_come_back = bool(self._again)

    @property
    def may_rest(self) -> bool:
        return not len(self._lanes)

    # What members ask ----------------------------------------------------------------------------

    def spans_of(self, sequences: Iterable[int]) -> list[Span]:
        """These, ascending, and how often they were sent."""
        spans: list[Span] = []
        attempts_of = self.attempts_of.get
        for sequence in sorted(sequences):
            attempts = attempts_of(sequence, 0)
            if spans and spans[-1].last == sequence and spans[-1].attempts == attempts:
                spans[-1].last = sequence + 1
            else:
                spans.append(Span(sequence, sequence + 1, attempts))
        return spans

    def late_ones(self, sequences: list[int]) -> list[int]:
        """Those that have expired."""
        ring = self.ring
        expires = ring.columns.expires
        if expires is None or min(sequences) >= ring.timed_until:
            return []
        numbers = np.array(sequences)
        late: list[int] = numbers[expires[ring.slots(numbers)] <= self._clock.now].tolist()
        return late

    def leave_out(self, late: list[int]) -> None:
        """These, ascending, have expired, and nobody holds them. Others may follow them."""
        ranges = _ranges(late)
        self._leave_out(selection.Picked([], [], ranges, ranges), late[-1] + 1, attempts=0)
        self._look_on()

    def write(self, sequences: list[int], attempts: int, tick: int) -> tuple[bytes, int]:
        """Copies of these, which were sent so often before, and when they are overdue."""
        ring, timer_index = self.ring, tick % self._timer_ticks
        if len(sequences) == 1:
            ring.stamp(sequences[0], sequences[0] + 1, timer_index)
            data = ring.frame(sequences[0])
        else:
            data = ring.joined(np.array(sequences), timer_index)
        often = max(attempts + 1, 1)
        self.attempts_of.update(dict.fromkeys(sequences, often))
        if attempts > 0:
            self.redelivered += len(sequences)
        else:
            self.delivered += len(sequences)
        return data, tick + self.terms.pause(often)

    # Members -------------------------------------------------------------------------------------

    def _member(self, outbox: Outbox, number: int, in_flight_max: int, name: str) -> Member:
        self._joined += 1
        identity = f"{name}/{number}" if name else f"{self._joined}"
        member = KeyMember(self, outbox, number, in_flight_max, identity)
        self._let_own(member)
        return member

    def leave(self, member: Member) -> None:
        assert isinstance(member, KeyMember)
        super().leave(member)
        self.offer(member)
        self._is_away(member)

    def _is_late(self, member: Member) -> None:
        assert isinstance(member, KeyMember)
        super()._is_late(member)
        self._has_come_back = True
        self._is_away(member)

    def _is_away(self, member: KeyMember) -> None:
        """It has no lanes any longer: what was ready for it is for others."""
        if member in self._owners:
            self._owners.remove(member)
        self._take_ready(member)

    def is_back(self, member: KeyMember) -> None:
        """One that was late takes something."""
        if member in self.members and member not in self._owners:
            self._let_own(member)
            self._look_on()

    def _key_members(self) -> Iterator[KeyMember]:
        for member in self.members:
            assert isinstance(member, KeyMember)
            yield member

    def _let_own(self, member: KeyMember) -> None:
        """It has lanes from now on: what was ready for who had them may be for it."""
        for former in self._owners.add(member, member.identity):
            self._take_ready(former)

    def _take_ready(self, member: KeyMember) -> None:
        self._nobodys += member.ready
        member.ready.clear()
        self._callers.pop(member, None)

    def offer(self, member: Member) -> None:
        super().offer(member)
        assert isinstance(member, KeyMember)
        if member.ready and member.room and member in self.members:
            self._callers[member] = None
        else:
            self._callers.pop(member, None)

    # Handing out ---------------------------------------------------------------------------------

    def share(self) -> list[Member]:
        woken: dict[Member, None] = {}
        if self._looks_on or not self.members:
            return []
        self.looked = 0
        self._call_out(woken)
        while self.looked < self.looked_max:
            if self._may_enter_again:
                self._enter_again()
            elif self._may_enter_new:
                self._enter_new()
            else:
                break
            self._call_out(woken)
        self.looked_max = type(self).looked_max
        if self._may_enter_again or self._may_enter_new:
            self._looks_on = True
            self._put_off(self._clock.now)
        return list(woken)

    def _look_on(self) -> None:
        """Something may be ready to be handed out, and nobody is about to do that."""
        if self.members:
            self._is_nudged = True
            self._put_off(self._clock.now)

    @property
    def due(self) -> float:
        return self._clock.now if self._is_nudged else super().due

    @property
    def _space(self) -> int:
        """How many messages more may wait behind the cursor; none while nobody takes any."""
        return LANES_MESSAGES_MAX - len(self._in_wait) if self._takers else 0

    @property
    def _may_enter_new(self) -> bool:
        return not self._again and self.window.cursor < self.ring.head and self._space > 0

    @property
    def _may_enter_again(self) -> bool:
        if not self._again:
            return False
        if self._has_come_back:
            self._again = deque(sorted(self._again, key=self._order))
            self._has_come_back = False
        return self._is_inside(self._again[0]) or self._space > 0

    def _is_inside(self, span: Span) -> bool:
        """Whether these messages are in their lanes already: all that are not done, or none."""
        at = max(span.first, self.window.floor)
        while at < span.last and at not in self._lanes:
            end = min(span.last, at + REDELIVERY_MESSAGES)
            unacked = self._open(at, end)
            if unacked:
                return unacked[0][0] in self._lanes
            at = end
        return at < span.last

    def _order(self, span: Span) -> tuple[bool, bool, int]:
        """Who is in a lane goes first; then who was sent, and so was first in his lane before."""
        return not self._is_inside(span), not span.attempts, span.first

    def _enter_again(self) -> None:
        """What comes back may be handed out; what is new behind the cursor goes into its lane."""
        found = self._look_again(min(max(self._space, 1), REDELIVERY_MESSAGES))
        if found is None:
            return
        span, last, picked = found
        is_inside = picked.send[0][0] in self._lanes
        attempts = span.attempts
        self._settle(span, last, picked)
        for begin, end in picked.send:
            if is_inside:
                self._in_wait.update(dict.fromkeys(range(begin, end)))
                self._make_ready(range(end - 1, begin - 1, -1), before_others=True)
            else:
                self._enter(begin, end, attempts)

    def _enter_new(self) -> None:
        """The cursor moves on, over as many as may be handed out soon."""
        room = self._takers.first().room
        many = min(max(len(self.members) * room, _LOOKED_MIN), REDELIVERY_MESSAGES)
        picked, last = self._look(many, self._space)
        self._reach(last)
        self._leave_out(picked, last, attempts=0)
        for begin, end in picked.send:
            self._enter(begin, end, 0)

    def _enter(self, first: int, last: int, attempts: int) -> None:
        """Messages first..last-1, which were sent so often, go into their lanes."""
        sequences = range(first, last)
        if attempts:
            self.attempts_of.update(dict.fromkeys(sequences, attempts))
        self._in_wait.update(dict.fromkeys(sequences))
        self._make_ready(self._lanes.enter(sequences, key_hash.lanes(self.ring, first, last)))

    def _make_ready(self, sequences: Iterable[int], *, before_others: bool = False) -> None:
        """These, which wait, may be handed out."""
        table, mask = self._owners.table, OWNERS_MASK
        owners: dict[KeyMember, None] = {}
        ready: deque[int] | list[int]
        for sequence, lane in zip(sequences, self._lanes.lanes(sequences), strict=True):
            owner = table[lane & mask]
            if not lane:
                ready = self._anybodys
            elif owner is None:
                self._nobodys.append(sequence)
                continue
            else:
                ready = owner.ready
                owners[owner] = None
            if before_others:
                ready.appendleft(sequence)
            else:
                ready.append(sequence)
        for owner in owners:
            self.offer(owner)

    def _call_out(self, woken: dict[Member, None]) -> None:
        """Hand out what is ready, to whom has room."""
        if self._nobodys and self._owners:
            nobodys, self._nobodys = self._nobodys, []
            self._make_ready(sorted(s for s in nobodys if s in self._in_wait))
        callers = self._callers
        while callers:
            caller = next(iter(callers))
            self._give(caller, caller.ready, caller.room, woken)
        takers, anybodys = self._takers, self._anybodys
        while anybodys and takers:
            member = takers.first()
            fair = -(-len(anybodys) // len(takers))
            assert isinstance(member, KeyMember)
            self._give(member, anybodys, min(member.room, SHARE_MAX, fair), woken)

    def _give(
        self, member: KeyMember, ready: deque[int], most: int, woken: dict[Member, None]
    ) -> None:
        """Hand a member up to so many of these, one at least if there is any left."""
        sequences: list[int] = []
        take, is_gone = self._in_wait.pop, _GONE
        while ready and len(sequences) < most:
            sequence = ready.popleft()
            if take(sequence, is_gone) is not is_gone:  # Else it was dropped, or has expired.
                sequences.append(sequence)
        handed = Handed(sequences, self._sizes(sequences), 0)
        space = IN_FLIGHT_BYTES - member.held_bytes
        if sum(handed.sizes) > space:
            handed, rest = handed.cut(space)
            ready.extendleft(reversed(rest.sequences))
            self._in_wait.update(dict.fromkeys(rest.sequences))
        if not sequences:
            self.offer(member)
            return
        self.looked -= len(handed.sequences)
        self._next_turn(member)
        for part in self._by_attempts(handed):
            member.hand_some(part, self._clock.tick)
        woken[member] = None

    def _by_attempts(self, handed: Handed) -> list[Handed]:
        """The same in parts that were sent as often, each ascending."""
        attempts_of = self.attempts_of
        entries = sorted(zip(handed.sequences, handed.sizes, strict=True))
        if attempts_of.keys().isdisjoint(handed.sequences):
            sequences, sizes = zip(*entries, strict=True)
            return [Handed(list(sequences), list(sizes), 0)]
        parts: dict[int, Handed] = {}
        for sequence, size in entries:
            attempts = attempts_of.get(sequence, 0)
            part = parts.setdefault(attempts, Handed([], [], attempts))
            part.sequences.append(sequence)
            part.sizes.append(size)
        return sorted(parts.values(), key=lambda part: -part.attempts)

    def _sizes(self, sequences: list[int]) -> list[int]:
        ring = self.ring
        if len(sequences) <= _FEW:
            return [ring.size(sequence, sequence + 1) for sequence in sequences]
        begins, ends = ring.places(np.array(sequences))
        sizes: list[int] = (ends - begins).tolist()
        return sizes

    # What comes back -----------------------------------------------------------------------------

    def acknowledge(self, member: Member, first: int, last: int) -> bool:
        assert isinstance(member, KeyMember)
        lost = member.lose_range(first, last)
        self._acknowledged(lost)
        return bool(lost)

    def acknowledge_all(
        self, member: Member, firsts: Integers, lasts: Integers
    ) -> list[tuple[int, int]]:
        assert isinstance(member, KeyMember)
        lost = member.lose_ranges(firsts, lasts)
        self._acknowledged(lost)
        held = np.sort(np.array(lost, np.int64))
        missed = np.flatnonzero(held.searchsorted(lasts) <= held.searchsorted(firsts))
        return list(zip(firsts[missed].tolist(), lasts[missed].tolist(), strict=True))

    def _acknowledged(self, sequences: list[int]) -> None:
        """These are processed."""
        if len(sequences) > PLAIN_FRAMES_MAX:
            numbers = np.array(sequences)
            self.window.ack(numbers, numbers + 1)
        else:
            for sequence in sequences:
                self.window.ack_range(sequence, sequence + 1)
        self._left(sequences)

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
        super().refuse(member, first, last, delay, tick, attempt=attempt, error=error)
        self._has_come_back = True

    def extend(self, member: Member, first: int, last: int, tick: int, attempt: int = 0) -> None:
        assert isinstance(member, KeyMember)
        member.postpone(first, last, tick, attempt)

    def tick(self, tick: int) -> None:
        super().tick(tick)
        self._has_come_back = True

    def wake_due(self) -> bool:
        is_nudged, self._is_nudged = self._is_nudged, False
        self._has_come_back = True
        return super().wake_due() or is_nudged

    def ack(self, first: int, last: int) -> None:
        for span in self._sent_before(first, last):
            self._done(span.first, span.last)

    def terminate(self, first: int, last: int, *, attempt: int = 0, error: str = "") -> None:
        self._terminate(self._sent_before(first, last), error)
        self._has_come_back = True

    def _sent_before(self, first: int, last: int) -> list[Span]:
        """What of first..last-1 was sent to somebody and is not acknowledged."""
        return [
            Span(a, b, span.attempts)
            for span in list(self._spans())
            if span.attempts > 0
            for a, b in self.window.unacked(max(first, span.first), min(last, span.last))
        ]

    def put_off(self, pauses: Iterable[tuple[int, int, float]]) -> None:
        """The same; each goes into its lane at once, so that those behind it wait for it. What is
        not in memory is not put off: its lane is not known, and it comes before them as well."""
        ring = self.ring
        there = [(max(a, ring.floor), min(b, ring.head), due) for a, b, due in pauses]
        super().put_off((a, b, due) for a, b, due in there if a < b)
        later, self._later = sorted(self._later), []
        for due, _, span in later:
            for begin, end in self.window.unacked(span.first, span.last):
                sequences = range(begin, end)
                self.attempts_of.update(dict.fromkeys(sequences, span.attempts))
                first = self._lanes.enter(sequences, key_hash.lanes(ring, begin, end))
                self._in_wait.update(dict.fromkeys(set(sequences).difference(first)))
                for sequence in first:
                    self._delay(due, Span(sequence, sequence + 1, span.attempts))

    def take_over(self, left: Left, tick_seconds: float) -> None:
        now = self._clock.now
        pauses = left.pauses(self._clock, tick_seconds)
        self.put_off((first, last, now + pause) for first, last, pause in pauses)

    def _done(self, first: int, last: int) -> None:
        super()._done(first, last)
        self._left(self._inside(first, last))

    def _set_aside(self, ranges: selection.Ranges) -> None:
        super()._set_aside(ranges)
        for first, last in ranges:  # Those behind them in their lanes need not wait for a place.
            self._left(self._inside(first, last))

    def _inside(self, first: int, last: int) -> list[int]:
        """What of first..last-1 is in a lane."""
        lanes = self._lanes
        if last - first <= len(lanes):
            return [sequence for sequence in range(first, last) if sequence in lanes]
        return [sequence for sequence in lanes if first <= sequence < last]

    def _left(self, sequences: list[int]) -> None:
        """These are dealt with: those behind them may be handed out."""
        waiting, forget = self._in_wait, self.attempts_of.pop
        if not waiting.keys().isdisjoint(sequences):
            before = len(waiting)
            for sequence in sequences:
                waiting.pop(sequence, None)
            self._gone_ready += before - len(waiting)
        for sequence in sequences:
            forget(sequence, None)
        self._make_ready(self._lanes.leave(sequences))
        if self._gone_ready > len(waiting) + _GONE_MAX:
            self._forget_gone()

    def _forget_gone(self) -> None:
        """Of what was ready, much is dealt with: let go of it."""
        self._gone_ready = 0
        waiting = self._in_wait
        for ready in (self._anybodys, *(m.ready for m in self._key_members())):
            left = [sequence for sequence in ready if sequence in waiting]
            ready.clear()
            ready.extend(left)
        self._nobodys = [sequence for sequence in self._nobodys if sequence in waiting]

    # Giving up -----------------------------------------------------------------------------------

    def purge(self, first: int, last: int) -> None:
        super().purge(first, last)
        self._look_on()

    def _skip(self, floor: int) -> int:
        gone = self._inside(self.window.floor, floor)
        lost = super()._skip(floor)
        self._left(gone)
        return lost

    def expire(self, most: int) -> bool:
        before = self.window.floor
        super().expire(most)
        waiting = self._in_wait
        if waiting and self.window.floor < self.ring.timed_until:
            self.looked += len(waiting)
            late = self.late_ones(list(waiting))
            if late:
                self.leave_out(sorted(late))
        return self.window.floor > before

    def _drop_oldest(self, count: int, ahead: Ahead) -> int:
        never_sent = (s for s in self._in_wait if s not in self.attempts_of)
        dropped = self._drop(list(islice(never_sent, count)))
        if dropped < count:
            dropped += super()._drop_oldest(count - dropped, ahead)
        return dropped

    def _drop_newest(self, count: int, ahead: Ahead) -> int:
        dropped = super()._drop_newest(count, ahead)
        if dropped < count and self.window.cursor == self.ring.head:
            never_sent = (s for s in reversed(self._in_wait) if s not in self.attempts_of)
            dropped += self._drop(list(islice(never_sent, count - dropped)))
        return dropped

    def _drop(self, sequences: list[int]) -> int:
        """Leave out these, which were never sent. Returns how many they are."""
        for sequence in sequences:
            self.window.ack_range(sequence, sequence + 1)
        self._left_out += len(sequences)
        self._left(sequences)
        self._released()
        return len(sequences)

    # Looks ---------------------------------------------------------------------------------------

    def standing(self) -> Standing:
        return super().standing()._replace(behind=len(self._in_wait))

    def statistics(self) -> SubscriptionStatistics:
        found, waiting = super().statistics(), len(self._in_wait)
        return replace(found, in_flight=found.in_flight - waiting, waiting=found.waiting + waiting)

    def _spans(self) -> Iterator[Span]:
        yield from super()._spans()
        yield from self.spans_of(self._in_wait)

    def check(self) -> None:
        super().check()
        self._lanes.check()
        out: list[int] = []
        for member in self._key_members():
            member.check()
            out += [s for span in member.parts() for s in range(span.first, span.last)]
            ready = [sequence for sequence in member.ready if sequence in self._in_wait]
            lanes = self._lanes.lanes(ready)
            assert all(self._owners.of(lane) is member for lane in lanes), "not its lane"
            assert (member in self._callers) == bool(member.ready and member.room)
            assert (member in self._owners) == (not member.is_late)
        coming = [span for span in super()._spans() if self._is_inside(span)]
        out += [s for span in coming for s in range(span.first, span.last) if s in self._lanes]
        assert sorted({*out, *self._in_wait}) == sorted(self._lanes), "in a lane and nowhere else"
        assert not set(out) & set(self._in_wait)
        assert all(self._lanes.is_first(sequence) for sequence in out), "two of a lane are out"
        queues = (self._anybodys, self._nobodys, *(m.ready for m in self._key_members()))
        ready = sorted(s for queue in queues for s in queue if s in self._in_wait)
        assert ready == sorted(s for s in self._in_wait if self._lanes.is_first(s))
        assert set(self.attempts_of) <= set(self._lanes)


def _ranges(sequences: list[int]) -> selection.Ranges:
    """Ascending sequences as ranges."""
    ranges: selection.Ranges = []
    for sequence in sequences:
        if ranges and ranges[-1][1] == sequence:
            ranges[-1] = (ranges[-1][0], sequence + 1)
        else:
            ranges.append((sequence, sequence + 1))
    return ranges
