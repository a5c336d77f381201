"""Tests of the messages on query progress and query failures."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from simplebus.spark.jobs.progress import QueryProgress, count_waiting, error_sentence, follow

WORKER = """[PYTHON_EXCEPTION] An exception was thrown from the Python worker.
Traceback (most recent call last):
  File "worker.py", line 1, in main
    process()
  File "bus.py", line 2, in read
    raise DataLossError(told)
simplebus.spark.read.planner.DataLossError: messages 20 to 54 of class 1 at h:1 are lost: gone
 SQLSTATE: 38000
"""
CHAINED = """Traceback (most recent call last):
  File "tasks.py", line 1, in read_task
ConnectionResetError: [Errno 104] Connection reset by peer

The above exception was the direct cause of the following exception:

Traceback (most recent call last):
  File "tasks.py", line 2, in read_task
simplebus.core.errors.BusConnectionError: messages 0 to 9 could not be read completely: reset
"""
WRAPPED = f"""[STREAM_FAILED] Query [id = a] terminated with exception: [X] oh. SQLSTATE: 1
Traceback (most recent call last):
  File "archive.py", line 9, in write
    frame.write.save(place)
py4j.protocol.Py4JJavaError: An error occurred while calling o55.save.
: org.apache.spark.SparkException: Job aborted. Caused by: {WORKER}
\tat org.apache.spark.scheduler.DAGScheduler.abortStage(DAGScheduler.scala:1)
"""


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (WORKER, "messages 20 to 54 of class 1 at h:1 are lost: gone"),
        (CHAINED, "messages 0 to 9 could not be read completely: reset"),
        (WRAPPED, "messages 20 to 54 of class 1 at h:1 are lost: gone"),
        (
            "[PYTHON_DATA_SOURCE_ERROR] Failed to create a reader: "
            "simplebus.spark.read.bus_reader.ClassMissingError: there is no class 'a'\n SQLSTATE",
            "there is no class 'a'",
        ),
        (
            "An error occurred while calling o65.count.\n: java.lang.RuntimeException: Caused by: "
            "io.simplebus.spark.DataLossException: messages 1 to 2 are lost\n\tat",
            "messages 1 to 2 are lost",
        ),
        ("Traceback (most recent call last):\n  File 'x'\nKeyboardInterrupt", "KeyboardInterrupt"),
        ("[PATH_NOT_FOUND] Path does not exist: a. SQLSTATE: 42K03", "Path does not exist: a."),
        (
            "An error occurred while calling o65.create.\n: java.io.IOException: no room\n\tat",
            "no room",
        ),
        (
            "[STREAM_FAILED] Query [id = a, runId = b] terminated with exception: there is no "
            "option x SQLSTATE: XXKST\n=== Streaming Query ===",
            "there is no option x",
        ),
        ("plain", "plain"),
    ],
)
def test_spark_error_is_reduced_to_its_message(text: str, sentence: str) -> None:
    assert error_sentence(Exception(text)) == sentence


def test_empty_error_is_shown_by_name() -> None:
    assert error_sentence(TimeoutError()) == "TimeoutError"


SOURCE = {
    "description": "PythonMicroBatchStream@1",
    "endOffset": {"h:1": {"a": 7, "b": 3, "": "memory"}},
    "latestOffset": '{"h:1": {"a": 10, "b": 3, "": "memory"}}',
}


class EndlessQuery:
    """Query that finishes a batch at each request, until it is stopped."""

    def __init__(self, number: int) -> None:
        self.signal = number
        self.recentProgress: list[dict[str, Any]] = []
        self.status = {"isTriggerActive": True}
        self.is_stopped = False

    @property
    def lastProgress(self) -> dict[str, Any] | None:  # noqa: N802
        return self.recentProgress[-1] if self.recentProgress else None

    def awaitTermination(self, seconds: float) -> bool:  # noqa: N802
        report = {"batchId": len(self.recentProgress), "numInputRows": 5, "sources": [SOURCE]}
        self.recentProgress.append(report)
        if len(self.recentProgress) == 3:
            signal.raise_signal(self.signal)
        return self.is_stopped

    def stop(self) -> None:
        self.is_stopped = True


@pytest.mark.parametrize(("number", "is_interrupt"), [("SIGINT", True), ("SIGTERM", False)])
def test_signals_end_a_query_after_its_batch(number: str, is_interrupt: bool) -> None:
    query, reports = EndlessQuery(getattr(signal, number)), []
    before = signal.getsignal(query.signal)
    progress, was_stopped = follow(query, "archived", lambda *report: reports.append(report))
    assert query.is_stopped
    assert (progress.batches, progress.rows, was_stopped) == (4, 20, is_interrupt)
    assert reports[-1] == (progress, query.lastProgress)
    assert signal.getsignal(query.signal) is before


def test_lag_is_the_distance_from_the_end_of_a_batch() -> None:
    assert count_waiting({"sources": [SOURCE]}) == 3
    assert (
        count_waiting({"sources": [{"description": "FileStreamSource", "endOffset": "7"}]}) is None
    )
    assert count_waiting({}) is None


def test_query_position_follows_its_batches() -> None:
    progress = QueryProgress().updated({"numInputRows": 7, "processedRowsPerSecond": 3.5})
    progress = progress.updated({"numInputRows": 0, "sources": [SOURCE]})
    assert progress == QueryProgress(batches=1, rows=7, rate=3.5, lag=3)
    assert str(progress) == "7 messages in 1 batch, 4/s, 3 waiting"
