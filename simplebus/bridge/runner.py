"""All lanes of some bridges, as long as they are to run, and what they say of themselves.

Rule 1: lanes know nothing of one another: one that waits holds up no other.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence

import trio

from simplebus.bridge.build import between
from simplebus.bridge.channel_map import Renaming
from simplebus.bridge.copier import Copier, CopierStatistics
from simplebus.bridge.metrics import facts_of
from simplebus.bridge.settings import BridgeSettings, CopiedClass, is_nats_address, copier_name, record_channel
from simplebus.bridge.target.bus import FarTerms
from simplebus.client.addresses import Address
from simplebus.client.aio.transport import Endpoint, SocketEndpoint
from simplebus.client.credentials import Access
from simplebus.server.local_client import LocalEndpoint
from simplebus.server.run import RunningServer

log = logging.getLogger("simplebus.bridge")

_TELL_SECONDS = 60.0


def lanes(bridges: Iterable[BridgeSettings], *, here: Place | None = None) -> list[Copier]:
    """The lanes of these bridges; `here` is the server they are part of.

    Raises ValueError for what is no address, and for two lanes of one name.
    """
    found: dict[str, Copier] = {}
    for bridge in bridges:
        for copied in bridge.classes:
            made = [_lane(bridge, copied, here, back=False)]
            if bridge.is_bidirectional:
                made.append(_lane(bridge, copied, here, back=True))
            for lane in made:
                if lane.name in found:
                    raise ValueError(f"there are two of {lane.name!r}: name bridges apart")
                found[lane.name] = lane
    return list(found.values())


def _lane(bridge: BridgeSettings, copied: CopiedClass, here: Place | None, *, back: bool) -> Copier:
    class_, to = copied.class_, copied.class_ if copied.target_class is None else copied.target_class
    near, far = bridge.source, bridge.target
    near_access, far_access = bridge.source_access, bridge.target_access
    if back:
        class_, to = to, class_
        near, far, near_access, far_access = far, near, far_access, near_access
    terms = FarTerms(
        name=copier_name(bridge.name, copied.class_, back=back),
        channel=record_channel(bridge.name, copied.class_, back=back),
        class_=to,
        channels=copied.channels,
        renaming=Renaming(copied.rewrite),
        hops=bridge.hops_max,
        path=bridge.has_path,
        heartbeat=bridge.heartbeat_seconds,
        auth=far_access.auth,
    )
    if is_nats_address(near) or is_nats_address(far):
        from simplebus.bridge.build import NatsAccess, from_nats, to_nats

        if is_nats_address(near):
            shown = NatsAccess(bridge.nats_credentials, near_access)
            way = from_nats(near, _place(far, far_access, here), terms, copied, shown=shown)
        else:
            shown = NatsAccess(bridge.nats_credentials, far_access)
            place = _place(near, near_access, here)
            way = to_nats(place, far, terms, copied, auth=near_access.auth, shown=shown)
    else:
        way = between(
            _place(near, near_access, here),
            _place(far, far_access, here),
            terms,
            class_=class_,
            start=copied.start,
            auth=near_access.auth,
        )
    return Copier(terms.name, way)


def _place(address: str, access: Access, here: Place | None) -> Place:
    if not address and here is not None:
        return here
    return SocketEndpoint(Address.parse(address), access)


async def run(
    lanes: Sequence[Copier], *, ended: Callable[[Copier], object] = lambda lane: None
) -> None:
    """Copy until cancelled. `ended` is called with a lane that can never work."""

    async def run_one(lane: Copier) -> None:
        await lane.run()
        ended(lane)

    async with trio.open_nursery() as nursery:
        for lane in lanes:
            nursery.start_soon(run_one, lane)
        nursery.start_soon(_tell, lanes)


async def _tell(lanes: Sequence[Copier]) -> None:
    """A line in the log for each lane that has moved, now and then."""
    before: dict[str, CopierStatistics] = {}
    while True:
        await trio.sleep(_TELL_SECONDS)
        for lane in lanes:
            now = lane.statistics()
            if now != before.get(now.name) and (now.copied or now.lag):
                log.info("%s", line_of(now))
            before[now.name] = now


def line_of(found: CopierStatistics) -> str:
    """What there is to say of a lane, in one line."""
    behind = "nobody knows how many" if found.lag is None else f"{found.lag:,}"
    parts = [f"{found.copied:,} copied", f"{behind} behind"]
    parts += [f"{count:,} {reason.replace('_', ' ')}" for reason, count in found.left.items()]
    if found.refused:
        parts.append(f"{found.refused:,} refused")
    if found.missed:
        parts.append(f"{found.missed:,} missed")
    if found.losses:
        parts.append(f"{found.losses:,} times lost")
    if not found.is_up and found.problem:
        parts.append(found.problem)
    return f"{found.name}: {', '.join(parts)}"


async def serve_with_bridges(
    serve: Callable[..., Awaitable[None]], bridges: Sequence[BridgeSettings]
) -> None:
    """What `serve` does, and the bridges, from when it is up until it has ended."""
    async with trio.open_nursery() as nursery:
        with trio.CancelScope() as copying:

            async def serve_and_end(task_status: trio.TaskStatus[RunningServer]) -> None:
                try:
                    await serve(task_status=task_status)
                finally:
                    copying.cancel()

            up: RunningServer = await nursery.start(serve_and_end)
            made = lanes(bridges, here=LocalEndpoint(up.engine, "a bridge of this server"))
            if up.watch is not None:
                up.watch.more.append(lambda: facts_of(made))
            await run(made)
