"""Tests of clients that connect to the wrong port: each learns at once which port it needs.

The time limits of the server are longer than those of the tests.
"""

from __future__ import annotations

import contextlib
import re
import ssl
from collections.abc import AsyncIterator

import pytest
import trio

import simplebus
from simplebus.commands.operate.top import DashboardClient
from simplebus.core.protocol import frames
from simplebus.core.protocol.opening import Opening, recognize_opening
from simplebus.server.run import RunningServer
from simplebus.server.tls.certificates import TlsOptions
from tests.support.certificates import CertificateAuthority, CertificatePair, client_ssl_context
from tests.support.running_server import serving, wait_until

IMMEDIATELY_SECONDS = 4.0
"""Less than every time limit of the server for a client that sends nothing useful."""


def client_hello() -> bytes:
    """Return the first bytes of a TLS client."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    outgoing = ssl.MemoryBIO()
    client = context.wrap_bio(ssl.MemoryBIO(), outgoing, server_hostname="localhost")
    with contextlib.suppress(ssl.SSLWantReadError):
        client.do_handshake()
    return outgoing.read()


OPENINGS = {
    "http": b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "nats": b'CONNECT {"verbose":false}\r\nPING\r\n',
    "tls": client_hello(),
    "version 1": frames.encode(frames.CONNECT, content=b"[1]"),
    "version 2": frames.encode(frames.CONNECT, content=b'{"version":2}'),
}
LISTENERS = ("tcp", "nats", "http")
OWN = {"tcp": ("version 1", "version 2"), "nats": ("nats",), "http": ("http",)}
NAMES = {
    "tcp": "the port for bus clients",
    "nats": "the port for NATS clients",
    "http": "the HTTP port",
}
OPTIONS = {
    "http": ("http", "--http-port"),
    "nats": ("nats", "--nats-port"),
    "version 1": ("tcp", "--port"),
    "version 2": ("tcp", "--port"),
}
CELLS = [
    (listener, opening)
    for listener in LISTENERS
    for opening in OPENINGS
    if opening not in OWN[listener]
]


@contextlib.asynccontextmanager
async def plain_server() -> AsyncIterator[RunningServer]:
    async with serving(nats_port=0, http_port=0) as server:
        yield server


@contextlib.asynccontextmanager
async def tls_server(certificate: CertificatePair) -> AsyncIterator[RunningServer]:
    tls = TlsOptions(certificate.cert, certificate.key)
    async with serving(tls=tls, nats_tls=tls, nats_port=0, http_port=0) as server:
        yield server


def address(server: RunningServer, listener: str) -> str:
    every = {"tcp": server.addresses, "nats": server.nats_addresses, "http": server.http_addresses}
    return every[listener][0]


async def exchange(server: RunningServer, listener: str, data: bytes) -> bytes:
    """Send bytes and return all that the server sends before it closes."""
    host, _, port = address(server, listener).rpartition(":")
    stream = await trio.open_tcp_stream(host, int(port))
    reply = b""
    with trio.fail_after(IMMEDIATELY_SECONDS), contextlib.suppress(trio.BrokenResourceError):
        await stream.send_all(data)
        while more := await stream.receive_some(65536):
            reply += more
    await stream.aclose()
    return reply


def test_openings_are_recognized() -> None:
    found = {name: recognize_opening(data) for name, data in OPENINGS.items()}
    assert found == {
        "http": Opening.HTTP_REQUEST,
        "nats": Opening.NATS_COMMAND,
        "tls": Opening.TLS,
        "version 1": Opening.BUS_CONNECT,
        "version 2": Opening.BUS_CONNECT,
    }
    assert recognize_opening(b"PING\r\n") is Opening.NATS_COMMAND
    assert recognize_opening(b'INFO {"server_id":"x"}\r\n') is Opening.NATS_INFO
    assert recognize_opening(b"HTTP/1.1 400 Bad Request\r\n") is Opening.HTTP_RESPONSE
    for opening in (b"", b"4", b"G", b"\x16", b"SSH-2.0-x\r\n", frames.encode(frames.HEARTBEAT)):
        assert recognize_opening(opening) is None


@pytest.mark.parametrize(("listener", "opening"), CELLS)
async def test_client_of_another_protocol_is_told_its_port(
    listener: str, opening: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "simplebus.server")
    async with plain_server() as server:
        reply = await exchange(server, listener, OPENINGS[opening])
        if opening == "tls":
            option = "--nats-tls-cert" if listener == "nats" else "--tls-cert"
            sentence = f"TLS is off for this port: connect without TLS, or enable it with {option}"
        else:
            expected_listener, option = OPTIONS[opening]
            port = address(server, expected_listener).rpartition(":")[2]
            sentence = f"at {NAMES[listener]}: {NAMES[expected_listener]} is {port} ({option})"
        assert sentence in caplog.text
        if listener == "nats":  # As nats-server.
            assert reply.endswith(b"-ERR 'Unknown Protocol Operation'\r\n")
        elif listener == "http" or opening == "http":
            assert reply.startswith(b"HTTP/1.1 400 ")
            assert sentence.encode() in reply
        elif opening == "nats":
            assert re.fullmatch(rb"-ERR '.* is \d+ \(--nats-port\)'\r\n", reply)


@pytest.mark.parametrize(("listener", "opening"), [c for c in CELLS if c[1] != "tls"])
async def test_client_without_tls_is_told_its_port_where_tls_is_required(
    listener: str,
    opening: str,
    server_certificate: CertificatePair,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", "simplebus.server")
    async with tls_server(server_certificate) as server:
        reply = await exchange(server, listener, OPENINGS[opening])
        expected_listener, option = OPTIONS[opening]
        port = address(server, expected_listener).rpartition(":")[2]
        sentence = f"{NAMES[expected_listener]} is {port} ({option})"
        await wait_until(lambda: sentence in caplog.text)
        if listener != "nats":  # As nats-server, which sends nothing but INFO before TLS.
            assert sentence.encode() in reply or listener == "tcp"


async def test_nats_client_without_tls_is_logged_as_such(
    server_certificate: CertificatePair, caplog: pytest.LogCaptureFixture
) -> None:
    async with tls_server(server_certificate) as server:
        await exchange(server, "nats", OPENINGS["nats"])
        sentence = "got a NATS command without TLS, but the port for NATS clients requires TLS"
        await wait_until(lambda: sentence in caplog.text)


async def test_http_client_without_tls_is_told_that_tls_is_required(
    server_certificate: CertificatePair,
) -> None:
    async with tls_server(server_certificate) as server:
        reply = await exchange(server, "http", OPENINGS["http"])
        assert reply.startswith(b"HTTP/1.1 400 ")
        assert b"got an HTTP request without TLS, but the HTTP port requires TLS" in reply


async def test_closed_port_is_named_as_such() -> None:
    async with serving() as server:
        reply = await exchange(server, "tcp", OPENINGS["http"])
        assert b"the HTTP port is not open (--http-port)" in reply


async def test_garbage_at_the_http_port_is_refused_at_once() -> None:
    async with plain_server() as server:
        reply = await exchange(server, "http", b"\x00\xff\r\n\r\n")
        assert reply.startswith(b"HTTP/1.1 400 ")


# Bus clients -------------------------------------------------------------------------------------

NATS_PORT = (
    r"it sent the INFO of a NATS server, so it is a port for NATS clients; expected the port"
)
HTTP_PORT = r"it sent an HTTP response, so it is an HTTP port; expected the port for bus clients"
NO_TLS = r"the TLS handshake failed \(.*\); .* without TLS, the address begins with simplebus://"
NATS_NO_TLS = r"it sent the INFO of a NATS server instead of a TLS handshake; expected the port"
HTTP_NO_TLS = r"it sent an HTTP response instead of a TLS handshake; expected the port"
NEEDS_TLS = r"requires TLS, but the client sent plain text: expected simplebuss://"


@pytest.mark.parametrize("is_blocking", [False, True])
@pytest.mark.parametrize(
    ("has_tls", "scheme", "listener", "error"),
    [
        (False, "simplebus", "nats", NATS_PORT),
        (False, "simplebus", "http", HTTP_PORT),
        (False, "simplebuss", "tcp", NO_TLS),
        (False, "simplebuss", "nats", NATS_NO_TLS),
        (False, "simplebuss", "http", HTTP_NO_TLS),
        (True, "simplebus", "tcp", NEEDS_TLS),
        (True, "simplebus", "nats", NATS_PORT),
        (True, "simplebus", "http", HTTP_PORT),
        (True, "simplebuss", "nats", NATS_NO_TLS),
        (True, "simplebuss", "http", HTTP_PORT),
    ],
)
async def test_bus_client_is_told_what_listens_at_the_port(
    has_tls: bool,
    scheme: str,
    listener: str,
    error: str,
    is_blocking: bool,
    authority: CertificateAuthority,
    server_certificate: CertificatePair,
) -> None:
    async with tls_server(server_certificate) if has_tls else plain_server() as server:
        url = f"{scheme}://{address(server, listener)}"
        tls = client_ssl_context(authority)

        def connect_blocking() -> None:
            with simplebus.connect_blocking(url, timeout=600, tls=tls):
                pass

        async def connect() -> None:
            if is_blocking:
                await trio.to_thread.run_sync(connect_blocking, abandon_on_cancel=True)
            else:
                async with simplebus.connect(url, timeout=600, tls=tls):
                    pass

        with trio.fail_after(IMMEDIATELY_SECONDS):
            with pytest.raises(simplebus.BusConnectionError, match=error) as raised:
                await connect()
            assert url in str(raised.value)


async def test_top_at_the_port_for_bus_clients_is_told_the_http_port() -> None:
    async with plain_server() as server:
        client = DashboardClient(f"http://{address(server, 'tcp')}")
        port = address(server, "http").rpartition(":")[2]
        with pytest.raises(OSError, match=rf"400 Bad Request: .* the HTTP port is {port} "):
            await trio.to_thread.run_sync(client.fetch)


@pytest.mark.parametrize("listener", LISTENERS)
async def test_top_with_tls_at_a_port_without_is_told_so(listener: str) -> None:
    async with plain_server() as server:
        client = DashboardClient(f"https://{address(server, listener)}")
        with pytest.raises(OSError, match=r"handshake failed .* the address begins with http://"):
            await trio.to_thread.run_sync(client.fetch)


async def test_bus_client_tries_its_next_address_after_a_wrong_port() -> None:
    async with plain_server() as server:
        urls = [f"simplebus://{address(server, each)}" for each in ("nats", "http", "tcp")]
        async with simplebus.connect(urls) as bus:
            await bus.publish(b"x", class_id=1)
