"""/varz, /connz and /subsz in the shapes that tools for nats-server read, and /classz of ours.

Rule 1: what both servers have is called as there, and of the same type; what only nats-server has
is left out. Figures are those of both doors together.
Rule 2: an answer names so many connections or subscriptions, and others have their turn while they
are gathered.

    cid         of a NATS client as in its INFO; of a binary one 2**32 and its session id
    in_bytes    of NATS clients of payloads and headers, as there; else all that was read
    out_bytes   all that was sent
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
from simplebus.core.protocol.inquiry import ClassQuestion
from simplebus.core.session.session import Session
from simplebus.monitor import classes as class_figures
from simplebus.monitor.requests import Answer, Answering, BadRequestError, Request, as_json, problem
from simplebus.nats.protocol.handshake import PROTOCOL_VERSION
from simplebus.nats.server.session import NatsSession
from simplebus.server import process
from simplebus.server.connection import Connection
from simplebus.server.nats_listener import NatsDoor
from simplebus.server.server import Engine

LIMIT = 1024
"""How many connections an answer names if not fewer are asked for, and at most."""
_ROWS_AT_ONCE = 64
_SUBJECTS_MAX = 256
"""How many subjects of one connection are named."""
BINARY_CID = 1 << 32
_DAY, _YEAR = 86_400, 365 * 86_400
_NANOSECONDS = 1_000_000_000

Any_: TypeAlias = Connection[Any]


class Zpages:
    """Of one server."""

    def __init__(
        self,
        engine: Engine,
        nats_door: NatsDoor | None,
        *,
        at: tuple[str, int],
        http: tuple[str, int],
        version: str,
    ) -> None:
        """Clients connect `at` this address, those of NATS if there are to be any; `http` is where
        the HTTP door is; `version` is that of this package."""
        self._engine = engine
        self._nats = nats_door
        self._at, self._http = at, http
        self._version = version
        self._cpu = _Cpu()

    def answers(self) -> dict[str, Answer]:
        """The paths, and who answers them."""
        return {
            "/varz": self._varz,
            "/connz": self._connz,
            "/subsz": self._subsz,
            "/subscriptionsz": self._subsz,
            "/classz": self._classz,
        }

    # The server ----------------------------------------------------------------------------------

    def _varz(self, request: Request) -> Answering:
        engine, nats = self._engine, self._nats
        limits, now = engine.broker.settings.limits, time.time()
        total = (yield from class_figures.of_bus(engine.broker.store)).total
        binary = engine.traffic()
        yield
        front = nats.front.statistics() if nats is not None else None
        ours = nats.front.settings.limits if nats is not None else None
        in_msgs = binary.messages + (front.in_messages if front is not None else 0)
        in_bytes = binary.received_bytes + (front.in_bytes if front is not None else 0)
        out_msgs = total.delivered + total.redelivered
        out_msgs += front.out_messages if front is not None else 0
        out_bytes = binary.sent_bytes + (front.out_bytes if front is not None else 0)
        slow = front.slow_consumers if front is not None else 0
        server = self._server_id()
        return as_json(
            {
                "server_id": server,
                "server_name": nats.front.settings.server_name if nats is not None else server,
                "version": PROTOCOL_VERSION,
                "simplebus_version": self._version,
                "proto": 1,
                "go": "none",
                "host": self._at[0],
                "port": self._at[1],
                "auth_required": nats is not None and nats.front.gate.auth.required,
                "max_connections": limits.connections
                + (ours.connections if ours is not None else 0),
                "ping_interval": int((ours.ping_seconds if ours is not None else 0) * _NANOSECONDS),
                "ping_max": ours.pings_max if ours is not None else 0,
                "http_host": self._http[0],
                "http_port": self._http[1],
                "http_base_path": "",
                "https_port": 0,
                "auth_timeout": ours.auth_seconds if ours is not None else 0,
                "max_control_line": ours.max_control_line if ours is not None else 0,
                "max_payload": ours.max_payload if ours is not None else limits.frame_bytes,
                "max_pending": ours.max_pending if ours is not None else limits.pending_bytes,
                "tls_timeout": ours.tls_seconds if ours is not None else 0,
                "write_deadline": int(
                    (ours.write_seconds if ours is not None else 0) * _NANOSECONDS
                ),
                "start": stamp(process.STARTED),
                "now": stamp(now),
                "uptime": span(now - process.STARTED),
                "mem": process.resident_bytes(),
                "cores": os.cpu_count() or 1,
                "gomaxprocs": 1,
                "cpu": self._cpu.percent(),
                "connections": len(engine.connections)
                + (len(nats.connections) if nats is not None else 0),
                "total_connections": engine.accepted + (nats.accepted if nats is not None else 0),
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
                "slow_consumers": slow,
                "stale_connections": 0,
                "stalled_clients": total.blocked,
                "subscriptions": total.positions
                + (front.subscriptions if front is not None else 0),
                "config_load_time": stamp(process.STARTED),
                "slow_consumer_stats": {"clients": slow, "routes": 0, "gateways": 0, "leafs": 0},
            }
        )

    def _server_id(self) -> str:
        if self._nats is not None:
            return self._nats.front.server_id
        return self._engine.broker.inquiry_handler.identity

    # Connections ---------------------------------------------------------------------------------

    def _connz(self, request: Request) -> Answering:
        limit = request.number("limit", LIMIT, most=LIMIT) or LIMIT
        offset = request.number("offset", 0, most=1 << 40)
        only = request.number("cid", 0, most=1 << 62)
        sort, descending = _sorting(request.query.get("sort", ""))
        found = list(self._connections())
        if only:
            found = [each for each in found if cid(each) == only]
        yield
        if request.query.get("state", "open") == "closed":
            found = []
        if sort is not None:
            wanted = offset + limit
            choose = nlargest if descending else nsmallest
            shown = choose(wanted, found, key=sort)[offset:]
            yield
        else:
            shown = found[offset : offset + limit]
        subs = request.query.get("subs", "").lower()
        auth = request.flag("auth")
        rows = []
        for count, connection in enumerate(shown):
            if connection.socket.fileno() >= 0:
                rows.append(self._row(connection, subs=subs, auth=auth))
            if count % _ROWS_AT_ONCE == _ROWS_AT_ONCE - 1:
                yield
        return as_json(
            {
                "server_id": self._server_id(),
                "now": stamp(time.time()),
                "num_connections": len(rows),
                "total": len(found),
                "offset": offset,
                "limit": limit,
                "connections": rows,
            }
        )

    def _connections(self) -> Iterator[Any_]:
        """NATS clients first, each door's in the order in which they came."""
        if self._nats is not None:
            yield from self._nats.connections.values()
        yield from self._engine.connections.values()

    def _row(self, connection: Any_, *, subs: str, auth: bool) -> dict[str, Any]:
        session = connection.session
        now, since = time.time(), connection.since
        address = session.peer.partition(" (")[0]  # Behind it is what its program is called.
        host, _, port = address.rpartition(":")
        row: dict[str, Any] = {
            "cid": cid(connection),
            "kind": "Client",
            "type": "nats" if isinstance(session, NatsSession) else "simplebus",
            "ip": host.strip("[]"),
            "port": int(port) if port.isdigit() else 0,
            "start": stamp(since),
            "last_activity": stamp(now - idle_seconds(connection)),
            "rtt": f"{round_trip_us(connection.socket)}µs",
            "uptime": span(now - since),
            "idle": span(idle_seconds(connection)),
            "pending_bytes": pending(connection),
            "in_msgs": in_messages(connection),
            "out_msgs": out_messages(connection),
            "in_bytes": in_bytes(connection),
            "out_bytes": out_bytes(connection),
            "subscriptions": len(session.subscriptions),
            "name": name(connection),
        }
        if isinstance(session, NatsSession):
            row |= {"lang": session.options.lang, "version": session.options.version}
            if auth and (user := session.options.user or session.options.nkey):
                row["authorized_user"] = user
        else:
            row |= {"lang": "", "version": ""}
        if (tls := connection.tls) is not None and (spoken := tls.spoken()):
            row["tls_version"], row["tls_cipher_suite"] = spoken
        if subs and subs not in ("0", "false"):
            named = islice(_subscriptions(connection), _SUBJECTS_MAX)
            if subs == "detail":
                row["subscriptions_list_detail"] = list(named)
            else:
                row["subscriptions_list"] = [each["subject"] for each in named]
        return row

    # Subscriptions -------------------------------------------------------------------------------

    def _subsz(self, request: Request) -> Answering:
        limit = request.number("limit", LIMIT, most=LIMIT) or LIMIT
        offset = request.number("offset", 0, most=1 << 40)
        broker = self._engine.broker
        routes = self._nats.front.routes.statistics() if self._nats is not None else None
        count = sum(len(cls.subscriptions) for cls in broker.classes.values())
        count += routes.subscription_count if routes is not None else 0
        yield
        listed: list[dict[str, Any]] = []
        if request.flag("subs"):
            some = islice(self._all_subscriptions(), offset, offset + limit)
            while part := list(islice(some, _ROWS_AT_ONCE)):
                listed += part
                yield
        return as_json(
            {
                "server_id": self._server_id(),
                "now": stamp(time.time()),
                "num_subscriptions": count,
                "num_cache": routes.results if routes is not None else 0,
                "num_inserts": routes.inserts if routes is not None else 0,
                "num_removes": routes.removes if routes is not None else 0,
                "num_matches": routes.searches if routes is not None else 0,
                "cache_hit_rate": 0.0,
                "max_fanout": routes.widest if routes is not None else 0,
                "avg_fanout": routes.mean_width if routes is not None else 0.0,
                "total": len(listed),
                "offset": offset,
                "limit": limit,
                **({"subscriptions_list": listed} if listed else {}),
            }
        )

    def _all_subscriptions(self) -> Iterator[dict[str, Any]]:
        for connection in list(self._connections()):
            yield from _subscriptions(connection)

    # Classes -------------------------------------------------------------------------------------

    def _classz(self, request: Request) -> Answering:
        """All classes; or with `class`, by its id or name, all that is known of one."""
        broker = self._engine.broker
        if asked := request.query.get("class", ""):
            is_id = asked.isascii() and asked.isdigit() and len(asked) < 6
            named: int | str = int(asked) if is_id else asked
            yield
            try:
                return as_json(broker.inquiry_handler.build_report(ClassQuestion(class_=named)))
            except RemoteProtocolError as error:
                return problem(404, error.sentence)
        limit = request.number("limit", LIMIT, most=LIMIT) or LIMIT
        offset = request.number("offset", 0, most=1 << 40)
        rows = []
        for cls in islice(list(broker.classes.values()), offset, offset + limit):
            figures = yield from class_figures.of_class(cls)
            dropped = {reason.value: count for reason, count in figures.dropped.items() if count}
            rows.append(msgspec.to_builtins(figures) | {"dropped": dropped})
            yield
        return as_json(
            {
                "bus": broker.inquiry_handler.identity,
                "now": stamp(time.time()),
                "num_classes": len(rows),
                "total": len(broker.classes),
                "offset": offset,
                "limit": limit,
                "classes": rows,
            }
        )


# One connection ----------------------------------------------------------------------------------


def cid(connection: Any_) -> int:
    """Its number, which no other connection of this server has."""
    session = connection.session
    if isinstance(session, NatsSession):
        return session.client_id
    return BINARY_CID + int(session.session_id)


def name(connection: Any_) -> str:
    """What its program calls itself."""
    session = connection.session
    return session.options.name if isinstance(session, NatsSession) else producer_name(session)


def pending(connection: Any_) -> int:
    """Bytes that wait for it."""
    return int(connection.session.outbox.pending_bytes)


def in_messages(connection: Any_) -> int:
    session = connection.session
    return int(session.in_messages if isinstance(session, NatsSession) else session.handled_count)


def out_messages(connection: Any_) -> int:
    """Messages that it was sent. What a group was sent is no member's."""
    session = connection.session
    if isinstance(session, NatsSession):
        return session.out_messages
    return sum(
        getattr(each, "delivered", 0) + getattr(each, "redelivered", 0)
        for each in session.subscriptions.values()
    )


def in_bytes(connection: Any_) -> int:
    session = connection.session
    received = session.in_bytes if isinstance(session, NatsSession) else _received(session)
    return int(received)


def _received(session: Session) -> int:
    return session.receiver.received_bytes


def out_bytes(connection: Any_) -> int:
    return int(connection.session.outbox.sent_bytes)


def idle_seconds(connection: Any_) -> float:
    """How long nothing has come from it."""
    return connection.silent_seconds()


def round_trip_us(sock: socket.socket) -> int:
    """How long the system believes that a packet and its answer take; 0 where it does not know."""
    try:
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _RTT_AT + 4)
    except OSError:
        return 0
    return int.from_bytes(info[_RTT_AT : _RTT_AT + 4], "little")


_RTT_AT = 68
"""Of tcpi_rtt in Linux's struct tcp_info, in microseconds."""


def _subscriptions(connection: Any_) -> Iterator[dict[str, Any]]:
    """What it has subscribed to. A class is shown as `class.<name>`, and its channels behind it."""
    session, number = connection.session, cid(connection)
    if isinstance(session, NatsSession):
        for sid, each in list(session.subscriptions.items()):
            row = {"subject": _text(each.subject), "sid": _text(sid), "msgs": each.delivered}
            if each.queue:
                row["qgroup"] = _text(each.queue)
            yield row | {"cid": number}
        return
    for key, held in list(session.subscriptions.items()):
        position = getattr(held, "group", None) or held
        group = held.group if isinstance(held.group, str) else held.group.group
        wanted = getattr(held, "channel_filter", None)
        patterns = wanted.patterns if wanted is not None else ("#",)
        for pattern in patterns[:_SUBJECTS_MAX]:
            row = {
                "subject": f"class.{held.class_id} {pattern}",
                "sid": str(key),
                "msgs": getattr(position, "delivered", 0),
            }
            if group:
                row["qgroup"] = group
            yield row | {"cid": number}


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "replace")


# In which order ----------------------------------------------------------------------------------

Key: TypeAlias = Callable[[Any_], float]

_SORTS: dict[str, tuple[Key | None, bool]] = {
    # What each compares, and whether the largest come first: as nats-server has it.
    "": (None, False),
    "cid": (None, False),
    "start": (lambda each: each.since, False),
    "subs": (lambda each: len(each.session.subscriptions), True),
    "pending": (pending, True),
    "msgs_to": (out_messages, True),
    "msgs_from": (in_messages, True),
    "bytes_to": (out_bytes, True),
    "bytes_from": (in_bytes, True),
    "last": (lambda each: -idle_seconds(each), True),
    "idle": (idle_seconds, True),
    "uptime": (lambda each: each.since, False),
    "rtt": (lambda each: round_trip_us(each.socket), True),
}


def _sorting(asked: str) -> tuple[Key | None, bool]:
    """Raises BadRequestError."""
    found = _SORTS.get(asked.lower())
    if found is None:
        known = ", ".join(filter(None, _SORTS))
        raise BadRequestError(f"sort is one of {known}; got {asked[:40]!r}")
    return found


# How times are said ------------------------------------------------------------------------------


def stamp(seconds: float) -> str:
    """Seconds since 1970 as RFC 3339 has it."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def span(seconds: float) -> str:
    """As nats-server says how long something has lasted: 1y2d3h4m5s, from the largest that is
    there."""
    left = max(0, int(seconds))
    years, left = divmod(left, _YEAR)
    days, left = divmod(left, _DAY)
    hours, left = divmod(left, 3600)
    minutes, left = divmod(left, 60)
    said = ""
    for count, unit in ((years, "y"), (days, "d"), (hours, "h"), (minutes, "m")):
        if count or said:
            said += f"{count}{unit}"
    return f"{said}{left}s"


class _Cpu:
    """How much of one processor the process has used since it was asked last."""

    def __init__(self) -> None:
        self._before = time.monotonic(), process.cpu_seconds()
        self._said = 0.0

    def percent(self) -> float:
        now, used = time.monotonic(), process.cpu_seconds()
        passed = now - self._before[0]
        if passed >= 0.5:
            self._said = round(100 * (used - self._before[1]) / passed, 1)
            self._before = now, used
        return self._said
