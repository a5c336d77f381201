"""Restore: publisher numbers, ack windows and delivery counts."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from simplebus.core.limits import MESSAGE_ID_MASK
from simplebus.core.redelivery.ack_window import AckWindow
from simplebus.core.redelivery.timer_wheel import check_covered_once, spans_by_attempts
from simplebus.core.restore import StoredNumbers, find_next_number
from simplebus.core.snapshot import WindowSnapshot

RANGES = st.lists(st.tuples(st.integers(0, 60), st.integers(1, 12)), max_size=12)


@given(RANGES, st.sampled_from([0, 1000, MESSAGE_ID_MASK - 20]))
def test_publisher_continues_at_the_first_number_that_is_not_stored(
    ranges: list[tuple[int, int]], next_number: int
) -> None:
    stored = StoredNumbers()
    stored_offsets = set()
    for offset, count in ranges:
        stored.add_range((next_number + offset - 10) & MESSAGE_ID_MASK, count)
        stored_offsets |= set(range(offset - 10, offset - 10 + count))
    number, ahead = find_next_number(next_number, stored)
    first_missing = next(n for n in range(200) if n not in stored_offsets)
    assert number == (next_number + first_missing) & MESSAGE_ID_MASK
    offsets = np.arange(first_missing, 100)
    is_stored = ahead.contains((next_number + offsets) & MESSAGE_ID_MASK) if ahead else offsets < 0
    assert offsets[is_stored].tolist() == [n for n in offsets.tolist() if n in stored_offsets]


def test_numbers_are_stored_as_ranges() -> None:
    stored = StoredNumbers()
    stored.add_array(np.array([5, 6, 7, 9, 2, 3]))
    assert np.concatenate(stored.firsts).tolist() == [5, 9, 2]
    assert np.concatenate(stored.counts).tolist() == [3, 1, 2]


@given(st.integers(0, 1 << 40), st.sets(st.integers(0, 40)), st.integers(0, 45), st.integers(0, 45))
def test_window_is_limited_to_recovered_messages(
    floor: int, acked: set[int], lower: int, head: int
) -> None:
    window = AckWindow(floor=floor)
    window.cursor = floor + 41
    for offset in acked:
        window.ack_range(floor + offset, floor + offset + 1)
    before = window.unacked_ranges(floor, window.cursor)
    snapshot = WindowSnapshot.from_window(window)
    whole = snapshot.to_window(floor=0, head=floor + 41)
    whole.check()
    assert (whole.floor, whole.cursor) == (window.floor, window.cursor)
    assert whole.unacked_ranges(floor, window.cursor) == before
    lower = min(lower, head)
    part = snapshot.to_window(floor=floor + lower, head=floor + head)
    part.check()
    unacked = {n for a, b in before for n in range(a, b)}
    assert {n for a, b in part.unacked_ranges(0, 1 << 50) for n in range(a, b)} == {
        n for n in unacked if floor + lower <= n < floor + head
    }


@given(
    st.integers(0, 30),
    st.lists(st.tuples(st.integers(0, 40), st.integers(1, 9), st.integers(-1, 5)), max_size=5),
)
def test_each_message_in_flight_is_in_one_span(
    size: int, attempts: list[tuple[int, int, int]]
) -> None:
    window = AckWindow(floor=5)
    window.cursor = 5 + size
    rows = [(first, first + count, n) for first, count, n in attempts]
    spans = spans_by_attempts(window.floor, window.cursor, rows, default=1)
    check_covered_once(spans, [(5, 5 + size)] if size else [])
    assert all(5 <= span.first < span.last <= 5 + size for span in spans)
    if len(attempts) == 1:
        first, count, times = attempts[0]
        for span in spans:
            assert span.attempts == (times if first <= span.first < first + count else 1)


def test_attempts_of_lost_messages_are_ignored() -> None:
    """Later messages get the sequences of the lost ones."""
    assert spans_by_attempts(0, 0, [(8, 9, 0), (23, 24, 2)], default=1) == []
