"""Driver program on a standalone cluster of two workers, which write numbers to a bus.

`python -m tests.spark.executor_program BUS FOLDER`: the connector writes the numbers below ROWS to
class 1 of the bus, in two tasks, each in its own executor. The program prints `done` at the end.
Its caller ends the cluster: all processes are of the same session.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from tests.spark.fast_start import JAVA_OPTIONS

ROWS = 20_000


def start_cluster() -> str:
    """Start a master and two workers with a core each. Return the address of the master.

    The three of them share a JVM, because each JVM takes seconds to start.
    """
    from pyspark.java_gateway import launch_gateway

    from simplebus.spark.java_runtime import ensure_java

    ensure_java()
    os.environ["SPARK_SUBMIT_OPTS"] = JAVA_OPTIONS
    jvm = launch_gateway().jvm
    settings = jvm.org.apache.spark.SparkConf(False)
    cluster = jvm.org.apache.spark.deploy.LocalSparkCluster(2, 1, 512, settings)
    (address,) = cluster.start()
    return str(address)


def main(bus: str, folder: str) -> None:
    from simplebus.spark.jobs.session import session

    os.environ["SPARK_LOCAL_DIRS"] = os.environ["SPARK_WORKER_DIR"] = str(Path(folder) / "spark")
    os.environ["SPARK_LOCAL_IP"] = "127.0.0.1"
    settings = {
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.ui.enabled": "false",
        "spark.driver.extraJavaOptions": JAVA_OPTIONS,
        "spark.executor.extraJavaOptions": JAVA_OPTIONS,
        "spark.executor.memory": "512m",
        "spark.sql.codegen.wholeStage": "false",
        "spark.sql.codegen.factoryMode": "NO_CODEGEN",
        "spark.sql.warehouse.dir": str(Path(folder) / "warehouse"),
    }
    spark = session("killed executor", master=start_cluster(), settings=settings)
    rows = spark.range(0, ROWS, 1, 2).selectExpr("cast(id as string) value")
    rows.write.format("simplebus").mode("append").option("class", "1").save(bus)
    print("done", flush=True)
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
