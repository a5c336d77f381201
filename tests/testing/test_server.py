"""`BusServer` and `bus_server`."""

from __future__ import annotations

import pytest

import simplebus
from simplebus.core.settings import Settings
from simplebus.testing import bus_server
from simplebus.testing.server import BusServer, until


def test_server_runs_only_inside_its_block() -> None:
    with bus_server() as server:
        with simplebus.connect_blocking(server.address) as bus:
            bus.publish(b"hello", class_id=7)
        assert server.statistics(7).published == 1
        with pytest.raises(KeyError):
            server.statistics(8)
        until(lambda: server.ask(lambda up: not up.server.connections))
    with pytest.raises(simplebus.BusConnectionError, match="Connection refused"):
        simplebus.connect_blocking(server.address).__enter__()
    server.stop()  # Again: nothing happens.


def test_tick_and_hang_up_control_the_server() -> None:
    with (
        bus_server(Settings(ack_timeout=1, tick_seconds=86_400.0)) as server,
        simplebus.connect_blocking(server.address) as bus,
        bus.subscribe(1, auto_ack=False) as messages,
    ):
        bus.publish(b"hello", class_id=1)
        assert messages.get(60).attempt == 1
        server.tick()
        assert messages.get(60).attempt == 2
        server.hang_up()
        bus.publish(b"the client is connected again", class_id=1)
        assert bus.statistics().reconnections == 1


def test_startup_error_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(*args: object, **options: object) -> None:
        raise OSError("no listener")

    monkeypatch.setattr("simplebus.testing.server.serve", broken)
    with pytest.raises(ExceptionGroup) as raised:
        BusServer()
    assert raised.group_contains(OSError, match="no listener")


def test_until_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("simplebus.testing.server.PATIENCE_SECONDS", 0.02)
    with pytest.raises(TimeoutError):
        until(lambda: False)
