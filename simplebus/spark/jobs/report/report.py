"""What became of messages: rates, latencies, redeliveries, duplicates, losses, from traces or an
archive.

Rule 1: the work is done where the data is. Traces are worked through one class of one run at a
time, an archive in pieces that become ranges first; only figures come back.
Rule 2: every row says of which span it speaks: a whole run, or one step of it.

    column      type    of a trace                            of an archive
    span        string  run | step                            the same
    scenario    string  as the trace says                     the archive's path
    variant     string  as the trace says                     null
    round       int     as the trace says                     null
    class       string  as the trace says                     name or id
    subscriber  string  as the trace says                     null
    server      string  null                                  where the messages were,
    memory      string  null                                  and in which memory of that bus
    begin_s     double  seconds since the run began           since 1970
    seconds     double  how long the span is
    sent        bigint  messages sent                         numbers from the first to the last
    delivered   bigint  messages that came                    messages that are there
    acked       bigint  messages acknowledged                 null
    redelivered bigint  came marked as coming again           null
    duplicates  bigint  came again unmarked                   rows beyond the first of a number
    lost        bigint  sent and never came                   numbers that are not there
    unsent      bigint  came and was never sent               null
    rate        double  delivered per second
    p50_us      double  from sent to delivered                from `timestamp` to `archived`
    p90_us, p99_us, p999_us, max_us                           the same

In a row of a step what cannot be said of a step is null, and a redelivered message counts as often
as it came. An archive of some channels only lacks the numbers of the others: they count as lost.

>>> from simplebus.spark.jobs.report import read
>>> found = read(spark, "traces")
>>> found.where("span = 'run'").select("variant", "rate", "p99_us", "lost").show()
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from simplebus.spark.jobs.archive import read as read_archive
from simplebus.spark.jobs.archive_report import Digest, digest, figures_of
from simplebus.spark.jobs.delta import is_table
from simplebus.spark.jobs.hadoop import HadoopFiles
from simplebus.spark.jobs.report.figures import NS_PER_S, Course, Figures, course, figures
from simplebus.spark.jobs.report.ranges import NEVER, Ranges
from simplebus.spark.jobs.report.traces import COLUMNS, RUN_FILE, Rows, check_columns

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

DDL = (
    "span string, scenario string, variant string, round int, class string, subscriber string, "
    "server string, memory string, begin_s double, seconds double, sent bigint, delivered bigint, "
    "acked bigint, redelivered bigint, duplicates bigint, lost bigint, unsent bigint, rate double, "
    "p50_us double, p90_us double, p99_us double, p999_us double, max_us double"
)
NAMES = tuple(one.split()[0] for one in DDL.split(", "))
LATENCIES = NAMES[-5:]
TRACE_STEP_S = 0.1
ARCHIVE_COLUMNS = ("offset", "timestamp", "archived", "server", "memory", "class")
_RUN = ("scenario", "variant", "round", "class")
_PLACE = ("server", "memory", "class")
_DIGEST = ("kind", "step", "first", "last")
_STEPS_SHOWN = 200
_LATEST = 253_402_300_799_999_999
"""The end of the year 9999, in microseconds since 1970. Times beyond it, or as long before 1970,
count as this."""
_NICE_STEPS_S = (0.1, 0.5, 1, 5, 10, 30, 60, 300, 600, 1800, 3600, 6 * 3600, 24 * 3600)


class ReportError(ValueError):
    """There is nothing here to report of. The text is one sentence."""


def read(spark: SparkSession, *paths: str, step_s: float | None = None) -> DataFrame:
    """The figures of traces or archives at these paths, as the table above says.

    `step_s` is how long a step is: a tenth of a second for a trace, for an archive a length that
    gives some hundred of them. Raises ReportError, and TraceError when the job runs.
    """
    found = None
    for path in paths:
        one = _figures_at(spark, path, step_s)
        found = one if found is None else found.unionByName(one)
    if found is None:
        raise ReportError("nothing to report of: no path was given")
    return found


def read_run(spark: SparkSession, path: str) -> dict[str, Any] | None:
    """What the run that left these traces says of itself; None when nothing is said."""
    data = HadoopFiles(spark, path).read(RUN_FILE)
    if data is None:
        return None
    try:
        found = json.loads(data)
    except ValueError as error:
        raise ReportError(f"{path}/{RUN_FILE} is no JSON: {error}") from None
    return found if isinstance(found, dict) else None


def _figures_at(spark: SparkSession, path: str, step_s: float | None) -> DataFrame:
    frame = read_archive(spark, path) if is_table(HadoopFiles(spark, path)) else _read(spark, path)
    if {"kind", "first", "last"} <= set(frame.columns):
        check_columns(dict(frame.dtypes), where=path)
        return of_traces(frame, step_s=step_s or TRACE_STEP_S)
    if set(ARCHIVE_COLUMNS) <= set(frame.columns):
        return of_archive(read_archive(spark, path), name=path, step_s=step_s)
    raise ReportError(
        f"{path} is neither a trace ({', '.join(COLUMNS)}) nor an archive "
        f"({', '.join(ARCHIVE_COLUMNS)}): it has the columns {', '.join(frame.columns)}"
    )


def _read(spark: SparkSession, path: str) -> DataFrame:
    from pyspark.errors import AnalysisException

    try:
        return spark.read.parquet(path)
    except AnalysisException as error:
        raise ReportError(f"there is no Parquet to read at {path}") from error


# Traces ------------------------------------------------------------------------------------------


def of_traces(traces: DataFrame, *, step_s: float = TRACE_STEP_S) -> DataFrame:
    """The figures of traces, which have the columns of simplebus.spark.jobs.traces."""
    step_ns = _step_ns(step_s)

    def work(table: Any) -> Any:
        return _of_one_run(table, step_ns)

    return traces.select(*COLUMNS).groupBy(*_RUN).applyInArrow(work, DDL)


def _step_ns(step_s: float) -> int:
    step_ns = round(step_s * NS_PER_S)
    if step_ns < 1:
        raise ReportError(f"a step of {step_s:g} s: it must be longer than a nanosecond")
    return step_ns


def _of_one_run(table: Any, step_ns: int) -> Any:
    """All rows of one class in one run, an Arrow table, to its figures, another."""
    key = {name: table[name][0].as_py() for name in _RUN}
    rows = _rows(table)
    rows.check(", ".join(f"{name} {value}" for name, value in key.items()))
    found: list[dict[str, Any]] = []
    for index, subscriber in enumerate(rows.subscribers or (None,)):
        of = {**key, "subscriber": subscriber}
        index = index if rows.subscribers else -1
        found.append({**of, **_run_row(figures(rows, index))})
        steps = course(rows, index, step_ns=step_ns)
        found += [{**of, **row} for row in _step_rows(steps, step_ns / NS_PER_S)]
    return _table(found)


def _rows(table: Any) -> Rows:
    kind = table["kind"].combine_chunks().dictionary_encode()
    subscriber = table["subscriber"].combine_chunks().dictionary_encode()
    at, first, last = (table[name].to_numpy() for name in ("at", "first", "last"))
    return Rows(
        kinds=tuple(kind.dictionary.to_pylist()),
        kind=kind.indices.to_numpy(),
        subscribers=tuple(subscriber.dictionary.to_pylist()),
        subscriber=subscriber.indices.fill_null(-1).to_numpy(),
        ranges=Ranges.of(at, first, last),
    )


def _run_row(found: Figures) -> dict[str, Any]:
    names = ("sent", "delivered", "acked", "redelivered", "duplicates", "lost", "unsent")
    return {
        "span": "run",
        "begin_s": 0.0,
        "seconds": found.seconds,
        **{name: getattr(found, name) for name in names},
        "rate": found.rate,
        **_in_us(found.latencies_ns or ()),
    }


def _step_rows(found: Course, step_s: float) -> Iterator[dict[str, Any]]:
    columns = (found.sent, found.delivered, found.acked, found.latencies_ns)
    for index, (sent, delivered, acked, latencies) in enumerate(
        zip(*(one.tolist() for one in columns), strict=True)
    ):
        yield {
            "span": "step",
            "begin_s": index * step_s,
            "seconds": step_s,
            "sent": sent,
            "delivered": delivered,
            "acked": acked,
            "rate": delivered / step_s,
            **_in_us(latencies if latencies[0] != NEVER else ()),
        }


def _in_us(latencies_ns: Any) -> dict[str, float]:
    return {name: value / 1e3 for name, value in zip(LATENCIES, latencies_ns, strict=False)}


def _table(rows: list[dict[str, Any]]) -> Any:
    import pyarrow as pa

    kinds = {"string": pa.string(), "int": pa.int32(), "bigint": pa.int64(), "double": pa.float64()}
    schema = pa.schema([(name, kinds[kind]) for name, kind in map(str.split, DDL.split(", "))])
    return pa.Table.from_pylist(rows, schema)


# Archives ----------------------------------------------------------------------------------------


def of_archive(archive: DataFrame, *, name: str, step_s: float | None = None) -> DataFrame:
    """The figures of an archive, as the table above says; `name` is what they call it.

    It is read once, and its times once more when the length of a step is left to it.
    """
    from pyspark.sql import functions as sql

    at, archived = _micros("timestamp"), _micros("archived")
    place = [sql.coalesce(sql.col(one).cast("string"), sql.lit("")).alias(one) for one in _PLACE]
    frame = archive.select(*place, "offset", at.alias("at"), (archived - at).alias("after"))
    step_us = max(1, _step_ns(step_s or _fitting_step(frame)) // 1000)

    def digests(batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            yield from _digests_of(batch, step_us)

    def work(table: Any) -> Any:
        key = {one: table[one][0].as_py() for one in _PLACE}
        found = Digest(*(table[one].to_numpy() for one in _DIGEST))
        rows = figures_of(found, step_us=step_us)
        return _table([_archive_row({"scenario": name, **key, **row}) for row in rows])

    ddl = ", ".join([*(f"{one} string" for one in _PLACE), *(f"{one} bigint" for one in _DIGEST)])
    return frame.mapInArrow(digests, ddl).groupBy(*_PLACE).applyInArrow(work, DDL)


def _micros(name: str) -> Column:
    """A time of which others may be taken away: a publisher may have said any."""
    from pyspark.sql import functions as sql

    return sql.greatest(sql.least(sql.unix_micros(name), sql.lit(_LATEST)), sql.lit(-_LATEST))


def _fitting_step(frame: DataFrame) -> float:
    """A step of which some hundred make up the whole archive."""
    from pyspark.sql import functions as sql

    span = frame.agg(sql.max("at") - sql.min("at")).first()
    seconds = (span[0] or 0) / 1e6 if span else 0.0
    return next((s for s in _NICE_STEPS_S if seconds <= s * _STEPS_SHOWN), _NICE_STEPS_S[-1])


def _digests_of(batch: Any, step_us: int) -> Iterator[Any]:
    """Rows of an archive, an Arrow batch, to digests of each place in it, others."""
    import pyarrow as pa

    code = np.zeros(batch.num_rows, np.int64)
    for name in _PLACE:
        one = batch[name].dictionary_encode()
        code = code * len(one.dictionary) + one.indices.to_numpy()
    columns = [batch[name].to_numpy() for name in ("offset", "at", "after")]
    for place in np.unique(code):
        which = np.flatnonzero(code == place)
        found = digest(*(column[which] for column in columns), step_us=step_us)
        names = [pa.repeat(batch[name][int(which[0])], found.kind.size) for name in _PLACE]
        numbers = [pa.array(getattr(found, name)) for name in _DIGEST]
        yield pa.RecordBatch.from_arrays([*names, *numbers], names=[*_PLACE, *_DIGEST])


def _archive_row(row: dict[str, Any]) -> dict[str, Any]:
    return row | dict(zip(LATENCIES, map(float, row.pop("latencies_us")), strict=True))
