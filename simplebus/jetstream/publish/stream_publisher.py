"""Publication of write batches to streams.

A write batch is durable when each of its messages has a PubAck. Batches become durable in order,
and each class separately, so that a class never waits for another one.

If a PubAck is late, a message is refused or the connection is lost, the stream is asked which of
the written message ids it has. The rest is published again in order, and nothing else is written
meanwhile. The query is sent at once, because the stream keeps ids for a limited time, and repeated
only after the server has received the first one. A message id consists of the publisher's name,
instance and message number; for publishers without a name, of this server's run id and a counter.

Messages that are written together share one reply subject, and their PubAcks are counted by stream
sequence: two servers may answer while both believe to be the leader. When a stream is full, a few
messages at a time are written, each with its own PubAck.

Many messages at once are written as fast batches, which have few PubAcks. Of a publisher without a
name only the milestones have ids, so up to 31 messages after the last known milestone may be stored
twice. With a name every message has an id, and unstored messages are repeated one by one. A NATS
server reports a fast batch as stored although messages of another server may still be on their way
to it; therefore the last message of a reported batch is verified.
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
from simplebus.jetstream.publish.class_queue import (
    CLASS_SHARE_MIN_BYTES,
    SHARED_BYTES,
    ClassPublishQueue,
    Publication,
)
from simplebus.nats.client import jetstream_codec
from simplebus.nats.client.client import NatsClientCore, RequestReplies
from simplebus.nats.client.encode import Column
from simplebus.nats.client.events import ReceivedMessages
from simplebus.nats.client.jetstream_codec import JetStreamError

PATIENCE_SECONDS = 4.0
"""Time without any PubAck after which a class is verified; twice as long for its oldest message.
Unanswered checks are repeated after the same time.
"""
UNANSWERED_CHECKS_MAX = 2
"""Unanswered rounds of checks after which a stream counts as refusing. With fewer, it may be
electing a leader.
"""
PAUSE_SECONDS = 0.25
"""Delay before a verification after a refusal."""
PUBLICATION_MESSAGES_MAX = 4096
FAST_BATCH_MIN_MESSAGES = 2 * codec.MILESTONE_MESSAGES
"""Minimum messages of a fast batch. Fewer are written one by one, because a batch has a cost."""
_REPLY_TOKENS = 6
"""Tokens after the common prefix of all replies: number, flow, mode, step, kind of step, $FI."""
_CHECK_FAILED = JetStreamError(0, "the stream did not report whether a message is stored")

assert PUBLICATION_MESSAGES_MAX < 10**jetstream_codec.FAST_BATCH_DIGITS


@dataclass(frozen=True, slots=True)
class StreamPublisherStatistics:
    """Snapshot of a publisher's counters."""

    unstored_batch_count: int
    """Write batches that are not completely stored."""
    in_flight_count: int
    """Published messages without a PubAck."""
    stored: int
    """Messages that were reported as stored."""
    duplicates: int
    """Messages that the stream recognized as duplicates."""
    refused: int
    """Messages that were not stored and had to be published again."""


class StreamPublisher:
    """Publishes the accepted messages of one server. Times are in seconds of a monotonic clock."""

    def __init__(
        self,
        core: NatsClientCore,
        *,
        subject: Callable[[int], str],
        get_instance: Callable[[str], str],
        run_id: str,
        has_fast_batches: Callable[[int], bool] = lambda class_id: False,
    ) -> None:
        """Create a publisher without messages.

        Args:
            subject: Returns the subject of a class.
            get_instance: Returns the instance of a publisher name; empty if unknown.
            run_id: Id of this run of the server.
            has_fast_batches: Returns True if the stream of a class accepts fast batches.
        """
        self._core = core
        self._has_fast_batches = has_fast_batches
        self._inbox = f"_INBOX.{run_id}".encode()
        self._subject = subject
        self._get_instance = get_instance
        self._run_id = run_id
        self._anonymous_count = 0
        """Messages of publishers without a name so far."""
        self._unstored_counts: dict[int, int] = {}
        """Unstored publications of each unstored write batch, in order."""
        self._last_batch_number = self._reported_batch_number = 0
        self._durable_positions: dict[int, int] = {}
        """Log position up to which a class is durable, if not returned yet."""
        self._queues: dict[int, ClassPublishQueue] = {}
        """Queues of the classes with unstored messages."""
        self._queue_by_request: dict[int, ClassPublishQueue] = {}
        """Queues by the number of the request whose answer they wait for."""
        self.full: set[int] = set()
        """Classes that must not accept more messages."""
        self.open_classes: set[int] = set()
        """Classes with a stream."""
        self._classes_without_stream: set[int] = set()
        self._refusing_classes: set[int] = set()
        self._last_pause = 0
        self._pauses: dict[int, dict[int, int]] = {}
        """Last write batch number before each pause, by class and pause; the first pause first."""
        self.stored = self.duplicates = self.refused = 0
        self.last_error: JetStreamError | None = None
        """Reason of the last failure; None after everything in flight was stored."""

    @property
    def inbox(self) -> str:
        """Reply subject of fast batches; the messages belong to `handle_fast_batch_acks`."""
        return f"{self._inbox.decode()}.>"

    def pause_class(self, class_id: int) -> int:
        """Do not write messages of a class that are appended from now on.

        Returns:
            The argument for `resume_class`.
        """
        self._last_pause += 1
        self._pauses.setdefault(class_id, {})[self._last_pause] = self._last_batch_number
        return self._last_pause

    def resume_class(self, class_id: int, pause: int) -> None:
        """End a pause."""
        pauses = self._pauses[class_id]
        del pauses[pause]
        if not pauses:
            del self._pauses[class_id]

    @property
    def is_empty(self) -> bool:
        return not self._unstored_counts

    @property
    def unstored_batch_count(self) -> int:
        """Number of write batches that are not completely stored."""
        return len(self._unstored_counts)

    def statistics(self) -> StreamPublisherStatistics:
        in_flight_count = sum(queue.in_flight_count for queue in self._queues.values())
        return StreamPublisherStatistics(
            len(self._unstored_counts), in_flight_count, self.stored, self.duplicates, self.refused
        )

    def is_crowded(self, now: float) -> bool:
        """Return True if new messages should be collected in a larger write batch."""
        return any(queue.is_crowded(now) for queue in self._queues.values())

    def append_batch(self, write_batch: WriteBatch) -> None:
        """Queue a write batch. `publish_ready` writes it."""
        publications = 0
        for entry in write_batch.entries:
            queue = self._queues.get(entry.class_id)
            if queue is None:
                queue = self._queues[entry.class_id] = ClassPublishQueue(entry.class_id)
            runs = deque(entry.producer_runs)
            for batch in codec.split_batches(entry.frames):
                first_index = 0
                while first_index < batch.count:
                    count, name = runs[0]
                    message_count = min(count, batch.count - first_index, PUBLICATION_MESSAGES_MAX)
                    queue.append(
                        write_batch.number,
                        self._make_publication(
                            queue.class_id,
                            batch.slice(first_index, first_index + message_count),
                            name,
                        ),
                    )
                    publications += 1
                    first_index += message_count
                    runs[0] = (count - message_count, name)
                    if count == message_count:
                        runs.popleft()
            self._update_full(queue)
        self._last_batch_number = write_batch.number
        if publications:
            self._unstored_counts[write_batch.number] = publications

    def _make_publication(self, class_id: int, batch: FrameBatch, name: str) -> Publication:
        if name:
            instance = jetstream_codec.percent_encode(self._get_instance(name) or self._run_id)
            prefix = f"{jetstream_codec.percent_encode(name)}:{instance}:"
            ids = message_numbers(batch)
        else:
            prefix = f":{self._run_id}:"
            ids = np.arange(self._anonymous_count, self._anonymous_count + batch.count)
            self._anonymous_count += batch.count
        return Publication(class_id, batch, prefix.encode(), ids, batch.count, bool(name))

    def publish_ready(self, now: float) -> set[int]:
        """Write the messages that may be written. Returns the classes that need a stream first."""
        missing: set[int] = set()
        if not self._core.is_ready:
            return missing
        for queue in self._queues.values():
            if queue.in_flight or queue.unverified:
                self._verify_overdue(queue, now)
            if not (queue.ready or queue.unverified):
                continue
            if queue.class_id not in self.open_classes:
                missing.add(queue.class_id)
            else:
                self._write_ready(queue, now)
        return missing

    def _write_ready(self, queue: ClassPublishQueue, now: float) -> None:
        pauses = self._pauses.get(queue.class_id)
        last = self._last_batch_number if pauses is None else next(iter(pauses.values()))
        while queue.ready and queue.can_write and queue.ready[0].batch_number <= last:
            if (batch_number := queue.split_first()) is not None:
                self._unstored_counts[batch_number] += 1
            publication = queue.ready.popleft()
            if not queue.in_flight:
                queue.last_answer_at = now
            queue.adjust_in_flight(publication, 1)
            self._write(queue, publication, now)

    def _verify_overdue(self, queue: ClassPublishQueue, now: float) -> None:
        """Verify a class whose answers are overdue."""
        if queue.unverified and not self._core.is_ping_answered(queue.checks_mark):
            return  # Earlier checks are still being sent.
        is_late = now >= min(queue.verify_at, queue.last_answer_at + PATIENCE_SECONDS)
        if queue.in_flight:
            first = next(iter(queue.in_flight.values()))
            is_late = is_late or now >= first.progress_at + 2 * PATIENCE_SECONDS
        if not is_late:
            return
        if queue.stored_checks:
            self._record_unanswered(queue)
        if queue.in_flight:
            self.last_error = None
            if queue.refusal is not None and queue.refusal.code in api.STORAGE_FULL:
                queue.window, queue.stored_since_full = 1, 0
            queue.mark_unverified()
        self._send_stored_checks(queue, now)

    def _record_unanswered(self, queue: ClassPublishQueue) -> None:
        """Count a round of checks that the server received and the stream did not answer.

        If a third party subscribes to the subject, NATS cannot report missing responders.
        """
        queue.unanswered_checks += 1
        if queue.unanswered_checks >= UNANSWERED_CHECKS_MAX:
            if queue.refusal is None:
                subject = self._subject(queue.class_id)
                queue.refusal = JetStreamError(
                    0,
                    f"no answer from the stream of {subject!r}: the stream has no leader, has "
                    "other subjects, or is configured with no_ack",
                )
            self._refusing_classes.add(queue.class_id)

    def _reserve_requests(self, queue: ClassPublishQueue, count: int) -> int:
        """Reserve request numbers for a queue. Returns the first one."""
        first = self._core.reserve_numbers(count)
        self._queue_by_request.update(dict.fromkeys(range(first, first + count), queue))
        return first

    def _forget_requests(self, numbers: dict[int, Any]) -> None:
        """Ignore answers to these requests."""
        for number in numbers:
            del self._queue_by_request[number]
        numbers.clear()

    def _send_stored_checks(self, queue: ClassPublishQueue, now: float) -> None:
        """Ask the stream which unverified messages it has."""
        self._forget_requests(queue.stored_checks)
        queue.verify_at, queue.last_answer_at = float("inf"), now
        for publication in queue.unverified.values():
            rows = publication.rows_to_verify()
            first = self._reserve_requests(queue, rows.size)
            queue.stored_checks.update(
                (first + first_index, (publication, row))
                for first_index, row in enumerate(rows.tolist())
            )
            if rows.size:
                self._write_stored_checks(publication, rows, first)
        queue.checks_mark = self._core.send_ping()

    def _write_stored_checks(self, publication: Publication, rows: Integers, first: int) -> None:
        """Write checks of some rows, with request numbers from `first`."""
        subject = self._subject(publication.class_id).encode()
        ids = codec.message_id_columns(publication.prefix, publication.message_numbers[rows])
        replies = self._core.reply_subjects(first, rows.size)
        self._core.write(jetstream_codec.encode_stored_check(subject, rows.size, ids, replies))

    def _handle_check_answer(
        self, queue: ClassPublishQueue, number: int, error: JetStreamError | None, now: float
    ) -> None:
        """Handle the answer to a check; `error` is None if the message is stored."""
        del self._queue_by_request[number]
        is_answered = error is None or error.code == jetstream_codec.NO_ROLLUP
        queue.last_answer_at, queue.unanswered_checks = now, 0
        if (publication := queue.completion_checks.pop(number, None)) is not None:
            if error is None:
                self._record_stored_up_to(queue, publication, publication.batch.count, now)
                return
            if not is_answered:  # The message is still on its way, or lost.
                self.last_error = error
            if queue.in_flight:
                self.refused += publication.unstored_count
                queue.verify_at = min(queue.verify_at, now + PAUSE_SECONDS)
            return
        publication, row = queue.stored_checks.pop(number)
        if not is_answered:  # Ask again for everything that is still unknown.
            self._forget_requests(queue.stored_checks)
            queue.verify_at = now + PAUSE_SECONDS
            return
        if error is None:
            queue.mark_stored(publication, slice(row + 1) if publication.confirms_in_order else row)
        # Another answer may have settled the remaining messages.
        if not (queue.stored_checks and queue.unverified_count):
            self._finish_verification(queue)

    def _mark_stored(
        self, queue: ClassPublishQueue, publication: Publication, rows: int | slice
    ) -> None:
        """Mark unverified rows as stored, because of a late PubAck."""
        queue.mark_stored(publication, rows)
        if not queue.unverified_count:
            self._finish_verification(queue)

    def _finish_verification(self, queue: ClassPublishQueue) -> None:
        """Write the unstored messages again."""
        self.stored += queue.finish_verification()
        for numbers in (
            queue.stored_checks,
            queue.unverified,
            queue.single_acks,
            queue.completion_checks,
        ):
            self._forget_requests(numbers)
        self._update_progress(queue)

    def _write(self, queue: ClassPublishQueue, publication: Publication, now: float) -> None:
        """Write a publication."""
        subject = self._subject(publication.class_id).encode()
        publication.progress_at = now
        publication.request_number = self._reserve_requests(queue, 1)
        queue.in_flight[publication.request_number] = publication
        # Fast batches keep the order.
        min_messages = 1 if queue.window else FAST_BATCH_MIN_MESSAGES
        can_be_fast_batch = (
            self._has_fast_batches(publication.class_id) and not publication.has_message_ids
        )
        publication.is_fast_batch = publication.is_open = can_be_fast_batch and (
            publication.is_fast_batch or publication.batch.count >= min_messages
        )
        publication.has_message_ids = (
            publication.has_publisher_name or not publication.is_fast_batch
        )
        ids = publication.prefix, publication.message_numbers
        replies: Sequence[Column] = [self._core.reply_subject(publication.request_number)]
        write = codec.encode_publications
        if publication.is_fast_batch:
            # The name is part of every message, so it is kept short.
            name = b"%b%d" % (self._run_id.encode(), publication.request_number)
            replies = jetstream_codec.fast_batch_reply_subjects(
                self._inbox, name, publication.batch.count
            )
            write = (
                codec.encode_publications
                if publication.has_publisher_name
                else codec.encode_fast_batch
            )
        elif queue.window:
            replies = self._single_ack_replies(queue, publication)
        self._core.write(write(subject, publication.batch, ids=ids, replies=replies))

    def _single_ack_replies(
        self, queue: ClassPublishQueue, publication: Publication
    ) -> Sequence[Column]:
        """Return reply subjects for PubAcks of single messages."""
        count = publication.batch.count
        publication.unstored = np.ones(count, np.bool_)
        first = self._reserve_requests(queue, count)
        queue.single_acks.update((first + row, (publication, row)) for row in range(count))
        return self._core.reply_subjects(first, count)

    def handle_reconnect(self, now: float) -> None:
        """Verify everything in flight on the new connection."""
        for queue in self._queues.values():
            queue.verify_at, queue.checks_mark = (
                now if queue.in_flight or queue.unverified else float("inf"),
                0,
            )
            for numbers in (queue.stored_checks, queue.completion_checks, queue.single_acks):
                self._forget_requests(numbers)

    def handle_fast_batch_acks(self, answers: ReceivedMessages, now: float) -> int | None:
        """Handle acks of fast batches. Returns the result of `pop_durable_position`."""
        begin = len(self._inbox) + 1 + len(self._run_id)
        for row in range(answers.count):
            tokens = answers.subject(row)[begin:].split(b".")
            number = jetstream_codec.parse_number(tokens[0], 0)
            queue = self._queue_by_request.get(number)
            publication = queue.find_unstored(number) if queue is not None else None
            if (
                queue is None
                or publication is None
                or not publication.is_open
                or len(tokens) != _REPLY_TOKENS
            ):
                continue
            ack = jetstream_codec.parse_fast_batch_reply(answers.headers(row), answers.payload(row))
            if ack.error is not None:
                self.last_error = ack.error
                if ack.error.code == jetstream_codec.NO_RESPONDERS:
                    self._mark_stream_missing(publication.class_id)
            publication.is_open = not ack.is_last
            # A fast batch with ids counts only when it is complete: see the module's docstring.
            is_whole = ack.is_last and ack.stored >= publication.batch.count
            if publication.confirms_in_order and ack.stored > 0:
                self._record_stored_up_to(queue, publication, ack.stored, now)
            elif is_whole or (ack.stored > 0 and not ack.is_last):
                publication.progress_at = queue.last_answer_at = now  # It makes progress.
            if queue.unverified:
                continue
            if is_whole and publication.has_publisher_name:
                request = self._reserve_requests(queue, 1)
                queue.completion_checks[request] = publication
                self._write_stored_checks(
                    publication, np.array([publication.batch.count - 1]), request
                )
                queue.adjust_in_flight(publication, -1)
                publication.is_reported_stored = True
            elif ack.is_last and publication.unstored_count:
                self.refused += publication.unstored_count
                self._refuse(queue, ack.error, now)
                if publication.has_publisher_name and ack.error is not None and not ack.error.code:
                    queue.verify_at = now  # It may be stored; verify at once.
        return self.pop_durable_position()

    def _record_stored_up_to(
        self, queue: ClassPublishQueue, publication: Publication, stored: int, now: float
    ) -> None:
        """Record that the first `stored` messages of a publication are stored."""
        more = stored - (publication.batch.count - publication.unstored_count)
        if queue.unverified:
            self._mark_stored(queue, publication, slice(stored))
        elif more > 0:
            self._count_stored(queue, publication, min(more, publication.unstored_count), now)

    def _count_stored(
        self, queue: ClassPublishQueue, publication: Publication, count: int, now: float
    ) -> None:
        queue.last_answer_at = now
        self.stored += count
        queue.record_stored(publication, count, now)
        if not publication.unstored_count:
            del self._queue_by_request[publication.request_number]
            self._update_progress(queue)

    def _update_progress(self, queue: ClassPublishQueue) -> None:
        """Update write batches after publications were stored."""
        for batch_number in queue.pop_stored():
            self._unstored_counts[batch_number] -= 1
            if not self._unstored_counts[batch_number]:
                del self._unstored_counts[batch_number]
        self._durable_positions[queue.class_id] = (
            queue.publications[0][0] - 1 if queue.publications else self._last_batch_number
        )
        self._update_full(queue)
        if not queue.publications:
            del self._queues[queue.class_id]
        if self.last_error is not None and not any(
            class_queue.in_flight for class_queue in self._queues.values()
        ):
            self.last_error = None

    def handle_pub_acks(self, replies: RequestReplies, now: float) -> int | None:
        """Handle PubAcks. Returns the result of `pop_durable_position`."""
        acks = jetstream_codec.parse_pub_acks(replies.messages)
        duplicate_numbers = set(replies.numbers[acks.duplicates].tolist())
        for number in replies.numbers[acks.duplicates].tolist():
            queue = self._queue_by_request.get(number)
            if (
                queue is not None
                and number not in queue.stored_checks
                and number not in queue.completion_checks
            ):
                self.duplicates += 1  # A repeated message, not a check.
        refused: list[tuple[ClassPublishQueue, JetStreamError]] = []
        for row, error in acks.errors.items():
            number = int(replies.numbers[row])
            queue = self._queue_by_request.get(number)
            if queue is None:
                continue  # The request was forgotten.
            if error.code == jetstream_codec.NO_RESPONDERS:
                self._mark_stream_missing(queue.class_id)
            if number in queue.stored_checks or number in queue.completion_checks:
                self._handle_check_answer(queue, number, error, now)
                continue
            self.refused += 1
            self.last_error = error
            refused.append((queue, error))
        stored: dict[int, set[int]] = {}
        for number, sequence in zip(replies.numbers.tolist(), acks.sequences.tolist(), strict=True):
            if sequence > 0:
                stored.setdefault(number, set()).add(sequence)
        for number, sequences in stored.items():
            queue = self._queue_by_request.get(number)
            if queue is None:
                continue
            if number in queue.stored_checks or number in queue.completion_checks:
                self._handle_check_answer(
                    queue, number, None if number in duplicate_numbers else _CHECK_FAILED, now
                )
            elif number in queue.single_acks:
                self._record_single_ack(queue, number, now)
            elif (
                publication := queue.in_flight.get(number)
            ) is not None and not publication.is_fast_batch:
                more = sequences - publication.stored_sequences
                publication.stored_sequences |= more
                if more:
                    self._count_stored(
                        queue, publication, min(len(more), publication.unstored_count), now
                    )
        for queue, error in refused:
            self._refuse(queue, error, now)
        return self.pop_durable_position()

    def _record_single_ack(self, queue: ClassPublishQueue, number: int, now: float) -> None:
        """Record the PubAck of a single message."""
        del self._queue_by_request[number]
        publication, row = queue.single_acks.pop(number)
        if queue.unverified:
            self._mark_stored(queue, publication, row)
        else:
            publication.mark_stored(row)
            self._count_stored(queue, publication, 1, now)

    def _refuse(self, queue: ClassPublishQueue, error: JetStreamError | None, now: float) -> None:
        """Schedule a verification after the stream refused something in flight."""
        if queue.in_flight:
            queue.refusal = error
            queue.verify_at = now + PAUSE_SECONDS  # Later messages are answered first.
            self._refusing_classes.add(queue.class_id)
            self._update_full(queue)

    def _update_full(self, queue: ClassPublishQueue) -> None:
        is_full = queue.is_full
        if not is_full and queue.pending_bytes >= CLASS_SHARE_MIN_BYTES:
            total = sum(class_queue.pending_bytes for class_queue in self._queues.values())
            is_full = queue.pending_bytes >= SHARED_BYTES - total
        if is_full:
            self.full.add(queue.class_id)
        else:
            self.full.discard(queue.class_id)

    def refusal(self, class_id: int) -> JetStreamError | None:
        """Return why the stream of a class refused the last message; None if it accepted it."""
        queue = self._queues.get(class_id)
        return None if queue is None else queue.refusal

    def pop_refusing_classes(self) -> set[int]:
        """Return the classes with refused messages since the previous call."""
        refusing, self._refusing_classes = self._refusing_classes, set()
        return refusing

    def _mark_stream_missing(self, class_id: int) -> None:
        self._classes_without_stream.add(class_id)
        self.open_classes.discard(class_id)

    def pop_classes_without_stream(self) -> set[int]:
        """Return the classes whose stream did not respond since the previous call."""
        class_ids, self._classes_without_stream = self._classes_without_stream, set()
        return class_ids

    def pop_durable_position(self) -> int | None:
        """Return the log position up to which everything is stored; None if it has not advanced."""
        last = (
            next(iter(self._unstored_counts)) - 1
            if self._unstored_counts
            else self._last_batch_number
        )
        if last <= self._reported_batch_number:
            return None
        self._reported_batch_number = last
        return last

    def pop_durable_positions(self) -> dict[int, int]:
        """Return the advanced log positions up to which a class is stored, by class."""
        reached_in, self._durable_positions = self._durable_positions, {}
        return reached_in
