"""Options of the NATS listener."""

from __future__ import annotations

import os
from dataclasses import fields
from pathlib import Path

import pytest
import typer

from simplebus.commands.serve.command import parse_arguments
from simplebus.commands.serve.listener_options import NatsOptions, nats_options
from simplebus.config.environment import NATS_SECRETS
from simplebus.config.parse import parse_binding
from simplebus.config.server_schema import NatsTlsSettings
from simplebus.core.protocol.requests import NamedClass
from simplebus.core.users.users import User, Users
from simplebus.nats.limits import NatsLimits
from simplebus.nats.settings import NatsSettings
from simplebus.server.tls.certificates import TlsOptions


@pytest.fixture(autouse=True)
def clear_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*NATS_SECRETS, "SIMPLEBUS_NATS_PORT", "SIMPLEBUS_NO_NATS"):
        monkeypatch.delenv(name, raising=False)


def parse_nats_options(arguments: str = "") -> NatsOptions:
    configuration = parse_arguments(arguments.split())
    configuration.raise_errors()
    return nats_options(configuration, os.environ)


def test_option_defaults_equal_server_defaults() -> None:
    assert parse_nats_options() == NatsOptions(port=4222, settings=NatsSettings(), tls=None)
    assert parse_nats_options("--port 0").port == 0
    assert parse_nats_options("--port 0 --nats-port 7").port == 7


def test_tls_options_have_settings() -> None:
    names = {setting.field_name for setting in NatsTlsSettings.settings()} - {"timeout"}
    assert names | {"handshake_seconds"} == {field.name for field in fields(TlsOptions)}


def test_options_reach_the_nats_listener() -> None:
    assert parse_nats_options(
        "--nats-port 7 --nats-max-payload 8MiB --nats-max-control-line 8KiB --nats-max-subs 3 "
        "--nats-max-pending 16MiB --nats-max-connections 5 --nats-ping-interval 0.5 "
        "--nats-max-pings-out 1 --nats-auth-timeout 3 --nats-write-timeout 4 "
        "--nats-lame-duck-grace 0 --nats-lame-duck-time 6 --nats-tls-timeout 7 "
        "--nats-tls-cert c --nats-tls-key k --nats-tls-ca a --nats-tls-verify "
        "--nats-tls-verify-and-map --nats-tls-handshake-first"
    ) == NatsOptions(
        port=7,
        settings=NatsSettings(
            limits=NatsLimits(
                max_payload=8 << 20,
                max_control_line=8 << 10,
                max_subs=3,
                max_pending=16 << 20,
                connections=5,
                ping_seconds=0.5,
                pings_max=1,
                auth_seconds=3,
                write_seconds=4,
                lame_duck_grace_seconds=0,
                lame_duck_seconds=6,
                tls_seconds=7,
            ),
            tls_required=True,
            tls_verify=True,
        ),
        tls=TlsOptions(
            Path("c"), Path("k"), Path("a"), verify=True, verify_and_map=True, handshake_first=True
        ),
    )


def test_bind_accepts_class_id_or_name() -> None:
    assert parse_nats_options("--bind orders.>=7 --bind a=b=shop").classes == (
        NamedClass(id=7, subjects=["orders.>"]),
        NamedClass(name="shop", subjects=["a=b"]),
    )
    assert parse_nats_options().classes == ()


def test_environment_variable_binds_several_subjects(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SIMPLEBUS_BIND", "orders.>=7 logs=8")
    assert [class_options.subjects for class_options in parse_nats_options().classes] == [
        ["orders.>"],
        ["logs"],
    ]


def test_configuration_file_can_name_classes(tmp_path: Path) -> None:
    file = tmp_path / "bus.toml"
    file.write_text(
        '[serve]\nbind = ["logs.>=9"]\n[classes.orders]\nid = 7\nsubjects = ["orders.>", "paid"]\n'
        "[classes.plain]\n"
    )
    assert parse_nats_options(f"--config {file}").classes == (
        NamedClass(id=7, name="orders", subjects=["orders.>", "paid"]),
        NamedClass(name="plain"),
        NamedClass(id=9, subjects=["logs.>"]),
    )


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("orders", "'orders' is not a binding; write a subject, = and a class"),
        ("orders.#=7", "# is a wildcard of channels only"),
        ("$JS.x=7", "are reserved"),
        ("a..b=7", "segment 2 of 3 is empty"),
        ("orders=70000", "a class id is from 0 to 65535"),
        ("orders=", "is not a class"),
    ],
)
def test_invalid_bindings_are_rejected(text: str, reason: str) -> None:
    with pytest.raises(typer.BadParameter) as caught:
        parse_binding(text)
    assert reason in caught.value.message


def test_pending_limit_must_fit_longest_message() -> None:
    chosen = parse_nats_options("--nats-max-payload 128MiB")
    assert chosen.settings.limits.max_pending == 128 << 20


def test_nats_listener_can_be_disabled(monkeypatch: pytest.MonkeyPatch) -> None:
    assert parse_nats_options("--no-nats").port is None
    monkeypatch.setenv("SIMPLEBUS_NATS_PORT", "7")
    assert parse_nats_options("--no-nats").port is None


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("--no-nats --nats-port 7", "--no-nats and --nats-port contradict each other"),
        ("--no-nats --bind a=7", "--no-nats and --bind contradict each other"),
        ("--nats-tls-cert c", "--nats-tls-cert needs --nats-tls-key too"),
        ("--nats-tls-key k", "--nats-tls-key needs --nats-tls-cert too"),
        ("--nats-tls-verify", "--nats-tls-verify needs --nats-tls-cert and --nats-tls-key"),
        ("--nats-tls-ca a", "--nats-tls-ca needs --nats-tls-cert and --nats-tls-key"),
        (
            "--nats-tls-cert c --nats-tls-key k --nats-tls-optional --nats-tls-handshake-first",
            "--nats-tls-handshake-first and --nats-tls-optional contradict each other",
        ),
        (
            "--nats-tls-cert c --nats-tls-key k --nats-tls-optional --nats-tls-verify-and-map",
            "--nats-tls-verify-and-map and --nats-tls-optional contradict each other",
        ),
        ("--nats-max-payload 0", "--nats-max-payload must be above 0, got 0"),
        (
            "--nats-max-pending 1KiB",
            "--nats-max-pending must be from 1048576 to 1099511627776, got 1024 (a message of "
            "--nats-max-payload must fit into it)",
        ),
        ("--nats-max-control-line 63", "--nats-max-control-line must be from 64 to"),
        ("--nats-max-pings-out 0", "--nats-max-pings-out must be above 0, got 0"),
        ("--nats-ping-interval 0", "--nats-ping-interval must be above 0, got 0.0"),
    ],
)
def test_invalid_options_print_one_sentence(arguments: str, sentence: str) -> None:
    with pytest.raises(ValueError, match="^" + sentence.replace("(", r"\(").replace(")", r"\)")):
        parse_nats_options(arguments)


def test_user_without_password_requires_verified_certificate(tmp_path: Path) -> None:
    file = tmp_path / "bus.toml"
    file.write_text("[[nats.users]]\nuser = 'x'\n")
    options = f"--config {file} --nats-tls-cert c --nats-tls-key k"
    users = parse_nats_options(f"{options} --nats-tls-verify-and-map").settings.users
    assert users == Users([User("x", certificates=("x",))])
    with pytest.raises(ValueError, match=r"^user x of \[\[nats.users\]\] cannot authenticate"):
        parse_nats_options(options)
    file.write_text(f"[nats]\nno_auth_user = 'x'\n{file.read_text()}")
    assert parse_nats_options(options).settings.users == Users([User("x")], anonymous="x")


def test_secrets_can_be_in_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SIMPLEBUS_NATS_TOKEN", "t")
    chosen = parse_nats_options()
    assert chosen.settings.users == Users([User("nats token", token="t")])
    monkeypatch.delenv("SIMPLEBUS_NATS_TOKEN")
    monkeypatch.setenv("SIMPLEBUS_NATS_USER", "ada")
    with pytest.raises(ValueError, match="SIMPLEBUS_NATS_USER and SIMPLEBUS_NATS_PASSWORD need"):
        parse_nats_options()
    monkeypatch.setenv("SIMPLEBUS_NATS_PASSWORD", "p")
    chosen = parse_nats_options()
    assert chosen.settings.users == Users((User("ada", "p"),))
