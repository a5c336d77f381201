"""Tests of /varz, /connz and /subsz, compared with nats-server."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Generator
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

import pytest
import trio

import simplebus
from load.ports import free_ports
from simplebus.core.protocol import frames
from simplebus.core.protocol.requests import NamedClass
from simplebus.core.statistics import BrokerStatistics
from simplebus.core.users.passwords import PasswordVerifier, hash_token
from simplebus.core.users.users import User, Users
from simplebus.nats.settings import NatsSettings
from simplebus.server.http import facts
from simplebus.server.http import varz as http_varz
from simplebus.server.http.varz import format_duration, format_timestamp
from simplebus.server.run import RunningServer
from tests.support.http_peer import open_http_peer
from tests.support.nats_peer import connect_nats_peer
from tests.support.requirements import require_program
from tests.support.running_server import connect, message, serving, subscribe, wait_until

T = TypeVar("T")


def run_steps(steps: Generator[None, None, T]) -> T:
    """Run a generator to its end at once and return its result."""
    while True:
        try:
            next(steps)
        except StopIteration as stop:
            result: T = stop.value
            return result


async def get_json(server: RunningServer, path: str, *headers: str) -> Any:
    return (await (await open_http_peer(server)).request(path, *headers)).json


def describe_shape(value: object) -> object:
    """Return the structure of a JSON value: types, and the format of times and durations."""
    if isinstance(value, str):
        if re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?Z", value):
            return "a time"
        if re.fullmatch(r"(\d+y)?(\d+d)?(\d+h)?(\d+m)?\d+s", value):
            return "a span"
        if re.fullmatch(r"[\d.]+(µs|ms|s)", value):
            return "a short span"
        return "a text"
    if isinstance(value, bool):
        return "a truth"
    if isinstance(value, int | float):
        return "a number"
    if isinstance(value, list):
        return [describe_shape(value[0])] if value else []
    if isinstance(value, dict):
        return {key: describe_shape(each) for key, each in value.items()}
    raise AssertionError(value)


VARZ_FIELDS = """
server_id server_name version go host port max_connections ping_interval ping_max http_host
http_port https_port auth_timeout max_control_line max_payload max_pending tls_timeout
write_deadline start now uptime mem cores gomaxprocs cpu connections total_connections routes
remotes leafnodes in_msgs in_bytes out_msgs out_bytes slow_consumers subscriptions config_load_time
slow_consumer_stats stalled_clients stale_connections proto
""".split()  # noqa: SIM905 - it reads as the words that it is.
"""Fields that nats-top and the Prometheus exporter read, and other fields of both servers."""


@pytest.fixture(scope="module")
def reference() -> dict[str, Any]:
    """Responses of nats-server with one client, two subscriptions and one published message."""
    program = require_program("nats-server", str(Path(sys.executable).parent / "nats-server"))
    ports = free_ports(2)
    with subprocess.Popen(
        [program, "-a", "127.0.0.1", "-p", str(ports[0]), "-m", str(ports[1])],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as running:
        try:
            return trio.run(_query_nats_server, ports)
        finally:
            running.kill()


async def _query_nats_server(ports: list[int]) -> dict[str, Any]:
    with trio.fail_after(240):
        while True:
            try:
                client = await trio.open_tcp_stream("127.0.0.1", ports[0])
            except OSError:
                await trio.sleep(0.05)
            else:
                break
        await client.send_all(
            b'CONNECT {"name":"x","lang":"l","version":"1"}\r\n' + CLIENT_COMMANDS
        )
        received = b""
        while b"PONG" not in received:
            received += await client.receive_some(65536)
        responses = {}
        for path in PATHS:
            reply = b""
            async with await trio.open_tcp_stream("127.0.0.1", ports[1]) as peer:
                await peer.send_all(f"GET {path} HTTP/1.0\r\n\r\n".encode())
                while more := await peer.receive_some(65536):
                    reply += more
            responses[path] = json.loads(reply.partition(b"\r\n\r\n")[2])
        await client.aclose()
        return responses


CLIENT_COMMANDS = b"SUB a.> q 1\r\nSUB b 2\r\nPUB b 1\r\nx\r\nPING\r\n"
PATHS = ("/varz", "/connz?subs=1", "/connz?subs=detail", "/subsz", "/subsz?subs=1")


@contextlib.asynccontextmanager
async def server_with_client() -> AsyncIterator[RunningServer]:
    """Server with the same client as in `reference`."""
    async with serving(nats_port=0, http_port=0) as server:
        peer = await connect_nats_peer(server, name="x", lang="l", version="1")
        await peer.send(CLIENT_COMMANDS)
        while not (await peer.read_line()).startswith(b"PONG"):
            pass
        yield server


async def test_varz_has_the_fields_and_types_that_tools_read(reference: dict[str, Any]) -> None:
    async with server_with_client() as server:
        own_result, nats_result = await get_json(server, "/varz"), reference["/varz"]
        for field in VARZ_FIELDS:
            assert describe_shape(own_result[field]) == describe_shape(nats_result[field]), field
        for field in ("in_msgs", "in_bytes", "out_msgs", "connections", "total_connections"):
            assert own_result[field] == nats_result[field], field
        assert own_result.keys() - nats_result.keys() <= {"simplebus_version", "auth_required"}


@pytest.mark.parametrize("path", PATHS[1:])
async def test_connz_and_subsz_have_the_shape_of_nats_server(
    path: str, reference: dict[str, Any]
) -> None:
    def normalize(response: dict[str, Any]) -> dict[str, Any]:
        rows = response.get("subscriptions_list", [])
        own_rows = [row for row in rows if row["subject"] in ("a.>", "b")]
        for each in own_rows:
            for inner in ("account", "account_tag"):
                each.pop(inner, None)
        for connection in response.get("connections", []):  # In any order, as they are there.
            detailed = connection.get("subscriptions_list_detail", [])
            detailed.sort(key=lambda each: str(each["sid"]))
        return {
            **response,
            "subscriptions_list": sorted(own_rows, key=lambda each: str(each["sid"])),
        }

    async with server_with_client() as server:
        own_result, nats_result = (
            normalize(await get_json(server, path)),
            normalize(reference[path]),
        )
        ours_shape, theirs_shape = describe_shape(own_result), describe_shape(nats_result)
        assert isinstance(ours_shape, dict)
        assert isinstance(theirs_shape, dict)
        assert ours_shape == theirs_shape
        for own_rows, reference_row in zip(
            own_result.get("connections", []), nats_result.get("connections", []), strict=True
        ):
            for field in ("in_msgs", "out_msgs", "in_bytes", "subscriptions", "name", "lang"):
                assert own_rows[field] == reference_row[field], field
            subject_lists = (
                sorted(each.get("subscriptions_list", [])) for each in (own_rows, reference_row)
            )
            assert next(subject_lists) == next(subject_lists)


async def test_connz_lists_binary_connections() -> None:
    async with server_with_client() as server:
        bus = await connect(server, [1])
        await bus.send(subscribe() + message(b"x") * 3)
        await bus.read_messages(3)
        response = await get_json(server, "/connz?subs=1")
        assert [connection["type"] for connection in response["connections"]] == [
            "nats",
            "simplebus",
        ]
        own_result = response["connections"][1]
        assert own_result["cid"] >= 1 << 32
        assert (own_result["in_msgs"], own_result["out_msgs"], own_result["subscriptions"]) == (
            3,
            3,
            1,
        )
        assert own_result["subscriptions_list"] == ["class.1 #"]
        assert (await get_json(server, f"/connz?cid={own_result['cid']}"))["connections"][0][
            "cid"
        ] == own_result["cid"]
        varz = await get_json(server, "/varz")
        assert (varz["in_msgs"], varz["out_msgs"]) == (4, 4)
        assert varz["subscriptions"] == 3


@pytest.mark.parametrize("is_nats", [True, False])
async def test_connz_does_not_list_a_connection_that_its_client_has_closed(is_nats: bool) -> None:
    async with serving(nats_port=0, http_port=0) as server:
        stays = await connect_nats_peer(server, name="stays")
        leaves = await connect_nats_peer(server) if is_nats else await connect(server, [1])
        before = await get_json(server, "/connz")
        assert (before["total"], before["num_connections"]) == (2, 2)
        leaves.stream.socket.close()
        # The event loop does not run in between, so the server has not read the end yet.
        assert server.monitor is not None
        connections = run_steps(server.monitor.collector.collect_connections())
        assert [connection.name for connection in connections] == ["stays"]
        after = await get_json(server, "/connz")
        assert (after["total"], after["num_connections"]) == (1, 1)
        await stays.stream.aclose()


async def test_connz_shows_the_address_despite_the_client_name() -> None:
    async with serving(http_port=0) as server:
        peer = await connect(server)
        connect_content = b'{"version":2,"client":"a:b (c:1","name":"d:2"}'
        await peer.send(frames.encode(frames.CONNECT, content=connect_content))
        await peer.read_frame()
        host, port, *_ = peer.stream.socket.getsockname()
        (row,) = (await get_json(server, "/connz"))["connections"]
        assert (row["ip"], row["port"], row["name"]) == (host, port, "d:2")


async def test_numbers_are_integers_where_go_programs_need_them() -> None:
    def float_fields(value: Any, name: str = "") -> set[str]:
        if isinstance(value, dict):
            return {
                float_field
                for key, inner in value.items()
                for float_field in float_fields(inner, key)
            }
        if isinstance(value, list):
            return {float_field for inner in value for float_field in float_fields(inner, name)}
        return {name} if isinstance(value, float) else set()

    async with server_with_client() as server:
        for path in PATHS:
            assert float_fields(await get_json(server, path)) <= {
                *("cpu", "auth_timeout", "tls_timeout"),
                *("cache_hit_rate", "avg_fanout"),
            }


async def test_totals_include_closed_connections() -> None:
    async with serving(http_port=0, nats_port=0) as server:
        bus = await connect(server, [1])
        await bus.send(message(b"x") * 3)
        await wait_until(lambda: server.server.broker.statistics().published == 3)
        before = await get_json(server, "/varz")
        await bus.stream.aclose()
        await wait_until(lambda: not server.server.connections)
        after = await get_json(server, "/varz")
        for field in ("in_msgs", "in_bytes", "out_bytes"):
            assert after[field] == before[field] > 0
        assert (before["connections"], after["connections"]) == (1, 0)


async def test_lists_are_bounded_and_include_the_total() -> None:
    async with serving(http_port=0) as server:
        for _ in range(5):
            await connect(server, [])
        response = await get_json(server, "/connz?limit=2&offset=1")
        assert [connection["cid"] - (1 << 32) for connection in response["connections"]] == [1, 2]
        assert (response["num_connections"], response["total"], response["limit"]) == (2, 5, 2)
        assert (await get_json(server, "/connz?limit=1000000"))["limit"] == http_varz.ROWS_MAX
        assert (await get_json(server, "/connz?state=closed"))["connections"] == []


async def test_subsz_total_counts_all_listed_subscriptions() -> None:
    classes = (NamedClass(name="orders", id=7),)
    async with serving(http_port=0, nats_port=0, classes=classes) as server:
        client = await connect_nats_peer(server)
        await client.send(b"SUB a 1\r\nSUB b 2\r\nPING\r\n")
        await client.read_line()
        async with (
            simplebus.connect(server.addresses[0]) as bus,
            bus.subscribe("orders", "eu.*", "us.#"),
        ):
            all_subscriptions = await get_json(server, "/subsz?subs=1")
            subjects = [each["subject"] for each in all_subscriptions["subscriptions_list"]]
            assert subjects == ["a", "b", "class.orders eu.*", "class.orders us.#"]
            assert all_subscriptions["total"] == 4
            page = await get_json(server, "/subsz?subs=1&limit=1&offset=3")
            assert (len(page["subscriptions_list"]), page["total"]) == (1, 4)


async def test_pages_of_subsz_together_list_each_subscription_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(facts, "_ROWS_PER_STEP", 3)
    monkeypatch.setattr(facts, "_COUNTED_PER_STEP", 2)
    async with (
        serving(nats_port=0, http_port=0) as server,
        simplebus.connect(server.addresses[0]) as bus,
    ):
        for count in (5, 0, 1, 7):
            client = await connect_nats_peer(server)
            for number in range(count):
                await client.send(b"SUB a.%d %d\r\n" % (number, number))
            await client.send(b"PING\r\n")
            await client.read_line()
        async with bus.subscribe("one", "a", "b.*", "c.#", "d"), bus.subscribe("two"):
            assert server.monitor is not None
            collector = server.monitor.collector
            all_subscriptions = run_steps(collector.collect_subscriptions(0, 100))
            assert len(all_subscriptions) == run_steps(collector.count_subscriptions()) == 18
            for offset in range(20):
                for limit in range(1, 20):
                    found = run_steps(collector.collect_subscriptions(offset, limit))
                    assert found == all_subscriptions[offset : offset + limit], (offset, limit)
            for cid in {subscription.cid for subscription in all_subscriptions}:
                expected = [
                    subscription for subscription in all_subscriptions if subscription.cid == cid
                ]
                assert collector.list_subscriptions(cid) == expected
            assert collector.list_subscriptions(999) == []


async def test_user_is_shown_for_every_kind_of_credentials() -> None:
    tokens = User("tokens", token=hash_token("t"))
    addresses = User("addresses", addresses=("127.0.0.0/8",))
    bearer = "Authorization: Bearer t"
    users = Users([tokens, addresses], PasswordVerifier(b"any"))
    nats = NatsSettings(users=users)
    async with serving(http_port=0, nats_port=0, users=users, nats=nats) as server:
        peer = await connect_nats_peer(server, auth_token="t")
        await connect(server, [1])
        async with simplebus.connect(server.addresses[0], token="t"):
            response = await get_json(server, "/connz?auth=1", bearer)
            names = [connection["authorized_user"] for connection in response["connections"]]
            assert names == ["tokens", "addresses", "tokens"]
        await peer.stream.aclose()
        assert (await get_json(server, "/varz", bearer))["auth_required"] is True
    async with serving(http_port=0, users=users) as server:
        assert (await get_json(server, "/varz", bearer))["auth_required"] is True


NATS_TOP_SORT_KEYS = {
    *("cid", "subs", "pending", "msgs_to", "msgs_from", "bytes_to", "bytes_from"),
    *("last", "idle", "uptime", "rtt"),
}


@pytest.mark.parametrize("sort", sorted(http_varz._SORT_KEYS.keys() | NATS_TOP_SORT_KEYS))
async def test_connz_sorts_as_requested(sort: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_varz, "_SORTED_PER_STEP", 2)
    async with serving(http_port=0) as server:
        for count in (1, 3, 2):
            bus = await connect(server, [1])
            await bus.send(message(b"x") * count)
        await wait_until(lambda: server.server.broker.statistics().published == 6)
        response = await get_json(server, f"/connz?sort={sort}&limit=2")
        assert len(response["connections"]) == 2
        if sort == "msgs_from":
            assert [connection["in_msgs"] for connection in response["connections"]] == [3, 2]


async def test_connz_rejects_unknown_sort_keys() -> None:
    async with serving(http_port=0) as server:
        response = await (await open_http_peer(server)).request("/connz?sort=beauty")
        assert response.status == 400
        assert response.json["error"].startswith("expected sort to be one of cid, start, ")


async def test_classz_lists_all_classes_or_one() -> None:
    async with serving(http_port=0) as server:
        bus = await connect(server, [1, 2])
        await bus.send(subscribe(1) + message(b"x", 1) * 3 + message(b"y", 2))
        await bus.read_messages(3)
        response = await get_json(server, "/classz")
        statistics: BrokerStatistics = server.server.broker.statistics()
        for row, cls in zip(response["classes"], statistics.classes, strict=True):
            for field in ("class_id", "published", "delivered", "in_flight", "acknowledged"):
                assert row[field] == getattr(cls, field), field
            assert row["stored"] == cls.ring.message_count
        assert (await get_json(server, "/classz?limit=1&offset=1"))["classes"][0]["class_id"] == 2
        class_row = await get_json(server, "/classz?class=1")
        assert (class_row["about"], class_row["class_id"], class_row["stored"]) == ("class", 1, 3)
        assert class_row["positions"][0]["in_flight"] == 3
        missing = await (await open_http_peer(server)).request("/classz?class=nothing")
        assert missing.status == 404
        assert missing.json["error"] == "there is no class 'nothing'"


async def test_sessionz_reports_a_session() -> None:
    async with serving(http_port=0) as server:
        bus = await connect(server, [1])
        await bus.send(subscribe(1) + message(b"x", 1))
        await bus.read_messages(1)
        (session_id,) = server.server.connections
        row = await get_json(server, f"/sessionz?session={session_id}")
        assert (row["about"], row["session"]) == ("session", session_id)
        assert [position["in_flight"] for position in row["positions"]] == [1]
        assert row["class_names"] == {"1": ""}
        assert (await (await open_http_peer(server)).request("/sessionz?session=99")).status == 404


def test_formats_times_as_nats_server() -> None:
    assert format_duration(0) == "0s"
    assert format_duration(61.9) == "1m1s"
    assert format_duration(3600) == "1h0m0s"
    assert format_duration(400 * 86_400 + 5) == "1y35d0h0m5s"
    assert datetime.fromisoformat(format_timestamp(1.5)).timestamp() == 1.5
