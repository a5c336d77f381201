"""What publishers have said, on its way into streams.

Rule 1: a lot has reached the cluster when each of its messages has its PubAck; lots are said to be
there in their order, and of each class what lots have of it: a class waits for no other.
Rule 2: where something has no PubAck in time, or was refused, or its connection was lost, the
stream is asked what it has of all that was begun; what it has not is published again, in order,
until it has it: publishers wait meanwhile, and nothing else is begun. It is asked at once, for it
forgets ids after a while; and again when the server has taken what it was asked, which may be on
its way for long. A stream knows a message by its id, which is made of its publisher's
name, program and number; of a publisher without a name, of this door's. What was on its way still
when the stream said that it has not got it, it knows when that comes again.
Rule 3: messages that are written together have one subject for their PubAcks, which are counted, by
the sequences that they tell: servers look a subject up that they know sooner than one for each
message, and two of them may answer while each takes itself for the leader. Where a stream has no
room it goes on by a few messages at a time, so that few overtake, and each has its own PubAck.
Rule 4: many messages at once go as chains, which have few PubAcks: of each, all is stored up to
some message and nothing behind it. Of publishers without a name few messages in one have ids, the
milestones: the stream is asked for these, and some behind the last one that it knows may be stored
twice. With a name, each message has its id. What is published again of that goes message by
message: of a chain a server says that it has what it knows from another one that is on its way
still. So, of a chain that is said to be whole, the stream is asked for the last message, which it
has not while that is on its way; what came before it is in its log before it.
Rule 5: so much of a class is under way and no more; the rest waits, and of a class of which too
much waits nothing more is to be accepted.

    lots     put ─► waiting ─► written ─► stored ─► reached
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from simplebus.core.commit_log import WriteBatch
from simplebus.core.protocol.frames import FrameBatch, Integers
from simplebus.core.session.version2 import message_numbers
from simplebus.jetstream import api
from simplebus.jetstream.publish import codec
from simplebus.jetstream.publish.class_queue import SHARE_BYTES_MIN, SHARED_BYTES, Lane, Piece
from simplebus.nats.client import jetstream_codec
from simplebus.nats.client.client import NatsClientCore, RequestReplies
from simplebus.nats.client.encode import Column
from simplebus.nats.client.events import ReceivedMessages
from simplebus.nats.client.jetstream_codec import JetStreamError

PATIENCE_SECONDS = 4.0
"""When no PubAck has come for so long, though some are awaited, or none of the oldest messages for
twice as long, the stream is asked what it has; so it is asked again when it has not answered."""
UNANSWERED_MAX = 2
"""A stream that has not answered so often takes nothing: with less, it may be about to get another
leader."""
PAUSE_SECONDS = 0.25
"""Before it is asked, when something was refused."""
PIECE_MESSAGES = 4096
CHAIN_MESSAGES_MIN = 2 * codec.MILESTONE_MESSAGES
"""Fewer go one by one: a chain costs a server something, too."""
_REPLY_TOKENS = 6
"""Behind what all replies of this door begin with: number, flow, mode, step, kind of step, $FI."""
_NOT_SAID = JetStreamError(0, "it is not said whether a message is stored")

assert PIECE_MESSAGES < 10**jetstream_codec.FAST_BATCH_DIGITS


@dataclass(frozen=True, slots=True)
class UplinkStatistics:
    """A snapshot."""

    lots: int
    """Lots that have not reached the cluster."""
    under_way: int
    """Messages that were published and have no PubAck."""
    stored: int
    """Messages that were said to be stored."""
    duplicates: int
    """How often the stream said that it had a message already."""
    refused: int
    """How often a message was not stored, and published again."""


class Uplink:
    """Of one door."""

    def __init__(
        self,
        core: NatsClientCore,
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
        self._holds = 0
        self._held: dict[int, dict[int, int]] = {}
        """By class: the last lots before what is held, the first ones first."""
        self.stored = self.duplicates = self.refused = 0
        self.last_error: JetStreamError | None = None
        """Why something was not stored; None once all that was begun is."""

    @property
    def inbox(self) -> str:
        """Where answers to chains come: `hear` takes them."""
        return f"{self._inbox.decode()}.>"

    def hold(self, class_id: int) -> int:
        """What is put of this class from now on is not begun to be published until `let_go` is
        called with what this returns. What was put before goes on."""
        self._holds += 1
        self._held.setdefault(class_id, {})[self._holds] = self._last_lot
        return self._holds

    def let_go(self, class_id: int, hold: int) -> None:
        """That is over."""
        held = self._held[class_id]
        del held[hold]
        if not held:
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

    def put(self, lot: WriteBatch) -> None:
        """Have a lot published. `go_on` does it."""
        pieces = 0
        for entry in lot.entries:
            lane = self._lanes.get(entry.class_id)
            if lane is None:
                lane = self._lanes[entry.class_id] = Lane(entry.class_id)
            runs = deque(entry.producer_runs)
            for batch in codec.batches(entry.frames):
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
            program = jetstream_codec.percent_encode(self._program(name) or self._run)
            prefix = f"{jetstream_codec.percent_encode(name)}:{program}:"
            ids = message_numbers(batch)
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
            if lane.begun or lane.doubted:
                self._look_for_late_ones(lane, now)
            if not (lane.ready or lane.doubted):
                continue
            if lane.class_id not in self.open_classes:
                missing.add(lane.class_id)
            else:
                self._begin_some(lane, now)
        return missing

    def _begin_some(self, lane: Lane, now: float) -> None:
        held = self._held.get(lane.class_id)
        last = self._last_lot if held is None else next(iter(held.values()))
        while lane.ready and lane.has_room and lane.ready[0].lot <= last:
            if (lot := lane.split_first()) is not None:
                self._lots[lot] += 1
            piece = lane.ready.popleft()
            if not lane.begun:
                lane.heard_at = now
            lane.count_under_way(piece, 1)
            self._write(lane, piece, now)

    def _look_for_late_ones(self, lane: Lane, now: float) -> None:
        """Ask what the stream has when answers have been awaited for too long, and what it has not
        said of that."""
        if lane.doubted and not self._core.is_ping_answered(lane.mark):
            return  # It is on its way, slowly: to ask again would only make that longer.
        is_late = now >= min(lane.again_at, lane.heard_at + PATIENCE_SECONDS)
        if lane.begun:
            first = next(iter(lane.begun.values()))
            is_late = is_late or now >= first.moved_at + 2 * PATIENCE_SECONDS
        if not is_late:
            return
        if lane.asked:
            self._note_silence(lane)
        if lane.begun:
            self.last_error = None
            if lane.refusal is not None and lane.refusal.code in api.STORAGE_FULL:
                lane.window, lane.calm = 1, 0
            lane.doubt()
        self._ask(lane, now)

    def _note_silence(self, lane: Lane) -> None:
        """Its stream has not answered, though the server does: where somebody else hears what is
        for a stream, that does not say that nobody is there."""
        lane.unanswered += 1
        if lane.unanswered >= UNANSWERED_MAX:
            if lane.refusal is None:
                subject = self._subject(lane.class_id)
                lane.refusal = JetStreamError(
                    0,
                    f"nothing is said of what comes to {subject!r}: its stream has no leader now, "
                    "or takes other subjects, or is told to say nothing (no_ack)",
                )
            self._refusing.add(lane.class_id)

    def _take_numbers(self, lane: Lane, count: int) -> int:
        """For so many things to which answers come. Returns the first."""
        first = self._core.reserve_numbers(count)
        self._whose.update(dict.fromkeys(range(first, first + count), lane))
        return first

    def _forget(self, numbers: dict[int, Any]) -> None:
        """Take no answers with these numbers any more."""
        for number in numbers:
            del self._whose[number]
        numbers.clear()

    def _ask(self, lane: Lane, now: float) -> None:
        """Have the stream say what it has of what is doubted. When it has, the rest is written
        again."""
        self._forget(lane.asked)
        lane.again_at, lane.heard_at = float("inf"), now
        for piece in lane.doubted.values():
            rows = piece.questions()
            first = self._take_numbers(lane, rows.size)
            lane.asked.update((first + at, (piece, row)) for at, row in enumerate(rows.tolist()))
            if rows.size:
                self._write_questions(piece, rows, first)
        lane.mark = self._core.send_ping()

    def _write_questions(self, piece: Piece, rows: Integers, first: int) -> None:
        """Have the stream say whether it has these messages, in answers with numbers from `first`
        on."""
        subject = self._subject(piece.class_id).encode()
        ids = codec.message_ids(piece.prefix, piece.ids[rows])
        replies = self._core.reply_subjects(first, rows.size)
        self._core.write(jetstream_codec.encode_stored_check(subject, rows.size, ids, replies))

    def _learn(self, lane: Lane, number: int, error: JetStreamError | None, now: float) -> None:
        """The stream has said whether it has a message: no error if it has."""
        del self._whose[number]
        is_said = error is None or error.code == jetstream_codec.NO_ROLLUP
        lane.heard_at, lane.unanswered = now, 0
        if (chain := lane.proofs.pop(number, None)) is not None:
            if error is None:
                self._advance(lane, chain, chain.batch.count, now)
                return
            if not is_said:  # It is on its way, or not to be had.
                self.last_error = error
            if lane.begun:
                self.refused += chain.left
                lane.again_at = min(lane.again_at, now + PAUSE_SECONDS)
            return
        piece, row = lane.asked.pop(number)
        if not is_said:  # It could not say: what is not known yet is asked again.
            self._forget(lane.asked)
            lane.again_at = now + PAUSE_SECONDS
            return
        if error is None:
            lane.note_stored(piece, slice(row + 1) if piece.tells_how_far else row)
        # Of what is known by another answer this one may be lost, and it is not asked again.
        if not (lane.asked and lane.unknown):
            self._settle(lane)

    def _note_stored(self, lane: Lane, piece: Piece, rows: int | slice) -> None:
        """It was said of these, which are doubted, that they are stored, though not when the stream
        was asked for them."""
        lane.note_stored(piece, rows)
        if not lane.unknown:
            self._settle(lane)

    def _settle(self, lane: Lane) -> None:
        """It is known of all that was doubted whether it is stored."""
        self.stored += lane.settle()
        for numbers in (lane.asked, lane.doubted, lane.rows, lane.proofs):
            self._forget(numbers)
        self._look_how_far(lane)

    def _write(self, lane: Lane, piece: Piece, now: float) -> None:
        """Publish all of it."""
        subject = self._subject(piece.class_id).encode()
        piece.moved_at = now
        piece.number = self._take_numbers(lane, 1)
        lane.begun[piece.number] = piece
        few = 1 if lane.window else CHAIN_MESSAGES_MIN  # So that none overtakes.
        may_be = self._takes_chains(piece.class_id) and not piece.has_ids
        piece.is_chain = piece.is_open = may_be and (piece.is_chain or piece.batch.count >= few)
        piece.has_ids = piece.has_name or not piece.is_chain
        ids = piece.prefix, piece.ids
        replies: Sequence[Column] = [self._core.reply_subject(piece.number)]
        write = codec.publications
        if piece.is_chain:
            # It stands in each message and costs a server what it is long.
            name = b"%b%d" % (self._run.encode(), piece.number)
            replies = jetstream_codec.fast_batch_reply_subjects(
                self._inbox, name, piece.batch.count
            )
            write = codec.publications if piece.has_name else codec.chain
        elif lane.window:
            replies = self._replies_to_each(lane, piece)
        self._core.write(write(subject, piece.batch, ids=ids, replies=replies))

    def _replies_to_each(self, lane: Lane, piece: Piece) -> Sequence[Column]:
        """Where PubAcks are to go that tell of one message alone."""
        count = piece.batch.count
        piece.missing = np.ones(count, np.bool_)
        first = self._take_numbers(lane, count)
        lane.rows.update((first + row, (piece, row)) for row in range(count))
        return self._core.reply_subjects(first, count)

    def begin_anew(self, now: float) -> None:
        """There is another connection: what had no answer on the former one is asked for on this
        one."""
        for lane in self._lanes.values():
            lane.again_at, lane.mark = now if lane.begun or lane.doubted else float("inf"), 0
            for numbers in (lane.asked, lane.proofs, lane.rows):
                self._forget(numbers)

    def hear(self, answers: ReceivedMessages, now: float) -> int | None:
        """Answers to chains have come. Returns what `reached` does."""
        begin = len(self._inbox) + 1 + len(self._run)
        for row in range(answers.count):
            said = answers.subject(row)[begin:].split(b".")
            number = jetstream_codec.parse_number(said[0], 0)
            lane = self._whose.get(number)
            piece = lane.piece(number) if lane is not None else None
            if lane is None or piece is None or not piece.is_open or len(said) != _REPLY_TOKENS:
                continue
            told = jetstream_codec.parse_fast_batch_reply(
                answers.headers(row), answers.payload(row)
            )
            if told.error is not None:
                self.last_error = told.error
                if told.error.code == jetstream_codec.NO_RESPONDERS:
                    self._lose_stream(piece.class_id)
            piece.is_open = not told.is_last
            # Of one with ids nothing counts but the whole: see `_write`.
            is_whole = told.is_last and told.stored >= piece.batch.count
            if piece.tells_how_far and told.stored > 0:
                self._advance(lane, piece, told.stored, now)
            elif is_whole or (told.stored > 0 and not told.is_last):
                piece.moved_at = lane.heard_at = now  # It goes on.
            if lane.doubted:
                continue
            if is_whole and piece.has_name:
                proof = self._take_numbers(lane, 1)
                lane.proofs[proof] = piece
                self._write_questions(piece, np.array([piece.batch.count - 1]), proof)
                lane.count_under_way(piece, -1)
                piece.is_told = True
            elif told.is_last and piece.left:
                self.refused += piece.left
                self._refuse(lane, told.error, now)
                if piece.has_name and told.error is not None and not told.error.code:
                    lane.again_at = now  # It is there, perhaps: that is said at once.
        return self.reached()

    def _advance(self, lane: Lane, piece: Piece, stored: int, now: float) -> None:
        """So many of a piece are stored, from the first on."""
        more = stored - (piece.batch.count - piece.left)
        if lane.doubted:
            self._note_stored(lane, piece, slice(stored))
        elif more > 0:
            self._count_stored(lane, piece, min(more, piece.left), now)

    def _count_stored(self, lane: Lane, piece: Piece, count: int, now: float) -> None:
        lane.heard_at = now
        self.stored += count
        lane.count_stored(piece, count, now)
        if not piece.left:
            del self._whose[piece.number]
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
            del self._lanes[lane.class_id]
        if self.last_error is not None and not any(each.begun for each in self._lanes.values()):
            self.last_error = None

    def take(self, replies: RequestReplies, now: float) -> int | None:
        """PubAcks have come. Returns what `reached` does."""
        acks = jetstream_codec.parse_pub_acks(replies.messages)
        again = set(replies.numbers[acks.duplicates].tolist())
        for number in replies.numbers[acks.duplicates].tolist():
            lane = self._whose.get(number)
            if lane is not None and number not in lane.asked and number not in lane.proofs:
                self.duplicates += 1  # It was sent again, and not only asked for.
        refused: list[tuple[Lane, JetStreamError]] = []
        for row, error in acks.errors.items():
            number = int(replies.numbers[row])
            lane = self._whose.get(number)
            if lane is None:
                continue  # Nobody waits for that any more.
            if error.code == jetstream_codec.NO_RESPONDERS:
                self._lose_stream(lane.class_id)
            if number in lane.asked or number in lane.proofs:
                self._learn(lane, number, error, now)
                continue
            self.refused += 1
            self.last_error = error
            refused.append((lane, error))
        stored: dict[int, set[int]] = {}
        for number, sequence in zip(replies.numbers.tolist(), acks.sequences.tolist(), strict=True):
            if sequence > 0:
                stored.setdefault(number, set()).add(sequence)
        for number, sequences in stored.items():
            lane = self._whose.get(number)
            if lane is None:
                continue
            if number in lane.asked or number in lane.proofs:
                self._learn(lane, number, None if number in again else _NOT_SAID, now)
            elif number in lane.rows:
                self._count_row(lane, number, now)
            elif (piece := lane.begun.get(number)) is not None and not piece.is_chain:
                more = sequences - piece.stored
                piece.stored |= more
                if more:
                    self._count_stored(lane, piece, min(len(more), piece.left), now)
        for lane, error in refused:
            self._refuse(lane, error, now)
        return self.reached()

    def _count_row(self, lane: Lane, number: int, now: float) -> None:
        """A message with a PubAck of its own is stored."""
        del self._whose[number]
        piece, row = lane.rows.pop(number)
        if lane.doubted:
            self._note_stored(lane, piece, row)
        else:
            piece.note_stored(row)
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
