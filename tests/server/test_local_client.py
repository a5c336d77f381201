"""Tests of clients inside the server process."""

from __future__ import annotations

import pytest
import trio

import simplebus
from simplebus.client.aio.connect import open_bus
from simplebus.core.errors import BusConnectionError, Reason
from simplebus.core.protocol.requests import FetchRequest
from simplebus.core.users.passwords import PasswordVerifier
from simplebus.core.users.users import Users
from simplebus.server.local_client import LocalEndpoint
from tests.support.running_server import serving

PATIENCE_SECONDS = 60.0
COUNT, SIZE = 40, 300_000  # More than any buffer between them holds.


async def test_local_clients_exchange_messages_with_remote_clients() -> None:
    nobody = Users((), PasswordVerifier(b"by chance"))
    async with serving() as server:
        place = LocalEndpoint(server.server, "a part of it")
        address = server.addresses[0]
        async with (
            simplebus.connect(address) as outside,
            open_bus([place], name="own") as own,
        ):
            with trio.fail_after(PATIENCE_SECONDS):
                for says, hears, name in (own, outside, "a"), (outside, own, "b"):
                    async with hears.subscribe("news", durable=name) as messages:
                        async with trio.open_nursery() as nursery:
                            sent = [bytes([n]) * SIZE for n in range(COUNT)]
                            nursery.start_soon(
                                lambda s=says, m=sent: s.publish_many(m, class_id="news")
                            )
                            got = []
                            while len(got) < COUNT:
                                got += [m.payload for m in await messages.take(COUNT - len(got))]
                        assert got == sent
                assert server.server.total_traffic().messages == 2 * COUNT
                server.server.replace_users(nobody)  # It is asked nothing, now or later.
                await own.publish(b"still here", class_id="news")
                assert len(server.server.local_clients) == 1


async def test_disconnected_local_client_reconnects() -> None:
    async with serving() as server:
        place = LocalEndpoint(server.server, "a part of it")
        with trio.fail_after(PATIENCE_SECONDS):
            async with (
                open_bus([place], name="own") as own,
                own.subscribe("news", durable="one") as messages,
            ):
                (first,) = server.server.local_clients.values()
                first.disconnect()
                await own.publish(b"hello", class_id="news")
                assert (await messages.get()).payload == b"hello"
                (second,) = server.server.local_clients.values()
                assert second is not first
            assert not server.server.local_clients
            link = await place.open()
            assert link.send(memoryview(b"\xffno such frame at all<\r\n>")) > 0
            space = memoryview(bytearray(1000))
            while await link.receive_into(space):
                pass
            assert link.send(memoryview(b"more")) == 4  # Nobody listens.
            assert not server.server.local_clients
            assert server.server.disconnect_counts[Reason.UNKNOWN_TYPE] == 1
            link = await place.open()
    assert await link.receive_into(space) == 0  # The server has ended.
    with pytest.raises(BusConnectionError, match="has ended"):
        await place.open()


async def test_bulk_publisher_waits_for_local_readers() -> None:
    async with serving() as server:
        place, engine = LocalEndpoint(server.server, "a part of it"), server.server
        with trio.fail_after(PATIENCE_SECONDS):
            async with simplebus.connect(server.addresses[0]) as outside:
                await outside.publish(bytes(SIZE), class_id=1)
                (connection,) = engine.connections.values()
                session = connection.session
                seen = place.fetch_from_memory(1, FetchRequest())
                assert seen is not None
                reply, frames = seen
                assert (reply.next, [batch.count for batch in frames]) == (1, [1])
                engine._is_bulk_read = False  # However it came.
                assert not engine.should_delay_read(session)
                engine._is_bulk_read = True
                assert engine.should_delay_read(session)
                await engine.delay_read(session)
                assert not engine.should_delay_read(session)  # It has waited.
                assert place.fetch_from_memory(1, FetchRequest(first=1)) is not None
                assert not engine.should_delay_read(session)  # There was nothing to be seen.
