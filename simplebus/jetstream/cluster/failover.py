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
from collections.abc import Callable, Mapping

import trio

from simplebus.core.errors import BusConnectionError
from simplebus.core.subscription.subscription import BrokerSubscription
from simplebus.jetstream.consume.feed import Feed
from simplebus.jetstream.publish.stream_publisher import Uplink
from simplebus.jetstream.settings import JetStreamOptions
from simplebus.nats.client.jetstream_codec import JetStreamError
from simplebus.net.nats_connection import NatsConnection, NatsAddress

log = logging.getLogger("simplebus.engine")

LOOK_SECONDS = 5.0
MUTE_SECONDS = 15.0
"""JetStream that has not answered for so long is looked for elsewhere,"""
PAUSE_SECONDS_MAX = 60.0
"""and again after pauses that grow up to this."""
_ASK_SECONDS = 2.5
_PATIENCE_SECONDS = 10.0


async def follow(link: NatsConnection, options: EngineOptions, signs: Callable[[], int] = int) -> None:
    """Have the link be where JetStream answers. Until cancelled. `signs` counts what came from it
    by itself."""
    connection = heard = -1
    silent_since: float | None = None
    pause = LOOK_SECONDS
    while True:
        await trio.sleep(pause)
        if not link.is_ready or link.connection_count != connection:
            connection, silent_since, pause = link.connection_count, None, LOOK_SECONDS
            continue
        now, before, heard = trio.current_time(), heard, signs()
        if heard != before or await _answers(link):
            if silent_since is not None and pause > LOOK_SECONDS:
                log.warning("JetStream answers again at NATS at %s", link.server)
            silent_since, pause = None, LOOK_SECONDS
            continue
        silent_since = now if silent_since is None else silent_since
        if now - silent_since < MUTE_SECONDS:
            continue
        if (found := await _elsewhere(link, options)) is not None:
            link.switch_to(found, f"JetStream does not answer there, and does at {found}")
            continue
        if pause == LOOK_SECONDS:
            log.warning(
                "JetStream has not answered for %g s at NATS at %s, nor does it at any other "
                "server that is known; looking on", MUTE_SECONDS, link.server,
            )  # fmt: skip
        pause = min(2 * pause, PAUSE_SECONDS_MAX)


def signs_of(uplink: Uplink, feeds: Mapping[BrokerSubscription, Feed]) -> Callable[[], int]:
    """What counts that a stream has stored something, or a consumer has sent something."""
    return lambda: uplink.stored + sum(feed.fetched for feed in feeds.values())


async def _answers(link: NatsConnection) -> bool:
    """Whether it does, as far as can be told. Who is asked is who leads the whole cluster: of a
    stream, a server that is cut off goes on to say what it knows, as long as nothing is published
    to it."""
    mark = link.core.send_ping()
    try:
        await link.api_request("INFO", seconds=_ASK_SECONDS)
    except BusConnectionError:
        return not link.core.is_ping_answered(mark)
    except JetStreamError:
        return False
    return True


async def _elsewhere(link: NatsConnection, options: JetStreamOptions) -> NatsAddress | None:
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
            if await _answers(other):
                found.append(server)
                everybody.cancel_scope.cancel()
            own.cancel_scope.cancel()

    async with trio.open_nursery() as everybody:
        everybody.cancel_scope.deadline = trio.current_time() + _PATIENCE_SECONDS
        for server in link.other_servers():
            everybody.start_soon(ask, server)
    return found[0] if found else None
