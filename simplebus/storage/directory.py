"""The directory of a journal: whose it is, and that it is used by one server at a time.

Rule 1: a directory that is not plainly ours, or is of a later format, is refused and not touched.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

import msgspec

from simplebus.storage.append_file import sync_folder
from simplebus.storage.errors import JournalError, JournalInUseError
from simplebus.storage.file_names import CLASSES, LOCK, STAMP, STATE

FORMAT = "simplebus journal"
VERSION = 1
_DRAFT = STAMP + ".new"
_BOOT = Path("/proc/sys/kernel/random/boot_id")
_EARLY = {LOCK, _DRAFT}
"""What may be there before the stamp is."""


class Stamp(msgspec.Struct, frozen=True):
    """What a directory says of itself."""

    format: str
    version: int
    bus: str = ""
    """Identity of the bus whose memory this is."""


@dataclass(frozen=True, slots=True)
class Directory:
    """One that is ours. With `lock`, nobody else's until `close`."""

    path: Path
    bus: str
    lock: int | None = None
    """The descriptor that holds the lock."""
    boot: str = ""
    """Which run of the machine this is; empty where the system does not say."""

    def close(self) -> None:
        """Let others have it."""
        if self.lock is not None:
            os.close(self.lock)


def look(path: Path) -> Directory:
    """A directory that is there, without a lock: to be read. Raises JournalError."""
    stamp = _read_stamp(path)
    if stamp is None:
        raise JournalError(f"{path} holds no journal: there is no {STAMP} in it")
    return Directory(path, stamp.bus)


def take(path: Path, *, new_bus: str) -> Directory:
    """A directory to be used, made if it is not there; a new one is that of the bus `new_bus`.

    Raises JournalError: it is used by another server, is another program's or a later version's, or
    the system does not allow it.
    """
    try:
        if not path.is_dir():
            path.mkdir(parents=True, mode=0o750)
            sync_folder(path.parent)
        stamp = _stamp_or_empty(path)
        lock = _lock(path)
        try:
            if stamp is None:  # Comes before all else: what a crash leaves here is ours.
                stamp = Stamp(FORMAT, VERSION, new_bus)
                _write_stamp(path, stamp)
            for folder in (CLASSES, STATE):
                if not (path / folder).is_dir():
                    (path / folder).mkdir(mode=0o750)
                    sync_folder(path)
        except BaseException:
            os.close(lock)
            raise
    except OSError as error:
        raise JournalError(f"{path} cannot be used as a journal: {error.strerror}") from None
    return Directory(path, stamp.bus, lock, _boot())


def check(path: Path) -> None:
    """Whether `take` may have it, as far as that is seen without a change that stays.

    Raises JournalError.
    """
    try:
        if path.exists():
            if not path.is_dir():
                raise JournalError(f"{path} is no directory")
            _stamp_or_empty(path)
            if not os.access(path, os.W_OK | os.X_OK):
                raise JournalError(f"{path} is closed to this user")
            return
        place = next(each for each in path.absolute().parents if each.exists())
        if not place.is_dir():
            raise JournalError(f"{place} is no directory")
        # Tried, not asked: root is told that it may, also where nobody can, as in /proc.
        with tempfile.TemporaryDirectory(prefix=".simplebus-", dir=place):
            pass
    except OSError as error:
        raise JournalError(f"{path} cannot be made: {error.strerror}") from None


def _stamp_or_empty(path: Path) -> Stamp | None:
    stamp = _read_stamp(path)
    if stamp is None:
        others = sorted(each.name for each in path.iterdir() if each.name not in _EARLY)
        if others:
            raise JournalError(
                f"{path} is no journal: it holds {others[0]!r}, and no {STAMP}; "
                "a new journal needs an empty directory"
            )
    return stamp


def _boot() -> str:
    with contextlib.suppress(OSError):
        return _BOOT.read_text("ascii").strip()
    return ""


def _lock(path: Path) -> int:
    lock = os.open(path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o640)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.read(lock, 20).decode("ascii", "replace").strip()
        os.close(lock)
        raise JournalInUseError(
            f"{path} is used by another server" + (f", process {holder}" if holder else "")
        ) from None
    os.pwrite(lock, b"%-10d\n" % os.getpid(), 0)
    return lock


def _read_stamp(path: Path) -> Stamp | None:
    try:
        text = (path / STAMP).read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise JournalError(f"{path / STAMP} cannot be read: {error.strerror}") from None
    try:
        stamp = msgspec.json.decode(text, type=Stamp)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise JournalError(f"{path / STAMP} is no stamp of a journal: {error}") from None
    if stamp.format != FORMAT:
        raise JournalError(f"{path} is of the format {stamp.format!r}, expected {FORMAT!r}")
    if stamp.version != VERSION:
        raise JournalError(
            f"{path} is of version {stamp.version}; this program knows version {VERSION}"
            + (", so a later one has written it" if stamp.version > VERSION else "")
        )
    return stamp


def _write_stamp(path: Path, stamp: Stamp) -> None:
    """All of it or nothing."""
    draft = path / _DRAFT
    with contextlib.suppress(FileNotFoundError):
        draft.unlink()
    with draft.open("xb") as file:
        file.write(msgspec.json.encode(stamp) + b"\n")
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path / STAMP)
    sync_folder(path)
