"""A driver with a cluster of its own: a master, two workers and two executors, on loopback.

`python -m spark.driver BUS SLOW PLACE`: BUS is a bus, SLOW another way to it, PLACE a folder. Says
what is done, one line each, and then waits for its end.

Rule 1: what a query is, is said here once: whoever takes up after this driver is killed runs the
same queries from the checkpoints that it left.
"""

from __future__ import annotations

import os
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from simplebus.spark.jobs.archive import BatchArchiver, messages
from spark.holding import HeldArchiver, HeldSource

EXECUTORS, CORES = 2, 3
"""A held task holds its core: there is one for each that is held, and more."""


TORN = 4500
"""Messages of the batch that is torn."""


@dataclass(frozen=True)
class Place:
    """Where everything is."""

    bus: str
    slow: str
    folder: Path

    def at(self, name: str) -> str:
        """Where the query of this name can be held."""
        return str(self.folder / name)

    def table(self, name: str) -> str:
        return str(self.folder / f"{name} table")

    def checkpoint(self, name: str) -> Path:
        return self.folder / f"{name} checkpoint"


def copy(spark: Any, place: Place) -> None:
    """A job: what is in class `job` goes to `job copied`, and one task fails on its way."""
    rows = spark.read.format("held").option("at", place.at("job")).option("minPartitions", 2)
    frame = rows.option("servers", place.bus).option("subscribe", "job").load()
    writing = frame.select("value").write.format("simplebus").mode("append")
    writing.option("servers", place.bus).option("class", "job copied").save()


def source(spark: Any, place: Place, name: str, *, server: str = "", held: bool = False) -> Any:
    """A stream of the class of a query's name."""
    rows = spark.readStream.format("held" if held else "simplebus")
    if held:
        rows = rows.option("at", place.at(name))
    rows = rows.option("servers", server or place.bus).option("subscribe", name)
    return rows.option("startingOffsets", "earliest")


def to_bus(place: Place, name: str, frame: Any, *, held: bool = False) -> Any:
    """A query that fills the class NAME copied."""
    sink = frame.select("value").writeStream.format("held" if held else "simplebus")
    if held:
        sink = sink.option("at", place.at(name))
    sink = sink.option("servers", place.bus).option("class", f"{name} copied")
    return sink.option("checkpointLocation", str(place.checkpoint(name)))


def to_files(place: Place, name: str, frame: Any) -> Any:
    """A query that fills a folder of Parquet files, as Spark writes them."""
    sink = frame.writeStream.format("parquet").option("path", place.table(name))
    return sink.option("checkpointLocation", str(place.checkpoint(name)))


def to_archive(place: Place, name: str, frame: Any, kind: str, *, held: bool) -> Any:
    """A query that fills an archive; it can be held when a batch is archived."""
    to = place.table(name)
    archiver = HeldArchiver(to, kind, place.at(name)) if held else BatchArchiver(to, format=kind)
    return frame.writeStream.foreachBatch(archiver).option(
        "checkpointLocation", str(place.checkpoint(name))
    )


def queries(spark: Any, place: Place, *, held: bool) -> dict[str, Any]:
    """What runs until it is killed, by name; with places to be held, or without any."""
    few = 200 if held else 100_000
    hunted = source(spark, place, "hunted").option("maxOffsetsPerTrigger", few).load()
    early = source(spark, place, "early", held=held).option("minPartitions", 2).load()
    torn = source(spark, place, "torn", server=place.slow).option("minPartitions", 2)
    if held:  # Whatever comes behind its first batch is to be one batch.
        torn = torn.option("minOffsetsPerTrigger", TORN)
    kept = messages(spark, servers=place.bus, subscribe="kept")
    return {
        "hunted": to_files(place, "hunted", hunted),
        "early": to_files(place, "early", early),
        "torn": to_bus(place, "torn", torn.load()),
        "published": to_bus(place, "published", kept, held=held),
        "archived": to_archive(place, "archived", kept, "parquet", held=held),
        "delta": to_archive(place, "delta", kept, "delta", held=held),
    }


def cluster(folder: Path) -> Any:
    """A session whose executors are processes of their own, and are sent this package."""
    from simplebus.spark.jobs.session import session

    os.environ["SPARK_LOCAL_DIRS"] = os.environ["SPARK_WORKER_DIR"] = str(folder / "spark")
    quick = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
    settings = {
        "spark.master.ui.port": "0",
        "spark.worker.ui.port": "0",
        "spark.driver.memory": "1g",
        "spark.driver.extraJavaOptions": quick,
        "spark.executor.extraJavaOptions": quick,
        "spark.executor.memory": "512m",
        "spark.executorEnv.PYTHONPATH": str(Path(__file__).parents[1]),  # No simplebus there.
        "spark.sql.shuffle.partitions": "2",
        # Nothing here lasts long enough to be worth compiling.
        "spark.sql.codegen.wholeStage": "false",
        "spark.sql.adaptive.enabled": "false",
        "spark.sql.warehouse.dir": str(folder / "warehouse"),
        # So that a sink is given the rows of a task in several pieces.
        "spark.sql.execution.arrow.maxRecordsPerBatch": "100",
    }
    master = f"local-cluster[{EXECUTORS},{CORES},1024]"
    spark = session("killed", master=master, settings=settings)
    spark.sparkContext.setLogLevel("ERROR")
    spark.dataSource.register(HeldSource)
    return spark


def end_with_parent() -> None:
    """Its end of standard input is closed then, and Spark ends with this process."""
    os.read(0, 1)
    os._exit(1)


def main(bus: str, slow: str, folder: str) -> None:
    threading.Thread(target=end_with_parent, daemon=True).start()
    place = Place(bus, slow, Path(folder))
    spark = cluster(place.folder)
    print("jvm", spark._jvm.java.lang.ProcessHandle.current().pid(), flush=True)
    copy(spark, place)
    print("copied", flush=True)
    for name, writing in queries(spark, place, held=True).items():
        query = writing.trigger(processingTime="300 milliseconds").start()
        first = place.checkpoint(name) / "commits" / "0"
        while not first.exists():  # One by one: Spark gives up on Python processes that come late.
            query.awaitTermination(0.05)
    print("started", flush=True)
    spark.streams.awaitAnyTermination()


if __name__ == "__main__":
    main(*sys.argv[1:])
