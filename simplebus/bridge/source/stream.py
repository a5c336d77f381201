"""A stream of a NATS server as the near end of a lane.

Rule 1: a message is read by its sequence in the stream and acknowledged when it is confirmed at the
far end, which knows how far the lane is. Where it reads again, the lane has its consumer made anew:
what the one before was sent would come late.
Rule 2: what is kept as long as somebody is interested has that consumer all the time, or servers
that hear of one before they hear of the other would drop all of it. There a reader comes beside it
for what it has sent before, which is acknowledged in the consumer's name. For other streams that
one is the bookmark: it is there, and sends nothing, while there is no consumer.
Rule 3: a stream is told that a message is done with when its dead letter is stored, for it may drop
it then.

                  sent before      not sent yet
    stream     ├────────────────┼────────────────►
    read by         reader           consumer
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from simplebus.bridge import dead_letters
from simplebus.bridge.checkpoint import Mark
from simplebus.bridge.dead_letters import Given, bury
from simplebus.bridge.interfaces import SourceBatch, FatalConfigurationError, Refusal
from simplebus.bridge.nats_connection import NatsWire
from simplebus.bridge.source.core_nats import identity_of
from simplebus.bridge.source.pull_consumer import Pulled
from simplebus.bridge.target.nats_frames import Framer
from simplebus.core.errors import BusConnectionError
from simplebus.core.protocol.frames import Integers
from simplebus.nats.client import jetstream_codec
from simplebus.nats.client.events import Messages
from simplebus.nats.client.jetstream_codec import JetStreamError

_ACKS_PENDING = 65_536
_TOO_MANY_ACKS = 10121
"""The stream, or the server, lets fewer wait for their acks."""
_NO_MESSAGE = 10037
_TOO_LONG_AWAY = 10153
"""The stream, or the server, lets no consumer be unused for so long."""
_QUEUED_MAX = 16
"""With so many pieces here no more is asked for."""
_MADE_SECONDS = 15.0
"""So long a consumer may take to be made: while a server is away, the others have to agree on who
leads it."""
_READER_SECONDS = 300.0
"""A reader that was left behind goes after so long."""
_ODD = re.compile(r"[^A-Za-z0-9_-]")
_TO = "simplebus-bridge-to"
"""What a consumer says of where its lane leads; empty while the lane was never there."""


def consumer_name(lane: str) -> str:
    """What a lane's consumer is called: words, and the class behind them; one with letters that no
    consumer's name may have is told apart by a checksum."""
    *words, class_ = lane.split(" ", 3)
    plain = _ODD.sub("-", class_)
    if plain != class_:
        plain += f"-{zlib.crc32(class_.encode()):08x}"
    return "-".join((*words, plain))


def _reader_name(name: str) -> str:
    """A second one, that is no other lane's."""
    first, _, rest = name.partition("-")
    return f"{first}2-{rest}"


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
        letters: dead_letters.Open,
    ) -> None:
        """`to` is the far end's identity: under one name nobody reads for two. `letters` opens what
        dead letters are written with."""
        self._wire, self._core = wire, wire.core
        self._stream = stream
        self._consumer = consumer_name(durable)
        self._reader = _reader_name(self._consumer)
        self._to = to
        self._subjects = list(subjects)
        self._start = start
        self._retention = ""
        self._is_part = bool(subjects)
        """Whether sequences may be missing that were never to come."""
        self._heartbeat = heartbeat
        self.identity = identity_of(wire, stream)
        self.memory = ""
        self.head = 0
        self._framer = Framer()
        self._queue: list[tuple[Messages, Integers]] = []
        self._unacked = Given()
        self._letters = letters
        self._source: Pulled | None = None
        """Who sends; None before anything was asked for."""
        self._own = 0
        """What the consumer itself sends begins at this sequence; below, the reader does."""
        self._is_again = False
        """Whether that one sends now,"""
        self._read = 0
        """and up to which sequence it has."""
        self._cursor = -1
        """The sequence behind the last one that came, or at which that begins."""
        self._given = -1
        """The same of what was given out."""
        self._missed = 0
        self._counted = 0
        """What is missing below this sequence was counted."""
        self._began = 0
        """The sequence from which on messages are wanted;"""
        self._through: int | None = None
        """and the one from which on they are sent: the lane is not through with what lies between.
        None where nothing is known of it."""
        self._acks_pending = _ACKS_PENDING
        """So many may wait for their acks at the consumer."""
        self._is_kept = False
        """Whether it is settled what was under way before: from then on the lane goes on."""
        self.is_new = False
        """Whether nothing is known here of where the lane was."""
        wire.on_messages = self._take

    async def open(self) -> int:
        """Begin: from then on a consumer is there, whether the far end is or not. Returns the
        sequence at which a lane begins that was never there."""
        state = await self.look_over()
        known = await self._known(self._consumer)
        if self._retention == "limits":
            known = await self._from_bookmark(known)
        if known is None:
            first, last = int(state["first_seq"]), int(state["last_seq"])
            at = {"new": last + 1, "last": max(first, last)}.get(self._start, first)
            if self._retention == "workqueue":  # What is not acknowledged stays for ever.
                at = first
            known = await self._create(at, to="")
        elif self._retention == "interest":  # In other subjects, perhaps, than before.
            known = await self._changed(known, to=_to(known))
        elif self._retention == "workqueue":
            self._check_subjects(known)
        to = _to(known)
        if to and to != self._to and known.get("num_waiting"):
            raise BusConnectionError(
                f"{self._consumer!r} of stream {self._stream!r} leads to another far end than "
                f"{self._to}: each bridge has to have a name of its own there"
            )
        at = max(int(known["ack_floor"]["stream_seq"]), _before(known)) + 1
        self.is_new = not to
        if to:
            self._through = at
        return at

    def _check_subjects(self, known: dict[str, Any]) -> None:
        """Raise HopelessError where more is wanted than before: what waits in front of where the
        lane is would be taken for copied, and acknowledged."""
        before = _subjects_of(known)
        if before and (not self._subjects or set(self._subjects) - before):
            raise FatalConfigurationError(
                f"{self._consumer!r} of the work queue {self._stream!r} reads "
                f"{', '.join(sorted(before))} alone: to read more, delete it and give the bridge "
                "another name"
            )

    async def look_over(self) -> dict[str, Any]:
        """See how far the stream is by now: another one of this lane may have copied that. Raises
        BusConnectionError where it is another stream of that name, whose sequences begin anew."""
        info = await self._wire.link.ask(f"STREAM.INFO.{self._stream}")
        memory = f"{self._stream} {info.get('created', '')}"
        if self.memory not in ("", memory):
            raise BusConnectionError(f"stream {self._stream!r} was deleted, and is made again")
        self.memory = memory
        self._retention = info["config"].get("retention", "limits")
        mirrored = info["config"].get("mirror") or {}
        is_part = mirrored.get("filter_subject") or mirrored.get("subject_transforms")
        self._is_part = bool(self._subjects or is_part)
        state: dict[str, Any] = info["state"]
        self.head = int(state["last_seq"]) + 1
        return state

    # Consumers -----------------------------------------------------------------------------------

    async def _info(self, name: str) -> dict[str, Any]:
        return await self._wire.link.ask(f"CONSUMER.INFO.{self._stream}.{name}")

    async def _known(self, name: str) -> dict[str, Any] | None:
        """What is said of the consumer of this name; None where it is not there."""
        try:
            return await self._info(name)
        except JetStreamError as error:
            if error.code not in jetstream_codec.NOT_FOUND:
                raise
            return None

    def _config(self, name: str, at: int) -> dict[str, Any]:
        """Of one that begins there."""
        config: dict[str, Any] = {
            "durable_name": name,
            "deliver_policy": "by_start_sequence",
            "opt_start_seq": max(1, at),
            "replay_policy": "instant",
        }
        if self._subjects:
            config["filter_subjects"] = self._subjects
        return config

    async def _ask_for(self, config: dict[str, Any]) -> dict[str, Any]:
        """Have it made, or changed."""
        subject = f"CONSUMER.DURABLE.CREATE.{self._stream}.{config['durable_name']}"
        body = {"stream_name": self._stream, "config": config}
        return await self._wire.link.ask(subject, body, seconds=_MADE_SECONDS)

    async def _create(
        self, at: int, *, to: str, like: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Make the consumer, which begins there; or change one that was made `like` this."""
        config = self._config(self._consumer, at)
        config["ack_policy"] = "explicit"
        config["max_ack_pending"] = self._acks_pending
        config["max_deliver"] = -1
        config["metadata"] = {_TO: to}
        if self._retention == "workqueue":  # It takes no other, and has what is not acknowledged.
            config["deliver_policy"] = "all"
            del config["opt_start_seq"]
        if like is not None:
            config["opt_start_seq"] = like.get("opt_start_seq", config["opt_start_seq"])
        try:
            said = await self._ask_for(config)
        except JetStreamError as error:
            if error.code != _TOO_MANY_ACKS:
                raise
            del config["max_ack_pending"]  # Then it is as many as there may be.
            said = await self._ask_for(config)
        self._acks_pending = said["config"].get("max_ack_pending", self._acks_pending)
        return said

    async def _delete(self, name: str) -> None:
        """The consumer of this name, if there is one."""
        try:
            await self._wire.link.ask(f"CONSUMER.DELETE.{self._stream}.{name}")
        except JetStreamError as error:
            if error.code not in jetstream_codec.NOT_FOUND:
                raise

    def _pulled(self, name: str, said: dict[str, Any]) -> Pulled:
        """One of these, of which this is said."""
        return Pulled(
            self._wire,
            self._stream,
            name,
            sent=int(said["delivered"]["consumer_seq"]),
            pending=int(said.get("num_pending", 0)),
            beat=self._heartbeat,
            most=max(0, said["config"].get("max_batch", 0)),
        )

    async def _seek(self, at: int) -> None:
        """Have what there is from there on come, in its order."""
        self._close()
        self._queue.clear()
        self._unacked.clear()
        self._through = at if self._through is None else min(at, self._through)
        first = int((await self.look_over())["first_seq"])  # Before it is said to another stream.
        if self._retention == "interest":
            await self._go_on(self._through)
        else:
            self._source = self._pulled(self._consumer, await self._begin_anew(self._through))
        if not self._is_part or self._retention == "limits":  # Else it was taken, perhaps.
            self._miss(max(1, at), first)
        self._given = self._began = at
        self._cursor = max(1, at, first)
        self._pull()

    async def _begin_anew(self, at: int) -> dict[str, Any]:
        """Have another consumer in the place of the one that there is. A lane that is killed
        meanwhile finds the bookmark."""
        is_marked = self._retention == "limits" and await self._mark(at)
        await self._delete(self._consumer)
        said = await self._create(at, to=self._to)
        if is_marked:
            await self._delete(self._reader)
        return said

    async def _mark(self, at: int) -> bool:
        """Set the bookmark. Returns whether there is room for it."""
        config = self._config(self._reader, at)
        config["ack_policy"] = "none"
        config["metadata"] = {_TO: self._to}
        await self._delete(self._reader)
        try:
            await self._ask_for(config)
        except JetStreamError as error:
            if not error.is_final:
                raise
            return False  # No second consumer may be there, for example.
        return True

    async def _from_bookmark(self, known: dict[str, Any] | None) -> dict[str, Any] | None:
        """The consumer, made of the bookmark where only that is there."""
        mark = await self._known(self._reader)
        if mark is None:
            return known
        if known is None:
            known = await self._create(_before(mark) + 1, to=_to(mark))
        await self._delete(self._reader)
        return known

    async def _go_on(self, at: int) -> None:
        """Have the reader send what is from there on, as long as the consumer has sent it before;
        then that one itself."""
        known = await self._known(self._consumer)
        if known is None:
            await self._create(at, to=self._to)
            known = await self._info(self._consumer)
        known = await self._changed(known, to=self._to)
        self._close()
        await self._delete(self._reader)
        self._own = max(int(known["delivered"]["stream_seq"]), _before(known)) + 1
        self._is_again, self._read = at < self._own, at
        name = self._consumer
        if self._is_again:
            name, config = self._reader, self._config(self._reader, at)
            config["ack_policy"] = "none"
            config["inactive_threshold"] = round(_READER_SECONDS * 1e9)
            try:
                await self._ask_for(config)
            except JetStreamError as error:
                if error.code != _TOO_LONG_AWAY:
                    raise
                del config["inactive_threshold"]  # Then it is as long as it may be.
                await self._ask_for(config)
            known = await self._info(name)
        self._source = self._pulled(name, known)

    async def _changed(self, known: dict[str, Any], *, to: str) -> dict[str, Any]:
        """What is said of the consumer when it leads there, and is sent what is wanted now."""
        if _to(known) == to and _subjects_of(known) == set(self._subjects):
            return known
        await self._create(0, to=to, like=known["config"])
        return await self._info(self._consumer)

    # Reading -------------------------------------------------------------------------------------

    def _close(self) -> None:
        """What is still said goes nowhere."""
        if self._source is not None:
            self._source.close()
            self._source = None

    def _pull(self) -> None:
        if self._source is not None and len(self._queue) < _QUEUED_MAX:
            self._source.ask()
        self._wire.link.flush()

    def _take(self, messages: Messages) -> None:
        if self._source is None:
            return
        told = self._source.take(messages)
        is_done = told.sequences < (self._through or 0)
        if is_done.any():  # It was acknowledged, and nobody knows: or it would come for ever.
            done = told.messages.pick(is_done), told.sequences[is_done]
            self._core.write(self._said(*done, jetstream_codec.ACK))
            self._wire.link.flush()
        # What the consumer sends again is the reader's to send.
        mine = ~is_done & ((told.sequences < self._own) == self._is_again)
        early = mine & (told.sequences < self._began)
        if early.any():  # What is copied and was not acknowledged, or refused and not given up.
            self._unacked.add(told.messages.pick(early), told.sequences[early])
        fresh = np.flatnonzero(mine)
        sequences = told.sequences[fresh]
        # What comes again may come together with what came first.
        highest = np.maximum.accumulate(np.append(self._cursor - 1, sequences))[:-1]
        fresh, sequences = fresh[sequences > highest], sequences[sequences > highest]
        if fresh.size:
            gaps = np.flatnonzero(np.diff(sequences, prepend=self._cursor - 1) != 1)
            for row in [] if self._is_part else gaps.tolist():
                before = int(sequences[row - 1]) + 1 if row else self._cursor
                self._miss(before, int(sequences[row]))
            self._queue.append((told.messages.pick(fresh), sequences))
            self._cursor = int(sequences[-1]) + 1
        if self._is_again and told.messages.count:
            self._read = int(told.sequences[-1]) + 1
            if self._read >= self._own:  # All of it has come.
                if not self._is_part:
                    self._miss(self._cursor, self._own)
                self._cursor = max(self._cursor, self._own)

    def _miss(self, first: int, last: int) -> None:
        """The stream does not have first..last-1. What it is asked for again counts once."""
        self._missed += max(0, last - max(first, self._counted))
        self._counted = max(self._counted, last)

    async def find(self, at: int) -> SourceBatch:
        return await self._find(at)

    async def _find(self, at: int, *, goes_on: bool = True) -> SourceBatch:
        """`goes_on`: to what the consumer sends, behind what the reader does."""
        if at != self._given:
            await self._seek(at)
        self._pull()
        while not self._queue:
            if self._is_again and await self._is_read_again():
                if not goes_on:
                    break
                await self._go_on(self._own)  # What it has sent beyond was not taken.
            elif not self._is_again and (not self._pending or self._waits_for_acks()):
                break
            else:
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
        found = SourceBatch(pieces, at, self._given, self._given + self._pending, missed)
        found.altered_count, found.alteration = self._framer.odd()
        return found

    @property
    def _pending(self) -> int:
        return 0 if self._source is None else self._source.pending

    async def _is_read_again(self) -> bool:
        """Whether the reader has sent what there is. Where it says that there is no more it may be
        another server than the one that leads the stream, and know less."""
        if self._read >= self._own:
            return True
        if self._pending:
            return False
        asked = f"STREAM.MSG.GET.{self._stream}"
        for subject in self._subjects or [">"]:
            about = {"seq": self._read, "next_by_subj": subject}
            try:
                found = await self._wire.link.ask(asked, about)
            except JetStreamError as error:
                if error.code != _NO_MESSAGE:
                    raise
            else:
                if int(found["message"]["seq"]) < self._own:
                    return False
        return True

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
        known = await self._info(self._consumer)
        count, unacked = int(known["num_pending"]), int(known["num_ack_pending"])
        if self._given < 0:
            return count + unacked, 0.0
        if self._is_again:  # The reader has not sent all of it.
            here = self._unacked.count + sum(messages.count for messages, _ in self._queue)
            count += max(0, unacked - here)
        return count + sum(int(np.count_nonzero(s >= at)) for _, s in self._queue), 0.0

    async def look(self, sequence: int) -> Mark | None:
        missed, counted = self._missed, self._counted
        found = await self._find(sequence, goes_on=False)
        self._missed, self._counted = missed, counted  # Nobody wants it again.
        return found.fingerprint(sequence)

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
        """Raise BusConnectionError where nothing will come any more: the lane begins anew."""
        self._wire.check_rights()
        if self._source is not None:
            self._source.check()

    # Acknowledging -------------------------------------------------------------------------------

    def _said(self, messages: Messages, sequences: Integers, word: bytes) -> bytes:
        """What the consumer is told of these: of what the reader has sent, too."""
        again = sequences < self._own
        if not again.any():
            return jetstream_codec.say(messages, word)
        own = messages.pick(~again)
        said = [jetstream_codec.say(own, word)] if own.count else []
        for row in np.flatnonzero(again).tolist():
            whom = jetstream_codec.of_consumer(messages.reply(row), self._consumer.encode())
            said.append(b"PUB %b %d\r\n%b\r\n" % (whom, len(word), word))
        return b"".join(said)

    async def keep(self, at: int, *, now: bool) -> None:
        self._is_kept = True
        self._through = at if self._through is None else max(at, self._through)
        for messages, sequences in self._unacked.take(at):
            self._core.write(self._said(messages, sequences, jetstream_codec.ACK))
        self._wire.link.flush()
        if now and self._wire.link.is_ready and not self._wire.lost:
            await self._wire.echoed()

    async def give_up(self, refusals: Sequence[Refusal]) -> int:
        left = sorted(refusals, key=lambda each: each.sequence)
        gone = 0
        while left:
            found = self._unacked.of(left)
            if not found:  # It was given out before it was asked for again.
                await self.look(left[0].sequence)
                found = self._unacked.of(left[:1])
            await bury(found, left, self._letters, self._framer)
            for messages, sequences in found:
                self._core.write(self._said(messages, sequences, jetstream_codec.TERMINATE))
            self._wire.link.flush()
            done = {sequence for _, sequences in found for sequence in sequences.tolist()}
            if not done:
                done, gone = {left[0].sequence}, gone + 1
            left = [each for each in left if each.sequence not in done]
        return gone

    def left(self, at: int) -> int:
        return 0


def _to(known: dict[str, Any]) -> str:
    """Where it leads; "" where no lane has ever begun with it."""
    return str((known["config"].get("metadata") or {}).get(_TO) or "")


def _subjects_of(known: dict[str, Any]) -> set[str]:
    """What it is sent; nothing for all that there is."""
    config = known["config"]
    if "filter_subject" in config:
        return {config["filter_subject"]}
    return set(config.get("filter_subjects") or ())


def _before(known: dict[str, Any]) -> int:
    """The sequence before the one at which it was to begin; 0 where that was not said."""
    return int(known["config"].get("opt_start_seq", 1)) - 1
