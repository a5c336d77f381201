"""Messages into an archive: a stream that becomes Parquet or Delta, each message once.

Rule 1: Spark itself writes the rows, as they come: no shuffle, no second look at them, and nothing
of this passes through Python but names of files.
Rule 2: what a batch wrote becomes visible by `tables` or `delta`, so that a batch that Spark
repeats, after whatever death, replaces itself or finds that it is done.

>>> rows = messages(spark, servers="127.0.0.1:8888", subscribe="orders,7")
>>> archive(rows, "/data/archive").awaitTermination()

The archive has a folder per class and day, the day in UTC of `timestamp`; times outside the years 1
to 9999 have no day. To have each message once, go on with the same checkpoint: a new one is a new
query, which begins at the beginning.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, NamedTuple

from simplebus.spark.jobs import delta
from simplebus.spark.jobs.archive_commit import begin, end, publish, recover
from simplebus.spark.jobs.archive_layout import CHECKPOINT, PARTITIONS, ArchiveError, staging
from simplebus.spark.jobs.hadoop import HadoopFiles

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
"""The columns of an archive's files."""
DDL = f"{FILE_DDL}, class string, date date"
"""The columns of an archive; the last two are the names of its folders."""

_DAY_MICROSECONDS = 86_400_000_000
_CALENDAR = (-62_135_596_800_000_000, 253_402_300_799_999_999)
"""The years 1 to 9999, in microseconds since 1970: what every program can read as a day."""
# Files of this many classes and days at a time are open in a task; more than that are sorted first.
_OPEN_FILES = 64


def messages(
    spark: SparkSession,
    *,
    servers: str | None = None,
    path: str | None = None,
    subscribe: str,
    **options: object,
) -> DataFrame:
    """A stream of messages with everything that an archive keeps, from the earliest on: of buses,
    or of the journal at a path.

    `options` are the source's own, by their names.
    """
    given = {"startingOffsets": "earliest", "includeHeaders": "true", "includeMemory": "true"}
    stream = spark.readStream.format("simplebus").option("subscribe", subscribe)
    for name, value in {"servers": servers, "path": path, **given, **options}.items():
        if value is not None:
            text = str(value).lower() if isinstance(value, bool) else str(value)
            stream = stream.option(name, text)
    return stream.load()


def archive(
    frame: DataFrame,
    to: str,
    *,
    format: str = "parquet",
    checkpoint: str | None = None,
    every: float | None = None,
    storage: dict[str, str] | None = None,
) -> StreamingQuery:
    """Start to archive a stream of messages: once what is there now, or every so many seconds what
    has come, until it is stopped.

    The frame has the source's columns; headers and memory may be missing, and are null then. Rows
    that are null in `timestamp` lie in a folder of no day. `storage` is what delta-rs needs to know
    of an object store. Raises ValueError, and what `DataStreamWriter.start` does.
    """
    if format not in FORMATS:
        raise ValueError(f"format is {' or '.join(FORMATS)}, got {format!r}")
    writing = frame.writeStream.foreachBatch(BatchArchiver(to, format=format, storage=storage))
    writing = writing.option("checkpointLocation", checkpoint or f"{to.rstrip('/')}/{CHECKPOINT}")
    if every is None:
        writing = writing.trigger(availableNow=True)
    else:
        writing = writing.trigger(processingTime=f"{every} seconds")
    return writing.start()


def rows(frame: DataFrame) -> DataFrame:
    """Messages with the columns of an archive."""
    from pyspark.sql import functions as sql

    there = set(frame.columns)
    now = sql.lit(datetime.now(UTC))
    columns: list[Column] = []
    for field in _fields():
        name, kind = field.name, field.dataType
        if name == "archived":
            columns.append(now.alias(name))
        elif name == "class":
            columns.append(sql.col("topic" if "topic" in there else "class").alias(name))
        elif name == "date":
            columns.append(_day(sql.col("timestamp")).alias(name))
        elif name in there:
            columns.append(sql.col(name))
        elif name in ("headers", "memory"):
            columns.append(sql.lit(None).cast(kind).alias(name))
        else:
            raise ValueError(f"the column {name} is missing; there are {', '.join(frame.columns)}")
    return frame.select(columns)


def _fields() -> list[StructField]:
    from pyspark.sql.types import StructType

    kind = StructType.fromDDL(DDL)
    assert isinstance(kind, StructType)
    return kind.fields


def _day(stamps: Column) -> Column:
    """The day in UTC, whatever time zone the session is in; null for one that no calendar has."""
    from pyspark.sql import functions as sql

    micros = sql.unix_micros(stamps)
    # A publisher may say any time: it is looked at before anything is worked out from it.
    micros = sql.when(micros.between(*_CALENDAR), micros)
    whole = micros - sql.pmod(micros, sql.lit(_DAY_MICROSECONDS))
    return sql.date_from_unix_date((whole / _DAY_MICROSECONDS).cast("int"))


def read(spark: SparkSession, path: str) -> DataFrame:
    """An archive as a DataFrame, with the columns of DDL. Raises what Spark does for no archive."""
    files = HadoopFiles(spark, path)
    if delta.is_table(files):
        return delta.read(spark, files.root, DDL)
    return spark.read.schema(DDL).parquet(path)


class BatchArchiver:
    """What `foreachBatch` calls. One is of one query."""

    def __init__(
        self, to: str, *, format: str = "parquet", storage: dict[str, str] | None = None
    ) -> None:
        self._to, self._format, self._storage = to, format, storage
        self._opened: _Opened | None = None

    def __call__(self, frame: DataFrame, batch: int) -> None:
        """Archive one batch, or find that it is archived."""
        is_first = self._opened is None
        files, table, query = self._opened = self._opened or self._open(frame.sparkSession)
        if is_first:
            if table is not None and table.has(query, batch):
                files.remove(staging(query))
                return
            begin(files, query, batch)
        _write(rows(frame), files.uri(staging(query, batch)))
        moves = publish(files, query, batch)
        if moves and table is not None:
            table.add(query, batch, [files.measured(move.target) for move in moves])
        end(files, query, batch)

    def _open(self, spark: SparkSession) -> _Opened:
        query = spark.sparkContext.getLocalProperty("sql.streaming.queryId")
        if not query:
            raise RuntimeError("Spark does not say which query this batch is of")
        files = HadoopFiles(spark, self._to)
        is_delta = self._format == "delta"
        if delta.is_table(files) and not is_delta:
            raise ArchiveError(f"{files.root} is a Delta table; go on with the format delta")
        recover(files)
        return _Opened(
            files, delta.Table(files.root, DDL, self._storage) if is_delta else None, query
        )


class _Opened(NamedTuple):
    """Where a query's batches go."""

    files: HadoopFiles
    table: delta.Table | None
    query: str


def _write(frame: DataFrame, place: str) -> None:
    conf = frame.sparkSession.conf  # Of this query alone.
    conf.set("spark.sql.parquet.outputTimestampType", "TIMESTAMP_MICROS")
    conf.set("spark.sql.maxConcurrentOutputFileWriters", str(_OPEN_FILES))
    writing = frame.write.mode("overwrite").partitionBy(*PARTITIONS)
    # Nobody looks for the file that says that all is there: `tables` does.
    writing.option("mapreduce.fileoutputcommitter.marksuccessfuljobs", "false").parquet(place)
