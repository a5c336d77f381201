"""One connection to a bus, for as long as a block lasts.

Rule 1: a connection that is lost is not replaced: whoever uses it begins anew, and finds out where
it was.
Rule 2: its loss ends the block at once, whatever is waited for in there: another bus, for example.
"""

from __future__ import annotations

import zlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import trio

from simplebus.bridge.interfaces import TakenOverError
from simplebus.client.aio.connection import ClientConnection
from simplebus.client.aio.transport import Endpoint
from simplebus.client.core.client import ClientCore
from simplebus.client.reconnect import ReconnectSchedule
from simplebus.core.errors import BusConnectionError, Reason, RemoteProtocolError
from simplebus.core.limits import NAME_CHARACTERS_MAX
from simplebus.core.protocol.requests import Auth

CONNECT_SECONDS = 5.0
READ_BYTES = 1024 * 1024
"""What is copied is read by much at a time: each time costs something, however little came."""
_GOODBYE_SECONDS = 1.0
_NEAR = " near"
INSTANCE = "bridge"
"""The one instance of its names: who comes again takes over what is left of its connection."""


def core_of(
    name: str | None,
    *,
    heartbeat: float,
    instance: str = INSTANCE,
    auth: Auth | None = None,
    unconfirmed: int | None = None,
    bus: str = "",
    first: int | None = None,
) -> ClientCore:
    """A client that goes on with the numbers of its name; None for one that only asks."""
    return ClientCore(
        name=name,
        instance=instance if name else "",
        heartbeat_seconds=heartbeat,
        client="simplebus bridge",
        auth=auth,
        first_unconfirmed_number=unconfirmed,
        bus_id=bus,
        first_number=first,
    )


@asynccontextmanager
async def wired(place: Place, core: ClientCore) -> AsyncIterator[Wire]:
    """A connection on which the bus has answered. Raises BusConnectionError, also as soon as the
    connection is lost: the block is cancelled then."""
    now = trio.current_time()
    wire = ClientConnection(
        core,
        [place],
        ReconnectSchedule(1, timeout=CONNECT_SECONDS, reconnect=None, now=now),
        read_bytes=READ_BYTES,
    )
    await wire.open()
    using = trio.CancelScope()
    failure: BaseException | None = None

    async def run() -> None:
        await wire.run()
        using.cancel()

    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(run)
            try:
                with using:
                    yield wire
                check(wire)
            except Exception as error:  # Kept out of the nursery, which would wrap it.
                is_consequence = isinstance(error, BusConnectionError) and wire.end_error is not None
                failure = _lost(wire) if is_consequence else error
            finally:
                seconds = 0.0 if failure is not None else _GOODBYE_SECONDS
                await wire.close(seconds=seconds, shield=True)
    finally:
        if failure is not None:
            raise failure


async def who_is_at(place: Place, *, heartbeat: float, auth: Auth | None) -> tuple[str, bool]:
    """Which bus is there, and whether it is a door of a cluster. Raises BusConnectionError."""
    async with wired(place, core_of(None, heartbeat=heartbeat, auth=auth)) as wire:
        return wire.core.bus_id, wire.core.duplicate_seconds > 0


@asynccontextmanager
async def near_wired(
    place: Place, name: str, *, to: str, heartbeat: float, auth: Auth | None
) -> AsyncIterator[ClientConnection]:
    """A connection that reads for the lane of this name, which leads to this far end. Raises
    BusConnectionError, also while one that is called the same leads elsewhere."""
    core = core_of(
        _near_name(name),
        heartbeat=heartbeat,
        instance=f"{INSTANCE} to {to}"[:NAME_CHARACTERS_MAX],
        auth=auth,
    )
    is_open = False
    try:
        async with wired(place, core) as wire:
            is_open = True
            yield wire
    except BusConnectionError as error:
        why = error.__cause__
        is_taken = isinstance(why, RemoteProtocolError) and why.reason == Reason.NAME_IN_USE
        if is_open or not is_taken:
            raise
        raise BusConnectionError(
            f"{name!r} at {place} leads to another far end than {to}: each bridge has to have a "
            "name of its own there"
        ) from why


def _near_name(lane: str) -> str:
    """What a lane is called where it reads: no longer than a name may be."""
    name = f"{lane}{_NEAR}"
    if len(name) > NAME_CHARACTERS_MAX:
        tag = f" {zlib.crc32(lane.encode()):08x}{_NEAR}"
        name = lane[: NAME_CHARACTERS_MAX - len(tag)] + tag
    return name


def check(wire: Wire) -> None:
    """Raise BusConnectionError when the connection is lost."""
    if wire.end_error is not None:
        raise _lost(wire)


def _lost(wire: Wire) -> BusConnectionError:
    """What became of the connection."""
    why = wire.end.__cause__ if wire.end is not None else None
    found = BusConnectionError(str(wire.end))
    if isinstance(why, RemoteProtocolError) and why.reason == Reason.TAKEN_OVER:
        found = TakenOverError(str(wire.end))
    found.__cause__ = why
    return found
