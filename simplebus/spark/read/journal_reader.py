"""Reader of a journal's files, with the interface of BusReader; the server may run or not.

The server does not see this reader, so it may delete messages that a query still needs.
Executors open the files themselves; errors therefore name the machine.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np

from simplebus.core.limits import DELIMITER_BYTES, HEADER_BYTES
from simplebus.core.protocol.frame_splitter import SplitterScratch, split_frames
from simplebus.core.protocol.frames import DELIMITER
from simplebus.spark.arrow_columns import FetchedFrames
from simplebus.spark.options import class_id
from simplebus.spark.read.bus_reader import ClassMissingError, report_losses
from simplebus.spark.read.offsets import BusExtent, ClassExtent, check_distinct
from simplebus.spark.read.planner import LostRange, MessageRange
from simplebus.storage.directory import open_directory
from simplebus.storage.errors import JournalError
from simplebus.storage.journal_reader import ClassJournalReader, MessageBlock, class_names

# Bytes converted to columns at once: a server with a slow disk writes large records.
_BATCH_BYTES = 4 * 1024 * 1024


class SparkJournalReader:
    """Reader of a data directory; used by one thread, as a context manager. Raises JournalError."""

    def __init__(self, path: str) -> None:
        self.server = path
        self._path = Path(path)
        self._ids: dict[str, int] = {}
        self._files: dict[int, ClassJournalReader] = {}

    def __enter__(self) -> Self:
        self._read_memory_id()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Do nothing: files are open only during a read."""

    def _read_memory_id(self) -> str:
        """Return the memory id of the journal."""
        try:
            return open_directory(self._path).bus_id
        except JournalError as error:
            raise JournalError(
                f"on {socket.gethostname()}: {error}; the driver and every executor read the "
                "files themselves, so the path must exist on all their machines"
            ) from None

    def class_id(self, name: str) -> int:
        """Return the id of a class, given as digits or a name. Raises ClassMissingError."""
        resolved_id = self._ids.get(name)
        if resolved_id is None:
            resolved_id = class_id(name)
            if resolved_id is None:
                ids = {called: number for number, called in class_names(self._path).items()}
                resolved_id = ids.get(name)
            if resolved_id is None:
                raise self._class_error(name)
            self._ids[name] = resolved_id
        return resolved_id

    def class_names(self) -> list[str]:
        """Return the names of all classes."""
        return [name for name in class_names(self._path).values() if name]

    def check_classes(self, names: Sequence[str]) -> None:
        """Raise ClassMissingError if a class, given by its name, does not exist."""
        for name in names:
            self.class_id(name)

    def _class_error(self, name: str) -> ClassMissingError:
        return ClassMissingError(
            f"the journal at {self.server} has no class {name!r}; check the option subscribe"
        )

    def _class_files(self, name: str) -> ClassJournalReader:
        number = self.class_id(name)
        if number not in self._files:
            self._files[number] = ClassJournalReader(self._path, number)
        return self._files[number]

    def get_extent(self, names: Sequence[str], *, make: bool = False) -> BusExtent:
        """Return the synced sequences of these classes, with the memory id.

        Args:
            names: Classes by id or name.
            make: True to treat a missing class, given by id, as empty.

        Raises:
            ClassMissingError: A class does not exist.
            OffsetError: Two names are the same class.
        """
        ids = [self.class_id(name) for name in names]
        check_distinct(dict(zip(names, ids, strict=True)), f"class of {self.server}", "subscribe")
        while True:
            bus, extents = self._read_memory_id(), {}
            for name in names:
                files = self._class_files(name)
                if not (make or files.exists or self.class_id(name) in class_names(self._path)):
                    raise self._class_error(name)
                extents[name] = ClassExtent(*files.read_extent())
            if bus == self._read_memory_id():
                return BusExtent(bus, extents)

    def find_first_since(self, times: Mapping[str, int]) -> dict[str, int | None]:
        """Return the first message of each class accepted at or after a time; None if no such
        message is stored.

        Messages accepted shortly before the time may be included. Raises ClassMissingError.

        Args:
            times: Milliseconds since 1970, by class.
        """
        return {
            name: self._class_files(name).find_first_since(milliseconds / 1000)
            for name, milliseconds in times.items()
        }

    def read(self, message_range: MessageRange, *, strict: bool) -> Iterator[FetchedFrames]:
        """Yield the messages of a range, in pieces of some megabytes.

        Lost messages raise DataLossError if `strict`; otherwise they are logged and skipped.
        """
        if (bus := self._read_memory_id()) != message_range.memory_id:
            reason = f"the journal belongs to another bus now, with the memory id {bus}"
            self._report_loss(
                message_range, message_range.first, message_range.last, reason, strict=strict
            )
            return
        files, next_sequence = self._class_files(message_range.class_), message_range.first
        for piece in files.read_blocks(message_range.first, message_range.last):
            for frames in split_piece(piece):
                frames = frames.slice_sequences(next_sequence, message_range.last)
                if frames.count:
                    if frames.first > next_sequence:
                        reason = f"the journal holds messages from {frames.first} on"
                        self._report_loss(
                            message_range, next_sequence, frames.first, reason, strict=strict
                        )
                    yield frames
                    next_sequence = frames.first + frames.count
        if next_sequence < message_range.last:
            first, head = files.read_extent()
            reason = files.problem or f"the journal holds messages from {first} to {head - 1}"
            self._report_loss(
                message_range, next_sequence, message_range.last, reason, strict=strict
            )

    def _report_loss(
        self, message_range: MessageRange, first: int, last: int, reason: str, *, strict: bool
    ) -> None:
        report_losses(
            [LostRange(message_range.server, message_range.class_, first, last, reason)],
            strict=strict,
        )


def split_piece(piece: MessageBlock) -> Iterator[FetchedFrames]:
    """Yield the messages of a journal piece, some megabytes at a time.

    Raises JournalError for bytes that are not frames.
    """
    steps = np.array([step for step, _ in piece.times], np.int64)
    seconds = np.array([time for _, time in piece.times], np.float64)
    times = np.round(seconds * 1e6).astype(np.int64)
    buffer, size, first = piece.buffer, piece.size, piece.first
    scratch = SplitterScratch(min(size, _BATCH_BYTES))
    begin = 0
    while begin < size:
        limit, bounds, end = min(size, begin + _BATCH_BYTES), [np.zeros(1, np.int64)], begin
        while end < limit:
            batch = split_frames(buffer, end, limit, scratch)
            if batch is None:
                break
            bounds.append(batch.ends + (end - begin))
            end += batch.data.size
        if end == begin:  # One frame is longer than the batch.
            end = buffer.find(DELIMITER, begin + HEADER_BYTES, size) + DELIMITER_BYTES
            if end < begin:
                raise JournalError(
                    f"expected a frame of message {first}, got {size - begin} bytes without a "
                    "delimiter"
                )
            bounds.append(np.array([end - begin], np.int64))
        whole = end - begin == size
        raw = buffer if whole else bytes(memoryview(buffer)[begin:end])
        found = FetchedFrames(raw, np.concatenate(bounds), first, steps, times)
        yield found
        begin, first = end, first + found.count
    if first != piece.first + piece.count:
        raise JournalError(
            f"expected {piece.count} messages from {piece.first} on in the records, found "
            f"{first - piece.first}"
        )
