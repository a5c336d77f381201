"""A broker as it was: each piece of it comes back as it was kept."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from simplebus.core.limits import MESSAGE_ID_MASK
from simplebus.core.redelivery.ack_timer import check_covered_once, spans_by_attempts
from simplebus.core.redelivery.ack_window import AckWindow
from simplebus.core.restore import StoredNumbers, find_next_number
from simplebus.core.snapshot import WindowSnapshot

RANGES = st.lists(st.tuples(st.integers(0, 60), st.integers(1, 12)), max_size=12)


@given(RANGES, st.sampled_from([0, 1000, MESSAGE_ID_MASK - 20]))
def test_a_publisher_goes_on_at_the_first_number_that_is_not_stored(
    ranges: list[tuple[int, int]], following: int
) -> None:
    stored = StoredNumbers()
    held = set()
    for offset, count in ranges:
        stored.add_range((following + offset - 10) & MESSAGE_ID_MASK, count)
        held |= set(range(offset - 10, offset - 10 + count))
    number, ahead = find_next_number(following, stored)
    gone = next(n for n in range(200) if n not in held)
    assert number == (following + gone) & MESSAGE_ID_MASK
    beyond = np.arange(gone, 100)
    known = ahead.holds((following + beyond) & MESSAGE_ID_MASK) if ahead else beyond < 0
    assert beyond[known].tolist() == [n for n in beyond.tolist() if n in held]


def test_numbers_are_added_in_rows() -> None:
    stored = StoredNumbers()
    stored.add_array(np.array([5, 6, 7, 9, 2, 3]))
    assert np.concatenate(stored.firsts).tolist() == [5, 9, 2]
    assert np.concatenate(stored.counts).tolist() == [3, 1, 2]


@given(st.integers(0, 1 << 40), st.sets(st.integers(0, 40)), st.integers(0, 45), st.integers(0, 45))
def test_a_window_comes_back_as_far_as_its_messages_do(
    floor: int, acked: set[int], lower: int, head: int
) -> None:
    window = AckWindow(floor=floor)
    window.cursor = floor + 41
    for one in acked:
        window.ack_range(floor + one, floor + one + 1)
    before = window.unacked_ranges(floor, window.cursor)
    kept = WindowSnapshot.from_window(window)
    whole = kept.to_window(floor=0, head=floor + 41)
    whole.check()
    assert (whole.floor, whole.cursor) == (window.floor, window.cursor)
    assert whole.unacked_ranges(floor, window.cursor) == before
    lower = min(lower, head)
    part = kept.to_window(floor=floor + lower, head=floor + head)
    part.check()
    there = {n for a, b in before for n in range(a, b)}
    assert {n for a, b in part.unacked_ranges(0, 1 << 50) for n in range(a, b)} == {
        n for n in there if floor + lower <= n < floor + head
    }


@given(
    st.integers(0, 30),
    st.lists(st.tuples(st.integers(0, 40), st.integers(1, 9), st.integers(-1, 5)), max_size=5),
)
def test_every_message_in_flight_lies_in_one_span(
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


def test_what_is_known_of_messages_that_a_crash_has_taken_is_no_span() -> None:
    """Later messages have their sequences: they were never sent."""
    assert spans_by_attempts(0, 0, [(8, 9, 0), (23, 24, 2)], default=1) == []
