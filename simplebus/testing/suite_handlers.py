"""Conformance tests of handlers, requests and lost connections."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from simplebus.client.core.messages import Message
from simplebus.core.errors import BusConnectionError
from simplebus.testing.suite import (
    MANUAL_TICKS,
    NUMBERED,
    PATIENCE_SECONDS,
    Suite,
    conformance_test,
    get_payloads,
    is_silent,
)


class HandlerSuite(Suite):
    """Handlers, their replies, and reconnects."""

    @conformance_test
    async def test_handlers_receive_all_messages_in_order(self) -> None:
        async with self.host(MANUAL_TICKS) as host, host.connect() as bus:
            received: list[bytes] = []
            received_by_second: list[bytes] = []
            bus.handle(1, lambda message: received.append(message.payload))
            bus.handle(1, lambda message: received_by_second.append(message.payload))
            await bus.publish_many(NUMBERED, class_id=1)
            await host.until(bus, lambda: len(received) == len(received_by_second) == 10)
            assert received == received_by_second == NUMBERED
            await bus.drain()
            host.tick(3)
            await bus.drain()
            assert len(received) == 10

    @conformance_test
    async def test_redelivers_message_when_its_handler_raises(self) -> None:
        calls: list[tuple[bytes, int]] = []

        def handler(message: Message[bytes]) -> None:
            calls.append((message.payload, message.attempt))
            if calls[-1] == (b"bad", 1):
                raise ValueError("not today")

        async with self.host(MANUAL_TICKS) as host:
            with pytest.raises(ExceptionGroup) as raised:  # noqa: PT012 - leaving raises.
                async with host.connect() as bus:
                    bus.handle(1, handler)
                    await bus.publish(b"bad", class_id=1)
                    await bus.publish(b"good", class_id=1)
                    await host.until(bus, lambda: len(calls) == 2)
                    assert calls == [(b"bad", 1), (b"good", 1)]
                    await bus.drain()
                    host.tick()
                    await host.until(bus, lambda: len(calls) == 3)
                    assert calls[2] == (b"bad", 2)
            assert [str(error) for error in raised.value.exceptions] == ["not today"]

    @conformance_test
    async def test_handler_settles_its_message_itself(self) -> None:
        calls: list[tuple[bytes, int]] = []

        def handler(message: Message[bytes]) -> None:
            calls.append((message.payload, message.attempt))
            if calls[-1] == (b"nack", 1):
                message.nack(delay=0)
            elif message.payload == b"ack":
                message.ack()
                raise ValueError("not today")
            elif message.payload == b"terminate":
                message.terminate()
            else:
                message.working()

        async with self.host(MANUAL_TICKS) as host:
            with pytest.raises(ExceptionGroup, match="handlers failed 1 time"):  # noqa: PT012
                async with host.connect() as bus:
                    bus.handle(1, handler)
                    await bus.publish_many([b"ack", b"nack", b"terminate", b"work"], class_id=1)
                    await host.until(bus, lambda: len(calls) == 5)
                    assert calls[4] == (b"nack", 2)
                    await bus.drain()
                    host.tick(20)
                    await bus.drain()
                    assert len(calls) == 5
                    dead = await bus.fetch("dead.1")
                    assert [message.payload for message in dead] == [b"terminate"]

    @conformance_test
    async def test_drain_waits_for_handlers(self) -> None:
        async with self.host(MANUAL_TICKS) as host, host.connect() as bus:
            received: list[bytes] = []
            bus.handle(1, lambda message: received.append(message.payload))
            await bus.publish_many(NUMBERED, class_id=1)
            await host.until(bus, lambda: len(received) > 0)
            await bus.drain()
            assert received == NUMBERED

    @conformance_test
    async def test_drained_messages_are_released(self) -> None:
        async with self.host(MANUAL_TICKS) as host, host.connect() as bus:
            received: list[bytes] = []
            await bus.publish_many(NUMBERED, class_id=1)
            bus.handle(1, lambda message: received.append(message.payload))
            await bus.drain()
            async with bus.subscribe(1, start="earliest") as remaining_messages:
                assert await is_silent(remaining_messages)
            assert received == NUMBERED

    @conformance_test
    async def test_drain_waits_for_messages_that_handlers_publish(self) -> None:
        """Every message has the next one published, and the bus sends one at a time."""
        async with self.host(MANUAL_TICKS) as host, host.connect() as bus:
            received: list[bytes] = []

            def handler(message: Message[bytes]) -> None:
                received.append(message.payload)
                if len(received) < 50:
                    bus.publish_nowait(b"%d" % len(received), class_id=len(received) % 2)

            for class_id in (0, 1):
                bus.handle(class_id, handler, max_in_flight=1)
            await bus.publish(b"0", class_id=0)
            await bus.drain()
            assert received == [b"%d" % number for number in range(50)]

    @conformance_test
    async def test_drain_waits_for_the_whole_backlog(self) -> None:
        async with self.host(MANUAL_TICKS) as host, host.connect() as bus:
            received: list[bytes] = []
            await bus.publish_many(NUMBERED, class_id=1)
            bus.handle(1, lambda message: received.append(message.payload), max_in_flight=3)
            await bus.drain()
            assert received == NUMBERED

    # Requests ------------------------------------------------------------------------------------

    @conformance_test
    async def test_request_returns_the_result_of_the_handler(self) -> None:
        async with (
            self.host(MANUAL_TICKS) as host,
            host.connect() as server,
            host.connect() as client,
        ):
            server.handle("echo", lambda message: message.payload.upper())
            with host.serving(server):
                for word in (b"a", b"<\r\n>", b""):
                    reply = await client.request(word, class_id="echo", timeout=PATIENCE_SECONDS)
                    assert reply.payload == word.upper()

    @conformance_test
    async def test_request_without_reply_times_out(self) -> None:
        async with (
            self.host(MANUAL_TICKS) as host,
            host.connect() as server,
            host.connect() as client,
        ):

            def handler(message: Message[bytes]) -> None:
                assert message.is_request
                requests.append(message)

            requests: list[Message[bytes]] = []
            server.handle(7, handler)
            await client.publish(b"no request", class_id=8)
            with (
                host.serving(server),
                pytest.raises(TimeoutError, match=r"within 0\.1 s"),
            ):
                await client.request(b"?", class_id=7, timeout=0.1)

    # Losses --------------------------------------------------------------------------------------

    @conformance_test
    async def test_reconnects_without_loss_or_duplicates(self) -> None:
        async with self.host(MANUAL_TICKS) as host, host.connect() as bus:
            async with bus.subscribe(1) as messages:
                for number in range(3):
                    await bus.publish(b"%d before" % number, class_id=1)
                    bus.publish_nowait(b"%d between" % number, class_id=1)
                    host.hang_up()
                    await bus.publish(b"%d after" % number, class_id=1)
                suffixes = (b"before", b"between", b"after")
                expected = [b"%d %s" % (n, suffix) for n in range(3) for suffix in suffixes]
                stored = [message.payload for message in await bus.fetch(1)]
                assert stored == expected
                received = await get_payloads(messages, 9)
                assert list(dict.fromkeys(received)) == expected
            assert bus.statistics().reconnections >= 1

    @conformance_test
    async def test_subscription_continues_after_reconnect(self) -> None:
        async with (
            self.host(MANUAL_TICKS) as host,
            host.connect() as bus,
            bus.subscribe(1, "a.*", durable="d") as named,
            bus.subscribe(1) as plain,
        ):
            seen: dict[Any, set[bytes]] = {named: set(), plain: set()}
            for payload in NUMBERED[:3]:
                await bus.publish(payload, class_id=1, channel="a.b")
                for messages, before in seen.items():
                    while (message := await messages.get(PATIENCE_SECONDS)).payload in before:
                        assert message.redelivered
                    assert message.payload == payload
                    before.add(payload)
                host.hang_up()

    @conformance_test
    async def test_refuses_a_publisher_name_in_use(self) -> None:
        async with self.host(MANUAL_TICKS) as host:
            async with host.connect(name="till 1") as bus:
                with pytest.raises(BusConnectionError, match="name_in_use"):
                    async with host.connect(name="till 1"):
                        pass
                await bus.publish(b"the first one goes on", class_id=1)
            async with host.connect(name="till 1"):
                pass


class TaskSuite(Suite):
    """Guarantees for clients with tasks: async handlers and cancellation."""

    @conformance_test
    async def test_async_handlers_run_concurrently(self) -> None:
        async with self.host(MANUAL_TICKS) as host, host.connect() as bus:
            running = maximum = 0
            handled: list[bytes] = []

            async def handler(message: Message[bytes]) -> None:
                nonlocal running, maximum
                running += 1
                maximum = max(maximum, running)
                await anyio.sleep(0.01)
                running -= 1
                handled.append(message.payload)

            bus.handle(1, handler, concurrency=3)
            await bus.publish_many(NUMBERED, class_id=1)
            await host.until(bus, lambda: len(handled) == 10)
            assert sorted(handled) == NUMBERED
            assert maximum == 3

    @conformance_test
    async def test_cancelling_get_loses_no_message(self) -> None:
        numbers = [b"%d" % number for number in range(300)]
        async with self.open_bus() as bus, bus.subscribe(1) as messages:

            async def publish() -> None:
                for payload in numbers:
                    await bus.publish(payload, class_id=1, confirm=False)
                    await anyio.lowlevel.checkpoint()

            received: list[bytes] = []
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(publish)
                patience = 0.0
                while len(received) < len(numbers):
                    with anyio.move_on_after(patience):
                        while True:
                            received.append((await messages.get()).payload)
                    patience = (patience + 0.0003) % 0.003
            assert received == numbers

    @conformance_test
    async def test_block_that_is_cancelled_has_its_last_message_redelivered_at_once(self) -> None:
        async with self.open_bus() as bus:
            await bus.publish_many(NUMBERED, class_id=1)
            with anyio.CancelScope() as scope:
                async with bus.subscribe(1) as messages:
                    async for message in messages:
                        if message.payload == NUMBERED[4]:
                            scope.cancel()
                            await anyio.lowlevel.checkpoint()
            async with bus.subscribe(1) as remaining_messages:
                assert await get_payloads(remaining_messages, 6) == NUMBERED[4:]

    @conformance_test
    async def test_message_of_a_loop_that_is_cancelled_inside_the_block_is_the_next(self) -> None:
        async with self.open_bus() as bus, bus.subscribe(1) as messages:
            await bus.publish_many(NUMBERED, class_id=1)
            with anyio.CancelScope() as scope:
                async for message in messages:
                    if message.payload == NUMBERED[4]:
                        scope.cancel()
                        await anyio.lowlevel.checkpoint()
            assert await get_payloads(messages, 6) == NUMBERED[4:]

    @conformance_test
    async def test_client_can_publish_and_consume_at_once(self) -> None:
        async with self.open_bus() as bus, bus.subscribe(1) as messages:
            sizes = [number * 37 % 5000 for number in range(2000)]

            async def publish() -> None:
                for size in sizes:
                    await bus.publish(bytes(size), class_id=1, confirm=False)

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(publish)
                received = 0
                async for message in messages:
                    assert len(message.payload) == sizes[received]
                    received += 1
                    if received == len(sizes):
                        break
