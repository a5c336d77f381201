"""Source of messages: it plans ranges from offsets on the driver and reads them on executors.

Modules in reading order:

    offsets             offsets of a query, as Spark stores them; no I/O
    planner             ranges to read, from offsets and stored messages; no I/O
    filters             pushed-down filters as bounds of offsets, classes and servers; no I/O
    progress            lag of a query, from its progress report; no I/O
    bus_reader          reads classes of a bus by fetch requests
    journal_reader      reads classes from journal files, without a server
    time_offsets        resolves times to offsets
    retention_durable   durables that retain unprocessed messages on the buses
    tasks               partitions of a batch, and the reading in an executor
    stream              stream reader: one query's offsets, batches and retention

It may import the modules of simplebus.spark except source, jobs and commands.
"""
