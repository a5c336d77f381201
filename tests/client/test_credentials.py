"""Tests of credentials: arguments, file and environment, with every driver."""

from __future__ import annotations

import ssl
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path

import anyio
import pytest

import simplebus
from simplebus.client.addresses import Address
from simplebus.client.credentials import Access, resolve_access
from simplebus.core.users.users import User, Users
from simplebus.server.tls.certificates import TlsOptions
from tests.client.bus_server import bus_server
from tests.support.certificates import CertificateAuthority, CertificatePair

Run = Callable[[Callable[[], Awaitable[None]]], None]


@pytest.fixture(autouse=True)
def _nothing_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("USER", "PASSWORD", "TOKEN", "TLS_CA", "TLS_CERT", "TLS_KEY", "CREDENTIALS"):
        monkeypatch.delenv(f"SIMPLEBUS_{name}", raising=False)


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> CertificateAuthority:
    return CertificateAuthority(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
def pair(authority: CertificateAuthority) -> CertificatePair:
    return authority.issue("localhost")


def write_credentials_file(folder: Path, text: str, mode: int = 0o600) -> Path:
    path = folder / "credentials.toml"
    path.write_text(text)
    path.chmod(mode)
    return path


def test_address_scheme_selects_tls() -> None:
    assert Address.parse("simplebuss://a") == Address("a", 8888, is_secure=True)
    assert str(Address.parse("simplebuss://[::1]:7")) == "simplebuss://[::1]:7"
    assert Address.parse("a") == Address.parse("simplebus://a:8888")


def test_access_from_environment() -> None:
    assert Access.from_environment({}) == Access()
    found = Access.from_environment(
        {"SIMPLEBUS_USER": "ada", "SIMPLEBUS_PASSWORD": "x", "SIMPLEBUS_TLS_CA": "ca.pem"}
    )
    assert found == Access(user="ada", password="x", ca="ca.pem")
    assert Access.from_environment({"SIMPLEBUS_TOKEN": "t"}).auth == Access(token="t").auth


def test_environment_takes_precedence_over_file(tmp_path: Path) -> None:
    path = write_credentials_file(tmp_path, 'user = "ada"\npassword = "x"\nca = "ca.pem"\n')
    assert Access.from_file(path) == Access("ada", "x", ca=str(tmp_path / "ca.pem"))
    environment = {"SIMPLEBUS_CREDENTIALS": str(path), "SIMPLEBUS_TOKEN": "t"}
    assert Access.from_environment(environment) == Access(token="t", ca=str(tmp_path / "ca.pem"))


@pytest.mark.parametrize(
    ("text", "mode", "expected_error"),
    [
        ('password = "x"\nuser = "a"\n', 0o644, "holds a secret that others may read"),
        ("user = 7\n", 0o600, "unknown or non-text setting 'user'"),
        (
            'pasword = "x"\n',
            0o600,
            "unknown or non-text setting 'pasword'; expected texts for user",
        ),
        ('password = "x"\n', 0o600, "a password was given without a user"),
        ("user", 0o600, "is not valid TOML"),
    ],
)
def test_invalid_credentials_file_raises_an_error_that_names_it(
    tmp_path: Path, text: str, mode: int, expected_error: str
) -> None:
    with pytest.raises(ValueError, match=expected_error):
        Access.from_file(write_credentials_file(tmp_path, text, mode))


def test_rejects_contradicting_settings() -> None:
    with pytest.raises(ValueError, match="a user and a token were given"):
        Access(user="a", token="t")
    with pytest.raises(ValueError, match="a key was given without a certificate"):
        Access(key="k")
    with pytest.raises(ValueError, match="got access= together with user="):
        resolve_access(Access(), user="a")
    assert resolve_access(None, user="a", password="b") == Access("a", "b")
    assert resolve_access(Access(token="t")).token == "t"


def test_repr_hides_secrets() -> None:
    assert "hidden" not in repr(Access(user="a", password="hidden"))
    assert "hidden" not in repr(Access(token="hidden"))


def test_unusable_certificate_is_named(authority: CertificateAuthority, tmp_path: Path) -> None:
    missing_file = tmp_path / "nothing.pem"
    missing_file.write_text("nothing")
    for access, expected_error in (
        (Access(ca=str(tmp_path / "missing")), "missing cannot be read: No such file"),
        (
            Access(ca=str(authority.path), cert=str(missing_file)),
            f"{missing_file} has no valid PEM certificate",
        ),
    ):
        with pytest.raises(OSError, match=expected_error):
            access.tls()
    assert Access(ca=str(authority.path)).tls().minimum_version is ssl.TLSVersion.TLSv1_2


@pytest.fixture
def address(pair: CertificatePair) -> Iterator[str]:
    users = Users([User("ada", token="t")])
    with bus_server(tls=TlsOptions(pair.cert, pair.key), users=users) as server:
        yield server.address


def test_every_driver_authenticates_over_tls(
    run: Run, address: str, authority: CertificateAuthority, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SIMPLEBUS_TOKEN", "t")
    monkeypatch.setenv("SIMPLEBUS_TLS_CA", str(authority.path))
    payloads = [bytes([n]) * 200_000 for n in range(10)]

    async def main() -> None:
        async with (
            simplebus.connect(address) as bus,
            bus.subscribe(1) as messages,
            anyio.create_task_group() as tasks,
        ):
            tasks.start_soon(partial(bus.publish_many, payloads, class_id=1))
            for payload in payloads:
                assert (await messages.get(timeout=60)).payload == payload
        with pytest.raises(simplebus.BusConnectionError, match="unauthorized"):
            async with simplebus.connect(address, token="wrong"):
                pass

    run(main)
    with simplebus.connect_blocking(address) as bus, bus.subscribe(1) as messages:
        bus.publish_many(payloads, class_id=1)
        assert [messages.get(timeout=60).payload for _ in payloads] == payloads
