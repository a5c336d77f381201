"""Acknowledgement of the last message, for each way to leave a loop or a subscription's block."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing, suppress

import anyio
import anyio.lowlevel
import msgspec
import pytest

import simplebus
from simplebus import Message, RawSubscription
from simplebus.client.aio.bus import Bus
from simplebus.client.blocking.subscription import BlockingRawSubscription
from simplebus.core.settings import Settings
from tests.client.bus_server import BusServer
from tests.client.conftest import Run

NUMBERED = [b"0", b"1", b"2", b"3"]
registry = simplebus.Registry()


@registry.message(class_id=9)
class Counted(msgspec.Struct):
    number: int


async def wrapped(messages: RawSubscription) -> AsyncGenerator[bytes, None]:
    async for message in messages:
        yield message.payload


# Ways to end a loop over messages 0, 1, … at message 0 -------------------------------------------


async def by_break(messages: RawSubscription) -> None:
    async for _ in messages:
        break


async def by_break_within_blocks(messages: RawSubscription) -> None:
    try:
        async for _ in messages.messages():
            with suppress(KeyError):
                async with anyio.create_task_group():
                    break
    finally:
        await anyio.lowlevel.checkpoint()


async def by_return(messages: RawSubscription) -> bytes:
    async for message in messages:
        try:
            return message.payload
        finally:
            await anyio.lowlevel.checkpoint()
    raise AssertionError


async def by_break_in_a_cancelled_scope(messages: RawSubscription) -> None:
    with anyio.CancelScope() as scope:
        async for _ in messages:
            scope.cancel()
            break


async def by_exception(messages: RawSubscription) -> None:
    with suppress(ZeroDivisionError):
        async for _ in messages:
            raise ZeroDivisionError


async def by_exception_of_a_call(messages: RawSubscription) -> None:
    async def fail() -> None:
        await anyio.lowlevel.checkpoint()
        raise ZeroDivisionError

    try:
        async for _ in messages.messages():
            await fail()
    except ZeroDivisionError:
        pass


async def by_cancellation(messages: RawSubscription) -> None:
    with anyio.CancelScope() as scope:
        async for _ in messages:
            scope.cancel()
            await anyio.sleep_forever()


async def by_cancellation_with_messages_kept(messages: RawSubscription) -> None:
    iterator = messages.messages()
    for _ in range(2):
        with anyio.CancelScope() as scope:
            async for message in iterator:
                assert message.payload == b"0"
                scope.cancel()
                await anyio.sleep_forever()


async def by_cancellation_behind_cleanup(messages: RawSubscription) -> None:
    with anyio.CancelScope() as scope:
        async for _ in messages:
            try:
                scope.cancel()
                await anyio.sleep_forever()
            finally:
                with anyio.CancelScope(shield=True):
                    await anyio.lowlevel.checkpoint()


async def by_cancellation_of_a_task(messages: RawSubscription) -> None:
    async def work() -> None:
        async for _ in messages:
            is_waiting.set()
            await anyio.sleep_forever()

    is_waiting = anyio.Event()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(work)
        await is_waiting.wait()
        tasks.cancel_scope.cancel()


async def by_break_with_the_iterator_kept(messages: RawSubscription) -> None:
    global kept_iterator
    kept_iterator = aiter(messages)
    async for _ in kept_iterator:
        break


async def by_break_out_of_a_generator(messages: RawSubscription) -> None:
    async with aclosing(wrapped(messages)) as payloads:
        async for _ in payloads:
            break


kept_iterator: object = None

LEFT = [by_break, by_break_within_blocks, by_return, by_exception, by_exception_of_a_call]
"""Exceptions are handled inside the subscription's block."""
PUT_BACK = [
    by_cancellation,
    by_cancellation_with_messages_kept,
    by_cancellation_behind_cleanup,
    by_cancellation_of_a_task,
    by_break_in_a_cancelled_scope,
]
KEPT = [
    by_break_with_the_iterator_kept,
    by_break_out_of_a_generator,
]

Leave = Callable[[RawSubscription], Awaitable[object]]


async def ack_counts(bus: Bus) -> tuple[int, int]:
    """Return how many messages the client has acknowledged and rejected."""
    await bus.flush()
    statistics = bus.statistics()
    return statistics.acknowledged, statistics.nacked


def leave_loop(
    run: Run, leave: Leave, check: Callable[[Bus, RawSubscription], Awaitable[None]]
) -> None:
    """End a loop at message 0, then call `check` inside the subscription's block."""

    async def main() -> None:
        async with simplebus.MemoryBus() as bus:
            await bus.publish_many(NUMBERED, class_id=1)
            async with bus.subscribe(1, durable="d") as messages:
                await leave(messages)
                await check(bus, messages)

    run(main)


@pytest.mark.parametrize("leave", LEFT)
def test_message_of_an_ended_loop_is_acknowledged_when_the_next_is_asked_for(
    run: Run, leave: Leave
) -> None:
    async def check(bus: Bus, messages: RawSubscription) -> None:
        assert await ack_counts(bus) == (0, 0)
        assert (await messages.get()).payload == b"1"
        assert await ack_counts(bus) == (1, 0)
        for payload in NUMBERED[2:]:
            async for message in messages:
                assert (message.payload, message.attempt) == (payload, 1)
                break
        assert await ack_counts(bus) == (3, 0)

    leave_loop(run, leave, check)


@pytest.mark.parametrize("leave", LEFT + KEPT)
def test_message_of_an_ended_loop_is_acknowledged_when_the_block_is_left(
    run: Run, leave: Leave
) -> None:
    async def main() -> None:
        async with simplebus.MemoryBus() as bus:
            await bus.publish_many(NUMBERED, class_id=1)
            async with bus.subscribe(1, durable="d") as messages:
                await leave(messages)
            assert (await ack_counts(bus))[0] == 1
            async with bus.subscribe(1, durable="d") as messages:
                assert (await messages.get()).payload == b"1"

    run(main)


@pytest.mark.parametrize("leave", LEFT + KEPT)
def test_message_of_an_ended_loop_is_redelivered_when_the_block_raises(
    run: Run, leave: Leave
) -> None:
    async def main() -> None:
        async with simplebus.MemoryBus(Settings(tick_seconds=0.05)) as bus:
            await bus.publish(b"0", class_id=1)
            with suppress(ZeroDivisionError):
                async with bus.subscribe(1, durable="d") as messages:
                    await leave(messages)
                    raise ZeroDivisionError
            assert await ack_counts(bus) == (0, 1)
            async with bus.subscribe(1, durable="d") as messages:
                with anyio.fail_after(240):
                    redelivered = await messages.get()
                assert (redelivered.payload, redelivered.redelivered) == (b"0", True)

    run(main)


@pytest.mark.parametrize("leave", PUT_BACK)
def test_message_of_a_cancelled_loop_is_the_next_message(run: Run, leave: Leave) -> None:
    async def check(bus: Bus, messages: RawSubscription) -> None:
        assert await ack_counts(bus) == (0, 0)
        assert [message.payload for message in await messages.take(9)] == NUMBERED
        assert await ack_counts(bus) == (0, 0)

    leave_loop(run, leave, check)


async def loop_until_cancelled(messages: RawSubscription) -> None:
    async for _ in messages:
        await anyio.sleep_forever()


async def get_until_cancelled(messages: RawSubscription) -> None:
    assert (await messages.get()).payload == b"0"
    await anyio.sleep_forever()


async def iterate_generator_until_cancelled(messages: RawSubscription) -> None:
    async with aclosing(wrapped(messages)) as payloads:
        async for _ in payloads:
            await anyio.sleep_forever()


@pytest.mark.parametrize(
    "consume", [loop_until_cancelled, get_until_cancelled, iterate_generator_until_cancelled]
)
@pytest.mark.parametrize("durable", ["d", None])
def test_cancelled_block_has_its_message_redelivered_at_once(
    run: Run, consume: Leave, durable: str | None
) -> None:
    async def main() -> None:
        async with simplebus.MemoryBus(Settings(tick_seconds=86_400.0)) as bus:
            await bus.publish_many(NUMBERED, class_id=1)
            with anyio.move_on_after(0.05):
                async with bus.subscribe(1, durable=durable) as messages:
                    await consume(messages)
            assert (await ack_counts(bus))[0] == 0
            async with bus.subscribe(1, durable=durable) as messages:
                received = [(await messages.get()).payload for _ in NUMBERED]
            assert received == NUMBERED

    run(main)


def test_asyncio_timeout_around_a_block_has_its_message_redelivered_at_once() -> None:
    async def main() -> None:
        async with simplebus.MemoryBus(Settings(tick_seconds=86_400.0)) as bus:
            await bus.publish_many(NUMBERED, class_id=1)
            with suppress(TimeoutError):
                async with asyncio.timeout(0.05), bus.subscribe(1) as messages:
                    async for _ in messages:
                        await asyncio.sleep(60)
            assert (await ack_counts(bus))[0] == 0
            async with bus.subscribe(1) as messages:
                assert (await messages.get()).payload == b"0"

    asyncio.run(main())


# Nested consumers ---------------------------------------------------------------------------------


def test_get_in_a_loop_body_does_not_acknowledge_the_message_of_the_loop(run: Run) -> None:
    async def main() -> None:
        async with simplebus.MemoryBus() as bus, bus.subscribe(1) as messages:
            await bus.publish_many(NUMBERED, class_id=1)
            pairs = []
            async for message in messages:
                pairs.append((message.payload, (await messages.get()).payload))
                assert (await ack_counts(bus))[0] == 2 * (len(pairs) - 1)
                if len(pairs) == 2:
                    break
            assert pairs == [(b"0", b"1"), (b"2", b"3")]
            with anyio.move_on_after(0.01):
                await messages.get()
            assert await ack_counts(bus) == (4, 0)

    run(main)


def test_block_that_raises_rejects_the_messages_of_the_loop_and_of_get(run: Run) -> None:
    async def main() -> None:
        async with simplebus.MemoryBus() as bus:
            await bus.publish_many(NUMBERED, class_id=1)
            with suppress(ZeroDivisionError):
                async with bus.subscribe(1, durable="d") as messages:
                    async for _ in messages:
                        assert (await messages.get()).payload == b"1"
                        raise ZeroDivisionError
            assert bus.statistics().acknowledged == 0
            async with bus.subscribe(1, durable="d") as messages:
                assert (await messages.get()).payload == b"2"

    run(main)


def test_nested_loops_settle_their_own_messages(run: Run) -> None:
    async def main() -> None:
        async with simplebus.MemoryBus() as bus, bus.subscribe(1) as messages:
            await bus.publish_many(NUMBERED, class_id=1)
            async for outer in messages:
                with anyio.CancelScope() as scope:
                    async for inner in messages.messages():
                        if inner.payload == b"2":
                            scope.cancel()
                            await anyio.sleep_forever()
                assert await ack_counts(bus) == (1, 0)
                assert outer.payload == b"0"
                break
            assert await ack_counts(bus) == (1, 0)
            assert [message.payload for message in await messages.take(9)] == NUMBERED[2:]
            assert await ack_counts(bus) == (2, 0)

    run(main)


def test_get_and_anext_acknowledge_what_they_returned_before(run: Run) -> None:
    async def main() -> None:
        async with simplebus.MemoryBus() as bus, bus.subscribe(1) as messages:
            await bus.publish_many(NUMBERED, class_id=1)
            assert (await messages.get()).payload == b"0"
            assert (await anext(messages)).payload == b"1"
            assert (await anext(messages.messages())).payload == b"2"
            assert [m.payload for m in await anext(messages.batches())] == [b"3"]
            assert await ack_counts(bus) == (3, 0)

    run(main)


def test_loops_over_values_and_messages_can_alternate(run: Run) -> None:
    def check(message: Message[Counted]) -> None:
        assert (message.sequence, message.value) == (message.value.number, message.value)

    async def main() -> None:
        async with (
            simplebus.MemoryBus(registry=registry) as bus,
            bus.subscribe(Counted) as counted,
        ):
            await bus.publish_many([Counted(number) for number in range(20)])
            expected = iter(range(20))
            for _ in range(4):
                async for value in counted:
                    assert value.number == next(expected)
                    break
                message = await counted.get()
                check(message)
                assert message.value.number == next(expected)
                assert (await anext(counted)).number == next(expected)
                async for message in counted.messages():
                    check(message)
                    assert message.value.number == next(expected)
                    break
            assert await ack_counts(bus) == (15, 0)

    run(main)


# Blocking client ---------------------------------------------------------------------------------


def first_payload(messages: BlockingRawSubscription) -> bytes:
    for message in messages:
        return message.payload
    raise AssertionError


def test_blocking_client_acknowledges_by_the_same_rule(server: BusServer) -> None:
    def ack_counts() -> tuple[int, int]:
        bus.flush()
        return bus.statistics().acknowledged, bus.statistics().nacked

    with simplebus.connect_blocking(server.address) as bus:
        bus.publish_many([b"%d" % number for number in range(10)], class_id=1)
        with bus.subscribe(1, durable="d") as messages:
            assert first_payload(messages) == b"0"
            assert ack_counts() == (0, 0)
            assert first_payload(messages) == b"1"
            assert ack_counts() == (1, 0)
            with suppress(ZeroDivisionError):
                for message in messages.messages():
                    assert message.payload == b"2"
                    raise ZeroDivisionError
            assert next(messages).payload == b"3"
            assert ack_counts() == (3, 0)
            outer = iter(messages)
            assert next(outer).payload == b"4"
            assert next(messages).payload == b"5"
            assert ack_counts() == (4, 0)
            assert next(outer).payload == b"6"
            assert ack_counts() == (6, 0)
        assert ack_counts()[0] == 7
        with suppress(ZeroDivisionError), bus.subscribe(1, durable="d") as messages:
            for message in messages:
                assert message.payload == b"7"
                raise ZeroDivisionError
        assert ack_counts()[0] == 7
        with bus.subscribe(1, durable="d") as messages:
            assert first_payload(messages) == b"8"
