"""Creates and runs the copiers of some bridges. Copiers do not affect each other."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence

import trio

from simplebus.bridge.build import bus_to_bus
from simplebus.bridge.channel_map import ChannelMap
from simplebus.bridge.copier import Copier, CopierStatistics
from simplebus.bridge.metrics import bridge_snapshot
from simplebus.bridge.settings import (
    BridgeSettings,
    CopiedClass,
    copier_name,
    is_nats_address,
    record_channel,
)
from simplebus.bridge.target.bus import TargetSettings
from simplebus.bridge.transform import SkipReason
from simplebus.client.addresses import Address
from simplebus.client.aio.transport import Endpoint, SocketEndpoint
from simplebus.client.credentials import Access
from simplebus.logs.event_logger import EventLogger
from simplebus.server.local_client import LocalEndpoint
from simplebus.server.run import RunningServer

log = EventLogger("simplebus.bridge")

_LOG_SECONDS = 60.0
_SKIP_LABELS: dict[str, str] = {
    SkipReason.FILTERED: "filtered",
    SkipReason.LOOPED: "looped",
    SkipReason.EXPIRED: "expired",
    SkipReason.REJECTED: "rejected",
    SkipReason.DUPLICATE: "duplicates",
}


def create_copiers(
    bridges: Iterable[BridgeSettings], *, local_server: Endpoint | None = None
) -> list[Copier]:
    """Create the copiers of some bridges.

    Args:
        bridges: Settings of the bridges.
        local_server: The server that runs the bridges; it stands for an empty address.

    Raises:
        ValueError: An address is invalid, or two copiers have the same name.
    """
    copiers: dict[str, Copier] = {}
    for bridge in bridges:
        for copied_class in bridge.classes:
            created = [_create_copier(bridge, copied_class, local_server, back=False)]
            if bridge.is_bidirectional:
                created.append(_create_copier(bridge, copied_class, local_server, back=True))
            for copier in created:
                if copier.name in copiers:
                    raise ValueError(
                        f"two copiers have the name {copier.name!r}: give each bridge its own name"
                    )
                copiers[copier.name] = copier
    return list(copiers.values())


def _create_copier(
    bridge: BridgeSettings, copied_class: CopiedClass, local_server: Endpoint | None, *, back: bool
) -> Copier:
    source_class = copied_class.class_
    target_class = source_class if copied_class.target_class is None else copied_class.target_class
    source, target = bridge.source, bridge.target
    source_access, target_access = bridge.source_access, bridge.target_access
    if back:
        source_class, target_class = target_class, source_class
        source, target, source_access, target_access = target, source, target_access, source_access
    settings = TargetSettings(
        name=copier_name(bridge.name, copied_class.class_, back=back),
        record_channel=record_channel(bridge.name, copied_class.class_, back=back),
        class_=target_class,
        channels=copied_class.channels,
        channel_map=ChannelMap(copied_class.rewrite),
        hops_max=bridge.hops_max,
        has_path=bridge.has_path,
        heartbeat_seconds=bridge.heartbeat_seconds,
        auth=target_access.auth,
    )
    if is_nats_address(source) or is_nats_address(target):
        from simplebus.bridge.build import NatsAccess, bus_to_nats, nats_to_bus

        if is_nats_address(source):
            nats_access = NatsAccess(bridge.nats_credentials, source_access)
            connector = nats_to_bus(
                source,
                _endpoint(target, target_access, local_server),
                settings,
                copied_class,
                nats_access=nats_access,
            )
        else:
            nats_access = NatsAccess(bridge.nats_credentials, target_access)
            endpoint = _endpoint(source, source_access, local_server)
            connector = bus_to_nats(
                endpoint,
                target,
                settings,
                copied_class,
                auth=source_access.auth,
                nats_access=nats_access,
            )
    else:
        connector = bus_to_bus(
            _endpoint(source, source_access, local_server),
            _endpoint(target, target_access, local_server),
            settings,
            class_=source_class,
            start=copied_class.start,
            auth=source_access.auth,
        )
    return Copier(settings.name, connector)


def _endpoint(address: str, access: Access, local_server: Endpoint | None) -> Endpoint:
    if not address and local_server is not None:
        return local_server
    return SocketEndpoint(Address.parse(address), access)


async def run_copiers(
    copiers: Sequence[Copier], *, on_failed: Callable[[Copier], object] = lambda copier: None
) -> None:
    """Copy until cancelled. `on_failed` is called after a fatal configuration error of a copier."""

    async def run_one(copier: Copier) -> None:
        await copier.run()
        on_failed(copier)

    async with trio.open_nursery() as nursery:
        for copier in copiers:
            nursery.start_soon(run_one, copier)
        nursery.start_soon(_log_progress, copiers)


async def _log_progress(copiers: Sequence[Copier]) -> None:
    """Log a line for each copier that made progress, once a minute."""
    previous: dict[str, CopierStatistics] = {}
    while True:
        await trio.sleep(_LOG_SECONDS)
        for copier in copiers:
            current = copier.statistics()
            if current != previous.get(current.name) and (current.copied or current.lag):
                log_progress(current)
            previous[current.name] = current


def log_progress(statistics: CopierStatistics) -> None:
    """Log the state of a copier."""
    log.info(
        "copier.progressed",
        "{status}",
        status=format_status(statistics),
        copier=statistics.name,
        copied=statistics.copied,
        lag=statistics.lag,
        refused=statistics.refused,
        missed=statistics.missed,
        losses=statistics.losses,
    )


def format_status(statistics: CopierStatistics) -> str:
    """Return the state of a copier in one line."""
    lag = "unknown" if statistics.lag is None else f"{statistics.lag:,}"
    parts = [f"copied {statistics.copied:,}", f"lag {lag}"]
    parts += [
        f"{_SKIP_LABELS.get(reason, reason)} {count:,}"
        for reason, count in statistics.skipped.items()
    ]
    if statistics.refused:
        parts.append(f"refused {statistics.refused:,}")
    if statistics.missed:
        parts.append(f"missed {statistics.missed:,}")
    if statistics.losses:
        parts.append(f"connection losses {statistics.losses:,}")
    if not statistics.is_up and statistics.problem:
        parts.append(statistics.problem)
    return f"{statistics.name}: {', '.join(parts)}"


async def serve_with_bridges(
    serve: Callable[..., Awaitable[None]], bridges: Sequence[BridgeSettings]
) -> None:
    """Run `serve`, and the bridges from when the server is up until it has ended."""
    async with trio.open_nursery() as nursery:
        with trio.CancelScope() as copying_scope:

            async def serve_and_end(task_status: trio.TaskStatus[RunningServer]) -> None:
                try:
                    await serve(task_status=task_status)
                finally:
                    copying_scope.cancel()

            running: RunningServer = await nursery.start(serve_and_end)
            endpoint = LocalEndpoint(running.server, "a bridge of this server")
            copiers = create_copiers(bridges, local_server=endpoint)
            if running.monitor is not None:
                running.monitor.extra_snapshots.append(lambda: bridge_snapshot(copiers))
            await run_copiers(copiers)
