"""What modules say of themselves: whoever asks goes on, whatever they do."""

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
from tests.gateway.recording_modules import assert_no_threads_left, said


@pytest.fixture(autouse=True)
def no_threads() -> Iterator[None]:
    yield
    assert_no_threads_left()


class Blocking(BlockingModule):
    """Its `health` is what the test says."""

    says: Callable[[], Any]

    def health(self) -> Any:
        return type(self).says()


class Awaited(Module):
    says: Callable[[], Any]

    async def health(self) -> Any:
        await trio.lowlevel.checkpoint()
        return type(self).says()


class Quick(Module):
    says: Callable[[], Any]

    def health(self) -> Any:
        return type(self).says()


KINDS = [Blocking, Awaited, Quick]


def saying(kind: Any, says: Callable[[], Any]) -> GatewayPlan:
    made = type("Made", (kind,), {"says": staticmethod(says)})
    return GatewayPlan((ModulePlan("a", "x", factory=made),), (("*", "a"),))


def told(gateway: Gateway) -> Mapping[str, Any]:
    return gateway.statistics().modules[0].own


async def until(condition: Callable[[], bool]) -> None:
    """Of what happens in a thread; the clock jumps meanwhile, as often as it takes."""
    while not condition():  # noqa: ASYNC110
        await trio.sleep(1)


async def until_told(gateway: Gateway, wanted: Mapping[str, Any]) -> None:
    """It is asked by looking, and answers in its time."""
    await until(lambda: told(gateway) == wanted)


@pytest.mark.parametrize("kind", KINDS)
async def test_health_is_refreshed_after_each_read(
    kind: Any, autojump_clock: trio.testing.MockClock
) -> None:
    level = 0
    async with open_gateway(saying(kind, lambda: {"level": level})) as gateway:
        for level in range(3):
            await until_told(gateway, {"level": level})


@pytest.mark.parametrize("kind", KINDS)
async def test_failing_health_is_reported(
    kind: Any, autojump_clock: trio.testing.MockClock
) -> None:
    def fails() -> Any:
        raise SystemExit(3)

    async with open_gateway(saying(kind, fails)) as gateway:
        why = "it called sys.exit(3), which does not end a gateway"
        await until_told(gateway, {"health": f"RuntimeError: {why}"})
        assert gateway.problem() == ""


@pytest.mark.parametrize("kind", KINDS)
async def test_health_values_are_plain_and_bounded(
    kind: Any, autojump_clock: trio.testing.MockClock
) -> None:
    odd = {"odd": [1], "long": "x" * 5000, "huge": 1 << 70, "true": True, "half": 0.5, 7: None}
    plain = {"odd": "[1]", "long": "x" * CHARACTERS_MAX, "huge": str(1 << 70), "true": True}
    plain |= {"half": 0.5, "7": "None"}
    more = {f"n{number}": number for number in range(VALUES_MAX)}
    async with open_gateway(saying(kind, lambda: {**odd, **more})) as gateway:
        names = [*plain, *more][:VALUES_MAX]
        await until_told(gateway, {name: {**plain, **more}[name] for name in names})


async def test_silent_health_is_reported_without_blocking(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """Not the loop, nor what its module hears, nor its end while it is asked."""
    go, entered, heard = threading.Event(), threading.Event(), threading.Event()
    asked = [0]

    def blocks() -> dict[str, int]:
        asked.append(len(asked))
        entered.set()
        go.wait(60)
        return {"level": 1}

    made = saying(Blocking, blocks)
    made.modules[0].factory.receive = lambda _self, _message: heard.set()  # type: ignore[union-attr]
    try:
        async with open_gateway(made) as gateway:
            await until(entered.is_set)
            await gateway.publish(said("one"))
            await until(heard.is_set)
            await trio.sleep(2 * ANSWER_TIMEOUT_S)
            assert told(gateway) == {"health": "it does not answer"}
            assert gateway.health()["modules"]["a"]["state"] == "running"
            go.set()
            await until_told(gateway, {"level": 1})
            go.clear()
            before = asked[-1]
            await until(lambda: bool(told(gateway)) and asked[-1] > before)
    finally:
        go.set()


async def test_health_texts_are_encodable_and_bounded(
    autojump_clock: trio.testing.MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL, "simplebus.gateway")  # Nor could a report of it be.
    name = os.fsdecode(b"caf\xe9")  # As the system lists a file with such a name.

    class Fails(Quick):
        says = staticmethod(lambda: {name: name})

        async def receive(self, message: ModuleMessage) -> None:
            raise ValueError(name + 2 * CHARACTERS_MAX * "x")

    plan = GatewayPlan((ModulePlan("a", "x", factory=Fails),), (("*", "a"),))
    async with open_gateway(plan) as gateway:
        assert told(gateway) == {"caf\\udce9": "caf\\udce9"}
        msgspec.json.encode(gateway.health())
        await gateway.publish(said("x"))
        await until(lambda: gateway.statistics().modules[0].failures > 0)
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

    class Fails(Quick):
        says = staticmethod(fails)

        async def receive(self, message: ModuleMessage) -> None:
            raise MuteError

    plan = GatewayPlan((ModulePlan("a", "x", factory=Fails),), (("*", "a"),))
    async with open_gateway(plan) as gateway:
        assert told(gateway) == {"health": "MuteError, which cannot say what it is"}
        await gateway.publish(said("x"))
        await until(lambda: gateway.statistics().modules[0].failures > 0)
        assert gateway.statistics().modules[0].error == "MuteError, which cannot say what it is"
