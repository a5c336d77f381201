"""Warnings for environment variables that no setting uses."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer.main
from typer.testing import CliRunner

from simplebus import cli
from simplebus.commands.serve.command import parse_arguments
from simplebus.config.environment import remove_service_links, unread_variables
from tests.support.programs import running_program

ROOT = typer.main.get_command(cli.app)


def warnings_for(names: list[str]) -> list[str]:
    """Return the warnings for environment variables of these names."""
    return unread_variables(names, ROOT)


@pytest.mark.parametrize(
    ("name", "suggestion"),
    [
        ("SIMPLEBUS_MAX_MEMROY", "SIMPLEBUS_MAX_MEMORY"),
        ("SIMPLEBUS_NATS_TOKNE", "SIMPLEBUS_NATS_TOKEN"),
        ("SIMPLEBUS_ENGINE_PASWORD", "SIMPLEBUS_ENGINE_PASSWORD"),
        ("SIMPLEBUS_PASSWROD", "SIMPLEBUS_PASSWORD"),
        ("SIMPLEBUS_CREDENTIAL", "SIMPLEBUS_CREDENTIALS"),
        ("SIMPLEBUS_BEAUTY", ""),
    ],
)
def test_unknown_variable_is_reported_with_suggestion(name: str, suggestion: str) -> None:
    expected_warning = f"no command reads {name} in the environment"
    assert warnings_for([name, "PATH"]) == [
        f"{expected_warning}; did you mean {suggestion}?" if suggestion else expected_warning
    ]


@pytest.mark.parametrize(
    "name",
    [
        *("SIMPLEBUS_PORT", "SIMPLEBUS_NATS_TLS_CERT", "SIMPLEBUS_CONFIG"),  # Options of serve,
        *("SIMPLEBUS_NATS_TOKEN", "SIMPLEBUS_ENGINE_SEED"),  # other variables of serve,
        *("SIMPLEBUS_URL", "SIMPLEBUS_HTTP_URL", "SIMPLEBUS_STATUS_SECONDS"),  # other commands,
        *("SIMPLEBUS_TOKEN", "SIMPLEBUS_CREDENTIALS", "SIMPLEBUS_TLS_CA"),  # clients
        *("SIMPLEBUS_FROM_TOKEN", "SIMPLEBUS_TO_CREDENTIALS"),  # and bridges;
        *("SIMPLEBUS_SERVICE_HOST", "SIMPLEBUS_PORT_8888_TCP_ADDR"),  # what Kubernetes sets,
        *("_SIMPLEBUS_COMPLETE", "SIMPLEBUSES"),  # and variables of other programs.
    ],
)
def test_known_variables_are_not_reported(name: str) -> None:
    assert warnings_for([name]) == []


def test_unknown_variables_are_reported_without_values() -> None:
    expected_warning = (
        "no command reads SIMPLEBUS_TIK in the environment; did you mean SIMPLEBUS_TICK?"
    )
    with running_program("serve", "--port", "0", SIMPLEBUS_TIK="geheim") as program:
        program.read_line()
        program.process.terminate()
        status, _, stderr = program.wait()
    assert (status, expected_warning in stderr, "geheim" in stderr) == (0, True, False)
    result = CliRunner().invoke(cli.app, ["check-config", "/dev/null"], env={"SIMPLEBUS_TIK": "1"})
    assert (result.exit_code, result.output) == (
        0,
        f"simplebus: {expected_warning}\n/dev/null is valid\n",
    )


def test_kubernetes_service_variables_are_ignored() -> None:
    service_address = "tcp://10.96.7.1:8888"
    unknown_names = {
        "SIMPLEBUS_NATS_PORT": "4223",
        "SIMPLEBUS_HTTP_PORT": service_address,  # The warning is not repeated.
        "SIMPLEBUS_PORT_8888_TCP": service_address,
        "PORT": service_address,
        "PORT_8888_TCP": service_address,
    }
    environment = {**unknown_names, "SIMPLEBUS_PORT": service_address}
    remove_service_links(environment)
    assert environment == unknown_names
    environment["SIMPLEBUS_PORT"] = "tcp://10.96.7.2:8888"
    remove_service_links(environment)
    assert environment["SIMPLEBUS_PORT"] == "tcp://10.96.7.2:8888"


@pytest.mark.parametrize("name", ["SIMPLEBUS_PORT", "SIMPLEBUS_NATS_PORT", "SIMPLEBUS_HTTP_PORT"])
def test_invalid_port_prints_one_sentence(name: str) -> None:
    for value in ("tcp://10.96.7.1:8888", "70000", "x", "-1"):
        result = CliRunner().invoke(cli.app, ["serve"], env={name: value})
        expected_error = (
            f"simplebus: {name}: '{value}' is not a port; expected a number from 0 to 65535"
        )
        assert (result.exit_code, result.output.startswith(expected_error)) == (2, True)
        assert result.output.count("\n") == 1


@pytest.mark.parametrize(
    ("name", "value", "expected_error"),
    [
        ("SIMPLEBUS_VERBOSE", "maybe", "it should be true or false, got 'maybe'"),
        ("SIMPLEBUS_TICK", "soon", "'soon' is not a time"),
        ("SIMPLEBUS_MAX_CLASSES", "x", "it should be a valid integer, got 'x'"),
        (
            "SIMPLEBUS_LOG_LEVEL",
            "INFO",
            "'INFO' is not one of 'debug', 'info', 'warning', 'error'; did you mean 'info'?",
        ),
    ],
)
def test_invalid_variable_is_reported_by_name(name: str, value: str, expected_error: str) -> None:
    result = CliRunner().invoke(cli.app, ["serve"], env={name: value})
    assert result.exit_code == 2
    assert result.output.startswith(f"simplebus: {name}: {expected_error}")


def test_invalid_variable_of_other_command_is_reported() -> None:
    result = CliRunner().invoke(cli.app, ["dlq", "ls", "1"], env={"SIMPLEBUS_URL": "http://x"})
    assert result.exit_code == 2
    assert result.output.startswith("simplebus: SIMPLEBUS_URL: 'http://x' is not a server address")


def test_check_reports_all_invalid_variables(tmp_path: Path) -> None:
    file = tmp_path / "bus.toml"
    file.write_text("[serve]\nport = 'x'\n")
    environment = {
        "SIMPLEBUS_HTTP_PORT": "abc",
        "SIMPLEBUS_VERBOSE": "maybe",
        "SIMPLEBUS_TLS_KEY": "/nowhere.pem",
    }
    result = CliRunner().invoke(cli.app, ["check-config", str(file)], env=environment)
    assert (result.exit_code, result.output.splitlines()) == (
        78,
        [
            f"simplebus: {file}:2: serve.port: 'x' is not a port; expected a number from 0 "
            "to 65535",
            "simplebus: SIMPLEBUS_VERBOSE: it should be true or false, got 'maybe'",
            "simplebus: SIMPLEBUS_HTTP_PORT: 'abc' is not a port; expected a number from 0 "
            "to 65535",
            "simplebus: SIMPLEBUS_TLS_KEY needs SIMPLEBUS_TLS_CERT too",
        ],
    )


def test_command_line_overrides_invalid_variable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SIMPLEBUS_PORT", "x")
    configuration = parse_arguments(["--port", "7"])
    configuration.raise_errors()
    assert configuration.config.general.port == 7


def test_server_beside_kubernetes_service_keeps_its_port(tmp_path: Path) -> None:
    service_address, file = "tcp://10.96.7.1:8888", tmp_path / "bus.toml"
    file.write_text("[serve]\nport = 0\n")
    service = {
        "SIMPLEBUS_PORT": service_address,
        "SIMPLEBUS_PORT_8888_TCP": service_address,
        "SIMPLEBUS_SERVICE_PORT": "8888",
    }
    with running_program("serve", "--config", str(file), **service) as program:
        assert "simplebus ready tcp=127.0.0.1:" in program.read_line()
        program.process.terminate()
        status, _, stderr = program.wait()
    assert (status, "in the environment" in stderr) == (0, False)
