"""Ctrl-C while modules are running: the program handles it, and the gateway ends in order."""

from __future__ import annotations

import subprocess
import sys
from textwrap import dedent

import pytest

from tests.support.programs import PATIENCE_SECONDS, ROOT, environment

PROGRAM = """
    import signal

    import trio

    from simplebus.gateway import GatewayPlan, Module, ModuleMessage, ModulePlan
    from simplebus.gateway import open_gateway

    signal.signal(signal.SIGINT, signal.default_int_handler)  # Background jobs ignore it.


    async def press():
        print("goes on", flush=True)
        signal.raise_signal(signal.SIGINT)


    class Interrupted(Module):
        async def receive(self, message):
            if message.content == b"1" and {where!r} == "receive":
                signal.raise_signal(signal.SIGINT)
                print("goes on", flush=True)
            if message.content == b"0" and {where!r} == "a task of its own":
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(press)
            print("heard", message.content.decode(), flush=True)

        async def run(self):
            if {where!r} == "run":
                await trio.sleep(0.05)
                signal.raise_signal(signal.SIGINT)
                print("goes on", flush=True)

        async def destroy(self):
            print("destroyed", flush=True)


    async def main():
        plan = GatewayPlan((ModulePlan("a", "x", factory=Interrupted),), (("*", "a"),))
        async with open_gateway(plan) as gateway:
            for number in range(3):
                await gateway.publish(ModuleMessage(b"%d" % number))
            await trio.sleep_forever()


    try:
        trio.run(main)
    except* KeyboardInterrupt:
        print("interrupted", flush=True)
"""


def run(method: str) -> tuple[list[str], str]:
    """Run the program. Returns its output and its log."""
    found = subprocess.run(
        [sys.executable, "-c", dedent(PROGRAM).format(where=method)],
        capture_output=True,
        timeout=PATIENCE_SECONDS,
        cwd=ROOT,
        env=environment(),
        text=True,
    )
    return found.stdout.split("\n")[:-1], found.stderr


@pytest.mark.parametrize("method", ["receive", "run"])
def test_ctrl_c_ends_gateway_in_order(method: str) -> None:
    lines, log = run(method)
    assert log == ""
    assert sorted(lines[:-2]) == ["goes on", "heard 0", "heard 1", "heard 2"]
    assert lines[-2:] == ["destroyed", "interrupted"]


def test_ctrl_c_in_child_task_ends_gateway_in_order() -> None:
    """KeyboardInterrupt is raised in a task that the module started, and the module loses its
    message.
    """
    lines, log = run("a task of its own")
    assert "module 'a' failed" in log
    assert lines == ["goes on", "destroyed", "heard 1", "heard 2", "destroyed", "interrupted"]
