"""Reads spilled messages back from segments that are still being written.

Only written messages are requested, so missing ones are damage and are reported. Offsets of records
are remembered, so that sequential reads need no search.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections import OrderedDict
from dataclasses import dataclass, field
from pathlib import Path

from simplebus.core.message_class.spill import SpilledRange, SpillRead
from simplebus.storage import records
from simplebus.storage.file_names import CLASSES, file_name, file_number, folder_name
from simplebus.storage.records import EndOfRecords, Record

# Smallest read, also used when only headers are needed.
_WALK_BYTES = 64 * 1024
# Segments whose record offsets are remembered.
_SEGMENTS_MAX = 256
# Distance of remembered offsets, besides those at which a read ended.
_STEP_BYTES = 256 * 1024


@dataclass(slots=True)
class _SegmentIndex:
    """Known record offsets of a segment."""

    path: Path
    firsts: list[int] = field(default_factory=list)
    """First sequences of records, ascending."""
    offsets: list[int] = field(default_factory=list)
    """Offsets of these records."""

    def add(self, first: int, offset: int) -> None:
        index = bisect_right(self.firsts, first)
        if not index or self.firsts[index - 1] != first:
            self.firsts.insert(index, first)
            self.offsets.insert(index, offset)

    def find_before(self, first: int) -> tuple[int, int]:
        """Return the sequence and offset of the last known record up to `first`."""
        index = bisect_right(self.firsts, first) - 1
        return self.firsts[index], self.offsets[index]


class SegmentReader:
    """Reader of the segments in one journal directory."""

    def __init__(self, path: Path, salt: int) -> None:
        self._salt = salt
        self._folder = path / CLASSES
        self._segments: OrderedDict[tuple[int, int], _SegmentIndex] = OrderedDict()
        """Indexes by class and first sequence, the most recently used last."""
        self._firsts: dict[int, list[int]] = {}
        """First sequences of the segments of each class."""
        self.problems: list[str] = []
        """Descriptions of the damage found; the caller clears the list."""

    def read(self, read: SpillRead) -> list[SpilledRange]:
        """Read contiguous messages from read.first on. Raises OSError.

        Records are read whole, so earlier messages may be included.
        """
        found: list[SpilledRange] = []
        sequence, remaining_bytes = read.first, read.bytes_max
        while sequence < read.last and remaining_bytes > 0:
            segment, end = self._segment(read.class_id, sequence, read.last)
            if segment is None:
                found.append(self._report_lost(read, sequence, end, "no file contains them"))
                sequence = end
                continue
            sequence, remaining_bytes = self._read_segment(
                read, segment, sequence, end, remaining_bytes, found
            )
        return found

    def _segment(self, class_id: int, sequence: int, last: int) -> tuple[_SegmentIndex | None, int]:
        """Return the segment of a sequence, and the end of the segment or of the read."""
        firsts = self._firsts.get(class_id, [])
        index = bisect_right(firsts, sequence) - 1
        if index < 0 or index == len(firsts) - 1:  # There may be newer segments.
            firsts = self._firsts[class_id] = self._list(class_id)
            index = bisect_right(firsts, sequence) - 1
        end = min(last, firsts[index + 1]) if index + 1 < len(firsts) else last
        if index < 0:
            return None, end
        key = (class_id, firsts[index])
        segment = self._segments.get(key)
        if segment is None:
            path = self._folder / folder_name(class_id) / file_name(firsts[index])
            segment = self._segments[key] = _SegmentIndex(path, [firsts[index]], [0])
            if len(self._segments) > _SEGMENTS_MAX:
                self._segments.popitem(last=False)
        self._segments.move_to_end(key)
        return segment, end

    def _list(self, class_id: int) -> list[int]:
        folder = self._folder / folder_name(class_id)
        found = (file_number(path.name) for path in folder.iterdir())
        return sorted(first for first in found if first is not None)

    def _read_segment(
        self,
        read: SpillRead,
        segment: _SegmentIndex,
        sequence: int,
        end: int,
        remaining_bytes: int,
        found: list[SpilledRange],
    ) -> tuple[int, int]:
        """Read from one segment. Returns the next sequence and the remaining bytes."""
        descriptor = os.open(segment.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            size = os.fstat(descriptor).st_size
            offset = self._find(descriptor, size, segment, sequence)
            while sequence < end and remaining_bytes > 0:
                data, base = (
                    _read_at(
                        descriptor, offset, max(remaining_bytes, _WALK_BYTES), size, self._salt
                    ),
                    offset,
                )
                while sequence < end and remaining_bytes > 0:
                    record = records.read_record(data, offset - base, salt=self._salt)
                    if (
                        isinstance(record, EndOfRecords)
                        and record.offset > 0
                        and base + len(data) < size
                    ):
                        break  # The rest of the record may not be read yet.
                    if isinstance(record, EndOfRecords):
                        sequence, offset = self._skip_damage(
                            descriptor,
                            size,
                            read,
                            segment,
                            sequence,
                            end,
                            offset,
                            record,
                            found,
                        )
                        continue
                    offset = base + record.end
                    if record.first > sequence:
                        reason = f"{segment.path} continues with message {record.first}"
                        found.append(self._report_lost(read, sequence, record.first, reason))
                    if record.last > sequence:
                        # A gap was reported when it was found; its range has no frames.
                        found.append(_to_range(data, record))
                        sequence = record.last
                    remaining_bytes -= record.body_bytes
            segment.add(sequence, offset)
        finally:
            os.close(descriptor)
        return sequence, remaining_bytes

    def _find(self, descriptor: int, size: int, segment: _SegmentIndex, sequence: int) -> int:
        """Return the offset of a sequence's record, or of the first damaged record."""
        first, offset = segment.find_before(sequence)
        noted = offset
        data, base = memoryview(b""), offset
        while True:
            header = records.read_header(data, offset - base, salt=self._salt)
            if header is None:
                if base < offset or not data:
                    data, base = _read_at(descriptor, offset, _WALK_BYTES, size, self._salt), offset
                    if len(data) >= records.HEADER_BYTES:
                        continue
                return offset
            if isinstance(header, EndOfRecords) or sequence < header.last or header.first != first:
                return offset
            first, offset = header.last, offset + header.end - header.offset
            if offset - noted >= _STEP_BYTES:
                segment.add(first, offset)
                noted = offset

    def _skip_damage(
        self,
        descriptor: int,
        size: int,
        read: SpillRead,
        segment: _SegmentIndex,
        sequence: int,
        end: int,
        offset: int,
        problem: EndOfRecords,
        found: list[SpilledRange],
    ) -> tuple[int, int]:
        """Report a damaged record. Returns the sequence and offset at which to continue."""
        remaining_data = memoryview(os.pread(descriptor, max(0, size - offset), offset))
        header = records.read_header(remaining_data, 0, salt=self._salt)
        reason = problem.problem or "nothing was written there"
        if isinstance(header, Record) and header.first <= sequence < header.last <= end:
            last, offset = header.last, offset + header.end
        else:
            records_after = records.find_records(
                remaining_data,
                1,
                class_id=read.class_id,
                first=sequence + 1,
                salt=self._salt,
            )
            following = next(records_after, None)
            last = end if following is None else min(end, following.first)
            offset += 0 if following is None else following.offset
        found.append(
            self._report_lost(read, sequence, last, f"{segment.path}, byte {offset}: {reason}")
        )
        return last, offset

    def _report_lost(self, read: SpillRead, first: int, last: int, reason: str) -> SpilledRange:
        self.problems.append(
            f"class {read.class_name}: skipped messages {first}-{last - 1} "
            f"({last - first} messages): {reason}"
        )
        return SpilledRange(first, last - first, 0.0, b"")


def _read_at(descriptor: int, offset: int, count: int, size: int, salt: int) -> memoryview:
    """Read `count` bytes from an offset, or the whole record that begins there."""
    data = os.pread(descriptor, count, offset)
    header = records.read_header(memoryview(data), 0, salt=salt)
    if isinstance(header, Record) and len(data) < header.end <= size - offset:
        data = os.pread(descriptor, header.end, offset)
    return memoryview(data)


def _to_range(data: memoryview, record: Record) -> SpilledRange:
    frames = bytes(data[record.body_offset : record.end])
    return SpilledRange(record.first, record.message_count, record.time, frames)
