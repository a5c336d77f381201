"""Where an archive has what: names of files and folders, and what is to be moved or merged.

Rule 1: nothing of Spark and no I/O here: names and sizes in, names out.
Rule 2: whatever is not yet, or no longer, to be seen lies below HIDDEN, which programs that read
Parquet pass over, as they do with everything that begins with a dot.

    PATH/class=orders/date=2026-11-21/QUERY-000007-00000.parquet    a batch of a query
                                      compacted-ID-00000.parquet    what was many small ones
    PATH/.simplebus/staging/…                  files that are being written
                    batches/QUERY/000007.json  the files of a query's latest batch
                    swaps/ID.json              a swap that is to be finished
                    compaction.json            which compaction is at work
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from typing import Any
from urllib.parse import unquote

HIDDEN = ".simplebus"
STAGING = f"{HIDDEN}/staging"
BATCHES = f"{HIDDEN}/batches"
SWAPS = f"{HIDDEN}/swaps"
OWNER = f"{HIDDEN}/compaction.json"
"""Says which compaction is at work, or was the last one."""
CHECKPOINT = "_checkpoint"
PARTITIONS = ("class", "date")
NO_VALUE = "__HIVE_DEFAULT_PARTITION__"
"""What a folder is called whose column is null."""

_BATCH_FILE = re.compile(r"(?P<query>[0-9a-f-]{36})-(?P<batch>\d{6,})-\d{5,}\.parquet")


class ArchiveError(RuntimeError):
    """An archive that is not as its query left it."""


@dataclass(frozen=True, slots=True)
class File:
    """A file of an archive."""

    path: str
    """Within the archive."""
    size: int
    """Bytes."""

    @property
    def folder(self) -> str:
        return self.path.rpartition("/")[0]

    @property
    def name(self) -> str:
        return self.path.rpartition("/")[2]


@dataclass(frozen=True, slots=True)
class Move:
    """A file that is to be seen from now on."""

    staged: str
    target: str


# Batches -----------------------------------------------------------------------------------------


def staging(query: str, batch: int | None = None) -> str:
    """Where a query's batch is written, or all of them are."""
    return f"{STAGING}/{query}" if batch is None else f"{STAGING}/{query}/{batch:06d}"


def manifest(query: str, batch: int) -> str:
    """Where it is noted which files are a batch's."""
    return f"{BATCHES}/{query}/{batch:06d}.json"


def batch_of(path: str) -> int:
    """The batch that a manifest is of."""
    return int(path.rpartition("/")[2].removesuffix(".json"))


def batch_moves(query: str, batch: int, staged: Iterable[File]) -> list[Move]:
    """How a batch becomes visible. The same files always get the same names."""
    root = staging(query, batch) + "/"
    found = []
    for number, path in enumerate(sorted(f.path for f in staged if _is_data(f, root))):
        folder = path.removeprefix(root).rpartition("/")[0]
        found.append(Move(path, f"{folder}/{query}-{batch:06d}-{number:05d}.parquet"))
    return found


def _is_data(file: File, root: str) -> bool:
    inner = file.path.removeprefix(root)
    return inner.endswith(".parquet") and not any(p[0] in "._" for p in inner.split("/"))


def dump(noted: Mapping[str, Any]) -> bytes:
    """What is noted, as a file holds it."""
    return json.dumps({"version": 1, **noted}, indent=1).encode()


def load(data: bytes, path: str) -> dict[str, Any]:
    """What `dump` made. Raises ArchiveError for what it did not."""
    try:
        found = json.loads(data)
        version = found["version"]
    except (ValueError, KeyError, TypeError):
        raise ArchiveError(f"{path} is no note of simplebus's; expected JSON") from None
    if version != 1:
        raise ArchiveError(f"{path} is of version {version!r}, expected 1: simplebus is too old")
    return dict(found)


# Partitions --------------------------------------------------------------------------------------


def values(folder: str) -> dict[str, str | None]:
    """The columns that a folder's name says; None is null."""
    found: dict[str, str | None] = {}
    for part in folder.split("/"):
        name, sign, text = part.partition("=")
        if sign:
            found[name] = None if text == NO_VALUE else unquote(text)
    return found


def day(folder: str) -> date | None:
    """The day that a folder is of; None for no day."""
    text = values(folder).get("date")
    try:
        return date.fromisoformat(text) if text else None
    except ValueError:
        return None


# Compaction --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Merge:
    """Files of one folder that become fewer."""

    folder: str
    files: tuple[str, ...]
    outputs: int
    """How many they become."""
    size: int
    """Bytes, of all of them."""


def compaction_staging(run: str) -> str:
    """Where a compaction writes."""
    return f"{STAGING}/compaction-{run}"


def swap(run: str, number: int) -> str:
    """Where it is noted what a compaction is about to swap."""
    return f"{SWAPS}/{run}-{number:05d}.json"


def compacted(folder: str, run: str, number: int, staged: Sequence[str]) -> list[Move]:
    """How the files of a merge become visible."""
    return [
        Move(path, f"{folder}/compacted-{run}-{number:05d}-{index:05d}.parquet")
        for index, path in enumerate(sorted(staged))
    ]


def merges(
    files: Iterable[File],
    *,
    latest: Mapping[str, int],
    target_bytes: int,
    before: date | None = None,
) -> list[Merge]:
    """What is worth merging: small files of a folder, if there are several.

    `latest` has the number of each query's latest batch. That batch, which its query may repeat,
    is left alone; so is the last one that is seen of a query that `latest` does not know. `before`
    leaves out this day, later ones, and files of no day.
    """
    folders: dict[str, list[File]] = {}
    for file in files:
        if _is_data(file, ""):
            folders.setdefault(file.folder, []).append(file)
    found = []
    for folder, inside in sorted(folders.items()):
        when = day(folder)
        if before is not None and (when is None or when >= before):
            continue
        small = [file for file in finished(inside, latest) if file.size < target_bytes * 3 // 4]
        if len(small) > 1:
            size = sum(file.size for file in small)
            outputs = max(1, round(size / target_bytes))
            if outputs < len(small):
                paths = tuple(sorted(file.path for file in small))
                found.append(Merge(folder, paths, outputs, size))
    return found


def finished(files: Sequence[File], latest: Mapping[str, int]) -> list[File]:
    """Those that no query may write again."""
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
