"""What publishers have said, on its way into streams.

Rule 1: a lot has reached the cluster when each of its messages has its PubAck; lots are said to be
there in their order.
Rule 2: what has no PubAck in time, or was refused, is published again, in order, until it has one:
publishers wait meanwhile. A stream knows a message that comes twice by its id, which is made of its
publisher's name, program and number; of a publisher without a name, of this door's.
Rule 3: messages that are written together have one subject for their PubAcks, which are counted:
servers look a subject up that they know sooner than one for each message. What is written again
has another one.
Rule 4: many messages at once go as chains, which have few PubAcks: of each, all is stored up to
some message and nothing behind it. Of publishers without a name few messages in one have ids. Where
it is not said how far such a chain has come, the stream is asked for its milestones before the rest
is published again: some behind the last one that it knows may be stored twice. With a name, each
message has its id, and what is published again is stored once. It goes message by message: of a
chain a server says that it has what it knows from another one that is on its way still. So, of a
chain that is said to be whole, the stream is asked for the last message, which it has not while
that is on its way; what came before it is in its log before it.
Rule 5: so much is under way and no more; the rest waits, and what waits is bounded by the ledger.

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
from simplebus.nats.client.events import Messages
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
CHAIN_MESSAGES_MIN = 2 * content.MILESTONE_MESSAGES
"""Fewer go one by one: a chain costs a server something, too."""
_NUMBER_DIGITS = 12
_REPLY_TOKENS = 6
"""Behind what all replies of this door begin with: number, flow, mode, step, kind of step, $FI."""
_FIRST = b"1".rjust(jetstream.CHAIN_DIGITS, b"0")

assert PIECE_MESSAGES < 10**jetstream.CHAIN_DIGITS


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
    """Whether those of a chain that are not left are all that is stored, or all have ids."""
    is_told: bool = False
    """Whether all of a chain was said to be stored: it is not under way any more, though the stream
    has not said so of its last message."""
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
        takes_chains: Callable[[int], bool] = lambda class_id: False,
    ) -> None:
        """`subject` of a class; the `program` that publishes under a name, "" where that is not
        known; `run` is this door's own. Whether the stream of a class `takes_chains`."""
        self._core = core
        self._takes_chains = takes_chains
        self._inbox = f"_INBOX.{run}".encode()
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
        self._asked: dict[int, tuple[Piece, int]] = {}
        """What the stream was asked for, by number: whether this message of a piece is stored."""
        self._proofs: dict[int, Piece] = {}
        """What it was asked for, by number: whether the last one of a chain is, of which all is
        said to be."""
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

    @property
    def inbox(self) -> str:
        """Where answers to chains come: `hear` takes them."""
        return f"{self._inbox.decode()}.>"

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
        return Piece(class_id, batch, prefix.encode(), ids, batch.count, bool(name))

    def go_on(self, now: float) -> set[int]:
        """Publish what may be. Returns the classes that need a stream first."""
        if not self._core.is_ready:
            return set()
        if self._begun:
            self._look_for_late_ones(now)
        ready = self._ready
        while ready and self._under_way < UNDER_WAY_MESSAGES and not self._asked:
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
            self._proofs.clear()
            if any(not piece.is_sure for piece in self._begun.values()):
                self._ask(now)
                return
            pieces, self._begun = list(self._begun.values()), {}
            for piece in pieces:
                if piece.is_told:
                    self._count_under_way(piece, 1)
                    piece.is_told = False
                if piece.is_chain:
                    self._cut(piece)
                self._under_way += piece.batch.count - piece.left
                piece.left = piece.batch.count
                self._write(piece, now)

    def _ask(self, now: float) -> None:
        """Have the stream say how far chains have come. When it has, the rest is written again."""
        self._asked.clear()
        for piece in self._begun.values():
            piece.moved_at = now
            if piece.is_sure:
                continue
            subject, count = self._subject(piece.class_id).encode(), piece.batch.count
            for row in content.milestones(count).tolist():
                if row >= count - piece.left:
                    self._asked[self._ask_for(piece, row, subject)] = piece, row

    def _ask_for(self, piece: Piece, row: int, subject: bytes) -> int:
        """Have the stream say whether it has this message. Returns the number of its answer."""
        number = self._core.take_numbers(1)
        whose = content.message_id(piece.prefix, int(piece.ids[row]))
        self._core.write(jetstream.whether_stored(subject, whose, self._core.reply_to(number)))
        return number

    def _learn(self, replies: Replies, now: float) -> None:
        """What the stream has said."""
        self._heard_at, messages = now, replies.messages
        for row, number in enumerate(replies.numbers.tolist()):
            piece, milestone = self._asked.pop(number)
            try:
                if jetstream.is_stored(messages.headers(row), messages.payload(row)):
                    self._advance(piece, milestone + 1, now)
            except JetStreamError as error:  # It could not say: all is asked again.
                if error.code == jetstream.NO_RESPONDERS:
                    self._lose_stream(piece.class_id)
                self._asked.clear()
                self._again_at = now + PAUSE_SECONDS
                return
        if not self._asked:
            self._again_at = now
            for piece in self._begun.values():
                piece.is_sure = True

    def _cut(self, piece: Piece) -> None:
        """Leave of a chain what is not stored."""
        done = piece.batch.count - piece.left
        rest = piece.batch.slice(done, piece.batch.count)
        self._under_way_bytes += rest.data.size - piece.batch.data.size
        piece.batch, piece.ids = rest, piece.ids[done:]

    def _write(self, piece: Piece, now: float) -> None:
        """Publish all of it."""
        again = piece.number > 0
        piece.moved_at = now
        piece.number = self._core.take_numbers(1)
        self._begun[piece.number] = piece
        subject = self._subject(piece.class_id).encode()
        ids = piece.prefix, piece.ids
        # What went message by message goes on so: all of it has ids.
        was = piece.is_chain and not piece.has_name
        was = was if again else piece.batch.count >= CHAIN_MESSAGES_MIN
        piece.is_chain = piece.is_open = self._takes_chains(piece.class_id) and was
        piece.is_sure = piece.has_name or not piece.is_chain
        if piece.is_chain:
            name = b"%b%0*d" % (self._run.encode(), _NUMBER_DIGITS, piece.number)
            replies = jetstream.chain_reply(self._inbox, name, piece.batch.count)
            write = content.publications if piece.has_name else content.chain
            self._core.write(write(subject, piece.batch, ids=ids, replies=replies))
        else:
            replies = [self._core.reply_to(piece.number)]
            self._core.write(content.publications(subject, piece.batch, ids=ids, replies=replies))

    def begin_anew(self, now: float) -> None:
        """There is another connection: what had no PubAck on the former one is to be published on
        this one."""
        self._again_at = now if self._begun else float("inf")
        self._asked.clear()
        self._proofs.clear()

    def hear(self, answers: Messages, now: float) -> int | None:
        """Answers to chains have come. Returns what `reached` does."""
        begin = len(self._inbox) + 1 + len(self._run)
        for row in range(answers.count):
            said = answers.subject(row)[begin:].split(b".")
            number = int(said[0]) if said[0].isdigit() else 0
            piece = self._begun.get(number)
            if piece is None or not piece.is_open or len(said) != _REPLY_TOKENS:
                continue
            told = jetstream.chain_answer(answers.headers(row), answers.payload(row))
            if told.error is not None:
                self.last_error = told.error
                if told.error.code == jetstream.NO_RESPONDERS:
                    self._lose_stream(piece.class_id)
            if told.is_last:
                piece.is_open = False
                # What is refused of the first message is refused of all; else some may be stored.
                is_refused = told.error is not None and told.error.code > 0
                is_known = told.stored >= 0 or (is_refused and said[3] == _FIRST)
                piece.is_sure = piece.has_name or is_known
            # Of one with ids nothing counts but the whole: see `_write`.
            is_whole = told.is_last and told.stored >= piece.batch.count
            if piece.has_name and (is_whole or (told.stored > 0 and not told.is_last)):
                piece.moved_at = self._heard_at = now  # It goes on.
            elif told.stored >= 0 and not piece.has_name:
                self._advance(piece, told.stored, now)
            if is_whole and piece.has_name:
                subject = self._subject(piece.class_id).encode()
                self._proofs[self._ask_for(piece, piece.batch.count - 1, subject)] = piece
                self._count_under_way(piece, -1)
                piece.is_told = True
            elif told.is_last and piece.left:
                self.refused += piece.left
                self._again_at = min(self._again_at, now + PAUSE_SECONDS)
        if not self._begun:
            self._again_at, self.last_error = float("inf"), None
        return self.reached()

    def _advance(self, piece: Piece, stored: int, now: float) -> None:
        """So many of a piece are stored, from the first on."""
        more = stored - (piece.batch.count - piece.left)
        if more > 0 and piece.number in self._begun:
            self._heard_at = now
            self._count_stored(piece, min(more, piece.left), now)

    def _count_stored(self, piece: Piece, count: int, now: float) -> None:
        piece.moved_at = now
        piece.left -= count
        self.stored += count
        if not piece.is_told:
            self._under_way -= count
        if piece.left <= 0:
            del self._begun[piece.number]
            if not piece.is_told:
                self._under_way_bytes -= piece.batch.data.size

    def _count_under_way(self, piece: Piece, times: int) -> None:
        self._under_way += times * piece.left
        self._under_way_bytes += times * piece.batch.data.size

    def take(self, replies: Replies, now: float) -> int | None:
        """PubAcks have come. Returns what `reached` does."""
        if self._asked:
            asked = np.isin(replies.numbers, list(self._asked))
            if asked.any():
                self._learn(Replies(replies.numbers[asked], replies.messages.pick(asked)), now)
                replies = Replies(replies.numbers[~asked], replies.messages.pick(~asked))
        if self._proofs:
            replies = self._take_proofs(replies, now)
        acks = jetstream.pub_acks(replies.messages)
        if acks.errors:
            for row, error in acks.errors.items():
                piece = self._begun.get(int(replies.numbers[row]))
                if error.code == jetstream.NO_RESPONDERS and piece is not None:
                    self._lose_stream(piece.class_id)
            self.refused += len(acks.errors)
            self.last_error = next(iter(acks.errors.values()))
            self._again_at = min(self._again_at, now + PAUSE_SECONDS)
        self.duplicates += int(np.count_nonzero(acks.duplicates))
        numbers, counts = np.unique(replies.numbers[acks.sequences > 0], return_counts=True)
        for number, count in zip(numbers.tolist(), counts.tolist(), strict=True):
            piece = self._begun.get(number)
            if piece is not None and not piece.is_chain:
                self._heard_at = now
                self._count_stored(piece, count, now)
        if not self._begun:
            self._again_at, self.last_error = float("inf"), None
        return self.reached()

    def _take_proofs(self, replies: Replies, now: float) -> Replies:
        """Take those of these replies that say whether chains are stored. Returns the others."""
        proofs = np.isin(replies.numbers, list(self._proofs))
        for row in np.flatnonzero(proofs).tolist():
            piece, messages = self._proofs.pop(int(replies.numbers[row])), replies.messages
            try:
                if jetstream.is_stored(messages.headers(row), messages.payload(row)):
                    self._advance(piece, piece.batch.count, now)
                    continue
            except JetStreamError as error:  # It is on its way, or not to be had.
                self.last_error = error
                if error.code == jetstream.NO_RESPONDERS:
                    self._lose_stream(piece.class_id)
            self.refused += piece.left
            self._again_at = min(self._again_at, now + PAUSE_SECONDS)
        return Replies(replies.numbers[~proofs], replies.messages.pick(~proofs))

    def _lose_stream(self, class_id: int) -> None:
        self._homeless.add(class_id)
        self.open_classes.discard(class_id)

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
