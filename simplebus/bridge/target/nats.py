"""A NATS server as the far end of a lane.

Rule 1: a channel is the subject; what has none goes to `class.<name>`. Headers go as they are but
for those of NATS itself (`nats_words`), the key becomes one. NATS knows no times: what
is over is left out, the rest goes at once.
Rule 2: without JetStream, a message counts as copied when the server has dealt with it; whether
anybody was there to hear it, NATS does not say. With JetStream, when the stream has it: a message
that comes again within the stream's window of duplicates is stored once, by its id: the near bus,
the class, the sequence, and a checksum, as the near bus may have come back from an old copy, where
others have the sequences of lost ones.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np
import trio

from simplebus.bridge.checkpoint import Mark
from simplebus.bridge.interfaces import STREAM_FULL, SourceBatch, FatalConfigurationError, TargetBatch, Near, Refusal
from simplebus.bridge.nats_connection import NatsWire
from simplebus.bridge.reserved_headers import denied, is_reserved, key_headers, without_words
from simplebus.bridge.source.identity import Looked
from simplebus.bridge.target.bus import FarTerms
from simplebus.bridge.transform import Alike, Copies, Left, Piece, Rewriter, is_unstuffed
from simplebus.core.channel.pattern import matches
from simplebus.core.errors import BusConnectionError, LocalProtocolError, RemoteProtocolError
from simplebus.core.limits import DELIMITER_BYTES, HEADER_BYTES
from simplebus.core.protocol.envelope_batch import Envelope
from simplebus.core.protocol.frames import Flags, Integers
from simplebus.nats.bus.convert import format_header_block
from simplebus.nats.bus.convert import class_subject as subject_of
from simplebus.nats.client import encode, jetstream_codec
from simplebus.nats.client.client import Replies
from simplebus.nats.client.jetstream_codec import JetStreamError

_SEQUENCE_DIGITS = 19
_CHECK_DIGITS = 10
_LINE_BYTES_MAX = 4096
"""What may stand behind PUB: a server does not say what it takes, and this is the usual."""
_LINE_REST_BYTES_MAX = 128
"""What stands there behind a subject."""
_BATCHES_MAX = 4
_MESSAGES_MAX, _OLD_MESSAGES_MAX = 24_576, 4096
"""So much is under way: the server has something to do while others are made. A stream of a server
before 2.14 holds 10,000 messages that it is about to store, unless told otherwise, and refuses what
comes then: with the batch that is begun below this bound, twice as many may be there."""
_NEW_SERVER = 2, 14
_MAPPED_MAX = 64
"""Of more subjects it is not known that a stream takes them under others."""
_LOOK_SECONDS = 10.0
"""So often a stream is looked at while its answers are waited for."""
TOO_MANY = 429
_PASSING = frozenset({TOO_MANY, 10002, 10008, 10009, 10023, 10028, 10047, 10158, 10167})
"""The account or the server has no room, or the cluster no leader, or is still about to store what
it was sent before, perhaps so much that it takes no more (429, 10167): that passes."""
_ANOTHER_STREAM = 10060
"""It is another one that takes the subject."""
_NOT_STORED = 10077
_FINAL = frozenset({"maximum messages per subject exceeded", "message to large"})
"""What it says then of a message that it will not take later either: that it is full, or that its
disk is, passes."""

Config = Mapping[str, Any]
"""How a stream is kept."""


@dataclass(slots=True)
class Body:
    """What is said of some messages."""

    said: list[bytes | memoryview] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    """Of how many messages, all of one length, each part of it is."""
    subjects: dict[bytes, list[Integers]] = field(default_factory=dict)
    """Which sequences go where."""
    number: int = 0
    """That of the first one's PubAck; the others' follow."""
    missing: Flags = field(default_factory=lambda: np.zeros(0, np.bool_))
    """Whose PubAck has not come, once they are sent."""
    mark: int = 0
    """Without JetStream, what the core asks for behind them."""
    refusals: list[Refusal] = field(default_factory=list)
    found: SourceBatch | None = None
    """What they are made of, where parts of it may be made again."""
    unheard: list[int] = field(default_factory=list)
    """Rows of those that no stream has answered, or another one."""
    room: int = 0
    """How many might be made at once when they were."""


class FarNats:
    """One connection."""

    def __init__(
        self,
        wire: NatsWire,
        terms: FarTerms,
        *,
        near: Near,
        class_id: int,
        life: str,
        looked: Looked,
        stream: str,
        there: Collection[str] = (),
        config: Config | None = None,
        fits: Callable[[Config], bool] = lambda config: True,
    ) -> None:
        """Within a `life` of the near bus a sequence means one message.
        `there`: what is read from these is known by these identities; what has been there does not
        go back. `config` is how the stream is kept, None for one that is not there; `fits` tells
        whether messages go as they should to one that is kept so."""
        self.identity = ""
        self._wire, self._core = wire, wire.core
        self._stream = stream
        self._fits, self._looked_at = fits, trio.current_time()
        self._subjects = None if config is None else subjects_of(config)
        """Those that the stream says it takes, as far as is known."""
        name = terms.class_ if isinstance(terms.class_, str) else ""
        self._subject = subject_of(class_id, name)
        self._near, self._looked = near, looked
        self._id = f"{life}{looked.era}.{class_id}.".encode()
        assert self._core.info is not None
        self._most = self._core.info.max_payload
        looked.room = min(looked.room, _room_of(self._core.info.version))
        self._renaming = terms.renaming
        self._rewriter = Rewriter(
            class_id=class_id,
            here=near.identity,
            there=there if terms.path else (),
            channels=terms.channels,
            renaming=terms.renaming,
            hops=terms.hops,
            frame_bytes_max=1 << 30,
            path=terms.path,
        )
        self._sent: deque[TargetBatch] = deque()
        """What is not settled."""

    def make(self, found: SourceBatch) -> TargetBatch:
        if self._stream:
            found = found.limit(self._looked.room)
        copies, body = Copies(), Body(room=self._looked.room)
        count = sum(piece.count for piece in found.runs)
        if self._stream:
            body.number = self._core.take_numbers(count)
        number = body.number
        for piece in found.runs:
            before = copies.count
            if not self._many(piece, copies, body, number):
                self._each(piece, copies, body, number)
            number += copies.count - before
        made = TargetBatch(copies.numbers(), found.next_sequence, body, copies.left, copies.refused)
        if self._stream:
            made.last_fingerprint = found.fingerprint(int(made.sequences[-1])) if made.count else None
        return made

    # Many at once --------------------------------------------------------------------------------

    def _many(self, piece: Piece, copies: Copies, body: Body, number: int) -> bool:
        """The messages of a piece that are alike, and of one length. False where they are not."""
        if not piece.stride:
            return False
        alike = Alike.of(piece)
        if alike is None or alike.key[1] or not is_unstuffed(piece):
            return False
        try:
            dressed = self._dressed(alike.envelope, 0.0)
        except ValueError:
            return False
        if isinstance(dressed, Left):
            copies.leave(dressed, piece.count)
            return True
        payloads = piece.cut(alike.skip, piece.stride - DELIMITER_BYTES - alike.skip)
        block = self._block(dressed)
        headers: list[encode.Column] = [block] if block else []
        reply: list[encode.Column] = []
        if self._stream:
            headers = [*self._ids(block, piece.sequences, piece.checks()), b"\r\n\r\n"]
            reply = self._replies(body, number, piece.count)
        size = sum(len(c) if isinstance(c, bytes) else c.shape[1] for c in headers)
        subject = dressed.channel.encode() or self._subject
        is_long = len(subject) + _LINE_REST_BYTES_MAX > _LINE_BYTES_MAX
        if is_long or size + payloads.shape[1] > self._most:
            return False
        body.said.append(encode.alike(subject, payloads, reply=reply, headers=headers))
        body.counts.append(piece.count)
        body.subjects.setdefault(subject, []).append(piece.sequences)
        copies.sequences.append(piece.sequences)
        return True

    def _dressed(self, envelope: Envelope, age: float) -> Envelope | Left:
        """As the rewriter has it. Raises ValueError for a subject that is not for messages."""
        dressed = self._rewriter.dressed(envelope, age)
        if isinstance(dressed, Left) or not is_reserved(dressed.channel):
            return dressed
        if self._renaming.names(envelope.channel):
            return dressed
        raise ValueError(
            f"the subject {dressed.channel!r} is the NATS server's own: only a rewrite that begins "
            "with its first segment leads there"
        )

    def _ids(self, block: bytes, sequences: Integers, checks: Integers) -> list[encode.Column]:
        """A block of headers without its end, and behind it the ids by which a stream knows its
        messages."""
        expected = b"Nats-Expected-Stream: %b\r\n" % self._stream.encode()
        start = block[:-2] + expected + jetstream_codec.MSG_ID + b": "
        return [start, *self._message_ids(sequences, checks)]

    def _message_ids(self, sequences: Integers, checks: Integers) -> list[encode.Column]:
        return [
            self._id,
            encode.digits(sequences, _SEQUENCE_DIGITS),
            b".",
            encode.digits(checks, _CHECK_DIGITS),
        ]

    def _replies(self, body: Body, number: int, count: int) -> list[encode.Column]:
        """Where PubAcks are to go of messages that are written from this number on."""
        return list(self._core.replies_to(number, count))

    def _block(self, dressed: Envelope) -> bytes:
        """Its headers; empty for none."""
        headers = (*without_words(dressed.headers), *key_headers(dressed.key))
        return format_header_block(headers) or (encode.block() if self._stream else b"")

    # One by one ----------------------------------------------------------------------------------

    def _each(self, piece: Piece, copies: Copies, body: Body, number: int) -> None:
        raw, bounds = bytes(piece.raw), piece.bounds.tolist()
        ages = np.broadcast_to(piece.ages, piece.count).tolist()
        kept: list[int] = []
        for row, sequence in enumerate(piece.sequences.tolist()):
            frame = raw[bounds[row] : bounds[row + 1]]
            try:
                envelope, payload = self._rewriter.read(
                    frame[0], frame[HEADER_BYTES:-DELIMITER_BYTES]
                )
                dressed = self._dressed(envelope, ages[row])
                if isinstance(dressed, Left):
                    copies.leave(dressed)
                    continue
                about = sequence, Mark.of(frame, 0.0).check if self._stream else 0
                replies = self._replies(body, number + len(kept), 1) if self._stream else []
                said = self._said(dressed, payload, about, replies)
            except (ValueError, LocalProtocolError, RemoteProtocolError) as error:
                copies.leave(Left.REFUSED)
                copies.refused.append((sequence, str(error)))
                continue
            subject = dressed.channel.encode() or self._subject
            body.said.append(said)
            body.counts.append(1)
            body.subjects.setdefault(subject, []).append(np.array([sequence]))
            kept.append(sequence)
        copies.sequences.append(np.array(kept, np.int64))

    def _said(
        self,
        dressed: Envelope,
        payload: bytes,
        about: tuple[int, int],
        replies: Sequence[encode.Column],
    ) -> bytes:
        """`about` is its sequence and its checksum. Raises ValueError for what is longer than the
        server accepts: it would close the connection."""
        block, reply = self._block(dressed), joined(replies)
        if self._stream:
            ids = self._ids(block, *(np.array([each]) for each in about))
            block = joined([*ids, b"\r\n\r\n"])
        if len(block) + len(payload) > self._most:
            raise ValueError(
                f"it would have {len(block) + len(payload)} bytes; {self._most} are accepted there"
            )
        subject = dressed.channel.encode() or self._subject
        said = encode.pub(subject, payload, reply=reply, headers=block)
        line = said.index(b"\r\n") - said.index(b" ") - 1
        if line > _LINE_BYTES_MAX:
            raise ValueError(
                f"its subject has {len(subject)} bytes, and its line {line}: "
                f"{_LINE_BYTES_MAX} are accepted there"
            )
        return said

    # Sending -------------------------------------------------------------------------------------

    @property
    def confirmed(self) -> int:
        bodies = [body_of(made) for made in self._sent]
        return sum(
            int(np.count_nonzero(~body.missing)) - len(body.refusals) - len(body.unheard)
            for body in bodies
            if self._stream
        )

    @property
    def must_wait(self) -> bool:
        return False

    def has_room(self, planned: Sequence[TargetBatch]) -> bool:
        count = sum(made.count for made in (*planned, *self._sent))
        most = self._looked.room if self._stream else _MESSAGES_MAX
        return len(planned) + len(self._sent) < _BATCHES_MAX and count < most

    def announce(self, planned: Sequence[TargetBatch]) -> None:
        """Nobody there would remember it."""

    async def announced(self) -> list[Refusal]:
        return []

    def send(self, made: TargetBatch) -> None:
        body = body_of(made)
        for said in body.said:
            self._core.write(said)
        if self._stream:
            body.missing = np.ones(made.count, np.bool_)
        else:
            body.mark = self._core.mark()
        self._wire.link.flush()
        self._looked.note(self._near, made)
        self._sent.append(made)

    async def settle(self) -> list[Refusal]:
        await self._dealt_with(self._sent[0])
        if self._wire.complaints:  # Whom they are about is known when all is dealt with.
            for made in self._sent:
                await self._dealt_with(made)
            self._hear_complaints()
        await self._note_mapped(self._sent[0])
        return body_of(self._sent.popleft()).refusals

    async def _dealt_with(self, made: TargetBatch) -> None:
        """Wait until the server has dealt with a batch; a stream: has stored or refused it. Raises
        BusConnectionError where nobody does: all is sent again then, and the stream knows it."""
        body, wire = body_of(made), self._wire
        if not self._stream:
            await wire.passed(body.mark)
            return
        while body.missing.any():
            if not (wire.replies or wire.complaints):
                await self._pub_acks()
            for each in wire.replies:
                for sent in self._sent:
                    self._take(each, sent)
            wire.replies.clear()
            self._hear_complaints()
        if body.unheard:
            await self._sort_unheard(made)

    async def _pub_acks(self) -> None:
        """Wait for some, or look after the stream; or learn that none comes of some messages,
        which are unheard then. Raises BusConnectionError where none comes of others, and
        HopelessError where none ever will."""
        if trio.current_time() >= self._looked_at + _LOOK_SECONDS:
            await self._look_after()
            return  # Some may have come meanwhile.
        try:
            await self._wire.owed(f"a PubAck of stream {self._stream!r}")
        except BusConnectionError:
            if self._wire.lost or not await self._leave_unheard():
                raise

    async def _leave_unheard(self) -> bool:
        """Whether some messages are not for the stream that it says nothing of: where somebody else
        hears them, the server does not say that nobody does. Raises HopelessError where it never
        says anything."""
        info = await self._wire.link.ask(f"STREAM.INFO.{self._stream}")
        if info["config"].get("no_ack"):
            raise FatalConfigurationError(
                f"stream {self._stream!r} does not say what it has stored, and a bridge has to "
                "know: take 'no_ack' from the stream, or have the lane lead to NATS without a "
                "stream"
            )
        taken = subjects_of(info["config"])
        return sum(self._leave(made, taken) for made in self._silent) > 0

    def _leave(self, made: TargetBatch, taken: Sequence[str]) -> int:
        """Wait no more for what of a batch goes to none of these subjects. Returns how many do."""
        body = body_of(made)
        before = len(body.unheard)
        for subject, sequences in body.subjects.items():
            if not self._is_for(subject, taken):
                rows = np.searchsorted(made.sequences, np.concatenate(sequences))
                body.unheard += rows[body.missing[rows]].tolist()
        body.missing[body.unheard] = False
        return len(body.unheard) - before

    def _is_for(self, subject: bytes, taken: Sequence[str]) -> bool:
        """Whether a stream that says it takes these subjects takes this one."""
        return is_taken(subject.decode(), taken) or subject in self._looked.mapped

    async def _note_mapped(self, made: TargetBatch) -> None:
        """Of a batch that is dealt with, note what a stream has stored of a subject that it does
        not name: servers may be told to give messages another one. While such a stream is away
        nobody answers, and its configuration would say that it does not take them."""
        body, mapped = body_of(made), self._looked.mapped
        if self._subjects is None or len(mapped) >= _MAPPED_MAX:
            return
        odd = [
            subject
            for subject in islice(body.subjects, _MAPPED_MAX)
            if not self._is_for(subject, self._subjects)
        ]
        refused = {each.sequence for each in body.refusals} if odd else ()
        for subject in odd:
            if set(np.concatenate(body.subjects[subject]).tolist()) - set(refused):
                await self._look_after()  # It may take more subjects by now.
                if not self._is_for(subject, self._subjects):
                    mapped.add(subject)

    @property
    def _silent(self) -> Sequence[TargetBatch]:
        """Of these the stream should have said something."""
        return self._sent

    async def _look_after(self) -> None:
        """Raise BusConnectionError where the stream is kept otherwise than it was: the lane begins
        anew, and as that wants."""
        self._looked_at = trio.current_time()
        try:
            info = await self._wire.link.ask(f"STREAM.INFO.{self._stream}")
        except (JetStreamError, BusConnectionError):
            self._wire.check()
            return  # Nobody leads it, or it is not there yet: next time.
        self._subjects = subjects_of(info["config"])
        if not self._fits(info["config"]):
            raise BusConnectionError(f"stream {self._stream!r} is kept otherwise than it was")

    async def _sort_unheard(self, made: TargetBatch) -> None:
        """Refuse what the stream does not take though it is there. Raises BusConnectionError where
        it is not, or was not: all is sent again then, in its order."""
        body, stream = body_of(made), self._stream
        try:
            info = await self._wire.link.ask(f"STREAM.INFO.{stream}")
        except JetStreamError as error:
            raise BusConnectionError(f"no stream {stream!r} took it: {error}") from None
        taken = subjects_of(info["config"])
        for subject, sequences in body.subjects.items():
            rows = np.searchsorted(made.sequences, np.concatenate(sequences))
            unheard = np.intersect1d(rows, body.unheard)
            if not unheard.size:
                continue
            if self._is_for(subject, taken):
                raise BusConnectionError(f"no stream {stream!r} took it: it is there again")
            why = f"stream {stream!r} does not take the subject {subject.decode()!r}"
            for sequence in made.sequences[unheard].tolist():
                body.refusals.append(Refusal(sequence, "no_stream", why))
        body.unheard.clear()

    def _hear_complaints(self) -> None:
        """Note whom complaints of the server are about."""
        for complaint in dict.fromkeys(self._wire.complaints):
            if subject := denied(complaint):
                for made in self._sent:
                    self._deny(made, subject, complaint)
        self._wire.complaints.clear()

    def _deny(self, made: TargetBatch, subject: bytes, complaint: str) -> None:
        """Nothing of a batch is taken that goes to this subject."""
        body = body_of(made)
        for sequences in body.subjects.pop(subject, []):
            rows = np.searchsorted(made.sequences, sequences)
            if self._stream:  # What is stored already was not denied.
                rows = rows[body.missing[rows] | np.isin(rows, body.unheard)]
                body.missing[rows] = False
                body.unheard = np.setdiff1d(body.unheard, rows).tolist()
            body.refusals += [
                Refusal(each, "permissions", complaint) for each in made.sequences[rows].tolist()
            ]

    def _take(self, found: Replies, made: TargetBatch) -> None:
        """What of these are PubAcks of a batch."""
        body = body_of(made)
        rows = found.numbers - body.number
        mine = (rows >= 0) & (rows < made.count)
        if not mine.any():
            return
        acks = jetstream_codec.pub_acks(found.messages)
        if known := int(np.count_nonzero(acks.duplicates & mine)):
            made.skipped_counts[Left.KNOWN] = made.skipped_counts.get(Left.KNOWN, 0) + known
        for row, error in acks.errors.items():
            if not mine[row]:
                continue
            if error.code in (jetstream_codec.NO_RESPONDERS, _ANOTHER_STREAM):
                body.unheard.append(int(rows[row]))
                continue
            if error.code == TOO_MANY:
                self._looked.too_many(body.room)
            sequence = int(made.sequences[rows[row]])
            is_full = error.code in _PASSING or (
                error.code == _NOT_STORED and error.sentence not in _FINAL
            )
            code = STREAM_FULL if is_full else f"jetstream_{error.code}"
            body.refusals.append(Refusal(sequence, code, error.sentence))
        body.missing[rows[mine]] = False


def body_of(made: TargetBatch) -> Body:
    assert isinstance(made.encoded, Body)
    return made.encoded


def _room_of(version: str) -> int:
    """How many messages may be made for a stream of such a server at once."""
    found = re.match(r"(\d+)\.(\d+)", version)
    is_new = found is not None and (int(found[1]), int(found[2])) >= _NEW_SERVER
    return _MESSAGES_MAX if is_new else _OLD_MESSAGES_MAX


def is_taken(subject: str, taken: Sequence[str]) -> bool:
    """Whether a stream with these subjects takes it."""
    return any(matches(pattern, subject) for pattern in taken)


def subjects_of(config: Config) -> Sequence[str]:
    """Those that a stream says it takes."""
    return config.get("subjects") or []


def joined(columns: Sequence[encode.Column]) -> bytes:
    """Of columns for one message, what it has."""
    return b"".join(each if isinstance(each, bytes) else each.tobytes() for each in columns)
