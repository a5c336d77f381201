"""The ends of a lane between two buses."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from simplebus.bridge.ends import HopelessError
from simplebus.bridge.far import FarBus, FarTerms, far_bus
from simplebus.bridge.far_door import FarDoor, far_door
from simplebus.bridge.lane import Begin, Ends, Way
from simplebus.bridge.looked import Looked, life_of
from simplebus.bridge.near import NearBus, near_alone
from simplebus.bridge.wires import near_wired, who_is_at
from simplebus.client.link import Place
from simplebus.client.wire import Wire
from simplebus.core.requests import Auth


def between(
    near: Place,
    far: Place,
    terms: FarTerms,
    *,
    class_: int | str,
    start: str = "waiting",
    auth: Auth | None = None,
) -> Way:
    """What opens both ends: `class_` of the bus at `near`, where the lane is who `auth` says, and
    the far end of these terms."""
    looked = Looked()
    beat = terms.heartbeat

    def near_bus(wire: Wire) -> NearBus:
        return NearBus(
            wire,
            class_=class_,
            durable=terms.name,
            channels=terms.channels,
            start=start,
            place=near,
        )

    @asynccontextmanager
    async def open(begin: Begin) -> AsyncIterator[Ends]:
        to, is_door = await who_is_at(far, heartbeat=beat, auth=terms.auth)
        async with near_wired(near, terms.name, to=to, heartbeat=beat, auth=auth) as wire:
            here = near_bus(wire)
            if is_door:
                begin(here, kept := await here.open())
                doubts = await looked.again(here, terms.name)
                whose = terms.of(life_of(wire.core) + looked.era)
                async with far_door(far, whose, here, kept, looked) as door:
                    check_apart(here, door)
                    yield Ends(here, door, kept, [], doubts)
                return
            async with far_bus(far, terms.of(wire.core.bus_id)) as (there, record):
                begin(here, kept := await here.open())
                check_apart(here, there)
                refusals = await there.resume(here, record, kept=kept)
                at = kept if there.at is None else max(kept, there.at)
                yield Ends(here, there, at, refusals, there.doubts)

    def check_apart(here: NearBus, there: FarBus | FarDoor) -> None:
        if (here.identity, here.class_id) == (there.identity, there.class_id):
            raise HopelessError(
                f"{near} and {far} are the same bus, {here.identity}: "
                f"class {class_!r} is not copied onto itself; have it lead to another bus, or into "
                "another class"
            )

    return Way(open, near_alone(near, near_bus, heartbeat=beat, auth=auth))
