"""Classes larger than memory: the newest messages are in the ring, all of them on disk.

Rule 1: only what is written leaves the ring. What is not needed any more leaves as everywhere.
Rule 2: a position that needs what the ring has let go of is *behind*: it has a ring of its own,
with the same sequences, from its floor on, which is filled from disk; and no other position
notices. What it has acknowledged out of order is an empty message in there.
Rule 3: this file asks for what is on disk and is brought it later. Who reads it is not its concern.

    disk      first ────────────────────────────────────── written
    behind      floor ── cursor ── read back ┄┄►
    ring                                     floor ─────────────── head

Invariant: first <= ring.floor; a position that is behind becomes one of the others again as soon as
its floor is not below the ring's.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from simplebus.core.commit_log import Ledger
from simplebus.core.errors import Reason
from simplebus.core.group.group import Group
from simplebus.core.limits import (
    MESSAGES_MAX,
    SPARE_BYTES,
    SPILL_PART,
    SPILL_READ_BYTES,
    SPILLED_MARKS_MAX,
)
from simplebus.core.message_class.stored_frames import Reviving
from simplebus.core.protocol import frames
from simplebus.core.protocol.frames import FrameBatch
from simplebus.core.ring.memory_budget import MemoryBudget
from simplebus.core.ring.ring import Ring

if TYPE_CHECKING:
    from simplebus.core.message_class.message_class import MessageClass
    from simplebus.core.redelivery.ack_window import AckWindow
    from simplebus.core.session.outbox import Outbox
    from simplebus.core.store.store import Store
    from simplebus.core.subscription.subscription import Subscription


class Stretch(NamedTuple):
    """Messages first..first+messages-1 as they were found on disk."""

    first: int
    messages: int
    time: float
    """When they were accepted."""
    frames: bytes
    """As their publishers sent them; empty where they cannot be read, whatever is tried."""


@dataclass(frozen=True, slots=True, eq=False)
class Read:
    """Messages first..last-1 of a class are wanted from disk, in order, about `bytes_max` of them
    or the first one."""

    class_id: int
    first: int
    last: int
    bytes_max: int
    then: Callable[[Sequence[Stretch]], None]
    """Called with what was found, without a gap; with nothing when it is to be asked for again."""


class Spill:
    """What of one class is on disk, and who is behind."""

    def __init__(self, cls: MessageClass, spilling: Spilling) -> None:
        self._cls = cls
        self._spilling = spilling
        self.first = cls.ring.floor
        """The lowest sequence that is stored, in memory or on disk."""
        self.bytes_max = 0
        """Bytes of frames that may be on disk only; 0 for any number."""
        self.behind: dict[Subscription, Behind] = {}
        self._ends: list[int] = []
        """Where, and after how many bytes in all, the ring has let go of what is on disk."""
        self._sums: list[int] = []

    @property
    def messages(self) -> int:
        """Messages that are on disk only."""
        return self._cls.ring.floor - self.first

    @property
    def frame_bytes(self) -> int:
        """About how many bytes of frames are on disk only."""
        if not self._sums or not self.messages:
            return 0
        return self._sums[-1] - self._sum_at(self.first)

    def _sum_at(self, sequence: int) -> int:
        at = bisect_right(self._ends, sequence)
        return self._sums[at - 1] if at else 0

    def after(self, size: int) -> int:
        """A sequence with about `size` bytes on disk only before it."""
        at = bisect_right(self._sums, self._sum_at(self.first) + size)
        return self._ends[at - 1] if at else self.first

    def note(self, last: int, size: int) -> None:
        """Messages up to this one are on disk only, the latest of them with so many bytes."""
        if not self._ends:
            self._ends, self._sums = [self.first], [0]
        self._ends.append(last)
        self._sums.append(self._sums[-1] + size)
        if len(self._ends) > SPILLED_MARKS_MAX:
            self._ends, self._sums = self._ends[::2], self._sums[::2]

    def make_room(self, size: int) -> bool:
        """Have the ring let go of `size` bytes at least, if so much is written. Returns whether it
        has let go of anything."""
        cls, ring = self._cls, self._cls.ring
        if not len(ring) or (self.bytes_max and self.frame_bytes >= self.bytes_max):
            return False
        until = ring.after(max(size, ring.frame_bytes // SPILL_PART))
        if len(ring) >= ring.messages_max:
            until = max(until, ring.floor + max(1, len(ring) // SPILL_PART))
        until = min(until, self._spilling.ledger.written(cls.class_id, ring.head))
        if until <= ring.floor:
            return False
        for position in list(cls.subscriptions):
            if position.window.floor < until and position not in self.behind:
                behind = Behind(cls, position, self._spilling)
                if not behind.begin(until):
                    return False
                self._join(behind)
        self.note(until, ring.size(ring.floor, until))
        ring.release(until)
        return True

    def add(self, position: Subscription) -> None:
        """A position is new, and may be behind from the start."""
        if position.window.floor < self._cls.ring.floor:
            behind = Behind(self._cls, position, self._spilling)
            behind.rest()
            self._join(behind)

    def remove(self, position: Subscription) -> None:
        """A position is gone, or is behind no longer."""
        behind = self.behind.pop(position, None)
        if behind is not None:
            del self._spilling.behind[behind]
            behind.end()

    def _join(self, behind: Behind) -> None:
        self.behind[behind.position] = behind
        self._spilling.behind[behind] = None

    def release(self, floor: int) -> None:
        """Nobody needs what is below floor; the ring knows it already."""
        self.first = min(max(self.first, floor), self._cls.ring.floor)
        at = bisect_right(self._ends, self.first) - 1
        if at > 0:
            del self._ends[:at], self._sums[:at]


class Behind:
    """One position that is behind."""

    def __init__(self, cls: MessageClass, position: Subscription, spilling: Spilling) -> None:
        self.position = position
        self._cls = cls
        self._spilling = spilling
        self._ring = self._fresh()
        self._rests = False
        """Whether nobody is there, and nothing is held for it."""
        self._asked: Read | None = None
        self._stuck: tuple[int, int] | None = None
        """With how much acknowledged there was no memory for more."""
        self._compacted_bytes = 0

    def _fresh(self) -> Ring:
        ring = Ring(
            class_id=self._cls.class_id,
            messages_max=MESSAGES_MAX,
            bytes_max=self._spilling.budget.limit,
            budget=self._spilling.budget,
        )
        ring.begin(self.position.window.floor)
        return ring

    def begin(self, until: int) -> bool:
        """Take over from the class's ring what the position was sent. Returns False without memory
        for it, and nothing has changed."""
        position = self.position
        if not position.is_served and position.may_rest:
            self.rest()
            return True
        window = position.window
        if not self._copy(position.ring, self._ring, window, window.cursor):
            self._ring.free()
            return False
        self._use(self._ring)
        return True

    def _use(self, ring: Ring) -> None:
        self._cls.channels.lends.pop(self._ring.columns, None)
        self._ring = ring
        self._cls.channels.lends[ring.columns] = None
        self.position.move_to(ring)

    def rest(self) -> None:
        """Nobody is there: hold nothing for it."""
        self._rests = True
        self._asked = self._stuck = None
        self._compacted_bytes = 0
        held = self._ring
        self._use(self._fresh())
        held.free()

    def end(self) -> None:
        """It is behind no longer, or gone."""
        self._asked = None
        self._cls.channels.lends.pop(self._ring.columns, None)
        self._ring.free()

    def tick(self) -> None:
        """Once per tick: memory may be there that was not."""
        self._stuck = None
        self._ring.tick()

    def go_on(self) -> bool:
        """Ask for more, or get it from the class's ring. Returns whether the position may have
        something new."""
        position, ring, main = self.position, self._ring, self._cls.ring
        window = position.window
        if window.floor >= main.floor:
            position.move_to(main)
            position.bring_back()
            self._spill.remove(position)
            return True
        if not position.is_served and (self._rests or position.may_rest):
            if not self._rests:
                self.rest()
            return False
        self._rests = False
        if ring.head < window.floor:  # It has given up, unseen, what was to be read next.
            ring.free()
            ring.begin(window.floor)
            self._asked = None
        ring.release(min(window.floor, ring.head))
        if self._asked is not None:
            return False
        cursor = max(window.cursor, ring.floor)
        if cursor < ring.head and ring.size(cursor, ring.head) >= SPILL_READ_BYTES:
            return False
        if self._stuck == (window.floor, window.in_flight):
            return False
        self._stuck = None
        self._compact()
        if ring.head >= main.floor:
            return self._follow(main)
        last = min(main.floor, self._spilling.ledger.written(ring.class_id, main.floor))
        self._asked = Read(ring.class_id, ring.head, last, SPILL_READ_BYTES, self._given)
        self._spilling.ask(self._asked)
        return False

    @property
    def _spill(self) -> Spill:
        assert self._cls.spill is not None
        return self._cls.spill

    def _follow(self, main: Ring) -> bool:
        """Copy what comes next and is in the class's ring."""
        ring, window = self._ring, self.position.window
        before = ring.head
        if before >= main.head:
            return False
        last = main.batch(before, main.head, SPILL_READ_BYTES)[1]
        if not self._copy(main, ring, window, last):
            self._stuck = (window.floor, window.in_flight)
        return self._grew(before)

    def _grew(self, before: int) -> bool:
        if self._ring.head > before:
            self.position.bring_back()
            return True
        return False

    def _given(self, found: Sequence[Stretch]) -> None:
        """What was asked for."""
        if self._asked is None or self._rests:
            return
        self._asked = None
        before = self._ring.head
        try:
            for stretch in found:
                if not self._take(stretch):
                    break
        except MemoryError:
            window = self.position.window
            self._stuck = (window.floor, window.in_flight)
        if self._grew(before):
            self._spilling.wake(self.position)

    def _take(self, stretch: Stretch) -> bool:
        """Put what was found into the ring. Returns False when there is no more to be taken.
        Raises MemoryError when it does not fit."""
        ring, window = self._ring, self.position.window
        last = stretch.first + stretch.messages
        # The clock may have been set back since: what is there was accepted by now.
        time = min(stretch.time, self._spilling.clock.now)
        if last <= ring.head:
            return True
        if stretch.first > ring.head:
            return False
        at = stretch.first
        try:
            for batch in self._spilling.split(stretch):
                skipped = min(batch.count, max(0, ring.head - at))
                at += batch.count
                if skipped < batch.count:
                    self._take_batch(batch.slice(skipped, batch.count), time, window)
        except ValueError:  # So it cannot be read, whatever is tried.
            first = ring.head
            _put(ring, _empty(ring.class_id, last - first))
            self.position.pass_over(first, last, Reason.DAMAGED)
        return True

    def _take_batch(self, batch: FrameBatch, time: float, window: AckWindow) -> None:
        ring = self._ring
        for run, rows in self._spilling.reviving.runs(self._cls, batch, time):
            first = ring.head
            for begin, end, is_open in _pieces(window, first, first + run.count):
                if is_open:
                    part = None if rows is None else rows.part(begin - first, end - first)
                    some = run.slice(begin - first, end - first)
                    if ring.append(some, 0, part) < some.count:
                        raise MemoryError
                else:
                    _put(ring, _empty(ring.class_id, end - begin))

    def _copy(self, source: Ring, target: Ring, window: AckWindow, last: int) -> bool:
        """Have what the source has up to `last` in the target, too. Returns whether there was
        memory for it."""
        try:
            for begin, end, is_open in _pieces(window, target.head, last):
                if not is_open:
                    _put(target, _empty(target.class_id, end - begin))
                while is_open and begin < end:
                    batch, after = source.batch(begin, end, SPILL_READ_BYTES)
                    rows = source.rows(begin, after) if begin < source.special_until else None
                    if target.append(batch, 0, rows) < batch.count:
                        return False
                    begin = after
        except MemoryError:
            return False
        return True

    def _compact(self) -> None:
        """Where much of what is held is acknowledged out of order, hold it no longer."""
        ring, window = self._ring, self.position.window
        held = ring.size(ring.floor, min(window.cursor, ring.head))
        if held < max(4 * SPILL_READ_BYTES, 2 * self._compacted_bytes):
            return
        if 2 * window.in_flight > window.cursor - window.floor:
            return  # Most of it is needed.
        fresh = self._fresh()
        if self._copy(ring, fresh, window, ring.head):
            self._compacted_bytes = fresh.size(fresh.floor, min(window.cursor, fresh.head))
            self._use(fresh)
            ring.free()
        else:
            fresh.free()


class Spilling:
    """Of all classes of one broker that has a ledger."""

    def __init__(
        self,
        store: Store,
        ledger: Ledger,
        budget: MemoryBudget,
        *,
        ready: Callable[[Outbox], None],
    ) -> None:
        """`ready` is called with outboxes that have something new."""
        self.ledger = ledger
        self.clock = store.clock
        self.budget = budget
        """Of all rings of positions that are behind."""
        self.reviving = Reviving(store)
        self.behind: dict[Behind, None] = {}
        self._ready = ready
        self._reads: list[Read] = []
        self._again: list[Read] = []
        """What could not be read, to be read again at the next tick."""

    def ask(self, read: Read) -> None:
        """Have something read."""
        self._reads.append(read)

    def take_reads(self) -> list[Read]:
        """What is to be read; `given` or `failed` is to follow for each."""
        reads, self._reads = self._reads, []
        return reads

    def given(self, read: Read, found: Sequence[Stretch]) -> None:
        """This was found on disk."""
        read.then(found)

    def failed(self, read: Read) -> None:
        """It could not be read now."""
        self._again.append(read)

    def tick(self) -> None:
        """Once per tick: try again what went wrong."""
        again, self._again = self._again, []
        for read in again:
            read.then(())
        for behind in self.behind:
            behind.tick()

    def go_on(self) -> None:
        """Have everybody who is behind get on."""
        for behind in list(self.behind):
            if behind.go_on():
                self.wake(behind.position)

    def wake(self, position: Subscription) -> None:
        """A position has something new."""
        if isinstance(position, Group):
            for member in position.share():
                self._ready(member.outbox)
        elif position.is_connected:
            position.outbox.wake(position)
            self._ready(position.outbox)

    def split(self, stretch: Stretch) -> list[FrameBatch]:
        """The messages of a stretch."""
        buffer = bytearray().join([stretch.frames, bytes(SPARE_BYTES)])
        return self.reviving.split(buffer, 0, len(stretch.frames), stretch.messages)


def _pieces(window: AckWindow, first: int, last: int) -> list[tuple[int, int, bool]]:
    """Messages first..last-1 in ranges, and whether each is still needed."""
    pieces: list[tuple[int, int, bool]] = []
    sent = min(last, window.cursor)
    ranges = window.unacked(first, sent)
    if sent < last:
        begin = max(first, sent)
        if ranges and ranges[-1][1] == begin:
            begin = ranges.pop()[0]
        ranges.append((begin, last))
    for begin, end in ranges:
        if first < begin:
            pieces.append((first, begin, False))
        pieces.append((begin, end, True))
        first = end
    if first < last:
        pieces.append((first, last, False))
    return pieces


def _empty(class_id: int, count: int) -> FrameBatch:
    """So many empty messages."""
    frame = np.frombuffer(frames.encode(frames.MESSAGE, class_id=class_id), np.uint8)
    bounds = np.arange(0, (count + 1) * frame.size, frame.size, dtype=np.int64)
    return FrameBatch(np.tile(frame, count), bounds, frame.size)


def _put(ring: Ring, batch: FrameBatch) -> None:
    """Append all of it. Raises MemoryError when it does not fit."""
    if ring.append(batch, 0) < batch.count:
        raise MemoryError
