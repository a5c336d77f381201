"""One file that grows at its end.

Rule 1: what `sync` has not returned for is in doubt. `withdraw` cuts it off, and it may be written
again: pages that failed to reach the disk are not trusted, they are written anew.
Rule 2: space is taken in front of what is written, so that a sync has no size to note, and a full
disk is noticed before anything is half written.

    │ synced │ written, in doubt │ zeros │
    0        synced              used    allocated
"""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path

_STEP_BYTES_MIN = 64 * 1024
_STEP_BYTES_MAX = 16 * 1024 * 1024
_PAGE_BYTES = 4096
# Where there are more, putting them together costs less than the system's looking at each.
_PIECES_MAX = 64
FULL = {errno.ENOSPC, errno.EDQUOT}
"""What the system says of a full disk."""
_NO_ALLOCATION = {errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS}


class AppendFile:
    """A new, empty file. Every method raises OSError as the system does.

    A mark says what it holds: all that was to be written up to that number, of its owner's choice.
    """

    def __init__(self, path: Path, *, mark: int = 0) -> None:
        self.path = path
        self.used = 0
        self.synced = 0
        self.mark = self._synced_mark = mark
        self._allocated = 0
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o640)

    @property
    def is_dirty(self) -> bool:
        """Whether something in it is in doubt."""
        return self.used > self.synced

    def append(self, pieces: list[bytes], *, mark: int) -> None:
        """Write these pieces behind all that was written before."""
        size = sum(map(len, pieces))
        self._allocate(self.used + size)
        end = self.used + size
        if len(pieces) <= _PIECES_MAX:
            self.used += os.pwritev(self._descriptor, pieces, self.used)
        if self.used < end:
            view = memoryview(b"".join(pieces))[self.used - end :]
            while view:
                count = os.pwrite(self._descriptor, view, self.used)
                self.used += count
                view = view[count:]
        self.mark = mark

    def sync(self) -> None:
        """Have all of it on disk."""
        os.fdatasync(self._descriptor)
        self.settle()

    def settle(self) -> None:
        """What was written needs no sync: that the system has it is enough."""
        self.synced, self._synced_mark = self.used, self.mark

    def withdraw(self) -> None:
        """Cut off what is in doubt."""
        os.ftruncate(self._descriptor, self.synced)
        self.used = self._allocated = self.synced
        self.mark = self._synced_mark

    def abandon(self) -> None:
        """Leave it as it is."""
        os.close(self._descriptor)

    def close(self) -> None:
        """Give back the space that was not needed."""
        try:
            with contextlib.suppress(OSError):
                os.ftruncate(self._descriptor, self.used)
        finally:
            os.close(self._descriptor)

    def _allocate(self, size: int) -> None:
        if size <= self._allocated:
            return
        step = min(max(self._allocated, _STEP_BYTES_MIN), _STEP_BYTES_MAX)
        until = -(-max(size, self._allocated + step) // _PAGE_BYTES) * _PAGE_BYTES
        try:
            self._allocate_until(until)
        except OSError as error:
            if error.errno not in FULL:
                raise
            self._allocate_until(-(-size // _PAGE_BYTES) * _PAGE_BYTES)  # No more than is needed.

    def _allocate_until(self, until: int) -> None:
        try:
            os.posix_fallocate(self._descriptor, self._allocated, until - self._allocated)
        except OSError as error:
            if error.errno not in _NO_ALLOCATION:
                raise
        self._allocated = until


def sync_folder(path: Path) -> None:
    """Have the names in a folder on disk. Raises OSError."""
    sync_file(path)


def sync_file(path: Path) -> None:
    """Have on disk what is in a file that is there. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
