"""What publishers have said to one class, on its way into its stream.

Rule 1: publications are in_flight in the order in which they were put, and each is of one publisher.
Rule 2: answers that are counted say how much of what was in_flight is stored, and nothing of what is
unverified: of that it is known which messages are, whoever says it, and however often. Nothing is
stored of what is ready, but for what was on its way still when the stream was asked.
Rule 3: where a stream has no room, one publication is under way, a message at first and then a few: next
to nothing overtakes what was refused.
Rule 4: what waits here is not put a second time.
Rule 5: a class waits for no other: what is under way, what is asked for, what is late and what may
wait is of each by itself.

    put ─► ready ─► in_flight ─► stored
             ▲        ▼        ▲
             └───  unverified  ───┘
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
"""Of a class no more is in_flight to be published while so much has no PubAck."""
PENDING_BYTES_MAX = 16 * 1024 * 1024
PENDING_PUBLICATIONS_MAX = 4096
"""Of a class of which so much waits nothing more is to be accepted."""
SHARED_BYTES = 48 * 1024 * 1024
CLASS_SHARE_MIN_BYTES = 1024 * 1024
"""A class has half of what the others leave of this, and so much in any case: there is some of
COMMIT_LOG_BYTES_MAX for those that go on."""
PUBLISHERS_MAX = 4096
"""Of more publishers it is forgotten what was put, but for those of whom something waits."""
CROWDED_PUBLICATIONS = 64
"""While so many publications of a class are on their way, what comes is gathered to larger ones."""
WINDOW_MAX = 32
RECOVERED_MESSAGES = 4096
"""When so many were stored behind the last refusal, a stream is taken for one that has room."""
SILENT_SECONDS = 0.5
"""A class of which nothing is heard for so long may be held up."""

assert IN_FLIGHT_BYTES_MAX < PENDING_BYTES_MAX
assert SHARED_BYTES < COMMIT_LOG_BYTES_MAX


@dataclass(slots=True, eq=False)
class Publication:
    """Messages of one class, one type and one publisher."""

    class_id: int
    batch: FrameBatch
    prefix: bytes
    """Of their message ids."""
    message_numbers: Integers
    unstored_count: int
    """How many have no PubAck yet."""
    has_publisher_name: bool
    has_message_ids: bool = False
    """Whether all of it was written with ids: what of it is written again goes message by
    message."""
    is_fast_batch: bool = False
    """Whether they were written as one."""
    is_open: bool = False
    """Whether it was not said that this chain has ended."""
    is_reported_stored: bool = False
    """Whether all of a chain was said to be stored: it is not under way any more, though the stream
    has not said so of its last message."""
    stored_sequences: set[int] = field(default_factory=set)
    """Sequences of those that have their PubAcks, as they were written last: two servers that both
    take themselves for the leader may send the same one twice."""
    unstored: Flags | None = None
    """Which ones are not known to be stored: while it is unverified, or each has a PubAck that tells
    of it alone."""
    batch_number: int = 0
    request_number: int = 0
    """Of the request that they are, as they were written last."""
    progress_at: float = 0.0
    """When they were written last, or one of them had its PubAck."""

    removed_numbers: list[Integers] = field(default_factory=list)
    """The numbers of those that were unstored_count out of it when they were stored: one array, or none."""

    @property
    def confirms_in_order(self) -> bool:
        """Whether it is a chain of which all is stored up to some message, and nothing behind it is
        known to be."""
        return self.is_fast_batch and not self.has_publisher_name

    def keep_rows(self, rows: Integers) -> None:
        """Leave these, of one that was not in_flight."""
        self.batch = self.batch.select(rows) if rows.size else self.batch.slice(0, 0)
        self.message_numbers, self.unstored_count = self.message_numbers[rows], rows.size

    def mark_unverified(self) -> int:
        """The stream is to say what of it is stored, but for what is known to be. Returns how many
        are not."""
        if self.unstored is None:
            self.unstored = np.ones(self.batch.count, np.bool_)
            if self.confirms_in_order:
                self.unstored[: self.batch.count - self.unstored_count] = False
        self.is_reported_stored = False
        self.stored_sequences.clear()
        return int(np.count_nonzero(self.unstored))

    def rows_to_verify(self) -> Integers:
        """Of which rows a stream is to say whether it has them."""
        assert self.unstored is not None, "a publication is unverified before it is asked for"
        if not self.confirms_in_order:
            return np.flatnonzero(self.unstored)
        rows = codec.milestone_rows(self.batch.count)
        return rows[self.unstored[rows]]

    def mark_stored(self, rows: int | slice) -> int:
        """It was said of these that they are stored, each by itself, or up to some. Returns of how
        many that was not known."""
        assert self.unstored is not None, "of others it is counted how many are stored"
        fresh = int(np.count_nonzero(self.unstored[rows]))
        self.unstored[rows] = False
        return fresh

    def finish_verification(self) -> None:
        """The stream has said what it has. Leave what it has not, or all if it has all."""
        assert self.unstored is not None, "a publication is unverified before it is settled"
        unstored, self.unstored = self.unstored, None
        rows = np.flatnonzero(unstored)
        if 0 < rows.size < unstored.size:  # Where a stream has no room, for hours.
            self.removed_numbers = [
                np.concatenate([*self.removed_numbers, self.message_numbers[~unstored]])
            ]
            self.batch, self.message_numbers = self.batch.select(rows), self.message_numbers[rows]
        self.unstored_count = rows.size

    def slice_messages(self, first: int, last: int | None = None) -> Publication:
        """Some of its messages, which are not under way."""
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
    """The way of one class."""

    class_id: int
    publications: deque[tuple[int, Publication]] = field(default_factory=deque)
    """All from the first one on that is not stored, each with its batch_number."""
    ready: deque[Publication] = field(default_factory=deque)
    """Those that are to be written."""
    in_flight: dict[int, Publication] = field(default_factory=dict)
    """Those that were written and have messages without a PubAck, by their numbers: the first ones
    first."""
    unverified: dict[int, Publication] = field(default_factory=dict)
    """Those that were in_flight and of which the stream is to say what it has: nothing is in_flight until
    it has said all."""
    unverified_count: int = 0
    """How many messages of what is unverified are not known to be stored."""
    stored_checks: dict[int, tuple[Publication, int]] = field(default_factory=dict)
    """What the stream was asked for, by number: whether this message of a publication is stored."""
    single_acks: dict[int, tuple[Publication, int]] = field(default_factory=dict)
    """The PubAcks that tell of one message alone and are awaited, by number: which one of a
    publication."""
    completion_checks: dict[int, Publication] = field(default_factory=dict)
    """What it was asked for, by number: whether the last one of a chain is, of which all is said to
    be."""
    confirmed_ids: list[tuple[int, bytes, Integers]] = field(default_factory=list)
    """What is stored of a batch_number of which something is not, of publishers with names: the batch_number, what
    their ids begin with, and the numbers."""
    highest_numbers: dict[bytes, int] = field(default_factory=dict)
    """The highest number that was put of each publisher with a name, by what its ids begin with."""
    window: int = 0
    """Where its stream has no room: so many messages are written at once; 0 for any number."""
    stored_since_full: int = 0
    """How many were stored since it had none."""
    verify_at: float = float("inf")
    """When all that was in_flight is unverified, or the stream asked again, whatever comes."""
    refusal: JetStreamError | None = None
    """Why its stream took nothing last; None when it did, and is not taken for one without room."""
    checks_mark: int = 0
    """By which the connection tells whether the server has taken what the stream was asked last; 0
    where it was asked on a former one."""
    unanswered_checks: int = 0
    """How often in a row the stream has not answered when it was asked, and the server had that."""
    last_answer_at: float = 0.0
    """When an answer came last, or the first one that is awaited was asked for."""
    in_flight_count: int = 0
    in_flight_bytes: int = 0
    pending_bytes: int = 0
    """Of all publications that are not stored."""

    @property
    def can_write(self) -> bool:
        """Whether more may be in_flight: not what would overtake what is to be written again."""
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
        """Whether no more is to be accepted."""
        return (
            self.pending_bytes >= PENDING_BYTES_MAX
            or len(self.publications) >= PENDING_PUBLICATIONS_MAX
        )

    def is_crowded(self, now: float) -> bool:
        """Whether many publications are on their way, and nothing holds them up."""
        is_progressing = (
            self.verify_at == float("inf") and now < self.last_answer_at + SILENT_SECONDS
        )
        return (
            len(self.publications) >= CROWDED_PUBLICATIONS
            and bool(self.in_flight)
            and is_progressing
        )

    def find_unstored(self, number: int) -> Publication | None:
        """The one that was written with this number, if it is awaited."""
        return self.in_flight.get(number) or self.unverified.get(number)

    def append(self, batch_number: int, publication: Publication) -> None:
        """One is to be written, but for what waits here already, or is stored in front of what
        does: its publisher, who was cut off, says that again."""
        if publication.has_publisher_name:
            self._drop_repeated(publication)
            self._drop_already_queued(publication)
        publication.batch_number = batch_number
        self.publications.append((batch_number, publication))
        if publication.unstored_count:
            self.ready.append(publication)
        self.pending_bytes += publication.batch.data.size

    def _drop_repeated(self, publication: Publication) -> None:
        """What was said again before the first of it was put."""
        if (np.diff(publication.message_numbers) <= 0).any():
            _, firsts = np.unique(publication.message_numbers, return_index=True)
            if firsts.size < publication.message_numbers.size:
                publication.keep_rows(np.sort(firsts))

    def _drop_already_queued(self, publication: Publication) -> None:
        """The stream may have forgotten it by the time at which it would be written twice."""
        own_prefix, ids = publication.prefix, publication.message_numbers
        highest = self.highest_numbers.get(own_prefix, -1)
        if ids.min() <= highest:
            fresh = np.ones(ids.size, np.bool_)
            for _, each in self.publications:
                if each.prefix == own_prefix:
                    for known in (each.message_numbers, *each.removed_numbers):
                        fresh &= ~np.isin(ids, known)
            for _, prefix, known in self.confirmed_ids:
                if prefix == own_prefix:
                    fresh &= ~np.isin(ids, known)
            if not fresh.all():
                publication.keep_rows(np.flatnonzero(fresh))
        if len(self.highest_numbers) >= PUBLISHERS_MAX and own_prefix not in self.highest_numbers:
            waiting = {each.prefix for _, each in self.publications}
            waiting |= {prefix for _, prefix, _ in self.confirmed_ids}
            self.highest_numbers = {
                name: self.highest_numbers[name] for name in waiting if name in self.highest_numbers
            }
        self.highest_numbers[own_prefix] = max(highest, int(ids.max()))

    def mark_unverified(self) -> None:
        """What was in_flight is not under way any more: the stream is to say what it has of it."""
        for publication in self.in_flight.values():
            if not publication.is_reported_stored:
                self.adjust_in_flight(publication, -1)
        self.unverified_count = sum(
            publication.mark_unverified() for publication in self.in_flight.values()
        )
        self.unverified, self.in_flight = self.in_flight, {}

    def mark_stored(self, publication: Publication, rows: int | slice) -> None:
        """It was said of these of one that is unverified that they are stored."""
        self.unverified_count -= publication.mark_stored(rows)

    def finish_verification(self) -> int:
        """The stream has said what it has of all that was unverified: the rest is the first that is to
        be written. Returns how many more are stored than were known to be."""
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
        """Make two of the first publication that is to be written, if it is larger than the window: the
        first is as large. Returns their batch_number; None where it is not."""
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
        """So many more of a publication that was in_flight are stored."""
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
        """The batch_numbers of publications that are stored, with all before them, since this was asked last."""
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
            self.confirmed_ids = [each for each in self.confirmed_ids if each[0] >= first]
        return found
