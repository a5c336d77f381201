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
from simplebus.core.limits import COMPACTION_BATCH_BYTES, DELIMITER_BYTES, HEADER_BYTES
from simplebus.core.protocol import envelope_batch, frames
from simplebus.core.protocol.frames import FrameBatch, Integers
from simplebus.core.ring.columns import NEVER, NO_DELAY, MessageRow, MessageRows
from simplebus.core.settings import FullPolicy
from simplebus.core.subscription.subscription import BrokerSubscription

if TYPE_CHECKING:
    from simplebus.core.message_class.message_class import MessageClass
    from simplebus.core.store.store import Store

_MILLISECONDS_MAX = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class LastValueCopy:
    """Values that were copied out of a ring."""

    old_sequences: Integers
    """Their former sequences."""
    batch: FrameBatch
    rows: MessageRows | None
    acknowledged_by: list[BrokerSubscription]
    """Who has acknowledged all of them."""
    old_floor: int
    """Of the ring, while they were in there."""

    def count_from(self, sequence: int) -> int:
        """How many had this sequence or a higher one."""
        return int(np.count_nonzero(self.old_sequences >= sequence))


def compact_if_cluttered(store: Store, cls: MessageClass) -> None:
    """Carry some values, if what is held for them is mostly not theirs. What nobody needs was let
    go of."""
    ring, now = cls.ring, store.clock.now
    until = cls.compute_retained_floor(now)
    if until <= ring.floor:  # Nothing is held for values.
        return
    until = cls.last_values.find_compaction_end(until, now)
    if until > ring.floor:
        _compact_oldest(store, cls, until)
        cls.trim(now)


def _compact_oldest(store: Store, cls: MessageClass, end: int) -> None:
    """Carry the oldest of the values below `until`, which nobody else needs."""
    ring, now = cls.ring, store.clock.now
    values = cls.last_values.oldest_values(end, COMPACTION_BATCH_BYTES, now)
    if not values.size:
        ring.release(end)
        return
    taken = copy_values(store, cls, values)
    ring.release(int(values[-1]) + 1)
    append_copy(store, cls, taken)


def copy_values(store: Store, cls: MessageClass, sequences: Integers) -> LastValueCopy:
    """Copies of these values, the oldest ones of a class, as they are to be stored anew."""
    ring, now, behind = cls.ring, store.clock.now, int(sequences[-1]) + 1
    rows = ring.read_rows_at(sequences)
    is_timed = np.zeros(sequences.size, np.bool_)
    if rows.expires is not None:
        is_timed |= rows.expires != NEVER
    if rows.not_before is not None:
        is_timed |= rows.not_before != NO_DELAY
    if is_timed.any():
        copies = [ring.copy_frame(sequence) for sequence in sequences.tolist()]
        for index in np.flatnonzero(is_timed).tolist():
            copies[index] = _rebase_times(copies[index], ring.read_row(int(sequences[index])), now)
        lengths, joined = np.array([*map(len, copies)]), b"".join(copies)
    else:
        begins, ends = ring.frame_bounds(sequences)
        lengths, joined = ends - begins, ring.copy_frames(sequences, store.timer_index)
    batch = FrameBatch(np.frombuffer(joined, np.uint8), np.r_[0, np.cumsum(lengths)], 0)
    described: MessageRows | None = None
    if (batch.data[batch.starts] == frames.ENVELOPE).any():
        described = rows if is_timed.any() else MessageRows(rows.count, rows.channels)
    had = [position for position in cls.subscriptions if position.window.floor >= behind]
    return LastValueCopy(sequences, batch, described, had, ring.floor)


def _rebase_times(frame: bytes, row: MessageRow, now: float) -> bytes:
    """A message whose times count from now."""
    read, payload = envelope_batch.decode(frame[HEADER_BYTES:-DELIMITER_BYTES])
    read = read._replace(
        expires_ms=None if row.expires == NEVER else _to_milliseconds(row.expires - now),
        not_before_ms=None if row.not_before <= now else _to_milliseconds(row.not_before - now),
    )
    return frame[:HEADER_BYTES] + envelope_batch.encode(read, payload) + frame[-DELIMITER_BYTES:]


def _to_milliseconds(seconds: float) -> int:
    return max(0, round(min(seconds * 1000, _MILLISECONDS_MAX)))


def append_copy(store: Store, cls: MessageClass, copied: LastValueCopy) -> None:
    """Store values anew. What there is no room for is dropped, and counted."""
    ring, now, batch, rows = cls.ring, store.clock.now, copied.batch, copied.rows
    first = ring.head
    stored = store.append_and_log(cls, batch, rows, None)
    if stored < batch.count:
        cls.dropped_counts[Reason.LAST_VALUE_DROPPED] += batch.count - stored
    if not stored:
        return
    cls.compacted_count += stored
    if now >= cls.time_index.next_step_time:
        cls.time_index.record(now, first)
    if store.commit_log is not None:
        cls.pending_floors.append((store.commit_log.log_position, copied.old_floor))
    passed = [
        position for position in copied.acknowledged_by if position.skip_compacted(first, ring.head)
    ]
    if len(passed) < len(cls.subscriptions):
        store.notify_subscribers(cls)
    waiting = cls.backlog_window
    if not cls.subscriptions and waiting.floor == waiting.cursor == first:
        waiting.skip_to(ring.head)


class Compactor:
    """Room in a full class, made by letting go of what is held for last values."""

    def __init__(self, store: Store, cls: MessageClass) -> None:
        self._store = store
        self._cls = cls
        self._initial_head = cls.ring.head
        """What was carried lies behind it; it is not carried once more."""

    def make_room(self, size_bytes: int) -> bool:
        """Make room for `size` bytes, or for some of them. Returns whether there is more than
        before, or may be."""
        store, cls, ring, now = self._store, self._cls, self._cls.ring, self._store.clock.now
        if not cls.has_last_values:
            return cls.evict(size_bytes)
        floor = cls.floor()
        if floor <= ring.floor:
            return False
        fill = cls.last_values.is_ring_mostly_values(now)
        step = max(size_bytes, min(COMPACTION_BATCH_BYTES, ring.frame_bytes // 8))
        until = min(floor, max(ring.sequence_after_bytes(step), ring.floor + 1))
        if not fill and ring.floor < self._initial_head:
            _compact_oldest(store, cls, min(until, self._initial_head))
            return True
        if floor < ring.head and not (fill and cls.full_policy is FullPolicy.DROP_OLDEST):
            return False  # Somebody's acknowledgement makes room.
        _evict_values(cls, until, now)
        return True


class EvictionCompactor:
    """Last values of a full class that drops its oldest messages: they are carried, too."""

    def __init__(self, store: Store, cls: MessageClass) -> None:
        self._store = store
        self._cls = cls
        self._initial_head = cls.ring.head
        """As above."""
        self._can_copy = cls.has_last_values and not cls.last_values.is_ring_mostly_values(
            store.clock.now
        )

    def leading_values_end(self) -> int:
        """Behind the values that lie in front without another message between them: they are dealt
        with together, since they make no room."""
        if not self._can_copy:
            return 0
        return min(
            self._cls.last_values.leading_values_end(self._store.clock.now), self._initial_head
        )

    def copy_evicted(self, new_floor: int) -> LastValueCopy | None:
        """The values below `floor`, before everything below it is let go of; None for none that
        can be kept."""
        cls, now = self._cls, self._store.clock.now
        if not cls.has_last_values:
            return None
        if self._can_copy and new_floor <= self._initial_head:
            values = cls.last_values.find_sequences(cls.ring.floor, new_floor, now)
            return copy_values(self._store, cls, values) if values.size else None
        lost = cls.last_values.find_sequences(cls.ring.floor, min(new_floor, cls.floor()), now).size
        if lost:
            cls.dropped_counts[Reason.LAST_VALUE_DROPPED] += lost
        return None


def _evict_values(cls: MessageClass, end: int, now: float) -> None:
    """Let go of all below `until`, which nobody needs but for its values."""
    lost = cls.last_values.find_sequences(cls.ring.floor, end, now).size
    if lost:
        cls.dropped_counts[Reason.LAST_VALUE_DROPPED] += lost
    cls.ring.release(end)
