"""Credentials and TLS settings of an uplink, and settings that contradict each other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import trio

import simplebus
from simplebus.client.credentials import CREDENTIALS_VARIABLE, ENVIRONMENT_VARIABLES, Access
from simplebus.config.errors import ConfigError
from simplebus.core.users.passwords import PasswordVerifier, hash_token
from simplebus.core.users.users import User, Users
from simplebus.gateway import ModuleMessage
from simplebus.gateway.config import GatewayPlan, ModulePlan
from simplebus.gateway.gateway import Gateway, open_gateway
from simplebus.gateway.modules.uplink_settings import parse
from simplebus.server.tls.certificates import TlsOptions
from tests.bridge.nats_copiers import connect
from tests.jetstream.nats_servers import nats_server
from tests.support.certificates import CertificateAuthority
from tests.support.running_server import serving

PATIENCE_S = 90
SEED = "SUAAAAICAMCAKBQHBAEQUCYMBUHA6EARCIJRIFIWC4MBSGQ3DQOR4H776Y"


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> CertificateAuthority:
    found = CertificateAuthority(tmp_path_factory.mktemp("certificates"))
    found.issue("localhost")
    found.issue("edge")
    return found


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*ENVIRONMENT_VARIABLES.values(), CREDENTIALS_VARIABLE):
        monkeypatch.delenv(name, raising=False)


def plan(to: str, **settings: Any) -> GatewayPlan:
    options = {"to": to, "class": "readings", **settings}
    return GatewayPlan((ModulePlan.of("up", "uplink", options),), (("*", "up"),))


async def wait_health(gateway: Gateway, name: str, value: object) -> None:
    """Wait until the health of the uplink has this value; for a text, until it contains `value`."""

    def is_reported() -> bool:
        found: Any = gateway.statistics().modules[0].own.get(name, "")
        return value in found if isinstance(value, str) else bool(found == value)

    while not is_reported():  # noqa: ASYNC110 - the condition has no event.
        await trio.sleep(0.01)


@pytest.mark.parametrize("scheme", ["settings", "file", "environment"])
async def test_uplink_authenticates_over_tls(
    scheme: str, authority: CertificateAuthority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server requires a client certificate, too."""
    folder = authority.folder
    credentials_ = {
        "token": "all",
        "ca": str(authority.path),
        "cert": str(folder / "edge.pem"),
        "key": str(folder / "edge.key"),
    }
    settings: dict[str, str] = {}
    if scheme == "settings":
        settings = credentials_
    elif scheme == "file":
        file = tmp_path / "edge.toml"
        file.write_text("".join(f"{name} = {value!r}\n" for name, value in credentials_.items()))
        file.chmod(0o600)
        settings = {"credentials": str(file)}
    else:
        for name, value in credentials_.items():
            monkeypatch.setenv(ENVIRONMENT_VARIABLES[name], value)
    tls = TlsOptions(
        folder / "localhost.pem", folder / "localhost.key", ca=authority.path, verify=True
    )
    users = Users((User("all", token=hash_token("all")),), PasswordVerifier(b"by chance"))
    with trio.fail_after(PATIENCE_S):
        async with serving(users=users, tls=tls) as up:
            to = f"simplebuss://{up.addresses[0]}"
            async with open_gateway(plan(to, **settings)) as gateway:
                await gateway.publish(ModuleMessage(b"hello"))
                await wait_health(gateway, "copied", 1)
            async with (
                simplebus.connect(to, access=Access(**credentials_)) as bus,
                bus.subscribe("readings", durable="test") as messages,
            ):
                assert (await anext(aiter(messages))).payload == b"hello"


async def test_uplink_uses_custom_authority_for_nats(
    authority: CertificateAuthority, tmp_path: Path
) -> None:
    folder = authority.folder
    requirements = (
        f'tls {{ cert_file: "{folder}/localhost.pem", key_file: "{folder}/localhost.key" }}\n'
        "authorization { user: edge, password: secret }"
    )
    credentials = {"user": "edge", "password": "secret"}
    trusted = Access(ca=str(authority.path))
    with trio.fail_after(PATIENCE_S), nats_server(tmp_path, requirements) as nats:
        to = nats.url.replace("nats://", "tls://")
        async with connect(nats, credentials, tls=trusted.tls()) as connection:
            connection.core.subscribe("class.readings")
            await connection.round_trip()
            async with open_gateway(plan(to, **credentials, ca=trusted.ca)) as gateway:
                await gateway.publish(ModuleMessage(b"hello"))
                while not connection.messages:
                    await connection.wait_event()
                await wait_health(gateway, "copied", 1)
            assert connection.messages[0].payload(0) == b"hello"


async def test_reports_untrusted_nats_server(
    authority: CertificateAuthority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The report follows the connect timeout, which takes longer on a busy machine."""
    folder = authority.folder
    tls = f'tls {{ cert_file: "{folder}/localhost.pem", key_file: "{folder}/localhost.key" }}\n'
    with nats_server(tmp_path, tls) as nats:
        to = nats.url.replace("nats://", "tls://")
        async with open_gateway(plan(to)) as gateway:
            for seconds in (0.5, 5.0, PATIENCE_S):
                monkeypatch.setattr("simplebus.bridge.nats_connection.CONNECT_SECONDS", seconds)
                with trio.move_on_after(4 * seconds):
                    await wait_health(gateway, "problem", "is not trusted (")
                    return
            pytest.fail("nobody said so")


def test_settings_override_environment(tmp_path: Path) -> None:
    file = tmp_path / "other.toml"
    file.write_text('user = "other"\npassword = "of the other"\n')
    file.chmod(0o600)
    to: dict[str, Any] = {"to": "simplebus://a", "class": 1}
    environment = {"SIMPLEBUS_TOKEN": "told"}
    assert parse(to, environment).access == Access(token="told")
    assert parse({**to, "token": "own"}, environment).access == Access(token="own")
    assert parse({**to, "user": "u", "password": "p"}, environment).access == Access("u", "p")
    conflicting = {"SIMPLEBUS_CREDENTIALS": str(file), "SIMPLEBUS_PASSWORD": "told"}
    assert parse({**to, "user": "u"}, conflicting).access == Access("u", "told")
    del conflicting["SIMPLEBUS_PASSWORD"]  # Not the password of another user.
    assert parse({**to, "user": "u"}, conflicting).access == Access("u")
    assert parse(to, conflicting).access == Access("other", "of the other")
    to["to"] = "nats://me:mine@a"
    assert parse(to, conflicting).access == Access()
    to["to"] = "nats://a"
    assert parse({**to, "seed": SEED}, environment).nats_access.credentials == {"seed": SEED}
    assert parse({**to, "credentials": {"token": "t"}}, environment).access == Access(token="t")


def test_no_text_contains_secrets() -> None:
    for to, credentials in (
        ("simplebus://a", {"user": "u", "password": "secret"}),
        ("simplebus://a", {"credentials": {"token": "secret"}}),
        ("nats://u:secret@a", {}),
    ):
        assert "secret" not in repr(plan(to, **credentials))
    for to in "nats://u:secret@a:b", "nats://u:sec/ret@a", "simplebus://u:secret@a":
        with pytest.raises(ConfigError) as raised:
            plan(to)
        assert "sec" not in str(raised.value)


@pytest.mark.parametrize(
    ("settings", "expected_error"),
    [
        ({"class": "bridges"}, "cannot be copied"),
        ({"class": "dead.orders"}, "holds dead letters"),
        ({"class": ""}, "a name of 1 to 200 characters"),
        ({"class": 1 << 16}, "class must be from 0 to 65535"),
        ({"nmae": "x"}, "did you mean 'name'"),
        ({"name": "x y"}, "name: expected a valid part of a channel"),
        ({"to": "nats://"}, "expected nats://HOST"),
        ({"to": "nats://a:port"}, "expected nats://HOST"),
        ({"to": "nats://a,"}, "expected nats://HOST"),
        ({"channel": "a b"}, "U\\+0020"),
        ({"channel": "a..b"}, "is empty"),
        ({"channel": "a.*"}, "wildcard"),
        ({"to": "nats://a", "channel": "$SYS.x"}, "reserved for the NATS server"),
        ({"to": "nats://a", "stream": "a.b"}, "invalid stream name"),
        ({"stream": "S"}, "stream: needs an address"),
        ({"under_way": 7}, "under_way: needs an address"),
        ({"under_way": 0}, "under_way"),
        ({"to": "nats://a", "under_way": 7}, "needs a 'stream'"),
        ({"to": "nats://a", "stream": "S", "under_way": 99_999}, "from 1 to 24576, got 99999"),
        ({"seed": SEED}, "seed: needs an address"),
        ({"ca": "a.pem"}, "ca: needs an address that begins with simplebuss://"),
        ({"to": "simplebuss://a", "ca": "/nowhere.pem"}, "/nowhere.pem cannot be read"),
        ({"to": "nats://a", "seed": "nonsense"}, "the seed is"),
        ({"to": "nats://a", "seed": SEED, "token": "t"}, "or a seed"),
        ({"to": "nats://u:p@a", "token": "t"}, "in the address and outside"),
        ({"credentials": {"usr": "u"}}, "credentials: 'usr' is unknown; did you mean 'user'"),
        ({"credentials": {"user": "u"}, "user": "v"}, "in credentials and outside"),
        ({"credentials": "/nowhere.toml"}, "/nowhere.toml"),
        ({"credentials": "a.toml", "token": "t"}, "replaces all other"),
        ({"password": "p"}, "without a user"),
        ({"token": "t", "user": "u"}, "expected either"),
        ({"data_dir": "/etc/passwd"}, "/etc/passwd is not a directory"),
    ],
)
def test_rejects_impossible_settings(settings: dict[str, Any], expected_error: str) -> None:
    with pytest.raises(ConfigError, match=expected_error):
        plan(**{"to": "simplebus://a:1", **settings})


async def test_works_with_minimum_memory() -> None:
    async with (
        serving() as up,
        open_gateway(plan(f"simplebus://{up.addresses[0]}", max_memory=1 << 20)) as gateway,
    ):
        with trio.fail_after(PATIENCE_S):
            await gateway.publish(ModuleMessage(b"x" * 300_000))
            await wait_health(gateway, "copied", 1)
