"""Tests of batch reads, planned and read in Spark's order of calls, without Spark."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pyspark.sql.datasource import EqualTo, GreaterThan, LessThanOrEqual

import simplebus
from simplebus.core.errors import BusConnectionError
from simplebus.core.settings import Retention, Settings
from simplebus.server.run import RunningServer
from simplebus.spark.options import source_options
from simplebus.spark.read import bus_reader as buses
from simplebus.spark.read.bus_reader import ClassMissingError
from simplebus.spark.read.offsets import OffsetError
from simplebus.spark.read.planner import DataLossError
from simplebus.spark.source import BatchReader, FilteringReader
from simplebus.testing.server import BusServer, bus_server
from tests.client.faulty_server import silent_listener
from tests.spark.bus_messages import publish_numbers
from tests.spark.competing_consumer import take


def place(server: BusServer) -> str:
    return server.address.removeprefix("simplebus://")


def reader(
    server: BusServer, kind: type[BatchReader] = BatchReader, **options: object
) -> BatchReader:
    defaults = {"servers": server.address, "subscribe": "1", "timeout": 5, **options}
    return kind(source_options({n: str(v) for n, v in defaults.items()}, streaming=False))


def rows(found: BatchReader) -> list[dict[str, Any]]:
    return [
        row
        for task in found.partitions()
        for batch in found.read(task)
        for row in batch.to_pylist()
    ]


def offsets(found: BatchReader) -> list[int]:
    return sorted(row["offset"] for row in rows(found))


def a_minute_later(server: BusServer) -> int:
    """Advance the server's clock by a minute. Returns its time in milliseconds."""

    def go_on(up: RunningServer) -> float:
        now = up.server.broker.clock.now
        up.server._clock_offset += 60.0
        return now

    return round((server.ask(go_on) + 30) * 1000)


def test_batch_reads_between_two_times(server: BusServer) -> None:
    publish_numbers(server, 0, 5)
    cuts = []
    for n in (5, 10):
        cuts.append(a_minute_later(server))
        publish_numbers(server, n, n + 5)
    first_cut, second_cut = cuts
    assert offsets(reader(server, startingTimestamp=first_cut)) == list(range(5, 15))
    assert offsets(reader(server, endingTimestamp=second_cut)) == list(range(10))
    assert offsets(reader(server, startingTimestamp=first_cut, endingTimestamp=second_cut)) == [
        *range(5, 10)
    ]
    by_class = [json.dumps({place(server): {"1": cut}}) for cut in cuts]
    options = dict(
        zip(("startingOffsetsByTimestamp", "endingOffsetsByTimestamp"), by_class, strict=True)
    )
    assert offsets(reader(server, **options)) == list(range(5, 10))
    late = 4_000_000_000_000
    assert offsets(reader(server, endingTimestamp=late)) == list(range(15))
    with pytest.raises(OffsetError, match="stores no message accepted since then"):
        reader(server, startingTimestamp=late).partitions()
    stamps = {row["offset"]: row["timestamp"].timestamp() * 1000 for row in rows(reader(server))}
    assert stamps[4] < first_cut <= stamps[5] <= stamps[9] < second_cut <= stamps[10]


def test_message_time_is_stable(server: BusServer) -> None:
    publish_numbers(server, 0, 5)
    before = [row["timestamp"] for row in rows(reader(server))]
    publish_numbers(server, 5, 9)
    starting_offsets = json.dumps({place(server): {"1": 3}})
    after = rows(reader(server, startingOffsets=starting_offsets, maxRecordsPerPartition=1))
    assert [row["timestamp"] for row in after][:2] == before[3:]


def test_pushed_filters_agree_with_spark(server: BusServer) -> None:
    publish_numbers(server, 0, 9)
    publish_numbers(server, 0, 9, "orders")
    found = reader(server, FilteringReader, subscribe="1,orders")
    assert isinstance(found, FilteringReader)
    filters = [
        EqualTo(("topic",), "orders"),
        GreaterThan(("offset",), 2),
        LessThanOrEqual(("offset",), 5),
    ]
    assert list(found.pushFilters(filters)) == filters
    assert [(row["topic"], row["offset"]) for row in rows(found)] == [
        ("orders", n) for n in (3, 4, 5)
    ]


@pytest.mark.parametrize(
    ("options", "error", "sentence"),
    [
        ({"subscribe": "9"}, ClassMissingError, "no Connect has named class 9"),
        ({"startingOffsets": 6}, OffsetError, "startingOffsets is 6 .* beyond its end: .* be 5"),
        ({"endingOffsets": 6}, OffsetError, "endingOffsets is 6 .* beyond its end"),
        (
            {"servers": "127.0.0.1:9"},
            BusConnectionError,
            "cannot connect to simplebus://127.0.0.1:9",
        ),
    ],
)
def test_unreadable_requests_are_reported(
    server: BusServer, options: dict[str, Any], error: type[Exception], sentence: str
) -> None:
    publish_numbers(server, 0, 5)
    encoded_options = {
        name: json.dumps({place(server): {"1": value}}) if isinstance(value, int) else value
        for name, value in options.items()
    }
    with pytest.raises(error, match=sentence):
        reader(server, **encoded_options).partitions()


def test_offsets_below_first_stored_message_are_a_loss() -> None:
    with bus_server(Settings(keep=Retention(messages=2))) as server:
        publish_numbers(server, 0, 5)
        with simplebus.connect_blocking(server.address) as bus, bus.subscribe(1) as messages:
            take(messages, 5)
        starting_offsets = json.dumps({place(server): {"1": 1}})
        with pytest.raises(DataLossError, match=r"messages 1 to 2 of class 1 at .* are lost"):
            reader(server, startingOffsets=starting_offsets).partitions()
        assert offsets(
            reader(server, startingOffsets=starting_offsets, failOnDataLoss="false")
        ) == [3, 4]


def test_unreachable_server_is_awaited_for_the_timeout(
    monkeypatch: pytest.MonkeyPatch, server: BusServer
) -> None:
    monkeypatch.setattr(buses, "_CONNECT_SECONDS", 0.1)
    with silent_listener() as deaf:
        addresses = f"{server.address},{deaf.address}"
        publish_numbers(server, 0, 1)
        with pytest.raises(BusConnectionError, match=rf"{deaf.address}, but no answer .* 0\.\d+ s"):
            reader(server, servers=addresses, timeout=3600).partitions()
