"""Options of `serve --engine`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from simplebus.cli import app
from simplebus.commands.serve.jetstream_options import engine_options
from simplebus.config.parse import parse_servers
from simplebus.config.server_schema import ServerConfig
from simplebus.core.settings import FullPolicy, Settings
from simplebus.jetstream.settings import JetStreamOptions
from simplebus.net.nats_connection import NatsAddress


def chosen(
    settings: Settings | None = None, environment: dict[str, str] | None = None, **options: Any
) -> JetStreamOptions | None:
    values: dict[str, Any] = {
        "engine": parse_servers("nats://a,b:4333"),
        "engine_prefix": "bus",
        "engine_replicas": 3,
    }
    config = ServerConfig.from_values(values | options)
    return engine_options(config, settings or Settings(), environment or {})


def test_defaults_of_the_settings_are_those_of_the_options() -> None:
    options = chosen(engine_prefix="simplebus", engine_replicas=1)
    assert options == JetStreamOptions(servers=parse_servers("nats://a,b:4333"))


def test_parses_comma_separated_servers() -> None:
    options = chosen()
    assert options is not None
    assert options.servers == (NatsAddress("a"), NatsAddress("b", 4333))
    assert (options.names.stream_name(7), options.replicas) == ("bus_7", 3)
    assert chosen(engine=None) is None
    assert parse_servers(options.servers) == options.servers
    with pytest.raises(typer.BadParameter, match="expected nats://"):
        parse_servers("http://a")


def test_reads_secrets_from_environment() -> None:
    options = chosen(environment={"SIMPLEBUS_ENGINE_TOKEN": "t"})
    assert options is not None
    assert options.credentials is not None
    assert options.credentials.connect_fields("") == {"auth_token": "t"}
    assert "'t'" not in repr(options)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"data_dir": Path("x")}, "--data-dir cannot be combined"),
        ({"engine_prefix": "a.b"}, "--engine-prefix 'a.b'"),
        ({"engine_storage": "tape"}, "storage must be file or memory"),
        ({"engine_ack_wait": 0.1}, "--engine-ack-wait must be at least 1"),
        ({"engine_ca": Path("nowhere.pem")}, "nowhere.pem holds no certificate"),
        ({"settings": Settings(full_policy=FullPolicy.DROP_OLDEST)}, "supports only block"),
        ({"environment": {"SIMPLEBUS_ENGINE_SEED": "SU"}}, "seed"),
    ],
)
def test_invalid_options_raise_clear_errors(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        chosen(**options)


@pytest.mark.parametrize("command", ["serve", "systemd-unit"])
@pytest.mark.parametrize("servers", ["nats://a,nats://u:hunter2@b", "a-token@b"])
def test_rejects_secret_on_command_line(command: str, servers: str) -> None:
    result = CliRunner().invoke(app, [command, "--engine", servers])
    assert result.exit_code == 2
    assert "--engine: the address contains credentials" in result.output
    assert "hunter2" not in result.output


def test_secret_file_must_be_private(tmp_path: Path) -> None:
    file = tmp_path / "bus.toml"
    file.write_text('[serve]\nengine = "nats://u:hunter2@b"\n')
    for mode, is_reported in ((0o644, True), (0o600, False)):
        file.chmod(mode)
        result = CliRunner().invoke(app, ["check-config", str(file)])
        assert result.exit_code == 0
        assert (
            "holds passwords or tokens, and every user may read it" in result.output
        ) == is_reported
