"""What publishers have said to one class, on its way into its stream.

Rule 1: pieces are begun in the order in which they were put, and each is of one publisher.
Rule 2: where a stream has no room, one piece is under way, a message at first and then a few: next
to nothing overtakes what was refused, and what is stored is not written again.
Rule 3: what waits here is not put a second time.
Rule 4: a class waits for no other: what is under way, what is asked for, what is late and what may
wait is of each by itself.

    put ─► ready ─► begun ─► stored
           └──── pieces ───┘
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace

import numpy as np

from simplebus.core.frames import Flags, FrameBatch, Integers
from simplebus.core.limits import LEDGER_BYTES_MAX
from simplebus.nats.client.jetstream import JetStreamError

UNDER_WAY_MESSAGES = 16 * 1024
UNDER_WAY_BYTES = 4 * 1024 * 1024
"""Of a class no more is begun to be published while so much has no PubAck."""
WAITING_BYTES_MAX = 16 * 1024 * 1024
WAITING_PIECES_MAX = 4096
"""Of a class of which so much waits nothing more is to be accepted."""
SHARED_BYTES = 48 * 1024 * 1024
SHARE_BYTES_MIN = 1024 * 1024
"""A class has half of what the others leave of this, and so much in any case: there is some of
LEDGER_BYTES_MAX for those that go on."""
NAMES_MAX = 4096
"""Of more publishers it is forgotten what was put, but for those of whom something waits."""
PIECES_AT_ONCE = 64
"""While so many pieces of a class are on their way, what comes is gathered to larger ones."""
WINDOW_MAX = 32
CALM_MESSAGES = 4096
"""When so many were stored behind the last refusal, a stream is taken for one that has room."""
SILENT_SECONDS = 0.5
"""A class of which nothing is heard for so long may be held up."""

assert UNDER_WAY_BYTES < WAITING_BYTES_MAX
assert SHARED_BYTES < LEDGER_BYTES_MAX


@dataclass(slots=True, eq=False)
class Piece:
    """Messages of one class, one type and one publisher."""

    class_id: int
    batch: FrameBatch
    prefix: bytes
    """Of their message ids."""
    ids: Integers
    left: int
    """How many have no PubAck yet."""
    has_name: bool
    is_chain: bool = False
    """Whether they were written as one."""
    is_open: bool = False
    """Whether it was not said that this chain has ended."""
    is_sure: bool = True
    """Whether those of a chain that are not left are all that is stored, or all have ids; not
    while the stream is asked which it has."""
    is_told: bool = False
    """Whether all of a chain was said to be stored: it is not under way any more, though the stream
    has not said so of its last message."""
    stored: set[int] = field(default_factory=set)
    """Sequences of those that have their PubAcks, as they were written last: two servers that both
    take themselves for the leader may send the same one twice."""
    missing: Flags | None = None
    """Of one that was written again message by message: which have no PubAck since then; each is
    asked for by itself, and what has one is never written again."""
    number: int = 0
    """Of the request that they are, as they were written last; 0 for never."""
    moved_at: float = 0.0
    """When they were written last, or one of them had its PubAck."""

    done: list[Integers] = field(default_factory=list)
    """The numbers of those that were left out of it when they were stored: one array, or none."""

    @property
    def is_counted(self) -> bool:
        """Whether PubAcks say how many of it are stored. Where the stream was asked which ones are,
        late ones would count what it has said."""
        return not self.is_chain and self.missing is None

    def leave_out_stored(self) -> None:
        """Leave what is not known to be stored."""
        if self.missing is not None:
            self.note_done(self.ids[~self.missing])
            rows = np.flatnonzero(self.missing)
            self.batch, self.ids, self.missing = self.batch.take(rows), self.ids[rows], None
        self.left = self.batch.count
        self.stored.clear()

    def note_done(self, ids: Integers) -> None:
        """These are left out. Where a stream has no room this is called for hours, mostly with
        none."""
        if ids.size:
            self.done = [np.concatenate([*self.done, ids])]

    def part(self, first: int, last: int | None = None) -> Piece:
        """Some of its messages, which are not under way."""
        last = self.batch.count if last is None else last
        batch, ids = self.batch.slice(first, last), self.ids[first:last]
        # Of a chain without a name it is known what is stored: the rest is as new.
        number = 0 if self.is_chain and not self.has_name else self.number
        done = [] if first else self.done
        left = batch.count
        return replace(
            self, batch=batch, ids=ids, left=left, stored=set(), number=number, done=done
        )


@dataclass(slots=True, eq=False)
class Lane:
    """The way of one class."""

    class_id: int
    pieces: deque[tuple[int, Piece]] = field(default_factory=deque)
    """All from the first one on that is not stored, each with its lot."""
    ready: deque[Piece] = field(default_factory=deque)
    """Those that are to be written."""
    begun: dict[int, Piece] = field(default_factory=dict)
    """Those that were written and have messages without a PubAck, by their numbers: the first ones
    first."""
    asked: dict[int, tuple[Piece, int]] = field(default_factory=dict)
    """What the stream was asked for, by number: whether this message of a piece is stored."""
    rows: dict[int, tuple[Piece, int]] = field(default_factory=dict)
    """The PubAcks of single messages that are awaited, by number: which message of a piece."""
    proofs: dict[int, Piece] = field(default_factory=dict)
    """What it was asked for, by number: whether the last one of a chain is, of which all is said to
    be."""
    untold: list[tuple[int, bytes, Integers]] = field(default_factory=list)
    """What is stored of a lot of which something is not, of publishers with names: the lot, what
    their ids begin with, and the numbers."""
    highest: dict[bytes, int] = field(default_factory=dict)
    """The highest number that was put of each publisher with a name, by what its ids begin with."""
    window: int = 0
    """Where its stream has no room: so many messages are written at once; 0 for any number."""
    calm: int = 0
    """How many were stored since it had none."""
    again_at: float = float("inf")
    """When all that was begun is written again, whatever comes."""
    refusal: JetStreamError | None = None
    """Why its stream took nothing last; None when it did, and is not taken for one without room."""
    heard_at: float = 0.0
    """When a PubAck came last, or the first one that is awaited was asked for."""
    under_way: int = 0
    under_way_bytes: int = 0
    waiting_bytes: int = 0
    """Of all pieces that are not stored."""

    @property
    def has_room(self) -> bool:
        """Whether more may be begun: not what would overtake what is to be written again."""
        if self.window:
            return not (self.begun or self.asked)
        is_full = self.under_way >= UNDER_WAY_MESSAGES or self.under_way_bytes >= UNDER_WAY_BYTES
        is_held_up = bool(self.begun) and self.again_at < float("inf")
        return not (is_full or self.asked or is_held_up)

    @property
    def is_full(self) -> bool:
        """Whether no more is to be accepted."""
        return self.waiting_bytes >= WAITING_BYTES_MAX or len(self.pieces) >= WAITING_PIECES_MAX

    def is_crowded(self, now: float) -> bool:
        """Whether many pieces are on their way, and nothing holds them up."""
        goes_on = self.again_at == float("inf") and now < self.heard_at + SILENT_SECONDS
        return len(self.pieces) >= PIECES_AT_ONCE and bool(self.begun) and goes_on

    def is_doubted(self, piece: Piece) -> bool:
        """Whether the stream is to say which messages of one that was begun it has. Of single ones
        it is known how many, but not which: where there is room, all are written again."""
        is_part = bool(self.window) and piece.missing is None and piece.left < piece.batch.count
        return not piece.is_sure or (is_part and not piece.is_chain)

    def put(self, lot: int, piece: Piece) -> None:
        """One is to be written, but for what waits here already, or is stored in front of what
        does: its publisher, who was cut off, says that again."""
        if piece.has_name:
            self._leave_out_waiting(piece)
        self.pieces.append((lot, piece))
        if piece.left:
            self.ready.append(piece)
        self.waiting_bytes += piece.batch.data.size

    def _leave_out_waiting(self, piece: Piece) -> None:
        """The stream may have forgotten it by the time at which it would be written twice."""
        whose, ids = piece.prefix, piece.ids
        highest = self.highest.get(whose, -1)
        if ids.min() <= highest:
            fresh = np.ones(ids.size, np.bool_)
            for _, each in self.pieces:
                if each.prefix == whose:
                    for known in (each.ids, *each.done):
                        fresh &= ~np.isin(ids, known)
            for _, prefix, known in self.untold:
                if prefix == whose:
                    fresh &= ~np.isin(ids, known)
            rows = np.flatnonzero(fresh)
            if rows.size < ids.size:
                batch = piece.batch.take(rows) if rows.size else piece.batch.slice(0, 0)
                piece.batch, piece.ids, piece.left = batch, ids[rows], rows.size
        if len(self.highest) >= NAMES_MAX and whose not in self.highest:
            waiting = {each.prefix for _, each in self.pieces}
            self.highest = {name: self.highest[name] for name in waiting if name in self.highest}
        self.highest[whose] = max(highest, int(ids.max()))

    def put_back(self, pieces: list[Piece]) -> None:
        """These are not begun any more, and are the first that are to be."""
        for piece in reversed(pieces):
            self.count_under_way(piece, -1)
            self.waiting_bytes -= piece.batch.data.size
            piece.leave_out_stored()
            self.waiting_bytes += piece.batch.data.size
            self.ready.appendleft(piece)

    def split_first(self) -> int | None:
        """Make two of the first piece that is to be written, if it is larger than the window: the
        first is as large. Returns their lot; None where it is not."""
        piece, count = self.ready[0], self.window
        if not 0 < count < piece.batch.count:
            return None
        at = next(at for at, (_, each) in enumerate(self.pieces) if each is piece)
        lot, parts = self.pieces[at][0], (piece.part(0, count), piece.part(count))
        self.pieces[at] = lot, parts[0]
        self.pieces.insert(at + 1, (lot, parts[1]))
        self.ready[0] = parts[0]
        self.ready.insert(1, parts[1])
        return lot

    def count_under_way(self, piece: Piece, times: int) -> None:
        self.under_way += times * piece.left
        self.under_way_bytes += times * piece.batch.data.size

    def count_stored(self, piece: Piece, count: int, now: float) -> None:
        """So many more of a piece that was begun are stored."""
        piece.moved_at = now
        piece.left -= count
        if not self.window:
            self.refusal = None
        if not piece.is_told:
            self.under_way -= count
        if piece.left <= 0:
            piece.stored.clear()
            del self.begun[piece.number]
            if self.window:
                self.calm += piece.batch.count
                is_calm = self.calm >= CALM_MESSAGES
                self.window = 0 if is_calm else min(2 * self.window, WINDOW_MAX)
            if not piece.is_told:
                self.under_way_bytes -= piece.batch.data.size
            self.waiting_bytes -= piece.batch.data.size
            if not self.begun:
                self.again_at = float("inf")

    def cut(self, piece: Piece) -> None:
        """Leave of a chain what is not stored."""
        done = piece.batch.count - piece.left
        rest = piece.batch.slice(done, piece.batch.count)
        self.under_way_bytes += rest.data.size - piece.batch.data.size
        self.waiting_bytes += rest.data.size - piece.batch.data.size
        piece.note_done(piece.ids[:done])
        piece.batch, piece.ids = rest, piece.ids[done:]

    def take_stored(self) -> list[int]:
        """The lots of pieces that are stored, with all before them, since this was asked last."""
        found: list[int] = []
        while self.pieces and not self.pieces[0][1].left:
            lot, piece = self.pieces.popleft()
            found.append(lot)
            if piece.has_name:
                self.untold += [(lot, piece.prefix, ids) for ids in (piece.ids, *piece.done)]
        if found and self.untold:
            first = self.pieces[0][0] if self.pieces else found[-1] + 1
            self.untold = [each for each in self.untold if each[0] >= first]
        return found
