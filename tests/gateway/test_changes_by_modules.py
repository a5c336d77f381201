"""Changes of a gateway that its own modules make, and changes that are cancelled."""

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
from tests.gateway.recording_modules import text_message

GO = ModuleMessage(b"go")


async def wait_until(condition: Callable[[], bool]) -> None:
    with trio.fail_after(240):
        while not condition():  # noqa: ASYNC110
            await trio.sleep(0.001)


def self_removing_module(method: str, gateways: list[Gateway], events: list[str]) -> ModulePlan:
    """Create a module that removes itself, and records when the call has returned and when it is
    destroyed.
    """

    class InCallback(Module):
        async def receive(self, message: ModuleMessage) -> None:
            await gateways[0].remove("self-removing")
            events.append("removed")

        async def destroy(self) -> None:
            events.append("destroyed")

    class InRun(Module):
        async def receive(self, message: ModuleMessage) -> None:
            self.received = True

        async def run(self) -> None:
            while not hasattr(self, "received"):  # noqa: ASYNC110
                await trio.sleep(0.001)
            await gateways[0].remove("self-removing")
            events.append("removed")

        async def destroy(self) -> None:
            events.append("destroyed")

    class InThread(BlockingModule):
        def receive(self, message: ModuleMessage) -> None:
            trio.from_thread.run(gateways[0].remove, "self-removing", trio_token=token)
            events.append("removed")

        def destroy(self) -> None:
            events.append("destroyed")

    token = trio.lowlevel.current_trio_token()
    factory = {"callback": InCallback, "run": InRun, "thread": InThread}[method]
    return ModulePlan("self-removing", "x", factory=factory)


@pytest.mark.parametrize("method", ["callback", "run", "thread"])
async def test_module_can_remove_itself_and_free_its_name(method: str) -> None:
    gateways: list[Gateway] = []
    events: list[str] = []
    names: list[tuple[str, ...]] = []
    plan = GatewayPlan(
        (
            ModulePlan.of("other", "tests.gateway.sample_modules:Recorder"),
            self_removing_module(method, gateways, events),
        ),
        ((EVERYONE, "self-removing"),),
    )
    async with open_gateway(plan) as gateway:
        gateways.append(gateway)
        gateway.listen(names.append)
        await gateway.publish(GO)
        await wait_until(lambda: "destroyed" in events)
        assert events == ["removed", "destroyed"]
        assert gateway.names == ("other",)
        assert names == [("other",)]
        assert gateway.statistics().links == ()
        with trio.fail_after(240):
            await gateway.add(
                ModulePlan.of("self-removing", "tests.gateway.sample_modules:Recorder")
            )
        assert gateway.health()["modules"]["self-removing"]["state"] == "running"


async def test_module_can_apply_plan_without_itself() -> None:
    gateways: list[Gateway] = []
    remaining = GatewayPlan((ModulePlan.of("other", "tests.gateway.sample_modules:Recorder"),))

    class Changer(Module):
        async def receive(self, message: ModuleMessage) -> None:
            await gateways[0].apply(remaining)
            applied.set()

    applied = trio.Event()
    plan = GatewayPlan((ModulePlan("changer", "x", factory=Changer),), ((EVERYONE, "changer"),))
    async with open_gateway(plan) as gateway:
        gateways.append(gateway)
        await gateway.publish(GO)
        with trio.fail_after(240):
            await applied.wait()
        assert gateway.names == ("other",)


@pytest.mark.parametrize("change", ["add", "apply"])
async def test_added_module_starts_after_cancelled_add(
    change: str, autojump_clock: trio.testing.MockClock
) -> None:
    class Slow(Module):
        async def start(self) -> None:
            await trio.sleep(30)

        async def receive(self, message: ModuleMessage) -> None:
            received.append(message.content)

    received: list[bytes] = []
    slow, second_module = (
        ModulePlan("slow", "x", factory=Slow),
        ModulePlan("late", "x", factory=Slow),
    )
    async with open_gateway(GatewayPlan()) as gateway:
        with trio.move_on_after(5) as scope:
            if change == "add":
                await gateway.add(slow)
            else:
                await gateway.apply(GatewayPlan((slow, second_module), ((EVERYONE, "slow"),)))
        assert scope.cancelled_caught
        await trio.sleep(60)
        assert {module.state for module in gateway.statistics().modules} == {State.RUNNING}
        assert "slow" in gateway.names
        if change == "add":
            gateway.link(EVERYONE, "slow")
        await gateway.publish(text_message("hello"))
        await gateway.bus.wait_quiet_async()
        assert received == [b"hello"]


async def test_error_in_block_is_not_wrapped() -> None:
    sample_modules.EVENTS.clear()

    async def fail() -> None:
        async with open_gateway(
            GatewayPlan((ModulePlan.of("a", "tests.gateway.sample_modules:Recorder"),))
        ):
            raise ValueError("out of here")

    with pytest.raises(ValueError, match="out of here"):
        await fail()
    assert sample_modules.EVENTS[-1][1] == "destroy"
