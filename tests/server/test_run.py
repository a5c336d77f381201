"""Tests of a server on real sockets."""

from __future__ import annotations

import gc
import itertools
import socket
import time

import pytest
import trio

from simplebus.core.broker.broker import FullPolicy, Settings
from simplebus.core.errors import Reason
from simplebus.core.limits import Limits
from simplebus.core.protocol import frames
from simplebus.server.observability.message_rates import (
    format_nats_rates,
    format_rates,
    measure_nats_rates,
    measure_rates,
)
from tests.support.nats_peer import connect_nats_peer
from tests.support.running_server import (
    ack,
    class_statistics,
    connect,
    message,
    serving,
    subscribe,
    wait_until,
)


async def test_session_ids_count_from_zero_in_the_order_of_connections() -> None:
    async with serving() as server:
        for expected in range(3):
            peer = await connect(server)
            await peer.send(frames.encode(frames.CONNECT, content=b"[]"))
            reply = await peer.read_frame()
            assert reply[9:13] == expected.to_bytes(4, "little")


async def test_one_port_serves_both_address_families() -> None:
    async with serving(hosts=("127.0.0.1", "::1")) as server:
        ports = {address.rpartition(":")[2] for address in server.addresses}
        assert len(server.addresses) == 2
        assert len(ports) == 1
        assert server.addresses[1].startswith("[::1]:")


async def test_port_in_use_is_reported() -> None:
    with socket.socket() as listening_socket:
        listening_socket.bind(("127.0.0.1", 0))
        listening_socket.listen()
        port = listening_socket.getsockname()[1]
        with pytest.raises(ExceptionGroup) as caught:
            async with serving(port=port):
                pass
        assert caught.group_contains(OSError, match=f"cannot listen on 127.0.0.1:{port}")


async def test_messages_wait_for_the_first_subscriber_and_reach_every_later_one() -> None:
    async with serving() as server:
        publisher = await connect(server, [1])
        await publisher.send(message(b"a") + message(b"b\r\n"))
        await wait_until(lambda: class_statistics(server).published == 2)
        first = await connect(server, [1])
        await first.send(subscribe())
        assert await first.read_messages(2) == [(0, b"a"), (1, b"b\r\n")]
        second = await connect(server, [1])
        await second.send(subscribe())
        await wait_until(lambda: len(class_statistics(server).subscriptions) == 2)
        await publisher.send(message(b"c"))
        assert await first.read_messages(1) == await second.read_messages(1) == [(2, b"c")]
        await first.send(ack(0, 3))
        await wait_until(lambda: class_statistics(server).in_flight == 1)
        assert class_statistics(server).ring.floor == 2
        await second.send(ack(2, 3))
        await wait_until(lambda: class_statistics(server).ring.message_count == 0)


async def test_redelivers_with_growing_backoff() -> None:
    settings = Settings(ack_timeout=2, tick_seconds=0.03)
    async with serving(settings) as server:
        peer = await connect(server, [1])
        await peer.send(subscribe() + message(b"one") + message(b"two"))
        assert await peer.read_messages(2) == [(0, b"one"), (1, b"two")]
        await peer.send(ack(0, 1))
        ticks = [server.server.broker.tick_number]
        for _ in range(3):
            assert await peer.read_messages(1) == [(1, b"two")]
            ticks.append(server.server.broker.tick_number)
        pauses = [after - before for before, after in itertools.pairwise(ticks)]
        assert pauses[0] >= 1
        assert pauses[1] >= 3
        assert pauses[2] >= 7
        await peer.send(ack(1, 2))
        await wait_until(lambda: class_statistics(server).in_flight == 0)
        assert class_statistics(server).redelivered == 3


async def test_unacked_messages_of_the_last_subscriber_go_to_the_next() -> None:
    async with serving() as server:
        publisher = await connect(server, [1])
        first = await connect(server, [1])
        await first.send(subscribe())
        await wait_until(lambda: len(class_statistics(server).subscriptions) == 1)
        await publisher.send(message(b"a") + message(b"b") + message(b"c"))
        await first.read_messages(3)
        await first.send(ack(1, 2))
        await wait_until(lambda: class_statistics(server).in_flight == 2)
        await first.stream.aclose()
        await wait_until(lambda: not class_statistics(server).subscriptions)
        successor = await connect(server, [1])
        await successor.send(subscribe())
        assert await successor.read_messages(2) == [(0, b"a"), (2, b"c")]


async def test_a_backlog_larger_than_any_socket_buffer_arrives_whole() -> None:
    count, payload = 3000, bytes(10_000)
    async with serving() as server:
        publisher = await connect(server, [1])
        for _ in range(count):
            await publisher.send(message(payload))
        subscriber = await connect(server, [1])
        await subscriber.send(subscribe())
        received = await subscriber.read_messages(count)
        assert [message_id for message_id, _ in received] == list(range(count))
        assert all(content == payload for _, content in received)
        await subscriber.send(ack(0, count))
        await wait_until(lambda: class_statistics(server).ring.message_count == 0)


async def test_a_slow_subscriber_does_not_slow_another() -> None:
    count, payload = 2000, bytes(10_000)
    async with serving() as server:
        slow = await connect(server, [1])
        fast = await connect(server, [1])
        for peer in (slow, fast):
            await peer.send(subscribe())
        await wait_until(lambda: len(class_statistics(server).subscriptions) == 2)
        publisher = await connect(server, [1])
        async with trio.open_nursery() as nursery:

            async def publish() -> None:
                for _ in range(count):
                    await publisher.send(message(payload))

            nursery.start_soon(publish)
            await fast.read_messages(count)
        assert len(await slow.read_messages(count)) == count


async def test_client_that_fills_its_own_class_can_still_ack() -> None:
    async with serving(Settings(Limits(class_messages=1000))) as server:
        peer = await connect(server, [1])
        await peer.send(subscribe() + message(b"0123456789abcdef") * 1005)
        assert len(await peer.read_messages(1000)) == 1000
        await peer.send(ack(0, 1000))
        assert await peer.read_messages(5) == [(n, b"0123456789abcdef") for n in range(1000, 1005)]
        await peer.send(ack(1000, 1005))
        await wait_until(lambda: class_statistics(server).ring.message_count == 0)


async def test_client_exchanges_three_million_messages_with_itself() -> None:
    count, stride = 3_000_000, len(message(b"0123456789abcdef"))
    async with serving() as server:
        peer = await connect(server, [1])
        await peer.send(subscribe())
        received = acked = 0
        async with trio.open_nursery() as nursery:
            lock = trio.Lock()

            async def publish() -> None:
                block = message(b"0123456789abcdef") * 10_000
                for _ in range(count // 10_000):
                    async with lock:
                        await peer.stream.send_all(block)

            async def acknowledge() -> None:
                nonlocal acked
                while acked < count:
                    await trio.sleep(1)
                    complete = received // stride
                    if complete > acked:
                        async with lock:
                            await peer.stream.send_all(ack(acked, complete))
                        acked = complete

            with trio.fail_after(240):
                nursery.start_soon(publish)
                nursery.start_soon(acknowledge)
                while received < count * stride:
                    received += len(await peer.stream.receive_some(1 << 20))
        await wait_until(lambda: class_statistics(server).ring.message_count == 0)
        statistics = class_statistics(server)
        assert statistics.delivered == count
        assert statistics.redelivered == 0


async def test_full_class_blocks_its_publisher_without_loss() -> None:
    async with serving(Settings(Limits(class_messages=100))) as server:
        publisher = await connect(server, [1])
        await publisher.send(message(b"x") * 250)
        await wait_until(lambda: class_statistics(server).blocked_sessions == 1)
        assert class_statistics(server).published == 100
        await publisher.stream.aclose()
        subscriber = await connect(server, [1])
        await subscriber.send(subscribe())
        for first in (0, 100, 200):
            received = await subscriber.read_messages(min(100, 250 - first))
            assert received[0][0] == first
            await subscriber.send(ack(first, first + len(received)))
        await wait_until(lambda: class_statistics(server).ring.message_count == 0)
        assert server.server.broker.statistics().parked_bytes == 0


@pytest.mark.parametrize(
    ("policy", "reason", "kept_numbers"),
    [
        (FullPolicy.DROP_OLDEST, Reason.DROP_OLDEST, range(150, 250)),
        (FullPolicy.DROP_NEWEST, Reason.DROP_NEWEST, range(100)),
    ],
)
async def test_a_full_class_drops_by_policy_and_counts(
    policy: FullPolicy, reason: Reason, kept_numbers: range
) -> None:
    async with serving(Settings(Limits(class_messages=100), full_policy=policy)) as server:
        publisher = await connect(server, [1])
        await publisher.send(b"".join(message(b"%d" % n) for n in range(250)))
        await wait_until(lambda: sum(class_statistics(server).dropped.values()) == 150)
        assert class_statistics(server).dropped == {reason: 150}
        subscriber = await connect(server, [1])
        await subscriber.send(subscribe())
        received = await subscriber.read_messages(100)
        assert [int(payload) for _, payload in received] == list(kept_numbers)


async def test_rate_line_counts_messages_between_two_snapshots() -> None:
    async with serving() as server:
        before = server.server.broker.statistics()
        peer = await connect(server, [1])
        await peer.send(subscribe() + message(b"x") * 3)
        await peer.read_messages(3)
        line = format_rates(measure_rates(before, server.server.broker.statistics()))
        assert line.startswith("Received: 3. Send: 3. Acknowledged: 0.")


async def test_rate_line_includes_nats_messages() -> None:
    async with serving(nats_port=0) as server:
        assert server.nats_listener is not None
        front = server.nats_listener.nats_server
        peer = await connect_nats_peer(server)
        before = front.statistics()
        await peer.send(b"SUB a 1\r\nSUB a 2\r\nPUB a 0\r\n\r\n")
        assert (await peer.read_line()).startswith(b"MSG a")
        line = format_nats_rates(measure_nats_rates(before, front.statistics()))
        assert line == "NATS: received: 1. Sent: 2. Clients: 1. Slow: 0."


async def test_garbage_collection_stays_enabled_without_owns_process() -> None:
    """A program that starts many servers must not freeze more objects with each one."""
    before = gc.get_freeze_count()
    async with serving():
        assert gc.get_freeze_count() == before


@pytest.mark.parametrize("jump_seconds", [-3600.0, 3600.0])
async def test_running_server_ignores_jumps_of_the_system_clock(
    monkeypatch: pytest.MonkeyPatch, jump_seconds: float
) -> None:
    async with serving() as server:
        clock = server.server.broker.clock
        server.server.update_clock()
        before, now = clock.now, time.time
        monkeypatch.setattr(time, "time", lambda: now() + jump_seconds)
        server.server.update_clock()
        assert before <= clock.now < before + abs(jump_seconds) / 2
