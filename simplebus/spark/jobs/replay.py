"""An archive onto a bus again: by class, channel and time, as fast as it goes or as it went.

Rule 1: messages of one class, from one memory of one server, are a lane: they are published one
after the other, in the order of their offsets, by a publisher of their own.
Rule 2: a lane's publisher is named by the replay's name and by what was chosen, and row n of the
lane is its message n. So a replay that was killed and is run again goes on where it ended, within
the bounds that `sink` names: what the bus has of a publisher is not published again.

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
from simplebus.spark.jobs.pacing import DUE, SILENCE_SECONDS, Pace, paced
from simplebus.spark.options import SinkOptions, sink_options

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import Column, DataFrame, SparkSession

_LANE = "lane"
_COLUMNS = ("value", "key", "headers", "channel")
_GROUP = ("class", "server", "memory")
# Batches that wait for a lane whose messages are not due yet. More would only take memory.
_AHEAD = 2
_PATIENCE_SECONDS = 0.2
_GOODBYE_SECONDS = 5.0
# For the first rows to come through the shuffle: those that come later go out at once.
_LEAD_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class Chosen:
    """Which messages of an archive are meant."""

    classes: tuple[str, ...] = ()
    """None: every class."""
    channels: tuple[str, ...] = ()
    """Patterns; a message is meant if one of them matches its channel. None: every message."""
    begin: datetime | None = None
    end: datetime | None = None
    """The first moment that is not meant."""


@dataclass(frozen=True, slots=True)
class Lane:
    """Who publishes the messages of one class, server and memory, and how."""

    publisher: str
    sink: SinkOptions


@dataclass(frozen=True, slots=True)
class Replayed:
    """What a replay has done."""

    messages: int
    stored_before: int
    """How many of them an earlier run had published."""


def publisher_name(name: str, group: Sequence[str | None], chosen: Chosen, to_class: str) -> str:
    """What a lane's publisher is called: the same for the same messages, and for no others."""
    window = [at and at.astimezone(UTC).isoformat() for at in (chosen.begin, chosen.end)]
    said = [*group, *window, to_class, *chosen.channels]
    return f"replay {name} {hashlib.sha256(json.dumps(said).encode()).hexdigest()[:24]}"


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
) -> Replayed:
    """Publish messages of an archive to a bus, with their keys, headers and channels.

    `servers` is one bus, as host:port. Messages published from `begin` to before `end` are meant;
    a moment without a time zone is in UTC. `speed` 1.0 has them follow each other as they did, 10.0
    ten times as fast, None as fast as it goes. `to_class` takes all of them; else each goes to the
    class that it was of. Under the same `name` the same messages are published once; without one
    this replay is one of its own. A bus that does not answer is tried for `timeout` seconds.

    Raises ValueError, and what Spark does when its tasks fail.
    """
    given = {"servers": servers, "class": to_class, "timeout": timeout}
    sink = sink_options({key: str(value) for key, value in given.items() if value})
    if speed is not None and not 0 < speed < float("inf"):
        raise ValueError(f"speed is above 0, got {speed}")
    if begin is not None and begin.tzinfo is None:
        begin = begin.replace(tzinfo=UTC)
    if end is not None and end.tzinfo is None:
        end = end.replace(tzinfo=UTC)
    chosen = Chosen(tuple(classes), tuple(channels), begin, end)
    name = name or uuid.uuid4().hex
    frame = _filtered(read(spark, path), chosen)
    groups = _groups(frame)
    lanes = [
        Lane(
            publisher_name(name, group, chosen, to_class),
            replace(sink, class_=to_class or group[0]),
        )
        for group, _ in groups
    ]
    if not groups:
        return Replayed(0, 0)
    pace = None
    tasks = len(groups)
    if speed is not None:
        # All lanes move at once, however few tasks there may be at a time.
        tasks = min(tasks, spark.sparkContext.defaultParallelism)
        pace = Pace(min(first for _, first in groups), time.time() + _LEAD_SECONDS, speed)
    rows = _laned(spark, frame, [group for group, _ in groups], tasks, is_paced=pace is not None)
    done = rows.mapInArrow(
        Publishing(lanes, chosen.channels, pace), "messages bigint, before bigint"
    )
    counts = done.collect()
    return Replayed(sum(row.messages for row in counts), sum(row.before for row in counts))


# What is published -------------------------------------------------------------------------------


def _filtered(frame: DataFrame, chosen: Chosen) -> DataFrame:
    from pyspark.sql import functions as sql

    if chosen.classes:
        frame = frame.where(sql.col("class").isin(*chosen.classes))
    stamp, day = sql.col("timestamp"), sql.col("date")
    if chosen.begin is not None:
        frame = frame.where(stamp >= sql.lit(chosen.begin))
        frame = frame.where(day >= sql.lit(chosen.begin.astimezone(UTC).date()))
    if chosen.end is not None:
        frame = frame.where(stamp < sql.lit(chosen.end))
        frame = frame.where(day <= sql.lit(chosen.end.astimezone(UTC).date()))
    return frame


def _groups(frame: DataFrame) -> list[tuple[tuple[Any, ...], int]]:
    """Class, server and memory of what there is, and when the first of it was published."""
    from pyspark.sql import functions as sql

    found = frame.groupBy(*_GROUP).agg(sql.min(sql.unix_micros("timestamp")).alias("first"))
    rows = [
        (tuple(row[name] for name in _GROUP), int(row["first"] or 0)) for row in found.collect()
    ]
    return sorted(rows, key=lambda row: [value or "" for value in row[0]])


def _laned(
    spark: SparkSession, frame: DataFrame, groups: list[Any], tasks: int, *, is_paced: bool
) -> DataFrame:
    """The rows by lane, each lane in its order and in one task."""
    from pyspark.sql import Window
    from pyspark.sql import functions as sql

    known = [(number, *group) for number, group in enumerate(groups)]
    names = [f"_{name}" for name in _GROUP]
    numbers = spark.createDataFrame(known, f"{_LANE} int, {' string, '.join(names)} string")
    same: Column = sql.lit(True)
    for name in _GROUP:
        same = same & sql.col(name).eqNullSafe(sql.col(f"_{name}"))
    frame = frame.join(sql.broadcast(numbers), same)
    order: tuple[str, ...] = (_LANE, "offset")
    columns: list[Any] = [_LANE, "offset", *_COLUMNS]
    if is_paced:
        before = Window.partitionBy(_LANE).orderBy("offset")
        frame = frame.withColumn(DUE, sql.max(sql.unix_micros("timestamp")).over(before))
        frame = frame.withColumn(DUE, sql.coalesce(DUE, sql.lit(0)))
        order, columns = (DUE, *order), [*columns, DUE]
    frame = frame.select(*columns).repartitionById(tasks, sql.col(_LANE) % tasks)
    return frame.sortWithinPartitions(*order)


# Publishing --------------------------------------------------------------------------------------


class Publishing:
    """What a task does with its rows: hand them to their lanes, and say how many there were."""

    def __init__(self, lanes: list[Lane], channels: tuple[str, ...], pace: Pace | None) -> None:
        self._lanes, self._channels, self._pace = lanes, channels, pace

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """All rows of a task; one row for each lane."""
        import pyarrow as pa

        at_work: dict[int, _LaneThread] = {}
        try:
            for batch in batches:
                for number, rows in by_lane(batch):
                    if number not in at_work:
                        at_work[number] = _LaneThread(self._lanes[number], self._pace)
                    wanted = by_channel(rows, self._channels)
                    if wanted.num_rows:
                        at_work[number].put(wanted)
            counts = [lane.done() for lane in at_work.values()]
        finally:
            for lane in at_work.values():
                lane.leave()
        yield pa.RecordBatch.from_pydict(
            {"messages": [each[0] for each in counts], "before": [each[1] for each in counts]},
            schema=pa.schema([("messages", pa.int64()), ("before", pa.int64())]),
        )


def by_lane(batch: pa.RecordBatch) -> Iterator[tuple[int, pa.RecordBatch]]:
    """A batch's rows by their lane, each lane's in their order."""
    import pyarrow.compute as pc

    lanes = batch.column(_LANE)
    for number in pc.unique(lanes).to_pylist():
        rows = batch.filter(pc.equal(lanes, number))
        yield number, rows.select([name for name in rows.schema.names if name in (*_COLUMNS, DUE)])


def by_channel(batch: pa.RecordBatch, patterns: tuple[str, ...]) -> pa.RecordBatch:
    """The rows whose channel one of the patterns matches."""
    from simplebus.spark.arrow_columns import wanted

    return batch.filter(wanted(batch.column("channel"), patterns)) if patterns else batch


class _LaneThread:
    """A lane at work. Used by one thread, which reads no faster than the lane publishes."""

    def __init__(self, lane: Lane, pace: Pace | None) -> None:
        self._lane, self._pace = lane, pace
        self._rows: queue.Queue[Any] = queue.Queue(_AHEAD)
        self._over = threading.Event()
        self._found: tuple[int, int] = (0, 0)
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=lane.publisher, daemon=True)
        self._thread.start()

    def put(self, rows: pa.RecordBatch | None) -> None:
        """Hand over rows, or None for the end. Raises what the lane died of."""
        while True:
            self._check()
            try:
                self._rows.put(rows, timeout=_PATIENCE_SECONDS)
                return
            except queue.Full:
                continue

    def done(self) -> tuple[int, int]:
        """Wait until all is published. Returns how many there were, and were there before."""
        self.put(None)
        self._thread.join()
        self._check()
        return self._found

    def leave(self) -> None:
        """End, wherever it is. One that hangs on its bus is cut off by whoever comes next under
        the name of its publisher."""
        self._over.set()
        self._thread.join(_GOODBYE_SECONDS)

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        from simplebus.spark.sink import write_task

        rows: Iterator[Any] = self._taken()
        if self._pace is not None:
            rows = _without(paced(rows, self._pace, now=time.time, sleep=self._nap), DUE)
        try:
            written = write_task(rows, self._lane.sink, self._lane.publisher)
            self._found = written.rows, written.stored_before
        except BaseException as error:
            self._error = error

    def _nap(self, seconds: float) -> None:
        if self._over.wait(seconds):
            raise _LeftError

    def _taken(self) -> Iterator[Any]:
        """The rows that come. While none come, some without rows: the bus is to hear of us."""
        rows, spoke = None, time.monotonic()
        while True:
            try:
                rows = self._rows.get(timeout=_PATIENCE_SECONDS)
            except queue.Empty:
                if self._over.is_set():
                    raise _LeftError from None
                if rows is None or time.monotonic() - spoke < SILENCE_SECONDS:
                    continue
                rows = rows.slice(0, 0)
            if rows is None:
                return
            yield rows
            spoke = time.monotonic()


class _LeftError(Exception):
    """The task that a lane was part of is over."""


def _without(batches: Iterator[pa.RecordBatch], name: str) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        yield batch.drop_columns([name])
