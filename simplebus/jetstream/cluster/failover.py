"""Whether JetStream answers at the server that a door is connected to, and if not, where it does
(trio).

Rule 1: a server that has lost its cluster is there, and JetStream answers nobody at it. A door goes
on at another one where JetStream has just answered, and only then: while it answers nowhere, as in
a cluster that has lost its quorum, the door stays.
Rule 2: what comes from JetStream by itself is answer enough; else it is asked.
Rule 3: a line on which what is asked is still on its way says nothing of who is to answer it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import trio

from simplebus.core.errors import BusConnectionError
from simplebus.jetstream.settings import JetStreamOptions
from simplebus.nats.client.jetstream_codec import JetStreamError
from simplebus.net.nats_connection import NatsAddress, NatsConnection

log = logging.getLogger("simplebus.engine")

CHECK_SECONDS = 5.0
SILENCE_SECONDS = 15.0
"""JetStream that has not answered for so long is looked for elsewhere,"""
CHECK_SECONDS_MAX = 60.0
"""and again after pauses that grow up to this."""
_REQUEST_SECONDS = 2.5
_SEARCH_SECONDS = 10.0


async def follow_jetstream(
    link: NatsConnection, options: JetStreamOptions, activity_count: Callable[[], int] = int
) -> None:
    """Have the link be where JetStream answers. Until cancelled. `signs` counts what came from it
    by itself."""
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
                log.warning("JetStream answers again at NATS at %s", link.server)
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
                "JetStream has not answered for %g s at NATS at %s, nor does it at any other "
                "server that is known; looking on", SILENCE_SECONDS, link.server,
            )  # fmt: skip
        pause = min(2 * pause, CHECK_SECONDS_MAX)


async def _is_jetstream_answering(link: NatsConnection) -> bool:
    """Whether it does, as far as can be told. Who is asked is who leads the whole cluster: of a
    stream, a server that is cut off goes on to say what it knows, as long as nothing is published
    to it."""
    mark = link.core.send_ping()
    try:
        await link.api_request("INFO", seconds=_REQUEST_SECONDS)
    except BusConnectionError:
        return not link.core.is_ping_answered(mark)
    except JetStreamError:
        return False
    return True


async def _find_answering_server(
    link: NatsConnection, options: JetStreamOptions
) -> NatsAddress | None:
    """A server at which JetStream answers now."""
    found: list[NatsAddress] = []

    async def ask(server: NatsAddress) -> None:
        other = NatsConnection(
            [server],
            lambda event: None,
            name=f"simplebus {options.names.prefix}",
            credentials=options.credentials or options.servers[0].credentials,
            tls=options.tls,
            is_quiet=True,
        )
        async with trio.open_nursery() as own:
            await own.start(other.run)
            await other.wait_ready()
            if await _is_jetstream_answering(other):
                found.append(server)
                everybody.cancel_scope.cancel()
            own.cancel_scope.cancel()

    async with trio.open_nursery() as everybody:
        everybody.cancel_scope.deadline = trio.current_time() + _SEARCH_SECONDS
        for server in link.other_servers():
            everybody.start_soon(ask, server)
    return found[0] if found else None
