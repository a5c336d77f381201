"""Tests of the retention durable at a stateless server in front of NATS."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import simplebus
from simplebus.spark.read.bus_reader import BusReader
from simplebus.spark.read.offsets import ClassExtent
from simplebus.spark.read.retention_durable import RetentionDurable
from simplebus.testing.server import BusServer, bus_server, until
from tests.jetstream.nats_servers import nats_server
from tests.jetstream.stateless_servers import options
from tests.spark.competing_consumer import take


@pytest.fixture
def stateless_server(tmp_path: Path) -> Iterator[BusServer]:
    with nats_server(tmp_path) as nats, bus_server(cluster=options(nats.url)) as server:
        yield server


@pytest.mark.parametrize("name", ["", "query"])
def test_durable_retains_only_messages_from_its_position(
    stateless_server: BusServer, name: str
) -> None:
    with (
        simplebus.connect_blocking(stateless_server.address, name="p") as bus,
        BusReader(stateless_server.address, timeout=60) as source,
    ):

        def class_extent() -> ClassExtent:
            return source.get_extent(["1"]).classes["1"]

        bus.publish_many([b"x"] * 10, class_id=1)
        pin = RetentionDurable(source, name)
        assert pin.retain_from("1", "earliest") == 0
        with bus.subscribe(1) as waiting:
            take(waiting, 10)
        for to in (3, 3, 7):
            assert pin.retain_from("1", to) == to
            until(lambda to=to: class_extent() == ClassExtent(to, 10))
        with bus.subscribe(1, start="new") as messages:
            bus.publish_many([b"x"] * 5, class_id=1)
            take(messages, 5)
        late = RetentionDurable(source, "late")
        assert late.retain_from("1", "earliest") == 7
        late.forget("1")
        assert pin.retain_from("1", 3) == 7
        assert pin.retain_from("1", "new") == 15
        until(lambda: class_extent() == ClassExtent(15, 15))
