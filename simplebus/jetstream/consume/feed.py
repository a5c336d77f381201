"""What one subscription at a door is fed from a consumer, and what goes back.

Rule 1: what was fetched lies in the position's own ring, numbered from 0 as it came; what it is in
the stream, and how it is acknowledged there, is remembered until it is.
Rule 2: while a message is here it is this door's: it is said to be in work before the consumer
takes it for lost. Who is to be sent it, when and how often, decides the position. A door that goes
gives back what is not acknowledged.
Rule 3: a message that comes again though it is here, or was acknowledged here, is not fed twice
(`remembered`).
Rule 4: the consumer is asked for no more than has room.
Rule 5: a consumer that nobody else can have (`Sole`) is told of all up to a message at once; where
several share one, of each message.

    asked for ─► fetched ─► in the ring ─► acknowledged by who was sent it ─► +ACK
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from simplebus.core.group.group import Group
from simplebus.core.limits import GROUP_IN_FLIGHT_MESSAGES
from simplebus.core.protocol import envelope_batch, frames
from simplebus.core.protocol.frames import Flags, FrameBatch, Integers
from simplebus.core.ring.columns import MessageRows
from simplebus.core.store.store import Store
from simplebus.core.subscription.subscription import BrokerSubscription
from simplebus.jetstream import api
from simplebus.jetstream.consume.ack_all import Sole
from simplebus.jetstream.consume.acked_sequences import Remembered
from simplebus.jetstream.consume.dead_letters import Burying
from simplebus.jetstream.consume.give_back import BURIED, Awaited, Owed
from simplebus.jetstream.publish import codec
from simplebus.jetstream.remote_class import FEED_MESSAGES_MAX, RemoteClass
from simplebus.nats.client import jetstream_codec
from simplebus.nats.client.events import ReceivedMessages

FETCH_MESSAGES_MAX = 16 * 1024
FETCH_BYTES = 8 * 1024 * 1024
"""At most so much is asked for at once."""
FETCH_SECONDS = 30.0
"""How long a consumer may take to send what it was asked for."""
ALIVE_SECONDS = 5.0
"""How often a consumer that has nothing to send says that it is there."""
REFUSALS_MAX, REST_SECONDS = 4, 0.25
"""A consumer that has refused more requests in a row is asked after a pause."""
REFILL_PART = 2
"""More is asked for when what was asked for is less than this part of the room."""


@dataclass(slots=True)
class _Block:
    """Messages first..last-1 of the ring, which came together."""

    first: int
    messages: ReceivedMessages
    sequences: Integers
    """In the stream, from 1."""

    @property
    def last(self) -> int:
        return self.first + self.messages.count


class _Waiting(NamedTuple):
    """Messages that came and found no room yet."""

    messages: ReceivedMessages
    sequences: Integers
    attempts: Integers
    came_at: float

    def pick(self, rows: Integers | Flags | slice) -> _Waiting:
        some = self.messages.pick(rows), self.sequences[rows], self.attempts[rows]
        return _Waiting(*some, self.came_at)


@dataclass(frozen=True, slots=True)
class Found:
    """A position's consumer."""

    name: str
    was_there: bool
    is_sole: bool = False
    """Whether it acknowledges all up to a message at once."""
    sent_to: int = 0
    """The last message of the stream that somebody was sent by one that it took over from."""
    sent_before: int = 0
    """The last one that it has sent itself."""
    sent_count: int = 0
    """How many it has, those counted that it sent again."""
    floor: int = 0
    """All of the stream before it is acknowledged; 0 where that is not known."""
    is_of_new_stream: bool = False
    """Whether the stream is another one than the one before."""
    awaited: dict[int, bytes] = field(default_factory=dict)
    """What was given back to it and is to come to this door, by message of the stream: by which it
    is told of that one."""


@dataclass(frozen=True, slots=True)
class FeedStatistics:
    """A snapshot."""

    outstanding: int
    """Messages that are here and not acknowledged."""
    asked: int
    """How many more the consumer was asked for."""
    fetched: int
    repeated: int
    """Of these, how many were here already."""
    odd: int
    """How many could be no message of the bus: the consumer was told not to send them again."""


class Feed:
    """Of one position."""

    def __init__(self, cls: RemoteClass, position: BrokerSubscription, store: Store) -> None:
        self.cls = cls
        self.position = position
        self._store = store
        self.hold = 0
        """What holds up publishers until it was tried to have its consumer."""
        self.is_open = False
        """Whether its consumer is there."""
        self.asked = 0
        """How many the consumer was asked for that have not come."""
        self.heard_at = 0.0
        """When something came from it last."""
        self.rests_until = 0.0
        """When the consumer may be asked again, which refuses."""
        self.refused = 0
        """How often it has, since messages came last."""
        self.sole: Sole | None = None
        """Of a consumer that is this door's alone."""
        self.burying = Burying()
        self.awaited = Awaited({})
        self.sent_before = 0
        """The last message of the stream that its consumer had sent when it was found,"""
        self._taken_to = 0
        """or that one had from which this one was taken over."""
        self.count_before = self._count_here = self._last_count = 0
        """How many its consumer had sent when it was found, how many came since, and how many it
        had sent with the last of them."""
        self.born = ""
        """When the stream was made from which it is fed."""
        self.holder_sid = 0
        """By which other doors hear that this one has its consumer; 0 where they need not."""
        self.said_last = b""
        """The ack subject of the message that was said last to be done with, as long as it is not
        known whether that was heard."""
        self.is_renewing = False
        """Whether another consumer is asked for."""
        self._blocks: deque[_Block] = deque()
        self._said_floor = 0
        """Everything before it in the ring was said to be acknowledged."""
        self._said: Flags = np.zeros(0, np.bool_)
        """What was of the messages from there on, as far as this goes."""
        self.remembered = Remembered()
        self.is_behind = False
        """Whether the stream came back with less than it had: its sequences are those of other
        messages, and nothing of it is taken until it was looked at."""
        self._done_sequence = 0
        """All up to this one was, where the consumer is this door's alone."""
        self._waiting: deque[_Waiting] = deque()
        """What came and found no room."""
        self._waiting_count = 0
        self.fetched = self.repeated = self.odd = 0

    @property
    def outstanding(self) -> int:
        return self.position.window.in_flight_count + (
            self.position.ring.head - self.position.window.cursor
        )

    @property
    def is_busy(self) -> bool:
        """Whether it has messages that its subscriber is sent or has, but for those that pause."""
        has_no_room = bool(self._waiting) and not self.cls.clock.is_unsure
        return has_no_room or self.outstanding > self.position.delayed_count

    @property
    def known(self) -> tuple[int, int] | None:
        """How many messages its consumer has sent, and the last one of the stream among them, to
        here or before; None if some went elsewhere meanwhile."""
        count = self.count_before + self._count_here
        is_all = not self._count_here or self._last_count == count
        return (count, self._sent_to) if is_all else None

    @property
    def _again_to(self) -> int:
        """What lies before or at it was sent before, if it is not new to the consumer alone."""
        return max(self._sent_to, self._taken_to)

    @property
    def _sent_to(self) -> int:
        """The last message of the stream that its consumer has sent, to here or before."""
        return max(self.remembered.highest, self.sent_before)

    def has_all(self, info: dict[str, Any]) -> bool:
        """Whether all that its consumer has sent, of which this is told, has come to here."""
        if self._waiting:
            return False
        if self.sole is not None:
            return self.sole.taken >= api.delivery_count(info)
        return self._sent_to >= api.last_delivered(info)

    @property
    def is_broken(self) -> bool:
        """Whether what its consumer has sent does not go on with what it sent before."""
        return self.is_behind or (self.sole is not None and self.sole.is_broken)

    @property
    def needed(self) -> int:
        """The first message of the stream that is not acknowledged, as far as that is known here;
        0 if it is not."""
        if self.sole is None:  # The consumer may have had some that are not here.
            return self.remembered.needed
        floor = self.burying.floor(self.position.window.floor)
        for block in self._blocks:
            if block.last > floor:
                return int(block.sequences[max(0, floor - block.first)])
        if self._waiting:
            return int(self._waiting[0].sequences[0])
        highest = self.remembered.highest
        return highest + 1 if highest else self.remembered.needed

    def begin(self, found: Found) -> None:
        """Its consumer is there."""
        self.sole = Sole(found.sent_to) if found.is_sole else None
        self.sent_before, self.count_before = found.sent_before, found.sent_count
        self._taken_to = found.sent_to
        self.remembered.raise_floor(found.floor)
        self.awaited = Awaited(found.awaited)

    def begin_anew(self, found: Found) -> None:
        """It has another consumer. What is here of the same stream comes again, with other ack
        subjects; of another stream, its sequences are those of other messages."""
        self.sole = Sole(found.sent_to) if found.is_sole and found.is_of_new_stream else self.sole
        if self.sole is not None:
            self.sole.begin_anew()
        self.awaited = Awaited({})
        if found.is_of_new_stream:
            self._blocks.clear()
            self._waiting.clear()
            self._waiting_count = self._done_sequence = self.sent_before = self._taken_to = 0
            self.remembered = Remembered()
            self.is_behind = False
        self.remembered.raise_floor(found.floor)
        self.count_before = self._count_here = self._last_count = 0

    def statistics(self) -> FeedStatistics:
        return FeedStatistics(self.outstanding, self.asked, self.fetched, self.repeated, self.odd)

    # Asking --------------------------------------------------------------------------------------

    def room(self) -> int:
        """How many more it could take."""
        position = self.position
        most = position.delivery_policy.in_flight_max or FETCH_MESSAGES_MAX
        if isinstance(position, Group):
            limits = [member.in_flight_max for member in position.members]
            most = max(sum(limits), GROUP_IN_FLIGHT_MESSAGES)
        most = min(most, FETCH_MESSAGES_MAX)
        used = self.outstanding - self.position.delayed_count + self._waiting_count
        spare = FEED_MESSAGES_MAX - len(position.ring)
        return max(0, min(most - used, spare))

    def wanted(self) -> int:
        """How many to ask the consumer for now; 0 for none yet."""
        if self._waiting:
            return 0
        room = self.room()
        if room <= 0 or self.asked * REFILL_PART > room:
            return 0
        return room - self.asked

    def end_asked(self, code: int, words: str, headers: bytes) -> None:
        """The consumer has ended a request, and says why."""
        self.asked = max(0, self.asked - jetstream_codec.parse_pending_messages(headers))
        self.refused += not jetstream_codec.is_normal_end(code, words)
        if self.refused > REFUSALS_MAX:
            self.rests_until = self.heard_at + REST_SECONDS

    # What comes ----------------------------------------------------------------------------------

    def take(self, messages: ReceivedMessages) -> bytes:
        """Messages have come from the consumer. Returns what is to be said of some of them at
        once."""
        self.asked = max(0, self.asked - messages.count)
        self.fetched += messages.count
        self.refused = 0
        told = jetstream_codec.parse_deliveries(messages)
        self._count_here += messages.count
        self._last_count = max(self._last_count, int(told.counts.max(initial=0)))
        said: list[bytes] = []
        if not told.good.all():
            self.odd += messages.count - int(np.count_nonzero(told.good))
            told = told.pick(told.good)
        self.is_behind = self.is_behind or self.remembered.is_behind(told)
        if self.is_behind:
            return b""
        messages, sequences, attempts = told.messages, told.sequences, told.attempts
        self.awaited.came(sequences)
        if self.sole is not None:
            fresh = self.sole.admit(told, messages)
            attempts = np.where(sequences <= self.sole.sent_to, np.maximum(attempts, 2), attempts)
            if not fresh.all():
                told, attempts = told.pick(fresh), attempts[fresh]
        elif (
            (attempts > 1).any()
            or (sequences <= self._again_to).any()
            or (sequences[1:] <= sequences[:-1]).any()
        ):
            attempts = np.where(sequences <= self._again_to, np.maximum(attempts, 2), attempts)
            fresh, again = self._sort_out(messages, sequences)
            if again.any():
                said.append(jetstream_codec.encode_acks(messages.pick(again)))
            at = np.flatnonzero(fresh)
            at = at[np.argsort(sequences[at], kind="stable")]
            at = at[np.diff(sequences[at], append=0) != 0]  # Of each, the one that came last.
            told, attempts = told.pick(at), attempts[at]
        self.repeated += messages.count - told.messages.count
        if told.messages.count:
            self.remembered.take(told)
            now = self._store.clock.now
            self._waiting.append(_Waiting(told.messages, told.sequences, attempts, now))
            self._waiting_count += told.messages.count
            said.append(self.fill())
        return b"".join(said)

    def _sort_out(self, messages: ReceivedMessages, sequences: Integers) -> tuple[Flags, Flags]:
        """Which of these are not here, and which were acknowledged before. What is here has another
        ack subject from now on, by which it is acknowledged."""
        again = self.remembered.are_done(sequences)
        fresh = ~again
        for some in self._waiting:
            fresh &= ~np.isin(sequences, some.sequences)
        for block in self._blocks:
            known = np.isin(sequences, block.sequences) & fresh
            if known.any():
                rows, order = np.flatnonzero(known), np.argsort(block.sequences)
                at = order[np.searchsorted(block.sequences[order], sequences[rows])]
                block.messages = _with_replies(block.messages, at, messages, rows)
            fresh &= ~known
        return fresh, again

    def fill(self) -> bytes:
        """Put what came into the ring, as far as there is room. Returns what is to be said of what
        can be no message of the bus."""
        said: list[bytes] = []
        while self._waiting:
            some = self._waiting.popleft()
            self._waiting_count -= some.messages.count
            end, is_envelope = _run_end(some.messages, some.attempts)
            rest = None
            if end < some.messages.count:
                some, rest = some.pick(slice(0, end)), some.pick(slice(end, None))
            taken, good = self._append(some, is_envelope)
            bad = np.flatnonzero(~good)
            if bad.size:
                self.odd += bad.size
                if self.sole is None:  # Else that would be said of all before them.
                    said.append(
                        jetstream_codec.encode_acks(
                            some.messages.pick(bad), jetstream_codec.TERMINATE
                        )
                    )
            if rest is not None:
                self._put_back(rest)
            kept = np.flatnonzero(good)[taken:]
            if kept.size:
                self._put_back(some.pick(kept))
                break
        return b"".join(said)

    def _put_back(self, some: _Waiting) -> None:
        self._waiting.appendleft(some)
        self._waiting_count += some.messages.count

    def _append(self, some: _Waiting, is_envelope: bool) -> tuple[int, Flags]:
        """Messages that are alike. Returns how many of the good ones found room, and which can be
        messages of the bus."""
        position, ring, cls = self.position, self.position.ring, self.cls
        messages, sequences, attempts, came_at = some
        batch, good = codec.framed(cls.class_id, messages, is_envelope=is_envelope)
        most = self._store.settings.limits.frame_bytes
        if (batch.lengths > most).any():
            batch, good = _kept(batch, good, batch.lengths <= most)
        first, taken = ring.head, 0
        timer = self._store.timer_index
        if not is_envelope:
            taken = ring.append(batch, timer) if batch.count else 0
        else:
            batch, good = _good_envelopes(batch, good)
            if batch.count:
                rows = self._rows(batch, messages.pick(good), came_at)
                taken = ring.append(batch, timer, rows) if rows is not None else 0
        if taken:
            rows_taken = slice(0, taken) if good.all() else np.flatnonzero(good)[:taken]
            self._blocks.append(_Block(first, messages.pick(rows_taken), sequences[rows_taken]))
            if attempts[0] > 1:
                position.requeue_with_attempts(first, int(attempts[0]) - 1)
        return taken, good

    def _rows(
        self, batch: FrameBatch, messages: ReceivedMessages, came_at: float
    ) -> MessageRows | None:
        """What is known of them; None where there is no memory for it, or the stream is to be asked
        what time it is."""
        read = envelope_batch.scan_envelopes(batch)
        if read.expires is None and read.not_before is None:
            return self.cls.channels.build_rows(read, came_at)
        stored = jetstream_codec.parse_deliveries(messages).times / 1e9
        accepted = self.cls.clock.dates(stored, came_at)
        return None if accepted is None else self.cls.channels.build_rows(read, accepted)

    # What goes back ------------------------------------------------------------------------------

    def acked(self) -> list[ReceivedMessages]:
        """What was acknowledged since this was asked last, and is not being buried. The ring lets
        go of it."""
        if self.sole is not None:
            word = self._done_to(self.sole)
            return [] if word is None else [word]
        window = self.position.window
        first, floor = self._said_floor, self.burying.floor(window.floor)
        gaps, rest = window.unacked_sequences()
        if floor == first and rest == floor and not self._said.any():
            return []
        last = max(window.floor, rest)
        flags = ~self.burying.flags(first, last)
        flags[gaps - first] = False
        known = min(self._said.size, flags.size)
        fresh = flags.copy()
        fresh[:known] &= ~self._said[:known]
        found = self._picked(np.flatnonzero(fresh) + first)
        for block, rows in found:
            self.remembered.add(np.sort(block.sequences[rows]))
        self._said_floor, self._said = floor, flags[floor - first :]
        said = [block.messages.pick(rows) for block, rows in found]
        while self._blocks and self._blocks[0].last <= floor:
            self._blocks.popleft()
        if floor > self.position.ring.floor:
            self.position.ring.release(floor)
        return said

    def _done_to(self, sole: Sole) -> ReceivedMessages | None:
        """The last of the messages that are all acknowledged, if that was not said. The ring lets
        go of them."""
        blocks, ring = self._blocks, self.position.ring
        floor = self.burying.floor(self.position.window.floor)
        done = 0
        while blocks and blocks[0].last <= floor:
            done = int(blocks.popleft().sequences[-1])
        if blocks and blocks[0].first < floor:
            done = int(blocks[0].sequences[floor - 1 - blocks[0].first])
        if floor == ring.head and not self._waiting:
            done = sole.highest  # What could be no message of the bus is done with, too.
        self._said_floor = floor
        if floor > ring.floor:
            ring.release(floor)
        self._done_sequence = max(done, self._done_sequence)
        return sole.word(self._done_sequence)

    def accepted_at(self, number: int) -> float:
        """When the stream took a message of the ring: seconds since 1970; 0.0 if it is not here."""
        for block in self._blocks:
            if block.first <= number < block.last:
                return jetstream_codec.parse_stored_time(block.messages, number - block.first)
        return 0.0

    def strike(self, first: int, last: int) -> None:
        """Messages first..last-1 of the stream are nobody's any more, sent or not."""
        for block in self._blocks:
            a, b = block.sequences.searchsorted(first), block.sequences.searchsorted(last)
            if a < b and not (np.diff(block.sequences) > 0).all():  # Some came again meanwhile.
                continue
            if a < b:
                self.position.purge(block.first + int(a), block.first + int(b))
        waiting, self._waiting = self._waiting, deque()
        self._waiting_count = 0
        for some in waiting:
            kept = (some.sequences < first) | (some.sequences >= last)
            if kept.any():
                self._waiting.append(some.pick(kept))
                self._waiting_count += int(np.count_nonzero(kept))

    def left(self) -> list[ReceivedMessages]:
        """What is here and not acknowledged."""
        if self.sole is not None:
            return self.sole.open()
        first, head = self._said_floor, self.position.ring.head
        kept = np.ones(head - first, np.bool_)
        known = min(self._said.size, kept.size)
        kept[:known] = ~self._said[:known]
        found = [b.messages.pick(rows) for b, rows in self._picked(np.flatnonzero(kept) + first)]
        return found + [some.messages for some in self._waiting]

    def given_back(
        self, pauses: list[tuple[int, int, float]]
    ) -> list[tuple[ReceivedMessages, float]]:
        """What is here and not acknowledged, and how long it is not to be sent to anybody: of
        messages first..last-1 of the ring as `pauses` say."""
        first, head = self._said_floor, self.position.ring.head
        waits = np.zeros(head - first)
        for begin, end, pause in pauses:
            waits[max(0, begin - first) : max(0, end - first)] = max(0.0, pause)
        kept = np.ones(head - first, np.bool_)
        known = min(self._said.size, kept.size)
        kept[:known] = ~self._said[:known]
        found: list[tuple[ReceivedMessages, float]] = []
        for pause in np.unique(waits).tolist():
            at = np.flatnonzero(kept & (waits == pause)) + first
            found += [(b.messages.pick(rows), pause) for b, rows in self._picked(at)]
        return found + [(some.messages, 0.0) for some in self._waiting]

    def owed(self, pauses: list[tuple[int, int, float]]) -> Owed | None:
        """What is here and not acknowledged of a consumer that is this door's alone, or is being
        buried; None for nothing. `pauses` as of `given_back`."""
        assert self.sole is not None
        window, head = self.position.window, self.position.ring.head
        floor = self.burying.floor(window.floor)
        waits = np.full(head - floor, -1.0)
        waits[window.cursor - floor :] = 0.0  # What is here and was not sent yet.
        for a, b in window.unacked_ranges(floor, head):
            waits[a - floor : b - floor] = 0.0
        for begin, end, pause in pauses:
            some = waits[max(0, begin - floor) : max(0, end - floor)]
            some[some >= 0.0] = max(0.0, pause)
        waits[self.burying.flags(floor, head)] = BURIED
        found = self._picked(np.arange(floor, head))
        sequences = [block.sequences[rows] for block, rows in found]
        spans = [waits[block.first + rows - floor] for block, rows in found]
        sequences += [each.sequences for each in self._waiting]
        spans += [np.zeros(each.sequences.size) for each in self._waiting]
        if not sequences:
            return None
        all_sequences, all_waits = np.concatenate(sequences), np.concatenate(spans)
        if not (all_waits >= 0.0).any():
            return None
        sent_to = max(self.sole.highest, self.sole.sent_to)
        return Owed(all_sequences, all_waits, self.sole.highest, sent_to)

    def _picked(self, at: Integers) -> list[tuple[_Block, Integers]]:
        """Where these messages of the ring are, which ascend."""
        found: list[tuple[_Block, Integers]] = []
        if not at.size:
            return found
        for block in self._blocks:
            a, b = at.searchsorted(block.first), at.searchsorted(block.last)
            if a < b:
                found.append((block, at[a:b] - block.first))
        return found

    def take_said(self) -> bytes:
        """The ack subject of what was said last, if it was not asked for since."""
        said, self.said_last = self.said_last, b""
        return said


def _run_end(messages: ReceivedMessages, attempts: Integers) -> tuple[int, bool]:
    """How many in front are alike, with envelopes or without, and sent as often before; and whether
    they have envelopes."""
    kinds = codec.are_envelopes(messages)
    breaks = (kinds[1:] != kinds[:-1]) | (attempts[1:] != attempts[:-1])
    found = np.flatnonzero(breaks)
    return int(found[0]) + 1 if found.size else messages.count, bool(kinds[0])


def _kept(batch: FrameBatch, good: Flags, flags: Flags) -> tuple[FrameBatch, Flags]:
    """Some of the frames that were good until now; and which are good of all."""
    found = np.zeros_like(good)
    found[np.flatnonzero(good)[flags]] = True
    if not flags.any():
        return batch.slice(0, 0), found
    return batch.select(np.flatnonzero(flags)), found


def _good_envelopes(batch: FrameBatch, good: Flags) -> tuple[FrameBatch, Flags]:
    """The same, of frames of which some may be no good envelopes."""
    if not batch.count or envelope_batch.scan_envelopes(batch).count == batch.count:
        return batch, good
    each = (
        envelope_batch.scan_envelopes(batch.slice(row, row + 1)).count for row in range(batch.count)
    )
    return _kept(batch, good, np.fromiter(map(bool, each), np.bool_, batch.count))


def _with_replies(
    messages: ReceivedMessages, at: Integers, other: ReceivedMessages, rows: Integers
) -> ReceivedMessages:
    """The same, but that some of them have the ack subjects that others have."""
    replies = [other.reply(row) for row in rows.tolist()]
    ends = len(messages.raw) + np.cumsum([len(reply) for reply in replies])
    changed = messages.pick(slice(None))
    changed.raw = b"".join([messages.raw, *replies, bytes(len(frames.DELIMITER) * 8)])
    changed.replies, changed.reply_ends = changed.replies.copy(), changed.reply_ends.copy()
    changed.replies[at] = np.concatenate([[len(messages.raw)], ends[:-1]])
    changed.reply_ends[at] = ends
    return changed
