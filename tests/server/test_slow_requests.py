"""Tests of the turns of connections with slow requests."""

from __future__ import annotations

from itertools import pairwise

import trio

from simplebus.core.limits import SUBSCRIPTIONS_ENDED_PER_TURN
from simplebus.server.slow_requests import SlowRequestTurns
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
