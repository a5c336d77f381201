"""What Spark's processes read from a journal's files, as `bus` asks a bus; a server may run or not.

Rule 1: nothing is told to the server: what it lets go of is gone for a query, too.
Rule 2: executors open the files themselves, so an error says on which machine.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np

from simplebus.core.limits import DELIMITER_BYTES, HEADER_BYTES
from simplebus.core.protocol.frame_splitter import Scratch, split
from simplebus.core.protocol.frames import DELIMITER
from simplebus.spark.arrow_columns import Frames
from simplebus.spark.options import class_id
from simplebus.spark.read.bus_reader import ClassMissingError, lose
from simplebus.spark.read.offsets import ClassExtent, BusExtent, check_apart
from simplebus.spark.read.planner import Loss, Range
from simplebus.storage.directory import look
from simplebus.storage.errors import JournalError
from simplebus.storage.journal_reader import ClassFiles, Piece, class_names

# What a column of bytes is made of at once: a server that is slow to write makes large records.
_FRAMES_BYTES = 4 * 1024 * 1024


class SourceJournal:
    """A data directory that is read. Used by one thread, as a block. Raises JournalError."""

    def __init__(self, path: str) -> None:
        self.server = path
        self._path = Path(path)
        self._ids: dict[str, int] = {}
        self._files: dict[int, ClassFiles] = {}

    def __enter__(self) -> Self:
        self._look()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """There is nothing to be closed."""

    def _look(self) -> str:
        """The identity of the memory that the journal is of."""
        try:
            return look(self._path).bus
        except JournalError as error:
            raise JournalError(
                f"on {socket.gethostname()}: {error}; who runs a query, and every executor, reads "
                "the files itself, so the path is to be there on all their machines"
            ) from None

    def class_id(self, name: str) -> int:
        """The id of a class, given in digits or by name. Raises ClassMissingError."""
        known = self._ids.get(name)
        if known is None:
            known = class_id(name)
            if known is None:
                ids = {called: number for number, called in class_names(self._path).items()}
                known = ids.get(name)
            if known is None:
                raise self._missing(name)
            self._ids[name] = known
        return known

    def _missing(self, name: str) -> ClassMissingError:
        return ClassMissingError(
            f"the journal at {self.server} holds no class {name!r}, so there is nothing to read"
        )

    def _class(self, name: str) -> ClassFiles:
        number = self.class_id(name)
        if number not in self._files:
            self._files[number] = ClassFiles(self._path, number)
        return self._files[number]

    def memory(self, names: Sequence[str], *, make: bool = False) -> BusExtent:
        """What the journal holds of these classes, and whose memory that is. All of it is on disk
        then.

        A class by its id that no message was ever in is empty if `make`, or raises
        ClassMissingError. Raises OffsetError for two names of one class.
        """
        ids = [self.class_id(name) for name in names]
        check_apart(dict(zip(names, ids, strict=True)), f"class of {self.server}", "subscribe")
        while True:
            bus, held = self._look(), {}
            for name in names:
                files = self._class(name)
                if not (make or files.is_there or self.class_id(name) in class_names(self._path)):
                    raise self._missing(name)
                held[name] = ClassExtent(*files.extent())
            if bus == self._look():
                return BusExtent(bus, held)

    def first_since(self, times: Mapping[str, int]) -> dict[str, int | None]:
        """The first message of each class that was accepted at or after a time, in milliseconds
        since 1970; a few accepted shortly before may come with it. None: there is none yet.

        Raises ClassMissingError.
        """
        return {
            name: self._class(name).first_since(milliseconds / 1000)
            for name, milliseconds in times.items()
        }

    def read(self, wanted: Range, *, strict: bool) -> Iterator[Frames]:
        """The messages of a range, in pieces of about a megabyte.

        What is gone raises DataLossError if `strict`; else it is logged and left out.
        """
        if (bus := self._look()) != wanted.bus:
            why = f"the journal is of another bus now, with the memory {bus}"
            self._lose(wanted, wanted.first, wanted.last, why, strict=strict)
            return
        files, at = self._class(wanted.class_), wanted.first
        for piece in files.pieces(wanted.first, wanted.last):
            for frames in frames_of(piece):
                frames = frames.between(at, wanted.last)
                if frames.count:
                    if frames.first > at:
                        why = f"the journal holds messages from {frames.first} on"
                        self._lose(wanted, at, frames.first, why, strict=strict)
                    yield frames
                    at = frames.first + frames.count
        if at < wanted.last:
            first, head = files.extent()
            why = files.problem or f"the journal holds messages from {first} to {head - 1}"
            self._lose(wanted, at, wanted.last, why, strict=strict)

    def _lose(self, wanted: Range, first: int, last: int, why: str, *, strict: bool) -> None:
        lose([Loss(wanted.server, wanted.class_, first, last, why)], strict=strict)


def frames_of(piece: Piece) -> Iterator[Frames]:
    """The messages of a piece, some megabytes at a time. Raises JournalError for what are none."""
    steps = np.array([step for step, _ in piece.times], np.int64)
    seconds = np.array([time for _, time in piece.times], np.float64)
    times = np.round(seconds * 1e6).astype(np.int64)
    buffer, size, first = piece.buffer, piece.size, piece.first
    scratch = Scratch(min(size, _FRAMES_BYTES))
    begin = 0
    while begin < size:
        limit, bounds, end = min(size, begin + _FRAMES_BYTES), [np.zeros(1, np.int64)], begin
        while end < limit:
            batch = split(buffer, end, limit, scratch)
            if batch is None:
                break
            bounds.append(batch.ends + (end - begin))
            end += batch.data.size
        if end == begin:  # One frame is longer than that.
            end = buffer.find(DELIMITER, begin + HEADER_BYTES, size) + DELIMITER_BYTES
            if end < begin:
                raise JournalError(
                    f"the messages from {first} on: {size - begin} bytes behind the last are none"
                )
            bounds.append(np.array([end - begin], np.int64))
        whole = end - begin == size
        raw = buffer if whole else bytes(memoryview(buffer)[begin:end])
        found = Frames(raw, np.concatenate(bounds), first, steps, times)
        yield found
        begin, first = end, first + found.count
    if first != piece.first + piece.count:
        raise JournalError(
            f"the records say {piece.count} messages from {piece.first} on, and hold "
            f"{first - piece.first}"
        )
