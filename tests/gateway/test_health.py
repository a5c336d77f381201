"""Health values of modules: requests never block, even if `health` does."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec
import pytest
import trio
import trio.testing

from simplebus.gateway import ModuleMessage
from simplebus.gateway.config import GatewayPlan, ModulePlan
from simplebus.gateway.gateway import Gateway, open_gateway
from simplebus.gateway.health import ANSWER_TIMEOUT_S, CHARACTERS_MAX, VALUES_MAX
from simplebus.gateway.module import BlockingModule, Module
from tests.gateway.recording_modules import assert_no_threads_left, text_message


@pytest.fixture(autouse=True)
def no_threads() -> Iterator[None]:
    yield
    assert_no_threads_left()


class BlockingHealth(BlockingModule):
    """Module whose `health` calls a function of the test."""

    health_function: Callable[[], Any]

    def health(self) -> Any:
        return type(self).health_function()


class AsyncHealth(Module):
    health_function: Callable[[], Any]

    async def health(self) -> Any:
        await trio.lowlevel.checkpoint()
        return type(self).health_function()


class ImmediateHealth(Module):
    health_function: Callable[[], Any]

    def health(self) -> Any:
        return type(self).health_function()


KINDS = [BlockingHealth, AsyncHealth, ImmediateHealth]


def plan_with_health(kind: Any, health_function: Callable[[], Any]) -> GatewayPlan:
    module_class = type("Made", (kind,), {"health_function": staticmethod(health_function)})
    return GatewayPlan((ModulePlan("a", "x", factory=module_class),), (("*", "a"),))


def latest_health(gateway: Gateway) -> Mapping[str, Any]:
    return gateway.statistics().modules[0].own


async def wait_until(condition: Callable[[], bool]) -> None:
    """Wait for something that happens in a thread, while the clock jumps."""
    while not condition():  # noqa: ASYNC110
        await trio.sleep(1)


async def wait_health(gateway: Gateway, expected: Mapping[str, Any]) -> None:
    """Request the health until it equals `wanted`."""
    await wait_until(lambda: latest_health(gateway) == expected)


@pytest.mark.parametrize("kind", KINDS)
async def test_health_is_refreshed_after_each_read(
    kind: Any, autojump_clock: trio.testing.MockClock
) -> None:
    level = 0
    async with open_gateway(plan_with_health(kind, lambda: {"level": level})) as gateway:
        for level in range(3):
            await wait_health(gateway, {"level": level})


@pytest.mark.parametrize("kind", KINDS)
async def test_failing_health_is_reported(
    kind: Any, autojump_clock: trio.testing.MockClock
) -> None:
    def fails() -> Any:
        raise SystemExit(3)

    async with open_gateway(plan_with_health(kind, fails)) as gateway:
        expected_error = "it called sys.exit(3), which does not end a gateway"
        await wait_health(gateway, {"health": f"RuntimeError: {expected_error}"})
        assert gateway.problem() == ""


@pytest.mark.parametrize("kind", KINDS)
async def test_health_values_are_plain_and_bounded(
    kind: Any, autojump_clock: trio.testing.MockClock
) -> None:
    values = {"odd": [1], "long": "x" * 5000, "huge": 1 << 70, "true": True, "half": 0.5, 7: None}
    plain = {"odd": "[1]", "long": "x" * CHARACTERS_MAX, "huge": str(1 << 70), "true": True}
    plain |= {"half": 0.5, "7": "None"}
    more_values = {f"n{number}": number for number in range(VALUES_MAX)}
    async with open_gateway(plan_with_health(kind, lambda: {**values, **more_values})) as gateway:
        names = [*plain, *more_values][:VALUES_MAX]
        await wait_health(gateway, {name: {**plain, **more_values}[name] for name in names})


async def test_silent_health_is_reported_without_blocking(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """Neither the event loop, nor messages, nor the end of the module wait for `health`."""
    may_return, entered, received = threading.Event(), threading.Event(), threading.Event()
    request_times = [0]

    def blocks() -> dict[str, int]:
        request_times.append(len(request_times))
        entered.set()
        may_return.wait(60)
        return {"level": 1}

    module_class = plan_with_health(BlockingHealth, blocks)
    module_class.modules[0].factory.receive = lambda _self, _message: received.set()  # type: ignore[union-attr]
    try:
        async with open_gateway(module_class) as gateway:
            await wait_until(entered.is_set)
            await gateway.publish(text_message("one"))
            await wait_until(received.is_set)
            await trio.sleep(2 * ANSWER_TIMEOUT_S)
            assert latest_health(gateway) == {"health": "it does not answer"}
            assert gateway.health()["modules"]["a"]["state"] == "running"
            may_return.set()
            await wait_health(gateway, {"level": 1})
            may_return.clear()
            last_request = request_times[-1]
            await wait_until(
                lambda: bool(latest_health(gateway)) and request_times[-1] > last_request
            )
    finally:
        may_return.set()


async def test_health_texts_are_encodable_and_bounded(
    autojump_clock: trio.testing.MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL, "simplebus.gateway")  # It could not be encoded in a report.
    name = os.fsdecode(b"caf\xe9")  # As the system reports a file name that is not UTF-8.

    class Fails(ImmediateHealth):
        health_function = staticmethod(lambda: {name: name})

        async def receive(self, message: ModuleMessage) -> None:
            raise ValueError(name + 2 * CHARACTERS_MAX * "x")

    plan = GatewayPlan((ModulePlan("a", "x", factory=Fails),), (("*", "a"),))
    async with open_gateway(plan) as gateway:
        assert latest_health(gateway) == {"caf\\udce9": "caf\\udce9"}
        msgspec.json.encode(gateway.health())
        await gateway.publish(text_message("x"))
        await wait_until(lambda: gateway.statistics().modules[0].failures > 0)
        msgspec.json.encode(gateway.health())
        error = gateway.statistics().modules[0].error
        assert error.startswith("ValueError: caf\\udce9x")
        assert len(error) < 2 * CHARACTERS_MAX


async def test_error_with_failing_str_is_handled(
    autojump_clock: trio.testing.MockClock,
) -> None:
    class MuteError(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no words")

    def fails() -> dict[str, int]:
        raise MuteError

    class Fails(ImmediateHealth):
        health_function = staticmethod(fails)

        async def receive(self, message: ModuleMessage) -> None:
            raise MuteError

    plan = GatewayPlan((ModulePlan("a", "x", factory=Fails),), (("*", "a"),))
    async with open_gateway(plan) as gateway:
        assert latest_health(gateway) == {"health": "MuteError, whose text is not available"}
        await gateway.publish(text_message("x"))
        await wait_until(lambda: gateway.statistics().modules[0].failures > 0)
        assert gateway.statistics().modules[0].error == "MuteError, whose text is not available"
