"""Messages of one position: requested from its consumer, delivered by its ring, acknowledged.

    requested ─► received ─► in the ring ─► acknowledged by the subscriber ─► +ACK

Messages in the ring are numbered from 0 as they arrive. The feed remembers their stream sequences
and ack subjects until they are acknowledged. The position decides about delivery and redelivery;
while the server holds a message, it extends the cluster's ack wait. Messages that are delivered
again although they are in the ring or acknowledged are dropped. The feed requests only as many
messages as it has space for.

A consumer that belongs to one server is acknowledged up to a message (`AckAllConsumer`); a shared
one, per message.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from simplebus.core.limits import GROUP_IN_FLIGHT_MESSAGES, STORED_HEADERS_MAX
from simplebus.core.protocol import envelope_batch, frames
from simplebus.core.protocol.envelope_batch import EnvelopeColumns
from simplebus.core.protocol.frames import Flags, FrameBatch, Integers
from simplebus.core.ring.columns import MessageRows
from simplebus.core.steps import run_to_end
from simplebus.core.store.store import Store
from simplebus.core.subscription.position import Position
from simplebus.jetstream import api
from simplebus.jetstream.consume.ack_all import AckAllConsumer
from simplebus.jetstream.consume.acked_sequences import AckedSequences
from simplebus.jetstream.consume.dead_letters import FeedDeadLetters
from simplebus.jetstream.consume.returned_messages import (
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
"""Upper limit of one request."""
FETCH_SECONDS = 30.0
"""Lifetime of a request."""
ALIVE_SECONDS = 5.0
"""Interval of the consumer's heartbeats."""
REFUSALS_MAX, REST_SECONDS = 4, 0.25
"""Delay of further requests after more than REFUSALS_MAX consecutive refusals."""
REFILL_PART = 2
"""The next request is sent when the outstanding ones cover less than this part of the free
capacity.
"""


@dataclass(slots=True)
class _Block:
    """Messages first..last-1 of the ring, which arrived together."""

    first: int
    messages: ReceivedMessages
    sequences: Integers
    """Stream sequences, from 1."""

    @property
    def last(self) -> int:
        return self.first + self.messages.count


class _PendingMessages(NamedTuple):
    """Received messages without space in the ring."""

    messages: ReceivedMessages
    sequences: Integers
    attempts: Integers
    received_at: float

    def pick(self, rows: Integers | Flags | slice) -> _PendingMessages:
        messages, sequences = self.messages.pick(rows), self.sequences[rows]
        return _PendingMessages(messages, sequences, self.attempts[rows], self.received_at)


@dataclass(frozen=True, slots=True)
class OpenedConsumer:
    """State of a position's consumer when it was opened."""

    name: str
    existed_before: bool
    is_ack_all: bool = False
    """True if an ack includes all earlier messages."""
    predecessor_delivered: int = 0
    """Last stream sequence that a predecessor of the consumer delivered."""
    last_delivered: int = 0
    """Last stream sequence that the consumer delivered."""
    delivery_count: int = 0
    """Number of its deliveries, including redeliveries."""
    floor: int = 0
    """Lowest sequence that may be unacknowledged; 0 if unknown."""
    is_new_stream: bool = False
    """True if the stream was deleted and created again."""
    expected_redeliveries: dict[int, bytes] = field(default_factory=dict)
    """Ack subjects of messages that were returned and should arrive first, by stream sequence."""


@dataclass(frozen=True, slots=True)
class ConsumerFeedStatistics:
    """Snapshot of a feed's counters."""

    outstanding: int
    """Unacknowledged messages on this server."""
    requested_count: int
    """Requested messages that have not arrived."""
    fetched_count: int
    repeated_count: int
    """Fetched messages that this server had already."""
    invalid_count: int
    """Messages that were not valid for the bus and were terminated."""


class ConsumerFeed:
    """Feed of one position."""

    def __init__(self, cls: RemoteClass, position: Position, store: Store) -> None:
        self.cls = cls
        self.position = position
        self._store = store
        self.publish_pause = 0
        """Pause of publishers until the first attempt to open the consumer."""
        self.is_open = False
        """True if the consumer exists."""
        self.requested_count = 0
        """Requested messages that have not arrived."""
        self.last_answer_at = 0.0
        """Time of the last message from the consumer."""
        self.retry_at = 0.0
        """Time of the next request after refusals."""
        self.refused_requests = 0
        """Requests refused since messages last arrived."""
        self.ack_all: AckAllConsumer | None = None
        """Acknowledgement state if the consumer belongs to this server; None if it is shared."""
        self.dead_letters = FeedDeadLetters()
        self.expected_redeliveries = ExpectedRedeliveries({})
        self.delivered_to_others = 0
        """Last sequence that the consumer had delivered when it was opened."""
        self._predecessor_delivered = 0
        """Last sequence that a predecessor of the consumer delivered."""
        self.delivered_before_open = self._received_count = self._last_delivery_number = 0
        self.stream_created = ""
        """Creation time of the stream."""
        self.holder_sid = 0
        """Subscription that answers queries about the consumer; 0 for none."""
        self.last_ack = b""
        """Ack subject of the last ack, until its processing was verified."""
        self.is_replacing = False
        """True while the consumer is being replaced."""
        self._blocks: deque[_Block] = deque()
        self._acked_floor = 0
        """Ring number before which everything is acknowledged to the cluster."""
        self._acked_flags: Flags = np.zeros(0, np.bool_)
        """Flags of the acknowledged messages from `_acked_floor` on."""
        self.acked_sequences = AckedSequences()
        self.is_rolled_back = False
        """True if the stream lost messages, so that its sequences belong to other messages. Nothing
        is accepted until the consumer was replaced.
        """
        self._acked_sequence = 0
        """Stream sequence up to which everything is acknowledged, with ack policy `all`."""
        self._pending: deque[_PendingMessages] = deque()
        """Received messages without space in the ring."""
        self._pending_count = 0
        self.fetched_count = self.repeated_count = self.invalid_count = 0

    @property
    def outstanding(self) -> int:
        return self.position.window.in_flight_count + (
            self.position.ring.head - self.position.window.cursor
        )

    @property
    def is_busy(self) -> bool:
        """True if messages can be delivered or are with the subscriber, apart from delayed ones."""
        has_no_room = bool(self._pending) and not self.cls.clock.needs_answer
        return has_no_room or self.outstanding > self.position.unacked.delayed_count

    @property
    def delivery_state(self) -> tuple[int, int] | None:
        """Number of deliveries and last delivered sequence; None if other servers received
        messages, too.
        """
        count = self.delivered_before_open + self._received_count
        is_all = not self._received_count or self._last_delivery_number == count
        return (count, self._last_delivered) if is_all else None

    @property
    def _delivered_before(self) -> int:
        """Sequence up to which messages count as redeliveries."""
        return max(self._last_delivered, self._predecessor_delivered)

    @property
    def _last_delivered(self) -> int:
        """Last sequence that the consumer delivered, as far as known here."""
        return max(self.acked_sequences.highest, self.delivered_to_others)

    def has_all(self, info: dict[str, Any]) -> bool:
        """Return True if everything that the consumer has delivered has arrived here."""
        if self._pending:
            return False
        if self.ack_all is not None:
            return self.ack_all.received_count >= api.delivery_count(info)
        return self._last_delivered >= api.last_delivered(info)

    @property
    def is_broken(self) -> bool:
        """True if deliveries were lost, so that the consumer must be replaced."""
        return self.is_rolled_back or (self.ack_all is not None and self.ack_all.has_gap)

    @property
    def restart_sequence(self) -> int:
        """Lowest sequence that is not acknowledged; 0 if unknown."""
        if self.ack_all is None:  # The consumer may have delivered messages to other servers.
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
        """Start with a consumer."""
        self.ack_all = AckAllConsumer(found.predecessor_delivered) if found.is_ack_all else None
        self.delivered_to_others, self.delivered_before_open = (
            found.last_delivered,
            found.delivery_count,
        )
        self._predecessor_delivered = found.predecessor_delivered
        self.acked_sequences.raise_floor(found.floor)
        self.expected_redeliveries = ExpectedRedeliveries(found.expected_redeliveries)

    def replace_consumer(self, found: OpenedConsumer) -> None:
        """Continue with a replacement of the consumer.

        In the same stream, messages in the ring are delivered again with other ack subjects. In a
        new stream, the old sequences are meaningless.
        """
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

    # Requests ------------------------------------------------------------------------------------

    def free_capacity(self) -> int:
        """Return how many more messages the feed can accept."""
        position = self.position
        limit = position.delivery_policy.in_flight_max or FETCH_MESSAGES_MAX
        if (group := self.cls.groups.get(position)) is not None:
            limits = [member.in_flight_max for member in group.members]
            limit = max(sum(limits), GROUP_IN_FLIGHT_MESSAGES)
        limit = min(limit, FETCH_MESSAGES_MAX)
        used = self.outstanding - self.position.unacked.delayed_count + self._pending_count
        free_count = FEED_MESSAGES_MAX - len(position.ring)
        return max(0, min(limit - used, free_count))

    def request_size(self) -> int:
        """Return how many messages to request now; 0 for none."""
        if self._pending:
            return 0
        room = self.free_capacity()
        if room <= 0 or self.requested_count * REFILL_PART > room:
            return 0
        return room - self.requested_count

    def record_request_end(self, code: int, description: str, headers: bytes) -> None:
        """Record that the consumer ended a request with a status."""
        self.requested_count = max(
            0, self.requested_count - jetstream_codec.parse_pending_messages(headers)
        )
        self.refused_requests += not jetstream_codec.is_normal_end(code, description)
        if self.refused_requests > REFUSALS_MAX:
            self.retry_at = self.last_answer_at + REST_SECONDS

    # Received messages ---------------------------------------------------------------------------

    def receive(self, messages: ReceivedMessages) -> bytes:
        """Accept messages from the consumer. Returns acks to write at once."""
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
            new_flags = self.ack_all.accept(deliveries, messages)
            attempts = np.where(
                sequences <= self.ack_all.delivered_before, np.maximum(attempts, 2), attempts
            )
            if not new_flags.all():
                deliveries, attempts = deliveries.pick(new_flags), attempts[new_flags]
        elif (
            (attempts > 1).any()
            or (sequences <= self._delivered_before).any()
            or (sequences[1:] <= sequences[:-1]).any()
        ):
            attempts = np.where(
                sequences <= self._delivered_before, np.maximum(attempts, 2), attempts
            )
            new_flags, acked_flags = self._find_new_messages(messages, sequences)
            if acked_flags.any():
                replies.append(jetstream_codec.encode_acks(messages.pick(acked_flags)))
            at = np.flatnonzero(new_flags)
            at = at[np.argsort(sequences[at], kind="stable")]
            at = at[np.diff(sequences[at], append=0) != 0]  # The last delivery of each message.
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
        """Return the flags of new messages and of acknowledged messages.

        Messages in the ring get the ack subject of their last delivery.
        """
        acked_flags = self.acked_sequences.acked_flags(sequences)
        new_flags = ~acked_flags
        for pending in self._pending:
            new_flags &= ~np.isin(sequences, pending.sequences)
        for block in self._blocks:
            redelivered_flags = np.isin(sequences, block.sequences) & new_flags
            if redelivered_flags.any():
                rows, order = np.flatnonzero(redelivered_flags), np.argsort(block.sequences)
                at = order[np.searchsorted(block.sequences[order], sequences[rows])]
                block.messages = _replace_replies(block.messages, at, messages, rows)
            new_flags &= ~redelivered_flags
        return new_flags, acked_flags

    def fill(self) -> bytes:
        """Move received messages to the ring. Returns terminating acks for invalid messages."""
        replies: list[bytes] = []
        while self._pending:
            pending = self._pending.popleft()
            self._pending_count -= pending.messages.count
            end, is_envelope = _uniform_run(pending.messages, pending.attempts)
            remaining = None
            if end < pending.messages.count:
                pending, remaining = pending.pick(slice(0, end)), pending.pick(slice(end, None))
            appended_count, good = self._append(pending, is_envelope)
            bad = np.flatnonzero(~good)
            if bad.size:
                self.invalid_count += bad.size
                if self.ack_all is None:  # Else the ack would include all earlier messages.
                    replies.append(
                        jetstream_codec.encode_acks(
                            pending.messages.pick(bad), jetstream_codec.TERMINATE
                        )
                    )
            if remaining is not None:
                self._put_back(remaining)
            remaining_rows = np.flatnonzero(good)[appended_count:]
            if remaining_rows.size:
                self._put_back(pending.pick(remaining_rows))
                break
        return b"".join(replies)

    def _put_back(self, pending: _PendingMessages) -> None:
        self._pending.appendleft(pending)
        self._pending_count += pending.messages.count

    def _append(self, pending: _PendingMessages, is_envelope: bool) -> tuple[int, Flags]:
        """Append a uniform run of messages to the ring.

        Returns:
            How many valid messages had space, and the flags of the valid messages.
        """
        position, ring, cls = self.position, self.position.ring, self.cls
        messages, sequences, attempts, received_at = pending
        batch, good = codec.decode_frames(cls.class_id, messages, is_envelope=is_envelope)
        limit = self._store.settings.limits.frame_bytes
        if (batch.lengths > limit).any():
            batch, good = _select_good(batch, good, batch.lengths <= limit)
        first, appended_count = ring.head, 0
        timer = self._store.timer_index
        if not is_envelope:
            appended_count = ring.append(batch, timer) if batch.count else 0
        else:
            batch, good = _drop_bad_envelopes(batch, good)
            if batch.count:
                rows = self._rows(batch, messages.pick(good), received_at)
                appended_count = ring.append(batch, timer, rows) if rows is not None else 0
        if appended_count:
            appended_rows = (
                slice(0, appended_count) if good.all() else np.flatnonzero(good)[:appended_count]
            )
            self._blocks.append(
                _Block(first, messages.pick(appended_rows), sequences[appended_rows])
            )
            if attempts[0] > 1:
                position.requeue_with_attempts(first, int(attempts[0]) - 1)
        return appended_count, good

    def _rows(
        self, batch: FrameBatch, messages: ReceivedMessages, received_at: float
    ) -> MessageRows | None:
        """Return the column values of messages; None without memory, or until the stream's time is
        known.
        """
        read = _scan_stored(batch)
        if read.expires is None and read.not_before is None:
            return self.cls.channels.build_rows(read, received_at)
        stored = jetstream_codec.parse_deliveries(messages).times / 1e9
        accepted = self.cls.clock.to_local_times(stored, received_at)
        return None if accepted is None else self.cls.channels.build_rows(read, accepted)

    # Acknowledgements ----------------------------------------------------------------------------

    def pop_acked(self) -> list[ReceivedMessages]:
        """Return messages to acknowledge now, and release acknowledged messages from the ring."""
        if self.ack_all is not None:
            word = self._pop_acked_through(self.ack_all)
            return [] if word is None else [word]
        window = self.position.window
        first, floor = self._acked_floor, self.dead_letters.limit_floor(window.floor)
        gaps, unacked_from = window.unacked_sequences()
        if floor == first and unacked_from == floor and not self._acked_flags.any():
            return []
        last = max(window.floor, unacked_from)
        flags = ~self.dead_letters.pending_flags(first, last)
        flags[gaps - first] = False
        previous_count = min(self._acked_flags.size, flags.size)
        new_flags = flags.copy()
        new_flags[:previous_count] &= ~self._acked_flags[:previous_count]
        found = self._locate_blocks(np.flatnonzero(new_flags) + first)
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
        """Return the message whose ack includes all acknowledged ones, and release them from the
        ring.
        """
        blocks, ring = self._blocks, self.position.ring
        floor = self.dead_letters.limit_floor(self.position.window.floor)
        acked_sequence = 0
        while blocks and blocks[0].last <= floor:
            acked_sequence = int(blocks.popleft().sequences[-1])
        if blocks and blocks[0].first < floor:
            acked_sequence = int(blocks[0].sequences[floor - 1 - blocks[0].first])
        if floor == ring.head and not self._pending:
            acked_sequence = consumer.highest  # Includes invalid messages.
        self._acked_floor = floor
        if floor > ring.floor:
            ring.release(floor)
        self._acked_sequence = max(acked_sequence, self._acked_sequence)
        return consumer.ack_through(self._acked_sequence)

    def accepted_at(self, number: int) -> float:
        """Return when the stream stored a message of the ring: seconds since 1970; 0.0 if it is
        not here.
        """
        for block in self._blocks:
            if block.first <= number < block.last:
                return jetstream_codec.parse_stored_time(block.messages, number - block.first)
        return 0.0

    def purge(self, first: int, last: int) -> None:
        """Remove the stream's messages first..last-1, delivered or not."""
        for block in self._blocks:
            a, b = block.sequences.searchsorted(first), block.sequences.searchsorted(last)
            if a < b and not (np.diff(block.sequences) > 0).all():  # Contains redeliveries.
                continue
            if a < b:
                begin, end = block.first + int(a), block.first + int(b)
                run_to_end(self.position.unacked.discard_held_in_parts(begin, end))
                self.position.purge(begin, end)
        waiting, self._pending = self._pending, deque()
        self._pending_count = 0
        for pending in waiting:
            kept_flags = (pending.sequences < first) | (pending.sequences >= last)
            if kept_flags.any():
                self._pending.append(pending.pick(kept_flags))
                self._pending_count += int(np.count_nonzero(kept_flags))

    def unacked_messages(self) -> list[ReceivedMessages]:
        """Return the messages on this server without an ack."""
        if self.ack_all is not None:
            return self.ack_all.unacked_messages()
        first, head = self._acked_floor, self.position.ring.head
        unacked_flags = np.ones(head - first, np.bool_)
        flag_count = min(self._acked_flags.size, unacked_flags.size)
        unacked_flags[:flag_count] = ~self._acked_flags[:flag_count]
        found = [
            b.messages.pick(rows)
            for b, rows in self._locate_blocks(np.flatnonzero(unacked_flags) + first)
        ]
        return found + [pending.messages for pending in self._pending]

    def messages_to_return(
        self, delays: list[tuple[int, int, float]]
    ) -> list[tuple[ReceivedMessages, float]]:
        """Return the messages without an ack, and the seconds before their redelivery.

        `delays` contains ranges first..last-1 of the ring and their remaining backoff in seconds.
        """
        first, head = self._acked_floor, self.position.ring.head
        seconds = np.zeros(head - first)
        for begin, end, delay_seconds in delays:
            seconds[max(0, begin - first) : max(0, end - first)] = max(0.0, delay_seconds)
        unacked_flags = np.ones(head - first, np.bool_)
        flag_count = min(self._acked_flags.size, unacked_flags.size)
        unacked_flags[:flag_count] = ~self._acked_flags[:flag_count]
        found: list[tuple[ReceivedMessages, float]] = []
        for delay_seconds in np.unique(seconds).tolist():
            at = np.flatnonzero(unacked_flags & (seconds == delay_seconds)) + first
            found += [(b.messages.pick(rows), delay_seconds) for b, rows in self._locate_blocks(at)]
        return found + [(pending.messages, 0.0) for pending in self._pending]

    def unacked_on_exit(self, delays: list[tuple[int, int, float]]) -> UnackedOnExit | None:
        """Return the unacknowledged messages of a consumer with ack policy `all`; None if all are
        acknowledged.

        `delays` as for `messages_to_return`.
        """
        assert self.ack_all is not None
        window, head = self.position.window, self.position.ring.head
        floor = self.dead_letters.limit_floor(window.floor)
        seconds = np.full(head - floor, -1.0)
        seconds[window.cursor - floor :] = 0.0  # Not delivered yet.
        for a, b in window.unacked_ranges(floor, head):
            seconds[a - floor : b - floor] = 0.0
        for begin, end, delay_seconds in delays:
            part = seconds[max(0, begin - floor) : max(0, end - floor)]
            part[part >= 0.0] = max(0.0, delay_seconds)
        seconds[self.dead_letters.pending_flags(floor, head)] = DEAD_LETTER_PENDING
        found = self._locate_blocks(np.arange(floor, head))
        sequences = [block.sequences[rows] for block, rows in found]
        spans = [seconds[block.first + rows - floor] for block, rows in found]
        sequences += [pending.sequences for pending in self._pending]
        spans += [np.zeros(pending.sequences.size) for pending in self._pending]
        if not sequences:
            return None
        all_sequences, all_waits = np.concatenate(sequences), np.concatenate(spans)
        if not (all_waits >= 0.0).any():
            return None
        sent_to = max(self.ack_all.highest, self.ack_all.delivered_before)
        return UnackedOnExit(all_sequences, all_waits, self.ack_all.highest, sent_to)

    def _locate_blocks(self, at: Integers) -> list[tuple[_Block, Integers]]:
        """Return the blocks, and the rows in them, of ascending ring numbers."""
        found: list[tuple[_Block, Integers]] = []
        if not at.size:
            return found
        for block in self._blocks:
            a, b = at.searchsorted(block.first), at.searchsorted(block.last)
            if a < b:
                found.append((block, at[a:b] - block.first))
        return found

    def pop_last_ack(self) -> bytes:
        """Return the last ack subject, unless its processing was verified."""
        replies, self.last_ack = self.last_ack, b""
        return replies


def _uniform_run(messages: ReceivedMessages, attempts: Integers) -> tuple[int, bool]:
    """Return the length of the first uniform run, and True if it has envelopes.

    A run has the same attempt number, and envelopes in all or no messages.
    """
    kinds = codec.are_envelopes(messages)
    breaks = (kinds[1:] != kinds[:-1]) | (attempts[1:] != attempts[:-1])
    found = np.flatnonzero(breaks)
    return int(found[0]) + 1 if found.size else messages.count, bool(kinds[0])


def _select_good(batch: FrameBatch, good: Flags, flags: Flags) -> tuple[FrameBatch, Flags]:
    """Return the flagged frames, and the flags of the messages that are still valid."""
    found = np.zeros_like(good)
    found[np.flatnonzero(good)[flags]] = True
    if not flags.any():
        return batch.slice(0, 0), found
    return batch.select(np.flatnonzero(flags)), found


def _scan_stored(batch: FrameBatch) -> EnvelopeColumns:
    return envelope_batch.scan_envelopes(batch, headers_max=STORED_HEADERS_MAX)


def _drop_bad_envelopes(batch: FrameBatch, good: Flags) -> tuple[FrameBatch, Flags]:
    """Return the frames with valid envelopes, and the flags of the valid messages."""
    if not batch.count or _scan_stored(batch).count == batch.count:
        return batch, good
    each = (_scan_stored(batch.slice(row, row + 1)).count for row in range(batch.count))
    return _select_good(batch, good, np.fromiter(map(bool, each), np.bool_, batch.count))


def _replace_replies(
    messages: ReceivedMessages, at: Integers, newer_messages: ReceivedMessages, rows: Integers
) -> ReceivedMessages:
    """Return `messages`, with the ack subjects of other messages in some rows."""
    replies = [newer_messages.reply(row) for row in rows.tolist()]
    ends = len(messages.raw) + np.cumsum([len(reply) for reply in replies])
    changed = messages.pick(slice(None))
    changed.raw = b"".join([messages.raw, *replies, bytes(len(frames.DELIMITER) * 8)])
    changed.replies, changed.reply_ends = changed.replies.copy(), changed.reply_ends.copy()
    changed.replies[at] = np.concatenate([[len(messages.raw)], ends[:-1]])
    changed.reply_ends[at] = ends
    return changed
