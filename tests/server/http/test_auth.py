"""Tests of the authentication of HTTP requests."""

from __future__ import annotations

import base64
import contextlib
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import trio
from argon2 import PasswordHasher

from simplebus.core.errors import RemoteProtocolError
from simplebus.core.users.passwords import PasswordVerifier, hash_token
from simplebus.core.users.permissions import (
    AdminRight,
    PermissionRule,
    PermissionRules,
    Permissions,
)
from simplebus.core.users.users import User, Users
from simplebus.monitor.requests import PUBLIC_PATHS
from simplebus.server.http.auth import parse_authorization
from simplebus.server.run import RunningServer
from simplebus.server.tls.certificates import TlsOptions
from tests.support.certificates import CertificateAuthority, CertificatePair
from tests.support.http_peer import HttpPeer, open_http_peer
from tests.support.running_server import serving

SLOW = PasswordHasher(time_cost=1, memory_cost=8, parallelism=1).hash("secret")
ROOT = User("root", password=SLOW)
MONITORING_USER = User(
    "eye",
    password=SLOW,
    token=hash_token("a-long-token-of-the-eye"),
    permissions=Permissions(
        publish=PermissionRules(allow=()),
        subscribe=PermissionRules(allow=()),
        admin=((AdminRight.MONITOR, "*"),),
    ),
)
PUBLISHING_USER = User(
    "till",
    password=SLOW,
    permissions=Permissions(publish=PermissionRules(allow=(PermissionRule("orders"),))),
)


@contextlib.asynccontextmanager
async def server_with_users(*users: User, **more: object) -> AsyncIterator[RunningServer]:
    user_table = Users(users, PasswordVerifier(b"by chance"))
    async with serving(users=user_table, http_port=0, **more) as server:
        yield server


def basic(user: str, password: str) -> str:
    return "Authorization: Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()


@pytest.mark.parametrize("path", ["/", "/page.js", "/facts", "/metrics", "/varz", "/connz", "/x"])
async def test_request_without_credentials_gets_a_challenge(path: str) -> None:
    async with server_with_users(ROOT) as server:
        response = await (await open_http_peer(server)).request(path)
        assert response.status == 401
        assert response.headers["www-authenticate"].startswith(("Basic", "Bearer"))
        assert "this bus requires authentication" in response.json["error"]


@pytest.mark.parametrize("path", PUBLIC_PATHS)
async def test_health_requires_no_credentials(path: str) -> None:
    async with server_with_users(ROOT) as server:
        assert (await (await open_http_peer(server)).request(path)).status == 200


@pytest.mark.parametrize(
    ("header", "status"),
    [
        (basic("root", "secret"), 200),
        (basic("eye", "secret"), 200),
        ("Authorization: Bearer a-long-token-of-the-eye", 200),
        ("authorization: bearer a-long-token-of-the-eye", 200),
        (basic("till", "secret"), 403),
        (basic("root", "wrong"), 401),
        (basic("nobody", "secret"), 401),
        ("Authorization: Bearer wrong", 401),
        ("Authorization: Basic !!!", 401),
        ("Authorization: Basic " + base64.b64encode(b"\xff:x").decode(), 401),
        ("Authorization: Basic " + base64.b64encode(b"root").decode(), 401),
        ("Authorization: Digest x", 401),
        ("Authorization: Bearer " + "x" * 8000, 401),
    ],
    ids=lambda value: str(value)[:40],
)
async def test_credentials_take_precedence_over_addresses(header: str, status: int) -> None:
    async with server_with_users(ROOT, MONITORING_USER, PUBLISHING_USER) as server:
        assert (await (await open_http_peer(server)).request("/metrics", header)).status == status


async def test_guessing_is_limited_and_delays_no_other_client() -> None:
    async with server_with_users(ROOT, MONITORING_USER) as server:
        peer = await open_http_peer(server)
        assert (await peer.request("/metrics", basic("root", "secret"))).status == 200
        statuses = [
            (await peer.request("/metrics", basic("root", f"{n}"))).status for n in range(12)
        ]
        assert 429 in statuses
        assert set(statuses) == {401, 429}
        assert (await peer.request("/metrics", basic("eye", "secret"))).status == 200


async def test_removed_users_are_rejected() -> None:
    async with server_with_users(ROOT) as server:
        peer = await open_http_peer(server)
        assert (await peer.request("/metrics", basic("root", "secret"))).status == 200
        server.server.replace_users(Users([MONITORING_USER], PasswordVerifier(b"by chance")))
        assert (await peer.request("/metrics", basic("root", "secret"))).status == 401
        server.server.replace_users(None)
        assert (await peer.request("/metrics")).status == 200


async def test_user_can_authenticate_by_address() -> None:
    async with server_with_users(User("here", addresses=("127.0.0.0/8",))) as server:
        assert (await (await open_http_peer(server)).request("/metrics")).status == 200


@pytest.mark.parametrize(
    ("header", "status"),
    [
        (basic("root", "secret"), 200),
        (basic("root", "wrong"), 401),
        ("Authorization: Bearer x", 401),
        ("Authorization: x", 401),
        ("Authorization: ", 421),
        (basic("", ""), 421),
        ("X: y", 421),
    ],
)
async def test_authenticated_requests_may_use_any_host(header: str, status: int) -> None:
    local_user = User("here", addresses=("127.0.0.0/8",))
    async with server_with_users(ROOT, local_user) as server:
        peer = await open_http_peer(server)
        await peer.send(f"GET /facts HTTP/1.1\r\nHost: evil.example\r\n{header}\r\n\r\n".encode())
        assert (await peer.read_response()).status == status


def test_authorization_header_may_be_absent_but_not_malformed() -> None:
    assert parse_authorization("") is None
    with pytest.raises(RemoteProtocolError, match="expected an Authorization header of type Basic"):
        parse_authorization("Basic")


# TLS ---------------------------------------------------------------------------------------------


async def connect_with_tls(
    server: RunningServer, authority: Path, certificate: CertificatePair | None = None
) -> HttpPeer:
    peer = await open_http_peer(server)
    context = ssl.create_default_context(cafile=str(authority))
    if certificate is not None:
        context.load_cert_chain(certificate.cert, certificate.key)
    peer.stream = trio.SSLStream(peer.stream, context, server_hostname="localhost")
    return peer


async def test_http_listener_uses_tls_of_the_server(
    authority: CertificateAuthority, server_certificate: CertificatePair
) -> None:
    async with serving(
        http_port=0, tls=TlsOptions(server_certificate.cert, server_certificate.key)
    ) as server:
        peer = await connect_with_tls(server, authority.path)
        for _ in range(2):
            assert (await peer.request("/healthz")).status == 200
        plain = await open_http_peer(server)
        await plain.send(b"GET /healthz HTTP/1.1\r\nHost: a\r\n\r\n")
        assert await plain.wait_closed()
        assert (await peer.request("/healthz")).status == 200


async def test_user_can_authenticate_by_certificate(
    authority: CertificateAuthority, server_certificate: CertificatePair
) -> None:
    certificate = authority.issue("eye", email="eye@example.com")
    tls = TlsOptions(server_certificate.cert, server_certificate.key, authority.path, verify=True)
    async with server_with_users(User("eye", certificates=("eye@example.com",)), tls=tls) as server:
        peer = await connect_with_tls(server, authority.path, certificate)
        assert (await peer.request("/metrics")).status == 200
