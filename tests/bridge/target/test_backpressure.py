"""A far end that takes nothing more is not sent more, and what is made for it is bounded: the rest
stays at the near end, in order."""

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
from simplebus.bridge.target import bus as target_bus
from simplebus.bridge.target import nats as target_nats
from simplebus.core.limits import Limits
from simplebus.core.settings import Settings
from simplebus.memory.bus import MemoryBus
from tests.bridge import memory_buses
from tests.bridge.memory_buses import numbered, payloads
from tests.jetstream.nats_servers import NatsServer
from tests.jetstream.stateless_servers import address, door, options
from tests.support.running_server import serving

PATIENCE_SECONDS = 120.0
COUNT = 600


@pytest.fixture(autouse=True)
def few_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch is of about four messages."""
    monkeypatch.setattr("simplebus.core.broker.fetch.FETCH_BYTES_MAX", 64)
    monkeypatch.setattr("simplebus.bridge.source.bus._PREFETCH_BYTES", 48)


@asynccontextmanager
async def there(kind: Any, nats: NatsServer) -> AsyncIterator[str]:
    """The address of a far end of that kind."""
    if kind is target_nats.NatsTarget:
        yield nats.url
    else:
        place = serving() if kind is target_bus.BusTarget else door(options(nats.url))
        async with place as up:
            yield address(up)


@pytest.mark.parametrize(
    ("kind", "most"),
    [
        (target_bus.BusTarget, target_bus._BATCHES_MAX),
        (target_bus.StatelessServerTarget, target_bus._BATCHES_MAX),
        (target_nats.NatsTarget, target_nats._BATCHES_MAX),
    ],
    ids=["bus", "door", "nats"],
)
async def test_batches_in_flight_are_bounded(
    kind: Any, most: int, nats: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent, waited = 0, trio.Event()
    send = kind.send

    def counted(end: Any, made: TargetBatch) -> None:
        nonlocal sent
        sent += 1
        send(end, made)

    async def never(end: Any) -> list[Refusal]:
        waited.set()  # A lane that waits for the first of them sends no more.
        await trio.sleep_forever()
        return []

    monkeypatch.setattr(kind, "send", counted)
    monkeypatch.setattr(kind, "settle_oldest", never)
    async with serving() as up, there(kind, nats) as to, trio.open_nursery() as nursery:
        with trio.fail_after(PATIENCE_SECONDS):
            async with simplebus.connect(address(up)) as here:
                await here.publish_many(numbered(0, COUNT), class_id="orders")
            copied = CopiedClass("orders", start="earliest")
            nursery.start_soon(
                run_copiers, create_copiers([BridgeSettings("b", address(up), to, (copied,))])
            )
            await waited.wait()
        nursery.cancel_scope.cancel()
    assert 0 < sent <= most


def test_full_bus_gets_few_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Made, announced or under way, all together."""
    open_, most = 0, 0
    announce, send, settle = (
        target_bus.BusTarget.announce,
        target_bus.BusTarget.send,
        target_bus.BusTarget.settle_oldest,
    )

    def announced(end: target_bus.BusTarget, planned: Sequence[TargetBatch]) -> None:
        nonlocal most
        most = max(most, open_ + len(planned))
        announce(end, planned)

    def sent(end: target_bus.BusTarget, made: TargetBatch) -> None:
        nonlocal open_
        open_ += 1
        send(end, made)

    async def settled(end: target_bus.BusTarget) -> list[Refusal]:
        nonlocal open_
        refusals = await settle(end)
        open_ -= 1
        return refusals

    for name, instead in (("announce", announced), ("send", sent), ("settle_oldest", settled)):
        monkeypatch.setattr(target_bus.BusTarget, name, instead)

    async def main() -> None:
        near, full = MemoryBus(), MemoryBus(Settings(limits=Limits(class_messages=10)))
        async with near as here, full as bus:
            await memory_buses.hold(bus)
            await here.publish_many(numbered(0, COUNT), class_id="orders")
            copying = memory_buses.lane(near, full)
            async with memory_buses.running(copying):
                await trio.sleep(60)
                assert copying.statistics().copied <= 10
                assert 1 < most <= target_bus._BATCHES_MAX
                assert await payloads(bus, "orders", COUNT) == numbered(0, COUNT)
            assert most <= target_bus._BATCHES_MAX

    memory_buses.run(main)
