"""Directory of a journal: format, identity and lock.

A directory that was not created by simplebus, or has another version, is refused and not changed.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import tempfile
import zlib
from dataclasses import dataclass
from pathlib import Path

import msgspec

from simplebus.storage.append_file import sync_directory
from simplebus.storage.errors import JournalError, JournalInUseError
from simplebus.storage.file_names import CLASSES, DRAFT, LOCK, STAMP, STATE

FORMAT = "simplebus journal"
VERSION = 2
_DRAFT = STAMP + DRAFT
_BOOT = Path("/proc/sys/kernel/random/boot_id")
_EARLY = {LOCK, _DRAFT}
"""Files that may exist before the stamp."""


class Stamp(msgspec.Struct, frozen=True):
    """Content of the file that identifies a journal."""

    format: str
    version: int
    bus: str = ""
    """Identity of the bus."""
    salt: int = 0
    """Salt of the records' checksums."""
    checksum: int | None = None
    """Checksum of the other fields; None if an earlier version of simplebus wrote the file."""

    def compute_checksum(self) -> int:
        """Return the checksum of the other fields."""
        return zlib.crc32(f"{self.format} {self.version} {self.bus} {self.salt}".encode())


@dataclass(frozen=True, slots=True)
class JournalDirectory:
    """Directory of a journal, locked or for reading."""

    path: Path
    bus_id: str
    lock: int | None = None
    """File descriptor that holds the lock; None if it is open for reading only."""
    boot: str = ""
    """Boot id of the system; empty if unknown."""
    salt: int = 0
    """Salt of the records' checksums."""

    def close(self) -> None:
        """Release the lock."""
        if self.lock is not None:
            os.close(self.lock)


def open_directory(path: Path) -> JournalDirectory:
    """Open an existing journal for reading, without a lock. Raises JournalError."""
    stamp = _read_stamp(path)
    if stamp is None:
        raise JournalError(f"{path} is not a journal: it contains no {STAMP}")
    for folder in (CLASSES, STATE):
        if not (path / folder).is_dir():
            raise JournalError(f"{path} is incomplete: it contains no directory {folder!r}")
    return JournalDirectory(path, stamp.bus, boot=_boot(), salt=stamp.salt)


def lock_directory(path: Path, *, new_bus: str) -> JournalDirectory:
    """Lock a journal for writing. Create it, for the bus `new_bus`, if it does not exist.

    Raises:
        JournalError: Another server uses the directory, it belongs to another program or another
            version, it is damaged, or a system call failed.
    """
    try:
        if not path.is_dir():
            path.mkdir(parents=True, mode=0o750)
            sync_directory(path.parent)
        stamp = _stamp_or_empty(path)
        lock = lock_path(path)
        try:
            if stamp is None:  # Written first, so that a crash leaves a valid journal.
                stamp = Stamp(FORMAT, VERSION, new_bus, secrets.randbelow((1 << 32) - 1) + 1)
                _write_stamp(path, stamp)
            for folder in (CLASSES, STATE):
                if not (path / folder).is_dir():
                    (path / folder).mkdir(mode=0o750)
                    sync_directory(path)
        except BaseException:
            os.close(lock)
            raise
    except OSError as error:
        raise JournalError(f"cannot use {path} as a journal: {error.strerror}") from None
    return JournalDirectory(path, stamp.bus, lock, _boot(), stamp.salt)


def lock_existing(path: Path) -> JournalDirectory:
    """Lock a journal that exists. Raises JournalError, for example if a server uses it."""
    return lock_directory(path, new_bus=open_directory(path).bus_id)


def check_directory(path: Path) -> None:
    """Check that `lock_directory` would succeed, without lasting changes. Raises JournalError."""
    try:
        if path.exists():
            if not path.is_dir():
                raise JournalError(f"{path} is not a directory")
            _stamp_or_empty(path)
            if not os.access(path, os.W_OK | os.X_OK):
                raise JournalError(f"{path} is not writable for this user")
            return
        place = next(parent for parent in path.absolute().parents if parent.exists())
        if not place.is_dir():
            raise JournalError(f"{place} is not a directory")
        # Try it: for root, os.access succeeds even where no file can be created, as in /proc.
        with tempfile.TemporaryDirectory(prefix=".simplebus-", dir=place):
            pass
    except OSError as error:
        raise JournalError(f"cannot create {path}: {error.strerror}") from None


def _stamp_or_empty(path: Path) -> Stamp | None:
    stamp = _read_stamp(path)
    if stamp is None:
        file_names = sorted(file.name for file in path.iterdir() if file.name not in _EARLY)
        if file_names:
            raise JournalError(
                f"{path} is not a journal: it contains {file_names[0]!r} but no {STAMP}; "
                "a new journal needs an empty directory"
            )
    return stamp


def _boot() -> str:
    with contextlib.suppress(OSError):
        return _BOOT.read_text("ascii").strip()
    return ""


def lock_path(path: Path) -> int:
    """Lock a directory and return the file descriptor that holds the lock.

    Raises:
        JournalInUseError: Another process holds the lock.
    """
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
        raise JournalError(f"cannot read {path / STAMP}: {error.strerror}") from None
    try:
        stamp = msgspec.json.decode(text, type=Stamp)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise JournalError(f"{path / STAMP} is invalid: {error}") from None
    if stamp.format != FORMAT:
        raise JournalError(f"{path} has the format {stamp.format!r}, expected {FORMAT!r}")
    if stamp.version != VERSION:
        age = "a newer" if stamp.version > VERSION else "an older"
        raise JournalError(
            f"{path} has version {stamp.version}, expected version {VERSION}; it was written by "
            f"{age} simplebus: use that version, or export the messages with it"
        )
    if not stamp.salt or stamp.checksum not in (None, stamp.compute_checksum()):
        raise JournalError(
            f"{path / STAMP} is damaged: its checksum does not match; restore it from a backup of "
            "this journal"
        )
    return stamp


def _write_stamp(path: Path, stamp: Stamp) -> None:
    """Write the stamp atomically."""
    draft = path / _DRAFT
    with contextlib.suppress(FileNotFoundError):
        draft.unlink()
    with draft.open("xb") as file:
        stamp = msgspec.structs.replace(stamp, checksum=stamp.compute_checksum())
        file.write(msgspec.json.encode(stamp) + b"\n")
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path / STAMP)
    sync_directory(path)
