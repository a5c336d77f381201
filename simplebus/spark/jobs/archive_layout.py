"""Paths of an archive, and the choice of files to move or merge. No I/O.

Files that are not visible yet, or not any more, are below HIDDEN: Parquet readers ignore names that
start with a dot.

    PATH/class=orders/date=2026-11-21/QUERY-000007-00000.parquet    batch of a query
                                      compacted-ID-00000.parquet    merged files
                                      hour=5/…                      the same, partitioned by hour
    PATH/.simplebus/staging/…                  files being written
                    batches/QUERY/000007.json  manifest: files of a query's latest batch
                    swaps/ID.json              manifest: unfinished swap
                    compaction.json            current compaction
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from typing import Any, NamedTuple
from urllib.parse import unquote

from simplebus.core.broker.wait_reasons import format_count

HIDDEN = ".simplebus"
STAGING = f"{HIDDEN}/staging"
BATCHES = f"{HIDDEN}/batches"
SWAPS = f"{HIDDEN}/swaps"
OWNER = f"{HIDDEN}/compaction.json"
"""Names the current or last compaction."""
CHECKPOINT = "_checkpoint"
PARTITION_COLUMNS = {"day": ("class", "date"), "hour": ("class", "date", "hour")}
"""Columns that are folder names, by the length of time of a folder."""
NO_VALUE = "__HIVE_DEFAULT_PARTITION__"
"""Folder name of a null column."""

_BATCH_FILE = re.compile(r"(?P<query>[0-9a-f-]{36})-(?P<batch>\d{6,})-\d{5,}\.parquet")


class ArchiveError(RuntimeError):
    """The archive is inconsistent, missing or in use."""


@dataclass(frozen=True, slots=True)
class ArchiveFile:
    """File of an archive."""

    path: str
    """Relative to the archive."""
    size: int
    """Size in bytes."""

    @property
    def folder(self) -> str:
        return self.path.rpartition("/")[0]

    @property
    def name(self) -> str:
        return self.path.rpartition("/")[2]


@dataclass(frozen=True, slots=True)
class FileMove:
    """Move that makes a staged file visible."""

    staged: str
    target: str


# Batches -----------------------------------------------------------------------------------------


def staging_folder(query: str, batch: int | None = None) -> str:
    """Return the staging folder of a query's batch, or of all its batches."""
    return f"{STAGING}/{query}" if batch is None else f"{STAGING}/{query}/{batch:06d}"


def batch_manifest(query: str, batch: int) -> str:
    """Return the path of a batch's manifest."""
    return f"{BATCHES}/{query}/{batch:06d}.json"


def batch_number(path: str) -> int:
    """Return the batch number from a manifest's path."""
    return int(path.rpartition("/")[2].removesuffix(".json"))


def batch_moves(query: str, batch: int, staged: Iterable[ArchiveFile]) -> list[FileMove]:
    """Return the moves that make a batch visible. Equal staged files get equal names."""
    root = staging_folder(query, batch) + "/"
    found = []
    for number, path in enumerate(sorted(f.path for f in staged if _is_data(f, root))):
        folder = path.removeprefix(root).rpartition("/")[0]
        found.append(FileMove(path, f"{folder}/{query}-{batch:06d}-{number:05d}.parquet"))
    return found


def _is_data(file: ArchiveFile, root: str) -> bool:
    inner = file.path.removeprefix(root)
    return inner.endswith(".parquet") and not any(p[0] in "._" for p in inner.split("/"))


def dump_manifest(content: Mapping[str, Any]) -> bytes:
    """Return a manifest's content as bytes."""
    return json.dumps({"version": 1, **content}, indent=1).encode()


def load_manifest(data: bytes, path: str) -> dict[str, Any]:
    """Parse a manifest. Raises ArchiveError."""
    try:
        found = json.loads(data)
        version = found["version"]
    except (ValueError, KeyError, TypeError):
        raise ArchiveError(f"{path} is not a manifest; expected JSON with a version") from None
    if version != 1:
        raise ArchiveError(f"{path} has version {version!r}, expected 1: upgrade simplebus")
    return dict(found)


# Partitions --------------------------------------------------------------------------------------


def partition_values(folder: str) -> dict[str, str | None]:
    """Return the column values in a folder's name; None is null."""
    found: dict[str, str | None] = {}
    for part in folder.split("/"):
        name, sign, text = part.partition("=")
        if sign:
            found[name] = None if text == NO_VALUE else unquote(text)
    return found


def partition_day(folder: str) -> date | None:
    """Return the day of a folder; None for no day."""
    text = partition_values(folder).get("date")
    try:
        return date.fromisoformat(text) if text else None
    except ValueError:
        return None


# Compaction --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FileMerge:
    """Files of one folder to merge."""

    folder: str
    files: tuple[str, ...]
    output_count: int
    """Number of merged files."""
    size: int
    """Total size in bytes."""


def compaction_staging_folder(run: str) -> str:
    """Return the staging folder of a compaction."""
    return f"{STAGING}/compaction-{run}"


def swap_manifest(run: str, number: int) -> str:
    """Return the path of a swap's manifest."""
    return f"{SWAPS}/{run}-{number:05d}.json"


def compacted_moves(folder: str, run: str, number: int, staged: Sequence[str]) -> list[FileMove]:
    """Return the moves that make merged files visible."""
    return [
        FileMove(path, f"{folder}/compacted-{run}-{number:05d}-{index:05d}.parquet")
        for index, path in enumerate(sorted(staged))
    ]


class MergePlan(NamedTuple):
    """Merges worth doing, and why other files are not merged."""

    merges: list[FileMerge]
    skipped: dict[str, int]
    """Number of files that are not merged, by reason."""

    def explain_empty(self) -> str:
        """Return why there are no merges."""
        if not self.skipped:
            return "the archive has no files"
        return "; ".join(
            f"{format_count(count, 'file')} {reason}" for reason, count in self.skipped.items()
        )


def plan_merges(
    files: Iterable[ArchiveFile],
    *,
    latest: Mapping[str, int],
    target_bytes: int,
    before: date | None = None,
) -> MergePlan:
    """Plan the merges of folders with several small files.

    Args:
        files: All visible files.
        latest: Latest batch by query. Files of this batch are not merged, because its query may
            repeat it. The same applies to the last visible batch of a query without an entry.
        target_bytes: Approximate size of a merged file.
        before: Merge only files of earlier days; None for all files.
    """
    folders: dict[str, list[ArchiveFile]] = {}
    for file in files:
        if _is_data(file, ""):
            folders.setdefault(file.folder, []).append(file)
    found: list[FileMerge] = []
    skipped: Counter[str] = Counter()
    for folder, inside in sorted(folders.items()):
        day = partition_day(folder)
        if before is not None and (day is None or day >= before):
            skipped[f"not of a day before {before}"] += len(inside)
            continue
        finished = finished_files(inside, latest)
        small = [file for file in finished if file.size < target_bytes * 3 // 4]
        size = sum(file.size for file in small)
        outputs = max(1, round(size / target_bytes))
        if outputs < len(small):
            paths = tuple(sorted(file.path for file in small))
            found.append(FileMerge(folder, paths, outputs, size))
        else:
            skipped["without another small file in the same folder"] += len(small)
        skipped["of the latest batch of a query, which may repeat it"] += len(inside) - len(
            finished
        )
        skipped["of about the size of a merged file, or larger"] += len(finished) - len(small)
    return MergePlan(found, dict(+skipped))


def expired_files(
    files: Iterable[ArchiveFile], *, latest: Mapping[str, int], before: date
) -> set[str]:
    """Return the paths of finished files of days before `before`.

    Args:
        files: All visible files.
        latest: Latest batch by query, see `plan_merges`.
        before: The day. Files without a day never expire.
    """
    folders: dict[str, list[ArchiveFile]] = {}
    for file in files:
        day = partition_day(file.folder)
        if day is not None and day < before and _is_data(file, ""):
            folders.setdefault(file.folder, []).append(file)
    return {file.path for inside in folders.values() for file in finished_files(inside, latest)}


def finished_files(files: Sequence[ArchiveFile], latest: Mapping[str, int]) -> list[ArchiveFile]:
    """Return the files that no query may write again."""
    last = dict(latest)
    numbered = [(file, _BATCH_FILE.fullmatch(file.name)) for file in files]
    for _, match in numbered:
        if match:
            query, batch = match["query"], int(match["batch"])
            last[query] = max(last.get(query, batch), batch)
    return [
        file
        for file, match in numbered
        if match is None or int(match["batch"]) < last[match["query"]]
    ]
