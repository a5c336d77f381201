"""Exit statuses of commands, and printing of errors.

Each error is one sentence on standard error. Statuses above 2 are those of sysexits.h, whose names
systemd shows.
"""

from __future__ import annotations

from typing import NoReturn

import typer

USAGE_STATUS = 2
"""Invalid options. A retry does not help."""
CONFIG_STATUS = 78
"""Invalid configuration file. A retry does not help."""

UNAVAILABLE_STATUS = 69
"""Cannot listen on an address."""
MEMORY_STATUS = 71
"""Not enough memory to start."""
JOURNAL_STATUS = 74
"""Cannot use the data directory."""
BUSY_STATUS = 75
"""The data directory is used by another server."""


def fail(text: str, *, status: int = 1) -> NoReturn:
    """Print each line of `text` on standard error and end the command with `status`."""
    for line in text.splitlines():
        typer.echo(f"simplebus: {line}", err=True)
    raise typer.Exit(status)


def flatten_errors(error: BaseException) -> list[BaseException]:
    """Return the errors in an exception group, or the error itself."""
    if isinstance(error, BaseExceptionGroup):
        return [leaf for part in error.exceptions for leaf in flatten_errors(part)]
    return [error]


def describe_error(error: BaseException) -> str:
    """Return the message of an error, without an error number."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    if isinstance(error, MemoryError):
        return f"there is not enough memory: {error}".removesuffix(": ")
    return str(error) or type(error).__name__
