"""What is whole in the files of a journal: of a class's segments, and of what is kept beside them.

Rule 1: a class goes on up to its first record that is not whole, and what lies behind that is said
and left out; nothing here writes into a file. One whose messages nobody needs is passed; but where
nothing is behind such a one, that is no end, and is said as well.
Rule 2: nothing here knows a broker: what is made of the records is their readers' business.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from simplebus.core.limits import SPARE_BYTES
from simplebus.core.snapshot import RecoveredState, ClassSnapshot, decode
from simplebus.storage import records
from simplebus.storage.errors import JournalError
from simplebus.storage.file_names import file_name, file_number
from simplebus.storage.records import End, Kind, Record


@dataclass(slots=True)
class Recovered:
    """What was found."""

    messages: int = 0
    lot: int = 0
    """The highest number of a lot."""
    dropped: list[str] = field(default_factory=list)
    """What was left out and why, a sentence each."""
    given_up: list[Path] = field(default_factory=list)
    """Files of which nothing counts."""
    heads: dict[int, int] = field(default_factory=dict)
    """By class: its head when all that is known beside messages was written as a whole."""


class Files:
    """Reads files whole into one piece of memory, which is used again."""

    def __init__(self) -> None:
        self.buffer = bytearray()

    def read(self, path: Path) -> memoryview:
        """A file's content, until the next call; SPARE_BYTES follow it. Raises JournalError."""
        try:
            with path.open("rb", buffering=0) as file:
                size = os.fstat(file.fileno()).st_size
                if len(self.buffer) < size + SPARE_BYTES:
                    self.buffer = bytearray(size + SPARE_BYTES)
                view = memoryview(self.buffer)
                at = 0
                while at < size and (count := file.readinto(view[at:size])):
                    at += count
        except OSError as error:
            raise JournalError(f"{path} cannot be read: {error.strerror}") from None
        return view[:at]


def read_state(folder: Path, files: Files, found: Recovered) -> tuple[RecoveredState, dict[str, int]]:
    """What the files of changes amount to, and by the name of each publisher the first lot that is
    news of it; by "" that of all others."""
    for number in sorted(numbers(folder), reverse=True):
        path = folder / file_name(number)
        data = files.read(path)
        record = records.read(data, 0)
        if isinstance(record, End) or record.kind != Kind.SNAPSHOT:
            # The server was stopped before this one was whole: then the one before it counts.
            if isinstance(record, Record) or record.problem:
                found.dropped.append(f"{path}: it begins with no whole snapshot")
            continue
        image, since = RecoveredState(), {"": record.lot + 1}
        while isinstance(record, Record):
            found.lot = max(found.lot, record.lot)
            try:
                changes = decode(data[record.body_at : record.end])
            except ValueError as error:
                found.dropped.append(f"{path}: from byte {record.at} on: {error}")
                break
            image.apply(changes, record.lot)
            if record.kind == Kind.SNAPSHOT:
                found.heads = {number: each.head for number, each in image.classes.items()}
            if record.kind == Kind.CHANGES:
                since.update((each.name, record.lot) for each in changes.publishers)
            record = records.read(data, record.end)
        if isinstance(record, End) and record.problem:
            found.dropped.append(f"{path}: from byte {record.at} on: {record.problem}")
        return image, since
    return RecoveredState(), {"": 0}


class Segments:
    """A class's segments, in order, as far as they follow one another."""

    def __init__(
        self,
        folder: Path,
        class_id: int,
        files: Files,
        found: Recovered,
        *,
        goes_on_below: float = 0,
        known_head: float = math.inf,
        goes_on_at: int = -1,
    ) -> None:
        """What lies behind something that is not whole is read, too, if its lot is below this, and
        it was there when that was known beside messages: what was given up stays so. What begins at
        this message is read, too: what is missing before it was missing when that was accepted."""
        self.class_id = class_id
        self.lost = 0
        """Messages that are left out, as far as it is known how many they are."""
        self._goes_on_below = goes_on_below
        self._known_head = known_head
        self._goes_on_at = goes_on_at
        self.firsts = sorted(numbers(folder)) if folder.is_dir() else []
        self.first = self.firsts[0] if self.firsts else None
        """The first message that there is a file for."""
        self.has_said = False
        """Whether what is missing at their end was said."""
        self.head = self.firsts[0] if self.firsts else 0
        """The sequence behind the last message, when all records were read."""
        self._folder = folder
        self._files = files
        self._found = found

    def starts(self) -> list[Start]:
        """How each begins."""
        return list(self._starts(0))

    def _starts(self, since: int) -> Iterator[Start]:
        return (_start(self._folder / file_name(first)) for first in self.firsts[since:])

    def leave_out_old(self) -> None:
        """Leave out, as `headers` does, those that are back, without reading any: lots ascend."""
        latest = 0
        for first, start in zip(list(self.firsts), self.starts(), strict=True):
            if start.header is not None and start.header.lot < latest:
                self._leave_out(self.firsts.index(first))
            elif start.header is not None:
                latest = start.header.lot

    def begin_at(self, number: int) -> None:
        """Leave out so many segments in front."""
        del self.firsts[:number]
        self.head = self.firsts[0]

    def records(self, wanted: Callable[[Record], bool]) -> Iterator[tuple[memoryview, Record]]:
        """Each whole record that is wanted, and the bytes of the file that it is in."""
        for data, record in self.headers(wanted):
            if wanted(record):
                yield data, record

    def headers(self, wanted: Callable[[Record], bool]) -> Iterator[tuple[memoryview, Record]]:
        """The same with the others, of which only the header was looked at."""
        for at, first in enumerate(self.firsts):
            following = self._following(at)
            path = self._folder / file_name(first)
            data = self._files.read(path)
            position, lot = 0, 0
            is_torn = False
            while True:
                if following is not None and self.head >= following:
                    if not self._is_old(following, data, position, lot):
                        break
                    self._leave_out(at + 1)
                    following = self._following(at)
                    continue
                record = self._next(data, position, wanted)
                if isinstance(record, Record):
                    if following is None and not is_torn and not wanted(record):
                        is_torn = not records.is_whole(data, record)
                    yield data, record
                    self.head, position, lot = record.last, record.end, record.lot
                    continue
                problem = record.problem
                if not problem and is_torn:  # A power cut may have left nothing of what was here.
                    problem = "nothing, behind a record that is not whole"
                if not problem:
                    break
                behind = self._behind(data, position, following)
                end = behind[-1].last if behind else self.head
                goes_on = bool(behind) and self._may_go_on(behind[0])
                if goes_on:
                    end = behind[0].first
                self._say(
                    _sentence(path, len(data), position, problem, self.head, end),
                    is_all=bool(record.problem or behind),
                )
                if not goes_on:
                    if position == 0:  # The next segment will have its name.
                        self._found.given_up.append(path)
                    if following is None:
                        self.lost += end - self.head
                    break
                self.lost += end - self.head
                self.head, position, is_torn = end, behind[0].at, False
            if following is not None and self.head < following:
                starts = (start.header for start in self._starts(at + 1))
                header = next((each for each in starts if each is not None), None)
                if header is None or not (
                    header.lot < self._goes_on_below or header.first == self._goes_on_at
                ):
                    self._give_up(self.firsts[at + 1 :])
                    break
                self.lost += following - self.head
                self._say(f"{path}: the messages from {self.head} to {following} are not in it")
                self.head = following

    def _following(self, at: int) -> int | None:
        return self.firsts[at + 1] if at + 1 < len(self.firsts) else None

    def _is_old(self, following: int, data: memoryview, position: int, lot: int) -> bool:
        """Whether a segment was given up before what is in the one in front of it was written, and
        has its name again: as after a power cut, where nobody had the system keep names. What is
        read of the one in front ends at `position` and at this lot."""
        header = _start(self._folder / file_name(following)).header
        if self.head == following:  # Does it go on there? It does not, where it was left off.
            record = records.read(data, position)
            if isinstance(record, End):
                return header is None and bool(record.problem)
            if record.first != following:
                return False
            lot = record.lot
        return header is None or header.lot < lot

    def _leave_out(self, at: int) -> None:
        """A segment that was given up before."""
        path = self._folder / file_name(self.firsts.pop(at))
        self._say(f"{path}: it was left out before, and is back")
        self._found.given_up.append(path)

    def _next(
        self, data: memoryview, position: int, wanted: Callable[[Record], bool]
    ) -> Record | End:
        """The record that stands there, if it is the next one."""
        record = records.read(data, position, whole=False)
        if isinstance(record, End):
            return record
        self._found.lot = max(self._found.lot, record.lot)
        if record.kind != Kind.MESSAGES or record.class_id != self.class_id:
            return End(position, f"a record of kind {record.kind}, class {record.class_id}")
        if record.first != self.head or not record.messages:
            what = f"{record.messages} messages from {record.first}, not from {self.head}"
            return End(position, what)
        if wanted(record) and not records.is_whole(data, record):
            return End(position, records.WRONG_CHECKSUM)
        return record

    def _behind(self, data: memoryview, position: int, following: int | None) -> list[Record]:
        """The whole records behind what is not whole."""
        found = records.search(data, position + 1, class_id=self.class_id, first=self.head)
        return [each for each in found if following is None or each.first < following]

    def _may_go_on(self, record: Record) -> bool:
        return record.lot < self._goes_on_below and record.first < self._known_head

    def _give_up(self, firsts: list[int]) -> None:
        """The segments that begin with these are left out, as messages before them are missing."""
        paths = [self._folder / file_name(first) for first in firsts]
        last = records.search(
            self._files.read(paths[-1]), 0, class_id=self.class_id, first=firsts[-1]
        )
        end = max((each.last for each in last), default=firsts[-1])
        self.lost += end - self.head
        self._say(
            f"{paths[0]} and what follows it, {len(paths)} files: the messages from {self.head} "
            f"to {firsts[0]} are missing before it; so all up to {end} are left out"
        )
        self._found.given_up += paths

    def _say(self, sentence: str, *, is_all: bool = True) -> None:
        """`is_all`: there is no more to say, should messages be missing at the end."""
        self.has_said |= is_all
        self._found.dropped.append(sentence)


def say_no_state(folder: Path, image: RecoveredState, found: Recovered) -> None:
    """Say so, when all is read, if nothing is known beside messages."""
    if found.lot > 1 and not image.lot and not found.dropped:
        found.dropped.append(
            f"{folder}: there is no file, though there are messages: durables, names, what was "
            "acknowledged and who had published what are gone"
        )


def say_missing(folder: Path, kept: ClassSnapshot | None, segments: Segments, found: Recovered) -> int:
    """Say which messages were stored, as far as is known beside messages, and have no file, when
    nothing else was said of the segments. Returns how many."""
    missing = 0
    if kept is None:
        return 0
    if segments.first is not None and kept.floor < segments.first:
        missing += segments.first - kept.floor
        found.dropped.append(
            f"{folder}: there is no file for the messages from {kept.floor} to {segments.first}"
        )
    head = kept.floor if segments.first is None else segments.head
    if head < kept.head and not segments.has_said:
        missing += kept.head - head
        found.dropped.append(
            f"{folder}: there is nothing of the messages from {head} to {kept.head}, which were "
            "stored, though perhaps never confirmed"
        )
    return missing


def _sentence(path: Path, size: int, position: int, problem: str, first: int, last: int) -> str:
    """What is left out of a file, from a byte on, and which messages are known to be among it."""
    sentence = f"{path}: {size - position} bytes from byte {position} on: {problem}"
    if first < last:
        sentence += f"; so the messages from {first} to {last} are left out"
    return sentence


class Start(NamedTuple):
    """What is known of a segment without reading it."""

    size: int
    """Bytes."""
    header: Record | None
    """Of its first record; None where that is damaged."""


def _start(path: Path) -> Start:
    try:
        with path.open("rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            header = records.read_header(memoryview(file.read(records.HEADER_BYTES)), 0)
    except OSError as error:
        raise JournalError(f"{path} cannot be read: {error.strerror}") from None
    return Start(size, header if isinstance(header, Record) else None)


def numbers(folder: Path) -> list[int]:
    """The numbers that are names of files in a folder, in no order."""
    found = (file_number(each.name) for each in folder.iterdir())
    return [number for number in found if number is not None]
