"""Longest CPU time of a fixed computation: `python -m load.hold_control SECONDS LIMIT_S`.

The computation takes COMPUTATION_S, makes no system calls, and is repeated. Linux also charges
pauses of a virtual machine to the thread that they interrupt, so some repetitions appear longer, as
do steps of an event loop. Prints a line of JSON with the CPU time of the longest repetition, and
the number of repetitions above the limit.
"""

from __future__ import annotations

import json
import sys
import time
from statistics import median

COMPUTATION_S = 0.002
_CALIBRATION_RUNS = 50
_CALIBRATION_SQUARES = 10_000


def measure(seconds: float) -> list[float]:
    """Repeat the computation for some seconds. Returns the CPU times of all repetitions."""
    count = int(_CALIBRATION_SQUARES * COMPUTATION_S / _calibrate())
    times, end = list[float](), time.monotonic() + seconds
    while time.monotonic() < end:
        times.append(_compute(count))
    return times


def _calibrate() -> float:
    """Return the median CPU time of adding _CALIBRATION_SQUARES squares."""
    return median(_compute(_CALIBRATION_SQUARES) for _ in range(_CALIBRATION_RUNS))


def _compute(count: int) -> float:
    """Add `count` squares. Returns the CPU time of this thread."""
    begin = time.thread_time()
    total = 0
    for number in range(count):
        total += number * number
    return time.thread_time() - begin


if __name__ == "__main__":
    seconds, limit_s = map(float, sys.argv[1:])
    times = measure(seconds)
    long_count = sum(each > limit_s for each in times)
    print(json.dumps({"longest": max(times), "long_count": long_count}), flush=True)
