"""How a command says what went wrong.

Rule 1: a sentence on standard error for each thing that is wrong, and an exit status. Those above 2
are of sysexits.h, whose names systemd knows.
"""

from __future__ import annotations

from typing import NoReturn

import typer

USAGE_STATUS = 2
"""Options that make no sense. Trying again does not help."""
CONFIG_STATUS = 78
"""A configuration file with mistakes. Trying again does not help."""


def fail(text: str, *, status: int = 1) -> NoReturn:
    """Say each line on standard error and end the command."""
    for line in text.splitlines():
        typer.echo(f"simplebus: {line}", err=True)
    raise typer.Exit(status)


def sentence(error: BaseException) -> str:
    """What an error says, without its number."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return str(error) or type(error).__name__
