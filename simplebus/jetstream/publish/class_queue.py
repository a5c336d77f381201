"""What publishers have said to one class, on its way into its stream.

Rule 1: pieces are begun in the order in which they were put, and each is of one publisher.
Rule 2: answers that are counted say how much of what was begun is stored, and nothing of what is
doubted: of that it is known which messages are, whoever says it, and however often. Nothing is
stored of what is ready, but for what was on its way still when the stream was asked.
Rule 3: where a stream has no room, one piece is under way, a message at first and then a few: next
to nothing overtakes what was refused.
Rule 4: what waits here is not put a second time.
Rule 5: a class waits for no other: what is under way, what is asked for, what is late and what may
wait is of each by itself.

    put ─► ready ─► begun ─► stored
             ▲        ▼        ▲
             └───  doubted  ───┘
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace

import numpy as np

from simplebus.core.limits import COMMIT_LOG_BYTES_MAX
from simplebus.core.protocol.frames import Flags, FrameBatch, Integers
from simplebus.jetstream.publish import codec
from simplebus.nats.client.jetstream_codec import JetStreamError

UNDER_WAY_MESSAGES = 16 * 1024
UNDER_WAY_BYTES = 4 * 1024 * 1024
"""Of a class no more is begun to be published while so much has no PubAck."""
WAITING_BYTES_MAX = 16 * 1024 * 1024
WAITING_PIECES_MAX = 4096
"""Of a class of which so much waits nothing more is to be accepted."""
SHARED_BYTES = 48 * 1024 * 1024
SHARE_BYTES_MIN = 1024 * 1024
"""A class has half of what the others leave of this, and so much in any case: there is some of
COMMIT_LOG_BYTES_MAX for those that go on."""
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
assert SHARED_BYTES < COMMIT_LOG_BYTES_MAX


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
    has_ids: bool = False
    """Whether all of it was written with ids: what of it is written again goes message by
    message."""
    is_chain: bool = False
    """Whether they were written as one."""
    is_open: bool = False
    """Whether it was not said that this chain has ended."""
    is_told: bool = False
    """Whether all of a chain was said to be stored: it is not under way any more, though the stream
    has not said so of its last message."""
    stored: set[int] = field(default_factory=set)
    """Sequences of those that have their PubAcks, as they were written last: two servers that both
    take themselves for the leader may send the same one twice."""
    missing: Flags | None = None
    """Which ones are not known to be stored: while it is doubted, or each has a PubAck that tells
    of it alone."""
    lot: int = 0
    number: int = 0
    """Of the request that they are, as they were written last."""
    moved_at: float = 0.0
    """When they were written last, or one of them had its PubAck."""

    done: list[Integers] = field(default_factory=list)
    """The numbers of those that were left out of it when they were stored: one array, or none."""

    @property
    def tells_how_far(self) -> bool:
        """Whether it is a chain of which all is stored up to some message, and nothing behind it is
        known to be."""
        return self.is_chain and not self.has_name

    def keep(self, rows: Integers) -> None:
        """Leave these, of one that was not begun."""
        self.batch = self.batch.select(rows) if rows.size else self.batch.slice(0, 0)
        self.ids, self.left = self.ids[rows], rows.size

    def doubt(self) -> int:
        """The stream is to say what of it is stored, but for what is known to be. Returns how many
        are not."""
        if self.missing is None:
            self.missing = np.ones(self.batch.count, np.bool_)
            if self.tells_how_far:
                self.missing[: self.batch.count - self.left] = False
        self.is_told = False
        self.stored.clear()
        return int(np.count_nonzero(self.missing))

    def questions(self) -> Integers:
        """Of which rows a stream is to say whether it has them."""
        assert self.missing is not None, "a piece is doubted before it is asked for"
        if not self.tells_how_far:
            return np.flatnonzero(self.missing)
        rows = codec.milestones(self.batch.count)
        return rows[self.missing[rows]]

    def note_stored(self, rows: int | slice) -> int:
        """It was said of these that they are stored, each by itself, or up to some. Returns of how
        many that was not known."""
        assert self.missing is not None, "of others it is counted how many are stored"
        fresh = int(np.count_nonzero(self.missing[rows]))
        self.missing[rows] = False
        return fresh

    def settle(self) -> None:
        """The stream has said what it has. Leave what it has not, or all if it has all."""
        assert self.missing is not None, "a piece is doubted before it is settled"
        missing, self.missing = self.missing, None
        rows = np.flatnonzero(missing)
        if 0 < rows.size < missing.size:  # Where a stream has no room, for hours.
            self.done = [np.concatenate([*self.done, self.ids[~missing]])]
            self.batch, self.ids = self.batch.select(rows), self.ids[rows]
        self.left = rows.size

    def part(self, first: int, last: int | None = None) -> Piece:
        """Some of its messages, which are not under way."""
        batch = self.batch.slice(first, self.batch.count if last is None else last)
        ids = self.ids[first:last]
        done = [] if first else self.done
        return replace(self, batch=batch, ids=ids, left=batch.count, stored=set(), done=done)


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
    doubted: dict[int, Piece] = field(default_factory=dict)
    """Those that were begun and of which the stream is to say what it has: nothing is begun until
    it has said all."""
    unknown: int = 0
    """How many messages of what is doubted are not known to be stored."""
    asked: dict[int, tuple[Piece, int]] = field(default_factory=dict)
    """What the stream was asked for, by number: whether this message of a piece is stored."""
    rows: dict[int, tuple[Piece, int]] = field(default_factory=dict)
    """The PubAcks that tell of one message alone and are awaited, by number: which one of a
    piece."""
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
    """When all that was begun is doubted, or the stream asked again, whatever comes."""
    refusal: JetStreamError | None = None
    """Why its stream took nothing last; None when it did, and is not taken for one without room."""
    mark: int = 0
    """By which the connection tells whether the server has taken what the stream was asked last; 0
    where it was asked on a former one."""
    unanswered: int = 0
    """How often in a row the stream has not answered when it was asked, and the server had that."""
    heard_at: float = 0.0
    """When an answer came last, or the first one that is awaited was asked for."""
    under_way: int = 0
    under_way_bytes: int = 0
    waiting_bytes: int = 0
    """Of all pieces that are not stored."""

    @property
    def has_room(self) -> bool:
        """Whether more may be begun: not what would overtake what is to be written again."""
        if self.window:
            return not (self.begun or self.doubted)
        is_full = self.under_way >= UNDER_WAY_MESSAGES or self.under_way_bytes >= UNDER_WAY_BYTES
        is_held_up = bool(self.begun) and self.again_at < float("inf")
        return not (is_full or self.doubted or is_held_up)

    @property
    def is_full(self) -> bool:
        """Whether no more is to be accepted."""
        return self.waiting_bytes >= WAITING_BYTES_MAX or len(self.pieces) >= WAITING_PIECES_MAX

    def is_crowded(self, now: float) -> bool:
        """Whether many pieces are on their way, and nothing holds them up."""
        goes_on = self.again_at == float("inf") and now < self.heard_at + SILENT_SECONDS
        return len(self.pieces) >= PIECES_AT_ONCE and bool(self.begun) and goes_on

    def piece(self, number: int) -> Piece | None:
        """The one that was written with this number, if it is awaited."""
        return self.begun.get(number) or self.doubted.get(number)

    def put(self, lot: int, piece: Piece) -> None:
        """One is to be written, but for what waits here already, or is stored in front of what
        does: its publisher, who was cut off, says that again."""
        if piece.has_name:
            self._leave_out_twice(piece)
            self._leave_out_waiting(piece)
        piece.lot = lot
        self.pieces.append((lot, piece))
        if piece.left:
            self.ready.append(piece)
        self.waiting_bytes += piece.batch.data.size

    def _leave_out_twice(self, piece: Piece) -> None:
        """What was said again before the first of it was put."""
        if (np.diff(piece.ids) <= 0).any():
            _, firsts = np.unique(piece.ids, return_index=True)
            if firsts.size < piece.ids.size:
                piece.keep(np.sort(firsts))

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
            if not fresh.all():
                piece.keep(np.flatnonzero(fresh))
        if len(self.highest) >= NAMES_MAX and whose not in self.highest:
            waiting = {each.prefix for _, each in self.pieces}
            waiting |= {prefix for _, prefix, _ in self.untold}
            self.highest = {name: self.highest[name] for name in waiting if name in self.highest}
        self.highest[whose] = max(highest, int(ids.max()))

    def doubt(self) -> None:
        """What was begun is not under way any more: the stream is to say what it has of it."""
        for piece in self.begun.values():
            if not piece.is_told:
                self.count_under_way(piece, -1)
        self.unknown = sum(piece.doubt() for piece in self.begun.values())
        self.doubted, self.begun = self.begun, {}

    def note_stored(self, piece: Piece, rows: int | slice) -> None:
        """It was said of these of one that is doubted that they are stored."""
        self.unknown -= piece.note_stored(rows)

    def settle(self) -> int:
        """The stream has said what it has of all that was doubted: the rest is the first that is to
        be written. Returns how many more are stored than were known to be."""
        more = 0
        for piece in reversed(self.doubted.values()):
            before = piece.left
            self.waiting_bytes -= piece.batch.data.size
            piece.settle()
            more += max(0, before - piece.left)
            if piece.left:
                self.waiting_bytes += piece.batch.data.size
                self.ready.appendleft(piece)
        self.again_at = float("inf")
        return more

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
