"""What is to be kept past the process and is not handed over yet; and how far it has come.

Rule 1: bytes are copied when they are noted: what a ring does with its own afterwards is no concern
here. Frames are as their publisher sent them, so their message ids are its numbers.
Rule 2: what is noted lies in the next lot. Lots have numbers; a mark is the number of the lot that
holds all that was noted so far.

    note, note, refuse │ note            noted, in lot 9
    lot 6 │ lot 7 │ lot 8                taken: somebody writes them
    reached ──┘                          they are as safe as was asked for

Rule 3: where messages are kept elsewhere, each class has its own way there: what of one has reached
the level waits for no other. Nothing but messages is kept there, so no other promise waits at all.

Invariant: reached <= taken <= mark <= taken + 1.
"""

from __future__ import annotations

import enum
from collections import deque
from dataclasses import dataclass, field

from simplebus.core.errors import Reason
from simplebus.core.limits import LEDGER_BYTES_MAX, TIMES_STEP_SECONDS
from simplebus.core.producer_state import ProducerStates
from simplebus.core.protocol import frames
from simplebus.core.protocol.events import Refused
from simplebus.core.session.session import Session
from simplebus.core.session.version2 import Version2Decoder, producer_key


class Durability(enum.IntEnum):
    """How safe a message is; the number is a Confirm's last field."""

    MEMORY = 0
    """The process has it."""
    OS = 1
    """The operating system has it: it outlives the process."""
    DISK = 2
    """It is on disk: it outlives the machine's next power cut."""


@dataclass(slots=True)
class JournalEntry:
    """Messages first..first+count-1 of one class, in their order."""

    class_id: int
    first: int
    time: float
    """When they were accepted, to within TIMES_STEP_SECONDS."""
    count: int = 0
    frames: list[bytes] = field(default_factory=list)
    """Whole frames back to back, as their publishers sent them."""
    publishers: list[tuple[int, str]] = field(default_factory=list)
    """How many messages in a row are whose: the name of a publisher whose numbers the frames carry,
    or "" where they carry nobody's."""

    def add(self, count: int, frames: bytes, publisher: str) -> None:
        self.count += count
        self.frames.append(frames)
        if self.publishers and self.publishers[-1][1] == publisher:
            count += self.publishers.pop()[0]
        self.publishers.append((count, publisher))


@dataclass(slots=True)
class WriteBatch:
    """What is written together."""

    number: int
    entries: list[JournalEntry]
    changes: bytes = b""
    """What else has changed; empty for nothing."""
    snapshot: bytes = b""
    """Instead: everything that changes are about, as it is now."""


@dataclass(slots=True)
class _PendingWrite:
    """What a lot has of one class that has not reached the level."""

    lot: int
    first: int
    """Its first message."""
    size: int = 0
    """Bytes of its frames."""


class CommitLog:
    """Of one broker."""

    def __init__(self, level: Durability = Durability.DISK, *, elsewhere: bool = False) -> None:
        """`elsewhere`: lots are kept by others, in their memory perhaps."""
        self.level = level
        """What a Confirm promises."""
        self.is_elsewhere = elsewhere
        self.waits = elsewhere or level is not Durability.MEMORY
        """Whether it waits until lots have reached that; this process's own memory has them."""
        self.boot = ""
        """Which run of the machine this is; empty where nobody knows."""
        self.taken = 0
        self.reached = 0
        """Lots up to this one have reached the level."""
        self.failure: tuple[Reason, str] | None = None
        """Why nothing can be kept now."""
        self.hurries: dict[int, None] = {}
        """The classes of which something else has changed that what is noted next may depend on."""
        self.changed: dict[int, dict[tuple[str, str], None]] = {}
        """By class, the durables that have come or gone, each with its group."""
        self.held_bytes = 0
        """Bytes of frames noted that have not reached the level."""
        self.lagging: dict[Session, None] = {}
        """Who is not read from while too much is held."""
        self._noted_bytes = 0
        """Bytes of frames noted since the last lot was taken."""
        self._unsafe: dict[int, deque[_PendingWrite]] = {}
        """Of each class: the lots that have not reached it."""
        self._entries: list[JournalEntry] = []
        self._latest: dict[int, JournalEntry] = {}
        """Of each class, the entry that grows."""
        self._refused: list[tuple[str, Refused]] = []
        self._begun: list[tuple[str, int, str]] = []
        self._purged: list[tuple[int, int, int]] = []

    @property
    def is_empty(self) -> bool:
        """Whether nothing was noted since the last lot was taken."""
        return not (
            self._entries
            or self._refused
            or self._begun
            or self._purged
            or self.hurries
            or self.changed
        )

    @property
    def noted_bytes(self) -> int:
        """Bytes of frames noted since the last lot was taken."""
        return self._noted_bytes

    @property
    def mark(self) -> int:
        """The number of the lot that holds all that was noted so far."""
        return self.taken if self.is_empty else self.taken + 1

    @property
    def is_awaited(self) -> bool:
        """Whether what was noted last has not reached the level that a Confirm waits for."""
        return (self.waits or self.is_behind) and self.reached < self.mark

    @property
    def is_behind(self) -> bool:
        """Whether nothing more should come: what has come is held up."""
        return self.failure is not None or self.held_bytes > LEDGER_BYTES_MAX

    def owes(self, mark: int) -> bool:
        """Whether what is promised with this mark is not as safe yet as was asked for."""
        return self.waits and self.reached < mark

    def safe(self, class_id: int, head: int) -> int:
        """The first message of a class that has not reached the level; `head` where all have."""
        unsafe = self._unsafe.get(class_id)
        if not self.waits or not unsafe:
            return head
        return unsafe[0].first

    def written(self, class_id: int, head: int) -> int:
        """The same whatever the level is: it can be read again where it was written."""
        unsafe = self._unsafe.get(class_id)
        return unsafe[0].first if unsafe else head

    def has_reached(self, mark: int, owed: dict[int, int]) -> bool:
        """Whether what a publisher has with this mark has reached the level. `owed` is what it may
        have elsewhere that has not: classes, and the last lot in each. Those that it has no more
        are forgotten."""
        if mark <= self.reached:
            return True
        for class_id, last in list(owed.items()) if self.is_elsewhere else ():
            unsafe = self._unsafe.get(class_id)
            if not unsafe or unsafe[0].lot > last:
                del owed[class_id]
            elif unsafe[0].lot <= mark:
                return False
        return self.is_elsewhere

    def note(
        self, class_id: int, first: int, count: int, frames: bytes, publisher: str, now: float
    ) -> None:
        """Messages first..first+count-1 of a class were stored."""
        entry = self._latest.get(class_id)
        if entry is None or not 0 <= now - entry.time < TIMES_STEP_SECONDS:
            entry = self._latest[class_id] = JournalEntry(class_id, first, now)
            self._entries.append(entry)
            unsafe = self._unsafe.setdefault(class_id, deque())
            if not unsafe or unsafe[-1].lot <= self.taken:
                unsafe.append(_PendingWrite(self.taken + 1, first))
        assert entry.first + entry.count == first, (entry.first, entry.count, first)
        entry.add(count, frames, publisher)
        self._unsafe[class_id][-1].size += len(frames)
        self._noted_bytes += len(frames)
        self.held_bytes += len(frames)

    def refuse(self, publisher: str, refused: Refused) -> None:
        """Messages were refused: their numbers are used up."""
        if self._refused and self._refused[-1][0] == publisher:
            joined = self._refused[-1][1].joined(refused)
            if joined is not None:
                self._refused[-1] = publisher, joined
                return
        self._refused.append((publisher, refused))

    def begin(self, publisher: str, following: int, instance: str) -> None:
        """A program has come under this name, and goes on at this number."""
        self._begun.append((publisher, following, instance))

    def purge(self, class_id: int, first: int, last: int) -> None:
        """Nobody is to have the messages first..last-1 of a class any more."""
        self._purged.append((class_id, first, last))

    def forget_changes(self) -> None:
        """Nothing but messages is to be kept."""
        for noted in (self._refused, self._begun, self._purged, self.hurries, self.changed):
            noted.clear()

    def take_purged(self) -> list[tuple[int, int, int]]:
        """Class, first message, last one exclusive: nobody is to have them."""
        purged, self._purged = self._purged, []
        return purged

    def change(self, class_id: int, durable: str, group: str) -> int:
        """A durable has come or gone. Returns the mark with which that is kept."""
        if self.is_elsewhere:
            return 0
        self.changed.setdefault(class_id, {})[durable, group] = None
        return self.mark

    def take_refused(self) -> list[tuple[str, Refused]]:
        """Publishers, and which of their messages were refused."""
        refused, self._refused = self._refused, []
        return refused

    def take_begun(self) -> list[tuple[str, int, str]]:
        """Publisher, the number at which it goes on, which program it is."""
        begun, self._begun = self._begun, []
        return begun

    def take(
        self, changes: bytes = b"", snapshot: bytes = b"", *, is_owed: bool = False
    ) -> WriteBatch | None:
        """All that was noted, to be written together with `changes` or a snapshot; None when there
        is none of it. `is_owed`: the mark may have been given out, so there is a lot all the same.
        """
        if self.is_empty and not (changes or snapshot or is_owed):
            return None
        self.taken += 1
        lot = WriteBatch(self.taken, self._entries, changes, snapshot)
        self._entries, self._noted_bytes = [], 0
        self._latest.clear()
        return lot

    def reach(self, lot: int, *, has_space: bool = True) -> None:
        """Lots up to this one have reached the level. What fails is over, if there is space."""
        self.reached = lot
        if has_space:
            self.failure = None
        for class_id in list(self._unsafe):
            self.reach_in(class_id, lot)

    def reach_in(self, class_id: int, lot: int) -> None:
        """What lots up to this one have of a class has reached the level."""
        unsafe = self._unsafe.get(class_id)
        while unsafe and unsafe[0].lot <= lot:
            self.held_bytes -= unsafe.popleft().size
        if unsafe is not None and not unsafe:
            del self._unsafe[class_id]


def note(
    ledger: CommitLog,
    session: Session | None,
    class_id: int,
    first: int,
    count: int,
    frames: bytes,
    now: float,
) -> None:
    """A session, or the bus itself, has had messages first..first+count-1 of a class stored."""
    if session is None:
        ledger.note(class_id, first, count, frames, "", now)
        return
    ledger.note(class_id, first, count, frames, producer_key(session), now)
    session.last_log_position = ledger.mark
    if ledger.is_elsewhere and isinstance(session.decoder, Version2Decoder):
        session.decoder.producer.owed[class_id] = session.last_log_position
    if ledger.is_behind and not isinstance(session.decoder, Version2Decoder):
        session.has_write_backlog = True
        ledger.lagging[session] = None


def failure(ledger: CommitLog | None, session: Session) -> tuple[Reason, str] | None:
    """Why nothing that this peer publishes can be kept, if it can be told."""
    if ledger is None or not isinstance(session.decoder, Version2Decoder):
        return None
    return ledger.failure


def refuse(
    ledger: CommitLog | None, publishers: ProducerStates, session: Session, refused: Refused
) -> None:
    """A frame had no effect. If it was a message, its number is used up all the same, and its
    program is told again should it not have heard of that."""
    if refused.frame_type in (frames.MESSAGE, frames.ENVELOPE):
        dialect = session.decoder
        if isinstance(dialect, Version2Decoder) and dialect.producer.key:
            publishers.refuse(dialect.producer, refused)
            if ledger is not None:
                ledger.refuse(dialect.producer.key, refused)
