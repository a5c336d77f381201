"""Says each line that is written to a file.

    module = "tail"
    settings = { path = "/var/log/app.log", start = "end", remember = "/var/lib/gateway/app.place" }

The line is the content, without its end; the properties `file` and `offset` say where it stood. A
line without an end waits for it.
A file that is moved away is read on until QUIET_POLLS bring nothing new, for whoever wrote it may
still; then the new one of its name is read. If that has changed more than once meanwhile, those
between are looked for beside it: its name and a number or a date, `app.log.1`, `app.log-20260131`,
written to later than the one that was read.
A file that is cut off is read from its beginning, and the log says so, also when it is longer by
then: what was read last does not stand where it stood. What was written to it after the last poll,
before it was cut off, is gone: have files moved away, not copied and cut off.
With `remember` the place is written down after its lines were said: after a crash some may be said
again, and none is left out while the file that was read is still there, or beside it by a name that
begins with its own; if it is not, the log says so. Where there is no room to write it down, nothing
more is read until there is. What was said and what no module had kept yet is gone with the crash.
Without it, a tail that failed and is made again begins where `start` says.
"""

from __future__ import annotations

import errno
import logging
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

log = logging.getLogger("simplebus.gateway.tail")

LINE_BYTES_MAX = 1 << 20
"""A longer line is said in pieces."""
READ_BYTES = 1 << 18
QUIET_POLLS = 8
"""How often there must be nothing new in a file that was moved away, before it is done with: two
seconds, of `poll_seconds` as it is."""
HELD_MAX = 8
"""Files open at a time; when there are so many, the first is done with at its end."""
MARK_BYTES = 64
"""So much of what was read last is looked at again, to see whether it is the same file still."""
DONE_MAX = 8
"""Of so many files that were read it is known that they were."""
FULL_SECONDS = 1.0
"""How often it is tried to write down the place on a disk that is full."""
NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT})
_KINDS = {
    stat.S_IFIFO: "a pipe",
    stat.S_IFDIR: "a directory",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}
ROTATED = re.compile(r"[-._]\d[-._:T\d]*")
"""What a name has more once a file is moved away."""


class TailSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which file, and from where."""

    path: str
    start: Literal["begin", "end"] = "end"
    """Where to begin in a file that was not read before."""
    remember: str = ""
    """A file in which the place is kept; nothing is kept if it is not set."""
    poll_seconds: Annotated[float, msgspec.Meta(gt=0, le=86_400)] = 0.25

    def __post_init__(self) -> None:
        if not self.path:
            raise ValueError("path: expected that of a file, got ''")
        for path in self.path, self.remember:
            if "\0" in path:
                raise ValueError(f"no file can be called {path!r}")
            with suppress(OSError):  # What cannot be looked at now may be there later.
                _checked(path)


class _Place(msgspec.Struct, frozen=True):
    """How far a file was read."""

    device: int
    inode: int
    offset: Annotated[int, msgspec.Meta(ge=0)]
    check: int | None = None
    """Checksum of MARK_BYTES before it; None in what older ones wrote."""


@dataclass(frozen=True, slots=True)
class Line:
    """A line of a file."""

    content: bytes
    offset: int
    """Where it begins."""


class _Source:
    """A file that is open, and how far it is read."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        found = os.fstat(file.fileno())
        self.key = _key(found)
        self.size = found.st_size
        """When it was opened."""
        self.read = 0
        """How far it is read,"""
        self.rest = b""
        """the last bytes of which are a line without an end."""
        self._mark = b""
        """The last of what was read, or that was there before."""
        self._check = 0
        self._path = path
        self._file = file

    def go_to(self, offset: int) -> None:
        """Read on from there."""
        self._file.seek(offset)
        self.read, self.rest = offset, b""
        self._mark = self._before(offset)

    def check(self, offset: int) -> int:
        """A checksum of what stands before it. Of a file that is closed, of what was given."""
        return self._check if self._file.closed else zlib.crc32(self._before(offset))

    def place(self, offset: int) -> bytes:
        """How far lines were given, when that is up to there."""
        return msgspec.json.encode(_Place(*self.key, offset, self.check(offset)))

    def _before(self, offset: int) -> bytes:
        begin = max(0, offset - MARK_BYTES)
        return os.pread(self._file.fileno(), offset - begin, begin)

    def close(self) -> None:
        """Close the file."""
        self._check = self.check(self.at)
        self._file.close()

    @property
    def is_deleted(self) -> bool:
        """Whether it has no name any more."""
        return os.fstat(self._file.fileno()).st_nlink == 0

    @property
    def written_at(self) -> int:
        """When it was written to, in nanoseconds."""
        return os.fstat(self._file.fileno()).st_mtime_ns

    @property
    def at(self) -> int:
        """Where the first line begins that was not given."""
        return self.read - len(self.rest)

    def lines(self) -> list[Line]:
        """Lines that are new, some of them if there are many."""
        size = os.fstat(self._file.fileno()).st_size
        if size < self.read or (size > self.read and self._before(self.read) != self._mark):
            _say_cut(self._path, self.read)
            self.go_to(0)
        while data := self._file.read(READ_BYTES):
            self._mark = (self._mark + data)[-MARK_BYTES:]
            if lines := self._split(data):
                return lines
        return []

    def _split(self, data: bytes) -> list[Line]:
        at = self.at
        self.read += len(data)
        *whole, rest = (self.rest + data).split(b"\n")
        lines = []
        for text in whole:
            lines += _pieces(text, at)
            at += len(text) + 1
        # Of what is as long, the end may come next.
        while len(rest.removesuffix(b"\r")) > LINE_BYTES_MAX:
            lines.append(Line(rest[:LINE_BYTES_MAX], at))
            rest, at = rest[LINE_BYTES_MAX:], at + LINE_BYTES_MAX
        self.rest = rest
        return lines


class Follower:
    """Reads what is new in a file whenever it is asked. Opens nothing but the file, and what was
    moved away from its path.

    Invariant: the files are in the order in which they were at the path; only the first is read.
    """

    def __init__(self, path: Path, *, at_end: bool, place: bytes = b"") -> None:
        self._path = path
        self._at_end = at_end
        """Whether the first file begins at its end."""
        self._files: deque[_Source] = deque()
        self._quiet = 0
        """How often there was nothing new in the first, since there is another."""
        self._done: deque[_Source] = deque()
        """Those that were read to their end: open as long as they are not deleted, for then others
        may have their inodes."""
        self._last: _Source | None = None
        """That of the lines that were given last."""
        self._given = place
        self._place = _kept(place)
        """Where to go on, until that is found."""
        if place and self._place is None:
            log.warning("%s: the place that was remembered is damaged, and does not count", path)

    def close(self) -> None:
        """Close the files."""
        for file in (*self._done, *self._files):
            file.close()

    @property
    def place(self) -> bytes:
        """How far lines were given, for another follower; empty if there was no file yet."""
        if not self._files:
            return self._given
        first = self._files[0]
        return first.place(first.at)

    def before(self, line: Line) -> bytes:
        """The same before a line of those that were given last."""
        assert self._last is not None, "no line was given"
        return self._last.place(line.offset)

    def lines(self) -> list[Line]:
        """Lines that are new, some of them if there are many; none if there is nothing new.
        Raises OSError, except for a file that is not there, and ValueError for what is no file."""
        self._look()
        if not self._files:
            return []
        first = self._last = self._files[0]
        before = first.read
        lines = first.lines()
        if len(self._files) == 1 or first.read != before:
            self._quiet = 0
            return lines
        self._quiet += 1
        if self._quiet < QUIET_POLLS and len(self._files) < HELD_MAX:
            return []
        self._quiet = 0
        self._done.append(first)
        if len(self._done) > DONE_MAX:
            self._done.popleft().close()
        self._files.popleft()
        return [Line(first.rest, first.at)] if first.rest else []

    def _look(self) -> None:
        """Open what is at the path now, and whatever was there since the last that is open."""
        for done in [done for done in self._done if done.is_deleted]:
            self._done.remove(done)
            done.close()
        try:
            key = _key(_checked(self._path))
        except FileNotFoundError:
            key = None  # It may come again.
        try:
            if self._place is not None:
                self._go_on(self._place, key)
            is_known = key is None or key in (file.key for file in self._files)
            if key is not None and not is_known and len(self._files) < HELD_MAX:
                self._open_new(key)
        except FileNotFoundError:
            return  # Names are changing just now: the next time, then.
        self._at_end = False  # What comes is new.

    def _go_on(self, place: _Place, key: tuple[int, int] | None) -> None:
        wanted = (place.device, place.inode)
        source = None
        if key == wanted:
            source = _open(self._path, wanted)
        else:
            for path, found in self._beside():
                if _key(found) == wanted and found.st_size >= place.offset:
                    source = _open(path, wanted)
                    break
            else:
                log.warning(
                    "%s: the file that was read last is gone: lines may have been missed",
                    self._path,
                )
        self._place, self._at_end = None, False
        if source is not None:
            is_same = source.size >= place.offset
            if is_same and place.check is not None:
                is_same = source.check(place.offset) == place.check
            if not is_same:
                _say_cut(self._path, place.offset)
            source.go_to(place.offset if is_same else 0)
            self._files.append(source)

    def _open_new(self, key: tuple[int, int]) -> None:
        news = [(self._path, key)]
        if self._files:
            known = {key, *(file.key for file in (*self._done, *self._files))}
            since = self._files[-1].written_at
            between = [
                (found.st_mtime_ns, path, _key(found))
                for path, found in self._beside()
                if found.st_mtime_ns > since and _key(found) not in known
                if ROTATED.fullmatch(path.name.removeprefix(self._path.name))
            ]
            news = [(path, key) for _, path, key in sorted(between)] + news
        for path, each in news[: HELD_MAX - len(self._files)]:
            source = _open(path, each)
            if self._at_end:
                source.go_to(source.size)
            self._files.append(source)

    def _beside(self) -> Iterator[tuple[Path, os.stat_result]]:
        """The files of its folder the names of which begin with its own. None if it cannot be
        looked into."""
        try:
            found = list(os.scandir(self._path.parent))
        except PermissionError:
            return
        for entry in found:
            if entry.name.startswith(self._path.name) and entry.is_file(follow_symlinks=False):
                yield Path(entry.path), entry.stat()


def _open(path: Path, key: tuple[int, int]) -> _Source:
    """Raises FileNotFoundError if it is another one by now."""
    file = open(path, "rb", buffering=0, opener=_opened)  # noqa: SIM115 - kept open.
    source = _Source(path, file)
    if source.key != key or not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise FileNotFoundError(f"{path} is another file by now")
    return source


def _opened(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)  # It may be a pipe by now: nobody waits for that.


def _checked(path: str | Path) -> os.stat_result:
    """Raises ValueError for what has no place from which to go on, as a pipe, or no lines."""
    found = os.stat(path)
    kind = stat.S_IFMT(found.st_mode)
    if kind != stat.S_IFREG:
        raise ValueError(f"expected a regular file, and {path} is {_KINDS.get(kind, 'none')}")
    return found


def _key(found: os.stat_result) -> tuple[int, int]:
    return (found.st_dev, found.st_ino)


def _say_cut(path: Path, read: int) -> None:
    log.warning(
        "%s was cut off, the %d bytes that were read do not stand there any more: it is read from "
        "its beginning, and lines may have been missed", path, read,
    )  # fmt: skip


def _pieces(text: bytes, at: int) -> list[Line]:
    text = text.removesuffix(b"\r")
    return [
        Line(text[begin : begin + LINE_BYTES_MAX], at + begin)
        for begin in range(0, len(text) or 1, LINE_BYTES_MAX)
    ]


def _kept(place: bytes) -> _Place | None:
    try:
        return msgspec.json.decode(place, type=_Place) if place else None
    except msgspec.MsgspecError:
        return None


class Tail(BlockingModule):
    """The module."""

    Settings = TailSettings

    def __init__(self, bus: BlockingPort, settings: TailSettings) -> None:
        super().__init__(bus, settings)
        self._place = Path(settings.remember) if settings.remember else None
        place = b""
        if self._place is not None and self._place.exists():
            place = self._place.read_bytes() or b"{}"  # Emptied as the power failed: damaged.
        self._written = place
        self._is_full = False
        """Whether there was no room for the place."""
        self._follower = Follower(Path(settings.path), at_end=settings.start == "end", place=place)

    def run(self) -> None:
        """Say lines as they come."""
        settings: TailSettings = self.settings
        while not self.bus.stopping.is_set():
            lines = self._follower.lines()
            for line in lines:
                about = {"file": settings.path, "offset": str(line.offset)}
                if not self.bus.publish_until_stopping(ModuleMessage(line.content, about)):
                    self._remember(self._follower.before(line))
                    return
            while not self._remember(self._follower.place):
                if self.bus.wait(FULL_SECONDS):
                    return
            if not lines:
                self.bus.wait(settings.poll_seconds)

    def _remember(self, place: bytes) -> bool:
        """Write it down. Returns False where there is no room for that."""
        if self._place is None or place == self._written or self.bus.has_ended:
            return True
        new = self._place.with_name(self._place.name + ".new")
        try:
            new.write_bytes(place)
            new.replace(self._place)
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise
            if not self._is_full:
                log.error("%s: %s; nothing more is read until there is room", self._place, error)
            self._is_full = True
            return False
        self._written, self._is_full = place, False
        return True

    def destroy(self) -> None:
        """Close the file."""
        self._follower.close()
