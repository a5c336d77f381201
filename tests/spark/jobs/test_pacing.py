"""A replay keeps the intervals between the original publish times."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from simplebus.spark.jobs.pacing import DUE, IDLE_SECONDS_MAX, ReplaySchedule, pace_batches


class Clock:
    """Clock that advances by sleeps."""

    def __init__(self) -> None:
        self.at = 1000.0
        self.naps = 0

    def now(self) -> float:
        return self.at

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.at += seconds
        self.naps += 1


def batches(pieces: list[list[int]]) -> Iterator[Any]:
    """Yield numbered rows with these publish times in microseconds."""
    number = 0
    for stamps in pieces:
        rows = {DUE: stamps, "row": list(range(number, number + len(stamps)))}
        number += len(stamps)
        yield pa.RecordBatch.from_pydict(
            rows, schema=pa.schema([(DUE, pa.int64()), ("row", pa.int64())])
        )


def played(
    pieces: list[list[int]], pace: ReplaySchedule
) -> tuple[list[tuple[int, float]], list[float], Clock]:
    """Return each row with its arrival time, and the times of batches without rows."""
    clock = Clock()
    found, lives = [], []
    for batch in pace_batches(batches(pieces), pace, now=clock.now, sleep=clock.sleep):
        found += [(row, clock.at) for row in batch.column("row").to_pylist()]
        if not batch.num_rows:
            lives.append(clock.at)
    return found, lives, clock


def test_replay_speed_scales_time() -> None:
    stamps = np.array([5_000_000, 6_000_000, 25_000_000])
    assert ReplaySchedule(5_000_000, 1000.0, 1.0).due_times(stamps).tolist() == [
        1000.0,
        1001.0,
        1020.0,
    ]
    assert ReplaySchedule(5_000_000, 1000.0, 10.0).due_times(stamps).tolist() == [
        1000.0,
        1000.1,
        1002.0,
    ]


@given(
    st.lists(st.lists(st.integers(0, 20_000_000), max_size=6), max_size=6),
    st.sampled_from([0.5, 1.0, 10.0]),
)
def test_rows_are_emitted_in_order_when_due(pieces: list[list[int]], speed: float) -> None:
    pace = ReplaySchedule(0, 1000.0, speed)
    found, _, _ = played(pieces, pace)
    stamps = [stamp for piece in pieces for stamp in piece]
    assert [row for row, _ in found] == list(range(len(stamps)))
    latest = 0.0
    for (_, arrived_at), stamp in zip(found, stamps, strict=True):
        latest = max(latest, 1000.0 + stamp / 1e6 / speed)
        assert latest <= arrived_at <= latest + 0.02


def test_late_rows_are_emitted_together_immediately() -> None:
    found, lives, clock = played([[0, 1, 2], [3, 4]], ReplaySchedule(10**9, 0.0, 1.0))
    assert (len(found), lives, clock.naps) == (5, [], 0)


def test_long_pauses_emit_keepalives() -> None:
    _, lives, _ = played([[0], [22_000_000]], ReplaySchedule(0, 1000.0, 1.0))
    assert len(lives) == 22 // IDLE_SECONDS_MAX
