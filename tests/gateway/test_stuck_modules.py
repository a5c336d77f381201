"""Calls of a module that do not return: nothing waits for them forever, and an abandoned module
can no longer publish.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
import trio
import trio.testing

from simplebus.gateway import ModuleBus, ModuleBusError, ModuleMessage
from simplebus.gateway.config import GatewayPlan, ModulePlan
from simplebus.gateway.gateway import ORDERED_STOP_S, open_gateway
from simplebus.gateway.module import BlockingModule, BlockingPort, Module
from simplebus.gateway.supervisor import GRACE_S, State
from tests.gateway import sample_modules
from tests.gateway.recording_modules import TIMEOUT_SECONDS, assert_no_threads_left, text_message


@pytest.fixture(autouse=True)
def no_threads() -> Iterator[None]:
    sample_modules.EVENTS.clear()
    yield
    assert_no_threads_left()


def single_module_plan(factory: Callable[..., object], **options: object) -> GatewayPlan:
    plan = ModulePlan("a", "x", sample_modules.Settings(), factory=factory, **options)  # type: ignore[arg-type]
    return GatewayPlan((plan,), (("*", "a"),))


async def wait_until(condition: Callable[[], bool]) -> None:
    """Wait for an event of a thread, while the clock jumps."""
    while not condition():  # noqa: ASYNC110
        await trio.sleep(1)


async def test_receive_waiting_for_failed_run_is_repeated(
    autojump_clock: trio.testing.MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    made: list[Module] = []
    received: list[bytes] = []

    class Opens(Module):
        """Module whose `receive` waits until `run` has opened a resource, which fails twice."""

        def __init__(self, bus: object, settings: object) -> None:
            super().__init__(bus, settings)  # type: ignore[arg-type]
            made.append(self)
            self.is_open = trio.Event()

        async def run(self) -> None:
            await trio.sleep(1)
            if len(made) < 3:
                raise OSError("it is in use")
            self.is_open.set()
            await trio.sleep_forever()

        async def receive(self, message: ModuleMessage) -> None:
            await self.is_open.wait()
            received.append(message.content)

    async with open_gateway(single_module_plan(Opens)) as gateway:
        for text in "one", "two":
            await gateway.publish(text_message(text))
        await gateway.bus.wait_quiet_async()
        (found,) = gateway.statistics().modules
        assert (found.state, found.failures, found.delivered) == (State.RUNNING, 2, 2)
    assert received == [b"one", b"two"]
    assert caplog.text.count("restarting in") == 2
    assert gateway.statistics().lost == 0


@pytest.mark.parametrize(
    "cancellation_handling", ["returns", "in a nursery", "raises another error", "suppresses it"]
)
async def test_message_of_abandoned_call_is_redelivered(
    autojump_clock: trio.testing.MockClock, cancellation_handling: str
) -> None:
    made: list[Module] = []
    received: list[bytes] = []

    class Waits(Module):
        def __init__(self, bus: object, settings: object) -> None:
            super().__init__(bus, settings)  # type: ignore[arg-type]
            made.append(self)

        async def run(self) -> None:
            await trio.sleep(1)
            if len(made) < 2:
                raise OSError("it is in use")
            await trio.sleep_forever()

        async def receive(self, message: ModuleMessage) -> None:
            if len(made) < 2:
                try:
                    await self.wait()
                except trio.Cancelled:
                    if cancellation_handling == "suppresses it":
                        return
                    raise
            received.append(message.content)

        async def wait(self) -> None:
            async with trio.open_nursery() as nursery:
                if cancellation_handling == "in a nursery":
                    nursery.start_soon(trio.sleep_forever)
                try:
                    await trio.sleep_forever()
                except trio.Cancelled as cancelled:
                    if cancellation_handling == "raises another error":
                        raise ValueError("it was cancelled") from cancelled
                    raise

    async with open_gateway(single_module_plan(Waits)) as gateway:
        for text in "one", "two":
            await gateway.publish(text_message(text))
        await gateway.bus.wait_quiet_async()
        (found,) = gateway.statistics().modules
        assert found.delivered == 2
    assert received == [b"one", b"two"]


async def test_new_plan_restarts_waiting_module(
    autojump_clock: trio.testing.MockClock,
) -> None:
    class Waits(sample_modules.Recorder):
        async def receive(self, message: ModuleMessage) -> None:
            if self.settings.times == 1:
                await trio.sleep_forever()
            await super().receive(message)

    async with open_gateway(single_module_plan(Waits)) as gateway:
        await gateway.publish(text_message("one"))
        await trio.testing.wait_all_tasks_blocked()
        mended = ModulePlan("a", "x", sample_modules.Settings(times=2), factory=Waits)
        await gateway.apply(GatewayPlan((mended,), (("*", "a"),)))
        await gateway.bus.wait_quiet_async()
    assert [event[2] for event in sample_modules.EVENTS if event[1] == "receive"] == ["one"]


async def test_abandoned_thread_cannot_publish(
    autojump_clock: trio.testing.MockClock,
) -> None:
    go, entered, over = threading.Event(), threading.Event(), threading.Event()
    made: list[BlockingModule] = []
    raised: list[BaseException] = []

    class Stuck(BlockingModule):
        def __init__(self, bus: BlockingPort, settings: object) -> None:
            super().__init__(bus, settings)
            self.is_first = not made
            made.append(self)

        def run(self) -> None:
            if self.is_first:
                entered.wait(TIMEOUT_SECONDS)
                raise OSError("on purpose")

        def receive(self, message: ModuleMessage) -> None:
            if self.is_first:
                entered.set()
                go.wait(TIMEOUT_SECONDS)
                try:
                    self.bus.publish(b"late")
                except ModuleBusError as error:
                    raised.append(error)
                over.set()
            self.bus.publish(message)

    async with open_gateway(single_module_plan(Stuck)) as gateway:
        await gateway.add(ModulePlan.of("b", "tests.gateway.sample_modules:Recorder"))
        gateway.link("a", "b")
        for text in "one", "two", "three":
            await gateway.publish(text_message(text))
        await wait_until(entered.is_set)
        await wait_until(lambda: gateway.statistics().modules[0].delivered == 3)
        go.set()
        await wait_until(over.is_set)
        await gateway.bus.wait_quiet_async()
    assert [event[2] for event in sample_modules.EVENTS if event[1] == "receive"] == [
        "two",
        "three",
    ]
    assert len(made) == 2
    assert "has ended and cannot publish any more" in str(raised[0])


@pytest.mark.parametrize("interruption", ["end", "stop"])
def test_stop_interrupts_blocked_port(interruption: str) -> None:
    """`publish` is interrupted when the module has ended, `publish_until_stopping` when it is to
    end.
    """
    hold, errors = threading.Event(), list[object]()

    def receive(message: ModuleMessage) -> None:
        hold.wait(TIMEOUT_SECONDS)

    with ModuleBus() as bus:
        bus.add_module(receive, places=1)
        port = BlockingPort(bus, object(), "a")

        def publish() -> None:
            try:
                if interruption == "stop":
                    while port.publish_until_stopping(b"x"):
                        pass
                else:
                    while True:
                        port.publish(b"x")
            except ModuleBusError as error:
                errors.append(error)

        thread = threading.Thread(target=publish)
        thread.start()
        while not bus.statistics().waiting:
            pass
        published = bus.statistics().published
        if interruption == "stop":
            port.stop()
        else:
            port.end()
        thread.join(TIMEOUT_SECONDS)
        assert not thread.is_alive()
        assert [str(error) for error in errors] == (
            [] if interruption == "stop" else ["module 'a' has ended and cannot publish any more"]
        )
        assert (bus.statistics().waiting, bus.statistics().published) == (0, published)
        assert port.published == published
        if interruption == "end":
            with pytest.raises(ModuleBusError, match="has ended"):
                port.publish_nowait(b"x")
        hold.set()


@pytest.mark.parametrize("callback", ["receive", "destroy"])
async def test_module_stuck_in_thread_is_replaced(
    callback: str, autojump_clock: trio.testing.MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    go = threading.Event()

    class Stuck(BlockingModule):
        def receive(self, message: ModuleMessage) -> None:
            if callback == "receive":
                go.wait(TIMEOUT_SECONDS)

        def destroy(self) -> None:
            if callback == "destroy":
                go.wait(TIMEOUT_SECONDS)

    async with open_gateway(single_module_plan(Stuck)) as gateway:
        await gateway.publish(text_message("one"))
        await wait_until(lambda: gateway.statistics().modules[0].delivered == 1)
        await gateway.replace(ModulePlan.of("a", "tests.gateway.sample_modules:Recorder"))
        await gateway.publish(text_message("two"))
        await gateway.bus.wait_quiet_async()
        assert [event[2] for event in sample_modules.EVENTS if event[1] == "receive"] == ["two"]
        go.set()
    assert "abandoned" in caplog.text


async def test_shielded_module_does_not_block_changes(
    autojump_clock: trio.testing.MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    go, refused = trio.Event(), trio.Event()

    class Shielded(Module):
        async def receive(self, message: ModuleMessage) -> None:
            with trio.CancelScope(shield=True):
                await go.wait()
                with pytest.raises(ModuleBusError, match="has ended"):
                    await self.bus.publish(b"late")
                refused.set()

    async with open_gateway(single_module_plan(Shielded)) as gateway:
        await gateway.publish(text_message("one"))
        await trio.testing.wait_all_tasks_blocked()
        await gateway.remove("a")
        await gateway.add(ModulePlan.of("b", "tests.gateway.sample_modules:Recorder"))
        assert gateway.names == ("b",)
        go.set()
        await refused.wait()
    assert "module 'a' shields itself from cancellation" in caplog.text


@pytest.mark.parametrize("callback", ["receive", "destroy"])
@pytest.mark.parametrize("change", ["the gateway ends", "another plan is applied"])
async def test_stuck_modules_are_abandoned_in_parallel(
    change: str,
    callback: str,
    autojump_clock: trio.testing.MockClock,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A slow module still has its whole grace time, whichever modules end before it."""
    ended: list[str] = []

    class Stuck(Module):
        async def receive(self, message: ModuleMessage) -> None:
            if callback == "receive":
                await trio.sleep_forever()

        async def destroy(self) -> None:
            if callback == "destroy":
                await trio.sleep_forever()

    class Slow(Module):
        async def destroy(self) -> None:
            await trio.sleep(GRACE_S - 1)
            ended.append(self.bus.name)

    def plans(factory: Callable[..., object], *names: str) -> list[ModulePlan]:
        return [ModulePlan(name, "x", sample_modules.Settings(), factory=factory) for name in names]

    modules = [
        *plans(Slow, "slow-1", "slow-2"),
        *plans(Stuck, "a", "b", "c", "d", "e"),
        *plans(Slow, "slow-3"),
    ]
    links = tuple(("*", module.name) for module in modules)
    async with open_gateway(GatewayPlan(tuple(modules), links), drain=0) as gateway:
        await gateway.publish(text_message("one"))
        await trio.testing.wait_all_tasks_blocked()
        started_at = trio.current_time()
        if change == "another plan is applied":
            await gateway.apply(GatewayPlan())
            assert gateway.names == ()
            assert trio.current_time() - started_at <= ORDERED_STOP_S + GRACE_S
    assert trio.current_time() - started_at <= ORDERED_STOP_S + GRACE_S
    assert sorted(ended) == ["slow-1", "slow-2", "slow-3"]
    assert caplog.text.count(" and was abandoned") == 5


async def test_module_removing_itself_and_others_does_not_deadlock(
    autojump_clock: trio.testing.MockClock,
) -> None:
    waits: list[float] = []

    class Ends(sample_modules.Recorder):
        async def receive(self, message: ModuleMessage) -> None:
            started_at = trio.current_time()
            await gateway.apply(GatewayPlan())
            waits.append(trio.current_time() - started_at)

    plan_of_module = ModulePlan("a", "x", sample_modules.Settings(), factory=Ends)
    other_plans = [ModulePlan.of(name, "tests.gateway.sample_modules:Recorder") for name in "bc"]
    plan = GatewayPlan((other_plans[0], plan_of_module, other_plans[1]), (("*", "a"),))
    async with open_gateway(plan) as gateway:
        await gateway.publish(text_message("one"))
        await trio.sleep(GRACE_S)
        assert gateway.names == ()
        destroyed = [event[0] for event in sample_modules.EVENTS if event[1] == "destroy"]
    assert (waits, destroyed) == ([0.0], ["c", "b", "a"])
