"""Two bridges with the same configuration, and bridges whose NATS server is stopped: each problem
is logged once.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

import simplebus
from load.ports import HOST, free_port
from simplebus.bridge import build
from simplebus.bridge.copier import Copier
from simplebus.bridge.runner import create_copiers
from simplebus.bridge.settings import BridgeSettings, CopiedClass
from simplebus.bridge.target.bus import open_bus_target
from tests.bridge.memory_buses import numbered_payloads, payloads
from tests.bridge.nats_copiers import (
    BusServer,
    NatsServer,
    connect,
    copying,
    create_stream,
    wait_until,
)
from tests.bridge.target.test_stateless_server import read_all
from tests.jetstream.stateless_servers import address, options, stateless_server


async def test_takeover_continues_after_previous_copier(
    server: BusServer, nats: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Continue after the previous bridge if the target is ahead of the position at opening.

    While a bridge is being replaced, both run for a moment. The target may then have a later
    position than the stream had when the new bridge opened it.
    """
    bridge = BridgeSettings("twin", nats.url, server.address, (CopiedClass("twin", stream="TWIN"),))
    (previous,), (replacement,) = create_copiers([bridge]), create_copiers([bridge])
    async with connect(nats) as connection, simplebus.connect(server.address) as bus:
        await create_stream(connection, "TWIN", "twin")

        received: list[bytes] = []
        is_logged = False

        async def log_positions(first: int, last: int) -> None:
            """Publish numbers, and wait until one of the bridges has copied them."""
            for number in range(first, last):
                connection.core.publish("twin", b"%d" % number)
            connection.nats.flush()
            received.extend(await payloads(bus, "twin", last - first))

        @asynccontextmanager
        async def open_late(*args: Any) -> AsyncIterator[Any]:
            nonlocal is_logged
            if previous.statistics().is_up and not is_logged:
                is_logged = True
                await log_positions(50, 100)
            async with open_bus_target(*args) as found:
                yield found

        monkeypatch.setattr(build, "open_bus_target", open_late)
        async with copying(previous, until_connected=True):
            await log_positions(0, 50)
            async with copying(replacement, until_connected=True):
                await log_positions(100, 120)
        await bus.publish(b"last", class_id="twin")
        assert received + await payloads(bus, "twin", 1) == [*numbered_payloads(0, 120), b"last"]
        for found in previous.statistics(), replacement.statistics():
            assert (found.discarded_records, found.missed, found.skipped) == (0, 0, {})


async def test_one_of_two_bridges_to_stateless_server_copies(
    nats: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("simplebus.bridge.copier.YIELD_TO_OTHER_BRIDGE_MAX_SECONDS", 3600.0)
    monkeypatch.setattr("simplebus.bridge.copier._TAKEN_OVER_AGAIN_SECONDS", 60.0)
    async with connect(nats) as connection, stateless_server(options(nats.url)) as first_stateless:
        bridge = BridgeSettings(
            "twins", nats.url, address(first_stateless), (CopiedClass("a", channels=("twins",)),)
        )
        (first,), (second,) = create_copiers([bridge]), create_copiers([bridge])

        def aside() -> list[Copier]:
            return [
                each
                for each in (first, second)
                if "took over the connection" in each.statistics().problem
            ]

        async with copying(first, until_connected=True), copying(second, until_connected=True):
            await wait_until(lambda: bool(aside()))
            for number in range(100):
                connection.core.publish("twins", b"%d" % number)
            connection.nats.flush()
            await wait_until(lambda: sum(e.statistics().copied for e in (first, second)) == 100)
            assert [each.statistics().copied for each in aside()] == [0]
        async with simplebus.connect(address(first_stateless)) as bus:
            assert await read_all(bus) == numbered_payloads(0, 100)


@pytest.mark.parametrize("has_server", [False, True])
async def test_logs_refused_connection_once(
    server: BusServer,
    nats: NatsServer,
    has_server: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The server is absent, or lacks JetStream. A copier retries all the time."""
    if not has_server:
        monkeypatch.setattr("simplebus.bridge.nats_connection.CONNECT_SECONDS", 2.0)
    monkeypatch.setattr("simplebus.bridge.copier.RETRY_DELAY_MAX_SECONDS", 0.05)
    monkeypatch.setattr("simplebus.bridge.source.lag.POLL_SECONDS", 0.05)
    url = nats.url if has_server else f"nats://{HOST}:{free_port()}"
    (copies,) = create_copiers(
        [BridgeSettings("none", url, server.address, (CopiedClass("none", stream="NONE"),))]
    )
    caplog.set_level("INFO")
    async with copying(copies):
        await wait_until(lambda: copies.statistics().losses >= 3)
    (warning,) = caplog.messages
    assert warning.endswith("retrying")
