"""Tests of internal errors and failing system calls."""

from __future__ import annotations

import logging
import os

import pytest
import trio

import simplebus
from simplebus.core.broker.broker import Broker, FullPolicy, Settings
from simplebus.core.errors import Reason
from simplebus.core.limits import Limits
from simplebus.core.ring import segment
from simplebus.server.connection import Connection
from tests.behaviour.wire_peer_v2 import connect_request
from tests.server.injected_faults import raise_on_received
from tests.support.running_server import (
    PATIENCE_SECONDS,
    ack,
    class_statistics,
    connect,
    message,
    serving,
    subscribe,
    wait_until,
)


async def test_internal_error_ends_only_one_connection(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    raise_on_received(monkeypatch, Broker, b"trip", AssertionError("a fault of ours"))
    async with serving() as server:
        bystander, victim = await connect(server, [1]), await connect(server, [1])
        await bystander.send(subscribe())
        await victim.send(message(b"trip"))
        assert await victim.wait_closed()
        await bystander.send(message(b"still here"))
        assert await bystander.read_messages(1) == [(0, b"still here")]
    assert "disconnected by an internal error" in caplog.text


async def test_out_of_memory_disconnects_the_client_with_a_log_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    raise_on_received(monkeypatch, Broker, b"much", MemoryError())
    async with serving() as server:
        bystander, victim = await connect(server, [1]), await connect(server, [1])
        await bystander.send(subscribe())
        await victim.send(message(b"much"))
        assert await victim.wait_closed()
        await bystander.send(message(b"still here"))
        assert await bystander.read_messages(1) == [(0, b"still here")]
    assert "out of memory for its messages" in caplog.text
    assert "Traceback" not in caplog.text


async def test_replaced_connection_with_unread_bytes_is_closed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with serving() as server:
        for attempt in range(20):
            greeting = connect_request(1, name=f"till {attempt}", instance="a")
            first, next_one = await connect(server), await connect(server)
            await first.send(greeting)
            assert await first.read_frame()
            unread = message(b"of the former session")
            for peer, data in (first, unread), (next_one, greeting), (first, unread):
                os.write(peer.stream.socket.fileno(), data)  # All in one turn of the loop.
            assert await next_one.read_frame()
            assert await first.wait_closed()
    assert "internal error" not in caplog.text


async def test_disconnecting_at_the_start_of_a_write_is_no_internal_error(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Connection, "_send", lambda self: False)  # A socket that accepts no bytes.
    async with serving() as server:
        for _ in range(30):  # The order of its two tasks is random.
            await connect(server)
            with trio.fail_after(PATIENCE_SECONDS):
                # Without sleeping: the task must not have started yet.
                while not server.server.connections:
                    await trio.lowlevel.checkpoint()
            (connection,) = server.server.connections.values()
            connection.flush()
            connection.disconnect()
            await wait_until(lambda: not server.server.connections)
    assert not caplog.records


async def test_disconnected_client_is_not_read_from(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    original, to_disconnect = trio.lowlevel.wait_readable, list[Connection]()

    async def disconnect_after_wait(sock):  # type: ignore[no-untyped-def]
        await original(sock)
        for connection in to_disconnect:
            connection.disconnect()

    monkeypatch.setattr(trio.lowlevel, "wait_readable", disconnect_after_wait)
    async with serving() as server:
        peer = await connect(server, [1])
        to_disconnect += server.server.connections.values()
        await peer.send(message(b"it is published again on another connection"))
        assert await peer.wait_closed()
        assert class_statistics(server).published == 0


async def test_publisher_waits_when_the_system_refuses_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    original = segment.allocate_array

    allocated_count = 0

    def refuse_most(count, dtype):  # type: ignore[no-untyped-def]
        nonlocal allocated_count
        allocated_count += 1
        if count * dtype.itemsize > 1 << 17 or allocated_count > 8:
            raise OSError("out of memory")
        return original(count, dtype)

    monkeypatch.setattr(segment, "allocate_array", refuse_most)
    async with serving() as server:
        publisher = await connect(server, [1])
        async with trio.open_nursery() as nursery:
            nursery.start_soon(publisher.send, message(bytes(1000)) * 1500)
            await wait_until(lambda: class_statistics(server).blocked_sessions == 1)
            server.server.broker.check_invariants()
            subscriber = await connect(server, [1])
            await subscriber.send(subscribe())
            for at in range(1500):
                await subscriber.read_messages(1)
                await subscriber.send(ack(at, at + 1))
        await wait_until(lambda: class_statistics(server).ring.message_count == 0)


async def test_blocked_publishers_that_hang_up_free_their_sockets() -> None:
    async with serving(Settings(Limits(class_messages=10))) as server:
        for _ in range(20):
            publisher = await connect(server, [1])
            await publisher.send(message(b"x") * 30)
            await publisher.stream.aclose()
        await wait_until(lambda: len(server.server.connections) == 0)
        assert class_statistics(server).parked == 20 * 30 - 10
        subscriber = await connect(server, [1])
        await subscriber.send(subscribe())
        for at in range(600):
            assert (await subscriber.read_messages(1))[0][0] == at
            await subscriber.send(ack(at, at + 1))
        await wait_until(lambda: class_statistics(server).ring.message_count == 0)


async def test_publisher_that_subscribes_to_another_class_waits_without_loss() -> None:
    limits = Limits(class_messages=100, pending_bytes=3 << 20, frame_bytes=64 << 10)
    count = 4000
    async with serving(Settings(limits)) as server:
        slow = await connect(server, [1, 2])
        await slow.send(subscribe(1))
        publisher = await connect(server, [1, 2])
        await publisher.send(subscribe(2))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(publisher.send, message(bytes(2000)) * count)
            await wait_until(lambda: class_statistics(server).blocked_sessions == 1)
            for at in range(count):
                await slow.read_messages(1)
                await slow.send(ack(at, at + 1))
        assert not server.server.disconnect_counts
        await wait_until(lambda: class_statistics(server).ring.message_count == 0)


async def test_disconnects_the_holder_of_all_memory_in_another_class() -> None:
    limits = Limits(class_bytes=8 << 20, total_bytes=8 << 20, stall_seconds=0.3)
    async with serving(Settings(limits, tick_seconds=0.05)) as server:
        dead = await connect(server, [1, 2])
        await dead.send(subscribe(2))
        await wait_until(lambda: bool(class_statistics(server, 2).subscriptions))
        first, second = await connect(server), await connect(server)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(first.send, message(bytes(100_000), class_id=2) * 150)
            await wait_until(lambda: class_statistics(server, 2).blocked_sessions == 1)
            nursery.start_soon(second.send, message(bytes(100_000), class_id=1) * 20)
            await wait_until(lambda: server.server.disconnect_counts[Reason.STALLED] == 1)
            nursery.cancel_scope.cancel()


async def test_dropped_messages_and_ignored_acks_are_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING)
    settings = Settings(
        Limits(class_messages=100), full_policy=FullPolicy.DROP_NEWEST, tick_seconds=0.02
    )
    async with serving(settings) as server:
        peer = await connect(server, [1])
        await peer.send(message(b"x") * 250 + ack(0, 1, class_id=9))
        await wait_until(lambda: "dropped 150 messages of class 1 (drop_newest)" in caplog.text)
        await wait_until(lambda: "ignored 1 ack (ack_unsubscribed)" in caplog.text)


async def test_subscriptions_to_unnamed_classes_are_limited_and_removed() -> None:
    async with serving(Settings(Limits(classes=100))) as server:
        modest = await connect(server)
        await modest.send(b"".join(subscribe(n) for n in range(100)))
        greedy = await connect(server)
        await greedy.send(b"".join(subscribe(n) for n in range(101)))
        assert await greedy.wait_closed()
        await modest.stream.aclose()
        await wait_until(lambda: not server.server.connections)
        assert not server.server.broker.subscription_manager._early_subscribers


async def test_dead_letters_are_logged_by_the_name_of_the_class(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING)
    async with (
        serving(Settings(tick_seconds=0.02)) as server,
        simplebus.connect(f"simplebus://{server.addresses[0]}") as bus,
        bus.subscribe("orders") as orders,
    ):
        await bus.publish(b"7 books", class_id="orders")
        async for order in orders:
            order.terminate("no such book")
            break
        await wait_until(lambda: "moved 1 message of class orders to dead letters" in caplog.text)
    (record,) = (record for record in caplog.records if vars(record).get("class_name") == "orders")
    values = vars(record)
    assert (values["event"], values["count"]) == ("messages.dead_lettered", 1)
    assert values["reason"] == Reason.TERMINATED


async def test_internal_error_in_a_background_task_ends_only_the_task(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving() as server:
        store = server.server.broker.store
        store.limit_turns(1)
        bystanders = [await connect(server, [1]) for _ in range(3)]
        for peer in bystanders:
            await peer.send(subscribe())
        await wait_until(lambda: len(server.server.broker.classes[1].subscriptions) == 3)
        original = trio.lowlevel.checkpoint

        async def fail_once() -> None:
            monkeypatch.setattr(trio.lowlevel, "checkpoint", original)
            raise AssertionError("a fault of ours")

        monkeypatch.setattr(trio.lowlevel, "checkpoint", fail_once)
        await bystanders[0].send(message(b"first"))
        await wait_until(lambda: "a task of the server failed" in caplog.text)
        await bystanders[0].send(message(b"second"))  # Starts the task again.
        for peer in bystanders:
            assert await peer.read_messages(2) == [(0, b"first"), (1, b"second")]
