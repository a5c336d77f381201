"""/varz, /connz and /subsz in the JSON format of nats-server's monitoring, and /classz.

Fields that exist in both servers have the same names and types; the rest of nats-server's fields is
missing. Figures are sums over binary and NATS clients. Lists are bounded and built in steps.

    cid         NATS clients: as in their INFO; binary clients: 2**32 plus the session id
    in_bytes    NATS clients: payloads and headers; binary clients: all bytes read
    out_bytes   all bytes sent
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from heapq import nlargest, nsmallest
from itertools import islice
from typing import Any, TypeAlias

import msgspec

from simplebus.core.broker.inquire_positions import producer_name
from simplebus.core.errors import RemoteProtocolError
from simplebus.core.group.group import GroupMember
from simplebus.core.protocol.inquiry import ClassInquiry
from simplebus.core.session.session import Session
from simplebus.monitor import class_metrics
from simplebus.monitor.requests import (
    BadRequestError,
    Request,
    RequestHandler,
    ResponseSteps,
    error_response,
    json_response,
)
from simplebus.nats.protocol.handshake import PROTOCOL_VERSION
from simplebus.nats.server.session import NatsSession
from simplebus.server import process
from simplebus.server.connection import Connection
from simplebus.server.nats_listener import NatsListener
from simplebus.server.server import Server

ROWS_MAX = 1024
"""Default and maximum length of a list."""
_ROWS_PER_STEP = 64
_SUBJECTS_PER_CONNECTION_MAX = 256
"""Subjects listed per connection."""
BINARY_CID_OFFSET = 1 << 32
_DAY, _YEAR = 86_400, 365 * 86_400
_NANOSECONDS = 1_000_000_000

AnyConnection: TypeAlias = Connection[Any]


class VarzEndpoints:
    """Monitoring endpoints of one server."""

    def __init__(
        self,
        server: Server,
        nats_listener: NatsListener | None,
        *,
        client_address: tuple[str, int],
        http_address: tuple[str, int],
        version: str,
    ) -> None:
        """Create the endpoints.

        Args:
            server: The server.
            nats_listener: Its NATS listener, if any.
            client_address: Address for clients: of the NATS listener if there is one.
            http_address: Address of the HTTP listener.
            version: Version of this package.
        """
        self._server = server
        self._nats_listener = nats_listener
        self._client_address, self._http_address = client_address, http_address
        self._version = version
        self._cpu = _CpuUsage()

    def build_handlers(self) -> dict[str, RequestHandler]:
        """Return the request handlers by path."""
        return {
            "/varz": self._handle_varz,
            "/connz": self._handle_connz,
            "/subsz": self._handle_subsz,
            "/subscriptionsz": self._handle_subsz,
            "/classz": self._handle_classz,
        }

    # The server ----------------------------------------------------------------------------------

    def _handle_varz(self, request: Request) -> ResponseSteps:
        server, nats = self._server, self._nats_listener
        limits, now = server.broker.settings.limits, time.time()
        total = (yield from class_metrics.collect_bus_metrics(server.broker.store)).total
        binary_traffic = server.total_traffic()
        yield
        nats_statistics = nats.nats_server.statistics() if nats is not None else None
        nats_limits = nats.nats_server.settings.limits if nats is not None else None
        in_msgs = binary_traffic.messages + (
            nats_statistics.in_messages if nats_statistics is not None else 0
        )
        received_byte_count = binary_traffic.received_bytes + (
            nats_statistics.in_bytes if nats_statistics is not None else 0
        )
        out_msgs = total.delivered + total.redelivered
        out_msgs += nats_statistics.out_messages if nats_statistics is not None else 0
        sent_byte_count = binary_traffic.sent_bytes + (
            nats_statistics.out_bytes if nats_statistics is not None else 0
        )
        slow_consumer_count = nats_statistics.slow_consumers if nats_statistics is not None else 0
        server_id = self._server_id()
        return json_response(
            {
                "server_id": server_id,
                "server_name": nats.nats_server.settings.server_name
                if nats is not None
                else server_id,
                "version": PROTOCOL_VERSION,
                "simplebus_version": self._version,
                "proto": 1,
                "go": "none",
                "host": self._client_address[0],
                "port": self._client_address[1],
                "auth_required": nats is not None
                and nats.nats_server.authenticator.auth.is_required,
                "max_connections": limits.connections
                + (nats_limits.connections if nats_limits is not None else 0),
                "ping_interval": int(
                    (nats_limits.ping_seconds if nats_limits is not None else 0) * _NANOSECONDS
                ),
                "ping_max": nats_limits.pings_max if nats_limits is not None else 0,
                "http_host": self._http_address[0],
                "http_port": self._http_address[1],
                "http_base_path": "",
                "https_port": 0,
                "auth_timeout": nats_limits.auth_seconds if nats_limits is not None else 0,
                "max_control_line": nats_limits.max_control_line if nats_limits is not None else 0,
                "max_payload": nats_limits.max_payload
                if nats_limits is not None
                else limits.frame_bytes,
                "max_pending": nats_limits.max_pending
                if nats_limits is not None
                else limits.pending_bytes,
                "tls_timeout": nats_limits.tls_seconds if nats_limits is not None else 0,
                "write_deadline": int(
                    (nats_limits.write_seconds if nats_limits is not None else 0) * _NANOSECONDS
                ),
                "start": format_timestamp(process.STARTED_AT),
                "now": format_timestamp(now),
                "uptime": format_duration(now - process.STARTED_AT),
                "mem": process.resident_bytes(),
                "cores": os.cpu_count() or 1,
                "gomaxprocs": 1,
                "cpu": self._cpu.percent(),
                "connections": len(server.connections)
                + (len(nats.connections) if nats is not None else 0),
                "total_connections": server.accepted_count
                + (nats.accepted_count if nats is not None else 0),
                "routes": 0,
                "remotes": 0,
                "leafnodes": 0,
                "in_msgs": in_msgs,
                "in_bytes": received_byte_count,
                "in_client_msgs": in_msgs,
                "in_client_bytes": received_byte_count,
                "out_msgs": out_msgs,
                "out_bytes": sent_byte_count,
                "out_client_msgs": out_msgs,
                "out_client_bytes": sent_byte_count,
                "slow_consumers": slow_consumer_count,
                "stale_connections": 0,
                "stalled_clients": total.blocked,
                "subscriptions": total.positions
                + (nats_statistics.subscriptions if nats_statistics is not None else 0),
                "config_load_time": format_timestamp(process.STARTED_AT),
                "slow_consumer_stats": {
                    "clients": slow_consumer_count,
                    "routes": 0,
                    "gateways": 0,
                    "leafs": 0,
                },
            }
        )

    def _server_id(self) -> str:
        if self._nats_listener is not None:
            return self._nats_listener.nats_server.server_id
        return self._server.broker.inquiry_handler.identity

    # Connections ---------------------------------------------------------------------------------

    def _handle_connz(self, request: Request) -> ResponseSteps:
        limit = request.get_int("limit", ROWS_MAX, maximum=ROWS_MAX) or ROWS_MAX
        offset = request.get_int("offset", 0, maximum=1 << 40)
        only_cid = request.get_int("cid", 0, maximum=1 << 62)
        sort, descending = _parse_sort(request.query.get("sort", ""))
        connections = list(self._connections())
        if only_cid:
            connections = [each for each in connections if connection_id(each) == only_cid]
        yield
        if request.query.get("state", "open") == "closed":
            connections = []
        if sort is not None:
            page_end = offset + limit
            select = nlargest if descending else nsmallest
            page = select(page_end, connections, key=sort)[offset:]
            yield
        else:
            page = connections[offset : offset + limit]
        subs = request.query.get("subs", "").lower()
        auth = request.get_flag("auth")
        rows = []
        for count, connection in enumerate(page):
            if connection.socket.fileno() >= 0:
                rows.append(self._connection_row(connection, subs=subs, auth=auth))
            if count % _ROWS_PER_STEP == _ROWS_PER_STEP - 1:
                yield
        return json_response(
            {
                "server_id": self._server_id(),
                "now": format_timestamp(time.time()),
                "num_connections": len(rows),
                "total": len(connections),
                "offset": offset,
                "limit": limit,
                "connections": rows,
            }
        )

    def _connections(self) -> Iterator[AnyConnection]:
        """Iterate over all connections: NATS clients first, each listener's in order of arrival."""
        if self._nats_listener is not None:
            yield from self._nats_listener.connections.values()
        yield from self._server.connections.values()

    def _connection_row(
        self, connection: AnyConnection, *, subs: str, auth: bool
    ) -> dict[str, Any]:
        session = connection.session
        now, since = time.time(), connection.connected_at
        address = session.peer.partition(" (")[0]  # The program's name follows.
        host, _, port = address.rpartition(":")
        row: dict[str, Any] = {
            "cid": connection_id(connection),
            "kind": "Client",
            "type": "nats" if isinstance(session, NatsSession) else "simplebus",
            "ip": host.strip("[]"),
            "port": int(port) if port.isdigit() else 0,
            "start": format_timestamp(since),
            "last_activity": format_timestamp(now - idle_seconds(connection)),
            "rtt": f"{round_trip_microseconds(connection.socket)}µs",
            "uptime": format_duration(now - since),
            "idle": format_duration(idle_seconds(connection)),
            "pending_bytes": pending_bytes(connection),
            "in_msgs": received_message_count(connection),
            "out_msgs": sent_message_count(connection),
            "in_bytes": received_byte_count(connection),
            "out_bytes": sent_byte_count(connection),
            "subscriptions": len(session.subscriptions),
            "name": name(connection),
        }
        if isinstance(session, NatsSession):
            row |= {"lang": session.options.lang, "version": session.options.version}
            if auth and (user := session.options.user or session.options.nkey):
                row["authorized_user"] = user
        else:
            row |= {"lang": "", "version": ""}
        tls = connection.tls
        if tls is not None and (negotiated := tls.negotiated_version()):
            row["tls_version"], row["tls_cipher_suite"] = negotiated
        if subs and subs not in ("0", "false"):
            subscriptions = islice(_subscriptions(connection), _SUBJECTS_PER_CONNECTION_MAX)
            if subs == "detail":
                row["subscriptions_list_detail"] = list(subscriptions)
            else:
                row["subscriptions_list"] = [each["subject"] for each in subscriptions]
        return row

    # Subscriptions -------------------------------------------------------------------------------

    def _handle_subsz(self, request: Request) -> ResponseSteps:
        limit = request.get_int("limit", ROWS_MAX, maximum=ROWS_MAX) or ROWS_MAX
        offset = request.get_int("offset", 0, maximum=1 << 40)
        broker = self._server.broker
        routes = (
            self._nats_listener.nats_server.routes.statistics()
            if self._nats_listener is not None
            else None
        )
        count = sum(len(cls.positions) for cls in broker.classes.values())
        count += routes.subscriptions if routes is not None else 0
        yield
        rows: list[dict[str, Any]] = []
        if request.get_flag("subs"):
            candidates = islice(self._all_subscriptions(), offset, offset + limit)
            while batch := list(islice(candidates, _ROWS_PER_STEP)):
                rows += batch
                yield
        return json_response(
            {
                "server_id": self._server_id(),
                "now": format_timestamp(time.time()),
                "num_subscriptions": count,
                "num_cache": routes.results if routes is not None else 0,
                "num_inserts": routes.inserts if routes is not None else 0,
                "num_removes": routes.removes if routes is not None else 0,
                "num_matches": routes.searches if routes is not None else 0,
                "cache_hit_rate": 0.0,
                "max_fanout": routes.widest if routes is not None else 0,
                "avg_fanout": routes.mean_width if routes is not None else 0.0,
                "total": len(rows),
                "offset": offset,
                "limit": limit,
                **({"subscriptions_list": rows} if rows else {}),
            }
        )

    def _all_subscriptions(self) -> Iterator[dict[str, Any]]:
        for connection in list(self._connections()):
            yield from _subscriptions(connection)

    # Classes -------------------------------------------------------------------------------------

    def _handle_classz(self, request: Request) -> ResponseSteps:
        """List all classes; or report one class, given by id or name in `class`."""
        broker = self._server.broker
        if requested := request.query.get("class", ""):
            is_id = requested.isascii() and requested.isdigit() and len(requested) < 6
            class_: int | str = int(requested) if is_id else requested
            yield
            try:
                return json_response(
                    broker.inquiry_handler.build_report(ClassInquiry(class_=class_))
                )
            except RemoteProtocolError as error:
                return error_response(404, error.sentence)
        limit = request.get_int("limit", ROWS_MAX, maximum=ROWS_MAX) or ROWS_MAX
        offset = request.get_int("offset", 0, maximum=1 << 40)
        rows = []
        for cls in islice(list(broker.classes.values()), offset, offset + limit):
            figures = yield from class_metrics.collect_class_metrics(cls)
            dropped = {reason.value: count for reason, count in figures.dropped.items() if count}
            rows.append(msgspec.to_builtins(figures) | {"dropped": dropped})
            yield
        return json_response(
            {
                "bus": broker.inquiry_handler.identity,
                "now": format_timestamp(time.time()),
                "num_classes": len(rows),
                "total": len(broker.classes),
                "offset": offset,
                "limit": limit,
                "classes": rows,
            }
        )


# Values of one connection ------------------------------------------------------------------------


def connection_id(connection: AnyConnection) -> int:
    """Return the id of a connection, unique within the server."""
    session = connection.session
    if isinstance(session, NatsSession):
        return session.client_id
    return BINARY_CID_OFFSET + int(session.session_id)


def name(connection: AnyConnection) -> str:
    """Return the name that the client program gave itself."""
    session = connection.session
    return session.options.name if isinstance(session, NatsSession) else producer_name(session)


def pending_bytes(connection: AnyConnection) -> int:
    """Return the bytes waiting to be sent to the client."""
    return int(connection.session.outbox.pending_bytes)


def received_message_count(connection: AnyConnection) -> int:
    session = connection.session
    return int(session.in_messages if isinstance(session, NatsSession) else session.handled_count)


def sent_message_count(connection: AnyConnection) -> int:
    """Return the messages sent to the client. Deliveries of a group count for no member."""
    session = connection.session
    if isinstance(session, NatsSession):
        return session.out_messages
    binary_session: Session = session
    return sum(
        each.position.delivered_count + each.position.redelivered_count
        for each in binary_session.subscriptions.values()
        if not isinstance(each, GroupMember)
    )


def received_byte_count(connection: AnyConnection) -> int:
    session = connection.session
    received = session.in_bytes if isinstance(session, NatsSession) else _received(session)
    return int(received)


def _received(session: Session) -> int:
    return session.receiver.received_bytes


def sent_byte_count(connection: AnyConnection) -> int:
    return int(connection.session.outbox.sent_bytes)


def idle_seconds(connection: AnyConnection) -> float:
    """Return the seconds since the last received data."""
    return connection.idle_seconds()


def round_trip_microseconds(sock: socket.socket) -> int:
    """Return the kernel's estimate of the round-trip time; 0 if unknown."""
    try:
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCPI_RTT_OFFSET + 4)
    except OSError:
        return 0
    return int.from_bytes(info[_TCPI_RTT_OFFSET : _TCPI_RTT_OFFSET + 4], "little")


_TCPI_RTT_OFFSET = 68
"""Offset of tcpi_rtt, in microseconds, in Linux's struct tcp_info."""


def _subscriptions(connection: AnyConnection) -> Iterator[dict[str, Any]]:
    """Iterate over the client's subscriptions. Subscriptions to classes are shown as
    `class.<id> <pattern>`.
    """
    session, number = connection.session, connection_id(connection)
    if isinstance(session, NatsSession):
        for sid, each in list(session.subscriptions.items()):
            row = {"subject": _text(each.subject), "sid": _text(sid), "msgs": each.delivered_count}
            if each.queue:
                row["qgroup"] = _text(each.queue)
            yield row | {"cid": number}
        return
    yield from _class_subscriptions(session, number)


def _class_subscriptions(session: Session, number: int) -> Iterator[dict[str, Any]]:
    for key, subscription in list(session.subscriptions.items()):
        position = subscription.position
        channel_filter = position.channel_filter
        patterns = channel_filter.patterns if channel_filter is not None else ("#",)
        for pattern in patterns[:_SUBJECTS_PER_CONNECTION_MAX]:
            row = {
                "subject": f"class.{subscription.class_id} {pattern}",
                "sid": str(key),
                "msgs": position.delivered_count,
            }
            if position.group:
                row["qgroup"] = position.group
            yield row | {"cid": number}


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "replace")


# Sort order --------------------------------------------------------------------------------------

SortKey: TypeAlias = Callable[[AnyConnection], float]

_SORT_KEYS: dict[str, tuple[SortKey | None, bool]] = {
    # Sort key, and True for descending order, as in nats-server.
    "": (None, False),
    "cid": (None, False),
    "start": (lambda each: each.connected_at, False),
    "subs": (lambda each: len(each.session.subscriptions), True),
    "pending": (pending_bytes, True),
    "msgs_to": (sent_message_count, True),
    "msgs_from": (received_message_count, True),
    "bytes_to": (sent_byte_count, True),
    "bytes_from": (received_byte_count, True),
    "last": (lambda each: -idle_seconds(each), True),
    "idle": (idle_seconds, True),
    "uptime": (lambda each: each.connected_at, False),
    "rtt": (lambda each: round_trip_microseconds(each.socket), True),
}


def _parse_sort(requested: str) -> tuple[SortKey | None, bool]:
    """Return the sort key and order. Raises BadRequestError."""
    found = _SORT_KEYS.get(requested.lower())
    if found is None:
        known = ", ".join(filter(None, _SORT_KEYS))
        raise BadRequestError(f"expected sort to be one of {known}; got {requested[:40]!r}")
    return found


# Time formats ------------------------------------------------------------------------------------


def format_timestamp(seconds: float) -> str:
    """Format Unix time as RFC 3339."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def format_duration(seconds: float) -> str:
    """Format a duration as nats-server does: 1y2d3h4m5s, without leading zero units."""
    remaining = max(0, int(seconds))
    years, remaining = divmod(remaining, _YEAR)
    days, remaining = divmod(remaining, _DAY)
    hours, remaining = divmod(remaining, 3600)
    minutes, remaining = divmod(remaining, 60)
    text = ""
    for count, unit in ((years, "y"), (days, "d"), (hours, "h"), (minutes, "m")):
        if count or text:
            text += f"{count}{unit}"
    return f"{text}{remaining}s"


class _CpuUsage:
    """CPU usage since the previous call, in percent of one CPU."""

    def __init__(self) -> None:
        self._before = time.monotonic(), process.cpu_seconds()
        self._last_percent = 0.0

    def percent(self) -> float:
        now, used = time.monotonic(), process.cpu_seconds()
        passed = now - self._before[0]
        if passed >= 0.5:
            self._last_percent = round(100 * (used - self._before[1]) / passed, 1)
            self._before = now, used
        return self._last_percent
