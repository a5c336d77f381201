"""Messages as DataFrames, and DataFrames as messages: `format("simplebus")`.

    options     what a job may be told                                  PURE
    offsets     how far a query has come                                PURE
    progress    what a query's progress says: messages that wait        PURE
    planner     from offsets to ranges: what is read next               PURE
    filters     what a job's filters leave out                          PURE
    pace        when the next batch is due                              PURE
    columns     from frames to Arrow columns                            PURE, with pyarrow
    rows        from Arrow columns to messages                          PURE, with pyarrow
    java        a Java for Spark, wherever it comes from
    home        a home of Spark's whose Python processes start sooner
    bus         what a bus is asked: classes, what they hold, ranges
    journal     the same of a journal's files, without a bus
    buses       the connections of one process
    patience    connections of tasks, tried for a while
    awake       signs of life while a query is busy with a batch
    seeking     from times to offsets
    pin         what keeps messages until a query has processed them
    keeping     the pins of one query
    tasks       what executors read                                     pyspark from here on
    source      `spark.read`, and the door to the others
    stream      `spark.readStream`
    sink        `frame.write`, `frame.writeStream`

`pyspark_simplebus`, which Spark looks for by itself, is installed beside this package.

>>> from simplebus.spark import ensure_java, lag
>>> ensure_java()
>>> from pyspark.sql import SparkSession
>>> spark = SparkSession.builder.getOrCreate()
>>> rows = spark.readStream.format("simplebus").option("servers", "127.0.0.1:8888")
>>> rows = rows.option("subscribe", "orders").load()

How far a running query is behind, by server and class:

>>> lag(rows.writeStream.format("noop").start().lastProgress)

Rule 1: importing simplebus never imports this package, and importing this package never imports
pyspark or pyarrow.
"""

from simplebus.spark.java import JavaError, ensure_java
from simplebus.spark.read.progress import lag

__all__ = ["JavaError", "ensure_java", "lag"]
