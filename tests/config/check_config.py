"""Runs `simplebus check-config`."""

from __future__ import annotations

from pathlib import Path

from typer.testing import CliRunner

from simplebus import cli


def check_config(file: Path) -> tuple[int, str]:
    """Return the exit status and the output of `simplebus check-config`."""
    result = CliRunner().invoke(cli.app, ["check-config", str(file)])
    return result.exit_code, result.output
