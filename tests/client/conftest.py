"""Servers that tests of both drivers share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from client.bus_server import BusServer, bus_server
from simplebus.core.broker import Settings


@pytest.fixture(scope="session")
def shared_server() -> Iterator[BusServer]:
    """For tests that use classes of their own."""
    with bus_server() as server:
        yield server


@pytest.fixture
def server() -> Iterator[BusServer]:
    with bus_server() as server:
        yield server


@pytest.fixture
def clockless_server() -> Iterator[BusServer]:
    """Sends again what is not acknowledged when the test says `tick`, and never by itself."""
    with bus_server(Settings(ack_timeout=1, tick_seconds=86_400.0)) as server:
        yield server
