"""Everything at once: modules of all kinds that publish, come, go, fail and remove each other.

Rule 1: chance decides, so what is asserted holds whatever happens: nothing waits for ever, modules
are called one at a time, and in the end nothing is left.
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
    SOON,
    Listener,
    assert_no_threads_left,
    in_thread,
    said,
)

DEEDS = 400
"""How many things outsiders do in a storm."""


class OwnError(BaseException):
    """No Exception."""


@pytest.fixture(autouse=True)
def often() -> Iterator[None]:
    """Threads take turns often, and failures on purpose are not written down."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)
    sys.setswitchinterval(before)


class Storm:
    """One bus, and who is on it."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.bus = ModuleBus()
        self.known: list[object] = []
        """Modules that are on the bus, or were."""
        self.refs: list[weakref.ref[object]] = []
        self.wrong: list[str] = []

    def add(self) -> None:
        chance = self.random
        module = chance.choice((InThread, InThread, InTask))(self)
        self.known.append(module)
        if len(self.known) > 12:
            self.known.pop(0)
        self.refs.append(weakref.ref(module))
        places, full = chance.choice((1, 2, 5)), chance.choice(list(FullQueuePolicy))
        self.bus.add_module(module, places=places, full=full, hears_all=chance.random() < 0.8)

    def act(self, me: object | None) -> None:
        """One thing, as a module in its callback, or from outside. Raises what modules raise."""
        bus, chance, other = self.bus, self.random, self.random.choice(self.known)
        source = chance.choice((me, None))
        long = ModuleMessage(bytes(70_000))
        deeds: list[Callable[[], object]] = [
            *[lambda: bus.publish(chance.choice((said("x"), long)), source=source)] * 6,
            lambda: bus.publish_nowait(chance.choice((said("x"), b"malformed")), source=source),
            *[lambda: bus.remove_module(other)] * 2,
            lambda: bus.remove_module(me),
            *[self.add] * 3,
            lambda: bus.link(chance.choice(self.known), other),
            lambda: bus.unlink(chance.choice((other, None)), other),
            lambda: (bus.statistics(), repr(bus)),
            lambda: (bus.inc_ref(), bus.dec_ref()),
            bus.wait_quiet,
            *[self.fail] * (me is not None),
        ]
        with suppress(ModuleBusError):  # Full, freed, not there: whatever it is, it was told.
            chance.choice(deeds)()

    def fail(self) -> None:
        raise self.random.choice((ValueError, SystemExit, KeyboardInterrupt, OwnError))


class Checked:
    """Sees to it that it is called one at a time."""

    def __init__(self, storm: Storm) -> None:
        self.storm = storm
        self._is_busy = False

    def begin(self) -> None:
        if self._is_busy:
            self.storm.wrong.append("two callbacks of one module at once")
        self._is_busy = True

    def end(self) -> None:
        self._is_busy = False


class InThread(Checked):
    def receive(self, message: ModuleMessage) -> None:
        self.begin()
        try:
            for _ in range(self.storm.random.randrange(3)):
                self.storm.act(self)
        finally:
            self.end()


class InTask(Checked):
    async def receive(self, message: ModuleMessage) -> None:
        storm, self_or_none = self.storm, self.storm.random.choice((self, None))
        self.begin()
        try:
            deed = storm.random.randrange(4)
            if deed == 0:
                await storm.bus.publish_async(said("x"), source=self_or_none)
            elif deed == 1:
                await storm.bus.remove_module_async(storm.random.choice(storm.known))
            elif deed == 2:
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
        for _ in range(DEEDS // 4):
            storm.act(None)

    async def outside_in_tasks() -> None:
        for _ in range(DEEDS // 4):
            try:
                with trio.move_on_after(storm.random.random() * 0.01):
                    await bus.publish_async(said("x"))
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
    threads = [in_thread(outside) for _ in range(3)]
    if seed % 2:
        trio.run(entered)
    if seed % 3:  # Freed while they go on.
        in_thread(lambda: bus.is_freed or bus.destroy()).join()
    for each in threads:
        each.join()
    if not bus.is_freed:
        in_thread(bus.destroy).join()
    assert bus.is_freed
    assert_no_threads_left()
    assert storm.wrong == []
    storm.known.clear()
    del threads, each
    gc.collect()
    assert [ref for ref in storm.refs if ref() is not None] == []


def test_thousand_modules_receive_in_same_order() -> None:
    heard: list[list[bytes]] = [[] for _ in range(1000)]

    def module(number: int) -> Callable[[ModuleMessage], None]:
        return lambda message: heard[number].append(message.content)

    async def run() -> None:
        async with ModuleBus() as bus:
            for number in range(1000):
                bus.add_module(module(number), quick=number >= 100)
            publishing = [in_thread(lambda n=n: publish(bus, n)) for n in range(2)]  # type: ignore[misc]
            for each in publishing:
                await trio.to_thread.run_sync(each.join)
            with trio.fail_after(SOON):
                await bus.wait_quiet_async()

    def publish(bus: ModuleBus, first: int) -> None:
        for number in range(10):
            bus.publish(said(f"{first}{number}"))

    trio.run(run)
    assert len(heard[0]) == 20
    assert all(each == heard[0] for each in heard)
    assert_no_threads_left()


def test_cycle_of_full_queues_is_broken_by_error() -> None:
    """Three modules, each of which publishes to the next more than that has room for."""
    ring: list[Listener] = []
    told: list[int] = []
    all_inside = threading.Barrier(3)

    def flood(me: int, message: ModuleMessage) -> None:
        if message.content != b"go":
            return
        all_inside.wait(SOON)
        for _ in range(8):
            try:
                bus.publish(said("more"), source=ring[me])
            except ModuleBusError:
                told.append(me)

    with ModuleBus() as bus:
        starter = Listener()
        bus.add_module(starter, hears_all=False)
        for me in range(3):
            ring.append(Listener(lambda message, me=me: flood(me, message)))  # type: ignore[misc]
            bus.add_module(ring[me], places=2, hears_all=False)
            bus.link(starter, ring[me])
        for me in range(3):
            bus.link(ring[me], ring[(me + 1) % 3])
        bus.publish(said("go"), source=starter)
        in_thread(bus.wait_quiet).join()
        assert told, "somebody had to be"
        assert sum(len(module.heard) for module in ring) == 3 + 3 * 8 - len(told)
