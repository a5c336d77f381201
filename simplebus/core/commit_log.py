"""Commit log: changes that wait to be written to the journal, in order.

The broker appends messages and other changes here. A writer pops them as numbered write batches and
reports the batches that are durable. `log_position` is the number of the batch that contains the
newest change.

    append, append, append     in batch 9, which is not popped yet
    batch 6 │ batch 7 │ batch 8    popped, being written
    durable_position ─┘        batches up to 6 have the required durability

With remote storage (`is_remote`) every class is written separately, so a class becomes durable
independently of the others. Only messages are stored remotely, so nothing waits for other changes.

Invariant: durable_position <= last_batch_number <= log_position <= last_batch_number + 1.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from simplebus.core.errors import Reason
from simplebus.core.limits import (
    CHANGES_PER_WRITE_BATCH,
    COMMIT_LOG_BYTES_MAX,
    PROGRESS_POSITIONS_PER_TURN,
    TIME_INDEX_STEP_SECONDS,
)
from simplebus.core.protocol.durability import Durability
from simplebus.core.protocol.events import FrameRefused
from simplebus.core.session.session import Session


@dataclass(slots=True)
class JournalEntry:
    """Consecutive messages of one class, with copies of their frames.

    The frames are as their publishers sent them, so their message ids are the message numbers of
    the publishers.
    """

    class_id: int
    first_sequence: int
    accepted_at: float
    """Time of acceptance of the first message, exact to TIME_INDEX_STEP_SECONDS for all of them."""
    message_count: int = 0
    frames: list[bytes] = field(default_factory=list)
    """Pieces of whole frames, back to back."""
    producer_runs: list[tuple[int, str]] = field(default_factory=list)
    """Runs of messages of one publisher: message count and producer key. The key is empty for
    messages without a message number."""
    has_dead_letters: bool = False
    """True if the broker itself stored some of the messages."""

    def append_frames(self, count: int, frames: bytes, producer: str) -> None:
        self.message_count += count
        self.frames.append(frames)
        if self.producer_runs and self.producer_runs[-1][1] == producer:
            count += self.producer_runs.pop()[0]
        self.producer_runs.append((count, producer))


@dataclass(slots=True)
class WriteBatch:
    """Entries that are written to disk together."""

    number: int
    entries: list[JournalEntry]
    changes: bytes = b""
    """Encoded `StateChanges`; empty if only messages were appended."""
    snapshot: bytes = b""
    """Encoded complete state, which replaces all earlier changes; empty if not due."""
    numbers_batch: int = 0
    """Write batch up to which the snapshot contains the numbers of all publishers."""


@dataclass(slots=True)
class _PendingWrite:
    """Messages of one class in one write batch that is not durable yet."""

    batch_number: int
    first_sequence: int
    size_bytes: int = 0


class CommitLog:
    """Changes of one broker that are not written yet, and the position that is durable."""

    def __init__(
        self, durability: Durability = Durability.DISK, *, is_remote: bool = False
    ) -> None:
        """Create an empty log.

        Args:
            durability: The durability that a confirm promises.
            is_remote: True if batches are stored by other servers, per class.
        """
        self.durability = durability
        """Durability that a confirm promises."""
        self.is_remote = is_remote
        self.requires_durability = is_remote or durability is not Durability.MEMORY
        """True if confirms wait for the writer. With durability `memory` they do not."""
        self.boot_id = ""
        """Id of this boot of the machine; empty if unknown."""
        self.last_batch_number = 0
        """Number of the newest batch that was popped."""
        self.durable_position = 0
        """Batches up to this number have the required durability."""
        self.write_error: tuple[Reason, str] | None = None
        """Reason and description of the current write failure; None while writing works."""
        self.changed_class_ids: dict[int, None] = {}
        """Classes with a change that must be in the next batch, because messages depend on it."""
        self.changed_durables: dict[int, dict[tuple[str, str], None]] = {}
        """Durables created or removed since the last batch, by class: (durable, group)."""
        self.unwritten_bytes = 0
        """Frame bytes that are not durable yet."""
        self.paused_sessions: dict[Session, None] = {}
        """Version 1 sessions whose reads are paused because the log is backlogged."""
        self._next_batch_bytes = 0
        self._pending_writes: dict[int, deque[_PendingWrite]] = {}
        """Batches that are not durable, oldest first, by class."""
        self._entries: list[JournalEntry] = []
        self._open_entries: dict[int, JournalEntry] = {}
        """The entry of each class that can still grow."""
        self._refusals: list[tuple[str, FrameRefused]] = []
        self._producer_starts: list[tuple[str, int, str]] = []
        self._purged_ranges: list[tuple[int, int, int]] = []
        self._progress_batch = 0
        """Write batch up to which each batch records requested progress."""

    @property
    def is_empty(self) -> bool:
        """True if nothing was appended since the last batch was popped."""
        return not (
            self._entries
            or self._refusals
            or self._producer_starts
            or self._purged_ranges
            or self.changed_class_ids
            or self.changed_durables
            or self.is_progress_requested
        )

    @property
    def has_many_changes(self) -> bool:
        """True if the next batch will contain many changes of classes, durables and producers."""
        change_count = len(self.changed_class_ids) + len(self._producer_starts)
        change_count += sum(map(len, self.changed_durables.values()))
        return change_count >= CHANGES_PER_WRITE_BATCH

    @property
    def next_batch_bytes(self) -> int:
        """Frame bytes appended since the last batch was popped."""
        return self._next_batch_bytes

    @property
    def log_position(self) -> int:
        """Number of the batch that contains the newest change."""
        return self.last_batch_number if self.is_empty else self.last_batch_number + 1

    @property
    def must_defer_confirms(self) -> bool:
        """True if the newest change does not have the durability that a confirm promises."""
        must_wait = self.requires_durability or self.is_backlogged
        return must_wait and self.durable_position < self.log_position

    @property
    def is_backlogged(self) -> bool:
        """True if publishers must pause: writing fails, or too many bytes are unwritten."""
        return self.write_error is not None or self.unwritten_bytes > COMMIT_LOG_BYTES_MAX

    @property
    def unwritten_class_ids(self) -> list[int]:
        """Classes with messages that are not written."""
        return list(self._pending_writes)

    def has_unwritten(self, class_id: int) -> bool:
        """Return True if messages or durables of a class are not written."""
        return class_id in self._pending_writes or class_id in self.changed_durables

    def is_durable(self, position: int) -> bool:
        """Return True if changes up to log position `position` have the required durability."""
        return not self.requires_durability or self.durable_position >= position

    def durable_head(self, class_id: int, head: int) -> int:
        """Return the first sequence of a class that is not durable, or `head` if all are."""
        pending = self._pending_writes.get(class_id)
        if not self.requires_durability or not pending:
            return head
        return pending[0].first_sequence

    def written_head(self, class_id: int, head: int) -> int:
        """Return the first sequence of a class that cannot be read back from disk, or `head`.

        Unlike `durable_head`, this does not depend on the required durability.
        """
        pending = self._pending_writes.get(class_id)
        return pending[0].first_sequence if pending else head

    def is_producer_durable(self, position: int, remote_positions: dict[int, int]) -> bool:
        """Return True if the messages of a producer up to `position` are durable.

        Args:
            position: Log position of the newest message of the producer.
            remote_positions: With remote storage, the newest log position of the producer by class.
                Classes without pending messages of the producer are removed.
        """
        if position <= self.durable_position:
            return True
        for class_id, last in list(remote_positions.items()) if self.is_remote else ():
            pending = self._pending_writes.get(class_id)
            if not pending or pending[0].batch_number > last:
                del remote_positions[class_id]
            elif pending[0].batch_number <= position:
                return False
        return self.is_remote

    def append_messages(
        self,
        class_id: int,
        first: int,
        count: int,
        frames: bytes,
        producer: str,
        now: float,
        *,
        is_dead: bool = False,
    ) -> None:
        """Append the stored messages first..first+count-1 of a class.

        `is_dead` is True for dead letters.
        """
        entry = self._open_entries.get(class_id)
        if entry is None or not 0 <= now - entry.accepted_at < TIME_INDEX_STEP_SECONDS:
            entry = self._open_entries[class_id] = JournalEntry(class_id, first, now)
            self._entries.append(entry)
            pending = self._pending_writes.setdefault(class_id, deque())
            if not pending or pending[-1].batch_number <= self.last_batch_number:
                pending.append(_PendingWrite(self.last_batch_number + 1, first))
        expected = entry.first_sequence + entry.message_count
        assert expected == first, (expected, first)
        entry.append_frames(count, frames, producer)
        entry.has_dead_letters |= is_dead
        self._pending_writes[class_id][-1].size_bytes += len(frames)
        self._next_batch_bytes += len(frames)
        self.unwritten_bytes += len(frames)

    def append_refusal(self, producer: str, refused: FrameRefused) -> None:
        """Append a refusal of numbered messages, whose numbers count as used."""
        if self._refusals and self._refusals[-1][0] == producer:
            joined = self._refusals[-1][1].merge(refused)
            if joined is not None:
                self._refusals[-1] = producer, joined
                return
        self._refusals.append((producer, refused))

    def append_producer_start(self, producer: str, next_number: int, instance: str) -> None:
        """Append a producer start: `instance` uses the name and continues at `next_number`."""
        self._producer_starts.append((producer, next_number, instance))

    def append_purge(self, class_id: int, first: int, last: int) -> None:
        """Append a purge of the messages first..last-1 of a class."""
        self._purged_ranges.append((class_id, first, last))

    def append_progress_request(self, position_count: int) -> int:
        """Have the next batches record the progress of all positions, in portions.

        Args:
            position_count: Number of positions with progress that is not recorded.

        Returns:
            The log position of the last portion.
        """
        batch_count = max(1, -(-position_count // PROGRESS_POSITIONS_PER_TURN))
        last_batch = self.last_batch_number + batch_count
        self._progress_batch = max(self._progress_batch, last_batch)
        return last_batch

    @property
    def is_progress_requested(self) -> bool:
        """True if the next batch must record the next portion of the progress of all positions."""
        return self.last_batch_number < self._progress_batch

    def discard_changes(self) -> None:
        """Remove all changes except messages, for a store that keeps only messages."""
        self._refusals.clear()
        self._producer_starts.clear()
        self._purged_ranges.clear()
        self._progress_batch = 0
        self.changed_class_ids.clear()
        self.changed_durables.clear()

    def pop_purged_ranges(self) -> list[tuple[int, int, int]]:
        """Remove and return the purged ranges: (class id, first, last exclusive)."""
        ranges, self._purged_ranges = self._purged_ranges, []
        return ranges

    def append_durable_change(self, class_id: int, durable: str, group: str) -> int:
        """Append the creation or removal of a durable. Returns the log position of the change."""
        if self.is_remote:
            return 0
        self.changed_durables.setdefault(class_id, {})[durable, group] = None
        return self.log_position

    def pop_refusals(self) -> list[tuple[str, FrameRefused]]:
        """Remove and return the refusals: (producer key, refusal)."""
        refusals, self._refusals = self._refusals, []
        return refusals

    def pop_producer_starts(self) -> list[tuple[str, int, str]]:
        """Remove and return the producer starts: (producer key, next number, instance)."""
        starts, self._producer_starts = self._producer_starts, []
        return starts

    def pop_write_batch(
        self,
        changes: bytes = b"",
        snapshot: bytes = b"",
        *,
        numbers_batch: int = 0,
        allow_empty: bool = False,
    ) -> WriteBatch | None:
        """Remove the appended messages and return them as the next write batch.

        Args:
            changes: Encoded state changes to write with the messages.
            snapshot: Encoded complete state to write instead of changes.
            numbers_batch: Write batch up to which `snapshot` contains the numbers of all
                publishers.
            allow_empty: Return a batch even if nothing is left to write, because its number was
                already returned as a log position.

        Returns:
            The batch, or None if there is nothing to write.
        """
        if self.is_empty and not (changes or snapshot or allow_empty):
            return None
        self.last_batch_number += 1
        batch = WriteBatch(self.last_batch_number, self._entries, changes, snapshot, numbers_batch)
        self._entries, self._next_batch_bytes = [], 0
        self._open_entries.clear()
        return batch

    def mark_durable(self, batch_number: int, *, has_space: bool = True) -> None:
        """Record that batches up to `batch_number` are durable.

        Clears the write error if there is disk space. Reports may arrive out of order.
        """
        self.durable_position = max(self.durable_position, batch_number)
        if has_space:
            self.write_error = None
        for class_id in list(self._pending_writes):
            self.mark_class_durable(class_id, batch_number)

    def mark_class_durable(self, class_id: int, batch_number: int) -> None:
        """Record that the messages of one class in batches up to `batch_number` are durable."""
        pending = self._pending_writes.get(class_id)
        while pending and pending[0].batch_number <= batch_number:
            self.unwritten_bytes -= pending.popleft().size_bytes
        if pending is not None and not pending:
            del self._pending_writes[class_id]


def log_stored_messages(
    commit_log: CommitLog,
    session: Session | None,
    class_id: int,
    first: int,
    count: int,
    frames: bytes,
    now: float,
) -> None:
    """Append stored messages to the commit log.

    Args:
        commit_log: The commit log.
        session: Session that published them; None for messages of the broker, such as dead letters.
        class_id: Class of the messages.
        first: Sequence of the first message.
        count: Number of messages.
        frames: Frames of the messages.
        now: Time in seconds since 1970.
    """
    if session is None:
        commit_log.append_messages(class_id, first, count, frames, "", now, is_dead=True)
        return
    commit_log.append_messages(class_id, first, count, frames, session.producer_key, now)
    log_position = commit_log.log_position
    session.record_log_position(log_position)
    if commit_log.is_remote and session.producer is not None:
        session.producer.remote_positions[class_id] = log_position
    if commit_log.is_backlogged and not session.has_confirms:
        session.pause_for_journal()
        commit_log.paused_sessions[session] = None


def publish_error(commit_log: CommitLog, session: Session) -> tuple[Reason, str] | None:
    """Return why messages of a version 2 session cannot be stored now, or None if they can."""
    return commit_log.write_error if session.has_confirms else None
