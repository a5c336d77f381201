"""Repair of damaged files: the damaged bytes move to other files, and gaps replace them.

The damaged bytes are stored first, and a file is replaced as a whole. So a crash loses nothing, and
the next repair starts again. `simplebus journal repair` also records gaps at the end of the data,
and in place of missing files. A server does not: it uses these sequences again.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path

from simplebus.storage.append_file import sync_directory
from simplebus.storage.file_names import DRAFT, dropped_name, file_number
from simplebus.storage.segments import RecoveryResult, SegmentRepair


def describe_repairs(found: RecoveryResult) -> Iterator[str]:
    """Yield a description of each change that `apply_repairs` makes."""
    for repairs in _repairs_by_file(found):
        for repair in repairs:
            change = (
                f"move bytes {repair.begin} to {repair.end - 1} to "
                f"{unused_dropped_path(repair.path).name}"
                if repair.begin < repair.end
                else "record a gap"
            )
            yield f"{repair.path}: {change}; lost: {repair.lost}"
    for path in _useless_files(found):
        yield f"{path}: rename to {unused_dropped_path(path).name}"


def apply_repairs(found: RecoveryResult) -> None:
    """Repair all damage of a locked journal. Raises OSError."""
    for repairs in _repairs_by_file(found):
        _repair_file(repairs)
    for path in _useless_files(found):
        path.rename(unused_dropped_path(path))
        sync_directory(path.parent)


def apply_server_repairs(found: RecoveryResult) -> None:
    """Repair the damage of a locked journal as a server does at its start. Raises OSError."""
    for path in found.ignored_files:
        path.rename(unused_dropped_path(path))
    ignored = set(found.ignored_files)
    ends = (replace(end, gap=b"") for end in found.torn_ends if end.path not in ignored)
    for repairs in _by_file([*found.repairs, *(end for end in ends if end.begin < end.end)]):
        _repair_file(repairs)


def _repair_file(repairs: list[SegmentRepair]) -> None:
    """Apply the repairs of one file, in the order of their offsets."""
    path = repairs[0].path
    path.parent.mkdir(mode=0o750, exist_ok=True)
    data = path.read_bytes() if path.exists() else b""
    pieces, damaged, offset = [], [], 0
    for repair in repairs:
        pieces += [data[offset : repair.begin], repair.gap]
        damaged.append(data[repair.begin : repair.end])
        offset = repair.end
    moved = b"".join(damaged).rstrip(b"\0")
    if moved:
        _write(unused_dropped_path(path), moved)
        sync_directory(path.parent)
    draft = path.with_name(path.name + DRAFT)
    _write(draft, b"".join([*pieces, data[offset:]]))
    draft.replace(path)
    sync_directory(path.parent)


def unused_dropped_path(path: Path) -> Path:
    """Return the path of a new file for data of a file that cannot be used."""
    number = file_number(path.name)
    assert number is not None
    candidates = (path.with_name(dropped_name(number, copy_number)) for copy_number in count(1))
    return next(candidate for candidate in candidates if not candidate.exists())


def _useless_files(found: RecoveryResult) -> list[Path]:
    """Return the files without valid data that no repair replaces by a gap."""
    repaired = {repairs[0].path for repairs in _repairs_by_file(found)}
    return [path for path in found.ignored_files if path not in repaired]


def _repairs_by_file(found: RecoveryResult) -> list[list[SegmentRepair]]:
    ignored = set(found.ignored_files)
    ends = [
        torn_end for torn_end in found.torn_ends if torn_end.gap or torn_end.path not in ignored
    ]
    return _by_file([*found.repairs, *ends])


def _by_file(repairs: Iterable[SegmentRepair]) -> list[list[SegmentRepair]]:
    by_path: dict[Path, list[SegmentRepair]] = {}
    for repair in repairs:
        by_path.setdefault(repair.path, []).append(repair)
    return [
        sorted(path_repairs, key=lambda repair: repair.begin) for path_repairs in by_path.values()
    ]


def _write(path: Path, data: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o640)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
