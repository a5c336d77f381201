"""One connection to a bus, for the length of a block.

A lost connection is not replaced: it cancels the block at once, even if the block waits for
something else. The caller reconnects and reads the position of the copier from both ends.
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
"""Receive buffer size. Large reads are faster: each read has a fixed cost."""
_CLOSE_TIMEOUT_SECONDS = 1.0
_SOURCE_SUFFIX = " near"
INSTANCE = "bridge"
"""Instance of every copier's publisher name, so that a new connection takes over the old one."""


def create_client_core(
    name: str | None,
    *,
    heartbeat: float,
    instance: str = INSTANCE,
    auth: Auth | None = None,
    first_unconfirmed: int | None = None,
    bus_id: str = "",
    first_number: int | None = None,
) -> ClientCore:
    """Create a client that continues the numbering of `name`; None for a client that only reads.

    `heartbeat` is in seconds.
    """
    return ClientCore(
        name=name,
        instance=instance if name else "",
        heartbeat_seconds=heartbeat,
        client="simplebus bridge",
        auth=auth,
        first_unconfirmed_number=first_unconfirmed,
        bus_id=bus_id,
        first_number=first_number,
    )


@asynccontextmanager
async def connect(endpoint: Endpoint, core: ClientCore) -> AsyncIterator[ClientConnection]:
    """Connect to a bus and complete the handshake.

    Raises BusConnectionError if that fails, and as soon as the connection is lost: the block is
    cancelled then.
    """
    now = trio.current_time()
    connection = ClientConnection(
        core,
        [endpoint],
        ReconnectSchedule(1, timeout=CONNECT_SECONDS, reconnect=None, now=now),
        read_bytes=READ_BYTES,
    )
    await connection.open()
    scope = trio.CancelScope()
    failure: BaseException | None = None

    async def run() -> None:
        await connection.run()
        scope.cancel()

    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(run)
            try:
                with scope:
                    yield connection
                check_connected(connection)
            except Exception as error:  # Raised outside the nursery, which would wrap it.
                is_consequence = (
                    isinstance(error, BusConnectionError) and connection.end_error is not None
                )
                failure = _connection_error(connection) if is_consequence else error
            finally:
                seconds = 0.0 if failure is not None else _CLOSE_TIMEOUT_SECONDS
                await connection.close(seconds=seconds, shield=True)
    finally:
        if failure is not None:
            raise failure


async def probe_bus(endpoint: Endpoint, *, heartbeat: float, auth: Auth | None) -> tuple[str, bool]:
    """Return the identity of a bus, and True if it is a stateless server.

    `heartbeat` is in seconds. Raises BusConnectionError.
    """
    async with connect(
        endpoint, create_client_core(None, heartbeat=heartbeat, auth=auth)
    ) as connection:
        return connection.core.bus_id, connection.core.duplicate_seconds > 0


@asynccontextmanager
async def connect_source(
    endpoint: Endpoint, name: str, *, target_id: str, heartbeat: float, auth: Auth | None
) -> AsyncIterator[ClientConnection]:
    """Connect to the source of the copier `name`, which writes to the target `target_id`.

    `heartbeat` is in seconds. Raises BusConnectionError, also while a copier with the same name and
    another target is connected there.
    """
    core = create_client_core(
        _source_publisher_name(name),
        heartbeat=heartbeat,
        instance=f"{INSTANCE} to {target_id}"[:NAME_CHARACTERS_MAX],
        auth=auth,
    )
    is_open = False
    try:
        async with connect(endpoint, core) as connection:
            is_open = True
            yield connection
    except BusConnectionError as error:
        cause = error.__cause__
        is_name_in_use = (
            isinstance(cause, RemoteProtocolError) and cause.reason == Reason.NAME_IN_USE
        )
        if is_open or not is_name_in_use:
            raise
        raise BusConnectionError(
            f"{name!r} at {endpoint} already copies to another target than {target_id}: give each "
            "bridge its own name"
        ) from cause


def _source_publisher_name(copier_name: str) -> str:
    """Return the name that a copier uses at its source, shortened to the allowed length."""
    name = f"{copier_name}{_SOURCE_SUFFIX}"
    if len(name) > NAME_CHARACTERS_MAX:
        tag = f" {zlib.crc32(copier_name.encode()):08x}{_SOURCE_SUFFIX}"
        name = copier_name[: NAME_CHARACTERS_MAX - len(tag)] + tag
    return name


def check_connected(connection: ClientConnection) -> None:
    """Raise BusConnectionError if the connection is lost."""
    if connection.end_error is not None:
        raise _connection_error(connection)


def _connection_error(connection: ClientConnection) -> BusConnectionError:
    """Return the reason of the loss, as TakenOverError if another bridge took over."""
    cause = connection.end_error.__cause__ if connection.end_error is not None else None
    error = BusConnectionError(str(connection.end_error))
    if isinstance(cause, RemoteProtocolError) and cause.reason == Reason.TAKEN_OVER:
        error = TakenOverError(str(connection.end_error))
    error.__cause__ = cause
    return error
