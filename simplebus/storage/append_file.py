"""File that grows at its end.

Data that is not synced is in doubt: after an error it is cut off and written again, because pages
that failed to reach the disk cannot be trusted. Disk space is allocated ahead, so that a sync does
not have to update the file size, and a full disk is noticed before a record is half written.

    │ synced │ written, in doubt │ zeros │
    0        synced_bytes        written_bytes    allocated
"""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path

_STEP_BYTES_MIN = 64 * 1024
_STEP_BYTES_MAX = 16 * 1024 * 1024
_PAGE_BYTES = 4096
# With more pieces, joining them is cheaper than a vectored write.
_PIECES_MAX = 64
DISK_FULL_ERRORS = {errno.ENOSPC, errno.EDQUOT}
"""Error numbers of a full disk."""
_NO_ALLOCATION = {errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS}


class AppendFile:
    """A new, empty file. Every method raises OSError if the system call fails.

    `end_mark` is a number of the owner's choice that describes the written data, for example the
    last sequence.
    """

    def __init__(self, path: Path, *, end_mark: int = 0) -> None:
        self.path = path
        self.written_bytes = 0
        self.synced_bytes = 0
        self.end_mark = self._synced_mark = end_mark
        self._allocated_bytes = 0
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o640)

    @property
    def has_unsynced_data(self) -> bool:
        """True if written data is in doubt."""
        return self.written_bytes > self.synced_bytes

    def append(self, pieces: list[bytes], *, end_mark: int) -> None:
        """Write pieces at the end."""
        size = sum(map(len, pieces))
        self._allocate(self.written_bytes + size)
        end = self.written_bytes + size
        if len(pieces) <= _PIECES_MAX:
            self.written_bytes += os.pwritev(self._descriptor, pieces, self.written_bytes)
        if self.written_bytes < end:
            view = memoryview(b"".join(pieces))[self.written_bytes - end :]
            while view:
                count = os.pwrite(self._descriptor, view, self.written_bytes)
                self.written_bytes += count
                view = view[count:]
        self.end_mark = end_mark

    def sync(self) -> None:
        """Sync the written data to disk."""
        os.fdatasync(self._descriptor)
        self.mark_synced()

    def mark_synced(self) -> None:
        """Treat the written data as safe without a sync."""
        self.synced_bytes, self._synced_mark = self.written_bytes, self.end_mark

    def discard_unsynced(self) -> None:
        """Cut off the data that is in doubt."""
        os.ftruncate(self._descriptor, self.synced_bytes)
        self.written_bytes = self._allocated_bytes = self.synced_bytes
        self.end_mark = self._synced_mark

    def close_unchanged(self) -> None:
        """Close the file without returning allocated space."""
        os.close(self._descriptor)

    def close(self) -> None:
        """Close the file and return unused allocated space."""
        try:
            with contextlib.suppress(OSError):
                os.ftruncate(self._descriptor, self.written_bytes)
        finally:
            os.close(self._descriptor)

    def _allocate(self, size: int) -> None:
        if size <= self._allocated_bytes:
            return
        step = min(max(self._allocated_bytes, _STEP_BYTES_MIN), _STEP_BYTES_MAX)
        end = -(-max(size, self._allocated_bytes + step) // _PAGE_BYTES) * _PAGE_BYTES
        try:
            self._allocate_up_to(end)
        except OSError as error:
            if error.errno not in DISK_FULL_ERRORS:
                raise
            self._allocate_up_to(-(-size // _PAGE_BYTES) * _PAGE_BYTES)  # The minimum.

    def _allocate_up_to(self, end: int) -> None:
        try:
            os.posix_fallocate(self._descriptor, self._allocated_bytes, end - self._allocated_bytes)
        except OSError as error:
            if error.errno not in _NO_ALLOCATION:
                raise
        self._allocated_bytes = end


def sync_directory(path: Path) -> None:
    """Sync the names in a directory to disk. Raises OSError."""
    sync_file(path)


def sync_file(path: Path) -> None:
    """Sync the content of an existing file to disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
