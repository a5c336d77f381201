"""Arguments and error messages of `simplebus pipeline`, without Spark."""

from __future__ import annotations

import subprocess
import sys

import pytest
from typer.testing import CliRunner

from simplebus import cli
from simplebus.spark.commands import MODULES, shared
from tests.support.programs import environment

NEEDED = {
    "archive": ("--subscribe", "1", "--to", "there"),
    "report": ("there",),
    "compact": ("there",),
    "replay": ("there",),
    "dead-letters": ("--subscribe", "1"),
}
"""What a command cannot do without."""


def invoke(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(cli.app, ["pipeline", *arguments], env=environment())
    return result.exit_code, result.stdout, result.stderr


@pytest.mark.parametrize("name", MODULES)
def test_command_help_has_an_example(name: str) -> None:
    status, output, _ = invoke(name, "--help")
    assert status == 0
    assert f"\n   simplebus pipeline {name}" in output
    assert name in invoke("--help")[1]


def test_help_does_not_wait_for_spark() -> None:
    code = (
        "import sys; from typer.testing import CliRunner; from simplebus import cli\n"
        f"for name in {list(MODULES)}:\n"
        "    assert CliRunner().invoke(cli.app, ['pipeline', name, '--help']).exit_code == 0\n"
        "heavy = {'pyspark', 'pyarrow', 'pandas', 'numpy', 'deltalake', 'matplotlib'}\n"
        "sys.exit(str(heavy & set(sys.modules)) if heavy & set(sys.modules) else 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, env=environment())


@pytest.mark.parametrize("name", NEEDED)
def test_commands_without_spark_name_the_package(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared, "find_spec", lambda module: None)
    assert invoke(name, *NEEDED[name]) == (1, "", f"simplebus: {shared.NEEDS_SPARK}\n")


@pytest.mark.parametrize("name", NEEDED)
def test_commands_without_java_report_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAVA_HOME", "/nowhere")
    status, output, errors = invoke(name, *NEEDED[name])
    assert (status, output) == (1, "")
    assert errors.startswith("simplebus: JAVA_HOME is /nowhere, where there is no Java")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("nonsense", "No such command 'nonsense'"),
        ("archive --to x", "expected either --subscribe or --subscribe-pattern, got neither"),
        (
            "archive --to x --subscribe 1 --subscribe-pattern .*",
            "expected either --subscribe or --subscribe-pattern, got both",
        ),
        ("archive --to x --subscribe 1 --partition-by month", "'month'"),
        ("archive --to x --subscribe 1 --trigger never", "neither once nor seconds above 0"),
        ("archive --to x --subscribe 1 --trigger 0", "neither once nor seconds above 0"),
        ("archive --to x --subscribe 1 --set spark.ui", "'spark.ui' is not KEY=VALUE"),
        ("archive --to x --subscribe 1 --channel a..b", "segment 2"),
        ("archive --to x --subscribe 1 --format csv", "'csv'"),
        (
            "archive --to x --subscribe 1 --path a --servers b",
            "expected either --servers or --path, got both",
        ),
        ("report", "Missing argument"),
        ("report x --step 0", "Invalid value for '--step'"),
        (
            "report x --chart /nowhere/x.png",
            "--chart /nowhere/x.png: the folder /nowhere does not exist",
        ),
        ("report x --figures /tmp", "--figures /tmp exists already; expected a new folder"),
        ("compact", "Missing argument 'PATH'"),
        ("compact x --before yesterday", "expected a day such as 2026-11-01, got 'yesterday'"),
        ("compact x --target-bytes 0", "expected a size above 0, got '0'"),
        ("replay x --from noon", "expected a time such as 2026-11-21T08:00"),
        ("replay x --speed 0", "'--speed'"),
    ],
)
def test_invalid_arguments_are_rejected(arguments: str, sentence: str) -> None:
    status, output, errors = invoke(*arguments.split())
    assert (status, output) == (2, "")
    assert sentence in " ".join(errors.replace("│", " ").split())
