"""Facts of a running server as immutable values: the only monitoring code that reads its state.

Metrics, tables and JSON are made from these values. Collection is read-only and yields regularly,
and lists have maximum lengths, so that many classes or connections do not delay other tasks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple, TypeAlias, TypeVar

import msgspec

from simplebus.core.broker.inquire_positions import PositionReporter, producer_name, truncate_text
from simplebus.core.errors import Reason
from simplebus.core.group.group import GroupMember
from simplebus.core.limits import Limits
from simplebus.core.protocol.inquiry import (
    ClassInquiry,
    InquireReply,
    SessionInfo,
    SessionInquiry,
)
from simplebus.core.session.session import Session
from simplebus.core.steps import drain_list
from simplebus.jetstream.publish.stream_publisher import StreamPublisherStatistics
from simplebus.monitor import bus_facts
from simplebus.monitor.bus_facts import BusFacts, ClassFacts, SlowFacts
from simplebus.monitor.snapshot import Health
from simplebus.nats.server.routes import SubjectRoutesStatistics
from simplebus.nats.server.session import NatsSession
from simplebus.nats.settings import NatsSettings
from simplebus.nats.statistics import NatsServerStatistics
from simplebus.server.connection import Connection
from simplebus.server.journal.pump import JournalStatistics
from simplebus.server.nats_listener import NatsListener
from simplebus.server.observability.latency import Latencies, LatencyRecorder, RecentLatencies
from simplebus.server.observability.loop_watchdog import LoopWatchdog
from simplebus.server.observability.message_spans import MessageSpans
from simplebus.server.server import Server, Traffic

BINARY_CID_OFFSET = 1 << 32
SUBJECTS_PER_CONNECTION_MAX = 256
"""Subjects listed per connection."""
_CLIENTS_MAX = 50
_ROWS_PER_STEP = 64
_COUNTED_PER_STEP = 512
_NO_ROUTES = SubjectRoutesStatistics()

AnyConnection: TypeAlias = Connection[Any]
T = TypeVar("T")
Steps: TypeAlias = Generator[None, None, T]


class ListenerFacts(NamedTuple):
    """Connections of one listener."""

    name: str
    open_count: int
    accepted_count: int
    """Connections accepted since the start."""


class ConnectionFacts(msgspec.Struct, frozen=True):
    """One client connection."""

    cid: int
    """NATS clients: as in their INFO; binary clients: BINARY_CID_OFFSET plus the session id."""
    is_nats: bool
    name: str
    """Name that the client program gave itself."""
    peer: str
    """HOST:PORT."""
    lang: str
    version: str
    user: str
    """Name of the user; empty if the bus has no users."""
    start: float
    """Unix time of the connection."""
    idle_seconds: float
    """Time since the last received data."""
    rtt_microseconds: int
    """The kernel's estimate of the round-trip time."""
    pending_bytes: int
    """Bytes waiting to be sent to the client."""
    in_msgs: int
    out_msgs: int
    """Messages sent to the client. Deliveries of a group count for no member."""
    in_bytes: int
    out_bytes: int
    subscriptions: int
    tls: tuple[str, str] | None
    """Negotiated TLS version and cipher suite."""

    @property
    def client_id(self) -> str:
        return str(self.cid)

    @property
    def label(self) -> str:
        """The name, cut to a limited length."""
        return truncate_text(self.name)

    @property
    def library(self) -> str:
        """Name and version of the client library, cut to a limited length."""
        return truncate_text(f"{self.lang} {self.version}".strip())


class SubscriptionFacts(msgspec.Struct, frozen=True, omit_defaults=True):
    """One subject of a client's subscription, in the fields of nats-server.

    Subscriptions to classes have subjects `class.<name> <pattern>`, or the id without a name.
    """

    cid: int
    subject: str
    sid: str
    msgs: int
    qgroup: str = ""


class StallFacts(NamedTuple):
    """Stalls of the event loop."""

    stall_count: int
    seconds: float
    """Total duration of the stalls that have ended."""


class ClusterFacts(NamedTuple):
    """State of the JetStream cluster of a stateless server."""

    is_up: bool
    refused_class_count: int
    publisher: StreamPublisherStatistics


class ServerFacts(msgspec.Struct, frozen=True):
    """State of a server at one moment."""

    now: float
    """Unix time in seconds."""
    identity: str
    health: Health
    bus: BusFacts
    class_count: int
    session_count: int
    memory_bytes: int
    """Memory used by the rings of all classes."""
    memory_limit_bytes: int
    refused: Mapping[Reason, int]
    disconnected: Mapping[Reason, int]
    limits: Limits
    traffic: Traffic
    """Totals of binary connections."""
    listeners: Collection[ListenerFacts]
    http_seconds: float
    """CPU time of the event loop for HTTP responses and the periodic snapshot."""
    latencies: Latencies
    recent_latencies: Latencies
    """Latencies of about the last minute."""
    stalls: StallFacts | None
    """None if stalls are not observed."""
    nats: NatsServerStatistics | None
    nats_settings: NatsSettings | None
    routes: SubjectRoutesStatistics
    """Subscriptions of NATS clients; zeros without a NATS listener."""
    is_auth_required: bool
    """True if a listener for clients has users."""
    server_id: str
    """Id of the NATS server if there is one, else of the bus."""
    journal: JournalStatistics | None
    cluster: ClusterFacts | None
    slow: SlowFacts = SlowFacts()
    """Empty unless details were requested."""
    clients: Collection[ConnectionFacts] = ()
    """NATS clients with the most pending bytes, if details were requested."""
    clients_left_out: int = 0


class FactsCollector:
    """Collects the facts of one server."""

    def __init__(
        self,
        server: Server,
        nats_listener: NatsListener | None,
        spans: MessageSpans | None = None,
    ) -> None:
        """`spans` records spans of sampled messages; None records no spans."""
        self._server, self._nats_listener = server, nats_listener
        self._position_reporter = PositionReporter(server.broker.store, server.broker.sessions)
        self._recent_latencies = RecentLatencies()
        self.latency = LatencyRecorder(server.broker, spans)
        server.latency = self.latency
        self.is_ready = self.is_draining = False
        self.http_connections: Callable[[], tuple[int, int]] = lambda: (0, 0)
        """Returns the open and the accepted HTTP connections."""
        self.http_seconds: Callable[[], float] = lambda: 0.0
        """Returns the CPU time of HTTP responses in seconds."""
        self.watchdog: LoopWatchdog | None = None
        self._listed_classes: set[int] = set()
        """Ids of the classes that were listed individually before."""

    @property
    def identity(self) -> str:
        """Id of the bus."""
        return self._server.broker.inquiry_handler.identity

    @property
    def server_id(self) -> str:
        """Id of the NATS server if there is one, else of the bus."""
        listener = self._nats_listener
        return listener.nats_server.server_id if listener is not None else self.identity

    @property
    def class_count(self) -> int:
        return len(self._server.broker.classes)

    def health(self) -> Health:
        """Return whether the server accepts work, and why not."""
        if self.is_draining:
            return Health(ready=False, draining=True, reason="the server is stopping")
        if not self.is_ready:
            return Health(ready=False, reason="not every listener accepts connections yet")
        commit_log, cluster = self._server.broker.commit_log, self._server.jetstream
        failure = commit_log.write_error if commit_log is not None else None
        if failure is not None:
            return Health(ready=False, reason=f"{failure[0].value}: {failure[1]}")
        if cluster is not None and not cluster.link.is_ready:
            return Health(ready=False, reason="no server of the JetStream cluster is reachable")
        return Health()

    def collect(self, *, detailed: bool = False) -> Steps[ServerFacts]:
        """Collect the facts in steps; the slowest clients and subscriptions only if `detailed`."""
        server, listener = self._server, self._nats_listener
        broker, cluster, watchdog = server.broker, server.jetstream, self.watchdog
        nats_server = listener.nats_server if listener is not None else None
        nats = None
        if nats_server is not None:
            nats = yield from nats_server.statistics_in_steps()
        yield
        traffic = yield from server.total_traffic()
        yield
        bus = yield from bus_facts.collect_bus(broker.store, self._listed_classes)
        self._listed_classes = {each.class_id for each in bus.classes}
        yield
        slow, clients, clients_left_out = SlowFacts(), list[ConnectionFacts](), 0
        if detailed:
            slow = yield from bus_facts.collect_slow(broker, self._position_reporter)
            clients = yield from self._collect_clients()
            clients_left_out = max(0, nats.clients - len(clients)) if nats is not None else 0
            yield
        return ServerFacts(
            now=time.time(),
            identity=self.identity,
            health=self.health(),
            bus=bus,
            class_count=self.class_count,
            session_count=len(broker.sessions),
            memory_bytes=broker.budget.used_bytes,
            memory_limit_bytes=broker.budget.limit_bytes,
            refused=dict(broker.refusal_counts),
            disconnected=dict(server.disconnect_counts),
            limits=broker.settings.limits,
            traffic=traffic,
            listeners=self._count_connections(),
            http_seconds=self.http_seconds(),
            latencies=self.latency.snapshots(),
            recent_latencies=self._recent_latencies.snapshot(self.latency),
            stalls=StallFacts(watchdog.stall_count, watchdog.stalled_seconds) if watchdog else None,
            nats=nats,
            nats_settings=nats_server.settings if nats_server is not None else None,
            routes=nats_server.routes.statistics() if nats_server is not None else _NO_ROUTES,
            is_auth_required=broker.users is not None
            or (nats_server is not None and nats_server.settings.users is not None),
            server_id=self.server_id,
            journal=server.journal_pump.statistics() if server.journal_pump is not None else None,
            cluster=None
            if cluster is None
            else ClusterFacts(
                cluster.link.is_ready, len(cluster.refusals), cluster.publisher.statistics()
            ),
            slow=slow,
            clients=clients,
            clients_left_out=clients_left_out,
        )

    def _count_connections(self) -> list[ListenerFacts]:
        server, nats = self._server, self._nats_listener
        counts = [ListenerFacts("tcp", len(server.connections), server.accepted_count)]
        if nats is not None:
            counts.append(ListenerFacts("nats", len(nats.connections), nats.accepted_count))
        return [*counts, ListenerFacts("http", *self.http_connections())]

    def _collect_clients(self) -> Steps[list[ConnectionFacts]]:
        if self._nats_listener is None:
            return []
        connections = self._nats_listener.connections.values()
        chosen = yield from bus_facts.select_largest(
            _CLIENTS_MAX,
            list(islice(connections, bus_facts.CANDIDATES_MAX)),
            key=lambda each: each.session.outbox.pending_bytes,
        )
        return [facts for each in chosen if (facts := _describe_connection(each)) is not None]

    # Connections and subscriptions ---------------------------------------------------------------

    def collect_connections(self) -> Steps[list[ConnectionFacts]]:
        """Collect the open connections in steps: NATS clients first, in order of arrival."""
        found = []
        for count, connection in enumerate(drain_list(self._connections())):
            if count % _ROWS_PER_STEP == _ROWS_PER_STEP - 1:
                yield
            if (facts := _describe_connection(connection)) is not None:
                found.append(facts)
        return found

    def collect_subscriptions(self, offset: int, limit: int) -> Steps[list[SubscriptionFacts]]:
        """Collect the subscriptions of all connections in steps, in the order of the connections.

        Args:
            offset: Number of subscriptions to skip.
            limit: Maximum number of subscriptions.
        """
        found: list[SubscriptionFacts] = []
        listed_count = 0  # Subscriptions of this step.
        for number, connection in enumerate(drain_list(self._connections()), 1):
            count = _count_subscriptions(connection)
            for first in range(offset, count, _ROWS_PER_STEP):
                part_limit = min(_ROWS_PER_STEP, limit - len(found))
                part = self._list_subscriptions(connection, first, part_limit)
                found += part
                listed_count += len(part)
                if len(found) >= limit:
                    return found
                if listed_count >= _ROWS_PER_STEP:
                    listed_count = 0
                    yield
            offset = max(0, offset - count)
            if number % _COUNTED_PER_STEP == 0:
                yield
        return found

    def count_subscriptions(self) -> Steps[int]:
        """Count in steps the subscriptions that `collect_subscriptions` lists."""
        total = 0
        for number, connection in enumerate(drain_list(self._connections()), 1):
            total += _count_subscriptions(connection)
            if number % _COUNTED_PER_STEP == 0:
                yield
        return total

    def list_subscriptions(self, cid: int) -> list[SubscriptionFacts]:
        """Return the first SUBJECTS_PER_CONNECTION_MAX subscriptions of a connection; none if it
        was closed.
        """
        connection: AnyConnection | None
        if cid >= BINARY_CID_OFFSET:
            connection = self._server.connections.get(cid - BINARY_CID_OFFSET)
        else:
            nats = self._nats_listener
            connection = nats.connections.get(cid) if nats is not None else None
        if connection is None:
            return []
        return self._list_subscriptions(connection, 0, SUBJECTS_PER_CONNECTION_MAX)

    def _list_subscriptions(
        self, connection: AnyConnection, first: int, limit: int
    ) -> list[SubscriptionFacts]:
        """Return at most `limit` subscriptions of a connection, from the one with index `first`."""
        session, cid = connection.session, _connection_id(connection)
        found: list[SubscriptionFacts] = []
        if isinstance(session, NatsSession):
            for sid in islice(session.subscriptions, first, first + limit):
                each = session.subscriptions[sid]
                subject, sid_text, queue = map(_text, (each.subject, sid, each.queue or b""))
                found.append(SubscriptionFacts(cid, subject, sid_text, each.delivered_count, queue))
            return found
        for key, subscription in session.subscriptions.items():
            patterns = _patterns(subscription)
            if first < len(patterns):
                position = subscription.position
                label = self._server.broker.classes[subscription.class_id].label
                for pattern in patterns[first : first + limit - len(found)]:
                    subject = f"class.{label} {pattern}"
                    found.append(
                        SubscriptionFacts(
                            cid, subject, str(key), position.delivered_count, position.group
                        )
                    )
            if len(found) == limit:
                break
            first = max(0, first - len(patterns))
        return found

    def _connections(self) -> list[AnyConnection]:
        nats = self._nats_listener.connections.values() if self._nats_listener is not None else ()
        return [*nats, *self._server.connections.values()]

    # Classes -------------------------------------------------------------------------------------

    def collect_classes(self, offset: int, limit: int) -> Steps[list[ClassFacts]]:
        """Collect the facts of each class in steps, in order of creation."""
        found = []
        broker = self._server.broker
        for cls in islice(list(broker.classes.values()), offset, offset + limit):
            found.append((yield from bus_facts.collect_class(cls, broker.clock.now)))
            yield
        return found

    def report_class(self, class_: int | str) -> InquireReply:
        """Return the broker's report on a class. Raises RemoteProtocolError (unknown_class)."""
        return self._server.broker.inquiry_handler.build_report(ClassInquiry(class_=class_))

    def report_session(self, session_id: int) -> SessionInfo:
        """Return the broker's report on a session. Raises RemoteProtocolError (unknown_session)."""
        report = self._server.broker.inquiry_handler.build_report(
            SessionInquiry(session=session_id)
        )
        assert isinstance(report, SessionInfo)
        return report

    def get_class_name(self, class_id: int) -> str:
        """Return the name of a class; empty if it has none."""
        cls = self._server.broker.classes.get(class_id)
        return "" if cls is None else cls.name


def _describe_connection(connection: AnyConnection) -> ConnectionFacts | None:
    """Return the facts of a connection; None if the client or the server has closed it."""
    tcp = connection.tcp_status()
    if tcp is None:
        return None
    session = connection.session
    is_nats = isinstance(session, NatsSession)
    tls = connection.tls.negotiated_version() if connection.tls is not None else None
    return ConnectionFacts(
        cid=_connection_id(connection),
        is_nats=is_nats,
        name=session.options.name if is_nats else producer_name(session),
        peer=session.peer.partition(" (")[0],  # The program's name follows.
        lang=session.options.lang if is_nats else "",
        version=session.options.version if is_nats else "",
        user=_user_name(session),
        start=connection.connected_at,
        idle_seconds=tcp.idle_seconds,
        rtt_microseconds=tcp.rtt_microseconds,
        pending_bytes=int(session.outbox.pending_bytes),
        in_msgs=int(session.in_messages if is_nats else session.handled_count),
        out_msgs=session.out_messages if is_nats else _count_sent_messages(session),
        in_bytes=int(session.in_bytes if is_nats else session.receiver.received_bytes),
        out_bytes=int(session.outbox.sent_bytes),
        subscriptions=len(session.subscriptions),
        tls=tls or None,
    )


def _count_subscriptions(connection: AnyConnection) -> int:
    """Return how many subscriptions of a connection are listed: one for each pattern."""
    session = connection.session
    if isinstance(session, NatsSession):
        return len(session.subscriptions)
    return sum(len(_patterns(each)) for each in session.subscriptions.values())


def _connection_id(connection: AnyConnection) -> int:
    session = connection.session
    if isinstance(session, NatsSession):
        return session.client_id
    return BINARY_CID_OFFSET + int(session.session_id)


def _count_sent_messages(session: Session) -> int:
    return sum(
        each.position.delivered_count + each.position.redelivered_count
        for each in session.subscriptions.values()
        if not isinstance(each, GroupMember)
    )


def _user_name(session: Session | NatsSession) -> str:
    if isinstance(session, NatsSession):
        return session.user.name if session.user is not None else ""
    return session.user


def _patterns(subscription: Any) -> Sequence[str]:
    """Return the channel patterns of a subscription to a class."""
    channel_filter = subscription.position.channel_filter
    patterns = channel_filter.patterns if channel_filter is not None else ("#",)
    return patterns[:SUBJECTS_PER_CONNECTION_MAX]


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "replace")
