"""The page for NATS clients names existing tests, options and defaults, and its examples work."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from simplebus.commands.serve.command import parse_arguments
from simplebus.config.server_schema import SETTINGS
from simplebus.nats.limits import NatsLimits
from tests.nats.running_server import IS_REFERENCE, NatsTestServer, RawClient

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "protocol" / "nats.md").read_text()


def blocks(language: str) -> list[str]:
    found = re.findall(r"^```(\w*)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    return [block for kind, block in found if kind == language]


def test_page_lists_the_nats_options() -> None:
    flags = {setting.flag for setting in SETTINGS.values()}
    documented = set(re.findall(r"`(--[\w-]+)", PAGE)) | set(re.findall(r"serve (--[\w-]+)", PAGE))
    assert documented <= flags | {"--config"}
    assert {flag for flag in flags if "nats" in flag} <= documented


def test_page_lists_the_defaults() -> None:
    limits = NatsLimits()
    for flag, documented_default in (
        ("max-payload", f"{limits.max_payload >> 20} MiB"),
        ("max-control-line", f"{limits.max_control_line >> 10} KiB"),
        ("max-subs", f"{limits.max_subs}: any number"),
        ("max-pending", f"{limits.max_pending >> 20} MiB"),
        ("max-connections", f"{limits.connections:,}"),
        ("ping-interval", f"{limits.ping_seconds:g} s"),
        ("max-pings-out", f"{limits.pings_max}"),
        ("auth-timeout", f"{limits.auth_seconds:g} s"),
        ("write-timeout", f"{limits.write_seconds:g} s"),
        ("tls-timeout", f"{limits.tls_seconds:g} s"),
    ):
        assert f"\n| `--nats-{flag}` | {documented_default} |" in PAGE
    grace, closing = limits.lame_duck_grace_seconds, limits.lame_duck_seconds
    assert f"`--nats-lame-duck-time` | {grace:g} s, {closing:g} s |" in PAGE


def test_page_configuration_is_valid(tmp_path: Path) -> None:
    bound, users = blocks("toml")
    file = tmp_path / "bus.toml"
    file.touch(0o600)
    file.write_text(users + bound)
    configuration = parse_arguments(["--config", str(file)])
    configuration.raise_errors()
    assert not configuration.warnings
    assert configuration.file is not None
    billing, shop_user, guest_user = configuration.file.users.users
    assert (billing.name, shop_user.nkey[:1]) == ("billing", "U")
    assert guest_user.subject_permissions is not None
    assert guest_user.subject_permissions.publish_deny == ("shop.secret",)
    assert configuration.file.classes["orders"].subjects == ["orders.>"]


@pytest.mark.xdist_group("nats clients")
@pytest.mark.skipif(IS_REFERENCE, reason="the page is about simplebus")
def test_page_session_works(shared_server: NatsTestServer) -> None:
    session = blocks("text")[0]
    assert session.startswith("$ telnet")
    with RawClient(shared_server) as client:
        for line in session.splitlines()[1:]:
            if line.startswith("< "):
                expected = re.escape(line[2:]).replace("…", ".*")
                documented_default = client.read_until(b"\r\n").decode().removesuffix("\r\n")
                assert re.fullmatch(expected, documented_default), documented_default
            else:
                client.send(line)
