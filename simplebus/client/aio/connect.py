"""`connect` for trio and asyncio, and `open_bus` for every other kind of endpoint.

Leaving the block raises every error that was not raised before: unconfirmed messages, refusals and
errors of handlers. KeyboardInterrupt, SystemExit and GeneratorExit are raised as they are, not in
an exception group.
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
from simplebus.client.aio.traced_bus import TracedBus
from simplebus.client.aio.transport import Endpoint, SocketEndpoint
from simplebus.client.context_guard import guarded_async_context
from simplebus.client.core import arguments
from simplebus.client.core.client import ClientCore
from simplebus.client.credentials import Access, resolve_access
from simplebus.client.handler_errors import raise_errors
from simplebus.client.message_types import DEFAULT_REGISTRY, Registry
from simplebus.client.reconnect import ReconnectSchedule
from simplebus.client.tracing.interface import Tracing
from simplebus.core.limits import (
    CLOSE_SECONDS,
    CLOSE_SECONDS_FAILED,
    HEARTBEAT_SECONDS_MAX,
    NAME_CHARACTERS_MAX,
    Limits,
)
from simplebus.core.protocol.requests import Auth

# The reply of the bus to a Connect fits into a frame of this length.
_FRAME_BYTES_MIN = 512
_FRAME_BYTES_MAX = 1 << 40


def new_client_core(
    *,
    name: str | None,
    heartbeat: float,
    frame_bytes: int,
    instance: str | None = None,
    auth: Auth | None = None,
    late_confirms: bool = False,
) -> ClientCore:
    """Return a client core. Name and instance are random if they are not given.

    `heartbeat` is in seconds. Raises ValueError and TypeError for invalid arguments.
    """
    if name is None:
        name = f"anonymous-{secrets.token_hex(8)}"
    if not 0 < len(arguments.check_text("name", name)) <= NAME_CHARACTERS_MAX:
        raise ValueError(f"name must be of 1 to {NAME_CHARACTERS_MAX} characters, got {name!r}")
    arguments.check_seconds("heartbeat", heartbeat, maximum=HEARTBEAT_SECONDS_MAX)
    arguments.check_integer(
        "frame_bytes", frame_bytes, minimum=_FRAME_BYTES_MIN, maximum=_FRAME_BYTES_MAX
    )
    return ClientCore(
        name=name,
        instance=instance or secrets.token_hex(8),
        heartbeat_seconds=heartbeat,
        client="simplebus for Python",
        frame_bytes_max=frame_bytes,
        auth=auth,
        late_confirms=late_confirms,
    )


_PROGRAM_ENDS = (KeyboardInterrupt, SystemExit, GeneratorExit)


@guarded_async_context("async with simplebus.connect(…) as bus")
async def connect(
    address: str | Iterable[str] | None = None,
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
    tracing: Tracing | None = None,
) -> AsyncIterator[Bus]:
    """Connect to a bus. The connection lasts as long as the `async with` block.

        async with simplebus.connect("simplebus://127.0.0.1:8888", name="billing") as bus:
            await bus.publish(b"hello", class_id=1)

    A lost connection is replaced, with its subscriptions and all unconfirmed messages. Leaving the
    block ends handlers, waits for confirms and closes the connection. A block with handlers is
    cancelled when the connection is lost for good. A process that is forked from this one cannot
    use the bus and must connect by itself.

    Credentials that are not given are read from the environment: SIMPLEBUS_USER,
    SIMPLEBUS_PASSWORD, SIMPLEBUS_TOKEN, SIMPLEBUS_TLS_CA, SIMPLEBUS_TLS_CERT, SIMPLEBUS_TLS_KEY, or
    SIMPLEBUS_CREDENTIALS, which names a file with them.

    Args:
        address: "simplebus://host:port", "host:port", or "simplebuss://host:port" for TLS. Several
            addresses are tried in turn. Their buses must assign the same ids to the same classes.
            None takes the address from the environment variable SIMPLEBUS_URL; without it, the
            address is simplebus://127.0.0.1:8888.
        name: Publisher name, by which the bus recognizes messages that are sent again after a loss.
            None makes a random name.
        timeout: Seconds that connecting may take.
        registry: Bindings of types to classes.
        heartbeat: Seconds of silence after which the connection is tested. 0 never tests it.
        reconnect: Seconds during which a lost connection is replaced. 0 or None never replaces it.
        frame_bytes: Longest frame to send and to accept, in bytes.
        user: User name, together with `password`.
        password: Password of `user`.
        token: Token, instead of user and password.
        tls: TLS context for addresses that begin with "simplebuss".
        access: All credentials in one object, instead of the four arguments above.
        tracing: `simplebus.otel.OpenTelemetryTracing`, for spans and metrics. None disables both.

    Yields:
        The connected `Bus`.

    Raises:
        ValueError: An address or another argument is invalid.
        BusConnectionError: No bus answers, or one refuses the connection. When the block is left:
            messages are not confirmed, or the connection was lost for good.
        ExceptionGroup: When the block is left without an exception: errors that handlers raised,
            and refusals that no call has raised.
    """
    credentials = resolve_access(access, user=user, password=password, token=token, tls=tls)
    endpoints = [
        SocketEndpoint(parsed, credentials) for parsed in addresses.parse_addresses(address)
    ]
    async with open_bus(
        endpoints,
        name=name,
        timeout=timeout,
        registry=registry,
        heartbeat=heartbeat,
        reconnect=reconnect,
        frame_bytes=frame_bytes,
        auth=credentials.auth,
        late_confirms=True,
        tracing=tracing,
    ) as bus:
        yield bus


@asynccontextmanager
async def open_bus(
    endpoints: Sequence[Endpoint],
    *,
    name: str | None = None,
    timeout: float = 5.0,
    registry: Registry = DEFAULT_REGISTRY,
    heartbeat: float = 10.0,
    reconnect: float | None = 60.0,
    frame_bytes: int = Limits().frame_bytes,
    auth: Auth | None = None,
    late_confirms: bool = False,
    tracing: Tracing | None = None,
) -> AsyncIterator[Bus]:
    """Connect to a bus at any kind of endpoint, as `connect` does for addresses."""
    core = new_client_core(
        name=name,
        heartbeat=heartbeat,
        frame_bytes=frame_bytes,
        auth=auth,
        late_confirms=late_confirms,
    )
    now = anyio.current_time()
    connection = ClientConnection(
        core,
        endpoints,
        ReconnectSchedule(len(endpoints), timeout=timeout, reconnect=reconnect, now=now),
    )
    await connection.open()
    failure: BaseException | None = None
    failed = True
    try:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(connection.run)
            tasks.start_soon(connection.deadlines.run)
            try:
                async with anyio.create_task_group() as handlers:
                    if tracing is None:
                        bus = Bus(connection, registry, handlers)
                    else:
                        bus = TracedBus(connection, registry, handlers, tracing)
                    try:
                        yield bus
                        failed = False
                    except (Exception, *_PROGRAM_ENDS) as error:
                        failure = error  # Kept out of the task groups, which would wrap it.
                    handlers.cancel_scope.cancel()
            finally:
                seconds = CLOSE_SECONDS_FAILED if failed else CLOSE_SECONDS
                await connection.close(seconds=seconds, shield=failed)
    except BaseExceptionGroup as group:
        failure = failure or _sole_program_end(group)
        if failure is None:
            raise
    finally:
        if failure is not None:
            raise failure
    if bus.block_error is not None and not isinstance(bus.block_error, Exception):
        raise bus.block_error
    raise_errors(
        bus.failures.to_exception_group(),
        connection.confirms.pop_unclaimed(),
        connection.unconfirmed_error() or bus.block_error,
    )


def _sole_program_end(group: BaseExceptionGroup[BaseException]) -> BaseException | None:
    """Return the KeyboardInterrupt, SystemExit or GeneratorExit in a group without other errors."""
    ends, other_errors = group.split(_PROGRAM_ENDS)
    found: BaseException | None = ends
    while isinstance(found, BaseExceptionGroup):
        found = found.exceptions[0]
    return found if other_errors is None else None
