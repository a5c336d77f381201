"""Rate of a counter."""

from __future__ import annotations

from simplebus.gateway.rate_meter import STEP_S, WINDOW_S, RateMeter


def test_rate_covers_window() -> None:
    rate = RateMeter()
    assert rate.update(100.0, 50) == 0.0
    assert rate.update(100.0, 50) == 0.0, "no time has passed"
    assert rate.update(100.5, 60) == 20.0
    assert rate.update(102.0, 90) == 20.0
    rates = [rate.update(102.0 + step, 90) for step in range(1, 14)]
    assert rates[0] > rates[4] > 0.0
    assert rates[-1] == 0.0, "old counts are dropped"


def test_rare_reads_cover_longer_window() -> None:
    rate = RateMeter()
    rate.update(0.0, 0)
    assert rate.update(60.0, 600) == 10.0
    assert rate.update(120.0, 600) == 0.0


def test_frequent_reads_keep_few_samples() -> None:
    rate = RateMeter()
    for step in range(10_000):
        rate.update(step / 100, step)
    assert rate.update(100.0, 10_000) == 100.0
    assert len(rate._samples) <= WINDOW_S / STEP_S + 2
