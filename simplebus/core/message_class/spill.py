"""Classes larger than memory: the newest messages are in the ring, all of them on disk.

Rule 1: only what is written leaves the ring. What is not needed any more leaves as everywhere.
Rule 2: a position that needs what the ring has let go of is *behind*: it has a ring of its own,
with the same sequences, from its floor on, which is filled from disk; and no other position
notices. What it has acknowledged out of order is an empty message in there.
Rule 3: this file asks for what is on disk and is brought it later. Who reads it is not its concern.

    disk      first ────────────────────────────────────── written
    behind      floor ── cursor ── read back ┄┄►
    ring                                     floor ─────────────── head

Invariant: first <= ring.floor; a position that is behind becomes one of the others again as soon as
its floor is not below the ring's.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from simplebus.core.commit_log import Ledger
from simplebus.core.errors import Reason
from simplebus.core.group.group import Group
from simplebus.core.limits import (
    MESSAGES_MAX,
    SPARE_BYTES,
    SPILL_PART,
    SPILL_READ_BYTES,
    SPILLED_MARKS_MAX,
)
from simplebus.core.message_class.stored_frames import StoredFrameReader
from simplebus.core.protocol import frames
from simplebus.core.protocol.frames import FrameBatch
from simplebus.core.ring.memory_budget import MemoryBudget
from simplebus.core.ring.ring import Ring

if TYPE_CHECKING:
    from simplebus.core.message_class.message_class import MessageClass
    from simplebus.core.redelivery.ack_window import AckWindow
    from simplebus.core.session.outbox import Outbox
    from simplebus.core.store.store import Store
    from simplebus.core.subscription.subscription import BrokerSubscription


class SpilledRange(NamedTuple):
    """Messages first..first+messages-1 as they were found on disk."""

    first: int
    message_count: int
    accepted_time: float
    """When they were accepted."""
    frames: bytes
    """As their publishers sent them; empty where they cannot be read, whatever is tried."""


@dataclass(frozen=True, slots=True, eq=False)
class SpillRead:
    """Messages first..last-1 of a class are wanted from disk, in order, about `bytes_max` of them
    or the first one."""

    class_id: int
    first: int
    last: int
    bytes_max: int
    on_read: Callable[[Sequence[SpilledRange]], None]
    """Called with what was found, without a gap; with nothing when it is to be asked for again."""


class ClassSpill:
    """What of one class is on disk, and who is behind."""

    def __init__(self, cls: MessageClass, spill_manager: SpillManager) -> None:
        self._cls = cls
        self._spill_manager = spill_manager
        self.first_sequence = cls.ring.floor
        """The lowest sequence that is stored, in memory or on disk."""
        self.bytes_max = 0
        """Bytes of frames that may be on disk only; 0 for any number."""
        self.readers: dict[BrokerSubscription, SpillReader] = {}
        self._mark_sequences: list[int] = []
        """Where, and after how many bytes in all, the ring has let go of what is on disk."""
        self._mark_bytes: list[int] = []

    @property
    def message_count(self) -> int:
        """Messages that are on disk only."""
        return self._cls.ring.floor - self.first_sequence

    @property
    def frame_bytes(self) -> int:
        """About how many bytes of frames are on disk only."""
        if not self._mark_bytes or not self.message_count:
            return 0
        return self._mark_bytes[-1] - self._bytes_before(self.first_sequence)

    def _bytes_before(self, sequence: int) -> int:
        at = bisect_right(self._mark_sequences, sequence)
        return self._mark_bytes[at - 1] if at else 0

    def sequence_after(self, size_bytes: int) -> int:
        """A sequence with about `size` bytes on disk only before it."""
        at = bisect_right(self._mark_bytes, self._bytes_before(self.first_sequence) + size_bytes)
        return self._mark_sequences[at - 1] if at else self.first_sequence

    def record_spilled(self, end_sequence: int, size_bytes: int) -> None:
        """Messages up to this one are on disk only, the latest of them with so many bytes."""
        if not self._mark_sequences:
            self._mark_sequences, self._mark_bytes = [self.first_sequence], [0]
        self._mark_sequences.append(end_sequence)
        self._mark_bytes.append(self._mark_bytes[-1] + size_bytes)
        if len(self._mark_sequences) > SPILLED_MARKS_MAX:
            self._mark_sequences, self._mark_bytes = (
                self._mark_sequences[::2],
                self._mark_bytes[::2],
            )

    def evict_spilled(self, size_bytes: int) -> bool:
        """Have the ring let go of `size` bytes at least, if so much is written. Returns whether it
        has let go of anything."""
        cls, ring = self._cls, self._cls.ring
        if not len(ring) or (self.bytes_max and self.frame_bytes >= self.bytes_max):
            return False
        until = ring.after(max(size_bytes, ring.frame_bytes // SPILL_PART))
        if len(ring) >= ring.messages_max:
            until = max(until, ring.floor + max(1, len(ring) // SPILL_PART))
        until = min(until, self._spill_manager.commit_log.written(cls.class_id, ring.head))
        if until <= ring.floor:
            return False
        for position in list(cls.subscriptions):
            if position.window.floor < until and position not in self.readers:
                behind = SpillReader(cls, position, self._spill_manager)
                if not behind.start(until):
                    return False
                self._add_reader(behind)
        self.record_spilled(until, ring.size(ring.floor, until))
        ring.release(until)
        return True

    def add_position(self, position: BrokerSubscription) -> None:
        """A position is new, and may be behind from the start."""
        if position.window.floor < self._cls.ring.floor:
            behind = SpillReader(self._cls, position, self._spill_manager)
            behind.suspend()
            self._add_reader(behind)

    def remove_position(self, position: BrokerSubscription) -> None:
        """A position is gone, or is behind no longer."""
        behind = self.readers.pop(position, None)
        if behind is not None:
            del self._spill_manager.readers[behind]
            behind.close()

    def _add_reader(self, reader: SpillReader) -> None:
        self.readers[reader.position] = reader
        self._spill_manager.readers[reader] = None

    def release_below(self, floor: int) -> None:
        """Nobody needs what is below floor; the ring knows it already."""
        self.first_sequence = min(max(self.first_sequence, floor), self._cls.ring.floor)
        at = bisect_right(self._mark_sequences, self.first_sequence) - 1
        if at > 0:
            del self._mark_sequences[:at], self._mark_bytes[:at]


class SpillReader:
    """One position that is behind."""

    def __init__(
        self, cls: MessageClass, position: BrokerSubscription, spill_manager: SpillManager
    ) -> None:
        self.position = position
        self._cls = cls
        self._spill_manager = spill_manager
        self._ring = self._create_ring()
        self._is_suspended = False
        """Whether nobody is there, and nothing is held for it."""
        self._pending_read: SpillRead | None = None
        self._out_of_memory_state: tuple[int, int] | None = None
        """With how much acknowledged there was no memory for more."""
        self._compacted_bytes = 0

    def _create_ring(self) -> Ring:
        ring = Ring(
            class_id=self._cls.class_id,
            messages_max=MESSAGES_MAX,
            bytes_max=self._spill_manager.budget.limit,
            budget=self._spill_manager.budget,
        )
        ring.begin(self.position.window.floor)
        return ring

    def start(self, end_sequence: int) -> bool:
        """Take over from the class's ring what the position was sent. Returns False without memory
        for it, and nothing has changed."""
        position = self.position
        if not position.has_consumer and position.can_suspend_reading:
            self.suspend()
            return True
        window = position.window
        if not self._copy_messages(position.ring, self._ring, window, window.cursor):
            self._ring.free()
            return False
        self._replace_ring(self._ring)
        return True

    def _replace_ring(self, ring: Ring) -> None:
        self._cls.channels.borrowing_columns.pop(self._ring.columns, None)
        self._ring = ring
        self._cls.channels.borrowing_columns[ring.columns] = None
        self.position.switch_ring(ring)

    def suspend(self) -> None:
        """Nobody is there: hold nothing for it."""
        self._is_suspended = True
        self._pending_read = self._out_of_memory_state = None
        self._compacted_bytes = 0
        held = self._ring
        self._replace_ring(self._create_ring())
        held.free()

    def close(self) -> None:
        """It is behind no longer, or gone."""
        self._pending_read = None
        self._cls.channels.borrowing_columns.pop(self._ring.columns, None)
        self._ring.free()

    def tick(self) -> None:
        """Once per tick: memory may be there that was not."""
        self._out_of_memory_state = None
        self._ring.tick()

    def advance(self) -> bool:
        """Ask for more, or get it from the class's ring. Returns whether the position may have
        something new."""
        position, ring, main = self.position, self._ring, self._cls.ring
        window = position.window
        if window.floor >= main.floor:
            position.switch_ring(main)
            position.requeue_spilled()
            self._class_spill.remove_position(position)
            return True
        if not position.has_consumer and (self._is_suspended or position.can_suspend_reading):
            if not self._is_suspended:
                self.suspend()
            return False
        self._is_suspended = False
        if ring.head < window.floor:  # It has given up, unseen, what was to be read next.
            ring.free()
            ring.begin(window.floor)
            self._pending_read = None
        ring.release(min(window.floor, ring.head))
        if self._pending_read is not None:
            return False
        cursor = max(window.cursor, ring.floor)
        if cursor < ring.head and ring.size(cursor, ring.head) >= SPILL_READ_BYTES:
            return False
        if self._out_of_memory_state == (window.floor, window.in_flight):
            return False
        self._out_of_memory_state = None
        self._compact_ring()
        if ring.head >= main.floor:
            return self._copy_from_class_ring(main)
        last = min(main.floor, self._spill_manager.commit_log.written(ring.class_id, main.floor))
        self._pending_read = SpillRead(
            ring.class_id, ring.head, last, SPILL_READ_BYTES, self._on_read
        )
        self._spill_manager.request_read(self._pending_read)
        return False

    @property
    def _class_spill(self) -> ClassSpill:
        assert self._cls.spill is not None
        return self._cls.spill

    def _copy_from_class_ring(self, class_ring: Ring) -> bool:
        """Copy what comes next and is in the class's ring."""
        ring, window = self._ring, self.position.window
        before = ring.head
        if before >= class_ring.head:
            return False
        last = class_ring.batch(before, class_ring.head, SPILL_READ_BYTES)[1]
        if not self._copy_messages(class_ring, ring, window, last):
            self._out_of_memory_state = (window.floor, window.in_flight)
        return self._requeue_if_grown(before)

    def _requeue_if_grown(self, previous_head: int) -> bool:
        if self._ring.head > previous_head:
            self.position.requeue_spilled()
            return True
        return False

    def _on_read(self, spilled_ranges: Sequence[SpilledRange]) -> None:
        """What was asked for."""
        if self._pending_read is None or self._is_suspended:
            return
        self._pending_read = None
        before = self._ring.head
        try:
            for stretch in spilled_ranges:
                if not self._append_range(stretch):
                    break
        except MemoryError:
            window = self.position.window
            self._out_of_memory_state = (window.floor, window.in_flight)
        if self._requeue_if_grown(before):
            self._spill_manager.notify_position(self.position)

    def _append_range(self, spilled_range: SpilledRange) -> bool:
        """Put what was found into the ring. Returns False when there is no more to be taken.
        Raises MemoryError when it does not fit."""
        ring, window = self._ring, self.position.window
        last = spilled_range.first + spilled_range.message_count
        # The clock may have been set back since: what is there was accepted by now.
        time = min(spilled_range.accepted_time, self._spill_manager.clock.now)
        if last <= ring.head:
            return True
        if spilled_range.first > ring.head:
            return False
        at = spilled_range.first
        try:
            for batch in self._spill_manager.split_range(spilled_range):
                skipped = min(batch.count, max(0, ring.head - at))
                at += batch.count
                if skipped < batch.count:
                    self._append_batch(batch.slice(skipped, batch.count), time, window)
        except ValueError:  # So it cannot be read, whatever is tried.
            first = ring.head
            _append_all(ring, _empty_messages(ring.class_id, last - first))
            self.position.skip_unavailable(first, last, Reason.DAMAGED)
        return True

    def _append_batch(self, batch: FrameBatch, accepted_time: float, window: AckWindow) -> None:
        ring = self._ring
        for run, rows in self._spill_manager.frame_reader.iter_runs(
            self._cls, batch, accepted_time
        ):
            first = ring.head
            for begin, end, is_open in _split_by_need(window, first, first + run.count):
                if is_open:
                    part = None if rows is None else rows.part(begin - first, end - first)
                    some = run.slice(begin - first, end - first)
                    if ring.append(some, 0, part) < some.count:
                        raise MemoryError
                else:
                    _append_all(ring, _empty_messages(ring.class_id, end - begin))

    def _copy_messages(
        self, source: Ring, target: Ring, window: AckWindow, end_sequence: int
    ) -> bool:
        """Have what the source has up to `last` in the target, too. Returns whether there was
        memory for it."""
        try:
            for begin, end, is_open in _split_by_need(window, target.head, end_sequence):
                if not is_open:
                    _append_all(target, _empty_messages(target.class_id, end - begin))
                while is_open and begin < end:
                    batch, after = source.batch(begin, end, SPILL_READ_BYTES)
                    rows = source.rows(begin, after) if begin < source.special_until else None
                    if target.append(batch, 0, rows) < batch.count:
                        return False
                    begin = after
        except MemoryError:
            return False
        return True

    def _compact_ring(self) -> None:
        """Where much of what is held is acknowledged out of order, hold it no longer."""
        ring, window = self._ring, self.position.window
        held = ring.size(ring.floor, min(window.cursor, ring.head))
        if held < max(4 * SPILL_READ_BYTES, 2 * self._compacted_bytes):
            return
        if 2 * window.in_flight > window.cursor - window.floor:
            return  # Most of it is needed.
        fresh = self._create_ring()
        if self._copy_messages(ring, fresh, window, ring.head):
            self._compacted_bytes = fresh.size(fresh.floor, min(window.cursor, fresh.head))
            self._replace_ring(fresh)
            ring.free()
        else:
            fresh.free()


class SpillManager:
    """Of all classes of one broker that has a ledger."""

    def __init__(
        self,
        store: Store,
        commit_log: Ledger,
        budget: MemoryBudget,
        *,
        mark_ready: Callable[[Outbox], None],
    ) -> None:
        """`ready` is called with outboxes that have something new."""
        self.commit_log = commit_log
        self.clock = store.clock
        self.budget = budget
        """Of all rings of positions that are behind."""
        self.frame_reader = StoredFrameReader(store)
        self.readers: dict[SpillReader, None] = {}
        self._mark_ready = mark_ready
        self._queued_reads: list[SpillRead] = []
        self._failed_reads: list[SpillRead] = []
        """What could not be read, to be read again at the next tick."""

    def request_read(self, spill_read: SpillRead) -> None:
        """Have something read."""
        self._queued_reads.append(spill_read)

    def drain_reads(self) -> list[SpillRead]:
        """What is to be read; `given` or `failed` is to follow for each."""
        reads, self._queued_reads = self._queued_reads, []
        return reads

    def complete_read(self, spill_read: SpillRead, spilled_ranges: Sequence[SpilledRange]) -> None:
        """This was found on disk."""
        spill_read.on_read(spilled_ranges)

    def fail_read(self, spill_read: SpillRead) -> None:
        """It could not be read now."""
        self._failed_reads.append(spill_read)

    def tick(self) -> None:
        """Once per tick: try again what went wrong."""
        again, self._failed_reads = self._failed_reads, []
        for read in again:
            read.on_read(())
        for behind in self.readers:
            behind.tick()

    def advance_readers(self) -> None:
        """Have everybody who is behind get on."""
        for behind in list(self.readers):
            if behind.advance():
                self.notify_position(behind.position)

    def notify_position(self, position: BrokerSubscription) -> None:
        """A position has something new."""
        if isinstance(position, Group):
            for member in position.distribute_messages():
                self._mark_ready(member.outbox)
        elif position.is_connected:
            position.outbox.wake(position)
            self._mark_ready(position.outbox)

    def split_range(self, spilled_range: SpilledRange) -> list[FrameBatch]:
        """The messages of a stretch."""
        buffer = bytearray().join([spilled_range.frames, bytes(SPARE_BYTES)])
        return self.frame_reader.split_frames(
            buffer, 0, len(spilled_range.frames), spilled_range.message_count
        )


def _split_by_need(window: AckWindow, first: int, last: int) -> list[tuple[int, int, bool]]:
    """Messages first..last-1 in ranges, and whether each is still needed."""
    pieces: list[tuple[int, int, bool]] = []
    sent = min(last, window.cursor)
    ranges = window.unacked(first, sent)
    if sent < last:
        begin = max(first, sent)
        if ranges and ranges[-1][1] == begin:
            begin = ranges.pop()[0]
        ranges.append((begin, last))
    for begin, end in ranges:
        if first < begin:
            pieces.append((first, begin, False))
        pieces.append((begin, end, True))
        first = end
    if first < last:
        pieces.append((first, last, False))
    return pieces


def _empty_messages(class_id: int, count: int) -> FrameBatch:
    """So many empty messages."""
    frame = np.frombuffer(frames.encode(frames.MESSAGE, class_id=class_id), np.uint8)
    bounds = np.arange(0, (count + 1) * frame.size, frame.size, dtype=np.int64)
    return FrameBatch(np.tile(frame, count), bounds, frame.size)


def _append_all(ring: Ring, batch: FrameBatch) -> None:
    """Append all of it. Raises MemoryError when it does not fit."""
    if ring.append(batch, 0) < batch.count:
        raise MemoryError
