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
"""Bytes of payloads that are published to one class before the next class."""
PAYLOAD_BYTES = 128
ROWS = ROWS_BY_SIZE[PAYLOAD_BYTES]
CONNECTOR, PYTHON, PARQUET = "simplebus", "simplebus_python", "parquet"
"""Formats that read the same rows."""
CLASSES = (1, 2)
QUICK_PART = 5
WARM_UPS = 3  # The JVM compiles code meanwhile.
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
            rows += _with_idle_query(spark, IDLE_MESSAGES // part, run_options)
            return rows
    finally:
        spark.stop()


def _register_python_source(spark: Any) -> None:
    """Register the Python source under a separate name, so that both sources can be used."""
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
    """Return a frame of the messages in CLASSES; `reader` is spark.read or spark.readStream."""
    found = reader.format(kind).option("servers", f"{HOST}:{broker.port}")
    all_options = {
        "subscribe": ",".join(map(str, CLASSES)),
        "startingOffsets": "earliest",
        **options,
    }
    for name, value in all_options.items():
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
                parquet / elapsed
                for elapsed, parquet in zip(seconds[kind], seconds[PARQUET], strict=True)
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
    work: Callable[[], object], peer_work: Callable[[], object], *, rounds: int
) -> list[float]:
    """Return how many times faster `work` is than `peer_work`, by round."""
    works = {"work": work, "peer": peer_work}
    seconds = _alternate(lambda kind: works[kind](), tuple(works), rounds)
    return [peer / own for own, peer in zip(seconds["work"], seconds["peer"], strict=True)]


def _seconds(work: Callable[[], object]) -> float:
    started_at = time.monotonic()
    work()
    return time.monotonic() - started_at


def _files(spark: Any, place: Path, count: int, run_options: RunOptions) -> list[Row]:
    """Compare reading a journal's files with reading the bus."""
    data_dir = str(place / "kept")
    with running(
        "simplebus", server_args=[*run_options.server_args, "--data-dir", data_dir]
    ) as broker:
        fill(broker, count)

        def files() -> Any:
            options = {"path": data_dir, "subscribe": ",".join(map(str, CLASSES))}
            return spark.read.format("simplebus").options(**options).load()

        columns = ("value", "topic", "partition", "offset")
        from_files = _digest(files(), columns)
        from_bus = _digest(reading(spark.read, broker), columns)
        if from_files != from_bus or from_files[0] != count:
            raise LoadError(f"the files have {from_files}, the bus {from_bus}, of {count} messages")

        def batch(frame: Callable[[], Any]) -> Callable[[], object]:
            return lambda: frame().write.mode("overwrite").parquet(str(place / "out"))

        ratios = _ratios(
            batch(files), batch(lambda: reading(spark.read, broker)), rounds=run_options.rounds
        )
    title = f"batch of a journal's files to Parquet, against the bus, {count / 1e6:g} M rows"
    return [Row("spark", title, ratios, "x", 1.5)]


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
    rows = _read_count(query)
    if rows != count:
        raise LoadError(f"a stream read {rows} rows of {count}")


def _read_count(query: Any) -> int:
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
                elapsed = _seconds(writing.option("servers", f"{HOST}:{broker.port}").save)
                stored = reading(spark.read, broker, subscribe="1").count()
            if stored != count:
                raise LoadError(f"{kind} wrote {count} rows, and the bus has {stored} messages")
            if turn >= WARM_UPS:
                found.append(elapsed)
    ratios = [
        python / connector
        for connector, python in zip(seconds[CONNECTOR], seconds[PYTHON], strict=True)
    ]
    rates = [count / elapsed for elapsed in seconds[CONNECTOR]]
    title = "rows to the bus, confirmed, by simplebus against simplebus_python"
    return [
        Row("spark", "rows to the bus, confirmed", rates, "rows/s", 300_000),
        Row("spark", title, ratios, "x", 1.5),
    ]


# Archives that follow a bus -----------------------------------------------------------------------


def _followed(spark: Any, place: Path, seconds: int, run_options: RunOptions) -> list[Row]:
    """Archive a bus that gets FOLLOWED_PER_S messages per second."""
    from simplebus.spark.jobs.archive import archive, messages, read

    first, count = FOLLOWED_PER_S * FIRST_S, FOLLOWED_PER_S * seconds
    to = str(place / "archive")
    options: dict[str, Any] = {"timeout_s": TIMEOUT_S, "size": PAYLOAD_BYTES, "classes": 1}
    with running("simplebus", server_args=run_options.server_args) as broker:
        _create_class(broker, 1)
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
                backlog = _sample_backlog(query, broker, seconds)
                result = publisher.result()
            query.processAllAvailable()
        finally:
            query.stop()
    if (elapsed := result["confirmed"] - result["started"]) > seconds * 1.05:
        raise LoadError(f"{count} messages took {elapsed:.1f} s, expected {seconds} s")
    count += first
    stored = tuple(read(spark, to).selectExpr("count(*)", "sum(offset)").first())
    if stored != (count, count * (count - 1) // 2):
        raise LoadError(f"the archive of {count} messages holds {stored}, count and sum of offsets")
    growth = float(np.polyfit(*zip(*backlog[len(backlog) // 3 :], strict=True), 1)[0])
    title = f"growth of the backlog of an archive that follows {FOLLOWED_PER_S:,} messages/s"
    delay_seconds = max(size for _, size in backlog) / FOLLOWED_PER_S
    return [
        Row("spark", title, [growth / FOLLOWED_PER_S], "of them", 0.05, less_is_better=True),
        Row("spark", "longest delay of the archive", [delay_seconds], "s", less_is_better=True),
    ]


def _sample_backlog(query: Any, broker: RunningBroker, seconds: int) -> list[tuple[float, int]]:
    """Sample the time and the number of messages not read yet, for `seconds`."""
    found = []
    with BusReader(f"{HOST}:{broker.port}", timeout=10) as bus:
        started_at = time.monotonic()
        while (now := time.monotonic() - started_at) < seconds:
            found.append((now, bus.get_extent(["1"]).classes["1"].head - _read_count(query)))
            time.sleep(0.5)
    return found


def _create_class(broker: RunningBroker, class_id: int) -> None:
    """Create a class by its id."""
    with BusReader(f"{HOST}:{broker.port}", timeout=10) as bus:
        bus.get_extent([str(class_id)], make=True)


# Idle queries -------------------------------------------------------------------------------------


def _with_idle_query(spark: Any, count: int, run_options: RunOptions) -> list[Row]:
    """Return the rate of the bus alone, and with a query that waits for messages."""
    with running("simplebus", server_args=run_options.server_args) as broker:
        _create_class(broker, IDLE_CLASS)
        found = []
        for turn in range(run_options.rounds + 1):
            alone = measure(broker, "simplebus", Flow(), count=count).rate
            idle = reading(spark.readStream, broker, subscribe=IDLE_CLASS, durable="none")
            query = idle.writeStream.format("noop").start()
            try:
                query.processAllAvailable()
                with_query = measure(broker, "simplebus", Flow(), count=count).rate
            finally:
                query.stop()
            if turn:
                found.append(with_query / alone)
    title = "rate of the bus with an idle query attached, against alone"
    return [Row("spark", title, found, "x", 0.95)]
