"""Publish queue of one class.

    append ─► ready ─► in flight ─► stored
                ▲          ▼          ▲
                └───  unverified  ────┘

Publications are written in order. When PubAcks are missing or a message is refused, everything in
flight becomes unverified: the stream is asked which message ids it has, and the rest is written
again first. Counted PubAcks give the number of stored messages; for an unverified publication, each
stored message is tracked.

When the stream is full, only one publication of a few messages is in flight, so that almost nothing
overtakes a refused message. A class never waits for another one.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace

import numpy as np

from simplebus.core.limits import COMMIT_LOG_BYTES_MAX
from simplebus.core.protocol.frames import Flags, FrameBatch, Integers
from simplebus.jetstream.publish import codec
from simplebus.nats.client.jetstream_codec import JetStreamError

IN_FLIGHT_MESSAGES_MAX = 16 * 1024
IN_FLIGHT_BYTES_MAX = 4 * 1024 * 1024
"""Maximum of the written messages of a class that have no PubAck."""
PENDING_BYTES_MAX = 16 * 1024 * 1024
PENDING_PUBLICATIONS_MAX = 4096
"""Bytes and publications in the queue of a class from which it accepts no more messages."""
SHARED_BYTES = 48 * 1024 * 1024
CLASS_SHARE_MIN_BYTES = 1024 * 1024
"""A class may use half of what the other classes leave of SHARED_BYTES, but at least this. The rest
of COMMIT_LOG_BYTES_MAX stays available for classes that make progress.
"""
PUBLISHERS_MAX = 4096
"""Publishers whose highest message number is remembered, besides publishers with queued
messages.
"""
CROWDED_PUBLICATIONS = 64
"""Publications in the queue from which new messages are collected in larger batches."""
WINDOW_MAX = 32
RECOVERED_MESSAGES = 4096
"""Messages that a stream must store without a refusal to count as no longer full."""
SILENT_SECONDS = 0.5
"""Time without an answer after which a class may be stuck."""

assert IN_FLIGHT_BYTES_MAX < PENDING_BYTES_MAX
assert SHARED_BYTES < COMMIT_LOG_BYTES_MAX


@dataclass(slots=True, eq=False)
class Publication:
    """Messages of one class, frame type and publisher that are written together."""

    class_id: int
    batch: FrameBatch
    prefix: bytes
    """First part of the message ids."""
    message_numbers: Integers
    unstored_count: int
    """Number of messages without a PubAck."""
    has_publisher_name: bool
    has_message_ids: bool = False
    """True if every message was written with an id. Then it is repeated message by message."""
    is_fast_batch: bool = False
    """True if the messages were written as a JetStream fast batch."""
    is_open: bool = False
    """True until the stream reports the end of the fast batch."""
    is_reported_stored: bool = False
    """True if the whole fast batch was reported as stored. It no longer counts as in flight, but
    its last message is still to be verified.
    """
    stored_sequences: set[int] = field(default_factory=set)
    """Stream sequences of the received PubAcks. Two servers that both believe to be the leader may
    send the same PubAck twice.
    """
    unstored: Flags | None = None
    """Flags of the messages that are not known to be stored, shape (n,). Used while the publication
    is unverified or each message has a PubAck of its own.
    """
    batch_number: int = 0
    request_number: int = 0
    """Number of the request as which the messages were last written."""
    progress_at: float = 0.0
    """Time of the last write or PubAck."""

    removed_numbers: list[Integers] = field(default_factory=list)
    """Message numbers of stored messages that were removed from `batch`: at most one array."""

    @property
    def confirms_in_order(self) -> bool:
        """True for a fast batch whose messages are stored up to some message and not beyond."""
        return self.is_fast_batch and not self.has_publisher_name

    def keep_rows(self, rows: Integers) -> None:
        """Remove all other messages, before anything was written."""
        self.batch = self.batch.select(rows) if rows.size else self.batch.slice(0, 0)
        self.message_numbers, self.unstored_count = self.message_numbers[rows], rows.size

    def mark_unverified(self) -> int:
        """Start verification. Returns the number of messages that are not known to be stored."""
        if self.unstored is None:
            self.unstored = np.ones(self.batch.count, np.bool_)
            if self.confirms_in_order:
                self.unstored[: self.batch.count - self.unstored_count] = False
        self.is_reported_stored = False
        self.stored_sequences.clear()
        return int(np.count_nonzero(self.unstored))

    def rows_to_verify(self) -> Integers:
        """Return the rows for which the stream must be asked."""
        assert self.unstored is not None, "the publication is not being verified"
        if not self.confirms_in_order:
            return np.flatnonzero(self.unstored)
        rows = codec.milestone_rows(self.batch.count)
        return rows[self.unstored[rows]]

    def mark_stored(self, rows: int | slice) -> int:
        """Mark rows as stored. Returns the number that were not marked before."""
        assert self.unstored is not None, "PubAcks of this publication are only counted"
        new_count = int(np.count_nonzero(self.unstored[rows]))
        self.unstored[rows] = False
        return new_count

    def finish_verification(self) -> None:
        """Keep the messages that are not stored; keep all data if everything is stored."""
        assert self.unstored is not None, "the publication is not being verified"
        unstored, self.unstored = self.unstored, None
        rows = np.flatnonzero(unstored)
        if 0 < rows.size < unstored.size:  # Frees memory while a stream is full for hours.
            self.removed_numbers = [
                np.concatenate([*self.removed_numbers, self.message_numbers[~unstored]])
            ]
            self.batch, self.message_numbers = self.batch.select(rows), self.message_numbers[rows]
        self.unstored_count = rows.size

    def slice_messages(self, first: int, last: int | None = None) -> Publication:
        """Return a publication of the messages first..last-1, which are not in flight."""
        batch = self.batch.slice(first, self.batch.count if last is None else last)
        ids = self.message_numbers[first:last]
        removed = [] if first else self.removed_numbers
        return replace(
            self,
            batch=batch,
            message_numbers=ids,
            unstored_count=batch.count,
            stored_sequences=set(),
            removed_numbers=removed,
        )


@dataclass(slots=True, eq=False)
class ClassPublishQueue:
    """Publications of one class that are not stored."""

    class_id: int
    publications: deque[tuple[int, Publication]] = field(default_factory=deque)
    """All publications from the first unstored one, with their write batch numbers."""
    ready: deque[Publication] = field(default_factory=deque)
    """Publications to write."""
    in_flight: dict[int, Publication] = field(default_factory=dict)
    """Written publications with missing PubAcks, by request number, oldest first."""
    unverified: dict[int, Publication] = field(default_factory=dict)
    """Publications being verified, by request number. Nothing is written until all are verified."""
    unverified_count: int = 0
    """Messages of unverified publications that are not known to be stored."""
    stored_checks: dict[int, tuple[Publication, int]] = field(default_factory=dict)
    """Message (publication and row) that each pending check asks for, by request number."""
    single_acks: dict[int, tuple[Publication, int]] = field(default_factory=dict)
    """Message (publication and row) that each expected single PubAck confirms, by request number.
    """
    completion_checks: dict[int, Publication] = field(default_factory=dict)
    """Fast batches that were reported as stored and whose last message is being verified, by
    request number.
    """
    confirmed_ids: list[tuple[int, bytes, Integers]] = field(default_factory=list)
    """Stored messages of named publishers in write batches that are not completely stored: batch
    number, id prefix and message numbers.
    """
    highest_numbers: dict[bytes, int] = field(default_factory=dict)
    """Highest appended message number of each named publisher, by id prefix."""
    window: int = 0
    """Messages per publication while the stream is full; 0 for no limit."""
    stored_since_full: int = 0
    """Messages stored since the stream was full."""
    verify_at: float = float("inf")
    """Time at which everything in flight is verified, or verified again."""
    refusal: JetStreamError | None = None
    """Reason why the stream refused the last message; None if it accepted it and does not count as
    full.
    """
    checks_mark: int = 0
    """Mark of the connection that shows whether the server has received the last checks; 0 after a
    reconnect.
    """
    unanswered_checks: int = 0
    """Consecutive rounds of checks that the server received and the stream did not answer."""
    last_answer_at: float = 0.0
    """Time of the last answer, or of the first request that waits for one."""
    in_flight_count: int = 0
    in_flight_bytes: int = 0
    pending_bytes: int = 0
    """Bytes of all publications in the queue."""

    @property
    def can_write(self) -> bool:
        """True if more may be written without overtaking messages that must be repeated."""
        if self.window:
            return not (self.in_flight or self.unverified)
        is_full = (
            self.in_flight_count >= IN_FLIGHT_MESSAGES_MAX
            or self.in_flight_bytes >= IN_FLIGHT_BYTES_MAX
        )
        is_held_up = bool(self.in_flight) and self.verify_at < float("inf")
        return not (is_full or self.unverified or is_held_up)

    @property
    def is_full(self) -> bool:
        """True if the class must not accept more messages."""
        return (
            self.pending_bytes >= PENDING_BYTES_MAX
            or len(self.publications) >= PENDING_PUBLICATIONS_MAX
        )

    def is_crowded(self, now: float) -> bool:
        """Return True if many publications are in the queue and are making progress."""
        is_progressing = (
            self.verify_at == float("inf") and now < self.last_answer_at + SILENT_SECONDS
        )
        return (
            len(self.publications) >= CROWDED_PUBLICATIONS
            and bool(self.in_flight)
            and is_progressing
        )

    def find_unstored(self, number: int) -> Publication | None:
        """Return the in-flight or unverified publication of a request; None if it does not
        exist.
        """
        return self.in_flight.get(number) or self.unverified.get(number)

    def append(self, batch_number: int, publication: Publication) -> None:
        """Append a publication, without the messages that a reconnected publisher has repeated."""
        if publication.has_publisher_name:
            self._drop_repeated(publication)
            self._drop_already_queued(publication)
        publication.batch_number = batch_number
        self.publications.append((batch_number, publication))
        if publication.unstored_count:
            self.ready.append(publication)
        self.pending_bytes += publication.batch.data.size

    def _drop_repeated(self, publication: Publication) -> None:
        """Remove messages that occur twice in the publication."""
        if (np.diff(publication.message_numbers) <= 0).any():
            _, firsts = np.unique(publication.message_numbers, return_index=True)
            if firsts.size < publication.message_numbers.size:
                publication.keep_rows(np.sort(firsts))

    def _drop_already_queued(self, publication: Publication) -> None:
        """Remove messages that are in the queue already.

        The stream may have forgotten their ids by the time the second copy is written.
        """
        own_prefix, ids = publication.prefix, publication.message_numbers
        highest = self.highest_numbers.get(own_prefix, -1)
        if ids.min() <= highest:
            new_flags = np.ones(ids.size, np.bool_)
            for _, each in self.publications:
                if each.prefix == own_prefix:
                    for queued_ids in (each.message_numbers, *each.removed_numbers):
                        new_flags &= ~np.isin(ids, queued_ids)
            for _, prefix, queued_ids in self.confirmed_ids:
                if prefix == own_prefix:
                    new_flags &= ~np.isin(ids, queued_ids)
            if not new_flags.all():
                publication.keep_rows(np.flatnonzero(new_flags))
        if len(self.highest_numbers) >= PUBLISHERS_MAX and own_prefix not in self.highest_numbers:
            waiting = {each.prefix for _, each in self.publications}
            waiting |= {prefix for _, prefix, _ in self.confirmed_ids}
            self.highest_numbers = {
                name: self.highest_numbers[name] for name in waiting if name in self.highest_numbers
            }
        self.highest_numbers[own_prefix] = max(highest, int(ids.max()))

    def mark_unverified(self) -> None:
        """Start verification of everything in flight."""
        for publication in self.in_flight.values():
            if not publication.is_reported_stored:
                self.adjust_in_flight(publication, -1)
        self.unverified_count = sum(
            publication.mark_unverified() for publication in self.in_flight.values()
        )
        self.unverified, self.in_flight = self.in_flight, {}

    def mark_stored(self, publication: Publication, rows: int | slice) -> None:
        """Mark rows of an unverified publication as stored."""
        self.unverified_count -= publication.mark_stored(rows)

    def finish_verification(self) -> int:
        """Queue the unstored messages of all verified publications first.

        Returns:
            The number of messages that turned out to be stored.
        """
        more = 0
        for publication in reversed(self.unverified.values()):
            before = publication.unstored_count
            self.pending_bytes -= publication.batch.data.size
            publication.finish_verification()
            more += max(0, before - publication.unstored_count)
            if publication.unstored_count:
                self.pending_bytes += publication.batch.data.size
                self.ready.appendleft(publication)
        self.verify_at = float("inf")
        return more

    def split_first(self) -> int | None:
        """Split the first ready publication if it exceeds the window.

        Returns:
            The write batch number of both parts; None if it was not split.
        """
        publication, count = self.ready[0], self.window
        if not 0 < count < publication.batch.count:
            return None
        at = next(at for at, (_, each) in enumerate(self.publications) if each is publication)
        batch_number, parts = (
            self.publications[at][0],
            (publication.slice_messages(0, count), publication.slice_messages(count)),
        )
        self.publications[at] = batch_number, parts[0]
        self.publications.insert(at + 1, (batch_number, parts[1]))
        self.ready[0] = parts[0]
        self.ready.insert(1, parts[1])
        return batch_number

    def adjust_in_flight(self, publication: Publication, sign: int) -> None:
        self.in_flight_count += sign * publication.unstored_count
        self.in_flight_bytes += sign * publication.batch.data.size

    def record_stored(self, publication: Publication, count: int, now: float) -> None:
        """Count `count` more stored messages of an in-flight publication."""
        publication.progress_at = now
        publication.unstored_count -= count
        if not self.window:
            self.refusal = None
        if not publication.is_reported_stored:
            self.in_flight_count -= count
        if publication.unstored_count <= 0:
            publication.stored_sequences.clear()
            del self.in_flight[publication.request_number]
            if self.window:
                self.stored_since_full += publication.batch.count
                is_calm = self.stored_since_full >= RECOVERED_MESSAGES
                self.window = 0 if is_calm else min(2 * self.window, WINDOW_MAX)
            if not publication.is_reported_stored:
                self.in_flight_bytes -= publication.batch.data.size
            self.pending_bytes -= publication.batch.data.size
            if not self.in_flight:
                self.verify_at = float("inf")

    def pop_stored(self) -> list[int]:
        """Remove the stored publications at the front. Returns their write batch numbers."""
        found: list[int] = []
        while self.publications and not self.publications[0][1].unstored_count:
            batch_number, publication = self.publications.popleft()
            found.append(batch_number)
            if publication.has_publisher_name:
                self.confirmed_ids += [
                    (batch_number, publication.prefix, ids)
                    for ids in (publication.message_numbers, *publication.removed_numbers)
                ]
        if found and self.confirmed_ids:
            first = self.publications[0][0] if self.publications else found[-1] + 1
            self.confirmed_ids = [
                confirmed_id for confirmed_id in self.confirmed_ids if confirmed_id[0] >= first
            ]
        return found
