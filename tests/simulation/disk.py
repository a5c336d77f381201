"""Simulated disk that loses unsynced data, damages records, becomes full, fails and is slow.

The journal writes real files; `patch_journal` intercepts the few calls at which the process may
die. A process that dies leaves everything it has written. A power cut leaves the synced bytes and a
random part of the unsynced bytes: each page as written or as zeros, one page torn. Of created and
removed names the last ones may be lost, in order, per folder.

    │ synced │ page page page │ zeros │       after a cut: each page there or not, any size
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

from simplebus.storage import journal, recovery, repair
from simplebus.storage.append_file import AppendFile
from simplebus.storage.file_names import CLASSES, DROPPED
from simplebus.storage.records import Record, RecordKind, read_record
from tests.simulation.world import World

_PAGE_BYTES = 512  # A sector: smaller than a system page, so that records tear more often.


class SimulatedCrash(BaseException):
    """Kills the simulated process at this call."""


@dataclass
class _FileState:
    """State of one file."""

    spare: Path
    """Hard link by which the file is found after its removal."""
    folder: str
    durable: int = 0
    """Bytes that are synced."""
    is_named: bool = False
    """True if the name is synced."""
    ends: list[int] = field(default_factory=list)
    """Ends of its records."""


class SimulatedDisk:
    """Disk of one data directory."""

    def __init__(self, world: World, path: Path) -> None:
        self.path = path / "data"
        self.is_full = self.is_broken = False
        self.dies_in = 0
        """Calls until the process dies; 0 for never."""
        self.calls = 0
        self.torn: set[Path] = set()
        """Files with a partial record after a power cut."""
        self.world = world
        self._spares = path / "spares"
        self._spares.mkdir()
        self._files: dict[Path, _FileState] = {}
        self._open: list[_File] = []
        self._made = 0

    @contextlib.contextmanager
    def patch_journal(self) -> Iterator[None]:
        """Let journals use this disk within the `with` block."""
        with (
            mock.patch.object(journal, "AppendFile", self._open_file),
            mock.patch.object(
                journal, "_SYNCS_ALONE_MAX", 1 << 30
            ),  # The order of threads would not depend on the seed.
            mock.patch.object(journal, "sync_directory", self._sync_folder),
            mock.patch.object(recovery, "sync_directory", self._sync_folder),
            mock.patch.object(recovery, "sync_file", self._sync_path),
            mock.patch.object(repair, "sync_directory", self._sync_folder),
        ):
            yield

    def call(self, *, writes: bool = False) -> None:
        """Count a disk call. Raises OSError if it fails, SimulatedCrash if the process dies."""
        self.calls += 1
        if self.dies_in:
            self.dies_in -= 1
            if not self.dies_in:
                raise SimulatedCrash
        if self.is_full and writes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if self.is_broken and self.world.is_fault_due(0.5):
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    def _open_file(self, path: Path, *, end_mark: int = 0) -> AppendFile:
        self.call(writes=True)
        previous = self._files.pop(path, None)
        file = _File(path, end_mark=end_mark)
        file.disk = self
        self._made += 1
        spare = self._spares / str(self._made)
        if previous is not None:
            previous.spare.unlink()
        os.link(path, spare)
        self._files[path] = file.file_state = _FileState(spare, str(path.parent))
        self._open.append(file)
        return file

    def _sync_folder(self, folder: Path) -> None:
        self.call()
        name = str(folder)
        for path, file_state in list(self._files.items()):
            if file_state.folder == name:
                if os.path.exists(path):
                    file_state.is_named = True
                else:
                    self._forget(path)

    def _sync_path(self, path: Path) -> None:
        self.call()
        if path in self._files:
            self._files[path].durable = path.stat().st_size

    def _forget(self, path: Path) -> None:
        self._files.pop(path).spare.unlink()

    def close(self) -> None:
        """Close the files of a process that died."""
        for file in self._open:
            if not file.is_closed:
                file.close_unchanged()
        self._open.clear()
        self.dies_in = 0

    def cut_power(self) -> None:
        """Kill the process and lose unsynced data."""
        self.close()
        self.torn.clear()
        for folder in sorted({path.parent for path in self._files}):
            self._lose_names(folder)
        for path, file_state in self._files.items():
            self._lose(path, file_state)
            file_state.is_named = True
            file_state.durable = path.stat().st_size

    def damage_record(self, salt: int) -> tuple[int, range] | None:
        """Flip a bit of a random record that a later one of the same class follows, or fill the
        record with zeros, as a lost block is read.

        Args:
            salt: Salt of the journal.

        Returns:
            Class and sequences of the damaged record; None if there is no such record.
        """
        rng = self.world.random
        found: list[tuple[Path, Record]] = []
        folders = sorted((self.path / CLASSES).iterdir())
        if not folders:
            return None
        folder = rng.choice(folders)
        for path in sorted(folder.glob("*.log")):
            data, offset = memoryview(path.read_bytes()), 0
            while isinstance(record := read_record(data, offset, salt=salt), Record):
                found.append((path, record))
                offset = record.end
        if len(found) < 2:
            return None
        path, record = rng.choice(found[:-1])
        if record.kind != RecordKind.MESSAGES:
            return None
        damaged = bytearray(path.read_bytes())
        if rng.random() < 0.3:
            damaged[record.offset : record.end] = bytes(record.end - record.offset)
        else:
            damaged[rng.randrange(record.offset, record.end)] ^= 1 << rng.randrange(8)
        with path.open("r+b") as file:  # The file keeps its inode: other names see the damage.
            file.write(damaged)
        return record.class_id, range(record.first, record.last)

    def _lose_names(self, folder: Path) -> None:
        """Undo some of the last unsynced creations and removals in a folder."""
        rng = self.world.random
        known_paths = sorted(path for path in self._files if path.parent == folder)
        removed = [path for path in known_paths if not path.exists()]
        unsynced_paths = [
            path for path in known_paths if path.exists() and not self._files[path].is_named
        ]
        restored_count = rng.randint(0, len(removed)) if rng.random() < 0.5 else 0
        for index, path in enumerate(removed):
            file_state = self._files[path]
            if index >= len(removed) - restored_count and file_state.is_named:
                path.with_name(path.name + DROPPED).unlink(missing_ok=True)  # The spare hard link.
                os.link(file_state.spare, path)
            else:
                self._forget(path)
        lost_count = rng.randint(0, len(unsynced_paths)) if rng.random() < 0.5 else 0
        for path in unsynced_paths[len(unsynced_paths) - lost_count :]:
            path.unlink()
            self._forget(path)

    def _lose(self, path: Path, file_state: _FileState) -> None:
        """Lose a random part of the unsynced bytes of a file."""
        rng = self.world.random
        size = path.stat().st_size
        if size <= file_state.durable:
            return
        with path.open("r+b") as file:
            file.seek(file_state.durable)
            unsynced = bytearray(file.read().rstrip(b"\0"))
            unsynced_before = bytes(unsynced)
            loss = rng.choice(["all", "none", "front", "pages", "pages"])
            if loss == "none":
                unsynced.clear()
            elif loss == "front":
                del unsynced[rng.randrange(len(unsynced) + 1) :]
            elif loss == "pages":
                for offset in range(0, len(unsynced), _PAGE_BYTES):
                    end = min(offset + _PAGE_BYTES, len(unsynced))
                    if rng.random() < 0.5:
                        start = rng.choice([offset, rng.randrange(offset, end)])
                        unsynced[start:end] = bytes(end - start)
            if _is_torn(
                unsynced_before,
                bytes(unsynced),
                [end - file_state.durable for end in file_state.ends],
            ):
                self.torn.add(path)
            file.seek(file_state.durable)
            file.write(unsynced)
            file.truncate()
            if rng.random() < 0.5:
                file.truncate(size)


def _is_torn(unsynced_before: bytes, unsynced: bytes, ends: list[int]) -> bool:
    """Return True if part of a record follows the last intact one. Zeros count as the end."""
    unsynced = unsynced.rstrip(b"\0")
    if unsynced_before == unsynced:
        return False
    pairs = enumerate(zip(unsynced_before, unsynced, strict=False))
    differs = next((offset for offset, (a, b) in pairs if a != b), len(unsynced))
    return any(unsynced[max((end for end in ends if 0 <= end <= differs), default=0) :][:4])


class _File(AppendFile):
    """Append file that reports each call to the disk."""

    disk: SimulatedDisk
    file_state: _FileState
    is_closed = False

    def append(self, chunks: list[bytes], *, end_mark: int) -> None:
        try:
            self.disk.call(writes=True)
        except (OSError, SimulatedCrash):
            if self.disk.world.random.random() < 0.5:
                content = b"".join(chunks)
                half = content[: self.disk.world.random.randrange(len(content))]
                super().append([half], end_mark=self.end_mark)
            raise
        super().append(chunks, end_mark=end_mark)
        self.file_state.ends.append(self.written_bytes)

    def sync(self) -> None:
        self.disk.call()
        self.file_state.durable = self.written_bytes
        self.mark_synced()

    def discard_unsynced(self) -> None:
        self.disk.call()
        super().discard_unsynced()
        self.file_state.ends = [end for end in self.file_state.ends if end <= self.written_bytes]

    def close_unchanged(self) -> None:
        self.is_closed = True
        super().close_unchanged()

    def close(self) -> None:
        self.is_closed = True
        super().close()
