"""Replay of an archive to a bus: by class, channel and time, at full speed or at the original pace.

Messages of one class, server and memory form a stream: one task writes them in the order of their
offsets. The option publisher of this write is derived from the replay's name and the selection. So
a repeated replay continues where the previous one ended, within the limits described in `sink`.

At full speed, each stream is a batch write by `format("simplebus")`: by the connector if the
session has its jar. At a pace, Python tasks publish the messages under the same names, since the
connector sends only large blocks, and all streams must run at once.

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
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from simplebus.core.channel.pattern import ONE_SEGMENT, TAIL_WILDCARDS, ZERO_OR_MORE
from simplebus.spark.jobs.archive import read
from simplebus.spark.jobs.pacing import DUE, IDLE_SECONDS_MAX, ReplaySchedule, pace_batches
from simplebus.spark.jobs.session import activate_session
from simplebus.spark.options import SinkOptions, sink_options

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import Column, DataFrame, SparkSession

_SINK = "simplebus"
_PARTITION = 0
"""Partition of the only task of a stream's write."""
_STREAM = "stream"
_COLUMNS = ("value", "key", "headers", "channel")
_GROUP = ("class", "server", "memory")
_SHOWN_CHARACTERS = 64
"""Characters of a replay's name in the option publisher, whose length is limited."""
_SEGMENT = "[^.]++"
"""Regular expression of one segment of a channel."""
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
    """Messages of one class, server and memory, and their sink."""

    group: tuple[str | None, ...]
    """Class, server and memory."""
    count: int
    first: int
    """First publishing time, in microseconds since 1970."""
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
    """Return the option publisher of a stream: equal for equal selections only."""
    window = [at and at.astimezone(UTC).isoformat() for at in (selection.begin, selection.end)]
    identity = [name, *group, *window, to_class, *selection.channels]
    digest = hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:24]
    return f"replay {name[:_SHOWN_CHARACTERS]} {digest}"


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
        BusConnectionError: The bus cannot be reached.
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
    streams = [
        ReplayStream(
            group,
            count,
            first,
            replace(
                sink,
                class_=to_class or group[0] or "",
                publisher=publisher_name(name, group, selection, to_class),
            ),
        )
        for group, count, first in _groups(frame)
    ]
    if not streams:
        return ReplayResult(0, 0)
    stored_before = sum(map(_count_stored, streams))
    if speed is None:
        _publish(spark, frame, streams)
    else:
        _publish_paced(spark, frame, streams, speed)
    return ReplayResult(sum(stream.count for stream in streams), stored_before)


def _count_stored(stream: ReplayStream) -> int:
    """Return how many of the messages an earlier run has published."""
    from simplebus.spark.sink import count_stored

    return min(count_stored(stream.sink, _PARTITION), stream.count)


# Selection ---------------------------------------------------------------------------------------


def _filtered(frame: DataFrame, selection: ReplaySelection) -> DataFrame:
    from pyspark.sql import functions as sql

    if selection.classes:
        frame = frame.where(sql.col("class").isin(*selection.classes))
    if selection.channels:
        frame = frame.where(_matches_channels(selection.channels))
    stamp, day = sql.col("timestamp"), sql.col("date")
    if selection.begin is not None:
        frame = frame.where(stamp >= sql.lit(selection.begin))
        frame = frame.where(day >= sql.lit(selection.begin.astimezone(UTC).date()))
    if selection.end is not None:
        frame = frame.where(stamp < sql.lit(selection.end))
        frame = frame.where(day <= sql.lit(selection.end.astimezone(UTC).date()))
    return frame


def channel_expression(pattern: str) -> str:
    """Return a regular expression of Java that matches the same channels as a legal pattern.

    A message without a channel is the empty text.
    """
    *segments, last = pattern.split(".")
    texts = [_SEGMENT if each == ONE_SEGMENT else _quote(each) for each in segments]
    if last not in TAIL_WILDCARDS:
        texts.append(_SEGMENT if last == ONE_SEGMENT else _quote(last))
        return "[.]".join(texts)
    if not texts:
        one_or_more = f"{_SEGMENT}([.]{_SEGMENT})*+"
        return f"({one_or_more})?" if last == ZERO_OR_MORE else one_or_more
    return "[.]".join(texts) + f"([.]{_SEGMENT})" + ("*+" if last == ZERO_OR_MORE else "++")


def _quote(text: str) -> str:
    """Quote a text for Java, in which `\\Q` quotes all characters up to `\\E`."""
    return "\\Q" + text.replace("\\E", "\\E\\\\E\\Q") + "\\E"


def _matches_channels(patterns: Sequence[str]) -> Column:
    from pyspark.sql import functions as sql

    expression = "|".join(f"(?:{channel_expression(pattern)})" for pattern in patterns)
    return sql.coalesce("channel", sql.lit("")).rlike(f"\\A(?:{expression})\\z")


def _groups(frame: DataFrame) -> list[tuple[tuple[str | None, ...], int, int]]:
    """Return class, server and memory of each stream, its number of messages and its first
    publishing time.
    """
    from pyspark.sql import functions as sql

    found = frame.groupBy(*_GROUP).agg(
        sql.count("*").alias("messages"), sql.min(sql.unix_micros("timestamp")).alias("first")
    )
    rows = [
        (tuple(row[name] for name in _GROUP), int(row["messages"]), int(row["first"] or 0))
        for row in found.collect()
    ]
    return sorted(rows, key=lambda row: [value or "" for value in row[0]])


def _assign_streams(
    spark: SparkSession, frame: DataFrame, streams: list[ReplayStream], tasks: int
) -> DataFrame:
    """Return the rows with stream number and due time, each stream in one task and sorted."""
    from pyspark.sql import Window
    from pyspark.sql import functions as sql

    numbered_groups = [(number, *stream.group) for number, stream in enumerate(streams)]
    names = [f"_{name}" for name in _GROUP]
    numbers = spark.createDataFrame(
        numbered_groups, f"{_STREAM} int, {' string, '.join(names)} string"
    )
    is_same_group: Column = sql.lit(True)
    for name in _GROUP:
        is_same_group = is_same_group & sql.col(name).eqNullSafe(sql.col(f"_{name}"))
    frame = frame.join(sql.broadcast(numbers), is_same_group)
    before = Window.partitionBy(_STREAM).orderBy("offset")
    frame = frame.withColumn(DUE, sql.max(sql.unix_micros("timestamp")).over(before))
    frame = frame.withColumn(DUE, sql.coalesce(DUE, sql.lit(0)))
    frame = frame.select(_STREAM, "offset", *_COLUMNS, DUE)
    frame = frame.repartitionById(tasks, sql.col(_STREAM) % tasks)
    return frame.sortWithinPartitions(DUE, _STREAM, "offset")


# Publishing at full speed ------------------------------------------------------------------------


def _publish(spark: SparkSession, frame: DataFrame, streams: list[ReplayStream]) -> None:
    """Write each stream by a job with one task. As many jobs run in parallel as there are cores."""
    tasks = min(len(streams), spark.sparkContext.defaultParallelism)
    with ThreadPoolExecutor(tasks, "replay", activate_session, (spark,)) as pool:
        jobs = [pool.submit(_write_stream, frame, stream) for stream in streams]
        wait(jobs, return_when=FIRST_EXCEPTION)
        if any(job.done() and job.exception() for job in jobs):
            pool.shutdown(wait=False, cancel_futures=True)
        for job in jobs:
            if not job.cancelled():
                job.result()


def _write_stream(frame: DataFrame, stream: ReplayStream) -> None:
    from pyspark.sql import functions as sql

    for name, value in zip(_GROUP, stream.group, strict=True):
        frame = frame.where(sql.col(name).eqNullSafe(sql.lit(value)))
    rows = frame.select("offset", *_COLUMNS).coalesce(1).sortWithinPartitions("offset")
    # A column, since the option refuses names with commas.
    rows = rows.select(*_COLUMNS, sql.lit(stream.sink.class_).alias("class"))
    writing = rows.write.format(_SINK).mode("append").option("servers", stream.sink.server)
    writing = writing.option("timeout", stream.sink.timeout)
    writing.option("publisher", stream.sink.publisher).save()


# Publishing at a pace ----------------------------------------------------------------------------


def _publish_paced(
    spark: SparkSession, frame: DataFrame, streams: list[ReplayStream], speed: float
) -> None:
    # All streams run at once, so there may be no more tasks than cores.
    tasks = min(len(streams), spark.sparkContext.defaultParallelism)
    schedule = ReplaySchedule(
        min(stream.first for stream in streams), time.time() + _START_DELAY_SECONDS, speed
    )
    rows = _assign_streams(spark, frame, streams, tasks)
    sinks = [stream.sink for stream in streams]
    rows.mapInArrow(StreamPublisherTask(sinks, schedule), "messages bigint").collect()


class StreamPublisherTask:
    """Function of `mapInArrow`: publishes a task's rows by stream, each when it is due."""

    def __init__(self, sinks: list[SinkOptions], schedule: ReplaySchedule) -> None:
        self._sinks, self._schedule = sinks, schedule

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Publish all rows of a task. Yield the number of messages of each stream."""
        import pyarrow as pa

        threads: dict[int, _PublisherThread] = {}
        try:
            for batch in batches:
                for number, rows in split_by_stream(batch):
                    if number not in threads:
                        threads[number] = _PublisherThread(self._sinks[number], self._schedule)
                    threads[number].put(rows)
            counts = [stream.wait_published() for stream in threads.values()]
        finally:
            for stream in threads.values():
                stream.stop()
        yield pa.RecordBatch.from_pydict(
            {"messages": counts}, schema=pa.schema([("messages", pa.int64())])
        )


def split_by_stream(batch: pa.RecordBatch) -> Iterator[tuple[int, pa.RecordBatch]]:
    """Yield a batch's rows by stream number, in order."""
    import pyarrow.compute as pc

    streams = batch.column(_STREAM)
    for number in pc.unique(streams).to_pylist():
        rows = batch.filter(pc.equal(streams, number))
        yield number, rows.select([name for name in rows.schema.names if name in (*_COLUMNS, DUE)])


class _PublisherThread:
    """Thread that publishes one stream. Its bounded queue slows down the producer."""

    def __init__(self, sink: SinkOptions, schedule: ReplaySchedule) -> None:
        self._sink, self._schedule = sink, schedule
        self._rows: queue.Queue[Any] = queue.Queue(_QUEUED_BATCHES_MAX)
        self._stop_requested = threading.Event()
        self._count = 0
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=sink.publisher, daemon=True)
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

    def wait_published(self) -> int:
        """Wait until all rows are published. Return how many there were."""
        self.put(None)
        self._thread.join()
        self._check()
        return self._count

    def stop(self) -> None:
        """Stop the thread. The next publisher of this name disconnects a hanging one."""
        self._stop_requested.set()
        self._thread.join(_STOP_TIMEOUT_SECONDS)

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        from simplebus.spark.sink import task_publisher, write_task

        rows = pace_batches(self._queued_rows(), self._schedule, now=time.time, sleep=self._sleep)
        name = task_publisher(self._sink.publisher, _PARTITION)
        try:
            self._count = write_task(_drop_column(rows, DUE), self._sink, name).rows
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
