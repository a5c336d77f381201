"""`Bus` under trio and asyncio, against a real server."""

from __future__ import annotations

import asyncio
from typing import Any

import anyio
import pytest

import simplebus
from load.ports import free_port
from simplebus import Batch, BusConnectionError, LocalProtocolError
from simplebus.client.aio.writer import WRITE_BUFFER_BYTES
from simplebus.core.protocol import frames
from tests.client.bus_server import PATIENCE_SECONDS, BusServer, until
from tests.client.conftest import Run
from tests.client.faulty_server import CREDIT_BYTES, fake_server, silent_listener

NUMBERED = [b"message %d" % number for number in range(3000)]


def never_confirms(kind: int, *_: object) -> bytes:
    """Reply of a fake server: a heartbeat instead of a confirm."""
    return frames.encode(frames.HEARTBEAT) if kind in (frames.MESSAGE, frames.ENVELOPE) else b""


async def collect(messages: simplebus.RawSubscription, count: int) -> list[bytes]:
    """Return the payloads of the next `count` messages."""
    payloads: list[bytes] = []
    async for message in messages:
        payloads.append(message.payload)
        if len(payloads) == count:
            break
    return payloads


# Publishing and subscribing ----------------------------------------------------------------------


def test_address_is_read_from_the_environment(
    run: Run, server: BusServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        async with simplebus.connect() as bus:
            await bus.publish(b"x", class_id=1)

    monkeypatch.setenv("SIMPLEBUS_URL", server.address)
    run(main)
    assert server.statistics().published == 1


def test_publishes_receives_in_order_and_acknowledges(run: Run, server: BusServer) -> None:
    async def main() -> None:
        async with simplebus.connect(server.address) as bus:
            for payload in NUMBERED[:100]:
                await bus.publish(payload, class_id=1, confirm=False)
            await bus.publish_many(NUMBERED[100:], class_id=1)
            async with bus.subscribe(1) as messages:
                assert await collect(messages, 3000) == NUMBERED

    run(main)
    statistics = server.statistics()
    assert (statistics.published, statistics.acknowledged) == (3000, 3000)
    assert statistics.redelivered == 0


def test_left_client_is_gone_when_the_next_one_connects(run: Run, server: BusServer) -> None:
    async def main() -> None:
        async with (
            simplebus.connect(server.address) as first_bus,
            simplebus.connect(server.address) as second_bus,
        ):
            for bus in (first_bus, second_bus) * 20:
                async with bus.subscribe(1, durable="shop"):
                    pass  # A second connection at the same time would be refused.

    run(main)


def test_batches_contain_the_published_messages(run: Run, server: BusServer) -> None:
    async def main() -> None:
        payloads: list[bytes] = []
        async with simplebus.connect(server.address) as bus:
            await bus.publish_many(NUMBERED, class_id=1)
            async with bus.subscribe(1) as messages:
                async for batch in messages.batches():
                    assert isinstance(batch, Batch)
                    assert batch.sequences[0] == len(payloads)
                    payloads += batch.payloads
                    if len(payloads) == 3000:
                        break
        assert payloads == NUMBERED

    run(main)
    assert server.statistics().acknowledged == 3000


def test_subscription_is_active_when_its_block_begins(run: Run, shared_server: BusServer) -> None:
    async def main() -> None:
        async with (
            simplebus.connect(shared_server.address) as publisher,
            simplebus.connect(shared_server.address) as first,
            simplebus.connect(shared_server.address) as second,
            first.subscribe(10) as first_messages,
            second.subscribe(10) as second_messages,
        ):
            await publisher.publish(b"to both", class_id=10)
            for messages in (first_messages, second_messages):
                assert (await anext(messages)).payload == b"to both"

    run(main)


def test_small_message_is_written_when_its_publisher_yields(
    run: Run, shared_server: BusServer
) -> None:
    async def main() -> None:
        async with simplebus.connect(shared_server.address) as bus:
            for payload in (b"alone", b"again"):
                await bus.publish(payload, class_id=11, confirm=False)
                assert bus.statistics().queued_bytes > 0
                await anyio.wait_all_tasks_blocked()
                assert bus.statistics().queued_bytes == 0
            async with bus.subscribe(11) as messages:
                assert await collect(messages, 2) == [b"alone", b"again"]

    run(main)


def test_flush_waits_for_confirms_and_drain_for_acks(run: Run, server: BusServer) -> None:
    async def main() -> None:
        async with simplebus.connect(server.address) as bus:
            await bus.publish_many([b"x" * 1000] * 20_000, class_id=1, confirm=False)
            await bus.publish(b"x", class_id=1, confirm=False)
            assert bus.statistics().unconfirmed > 0
            await bus.flush()
            assert bus.statistics().unconfirmed == bus.statistics().queued_bytes == 0
            await bus.drain()
            assert server.statistics().published == 20_001

    run(main)


def test_publishing_and_subscribing_on_one_connection_does_not_deadlock(
    run: Run, server: BusServer
) -> None:
    count = 200_000

    async def main() -> None:
        async with simplebus.connect(server.address) as bus, bus.subscribe(1) as messages:
            for number in range(count // 2):
                await bus.publish(b"%d" % number, class_id=1, confirm=False)
            await bus.publish_many([b"%d" % n for n in range(count // 2, count)], class_id=1)
            expected = 0
            async for message in messages:
                assert message.payload == b"%d" % expected
                expected += 1
                if expected == count:
                    break

    run(main)
    assert server.statistics().acknowledged == count


def test_publishers_wait_while_the_bus_confirms_nothing(run: Run) -> None:
    async def main() -> None:
        with fake_server(never_confirms) as server:
            async with simplebus.connect(server.address, reconnect=0) as bus:
                while bus.statistics().unconfirmed_bytes < CREDIT_BYTES + WRITE_BUFFER_BYTES:
                    await bus.publish(b"x" * 10_000, class_id=1, confirm=False)
                assert (
                    WRITE_BUFFER_BYTES
                    <= bus.statistics().queued_bytes
                    < WRITE_BUFFER_BYTES + 20_000
                )
                published = bus.statistics().published
                with anyio.move_on_after(0.05):
                    await bus.publish(b"x", class_id=1, confirm=False)
                    pytest.fail("it did not wait")
                assert bus.statistics().published == published, "cancelled is not published"
                server.close()

    with pytest.raises(
        BusConnectionError, match=r"\d+ messages were not confirmed by the server: "
    ):
        run(main)


# Acknowledging -----------------------------------------------------------------------------------


def test_redelivers_to_the_next_subscription_when_the_block_raises(
    run: Run, clockless_server: BusServer
) -> None:
    async def main() -> None:
        async with simplebus.connect(clockless_server.address) as bus:
            await bus.publish_many([b"good", b"bad", b"later"], class_id=1)
            with pytest.raises(ZeroDivisionError):  # noqa: PT012
                async with bus.subscribe(1) as messages:
                    async for message in messages:
                        if message.payload == b"bad":
                            raise ZeroDivisionError
            await bus.drain()
            clockless_server.tick()
            async with bus.subscribe(1) as messages:
                assert await collect(messages, 2) == [b"bad", b"later"]
            await bus.drain()

    run(main)
    assert clockless_server.statistics().acknowledged == 3


def test_asking_for_the_next_message_acknowledges_the_one_before(
    run: Run, server: BusServer
) -> None:
    async def main() -> None:
        async with simplebus.connect(server.address) as bus:
            await bus.publish_many(NUMBERED[:3], class_id=1)
            async with bus.subscribe(1) as messages:
                for expected in NUMBERED[:3]:
                    assert (await anext(messages)).payload == expected
                await bus.flush()
                await bus.drain()
                assert server.statistics().acknowledged == 2
            await bus.drain()
            assert server.statistics().acknowledged == 3

    run(main)


def test_acks_of_a_slow_consumer_do_not_wait_for_the_end_of_its_batch(
    run: Run, server: BusServer
) -> None:
    async def main() -> None:
        async with simplebus.connect(server.address) as bus:
            await bus.publish_many(NUMBERED[:100], class_id=1)
            async with bus.subscribe(1) as messages:
                async for message in messages:
                    if message.message_id == 50:
                        break
                await anyio.to_thread.run_sync(
                    until, lambda: server.statistics().acknowledged >= 50
                )
                assert server.statistics().acknowledged == 50

    run(main)


def test_without_auto_ack_only_manual_acks_count(run: Run, clockless_server: BusServer) -> None:
    async def main() -> None:
        async with simplebus.connect(clockless_server.address) as bus:
            await bus.publish_many(NUMBERED[:5], class_id=1)
            async with bus.subscribe(1, auto_ack=False) as messages:
                received = [await anext(messages) for _ in range(5)]
                messages.ack(received[3])
                messages.ack(received[0])
                await bus.drain()
                clockless_server.tick()
                redelivered = [await anext(messages) for _ in range(3)]
                assert [(m.message_id, m.attempt) for m in redelivered] == [(1, 2), (2, 2), (4, 2)]
                clockless_server.tick(2)
                async for batch in messages.batches():
                    messages.ack_batch(batch)
                    if 4 in batch.sequences:
                        break
            await bus.drain()

    run(main)
    assert clockless_server.statistics().acknowledged == 5


def test_ack_at_another_subscription_raises(run: Run, shared_server: BusServer) -> None:
    async def main() -> None:
        async with (
            simplebus.connect(shared_server.address) as bus,
            bus.subscribe(13) as messages,
            bus.subscribe(13) as other_messages,
        ):
            await bus.publish(b"x", class_id=13)
            message = await anext(messages)
            with pytest.raises(LocalProtocolError, match="came from another subscription"):
                other_messages.ack(message)
            messages.ack(message)
            await anext(other_messages)

    run(main)


def test_every_subscription_receives_and_acknowledges_every_message(
    run: Run, server: BusServer
) -> None:
    async def main() -> None:
        async with (
            simplebus.connect(server.address) as bus,
            bus.subscribe(1) as first_messages,
            bus.subscribe(1) as second_messages,
        ):
            await bus.publish_many(NUMBERED, class_id=1)
            assert await collect(first_messages, 3000) == NUMBERED
            await bus.drain()
            assert server.statistics().ring.message_count == 3000
            assert await collect(second_messages, 3000) == NUMBERED

    run(main)
    assert server.statistics().ring.message_count == 0


# Cancellation ------------------------------------------------------------------------------------


def test_cancelled_get_loses_no_message(run: Run, server: BusServer) -> None:
    async def main() -> None:
        async with simplebus.connect(server.address) as bus, bus.subscribe(1) as messages:
            for payload in NUMBERED[:20]:
                with anyio.move_on_after(0.005):
                    await anext(messages)
                    pytest.fail("there was nothing")
                await bus.publish(payload, class_id=1)
                assert (await anext(messages)).payload == payload
            with anyio.CancelScope() as scope:
                scope.cancel()
                await anext(messages)
                pytest.fail("it was cancelled")
            await bus.publish(b"last", class_id=1)
            assert (await anext(messages)).payload == b"last"

    run(main)
    assert server.statistics().acknowledged == 21


def test_message_of_a_cancelled_loop_is_the_next(run: Run, server: BusServer) -> None:
    async def main() -> None:
        async with simplebus.connect(server.address) as bus:
            await bus.publish_many(NUMBERED[:3], class_id=1)
            async with bus.subscribe(1) as messages:
                with anyio.CancelScope() as scope:
                    async for message in messages:
                        if message.message_id == 1:
                            scope.cancel()
                            await anyio.sleep_forever()
                await bus.drain()
                assert server.statistics().acknowledged == 1
                assert await collect(messages, 2) == NUMBERED[1:3]

    run(main)
    assert server.statistics().acknowledged == 3


def test_asyncio_timeout_puts_the_message_back(server: BusServer) -> None:
    async def main() -> None:
        async with simplebus.connect(server.address) as bus:
            await bus.publish_many(NUMBERED[:2], class_id=1)
            async with bus.subscribe(1) as messages:
                with pytest.raises(TimeoutError):  # noqa: PT012
                    async with asyncio.timeout(0.05):
                        async for _ in messages.batches():
                            await asyncio.sleep(60)
                await bus.drain()
                assert server.statistics().acknowledged == 0
                assert await collect(messages, 2) == NUMBERED[:2]

    asyncio.run(main())
    assert server.statistics().acknowledged == 2


def test_cancellation_acknowledges_processed_messages(run: Run, server: BusServer) -> None:
    async def main() -> None:
        with anyio.CancelScope() as scope:
            async with simplebus.connect(server.address) as bus:
                await bus.publish_many(NUMBERED[:3], class_id=1)
                async with bus.subscribe(1) as messages:
                    async for message in messages:
                        if message.message_id == 2:
                            scope.cancel()
                            await anyio.sleep_forever()
        assert scope.cancelled_caught

    run(main)
    until(lambda: server.statistics().acknowledged == 2)


def test_leaving_can_be_cancelled(run: Run) -> None:
    """Also while the client waits for a server that confirms nothing."""

    async def main() -> None:
        with fake_server(never_confirms) as server, anyio.move_on_after(0.2) as scope:
            async with simplebus.connect(server.address) as bus:
                await bus.publish_many([b"x" * 1000] * 20_000, class_id=1, confirm=False)
        assert scope.cancelled_caught

    run(main)


def test_asyncio_cancellation_closes_the_connection_properly(server: BusServer) -> None:
    async def main(is_subscribed: asyncio.Event) -> None:
        async with simplebus.connect(server.address) as bus:
            await bus.publish_many(NUMBERED[:3], class_id=1)
            async with bus.subscribe(1) as messages:
                async for message in messages:
                    if message.message_id == 2:
                        is_subscribed.set()
                        await asyncio.sleep(3600)

    async def cancelled() -> None:
        task = asyncio.create_task(main(is_subscribed := asyncio.Event()))
        await asyncio.wait_for(is_subscribed.wait(), PATIENCE_SECONDS)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancelled())
    until(lambda: server.statistics().acknowledged == 2)


# Slow consumers ----------------------------------------------------------------------------------


def test_unread_subscription_does_not_block_another(run: Run, server: BusServer) -> None:
    async def main() -> None:
        async with (
            simplebus.connect(server.address) as bus,
            bus.subscribe(1, max_in_flight=100) as flooded,
            bus.subscribe(2) as unread,
        ):
            await bus.publish_many([b"x" * 1000] * 20_000, class_id=1)
            await bus.publish(b"through", class_id=2)
            assert (await anext(unread)).payload == b"through"
            assert bus.statistics().buffered_bytes < 200_000
            assert (await anext(flooded)).message_id == 0

    run(main)


def test_a_slow_consumer_gets_everything_once(run: Run, server: BusServer) -> None:
    async def main() -> None:
        async with (
            simplebus.connect(server.address) as bus,
            bus.subscribe(1, max_in_flight=100) as messages,
        ):
            await bus.publish_many([b"x" * 1000] * 20_000, class_id=1)
            await anyio.sleep(0.1)
            assert bus.statistics().buffered_bytes < 200_000
            assert len(await collect(messages, 20_000)) == 20_000
            assert bus.statistics().received == 20_000

    run(main)


# Errors and losses -------------------------------------------------------------------------------


def test_invalid_payloads_raise_and_the_bus_continues(run: Run, shared_server: BusServer) -> None:
    async def main() -> None:
        async with simplebus.connect(shared_server.address) as bus:
            with pytest.raises(LocalProtocolError, match="index 1 has 1048564 bytes"):
                await bus.publish_many([b"", b"x" * 1048564], class_id=15)
            with pytest.raises(TypeError, match="a payload is bytes, got str"):
                await bus.publish("text", class_id=15)  # type: ignore[arg-type]
            with pytest.raises(ValueError, match="got 65536"):
                await bus.publish(b"", class_id=65536)
            with pytest.raises(ValueError, match="got -1"):
                bus.handle(-1, print)
            await bus.publish(b"x" * 1048563, class_id=15)
            async with bus.subscribe(15) as messages:
                assert len((await anext(messages)).payload) == 1048563

    run(main)


def test_a_subscription_must_be_entered_and_only_once(run: Run, shared_server: BusServer) -> None:
    async def main() -> None:
        async with simplebus.connect(shared_server.address) as bus:
            messages = bus.subscribe(16)
            with pytest.raises(LocalProtocolError, match="expected async with bus"):
                await anext(messages)
            async with messages:
                pass
            with pytest.raises(LocalProtocolError, match="was closed"):
                await anext(messages)
            with pytest.raises(LocalProtocolError, match="entered once"):
                async with messages:
                    pass

    run(main)


def test_bus_is_usable_only_inside_its_block(run: Run, shared_server: BusServer) -> None:
    async def main() -> None:
        unopened_bus: Any
        for unopened_bus, is_opened in (
            (simplebus.connect(shared_server.address), "async with simplebus.connect"),
            (simplebus.MemoryBus(), "async with simplebus.MemoryBus"),
            (simplebus.MemoryBus().connect(), "async with memory.connect"),
            (simplebus.connect_blocking("127.0.0.1:1"), "with simplebus.connect_blocking"),
        ):
            with pytest.raises(
                AttributeError, match=f"'publish' was used before .* expected {is_opened}"
            ):
                unopened_bus.publish(b"x", class_id=1)

    run(main)


def test_two_tasks_cannot_wait_for_one_subscription(run: Run, shared_server: BusServer) -> None:
    async def main() -> None:
        async with (
            simplebus.connect(shared_server.address) as bus,
            bus.subscribe(17) as messages,
            anyio.create_task_group() as tasks,
        ):
            tasks.start_soon(messages.__anext__)
            await anyio.wait_all_tasks_blocked()
            with pytest.raises(LocalProtocolError, match="another task already waits"):
                await anext(messages)
            tasks.cancel_scope.cancel()

    run(main)


def test_connecting_to_a_closed_port_raises(run: Run) -> None:
    async def main() -> None:
        async with simplebus.connect(f"127.0.0.1:{free_port()}"):
            pytest.fail("connected to nobody")

    with pytest.raises(BusConnectionError, match=r"cannot connect to simplebus://127.0.0.1:\d+: "):
        run(main)


def test_connecting_to_an_unknown_host_raises(run: Run) -> None:
    async def main() -> None:
        async with simplebus.connect("nobody.invalid"):
            pytest.fail("connected to nobody")

    with pytest.raises(BusConnectionError, match=r"cannot connect to simplebus://nobody.invalid"):
        run(main)


def test_connecting_to_another_kind_of_server_raises(run: Run) -> None:
    async def main() -> None:
        with silent_listener() as server:
            async with simplebus.connect(server.address, timeout=2):
                pytest.fail("connected to no bus")

    with pytest.raises(BusConnectionError, match=r"no answer to the Connect frame .* 2 s"):
        run(main)


def test_server_shutdown_ends_all_waits(run: Run, server: BusServer) -> None:
    async def main() -> None:
        async with (
            simplebus.connect(server.address, reconnect=None) as bus,
            bus.subscribe(1) as messages,
        ):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(anyio.to_thread.run_sync, server.hang_up)
                with pytest.raises(BusConnectionError, match="closed the connection"):
                    await anext(messages)
            with pytest.raises(BusConnectionError, match="closed the connection"):
                await bus.publish(b"x", class_id=1)
            with pytest.raises(BusConnectionError):
                await bus.publish_many([b"x"], class_id=1)
            with pytest.raises(BusConnectionError):
                await bus.flush()
            with pytest.raises(BusConnectionError):
                bus.handle(2, print)

    run(main)


def test_using_a_left_bus_raises(run: Run, shared_server: BusServer) -> None:
    async def main() -> None:
        async with simplebus.connect(shared_server.address) as bus:
            pass
        with pytest.raises(BusConnectionError, match="was closed at the end of its block"):
            await bus.publish(b"x", class_id=1)

    run(main)


def test_leaving_delivers_the_last_messages(run: Run, server: BusServer) -> None:
    async def main() -> None:
        async with simplebus.connect(server.address) as bus:
            for payload in NUMBERED:
                await bus.publish(payload, class_id=1, confirm=False)

    run(main)
    assert server.statistics().published == 3000
