"""Messages as DataFrames: `spark.read` and `spark.readStream`, `.format("simplebus")`.

Rule 1: no decisions here: options, offsets, planner and columns decide, `bus` asks.
Rule 2: an executor's reader knows nothing but its task, which says everything.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamArrowWriter,
    DataSourceStreamReader,
    DataSourceWriter,
    InputPartition,
)
from pyspark.sql.types import StructType

from simplebus.spark.buses import Buses
from simplebus.spark.columns import ddl
from simplebus.spark.offsets import resolve
from simplebus.spark.options import SourceOptions, is_true, sink_options, source_options
from simplebus.spark.planner import plan
from simplebus.spark.sink import BatchWriter, StreamWriter, check
from simplebus.spark.stream import StreamReader
from simplebus.spark.tasks import Task, read_task, tasks

if TYPE_CHECKING:
    import pyarrow as pa


class SimplebusSource(DataSource):
    """Messages of a bus as rows, and rows as messages.

    >>> rows = (
    ...     spark.read.format("simplebus")
    ...     .option("servers", "127.0.0.1:8888")
    ...     .option("subscribe", "7,orders")
    ...     .load()
    ... )

    Columns, as a Kafka source has them: key, value, topic (the class), partition (its id), offset
    (the sequence), timestamp and timestampType (0: when the publisher says that it published; 1: it
    did not say, this is when the bus accepted the message, to within some hundredths of a second),
    headers with the option includeHeaders; and channel and server. With the option includeMemory
    there is memory, too: which memory of the bus the offset is of. Server, memory, topic and offset
    are one message's for ever; a bus that has lost its memory begins another one, at offset 0.
    What is not there is null; value, offset and timestamp always are.

    Options; servers and subscribe are needed, names count without regard to case:

        servers                 host:port, several with commas; or what load() is given
        subscribe               classes by name or id, with commas
        channels                patterns; only messages whose channel one of them matches
        startingOffsets         earliest (of a batch), latest (of a stream), or JSON:
                                {"host:port": {"orders": 120, "7": -2}}, -2 earliest, -1 latest
        endingOffsets           of a batch: latest, or JSON
        maxOffsetsPerTrigger    of a stream: messages per batch
        durable                 of a stream: a name of its own, under which the buses keep what the
                                query has not processed while it lies down. Without one they keep
                                it while it runs. What is kept for a query that never comes again
                                fills its classes: Unsubscribe with `forget` ends it
        failOnDataLoss          true; false to log what is gone, and go on
        minPartitions, maxRecordsPerPartition
                                how a batch is cut into tasks
        includeHeaders          false
        includeMemory           false
        timeout                 30 seconds for which a bus that does not answer is tried

    As a sink it takes the columns value; class (or topic), unless the option class names it for all
    rows; channel, key, headers, and expiry: the seconds for which a message is of use.
    """

    @classmethod
    def name(cls) -> str:
        """What `format` is given."""
        return "simplebus"

    def schema(self) -> str:
        """The columns. The other options are looked at when it is known what is to be done."""
        return ddl(
            include_headers=is_true(self.options.get("includeHeaders", "")),
            include_memory=is_true(self.options.get("includeMemory", "")),
        )

    def reader(self, schema: StructType) -> DataSourceReader:
        """For `spark.read`."""
        return BatchReader(source_options(self.options, streaming=False))

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802
        """For `spark.readStream`."""
        return StreamReader(source_options(self.options, streaming=True))

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        """For `frame.write`."""
        options = sink_options(self.options)
        check(schema, options, overwrite=overwrite)
        return BatchWriter(options)

    def streamWriter(  # noqa: N802
        self, schema: StructType, overwrite: bool
    ) -> DataSourceStreamArrowWriter:
        """For `frame.writeStream`."""
        options = sink_options(self.options)
        check(schema, options, overwrite=overwrite)
        return StreamWriter(options)


class BatchReader(DataSourceReader):
    """Reads from startingOffsets to endingOffsets, as they are when the job begins."""

    def __init__(self, options: SourceOptions) -> None:
        self._options = options

    def partitions(self) -> Sequence[Task]:
        """What there is to read, in tasks."""
        options = self._options
        with Buses(options) as buses:
            memories = {
                server: buses[server].memory(options.subscribe) for server in options.servers
            }
            start = resolve(options.starting, memories, option="startingOffsets")
            end = resolve(options.ending, memories, option="endingOffsets")
            return tasks(plan(start, end, memories), buses)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """One task's messages."""
        return read_task(partition)
