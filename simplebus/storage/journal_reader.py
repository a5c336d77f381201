"""The messages of a class, for who reads a journal that is another's; a server may write meanwhile.

Rule 1: nothing is locked and nothing is written. What a server is just writing is not there yet.
Rule 2: what is told to be there is made safe first. Who notes how far he has read must not find
other messages under those sequences after a power cut, and what was written a moment ago may be in
the system's memory alone.
Rule 3: messages are there up to the first record that is not whole, as for a server that recovers.
Rule 4: only a file that has its final length is mapped into memory: where one is cut off under its
reader, the system ends the process.

    segment      │ segment      │ last segment
    mapped       │ mapped       │ walked once, record by record │ being written │ zeros
    first                                                       head
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from time import time

from simplebus.core.limits import SPARE_BYTES, TIMES_STEP_SECONDS
from simplebus.storage import records
from simplebus.storage.append_file import sync_file
from simplebus.storage.errors import JournalError
from simplebus.storage.file_names import CLASSES, STATE, file_name, file_number, folder_name
from simplebus.storage.records import End, Kind, Record
from simplebus.storage.segments import Files, Recovered, read_state

# So much is handed out together; a record that has more alone.
_PIECE_BYTES = 1024 * 1024
_WINDOW_BYTES = 256 * 1024
# How old a file's time must be to say that nothing came since: the system's clock for it is coarse.
_SETTLED_SECONDS = 10.0
# Files go and come while they are looked at; no server is so quick that this is not enough.
_TURNS_MAX = 100
_NO_SYNC = {errno.EINVAL, errno.EROFS}


@dataclass(frozen=True, slots=True)
class Piece:
    """Messages that follow one another."""

    first: int
    """The first one's sequence."""
    count: int
    times: list[tuple[int, float]]
    """When messages were accepted, in seconds since 1970, and with which one that begins."""
    buffer: bytearray
    """Their frames back to back, as their publishers sent them, and SPARE_BYTES."""

    @property
    def size(self) -> int:
        """Bytes of frames."""
        return len(self.buffer) - SPARE_BYTES


@dataclass(frozen=True, slots=True)
class _Tail:
    """How far the last segment was looked through."""

    first: int = -1
    """By which it is called."""
    inode: int = 0
    at: int = 0
    """Where its whole records end."""
    head: int = 0
    """The sequence behind them."""
    seen: tuple[int, int] = (0, 0)
    """Its size and time then; a file that still has them holds nothing new."""


class ClassFiles:
    """The segments of one class in the journal at `path`. Raises JournalError."""

    def __init__(self, path: Path, class_id: int) -> None:
        self.problem = ""
        """Why `pieces` came to no more, where that is not for the end of what was written."""
        self._class_id = class_id
        self._folder = path / CLASSES / folder_name(class_id)
        self._tail = _Tail()
        self._safe: set[int] = set()
        """Segments that are on disk, by their first sequences."""

    @property
    def is_there(self) -> bool:
        """Whether a message was ever in it."""
        return bool(self._firsts())

    def extent(self) -> tuple[int, int]:
        """The first sequence, and the one behind the last. All between them is safe then."""
        for _ in range(_TURNS_MAX):
            firsts = self._firsts()
            if not firsts:
                return 0, 0
            try:
                return firsts[0], self._head(firsts)
            except FileNotFoundError:  # Nobody needed it any longer.
                continue
            except OSError as error:
                raise _unread(self._folder, error) from None
        raise _restless(self._folder)

    def pieces(self, first: int, last: int) -> Iterator[Piece]:
        """What is there of the messages first..last-1, in order, and perhaps some before and behind
        them: records are whole."""
        group: list[tuple[Record, memoryview]] = []
        size = 0
        for data, record in self._records(first, last):
            if group and size + record.body_bytes > _PIECE_BYTES:
                yield _piece(group)
                group, size = [], 0
            group.append((record, data[record.body_at : record.end]))
            size += record.body_bytes
        if group:
            yield _piece(group)

    def first_since(self, seconds: float) -> int | None:
        """The first message that was accepted then or later; a few accepted within
        TIMES_STEP_SECONDS before it may come with it. None: there is none yet."""
        firsts = self._firsts()
        at = bisect_left(firsts[:-1], seconds, key=self._begins)
        for first, following in pairwise([*firsts[max(0, at - 1) :], None]):
            assert first is not None
            with contextlib.suppress(FileNotFoundError):  # Then it was later than that.
                for _, record in self._headers(first, following):
                    if record.time + TIMES_STEP_SECONDS > seconds:
                        return record.first
        return None

    def _begins(self, first: int) -> float:
        """When the first message of a segment was accepted that is not the last one."""
        with contextlib.suppress(FileNotFoundError):
            for _, record in self._headers(first, first + 1):
                return record.time
        return float("inf")

    def _firsts(self) -> list[int]:
        try:
            found = (file_number(name) for name in os.listdir(self._folder))
            return sorted(each for each in found if each is not None)
        except FileNotFoundError:
            return []
        except OSError as error:
            raise _unread(self._folder, error) from None

    # How far it goes -----------------------------------------------------------------------------

    def _head(self, firsts: list[int]) -> int:
        first, tail = firsts[-1], self._tail
        with (self._folder / file_name(first)).open("rb", buffering=0) as file:
            status = os.fstat(file.fileno())
            seen = status.st_size, status.st_mtime_ns
            if (tail.first, tail.inode) != (first, status.st_ino) or status.st_size < tail.at:
                tail = _Tail(first, status.st_ino, 0, first)
            if tail.seen != seen:
                tail = self._walked(file.fileno(), tail)
                if status.st_mtime < time() - _SETTLED_SECONDS:
                    tail = replace(tail, seen=seen)
            if (tail.first, tail.inode, tail.head) != (
                self._tail.first,
                self._tail.inode,
                self._tail.head,
            ):
                make_safe(self._folder / file_name(first))
        self._make_safe(firsts)
        self._tail = tail
        return tail.head

    def _walked(self, descriptor: int, tail: _Tail) -> _Tail:
        """Past the records that are whole, and follow one another."""
        at, head, window = tail.at, tail.head, _WINDOW_BYTES
        while True:
            data = memoryview(os.pread(descriptor, window, at))
            found = records.read(data, 0)
            if isinstance(found, End):
                if found.problem and len(data) == window:
                    window *= 4  # It may be longer than what was looked at.
                    continue
                return replace(tail, at=at, head=head)
            while isinstance(found, Record):
                if not self._is_next(found, head):
                    return replace(tail, at=at, head=head)
                at, head = at + found.end - found.at, found.last
                found = records.read(data, found.end)

    def _is_next(self, record: Record, expected: int) -> bool:
        return (
            record.kind == Kind.MESSAGES
            and record.class_id == self._class_id
            and record.first == expected
            and record.messages > 0
        )

    def _make_safe(self, firsts: list[int]) -> None:
        """Have all segments on disk, and their names; the last one's content is."""
        for first in firsts[:-1]:
            if first not in self._safe:
                make_safe(self._folder / file_name(first))
                self._safe.add(first)
        if self._tail.first != firsts[-1]:
            make_safe(self._folder)
            make_safe(self._folder.parent)

    # What is in it -------------------------------------------------------------------------------

    def _records(self, first: int, last: int) -> Iterator[tuple[memoryview, Record]]:
        """The whole records that have some of the messages first..last-1, and the bytes that they
        are in."""
        misses = 0
        while first < last and misses < _TURNS_MAX:
            firsts = self._firsts()
            index = max(0, bisect_right(firsts, first) - 1)
            if not firsts or firsts[index] >= last:
                return
            following = firsts[index + 1] if index + 1 < len(firsts) else None
            expected = firsts[index]
            try:
                for data, record in self._headers(expected, following):
                    if record.first >= last:
                        return
                    if record.last > first:
                        if not records.is_whole(data, record):
                            self.problem = records.WRONG_CHECKSUM
                            return
                        yield data, record
                    expected = record.last
            except FileNotFoundError:  # Nobody needed it any longer.
                misses += 1
                continue
            if following is None or expected < following:
                return
            first = following
        if first < last:
            raise _restless(self._folder)

    def _headers(self, first: int, following: int | None) -> Iterator[tuple[memoryview, Record]]:
        """The records of one segment, up to where the next one begins; their bodies are not looked
        at. Raises FileNotFoundError."""
        data = self._bytes(first, is_final=following is not None)
        self.problem = ""
        at, expected = 0, first
        while following is None or expected < following:
            record = records.read(data, at, whole=False)
            if isinstance(record, End):
                self.problem = record.problem
                return
            if not self._is_next(record, expected):
                self.problem = f"another record is where message {expected} is to be"
                return
            yield data, record
            at, expected = record.end, record.last

    def _bytes(self, first: int, *, is_final: bool) -> memoryview:
        path = self._folder / file_name(first)
        try:
            with path.open("rb", buffering=0) as file:
                if is_final and os.fstat(file.fileno()).st_size:
                    return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
                return memoryview(file.readall())
        except FileNotFoundError:
            raise
        except OSError as error:
            raise _unread(path, error) from None


def _piece(group: list[tuple[Record, memoryview]]) -> Piece:
    """Records that follow one another, as one."""
    found = [record for record, _ in group]
    buffer = bytearray().join([*(body for _, body in group), bytes(SPARE_BYTES)])
    first = found[0].first
    return Piece(first, found[-1].last - first, [(each.first, each.time) for each in found], buffer)


def class_names(path: Path) -> dict[int, str]:
    """The name of each class that the journal at `path` knows, empty for none; they are on disk
    then. Raises JournalError."""
    folder = path / STATE
    for turn in range(_TURNS_MAX):
        try:
            image, _ = read_state(folder, Files(), Recovered())
            for name in os.listdir(folder):
                make_safe(folder / name)
            make_safe(folder)
        except (JournalError, FileNotFoundError):  # A newer one has replaced it.
            if turn == _TURNS_MAX - 1:
                raise
        except OSError as error:
            raise _unread(folder, error) from None
        else:
            return {each.class_id: each.name for each in image.classes.values()}
    raise _restless(folder)


def make_safe(path: Path) -> None:
    """Have on disk what is in a file, or the names in a folder, whoever wrote them. Raises OSError,
    unless the files cannot be written here at all."""
    try:
        sync_file(path)
    except OSError as error:
        if error.errno not in _NO_SYNC:
            raise


def _unread(path: Path, error: OSError) -> JournalError:
    return JournalError(f"{path} cannot be read: {error.strerror}")


def _restless(path: Path) -> JournalError:
    return JournalError(f"{path} changes faster than it can be read")
