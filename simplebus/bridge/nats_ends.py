"""The ends of a lane between a bus and a NATS server."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

from simplebus.bridge.far import FarTerms, far_bus
from simplebus.bridge.far_nats import FarNats
from simplebus.bridge.lane import Ends, Open
from simplebus.bridge.nats_wire import nats_wired, shown
from simplebus.bridge.near import NearBus
from simplebus.bridge.near_nats import NearCore, NearStream, check_lane
from simplebus.bridge.settings import Copied
from simplebus.bridge.wires import near_wired
from simplebus.client.link import Place


def to_nats(
    near: Place, servers: str, terms: FarTerms, copied: Copied, credentials: dict[str, str]
) -> Open:
    """From a class of the bus at `near` to subjects of a NATS server."""

    @asynccontextmanager
    async def open() -> AsyncIterator[Ends]:
        beat = terms.heartbeat
        async with (
            near_wired(near, terms.name, to=shown(servers), heartbeat=beat) as wire,
            nats_wired(servers, terms.name, credentials, heartbeat=beat) as nats,
        ):
            here = NearBus(
                wire,
                class_=copied.class_,
                durable=terms.name,
                channels=terms.channels,
                start=copied.start,
            )
            at = await here.open()
            if copied.stream:
                check_lane(nats)
            there = FarNats(
                nats, terms, here=here.identity, class_id=here.class_id, stream=copied.stream
            )
            yield Ends(here, there, at, [])

    return open


def from_nats(
    servers: str, far: Place, terms: FarTerms, copied: Copied, credentials: dict[str, str]
) -> Open:
    """From subjects of a NATS server, or a stream, to a class of the bus at `far`."""
    terms = replace(terms, channels=())  # The server sends no others.

    @asynccontextmanager
    async def open() -> AsyncIterator[Ends]:
        beat = terms.heartbeat
        async with nats_wired(servers, terms.name, credentials, heartbeat=beat) as nats:
            if copied.stream:
                check_lane(nats)
                here: NearCore | NearStream = NearStream(
                    nats,
                    copied.stream,
                    durable=terms.name,
                    subjects=copied.channels,
                    start=copied.start,
                    heartbeat=beat,
                )
            else:
                here = NearCore(nats, copied.channels)
            kept = first = await here.open()
            source = here.memory if copied.stream else servers
            async with far_bus(far, terms.of(source)) as (there, record):
                if isinstance(here, NearStream) and here.is_new:
                    kept = 0  # Its consumer is gone: only the far bus knows where the lane was.
                refusals = await there.resume(here, record, kept=kept)
                at = first if there.at is None else max(kept, there.at)
                yield Ends(here, there, at, refusals)

    return open
