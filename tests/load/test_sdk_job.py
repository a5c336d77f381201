"""Figures of the timed Python programs."""

from __future__ import annotations

import time

import pytest

from load.sdk_job import STAMP, Job, OneWayTimes, latency_figures, stamped


def test_latency_figures_are_percentiles_in_microseconds() -> None:
    percentiles = latency_figures([n / 1000 for n in reversed(range(1, 201))])
    assert percentiles == pytest.approx({"p50_us": 101_000, "p99_us": 199_000, "max_us": 200_000})


def test_one_way_times_end_with_last_message() -> None:
    times = OneWayTimes(2)
    times.add(stamped(0))
    assert not times.is_complete
    times.add(STAMP.pack(1, time.monotonic_ns() - 5_000_000_000))
    assert times.is_complete
    assert times.compute_percentiles()["max_us"] >= 5_000_000


@pytest.mark.parametrize("number", [0, 2], ids=["repeated", "lost"])
def test_one_way_times_reject_wrong_number(number: int) -> None:
    times = OneWayTimes(3)
    times.add(stamped(0))
    with pytest.raises(SystemExit, match=f"message {number}"):
        times.add(stamped(number))


def test_late_publisher_does_not_wait() -> None:
    job = Job("publish_paced", port=1, count=1, pace=1_000)
    assert job.seconds_until(1, started=time.monotonic() - 1) == 0.0
    assert job.seconds_until(1_000_000, started=time.monotonic()) > 0
