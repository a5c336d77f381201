"""Limit of the size of reads, by the time that their processing takes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simplebus.core.limits import RECEIVE_BYTES
from simplebus.server.read_limit import MEASURED_READ_BYTES_MIN, READ_SECONDS_MAX, ReadLimit


def test_fast_reads_grow_to_the_size_of_the_buffer() -> None:
    limit = ReadLimit()
    for _ in range(10):
        limit.record(limit.size_bytes, seconds=READ_SECONDS_MAX / 10)
    assert limit.size_bytes == RECEIVE_BYTES


def test_a_read_that_does_not_fill_the_limit_leaves_it() -> None:
    limit = ReadLimit()
    before = limit.size_bytes
    limit.record(before - 1, seconds=0.0)
    assert limit.size_bytes == before


def test_a_slow_read_reduces_the_limit_in_proportion() -> None:
    limit = ReadLimit()
    limit.record(RECEIVE_BYTES, seconds=4 * READ_SECONDS_MAX)
    assert RECEIVE_BYTES // 6 < limit.size_bytes <= RECEIVE_BYTES // 4


@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0, 10)), max_size=50))
def test_the_limit_stays_between_the_smallest_and_the_largest_read(
    reads: list[tuple[float, float]],
) -> None:
    limit = ReadLimit()
    for part, seconds in reads:
        limit.record(int(part * limit.size_bytes), seconds)
        assert MEASURED_READ_BYTES_MIN <= limit.size_bytes <= RECEIVE_BYTES


@pytest.mark.parametrize("bytes_per_second", [100e6, 500e6, 1e9, 10e9])
def test_full_reads_at_an_even_speed_soon_take_the_allowed_time(bytes_per_second: float) -> None:
    limit = ReadLimit()
    for _ in range(10):
        limit.record(limit.size_bytes, seconds=limit.size_bytes / bytes_per_second)
    seconds = limit.size_bytes / bytes_per_second
    assert seconds <= READ_SECONDS_MAX
    assert seconds > READ_SECONDS_MAX / 2 or limit.size_bytes == RECEIVE_BYTES
