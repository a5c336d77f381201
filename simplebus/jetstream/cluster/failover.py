"""Reconnection to a NATS server at which JetStream answers.

A NATS server that lost its cluster stays connected, but its JetStream does not answer. The
connection moves to another server only if JetStream answers there; without a quorum it stays.
JetStream traffic counts as an answer. A connection with unsent requests does not show whether
JetStream answers.
"""

from __future__ import annotations

from collections.abc import Callable

import trio

from simplebus.core.errors import BusConnectionError
from simplebus.jetstream.settings import JetStreamOptions
from simplebus.logs.event_logger import EventLogger
from simplebus.nats.client.jetstream_codec import JetStreamError
from simplebus.net.nats_connection import NatsAddress, NatsConnection

log = EventLogger("simplebus.engine")

CHECK_SECONDS = 5.0
SILENCE_SECONDS = 15.0
"""Silence after which other servers are asked."""
CHECK_SECONDS_MAX = 60.0
"""Longest interval between two searches."""
_REQUEST_SECONDS = 2.5
_SEARCH_SECONDS = 10.0


async def follow_jetstream(
    link: NatsConnection, options: JetStreamOptions, activity_count: Callable[[], int] = int
) -> None:
    """Move the connection to a server where JetStream answers. Runs until cancelled.

    `activity_count` returns a number that grows with every message from JetStream.
    """
    connection = activity = -1
    silent_since: float | None = None
    pause = CHECK_SECONDS
    while True:
        await trio.sleep(pause)
        if not link.is_ready or link.connection_count != connection:
            connection, silent_since, pause = link.connection_count, None, CHECK_SECONDS
            continue
        now, before, activity = trio.current_time(), activity, activity_count()
        if activity != before or await _is_jetstream_answering(link):
            if silent_since is not None and pause > CHECK_SECONDS:
                log.warning(
                    "jetstream.recovered",
                    "JetStream answers again at the NATS server {server}",
                    server=link.server,
                )
            silent_since, pause = None, CHECK_SECONDS
            continue
        silent_since = now if silent_since is None else silent_since
        if now - silent_since < SILENCE_SECONDS:
            continue
        if (server := await _find_answering_server(link, options)) is not None:
            link.switch_to(server, f"JetStream does not answer there, and does at {server}")
            continue
        if pause == CHECK_SECONDS:
            log.warning(
                "jetstream.silent",
                "JetStream has not answered for {seconds:g} s at the NATS server {server}, "
                "nor at any other known server; still searching",
                seconds=SILENCE_SECONDS,
                server=link.server,
            )
        pause = min(2 * pause, CHECK_SECONDS_MAX)


async def _is_jetstream_answering(link: NatsConnection) -> bool:
    """Return False if JetStream does not answer. Return True if it does, or if the connection is
    too slow for an answer.

    The request goes to the leader of the whole cluster. A stream's replica that is cut off still
    answers requests for stream info.
    """
    ping_number = link.core.send_ping()
    try:
        await link.api_request("INFO", seconds=_REQUEST_SECONDS)
    except BusConnectionError:
        return not link.core.is_ping_answered(ping_number)
    except JetStreamError:
        return False
    return True


async def _find_answering_server(
    link: NatsConnection, options: JetStreamOptions
) -> NatsAddress | None:
    """Return another server at which JetStream answers now; None if it answers nowhere."""
    found: list[NatsAddress] = []

    async def query_server(server: NatsAddress) -> None:
        connection = NatsConnection(
            [server],
            lambda event: None,
            name=f"simplebus {options.names.prefix}",
            credentials=options.credentials or options.servers[0].credentials,
            tls=options.tls,
            is_quiet=True,
        )
        async with trio.open_nursery() as connection_nursery:
            await connection_nursery.start(connection.run)
            await connection.wait_ready()
            if await _is_jetstream_answering(connection):
                found.append(server)
                nursery.cancel_scope.cancel()
            connection_nursery.cancel_scope.cancel()

    async with trio.open_nursery() as nursery:
        nursery.cancel_scope.deadline = trio.current_time() + _SEARCH_SECONDS
        for server in link.other_servers():
            nursery.start_soon(query_server, server)
    return found[0] if found else None
