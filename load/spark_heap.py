"""Many rows from a bus to an archive and back, through a small heap.

    python load/run.py spark-heap

A publisher fills a class while a query archives it. Then the archive is replayed to another class,
which a second query archives meanwhile. The memory of a class is limited, so publishers wait for
the queries. Both archives must have all messages, in order: payload n is at offset n.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import simplebus
from load.brokers import HOST, RunningBroker, running
from load.measure import RunOptions
from load.processes import LoadError
from load.report import Row

ROWS, QUICK_ROWS = 50_000_000, 2_000_000
HEAP = "3g"
CLASS, COPIES = "rows", "copies"
BATCH = 2_000_000
"""Largest number of messages of a batch of a query."""
PUBLISHED_AT_ONCE = 50_000
PAYLOAD_BYTES = 16
_VALUE = f"unhex(lpad(hex(offset), {2 * PAYLOAD_BYTES}, '0'))"
"""Payload of the message at an offset, as an expression of Spark."""


def run(run_options: RunOptions) -> list[Row]:
    """Return the rows of the scenario. Raises LoadError if an archive is not complete."""
    from simplebus.spark.jobs.replay import replay
    from simplebus.spark.jobs.session import session

    count = QUICK_ROWS if run_options.quick else ROWS
    spark = session("heap", master="local[2]", settings={"spark.driver.memory": HEAP})
    try:
        with (
            running("simplebus", server_args=run_options.server_args) as broker,
            tempfile.TemporaryDirectory(prefix="simplebus-spark-heap-") as folder,
        ):
            place = Path(folder)
            first, second = str(place / "first"), str(place / "second")
            server = f"{HOST}:{broker.port}"
            began = time.monotonic()
            _archive_while(spark, broker, CLASS, first, lambda: _publish(server, count))
            archived_s = time.monotonic() - began
            _check(spark, first, count)

            began = time.monotonic()
            _archive_while(
                spark, broker, COPIES, second, lambda: replay(spark, first, server, to_class=COPIES)
            )
            replayed_s = time.monotonic() - began
            _check(spark, second, count)
            jvm, bus = _peak_memory_bytes(spark), broker.process.peak_memory_bytes()
    finally:
        spark.stop()
    title = f"{count / 1e6:g} M rows"
    return [
        Row("spark-heap", f"{title} published and archived", [count / archived_s], "rows/s"),
        Row("spark-heap", f"{title} replayed and archived", [count / replayed_s], "rows/s"),
        Row("spark-heap", f"peak memory of the JVM, heap {HEAP}", [jvm / 2**30], "GiB"),
        Row("spark-heap", "peak memory of the bus", [bus / 2**30], "GiB"),
    ]


def _archive_while(
    spark: Any, broker: RunningBroker, class_: str, to: str, publish: Callable[[], object]
) -> None:
    """Archive a class while it is published. Return when all messages are archived."""
    from simplebus.spark.jobs.archive import archive, messages

    rows = messages(
        spark,
        servers=f"{HOST}:{broker.port}",
        subscribe=class_,
        maxOffsetsPerTrigger=BATCH,
        timeout=120,
    )
    query = archive(rows, to, every=0.0)
    try:
        query.processAllAvailable()  # From here on, the bus keeps messages for the query.
        publish()
        query.processAllAvailable()
    finally:
        query.stop()


def _publish(server: str, count: int) -> None:
    with simplebus.connect_blocking(server) as bus:
        for first in range(0, count, PUBLISHED_AT_ONCE):
            last = min(first + PUBLISHED_AT_ONCE, count)
            numbers = np.zeros((last - first, PAYLOAD_BYTES // 8), ">u8")
            numbers[:, -1] = np.arange(first, last)
            text = numbers.tobytes()
            ends = range(PAYLOAD_BYTES, len(text) + 1, PAYLOAD_BYTES)
            bus.publish_many([text[end - PAYLOAD_BYTES : end] for end in ends], class_id=CLASS)


def _check(spark: Any, path: str, count: int) -> None:
    """Compare an archive with numbers from Spark. Raises LoadError."""
    from simplebus.spark.jobs.archive import read

    digest = ("count(*)", "sum(offset)", "bit_xor(xxhash64(offset, value))")
    found = tuple(read(spark, path).selectExpr(*digest).first())
    numbers = spark.range(count).selectExpr("id offset").selectExpr("offset", f"{_VALUE} value")
    expected = tuple(numbers.selectExpr(*digest).first())
    if found != expected:
        raise LoadError(f"{path} has {found}: count, sum of offsets, digest; expected {expected}")


def _peak_memory_bytes(spark: Any) -> int:
    """Return the peak memory of the JVM."""
    pid = spark.sparkContext._jvm.java.lang.ProcessHandle.current().pid()
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise LoadError(f"/proc has no peak memory of the process {pid}")
