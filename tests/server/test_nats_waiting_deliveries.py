"""Stored messages with many NATS receivers, on a running server."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

import pytest
import trio

from simplebus.core.broker.broker import Settings
from simplebus.core.limits import Limits
from simplebus.core.protocol.frames import MESSAGE
from simplebus.nats.server import message_delivery
from simplebus.server import nats_listener
from simplebus.server.local_client import LocalEndpoint
from simplebus.server.run import RunningServer
from tests.behaviour.wire_peer_v2 import build_frame, connect_request
from tests.server.many_receivers import (
    RECEIVERS,
    LaterTurns,
    break_one_receiver,
    connect_subscribers,
    read_received,
)
from tests.support.nats_peer import NatsPeer, connect_nats_peer
from tests.support.running_server import Peer, connect, message, serving, wait_until

pytestmark = pytest.mark.usefixtures("one_receiver_per_turn")


@pytest.fixture
def full_queues(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a queue be full while a delivery waits, and let publishers wait only for this reason."""
    monkeypatch.setattr(message_delivery, "WAITING_DELIVERIES_BYTES_MAX", 0)
    monkeypatch.setattr(nats_listener, "WAITING_DELIVERIES_STALL_SECONDS", 0.0)


class Clients:
    """A binary publisher and NATS subscribers of its class."""

    def __init__(self, server: RunningServer, publisher: Peer, subscribers: list[NatsPeer]) -> None:
        assert server.nats_listener is not None
        self.server = server
        self.listener = server.nats_listener
        self.publisher = publisher
        self.subscribers = subscribers

    @property
    def stored_count(self) -> int:
        return self.count_stored(1)

    def count_stored(self, class_id: int) -> int:
        return self.server.server.broker.classes[class_id].ring.head

    async def wait_for_server(self) -> None:
        """Let the server read what publishers have sent, unless it has paused them."""
        bystander = await connect_nats_peer(self.server)
        for _ in range(20):
            await bystander.flush()

    @property
    def has_waiting(self) -> bool:
        return self.listener.nats_server.has_waiting_deliveries

    async def check_received(self, *payloads: bytes) -> None:
        """Check that every subscriber receives these payloads and nothing more."""
        await wait_until(lambda: self.stored_count >= len(payloads) and not self.has_waiting)
        for subscriber in self.subscribers:
            lines = await read_received(subscriber)
            assert lines[1::2] == list(payloads)
            assert set(lines[::2]) <= {b"MSG class.1 s %d" % len(lines[1])}


@contextlib.asynccontextmanager
async def connected_clients(settings: Settings | None = None) -> AsyncIterator[Clients]:
    async with serving(settings, nats_port=0) as server:
        subscribers = await connect_subscribers(server, b"class.1")
        publisher = await connect(server, [1])
        yield Clients(server, publisher, subscribers)


async def test_every_subscriber_receives_all_messages_in_order() -> None:
    payloads = [b"%03d" % number for number in range(200)]
    async with connected_clients() as clients:
        await clients.publisher.send(b"".join(map(message, payloads[:60])))
        for payload in payloads[60:70]:
            await clients.publisher.send(message(payload))
        await clients.publisher.send(b"".join(map(message, payloads[70:])))
        await clients.check_received(*payloads)


async def test_other_clients_are_served_between_two_turns(later_turns: LaterTurns) -> None:
    async with connected_clients() as clients:
        bystander = clients.subscribers.pop()
        await bystander.send(b"UNSUB s\r\n")
        await bystander.flush()
        later_turns.hold()
        await clients.publisher.send(message(b"x"))
        await wait_until(lambda: clients.has_waiting)
        await bystander.flush()
        assert clients.has_waiting
        later_turns.release()
        await clients.check_received(b"x")


async def test_publisher_is_not_read_while_its_messages_wait(
    later_turns: LaterTurns, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nats_listener, "WAITING_DELIVERIES_STALL_SECONDS", float("inf"))
    async with connected_clients() as clients:
        later_turns.hold()
        await clients.publisher.send(message(b"x"))
        await wait_until(lambda: clients.has_waiting)
        await clients.publisher.send(message(b"y"))
        await clients.wait_for_server()
        assert clients.stored_count == 1
        later_turns.release()
        await clients.check_received(b"x", b"y")


@pytest.mark.usefixtures("full_queues")
async def test_publisher_is_not_read_while_the_queue_is_full(later_turns: LaterTurns) -> None:
    async with connected_clients() as clients:
        later_turns.hold()
        await clients.publisher.send(message(b"x"))
        await wait_until(lambda: clients.has_waiting)
        await clients.publisher.send(message(b"y"))
        await clients.wait_for_server()
        assert clients.stored_count == 1
        later_turns.release()
        await clients.check_received(b"x", b"y")


@pytest.mark.usefixtures("full_queues")
async def test_publisher_of_another_class_is_read(later_turns: LaterTurns) -> None:
    async with connected_clients() as clients:
        other = await connect(clients.server, [2])
        subscriber = await connect_nats_peer(clients.server)
        await subscriber.send(b"SUB class.2 2\r\n")
        await subscriber.flush()
        later_turns.hold()
        await clients.publisher.send(message(b"x"))
        await wait_until(lambda: clients.has_waiting)
        for number in range(3):
            await other.send(message(b"%d" % number, class_id=2))
            await wait_until(lambda n=number: clients.count_stored(2) > n)
            assert await subscriber.read_line() == b"MSG class.2 2 1"
            assert await subscriber.read_line() == b"%d" % number
        assert clients.has_waiting
        later_turns.release()
        await clients.check_received(b"x")


@pytest.mark.usefixtures("full_queues")
async def test_local_client_sends_nothing_while_the_queue_is_full(later_turns: LaterTurns) -> None:
    async with connected_clients() as clients:
        client = await LocalEndpoint(clients.server.server, "a part of the server").open()
        assert client.send(memoryview(connect_request(1)))
        later_turns.hold()
        data = memoryview(build_frame(MESSAGE, class_id=1, message_id=0, content=b"x"))
        assert client.send(data) == len(data)
        await wait_until(lambda: clients.has_waiting)
        assert client.send(data) == 0
        async with trio.open_nursery() as nursery:
            nursery.start_soon(client.wait_sendable)
            await clients.wait_for_server()
            assert len(nursery.child_tasks) == 1
            later_turns.release()
        data = memoryview(build_frame(MESSAGE, class_id=1, message_id=1, content=b"y"))
        assert client.send(data) == len(data)
        await clients.check_received(b"x", b"y")
        client.close()


@pytest.mark.usefixtures("full_queues")
async def test_nats_client_whose_ack_frees_space_is_not_read_while_the_queue_is_full(
    later_turns: LaterTurns,
) -> None:
    async with connected_clients(Settings(Limits(class_messages=1))) as clients:
        consumer = await connect_nats_peer(clients.server)
        *_, session = clients.listener.nats_server.sessions.values()
        await consumer.send(b"SUB $SB.SUB.1 a\r\n")
        await consumer.flush()
        await clients.publisher.send(message(b"x") + message(b"y"))
        subject = (await consumer.read_line()).split(b" ")[3]
        assert await consumer.read_line() == b"x"
        await wait_until(lambda: not clients.has_waiting)
        later_turns.hold()
        await consumer.send(b"PUB %b 0\r\n\r\n" % subject)
        await wait_until(lambda: clients.has_waiting)
        await consumer.send(b"PUB a 0\r\n\r\n")
        await clients.wait_for_server()
        assert session.in_messages == 1
        later_turns.release()
        await wait_until(lambda: session.in_messages == 2)
        await clients.check_received(b"x", b"y")


async def test_publisher_is_read_while_the_server_drains(
    later_turns: LaterTurns, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nats_listener, "WAITING_DELIVERIES_STALL_SECONDS", float("inf"))
    async with connected_clients() as clients:
        later_turns.hold()
        for payload in (b"x", b"y"):
            await clients.publisher.send(message(payload))
            await wait_until(lambda: clients.has_waiting)
        clients.listener.begin_draining()
        await wait_until(lambda: clients.stored_count == 2)
        later_turns.release()
        await clients.check_received(b"x", b"y")


async def test_subscribers_that_close_meanwhile_do_not_affect_others(
    later_turns: LaterTurns,
) -> None:
    async with connected_clients() as clients:
        later_turns.hold()
        await clients.publisher.send(message(b"x"))
        await wait_until(lambda: clients.has_waiting)
        for subscriber in clients.subscribers[::2]:
            await subscriber.stream.aclose()
        del clients.subscribers[::2]
        later_turns.release()
        await clients.check_received(b"x")


async def test_flush_at_shutdown_waits_for_the_last_receiver(later_turns: LaterTurns) -> None:
    async with connected_clients() as clients:
        later_turns.hold()
        await clients.publisher.send(message(b"x"))
        await wait_until(lambda: clients.has_waiting)
        later_turns.release()
        await clients.listener.wait_flushed()
        assert not clients.has_waiting
        sessions = clients.listener.nats_server.sessions.values()
        assert [session.out_messages for session in sessions] == [1] * RECEIVERS


async def test_error_of_a_later_turn_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with connected_clients() as clients:
        break_one_receiver(monkeypatch, clients.listener)
        await clients.publisher.send(message(b"x"))
        await wait_until(lambda: clients.stored_count == 1 and not clients.has_waiting)
        monkeypatch.undo()
        await wait_until(lambda: "delivering stored messages to NATS clients" in caplog.text)
        sessions = clients.listener.nats_server.sessions.values()
        assert sum(session.out_messages for session in sessions) == RECEIVERS - 1
