"""Sends received messages to another bus or to a NATS server, and stores them while that is away.

    module = "uplink"
    hears = ["thermometer"]
    settings = { to = "simplebus://bus.example:8888", class = "readings", data_dir = "uplink" }

Messages are written to a bus in this process, and a copier of the bridge sends them from there,
once and in order. Properties become headers. The channel is `channel`, or the property named by
`channel_property`.

With `data_dir`, messages are stored there: they survive a crash, and may exceed `max_memory`.
Without it they wait in memory. When there is no space, the uplink accepts no messages, so its queue
fills and `full` applies. If storing fails for another reason, such as a disk failure, messages
since the last stored one are lost; the module fails and restarts, and the log contains their
maximum number.

Messages in `data_dir` are also sent after the uplink was renamed, or its `class` changed: the
target keeps using the first name, and messages keep their class.

With `to = "nats://…"` the channel is the subject, and `stream` is the JetStream stream that must
store the messages. A cluster has several addresses, separated by commas. A stream with replicas
gets one message at a time, unless it has `allow_batched`; `under_way` allows more in flight, which
can reorder messages.

Credentials are `user` and `password`, or `token`; TLS settings are `ca`, `cert` and `key`. They can
also be in the file `credentials`, or in the environment as for other clients (`SIMPLEBUS_TOKEN`,
`SIMPLEBUS_TLS_CA`). A NATS server also accepts `seed`.
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
from simplebus.gateway.modules.bus_writer import BusWriter
from simplebus.gateway.modules.uplink_settings import UplinkSettings, UplinkTable, parse
from simplebus.logs.event_logger import EventLogger
from simplebus.logs.sampling import is_logged
from simplebus.memory.bus import MemoryBus

_DURABLE = re.compile(r"bridge (\S+) there ")


@dataclass(frozen=True, slots=True)
class UplinkBacklog:
    """Messages of a class in the local bus that are to be sent."""

    class_: int | str
    name: str
    """Name of the uplink at the target, for this class."""
    waiting: int
    """Number of messages to send."""
    counts_by_other_name: dict[str, int]
    """Number of messages by other uplink names; no uplink sends them."""


def find_backlogs(
    statistics: BrokerStatistics, class_: int | str, name: str
) -> list[UplinkBacklog]:
    """Return the backlog of `class_`, followed by the backlogs of other classes.

    Args:
        statistics: Statistics of the local bus.
        class_: Configured class.
        name: Name for a class that has none yet.
    """
    selected, other_backlogs = UplinkBacklog(class_, name, 0, {}), []
    for cls in statistics.classes:
        if cls.class_id == class_ or (cls.name and cls.name == class_):
            selected = _find_backlog(cls, class_, name)
        elif not dead_letters.is_dead_letter_class(cls.name):
            backlog = _find_backlog(cls, cls.name or cls.class_id, name)
            if backlog.waiting or backlog.counts_by_other_name:
                other_backlogs.append(backlog)
    return [selected, *other_backlogs]


def _find_backlog(statistics: ClassStatistics, class_: int | str, name: str) -> UplinkBacklog:
    waiting = dict(_copier_names(statistics, class_))
    if not waiting:
        return UplinkBacklog(class_, name, statistics.ring.message_count + statistics.spilled, {})
    selected = name if name in waiting else next(iter(waiting))
    count = waiting.pop(selected)
    return UplinkBacklog(
        class_,
        selected,
        count,
        {each: message_count for each, message_count in waiting.items() if message_count},
    )


def _copier_names(statistics: ClassStatistics, class_: int | str) -> Iterator[tuple[str, int]]:
    """Yield the uplink names in use for a class, and how many messages wait for each."""
    for subscription in statistics.subscriptions:
        match = _DURABLE.match(subscription.durable)
        if match and subscription.durable == copier_name(match[1], class_, back=False):
            yield match[1], subscription.in_flight + subscription.waiting


FLUSH_TIMEOUT_S = 5.0
"""Time to send the remaining messages, for an uplink without `data_dir` that ends."""


class Uplink(Module):
    """Uplink module."""

    Settings = UplinkTable
    keeps_running = True

    def __init__(self, bus: AsyncPort, settings: UplinkSettings) -> None:
        super().__init__(bus, settings)
        self._log = EventLogger(bus.log)
        self._table = table = settings.table
        self._access = settings.access
        default_limits, max_memory = Limits(), table.max_memory
        limits = Limits(
            frame_bytes=min(max_memory // 2, default_limits.frame_bytes),
            class_bytes=max_memory,
            dead_letter_bytes=min(max_memory, default_limits.dead_letter_bytes),
            total_bytes=4 * max_memory,
        )
        policy = FullPolicy.SPILL if table.data_dir else FullPolicy.BLOCK
        self._memory = MemoryBus(
            Settings(limits=limits, full_policy=policy), data_dir=table.data_dir or None
        )
        self._writer: BusWriter | None = None
        self._is_open = trio.Event()
        """Set when the writer exists."""
        self._received_count = 0
        """Messages that were accepted."""
        self._rejected_count = 0
        """Messages that cannot be sent."""
        self.copier: Copier | None = None
        """Copier of the configured class; None before it has started."""

    @classmethod
    def parse(cls, raw: dict[str, Any]) -> UplinkSettings:
        """Return checked settings. Raises ValueError."""
        return parse(raw)

    def health(self) -> dict[str, str | int | float]:
        """Return the state of the connection and counts of messages."""
        if self.copier is None or self._writer is None:
            return {"heard": self._received_count, "left_out": self._rejected_count, "is_up": False}
        copier = self.copier.statistics()
        return {
            "heard": self._received_count,
            "left_out": self._rejected_count,
            "kept": self._writer.stored_count,
            "is_up": copier.is_up,
            "problem": self._writer.problem or copier.problem,
            "copied": copier.copied,
            "refused": copier.refused,
            "losses": copier.losses,
        }

    async def receive(self, message: ModuleMessage) -> None:
        await self._is_open.wait()
        assert self._writer is not None
        table = self._table
        channel = message.properties.get(table.channel_property, table.channel)
        options: dict[str, Any] = {"channel": channel} if channel else {}
        if message.properties:
            options["headers"] = dict(message.properties)
        try:
            await self._writer.put(message.content, options)
        except (LocalProtocolError, ValueError) as error:
            self._rejected_count += 1
            if is_logged(self._rejected_count):
                self._log.error(
                    "uplink_message.invalid",
                    "dropped a message that cannot be sent: {error}",
                    error=error,
                )
            return
        self._received_count += 1

    async def run(self) -> None:
        """Copy until all received messages are processed."""
        table = self._table
        async with self._memory as local, trio.open_nursery() as nursery:
            writer = self._writer = BusWriter(
                local, table.class_, bytes_max=table.max_memory // 4, log=self._log
            )
            copiers = self._create_copiers(local.connection.core.bus_id)
            copier = self.copier = copiers[0]
            nursery.start_soon(run_copiers, copiers)
            nursery.start_soon(self._store_messages, writer)
            self._is_open.set()
            await self.bus.wait_stopping()
            with trio.move_on_after(FLUSH_TIMEOUT_S):
                await writer.flush()
                while not table.data_dir and copier.statistics().position < self._received_count:  # noqa: ASYNC110
                    await trio.sleep(0.01)
            if lost_count := self._received_count - (
                writer.stored_count if table.data_dir else copier.statistics().position
            ):
                outcome = "stored" if table.data_dir else "sent"
                self._log.warning(
                    "uplink_messages.lost",
                    "lost {count} messages that were not {outcome}",
                    count=lost_count,
                    outcome=outcome,
                )
            nursery.cancel_scope.cancel()

    async def _store_messages(self, writer: BusWriter) -> None:
        """Run the writer. Its failure ends the module, which restarts."""
        try:
            await writer.run()
        except Exception:
            self._log.error(
                "uplink_store.failed",
                "lost some of the last {count} messages: they could not be stored",
                count=self._received_count - writer.stored_count,
            )
            raise

    def _create_copiers(self, identity: str) -> list[Copier]:
        """Create the copiers of the configured class and of other classes with messages."""
        table, log = self._table, self._log
        name = table.name or f"{self.bus.name}-{identity}"
        backlogs = find_backlogs(self._memory.statistics(), table.class_, name)
        for backlog in backlogs:
            if backlog.name != name:
                log.info(
                    "uplink_name.kept",
                    "using the name {uplink!r} at the target, as when its directory was created",
                    uplink=backlog.name,
                )
            if backlog.class_ != backlogs[0].class_:
                log.warning(
                    "uplink_backlog.sent",
                    "also sending {count} stored messages of class {class_name!r}",
                    count=backlog.waiting,
                    class_name=str(backlog.class_),
                )
            for other_name, count in backlog.counts_by_other_name.items():
                log.warning(
                    "uplink_backlog.ignored",
                    "{count} stored messages of class {class_name!r} belong to the uplink name "
                    "{uplink!r} and are not sent: run an uplink with this directory and that "
                    "name",
                    count=count,
                    class_name=str(backlog.class_),
                    uplink=other_name,
                )
        return [self._create_copier(backlog.class_, backlog.name) for backlog in backlogs]

    def _create_copier(self, class_: int | str, name: str) -> Copier:
        table, access = self._table, self._access
        settings = TargetSettings(
            name=copier_name(name, class_, back=False),
            record_channel=record_channel(name, class_, back=False),
            class_=class_,
            auth=access.auth,
        )
        endpoint = self._memory.place
        if is_nats_address(table.to):
            copied_class = CopiedClass(class_, stream=table.stream, under_way=table.under_way)
            connector = bus_to_nats(
                endpoint, table.to, settings, copied_class, nats_access=self.settings.nats_access
            )
        else:
            target_endpoint = SocketEndpoint(Address.parse(table.to), access)
            connector = bus_to_bus(endpoint, target_endpoint, settings, class_=class_)
        return Copier(settings.name, connector)
