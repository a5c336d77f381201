"""Tests of the batch trigger."""

from __future__ import annotations

from simplebus.spark.batch_trigger import BatchTrigger


def test_query_without_minimum_is_always_due() -> None:
    pace = BatchTrigger(min_messages=None, max_delay_seconds=9)
    assert [pace.is_due(waiting, 0.0) for waiting in (0, 1, 0)] == [True] * 3


def test_batch_is_due_by_size_or_delay() -> None:
    pace = BatchTrigger(min_messages=10, max_delay_seconds=60)
    samples = [(0, 5.0), (9, 6.0), (10, 7.0), (9, 8.0), (9, 66.9), (9, 67.0), (9, 68.0), (0, 127.0)]
    due = [pace.is_due(waiting, now) for waiting, now in samples]
    assert due == [True, False, True, False, False, True, False, True]
