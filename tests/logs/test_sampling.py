"""Sampling of repeated failures."""

from __future__ import annotations

from simplebus.logs.sampling import TEXTS_MAX, FailureCounts, is_logged


def test_logs_the_first_three_failures_and_then_each_doubling() -> None:
    logged = [count for count in range(1, 2001) if is_logged(count)]
    assert logged == [1, 2, 3, 4, 8, 16, 32, 64, 128, 256, 512, 1024]


def test_equal_failures_are_counted_and_the_number_of_texts_is_bounded() -> None:
    counts = FailureCounts()
    assert [counts.add(text) for text in ("a", "b", "a")] == [1, 1, 2]
    for number in range(TEXTS_MAX):
        assert counts.add(str(number)) == 1
    assert counts.add("a") == 1
