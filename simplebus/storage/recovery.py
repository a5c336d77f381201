"""From the files of a journal to a broker as it was.

Rule 1: a class goes on up to its first record that is not whole, and what lies behind that is said
and left out; nothing here writes into a file.
Rule 2: what nobody needs any longer is not read, but for the numbers that its publishers used.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np

from simplebus.core.broker import Broker
from simplebus.core.classes import MessageClass
from simplebus.core.errors import Reason, RemoteProtocolError
from simplebus.core.frames import FrameBatch
from simplebus.core.kept import Image, KeptClass, KeptPublisher, decode
from simplebus.core.limits import SPARE_BYTES
from simplebus.core.restoring import Numbers, RestoreError, Restoring, add_numbers
from simplebus.core.spilling import Spill
from simplebus.storage import records
from simplebus.storage.appending import sync_file, sync_folder
from simplebus.storage.directory import Directory
from simplebus.storage.errors import JournalError
from simplebus.storage.names import (
    CLASSES,
    DROPPED,
    STATE,
    class_id_of,
    file_name,
    file_number,
)
from simplebus.storage.records import End, Kind, Record

# So much is dealt with together.
_GROUP_BYTES = 1024 * 1024
# So much more memory is taken than the files make expect, as messages differ.
_RESERVED = 1.05


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


def recover(directory: Directory, broker: Broker) -> Recovered:
    """Fill a fresh broker with what is in a directory. Raises JournalError."""
    found = Recovered()
    files = Files()
    image, since = read_state(directory.path / STATE, files, found)
    reader = _Reader(broker, files, found, image, since)
    try:
        reader.read_classes(directory.path / CLASSES)
        reader.finish()
        say_no_state(directory.path / STATE, image, found)
    except (RestoreError, RemoteProtocolError) as error:
        sentence = error.sentence if isinstance(error, RemoteProtocolError) else str(error)
        raise JournalError(f"{directory.path} does not fit: {sentence}") from None
    return found


def read_state(folder: Path, files: Files, found: Recovered) -> tuple[Image, dict[str, int]]:
    """What the files of changes amount to, and by the name of each publisher the first lot that is
    news of it; by "" that of all others."""
    for number in sorted(_numbers(folder), reverse=True):
        path = folder / file_name(number)
        data = files.read(path)
        record = records.read(data, 0)
        if isinstance(record, End) or record.kind != Kind.SNAPSHOT:
            # The server was stopped before this one was whole: then the one before it counts.
            if isinstance(record, Record) or record.problem:
                found.dropped.append(f"{path}: it begins with no whole snapshot")
            continue
        image, since = Image(), {"": record.lot + 1}
        while isinstance(record, Record):
            found.lot = max(found.lot, record.lot)
            try:
                changes = decode(data[record.body_at : record.end])
            except ValueError as error:
                found.dropped.append(f"{path}: from byte {record.at} on: {error}")
                break
            image.apply(changes, record.lot)
            if record.kind == Kind.CHANGES:
                since.update((each.name, record.lot) for each in changes.publishers)
            record = records.read(data, record.end)
        if isinstance(record, End) and record.problem:
            found.dropped.append(f"{path}: from byte {record.at} on: {record.problem}")
        return image, since
    return Image(), {"": 0}


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
    ) -> None:
        """What lies behind something that is not whole is read, too, if its lot is below this."""
        self.class_id = class_id
        self.lost = 0
        """Messages that are left out, as far as it is known how many they are."""
        self._goes_on_below = goes_on_below
        self.firsts = sorted(_numbers(folder)) if folder.is_dir() else []
        self.first = self.firsts[0] if self.firsts else None
        """The first message that there is a file for."""
        self.has_said = False
        """Whether anything was said of them."""
        self.head = self.firsts[0] if self.firsts else 0
        """The sequence behind the last message, when all records were read."""
        self._folder = folder
        self._files = files
        self._found = found

    def starts(self) -> list[Start]:
        """How each begins."""
        return [_start(self._folder / file_name(first)) for first in self.firsts]

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
            following = self.firsts[at + 1] if at + 1 < len(self.firsts) else None
            path = self._folder / file_name(first)
            data = self._files.read(path)
            position = 0
            while following is None or self.head < following:
                record = self._next(data, position, wanted)
                if isinstance(record, Record):
                    yield data, record
                    self.head, position = record.last, record.end
                    continue
                if not record.problem:
                    break
                behind = self._behind(data, position, following)
                end = behind[-1].last if behind else self.head
                goes_on = bool(behind) and behind[0].lot < self._goes_on_below
                if goes_on:
                    end = behind[0].first
                self._say(_sentence(path, len(data), position, record.problem, self.head, end))
                if not goes_on:
                    if position == 0:  # The next segment will have its name.
                        self._found.given_up.append(path)
                    if following is None:
                        self.lost += end - self.head
                    break
                self.lost += end - self.head
                self.head, position = end, behind[0].at
            if following is not None and self.head < following:
                header = _start(self._folder / file_name(following)).header
                if header is None or header.lot >= self._goes_on_below:
                    self._give_up(self.firsts[at + 1 :])
                    break
                self.lost += following - self.head
                self._say(f"{path}: the messages from {self.head} to {following} are not in it")
                self.head = following

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

    def _say(self, sentence: str) -> None:
        self.has_said = True
        self._found.dropped.append(sentence)


def say_no_state(folder: Path, image: Image, found: Recovered) -> None:
    """Say so, when all is read, if nothing is known beside messages."""
    if found.lot > 1 and not image.lot and not found.dropped:
        found.dropped.append(
            f"{folder}: there is no file, though there are messages: durables, names, what was "
            "acknowledged and who had published what are gone"
        )


def say_missing(folder: Path, kept: KeptClass | None, segments: Segments, found: Recovered) -> int:
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


class _Group:
    """Records of one class that follow one another, to be dealt with together: arrays are worth it
    where there are many messages."""

    def __init__(self) -> None:
        self.records: list[Record] = []
        self.publishers: list[tuple[int, int, str]] = []
        """Lot, count, name: how many messages in a row are whose."""
        self.size = 0
        """Bytes of frames."""
        self._pieces: list[bytes | memoryview] = []

    def add(self, data: memoryview, record: Record) -> None:
        """One more, whose bytes are copied."""
        self.records.append(record)
        self.publishers += [
            (record.lot, count, name) for count, name in records.publishers_of(data, record)
        ]
        self.size += record.body_bytes
        self._pieces.append(bytes(data[record.body_at : record.end]))

    def joined(self) -> tuple[bytearray, int]:
        """The frames, SPARE_BYTES behind them, and how many bytes they have."""
        return bytearray().join([*self._pieces, bytes(SPARE_BYTES)]), self.size

    def clear(self) -> None:
        self.records, self.publishers, self._pieces, self.size = [], [], [], 0


class _Reader:
    """Puts one directory's classes into one broker."""

    def __init__(
        self,
        broker: Broker,
        files: Files,
        found: Recovered,
        image: Image,
        since: dict[str, int],
    ) -> None:
        self._files = files
        self._found = found
        self._image = image
        self._since = since
        self._numbers: dict[str, Numbers] = {}
        """What records say of publishers."""
        self._known_heads: dict[int, int] = {}
        """By class: the first message that is later than what is known beside messages."""
        self._broker = broker
        self._expected = 0
        """Bytes of the files of the class that is read, from its floor on."""
        self._share = 0
        """Bytes of memory that are there for each class."""
        self._restoring = Restoring(broker)

    def read_classes(self, folder: Path) -> None:
        ids = {class_id_of(each.name) for each in folder.iterdir()} | set(self._image.classes)
        self._share = self._broker.budget.limit // (2 * max(1, len(ids)))
        for class_id in sorted(each for each in ids if each is not None):
            kept = self._image.classes.get(class_id)
            cls = self._restoring.open_class(class_id, kept.name if kept else "")
            if kept and kept.last_values:
                self._broker.store.table.ask_for_values(class_id)
            self._read_class(cls, folder / f"{class_id:05}", kept)
            self._restoring.set_waiting(cls, kept, self._known_heads.get(class_id))
            self._found.messages += len(cls.ring)

    def _read_class(self, cls: MessageClass, folder: Path, kept: KeptClass | None) -> None:
        ring, floor = cls.ring, kept.floor if kept else 0
        # Of a class that spills, what is not whole may lie where it was not looked at before: what
        # was accepted behind it since is not given up for that.
        below = 0 if cls.spill is None else self._since[""]
        segments = Segments(folder, cls.class_id, self._files, self._found, goes_on_below=below)
        if not segments.firsts:
            if folder.is_dir():  # No message is left: the sequences go on all the same.
                ring.begin(floor)
            if cls.spill is not None:
                cls.spill.first = ring.floor
            self._count_lost(cls, say_missing(folder, kept, segments, self._found))
            return
        if cls.spill is not None:
            cls.spill.first = max(segments.firsts[0], floor)
            self._leave_on_disk(cls, cls.spill, segments)
        ring.begin(segments.firsts[0])
        self._expected = sum(
            start.size
            for start, last in zip(segments.starts(), [*segments.firsts[1:], None], strict=True)
            if last is None or last > floor
        )

        def is_wanted(record: Record) -> bool:
            return record.last > floor or self._is_later(record) or self._has_news(record)

        group = _Group()
        for data, record in segments.records(is_wanted):
            later = self._is_later(record)
            if later:
                self._known_heads.setdefault(cls.class_id, record.first)
            if group.records and (
                group.size >= _GROUP_BYTES
                or record.first != group.records[-1].last
                or later != self._is_later(group.records[0])
                or self._has_news(record) != self._has_news(group.records[0])
            ):
                self._put(cls, group, floor)
            group.add(data, record)
        if group.records:
            self._put(cls, group, floor)
        if not len(ring) and ring.head < segments.head:
            ring.begin(segments.head)
        missing = say_missing(folder, kept, segments, self._found)
        self._count_lost(cls, segments.lost + missing)
        if cls.spill is not None:
            cls.spill.first = min(cls.spill.first, ring.floor)

    @staticmethod
    def _count_lost(cls: MessageClass, count: int) -> None:
        if count:
            cls.dropped[Reason.DAMAGED] += count

    def _leave_on_disk(self, cls: MessageClass, spill: Spill, segments: Segments) -> None:
        """Do not read the segments in front that need not be in memory, and tell nothing new."""
        starts = segments.starts()
        most = min(cls.ring.bytes_max // 2, self._share)
        held = 0
        for at in range(len(starts) - 1, 0, -1):
            start, before = starts[at], starts[at - 1]
            held += start.size
            messages = segments.firsts[-1] - segments.firsts[at - 1]
            fits = held + before.size <= most and messages <= cls.ring.messages_max // 2
            header = start.header
            # What a later segment begins with is as late as all that is in the ones before it.
            if fits or header is None or self._is_later(header) or header.lot >= self._since[""]:
                continue
            for first, each in zip(segments.firsts[:at], starts[:at], strict=True):
                if each.header is not None:
                    cls.times.note(each.header.time, max(first, spill.first))
                    self._found.lot = max(self._found.lot, each.header.lot)
            ends = zip(segments.firsts[1 : at + 1], starts[:at], strict=True)
            for end, each in ends:
                if end > spill.first:
                    spill.note(end, each.size)
            self._found.messages += max(0, segments.firsts[at] - spill.first)
            segments.begin_at(at)
            return

    def _is_later(self, record: Record) -> bool:
        """Whether what is known beside messages is older than it. Should it speak of such messages,
        it means others, which a crash has taken: these have their sequences now."""
        return record.lot > self._image.lot

    def _has_news(self, record: Record) -> bool:
        """Whether it may tell numbers of publishers that are not known otherwise."""
        return record.meta_bytes > 0 and record.lot >= self._since[""]

    def _put(self, cls: MessageClass, group: _Group, floor: int) -> None:
        """Put a group's messages from `floor` on into the ring, and empty it."""
        if self._is_later(group.records[0]):
            floor = 0
        batches = self._split(group)
        if any(self._has_news(record) for record in group.records):
            self._note_numbers(group, batches)
        for record in group.records:
            if record.last > floor:
                cls.times.note(self._time_of(record), max(record.first, floor))
        counts = np.array([record.messages for record in group.records])
        times = np.repeat(np.array([self._time_of(record) for record in group.records]), counts)
        first = at = group.records[0].first
        for batch in batches:
            begin, end = max(at, floor), at + batch.count
            if begin < end:
                if cls.spill is not None and len(cls.ring) and cls.ring.head < begin:
                    cls.spill.note(cls.ring.head, cls.ring.frame_bytes)
                    cls.ring.release(cls.ring.head)
                if not len(cls.ring):
                    if cls.ring.head < begin:
                        cls.ring.begin(begin)
                    messages = sum(len(each.bounds) - 1 for each in batches)
                    self._reserve(cls, group.size / messages)
                part = batch.slice(begin - at, batch.count)
                self._restoring.put(cls, begin, part, times[begin - first : end - first])
            at = end
        group.clear()

    def _time_of(self, record: Record) -> float:
        """When its messages were accepted: not later than now, though the clock was set back."""
        return min(record.time, self._broker.clock.now)

    def _reserve(self, cls: MessageClass, size: float) -> None:
        """Have memory at once for what is to come, messages of about this size. What is read in
        vain, because its memory must grow step by step, takes as long as all the rest."""
        expected = int(self._expected * _RESERVED)
        cls.ring.reserve(int(expected / size), expected)

    def _split(self, group: _Group) -> list[FrameBatch]:
        first, last = group.records[0], group.records[-1]
        buffer, size = group.joined()
        try:
            return self._restoring.split(buffer, 0, size, last.last - first.first)
        except ValueError as error:
            raise JournalError(
                f"class {first.class_id}: the records of the messages from {first.first} to "
                f"{last.last} are whole, and their frames are not: {error}"
            ) from None

    def _note_numbers(self, group: _Group, batches: list[FrameBatch]) -> None:
        if all(not name for _, _, name in group.publishers):
            return
        news = self._since[""]
        publishers: list[tuple[int, str]] = []
        for lot, count, name in group.publishers:
            if lot < self._since.get(name, news):
                name = ""
            if publishers and publishers[-1][1] == name:
                count += publishers.pop()[0]
            publishers.append((count, name))
        add_numbers(self._numbers, batches, publishers)

    def finish(self) -> None:
        """Positions and publishers, when all messages are there."""
        image, restoring = self._image, self._restoring
        for position in image.positions.values():
            restoring.add_position(position, self._known_heads.get(position.class_id))
        for class_id, begin, end in image.purged:
            restoring.purge(class_id, begin, end, self._known_heads.get(class_id))
        stored = self._numbers
        for name, first, count in image.refused:
            stored.setdefault(name, Numbers()).add(first, count)
        for kept in image.publishers.values():
            for first, count in kept.stored:
                stored.setdefault(kept.name, Numbers()).add(first, count)
        for name in dict.fromkeys([*image.publishers, *stored]):
            known = image.publishers.get(name, KeptPublisher(name, 0))
            restoring.add_publisher(
                known, stored.get(name, Numbers()), image.refusals.get(name, [])
            )
        restoring.release()


def settle(directory: Directory, found: Recovered, *, to_disk: bool) -> None:
    """Rename the files of which nothing counts, so that they are not read again. `to_disk`: have
    the others on disk; a server that was killed may have left them with the system. Raises OSError.
    """
    for path in found.given_up:
        path.rename(path.with_name(path.name + DROPPED))
    if to_disk:
        folders = [directory.path / STATE, *sorted((directory.path / CLASSES).iterdir())]
        for folder in folders:
            if folder.is_dir():
                for number in sorted(_numbers(folder)):
                    sync_file(folder / file_name(number))
                sync_folder(folder)
        sync_folder(directory.path / CLASSES)


def _numbers(folder: Path) -> list[int]:
    found = (file_number(each.name) for each in folder.iterdir())
    return [number for number in found if number is not None]
