"""What becomes of the message that a loop was at, by how the loop was left."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
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


# Ways to leave a loop over messages 0, 1, … at message 0 -----------------------------------------


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
    kept = messages.messages()
    for _ in range(2):
        with anyio.CancelScope() as scope:
            async for message in kept:
                assert message.payload == b"0"
                scope.cancel()
                await anyio.sleep_forever()


async def by_cancellation_behind_cleaning(messages: RawSubscription) -> None:
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
            reached.set()
            await anyio.sleep_forever()

    reached = anyio.Event()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(work)
        await reached.wait()
        tasks.cancel_scope.cancel()


async def by_cancellation_with_the_loop_kept(messages: RawSubscription) -> None:
    global kept_loop
    kept_loop = aiter(messages)
    with anyio.CancelScope() as scope:
        async for _ in kept_loop:
            scope.cancel()
            await anyio.sleep_forever()


async def by_break_with_the_loop_kept(messages: RawSubscription) -> None:
    global kept_loop
    kept_loop = aiter(messages)
    async for _ in kept_loop:
        break


async def by_cancellation_around_a_generator(messages: RawSubscription) -> None:
    with anyio.CancelScope() as scope:
        async with aclosing(wrapped(messages)) as payloads:
            async for _ in payloads:
                scope.cancel()
                await anyio.sleep_forever()


async def by_break_out_of_a_generator(messages: RawSubscription) -> None:
    async with aclosing(wrapped(messages)) as payloads:
        async for _ in payloads:
            break


kept_loop: object = None

PROCESSED = [by_break, by_break_within_blocks, by_return, by_break_in_a_cancelled_scope]
FAILED = [by_exception, by_exception_of_a_call]
PUT_BACK = [
    by_cancellation,
    by_cancellation_with_messages_kept,
    by_cancellation_behind_cleaning,
    by_cancellation_of_a_task,
]
UNKNOWN = [
    by_cancellation_with_the_loop_kept,
    by_break_with_the_loop_kept,
    by_cancellation_around_a_generator,
    by_break_out_of_a_generator,
]

Leave = Callable[[RawSubscription], Awaitable[object]]


async def acked(bus: Bus) -> tuple[int, int]:
    """What was said to the bus."""
    await bus.flush()
    said = bus.statistics()
    return said.acknowledged, said.nacked


def left(run: Run, leave: Leave, behind: Callable[[Bus, RawSubscription], Awaitable[None]]) -> None:
    """Have a loop left, and look at what is behind it."""

    async def main() -> None:
        async with simplebus.MemoryBus() as bus:
            await bus.publish_many(NUMBERED, class_id=1)
            async with bus.subscribe(1, durable="d") as messages:
                await leave(messages)
                await behind(bus, messages)

    run(main)


@pytest.mark.parametrize("leave", PROCESSED)
def test_a_loop_that_is_left_by_break_or_return_acknowledges(run: Run, leave: Leave) -> None:
    async def behind(bus: Bus, messages: RawSubscription) -> None:
        assert await acked(bus) == (1, 0)
        for payload in NUMBERED[1:]:
            async for message in messages:
                assert (message.payload, message.attempt) == (payload, 1)
                break
        assert await acked(bus) == (4, 0)

    left(run, leave, behind)


@pytest.mark.parametrize("leave", FAILED)
def test_a_loop_whose_body_raises_has_its_message_come_again(run: Run, leave: Leave) -> None:
    async def behind(bus: Bus, messages: RawSubscription) -> None:
        assert (await messages.get()).payload == b"1"
        assert await acked(bus) == (0, 1)

    left(run, leave, behind)


@pytest.mark.parametrize("leave", PUT_BACK)
def test_a_message_whose_processing_is_cancelled_is_the_next(run: Run, leave: Leave) -> None:
    async def behind(bus: Bus, messages: RawSubscription) -> None:
        assert await acked(bus) == (0, 0)
        assert [message.payload for message in await messages.take(9)] == NUMBERED
        assert await acked(bus) == (0, 0)

    left(run, leave, behind)


@pytest.mark.parametrize("leave", FAILED + PUT_BACK + UNKNOWN)
@pytest.mark.parametrize("asks_again", [True, False])
def test_what_was_not_surely_processed_is_never_acknowledged(
    run: Run, leave: Leave, *, asks_again: bool
) -> None:
    async def main() -> None:
        # What was refused comes after its pause, of six ticks, whoever is there then.
        async with simplebus.MemoryBus(Settings(tick_seconds=0.05)) as bus:
            await bus.publish(b"0", class_id=1)
            async with bus.subscribe(1, durable="d") as messages:
                await leave(messages)
                if asks_again:
                    await bus.publish(b"1", class_id=1)
                    while (await messages.get()).payload != b"1":
                        pass
                else:
                    await anyio.lowlevel.checkpoint()
            assert (await acked(bus))[0] == (0 if not asks_again else 1 + (leave in PUT_BACK))
            if leave in PUT_BACK and asks_again:  # It was had again, and then processed.
                return
            async with bus.subscribe(1, durable="d") as messages:
                with anyio.fail_after(60):
                    again = await messages.get()
                assert again.payload == b"0"
                assert again.redelivered

    run(main)


def test_asyncio_s_own_timeout_around_a_generator_acknowledges_nothing() -> None:
    async def main() -> None:
        async with simplebus.MemoryBus() as bus, bus.subscribe(1) as messages:
            await bus.publish_many(NUMBERED, class_id=1)
            with suppress(TimeoutError):
                async with asyncio.timeout(0.01):
                    async for _ in wrapped(messages):
                        await asyncio.sleep(60)
            assert (await messages.get()).payload in (b"0", b"1")
            assert (await acked(bus))[0] == 0

    asyncio.run(main())


# Several that ask --------------------------------------------------------------------------------


def test_a_body_may_ask_for_more_and_the_loop_still_settles_its_own(run: Run) -> None:
    async def main() -> None:
        async with simplebus.MemoryBus() as bus, bus.subscribe(1) as messages:
            await bus.publish_many(NUMBERED, class_id=1)
            pairs = []
            async for message in messages:
                pairs.append((message.payload, (await messages.get()).payload))
                assert (await acked(bus))[0] == 2 * (len(pairs) - 1)
                if len(pairs) == 2:
                    break
            assert pairs == [(b"0", b"1"), (b"2", b"3")]
            with anyio.move_on_after(0.01):
                await messages.get()
            assert await acked(bus) == (4, 0)

    run(main)


def test_a_body_that_asked_for_more_and_failed_gets_its_own_again(run: Run) -> None:
    async def main() -> None:
        async with simplebus.MemoryBus() as bus, bus.subscribe(1) as messages:
            await bus.publish_many(NUMBERED, class_id=1)
            with suppress(ZeroDivisionError):
                async for _ in messages:
                    assert (await messages.get()).payload == b"1"
                    raise ZeroDivisionError
            assert (await messages.get()).payload == b"2"
            assert await acked(bus) == (1, 1)

    run(main)


def test_loops_within_loops_settle_what_is_theirs(run: Run) -> None:
    async def main() -> None:
        async with simplebus.MemoryBus() as bus, bus.subscribe(1) as messages:
            await bus.publish_many(NUMBERED, class_id=1)
            async for outer in messages:
                with anyio.CancelScope() as scope:
                    async for inner in messages.messages():
                        if inner.payload == b"2":
                            scope.cancel()
                            await anyio.sleep_forever()
                assert await acked(bus) == (1, 0)
                assert outer.payload == b"0"
                break
            assert await acked(bus) == (2, 0)
            assert [message.payload for message in await messages.take(9)] == NUMBERED[2:]

    run(main)


def test_what_one_by_one_was_asked_for_is_processed_when_a_loop_asks(run: Run) -> None:
    async def main() -> None:
        async with simplebus.MemoryBus() as bus, bus.subscribe(1) as messages:
            await bus.publish_many(NUMBERED, class_id=1)
            assert (await messages.get()).payload == b"0"
            assert (await anext(messages)).payload == b"1"
            assert (await anext(messages.messages())).payload == b"2"
            assert [m.payload for m in await anext(messages.batches())] == [b"3"]
            assert await acked(bus) == (3, 0)

    run(main)


def test_values_and_messages_take_turns_and_are_what_they_say(run: Run) -> None:
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
            assert await acked(bus) == (16, 0)

    run(main)


# Without an event loop ---------------------------------------------------------------------------


def wrapped_blocking(messages: BlockingRawSubscription) -> Iterator[bytes]:
    for message in messages:
        yield message.payload


def test_without_a_loop_of_events_it_is_the_same(server: BusServer) -> None:
    def said() -> tuple[int, int]:
        bus.flush()
        return bus.statistics().acknowledged, bus.statistics().nacked

    def first(messages: BlockingRawSubscription) -> bytes:
        for message in messages:
            return message.payload
        raise AssertionError

    with simplebus.connect_blocking(server.address) as bus:
        with bus.subscribe(1) as messages:
            bus.publish_many([b"%d" % number for number in range(10)], class_id=1)
            for message in messages:
                assert message.payload == b"0"
                break
            assert said() == (1, 0)
            assert first(messages) == b"1"
            for batch in messages.batches():
                assert batch.payloads[0] == b"2"
                taken = 2 + len(batch)
                break
            assert said() == (taken, 0)
            bus.publish_many([b"a", b"b", b"c", b"d", b"e", b"f"], class_id=1)
            while messages.get().payload != b"a":
                taken += 1
            taken += 1
            with suppress(ZeroDivisionError):
                for message in messages.messages():
                    assert message.payload == b"b"
                    raise ZeroDivisionError
            assert said() == (taken, 1)
            for payload in wrapped_blocking(messages):
                assert payload == b"c"
                break
            assert said() == (taken, 2)
            loop = iter(messages)
            assert next(loop).payload == b"d"
            assert next(messages).payload == b"e"
            assert said() == (taken, 2)
            assert next(loop).payload == b"f"
            assert said() == (taken + 2, 2)
        bus.flush()
        assert said() == (taken + 2, 3)
