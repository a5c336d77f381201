"""Functions that connect the source and the target of a copier."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from simplebus.bridge.bus_connection import connect, connect_source, probe_bus
from simplebus.bridge.copier import CopierConnector, SourceAndTarget, SourceOpened
from simplebus.bridge.dead_letters import dead_letter_opener
from simplebus.bridge.interfaces import FatalConfigurationError
from simplebus.bridge.nats_connection import BridgeNatsConnection, connect_nats, format_addresses
from simplebus.bridge.settings import CopiedClass
from simplebus.bridge.source.bus import BusSource, bus_source_opener
from simplebus.bridge.source.core_nats import CoreNatsSource, nats_identity, require_jetstream
from simplebus.bridge.source.identity import SourceIdentity, sequence_scope
from simplebus.bridge.source.stream import StreamSource
from simplebus.bridge.target.batched_stream import BatchedStreamTarget
from simplebus.bridge.target.bus import (
    BusTarget,
    StatelessServerTarget,
    TargetSettings,
    open_bus_target,
    open_stateless_server_target,
)
from simplebus.bridge.target.nats import NatsTarget, StreamConfig, TargetStreamState
from simplebus.bridge.target.ordered_stream import IN_FLIGHT_MESSAGES, OrderedStreamTarget
from simplebus.client.aio.connection import ClientConnection
from simplebus.client.aio.transport import Endpoint
from simplebus.client.credentials import Access
from simplebus.core.protocol.requests import Auth
from simplebus.logs.event_logger import EventLogger
from simplebus.nats.client.credentials import Credentials
from simplebus.nats.client.jetstream_codec import NOT_FOUND, JetStreamError

log = EventLogger("simplebus.bridge")


def bus_to_bus(
    source_endpoint: Endpoint,
    target_endpoint: Endpoint,
    settings: TargetSettings,
    *,
    class_: int | str,
    start: str = "waiting",
    auth: Auth | None = None,
) -> CopierConnector:
    """Return the connector of a copier between two buses.

    Args:
        source_endpoint: Endpoint of the source.
        target_endpoint: Endpoint of the target.
        settings: Settings of the copier for its target.
        class_: Class at the source.
        start: Start position of a copier that has never run.
        auth: Credentials for the source.
    """
    source_identity = SourceIdentity()
    heartbeat = settings.heartbeat_seconds

    def create_source(connection: ClientConnection) -> BusSource:
        return BusSource(
            connection,
            class_=class_,
            durable=settings.name,
            channels=settings.channels,
            start=start,
            endpoint=source_endpoint,
        )

    @asynccontextmanager
    async def open(source_opened: SourceOpened) -> AsyncIterator[SourceAndTarget]:
        target_id, is_stateless = await probe_bus(
            target_endpoint, heartbeat=heartbeat, auth=settings.auth
        )
        async with connect_source(
            source_endpoint, settings.name, target_id=target_id, heartbeat=heartbeat, auth=auth
        ) as connection:
            source = create_source(connection)
            if is_stateless:
                source_opened(source, committed := await source.open())
                discarded_records = await source_identity.check_unchanged(source, settings.name)
                target_settings = settings.for_source(
                    sequence_scope(connection.core) + source_identity.era
                )
                async with open_stateless_server_target(
                    target_endpoint, target_settings, source, committed, source_identity
                ) as stateless_target:
                    check_different(source, stateless_target)
                    yield SourceAndTarget(
                        source, stateless_target, committed, [], discarded_records
                    )
                return
            target_settings = settings.for_source(connection.core.bus_id)
            async with open_bus_target(target_endpoint, target_settings) as (target, record):
                source_opened(source, committed := await source.open())
                check_different(source, target)
                refusals = await target.resume(source, record, committed=committed)
                start_sequence = (
                    committed
                    if target.resume_sequence is None
                    else max(committed, target.resume_sequence)
                )
                yield SourceAndTarget(
                    source, target, start_sequence, refusals, target.discarded_records
                )

    def check_different(source: BusSource, target: BusTarget | StatelessServerTarget) -> None:
        if (source.identity, source.class_id) == (target.identity, target.class_id):
            raise FatalConfigurationError(
                f"{source_endpoint} and {target_endpoint} are the same bus, {source.identity}: "
                f"class {class_!r} cannot be copied to itself; use another bus or another class"
            )

    return CopierConnector(
        open, bus_source_opener(source_endpoint, create_source, heartbeat=heartbeat, auth=auth)
    )


_IDENTITIES_MAX = 256
"""Number of server identities to remember per cluster."""
_known_identities: dict[tuple[str, str], dict[str, None]] = {}
"""Identities of the servers that copiers of this process connected to, by addresses and stream."""


def _cluster_identities(servers: str, stream: str, identity: str) -> Collection[str]:
    """Add `identity` to the known identities of a cluster, and return all of them.

    Each server of a cluster has its own identity, and the two copiers of a bridge may be
    connected to different servers.
    """
    identities = _known_identities.setdefault((format_addresses(servers), stream), {})
    identities.pop(identity, None)
    identities[identity] = None
    if len(identities) > _IDENTITIES_MAX:
        del identities[next(iter(identities))]
    return identities.keys()


@dataclass(frozen=True, slots=True)
class NatsAccess:
    """Credentials and TLS settings for a NATS server."""

    credentials: dict[str, str] = field(repr=False)
    access: Access

    def connect(
        self, servers: str, name: str, *, heartbeat: float
    ) -> AbstractAsyncContextManager[BridgeNatsConnection]:
        """Connect to a server. `heartbeat` is in seconds.

        Raises OSError if a certificate cannot be loaded.
        """
        access = self.access
        has_own = access.context or access.ca or access.cert
        tls = access.tls() if has_own else None
        return connect_nats(servers, name, self._credentials(), heartbeat=heartbeat, tls=tls)

    def check(self) -> None:
        """Raise ValueError for contradictory credentials or an invalid seed."""
        Credentials(**self._credentials())

    def _credentials(self) -> dict[str, str]:
        access = self.access
        credentials = {"user": access.user, "password": access.password, "token": access.token}
        return {name: value for name, value in credentials.items() if value} | self.credentials


def bus_to_nats(
    source_endpoint: Endpoint,
    servers: str,
    settings: TargetSettings,
    copied_class: CopiedClass,
    *,
    nats_access: NatsAccess,
    auth: Auth | None = None,
) -> CopierConnector:
    """Return the connector of a copier from a class of a bus to a NATS server.

    Args:
        source_endpoint: Endpoint of the bus.
        servers: Addresses of the NATS servers, separated by commas.
        settings: Settings of the copier for its target.
        copied_class: Class, start position and stream.
        nats_access: Credentials for the NATS server.
        auth: Credentials for the bus.
    """
    source_identity, stream_state = SourceIdentity(), TargetStreamState()
    heartbeat = settings.heartbeat_seconds

    def create_source(connection: ClientConnection) -> BusSource:
        return BusSource(
            connection,
            class_=copied_class.class_,
            durable=settings.name,
            channels=settings.channels,
            start=copied_class.start,
            endpoint=source_endpoint,
        )

    @asynccontextmanager
    async def open(source_opened: SourceOpened) -> AsyncIterator[SourceAndTarget]:
        target_id = format_addresses(servers)
        async with connect_source(
            source_endpoint, settings.name, target_id=target_id, heartbeat=heartbeat, auth=auth
        ) as connection:
            source = create_source(connection)
            source_opened(source, start_sequence := await source.open())
            async with nats_access.connect(
                servers, settings.name, heartbeat=heartbeat
            ) as nats_connection:
                discarded_records = 0
                target_class, options, config = NatsTarget, dict[str, Any](), None
                if copied_class.stream:
                    require_jetstream(nats_connection)
                    discarded_records = await source_identity.check_unchanged(source, settings.name)
                    config = await _fetch_stream_config(nats_connection, copied_class.stream)
                    target_class, options = select_target(config, copied_class)
                    if target_class is OrderedStreamTarget and not copied_class.under_way:
                        _log_low_rate(settings.name, copied_class.stream)
                target = target_class(
                    nats_connection,
                    settings,
                    source=source,
                    class_id=source.class_id,
                    sequence_scope=sequence_scope(connection.core),
                    source_identity=source_identity,
                    stream_state=stream_state,
                    stream=copied_class.stream,
                    target_identities=_cluster_identities(
                        servers,
                        copied_class.stream,
                        nats_identity(nats_connection, copied_class.stream),
                    ),
                    config=config,
                    config_fits=lambda config: (
                        select_target(config, copied_class) == (target_class, options)
                    ),
                    **options,
                )
                _log_connected(settings.name, nats_connection)
                yield SourceAndTarget(source, target, start_sequence, [], discarded_records)

    return CopierConnector(
        open, bus_source_opener(source_endpoint, create_source, heartbeat=heartbeat, auth=auth)
    )


def nats_to_bus(
    servers: str,
    target_endpoint: Endpoint,
    settings: TargetSettings,
    copied_class: CopiedClass,
    *,
    nats_access: NatsAccess,
) -> CopierConnector:
    """Return the connector of a copier from a NATS server, or one of its streams, to a class of a
    bus.
    """
    settings = replace(settings, channels=())  # The server filters the subjects.
    heartbeat = settings.heartbeat_seconds
    open_dead_letters = dead_letter_opener(
        target_endpoint, settings.class_, settings.name, heartbeat=heartbeat, auth=settings.auth
    )

    def create_source(nats_connection: BridgeNatsConnection, target_id: str) -> StreamSource:
        require_jetstream(nats_connection)
        return StreamSource(
            nats_connection,
            copied_class.stream,
            durable=settings.name,
            target_id=target_id,
            subjects=copied_class.channels,
            start=copied_class.start,
            heartbeat=heartbeat,
            open_dead_letters=open_dead_letters,
        )

    @asynccontextmanager
    async def open_source() -> AsyncIterator[tuple[StreamSource, int]]:
        async with nats_access.connect(
            servers, settings.name, heartbeat=heartbeat
        ) as nats_connection:
            source = create_source(nats_connection, "")
            yield source, await source.open()

    @asynccontextmanager
    async def open(source_opened: SourceOpened) -> AsyncIterator[SourceAndTarget]:
        target_id, is_stateless = await probe_bus(
            target_endpoint, heartbeat=heartbeat, auth=settings.auth
        )
        async with nats_access.connect(
            servers, settings.name, heartbeat=heartbeat
        ) as nats_connection:
            source: CoreNatsSource | StreamSource
            if copied_class.stream:
                source = create_source(nats_connection, target_id)
            else:
                source = CoreNatsSource(
                    nats_connection, copied_class.channels, open_dead_letters=open_dead_letters
                )
            _cluster_identities(servers, copied_class.stream, source.identity)
            committed = first = await source.open()
            source_opened(source, first)
            numbering_scope = source.storage_id if copied_class.stream else servers
            if is_stateless:
                async with AsyncExitStack() as stack:
                    if not copied_class.stream:
                        # Core NATS sequences start again with each connection, so the publisher
                        # name changes too. This connection reserves the name of the copier itself.
                        name_settings = settings.for_source(numbering_scope)
                        await stack.enter_async_context(
                            connect(target_endpoint, name_settings.create_client_core())
                        )
                    target_settings = settings.for_source(source.storage_id)
                    stateless_target = await stack.enter_async_context(
                        open_stateless_server_target(
                            target_endpoint, target_settings, source, first, SourceIdentity()
                        )
                    )
                    _log_connected(settings.name, nats_connection)
                    yield SourceAndTarget(source, stateless_target, first, [])
                return
            target_settings = settings.for_source(numbering_scope)
            async with open_bus_target(target_endpoint, target_settings) as (target, record):
                if isinstance(source, StreamSource):
                    # The copier that this one replaced may have advanced the stream.
                    await source.refresh_stream_info()
                    if source.is_new:
                        committed = 0  # The consumer is new: only the target has the position.
                refusals = await target.resume(source, record, committed=committed)
                start_sequence = (
                    first
                    if target.resume_sequence is None
                    else max(committed, target.resume_sequence)
                )
                _log_connected(settings.name, nats_connection)
                yield SourceAndTarget(
                    source, target, start_sequence, refusals, target.discarded_records
                )

    return CopierConnector(open, open_source if copied_class.stream else None)


async def _fetch_stream_config(
    nats_connection: BridgeNatsConnection, stream: str
) -> StreamConfig | None:
    """Return the configuration of a stream, or None if it does not exist yet."""
    try:
        config: StreamConfig = (await nats_connection.nats.api_request(f"STREAM.INFO.{stream}"))[
            "config"
        ]
    except JetStreamError as error:
        if error.code not in NOT_FOUND:
            raise
        return None
    return config


def select_target(
    config: StreamConfig | None, copied_class: CopiedClass
) -> tuple[type[NatsTarget], dict[str, Any]]:
    """Return the type of target for a stream, and its additional arguments.

    A stream that does not exist yet may get replicas, so it is treated like a replicated stream.
    """
    if config is not None and config.get("allow_batched") is True:
        return BatchedStreamTarget, {}
    if config is None or copied_class.under_way or _can_reorder(config):
        return OrderedStreamTarget, {"under_way": copied_class.under_way or IN_FLIGHT_MESSAGES}
    return NatsTarget, {}


def _can_reorder(config: StreamConfig) -> bool:
    """Return True if the stream can store a message after later ones.

    That happens if a message is lost with a leader, or if a full stream refuses a message and
    then has room for the next one.
    """
    bounds = (config.get(bound) or 0 for bound in ("max_msgs", "max_bytes"))
    refuses = config.get("discard") == "new" and any(bound > 0 for bound in bounds)
    return refuses or (config.get("num_replicas") or 1) > 1


def _log_low_rate(copier_name: str, stream: str) -> None:
    log.info(
        "copier.slowed",
        "{copier}: messages are stored in stream {stream!r} one at a time, to keep their order if "
        "its leader changes or it is full. For a higher rate, set 'allow_batched' in the stream "
        "(nats-server 2.14), or 'under_way' in the bridge's table, which can reorder messages then",
        copier=copier_name,
        stream=stream,
    )


def _log_connected(copier_name: str, nats_connection: BridgeNatsConnection) -> None:
    log.info(
        "copier.nats_connected",
        "{copier}: connected to NATS at {server}",
        copier=copier_name,
        server=nats_connection.nats.server,
    )
