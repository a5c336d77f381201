"""Reads the messages of a class from a journal that another process may be writing.

Nothing is locked or changed. Messages are synced before they are reported, so that a reader that
stores its progress does not find other messages with the same sequences after a power failure.
Messages end at the first damaged record, until a server has replaced it by a gap. Only files of
final length are mapped into memory, because the system kills a process that reads a truncated
mapping.

    segment      │ segment      │ last segment
    mapped       │ mapped       │ read once, record by record │ being written │ zeros
    first                                                     head
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from time import time

from simplebus.core.limits import RECEIVE_PADDING_BYTES, TIME_INDEX_STEP_SECONDS
from simplebus.storage import records
from simplebus.storage.append_file import sync_file
from simplebus.storage.directory import open_directory
from simplebus.storage.errors import JournalError
from simplebus.storage.file_names import CLASSES, STATE, file_name, file_number, folder_name
from simplebus.storage.records import EndOfRecords, Record, RecordKind
from simplebus.storage.segments import FileBuffer, RecoveryResult, read_state

# Size of a block; a larger record is a block of its own.
_BLOCK_BYTES = 1024 * 1024
_WINDOW_BYTES = 256 * 1024
# If the modification time of a file is older than this, an unchanged modification time proves that
# nothing was written since. Modification times are coarse.
_SETTLED_SECONDS = 10.0
# Retries after a file has appeared or disappeared during a read. No server is fast enough to cause
# more.
_RETRIES_MAX = 100
_NO_SYNC = {errno.EINVAL, errno.EROFS}


@dataclass(frozen=True, slots=True)
class MessageBlock:
    """Consecutive messages."""

    first: int
    """Sequence of the first message."""
    count: int
    times: list[tuple[int, float]]
    """Runs of messages with one acceptance time: first sequence, and seconds since 1970."""
    buffer: bytearray
    """Frames back to back, as published, followed by RECEIVE_PADDING_BYTES."""

    @property
    def size(self) -> int:
        """Bytes of frames."""
        return len(self.buffer) - RECEIVE_PADDING_BYTES


@dataclass(frozen=True, slots=True)
class _Tail:
    """Progress of reading the last segment."""

    first: int = -1
    """First sequence of the segment."""
    inode: int = 0
    at: int = 0
    """Offset after the last intact record."""
    head: int = 0
    """Sequence after the last intact record."""
    size_and_mtime: tuple[int, int] = (0, 0)
    """Size and modification time of the file. If the file still has both, nothing was written."""


class ClassJournalReader:
    """Reader of the segments of one class. Raises JournalError."""

    def __init__(self, path: Path, class_id: int) -> None:
        self.problem = ""
        """Damage at which `read_blocks` ended; empty if it ended at the end of the data."""
        self._class_id = class_id
        self._path = path
        self._folder = path / CLASSES / folder_name(class_id)
        self._tail = _Tail()
        self._synced_segments: set[int] = set()
        """Synced segments, by first sequence."""

    @cached_property
    def _salt(self) -> int:
        return open_directory(self._path).salt

    @property
    def exists(self) -> bool:
        """True if the class has a file."""
        return bool(self._firsts())

    def read_extent(self) -> tuple[int, int]:
        """Return the first sequence and the sequence after the last message. All messages between
        them are synced.
        """
        for _ in range(_RETRIES_MAX):
            firsts = self._firsts()
            if not firsts:
                return 0, 0
            try:
                return firsts[0], self._head(firsts)
            except FileNotFoundError:  # The server removed the segment.
                continue
            except OSError as error:
                raise _read_error(self._folder, error) from None
        raise _changing_error(self._folder)

    def read_blocks(self, first: int, last: int) -> Iterator[MessageBlock]:
        """Yield the stored messages of first..last-1, in order.

        Records are read whole, so earlier and later messages may be included.
        """
        group: list[tuple[Record, memoryview]] = []
        size = 0
        for data, record in self._records(first, last):
            if group and (
                size + record.body_bytes > _BLOCK_BYTES or record.first != group[-1][0].last
            ):
                yield _join_records(group)
                group, size = [], 0
            group.append((record, data[record.body_offset : record.end]))
            size += record.body_bytes
        if group:
            yield _join_records(group)

    def find_first_since(self, seconds: float) -> int | None:
        """Return the first message that was accepted at or after a time; None if none is stored.

        Messages up to TIME_INDEX_STEP_SECONDS older may be included.
        """
        firsts = self._firsts()
        index = bisect_left(firsts[:-1], seconds, key=self._start_time)
        for first, next_first in pairwise([*firsts[max(0, index - 1) :], None]):
            assert first is not None
            with contextlib.suppress(FileNotFoundError):  # Removed: search in the next segment.
                for _, record in self._headers(first, next_first):
                    is_gap = record.kind == RecordKind.GAP
                    if not is_gap and record.time + TIME_INDEX_STEP_SECONDS > seconds:
                        return record.first
        return None

    def _start_time(self, first: int) -> float:
        """Return the acceptance time of the first message of a segment that is not the last one."""
        with contextlib.suppress(FileNotFoundError):
            for _, record in self._headers(first, first + 1):
                return record.time
        return float("inf")

    def _firsts(self) -> list[int]:
        try:
            found = (file_number(name) for name in os.listdir(self._folder))
            return sorted(number for number in found if number is not None)
        except FileNotFoundError:
            return []
        except OSError as error:
            raise _read_error(self._folder, error) from None

    # Extent --------------------------------------------------------------------------------------

    def _head(self, firsts: list[int]) -> int:
        first, tail = firsts[-1], self._tail
        with (self._folder / file_name(first)).open("rb", buffering=0) as file:
            status = os.fstat(file.fileno())
            size_and_mtime = status.st_size, status.st_mtime_ns
            if (tail.first, tail.inode) != (first, status.st_ino) or status.st_size < tail.at:
                tail = _Tail(first, status.st_ino, 0, first)
            if tail.size_and_mtime != size_and_mtime:
                tail = self._advance_tail(file.fileno(), tail)
                if status.st_mtime < time() - _SETTLED_SECONDS:
                    tail = replace(tail, size_and_mtime=size_and_mtime)
            if (tail.first, tail.inode, tail.head) != (
                self._tail.first,
                self._tail.inode,
                self._tail.head,
            ):
                sync_path(self._folder / file_name(first))
        self._sync_segments(firsts)
        self._tail = tail
        return tail.head

    def _advance_tail(self, descriptor: int, tail: _Tail) -> _Tail:
        """Return the tail after all further intact, consecutive records."""
        at, head, window = tail.at, tail.head, _WINDOW_BYTES
        while True:
            data = memoryview(os.pread(descriptor, window, at))
            found = records.read_record(data, 0, salt=self._salt)
            if isinstance(found, EndOfRecords):
                if found.problem and len(data) == window:
                    window *= 4  # The record may be longer than the window.
                    continue
                return replace(tail, at=at, head=head)
            while isinstance(found, Record):
                if not self._is_next(found, head):
                    return replace(tail, at=at, head=head)
                at, head = at + found.end - found.offset, found.last
                found = records.read_record(data, found.end, salt=self._salt)

    def _is_next(self, record: Record, expected: int) -> bool:
        return (
            record.kind in (RecordKind.MESSAGES, RecordKind.GAP)
            and record.class_id == self._class_id
            and record.first == expected
            and record.message_count > 0
        )

    def _sync_segments(self, firsts: list[int]) -> None:
        """Sync the content of all segments except the last one, and the names of all segments."""
        for first in firsts[:-1]:
            if first not in self._synced_segments:
                sync_path(self._folder / file_name(first))
                self._synced_segments.add(first)
        if self._tail.first != firsts[-1]:
            sync_path(self._folder)
            sync_path(self._folder.parent)

    # Records -------------------------------------------------------------------------------------

    def _records(self, first: int, last: int) -> Iterator[tuple[memoryview, Record]]:
        """Yield the intact records with some of the messages first..last-1, and the data of their
        file.
        """
        misses = 0
        while first < last and misses < _RETRIES_MAX:
            firsts = self._firsts()
            index = max(0, bisect_right(firsts, first) - 1)
            if not firsts or firsts[index] >= last:
                return
            next_first = firsts[index + 1] if index + 1 < len(firsts) else None
            expected = firsts[index]
            try:
                for data, record in self._headers(expected, next_first):
                    if record.first >= last:
                        return
                    if record.last > first and record.kind == RecordKind.MESSAGES:
                        if not records.is_intact(data, record):
                            self.problem = records.CHECKSUM_MISMATCH
                            return
                        yield data, record
                    expected = record.last
            except FileNotFoundError:  # The server removed the segment.
                misses += 1
                continue
            if next_first is None or expected < next_first:
                return
            first = next_first
        if first < last:
            raise _changing_error(self._folder)

    def _headers(self, first: int, next_first: int | None) -> Iterator[tuple[memoryview, Record]]:
        """Yield the records of one segment, including gaps, without verifying bodies.

        Args:
            first: First sequence of the segment.
            next_first: First sequence of the next segment; None for the last segment.

        Raises:
            FileNotFoundError: The server removed the segment.
        """
        data = self._bytes(first, is_final=next_first is not None)
        self.problem = ""
        at, expected = 0, first
        while next_first is None or expected < next_first:
            record = records.read_record(data, at, salt=self._salt, verify_body=False)
            if isinstance(record, EndOfRecords):
                self.problem = record.problem
                return
            if not self._is_next(record, expected):
                self.problem = f"expected message {expected}, found another record"
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
            raise _read_error(path, error) from None


def _join_records(group: list[tuple[Record, memoryview]]) -> MessageBlock:
    """Join consecutive records."""
    found = [record for record, _ in group]
    buffer = bytearray().join([*(body for _, body in group), bytes(RECEIVE_PADDING_BYTES)])
    first = found[0].first
    return MessageBlock(
        first, found[-1].last - first, [(record.first, record.time) for record in found], buffer
    )


def class_names(path: Path) -> dict[int, str]:
    """Return the name of each class in the journal at `path`, empty for none. The names are synced.

    Raises:
        JournalError: The journal cannot be read.
    """
    folder = path / STATE
    for attempt in range(_RETRIES_MAX):
        try:
            state, _ = read_state(
                folder, FileBuffer(), RecoveryResult(), salt=open_directory(path).salt
            )
            for name in os.listdir(folder):
                sync_path(folder / name)
            sync_path(folder)
        except (JournalError, FileNotFoundError):  # A newer state file has replaced it.
            if attempt == _RETRIES_MAX - 1:
                raise
        except OSError as error:
            raise _read_error(folder, error) from None
        else:
            return {cls.class_id: cls.name for cls in state.classes.values()}
    raise _changing_error(folder)


def sync_path(path: Path) -> None:
    """Sync a file or a directory. Raises OSError, except on a read-only file system."""
    try:
        sync_file(path)
    except OSError as error:
        if error.errno not in _NO_SYNC:
            raise


def _read_error(path: Path, error: OSError) -> JournalError:
    return JournalError(f"cannot read {path}: {error.strerror}")


def _changing_error(path: Path) -> JournalError:
    return JournalError(f"{path} changes faster than it can be read")
