"""Checks of the cluster before a server starts.

Every frame that the server accepts must fit into a NATS message with its headers: a NATS server
closes the connection after a larger one, and the publisher would retry forever. No foreign stream
may store the subjects of this bus.
"""

from __future__ import annotations

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
from simplebus.logs.event_logger import EventLogger
from simplebus.nats.client.jetstream_codec import JetStreamError
from simplebus.net.nats_connection import NatsConnection

log = EventLogger("simplebus.engine")

_FRAME_BYTES_MIN = 1024
"""Smallest frame limit with which a server is useful."""


@dataclass(frozen=True, slots=True)
class ClusterCheck:
    """Result of the checks."""

    settings: Settings
    """Settings with a frame limit that the cluster accepts."""
    cluster_id: str
    """Identity of the bus, common to all servers of the cluster."""


async def check_cluster(settings: Settings, options: JetStreamOptions) -> ClusterCheck:
    """Check the cluster, waiting until it answers.

    Raises:
        UnusableClusterError: No server can run with this cluster and these options.
    """
    payload_bytes_max, identity = await _connect_and_check(options)
    frame_bytes = payload_bytes_max - HEADERS_BYTES_MAX
    if frame_bytes < _FRAME_BYTES_MIN:
        raise UnusableClusterError(
            f"the NATS servers accept messages of up to {payload_bytes_max} bytes (max_payload); "
            f"expected at least {HEADERS_BYTES_MAX + _FRAME_BYTES_MIN}"
        )
    limits = settings.limits
    if limits.frame_bytes <= frame_bytes:
        return ClusterCheck(settings, identity)
    log.info(
        "frame_size.limited",
        "limited frames to {frame_bytes} bytes: the NATS servers accept messages of up to"
        " {payload_bytes} bytes",
        frame_bytes=frame_bytes,
        payload_bytes=payload_bytes_max,
    )
    return ClusterCheck(
        replace(settings, limits=replace(limits, frame_bytes=frame_bytes)), identity
    )


async def _connect_and_check(options: JetStreamOptions) -> tuple[int, str]:
    """Return the maximum payload size of the NATS servers and the id of the bus."""
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
        except UnusableClusterError as error:  # Raised below, outside the exception group.
            problem = error
        nursery.cancel_scope.cancel()
    if problem is not None:
        raise problem
    return link.payload_bytes_max, identity


async def _check_streams(link: NatsConnection, options: JetStreamOptions) -> None:
    """Raise UnusableClusterError if a stream conflicts with the options.

    If the streams cannot be listed now, the stream of each class is checked when it is first used.
    """
    try:
        configs, _ = await list_streams(link)
    except (BusConnectionError, JetStreamError) as error:
        log.warning(
            "stream_check.skipped",
            "cannot list the streams of the JetStream cluster: {error}",
            error=error,
        )
        return
    for config in configs:
        name, subjects = str(config.get("name", "")), config.get("subjects") or ()
        if options.names.parse_stream_name(name) is not None:
            if problem := storage_problem(config, options):
                raise UnusableClusterError(problem)
        elif any(options.names.overlaps_subject(str(subject)) for subject in subjects):
            raise UnusableClusterError(
                f"the stream {name} also stores messages of classes, for example "
                f"{options.names.class_subject(0)}: change its subjects or choose another "
                "--engine-prefix"
            )
