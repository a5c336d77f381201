"""Compaction: copies last values to the head, so that older messages can be released.

A copy keeps the remaining times of the original. A subscriber that acked the value does not get the
copy, unless its backlog is too large to check. Values are copied only where most of the bytes held
for them belong to other messages, so each copied byte releases more than one. If nearly all stored
messages are values, the oldest values are dropped instead.

    before     a ─ ─ ─ ─ b ─ ─ ─ ─ ─ c ─ ─ head
    after                            c ─ ─ a b head
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from simplebus.core.errors import Reason
from simplebus.core.limits import COMPACTION_BATCH_BYTES, DELIMITER_BYTES, HEADER_BYTES
from simplebus.core.protocol import envelope_batch, frames
from simplebus.core.protocol.frames import FrameBatch, Integers
from simplebus.core.ring.columns import NEVER, NO_DELAY, MessageRow, MessageRows
from simplebus.core.settings import FullPolicy
from simplebus.core.subscription.position import Position

if TYPE_CHECKING:
    from simplebus.core.clock import BrokerClock
    from simplebus.core.commit_log import CommitLog
    from simplebus.core.message_class.message_class import MessageClass
    from simplebus.core.session.session import Session

_MILLISECONDS_MAX = (1 << 64) - 1


class CompactingStore(Protocol):
    """Parts of a `Store` that compaction uses."""

    clock: BrokerClock
    timer_index: int
    commit_log: CommitLog | None

    def append_and_log(
        self,
        cls: MessageClass,
        batch: FrameBatch,
        rows: MessageRows | None,
        session: Session | None,
    ) -> int: ...

    def notify_subscribers(self, cls: MessageClass) -> None: ...


@dataclass(frozen=True, slots=True)
class LastValueCopy:
    """Last values that were copied out of a ring."""

    old_sequences: Integers
    batch: FrameBatch
    rows: MessageRows | None
    acknowledged_by: list[Position]
    """Positions that have acknowledged all of them."""
    old_floor: int
    """Floor of the ring before the values were released."""

    def count_from(self, sequence: int) -> int:
        """Return how many values had this old sequence or a higher sequence."""
        return int(np.count_nonzero(self.old_sequences >= sequence))


def compact_if_cluttered(store: CompactingStore, cls: MessageClass) -> None:
    """Copy some values, if most of the bytes that are kept for values belong to other messages.

    The class must have been trimmed.
    """
    ring, now = cls.ring, store.clock.now
    end = cls.compute_retained_floor(now)
    if end <= ring.floor:  # Nothing is held for values.
        return
    end = cls.last_values.find_compaction_end(end, now)
    if end > ring.floor:
        _compact_oldest(store, cls, end)
        cls.trim(now)


def _compact_oldest(store: CompactingStore, cls: MessageClass, end: int) -> None:
    """Copy the oldest values below `end`, which no position needs."""
    ring, now = cls.ring, store.clock.now
    values = cls.last_values.oldest_values(end, COMPACTION_BATCH_BYTES, now)
    if not values.size:
        ring.release(end)
        return
    copied = copy_values(store, cls, values)
    ring.release(int(values[-1]) + 1)
    append_copy(store, cls, copied)


def copy_values(store: CompactingStore, cls: MessageClass, sequences: Integers) -> LastValueCopy:
    """Return copies of the oldest values of a class, ready to be appended."""
    ring, now, end_sequence = cls.ring, store.clock.now, int(sequences[-1]) + 1
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
        lengths = ring.frame_sizes(sequences)
        joined = ring.copy_frames(sequences, store.timer_index)
    batch = FrameBatch(np.frombuffer(joined, np.uint8), np.r_[0, np.cumsum(lengths)], 0)
    copied_rows: MessageRows | None = None
    if (batch.data[batch.starts] == frames.ENVELOPE).any():
        copied_rows = rows if is_timed.any() else MessageRows(rows.count, rows.channels)
    acknowledged_by = [
        position for position in cls.positions if position.window.floor >= end_sequence
    ]
    return LastValueCopy(sequences, batch, copied_rows, acknowledged_by, ring.floor)


def _rebase_times(frame: bytes, row: MessageRow, now: float) -> bytes:
    """Return a frame whose expiry and delay count from now."""
    read, payload = envelope_batch.decode(frame[HEADER_BYTES:-DELIMITER_BYTES])
    read = read._replace(
        expires_ms=None if row.expires == NEVER else _to_milliseconds(row.expires - now),
        not_before_ms=None if row.not_before <= now else _to_milliseconds(row.not_before - now),
    )
    return frame[:HEADER_BYTES] + envelope_batch.encode(read, payload) + frame[-DELIMITER_BYTES:]


def _to_milliseconds(seconds: float) -> int:
    return max(0, round(min(seconds * 1000, _MILLISECONDS_MAX)))


def append_copy(store: CompactingStore, cls: MessageClass, copied: LastValueCopy) -> None:
    """Append copied values. Values without space are dropped and counted."""
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
    skipping = [
        position for position in copied.acknowledged_by if position.skip_compacted(first, ring.head)
    ]
    if len(skipping) < len(cls.positions):
        store.notify_subscribers(cls)
    backlog = cls.backlog_window
    if not cls.positions and backlog.floor == backlog.cursor == first:
        backlog.skip_to(ring.head)


class Compactor:
    """Makes space in a full class.

    Releases messages that are held for last values, and calls `MessageClass.evict`, which spills or
    releases retained messages.
    """

    def __init__(self, store: CompactingStore, cls: MessageClass) -> None:
        self._store = store
        self._cls = cls
        self._initial_head = cls.ring.head
        """Copies have higher sequences; they are not copied again."""

    def make_room(self, size_bytes: int) -> bool:
        """Try to make space for `size_bytes`. Returns True if space may have grown."""
        store, cls, ring, now = self._store, self._cls, self._cls.ring, self._store.clock.now
        if not cls.has_last_values:
            return cls.evict(size_bytes)
        floor = cls.floor()
        if floor <= ring.floor:
            return False
        is_mostly_values = cls.last_values.is_ring_mostly_values(now)
        step = max(size_bytes, min(COMPACTION_BATCH_BYTES, ring.frame_bytes // 8))
        end = min(floor, max(ring.sequence_after_bytes(step), ring.floor + 1))
        if not is_mostly_values and ring.floor < self._initial_head:
            _compact_oldest(store, cls, min(end, self._initial_head))
            return True
        if floor < ring.head and not (
            is_mostly_values and cls.full_policy is FullPolicy.DROP_OLDEST
        ):
            return False  # Acks will release messages.
        _drop_values(cls, end, now)
        return True


class DropOldestCompactor:
    """Copies the last values of a full class before its oldest messages are dropped."""

    def __init__(self, store: CompactingStore, cls: MessageClass) -> None:
        self._store = store
        self._cls = cls
        self._initial_head = cls.ring.head
        """Copies have higher sequences; they are not copied again."""
        self._can_copy = cls.has_last_values and not cls.last_values.is_ring_mostly_values(
            store.clock.now
        )

    def leading_values_end(self) -> int:
        """Return the end of the values at the floor that have no other message between them.

        They are handled together, because copying them makes no space.
        """
        if not self._can_copy:
            return 0
        return min(
            self._cls.last_values.leading_values_end(self._store.clock.now), self._initial_head
        )

    def copy_before_drop(self, new_floor: int) -> LastValueCopy | None:
        """Copy the values below `new_floor`, before everything below it is dropped.

        Returns:
            The copies, or None if there is nothing to copy.
        """
        cls, now = self._cls, self._store.clock.now
        if not cls.has_last_values:
            return None
        if self._can_copy and new_floor <= self._initial_head:
            values = cls.last_values.find_sequences(cls.ring.floor, new_floor, now)
            return copy_values(self._store, cls, values) if values.size else None
        dropped_count = cls.last_values.find_sequences(
            cls.ring.floor, min(new_floor, cls.floor()), now
        ).size
        if dropped_count:
            cls.dropped_counts[Reason.LAST_VALUE_DROPPED] += dropped_count
        return None


def _drop_values(cls: MessageClass, end: int, now: float) -> None:
    """Release everything below `end`, which is only held for its last values."""
    dropped_count = cls.last_values.find_sequences(cls.ring.floor, end, now).size
    if dropped_count:
        cls.dropped_counts[Reason.LAST_VALUE_DROPPED] += dropped_count
    cls.ring.release(end)
