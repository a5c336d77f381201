"""How often something took how long: against the values themselves."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simplebus.core.histogram import LATENCY_BOUNDS_SECONDS, Histogram

VALUES = st.lists(st.floats(1e-6, 100), max_size=50)


@given(VALUES)
def test_every_value_is_counted_at_or_below_the_first_bound_that_it_reaches(
    values: list[float],
) -> None:
    histogram = Histogram()
    for value in values:
        histogram.observe(value)
    seen = histogram.snapshot()
    at_or_below = [sum(value <= bound for value in values) for bound in LATENCY_BOUNDS_SECONDS]
    assert [sum(seen.counts[: n + 1]) for n in range(len(LATENCY_BOUNDS_SECONDS))] == at_or_below
    assert seen.count == len(values)
    assert seen.total == pytest.approx(sum(values))


@given(VALUES.filter(bool), st.floats(0.01, 1))
def test_a_quantile_lies_in_the_stretch_of_the_value_that_it_is(
    values: list[float], part: float
) -> None:
    histogram = Histogram()
    for value in values:
        histogram.observe(value)
    said = histogram.snapshot().quantile(part)
    ordered = sorted(values)
    true = ordered[max(0, min(len(ordered) - 1, int(part * len(ordered) + 0.999999) - 1))]
    bounds = [0.0, *LATENCY_BOUNDS_SECONDS]
    low = max((bound for bound in bounds if bound < true), default=0.0)
    high = min((bound for bound in bounds if bound >= true), default=LATENCY_BOUNDS_SECONDS[-1])
    assert min(low, LATENCY_BOUNDS_SECONDS[-1]) <= said <= high + 1e-9


def test_without_values_there_is_nothing() -> None:
    seen = Histogram().snapshot()
    assert (seen.count, seen.total, seen.quantile(0.5)) == (0, 0.0, 0.0)


def test_what_came_since_is_the_difference() -> None:
    histogram = Histogram((1.0, 2.0))
    histogram.observe(0.5)
    before = histogram.snapshot()
    histogram.observe(1.0)
    histogram.observe(9.0)
    since = histogram.snapshot().difference(before)
    assert since.counts == (1, 0, 1)
    assert since.total == 10.0


def test_bounds_that_do_not_ascend_are_refused() -> None:
    with pytest.raises(ValueError, match="bounds must ascend, got"):
        Histogram((2.0, 1.0))
