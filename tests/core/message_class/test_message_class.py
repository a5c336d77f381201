"""Time index of a class, and the union of two ack windows."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simplebus.core.limits import TIME_INDEX_STEP_SECONDS, TIME_INDEX_STEPS_MAX
from simplebus.core.message_class import message_class
from simplebus.core.message_class.message_class import TimeIndex
from simplebus.core.redelivery.ack_window import AckWindow


def build_time_index(gaps: list[float], step_count_max: int) -> tuple[TimeIndex, list[float]]:
    """Return an index of messages stored `gaps` seconds apart, and their times."""
    index, times = TimeIndex(), list[float]()
    now = 0.0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(message_class, "TIME_INDEX_STEPS_MAX", step_count_max)
        for gap in gaps:
            now += gap
            index.record(now, len(times))
            times.append(now)
    return index, times


@given(
    gaps=st.lists(st.sampled_from([0.0, 0.003, 0.01, 0.02, 5.0, 1000.0]), max_size=60),
    most=st.sampled_from([3, 8, TIME_INDEX_STEPS_MAX]),
    floor=st.integers(0, 20),
    requested=st.floats(-1, 5000),
)
def test_find_sequence_never_skips_later_messages(
    gaps: list[float], most: int, floor: int, requested: float
) -> None:
    index, times = build_time_index(gaps, most)
    assert len(index) <= most
    index.trim(min(floor, len(times)))
    for time in (requested, *times):
        found = index.find_sequence(time, len(times))
        first = next((n for n, t in enumerate(times) if t >= time), len(times))
        assert found <= first
        if most == TIME_INDEX_STEPS_MAX and found < len(times) and found > floor:
            assert times[found] > time - 2 * TIME_INDEX_STEP_SECONDS


@given(
    gaps=st.lists(st.sampled_from([0.0, 0.003, 0.01, 0.02, 5.0]), min_size=1, max_size=60),
    most=st.sampled_from([3, 8, TIME_INDEX_STEPS_MAX]),
    data=st.data(),
)
def test_list_steps_covers_all_stored_messages(
    gaps: list[float], most: int, data: st.DataObject
) -> None:
    index, times = build_time_index(gaps, most)
    floor = data.draw(st.integers(0, len(times)))
    index.trim(floor)
    first = data.draw(st.integers(floor, len(times)))
    last = data.draw(st.integers(first, len(times)))
    steps = index.list_steps(first, last, max_count=100)
    assert bool(steps) == (first < last)
    assert steps == sorted(set(steps))
    for n in range(first, last):
        begun, time = max(step for step in steps if step[0] <= n)
        assert begun == steps[0][0] or begun > first
        assert time <= times[n]
        if most == TIME_INDEX_STEPS_MAX:
            assert times[n] < time + TIME_INDEX_STEP_SECONDS
        assert index.find_sequence(time, len(times)) == begun
    assert index.list_steps(first, last, max_count=2) == steps[:2]


def test_coarse_time_index_keeps_long_gaps() -> None:
    index = TimeIndex()
    for n in range(TIME_INDEX_STEPS_MAX + 2):
        index.record(n * 100.0, n)
    assert len(index) < TIME_INDEX_STEPS_MAX
    assert index.find_sequence(50.0, TIME_INDEX_STEPS_MAX + 2) <= 1


def test_time_index_becomes_fine_again_after_trim(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(message_class, "TIME_INDEX_STEPS_MAX", 16)
    index = TimeIndex()
    for n in range(200):
        index.record(n / 50, n)
    assert index.find_sequence(3.9, 200) < 190
    index.trim(200)
    for n in range(200, 208):
        index.record(10 + n / 50, n)
    assert index.find_sequence(10 + 207 / 50, 208) == 207


acked_ranges = st.lists(st.tuples(st.integers(0, 30), st.integers(1, 6)), max_size=6)


def create_window(floor: int, cursor: int, acked: list[tuple[int, int]]) -> AckWindow:
    window = AckWindow(floor=floor)
    window.cursor = max(floor, cursor)
    for first, count in acked:
        if first < window.cursor:
            window.ack_range(first, min(first + count, window.cursor))
    return window


def unacked_sequences(window: AckWindow) -> set[int]:
    ranges = window.unacked_ranges(window.floor, window.cursor)
    return {s for first, last in ranges for s in range(first, last)}


@given(
    st.integers(0, 20),
    st.integers(0, 30),
    acked_ranges,
    st.integers(0, 20),
    st.integers(0, 30),
    acked_ranges,
)
def test_union_of_windows_keeps_messages_unacked_in_either(
    floor: int,
    cursor: int,
    acked: list[tuple[int, int]],
    other_floor: int,
    other_cursor: int,
    other_acked: list[tuple[int, int]],
) -> None:
    window = create_window(floor, cursor, acked)
    other_window = create_window(other_floor, other_cursor, other_acked)
    expected = (
        unacked_sequences(window)
        | unacked_sequences(other_window)
        | set(range(window.cursor, other_window.cursor))
    )
    joined = window.merge_unacked(other_window)
    joined.check()
    assert unacked_sequences(joined) == expected
    assert joined.cursor == max(window.cursor, other_window.cursor)
