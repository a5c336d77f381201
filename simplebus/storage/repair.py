"""Repair of damaged files: the damaged bytes move to other files, and gaps replace them.

The damaged bytes are stored first, and a file is replaced as a whole. So a crash loses nothing, and
the next repair starts again. Only `simplebus journal repair` records gaps at the end of a class and
before its first file: a server uses the sequences at the end again.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path

from simplebus.storage.append_file import DISK_FULL_ERRORS, sync_directory
from simplebus.storage.file_names import DRAFT, dropped_name, file_number
from simplebus.storage.segments import FileRepair, RecoveryResult


def describe_repairs(found: RecoveryResult) -> Iterator[str]:
    """Yield a description of each change that `apply_repairs` makes."""
    for repairs in _by_file([*found.repairs, *_end_repairs(found)]):
        for repair in repairs:
            change = (
                f"move bytes {repair.begin} to {repair.end - 1} to "
                f"{unused_dropped_path(repair.path).name}"
                if repair.begin < repair.end
                else "record a gap"
            )
            yield f"{repair.path}: {change}; lost: {repair.lost}"
    for path in _files_to_rename(found):
        yield f"{path}: rename to {unused_dropped_path(path).name}"


def apply_repairs(found: RecoveryResult) -> None:
    """Repair all damage of a locked journal. Raises OSError."""
    _rename_files(found)
    for repairs in _by_file([*found.repairs, *_end_repairs(found)]):
        _repair_file(repairs)


def apply_server_repairs(found: RecoveryResult) -> list[str]:
    """Repair the damage of a locked journal as a server does when it starts.

    Returns:
        Descriptions of the repairs for which there is no disk space. The next start tries again.

    Raises:
        OSError: A system call failed for another reason.
    """
    _rename_files(found)
    ends = (replace(end, gap=b"") for end in _end_repairs(found) if end.begin < end.end)
    problems = []
    for repairs in _by_file([*found.repairs, *ends]):
        try:
            _repair_file(repairs)
        except OSError as error:
            if error.errno not in DISK_FULL_ERRORS:
                raise
            problems.append(
                f"{repairs[0].path}: {error.strerror}; the damaged data stays in the file until "
                "the next start with enough disk space"
            )
    return problems


def unused_dropped_path(path: Path) -> Path:
    """Return the path of a new file for data of a file that cannot be used."""
    number = file_number(path.name)
    assert number is not None
    candidates = (path.with_name(dropped_name(number, copy_number)) for copy_number in count(1))
    return next(candidate for candidate in candidates if not candidate.exists())


def _end_repairs(found: RecoveryResult) -> list[FileRepair]:
    """Return the repairs of the ends of files that are not only renamed."""
    ignored = set(found.ignored_files)
    return [end for end in found.end_repairs if end.gap or end.path not in ignored]


def _files_to_rename(found: RecoveryResult) -> list[Path]:
    """Return the ignored files whose content no gap replaces."""
    with_gap = {end.path for end in found.end_repairs if end.gap}
    return [path for path in found.ignored_files if path not in with_gap]


def _rename_files(found: RecoveryResult) -> None:
    paths = _files_to_rename(found)
    for path in paths:
        path.rename(unused_dropped_path(path))
    for folder in {path.parent for path in paths}:
        sync_directory(folder)  # After a power cut, the files must not reappear.


def _by_file(repairs: Iterable[FileRepair]) -> list[list[FileRepair]]:
    by_path: dict[Path, list[FileRepair]] = {}
    for repair in repairs:
        by_path.setdefault(repair.path, []).append(repair)
    return [
        sorted(path_repairs, key=lambda repair: repair.begin) for path_repairs in by_path.values()
    ]


def _repair_file(repairs: list[FileRepair]) -> None:
    """Apply the repairs of one file, in the order of their offsets."""
    path = repairs[0].path
    if not path.parent.exists():
        path.parent.mkdir(mode=0o750)
        _set_owner(path.parent, path.parent.parent)
    data = path.read_bytes() if path.exists() else b""
    pieces, damaged, offset = [], [], 0
    for repair in repairs:
        pieces += [data[offset : repair.begin], repair.gap]
        damaged.append(data[repair.begin : repair.end])
        offset = repair.end
    moved = b"".join(damaged).rstrip(b"\0")
    draft = path.with_name(path.name + DRAFT)
    new_files = {draft: b"".join([*pieces, data[offset:]])}
    if moved:
        new_files[unused_dropped_path(path)] = moved
    try:
        for new_path, content in new_files.items():
            _write(new_path, content)
    except OSError:
        for new_path in new_files:
            new_path.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)
    draft.replace(path)
    sync_directory(path.parent)


def _write(path: Path, data: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o640)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    _set_owner(path, path.parent)


def _set_owner(path: Path, pattern: Path) -> None:
    """Give a new file to the owner of another one: root may repair the files of a service."""
    if os.geteuid() == 0:
        owner = pattern.stat()
        os.chown(path, owner.st_uid, owner.st_gid)
