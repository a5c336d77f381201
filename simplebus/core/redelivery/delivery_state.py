"""Delivery state of one position, for inquiries.

The functions inspect a bounded number of messages and spans, so their counts are approximate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import NamedTuple

from simplebus.core.limits import INQUIRY_MESSAGES_MAX, INQUIRY_SPANS_MAX
from simplebus.core.redelivery.ack_window import AckWindow
from simplebus.core.redelivery.sequence_set import SequenceSet
from simplebus.core.redelivery.timer_wheel import Span

ScheduledSets = Sequence[tuple[int, int, SequenceSet]]
"""Tuples (due tick, attempts, messages), as returned by `TimerWheel.scheduled_sets`."""

_BACKOFF_STEPS_MAX = 32
"""The backoff delay is constant after this many attempts."""


class DeliveryState(NamedTuple):
    """Messages behind the cursor of one position, by state."""

    in_flight_count: int
    ack_timer_sets: ScheduledSets
    """Messages in flight; may include acknowledged ones."""
    nack_timer_sets: ScheduledSets
    """Messages that are redelivered at a tick."""
    delayed_spans: Sequence[tuple[float, int, Span]]
    """Heap of messages that are delayed until a time."""
    redelivery_queue: Iterable[Span]
    """Messages to be handled now: sent again, sent for the first time (attempts 0), or given up."""
    waiting_sequences: Sequence[SequenceSet]
    """All messages that wait to be sent, as far as the position keeps them; else empty. May include
    acknowledged ones."""
    blocked_by_key_count: int = 0
    """Messages that wait for an earlier message of their key."""
    pending_dead_letter_count: int = 0
    """Messages that wait for space in the class of dead letters."""


class OldestInFlight(NamedTuple):
    """The message in flight that was sent first."""

    sequence: int
    attempts: int
    last_sent_tick: int
    """Tick of its last delivery or of the consumer's last Working frame."""
    first_sent_tick: int
    """Approximate tick of its first delivery."""
    due_tick: int
    """Tick of its redelivery."""


def find_oldest_in_flight(
    sets: ScheduledSets, window: AckWindow, delay_ticks: Callable[[int], int]
) -> OldestInFlight | None:
    """Return the unacknowledged message of these sets that was sent first.

    Args:
        sets: Messages in flight.
        window: Ack window of the position.
        delay_ticks: Returns the ticks between a delivery and the next one, by attempts.

    Returns:
        The message; None if no message is in flight or none is found within the inspection limit.
    """
    remaining = INQUIRY_MESSAGES_MAX
    by_sent_tick = sorted(
        (due - delay_ticks(max(attempts, 1)), due, attempts, sequences)
        for due, attempts, sequences in sets
        if sequences
    )
    for sent, due, attempts, sequences in by_sent_tick:
        for first, last in islice(
            sequences.ranges_within(window.floor, window.cursor), INQUIRY_SPANS_MAX
        ):
            last = min(last, first + remaining)
            oldest = window.find_first_unacked(first, last)
            if oldest is not None:
                before = _ticks_since_first_delivery(max(attempts, 1), delay_ticks)
                return OldestInFlight(oldest, attempts, sent, sent - before, due)
            remaining -= last - first
            if remaining <= 0:
                return None
    return None


def _ticks_since_first_delivery(attempts: int, delay_ticks: Callable[[int], int]) -> int:
    """Return the ticks between the first delivery and the last one."""
    steps = min(attempts, _BACKOFF_STEPS_MAX)
    return sum(delay_ticks(n) for n in range(1, steps)) + (attempts - steps) * delay_ticks(steps)


def count_delayed(state: DeliveryState, window: AckWindow) -> int:
    """Return the approximate number of delayed messages."""
    spans: list[Span] = [span for _, _, span in islice(state.delayed_spans, INQUIRY_SPANS_MAX)]
    for _, attempts, sequences in state.nack_timer_sets[:INQUIRY_SPANS_MAX]:
        spans += [Span(a, b, attempts) for a, b in islice(sequences, INQUIRY_SPANS_MAX)]
    return count_unacked(spans, state, window)


def count_redeliveries(state: DeliveryState, window: AckWindow) -> int:
    """Return the approximate number of messages to be sent again now."""
    return count_unacked(islice(state.redelivery_queue, INQUIRY_SPANS_MAX), state, window)


def count_unacked(spans: Iterable[Span], state: DeliveryState, window: AckWindow) -> int:
    """Return the approximate number of messages of these spans that are not acknowledged."""
    total = 0
    for span in spans:
        first, last = max(span.first, window.floor), min(span.last, window.cursor)
        if first >= last:
            continue
        if state.waiting_sequences:
            for sequences in state.waiting_sequences:
                waiting = sequences.ranges_within(first, last)
                total += sum(window.count_unacked(a, b) for a, b in waiting)
        else:
            total += window.count_unacked(first, min(last, first + INQUIRY_MESSAGES_MAX))
    return total
