"""A NATS server as the near end of a lane.

Rule 1: a subject becomes the channel, or a header if it can be none; headers stay headers but for
the server's own (`nats_words`), and the one that says a key.
Rule 2: from JetStream, a message is read by its sequence in the stream and acknowledged when it is
confirmed at the far end, which knows how far the lane is. NATS without JetStream keeps nothing:
what is published while the lane is away is gone, and what finds no room is counted as missed.
Rule 3: NATS has no dead letters: those of what the far bus refuses lie there. A stream is told that
a message is done with when its letter is stored, for it may drop it then.
"""

from __future__ import annotations

import logging
import re
import secrets
import time
import zlib
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np

from simplebus.bridge import letters
from simplebus.bridge.ends import Found, Refusal
from simplebus.bridge.nats_framer import Framer
from simplebus.bridge.nats_wire import NatsWire
from simplebus.bridge.nats_words import is_reserved
from simplebus.bridge.progress import Mark
from simplebus.core.errors import BusConnectionError
from simplebus.core.frames import Integers
from simplebus.engine.link import new_inbox
from simplebus.nats.client import jetstream
from simplebus.nats.client.events import Messages
from simplebus.nats.client.jetstream import JetStreamError

log = logging.getLogger("simplebus.bridge")

HELD_BYTES_MAX = 64 * 1024 * 1024
"""What comes from NATS without JetStream, and finds no room beside so much, is missed."""
_PULL_MESSAGES = 8192
_PULL_SECONDS = 30.0
_ACKS_PENDING = 65_536
_TOO_MANY_ACKS = 10121
"""The stream, or the server, lets fewer wait for their acks."""
_FOUND_MESSAGES = 65_536
"""With so many no further piece is found at once."""
_ID_CHARACTERS = 16
_ODD = re.compile(r"[^A-Za-z0-9_-]")
_RESERVED = np.frombuffer(b"$_", np.uint8)
"""What subjects begin with that may be the server's own."""
_TO = "simplebus-bridge-to"
"""What a consumer says of where its lane leads; empty while the lane was never there."""
_HEARTBEAT, _NO_MESSAGES, _TIMED_OUT = 100, 404, 408


def consumer_name(lane: str) -> str:
    """What a lane's consumer is called: words, and the class behind them; one with letters that no
    consumer's name may have is told apart by a checksum."""
    *words, class_ = lane.split(" ", 3)
    plain = _ODD.sub("-", class_)
    if plain != class_:
        plain += f"-{zlib.crc32(class_.encode()):08x}"
    return "-".join((*words, plain))


def _other_name(name: str) -> str:
    """A second one, that is no other lane's."""
    first, _, rest = name.partition("-")
    return f"{first}2-{rest}"


class NearCore:
    """What is published on some subjects, from now on."""

    def __init__(
        self, wire: NatsWire, subjects: Sequence[str], *, letters: letters.Open, group: str = ""
    ) -> None:
        """`letters` opens what dead letters are written with."""
        self._wire = wire
        self._letters = letters
        self.identity = identity_of(wire)
        self.memory = f"nats {secrets.token_hex(8)}"
        self.head = 0
        self._framer = Framer()
        self._held: deque[Messages] = deque()
        self._held_bytes = 0
        self._next = 0
        self._missed = 0
        self._out = _Out()
        wire.on_messages = self._take
        self._wide: list[int] = []
        """The subscriptions whose first segment is a wildcard."""
        for subject in subjects or (">",):
            sid = wire.core.subscribe(subject, group)
            if subject.split(".", 1)[0] in ("*", ">", "#"):
                self._wide.append(sid)
        wire.link.flush()

    async def open(self) -> int:
        """Begin. Returns the first sequence."""
        await self._wire.echoed()  # It has taken the subscriptions.
        return 0

    def _take(self, messages: Messages) -> None:
        messages = self._meant(messages)
        size = int((messages.ends - messages.bodies).sum())
        if self._held_bytes + size > HELD_BYTES_MAX:
            self._missed += messages.count
            return
        if messages.count:
            self._held.append(messages)
            self._held_bytes += size

    def _meant(self, messages: Messages) -> Messages:
        """Without what a wildcard matches and nobody means: answers to others, and echoes of this
        bridge."""
        likely = np.isin(messages.data[messages.subjects], _RESERVED)
        if not likely.any():
            return messages
        likely &= np.isin(messages.sids, self._wide)
        for row in np.flatnonzero(likely).tolist():
            likely[row] = is_reserved(messages.subject(row).decode("utf-8", "replace"))
        return messages.pick(~likely)

    async def find(self, at: int) -> Found:
        self._wire.check()
        missed, self._missed = self._missed, 0
        pieces = []
        first = self._next
        while self._held and self._next - first < _FOUND_MESSAGES:
            messages = self._held.popleft()
            self._held_bytes -= int((messages.ends - messages.bodies).sum())
            sequences = np.arange(self._next, self._next + messages.count)
            pieces.append(self._framer.piece(messages, sequences))
            self._out.add(messages, sequences)
            self._next += messages.count
        head = self._next + sum(messages.count for messages in self._held)
        found = Found(pieces, at, self._next, head, missed)
        found.odd, found.oddity = self._framer.odd()
        return found

    async def look(self, sequence: int) -> Mark | None:
        return None  # It keeps nothing.

    async def behind(self, at: int) -> tuple[int, float]:
        return self._next - at + sum(messages.count for messages in self._held), 0.0

    async def wait(self, at: int) -> int:
        await self.keep(at, now=False)
        while not self._held:
            await self._wire.changed()
        return at

    async def keep(self, at: int, *, now: bool) -> None:
        """NATS would not know what to do with it."""
        self._out.take(at)

    async def give_up(self, refusals: Sequence[Refusal]) -> int:
        found = self._out.of(refusals)
        await _bury(found, refusals, self._letters, self._framer)
        return len(refusals) - sum(messages.count for messages, _ in found)

    def left(self, at: int) -> int:
        held = sum(messages.count for messages in self._held)
        return self._next - at + held + self._missed


class NearStream:
    """The messages of a stream."""

    def __init__(
        self,
        wire: NatsWire,
        stream: str,
        *,
        durable: str,
        to: str,
        subjects: Sequence[str],
        start: str,
        heartbeat: float,
        letters: letters.Open,
    ) -> None:
        """`to` is the far end's identity: under one name nobody reads for two. `letters` opens what
        dead letters are written with."""
        self._wire, self._core = wire, wire.core
        self._stream = stream
        self._name = consumer_name(durable)
        """The consumer's,"""
        self._other = _other_name(self._name)
        """and that of the next one, where one is always to be there."""
        self._to = to
        self._subjects = list(subjects)
        self._start = start
        self._retention = ""
        self._heartbeat = heartbeat
        self.identity = identity_of(wire, stream)
        self.memory = ""
        self.head = 0
        self._framer = Framer()
        self._inbox = new_inbox()
        self._queue: list[tuple[Messages, Integers]] = []
        self._unacked = _Out()
        self._letters = letters
        self._cursor = -1
        """The sequence behind the last one that came, or at which the consumer begins."""
        self._given = -1
        """The same of what was given out."""
        self._asked = self._pending = self._missed = 0
        self._counted = 0
        """What is missing below this sequence was counted."""
        self._began = 0
        """The sequence from which on messages are wanted;"""
        self._through: int | None = None
        """and the one from which on the consumer has them: the lane is not through with what lies
        between. None where nothing is known of it."""
        self._acks_pending = _ACKS_PENDING
        """So many may wait for their acks at the consumer."""
        self._is_kept = False
        """Whether it is settled what was under way before: from then on the lane goes on."""
        self._over = ""
        """Why the consumer sends nothing any more; empty while it does."""
        self.is_new = False
        """Whether nothing is known here of where the lane was."""
        self._unused_at = -1
        """Where its consumer begins, which nobody has asked for anything; -1 for none."""
        wire.on_messages = self._take
        self._sid = wire.core.subscribe(self._inbox)

    async def open(self) -> int:
        """Begin: from then on a consumer is there, whether the far end is or not. Returns the
        sequence at which a lane begins that was never there."""
        link = self._wire.link
        info = await link.ask(f"STREAM.INFO.{self._stream}")
        self.memory = f"{self._stream} {info.get('created', '')}"
        self._retention = info["config"].get("retention", "limits")
        state = info["state"]
        self.head = int(state["last_seq"]) + 1
        known = await self._known(self._name)
        if self._retention == "interest":  # It may have ended while it had two.
            other = await self._known(self._other)
            if other is not None and (known is None or other > known):
                self._name, self._other, known = self._other, self._name, other
        if known is None:
            first, last = int(state["first_seq"]), int(state["last_seq"])
            at = {"new": last + 1, "last": max(first, last)}.get(self._start, first)
            if self._retention == "workqueue":  # What is not acknowledged stays for ever.
                at = first
            await self._create(at, to="")
            known = at, False
        at, has_begun = known
        self.is_new = not has_begun
        if has_begun:
            self._through = at
        else:
            self._unused_at = at
        return at

    async def _known(self, name: str) -> tuple[int, bool] | None:
        """From where on a consumer's messages are not acknowledged, and whether a lane has ever
        begun with it; None where it is not there."""
        try:
            known = await self._wire.link.ask(f"CONSUMER.INFO.{self._stream}.{name}")
        except JetStreamError as error:
            if error.code not in jetstream.NOT_FOUND:
                raise
            return None
        to = (known["config"].get("metadata") or {}).get(_TO)
        if to and to != self._to and known.get("num_waiting"):
            raise BusConnectionError(
                f"{name!r} of stream {self._stream!r} leads to another far end than {self._to}: "
                "each bridge has to have a name of its own there"
            )
        return int(known["ack_floor"]["stream_seq"]) + 1, to != ""

    async def _seek(self, at: int) -> None:
        """Have a new consumer begin there: what the one before was sent would come late. What is
        kept as long as somebody is interested has one all the time."""
        link, before = self._wire.link, ""
        # What is still said of the one before goes nowhere.
        self._core.unsubscribe(self._sid)
        self._inbox = new_inbox()
        self._sid = self._core.subscribe(self._inbox)
        self._over = ""
        is_unused, self._unused_at = at == self._unused_at, -1
        if self._retention == "interest" and not is_unused:
            before = self._name
            self._name, self._other = self._other, self._name
        if not is_unused:
            await self._delete(self._name)
        self._through = at if self._through is None else min(at, self._through)
        said = await self._create(self._through, to=self._to)
        if before:
            await self._delete(before)
        self._queue.clear()
        self._unacked.clear()
        info = await link.ask(f"STREAM.INFO.{self._stream}")
        first = int(info["state"]["first_seq"])
        self._miss(max(1, at), first)
        self._given = self._began = at
        self._cursor = max(1, at, first)
        self._asked, self._pending = 0, int(said.get("num_pending", 0))
        self._pull()

    async def _create(self, at: int, *, to: str) -> dict[str, Any]:
        """Make the consumer, which begins there."""
        config: dict[str, Any] = {
            "durable_name": self._name,
            "deliver_policy": "by_start_sequence",
            "opt_start_seq": max(1, at),
            "ack_policy": "explicit",
            "max_ack_pending": self._acks_pending,
            "max_deliver": -1,
            "replay_policy": "instant",
            "metadata": {_TO: to},
        }
        if self._retention == "workqueue":  # It takes no other, and has what is not acknowledged.
            config["deliver_policy"] = "all"
            del config["opt_start_seq"]
        if self._subjects:
            config["filter_subjects"] = self._subjects
        asked = f"CONSUMER.DURABLE.CREATE.{self._stream}.{self._name}"
        about = {"stream_name": self._stream, "config": config}
        try:
            said = await self._wire.link.ask(asked, about)
        except JetStreamError as error:
            if error.code != _TOO_MANY_ACKS:
                raise
            del config["max_ack_pending"]  # Then it is as many as there may be.
            said = await self._wire.link.ask(asked, about)
        self._acks_pending = said["config"].get("max_ack_pending", self._acks_pending)
        return said

    async def _delete(self, name: str) -> None:
        """The consumer of this name, if there is one."""
        try:
            await self._wire.link.ask(f"CONSUMER.DELETE.{self._stream}.{name}")
        except JetStreamError as error:
            if error.code not in jetstream.NOT_FOUND:
                raise

    def _pull(self) -> None:
        """Ask for more, if little is under way."""
        if self._asked * 2 <= _PULL_MESSAGES and len(self._queue) < 16:
            count = _PULL_MESSAGES - self._asked
            request = jetstream.next_request(
                batch=count,
                expires_seconds=_PULL_SECONDS,
                idle_seconds=min(self._heartbeat, _PULL_SECONDS / 2),
            )
            subject = f"{jetstream.API}CONSUMER.MSG.NEXT.{self._stream}.{self._name}"
            self._core.publish(subject, request, reply=self._inbox)
            self._asked += count
        self._wire.link.flush()

    def _take(self, messages: Messages) -> None:
        messages = messages.pick(messages.sids == self._sid)
        told = jetstream.deliveries(messages)
        for row in np.flatnonzero(~told.good).tolist():
            code, words = jetstream.status(messages.headers(row))
            if code:  # There is nothing now: what was told to be behind the last one is gone.
                self._pending = 0
            if code != _HEARTBEAT:
                self._asked = 0  # What was asked for is over.
            if code not in (0, _HEARTBEAT, _NO_MESSAGES, _TIMED_OUT):
                self._over = f"{code} {words}".strip()
        fresh = told.good & (told.sequences >= self._cursor)
        self._asked = max(0, self._asked - int(np.count_nonzero(told.good)))
        early = told.good & (told.sequences < self._began)
        if early.any():  # What is copied and was not acknowledged, or refused and not given up.
            self._unacked.add(messages.pick(early), told.sequences[early])
            self._pending = int(told.pending[np.flatnonzero(early)[-1]])
        if fresh.any():
            sequences = told.sequences[fresh]
            if not self._subjects:  # Otherwise what is missing may be what nobody asked for.
                gaps = np.flatnonzero(np.diff(sequences, prepend=self._cursor - 1) != 1)
                for row in gaps.tolist():
                    before = int(sequences[row - 1]) + 1 if row else self._cursor
                    self._miss(before, int(sequences[row]))
            self._queue.append((messages.pick(fresh), sequences))
            self._cursor = int(sequences[-1]) + 1
            self._pending = int(told.pending[np.flatnonzero(fresh)[-1]])

    def _miss(self, first: int, last: int) -> None:
        """The stream does not have first..last-1. What it is asked for again counts once."""
        self._missed += max(0, last - max(first, self._counted))
        self._counted = max(self._counted, last)

    async def find(self, at: int) -> Found:
        if at != self._given:
            await self._seek(at)
        self._pull()
        while not self._queue and not self._waits_for_acks() and self._pending:
            self._check()
            await self._wire.owed(self._sign)
            self._pull()
        self._check()
        pieces = []
        for messages, sequences in self._queue:
            pieces.append(self._framer.piece(messages, sequences))
            self._unacked.add(messages, sequences)
        self._queue.clear()
        self._given = max(at, self._cursor)
        missed, self._missed = self._missed, 0
        found = Found(pieces, at, self._given, self._given + self._pending, missed)
        found.odd, found.oddity = self._framer.odd()
        return found

    def _waits_for_acks(self) -> bool:
        """Whether the consumer sends no more before some are acknowledged. Raises
        BusConnectionError where the lane has to see more first: what it does not see is gone."""
        waits = self._unacked.count >= self._acks_pending
        if waits and not self._is_kept:
            raise BusConnectionError(
                f"stream {self._stream!r}, or its server, lets {self._acks_pending} messages wait "
                "for their acks, and more than that are to be sent again: let more wait for them "
                "('max_ack_pending')"
            )
        return waits

    async def behind(self, at: int) -> tuple[int, float]:
        """While nothing was asked for: of the lane's consumer all that is not acknowledged."""
        known = await self._wire.link.ask(f"CONSUMER.INFO.{self._stream}.{self._name}")
        count = int(known["num_pending"])
        if self._given < 0:
            return count + int(known["num_ack_pending"]), 0.0
        return count + sum(int(np.count_nonzero(s >= at)) for _, s in self._queue), 0.0

    async def look(self, sequence: int) -> Mark | None:
        missed, counted = self._missed, self._counted
        found = await self.find(sequence)
        self._missed, self._counted = missed, counted  # Nobody wants it again.
        return found.mark(sequence)

    async def wait(self, at: int) -> int:
        await self.keep(at, now=False)
        while not self._queue:
            self._check()
            self._pull()
            await self._wire.owed(self._sign)
        return at

    @property
    def _sign(self) -> str:
        return f"a message or a heartbeat of stream {self._stream!r}"

    def _check(self) -> None:
        """Raise BusConnectionError where nothing will come any more: the lane begins anew, and
        makes the consumer again."""
        self._wire.check()
        if self._over:
            raise BusConnectionError(
                f"the consumer {self._name!r} of stream {self._stream!r} has ended: {self._over}"
            )

    async def keep(self, at: int, *, now: bool) -> None:
        self._is_kept = True
        self._through = at if self._through is None else max(at, self._through)
        for messages, _ in self._unacked.take(at):
            self._core.write(jetstream.say(messages))
        self._wire.link.flush()
        if now and self._wire.link.is_ready and not self._wire.lost:
            await self._wire.echoed()

    async def give_up(self, refusals: Sequence[Refusal]) -> int:
        left = sorted(refusals, key=lambda each: each.sequence)
        gone = 0
        while left:
            found = self._unacked.of(left)
            if not found:  # It was given out before the consumer was made anew.
                await self.look(left[0].sequence)
                found = self._unacked.of(left[:1])
            await _bury(found, left, self._letters, self._framer)
            for messages, _ in found:
                self._core.write(jetstream.say(messages, jetstream.TERMINATE))
            self._wire.link.flush()
            done = {sequence for _, sequences in found for sequence in sequences.tolist()}
            if not done:
                done, gone = {left[0].sequence}, gone + 1
            left = [each for each in left if each.sequence not in done]
        return gone

    def left(self, at: int) -> int:
        return 0


class _Out:
    """Messages that were given out and that the lane is not through with."""

    def __init__(self) -> None:
        self._parts: deque[tuple[Messages, Integers]] = deque()
        self.count = 0

    def add(self, messages: Messages, sequences: Integers) -> None:
        self._parts.append((messages, sequences))
        self.count += messages.count

    def clear(self) -> None:
        self._parts.clear()
        self.count = 0

    def take(self, at: int) -> list[tuple[Messages, Integers]]:
        """Those below this sequence, which are not kept any longer."""
        taken, rest = [], deque[tuple[Messages, Integers]]()
        for messages, sequences in self._parts:
            through = sequences < at
            if through.any():
                taken.append((messages.pick(through), sequences[through]))
                self.count -= taken[-1][0].count
            if not through.all():
                rest.append((messages.pick(~through), sequences[~through]))
        self._parts = rest
        return taken

    def of(self, refusals: Sequence[Refusal]) -> list[tuple[Messages, Integers]]:
        """Those that these are about."""
        wanted, found = np.array([each.sequence for each in refusals]), []
        for messages, sequences in self._parts:
            those = np.isin(sequences, wanted)
            if those.any():
                found.append((messages.pick(those), sequences[those]))
        return found


async def _bury(
    found: Sequence[tuple[Messages, Integers]],
    refusals: Sequence[Refusal],
    open: letters.Open,
    framer: Framer,
) -> None:
    """Have a dead letter stored of each of these messages."""
    if not found:
        return
    why = {each.sequence: each for each in refusals}
    async with open() as written:
        for messages, sequences in found:
            told = jetstream.deliveries(messages)
            times = np.where(told.good, told.times / 1e9, 0.0).tolist()
            piece = framer.piece(messages, sequences)
            framer.odd()  # It was told when they were found.
            for row, sequence in enumerate(sequences.tolist()):
                frame = bytes(piece.part(row, row + 1).raw)
                written.add(frame, why[sequence], accepted=times[row], now=time.time())


def check_lane(wire: NatsWire) -> None:
    """Raise BusConnectionError for a server without JetStream."""
    info = wire.core.info
    if info is None or not info.jetstream:
        raise BusConnectionError("that NATS server has no JetStream, and a stream is named")


def identity_of(wire: NatsWire, stream: str = "") -> str:
    """What a server, or a stream of it, is in the path of a message. Other servers of its cluster
    are called otherwise."""
    info = wire.core.info
    server = f"nats.{info.server_id[:_ID_CHARACTERS]}" if info and info.server_id else "nats"
    return f"{server}.{stream}" if stream else server
