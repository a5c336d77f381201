"""Modules that have their gateway change them, and changes that are given up."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import trio
import trio.testing

from simplebus.gateway.config import EVERYONE, GatewayPlan, ModulePlan
from simplebus.gateway.gateway import Gateway, open_gateway
from simplebus.gateway.messages import ModuleMessage
from simplebus.gateway.module import BlockingModule, Module
from simplebus.gateway.supervisor import State
from tests.gateway import sample_modules
from tests.gateway.recording_modules import said

GO = ModuleMessage(b"go")


async def until(condition: Callable[[], bool]) -> None:
    with trio.fail_after(60):
        while not condition():  # noqa: ASYNC110
            await trio.sleep(0.001)


def leaver(where: str, gateways: list[Gateway], told: list[str]) -> ModulePlan:
    """One that has itself removed, and notes when that has returned and when it is ended."""

    class InCallback(Module):
        async def receive(self, message: ModuleMessage) -> None:
            await gateways[0].remove("leaver")
            told.append("goes on")

        async def destroy(self) -> None:
            told.append("ended")

    class InRun(Module):
        async def receive(self, message: ModuleMessage) -> None:
            self.heard = True

        async def run(self) -> None:
            while not hasattr(self, "heard"):  # noqa: ASYNC110
                await trio.sleep(0.001)
            await gateways[0].remove("leaver")
            told.append("goes on")

        async def destroy(self) -> None:
            told.append("ended")

    class InThread(BlockingModule):
        def receive(self, message: ModuleMessage) -> None:
            trio.from_thread.run(gateways[0].remove, "leaver", trio_token=token)
            told.append("goes on")

        def destroy(self) -> None:
            told.append("ended")

    token = trio.lowlevel.current_trio_token()
    factory = {"callback": InCallback, "run": InRun, "thread": InThread}[where]
    return ModulePlan("leaver", "x", factory=factory)


@pytest.mark.parametrize("where", ["callback", "run", "thread"])
async def test_module_can_remove_itself_and_free_its_name(where: str) -> None:
    gateways: list[Gateway] = []
    told: list[str] = []
    names: list[tuple[str, ...]] = []
    plan = GatewayPlan(
        (
            ModulePlan.of("other", "tests.gateway.sample_modules:Recorder"),
            leaver(where, gateways, told),
        ),
        ((EVERYONE, "leaver"),),
    )
    async with open_gateway(plan) as gateway:
        gateways.append(gateway)
        gateway.listen(names.append)
        await gateway.publish(GO)
        await until(lambda: "ended" in told)
        assert told == ["goes on", "ended"]
        assert gateway.names == ("other",)
        assert names == [("other",)]
        assert gateway.statistics().links == ()
        with trio.fail_after(60):
            await gateway.add(ModulePlan.of("leaver", "tests.gateway.sample_modules:Recorder"))
        assert gateway.health()["modules"]["leaver"]["state"] == "running"


async def test_module_can_apply_plan_without_itself() -> None:
    gateways: list[Gateway] = []
    rest = GatewayPlan((ModulePlan.of("other", "tests.gateway.sample_modules:Recorder"),))

    class Changer(Module):
        async def receive(self, message: ModuleMessage) -> None:
            await gateways[0].apply(rest)
            applied.set()

    applied = trio.Event()
    plan = GatewayPlan((ModulePlan("changer", "x", factory=Changer),), ((EVERYONE, "changer"),))
    async with open_gateway(plan) as gateway:
        gateways.append(gateway)
        await gateway.publish(GO)
        with trio.fail_after(60):
            await applied.wait()
        assert gateway.names == ("other",)


@pytest.mark.parametrize("how", ["add", "apply"])
async def test_added_module_starts_after_cancelled_add(
    how: str, autojump_clock: trio.testing.MockClock
) -> None:
    class Slow(Module):
        async def start(self) -> None:
            await trio.sleep(30)

        async def receive(self, message: ModuleMessage) -> None:
            heard.append(message.content)

    heard: list[bytes] = []
    slow, late = ModulePlan("slow", "x", factory=Slow), ModulePlan("late", "x", factory=Slow)
    async with open_gateway(GatewayPlan()) as gateway:
        with trio.move_on_after(5) as scope:
            if how == "add":
                await gateway.add(slow)
            else:
                await gateway.apply(GatewayPlan((slow, late), ((EVERYONE, "slow"),)))
        assert scope.cancelled_caught
        await trio.sleep(60)
        assert {each.state for each in gateway.statistics().modules} == {State.RUNNING}
        assert "slow" in gateway.names
        if how == "add":
            gateway.link(EVERYONE, "slow")
        await gateway.publish(said("hello"))
        await gateway.bus.wait_quiet_async()
        assert heard == [b"hello"]


async def test_error_in_block_is_not_wrapped() -> None:
    sample_modules.HAPPENED.clear()

    async def fail() -> None:
        async with open_gateway(
            GatewayPlan((ModulePlan.of("a", "tests.gateway.sample_modules:Recorder"),))
        ):
            raise ValueError("out of here")

    with pytest.raises(ValueError, match="out of here"):
        await fail()
    assert sample_modules.HAPPENED[-1][1] == "destroy"
