"""Which bus it is that the doors of an engine are together: what their cluster itself says.

Rule 1: all doors of one engine say the same, past all of them and past every restart; and no two
clusters do, whatever their prefixes. The one that is there first says it, in the metadata of a
stream of its own, and JetStream lets only one be first. Where that stream is lost, who runs makes
it again as it was.
Rule 2: without it there is no door: to be another bus for a while would have everybody send and
copy anew what is there.
"""

from __future__ import annotations

import logging
import secrets

import trio

from simplebus.core.errors import BusConnectionError, BusError
from simplebus.jetstream import api
from simplebus.jetstream.cluster.stream_update import upgrade_stream
from simplebus.jetstream.names import CLUSTER_ID_PREFIX
from simplebus.jetstream.settings import JetStreamOptions
from simplebus.nats.client import jetstream_codec
from simplebus.nats.client.jetstream_codec import JetStreamError
from simplebus.net.nats_connection import NatsConnection

log = logging.getLogger("simplebus.engine")

_RETRY_SECONDS = 0.5
_CHECK_SECONDS = 10.0
"""So often a door that runs looks whether its cluster still says so."""


class UnusableClusterError(BusError):
    """Before this cluster no door can stand."""


async def load_cluster_id(link: NatsConnection, options: JetStreamOptions) -> str:
    """Ask until it is known: `cluster.PREFIX.` and sixteen hexadecimal digits. Raises EngineError
    where another's stream stands in its place."""
    problem = ""
    while True:
        try:
            kept = await _read_or_store_id(link, options, secrets.token_hex(8), should_upgrade=True)
            return f"{CLUSTER_ID_PREFIX}{options.names.prefix}.{kept}"
        except (BusConnectionError, JetStreamError) as error:
            if str(error) != problem:
                problem = str(error)
                log.warning("the identity of the bus in the cluster: %s; asking on", error)
        await trio.sleep(_RETRY_SECONDS)


async def maintain_cluster_id(
    link: NatsConnection, options: JetStreamOptions, cluster_id: str
) -> None:
    """Have the cluster say this again where somebody has deleted what it said, and say it where it
    says something else. Until cancelled."""
    own_id, other_id = cluster_id.rpartition(".")[2], ""
    while True:
        await trio.sleep(_CHECK_SECONDS)
        if not link.core.is_ready:
            continue
        try:
            found = await _read_or_store_id(link, options, own_id)
        except (BusError, JetStreamError) as error:
            log.debug("the identity of the bus in the cluster: %s", error)
            continue
        if found not in (own_id, other_id):
            other_id = found
            log.error(
                "this door is the bus %s, and doors that have come since are another one, for the "
                "stream %s was deleted meanwhile: start this door again",
                cluster_id,
                options.names.identity_stream_name,
            )


async def _read_or_store_id(
    link: NatsConnection, options: JetStreamOptions, new_id: str, *, should_upgrade: bool = False
) -> str:
    """What the cluster says; it is `fresh` if it has said nothing. It `grows` if it was made for
    less."""
    name = options.names.identity_stream_name
    try:
        info = await link.api_request(f"STREAM.INFO.{name}")
        if should_upgrade:
            await upgrade_stream(link, info["config"], options)
    except JetStreamError as error:
        if error.code not in jetstream_codec.NOT_FOUND:
            raise
        body = api.identity_stream_config(options, new_id)
        try:
            info = await link.api_request(f"STREAM.CREATE.{name}", body)
        except JetStreamError as refused:
            if refused.code != api.NAME_IN_USE:
                raise
            info = await link.api_request(f"STREAM.INFO.{name}")  # Another door was first.
    found = api.cluster_id_of(info)
    if not found:
        raise UnusableClusterError(
            f"the stream {name} is none of a simplebus engine's: give this engine another prefix"
        )
    return found
