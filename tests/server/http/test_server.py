"""Tests of the HTTP server on real sockets: responses, limits and attacks."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import socket
from collections.abc import AsyncIterator, Generator

import pytest
import trio

from simplebus.core.errors import Reason
from simplebus.core.protocol import frames
from simplebus.monitor.dashboard import Dashboard
from simplebus.monitor.requests import PUBLIC_PATHS, Request
from simplebus.monitor.snapshot import MonitorSnapshot
from simplebus.server import process
from simplebus.server.http import server as http_server
from simplebus.server.http.server import HttpServer
from tests.support.http_peer import open_http_peer
from tests.support.programs import run_program, run_server
from tests.support.running_server import message, serving, wait_until


async def test_health_reports_ready_then_draining() -> None:
    async with serving(http_port=0) as server:
        peer = await open_http_peer(server)
        response = await peer.request("/healthz")
        assert response.status == 200
        assert response.json == {"status": "ok", "live": True, "ready": True, "draining": False}
        assert server.monitor is not None
        server.monitor.collector.is_draining = True
        response = await peer.request("/healthz")
        assert response.status == 503
        assert response.json["status"] == "draining"
        assert (await peer.request("/healthz/live")).status == 200


async def test_server_with_a_failed_journal_is_not_ready(tmp_path: object) -> None:
    async with serving(http_port=0, data_dir=tmp_path) as server:
        peer = await open_http_peer(server)
        server.server.broker.journal_failed(Reason.DISK_FULL, "no space is left")
        response = await peer.request("/healthz")
        assert response.status == 503
        assert response.json["why"] == "disk_full: no space is left"


async def test_counters_are_zero_before_their_first_event() -> None:
    """Prometheus sees no increase from an absent value."""
    async with serving(http_port=0) as server:
        peer = await open_http_peer(server)
        lines = (await peer.request("/metrics")).body.decode().splitlines()
    for series in (
        'simplebus_bus_dropped_messages_total{reason="drop_oldest"}',
        'simplebus_disconnected_total{reason="stalled"}',
        'simplebus_disconnected_total{reason="unauthorized"}',
        'simplebus_refused_frames_total{reason="ack_late"}',
        'simplebus_refused_frames_total{reason="bad_request"}',
        "simplebus_journal_failing",
    ):
        assert f"{series} 0.0" in lines


def test_http_answers_while_the_server_drains() -> None:
    options = ("--host", "127.0.0.1", "--no-nats", "--drain-timeout", "600")
    with run_server(*options) as (program, url):
        assert program.http_address.startswith("127.0.0.1:")
        host, _, port = program.http_address.rpartition(":")
        bus_host, _, bus_port = url.removeprefix("simplebus://").rpartition(":")

        async def watch() -> None:
            bus = await trio.open_tcp_stream(bus_host, int(bus_port))
            # A subscriber that does not acknowledge holds the drain up.
            await bus.send_all(
                frames.encode(frames.CONNECT, content=b"[1]")
                + frames.encode(frames.SUBSCRIBE, class_id=1)
                + message(b"x")
            )
            received = b""
            while b"x<\r\n>" not in received:
                received += await bus.receive_some(4096)
            program.signal(signal.SIGTERM)
            response = b""
            while b'"status":"draining"' not in response:
                async with await trio.open_tcp_stream(host, int(port)) as health_client:
                    await health_client.send_all(
                        b"GET /healthz HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"
                    )
                    response = b"".join([data async for data in health_client])
            assert b'"draining":true' in response
            await bus.aclose()

        trio.run(watch)
        assert program.wait()[0] == 0


def test_disabled_http_listener_is_not_in_the_ready_line() -> None:
    with run_server("--no-http", "--no-nats") as (program, _):
        assert program.http_address == ""


def test_http_port_in_use_is_reported_with_its_purpose() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = str(listener.getsockname()[1])
        status, response, stderr = run_program(
            *("serve", "--port", "0", "--http-port", port, "--http-host", "127.0.0.1")
        )
    assert (status, response) == (69, "")
    assert stderr == (
        f"simplebus: cannot listen on 127.0.0.1:{port}: Address already in use. That port is for "
        "HTTP: select another one with --http-port, or disable HTTP with --no-http\n"
    )


def test_options_of_a_disabled_listener_are_errors() -> None:
    status, _, stderr = run_program("serve", "--no-http", "--http-port", "1")
    assert status == 2
    assert stderr == "simplebus: --no-http and --http-port contradict each other\n"


# Host names -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("host_name", "status"),
    [
        *(("localhost:8222", 200), ("127.0.0.1", 200), ("[::1]:8222", 200), ("10.1.2.3:1", 200)),
        *(("LOCALHOST.", 200), ("bus.localhost", 200), ("Bus.Example:443", 200)),
        *((socket.gethostname(), 200), ("", 200)),
        *(("evil.example", 421), ("evil.example:8222", 421), ("127.0.0.1.evil.example", 421)),
        *(("localhost.evil.example", 421), ("[evil]", 421), ("bus.example.evil", 421)),
    ],
)
async def test_rejects_unknown_host_names(host_name: str, status: int) -> None:
    async with serving(http_port=0, http_names=("bus.example",)) as server:
        peer = await open_http_peer(server)
        for path in ("/facts", "/healthz"):
            await peer.send(f"GET {path} HTTP/1.1\r\nHost: {host_name}\r\n\r\n".encode())
            response = await peer.read_response()
            assert response.status == (200 if path == "/healthz" else status)
        if status != 200:
            await peer.send(b"GET /varz HTTP/1.1\r\nHost: evil\r\n\r\n")
            assert (await peer.read_response()).json["error"].startswith("unknown host 'evil':")


@pytest.mark.parametrize("authorization", ["Bearer x", "Basic eDp5", "x", ""])
async def test_without_authentication_there_is_no_challenge(authorization: str) -> None:
    async with serving(http_port=0) as server:
        peer = await open_http_peer(server)
        request = f"GET /varz HTTP/1.1\r\nHost: proxy\r\nAuthorization: {authorization}\r\n\r\n"
        await peer.send(request.encode())
        assert (await peer.read_response()).status == 421


async def test_responses_forbid_use_by_other_origins() -> None:
    async with serving(http_port=0) as server:
        for path in ("/", "/page.js", "/facts", "/metrics", "/nothing"):
            headers = (await (await open_http_peer(server)).request(path)).headers
            assert headers["cross-origin-resource-policy"] == "same-origin"
            assert headers["x-frame-options"] == "DENY"
            assert headers["x-content-type-options"] == "nosniff"
            assert "default-src 'none'" in headers["content-security-policy"]
            assert not any(name.startswith("access-control") for name in headers)


# Limits and attacks ------------------------------------------------------------------------


async def test_pipelined_requests_are_answered_in_order() -> None:
    async with serving(http_port=0) as server:
        peer = await open_http_peer(server)
        await peer.send(b"GET /healthz HTTP/1.1\r\nHost: a\r\n\r\n" * 3)
        for _ in range(3):
            assert (await peer.read_response()).status == 200


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"POST /healthz HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n\r\nhi", 405),
        (b"GET /healthz HTTP/1.1\r\nHost: a\r\nContent-Length: 9999999999\r\n\r\n", 413),
        (b"GET /healthz HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n", 413),
        (b"GET /healthz HTTP/1.1\r\nHost: a\r\n" + b"A: b\r\n" * 100 + b"\r\n", 431),
        (b"GET /" + b"a" * 30_000 + b" HTTP/1.1\r\nHost: a\r\n\r\n", 431),
        (b"GET /healthz HTTP/1.1\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", 400),
        (b"GET /connz?" + b"a&" * 40 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n", 400),
        (b"GET /nothing HTTP/1.1\r\nHost: localhost\r\n\r\n", 404),
    ],
    ids=lambda value: str(value)[:40],
)
async def test_invalid_requests_get_an_error_message(sent: bytes, status: int) -> None:
    async with serving(http_port=0) as server:
        peer = await open_http_peer(server)
        await peer.send(sent)
        response = await peer.read_response()
        assert response.status == status
        assert response.json["error"]
        other_client = await open_http_peer(server)
        assert (await other_client.request("/healthz")).status == 200


async def test_head_response_has_no_body() -> None:
    async with serving(http_port=0) as server:
        peer = await open_http_peer(server)
        response = await peer.request("/healthz", method="HEAD")
        assert (response.status, response.body) == (200, b"")
        assert int(response.headers["content-length"]) > 0
        assert (await peer.request("/healthz")).status == 200


async def test_responses_cannot_be_framed_sniffed_or_cached() -> None:
    async with serving(http_port=0) as server:
        response = await (await open_http_peer(server)).request("/healthz")
        assert response.headers["x-content-type-options"] == "nosniff"
        assert response.headers["x-frame-options"] == "DENY"
        assert response.headers["cache-control"] == "no-store"
        assert response.headers["content-security-policy"].startswith("default-src 'none'")


def empty_dashboard() -> Dashboard:
    return Dashboard(lambda detailed: MonitorSnapshot(title="nothing"))


@contextlib.asynccontextmanager
async def running_http_server() -> AsyncIterator[HttpServer]:
    """Run a server without a listener: tests pass it sockets."""
    async with trio.open_nursery() as nursery:
        server = HttpServer(empty_dashboard())
        await nursery.start(server.run)
        yield server
        nursery.cancel_scope.cancel()


def socket_pair() -> tuple[socket.socket, socket.socket]:
    client_end, server_end = socket.socketpair()
    server_end.setblocking(False)
    client_end.settimeout(0)
    return client_end, server_end


async def test_dribbled_request_times_out(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with running_http_server() as dashboard_server:
        client_end, server_end = socket_pair()
        dashboard_server.serve(server_end, "them")
        client_end.send(b"GET / HTTP")
        for _ in range(4):
            await trio.sleep(1)
            client_end.send(b"X")
            assert dashboard_server.connections == 1
        await trio.sleep(http_server.HEAD_SECONDS_MAX)
        assert dashboard_server.connections == 0
        client_end.close()


async def test_silent_connection_times_out(autojump_clock: trio.testing.MockClock) -> None:
    async with running_http_server() as dashboard_server:
        client_end, server_end = socket_pair()
        dashboard_server.serve(server_end, "them")
        await trio.sleep(http_server.IDLE_SECONDS_MAX - 1)
        assert dashboard_server.connections == 1
        await trio.sleep(2)
        assert dashboard_server.connections == 0
        client_end.close()


async def test_closes_the_longest_idle_connection_when_full(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with running_http_server() as dashboard_server:
        silent: list[socket.socket] = []
        for _ in range(http_server.CONNECTIONS_MAX + 10):
            client_end, server_end = socket_pair()
            silent.append(client_end)
            dashboard_server.serve(server_end, "them")
            await trio.testing.wait_all_tasks_blocked()
            assert dashboard_server.connections <= http_server.CONNECTIONS_MAX
        assert silent[0].recv(1) == b""
        with pytest.raises(BlockingIOError):
            silent[-1].recv(1)
        assert dashboard_server.rejected_count == 10
        for client_end in silent:
            client_end.close()


async def test_connection_after_its_last_response_can_be_closed(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with running_http_server() as dashboard_server:
        pairs = [socket_pair() for _ in range(http_server.CONNECTIONS_MAX + 10)]
        for client_end, server_end in pairs:
            client_end.send(b"nonsense\r\n\r\n")
            dashboard_server.serve(server_end, "them")
            await trio.testing.wait_all_tasks_blocked()
            assert client_end.recv(65_536).startswith(b"HTTP/1.1 400")
        assert (
            sum(server_end.fileno() >= 0 for _, server_end in pairs) == dashboard_server.connections
        )
        assert [server_end.fileno() >= 0 for _, server_end in pairs[9:11]] == [False, True]
        await trio.sleep(http_server.CLOSE_SECONDS_MAX + 1)
        assert not dashboard_server.connections
        assert all(server_end.fileno() < 0 for _, server_end in pairs)
        for client_end, _ in pairs:
            client_end.close()


async def test_connections_over_the_rate_are_delayed_or_rejected(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with running_http_server() as dashboard_server:
        burst, delayed_max = http_server.CONNECTION_BURST, http_server.DELAYED_MAX
        server_ends = []
        reject_queue_max = http_server.REJECT_QUEUE_MAX
        for count in range(burst + delayed_max + reject_queue_max + 5):
            client_end, server_end = socket_pair()
            server_ends.append(server_end)
            dashboard_server.serve(server_end, f"10.0.0.1:{count}")
            client_end.close()
        assert dashboard_server.rejected_count == burst - http_server.CONNECTIONS_MAX + 5
        closed = [server_end.fileno() < 0 for server_end in server_ends[burst:]]
        assert closed == [False] * delayed_max + [True] * 5 + [False] * reject_queue_max
        await trio.sleep(1)  # Clients that closed early are still served.
        other_client, server_end = socket_pair()
        dashboard_server.serve(server_end, "10.0.0.2:1")
        await trio.sleep(0.5 / http_server.CONNECTIONS_PER_SECOND)
        assert dashboard_server.connections == 1
        await trio.sleep(delayed_max / http_server.CONNECTIONS_PER_SECOND)
        assert all(server_end.fileno() < 0 for server_end in server_ends)
        other_client.close()


@pytest.mark.parametrize("method", ["GET", "HEAD"])
@pytest.mark.parametrize("path", PUBLIC_PATHS)
async def test_rejected_connections_get_health_responses(
    method: str, path: str, autojump_clock: trio.testing.MockClock
) -> None:
    async with running_http_server() as dashboard_server:
        crowd = [
            socket_pair() for _ in range(http_server.CONNECTION_BURST + http_server.DELAYED_MAX)
        ]
        for _, server_end in crowd:
            dashboard_server.serve(server_end, "10.0.0.1:1")
        client, server_end = socket_pair()
        dashboard_server.serve(server_end, "10.0.0.1:2")
        client.send(f"{method} {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())  # Behind the crowd.
        metrics_client, server_end = socket_pair()  # Closed without an answer.
        metrics_client.send(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
        dashboard_server.serve(server_end, "10.0.0.1:3")
        for _ in range(http_server.REJECT_QUEUE_MAX):
            crowd.append(socket_pair())
            dashboard_server.serve(crowd[-1][1], "10.0.0.1:1")
        head, _, body = client.recv(65_536).partition(b"\r\n\r\n")
        assert head.startswith((b"HTTP/1.1 200 ", b"HTTP/1.1 503 "))
        assert (json.loads(body)["status"] != "") if method == "GET" else (body == b"")
        for client_end in (client, metrics_client, *(client_end for client_end, _ in crowd)):
            client_end.close()


async def test_connections_of_one_loop_turn_are_evicted_over_the_limit(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with running_http_server() as dashboard_server:
        crowd = [socket_pair() for _ in range(http_server.CONNECTIONS_MAX + 30)]
        for number, (_, server_end) in enumerate(crowd):
            dashboard_server.serve(server_end, f"10.0.{number}.1:1")
        await trio.testing.wait_all_tasks_blocked()
        open_ones = [server_end for _, server_end in crowd if server_end.fileno() >= 0]
        assert len(open_ones) == dashboard_server.connections == http_server.CONNECTIONS_MAX
        for client_end, _ in crowd:
            client_end.close()


async def test_responding_connection_is_not_closed(autojump_clock: trio.testing.MockClock) -> None:
    async with running_http_server() as dashboard_server:
        async with dashboard_server._response_lock:  # Answers have to wait.
            client, server_end = socket_pair()
            client.send(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
            dashboard_server.serve(server_end, "10.0.0.1:1")
            await trio.testing.wait_all_tasks_blocked()
            crowd = [socket_pair() for _ in range(http_server.CONNECTIONS_MAX + 5)]
            for _, server_end in crowd:
                dashboard_server.serve(server_end, "10.0.0.2:1")
                await trio.testing.wait_all_tasks_blocked()
        await trio.testing.wait_all_tasks_blocked()
        await trio.sleep(1)
        assert client.recv(65_536).startswith(b"HTTP/1.1 ")
        for client_end in (client, *(client_end for client_end, _ in crowd)):
            client_end.close()


async def test_expensive_responses_get_a_tenth_of_the_loop_time(
    autojump_clock: trio.testing.MockClock,
) -> None:
    def expensive_steps() -> Generator[None, None, str]:
        for _ in range(3):
            autojump_clock.jump(0.1)
            yield
        return "done"

    http_server_ = HttpServer(empty_dashboard())
    started_at = trio.current_time()
    async with trio.open_nursery() as nursery:
        for _ in range(10):
            nursery.start_soon(http_server_.run_steps, expensive_steps())
    busy, passed = 10 * 0.3, trio.current_time() - started_at
    assert passed >= 9 * 3.0 + 0.3
    assert busy / (passed + 2.7) <= http_server.LOOP_SHARE + 1e-9


async def test_health_does_not_wait_for_other_responses(
    autojump_clock: trio.testing.MockClock,
) -> None:
    def expensive_steps() -> Generator[None, None, str]:
        autojump_clock.jump(1)
        yield
        return "done"

    http_server_ = HttpServer(empty_dashboard())
    async with trio.open_nursery() as nursery:
        for _ in range(10):
            nursery.start_soon(http_server_.run_steps, expensive_steps())
        await trio.testing.wait_all_tasks_blocked()
        started_at = trio.current_time()
        for path in PUBLIC_PATHS:
            assert (await http_server_.answer(Request(path))).body
        assert trio.current_time() == started_at
        nursery.cancel_scope.cancel()


async def test_response_time_is_counted() -> None:
    async with serving(http_port=0) as server:
        peer = await open_http_peer(server)

        async def response_seconds() -> float:
            text = (await peer.request("/metrics")).body.decode()
            found = re.search(r"^simplebus_http_answers_seconds_total (\S+)$", text, re.MULTILINE)
            assert found is not None
            return float(found[1])

        # A recent response is repeated, and one connection gets at most 1,000 responses.
        before = now = await response_seconds()
        for _ in range(900):
            if (now := await response_seconds()) != before:
                break
            await trio.sleep(0.05)
        assert now > before


async def test_health_is_answered_without_free_descriptors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The connection that was idle longest is closed."""
    async with serving(http_port=0) as server:
        host, _, port = server.http_addresses[0].rpartition(":")
        silent = [await trio.open_tcp_stream(host, int(port)) for _ in range(5)]
        assert server.monitor is not None
        await wait_until(lambda: server.monitor.collector.http_connections()[0] == 5)
        count_connections = server.monitor.collector.http_connections

        def descriptors(more: int = 0) -> int:
            return 0 if count_connections()[0] == 5 else 1 << 20

        monkeypatch.setattr(process, "peer_descriptor_limit", descriptors)
        client = await trio.open_tcp_stream(host, int(port))
        await client.send_all(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
        assert (await client.receive_some()).startswith(b"HTTP/1.1 200")
        assert await silent[0].receive_some() == b""
        for each in (*silent, client):
            await each.aclose()


async def test_largest_network_is_evicted_even_while_responding(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with running_http_server() as dashboard_server:
        single, server_end = socket_pair()
        dashboard_server.serve(server_end, "10.0.0.1:1")
        await trio.testing.wait_all_tasks_blocked()
        async with dashboard_server._response_lock:  # Answers have to wait.
            crowd = [socket_pair() for _ in range(http_server.CONNECTIONS_MAX + 5)]
            for client_end, server_end in crowd:
                client_end.send(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
                dashboard_server.serve(server_end, "10.0.0.2:1")
                await trio.testing.wait_all_tasks_blocked()
        single.send(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
        await trio.sleep(1)
        assert single.recv(65_536).startswith(b"HTTP/1.1 200")
        for client_end in (single, *(client_end for client_end, _ in crowd)):
            client_end.close()
