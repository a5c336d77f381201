"""Subscription of a class: a position that sends its messages to one session.

Messages that do not match the filter count as finished when the cursor passes them. Messages are
inspected and copied one by one only if some of them may not match; otherwise whole runs of the ring
are sent without a copy. One turn scans a limited number of messages, whether they match or not.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import islice

from simplebus.core.errors import Reason
from simplebus.core.limits import (
    DEAD_LETTER_BATCH_MESSAGES,
    DEAD_LETTER_BATCHES_PER_TICK,
    EXPIRY_SCAN_INITIAL_MESSAGES,
    LOOKAHEAD_MESSAGES,
    PLAIN_FRAMES_MAX,
    REDELIVERY_BYTES,
    REDELIVERY_MESSAGES,
    REDELIVERY_PIECES,
    REDELIVERY_PLAIN_BYTES,
    REDELIVERY_PLAIN_MESSAGES,
    SCAN_COST_OF_COPY,
    SCAN_MESSAGES_MAX,
    SCAN_SPANS_MAX,
    SEND_BYTES,
)
from simplebus.core.redelivery.timer_wheel import Span
from simplebus.core.subscription import selection
from simplebus.core.subscription.backlog import BacklogCounter
from simplebus.core.subscription.copied_frames import CopiedFrames
from simplebus.core.subscription.position import Position
from simplebus.core.subscription.selection import MessageSelection, Ranges


class BrokerSubscription(Position):
    """Position that selects messages and sends them through an outbox, as its `SendSource`.

    It belongs to one session, or to none while it is a durable that no session uses.
    """

    scan_limit = SCAN_MESSAGES_MAX
    """Approximate number of messages scanned in one turn if none of them matches."""

    # Sending -------------------------------------------------------------------------------------

    def copy_frames(self, tick: int) -> bytes:
        self.scanned_count = 0
        frames = self._copy_redeliveries(tick) if self._redelivery_queue else b""
        while not frames and not self._redelivery_queue and self.has_to_inspect and self.has_work:
            if self.scanned_count >= self.scan_limit or self._extend_zero_copy():
                break
            frames = self._copy_new(tick)
        return frames

    def _extend_zero_copy(self) -> bool:
        """Return True if the next messages all match, so that they can be sent without a copy.

        A short run is accepted only if no more messages are stored.
        """
        first, head = self.window.cursor, self.ring.head
        if self.channel_filter is None or first < self.ring.timed_until:
            return False
        if first < self.ring.envelopes_until and not self.delivery_policy.accepts_envelopes:
            return False
        last = min(head, first + LOOKAHEAD_MESSAGES)
        run_end = selection.matching_run_end(self.ring, first, last, self.channel_filter)
        if run_end < last and run_end - first < PLAIN_FRAMES_MAX:
            return False
        self._zero_copy_end = run_end
        return True

    def _copy_redeliveries(self, tick: int) -> bytes:
        pieces = CopiedFrames(
            REDELIVERY_PLAIN_BYTES if self._is_next_redelivery_plain() else REDELIVERY_BYTES
        )
        while not pieces.count and (capacity := self._in_flight_capacity()):
            redeliveries = self._select_redeliveries(capacity)
            if redeliveries is None:
                break
            span, last, selected = redeliveries
            first, attempts = selected.sendable[0][0], span.attempts
            self.attempt = span.next_attempt
            last = self._copy_ranges(selected.sendable, last, pieces, tick)
            self._consume_redeliveries(span, last, selected)
            if pieces.count:
                # One span for all; messages acknowledged meanwhile are left out when it is due.
                delayed = selection.ranges_before(selected.delayed, last)
                self._start_ack_timeout_except(delayed, first, last, max(attempts + 1, 1), tick)
                if attempts > 0:
                    self.redelivered_count += pieces.count
                else:
                    self.delivered_count += pieces.count
        return b"".join(pieces.parts)

    def _select_redeliveries(self, max_count: int) -> tuple[Span, int, MessageSelection] | None:
        """Select messages from the front of the redelivery queue.

        `_consume_redeliveries` must be called next.

        Returns:
            The first span, the end of the selected part, and a selection with one to `max_count`
            sendable messages. None if nothing can be sent now, or the scan limit was reached.
        """
        while self._redelivery_queue and self.scanned_count < self.scan_limit:
            span = self._redelivery_queue[0]
            first = max(span.first, self.window.floor)
            if first >= self.ring.head:
                self._spilled_redeliveries.append(self._redelivery_queue.popleft())
                continue
            is_plain = self._is_next_redelivery_plain()
            scan_count = REDELIVERY_PLAIN_MESSAGES if is_plain else REDELIVERY_MESSAGES
            last = min(span.last, first + scan_count, self.ring.head)
            ranges = self._unsettled_ranges(first, last)
            if len(ranges) > REDELIVERY_PIECES:
                last = ranges[REDELIVERY_PIECES][0]
                del ranges[REDELIVERY_PIECES:]
            self.scanned_count += max(0, last - first)
            deliveries_max = self.delivery_policy.deliveries_max
            if span.give_up_reason or (deliveries_max and span.attempts >= deliveries_max):
                reason = span.give_up_reason or Reason.MAX_DELIVERIES
                last = self._give_up_leading(ranges, last, span.attempts, reason)
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
            self._consume_redeliveries(span, last, selected)
        return None

    def _is_next_redelivery_plain(self) -> bool:
        """True if the next redeliveries need no inspection and all match."""
        return (
            self.channel_filter is None
            and self._redelivery_queue[0].first >= self.ring.special_until
        )

    def _consume_redeliveries(
        self, span: Span, end_sequence: int, selection: MessageSelection
    ) -> None:
        """Remove the front of the redelivery queue up to `end_sequence`."""
        for waiting in (self._unsent_sequences, self._resend_sequences):
            waiting.remove(span.first, end_sequence)
        span.first = end_sequence
        if span.first >= span.last:
            self._redelivery_queue.popleft()
        self._skip_unsendable(selection, end_sequence, attempts=span.attempts)

    def _copy_new(self, tick: int) -> bytes:
        """Return the frames of the next new messages that match."""
        pieces = CopiedFrames(REDELIVERY_BYTES)
        first = self.window.cursor
        self.attempt = 1
        selected, last = self._select_new(REDELIVERY_MESSAGES, self._in_flight_capacity())
        last = self._copy_ranges(selected.sendable, last, pieces, tick)
        self._advance_cursor(last)
        delayed = selection.ranges_before(selected.delayed, last)
        self.delivered_count += pieces.count
        self._skip_unsendable(selected, last, attempts=0)
        if pieces.count:
            self._start_ack_timeout_except(delayed, first, last, 1, tick)
        return b"".join(pieces.parts)

    def _select_new(self, scan_count: int, max_count: int) -> tuple[MessageSelection, int]:
        """Select up to `max_count` of the next `scan_count` new messages.

        Returns:
            The selection and its end.
        """
        first = self.window.cursor
        last = min(self.ring.head, first + scan_count)
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
        """Skip messages that do not match or have expired, and delay those that are not due."""
        skipped = selection.ranges_before(selected.skipped, end_sequence)
        self._mark_skipped(skipped)
        if skipped:
            self._on_floor_moved()
        self._count_undelivered(
            Reason.EXPIRED,
            selection.count_sequences(selection.ranges_before(selected.expired, end_sequence)),
        )
        for begin, end in selection.ranges_before(selected.delayed, end_sequence):
            self._mark_waiting(Span(begin, end, attempts))
            for due, first, last in selection.due_times(self.ring, begin, end):
                self.scanned_count += SCAN_COST_OF_COPY
                self._delay_span(due, Span(first, last, attempts))

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

    def peek_frames(self, tick: int) -> memoryview:
        first = self.window.cursor
        last = self.ring.head
        if self.delivery_policy.in_flight_max is not None:
            last = min(last, first + self._in_flight_capacity())
        if self.is_filtered:
            last = min(last, self._zero_copy_end)
        if first >= last or (self.has_frames_to_copy and self.has_to_inspect):
            return memoryview(b"")
        piece, last = self.ring.view_frames(first, last, SEND_BYTES)
        self.ring.set_timer_index(first, last, tick % self._timer_index_modulus)
        self._peeked_end = last
        self.attempt = 1
        return piece

    def mark_sent(self, piece: memoryview, sent_bytes: int, tick: int) -> bytes:
        first, last = self.window.cursor, self._peeked_end
        rest = b""
        if sent_bytes < len(piece):
            last, missing = self.ring.locate_cut(first, last, sent_bytes)
            if missing:
                rest = bytes(piece[sent_bytes : sent_bytes + missing])
                last += 1
        if first < last:
            self._advance_cursor(last)
            self.delivered_count += last - first
            self._start_ack_timeout(first, last, 1, tick)
        return rest

    def _advance_cursor(self, cursor: int) -> None:
        """Move the cursor forward."""
        if self._backlog_counter is not None:
            self._backlog_counter.advance_cursor(cursor)
        self._passed_count += cursor - self.window.cursor
        self.window.cursor = cursor

    def _start_ack_timeout(self, first: int, last: int, attempts: int, tick: int) -> None:
        """Start the ack timeout of first..last-1."""
        self._ack_timer.schedule(
            tick + self.delivery_policy.redelivery_delay_ticks(attempts), first, last, attempts
        )

    def _start_ack_timeout_except(
        self, excluded: Ranges, first: int, last: int, attempts: int, tick: int
    ) -> None:
        """Start the ack timeout of first..last-1 without the `excluded` ranges."""
        for begin, end in excluded:
            if first < begin:
                self._start_ack_timeout(first, begin, attempts, tick)
            first = max(first, end)
        if first < last:
            self._start_ack_timeout(first, last, attempts, tick)

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
        self._count_undelivered(reason, self.dropped_count - dropped_before)

    def purge(self, first: int, last: int) -> None:
        """Remove the stored messages first..last-1 from this subscription."""
        window = self.window
        first, cursor, in_flight_before = (
            max(first, window.floor),
            window.cursor,
            window.in_flight_count,
        )
        if first < min(last, cursor):
            self._mark_done(first, min(last, cursor))
            removed_count = in_flight_before - window.in_flight_count
            self._skipped_count += removed_count
            self.dropped_count += removed_count
        if cursor < last:
            channel_filter = (
                None if self.is_reading_spilled else self.channel_filter
            )  # Spilled messages are filtered when they are read.
            kept = selection.matching_ranges(self.ring, cursor, first, channel_filter)
            self.dropped_count += selection.count_matching(
                self.ring, max(first, cursor), last, channel_filter
            )
            self._advance_past(kept, last)

    def _advance_past(self, kept_ranges: Ranges, end: int) -> None:
        """Move the cursor to `end`. Only `kept_ranges` of the passed messages are still sent."""
        position = self.window.cursor
        self._advance_cursor(end)
        self._skipped_count += end - position - selection.count_sequences(kept_ranges)
        for begin, last in kept_ranges:
            if position < begin:
                self.window.ack_range(position, begin)
            self._redelivery_queue.append(Span(begin, last, 0))
            self._mark_waiting(self._redelivery_queue[-1])
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
                self._redelivery_queue.append(Span(begin, last, count))
                self._mark_waiting(self._redelivery_queue[-1])

    def _skip_below(self, floor: int) -> int:
        """Skip everything below `floor`.

        Returns:
            The number of skipped messages behind the cursor.
        """
        unsent = max(0, floor - self.window.cursor)
        if unsent:
            self._advance_cursor(floor)
        skipped_count = self.window.skip_to(floor)
        self._skipped_count += skipped_count
        for waiting in (self._unsent_sequences, self._resend_sequences, self.pending_dead_letters):
            waiting.remove(0, floor)
        if self._redelivery_queue:
            self.outbox.enqueue(self)
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
        if excess and self._backlog_counter is not None:
            if self.delivery_policy.slow_policy == "drop_oldest":
                dropped = self._drop_oldest(excess, self._backlog_counter)
            elif self.delivery_policy.slow_policy == "drop_newest":
                dropped = self._drop_newest(excess, self._backlog_counter)
        self.dropped_count += dropped
        self._count_undelivered(Reason.SLOW_CONSUMER, dropped)
        return dropped

    def _drop_oldest(self, count: int, backlog_counter: BacklogCounter) -> int:
        """Drop the oldest messages that were never sent. Messages in flight stay."""
        first = self.window.cursor
        last = min(backlog_counter.counted_end, first + backlog_counter.last_scan_max)
        self.scanned_count += min(backlog_counter.last_backlog_max, last - first)
        dropped_count, last = selection.find_first_matching(
            self.ring, first, last, self.channel_filter, count
        )
        self._advance_cursor(last)
        self.window.ack_range(first, last)
        self._skipped_count += last - first
        self._on_floor_moved()
        return dropped_count

    def _drop_newest(self, count: int, backlog_counter: BacklogCounter) -> int:
        """Drop the newest messages that were never sent."""
        first, head = self.window.cursor, backlog_counter.counted_end
        if head - first > backlog_counter.last_scan_max:
            if not backlog_counter.last_backlog_max:
                return 0  # The scan budget of this turn is used up.
            self.scanned_count += head - first
        unsent = selection.matching_ranges(self.ring, first, head, self.channel_filter)
        kept = selection.limit_ranges(unsent, selection.count_sequences(unsent) - count)
        self._advance_past(kept, head)
        self._on_floor_moved()
        return selection.count_sequences(unsent) - selection.count_sequences(kept)

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
        self._count_undelivered(reason, lost_count)
        self._on_floor_moved()

    def drop_expired(self, scan_max: int) -> bool:
        """Drop expired messages at the front, except those in flight.

        Args:
            scan_max: Maximum number of messages to scan. `scanned_count` is the actual number.

        Returns:
            True if the floor has moved.
        """
        floor_before, self.scanned_count = self.window.floor, 0
        if self.has_consumer and self._redelivery_queue:
            self._select_redeliveries(1)  # Skips redeliveries that cannot be sent.
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
        if self.pending_dead_letters:
            floor = min(floor, self.pending_dead_letters.first_sequence)
        self.scanned_count += max(0, last - first)
        if floor <= first:
            return False
        self._count_undelivered(
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
        spans = self._ack_timer.remove(first, last, attempt)
        if self.has_consumer:
            for begin, end in self._find_waiting_redeliveries(first, last, attempt):
                self._resend_sequences.remove(begin, end)
                spans.append(Span(begin, end, attempt or self._find_attempts(begin)))
        else:
            spans += [
                Span(max(first, span.first), min(last, span.last), span.attempts)
                for span in self._iter_spans()
                if span.first < last and first < span.last and not self._is_unsent(span)
            ]
        self._terminate_spans(spans, error)

    def _find_attempts(self, sequence: int) -> int:
        """Return the attempts of a waiting message, or 1 if a limited search does not find it."""
        for span in islice(self._iter_spans(), SCAN_SPANS_MAX):
            if span.first <= sequence < span.last:
                return span.attempts
        return 1

    def _terminate_spans(self, spans: list[Span], error: str) -> None:
        """Give up spans: some now, the rest in later turns."""
        remaining = DEAD_LETTER_BATCH_MESSAGES
        for span in spans:
            self._failure_reasons.record(self, span.first, span.last, error)
            if remaining > 0:
                ranges = self._unsettled_ranges(span.first, span.last)
                remaining -= selection.count_sequences(ranges)
                span.first = self._give_up_leading(
                    ranges, span.last, span.attempts, Reason.TERMINATED
                )
            if span.first < span.last:
                rest = Span(span.first, span.last, span.attempts, Reason.TERMINATED)
                self._mark_waiting(rest)
                self._redelivery_queue.append(rest)
                self.outbox.enqueue(self)

    def _give_up_leading(
        self, ranges: Ranges, end_sequence: int, attempts: int, reason: Reason
    ) -> int:
        """Give up the front of `ranges`, of limited size. Returns the end of the given-up part."""
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
        self._give_up_ranges(leading, reason, attempts)
        return end_sequence

    def _give_up_ranges(self, ranges: Ranges, reason: Reason, attempts: int) -> None:
        """Dead-letter `ranges`, or keep them as pending. Ends this turn's scan."""
        if not ranges:
            return
        self.scanned_count += self.scan_limit
        self._count_undelivered(reason, selection.count_sequences(ranges))
        self._advance_cursor(max(self.window.cursor, ranges[-1][1]))
        # Later messages wait behind those that already wait for space.
        refused_from = (
            ranges[0][0]
            if self.pending_dead_letters
            else self._dead_letter(ranges, reason, attempts)
        )
        if refused_from is not None:
            refused = selection.ranges_from(ranges, refused_from)
            self._remove_from_waiting(refused)
            self.pending_dead_letters.add(refused, reason, attempts)
            ranges = selection.ranges_before(ranges, refused_from)
        self._mark_skipped(ranges)
        self._on_floor_moved()

    def _remove_from_waiting(self, ranges: Ranges) -> None:
        """Remove `ranges` from the messages that wait to be sent."""
        for first, last in ranges:
            for waiting in (self._unsent_sequences, self._resend_sequences):
                waiting.remove(first, last)

    def restore_pending_dead_letters(self, rows: Iterable[tuple[int, int, int, str]]) -> None:
        """Restore the result of `PendingDeadLetters.to_rows`, without acknowledged messages."""
        for first, last, attempts, reason in rows:
            ranges = self._unsettled_ranges(first, last)
            self._remove_from_waiting(ranges)
            self.pending_dead_letters.add(ranges, Reason(reason), attempts)

    def retry_dead_letters(self) -> bool:
        """Dead-letter the oldest pending messages. Returns True if there was space for all."""
        ring = self.ring
        for _ in range(DEAD_LETTER_BATCHES_PER_TICK):
            batch = self.pending_dead_letters.next_batch(ring.floor, ring.head)
            if batch is None:
                return True
            ranges, reason, attempts = batch
            ranges = selection.limit_ranges(ranges, DEAD_LETTER_BATCH_MESSAGES)
            end = ring.view_frames(ranges[0][0], ranges[-1][1], REDELIVERY_BYTES)[1]
            ranges = selection.ranges_before(ranges, end)
            refused_from = self._dead_letter(ranges, reason, attempts)
            self._mark_skipped(
                ranges if refused_from is None else selection.ranges_before(ranges, refused_from)
            )
            self._on_floor_moved()
            if refused_from is not None:
                return False
        return True

    def _mark_skipped(self, ranges: Ranges) -> None:
        """Finish `ranges` behind the cursor without an ack."""
        self._skipped_count += selection.count_sequences(ranges)
        for first, last in ranges:
            self._mark_done(first, last)

    def _mark_done(self, first: int, last: int) -> None:
        """Remove first..last-1 from all sets."""
        self.window.ack_range(first, last)
        self.pending_dead_letters.remove(first, last)
        for waiting in (self._unsent_sequences, self._resend_sequences):
            waiting.remove(first, last)

    def _count_undelivered(self, reason: Reason, count: int) -> None:
        if count:
            self.undelivered_counts[reason] += count


def _first_sendable(selected: MessageSelection, last: int) -> int:
    """Return the first message to be sent now or later, or `last`."""
    return min([first for first, _ in selected.sendable + selected.delayed], default=last)
