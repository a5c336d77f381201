"""Reserved disk space, so that a full disk can still record the removal of segments.

The space is released when the disk is full, and reserved again before more messages are accepted.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

from simplebus.storage.append_file import DISK_FULL_ERRORS
from simplebus.storage.file_names import RESERVE

_BYTES = 16 * 1024 * 1024
# On a small disk, this part of the disk, but at least the minimum.
_DISK_DIVISOR = 16
_BYTES_MIN = 256 * 1024


class DiskReserve:
    """Reserve file in a locked journal directory."""

    def __init__(self, directory: Path, size: int = _BYTES) -> None:
        self._path = directory / RESERVE
        self._size = size
        self.is_reserved = False
        self.is_disk_full = False
        """True if the last reservation failed because the disk is full."""

    def reserve(self) -> bool:
        """Reserve the space if the disk has it. Returns True if it is reserved."""
        if self.is_reserved:
            return True
        self.is_disk_full = False
        try:
            descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o640)
            try:
                os.posix_fallocate(descriptor, 0, self._size_on(descriptor))
                self.is_reserved = True
            except OSError as error:
                if error.errno in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
                    return False  # The file system does not support preallocation.
                self._path.unlink(missing_ok=True)
                raise
            finally:
                os.close(descriptor)
        except OSError as error:
            self.is_disk_full = error.errno in DISK_FULL_ERRORS
            return False
        return self.is_reserved

    def _size_on(self, descriptor: int) -> int:
        disk = os.fstatvfs(descriptor)
        return min(self._size, max(_BYTES_MIN, disk.f_blocks * disk.f_frsize // _DISK_DIVISOR))

    def release(self) -> bool:
        """Release the space. Returns True if it was reserved."""
        was_reserved, self.is_reserved = self.is_reserved, False
        try:
            self._path.unlink(missing_ok=True)
        except OSError:
            return False
        return was_reserved
