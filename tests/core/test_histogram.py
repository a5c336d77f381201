"""Histograms compared with the observed values."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simplebus.core.histogram import LATENCY_BOUNDS_SECONDS, Histogram

VALUES = st.lists(st.floats(1e-6, 100), max_size=50)


@given(VALUES)
def test_values_are_counted_in_their_bucket(
    values: list[float],
) -> None:
    histogram = Histogram()
    for value in values:
        histogram.observe(value)
    snapshot = histogram.snapshot()
    at_or_below = [sum(value <= bound for value in values) for bound in LATENCY_BOUNDS_SECONDS]
    assert [
        sum(snapshot.counts[: n + 1]) for n in range(len(LATENCY_BOUNDS_SECONDS))
    ] == at_or_below
    assert snapshot.count == len(values)
    assert snapshot.total == pytest.approx(sum(values))


@given(VALUES.filter(bool), st.floats(0.01, 1))
def test_quantile_is_in_the_bucket_of_the_true_value(values: list[float], fraction: float) -> None:
    histogram = Histogram()
    for value in values:
        histogram.observe(value)
    quantile = histogram.snapshot().quantile(fraction)
    ordered = sorted(values)
    true = ordered[max(0, min(len(ordered) - 1, int(fraction * len(ordered) + 0.999999) - 1))]
    bounds = [0.0, *LATENCY_BOUNDS_SECONDS]
    low = max((bound for bound in bounds if bound < true), default=0.0)
    high = min((bound for bound in bounds if bound >= true), default=LATENCY_BOUNDS_SECONDS[-1])
    assert min(low, LATENCY_BOUNDS_SECONDS[-1]) <= quantile <= high + 1e-9


def test_empty_histogram() -> None:
    snapshot = Histogram().snapshot()
    assert (snapshot.count, snapshot.total, snapshot.quantile(0.5)) == (0, 0.0, 0.0)


def test_difference_of_snapshots() -> None:
    histogram = Histogram((1.0, 2.0))
    histogram.observe(0.5)
    before = histogram.snapshot()
    histogram.observe(1.0)
    histogram.observe(9.0)
    difference = histogram.snapshot().difference(before)
    assert difference.counts == (1, 0, 1)
    assert difference.total == 10.0


def test_descending_bounds_are_rejected() -> None:
    with pytest.raises(ValueError, match="bounds must ascend, got"):
        Histogram((2.0, 1.0))
