"""Bridges between servers that require TLS and credentials."""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
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
from simplebus.commands.bridge import _add_environment_credentials
from simplebus.config import bridges
from simplebus.config.errors import ConfigError
from simplebus.config.table_reader import TableReader
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
from tests.bridge.memory_buses import numbered_payloads, payloads
from tests.bridge.nats_copiers import connect, running_bridges, wait_until
from tests.jetstream.nats_servers import nats_server
from tests.support.certificates import CertificateAuthority
from tests.support.running_server import serving

PATIENCE_SECONDS = 120.0


def permission_rules(*allow: str) -> PermissionRules:
    return PermissionRules(tuple(map(PermissionRule.parse, allow)))


ALL = User("all", token=hash_token("all"))
READER = User(
    "reader",
    token=hash_token("reads"),
    permissions=Permissions(
        publish=permission_rules("dead.orders"),
        subscribe=permission_rules("orders"),
        admin=((AdminRight.FETCH, "orders"),),
    ),
)
WRITER = User(
    "writer",
    token=hash_token("writes"),
    permissions=Permissions(
        publish=permission_rules("orders", "bridges"),
        subscribe=permission_rules("bridges"),
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
async def secure_endpoint(
    authority: CertificateAuthority, *users: User, **more: Any
) -> AsyncIterator[RunningServer]:
    folder = authority.folder
    tls = TlsOptions(folder / "localhost.pem", folder / "localhost.key", **more)
    async with serving(
        users=Users((ALL, *users), PasswordVerifier(b"by chance")), tls=tls
    ) as server:
        yield server


def secure_address(server: RunningServer) -> str:
    return f"simplebuss://{server.addresses[0]}"


async def test_uses_tls_and_credentials_at_both_ends(
    authority: CertificateAuthority,
) -> None:
    """The users have only the permissions that a bridge needs."""
    ca, cert, key = (
        str(authority.folder / n) for n in ("authority.pem", "bridge.pem", "bridge.key")
    )
    access = Access(token="all", ca=ca, cert=cert, key=key)
    async with (
        secure_endpoint(authority, READER) as source,
        secure_endpoint(authority, WRITER, ca=authority.path, verify=True) as target,
    ):
        bridge = BridgeSettings(
            "b",
            secure_address(source),
            secure_address(target),
            (CopiedClass("orders", start="earliest"),),
            source_access=Access(token="reads", ca=ca),
            target_access=Access(token="writes", ca=ca, cert=cert, key=key),
        )
        assert "reads" not in repr(bridge)
        async with (
            simplebus.connect(secure_address(source), access=access) as source_bus,
            simplebus.connect(secure_address(target), access=access) as target_bus,
        ):
            await source_bus.publish_many(numbered_payloads(0, 100), class_id="orders")
            async with running_bridges(bridge) as (copier,):
                assert await payloads(target_bus, "orders", 100) == numbered_payloads(0, 100)
                await wait_until(lambda: copier.statistics().copied == 100)
                assert copier.statistics().losses == 0


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
    async with secure_endpoint(authority) as source, serving() as target:
        far_url = f"simplebus://{target.addresses[0]}"
        bridge = BridgeSettings(
            "b", secure_address(source), far_url, (CopiedClass("orders"),), source_access=access
        )
        async with running_bridges(bridge) as (copier,):
            await wait_until(lambda: copier.statistics().losses > 0)
            assert problem in copier.statistics().problem


async def test_local_bridge_needs_no_credentials(
    authority: CertificateAuthority,
) -> None:
    """Bridges of the server itself connect without TLS and credentials, in both directions and
    after a reload.
    """
    folder, access = authority.folder, Access(token="all", ca=str(authority.path))
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

    async with serving() as target, trio.open_nursery() as nursery:
        target_address = target.addresses[0]
        bridges = [
            BridgeSettings("out", "", target_address, (CopiedClass("orders", start="earliest"),)),
            BridgeSettings("in", target_address, "", (CopiedClass("news", start="earliest"),)),
            BridgeSettings("within", "", "", (CopiedClass("orders", "copies", start="earliest"),)),
        ]
        nursery.start_soon(serve_with_bridges, run_server, bridges)
        await wait_until(lambda: bool(started))
        with trio.fail_after(PATIENCE_SECONDS):
            async with (
                simplebus.connect(secure_address(started[0]), access=access) as source_bus,
                simplebus.connect(target_address) as target_bus,
            ):
                # A message that one of the two copiers has acked is gone for the other one.
                async def have_begun() -> bool:
                    with contextlib.suppress(simplebus.BusError):  # The class does not exist yet.
                        return len((await source_bus.explain("orders")).positions) == 2
                    return False

                while not await have_begun():
                    pass
                for first, extra_user in (0, User("more", token=hash_token("more"))), (50, None):
                    await source_bus.publish_many(
                        numbered_payloads(first, first + 50), class_id="orders"
                    )
                    await target_bus.publish_many(
                        numbered_payloads(first, first + 50), class_id="news"
                    )
                    found = numbered_payloads(first, first + 50)
                    assert await payloads(target_bus, "orders", 50) == found
                    assert await payloads(source_bus, "copies", 50) == found
                    assert await payloads(source_bus, "news", 50) == found
                    if extra_user is not None:
                        more = Users((ALL, extra_user), PasswordVerifier(b"by chance"))
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
            serving() as source,
            simplebus.connect(source.addresses[0]) as bus,
            connect(nats, {"token": "secret"}, tls=access.tls()) as connection,
        ):
            connection.core.subscribe("class.orders")
            await connection.round_trip()
            await bus.publish(b"hello", class_id="orders")
            copied = (CopiedClass("orders", start="earliest"),)
            tls_url = nats.url.replace("nats://", "tls://")
            bridge = BridgeSettings("b", source.addresses[0], tls_url, copied, target_access=access)
            async with running_bridges(bridge):
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


@dataclass(frozen=True)
class ReadBridges:
    """Bridges of parsed tables, and what else was read."""

    bridges: tuple[BridgeSettings, ...]
    has_secrets: bool
    warnings: tuple[str, ...]


def read_bridges(*tables: dict[str, Any], folder: Path = Path("/etc")) -> ReadBridges:
    """Return the bridges of parsed tables. Raises ConfigError with all errors."""
    reader = TableReader(folder)
    read = bridges.read_bridges(reader, [*tables], is_served=False)
    reader.errors.raise_if_any()
    return ReadBridges(read, reader.has_secrets, tuple(reader.warnings))


@pytest.mark.parametrize("names", [("source", "target"), ("near", "far")])
def test_reads_credentials_of_both_ends_from_file(
    secret_file: Path, names: tuple[str, str]
) -> None:
    source, target = {"token": "t", "ca": "a.pem"}, {"credentials": secret_file.name}
    tables = dict(zip(names, (source, target), strict=True))
    found = read_bridges(table(**tables), folder=secret_file.parent)
    (bridge,) = found.bridges
    assert bridge.source_access == Access(token="t", ca=str(secret_file.parent / "a.pem"))
    assert bridge.target_access == Access(user="till", password="secret")
    assert found.has_secrets
    assert not read_bridges(table(target=target), folder=secret_file.parent).has_secrets


def test_heartbeat_has_a_unit() -> None:
    (bridge,) = read_bridges(table(heartbeat="2min")).bridges
    assert (bridge.heartbeat_seconds, type(bridge.heartbeat_seconds)) == (120, float)
    with pytest.raises(ConfigError, match=r"bridges\[0\].heartbeat: 'soon' is not a time"):
        read_bridges(table(heartbeat="soon"))


def test_former_names_of_both_ends_are_deprecated() -> None:
    assert not read_bridges(table(source={"token": "t"})).warnings
    assert read_bridges(table(near={"token": "t"}, far={"token": "t"})).warnings == (
        "bridges[0].near is deprecated: use bridges[0].source",
        "bridges[0].far is deprecated: use bridges[0].target",
    )
    (bridge,) = read_bridges(table(source={"token": "new"}, near={"token": "old"})).bridges
    assert bridge.source_access == Access(token="new")


@pytest.mark.parametrize(
    ("target", "problem"),
    [
        ({"password": "x"}, "bridges[0].target: a password was given without a user"),
        ({"token": "x", "credentials": "y"}, "cannot be combined"),
        ({"credentials": "/nowhere.toml"}, "/nowhere.toml cannot be read"),
        ({"tokn": "x"}, "did you mean 'token'"),
    ],
)
def test_names_place_of_invalid_end(target: dict[str, str], problem: str) -> None:
    with pytest.raises(ConfigError, match="bridges") as raised:
        read_bridges(table(target=target))
    assert problem in str(raised.value)


def test_reads_credentials_from_environment(
    monkeypatch: pytest.MonkeyPatch, secret_file: Path
) -> None:
    monkeypatch.setenv("SIMPLEBUS_TOKEN", "of a client, not of a bridge")
    monkeypatch.setenv("SIMPLEBUS_FROM_TOKEN", "near")
    monkeypatch.setenv("SIMPLEBUS_TO_CREDENTIALS", str(secret_file))
    bridge = BridgeSettings("b", "a", "c", (CopiedClass(1),))
    found = _add_environment_credentials(bridge)
    assert found.source_access == Access(token="near")
    assert found.target_access == Access(user="till", password="secret")
    settings_with_credentials = _add_environment_credentials(
        BridgeSettings("b", "a", "c", (CopiedClass(1),), source_access=Access(token="own"))
    )
    assert settings_with_credentials.source_access == Access(token="own")
    secret_file.chmod(0o644)
    assert os.stat(secret_file).st_mode & 0o044
    result = CliRunner().invoke(app, ["bridge", "--from", "a", "--to", "b", "1"])
    assert result.exit_code == 2
    assert "holds a secret that others may read" in result.output
    assert "secret" not in result.output.replace("a secret that", "")


@pytest.mark.parametrize("flag", ["--from", "--to"])
def test_rejects_secret_on_command_line(flag: str) -> None:
    other_flag = "--to" if flag == "--from" else "--from"
    result = CliRunner().invoke(
        app, ["bridge", flag, "nats://u:hunter2@h", other_flag, "h", "orders"]
    )
    assert result.exit_code == 2
    assert f"{flag}: the address contains credentials" in result.output
    assert "hunter2" not in result.output


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        ({"token": "t"}, "token: only for a NATS server"),
        ({"copy": [{"class": "y", "stream": "S"}]}, "stream 'S': only a NATS server has"),
        ({"to": "nats://hq:no"}, "expected nats://HOST"),
        ({"to": "nats://u:secret@hq:no"}, "…@hq:no"),
        ({"to": "nats://hq", "seed": "nonsense"}, "the seed is"),
        ({"to": "nats://hq", "user": "u", "target": {"token": "t"}}, "or a token, or a seed"),
    ],
)
def test_rejects_invalid_nats_credentials(more: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError) as raised:
        read_bridges(table(**more))
    assert problem in str(raised.value)
    assert "secret" not in str(raised.value)
