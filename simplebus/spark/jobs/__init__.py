"""What people do with messages in Spark, as functions of sessions and DataFrames to import, which
`simplebus pipeline` has as commands.

    session     a Spark session that fits
    following   a query at work: how far it is, how it is stopped, what went wrong

>>> from simplebus.spark.jobs.session import session
>>> spark = session("my job", master="local[2]")

Rule 1: a job is a function that takes a session or a DataFrame; the command is a thin shell of it.
Rule 2: importing a job does not import pyspark: that happens when it runs.
"""
