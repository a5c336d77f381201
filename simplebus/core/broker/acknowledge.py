"""Handles acks, nacks, working and terminate.

They apply only to messages that were sent. Others are counted by reason and have no effect.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import numpy as np

from simplebus.core.errors import Reason
from simplebus.core.group.group import GroupMember
from simplebus.core.limits import (
    LONG_NACK_MESSAGES,
    PLAIN_FRAMES_MAX,
    REDELIVERY_MESSAGES,
    TERMINATED_PER_TURN,
)
from simplebus.core.protocol.events import (
    AckedRanges,
    NackReceived,
    TerminateReceived,
    WorkingReceived,
)
from simplebus.core.redelivery.ack_window import AckWindow, nearest_sequence
from simplebus.core.session.session import Session
from simplebus.core.store.store import Store
from simplebus.core.subscription.subscription import BrokerSubscription


class AckHandler:
    """Applies acknowledgements to positions and groups."""

    def __init__(self, store: Store, refusal_counts: Counter[Reason]) -> None:
        self._store = store
        self._refusal_counts = refusal_counts
        """Counts acknowledgements without effect."""

    def ack_ranges(self, session: Session, event: AckedRanges) -> None:
        """Acknowledge many ranges of message ids."""
        subscription = session.subscriptions.get(event.subscription_number)
        if isinstance(subscription, GroupMember):
            session.record_acked(int((event.lasts - event.firsts).sum()))
            self._ack_member_ranges(subscription, event)
            return
        if event.firsts.size <= PLAIN_FRAMES_MAX:
            for first, last in zip(event.firsts.tolist(), event.lasts.tolist(), strict=True):
                self.ack_range(session, event.subscription_number, first, last)
            return
        if subscription is None:
            self._refusal_counts[Reason.ACK_UNSUBSCRIBED] += event.firsts.size
            return
        session.record_acked(int((event.lasts - event.firsts).sum()))
        position, window = subscription.position, subscription.window
        firsts, lasts = window.ids_to_sequences(event.firsts, event.lasts)
        unsent = int(np.count_nonzero(lasts > window.cursor))
        if unsent:
            self._refusal_counts[Reason.ACK_UNSENT] += unsent
            lasts = lasts.clip(max=window.cursor)
            firsts = firsts.clip(max=window.cursor)
        self._store.position_changes.record_progress(position)
        before = window.floor
        position.unacked.ack_ranges(firsts, lasts)
        if window.floor != before:
            self._store.trim_class(self._store.classes[subscription.class_id])
        if position.delivery_policy.in_flight_max is not None:
            subscription.resume_delivery()

    def ack_range(self, session: Session, key: int, first_id: int, last_id: int) -> None:
        """Acknowledge the message ids first_id..last_id-1."""
        session.record_acked(last_id - first_id)
        subscription = session.subscriptions.get(key)
        if subscription is None:
            self._refusal_counts[Reason.ACK_UNSUBSCRIBED] += 1
            return
        if isinstance(subscription, GroupMember):
            self._ack_member_range(subscription, first_id, last_id)
            return
        position, window = subscription.position, subscription.window
        before = window.floor
        first = nearest_sequence(first_id, before)
        last = first + last_id - first_id
        if last > window.cursor:
            self._refusal_counts[Reason.ACK_UNSENT] += 1
            last = window.cursor
        if first < last:
            self._store.position_changes.record_progress(position)
            if position.unacked.has_waiting:
                position.unacked.ack(first, last)
            else:
                window.ack_range(first, last)
            if window.floor != before:
                self._store.trim_class(self._store.classes[subscription.class_id])
        if position.delivery_policy.in_flight_max is not None:
            subscription.resume_delivery()

    def _ack_member_range(self, member: GroupMember, first_id: int, last_id: int) -> None:
        window = member.window
        first, last = self._to_sequences(window, first_id, last_id)
        before = window.floor
        self._store.position_changes.record_progress(member.position)
        if not member.ack_range(first, last):
            self._count_late_ack(window, first, last)
        if window.floor != before:
            self._store.trim_class(self._store.classes[member.class_id])
        member.resume_delivery()

    def _ack_member_ranges(self, member: GroupMember, event: AckedRanges) -> None:
        window, before = member.window, member.window.floor
        firsts, lasts = window.ids_to_sequences(event.firsts, event.lasts)
        unsent = int(np.count_nonzero(lasts > window.cursor))
        if unsent:
            self._refusal_counts[Reason.ACK_UNSENT] += unsent
        firsts, lasts = np.maximum(firsts, before), np.minimum(lasts, window.cursor)
        self._store.position_changes.record_progress(member.position)
        is_late = ~member.ack_ranges(firsts, lasts)
        is_late &= firsts < lasts
        if is_late.any():  # Their first and last messages are examined, as this is fast.
            is_open = window.are_unacked(firsts[is_late]) | window.are_unacked(lasts[is_late] - 1)
            self._refusal_counts[Reason.ACK_LATE] += int(np.count_nonzero(is_open))
        if window.floor != before:
            self._store.trim_class(self._store.classes[member.class_id])
        member.resume_delivery()

    def handle_nack_or_working(
        self, session: Session, event: NackReceived | WorkingReceived | TerminateReceived
    ) -> Iterator[None]:
        """Apply a Nack, Terminate or Working in parts, and append the dead letters that result."""
        number, attempt = event.subscription_number, event.attempt
        subscription = session.subscriptions.get(number)
        if subscription is None:
            self._refusal_counts[Reason.ACK_UNSUBSCRIBED] += 1
            return
        first, last = self._to_sequences(subscription.window, event.first, event.last)
        is_end = isinstance(event, TerminateReceived)
        if not subscription.has_in_flight(first, last, attempt, include_waiting=is_end):
            self._count_late_ack(subscription.window, first, last)
            return
        can_wait = session.can_split_reads
        for _ in self._apply_in_parts(subscription, event, first, last, can_wait=can_wait):
            yield
            if session.subscriptions.get(number) is not subscription:
                return
        subscription.resume_delivery()

    def _apply_in_parts(
        self,
        subscription: BrokerSubscription | GroupMember,
        event: NackReceived | WorkingReceived | TerminateReceived,
        first: int,
        last: int,
        *,
        can_wait: bool,
    ) -> Iterator[None]:
        """Apply a Nack, Terminate or Working to first..last-1, with a step between two parts.

        If these are more than LONG_NACK_MESSAGES messages, a part has about LONG_NACK_MESSAGES
        ranges in flight.

        Args:
            can_wait: True if the session waits for dead letters that precede its own.
        """
        tick, attempt, position = self._store.clock.tick, event.attempt, subscription.position
        while True:
            is_short = last - first <= LONG_NACK_MESSAGES
            end = last if is_short else subscription.find_part_end(first, last, attempt)
            match event:
                case NackReceived(delay=delay, error=error):
                    subscription.nack(first, end, delay, tick, attempt=attempt, error=error)
                case TerminateReceived(error=error):
                    end = min(end, first + TERMINATED_PER_TURN)
                    must_append = can_wait or not position.unacked.pending_dead_letters
                    subscription.terminate(first, end, attempt=attempt, error=error)
                    # A following Fetch must return the dead letters.
                    while must_append and self._store.append_dead_letters_of(position):
                        yield
                case WorkingReceived():
                    subscription.extend_ack_timeout(first, end, tick, attempt)
            first = end
            if first >= last:
                return
            yield

    def _count_late_ack(self, window: AckWindow, first: int, last: int) -> None:
        """Count an acknowledgement of unacked messages that are not in flight to its sender.

        They were redelivered before the acknowledgement arrived, perhaps to another member.
        """
        end = min(last, first + REDELIVERY_MESSAGES)
        if window.find_first_unacked(first, end) is not None:
            self._refusal_counts[Reason.ACK_LATE] += 1

    def _to_sequences(self, window: AckWindow, first_id: int, last_id: int) -> tuple[int, int]:
        """Return a range of message ids as sequences, limited to sent messages."""
        first = nearest_sequence(first_id, window.floor)
        last = first + last_id - first_id
        if last > window.cursor:
            self._refusal_counts[Reason.ACK_UNSENT] += 1
            last = window.cursor
        return max(first, window.floor), last
