"""Read tasks, run without Spark."""

from __future__ import annotations

from pyspark.sql.datasource import InputPartition

import simplebus
from simplebus.spark.options import source_options
from simplebus.spark.source import BatchReader
from simplebus.testing.server import BusServer


def test_empty_class_is_read_to_its_end(server: BusServer) -> None:
    with simplebus.connect_blocking(server.address) as bus:
        bus.fetch("empty")
    options = {"servers": server.address, "subscribe": "empty"}
    reader = BatchReader(source_options(options, streaming=False))
    assert list(reader.partitions()) == []
    assert list(reader.read(InputPartition(None))) == []  # Spark's task if there are none.
