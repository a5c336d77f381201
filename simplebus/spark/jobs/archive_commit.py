"""How an archive changes: steps after each of which the program may die.

Rule 1: every step can be done again, by whoever comes next, with the same outcome. What comes next
does what is left to be done, or removes what should not have been begun.
Rule 2: files are reached through `Files`, so that the steps are the same wherever the files are,
and a test can end after each of them.

A batch: written below staging │ noted │ moved, file by file │ staging removed
  Spark begins the batch again unless it has noted itself that the batch is done. What was moved by
  an earlier attempt is removed then, by the note. The batch before was done when this one began.

A swap:  written below staging │ noted │ moved │ what is replaced is removed │ note removed
  Whoever finds a note finishes the swap. Between moving and removing, a program that reads sees
  some messages twice; none is ever missing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from simplebus.spark.jobs.archive_layout import (
    BATCHES,
    SWAPS,
    ArchiveError,
    File,
    Move,
    batch_moves,
    batch_of,
    dump,
    load,
    manifest,
    staging,
)


class Files(Protocol):
    """The files of an archive; paths are within it."""

    def listed(self, folder: str) -> list[File]:
        """All files below a folder; none when it is not there."""

    def read(self, path: str) -> bytes | None:
        """What is in a file; None when it is not there."""

    def write(self, path: str, data: bytes) -> None:
        """Make a file that is there as a whole or not at all. There is none of that name."""

    def exists(self, path: str) -> bool:
        """Whether there is a file or folder of this name."""

    def move(self, path: str, target: str) -> None:
        """Rename a file, into a folder that is made if need be. Raises OSError."""

    def remove(self, path: str) -> None:
        """Remove a file, or a folder with all that is in it; nothing when it is not there."""


# Batches -----------------------------------------------------------------------------------------


def begin(files: Files, query: str, batch: int) -> None:
    """Before the first batch that a query writes: remove what an earlier attempt of it left.

    Raises ArchiveError when the archive is ahead of the query: its checkpoint is an older one.
    """
    for note in notes(files, f"{BATCHES}/{query}"):
        number = batch_of(note)
        if number > batch:
            raise ArchiveError(
                f"the archive has batch {number} of this query, which goes on with batch {batch}: "
                "its checkpoint is older than the archive, and messages would be there twice"
            )
        if number == batch:
            for path in noted(files, note).get("files", ()):
                files.remove(path)
            files.remove(note)
    files.remove(staging(query))


def publish(files: Files, query: str, batch: int) -> list[Move]:
    """Make what was written below staging visible. Nothing was written: nothing is done."""
    staged = files.listed(staging(query, batch))
    moves = batch_moves(query, batch, staged)
    if moves:
        note = {"query": query, "batch": batch, "files": [move.target for move in moves]}
        files.write(manifest(query, batch), dump(note))
        for move in moves:
            files.move(move.staged, move.target)
    return moves


def end(files: Files, query: str, batch: int) -> None:
    """After a batch: forget those before it, and where it was written."""
    found = {batch_of(note): note for note in notes(files, f"{BATCHES}/{query}")}
    for number, note in found.items():
        if number < batch and batch in found:
            files.remove(note)
    files.remove(staging(query))


def notes(files: Files, folder: str) -> list[str]:
    """The notes below a folder, without those that never came to be."""
    listed = [file for file in files.listed(folder) if not file.name.startswith(".")]
    return sorted(file.path for file in listed if file.name.endswith(".json"))


def noted(files: Files, path: str) -> dict[str, Any]:
    """What a note says; empty when it is gone. Raises ArchiveError."""
    data = files.read(path)
    return {} if data is None else load(data, path)


def latest_batches(files: Files) -> dict[str, int]:
    """The latest batch of each query. It may be written again; those before it are not."""
    found: dict[str, int] = {}
    for note in notes(files, BATCHES):
        query = note.split("/")[-2]
        found[query] = max(found.get(query, -1), batch_of(note))
    return found


# Swaps -------------------------------------------------------------------------------------------


def swap(files: Files, note: str, moves: Sequence[Move], removed: Iterable[str]) -> None:
    """Replace files by what was written instead of them."""
    said = {
        "moves": [[move.staged, move.target] for move in moves],
        "removed": list(removed),
    }
    files.write(note, dump(said))
    finish(files, note)


def finish(files: Files, note: str) -> None:
    """Do what is left of a swap. Raises ArchiveError when that cannot be."""
    said = noted(files, note)
    for staged, target in said.get("moves", ()):
        if not files.exists(staged):
            if not files.exists(target):
                raise ArchiveError(
                    f"{note} says that {staged} becomes {target}, and neither is there: remove "
                    "the note if what it replaces is still there, or bring one of them back"
                )
        elif files.exists(target):  # Some file systems copy, and then remove.
            files.remove(staged)
        else:
            try:
                files.move(staged, target)
            except OSError:
                if not files.exists(target):  # Nobody else finished it meanwhile.
                    raise
    for path in said.get("removed", ()):
        files.remove(path)
    files.remove(note)


def recover(files: Files) -> int:
    """Finish the swaps that somebody could not. Returns how many there were."""
    found = notes(files, SWAPS)
    for note in found:
        finish(files, note)
    return len(found)
