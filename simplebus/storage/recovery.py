"""Rebuilds a broker from the files of a journal. `server.journal.pump.load` is the caller.

Messages that no position needs are read only for the message numbers of their publishers and the
ids of the latest messages. Only `finish_recovery` changes files.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from simplebus.core.broker.broker import Broker
from simplebus.core.errors import Reason, RemoteProtocolError
from simplebus.core.limits import DUPLICATE_WINDOW_SECONDS, RECEIVE_PADDING_BYTES
from simplebus.core.message_class.message_class import MessageClass
from simplebus.core.message_class.spill import ClassSpill
from simplebus.core.protocol.frames import FrameBatch
from simplebus.core.restore import (
    BrokerRestorer,
    NumberTrust,
    RestoreError,
    StoredNumbers,
    choose_number_trust,
    collect_producer_numbers,
)
from simplebus.core.snapshot import (
    ClassSnapshot,
    ProducerSnapshot,
    RecoveredState,
    RemovedClass,
)
from simplebus.core.store.message_ids import iter_message_ids
from simplebus.storage.append_file import sync_directory, sync_file
from simplebus.storage.directory import JournalDirectory
from simplebus.storage.errors import JournalError
from simplebus.storage.file_names import (
    CLASSES,
    STATE,
    class_id_of,
    file_name,
    folder_name,
)
from simplebus.storage.records import Record, decode_producer_runs, is_intact
from simplebus.storage.repair import apply_server_repairs
from simplebus.storage.segments import (
    OTHER_PUBLISHERS,
    FileBuffer,
    Gap,
    RecoveryResult,
    SegmentChain,
    numbers,
    read_state,
    report_missing_state,
    stored_batches,
)

# Records are processed in groups of this size.
_GROUP_BYTES = 1024 * 1024
# Upper limit of the write batches of which a power failure left no trace.
_UNSEEN_BATCHES = 1 << 40


def recover(directory: JournalDirectory, broker: Broker) -> RecoveryResult:
    """Fill a new broker with the contents of a journal. Raises JournalError."""
    assert broker.commit_log is not None
    broker.commit_log.boot_id = directory.boot
    found = RecoveryResult()
    files = FileBuffer()
    state, first_new_batches = read_state(
        directory.path / STATE, files, found, salt=directory.salt, boot_id=directory.boot
    )
    loader = _JournalLoader(
        broker, directory.path, files, found, state, first_new_batches, directory.salt
    )
    try:
        loader.read_classes()
        loader.finish()
        report_missing_state(directory.path / STATE, state, found)
        if loader.number_trust is NumberTrust.UNTIL_CONTRADICTED and (
            found.last_batch_number or found.ignored_files
        ):
            # Batches that reappear later must be distinguishable from new ones.
            found.last_batch_number += _UNSEEN_BATCHES
    except (RestoreError, RemoteProtocolError) as error:
        sentence = error.sentence if isinstance(error, RemoteProtocolError) else str(error)
        raise JournalError(f"cannot recover {directory.path}: {sentence}") from None
    except (LookupError, ValueError, OverflowError) as error:
        # Records with right checksums, but values that no server has written.
        raise JournalError(
            f"cannot recover {directory.path}: the state contradicts itself ({error!r}); expected "
            "the files of one journal; restore a backup, or move the directory away"
        ) from error
    return found


class _RecordGroup:
    """Consecutive records of a class that are decoded together."""

    def __init__(self) -> None:
        self.records: list[Record] = []
        self.publishers: list[tuple[int, int, str]] = []
        """Runs of messages of one publisher: batch number, message count and name."""
        self.size = 0
        """Bytes of frames."""
        self._pieces: list[bytes | memoryview] = []

    def add(self, data: memoryview, record: Record) -> None:
        """Add a record. Its bytes are copied."""
        self.records.append(record)
        self.publishers += [
            (record.batch_number, count, name) for count, name in decode_producer_runs(data, record)
        ]
        self.size += record.body_bytes
        self._pieces.append(bytes(data[record.body_offset : record.end]))

    def joined(self) -> tuple[bytearray, int]:
        """Return the frames, padded by RECEIVE_PADDING_BYTES, and their size without padding."""
        return bytearray().join([*self._pieces, bytes(RECEIVE_PADDING_BYTES)]), self.size

    def clear(self) -> None:
        self.records, self.publishers, self._pieces, self.size = [], [], [], 0


class _JournalLoader:
    """Loads the classes of one journal into one broker."""

    def __init__(
        self,
        broker: Broker,
        directory: Path,
        files: FileBuffer,
        found: RecoveryResult,
        state: RecoveredState,
        first_new_batches: dict[str, int],
        salt: int,
    ) -> None:
        self._files = files
        self._found = found
        self._state = state
        self._first_new_batches = first_new_batches
        """First write batch with new message numbers, by publisher name; see `read_state`."""
        self._numbers: dict[str, StoredNumbers] = {}
        """Message numbers of publishers, as found in records."""
        self._message_ids: list[tuple[int, bytes, int, float]] = []
        """Ids found in records: class id, id, sequence and time."""
        self._known_heads: dict[int, int] = {}
        """First message of each class that is newer than the state."""
        self._broker = broker
        assert broker.commit_log is not None
        commit_log = broker.commit_log
        self._salt = salt
        self._folder = directory / CLASSES
        self._stored = stored_batches(
            self._folder,
            found,
            state,
            first_new_batches,
            salt=salt,
            durability=commit_log.durability,
            boot_id=commit_log.boot_id,
        )
        self._gaps: list[tuple[int, Gap]] = []
        """Messages that cannot be read: class id and gap."""
        self.number_trust = choose_number_trust(state, commit_log.durability, commit_log.boot_id)
        self._share_bytes = 0
        """Memory available for each class."""
        self._restorer = BrokerRestorer(broker)

    def read_classes(self) -> None:
        folder = self._folder
        ids = {class_id_of(path.name) for path in folder.iterdir()} | set(self._state.classes)
        self._share_bytes = self._broker.budget.limit_bytes // (2 * max(1, len(ids)))
        for removed in self._state.removed_classes.values():
            self._read_removed_class(removed, folder / folder_name(removed.class_id))
        ids -= set(self._state.removed_classes)
        for class_id in sorted(id_ for id_ in ids if id_ is not None):
            snapshot = self._state.classes.get(class_id)
            cls = self._restorer.open_class(class_id, snapshot.name if snapshot else "")
            if snapshot and snapshot.keeps_last_values:
                self._broker.store.class_registry.enable_last_values(class_id)
            self._read_class(cls, folder / folder_name(class_id), snapshot)
            self._restorer.restore_backlog(cls, snapshot, self._known_heads.get(class_id))
            self._found.message_count += len(cls.ring)

    def _read_removed_class(self, removed: RemovedClass, folder: Path) -> None:
        """Restore the next sequence of a removed class.

        If later messages are stored, the class was created again, and the server ended before it
        recorded that. The class is restored then.
        """
        if not folder.is_dir() or not numbers(folder):
            self._broker.store.class_registry.add_removed_class(removed)
            return
        cls = self._restorer.open_class(removed.class_id, removed.name)
        snapshot = self._state.find_class(removed.class_id)
        self._read_class(cls, folder, snapshot)
        self._restorer.restore_backlog(cls, snapshot, self._known_heads.get(removed.class_id))
        self._found.message_count += len(cls.ring)
        self._restorer.finish_removed_class(cls, removed)

    def _read_class(self, cls: MessageClass, folder: Path, snapshot: ClassSnapshot | None) -> None:
        ring, floor = cls.ring, snapshot.floor if snapshot else 0
        segments = SegmentChain(
            folder,
            cls.class_id,
            self._files,
            self._found,
            salt=self._salt,
            stored=self._stored,
            snapshot=snapshot,
            class_name=cls.name,
        )
        if not segments.firsts:
            ring.set_next_sequence(floor)  # No messages are stored, but no sequence is reused.
            if cls.spill is not None:
                cls.spill.first_sequence = ring.floor
            segments.report_missing()
            self._count_lost(cls, segments.lost_count)
            return
        if cls.spill is not None:
            cls.spill.first_sequence = max(segments.firsts[0], floor)
            self._keep_on_disk(cls, cls.spill, segments)
        ring.set_next_sequence(segments.firsts[0])
        group, stored = _RecordGroup(), self._stored
        for data, record in segments.headers(segments.is_needed):
            is_needed = segments.is_needed(record)
            if self._may_have_new_ids(record) and (is_needed or is_intact(data, record)):
                self._collect_message_ids(data, record)  # Also of released messages.
            if not is_needed:
                continue
            is_after_state = stored.is_after_state(record)
            if is_after_state and cls.class_id not in self._known_heads:
                self._known_heads[cls.class_id] = record.first
                if cls.spill is not None:  # The state's floor may be that of lost messages.
                    cls.spill.first_sequence = min(cls.spill.first_sequence, record.first)
            if group.records and (
                group.size >= _GROUP_BYTES
                or record.first != group.records[-1].last
                or is_after_state != stored.is_after_state(group.records[0])
                or stored.has_new_numbers(record) != stored.has_new_numbers(group.records[0])
            ):
                self._append_group(cls, group, floor)
            group.add(data, record)
        if group.records:
            self._append_group(cls, group, floor)
        self._skip_to(cls, segments.head)
        self._gaps += [(cls.class_id, gap) for gap in segments.gaps]
        segments.report_missing()
        self._count_lost(cls, segments.lost_count)
        if cls.spill is not None:
            cls.spill.first_sequence = min(cls.spill.first_sequence, ring.floor)

    @staticmethod
    def _count_lost(cls: MessageClass, count: int) -> None:
        if count:
            cls.dropped_counts[Reason.DAMAGED] += count

    def _keep_on_disk(self, cls: MessageClass, spill: ClassSpill, segments: SegmentChain) -> None:
        """Do not load the first segments if they need not be in memory and contain no new state."""
        segments.ignore_outdated()  # Reading back later relies on the file names alone.
        starts = segments.starts()
        memory_bytes_max = min(cls.ring.bytes_max // 2, self._share_bytes)
        later_bytes = 0
        for at in range(len(starts) - 1, 0, -1):
            start, before = starts[at], starts[at - 1]
            later_bytes += start.size
            messages = segments.firsts[-1] - segments.firsts[at - 1]
            fits = (
                later_bytes + before.size <= memory_bytes_max
                and messages <= cls.ring.messages_max // 2
            )
            header = start.header
            # The first record of a later segment is newer than all earlier segments.
            if (
                fits
                or header is None
                or self._stored.is_after_state(header)
                or header.batch_number >= self._stored.first_numbers_batch
            ):
                continue
            for first, each in zip(segments.firsts[:at], starts[:at], strict=True):
                if each.header is not None:
                    cls.time_index.record(each.header.time, max(first, spill.first_sequence))
                    self._found.last_batch_number = max(
                        self._found.last_batch_number, each.header.batch_number
                    )
            ends = zip(segments.firsts[1 : at + 1], starts[:at], strict=True)
            for end, each in ends:
                if end > spill.first_sequence:
                    spill.record_spilled(end, each.size)
            self._found.message_count += max(0, segments.firsts[at] - spill.first_sequence)
            segments.skip_front(at)
            return

    def _may_have_new_ids(self, record: Record) -> bool:
        """Return True if a record may contain ids that the snapshot does not contain."""
        return (
            record.batch_number >= self._first_new_batches[OTHER_PUBLISHERS]
            and record.time > self._broker.clock.now - DUPLICATE_WINDOW_SECONDS
        )

    def _collect_message_ids(self, data: memoryview, record: Record) -> None:
        stored, time = bytes(data[record.body_offset : record.end]), self._time_of(record)
        self._message_ids += [
            (record.class_id, message_id, record.first + index, time)
            for index, message_id in iter_message_ids(stored)
        ]

    def _append_group(self, cls: MessageClass, group: _RecordGroup, floor: int) -> None:
        """Append a group's messages from `floor` on to the ring, and clear the group."""
        if self._stored.is_after_state(group.records[0]):
            floor = 0
        batches = self._split(group)
        if any(self._stored.has_new_numbers(record) for record in group.records):
            self._collect_numbers(group, batches)
        for record in group.records:
            if record.last > floor:
                cls.time_index.record(self._time_of(record), max(record.first, floor))
        counts = np.array([record.message_count for record in group.records])
        times = np.repeat(np.array([self._time_of(record) for record in group.records]), counts)
        first = at = group.records[0].first
        for batch in batches:
            begin, end = max(at, floor), at + batch.count
            if begin < end:
                self._skip_to(cls, begin)
                part = batch.slice(begin - at, batch.count)
                self._restorer.append_messages(cls, begin, part, times[begin - first : end - first])
            at = end
        group.clear()

    def _skip_to(self, cls: MessageClass, sequence: int) -> None:
        """Continue a class with a later sequence. `finish` removes the messages in between."""
        ring = cls.ring
        if ring.head >= sequence:
            return
        if cls.spill is not None and len(ring):
            cls.spill.record_spilled(ring.head, ring.frame_bytes)
            ring.release(ring.head)
        if len(ring):
            self._restorer.append_missing(cls, sequence)
        else:
            ring.set_next_sequence(sequence)

    def _time_of(self, record: Record) -> float:
        """Return the acceptance time of a record, at most now: the clock may have been set back."""
        return min(record.time, self._broker.clock.now)

    def _split(self, group: _RecordGroup) -> list[FrameBatch]:
        first, last = group.records[0], group.records[-1]
        buffer, size = group.joined()
        try:
            return self._restorer.split_frames(buffer, 0, size, last.last - first.first)
        except ValueError as error:
            raise JournalError(
                f"class {first.class_id}: the records of messages {first.first}-{last.last - 1} "
                f"are intact, but their frames are invalid: {error}"
            ) from None

    def _collect_numbers(self, group: _RecordGroup, batches: list[FrameBatch]) -> None:
        if all(not name for _, _, name in group.publishers):
            return
        default_batch = self._first_new_batches[OTHER_PUBLISHERS]
        publishers: list[tuple[int, str]] = []
        for batch_number, count, name in group.publishers:
            if batch_number < self._first_new_batches.get(name, default_batch):
                name = ""
            if publishers and publishers[-1][1] == name:
                count += publishers.pop()[0]
            publishers.append((count, name))
        collect_producer_numbers(self._numbers, batches, publishers)

    def finish(self) -> None:
        """Restore positions and publishers, after all messages."""
        state, restorer = self._state, self._restorer
        for position in state.positions.values():
            restorer.restore_position(position, self._known_heads.get(position.class_id))
        for class_id, gap in self._gaps:
            if gap.is_needed and class_id in self._broker.classes:  # It may have been removed.
                restorer.skip_missing(class_id, gap.first, gap.last, is_new=gap.is_new)
        for class_id, begin, end in state.purged_ranges:
            restorer.restore_purge(class_id, begin, end, self._known_heads.get(class_id))
        stored = self._numbers
        for name, first, count in state.refused_ranges:
            stored.setdefault(name, StoredNumbers()).add_range(first, count)
        for producer in state.producers.values():
            for first, count in producer.stored_ranges:
                stored.setdefault(producer.name, StoredNumbers()).add_range(first, count)
        for name in dict.fromkeys([*state.producers, *stored]):
            snapshot = state.producers.get(name, ProducerSnapshot(name, 0))
            restorer.restore_producer(
                snapshot,
                stored.get(name, StoredNumbers()),
                state.refusals.get(name, []),
                self.number_trust,
            )
        if self.number_trust is not NumberTrust.ALL or self._found.problems:
            restorer.mark_producers_incomplete()
        if self.number_trust is NumberTrust.ALL:
            restorer.restore_message_ids(state.message_ids, self._message_ids)
        restorer.finish()


def finish_recovery(
    directory: JournalDirectory, found: RecoveryResult, *, to_disk: bool
) -> list[str]:
    """Move damaged data aside, so that it is neither read again nor overwritten.

    With `to_disk`, all other files are synced, because a killed server may not have done so.

    Returns:
        Descriptions of the damaged data for which there is no disk space.

    Raises:
        OSError: A system call failed for another reason.
    """
    problems = apply_server_repairs(found)
    if to_disk:
        folders = [directory.path / STATE, *sorted((directory.path / CLASSES).iterdir())]
        for folder in folders:
            if folder.is_dir():
                for number in sorted(numbers(folder)):
                    sync_file(folder / file_name(number))
                sync_directory(folder)
        sync_directory(directory.path / CLASSES)
    return problems
