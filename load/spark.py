"""Rate of the Spark source and sink, against Spark's own Parquet files.

    python load/run.py spark

Both sides of a ratio read the same rows in the same session, in turn. Their content is compared
before timing. A query is timed from start to end, as a user waits for it. Written messages are
counted at the bus.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from load.brokers import HOST, Broker, running
from load.generators import Generator
from load.measure import Flow, RunOptions, measure
from load.processes import LoadError
from load.report import Row
from simplebus.spark.read.bus_reader import BusReader

ROWS = 2_000_000
SINK_ROWS = 1_000_000
PAYLOAD_BYTES = 128
CLASSES = (1, 2)
QUICK_PART = 5
WARM_UPS = 3  # The JVM learns.
FOLLOWED_PER_S = 200_000
FOLLOWED_S = 40
FIRST_S = 5
"""Seconds of messages archived before the measurement, to warm up the JVM."""
IDLE_MESSAGES = 30_000_000
IDLE_CLASS = 9
TIMEOUT_S = 300
SETTINGS = {"spark.sql.streaming.numRecentProgressUpdates": "10000"}


def run(run_options: RunOptions) -> list[Row]:
    """Return the rows of the scenario."""
    from simplebus.spark.jobs.session import session

    part = QUICK_PART if run_options.quick else 1

    spark = session("load", master="local[2]", settings=SETTINGS)
    try:
        with tempfile.TemporaryDirectory(prefix="simplebus-load-") as folder:
            place = Path(folder)
            with running("simplebus", server_args=run_options.server_args) as broker:
                fill(broker, ROWS // part)
                rows = _compared(spark, broker, place, ROWS // part, run_options.rounds)
            rows += _files(spark, place, ROWS // part, run_options)
            rows += _written(spark, place, SINK_ROWS // part, run_options)
            rows += _followed(spark, place, FOLLOWED_S // part, run_options)
            rows += _beside(spark, IDLE_MESSAGES // part, run_options)
            return rows
    finally:
        spark.stop()


def fill(broker: Broker, count: int) -> None:
    """Publish messages to CLASSES in turn."""
    classes = ",".join(map(str, CLASSES))
    options: dict[str, Any] = {"count": count, "size": PAYLOAD_BYTES, "classes": classes}
    with Generator("publish", "simplebus", broker.port, timeout_s=60, **options) as publisher:
        publisher.result()


def reading(reader: Any, broker: Broker, **options: object) -> Any:
    """A frame of the messages in CLASSES; reader is spark.read or spark.readStream."""
    found = reader.format("simplebus").option("servers", f"{HOST}:{broker.port}")
    given = {"subscribe": ",".join(map(str, CLASSES)), "startingOffsets": "earliest", **options}
    for name, value in given.items():
        found = found.option(name, str(value))
    return found.load()


# Reading ------------------------------------------------------------------------------------------


def _compared(spark: Any, broker: Broker, place: Path, count: int, rounds: int) -> list[Row]:
    files = str(place / "files")
    reading(spark.read, broker).write.parquet(files)
    ours, theirs = _digest(reading(spark.read, broker)), _digest(spark.read.parquet(files))
    if ours != theirs or ours[0] != count:
        raise LoadError(f"the bus gave {ours}, the files hold {theirs}, of {count} messages")
    kind = spark.read.parquet(files).schema

    def batch(frame: Any) -> Callable[[], object]:
        return lambda: frame().write.format("noop").mode("overwrite").save()

    def stream(frame: Any) -> Callable[[], object]:
        return lambda: _stream(spark, frame(), place / "out", count)

    pairs: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
        "batch to noop": (
            batch(lambda: reading(spark.read, broker)),
            batch(lambda: spark.read.parquet(files)),
        ),
        "stream to Parquet": (
            stream(lambda: reading(spark.readStream, broker, durable="none")),
            stream(lambda: spark.readStream.schema(kind).parquet(files)),
        ),
    }
    return [
        Row(
            "spark",
            f"{name} against Spark's own Parquet source, {count / 1e6:g} M rows",
            _ratios(*pair, rounds=rounds),
            "x",
            0.8,
        )
        for name, pair in pairs.items()
    ]


def _ratios(
    ours: Callable[[], object], theirs: Callable[[], object], *, rounds: int
) -> list[float]:
    for _ in range(WARM_UPS):
        ours(), theirs()
    return [_seconds(theirs) / _seconds(ours) for _ in range(rounds)]


def _seconds(work: Callable[[], object]) -> float:
    begun = time.monotonic()
    work()
    return time.monotonic() - begun


def _files(spark: Any, place: Path, count: int, run_options: RunOptions) -> list[Row]:
    """Compare reading a journal's files with reading the bus."""
    kept = str(place / "kept")
    with running("simplebus", server_args=[*run_options.server_args, "--data-dir", kept]) as broker:
        fill(broker, count)

        def files() -> Any:
            given = {"path": kept, "subscribe": ",".join(map(str, CLASSES))}
            return spark.read.format("simplebus").options(**given).load()

        columns = ("value", "topic", "partition", "offset")
        ours, theirs = _digest(files(), columns), _digest(reading(spark.read, broker), columns)
        if ours != theirs or ours[0] != count:
            raise LoadError(f"the files gave {ours}, the bus {theirs}, of {count} messages")

        def batch(frame: Callable[[], Any]) -> Callable[[], object]:
            return lambda: frame().write.mode("overwrite").parquet(str(place / "out"))

        ratios = _ratios(
            batch(files), batch(lambda: reading(spark.read, broker)), rounds=run_options.rounds
        )
    what = f"batch of a journal's files to Parquet, against the bus, {count / 1e6:g} M rows"
    return [Row("spark", what, ratios, "x", 1.5)]


_COLUMNS = ("value", "topic", "partition", "offset", "timestamp", "server")


def _digest(frame: Any, columns: tuple[str, ...] = _COLUMNS) -> tuple[int, ...]:
    """Return the row count and order-independent sums over all bytes."""
    from pyspark.sql import functions as sql

    hashed = sql.xxhash64(*columns)
    row = frame.select(sql.count("*"), sql.sum("offset"), sql.bit_xor(hashed)).first()
    return tuple(row)


def _stream(spark: Any, frame: Any, out: Path, count: int) -> None:
    """Run one query over the available messages. Raises LoadError unless it read `count` rows."""
    shutil.rmtree(out, ignore_errors=True)
    writing = frame.writeStream.format("parquet").trigger(availableNow=True)
    query = writing.option("checkpointLocation", str(out / "checkpoint")).start(str(out / "table"))
    if not query.awaitTermination(TIMEOUT_S):
        raise LoadError(f"a stream did not end within {TIMEOUT_S} s: {query.status}")
    rows = _done(query)
    if rows != count:
        raise LoadError(f"a stream read {rows} rows of {count}")


def _done(query: Any) -> int:
    """Return the number of rows that a query has read."""
    return sum(progress["numInputRows"] for progress in query.recentProgress)


# Writing ------------------------------------------------------------------------------------------


def _written(spark: Any, place: Path, count: int, run_options: RunOptions) -> list[Row]:
    """Publish the rows of Parquet files, one per core, with confirms."""
    frame = spark.read.parquet(str(place / "files")).select("value").limit(count)
    frame.repartition(2).write.parquet(str(place / "values"))
    values = spark.read.parquet(str(place / "values"))
    found = []
    for turn in range(run_options.rounds + WARM_UPS):
        with running("simplebus", server_args=run_options.server_args) as broker:
            writing = values.write.format("simplebus").mode("append")
            writing = writing.option("servers", f"{HOST}:{broker.port}").option("class", "1")
            seconds = _seconds(writing.save)
            there = reading(spark.read, broker, subscribe="1").count()
        if there != count:
            raise LoadError(f"a sink was given {count} rows, and the bus has {there} messages")
        if turn >= WARM_UPS:
            found.append(count / seconds)
    return [Row("spark", "rows to the bus, confirmed", found, "rows/s", 300_000)]


# Following ----------------------------------------------------------------------------------------


def _followed(spark: Any, place: Path, seconds: int, run_options: RunOptions) -> list[Row]:
    """Archive a bus that gets FOLLOWED_PER_S messages per second."""
    from simplebus.spark.jobs.archive import archive, messages, read

    first, count = FOLLOWED_PER_S * FIRST_S, FOLLOWED_PER_S * seconds
    to = str(place / "archive")
    options: dict[str, Any] = {"timeout_s": TIMEOUT_S, "size": PAYLOAD_BYTES, "classes": 1}
    with running("simplebus", server_args=run_options.server_args) as broker:
        _name(broker, 1)
        rows = messages(spark, servers=f"{HOST}:{broker.port}", subscribe="1")
        query = archive(rows, to, every=0.0)
        try:
            with Generator(
                "publish", "simplebus", broker.port, count=first, **options
            ) as publisher:
                publisher.result()
            query.processAllAvailable()
            options |= {"count": count, "pace": FOLLOWED_PER_S}
            with Generator("publish", "simplebus", broker.port, **options) as publisher:
                waiting = _waiting(query, broker, seconds)
                result = publisher.result()
            query.processAllAvailable()
        finally:
            query.stop()
    if (took := result["confirmed"] - result["started"]) > seconds * 1.05:
        raise LoadError(f"{count} messages took {took:.1f} s, wanted {seconds} s")
    count += first
    there = tuple(read(spark, to).selectExpr("count(*)", "sum(offset)").first())
    if there != (count, count * (count - 1) // 2):
        raise LoadError(f"the archive of {count} messages holds {there}, count and sum of offsets")
    growth = float(np.polyfit(*zip(*waiting[len(waiting) // 3 :], strict=True), 1)[0])
    title = f"growth of what waits for an archive that follows {FOLLOWED_PER_S:,} messages/s"
    behind = max(waits for _, waits in waiting) / FOLLOWED_PER_S
    return [
        Row("spark", title, [growth / FOLLOWED_PER_S], "of them", 0.05, less_is_better=True),
        Row("spark", "the most that it is behind", [behind], "s", less_is_better=True),
    ]


def _waiting(query: Any, broker: Broker, seconds: int) -> list[tuple[float, int]]:
    """Sample the time and the number of messages not read yet, for `seconds`."""
    found = []
    with BusReader(f"{HOST}:{broker.port}", timeout=10) as bus:
        begun = time.monotonic()
        while (now := time.monotonic() - begun) < seconds:
            found.append((now, bus.get_extent(["1"]).classes["1"].head - _done(query)))
            time.sleep(0.5)
    return found


def _name(broker: Broker, class_id: int) -> None:
    """Create a class by its id."""
    with BusReader(f"{HOST}:{broker.port}", timeout=10) as bus:
        bus.get_extent([str(class_id)], make=True)


# Beside -------------------------------------------------------------------------------------------


def _beside(spark: Any, count: int, run_options: RunOptions) -> list[Row]:
    """Return the rate of the bus alone, and with a query that waits for messages."""
    with running("simplebus", server_args=run_options.server_args) as broker:
        _name(broker, IDLE_CLASS)
        found = []
        for turn in range(run_options.rounds + 1):
            alone = measure(broker, "simplebus", Flow(), count=count).rate
            idle = reading(spark.readStream, broker, subscribe=IDLE_CLASS, durable="none")
            query = idle.writeStream.format("noop").start()
            try:
                query.processAllAvailable()
                beside = measure(broker, "simplebus", Flow(), count=count).rate
            finally:
                query.stop()
            if turn:
                found.append(beside / alone)
    title = "rate of the bus with an idle query attached, against alone"
    return [Row("spark", title, found, "x", 0.95)]
