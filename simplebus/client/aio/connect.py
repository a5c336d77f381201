"""Connecting under trio and asyncio, and leaving.

Rule 1: a program meets a bus, wherever it is, through `open_bus`: `connect` is that for addresses.
Rule 2: leaving the block loses nothing in silence: what was not confirmed, what was refused and not
told yet, and what handlers raised, comes as an error, unless the block itself raises.
Rule 3: what ends a program, and what closes a generator, leaves as it came, in no group of errors.
"""

from __future__ import annotations

import secrets
import ssl
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager

import anyio

from simplebus.client import addresses
from simplebus.client.aio.bus import Bus
from simplebus.client.aio.connection import ClientConnection
from simplebus.client.aio.transport import Endpoint, SocketEndpoint
from simplebus.client.context_guard import guarded_async_context
from simplebus.client.core import arguments
from simplebus.client.core.client import ClientCore
from simplebus.client.credentials import Access, resolve_access
from simplebus.client.handler_errors import raise_errors
from simplebus.client.message_types import DEFAULT_REGISTRY, Registry
from simplebus.client.reconnect import Schedule
from simplebus.core.limits import (
    CLOSE_SECONDS,
    CLOSE_SECONDS_FAILED,
    HEARTBEAT_SECONDS_MAX,
    NAME_CHARACTERS_MAX,
    Limits,
)
from simplebus.core.protocol.requests import Auth

# What a bus says to a client that connects has room in frames of this length.
_FRAME_BYTES_LEAST = 512
_FRAME_BYTES_MOST = 1 << 40


def client_core(
    *,
    name: str | None,
    heartbeat: float,
    frame_bytes: int,
    instance: str | None = None,
    auth: Auth | None = None,
) -> ClientCore:
    """The core of a client, with a name and an instance of its own making if it has none."""
    if name is None:
        name = f"anonymous-{secrets.token_hex(8)}"
    if not 0 < len(arguments.check_text("name", name)) <= NAME_CHARACTERS_MAX:
        raise ValueError(f"name must be of 1 to {NAME_CHARACTERS_MAX} characters, got {name!r}")
    arguments.check_seconds("heartbeat", heartbeat, maximum=HEARTBEAT_SECONDS_MAX)
    arguments.check_integer(
        "frame_bytes", frame_bytes, minimum=_FRAME_BYTES_LEAST, maximum=_FRAME_BYTES_MOST
    )
    return ClientCore(
        name=name,
        instance=instance or secrets.token_hex(8),
        heartbeat_seconds=heartbeat,
        client="simplebus for Python",
        frame_bytes_max=frame_bytes,
        auth=auth,
    )


_ENDS = (KeyboardInterrupt, SystemExit, GeneratorExit)


@guarded_async_context("async with simplebus.connect(…) as bus")
async def connect(
    address: str | Iterable[str],
    *,
    name: str | None = None,
    timeout: float = 5.0,
    registry: Registry = DEFAULT_REGISTRY,
    heartbeat: float = 10.0,
    reconnect: float | None = 60.0,
    frame_bytes: int = Limits().frame_bytes,
    user: str | None = None,
    password: str | None = None,
    token: str | None = None,
    tls: ssl.SSLContext | None = None,
    access: Access | None = None,
) -> AsyncIterator[Bus]:
    """Connect to a bus: `async with simplebus.connect("simplebus://127.0.0.1:8888") as bus`.

    Args: the address as `simplebus://host:port` or `host:port`, `simplebuss://host:port` for one
    that is spoken to over TLS, or several to be tried in turns;
    the program's name, by which the bus knows its messages again after a loss, made up if there is
    none; the seconds that connecting may take; which types are bound to which classes; the seconds
    of silence after which a connection is tested; the seconds for which a lost connection is tried
    to be replaced, 0 or None for not at all; the longest frame to send and to accept; a user and a
    password, or a token, for a bus that asks who one is, and the context that decides whom to trust
    over TLS, or all of these in one `Access`. What is not said here the environment may say:
    SIMPLEBUS_USER, SIMPLEBUS_PASSWORD, SIMPLEBUS_TOKEN, SIMPLEBUS_TLS_CA, SIMPLEBUS_TLS_CERT,
    SIMPLEBUS_TLS_KEY, or SIMPLEBUS_CREDENTIALS, which names a file that does.
    Several addresses are of buses that may take each other's place: a class that has only a name is
    to have the same id on all of them, which is certain if it is bound to an id too.
    Resource handling: leaving the block ends handlers, waits for confirms, and closes. To a process
    forked from this one the bus raises BusConnectionError: it is to connect by itself.
    Error handling: raises ValueError for what is no address, and BusConnectionError when no bus
    answers or one refuses. Leaving raises BusConnectionError when messages were not confirmed, an
    ExceptionGroup of what handlers raised or the bus refused, unless the block itself raises. A
    block with handlers is cancelled when the bus is gone for good, and raises BusConnectionError.
    """
    shown = resolve_access(access, user=user, password=password, token=token, tls=tls)
    places = [SocketEndpoint(where, shown) for where in addresses.parse_addresses(address)]
    async with open_bus(
        places,
        name=name,
        timeout=timeout,
        registry=registry,
        heartbeat=heartbeat,
        reconnect=reconnect,
        frame_bytes=frame_bytes,
        auth=shown.auth,
    ) as bus:
        yield bus


@asynccontextmanager
async def open_bus(
    places: Sequence[Endpoint],
    *,
    name: str | None = None,
    timeout: float = 5.0,
    registry: Registry = DEFAULT_REGISTRY,
    heartbeat: float = 10.0,
    reconnect: float | None = 60.0,
    frame_bytes: int = Limits().frame_bytes,
    auth: Auth | None = None,
) -> AsyncIterator[Bus]:
    """`connect` for a bus that is anywhere, in this process for example."""
    core = client_core(name=name, heartbeat=heartbeat, frame_bytes=frame_bytes, auth=auth)
    now = anyio.current_time()
    wire = ClientConnection(core, places, Schedule(len(places), timeout=timeout, reconnect=reconnect, now=now))
    await wire.open()
    failure: BaseException | None = None
    failed = True
    try:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(wire.run)
            try:
                async with anyio.create_task_group() as handlers:
                    bus = Bus(wire, registry, handlers)
                    try:
                        yield bus
                        failed = False
                    except (Exception, *_ENDS) as error:
                        failure = error  # Kept out of the task groups, which would wrap it.
                    handlers.cancel_scope.cancel()
            finally:
                seconds = CLOSE_SECONDS_FAILED if failed else CLOSE_SECONDS
                await wire.close(seconds=seconds, shield=failed)
    except BaseExceptionGroup as group:
        failure = failure or _lone_end(group)
        if failure is None:
            raise
    finally:
        if failure is not None:
            raise failure
    if bus.block_error is not None and not isinstance(bus.block_error, Exception):
        raise bus.block_error
    raise_errors(bus.failures.to_exception_group(), wire.confirms.pop_unclaimed(), wire.unconfirmed() or bus.block_error)


def _lone_end(group: BaseExceptionGroup[BaseException]) -> BaseException | None:
    """What has ended the program in one of our tasks, if nothing else was raised."""
    ends, others = group.split(_ENDS)
    found: BaseException | None = ends
    while isinstance(found, BaseExceptionGroup):
        found = found.exceptions[0]
    return found if others is None else None
