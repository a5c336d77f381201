"""Says each line that is written to a file.

    module = "tail"
    settings = { path = "/var/log/app.log", start = "end", remember = "/var/lib/gateway/app.place" }

The line is the content, without its end; the properties `file` and `offset` say where it stood. A
file that is moved away is read to its end, and then the new one of its name; one that is cut off is
read from its beginning. A line without an end waits for it.
With `remember` the place is written down after its lines were said: after a crash some may be said
again, and none is left out while the file that was read is still there. What was said and what no
module had kept yet is gone with the crash.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, BinaryIO, Literal

import msgspec

from simplebus.gateway.messages import ModuleMessage
from simplebus.gateway.module import BlockingModule, BlockingPort

LINE_BYTES_MAX = 1 << 20
"""A longer line is said in pieces."""
READ_BYTES = 1 << 18


class TailSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which file, and from where."""

    path: str
    start: Literal["begin", "end"] = "end"
    """Where to begin in a file that was not read before."""
    remember: str = ""
    """A file in which the place is kept; nothing is kept if it is not set."""
    poll_seconds: Annotated[float, msgspec.Meta(gt=0)] = 0.25


class _Place(msgspec.Struct, frozen=True):
    """How far a file was read.."""

    device: int
    inode: int
    offset: int


@dataclass(frozen=True, slots=True)
class Line:
    """A line of a file."""

    content: bytes
    offset: int
    """Where it begins."""


class Follower:
    """Reads what is new in a file whenever it is asked. Opens nothing but the file."""

    def __init__(self, path: Path, *, at_end: bool, place: bytes = b"") -> None:
        self._path = path
        self._at_end = at_end
        """Whether the first file begins at its end."""
        self._file: BinaryIO | None = None
        self._inode = (0, 0)
        self._read = 0
        """How far it is read,"""
        self._rest = b""
        """the last bytes of which are a line without an end."""
        self._place = _kept(place)

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    @property
    def place(self) -> bytes:
        """How far lines were given, for another follower."""
        device, inode = self._inode
        return msgspec.json.encode(_Place(device, inode, self._read - len(self._rest)))

    def lines(self) -> list[Line]:
        """Lines that are new, some of them if there are many; none if there is nothing new.
        Raises OSError, except for a file that is not there."""
        if self._file is None and not self._open():
            return []
        assert self._file is not None
        if os.fstat(self._file.fileno()).st_size < self._read:  # It was cut off.
            self._file.seek(0)
            self._read, self._rest = 0, b""
        while data := self._file.read(READ_BYTES):
            if lines := self._split(data):
                return lines
        if not self._is_moved():
            return []
        last, at = self._rest, self._read - len(self._rest)
        self.close()
        self._read, self._rest = 0, b""
        self._open()
        return [Line(last, at)] if last else []

    def _open(self) -> bool:
        try:
            self._file = open(self._path, "rb", buffering=0)  # noqa: SIM115 - kept open.
        except FileNotFoundError:
            self._at_end = False  # What comes is new.
            return False
        stat = os.fstat(self._file.fileno())
        self._inode = (stat.st_dev, stat.st_ino)
        place, self._place = self._place, None
        if place is not None:
            known = self._inode == (place.device, place.inode) and place.offset <= stat.st_size
            self._read = place.offset if known else 0
        else:
            self._read = stat.st_size if self._at_end else 0
        self._at_end = False
        self._file.seek(self._read)
        return True

    def _is_moved(self) -> bool:
        try:
            stat = os.stat(self._path)
        except FileNotFoundError:
            return False  # It may come again.
        return (stat.st_dev, stat.st_ino) != self._inode

    def _split(self, data: bytes) -> list[Line]:
        at = self._read - len(self._rest)
        self._read += len(data)
        *whole, rest = (self._rest + data).split(b"\n")
        lines = []
        for text in whole:
            lines += _pieces(text, at)
            at += len(text) + 1
        while len(rest) >= LINE_BYTES_MAX:
            lines.append(Line(rest[:LINE_BYTES_MAX], at))
            rest, at = rest[LINE_BYTES_MAX:], at + LINE_BYTES_MAX
        self._rest = rest
        return lines


def _pieces(text: bytes, at: int) -> list[Line]:
    if len(text) <= LINE_BYTES_MAX:
        return [Line(text.removesuffix(b"\r"), at)]
    return [
        Line(text[begin : begin + LINE_BYTES_MAX], at + begin)
        for begin in range(0, len(text), LINE_BYTES_MAX)
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
            place = self._place.read_bytes()
        self._follower = Follower(Path(settings.path), at_end=settings.start == "end", place=place)

    def run(self) -> None:
        """Say lines as they come."""
        settings: TailSettings = self.settings
        while not self.bus.stopping.is_set():
            lines = self._follower.lines()
            for line in lines:
                self.bus.publish(
                    ModuleMessage(line.content, {"file": settings.path, "offset": str(line.offset)})
                )
            if lines:
                self._remember()
            else:
                self.bus.wait(settings.poll_seconds)

    def _remember(self) -> None:
        if self._place is not None:
            new = self._place.with_name(self._place.name + ".new")
            new.write_bytes(self._follower.place)
            new.replace(self._place)

    def destroy(self) -> None:
        """Close the file."""
        self._follower.close()
