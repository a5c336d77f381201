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

UNAVAILABLE_STATUS = 69
"""An address cannot be listened on."""
MEMORY_STATUS = 71
"""There is not enough memory to begin."""
JOURNAL_STATUS = 74
"""The data directory cannot be used."""
BUSY_STATUS = 75
"""Another server uses the data directory."""


def fail(text: str, *, status: int = 1) -> NoReturn:
    """Say each line on standard error and end the command."""
    for line in text.splitlines():
        typer.echo(f"simplebus: {line}", err=True)
    raise typer.Exit(status)


def leaves(error: BaseException) -> list[BaseException]:
    """The errors in a group of errors, or the error itself."""
    if isinstance(error, BaseExceptionGroup):
        return [leaf for part in error.exceptions for leaf in leaves(part)]
    return [error]


def sentence(error: BaseException) -> str:
    """What an error says, without its number."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    if isinstance(error, MemoryError):
        return f"there is not enough memory: {error}".removesuffix(": ")
    return str(error) or type(error).__name__
