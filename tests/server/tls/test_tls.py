"""Tests of TLS on the binary listener, with both protocol versions and both clients."""

from __future__ import annotations

import contextlib
import datetime
import ssl
import threading
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import pytest
import trio

import simplebus
from simplebus.core.errors import Reason
from simplebus.core.protocol import frames
from simplebus.server.run import RunningServer
from simplebus.server.tls.certificates import TlsOptions, certificate_warnings
from tests.support.certificates import CertificateAuthority, CertificatePair, client_ssl_context
from tests.support.running_server import Peer, ack, message, serving, subscribe, wait_until


def url(server: RunningServer) -> str:
    return f"simplebuss://{server.addresses[0]}"


@contextlib.asynccontextmanager
async def tls_server(
    server_certificate: CertificatePair, **more: object
) -> AsyncIterator[RunningServer]:
    async with serving(
        tls=TlsOptions(server_certificate.cert, server_certificate.key, **more)
    ) as server:  # type: ignore[arg-type]
        yield server


async def connect_version1(server: RunningServer, context: ssl.SSLContext) -> Peer:
    """Connect a version 1 client that names class 1."""
    host, _, port = server.addresses[0].rpartition(":")
    plain = await trio.open_tcp_stream(host, int(port))
    tls_stream = trio.SSLStream(plain, context, server_hostname="localhost", https_compatible=False)
    peer = Peer(plain)
    peer.stream = tls_stream  # type: ignore[assignment]
    await peer.send(frames.encode(frames.CONNECT, content=b"[1]"))
    assert (await peer.read_frame())[0] == frames.CONNECT
    return peer


async def test_large_messages_are_exchanged_over_tls(
    authority: CertificateAuthority, server_certificate: CertificatePair
) -> None:
    async with tls_server(server_certificate) as server:
        access = simplebus.Access(ca=str(authority.path))
        async with (
            simplebus.connect(url(server), access=access) as bus,
            bus.subscribe(1) as messages,
        ):
            payloads = [bytes([n]) * 500_000 for n in range(20)]
            async with trio.open_nursery() as nursery:
                nursery.start_soon(partial(bus.publish_many, payloads, class_id=1))
                for expected in payloads:
                    received = await messages.get(timeout=60)
                    assert received.payload == expected


async def test_blocking_client_uses_tls(
    authority: CertificateAuthority, server_certificate: CertificatePair
) -> None:
    async with tls_server(server_certificate) as server:
        address = url(server)

        def run_client() -> list[bytes]:
            payloads = [bytes([n]) * 100_000 for n in range(20)]
            with (
                simplebus.connect_blocking(address, tls=client_ssl_context(authority)) as bus,
                bus.subscribe(1) as messages,
            ):
                bus.publish_many(payloads, class_id=1)
                received = [messages.get(timeout=60).payload for _ in payloads]
            return [] if received == payloads else received

        assert await trio.to_thread.run_sync(run_client) == []


async def test_version1_and_version2_clients_exchange_messages_over_tls(
    authority: CertificateAuthority, server_certificate: CertificatePair
) -> None:
    async with tls_server(server_certificate) as server:
        old = await connect_version1(server, client_ssl_context(authority))
        await old.send(subscribe())
        async with simplebus.connect(url(server), tls=client_ssl_context(authority)) as bus:
            await bus.publish(b"new to old", class_id=1)
            assert await old.read_messages(1) == [(0, b"new to old")]
            await old.send(ack(0, 1) + message(b"old to new"))
            assert await old.read_messages(1) == [(1, b"old to new")]


async def test_many_small_messages_arrive_once_and_in_order(
    authority: CertificateAuthority, server_certificate: CertificatePair
) -> None:
    count = 30_000
    async with tls_server(server_certificate) as server:
        old = await connect_version1(server, client_ssl_context(authority))
        await old.send(subscribe())
        async with trio.open_nursery() as nursery:
            sent = b"".join(message(b"%d" % n) for n in range(count))
            nursery.start_soon(old.send, sent)
            received = await old.read_messages(count)
        assert received == [(n, b"%d" % n) for n in range(count)]


@pytest.mark.parametrize(
    "sent",
    [
        frames.encode(frames.CONNECT, content=b"[1]"),
        b"\x16\x03\x01\x00\x05nonsense",
        b"\x16\x03\x01\x02\x00\x01",
        b"",
    ],
    ids=["plain", "garbage", "half a handshake", "nothing"],
)
async def test_missing_handshake_is_closed(
    server_certificate: CertificatePair, sent: bytes
) -> None:
    async with tls_server(server_certificate, handshake_seconds=0.1) as server:
        host, _, port = server.addresses[0].rpartition(":")
        peer = Peer(await trio.open_tcp_stream(host, int(port)))
        if sent:
            await peer.send(sent)
        assert await peer.wait_closed()
        await wait_until(lambda: server.server.disconnect_counts[Reason.TLS_HANDSHAKE] == 1)
        assert not server.server.connections
        assert not server.server.broker.sessions


async def test_plaintext_version2_client_gets_an_error(server_certificate: CertificatePair) -> None:
    error = "this port requires TLS, but the client sent plain text: expected simplebuss://"
    async with tls_server(server_certificate) as server:
        address = f"simplebus://{server.addresses[0]}"
        with pytest.raises(simplebus.BusError, match=error):
            async with simplebus.connect(address):
                pass

        def connect() -> None:
            with simplebus.connect_blocking(address):
                pass

        with pytest.raises(simplebus.BusError, match=error):
            await trio.to_thread.run_sync(connect)
        await wait_until(lambda: not server.server.broker.sessions)


async def test_client_without_a_trusted_ca_gets_an_error(
    server_certificate: CertificatePair,
) -> None:
    async with tls_server(server_certificate) as server:
        with pytest.raises(simplebus.BusConnectionError, match="its certificate is not trusted"):
            async with simplebus.connect(url(server), access=simplebus.Access()):
                pass
        address = url(server)

        def connect() -> None:
            with simplebus.connect_blocking(address, access=simplebus.Access()):
                pass

        with pytest.raises(simplebus.BusConnectionError, match="its certificate is not trusted"):
            await trio.to_thread.run_sync(connect)


async def test_tls_client_rejects_a_plaintext_server(authority: CertificateAuthority) -> None:
    async with serving() as server:
        with pytest.raises(simplebus.BusConnectionError, match="the TLS handshake failed"):
            async with simplebus.connect(url(server), tls=client_ssl_context(authority)):
                pass


async def test_client_certificate_can_be_required(
    authority: CertificateAuthority, server_certificate: CertificatePair
) -> None:
    ada = authority.issue("ada")
    async with tls_server(server_certificate, verify=True, ca=authority.path) as server:
        access = simplebus.Access(ca=str(authority.path), cert=str(ada.cert), key=str(ada.key))
        async with simplebus.connect(url(server), access=access) as bus:
            await bus.publish(b"x", class_id=1)
        with pytest.raises(simplebus.BusConnectionError):
            async with simplebus.connect(url(server), tls=client_ssl_context(authority)):
                pass
        await wait_until(lambda: server.server.disconnect_counts[Reason.TLS_HANDSHAKE] == 1)


async def test_certificate_reload_disconnects_no_client(
    authority: CertificateAuthority, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = authority.issue("localhost")
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"

    def install(pair: CertificatePair) -> None:
        cert.write_bytes(pair.cert.read_bytes())
        key.write_bytes(pair.key.read_bytes())

    install(first)
    second_folder = tmp_path / "second"
    second_folder.mkdir()
    second = CertificateAuthority(second_folder, "second")
    async with tls_server(CertificatePair(cert, key)) as server:
        published_count, stop = 0, threading.Event()
        async with simplebus.connect(url(server), tls=client_ssl_context(authority)) as bus:

            async def load() -> None:
                nonlocal published_count
                while not stop.is_set():
                    await bus.publish(b"x", class_id=1)
                    published_count += 1

            async with trio.open_nursery() as nursery:
                nursery.start_soon(load)
                await wait_until(lambda: published_count > 10)
                cert.write_text("nonsense")
                await server.reload_certificates(log_warnings=True)
                assert "certificate not reloaded" in caplog.text
                async with simplebus.connect(url(server), tls=client_ssl_context(authority)):
                    pass
                install(second.issue("localhost"))
                await server.reload_certificates(log_warnings=True)
                before = published_count
                async with simplebus.connect(url(server), tls=client_ssl_context(second)):
                    pass
                with pytest.raises(simplebus.BusConnectionError, match="is not trusted"):
                    async with simplebus.connect(url(server), tls=client_ssl_context(authority)):
                        pass
                await wait_until(lambda: published_count > before + 10)
                stop.set()
        assert server.server.broker.statistics().classes[0].published == published_count


@pytest.mark.parametrize(
    ("days", "warning"), [(-3, "has expired"), (0, None), (3, "is not valid yet")]
)
@pytest.mark.parametrize("requires_client_certificate", [False, True])
def test_warns_about_certificates_that_are_not_valid_now(
    authority: CertificateAuthority,
    days: int,
    warning: str | None,
    requires_client_certificate: bool,
) -> None:
    pair = authority.issue("timely", shift=datetime.timedelta(days=days))
    pair.key.chmod(0o640)
    options = TlsOptions(
        pair.cert,
        pair.key,
        authority.path if requires_client_certificate else None,
        verify=requires_client_certificate,
    )
    expected = f"the certificate {pair.cert} {warning}: clients that verify it will not connect"
    assert certificate_warnings(options) == ([expected] if warning else [])


def test_warns_about_world_readable_keys(server_certificate: CertificatePair) -> None:
    server_certificate.key.chmod(0o644)
    (warning,) = certificate_warnings(TlsOptions(server_certificate.cert, server_certificate.key))
    assert (
        warning
        == f"the key {server_certificate.key} is readable by every user; run chmod 640 on it"
    )
