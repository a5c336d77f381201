"""`connect_blocking`, for programs without an event loop.

Leaving the block raises every error that was not raised before: unconfirmed messages, refusals and
errors of handlers.
"""

from __future__ import annotations

import ssl
from collections.abc import Iterable, Iterator
from time import monotonic

from simplebus.client import addresses as client_addresses
from simplebus.client.aio.connect import new_client_core
from simplebus.client.blocking.bus import BlockingBus
from simplebus.client.blocking.connection import BlockingClientConnection
from simplebus.client.blocking.traced_bus import TracedBlockingBus
from simplebus.client.context_guard import guarded_context
from simplebus.client.credentials import Access, resolve_access
from simplebus.client.handler_errors import raise_errors
from simplebus.client.message_types import DEFAULT_REGISTRY, Registry
from simplebus.client.reconnect import ReconnectSchedule
from simplebus.client.tracing.interface import Tracing
from simplebus.core.limits import CLOSE_SECONDS, CLOSE_SECONDS_FAILED, Limits


@guarded_context("with simplebus.connect_blocking(…) as bus")
def connect_blocking(
    address: str | Iterable[str] | None = None,
    *,
    name: str | None = None,
    instance: str | None = None,
    timeout: float = 5.0,
    registry: Registry = DEFAULT_REGISTRY,
    heartbeat: float = 0.0,
    reconnect: float | None = 60.0,
    frame_bytes: int = Limits().frame_bytes,
    user: str | None = None,
    password: str | None = None,
    token: str | None = None,
    tls: ssl.SSLContext | None = None,
    access: Access | None = None,
    tracing: Tracing | None = None,
) -> Iterator[BlockingBus]:
    """Connect to a bus. The connection lasts as long as the `with` block.

        with simplebus.connect_blocking("simplebus://127.0.0.1:8888", name="billing") as bus:
            bus.publish(b"hello", class_id=1)

    A program that computes sends nothing, so by default no heartbeat is requested from the bus. A
    server still requests one, every 30 s by default (`simplebus serve --heartbeat`). A client that
    calls no method for three times as long is disconnected, and connects again in its next call. To
    stay connected, call `bus.run(0)` once per heartbeat. While you process a long message, call
    `message.working()` and `bus.flush()`, which also prevents its redelivery.

    Args:
        address: "simplebus://host:port", "host:port", or "simplebuss://host:port" for TLS. Several
            addresses are tried in turn. Their buses must assign the same ids to the same classes.
            None takes the address from the environment variable SIMPLEBUS_URL; without it, the
            address is simplebus://127.0.0.1:8888.
        name: Publisher name, by which the bus recognizes messages that are sent again after a loss.
            None makes a random name.
        instance: Identifier of this run of the program. A connection with the same name and
            instance replaces an earlier one. None makes a random identifier.
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
        The connected `BlockingBus`.

    Raises:
        ValueError: An address or another argument is invalid.
        BusConnectionError: No bus answers, or one refuses the connection. When the block is left:
            messages are not confirmed.
        ExceptionGroup: When the block is left without an exception: errors that handlers
            raised, and refusals that no call has raised.
    """
    addresses = client_addresses.parse_addresses(address)
    credentials = resolve_access(access, user=user, password=password, token=token, tls=tls)
    core = new_client_core(
        name=name,
        instance=instance,
        heartbeat=heartbeat,
        frame_bytes=frame_bytes,
        auth=credentials.auth,
        late_confirms=True,
    )
    schedule = ReconnectSchedule(
        len(addresses), timeout=timeout, reconnect=reconnect, now=monotonic()
    )
    connection = BlockingClientConnection(core, addresses, schedule, credentials)
    if tracing is None:
        bus = BlockingBus(connection, registry)
    else:
        bus = TracedBlockingBus(connection, registry, tracing)
    seconds = CLOSE_SECONDS_FAILED
    try:
        connection.open()
        yield bus
        seconds = CLOSE_SECONDS
    finally:
        bus.acknowledge_replies()
        connection.close(seconds)
    raise_errors(
        bus.failures.to_exception_group(),
        connection.confirms.pop_unclaimed(),
        connection.unconfirmed_error(),
    )
