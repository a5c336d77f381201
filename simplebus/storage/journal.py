"""Writes write batches to segments and state files.

A write batch is reported as durable after all of it was written. After a failed write or sync, the
caller discards unsynced data and writes the batch again; synced data is skipped. A snapshot is
written after the data that it describes was synced. A segment is removed only after a synced
snapshot contains the message numbers of its publishers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from simplebus.core.commit_log import JournalEntry, WriteBatch
from simplebus.core.protocol.durability import Durability
from simplebus.storage import records
from simplebus.storage.append_file import AppendFile, sync_directory
from simplebus.storage.directory import JournalDirectory
from simplebus.storage.file_names import (
    CLASSES,
    STATE,
    file_name,
    file_number,
    folder_name,
    removable_segments,
)

SEGMENT_BYTES = 64 * 1024 * 1024

# Up to this many files are synced without threads, which have a cost of their own.
_SYNCS_ALONE_MAX = 2
_SYNCS_AT_ONCE = 32


@dataclass(slots=True)
class _ClassFiles:
    """Segments of one class."""

    folder: Path
    segments: dict[int, int] = field(default_factory=dict)
    """Last write batch in each segment, by first sequence."""
    file: AppendFile | None = None
    """Last segment, if this process created it. Its end mark is the sequence after the last
    message.
    """
    previous_end_mark: int = 0
    """End mark of the segment before `file`."""


class Journal:
    """Writer of a locked journal directory.

    Every method raises OSError if a system call fails; call `discard_unsynced` then.
    """

    def __init__(
        self,
        directory: JournalDirectory,
        *,
        durability: Durability,
        segment_bytes: int = SEGMENT_BYTES,
    ) -> None:
        self.directory = directory
        self.durability = durability
        self.segment_bytes = segment_bytes
        self._classes: dict[int, _ClassFiles] = {}
        self._state: AppendFile | None = None
        self._state_number = max(_numbers(directory.path / STATE), default=0)
        self._numbers_batch = 0
        """Message numbers of write batches up to this one are contained in a synced snapshot."""
        self._new_snapshot_batch_number = self._new_numbers_batch = 0
        self._has_unsynced_dead_letters = False
        self._is_snapshot_new = False
        self.written_bytes = 0
        """Bytes of written message records, including repeated writes."""
        self.files_synced = 0
        """Number of attempted file syncs."""
        self._pool: ThreadPoolExecutor | None = None
        self._directories_to_sync: dict[Path, None] = {}
        """Directories in which files or directories were created since the last sync."""

    # Writing -------------------------------------------------------------------------------------

    def write(self, batch: WriteBatch) -> None:
        """Append the contents of a write batch."""
        for entry in batch.entries:
            self._write_entry(entry, batch.number)
            self._has_unsynced_dead_letters |= entry.has_dead_letters
        if batch.snapshot or (batch.changes and self._has_unsynced_dead_letters):
            # A snapshot must not be stored before its messages. The state of a position that
            # dead-lettered messages must not be stored before the dead letters.
            self._sync_files()
        if batch.snapshot and batch.number != self._new_snapshot_batch_number:
            self._begin_state(batch)
        changes, state = batch.snapshot or batch.changes, self._state
        if changes:
            assert state is not None, "changes before the first snapshot"
            if state.end_mark < batch.number:
                record = records.encode_changes(
                    changes,
                    batch.number,
                    is_snapshot=bool(batch.snapshot),
                    salt=self.directory.salt,
                )
                state.append(record, end_mark=batch.number)

    def sync(self) -> None:
        """Make everything written as safe as the durability requires."""
        self._sync_files()
        if self._is_snapshot_new:
            self._is_snapshot_new = False
            self._numbers_batch = self._new_numbers_batch
            self._remove_old_states()

    def _sync_files(self) -> None:
        self._has_unsynced_dead_letters = False
        dirty = [file for file in self._files() if file.has_unsynced_data]
        if self.durability is Durability.DISK:
            self.files_synced += len(dirty)
            self._run_all([file.sync for file in dirty])
            self._run_all([partial(sync_directory, folder) for folder in self._directories_to_sync])
        else:
            for file in dirty:
                file.mark_synced()
        self._directories_to_sync.clear()

    def _run_all(self, syncs: list[Callable[[], None]]) -> None:
        """Run syncs concurrently, so that the system can combine them. Raises OSError after all
        have ended.
        """
        if len(syncs) <= _SYNCS_ALONE_MAX:
            for sync in syncs:
                sync()
            return
        if self._pool is None:
            self._pool = ThreadPoolExecutor(_SYNCS_AT_ONCE, "simplebus sync")
        waiting = [self._pool.submit(sync) for sync in syncs]
        wait(waiting)
        for future in waiting:
            future.result()

    def discard_unsynced(self) -> None:
        """Discard everything written since the last sync."""
        for file in self._files():
            if file.has_unsynced_data:
                file.discard_unsynced()

    def close(self) -> None:
        """Close all files. Synced data stays."""
        for file in self._files():
            with contextlib.suppress(OSError):
                file.close()
        self._classes.clear()
        self._state = None
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None

    def _files(self) -> list[AppendFile]:
        files = [cls.file for cls in self._classes.values() if cls.file is not None]
        return files if self._state is None else [*files, self._state]

    def _write_entry(self, entry: JournalEntry, batch: int) -> None:
        cls = self._class(entry.class_id)
        file, last = cls.file, entry.first_sequence + entry.message_count
        if last <= (cls.previous_end_mark if file is None else file.end_mark):
            return
        pieces = records.encode_entry(entry, batch, salt=self.directory.salt)
        size = sum(map(len, pieces))
        if file is None or (file.written_bytes and file.written_bytes + size > self.segment_bytes):
            file = self._begin_segment(cls, entry.first_sequence)
        file.append(pieces, end_mark=last)
        self.written_bytes += size
        cls.segments[max(cls.segments)] = batch

    def _class(self, class_id: int) -> _ClassFiles:
        cls = self._classes.get(class_id)
        if cls is None:
            folder = self.directory.path / CLASSES / folder_name(class_id)
            if not folder.exists():
                folder.mkdir(mode=0o750)
                self._directories_to_sync[folder.parent] = None
            cls = self._classes[class_id] = _ClassFiles(folder, dict.fromkeys(_numbers(folder), 0))
        return cls

    def _begin_segment(self, cls: _ClassFiles, first: int) -> AppendFile:
        if cls.file is not None:
            # Later syncs do not include this file.
            if self.durability is Durability.DISK:
                cls.file.sync()
            cls.previous_end_mark = cls.file.end_mark
            cls.file.close()
            cls.file = None
        file = AppendFile(cls.folder / file_name(first), end_mark=cls.previous_end_mark)
        self._directories_to_sync[cls.folder] = None
        cls.segments[first] = 0
        cls.file = file
        return file

    def _begin_state(self, batch: WriteBatch) -> None:
        """Create a state file that begins with a snapshot."""
        folder = self.directory.path / STATE
        state = AppendFile(folder / file_name(self._state_number + 1), end_mark=batch.number - 1)
        self._state_number += 1
        if self._state is not None:
            self._state.close()
        self._state = state
        self._directories_to_sync[folder] = None
        self._new_snapshot_batch_number, self._is_snapshot_new = batch.number, True
        self._new_numbers_batch = batch.numbers_batch

    # Removing ------------------------------------------------------------------------------------

    def remove(self, floors: dict[int, int], ended: Collection[int] = ()) -> bool:
        """Remove the segments whose messages are all below the floor of their class.

        A class in `ended` gets a new, empty segment, so that its previous segment can be removed,
        too.

        Returns:
            True if segments remain that need a newer snapshot first.
        """
        is_waiting = False
        for class_id, floor in floors.items():
            cls = self._class(class_id)
            if class_id in ended:
                self._end_segment(cls, floor)
            for first in removable_segments(cls.segments, floor):
                # `_numbers_batch` is 0 before the first snapshot of this process: the snapshot of
                # an earlier process may not contain the message numbers of this segment.
                if not self._numbers_batch or cls.segments[first] > self._numbers_batch:
                    is_waiting = True
                    continue
                (cls.folder / file_name(first)).unlink(missing_ok=True)
                if self.durability is Durability.DISK:
                    # After a power failure, the segment must not reappear without its successor.
                    sync_directory(cls.folder)
                del cls.segments[first]
        return is_waiting

    def _end_segment(self, cls: _ClassFiles, head: int) -> None:
        """Create an empty segment at the head, so that the previous one can be removed."""
        is_written = cls.file is None or (
            not cls.file.has_unsynced_data and cls.file.end_mark <= head
        )
        if not cls.segments or max(cls.segments) >= head or not is_written:
            return
        self._begin_segment(cls, head)
        if self.durability is Durability.DISK:
            sync_directory(cls.folder)  # The new segment records the head of the class.

    def _remove_old_states(self) -> None:
        folder = self.directory.path / STATE
        for number in _numbers(folder):
            if number < self._state_number:
                (folder / file_name(number)).unlink(missing_ok=True)


def _numbers(folder: Path) -> list[int]:
    """Return the numbers of the files in a directory, ascending."""
    found = (file_number(path.name) for path in folder.iterdir())
    return sorted(number for number in found if number is not None)
