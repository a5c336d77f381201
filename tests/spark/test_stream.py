"""Spark streams from a bus: no lost or duplicate rows, and processed messages are released."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from simplebus.core.settings import Retention, Settings
from simplebus.spark import lag
from simplebus.testing.server import BusServer, bus_server, until
from tests.spark.bus_messages import consume_messages, publish_numbers

pytestmark = [pytest.mark.long, pytest.mark.spark, pytest.mark.xdist_group("spark")]


def retained_floor(server: BusServer) -> int:
    (subscription,) = [
        s for s in server.statistics().subscriptions if s.durable.startswith("spark ")
    ]
    return subscription.floor


def archive(spark: Any, server: BusServer, place: Path, **options: object) -> Any:
    """Start a query that writes the present messages as Parquet and ends."""
    stream = spark.readStream.format("simplebus")
    defaults = {
        "servers": server.address,
        "subscribe": "1",
        "startingOffsets": "earliest",
        **options,
    }
    for name, value in defaults.items():
        stream = stream.option(name, str(value))
    writing = stream.load().writeStream.format("parquet").trigger(availableNow=True)
    query = writing.option("checkpointLocation", str(place / "checkpoint")).start(
        str(place / "table")
    )
    try:
        assert query.awaitTermination(60)
    finally:
        query.stop()
    return query


def archived(spark: Any, place: Path) -> list[tuple[str, int]]:
    rows = spark.read.parquet(str(place / "table")).select("topic", "offset", "value").collect()
    assert all(row.offset == int(bytes(row.value)) for row in rows)
    return sorted((row.topic, row.offset) for row in rows)


def test_stream_is_archived_once_across_restarts(
    spark: Any, server: BusServer, tmp_path: Path
) -> None:
    publish_numbers(server, 0, 1000)
    query = archive(spark, server, tmp_path, maxOffsetsPerTrigger=400)
    assert [p["numInputRows"] for p in query.recentProgress if p["numInputRows"]] == [400, 400, 200]
    place = server.address.removeprefix("simplebus://")
    assert lag(query.lastProgress) == {place: {"1": 0}}
    assert lag(query.recentProgress[0]) == {place: {"1": 600}}
    assert archived(spark, tmp_path) == [("1", n) for n in range(1000)]
    until(lambda: retained_floor(server) == 1000)  # The last batch is released, too.

    publish_numbers(server, 1000, 1500)
    until(lambda: server.statistics().ring.floor == 1000)  # The query retains these messages.
    publish_numbers(server, 0, 10, class_id=2)
    with bus_server() as second_server:
        publish_numbers(second_server, 0, 5, class_id=2)
        addresses = f"{server.address},{second_server.address}"
        publish_numbers(second_server, 0, 7)
        archive(spark, server, tmp_path, servers=addresses, subscribe="1,2")
        assert archived(spark, tmp_path) == sorted(
            [
                *(("1", n) for n in range(1500)),
                *(("2", n) for n in range(10)),  # An added class is read from its start.
                *(("1", n) for n in range(7)),  # An added bus, too.
                *(("2", n) for n in range(5)),
            ]
        )
        assert retained_floor(second_server) == 7


def test_missing_messages_end_the_query_or_are_skipped(spark: Any, tmp_path: Path) -> None:
    with bus_server(Settings(keep=Retention(messages=5))) as server:
        publish_numbers(server, 0, 20)
        archive(spark, server, tmp_path, durable="none")
        until(lambda: not server.statistics().subscriptions)  # The subscription ends later.
        publish_numbers(server, 20, 60)
        consume_messages(server, 60)  # The stopped query retains nothing.
        with pytest.raises(Exception, match=r"messages 20 to 54 of class 1 at .* are lost"):
            archive(spark, server, tmp_path, durable="none")
        archive(spark, server, tmp_path, failOnDataLoss="false")
        assert [n for _, n in archived(spark, tmp_path)] == [*range(20), *range(55, 60)]
