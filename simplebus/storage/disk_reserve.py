"""Space that is kept back: a full disk can still take what lets go of segments.

Rule 1: it is given up when the disk is full, and taken again before anything else is accepted.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

from simplebus.storage.append_file import FULL
from simplebus.storage.file_names import RESERVE

_BYTES = 16 * 1024 * 1024
# Of a small disk it takes one part in so many, but no less than this.
_PART = 16
_BYTES_MIN = 256 * 1024


class Reserve:
    """Of a directory that is taken."""

    def __init__(self, directory: Path, size: int = _BYTES) -> None:
        self._path = directory / RESERVE
        self._size = size
        self.is_there = False
        self.finds_no_room = False
        """Whether it could not be taken because the disk is full."""

    def take(self) -> bool:
        """Have it, if the disk has so much. Returns whether it is there."""
        if self.is_there:
            return True
        self.finds_no_room = False
        try:
            descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o640)
            try:
                os.posix_fallocate(descriptor, 0, self._size_on(descriptor))
                self.is_there = True
            except OSError as error:
                if error.errno in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
                    return False  # Nothing can be kept back here.
                self._path.unlink(missing_ok=True)
                raise
            finally:
                os.close(descriptor)
        except OSError as error:
            self.finds_no_room = error.errno in FULL
            return False
        return self.is_there

    def _size_on(self, descriptor: int) -> int:
        disk = os.fstatvfs(descriptor)
        return min(self._size, max(_BYTES_MIN, disk.f_blocks * disk.f_frsize // _PART))

    def give_up(self) -> bool:
        """Let others have the space. Returns whether there was any."""
        was_there, self.is_there = self.is_there, False
        try:
            self._path.unlink(missing_ok=True)
        except OSError:
            return False
        return was_there
