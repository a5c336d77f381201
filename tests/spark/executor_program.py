"""Driver program with an executor in a process of its own, which writes numbers to a bus.

`python -m tests.spark.executor_program BUS FOLDER`: the connector writes the numbers below ROWS to
class 1 of the bus, in two tasks. The program prints `done` at the end.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from tests.spark.fast_start import JAVA_OPTIONS

ROWS = 20_000


def main(bus: str, folder: str) -> None:
    from simplebus.spark.jobs.session import session

    os.environ["SPARK_LOCAL_DIRS"] = os.environ["SPARK_WORKER_DIR"] = str(Path(folder) / "spark")
    settings = {
        "spark.master.ui.port": "0",
        "spark.worker.ui.port": "0",
        "spark.driver.extraJavaOptions": JAVA_OPTIONS,
        "spark.executor.extraJavaOptions": JAVA_OPTIONS,
        "spark.executor.memory": "512m",
        "spark.sql.warehouse.dir": str(Path(folder) / "warehouse"),
    }
    spark = session("killed executor", master="local-cluster[1,2,1024]", settings=settings)
    rows = spark.range(0, ROWS, 1, 2).selectExpr("cast(id as string) value")
    rows.write.format("simplebus").mode("append").option("class", "1").save(bus)
    print("done", flush=True)
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
