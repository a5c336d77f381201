"""Publications of NATS clients with many receivers, on a running server."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

import pytest
import trio

from simplebus.server import nats_listener as nats_listener_module
from simplebus.server.nats_listener import NatsListener
from tests.server.many_receivers import (
    RECEIVERS,
    LaterTurns,
    break_one_receiver,
    connect_subscribers,
    read_received,
)
from tests.support.nats_peer import NatsPeer, connect_nats_peer
from tests.support.running_server import serving, wait_until

pytestmark = pytest.mark.usefixtures("one_receiver_per_turn")

BATCH = b"PUB a.0 1\r\nx\r\n" * 20
BATCHES = BATCH + b"".join(b"PUB a.%d 1\r\n%d\r\n" % (n % 3, n % 10) for n in range(60))
"""A uniform batch and a mixed batch."""


class Publication:
    """Clients of a server, of which one publishes to the others."""

    def __init__(
        self, listener: NatsListener, publisher: NatsPeer, subscribers: list[NatsPeer]
    ) -> None:
        self.listener = listener
        self.publisher = publisher
        self.subscribers = subscribers
        self.session = next(reversed(listener.nats_server.sessions.values()))
        """Session of the publisher, which connected last."""

    async def check_received(self, published: bytes) -> None:
        """Check that every subscriber receives these messages and nothing more."""
        received = published.replace(b"PUB", b"MSG").replace(b" 1\r\n", b" s 1\r\n")
        for subscriber in self.subscribers:
            assert b"".join(line + b"\r\n" for line in await read_received(subscriber)) == received


@contextlib.asynccontextmanager
async def publication() -> AsyncIterator[Publication]:
    async with serving(nats_port=0) as server:
        assert server.nats_listener is not None
        subscribers = await connect_subscribers(server, b"a.*")
        publisher = await connect_nats_peer(server)
        yield Publication(server.nats_listener, publisher, subscribers)


async def test_pong_follows_the_last_receiver() -> None:
    async with publication() as clients:
        await clients.publisher.send(BATCHES + b"PING\r\n")
        await clients.publisher.read_line()
        sessions = clients.listener.nats_server.sessions.values()
        counts = [session.out_messages for session in sessions if session is not clients.session]
        assert counts == [80] * RECEIVERS
        await clients.check_received(BATCHES)


async def test_other_clients_are_served_between_two_turns(later_turns: LaterTurns) -> None:
    async with publication() as clients:
        bystander = clients.subscribers.pop()
        await bystander.send(b"UNSUB s\r\n")
        await bystander.flush()
        later_turns.hold()
        await clients.publisher.send(BATCHES)
        await wait_until(lambda: clients.session.is_request_pending)
        await bystander.flush()
        assert clients.session.is_request_pending
        later_turns.release()
        await clients.publisher.flush()
        await clients.check_received(BATCHES)


async def test_publication_of_a_client_that_closes_is_delivered() -> None:
    async with publication() as clients:
        await clients.publisher.send(BATCHES)
        await clients.publisher.stream.aclose()
        await wait_until(lambda: clients.session.is_closed)
        await clients.check_received(BATCHES)


async def test_publication_of_a_disconnected_client_is_delivered(later_turns: LaterTurns) -> None:
    async with publication() as clients:
        later_turns.hold()
        await clients.publisher.send(BATCH)
        await wait_until(lambda: clients.session.is_request_pending)
        clients.listener.connections[clients.session.client_id].disconnect()
        await wait_until(lambda: clients.session.is_closed)
        await clients.check_received(BATCH)


async def test_subscribers_that_close_meanwhile_do_not_affect_others(
    later_turns: LaterTurns,
) -> None:
    async with publication() as clients:
        later_turns.hold()
        await clients.publisher.send(BATCHES)
        await wait_until(lambda: clients.session.is_request_pending)
        for subscriber in clients.subscribers[::2]:
            await subscriber.stream.aclose()
        del clients.subscribers[::2]
        later_turns.release()
        await clients.publisher.flush()
        await clients.check_received(BATCHES)


async def test_flush_at_shutdown_waits_for_the_last_receiver(later_turns: LaterTurns) -> None:
    async with publication() as clients:
        later_turns.hold()
        await clients.publisher.send(BATCH)
        await wait_until(lambda: clients.session.is_request_pending)
        later_turns.release()
        await clients.listener.wait_flushed()
        assert not clients.session.is_request_pending


async def test_error_of_a_later_turn_disconnects_the_publisher(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with publication() as clients:
        break_one_receiver(monkeypatch, clients.listener)
        await clients.publisher.send(b"PUB a.0 1\r\nx\r\n")
        await wait_until(lambda: clients.session.is_closed)
        monkeypatch.undo()
    assert "disconnected by an internal error" in caplog.text


async def test_shutdown_processes_all_that_a_publisher_has_sent(
    later_turns: LaterTurns, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nats_listener_module, "_STOP_PUBLISHERS_MAX_SECONDS", 0.0)
    published = b"PUB a.1 1\r\nx\r\n" * 500  # More than the first read.
    async with publication() as clients, trio.open_nursery() as nursery:
        later_turns.hold()
        await clients.publisher.send(published)
        await wait_until(lambda: clients.session.is_request_pending)
        nursery.start_soon(clients.listener.stop_publishers)
        for _ in range(100):
            await trio.lowlevel.checkpoint()
        assert not clients.session.is_closed
        later_turns.release()
        await wait_until(lambda: clients.session.is_closed)
        await clients.check_received(published)
