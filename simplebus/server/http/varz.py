"""/varz, /connz and /subsz in the JSON format of nats-server; also /classz and /sessionz.

Fields that exist in both servers have the same names and types; the rest of nats-server's fields is
missing. Figures are sums over binary and NATS clients. Lists are bounded and built in steps.

    cid         NATS clients: as in their INFO; binary clients: 2**32 plus the session id
    in_bytes    NATS clients: payloads and headers; binary clients: all bytes read
    out_bytes   all bytes sent
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Generator
from datetime import UTC, datetime
from typing import Any, TypeAlias

import msgspec

from simplebus.core.errors import RemoteProtocolError
from simplebus.core.limits import SEQUENCE_MAX
from simplebus.monitor.bus_facts import ClassFacts
from simplebus.monitor.requests import (
    BadRequestError,
    Request,
    RequestHandler,
    ResponseSteps,
    error_response,
    json_response,
)
from simplebus.nats.protocol.handshake import PROTOCOL_VERSION
from simplebus.nats.statistics import NatsServerStatistics
from simplebus.server import process
from simplebus.server.http.facts import (
    ConnectionFacts,
    FactsCollector,
    ServerFacts,
    SubscriptionFacts,
)

ROWS_MAX = 1024
"""Default and maximum length of a list."""
_OFFSET_MAX = 1 << 40
_CONNECTION_FIELDS = (
    *("cid", "pending_bytes", "in_msgs", "out_msgs", "in_bytes", "out_bytes", "subscriptions"),
    *("name", "lang", "version"),
)
"""Fields of a connection with the same names in nats-server."""
_DAY, _YEAR = 86_400, 365 * 86_400
_NANOSECONDS = 1_000_000_000

_ROWS_PER_STEP = 32
_SORTED_PER_STEP = 2048


class VarzEndpoints:
    """Monitoring endpoints of one server."""

    def __init__(
        self,
        collector: FactsCollector,
        *,
        client_address: tuple[str, int],
        http_address: tuple[str, int],
        version: str,
    ) -> None:
        """Create the endpoints.

        Args:
            collector: Source of the facts.
            client_address: Address for clients: of the NATS listener if there is one.
            http_address: Address of the HTTP listener.
            version: Version of this package.
        """
        self._collector = collector
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
            "/sessionz": self._handle_sessionz,
        }

    def _handle_varz(self, request: Request) -> ResponseSteps:
        facts = yield from self._collector.collect()
        return json_response(
            {
                "simplebus_version": self._version,
                "host": self._client_address[0],
                "port": self._client_address[1],
                "http_host": self._http_address[0],
                "http_port": self._http_address[1],
                "mem": process.resident_bytes(),
                "cpu": self._cpu.percent(),
                **_format_server(facts),
            }
        )

    def _handle_connz(self, request: Request) -> ResponseSteps:
        limit, offset = _page(request)
        only_cid = request.get_int("cid", 0, maximum=1 << 62)
        sort, descending = _parse_sort(request.query.get("sort", ""))
        subs = request.query.get("subs", "").lower()
        connections = yield from self._collector.collect_connections()
        if only_cid:
            connections = [each for each in connections if each.cid == only_cid]
        if request.query.get("state", "open") == "closed":
            connections = []
        if sort is not None:
            yield from _sort_in_steps(connections, sort, descending=descending)
        page = connections[offset : offset + limit]
        now = time.time()
        rows: list[msgspec.Raw] = []
        for each in page:
            row = _format_connection(each, now, auth=request.get_flag("auth"))
            if subs and subs not in ("0", "false"):
                listed = self._collector.list_subscriptions(each.cid)
                if subs == "detail":
                    row["subscriptions_list_detail"] = listed
                else:
                    row["subscriptions_list"] = [subscription.subject for subscription in listed]
            yield from _add_row(rows, row)
        return json_response(
            {
                **self._heading(),
                "num_connections": len(rows),
                "total": len(connections),
                "offset": offset,
                "limit": limit,
                "connections": rows,
            }
        )

    def _handle_subsz(self, request: Request) -> ResponseSteps:
        limit, offset = _page(request)
        facts = yield from self._collector.collect()
        routes, rows, total = facts.routes, list[SubscriptionFacts](), 0
        if request.get_flag("subs"):
            total = yield from self._collector.count_subscriptions()
            rows = yield from self._collector.collect_subscriptions(offset, limit)
        return json_response(
            {
                **self._heading(),
                "num_subscriptions": facts.bus.total.positions + routes.subscriptions,
                "num_cache": routes.results,
                "num_inserts": routes.inserts,
                "num_removes": routes.removes,
                "num_matches": routes.searches,
                "cache_hit_rate": 0.0,
                "max_fanout": routes.widest,
                "avg_fanout": routes.mean_width,
                "total": total,
                "offset": offset,
                "limit": limit,
                **({"subscriptions_list": rows} if rows else {}),
            }
        )

    def _handle_classz(self, request: Request) -> ResponseSteps:
        """List all classes; or report one class, given by id or name in `class`."""
        if requested := request.query.get("class", ""):
            is_id = requested.isascii() and requested.isdigit() and len(requested) < 6
            yield
            try:
                report = self._collector.report_class(int(requested) if is_id else requested)
            except RemoteProtocolError as error:
                return error_response(404, error.sentence)
            return json_response(report)
        limit, offset = _page(request)
        rows: list[msgspec.Raw] = []
        for facts in (yield from self._collector.collect_classes(offset, limit)):
            yield from _add_row(rows, _format_class(facts))
        return json_response(
            {
                "bus": self._collector.identity,
                "now": format_timestamp(time.time()),
                "num_classes": len(rows),
                "total": self._collector.class_count,
                "offset": offset,
                "limit": limit,
                "classes": rows,
            }
        )

    def _handle_sessionz(self, request: Request) -> ResponseSteps:
        """Report one binary session, given by its number in `session`."""
        yield
        try:
            session_id = request.get_int("session", 0, maximum=SEQUENCE_MAX)
            report = self._collector.report_session(session_id)
        except RemoteProtocolError as error:
            return error_response(404, error.sentence)
        names = {
            each.class_id: self._collector.get_class_name(each.class_id)
            for each in report.positions
        }
        return json_response({**msgspec.to_builtins(report), "class_names": names})

    def _heading(self) -> dict[str, Any]:
        server_id, now = self._collector.server_id, format_timestamp(time.time())
        return {"server_id": server_id, "now": now}


def _page(request: Request) -> tuple[int, int]:
    """Return the limit and the offset of a list. Raises BadRequestError."""
    limit = request.get_int("limit", ROWS_MAX, maximum=ROWS_MAX) or ROWS_MAX
    return limit, request.get_int("offset", 0, maximum=_OFFSET_MAX)


def _format_server(facts: ServerFacts) -> dict[str, Any]:
    """Return the fields of /varz that come from the facts."""
    nats, settings = facts.nats or NatsServerStatistics(), facts.nats_settings
    limits, total = facts.limits, facts.bus.total
    nats_limits = settings.limits if settings is not None else None
    in_msgs = facts.traffic.messages + nats.in_messages
    in_bytes = facts.traffic.received_bytes + nats.in_bytes
    out_msgs = total.delivered + total.redelivered + nats.out_messages
    out_bytes = facts.traffic.sent_bytes + nats.out_bytes
    # HTTP connections are not counted, as in nats-server.
    client_listeners = [each for each in facts.listeners if each.name != "http"]
    started_at = format_timestamp(process.STARTED_AT)

    def nats_limit(name: str, default: float = 0) -> Any:
        return getattr(nats_limits, name) if nats_limits is not None else default

    return {
        "server_id": facts.server_id,
        "server_name": settings.server_name if settings is not None else facts.server_id,
        "version": PROTOCOL_VERSION,
        "proto": 1,
        "go": "none",
        "auth_required": facts.is_auth_required,
        "max_connections": limits.connections + nats_limit("connections"),
        "ping_interval": int(nats_limit("ping_seconds") * _NANOSECONDS),
        "ping_max": nats_limit("pings_max"),
        "http_base_path": "",
        "https_port": 0,
        "auth_timeout": nats_limit("auth_seconds"),
        "max_control_line": nats_limit("max_control_line"),
        "max_payload": nats_limit("max_payload", limits.frame_bytes),
        "max_pending": nats_limit("max_pending", limits.pending_bytes),
        "tls_timeout": nats_limit("tls_seconds"),
        "write_deadline": int(nats_limit("write_seconds") * _NANOSECONDS),
        "start": started_at,
        "now": format_timestamp(facts.now),
        "uptime": format_duration(facts.now - process.STARTED_AT),
        "cores": os.cpu_count() or 1,
        "gomaxprocs": 1,
        "connections": sum(each.open_count for each in client_listeners),
        "total_connections": sum(each.accepted_count for each in client_listeners),
        "routes": 0,
        "remotes": 0,
        "leafnodes": 0,
        "in_msgs": in_msgs,
        "in_bytes": in_bytes,
        "in_client_msgs": in_msgs,
        "in_client_bytes": in_bytes,
        "out_msgs": out_msgs,
        "out_bytes": out_bytes,
        "out_client_msgs": out_msgs,
        "out_client_bytes": out_bytes,
        "slow_consumers": nats.slow_consumers,
        "stale_connections": 0,
        "stalled_clients": total.blocked,
        "subscriptions": total.positions + nats.subscriptions,
        "config_load_time": started_at,
        "slow_consumer_stats": {
            "clients": nats.slow_consumers,
            **dict.fromkeys(("routes", "gateways", "leafs"), 0),
        },
    }


def _format_connection(facts: ConnectionFacts, now: float, *, auth: bool) -> dict[str, Any]:
    host, _, port = facts.peer.rpartition(":")
    row: dict[str, Any] = {
        "kind": "Client",
        "type": "nats" if facts.is_nats else "simplebus",
        "ip": host.strip("[]"),
        "port": int(port) if port.isdigit() else 0,
        "start": format_timestamp(facts.start),
        "last_activity": format_timestamp(now - facts.idle_seconds),
        "rtt": f"{facts.rtt_microseconds}µs",
        "uptime": format_duration(now - facts.start),
        "idle": format_duration(facts.idle_seconds),
        **{name: getattr(facts, name) for name in _CONNECTION_FIELDS},
    }
    if auth and facts.user:
        row["authorized_user"] = facts.user
    if facts.tls is not None:
        row["tls_version"], row["tls_cipher_suite"] = facts.tls
    return row


def _format_class(facts: ClassFacts) -> dict[str, Any]:
    dropped = {reason.value: count for reason, count in facts.dropped.items() if count}
    return {**msgspec.structs.asdict(facts), "dropped": dropped}


def _add_row(rows: list[msgspec.Raw], row: dict[str, Any]) -> Generator[None, None, None]:
    """Encode a row of a list, and yield after every _ROWS_PER_STEP-th one."""
    rows.append(msgspec.Raw(msgspec.json.encode(row)))
    if len(rows) % _ROWS_PER_STEP == 0:
        yield


# Sort order --------------------------------------------------------------------------------------

SortKey: TypeAlias = Callable[[ConnectionFacts], float]

_SORT_KEYS: dict[str, tuple[SortKey | None, bool]] = {
    # Sort key, and True for descending order, as in nats-server.
    "": (None, False),
    "cid": (None, False),
    "start": (lambda each: each.start, False),
    "subs": (lambda each: each.subscriptions, True),
    "pending": (lambda each: each.pending_bytes, True),
    "msgs_to": (lambda each: each.out_msgs, True),
    "msgs_from": (lambda each: each.in_msgs, True),
    "bytes_to": (lambda each: each.out_bytes, True),
    "bytes_from": (lambda each: each.in_bytes, True),
    "last": (lambda each: -each.idle_seconds, True),
    "idle": (lambda each: each.idle_seconds, True),
    "uptime": (lambda each: each.start, False),
    "rtt": (lambda each: each.rtt_microseconds, True),
}


def _parse_sort(requested: str) -> tuple[SortKey | None, bool]:
    """Return the sort key and order. Raises BadRequestError."""
    found = _SORT_KEYS.get(requested.lower())
    if found is None:
        sort_keys = ", ".join(filter(None, _SORT_KEYS))
        raise BadRequestError(f"expected sort to be one of {sort_keys}; got {requested[:40]!r}")
    return found


def _sort_in_steps(
    connections: list[ConnectionFacts], key: SortKey, *, descending: bool
) -> Generator[None, None, None]:
    """Sort connections: parts of them in steps, so that the last step only merges the parts."""
    for first in range(0, len(connections), _SORTED_PER_STEP):
        part = slice(first, first + _SORTED_PER_STEP)
        connections[part] = sorted(connections[part], key=key, reverse=descending)
        yield
    connections.sort(key=key, reverse=descending)


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
