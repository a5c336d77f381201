"""Streams that keep a message only as long as somebody is to have it still."""

from __future__ import annotations

import pytest

import simplebus
from simplebus.bridge.lane import Lane
from simplebus.bridge.nats_wire import NatsWire
from simplebus.bridge.near_nats import NearStream
from simplebus.bridge.running import lanes
from simplebus.bridge.settings import Bridge, Copied

from .buses import numbered, payloads
from .nats_lanes import BusServer, NatsServer, copying, one_bus, one_nats, stored, stream, until
from .nats_lanes import wired as wired_to

__all__ = ["one_bus", "one_nats"]

KINDS = ["interest", "workqueue", "limits"]


def lane(nats: NatsServer, server: BusServer, name: str, **more: object) -> Lane:
    copied = Copied(name, stream=name, **more)  # type: ignore[arg-type]
    return lanes([Bridge(name, nats.url, server.address, (copied,))])[0]


async def say(wire: NatsWire, name: str, first: int, last: int) -> None:
    for number in range(first, last):
        wire.core.publish(f"{name}.x", b"%d" % number)
    await wire.echoed()


async def consumers(wire: NatsWire, name: str) -> int:
    return len((await wire.link.ask(f"CONSUMER.NAMES.{name}"))["consumers"])


async def interested(wire: NatsWire, name: str) -> None:
    """Wait until the lane has its consumer: what is said before is kept for nobody."""
    while not await consumers(wire, name):
        await wire.echoed()


async def is_empty(wire: NatsWire, name: str) -> None:
    """Wait until nothing is there any more for the lane."""
    while await stored(wire, name):
        await wire.echoed()


@pytest.mark.parametrize("kind", KINDS)
async def test_what_waits_for_a_bridge_is_there_when_it_begins_anew(
    kind: str, server: BusServer, nats: NatsServer
) -> None:
    """More often than it has names for its consumer."""
    name = f"AWAY-{kind}"
    async with wired_to(nats) as wire, simplebus.connect(server.address) as bus:
        await stream(wire, name, f"{name}.>", retention=kind)
        begun = lane(nats, server, name)
        async with copying(begun):
            await interested(wire, name)
            await say(wire, name, 0, 10)
            assert await payloads(bus, name, 10) == numbered(0, 10)
        for first in range(10, 50, 10):
            await say(wire, name, first, first + 10)  # Nobody is there.
            begun = lane(nats, server, name)
            async with copying(begun):
                assert await payloads(bus, name, 10) == numbered(first, first + 10)
                await until(lambda at=first + 11, begun=begun: begun.statistics().at >= at)
                if kind != "limits":
                    await is_empty(wire, name)
            assert begun.statistics().missed == 0
            assert await consumers(wire, name) == 1


@pytest.mark.parametrize("kind", KINDS[:2])
async def test_what_was_copied_and_not_acknowledged_is_not_copied_again_and_goes(
    kind: str, server: BusServer, nats: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"TWICE-{kind}"

    async def not_kept(near: NearStream, at: int, *, now: bool) -> None:
        """As where the line is lost first."""

    async with wired_to(nats) as wire, simplebus.connect(server.address) as bus:
        await stream(wire, name, f"{name}.>", retention=kind)
        with monkeypatch.context() as patch:
            patch.setattr(NearStream, "keep", not_kept)
            begun = lane(nats, server, name)
            async with copying(begun):
                await interested(wire, name)
                await say(wire, name, 0, 300)
                await until(lambda: begun.statistics().copied == 300)
        assert await stored(wire, name) == 300
        begun = lane(nats, server, name)
        async with copying(begun, up=True):
            await is_empty(wire, name)
            await say(wire, name, 300, 310)
            assert await payloads(bus, name, 310) == numbered(0, 310)
            await until(lambda: begun.statistics().at == 311)
        found = begun.statistics()
        assert (found.copied, found.missed) == (10, 0)


async def test_a_bridge_that_ended_while_it_had_two_consumers_goes_on(
    server: BusServer, nats: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "TWO"

    async def kept(near: NearStream, name: str) -> None:
        """As where it is killed before it deletes the one before."""

    async with wired_to(nats) as wire, simplebus.connect(server.address) as bus:
        await stream(wire, name, f"{name}.>", retention="interest")
        async with copying(lane(nats, server, name)):
            await interested(wire, name)
            await say(wire, name, 0, 10)
            assert await payloads(bus, name, 10) == numbered(0, 10)
        with monkeypatch.context() as patch:
            patch.setattr(NearStream, "_delete", kept)
            async with copying(lane(nats, server, name), up=True):
                await say(wire, name, 10, 20)
                assert await payloads(bus, name, 10) == numbered(10, 20)
        assert await consumers(wire, name) == 2
        await say(wire, name, 20, 30)
        async with copying(lane(nats, server, name), up=True):
            assert await payloads(bus, name, 10) == numbered(20, 30)
            await is_empty(wire, name)
        assert await consumers(wire, name) == 1


async def test_of_a_work_queue_all_is_copied_wherever_a_bridge_is_to_begin(
    server: BusServer, nats: NatsServer
) -> None:
    """What it left there would stay for ever."""
    async with wired_to(nats) as wire, simplebus.connect(server.address) as bus:
        await stream(wire, "ALL", "ALL.>", retention="workqueue")
        await say(wire, "ALL", 0, 10)
        async with copying(lane(nats, server, "ALL", start="new")):
            assert await payloads(bus, "ALL", 10) == numbered(0, 10)
            await is_empty(wire, "ALL")
