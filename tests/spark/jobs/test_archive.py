"""Spark archives, compacts and replays the messages of a bus; other readers read the archive."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, date, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import simplebus
from simplebus.core.limits import Limits
from simplebus.core.protocol.envelope_batch import Envelope
from simplebus.core.settings import Retention, Settings
from simplebus.spark.jobs import replay as replay_module
from simplebus.spark.jobs.archive import archive, messages, read
from simplebus.spark.jobs.compaction import compact
from simplebus.spark.jobs.replay import ReplayResult, replay
from simplebus.spark.jobs.report.report import read as report
from simplebus.testing.server import PATIENCE_SECONDS, BusServer, bus_server, until
from tests.spark.fast_start import JAVA_OPTIONS
from tests.spark.processes import end_session
from tests.support.programs import environment

pytestmark = [pytest.mark.long, pytest.mark.spark, pytest.mark.xdist_group("spark")]

ODD = "shop:eu/50%é"
"""A class whose name no folder can have."""
TODAY = datetime.now(UTC)


@pytest.fixture
def retaining_server() -> Iterator[BusServer]:
    """Yield a bus that keeps processed messages, as after a batch whose end was not recorded."""
    with bus_server(Settings(keep=Retention(messages=10_000))) as up:
        yield up


def publish(server: BusServer, first: int, last: int) -> None:
    with simplebus.connect_blocking(server.address) as bus:
        bus.publish_many([b"%d" % n for n in range(first, last)], class_id=1)
        about = {"channel": "x.y", "key": b"k", "headers": {"h": "v"}}
        for n in range(first, last, 100):
            bus.publish(b"%d" % n, class_id=ODD, **about)


def run(
    spark: Any,
    server: BusServer,
    place: Path,
    format: str,
    *,
    partition_by: str = "day",
    **subscribed: str,
) -> None:
    subscribed = subscribed or {"subscribe": f"1,{ODD}"}
    rows = messages(spark, servers=server.address, maxOffsetsPerTrigger=600, **subscribed)
    query = archive(rows, str(place), format=format, partition_by=partition_by)
    try:
        assert query.awaitTermination(240)
    finally:
        query.stop()


def found(place: Path, format: str) -> list[tuple[str, int]]:
    """Return the archived (class, value) pairs as read without Spark."""
    if format == "delta":
        from deltalake import DeltaTable

        table = DeltaTable(place).to_pyarrow_table()
    else:
        kinds = pa.schema([("class", pa.string()), ("date", pa.date32())])
        import pyarrow.dataset as ds  # It imports pandas.

        table = ds.dataset(place, partitioning=ds.partitioning(kinds, flavor="hive")).to_table()
    assert {day.isoformat() for day in table["date"].unique().to_pylist()} <= {
        (TODAY + timedelta(days)).date().isoformat() for days in (0, 1)
    }
    rows = zip(table["class"].to_pylist(), table["value"].to_pylist(), strict=True)
    return sorted((name, int(value)) for name, value in rows)


def expected(last: int) -> list[tuple[str, int]]:
    return sorted([("1", n) for n in range(last)] + [(ODD, n) for n in range(0, last, 100)])


def data_files(place: Path) -> list[Path]:
    return list(place.glob("class=*/date=*/*.parquet"))


@pytest.mark.parametrize("format", ["parquet", "delta"])
def test_each_message_is_archived_once(
    spark: Any, retaining_server: BusServer, tmp_path: Path, format: str
) -> None:
    server = retaining_server
    publish(server, 0, 1000)
    run(spark, server, tmp_path, format)
    assert found(tmp_path, format) == expected(1000)

    commits = tmp_path / "_checkpoint" / "commits"
    for name in ("1", ".1.crc"):  # As if the driver had died before it wrote them.
        (commits / name).unlink(missing_ok=True)
    publish(server, 1000, 1100)
    run(spark, server, tmp_path, format)
    assert {path.name for path in commits.glob("[0-9]*")} == {"0", "1", "2"}
    assert found(tmp_path, format) == expected(1100)

    latest_batch = sorted(set(expected(1100)) - set(expected(1000)))
    before = len(data_files(tmp_path))
    first_result = compact(spark, str(tmp_path), retention_hours=0)
    assert re.fullmatch(r"\d+ files became \d+, in \d+ folders?", str(first_result))
    result = compact(spark, str(tmp_path), retention_hours=0)
    assert str(result).startswith("nothing to merge: ")
    assert found(tmp_path, format) == expected(1100)
    merged_count = before - first_result.files_before + first_result.files_after
    assert len(data_files(tmp_path)) == merged_count < before
    rows = read(spark, str(tmp_path)).where("class != '1'").orderBy("offset").collect()
    assert [int(bytes(row.value)) for row in rows] == list(range(0, 1100, 100))
    assert [row.offset for row in rows] == list(range(11))
    assert {(bytes(r.key), r.channel, r.headers[0].key, r["class"]) for r in rows} == {
        (b"k", "x.y", "h", ODD)
    }
    assert {row.server for row in rows} == {server.address.removeprefix("simplebus://")}
    later = (TODAY + timedelta(days=2)).date()
    before = len(data_files(tmp_path))
    deleted = compact(spark, str(tmp_path), delete_before=later, retention_hours=0).deleted
    assert deleted == before - len(data_files(tmp_path)) > 0
    # The latest batch of a query stays in Parquet.
    assert found(tmp_path, format) == ([] if format == "delta" else latest_batch)


@pytest.mark.parametrize("format", ["parquet", "delta"])
def test_extreme_publisher_times_are_archived(
    spark: Any, server: BusServer, tmp_path: Path, format: str
) -> None:
    times = [-(1 << 63), (1 << 63) - 1, 253_402_300_800_000_000, -1, 0]
    with simplebus.connect_blocking(server.address) as bus:
        for published in times:
            bus.connection.core.publish(b"x", 1, Envelope(published=published))
        bus.flush()
    run(spark, server, tmp_path, format)
    compact(spark, str(tmp_path))
    rows = read(spark, str(tmp_path)).orderBy("offset")
    rows = rows.selectExpr("unix_micros(timestamp) at", "cast(date as string) day")
    days = [None, None, None, "1969-12-31", "1970-01-01"]
    assert [tuple(row) for row in rows.collect()] == list(zip(times, days, strict=True))
    (whole,) = report(spark, str(tmp_path)).where("span = 'run'").collect()
    assert (whole.sent, whole.delivered) == (5, 5)


@pytest.mark.parametrize("format", ["parquet", "delta"])
def test_archive_has_folders_of_hours(
    spark: Any, server: BusServer, tmp_path: Path, format: str
) -> None:
    hour = 3_600_000_000
    parts = {
        -1: ("1969-12-31", 23),
        0: ("1970-01-01", 0),
        hour - 1: ("1970-01-01", 0),
        hour: ("1970-01-01", 1),
        (1 << 63) - 1: (None, None),
    }

    def publish_and_archive(partition_by: str) -> None:
        with simplebus.connect_blocking(server.address) as bus:
            for published in parts:
                bus.connection.core.publish(b"x", 1, Envelope(published=published))
            bus.flush()
        run(spark, server, tmp_path, format, partition_by=partition_by)

    def archived() -> list[tuple[Any, ...]]:
        rows = read(spark, str(tmp_path)).orderBy("timestamp", "offset")
        columns = ("unix_micros(timestamp)", "cast(date as string)", "hour")
        return [tuple(row) for row in rows.selectExpr(*columns).collect()]

    for _ in range(3):
        publish_and_archive("hour")
    folders = {path.parent.name for path in tmp_path.glob("class=1/date=*/hour=*/*.parquet")}
    assert folders == {"hour=0", "hour=1", "hour=23", "hour=__HIVE_DEFAULT_PARTITION__"}
    expected = [(published, *part) for published, part in parts.items() for _ in range(3)]
    assert archived() == expected
    # In Parquet, files of the latest batch of a query stay as they are.
    result = compact(spark, str(tmp_path), retention_hours=0)
    assert str(result) == f"{8 if format == 'parquet' else 12} files became 4, in 4 folders"
    assert archived() == expected
    (whole,) = report(spark, str(tmp_path)).where("span = 'run'").collect()
    assert (whole.sent, whole.delivered) == (15, 15)
    assert replay(spark, str(tmp_path), server.address, to_class="again").messages == 15
    with pytest.raises(Exception, match="have the columns class, date, hour, expected class, date"):
        publish_and_archive("day")
    assert archived() == expected


def test_unknown_length_of_folders_is_rejected() -> None:
    with pytest.raises(ValueError, match="expected partition_by day or hour, got 'month'"):
        archive(None, "there", partition_by="month")


def test_pattern_selects_classes_at_each_start(
    spark: Any, server: BusServer, tmp_path: Path
) -> None:
    rounds = [
        (["orders.eu", "stock"], ["orders.eu"]),
        (["orders.us", "orders.eu"], ["orders.eu", "orders.eu", "orders.us"]),
    ]
    for published, archived in rounds:
        with simplebus.connect_blocking(server.address) as bus:
            for name in published:
                bus.publish(b"1", class_id=name)
        run(spark, server, tmp_path, "parquet", subscribe_pattern="orders[.].*")
        assert found(tmp_path, "parquet") == [(name, 1) for name in archived]


START = datetime(2026, 3, 1, 23, 59, 58, tzinfo=UTC)


def test_files_with_other_columns_are_read_and_compacted(spark: Any, tmp_path: Path) -> None:
    """Files of an earlier version lack columns; those of other programs have more."""
    folder = tmp_path / "class=1" / "date=2026-01-01"
    folder.mkdir(parents=True)
    for number, more in enumerate([{}, {"memory": ["m"], "later": [5]}]):
        columns = {"value": [b"%d" % number], "offset": [number], "server": ["a:1"], **more}
        pq.write_table(pa.table(columns), folder / f"{number}.parquet")
    before = sorted(tuple(row) for row in read(spark, str(tmp_path)).collect())
    assert [(row[1], row[3], row[9]) for row in before] == [(b"0", 0, None), (b"1", 1, "m")]
    assert str(compact(spark, str(tmp_path))) == "2 files became 1, in 1 folder"
    assert sorted(tuple(row) for row in read(spark, str(tmp_path)).collect()) == before
    assert str(compact(spark, str(tmp_path), delete_before=date(2026, 1, 1))) == (
        "nothing to merge: 1 file without another small file in the same folder"
    )
    assert str(compact(spark, str(tmp_path), delete_before=date(2026, 1, 2))) == (
        "1 file deleted; nothing to merge: the archive has no files"
    )


@pytest.fixture
def old_archive(tmp_path: Path) -> str:
    """Write two classes across midnight, a message every 0.1 s, in files without an order."""
    header = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
    for name in ("orders", "7"):
        for turn in range(4):
            numbers = list(range(3 - turn, 40, 4))
            stamps = [START + timedelta(seconds=n / 10) for n in numbers]
            table = pa.table(
                {
                    "key": pa.array([b"k%d" % (n % 3) for n in numbers], pa.binary()),
                    "value": pa.array([f"{name} {n}".encode() for n in numbers], pa.binary()),
                    "offset": pa.array(numbers, pa.int64()),
                    "timestamp": pa.array(stamps, pa.timestamp("us", "UTC")),
                    "channel": [f"c.{n % 2}" for n in numbers],
                    "headers": pa.array(
                        [[{"key": "n", "value": b"%d" % n}] for n in numbers], header
                    ),
                    "server": ["h:1"] * len(numbers),
                    "memory": ["m"] * len(numbers),
                }
            )
            for day in {stamp.date() for stamp in stamps}:
                rows = pa.array([stamp.date() == day for stamp in stamps])
                place = tmp_path / f"class={name}" / f"date={day}"
                place.mkdir(parents=True, exist_ok=True)
                pq.write_table(table.filter(rows), place / f"{turn}.parquet")
    return str(tmp_path)


def stored(server: BusServer, class_: str | int) -> list[Any]:
    with simplebus.connect_blocking(server.address) as bus:
        return list(bus.fetch(class_))


SINKS = ("simplebus", "simplebus_python")
"""Sinks of sessions with and without the connector's jar."""


@pytest.mark.parametrize("sink", SINKS)
def test_archive_is_replayed_once_in_order(
    spark: Any,
    server: BusServer,
    old_archive: str,
    monkeypatch: pytest.MonkeyPatch,
    sink: str,
) -> None:
    monkeypatch.setattr(replay_module, "_SINK", sink)
    for attempt in range(2):
        result = replay(spark, old_archive, server.address, name="again")
        assert (result.messages, result.stored_before) == (80, 80 * attempt)
    for name, class_ in (("orders", "orders"), ("7", 7)):
        back = stored(server, class_)
        assert [m.payload.decode() for m in back] == [f"{name} {n}" for n in range(40)]
        assert all(m.key == b"k%d" % (n % 3) for n, m in enumerate(back))
        assert all(m.channel == f"c.{n % 2}" for n, m in enumerate(back))
        assert all(dict(m.headers) == {"n": str(n)} for n, m in enumerate(back))

    chosen: dict[str, Any] = {
        "channels": ["c.1"],
        "begin": START + timedelta(seconds=1),
        "to_class": "picked",
    }
    expected = sorted(f"{name} {n}" for name in ("orders", "7") for n in range(11, 20, 2))
    for speed, before in ((1000.0, 0), (None, len(expected))):
        result = replay(
            spark,
            old_archive,
            server.address,
            end=datetime(2026, 3, 2),
            speed=speed,
            name="picked",
            **chosen,
        )
        assert (result.messages, result.stored_before) == (len(expected), before)
        assert sorted(m.payload.decode() for m in stored(server, "picked")) == expected
    empty_result = replay(spark, old_archive, server.address, end=datetime(2000, 1, 1))
    assert empty_result.messages == 0


PADDING = b"x" * 500
"""Makes a stream longer than the blocks that a publisher sends."""


QUICK_START = (
    f"spark.driver.extraJavaOptions={JAVA_OPTIONS}",
    "spark.sql.codegen.wholeStage=false",
    "spark.sql.codegen.factoryMode=NO_CODEGEN",
    "spark.sql.shuffle.partitions=1",
)


def write_numbers(spark: Any, path: str, count: int, *, bad: int = -1) -> None:
    """Write an archive of class 7. The message `bad` has a channel that cannot be published."""
    frame = spark.range(0, count, 1, 4).selectExpr(
        f"concat(cast(string(id) as binary), X'{PADDING.hex()}') value",
        "id offset",
        f"if(id = {bad}, 'a..b', 'a.b') channel",
        "timestamp_micros(id) timestamp",
        "'7' class",
        "date'1970-01-01' date",
    )
    frame.write.partitionBy("class", "date").mode("overwrite").parquet(path)


def numbers(payloads: list[bytes]) -> list[int]:
    assert all(payload.endswith(PADDING) for payload in payloads)
    return [int(payload.removesuffix(PADDING)) for payload in payloads]


@pytest.mark.parametrize(
    "runs",
    [
        [(SINKS[0], None), (SINKS[1], None), (SINKS[0], 1e9), (SINKS[0], None)],
        [(SINKS[1], None), (SINKS[0], None), (SINKS[1], None), (SINKS[0], 1e9)],
    ],
)
def test_failed_replay_continues_where_it_ended(
    spark: Any,
    server: BusServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    runs: list[tuple[str, float | None]],
) -> None:
    """All runs but the last fail at a message."""
    count, stored_count = 8000, 0
    for number, (sink, speed) in enumerate(runs, 1):
        monkeypatch.setattr(replay_module, "_SINK", sink)
        is_last = number == len(runs)
        write_numbers(spark, str(tmp_path), count, bad=-1 if is_last else 2000 * number)
        run = partial(replay, spark, str(tmp_path), server.address, speed=speed, name="again")
        if is_last:
            assert run() == ReplayResult(count, stored_count)
        else:
            with pytest.raises(Exception, match=r"channel 'a\.\.b': segment 2"):
                run()
        found = numbers([message.payload for message in stored(server, 7)])
        assert found == list(range(len(found)))
        assert len(found) > stored_count
        stored_count = len(found)
    assert stored_count == count


def test_killed_replay_stores_each_message_once(spark: Any, tmp_path: Path) -> None:
    """The command and its JVM are killed while the bus has no space."""
    count, class_messages = 5000, 1000
    archive_path = str(tmp_path / "archive")
    write_numbers(spark, archive_path, count)
    program = [sys.executable, "-m", "simplebus", "pipeline", "replay", archive_path]
    with (
        bus_server(Settings(limits=Limits(class_messages=class_messages))) as server,
        simplebus.connect_blocking(server.address) as bus,
        bus.subscribe(7) as messages,
    ):
        program += ["--servers", server.address, "--name", "again", "--master", "local[1]"]
        for setting in QUICK_START:
            program += ["--set", setting]
        process = subprocess.Popen(program, start_new_session=True, env=environment())
        try:
            until(lambda: server.statistics(7).blocked_sessions > 0)
        finally:
            end_session(process.pid)
            process.wait()
        with ThreadPoolExecutor() as pool:
            again = pool.submit(
                replay, spark, str(tmp_path / "archive"), server.address, name="again"
            )
            received: list[bytes] = []
            while len(received) < count:
                piece = messages.take(count - len(received), timeout=PATIENCE_SECONDS)
                assert piece, f"{len(received)} of {count} messages arrived"
                received.extend(message.payload for message in piece)
            result = again.result()
        assert result.messages == count
        assert result.stored_before >= class_messages
        assert numbers(received) == list(range(count))
