"""Tests of reports on a trace and on an archive with known results."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from simplebus.spark.jobs.report.report import NAMES, ReportError, read, read_run
from simplebus.spark.jobs.report.traces import COLUMNS, RUN_FILE

pytestmark = [pytest.mark.long, pytest.mark.spark, pytest.mark.xdist_group("spark")]

MS = 1_000_000
TRACE = [
    # round, class, process, subscriber, kind, at, first, last
    (0, "1", "p", None, "sent", 0, 0, 80),
    (0, "1", "p", None, "sent", 150 * MS, 80, 100),
    (0, "1", "s", "one", "delivered", 2 * MS, 0, 60),
    (0, "1", "s", "one", "delivered", 4 * MS, 55, 75),  # 5 duplicates.
    (0, "1", "s", "one", "redelivered", 199 * MS, 70, 90),
    (0, "1", "s", "one", "acked", 200 * MS, 0, 90),
    (0, "1", "s", "two", "delivered", 160 * MS, 0, 100),
    (0, "2", "p", None, "sent", 0, 0, 10),
    (0, "2", "s", "two", "delivered", 50 * MS, 0, 10),
    (1, "1", "p", None, "sent", 0, 0, 5),
]
BEGIN = datetime(2026, 11, 21, 12, tzinfo=UTC)


def write_trace(place: Path) -> None:
    kinds = {"string": pa.string(), "int": pa.int32(), "bigint": pa.int64()}
    schema = pa.schema([(name, kinds[kind]) for name, kind in COLUMNS.items()])
    names = ("round", "class", "process", "subscriber", "kind", "at", "first", "last")
    rows = [
        {"scenario": "s", "variant": "v", **dict(zip(names, row, strict=True))} for row in TRACE
    ]
    pq.write_table(pa.Table.from_pylist(rows, schema), place / "trace.parquet")
    (place / RUN_FILE).write_text(json.dumps({}))


def write_archive(place: Path) -> None:
    """Write numbers 3 to 102 of class 7 without 10 to 14 and with 50 twice."""
    numbers = [n for n in range(3, 103) if not 10 <= n < 15]
    rows = [("m", n) for n in [*numbers, 50]] + [("n", n) for n in range(10)]
    times = [BEGIN + timedelta(seconds=n) for _, n in rows]
    table = pa.table(
        {
            "offset": [n for _, n in rows],
            "timestamp": pa.array(times, pa.timestamp("us", "UTC")),
            "archived": pa.array(
                [at + timedelta(milliseconds=n) for at, (_, n) in zip(times, rows, strict=True)],
                pa.timestamp("us", "UTC"),
            ),
            "server": ["h:1"] * len(rows),
            "memory": [memory for memory, _ in rows],
        }
    )
    for part in (0, 1):  # Two files, so that ranges meet from several.
        folder = place / "class=7" / "date=2026-11-21"
        folder.mkdir(parents=True, exist_ok=True)
        pq.write_table(table.slice(part * 53, 53), folder / f"{part}.parquet")


def rows_of(found: Any) -> list[dict[str, Any]]:
    assert tuple(found.columns) == NAMES
    return [row.asDict() for row in found.collect()]


def test_report_includes_losses_and_duplicates(spark: Any, tmp_path: Path) -> None:
    for name, write in (("trace", write_trace), ("archive", write_archive)):
        (tmp_path / name).mkdir()
        write(tmp_path / name)
    paths = [str(tmp_path / "trace"), str(tmp_path / "archive")]
    rows = rows_of(read(spark, *paths))
    counted = ("sent", "delivered", "acked", "redelivered", "duplicates", "lost", "unsent")

    def run(*key: object, by: tuple[str, ...]) -> list[Any]:
        chosen = [r for r in rows if r["span"] == "run" and tuple(r[name] for name in by) == key]
        (row,) = chosen
        return [*(row[name] for name in counted), row["seconds"], row["p50_us"], row["max_us"]]

    of_trace = ("round", "class", "subscriber")
    assert run(0, "1", "one", by=of_trace) == [100, 90, 90, 20, 5, 10, 0, 0.2, 2e3, 199e3]
    assert run(0, "1", "two", by=of_trace) == [100, 100, 0, 0, 0, 0, 0, 0.16, 160e3, 160e3]
    assert run(0, "2", "two", by=of_trace) == [10, 10, 0, 0, 0, 0, 0, 0.05, 50e3, 50e3]
    assert run(1, "1", None, by=of_trace) == [5, 0, 0, 0, 0, 5, 0, 0.0, None, None]
    of_archive = ("class", "memory")
    assert run("7", "m", by=of_archive) == [
        100,
        95,
        None,
        None,
        1,
        5,
        None,
        99.0,
        54e3,
        102e3,
    ]
    assert run("7", "n", by=of_archive) == [10, 10, None, None, 0, 0, None, 9.0, 4e3, 9e3]

    def steps(*key: object, by: tuple[str, ...]) -> list[tuple[Any, ...]]:
        return sorted(
            (row["begin_s"], row["seconds"], row["sent"], row["delivered"], row["max_us"])
            for row in rows
            if row["span"] == "step" and tuple(row[name] for name in by) == key
        )

    assert steps(0, "1", "one", by=of_trace) == [
        (0.0, 0.1, 80, 80, 4e3),
        (0.1, 0.1, 20, 20, 199e3),
        (0.2, 0.1, 0, 0, None),
    ]
    of_n = steps("7", "n", by=of_archive)
    assert [(row[0] - BEGIN.timestamp(), row[1], row[3]) for row in of_n] == [
        (n, 1.0, 1) for n in range(10)
    ]
    (tmp_path / "other").mkdir()
    pq.write_table(pa.table({"id": [1]}), tmp_path / "other" / "other.parquet")
    assert [read_run(spark, path) for path in paths] == [{}, None]
    with pytest.raises(ReportError, match=r"is neither a trace .* it has the columns id"):
        read(spark, str(tmp_path / "other"))
    with pytest.raises(ReportError, match=r"there is no Parquet to read at .*nowhere"):
        read(spark, str(tmp_path / "nowhere"))
