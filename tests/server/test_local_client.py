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
from simplebus.server import server as server_module
from simplebus.server.local_client import LocalEndpoint
from tests.support.running_server import serving

PATIENCE_SECONDS = 60.0
MESSAGE_COUNT, MESSAGE_BYTES = 40, 300_000  # More than all buffers in between hold.


async def test_local_clients_exchange_messages_with_remote_clients(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    no_users = Users((), PasswordVerifier(b"by chance"))
    async with serving() as server:
        endpoint = LocalEndpoint(server.server, "a part of it")
        address = server.addresses[0]
        async with (
            simplebus.connect(address) as remote,
            open_bus([endpoint], name="own") as local,
        ):
            with trio.fail_after(PATIENCE_SECONDS):
                for sender, receiver, name in (local, remote, "a"), (remote, local, "b"):
                    async with receiver.subscribe("news", durable=name) as messages:
                        async with trio.open_nursery() as nursery:
                            sent = [bytes([n]) * MESSAGE_BYTES for n in range(MESSAGE_COUNT)]
                            nursery.start_soon(
                                lambda s=sender, m=sent: s.publish_many(m, class_id="news")
                            )
                            received = []
                            while len(received) < MESSAGE_COUNT:
                                received += [
                                    m.payload
                                    for m in await messages.take(MESSAGE_COUNT - len(received))
                                ]
                        assert received == sent
                monkeypatch.setattr(server_module, "COUNTED_SESSIONS_PER_STEP", 1)
                steps = server.server.total_traffic()
                next(steps)  # There are two sessions.
                next(steps)
                with pytest.raises(StopIteration) as ended:
                    next(steps)
                assert ended.value.value.messages == 2 * MESSAGE_COUNT
                server.server.replace_users(no_users)  # Local clients need no authentication.
                await local.publish(b"still here", class_id="news")
                assert len(server.server.local_clients) == 1


async def test_disconnected_local_client_reconnects() -> None:
    async with serving() as server:
        endpoint = LocalEndpoint(server.server, "a part of it")
        with trio.fail_after(PATIENCE_SECONDS):
            async with (
                open_bus([endpoint], name="own") as local,
                local.subscribe("news", durable="one") as messages,
            ):
                (first,) = server.server.local_clients.values()
                first.disconnect()
                await local.publish(b"hello", class_id="news")
                assert (await messages.get()).payload == b"hello"
                (second,) = server.server.local_clients.values()
                assert second is not first
            assert not server.server.local_clients
            link = await endpoint.open()
            assert link.send(memoryview(b"\xffno such frame at all<\r\n>")) > 0
            space = memoryview(bytearray(1000))
            while await link.receive_into(space):
                pass
            assert link.send(memoryview(b"more")) == 4  # The server has closed the connection.
            assert not server.server.local_clients
            assert server.server.disconnect_counts[Reason.UNKNOWN_TYPE] == 1
            link = await endpoint.open()
    assert await link.receive_into(space) == 0  # The server has ended.
    with pytest.raises(BusConnectionError, match="has ended"):
        await endpoint.open()


async def test_bulk_publisher_waits_for_local_readers() -> None:
    async with serving() as server:
        endpoint, server_ = LocalEndpoint(server.server, "a part of it"), server.server
        with trio.fail_after(PATIENCE_SECONDS):
            async with simplebus.connect(server.addresses[0]) as remote:
                await remote.publish(bytes(MESSAGE_BYTES), class_id=1)
                (connection,) = server_.connections.values()
                session = connection.session
                reply_and_frames = endpoint.fetch_from_memory(1, FetchRequest())
                assert reply_and_frames is not None
                reply, frames = reply_and_frames
                assert (reply.next, [batch.count for batch in frames]) == (1, [1])
                server_._is_bulk_read = False  # The last read was small.
                assert not server_.should_delay_read(session)
                server_._is_bulk_read = True
                assert server_.should_delay_read(session)
                await server_.delay_read(session)
                assert not server_.should_delay_read(session)  # It waited once.
                assert endpoint.fetch_from_memory(1, FetchRequest(first=1)) is not None
                assert not server_.should_delay_read(session)  # The fetch returned no messages.
