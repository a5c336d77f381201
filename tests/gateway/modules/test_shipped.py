"""The logger, the timer and the transform; and that all that is shipped can be found."""

from __future__ import annotations

import logging

import pytest
import trio
import trio.testing

from gateway import parts
from simplebus.config.mistakes import ConfigError
from simplebus.gateway import ModuleMessage
from simplebus.gateway.gateway import open_gateway
from simplebus.gateway.modules import SHIPPED
from simplebus.gateway.modules.transform import TransformSettings, changed
from simplebus.gateway.plan import GatewayPlan, ModulePlan, find


@pytest.mark.parametrize("name", SHIPPED)
def test_what_is_shipped_is_there(name: str) -> None:
    module = find(name)
    assert module.__doc__
    assert module.__module__.rpartition(".")[2] == name


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({}, "héllo\\n site='roof'"),
        ({"length": 2}, "h� … (7 bytes) site='roof'"),
        ({"content": "hex", "length": 3}, "68 c3 a9… (7 bytes) site='roof'"),
        ({"content": "size"}, "7 bytes site='roof'"),
    ],
)
async def test_the_logger_writes_what_it_hears(
    settings: dict[str, object], line: str, caplog: pytest.LogCaptureFixture
) -> None:
    plan = GatewayPlan(
        (ModulePlan.of("log", "logger", {**settings, "level": "warning"}),), (("*", "log"),)
    )
    async with open_gateway(plan) as gateway:
        await gateway.publish(ModuleMessage("héllo\n".encode(), {"site": "roof"}))
    (record,) = [each for each in caplog.records if each.name == "simplebus.gateway.log"]
    assert record.getMessage().replace(" …", "…") == f"log: {line}".replace(" …", "…")
    assert record.levelno == logging.WARNING


async def test_the_timer_keeps_its_beat(autojump_clock: trio.testing.MockClock) -> None:
    heard: list[tuple[float, bytes, dict[str, str]]] = []

    class Listener(parts.Recorder):
        async def receive(self, message: ModuleMessage) -> None:
            heard.append((trio.current_time(), message.content, dict(message.properties)))

    settings = {"every": 2.5, "content": "now", "properties": {"a": "1"}, "count": 3}
    plan = GatewayPlan(
        (
            ModulePlan.of("timer", "timer", settings),
            ModulePlan("all", "", parts.Settings(), factory=Listener),
        ),
        (("timer", "all"),),
    )
    begun = trio.current_time()
    async with open_gateway(plan):
        await trio.sleep(20)
    assert [(round(at - begun, 1), text) for at, text, _ in heard] == [
        (2.5, b"now"),
        (5.0, b"now"),
        (7.5, b"now"),
    ]
    assert [properties for _, _, properties in heard] == [
        {"a": "1", "tick": str(tick)} for tick in range(3)
    ]


def test_a_transform_renames_removes_and_sets() -> None:
    message = ModuleMessage(b"x", {"a": "1", "b": "2", "c": "3"})
    settings = TransformSettings(
        only={"a": "1"}, rename={"b": "beta"}, remove=["c"], set={"site": "roof"}
    )
    assert changed(settings, message) == ModuleMessage(
        b"x", {"a": "1", "beta": "2", "site": "roof"}
    )
    assert changed(TransformSettings(only={"a": "2"}), message) is None
    assert changed(TransformSettings(only={"d": "4"}), message) is None
    assert changed(TransformSettings(), message) == message


async def test_a_transform_whose_function_is_not_there_fails_as_a_module() -> None:
    with pytest.raises(ConfigError, match="did you mean 'twice'"):
        find("gateway.parts:twyce")
    plan = ModulePlan.of("a", "transform", {"function": "gateway.parts:twyce"})
    async with open_gateway(GatewayPlan((plan,))) as gateway:
        assert "did you mean 'twice'" in gateway.statistics().modules[0].error
