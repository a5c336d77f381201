"""A stream that takes chains as the far end of a lane: its order holds whoever leads the stream.

Rule 1: of a chain a message is stored only behind all before it, and one chain is under way at a
time: a leader that dies, and a new one, may lose the end of it, and never what is in front of that.
Rule 2: nothing is sent in two chains: of the second one a server says that it has what the first
one has brought, though no other server knows of that yet. What may have been sent before is asked
for, and the stream asked for the last message of a chain that it says it has: by its id, or, where
the stream knows that no more, by its sequence. And its sequences are to have grown by as many: of a
chain that is on its way while its stream is given fewer replicas, nats-server 2.15 may store a part
and say that it has all of it; and for a while it may take the rest for known.
Rule 3: what a chain ends at is sent by itself, alone: then the stream says what is wrong with it.

    doubtful ──asked──► begun ──answered, asked──► stored
                 ▲        └──ended──► its first message alone, then the rest
                 └──────────────────────────────────────────┘
"""

from __future__ import annotations

from base64 import b64decode
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import trio

from simplebus.bridge.interfaces import STREAM_FULL, SourceBatch, TargetBatch, Refusal
from simplebus.bridge.nats_connection import NatsWire
from simplebus.bridge.reserved_headers import denied
from simplebus.bridge.target.nats import TOO_MANY, Body, FarNats, body_of, joined
from simplebus.bridge.transform import Left
from simplebus.core.errors import BusConnectionError
from simplebus.core.protocol.frames import Flags, Integers
from simplebus.nats.client import encode, jetstream_codec
from simplebus.nats.client.events import Messages
from simplebus.nats.client.jetstream_codec import JetStreamError
from simplebus.net.nats_connection import new_inbox

_CHAIN_MESSAGES_MAX = 8192
_INDEX_DIGITS = 4
_REPLY_TOKENS = 6
"""Behind the inbox: number, flow, mode, index, step, $FI."""
_FIRST, _NEXT, _LAST = b"0", b"1", b"2"
"""Steps."""
_OF_NO_MESSAGE = frozenset({0, 10208})
"""What is said of all that comes behind the end; and of what cannot be told."""
_NO_CHAINS = 10205
"""What is said where the stream takes none."""
_NOT_STORED = frozenset({jetstream_codec.NO_ROLLUP, jetstream_codec.NO_RESPONDERS})
"""What is answered where a message is not there; or nobody is, who says so of the chain, too."""

assert _CHAIN_MESSAGES_MAX < 10**_INDEX_DIGITS


class _DeniedError(Exception):
    """The server complains of something that was said."""


class _UnheardError(Exception):
    """Some of what was said is not for the stream."""


@dataclass(slots=True)
class _Chain:
    """The one that is under way."""

    number: int
    sequences: Integers
    moved_at: float
    """When it was begun, or it was said that more of it is stored."""
    far: int = 0
    """So many were said to be, so far."""
    stored: int = -1
    """So many of its messages are, from the first one on; -1 while the stream has not said so."""
    last: int = 0
    """The sequence in the stream of the last of these, where it says so."""
    is_over: bool = False
    """Whether nothing more is said of it."""
    why: str = ""
    """What was said of one of its messages."""
    is_unfit: bool = False
    """Whether that is about the message itself."""
    is_too_long: bool = False
    """Whether there is no room for so much of it at once."""
    is_none: bool = False
    """Whether a stream takes no chains: perhaps another one, that has a subject of it."""
    unheard: list[int] = field(default_factory=list)
    """Rows of those that no stream has answered."""


class FarChains(FarNats):
    """One connection, and a stream with `allow_batched`."""

    def __init__(self, wire: NatsWire, *known: Any, **more: Any) -> None:
        super().__init__(wire, *known, **more)
        self._chain: _Chain | None = None
        self._is_doubtful = True
        """Whether what is sent next may be in the stream already."""
        self._is_alone = False
        """Whether what is made now goes by itself."""
        self._later: Refusal | None = None
        """Why nothing behind it is sent of what waits."""
        self._inbox = new_inbox()
        self._name = self._inbox.rpartition(".")[2].encode() + b"-"
        wire.on_messages = self._hear
        self._core.subscribe(f"{self._inbox}.>")

    # Making --------------------------------------------------------------------------------------

    def make(self, found: SourceBatch) -> TargetBatch:
        found = found.limit(min(_CHAIN_MESSAGES_MAX, self._looked.room))
        made = super().make(found)
        body_of(made).found = found
        if made.count and not self._is_alone:
            self._end(body_of(made), made.count)
        return made

    def _replies(self, body: Body, number: int, count: int) -> list[encode.Column]:
        if self._is_alone:
            return super()._replies(body, number, count)
        first = number - body.number + 1
        steps = np.full((count, 1), _NEXT[0], np.uint8)
        if first == 1:
            steps[0] = _FIRST[0]
        index = encode.digits(np.arange(first, first + count), _INDEX_DIGITS)
        return [self._reply_begins(body.number), index, b".", steps, b".$FI"]

    def _reply_begins(self, number: int) -> bytes:
        """Of a chain whose name is no other one's, of whatever connection."""
        inbox, flow = self._inbox.encode(), jetstream_codec.CHAIN_ACK_MESSAGES
        return b"%b.%b%d.%d.fail." % (inbox, self._name, number, flow)

    def _end(self, body: Body, count: int) -> None:
        """Have the last of so many messages be the end of the chain."""
        said = bytes(body.said[-1])
        reply = b"%b%0*d." % (self._reply_begins(body.number), _INDEX_DIGITS, count)
        at = said.rindex(reply) + len(reply)
        body.said[-1] = b"".join((said[:at], _LAST, said[at + 1 :]))

    def _of(self, made: TargetBatch, sequences: Integers) -> TargetBatch:
        """These messages of it."""
        found = body_of(made).found
        assert found is not None, "it was made here"
        return self.make(replace(found, pieces=found.select(sequences)))

    # Sending -------------------------------------------------------------------------------------

    def send(self, made: TargetBatch) -> None:
        body_of(made).missing = np.ones(made.count, np.bool_)
        self._looked.note(self._near, made)
        self._sent.append(made)
        if len(self._sent) == 1 and not self._is_doubtful:
            self._begin(made, made.sequences)

    async def settle(self) -> list[Refusal]:
        made = self._sent[0]
        if self._later is None:
            await self._store(made)
        refusals = body_of(made).refusals
        if self._later is not None:
            refusals += _each(self._later, made.sequences[body_of(made).missing])
        await self._note_mapped(made)
        self._sent.popleft()
        if not self._sent:
            self._later = None
        elif self._later is None and not self._is_doubtful:
            self._begin(self._sent[0], self._sent[0].sequences)
        return refusals

    def _begin(self, made: TargetBatch, left: Integers) -> None:
        """Have the first of what is left of it stored, one behind the other."""
        is_whole = left.size == made.count <= self._looked.room
        chain = made if is_whole else self._of(made, left)
        body = body_of(chain)
        for said in body.said:
            self._core.write(said)
        self._wire.complaints.clear()
        self._wire.link.flush()
        self._chain = _Chain(body.number, chain.sequences, trio.current_time())

    async def _store(self, made: TargetBatch) -> None:
        """Have a batch stored, or refused. Raises BusConnectionError where that is not known: all
        is asked for again then."""
        body = body_of(made)
        while self._later is None and body.missing.any():
            try:
                await self._store_some(made, made.sequences[body.missing])
            except _DeniedError:
                self._chain = None
                self._refuse_denied(made)
            except _UnheardError:
                self._chain, self._is_doubtful = None, True
                await self._sort_unheard(made)

    async def _store_some(self, made: TargetBatch, left: Integers) -> None:
        """Take a chain further; or begin one, when it is known what of these is stored."""
        if self._chain is None:
            if self._is_doubtful and await self._are_stored(made, left[:1]):
                left = await self._unknown(made, left)
            self._is_doubtful = not left.size
            if left.size:
                self._begin(made, left)
            return
        chain, self._chain = await self._ended(), None
        if chain.is_too_long:
            self._looked.too_many(chain.sequences.size)
        if chain.is_none:
            await self._check_takes_chains()
        stored = max(0, chain.stored)
        if stored:
            end = chain.sequences[stored - 1 : stored]
            is_there = await self._are_stored(made, end) or await self._is_at(made, end, chain.last)
            has_grown = chain.last >= self._looked.end + stored
            self._looked.end = chain.last or self._looked.end
            if not is_there or (chain.last and not has_grown):
                raise BusConnectionError(f"stream {self._stream!r} has not what it said it has")
            self._settle_rows(made, chain.sequences[:stored])
        if stored >= chain.sequences.size:
            return
        if chain.stored >= 0 or chain.is_unfit:
            await self._store_alone(made, chain.sequences[stored])
            self._is_doubtful = chain.stored < 0
        else:
            await self._doubt(made, chain)

    async def _check_takes_chains(self) -> None:
        """Raise BusConnectionError where it does not: the lane begins anew, and without."""
        info = await self._wire.link.ask(f"STREAM.INFO.{self._stream}")
        if not info["config"].get("allow_batched"):
            raise BusConnectionError(f"stream {self._stream!r} takes no fast batches any more")

    def _taken(self, body: Body) -> bytes:
        """A subject of these messages; one of the stream, if there is one."""
        for subject in body.subjects:
            if self._is_for(subject, self._subjects or ()):
                return subject
        return next(iter(body.subjects))

    def _settle_rows(self, made: TargetBatch, sequences: Integers) -> None:
        """It is known what became of these."""
        body_of(made).missing[np.searchsorted(made.sequences, sequences)] = False

    # Hearing -------------------------------------------------------------------------------------

    def _hear(self, messages: Messages) -> None:
        """Answers to a chain."""
        for row in range(messages.count):
            said = messages.subject(row)[len(self._inbox) + 1 :].split(b".")
            chain = self._chain
            if (
                chain is None
                or len(said) != _REPLY_TOKENS
                or said[0] != b"%b%d" % (self._name, chain.number)
            ):
                continue
            told = jetstream_codec.chain_answer(messages.headers(row), messages.payload(row))
            index = jetstream_codec.number(said[3], 0)
            if told.error is not None and told.error.code == _NO_CHAINS:
                chain.is_none = True
            if told.error is not None and told.error.code == TOO_MANY:
                chain.is_too_long = True
            if told.error is not None and told.error.code not in _OF_NO_MESSAGE:
                chain.why = chain.why or str(told.error)
                if told.error.code != jetstream_codec.NO_RESPONDERS:
                    chain.is_unfit = True
                else:
                    chain.unheard.append(index - 1)
            if told.stored > chain.far:
                chain.far, chain.moved_at = told.stored, trio.current_time()
            if told.is_last and told.stored >= 0:
                chain.stored, chain.last, chain.is_over = told.stored, told.sequence, True
            elif told.is_last and index == chain.sequences.size:
                chain.is_over = True

    async def _ended(self) -> _Chain:
        """Wait until the chain under way has ended."""
        chain = self._chain
        assert chain is not None, "one is under way"
        while not chain.is_over:
            self._check_late(chain.moved_at)
            await self._pub_acks()
        return chain

    def _check_late(self, since: float) -> None:
        """Raise BusConnectionError where nothing was said for too long but of other chains: of one
        that was given up a server goes on for a while."""
        if trio.current_time() > since + self._wire.patience:
            raise BusConnectionError(
                f"stream {self._stream!r} has not said within {self._wire.patience:g} s what it has"
            )

    async def _pub_acks(self) -> None:
        if not self._wire.complaints:
            await super()._pub_acks()
        if self._wire.complaints and not self._is_alone:
            raise _DeniedError
        if not self._is_alone and body_of(self._sent[0]).unheard:
            raise _UnheardError

    @property
    def _silent(self) -> Sequence[TargetBatch]:
        return [self._sent[0]]  # No other one was sent.

    async def _doubt(self, made: TargetBatch, chain: _Chain) -> None:
        """Nobody has said how far it has come: because some of it is not for the stream, which is
        refused. Raises BusConnectionError where all of it is."""
        body, self._is_doubtful = body_of(made), True
        rows = np.searchsorted(made.sequences, chain.sequences[chain.unheard])
        body.unheard = rows[body.missing[rows]].tolist()
        if not body.unheard and not await self._leave_unheard():
            why = chain.why or "it has another leader"
            raise BusConnectionError(f"stream {self._stream!r} has not said what it has: {why}")
        body.missing[body.unheard] = False
        await self._sort_unheard(made)

    def _refuse_denied(self, made: TargetBatch) -> None:
        """The server lets the lane not say some of it. Raises BusConnectionError where it is
        something else that it complains of."""
        count, self._is_doubtful = len(body_of(made).refusals), True
        complaints = list(dict.fromkeys(self._wire.complaints))
        self._wire.complaints.clear()
        for complaint in complaints:
            if subject := denied(complaint):
                self._deny(made, subject, complaint)
        if len(body_of(made).refusals) == count:
            raise BusConnectionError(f"NATS at {self._wire.link.server} says: {complaints[0]}")

    async def _store_alone(self, made: TargetBatch, sequence: int) -> None:
        """Have one message stored that ended a chain, or hear why it is not."""
        body, sent = body_of(made), self._sent
        self._is_alone, self._sent = True, deque()
        try:
            super().send(self._of(made, np.array([sequence])))
            (alone,) = self._sent
            refusals = await super().settle()
        finally:
            self._is_alone, self._sent = False, sent
        _count_known(made, alone.skipped_counts.get(Left.KNOWN, 0))
        if refusals and refusals[0].code == STREAM_FULL:
            self._later = refusals[0]
            return
        body.refusals += refusals
        self._settle_rows(made, np.array([sequence]))

    # Asking --------------------------------------------------------------------------------------

    async def _unknown(self, made: TargetBatch, sequences: Integers) -> Integers:
        """Those of these that the stream has not."""
        stored = await self._asked(made, sequences)
        self._settle_rows(made, sequences[stored])
        _count_known(made, int(np.count_nonzero(stored)))
        left: Integers = sequences[~stored]
        return left

    async def _are_stored(self, made: TargetBatch, sequences: Integers) -> bool:
        return bool((await self._asked(made, sequences)).all())

    def _ids_of(self, made: TargetBatch, sequences: Integers) -> list[encode.Column]:
        found = body_of(made).found
        assert found is not None, "it was made here"
        checks = np.concatenate([piece.checks() for piece in found.select(sequences)])
        return self._message_ids(sequences, checks)

    async def _is_at(self, made: TargetBatch, end: Integers, sequence: int) -> bool:
        """Whether this message is what the stream has there."""
        asked = f"STREAM.MSG.GET.{self._stream}"
        try:
            found = await self._wire.link.ask(asked, {"seq": sequence})
            headers = b64decode(found["message"].get("hdrs", ""))
        except (JetStreamError, ValueError):
            return False
        return b"%b: %b\r\n" % (jetstream_codec.MSG_ID, joined(self._ids_of(made, end))) in headers

    async def _asked(self, made: TargetBatch, sequences: Integers) -> Flags:
        """Whether the stream has these. Raises BusConnectionError where it does not say so."""
        stored, at = [np.zeros(0, np.bool_)], 0
        while at < sequences.size:
            stored.append(await self._asked_some(made, sequences[at : at + self._looked.room]))
            at += stored[-1].size
        return np.concatenate(stored)

    async def _asked_some(self, made: TargetBatch, sequences: Integers) -> Flags:
        """The same of as many as there is room for at once."""
        first, count = self._core.take_numbers(sequences.size), sequences.size
        subject, replies = self._taken(body_of(made)), self._core.replies_to(first, count)
        ids = self._ids_of(made, sequences)
        self._core.write(jetstream_codec.whether_stored(subject, count, ids, replies))
        self._wire.link.flush()
        stored: Flags = np.zeros(count, np.bool_)
        missing = np.ones(count, np.bool_)
        asked_at = trio.current_time()
        while missing.any():
            if not self._wire.replies:
                await self._pub_acks()
                self._check_late(asked_at)
            for each in self._wire.replies:
                rows = each.numbers - first
                acks = jetstream_codec.pub_acks(each.messages)
                for at in np.flatnonzero((rows >= 0) & (rows < count)).tolist():
                    error = acks.errors.get(at)
                    if error is not None and error.code == TOO_MANY:
                        self._looked.too_many(count)
                    if error is not None and error.code not in _NOT_STORED:
                        why = f"does not say whether it has a message: {error}"
                        raise BusConnectionError(f"stream {self._stream!r} {why}")
                    stored[rows[at]] = bool(acks.duplicates[at])
                    missing[rows[at]] = False
            self._wire.replies.clear()
        return stored


def _each(why: Refusal, sequences: Sequence[int] | Integers) -> list[Refusal]:
    """The same said of each of these."""
    return [Refusal(int(each), why.code, why.sentence) for each in sequences]


def _count_known(made: TargetBatch, count: int) -> None:
    if count:
        made.skipped_counts[Left.KNOWN] = made.skipped_counts.get(Left.KNOWN, 0) + count
