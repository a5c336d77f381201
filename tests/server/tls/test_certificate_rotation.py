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
from tests.support.running_server import (
    Peer,
    ack,
    message,
    serving,
    subscribe,
)

TIMES, EACH = 4, 20
"""How often it changes, and what each of three publishers says in between."""
CLASS = 1


async def test_reload_keeps_connections_and_serves_the_new_certificate(tmp_path: Path) -> None:
    authority = CertificateAuthority(tmp_path)
    trusting = ssl.create_default_context(cafile=str(authority.path))
    tls = TlsOptions(*_pair(authority))
    classes = (NamedClass(id=CLASS, name="all", subjects=["all.>"]),)
    async with serving(
        tls=tls,
        nats_port=0,
        nats=NatsSettings(tls_required=True),
        nats_tls=tls,
        classes=classes,
    ) as server:
        old, client = await _version_1(server, trusting), await _nats(server, trusting)
        old_publisher = await _version_1(server, trusting)
        publisher = await _nats(server, trusting)
        async with (
            simplebus.connect(f"simplebuss://{server.addresses[0]}", tls=trusting) as bus,
            bus.subscribe("all") as messages,
            trio.open_nursery() as nursery,
        ):
            nursery.cancel_scope.deadline = trio.current_time() + 120
            await old.send(subscribe(CLASS))
            await client.send(b"SUB all.> 1\r\n")
            await client.flush()
            heard: dict[str, list[bytes]] = {"old": [], "new": [], "nats": []}
            # What has no channel is on the subject of its class, to which no client listens here.
            for who, following, kinds in (
                ("old", lambda: _next_old(old), 3),
                ("new", lambda: _next_new(messages), 3),
                ("nats", lambda: _next_nats(client), 2),
            ):
                nursery.start_soon(_listen, heard[who], following, kinds * TIMES * EACH)
            serials = {_serial(tls)}
            for turn in range(TIMES):
                for n in range(turn * EACH, (turn + 1) * EACH):
                    if n == turn * EACH + EACH // 2:  # In the midst of it.
                        _pair(authority)
                        await reload(server, ServeOptions())
                    await bus.publish(b"new %d" % n, class_id=CLASS, channel="all.new")
                    await old_publisher.send(message(b"old %d" % n, CLASS))
                    await publisher.send(b"PUB all.nats 8\r\nnats %03d\r\n" % n)
                serials.add(await _shown(server.addresses[0], trusting))
                assert await _shown(server.nats_addresses[0], trusting, info=True) in serials
            assert len(serials) == TIMES + 1
        assert [len(of_one) for of_one in heard.values()] == [240, 240, 160]
        for of_one in heard.values():
            assert len(set(of_one)) == len(of_one)
            for who in ("old", "new", "nats"):
                its = [each.split() for each in of_one if each.startswith(who.encode())]
                numbers = [int(number) for _, number in its]
                assert numbers == sorted(numbers)
        assert not server.server.disconnect_counts


async def test_certificate_that_is_not_valid_yet_is_used_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    authority = CertificateAuthority(tmp_path)
    async with serving(tls=TlsOptions(*_pair(authority))) as server:
        authority.issue("localhost", later=datetime.timedelta(days=2))
        await reload(server, ServeOptions())
        assert (
            "localhost.pem is not valid yet: clients that verify it will not connect" in caplog.text
        )


def _pair(authority: CertificateAuthority) -> tuple[Path, Path]:
    """A new certificate where the former one was."""
    made = authority.issue("localhost")
    return made.cert, made.key


def _serial(tls: TlsOptions) -> str:
    from cryptography import x509

    return f"{x509.load_pem_x509_certificate(tls.cert.read_bytes()).serial_number:X}"


async def _shown(address: str, trusting: ssl.SSLContext, *, info: bool = False) -> str:
    """The number of the certificate that a new connection is shown."""
    host, _, port = address.rpartition(":")
    plain = await trio.open_tcp_stream(host, int(port))
    if info:
        await NatsPeer(plain).read_info()
    secret = trio.SSLStream(plain, trusting, server_hostname="localhost", https_compatible=True)
    with trio.fail_after(60):
        await secret.do_handshake()
    found = secret.getpeercert()["serialNumber"]
    await secret.aclose()
    return str(found).lstrip("0")


async def _version_1(server: RunningServer, trusting: ssl.SSLContext) -> Peer:
    host, _, port = server.addresses[0].rpartition(":")
    plain = await trio.open_tcp_stream(host, int(port))
    peer = Peer(plain)
    peer.stream = trio.SSLStream(  # type: ignore[assignment]
        plain, trusting, server_hostname="localhost", https_compatible=False
    )
    await peer.send(frames.encode(frames.CONNECT, content=b"[1]"))
    assert (await peer.read_frame())[0] == frames.CONNECT
    return peer


async def _nats(server: RunningServer, trusting: ssl.SSLContext) -> NatsPeer:
    peer = await open_nats_peer(server)
    await peer.read_info()
    await peer.use_tls(trusting)
    await peer.send_connect()
    return peer


async def _listen(
    heard: list[bytes], following: Callable[[], Awaitable[bytes]], count: int
) -> None:
    while len(heard) < count:
        heard.append(await following())


async def _next_old(peer: Peer) -> bytes:
    ((number, payload),) = await peer.read_messages(1)
    await peer.send(ack(number, number + 1, CLASS))
    return payload


async def _next_nats(peer: NatsPeer) -> bytes:
    line = await peer.read_line()
    assert line.startswith(b"MSG"), line
    return await peer.read_line()


async def _next_new(messages: simplebus.Subscription) -> bytes:
    found = await messages.get(timeout=60)
    payload: bytes = found.payload
    return payload
