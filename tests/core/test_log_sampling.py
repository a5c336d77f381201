"""Sampling of repeated failures."""

from __future__ import annotations

from simplebus.core.log_sampling import is_logged


def test_logs_the_first_three_failures_and_then_each_doubling() -> None:
    logged = [count for count in range(1, 2001) if is_logged(count)]
    assert logged == [1, 2, 3, 4, 8, 16, 32, 64, 128, 256, 512, 1024]
