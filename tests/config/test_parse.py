"""Parsing of command line arguments into settings."""

from __future__ import annotations

from dataclasses import fields
from datetime import UTC, datetime

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st

from simplebus.commands.serve.command import parse_arguments
from simplebus.config import parse
from simplebus.config.server_schema import ServerConfig
from simplebus.config.server_settings import server_settings
from simplebus.core.limits import RECEIVE_BYTES, Limits
from simplebus.core.protocol.requests import NamedClass
from simplebus.core.settings import FullPolicy, Retention, Settings
from simplebus.nats.limits import NatsLimits
from simplebus.server.run import ServeOptions
from simplebus.server.tls.certificates import HANDSHAKE_SECONDS


def parse_options(*arguments: str) -> ServerConfig:
    """Return the values of the options of `serve`."""
    configuration = parse_arguments(arguments)
    configuration.raise_errors()
    return configuration.config


def test_option_defaults_equal_server_defaults() -> None:
    config, standard = parse_options(), ServeOptions()
    assert server_settings(config) == Settings()
    assert not config.general.host
    assert standard.hosts == parse.HOSTS
    assert config.general.port == standard.port
    assert config.timeouts.drain_timeout == standard.drain_seconds
    assert config.durability.durability == standard.durability
    assert config.tls.timeout == HANDSHAKE_SECONDS


def test_limits_have_options() -> None:
    for owner in (Limits, NatsLimits, Retention):
        assert set(parse_options().values_of(owner)) == {field.name for field in fields(owner)}


def test_serve_options_reach_the_settings() -> None:
    options = (
        "--ack-timeout 9 --tick 0.25 --full drop_newest --max-memory 4GiB --max-class-memory 2GiB "
        "--max-class-messages 1000 --max-frame 2MiB --max-pending 32MiB --max-connections 5 "
        "--max-total-pending 64MiB --max-classes 6 --hello-timeout 7 --frame-timeout 8 "
        "--stall-timeout 9.5"
    )
    assert server_settings(parse_options(*options.split())) == Settings(
        limits=Limits(
            frame_bytes=2 << 20,
            class_messages=1000,
            class_bytes=2 << 30,
            total_bytes=4 << 30,
            pending_bytes=32 << 20,
            total_pending_bytes=64 << 20,
            connections=5,
            classes=6,
            hello_seconds=7,
            frame_seconds=8,
            stall_seconds=9.5,
        ),
        ack_timeout=9,
        tick_seconds=0.25,
        full_policy=FullPolicy.DROP_NEWEST,
    )


@pytest.mark.parametrize(
    ("arguments", "limits"),
    [
        (["--max-memory", "64MiB"], {"total_bytes": 64 << 20, "class_bytes": 64 << 20}),
        (
            ["--max-memory", "1MiB"],
            {"total_bytes": 1 << 20, "class_bytes": 1 << 20, "frame_bytes": 1 << 19},
        ),
        (
            ["--max-frame", "128MiB"],
            {"frame_bytes": 128 << 20, "pending_bytes": (128 << 20) + RECEIVE_BYTES},
        ),
        (["--max-pending", "2GiB"], {"pending_bytes": 2 << 30, "total_pending_bytes": 2 << 30}),
    ],
)
def test_missing_limits_are_derived_from_given_ones(
    arguments: list[str], limits: dict[str, int]
) -> None:
    assert server_settings(parse_options(*arguments)).limits == Limits(**limits)


@given(st.integers(0, 1 << 50))
def test_printed_size_can_be_parsed(size: int) -> None:
    assert parse.parse_size(parse.format_size(size)) == size


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("65536", 65536),
        ("512KiB", 512 << 10),
        ("1MiB", 1 << 20),
        ("16 mib", 16 << 20),
        (" 2GIB ", 2 << 30),
        ("7B", 7),
    ],
)
def test_sizes_are_parsed(text: str, size: int) -> None:
    assert parse.parse_size(text) == size


@pytest.mark.parametrize("text", ["", "MiB", "1MB", "1.5GiB", "-1", "1 MiB 2", "0x10", "１", "1kk"])
def test_invalid_sizes_are_rejected(text: str) -> None:
    with pytest.raises(typer.BadParameter, match="is not a size"):
        parse.parse_size(text)


@pytest.mark.parametrize("text", ["", "nan", "inf", "-1", "soon"])
def test_invalid_times_are_rejected(text: str) -> None:
    with pytest.raises(typer.BadParameter, match="is not a time"):
        parse.parse_seconds(text)


@pytest.mark.parametrize("text", ["a", "a:", ":1", "a:0", "a:65536", "a:x", "nats://a:1", "a b:1"])
def test_addresses_of_servers_are_checked(text: str) -> None:
    with pytest.raises(typer.BadParameter, match="is no HOST:PORT"):
        parse.parse_server(text)
    assert parse.parse_server("[::1]:4222") == "[::1]:4222"


def test_last_values_classes_are_given_by_id_or_name() -> None:
    last_values = parse_options("--last-values", "7", "--last-values", "state").memory.last_values
    assert list(last_values) == [
        NamedClass(7, last_values=True),
        NamedClass(None, "state", last_values=True),
    ]
    with pytest.raises(typer.BadParameter, match="'a b' is not a class"):
        parse.parse_last_values("a b")


@pytest.mark.parametrize(
    ("text", "start"),
    [
        ("last_values", "last_values"),
        ("waiting", "waiting"),
        ("17", 17),
        ("2026-01-31T08:00+00:00", datetime(2026, 1, 31, 8, tzinfo=UTC)),
    ],
)
def test_start_positions_are_parsed(text: str, start: object) -> None:
    assert parse.parse_start(text) == start


@pytest.mark.parametrize("text", ["", "later", "-1", "9" * 20, "٣"])
def test_invalid_start_positions_are_rejected(text: str) -> None:
    with pytest.raises(
        typer.BadParameter, match=r"is not a start position; write waiting, .* a sequence, or"
    ):
        parse.parse_start(text)


def test_environment_variables_set_options(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SIMPLEBUS_MAX_MEMORY", "2GiB")
    monkeypatch.setenv("SIMPLEBUS_HOST", "127.0.0.1 ::1")
    monkeypatch.setenv("SIMPLEBUS_FULL", "drop_oldest")
    config = parse_options("--port", "7")
    assert config.memory.max_memory == 2 << 30
    assert config.general.host == ("127.0.0.1", "::1")
    assert (config.memory.full, config.general.port) == (FullPolicy.DROP_OLDEST, 7)


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("localhost", "simplebus://localhost:8888"),
        ("simplebus://[::1]:7", "simplebus://[::1]:7"),
        ("127.0.0.1:7", "simplebus://127.0.0.1:7"),
    ],
)
def test_addresses_are_parsed(text: str, url: str) -> None:
    assert parse.parse_url(text) == url


@pytest.mark.parametrize("text", ["http://127.0.0.1:8888", "simplebus://h:port", ""])
def test_invalid_addresses_are_rejected(text: str) -> None:
    with pytest.raises(typer.BadParameter, match="is not a server address"):
        parse.parse_url(text)


@pytest.mark.parametrize("text", [" 0.0.0.0", "::1 ", "::", "bus.example", "fe80::1%eth0"])
def test_hosts_are_parsed(text: str) -> None:
    assert parse.parse_host(text) == text.strip()


@pytest.mark.parametrize("text", ["", " ", "0.0.0.0:99", "localhost:8888", "[::1]"])
def test_invalid_hosts_are_rejected(text: str) -> None:
    with pytest.raises(
        typer.BadParameter, match="is not an address; expected an address to listen on"
    ):
        parse.parse_host(text)
