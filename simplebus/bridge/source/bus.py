"""A class of a bus as the near end of a lane.

Rule 1: messages are read by their sequences, so in order, each once, and only those that the bus
has as safe as it promises: what a crash there could take back is never copied.
Rule 2: a durable has the bus keep what is not copied, and says when something new has come. It is
moved as one step, and is sent one message at a time.
Rule 3: how old a message is, is the bus's to say: no other clock is asked.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol, runtime_checkable

import numpy as np
import trio

from simplebus.bridge.bus_connection import check, core_of, wired
from simplebus.bridge.checkpoint import Mark
from simplebus.bridge.dead_letters import Letters
from simplebus.bridge.interfaces import SourceBatch, Refusal
from simplebus.bridge.source.lag import Alone
from simplebus.bridge.transform import Piece
from simplebus.client.aio.connection import ClientConnection
from simplebus.client.aio.transport import Endpoint
from simplebus.client.aio.wakeup_event import WakeupEvent
from simplebus.client.core.inbox import Inbox
from simplebus.client.core.messages import Batch
from simplebus.client.core.open_requests import OpenRequest
from simplebus.core.errors import Reason, RefusedError
from simplebus.core.limits import FETCH_BYTES_MAX, FETCH_MESSAGES_MAX
from simplebus.core.protocol.envelope_reader import Seconds
from simplebus.core.protocol.frames import FrameBatch
from simplebus.core.protocol.requests import (
    Auth,
    FetchReply,
    FetchRequest,
    NamedClass,
    Start,
    SubscribeReply,
    SubscribeRequest,
)

_KEEP_SECONDS = 0.1
"""So often the bus is told how far the lane is, while it is busy."""
_SAFE_SECONDS = 0.001, 0.05
"""How long what is delivered may take until it is safe: looked at so soon, and then ever later."""
_AGAIN_SECONDS = 86_400.0
_ANSWERS_MAX = 3
"""So many answers are one find, where they are here: each find costs something, however little it
brings."""
_GUESSES = 2 * _ANSWERS_MAX
_GUESSED_BYTES = FETCH_BYTES_MAX * 3 // 4
"""A guess is right while messages are not suddenly longer by a third."""


@runtime_checkable
class Within(Protocol):
    """A bus in this process, the messages of which can be seen where they are."""

    def see(self, class_id: int, wish: FetchRequest) -> tuple[FetchReply, list[FrameBatch]] | None:
        """What a Fetch would be answered now, valid until the next await; None where that takes
        longer."""


@dataclass(slots=True)
class _Asked:
    request: OpenRequest
    first: int
    end: int
    """Where it is to end; it ends sooner where it would be too long."""
    answered_at: float = 0.0
    """By the loop's clock."""

    def answered(self) -> None:
        self.answered_at = trio.current_time()


class NearBus:
    """One connection. `open` comes first."""

    def __init__(
        self,
        wire: ClientConnection,
        *,
        class_: int | str,
        durable: str,
        channels: tuple[str, ...] = (),
        start: str = "waiting",
        place: Endpoint | None = None,
    ) -> None:
        """`start` is where a durable begins that is not there yet; `place` is where the wire
        leads."""
        self._wire = wire
        self._core = wire.core
        self._class = class_
        self._durable = durable
        self._channels = list(channels)
        self._start = start
        self._within = place if isinstance(place, Within) else None
        self.class_id = -1
        self.head = 0
        """The highest one that it has said."""
        self.identity = self.memory = wire.core.bus_id
        self._inbox: Inbox | None = None
        self._arrived = WakeupEvent()
        self._kept = 0
        """Where the durable is."""
        self._kept_at = -_KEEP_SECONDS
        self._asked: deque[_Asked] = deque()
        """What is asked for beforehand, in the order in which it will be wanted."""
        self._guesses = _GUESSES
        """How many may be asked for beforehand: guesses at where each will end."""

    async def open(self) -> int:
        """Begin. Returns where the durable is. Raises RefusedError while somebody holds it."""
        if isinstance(self._class, int):
            self.class_id = self._class
        else:
            await self._wire.wait_answered(self._core.name_classes(NamedClass(name=self._class)))
            found = self._core.find_class_id(self._class)
            assert found is not None
            self.class_id = found
        try:
            reply = await self._subscribe(self._start)
        except RefusedError as error:
            if error.code != Reason.SUBSCRIPTION_MISMATCH:
                raise
            raise RefusedError(
                error.code,
                f"{error.sentence}: a bridge that is to copy other channels needs another name, or "
                "a program has to forget that durable first",
            ) from error
        self._kept = reply.floor
        asked = self._core.fetch(self.class_id, self._kept, 1, create_class=False)
        found_now = (await self._wire.answered(asked)).reply
        assert isinstance(found_now, FetchReply)
        self.head = found_now.head
        return self._kept

    async def _subscribe(self, start: str | Start, *, seek: bool = False) -> SubscribeReply:
        options = SubscribeRequest(
            channels=self._channels,
            durable=self._durable,
            start=start,
            seek=seek,
            max_in_flight=1,
            max_deliveries=0,
            ack_seconds=_AGAIN_SECONDS,
        )
        inbox = self._inbox = self._core.subscribe(self.class_id, options, auto_ack=False)
        self._wire.opened(inbox, self._arrived)
        await self._wire.wait_answered(inbox.subscribe_request)
        reply = inbox.subscribe_request.reply
        assert isinstance(reply, SubscribeReply)
        return reply

    # Reading -------------------------------------------------------------------------------------

    async def find(self, at: int) -> SourceBatch:
        if self._within is not None and (found := await self._seen(self._within, at)) is not None:
            return found
        if self._asked and self._asked[0].first != at:
            self._asked.clear()
        if not self._asked:
            self._ask(at, FETCH_MESSAGES_MAX)
        answers = [await self._answer(self._asked.popleft())]
        while len(answers) < _ANSWERS_MAX and self._has_more(answers[-1]):
            answers.append(await self._answer(self._asked.popleft()))
        asked, reply = answers[-1]
        self._ask_ahead(asked, reply)
        now = reply.now + trio.current_time() - asked.answered_at
        pieces: list[Piece] = []
        missed, next = 0, at
        for asked, reply in answers:
            ages = _ages(reply, now)
            for batch in asked.request.batches:
                pieces += _unpurged(batch, reply, ages)
            missed += self._missed(next, reply)
            next = max(next, reply.next)
            self.head = max(self.head, reply.head)  # It may have been said long ago.
        return SourceBatch(pieces, at, next, self.head, missed, now)

    async def _answer(self, asked: _Asked) -> tuple[_Asked, FetchReply]:
        reply = (await self._wire.answered(asked.request)).reply
        assert isinstance(reply, FetchReply)
        return asked, reply

    def _has_more(self, answer: tuple[_Asked, FetchReply]) -> bool:
        """Whether what follows an answer is here, too: few large pieces cost less than many."""
        return (
            bool(self._asked)
            and self._asked[0].request.reply is not None
            and self._asked[0].first == answer[1].next
        )

    async def _seen(self, within: Within, at: int) -> SourceBatch | None:
        """The same without asking; None where it takes longer. Others have their turn first."""
        await trio.lowlevel.checkpoint()
        check(self._wire)
        seen = within.see(self.class_id, FetchRequest(first=at, times=True))
        if seen is None:
            return None
        reply, batches = seen
        ages = _ages(reply, reply.now)
        pieces, first = [], reply.first
        for batch in batches:
            for whole in _of_one_type(batch, first, ages[first - reply.first :]):
                pieces += _left_of(whole, reply.purged)
            first += batch.count
        missed = self._missed(at, reply)
        return SourceBatch(pieces, at, max(at, reply.next), reply.head, missed, reply.now)

    def _missed(self, at: int, reply: FetchReply) -> int:
        """How many were gone. Of a lane of some channels nobody knows whether they were for it:
        the bus lets go of what is for nobody, and what it drops else, it counts itself."""
        return 0 if self._channels else max(0, reply.first - at)

    async def look(self, sequence: int) -> Mark | None:
        asked = self._core.fetch(self.class_id, sequence, 1, with_times=True, create_class=False)
        reply = (await self._wire.answered(asked)).reply
        assert isinstance(reply, FetchReply)
        ages = _ages(reply, reply.now)
        pieces = [part for batch in asked.batches for part in _unpurged(batch, reply, ages)]
        return SourceBatch(pieces, sequence, reply.next, reply.head, read_at=reply.now).fingerprint(sequence)

    async def behind(self, at: int) -> tuple[int, float]:
        """Those among them that are for others count, too, until they are looked at."""
        asked = self._core.fetch(self.class_id, at, 1, with_times=True, create_class=False)
        reply = (await self._wire.answered(asked)).reply
        assert isinstance(reply, FetchReply)
        self.head = max(self.head, reply.head)
        ages = _ages(reply, reply.now)
        return max(0, reply.head - max(at, reply.first)), float(ages[0]) if ages.size else 0.0

    def _ask_ahead(self, asked: _Asked, reply: FetchReply) -> None:
        """Have what is behind this reply sent, so that it is here when it is wanted."""
        if self._asked and self._asked[0].first != reply.next:  # A guess was wrong.
            self._asked.clear()
            self._guesses = 1
        at = self._asked[-1].end if self._asked else reply.next
        size = sum(batch.size for batch in asked.request.batches)
        count = reply.next - reply.first
        likely = min(count * _GUESSED_BYTES // max(1, size) + 1, FETCH_MESSAGES_MAX)
        while len(self._asked) < self._guesses and asked.first < at < reply.head:
            self._ask(at, likely if self._guesses > 1 else FETCH_MESSAGES_MAX)
            at += likely
        self._guesses = min(_GUESSES, self._guesses + 1)
        self._wire.writer.write_now()

    def _ask(self, at: int, count: int) -> None:
        request = self._core.fetch(self.class_id, at, count, with_times=True, create_class=False)
        asked = _Asked(request, at, at + count)
        self._asked.append(asked)
        self._wire.awaited.append((request, asked.answered))

    async def wait(self, at: int) -> int:
        await self.keep(at, now=True)
        inbox = self._inbox
        assert inbox is not None
        while inbox.is_empty:
            check(self._wire)
            await self._arrived.wait()
        batch = inbox.pop_batch()
        assert batch is not None
        # What comes first need not be the first that is there: others may not be due yet.
        first = max(at, int(batch.sequences[0]))
        pause, longest = _SAFE_SECONDS
        while True:
            asked = self._core.fetch(self.class_id, first, 1, create_class=False)
            reply = (await self._wire.answered(asked)).reply
            assert isinstance(reply, FetchReply)
            if reply.head > first:
                return at
            await trio.sleep(pause)
            pause = min(2 * pause, longest)

    # Being through -------------------------------------------------------------------------------

    async def keep(self, at: int, *, now: bool) -> None:
        time = trio.current_time()
        if at == self._kept and not self._has_taken():
            return
        if not now and time - self._kept_at < _KEEP_SECONDS:
            return
        inbox = self._inbox
        assert inbox is not None
        left = self._core.unsubscribe(inbox, is_processed=False)
        self._kept, self._kept_at = at, time
        # Both are said in one breath: who has no subscription is not waited for by a bus that ends.
        await self._subscribe(Start(sequence=at), seek=True)
        self._wire.closed(inbox)
        await self._wire.wait_answered(left)

    def _has_taken(self) -> bool:
        """Whether the durable has sent what it had, and would send nothing more."""
        return self._inbox is None or self._inbox.has_unsettled

    async def give_up(self, refusals: Sequence[Refusal]) -> int:
        letters = Letters(self._wire, self._class, self._durable)
        await letters.open()
        left = sorted(refusals, key=lambda each: each.sequence)
        gone = len(left)
        while left:
            at, most = left[0].sequence, left[-1].sequence + 1 - left[0].sequence
            asked = self._core.fetch(
                self.class_id,
                at,
                min(most, FETCH_MESSAGES_MAX),
                with_times=True,
                create_class=False,
            )
            reply = (await self._wire.answered(asked)).reply
            assert isinstance(reply, FetchReply)
            ages = _ages(reply, reply.now)
            pieces = [part for batch in asked.batches for part in _unpurged(batch, reply, ages)]
            there = {
                sequence: piece.part(row, row + 1)
                for piece in pieces
                for row, sequence in enumerate(piece.sequences.tolist())
            }
            seen = max(reply.next, at + 1)
            while left and left[0].sequence < seen:
                refusal = left.pop(0)
                if (piece := there.get(refusal.sequence)) is not None:
                    accepted = reply.now - float(np.max(piece.ages))
                    letters.add(bytes(piece.raw), refusal, accepted=accepted, now=reply.now)
                    gone -= 1
        await letters.stored()  # Until there is room they are nobody's: the lane begins anew.
        return gone

    def left(self, at: int) -> int:
        return 0


def near_alone(
    place: Place, made: Callable[[Wire], NearBus], *, heartbeat: float, auth: Auth | None
) -> Alone:
    """What opens that end for a moment. From then on the bus keeps what is to be copied."""

    @asynccontextmanager
    async def open() -> AsyncIterator[tuple[NearBus, int]]:
        async with wired(place, core_of(None, heartbeat=heartbeat, auth=auth)) as wire:
            here = made(wire)
            yield here, await here.open()

    return open


def _ages(reply: FetchReply, now: float) -> Seconds:
    """How long before `now` each of the messages first..next-1 was accepted."""
    if not reply.times:
        return np.zeros(reply.next - reply.first)
    steps = np.array([max(step, reply.first) for step, _ in reply.times] + [reply.next])
    seconds = np.array([at for _, at in reply.times])
    ages: Seconds = now - np.repeat(seconds, np.diff(steps))
    return ages


def _unpurged(batch: Batch, reply: FetchReply, ages: Seconds) -> list[Piece]:
    """What of a batch is still somebody's."""
    found = batch.sequences
    if isinstance(found, range):
        sequences = np.arange(found.start, found.stop)
        old = ages[found.start - reply.first : found.stop - reply.first]
    else:
        sequences, old = found, ages[found - reply.first]
    return _left_of(Piece(batch.data, batch.bounds, sequences, old, batch.stride), reply.purged)


def _of_one_type(batch: FrameBatch, first: int, ages: Seconds) -> list[Piece]:
    """Copies of the frames from sequence `first` on, apart where their types differ."""
    raw = batch.data.tobytes()
    whole = Piece(raw, batch.bounds, np.arange(first, first + batch.count), ages[: batch.count])
    types = np.frombuffer(raw, np.uint8)[batch.starts]
    edges = [0, *(np.flatnonzero(types[1:] != types[:-1]) + 1).tolist(), batch.count]
    return [whole.part(a, b) for a, b in pairwise(edges)] if len(edges) > 2 else [whole]


def _left_of(whole: Piece, purged: Sequence[tuple[int, int]]) -> list[Piece]:
    """Without what is purged."""
    if not purged:
        return [whole]
    parts, at, first = [], 0, int(whole.sequences[0])
    for begin, end in purged:
        begin, end = max(0, begin - first), min(whole.count, end - first)
        if begin < end:
            parts.append((at, begin))
            at = end
    parts.append((at, whole.count))
    return [whole.part(a, b) for a, b in parts if a < b]
