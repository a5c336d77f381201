"""Report as a DataFrame: rates, latencies, redeliveries, duplicates and losses.

Traces are processed one class and run at a time, archives as small digests; only figures reach the
driver. A row describes a whole run or one step of it.

    column      type    from a trace                          from an archive
    span        string  run | step                            the same
    scenario    string  of the trace                          the archive's path
    variant     string  of the trace                          null
    round       int     of the trace                          null
    class       string  of the trace                          name or id
    subscriber  string  of the trace                          null
    server      string  null                                  server of the messages
    memory      string  null                                  memory id of the messages
    begin_s     double  seconds since the start of the run    since 1970
    seconds     double  length of the span
    sent        bigint  messages sent                         numbers from the first to the last
    delivered   bigint  messages delivered                    distinct messages
    acked       bigint  messages acked                        null
    redelivered bigint  deliveries marked as redelivered      null
    duplicates  bigint  unmarked repeated deliveries          rows beyond the first of a number
    lost        bigint  sent but not delivered                missing numbers
    unsent      bigint  delivered but not sent                null
    rate        double  delivered per second
    p50_us      double  from sent to delivered                from `timestamp` to `archived`
    p90_us, p99_us, p999_us, max_us                           the same

In the row of a step, values that exist only for a whole run are null, and redelivered messages
count each time. An archive of selected channels lacks the numbers of the others, which count as
lost.

>>> from simplebus.spark.jobs.report.report import read
>>> found = read(spark, "traces")
>>> found.where("span = 'run'").select("variant", "rate", "p99_us", "lost").show()
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from simplebus.spark.jobs.archive import read as read_archive
from simplebus.spark.jobs.archive_report import ArchiveDigest, digest, summarize_digest
from simplebus.spark.jobs.delta import is_table
from simplebus.spark.jobs.hadoop import HadoopArchiveFiles
from simplebus.spark.jobs.report.figures import (
    NS_PER_S,
    RunFigures,
    RunSteps,
    run_figures,
    run_steps,
)
from simplebus.spark.jobs.report.ranges import NEVER, TimedRanges
from simplebus.spark.jobs.report.traces import COLUMNS, RUN_FILE, TraceRows, check_columns

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

DDL = (
    "span string, scenario string, variant string, round int, class string, subscriber string, "
    "server string, memory string, begin_s double, seconds double, sent bigint, delivered bigint, "
    "acked bigint, redelivered bigint, duplicates bigint, lost bigint, unsent bigint, rate double, "
    "p50_us double, p90_us double, p99_us double, p999_us double, max_us double"
)
NAMES = tuple(column.split()[0] for column in DDL.split(", "))
LATENCIES = NAMES[-5:]
TRACE_STEP_S = 0.1
ARCHIVE_COLUMNS = ("offset", "timestamp", "archived", "server", "memory", "class")
_RUN_KEY = ("scenario", "variant", "round", "class")
_ARCHIVE_KEY = ("server", "memory", "class")
_DIGEST_COLUMNS = ("kind", "step", "first", "last")
_STEPS_TARGET = 200
_TIME_MAX_MICROSECONDS = 253_402_300_799_999_999
"""End of the year 9999, in microseconds since 1970. Later times, and times as long before 1970, are
clipped.
"""
_STEP_CHOICES_S = (0.1, 0.5, 1, 5, 10, 30, 60, 300, 600, 1800, 3600, 6 * 3600, 24 * 3600)


class ReportError(ValueError):
    """No data to report on."""


def read(spark: SparkSession, *paths: str, step_s: float | None = None) -> DataFrame:
    """Return the report of traces or archives.

    Args:
        spark: The session.
        paths: Paths of traces or archives.
        step_s: Length of a step in seconds. Default: 0.1 for a trace; for an archive a length that
            gives at most about 200 steps.

    Raises:
        ReportError: There is no trace or archive at a path.
        TraceError: A trace is invalid; raised when the job runs.
    """
    found = None
    for path in paths:
        report = _figures_at(spark, path, step_s)
        found = report if found is None else found.unionByName(report)
    if found is None:
        raise ReportError("expected paths of traces or archives, got none")
    return found


def read_run(spark: SparkSession, path: str) -> dict[str, Any] | None:
    """Return the content of a run's RUN_FILE; None if the file is missing. Raises ReportError."""
    data = HadoopArchiveFiles(spark, path).read(RUN_FILE)
    if data is None:
        return None
    try:
        found = json.loads(data)
    except ValueError as error:
        raise ReportError(f"{path}/{RUN_FILE} is not valid JSON: {error}") from None
    return found if isinstance(found, dict) else None


def _figures_at(spark: SparkSession, path: str, step_s: float | None) -> DataFrame:
    frame = (
        read_archive(spark, path)
        if is_table(HadoopArchiveFiles(spark, path))
        else _read_parquet(spark, path)
    )
    if {"kind", "first", "last"} <= set(frame.columns):
        check_columns(dict(frame.dtypes), place=path)
        return figures_of_traces(frame, step_s=step_s or TRACE_STEP_S)
    if set(ARCHIVE_COLUMNS) <= set(frame.columns):
        return figures_of_archive(read_archive(spark, path), name=path, step_s=step_s)
    raise ReportError(
        f"{path} is neither a trace ({', '.join(COLUMNS)}) nor an archive "
        f"({', '.join(ARCHIVE_COLUMNS)}): it has the columns {', '.join(frame.columns)}"
    )


def _read_parquet(spark: SparkSession, path: str) -> DataFrame:
    from pyspark.errors import AnalysisException

    try:
        return spark.read.parquet(path)
    except AnalysisException as error:
        raise ReportError(f"there is no Parquet to read at {path}") from error


# Traces ------------------------------------------------------------------------------------------


def figures_of_traces(traces: DataFrame, *, step_s: float = TRACE_STEP_S) -> DataFrame:
    """Return the report of traces with the columns described in `traces`."""
    step_ns = _step_ns(step_s)

    def work(table: Any) -> Any:
        return _run_table(table, step_ns)

    return traces.select(*COLUMNS).groupBy(*_RUN_KEY).applyInArrow(work, DDL)


def _step_ns(step_s: float) -> int:
    step_ns = round(step_s * NS_PER_S)
    if step_ns < 1:
        raise ReportError(f"expected a step of at least one nanosecond, got {step_s:g} s")
    return step_ns


def _run_table(table: Any, step_ns: int) -> Any:
    """Return the report of one class in one run; Arrow tables in and out."""
    key = {name: table[name][0].as_py() for name in _RUN_KEY}
    rows = _rows(table)
    rows.check(", ".join(f"{name} {value}" for name, value in key.items()))
    found: list[dict[str, Any]] = []
    for index, subscriber in enumerate(rows.subscribers or (None,)):
        of = {**key, "subscriber": subscriber}
        index = index if rows.subscribers else -1
        found.append({**of, **_run_row(run_figures(rows, index))})
        steps = run_steps(rows, index, step_ns=step_ns)
        found += [{**of, **row} for row in _step_rows(steps, step_ns / NS_PER_S)]
    return _table(found)


def _rows(table: Any) -> TraceRows:
    kind = table["kind"].combine_chunks().dictionary_encode()
    subscriber = table["subscriber"].combine_chunks().dictionary_encode()
    at, first, last = (table[name].to_numpy() for name in ("at", "first", "last"))
    return TraceRows(
        kinds=tuple(kind.dictionary.to_pylist()),
        kind=kind.indices.to_numpy(),
        subscribers=tuple(subscriber.dictionary.to_pylist()),
        subscriber=subscriber.indices.fill_null(-1).to_numpy(),
        ranges=TimedRanges.of(at, first, last),
    )


def _run_row(found: RunFigures) -> dict[str, Any]:
    names = ("sent", "delivered", "acked", "redelivered", "duplicates", "lost", "unsent")
    return {
        "span": "run",
        "begin_s": 0.0,
        "seconds": found.seconds,
        **{name: getattr(found, name) for name in names},
        "rate": found.rate,
        **_to_microseconds(found.latencies_ns or ()),
    }


def _step_rows(found: RunSteps, step_s: float) -> Iterator[dict[str, Any]]:
    columns = (found.sent, found.delivered, found.acked, found.latencies_ns)
    for index, (sent, delivered, acked, latencies) in enumerate(
        zip(*(column.tolist() for column in columns), strict=True)
    ):
        yield {
            "span": "step",
            "begin_s": index * step_s,
            "seconds": step_s,
            "sent": sent,
            "delivered": delivered,
            "acked": acked,
            "rate": delivered / step_s,
            **_to_microseconds(latencies if latencies[0] != NEVER else ()),
        }


def _to_microseconds(latencies_ns: Any) -> dict[str, float]:
    return {name: value / 1e3 for name, value in zip(LATENCIES, latencies_ns, strict=False)}


def _table(rows: list[dict[str, Any]]) -> Any:
    import pyarrow as pa

    kinds = {"string": pa.string(), "int": pa.int32(), "bigint": pa.int64(), "double": pa.float64()}
    schema = pa.schema([(name, kinds[kind]) for name, kind in map(str.split, DDL.split(", "))])
    return pa.Table.from_pylist(rows, schema)


# Archives ----------------------------------------------------------------------------------------


def figures_of_archive(archive: DataFrame, *, name: str, step_s: float | None = None) -> DataFrame:
    """Return the report of an archive; `name` becomes the scenario.

    The archive is read once. If `step_s` is None, its time column is read before, to choose a step.
    """
    from pyspark.sql import functions as sql

    at, archived = _micros("timestamp"), _micros("archived")
    place = [
        sql.coalesce(sql.col(column).cast("string"), sql.lit("")).alias(column)
        for column in _ARCHIVE_KEY
    ]
    frame = archive.select(*place, "offset", at.alias("at"), (archived - at).alias("after"))
    step_us = max(1, _step_ns(step_s or _choose_step(frame)) // 1000)

    def digests(batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            yield from _batch_digests(batch, step_us)

    def work(table: Any) -> Any:
        key = {column: table[column][0].as_py() for column in _ARCHIVE_KEY}
        found = ArchiveDigest(*(table[column].to_numpy() for column in _DIGEST_COLUMNS))
        rows = summarize_digest(found, step_us=step_us)
        return _table([_archive_row({"scenario": name, **key, **row}) for row in rows])

    ddl = ", ".join(
        [
            *(f"{column} string" for column in _ARCHIVE_KEY),
            *(f"{column} bigint" for column in _DIGEST_COLUMNS),
        ]
    )
    return frame.mapInArrow(digests, ddl).groupBy(*_ARCHIVE_KEY).applyInArrow(work, DDL)


def _micros(name: str) -> Column:
    """Return a time column in microseconds, clipped so that differences do not overflow."""
    from pyspark.sql import functions as sql

    return sql.greatest(
        sql.least(sql.unix_micros(name), sql.lit(_TIME_MAX_MICROSECONDS)),
        sql.lit(-_TIME_MAX_MICROSECONDS),
    )


def _choose_step(frame: DataFrame) -> float:
    """Return a step that divides the whole archive into at most about 200."""
    from pyspark.sql import functions as sql

    span = frame.agg(sql.max("at") - sql.min("at")).first()
    seconds = (span[0] or 0) / 1e6 if span else 0.0
    return next((s for s in _STEP_CHOICES_S if seconds <= s * _STEPS_TARGET), _STEP_CHOICES_S[-1])


def _batch_digests(batch: Any, step_us: int) -> Iterator[Any]:
    """Yield the digests of each place in an Arrow batch of archive rows."""
    import pyarrow as pa

    code = np.zeros(batch.num_rows, np.int64)
    for name in _ARCHIVE_KEY:
        encoded = batch[name].dictionary_encode()
        code = code * len(encoded.dictionary) + encoded.indices.to_numpy()
    columns = [batch[name].to_numpy() for name in ("offset", "at", "after")]
    for place in np.unique(code):
        indexes = np.flatnonzero(code == place)
        found = digest(*(column[indexes] for column in columns), step_us=step_us)
        names = [pa.repeat(batch[name][int(indexes[0])], found.kind.size) for name in _ARCHIVE_KEY]
        numbers = [pa.array(getattr(found, name)) for name in _DIGEST_COLUMNS]
        yield pa.RecordBatch.from_arrays(
            [*names, *numbers], names=[*_ARCHIVE_KEY, *_DIGEST_COLUMNS]
        )


def _archive_row(row: dict[str, Any]) -> dict[str, Any]:
    return row | dict(zip(LATENCIES, map(float, row.pop("latencies_us")), strict=True))
