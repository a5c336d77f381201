"""Messages as DataFrames, and DataFrames as messages: `format("simplebus")`.

    options     what a job may be told                        PURE
    offsets     how far a query has come                      PURE
    planner     from offsets to ranges: what is read next     PURE
    columns     from frames to Arrow columns                  PURE

Rule 1: importing simplebus never imports this package, and this package's pure files never import
pyspark.
"""
