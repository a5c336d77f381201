"""The keepalive of a busy query keeps its idle connections open."""

from __future__ import annotations

import pytest

from simplebus.spark.connections import SourceConnections
from simplebus.spark.keepalive import ConnectionKeepalive
from simplebus.spark.options import SourceOptions
from simplebus.testing.server import bus_server, until
from tests.spark.heartbeat_bus import heartbeat_bus


@pytest.mark.parametrize("awake", [True, False])
def test_idle_connection_stays_open(awake: bool) -> None:
    with heartbeat_bus() as bus:
        place = bus.server.address.removeprefix("simplebus://")
        with SourceConnections(SourceOptions((place,), ("1",), timeout=60)) as buses:
            buses[place].get_extent(["1"], make=True)
            keeper = ConnectionKeepalive(buses.client_connections, interval_seconds=0.02)
            if awake:
                keeper.start()
                bus.advance_after_data(8)
            else:
                bus.beats(8)
            keeper.stop()
            assert bus.count_closed() == (not awake)


def test_lost_idle_connection_is_replaced() -> None:
    with bus_server() as server:
        place = server.address.removeprefix("simplebus://")
        with SourceConnections(SourceOptions((place,), ("1",), timeout=60)) as buses:
            buses[place].get_extent(["1"], make=True)
            first = server.ask(lambda up: set(up.server.connections))
            with ConnectionKeepalive(buses.client_connections, interval_seconds=0.5).running():
                server.hang_up()
                until(lambda: len(server.ask(lambda up: set(up.server.connections)) - first) == 1)
            assert buses[place].get_extent(["1"]).classes["1"].head == 0
