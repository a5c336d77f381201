"""Bridges at ends that speak TLS alone, and ask who comes."""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
from typer.testing import CliRunner

import simplebus
from simplebus.bridge.runner import serve_with_bridges
from simplebus.bridge.settings import BridgeSettings, CopiedClass
from simplebus.cli import app
from simplebus.client.credentials import Access
from simplebus.commands.bridge import _with_environment
from simplebus.config.bridges import made as read_bridges
from simplebus.config.mistakes import ConfigError
from simplebus.core.settings import Settings
from simplebus.core.users.passwords import PasswordVerifier, hash_token
from simplebus.core.users.permissions import (
    AdminRight,
    PermissionRule,
    PermissionRules,
    Permissions,
)
from simplebus.core.users.users import User, Users
from simplebus.server.run import RunningServer, ServeOptions, serve
from simplebus.server.tls.certificates import TlsOptions
from tests.bridge.memory_buses import numbered, payloads
from tests.bridge.nats_copiers import bridged, connect, until
from tests.jetstream.nats_servers import nats_server
from tests.support.certificates import CertificateAuthority
from tests.support.running_server import serving

PATIENCE_SECONDS = 120.0


def rules(*allow: str) -> PermissionRules:
    return PermissionRules(tuple(map(PermissionRule.parse, allow)))


ALL = User("all", token=hash_token("all"))
READER = User(
    "reader",
    token=hash_token("reads"),
    permissions=Permissions(
        publish=rules("dead.orders"),
        subscribe=rules("orders"),
        admin=((AdminRight.FETCH, "orders"),),
    ),
)
WRITER = User(
    "writer",
    token=hash_token("writes"),
    permissions=Permissions(
        publish=rules("orders", "bridges"),
        subscribe=rules("bridges"),
        admin=((AdminRight.CONFIGURE, "bridges"),),
    ),
)


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> CertificateAuthority:
    found = CertificateAuthority(tmp_path_factory.mktemp("certificates"))
    found.issue("localhost")
    found.issue("bridge")
    return found


@asynccontextmanager
async def guarded(
    authority: CertificateAuthority, *users: User, **more: Any
) -> AsyncIterator[RunningServer]:
    folder = authority.folder
    tls = TlsOptions(folder / "localhost.pem", folder / "localhost.key", **more)
    async with serving(
        users=Users((ALL, *users), PasswordVerifier(b"by chance")), tls=tls
    ) as server:
        yield server


def secure(server: RunningServer) -> str:
    return f"simplebuss://{server.addresses[0]}"


async def test_uses_tls_and_credentials_at_both_ends(
    authority: CertificateAuthority,
) -> None:
    """It may do at each end what a bridge does there, and nothing else."""
    ca, cert, key = (
        str(authority.folder / n) for n in ("authority.pem", "bridge.pem", "bridge.key")
    )
    known = Access(token="all", ca=ca, cert=cert, key=key)
    async with (
        guarded(authority, READER) as near,
        guarded(authority, WRITER, ca=authority.path, verify=True) as far,
    ):
        bridge = BridgeSettings(
            "b",
            secure(near),
            secure(far),
            (CopiedClass("orders", start="earliest"),),
            source_access=Access(token="reads", ca=ca),
            target_access=Access(token="writes", ca=ca, cert=cert, key=key),
        )
        assert "reads" not in repr(bridge)
        async with (
            simplebus.connect(secure(near), access=known) as here,
            simplebus.connect(secure(far), access=known) as there,
        ):
            await here.publish_many(numbered(0, 100), class_id="orders")
            async with bridged(bridge) as (lane,):
                assert await payloads(there, "orders", 100) == numbered(0, 100)
                await until(lambda: lane.statistics().copied == 100)
                assert lane.statistics().losses == 0


@pytest.mark.parametrize(
    ("near_access", "problem"),
    [
        ({"token": "wrong"}, "unauthorized"),
        ({"token": "all", "ca": ""}, "certificate"),
        ({"token": "all", "ca": "/nowhere.pem"}, "/nowhere.pem cannot be read"),
    ],
)
async def test_logs_refused_credentials(
    near_access: dict[str, str], problem: str, authority: CertificateAuthority
) -> None:
    access = Access(**{"ca": str(authority.path), **near_access})
    async with guarded(authority) as near, serving() as far:
        far_url = f"simplebus://{far.addresses[0]}"
        bridge = BridgeSettings(
            "b", secure(near), far_url, (CopiedClass("orders"),), source_access=access
        )
        async with bridged(bridge) as (lane,):
            await until(lambda: lane.statistics().losses > 0)
            assert problem in lane.statistics().problem


async def test_local_bridge_needs_no_credentials(
    authority: CertificateAuthority,
) -> None:
    """Both ways, and through what it is told anew: nobody asks them for TLS, or who they are."""
    folder, known = authority.folder, Access(token="all", ca=str(authority.path))
    users = Users((ALL,), PasswordVerifier(b"by chance"))
    options = ServeOptions(
        hosts=("127.0.0.1",),
        port=0,
        users=users,
        tls=TlsOptions(folder / "localhost.pem", folder / "localhost.key"),
    )
    started: list[RunningServer] = []

    async def run_server(task_status: trio.TaskStatus[RunningServer]) -> None:
        async with trio.open_nursery() as nursery:
            started.append(
                await nursery.start(
                    lambda task_status: serve(
                        Settings(), options, announce=lambda line: None, task_status=task_status
                    )
                )
            )
            task_status.started(started[0])

    async with serving() as far, trio.open_nursery() as nursery:
        away = far.addresses[0]
        bridges = [
            BridgeSettings("out", "", away, (CopiedClass("orders", start="earliest"),)),
            BridgeSettings("in", away, "", (CopiedClass("news", start="earliest"),)),
            BridgeSettings("within", "", "", (CopiedClass("orders", "copies", start="earliest"),)),
        ]
        nursery.start_soon(serve_with_bridges, run_server, bridges)
        await until(lambda: bool(started))
        with trio.fail_after(PATIENCE_SECONDS):
            async with (
                simplebus.connect(secure(started[0]), access=known) as here,
                simplebus.connect(away) as there,
            ):
                # What only one of the two lanes has seen, the other one would not find any more.
                async def have_begun() -> bool:
                    with contextlib.suppress(simplebus.BusError):  # There is no such class yet.
                        return len((await here.explain("orders")).positions) == 2
                    return False

                while not await have_begun():
                    pass
                for first, also in (0, User("more", token=hash_token("more"))), (50, None):
                    await here.publish_many(numbered(first, first + 50), class_id="orders")
                    await there.publish_many(numbered(first, first + 50), class_id="news")
                    found = numbered(first, first + 50)
                    assert await payloads(there, "orders", 50) == found
                    assert await payloads(here, "copies", 50) == found
                    assert await payloads(here, "news", 50) == found
                    if also is not None:
                        more = Users((ALL, also), PasswordVerifier(b"by chance"))
                        started[0].server.replace_users(more)
        nursery.cancel_scope.cancel()


async def test_connects_to_nats_with_client_certificate(
    authority: CertificateAuthority, tmp_path: Path
) -> None:
    folder = authority.folder
    tls = (
        f'tls {{ cert_file: "{folder}/localhost.pem", key_file: "{folder}/localhost.key", '
        f'ca_file: "{authority.path}", verify: true }}\n'
        "authorization { token: secret }"
    )
    access = Access(
        token="secret",
        ca=str(authority.path),
        cert=str(folder / "bridge.pem"),
        key=str(folder / "bridge.key"),
    )
    with nats_server(tmp_path, tls) as nats:
        async with (
            serving() as near,
            simplebus.connect(near.addresses[0]) as bus,
            connect(nats, {"token": "secret"}, tls=access.tls()) as connection,
        ):
            connection.core.subscribe("class.orders")
            await connection.round_trip()
            await bus.publish(b"hello", class_id="orders")
            copied = (CopiedClass("orders", start="earliest"),)
            tls_url = nats.url.replace("nats://", "tls://")
            bridge = BridgeSettings("b", near.addresses[0], tls_url, copied, target_access=access)
            async with bridged(bridge):
                while not connection.messages:
                    await connection.wait_event()
                assert connection.messages[0].payload(0) == b"hello"


@pytest.fixture
def secret_file(tmp_path: Path) -> Path:
    file = tmp_path / "hq.toml"
    file.write_text('user = "till"\npassword = "secret"\n')
    file.chmod(0o600)
    return file


def table(**more: Any) -> dict[str, Any]:
    return {"name": "b", "from": "a", "to": "simplebuss://hq", "classes": ["x"], **more}


def test_reads_credentials_of_both_ends_from_file(secret_file: Path) -> None:
    near, far = {"token": "t", "ca": "a.pem"}, {"credentials": str(secret_file)}
    ((bridge,), has_secrets) = read_bridges([table(near=near, far=far)], is_served=False)
    assert bridge.source_access == Access(token="t", ca="a.pem")
    assert bridge.target_access == Access(user="till", password="secret")
    assert has_secrets
    assert not read_bridges([table(far=far)], is_served=False)[1]


@pytest.mark.parametrize(
    ("far", "problem"),
    [
        ({"password": "x"}, "bridges[0].far: a password was given without a user"),
        ({"token": "x", "credentials": "y"}, "says it all"),
        ({"credentials": "/nowhere.toml"}, "/nowhere.toml cannot be read"),
        ({"tokn": "x"}, "did you mean 'token'"),
    ],
)
def test_names_place_of_invalid_end(far: dict[str, str], problem: str) -> None:
    with pytest.raises(ConfigError, match="bridges") as raised:
        read_bridges([table(far=far)], is_served=False)
    assert problem in str(raised.value)


def test_reads_credentials_from_environment(
    monkeypatch: pytest.MonkeyPatch, secret_file: Path
) -> None:
    monkeypatch.setenv("SIMPLEBUS_TOKEN", "of a client, not of a bridge")
    monkeypatch.setenv("SIMPLEBUS_FROM_TOKEN", "near")
    monkeypatch.setenv("SIMPLEBUS_TO_CREDENTIALS", str(secret_file))
    bridge = BridgeSettings("b", "a", "c", (CopiedClass(1),))
    found = _with_environment(bridge)
    assert found.source_access == Access(token="near")
    assert found.target_access == Access(user="till", password="secret")
    said = _with_environment(
        BridgeSettings("b", "a", "c", (CopiedClass(1),), source_access=Access(token="own"))
    )
    assert said.source_access == Access(token="own")
    secret_file.chmod(0o644)
    assert os.stat(secret_file).st_mode & 0o044
    result = CliRunner().invoke(app, ["bridge", "--from", "a", "--to", "b", "1"])
    assert result.exit_code == 2
    assert "holds a secret that others may read" in result.output
    assert "secret" not in result.output.replace("a secret that", "")


@pytest.mark.parametrize("flag", ["--from", "--to"])
def test_rejects_secret_on_command_line(flag: str) -> None:
    other = "--to" if flag == "--from" else "--from"
    result = CliRunner().invoke(app, ["bridge", flag, "nats://u:hunter2@h", other, "h", "orders"])
    assert result.exit_code == 2
    assert f"{flag}: it says who the bridge is" in result.output
    assert "hunter2" not in result.output


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        ({"token": "t"}, "token: these are for a NATS server"),
        ({"copy": [{"class": "y", "stream": "S"}]}, "stream 'S': only a NATS server has"),
        ({"to": "nats://hq:no"}, "expected nats://HOST"),
        ({"to": "nats://u:secret@hq:no"}, "…@hq:no"),
        ({"to": "nats://hq", "seed": "nonsense"}, "the seed is"),
        ({"to": "nats://hq", "user": "u", "far": {"token": "t"}}, "or a token, or a seed"),
    ],
)
def test_rejects_invalid_nats_credentials(more: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError) as raised:
        read_bridges([table(**more)], is_served=False)
    assert problem in str(raised.value)
    assert "secret" not in str(raised.value)
