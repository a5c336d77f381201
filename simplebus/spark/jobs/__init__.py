"""Spark jobs for messages, as functions of a session or a DataFrame.

`simplebus pipeline` offers them as commands. Modules in reading order:

    session         creates a Spark session with `format("simplebus")`
    progress        progress display, interruption and error texts of a running query
    archive_layout  paths of an archive, and the choice of files to merge; no I/O
    archive_commit  crash-safe changes of an archive, over ArchiveFiles
    hadoop          ArchiveFiles over Spark's file systems
    delta           archive as a Delta table
    archive         archives a stream of messages, each once
    compaction      merges small files of an archive
    pacing          due times of replayed messages; no clock
    replay          publishes an archive to a bus
    dead_letters    dead letters by class, reason and subscription
    archive_report  figures of an archive; numpy only
    report          rates, latencies and losses from traces and archives

Importing a job does not import pyspark; running it does. Jobs may import simplebus.spark and core.

>>> from simplebus.spark.jobs.archive import archive, messages
>>> from simplebus.spark.jobs.session import session
>>> spark = session("archive of orders")
>>> rows = messages(spark, servers="127.0.0.1:8888", subscribe="orders")
>>> archive(rows, "/data/archive").awaitTermination()
"""
