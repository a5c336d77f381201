"""A gateway: modules by their names, who hears whom, and what happens when that changes.

Rule 1: all modules are created, then they start in their order, one after the other; they end in
the opposite order. A module that comes later starts at once.
Rule 2: who is told to end first ends what says things by itself, and has what was said heard out.
Rule 3: a change is made whole: what cannot be is refused before anything is touched.
Rule 4: a module that does not get ready is waited for, and told, until somebody wants it to go.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import trio

from simplebus.config.mistakes import ConfigError, unknown
from simplebus.gateway.bus import ModuleBus
from simplebus.gateway.config import EVERYONE, GatewayPlan, ModulePlan, checked_name
from simplebus.gateway.log_rate_limit import Rate
from simplebus.gateway.messages import ModuleMessage
from simplebus.gateway.supervisor import GRACE_S, Life, LifeStatistics, State

log = logging.getLogger("simplebus.gateway")

DRAIN_S = 10.0
"""How long a gateway that ends has its modules hear out what was said."""

IN_ORDER_S = 1.0
"""Modules end in the opposite order as long as that takes no longer, and then all that are left at
once: each has its grace, and however many do not end, all do in little more than one."""

SLOW_S = 10.0
"""After so long it is told which module is waited for."""

Listener = Callable[[tuple[str, ...]], None]


@dataclass(frozen=True, slots=True)
class GatewayStatistics:
    """A snapshot of a gateway."""

    modules: tuple[LifeStatistics, ...]
    """In their order."""
    links: tuple[tuple[str, str], ...]
    """Source and sink of each."""
    published: int
    """Messages that were taken, from anyone."""
    malformed: int
    lost: int
    """Messages that modules were not given as they were removed first."""

    @property
    def failed(self) -> tuple[str, ...]:
        """Names of modules that have failed and wait to be made again."""
        return tuple(each.name for each in self.modules if each.state is State.FAILED)

    def __str__(self) -> str:
        running = sum(each.state is State.RUNNING for each in self.modules)
        delivered = sum(each.delivered for each in self.modules)
        waiting = sum(each.waiting for each in self.modules)
        dropped = sum(each.dropped for each in self.modules) + self.lost
        text = (
            f"{running} of {len(self.modules)} modules run; {self.published:,} messages said, "
            f"{delivered:,} heard, {waiting:,} wait"
        )
        if dropped:
            text += f", {dropped:,} dropped"
        if self.failed:
            text += f"; failed: {', '.join(self.failed)}"
        return text


@asynccontextmanager
async def open_gateway(
    plan: GatewayPlan | None = None, *, drain: float = DRAIN_S, grace: float = GRACE_S
) -> AsyncIterator[Gateway]:
    """A gateway with these modules, all started, for as long as the block lasts. Leaving it has
    them hear out what was said, for `drain` seconds, and ends them in the opposite order. Whoever
    does not end is given up after `grace` seconds; all who do not, at once."""
    raised: Exception | None = None
    async with ModuleBus() as bus, trio.open_nursery() as nursery:
        gateway = Gateway(bus, nursery, grace=grace)
        try:
            if plan is not None:
                await gateway.apply(plan)
            yield gateway
        except Exception as error:  # Not to be wrapped.
            raised = error
        finally:
            await gateway._end(drain)
    if raised is not None:
        raise raised


class Gateway:
    """Modules on a bus. `open_gateway` gives one.

    Every method is called in its event loop. Raises ConfigError for what cannot be, and then
    nothing has changed.
    """

    def __init__(self, bus: ModuleBus, nursery: trio.Nursery, *, grace: float) -> None:
        """What nobody waits for goes on in the nursery."""
        self.bus = bus
        self._nursery = nursery
        self._grace = grace
        self._lives: dict[str, Life] = {}
        """By name, in their order."""
        self._links: dict[tuple[str, str], None] = {}
        self._listeners: list[Listener] = []
        self._changing = trio.Lock()
        self._awaited: Life | None = None
        """Which module a change waits for."""
        self._waiting = trio.CancelScope()
        self._rates: dict[tuple[str, str], Rate] = {}
        self.is_begun = False
        """Whether all modules of its first plan have started."""
        self.is_draining = False

    @property
    def names(self) -> tuple[str, ...]:
        """Of the modules, in their order."""
        return tuple(self._lives)

    def listen(self, listener: Listener) -> None:
        """Have it called with all names whenever modules have come or gone."""
        self._listeners.append(listener)

    async def publish(self, message: ModuleMessage | bytes) -> None:
        """Say something from outside: those hear it that hear everyone."""
        await self.bus.publish_async(message)

    def statistics(self) -> GatewayStatistics:
        """A snapshot."""
        bus = self.bus.statistics()
        return GatewayStatistics(
            tuple(life.statistics() for life in self._lives.values()),
            tuple(self._links),
            bus.published,
            bus.malformed,
            bus.lost,
        )

    def health(self) -> dict[str, Any]:
        """How it is doing, in values that JSON has: whether it is `ready`, and `why` not; what was
        `published`, `malformed` and `lost`; and for each of `modules` by its name what its
        statistics say, with messages a second over the last ten seconds or since this was asked."""
        now, statistics = trio.current_time(), self.statistics()
        modules: dict[str, dict[str, Any]] = {}
        rates: dict[tuple[str, str], Rate] = {}
        for each in statistics.modules:
            told = modules[each.name] = {**asdict(each), "state": each.state.value}
            for what in "delivered", "published":
                rate = rates[each.name, what] = self._rates.get((each.name, what)) or Rate()
                told[f"{what}_per_second"] = rate.at(now, told[what])
        self._rates = rates  # Without those of modules that have gone.
        why = self.problem(statistics)
        return {
            "ready": not why,
            "draining": self.is_draining,
            "why": why,
            "published": statistics.published,
            "malformed": statistics.malformed,
            "lost": statistics.lost,
            "modules": modules,
        }

    def problem(self, statistics: GatewayStatistics | None = None) -> str:
        """Why it is not ready; empty if it is."""
        statistics = statistics or self.statistics()
        if self.is_draining:
            return "it is ending"
        if statistics.failed:
            return f"failed: {', '.join(statistics.failed)}"
        if not self.is_begun:
            return "not all modules have started"
        return ""

    # Changes -------------------------------------------------------------------------------------

    async def add(self, plan: ModulePlan) -> None:
        """A module more, which hears nobody yet. Returns when it has started; when that is given
        up, it starts all the same."""
        async with self._changing:
            self._add(plan)
            try:
                await self._start(self._lives[plan.name])
            finally:
                self._lives[plan.name].may_start.set()
                self._say_changed()

    async def remove(self, name: str) -> None:
        """End a module. Its links go with it. Returns when it has ended; for the module itself, at
        once: it ends when it does nothing more."""
        self._wait_no_more(lambda awaited: awaited.name == name)
        async with self._changing:
            await self._remove(self._life(name))
            self._say_changed()

    async def replace(self, plan: ModulePlan) -> None:
        """Have the module of this name made again, by another plan. It keeps its links and its
        place, and what waits for it."""
        self._wait_no_more(lambda awaited: awaited.name == plan.name)
        async with self._changing:
            life = self._life(plan.name)
            self._check_queue(life, plan)
            life.become(plan)

    def link(self, source: str, sink: str) -> None:
        """Have one module hear another, or EVERYONE else."""
        heard = None if source == EVERYONE else self._life(source)
        hearing = self._life(sink)
        if (source, sink) in self._links:
            raise ConfigError(f"{sink!r} hears {source!r} already")
        for life in (heard, hearing):
            if life is not None and life.is_leaving:
                raise ConfigError(f"{life.plan.name!r} is being removed: it gets no links any more")
        self.bus.link(heard, hearing)
        self._links[source, sink] = None

    def unlink(self, source: str, sink: str) -> None:
        """Undo a link."""
        if (source, sink) not in self._links:
            raise ConfigError(f"{sink!r} does not hear {source!r}")
        heard = None if source == EVERYONE else self._life(source)
        self.bus.unlink(heard, self._life(sink))
        del self._links[source, sink]

    async def apply(self, plan: GatewayPlan) -> None:
        """Become what the plan says: modules that it does not have end, others come, those that it
        has otherwise are replaced, and the rest go on as if nothing had been. Given up before it
        returns, it is done in part."""
        plan.check()
        self.expect(plan)
        async with self._changing:
            before = self.names
            wanted = {each.name: each for each in plan.modules}
            lives = self._lives.values()
            stay = [each for each in lives if _may_become(each, wanted.get(each.plan.name))]
            await self._remove_all([each for each in lives if each not in stay])
            for life in reversed(stay):
                if (new := wanted[life.plan.name]) != life.plan:
                    life.become(new)
            for link in [link for link in self._links if link not in plan.links]:
                self.unlink(*link)
            added = [each for each in plan.modules if each.name not in self._lives]
            try:
                for each in added:
                    self._add(each)
                    await self._wait(self._lives[each.name], "created")
                for link in plan.links:
                    if link not in self._links:
                        self.link(*link)
                for each in added:
                    await self._start(self._lives[each.name])
            finally:
                for each in added:
                    if each.name in self._lives:
                        self._lives[each.name].may_start.set()
            self._lives = {name: self._lives[name] for name in wanted}
            self.is_begun = True
            if self.names != before or added:
                self._say_changed()

    def expect(self, plan: GatewayPlan) -> None:
        """This plan is to be applied next: a change that waits for a module that is not in it goes
        on."""
        self._wait_no_more(lambda awaited: awaited not in plan.modules)

    def _life(self, name: str) -> Life:
        if name not in self._lives:
            raise ConfigError(unknown(name, self._lives or ["no modules"], ""))
        return self._lives[name]

    def _check_queue(self, life: Life, plan: ModulePlan) -> None:
        if not _fits(life, plan):
            raise ConfigError(
                f"{plan.name!r} keeps its queue, places={life.plan.places} and "
                f"full={str(life.plan.full)!r}; remove it and add it for another"
            )

    def _add(self, plan: ModulePlan) -> None:
        checked_name(plan.name)
        if plan.name in self._lives:
            raise ConfigError(f"there is a module {plan.name!r} already")
        life = Life(self.bus, plan)
        life.join()
        self._lives[plan.name] = life

    async def _start(self, life: Life) -> None:
        await self._wait(life, "created")
        life.may_start.set()
        await self._wait(life, "started")

    async def _wait(self, life: Life, what: Literal["created", "started"]) -> None:
        """Until it is, or nobody wants it any more."""
        if life.is_unwanted:
            return
        event = life.created if what == "created" else life.started
        self._awaited = life
        try:
            with trio.CancelScope() as self._waiting:
                with trio.move_on_after(SLOW_S):
                    await event.wait()
                if not event.is_set():
                    name = life.plan.name
                    log.warning("module %r is not %s in %g s: it is waited for", name, what, SLOW_S)
                    await event.wait()
        finally:
            self._awaited = None

    def _wait_no_more(self, is_meant: Callable[[ModulePlan], bool]) -> None:
        """The module that is waited for, if it is meant, is to go: what waits for it goes on."""
        if self._awaited is not None and is_meant(self._awaited.plan):
            self._awaited.is_unwanted = True
            self._waiting.cancel()

    async def _remove_all(self, lives: list[Life]) -> None:
        """In the opposite order, which nobody who does not end holds up for long."""
        async with trio.open_nursery() as nursery:
            with trio.move_on_after(IN_ORDER_S):
                while lives:
                    nursery.start_soon(self._remove, life := lives.pop())
                    if Life.within.get() is not life:  # It would wait for itself.
                        await life.wait_ended()
            while lives:
                nursery.start_soon(self._remove, lives.pop())

    async def _remove(self, life: Life) -> None:
        name = life.plan.name
        for link in [link for link in self._links if name in link]:
            del self._links[link]
        if Life.within.get() is life:  # It would wait for itself.
            self._nursery.start_soon(life.leave, self._grace)
        else:
            await life.leave(self._grace)
        del self._lives[name]  # Only now: whoever is cancelled while it waits may try again.

    def _say_changed(self) -> None:
        for listener in self._listeners:
            try:
                listener(self.names)
            except Exception:
                log.exception("%r failed when it was told which modules there are", listener)
        for life in self._lives.values():
            life.tell(self.names)

    # The end -------------------------------------------------------------------------------------

    async def _end(self, drain: float) -> None:
        self.is_draining = True
        async with self._changing:
            for life in self._lives.values():
                life.stop_running()
            with trio.move_on_after(drain) as scope:
                await self.bus.wait_quiet_async()
            if scope.cancelled_caught:
                log.warning("not all was heard out in %g s: %s", drain, self.statistics())
            await self._remove_all(list(self._lives.values()))


def _may_become(life: Life, plan: ModulePlan | None) -> bool:
    """Whether it stays where this plan is wanted of its name; None for none."""
    return plan is not None and _fits(life, plan)


def _fits(life: Life, plan: ModulePlan) -> bool:
    """Whether a module can be replaced without another queue."""
    return replace(plan, places=life.plan.places, full=life.plan.full) == plan
