"""Variables of the environment that nothing reads are told, by name."""

from __future__ import annotations

from pathlib import Path

import pytest
from programs import program
from typer.testing import CliRunner

from simplebus import cli
from simplebus.commands.config import serve_command_of
from simplebus.config.variables import leave_out_links, unread

SERVE = serve_command_of()


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("SIMPLEBUS_MAX_MEMROY", "SIMPLEBUS_MAX_MEMORY"),
        ("SIMPLEBUS_NATS_TOKNE", "SIMPLEBUS_NATS_TOKEN"),
        ("SIMPLEBUS_ENGINE_PASWORD", "SIMPLEBUS_ENGINE_PASSWORD"),
        ("SIMPLEBUS_PASSWROD", "SIMPLEBUS_PASSWORD"),
        ("SIMPLEBUS_CREDENTIAL", "SIMPLEBUS_CREDENTIALS"),
        ("SIMPLEBUS_BEAUTY", ""),
    ],
)
def test_a_name_that_nothing_reads_is_told_with_the_nearest_that_is(name: str, meant: str) -> None:
    told = f"{name} in the environment is read by nothing"
    assert unread([name, "PATH"], SERVE) == [f"{told}; did you mean {meant}?" if meant else told]


@pytest.mark.parametrize(
    "name",
    [
        *("SIMPLEBUS_PORT", "SIMPLEBUS_NATS_TLS_CERT", "SIMPLEBUS_CONFIG"),  # Options of serve,
        *("SIMPLEBUS_NATS_TOKEN", "SIMPLEBUS_ENGINE_SEED"),  # what else it reads,
        *("SIMPLEBUS_URL", "SIMPLEBUS_HTTP_URL", "SIMPLEBUS_STATUS_SECONDS"),  # other commands,
        *("SIMPLEBUS_TOKEN", "SIMPLEBUS_CREDENTIALS", "SIMPLEBUS_TLS_CA"),  # clients
        *("SIMPLEBUS_FROM_TOKEN", "SIMPLEBUS_TO_CREDENTIALS"),  # and bridges;
        *("SIMPLEBUS_SERVICE_HOST", "SIMPLEBUS_PORT_8888_TCP_ADDR"),  # what Kubernetes sets,
        *("_SIMPLEBUS_COMPLETE", "SIMPLEBUSES"),  # and what is of somebody else.
    ],
)
def test_what_somebody_reads_is_not(name: str) -> None:
    assert unread([name], SERVE) == []


def test_a_server_and_the_check_say_so_and_never_the_value() -> None:
    told = "SIMPLEBUS_TIK in the environment is read by nothing; did you mean SIMPLEBUS_TICK?"
    with program("serve", "--port", "0", SIMPLEBUS_TIK="geheim") as it:
        it.line()
        it.process.terminate()
        status, _, said = it.end()
    assert (status, told in said, "geheim" in said) == (0, True, False)
    done = CliRunner().invoke(cli.app, ["check-config", "/dev/null"], env={"SIMPLEBUS_TIK": "1"})
    assert (done.exit_code, done.output) == (0, f"simplebus: {told}\n/dev/null is fine\n")


def test_where_kubernetes_says_that_a_service_is_is_no_port() -> None:
    at = "tcp://10.96.7.1:8888"
    left = {
        "SIMPLEBUS_NATS_PORT": "4223",
        "SIMPLEBUS_HTTP_PORT": at,  # Nobody says it a second time: it is somebody's mistake.
        "SIMPLEBUS_PORT_8888_TCP": at,
        "PORT": at,
        "PORT_8888_TCP": at,
    }
    environment = {**left, "SIMPLEBUS_PORT": at}
    leave_out_links(environment)
    assert environment == left
    environment["SIMPLEBUS_PORT"] = "tcp://10.96.7.2:8888"
    leave_out_links(environment)
    assert environment["SIMPLEBUS_PORT"] == "tcp://10.96.7.2:8888"


@pytest.mark.parametrize("flag", ["--port", "--nats-port", "--http-port"])
def test_what_is_no_port_is_a_sentence(flag: str) -> None:
    name = "SIMPLEBUS_" + flag[2:].replace("-", "_").upper()
    runner = CliRunner(env={"COLUMNS": "1000"})
    for value in ("tcp://10.96.7.1:8888", "70000", "x", "-1"):
        said = runner.invoke(cli.app, ["serve"], env={name: value})
        assert said.exit_code == 2
        told = (
            f"Invalid value for '{flag}': '{value}' is no port, expected a number from 0 to 65535"
        )
        assert told in said.output
        assert ("Kubernetes sets a variable to that" in said.output) == ("://" in value)


def test_a_server_beside_a_service_of_its_name_is_where_it_was_told_to_be(tmp_path: Path) -> None:
    at, file = "tcp://10.96.7.1:8888", tmp_path / "bus.toml"
    file.write_text("[serve]\nport = 0\n")
    service = {
        "SIMPLEBUS_PORT": at,
        "SIMPLEBUS_PORT_8888_TCP": at,
        "SIMPLEBUS_SERVICE_PORT": "8888",
    }
    with program("serve", "--config", str(file), **service) as it:
        assert "simplebus ready tcp=127.0.0.1:" in it.line()
        it.process.terminate()
        status, _, said = it.end()
    assert (status, "in the environment" in said) == (0, False)
