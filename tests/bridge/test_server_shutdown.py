"""A server that shuts down waits for its bridges, as for any subscriber."""

from __future__ import annotations

from collections.abc import AsyncIterator

import trio
import trio.testing

import simplebus
from simplebus.bridge.bus_connection import connect_source
from simplebus.bridge.runner import create_copiers
from simplebus.bridge.settings import BridgeSettings, CopiedClass
from simplebus.bridge.source.bus import BusSource
from simplebus.client.addresses import Address
from simplebus.client.aio.transport import SocketEndpoint
from simplebus.server.shutdown import drain
from tests.bridge.nats_copiers import copying, wait_until
from tests.support.running_server import serving

COUNT = 20_000


async def wait_forever() -> AsyncIterator[int]:
    await trio.sleep_forever()
    yield 0


async def test_copies_backlog_first() -> None:
    async with serving() as source, serving() as target:
        source_bus, target_bus = (str(each.addresses[0]) for each in (source, target))
        (copier,) = create_copiers(
            [BridgeSettings("b", source_bus, target_bus, (CopiedClass("orders"),))]
        )
        async with simplebus.connect(source_bus) as bus, copying(copier, until_connected=True):
            for _ in range(10):
                await bus.publish_many([b"x" * 1000] * (COUNT // 10), class_id="orders")
            await drain(source.server, None, 30, wait_forever())
        async with simplebus.connect(target_bus) as bus:
            assert (await bus.explain("orders")).stored == COUNT


async def test_shutdown_waits_for_position_commit() -> None:
    """While a copier commits its position, its durable has no subscriber for a moment."""
    async with serving() as server, trio.open_nursery() as nursery:
        address = str(server.addresses[0])
        endpoint = SocketEndpoint(Address.parse(address))
        async with simplebus.connect(address) as bus:
            await bus.publish_many([b"1", b"2"], class_id="orders")
        async with connect_source(
            endpoint, "a", target_id="x", heartbeat=10, auth=None
        ) as connection:
            end = BusSource(connection, class_="orders", durable="a")
            await end.open()
            (session,) = [c.session for c in server.server.connections.values()]
            inbox = end._inbox
            assert inbox is not None
            connection.core.unsubscribe(inbox, is_processed=False)
            connection.remove_inbox(inbox)
            with trio.fail_after(240):
                await wait_until(lambda: not session.subscriptions)
                ended = trio.Event()

                async def drained() -> None:
                    await drain(server.server, None, 600, wait_forever())
                    ended.set()

                nursery.start_soon(drained)
                await trio.testing.wait_all_tasks_blocked(0.0)
                await end._subscribe("waiting")
                assert (await end.read(0)).next_sequence == 2
                assert not ended.is_set()
                await end.commit_position(2, now=True)
                await ended.wait()
