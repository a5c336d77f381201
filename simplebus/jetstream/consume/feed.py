"""What one subscription at a door is fed from a consumer, and what goes back.

Rule 1: what was fetched lies in the position's own ring, numbered from 0 as it came; what it is in
the stream, and how it is acknowledged there, is acked_sequences until it is.
Rule 2: while a message is here it is this door's: it is replies to be in work before the consumer
takes it for lost. Who is to be sent it, when and how often, decides the position. A door that goes
gives back what is not acknowledged.
Rule 3: a message that comes again though it is here, or was acknowledged here, is not fed twice
(`acked_sequences`).
Rule 4: the consumer is asked for no more than has room.
Rule 5: a consumer that nobody else can have (`AckAllConsumer`) is deliveries of all up to a message at once; where
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
from simplebus.jetstream.consume.ack_all import AckAllConsumer
from simplebus.jetstream.consume.acked_sequences import AckedSequences
from simplebus.jetstream.consume.dead_letters import FeedDeadLetters
from simplebus.jetstream.consume.give_back import (
    DEAD_LETTER_PENDING,
    ExpectedRedeliveries,
    UnackedOnExit,
)
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
"""A consumer that has refused more requests in a row is asked after a delay_seconds."""
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


class _PendingMessages(NamedTuple):
    """Messages that came and found no room yet."""

    messages: ReceivedMessages
    sequences: Integers
    attempts: Integers
    came_at: float

    def pick(self, rows: Integers | Flags | slice) -> _PendingMessages:
        some = self.messages.pick(rows), self.sequences[rows], self.attempts[rows]
        return _PendingMessages(*some, self.came_at)


@dataclass(frozen=True, slots=True)
class OpenedConsumer:
    """A position's consumer."""

    name: str
    existed_before: bool
    is_ack_all: bool = False
    """Whether it acknowledges all up to a message at once."""
    predecessor_delivered: int = 0
    """The last message of the stream that somebody was sent by one that it took over from."""
    last_delivered: int = 0
    """The last one that it has sent itself."""
    delivery_count: int = 0
    """How many it has, those counted that it sent again."""
    floor: int = 0
    """All of the stream before it is acknowledged; 0 where that is not known."""
    is_new_stream: bool = False
    """Whether the stream is another one than the one before."""
    expected_redeliveries: dict[int, bytes] = field(default_factory=dict)
    """What was given back to it and is to come to this door, by message of the stream: by which it
    is deliveries of that one."""


@dataclass(frozen=True, slots=True)
class ConsumerFeedStatistics:
    """A snapshot."""

    outstanding: int
    """Messages that are here and not acknowledged."""
    requested_count: int
    """How many more the consumer was asked for."""
    fetched_count: int
    repeated_count: int
    """Of these, how many were here already."""
    invalid_count: int
    """How many could be no message of the bus: the consumer was deliveries not to send them again."""


class ConsumerFeed:
    """Of one position."""

    def __init__(self, cls: RemoteClass, position: BrokerSubscription, store: Store) -> None:
        self.cls = cls
        self.position = position
        self._store = store
        self.publish_pause = 0
        """What holds up publishers until it was tried to have its consumer."""
        self.is_open = False
        """Whether its consumer is there."""
        self.requested_count = 0
        """How many the consumer was asked for that have not come."""
        self.last_answer_at = 0.0
        """When something came from it last."""
        self.retry_at = 0.0
        """When the consumer may be asked again, which refuses."""
        self.refused_requests = 0
        """How often it has, since messages came last."""
        self.ack_all: AckAllConsumer | None = None
        """Of a consumer that is this door's alone."""
        self.dead_letters = FeedDeadLetters()
        self.expected_redeliveries = ExpectedRedeliveries({})
        self.delivered_to_others = 0
        """The last message of the stream that its consumer had sent when it was found,"""
        self._predecessor_delivered = 0
        """or that one had from which this one was taken over."""
        self.delivered_before_open = self._received_count = self._last_delivery_number = 0
        """How many its consumer had sent when it was found, how many came since, and how many it
        had sent with the last of them."""
        self.stream_created = ""
        """When the stream was made from which it is fed."""
        self.holder_sid = 0
        """By which other doors hear that this one has its consumer; 0 where they need not."""
        self.last_ack = b""
        """The ack subject of the message that was replies last to be done with, as long as it is not
        known whether that was heard."""
        self.is_replacing = False
        """Whether another consumer is asked for."""
        self._blocks: deque[_Block] = deque()
        self._acked_floor = 0
        """Everything before it in the ring was replies to be acknowledged."""
        self._acked_flags: Flags = np.zeros(0, np.bool_)
        """What was of the messages from there on, as far as this goes."""
        self.acked_sequences = AckedSequences()
        self.is_rolled_back = False
        """Whether the stream came back with less than it had: its sequences are those of other
        messages, and nothing of it is taken until it was looked at."""
        self._acked_sequence = 0
        """All up to this one was, where the consumer is this door's alone."""
        self._pending: deque[_PendingMessages] = deque()
        """What came and found no room."""
        self._pending_count = 0
        self.fetched_count = self.repeated_count = self.invalid_count = 0

    @property
    def outstanding(self) -> int:
        return self.position.window.in_flight_count + (
            self.position.ring.head - self.position.window.cursor
        )

    @property
    def is_busy(self) -> bool:
        """Whether it has messages that its subscriber is sent or has, but for those that delay_seconds."""
        has_no_room = bool(self._pending) and not self.cls.clock.needs_answer
        return has_no_room or self.outstanding > self.position.delayed_count

    @property
    def delivery_state(self) -> tuple[int, int] | None:
        """How many messages its consumer has sent, and the last one of the stream among them, to
        here or before; None if some went elsewhere meanwhile."""
        count = self.delivered_before_open + self._received_count
        is_all = not self._received_count or self._last_delivery_number == count
        return (count, self._last_delivered) if is_all else None

    @property
    def _delivered_before(self) -> int:
        """What lies before or at it was sent before, if it is not new to the consumer alone."""
        return max(self._last_delivered, self._predecessor_delivered)

    @property
    def _last_delivered(self) -> int:
        """The last message of the stream that its consumer has sent, to here or before."""
        return max(self.acked_sequences.highest, self.delivered_to_others)

    def has_all(self, info: dict[str, Any]) -> bool:
        """Whether all that its consumer has sent, of which this is deliveries, has come to here."""
        if self._pending:
            return False
        if self.ack_all is not None:
            return self.ack_all.received_count >= api.delivery_count(info)
        return self._last_delivered >= api.last_delivered(info)

    @property
    def is_broken(self) -> bool:
        """Whether what its consumer has sent does not go on with what it sent before."""
        return self.is_rolled_back or (self.ack_all is not None and self.ack_all.has_gap)

    @property
    def restart_sequence(self) -> int:
        """The first message of the stream that is not acknowledged, as far as that is known here;
        0 if it is not."""
        if self.ack_all is None:  # The consumer may have had some that are not here.
            return self.acked_sequences.restart_sequence
        floor = self.dead_letters.limit_floor(self.position.window.floor)
        for block in self._blocks:
            if block.last > floor:
                return int(block.sequences[max(0, floor - block.first)])
        if self._pending:
            return int(self._pending[0].sequences[0])
        highest = self.acked_sequences.highest
        return highest + 1 if highest else self.acked_sequences.restart_sequence

    def open(self, found: OpenedConsumer) -> None:
        """Its consumer is there."""
        self.ack_all = AckAllConsumer(found.predecessor_delivered) if found.is_ack_all else None
        self.delivered_to_others, self.delivered_before_open = (
            found.last_delivered,
            found.delivery_count,
        )
        self._predecessor_delivered = found.predecessor_delivered
        self.acked_sequences.raise_floor(found.floor)
        self.expected_redeliveries = ExpectedRedeliveries(found.expected_redeliveries)

    def replace_consumer(self, found: OpenedConsumer) -> None:
        """It has another consumer. What is here of the same stream comes again, with other ack
        subjects; of another stream, its sequences are those of other messages."""
        self.ack_all = (
            AckAllConsumer(found.predecessor_delivered)
            if found.is_ack_all and found.is_new_stream
            else self.ack_all
        )
        if self.ack_all is not None:
            self.ack_all.restart()
        self.expected_redeliveries = ExpectedRedeliveries({})
        if found.is_new_stream:
            self._blocks.clear()
            self._pending.clear()
            self._pending_count = self._acked_sequence = self.delivered_to_others = (
                self._predecessor_delivered
            ) = 0
            self.acked_sequences = AckedSequences()
            self.is_rolled_back = False
        self.acked_sequences.raise_floor(found.floor)
        self.delivered_before_open = self._received_count = self._last_delivery_number = 0

    def statistics(self) -> ConsumerFeedStatistics:
        return ConsumerFeedStatistics(
            self.outstanding,
            self.requested_count,
            self.fetched_count,
            self.repeated_count,
            self.invalid_count,
        )

    # Asking --------------------------------------------------------------------------------------

    def free_capacity(self) -> int:
        """How many more it could take."""
        position = self.position
        most = position.delivery_policy.in_flight_max or FETCH_MESSAGES_MAX
        if isinstance(position, Group):
            limits = [member.in_flight_max for member in position.members]
            most = max(sum(limits), GROUP_IN_FLIGHT_MESSAGES)
        most = min(most, FETCH_MESSAGES_MAX)
        used = self.outstanding - self.position.delayed_count + self._pending_count
        spare = FEED_MESSAGES_MAX - len(position.ring)
        return max(0, min(most - used, spare))

    def request_size(self) -> int:
        """How many to ask the consumer for now; 0 for none yet."""
        if self._pending:
            return 0
        room = self.free_capacity()
        if room <= 0 or self.requested_count * REFILL_PART > room:
            return 0
        return room - self.requested_count

    def record_request_end(self, code: int, words: str, headers: bytes) -> None:
        """The consumer has ended a request, and says why."""
        self.requested_count = max(
            0, self.requested_count - jetstream_codec.parse_pending_messages(headers)
        )
        self.refused_requests += not jetstream_codec.is_normal_end(code, words)
        if self.refused_requests > REFUSALS_MAX:
            self.retry_at = self.last_answer_at + REST_SECONDS

    # What comes ----------------------------------------------------------------------------------

    def receive(self, messages: ReceivedMessages) -> bytes:
        """Messages have come from the consumer. Returns what is to be replies of some of them at
        once."""
        self.requested_count = max(0, self.requested_count - messages.count)
        self.fetched_count += messages.count
        self.refused_requests = 0
        deliveries = jetstream_codec.parse_deliveries(messages)
        self._received_count += messages.count
        self._last_delivery_number = max(
            self._last_delivery_number, int(deliveries.counts.max(initial=0))
        )
        replies: list[bytes] = []
        if not deliveries.good.all():
            self.invalid_count += messages.count - int(np.count_nonzero(deliveries.good))
            deliveries = deliveries.pick(deliveries.good)
        self.is_rolled_back = self.is_rolled_back or self.acked_sequences.shows_rollback(deliveries)
        if self.is_rolled_back:
            return b""
        messages, sequences, attempts = (
            deliveries.messages,
            deliveries.sequences,
            deliveries.attempts,
        )
        self.expected_redeliveries.remove_received(sequences)
        if self.ack_all is not None:
            fresh = self.ack_all.accept(deliveries, messages)
            attempts = np.where(
                sequences <= self.ack_all.delivered_before, np.maximum(attempts, 2), attempts
            )
            if not fresh.all():
                deliveries, attempts = deliveries.pick(fresh), attempts[fresh]
        elif (
            (attempts > 1).any()
            or (sequences <= self._delivered_before).any()
            or (sequences[1:] <= sequences[:-1]).any()
        ):
            attempts = np.where(
                sequences <= self._delivered_before, np.maximum(attempts, 2), attempts
            )
            fresh, again = self._find_new_messages(messages, sequences)
            if again.any():
                replies.append(jetstream_codec.encode_acks(messages.pick(again)))
            at = np.flatnonzero(fresh)
            at = at[np.argsort(sequences[at], kind="stable")]
            at = at[np.diff(sequences[at], append=0) != 0]  # Of each, the one that came last.
            deliveries, attempts = deliveries.pick(at), attempts[at]
        self.repeated_count += messages.count - deliveries.messages.count
        if deliveries.messages.count:
            self.acked_sequences.record_received(deliveries)
            now = self._store.clock.now
            self._pending.append(
                _PendingMessages(deliveries.messages, deliveries.sequences, attempts, now)
            )
            self._pending_count += deliveries.messages.count
            replies.append(self.fill())
        return b"".join(replies)

    def _find_new_messages(
        self, messages: ReceivedMessages, sequences: Integers
    ) -> tuple[Flags, Flags]:
        """Which of these are not here, and which were acknowledged before. What is here has another
        ack subject from now on, by which it is acknowledged."""
        again = self.acked_sequences.acked_flags(sequences)
        fresh = ~again
        for some in self._pending:
            fresh &= ~np.isin(sequences, some.sequences)
        for block in self._blocks:
            known = np.isin(sequences, block.sequences) & fresh
            if known.any():
                rows, order = np.flatnonzero(known), np.argsort(block.sequences)
                at = order[np.searchsorted(block.sequences[order], sequences[rows])]
                block.messages = _replace_replies(block.messages, at, messages, rows)
            fresh &= ~known
        return fresh, again

    def fill(self) -> bytes:
        """Put what came into the ring, as far as there is room. Returns what is to be replies of what
        can be no message of the bus."""
        replies: list[bytes] = []
        while self._pending:
            some = self._pending.popleft()
            self._pending_count -= some.messages.count
            end, is_envelope = _uniform_run(some.messages, some.attempts)
            rest = None
            if end < some.messages.count:
                some, rest = some.pick(slice(0, end)), some.pick(slice(end, None))
            taken, good = self._append(some, is_envelope)
            bad = np.flatnonzero(~good)
            if bad.size:
                self.invalid_count += bad.size
                if self.ack_all is None:  # Else that would be replies of all before them.
                    replies.append(
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
        return b"".join(replies)

    def _put_back(self, some: _PendingMessages) -> None:
        self._pending.appendleft(some)
        self._pending_count += some.messages.count

    def _append(self, some: _PendingMessages, is_envelope: bool) -> tuple[int, Flags]:
        """Messages that are alike. Returns how many of the good ones found room, and which can be
        messages of the bus."""
        position, ring, cls = self.position, self.position.ring, self.cls
        messages, sequences, attempts, came_at = some
        batch, good = codec.decode_frames(cls.class_id, messages, is_envelope=is_envelope)
        most = self._store.settings.limits.frame_bytes
        if (batch.lengths > most).any():
            batch, good = _select_good(batch, good, batch.lengths <= most)
        first, taken = ring.head, 0
        timer = self._store.timer_index
        if not is_envelope:
            taken = ring.append(batch, timer) if batch.count else 0
        else:
            batch, good = _drop_bad_envelopes(batch, good)
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
        accepted = self.cls.clock.to_local_times(stored, came_at)
        return None if accepted is None else self.cls.channels.build_rows(read, accepted)

    # What goes back ------------------------------------------------------------------------------

    def pop_acked(self) -> list[ReceivedMessages]:
        """What was acknowledged since this was asked last, and is not being buried. The ring lets
        go of it."""
        if self.ack_all is not None:
            word = self._pop_acked_through(self.ack_all)
            return [] if word is None else [word]
        window = self.position.window
        first, floor = self._acked_floor, self.dead_letters.limit_floor(window.floor)
        gaps, rest = window.unacked_sequences()
        if floor == first and rest == floor and not self._acked_flags.any():
            return []
        last = max(window.floor, rest)
        flags = ~self.dead_letters.pending_flags(first, last)
        flags[gaps - first] = False
        known = min(self._acked_flags.size, flags.size)
        fresh = flags.copy()
        fresh[:known] &= ~self._acked_flags[:known]
        found = self._locate_blocks(np.flatnonzero(fresh) + first)
        for block, rows in found:
            self.acked_sequences.add(np.sort(block.sequences[rows]))
        self._acked_floor, self._acked_flags = floor, flags[floor - first :]
        replies = [block.messages.pick(rows) for block, rows in found]
        while self._blocks and self._blocks[0].last <= floor:
            self._blocks.popleft()
        if floor > self.position.ring.floor:
            self.position.ring.release(floor)
        return replies

    def _pop_acked_through(self, consumer: AckAllConsumer) -> ReceivedMessages | None:
        """The last of the messages that are all acknowledged, if that was not replies. The ring lets
        go of them."""
        blocks, ring = self._blocks, self.position.ring
        floor = self.dead_letters.limit_floor(self.position.window.floor)
        done = 0
        while blocks and blocks[0].last <= floor:
            done = int(blocks.popleft().sequences[-1])
        if blocks and blocks[0].first < floor:
            done = int(blocks[0].sequences[floor - 1 - blocks[0].first])
        if floor == ring.head and not self._pending:
            done = consumer.highest  # What could be no message of the bus is done with, too.
        self._acked_floor = floor
        if floor > ring.floor:
            ring.release(floor)
        self._acked_sequence = max(done, self._acked_sequence)
        return consumer.ack_through(self._acked_sequence)

    def accepted_at(self, number: int) -> float:
        """When the stream took a message of the ring: seconds since 1970; 0.0 if it is not here."""
        for block in self._blocks:
            if block.first <= number < block.last:
                return jetstream_codec.parse_stored_time(block.messages, number - block.first)
        return 0.0

    def purge(self, first: int, last: int) -> None:
        """Messages first..last-1 of the stream are nobody's any more, sent or not."""
        for block in self._blocks:
            a, b = block.sequences.searchsorted(first), block.sequences.searchsorted(last)
            if a < b and not (np.diff(block.sequences) > 0).all():  # Some came again meanwhile.
                continue
            if a < b:
                self.position.purge(block.first + int(a), block.first + int(b))
        waiting, self._pending = self._pending, deque()
        self._pending_count = 0
        for some in waiting:
            kept = (some.sequences < first) | (some.sequences >= last)
            if kept.any():
                self._pending.append(some.pick(kept))
                self._pending_count += int(np.count_nonzero(kept))

    def unacked_messages(self) -> list[ReceivedMessages]:
        """What is here and not acknowledged."""
        if self.ack_all is not None:
            return self.ack_all.unacked_messages()
        first, head = self._acked_floor, self.position.ring.head
        kept = np.ones(head - first, np.bool_)
        known = min(self._acked_flags.size, kept.size)
        kept[:known] = ~self._acked_flags[:known]
        found = [
            b.messages.pick(rows) for b, rows in self._locate_blocks(np.flatnonzero(kept) + first)
        ]
        return found + [some.messages for some in self._pending]

    def messages_to_return(
        self, delays: list[tuple[int, int, float]]
    ) -> list[tuple[ReceivedMessages, float]]:
        """What is here and not acknowledged, and how long it is not to be sent to anybody: of
        messages first..last-1 of the ring as `delays` say."""
        first, head = self._acked_floor, self.position.ring.head
        seconds = np.zeros(head - first)
        for begin, end, delay_seconds in delays:
            seconds[max(0, begin - first) : max(0, end - first)] = max(0.0, delay_seconds)
        kept = np.ones(head - first, np.bool_)
        known = min(self._acked_flags.size, kept.size)
        kept[:known] = ~self._acked_flags[:known]
        found: list[tuple[ReceivedMessages, float]] = []
        for delay_seconds in np.unique(seconds).tolist():
            at = np.flatnonzero(kept & (seconds == delay_seconds)) + first
            found += [(b.messages.pick(rows), delay_seconds) for b, rows in self._locate_blocks(at)]
        return found + [(some.messages, 0.0) for some in self._pending]

    def unacked_on_exit(self, delays: list[tuple[int, int, float]]) -> UnackedOnExit | None:
        """What is here and not acknowledged of a consumer that is this door's alone, or is being
        buried; None for nothing. `delays` as of `given_back`."""
        assert self.ack_all is not None
        window, head = self.position.window, self.position.ring.head
        floor = self.dead_letters.limit_floor(window.floor)
        seconds = np.full(head - floor, -1.0)
        seconds[window.cursor - floor :] = 0.0  # What is here and was not sent yet.
        for a, b in window.unacked_ranges(floor, head):
            seconds[a - floor : b - floor] = 0.0
        for begin, end, delay_seconds in delays:
            some = seconds[max(0, begin - floor) : max(0, end - floor)]
            some[some >= 0.0] = max(0.0, delay_seconds)
        seconds[self.dead_letters.pending_flags(floor, head)] = DEAD_LETTER_PENDING
        found = self._locate_blocks(np.arange(floor, head))
        sequences = [block.sequences[rows] for block, rows in found]
        spans = [seconds[block.first + rows - floor] for block, rows in found]
        sequences += [each.sequences for each in self._pending]
        spans += [np.zeros(each.sequences.size) for each in self._pending]
        if not sequences:
            return None
        all_sequences, all_waits = np.concatenate(sequences), np.concatenate(spans)
        if not (all_waits >= 0.0).any():
            return None
        sent_to = max(self.ack_all.highest, self.ack_all.delivered_before)
        return UnackedOnExit(all_sequences, all_waits, self.ack_all.highest, sent_to)

    def _locate_blocks(self, at: Integers) -> list[tuple[_Block, Integers]]:
        """Where these messages of the ring are, which ascend."""
        found: list[tuple[_Block, Integers]] = []
        if not at.size:
            return found
        for block in self._blocks:
            a, b = at.searchsorted(block.first), at.searchsorted(block.last)
            if a < b:
                found.append((block, at[a:b] - block.first))
        return found

    def pop_last_ack(self) -> bytes:
        """The ack subject of what was replies last, if it was not asked for since."""
        replies, self.last_ack = self.last_ack, b""
        return replies


def _uniform_run(messages: ReceivedMessages, attempts: Integers) -> tuple[int, bool]:
    """How many in front are alike, with envelopes or without, and sent as often before; and whether
    they have envelopes."""
    kinds = codec.are_envelopes(messages)
    breaks = (kinds[1:] != kinds[:-1]) | (attempts[1:] != attempts[:-1])
    found = np.flatnonzero(breaks)
    return int(found[0]) + 1 if found.size else messages.count, bool(kinds[0])


def _select_good(batch: FrameBatch, good: Flags, flags: Flags) -> tuple[FrameBatch, Flags]:
    """Some of the frames that were good until now; and which are good of all."""
    found = np.zeros_like(good)
    found[np.flatnonzero(good)[flags]] = True
    if not flags.any():
        return batch.slice(0, 0), found
    return batch.select(np.flatnonzero(flags)), found


def _drop_bad_envelopes(batch: FrameBatch, good: Flags) -> tuple[FrameBatch, Flags]:
    """The same, of frames of which some may be no good envelopes."""
    if not batch.count or envelope_batch.scan_envelopes(batch).count == batch.count:
        return batch, good
    each = (
        envelope_batch.scan_envelopes(batch.slice(row, row + 1)).count for row in range(batch.count)
    )
    return _select_good(batch, good, np.fromiter(map(bool, each), np.bool_, batch.count))


def _replace_replies(
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
