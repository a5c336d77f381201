"""Messages in flight and prepared batches are bounded; the other messages wait at the source."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio

import simplebus
from simplebus.bridge.interfaces import Refusal, TargetBatch
from simplebus.bridge.runner import create_copiers, run_copiers
from simplebus.bridge.settings import BridgeSettings, CopiedClass
from simplebus.bridge.target import bus as bus_module
from simplebus.bridge.target import nats as target_nats
from simplebus.core.limits import Limits
from simplebus.core.settings import Settings
from simplebus.memory.bus import MemoryBus
from tests.bridge import memory_buses
from tests.bridge.memory_buses import numbered_payloads, payloads
from tests.jetstream.nats_servers import NatsServer
from tests.jetstream.stateless_servers import address, options, stateless_server
from tests.support.running_server import serving

PATIENCE_SECONDS = 120.0
COUNT = 600


pytestmark = pytest.mark.usefixtures("small_batches")


@asynccontextmanager
async def target_address(kind: Any, nats: NatsServer) -> AsyncIterator[str]:
    """Yield the address of a target of this type."""
    if kind is target_nats.NatsTarget:
        yield nats.url
    else:
        target_context = (
            serving() if kind is bus_module.BusTarget else stateless_server(options(nats.url))
        )
        async with target_context as server:
            yield address(server)


@pytest.mark.parametrize(
    ("kind", "max_batches"),
    [
        (bus_module.BusTarget, bus_module._BATCHES_MAX),
        (bus_module.StatelessServerTarget, bus_module._BATCHES_MAX),
        (target_nats.NatsTarget, target_nats._BATCHES_MAX),
    ],
    ids=["bus", "stateless server", "nats"],
)
async def test_batches_in_flight_are_bounded(
    kind: Any, max_batches: int, nats: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent, waited = 0, trio.Event()
    send = kind.send

    def counted(end: Any, batch: TargetBatch) -> None:
        nonlocal sent
        sent += 1
        send(end, batch)

    async def wait_forever(end: Any) -> list[Refusal]:
        waited.set()  # A copier that waits for the oldest batch sends no more.
        await trio.sleep_forever()
        return []

    monkeypatch.setattr(kind, "send", counted)
    monkeypatch.setattr(kind, "settle_oldest", wait_forever)
    async with (
        serving() as server,
        target_address(kind, nats) as to,
        trio.open_nursery() as nursery,
    ):
        with trio.fail_after(PATIENCE_SECONDS):
            async with simplebus.connect(address(server)) as bus_:
                await bus_.publish_many(numbered_payloads(0, COUNT), class_id="orders")
            copied = CopiedClass("orders", start="earliest")
            nursery.start_soon(
                run_copiers, create_copiers([BridgeSettings("b", address(server), to, (copied,))])
            )
            await waited.wait()
        nursery.cancel_scope.cancel()
    assert 0 < sent <= max_batches


def test_full_bus_gets_few_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts the batches that are prepared, announced or in flight."""
    open_, max_batches = 0, 0
    announce, send, settle = (
        bus_module.BusTarget.announce,
        bus_module.BusTarget.send,
        bus_module.BusTarget.settle_oldest,
    )

    def announced(end: bus_module.BusTarget, planned: Sequence[TargetBatch]) -> None:
        nonlocal max_batches
        max_batches = max(max_batches, open_ + len(planned))
        announce(end, planned)

    def sent(end: bus_module.BusTarget, batch: TargetBatch) -> None:
        nonlocal open_
        open_ += 1
        send(end, batch)

    async def settled(end: bus_module.BusTarget) -> list[Refusal]:
        nonlocal open_
        refusals = await settle(end)
        open_ -= 1
        return refusals

    for name, instead in (("announce", announced), ("send", sent), ("settle_oldest", settled)):
        monkeypatch.setattr(bus_module.BusTarget, name, instead)

    async def main() -> None:
        source, full = MemoryBus(), MemoryBus(Settings(limits=Limits(class_messages=10)))
        async with source as bus_, full as bus:
            await memory_buses.create_test_durable(bus)
            await bus_.publish_many(numbered_payloads(0, COUNT), class_id="orders")
            copying = memory_buses.create_copier(source, full)
            async with memory_buses.running(copying):
                await trio.sleep(60)
                assert copying.statistics().copied <= 10
                assert 1 < max_batches <= bus_module._BATCHES_MAX
                assert await payloads(bus, "orders", COUNT) == numbered_payloads(0, COUNT)
            assert max_batches <= bus_module._BATCHES_MAX

    memory_buses.run(main)
