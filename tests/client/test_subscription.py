"""Tests of subscriptions with every driver: values, get, take, groups, cancellation."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AsyncExitStack

import anyio
import anyio.lowlevel
import msgspec
import pytest

import simplebus
from simplebus import DecodeError, LocalProtocolError, RefusedError
from simplebus.client.aio.bus import Bus
from simplebus.client.aio.subscription import BaseSubscription
from simplebus.core.protocol import frames
from tests.client.bus_server import BusServer, read_until_count, until
from tests.client.conftest import Run
from tests.client.faulty_server import fake_server, refuse

NUMBERED = [b"message %d" % number for number in range(100)]
registry = simplebus.Registry()


@registry.message(class_id=5)
class Counted(msgspec.Struct):
    number: int


@registry.message(name="tests.named-only")
class Named(msgspec.Struct):
    name: str


@registry.message(class_id=6, name="tests.both")
class Both(msgspec.Struct):
    name: str


# Values ------------------------------------------------------------------------------------------


def test_subscription_to_a_type_yields_values(run: Run, server: BusServer) -> None:
    async def main() -> None:
        async with simplebus.connect(server.address, registry=registry) as bus:
            for kind in (Counted, Named, Both):
                values = [kind(number if kind is Counted else str(number)) for number in range(50)]
                async with bus.subscribe(kind) as messages:
                    await bus.publish_many(values)
                    for value in values:
                        await bus.publish(value, confirm=False)
                    assert [await anext(messages) for _ in range(100)] == values * 2
            await bus.publish_many([Counted(1), Named("a"), Named("b"), Both("c")])
            assert [m.value for m in await bus.fetch(Named)] == [Named("a"), Named("b")]

    run(main)
    with simplebus.connect_blocking(server.address, registry=registry) as bus:
        for kind in (Counted, Named, Both):
            values = [kind(number if kind is Counted else str(number)) for number in range(50)]
            with bus.subscribe(kind, start="new", idle_seconds=0.1) as messages:
                bus.publish_many(values)
                bus.publish(values[0])
                assert read_until_count(messages, 51) == [*values, values[0]]


def test_messages_of_a_type_have_values(run: Run, server: BusServer) -> None:
    async def main() -> None:
        async with (
            simplebus.connect(server.address, registry=registry) as bus,
            bus.subscribe(Counted, "a.*") as counted,
        ):
            await bus.publish(Counted(1), channel="a.b")
            await bus.publish(Counted(2), channel="b.a")
            await bus.publish(Counted(3), channel="a.c")
            async for message in counted.messages():
                assert (message.value, message.channel) == (Counted(1), "a.b")
                break
            assert (await counted.get()).value == Counted(3)

    run(main)


def test_subscribing_to_an_unbound_type_raises(run: Run, shared_server: BusServer) -> None:
    class Unbound(msgspec.Struct):
        number: int

    async def main() -> None:
        async with simplebus.connect(shared_server.address) as bus:
            with pytest.raises(simplebus.UnboundTypeError, match="bind it once"):
                await bus.publish(Unbound(1))
            with pytest.raises(simplebus.UnboundTypeError, match="publish it with its class"):
                await bus.publish(b"raw")
            with pytest.raises(simplebus.UnboundTypeError, match="bind it once"):
                bus.subscribe(Unbound)

    run(main)


def test_undecodable_message_is_rejected_and_the_loop_continues(
    run: Run, clockless_server: BusServer
) -> None:
    async def main() -> None:
        async with (
            simplebus.connect(clockless_server.address, registry=registry) as bus,
            bus.subscribe(Counted) as counted,
        ):
            await bus.publish(Counted(1))
            await bus.publish(b"no JSON", class_id=5)
            await bus.publish(Counted(2))
            loop = aiter(counted)
            assert await anext(loop) == Counted(1)
            with pytest.raises(DecodeError) as caught:
                await anext(loop)
            assert vars(caught.value)["message"].payload == b"no JSON"
            assert await anext(loop) == Counted(2)
            with anyio.move_on_after(0.01):
                await anext(loop)
            await bus.drain()
            assert clockless_server.statistics(5).acknowledged == 2
            clockless_server.tick(2)
            with pytest.raises(DecodeError) as caught:
                await anext(counted)
            assert vars(caught.value)["message"].attempt == 2

    run(main)


def test_blocking_loop_rejects_undecodable_message(clockless_server: BusServer) -> None:
    with (
        simplebus.connect_blocking(clockless_server.address, registry=registry) as bus,
        bus.subscribe(Counted, idle_seconds=0.05) as counted,
    ):
        bus.publish(Counted(1))
        bus.publish(b"no JSON", class_id=5)
        bus.publish(Counted(2))
        with pytest.raises(DecodeError) as caught:
            read_until_count(counted, 3)
        assert vars(caught.value)["message"].payload == b"no JSON"
        assert read_until_count(counted, 1) == [Counted(2)]
        bus.drain()
        assert clockless_server.statistics(5).acknowledged == 2


# Single messages and batches ---------------------------------------------------------------------


def test_get_acknowledges_the_previous_message(run: Run, server: BusServer) -> None:
    async def main() -> None:
        async with simplebus.connect(server.address) as bus, bus.subscribe(1) as messages:
            await bus.publish_many(NUMBERED, class_id=1)
            for payload in NUMBERED:
                assert (await messages.get(timeout=60)).payload == payload
            with pytest.raises(TimeoutError, match=r"no message of class 1 within 0\.01 s"):
                await messages.get(timeout=0.01)
            with pytest.raises(TimeoutError):
                await messages.get(timeout=0)
            await bus.publish(b"last", class_id=1)
            assert (await messages.get()).payload == b"last"

    run(main)
    assert server.statistics().acknowledged == 101


def test_take_acknowledges_the_previous_messages(run: Run, server: BusServer) -> None:
    async def main() -> None:
        async with simplebus.connect(server.address) as bus, bus.subscribe(1) as messages:
            assert await messages.take(10, timeout=0.01) == []
            await bus.publish_many(NUMBERED, class_id=1)
            received: list[bytes] = []
            while len(received) < 100:
                batch = await messages.take(30)
                assert 1 <= len(batch) <= 30
                received += [message.payload for message in batch]
                acked_count = len(received) - len(batch)  # Acknowledged soon, without another call.
                await anyio.to_thread.run_sync(
                    until,
                    lambda acked_count=acked_count: server.statistics().acknowledged == acked_count,
                )
            assert received == NUMBERED
            with pytest.raises(ValueError, match="1 message or more, got 0"):
                await messages.take(0)

    run(main)
    assert server.statistics().acknowledged == 100
    with simplebus.connect_blocking(server.address) as bus, bus.subscribe(1) as messages:
        assert messages.take(10, timeout=0.01) == []
        bus.publish_many(NUMBERED, class_id=1)
        batch = messages.take(30)
        assert [m.payload for m in batch] == NUMBERED[: len(batch)]
        with pytest.raises(ValueError, match="1 message or more, got 0"):
            messages.take(0)


def test_several_tasks_share_a_subscription_with_manual_acks(run: Run, server: BusServer) -> None:
    async def main() -> None:
        received: list[bytes] = []

        async def work() -> None:
            while True:
                message = await messages.get()
                await anyio.lowlevel.checkpoint()
                received.append(message.payload)
                message.ack()

        async with (
            simplebus.connect(server.address) as bus,
            bus.subscribe(1, auto_ack=False) as messages,
            anyio.create_task_group() as tasks,
        ):
            for _ in range(5):
                tasks.start_soon(work)
            for payload in NUMBERED:
                await bus.publish(payload, class_id=1)
            await bus.publish_many(NUMBERED, class_id=1)
            await anyio.to_thread.run_sync(until, lambda: len(received) == 200)
            await bus.drain()
            assert server.statistics().acknowledged == 200
            assert sorted(received) == sorted(NUMBERED * 2)
            tasks.cancel_scope.cancel()

    run(main)


def test_manual_nack_and_working(run: Run, clockless_server: BusServer) -> None:
    async def main() -> None:
        async with simplebus.connect(clockless_server.address) as bus, bus.subscribe(1) as messages:
            await bus.publish_many(NUMBERED[:3], class_id=1)
            first = await anext(messages)
            first.nack(0)
            second = await anext(messages)
            second.working()
            assert second.payload == NUMBERED[1]
            received = [(await anext(messages)).payload for _ in range(2)]
            assert sorted(received) == [NUMBERED[0], NUMBERED[2]]
        assert clockless_server.statistics().redelivered == 1

    run(main)


# Requests to the server ---------------------------------------------------------------------------


def test_group_shares_messages_and_durable_keeps_its_position(run: Run, server: BusServer) -> None:
    async def main() -> None:
        async with simplebus.connect(server.address) as bus, AsyncExitStack() as stack:
            members = [
                await stack.enter_async_context(bus.subscribe(1, group="g", max_in_flight=10))
                for _ in range(3)
            ]
            await bus.publish_many(NUMBERED, class_id=1)
            received: list[bytes] = []
            while len(received) < 100:
                for member in members:
                    received += [message.payload for message in await member.take(10, timeout=0.02)]
            assert sorted(received) == sorted(NUMBERED)

        async with simplebus.connect(server.address) as bus:
            async with bus.subscribe(2, durable="d"):
                pass
            await bus.publish(b"while disconnected", class_id=2)
            async with bus.subscribe(2, durable="d") as messages:
                assert (await anext(messages)).payload == b"while disconnected"
                messages.forget()
            await bus.publish(b"while it was forgotten", class_id=2)
            async with bus.subscribe(2, durable="d", start="new") as messages:
                assert await messages.take(1, timeout=0.05) == []

    run(main)


def test_refused_subscription_raises_on_enter(run: Run) -> None:
    def answer(kind: int, class_id: int, number: int, *_: object) -> bytes:
        return refuse(kind, number, "durable_in_use") if kind == frames.SUBSCRIBE else b""

    async def main() -> None:
        async with simplebus.connect(bus_.address) as bus:
            with pytest.raises(RefusedError, match="durable_in_use: not today"):
                async with bus.subscribe(1, durable="d"):
                    pytest.fail("it was refused")
            await bus.publish(b"goes on", class_id=1)

    with fake_server(answer) as bus_:
        run(main)
        with simplebus.connect_blocking(bus_.address) as bus:
            with pytest.raises(RefusedError), bus.subscribe(1, durable="d"):
                pytest.fail("it was refused")
            bus.publish(b"goes on", class_id=1)


def test_explain_and_fetch_through_the_bus(run: Run, server: BusServer) -> None:
    async def main() -> None:
        async with (
            simplebus.connect(server.address, registry=registry) as bus,
            bus.subscribe(Counted, auto_ack=False),
        ):
            await bus.publish_many([Counted(number) for number in range(100)])
            found = await bus.fetch(Counted)
            assert [message.value.number for message in found] == list(range(100))
            found = await bus.fetch(Counted, first=40, count=5)
            assert [message.sequence for message in found] == list(range(40, 45))
            assert await bus.fetch(Counted, first=100) == []
            assert await bus.fetch(Counted, count=0) == []
            with pytest.raises(LocalProtocolError):
                found[0].ack()
            with simplebus.connect_blocking(server.address) as blocking:
                assert len(blocking.fetch(5, 10, 20)) == 20

    run(main)


# Cancellation ------------------------------------------------------------------------------------

Loop = Callable[[BaseSubscription[bytes], list[bytes]], object]


async def consume_messages(messages: BaseSubscription[bytes], payloads: list[bytes]) -> None:
    async for message in messages.messages():
        await anyio.lowlevel.checkpoint()
        payloads.append(message.payload)
        if len(payloads) % 7 == 0:
            await anyio.lowlevel.checkpoint_if_cancelled()


async def consume_batches(messages: BaseSubscription[bytes], payloads: list[bytes]) -> None:
    async for batch in messages.batches():
        await anyio.lowlevel.checkpoint()
        payloads += batch.payloads


@pytest.mark.parametrize("loop", [consume_messages, consume_batches])
def test_cancelling_anywhere_loses_and_acknowledges_nothing(
    run: Run, clockless_server: BusServer, loop: Loop
) -> None:
    """The consumer is cancelled after each number of event loop steps up to some dozens."""

    async def feed(bus: Bus) -> None:
        for payload in NUMBERED:
            await bus.publish(payload, class_id=1, confirm=False)
            await anyio.sleep(0.001)

    async def main() -> None:
        handled: list[bytes] = []
        async with (
            simplebus.connect(clockless_server.address) as bus,
            bus.subscribe(1) as messages,
            anyio.create_task_group() as tasks,
        ):
            tasks.start_soon(feed, bus)
            steps = 0
            while len(handled) < len(NUMBERED):
                steps += 1
                async with anyio.create_task_group() as trial:
                    trial.start_soon(loop, messages, handled)  # type: ignore[arg-type]
                    for _ in range(steps % 40):
                        await anyio.lowlevel.checkpoint()
                    await anyio.sleep(0.0005)
                    trial.cancel_scope.cancel()
                processed = len(handled)
                await bus.connection.flush()
                assert clockless_server.statistics().acknowledged <= processed
        assert handled == NUMBERED
        assert steps > 1

    run(main)
    until(lambda: clockless_server.statistics().acknowledged == 100)
    assert clockless_server.statistics().redelivered == 0


def test_cancelling_get_loses_nothing(run: Run, clockless_server: BusServer) -> None:
    async def main() -> None:
        received: list[bytes] = []
        async with (
            simplebus.connect(clockless_server.address) as bus,
            bus.subscribe(1) as messages,
        ):
            await bus.publish_many(NUMBERED[:50], class_id=1, confirm=False)
            steps = 0
            while len(received) < 50:
                steps += 1
                with anyio.CancelScope() as scope:
                    if steps % 2:
                        scope.cancel()
                    received.append((await messages.get()).payload)
            assert received == NUMBERED[:50]

    run(main)
    until(lambda: clockless_server.statistics().acknowledged == 50)


@pytest.mark.parametrize("wait", ["get", "take", "__anext__"])
def test_waiting_task_raises_when_another_leaves_the_subscription(
    run: Run, shared_server: BusServer, wait: str
) -> None:
    async def main() -> None:
        async with simplebus.connect(shared_server.address) as bus:
            messages = bus.subscribe(83)
            await messages.__aenter__()

            async def waiter() -> None:
                with pytest.raises(LocalProtocolError, match="was closed"):
                    await getattr(messages, wait)(*([1] if wait == "take" else []))

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(waiter)
                await anyio.wait_all_tasks_blocked()
                await messages.__aexit__(None, None, None)

    run(main)
