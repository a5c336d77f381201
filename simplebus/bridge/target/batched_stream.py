"""Target for a stream with fast batches, which keep their order even if the stream's leader
changes.

A stream stores a message of a fast batch only after all earlier ones of the batch, and one
batch is in flight at a time. So a change of the leader can lose the end of a batch, but nothing
before it.

No message is sent in two batches: a server would confirm the second batch from the messages of
the first, even if no other server has these yet. Messages that may have been sent before are
queried by message id. The last message that a stream confirms is queried too, by its id or by
its stream sequence, and the stream sequence must have grown by the number of messages. These
checks prevent a loss: while a stream is given fewer replicas, nats-server 2.15 may store a part
of a batch and confirm all of it.

A message at which a batch ends early is sent again alone. The stream then answers with the error.

    uncertain ──query──► batch sent ──confirmed, queried──► stored
        ▲                     └──ended early──► first unstored message alone, then the rest
        └───────────────────────────────────────────────────────┘
"""

from __future__ import annotations

from base64 import b64decode
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import trio

from simplebus.bridge.interfaces import STREAM_FULL, Refusal, SourceBatch, TargetBatch
from simplebus.bridge.nats_connection import BridgeNatsConnection
from simplebus.bridge.reserved_headers import denied_subject
from simplebus.bridge.target.nats import (
    TOO_MANY_REQUESTS,
    NatsBatch,
    NatsTarget,
    join_columns,
    nats_batch,
)
from simplebus.bridge.transform import SkipReason
from simplebus.core.errors import BusConnectionError
from simplebus.core.protocol.frames import Flags, Integers
from simplebus.nats.client import encode, jetstream_codec
from simplebus.nats.client.events import ReceivedMessages
from simplebus.nats.client.jetstream_codec import JetStreamError
from simplebus.net.nats_connection import new_inbox

_BATCH_MESSAGES_MAX = 8192
_INDEX_DIGITS = 4
_REPLY_TOKENS = 6
"""Tokens of a reply subject after the inbox: number, flow, mode, index, step, $FI."""
_START, _APPEND, _COMMIT = b"0", b"1", b"2"
"""Steps of a fast batch."""
_NOT_ABOUT_A_MESSAGE = frozenset({0, 10208})
"""Errors of the messages after the end of a batch, and unknown errors."""
_BATCHES_NOT_ALLOWED = 10205
"""JetStream error: the stream does not accept fast batches."""
_NOT_STORED_ERRORS = frozenset({jetstream_codec.NO_ROLLUP, jetstream_codec.NO_RESPONDERS})
"""Answers to a query for a message that is not stored, or that no stream answers."""

assert _BATCH_MESSAGES_MAX < 10**_INDEX_DIGITS


class _PermissionDeniedError(Exception):
    """The server sent an error for a message of the batch."""


class _UnansweredError(Exception):
    """No stream accepts some messages of the batch."""


@dataclass(slots=True)
class _FastBatch:
    """The fast batch in flight."""

    number: int
    sequences: Integers
    progressed_at: float
    """Time at which the batch was sent, or at which the stream last confirmed more of it."""
    reported_count: int = 0
    """Messages that the stream reported as stored so far."""
    stored_count: int = -1
    """Messages that are stored when the batch has ended, from the first on; -1 if unknown."""
    last_stored: int = 0
    """Stream sequence of the last message, if the stream sent it."""
    has_ended: bool = False
    """True after the last answer to the batch."""
    error: str = ""
    """First error of one of its messages."""
    is_message_error: bool = False
    """True if the error concerns the message itself."""
    is_too_long: bool = False
    """True if the stream has no room for so many messages at once."""
    is_not_allowed: bool = False
    """True if a stream does not accept fast batches; perhaps another stream with one of the
    subjects.
    """
    unanswered: list[int] = field(default_factory=list)
    """Rows of the messages that no stream answered."""


class BatchedStreamTarget(NatsTarget):
    """A stream with `allow_batched`, over one connection."""

    def __init__(self, connection: BridgeNatsConnection, *args: Any, **options: Any) -> None:
        super().__init__(connection, *args, **options)
        self._fast_batch: _FastBatch | None = None
        self._is_uncertain = True
        """True if the next messages may already be stored."""
        self._is_single = False
        """True while one message is prepared and sent alone."""
        self._retry_reason: Refusal | None = None
        """Refusal after which nothing more is sent; None if no message was refused."""
        self._inbox = new_inbox()
        self._batch_name_prefix = self._inbox.rpartition(".")[2].encode() + b"-"
        connection.on_messages = self._on_messages
        self._core.subscribe(f"{self._inbox}.>")

    # Preparing -----------------------------------------------------------------------------------

    def prepare(self, batch: SourceBatch) -> TargetBatch:
        batch = batch.limit(min(_BATCH_MESSAGES_MAX, self._stream_state.batch_limit))
        prepared = super().prepare(batch)
        nats_batch(prepared).source_batch = batch
        if prepared.count and not self._is_single:
            self._mark_last(nats_batch(prepared), prepared.count)
        return prepared

    def _reply_columns(self, body: NatsBatch, number: int, count: int) -> list[encode.Column]:
        if self._is_single:
            return super()._reply_columns(body, number, count)
        first = number - body.number + 1
        steps = np.full((count, 1), _APPEND[0], np.uint8)
        if first == 1:
            steps[0] = _START[0]
        index = encode.format_digits(np.arange(first, first + count), _INDEX_DIGITS)
        return [self._reply_prefix(body.number), index, b".", steps, b".$FI"]

    def _reply_prefix(self, number: int) -> bytes:
        """Return the start of the reply subjects of a batch. It is unique across connections."""
        inbox, flow = self._inbox.encode(), jetstream_codec.FAST_BATCH_ACK_MESSAGES
        return b"%b.%b%d.%d.fail." % (inbox, self._batch_name_prefix, number, flow)

    def _mark_last(self, body: NatsBatch, count: int) -> None:
        """Mark the last of `count` messages as the end of the batch."""
        command = bytes(body.commands[-1])
        reply = b"%b%0*d." % (self._reply_prefix(body.number), _INDEX_DIGITS, count)
        position = command.rindex(reply) + len(reply)
        body.commands[-1] = b"".join((command[:position], _COMMIT, command[position + 1 :]))

    def _select(self, prepared: TargetBatch, sequences: Integers) -> TargetBatch:
        """Prepare some messages of a batch again."""
        batch = nats_batch(prepared).source_batch
        assert batch is not None, "prepared by another target"
        return self.prepare(replace(batch, runs=batch.select(sequences)))

    # Sending -------------------------------------------------------------------------------------

    def send(self, prepared: TargetBatch) -> None:
        nats_batch(prepared).pending = np.ones(prepared.count, np.bool_)
        self._source_identity.note_sent(self._source, prepared)
        self._sent.append(prepared)
        if len(self._sent) == 1 and not self._is_uncertain:
            self._start_batch(prepared, prepared.sequences)

    async def settle_oldest(self) -> list[Refusal]:
        prepared = self._sent[0]
        if self._retry_reason is None:
            await self._store_batch(prepared)
        refusals = nats_batch(prepared).refusals
        if self._retry_reason is not None:
            refusals += _refuse_each(
                self._retry_reason, prepared.sequences[nats_batch(prepared).pending]
            )
        await self._note_mapped_subjects(prepared)
        self._sent.popleft()
        if not self._sent:
            self._retry_reason = None
        elif self._retry_reason is None and not self._is_uncertain:
            self._start_batch(self._sent[0], self._sent[0].sequences)
        return refusals

    def _start_batch(self, prepared: TargetBatch, remaining: Integers) -> None:
        """Send the remaining messages of `prepared` as a fast batch."""
        is_whole = remaining.size == prepared.count <= self._stream_state.batch_limit
        to_send = prepared if is_whole else self._select(prepared, remaining)
        body = nats_batch(to_send)
        for commands in body.commands:
            self._core.write(commands)
        self._connection.server_errors.clear()
        self._connection.nats.flush()
        self._fast_batch = _FastBatch(body.number, to_send.sequences, trio.current_time())

    async def _store_batch(self, prepared: TargetBatch) -> None:
        """Send until every message is stored or refused.

        Raises BusConnectionError if the result is unknown; the next connection queries all
        messages.
        """
        body = nats_batch(prepared)
        while self._retry_reason is None and body.pending.any():
            try:
                await self._advance(prepared, prepared.sequences[body.pending])
            except _PermissionDeniedError:
                self._fast_batch = None
                self._refuse_denied_messages(prepared)
            except _UnansweredError:
                self._fast_batch, self._is_uncertain = None, True
                await self._refuse_unanswered(prepared)

    async def _advance(self, prepared: TargetBatch, remaining: Integers) -> None:
        """Process the result of the fast batch in flight, or send the next one."""
        if self._fast_batch is None:
            if self._is_uncertain and await self._are_stored(prepared, remaining[:1]):
                remaining = await self._find_unstored(prepared, remaining)
            self._is_uncertain = not remaining.size
            if remaining.size:
                self._start_batch(prepared, remaining)
            return
        fast_batch, self._fast_batch = await self._wait_ended(), None
        if fast_batch.is_too_long:
            self._stream_state.reduce_batch_limit(fast_batch.sequences.size)
        if fast_batch.is_not_allowed:
            await self._check_batches_allowed()
        stored = max(0, fast_batch.stored_count)
        if stored:
            end = fast_batch.sequences[stored - 1 : stored]
            is_confirmed = await self._are_stored(prepared, end) or await self._is_stored_at(
                prepared, end, fast_batch.last_stored
            )
            has_grown = fast_batch.last_stored >= self._stream_state.end + stored
            self._stream_state.end = fast_batch.last_stored or self._stream_state.end
            if not is_confirmed or (fast_batch.last_stored and not has_grown):
                raise BusConnectionError(
                    f"stream {self._stream!r} does not have the messages that it confirmed"
                )
            self._mark_settled(prepared, fast_batch.sequences[:stored])
        if stored >= fast_batch.sequences.size:
            return
        if fast_batch.stored_count >= 0 or fast_batch.is_message_error:
            await self._store_single(prepared, fast_batch.sequences[stored])
            self._is_uncertain = fast_batch.stored_count < 0
        else:
            await self._handle_unknown_result(prepared, fast_batch)

    async def _check_batches_allowed(self) -> None:
        """Raise BusConnectionError if the stream lost `allow_batched`. The next connection sends
        no batches.
        """
        info = await self._connection.nats.api_request(f"STREAM.INFO.{self._stream}")
        if not info["config"].get("allow_batched"):
            raise BusConnectionError(
                f"stream {self._stream!r} no longer accepts fast batches (allow_batched)"
            )

    def _subject_of_stream(self, body: NatsBatch) -> bytes:
        """Return a subject of the messages, if possible one of the stream."""
        for subject in body.subjects:
            if self._accepts_subject(subject, self._subjects or ()):
                return subject
        return next(iter(body.subjects))

    def _mark_settled(self, prepared: TargetBatch, sequences: Integers) -> None:
        """Mark messages as stored or refused."""
        nats_batch(prepared).pending[np.searchsorted(prepared.sequences, sequences)] = False

    # Answers -------------------------------------------------------------------------------------

    def _on_messages(self, messages: ReceivedMessages) -> None:
        """Handle answers to the fast batch in flight."""
        for row in range(messages.count):
            tokens = messages.subject(row)[len(self._inbox) + 1 :].split(b".")
            fast_batch = self._fast_batch
            if (
                fast_batch is None
                or len(tokens) != _REPLY_TOKENS
                or tokens[0] != b"%b%d" % (self._batch_name_prefix, fast_batch.number)
            ):
                continue
            answer = jetstream_codec.parse_fast_batch_reply(
                messages.headers(row), messages.payload(row)
            )
            index = jetstream_codec.parse_number(tokens[3], 0)
            if answer.error is not None and answer.error.code == _BATCHES_NOT_ALLOWED:
                fast_batch.is_not_allowed = True
            if answer.error is not None and answer.error.code == TOO_MANY_REQUESTS:
                fast_batch.is_too_long = True
            if answer.error is not None and answer.error.code not in _NOT_ABOUT_A_MESSAGE:
                fast_batch.error = fast_batch.error or str(answer.error)
                if answer.error.code != jetstream_codec.NO_RESPONDERS:
                    fast_batch.is_message_error = True
                else:
                    fast_batch.unanswered.append(index - 1)
            if answer.stored > fast_batch.reported_count:
                fast_batch.reported_count, fast_batch.progressed_at = (
                    answer.stored,
                    trio.current_time(),
                )
            if answer.is_last and answer.stored >= 0:
                fast_batch.stored_count, fast_batch.last_stored, fast_batch.has_ended = (
                    answer.stored,
                    answer.sequence,
                    True,
                )
            elif answer.is_last and index == fast_batch.sequences.size:
                fast_batch.has_ended = True

    async def _wait_ended(self) -> _FastBatch:
        """Wait for the end of the fast batch in flight."""
        fast_batch = self._fast_batch
        assert fast_batch is not None, "no batch is in flight"
        while not fast_batch.has_ended:
            self._check_timeout(fast_batch.progressed_at)
            await self._wait_pub_acks()
        return fast_batch

    def _check_timeout(self, since: float) -> None:
        """Raise BusConnectionError if nothing was confirmed since `since` for too long.

        Other answers do not count: a server can go on answering abandoned batches.
        """
        if trio.current_time() > since + self._connection.timeout_seconds:
            raise BusConnectionError(
                f"stream {self._stream!r} did not confirm messages within "
                f"{self._connection.timeout_seconds:g} s"
            )

    async def _wait_pub_acks(self) -> None:
        if not self._connection.server_errors:
            await super()._wait_pub_acks()
        if self._connection.server_errors and not self._is_single:
            raise _PermissionDeniedError
        if not self._is_single and nats_batch(self._sent[0]).unanswered:
            raise _UnansweredError

    @property
    def _awaiting_answers(self) -> Sequence[TargetBatch]:
        return [self._sent[0]]  # Only the first one was sent.

    async def _handle_unknown_result(self, prepared: TargetBatch, fast_batch: _FastBatch) -> None:
        """Refuse the messages that no stream accepts.

        Raises BusConnectionError if streams accept all messages: the result of the whole batch is
        unknown then.
        """
        body, self._is_uncertain = nats_batch(prepared), True
        rows = np.searchsorted(prepared.sequences, fast_batch.sequences[fast_batch.unanswered])
        body.unanswered = rows[body.pending[rows]].tolist()
        if not body.unanswered and not await self._find_unanswered():
            reason = fast_batch.error or "it has another leader"
            raise BusConnectionError(f"stream {self._stream!r} did not confirm messages: {reason}")
        body.pending[body.unanswered] = False
        await self._refuse_unanswered(prepared)

    def _refuse_denied_messages(self, prepared: TargetBatch) -> None:
        """Refuse the messages that the user may not publish.

        Raises BusConnectionError for other errors of the server.
        """
        count, self._is_uncertain = len(nats_batch(prepared).refusals), True
        server_errors = list(dict.fromkeys(self._connection.server_errors))
        self._connection.server_errors.clear()
        for server_error in server_errors:
            if subject := denied_subject(server_error):
                self._refuse_denied_subject(prepared, subject, server_error)
        if len(nats_batch(prepared).refusals) == count:
            raise BusConnectionError(
                f"NATS at {self._connection.nats.server} sent an error: {server_errors[0]}"
            )

    async def _store_single(self, prepared: TargetBatch, sequence: int) -> None:
        """Send one message alone, because a batch ended early at it."""
        body, sent = nats_batch(prepared), self._sent
        self._is_single, self._sent = True, deque()
        try:
            super().send(self._select(prepared, np.array([sequence])))
            (single,) = self._sent
            refusals = await super().settle_oldest()
        finally:
            self._is_single, self._sent = False, sent
        _count_duplicates(prepared, single.skipped_counts.get(SkipReason.DUPLICATE, 0))
        if refusals and refusals[0].code == STREAM_FULL:
            self._retry_reason = refusals[0]
            return
        body.refusals += refusals
        self._mark_settled(prepared, np.array([sequence]))

    # Queries -------------------------------------------------------------------------------------

    async def _find_unstored(self, prepared: TargetBatch, sequences: Integers) -> Integers:
        """Return the messages that the stream does not have."""
        stored = await self._query_stored(prepared, sequences)
        self._mark_settled(prepared, sequences[stored])
        _count_duplicates(prepared, int(np.count_nonzero(stored)))
        remaining: Integers = sequences[~stored]
        return remaining

    async def _are_stored(self, prepared: TargetBatch, sequences: Integers) -> bool:
        return bool((await self._query_stored(prepared, sequences)).all())

    def _message_ids_of(self, prepared: TargetBatch, sequences: Integers) -> list[encode.Column]:
        batch = nats_batch(prepared).source_batch
        assert batch is not None, "prepared by another target"
        checks = np.concatenate([run.checksums() for run in batch.select(sequences)])
        return self._message_ids(sequences, checks)

    async def _is_stored_at(self, prepared: TargetBatch, end: Integers, sequence: int) -> bool:
        """Return True if the stream has this message at `sequence`."""
        request = f"STREAM.MSG.GET.{self._stream}"
        try:
            reply = await self._connection.nats.api_request(request, {"seq": sequence})
            headers = b64decode(reply["message"].get("hdrs", ""))
        except (JetStreamError, ValueError):
            return False
        return (
            b"%b: %b\r\n"
            % (jetstream_codec.MSG_ID, join_columns(self._message_ids_of(prepared, end)))
            in headers
        )

    async def _query_stored(self, prepared: TargetBatch, sequences: Integers) -> Flags:
        """Return for each message if the stream has it. Raises BusConnectionError if unknown."""
        stored, row = [np.zeros(0, np.bool_)], 0
        while row < sequences.size:
            stored.append(
                await self._query_stored_batch(
                    prepared, sequences[row : row + self._stream_state.batch_limit]
                )
            )
            row += stored[-1].size
        return np.concatenate(stored)

    async def _query_stored_batch(self, prepared: TargetBatch, sequences: Integers) -> Flags:
        """Query as many messages as the stream answers at once."""
        first, count = self._core.reserve_numbers(sequences.size), sequences.size
        subject, replies = (
            self._subject_of_stream(nats_batch(prepared)),
            self._core.reply_subjects(first, count),
        )
        ids = self._message_ids_of(prepared, sequences)
        self._core.write(jetstream_codec.encode_stored_check(subject, count, ids, replies))
        self._connection.nats.flush()
        stored: Flags = np.zeros(count, np.bool_)
        missing = np.ones(count, np.bool_)
        queried_at = trio.current_time()
        while missing.any():
            if not self._connection.replies:
                await self._wait_pub_acks()
                self._check_timeout(queried_at)
            for reply in self._connection.replies:
                rows = reply.numbers - first
                acks = jetstream_codec.parse_pub_acks(reply.messages)
                for index in np.flatnonzero((rows >= 0) & (rows < count)).tolist():
                    error = acks.errors.get(index)
                    if error is not None and error.code == TOO_MANY_REQUESTS:
                        self._stream_state.reduce_batch_limit(count)
                    if error is not None and error.code not in _NOT_STORED_ERRORS:
                        raise BusConnectionError(
                            f"stream {self._stream!r} cannot tell if it has a message: {error}"
                        )
                    stored[rows[index]] = bool(acks.duplicates[index])
                    missing[rows[index]] = False
            self._connection.replies.clear()
        return stored


def _refuse_each(reason: Refusal, sequences: Sequence[int] | Integers) -> list[Refusal]:
    """Return a refusal with the same reason for each message."""
    return [Refusal(int(sequence), reason.code, reason.sentence) for sequence in sequences]


def _count_duplicates(prepared: TargetBatch, count: int) -> None:
    if count:
        prepared.skipped_counts[SkipReason.DUPLICATE] = (
            prepared.skipped_counts.get(SkipReason.DUPLICATE, 0) + count
        )
