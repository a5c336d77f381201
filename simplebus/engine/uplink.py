"""What publishers have said, on its way into streams.

Rule 1: a lot has reached the cluster when each of its messages has its PubAck; lots are said to be
there in their order.
Rule 2: what has no PubAck in time, or was refused, is published again, in order, until it has one:
publishers wait meanwhile. A stream knows a message that comes twice by its id, which is made of its
publisher's name, program and number; of a publisher without a name, of this door's.
Rule 3: messages that are written together have one subject for their PubAcks, which are counted:
servers look a subject up that they know sooner than one for each message. What is written again
has another one.
Rule 4: so much is under way and no more; the rest waits, and what waits is bounded by the ledger.

    lots     put ─► waiting ─► written ─► acknowledged ─► reached
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from simplebus.core.frames import FrameBatch, Integers
from simplebus.core.ledger import Lot
from simplebus.core.version2 import numbers_of
from simplebus.engine import content
from simplebus.nats.client import jetstream
from simplebus.nats.client.core import ClientCore, Replies
from simplebus.nats.client.jetstream import JetStreamError

UNDER_WAY_MESSAGES = 8 * 1024
UNDER_WAY_BYTES = 4 * 1024 * 1024
"""No more is begun to be published while so much has no PubAck."""
PATIENCE_SECONDS = 4.0
"""When no PubAck has come for so long, though some are awaited, or none of the oldest messages for
twice as long, what has none is published again."""
PAUSE_SECONDS = 0.25
"""Before what was refused is published again."""
PIECE_MESSAGES = 4096


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
    number: int = 0
    """Of the request that they are, as they were written last; 0 for never."""
    moved_at: float = 0.0
    """When they were written last, or one of them had its PubAck."""


@dataclass(slots=True)
class _Waiting:
    lot: int
    pieces: list[Piece]


@dataclass(frozen=True, slots=True)
class UplinkStatistics:
    """A snapshot."""

    lots: int
    """Lots that have not reached the cluster."""
    under_way: int
    """Messages that were published and have no PubAck."""
    stored: int
    """PubAcks so far."""
    duplicates: int
    """How many of them said that the stream had the message already."""
    refused: int
    """How often a message was not stored, and published again."""


class Uplink:
    """Of one door."""

    def __init__(
        self,
        core: ClientCore,
        *,
        subject: Callable[[int], str],
        program: Callable[[str], str],
        run: str,
    ) -> None:
        """`subject` of a class; the `program` that publishes under a name, "" where that is not
        known; `run` is this door's own."""
        self._core = core
        self._subject = subject
        self._program = program
        self._run = run
        self._count = 0
        """Messages of nobody so far."""
        self._lots: deque[_Waiting] = deque()
        self._begun: dict[int, Piece] = {}
        """Those that were written and have messages without a PubAck, by their numbers: the first
        ones first."""
        self._ready: deque[Piece] = deque()
        """Those that are to be written."""
        self._again_at = float("inf")
        """When all that was begun is written again, whatever comes."""
        self._heard_at = 0.0
        """When a PubAck came last, or the first one that is awaited was asked for."""
        self._under_way = self._under_way_bytes = 0
        self.open_classes: set[int] = set()
        """Those that have a stream."""
        self._homeless: set[int] = set()
        self._held: Counter[int] = Counter()
        self.stored = self.duplicates = self.refused = 0
        self.last_error: JetStreamError | None = None
        """Why something was not stored; None once all that was begun is."""

    def hold(self, class_id: int) -> None:
        """Nothing of this class is begun to be published until `let_go` is called as often."""
        self._held[class_id] += 1

    def let_go(self, class_id: int) -> None:
        self._held[class_id] -= 1
        if not self._held[class_id]:
            del self._held[class_id]

    @property
    def is_empty(self) -> bool:
        return not self._lots

    @property
    def lots(self) -> int:
        """How many have not reached the cluster."""
        return len(self._lots)

    def statistics(self) -> UplinkStatistics:
        return UplinkStatistics(
            len(self._lots), self._under_way, self.stored, self.duplicates, self.refused
        )

    def put(self, lot: Lot) -> None:
        """Have a lot published. `go_on` does it."""
        pieces: list[Piece] = []
        for entry in lot.entries:
            runs = deque(entry.publishers)
            for batch in content.batches(entry.frames):
                at = 0
                while at < batch.count:
                    count, name = runs[0]
                    some = min(count, batch.count - at, PIECE_MESSAGES)
                    pieces.append(self._piece(entry.class_id, batch.slice(at, at + some), name))
                    at += some
                    runs[0] = (count - some, name)
                    if count == some:
                        runs.popleft()
        self._lots.append(_Waiting(lot.number, pieces))
        self._ready += pieces

    def _piece(self, class_id: int, batch: FrameBatch, name: str) -> Piece:
        if name:
            program = jetstream.escaped(self._program(name) or self._run)
            prefix = f"{jetstream.escaped(name)}:{program}:"
            ids = numbers_of(batch)
        else:
            prefix = f":{self._run}:"
            ids = np.arange(self._count, self._count + batch.count)
            self._count += batch.count
        return Piece(class_id, batch, prefix.encode(), ids, batch.count)

    def go_on(self, now: float) -> set[int]:
        """Publish what may be. Returns the classes that need a stream first."""
        if not self._core.is_ready:
            return set()
        if self._begun:
            self._look_for_late_ones(now)
        ready = self._ready
        while ready and self._under_way < UNDER_WAY_MESSAGES:
            if self._under_way_bytes >= UNDER_WAY_BYTES:
                break
            piece = ready[0]
            if piece.class_id in self._held or piece.class_id not in self.open_classes:
                return {each.class_id for each in ready} - self.open_classes
            ready.popleft()
            if not self._begun:
                self._heard_at = now
            self._under_way += piece.left
            self._under_way_bytes += piece.batch.data.size
            self._write(piece, now)
        return set()

    def _look_for_late_ones(self, now: float) -> None:
        """Publish again what has waited for its PubAck for too long: all of it, as it was in
        order."""
        first = next(iter(self._begun.values()))
        is_late = now >= min(self._again_at, self._heard_at + PATIENCE_SECONDS)
        if is_late or now >= first.moved_at + 2 * PATIENCE_SECONDS:
            self._again_at, self._heard_at, self.last_error = float("inf"), now, None
            pieces, self._begun = list(self._begun.values()), {}
            for piece in pieces:
                self._under_way += piece.batch.count - piece.left
                piece.left = piece.batch.count
                self._write(piece, now)

    def _write(self, piece: Piece, now: float) -> None:
        """Publish all of it."""
        piece.moved_at = now
        piece.number = self._core.take_numbers(1)
        self._begun[piece.number] = piece
        subject = self._subject(piece.class_id).encode()
        ids, replies = (piece.prefix, piece.ids), [self._core.reply_to(piece.number)]
        self._core.write(content.publications(subject, piece.batch, ids=ids, replies=replies))

    def begin_anew(self, now: float) -> None:
        """There is another connection: what had no PubAck on the former one is to be published on
        this one."""
        self._again_at = now if self._begun else float("inf")

    def take(self, replies: Replies, now: float) -> int | None:
        """PubAcks have come. Returns what `reached` does."""
        acks = jetstream.pub_acks(replies.messages)
        if acks.errors:
            for row, error in acks.errors.items():
                piece = self._begun.get(int(replies.numbers[row]))
                if error.code == jetstream.NO_RESPONDERS and piece is not None:
                    self._homeless.add(piece.class_id)
            self.open_classes -= self._homeless
            self.refused += len(acks.errors)
            self.last_error = next(iter(acks.errors.values()))
            self._again_at = min(self._again_at, now + PAUSE_SECONDS)
        self.duplicates += int(np.count_nonzero(acks.duplicates))
        numbers, counts = np.unique(replies.numbers[acks.sequences > 0], return_counts=True)
        for number, count in zip(numbers.tolist(), counts.tolist(), strict=True):
            piece = self._begun.get(number)
            if piece is not None:
                self._heard_at = piece.moved_at = now
                piece.left -= count
                self.stored += count
                self._under_way -= count
                if piece.left <= 0:
                    del self._begun[number]
                    self._under_way_bytes -= piece.batch.data.size
        if not self._begun:
            self._again_at, self.last_error = float("inf"), None
        return self.reached()

    def take_homeless(self) -> set[int]:
        """Classes whose stream did not answer since this was asked last: it may be gone."""
        homeless, self._homeless = self._homeless, set()
        return homeless

    def reached(self) -> int | None:
        """The last lot that has reached the cluster, if that was not told before."""
        found = None
        while self._lots and not any(piece.left for piece in self._lots[0].pieces):
            found = self._lots.popleft().lot
        return found
