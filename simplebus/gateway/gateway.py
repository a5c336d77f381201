"""Gateway: modules by name, with links between them, and changes while it runs.

All modules are created, then they start one after the other, and they end in the opposite order. A
module that is added later starts at once. On shutdown, the modules that produce messages stop first
and the remaining messages are delivered. A change is checked completely before it is
applied. The gateway waits for a module that is slow to start, and logs it, until the module is to
be removed.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import trio

from simplebus.config.errors import ConfigError, describe_unknown_name
from simplebus.gateway.bus import ModuleBus
from simplebus.gateway.config import EVERYONE, GatewayPlan, ModulePlan, check_module_name
from simplebus.gateway.messages import ModuleMessage
from simplebus.gateway.rate_meter import RateMeter
from simplebus.gateway.supervisor import GRACE_S, LifeStatistics, ModuleSupervisor, State
from simplebus.logs.event_logger import EventLogger

log = EventLogger("simplebus.gateway")

DRAIN_S = 10.0
"""Time to deliver the remaining messages on shutdown."""

ORDERED_STOP_S = 1.0
"""Time in which modules end one after the other. Then the rest end at once, so that modules that do
not end delay the shutdown by little more than one grace time.
"""

SLOW_START_S = 10.0
"""Time after which a module that has not started is logged."""

ChangeListener = Callable[[tuple[str, ...]], None]


@dataclass(frozen=True, slots=True)
class GatewayStatistics:
    """Statistics of a gateway."""

    modules: tuple[LifeStatistics, ...]
    """Statistics of the modules, in their order."""
    links: tuple[tuple[str, str], ...]
    """Source and sink of each link."""
    published: int
    """Messages that were published."""
    malformed: int
    lost: int
    """Messages that were not delivered because their module was removed."""

    @property
    def failed(self) -> tuple[str, ...]:
        """Names of the failed modules, which wait for a restart."""
        return tuple(module.name for module in self.modules if module.state is State.FAILED)

    def __str__(self) -> str:
        running = sum(module.state is State.RUNNING for module in self.modules)
        delivered = sum(module.delivered for module in self.modules)
        waiting = sum(module.waiting for module in self.modules)
        dropped = sum(module.dropped for module in self.modules) + self.lost
        text = (
            f"modules: {running} of {len(self.modules)} running; messages: {self.published:,} "
            f"published, {delivered:,} delivered, {waiting:,} waiting"
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
    """Run a gateway for the length of a block.

    Entering starts the modules of the plan. Leaving delivers the remaining messages and ends the
    modules in the opposite order.

        async with open_gateway(plan) as gateway:
            await gateway.publish(ModuleMessage(b"21.5"))

    Args:
        plan: Modules and links; None for an empty gateway.
        drain: Seconds to deliver the remaining messages.
        grace: Seconds after which a module that does not end is abandoned.

    Yields:
        The gateway.

    Raises:
        ConfigError: The plan cannot be carried out.
    """
    raised: Exception | None = None
    async with ModuleBus() as bus, trio.open_nursery() as nursery:
        gateway = Gateway(bus, nursery, grace=grace)
        try:
            if plan is not None:
                await gateway.apply(plan)
            yield gateway
        except Exception as error:  # Raised outside the nursery, which would wrap it.
            raised = error
        finally:
            await gateway._stop(drain)
    if raised is not None:
        raise raised


class Gateway:
    """Modules on a bus. Create one with `open_gateway`.

    Methods must be called in the gateway's event loop.

    Raises:
        ConfigError: From every method that makes a change, if it is not possible. Nothing has
            changed then.
    """

    def __init__(self, bus: ModuleBus, nursery: trio.Nursery, *, grace: float) -> None:
        """Create a gateway. `nursery` runs tasks that outlive a call."""
        self.bus = bus
        self._nursery = nursery
        self._grace = grace
        self._supervisors: dict[str, ModuleSupervisor] = {}
        """Supervisors by module name, in order."""
        self._links: dict[tuple[str, str], None] = {}
        self._listeners: list[ChangeListener] = []
        self._changing = trio.Lock()
        self._awaited_supervisor: ModuleSupervisor | None = None
        """Module for which a change waits."""
        self._wait_scope = trio.CancelScope()
        self._rates: dict[tuple[str, str], RateMeter] = {}
        self.is_begun = False
        """True once all modules of the first plan have started."""
        self.is_draining = False

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the modules, in order."""
        return tuple(self._supervisors)

    def listen(self, listener: ChangeListener) -> None:
        """Register a callback for added and removed modules.

        Args:
            listener: Called with the names of all modules.
        """
        self._listeners.append(listener)

    async def publish(self, message: ModuleMessage | bytes) -> None:
        """Publish a message from outside, to the modules that receive all messages.

        Args:
            message: Message, or its byte form.
        """
        await self.bus.publish_async(message)

    def statistics(self) -> GatewayStatistics:
        """Return the current statistics."""
        bus = self.bus.statistics()
        return GatewayStatistics(
            tuple(supervisor.statistics() for supervisor in self._supervisors.values()),
            tuple(self._links),
            bus.published,
            bus.malformed,
            bus.lost,
        )

    def health(self) -> dict[str, Any]:
        """Return the health as JSON values.

        Returns:
            `ready`, `draining` and `why` (the reason if not ready), `published`, `malformed`,
            `lost`, and under `modules` by name the statistics of each module, with
            `delivered_per_second` and `published_per_second` over the last ten seconds or since the
            last call.
        """
        now, statistics = trio.current_time(), self.statistics()
        modules: dict[str, dict[str, Any]] = {}
        rates: dict[tuple[str, str], RateMeter] = {}
        for module in statistics.modules:
            entry = modules[module.name] = {**asdict(module), "state": module.state.value}
            for counter in "delivered", "published":
                rate = rates[module.name, counter] = (
                    self._rates.get((module.name, counter)) or RateMeter()
                )
                entry[f"{counter}_per_second"] = rate.update(now, entry[counter])
        self._rates = rates  # The meters of removed modules are dropped.
        problem = self.problem(statistics)
        return {
            "ready": not problem,
            "draining": self.is_draining,
            "why": problem,
            "published": statistics.published,
            "malformed": statistics.malformed,
            "lost": statistics.lost,
            "modules": modules,
        }

    def problem(self, statistics: GatewayStatistics | None = None) -> str:
        """Return the reason why the gateway is not ready; empty if it is.

        Args:
            statistics: Statistics to use; None for the current ones.
        """
        statistics = statistics or self.statistics()
        if self.is_draining:
            return "shutting down"
        if statistics.failed:
            return f"failed: {', '.join(statistics.failed)}"
        if not self.is_begun:
            return "not all modules have started"
        return ""

    # Changes -------------------------------------------------------------------------------------

    async def add(self, plan: ModulePlan) -> None:
        """Add a module without links, and wait until it has started.

        If the call is cancelled, the module still starts.

        Args:
            plan: Plan of the module.

        Raises:
            ConfigError: The name is invalid or in use.
        """
        async with self._changing:
            self._add(plan)
            try:
                await self._start(self._supervisors[plan.name])
            finally:
                self._supervisors[plan.name].may_start.set()
                self._notify_listeners()

    async def remove(self, name: str) -> None:
        """End a module and remove its links. Waits until it has ended.

        A module that removes itself does not wait: it ends when its call returns.

        Args:
            name: Name of the module.

        Raises:
            ConfigError: There is no such module.
        """
        self._stop_waiting(lambda awaited: awaited.name == name)
        async with self._changing:
            await self._remove(self._supervisor(name))
            self._notify_listeners()

    async def replace(self, plan: ModulePlan) -> None:
        """Restart a module with another plan. It keeps its links, its position and its queue.

        Args:
            plan: New plan, with the name of the module.

        Raises:
            ConfigError: There is no such module, or the plan has another queue.
        """
        self._stop_waiting(lambda awaited: awaited.name == plan.name)
        async with self._changing:
            supervisor = self._supervisor(plan.name)
            self._check_queue(supervisor, plan)
            supervisor.restart_with(plan)

    def link(self, source: str, sink: str) -> None:
        """Let one module receive the messages of another one.

        Args:
            source: Name of a module, or EVERYONE.
            sink: Name of a module.

        Raises:
            ConfigError: The link exists, or a module does not exist or is being removed.
        """
        source_supervisor = None if source == EVERYONE else self._supervisor(source)
        sink_supervisor = self._supervisor(sink)
        if (source, sink) in self._links:
            raise ConfigError(f"{sink!r} already receives from {source!r}")
        for supervisor in (source_supervisor, sink_supervisor):
            if supervisor is not None and supervisor.is_stopping:
                raise ConfigError(
                    f"{supervisor.plan.name!r} is being removed: no links can be added"
                )
        self.bus.link(source_supervisor, sink_supervisor)
        self._links[source, sink] = None

    def unlink(self, source: str, sink: str) -> None:
        """Remove a link.

        Args:
            source: Name of a module, or EVERYONE.
            sink: Name of a module.

        Raises:
            ConfigError: There is no such link.
        """
        if (source, sink) not in self._links:
            raise ConfigError(f"there is no link from {source!r} to {sink!r}")
        source_supervisor = None if source == EVERYONE else self._supervisor(source)
        self.bus.unlink(source_supervisor, self._supervisor(sink))
        del self._links[source, sink]

    async def apply(self, plan: GatewayPlan) -> None:
        """Change the gateway to match a plan.

        Modules that are not in the plan end, new ones start, changed ones restart, and the others
        continue undisturbed. A cancelled call leaves the change incomplete.

        Args:
            plan: New plan.

        Raises:
            ConfigError: The plan is invalid.
        """
        plan.check()
        self.expect(plan)
        async with self._changing:
            before = self.names
            plans_by_name = {module.name: module for module in plan.modules}
            supervisors = self._supervisors.values()
            stay = [
                supervisor
                for supervisor in supervisors
                if _can_stay(supervisor, plans_by_name.get(supervisor.plan.name))
            ]
            await self._remove_all(
                [supervisor for supervisor in supervisors if supervisor not in stay]
            )
            for supervisor in reversed(stay):
                if (new := plans_by_name[supervisor.plan.name]) != supervisor.plan:
                    supervisor.restart_with(new)
            for link in [link for link in self._links if link not in plan.links]:
                self.unlink(*link)
            added = [module for module in plan.modules if module.name not in self._supervisors]
            try:
                for module in added:
                    self._add(module)
                    await self._wait(self._supervisors[module.name], "created")
                for link in plan.links:
                    if link not in self._links:
                        self.link(*link)
                for module in added:
                    await self._start(self._supervisors[module.name])
            finally:
                for module in added:
                    if module.name in self._supervisors:
                        self._supervisors[module.name].may_start.set()
            self._supervisors = {name: self._supervisors[name] for name in plans_by_name}
            self.is_begun = True
            if self.names != before or added:
                self._notify_listeners()

    def expect(self, plan: GatewayPlan) -> None:
        """Announce the next plan, so that a change stops waiting for modules that are not in it.

        Args:
            plan: Plan that will be applied next.
        """
        self._stop_waiting(lambda awaited: awaited not in plan.modules)

    def _supervisor(self, name: str) -> ModuleSupervisor:
        if name not in self._supervisors:
            raise ConfigError(describe_unknown_name(name, self._supervisors or ["no modules"], ""))
        return self._supervisors[name]

    def _check_queue(self, supervisor: ModuleSupervisor, plan: ModulePlan) -> None:
        if not _keeps_queue(supervisor, plan):
            raise ConfigError(
                f"{plan.name!r} has a queue with places={supervisor.plan.places} and "
                f"full={str(supervisor.plan.full)!r}; remove it and add it again to change that"
            )

    def _add(self, plan: ModulePlan) -> None:
        check_module_name(plan.name)
        if plan.name in self._supervisors:
            raise ConfigError(f"a module has the name {plan.name!r} already")
        supervisor = ModuleSupervisor(self.bus, plan)
        supervisor.attach()
        self._supervisors[plan.name] = supervisor

    async def _start(self, supervisor: ModuleSupervisor) -> None:
        await self._wait(supervisor, "created")
        supervisor.may_start.set()
        await self._wait(supervisor, "started")

    async def _wait(
        self, supervisor: ModuleSupervisor, state: Literal["created", "started"]
    ) -> None:
        """Wait until the module is created or started, or abandoned."""
        if supervisor.is_abandoned:
            return
        event = supervisor.created if state == "created" else supervisor.started
        self._awaited_supervisor = supervisor
        try:
            with trio.CancelScope() as self._wait_scope:
                with trio.move_on_after(SLOW_START_S):
                    await event.wait()
                if not event.is_set():
                    name = supervisor.plan.name
                    log.warning(
                        "module.delayed",
                        "module {module_name!r} is not {state} after {seconds:g} s; still waiting",
                        module_name=name,
                        state=state,
                        seconds=SLOW_START_S,
                    )
                    await event.wait()
        finally:
            self._awaited_supervisor = None

    def _stop_waiting(self, matches: Callable[[ModulePlan], bool]) -> None:
        """Stop waiting for the awaited module, if `matches` returns True for its plan."""
        if self._awaited_supervisor is not None and matches(self._awaited_supervisor.plan):
            self._awaited_supervisor.is_abandoned = True
            self._wait_scope.cancel()

    async def _remove_all(self, supervisors: list[ModuleSupervisor]) -> None:
        """End modules in the opposite order; after ORDERED_STOP_S the remaining ones at once."""
        async with trio.open_nursery() as nursery:
            with trio.move_on_after(ORDERED_STOP_S):
                while supervisors:
                    nursery.start_soon(self._remove, supervisor := supervisors.pop())
                    # A module that removes all modules must not wait for itself.
                    if ModuleSupervisor.current.get() is not supervisor:
                        await supervisor.wait_ended()
            while supervisors:
                nursery.start_soon(self._remove, supervisors.pop())

    async def _remove(self, supervisor: ModuleSupervisor) -> None:
        name = supervisor.plan.name
        for link in [link for link in self._links if name in link]:
            del self._links[link]
        if ModuleSupervisor.current.get() is supervisor:  # It must not wait for itself.
            self._nursery.start_soon(supervisor.stop, self._grace)
        else:
            await supervisor.stop(self._grace)
        del self._supervisors[name]  # Last, so that a cancelled call can be repeated.

    def _notify_listeners(self) -> None:
        for listener in self._listeners:
            try:
                listener(self.names)
            except Exception:
                log.exception(
                    "gateway_listener.failed",
                    "{listener!r} failed in its callback for changed modules",
                    listener=listener,
                )
        for supervisor in self._supervisors.values():
            supervisor.notify_modules_changed(self.names)

    # The end -------------------------------------------------------------------------------------

    async def _stop(self, drain: float) -> None:
        self.is_draining = True
        async with self._changing:
            for supervisor in self._supervisors.values():
                supervisor.stop_run()
            with trio.move_on_after(drain) as scope:
                await self.bus.wait_quiet_async()
            if scope.cancelled_caught:
                log.warning(
                    "gateway_drain.timed_out",
                    "not all messages were delivered within {seconds:g} s: {status}",
                    seconds=drain,
                    status=self.statistics(),
                )
            await self._remove_all(list(self._supervisors.values()))


def _can_stay(supervisor: ModuleSupervisor, plan: ModulePlan | None) -> bool:
    """Return True if a module can continue, or restart, with this plan; None stands for no plan."""
    return plan is not None and _keeps_queue(supervisor, plan)


def _keeps_queue(supervisor: ModuleSupervisor, plan: ModulePlan) -> bool:
    """Return True if the plan has the same queue as the module."""
    return replace(plan, places=supervisor.plan.places, full=supervisor.plan.full) == plan
