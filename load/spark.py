"""Rate of the Spark connector and the Python source and sink, and of Spark's own Parquet files.

    python load/run.py spark

All sides of a ratio read the same rows in the same session, in turn. Their content is compared
before timing. A query is timed from start to end, as a user waits for it. Written messages are
counted at the bus.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import simplebus
from load.brokers import HOST, RunningBroker, running
from load.generators import Generator
from load.measure import Flow, RunOptions, measure
from load.processes import LoadError
from load.report import Row
from simplebus.spark.read.bus_reader import BusReader

ROWS_BY_SIZE = {16: 4_000_000, 128: 2_000_000, 1024: 400_000}
"""Number of messages, by bytes of a payload."""
SINK_ROWS = 1_000_000
FILL_BYTES = 8_000_000
"""Bytes of payloads that are published to one class before the next one has its turn."""
PAYLOAD_BYTES = 128
ROWS = ROWS_BY_SIZE[PAYLOAD_BYTES]
CONNECTOR, PYTHON, PARQUET = "simplebus", "simplebus_python", "parquet"
"""Formats that read the same rows."""
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
        _register_python_source(spark)
        with tempfile.TemporaryDirectory(prefix="simplebus-load-") as folder:
            place, rows = Path(folder), []
            for size, count in ROWS_BY_SIZE.items():
                with running("simplebus", server_args=run_options.server_args) as broker:
                    fill(broker, count // part, size)
                    rows += _compared(
                        spark, broker, place / str(size), size, count // part, run_options.rounds
                    )
            place /= str(PAYLOAD_BYTES)
            rows += _files(spark, place, ROWS // part, run_options)
            rows += _written(spark, place, SINK_ROWS // part, run_options)
            rows += _followed(spark, place, FOLLOWED_S // part, run_options)
            rows += _beside(spark, IDLE_MESSAGES // part, run_options)
            return rows
    finally:
        spark.stop()


def _register_python_source(spark: Any) -> None:
    """Register the source in Python under a name of its own, beside the connector."""
    from simplebus.spark.source import SimplebusSource

    class PythonSource(SimplebusSource):  # Local, so that it is sent to the workers.
        @classmethod
        def name(cls) -> str:
            return PYTHON

    spark.dataSource.register(PythonSource)


def fill(broker: RunningBroker, count: int, size: int = PAYLOAD_BYTES) -> None:
    """Publish messages to CLASSES in turn, with random payloads: Parquet stores equal ones once."""
    source = np.random.default_rng(0)
    step = min(count, FILL_BYTES // size)
    with simplebus.connect_blocking(f"{HOST}:{broker.port}") as bus:
        for number, first in enumerate(range(0, count, step)):
            rows = min(step, count - first)
            text = source.bytes(rows * size)
            payloads = [text[at : at + size] for at in range(0, rows * size, size)]
            bus.publish_many(payloads, class_id=CLASSES[number % len(CLASSES)])


def reading(reader: Any, broker: RunningBroker, kind: str = CONNECTOR, **options: object) -> Any:
    """A frame of the messages in CLASSES; reader is spark.read or spark.readStream."""
    found = reader.format(kind).option("servers", f"{HOST}:{broker.port}")
    given = {"subscribe": ",".join(map(str, CLASSES)), "startingOffsets": "earliest", **options}
    for name, value in given.items():
        found = found.option(name, str(value))
    return found.load()


# Reading ------------------------------------------------------------------------------------------


def _compared(
    spark: Any, broker: RunningBroker, place: Path, size: int, count: int, rounds: int
) -> list[Row]:
    """Compare connector, Python source and Parquet files with the same rows."""
    files = str(place / "files")
    reading(spark.read, broker).write.parquet(files)
    schema = spark.read.parquet(files).schema

    def frame(kind: str) -> Any:
        return spark.read.parquet(files) if kind == PARQUET else reading(spark.read, broker, kind)

    def stream(kind: str) -> Any:
        if kind == PARQUET:
            return spark.readStream.schema(schema).parquet(files)
        return reading(spark.readStream, broker, kind, durable="none")

    digests = {kind: _digest(frame(kind)) for kind in (CONNECTOR, PYTHON, PARQUET)}
    if len(set(digests.values())) > 1 or digests[CONNECTOR][0] != count:
        raise LoadError(f"of {count} messages, the sources gave {digests}")
    out = place / "out"
    works: dict[str, tuple[Callable[[str], object], float]] = {
        "batch to noop": (lambda kind: _discard(frame(kind)), 0.9 if size > 128 else 1.0),
        "one column to noop": (lambda kind: _discard(frame(kind).select("value")), 1.0),
    }
    if size == PAYLOAD_BYTES:
        works |= {
            "stream to noop": (lambda kind: _stream(stream(kind), out, count, "noop"), 0.9),
            "batch to Parquet": (
                lambda kind: frame(kind).write.mode("overwrite").parquet(str(out)),
                1.0,
            ),
            "stream to Parquet": (
                lambda kind: _stream(stream(kind), out, count, "parquet"),
                0.9,
            ),
        }
    found = []
    for name, (work, target) in works.items():
        seconds = _alternate(work, (CONNECTOR, PYTHON, PARQUET), rounds)
        for kind, bar in ((CONNECTOR, target), (PYTHON, None)):
            ratios = [
                theirs / ours for ours, theirs in zip(seconds[kind], seconds[PARQUET], strict=True)
            ]
            title = f"{name} of {size} B by {kind} against Parquet, {count / 1e6:g} M rows"
            found.append(Row("spark", title, ratios, "x", bar))
    return found


def _discard(frame: Any) -> None:
    frame.write.format("noop").mode("overwrite").save()


def _alternate(
    work: Callable[[str], object], kinds: tuple[str, ...], rounds: int
) -> dict[str, list[float]]:
    """Return the seconds of each kind, measured in turn."""
    for _ in range(WARM_UPS):
        for kind in kinds:
            work(kind)
    found: dict[str, list[float]] = {kind: [] for kind in kinds}
    for _ in range(rounds):
        for kind in kinds:
            found[kind].append(_seconds(partial(work, kind)))
    return found


def _ratios(
    ours: Callable[[], object], theirs: Callable[[], object], *, rounds: int
) -> list[float]:
    works = {"ours": ours, "theirs": theirs}
    seconds = _alternate(lambda kind: works[kind](), tuple(works), rounds)
    return [theirs / ours for ours, theirs in zip(seconds["ours"], seconds["theirs"], strict=True)]


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


def _stream(frame: Any, out: Path, count: int, sink: str) -> None:
    """Run one query over the available messages. Raises LoadError unless it read `count` rows."""
    shutil.rmtree(out, ignore_errors=True)
    writing = frame.writeStream.format(sink).trigger(availableNow=True)
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
    """Publish the rows of Parquet files, one per core, with confirms, by both sinks in turn."""
    frame = spark.read.parquet(str(place / "files")).select("value").limit(count)
    frame.repartition(2).write.parquet(str(place / "values"))
    values = spark.read.parquet(str(place / "values"))
    seconds: dict[str, list[float]] = {CONNECTOR: [], PYTHON: []}
    for turn in range(run_options.rounds + WARM_UPS):
        for kind, found in seconds.items():
            with running("simplebus", server_args=run_options.server_args) as broker:
                writing = values.write.format(kind).mode("append").option("class", "1")
                took = _seconds(writing.option("servers", f"{HOST}:{broker.port}").save)
                there = reading(spark.read, broker, subscribe="1").count()
            if there != count:
                raise LoadError(f"{kind} was given {count} rows, and the bus has {there} messages")
            if turn >= WARM_UPS:
                found.append(took)
    ratios = [
        theirs / ours for ours, theirs in zip(seconds[CONNECTOR], seconds[PYTHON], strict=True)
    ]
    rates = [count / took for took in seconds[CONNECTOR]]
    title = "rows to the bus, confirmed, by simplebus against simplebus_python"
    return [
        Row("spark", "rows to the bus, confirmed", rates, "rows/s", 300_000),
        Row("spark", title, ratios, "x", 1.5),
    ]


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


def _waiting(query: Any, broker: RunningBroker, seconds: int) -> list[tuple[float, int]]:
    """Sample the time and the number of messages not read yet, for `seconds`."""
    found = []
    with BusReader(f"{HOST}:{broker.port}", timeout=10) as bus:
        begun = time.monotonic()
        while (now := time.monotonic() - begun) < seconds:
            found.append((now, bus.get_extent(["1"]).classes["1"].head - _done(query)))
            time.sleep(0.5)
    return found


def _name(broker: RunningBroker, class_id: int) -> None:
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
