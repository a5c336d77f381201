"""A disk that loses what was not synced, is full for a while, fails, and is slow.

Rule 1: the files are real, and the journal writes them itself: see `under_the_journal` for the few
calls that go through here. Each of them is a place where the process may die.
Rule 2: a process that dies leaves all that it has written. A power cut leaves what was synced, and
of everything else what chance leaves: each page as it was written or as zeros, one of them torn;
names that were made or removed, the last ones not, in each folder: systems keep that order.

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

from simplebus.storage import journal, recovery
from simplebus.storage.append_file import AppendFile
from simplebus.storage.file_names import DROPPED
from tests.simulation.world import World

_PAGE_BYTES = 512  # A sector: less than a page of the system's, more places to tear.


class Crash(BaseException):
    """The process dies here."""


@dataclass
class _Kept:
    """What is known of one file."""

    spare: Path
    """Another name of it, by which it is found when it was removed."""
    durable: int = 0
    """So much of it is on disk for good."""
    is_named: bool = False
    """Whether its name is."""
    ends: list[int] = field(default_factory=list)
    """Where its records end."""


class Disk:
    """One directory's."""

    def __init__(self, world: World, path: Path) -> None:
        self.path = path / "data"
        self.is_full = self.is_broken = False
        self.dies_in = 0
        """Calls until the process dies; 0 for not at all."""
        self.calls = 0
        self.torn: set[Path] = set()
        """Files in which something that is no whole record is left of what was not synced."""
        self._world = world
        self._spares = path / "spares"
        self._spares.mkdir()
        self._files: dict[Path, _Kept] = {}
        self._open: list[_File] = []
        self._made = 0

    @contextlib.contextmanager
    def under_the_journal(self) -> Iterator[None]:
        """Have every journal write here meanwhile."""
        with (
            mock.patch.object(journal, "AppendFile", self._open_file),
            mock.patch.object(journal, "_SYNCS_ALONE_MAX", 1 << 30),  # Threads obey no seed.
            mock.patch.object(journal, "sync_folder", self._sync_folder),
            mock.patch.object(recovery, "sync_folder", self._sync_folder),
            mock.patch.object(recovery, "sync_file", self._sync_path),
        ):
            yield

    def call(self, *, writes: bool = False) -> None:
        """Something is asked of the disk. Raises OSError when it fails, Crash when the process
        dies."""
        self.calls += 1
        if self.dies_in:
            self.dies_in -= 1
            if not self.dies_in:
                raise Crash
        if self.is_full and writes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if self.is_broken and self._world.chance(0.5):
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    def _open_file(self, path: Path, *, mark: int = 0) -> AppendFile:
        self.call(writes=True)
        former = self._files.pop(path, None)
        file = _File(path, mark=mark)
        file.disk = self
        self._made += 1
        spare = self._spares / str(self._made)
        if former is not None:
            former.spare.unlink()
        os.link(path, spare)
        self._files[path] = file.kept = _Kept(spare)
        self._open.append(file)
        return file

    def _sync_folder(self, folder: Path) -> None:
        self.call()
        for path, kept in list(self._files.items()):
            if path.parent == folder:
                if path.exists():
                    kept.is_named = True
                else:
                    self._forget(path)

    def _sync_path(self, path: Path) -> None:
        self.call()
        if path in self._files:
            self._files[path].durable = path.stat().st_size

    def _forget(self, path: Path) -> None:
        self._files.pop(path).spare.unlink()

    def close(self) -> None:
        """The process is gone: what it had open is closed, as it is."""
        for file in self._open:
            if not file.is_closed:
                file.abandon()
        self._open.clear()
        self.dies_in = 0

    def cut_power(self) -> None:
        """The process is gone, and so is what was not synced."""
        self.close()
        self.torn.clear()
        for folder in sorted({path.parent for path in self._files}):
            self._lose_names(folder)
        for path, kept in self._files.items():
            self._lose(path, kept)
            kept.is_named = True
            kept.durable = path.stat().st_size

    def _lose_names(self, folder: Path) -> None:
        """Of the names that were made and removed in a folder the last ones were not, perhaps."""
        chance = self._world.random
        known = sorted(path for path in self._files if path.parent == folder)
        removed = [path for path in known if not path.exists()]
        made = [path for path in known if path.exists() and not self._files[path].is_named]
        back = chance.randint(0, len(removed)) if chance.random() < 0.5 else 0
        for at, path in enumerate(removed):
            kept = self._files[path]
            if at >= len(removed) - back and kept.is_named:
                path.with_name(path.name + DROPPED).unlink(missing_ok=True)  # Its other name.
                os.link(kept.spare, path)
            else:
                self._forget(path)
        gone = chance.randint(0, len(made)) if chance.random() < 0.5 else 0
        for path in made[len(made) - gone :]:
            path.unlink()
            self._forget(path)

    def _lose(self, path: Path, kept: _Kept) -> None:
        """Of what was not synced any part may be there."""
        chance = self._world.random
        size = path.stat().st_size
        if size <= kept.durable:
            return
        with path.open("r+b") as file:
            file.seek(kept.durable)
            rest = bytearray(file.read().rstrip(b"\0"))
            whole = bytes(rest)
            way = chance.choice(["all", "none", "front", "pages", "pages"])
            if way == "none":
                rest.clear()
            elif way == "front":
                del rest[chance.randrange(len(rest) + 1) :]
            elif way == "pages":
                for at in range(0, len(rest), _PAGE_BYTES):
                    end = min(at + _PAGE_BYTES, len(rest))
                    if chance.random() < 0.5:
                        begin = chance.choice([at, chance.randrange(at, end)])
                        rest[begin:end] = bytes(end - begin)
            if _is_torn(whole, bytes(rest), [end - kept.durable for end in kept.ends]):
                self.torn.add(path)
            file.seek(kept.durable)
            file.write(rest)
            file.truncate()
            if chance.random() < 0.5:
                file.truncate(size)


def _is_torn(whole: bytes, rest: bytes, ends: list[int]) -> bool:
    """Whether, behind the last record that is as it was, there is part of another one. What begins
    with zeros is taken for the end."""
    rest = rest.rstrip(b"\0")
    if whole == rest:
        return False
    pairs = enumerate(zip(whole, rest, strict=False))
    differs = next((at for at, (a, b) in pairs if a != b), len(rest))
    return any(rest[max((end for end in ends if 0 <= end <= differs), default=0) :][:4])


class _File(AppendFile):
    """One that is seen at each call."""

    disk: Disk
    kept: _Kept
    is_closed = False

    def append(self, pieces: list[bytes], *, mark: int) -> None:
        try:
            self.disk.call(writes=True)
        except (OSError, Crash):
            if self.disk._world.random.random() < 0.5:
                whole = b"".join(pieces)
                half = whole[: self.disk._world.random.randrange(len(whole))]
                super().append([half], mark=self.mark)
            raise
        super().append(pieces, mark=mark)
        self.kept.ends.append(self.used)

    def sync(self) -> None:
        self.disk.call()
        self.kept.durable = self.used
        self.settle()

    def withdraw(self) -> None:
        self.disk.call()
        super().withdraw()
        self.kept.ends = [end for end in self.kept.ends if end <= self.used]

    def abandon(self) -> None:
        self.is_closed = True
        super().abandon()

    def close(self) -> None:
        self.is_closed = True
        super().close()
