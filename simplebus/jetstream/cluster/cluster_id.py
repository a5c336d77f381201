"""Identity of the bus, stored in the metadata of a separate stream.

All servers of a cluster and prefix have the same identity, also after restarts, and no two clusters
share one. The first server creates the stream; JetStream guarantees that only one succeeds. If the
stream is deleted, a running server recreates it. A server does not start without the identity:
clients would treat it as another bus and send or copy everything again.
"""

from __future__ import annotations

import secrets

import trio

from simplebus.core.errors import BusConnectionError, BusError
from simplebus.jetstream import api
from simplebus.jetstream.cluster.stream_update import upgrade_stream
from simplebus.jetstream.names import CLUSTER_ID_PREFIX
from simplebus.jetstream.settings import JetStreamOptions
from simplebus.logs.event_logger import EventLogger
from simplebus.nats.client import jetstream_codec
from simplebus.nats.client.jetstream_codec import JetStreamError
from simplebus.net.nats_connection import NatsConnection

log = EventLogger("simplebus.engine")

_RETRY_SECONDS = 0.5
_CHECK_SECONDS = 10.0
"""Interval at which a running server checks the stored identity."""


class UnusableClusterError(BusError):
    """The JetStream cluster cannot be used with these options."""


async def load_cluster_id(link: NatsConnection, options: JetStreamOptions) -> str:
    """Return the id of the bus, retrying until the cluster answers.

    Returns:
        `cluster.PREFIX.` and sixteen hexadecimal digits.

    Raises:
        UnusableClusterError: A foreign stream has the name of the identity stream.
    """
    problem = ""
    while True:
        try:
            stored_id = await _read_or_store_id(
                link, options, secrets.token_hex(8), should_upgrade=True
            )
            return f"{CLUSTER_ID_PREFIX}{options.names.prefix}.{stored_id}"
        except (BusConnectionError, JetStreamError) as error:
            if str(error) != problem:
                problem = str(error)
                log.warning(
                    "bus_identity.read_failed",
                    "cannot read the bus identity from the JetStream cluster: {error}; retrying",
                    error=error,
                )
        await trio.sleep(_RETRY_SECONDS)


async def maintain_cluster_id(
    link: NatsConnection, options: JetStreamOptions, cluster_id: str
) -> None:
    """Restore the stored identity if it is deleted, and log an error if it differs. Runs until
    cancelled.
    """
    own_id, other_id = cluster_id.rpartition(".")[2], ""
    while True:
        await trio.sleep(_CHECK_SECONDS)
        if not link.core.is_ready:
            continue
        try:
            found = await _read_or_store_id(link, options, own_id)
        except (BusError, JetStreamError) as error:
            log.debug(
                "bus_identity.unchecked",
                "cannot check the bus identity in the JetStream cluster: {error}",
                error=error,
            )
            continue
        if found not in (own_id, other_id):
            other_id = found
            log.error(
                "bus_identity.differed",
                "this server has the bus identity {identity}, but newer servers have "
                "another one, because the stream {stream} was deleted: restart this server",
                identity=cluster_id,
                stream=options.names.identity_stream_name,
            )


async def _read_or_store_id(
    link: NatsConnection, options: JetStreamOptions, new_id: str, *, should_upgrade: bool = False
) -> str:
    """Return the stored identity; store and return `new_id` if no identity is stored."""
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
            info = await link.api_request(f"STREAM.INFO.{name}")  # Another server was first.
    found = api.cluster_id_of(info)
    if not found:
        raise UnusableClusterError(
            f"the stream {name} was not created by simplebus: choose another --engine-prefix"
        )
    return found
