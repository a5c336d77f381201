"""Spark data source `format("simplebus")`: `spark.read`, `spark.readStream` and both kinds of
writing.

Each executor reads from its SparkPartition alone, without further state from the driver.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyspark import SparkFiles
from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamArrowWriter,
    DataSourceStreamReader,
    DataSourceWriter,
    Filter,
    InputPartition,
)
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.streaming.datasource import ReadLimit, SupportsTriggerAvailableNow
from pyspark.sql.types import StructType

from simplebus.logs.event_logger import EventLogger
from simplebus.spark.arrow_columns import arrow_schema, schema_ddl
from simplebus.spark.connections import (
    UNREACHABLE_ERRORS,
    SourceConnections,
    resolve_pattern,
)
from simplebus.spark.error_reports import report_without_traceback
from simplebus.spark.java import JAR
from simplebus.spark.options import (
    SinkOptions,
    SourceOptions,
    check_stream_sink,
    is_true,
    sink_options,
    source_options,
)
from simplebus.spark.read.filters import FilterBounds, bounds_of_filters
from simplebus.spark.read.offsets import check_distinct, resolve_offsets
from simplebus.spark.read.planner import plan_reads
from simplebus.spark.read.stream import SparkStreamReader
from simplebus.spark.read.tasks import SparkPartition, make_partitions, read_partition
from simplebus.spark.read.time_offsets import option_name, resolve_times
from simplebus.spark.sink import BatchWriter, StreamWriter, check_bus, check_sink

if TYPE_CHECKING:
    import pyarrow as pa

log = EventLogger("simplebus.spark")

_CONNECTOR_OPTION = "simplebus.connector"
"""Option of queries that the connector in Java passes on to this source."""


_LOGGED_FILE = "simplebus-connector-missing"


def _is_first_in_application() -> bool:
    """Return True for the first call in a Spark application.

    Spark calls the data source in many processes. They share the folder of the files that Spark
    sends to executors, which Spark deletes at the end of the application.
    """
    try:
        (Path(SparkFiles.getRootDirectory()) / _LOGGED_FILE).touch(exist_ok=False)
    except FileExistsError:
        return False
    except OSError:
        return True
    return True


class SimplebusSource(DataSource):
    """Data source that reads messages as rows and publishes rows as messages.

    >>> rows = (
    ...     spark.read.format("simplebus")
    ...     .option("servers", "127.0.0.1:8888")
    ...     .option("subscribe", "7,orders")
    ...     .load()
    ... )

    The columns match those of Spark's Kafka source: key, value, topic (the class), partition (the
    class id), offset (the sequence), timestamp, timestampType, channel and server. timestampType 0
    means that the publisher set the timestamp; 1 means that the bus accepted the message then,
    within some hundredths of a second. includeHeaders adds headers. includeMemory adds memory, the
    id of the bus memory that the offset belongs to: a bus that lost its data has a new memory id
    and starts at offset 0. Server, memory, topic and offset identify a message forever. Only
    value, offset and timestamp are never null.

    Args:
        options: Texts by case-insensitive names, which `option_names.OPTIONS` lists and the page
            protocol/spark.md documents. The source requires subscribe, and either servers or path.

    With path, driver and executors read the journal files of `simplebus serve --data-dir`, each
    under that path. The server may run or not. The server retains no messages for a query: it
    deletes messages that its own subscriptions no longer need, and failOnDataLoss applies to them.
    Configure the retention of the class to keep messages for queries. The earliest message is the
    first one in the files. The path takes the place of host:port in the column server and in JSON.
    A query reads only synced data, so it has each message once, also after a power cut. durable,
    durableIdle and timeout do not apply.

    The source acks messages when Spark commits a batch. Spark's asyncProgressTracking commits
    before progress is stored; do not use it here.

    The sink takes the columns value, class (or topic) unless the option class is set, and
    optionally channel, key, headers, and expiry in seconds.
    """

    @classmethod
    def name(cls) -> str:
        """Return the name for `format`."""
        return "simplebus"

    def schema(self) -> str:
        """Return the columns as DDL. Other options are checked later, when the kind of use is
        known.
        """
        self._log_missing_connector()
        return schema_ddl(**self._optional_columns())

    def _log_missing_connector(self) -> None:
        """Log that the connector is faster, unless the connector has passed the query on, or the
        application has logged it before.
        """
        if _CONNECTOR_OPTION not in self.options and _is_first_in_application():
            log.warning(
                "connector.missing",
                "the data source in Python serves this session; the connector is faster: add "
                "{path} to the setting spark.jars",
                path=JAR,
            )

    def _optional_columns(self) -> dict[str, bool]:
        return {
            "include_headers": is_true(self.options.get("includeHeaders", "")),
            "include_memory": is_true(self.options.get("includeMemory", "")),
        }

    def _check_schema(self, schema: StructType) -> None:
        """Raise ValueError if the schema is not the one of the columns, except for nullability."""
        columns = from_arrow_schema(arrow_schema(**self._optional_columns()))
        if schema.simpleString() != columns.simpleString():
            raise ValueError(
                "a schema is set, but the columns are fixed; parse the values by "
                "simplebus.spark.parse_json, or by from_json"
            )

    def _user_options(self) -> dict[str, str]:
        return {name: value for name, value in self.options.items() if name != _CONNECTOR_OPTION}

    def reader(self, schema: StructType) -> DataSourceReader:
        """Return a reader for `spark.read`.

        Args:
            schema: The fixed columns.

        Raises:
            ValueError: An option is unknown, missing or invalid, or the user has set a schema.
        """
        with report_without_traceback():
            options = resolve_pattern(source_options(self._user_options(), streaming=False))
            self._check_schema(schema)
        return FilteringReader(options) if options.filter_pushdown else BatchReader(options)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802
        """Return a reader for `spark.readStream`.

        If an option is unknown, missing or invalid, or the user has set a schema, the methods of
        the reader raise the error.

        Args:
            schema: The fixed columns.
        """
        try:
            options = resolve_pattern(source_options(self._user_options(), streaming=True))
            self._check_schema(schema)
        except (ValueError, *UNREACHABLE_ERRORS) as error:
            return InvalidStreamReader(error)
        return SparkStreamReader(options)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        """Return a writer for `frame.write`.

        Args:
            schema: Columns of the frame.
            overwrite: Must be false: a bus only appends.

        Raises:
            ValueError: An option or a column is unknown, missing or invalid, or the bus refuses
                the class.
            BusConnectionError: The bus cannot be reached.
        """
        options = self._sink_options(schema, overwrite=overwrite)
        with report_without_traceback():
            check_bus(options)
        return BatchWriter(options)

    def streamWriter(  # noqa: N802
        self, schema: StructType, overwrite: bool
    ) -> DataSourceStreamArrowWriter:
        """Return a writer for `frame.writeStream`.

        Args:
            schema: Columns of the frame.
            overwrite: Must be false: a bus only appends.

        Raises:
            ValueError: An option or a column is unknown, missing or invalid.
        """
        options = self._sink_options(schema, overwrite=overwrite)
        with report_without_traceback():
            check_stream_sink(options)
        return StreamWriter(options)

    def _sink_options(self, schema: StructType, *, overwrite: bool) -> SinkOptions:
        self._log_missing_connector()
        with report_without_traceback():
            options = sink_options(self._user_options())
            check_sink(schema, options, overwrite=overwrite)
            return options


class InvalidStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Stream reader of a query with invalid options; its methods raise the error.

    Spark 4.3 reports an `UnboundLocalError` in place of an error that `streamReader` raises.
    """

    def __init__(self, error: Exception) -> None:
        self._error = error

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802
        """Raise the error."""
        with report_without_traceback():
            raise self._error

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802
        """Raise the error."""
        return self.initialOffset()

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        """Raise the error."""
        self.initialOffset()

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Raise the error. Spark does not call this method, since there are no partitions."""
        raise self._error


class BatchReader(DataSourceReader):
    """Reader of one batch job, from startingOffsets to endingOffsets as resolved when the job
    starts.
    """

    def __init__(self, options: SourceOptions) -> None:
        self._options = options
        self._filter_bounds = FilterBounds()

    def partitions(self) -> Sequence[SparkPartition]:
        """Return the tasks of the job."""
        options = self._options
        with report_without_traceback(), SourceConnections(options) as connections:
            for server in options.servers:
                connections[server].check_classes(options.subscribe)
            starting, ending = (
                resolve_times(options.starting, connections),
                resolve_times(options.ending, connections),
            )
            extents = {
                server: connections[server].get_extent(options.subscribe)
                for server in options.servers
            }
            check_distinct(
                {at: extent.memory_id for at, extent in extents.items()},
                "bus",
                options.location_option,
            )
            option = option_name(options.starting, "startingOffsets")
            start = resolve_offsets(starting, extents, option=option)
            end = resolve_offsets(
                ending, extents, option=option_name(options.ending, "endingOffsets")
            )
            narrowed = self._filter_bounds.narrow(start, end)
            return make_partitions(plan_reads(*narrowed, extents), connections)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Read the messages of one task. Spark passes its own partition if there are no tasks."""
        return read_partition(partition) if isinstance(partition, SparkPartition) else iter(())


class FilteringReader(BatchReader):
    """Batch reader with filter pushdown.

    It is a separate class because Spark rejects a reader with `pushFilters` unless its setting
    spark.sql.python.filterPushdown.enabled is true.
    """

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:  # noqa: N802
        """Narrow the read to these filters. Return all of them: Spark applies them again."""
        self._filter_bounds = bounds_of_filters(filters)
        return filters
