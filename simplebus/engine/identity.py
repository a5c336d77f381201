"""Which bus it is that the doors of an engine are together: what their cluster itself says.

Rule 1: all doors of one engine say the same, past all of them and past every restart; and no two
clusters do, whatever their prefixes. The one that is there first says it, in the metadata of a
stream of its own, and JetStream lets only one be first.
Where that stream is lost, so is what doors have kept: it is another bus then.
Rule 2: without it there is no door: to be another bus for a while would have everybody send and
copy anew what is there.
"""

from __future__ import annotations

import logging
import secrets

import trio

from simplebus.core.errors import BusConnectionError, BusError
from simplebus.engine import consumers
from simplebus.engine.link import Link
from simplebus.engine.names import CLUSTER
from simplebus.engine.settings import EngineOptions
from simplebus.nats.client import jetstream
from simplebus.nats.client.jetstream import JetStreamError

log = logging.getLogger("simplebus.engine")

_PAUSE_SECONDS = 0.5


class EngineError(BusError):
    """Before this cluster no door can stand."""


async def identity_of(link: Link, options: EngineOptions) -> str:
    """Ask until it is known: `cluster.PREFIX.` and sixteen hexadecimal digits. Raises EngineError
    where another's stream stands in its place."""
    problem = ""
    while True:
        try:
            return CLUSTER + f"{options.names.prefix}.{await _kept(link, options)}"
        except (BusConnectionError, JetStreamError) as error:
            if str(error) != problem:
                problem = str(error)
                log.warning("the identity of the bus in the cluster: %s; asking on", error)
        await trio.sleep(_PAUSE_SECONDS)


async def _kept(link: Link, options: EngineOptions) -> str:
    name = options.names.identity_stream
    try:
        info = await link.ask(f"STREAM.INFO.{name}")
    except JetStreamError as error:
        if error.code not in jetstream.NOT_FOUND:
            raise
        body = consumers.identity_stream(options, secrets.token_hex(8))
        try:
            info = await link.ask(f"STREAM.CREATE.{name}", body)
        except JetStreamError as refused:
            if refused.code != consumers.NAME_IN_USE:
                raise
            info = await link.ask(f"STREAM.INFO.{name}")  # Another door was first.
    found = consumers.identity_of(info)
    if not found:
        raise EngineError(
            f"the stream {name} is none of a simplebus engine's: give this engine another prefix"
        )
    return found
