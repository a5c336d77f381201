"""Tests of the retention durable: a bus keeps exactly the messages a query has not processed."""

from __future__ import annotations

import pytest

import simplebus
from simplebus.spark.read import retention_durable as pins
from simplebus.spark.read.bus_reader import BusReader
from simplebus.spark.read.offsets import ClassExtent
from simplebus.spark.read.retention_durable import RetentionDurable, RetentionError
from simplebus.testing.server import BusServer, until
from tests.spark.competing_consumer import take


@pytest.fixture
def source(server: BusServer) -> BusReader:
    """Reader of ten messages of class 1 that no other subscription needs."""
    with simplebus.connect_blocking(server.address) as bus:
        bus.publish_many([b"%d" % n for n in range(10)], class_id=1)
    return BusReader(server.address, timeout=60)


def publish_and_take(server: BusServer, count: int) -> None:
    """Publish messages and acknowledge them for every subscription but the durable."""
    with (
        simplebus.connect_blocking(server.address) as bus,
        bus.subscribe(1, start="new") as messages,
    ):
        bus.publish_many([b"x"] * count, class_id=1)
        take(messages, count)


def floor(server: BusServer) -> int:
    return server.statistics().ring.floor


@pytest.mark.parametrize("name", ["", "query"])
def test_durable_retains_only_messages_from_its_position(
    server: BusServer, source: BusReader, name: str
) -> None:
    with source as bus:
        pin = RetentionDurable(bus, name)
        assert pin.retain_from("1", "earliest") == 0
        with (
            simplebus.connect_blocking(server.address) as subscriber,
            subscriber.subscribe(1) as waiting,
        ):
            take(waiting, 10)
        for to in (3, 3, 7):
            assert pin.retain_from("1", to) == to
            assert bus.get_extent(["1"]).classes["1"] == ClassExtent(to, 10)
        publish_and_take(server, 5)
        assert bus.get_extent(["1"]).classes["1"] == ClassExtent(7, 15)
        assert pin.retain_from("1", "new") == 15
        until(lambda: floor(server) == 15)


def test_named_durable_stays_after_the_query(server: BusServer, source: BusReader) -> None:
    with source as bus:
        RetentionDurable(bus, "query").retain_from("1", 4)
    with (
        simplebus.connect_blocking(server.address) as subscriber,
        subscriber.subscribe(1) as waiting,
    ):
        take(waiting, 10)
    publish_and_take(server, 5)
    assert floor(server) == 4
    with BusReader(server.address, timeout=60) as bus:
        assert RetentionDurable(bus, "query").retain_from("1", 2) == 4  # Released before.
        assert RetentionDurable(bus, "other").retain_from("1", 9) == 9
    assert floor(server) == 4


def test_unnamed_durable_ends_with_the_query(server: BusServer, source: BusReader) -> None:
    with source as bus:
        RetentionDurable(bus, "").retain_from("1", 4)
        assert len(server.statistics().subscriptions) == 1
    until(lambda: not server.statistics().subscriptions)


def test_named_durable_is_forgotten(server: BusServer, source: BusReader) -> None:
    with source as bus:
        RetentionDurable(bus, "query").retain_from("1", 4)
    with BusReader(server.address, timeout=60) as bus:
        RetentionDurable(bus, "query").forget("1")
        assert not server.statistics().subscriptions
        RetentionDurable(bus, "query").forget("1")  # Forgetting a missing durable succeeds.
        assert not server.statistics().subscriptions


def test_durable_is_resumed_after_lost_connection(server: BusServer, source: BusReader) -> None:
    with source as bus:
        pin = RetentionDurable(bus, "query")
        pin.retain_from("1", 4)
        server.hang_up()
        bus.get_extent(["1"])
        assert pin.retain_from("1", 4) == 4
        assert pin.retain_from("1", 6) == 6
        assert [s.floor for s in server.statistics().subscriptions] == [6]


def test_second_query_with_same_durable_name_is_rejected(
    server: BusServer, source: BusReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pins, "_NAME_IN_USE_TIMEOUT_SECONDS", 0.3)
    with source as bus, BusReader(server.address, timeout=60) as second_bus:
        pin = RetentionDurable(bus, "query")
        pin.retain_from("1", 4)
        with pytest.raises(
            RetentionError, match=r"durable 'query' of class 1 at .*: give each query"
        ):
            RetentionDurable(second_bus, "query").retain_from("1", 4)
        pin.release()
        RetentionDurable(second_bus, "query").retain_from("1", 4)
