"""What a cluster takes decides what a door accepts.

Rule 1: a frame that a door accepts is one that the cluster takes, with all that the door puts
before it. A server that is sent more cuts the connection, and would do so each time it comes again.
Rule 2: what is published to a class is for its stream alone: where another one takes it as well,
there can be none.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

import trio

from simplebus.core.errors import BusConnectionError
from simplebus.core.settings import Settings
from simplebus.jetstream.api import list_streams
from simplebus.jetstream.cluster.cluster_id import UnusableClusterError, load_cluster_id
from simplebus.jetstream.cluster.failover import follow_jetstream
from simplebus.jetstream.cluster.stream_update import storage_problem
from simplebus.jetstream.publish.codec import HEADERS_BYTES_MAX
from simplebus.jetstream.settings import JetStreamOptions
from simplebus.nats.client.jetstream_codec import JetStreamError
from simplebus.net.nats_connection import NatsConnection

log = logging.getLogger("simplebus.engine")

_FRAME_BYTES_MIN = 1024
"""Who cannot have such messages has no use for a door."""


@dataclass(frozen=True, slots=True)
class ClusterCheck:
    """What a door is before this cluster."""

    settings: Settings
    """With frames that the cluster takes."""
    cluster_id: str
    """Of the bus that all doors of this engine are."""


async def check_cluster(settings: Settings, options: JetStreamOptions) -> ClusterCheck:
    """Look at the cluster. Waits until it answers. Raises EngineError where no door can stand."""
    payload_bytes_max, identity = await _connect_and_check(options)
    frame_bytes = payload_bytes_max - HEADERS_BYTES_MAX
    if frame_bytes < _FRAME_BYTES_MIN:
        raise UnusableClusterError(
            f"the NATS servers take messages of {payload_bytes_max} bytes (max_payload); a door needs "
            f"{HEADERS_BYTES_MAX + _FRAME_BYTES_MIN} at least"
        )
    limits = settings.limits
    if limits.frame_bytes <= frame_bytes:
        return ClusterCheck(settings, identity)
    log.info(
        "frames have at most %d bytes here: the NATS servers take messages of %d",
        frame_bytes,
        payload_bytes_max,
    )
    return ClusterCheck(
        replace(settings, limits=replace(limits, frame_bytes=frame_bytes)), identity
    )


async def _connect_and_check(options: JetStreamOptions) -> tuple[int, str]:
    """How long a message may be, and which bus it is."""
    link = NatsConnection(
        list(options.servers),
        lambda event: None,
        name=f"simplebus {options.names.prefix}",
        credentials=options.credentials,
        tls=options.tls,
    )
    problem: UnusableClusterError | None = None
    identity = ""
    async with trio.open_nursery() as nursery:
        await nursery.start(link.run)
        nursery.start_soon(follow_jetstream, link, options)
        await link.wait_ready()
        try:
            await _check_streams(link, options)
            identity = await load_cluster_id(link, options)
        except UnusableClusterError as error:  # To be raised as it is, not in a group.
            problem = error
        nursery.cancel_scope.cancel()
    if problem is not None:
        raise problem
    return link.payload_bytes_max, identity


async def _check_streams(link: NatsConnection, options: JetStreamOptions) -> None:
    """Raise EngineError where another's stream takes what is published to classes, or a class's
    keeps less than is confirmed. Where that is not to be known now, each class's is looked at when
    it is used."""
    try:
        configs, _ = await list_streams(link)
    except (BusConnectionError, JetStreamError) as error:
        log.warning("the streams of the cluster: %s", error)
        return
    for config in configs:
        name, subjects = str(config.get("name", "")), config.get("subjects") or ()
        if options.names.parse_stream_name(name) is not None:
            if problem := storage_problem(config, options):
                raise UnusableClusterError(problem)
        elif any(options.names.overlaps_subject(str(each)) for each in subjects):
            raise UnusableClusterError(
                f"the stream {name} takes what is published to classes, "
                f"{options.names.class_subject(0)} for one: have it take other subjects, or give this "
                "engine another prefix"
            )
