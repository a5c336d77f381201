"""Reading of segments and state files, with detection of damage.

A damaged record is skipped and becomes a gap if no position needs its messages, or if the data
after it was stored before the server ended; see `StoredBatches`. Otherwise a power failure may have
torn the end of the data, which was not confirmed: the class then ends at the damaged record. No
file is changed; `RecoveryResult` has the changes after which the damage is not found again.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from simplebus.core.limits import RECEIVE_PADDING_BYTES
from simplebus.core.protocol.durability import Durability
from simplebus.core.snapshot import ClassSnapshot, RecoveredState, decode_changes
from simplebus.storage import records
from simplebus.storage.errors import JournalError
from simplebus.storage.file_names import CLASSES, class_id_of, file_name, file_number
from simplebus.storage.records import EndOfRecords, Record, RecordKind

_CLASS_KINDS = (RecordKind.MESSAGES, RecordKind.GAP)
_NO_DATA = "no data before later data"
"""Problem of a file in which a block of zeros has replaced records."""

OTHER_PUBLISHERS = ""
"""Key in the second result of `read_state` for all publishers without an entry.

Their message numbers are known as of the snapshot at the start of the state file, so the value is
the first write batch after this snapshot; 0 without a state file. Message numbers are kept for
named publishers only, so no publisher has the empty name.
"""


@dataclass(slots=True)
class RecoveryResult:
    """Result of reading a journal."""

    message_count: int = 0
    last_batch_number: int = 0
    """Highest number of a write batch that was found."""
    problems: list[str] = field(default_factory=list)
    """Descriptions of the damage and of the skipped messages."""
    ignored_files: list[Path] = field(default_factory=list)
    """Files that are not read again: they are renamed."""
    repairs: list[FileRepair] = field(default_factory=list)
    """Repairs of damage that has later data."""
    end_repairs: list[FileRepair] = field(default_factory=list)
    """Repairs of the ends of the data, and of missing first files. Their gaps cover messages that
    the state mentions; only `simplebus journal repair` writes them.
    """
    snapshot_heads: dict[int, int] = field(default_factory=dict)
    """Head of each class in the last snapshot."""


@dataclass(frozen=True, slots=True)
class FileRepair:
    """Move of damaged bytes out of a file, which may also be a new file."""

    path: Path
    begin: int
    """Offset of the damaged bytes."""
    end: int
    """Offset after the damaged bytes."""
    gap: bytes
    """Encoded record of the missing messages, which replaces the bytes; empty for none."""
    lost: str
    """Text that describes the lost messages."""


class Gap(NamedTuple):
    """Messages of a class that cannot be read."""

    first: int
    last: int
    """Sequence after the last missing message."""
    is_new: bool
    """True if the gap has not been recorded in a file."""
    is_needed: bool
    """False if no position needs the messages."""


@dataclass(slots=True)
class StoredBatches:
    """Write batches that were stored before the server ended, and those that the state contains.

    A damaged record of a stored batch is a fault of the medium. A later one may be torn by a power
    failure.
    """

    folder: Path
    """Directory of the classes."""
    salt: int
    """Salt of the journal."""
    found: RecoveryResult
    """Result of reading so far."""
    snapshot_batch: int = -1
    """Batches up to this one are older than the snapshot, which was written after them."""
    state_batch: int = 0
    """Newest batch whose changes the state contains."""
    first_numbers_batch: int = 0
    """First batch with message numbers that the state may not contain."""
    is_same_boot: bool = False
    """True if the machine has not restarted since the last batch: all written data is there, even
    if the process was killed.
    """
    is_synced: bool = False
    """True if a batch is synced before the third batch after it is written, as with durability
    `disk`. While a server creates many classes and durables, more batches may be in doubt. Some
    unconfirmed messages are then kept, and those before them are reported as damaged.
    """
    _has_newest_batch: bool = False
    """True if `found` has the newest batch of all files."""

    def was_stored(self, batch_number: int) -> bool:
        """Return True if a batch was stored before the server ended."""
        if batch_number <= self.snapshot_batch or self.is_same_boot:
            return True
        newest_in_doubt = batch_number + _BATCHES_IN_DOUBT
        if not self.is_synced or newest_in_doubt <= self.found.last_batch_number:
            return self.is_synced
        if not self._has_newest_batch:  # Later batches may have messages of other classes only.
            self._has_newest_batch = True
            newest = _find_newest_batch(self.folder, self.salt)
            self.found.last_batch_number = max(self.found.last_batch_number, newest)
        return newest_in_doubt <= self.found.last_batch_number

    def is_after_state(self, record: Record) -> bool:
        """Return True if a record is newer than the state.

        If the state mentions such a sequence, it means another message with this sequence, which
        was lost in a crash.
        """
        return record.batch_number > self.state_batch

    def has_new_numbers(self, record: Record) -> bool:
        """Return True if a record may contain message numbers that the state does not contain."""
        return record.meta_bytes > 0 and record.batch_number >= self.first_numbers_batch


# Two batches may be with the writer, and a third one at shutdown.
_BATCHES_IN_DOUBT = 3


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


def _has_data(data: memoryview, offset: int) -> bool:
    """Return True if a byte from `offset` on is not zero, as the unused end of a file is."""
    return bool(bytes(data[offset:]).strip(b"\0"))


def stored_batches(
    folder: Path,
    found: RecoveryResult,
    state: RecoveredState,
    first_new_batches: dict[str, int],
    *,
    salt: int,
    durability: Durability,
    boot_id: str,
) -> StoredBatches:
    """Return which write batches were stored before the server ended.

    Args:
        folder: Directory of the classes.
        found: Result of reading so far.
        state: The state of the journal.
        first_new_batches: For each publisher name the first write batch whose records may contain
            message numbers that the state does not contain; see `read_state`.
        salt: Salt of the journal.
        durability: Durability to assume if the state does not name one.
        boot_id: Id of the current boot of the machine; empty if unknown.
    """
    return StoredBatches(
        folder,
        salt,
        found,
        snapshot_batch=first_new_batches[OTHER_PUBLISHERS] - 1,
        state_batch=state.batch_number,
        first_numbers_batch=min(first_new_batches.values()),
        is_same_boot=bool(boot_id) and state.boot_id == boot_id,
        is_synced=(durability if state.durability is None else state.durability) >= Durability.DISK,
    )


def read_state(
    folder: Path, files: FileBuffer, found: RecoveryResult, *, salt: int, boot_id: str = ""
) -> tuple[RecoveredState, dict[str, int]]:
    """Read the newest intact state file. Damaged changes in the middle are skipped.

    Args:
        folder: Directory of the state files.
        files: Buffer for the content of a file.
        found: Result to which problems are added.
        salt: Salt of the journal.
        boot_id: Id of the current boot of the machine; empty if unknown.

    Returns:
        The state, and for each publisher name the first write batch whose records may contain
        message numbers that the state does not contain. The key `OTHER_PUBLISHERS` stands for all
        other names.
    """
    for number in sorted(numbers(folder), reverse=True):
        path = folder / file_name(number)
        data = files.read(path)
        record = records.read_record(data, 0, salt=salt)
        if isinstance(record, EndOfRecords) or record.kind != RecordKind.SNAPSHOT:
            # The server was stopped while writing this file; the previous one is valid.
            if isinstance(record, Record) or record.problem or _has_data(data, 0):
                found.problems.append(f"{path}: no intact snapshot at the start; ignored the file")
                found.ignored_files.append(path)
            continue
        state, first_new_batches = RecoveredState(), {OTHER_PUBLISHERS: record.batch_number + 1}
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
            is_snapshot = record.kind == RecordKind.SNAPSHOT
            contained_in = record.batch_number + 1 if is_snapshot else record.batch_number
            first_new_batches.update(
                (producer.name, producer.numbers_batch or contained_in)
                for producer in changes.producers
            )
            record = records.read_record(data, record.end, salt=salt)
            if isinstance(record, EndOfRecords):
                stored = stored_batches(
                    folder.parent / CLASSES,
                    found,
                    state,
                    first_new_batches,
                    salt=salt,
                    durability=Durability.MEMORY,
                    boot_id=boot_id,
                )
                record = _skip_damaged_changes(path, data, record, state, stored)
        return state, first_new_batches
    return RecoveredState(), {OTHER_PUBLISHERS: 0}


def _skip_damaged_changes(
    path: Path,
    data: memoryview,
    damage: EndOfRecords,
    state: RecoveredState,
    stored: StoredBatches,
) -> Record | EndOfRecords:
    """Report damage of a state file, if there is any. Returns the next record if it was stored."""
    found = stored.found
    changes = records.find_records(
        data,
        damage.offset + 1,
        class_id=0,
        first=0,
        salt=stored.salt,
        kinds=(RecordKind.CHANGES,),
    )
    intact = [record for record in changes if record.batch_number > state.batch_number]
    if not damage.problem and not _has_data(data, damage.offset):
        return damage
    problem = damage.problem or _NO_DATA
    sentence = f"{path}: {problem} at byte {damage.offset}; skipped "
    if intact:
        found.last_batch_number = max(found.last_batch_number, intact[-1].batch_number)
    if intact and stored.was_stored(intact[0].batch_number - 1):
        count = intact[0].offset - damage.offset
        found.problems.append(f"{sentence}{count} bytes of changes of durables and publishers")
        lost = "changes of durables and publishers"
        found.repairs.append(FileRepair(path, damage.offset, intact[0].offset, b"", lost))
        return intact[0]
    found.problems.append(f"{sentence}the rest")
    lost = "the last changes of durables and publishers"
    found.end_repairs.append(FileRepair(path, damage.offset, len(data), b"", lost))
    return EndOfRecords(damage.offset)


class SegmentChain:
    """Segments of a class, in order."""

    def __init__(
        self,
        folder: Path,
        class_id: int,
        files: FileBuffer,
        found: RecoveryResult,
        *,
        salt: int,
        stored: StoredBatches,
        snapshot: ClassSnapshot | None,
        class_name: str = "",
    ) -> None:
        """List the segments of a class.

        Args:
            folder: Directory of the class.
            class_id: Class of the records.
            files: Buffer for the content of a file.
            found: Result to which problems are added.
            salt: Salt of the journal.
            stored: Batches after which damage is skipped.
            snapshot: The class in the state; None if the state does not contain the class. Data at
                or above its head that is older than the state was skipped by an earlier recovery,
                and is skipped again.
            class_name: Name for reports; empty for the id.
        """
        self.class_id = class_id
        self.class_label = class_name or str(class_id)
        self.lost_count = 0
        """Number of skipped or missing messages that are in no gap, as far as known."""
        self.gaps: list[Gap] = []
        """Messages that cannot be read, followed by messages that can."""
        self._time = 0.0
        """Time of the last record."""
        self._salt = salt
        self._stored = stored
        self._has_state = snapshot is not None
        self._floor = snapshot.floor if snapshot is not None else 0
        """Lowest sequence that the class needs, according to the state."""
        self._known_head = snapshot.head if snapshot is not None else 0
        """Head of the class in the state."""
        self._snapshot_head = found.snapshot_heads.get(class_id, 0)
        """Head of the class in the last snapshot."""
        self.firsts = sorted(numbers(folder)) if folder.is_dir() else []
        self.first = self.firsts[0] if self.firsts else None
        """First sequence with a file; None without files."""
        self.head = self.firsts[0] if self.firsts else self._floor
        """Sequence after the last message, once all records were read."""
        self._folder = folder
        self._files = files
        self._found = found
        self._end = folder / file_name(self.head), 0, 0
        """Path of the last file that was read, the offset up to which it was read, and its size."""
        self._is_torn = False
        """True if the rest of that file is damaged."""
        self._skipped_end = 0
        """Sequence after the last message that is skipped at the end, as far as known."""

    def starts(self) -> list[SegmentStart]:
        """Return the first record header of each segment."""
        return [_start(self._folder / file_name(first), self._salt) for first in self.firsts]

    def ignore_outdated(self) -> None:
        """Ignore segments that reappeared, as `headers` does, but without reading all records.

        They are recognized by their batch numbers, which otherwise ascend.
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

    def is_needed(self, record: Record) -> bool:
        """Return True if recovery needs the content of a record of messages."""
        return (
            record.last > self._floor
            or self._stored.is_after_state(record)
            or self._stored.has_new_numbers(record)
        )

    def records(self, is_wanted: Callable[[Record], bool]) -> Iterator[tuple[memoryview, Record]]:
        """Yield the intact records that are wanted, with the data of their file."""
        for data, record in self.headers(is_wanted):
            if is_wanted(record):
                yield data, record

    def headers(self, is_wanted: Callable[[Record], bool]) -> Iterator[tuple[memoryview, Record]]:
        """Yield the records of messages with the data of their file. Bodies of unwanted records are
        verified in the last file only, because no later file shows that they were stored.
        """
        for index, first in enumerate(self.firsts):
            next_first = self._first_of_segment(index + 1)
            path = self._folder / file_name(first)
            data = self._files.read(path)
            position, batch_number = 0, 0
            is_unusable = False
            while True:
                self._end = path, position, len(data)
                if next_first is not None and self.head >= next_first:
                    if not self._is_outdated(next_first, data, position, batch_number):
                        self._cut_off_outdated(path, data, position)
                        break
                    self._ignore_segment(index + 1)
                    next_first = self._first_of_segment(index + 1)
                    continue
                record = self._next(data, position)
                if isinstance(record, Record):
                    is_verified = next_first is None or is_wanted(record)
                    is_damaged = is_verified and not records.is_intact(data, record)
                    is_needed = self.is_needed(record)
                    if is_damaged and is_needed:
                        record = EndOfRecords(position, records.CHECKSUM_MISMATCH)
                    elif is_damaged:
                        self._skip_unneeded(path, record)
                    elif record.kind == RecordKind.GAP:
                        self.gaps.append(Gap(record.first, record.last, False, is_needed))
                    else:
                        yield data, record
                if isinstance(record, Record):
                    self.head, position, batch_number = record.last, record.end, record.batch_number
                    self._time = record.time
                    continue
                if not record.problem and not _has_data(data, position):
                    break
                problem = record.problem or _NO_DATA
                intact = self._intact_records_after(data, position, next_first, batch_number)
                end = intact[-1].last if intact else self.head
                can_continue = bool(intact) and self._can_continue_at(intact[0], data, position)
                if can_continue:
                    end = intact[0].first
                elif next_first is None:
                    end = max(end, self._known_head)
                is_end = not can_continue and next_first is None
                sentence = f"{path}: {problem} at byte {position}"
                if self.head < end or is_end:
                    sentence += f"; skipped {self._describe_skipped(end)}"
                self._found.problems.append(sentence)
                if not can_continue:
                    self._is_torn, is_unusable = True, position == 0
                    if next_first is None:
                        self.lost_count += end - self.head
                        self._skipped_end = end
                    break
                self._add_gap(path, position, intact[0].offset, intact[0].first, intact[0])
                position = intact[0].offset
            if next_first is not None and self.head < next_first:
                intact_lists = (
                    _find_intact(self._folder, self.class_id, first, self._salt)
                    for first in self.firsts[index + 1 :]
                )
                following = next((found[0] for found in intact_lists if found), None)
                if following is None or not self._can_continue_at(following, data, position):
                    if is_unusable:
                        self._found.ignored_files.append(path)
                    self._ignore_rest(self.firsts[index + 1 :])
                    break
                missing = describe_range(self.class_label, self.head, next_first)
                self._found.problems.append(f"{path}: missing {missing}")
                self._add_gap(path, position, len(data), next_first, following)
                self._is_torn = False
            elif is_unusable:  # The next segment to be written has the same name.
                self._found.ignored_files.append(path)

    def _first_of_segment(self, index: int) -> int | None:
        """Return the first sequence of a segment; None if there is no segment with this index."""
        return self.firsts[index] if index < len(self.firsts) else None

    def _is_outdated(self, first: int, data: memoryview, position: int, batch_number: int) -> bool:
        """Return True if a segment was ignored before and reappeared, for example after a power
        failure.

        Args:
            first: First sequence of the segment.
            data: Content of the previous segment.
            position: Offset in `data` up to which records were read.
            batch_number: Write batch of the last of these records.
        """
        header = _start(self._folder / file_name(first), self._salt).header
        if self.head == first:  # The previous segment may contain newer records from here on.
            record = records.read_record(data, position, salt=self._salt)
            if isinstance(record, EndOfRecords):
                is_damaged = header is None and bool(record.problem)
                return is_damaged and not self._continues_after_damage(first, batch_number)
            if record.first != first:
                return False
            batch_number = record.batch_number
        return header is None or header.batch_number < batch_number

    def _continues_after_damage(self, first: int, batch_number: int) -> bool:
        """Return True if damage at the start of a segment is skipped.

        The previous segment ends with `batch_number`, and with data torn by a power failure.
        """
        # Another buffer is used, because the data of the previous segment must stay valid.
        data = FileBuffer().read(self._folder / file_name(first))
        intact = self._intact_records_after(data, 0, None, batch_number)
        return bool(intact) and self._can_continue_at(intact[0], data, 0)

    def _cut_off_outdated(self, path: Path, data: memoryview, position: int) -> None:
        """Request a repair that cuts off the records that the next segment replaces.

        Otherwise they would be read again after the next segment was removed.
        """
        record = records.read_record(data, position, salt=self._salt)
        if isinstance(record, Record):
            sentence = f"ignored from byte {position} on; the next file replaces these messages"
            self._found.problems.append(f"{path}: {sentence}")
            lost = f"nothing; {sentence}"
            self._found.repairs.append(FileRepair(path, position, len(data), b"", lost))

    def _ignore_segment(self, index: int) -> None:
        """Ignore a segment that was ignored before."""
        path = self._folder / file_name(self.firsts.pop(index))
        self._found.problems.append(
            f"{path}: ignored again; the file was ignored before and has reappeared"
        )
        self._found.ignored_files.append(path)

    def _next(self, data: memoryview, position: int) -> Record | EndOfRecords:
        """Return the record at an offset if it continues the class. Its body is not verified."""
        record = records.read_record(data, position, salt=self._salt, verify_body=False)
        if isinstance(record, EndOfRecords):
            return record
        self._found.last_batch_number = max(self._found.last_batch_number, record.batch_number)
        if record.kind not in _CLASS_KINDS or record.class_id != self.class_id:
            return EndOfRecords(
                position, f"a record of kind {record.kind}, class {record.class_id}"
            )
        if record.first != self.head or not record.message_count:
            problem = (
                f"record of {record.message_count} messages from {record.first}, expected message "
                f"{self.head}"
            )
            return EndOfRecords(position, problem)
        return record

    def _skip_unneeded(self, path: Path, record: Record) -> None:
        """Report a damaged record that recovery does not need, and request a gap in its place."""
        words = describe_range(self.class_label, record.first, record.last)
        self._found.problems.append(
            f"{path}: {records.CHECKSUM_MISMATCH} at byte {record.offset}; skipped {words}, which "
            "no position needs"
        )
        self._add_gap(path, record.offset, record.end, record.last, record)

    def _intact_records_after(
        self, data: memoryview, position: int, next_first: int | None, batch_number: int
    ) -> list[Record]:
        """Return the intact records after a damaged record.

        Args:
            data: Content of the segment.
            position: Offset of the damaged record.
            next_first: First sequence of the next segment; None for the last segment.
            batch_number: Write batch of the record before the damaged one.
        """
        found = records.find_records(
            data,
            position + 1,
            class_id=self.class_id,
            first=self.head,
            salt=self._salt,
            kinds=_CLASS_KINDS,
        )
        return [
            record
            for record in found
            if record.batch_number >= batch_number
            and (next_first is None or record.first < next_first)
            and record.first - self.head <= records.GAP_MESSAGES_MAX
        ]

    def _can_continue_at(self, record: Record, data: memoryview, position: int) -> bool:
        """Return True if damage before an intact record is skipped.

        Args:
            record: The next intact record.
            data: Content of the damaged segment.
            position: Offset of the damage.
        """
        if record.batch_number <= self._stored.snapshot_batch:
            return record.first < self._known_head
        if record.first <= max(self._floor, self._snapshot_head):
            return True  # The damaged messages are not needed, or a snapshot was written later.
        # A batch has one record of a class.
        damaged_batch = record.batch_number - 1
        header = records.read_header(data, position, salt=self._salt)
        if isinstance(header, Record) and header.last == record.first:
            damaged_batch = header.batch_number
        return self._stored.was_stored(damaged_batch)

    def _add_gap(self, path: Path, begin: int, end: int, last: int, record: Record) -> None:
        """Record a gap up to sequence `last`, in place of the bytes from `begin` to `end`. It gets
        the batch and time of `record`.
        """
        first, self.head = self.head, last
        is_needed = last > self._floor or self._stored.is_after_state(record)
        self.gaps.append(Gap(first, last, True, is_needed))
        gap = self._encode_gap(first, last, record.batch_number, record.time)
        words = describe_range(self.class_label, first, last)
        self._found.repairs.append(FileRepair(path, begin, end, gap, words))

    def _ignore_rest(self, firsts: list[int]) -> None:
        """Ignore the segments after missing messages."""
        paths = [self._folder / file_name(first) for first in firsts]
        data = self._files.read(paths[-1])
        last = records.find_records(
            data, 0, class_id=self.class_id, first=firsts[-1], salt=self._salt
        )
        end = max(max((record.last for record in last), default=firsts[-1]), self._known_head)
        self.lost_count += end - self.head
        self._skipped_end = end
        self._found.problems.append(
            f"{paths[0]}: {describe_range(self.class_label, self.head, firsts[0])} missing before "
            f"this file; ignored {len(paths)} files; skipped "
            f"{describe_range(self.class_label, self.head, end)}"
        )
        self._found.ignored_files += paths

    def report_missing(self) -> None:
        """Report messages that the state mentions and that have no file, after all records were
        read. Request the repair of a damaged end, and gaps for the missing messages.
        """
        if self._has_state and self.first is not None and self._floor < self.first:
            self.lost_count += self.first - self._floor
            missing = describe_range(self.class_label, self._floor, self.first)
            self._found.problems.append(f"{self._folder}: no file for {missing}")
            path = self._folder / file_name(self._floor)
            header = _start(self._folder / file_name(self.first), self._salt).header
            time = self._time if header is None else header.time
            gap = self._encode_gap(self._floor, self.first, 0, time)
            self._found.end_repairs.append(FileRepair(path, 0, 0, gap, missing))
        if max(self.head, self._skipped_end) < self._known_head:
            self.lost_count += self._known_head - self.head
            lost = describe_range(self.class_label, self.head, self._known_head)
            self._found.problems.append(
                f"{self._folder}: lost {lost}, which were stored but may never have been confirmed"
            )
        self._repair_end()

    def _repair_end(self) -> None:
        """Request the repair of the end of the class. Messages that the state contains become a
        gap.
        """
        path, begin, size = self._end
        batch_number = self._found.last_batch_number
        gap = self._encode_gap(self.head, self._known_head, batch_number, self._time)
        if self._is_torn or gap:
            lost = self._describe_skipped(max(self._skipped_end, self._known_head))
            end = size if self._is_torn else begin
            self._found.end_repairs.append(FileRepair(path, begin, end, gap, lost))

    def _describe_skipped(self, end: int) -> str:
        """Return the messages from the head up to `end` in words."""
        if self.head < end:
            return describe_range(self.class_label, self.head, end)
        return f"data from message {self.head} of class {self.class_label} on"

    def _encode_gap(self, first: int, end: int, batch_number: int, time: float) -> bytes:
        """Encode the messages first..end-1 as missing; empty if there are none or too many."""
        if not 0 < end - first <= records.GAP_MESSAGES_MAX:
            return b""
        return records.encode_gap(
            self.class_id, first, end - first, batch_number, time, salt=self._salt
        )


def _find_newest_batch(folder: Path, salt: int) -> int:
    """Return the newest write batch of which any class has intact messages; 0 for none."""
    newest = 0
    for class_folder in folder.iterdir():
        class_id = class_id_of(class_folder.name)
        if class_id is not None:
            firsts = sorted(numbers(class_folder), reverse=True)
            lists = (_find_intact(class_folder, class_id, first, salt) for first in firsts)
            last = next((intact[-1] for intact in lists if intact), None)
            newest = max(newest, 0 if last is None else last.batch_number)
    return newest


def _find_intact(folder: Path, class_id: int, first: int, salt: int) -> list[Record]:
    """Return the intact records of a segment, wherever they begin."""
    # Another buffer is used, because the data of the present segment must stay valid.
    data = FileBuffer().read(folder / file_name(first))
    return list(
        records.find_records(data, 0, class_id=class_id, first=first, salt=salt, kinds=_CLASS_KINDS)
    )


def report_missing_state(folder: Path, state: RecoveredState, found: RecoveryResult) -> None:
    """Report a missing state file, after everything was read."""
    if found.last_batch_number > 1 and not state.batch_number and not found.problems:
        found.problems.append(
            f"{folder}: no state file although messages are stored; class names, durables, "
            "acknowledgements and publisher states are lost; a server writes a new state when it "
            "starts"
        )


def describe_range(class_label: str, first: int, end: int) -> str:
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


def _start(path: Path, salt: int) -> SegmentStart:
    try:
        with path.open("rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            header = records.read_header(memoryview(file.read(records.HEADER_BYTES)), 0, salt=salt)
    except OSError as error:
        raise JournalError(f"cannot read {path}: {error.strerror}") from None
    return SegmentStart(size, header if isinstance(header, Record) else None)


def numbers(folder: Path) -> list[int]:
    """Return the numbers of the files in a directory, in no order."""
    found = (file_number(path.name) for path in folder.iterdir())
    return [number for number in found if number is not None]
