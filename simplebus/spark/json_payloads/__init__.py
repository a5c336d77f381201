"""JSON payloads: read as typed columns, and written from values of any type.

    schema    schemas for Spark's `from_json`, and typed columns
    encoder   Arrow columns to JSON texts; needs pyarrow

Both work without Spark, unless they get types of Spark. The package imports nothing of simplebus.
"""
