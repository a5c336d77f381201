"""Batch reads by Spark from a bus."""

from __future__ import annotations

import re
import time
from typing import Any

import pytest

import simplebus
from simplebus.testing.server import BusServer

pytestmark = [pytest.mark.spark, pytest.mark.xdist_group("spark")]


def reading(spark: Any, server: BusServer, **options: object) -> Any:
    found = spark.read.format("simplebus").option("servers", server.address)
    for name, value in {"subscribe": "1", **options}.items():
        found = found.option(name, str(value))
    return found


def test_batch_contains_every_message_with_its_fields(spark: Any, server: BusServer) -> None:
    with simplebus.connect_blocking(server.address) as bus:
        bus.publish_many([b"%d" % n for n in range(1000)], class_id=1)
        bus.publish(b"paid", class_id="orders", channel="orders.eu", key=b"k", headers={"a": "b"})
    rows = reading(spark, server, subscribe="1, orders", includeHeaders="true", minPartitions=4)
    rows = rows.option("includeMemory", "true")
    frame = rows.load()
    assert frame.rdd.getNumPartitions() >= 4
    found = frame.orderBy("topic", "offset").collect()
    assert [bytes(row.value) for row in found[:1000]] == [b"%d" % n for n in range(1000)]
    assert [row.offset for row in found[:1000]] == list(range(1000))
    last = found[1000]
    assert (last.topic, bytes(last.key), last.channel) == ("orders", b"k", "orders.eu")
    assert [(header.key, bytes(header.value)) for header in last.headers] == [("a", b"b")]
    assert (found[0].key, found[0].channel, found[0].headers) == (None,) * 3
    assert (found[0].partition, found[0].timestampType) == (1, 1)
    assert abs(found[0].timestamp.timestamp() - time.time()) < 600
    assert len({row.memory for row in found}) == 1
    assert len(found[0].memory) > 8
    assert found[0].server == server.address.removeprefix("simplebus://")


def test_offsets_and_channels_select_messages(spark: Any, server: BusServer) -> None:
    with simplebus.connect_blocking(server.address) as bus:
        for n in range(20):
            bus.publish(b"%d" % n, class_id=1, channel="even.x" if n % 2 == 0 else "odd.x")
    place = server.address.removeprefix("simplebus://")
    rows = reading(
        spark,
        server,
        channels="even.#",
        startingOffsets=f'{{"{place}": {{"1": 4}}}}',
        endingOffsets=f'{{"{place}": {{"1": 11}}}}',
    ).load()
    assert [row.offset for row in rows.orderBy("offset").collect()] == [4, 6, 8, 10]

    spark.conf.set("spark.sql.python.filterPushdown.enabled", "true")
    narrow = reading(spark, server, filterPushdown="true", maxRecordsPerPartition=1)
    rows = narrow.load().where("offset between 3 and 9 and topic = '1' and offset % 2 = 0")
    assert rows.rdd.getNumPartitions() == 7
    assert sorted(row.offset for row in rows.collect()) == [4, 6, 8]
    spark.conf.unset("spark.sql.python.filterPushdown.enabled")


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"subscribe": "9"}, "no Connect has named class 9"),
        ({"minPartition": "9"}, "there is no option minpartition here; did you mean minPartitions"),
        ({"servers": "127.0.0.1:9"}, "cannot connect to simplebus://127.0.0.1:9"),
    ],
)
def test_unreadable_requests_are_reported(
    spark: Any, server: BusServer, options: dict[str, str], sentence: str
) -> None:
    with pytest.raises(Exception, match=re.escape(sentence)):
        reading(spark, server, **options).load().count()


def test_timestamp_type_of_session_does_not_matter(spark: Any, server: BusServer) -> None:
    with simplebus.connect_blocking(server.address) as bus:
        bus.publish(b"x", class_id=1)
    spark.conf.set("spark.sql.timestampType", "TIMESTAMP_NTZ")
    try:
        frame = reading(spark, server).load()
        assert dict(frame.dtypes)["timestamp"] == "timestamp"
        assert frame.count() == 1
    finally:
        spark.conf.unset("spark.sql.timestampType")
