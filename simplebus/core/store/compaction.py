"""Last values that would hold the rest of a class in memory are carried: stored anew, at the head.

Rule 1: a value is carried as it is, with what remains of its times; it is nobody's new message.
Who has acknowledged it is not sent it again, unless so much waits for him that nobody sorts it out.
Rule 2: values are carried where most of what is held for them is not theirs: a byte that is copied
has let go of another one. Where nearly all that is stored are values, the oldest go instead.

    before     a ─ ─ ─ ─ b ─ ─ ─ ─ ─ c ─ ─ head
    after                            c ─ ─ a b head
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from simplebus.core.errors import Reason
from simplebus.core.limits import CARRIED_BYTES, DELIMITER_BYTES, HEADER_BYTES
from simplebus.core.protocol import envelope_batch, frames
from simplebus.core.protocol.frames import FrameBatch, Integers
from simplebus.core.ring.columns import AT_ONCE, NEVER, Row, Rows
from simplebus.core.settings import FullPolicy
from simplebus.core.subscription.subscription import Subscription

if TYPE_CHECKING:
    from simplebus.core.message_class.message_class import MessageClass
    from simplebus.core.store.store import Store

_MILLISECONDS_MAX = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Taken:
    """Values that were copied out of a ring."""

    values: Integers
    """Their former sequences."""
    batch: FrameBatch
    rows: Rows | None
    had: list[Subscription]
    """Who has acknowledged all of them."""
    floor: int
    """Of the ring, while they were in there."""

    def count_from(self, sequence: int) -> int:
        """How many had this sequence or a higher one."""
        return int(np.count_nonzero(self.values >= sequence))


def tidy(store: Store, cls: MessageClass) -> None:
    """Carry some values, if what is held for them is mostly not theirs. What nobody needs was let
    go of."""
    ring, now = cls.ring, store.clock.now
    until = cls.needed_from(now)
    if until <= ring.floor:  # Nothing is held for values.
        return
    until = cls.values.cluttered_until(until, now)
    if until > ring.floor:
        _carry(store, cls, until)
        cls.release(now)


def _carry(store: Store, cls: MessageClass, until: int) -> None:
    """Carry the oldest of the values below `until`, which nobody else needs."""
    ring, now = cls.ring, store.clock.now
    values = cls.values.oldest(until, CARRIED_BYTES, now)
    if not values.size:
        ring.release(until)
        return
    taken = take_out(store, cls, values)
    ring.release(int(values[-1]) + 1)
    put_back(store, cls, taken)


def take_out(store: Store, cls: MessageClass, values: Integers) -> Taken:
    """Copies of these values, the oldest ones of a class, as they are to be stored anew."""
    ring, now, behind = cls.ring, store.clock.now, int(values[-1]) + 1
    rows = ring.rows_at(values)
    is_timed = np.zeros(values.size, np.bool_)
    if rows.expires is not None:
        is_timed |= rows.expires != NEVER
    if rows.opens is not None:
        is_timed |= rows.opens != AT_ONCE
    if is_timed.any():
        copies = [ring.frame(sequence) for sequence in values.tolist()]
        for index in np.flatnonzero(is_timed).tolist():
            copies[index] = _as_of_now(copies[index], ring.row(int(values[index])), now)
        lengths, joined = np.array([*map(len, copies)]), b"".join(copies)
    else:
        begins, ends = ring.places(values)
        lengths, joined = ends - begins, ring.joined(values, store.timer_index)
    batch = FrameBatch(np.frombuffer(joined, np.uint8), np.r_[0, np.cumsum(lengths)], 0)
    described: Rows | None = None
    if (batch.data[batch.starts] == frames.ENVELOPE).any():
        described = rows if is_timed.any() else Rows(rows.count, rows.channels)
    had = [position for position in cls.subscriptions if position.window.floor >= behind]
    return Taken(values, batch, described, had, ring.floor)


def _as_of_now(frame: bytes, row: Row, now: float) -> bytes:
    """A message whose times count from now."""
    read, payload = envelope_batch.decode(frame[HEADER_BYTES:-DELIMITER_BYTES])
    read = read._replace(
        expires_ms=None if row.expires == NEVER else _milliseconds(row.expires - now),
        not_before_ms=None if row.opens <= now else _milliseconds(row.opens - now),
    )
    return frame[:HEADER_BYTES] + envelope_batch.encode(read, payload) + frame[-DELIMITER_BYTES:]


def _milliseconds(seconds: float) -> int:
    return max(0, round(min(seconds * 1000, _MILLISECONDS_MAX)))


def put_back(store: Store, cls: MessageClass, taken: Taken) -> None:
    """Store values anew. What there is no room for is dropped, and counted."""
    ring, now, batch, rows = cls.ring, store.clock.now, taken.batch, taken.rows
    first = ring.head
    stored = store.fill(cls, batch, rows, None)
    if stored < batch.count:
        cls.dropped[Reason.LAST_VALUE_DROPPED] += batch.count - stored
    if not stored:
        return
    cls.carried += stored
    if now >= cls.times.next_time:
        cls.times.note(now, first)
    if store.ledger is not None:
        cls.floors_owed.append((store.ledger.mark, taken.floor))
    passed = [position for position in taken.had if position.pass_by(first, ring.head)]
    if len(passed) < len(cls.subscriptions):
        store.wake(cls)
    waiting = cls.waiting
    if not cls.subscriptions and waiting.floor == waiting.cursor == first:
        waiting.skip_to(ring.head)


class MakingWay:
    """Room in a full class, made by letting go of what is held for last values."""

    def __init__(self, store: Store, cls: MessageClass) -> None:
        self._store = store
        self._cls = cls
        self._until = cls.ring.head
        """What was carried lies behind it; it is not carried once more."""

    def make(self, size: int) -> bool:
        """Make room for `size` bytes, or for some of them. Returns whether there is more than
        before, or may be."""
        store, cls, ring, now = self._store, self._cls, self._cls.ring, self._store.clock.now
        if not cls.holds_values:
            return cls.give_way(size)
        floor = cls.floor()
        if floor <= ring.floor:
            return False
        fill = cls.values.fill_ring(now)
        step = max(size, min(CARRIED_BYTES, ring.frame_bytes // 8))
        until = min(floor, max(ring.after(step), ring.floor + 1))
        if not fill and ring.floor < self._until:
            _carry(store, cls, min(until, self._until))
            return True
        if floor < ring.head and not (fill and cls.policy is FullPolicy.DROP_OLDEST):
            return False  # Somebody's acknowledgement makes room.
        _drop(cls, until, now)
        return True


class Saving:
    """Last values of a full class that drops its oldest messages: they are carried, too."""

    def __init__(self, store: Store, cls: MessageClass) -> None:
        self._store = store
        self._cls = cls
        self._until = cls.ring.head
        """As above."""
        self._saves = cls.holds_values and not cls.values.fill_ring(store.clock.now)

    def front(self) -> int:
        """Behind the values that lie in front without another message between them: they are dealt
        with together, since they make no room."""
        if not self._saves:
            return 0
        return min(self._cls.values.front(self._store.clock.now), self._until)

    def take_out(self, floor: int) -> Taken | None:
        """The values below `floor`, before everything below it is let go of; None for none that
        can be kept."""
        cls, now = self._cls, self._store.clock.now
        if not cls.holds_values:
            return None
        if self._saves and floor <= self._until:
            values = cls.values.sequences(cls.ring.floor, floor, now)
            return take_out(self._store, cls, values) if values.size else None
        lost = cls.values.sequences(cls.ring.floor, min(floor, cls.floor()), now).size
        if lost:
            cls.dropped[Reason.LAST_VALUE_DROPPED] += lost
        return None


def _drop(cls: MessageClass, until: int, now: float) -> None:
    """Let go of all below `until`, which nobody needs but for its values."""
    lost = cls.values.sequences(cls.ring.floor, until, now).size
    if lost:
        cls.dropped[Reason.LAST_VALUE_DROPPED] += lost
    cls.ring.release(until)
