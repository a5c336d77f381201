"""Operations on several sequence sets against sets of integers."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from simplebus.core.redelivery.sequence_set import SequenceSet, find_part_end

NUMBERS = st.sets(st.integers(0, 40))


def create_set(numbers: set[int]) -> SequenceSet:
    sequences = SequenceSet()
    for number in numbers:
        sequences.add(number, number + 1)
    return sequences


def list_numbers(sequences: SequenceSet) -> list[int]:
    sequences.check()
    return [number for first, last in sequences for number in range(first, last)]


@given(NUMBERS, NUMBERS)
def test_difference_matches_sets(numbers: set[int], others: set[int]) -> None:
    sequences, other = create_set(numbers), create_set(others)
    difference = sequences.difference(other)
    assert list_numbers(difference) == sorted(numbers - others)
    difference.add(100, 101)
    assert list_numbers(sequences) == sorted(numbers)
    assert list_numbers(other) == sorted(others)


@given(st.lists(NUMBERS.filter(bool), min_size=1, max_size=4))
def test_union_matches_sets(each_numbers: list[set[int]]) -> None:
    union = SequenceSet.union([create_set(numbers) for numbers in each_numbers])
    assert list_numbers(union) == sorted(set().union(*each_numbers))


@given(NUMBERS, st.integers(0, 45), st.integers(1, 5))
def test_range_after_others_is_found(numbers: set[int], first: int, range_count: int) -> None:
    sequences = create_set(numbers)
    ranges = [bounds for bounds in sequences if bounds[1] > first]
    expected = ranges[range_count][0] if range_count < len(ranges) else None
    assert sequences.find_range_after(first, range_count) == expected


@given(st.lists(NUMBERS, max_size=3), st.integers(0, 40), st.integers(1, 40), st.integers(1, 8))
def test_parts_cover_the_range_and_have_few_ranges(
    each_numbers: list[set[int]], first: int, count: int, range_count: int
) -> None:
    sets = [create_set(numbers) for numbers in each_numbers]
    last = first + count
    while first < last:
        end = find_part_end(sets, first, last, range_count)
        assert first < end <= last
        range_counts = [len(sequences.ranges_within(first, end)) for sequences in sets]
        assert sum(range_counts) <= max(range_count, len(sets))
        first = end


@given(NUMBERS | st.just(set(range(0, 40, 2))), NUMBERS | st.sets(st.integers(0, 40), max_size=2))
def test_popped_set_matches_sets(numbers: set[int], others: set[int]) -> None:
    sequences, other = create_set(numbers), create_set(others)
    assert list_numbers(sequences.pop_set(other)) == sorted(numbers & others)
    assert list_numbers(sequences) == sorted(numbers - others)
    assert list_numbers(other) == sorted(others)


def test_popping_few_ranges_of_a_large_set_matches_sets() -> None:
    numbers = set(range(0, 3000, 2)) | set(range(2000, 2010))
    for others in (set(range(1000, 1003)), set(range(0, 3000, 40)), set(range(1, 3000, 50))):
        sequences, other = create_set(numbers), create_set(others)
        assert list_numbers(sequences.pop_set(other)) == sorted(numbers & others)
        assert list_numbers(sequences) == sorted(numbers - others)


RANGES = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), min_size=1, max_size=9)


@given(NUMBERS, RANGES)
def test_ranges_in_any_order_match_sets(numbers: set[int], ranges: list[tuple[int, int]]) -> None:
    firsts, lasts = np.array(ranges).T
    named = [set(range(*each)) for each in ranges]
    assert list_numbers(SequenceSet.from_ranges(firsts, lasts)) == sorted(set().union(*named))
    found = create_set(numbers).find_overlapping(firsts, lasts)
    assert found.tolist() == [bool(numbers & each) for each in named]
