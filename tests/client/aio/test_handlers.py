"""Handlers, requests and replies under trio and asyncio, against a real server."""

from __future__ import annotations

import asyncio
import logging

import anyio
import msgspec
import pytest

import simplebus
from simplebus import LocalProtocolError, Message
from tests.client.bus_server import BusServer, until
from tests.client.conftest import Run

NUMBERED = [b"message %d" % number for number in range(10)]
registry = simplebus.Registry()


@registry.message(class_id=20)
class GetPrice(msgspec.Struct):
    item: str


@registry.message(name="tests.price")
class Price(msgspec.Struct):
    cents: int


# Handlers ----------------------------------------------------------------------------------------


def test_every_handler_receives_all_messages(run: Run, server: BusServer) -> None:
    async def main() -> None:
        slow: list[bytes] = []
        fast: list[bytes] = []
        may_go_on = anyio.Event()

        async def slowly(message: Message[bytes]) -> None:
            await may_go_on.wait()
            slow.append(message.payload)

        async with simplebus.connect(server.address) as bus:
            bus.handle(1, slowly)
            bus.handle(1, lambda message: fast.append(message.payload))
            await bus.publish_many(NUMBERED, class_id=1)
            await anyio.to_thread.run_sync(until, lambda: len(fast) == 10)
            assert server.statistics().ring.message_count == 10
            may_go_on.set()
            await bus.drain()
            assert slow == fast == NUMBERED
            assert server.statistics().ring.message_count == 0

    run(main)


def test_handles_as_many_messages_at_once_as_concurrency(run: Run, server: BusServer) -> None:
    async def main() -> None:
        running_count = running_max = 0
        handled: list[bytes] = []

        async def handler(message: Message[bytes]) -> None:
            nonlocal running_count, running_max
            running_count += 1
            running_max = max(running_max, running_count)
            await anyio.sleep(0.01)
            running_count -= 1
            handled.append(message.payload)

        async with simplebus.connect(server.address) as bus:
            bus.handle(1, handler, concurrency=4)
            await bus.publish_many(NUMBERED, class_id=1)
            await anyio.to_thread.run_sync(until, lambda: len(handled) == 10)
            await bus.drain()
            assert running_max == 4
            assert sorted(handled) == NUMBERED
            assert server.statistics().acknowledged == 10

    run(main)


def test_hanging_handler_call_does_not_block_others(run: Run, clockless_server: BusServer) -> None:
    async def main() -> None:
        handled: list[bytes] = []

        async def handler(message: Message[bytes]) -> None:
            if message.payload == NUMBERED[0]:
                await anyio.sleep_forever()
            handled.append(message.payload)

        async with simplebus.connect(clockless_server.address) as bus:
            bus.handle(1, handler, concurrency=2)
            await bus.publish_many(NUMBERED, class_id=1)
            await anyio.to_thread.run_sync(until, lambda: len(handled) == 9)

    run(main)
    until(lambda: clockless_server.statistics().acknowledged == 9)


def test_redelivers_when_the_handler_raises(
    run: Run, clockless_server: BusServer, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        received: list[tuple[int, int]] = []
        redelivered = anyio.Event()

        async def handler(message: Message[bytes]) -> None:
            received.append((message.message_id, message.attempt))
            if received[-1] == (1, 1):
                raise ValueError("not today")
            if received[-1] == (1, 2):
                redelivered.set()

        async with simplebus.connect(clockless_server.address) as bus:
            bus.handle(1, handler)
            await bus.publish_many(NUMBERED[:3], class_id=1)
            await anyio.to_thread.run_sync(until, lambda: len(received) == 3)
            await bus.drain()
            clockless_server.tick(2)
            await redelivered.wait()
            await bus.drain()
            assert received == [(0, 1), (1, 1), (2, 1), (1, 2)]

    with (
        caplog.at_level(logging.ERROR, "simplebus.client"),
        pytest.raises(ExceptionGroup, match="handlers failed 1 time") as caught,
    ):
        run(main)
    assert caught.group_contains(ValueError, match="not today")
    assert "failed on <Message 1 of class 1" in caplog.text
    assert clockless_server.statistics().acknowledged == 3


def test_handler_that_cancels_itself_counts_as_failed(
    clockless_server: BusServer,
) -> None:
    async def main() -> None:
        received: list[bytes] = []

        async def handler(message: Message[bytes]) -> None:
            received.append(message.payload)
            if len(received) == 1:
                task = asyncio.current_task()
                assert task is not None
                task.cancel()
            await asyncio.sleep(0)

        async with simplebus.connect(clockless_server.address) as bus:
            bus.handle(1, handler)
            await bus.publish_many(NUMBERED[:2], class_id=1)
            await anyio.to_thread.run_sync(until, lambda: len(received) == 2)
            await bus.drain()
            assert received == NUMBERED[:2]

    with pytest.raises(ExceptionGroup, match="handlers failed 1 time") as caught:
        asyncio.run(main())
    assert caught.group_contains(RuntimeError, match="cancelled itself")
    assert clockless_server.statistics().acknowledged == 1


def test_timeouts_inside_a_handler_are_allowed(run: Run, server: BusServer) -> None:
    async def main() -> None:
        received: list[bytes] = []

        async def handler(message: Message[bytes]) -> None:
            with anyio.move_on_after(0.01):
                await anyio.sleep_forever()
            received.append(message.payload)

        async with simplebus.connect(server.address) as bus:
            bus.handle(1, handler)
            await bus.publish_many(NUMBERED[:2], class_id=1)
            await anyio.to_thread.run_sync(until, lambda: len(received) == 2)

    run(main)


def test_typed_handler_receives_values_and_undecodable_payloads_fail(
    run: Run, clockless_server: BusServer
) -> None:
    async def main() -> None:
        received: list[GetPrice] = []
        async with simplebus.connect(clockless_server.address, registry=registry) as bus:
            bus.handle(GetPrice, received.append)
            await bus.publish(b"no JSON", class_id=20)
            await bus.publish(GetPrice("tea"))
            await anyio.to_thread.run_sync(until, lambda: received == [GetPrice("tea")])
            await bus.drain()

    with pytest.raises(ExceptionGroup, match="handlers failed 1 time") as caught:
        run(main)
    assert caught.group_contains(simplebus.DecodeError)


def test_message_published_by_class_name_after_handle_reaches_the_handler(
    run: Run, server: BusServer
) -> None:
    async def main() -> None:
        received: list[bytes] = []
        async with (
            simplebus.connect(server.address) as bus,
            simplebus.connect(server.address) as subscriber,
            subscriber.subscribe("tests.named"),  # Messages are not kept for a first subscription.
        ):
            bus.handle("tests.named", lambda message: received.append(message.payload))
            await bus.publish(b"x", class_id="tests.named")
            await anyio.to_thread.run_sync(until, lambda: received == [b"x"])

    run(main)


def test_refused_handler_subscription_raises_at_the_end(run: Run, shared_server: BusServer) -> None:
    async def main() -> None:
        async with (
            simplebus.connect(shared_server.address) as bus,
            bus.subscribe(21, durable="tests-handled"),
        ):
            bus.handle(21, print, durable="tests-handled")
            await bus.drain()

    with pytest.raises(ExceptionGroup, match="handlers failed 1 time") as caught:
        run(main)
    assert caught.group_contains(simplebus.RefusedError, match="durable_in_use")


def test_error_of_the_block_is_raised_unwrapped(run: Run, shared_server: BusServer) -> None:
    async def main() -> None:
        async with simplebus.connect(shared_server.address) as bus:
            bus.handle(14, lambda message: 1 / 0)
            await bus.publish(b"x", class_id=14)
            await anyio.sleep(0.05)
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        run(main)


def test_concurrency_below_one_raises(run: Run, shared_server: BusServer) -> None:
    async def main() -> None:
        async with simplebus.connect(shared_server.address) as bus:
            with pytest.raises(ValueError, match=r"concurrency must be from 1 to .* got 0"):
                bus.handle(1, print, concurrency=0)

    run(main)


# Requests ----------------------------------------------------------------------------------------


def test_result_of_a_handler_is_the_reply(run: Run, server: BusServer) -> None:
    async def main() -> None:
        async with (
            simplebus.connect(server.address, registry=registry) as responder,
            simplebus.connect(server.address, registry=registry) as bus,
        ):
            responder.handle(GetPrice, lambda query: Price(len(query.item)))
            responder.handle(22, lambda message: message.payload.upper())
            await responder.drain()
            assert await bus.request(GetPrice("tea"), as_=Price) == Price(3)
            assert (await bus.request(b"shout", class_id=22)).payload == b"SHOUT"
            replies: dict[str, Price] = {}

            async def request_price(item: str) -> None:
                replies[item] = await bus.request(GetPrice(item), as_=Price)

            async with anyio.create_task_group() as tasks:
                for number in range(1, 20):
                    tasks.start_soon(request_price, "x" * number)
            assert replies == {"x" * number: Price(number) for number in range(1, 20)}

    run(main)


def test_request_can_be_answered_manually(run: Run, server: BusServer) -> None:
    async def main() -> None:
        async with (
            simplebus.connect(server.address) as bus,
            bus.subscribe(23) as requests,
            anyio.create_task_group() as tasks,
        ):

            async def answer() -> None:
                request = await anext(requests)
                assert request.is_request
                assert dict(request.headers)["mine"] == "too"
                assert request.channel == "a.b"
                await bus.reply(request, b"yes")

            tasks.start_soon(answer)
            reply = await bus.request(b"?", class_id=23, channel="a.b", headers={"mine": "too"})
            assert reply.payload == b"yes"
            await bus.publish(b"no question", class_id=23)
            with pytest.raises(LocalProtocolError, match="does not request a reply"):
                await bus.reply(await anext(requests), b"?")

    run(main)


def test_reply_outside_the_reply_class_raises(run: Run, server: BusServer) -> None:
    """The requester names the reply channel; the responder needs permissions for it."""

    async def main() -> None:
        async with (
            simplebus.connect(server.address) as bus,
            bus.subscribe("asked") as requests,
        ):
            reply_class_id = await bus.resolve_class_id("simplebus.replies")
            reply_channels = (
                (str(reply_class_id + 1), "simplebus.replies.a"),
                (str(reply_class_id), "vault.open"),
                (str(reply_class_id), "simplebus.repliesx"),
            )
            for class_id, channel in reply_channels:
                headers = {"reply-class": class_id, "reply-to": channel, "request-id": "1"}
                await bus.publish(b"?", class_id="asked", headers=headers)
                with pytest.raises(LocalProtocolError, match="a reply was requested on channel"):
                    await bus.reply(await anext(requests), b"!")

    run(main)


def test_request_times_out_and_expires(run: Run, server: BusServer) -> None:
    async def main() -> None:
        async with simplebus.connect(server.address) as bus, bus.subscribe(24) as requests:
            # On a busy machine, the request expires before it is sent.
            for seconds in (
                0.05,
                0.5,
                5.0,
            ):
                expected_error = rf"no reply to .* class 24 within {seconds:g} s"
                with pytest.raises(TimeoutError, match=expected_error):
                    await bus.request(b"?", class_id=24, timeout=seconds)
                await bus.publish(b"behind it", class_id=24)
                message = await anext(requests)
                if message.payload == b"?":
                    break
            assert message.expires_ms == seconds * 1000

    run(main)
