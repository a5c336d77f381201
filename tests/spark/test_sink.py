"""The sink publishes each row once, with a confirm, also if Spark retries a task."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest

import simplebus
from simplebus.core.errors import BusConnectionError
from simplebus.spark import keepalive
from simplebus.spark.options import SinkOptions
from simplebus.spark.sink import StreamWriter, TaskWriteResult, write_task
from simplebus.testing.server import BusServer
from tests.spark.bus_messages import stored_payloads
from tests.spark.heartbeat_bus import heartbeat_bus

ROWS = [b"%d" % n for n in range(1000)]


class TaskFailedError(Exception):
    """Simulated failure of a task."""


def rows(*, until: int = 1000, piece: int = 70, fails: bool = False) -> Iterator[Any]:
    for first in range(0, until, piece):
        yield pa.RecordBatch.from_pydict({"value": ROWS[first : min(first + piece, until)]})
    if fails:
        raise TaskFailedError


@pytest.fixture
def options(server: BusServer) -> SinkOptions:
    return SinkOptions(server.address, class_="1", timeout=60)


def test_retried_task_publishes_once(server: BusServer, options: SinkOptions) -> None:
    assert write_task(rows(), options, "task") == TaskWriteResult(1000, 0)
    assert write_task(rows(piece=33), options, "task") == TaskWriteResult(1000, 1000)
    assert stored_payloads(server) == ROWS
    assert write_task(rows(), options, "other") == TaskWriteResult(1000, 0)
    assert len(stored_payloads(server)) == 2000


def test_next_attempt_finishes_a_failed_task(server: BusServer, options: SinkOptions) -> None:
    for until in (210, 35, 520):
        with pytest.raises(TaskFailedError):
            write_task(rows(until=until, fails=True), options, "task")
    found = write_task(rows(piece=41), options, "task")
    assert (found.rows, found.stored_before) == (1000, 520)
    assert stored_payloads(server) == ROWS


def test_replaced_attempt_stops_publishing(server: BusServer, options: SinkOptions) -> None:
    def slow() -> Iterator[Any]:
        yield from rows(until=140)
        assert write_task(rows(), options, "task").rows == 1000
        yield from rows(until=560)

    with pytest.raises(BusConnectionError, match=r"connected again|another"):
        write_task(slow(), options, "task")
    assert stored_payloads(server) == ROWS


def test_lost_connection_of_a_task_is_replaced(server: BusServer, options: SinkOptions) -> None:
    def cut() -> Iterator[Any]:
        for batch in rows():
            yield batch
            server.hang_up()

    assert write_task(cut(), options, "task").rows == 1000
    assert stored_payloads(server) == ROWS


@pytest.mark.spark
@pytest.mark.xdist_group("spark")
def test_rows_are_published_with_all_columns(spark: Any, server: BusServer) -> None:
    frame = spark.range(300).selectExpr(
        "cast(id as string) value",
        "concat('shop.', cast(id % 2 as string)) channel",
        "case when id % 3 = 0 then 'k' end key",
    )
    writing = frame.write.format("simplebus").mode("append").option("servers", server.address)
    writing.option("class", "orders").save()
    with simplebus.connect_blocking(server.address) as bus:
        found = bus.fetch("orders")
    assert sorted(int(m.payload) for m in found) == list(range(300))
    assert all(m.channel == f"shop.{int(m.payload) % 2}" for m in found)
    assert all(m.key == (b"" if int(m.payload) % 3 else b"k") for m in found)
    with pytest.raises(Exception, match="unknown column id; expected value"):
        spark.range(1).write.format("simplebus").mode("append").option(
            "servers", server.address
        ).option("class", "orders").save()


def test_digits_of_other_scripts_form_a_name(server: BusServer) -> None:
    write_task(rows(), SinkOptions(server.address, class_="\u0663", timeout=60), "task")
    assert stored_payloads(server, "\u0663") == ROWS


def test_batch_of_a_continuous_trigger_is_refused(options: SinkOptions) -> None:
    """Spark commits it without having passed the rows to the sink in Python."""
    StreamWriter(options).commit([TaskWriteResult(1, 0), TaskWriteResult(0, 0)], 0)
    with pytest.raises(
        ValueError, match="batch 1 has tasks without a result, as with a continuous"
    ):
        StreamWriter(options).commit([None, None], 1)


def test_task_waits_for_slow_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keepalive, "_INTERVAL_SECONDS", 0.02)
    with heartbeat_bus() as bus:

        def slowly() -> Iterator[Any]:
            for at, batch in enumerate(rows(until=140)):
                yield batch
                if at == 0:
                    bus.advance_after_data(8)

        options = SinkOptions(bus.server.address, class_="1", timeout=60)
        assert write_task(slowly(), options, "task") == TaskWriteResult(140, 0)
        assert bus.count_closed() == 0
        assert stored_payloads(bus.server) == ROWS[:140]
