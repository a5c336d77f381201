"""Modules of a gateway: order, links, failures, and changes while it runs."""

from __future__ import annotations

import json
import signal
import tomllib
from collections.abc import Iterator
from itertools import pairwise

import pytest
import trio
import trio.lowlevel
import trio.testing

from simplebus.config.errors import ConfigError
from simplebus.gateway import ModuleMessage
from simplebus.gateway.config import GatewayPlan, ModulePlan, parse
from simplebus.gateway.gateway import Gateway, open_gateway
from simplebus.gateway.module import Module
from simplebus.gateway.supervisor import State
from tests.gateway import sample_modules
from tests.gateway.recording_modules import assert_no_threads_left, text_message

HERE = "tests.gateway.sample_modules"
KINDS = pytest.mark.parametrize("kind", ["Recorder", "BlockingRecorder"])


@pytest.fixture(autouse=True)
def events() -> Iterator[list[tuple[str, ...]]]:
    sample_modules.EVENTS.clear()
    sample_modules.Recorder.failed = 0
    sample_modules.BlockingRecorder.threads.clear()
    yield sample_modules.EVENTS
    assert_no_threads_left()


def module(name: str, kind: str = "Recorder", **settings: object) -> ModulePlan:
    return ModulePlan.of(name, f"{HERE}:{kind}", settings)


def received(name: str) -> list[str]:
    return [event[2] for event in sample_modules.EVENTS if event[:2] == (name, "receive")]


def steps(*names: str) -> list[tuple[str, ...]]:
    return [event for event in sample_modules.EVENTS if event[1] in names]


async def wait_quiet(gateway: Gateway) -> None:
    await gateway.bus.wait_quiet_async()


@KINDS
async def test_modules_start_in_order_and_end_in_reverse(kind: str) -> None:
    plan = GatewayPlan((module("a", kind), module("b", kind), module("c", kind)))
    async with open_gateway(plan) as gateway:
        assert steps("create", "start") == [
            ("a", "create"),
            ("b", "create"),
            ("c", "create"),
            ("a", "start"),
            ("b", "start"),
            ("c", "start"),
        ]
        assert [each.state for each in gateway.statistics().modules] == [State.RUNNING] * 3
        assert gateway.names == ("a", "b", "c")
    assert steps("destroy") == [("c", "destroy"), ("b", "destroy"), ("a", "destroy")]
    assert gateway.names == ()


@pytest.mark.parametrize("change", ["apply", "remove"])
async def test_slow_start_is_logged_and_awaited(
    change: str, autojump_clock: trio.testing.MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    first, stuck, last = module("one"), module("stuck", "NeverStarts"), module("other")
    async with open_gateway(GatewayPlan((first,))) as gateway, trio.open_nursery() as nursery:
        nursery.start_soon(gateway.apply, GatewayPlan((first, stuck, last)))
        await trio.sleep(60)
        assert caplog.text.count("module 'stuck' is not started after 10 s; still waiting") == 1
        assert [event for event in sample_modules.EVENTS if event[0] == "other"] == [
            ("other", "create")
        ]
        nursery.start_soon(gateway.add, module("late"))
        await trio.sleep(1)  # Later than all other messages.
        if change == "apply":
            await gateway.apply(GatewayPlan((first, last, module("late"))))
        else:
            await gateway.remove("stuck")
        await trio.sleep(60)
        assert gateway.names == ("one", "other", "late")
        assert all(each.state is State.RUNNING for each in gateway.statistics().modules)


@KINDS
async def test_modules_receive_from_linked_sources(kind: str) -> None:
    plan = GatewayPlan(
        (module("shout", "Shout"), module("all", kind), module("one", kind), module("none", kind)),
        (("*", "shout"), ("*", "all"), ("shout", "one")),
    )
    async with open_gateway(plan) as gateway:
        await gateway.publish(text_message("hello"))
        await wait_quiet(gateway)
        assert sorted(received("all")) == ["HELLO", "hello"]
        assert received("one") == ["HELLO"]
        assert received("none") == []
        shout = gateway.statistics().modules[0]
        assert (shout.delivered, shout.published) == (1, 1)
        gateway.unlink("shout", "one")
        gateway.link("all", "none")
        await gateway.publish(text_message("again"))
        await wait_quiet(gateway)
        assert received("one") == ["HELLO"]
        assert gateway.statistics().links == (("*", "shout"), ("*", "all"), ("all", "none"))
    if kind == "BlockingRecorder":
        assert len(sample_modules.BlockingRecorder.threads) == 3


async def test_messages_wait_for_modules_that_start_later() -> None:
    class Early(sample_modules.Recorder):
        async def start(self) -> None:
            await self.bus.publish(b"early")

    early_module = ModulePlan("early", "", sample_modules.Settings(), factory=Early)
    plan = GatewayPlan((early_module, module("late")), (("early", "late"),))
    async with open_gateway(plan) as gateway:
        await wait_quiet(gateway)
        assert steps("start", "receive") == [("late", "start"), ("late", "receive", "early")]


@pytest.mark.parametrize("method", ["create", "start", "2", "run"])
async def test_failed_module_restarts_and_loses_one_message(
    method: str, autojump_clock: trio.testing.MockClock
) -> None:
    started_at = trio.current_time()
    await fail_twice("Recorder", method)
    assert 3 <= trio.current_time() - started_at < 4, "backoff of 1 s, then of 2 s"


@pytest.mark.parametrize("method", ["create", "start", "2"])
async def test_failed_thread_module_restarts(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("simplebus.gateway.supervisor.RESTART_DELAY_S", 0.0)
    await fail_twice("BlockingRecorder", method)


@KINDS
@pytest.mark.parametrize("error_key", sample_modules.RAISED)
@pytest.mark.parametrize("method", ["create", "start", "2", "run"])
async def test_system_exit_is_module_failure(
    kind: str, method: str, error_key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if (kind, method) == ("BlockingRecorder", "run"):
        kind = "BlockingRunner"
    monkeypatch.setattr("simplebus.gateway.supervisor.RESTART_DELAY_S", 0.0)
    expected_error = (
        "it called sys.exit(3)"
        if error_key == "exits"
        else f"it raised {sample_modules.RAISED[error_key]()!r}"
    )
    await fail_twice(
        kind, method, expected_error=f"RuntimeError: {expected_error}", error_key=error_key
    )


@KINDS
async def test_sys_exit_in_destroy_is_contained(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    plan = GatewayPlan((module("a", kind, fails="destroy", error_key="exits"), module("b", kind)))
    async with open_gateway(plan):
        pass
    assert steps("destroy") == [("b", "destroy"), ("a", "destroy")]
    assert "'a' failed in destroy" in caplog.text


async def test_raised_keyboard_interrupt_is_module_failure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def create_error() -> BaseException:
        return BaseExceptionGroup("of a nursery", [KeyboardInterrupt()])

    monkeypatch.setitem(sample_modules.RAISED, "in a task", create_error)
    monkeypatch.setattr("simplebus.gateway.supervisor.RESTART_DELAY_S", 0.0)
    with trio.open_signal_receiver(signal.SIGINT):  # As `simplebus gateway` handles it.
        await fail_twice(
            "Recorder",
            "2",
            expected_error=f"RuntimeError: it raised {create_error()!r}",
            error_key="in a task",
        )


async def test_stored_cancellation_is_module_failure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A cache can raise the stored exception of its loader again."""
    with trio.CancelScope() as scope:
        scope.cancel()
        try:
            await trio.sleep_forever()
        except trio.Cancelled as error:
            stored_error = error
            raise
    monkeypatch.setitem(sample_modules.RAISED, "kept", lambda: stored_error)
    monkeypatch.setattr("simplebus.gateway.supervisor.RESTART_DELAY_S", 0.0)
    await fail_twice(
        "Recorder", "2", expected_error="RuntimeError: it raised Cancelled(", error_key="kept"
    )


async def test_error_during_cancellation_is_contained(
    caplog: pytest.LogCaptureFixture, autojump_clock: trio.testing.MockClock
) -> None:
    plan = GatewayPlan((module("a", "PanicsWhenAbandoned"), module("b")), (("*", "a"), ("*", "b")))
    async with open_gateway(plan) as gateway:
        for text in "12":
            await gateway.publish(text_message(text))
        await trio.testing.wait_all_tasks_blocked()
        await gateway.apply(GatewayPlan((module("b"),), (("*", "b"),)))
        await gateway.publish(text_message("3"))
        await wait_quiet(gateway)
        assert received("b") == ["1", "2", "3"]
    assert "PanicError" in caplog.text


async def test_base_exception_in_function_loses_one_message(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("simplebus.gateway.supervisor.RESTART_DELAY_S", 0.0)
    plan = ModulePlan.of("a", "transform", {"function": f"{HERE}:panics"})
    async with open_gateway(GatewayPlan((plan, module("b")), (("*", "a"), ("*", "b")))) as gateway:
        for text in "12":
            await gateway.publish(text_message(text))
        await wait_quiet(gateway)
        assert received("b") == ["1", "2"]
        assert gateway.statistics().modules[0].failures == 2


async def fail_twice(
    kind: str, method: str, *, expected_error: str = "ValueError: on purpose", error_key: str = ""
) -> None:
    plan = GatewayPlan(
        (module("a", kind, fails=method, times=2, error_key=error_key),), (("*", "a"),)
    )
    texts = ["1", "2", "2", "3", "4", "5"] if method == "2" else list("12345")
    async with open_gateway(plan) as gateway:
        for text in texts:
            await gateway.publish(text_message(text))
        (module_statistics,) = gateway.statistics().modules
        while (module_statistics.failures, module_statistics.state) != (2, State.RUNNING):
            await trio.sleep(0.01)
            (module_statistics,) = gateway.statistics().modules
        await wait_quiet(gateway)
        assert received("a") == texts
        assert expected_error in module_statistics.error
        assert gateway.statistics().failed == ()
    calls = [event[1] for event in steps("create", "destroy")]
    assert calls.count("create") == 3
    assert calls[-1] == "destroy"


async def test_wait_quiet_after_module_was_added_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("simplebus.gateway.supervisor.RESTART_DELAY_S", 0.0)
    sample_modules.Stuck.release_event.clear()
    sample_modules.Stuck.entered.clear()
    plan = GatewayPlan((module("a", "FailsThenSticks", fails="start"),), (("*", "a"),))
    async with open_gateway(plan) as gateway:
        await gateway.publish(text_message("1"))
        await trio.to_thread.run_sync(sample_modules.Stuck.entered.wait)
        with trio.move_on_after(0) as scope:
            await wait_quiet(gateway)
        assert scope.cancelled_caught, "the module is in its callback"
        sample_modules.Stuck.release_event.set()
        await wait_quiet(gateway)
        assert gateway.statistics().modules[0].failures == 1


async def test_restart_delay_grows_and_resets(
    autojump_clock: trio.testing.MockClock,
) -> None:
    times: list[float] = []
    enough = trio.Event()

    class Failing(sample_modules.Recorder):
        async def run(self) -> None:
            times.append(trio.current_time())
            if len(times) == 9:
                await trio.sleep(100)
            if len(times) == 10:
                enough.set()
            raise ValueError("on purpose")

    plan = GatewayPlan((ModulePlan("a", "", sample_modules.Settings(), factory=Failing),))
    async with open_gateway(plan) as gateway:
        await enough.wait()
        assert gateway.statistics().modules[0].failures >= 9
    pauses = [round(b - a) for a, b in pairwise(times)]
    assert pauses == [1, 2, 4, 8, 16, 32, 60, 60, 101]


async def test_new_plan_restarts_failed_module_at_once(
    autojump_clock: trio.testing.MockClock,
) -> None:
    broken, fixed = module("a", fails="start", times=99), module("a")
    async with open_gateway(GatewayPlan((broken,), (("*", "a"),))) as gateway:
        await trio.sleep(40)  # The next start is due at second 63.
        assert gateway.statistics().modules[0].failures == 6
        await gateway.publish(text_message("waits"))
        await gateway.apply(GatewayPlan((module("a", fails="create", times=98),), (("*", "a"),)))
        await trio.testing.wait_all_tasks_blocked()
        assert gateway.statistics().modules[0].failures == 7
        await trio.sleep(1.5)
        assert gateway.statistics().modules[0].failures == 8, "the backoff starts again"
        failed_at = trio.current_time()
        await gateway.apply(GatewayPlan((fixed,), (("*", "a"),)))
        await wait_quiet(gateway)
        assert gateway.statistics().modules[0].state == State.RUNNING
        assert (trio.current_time(), received("a")) == (failed_at, ["waits"])


async def test_failed_module_is_reported(
    autojump_clock: trio.testing.MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    async with open_gateway(GatewayPlan((module("a", fails="start", times=99),))) as gateway:
        assert gateway.statistics().failed == ("a",)
        assert "modules: 0 of 1 running" in str(gateway.statistics())
        assert "failed: a" in str(gateway.statistics())
    assert "module 'a' failed; restarting in 1 s" in caplog.text


async def test_reports_entry_point_without_module(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with open_gateway(GatewayPlan((module("a", "broken"),))) as gateway:
        assert "has a method `receive`; got 7" in gateway.statistics().modules[0].error


async def test_run_can_wait_for_its_own_module() -> None:
    class Talker(sample_modules.Recorder):
        async def run(self) -> None:
            for number in range(100):
                await self.bus.publish(b"%d" % number)

    talker_plan = ModulePlan("a", "", sample_modules.Settings(), places=2, factory=Talker)
    async with open_gateway(GatewayPlan((talker_plan,), (("a", "a"),))) as gateway:
        while len(received("a")) < 100:
            await trio.lowlevel.checkpoint()
        assert gateway.statistics().modules[0].failures == 0
    assert received("a") == [str(number) for number in range(100)]


async def test_health_has_plain_values_and_rates(autojump_clock: trio.testing.MockClock) -> None:
    class Talker(sample_modules.Recorder):
        async def run(self) -> None:
            while True:
                await trio.sleep(0.5)
                await self.bus.publish(b"x")

        def health(self) -> dict[str, object]:
            return {"mood": "fine", "level": 3, "odd": [1]}

    class Mute(sample_modules.Recorder):
        def health(self) -> dict[str, object]:
            raise ValueError("on purpose")

    plan = GatewayPlan(
        (
            ModulePlan("talker", "x", sample_modules.Settings(), factory=Talker),
            ModulePlan("mute", "x", sample_modules.Settings(), factory=Mute),
            module("fails", fails="start", times=99),
        ),
        (("talker", "mute"),),
    )
    async with open_gateway() as gateway:
        assert gateway.health()["why"] == "not all modules have started"
        await gateway.apply(plan)
        gateway.health()
        await trio.sleep(20.25)
        health_json = json.loads(json.dumps(gateway.health()))
        talker_plan, mute, fails = (
            health_json["modules"][name] for name in ("talker", "mute", "fails")
        )
        assert talker_plan["state"] == mute["state"] == "running"
        assert talker_plan["published_per_second"] == pytest.approx(2.0, rel=0.05)
        assert mute["delivered_per_second"] == pytest.approx(2.0, rel=0.05)
        assert (mute["delivered"], mute["waiting"], mute["failures"]) == (40, 0, 0)
        assert talker_plan["own"] == {"mood": "fine", "level": 3, "odd": "[1]"}
        assert mute["own"] == {"health": "ValueError: on purpose"}
        assert (fails["state"], fails["failures"]) == ("failed", 5)
        assert fails["error"] == "ValueError: on purpose in start"
        assert (health_json["ready"], health_json["why"]) == (False, "failed: fails")
        await gateway.remove("fails")
        assert gateway.health()["ready"]
        assert set(gateway.health()["modules"]) == {"talker", "mute"}
    assert gateway.health()["draining"]


# Changes while it runs ---------------------------------------------------------------------------


async def test_listener_sees_added_and_removed_modules() -> None:
    notified: list[tuple[str, ...]] = []
    async with open_gateway(GatewayPlan((module("a"),))) as gateway:
        gateway.listen(notified.append)
        await gateway.add(module("b", "BlockingRecorder"))
        gateway.link("*", "b")
        gateway.link("b", "a")
        await gateway.publish(text_message("hello"))
        await wait_quiet(gateway)
        await gateway.remove("b")
        await wait_quiet(gateway)
        assert notified == [("a", "b"), ("a",)]
        assert [event[2:] for event in steps("modules") if event[0] == "a"] == [("a",), *notified]
        assert received("b") == ["hello"]
        assert gateway.statistics().links == ()
        await gateway.add(module("b"))
        assert gateway.statistics().links == ()


async def test_replaced_module_receives_queued_messages() -> None:
    async with open_gateway(GatewayPlan((module("a"),), (("*", "a"),))) as gateway:
        await gateway.publish(text_message("one"))
        await wait_quiet(gateway)
        await gateway.replace(module("a", "BlockingRecorder"))
        await gateway.publish(text_message("two"))
        await wait_quiet(gateway)
        assert [event[1] for event in sample_modules.EVENTS if event[1] != "modules"] == [
            "create", "start", "run", "receive", "destroy", "create", "start", "receive",
        ]  # fmt: skip
        assert received("a") == ["one", "two"]
        assert gateway.statistics().modules[0].module == f"{HERE}:BlockingRecorder"
        with pytest.raises(ConfigError, match="has a queue with places=1024"):
            await gateway.replace(ModulePlan.of("a", f"{HERE}:Shout", places=7))


@pytest.mark.parametrize(
    ("call", "expected_error"),
    [
        (lambda gateway: gateway.add(module("a")), "a module has the name 'a' already"),
        (lambda gateway: gateway.add(ModulePlan("*", "timer")), "stands for all other modules"),
        (lambda gateway: gateway.remove("b"), "'b' is unknown; there are a"),
        (lambda gateway: gateway.replace(module("b")), "'b' is unknown"),
    ],
)
async def test_rejects_impossible_changes(call: object, expected_error: str) -> None:
    async with open_gateway(GatewayPlan((module("a"),), (("*", "a"),))) as gateway:
        with pytest.raises(ConfigError, match=expected_error):
            await call(gateway)  # type: ignore[operator]
        for link in ("*", "a"), ("b", "a"), ("a", "b"):
            with pytest.raises(ConfigError):
                gateway.link(*link)
        with pytest.raises(ConfigError, match="there is no link from 'a' to"):
            gateway.unlink("a", "a")
        assert gateway.names == ("a",)


async def test_rejects_links_of_module_being_removed() -> None:
    stuck, may_continue = trio.Event(), trio.Event()

    class Stuck(Module):
        async def receive(self, message: ModuleMessage) -> None:
            stuck.set()
            await may_continue.wait()

    modules = ModulePlan("a", "x", factory=Stuck), module("b")
    async with open_gateway(GatewayPlan(modules, (("*", "a"),))) as gateway:
        await gateway.publish(ModuleMessage(b"x"))
        await stuck.wait()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(gateway.remove, "a")
            await trio.testing.wait_all_tasks_blocked()
            for link in ("*", "a"), ("b", "a"), ("a", "b"):
                with pytest.raises(ConfigError, match="'a' is being removed"):
                    gateway.link(*link)
            may_continue.set()
        assert gateway.names == ("b",)


async def test_apply_leaves_unchanged_modules_running() -> None:
    plan = GatewayPlan(
        (module("stays"), module("goes"), module("changes"), module("shrinks")),
        (("*", "stays"), ("goes", "stays"), ("stays", "changes")),
    )
    shrunk = ModulePlan.of("shrinks", f"{HERE}:Recorder", places=5)
    after = GatewayPlan(
        (module("comes"), shrunk, module("stays"), module("changes", times=2)),
        (("*", "stays"), ("comes", "stays"), ("*", "changes")),
    )
    async with open_gateway(plan) as gateway:
        sample_modules.EVENTS.clear()
        await gateway.apply(after)
        await wait_quiet(gateway)
        assert gateway.names == ("comes", "shrinks", "stays", "changes")
        assert sorted(gateway.statistics().links) == sorted(after.links)
        assert sorted(steps("create", "destroy")) == [
            ("changes", "create"),
            ("changes", "destroy"),
            ("comes", "create"),
            ("goes", "destroy"),
            ("shrinks", "create"),
            ("shrinks", "destroy"),
        ]
        sample_modules.EVENTS.clear()
        await gateway.apply(after)
        await wait_quiet(gateway)
        assert sample_modules.EVENTS == []


# The end -----------------------------------------------------------------------------------------


async def test_drains_messages_before_end() -> None:
    plan = GatewayPlan((module("a", "BlockingRecorder"),), (("*", "a"),))
    async with open_gateway(plan) as gateway:
        for number in range(300):
            await gateway.publish(text_message(str(number)))
    assert len(received("a")) == 300
    assert gateway.statistics().lost == 0


async def test_drains_messages_of_failed_module(
    autojump_clock: trio.testing.MockClock,
) -> None:
    # With messages in progress, and with messages that arrive while it is down.
    for failing_message in (
        "1",
        "3",
    ):
        sample_modules.EVENTS.clear()
        sample_modules.Recorder.failed = 0
        plan = GatewayPlan((module("a", fails=failing_message),), (("*", "a"),))
        async with open_gateway(plan) as gateway:
            for number in "123":
                await gateway.publish(text_message(number))
            while not gateway.statistics().failed:  # noqa: ASYNC110
                await trio.sleep(0.01)
            await gateway.publish(text_message("4"))
        assert received("a") == ["1", "2", "3", "4"]
        assert gateway.statistics().lost == 0


async def test_module_that_does_not_end_is_abandoned(
    autojump_clock: trio.testing.MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    sample_modules.Stuck.release_event.clear()
    sample_modules.Stuck.entered.clear()
    plan = GatewayPlan((module("a", "Stuck"), module("b")), (("*", "a"),))
    async with open_gateway(plan, drain=1, grace=2) as gateway:
        for _ in range(3):
            await gateway.publish(ModuleMessage(b"x"))
        with trio.fail_after(240):
            while not sample_modules.Stuck.entered.is_set():
                await trio.lowlevel.checkpoint()
    assert "not all messages were delivered within 1 s" in caplog.text
    assert "'a' did not stop within 2 s and was abandoned" in caplog.text
    assert gateway.statistics().lost == 2
    sample_modules.Stuck.release_event.set()


async def test_error_in_block_ends_modules() -> None:
    async def fail() -> None:
        async with open_gateway(GatewayPlan((module("a"),))):
            raise ValueError("on purpose")

    with pytest.raises(ValueError, match="on purpose"):
        await fail()
    assert steps("destroy") == [("a", "destroy")]


async def test_runs_plan_from_text(autojump_clock: trio.testing.MockClock) -> None:
    text = f"""
        [modules.clock]
        module = "timer"
        settings = {{ every = 2, content = "tick", count = 3 }}
        [modules.again]
        module = "transform"
        hears = ["clock"]
        settings = {{ set = {{ by = "again" }}, function = "{HERE}:duplicate" }}
        [modules.all]
        module = "{HERE}:Recorder"
        hears = ["again"]
        """
    async with open_gateway(parse(tomllib.loads(text))) as gateway:
        await trio.sleep(7)
        await wait_quiet(gateway)
        assert received("all") == ["tick", "tick!"] * 3
