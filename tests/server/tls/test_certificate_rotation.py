"""Tests of certificate reloads while clients of every protocol are connected."""

from __future__ import annotations

import datetime
import ssl
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import trio

import simplebus
from simplebus.core.protocol import frames
from simplebus.core.protocol.requests import NamedClass
from simplebus.nats.settings import NatsSettings
from simplebus.server.run import RunningServer, ServeOptions, reload
from simplebus.server.tls.certificates import TlsOptions
from tests.support.certificates import CertificateAuthority
from tests.support.nats_peer import NatsPeer, open_nats_peer
from tests.support.running_server import Peer, ack, message, serving, subscribe

RELOADS, MESSAGES_PER_RELOAD = 4, 20
"""Number of reloads, and messages of each of three publishers before each."""
CLASS = 1


async def test_reload_keeps_connections_and_serves_the_new_certificate(tmp_path: Path) -> None:
    authority = CertificateAuthority(tmp_path)
    context = ssl.create_default_context(cafile=str(authority.path))
    tls = TlsOptions(*issue_certificate(authority))
    classes = (NamedClass(id=CLASS, name="all", subjects=["all.>"]),)
    async with serving(
        tls=tls,
        nats_port=0,
        nats=NatsSettings(tls_required=True),
        nats_tls=tls,
        classes=classes,
    ) as server:
        version1_peer, nats_peer = (
            await connect_version1(server, context),
            await connect_nats(server, context),
        )
        old_publisher = await connect_version1(server, context)
        publisher = await connect_nats(server, context)
        async with (
            simplebus.connect(f"simplebuss://{server.addresses[0]}", tls=context) as bus,
            bus.subscribe("all") as messages,
            trio.open_nursery() as nursery,
        ):
            nursery.cancel_scope.deadline = trio.current_time() + 120
            await version1_peer.send(subscribe(CLASS))
            await nats_peer.send(b"SUB all.> 1\r\n")
            await nats_peer.flush()
            received: dict[str, list[bytes]] = {"old": [], "new": [], "nats": []}
            # Messages without a channel go to the subject of their class, to which no NATS client
            # subscribes here.
            for name, next_message, kinds in (
                ("old", lambda: next_version1_message(version1_peer), 3),
                ("new", lambda: next_version2_message(messages), 3),
                ("nats", lambda: next_nats_message(nats_peer), 2),
            ):
                nursery.start_soon(
                    receive_messages,
                    received[name],
                    next_message,
                    kinds * RELOADS * MESSAGES_PER_RELOAD,
                )
            serials = {serial_number(tls)}
            for turn in range(RELOADS):
                for n in range(turn * MESSAGES_PER_RELOAD, (turn + 1) * MESSAGES_PER_RELOAD):
                    if n == turn * MESSAGES_PER_RELOAD + MESSAGES_PER_RELOAD // 2:
                        issue_certificate(authority)
                        await reload(server, ServeOptions())
                    await bus.publish(b"new %d" % n, class_id=CLASS, channel="all.new")
                    await old_publisher.send(message(b"old %d" % n, CLASS))
                    await publisher.send(b"PUB all.nats 8\r\nnats %03d\r\n" % n)
                serials.add(await presented_serial_number(server.addresses[0], context))
                assert (
                    await presented_serial_number(server.nats_addresses[0], context, info=True)
                    in serials
                )
            assert len(serials) == RELOADS + 1
        assert [len(messages_) for messages_ in received.values()] == [240, 240, 160]
        for messages_ in received.values():
            assert len(set(messages_)) == len(messages_)
            for name in ("old", "new", "nats"):
                own_messages = [
                    each.split() for each in messages_ if each.startswith(name.encode())
                ]
                numbers = [int(number) for _, number in own_messages]
                assert numbers == sorted(numbers)
        assert not server.server.disconnect_counts


async def test_certificate_that_is_not_valid_yet_is_used_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    authority = CertificateAuthority(tmp_path)
    async with serving(tls=TlsOptions(*issue_certificate(authority))) as server:
        authority.issue("localhost", shift=datetime.timedelta(days=2))
        await reload(server, ServeOptions())
        assert (
            "localhost.pem is not valid yet: clients that verify it will not connect" in caplog.text
        )


def issue_certificate(authority: CertificateAuthority) -> tuple[Path, Path]:
    """Issue a new certificate in place of the previous one."""
    certificate = authority.issue("localhost")
    return certificate.cert, certificate.key


def serial_number(tls: TlsOptions) -> str:
    from cryptography import x509

    return f"{x509.load_pem_x509_certificate(tls.cert.read_bytes()).serial_number:X}"


async def presented_serial_number(
    address: str, context: ssl.SSLContext, *, info: bool = False
) -> str:
    """Return the serial number of the certificate that a new connection gets."""
    host, _, port = address.rpartition(":")
    tcp_stream = await trio.open_tcp_stream(host, int(port))
    if info:
        await NatsPeer(tcp_stream).read_info()
    tls_stream = trio.SSLStream(
        tcp_stream, context, server_hostname="localhost", https_compatible=True
    )
    with trio.fail_after(240):
        await tls_stream.do_handshake()
    serial = tls_stream.getpeercert()["serialNumber"]
    await tls_stream.aclose()
    return str(serial).lstrip("0")


async def connect_version1(server: RunningServer, context: ssl.SSLContext) -> Peer:
    host, _, port = server.addresses[0].rpartition(":")
    tcp_stream = await trio.open_tcp_stream(host, int(port))
    peer = Peer(tcp_stream)
    peer.stream = trio.SSLStream(  # type: ignore[assignment]
        tcp_stream, context, server_hostname="localhost", https_compatible=False
    )
    await peer.send(frames.encode(frames.CONNECT, content=b"[1]"))
    assert (await peer.read_frame())[0] == frames.CONNECT
    return peer


async def connect_nats(server: RunningServer, context: ssl.SSLContext) -> NatsPeer:
    peer = await open_nats_peer(server)
    await peer.read_info()
    await peer.use_tls(context)
    await peer.send_connect()
    return peer


async def receive_messages(
    received: list[bytes], next_message: Callable[[], Awaitable[bytes]], count: int
) -> None:
    while len(received) < count:
        received.append(await next_message())


async def next_version1_message(peer: Peer) -> bytes:
    ((number, payload),) = await peer.read_messages(1)
    await peer.send(ack(number, number + 1, CLASS))
    return payload


async def next_nats_message(peer: NatsPeer) -> bytes:
    line = await peer.read_line()
    assert line.startswith(b"MSG"), line
    return await peer.read_line()


async def next_version2_message(messages: simplebus.Subscription) -> bytes:
    message = await messages.get(timeout=60)
    payload: bytes = message.payload
    return payload
