"""Position of one consumer in a class: cursor, ack window, and what is sent next.

A position holds sequences of its class's ring, never messages, and knows no session's outbox.

    ring      floor ─ sent, or delayed ─ cursor ─ not sent yet ─ head
              └──── unacked ────────────┘

Messages behind the cursor are in `unacked` until they are acknowledged or dead-lettered. Messages
that do not match the filter count as finished when the cursor passes them. Messages are inspected
and copied one by one only if some of them may not match; otherwise whole runs of the ring are sent
without a copy. One turn scans a limited number of messages, whether they match or not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Iterable
from dataclasses import replace

from simplebus.core.clock import BrokerClock
from simplebus.core.errors import Reason
from simplebus.core.limits import (
    COMPARED_CHANNELS_MAX,
    DEAD_LETTER_BATCH_MESSAGES,
    EXPIRY_SCAN_INITIAL_MESSAGES,
    HANDOVER_RANGES_MAX,
    IN_FLIGHT_BYTES,
    LOOKAHEAD_MESSAGES,
    MESSAGES_MAX,
    PLAIN_FRAMES_MAX,
    REDELIVERY_BYTES,
    REDELIVERY_MESSAGES,
    REDELIVERY_PIECES,
    REDELIVERY_PLAIN_BYTES,
    REDELIVERY_PLAIN_MESSAGES,
    RESTAMPED_MESSAGES_MAX,
    SCAN_COST_OF_COPY,
    SCAN_COST_OF_DELAY,
    SCAN_COST_OF_PIECE,
    SCAN_MESSAGES_MAX,
    SEND_BYTES,
)
from simplebus.core.redelivery.ack_window import AckWindow
from simplebus.core.redelivery.delivery_policy import DeliveryPolicy
from simplebus.core.redelivery.delivery_state import DeliveryState
from simplebus.core.redelivery.failure_reasons import FailureReasons
from simplebus.core.redelivery.handover import (
    DelayRanges,
    PositionHandover,
    restrict_rows,
)
from simplebus.core.redelivery.in_flight_bytes import InFlightBytes
from simplebus.core.redelivery.timer_wheel import Span
from simplebus.core.ring.ring import Ring
from simplebus.core.statistics import SubscriptionStatistics
from simplebus.core.subscription import selection
from simplebus.core.subscription.backlog import BacklogCounter
from simplebus.core.subscription.channel_filter import ChannelFilter
from simplebus.core.subscription.copied_frames import CopiedFrames
from simplebus.core.subscription.delayed_wakeups import NEVER, DelayedWakeups
from simplebus.core.subscription.selection import MessageSelection, Ranges
from simplebus.core.subscription.unacked_messages import UnackedMessages

_NO_FRAMES = memoryview(b"")

# New messages that are scanned at once for each message that a piece may have. With more, messages
# behind the piece are scanned again for the next one.
_SCANNED_PER_MESSAGE = 8


class PositionChanges:
    """Positions with changes that the store has not handled yet.

    A position may change while frames are taken from an outbox, where no caller handles a result.
    `Store.apply_position_changes` handles the changes afterwards.
    """

    def __init__(self, *, has_journal: bool = False) -> None:
        """With `has_journal`, `progressed` is filled; a checkpoint must clear it."""
        self._has_journal = has_journal
        self.class_ids: dict[int, None] = {}
        """Classes with changes, for example a floor that moved without an ack."""
        self.given_up: dict[int, dict[Position, None]] = {}
        """Positions that gave up messages, which are to be dead-lettered, by class. No value is
        empty.
        """
        self.progressed: dict[Position, None] = {}
        """Positions whose progress is not in the commit log yet."""

    def record_progress(self, position: Position) -> None:
        """Record that messages of a position were sent or acknowledged."""
        if self._has_journal:
            self.progressed[position] = None

    def record_moved(self, position: Position) -> None:
        """Record that the floor of a position may have moved without an ack."""
        self.class_ids[position.class_id] = None

    def record_given_up(self, position: Position) -> None:
        """Record that a position has new pending dead letters."""
        self.class_ids[position.class_id] = None
        self.given_up.setdefault(position.class_id, {})[position] = None


class ClassDeliveries:
    """Number of messages of a class that were sent for the first time, by all positions together,
    ended ones included.
    """

    def __init__(self) -> None:
        self.count = 0


class Position:
    """Delivery state of one consumer: a subscription, a durable or a group.

    A durable keeps its position while no session is attached. The position of a group is shared by
    members, which hold the messages that were assigned to them.
    """

    def __init__(
        self,
        *,
        ring: Ring,
        window: AckWindow,
        delivery_policy: DeliveryPolicy,
        timer_index_modulus: int = 0,
        clock: BrokerClock | None = None,
        channel_filter: ChannelFilter | None = None,
        durable: str = "",
        group: str = "",
        is_key_ordered: bool = False,
        changes: PositionChanges | None = None,
        delayed_wakeups: DelayedWakeups | None = None,
        failure_reasons: FailureReasons | None = None,
        redeliveries: Iterable[Span] = (),
        class_deliveries: ClassDeliveries | None = None,
    ) -> None:
        """Create a position.

        Args:
            ring: Messages of the class.
            window: Ack window, for example of a predecessor.
            delivery_policy: Limits and delays.
            timer_index_modulus: Modulus of timer indexes, the same for the whole class.
            clock: Current time and tick.
            channel_filter: Channels that it receives; None for all.
            durable: Name of the durable; empty if the position ends with its session.
            group: Name of the queue group; empty for none.
            is_key_ordered: True for a group that keeps the order of messages with the same key.
            changes: Record of changes, for the store.
            delayed_wakeups: Wakeups at the end of delays.
            failure_reasons: Reasons of nacks.
            redeliveries: Spans that the window has in flight.
            class_deliveries: Counter of the class, for all of its positions.
        """
        self.class_id = ring.class_id
        self.class_ring = ring
        """Messages of the class that are in memory."""
        self.ring = ring
        """Ring to send from: the class's, or a spill reader's while spilled messages are read."""
        self.window = window
        self.delivery_policy = delivery_policy
        self.channel_filter = channel_filter
        self.durable, self.group, self.is_key_ordered = durable, group, is_key_ordered
        self.owner = ""
        """User that created it; empty if unknown."""
        self.owner_address = ""
        """Address of the client that created it without a user; empty if unknown."""
        self.log_position = 0
        """Log position of the entry that created or removed it; 0 if it is not journaled."""
        self.idle_seconds: float | None = None
        """Seconds it is kept while no session is attached; None for unlimited."""
        self.session_id = -1
        """Session that receives the messages; -1 for none, and for a group."""
        self.subscription_number = 0
        """Number of that session's subscription."""
        self.has_consumer = False
        """True if messages can be sent to a session, or to members of a group."""
        self.unattended_since = 0.0
        """Time since when no session is attached."""
        self.delivered_count = 0
        self.redelivered_count = 0
        self._sent_max: int | None = None
        """Deliveries and redeliveries after which nothing more is sent; None for no limit."""
        self.nack_count = 0
        """Number of rejections."""
        self.dropped_count = 0
        self.scanned_count = 0
        """Messages that the last call scanned, if it is limited."""
        self._scan_limit = SCAN_MESSAGES_MAX
        """Approximate number of messages scanned in one turn if none of them matches."""
        self._slow_check_tick = -1
        """Tick in which `is_over_pending_limit` inspected messages last."""
        self.undelivered_counts: Counter[Reason] = Counter()
        """Messages that it was never sent, or not again, by reason."""
        self._timer_index_modulus = timer_index_modulus or delivery_policy.ack_timeout_ticks
        """Modulus of timer indexes, the same for the whole class."""
        self._clock = clock or BrokerClock()
        self._changes = PositionChanges() if changes is None else changes
        if delayed_wakeups is None:
            delayed_wakeups = DelayedWakeups(self._clock)
        self._delayed_wakeups = delayed_wakeups
        self._failure_reasons = FailureReasons() if failure_reasons is None else failure_reasons
        self._class_deliveries = class_deliveries or ClassDeliveries()
        self._in_flight_bytes = InFlightBytes(ring)
        """Bytes of the messages in flight."""
        self._zero_copy_end = 0
        """Messages from the cursor up to here can be sent without inspection."""
        self._backlog_counter: BacklogCounter | None = None
        """Counter of matching messages ahead of the cursor; created when first needed."""
        self._passed_count = window.in_flight_count
        """Messages that the cursor has passed, or that waited behind it from the start."""
        self._skipped_count = 0
        """The part of `_passed_count` that was finished without an ack."""
        self.inherited_delays: list[tuple[int, int, int]] = []
        """Delays of single messages while the whole position is delayed; see `attach_later`."""
        self.unacked = UnackedMessages(
            window,
            delivery_policy,
            self._clock,
            is_shared=self.is_shared,
            spans=list(redeliveries),
        )
        """Messages behind the cursor."""

    @property
    def acknowledged_count(self) -> int:
        """Number of acknowledged messages."""
        return self._passed_count - self._skipped_count - self.window.in_flight_count

    @property
    def has_frames_to_copy(self) -> bool:
        """True if `copy_frames` must be called before `view_run`."""
        if self.unacked.queue:
            return True
        if self.is_filtered:
            return self.window.cursor >= self._zero_copy_end
        return self.window.cursor < self.ring.special_until and self.has_to_inspect

    @property
    def is_shared(self) -> bool:
        """True for the position of a group."""
        return bool(self.group)

    @property
    def is_filtered(self) -> bool:
        """True if some messages of the class may not match its filter."""
        return self.channel_filter is not None and not self.channel_filter.is_match_all

    @property
    def has_to_inspect(self) -> bool:
        """True if new messages must be inspected one by one."""
        ring, cursor = self.ring, self.window.cursor
        return (
            self.is_filtered
            or cursor < ring.timed_until
            or (cursor < ring.envelopes_until and not self.delivery_policy.accepts_envelopes)
        )

    @property
    def has_work(self) -> bool:
        """True if there may be something to send."""
        if not self.unacked.queue and self.window.cursor >= self.ring.head:
            return False
        return not self._is_limited or self._sendable_max() > 0

    def build_delivery_state(self) -> DeliveryState:
        """Return where the messages behind the cursor are, for inquiries."""
        return self.unacked.build_delivery_state()

    def statistics(self) -> SubscriptionStatistics:
        return SubscriptionStatistics(
            class_id=self.class_id,
            session_id=self.session_id,
            number=self.subscription_number,
            durable=self.durable,
            group=self.group,
            floor=self.window.floor,
            cursor=self.window.cursor,
            in_flight=self.window.in_flight_count,
            waiting=self.class_ring.head - self.window.cursor,
            delivered=self.delivered_count,
            redelivered=self.redelivered_count,
            acknowledged=self.acknowledged_count,
            dropped=self.dropped_count,
            undelivered=dict(self.undelivered_counts),
        )

    @property
    def _is_limited(self) -> bool:
        """True if `_sendable_max` may be less than the stored messages."""
        return self.delivery_policy.in_flight_max is not None or self._sent_max is not None

    def _sendable_max(self) -> int:
        """Return how many more messages may be sent."""
        capacity = self._in_flight_capacity()
        if self._sent_max is None:
            return capacity
        return min(capacity, self._sent_max - self.delivered_count - self.redelivered_count)

    def _in_flight_capacity(self) -> int:
        """Return how many more messages may be in flight."""
        window, limit = self.window, self.delivery_policy.in_flight_max
        if limit is None:
            return MESSAGES_MAX
        count = self.unacked.count_in_flight()
        if 0 < count < limit and self._in_flight_bytes.estimate(count, window) >= IN_FLIGHT_BYTES:
            if self._in_flight_bytes.is_measuring:
                self._delayed_wakeups.schedule_wakeup(self._clock.now, self)
            return 0
        return max(0, limit - count)

    def limit_messages(self, count: int) -> None:
        """Send at most `count` more messages to the attached session."""
        self._sent_max = self.delivered_count + self.redelivered_count + count

    # Sending -------------------------------------------------------------------------------------

    def copy_frames(self, tick: int, messages_max: int) -> CopiedFrames:
        """Return copies of the next frames, at most `messages_max`, which count as sent. There may
        be none.
        """
        self.begin_scan(SCAN_MESSAGES_MAX)
        if self.ring.head - self.window.cursor == 1 and not self.unacked.queue:
            single = self._copy_single(tick)
            if single is not None:
                return single
        copied = CopiedFrames(0)
        if self.unacked.queue:
            copied = self._copy_redeliveries(tick, messages_max)
        while not copied.count and not self.unacked.queue and self.has_to_inspect and self.has_work:
            if self.scanned_count >= self._scan_limit or self._extend_zero_copy():
                break
            copied = self._copy_new(tick, messages_max)
        return copied

    def begin_scan(self, scan_limit: int) -> None:
        """Begin a turn, which may scan about `scan_limit` messages."""
        self._scan_limit, self.scanned_count = scan_limit, 0

    @property
    def is_scan_limit_reached(self) -> bool:
        """True if no more messages are scanned in this turn."""
        return self.scanned_count >= self._scan_limit

    def adjust_scanned_count(self, change: int) -> None:
        """Count more scanned messages, or fewer, because some of them are sent."""
        self.scanned_count += change

    def _extend_zero_copy(self) -> bool:
        """Return True if the next messages all match, so that they can be sent without a copy.

        A short run is accepted only if no more messages are stored.
        """
        first, head = self.window.cursor, self.ring.head
        if self.channel_filter is None or first < self.ring.timed_until:
            return False
        if first < self.ring.envelopes_until and not self.delivery_policy.accepts_envelopes:
            return False
        if not self.channel_filter.is_match(self.ring.read_row(first).channel):
            return False
        last = self._limit_scan(first, min(head, first + LOOKAHEAD_MESSAGES))
        run_end = selection.matching_run_end(self.ring, first, last, self.channel_filter)
        if run_end < last and run_end - first < PLAIN_FRAMES_MAX:
            return False
        self._zero_copy_end = run_end
        return True

    def _limit_scan(self, first: int, last: int) -> int:
        """Return the end of a scan of first..last-1.

        The scan compares a limited number of channels with the patterns for the first time. Each of
        these channels counts as several scanned messages.
        """
        if self.channel_filter is None or last - first <= PLAIN_FRAMES_MAX:
            return last
        channels = self.ring.read_channels(first, last)
        if isinstance(channels, int):
            return last
        count, compared_count = self.channel_filter.find_known_end(channels)
        self.scanned_count += compared_count * (SCAN_MESSAGES_MAX // COMPARED_CHANNELS_MAX)
        return first + count

    def _copy_redeliveries(self, tick: int, messages_max: int) -> CopiedFrames:
        pieces = CopiedFrames(
            REDELIVERY_PLAIN_BYTES if self._is_next_redelivery_plain() else REDELIVERY_BYTES
        )
        while not pieces.count and (capacity := min(messages_max, self._sendable_max())):
            redeliveries = self.select_redeliveries(capacity)
            if redeliveries is None:
                break
            span, last, selected = redeliveries
            first, attempts = selected.sendable[0][0], span.attempts
            pieces.attempt = span.next_attempt
            last = self._copy_ranges(selected.sendable, last, pieces, tick)
            self.consume_redeliveries(span, last, selected)
            self.scanned_count += SCAN_COST_OF_PIECE * len(pieces.parts)
            if pieces.count:
                # One span for all; messages acknowledged meanwhile are left out when it is due.
                delayed = selection.ranges_before(selected.delayed, last)
                self._start_ack_timeout_except(delayed, first, last, max(attempts + 1, 1), tick)
                self.count_sent(pieces.count, attempts)
        return pieces

    def select_redeliveries(self, max_count: int) -> tuple[Span, int, MessageSelection] | None:
        """Select messages from the front of the redelivery queue.

        `consume_redeliveries` must be called next.

        Returns:
            The first span, the end of the selected part, and a selection with one to `max_count`
            sendable messages. None if nothing can be sent now, or the scan limit was reached.
        """
        while self.unacked.queue and self.scanned_count < self._scan_limit:
            span = self.unacked.queue.first
            first = max(span.first, self.window.floor)
            if first >= self.ring.head:
                self.unacked.skip_spilled_front()
                continue
            is_plain = self._is_next_redelivery_plain()
            scan_count = REDELIVERY_PLAIN_MESSAGES if is_plain else REDELIVERY_MESSAGES
            last = min(span.last, first + scan_count, self.ring.head)
            # With many gaps, few messages are enough for one piece.
            near = min(last, first + 2 * REDELIVERY_PIECES)
            ranges = self.unacked.unsettled_ranges(first, near)
            if len(ranges) > REDELIVERY_PIECES // 2:
                last = near
            elif near < last:
                ranges = self.unacked.unsettled_ranges(first, last)
            if len(ranges) > REDELIVERY_PIECES:
                last = ranges[REDELIVERY_PIECES][0]
                del ranges[REDELIVERY_PIECES:]
            self.scanned_count += max(0, last - first)
            deliveries_max = self.delivery_policy.deliveries_max
            if deliveries_max and span.attempts >= deliveries_max:
                last = self._give_up_leading(ranges, last, span.attempts)
                ranges = []
            else:
                ranges = selection.limit_ranges(ranges, max_count)
                if selection.count_sequences(ranges) == max_count:
                    last = ranges[-1][1]
            selected = selection.select_from_ranges(
                self.ring, ranges, self.channel_filter, self._clock.now
            )
            if selected.sendable:
                return span, last, selected
            self.consume_redeliveries(span, last, selected)
        return None

    def _is_next_redelivery_plain(self) -> bool:
        """True if the next redeliveries need no inspection and all match."""
        return (
            self.channel_filter is None
            and self.unacked.queue.first.first >= self.ring.special_until
        )

    def consume_redeliveries(
        self, span: Span, end_sequence: int, selection: MessageSelection
    ) -> None:
        """Remove the front of the redelivery queue up to `end_sequence`."""
        self.unacked.consume_front(span, end_sequence)
        self._skip_unsendable(selection, end_sequence, attempts=span.attempts)

    def _copy_single(self, tick: int) -> CopiedFrames | None:
        """Return a copy of the only new message: a fast path of `_copy_new`.

        None if the stored frame cannot be sent unchanged now.
        """
        ring, sequence = self.ring, self.window.cursor
        if (
            (sequence < ring.envelopes_until and not self.delivery_policy.accepts_envelopes)
            or not selection.is_sendable(ring, sequence, self.channel_filter, self._clock.now)
            or not self._sendable_max()
        ):
            return None
        ring.set_timer_index(sequence, sequence + 1, tick % self._timer_index_modulus)
        frame, _ = ring.view_frames(sequence, sequence + 1, SEND_BYTES)
        self.scanned_count = 1
        self.mark_sent(sequence + 1, tick)
        return CopiedFrames(0, count=1, parts=[frame])

    def _copy_new(self, tick: int, messages_max: int) -> CopiedFrames:
        """Return the frames of the next new messages that match."""
        pieces = CopiedFrames(REDELIVERY_BYTES)
        first = self.window.cursor
        scan_count = min(REDELIVERY_MESSAGES, _SCANNED_PER_MESSAGE * messages_max)
        max_count = min(messages_max, self._sendable_max())
        selected, last = self.select_new(scan_count, max_count)
        last = self._copy_ranges(selected.sendable, last, pieces, tick)
        self._advance_cursor(last)
        delayed = selection.ranges_before(selected.delayed, last)
        self._count_delivered(pieces.count)
        self._skip_unsendable(selected, last, attempts=0)
        if pieces.count:
            self._start_ack_timeout_except(delayed, first, last, 1, tick)
        return pieces

    def select_new(self, scan_count: int, max_count: int) -> tuple[MessageSelection, int]:
        """Select up to `max_count` of the next `scan_count` new messages.

        Returns:
            The selection and its end.
        """
        first = self.window.cursor
        last = self._limit_scan(first, min(self.ring.head, first + scan_count))
        selected = selection.select_messages(
            self.ring, first, last, self.channel_filter, self._clock.now
        )
        sendable = selection.limit_ranges(selected.sendable, max_count)
        if sendable != selected.sendable:
            selected, last = replace(selected, sendable=sendable), sendable[-1][1]
        self.scanned_count += last - first
        return selected, last

    def _skip_unsendable(
        self, selected: MessageSelection, end_sequence: int, *, attempts: int
    ) -> None:
        """Skip messages that do not match or have expired, and delay messages that are not due."""
        if selected.skipped:
            self._mark_skipped(selection.ranges_before(selected.skipped, end_sequence))
            self._changes.record_moved(self)
        if selected.expired:
            expired = selection.ranges_before(selected.expired, end_sequence)
            self.count_undelivered(Reason.EXPIRED, selection.count_sequences(expired))
        for begin, end in selection.ranges_before(selected.delayed, end_sequence):
            self.unacked.mark_waiting(Span(begin, end, attempts))
            for due, first, last in selection.due_times(self.ring, begin, end):
                self.scanned_count += SCAN_COST_OF_COPY
                self.delay_span(due, Span(first, last, attempts))

    def _copy_ranges(
        self, ranges: Ranges, end_sequence: int, pieces: CopiedFrames, tick: int
    ) -> int:
        """Copy frames while `pieces` has space.

        Returns:
            `end_sequence`, or the sequence at which copying stopped.
        """
        if not ranges:
            return end_sequence
        self.ring.set_timer_index(ranges[0][0], ranges[-1][1], tick % self._timer_index_modulus)
        plain_only = not self.delivery_policy.accepts_envelopes
        for begin, end in ranges:
            while begin < end:
                if pieces.free_bytes <= 0:
                    return begin
                piece, piece_end = self.ring.view_frames(begin, end, pieces.free_bytes)
                if plain_only and begin < self.ring.envelopes_until:
                    self.scanned_count += SCAN_COST_OF_COPY * (piece_end - begin)
                    payload_frames, uncarriable = selection.strip_envelopes(
                        self.ring, begin, piece_end
                    )
                    self._give_up_ranges(
                        [(sequence, sequence + 1) for sequence in uncarriable],
                        Reason.UNCARRIABLE,
                        0,
                    )
                    pieces.add(payload_frames, piece_end - begin - len(uncarriable))
                    if uncarriable:
                        return piece_end
                else:
                    pieces.add(piece, piece_end - begin)
                begin = piece_end
        return end_sequence

    def timer_index(self, tick: int) -> int:
        """Return the timer index of frames that are sent at `tick`."""
        return tick % self._timer_index_modulus

    def view_run(self, tick: int, messages_max: int) -> tuple[memoryview, int]:
        """Return the next new messages that need no copy, at most `messages_max`, as frames in one
        piece.

        `mark_sent` must follow.

        Returns:
            The frames, and the sequence after the last of them. The frames are empty if there are
            none.
        """
        ring, first = self.ring, self.window.cursor
        last = min(ring.head, first + messages_max)
        if self._is_limited:
            last = min(last, first + self._sendable_max())
        if self.is_filtered:
            last = first if self.unacked.queue else min(last, self._zero_copy_end)
        elif first < ring.special_until and self.has_to_inspect:
            last = first
        if first >= last:
            return _NO_FRAMES, first
        timer_index = tick % self._timer_index_modulus
        if not ring.has_timer_index(first, timer_index):
            last = min(last, first + RESTAMPED_MESSAGES_MAX)
        piece, last = ring.view_frames(first, last, SEND_BYTES)
        ring.set_timer_index(first, last, timer_index)
        return piece, last

    def count_sent(self, count: int, attempts: int) -> None:
        """Count sent messages that had `attempts` delivery attempts before."""
        self._changes.record_progress(self)
        if attempts > 0:
            self.redelivered_count += count
        else:
            self._count_delivered(count)

    def _count_delivered(self, count: int) -> None:
        """Count messages that were sent for the first time."""
        self.delivered_count += count
        self._class_deliveries.count += count

    def pass_new(self, selected: MessageSelection, last: int) -> None:
        """Move the cursor past the result of `select_new`, up to `last`."""
        self._advance_cursor(last)
        self._skip_unsendable(selected, last, attempts=0)

    def copy_assigned(self, span: Span, pieces: CopiedFrames, tick: int) -> Ranges:
        """Copy the front of a span that is assigned to a member, without expired messages.

        The front is removed from the span.

        Returns:
            The copied ranges. The other messages of the front need not be sent.
        """
        ranges = self.window.unacked_ranges(span.first, span.last)
        selected = selection.select_from_ranges(
            self.ring, ranges, self.channel_filter, self._clock.now
        )
        count_before, pieces.attempt = pieces.count, span.next_attempt
        end = self._copy_ranges(selected.sendable, span.last, pieces, tick)
        self._skip_unsendable(selected, end, attempts=span.attempts)
        self.count_sent(pieces.count - count_before, span.attempts)
        span.first = end
        return selection.ranges_before(selected.sendable, end)

    def mark_sent(self, last: int, tick: int) -> None:
        """Record that the new messages below `last` were sent."""
        first = self.window.cursor
        self._advance_cursor(last)
        self._count_delivered(last - first)
        self.unacked.start_ack_timeout(first, last, 1, tick)

    def _advance_cursor(self, cursor: int) -> None:
        """Move the cursor forward."""
        if self._backlog_counter is not None:
            self._backlog_counter.advance_cursor(cursor)
        self._passed_count += cursor - self.window.cursor
        self.window.cursor = cursor
        self._changes.record_progress(self)

    def _start_ack_timeout_except(
        self, excluded: Ranges, first: int, last: int, attempts: int, tick: int
    ) -> None:
        """Start the ack timeout of first..last-1 without the `excluded` ranges."""
        for begin, end in excluded:
            if first < begin:
                self.unacked.start_ack_timeout(first, begin, attempts, tick)
            first = max(first, end)
        if first < last:
            self.unacked.start_ack_timeout(first, last, attempts, tick)

    # Acknowledgements and redelivery -------------------------------------------------------------

    def nack(
        self,
        first: int,
        last: int,
        delay_seconds: float | None,
        tick: int,
        *,
        attempt: int = 0,
        error: str = "",
    ) -> None:
        """Reject messages of first..last-1 that are in flight; they are redelivered later.

        Args:
            delay_seconds: Delay before redelivery; None for the backoff of their attempts.
            attempt: Only messages of this delivery attempt; 0 for any.
            error: Reason given by the consumer, kept for dead letters.
        """
        spans = self.unacked.remove_in_flight(first, last, attempt)
        self.unacked.mark_sent_spans_waiting(spans)
        for span in spans:
            self.reject_span(span, delay_seconds, tick, error)

    def reject_span(self, span: Span, delay_seconds: float | None, tick: int, error: str) -> None:
        """Schedule the redelivery of a rejected span, which is not in flight any more.

        See `nack`.
        """
        self._failure_reasons.record(self, span.first, span.last, error)
        self.nack_count += 1
        if self.unacked.reject(span, delay_seconds, tick):
            self._schedule_wakeup()

    def tick_in_parts(self, tick: int) -> Generator[None, None, None]:
        """Queue what is overdue at `tick` for redelivery, in parts of bounded work."""
        yield from self.unacked.tick_in_parts(tick)
        self.window.release_memory()

    @property
    def next_wakeup(self) -> float:
        """Time at which `handle_wakeup` is to be called next."""
        return self._clock.now if self._in_flight_bytes.is_measuring else self.unacked.next_due_time

    def handle_wakeup(self) -> bool:
        """Measure messages in flight, and queue delayed messages whose time has come, a limited
        number of each.

        Returns True if there is work to do.
        """
        measured_count = self._in_flight_bytes.continue_measuring()
        self.scanned_count = measured_count + SCAN_COST_OF_DELAY * self.unacked.queue_due_delays()
        return measured_count > 0 or bool(self.unacked.queue)

    def delay_span(self, due_time: float, span: Span) -> None:
        """Queue a span at `due_time`, in seconds since 1970."""
        self.unacked.delay(due_time, span)
        self._delayed_wakeups.schedule_wakeup(due_time, self)

    def _schedule_wakeup(self) -> None:
        self._delayed_wakeups.schedule_wakeup(self.next_wakeup, self)

    # Skipping, dropping and dead-lettering -------------------------------------------------------

    def skip_to(self, floor: int) -> None:
        """Skip everything below `floor`, which the class's policy has dropped."""
        channel_filter = None if self.is_reading_spilled else self.channel_filter
        if self.is_reading_spilled:
            self._backlog_counter = None
        unsent = selection.count_matching(self.ring, self.window.cursor, floor, channel_filter)
        self.dropped_count += self._skip_below(floor) + unsent

    def drop_all(self, reason: Reason) -> None:
        """Drop everything that is stored for this subscription."""
        dropped_before = self.dropped_count
        self.skip_to(self.class_ring.head)
        self.count_undelivered(reason, self.dropped_count - dropped_before)

    def purge(self, first: int, last: int) -> None:
        """Remove the stored messages first..last-1 from this subscription.

        Members of a group must not hold any of them.
        """
        window = self.window
        first, cursor, in_flight_before = (
            max(first, window.floor),
            window.cursor,
            window.in_flight_count,
        )
        if first < min(last, cursor):
            self.unacked.mark_done(first, min(last, cursor))
            removed_count = in_flight_before - window.in_flight_count
            self._skipped_count += removed_count
            self.dropped_count += removed_count
        if cursor < last:
            channel_filter = (
                None if self.is_reading_spilled else self.channel_filter
            )  # Spilled messages are filtered when they are read.
            remaining_ranges = selection.matching_ranges(self.ring, cursor, first, channel_filter)
            self.dropped_count += selection.count_matching(
                self.ring, max(first, cursor), last, channel_filter
            )
            self._advance_past(remaining_ranges, last)
        self._changes.record_moved(self)

    def _advance_past(self, kept_ranges: Ranges, end: int) -> None:
        """Move the cursor to `end`. Only `kept_ranges` of the passed messages are still sent."""
        position = self.window.cursor
        self._advance_cursor(end)
        self._skipped_count += end - position - selection.count_sequences(kept_ranges)
        for begin, last in kept_ranges:
            if position < begin:
                self.window.ack_range(position, begin)
            self.unacked.requeue_waiting(Span(begin, last, 0))
            position = last
        self.window.ack_range(position, end)

    def requeue_with_attempts(self, first: int, attempts: int) -> None:
        """Queue the stored messages again.

        Those from `first` on had `attempts` delivery attempts at another position.
        """
        cursor, head = self.window.cursor, self.ring.head
        self._advance_cursor(head)
        for begin, last, count in ((cursor, first, 0), (max(cursor, first), head, attempts)):
            if begin < last:
                self.unacked.requeue_waiting(Span(begin, last, count))

    def _skip_below(self, floor: int) -> int:
        """Skip everything below `floor`.

        Returns:
            The number of skipped messages behind the cursor.
        """
        self.unacked.discard_held_below(floor)
        self.unacked.add_finished(self.window.floor, floor)
        unsent = max(0, floor - self.window.cursor)
        if unsent:
            self._advance_cursor(floor)
        self.unacked.discard_below(floor)
        skipped_count = self.window.skip_to(floor)
        self._skipped_count += skipped_count
        return skipped_count - unsent

    def count_pending(self) -> int:
        """Return the number of stored, unacknowledged messages, as far as they are counted."""
        return self.window.in_flight_count + (
            self._backlog_counter.count if self._backlog_counter is not None else 0
        )

    def count_backlog(self, backlog_max: int) -> None:
        """Count new messages and up to `backlog_max` older ones.

        Afterwards, `scanned_count` is the number of older ones.
        """
        self.scanned_count = 0
        limit = self.delivery_policy.pending_max
        if limit is not None and self.ring.head - self.window.floor > limit:
            if self._backlog_counter is None:
                self._backlog_counter = BacklogCounter(self.ring, self.window, self.channel_filter)
            self.scanned_count = self._backlog_counter.count_more(backlog_max)

    def count_excess(self) -> int:
        """Return by how many messages the pending limit is exceeded."""
        limit = self.delivery_policy.pending_max
        if limit is None or self.ring.head - self.window.floor <= limit:
            return 0
        return max(0, self.count_pending() - limit)

    def is_over_pending_limit(self) -> bool:
        """Return True if the pending limit is exceeded even without expired messages.

        If that requires looking at messages, it is done once per tick.
        """
        excess, tick = self.count_excess(), self._clock.tick
        if not excess or self.window.floor >= self.ring.timed_until:
            return excess > 0
        if tick == self._slow_check_tick:
            return False
        self._slow_check_tick = tick
        first, cursor = self.window.floor, self.window.cursor
        last = min(self.ring.timed_until, first + SCAN_MESSAGES_MAX)
        ranges = self.window.unacked_ranges(first, last) + [(max(first, cursor), last)] * (
            cursor < last
        )
        selected = selection.select_from_ranges(
            self.ring, ranges, self.channel_filter, self._clock.now
        )
        return excess > selection.count_sequences(selected.expired)

    def enforce_pending_limit(self) -> int:
        """Apply the policy for slow consumers. Returns the number of dropped messages."""
        excess, dropped = self.count_excess(), 0
        if excess and self.delivery_policy.slow_policy == "drop_oldest":
            dropped = self.drop_oldest(excess)
        elif excess and self.delivery_policy.slow_policy == "drop_newest":
            dropped = self.drop_newest(excess)
        self.count_dropped(dropped)
        return dropped

    def count_dropped(self, count: int) -> None:
        """Count messages that were dropped because the consumer is too slow."""
        self.dropped_count += count
        self.count_undelivered(Reason.SLOW_CONSUMER, count)

    def drop_oldest(self, count: int) -> int:
        """Drop the oldest messages ahead of the cursor. Returns their number."""
        backlog_counter = self._backlog_counter
        if backlog_counter is None:
            return 0
        first = self.window.cursor
        last = min(backlog_counter.counted_end, first + backlog_counter.last_scan_max)
        self.scanned_count += min(backlog_counter.last_backlog_max, last - first)
        dropped_count, last = selection.find_first_matching(
            self.ring, first, last, self.channel_filter, count
        )
        self._advance_cursor(last)
        self.window.ack_range(first, last)
        self._skipped_count += last - first
        self._changes.record_moved(self)
        return dropped_count

    def drop_newest(self, count: int) -> int:
        """Drop the newest messages ahead of the cursor. Returns their number."""
        backlog_counter = self._backlog_counter
        if backlog_counter is None:
            return 0
        first, head = self.window.cursor, backlog_counter.counted_end
        if head - first > backlog_counter.last_scan_max:
            if not backlog_counter.last_backlog_max:
                return 0  # The scan budget of this turn is used up.
            self.scanned_count += head - first
        unsent = selection.matching_ranges(self.ring, first, head, self.channel_filter)
        remaining_ranges = selection.limit_ranges(unsent, selection.count_sequences(unsent) - count)
        self._advance_past(remaining_ranges, head)
        self._changes.record_moved(self)
        return selection.count_sequences(unsent) - selection.count_sequences(remaining_ranges)

    def skip_compacted(self, first: int, head: int) -> bool:
        """Skip messages first..head-1, which are compacted copies of messages it already received.

        Returns:
            False if the backlog before them is too long to skip only the copies.
        """
        cursor = self.window.cursor
        if first - cursor > SCAN_MESSAGES_MAX:
            return False
        self._advance_past(
            selection.matching_ranges(self.ring, cursor, first, self.channel_filter), head
        )
        return True

    def skip_unavailable(self, first: int, last: int, reason: Reason) -> None:
        """Skip messages first..last-1, which cannot be read. Earlier messages are still sent."""
        cursor = self.window.cursor
        ranges = self.window.unacked_ranges(first, last)
        self._mark_skipped(ranges)
        lost_count = selection.count_sequences(ranges)
        if cursor < last:
            self._advance_past([(cursor, first)] * (cursor < first), last)
            lost_count += last - max(cursor, first)
        self.count_undelivered(reason, lost_count)
        self._changes.record_moved(self)

    def skip_expired(self, ranges: Ranges) -> None:
        """Skip ascending ranges of expired messages that no member holds."""
        expired = MessageSelection([], [], ranges, ranges)
        self._skip_unsendable(expired, ranges[-1][1], attempts=0)

    def skip_unsent(self, sequences: list[int]) -> None:
        """Skip messages behind the cursor that were never sent and that no member holds."""
        for sequence in sequences:
            self.window.ack_range(sequence, sequence + 1)
        self._skipped_count += len(sequences)
        self._changes.record_moved(self)

    def drop_expired(self, scan_max: int) -> bool:
        """Drop expired messages at the front, except those in flight.

        Args:
            scan_max: Maximum number of messages to scan. `scanned_count` is the actual number.

        Returns:
            True if the floor has moved.
        """
        floor_before, self.scanned_count = self.window.floor, 0
        if self.has_consumer and self.unacked.queue:
            self.select_redeliveries(1)  # Skips redeliveries that cannot be sent.
        drop_step = (
            self._drop_expired_unsent if self.has_consumer else self._drop_expired_unattended
        )
        scan_count = EXPIRY_SCAN_INITIAL_MESSAGES
        while self.scanned_count < scan_max and drop_step(
            min(scan_count, scan_max - self.scanned_count)
        ):
            scan_count = min(4 * scan_count, REDELIVERY_MESSAGES)
        return self.window.floor > floor_before

    def _drop_expired_unattended(self, scan_count: int) -> bool:
        """Drop expired messages while no consumer is attached.

        Returns:
            True if all scanned messages were dropped.
        """
        window, ring = self.window, self.ring
        first, cursor = window.floor, window.cursor
        last = min(ring.timed_until, first + scan_count)
        ranges = window.unacked_ranges(first, last) + (
            [(max(first, cursor), last)] * (cursor < last)
        )
        selected = selection.select_from_ranges(ring, ranges, self.channel_filter, self._clock.now)
        floor = _first_sendable(selected, last)
        if self.unacked.pending_dead_letters:
            floor = min(floor, self.unacked.pending_dead_letters.first_sequence)
        self.scanned_count += max(0, last - first)
        if floor <= first:
            return False
        self.count_undelivered(
            Reason.EXPIRED,
            selection.count_sequences(selection.ranges_before(selected.expired, floor)),
        )
        self._skip_below(floor)
        return floor == last

    def _drop_expired_unsent(self, scan_count: int) -> bool:
        """Drop expired messages from the cursor on. Returns True if all scanned ones were."""
        first = self.window.cursor
        last = min(self.ring.timed_until, first + scan_count)
        if first >= last:
            return False
        selected = selection.select_messages(
            self.ring, first, last, self.channel_filter, self._clock.now
        )
        self.scanned_count += last - first
        end = _first_sendable(selected, last)
        self._advance_cursor(end)
        self._skip_unsendable(selected, end, attempts=0)
        return end == last

    def terminate(self, first: int, last: int, *, attempt: int = 0, error: str = "") -> None:
        """Give up the messages of first..last-1 that are in flight or wait for redelivery.

        Args:
            attempt: Only messages of this delivery attempt; 0 for any.
            error: Reason given by the consumer, kept for the dead letters.
        """
        spans = self.unacked.remove_in_flight(first, last, attempt)
        spans += self.unacked.pop_waiting(first, last, attempt)
        self.terminate_spans(spans, error)

    def terminate_released(self, sequence: int, error: str) -> bool:
        """Give up a message that a former consumer received. The position must have no consumer.

        Args:
            sequence: The message; a message that was never sent is ignored.
            error: Reason given by the consumer, kept for the dead letter.

        Returns:
            False if the position has too many spans to search for the message.
        """
        if not self.unacked.unsettled_ranges(sequence, sequence + 1):
            return True
        spans = self.unacked.remove_in_flight(sequence, sequence + 1, 0)
        found = spans or self.unacked.find_sent_message(sequence)
        self.terminate_spans(found or [], error)
        return found is not None

    def terminate_spans(self, spans: list[Span], error: str) -> None:
        """Give up spans that are not in flight any more."""
        ranges_by_attempts: dict[int, Ranges] = {}
        for span in spans:
            self._failure_reasons.record(self, span.first, span.last, error)
            ranges = ranges_by_attempts.setdefault(span.attempts, [])
            ranges += self.unacked.unsettled_ranges(span.first, span.last)
        for attempts, ranges in ranges_by_attempts.items():
            self._give_up_ranges(sorted(ranges), Reason.TERMINATED, attempts)

    def _give_up_leading(self, ranges: Ranges, end_sequence: int, attempts: int) -> int:
        """Give up the front of `ranges`, of limited size, which had all their deliveries.

        Returns the end of the given-up part.
        """
        leading = selection.limit_ranges(ranges, DEAD_LETTER_BATCH_MESSAGES)
        if leading:
            first, end = leading[0][0], leading[-1][1]
            end = self.ring.view_frames(first, end, REDELIVERY_BYTES)[1]
            leading = selection.ranges_before(leading, end)
            end_sequence = (
                end
                if selection.count_sequences(leading) < selection.count_sequences(ranges)
                else end_sequence
            )
        self._give_up_ranges(leading, Reason.MAX_DELIVERIES, attempts)
        return end_sequence

    def _give_up_ranges(self, ranges: Ranges, reason: Reason, attempts: int) -> None:
        """Keep `ranges` until they are dead-lettered. Ends this turn's scan."""
        if not ranges:
            return
        self.scanned_count += self._scan_limit
        self.count_undelivered(reason, selection.count_sequences(ranges))
        self._advance_cursor(max(self.window.cursor, ranges[-1][1]))
        if not self.unacked.pending_dead_letters:  # Otherwise the store knows the position already.
            self._changes.record_given_up(self)
        self.unacked.add_pending_dead_letters(ranges, reason, attempts)

    def restore_pending_dead_letters(self, rows: Iterable[tuple[int, int, int, str]]) -> None:
        """Restore the result of `PendingDeadLetters.to_rows`, without acknowledged messages."""
        for first, last, attempts, reason in rows:
            ranges = self.unacked.unsettled_ranges(first, last)
            self.unacked.add_pending_dead_letters(ranges, Reason(reason), attempts)

    def next_dead_letters(self) -> tuple[Ranges, Reason, int] | None:
        """Return the oldest pending dead letters with one reason and attempt count.

        Their number and bytes are limited. None if no dead letters are in memory.
        """
        ring = self.ring
        batch = self.unacked.pending_dead_letters.next_batch(ring.floor, ring.head)
        if batch is None:
            return None
        ranges, reason, attempts = batch
        ranges = selection.limit_ranges(ranges, DEAD_LETTER_BATCH_MESSAGES)
        end = ring.view_frames(ranges[0][0], ranges[-1][1], REDELIVERY_BYTES)[1]
        return selection.ranges_before(ranges, end), reason, attempts

    def mark_dead_lettered(self, ranges: Ranges) -> None:
        """Finish given-up messages that were dead-lettered."""
        self._mark_skipped(ranges)
        self._changes.record_moved(self)
        self._changes.record_progress(self)

    def _mark_skipped(self, ranges: Ranges) -> None:
        """Finish `ranges` behind the cursor without an ack."""
        self._skipped_count += selection.count_sequences(ranges)
        for first, last in ranges:
            self.unacked.mark_done(first, last)

    def count_undelivered(self, reason: Reason, count: int) -> None:
        """Count messages that it was never sent, or not again."""
        if count:
            self.undelivered_counts[reason] += count

    # Attaching and detaching sessions ------------------------------------------------------------

    def detach(self) -> None:
        """Detach the session; the position stays and its messages in flight are redelivered.

        Messages sent once are redelivered as soon as a session attaches, the others after their
        backoff.
        """
        self.has_consumer, self.session_id, self._sent_max = False, -1, None
        self.unacked.requeue_all_in_flight()

    @property
    def has_new_messages(self) -> bool:
        """True if messages are stored ahead of the cursor."""
        return self.window.cursor < self.ring.head

    @property
    def can_select_new(self) -> bool:
        """True if new messages may be selected in this turn: no redelivery must be sent before."""
        return (
            not self.unacked.queue
            and self.window.cursor < self.ring.head
            and self.scanned_count < self._scan_limit
        )

    def count_unassigned(self, spans_max: int) -> int:
        """Return the number of messages to be sent, of at most `spans_max` redelivered spans."""
        count = self.ring.head - self.window.cursor
        if self.unacked.queue:
            count += self.unacked.queue.count_messages(spans_max)
        return count

    def set_has_consumer(self, has_consumer: bool) -> None:
        """Record whether a group has members."""
        self.has_consumer = has_consumer

    def mark_unattended(self, now: float) -> None:
        """Record that no session is attached any more."""
        self.unattended_since = now

    def mark_logged(self, log_position: int) -> None:
        """Record the log position of the entry that created or removes this position."""
        self.log_position = log_position

    def set_owner(self, user: str, address: str = "") -> None:
        """Set the user that owns the position, or the client's address if it has no user."""
        self.owner, self.owner_address = user, address

    def set_idle_seconds(self, idle_seconds: float | None) -> None:
        """Set how long it is kept while no session is attached; None for unlimited."""
        self.idle_seconds = idle_seconds

    def set_delivery_policy(self, delivery_policy: DeliveryPolicy) -> None:
        """Set the limits and delays for a new consumer."""
        self.delivery_policy = delivery_policy
        self.unacked.set_delivery_policy(delivery_policy)

    def mark_removed(self) -> None:
        """Cancel wakeups and forget the failure reasons of a removed position."""
        self._delayed_wakeups.schedule_wakeup(NEVER, self)
        self._failure_reasons.forget_position(self)

    def attach(self, session_id: int, subscription_number: int) -> None:
        """Start sending to a session."""
        self.session_id, self.subscription_number = session_id, subscription_number
        self.inherited_delays = []
        self.has_consumer = True

    def attach_later(
        self, session_id: int, subscription_number: int, delays: list[tuple[int, int, int]]
    ) -> None:
        """Reserve the position for a session, which is attached when all `delays` have passed.

        The rows are those of `PositionHandover.not_before_ticks`.
        """
        self.session_id, self.subscription_number = session_id, subscription_number
        self.inherited_delays = delays

    # Spilled messages ----------------------------------------------------------------------------

    @property
    def is_reading_spilled(self) -> bool:
        """True if it needs messages that are no longer in memory."""
        return self.ring is not self.class_ring

    def switch_ring(self, ring: Ring) -> None:
        """Send from `ring` from now on."""
        self.ring = ring
        self._in_flight_bytes = InFlightBytes(ring)
        self._backlog_counter = None
        self._zero_copy_end = 0

    def set_channel_filter(self, channel_filter: ChannelFilter | None) -> None:
        """Set the filter for a new consumer."""
        self.channel_filter = channel_filter
        self._backlog_counter = None
        self._zero_copy_end = 0

    def build_handover(self) -> PositionHandover:
        """Return the redelivery state that a successor without `take_over` continues.

        With more than HANDOVER_RANGES_MAX ranges, all messages count as sent once, without delays.
        """
        floor, cursor = self.window.floor, self.window.cursor
        if self.unacked.has_more_spans(HANDOVER_RANGES_MAX):
            return PositionHandover([(floor, cursor, 1)])
        handover = self.unacked.build_handover()
        ticks = sorted(handover.not_before_ticks + self.inherited_delays)
        return replace(handover, not_before_ticks=ticks).restrict_to(floor, cursor)

    def list_delays(self, tick_seconds: float, range_max: int | None = None) -> DelayRanges:
        """Return ascending (first, last, seconds from now) of all delayed redeliveries.

        `range_max` as in `UnackedMessages.list_delays`.
        """
        inherited = [
            (first, last, (due - self._clock.tick) * tick_seconds)
            for first, last, due in self.inherited_delays
        ]
        delays = sorted(self.unacked.list_delays(tick_seconds, range_max) + inherited)
        return restrict_rows(delays, self.window.floor, self.window.cursor)

    def end(self) -> None:
        """Release what a successor does not need, and keep the rest for `take_over`."""
        self.switch_ring(self.class_ring)
        self.unacked.end()

    def can_be_taken_over(self, window: AckWindow, *, is_shared: bool) -> bool:
        """Return True if a successor with `window`, which is `is_shared`, may call `take_over`."""
        return not self.inherited_delays and self.unacked.can_be_taken_over(
            window, is_shared=is_shared
        )

    def take_over(self, predecessor: Position) -> None:
        """Continue the delivery state of an ended position with the same window."""
        self.unacked.take_over(predecessor.unacked)
        self._schedule_wakeup()

    def delay_redeliveries(self, delays: Iterable[tuple[int, int, float]]) -> None:
        """Delay redeliveries: rows (first, last, due) with `due` in seconds since 1970."""
        if self.unacked.delay_until(delays):
            self._schedule_wakeup()

    def apply_handover(self, handover: PositionHandover, tick_seconds: float) -> None:
        """Continue the delays of a predecessor."""
        self.delay_redeliveries(handover.not_before_times)
        self.unacked.delay_until_ticks(handover.not_before_ticks)

    def check_invariants(self) -> None:
        """Raise AssertionError unless the invariants hold."""
        window = self.window
        window.check()
        assert self.ring.floor <= window.floor <= window.cursor <= self.class_ring.head
        assert window.cursor <= self.ring.head or self.is_reading_spilled
        assert self.acknowledged_count >= 0
        self.unacked.check_invariants()


def _first_sendable(selected: MessageSelection, last: int) -> int:
    """Return the first message to be sent now or later, or `last`."""
    return min([first for first, _ in selected.sendable + selected.delayed], default=last)
