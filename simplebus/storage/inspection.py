"""A journal as people look at it: what is in it, and whether it is whole.

Rule 1: nothing is written, so a server may use the directory meanwhile; what it is just writing
looks unfinished then.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from simplebus.core.errors import RemoteProtocolError
from simplebus.core.limits import DELIMITER_BYTES, HEADER_BYTES, MESSAGE_ID_MASK, RECEIVE_BYTES
from simplebus.core.protocol import envelope_batch, frames
from simplebus.core.protocol.envelope_batch import Envelope
from simplebus.core.protocol.frame_splitter import Scratch, split
from simplebus.core.protocol.frames import FrameBatch
from simplebus.core.snapshot import RecoveredState, PositionSnapshot
from simplebus.storage.directory import Directory, look
from simplebus.storage.errors import JournalError
from simplebus.storage.file_names import (
    CLASSES,
    STATE,
    class_id_of,
    dropped_number,
    file_name,
    folder_name,
)
from simplebus.storage.records import Record, publishers_of, search
from simplebus.storage.segments import (
    Files,
    Recovered,
    Segments,
    read_state,
    say_missing,
    say_no_state,
)

_PLAIN = Envelope()


@dataclass(frozen=True, slots=True)
class ClassSummary:
    """One class."""

    class_id: int
    name: str
    segments: int
    bytes: int
    """Of the files."""
    first: int
    """Sequence of the first message in them."""
    head: int
    """The sequence behind the last one."""
    floor: int
    """The lowest one that somebody needed when that was noted last."""
    times: tuple[float, float] | None
    """When the first and the last message were accepted; None where there is none."""
    durables: tuple[PositionSnapshot, ...]
    dropped: tuple[Path, ...]
    """Files that a server has given up."""
    dropped_bytes: int


@dataclass(frozen=True, slots=True)
class KeptMessage:
    """One message."""

    sequence: int
    time: float
    publisher: str
    """Whose number it carries; empty for nobody's."""
    number: int
    envelope: Envelope
    payload: bytes


class Inspection:
    """Of the journal in one directory. Raises JournalError.

    Messages behind something that is not whole, which a server leaves out when it comes back, are
    shown as well; `goes_on` false leaves them out, too.
    """

    def __init__(self, path: Path, *, goes_on: bool = True) -> None:
        self._goes_on = goes_on
        self.directory: Directory = look(path)
        self._files = Files()
        self._found = Recovered()
        self._image: RecoveredState = read_state(path / STATE, self._files, self._found)[0]
        self._scratch = Scratch(RECEIVE_BYTES)

    @property
    def problems(self) -> list[str]:
        """What was found not to be whole so far, a sentence each."""
        return self._found.dropped

    def class_id(self, wanted: int | str) -> int:
        """A class by its id or its name."""
        ids = self._ids()
        names = {each.name: each.class_id for each in self._image.classes.values()}
        class_id = wanted if isinstance(wanted, int) else names.get(wanted)
        if class_id not in ids:
            raise JournalError(f"{self.directory.path} holds no class {wanted!r}")
        return class_id

    def summaries(self, *, whole: bool = False) -> Iterator[ClassSummary]:
        """Every class. `whole`: all its messages are looked at, not only where records are."""
        for class_id in self._ids():
            yield self._summary(class_id, whole=whole)
        say_no_state(self.directory.path / STATE, self._image, self._found)

    def _ids(self) -> list[int]:
        folder = self.directory.path / CLASSES
        found = {class_id_of(each.name) for each in folder.iterdir()}
        return sorted({*self._image.classes, *(each for each in found if each is not None)})

    def _segments(self, class_id: int) -> Segments | None:
        folder = self.directory.path / CLASSES / folder_name(class_id)
        if not folder.is_dir() and class_id not in self._image.classes:
            return None
        below = math.inf if self._goes_on else 0
        return Segments(folder, class_id, self._files, self._found, goes_on_below=below)

    def _dropped(self, class_id: int) -> list[Path]:
        folder = self.directory.path / CLASSES / folder_name(class_id)
        paths = folder.iterdir() if folder.is_dir() else ()
        found = ((dropped_number(path.name), path) for path in paths)
        return [path for _, path in sorted((key, path) for key, path in found if key is not None)]

    def _summary(self, class_id: int, *, whole: bool) -> ClassSummary:
        kept = self._image.classes.get(class_id)
        segments = self._segments(class_id)
        firsts = segments.firsts if segments else []
        times: list[float] = []
        if segments is not None:
            for data, record in segments.headers(lambda record: whole):
                times = [*times[:1], record.time]
                if whole:
                    self._frames(data, record)
        folder = self.directory.path / CLASSES / folder_name(class_id)
        if whole and segments is not None:
            say_missing(folder, kept, segments, self._found)
        dropped = tuple(self._dropped(class_id))
        durables = [each for each in self._image.positions.values() if each.class_id == class_id]
        return ClassSummary(
            class_id,
            kept.name if kept else "",
            len(firsts),
            sum((folder / file_name(first)).stat().st_size for first in firsts),
            firsts[0] if firsts else 0,
            max(segments.head if segments else 0, kept.head if kept else 0),
            kept.floor if kept else 0,
            (times[0], times[-1]) if times else None,
            tuple(durables),
            dropped,
            sum(path.stat().st_size for path in dropped),
        )

    def messages(self, class_id: int, *, first: int = 0, count: int) -> Iterator[KeptMessage]:
        """Up to so many messages of a class, from sequence `first` on."""
        segments = self._segments(class_id)
        if segments is None:
            return
        last = first + count
        for data, record in segments.records(lambda record: record.last > first):
            if record.first >= last:
                return
            yield from self._of_record(data, record, first, last)

    def dropped(self, class_id: int, *, first: int = 0, count: int) -> Iterator[KeptMessage]:
        """The same of what a server has given up: the whole records in these files. A sequence may
        come several times, and others have it, too."""
        left = count
        for path in self._dropped(class_id):
            data = self._files.read(path)
            for record in search(data, 0, class_id=class_id, first=0):
                for message in self._of_record(data, record, first, record.last):
                    if not left:
                        return
                    left -= 1
                    yield message

    def _of_record(
        self, data: memoryview, record: Record, first: int, last: int
    ) -> Iterator[KeptMessage]:
        """Its messages first..last-1."""
        names = [name for n, name in publishers_of(data, record) for _ in range(n)]
        sequence = record.first
        for batch in self._frames(data, record):
            for at in range(batch.count):
                if first <= sequence < last:
                    frame = batch.slice(at, at + 1).data.tobytes()
                    yield _message(sequence, record, names[sequence - record.first], frame)
                sequence += 1

    def _frames(self, data: memoryview, record: Record) -> Iterator[FrameBatch]:
        at = record.body_at
        if record.body_bytes > RECEIVE_BYTES:
            self._scratch = Scratch(record.body_bytes)
        while at < record.end:
            batch = split(self._files.buffer, at, record.end, self._scratch)
            if batch is None:
                self.problems.append(
                    f"class {record.class_id}: the record of the messages from {record.first} on "
                    f"ends with {record.end - at} bytes that are no frame"
                )
                return
            yield batch
            at += batch.data.size


def _message(sequence: int, record: Record, publisher: str, frame: bytes) -> KeptMessage:
    frame_type, _, number, _ = frames.HEADER.unpack_from(frame)
    payload, read = frame[HEADER_BYTES:-DELIMITER_BYTES], _PLAIN
    if frame_type == frames.ENVELOPE:
        try:
            read, payload = envelope_batch.decode(payload)
        except RemoteProtocolError as error:
            raise JournalError(
                f"message {sequence} of class {record.class_id} is none: {error.sentence}"
            ) from None
    return KeptMessage(sequence, record.time, publisher, number & MESSAGE_ID_MASK, read, payload)
