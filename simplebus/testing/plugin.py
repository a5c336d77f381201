"""Fixtures for pytest; installing simplebus brings them.

Rule 1: no fixture is async. So each works whoever runs the test: pytest-trio, anyio's plugin or
nobody.

    async def test_a_new_shop_is_welcomed(memory_bus):
        async with memory_bus as bus:
            bus.handle(ShopCreated, send_welcome)
            await bus.publish(ShopCreated("Ada's Books"))
        assert outbox == ["Welcome, Ada's Books"]
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from simplebus.core.settings import Settings
from simplebus.memory.bus import MemoryBus
from simplebus.testing import server


@pytest.fixture
def bus_settings() -> Settings:
    """How the buses of the two other fixtures behave. Have a fixture of this name to change it."""
    return Settings()


@pytest.fixture
def memory_bus(bus_settings: Settings) -> MemoryBus:
    """A bus without a server, to be entered by the test: `async with memory_bus as bus`."""
    return MemoryBus(bus_settings)


@pytest.fixture
def bus_server(bus_settings: Settings) -> Iterator[server.BusServer]:
    """A real server on a free port of this machine; `bus_server.address` says where."""
    with server.bus_server(bus_settings) as running:
        yield running
