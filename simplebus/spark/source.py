"""Messages as DataFrames: `spark.read` and `spark.readStream`, `.format("simplebus")`.

Rule 1: no decisions here: options, offsets, planner and columns decide, `bus` asks.
Rule 2: an executor's reader knows nothing but its task, which says everything.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamArrowWriter,
    DataSourceStreamReader,
    DataSourceWriter,
    Filter,
    InputPartition,
)
from pyspark.sql.types import StructType

from simplebus.spark.arrow_columns import ddl
from simplebus.spark.connections import Buses
from simplebus.spark.options import SourceOptions, is_true, sink_options, source_options
from simplebus.spark.read.filters import Bounds, bounds
from simplebus.spark.read.offsets import check_apart, resolve
from simplebus.spark.read.planner import plan
from simplebus.spark.read.stream import StreamReader
from simplebus.spark.read.tasks import Task, read_task, tasks
from simplebus.spark.read.time_offsets import option_of, sought
from simplebus.spark.sink import BatchWriter, StreamWriter, check

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

    Options; servers or path, and subscribe, are needed; names count without regard to case:

        servers                 host:port, several with commas; or what load() is given
        path                    instead: the data directory of a bus, by its absolute path, several
                                with commas; or what load() is given. See below
        subscribe               classes by name or id, with commas
        channels                patterns; only messages whose channel one of them matches
        startingOffsets         earliest (of a batch), latest (of a stream), or JSON:
                                {"host:port": {"orders": 120, "7": -2}}, -2 earliest, -1 latest
        endingOffsets           of a batch: latest, or JSON
        startingTimestamp, endingTimestamp
                                milliseconds since 1970, instead: begin with, or end before, the
                                first message that the bus accepted then or later, to within some
                                hundredths of a second
        startingOffsetsByTimestamp, endingOffsetsByTimestamp
                                the same in JSON, {"host:port": {"orders": 1763740800000}}. What is
                                said for all classes counts before this, and this before offsets
        startingOffsetsByTimestampStrategy
                                error; latest to begin behind the last message where there is none
                                at or after the time
        maxOffsetsPerTrigger    of a stream: messages per batch
        minOffsetsPerTrigger    of a stream: messages that a batch waits for
        maxTriggerDelay         15m, for which it waits at most; also 90s, 2h, 1d
        durable                 of a stream: the name under which the buses keep what the query has
                                not processed, also while it lies down. Unless told otherwise it
                                gives one to itself, which its checkpoint knows. With none they keep
                                it while it runs, and a query that comes again may miss some: for
                                one that has a look, and whose checkpoint goes when it ends
        durableIdle             7d, after which they let go of what they keep for a query that does
                                not run; one that comes later may miss some
        failOnDataLoss          true; false to log what is gone, or a bus that does not answer, and
                                go on. What a bus has that is left out is read when it is back, but
                                for what was to be in a batch that had begun
        minPartitions, maxRecordsPerPartition
                                how a batch is cut into tasks
        filterPushdown          of a batch: false; true to read no more than filters on offset,
                                topic and server want. Spark is to be told, too, by its setting
                                spark.sql.python.filterPushdown.enabled
        includeHeaders          false
        includeMemory           false
        timeout                 30 seconds for which a bus that does not answer is tried

    With a path the files of `simplebus serve --data-dir` are read, and no bus is asked: it may run
    or not. It is not told either: what it lets go of, when its own subscriptions need it no longer,
    is gone for a query as well, which says so (failOnDataLoss). Let the class keep it for as long
    as queries may need. The earliest message is the first one that is still in the files. The
    column server is the path, and JSON speaks of it by that name. Driver and executors open the
    files themselves, each under that path. What is read is on disk, whatever the bus promises: a
    query has each message once, also through a power cut. durable, durableIdle and timeout are of
    buses alone.

    What a query has finished is acknowledged to the buses when Spark says so. Spark's option
    asyncProgressTracking has it say so before it is sure itself: not to be used here.

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
        options = source_options(self.options, streaming=False)
        return FilteringReader(options) if options.filter_pushdown else BatchReader(options)

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
        self._wanted = Bounds()

    def partitions(self) -> Sequence[Task]:
        """What there is to read, in tasks."""
        options = self._options
        with Buses(options) as buses:
            starting, ending = sought(options.starting, buses), sought(options.ending, buses)
            memories = {
                server: buses[server].memory(options.subscribe) for server in options.servers
            }
            check_apart({at: one.memory_id for at, one in memories.items()}, "bus", options.places)
            option = option_of(options.starting, "startingOffsets")
            start = resolve(starting, memories, option=option)
            end = resolve(ending, memories, option=option_of(options.ending, "endingOffsets"))
            wanted = self._wanted.narrowed(start, end)
            return tasks(plan(*wanted, memories), buses)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """One task's messages. Where there are no tasks, Spark has one of its own made."""
        return read_task(partition) if isinstance(partition, Task) else iter(())


class FilteringReader(BatchReader):
    """The same, told by Spark what is wanted. A class of its own: Spark refuses a reader that could
    be told, unless it is set to tell."""

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:  # noqa: N802
        """Read no more than these want. Returns them: Spark goes by them once more."""
        self._wanted = bounds(filters)
        return filters
