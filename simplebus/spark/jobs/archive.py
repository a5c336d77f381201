"""Archive of a stream of messages as Parquet or a Delta table, each message once.

Spark writes the rows itself, without a shuffle; only file names pass through Python. A batch
becomes visible through `archive_commit` or `delta`, so a repeated batch replaces itself or finds
that it is already archived.

The archive has a folder per class and UTC day of `timestamp`, or per class, day and hour. Times
outside the years 1 to 9999 have no day and no hour. Keep the checkpoint: with a new one, the query
archives all messages again.

>>> rows = messages(spark, servers="127.0.0.1:8888", subscribe="orders,7")
>>> archive(rows, "/data/archive").awaitTermination()
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, NamedTuple

from simplebus.spark.jobs import delta
from simplebus.spark.jobs.archive_commit import (
    begin_batch,
    finish_batch,
    publish_batch,
    recover_swaps,
)
from simplebus.spark.jobs.archive_layout import (
    CHECKPOINT,
    PARTITION_COLUMNS,
    ArchiveError,
    staging_folder,
)
from simplebus.spark.jobs.hadoop import HadoopArchiveFiles

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery
    from pyspark.sql.types import StructField

FORMATS = ("parquet", "delta")
FILE_DDL = (
    "key binary, value binary, partition int, offset bigint, timestamp timestamp_ltz, "
    "timestampType int, channel string, headers array<struct<key: string, value: binary>>, "
    "server string, memory string, archived timestamp_ltz"
)
"""Columns of an archive's files."""
DDL = f"{FILE_DDL}, class string, date date"
"""Columns of an archive; the last two are folder names."""
HOURLY_DDL = f"{DDL}, hour int"
"""Columns of an archive that is partitioned by hour."""

_DAY_MICROSECONDS, _HOUR_MICROSECONDS = 86_400_000_000, 3_600_000_000
_DATE_RANGE_MICROSECONDS = (-62_135_596_800_000_000, 253_402_300_799_999_999)
"""The years 1 to 9999, in microseconds since 1970: the dates that every program can read."""
# Folders that a task writes at a time without sorting its rows.
_OPEN_FILES_MAX = 64


def messages(
    spark: SparkSession,
    *,
    servers: str | None = None,
    path: str | None = None,
    subscribe: str | None = None,
    subscribe_pattern: str | None = None,
    **options: object,
) -> DataFrame:
    """Return a stream of messages with all columns of an archive, from the earliest message on.

    Args:
        spark: The session.
        servers: Buses as host:port, comma-separated; None if `path` is given.
        path: Data directory of a bus, whose files are read instead.
        subscribe: Classes by name or id, comma-separated; None if `subscribe_pattern` is given.
        subscribe_pattern: Regular expression that matches whole names of classes.
        options: Further options of the source, by name.
    """
    source_options = {
        "servers": servers,
        "path": path,
        "subscribe": subscribe,
        "subscribePattern": subscribe_pattern,
        "startingOffsets": "earliest",
        "includeHeaders": "true",
        "includeMemory": "true",
    }
    stream = spark.readStream.format("simplebus")
    for name, value in {**source_options, **options}.items():
        if value is not None:
            text = str(value).lower() if isinstance(value, bool) else str(value)
            stream = stream.option(name, text)
    return stream.load()


def archive(
    frame: DataFrame,
    to: str,
    *,
    format: str = "parquet",
    partition_by: str = "day",
    checkpoint: str | None = None,
    every: float | None = None,
    storage: dict[str, str] | None = None,
) -> StreamingQuery:
    """Start to archive a stream of messages.

    Args:
        frame: Messages with the source's columns; headers and memory may be missing. Rows without a
            timestamp go to a folder without a day.
        to: Path of the archive.
        format: `parquet` or `delta`.
        partition_by: `day` for a folder per class and day, or `hour` for one per class, day and
            hour. An archive keeps the folders that it was created with.
        checkpoint: Path of the checkpoint; default: a folder in the archive.
        every: Seconds between batches; None to archive the available messages and end.
        storage: Options of delta-rs for an object store.

    Returns:
        The running query.

    Raises:
        ValueError: The format or `partition_by` is unknown.
        Exception: The error of `DataStreamWriter.start`.
    """
    if format not in FORMATS:
        raise ValueError(f"expected the format {' or '.join(FORMATS)}, got {format!r}")
    if partition_by not in PARTITION_COLUMNS:
        expected = " or ".join(PARTITION_COLUMNS)
        raise ValueError(f"expected partition_by {expected}, got {partition_by!r}")
    archiver = BatchArchiver(to, format=format, partition_by=partition_by, storage=storage)
    writing = frame.writeStream.foreachBatch(archiver)
    writing = writing.option("checkpointLocation", checkpoint or f"{to.rstrip('/')}/{CHECKPOINT}")
    if every is None:
        writing = writing.trigger(availableNow=True)
    else:
        writing = writing.trigger(processingTime=f"{every} seconds")
    return writing.start()


def archive_columns(frame: DataFrame, ddl: str = DDL) -> DataFrame:
    """Return the messages with the columns of an archive, DDL or HOURLY_DDL."""
    from pyspark.sql import functions as sql

    present = set(frame.columns)
    now = sql.lit(datetime.now(UTC))
    columns: list[Column] = []
    for field in _fields(ddl):
        name, kind = field.name, field.dataType
        if name == "archived":
            columns.append(now.alias(name))
        elif name == "class":
            columns.append(sql.col("topic" if "topic" in present else "class").alias(name))
        elif name == "date":
            columns.append(_day(sql.col("timestamp")).alias(name))
        elif name == "hour":
            columns.append(_hour(sql.col("timestamp")).alias(name))
        elif name in present:
            columns.append(sql.col(name))
        elif name in ("headers", "memory"):
            columns.append(sql.lit(None).cast(kind).alias(name))
        else:
            raise ValueError(f"the column {name} is missing; got {', '.join(frame.columns)}")
    return frame.select(columns)


def _fields(ddl: str) -> list[StructField]:
    from pyspark.sql.types import StructType

    kind = StructType.fromDDL(ddl)
    assert isinstance(kind, StructType)
    return kind.fields


def _day(stamps: Column) -> Column:
    """Return the UTC day, regardless of the session's time zone; null outside the calendar."""
    from pyspark.sql import functions as sql

    micros = _calendar_micros(stamps)
    whole = micros - sql.pmod(micros, sql.lit(_DAY_MICROSECONDS))
    return sql.date_from_unix_date((whole / _DAY_MICROSECONDS).cast("int"))


def _hour(stamps: Column) -> Column:
    """Return the hour of the UTC day, from 0 to 23; null outside the calendar."""
    from pyspark.sql import functions as sql

    of_day = sql.pmod(_calendar_micros(stamps), sql.lit(_DAY_MICROSECONDS))
    return (of_day / _HOUR_MICROSECONDS).cast("int")


def _calendar_micros(stamps: Column) -> Column:
    """Return microseconds since 1970; null outside the calendar.

    Publishers may set any time, so the range is checked before computing with it.
    """
    from pyspark.sql import functions as sql

    micros = sql.unix_micros(stamps)
    return sql.when(micros.between(*_DATE_RANGE_MICROSECONDS), micros)


def read(spark: SparkSession, path: str) -> DataFrame:
    """Read an archive as a DataFrame with the columns of DDL, or of HOURLY_DDL.

    Args:
        spark: The session.
        path: Path of the archive.

    Raises:
        Exception: Spark's error if there is no archive.
    """
    files = HadoopArchiveFiles(spark, path)
    if delta.is_table(files):
        return delta.read(spark, files.root, DDL)
    return spark.read.schema(DDL).parquet(path)


class BatchArchiver:
    """Function of `foreachBatch` that archives the batches of one query."""

    def __init__(
        self,
        to: str,
        *,
        format: str = "parquet",
        partition_by: str = "day",
        storage: dict[str, str] | None = None,
    ) -> None:
        self._to, self._format, self._storage = to, format, storage
        self._partition_columns = PARTITION_COLUMNS[partition_by]
        self._ddl = HOURLY_DDL if partition_by == "hour" else DDL
        self._archive: _OpenArchive | None = None

    def __call__(self, frame: DataFrame, batch: int) -> None:
        """Archive one batch, unless it is already archived."""
        is_first = self._archive is None
        files, table, query = self._archive = self._archive or self._open(frame.sparkSession)
        if is_first:
            if table is not None and table.has_batch(query, batch):
                files.remove(staging_folder(query))
                return
            begin_batch(files, query, batch)
        rows = archive_columns(frame, self._ddl)
        _write(rows, files.uri(staging_folder(query, batch)), self._partition_columns)
        moves = publish_batch(files, query, batch)
        if moves and table is not None:
            table.add_batch(query, batch, [files.read_row_count(move.target) for move in moves])
        finish_batch(files, query, batch)

    def _open(self, spark: SparkSession) -> _OpenArchive:
        query = spark.sparkContext.getLocalProperty("sql.streaming.queryId")
        if not query:
            raise RuntimeError("Spark did not set the query id of this batch")
        files = HadoopArchiveFiles(spark, self._to)
        is_delta = self._format == "delta"
        if delta.is_table(files) and not is_delta:
            raise ArchiveError(f"{files.root} is a Delta table; use the format delta")
        table = None
        if is_delta:
            table = delta.DeltaTableWriter(
                files.root, self._ddl, self._storage, self._partition_columns
            )
        present = (table or files).partition_columns()
        if present not in ((), self._partition_columns):
            raise ArchiveError(
                f"the folders of {files.root} have the columns {', '.join(present)}, expected "
                f"{', '.join(self._partition_columns)}: partition it as before, or start another "
                "archive"
            )
        recover_swaps(files)
        return _OpenArchive(files, table, query)


class _OpenArchive(NamedTuple):
    """Open archive of a query."""

    files: HadoopArchiveFiles
    table: delta.DeltaTableWriter | None
    query: str


def _write(frame: DataFrame, place: str, partition_columns: tuple[str, ...]) -> None:
    conf = frame.sparkSession.conf  # A query has its own copy.
    conf.set("spark.sql.parquet.outputTimestampType", "TIMESTAMP_MICROS")
    conf.set("spark.sql.maxConcurrentOutputFileWriters", str(_OPEN_FILES_MAX))
    writing = frame.write.mode("overwrite").partitionBy(*partition_columns)
    # Manifests replace the _SUCCESS file.
    writing.option("mapreduce.fileoutputcommitter.marksuccessfuljobs", "false").parquet(place)
