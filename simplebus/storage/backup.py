"""Backup of a journal that a server may be using, and restoring of a backup.

A backup is itself a journal, of the moment at which it was made. Files that have not changed since
the previous backup in the same directory are not copied again.

The server writes and removes files meanwhile. The copied state must not refer to messages that the
copied segments lack. So the segments are copied, then the state, and then what the segments have
received since; if a file was removed meanwhile, this is repeated. Files are replaced as a whole,
and removed at the end only, so an interrupted backup can be restored, too.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from simplebus.storage.append_file import sync_directory
from simplebus.storage.directory import lock_path, open_directory
from simplebus.storage.errors import JournalError
from simplebus.storage.file_names import CLASSES, DRAFT, LOCK, STAMP, STATE
from simplebus.storage.inspection import JournalInspection

_TRIES_MAX = 100
_COPIES_MAX = 3
_TIME_RESOLUTION_NS = 100_000_000
"""Time within which two changes of a file may get the same time; kernels use 1 to 10 ms."""

Files = dict[Path, os.stat_result]
"""Status of files by their path in the journal."""


@dataclass(slots=True)
class CopyResult:
    """Numbers of copied files, and the content of the copy."""

    bus_id: str
    file_count: int = 0
    copied_count: int = 0
    """Number of files that were new or had changed."""
    copied_bytes: int = 0
    class_count: int = 0
    message_count: int = 0


def back_up(source: Path, target: Path) -> CopyResult:
    """Make the directory `target` a backup of the journal in `source`, and verify it.

    Raises:
        JournalError: `source` is not a journal, `target` contains something else, or the backup is
            damaged, as the journal is then.
        OSError: A file cannot be read or written.
    """
    result = CopyResult(open_directory(source).bus_id)
    if (target / STAMP).exists() and open_directory(target).bus_id != result.bus_id:
        raise JournalError(
            f"{target} is a backup of the bus {open_directory(target).bus_id}, and {source} is a "
            f"journal of {result.bus_id}; expected another directory"
        )
    with _prepared(target):
        for remaining_count in reversed(range(_COPIES_MAX)):
            _copy_journal(source, target, result)
            try:
                _verify(target, result, cuts_ends=True)
                break
            except JournalError:  # The server may have written to a file while it was copied.
                if not remaining_count:
                    raise
    return result


def _copy_journal(source: Path, target: Path, result: CopyResult) -> None:
    """Copy the files that are new or have changed, and remove those that the journal lacks."""
    _copy_changed(source, target, _list_files(source, CLASSES), result)
    for _ in range(_TRIES_MAX):
        before = _list_files(source, CLASSES)
        states = _list_files(source, STATE)
        _copy_changed(source, target, states, result, suffix=DRAFT)
        segments = _list_files(source, CLASSES)
        _copy_changed(source, target, segments, result)
        are_states_there = states.keys() <= _list_files(source, STATE).keys()
        if are_states_there and before.keys() <= segments.keys():
            break
    else:
        raise JournalError(f"{source}: files are removed faster than they can be copied")
    for path in states:
        with contextlib.suppress(FileNotFoundError):  # It had not changed.
            (target / f"{path}{DRAFT}").replace(target / path)
    _copy_file(source / STAMP, target / STAMP)
    _remove_stale_files(target, segments.keys() | states.keys())


def restore(backup: Path, target: Path) -> CopyResult:
    """Copy a backup to the directory `target`, which must be empty or missing, and verify it.

    Files get the owner of `target`.

    Raises:
        JournalError: `backup` is not a backup or is damaged, or `target` is not empty.
        OSError: A file cannot be read or written.
    """
    result = CopyResult(open_directory(backup).bus_id)
    _verify(backup, CopyResult(result.bus_id))
    if target.exists() and any(target.iterdir()):
        raise JournalError(f"{target} is not empty; expected an empty or a new directory")
    with _prepared(target):
        for folder in (CLASSES, STATE):
            _copy_changed(backup, target, _list_files(backup, folder), result)
        _copy_file(backup / STAMP, target / STAMP)
        _verify(target, result)
    owner = target.stat()
    if os.geteuid() == 0:
        for path in target.rglob("*"):
            os.chown(path, owner.st_uid, owner.st_gid)
    return result


@contextlib.contextmanager
def _prepared(target: Path) -> Iterator[None]:
    """Create the folders of a copy and lock it; at the end, sync all its files."""
    file_names = {path.name for path in target.iterdir()} if target.is_dir() else set()
    if file_names - {STAMP, LOCK, CLASSES, STATE}:
        raise JournalError(f"{target} contains other files; expected a backup or a new directory")
    for folder in (target, target / CLASSES, target / STATE):
        folder.mkdir(mode=0o750, parents=True, exist_ok=True)
    lock = lock_path(target)
    try:
        yield
        for folder in (target, *filter(Path.is_dir, target.rglob("*"))):
            sync_directory(folder)
    finally:
        os.close(lock)


def _list_files(journal: Path, folder: str) -> Files:
    """Return the segments, or the state files in ascending order."""
    files: Files = {}
    for path in sorted((journal / folder).rglob("*.log")):
        with contextlib.suppress(FileNotFoundError):
            files[path.relative_to(journal)] = path.stat()
    return files


def _copy_changed(
    source: Path, target: Path, files: Files, result: CopyResult, suffix: str = ""
) -> None:
    """Copy the files whose size or time differs from the existing copy.

    A file that was removed meanwhile is skipped.
    """
    for path, status in files.items():
        copy = target / path
        with contextlib.suppress(FileNotFoundError):
            existing = copy.stat()
            if (existing.st_size, existing.st_mtime_ns) == (status.st_size, status.st_mtime_ns):
                continue
        with contextlib.suppress(FileNotFoundError):
            _copy_file(source / path, copy.with_name(copy.name + suffix))
            result.copied_count += 1
            result.copied_bytes += status.st_size


def _copy_file(source: Path, target: Path) -> None:
    """Replace a file by a synced copy, which gets the time that the original had before.

    The copy of a file that was changed just now gets another time, so that it is copied again: its
    time does not show later changes.
    """
    draft = target.with_name(target.name + DRAFT + DRAFT)
    with source.open("rb") as original:
        status = os.fstat(original.fileno())
        target.parent.mkdir(mode=0o750, exist_ok=True)
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o640)
        with os.fdopen(descriptor, "wb") as copy:
            shutil.copyfileobj(original, copy, 1 << 20)
            copy.flush()
            os.fsync(copy.fileno())
    is_recent = time.time_ns() - status.st_mtime_ns < _TIME_RESOLUTION_NS
    os.utime(draft, ns=(0, 0 if is_recent else status.st_mtime_ns))
    draft.replace(target)


def _remove_stale_files(target: Path, backup_files: Collection[Path]) -> None:
    """Remove the files of earlier backups that the journal does not have any more."""
    for folder in (CLASSES, STATE):
        for path in (target / folder).rglob("*"):
            if path.is_file() and path.relative_to(target) not in backup_files:
                path.unlink()


def _verify(journal: Path, result: CopyResult, *, cuts_ends: bool = False) -> None:
    """Read a whole copy, and count its content. Raises JournalError if it is damaged.

    With `cuts_ends`, records that the server was writing when they were copied are removed.
    """
    inspection = JournalInspection(journal, reads_past_damage=False)
    summaries = list(inspection.summaries(verify=True))
    if cuts_ends and inspection.found.end_repairs:
        for end in inspection.found.end_repairs:
            if not end.gap:
                os.truncate(end.path, end.begin)
        return _verify(journal, result)
    if inspection.problems:
        raise JournalError(f"{journal} is damaged: {'; '.join(inspection.problems[:10])}")
    result.class_count = len(summaries)
    for summary in summaries:
        result.message_count += summary.head - summary.first
        result.message_count -= sum(gap.last - gap.first for gap in summary.gaps)
        result.file_count += summary.segments
    return None
