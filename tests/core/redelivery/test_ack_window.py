"""Ack window by example: acknowledged and unacknowledged sequences, and message ids."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from simplebus.core.redelivery.ack_window import AckWindow, nearest_sequence
from tests.support.oracles import ID_COUNT, AckOracle


def build_window(floor: int, cursor: int, *acked: tuple[int, int]) -> AckWindow:
    window = AckWindow(floor=floor)
    window.cursor = cursor
    for first, last in acked:
        window.ack_range(first, last)
        window.check()
    return window


def ack_all(window: AckWindow, ranges: list[tuple[int, int]]) -> bool:
    pairs = np.array(ranges, np.int64).reshape(-1, 2)
    moved = window.ack_ranges(pairs[:, 0], pairs[:, 1])
    window.check()
    return moved


def test_a_fresh_window_is_empty() -> None:
    window = AckWindow(floor=7)
    window.check()
    assert (window.floor, window.cursor, window.in_flight_count, window.flags_bytes) == (7, 7, 0, 0)
    assert window.unacked_ranges(0, 100) == []


def test_acks_in_order_move_the_floor_without_memory() -> None:
    window = build_window(0, 10, (0, 4))
    assert (window.floor, window.in_flight_count, window.flags_bytes) == (4, 6, 0)
    window.ack_range(4, 10)
    window.check()
    assert (window.floor, window.in_flight_count, window.flags_bytes) == (10, 0, 0)


def test_floor_waits_for_the_gap_before_an_ack_out_of_order() -> None:
    window = build_window(0, 10, (4, 6), (7, 8))
    assert (window.floor, window.in_flight_count) == (0, 7)
    assert window.unacked_ranges(0, 10) == [(0, 4), (6, 7), (8, 10)]
    window.ack_range(0, 4)
    window.check()
    assert (window.floor, window.unacked_ranges(0, 10)) == (6, [(6, 7), (8, 10)])


def test_release_memory_frees_flags_if_none_is_set() -> None:
    window = build_window(0, 10, (4, 6))
    window.release_memory()
    assert window.flags_bytes > 0
    assert window.unacked_ranges(0, 10) == [(0, 4), (6, 10)]
    window.ack_range(0, 10)
    window.release_memory()
    window.check()
    assert window.flags_bytes == 0
    window.cursor = 20
    window.ack_range(15, 16)
    window.check()
    assert window.unacked_ranges(0, 20) == [(10, 15), (16, 20)]


def test_acking_twice_changes_nothing() -> None:
    window = build_window(0, 10, (0, 5), (0, 5), (7, 9), (7, 9), (8, 9))
    assert (window.floor, window.unacked_ranges(0, 10)) == (5, [(5, 7), (9, 10)])


def test_ack_below_the_floor_changes_nothing() -> None:
    window = build_window(100, 110, (90, 95), (-50, 100))
    assert (window.floor, window.in_flight_count) == (100, 10)


def test_ack_across_the_floor_counts_from_the_floor() -> None:
    assert build_window(100, 110, (95, 103)).floor == 103
    assert build_window(100, 110, (105, 107), (95, 103)).unacked_ranges(0, 200) == [
        (103, 105),
        (107, 110),
    ]


def test_acking_beyond_the_cursor_fails_an_assertion() -> None:
    with pytest.raises(AssertionError):
        build_window(0, 10, (9, 11))
    with pytest.raises(AssertionError):
        ack_all(build_window(0, 10), [(i, i + 2) for i in range(0, 120, 2)])


def test_ack_ranges_returns_true_if_the_floor_moved() -> None:
    window = build_window(0, 200)
    assert not ack_all(window, [(5, 6)])
    assert ack_all(window, [(0, 1)])
    assert not ack_all(window, [(0, 1)])
    assert not ack_all(window, [(i, i + 1) for i in range(10, 130, 2)])
    assert ack_all(window, [(i, i + 1) for i in range(1, 129)])
    assert window.floor == 129


def test_unacked_ranges_is_limited_to_the_given_range() -> None:
    window = build_window(0, 10, (4, 6))
    assert window.unacked_ranges(5, 8) == [(6, 8)]
    assert window.unacked_ranges(4, 6) == []
    assert window.unacked_ranges(8, 100) == [(8, 10)]
    assert window.unacked_ranges(10, 100) == []
    assert window.unacked_ranges(8, 5) == []


def test_skip_to_counts_unacknowledged_messages() -> None:
    window = build_window(0, 10, (2, 4))
    assert window.skip_to(5) == 3
    window.check()
    assert (window.floor, window.in_flight_count) == (5, 5)
    assert window.skip_to(5) == 0
    assert window.skip_to(3) == 0


def test_skip_to_beyond_the_cursor_moves_the_cursor() -> None:
    window = build_window(0, 10, (2, 4))
    assert window.skip_to(15) == 13
    window.check()
    assert (window.floor, window.cursor, window.in_flight_count) == (15, 15, 0)


def test_skip_to_far_beyond_the_cursor_counts_all() -> None:
    window = build_window(0, 1000, (2, 4), (998, 999))
    assert window.skip_to(5000) == 4997
    window.check()
    assert (window.floor, window.cursor, window.in_flight_count) == (5000, 5000, 0)


def test_skip_to_advances_over_acknowledged_messages() -> None:
    window = build_window(0, 10, (2, 4), (6, 7))
    assert window.skip_to(2) == 2
    window.check()
    assert (window.floor, window.unacked_ranges(0, 10)) == (4, [(4, 6), (7, 10)])


def test_flags_survive_growing_and_wrapping() -> None:
    window = build_window(1000, 1500, (1010, 1020), (1400, 1402))
    window.ack_range(1000, 1005)
    window.cursor = 9000
    window.ack_range(8000, 8999)
    window.check()
    assert window.unacked_ranges(0, 10_000) == [
        (1005, 1010),
        (1020, 1400),
        (1402, 8000),
        (8999, 9000),
    ]


@pytest.mark.parametrize("lap", [0, 1, 5])
def test_message_id_maps_to_the_sequence_nearest_to_the_floor(lap: int) -> None:
    floor = lap * ID_COUNT + 10
    assert nearest_sequence(10, floor) == floor
    assert nearest_sequence(15, floor) == floor + 5
    assert nearest_sequence(3, floor) == floor - 7
    assert nearest_sequence(ID_COUNT - 1, floor) == floor - 11
    assert nearest_sequence(10 + ID_COUNT // 2 - 1, floor) == floor + ID_COUNT // 2 - 1
    assert nearest_sequence(10 + ID_COUNT // 2, floor) == floor - ID_COUNT // 2


@given(st.integers(0, ID_COUNT - 1), st.integers(0, 5 * ID_COUNT))
def test_nearest_sequence_equals_the_oracle(message_id: int, floor: int) -> None:
    expected = AckOracle(floor=floor).nearest_sequence(message_id)
    assert nearest_sequence(message_id, floor) == expected


@given(
    st.lists(st.tuples(st.integers(0, ID_COUNT - 1), st.integers(1, 1 << 31)), max_size=5),
    st.integers(0, 5 * ID_COUNT),
)
def test_ids_to_sequences_equals_nearest_sequence(
    ranges: list[tuple[int, int]], floor: int
) -> None:
    pairs = np.array([(first, first + count) for first, count in ranges], np.int64).reshape(-1, 2)
    firsts, lasts = AckWindow(floor=floor).ids_to_sequences(pairs[:, 0], pairs[:, 1])
    expected = [nearest_sequence(first, floor) for first, _ in ranges]
    assert firsts.tolist() == expected
    assert lasts.tolist() == [
        first + count for first, (_, count) in zip(expected, ranges, strict=True)
    ]


def test_acks_continue_from_zero_at_the_wrap() -> None:
    floor = ID_COUNT - 3
    window = build_window(floor, floor + 6)
    for first, last in ((0, 3), (ID_COUNT - 3, ID_COUNT)):
        sequence = nearest_sequence(first, window.floor)
        window.ack_range(sequence, sequence + last - first)
        window.check()
    assert window.floor == ID_COUNT + 3


def test_check_detects_a_corrupted_window() -> None:
    def floor_beyond_cursor(window: AckWindow) -> None:
        window.floor = window.cursor + 1

    def marked_floor(window: AckWindow) -> None:
        window.floor = 4

    def forgotten_marks(window: AckWindow) -> None:
        window._flags_end = window.floor

    for tamper in (floor_beyond_cursor, marked_floor, forgotten_marks):
        window = build_window(0, 10, (4, 6))
        tamper(window)
        with pytest.raises(AssertionError):
            window.check()
