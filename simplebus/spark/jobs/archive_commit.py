"""Crash-safe changes of an archive, as steps between which the program may die.

Every step is idempotent. The next run finishes a started change or removes it. Files are accessed
through ArchiveFiles, so tests can stop after each step.

A batch:  written below staging │ manifest written │ moved, file by file │ staging removed
  Spark repeats a batch unless it has recorded its end. A repeated batch first removes the files
  listed in its manifest. The previous batch was finished when this one started.

A swap:   written below staging │ manifest written │ moved │ replaced files removed │ manifest
removed
  The next run finishes a swap that has a manifest. Between moving and removing, readers see some
  messages twice; none is ever missing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from simplebus.spark.jobs.archive_layout import (
    BATCHES,
    SWAPS,
    ArchiveError,
    ArchiveFile,
    FileMove,
    batch_manifest,
    batch_moves,
    batch_number,
    dump_manifest,
    load_manifest,
    staging_folder,
)


class ArchiveFiles(Protocol):
    """Files of an archive; paths are relative to it."""

    def list_files(self, folder: str) -> list[ArchiveFile]:
        """Return all files below a folder; empty if it does not exist."""

    def read(self, path: str) -> bytes | None:
        """Return a file's content; None if it does not exist."""

    def write(self, path: str, data: bytes) -> None:
        """Create a file atomically. No file of this name exists."""

    def exists(self, path: str) -> bool:
        """Return True if a file or folder exists."""

    def move(self, path: str, target: str) -> None:
        """Rename a file and create its target folder. Raises OSError."""

    def remove(self, path: str) -> None:
        """Remove a file, or a folder with its content; do nothing if it does not exist."""


# Batches -----------------------------------------------------------------------------------------


def begin_batch(files: ArchiveFiles, query: str, batch: int) -> None:
    """Remove the remains of an earlier attempt, before the first batch of a run.

    Raises ArchiveError if the archive has later batches, because the checkpoint is outdated.
    """
    for manifest in list_manifests(files, f"{BATCHES}/{query}"):
        number = batch_number(manifest)
        if number > batch:
            raise ArchiveError(
                f"the archive has batch {number} of this query, which continues with batch {batch}"
                ": its checkpoint is older than the archive, and messages would be archived twice"
            )
        if number == batch:
            for path in read_manifest(files, manifest).get("files", ()):
                files.remove(path)
            files.remove(manifest)
    files.remove(staging_folder(query))


def publish_batch(files: ArchiveFiles, query: str, batch: int) -> list[FileMove]:
    """Make a batch's staged files visible. Return the moves; empty if the batch has no rows."""
    staged = files.list_files(staging_folder(query, batch))
    moves = batch_moves(query, batch, staged)
    if moves:
        manifest = {"query": query, "batch": batch, "files": [move.target for move in moves]}
        files.write(batch_manifest(query, batch), dump_manifest(manifest))
        for move in moves:
            files.move(move.staged, move.target)
    return moves


def finish_batch(files: ArchiveFiles, query: str, batch: int) -> None:
    """Remove the manifests of earlier batches and the staging folder."""
    found = {
        batch_number(manifest): manifest for manifest in list_manifests(files, f"{BATCHES}/{query}")
    }
    for number, manifest in found.items():
        if number < batch and batch in found:
            files.remove(manifest)
    files.remove(staging_folder(query))


def list_manifests(files: ArchiveFiles, folder: str) -> list[str]:
    """Return the manifests below a folder, without incompletely written ones."""
    listed = [file for file in files.list_files(folder) if not file.name.startswith(".")]
    return sorted(file.path for file in listed if file.name.endswith(".json"))


def read_manifest(files: ArchiveFiles, path: str) -> dict[str, Any]:
    """Return a manifest's content; empty if it does not exist. Raises ArchiveError."""
    data = files.read(path)
    return {} if data is None else load_manifest(data, path)


def latest_batches(files: ArchiveFiles) -> dict[str, int]:
    """Return the latest batch of each query. Only that one may be written again."""
    found: dict[str, int] = {}
    for manifest in list_manifests(files, BATCHES):
        query = manifest.split("/")[-2]
        found[query] = max(found.get(query, -1), batch_number(manifest))
    return found


# Swaps -------------------------------------------------------------------------------------------


def swap_files(
    files: ArchiveFiles, manifest: str, moves: Sequence[FileMove], removed: Iterable[str]
) -> None:
    """Replace files by staged ones."""
    content = {
        "moves": [[move.staged, move.target] for move in moves],
        "removed": list(removed),
    }
    files.write(manifest, dump_manifest(content))
    finish_swap(files, manifest)


def finish_swap(files: ArchiveFiles, manifest: str) -> None:
    """Finish a swap that has a manifest. Raises ArchiveError if its files are missing."""
    content = read_manifest(files, manifest)
    for staged, target in content.get("moves", ()):
        if not files.exists(staged):
            if not files.exists(target):
                raise ArchiveError(
                    f"{manifest} moves {staged} to {target}, but neither file exists: restore one "
                    "of them, or remove the manifest if the files that it replaces still exist"
                )
        elif files.exists(target):  # Some file systems move by copying and removing.
            files.remove(staged)
        else:
            try:
                files.move(staged, target)
            except OSError:
                if not files.exists(target):  # Not finished by another program.
                    raise
    for path in content.get("removed", ()):
        files.remove(path)
    files.remove(manifest)


def recover_swaps(files: ArchiveFiles) -> int:
    """Finish the swaps of interrupted programs. Return their number."""
    found = list_manifests(files, SWAPS)
    for manifest in found:
        finish_swap(files, manifest)
    return len(found)
