"""The options of the NATS door."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest
import typer

from simplebus import cli
from simplebus.commands.serve import nats_options
from simplebus.commands.serve.nats_options import NatsOptions
from simplebus.commands.serve.settings import nats_listener
from simplebus.core.protocol.requests import NamedClass
from simplebus.nats.limits import NatsLimits
from simplebus.nats.settings import NatsSettings
from simplebus.nats.users import NatsAuth, NatsUser
from simplebus.server.tls.certificates import TlsOptions

SERVE = typer.main.get_group(cli.app).commands["serve"]


@pytest.fixture(autouse=True)
def _nothing_else_speaks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*nats_options.SECRETS, "SIMPLEBUS_NATS_PORT", "SIMPLEBUS_NO_NATS"):
        monkeypatch.delenv(name, raising=False)


def door(arguments: str = "") -> NatsOptions:
    with SERVE.make_context("serve", arguments.split()) as context:
        return nats_listener(context)


def test_the_defaults_are_those_of_the_server() -> None:
    assert door() == NatsOptions(port=4222, settings=NatsSettings(), tls=None)
    assert door("--port 0").port == 0
    assert door("--port 0 --nats-port 7").port == 7


def test_every_limit_has_an_option() -> None:
    assert set(nats_options.NATS_LIMIT_FLAGS) == {field.name for field in fields(NatsLimits)}
    assert {*nats_options.TLS_FLAGS, "handshake_seconds"} == {
        field.name for field in fields(TlsOptions)
    }
    flags = {flag for parameter in SERVE.params for flag in parameter.opts}
    assert {*nats_options.NATS_LIMIT_FLAGS.values(), *nats_options.TLS_FLAGS.values()} <= flags


def test_every_option_reaches_the_door() -> None:
    assert door(
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


def test_subjects_are_bound_to_classes_by_id_or_name() -> None:
    assert door("--bind orders.>=7 --bind a=b=shop").classes == (
        NamedClass(id=7, subjects=["orders.>"]),
        NamedClass(name="shop", subjects=["a=b"]),
    )
    assert door().classes == ()


def test_a_variable_binds_several(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SIMPLEBUS_BIND", "orders.>=7 logs=8")
    assert [one.subjects for one in door().classes] == [["orders.>"], ["logs"]]


def test_a_file_names_classes_too(tmp_path: Path) -> None:
    file = tmp_path / "bus.toml"
    file.write_text(
        '[serve]\nbind = ["logs.>=9"]\n[classes.orders]\nid = 7\nsubjects = ["orders.>", "paid"]\n'
        "[classes.plain]\n"
    )
    assert door(f"--config {file}").classes == (
        NamedClass(id=7, name="orders", subjects=["orders.>", "paid"]),
        NamedClass(name="plain"),
        NamedClass(id=9, subjects=["logs.>"]),
    )


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("orders", "'orders' is not a binding; write a subject, = and a class"),
        ("orders.#=7", "# is a wildcard of channels only"),
        ("$JS.x=7", "are reserved"),
        ("a..b=7", "segment 2 of 3 is empty"),
        ("orders=70000", "a class id is from 0 to 65535"),
        ("orders=", "is not a class"),
    ],
)
def test_what_cannot_be_bound(text: str, why: str) -> None:
    with pytest.raises(typer.BadParameter) as caught:
        nats_options.parse_binding(text)
    assert why in caught.value.message


def test_what_may_wait_fits_the_longest_message() -> None:
    chosen = door("--nats-max-payload 128MiB")
    assert chosen.settings.limits.max_pending == 128 << 20


def test_the_door_can_be_left_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert door("--no-nats").port is None
    monkeypatch.setenv("SIMPLEBUS_NATS_PORT", "7")
    assert door("--no-nats").port is None


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
def test_what_makes_no_sense_is_a_sentence(arguments: str, sentence: str) -> None:
    with pytest.raises(ValueError, match="^" + sentence.replace("(", r"\(").replace(")", r"\)")):
        door(arguments)


def test_who_has_no_password_needs_a_certificate_that_says_who_it_is(tmp_path: Path) -> None:
    file = tmp_path / "bus.toml"
    file.write_text("[[nats.users]]\nuser = 'x'\n")
    given = f"--config {file} --nats-tls-cert c --nats-tls-key k"
    assert [user.name for user in door(f"{given} --nats-tls-verify-and-map").settings.auth.users]
    with pytest.raises(ValueError, match=r"^user x of \[\[nats.users\]\] cannot authenticate"):
        door(given)
    file.write_text(f"[nats]\nno_auth_user = 'x'\n{file.read_text()}")
    assert door(given).settings.auth.anonymous_user() is not None


def test_secrets_can_stand_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SIMPLEBUS_NATS_TOKEN", "t")
    chosen = door()
    assert chosen.settings.auth == NatsAuth(token="t")
    monkeypatch.delenv("SIMPLEBUS_NATS_TOKEN")
    monkeypatch.setenv("SIMPLEBUS_NATS_USER", "ada")
    with pytest.raises(ValueError, match="SIMPLEBUS_NATS_USER and SIMPLEBUS_NATS_PASSWORD need"):
        door()
    monkeypatch.setenv("SIMPLEBUS_NATS_PASSWORD", "p")
    chosen = door()
    assert chosen.settings.auth == NatsAuth(users=(NatsUser("ada", "p"),))
