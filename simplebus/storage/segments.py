"""Reading of segments and state files, with detection of damage.

A class ends at its first damaged record; later data is reported and skipped, and no file is
changed.
A damaged record whose messages are not needed is skipped, too. If nothing follows a damaged record,
that is reported as damage, because a power failure may have removed what followed.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from simplebus.core.limits import RECEIVE_PADDING_BYTES
from simplebus.core.snapshot import ClassSnapshot, RecoveredState, decode_changes
from simplebus.storage import records
from simplebus.storage.errors import JournalError
from simplebus.storage.file_names import file_name, file_number
from simplebus.storage.records import EndOfRecords, Record, RecordKind

OTHER_PUBLISHERS = ""
"""Key, in the second result of `read_state`, of the publishers without an entry of their own.

The state of their numbers is that of the snapshot at the start of the state file, so the value is
the first write batch after that snapshot; 0 without a state file. A publisher with an empty name
has no such state, so the key is free.
"""


@dataclass(slots=True)
class RecoveryResult:
    """Result of reading a journal."""

    message_count: int = 0
    last_batch_number: int = 0
    """Highest number of a write batch."""
    problems: list[str] = field(default_factory=list)
    """Descriptions of the damage and of the skipped messages."""
    ignored_files: list[Path] = field(default_factory=list)
    """Files without valid data."""
    snapshot_heads: dict[int, int] = field(default_factory=dict)
    """Head of each class in the last snapshot."""


class FileBuffer:
    """Reads whole files into one reused buffer."""

    def __init__(self) -> None:
        self.buffer = bytearray()

    def read(self, path: Path) -> memoryview:
        """Return the content of a file, valid until the next call.

        RECEIVE_PADDING_BYTES follow the content in the buffer. Raises JournalError.
        """
        try:
            with path.open("rb", buffering=0) as file:
                size = os.fstat(file.fileno()).st_size
                if len(self.buffer) < size + RECEIVE_PADDING_BYTES:
                    self.buffer = bytearray(size + RECEIVE_PADDING_BYTES)
                view = memoryview(self.buffer)
                at = 0
                while at < size and (count := file.readinto(view[at:size])):
                    at += count
        except OSError as error:
            raise JournalError(f"cannot read {path}: {error.strerror}") from None
        return view[:at]


def read_state(
    folder: Path, files: FileBuffer, found: RecoveryResult
) -> tuple[RecoveredState, dict[str, int]]:
    """Read the newest intact state file.

    Returns:
        The state, and by publisher name the first write batch whose records may contain message
        numbers that the state does not contain; by `OTHER_PUBLISHERS` that of all others.
    """
    for number in sorted(numbers(folder), reverse=True):
        path = folder / file_name(number)
        data = files.read(path)
        record = records.read_record(data, 0)
        if isinstance(record, EndOfRecords) or record.kind != RecordKind.SNAPSHOT:
            # The server was stopped while writing this file; the previous one is valid.
            if isinstance(record, Record) or record.problem:
                found.problems.append(f"{path}: no intact snapshot at the start; ignored the file")
            continue
        state, news_since = RecoveredState(), {OTHER_PUBLISHERS: record.batch_number + 1}
        while isinstance(record, Record):
            found.last_batch_number = max(found.last_batch_number, record.batch_number)
            try:
                changes = decode_changes(data[record.body_offset : record.end])
            except ValueError as error:
                found.problems.append(f"{path}: {error} at byte {record.offset}; skipped the rest")
                break
            state.apply_changes(changes, record.batch_number)
            if record.kind == RecordKind.SNAPSHOT:
                found.snapshot_heads = {number: each.head for number, each in state.classes.items()}
            if record.kind == RecordKind.CHANGES:
                news_since.update((each.name, record.batch_number) for each in changes.producers)
            record = records.read_record(data, record.end)
        if isinstance(record, EndOfRecords) and record.problem:
            found.problems.append(
                f"{path}: {record.problem} at byte {record.offset}; skipped the rest"
            )
        return state, news_since
    return RecoveredState(), {OTHER_PUBLISHERS: 0}


class SegmentChain:
    """Segments of a class, in order, as far as they are contiguous."""

    def __init__(
        self,
        folder: Path,
        class_id: int,
        files: FileBuffer,
        found: RecoveryResult,
        *,
        continue_below_batch: float = 0,
        known_head: float = math.inf,
        continue_at_sequence: int = -1,
        class_name: str = "",
    ) -> None:
        """List the segments of a class.

        Args:
            continue_below_batch: Continue after damage with records of lower write batches, if
                they were stored when the state was written. Data that was skipped before stays
                skipped.
            known_head: Head of the class in the state.
            continue_at_sequence: Continue after missing messages with this sequence: they were
                missing already when it was accepted.
            class_name: Name for reports; empty for the id.
        """
        self.class_id = class_id
        self.class_label = class_name or str(class_id)
        self.lost_count = 0
        """Number of skipped messages, as far as known."""
        self._continue_below = continue_below_batch
        self._known_head = known_head
        self._continue_at = continue_at_sequence
        self.firsts = sorted(numbers(folder)) if folder.is_dir() else []
        self.first = self.firsts[0] if self.firsts else None
        """First sequence with a file; None without files."""
        self.has_reported_end = False
        """True if missing messages at the end were reported."""
        self.head = self.firsts[0] if self.firsts else 0
        """Sequence after the last message, once all records were read."""
        self._folder = folder
        self._files = files
        self._found = found

    def starts(self) -> list[SegmentStart]:
        """Return the first record header of each segment."""
        return list(self._starts(0))

    def _starts(self, first_index: int) -> Iterator[SegmentStart]:
        return (_start(self._folder / file_name(first)) for first in self.firsts[first_index:])

    def ignore_outdated(self) -> None:
        """Ignore segments that reappeared, like `headers`, but without reading: batch numbers
        ascend.
        """
        latest = 0
        for first, start in zip(list(self.firsts), self.starts(), strict=True):
            if start.header is not None and start.header.batch_number < latest:
                self._ignore_segment(self.firsts.index(first))
            elif start.header is not None:
                latest = start.header.batch_number

    def skip_front(self, number: int) -> None:
        """Skip the first `number` segments."""
        del self.firsts[:number]
        self.head = self.firsts[0]

    def records(self, is_wanted: Callable[[Record], bool]) -> Iterator[tuple[memoryview, Record]]:
        """Yield the intact records that are wanted, with the data of their file."""
        for data, record in self.headers(is_wanted):
            if is_wanted(record):
                yield data, record

    def headers(self, is_wanted: Callable[[Record], bool]) -> Iterator[tuple[memoryview, Record]]:
        """Yield all records with the data of their file. Bodies of unwanted records are not
        verified.
        """
        for at, first in enumerate(self.firsts):
            following = self._following(at)
            path = self._folder / file_name(first)
            data = self._files.read(path)
            position, batch_number = 0, 0
            is_torn = False
            while True:
                if following is not None and self.head >= following:
                    if not self._is_outdated(following, data, position, batch_number):
                        break
                    self._ignore_segment(at + 1)
                    following = self._following(at)
                    continue
                record = self._next(data, position, is_wanted)
                if isinstance(record, Record):
                    if following is None and not is_torn and not is_wanted(record):
                        is_torn = not records.is_intact(data, record)
                    yield data, record
                    self.head, position, batch_number = record.last, record.end, record.batch_number
                    continue
                problem = record.problem
                if not problem and is_torn:  # A power failure may have removed what followed.
                    problem = "no data after a damaged record"
                if not problem:
                    break
                intact = self._intact_records_after(data, position, following)
                end = intact[-1].last if intact else self.head
                can_continue = bool(intact) and self._can_continue_at(intact[0])
                if can_continue:
                    end = intact[0].first
                self._report(
                    _describe_damage(path, position, problem, self.class_label, self.head, end),
                    is_complete=bool(record.problem or intact),
                )
                if not can_continue:
                    if position == 0:  # The next segment to be written has the same name.
                        self._found.ignored_files.append(path)
                    if following is None:
                        self.lost_count += end - self.head
                    break
                self.lost_count += end - self.head
                self.head, position, is_torn = end, intact[0].offset, False
            if following is not None and self.head < following:
                starts = (start.header for start in self._starts(at + 1))
                header = next((each for each in starts if each is not None), None)
                if header is None or not (
                    header.batch_number < self._continue_below or header.first == self._continue_at
                ):
                    self._ignore_rest(self.firsts[at + 1 :])
                    break
                self.lost_count += following - self.head
                self._report(
                    f"{path}: missing {_describe_range(self.class_label, self.head, following)}"
                )
                self.head = following

    def _following(self, at: int) -> int | None:
        return self.firsts[at + 1] if at + 1 < len(self.firsts) else None

    def _is_outdated(
        self, following: int, data: memoryview, position: int, batch_number: int
    ) -> bool:
        """Return True if a segment was ignored before and reappeared, for example after a power
        failure.

        The data read from the previous segment ends at `position`, with `batch_number`.
        """
        header = _start(self._folder / file_name(following)).header
        if self.head == following:  # The previous segment may contain newer records from here on.
            record = records.read_record(data, position)
            if isinstance(record, EndOfRecords):
                return header is None and bool(record.problem)
            if record.first != following:
                return False
            batch_number = record.batch_number
        return header is None or header.batch_number < batch_number

    def _ignore_segment(self, at: int) -> None:
        """Ignore a segment that was ignored before."""
        path = self._folder / file_name(self.firsts.pop(at))
        self._report(f"{path}: ignored again; the file was ignored before and has reappeared")
        self._found.ignored_files.append(path)

    def _next(
        self, data: memoryview, position: int, is_wanted: Callable[[Record], bool]
    ) -> Record | EndOfRecords:
        """Return the record at an offset if it continues the class."""
        record = records.read_record(data, position, verify_body=False)
        if isinstance(record, EndOfRecords):
            return record
        self._found.last_batch_number = max(self._found.last_batch_number, record.batch_number)
        if record.kind != RecordKind.MESSAGES or record.class_id != self.class_id:
            return EndOfRecords(
                position, f"a record of kind {record.kind}, class {record.class_id}"
            )
        if record.first != self.head or not record.message_count:
            problem = (
                f"record of {record.message_count} messages from {record.first}, expected message "
                f"{self.head}"
            )
            return EndOfRecords(position, problem)
        if is_wanted(record) and not records.is_intact(data, record):
            return EndOfRecords(position, records.CHECKSUM_MISMATCH)
        return record

    def _intact_records_after(
        self, data: memoryview, position: int, following: int | None
    ) -> list[Record]:
        """Return the intact records after a damaged one."""
        found = records.find_records(data, position + 1, class_id=self.class_id, first=self.head)
        return [each for each in found if following is None or each.first < following]

    def _can_continue_at(self, record: Record) -> bool:
        return record.batch_number < self._continue_below and record.first < self._known_head

    def _ignore_rest(self, firsts: list[int]) -> None:
        """Ignore the segments after missing messages."""
        paths = [self._folder / file_name(first) for first in firsts]
        last = records.find_records(
            self._files.read(paths[-1]), 0, class_id=self.class_id, first=firsts[-1]
        )
        end = max((each.last for each in last), default=firsts[-1])
        self.lost_count += end - self.head
        self._report(
            f"{paths[0]}: {_describe_range(self.class_label, self.head, firsts[0])} missing before "
            f"this file; ignored {len(paths)} files; skipped "
            f"{_describe_range(self.class_label, self.head, end)}"
        )
        self._found.ignored_files += paths

    def _report(self, sentence: str, *, is_complete: bool = True) -> None:
        """Add a problem. `is_complete` is True if missing messages at the end need no further
        report.
        """
        self.has_reported_end |= is_complete
        self._found.problems.append(sentence)


def report_missing_state(folder: Path, state: RecoveredState, found: RecoveryResult) -> None:
    """Report a missing state file, after everything was read."""
    if found.last_batch_number > 1 and not state.batch_number and not found.problems:
        found.problems.append(
            f"{folder}: no state file although messages are stored; class names, durables, "
            "acknowledgements and publisher states are lost"
        )


def report_missing_messages(
    folder: Path, kept: ClassSnapshot | None, segments: SegmentChain, found: RecoveryResult
) -> int:
    """Report messages that the state mentions and that have no file.

    Returns:
        The number of these messages.
    """
    missing = 0
    if kept is None:
        return 0
    if segments.first is not None and kept.floor < segments.first:
        missing += segments.first - kept.floor
        unfiled = _describe_range(segments.class_label, kept.floor, segments.first)
        found.problems.append(f"{folder}: no file for {unfiled}")
    head = kept.floor if segments.first is None else segments.head
    if head < kept.head and not segments.has_reported_end:
        missing += kept.head - head
        lost = _describe_range(segments.class_label, head, kept.head)
        found.problems.append(
            f"{folder}: lost {lost}, which were stored but may never have been confirmed"
        )
    return missing


def _describe_damage(
    path: Path, position: int, problem: str, class_label: str, first: int, end: int
) -> str:
    """Return where a file is damaged and which messages first..end-1 are known to be skipped."""
    text = f"{path}: {problem} at byte {position}"
    return text + (f"; skipped {_describe_range(class_label, first, end)}" if first < end else "")


def _describe_range(class_label: str, first: int, end: int) -> str:
    """Return the messages first..end-1 in words."""
    if end - first == 1:
        return f"message {first} of class {class_label}"
    return f"messages {first}-{end - 1} of class {class_label} ({end - first} messages)"


class SegmentStart(NamedTuple):
    """Size and first record of a segment."""

    size: int
    """In bytes."""
    header: Record | None
    """First record; None if it is damaged."""


def _start(path: Path) -> SegmentStart:
    try:
        with path.open("rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            header = records.read_header(memoryview(file.read(records.HEADER_BYTES)), 0)
    except OSError as error:
        raise JournalError(f"cannot read {path}: {error.strerror}") from None
    return SegmentStart(size, header if isinstance(header, Record) else None)


def numbers(folder: Path) -> list[int]:
    """Return the numbers of the files in a directory, in no order."""
    found = (file_number(each.name) for each in folder.iterdir())
    return [number for number in found if number is not None]
