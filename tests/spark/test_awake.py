"""A bus does not take a busy query for dead."""

from __future__ import annotations

import pytest

from simplebus.core.settings import Settings
from simplebus.spark.awake import Awake
from simplebus.spark.buses import Buses
from simplebus.spark.options import SourceOptions
from simplebus.testing.server import bus_server, until

QUICK = Settings(heartbeat_seconds=1, tick_seconds=0.1)


@pytest.mark.parametrize("awake", [True, False])
def test_a_connection_stays_while_nobody_uses_it(awake: bool) -> None:
    with bus_server(QUICK) as server:
        place = server.address.removeprefix("simplebus://")
        with Buses(SourceOptions((place,), ("1",), timeout=5)) as buses:
            buses[place].memory(["1"], make=True)
            keeper = Awake(buses.wires, pause=0.02)
            if awake:
                keeper.start()
            now = server.ask(lambda up: up.engine.broker.tick_number)
            until(lambda: server.ask(lambda up: up.engine.broker.tick_number) > now + 35)
            keeper.stop()
            assert server.ask(lambda up: len(up.engine.connections)) == awake


def test_a_connection_that_was_lost_is_replaced_while_nobody_uses_it() -> None:
    with bus_server() as server:
        place = server.address.removeprefix("simplebus://")
        with Buses(SourceOptions((place,), ("1",), timeout=5)) as buses:
            buses[place].memory(["1"], make=True)
            with Awake(buses.wires, pause=0.5).kept():
                server.hang_up()
                until(lambda: server.ask(lambda up: not up.engine.connections))
                until(lambda: server.ask(lambda up: len(up.engine.connections)) == 1)
            assert buses[place].memory(["1"]).classes["1"].head == 0
