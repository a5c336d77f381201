"""Pytest fixtures, available when simplebus is installed.

    async def test_a_new_shop_is_welcomed(memory_bus):
        async with memory_bus as bus:
            bus.handle(ShopCreated, send_welcome)
            await bus.publish(ShopCreated("Ada's Books"))
        assert outbox == ["Welcome, Ada's Books"]

No fixture is async, so they work with pytest-trio, with anyio's plugin and with plain pytest.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from simplebus.core.settings import Settings
from simplebus.memory.bus import MemoryBus
from simplebus.testing import server


@pytest.fixture
def bus_settings() -> Settings:
    """Settings of the buses of the other two fixtures. Override this fixture to change them."""
    return Settings()


@pytest.fixture
def memory_bus(bus_settings: Settings) -> MemoryBus:
    """Bus without a server, which the test enters: `async with memory_bus as bus`."""
    return MemoryBus(bus_settings)


@pytest.fixture
def bus_server(bus_settings: Settings) -> Iterator[server.BusServer]:
    """Real server on a free local port; connect to `bus_server.address`."""
    with server.bus_server(bus_settings) as running:
        yield running
