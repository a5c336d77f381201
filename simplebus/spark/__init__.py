"""Spark data source and sink for simplebus messages, `format("simplebus")`, and jobs built on it.

Modules in reading order:

    option_names    names of the options, also for the connector
    options         options of the source and the sink, parsed and checked
    arrow_columns   frames to Arrow columns; needs pyarrow
    json_payloads   payloads as typed columns, and values as JSON
    rows            Arrow columns to messages; needs pyarrow
    batch_trigger   decides when the next micro-batch is due
    retry           connects with retries
    error_reports   errors of options and connections without a traceback
    keepalive       heartbeats on connections of a busy program
    connections     the connections of one process, by server
    read            the source: offsets, plan, readers, retention, batch and stream
    source          the data source that Spark loads; needs pyspark, as all below
    sink            batch and stream writers
    java            the connector: source and sink in Java, for sessions that have its jar
    java_runtime    finds a Java runtime for Spark
    spark_home      a Spark home whose Python workers start faster
    jobs            archive, compaction, replay, dead letters and reports
    commands        the jobs as `simplebus pipeline` commands

`pyspark_simplebus` is installed beside this package; Spark finds the data source through it.
Importing this package imports neither pyspark nor pyarrow, and importing simplebus does not import
this package. It may import core, storage, client, jetstream names, config and console.

>>> from simplebus.spark import ensure_java, lag
>>> ensure_java()
>>> from pyspark.sql import SparkSession
>>> spark = SparkSession.builder.getOrCreate()
>>> rows = spark.readStream.format("simplebus").option("servers", "127.0.0.1:8888")
>>> rows = rows.option("subscribe", "orders").load()

The lag of a running query, by server and class:

>>> lag(rows.writeStream.format("noop").start().lastProgress)
"""

from simplebus.spark.java_runtime import JavaError, ensure_java
from simplebus.spark.json_payloads.schema import parse_json, spark_schema
from simplebus.spark.read.progress import lag

__all__ = ["JavaError", "ensure_java", "lag", "parse_json", "spark_schema"]
