"""What people do with messages in Spark, as functions of sessions and DataFrames to import, which
`simplebus pipeline` has as commands.

    session     a Spark session that fits
    following   a query at work: how far it is, how it is stopped, what went wrong
    layout      where an archive has what                                   PURE
    tables      how an archive changes, step by step                        PURE, over `Files`
    hadoop      an archive's files through Spark's file systems
    delta       an archive as a Delta table
    archive     a stream of messages into an archive, each once
    compaction  many small files of an archive become few
    pacing      when a message is due again                                 PURE
    replay      an archive onto a bus again
    dead_letters    what fails, why and since when
    traces      what a program writes down: sent, delivered, acknowledged   PURE
    ranges      ranges of numbers with times                                PURE
    figures     from a trace to rates, latencies, losses                    PURE
    archived    from the rows of an archive to the same                     PURE
    report      the figures of traces and archives, wherever they lie
    summary     medians over rounds, with the least and the most            PURE
    panels      what a picture of them shows                                PURE
    chart       how it is drawn

>>> from simplebus.spark.jobs.archive import archive, messages
>>> from simplebus.spark.jobs.session import session
>>> spark = session("archive of orders")
>>> rows = messages(spark, servers="127.0.0.1:8888", subscribe="orders")
>>> archive(rows, "/data/archive").awaitTermination()

Rule 1: a job is a function that takes a session or a DataFrame; the command is a thin shell of it.
Rule 2: importing a job does not import pyspark: that happens when it runs.
"""
