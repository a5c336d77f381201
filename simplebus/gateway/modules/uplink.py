"""Takes what it hears to another bus, or to a NATS server, and keeps it while that is away.

    module = "uplink"
    hears = ["thermometer"]
    settings = { to = "simplebus://bus.example:8888", class = "readings", data_dir = "uplink" }

What it hears goes into a bus in this process, and a bridge copies it from there: each message once,
in order. Properties become headers. `channel` is every message's, unless it has the property that
`channel_property` names. With `data_dir` what was heard is kept there, also past a crash, and what
does not fit into `max_memory` as well; without it, messages wait in memory, and when there is no
room the uplink takes no more: then its queue is full, and `full` decides.
What lies in `data_dir` is sent also by an uplink that is called otherwise, or takes what it hears
to another class: the other end knows it by the name that it had first, and by its class.
When the disk is full it takes no more either, until what is copied has made room. What cannot be
kept otherwise, because the disk fails for example, is gone from the last moment on at which all
was: the module fails, is made again, and the log says how many messages that were at most.
With `to = "nats://…"` the channel is the subject; `stream` is the JetStream stream that has to take
it, without which NATS keeps nothing. Of a cluster several addresses may be given, with commas
between. One message after the other goes into a stream with replicas, unless it has
`allow_batched`; `under_way` is how many more may, and trades some of their order for that.
Who it is there, and whom it trusts over `simplebuss://` or `tls://`, say `user` and `password`, or
`token`, and `ca`, `cert` and `key`; or `credentials`, a file of these; or the environment, as for
other clients (`SIMPLEBUS_TOKEN`, `SIMPLEBUS_TLS_CA`). For NATS there is `seed`, too.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import trio

from simplebus.bridge.build import bus_to_bus, bus_to_nats
from simplebus.bridge.copier import Copier
from simplebus.bridge.runner import run_copiers
from simplebus.bridge.settings import CopiedClass, copier_name, is_nats_address, record_channel
from simplebus.bridge.target.bus import TargetSettings
from simplebus.client.addresses import Address
from simplebus.client.aio.transport import SocketEndpoint
from simplebus.core import dead_letters
from simplebus.core.errors import LocalProtocolError
from simplebus.core.limits import Limits
from simplebus.core.settings import FullPolicy, Settings
from simplebus.core.statistics import BrokerStatistics, ClassStatistics
from simplebus.gateway.messages import ModuleMessage
from simplebus.gateway.module import AsyncPort, Module
from simplebus.gateway.modules.intake import Intake
from simplebus.gateway.modules.uplink_settings import UplinkSettings, UplinkTable, parse
from simplebus.memory.bus import MemoryBus

_DURABLE = re.compile(r"bridge (\S+) there ")


@dataclass(frozen=True, slots=True)
class Kept:
    """A class of the bus in this process."""

    class_: int | str
    name: str
    """What the uplink is called at the other end, for this class."""
    waiting: int
    """Messages that are still to be sent."""
    others: dict[str, int]
    """Other names, under which nobody sends; and how many messages wait for each."""


def kept(found: BrokerStatistics, class_: int | str, name: str) -> list[Kept]:
    """What there is to send: of this class, which comes first, and of others for which something
    waits. `name` is for what has none yet."""
    mine, rest = Kept(class_, name, 0, {}), []
    for each in found.classes:
        if each.class_id == class_ or (each.name and each.name == class_):
            mine = _of(each, class_, name)
        elif not dead_letters.is_dead_letter_class(each.name):
            before = _of(each, each.name or each.class_id, name)
            if before.waiting or before.others:
                rest.append(before)
    return [mine, *rest]


def _of(found: ClassStatistics, class_: int | str, name: str) -> Kept:
    waiting = dict(_names(found, class_))
    if not waiting:
        return Kept(class_, name, found.ring.message_count + found.spilled, {})
    mine = name if name in waiting else next(iter(waiting))
    count = waiting.pop(mine)
    return Kept(class_, mine, count, {each: left for each, left in waiting.items() if left})


def _names(found: ClassStatistics, class_: int | str) -> Iterator[tuple[str, int]]:
    """Under which it was sent, and how many messages wait for each."""
    for each in found.subscriptions:
        match = _DURABLE.match(each.durable)
        if match and each.durable == copier_name(match[1], class_, back=False):
            yield match[1], each.in_flight + each.waiting


GOODBYE_S = 5.0
"""How long an uplink that ends and keeps nothing goes on to send."""


class Uplink(Module):
    """The module."""

    Settings = UplinkTable
    keeps_running = True

    def __init__(self, bus: AsyncPort, settings: UplinkSettings) -> None:
        super().__init__(bus, settings)
        self._table = table = settings.table
        self._access = settings.access
        usual, most = Limits(), table.max_memory
        limits = Limits(
            frame_bytes=min(most // 2, usual.frame_bytes),
            class_bytes=most,
            dead_letter_bytes=min(most, usual.dead_letter_bytes),
            total_bytes=4 * most,
        )
        policy = FullPolicy.SPILL if table.data_dir else FullPolicy.BLOCK
        self._memory = MemoryBus(
            Settings(limits=limits, full_policy=policy), data_dir=table.data_dir or None
        )
        self._intake: Intake | None = None
        self._is_open = trio.Event()
        """Set once there is one."""
        self._count = 0
        """Messages that it was given."""
        self._left_out = 0
        """Those beside these that cannot be sent."""
        self.lane: Copier | None = None
        """What copies them, once that has begun."""

    @classmethod
    def parse(cls, raw: dict[str, Any]) -> UplinkSettings:
        """Settings that make sense. Raises ValueError."""
        return parse(raw)

    def health(self) -> dict[str, str | int | float]:
        """Whether the other end is there, and how far it is with what was heard."""
        if self.lane is None or self._intake is None:
            return {"heard": self._count, "left_out": self._left_out, "is_up": False}
        lane = self.lane.statistics()
        return {
            "heard": self._count,
            "left_out": self._left_out,
            "kept": self._intake.kept,
            "is_up": lane.is_up,
            "problem": self._intake.problem or lane.problem,
            "copied": lane.copied,
            "refused": lane.refused,
            "losses": lane.losses,
        }

    async def receive(self, message: ModuleMessage) -> None:
        await self._is_open.wait()
        assert self._intake is not None
        table = self._table
        channel = message.properties.get(table.channel_property, table.channel)
        about: dict[str, Any] = {"channel": channel} if channel else {}
        if message.properties:
            about["headers"] = dict(message.properties)
        try:
            await self._intake.put(message.content, about)
        except (LocalProtocolError, ValueError) as error:
            self._left_out += 1
            self.bus.log.error("a message cannot be sent, and is left out: %s", error)
            return
        self._count += 1

    async def run(self) -> None:
        """Copy, until everything was heard that there was."""
        table = self._table
        async with self._memory as local, trio.open_nursery() as nursery:
            intake = self._intake = Intake(
                local, table.class_, bytes_max=table.max_memory // 4, log=self.bus.log
            )
            lanes = self._lanes(local.connection.core.bus_id)
            lane = self.lane = lanes[0]
            nursery.start_soon(run_copiers, lanes)
            nursery.start_soon(self._keep, intake)
            self._is_open.set()
            await self.bus.wait_stopping()
            with trio.move_on_after(GOODBYE_S):
                await intake.flushed()
                while not table.data_dir and lane.statistics().position < self._count:  # noqa: ASYNC110
                    await trio.sleep(0.01)
            if left := self._count - (intake.kept if table.data_dir else lane.statistics().position):
                what = "kept" if table.data_dir else "sent"
                self.bus.log.warning("%d messages are lost: they were not %s", left, what)
            nursery.cancel_scope.cancel()

    async def _keep(self, intake: Intake) -> None:
        """What can never be kept ends the module, which is made again."""
        try:
            await intake.run()
        except Exception:
            self.bus.log.error(
                "of the last %d messages some could not be kept, and are gone",
                self._count - intake.kept,
            )
            raise

    def _lanes(self, identity: str) -> list[Copier]:
        """That of what it hears, and those of what lies in its directory for other classes."""
        table, log = self._table, self.bus.log
        name = table.name or f"{self.bus.name}-{identity}"
        found = kept(self._memory.statistics(), table.class_, name)
        for each in found:
            if each.name != name:
                log.info("it is called %r there, as it was when its directory began", each.name)
            if each.class_ != found[0].class_:
                log.warning(
                    "%d messages that were heard for class %r are sent, too, to that one",
                    each.waiting,
                    each.class_,
                )
            for other, count in each.others.items():
                log.warning(
                    "%d messages of class %r are kept for %r, and nobody sends them: an uplink "
                    "with this directory and this name does",
                    count,
                    each.class_,
                    other,
                )
        return [self._lane(each.class_, each.name) for each in found]

    def _lane(self, class_: int | str, name: str) -> Copier:
        table, access = self._table, self._access
        terms = TargetSettings(
            name=copier_name(name, class_, back=False),
            record_channel=record_channel(name, class_, back=False),
            class_=class_,
            auth=access.auth,
        )
        here = self._memory.place
        if is_nats_address(table.to):
            copied = CopiedClass(class_, stream=table.stream, under_way=table.under_way)
            open_ends = bus_to_nats(here, table.to, terms, copied, nats_access=self.settings.nats_access)
        else:
            place = SocketEndpoint(Address.parse(table.to), access)
            open_ends = bus_to_bus(here, place, terms, class_=class_)
        return Copier(terms.name, open_ends)
