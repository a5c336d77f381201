"""Contents of a journal for `simplebus journal`.

Nothing is written, so a server may use the directory at the same time; a record that it is writing
appears incomplete.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from simplebus.core.errors import RemoteProtocolError
from simplebus.core.limits import DELIMITER_BYTES, HEADER_BYTES, MESSAGE_ID_MASK, RECEIVE_BYTES
from simplebus.core.protocol import envelope_batch, frames
from simplebus.core.protocol.durability import Durability
from simplebus.core.protocol.envelope_batch import Envelope
from simplebus.core.protocol.frame_splitter import SplitterScratch, split_frames
from simplebus.core.protocol.frames import FrameBatch
from simplebus.core.snapshot import PositionSnapshot
from simplebus.storage.directory import JournalDirectory, open_directory
from simplebus.storage.errors import JournalError
from simplebus.storage.file_names import (
    CLASSES,
    STATE,
    class_id_of,
    dropped_number,
    file_name,
    folder_name,
)
from simplebus.storage.records import Record, decode_producer_runs, find_records
from simplebus.storage.segments import (
    FileBuffer,
    Gap,
    RecoveryResult,
    SegmentChain,
    StoredBatches,
    read_state,
    report_missing_state,
    stored_batches,
)

_PLAIN = Envelope()


@dataclass(frozen=True, slots=True)
class ClassSummary:
    """Contents of one class."""

    class_id: int
    name: str
    segments: int
    bytes: int
    """Total size of the segments."""
    first: int
    """Sequence of the first stored message."""
    head: int
    """Sequence after the last stored message."""
    floor: int
    """Lowest sequence that a position needed when the state was last written."""
    times: tuple[float, float] | None
    """Acceptance times of the first and last message, in seconds since 1970; None without messages.
    """
    durables: tuple[PositionSnapshot, ...]
    dropped: tuple[Path, ...]
    """Files that recovery has ignored."""
    dropped_bytes: int
    gaps: tuple[Gap, ...]
    """Damaged messages that are followed by intact ones."""


@dataclass(frozen=True, slots=True)
class InspectedMessage:
    """A message in a journal."""

    sequence: int
    time: float
    publisher: str
    """Publisher of the message number; empty if it has none."""
    number: int
    envelope: Envelope
    payload: bytes


class JournalInspection:
    """Reader of the journal in one directory. Raises JournalError.

    Messages after a damaged record, which a server skips at recovery, are included unless
    `reads_past_damage` is False.
    """

    def __init__(self, path: Path, *, reads_past_damage: bool = True) -> None:
        self.directory: JournalDirectory = open_directory(path)
        self._files = FileBuffer()
        self._found = RecoveryResult()
        self._state, first_new_batches = read_state(
            path / STATE,
            self._files,
            self._found,
            salt=self.directory.salt,
            boot_id=self.directory.boot,
        )
        # Without a state the durability of the server is unknown: as much as possible is kept.
        self._stored = (
            StoredBatches(path / CLASSES, self.directory.salt, self._found, is_same_boot=True)
            if reads_past_damage
            else stored_batches(
                path / CLASSES,
                self._found,
                self._state,
                first_new_batches,
                salt=self.directory.salt,
                durability=Durability.DISK,
                boot_id=self.directory.boot,
            )
        )
        self._scratch = SplitterScratch(RECEIVE_BYTES)

    @property
    def problems(self) -> list[str]:
        """Descriptions of the damage found so far."""
        return self._found.problems

    @property
    def found(self) -> RecoveryResult:
        """Damage found so far."""
        return self._found

    def class_id(self, class_reference: int | str) -> int:
        """Return the id of a class, by id or name."""
        ids = self._ids()
        names = {cls.name: cls.class_id for cls in self._state.classes.values()}
        class_id = (
            class_reference if isinstance(class_reference, int) else names.get(class_reference)
        )
        if class_id not in ids:
            raise JournalError(f"{self.directory.path} contains no class {class_reference!r}")
        return class_id

    def summaries(self, *, verify: bool = False) -> Iterator[ClassSummary]:
        """Yield a summary of every class. With `verify`, all messages are read, not only record
        headers.
        """
        for class_id in self._ids():
            yield self._summary(class_id, verify=verify)
        report_missing_state(self.directory.path / STATE, self._state, self._found)

    def _ids(self) -> list[int]:
        folder = self.directory.path / CLASSES
        found = {class_id_of(path.name) for path in folder.iterdir()}
        return sorted(
            {*self._state.classes, *(class_id for class_id in found if class_id is not None)}
        )

    def _segments(self, class_id: int) -> SegmentChain | None:
        folder = self.directory.path / CLASSES / folder_name(class_id)
        if not folder.is_dir() and class_id not in self._state.classes:
            return None
        return SegmentChain(
            folder,
            class_id,
            self._files,
            self._found,
            salt=self.directory.salt,
            stored=self._stored,
            snapshot=self._state.find_class(class_id),
        )

    def _dropped(self, class_id: int) -> list[Path]:
        folder = self.directory.path / CLASSES / folder_name(class_id)
        paths = folder.iterdir() if folder.is_dir() else ()
        found = ((dropped_number(path.name), path) for path in paths)
        return [path for _, path in sorted((key, path) for key, path in found if key is not None)]

    def _summary(self, class_id: int, *, verify: bool) -> ClassSummary:
        snapshot = self._state.classes.get(class_id)
        segments = self._segments(class_id)
        firsts = segments.firsts if segments else []
        times: list[float] = []
        if segments is not None:
            for data, record in segments.headers(lambda record: verify):
                times = [*times[:1], record.time]
                if verify:
                    self._split_record(data, record)
        folder = self.directory.path / CLASSES / folder_name(class_id)
        if verify and segments is not None:
            segments.report_missing()
        dropped = tuple(self._dropped(class_id))
        durables = [
            position for position in self._state.positions.values() if position.class_id == class_id
        ]
        return ClassSummary(
            class_id,
            snapshot.name if snapshot else "",
            len(firsts),
            sum((folder / file_name(first)).stat().st_size for first in firsts),
            firsts[0] if firsts else 0,
            max(segments.head if segments else 0, snapshot.head if snapshot else 0),
            snapshot.floor if snapshot else 0,
            (times[0], times[-1]) if times else None,
            tuple(durables),
            dropped,
            sum(path.stat().st_size for path in dropped),
            tuple(segments.gaps) if segments is not None else (),
        )

    def messages(self, class_id: int, *, first: int = 0, count: int) -> Iterator[InspectedMessage]:
        """Yield up to `count` messages of a class from sequence `first` on."""
        segments = self._segments(class_id)
        if segments is None:
            return
        last = first + count
        for data, record in segments.records(lambda record: record.last > first):
            if record.first >= last:
                return
            yield from self._record_messages(data, record, first, last)

    def dropped(self, class_id: int, *, first: int = 0, count: int) -> Iterator[InspectedMessage]:
        """Yield up to `count` messages in intact records of ignored files.

        A sequence may occur several times, and in valid files, too.
        """
        remaining_count = count
        for path in self._dropped(class_id):
            data = self._files.read(path)
            found = find_records(data, 0, class_id=class_id, first=0, salt=self.directory.salt)
            for record in found:
                for message in self._record_messages(data, record, first, record.last):
                    if not remaining_count:
                        return
                    remaining_count -= 1
                    yield message

    def _record_messages(
        self, data: memoryview, record: Record, first: int, last: int
    ) -> Iterator[InspectedMessage]:
        """Yield the messages first..last-1 of a record."""
        names = [name for n, name in decode_producer_runs(data, record) for _ in range(n)]
        sequence = record.first
        for batch in self._split_record(data, record):
            for at in range(batch.count):
                if first <= sequence < last:
                    frame = batch.slice(at, at + 1).data.tobytes()
                    yield _message(sequence, record, names[sequence - record.first], frame)
                sequence += 1

    def _split_record(self, data: memoryview, record: Record) -> Iterator[FrameBatch]:
        at = record.body_offset
        if record.body_bytes > RECEIVE_BYTES:
            self._scratch = SplitterScratch(record.body_bytes)
        while at < record.end:
            batch = split_frames(self._files.buffer, at, record.end, self._scratch)
            if batch is None:
                self.problems.append(
                    f"class {record.class_id}: the record of message {record.first} ends with "
                    f"{record.end - at} bytes that are not a frame"
                )
                return
            yield batch
            at += batch.data.size


def _message(sequence: int, record: Record, publisher: str, frame: bytes) -> InspectedMessage:
    frame_type, _, number, _ = frames.HEADER.unpack_from(frame)
    payload, read = frame[HEADER_BYTES:-DELIMITER_BYTES], _PLAIN
    if frame_type == frames.ENVELOPE:
        try:
            read, payload = envelope_batch.decode(payload)
        except RemoteProtocolError as error:
            raise JournalError(
                f"message {sequence} of class {record.class_id} is invalid: {error.sentence}"
            ) from None
    return InspectedMessage(
        sequence, record.time, publisher, number & MESSAGE_ID_MASK, read, payload
    )
