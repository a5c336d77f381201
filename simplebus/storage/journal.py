"""Lots as files: what is appended where, what is synced, what is removed.

Rule 1: all that belongs to a lot is written before anything says so. When writing or syncing fails,
what was not synced is withdrawn, and all of it is to be written again; what was is left out then.
Rule 2: what a snapshot speaks of is safe before it is written. Numbers that publishers have used
stand in segments until a snapshot has them; a segment that nobody needs goes when that one is safe.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from simplebus.core.commit_log import JournalEntry, Durability, WriteBatch
from simplebus.storage import records
from simplebus.storage.append_file import AppendFile, sync_folder
from simplebus.storage.directory import Directory
from simplebus.storage.file_names import (
    CLASSES,
    STATE,
    file_name,
    file_number,
    folder_name,
    unneeded,
)

SEGMENT_BYTES = 64 * 1024 * 1024

# So many files are synced one after the other: threads have a price of their own.
_SYNCS_ALONE_MAX = 2
_SYNCS_AT_ONCE = 32


@dataclass(slots=True)
class _Class:
    """The files of one class."""

    folder: Path
    segments: dict[int, int] = field(default_factory=dict)
    """By first sequence: the last lot in it."""
    file: AppendFile | None = None
    """Of the last segment, if it is this process's. Its mark is the sequence behind the last
    message."""
    mark: int = 0
    """That of the file before it."""


class Journal:
    """Of a directory that is taken. Every method raises OSError as the system does; `withdraw` is
    to be called then."""

    def __init__(
        self, directory: Directory, *, level: Durability, segment_bytes: int = SEGMENT_BYTES
    ) -> None:
        self.directory = directory
        self.level = level
        self.segment_bytes = segment_bytes
        self._classes: dict[int, _Class] = {}
        self._state: AppendFile | None = None
        self._state_number = max(_numbers(directory.path / STATE), default=0)
        self._snapshot_lot = 0
        """What every lot up to this one says is in a snapshot that is synced, or in the files."""
        self._new_snapshot_lot = 0
        self._is_snapshot_new = False
        self.written_bytes = 0
        """Bytes of records of messages that were written, also when they are written again."""
        self.files_synced = 0
        """How often files were synced, or were to be."""
        self._pool: ThreadPoolExecutor | None = None
        self._folders: dict[Path, None] = {}
        """Those with new names in them."""

    # Writing -------------------------------------------------------------------------------------

    def write(self, lot: WriteBatch) -> None:
        """Append what is in a lot."""
        for entry in lot.entries:
            self._write_entry(entry, lot.number)
        if lot.snapshot:
            self._sync_files()  # It speaks of messages, and must not be there without them.
            if lot.number != self._new_snapshot_lot:
                self._begin_state(lot.number)
        changes, state = lot.snapshot or lot.changes, self._state
        if changes:
            assert state is not None, "changes before the first snapshot"
            if state.mark < lot.number:
                record = records.of_changes(changes, lot.number, is_snapshot=bool(lot.snapshot))
                state.append(record, mark=lot.number)

    def sync(self) -> None:
        """Have all that is written as safe as the level says."""
        self._sync_files()
        if self._is_snapshot_new:
            self._is_snapshot_new = False
            self._snapshot_lot = self._new_snapshot_lot
            self._remove_old_states()

    def _sync_files(self) -> None:
        dirty = [file for file in self._files() if file.is_dirty]
        if self.level is Durability.DISK:
            self.files_synced += len(dirty)
            self._all([file.sync for file in dirty])
            self._all([partial(sync_folder, folder) for folder in self._folders])
        else:
            for file in dirty:
                file.settle()
        self._folders.clear()

    def _all(self, syncs: list[Callable[[], None]]) -> None:
        """Do all of these at once: the system writes for several together what it would write for
        each. Raises OSError when one does, and all have ended."""
        if len(syncs) <= _SYNCS_ALONE_MAX:
            for sync in syncs:
                sync()
            return
        if self._pool is None:
            self._pool = ThreadPoolExecutor(_SYNCS_AT_ONCE, "simplebus sync")
        waiting = [self._pool.submit(sync) for sync in syncs]
        wait(waiting)
        for each in waiting:
            each.result()

    def withdraw(self) -> None:
        """Forget what was written since the last sync."""
        for file in self._files():
            if file.is_dirty:
                file.withdraw()

    def close(self) -> None:
        """Nothing is written any more. What was synced stays."""
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

    def _write_entry(self, entry: JournalEntry, lot: int) -> None:
        cls = self._class(entry.class_id)
        file, last = cls.file, entry.first + entry.count
        if last <= (cls.mark if file is None else file.mark):
            return
        pieces = records.of_entry(entry, lot)
        size = sum(map(len, pieces))
        if file is None or (file.used and file.used + size > self.segment_bytes):
            file = self._begin_segment(cls, entry.first)
        file.append(pieces, mark=last)
        self.written_bytes += size
        cls.segments[max(cls.segments)] = lot

    def _class(self, class_id: int) -> _Class:
        cls = self._classes.get(class_id)
        if cls is None:
            folder = self.directory.path / CLASSES / folder_name(class_id)
            if not folder.exists():
                folder.mkdir(mode=0o750)
                self._folders[folder.parent] = None
            cls = self._classes[class_id] = _Class(folder, dict.fromkeys(_numbers(folder), 0))
        return cls

    def _begin_segment(self, cls: _Class, first: int) -> AppendFile:
        if cls.file is not None:
            # What is in it must not be withdrawn any more: a later sync does not reach it.
            if self.level is Durability.DISK:
                cls.file.sync()
            cls.mark = cls.file.mark
            cls.file.close()
            cls.file = None
        file = AppendFile(cls.folder / file_name(first), mark=cls.mark)
        self._folders[cls.folder] = None
        cls.segments[first] = 0
        cls.file = file
        return file

    def _begin_state(self, lot: int) -> None:
        """A new file of changes, for a snapshot; what lots before it say is in there."""
        folder = self.directory.path / STATE
        state = AppendFile(folder / file_name(self._state_number + 1), mark=lot - 1)
        self._state_number += 1
        if self._state is not None:
            self._state.close()
        self._state = state
        self._folders[folder] = None
        self._new_snapshot_lot, self._is_snapshot_new = lot, True

    # Removing ------------------------------------------------------------------------------------

    def remove(self, floors: dict[int, int], ended: Collection[int] = ()) -> bool:
        """Remove the segments of these classes in which nothing is at or above the floor; the last
        one, too, of those of which nothing at all is, and that are `ended`: an empty one is there
        in its place. Returns whether some are left that need a newer snapshot first."""
        is_waiting = False
        for class_id, floor in floors.items():
            cls = self._class(class_id)
            if class_id in ended:
                self._end_segment(cls, floor)
            for first in unneeded(cls.segments, floor):
                # Of a segment from before, it is not known what was in the snapshot then.
                if not self._snapshot_lot or cls.segments[first] > self._snapshot_lot:
                    is_waiting = True
                    continue
                (cls.folder / file_name(first)).unlink(missing_ok=True)
                if self.level is Durability.DISK:
                    # After a power cut it must not be back where the one behind it is gone.
                    sync_folder(cls.folder)
                del cls.segments[first]
        return is_waiting

    def _end_segment(self, cls: _Class, head: int) -> None:
        """Begin an empty segment where a class ends, so that the one before it may go."""
        is_written = cls.file is None or (not cls.file.is_dirty and cls.file.mark <= head)
        if not cls.segments or max(cls.segments) >= head or not is_written:
            return
        self._begin_segment(cls, head)
        if self.level is Durability.DISK:
            sync_folder(cls.folder)  # It tells how far the class has come.

    def _remove_old_states(self) -> None:
        folder = self.directory.path / STATE
        for number in _numbers(folder):
            if number < self._state_number:
                (folder / file_name(number)).unlink(missing_ok=True)


def _numbers(folder: Path) -> list[int]:
    """The numbers that are names of files in a folder."""
    found = (file_number(each.name) for each in folder.iterdir())
    return sorted(number for number in found if number is not None)
