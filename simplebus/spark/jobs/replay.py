"""Replay of an archive to a bus: by class, channel and time, at full speed or at the original pace.

Messages of one class, server and memory form a stream: one publisher sends them in the order of
their offsets. The publisher's name is derived from the replay's name and the selection, and row n
of the stream is its message number n. So a repeated replay continues where the previous one ended,
within the limits described in `sink`.

>>> replay(spark, "/data/archive", "127.0.0.1:8888", classes=["orders"], name="again")
"""

from __future__ import annotations

import hashlib
import json
import queue
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from simplebus.spark.jobs.archive import read
from simplebus.spark.jobs.pacing import DUE, IDLE_SECONDS_MAX, ReplaySchedule, pace_batches
from simplebus.spark.options import SinkOptions, sink_options

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import Column, DataFrame, SparkSession

_STREAM = "stream"
_COLUMNS = ("value", "key", "headers", "channel")
_GROUP = ("class", "server", "memory")
# Batches queued for a stream whose messages are not due yet.
_QUEUED_BATCHES_MAX = 2
_POLL_SECONDS = 0.2
_STOP_TIMEOUT_SECONDS = 5.0
# Time for the first rows to pass the shuffle; later rows are overdue and sent at once.
_START_DELAY_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class ReplaySelection:
    """Messages of an archive to replay."""

    classes: tuple[str, ...] = ()
    """Empty: every class."""
    channels: tuple[str, ...] = ()
    """Patterns; messages on other channels are skipped. Empty: every message."""
    begin: datetime | None = None
    end: datetime | None = None
    """First publishing time that is not selected."""


@dataclass(frozen=True, slots=True)
class ReplayStream:
    """Publisher of the messages of one class, server and memory."""

    publisher: str
    sink: SinkOptions


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """Result of a replay."""

    messages: int
    stored_before: int
    """How many of the messages an earlier run had published."""


def publisher_name(
    name: str, group: Sequence[str | None], selection: ReplaySelection, to_class: str
) -> str:
    """Return a stream's publisher name: equal for equal selections only."""
    window = [at and at.astimezone(UTC).isoformat() for at in (selection.begin, selection.end)]
    identity = [*group, *window, to_class, *selection.channels]
    return f"replay {name} {hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:24]}"


def replay(
    spark: SparkSession,
    path: str,
    servers: str,
    *,
    classes: Sequence[str] = (),
    channels: Sequence[str] = (),
    begin: datetime | None = None,
    end: datetime | None = None,
    speed: float | None = None,
    to_class: str = "",
    name: str = "",
    timeout: float | None = None,
) -> ReplayResult:
    """Publish messages of an archive to a bus, with their keys, headers and channels.

    Args:
        spark: The session.
        path: Path of the archive.
        servers: One bus, as host:port.
        classes: Classes to replay; empty for all.
        channels: Channel patterns; empty for all messages.
        begin: First publishing time. A time without a zone is UTC.
        end: First publishing time that is not replayed.
        speed: 1.0 for the original pace, 10.0 for ten times as fast, None for full speed.
        to_class: Class for all messages; empty for their original classes.
        name: Name of the replay. Each message is stored once per name; empty for a new name.
        timeout: Seconds for which connecting to the bus is retried; None for the sink's default.

    Returns:
        How many messages were selected, and how many of them were stored before.

    Raises:
        ValueError: An argument is invalid.
        Exception: Spark's error if a task fails.
    """
    arguments = {"servers": servers, "class": to_class, "timeout": timeout}
    sink = sink_options({key: str(value) for key, value in arguments.items() if value})
    if speed is not None and not 0 < speed < float("inf"):
        raise ValueError(f"expected a speed above 0, got {speed}")
    if begin is not None and begin.tzinfo is None:
        begin = begin.replace(tzinfo=UTC)
    if end is not None and end.tzinfo is None:
        end = end.replace(tzinfo=UTC)
    selection = ReplaySelection(tuple(classes), tuple(channels), begin, end)
    name = name or uuid.uuid4().hex
    frame = _filtered(read(spark, path), selection)
    groups = _groups(frame)
    streams = [
        ReplayStream(
            publisher_name(name, group, selection, to_class),
            replace(sink, class_=to_class or group[0]),
        )
        for group, _ in groups
    ]
    if not groups:
        return ReplayResult(0, 0)
    schedule = None
    tasks = len(groups)
    if speed is not None:
        # All streams run at once, so there may be no more tasks than cores.
        tasks = min(tasks, spark.sparkContext.defaultParallelism)
        schedule = ReplaySchedule(
            min(first for _, first in groups), time.time() + _START_DELAY_SECONDS, speed
        )
    rows = _assign_streams(
        spark, frame, [group for group, _ in groups], tasks, is_paced=schedule is not None
    )
    published_counts = rows.mapInArrow(
        StreamPublisherTask(streams, selection.channels, schedule), "messages bigint, before bigint"
    )
    counts = published_counts.collect()
    return ReplayResult(sum(row.messages for row in counts), sum(row.before for row in counts))


# Selection ---------------------------------------------------------------------------------------


def _filtered(frame: DataFrame, selection: ReplaySelection) -> DataFrame:
    from pyspark.sql import functions as sql

    if selection.classes:
        frame = frame.where(sql.col("class").isin(*selection.classes))
    stamp, day = sql.col("timestamp"), sql.col("date")
    if selection.begin is not None:
        frame = frame.where(stamp >= sql.lit(selection.begin))
        frame = frame.where(day >= sql.lit(selection.begin.astimezone(UTC).date()))
    if selection.end is not None:
        frame = frame.where(stamp < sql.lit(selection.end))
        frame = frame.where(day <= sql.lit(selection.end.astimezone(UTC).date()))
    return frame


def _groups(frame: DataFrame) -> list[tuple[tuple[Any, ...], int]]:
    """Return class, server and memory of each stream, and its first publishing time."""
    from pyspark.sql import functions as sql

    found = frame.groupBy(*_GROUP).agg(sql.min(sql.unix_micros("timestamp")).alias("first"))
    rows = [
        (tuple(row[name] for name in _GROUP), int(row["first"] or 0)) for row in found.collect()
    ]
    return sorted(rows, key=lambda row: [value or "" for value in row[0]])


def _assign_streams(
    spark: SparkSession, frame: DataFrame, groups: list[Any], tasks: int, *, is_paced: bool
) -> DataFrame:
    """Return the rows with their stream number, each stream sorted and in one task."""
    from pyspark.sql import Window
    from pyspark.sql import functions as sql

    numbered_groups = [(number, *group) for number, group in enumerate(groups)]
    names = [f"_{name}" for name in _GROUP]
    numbers = spark.createDataFrame(
        numbered_groups, f"{_STREAM} int, {' string, '.join(names)} string"
    )
    same: Column = sql.lit(True)
    for name in _GROUP:
        same = same & sql.col(name).eqNullSafe(sql.col(f"_{name}"))
    frame = frame.join(sql.broadcast(numbers), same)
    order: tuple[str, ...] = (_STREAM, "offset")
    columns: list[Any] = [_STREAM, "offset", *_COLUMNS]
    if is_paced:
        before = Window.partitionBy(_STREAM).orderBy("offset")
        frame = frame.withColumn(DUE, sql.max(sql.unix_micros("timestamp")).over(before))
        frame = frame.withColumn(DUE, sql.coalesce(DUE, sql.lit(0)))
        order, columns = (DUE, *order), [*columns, DUE]
    frame = frame.select(*columns).repartitionById(tasks, sql.col(_STREAM) % tasks)
    return frame.sortWithinPartitions(*order)


# Publishing --------------------------------------------------------------------------------------


class StreamPublisherTask:
    """Function of `mapInArrow`: publishes a task's rows by stream."""

    def __init__(
        self,
        streams: list[ReplayStream],
        channels: tuple[str, ...],
        schedule: ReplaySchedule | None,
    ) -> None:
        self._streams, self._channels, self._schedule = streams, channels, schedule

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Publish all rows of a task. Yield one row of counts per stream."""
        import pyarrow as pa

        threads: dict[int, _PublisherThread] = {}
        try:
            for batch in batches:
                for number, rows in split_by_stream(batch):
                    if number not in threads:
                        threads[number] = _PublisherThread(self._streams[number], self._schedule)
                    match_channels = filter_channels(rows, self._channels)
                    if match_channels.num_rows:
                        threads[number].put(match_channels)
            counts = [stream.wait_published() for stream in threads.values()]
        finally:
            for stream in threads.values():
                stream.stop()
        yield pa.RecordBatch.from_pydict(
            {"messages": [each[0] for each in counts], "before": [each[1] for each in counts]},
            schema=pa.schema([("messages", pa.int64()), ("before", pa.int64())]),
        )


def split_by_stream(batch: pa.RecordBatch) -> Iterator[tuple[int, pa.RecordBatch]]:
    """Yield a batch's rows by stream number, in order."""
    import pyarrow.compute as pc

    streams = batch.column(_STREAM)
    for number in pc.unique(streams).to_pylist():
        rows = batch.filter(pc.equal(streams, number))
        yield number, rows.select([name for name in rows.schema.names if name in (*_COLUMNS, DUE)])


def filter_channels(batch: pa.RecordBatch, patterns: tuple[str, ...]) -> pa.RecordBatch:
    """Return the rows whose channel matches a pattern; all rows if there are no patterns."""
    from simplebus.spark.arrow_columns import match_channels

    return batch.filter(match_channels(batch.column("channel"), patterns)) if patterns else batch


class _PublisherThread:
    """Thread that publishes one stream. Its bounded queue slows down the producer."""

    def __init__(self, stream: ReplayStream, schedule: ReplaySchedule | None) -> None:
        self._stream, self._schedule = stream, schedule
        self._rows: queue.Queue[Any] = queue.Queue(_QUEUED_BATCHES_MAX)
        self._stop_requested = threading.Event()
        self._result: tuple[int, int] = (0, 0)
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=stream.publisher, daemon=True)
        self._thread.start()

    def put(self, rows: pa.RecordBatch | None) -> None:
        """Queue rows, or None for the end. Raises the error that ended the thread."""
        while True:
            self._check()
            try:
                self._rows.put(rows, timeout=_POLL_SECONDS)
                return
            except queue.Full:
                continue

    def wait_published(self) -> tuple[int, int]:
        """Wait until all rows are published. Return how many there were, and how many were stored
        before.
        """
        self.put(None)
        self._thread.join()
        self._check()
        return self._result

    def stop(self) -> None:
        """Stop the thread. The next publisher of this name disconnects a hanging one."""
        self._stop_requested.set()
        self._thread.join(_STOP_TIMEOUT_SECONDS)

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        from simplebus.spark.sink import write_task

        rows: Iterator[Any] = self._queued_rows()
        if self._schedule is not None:
            rows = _drop_column(
                pace_batches(rows, self._schedule, now=time.time, sleep=self._sleep), DUE
            )
        try:
            written = write_task(rows, self._stream.sink, self._stream.publisher)
            self._result = written.rows, written.stored_before
        except BaseException as error:
            self._error = error

    def _sleep(self, seconds: float) -> None:
        if self._stop_requested.wait(seconds):
            raise _StoppedError

    def _queued_rows(self) -> Iterator[Any]:
        """Yield queued rows, and batches without rows while the queue is empty, to keep the
        connection.
        """
        rows, last_yield = None, time.monotonic()
        while True:
            try:
                rows = self._rows.get(timeout=_POLL_SECONDS)
            except queue.Empty:
                if self._stop_requested.is_set():
                    raise _StoppedError from None
                if rows is None or time.monotonic() - last_yield < IDLE_SECONDS_MAX:
                    continue
                rows = rows.slice(0, 0)
            if rows is None:
                return
            yield rows
            last_yield = time.monotonic()


class _StoppedError(Exception):
    """The task of this thread has ended."""


def _drop_column(batches: Iterator[pa.RecordBatch], name: str) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        yield batch.drop_columns([name])
