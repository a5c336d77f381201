"""Variables of the environment that nothing reads are told, by name."""

from __future__ import annotations

import pytest
from programs import program
from typer.testing import CliRunner

from simplebus import cli
from simplebus.commands.config import serve_command_of
from simplebus.config.variables import unread

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
