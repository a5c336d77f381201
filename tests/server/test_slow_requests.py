"""Tests of the turns of connections with slow requests."""

from __future__ import annotations

from itertools import pairwise

import pytest
import trio

import simplebus
from simplebus.client.aio.connect import open_bus
from simplebus.core.limits import SUBSCRIPTIONS_ENDED_PER_TURN
from simplebus.core.outbox import Outbox
from simplebus.core.subscription import position
from simplebus.memory import bus as memory_bus
from simplebus.server import connection, local_client
from simplebus.server.local_client import LocalEndpoint
from simplebus.server.turns import SlowRequestTurns
from tests.behaviour.wire_peer_v2 import connect_request, subscribe
from tests.support.running_server import connect, serving, wait_until


async def test_others_have_a_pass_between_two_portions() -> None:
    turns, order = SlowRequestTurns(), []

    async def process(name: str) -> None:
        for _ in range(3):
            await turns.wait_turn()
            order.append(name)

    async def be_bystander() -> None:
        while order.count("a") + order.count("b") < 6:
            order.append("bystander")
            await trio.lowlevel.checkpoint()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(process, "a")
        nursery.start_soon(process, "b")
        nursery.start_soon(be_bystander)
    portions = [index for index, name in enumerate(order) if name != "bystander"]
    assert len(portions) == 6
    for first, second in pairwise(portions):
        assert second - first >= 2
    shares = [name for name in order if name != "bystander"]
    assert sorted(shares[:2]) == sorted(shares[2:4]) == ["a", "b"]


async def test_many_subscriptions_of_a_lost_connection_end() -> None:
    async with serving() as server:
        broker = server.server.broker
        count = 2 * SUBSCRIPTIONS_ENDED_PER_TURN + 1
        peer = await connect(server)
        await peer.send(connect_request(1))
        await peer.send(b"".join(subscribe(1, number) for number in range(1, count + 1)))
        await wait_until(lambda: 1 in broker.classes and len(broker.classes[1].positions) == count)
        await peer.stream.aclose()
        await wait_until(lambda: not any(cls.positions for cls in broker.classes.values()))
        assert not broker.sessions


class ScanRecorder(trio.abc.Instrument):
    """Counts the messages that each step of a task scans."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.counts = [0]
        peek = Outbox.peek

        def counted(outbox: Outbox, tick: int) -> memoryview:
            data = peek(outbox, tick)
            self.counts[-1] += outbox.scanned_count
            return data

        monkeypatch.setattr(Outbox, "peek", counted)

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        self.counts.append(0)


@pytest.mark.parametrize("is_local", [False, True])
async def test_search_for_rare_messages_is_limited_in_one_turn(
    is_local: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(position, "REDELIVERY_MESSAGES", 50)
    for module in (connection, local_client):
        monkeypatch.setattr(module, "CONNECTION_SCAN_MESSAGES_MAX", 60)
    recorder = ScanRecorder(monkeypatch)
    async with serving() as server, simplebus.connect(server.addresses[0]) as writer:
        for number in range(10):
            await writer.publish_many([b""] * 99, class_id=1, channel="often")
            await writer.publish(b"%d" % number, class_id=1, channel="rare")
        trio.lowlevel.add_instrument(recorder)
        local = open_bus([LocalEndpoint(server.server, "part")])
        async with (
            local if is_local else simplebus.connect(server.addresses[0]) as reader,
            reader.subscribe(1, "rare", start="earliest") as messages,
        ):
            received = [(await messages.get(timeout=60)).payload for _ in range(10)]
        trio.lowlevel.remove_instrument(recorder)
    assert received == [b"%d" % number for number in range(10)]
    assert 100 <= max(recorder.counts) <= 60 + 2 * 100


async def test_search_in_a_memory_bus_is_limited_in_one_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(position, "REDELIVERY_MESSAGES", 50)
    monkeypatch.setattr(memory_bus, "CONNECTION_SCAN_MESSAGES_MAX", 60)
    recorder = ScanRecorder(monkeypatch)
    async with memory_bus.MemoryBus() as bus:
        for number in range(10):
            await bus.publish_many([b""] * 99, class_id=1, channel="often")
            await bus.publish(b"%d" % number, class_id=1, channel="rare")
        trio.lowlevel.add_instrument(recorder)
        async with bus.subscribe(1, "rare", start="earliest") as messages:
            received = [(await messages.get(timeout=60)).payload for _ in range(10)]
        trio.lowlevel.remove_instrument(recorder)
    assert received == [b"%d" % number for number in range(10)]
    assert 100 <= max(recorder.counts) <= 60 + 2 * 100
