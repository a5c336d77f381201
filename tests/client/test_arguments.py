"""Tests of wrong arguments: each error names the argument, the value and the expectation."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from datetime import timedelta
from typing import Any

import msgspec
import pytest

import simplebus
from simplebus import DecodeError, MemoryBus
from tests.client.bus_server import BusServer
from tests.client.conftest import Run

registry = simplebus.Registry()


@registry.message(class_id=1)
class Item(msgspec.Struct):
    number: int


async def async_handler() -> None:
    """Async handler, which needs an event loop."""


async def async_generator_handler(message: object) -> AsyncIterator[object]:
    yield message


def generator_handler(message: object) -> Iterator[object]:
    yield message


Call = Callable[[Any], Any]

WRONG: list[tuple[Call, type[Exception], str]] = [
    (lambda bus: bus.publish(b"x", class_id=1.0), TypeError, r"a class id or class name, got 1\.0"),
    (
        lambda bus: bus.publish(b"x", class_id=Item),
        TypeError,
        "a class id or class name, got <class",
    ),
    (lambda bus: bus.publish(b"x", class_id=1, channel=5), TypeError, "channel must be text, .* 5"),
    (lambda bus: bus.publish(b"x", class_id=1, key="a"), TypeError, "key must be bytes, got 'a'"),
    (lambda bus: bus.publish(b"x", class_id=1, key=5), TypeError, "key must be bytes, got 5"),
    (lambda bus: bus.publish(b"x", class_id=1, headers=["abc"]), TypeError, "headers .*'abc'"),
    (lambda bus: bus.publish(b"x", class_id=1, headers="ab"), TypeError, "headers .*'ab'"),
    (lambda bus: bus.publish(b"x", class_id=1, headers=5), TypeError, "headers .*5"),
    (
        lambda bus: bus.publish(b"x", class_id=1, expires=timedelta(1)),
        TypeError,
        r"expires must be seconds, got datetime\.timedelta",
    ),
    (lambda bus: bus.publish(b"x", class_id=1, delay="1"), TypeError, "delay must be seconds.*'1'"),
    (lambda bus: bus.publish(b"x", class_id=1, delay=-1), ValueError, "delay .* from 0 on, got -1"),
    (lambda bus: bus.publish(b"x", class_id=1, expire=5), TypeError, "'expire'; .* expires"),
    (
        lambda bus: bus.publish_many([b"x"], class_id=1, chanel=""),
        TypeError,
        "'chanel'; .* channel",
    ),
    (lambda bus: bus.publish_nowait(b"x", class_id=1, zzz=5), TypeError, "'zzz'; expected one of"),
    (lambda bus: bus.subscribe(1, ["a", "b"]), TypeError, r"pattern .* text, got \['a', 'b'\]"),
    (lambda bus: bus.subscribe(1, 2), TypeError, "pattern .* text, got 2"),
    (lambda bus: bus.subscribe(1, durible="x"), TypeError, "unexpected keyword argument 'durible'"),
    (lambda bus: bus.subscribe(1, slow="drop_newest"), ValueError, "max_pending must be given"),
    (
        lambda bus: bus.subscribe(1, group="g", by_key="k"),
        TypeError,
        "by_key must be true or false, got 'k'",
    ),
    (lambda bus: bus.handle(1, None), TypeError, "handler must be a function, got None"),
    (
        lambda bus: bus.handle(1, async_generator_handler),
        TypeError,
        "async_generator_handler .* is a generator function",
    ),
    (
        lambda bus: bus.handle(1, generator_handler),
        TypeError,
        "generator_handler .* is a generator function",
    ),
    (lambda bus: bus.fetch(1, -1), ValueError, "first must be from 0 .* got -1"),
    (lambda bus: bus.fetch(1, 0, -1), ValueError, "count must be from 0 .* got -1"),
    (lambda bus: bus.fetch(1, "a"), TypeError, "first must be a whole number, got 'a'"),
    (lambda bus: bus.fetch(1, time=5), TypeError, "time must be a datetime, got 5"),
    (lambda bus: bus.request(b"x", class_id=1, timeout="a"), TypeError, "timeout must be seconds"),
    (lambda bus: bus.reply(None, b""), TypeError, "a reply is to a message, got None"),
]


@pytest.mark.parametrize(("call", "kind", "expected_error"), WRONG)
def test_wrong_argument_is_named_and_nothing_is_published(
    run: Run, shared_server: BusServer, call: Call, kind: type[Exception], expected_error: str
) -> None:
    async def main() -> None:
        async with MemoryBus() as bus:
            with pytest.raises(kind, match=expected_error):
                await call(bus)
            assert bus.statistics().published == 0

    run(main)
    with simplebus.connect_blocking(shared_server.address) as bus:
        with pytest.raises(kind, match=expected_error):
            call(bus)
        assert bus.statistics().published == 0


@pytest.mark.parametrize(
    ("options", "kind", "expected_error"),
    [
        ({"address": 5}, TypeError, "server address must be text, .* got 5"),
        ({"address": ["h:1", 5]}, TypeError, "server address must be text, .* got 5"),
        ({"address": b"h:1"}, TypeError, "server address must be text"),
        ({"name": 5}, TypeError, "name must be text, got 5"),
        ({"name": ""}, ValueError, "name must be of 1 to 200 characters"),
        ({"name": "x" * 201}, ValueError, "name must be of 1 to 200 characters"),
        ({"heartbeat": "1"}, TypeError, "heartbeat must be seconds, got '1'"),
        ({"heartbeat": 4000}, ValueError, "heartbeat must be seconds from 0 to 3600, got 4000"),
        ({"frame_bytes": 10}, ValueError, "frame_bytes must be from 512 to .* got 10"),
        ({"timeout": timedelta(1)}, TypeError, "timeout must be seconds, got datetime"),
        ({"timeout": -1}, ValueError, "timeout must be seconds from 0 on, got -1"),
        ({"reconnect": "x"}, TypeError, "reconnect must be seconds, got 'x'"),
    ],
)
def test_rejects_invalid_connect_arguments_before_connecting(
    run: Run, options: dict[str, Any], kind: type[Exception], expected_error: str
) -> None:
    options = {"address": "127.0.0.1:1", **options}

    async def main() -> None:
        async with simplebus.connect(**options):
            pytest.fail("there is no bus")

    with pytest.raises(kind, match=expected_error):
        run(main)
    with pytest.raises(kind, match=expected_error), simplebus.connect_blocking(**options):
        pytest.fail("there is no bus")


def test_timeouts_may_be_infinite(run: Run, shared_server: BusServer) -> None:
    for timeout in (float("inf"), 1e12):
        with (
            simplebus.connect_blocking(shared_server.address, timeout=timeout) as bus,
            bus.subscribe(86) as messages,
        ):
            bus.publish(b"x", class_id=86, delay=0.05)
            assert messages.get(timeout).payload == b"x"

        async def main(timeout: float = timeout) -> None:
            async with (
                simplebus.connect(shared_server.address, timeout=timeout) as bus,
                bus.subscribe(86) as messages,
            ):
                await bus.publish(b"x", class_id=86, delay=0.05)
                assert (await messages.get(timeout)).payload == b"x"

        run(main)


def test_timeouts_must_be_numbers(run: Run, shared_server: BusServer) -> None:
    async def main() -> None:
        async with MemoryBus() as bus, bus.subscribe(1) as messages:
            with pytest.raises(TypeError, match="timeout must be seconds, got 'x'"):
                await messages.get("x")  # type: ignore[arg-type]
            with pytest.raises(TypeError, match="timeout must be seconds, got 'x'"):
                await messages.take(1, "x")  # type: ignore[arg-type]
            await bus.publish(b"x", class_id=1)
            message = await messages.get()
            with pytest.raises(TypeError, match="delay must be seconds, got 'x'"):
                message.nack("x")  # type: ignore[arg-type]

    run(main)
    with simplebus.connect_blocking(shared_server.address) as bus, bus.subscribe(87) as messages:
        with pytest.raises(TypeError, match="timeout must be seconds, got 'x'"):
            messages.get("x")  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="timeout must be seconds, got 'x'"):
            messages.take(1, "x")  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="seconds must be seconds, got 'x'"):
            bus.run("x")  # type: ignore[arg-type]


def test_memory_bus_rejects_invalid_settings() -> None:
    with pytest.raises(TypeError, match="settings must be Settings, got 'x'"):
        MemoryBus("x")  # type: ignore[arg-type]


# Handlers and replies ----------------------------------------------------------------------------


def test_blocking_bus_rejects_async_handler(shared_server: BusServer) -> None:
    with (
        simplebus.connect_blocking(shared_server.address) as bus,
        pytest.raises(TypeError, match=r"async_handler .* is an async function"),
    ):
        bus.handle(1, async_handler)


@pytest.mark.parametrize(
    "handler", [lambda message: async_generator_handler(message), lambda m: generator_handler(m)]
)
def test_handler_that_returns_a_coroutine_or_generator_fails(
    run: Run, shared_server: BusServer, handler: Callable[[object], object]
) -> None:
    async def main() -> None:
        async with MemoryBus() as bus:
            bus.handle(1, handler)
            await bus.publish(b"x", class_id=1)
            await bus.drain()
            statistics = bus.statistics()
            assert (statistics.acknowledged, statistics.nacked) == (0, 1)

    with pytest.raises(ExceptionGroup) as caught:
        run(main)
    assert caught.group_contains(TypeError, match="which is never run")


def test_blocking_handler_that_returns_an_awaitable_fails(shared_server: BusServer) -> None:
    def block() -> None:
        with simplebus.connect_blocking(shared_server.address) as bus:
            bus.handle(88, lambda message: async_handler())
            bus.publish(b"x", class_id=88)
            bus.run(0.5)
            assert bus.statistics().acknowledged == 0

    with pytest.raises(ExceptionGroup) as caught:
        block()
    assert caught.group_contains(TypeError, match="which is never run")


def test_decode_error_of_a_reply_says_reply(run: Run, shared_server: BusServer) -> None:
    """The class of a reply is not the class of the expected type."""

    async def main() -> None:
        async with MemoryBus(registry=registry) as bus:
            bus.handle(2, lambda message: b"no JSON")
            with pytest.raises(
                DecodeError, match=r"^a reply cannot be decoded as .*Item by the json"
            ) as caught:
                await bus.request(b"x", class_id=2, as_=Item)
            assert caught.value.payload == b"no JSON"
            assert caught.value.message is not None
            assert caught.value.class_id == caught.value.message.class_id  # type: ignore[attr-defined]

    run(main)
