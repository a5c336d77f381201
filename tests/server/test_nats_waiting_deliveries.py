"""Stored messages with many NATS receivers, on a running server."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

import pytest

from simplebus.server import nats_listener
from simplebus.server.nats_listener import NatsListener
from tests.server.many_receivers import (
    RECEIVERS,
    LaterTurns,
    break_one_receiver,
    connect_subscribers,
    read_received,
)
from tests.support.nats_peer import NatsPeer
from tests.support.running_server import Peer, connect, message, serving, wait_until

pytestmark = pytest.mark.usefixtures("one_receiver_per_turn")


class Clients:
    """A binary publisher and NATS subscribers of its class."""

    def __init__(
        self, listener: NatsListener, publisher: Peer, subscribers: list[NatsPeer]
    ) -> None:
        self.listener = listener
        self.publisher = publisher
        self.subscribers = subscribers

    @property
    def stored_count(self) -> int:
        return self.listener.server.broker.classes[1].ring.head

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
async def connected_clients() -> AsyncIterator[Clients]:
    async with serving(nats_port=0) as server:
        assert server.nats_listener is not None
        subscribers = await connect_subscribers(server, b"class.1")
        publisher = await connect(server, [1])
        yield Clients(server.nats_listener, publisher, subscribers)


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
        bystander = clients.subscribers[-1]
        later_turns.hold()
        await clients.publisher.send(message(b"x"))
        await wait_until(lambda: clients.has_waiting)
        await clients.publisher.send(message(b"y"))
        for _ in range(20):
            await bystander.flush()
        assert clients.stored_count == 1
        later_turns.release()
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
