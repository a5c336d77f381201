"""Classes larger than memory: all messages are on disk, and only the newest ones in the ring.

A message is evicted from the ring only after it is on disk. A position that needs evicted messages
reads from a private ring, with the same sequences, which a `SpillReader` fills from disk. There, an
empty message stands for each message that was acknowledged out of order. Other positions are not
affected. This module requests reads; the driver executes them and returns the results.

    disk             first ────────────────────────────────────── written
    reader's ring      floor ── cursor ── read ┄┄►
    class's ring                                    floor ─────────────── head

first <= ring.floor <= written. A position returns to the class's ring when its floor has reached
the ring's floor.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from simplebus.core.commit_log import CommitLog
from simplebus.core.errors import Reason
from simplebus.core.limits import (
    MESSAGES_MAX,
    RECEIVE_PADDING_BYTES,
    SPILL_EVICTION_DIVISOR,
    SPILL_READ_BYTES,
    SPILL_SIZE_STEPS_MAX,
)
from simplebus.core.message_class.stored_frames import StoredFrameReader
from simplebus.core.protocol import frames
from simplebus.core.protocol.frames import FrameBatch
from simplebus.core.ring.memory_budget import MemoryBudget
from simplebus.core.ring.ring import Ring
from simplebus.core.subscription.channel_filter import ChannelTable

if TYPE_CHECKING:
    from simplebus.core.clock import BrokerClock
    from simplebus.core.redelivery.ack_window import AckWindow
    from simplebus.core.subscription.position import Position


class SpillingClass(Protocol):
    """Parts of a `MessageClass` that spilling uses."""

    class_id: int
    ring: Ring
    channels: ChannelTable
    spill: ClassSpill | None
    positions: dict[Position, None]

    @property
    def label(self) -> str:
        """See `MessageClass.label`."""

    def enqueue_position(self, position: Position) -> None:
        """See `MessageClass.enqueue_position`."""


class SpilledRange(NamedTuple):
    """Messages `first` to `first + message_count - 1`, read from disk."""

    first: int
    message_count: int
    accepted_time: float
    """Time when they were accepted."""
    frames: bytes
    """Stored frames; empty if the messages are damaged."""


@dataclass(frozen=True, slots=True, eq=False)
class SpillRead:
    """Request to read messages `first` to `last - 1`, up to about `bytes_max` but at least one."""

    class_id: int
    class_name: str
    """See `MessageClass.label`."""
    first: int
    last: int
    bytes_max: int
    on_read: Callable[[Sequence[SpilledRange]], None]
    """Called with the ranges found, without gaps; with none if the read must be repeated."""


class ClassSpill:
    """Spill state of one class."""

    def __init__(self, cls: SpillingClass, spill_manager: SpillManager) -> None:
        self._cls = cls
        self._spill_manager = spill_manager
        self.first_sequence = cls.ring.floor
        """Lowest stored sequence, in memory or on disk."""
        self.bytes_max = 0
        """Limit on the bytes of spilled frames; 0 for no limit."""
        self.readers: dict[Position, SpillReader] = {}
        self._index_sequences: list[int] = []
        """Index of the evictions: the end sequence of each, ascending."""
        self._index_bytes: list[int] = []
        """The total bytes evicted up to each end sequence."""

    @property
    def message_count(self) -> int:
        """Messages that are only on disk."""
        return self._cls.ring.floor - self.first_sequence

    @property
    def frame_bytes(self) -> int:
        """Approximate bytes of the frames that are only on disk."""
        if not self._index_bytes or not self.message_count:
            return 0
        return self._index_bytes[-1] - self._bytes_before(self.first_sequence)

    def _bytes_before(self, sequence: int) -> int:
        index = bisect_right(self._index_sequences, sequence)
        return self._index_bytes[index - 1] if index else 0

    def sequence_after(self, size_bytes: int) -> int:
        """Return a sequence that has about `size_bytes` of spilled frames before it."""
        index = bisect_right(
            self._index_bytes, self._bytes_before(self.first_sequence) + size_bytes
        )
        return self._index_sequences[index - 1] if index else self.first_sequence

    def record_spilled(self, end_sequence: int, size_bytes: int) -> None:
        """Record an eviction of `size_bytes` that ended at `end_sequence`."""
        if not self._index_sequences:
            self._index_sequences, self._index_bytes = [self.first_sequence], [0]
        self._index_sequences.append(end_sequence)
        self._index_bytes.append(self._index_bytes[-1] + size_bytes)
        if len(self._index_sequences) > SPILL_SIZE_STEPS_MAX:
            self._index_sequences, self._index_bytes = (
                self._index_sequences[::2],
                self._index_bytes[::2],
            )

    def evict_spilled(self, size_bytes: int) -> bool:
        """Evict at least `size_bytes` of written messages from the ring.

        Positions that need these messages get a reader first.

        Returns:
            False if nothing was evicted.
        """
        cls, ring = self._cls, self._cls.ring
        if not len(ring) or (self.bytes_max and self.frame_bytes >= self.bytes_max):
            return False
        end = ring.sequence_after_bytes(max(size_bytes, ring.frame_bytes // SPILL_EVICTION_DIVISOR))
        if len(ring) >= ring.messages_max:
            end = max(end, ring.floor + max(1, len(ring) // SPILL_EVICTION_DIVISOR))
        end = min(end, self._spill_manager.commit_log.written_head(cls.class_id, ring.head))
        if end <= ring.floor:
            return False
        for position in list(cls.positions):
            if position.window.floor < end and position not in self.readers:
                reader = SpillReader(cls, position, self._spill_manager)
                if not reader.start():
                    return False
                self._add_reader(reader)
        self.record_spilled(end, ring.range_bytes(ring.floor, end))
        ring.release(end)
        return True

    def add_position(self, position: Position) -> None:
        """Add a reader for a new position if it needs evicted messages."""
        if position.window.floor < self._cls.ring.floor:
            reader = SpillReader(self._cls, position, self._spill_manager)
            reader.suspend()
            self._add_reader(reader)

    def remove_position(self, position: Position) -> None:
        """Remove the reader of a position that was removed or has caught up."""
        reader = self.readers.pop(position, None)
        if reader is not None:
            del self._spill_manager.readers[reader]
            reader.close()

    def _add_reader(self, reader: SpillReader) -> None:
        self.readers[reader.position] = reader
        self._spill_manager.readers[reader] = None

    def release_below(self, floor: int) -> None:
        """Forget messages below `floor`. The ring must have released them before."""
        self.first_sequence = min(max(self.first_sequence, floor), self._cls.ring.floor)
        index = bisect_right(self._index_sequences, self.first_sequence) - 1
        if index > 0:
            del self._index_sequences[:index], self._index_bytes[:index]


class SpillReader:
    """Reads spilled messages of one position into a private ring."""

    def __init__(self, cls: SpillingClass, position: Position, spill_manager: SpillManager) -> None:
        self.position = position
        self.cls = cls
        self._spill_manager = spill_manager
        self._ring = self._create_ring()
        self._is_suspended = False
        """True if the position has no consumer and the ring is empty."""
        self._pending_read: SpillRead | None = None
        self._out_of_memory_state: tuple[int, int] | None = None
        """The window's floor and in-flight count when memory ran out. A change resumes reading."""
        self._compacted_bytes = 0

    def _create_ring(self) -> Ring:
        ring = Ring(
            class_id=self.cls.class_id,
            messages_max=MESSAGES_MAX,
            bytes_max=self._spill_manager.budget.limit_bytes,
            budget=self._spill_manager.budget,
        )
        ring.set_next_sequence(self.position.window.floor)
        return ring

    def start(self) -> bool:
        """Copy the delivered messages of the position from the class's ring.

        Returns:
            False if there is not enough memory; nothing has changed then.
        """
        position = self.position
        if not position.has_consumer and not position.unacked.has_held_messages:
            self.suspend()
            return True
        window = position.window
        if not self._copy_messages(position.ring, self._ring, window, window.cursor):
            self._ring.free()
            return False
        self._replace_ring(self._ring)
        return True

    def _replace_ring(self, ring: Ring) -> None:
        self.cls.channels.borrowing_counts.pop(self._ring.channel_counts, None)
        self._ring = ring
        self.cls.channels.borrowing_counts[ring.channel_counts] = None
        self.position.switch_ring(ring)

    def suspend(self) -> None:
        """Free the memory of a position without a consumer."""
        self._is_suspended = True
        self._pending_read = self._out_of_memory_state = None
        self._compacted_bytes = 0
        former_ring = self._ring
        self._replace_ring(self._create_ring())
        former_ring.free()

    def close(self) -> None:
        """Free the ring."""
        self._pending_read = None
        self.cls.channels.borrowing_counts.pop(self._ring.channel_counts, None)
        self._ring.free()

    def tick(self) -> None:
        """Allow another attempt to allocate memory."""
        self._out_of_memory_state = None
        self._ring.tick()

    def advance(self) -> bool:
        """Request the next read, copy from the class's ring, or return the position to that ring.

        Returns:
            True if the position may have new messages.
        """
        position, ring, main = self.position, self._ring, self.cls.ring
        window = position.window
        if window.floor >= main.floor:
            position.switch_ring(main)
            position.unacked.requeue_spilled()
            self._class_spill.remove_position(position)
            return True
        if not position.has_consumer and (
            self._is_suspended or not position.unacked.has_held_messages
        ):
            if not self._is_suspended:
                self.suspend()
            return False
        self._is_suspended = False
        if ring.head < window.floor:  # The position has skipped messages that are not read yet.
            ring.free()
            ring.set_next_sequence(window.floor)
            self._pending_read = None
        ring.release(min(window.floor, ring.head))
        if self._pending_read is not None:
            return False
        cursor = max(window.cursor, ring.floor)
        if cursor < ring.head and ring.range_bytes(cursor, ring.head) >= SPILL_READ_BYTES:
            return False
        if self._out_of_memory_state == (window.floor, window.in_flight_count):
            return False
        self._out_of_memory_state = None
        self._compact_ring()
        if ring.head >= main.floor:
            return self._copy_from_class_ring(main)
        last = min(
            main.floor, self._spill_manager.commit_log.written_head(ring.class_id, main.floor)
        )
        self._pending_read = SpillRead(
            ring.class_id, self.cls.label, ring.head, last, SPILL_READ_BYTES, self._on_read
        )
        self._spill_manager.request_read(self._pending_read)
        return False

    @property
    def _class_spill(self) -> ClassSpill:
        assert self.cls.spill is not None
        return self.cls.spill

    def _copy_from_class_ring(self, class_ring: Ring) -> bool:
        """Copy the next messages from the class's ring. Returns True if there were any."""
        ring, window = self._ring, self.position.window
        previous_head = ring.head
        if previous_head >= class_ring.head:
            return False
        last = class_ring.view_batch(previous_head, class_ring.head, SPILL_READ_BYTES)[1]
        if not self._copy_messages(class_ring, ring, window, last):
            self._out_of_memory_state = (window.floor, window.in_flight_count)
        return self._requeue_if_grown(previous_head)

    def _requeue_if_grown(self, previous_head: int) -> bool:
        if self._ring.head > previous_head:
            self.position.unacked.requeue_spilled()
            return True
        return False

    def _on_read(self, spilled_ranges: Sequence[SpilledRange]) -> None:
        if self._pending_read is None or self._is_suspended:
            return
        self._pending_read = None
        previous_head = self._ring.head
        try:
            for spilled_range in spilled_ranges:
                if not self._append_range(spilled_range):
                    break
        except MemoryError:
            window = self.position.window
            self._out_of_memory_state = (window.floor, window.in_flight_count)
        if self._requeue_if_grown(previous_head):
            self._spill_manager.notify_position(self.cls, self.position)

    def _append_range(self, spilled_range: SpilledRange) -> bool:
        """Append a range to the ring.

        Returns:
            False if the range does not continue the ring.

        Raises:
            MemoryError: The range does not fit.
        """
        ring, window = self._ring, self.position.window
        last = spilled_range.first + spilled_range.message_count
        # The clock may have been set back since the message was accepted.
        accepted_time = min(spilled_range.accepted_time, self._spill_manager.clock.now)
        if last <= ring.head:
            return True
        if spilled_range.first > ring.head:
            return False
        batch_first = spilled_range.first
        try:
            for batch in self._spill_manager.split_range(spilled_range):
                skipped_count = min(batch.count, max(0, ring.head - batch_first))
                batch_first += batch.count
                if skipped_count < batch.count:
                    self._append_batch(
                        batch.slice(skipped_count, batch.count), accepted_time, window
                    )
        except ValueError:  # The stored frames are damaged; another read returns the same bytes.
            first = ring.head
            _append_whole_batch(ring, empty_messages(ring.class_id, last - first))
            self.position.skip_unavailable(first, last, Reason.DAMAGED)
        return True

    def _append_batch(self, batch: FrameBatch, accepted_time: float, window: AckWindow) -> None:
        ring = self._ring
        for run, rows in self._spill_manager.frame_reader.iter_runs(
            self.cls.channels, batch, accepted_time
        ):
            first = ring.head
            for begin, end, is_needed in _split_by_ack_state(window, first, first + run.count):
                if is_needed:
                    needed_rows = None if rows is None else rows.slice(begin - first, end - first)
                    needed = run.slice(begin - first, end - first)
                    if ring.append(needed, 0, needed_rows) < needed.count:
                        raise MemoryError
                else:
                    _append_whole_batch(ring, empty_messages(ring.class_id, end - begin))

    def _copy_messages(
        self, source: Ring, target: Ring, window: AckWindow, end_sequence: int
    ) -> bool:
        """Append the source's messages from the target's head to `end_sequence` to the target.

        Returns:
            False if there is not enough memory.
        """
        try:
            for begin, end, is_needed in _split_by_ack_state(window, target.head, end_sequence):
                if not is_needed:
                    _append_whole_batch(target, empty_messages(target.class_id, end - begin))
                while is_needed and begin < end:
                    batch, batch_end = source.view_batch(begin, end, SPILL_READ_BYTES)
                    rows = (
                        source.read_rows(begin, batch_end) if begin < source.special_until else None
                    )
                    if target.append(batch, 0, rows) < batch.count:
                        return False
                    begin = batch_end
        except MemoryError:
            return False
        return True

    def _compact_ring(self) -> None:
        """Free messages that were acknowledged out of order, if they use much of the memory."""
        ring, window = self._ring, self.position.window
        delivered_bytes = ring.range_bytes(ring.floor, min(window.cursor, ring.head))
        if delivered_bytes < max(4 * SPILL_READ_BYTES, 2 * self._compacted_bytes):
            return
        if 2 * window.in_flight_count > window.cursor - window.floor:
            return  # Most messages are still needed.
        compacted = self._create_ring()
        if self._copy_messages(ring, compacted, window, ring.head):
            self._compacted_bytes = compacted.range_bytes(
                compacted.floor, min(window.cursor, compacted.head)
            )
            self._replace_ring(compacted)
            ring.free()
        else:
            compacted.free()


class SpillManager:
    """Readers and read requests of all classes of a broker with a journal."""

    def __init__(
        self,
        clock: BrokerClock,
        commit_log: CommitLog,
        budget: MemoryBudget,
    ) -> None:
        self.commit_log = commit_log
        self.clock = clock
        self.budget = budget
        """Memory of the rings of all readers."""
        self.frame_reader = StoredFrameReader()
        self.readers: dict[SpillReader, None] = {}
        self._queued_reads: list[SpillRead] = []
        self._failed_reads: list[SpillRead] = []
        """Failed reads, which are repeated after the next tick."""

    def request_read(self, spill_read: SpillRead) -> None:
        """Queue a read request."""
        self._queued_reads.append(spill_read)

    def drain_reads(self) -> list[SpillRead]:
        """Return the queued requests. `complete_read` or `fail_read` must follow for each."""
        reads, self._queued_reads = self._queued_reads, []
        return reads

    def complete_read(self, spill_read: SpillRead, spilled_ranges: Sequence[SpilledRange]) -> None:
        """Deliver the result of a read."""
        spill_read.on_read(spilled_ranges)

    def fail_read(self, spill_read: SpillRead) -> None:
        """Record that a read failed."""
        self._failed_reads.append(spill_read)

    def tick(self) -> None:
        """Allow failed reads and allocations to be repeated."""
        failed_reads, self._failed_reads = self._failed_reads, []
        for read in failed_reads:
            read.on_read(())
        for reader in self.readers:
            reader.tick()

    def advance_readers(self) -> None:
        """Advance all readers and queue the positions that have new messages."""
        for reader in list(self.readers):
            if reader.advance():
                self.notify_position(reader.cls, reader.position)

    def notify_position(self, cls: SpillingClass, position: Position) -> None:
        """Queue a position with new messages for sending."""
        cls.enqueue_position(position)

    def split_range(self, spilled_range: SpilledRange) -> list[FrameBatch]:
        """Return the messages of a range."""
        buffer = bytearray().join([spilled_range.frames, bytes(RECEIVE_PADDING_BYTES)])
        return self.frame_reader.split_frames(
            buffer, 0, len(spilled_range.frames), spilled_range.message_count
        )


def _split_by_ack_state(window: AckWindow, first: int, last: int) -> list[tuple[int, int, bool]]:
    """Split messages `first` to `last - 1` into (begin, end, is needed).

    Acknowledged messages are not needed.
    """
    parts: list[tuple[int, int, bool]] = []
    sent_end = min(last, window.cursor)
    needed_ranges = window.unacked_ranges(first, sent_end)
    if sent_end < last:
        begin = max(first, sent_end)
        if needed_ranges and needed_ranges[-1][1] == begin:
            begin = needed_ranges.pop()[0]
        needed_ranges.append((begin, last))
    for begin, end in needed_ranges:
        if first < begin:
            parts.append((first, begin, False))
        parts.append((begin, end, True))
        first = end
    if first < last:
        parts.append((first, last, False))
    return parts


def empty_messages(class_id: int, count: int) -> FrameBatch:
    """Return messages without a payload."""
    frame = np.frombuffer(frames.encode(frames.MESSAGE, class_id=class_id), np.uint8)
    bounds = np.arange(0, (count + 1) * frame.size, frame.size, dtype=np.int64)
    return FrameBatch(np.tile(frame, count), bounds, frame.size)


def _append_whole_batch(ring: Ring, batch: FrameBatch) -> None:
    """Append all messages of a batch. Raises MemoryError if they do not fit."""
    if ring.append(batch, 0) < batch.count:
        raise MemoryError
