"""Tests of TLS on the NATS listener: before INFO, after it, or optional."""

from __future__ import annotations

import contextlib
import re
import socket
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import trio

from simplebus.core.errors import Reason
from simplebus.core.users.certificate_names import certificate_names
from simplebus.core.users.subject_permissions import SubjectPermissions
from simplebus.core.users.users import User, Users
from simplebus.nats.limits import NatsLimits
from simplebus.nats.settings import NatsSettings
from simplebus.server.run import RunningServer
from simplebus.server.tls.certificates import TlsOptions, create_ssl_context
from tests.support.certificates import CertificateAuthority, CertificatePair, client_ssl_context
from tests.support.nats_peer import NatsPeer, open_nats_peer
from tests.support.running_server import serving, wait_until


@contextlib.asynccontextmanager
async def tls_server(
    server_certificate: CertificatePair,
    *,
    seconds: float = 2.0,
    max_pending: int = 64 << 20,
    auth_seconds: float = 2.0,
    users: Users | None = None,
    **more: object,
) -> AsyncIterator[RunningServer]:
    options = TlsOptions(server_certificate.cert, server_certificate.key, **more)  # type: ignore[arg-type]
    settings = NatsSettings(
        NatsLimits(tls_seconds=seconds, max_pending=max_pending, auth_seconds=auth_seconds),
        users=users,
        tls_required=not options.optional,
        tls_available=options.optional,
        tls_verify=options.requires_client_certificate,
    )
    async with serving(nats_port=0, nats=settings, nats_tls=options) as server:
        yield server


async def publish_to_itself(peer: NatsPeer, payload: bytes = b"secret") -> None:
    """Publish a message of any size to itself."""
    await peer.send(b"SUB a 1\r\n")
    await peer.flush()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(peer.send, b"PUB a %d\r\n%b\r\n" % (len(payload), payload))
        assert await peer.read_line() == b"MSG a 1 %d" % len(payload)
        assert await peer.read_line() == payload


async def test_tls_starts_after_info(
    authority: CertificateAuthority, server_certificate: CertificatePair
) -> None:
    async with tls_server(server_certificate) as server:
        peer = await open_nats_peer(server)
        info = await peer.read_info()
        assert info["tls_required"] is True
        assert "tls_available" not in info
        await peer.use_tls(client_ssl_context(authority))
        await peer.send_connect()
        await publish_to_itself(peer)


async def test_expired_certificate_is_reported(
    authority: CertificateAuthority, server_certificate: CertificatePair
) -> None:
    async with tls_server(server_certificate) as server:
        peer = await open_nats_peer(server)
        await peer.read_info()
        peer.stream = trio.SSLStream(
            peer.socket,
            client_ssl_context(authority),
            server_hostname="localhost",
            https_compatible=False,
        )
        await peer.send_connect()
        assert server.nats_listener is not None
        (connection,) = server.nats_listener.connections.values()
        connection.disconnect()
        # A closed TLS session, not a cut connection.
        assert await peer.stream.receive_some() == b""


async def test_data_larger_than_records_and_socket_buffers_is_exchanged(
    authority: CertificateAuthority, server_certificate: CertificatePair
) -> None:
    async with tls_server(server_certificate) as server:
        peer = await open_nats_peer(server)
        await peer.read_info()
        await peer.use_tls(client_ssl_context(authority))
        await peer.send_connect()
        await publish_to_itself(peer, b"0123456789abcdef" * 65_536)
        block = b"PUB a 1000\r\n" + bytes(1000) + b"\r\n"
        async with trio.open_nursery() as nursery:
            nursery.start_soon(peer.send, block * 3000)
            for _ in range(3000):
                assert await peer.read_line() == b"MSG a 1 1000"
                assert await peer.read_line() == bytes(1000)


async def test_tls_can_start_before_info(
    authority: CertificateAuthority, server_certificate: CertificatePair
) -> None:
    async with tls_server(server_certificate, handshake_first=True) as server:
        peer = await open_nats_peer(server)
        await peer.use_tls(client_ssl_context(authority))
        assert (await peer.read_info())["tls_required"] is True
        await peer.send_connect()
        await publish_to_itself(peer)


async def test_optional_tls_serves_tls_and_plaintext_clients(
    authority: CertificateAuthority, server_certificate: CertificatePair
) -> None:
    async with tls_server(server_certificate, optional=True) as server:
        plain, tls_client = await open_nats_peer(server), await open_nats_peer(server)
        info = await plain.read_info()
        assert info["tls_available"] is True
        assert "tls_required" not in info
        await plain.send_connect()
        await tls_client.read_info()
        await tls_client.use_tls(client_ssl_context(authority))
        await tls_client.send_connect()
        await publish_to_itself(tls_client)
        await plain.send(b"PUB a 2\r\nhi\r\n")
        assert await tls_client.read_line() == b"MSG a 1 2"


async def test_stalled_tls_client_is_disconnected(
    authority: CertificateAuthority, server_certificate: CertificatePair
) -> None:
    async with tls_server(server_certificate, optional=True, max_pending=4 << 20) as server:
        publisher, stuck, reader = (
            await open_nats_peer(server),
            await open_nats_peer(server),
            await open_nats_peer(server),
        )
        await publisher.handshake()
        await reader.handshake()
        await reader.send(b"SUB tick 1\r\n")  # The publisher does not wait for one alone, then.
        await reader.flush()
        await stuck.read_info()
        await stuck.use_tls(client_ssl_context(authority))
        await stuck.send_connect()
        await stuck.send(b"SUB a 1\r\n")
        await stuck.flush()
        block = b"PUB tick 0\r\n\r\n" + b"PUB a 1000\r\n%b\r\n" % bytes(1000) * 1000
        while not server.server.disconnect_counts:
            await publisher.send(block)
            await publisher.flush()
        assert server.server.disconnect_counts == {Reason.SLOW_CONSUMER: 1}
        assert server.nats_listener is not None
        await wait_until(lambda: len(server.nats_listener.connections) == 2)  # type: ignore[union-attr]
        await publisher.flush()


async def test_silent_client_continues_without_optional_tls(
    server_certificate: CertificatePair,
) -> None:
    async with tls_server(server_certificate, seconds=0.05, optional=True) as server:
        peer = await open_nats_peer(server)
        await peer.read_info()
        await trio.sleep(0.1)
        await peer.send_connect()


@pytest.mark.parametrize(
    "sent",
    [
        b"CONNECT {}\r\nPING\r\n",
        b"\x16\x03\x01\x00\x05nonsense",
        b"\x16\x03\x01\x02\x00\x01",
        b"",
    ],
    ids=["plain", "garbage", "half a handshake", "nothing"],
)
@pytest.mark.parametrize("first", [False, True], ids=["after info", "before info"])
async def test_missing_handshake_is_closed_silently(
    server_certificate: CertificatePair, sent: bytes, first: bool
) -> None:
    async with tls_server(server_certificate, seconds=0.1, handshake_first=first) as server:
        peer = await open_nats_peer(server)
        if not first:
            await peer.read_info()
        if sent:
            await peer.send(sent)
        assert b"-ERR" not in (received := await peer.read_until_closed())
        assert b"INFO" not in received
        await wait_until(lambda: server.server.disconnect_counts[Reason.TLS_HANDSHAKE] == 1)
        assert server.nats_listener is not None
        assert not server.nats_listener.connections


async def test_authentication_timeout_starts_after_the_handshake(
    authority: CertificateAuthority, server_certificate: CertificatePair
) -> None:
    users = Users([User("ada", "x")])
    async with tls_server(
        server_certificate, users=users, seconds=0.2, auth_seconds=0.05
    ) as server:
        late = await open_nats_peer(server)
        await late.read_info()
        assert await late.read_until_closed() == b""
        assert server.server.disconnect_counts == {Reason.TLS_HANDSHAKE: 1}
    async with tls_server(server_certificate, users=users, auth_seconds=0.05) as server:
        silent = await open_nats_peer(server)
        await silent.read_info()
        await silent.use_tls(client_ssl_context(authority))
        assert await silent.read_until_closed() == b"-ERR 'Authentication Timeout'\r\n"


@pytest.mark.parametrize("optional", [False, True])
@pytest.mark.parametrize("resets", [False, True])
async def test_closing_during_the_handshake_leaves_no_state(
    server_certificate: CertificatePair,
    optional: bool,
    resets: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with tls_server(server_certificate, optional=optional) as server:
        peer = await open_nats_peer(server)
        await peer.read_info()
        if resets:
            peer.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, bytes([1, *bytes(7)]))
        await peer.stream.aclose()
        listener = server.nats_listener
        assert listener is not None
        await wait_until(lambda: not listener.connections)
    assert "internal error" not in caplog.text


async def test_client_certificate_can_be_required(
    authority: CertificateAuthority, server_certificate: CertificatePair
) -> None:
    async with tls_server(server_certificate, verify=True, ca=authority.path) as server:
        peer = await open_nats_peer(server)
        assert (await peer.read_info())["tls_verify"] is True
        await peer.use_tls(client_ssl_context(authority, authority.issue("ada")))
        await peer.send_connect()
        client_without_certificate = await open_nats_peer(server)
        await client_without_certificate.read_info()
        with contextlib.suppress(trio.BrokenResourceError):
            await client_without_certificate.use_tls(client_ssl_context(authority))
        assert await client_without_certificate.read_until_closed() == b""
        await wait_until(lambda: server.server.disconnect_counts[Reason.TLS_HANDSHAKE] == 1)


async def test_client_certificate_selects_the_user(
    authority: CertificateAuthority, server_certificate: CertificatePair
) -> None:
    user = User(
        "ada",
        certificates=("ada@example.com",),
        subject_permissions=SubjectPermissions(publish_deny=("no",)),
    )
    async with tls_server(
        server_certificate, verify=True, ca=authority.path, users=Users([user])
    ) as server:
        ada, bob = await open_nats_peer(server), await open_nats_peer(server)
        await ada.read_info()
        await ada.use_tls(
            client_ssl_context(authority, authority.issue("ada", email="ada@example.com"))
        )
        await ada.send_connect()
        await ada.send(b"PUB no 0\r\n\r\n")
        assert b"Permissions Violation" in await ada.read_line()
        await bob.read_info()
        await bob.use_tls(client_ssl_context(authority, authority.issue("bob", unit="billing")))
        await bob.send(b"CONNECT {}\r\n")
        assert await bob.read_until_closed() == b"-ERR 'Authorization Violation'\r\n"


async def test_old_tls_versions_are_refused(
    authority: CertificateAuthority, server_certificate: CertificatePair
) -> None:
    old = client_ssl_context(authority)
    old.set_ciphers("ALL:@SECLEVEL=0")
    old.minimum_version = ssl.TLSVersion.MINIMUM_SUPPORTED
    with pytest.warns(DeprecationWarning, match="TLSv1_1 is deprecated"):
        old.maximum_version = ssl.TLSVersion.TLSv1_1
    async with tls_server(server_certificate) as server:
        peer = await open_nats_peer(server)
        await peer.read_info()
        with pytest.raises(trio.BrokenResourceError):
            await peer.use_tls(old)


def test_unusable_certificates_are_reported(
    authority: CertificateAuthority, server_certificate: CertificatePair, tmp_path: Path
) -> None:
    other_certificate = CertificateAuthority(tmp_path, "other").issue("other")
    locked = CertificateAuthority(tmp_path).issue("locked", password=b"x")
    no_certificate = tmp_path / "nothing.pem"
    no_certificate.write_text("nothing")
    missing = tmp_path / "missing.pem"
    for options, sentence in (
        (
            TlsOptions(missing, server_certificate.key),
            f"the certificate {missing} cannot be read: No such file",
        ),
        (
            TlsOptions(server_certificate.cert, missing),
            f"the key {missing} cannot be read: No such file",
        ),
        (
            TlsOptions(server_certificate.cert, server_certificate.key, missing),
            f"the CA certificate {missing} cannot be read",
        ),
        (
            TlsOptions(server_certificate.cert, other_certificate.key),
            "are not a PEM certificate and its key: key values",
        ),
        (
            TlsOptions(no_certificate, server_certificate.key),
            f"{no_certificate} and {server_certificate.key} are not a PEM certificate and its key",
        ),
        (TlsOptions(locked.cert, locked.key), "is encrypted; expected one without a password"),
        (
            TlsOptions(server_certificate.cert, server_certificate.key, no_certificate),
            f"{no_certificate} contains no PEM certificates",
        ),
    ):
        with pytest.raises(OSError, match=re.escape(sentence)):
            create_ssl_context(options)


def test_certificate_names_and_their_order() -> None:
    subject = (
        (("countryName", "CH"),),
        (("organizationName", "Bus, Ltd"),),
        (("organizationalUnitName", "billing"), ("userId", "7")),
        (("commonName", "ada "),),
    )
    certificate = {
        "subject": subject,
        "subjectAltName": (("DNS", "a.example"), ("IP Address", "::1"), ("email", "ada@x")),
    }
    assert certificate_names(certificate) == (
        "ada@x",
        "a.example",
        "CN=ada\\ ,OU=billing+UID=7,O=Bus\\, Ltd,C=CH",
    )
    assert certificate_names({}) == ()


def test_certificate_names_of_the_wrong_type_are_ignored() -> None:
    signed = [("DNS", "CN=ada,OU=shops"), ("DNS", "ada@x"), ("email", "ada.example")]
    signed += [("URI", "CN=ada"), ("email", "CN=a@x"), ("DNS", "a\0b"), ("DNS", "Fine.Example")]
    subject = ((("commonName", "nobody"),),)
    found = certificate_names({"subject": subject, "subjectAltName": signed})
    assert found == ("fine.example", "CN=nobody")
