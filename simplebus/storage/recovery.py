"""From the files of a journal to a broker as it was.

Rule 1: what nobody needs any longer is not read, but for the numbers that its publishers used.
Rule 2: nothing here writes into a file; `settle` renames those of which nothing counts.
"""

from __future__ import annotations

from itertools import count as numbered
from pathlib import Path

import numpy as np

from simplebus.core.broker.broker import Broker
from simplebus.core.errors import Reason, RemoteProtocolError
from simplebus.core.limits import SPARE_BYTES
from simplebus.core.message_class.message_class import MessageClass
from simplebus.core.message_class.spill import ClassSpill
from simplebus.core.protocol.frames import FrameBatch
from simplebus.core.restore import (
    BrokerRestorer,
    NumberTrust,
    RestoreError,
    StoredNumbers,
    choose_number_trust,
    collect_producer_numbers,
)
from simplebus.core.snapshot import RecoveredState, ClassSnapshot, ProducerSnapshot
from simplebus.storage.append_file import sync_file, sync_folder
from simplebus.storage.directory import Directory
from simplebus.storage.errors import JournalError
from simplebus.storage.file_names import (
    CLASSES,
    STATE,
    class_id_of,
    dropped_name,
    file_name,
    file_number,
)
from simplebus.storage.records import Record, publishers_of
from simplebus.storage.segments import (
    Files,
    Recovered,
    Segments,
    numbers,
    read_state,
    say_missing,
    say_no_state,
)

# So much is dealt with together.
_GROUP_BYTES = 1024 * 1024
# So many lots may have been begun of which a power cut has left nothing that can be seen.
_LOTS_UNSEEN = 1 << 40
# So much more memory is taken than the files make expect, as messages differ.
_RESERVED = 1.05


def recover(directory: Directory, broker: Broker) -> Recovered:
    """Fill a fresh broker with what is in a directory. Raises JournalError."""
    assert broker.commit_log is not None
    broker.commit_log.boot = directory.boot
    found = Recovered()
    files = Files()
    image, since = read_state(directory.path / STATE, files, found)
    reader = _Reader(broker, files, found, image, since)
    try:
        reader.read_classes(directory.path / CLASSES)
        reader.finish()
        say_no_state(directory.path / STATE, image, found)
        if reader.belief is NumberTrust.UNTIL_CONTRADICTED and (found.lot or found.given_up):
            # What is back some day is to be told apart from what is written now.
            found.lot += _LOTS_UNSEEN
    except (RestoreError, RemoteProtocolError) as error:
        sentence = error.sentence if isinstance(error, RemoteProtocolError) else str(error)
        raise JournalError(f"{directory.path} does not fit: {sentence}") from None
    return found


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
            (record.lot, count, name) for count, name in publishers_of(data, record)
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
        image: RecoveredState,
        since: dict[str, int],
    ) -> None:
        self._files = files
        self._found = found
        self._image = image
        self._since = since
        self._numbers: dict[str, StoredNumbers] = {}
        """What records say of publishers."""
        self._known_heads: dict[int, int] = {}
        """By class: the first message that is later than what is known beside messages."""
        self._broker = broker
        assert broker.commit_log is not None
        ledger = broker.commit_log
        self.belief = choose_number_trust(image, ledger.level, ledger.boot)
        self._expected = 0
        """Bytes of the files of the class that is read, from its floor on."""
        self._share = 0
        """Bytes of memory that are there for each class."""
        self._restoring = BrokerRestorer(broker)

    def read_classes(self, folder: Path) -> None:
        ids = {class_id_of(each.name) for each in folder.iterdir()} | set(self._image.classes)
        self._share = self._broker.budget.limit // (2 * max(1, len(ids)))
        for class_id in sorted(each for each in ids if each is not None):
            kept = self._image.classes.get(class_id)
            cls = self._restoring.open_class(class_id, kept.name if kept else "")
            if kept and kept.last_values:
                self._broker.store.class_registry.enable_last_values(class_id)
            self._read_class(cls, folder / f"{class_id:05}", kept)
            self._restoring.restore_backlog(cls, kept, self._known_heads.get(class_id))
            self._found.messages += len(cls.ring)

    def _read_class(self, cls: MessageClass, folder: Path, kept: ClassSnapshot | None) -> None:
        ring, floor = cls.ring, kept.floor if kept else 0
        # Of a class that spills, what is not whole may lie where it was not looked at before: what
        # was accepted behind it since is not given up for that.
        below, at = 0, -1
        if cls.spill is not None:
            below, at = self._since[""], self._found.heads.get(cls.class_id, -1)
        segments = Segments(
            folder,
            cls.class_id,
            self._files,
            self._found,
            goes_on_below=below,
            known_head=kept.head if kept else 0,
            goes_on_at=at,
        )
        if not segments.firsts:
            if folder.is_dir():  # No message is left: the sequences go on all the same.
                ring.begin(floor)
            if cls.spill is not None:
                cls.spill.first_sequence = ring.floor
            self._count_lost(cls, say_missing(folder, kept, segments, self._found))
            return
        if cls.spill is not None:
            cls.spill.first_sequence = max(segments.firsts[0], floor)
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
            cls.spill.first_sequence = min(cls.spill.first_sequence, ring.floor)

    @staticmethod
    def _count_lost(cls: MessageClass, count: int) -> None:
        if count:
            cls.dropped_counts[Reason.DAMAGED] += count

    def _leave_on_disk(self, cls: MessageClass, spill: ClassSpill, segments: Segments) -> None:
        """Do not read the segments in front that need not be in memory, and tell nothing new."""
        segments.leave_out_old()  # Who reads one back later goes by its name alone.
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
                    cls.time_index.record(each.header.time, max(first, spill.first_sequence))
                    self._found.lot = max(self._found.lot, each.header.lot)
            ends = zip(segments.firsts[1 : at + 1], starts[:at], strict=True)
            for end, each in ends:
                if end > spill.first_sequence:
                    spill.record_spilled(end, each.size)
            self._found.messages += max(0, segments.firsts[at] - spill.first_sequence)
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
                cls.time_index.record(self._time_of(record), max(record.first, floor))
        counts = np.array([record.messages for record in group.records])
        times = np.repeat(np.array([self._time_of(record) for record in group.records]), counts)
        first = at = group.records[0].first
        for batch in batches:
            begin, end = max(at, floor), at + batch.count
            if begin < end:
                if cls.spill is not None and len(cls.ring) and cls.ring.head < begin:
                    cls.spill.record_spilled(cls.ring.head, cls.ring.frame_bytes)
                    cls.ring.release(cls.ring.head)
                if not len(cls.ring):
                    if cls.ring.head < begin:
                        cls.ring.begin(begin)
                    messages = sum(len(each.bounds) - 1 for each in batches)
                    self._reserve(cls, group.size / messages)
                part = batch.slice(begin - at, batch.count)
                self._restoring.append_messages(
                    cls, begin, part, times[begin - first : end - first]
                )
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
            return self._restoring.split_frames(buffer, 0, size, last.last - first.first)
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
        collect_producer_numbers(self._numbers, batches, publishers)

    def finish(self) -> None:
        """Positions and publishers, when all messages are there."""
        image, restoring = self._image, self._restoring
        for position in image.positions.values():
            restoring.restore_position(position, self._known_heads.get(position.class_id))
        for class_id, begin, end in image.purged:
            restoring.restore_purge(class_id, begin, end, self._known_heads.get(class_id))
        stored = self._numbers
        for name, first, count in image.refused:
            stored.setdefault(name, StoredNumbers()).add_range(first, count)
        for kept in image.publishers.values():
            for first, count in kept.stored:
                stored.setdefault(kept.name, StoredNumbers()).add_range(first, count)
        for name in dict.fromkeys([*image.publishers, *stored]):
            known = image.publishers.get(name, ProducerSnapshot(name, 0))
            restoring.restore_producer(
                known,
                stored.get(name, StoredNumbers()),
                image.refusals.get(name, []),
                self.belief,
            )
        if self.belief is not NumberTrust.ALL or self._found.dropped:
            restoring.mark_producers_incomplete()
        restoring.finish()


def settle(directory: Directory, found: Recovered, *, to_disk: bool) -> None:
    """Rename the files of which nothing counts, so that they are neither read again nor written
    over. `to_disk`: have the others on disk; a server that was killed may have left them with the
    system. Raises OSError.
    """
    for path in found.given_up:
        number = file_number(path.name)
        assert number is not None
        names = (path.with_name(dropped_name(number, place)) for place in numbered(1))
        path.rename(next(name for name in names if not name.exists()))
    if to_disk:
        folders = [directory.path / STATE, *sorted((directory.path / CLASSES).iterdir())]
        for folder in folders:
            if folder.is_dir():
                for number in sorted(numbers(folder)):
                    sync_file(folder / file_name(number))
                sync_folder(folder)
        sync_folder(directory.path / CLASSES)
