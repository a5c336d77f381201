"""Publishes each line that is written to a file.

    module = "tail"
    settings = { path = "/var/log/app.log", start = "end", remember = "/var/lib/gateway/app.place" }

The content is the line without its end; the properties `file` and `offset` contain its position. A
line is published when it is complete.

A file that was moved away is read until QUIET_POLLS find nothing new, because its writer may still
have it open; then the new file with the same name is read. If the file was rotated more than once
meanwhile, the files between are found by their names (`app.log.1`, `app.log-20260131`) and times.

A truncated file is read from the beginning, with a warning in the log. Truncation is also detected
if the file has grown again, by its last bytes read. Lines written between the last poll and the
truncation are lost, so files should be moved, not copied and truncated.

With `remember`, the position is saved after lines were published. After a crash some lines may be
published twice, and none is missed while the file exists under its name or beside it; otherwise a
warning is logged. Without disk space for the position nothing more is read. Lines that were
published, but not stored by any module, are lost in a crash. Without `remember`, a restarted tail
begins where `start` says.
"""

from __future__ import annotations

import errno
import os
import re
import stat
import zlib
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, BinaryIO, Literal

import msgspec

from simplebus.gateway.messages import ModuleMessage
from simplebus.gateway.module import BlockingModule, BlockingPort
from simplebus.logs.event_logger import EventLogger

log = EventLogger("simplebus.gateway.tail")

LINE_BYTES_MAX = 1 << 20
"""A longer line is published in parts."""
READ_BYTES = 1 << 18
QUIET_POLLS = 8
"""Polls without new data after which a file that was moved away is done: two seconds by default."""
OPEN_FILES_MAX = 8
"""Open files. With more, the first one is done at its end."""
CHECKED_BYTES = 64
"""Bytes before the position that are compared to recognize the file."""
FINISHED_FILES_MAX = 8
"""Number of finished files to remember."""
RETRY_SECONDS = 1.0
"""Interval of attempts to save the position on a full disk."""
NO_SPACE_ERRORS = frozenset({errno.ENOSPC, errno.EDQUOT})
_KINDS = {
    stat.S_IFIFO: "a pipe",
    stat.S_IFDIR: "a directory",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}
ROTATED_SUFFIX = re.compile(r"[-._]\d[-._:T\d]*")
"""Suffix of a file that was moved away."""


class TailSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of the tail."""

    path: str
    start: Literal["begin", "end"] = "end"
    """Where to begin in a file that was not read before."""
    remember: str = ""
    """File in which the position is saved; empty for none."""
    poll_seconds: Annotated[float, msgspec.Meta(gt=0, le=86_400)] = 0.25

    def __post_init__(self) -> None:
        if not self.path:
            raise ValueError("path: expected the path of a file, got ''")
        for path in self.path, self.remember:
            if "\0" in path:
                raise ValueError(f"invalid file name {path!r}")
            with suppress(OSError):  # A file that cannot be checked now may be created later.
                _stat_regular_file(path)


class _FilePosition(msgspec.Struct, frozen=True):
    """Saved position in a file."""

    device: int
    inode: int
    offset: Annotated[int, msgspec.Meta(ge=0)]
    check: int | None = None
    """Checksum of CHECKED_BYTES before the offset; None in positions of older versions."""


@dataclass(frozen=True, slots=True)
class Line:
    """A line of a file."""

    content: bytes
    offset: int
    """Offset of its first byte."""


class _OpenFile:
    """An open file and the position in it."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        status = os.fstat(file.fileno())
        self.key = _file_key(status)
        self.size = status.st_size
        """Size when it was opened."""
        self.read_offset = 0
        """Offset of the next byte to read."""
        self.partial_line = b""
        """Bytes of an incomplete line before that offset."""
        self._last_bytes = b""
        """Last bytes before the offset."""
        self._check = 0
        self._path = path
        self._file = file

    def seek(self, offset: int) -> None:
        """Continue at `offset`."""
        self._file.seek(offset)
        self.read_offset, self.partial_line = offset, b""
        self._last_bytes = self._bytes_before(offset)

    def checksum(self, offset: int) -> int:
        """Return the checksum of the bytes before `offset`.

        For a closed file, return the checksum of the bytes that were read.
        """
        return self._check if self._file.closed else zlib.crc32(self._bytes_before(offset))

    def encode_position(self, offset: int) -> bytes:
        """Return the encoded position for lines published up to `offset`."""
        return msgspec.json.encode(_FilePosition(*self.key, offset, self.checksum(offset)))

    def _bytes_before(self, offset: int) -> bytes:
        begin = max(0, offset - CHECKED_BYTES)
        return os.pread(self._file.fileno(), offset - begin, begin)

    def close(self) -> None:
        """Close the file."""
        self._check = self.checksum(self.line_offset)
        self._file.close()

    @property
    def is_deleted(self) -> bool:
        """True if the file has no name any more."""
        return os.fstat(self._file.fileno()).st_nlink == 0

    @property
    def written_at(self) -> int:
        """Modification time in nanoseconds."""
        return os.fstat(self._file.fileno()).st_mtime_ns

    @property
    def line_offset(self) -> int:
        """Offset of the first line that was not returned."""
        return self.read_offset - len(self.partial_line)

    def lines(self) -> list[Line]:
        """Return new lines, at most those of one read."""
        size = os.fstat(self._file.fileno()).st_size
        if size < self.read_offset or (
            size > self.read_offset and self._bytes_before(self.read_offset) != self._last_bytes
        ):
            _log_truncated(self._path, self.read_offset)
            self.seek(0)
        while data := self._file.read(READ_BYTES):
            self._last_bytes = (self._last_bytes + data)[-CHECKED_BYTES:]
            if lines := self._split(data):
                return lines
        return []

    def _split(self, data: bytes) -> list[Line]:
        offset = self.line_offset
        self.read_offset += len(data)
        *complete_lines, partial_line = (self.partial_line + data).split(b"\n")
        lines = []
        for text in complete_lines:
            lines += _split_long_line(text, offset)
            offset += len(text) + 1
        # The line may end with the next read.
        while len(partial_line.removesuffix(b"\r")) > LINE_BYTES_MAX:
            lines.append(Line(partial_line[:LINE_BYTES_MAX], offset))
            partial_line, offset = partial_line[LINE_BYTES_MAX:], offset + LINE_BYTES_MAX
        self.partial_line = partial_line
        return lines


class FileFollower:
    """Reads new lines of a file, and of files that were moved away from its path.

    The files are in the order in which they had the path. Only the first one is read.
    """

    def __init__(self, path: Path, *, at_end: bool, saved_position: bytes = b"") -> None:
        self._path = path
        self._at_end = at_end
        """True if the first file is read from its end."""
        self._files: deque[_OpenFile] = deque()
        self._quiet_polls = 0
        """Polls without new data in the first file since there is another one."""
        self._finished: deque[_OpenFile] = deque()
        """Files that were read to the end. They stay open until they are deleted, because a new
        file could get the inode of a closed one.
        """
        self._current: _OpenFile | None = None
        """File of the lines that were returned last."""
        self._last_position = saved_position
        self._resume_position = _decode_position(saved_position)
        """Position at which to continue, until its file is found."""
        if saved_position and self._resume_position is None:
            log.warning(
                "tail_position.damaged",
                "{path}: ignoring the saved position, which is damaged",
                path=path,
            )

    def close(self) -> None:
        """Close all files."""
        for file in (*self._finished, *self._files):
            file.close()

    @property
    def position(self) -> bytes:
        """Encoded position after the returned lines, for another follower; empty if there was no
        file yet.
        """
        if not self._files:
            return self._last_position
        first = self._files[0]
        return first.encode_position(first.line_offset)

    def position_before(self, line: Line) -> bytes:
        """Return the encoded position before one of the lines that were returned last."""
        assert self._current is not None, "no line was given"
        return self._current.encode_position(line.offset)

    def lines(self) -> list[Line]:
        """Return new lines, at most those of one read.

        Raises OSError, except for a missing file, and ValueError if the path is not a regular file.
        """
        self._open_files()
        if not self._files:
            return []
        first = self._current = self._files[0]
        before = first.read_offset
        lines = first.lines()
        if len(self._files) == 1 or first.read_offset != before:
            self._quiet_polls = 0
            return lines
        self._quiet_polls += 1
        if self._quiet_polls < QUIET_POLLS and len(self._files) < OPEN_FILES_MAX:
            return []
        self._quiet_polls = 0
        self._finished.append(first)
        if len(self._finished) > FINISHED_FILES_MAX:
            self._finished.popleft().close()
        self._files.popleft()
        return [Line(first.partial_line, first.line_offset)] if first.partial_line else []

    def _open_files(self) -> None:
        """Open the file at the path, and the files that had the path since the last opened file."""
        for file in [file for file in self._finished if file.is_deleted]:
            self._finished.remove(file)
            file.close()
        try:
            key = _file_key(_stat_regular_file(self._path))
        except FileNotFoundError:
            key = None  # It may be created again.
        try:
            if self._resume_position is not None:
                self._resume(self._resume_position, key)
            is_known = key is None or key in (file.key for file in self._files)
            if key is not None and not is_known and len(self._files) < OPEN_FILES_MAX:
                self._open_new(key)
        except FileNotFoundError:
            return  # The file is being rotated: try again at the next poll.
        self._at_end = False  # Later files are read from the beginning.

    def _resume(self, saved_position: _FilePosition, key: tuple[int, int] | None) -> None:
        wanted_key = (saved_position.device, saved_position.inode)
        opened_file = None
        if key == wanted_key:
            opened_file = _open_file(self._path, wanted_key)
        else:
            for path, status in self._rotated_files():
                if _file_key(status) == wanted_key and status.st_size >= saved_position.offset:
                    opened_file = _open_file(path, wanted_key)
                    break
            else:
                log.warning(
                    "tailed_file.missing",
                    "{path}: the file that was read last no longer exists; lines may "
                    "have been missed",
                    path=self._path,
                )
        self._resume_position, self._at_end = None, False
        if opened_file is not None:
            is_same = opened_file.size >= saved_position.offset
            if is_same and saved_position.check is not None:
                is_same = opened_file.checksum(saved_position.offset) == saved_position.check
            if not is_same:
                _log_truncated(self._path, saved_position.offset)
            opened_file.seek(saved_position.offset if is_same else 0)
            self._files.append(opened_file)

    def _open_new(self, key: tuple[int, int]) -> None:
        new_files = [(self._path, key)]
        if self._files:
            known_keys = {key, *(file.key for file in (*self._finished, *self._files))}
            since = self._files[-1].written_at
            rotated = [
                (status.st_mtime_ns, path, _file_key(status))
                for path, status in self._rotated_files()
                if status.st_mtime_ns > since and _file_key(status) not in known_keys
                if ROTATED_SUFFIX.fullmatch(path.name.removeprefix(self._path.name))
            ]
            new_files = [(path, key) for _, path, key in sorted(rotated)] + new_files
        for path, file_key in new_files[: OPEN_FILES_MAX - len(self._files)]:
            opened_file = _open_file(path, file_key)
            if self._at_end:
                opened_file.seek(opened_file.size)
            self._files.append(opened_file)

    def _rotated_files(self) -> Iterator[tuple[Path, os.stat_result]]:
        """Yield the files beside the path whose names begin with its name."""
        try:
            entries = list(os.scandir(self._path.parent))
        except PermissionError:
            return
        for entry in entries:
            if entry.name.startswith(self._path.name) and entry.is_file(follow_symlinks=False):
                yield Path(entry.path), entry.stat()


def _open_file(path: Path, key: tuple[int, int]) -> _OpenFile:
    """Open a file. Raises FileNotFoundError if another file is at the path."""
    file = open(path, "rb", buffering=0, opener=_open_nonblocking)  # noqa: SIM115 - kept open.
    opened_file = _OpenFile(path, file)
    if opened_file.key != key or not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise FileNotFoundError(f"{path} was replaced by another file")
    return opened_file


def _open_nonblocking(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)  # It may be a pipe by now, which must not block.


def _stat_regular_file(path: str | Path) -> os.stat_result:
    """Return the file status. Raises ValueError for anything but a regular file."""
    status = os.stat(path)
    kind = stat.S_IFMT(status.st_mode)
    if kind != stat.S_IFREG:
        raise ValueError(f"expected a regular file, and {path} is {_KINDS.get(kind, 'none')}")
    return status


def _file_key(status: os.stat_result) -> tuple[int, int]:
    return (status.st_dev, status.st_ino)


def _log_truncated(path: Path, read: int) -> None:
    log.warning(
        "tailed_file.truncated",
        "{path} was truncated after {read_bytes} bytes were read; reading it from "
        "the beginning, lines may have been missed",
        path=path,
        read_bytes=read,
    )


def _split_long_line(text: bytes, offset: int) -> list[Line]:
    text = text.removesuffix(b"\r")
    return [
        Line(text[begin : begin + LINE_BYTES_MAX], offset + begin)
        for begin in range(0, len(text) or 1, LINE_BYTES_MAX)
    ]


def _decode_position(saved_position: bytes) -> _FilePosition | None:
    try:
        return msgspec.json.decode(saved_position, type=_FilePosition) if saved_position else None
    except msgspec.MsgspecError:
        return None


class Tail(BlockingModule):
    """Tail module."""

    Settings = TailSettings

    def __init__(self, bus: BlockingPort, settings: TailSettings) -> None:
        super().__init__(bus, settings)
        self._position_path = Path(settings.remember) if settings.remember else None
        saved_position = b""
        if self._position_path is not None and self._position_path.exists():
            # An empty file is the result of a power failure. "{}" counts as damaged.
            saved_position = self._position_path.read_bytes() or b"{}"
        self._saved_position = saved_position
        self._is_full = False
        """True after the position could not be saved for lack of space."""
        self._follower = FileFollower(
            Path(settings.path), at_end=settings.start == "end", saved_position=saved_position
        )

    def run(self) -> None:
        """Publish lines as they are written."""
        settings: TailSettings = self.settings
        while not self.bus.stopping.is_set():
            lines = self._follower.lines()
            for line in lines:
                properties = {"file": settings.path, "offset": str(line.offset)}
                if not self.bus.publish_until_stopping(ModuleMessage(line.content, properties)):
                    self._save_position(self._follower.position_before(line))
                    return
            while not self._save_position(self._follower.position):
                if self.bus.wait(RETRY_SECONDS):
                    return
            if not lines:
                self.bus.wait(settings.poll_seconds)

    def _save_position(self, saved_position: bytes) -> bool:
        """Save the position. Returns False if there is no space."""
        if (
            self._position_path is None
            or saved_position == self._saved_position
            or self.bus.has_ended
        ):
            return True
        new = self._position_path.with_name(self._position_path.name + ".new")
        try:
            new.write_bytes(saved_position)
            new.replace(self._position_path)
        except OSError as error:
            if error.errno not in NO_SPACE_ERRORS:
                raise
            if not self._is_full:
                log.error(
                    "tail_position.write_failed",
                    "{path}: {error}; reading pauses until there is space",
                    path=self._position_path,
                    error=error,
                )
            self._is_full = True
            return False
        self._saved_position, self._is_full = saved_position, False
        return True

    def destroy(self) -> None:
        """Close the files."""
        self._follower.close()
