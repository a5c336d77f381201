"""Program that uses the data source in Python several times in a session without the connector.

`python -m tests.spark.python_source_program BUS FOLDER`: BUS is the address of a bus with class 1.
"""

from __future__ import annotations

import sys
from pathlib import Path

from simplebus.spark.java_runtime import ensure_java
from simplebus.spark.jobs.replay import replay
from tests.spark.fast_start import JAVA_OPTIONS


def main(bus: str, folder: str) -> None:
    ensure_java()
    from pyspark.sql import SparkSession

    settings = {
        "spark.ui.enabled": "false",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.memory": "1g",
        "spark.driver.extraJavaOptions": JAVA_OPTIONS,
        "spark.sql.shuffle.partitions": "2",
        "spark.sql.codegen.wholeStage": "false",
        "spark.sql.codegen.factoryMode": "NO_CODEGEN",
        "spark.python.daemon.module": "tests.spark.forks",
    }
    builder = SparkSession.builder.master("local[2]").appName("without the connector")
    for name, value in settings.items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    values = spark.range(20).selectExpr("cast(string(id) as binary) value", "id offset")
    for _ in range(2):
        writing = values.select("value").write.format("simplebus").mode("append")
        writing.options(servers=bus, **{"class": "written"}).save()
    for _ in range(2):
        spark.read.format("simplebus").options(servers=bus, subscribe="1").load().count()
    rows = spark.readStream.format("simplebus").options(servers=bus, subscribe="1").load()
    writing = rows.selectExpr("value", "'copied' class").writeStream.format("simplebus")
    writing = writing.option("servers", bus).trigger(availableNow=True)
    writing.option(
        "checkpointLocation", str(Path(folder) / "checkpoint")
    ).start().awaitTermination()
    archive = str(Path(folder) / "archive")
    parts = values.selectExpr("*", "'7' class", "date'2026-01-01' date")
    parts.write.partitionBy("class", "date").parquet(archive)
    for _ in range(2):
        print(replay(spark, archive, bus, name="again"))
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
