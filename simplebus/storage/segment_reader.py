"""Messages of a journal read back while it is written.

Rule 1: only what is written is asked for, so all of it is there: what is not is damaged, and said.
Rule 2: where a record begins is remembered as it is passed, so that who reads on searches nothing.
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
from simplebus.storage.records import End, Record

# So much is read at once where only headers are of interest, and at the least.
_WALK_BYTES = 64 * 1024
# Of so many segments it is remembered where records begin.
_SEGMENTS_MAX = 256
# And in each of them one record in so many bytes, but for where reading has stopped.
_STEP_BYTES = 256 * 1024


@dataclass(slots=True)
class _Segment:
    """What is known of one."""

    path: Path
    firsts: list[int] = field(default_factory=list)
    """Sequences with which records begin, ascending."""
    places: list[int] = field(default_factory=list)
    """And where."""

    def note(self, first: int, place: int) -> None:
        at = bisect_right(self.firsts, first)
        if not at or self.firsts[at - 1] != first:
            self.firsts.insert(at, first)
            self.places.insert(at, place)

    def nearest(self, first: int) -> tuple[int, int]:
        """The last known record that begins at `first` or before: its sequence, and where."""
        at = bisect_right(self.firsts, first) - 1
        return self.firsts[at], self.places[at]


class JournalReader:
    """Of the journal in one directory."""

    def __init__(self, path: Path) -> None:
        self._folder = path / CLASSES
        self._segments: OrderedDict[tuple[int, int], _Segment] = OrderedDict()
        """By class and first sequence, the one that was used last at the end."""
        self._firsts: dict[int, list[int]] = {}
        """By class: with what its segments begin."""
        self.problems: list[str] = []
        """What was found to be damaged, a sentence each; whoever looks at them clears it."""

    def read(self, read: SpillRead) -> list[SpilledRange]:
        """Messages from read.first on, without a gap: more of them in front, perhaps, as records
        are read whole. Raises OSError."""
        found: list[SpilledRange] = []
        at, space = read.first, read.bytes_max
        while at < read.last and space > 0:
            segment, end = self._segment(read.class_id, at, read.last)
            if segment is None:
                found.append(self._lost(read.class_id, at, end, "there is no file for them"))
                at = end
                continue
            at, space = self._read_segment(read.class_id, segment, at, end, space, found)
        return found

    def _segment(self, class_id: int, at: int, last: int) -> tuple[_Segment | None, int]:
        """The segment that a message is in, and where it ends, or the reading."""
        firsts = self._firsts.get(class_id, [])
        index = bisect_right(firsts, at) - 1
        if index < 0 or index == len(firsts) - 1:  # There may be newer ones.
            firsts = self._firsts[class_id] = self._list(class_id)
            index = bisect_right(firsts, at) - 1
        end = min(last, firsts[index + 1]) if index + 1 < len(firsts) else last
        if index < 0:
            return None, end
        key = (class_id, firsts[index])
        segment = self._segments.get(key)
        if segment is None:
            path = self._folder / folder_name(class_id) / file_name(firsts[index])
            segment = self._segments[key] = _Segment(path, [firsts[index]], [0])
            if len(self._segments) > _SEGMENTS_MAX:
                self._segments.popitem(last=False)
        self._segments.move_to_end(key)
        return segment, end

    def _list(self, class_id: int) -> list[int]:
        folder = self._folder / folder_name(class_id)
        found = (file_number(each.name) for each in folder.iterdir())
        return sorted(first for first in found if first is not None)

    def _read_segment(
        self,
        class_id: int,
        segment: _Segment,
        at: int,
        end: int,
        space: int,
        found: list[SpilledRange],
    ) -> tuple[int, int]:
        """Read on in one segment. Returns where it stopped, and how many bytes may follow."""
        descriptor = os.open(segment.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            size = os.fstat(descriptor).st_size
            place = self._find(descriptor, size, segment, at)
            while at < end and space > 0:
                data, base = _read_at(descriptor, place, max(space, _WALK_BYTES), size), place
                while at < end and space > 0:
                    record = records.read(data, place - base)
                    if isinstance(record, End) and record.at > 0 and base + len(data) < size:
                        break  # Perhaps the rest of it was not read yet.
                    if isinstance(record, End):
                        at, place = self._damaged(
                            descriptor, size, class_id, segment, at, end, place, record, found
                        )
                        continue
                    place = base + record.end
                    if record.first > at:
                        why = f"{segment.path} goes on with message {record.first}"
                        found.append(self._lost(class_id, at, record.first, why))
                    if record.last > at:
                        found.append(_stretch(data, record))
                        at = record.last
                    space -= record.body_bytes
            segment.note(at, place)
        finally:
            os.close(descriptor)
        return at, space

    def _find(self, descriptor: int, size: int, segment: _Segment, at: int) -> int:
        """Where the record begins that a message is in, or the first that is none."""
        first, place = segment.nearest(at)
        noted = place
        data, base = memoryview(b""), place
        while True:
            header = records.read_header(data, place - base)
            if header is None:
                if base < place or not data:
                    data, base = _read_at(descriptor, place, _WALK_BYTES, size), place
                    if len(data) >= records.HEADER_BYTES:
                        continue
                return place
            if isinstance(header, End) or at < header.last or header.first != first:
                return place
            first, place = header.last, place + header.end - header.at
            if place - noted >= _STEP_BYTES:
                segment.note(first, place)
                noted = place

    def _damaged(
        self,
        descriptor: int,
        size: int,
        class_id: int,
        segment: _Segment,
        at: int,
        end: int,
        place: int,
        problem: End,
        found: list[SpilledRange],
    ) -> tuple[int, int]:
        """What stands there is no whole record. Returns with which message to go on, and where."""
        rest = memoryview(os.pread(descriptor, max(0, size - place), place))
        header = records.read_header(rest, 0)
        why = problem.problem or "nothing was written there"
        if isinstance(header, Record) and header.first <= at < header.last <= end:
            last, place = header.last, place + header.end
        else:
            behind = records.search(rest, 1, class_id=class_id, first=at + 1)
            following = next(behind, None)
            last = end if following is None else min(end, following.first)
            place += 0 if following is None else following.at
        found.append(self._lost(class_id, at, last, f"{segment.path}, byte {place}: {why}"))
        return last, place

    def _lost(self, class_id: int, first: int, last: int, why: str) -> SpilledRange:
        self.problems.append(
            f"class {class_id}: the messages from {first} to {last} cannot be read and are left "
            f"out: {why}"
        )
        return SpilledRange(first, last - first, 0.0, b"")


def _read_at(descriptor: int, place: int, count: int, size: int) -> memoryview:
    """So many bytes from there on; if a record begins there, all of it."""
    data = os.pread(descriptor, count, place)
    header = records.read_header(memoryview(data), 0)
    if isinstance(header, Record) and len(data) < header.end <= size - place:
        data = os.pread(descriptor, header.end, place)
    return memoryview(data)


def _stretch(data: memoryview, record: Record) -> SpilledRange:
    frames = bytes(data[record.body_at : record.end])
    return SpilledRange(record.first, record.messages, record.time, frames)
