"""Requests of the reader to a real bus, without Spark."""

from __future__ import annotations

import logging

import pytest

import simplebus
from simplebus.core.errors import BusConnectionError
from simplebus.core.settings import Retention, Settings
from simplebus.core.users.permissions import Permissions
from simplebus.core.users.users import User, Users
from simplebus.spark.arrow_columns import ColumnOptions, to_record_batch
from simplebus.spark.read.bus_reader import BusReader, ClassMissingError
from simplebus.spark.read.offsets import ClassExtent, OffsetError
from simplebus.spark.read.planner import DataLossError, MessageRange
from simplebus.testing.server import BusServer, bus_server

SHAPE = ColumnOptions("s", "1", 1)


def publish(server: BusServer, *payloads: bytes, class_id: int | str = 1) -> None:
    with simplebus.connect_blocking(server.address) as bus:
        bus.publish_many(payloads, class_id=class_id)


def source(server: BusServer) -> BusReader:
    return BusReader(server.address, timeout=60)


def values(bus: BusReader, message_range: MessageRange, *, strict: bool = True) -> list[bytes]:
    found: list[bytes] = []
    for frames in bus.read(message_range, strict=strict):
        found += to_record_batch(frames, SHAPE)["value"].to_pylist()
    return found


def test_stored_ranges_are_reported_per_class(server: BusServer) -> None:
    publish(server, b"a", b"b")
    publish(server, b"c", class_id="orders")
    with source(server) as bus:
        found = bus.get_extent(["1", "orders"])
        assert found.memory_id == bus.memory_id != ""
        assert found.classes == {"1": ClassExtent(0, 2), "orders": ClassExtent(0, 1)}


def test_missing_class_fails_and_is_not_created(server: BusServer) -> None:
    with source(server) as bus:
        with pytest.raises(ClassMissingError, match="no Connect has named class 5"):
            bus.get_extent(["5"])
        with pytest.raises(ClassMissingError):
            bus.get_extent(["5"])
        assert bus.get_extent(["5"], make=True).classes == {"5": ClassExtent(0, 0)}


def test_misspelled_class_is_reported_and_not_created(server: BusServer) -> None:
    publish(server, b"a", class_id="orders")
    with source(server) as bus:
        bus.check_classes(["orders", "5", "dead.orders"])
        with pytest.raises(ClassMissingError, match=r"no class 'ordres'; did you mean orders\?"):
            bus.check_classes(["orders", "ordres"])
        with pytest.raises(ClassMissingError, match="no class 'zzz'; check the option subscribe"):
            bus.check_classes(["zzz"])
        assert [cls.name for cls in bus.blocking_bus.explain().classes] == ["orders"]


def test_user_who_may_not_inquire_reads_without_a_check(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SIMPLEBUS_USER", "ada")
    monkeypatch.setenv("SIMPLEBUS_PASSWORD", "x")
    users = Users([User("ada", password="x", permissions=Permissions(admin=()))])
    with bus_server(users=users) as server, source(server) as bus:
        bus.check_classes(["ordres"])


def test_range_is_read_in_parts_to_its_end(server: BusServer) -> None:
    payloads = [b"%d" % n * 300 for n in range(4000)]
    publish(server, *payloads)
    with source(server) as bus:
        message_range = MessageRange("s", bus.memory_id, "1", 5, 3990)
        assert len(list(bus.read(message_range, strict=True))) > 1
        assert values(bus, message_range) == payloads[5:3990]
        assert values(bus, MessageRange("s", bus.memory_id, "1", 7, 7)) == []


def test_lost_connection_is_replaced_within_a_range(server: BusServer) -> None:
    payloads = [b"%d" % n * 300 for n in range(4000)]
    publish(server, *payloads)
    with source(server) as bus:
        found: list[bytes] = []
        for frames in bus.read(MessageRange("s", bus.memory_id, "1", 0, 4000), strict=True):
            found += to_record_batch(frames, SHAPE)["value"].to_pylist()
            server.hang_up()
        assert found == payloads


def test_missing_messages_are_an_error_or_logged(caplog: pytest.LogCaptureFixture) -> None:
    with bus_server(Settings(keep=Retention(messages=5))) as server:
        with simplebus.connect_blocking(server.address) as bus, bus.subscribe(1) as messages:
            bus.publish_many([b"%d" % n for n in range(20)], class_id=1)
            messages.take(20)
        with source(server) as bus:
            assert bus.get_extent(["1"]).classes == {"1": ClassExtent(15, 20)}
            message_range = MessageRange("s", bus.memory_id, "1", 3, 18)
            with pytest.raises(DataLossError, match="messages 3 to 14 of class 1 at s are lost"):
                values(bus, message_range)
            with caplog.at_level(logging.WARNING):
                assert values(bus, message_range, strict=False) == [b"15", b"16", b"17"]
            assert "messages 3 to 14 of class 1 at s are lost" in caplog.text
            lost_range = MessageRange("s", bus.memory_id, "1", 3, 9)
            assert values(bus, lost_range, strict=False) == []


def test_restarted_server_has_other_messages(server: BusServer) -> None:
    publish(server, b"a")
    with source(server) as bus:
        message_range = MessageRange("s", "another", "1", 0, 1)
        with pytest.raises(DataLossError, match="the bus was reset"):
            values(bus, message_range)
        assert values(bus, message_range, strict=False) == []


def test_unreachable_server_is_named_in_the_error() -> None:
    with (
        pytest.raises(BusConnectionError, match=r"cannot connect to simplebus://127\.0\.0\.1:9"),
        BusReader("127.0.0.1:9", timeout=3),
    ):
        pass


def test_class_given_twice_is_rejected(server: BusServer) -> None:
    publish(server, b"a", class_id="orders")
    with source(server) as bus:
        number = str(bus.class_id("orders"))
        with pytest.raises(
            OffsetError, match=f"has orders and {number}, which are the same class of"
        ):
            bus.get_extent(["orders", number])


@pytest.mark.parametrize("name", ["\u0663", "\uff13"])
def test_digits_of_other_scripts_form_a_name(server: BusServer, name: str) -> None:
    publish(server, b"three", class_id=3)
    publish(server, b"a", b"b", class_id=name)
    with source(server) as bus:
        assert bus.get_extent([name]).classes == {name: ClassExtent(0, 2)}
