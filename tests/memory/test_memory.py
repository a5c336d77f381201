"""Tests of `MemoryBus`: handlers, drain, clocks and reconnects."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import partial

import anyio
import pytest
import trio
from trio.testing import MockClock

from simplebus import Bus, BusConnectionError, Message, RefusedError, Registry, UnboundTypeError
from simplebus.core.errors import Reason
from simplebus.core.settings import Settings
from simplebus.memory.bus import MemoryBus
from tests.memory.conftest import Run

registry = Registry()


@registry.message(class_id=1)
@dataclass(frozen=True)
class ShopOpened:
    """A shop was opened."""

    shop: str


@registry.message(class_id=2)
@dataclass(frozen=True)
class ShopClosed:
    """A shop was closed."""

    shop: str


@dataclass(frozen=True)
class ShopReopened(ShopOpened):
    """Subclass of a registered type, itself not registered."""


@pytest.fixture
def memory() -> MemoryBus:
    return MemoryBus(registry=registry)


# Behaviour for programs ---------------------------------------------------------------------------


def test_leaving_handles_published_messages(run: Run, memory: MemoryBus) -> None:
    received: list[ShopOpened] = []

    async def main() -> None:
        async with memory as bus:
            assert isinstance(bus, Bus)
            bus.handle(ShopOpened, received.append)
            await bus.publish(ShopOpened("Ada's"))
            await bus.publish(ShopOpened("Bob's"), confirm=False)
            bus.publish_nowait(ShopOpened("Eve's"))

    run(main)
    assert received == [ShopOpened("Ada's"), ShopOpened("Bob's"), ShopOpened("Eve's")]


def test_typed_handler_receives_only_its_type(run: Run, memory: MemoryBus) -> None:
    opened: list[ShopOpened] = []
    closed: list[ShopClosed] = []

    async def main() -> None:
        async with memory as bus:
            bus.handle(ShopOpened, opened.append)
            bus.handle(ShopClosed, closed.append)
            await bus.publish_many([ShopOpened("Ada's"), ShopClosed("Bob's")])
            with pytest.raises(UnboundTypeError, match="ShopReopened"):
                await bus.publish(ShopReopened("Eve's"))  # A subclass counts as a different type.
            with pytest.raises(UnboundTypeError):
                await bus.publish("text means nothing by itself")

    run(main)
    assert (opened, closed) == ([ShopOpened("Ada's")], [ShopClosed("Bob's")])


@pytest.mark.parametrize(
    ("binding", "received"),
    [
        ((), ["", "one", "two", "one.two", "one.two.three"]),
        (("#",), ["", "one", "two", "one.two", "one.two.three"]),
        (("one",), ["one"]),
        (("*.two",), ["one.two"]),
        (("*",), ["one", "two"]),
        (("one.#",), ["one", "one.two", "one.two.three"]),
        # A prefix that is longer than the channel does not match, as in RabbitMQ.
        (("one.two.#",), ["one.two", "one.two.three"]),
        (("one", "*.*.three"), ["one", "one.two.three"]),
    ],
)
def test_handler_receives_matching_channels(
    run: Run, memory: MemoryBus, binding: tuple[str, ...], received: list[str]
) -> None:
    channels: list[str] = []

    async def main() -> None:
        async with memory as bus:
            bus.handle(ShopOpened, lambda value: channels.append(value.shop), *binding)
            for channel in "", "one", "two", "one.two", "one.two.three":
                await bus.publish(ShopOpened(channel), channel=channel)
            await bus.publish(ShopClosed("one"), channel="one")

    run(main)
    assert channels == received


def test_invalid_wildcards_raise(run: Run, memory: MemoryBus) -> None:
    async def main() -> None:
        async with memory as bus:
            with pytest.raises(ValueError, match="#"):
                bus.handle(ShopOpened, print, "a.#.c")
            for channel in "a.*", "#", "a..b", ".":
                with pytest.raises(ValueError, match="channel"):
                    await bus.publish(ShopOpened(""), channel=channel)

    run(main)


def test_only_the_first_subscription_receives_stored_messages(run: Run, memory: MemoryBus) -> None:
    first: list[ShopOpened] = []
    second: list[ShopOpened] = []

    async def main() -> None:
        async with memory as bus:
            await bus.publish(ShopOpened("early"))
            bus.handle(ShopOpened, first.append)
            await bus.drain()
            bus.handle(ShopOpened, second.append)
            await bus.publish(ShopOpened("late"))

    run(main)
    assert (first, second) == ([ShopOpened("early"), ShopOpened("late")], [ShopOpened("late")])


def test_handlers_of_a_group_share_messages(run: Run, memory: MemoryBus) -> None:
    """Each handler gets messages in order; the order among handlers is undefined."""
    received: dict[str, list[ShopOpened]] = {name: [] for name in ("a", "b", "one", "other")}
    shops = [ShopOpened(f"shop {number}") for number in range(20)]

    async def main() -> None:
        async with memory as bus:
            bus.handle(ShopOpened, received["a"].append)
            bus.handle(ShopOpened, received["b"].append)
            bus.handle(ShopOpened, received["one"].append, group="workers")
            bus.handle(ShopOpened, received["other"].append, group="workers")
            await bus.publish_many(shops)

    run(main)
    assert received["a"] == received["b"] == shops
    assert sorted(received["one"] + received["other"], key=shops.index) == shops


def test_several_clients_share_the_bus(run: Run, memory: MemoryBus) -> None:
    async def main() -> None:
        async with memory as first_client, memory.connect(name="other") as second_client:
            async with second_client.subscribe(ShopOpened) as shops:
                await first_client.publish(ShopOpened("Ada's"))
                assert await anext(shops) == ShopOpened("Ada's")
            assert memory.statistics().sessions == 2

    run(main)


def test_can_be_entered_again_and_keeps_messages(run: Run, memory: MemoryBus) -> None:
    async def main() -> None:
        async with memory as bus:
            await bus.publish(ShopOpened("Ada's"))
            with pytest.raises(RuntimeError, match="call `connect` for another client"):
                await memory.__aenter__()
        async with memory as bus, bus.subscribe(ShopOpened, durable="commit_log") as shops:
            assert await anext(shops) == ShopOpened("Ada's")

    run(main)


def test_can_be_entered_in_another_event_loop() -> None:
    memory = MemoryBus()

    async def publish() -> None:
        async with memory as bus:
            await bus.publish(b"from trio", class_id=1, expires=3600)

    async def consume() -> None:
        async with memory as bus, bus.subscribe(1) as messages:
            assert (await messages.get(5)).payload == b"from trio"

    trio.run(publish)
    anyio.run(consume, backend="asyncio")


def test_use_in_two_event_loops_raises() -> None:
    memory = MemoryBus()

    async def intrude() -> None:
        async with memory.connect():
            pass

    async def main() -> None:
        async with memory:
            with pytest.raises(RuntimeError, match="one event loop at a time"):
                await anyio.to_thread.run_sync(lambda: anyio.run(intrude, backend="asyncio"))

    trio.run(main)


# Leaving -----------------------------------------------------------------------------------------


def test_leaving_waits_for_what_handlers_publish_meanwhile(run: Run) -> None:
    counts = [0] * 7

    async def main() -> None:
        async with MemoryBus() as bus:

            async def handler(message: Message[bytes]) -> None:
                counts[message.class_id] += 1
                await anyio.lowlevel.checkpoint()
                if message.class_id < 6:
                    for _ in range(2):
                        await bus.publish(b"", class_id=message.class_id + 1, confirm=False)

            for class_id in range(7):
                bus.handle(class_id, handler)
            await bus.publish(b"", class_id=0)

    run(main)
    assert counts == [1, 2, 4, 8, 16, 32, 64]


def test_leaving_waits_for_handlers(run: Run) -> None:
    handled: list[bytes] = []

    async def main() -> None:
        async with MemoryBus() as bus:

            async def handler(message: Message[bytes]) -> None:
                await anyio.sleep(0.05)
                handled.append(message.payload)

            await bus.publish_many([b"1", b"2", b"3"], class_id="by name")
            bus.handle("by name", handler, max_in_flight=1)

    run(main)
    assert handled == [b"1", b"2", b"3"]


def test_leaving_does_not_wait_for_backoff_or_delay() -> None:
    calls: list[bytes] = []

    def handler(message: Message[bytes]) -> None:
        calls.append(message.payload)
        if message.payload == b"bad":
            raise ValueError("as always")

    async def main() -> None:
        with pytest.raises(ExceptionGroup, match="handlers failed 1 time") as caught:  # noqa: PT012
            async with MemoryBus() as bus:
                bus.handle(1, handler)
                await bus.publish(b"bad", class_id=1)
                await bus.publish(b"later", class_id=1, delay=60)
                await bus.publish(b"good", class_id=1)
        assert caught.group_contains(ValueError, match="as always")
        assert trio.current_time() == 0.0

    trio.run(main, clock=MockClock(autojump_threshold=0))
    assert calls == [b"bad", b"good"]


def test_error_of_a_handler_does_not_stop_the_bus(run: Run) -> None:
    received: list[bytes] = []

    def fail(message: Message[bytes]) -> None:
        raise ValueError(message.payload)

    async def main() -> None:
        with pytest.raises(ExceptionGroup, match="handlers failed 3 times") as caught:  # noqa: PT012
            async with MemoryBus() as bus:
                bus.handle(1, fail)
                bus.handle(1, lambda message: received.append(message.payload))
                await bus.publish_many([b"1", b"2", b"3"], class_id=1)
        assert [error.args for error in caught.value.exceptions] == [(b"1",), (b"2",), (b"3",)]

    run(main)
    assert received == [b"1", b"2", b"3"]


def test_raise_errors_false_only_logs(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    def fail(message: Message[bytes]) -> None:
        raise ValueError("not today")

    async def main() -> None:
        async with MemoryBus(raise_errors=False) as bus:
            bus.handle(1, fail)
            await bus.publish(b"", class_id=1)

    with caplog.at_level(logging.ERROR, "simplebus.client"):
        run(main)
    assert [str(record.exc_info[1]) for record in caplog.records if record.exc_info] == [
        "not today"
    ]


def test_error_of_the_block_is_raised_unwrapped(run: Run) -> None:
    async def main() -> None:
        with pytest.raises(KeyError, match="mine"):  # noqa: PT012
            async with MemoryBus() as bus:
                bus.handle(1, lambda message: None)
                await bus.publish(b"", class_id=1)
                raise KeyError("mine")

    run(main)


def test_leaving_waits_for_a_reconnect(run: Run) -> None:
    received: list[bytes] = []

    async def main() -> None:
        memory = MemoryBus()
        async with memory as bus:
            bus.handle(1, lambda message: received.append(message.payload))
            await bus.publish_many([b"1", b"2"], class_id=1)
            memory.hang_up()
            await bus.publish(b"3", class_id=1)
            memory.hang_up()

    run(main)
    assert list(dict.fromkeys(received)) == [b"1", b"2", b"3"]


def test_refused_handler_subscription_raises(run: Run) -> None:
    async def main() -> None:
        memory = MemoryBus()
        with pytest.raises(ExceptionGroup, match="handlers failed 1 time") as caught:  # noqa: PT012
            async with (
                memory as bus,
                memory.connect() as second_client,
                second_client.subscribe(1, durable="commit_log"),
            ):
                bus.handle(1, print, durable="commit_log")
                await anyio.sleep(0.01)
        assert caught.group_contains(RefusedError, match="durable_in_use")

    run(main)


def test_hanging_handler_can_be_cancelled(run: Run) -> None:
    async def main() -> None:
        memory = MemoryBus()
        with anyio.move_on_after(0.1) as scope:
            async with memory as bus:
                bus.handle(1, lambda message: anyio.sleep_forever())
                await bus.publish(b"kept", class_id=1)
        assert scope.cancelled_caught
        async with memory as bus, bus.subscribe(1) as messages:
            assert (await messages.get(1)).payload == b"kept"

    run(main)


def test_consumer_outside_the_block_gets_an_error(run: Run) -> None:
    async def main() -> None:
        received: list[BaseException] = []

        async def consume(bus: Bus) -> None:
            try:
                async with bus.subscribe(1) as messages:
                    await messages.get()
            except BusConnectionError as error:
                received.append(error)

        async with anyio.create_task_group() as tasks, MemoryBus() as bus:
            tasks.start_soon(consume, bus)
            await anyio.sleep(0.01)
        assert len(received) == 1

    run(main)


# Time --------------------------------------------------------------------------------------------


def test_redelivery_uses_the_clock_of_the_event_loop() -> None:
    times: list[tuple[float, int]] = []

    def handler(message: Message[bytes]) -> None:
        times.append((trio.current_time(), message.attempt))
        if message.attempt < 4:
            raise ValueError("again")

    async def main() -> None:
        async with MemoryBus(raise_errors=False) as bus:
            bus.handle(1, handler)
            await bus.publish(b"", class_id=1)
            await trio.sleep(3600)

    trio.run(main, clock=MockClock(autojump_threshold=0))
    assert times == [(0.0, 1), (6.0, 2), (18.0, 3), (42.0, 4)]


def test_long_handler_call_is_not_repeated() -> None:
    async def main() -> None:
        called: list[tuple[int, bytes]] = []

        async def handler(handler_number: int, message: Message[bytes]) -> None:
            called.append((handler_number, message.payload))
            await trio.sleep(3 + 10 * handler_number)

        async with MemoryBus() as bus:
            bus.handle(1, partial(handler, 0))
            bus.handle(1, partial(handler, 1), concurrency=3)
            async with bus.subscribe(1, auto_ack=False) as by_hand:
                await bus.publish_many([b"%d" % number for number in range(6)], class_id=1)
                for _ in range(6):
                    message = await by_hand.get()
                    called.append((2, message.payload))
                    await trio.sleep(10)
                    message.ack()
                assert await by_hand.take(1, timeout=120) == []
        for handler_number in range(3):
            assert [
                payload for first_client, payload in called if first_client == handler_number
            ] == [b"%d" % number for number in range(6)]

    trio.run(main, clock=MockClock(autojump_threshold=0))


def test_handled_message_is_not_repeated_after_reconnect(run: Run) -> None:
    async def main() -> None:
        memory = MemoryBus()
        called: list[bytes] = []

        async def handler(message: Message[bytes]) -> None:
            called.append(message.payload)
            if len(called) == 50:
                memory.hang_up()
                await anyio.sleep(0.2)
            if len(called) == 100:
                handled.set()

        handled = anyio.Event()
        async with memory as bus:
            bus.handle(1, handler)
            await bus.publish_many([b"%d" % number for number in range(100)], class_id=1)
            await handled.wait()
        assert called == [b"%d" % number for number in range(100)]

    run(main)


def test_drops_message_after_max_deliveries() -> None:
    calls: list[int] = []

    def handler(message: Message[bytes]) -> None:
        calls.append(message.attempt)
        raise ValueError("always")

    async def main() -> None:
        memory = MemoryBus(raise_errors=False)
        async with memory as bus:
            bus.handle(1, handler, max_deliveries=3)
            await bus.publish(b"", class_id=1)
            await trio.sleep(3600)
            assert memory.statistics().classes[0].dropped == {Reason.MAX_DELIVERIES: 1}

    trio.run(main, clock=MockClock(autojump_threshold=0))
    assert calls == [1, 2, 3]


def test_delay_and_expiry_use_the_clock_of_the_event_loop() -> None:
    times: list[tuple[bytes, float]] = []

    async def main() -> None:
        memory = MemoryBus()
        async with memory as bus:
            await bus.publish(b"expired", class_id=1, expires=3599.9)
            await bus.publish(b"in time", class_id=1, expires=3600.1)
            await bus.publish(b"never", class_id=1, expires=0)
            await trio.sleep(3600)
            bus.handle(1, lambda message: times.append((message.payload, trio.current_time())))
            await bus.publish(b"later", class_id=1, delay=600)
            await trio.sleep(601)
            # The drop is counted.
            assert memory.statistics().classes[0].dropped == {Reason.EXPIRED: 2}

    trio.run(main, clock=MockClock(autojump_threshold=0))
    assert times == [(b"in time", 3600.0), (b"later", pytest.approx(4200.0))]


def test_expiry_is_checked_at_delivery() -> None:
    """Messages that the client has buffered do not expire; `max_in_flight` bounds them."""

    async def main() -> None:
        for in_flight, expected in (1, [b"slow"]), (None, [b"slow", b"quick"]):
            received: list[bytes] = []

            async def handler(message: Message[bytes], received: list[bytes] = received) -> None:
                received.append(message.payload)
                await trio.sleep(2)

            async with MemoryBus() as bus:
                bus.handle(1, handler, max_in_flight=in_flight)
                await bus.publish(b"slow", class_id=1)
                await bus.publish(b"quick", class_id=1, expires=1)
            assert received == expected

    trio.run(main, clock=MockClock(autojump_threshold=0))


def test_ack_timer_follows_a_clock_that_jumps() -> None:
    clock = MockClock()

    async def main() -> None:
        async with MemoryBus() as bus, bus.subscribe(1, auto_ack=False) as messages:
            await bus.publish(b"", class_id=1)
            assert (await messages.get()).attempt == 1
            clock.jump(30)
            message = await messages.get()
            assert message.attempt == 2
            message.ack()

    trio.run(main, clock=clock)


def test_tick_works_without_a_mock_clock(run: Run) -> None:
    memory = MemoryBus(Settings(ack_timeout=1, tick_seconds=86_400))

    async def main() -> None:
        async with memory as bus, bus.subscribe(1, auto_ack=False) as messages:
            await bus.publish(b"", class_id=1)
            for attempt in 1, 2:
                assert (await messages.get()).attempt == attempt
                memory.tick()

    run(main)


# The engine --------------------------------------------------------------------------------------


def test_removes_all_state_of_a_left_client(run: Run) -> None:
    async def main() -> None:
        memory = MemoryBus()
        for _ in range(3):
            async with memory.connect() as bus, bus.subscribe(1) as messages:
                await bus.publish(b"", class_id=1)
                await messages.get()
        statistics = memory.statistics()
        assert (statistics.sessions, statistics.in_flight) == (0, 0)
        assert (statistics.published, statistics.acknowledged) == (3, 3)
        assert statistics.classes[0].ring.message_count == 0

    run(main)


def test_protocol_violation_disconnects_with_the_reason(run: Run) -> None:
    async def main() -> None:
        with pytest.raises(BusConnectionError, match="memory has ended: unknown_type"):  # noqa: PT012
            async with MemoryBus() as bus:
                link = bus.connection.writer.transport
                assert link is not None
                link.send(memoryview(b"\xff" * 20 + b"<\r\n>"))
                await bus.publish(b"", class_id=1)

    run(main)
