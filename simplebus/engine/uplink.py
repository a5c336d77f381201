"""What publishers have said, on its way into streams.

Rule 1: a lot has reached the cluster when each of its messages has its PubAck; lots are said to be
there in their order, and of each class what lots have of it: a class waits for no other.
Rule 2: what has no PubAck in time, or was refused, is published again, in order, until it has one:
publishers wait meanwhile, and nothing else is begun. Where the stream has no room it is asked what
it has and goes on by a few messages at a time, so that few overtake, and nothing is written again
that is stored. A stream knows a message that comes twice by its id, which is made of its
publisher's name, program and number; of a publisher without a name, of this door's.
Rule 3: messages that are written together have one subject for their PubAcks, which are counted, by
the sequences that they tell: servers look a subject up that they know sooner than one for each
message, and two of them may answer while each takes itself for the leader. What is written again
has one for each message: what has its PubAck is not written a third time, for a stream that is full
for long forgets its id.
Rule 4: many messages at once go as chains, which have few PubAcks: of each, all is stored up to
some message and nothing behind it. Of publishers without a name few messages in one have ids. Where
it is not said how far such a chain has come, the stream is asked for its milestones before the rest
is published again: some behind the last one that it knows may be stored twice. With a name, each
message has its id, and what is published again is stored once. It goes message by message: of a
chain a server says that it has what it knows from another one that is on its way still. So, of a
chain that is said to be whole, the stream is asked for the last message, which it has not while
that is on its way; what came before it is in its log before it.
Rule 5: so much of a class is under way and no more; the rest waits, and of a class of which too
much waits nothing more is to be accepted.

    lots     put ─► waiting ─► written ─► acknowledged ─► reached
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from simplebus.core.frames import FrameBatch
from simplebus.core.ledger import Lot
from simplebus.core.version2 import numbers_of
from simplebus.engine import consumers, content
from simplebus.engine.lanes import SHARE_BYTES_MIN, SHARED_BYTES, Lane, Piece
from simplebus.nats.client import jetstream
from simplebus.nats.client.core import ClientCore, Replies
from simplebus.nats.client.events import Messages
from simplebus.nats.client.jetstream import JetStreamError

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
        self._lots: dict[int, int] = {}
        """Those that have not reached the cluster, in their order, and how many pieces of each."""
        self._last_lot = self._told = 0
        """The last one that was put, and the last one that was said to have reached it."""
        self._reached_in: dict[int, int] = {}
        """By class, up to which lot all of it has; what was not told yet."""
        self._lanes: dict[int, Lane] = {}
        """The classes of which something has not."""
        self._whose: dict[int, Lane] = {}
        """Whose the answers with these numbers are."""
        self.full: set[int] = set()
        """The classes of which too much waits for more to be accepted."""
        self.open_classes: set[int] = set()
        """Those that have a stream."""
        self._homeless: set[int] = set()
        self._refusing: set[int] = set()
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
        under_way = sum(lane.under_way for lane in self._lanes.values())
        return UplinkStatistics(
            len(self._lots), under_way, self.stored, self.duplicates, self.refused
        )

    def is_crowded(self, now: float) -> bool:
        """Whether what comes had better be gathered to a larger lot."""
        return any(lane.is_crowded(now) for lane in self._lanes.values())

    def put(self, lot: Lot) -> None:
        """Have a lot published. `go_on` does it."""
        pieces = 0
        for entry in lot.entries:
            lane = self._lanes.get(entry.class_id)
            if lane is None:
                lane = self._lanes[entry.class_id] = Lane(entry.class_id)
            runs = deque(entry.publishers)
            for batch in content.batches(entry.frames):
                at = 0
                while at < batch.count:
                    count, name = runs[0]
                    some = min(count, batch.count - at, PIECE_MESSAGES)
                    lane.put(
                        lot.number, self._piece(lane.class_id, batch.slice(at, at + some), name)
                    )
                    pieces += 1
                    at += some
                    runs[0] = (count - some, name)
                    if count == some:
                        runs.popleft()
            self._look_if_full(lane)
        self._last_lot = lot.number
        if pieces:
            self._lots[lot.number] = pieces

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
        missing: set[int] = set()
        if not self._core.is_ready:
            return missing
        for lane in self._lanes.values():
            if lane.begun:
                self._look_for_late_ones(lane, now)
            if not lane.ready:
                continue
            if lane.class_id not in self.open_classes:
                missing.add(lane.class_id)
            elif lane.class_id not in self._held:
                self._begin_some(lane, now)
        return missing

    def _begin_some(self, lane: Lane, now: float) -> None:
        while lane.ready and lane.has_room:
            if (lot := lane.split_first()) is not None:
                self._lots[lot] += 1
            piece = lane.ready.popleft()
            if not lane.begun:
                lane.heard_at = now
            lane.count_under_way(piece, 1)
            self._write(lane, piece, now)

    def _look_for_late_ones(self, lane: Lane, now: float) -> None:
        """Publish again what has waited for its PubAck for too long: all of it, as it was in
        order."""
        first = next(iter(lane.begun.values()))
        is_late = now >= min(lane.again_at, lane.heard_at + PATIENCE_SECONDS)
        if is_late or now >= first.moved_at + 2 * PATIENCE_SECONDS:
            lane.again_at, lane.heard_at, self.last_error = float("inf"), now, None
            self._forget(lane.proofs)
            if lane.refusal is not None and lane.refusal.code in consumers.NO_ROOM:
                lane.window, lane.calm = 1, 0
            pieces = list(lane.begun.values())
            if any(lane.is_doubted(piece) for piece in pieces):
                self._ask(lane, now)
                return
            self._forget(lane.begun)
            self._forget(lane.rows)
            self._forget(lane.asked)  # What was asked is not of what is written now.
            for piece in pieces:
                if piece.is_told:
                    lane.count_under_way(piece, 1)
                    piece.is_told = False
                if piece.is_chain:
                    lane.cut(piece)
            if lane.window:
                lane.put_back(pieces)
                return
            for piece in pieces:
                if piece.missing is None:  # Which ones are stored is not known.
                    lane.under_way += piece.batch.count - piece.left
                    piece.left = piece.batch.count
                self._write(lane, piece, now)

    def _number(self, lane: Lane) -> int:
        """Of something to which an answer comes."""
        number = self._core.take_numbers(1)
        self._whose[number] = lane
        return number

    def _forget(self, numbers: dict[int, Any]) -> None:
        """Take no answers with these numbers any more."""
        for number in numbers:
            del self._whose[number]
        numbers.clear()

    def _ask(self, lane: Lane, now: float) -> None:
        """Have the stream say how far chains have come and, where it has no room, which single
        messages it has. When it has, the rest is written again."""
        self._forget(lane.asked)
        for piece in lane.begun.values():
            piece.moved_at = now
            if not lane.is_doubted(piece):
                continue
            piece.is_sure = False  # Until it has said all: else all is asked again.
            count, rows = piece.batch.count, np.arange(piece.batch.count)
            if piece.is_chain:
                rows = content.milestones(count)
                rows = rows[rows >= count - piece.left]
            else:
                piece.missing = np.ones(count, np.bool_)
            for row in rows.tolist():
                lane.asked[self._ask_for(lane, piece, row)] = piece, row

    def _ask_for(self, lane: Lane, piece: Piece, row: int) -> int:
        """Have the stream say whether it has this message. Returns the number of its answer."""
        number = self._number(lane)
        subject = self._subject(piece.class_id).encode()
        whose = content.message_id(piece.prefix, int(piece.ids[row]))
        self._core.write(jetstream.whether_stored(subject, whose, self._core.reply_to(number)))
        return number

    def _learn(self, lane: Lane, number: int, messages: Messages, row: int, now: float) -> None:
        """The stream has said whether it has a message."""
        del self._whose[number]
        lane.heard_at = now
        piece, at = lane.asked.pop(number)
        try:
            if jetstream.is_stored(messages.headers(row), messages.payload(row)):
                if piece.missing is None:
                    self._advance(lane, piece, at + 1, now)
                else:
                    piece.missing[at] = False
        except JetStreamError as error:  # It could not say: all is asked again.
            if error.code == jetstream.NO_RESPONDERS:
                self._lose_stream(piece.class_id)
            self._forget(lane.asked)
            lane.again_at = now + PAUSE_SECONDS
            return
        if not lane.asked:
            for each in list(lane.begun.values()):
                each.is_sure = True
                left = each.left if each.missing is None else int(np.count_nonzero(each.missing))
                if left != each.left:
                    self._count_stored(lane, each, each.left - left, now)
            lane.again_at = now if lane.begun else float("inf")

    def _write(self, lane: Lane, piece: Piece, now: float) -> None:
        """Publish all of it."""
        again = piece.number > 0
        piece.moved_at = now
        piece.number = self._number(lane)
        piece.stored.clear()
        lane.begun[piece.number] = piece
        subject = self._subject(piece.class_id).encode()
        ids = piece.prefix, piece.ids
        # What went message by message goes on so: all of it has ids.
        was = piece.is_chain and not piece.has_name
        few = 1 if lane.window else CHAIN_MESSAGES_MIN  # So that none overtakes.
        was = was if again else piece.batch.count >= few
        piece.is_chain = piece.is_open = self._takes_chains(piece.class_id) and was
        piece.is_sure = piece.has_name or not piece.is_chain
        if piece.is_chain:
            name = b"%b%0*d" % (self._run.encode(), _NUMBER_DIGITS, piece.number)
            replies = jetstream.chain_reply(self._inbox, name, piece.batch.count)
            write = content.publications if piece.has_name else content.chain
            self._core.write(write(subject, piece.batch, ids=ids, replies=replies))
        elif again:
            self._write_each(lane, piece, subject)
        else:
            replies = [self._core.reply_to(piece.number)]
            self._core.write(content.publications(subject, piece.batch, ids=ids, replies=replies))

    def _write_each(self, lane: Lane, piece: Piece, subject: bytes) -> None:
        """Publish again what has no PubAck since this was done first, each message with its own."""
        if piece.missing is None:
            piece.missing = np.ones(piece.batch.count, np.bool_)
        rows = np.flatnonzero(piece.missing)
        first = self._core.take_numbers(rows.size)
        for number, row in enumerate(rows.tolist(), first):
            self._whose[number] = lane
            lane.rows[number] = piece, row
        ids = piece.prefix, piece.ids[rows]
        replies = self._core.replies_to(first, rows.size)
        some = piece.batch.take(rows)
        self._core.write(content.publications(subject, some, ids=ids, replies=replies))

    def begin_anew(self, now: float) -> None:
        """There is another connection: what had no PubAck on the former one is to be published on
        this one."""
        for lane in self._lanes.values():
            lane.again_at = now if lane.begun else float("inf")
            self._forget(lane.asked)
            self._forget(lane.proofs)
            self._forget(lane.rows)

    def hear(self, answers: Messages, now: float) -> int | None:
        """Answers to chains have come. Returns what `reached` does."""
        begin = len(self._inbox) + 1 + len(self._run)
        for row in range(answers.count):
            said = answers.subject(row)[begin:].split(b".")
            number = int(said[0]) if said[0].isdigit() else 0
            lane = self._whose.get(number)
            piece = lane.begun.get(number) if lane is not None else None
            if lane is None or piece is None or not piece.is_open or len(said) != _REPLY_TOKENS:
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
                piece.moved_at = lane.heard_at = now  # It goes on.
            elif told.stored >= 0 and not piece.has_name:
                self._advance(lane, piece, told.stored, now)
            if is_whole and piece.has_name:
                lane.proofs[self._ask_for(lane, piece, piece.batch.count - 1)] = piece
                lane.count_under_way(piece, -1)
                piece.is_told = True
            elif told.is_last and piece.left:
                self.refused += piece.left
                self._refuse(lane, told.error, now)
                has_said = told.error is None or told.error.code != 0
                if lane.window and piece.has_name and not has_said:
                    lane.again_at = now  # It is there, perhaps: one by one that is said at once.
        return self.reached()

    def _advance(self, lane: Lane, piece: Piece, stored: int, now: float) -> None:
        """So many of a piece are stored, from the first on."""
        more = stored - (piece.batch.count - piece.left)
        if more > 0 and piece.number in lane.begun:
            self._count_stored(lane, piece, min(more, piece.left), now)

    def _count_stored(self, lane: Lane, piece: Piece, count: int, now: float) -> None:
        lane.heard_at = now
        self.stored += count
        lane.count_stored(piece, count, now)
        if not piece.left:
            del self._whose[piece.number]
            if not lane.begun:
                self._forget(lane.asked)  # Nobody waits for these: others may begin.
            self._look_how_far(lane)

    def _look_how_far(self, lane: Lane) -> None:
        """A piece is stored: perhaps all of some lots is."""
        for lot in lane.take_stored():
            self._lots[lot] -= 1
            if not self._lots[lot]:
                del self._lots[lot]
        self._reached_in[lane.class_id] = lane.pieces[0][0] - 1 if lane.pieces else self._last_lot
        self._look_if_full(lane)
        if not lane.pieces:
            self._forget(lane.asked)
            self._forget(lane.proofs)
            self._forget(lane.rows)
            del self._lanes[lane.class_id]
        if self.last_error is not None and not any(each.begun for each in self._lanes.values()):
            self.last_error = None

    def take(self, replies: Replies, now: float) -> int | None:
        """PubAcks have come. Returns what `reached` does."""
        replies = self._take_told(replies, now)
        acks = jetstream.pub_acks(replies.messages)
        refused: list[tuple[Lane, JetStreamError]] = []
        for row, error in acks.errors.items():
            lane = self._whose.get(int(replies.numbers[row]))
            if lane is None:
                continue  # It was published again since.
            if error.code == jetstream.NO_RESPONDERS:
                self._lose_stream(lane.class_id)
            self.refused += 1
            self.last_error = error
            refused.append((lane, error))
        self.duplicates += int(np.count_nonzero(acks.duplicates))
        stored: dict[int, set[int]] = {}
        for number, sequence in zip(replies.numbers.tolist(), acks.sequences.tolist(), strict=True):
            if sequence > 0:
                stored.setdefault(number, set()).add(sequence)
        for number, sequences in stored.items():
            lane = self._whose.get(number)
            if lane is not None and number in lane.rows:
                self._count_row(lane, number, now)
            elif lane is not None and (piece := lane.begun[number]).is_counted:
                more = sequences - piece.stored
                piece.stored |= more
                if more:
                    self._count_stored(lane, piece, min(len(more), piece.left), now)
        for lane, error in refused:
            self._refuse(lane, error, now)
        return self.reached()

    def _count_row(self, lane: Lane, number: int, now: float) -> None:
        """A single message that was written again is stored."""
        del self._whose[number]
        piece, row = lane.rows.pop(number)
        assert piece.missing is not None
        piece.missing[row] = False
        self._count_stored(lane, piece, 1, now)

    def _refuse(self, lane: Lane, error: JetStreamError | None, now: float) -> None:
        """The stream of a class has not taken something that is begun."""
        if lane.begun:
            lane.refusal = error
            lane.again_at = now + PAUSE_SECONDS  # What was written behind it is answered first.
            self._refusing.add(lane.class_id)
            self._look_if_full(lane)

    def _look_if_full(self, lane: Lane) -> None:
        is_full = lane.is_full
        if not is_full and lane.waiting_bytes >= SHARE_BYTES_MIN:
            total = sum(each.waiting_bytes for each in self._lanes.values())
            is_full = lane.waiting_bytes >= SHARED_BYTES - total
        if is_full:
            self.full.add(lane.class_id)
        else:
            self.full.discard(lane.class_id)

    def refusal(self, class_id: int) -> JetStreamError | None:
        """Why the stream of a class took nothing of what was published last; None where it did."""
        lane = self._lanes.get(class_id)
        return None if lane is None else lane.refusal

    def take_refusing(self) -> set[int]:
        """Classes of which something was refused since this was asked last."""
        refusing, self._refusing = self._refusing, set()
        return refusing

    def _take_told(self, replies: Replies, now: float) -> Replies:
        """Take those of these replies that say whether messages are stored. Returns the others."""
        numbers = replies.numbers.tolist()
        told = [
            number
            for number in dict.fromkeys(numbers)
            if (lane := self._whose.get(number)) is not None
            and (number in lane.asked or number in lane.proofs)
        ]
        if not told:
            return replies
        rows = np.isin(replies.numbers, told)
        for row in np.flatnonzero(rows).tolist():
            lane = self._whose.get(numbers[row])
            if lane is None:
                continue  # What was said before it was enough.
            learn = self._learn if numbers[row] in lane.asked else self._take_proof
            learn(lane, numbers[row], replies.messages, row, now)
        return Replies(replies.numbers[~rows], replies.messages.pick(~rows))

    def _take_proof(
        self, lane: Lane, number: int, messages: Messages, row: int, now: float
    ) -> None:
        """The stream has said whether it has the last message of a chain."""
        del self._whose[number]
        piece = lane.proofs.pop(number)
        try:
            if jetstream.is_stored(messages.headers(row), messages.payload(row)):
                self._advance(lane, piece, piece.batch.count, now)
                return
        except JetStreamError as error:  # It is on its way, or not to be had.
            self.last_error = error
            if error.code == jetstream.NO_RESPONDERS:
                self._lose_stream(piece.class_id)
        self.refused += piece.left
        lane.again_at = min(lane.again_at, now + PAUSE_SECONDS)

    def _lose_stream(self, class_id: int) -> None:
        self._homeless.add(class_id)
        self.open_classes.discard(class_id)

    def take_homeless(self) -> set[int]:
        """Classes whose stream did not answer since this was asked last: it may be gone."""
        homeless, self._homeless = self._homeless, set()
        return homeless

    def reached(self) -> int | None:
        """The last lot that has reached the cluster, if that was not told before."""
        last = next(iter(self._lots)) - 1 if self._lots else self._last_lot
        if last <= self._told:
            return None
        self._told = last
        return last

    def take_reached_in(self) -> dict[int, int]:
        """By class, up to which lot all of it has reached the cluster; where that is news."""
        reached_in, self._reached_in = self._reached_in, {}
        return reached_in
