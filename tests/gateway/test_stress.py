"""Stress test: modules of all kinds publish, fail, and add and remove each other at random.

The assertions hold for every order of events: nothing waits forever, a module is in one
callback at a time, and nothing is left in the end.
"""

from __future__ import annotations

import gc
import logging
import random
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest
import trio

from simplebus.gateway import FullQueuePolicy, ModuleBus, ModuleBusError, ModuleMessage
from tests.gateway.recording_modules import (
    TIMEOUT_SECONDS,
    Listener,
    assert_no_threads_left,
    run_in_thread,
    text_message,
)

OUTSIDE_ACTIONS = 400
"""Number of actions from outside the modules."""


class OwnError(BaseException):
    """Error that is no Exception."""


@pytest.fixture(autouse=True)
def frequent_switches() -> Iterator[None]:
    """Switch threads often, and do not log the intended failures."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)
    sys.setswitchinterval(before)


class Storm:
    """A bus with random modules."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.bus = ModuleBus()
        self.modules: list[object] = []
        """Modules that are on the bus, or were."""
        self.refs: list[weakref.ref[object]] = []
        self.errors: list[str] = []

    def add(self) -> None:
        rng = self.random
        module = rng.choice((ThreadModule, ThreadModule, TaskModule))(self)
        self.modules.append(module)
        if len(self.modules) > 12:
            self.modules.pop(0)
        self.refs.append(weakref.ref(module))
        places, full = rng.choice((1, 2, 5)), rng.choice(list(FullQueuePolicy))
        self.bus.add_module(module, places=places, full=full, hears_all=rng.random() < 0.8)

    def act(self, me: object | None) -> None:
        """Do one random action as the module `me` in its callback, or from outside. May raise any
        error.
        """
        bus, rng, module = self.bus, self.random, self.random.choice(self.modules)
        source = rng.choice((me, None))
        long = ModuleMessage(bytes(70_000))
        actions: list[Callable[[], object]] = [
            *[lambda: bus.publish(rng.choice((text_message("x"), long)), source=source)] * 6,
            lambda: bus.publish_nowait(
                rng.choice((text_message("x"), b"malformed")), source=source
            ),
            *[lambda: bus.remove_module(module)] * 2,
            lambda: bus.remove_module(me),
            *[self.add] * 3,
            lambda: bus.link(rng.choice(self.modules), module),
            lambda: bus.unlink(rng.choice((module, None)), module),
            lambda: (bus.statistics(), repr(bus)),
            lambda: (bus.inc_ref(), bus.dec_ref()),
            bus.wait_quiet,
            *[self.fail] * (me is not None),
        ]
        # The queue is full, the bus is freed, or the module is gone.
        with suppress(ModuleBusError):
            rng.choice(actions)()

    def fail(self) -> None:
        raise self.random.choice((ValueError, SystemExit, KeyboardInterrupt, OwnError))


class ExclusiveModule:
    """Module that reports two callbacks at the same time."""

    def __init__(self, storm: Storm) -> None:
        self.storm = storm
        self._is_busy = False

    def begin(self) -> None:
        if self._is_busy:
            self.storm.errors.append("two callbacks of one module at once")
        self._is_busy = True

    def end(self) -> None:
        self._is_busy = False


class ThreadModule(ExclusiveModule):
    def receive(self, message: ModuleMessage) -> None:
        self.begin()
        try:
            for _ in range(self.storm.random.randrange(3)):
                self.storm.act(self)
        finally:
            self.end()


class TaskModule(ExclusiveModule):
    async def receive(self, message: ModuleMessage) -> None:
        storm, self_or_none = self.storm, self.storm.random.choice((self, None))
        self.begin()
        try:
            action = storm.random.randrange(4)
            if action == 0:
                await storm.bus.publish_async(text_message("x"), source=self_or_none)
            elif action == 1:
                await storm.bus.remove_module_async(storm.random.choice(storm.modules))
            elif action == 2:
                raise SystemExit
            await trio.lowlevel.checkpoint()
        except ModuleBusError:
            pass
        finally:
            self.end()


@pytest.mark.parametrize("seed", range(6))
def test_no_deadlock_and_no_leftovers(seed: int) -> None:
    storm = Storm(seed)
    bus = storm.bus

    def outside() -> None:
        for _ in range(OUTSIDE_ACTIONS // 4):
            storm.act(None)

    async def outside_in_tasks() -> None:
        for _ in range(OUTSIDE_ACTIONS // 4):
            try:
                with trio.move_on_after(storm.random.random() * 0.01):
                    await bus.publish_async(text_message("x"))
                with trio.move_on_after(storm.random.random() * 0.001):
                    await bus.wait_quiet_async()
            except ModuleBusError:
                pass

    async def entered() -> None:
        async with bus:
            bus.inc_ref()
            storm.add()
            await outside_in_tasks()

    for _ in range(4):
        storm.add()
    threads = [run_in_thread(outside) for _ in range(3)]
    if seed % 2:
        trio.run(entered)
    if seed % 3:  # The bus is freed while the modules are active.
        run_in_thread(lambda: bus.is_freed or bus.destroy()).join()
    for each in threads:
        each.join()
    if not bus.is_freed:
        run_in_thread(bus.destroy).join()
    assert bus.is_freed
    assert_no_threads_left()
    assert storm.errors == []
    storm.modules.clear()
    del threads, each
    gc.collect()
    assert [ref for ref in storm.refs if ref() is not None] == []


def test_thousand_modules_receive_in_same_order() -> None:
    received: list[list[bytes]] = [[] for _ in range(1000)]

    def module(number: int) -> Callable[[ModuleMessage], None]:
        return lambda message: received[number].append(message.content)

    async def run() -> None:
        async with ModuleBus() as bus:
            for number in range(1000):
                bus.add_module(module(number), quick=number >= 100)
            publishing = [run_in_thread(lambda n=n: publish(bus, n)) for n in range(2)]  # type: ignore[misc]
            for each in publishing:
                await trio.to_thread.run_sync(each.join)
            with trio.fail_after(TIMEOUT_SECONDS):
                await bus.wait_quiet_async()

    def publish(bus: ModuleBus, first: int) -> None:
        for number in range(10):
            bus.publish(text_message(f"{first}{number}"))

    trio.run(run)
    assert len(received[0]) == 20
    assert all(each == received[0] for each in received)
    assert_no_threads_left()


def test_cycle_of_full_queues_is_broken_by_error() -> None:
    """Each of three modules publishes more to the next one than fits into its queue."""
    ring: list[Listener] = []
    blocked: list[int] = []
    all_inside = threading.Barrier(3)

    def flood(me: int, message: ModuleMessage) -> None:
        if message.content != b"go":
            return
        all_inside.wait(TIMEOUT_SECONDS)
        for _ in range(8):
            try:
                bus.publish(text_message("more"), source=ring[me])
            except ModuleBusError:
                blocked.append(me)

    with ModuleBus() as bus:
        starter = Listener()
        bus.add_module(starter, hears_all=False)
        for me in range(3):
            ring.append(Listener(lambda message, me=me: flood(me, message)))  # type: ignore[misc]
            bus.add_module(ring[me], places=2, hears_all=False)
            bus.link(starter, ring[me])
        for me in range(3):
            bus.link(ring[me], ring[(me + 1) % 3])
        bus.publish(text_message("go"), source=starter)
        run_in_thread(bus.wait_quiet).join()
        assert blocked, "no module was blocked"
        assert sum(len(module.received) for module in ring) == 3 + 3 * 8 - len(blocked)
