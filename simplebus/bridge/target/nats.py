"""Target for a NATS server: subjects, or a stream without replicas.

The channel becomes the subject, or `class.<name>` without a channel; the key becomes a header. NATS
has no message times: expired messages are skipped, delayed ones are sent at once.

Without JetStream a message counts as copied when the server has processed it, even without a
subscriber. With JetStream it counts when the stream has stored it. Each message has an id, so a
message that is sent again within the stream's duplicate window is stored once. The id consists of
bus, class, sequence and checksum. The checksum is needed because a source that was restored from an
old copy uses the sequences of lost messages again.
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

from simplebus.bridge.checkpoint import MessageFingerprint
from simplebus.bridge.interfaces import (
    STREAM_FULL,
    FatalConfigurationError,
    MessageSource,
    Refusal,
    SourceBatch,
    TargetBatch,
)
from simplebus.bridge.nats_connection import BridgeNatsConnection
from simplebus.bridge.reserved_headers import (
    denied_subject,
    encode_key,
    is_reserved_subject,
    strip_nats_headers,
)
from simplebus.bridge.source.identity import SourceIdentity
from simplebus.bridge.target.bus import TargetSettings
from simplebus.bridge.transform import (
    FrameRewriter,
    MessageRun,
    RewrittenFrames,
    SkipReason,
    UniformRun,
    is_unstuffed,
)
from simplebus.core.channel.pattern import matches
from simplebus.core.errors import BusConnectionError, LocalProtocolError, RemoteProtocolError
from simplebus.core.limits import DELIMITER_BYTES, HEADER_BYTES
from simplebus.core.protocol.envelope_batch import Envelope
from simplebus.core.protocol.frames import Flags, Integers
from simplebus.nats.bus.convert import format_header_block
from simplebus.nats.client import encode, jetstream_codec
from simplebus.nats.client.client import RequestReplies
from simplebus.nats.client.jetstream_codec import JetStreamError
from simplebus.nats.subjects import class_subject as subject_of

_SEQUENCE_DIGITS = 19
_CHECK_DIGITS = 10
_LINE_BYTES_MAX = 4096
"""Length of the arguments of PUB. Servers do not announce their limit; this is the default."""
_LINE_REST_BYTES_MAX = 128
"""Length of the arguments after the subject."""
_BATCHES_MAX = 4
_MESSAGES_MAX, _OLD_SERVER_MESSAGES_MAX = 24_576, 4096
"""Messages in flight before another batch is prepared, so that the server always has work.

A stream of a server before 2.14 refuses messages while 10,000 wait to be stored, by default. With
the batch that begins below the limit, twice as many can be in flight.
"""
_LARGE_BATCH_VERSION = 2, 14
_MAPPED_SUBJECTS_MAX = 64
"""Number of mapped subjects to remember."""
_STREAM_CHECK_SECONDS = 10.0
"""Interval at which the stream's configuration is checked while answers are awaited."""
_BATCH_LIMIT_MIN = 64
"""Fewer messages in flight make a copier slow, and other publishers would use the space anyway."""
TOO_MANY_REQUESTS = 429
_RETRYABLE_ERRORS = frozenset(
    {TOO_MANY_REQUESTS, 10002, 10008, 10009, 10023, 10028, 10047, 10158, 10167}
)
"""Transient JetStream errors: no space in the account or server, no leader, or too many messages
that still wait to be stored (429, 10167).
"""
_WRONG_STREAM = 10060
"""JetStream error: another stream has the subject."""
_NOT_STORED = 10077
_FINAL_STORE_ERRORS = frozenset({"maximum messages per subject exceeded", "message to large"})
"""Texts of `_NOT_STORED` for a message that will never be accepted. Other texts, such as for a full
stream or disk, are transient.
"""

StreamConfig = Mapping[str, Any]
"""Configuration of a stream, as JetStream reports it."""


@dataclass(slots=True)
class NatsBatch:
    """Messages encoded for NATS, and the answers to them."""

    commands: list[bytes | memoryview] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    """Number of messages, all of one length, in each command."""
    subjects: dict[bytes, list[Integers]] = field(default_factory=dict)
    """Sequences by subject."""
    number: int = 0
    """Reply number of the first message's PubAck; the others follow."""
    pending: Flags = field(default_factory=lambda: np.zeros(0, np.bool_))
    """True for each sent message without a PubAck."""
    ping_number: int = 0
    """Without JetStream, the number of the PING whose PONG confirms the batch."""
    refusals: list[Refusal] = field(default_factory=list)
    source_batch: SourceBatch | None = None
    """Source messages, for targets that prepare parts of the batch again."""
    unanswered: list[int] = field(default_factory=list)
    """Rows of messages that no stream, or another stream, answered."""
    batch_limit: int = 0
    """Batch limit at the time the batch was prepared."""


class TargetStreamState:
    """Limits of a target stream, kept from one connection to the next."""

    def __init__(self) -> None:
        self.batch_limit = 1 << 30
        """Number of messages that the stream accepts, or answers a query about, at once."""
        self.end = 0
        """Stream sequence of the last stored message; 0 if unknown."""
        self.mapped_subjects: set[bytes] = set()
        """Subjects that the stream stores although its configuration does not list them.

        The NATS account maps them to other subjects.
        """

    def reduce_batch_limit(self, count: int) -> None:
        """Halve the limit after the stream had no room for `count` messages."""
        self.batch_limit = min(self.batch_limit, max(_BATCH_LIMIT_MIN, count // 2))


class NatsTarget:
    """A NATS server or stream, over one connection."""

    def __init__(
        self,
        connection: BridgeNatsConnection,
        settings: TargetSettings,
        *,
        source: MessageSource,
        class_id: int,
        sequence_scope: str,
        source_identity: SourceIdentity,
        stream_state: TargetStreamState,
        stream: str,
        target_identities: Collection[str] = (),
        config: StreamConfig | None = None,
        config_fits: Callable[[StreamConfig], bool] = lambda config: True,
    ) -> None:
        """Create the target.

        Args:
            connection: Connection to the server.
            settings: Settings of the copier for its target.
            source: Opened source.
            class_id: Class of the messages, for message ids and for messages without a channel.
            sequence_scope: Scope in which a sequence of the source means one message.
            source_identity: Detection of a restored source.
            stream_state: Limits of the stream.
            stream: Name of the stream; empty for core NATS.
            target_identities: Names of the target in bridge paths. Messages that passed one of
                them are not copied.
            config: Configuration of the stream; None if it does not exist.
            config_fits: Returns False if another kind of target is needed for a configuration.
        """
        self.identity = ""
        self._connection, self._core = connection, connection.core
        self._stream = stream
        self._config_fits, self._checked_at = config_fits, trio.current_time()
        self._subjects = None if config is None else stream_subjects(config)
        """Subjects in the stream's configuration; None if unknown."""
        name = settings.class_ if isinstance(settings.class_, str) else ""
        self._subject = subject_of(class_id, name)
        self._source, self._source_identity = source, source_identity
        self._stream_state = stream_state
        self._id_prefix = f"{sequence_scope}{source_identity.era}.{class_id}.".encode()
        assert self._core.info is not None
        self._max_payload = self._core.info.max_payload
        stream_state.batch_limit = min(
            stream_state.batch_limit, _batch_limit_of(self._core.info.version)
        )
        self._channel_map = settings.channel_map
        self._rewriter = FrameRewriter(
            class_id=class_id,
            source=source.identity,
            targets=target_identities if settings.has_path else (),
            channels=settings.channels,
            channel_map=settings.channel_map,
            hops_max=settings.hops_max,
            frame_bytes_max=1 << 30,
            adds_path=settings.has_path,
        )
        self._sent: deque[TargetBatch] = deque()
        """Batches that are not settled."""

    def prepare(self, batch: SourceBatch) -> TargetBatch:
        if self._stream:
            batch = batch.limit(self._stream_state.batch_limit)
        frames, body = RewrittenFrames(), NatsBatch(batch_limit=self._stream_state.batch_limit)
        count = sum(run.count for run in batch.runs)
        if self._stream:
            body.number = self._core.reserve_numbers(count)
        number = body.number
        for run in batch.runs:
            before = frames.count
            if not self._encode_uniform(run, frames, body, number):
                self._encode_each(run, frames, body, number)
            number += frames.count - before
        prepared = TargetBatch(
            frames.all_sequences(),
            batch.next_sequence,
            body,
            frames.skipped_counts,
            frames.rejected,
        )
        if self._stream:
            prepared.last_fingerprint = (
                batch.fingerprint(int(prepared.sequences[-1])) if prepared.count else None
            )
        return prepared

    # Uniform runs --------------------------------------------------------------------------------

    def _encode_uniform(
        self, run: MessageRun, frames: RewrittenFrames, body: NatsBatch, number: int
    ) -> bool:
        """Encode a run whose messages have equal metadata and length. Returns False for another
        run.
        """
        if not run.stride:
            return False
        uniform = UniformRun.detect(run)
        if uniform is None or uniform.key[1] or not is_unstuffed(run):
            return False
        try:
            rewritten = self._rewrite_envelope(uniform.envelope, 0.0)
        except ValueError:
            return False
        if isinstance(rewritten, SkipReason):
            frames.skip(rewritten, run.count)
            return True
        payloads = run.slice_frames(
            uniform.prefix_bytes, run.stride - DELIMITER_BYTES - uniform.prefix_bytes
        )
        block = self._header_block(rewritten)
        headers: list[encode.Column] = [block] if block else []
        reply: list[encode.Column] = []
        if self._stream:
            headers = [*self._headers_with_ids(block, run.sequences, run.checksums()), b"\r\n\r\n"]
            reply = self._reply_columns(body, number, run.count)
        size = sum(len(c) if isinstance(c, bytes) else c.shape[1] for c in headers)
        subject = rewritten.channel.encode() or self._subject
        is_long = len(subject) + _LINE_REST_BYTES_MAX > _LINE_BYTES_MAX
        if is_long or size + payloads.shape[1] > self._max_payload:
            return False
        body.commands.append(
            encode.encode_equal_messages(subject, payloads, reply=reply, headers=headers)
        )
        body.counts.append(run.count)
        body.subjects.setdefault(subject, []).append(run.sequences)
        frames.sequences.append(run.sequences)
        return True

    def _rewrite_envelope(self, envelope: Envelope, age: float) -> Envelope | SkipReason:
        """Rewrite the envelope. Raises ValueError if the subject is reserved for the server."""
        rewritten = self._rewriter.rewrite_envelope(envelope, age)
        if isinstance(rewritten, SkipReason) or not is_reserved_subject(rewritten.channel):
            return rewritten
        if self._channel_map.sets_first_segment(envelope.channel):
            return rewritten
        raise ValueError(
            f"the subject {rewritten.channel!r} is reserved for the NATS server: only a rewrite "
            "rule that sets its first segment can publish there"
        )

    def _headers_with_ids(
        self, block: bytes, sequences: Integers, checks: Integers
    ) -> list[encode.Column]:
        """Return a header block without its end, and the message ids after it."""
        expected = b"Nats-Expected-Stream: %b\r\n" % self._stream.encode()
        start = block[:-2] + expected + jetstream_codec.MSG_ID + b": "
        return [start, *self._message_ids(sequences, checks)]

    def _message_ids(self, sequences: Integers, checks: Integers) -> list[encode.Column]:
        return [
            self._id_prefix,
            encode.format_digits(sequences, _SEQUENCE_DIGITS),
            b".",
            encode.format_digits(checks, _CHECK_DIGITS),
        ]

    def _reply_columns(self, body: NatsBatch, number: int, count: int) -> list[encode.Column]:
        """Return the reply subjects of the PubAcks, from `number` on."""
        return list(self._core.reply_subjects(number, count))

    def _header_block(self, rewritten: Envelope) -> bytes:
        """Return the header block; empty without headers."""
        headers = (*strip_nats_headers(rewritten.headers), *encode_key(rewritten.key))
        return format_header_block(headers) or (encode.encode_headers() if self._stream else b"")

    # Other runs, one message at a time -----------------------------------------------------------

    def _encode_each(
        self, run: MessageRun, frames: RewrittenFrames, body: NatsBatch, number: int
    ) -> None:
        raw, bounds = bytes(run.raw), run.bounds.tolist()
        ages = np.broadcast_to(run.ages, run.count).tolist()
        sequences: list[int] = []
        for row, sequence in enumerate(run.sequences.tolist()):
            frame = raw[bounds[row] : bounds[row + 1]]
            try:
                envelope, payload = self._rewriter.decode(
                    frame[0], frame[HEADER_BYTES:-DELIMITER_BYTES]
                )
                rewritten = self._rewrite_envelope(envelope, ages[row])
                if isinstance(rewritten, SkipReason):
                    frames.skip(rewritten)
                    continue
                id_parts = (
                    sequence,
                    MessageFingerprint.from_frame(frame, 0.0).checksum if self._stream else 0,
                )
                replies = (
                    self._reply_columns(body, number + len(sequences), 1) if self._stream else []
                )
                commands = self._encode_pub(rewritten, payload, id_parts, replies)
            except (ValueError, LocalProtocolError, RemoteProtocolError) as error:
                frames.skip(SkipReason.REJECTED)
                frames.rejected.append((sequence, str(error)))
                continue
            subject = rewritten.channel.encode() or self._subject
            body.commands.append(commands)
            body.counts.append(1)
            body.subjects.setdefault(subject, []).append(np.array([sequence]))
            sequences.append(sequence)
        frames.sequences.append(np.array(sequences, np.int64))

    def _encode_pub(
        self,
        rewritten: Envelope,
        payload: bytes,
        id_parts: tuple[int, int],
        replies: Sequence[encode.Column],
    ) -> bytes:
        """Encode a PUB or HPUB command. `id_parts` is sequence and checksum.

        Raises ValueError if the command exceeds a limit: the server would close the connection.
        """
        block, reply = self._header_block(rewritten), join_columns(replies)
        if self._stream:
            ids = self._headers_with_ids(block, *(np.array([id_part]) for id_part in id_parts))
            block = join_columns([*ids, b"\r\n\r\n"])
        if len(block) + len(payload) > self._max_payload:
            raise ValueError(
                f"it has {len(block) + len(payload)} bytes, expected at most {self._max_payload}"
            )
        subject = rewritten.channel.encode() or self._subject
        commands = encode.encode_pub(subject, payload, reply=reply, headers=block)
        line = commands.index(b"\r\n") - commands.index(b" ") - 1
        if line > _LINE_BYTES_MAX:
            raise ValueError(
                f"its command line has {line} bytes with a subject of {len(subject)} bytes; "
                f"expected at most {_LINE_BYTES_MAX} bytes"
            )
        return commands

    # Sending -------------------------------------------------------------------------------------

    @property
    def confirmed_count(self) -> int:
        bodies = [nats_batch(prepared) for prepared in self._sent]
        return sum(
            int(np.count_nonzero(~body.pending)) - len(body.refusals) - len(body.unanswered)
            for body in bodies
            if self._stream
        )

    @property
    def must_wait_for_announcement(self) -> bool:
        return False

    def has_room(self, planned: Sequence[TargetBatch]) -> bool:
        count = sum(prepared.count for prepared in (*planned, *self._sent))
        limit = self._stream_state.batch_limit if self._stream else _MESSAGES_MAX
        return len(planned) + len(self._sent) < _BATCHES_MAX and count < limit

    def announce(self, planned: Sequence[TargetBatch]) -> None:
        """Do nothing: NATS stores no bridge records."""

    async def wait_announced(self) -> list[Refusal]:
        return []

    def send(self, prepared: TargetBatch) -> None:
        body = nats_batch(prepared)
        for commands in body.commands:
            self._core.write(commands)
        if self._stream:
            body.pending = np.ones(prepared.count, np.bool_)
        else:
            body.ping_number = self._core.send_ping()
        self._connection.nats.flush()
        self._source_identity.note_sent(self._source, prepared)
        self._sent.append(prepared)

    async def settle_oldest(self) -> list[Refusal]:
        await self._wait_processed(self._sent[0])
        # They can concern later batches, so these are awaited, too.
        if self._connection.server_errors:
            for prepared in self._sent:
                await self._wait_processed(prepared)
            self._handle_server_errors()
        await self._note_mapped_subjects(self._sent[0])
        return nats_batch(self._sent.popleft()).refusals

    async def _wait_processed(self, prepared: TargetBatch) -> None:
        """Wait until the server has processed a batch, or the stream has stored or refused it.

        Raises BusConnectionError without an answer; everything is sent again then, and the stream
        drops the duplicates.
        """
        body, connection = nats_batch(prepared), self._connection
        if not self._stream:
            await connection.wait_processed(body.ping_number)
            return
        while body.pending.any():
            if not (connection.replies or connection.server_errors):
                await self._wait_pub_acks()
            for reply in connection.replies:
                for sent in self._sent:
                    self._apply_pub_acks(reply, sent)
            connection.replies.clear()
            self._handle_server_errors()
        if body.unanswered:
            await self._refuse_unanswered(prepared)

    async def _wait_pub_acks(self) -> None:
        """Wait for PubAcks. Checks the stream's configuration, and finds messages that get no
        answer.

        Raises:
            BusConnectionError: Messages for the stream get no answer.
            FatalConfigurationError: The stream never answers.
        """
        if trio.current_time() >= self._checked_at + _STREAM_CHECK_SECONDS:
            await self._check_stream_config()
            return  # PubAcks may have arrived meanwhile.
        try:
            await self._connection.wait_expected(f"a PubAck of stream {self._stream!r}")
        except BusConnectionError:
            if self._connection.lost_reason or not await self._find_unanswered():
                raise

    async def _find_unanswered(self) -> bool:
        """Mark messages that no stream accepts. Returns False if streams accept all messages.

        If another client has subscribed to their subject, the server does not report "no
        responders". Raises FatalConfigurationError if the stream never answers.
        """
        info = await self._connection.nats.api_request(f"STREAM.INFO.{self._stream}")
        if info["config"].get("no_ack"):
            raise FatalConfigurationError(
                f"stream {self._stream!r} does not confirm what it stores, and a bridge needs "
                "that: remove 'no_ack' from the stream, or configure the bridge without a "
                "stream"
            )
        subjects = stream_subjects(info["config"])
        return (
            sum(self._mark_unanswered(prepared, subjects) for prepared in self._awaiting_answers)
            > 0
        )

    def _mark_unanswered(self, prepared: TargetBatch, subjects: Sequence[str]) -> int:
        """Mark the messages of a batch that go to none of the subjects. Returns their number."""
        body = nats_batch(prepared)
        before = len(body.unanswered)
        for subject, sequences in body.subjects.items():
            if not self._accepts_subject(subject, subjects):
                rows = np.searchsorted(prepared.sequences, np.concatenate(sequences))
                body.unanswered += rows[body.pending[rows]].tolist()
        body.pending[body.unanswered] = False
        return len(body.unanswered) - before

    def _accepts_subject(self, subject: bytes, subjects: Sequence[str]) -> bool:
        """Return True if a stream with these subjects accepts `subject`, perhaps because it is
        mapped.
        """
        return (
            matches_any(subject.decode(), subjects) or subject in self._stream_state.mapped_subjects
        )

    async def _note_mapped_subjects(self, prepared: TargetBatch) -> None:
        """Remember subjects of a settled batch that the stream stored although it does not list
        them.

        The account maps them to other subjects. Otherwise messages on them would be refused while
        the stream has no leader.
        """
        body, mapped_subjects = nats_batch(prepared), self._stream_state.mapped_subjects
        if self._subjects is None or len(mapped_subjects) >= _MAPPED_SUBJECTS_MAX:
            return
        unlisted = [
            subject
            for subject in islice(body.subjects, _MAPPED_SUBJECTS_MAX)
            if not self._accepts_subject(subject, self._subjects)
        ]
        refused = {refusal.sequence for refusal in body.refusals} if unlisted else ()
        for subject in unlisted:
            if set(np.concatenate(body.subjects[subject]).tolist()) - set(refused):
                await self._check_stream_config()  # The stream may list more subjects by now.
                if not self._accepts_subject(subject, self._subjects):
                    mapped_subjects.add(subject)

    @property
    def _awaiting_answers(self) -> Sequence[TargetBatch]:
        """Batches that the stream should have answered."""
        return self._sent

    async def _check_stream_config(self) -> None:
        """Raise BusConnectionError if the stream now needs another kind of target."""
        self._checked_at = trio.current_time()
        try:
            info = await self._connection.nats.api_request(f"STREAM.INFO.{self._stream}")
        except (JetStreamError, BusConnectionError):
            self._connection.check()
            return  # The stream has no leader, or does not exist yet.
        self._subjects = stream_subjects(info["config"])
        if not self._config_fits(info["config"]):
            raise BusConnectionError(f"stream {self._stream!r} has a new configuration")

    async def _refuse_unanswered(self, prepared: TargetBatch) -> None:
        """Refuse messages that an available stream does not accept.

        Raises BusConnectionError if the stream is, or was, unavailable. Then everything is sent
        again in order.
        """
        body, stream = nats_batch(prepared), self._stream
        try:
            info = await self._connection.nats.api_request(f"STREAM.INFO.{stream}")
        except JetStreamError as error:
            raise BusConnectionError(f"stream {stream!r} did not answer: {error}") from None
        subjects = stream_subjects(info["config"])
        for subject, sequences in body.subjects.items():
            rows = np.searchsorted(prepared.sequences, np.concatenate(sequences))
            unanswered_rows = np.intersect1d(rows, body.unanswered)
            if not unanswered_rows.size:
                continue
            if self._accepts_subject(subject, subjects):
                raise BusConnectionError(
                    f"stream {stream!r} did not answer in time, but is available again"
                )
            reason = f"stream {stream!r} does not accept the subject {subject.decode()!r}"
            for sequence in prepared.sequences[unanswered_rows].tolist():
                body.refusals.append(Refusal(sequence, "no_stream", reason))
        body.unanswered.clear()

    def _handle_server_errors(self) -> None:
        """Refuse messages on subjects that the user may not publish on."""
        for server_error in dict.fromkeys(self._connection.server_errors):
            if subject := denied_subject(server_error):
                for prepared in self._sent:
                    self._refuse_denied_subject(prepared, subject, server_error)
        self._connection.server_errors.clear()

    def _refuse_denied_subject(
        self, prepared: TargetBatch, subject: bytes, server_error: str
    ) -> None:
        """Refuse the messages of a batch on this subject."""
        body = nats_batch(prepared)
        for sequences in body.subjects.pop(subject, []):
            rows = np.searchsorted(prepared.sequences, sequences)
            if self._stream:  # Messages that are already stored were not denied.
                rows = rows[body.pending[rows] | np.isin(rows, body.unanswered)]
                body.pending[rows] = False
                body.unanswered = np.setdiff1d(body.unanswered, rows).tolist()
            body.refusals += [
                Refusal(sequence, "permissions", server_error)
                for sequence in prepared.sequences[rows].tolist()
            ]

    def _apply_pub_acks(self, replies: RequestReplies, prepared: TargetBatch) -> None:
        """Apply the PubAcks of a batch that are among the replies."""
        body = nats_batch(prepared)
        rows = replies.numbers - body.number
        is_own = (rows >= 0) & (rows < prepared.count)
        if not is_own.any():
            return
        acks = jetstream_codec.parse_pub_acks(replies.messages)
        if duplicate_count := int(np.count_nonzero(acks.duplicates & is_own)):
            prepared.skipped_counts[SkipReason.DUPLICATE] = (
                prepared.skipped_counts.get(SkipReason.DUPLICATE, 0) + duplicate_count
            )
        for row, error in acks.errors.items():
            if not is_own[row]:
                continue
            if error.code in (jetstream_codec.NO_RESPONDERS, _WRONG_STREAM):
                body.unanswered.append(int(rows[row]))
                continue
            if error.code == TOO_MANY_REQUESTS:
                self._stream_state.reduce_batch_limit(body.batch_limit)
            sequence = int(prepared.sequences[rows[row]])
            is_full = error.code in _RETRYABLE_ERRORS or (
                error.code == _NOT_STORED and error.sentence not in _FINAL_STORE_ERRORS
            )
            code = STREAM_FULL if is_full else f"jetstream_{error.code}"
            body.refusals.append(Refusal(sequence, code, error.sentence))
        body.pending[rows[is_own]] = False


def nats_batch(prepared: TargetBatch) -> NatsBatch:
    assert isinstance(prepared.encoded, NatsBatch)
    return prepared.encoded


def _batch_limit_of(version: str) -> int:
    """Return how many messages a stream of this server version accepts at once."""
    match = re.match(r"(\d+)\.(\d+)", version)
    is_new = match is not None and (int(match[1]), int(match[2])) >= _LARGE_BATCH_VERSION
    return _MESSAGES_MAX if is_new else _OLD_SERVER_MESSAGES_MAX


def matches_any(subject: str, subjects: Sequence[str]) -> bool:
    """Return True if one of the patterns matches `subject`."""
    return any(matches(pattern, subject) for pattern in subjects)


def stream_subjects(config: StreamConfig) -> Sequence[str]:
    """Return the subjects of a stream."""
    return config.get("subjects") or []


def join_columns(columns: Sequence[encode.Column]) -> bytes:
    """Return the bytes of columns with one row."""
    return b"".join(column if isinstance(column, bytes) else column.tobytes() for column in columns)
