"""Source for a JetStream stream.

The target stores the position of the copier. To read again from an earlier sequence, the copier
deletes and re-creates its consumer, because messages that the old one delivered would arrive late.

A stream with retention `interest` must never be without a consumer: it would drop its messages.
There a second consumer, the *reader*, delivers again what the first one has delivered before, and
the copier acks these messages in the name of the first. For a stream with retention `limits`, the
second consumer is a *bookmark* that holds the position while the first one is re-created.

A message is acked or terminated only after it is confirmed, or its dead letter is stored, because a
stream may drop it then.

                  delivered before      not delivered yet
    stream     ├────────────────────┼────────────────────►
    read by           reader              consumer
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from simplebus.bridge import dead_letters
from simplebus.bridge.checkpoint import MessageFingerprint
from simplebus.bridge.dead_letters import UnackedDeliveries, write_dead_letters
from simplebus.bridge.interfaces import FatalConfigurationError, Refusal, SourceBatch
from simplebus.bridge.nats_connection import BridgeNatsConnection
from simplebus.bridge.nats_frames import NatsFramer
from simplebus.bridge.source.core_nats import nats_identity
from simplebus.bridge.source.pull_consumer import PullConsumer
from simplebus.core.errors import BusConnectionError
from simplebus.core.protocol.frames import Integers
from simplebus.nats.client import jetstream_codec
from simplebus.nats.client.events import ReceivedMessages
from simplebus.nats.client.jetstream_codec import JetStreamError

_ACKS_PENDING_MAX = 65_536
"""Largest number of unacked messages that the copier asks for."""
_MAX_ACK_PENDING_EXCEEDED = 10121
"""JetStream error: the stream or the server allows fewer unacked messages."""
_NO_MESSAGE = 10037
_INACTIVE_THRESHOLD_EXCEEDED = 10153
"""JetStream error: the stream or the server allows only shorter inactivity."""
_QUEUED_MAX = 16
"""Unread batches from which no more messages are requested."""
_CREATE_TIMEOUT_SECONDS = 15.0
"""Time limit for creating a consumer: while a server is away, the others first elect a leader."""
_READER_INACTIVE_SECONDS = 300.0
"""JetStream deletes an abandoned reader after this time."""
_UNSAFE_CHARACTERS = re.compile(r"[^A-Za-z0-9_-]")
_TARGET_METADATA = "simplebus-bridge-to"
"""Metadata key of a consumer for the identity of its target. The value is empty until a copier has
connected to the target.
"""


def consumer_name(copier_name: str) -> str:
    """Return the consumer name of a copier.

    A class name with characters that consumer names cannot have gets a checksum.
    """
    *words, class_ = copier_name.split(" ", 3)
    plain = _UNSAFE_CHARACTERS.sub("-", class_)
    if plain != class_:
        plain += f"-{zlib.crc32(class_.encode()):08x}"
    return "-".join((*words, plain))


def _reader_name(name: str) -> str:
    """Return the name of the second consumer, which is not the consumer name of another copier."""
    first, _, suffix = name.partition("-")
    return f"{first}2-{suffix}"


class StreamSource:
    """Messages of a stream."""

    def __init__(
        self,
        connection: BridgeNatsConnection,
        stream: str,
        *,
        durable: str,
        target_id: str,
        subjects: Sequence[str],
        start: str,
        heartbeat: float,
        open_dead_letters: dead_letters.OpenDeadLetters,
    ) -> None:
        """Create the source.

        `target_id` is stored at the consumer, so that a second bridge with the same name and
        another target is detected.
        """
        self._connection, self._core = connection, connection.core
        self._stream = stream
        self._consumer = consumer_name(durable)
        self._reader = _reader_name(self._consumer)
        self._target_id = target_id
        self._subjects = list(subjects)
        self._start = start
        self._retention = ""
        self._is_filtered = bool(subjects)
        """True if missing sequences can belong to subjects that the source does not read."""
        self._heartbeat = heartbeat
        self.identity = nats_identity(connection, stream)
        self.storage_id = ""
        self.head = 0
        self._framer = NatsFramer()
        self._queue: list[tuple[ReceivedMessages, Integers]] = []
        self._unacked = UnackedDeliveries()
        self._open_dead_letters = open_dead_letters
        self._pull_consumer: PullConsumer | None = None
        """Consumer or reader that delivers now; None before the first request."""
        self._consumer_start = 0
        """First sequence that the consumer itself delivers; the reader delivers those below."""
        self._is_rereading = False
        """True while the reader delivers."""
        self._reread_cursor = 0
        """Next sequence that the reader delivers."""
        self._cursor = -1
        """Sequence after the last received message."""
        self._next_unread = -1
        """Sequence after the last message that `read` returned."""
        self._missed = 0
        self._missed_counted_to = 0
        """Missing sequences below this one have been counted."""
        self._read_from = 0
        """First sequence to read."""
        self._committed: int | None = None
        """First sequence that is delivered; None if unknown. Messages from here to `_read_from`
        are unacked.
        """
        self._acks_pending = _ACKS_PENDING_MAX
        """Largest number of unacked messages of the consumer."""
        self._has_committed = False
        """True once a position was committed over this connection."""
        self.is_new = False
        """True if the consumer does not have the position of the copier."""
        connection.on_messages = self._on_messages

    async def open(self) -> int:
        """Create the consumer if it does not exist, even while the target is away.

        Returns the sequence at which a copier starts that has never run.
        """
        state = await self.refresh_stream_info()
        info = await self._find_consumer(self._consumer)
        if self._retention == "limits":
            info = await self._restore_from_bookmark(info)
        if info is None:
            first, last = int(state["first_seq"]), int(state["last_seq"])
            sequence = {"new": last + 1, "last": max(first, last)}.get(self._start, first)
            if self._retention == "workqueue":  # A work queue stores unacked messages forever.
                sequence = first
            info = await self._create(sequence, target_id="")
        elif self._retention == "interest":  # The subjects may have changed.
            info = await self._update_consumer(info, target_id=_target_of(info))
        elif self._retention == "workqueue":
            self._check_subjects(info)
        previous_target = _target_of(info)
        is_other_target = previous_target not in ("", self._target_id)
        if is_other_target and info.get("num_waiting"):
            raise BusConnectionError(
                f"{self._consumer!r} of stream {self._stream!r} already copies to another target "
                f"than {self._target_id}: give each bridge its own name"
            )
        sequence = max(int(info["ack_floor"]["stream_seq"]), _sequence_before_start(info)) + 1
        self.is_new = not previous_target
        if previous_target:
            self._committed = sequence
        return sequence

    def _check_subjects(self, info: dict[str, Any]) -> None:
        """Raise FatalConfigurationError if the copier of a work queue now reads more subjects.

        Older messages of the new subjects would count as copied, and be acked.
        """
        before = _filter_subjects(info)
        if before and (not self._subjects or set(self._subjects) - before):
            raise FatalConfigurationError(
                f"{self._consumer!r} of the work queue {self._stream!r} reads "
                f"{', '.join(sorted(before))} only: to read more, delete that consumer and give "
                "the bridge another name"
            )

    async def refresh_stream_info(self) -> dict[str, Any]:
        """Read the state of the stream, which another copier of this name may have advanced.

        Raises BusConnectionError if the stream was deleted and created again: its sequences
        start again then.
        """
        info = await self._connection.nats.api_request(f"STREAM.INFO.{self._stream}")
        storage_id = f"{self._stream} {info.get('created', '')}"
        if self.storage_id not in ("", storage_id):
            raise BusConnectionError(f"stream {self._stream!r} was deleted and created again")
        self.storage_id = storage_id
        self._retention = info["config"].get("retention", "limits")
        mirror = info["config"].get("mirror") or {}
        is_filtered = mirror.get("filter_subject") or mirror.get("subject_transforms")
        self._is_filtered = bool(self._subjects or is_filtered)
        state: dict[str, Any] = info["state"]
        self.head = int(state["last_seq"]) + 1
        return state

    # Consumers -----------------------------------------------------------------------------------

    async def _info(self, name: str) -> dict[str, Any]:
        return await self._connection.nats.api_request(f"CONSUMER.INFO.{self._stream}.{name}")

    async def _find_consumer(self, name: str) -> dict[str, Any] | None:
        """Return the info of a consumer, or None if it does not exist."""
        try:
            return await self._info(name)
        except JetStreamError as error:
            if error.code not in jetstream_codec.NOT_FOUND:
                raise
            return None

    def _config(self, name: str, sequence: int) -> dict[str, Any]:
        """Return the configuration of a consumer that starts at `sequence`."""
        config: dict[str, Any] = {
            "durable_name": name,
            "deliver_policy": "by_start_sequence",
            "opt_start_seq": max(1, sequence),
            "replay_policy": "instant",
        }
        if self._subjects:
            config["filter_subjects"] = self._subjects
        return config

    async def _put_consumer(self, config: dict[str, Any]) -> dict[str, Any]:
        """Create or change a consumer."""
        subject = f"CONSUMER.DURABLE.CREATE.{self._stream}.{config['durable_name']}"
        body = {"stream_name": self._stream, "config": config}
        return await self._connection.nats.api_request(
            subject, body, seconds=_CREATE_TIMEOUT_SECONDS
        )

    async def _create(
        self, sequence: int, *, target_id: str, current_config: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Create the consumer, starting at `sequence`, or update the one with configuration
        `current_config`.
        """
        config = self._config(self._consumer, sequence)
        config["ack_policy"] = "explicit"
        config["max_ack_pending"] = self._acks_pending
        config["max_deliver"] = -1
        config["metadata"] = {_TARGET_METADATA: target_id}
        # A work queue allows no other policy, and stores only unacked messages.
        if self._retention == "workqueue":
            config["deliver_policy"] = "all"
            del config["opt_start_seq"]
        if current_config is not None:
            config["opt_start_seq"] = current_config.get("opt_start_seq", config["opt_start_seq"])
        try:
            info = await self._put_consumer(config)
        except JetStreamError as error:
            if error.code != _MAX_ACK_PENDING_EXCEEDED:
                raise
            del config["max_ack_pending"]  # Then the server sets its maximum.
            info = await self._put_consumer(config)
        self._acks_pending = info["config"].get("max_ack_pending", self._acks_pending)
        return info

    async def _delete(self, name: str) -> None:
        """Delete a consumer, if it exists."""
        try:
            await self._connection.nats.api_request(f"CONSUMER.DELETE.{self._stream}.{name}")
        except JetStreamError as error:
            if error.code not in jetstream_codec.NOT_FOUND:
                raise

    def _create_pull_consumer(self, name: str, info: dict[str, Any]) -> PullConsumer:
        """Create the pull requests for the consumer that `info` describes."""
        return PullConsumer(
            self._connection,
            self._stream,
            name,
            delivered_count=int(info["delivered"]["consumer_seq"]),
            pending=int(info.get("num_pending", 0)),
            heartbeat_seconds=self._heartbeat,
            batch_max=max(0, info["config"].get("max_batch", 0)),
        )

    async def _seek(self, sequence: int) -> None:
        """Start delivery at `sequence`, in order."""
        self._close_pull_consumer()
        self._queue.clear()
        self._unacked.clear()
        self._committed = sequence if self._committed is None else min(sequence, self._committed)
        # Checked before anything is acked: the stream may be another one.
        first = int((await self.refresh_stream_info())["first_seq"])
        if self._retention == "interest":
            await self._resume(self._committed)
        else:
            self._pull_consumer = self._create_pull_consumer(
                self._consumer, await self._recreate_consumer(self._committed)
            )
        # In other streams, other consumers may have removed the messages.
        if not self._is_filtered or self._retention == "limits":
            self._count_missed(max(1, sequence), first)
        self._next_unread = self._read_from = sequence
        self._cursor = max(1, sequence, first)
        self._request_more()

    async def _recreate_consumer(self, sequence: int) -> dict[str, Any]:
        """Replace the consumer. If the copier is killed in between, the bookmark holds its
        position.
        """
        has_bookmark = self._retention == "limits" and await self._create_bookmark(sequence)
        await self._delete(self._consumer)
        info = await self._create(sequence, target_id=self._target_id)
        if has_bookmark:
            await self._delete(self._reader)
        return info

    async def _create_bookmark(self, sequence: int) -> bool:
        """Create the bookmark. Returns False if the stream allows no second consumer."""
        config = self._config(self._reader, sequence)
        config["ack_policy"] = "none"
        config["metadata"] = {_TARGET_METADATA: self._target_id}
        await self._delete(self._reader)
        try:
            await self._put_consumer(config)
        except JetStreamError as error:
            if not error.is_final:
                raise
            return False  # For example, no second consumer is allowed.
        return True

    async def _restore_from_bookmark(self, info: dict[str, Any] | None) -> dict[str, Any] | None:
        """Return the consumer's info, after creating it from the bookmark if only that exists."""
        bookmark = await self._find_consumer(self._reader)
        if bookmark is None:
            return info
        if info is None:
            info = await self._create(
                _sequence_before_start(bookmark) + 1, target_id=_target_of(bookmark)
            )
        await self._delete(self._reader)
        return info

    async def _resume(self, sequence: int) -> None:
        """Start delivery at `sequence`: by the reader if the consumer has delivered it before."""
        info = await self._find_consumer(self._consumer)
        if info is None:
            await self._create(sequence, target_id=self._target_id)
            info = await self._info(self._consumer)
        info = await self._update_consumer(info, target_id=self._target_id)
        self._close_pull_consumer()
        await self._delete(self._reader)
        self._consumer_start = (
            max(int(info["delivered"]["stream_seq"]), _sequence_before_start(info)) + 1
        )
        self._is_rereading, self._reread_cursor = sequence < self._consumer_start, sequence
        name = self._consumer
        if self._is_rereading:
            name, config = self._reader, self._config(self._reader, sequence)
            config["ack_policy"] = "none"
            config["inactive_threshold"] = round(_READER_INACTIVE_SECONDS * 1e9)
            try:
                await self._put_consumer(config)
            except JetStreamError as error:
                if error.code != _INACTIVE_THRESHOLD_EXCEEDED:
                    raise
                del config["inactive_threshold"]  # Then the server sets its maximum.
                await self._put_consumer(config)
            info = await self._info(name)
        self._pull_consumer = self._create_pull_consumer(name, info)

    async def _update_consumer(self, info: dict[str, Any], *, target_id: str) -> dict[str, Any]:
        """Set target and subjects of the consumer, if they have changed. Returns its info."""
        if _target_of(info) == target_id and _filter_subjects(info) == set(self._subjects):
            return info
        await self._create(0, target_id=target_id, current_config=info["config"])
        return await self._info(self._consumer)

    # Reading -------------------------------------------------------------------------------------

    def _close_pull_consumer(self) -> None:
        """Stop accepting messages from the consumer."""
        if self._pull_consumer is not None:
            self._pull_consumer.close()
            self._pull_consumer = None

    def _request_more(self) -> None:
        if self._pull_consumer is not None and len(self._queue) < _QUEUED_MAX:
            self._pull_consumer.request_more()
        self._connection.nats.flush()

    def _on_messages(self, messages: ReceivedMessages) -> None:
        if self._pull_consumer is None:
            return
        deliveries = self._pull_consumer.accept(messages)
        is_done = deliveries.sequences < (self._committed or 0)
        if is_done.any():  # The ack was lost, or they would be redelivered forever.
            committed_messages = deliveries.messages.pick(is_done), deliveries.sequences[is_done]
            self._core.write(self._encode_acks(*committed_messages, jetstream_codec.ACK))
            self._connection.nats.flush()
        # Redeliveries of the consumer are left to the reader.
        is_mine = ~is_done & ((deliveries.sequences < self._consumer_start) == self._is_rereading)
        is_early = is_mine & (deliveries.sequences < self._read_from)
        if is_early.any():  # Copied but not acked, or refused but not dead-lettered.
            self._unacked.add(deliveries.messages.pick(is_early), deliveries.sequences[is_early])
        new_rows = np.flatnonzero(is_mine)
        sequences = deliveries.sequences[new_rows]
        # Redeliveries can arrive together with first deliveries.
        highest = np.maximum.accumulate(np.append(self._cursor - 1, sequences))[:-1]
        new_rows, sequences = new_rows[sequences > highest], sequences[sequences > highest]
        if new_rows.size:
            gaps = np.flatnonzero(np.diff(sequences, prepend=self._cursor - 1) != 1)
            for row in [] if self._is_filtered else gaps.tolist():
                before = int(sequences[row - 1]) + 1 if row else self._cursor
                self._count_missed(before, int(sequences[row]))
            self._queue.append((deliveries.messages.pick(new_rows), sequences))
            self._cursor = int(sequences[-1]) + 1
        if self._is_rereading and deliveries.messages.count:
            self._reread_cursor = int(deliveries.sequences[-1]) + 1
            if self._reread_cursor >= self._consumer_start:  # The reader is done.
                if not self._is_filtered:
                    self._count_missed(self._cursor, self._consumer_start)
                self._cursor = max(self._cursor, self._consumer_start)

    def _count_missed(self, first: int, last: int) -> None:
        """Count the sequences from `first` to `last - 1` as missed, once even if they are read
        again.
        """
        self._missed += max(0, last - max(first, self._missed_counted_to))
        self._missed_counted_to = max(self._missed_counted_to, last)

    async def read(self, sequence: int) -> SourceBatch:
        return await self._read_batch(sequence)

    async def _read_batch(self, sequence: int, *, resumes: bool = True) -> SourceBatch:
        """Read the next messages. With `resumes`, the consumer continues where the reader ends."""
        if sequence != self._next_unread:
            await self._seek(sequence)
        self._request_more()
        while not self._queue:
            if self._is_rereading and await self._is_reread_done():
                if not resumes:
                    break
                # Later messages from the reader were dropped.
                await self._resume(self._consumer_start)
            elif not self._is_rereading and (not self._pending or self._is_ack_limit_reached()):
                break
            else:
                self._check_alive()
                await self._connection.wait_expected(self._expected_event)
            self._request_more()
        self._check_alive()
        runs = []
        for messages, sequences in self._queue:
            runs.append(self._framer.to_run(messages, sequences))
            self._unacked.add(messages, sequences)
        self._queue.clear()
        self._next_unread = max(sequence, self._cursor)
        missed, self._missed = self._missed, 0
        batch = SourceBatch(
            runs, sequence, self._next_unread, self._next_unread + self._pending, missed
        )
        batch.altered_count, batch.alteration = self._framer.pop_altered()
        return batch

    @property
    def _pending(self) -> int:
        return 0 if self._pull_consumer is None else self._pull_consumer.pending

    async def _is_reread_done(self) -> bool:
        """Return True if the reader has delivered everything below `_consumer_start`.

        A reader that reports no more messages can be on a server that is behind the stream's
        leader, so the stream is asked.
        """
        if self._reread_cursor >= self._consumer_start:
            return True
        if self._pending:
            return False
        api_subject = f"STREAM.MSG.GET.{self._stream}"
        for subject in self._subjects or [">"]:
            request = {"seq": self._reread_cursor, "next_by_subj": subject}
            try:
                reply = await self._connection.nats.api_request(api_subject, request)
            except JetStreamError as error:
                if error.code != _NO_MESSAGE:
                    raise
            else:
                if int(reply["message"]["seq"]) < self._consumer_start:
                    return False
        return True

    def _is_ack_limit_reached(self) -> bool:
        """Return True if the consumer delivers nothing more until some messages are acked.

        Raises BusConnectionError if that happens before the first commit: the copier must see
        all redelivered messages then, because unseen ones would count as gone.
        """
        is_reached = self._unacked.count >= self._acks_pending
        if is_reached and not self._has_committed:
            raise BusConnectionError(
                f"stream {self._stream!r}, or its server, allows {self._acks_pending} unacked "
                "messages, and more than that must be redelivered: raise 'max_ack_pending'"
            )
        return is_reached

    async def measure_backlog(self, sequence: int) -> tuple[int, float]:
        """Return the number of unacked and undelivered messages of the consumer; the age is
        unknown.
        """
        info = await self._info(self._consumer)
        count, unacked = int(info["num_pending"]), int(info["num_ack_pending"])
        if self._next_unread < 0:
            return count + unacked, 0.0
        if self._is_rereading:  # The reader has not delivered all of them.
            received_count = self._unacked.count + sum(
                messages.count for messages, _ in self._queue
            )
            count += max(0, unacked - received_count)
        return count + sum(int(np.count_nonzero(s >= sequence)) for _, s in self._queue), 0.0

    async def read_fingerprint(self, sequence: int) -> MessageFingerprint | None:
        missed, counted = self._missed, self._missed_counted_to
        batch = await self._read_batch(sequence, resumes=False)
        # The same messages are read again later.
        self._missed, self._missed_counted_to = (
            missed,
            counted,
        )
        return batch.fingerprint(sequence)

    async def wait_for_message(self, sequence: int) -> int:
        await self.commit_position(sequence, now=False)
        while not self._queue:
            self._check_alive()
            self._request_more()
            await self._connection.wait_expected(self._expected_event)
        return sequence

    @property
    def _expected_event(self) -> str:
        return f"a message or a heartbeat of stream {self._stream!r}"

    def _check_alive(self) -> None:
        """Raise BusConnectionError if nothing more will be delivered, so that the copier
        reconnects.
        """
        self._connection.check_permissions()
        if self._pull_consumer is not None:
            self._pull_consumer.check()

    # Acknowledging -------------------------------------------------------------------------------

    def _encode_acks(self, messages: ReceivedMessages, sequences: Integers, ack: bytes) -> bytes:
        """Return the acks of messages. Messages from the reader are acked in the name of the
        consumer.
        """
        is_redelivered = sequences < self._consumer_start
        if not is_redelivered.any():
            return jetstream_codec.encode_acks(messages, ack)
        consumer_messages = messages.pick(~is_redelivered)
        commands = (
            [jetstream_codec.encode_acks(consumer_messages, ack)] if consumer_messages.count else []
        )
        for row in np.flatnonzero(is_redelivered).tolist():
            ack_subject = jetstream_codec.ack_subject_of_consumer(
                messages.reply(row), self._consumer.encode()
            )
            commands.append(b"PUB %b %d\r\n%b\r\n" % (ack_subject, len(ack), ack))
        return b"".join(commands)

    async def commit_position(self, sequence: int, *, now: bool) -> None:
        self._has_committed = True
        self._committed = sequence if self._committed is None else max(sequence, self._committed)
        for messages, sequences in self._unacked.pop_below(sequence):
            self._core.write(self._encode_acks(messages, sequences, jetstream_codec.ACK))
        self._connection.nats.flush()
        if now and self._connection.nats.is_ready and not self._connection.lost_reason:
            await self._connection.round_trip()

    async def dead_letter(self, refusals: Sequence[Refusal]) -> int:
        remaining = sorted(refusals, key=lambda refusal: refusal.sequence)
        missing_count = 0
        while remaining:
            batches = self._unacked.select(remaining)
            if not batches:  # It was read before the last seek.
                await self.read_fingerprint(remaining[0].sequence)
                batches = self._unacked.select(remaining[:1])
            await write_dead_letters(batches, remaining, self._open_dead_letters, self._framer)
            for messages, sequences in batches:
                self._core.write(self._encode_acks(messages, sequences, jetstream_codec.TERMINATE))
            self._connection.nats.flush()
            handled_sequences = {
                sequence for _, sequences in batches for sequence in sequences.tolist()
            }
            if not handled_sequences:
                handled_sequences, missing_count = {remaining[0].sequence}, missing_count + 1
            remaining = [
                refusal for refusal in remaining if refusal.sequence not in handled_sequences
            ]
        return missing_count

    def count_lost_on_close(self, sequence: int) -> int:
        return 0


def _target_of(info: dict[str, Any]) -> str:
    """Return the identity of the consumer's target; empty if no copier has connected to it yet."""
    return str((info["config"].get("metadata") or {}).get(_TARGET_METADATA) or "")


def _filter_subjects(info: dict[str, Any]) -> set[str]:
    """Return the subjects of a consumer; empty for all."""
    config = info["config"]
    if "filter_subject" in config:
        return {config["filter_subject"]}
    return set(config.get("filter_subjects") or ())


def _sequence_before_start(info: dict[str, Any]) -> int:
    """Return the sequence before the configured start of a consumer; 0 if none is configured."""
    return int(info["config"].get("opt_start_seq", 1)) - 1
