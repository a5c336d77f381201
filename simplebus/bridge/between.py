"""The ends of a lane between two buses."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from simplebus.bridge.far import FarTerms, far_bus
from simplebus.bridge.lane import Ends, Open
from simplebus.bridge.near import NearBus
from simplebus.bridge.wires import identity_at, near_wired
from simplebus.client.link import Place
from simplebus.core.errors import BusConnectionError
from simplebus.core.requests import Auth


def between(
    near: Place,
    far: Place,
    terms: FarTerms,
    *,
    class_: int | str,
    start: str = "waiting",
    auth: Auth | None = None,
    clock: Callable[[], float] = time.time,
) -> Open:
    """What opens both ends: `class_` of the bus at `near`, where the lane is who `auth` says, and
    the far end of these terms."""

    @asynccontextmanager
    async def open() -> AsyncIterator[Ends]:
        beat = terms.heartbeat
        to = await identity_at(far, heartbeat=beat, auth=terms.auth)
        async with (
            near_wired(near, terms.name, to=to, heartbeat=beat, auth=auth) as wire,
            far_bus(far, terms.of(wire.core.bus_id)) as (there, record),
        ):
            here = NearBus(
                wire,
                class_=class_,
                durable=terms.name,
                channels=terms.channels,
                start=start,
                clock=clock,
                place=near,
            )
            kept = await here.open()
            if (here.identity, here.class_id) == (there.identity, there.class_id):
                raise BusConnectionError(
                    f"{near} and {far} are the same bus, {here.identity}: "
                    f"class {class_!r} is not copied onto itself"
                )
            refusals = await there.resume(here, record, kept=kept)
            at = kept if there.at is None else max(kept, there.at)
            yield Ends(here, there, at, refusals, there.doubts)

    return open
