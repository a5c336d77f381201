"""What one subscription is sent, when, and what it is not.

Rule 1: messages that are not for it count as acknowledged when its cursor passes them. Only where
some may not be for it are messages looked at one by one, and copied; else they leave as they lie.
Rule 2: one turn looks at so many messages and no more, whether any of them is for it or not.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import islice

from simplebus.core.errors import Reason
from simplebus.core.limits import (
    BURIED_AT_ONCE,
    DEAD_LETTERS_MAX,
    EXPIRED_FIRST,
    LOOK_AHEAD_MESSAGES,
    LOOKED_FOR_ONE,
    LOOKED_FOR_SPANS,
    LOOKED_MESSAGES_MAX,
    PLAIN_FRAMES_MAX,
    REDELIVERY_BYTES,
    REDELIVERY_MESSAGES,
    REDELIVERY_PIECES,
    REDELIVERY_PLAIN_BYTES,
    REDELIVERY_PLAIN_MESSAGES,
    SEND_BYTES,
)
from simplebus.core.redelivery.ack_timer import Span
from simplebus.core.redelivery.delivery_policy import Pieces
from simplebus.core.subscription import selection
from simplebus.core.subscription.backlog import BacklogCounter
from simplebus.core.subscription.position import Position
from simplebus.core.subscription.selection import MessageSelection, Ranges


class BrokerSubscription(Position):
    """One position in one class, and what is sent from it. A feed: see `Outbox`."""

    scan_limit = LOOKED_MESSAGES_MAX
    """About how many messages are looked at in one turn, if none of them is for it."""

    # Sending -------------------------------------------------------------------------------------

    def copy_frames(self, tick: int) -> bytes:
        self.scanned_count = 0
        data = self._copy_redeliveries(tick) if self._redelivery_queue else b""
        while not data and not self._redelivery_queue and self.has_to_inspect and self.has_work:
            if self.scanned_count >= self.scan_limit or self._extend_zero_copy():
                break
            data = self._copy_new(tick)
        return data

    def _extend_zero_copy(self) -> bool:
        """Whether the next messages are all for this subscription, so that they may leave as they
        lie; few of them only when there are no more."""
        first, head = self.window.cursor, self.ring.head
        if self.channel_filter is None or first < self.ring.timed_until:
            return False
        if first < self.ring.envelopes_until and not self.delivery_policy.takes_envelopes:
            return False
        last = min(head, first + LOOK_AHEAD_MESSAGES)
        until = selection.matching_run_end(self.ring, first, last, self.channel_filter)
        if until < last and until - first < PLAIN_FRAMES_MAX:
            return False
        self._zero_copy_end = until
        return True

    def _copy_redeliveries(self, tick: int) -> bytes:
        pieces = Pieces(
            REDELIVERY_PLAIN_BYTES if self._is_next_redelivery_plain() else REDELIVERY_BYTES
        )
        while not pieces.count and (room := self._in_flight_room()):
            found = self._select_redeliveries(room)
            if found is None:
                break
            span, last, picked = found
            first, attempts = picked.sendable[0][0], span.attempts
            self.attempt = span.next_attempt
            last = self._copy_ranges(picked.sendable, last, pieces, tick)
            self._consume_redeliveries(span, last, picked)
            if pieces.count:
                # One span for all: what is acknowledged within it is left out when due.
                later = selection.ranges_before(picked.delayed, last)
                self._start_ack_timeout_except(later, first, last, max(attempts + 1, 1), tick)
                if attempts > 0:
                    self.redelivered += pieces.count
                else:
                    self.delivered += pieces.count
        return b"".join(pieces.parts)

    def _select_redeliveries(self, max_count: int) -> tuple[Span, int, MessageSelection] | None:
        """The front of what is to be sent again: its span, where it ends, and what is to become of
        its messages, up to `most` of which are to be sent, one at least. `_settle` is to follow.
        None when nothing is left that is to be sent, or so much was looked at in vain that the rest
        is for another turn.
        """
        while self._redelivery_queue and self.scanned_count < self.scan_limit:
            span = self._redelivery_queue[0]
            first = max(span.first, self.window.floor)
            if first >= self.ring.head:
                self._spilled_redeliveries.append(self._redelivery_queue.popleft())
                continue
            is_plain = self._is_next_redelivery_plain()
            many = REDELIVERY_PLAIN_MESSAGES if is_plain else REDELIVERY_MESSAGES
            last = min(span.last, first + many, self.ring.head)
            ranges = self._unsettled_ranges(first, last)
            if len(ranges) > REDELIVERY_PIECES:
                last = ranges[REDELIVERY_PIECES][0]
                del ranges[REDELIVERY_PIECES:]
            self.scanned_count += max(0, last - first)
            most_sent = self.delivery_policy.deliveries_max
            if span.given_up or (most_sent and span.attempts >= most_sent):
                reason = span.given_up or Reason.MAX_DELIVERIES
                last = self._give_up_leading(ranges, last, span.attempts, reason)
                ranges = []
            else:
                ranges = selection.limit_ranges(ranges, max_count)
                if selection.count_sequences(ranges) == max_count:
                    last = ranges[-1][1]
            picked = selection.select_from_ranges(
                self.ring, ranges, self.channel_filter, self._clock.now
            )
            if picked.sendable:
                return span, last, picked
            self._consume_redeliveries(span, last, picked)
        return None

    def _is_next_redelivery_plain(self) -> bool:
        """Whether nothing is special about what waits to be sent again, and all is wanted."""
        return (
            self.channel_filter is None
            and self._redelivery_queue[0].first >= self.ring.special_until
        )

    def _consume_redeliveries(
        self, span: Span, end_sequence: int, selection: MessageSelection
    ) -> None:
        """The front of what is to be sent again, up to `last`, is dealt with; or sent, if it is."""
        for waiting in (self._unsent_sequences, self._resend_sequences):
            waiting.remove(span.first, end_sequence)
        span.first = end_sequence
        if span.first >= span.last:
            self._redelivery_queue.popleft()
        self._skip_unsendable(selection, end_sequence, attempts=span.attempts)

    def _copy_new(self, tick: int) -> bytes:
        """New messages that are for this subscription, out of the next ones."""
        pieces = Pieces(REDELIVERY_BYTES)
        first = self.window.cursor
        self.attempt = 1
        picked, last = self._select_new(REDELIVERY_MESSAGES, self._in_flight_room())
        last = self._copy_ranges(picked.sendable, last, pieces, tick)
        self._advance_cursor(last)
        later = selection.ranges_before(picked.delayed, last)
        self.delivered += pieces.count
        self._skip_unsendable(picked, last, attempts=0)
        if pieces.count:
            self._start_ack_timeout_except(later, first, last, 1, tick)
        return b"".join(pieces.parts)

    def _select_new(self, scan_count: int, max_count: int) -> tuple[MessageSelection, int]:
        """What is to become of the next new messages, up to so many, up to `most` of which are to
        be sent; and where they end."""
        first = self.window.cursor
        last = min(self.ring.head, first + scan_count)
        picked = selection.select_messages(
            self.ring, first, last, self.channel_filter, self._clock.now
        )
        send = selection.limit_ranges(picked.sendable, max_count)
        if send != picked.sendable:
            picked, last = replace(picked, sendable=send), send[-1][1]
        self.scanned_count += last - first
        return picked, last

    def _skip_unsendable(
        self, picked: MessageSelection, end_sequence: int, *, attempts: int
    ) -> None:
        """Of messages before `last`: pass over those that are not for it, or came too late, and put
        off those that open later, which were sent so often."""
        others = selection.ranges_before(picked.skipped, end_sequence)
        self._mark_skipped(others)
        if others:
            self._on_floor_moved()
        self._count_undelivered(
            Reason.EXPIRED,
            selection.count_sequences(selection.ranges_before(picked.expired, end_sequence)),
        )
        for begin, end in selection.ranges_before(picked.delayed, end_sequence):
            self._mark_waiting(Span(begin, end, attempts))
            for due, a, b in selection.opening_times(self.ring, begin, end):
                self.scanned_count += LOOKED_FOR_ONE
                self._delay_span(due, Span(a, b, attempts))

    def _copy_ranges(self, ranges: Ranges, end_sequence: int, pieces: Pieces, tick: int) -> int:
        """Copy frames, as far as pieces have space. Returns `last`, or where it stopped."""
        if not ranges:
            return end_sequence
        self.ring.stamp(ranges[0][0], ranges[-1][1], tick % self._timer_index_modulus)
        plain_only = not self.delivery_policy.takes_envelopes
        for begin, end in ranges:
            while begin < end:
                if pieces.space <= 0:
                    return begin
                piece, after = self.ring.piece(begin, end, pieces.space)
                if plain_only and begin < self.ring.envelopes_until:
                    self.scanned_count += LOOKED_FOR_ONE * (after - begin)
                    plain, uncarriable = selection.strip_envelopes(self.ring, begin, after)
                    self._give_up_ranges([(s, s + 1) for s in uncarriable], Reason.UNCARRIABLE, 0)
                    pieces.add(plain, after - begin - len(uncarriable))
                    if uncarriable:
                        return after
                else:
                    pieces.add(piece, after - begin)
                begin = after
        return end_sequence

    def peek_frames(self, tick: int) -> memoryview:
        first = self.window.cursor
        last = self.ring.head
        if self.delivery_policy.in_flight_max is not None:
            last = min(last, first + self._in_flight_room())
        if self.is_filtered:
            last = min(last, self._zero_copy_end)
        if first >= last or (self.has_frames_to_copy and self.has_to_inspect):
            return memoryview(b"")
        piece, last = self.ring.piece(first, last, SEND_BYTES)
        self.ring.stamp(first, last, tick % self._timer_index_modulus)
        self._peeked_end = last
        self.attempt = 1
        return piece

    def mark_sent(self, piece: memoryview, sent_bytes: int, tick: int) -> bytes:
        first, last = self.window.cursor, self._peeked_end
        rest = b""
        if sent_bytes < len(piece):
            last, missing = self.ring.cut(first, last, sent_bytes)
            if missing:
                rest = bytes(piece[sent_bytes : sent_bytes + missing])
                last += 1
        if first < last:
            self._advance_cursor(last)
            self.delivered += last - first
            self._start_ack_timeout(first, last, 1, tick)
        return rest

    def _advance_cursor(self, cursor: int) -> None:
        """The cursor moves on."""
        if self._backlog_counter is not None:
            self._backlog_counter.advance_cursor(cursor)
        self._passed_count += cursor - self.window.cursor
        self.window.cursor = cursor

    def _start_ack_timeout(self, first: int, last: int, attempts: int, tick: int) -> None:
        """Look at first..last-1 again when their acknowledgement is overdue."""
        self._ack_timer.put(tick + self.delivery_policy.pause(attempts), first, last, attempts)

    def _start_ack_timeout_except(
        self, excluded: Ranges, first: int, last: int, attempts: int, tick: int
    ) -> None:
        """The same, but for some ranges."""
        for begin, end in excluded:
            if first < begin:
                self._start_ack_timeout(first, begin, attempts, tick)
            first = max(first, end)
        if first < last:
            self._start_ack_timeout(first, last, attempts, tick)

    # Giving up -----------------------------------------------------------------------------------

    def skip_to(self, floor: int) -> None:
        """The class's policy took away everything below floor."""
        wanted = None if self.is_reading_spilled else self.channel_filter
        if self.is_reading_spilled:
            self._backlog_counter = None
        unsent = selection.count_matching(self.ring, self.window.cursor, floor, wanted)
        self.dropped += self._skip_below(floor) + unsent

    def drop_all(self, reason: Reason) -> None:
        """Nobody is to be sent anything of what it has kept so far."""
        before = self.dropped
        self.skip_to(self.class_ring.head)
        self._count_undelivered(reason, self.dropped - before)

    def purge(self, first: int, last: int) -> None:
        """Nobody is to have the stored messages first..last-1: have nothing to do with them."""
        window = self.window
        first, cursor, before = max(first, window.floor), window.cursor, window.in_flight
        if first < min(last, cursor):
            self._mark_done(first, min(last, cursor))
            lost = before - window.in_flight
            self._skipped_count += lost
            self.dropped += lost
        if cursor < last:
            wanted = (
                None if self.is_reading_spilled else self.channel_filter
            )  # It is looked at when it is read.
            kept = selection.matching_ranges(self.ring, cursor, first, wanted)
            self.dropped += selection.count_matching(self.ring, max(first, cursor), last, wanted)
            self._advance_past(kept, last)

    def _advance_past(self, kept_ranges: Ranges, end: int) -> None:
        """Have the cursor pass what comes before `end`. These of it are still to be sent, as if put
        off until now; the others are not."""
        at = self.window.cursor
        self._advance_cursor(end)
        self._skipped_count += end - at - selection.count_sequences(kept_ranges)
        for begin, last in kept_ranges:
            if at < begin:
                self.window.ack_range(at, begin)
            self._redelivery_queue.append(Span(begin, last, 0))
            self._mark_waiting(self._redelivery_queue[-1])
            at = last
        self.window.ack_range(at, end)

    def requeue_with_attempts(self, first: int, attempts: int) -> None:
        """What lies in the ring from `first` on was sent so often, by somebody else."""
        at, head = self.window.cursor, self.ring.head
        self._advance_cursor(head)
        for begin, last, count in ((at, first, 0), (max(at, first), head, attempts)):
            if begin < last:
                self._redelivery_queue.append(Span(begin, last, count))
                self._mark_waiting(self._redelivery_queue[-1])

    def _skip_below(self, floor: int) -> int:
        """Have nothing to do with what is below floor. Returns how many of them were in flight, or
        waited behind the cursor."""
        unsent = max(0, floor - self.window.cursor)
        if unsent:
            self._advance_cursor(floor)
        lost = self.window.skip_to(floor)
        self._skipped_count += lost
        for waiting in (self._unsent_sequences, self._resend_sequences, self.pending_dead_letters):
            waiting.remove(0, floor)
        if self._redelivery_queue:
            self.outbox.wake(self)
        return lost - unsent

    def count_pending(self) -> int:
        """Messages stored for it and not acknowledged, as far as they are counted."""
        return self.window.in_flight + (
            self._backlog_counter.count if self._backlog_counter is not None else 0
        )

    def count_backlog(self, backlog_max: int) -> None:
        """Count what is new and, of what has piled up, a part; `looked` says how much of that."""
        self.scanned_count = 0
        most = self.delivery_policy.pending_max
        if most is not None and self.ring.head - self.window.floor > most:
            if self._backlog_counter is None:
                self._backlog_counter = BacklogCounter(self.ring, self.window, self.channel_filter)
            self.scanned_count = self._backlog_counter.count_more(backlog_max)

    def count_excess(self) -> int:
        """How many more are pending than its own terms allow."""
        most = self.delivery_policy.pending_max
        if most is None or self.ring.head - self.window.floor <= most:
            return 0
        return max(0, self.count_pending() - most)

    def is_over_pending_limit(self) -> bool:
        """Whether that are any when what came too late is left out. Where that is in doubt it is
        looked at once a tick."""
        excess, tick = self.count_excess(), self._clock.tick
        if not excess or self.window.floor >= self.ring.timed_until:
            return excess > 0
        if tick == self._slow_check_tick:
            return False
        self._slow_check_tick = tick
        first, cursor = self.window.floor, self.window.cursor
        last = min(self.ring.timed_until, first + LOOKED_MESSAGES_MAX)
        ranges = self.window.unacked(first, last) + [(max(first, cursor), last)] * (cursor < last)
        picked = selection.select_from_ranges(
            self.ring, ranges, self.channel_filter, self._clock.now
        )
        return excess > selection.count_sequences(picked.expired)

    def enforce_pending_limit(self) -> int:
        """Obey the own policy about what waits. Returns how many messages were dropped."""
        excess, dropped = self.count_excess(), 0
        if excess and self._backlog_counter is not None:
            if self.delivery_policy.slow == "drop_oldest":
                dropped = self._drop_oldest(excess, self._backlog_counter)
            elif self.delivery_policy.slow == "drop_newest":
                dropped = self._drop_newest(excess, self._backlog_counter)
        self.dropped += dropped
        self._count_undelivered(Reason.SLOW_CONSUMER, dropped)
        return dropped

    def _drop_oldest(self, count: int, backlog_counter: BacklogCounter) -> int:
        """Leave out the oldest that were never sent: what is in flight is the consumer's."""
        first = self.window.cursor
        last = min(backlog_counter.counted_end, first + backlog_counter.last_scan_max)
        self.scanned_count += min(backlog_counter.last_backlog_max, last - first)
        number, last = selection.find_first_matching(
            self.ring, first, last, self.channel_filter, count
        )
        self._advance_cursor(last)
        self.window.ack_range(first, last)
        self._skipped_count += last - first
        self._on_floor_moved()
        return number

    def _drop_newest(self, count: int, backlog_counter: BacklogCounter) -> int:
        """Leave out the newest, as far as they were not sent."""
        first, head = self.window.cursor, backlog_counter.counted_end
        if head - first > backlog_counter.last_scan_max:
            if not backlog_counter.last_backlog_max:
                return 0  # Others have had so much that it is for another turn.
            self.scanned_count += head - first
        new = selection.matching_ranges(self.ring, first, head, self.channel_filter)
        kept = selection.limit_ranges(new, selection.count_sequences(new) - count)
        self._advance_past(kept, head)
        self._on_floor_moved()
        return selection.count_sequences(new) - selection.count_sequences(kept)

    def skip_compacted(self, first: int, head: int) -> bool:
        """It has had messages first..head-1, the newest ones, under other sequences, and is not to
        be sent them again. Returns whether it is not: so much may wait for it that they are only
        some more."""
        cursor = self.window.cursor
        if first - cursor > LOOKED_MESSAGES_MAX:
            return False
        self._advance_past(
            selection.matching_ranges(self.ring, cursor, first, self.channel_filter), head
        )
        return True

    def skip_unavailable(self, first: int, last: int, reason: Reason) -> None:
        """Messages first..last-1 cannot be had: it is not sent them, now or ever. What is before
        them, and was not sent, still is."""
        cursor = self.window.cursor
        ranges = self.window.unacked(first, last)
        self._mark_skipped(ranges)
        lost = selection.count_sequences(ranges)
        if cursor < last:
            self._advance_past([(cursor, first)] * (cursor < first), last)
            lost += last - max(cursor, first)
        self._count_undelivered(reason, lost)
        self._on_floor_moved()

    def drop_expired(self, scan_max: int) -> bool:
        """Drop those in front that come too late, up to `most`, but for what is in flight. Returns
        whether the floor has moved; `looked` says at how many messages it looked."""
        before, self.scanned_count = self.window.floor, 0
        if self.has_consumer and self._redelivery_queue:
            self._select_redeliveries(1)  # It settles what is not to be sent.
        leave_late = (
            self._drop_expired_unsent if self.has_consumer else self._drop_expired_unattended
        )
        many = EXPIRED_FIRST
        while self.scanned_count < scan_max and leave_late(
            min(many, scan_max - self.scanned_count)
        ):
            many = min(4 * many, REDELIVERY_MESSAGES)
        return self.window.floor > before

    def _drop_expired_unattended(self, scan_count: int) -> bool:
        """The same where nobody is there to have anything in flight. Returns whether all of so many
        are dropped."""
        window, ring = self.window, self.ring
        first, cursor = window.floor, window.cursor
        last = min(ring.timed_until, first + scan_count)
        ranges = window.unacked(first, last) + ([(max(first, cursor), last)] * (cursor < last))
        picked = selection.select_from_ranges(ring, ranges, self.channel_filter, self._clock.now)
        floor = _first_sendable(picked, last)
        if self.pending_dead_letters:
            floor = min(floor, self.pending_dead_letters.first_sequence)
        self.scanned_count += max(0, last - first)
        if floor <= first:
            return False
        self._count_undelivered(
            Reason.EXPIRED,
            selection.count_sequences(selection.ranges_before(picked.expired, floor)),
        )
        self._skip_below(floor)
        return floor == last

    def _drop_expired_unsent(self, scan_count: int) -> bool:
        """The same from the cursor on, whether there is room for more in flight or not."""
        first = self.window.cursor
        last = min(self.ring.timed_until, first + scan_count)
        if first >= last:
            return False
        picked = selection.select_messages(
            self.ring, first, last, self.channel_filter, self._clock.now
        )
        self.scanned_count += last - first
        end = _first_sendable(picked, last)
        self._advance_cursor(end)
        self._skip_unsendable(picked, end, attempts=0)
        return end == last

    def terminate(self, first: int, last: int, *, attempt: int = 0, error: str = "") -> None:
        """The consumer can never process first..last-1, and says why: give up what of them is in
        flight, with this attempt if it is not 0, or waits to be sent again."""
        spans = self._ack_timer.cut(first, last, attempt)
        if self.has_consumer:
            for a, b in self._find_waiting_redeliveries(first, last, attempt):
                self._resend_sequences.remove(a, b)
                spans.append(Span(a, b, attempt or self._find_attempts(a)))
        else:
            spans += [
                Span(max(first, span.first), min(last, span.last), span.attempts)
                for span in self._iter_spans()
                if span.first < last and first < span.last and not self._is_unsent(span)
            ]
        self._terminate_spans(spans, error)

    def _find_attempts(self, sequence: int) -> int:
        """How often a message that waits was sent, if that is soon found; else once."""
        for span in islice(self._iter_spans(), LOOKED_FOR_SPANS):
            if span.first <= sequence < span.last:
                return span.attempts
        return 1

    def _terminate_spans(self, spans: list[Span], error: str) -> None:
        """Give these up: some now, further ones in turns."""
        left = DEAD_LETTERS_MAX
        for span in spans:
            self._failure_reasons.note(self, span.first, span.last, error)
            if left > 0:
                ranges = self._unsettled_ranges(span.first, span.last)
                left -= selection.count_sequences(ranges)
                span.first = self._give_up_leading(
                    ranges, span.last, span.attempts, Reason.TERMINATED
                )
            if span.first < span.last:
                rest = Span(span.first, span.last, span.attempts, Reason.TERMINATED)
                self._mark_waiting(rest)
                self._redelivery_queue.append(rest)
                self.outbox.wake(self)

    def _give_up_leading(
        self, ranges: Ranges, end_sequence: int, attempts: int, reason: Reason
    ) -> int:
        """Give up what lies in front of these, before `last`, which was sent so often: so much that
        nobody else waits for long. Returns where it ends."""
        some = selection.limit_ranges(ranges, DEAD_LETTERS_MAX)
        if some:
            first, end = some[0][0], some[-1][1]
            end = self.ring.piece(first, end, REDELIVERY_BYTES)[1]
            some = selection.ranges_before(some, end)
            end_sequence = (
                end
                if selection.count_sequences(some) < selection.count_sequences(ranges)
                else end_sequence
            )
        self._give_up_ranges(some, reason, attempts)
        return end_sequence

    def _give_up_ranges(self, ranges: Ranges, reason: Reason, attempts: int) -> None:
        """These are not sent, or not again. The rest of this turn is others'."""
        if not ranges:
            return
        self.scanned_count += self.scan_limit
        self._count_undelivered(reason, selection.count_sequences(ranges))
        self._advance_cursor(max(self.window.cursor, ranges[-1][1]))
        # Behind what waits for room, everything does.
        until = (
            ranges[0][0]
            if self.pending_dead_letters
            else self._dead_letter(ranges, reason, attempts)
        )
        if until is not None:
            left = selection.ranges_from(ranges, until)
            self._remove_from_waiting(left)
            self.pending_dead_letters.add(left, reason, attempts)
            ranges = selection.ranges_before(ranges, until)
        self._mark_skipped(ranges)
        self._on_floor_moved()

    def _remove_from_waiting(self, ranges: Ranges) -> None:
        """These wait for nothing but a dead letter's place."""
        for first, last in ranges:
            for waiting in (self._unsent_sequences, self._resend_sequences):
                waiting.remove(first, last)

    def restore_pending_dead_letters(self, rows: Iterable[tuple[int, int, int, str]]) -> None:
        """These were given up before a restart, and found no room; as many of them as are not
        acknowledged: see `Unburied.rows`."""
        for first, last, attempts, reason in rows:
            ranges = self._unsettled_ranges(first, last)
            self._remove_from_waiting(ranges)
            self.pending_dead_letters.add(ranges, Reason(reason), attempts)

    def retry_dead_letters(self) -> bool:
        """Some of what is given up, the oldest of it: there may be room for it now. Returns whether
        all that could be tried found room."""
        ring = self.ring
        for _ in range(BURIED_AT_ONCE):
            found = self.pending_dead_letters.next_batch(ring.floor, ring.head)
            if found is None:
                return True
            ranges, reason, attempts = found
            ranges = selection.limit_ranges(ranges, DEAD_LETTERS_MAX)
            end = ring.piece(ranges[0][0], ranges[-1][1], REDELIVERY_BYTES)[1]
            ranges = selection.ranges_before(ranges, end)
            until = self._dead_letter(ranges, reason, attempts)
            self._mark_skipped(ranges if until is None else selection.ranges_before(ranges, until))
            self._on_floor_moved()
            if until is not None:
                return False
        return True

    def _mark_skipped(self, ranges: Ranges) -> None:
        """The cursor has passed these, and nobody will acknowledge them."""
        self._skipped_count += selection.count_sequences(ranges)
        for first, last in ranges:
            self._mark_done(first, last)

    def _mark_done(self, first: int, last: int) -> None:
        """Nothing is left to be done about first..last-1."""
        self.window.ack_range(first, last)
        self.pending_dead_letters.remove(first, last)
        for waiting in (self._unsent_sequences, self._resend_sequences):
            waiting.remove(first, last)

    def _count_undelivered(self, reason: Reason, count: int) -> None:
        if count:
            self.undelivered[reason] += count


def _first_sendable(picked: MessageSelection, last: int) -> int:
    """The first message that is still to be sent, now or later, or `last`."""
    return min([first for first, _ in picked.sendable + picked.delayed], default=last)
