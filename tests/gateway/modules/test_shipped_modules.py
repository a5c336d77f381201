"""The modules logger, timer and transform, and the entry points of all shipped modules."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import trio
import trio.testing

from simplebus.config.errors import ConfigError
from simplebus.gateway import ModuleMessage
from simplebus.gateway.config import GatewayPlan, ModulePlan, find_entry_point
from simplebus.gateway.gateway import open_gateway
from simplebus.gateway.module import ModuleLogAdapter
from simplebus.gateway.modules import SHIPPED
from simplebus.gateway.modules.transform import TransformSettings, apply_rules
from tests.gateway import sample_modules


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_modules_exist(name: str) -> None:
    module = find_entry_point(name)
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
async def test_logger_logs_messages(
    settings: dict[str, object], line: str, caplog: pytest.LogCaptureFixture
) -> None:
    plan = GatewayPlan(
        (ModulePlan.of("log", "logger", {**settings, "level": "warning"}),), (("*", "log"),)
    )
    async with open_gateway(plan) as gateway:
        await gateway.publish(ModuleMessage("héllo\n".encode(), {"site": "roof"}))
    (record,) = [record for record in caplog.records if record.name == "simplebus.gateway.log"]
    assert record.getMessage().replace(" …", "…") == f"log: {line}".replace(" …", "…")
    assert record.levelno == logging.WARNING
    assert vars(record)["module_name"] == "log"
    assert vars(record)["is_unlimited"], "expected lines"


def test_log_of_a_module_has_its_name_and_its_own_fields(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    log = ModuleLogAdapter("doors")
    log.info("door %d is open", 7, extra={"event": "door.opened", "door": 7})
    (record,) = caplog.records
    assert record.getMessage() == "doors: door 7 is open"
    values = vars(record)
    assert (values["event"], values["door"], values["module_name"]) == ("door.opened", 7, "doors")


async def test_timer_keeps_interval(autojump_clock: trio.testing.MockClock) -> None:
    received: list[tuple[float, bytes, dict[str, str]]] = []

    class Listener(sample_modules.Recorder):
        async def receive(self, message: ModuleMessage) -> None:
            received.append((trio.current_time(), message.content, dict(message.properties)))

    settings = {"every": 2.5, "content": "now", "properties": {"a": "1"}, "count": 3}
    plan = GatewayPlan(
        (
            ModulePlan.of("timer", "timer", settings),
            ModulePlan("all", "", sample_modules.Settings(), factory=Listener),
        ),
        (("timer", "all"),),
    )
    started_at = trio.current_time()
    async with open_gateway(plan):
        await trio.sleep(20)
    assert [(round(time - started_at, 1), text) for time, text, _ in received] == [
        (2.5, b"now"),
        (5.0, b"now"),
        (7.5, b"now"),
    ]
    assert [properties for _, _, properties in received] == [
        {"a": "1", "tick": str(number)} for number in range(3)
    ]


async def test_timer_count_ignores_skipped_ticks(
    autojump_clock: trio.testing.MockClock,
) -> None:
    received: list[str] = []

    class Slow(sample_modules.Recorder):
        async def receive(self, message: ModuleMessage) -> None:
            received.append(message.properties["tick"])
            await trio.sleep(3.5)

    plan = GatewayPlan(
        (
            ModulePlan.of("timer", "timer", {"every": 1, "count": 5}),
            ModulePlan("all", "", sample_modules.Settings(), places=1, factory=Slow),
        ),
        (("timer", "all"),),
    )
    async with open_gateway(plan):
        await trio.sleep(60)
    assert len(received) == 5
    assert received[:2] == ["0", "1"]
    assert int(received[-1]) > 4, "lines were lost"


def test_transform_renames_removes_and_sets() -> None:
    message = ModuleMessage(b"x", {"a": "1", "b": "2", "c": "3"})
    settings = TransformSettings(
        only={"a": "1"}, rename={"b": "beta"}, remove=["c"], set={"site": "roof"}
    )
    assert apply_rules(settings, message) == ModuleMessage(
        b"x", {"a": "1", "beta": "2", "site": "roof"}
    )
    assert apply_rules(TransformSettings(only={"a": "2"}), message) is None
    assert apply_rules(TransformSettings(only={"d": "4"}), message) is None
    assert apply_rules(TransformSettings(), message) == message


async def test_invalid_function_result_names_function(
    autojump_clock: trio.testing.MockClock,
) -> None:
    plan = ModulePlan.of("a", "transform", {"function": "tests.gateway.sample_modules:text_of"})
    async with open_gateway(GatewayPlan((plan,), (("*", "a"),))) as gateway:
        await gateway.publish(ModuleMessage(b"21.5"))
        while not (error := gateway.statistics().modules[0].error):  # noqa: ASYNC110
            await trio.sleep(0.1)
    assert error == (
        "TypeError: expected tests.gateway.sample_modules:text_of to return a ModuleMessage, "
        "several, or None; got '21.5'"
    )


@pytest.mark.parametrize(
    ("module", "settings", "expected_error"),
    [
        (
            "transform",
            {"function": "tests.gateway.sample_modules:duplicat"},
            "did you mean 'duplicate'",
        ),
        ("transform", {"function": "no_such_thing:f"}, "cannot be imported"),
        ("transform", {"set": {"a": "b\0"}}, "property"),
        ("transform", {"rename": {"a": "b\0"}}, "property"),
        ("timer", {"every": float("inf")}, "every: Expected `float` <= "),
        ("timer", {"every": 1e-9}, "every: Expected `float` >= 0.001"),
        ("timer", {"every": 1, "properties": {"a\0": "x"}}, "property"),
        ("tail", {"path": ""}, "path: expected the path of a file, got ''"),
        ("tail", {"path": "a\0"}, "invalid file name"),
        ("tail", {"path": "/"}, "expected a regular file, and / is a directory"),
        ("tail", {"path": "/dev/null"}, "/dev/null is a device"),
        ("tail", {"path": "a", "remember": "/dev/null"}, "/dev/null is a device"),
        ("tail", {"path": "a", "poll_seconds": float("inf")}, "poll_seconds"),
        ("json:loads", {}, "'json:loads' is not a module"),
    ],
)
def test_rejects_impossible_plan_at_start(
    module: str, settings: dict[str, Any], expected_error: str
) -> None:
    with pytest.raises(ConfigError, match=expected_error):
        ModulePlan.of("a", module, settings)
