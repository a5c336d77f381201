"""Sending to many connections in several turns of the event loop."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import trio

from simplebus.core.outbox import Outbox
from simplebus.core.settings import ClassSettings, Settings
from simplebus.nats.server.session import NatsSession
from simplebus.server import turns as turns_module
from simplebus.server.connection import Connection
from simplebus.server.nats_listener import NatsListener
from simplebus.server.turns import SEND_SECONDS_MAX, SendTurns
from tests.support.nats_peer import connect_nats_peer
from tests.support.running_server import ack, connect, message, serving, subscribe, wait_until


@dataclass
class Clock:
    """Clock that advances only when a connection sends."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass(eq=False)
class SlowConnection:
    """Connection whose flush takes half of the time of a turn."""

    clock: Clock
    session: SimpleNamespace = field(default_factory=lambda: SimpleNamespace(is_closed=False))
    flush_count: int = 0

    def flush(self) -> None:
        self.flush_count += 1
        self.clock.now += SEND_SECONDS_MAX / 2


def flush_counts(connections: list[SlowConnection]) -> list[int]:
    return [connection.flush_count for connection in connections]


async def test_connections_that_do_not_fit_into_a_turn_are_sent_to_in_the_next_ones() -> None:
    clock, ended_turns = Clock(), list[list[int]]()
    connections = [SlowConnection(clock) for _ in range(5)]
    async with trio.open_nursery() as nursery:
        turns = SendTurns(
            nursery.start_soon, lambda: ended_turns.append(flush_counts(connections)), clock=clock
        )
        turns.begin_turn()
        for connection in connections:
            turns.flush(connection)
        assert flush_counts(connections) == [1, 1, 0, 0, 0]
    assert ended_turns == [[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]


def use_up_turn(turns: SendTurns, clock: Clock) -> None:
    turns.flush(SlowConnection(clock))
    turns.flush(SlowConnection(clock))


async def test_a_waiting_connection_is_sent_to_once() -> None:
    clock = Clock()
    connection = SlowConnection(clock)
    async with trio.open_nursery() as nursery:
        turns = SendTurns(nursery.start_soon, lambda: None, clock=clock)
        use_up_turn(turns, clock)
        turns.flush(connection)
        turns.flush(connection)
        assert connection.flush_count == 0
    assert connection.flush_count == 1


async def test_a_new_turn_sends_at_once_although_others_wait() -> None:
    clock = Clock()
    waiting, other = SlowConnection(clock), SlowConnection(clock)
    async with trio.open_nursery() as nursery:
        turns = SendTurns(nursery.start_soon, lambda: None, clock=clock)
        use_up_turn(turns, clock)
        turns.flush(waiting)
        turns.begin_turn()
        turns.flush(other)
        assert flush_counts([waiting, other]) == [0, 1]
    assert waiting.flush_count == 1


async def test_a_turn_that_took_long_sends_to_nobody() -> None:
    clock = Clock()
    connections = [SlowConnection(clock) for _ in range(3)]
    async with trio.open_nursery() as nursery:
        turns = SendTurns(nursery.start_soon, lambda: None, clock=clock)
        turns.begin_turn(can_send=False)
        for connection in connections:
            turns.flush(connection)
        assert flush_counts(connections) == [0, 0, 0]
    assert flush_counts(connections) == [1, 1, 1]


async def test_a_connection_that_closed_while_it_waited_is_not_sent_to() -> None:
    clock = Clock()
    connection = SlowConnection(clock)
    async with trio.open_nursery() as nursery:
        turns = SendTurns(nursery.start_soon, lambda: None, clock=clock)
        use_up_turn(turns, clock)
        turns.flush(connection)
        connection.session.is_closed = True
    assert connection.flush_count == 0


async def test_a_connection_that_gets_messages_at_the_end_of_a_full_turn_has_another_turn() -> None:
    clock = Clock()
    first, second = SlowConnection(clock), SlowConnection(clock)
    started = list[Callable[[], Awaitable[object]]]()

    def end_turn() -> None:
        if second.flush_count == 0:
            clock.now += SEND_SECONDS_MAX
            turns.flush(second)

    turns = SendTurns(started.append, end_turn, clock=clock)
    use_up_turn(turns, clock)
    turns.flush(first)
    await started.pop()()
    assert flush_counts([first, second]) == [1, 1]
    assert not started, "the task ran already"


async def test_a_fault_of_one_turn_does_not_end_the_later_turns(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock, is_faulty = Clock(), True
    connections = [SlowConnection(clock) for _ in range(5)]

    def end_turn() -> None:
        nonlocal is_faulty
        if is_faulty:
            is_faulty = False
            raise AssertionError("a fault of ours")

    async with trio.open_nursery() as nursery:
        turns = SendTurns(nursery.start_soon, end_turn, clock=clock)
        use_up_turn(turns, clock)
        for connection in connections:
            turns.flush(connection)
    assert flush_counts(connections) == [1] * len(connections)
    assert caplog.text.count("sending to waiting clients failed") == 1


@pytest.fixture
def one_connection_per_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns_module, "SEND_SECONDS_MAX", 0.0)


@pytest.mark.usefixtures("one_connection_per_turn")
async def test_every_subscriber_receives_every_message_in_order() -> None:
    async with serving() as server:
        peers = [await connect(server, [1]) for _ in range(10)]
        for peer in peers:
            await peer.send(subscribe())
        await wait_until(lambda: len(server.server.broker.classes[1].subscriptions) == len(peers))
        publisher = await connect(server, [1])
        payloads = [b"%d" % number for number in range(20)]
        for payload in payloads[:-1]:
            await publisher.send(message(payload))
        leaving = peers.pop()
        leaving.stream.socket.close()
        await publisher.send(message(payloads[-1]))
        for peer in peers:
            assert await peer.read_messages(len(payloads)) == list(enumerate(payloads))


@pytest.mark.usefixtures("one_connection_per_turn")
async def test_a_fault_of_one_outbox_ends_only_its_connection(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving() as server:
        peers = [await connect(server, [1]) for _ in range(5)]
        for peer in peers:
            await peer.send(subscribe())
        await wait_until(lambda: len(server.server.broker.classes[1].subscriptions) == len(peers))
        publisher = await connect(server, [1])
        victim = peers.pop(2)
        peek, port = Outbox.peek, victim.stream.socket.getsockname()[1]
        (faulty,) = (
            connection.session.outbox
            for connection in server.server.connections.values()
            if connection.session.peer.endswith(f":{port}")
        )

        def faulty_peek(outbox: Outbox, tick: int) -> memoryview:
            if outbox is faulty:
                raise AssertionError("a fault of ours")
            return peek(outbox, tick)

        monkeypatch.setattr(Outbox, "peek", faulty_peek)
        for number in range(3):
            await publisher.send(message(b"%d" % number))
        for peer in peers:
            assert await peer.read_messages(3) == [(n, b"%d" % n) for n in range(3)]
        await wait_until(lambda: len(server.server.connections) == len(peers) + 1)
    assert "disconnected by an internal error" in caplog.text


@pytest.mark.usefixtures("one_connection_per_turn")
async def test_every_nats_subscriber_receives_every_message_in_order() -> None:
    async with serving(nats_port=0) as server:
        peers = [await connect_nats_peer(server) for _ in range(10)]
        for peer in peers:
            await peer.send(b"SUB a 1\r\nPING\r\n")
            assert await peer.read_line() == b"PONG"
        leaving = peers.pop()
        publisher = await connect_nats_peer(server)
        for number in range(20):
            await publisher.send(b"PUB a 2\r\n%02d\r\n" % number)
            if number == 10:
                await leaving.stream.aclose()
        for peer in peers:
            for number in range(20):
                assert await peer.read_line() == b"MSG a 1 2"
                assert await peer.read_line() == b"%02d" % number


@pytest.mark.usefixtures("one_connection_per_turn")
async def test_a_nats_message_is_sent_in_the_turn_that_receives_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    flushes, is_receiving = list[bool](), False
    receive, flush = NatsListener.receive, Connection.flush

    def receive_and_record(listener: NatsListener, session: NatsSession, count: int) -> None:
        nonlocal is_receiving
        is_receiving = True
        receive(listener, session, count)
        is_receiving = False

    def record_and_flush(connection: Connection[Any]) -> None:
        flushes.append(is_receiving)
        flush(connection)

    async with serving(nats_port=0) as server:
        peer, nats_peer = await connect(server, [1]), await connect_nats_peer(server)
        await peer.send(subscribe() + message(b"uses the time of its turn"))
        assert await peer.read_messages(1)
        monkeypatch.setattr(NatsListener, "receive", receive_and_record)
        monkeypatch.setattr(Connection, "flush", record_and_flush)
        await nats_peer.send(b"SUB a 1\r\nPUB a 2\r\nhi\r\n")
        assert await nats_peer.read_line() == b"MSG a 1 2"
    assert flushes[0]


async def test_many_subscriptions_are_notified_in_several_turns() -> None:
    async with serving() as server:
        server.server.broker.store.limit_turns(3)
        peers = [await connect(server, [1]) for _ in range(10)]
        for peer in peers:
            await peer.send(subscribe())
        await wait_until(lambda: len(server.server.broker.classes[1].subscriptions) == len(peers))
        publisher = await connect(server, [1])
        payloads = [b"%d" % number for number in range(20)]
        for payload in payloads:
            await publisher.send(message(payload))
        for peer in peers:
            assert await peer.read_messages(len(payloads)) == list(enumerate(payloads))
        publisher_2 = await connect(server, [1])  # The task has ended, and starts again.
        await publisher_2.send(message(b"last"))
        for peer in peers:
            assert await peer.read_messages(1) == [(len(payloads), b"last")]


async def test_messages_that_wait_for_space_reach_many_subscriptions_at_once() -> None:
    settings = Settings(tick_seconds=600.0, classes={1: ClassSettings(messages_max=1)})
    async with serving(settings) as server:
        server.server.broker.store.limit_turns(2)
        peers = [await connect(server, [1]) for _ in range(5)]
        for peer in peers:
            await peer.send(subscribe())
        await wait_until(lambda: len(server.server.broker.classes[1].subscriptions) == len(peers))
        publisher = await connect(server, [1])
        for number in range(4):
            await publisher.send(message(b"%d" % number))
        for number in range(4):
            for peer in peers:
                assert await peer.read_messages(1) == [(number, b"%d" % number)]
                await peer.send(ack(number, number + 1))
