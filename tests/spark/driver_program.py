"""Driver program with its own cluster: a master, a worker and an executor on loopback.

`python -m tests.spark.driver_program BUS SLOW PLACE`: BUS is the address of a bus, SLOW the address
of a proxy to it that stalls, PLACE a folder. The program prints the PID of its JVM and runs until
killed.

The queries are defined here only, so a session that continues after the driver is killed runs the
same queries from the same checkpoints.
"""

from __future__ import annotations

import os
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from simplebus.spark.jobs.archive import BatchArchiver
from tests.spark.fast_start import JAVA_OPTIONS
from tests.spark.paused_queries import HeldArchiver, HeldSource, is_held

CORES = 4
"""Two held tasks block two cores, and two more tasks run at the same time."""


@dataclass(frozen=True)
class Place:
    """Bus addresses and folders of the queries."""

    bus: str
    slow: str
    folder: Path

    def at(self, name: str) -> str:
        """Return the path at which the query `name` can be held."""
        return str(self.folder / name)

    def table(self, name: str) -> str:
        return str(self.folder / f"{name} table")

    def checkpoint(self, name: str) -> Path:
        return self.folder / f"{name} checkpoint"


def source(spark: Any, servers: str, class_: str, *, has_holds: bool, **more: str) -> Any:
    """Return a stream of a class, in two tasks.

    If queries are held, all of them use the same format, because each format has its own Python
    processes.
    """
    rows = spark.readStream.format("held" if has_holds else "simplebus").option("servers", servers)
    rows = rows.option("subscribe", class_).option("startingOffsets", "earliest")
    return rows.option("minPartitions", 2).options(**(more if has_holds else {})).load()


def to_bus(place: Place, name: str, frame: Any, *, has_holds: bool = False) -> Any:
    """Start a query that writes to the class "NAME copied"."""
    sink = frame.select("value").writeStream.format("held" if has_holds else "simplebus")
    if has_holds:
        sink = sink.option("at", place.at(name))
    sink = sink.option("servers", place.bus).option("class", f"{name} copied")
    return sink.option("checkpointLocation", str(place.checkpoint(name)))


def to_files(place: Place, name: str, frame: Any) -> Any:
    """Start a query that writes Parquet files by Spark."""
    sink = frame.writeStream.format("parquet").option("path", place.table(name))
    return sink.option("checkpointLocation", str(place.checkpoint(name)))


def to_archive(place: Place, name: str, frame: Any, *, has_holds: bool) -> Any:
    """Start a query that writes an archive; it can wait after a batch."""
    to = place.table(name)
    archiver = HeldArchiver(to, place.at(name)) if has_holds else BatchArchiver(to, format="delta")
    return frame.writeStream.foreachBatch(archiver).option(
        "checkpointLocation", str(place.checkpoint(name))
    )


def queries(spark: Any, place: Place, *, has_holds: bool) -> dict[str, Any]:
    """Return the queries by name. If `has_holds` is true, they stop at their hold points."""
    early = source(spark, place.bus, "early", has_holds=has_holds, at=place.at("early"))
    published = source(
        spark, place.bus, "kept", has_holds=has_holds, at=place.at("dying"), dies="true"
    )
    archived = source(spark, place.bus, "kept", has_holds=has_holds)
    torn = source(spark, place.slow, "torn", has_holds=has_holds)
    return {
        "early": to_files(place, "early", early),
        "published": to_bus(place, "published", published, has_holds=has_holds),
        "delta": to_archive(place, "delta", archived, has_holds=has_holds),
        "torn": to_bus(place, "torn", torn, has_holds=has_holds),
    }


def tests_without_simplebus(folder: Path) -> Path:
    """Return a folder in which `tests` can be imported, and `simplebus` cannot."""
    path = folder / "tests_only"
    path.mkdir()
    (path / "tests").symlink_to(Path(__file__).parents[1])
    return path


def cluster(folder: Path) -> Any:
    """Return a session with one executor in a separate process, which the driver sends this
    package.

    Further executors would behave the same, and each takes as long to start.
    """
    from simplebus.spark.jobs.session import session

    os.environ["SPARK_LOCAL_DIRS"] = os.environ["SPARK_WORKER_DIR"] = str(folder / "spark")
    settings = {
        "spark.master.ui.port": "0",
        "spark.worker.ui.port": "0",
        "spark.driver.memory": "1g",
        "spark.driver.extraJavaOptions": JAVA_OPTIONS,
        "spark.executor.extraJavaOptions": JAVA_OPTIONS,
        "spark.executor.memory": "512m",
        "spark.executorEnv.PYTHONPATH": str(tests_without_simplebus(folder)),
        "spark.python.daemon.module": "tests.spark.forks",
        "spark.sql.shuffle.partitions": "2",
        # Compiling takes longer than these short queries.
        "spark.sql.codegen.wholeStage": "false",
        "spark.sql.codegen.factoryMode": "NO_CODEGEN",
        "spark.sql.adaptive.enabled": "false",
        "spark.sql.warehouse.dir": str(folder / "warehouse"),
        # A sink receives the rows of a task in several pieces.
        "spark.sql.execution.arrow.maxRecordsPerBatch": "100",
    }
    master = f"local-cluster[1,{CORES},1024]"
    spark = session("killed", master=master, settings=settings)
    spark.sparkContext.setLogLevel("ERROR")
    spark.dataSource.register(HeldSource)
    return spark


def end_with_parent() -> None:
    """End this process when its parent ends, which closes standard input."""
    os.read(0, 1)
    os._exit(1)


def main(bus: str, slow: str, folder: str) -> None:
    threading.Thread(target=end_with_parent, daemon=True).start()
    place = Place(bus, slow, Path(folder))
    spark = cluster(place.folder)
    print("jvm", spark._jvm.java.lang.ProcessHandle.current().pid(), flush=True)
    for name, writing in queries(spark, place, has_holds=True).items():
        query = writing.start()
        # Start one query after the other: Spark gives up on Python processes that start late.
        while name != "torn" and not is_held(place.at(name)):
            query.awaitTermination(0.05)
    spark.streams.awaitAnyTermination()


if __name__ == "__main__":
    main(*sys.argv[1:])
